//! Experiments with kvtier's traces and policies; not a part of the library.
//!
//! - [`scale`]: simulation of many engines on one remote.
//! - [`tiers`]: cost of a hit in each tier.
//! - [`explain`]: explanation of one decision of a policy.
//! - [`experts`]: eviction policies for the experts of a model, on a routing trace.
//! - [`reference`]: a small transformer on the library's kernels and sparse policies.
//!
//! Traces, their readers and generators, and replay are in the library (`kvtier::trace`), since the
//! C interface exports them.

pub mod experts;
pub mod explain;
pub mod reference;
pub mod scale;
pub mod tiers;
