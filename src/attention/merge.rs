//! Merges partial results of the same queries by their log-sum-exps.

use crate::base::status::Result;
use crate::fail;

/// Merges results over other keys into `out` and `lse`: rows of `dim` numbers, and one log-sum-exp
/// a row. Rows for which neither saw a key stay empty.
pub fn merge(out: &mut [f32], lse: &mut [f32], other: &[f32], other_lse: &[f32]) -> Result<()> {
    let (rows, numbers) = (lse.len(), out.len());
    if rows != other_lse.len() || numbers != other.len() || (rows == 0) != (numbers == 0) {
        fail!(
            Invalid,
            "{rows} rows of {numbers} numbers cannot merge with {} of {}",
            other_lse.len(),
            other.len()
        );
    }
    if rows == 0 {
        return Ok(());
    }
    let dim = numbers / rows;
    if dim * rows != numbers {
        fail!(Invalid, "{numbers} numbers do not divide into {rows} rows");
    }
    let results = out.chunks_exact_mut(dim).zip(other.chunks_exact(dim));
    for ((out, other), (lse, &of)) in results.zip(lse.iter_mut().zip(other_lse)) {
        let most = lse.max(of);
        if most == f32::NEG_INFINITY {
            continue;
        }
        let (a, b) = ((*lse - most).exp(), (of - most).exp());
        let (a, b, sum) = (a / (a + b), b / (a + b), a + b);
        out.iter_mut().zip(other).for_each(|(x, y)| *x = *x * a + y * b);
        *lse = most + sum.ln();
    }
    Ok(())
}
