//! What an engine calls to keep KV: so far what its decisions go by.

pub mod admission;
pub mod calibrate;
pub mod events;
pub mod path;
pub mod plan;
pub mod queues;
