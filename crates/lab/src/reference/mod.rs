//! The reference engine: a small transformer over the kernels and sparse policies of the library,
//! with trained weights. Tests compare it with torch and with itself (`tests/sparse/reference`);
//! `kvtier lab sparse` measures with it what a budget of tokens costs.

pub mod attend;
pub mod cache;
pub mod chance;
pub mod engine;
pub mod model;
pub mod numbers;
pub mod policies;
pub mod quality;
pub mod random;
pub mod rows;
pub mod specs;
pub mod text;
