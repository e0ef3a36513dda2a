//! `adakv`: `snapkv` where the heads of a layer share their budget (Feng et al., 2024).
//!
//! Parameters are those of `snapkv`, and `safe` (20%). With a budget of n tokens for each head,
//! each head keeps its best `n * safe` tokens, rounded down. Of the other tokens of the layer, the
//! lowest scores are evicted until n tokens for each head are left on average. Heads then keep
//! different numbers of tokens, so sums of attention with one token count for all heads are
//! rejected after the eviction.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::snapkv::{Budget, Snapkv};

/// Parameters of `adakv`, beside those of `snapkv`.
pub const PARAMS: &[Param] = &[Param::new(
    "safe",
    "share of the budget that each head has for itself; heads share the rest",
)];

/// Reads the parameters of `adakv`.
pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Snapkv> {
    let safe = reader.f64("safe", 0.2, 0.0..=1.0)?;
    Snapkv::with(reader, shape, Budget::Ada(safe))
}
