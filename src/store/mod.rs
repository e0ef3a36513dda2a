//! Keeps KV: what an engine calls ([`handle`]), the state machine that decides where each cell is
//! ([`state`]), and the workers' code that moves bytes ([`executor`]).

pub mod admission;
pub mod calibration;
pub mod capacity;
pub mod control;
pub mod event_feed;
pub mod events;
pub mod executor;
pub mod fields;
pub mod handle;
pub mod job_queues;
pub mod plan;
pub mod prefill;
pub mod ready_event;
mod remote_open;
pub mod remote_spec;
pub mod spec;
pub mod state;
pub mod token_path;
