//! Attention kernels for CPUs: dense, sparse and decode kernels, and page scores. Kernels compute
//! and decide nothing: an index selects the keys, and the caller chooses the number of threads.
//!
//! A kernel is a *job*, made of a checked [`Problem`] and memory for results. The job says how many
//! work items it has, and how much scratch each thread needs. Any thread may run any item, each
//! item once. Running allocates nothing. Before there is a problem, each kernel's `workspace` says
//! how much memory suffices within some [`Limits`].
//!
//! - [`Prefill`]: a prompt or a part of one, dense or by [`Keys`]. Keys may come in pieces, each
//!   with its first position; [`merge()`] merges the results.
//! - [`ColumnSums`]: attention of a prompt's queries to each key, dense or by [`Keys`].
//! - [`Decode`]: the next token or a few, over all or selected keys, with attention to each key.
//! - [`pages`]: bounding boxes of pages of keys, and their scores.
//!
//! # Bits
//!
//! Selected keys are handled in ascending tiles of 64 and split by numbers that do not depend on
//! threads: equal work gives equal bits. In a prefill the result of a query does not depend on
//! other queries. A prompt in parts gives the bits of the whole prompt, and selecting all keys
//! gives those of dense attention. Processors of different levels ([`Level`]), prefill and decode,
//! and merged parts agree within bounds, not in bits.
//!
//! # Bounds
//!
//! Sums are computed in f32, whatever type is read. Where both factors are bf16, decode and page
//! scores may count numbers below 2^-126 as 0. With u = 2^-24, D numbers of a head, n keys
//! that a query sees, and A the largest sum over d of `|q[d] * k[d]| * scale` of them, results
//! differ from exact ones by up to
//!
//! ```text
//! E = u * (4 * (D + 8) * A + 3 * n + 16)
//! ```
//!
//! times the largest value, and a log-sum-exp by E plus 4 u of its own size; to first order, as
//! long as E is much smaller than 1. That is the worst case: observed errors are some hundredths of
//! it. Merging adds E of its parts. Page scores differ by up to `2 u * (D + 1)` times the sum of
//! the magnitudes of their products. Numbers that are not finite give arbitrary results, never a
//! fault: [`check_finite`] finds them first.

pub mod column_sums;
pub mod decode;
pub mod dot;
pub mod dot_bf16;
pub mod element;
pub mod key_cursor;
pub mod keys;
pub mod kv_split;
pub mod lanes;
pub mod level;
pub mod limits;
pub mod merge;
pub mod narrow;
pub mod pages;
pub mod panel;
pub mod prefill;
pub mod problem;
pub mod rows;
pub mod visibility;

pub use column_sums::ColumnSums;
pub use decode::Decode;
pub use keys::{Head, Keys, Kind};
pub use level::Level;
pub use limits::{Limits, Workspace};
pub use merge::merge;
pub use prefill::Prefill;
pub use problem::{Problem, check_finite};
pub use rows::{Rows, Scales};
