//! Keeps KV: what an engine calls ([`handle`]), the state machine that decides where each cell is
//! ([`state`]), and the workers' code that moves bytes ([`executor`]).

pub mod admission;
pub mod bundle;
pub mod capacity;
pub mod control;
pub mod counters;
pub mod events;
pub mod executor;
pub mod guards;
pub mod handle;
pub mod job_queues;
pub mod plan;
pub mod pool;
pub mod ready_event;
mod server;
pub mod spec;
pub mod state;
pub mod token_path;
pub mod transfer_log;
