//! Recompute cost of KV.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;

/// The cost to compute tokens after a context: a constant per token, plus a part that grows with
/// the tokens it attends to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Cost per token and token of context.
    pub alpha: f64,
    /// Cost per token.
    pub beta: f64,
}

impl Default for Cost {
    /// A model of the 70B class: attention costs as much as everything else at a context of 53,800
    /// tokens.
    fn default() -> Cost {
        Cost { alpha: 1.0 / 53_800.0, beta: 1.0 }
    }
}

impl Cost {
    /// Parameters that [`Cost::read`] reads.
    pub const PARAMS: &[Param] = &[
        Param::new("alpha", "recompute cost per token and token of context").default_is("1/53800"),
        Param::new("beta", "recompute cost per token"),
    ];

    /// The cost of `tokens` tokens after `context` earlier ones: the exact sum over tokens, with
    /// the attention of the tokens to each other.
    #[inline]
    pub fn of(&self, context: u64, tokens: u64) -> f64 {
        self.of_floats(context as f64, tokens as f64)
    }

    /// The same with floating-point numbers.
    #[inline]
    pub fn of_floats(&self, l: f64, n: f64) -> f64 {
        n * self.beta + self.alpha * (n * l + n * n / 2.0)
    }

    /// The cost of the first `tokens` tokens: `of(0, tokens)`.
    #[inline]
    pub fn of_start(&self, tokens: u32) -> f64 {
        let n = f64::from(tokens);
        n * self.beta + self.alpha * (n * n / 2.0)
    }

    /// Reads `alpha` and `beta` from a spec; these are the defaults.
    pub fn read(self, reader: &mut Reader) -> Result<Cost> {
        Ok(Cost {
            alpha: reader.f64("alpha", self.alpha, 0.0..=1e12)?,
            beta: reader.f64("beta", self.beta, 0.0..=1e12)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitting_a_range_does_not_change_its_cost() {
        let cost = Cost { alpha: 0.25, beta: 3.0 };
        for (context, a, b) in [(0, 1, 1), (10, 512, 512), (100_000, 7, 64)] {
            let parts = cost.of(context, a) + cost.of(context + a, b);
            let whole = cost.of(context, a + b);
            assert!((parts - whole).abs() <= 1e-9 * whole, "{parts} {whole}");
        }
        assert_eq!(cost.of(1000, 0), 0.0);
    }
}
