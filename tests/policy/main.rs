//! Eviction policies against models and other implementations.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod models;
mod oracle;
mod regressions;
