//! A simulated remote with planned faults, and the conformance suite of remotes.

pub mod conformance;
pub mod simulated;

#[cfg(all(test, feature = "dir"))]
mod dir_tests;
#[cfg(all(test, feature = "seal"))]
mod seal_tests;
