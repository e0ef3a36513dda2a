//! Simulated model files, and the contract of all model files.

pub mod faults;
pub mod simulated;

#[cfg(all(test, not(feature = "shuttle")))]
mod contract;
