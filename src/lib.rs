//! kvtier: tiered KV-cache storage, weight streaming, eviction and sparse policies for LLM engines,
//! behind a C interface.
//!
//! The modules from the top layer to the lowest; imports point down only (`tests/arrows.rs`):
//!
//! - [`api`]: the interface for engines in Rust. All other modules are internals.
//! - [`ffi`]: the C boundary: guards, handles, sized structs; one file for each noun of the header.
//! - [`trace`]: request traces: readers, generators, and replay on policies.
//! - [`store`]: sessions, plans, and the state machine that decides where each cell is resident.
//! - [`offload`]: layer-wise offload of one sequence's KV, with sparse policies.
//! - [`stream`]: weights larger than memory: model files, plans, a pipeline.
//! - [`policy`]: eviction policies: one file each, one registry.
//! - [`sparse`]: sparse policies (which blocks and tokens matter): one file each, one registry.
//! - [`tier`]: storage of cells: host memory, disk, device memory, remote.
//! - [`attention`]: attention kernels for the processor.
//! - [`device`]: copies and kernels of devices: host, simulated, CUDA, the engine's own.
//! - [`format`]: formats on disk and on the wire: keys, records, seals, codecs.
//! - [`io`]: files, sockets, TLS, and probes of the machine.
//! - [`meta`]: facts without payload: objects, prefix trees, layouts, recompute cost.
//! - [`base`]: runtime, ops and queues, budget, memory, clock, locks, specs.

#![warn(clippy::all)]
// `n % m == 0` is the common form.
#![allow(clippy::manual_is_multiple_of)]

#[cfg(panic = "abort")]
compile_error!("kvtier turns panics into KVT_E_PANIC: build it with panic = \"unwind\"");

#[cfg(not(feature = "shuttle"))]
pub mod api;
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
