//! `pyramidkv`: `snapkv` with fewer tokens in deeper layers (Cai et al., 2024).
//!
//! Parameters are those of `snapkv`, and `beta` (20): how much less the last layer keeps. With N
//! tokens, the budget C including the window W, and B = C - W:
//!
//! - the least is m = B / beta, the most M = 2 B - m. If M is at least N - W, it is N - W, and m =
//!   2 B - M. Layers in between keep M - layer (M - m) / (layers - 1);
//! - `form=original` divides integers, and the window is added. With fewer than C tokens all stay,
//!   with fewer than 2 B each layer keeps C;
//! - `form=kvpress`: B is the budget itself (or what `ratio` leaves). The result is rounded to the
//!   nearest integer (halves to even) and includes the window. Unless N >= M >= m >= W, each layer
//!   keeps B.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::eviction::TokenBudget;
use crate::sparse::snapkv::{Budget, Form, Snapkv};

/// Parameters of `pyramidkv`, beside those of `snapkv`.
pub const PARAMS: &[Param] =
    &[Param::new("beta", "divisor: how much less than the budget the last layer keeps")];

/// Reads the parameters of `pyramidkv`.
pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Snapkv> {
    let beta = reader.u64("beta", 20, 1..=1 << 20)? as u32;
    Snapkv::with(reader, shape, Budget::Pyramid(beta))
}

/// Inputs of the budget of a layer.
#[derive(Clone, Copy, Debug)]
pub struct PyramidBudget {
    /// Published form.
    pub form: Form,
    /// Budget.
    pub cap: TokenBudget,
    /// Window, in tokens.
    pub window: usize,
    /// Divisor for the budget of the last layer.
    pub beta: u32,
    /// Layers.
    pub layers: u32,
}

impl PyramidBudget {
    /// Number of `tokens` tokens to retain in a layer.
    pub fn count(&self, layer: u32, tokens: usize) -> usize {
        match self.form {
            Form::Original => self.original(layer, tokens),
            Form::Kvpress => self.kvpress(layer, tokens),
        }
    }

    fn original(&self, layer: u32, tokens: usize) -> usize {
        let (window, beta) = (self.window as i64, i64::from(self.beta));
        let (all, tokens) = (self.cap.of(tokens) as i64, tokens as i64);
        let base = (all - window).max(0);
        if tokens <= all || tokens < 2 * base {
            return all.max(0) as usize;
        }
        let mut least = base / beta;
        let mut most = 2 * base - least;
        if most >= tokens - window {
            most = tokens - window;
            least = 2 * base - most;
        }
        let step = (most - least).div_euclid(i64::from(self.layers.max(2)) - 1);
        (most - i64::from(layer) * step + window).clamp(0, tokens) as usize
    }

    fn kvpress(&self, layer: u32, tokens: usize) -> usize {
        let (count, window) = (tokens as f64, self.window as f64);
        let base = self.cap.unrounded(tokens).min(count);
        // kvpress adds the window and subtracts it again, and divides before it multiplies. Where
        // half a token decides, the last bit of each step matters.
        let without = (window + base) - window;
        let mut least = without / f64::from(self.beta);
        let mut most = 2.0 * without - least;
        if most >= count - window {
            most = count - window;
            least = 2.0 * without - most;
        }
        let is_pyramid = count >= most && most >= least && least >= window && base < count;
        let step = (most - least) / (f64::from(self.layers.max(2)) - 1.0);
        let stay = if is_pyramid { most - f64::from(layer) * step } else { base };
        stay.round_ties_even().clamp(0.0, count) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_match_kvpress() {
        let cap = TokenBudget::Ratio(0.5);
        let of = PyramidBudget { form: Form::Kvpress, cap, window: 16, beta: 20, layers: 4 };
        assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, 256)), [240, 165, 91, 16]);
        // The least would be less than the window: each layer keeps the same.
        let of = PyramidBudget { cap: TokenBudget::Ratio(0.9), ..of };
        assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, 256)), [26, 26, 26, 26]);
        // Halves of a token, decided by the last bit: the results of its formula in Python.
        for (tokens, ratio, window, retained) in [
            (100, 0.7, 1, [59, 40, 20, 1]),
            (25, 0.41, 2, [23, 18, 12, 6]),
            (115, 0.45, 1, [114, 80, 46, 12]),
        ] {
            let of = PyramidBudget { cap: TokenBudget::Ratio(ratio), window, ..of };
            assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, tokens)), retained);
        }
    }

    #[test]
    fn budgets_match_the_authors_integer_division() {
        let cap = TokenBudget::Tokens(320);
        let of = PyramidBudget { form: Form::Original, cap, window: 64, beta: 20, layers: 32 };
        // 256 / 20 = 12, 512 - 12 = 500, 488 / 31 = 15.
        assert_eq!(of.count(0, 4096), 564);
        assert_eq!(of.count(31, 4096), 500 - 31 * 15 + 64);
        // 500 is too much of 540 - 64: 476 down to 36 by 14.
        assert_eq!(of.count(0, 540), 540);
        assert_eq!(of.count(31, 540), 476 - 31 * 14 + 64);
        assert_eq!((of.count(5, 400), of.count(5, 320), of.count(5, 100)), (320, 320, 100));
        let one = PyramidBudget { layers: 1, ..of };
        assert_eq!(one.count(0, 4096), 564);
    }
}
