//! Data that threads share, under a model checker that picks the interleavings: `cargo test
//! --no-default-features --features shuttle --test shuttle`.
#![cfg(feature = "shuttle")]
#![allow(missing_docs)]

mod disk_tier;
mod ring;
mod runtime;
mod store_core;
