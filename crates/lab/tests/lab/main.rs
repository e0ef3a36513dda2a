//! Traces and their readers, replay, and the scale study.
#![allow(missing_docs)]

mod readers;
mod scale;
mod traces;
