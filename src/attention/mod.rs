//! Attention on the processor: dense, sparse and decode kernels, page scores. They compute
//! and decide nothing: what is computed is said by an index, and by how many threads by the
//! caller.
//!
//! A kernel is a *job*: made of a checked [`Problem`] and memory for results, it says how many
//! items it has and how many numbers of scratch each thread needs; any thread may run any
//! item, each item once. Running allocates nothing; what no problem within some [`Limits`] needs
//! more of, each kernel's `workspace` says before there is one.
//!
//! - [`Prefill`]: a prompt or a part of one, dense or by [`Keys`]. Keys may come in pieces, each
//!   with the position that it begins at: what they come to is put together by [`merge()`].
//! - [`ColumnSums`]: what each key got of the attention of a prompt's queries, dense or by [`Keys`].
//! - [`Decode`]: the next token or a few, over all keys or some; with what each key got.
//! - [`pages`]: what pages of keys are like, and their scores.
//!
//! # Bits
//!
//! Keys are taken in ascending tiles of 64 of those that are selected, and cut by numbers
//! that do not depend on threads: equal work gives equal bits. In a prefill what becomes of a
//! query does not depend on the others, so a prompt in parts gives the bits of the whole one,
//! and selecting all keys those of dense attention. Processors of different levels
//! ([`Level`]), prefill and decode, and merged parts agree within bounds, not in bits.
//!
//! # Bounds
//!
//! Sums are of f32, whatever is read. With u = 2^-24, D numbers of a head, n keys that a query
//! sees, and A the largest sum over d of `|q[d] * k[d]| * scale` of them, results differ from
//! exact ones by up to
//!
//! ```text
//! E = u * (4 * (D + 8) * A + 3 * n + 16)
//! ```
//!
//! times the largest value, a log-sum-exp by E and 4 u of its own size; to first order, as long
//! as E is much smaller than 1. That is the worst case: what is seen is some hundredths of it.
//! Merging adds E of its parts. Page scores differ by up to `2 u * (D + 1)` times the sum of
//! sizes of their products. Numbers that are not finite give some result, never a fault:
//! [`check_finite`] finds them before.

pub mod column_sums;
pub mod decode;
pub mod dot;
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
