//! Weight streaming: models larger than memory.
//!
//! Modules by level; a module imports lower levels only (`tests/arrows.rs`):
//!
//! | level | module | content |
//! |---|---|---|
//! | 6 | [`streamer`] | opens a model, runs the threads that read and copy, grants leases |
//! | 5 | [`memory`] | memory of slots, staging and resident units |
//! | 4 | [`scheduler`] | decides which unit is loaded next, into which slot; no threads, no clock |
//! | 3 | [`plan`] | residency of each unit, slots, budgets, forecast; a pure function |
//! | 2 | [`checksums`] | checksums of units, and their file |
//! | 1 | [`units`] | which bytes belong together: layers, experts, embedding; their chunks |
//! | 0 | [`model`] | tensors in GGUF and safetensors files |
//!
//! A plan gives each unit a *residency*: device memory, host memory, or the file alone. A unit that
//! is not resident where it is used passes through a *slot*:
//!
//! ```text
//!              acquire, hint, or the window            last chunk
//!   in the file ------------------------> loading ------------------> ready
//!        ^                                 |   |                       |  ^
//!        |        canceled or failed       |   | lease granted when    |  |
//!        +---------------------------------+   | all copies are issued |  |
//!        |                                     v                       v  |
//!        |                                   leased <---- acquire -----+  |
//!        |                                     | release of the last lease |
//!        |                                     +---------------------------+
//!        +--- evicted: the slot is granted to another unit (from ready, without references)
//! ```
//!
//! States of a slot:
//!
//! ```text
//!   free ---- granted to a load ----> referenced ---- last reference removed ----> evictable
//!    ^                                  ^    |                                       |   |
//!    |          load canceled or failed |    |   lease, window or hint adds one      |   |
//!    +----------------------------------|----+        +------------------------------+   |
//!                                       +-------------+--- victim: granted to a load ----+
//! ```
//!
//! A slot that was released with a device event may be granted at once; the first write to it waits
//! for that event.

pub mod checksums;
pub mod memory;
pub mod model;
pub mod plan;
pub mod scheduler;
pub mod streamer;
pub mod units;
