//! Tests of the command line tool.
#![allow(missing_docs)]

mod control;
mod device;
mod exporter;
mod fsck;
mod lab;
mod lab_scale;
mod manual;
mod plan;
mod remote;
mod run;
mod s3;
mod serve;
mod spans;
mod sparse;
mod stream;
