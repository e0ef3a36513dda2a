//! The reference engine: a small transformer with trained weights on the library's kernels and
//! sparse policies. Tests compare it with torch and with itself (`tests/sparse/reference`). `kvtier
//! lab sparse` measures the quality of a token budget with it.

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
