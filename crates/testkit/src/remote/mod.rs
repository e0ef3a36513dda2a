//! A remote in memory that fails as told, and the suite that every remote is put to.

pub mod conformance;
pub mod simulated;

#[cfg(all(test, feature = "dir"))]
mod dir_tests;
#[cfg(all(test, feature = "seal"))]
mod seal_tests;
