//! What an engine calls to keep KV: plans, and what they go by.

pub mod calibrate;
pub mod plan;
