//! Model files that exist in memory only, and the contract of all files of models.

pub mod faults;
pub mod simulated;

#[cfg(all(test, not(feature = "shuttle")))]
mod contract;
