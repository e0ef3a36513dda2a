//! The command line tool as its users call it.
#![allow(missing_docs)]

mod control;
mod device;
mod fsck;
mod lab;
mod lab_scale;
mod plan;
mod remote;
mod s3;
mod sparse;
mod stream;
