//! kvtier: tiered KV-cache storage, weight streaming and every eviction and
//! sparse policy behind one stable C header.
//!
//! The map, one floor a line; imports point down only (`tests/arrows.rs`):
//!
//! - [`ffi`]: the C boundary. Guards, handles, sized structs, one file a noun.
//! - [`trace`]: request traces: readers, generators, and policies replayed on them.
//! - [`store`]: keeps KV: sessions, plans, and the state machine that decides where each cell is.
//! - [`offload`]: KV of one sequence layer by layer, with sparse policies.
//! - [`stream`]: weights larger than memory: model files, plans, a pipeline.
//! - [`policy`]: who leaves first. One file a policy, one registry.
//! - [`sparse`]: which blocks and tokens matter. One file a policy, one registry.
//! - [`tier`]: where bytes rest.
//! - [`attention`]: kernels on the processor.
//! - [`device`]: who copies bytes (host memory today).
//! - [`format`]: what is written down for others to read: keys, records.
//! - [`io`]: what files and kernels can do on this machine.
//! - [`meta`]: facts without payload. Objects, their tree, recompute cost.
//! - [`base`]: runtime, ops and queues, budget, memory, clock, locks, specs.

#![warn(clippy::all)]
// `n % m == 0` is what everybody reads.
#![allow(clippy::manual_is_multiple_of)]

#[cfg(panic = "abort")]
compile_error!("kvtier turns panics into KVT_E_PANIC: build it with panic = \"unwind\"");

pub mod attention;
pub mod base;
pub mod device;
#[cfg(not(feature = "shuttle"))]
pub mod ffi;
pub mod format;
pub mod io;
pub mod meta;
pub mod offload;
pub mod policy;
pub mod sparse;
pub mod store;
pub mod stream;
pub mod tier;
pub mod trace;
