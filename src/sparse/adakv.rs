//! `adakv`: `snapkv` where the heads of a layer share their budget (Feng et al., 2024).
//!
//! Parameters are those of `snapkv`, and `safe` (20%). With a budget of n tokens a head, each
//! head is sure of its best `n * safe`, rounded down; of all others of the layer the lowest go,
//! until n a head are left in the mean. So heads keep different numbers of tokens, and from
//! then on attention to one number of tokens for all cannot be told.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::snapkv::{Budget, Snapkv};

/// Reads `adakv` with its parameters.
pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Snapkv> {
    let safe = reader.f64("safe", 0.2, 0.0..=1.0)?;
    Snapkv::with(reader, shape, Budget::Ada(safe))
}
