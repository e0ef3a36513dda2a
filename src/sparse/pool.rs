//! Mean-pools rows: each block of rows becomes one row.

use crate::attention::Rows;
use crate::base::status::Result;
use crate::sparse::numbers::{read, zeros};
use crate::sparse::prefill_inputs::not_finite;

/// Divisor of the sum of an incomplete block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divisor {
    /// Rows of a full block: missing rows count as zeros.
    Full,
    /// Rows that are present.
    Present,
}

/// Puts the mean of each `block` rows of a head into `out`.
pub fn pool(
    rows: &Rows<'_>,
    head: u32,
    block: u32,
    divisor: Divisor,
    out: &mut Vec<f32>,
) -> Result<()> {
    let (dim, tokens) = (rows.dim() as usize, rows.tokens());
    zeros(out, tokens.div_ceil(block) as usize * dim)?;
    let mut row = Vec::new();
    zeros(&mut row, dim)?;
    for (at, mean) in out.chunks_exact_mut(dim).enumerate() {
        let first = at as u32 * block;
        let end = first.saturating_add(block).min(tokens);
        for token in first..end {
            if !read(rows, token, head, &mut row) {
                return Err(not_finite("rows"));
            }
            mean.iter_mut().zip(&row).for_each(|(sum, x)| *sum += x);
        }
        let n = if divisor == Divisor::Full { block } else { end - first };
        mean.iter_mut().for_each(|sum| *sum *= 1.0 / n as f32);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::numbers::testing;

    #[test]
    fn pool_averages_blocks_of_rows() {
        let numbers: Vec<f32> = (0..20).map(|n| n as f32).collect();
        let rows = testing::rows(&numbers, 2, 2);
        let mut out = Vec::new();
        pool(&rows, 1, 2, Divisor::Present, &mut out).expect("finite");
        assert_eq!(out, [4.0, 5.0, 12.0, 13.0, 18.0, 19.0]);
        pool(&rows, 1, 2, Divisor::Full, &mut out).expect("finite");
        assert_eq!(out, [4.0, 5.0, 12.0, 13.0, 9.0, 9.5]);
        let bad = [0.0, f32::NAN];
        assert!(pool(&testing::rows(&bad, 1, 2), 0, 4, Divisor::Present, &mut out).is_err());
    }
}
