//! Tests of traces and their readers, replay, and the simulation of many engines.
#![allow(missing_docs)]

mod experts;
mod readers;
mod scale;
mod traces;
