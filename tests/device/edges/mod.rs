//! Devices where a driver, an engine or a caller does what is rare: memory that is registered in
//! parts, drivers that stand still or do not answer, engines whose device goes while one waits,
//! and devices that are closed while others are in them.

mod cuda;
mod ends;
mod foreign;
