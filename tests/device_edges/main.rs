//! Devices where a driver, an engine or a caller does what is rare: memory that is registered in
//! parts, drivers that stand still or do not answer, engines whose device goes while one waits,
//! and devices that are closed while others are in them.

#![cfg(not(feature = "shuttle"))]

mod cuda;
mod ends;
#[path = "../support/fake_cuda.rs"]
mod fake_cuda;
mod foreign;
