//! The reference engine: a small transformer over the kernels and sparse policies of the library,
//! with trained weights. Tests take it from here (`tests/reference`); `kvtier lab sparse` says by it
//! what a budget costs. No part of the library.

// Tests and the tool use some of it each.
#![allow(dead_code)]

pub mod attend;
pub mod cache;
pub mod chance;
pub mod engine;
pub mod model;
pub mod numbers;
pub mod policies;
pub mod quality;
pub mod rows;
pub mod specs;
pub mod text;
