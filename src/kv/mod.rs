//! What an engine calls to keep KV: what decides where it is, and the hands that
//! move it.

pub mod admission;
pub mod behind;
pub mod calibrate;
pub mod capacity;
mod coder;
pub mod control;
pub mod core;
pub mod errands;
pub mod events;
pub mod feed;
pub mod fields;
pub mod hands;
pub mod path;
pub mod plan;
pub mod prefill;
pub mod queues;
pub mod ready;
mod remote_open;
pub mod remote_spec;
pub mod spec;
pub mod store;
mod verify;
