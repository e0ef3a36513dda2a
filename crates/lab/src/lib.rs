//! The laboratory over kvtier's traces and policies, and no part of the library:
//!
//! - [`scale`]: many engines on one remote, simulated.
//! - [`tiers`]: what a hit costs in each tier.
//! - [`explain`]: one decision of a policy, and why.
//! - [`reference`]: a small transformer over the library's kernels and sparse policies.
//!
//! Traces, their readers and generators, and replay are in the library (`kvtier::trace`),
//! since C exports them.

pub mod explain;
pub mod reference;
pub mod scale;
pub mod tiers;
