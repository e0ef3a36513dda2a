//! `pyramidkv`: `snapkv` with fewer tokens the deeper the layer (Cai et al., 2024).
//!
//! Parameters are those of `snapkv`, and `beta` (20): how much less the last layer keeps.
//! With N tokens, C the budget with the window of W, B = C - W:
//!
//! - the least is m = B / beta, the most M = 2 B - m; where M is N - W or more, it is N - W
//!   and m = 2 B - M; layers in between keep M - layer (M - m) / (layers - 1);
//! - `form=original` divides whole numbers, and the window comes on top. With fewer than C
//!   tokens all stay, with fewer than 2 B each layer keeps C;
//! - `form=kvpress`: B is the budget itself (or what `ratio` leaves), the result is rounded to
//!   the nearest (halves to the even one) and the window is a part of it. Unless N >= M >= m
//!   >= W each layer keeps B.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::sparse::Shape;
use crate::sparse::eviction::TokenBudget;
use crate::sparse::snapkv::{Budget, Form, Snapkv};

/// Reads `pyramidkv` with its parameters.
pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Snapkv> {
    let beta = reader.u64("beta", 20, 1..=1 << 20)? as u32;
    Snapkv::with(reader, shape, Budget::Pyramid(beta))
}

/// What the budgets of layers follow from.
#[derive(Clone, Copy, Debug)]
pub struct PyramidBudget {
    /// Which form.
    pub form: Form,
    /// The budget.
    pub cap: TokenBudget,
    /// The window.
    pub window: usize,
    /// How much less the last layer keeps.
    pub beta: u32,
    /// Layers.
    pub layers: u32,
}

impl PyramidBudget {
    /// How many of so many tokens stay in a layer.
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
        // kvpress adds the window and takes it off again, and divides before it multiplies: where
        // half a token decides, the last bit of each step does.
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
    fn layers_keep_what_was_observed_of_kvpress() {
        let cap = TokenBudget::Ratio(0.5);
        let of = PyramidBudget { form: Form::Kvpress, cap, window: 16, beta: 20, layers: 4 };
        assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, 256)), [240, 165, 91, 16]);
        // The least would be less than the window: as many in each.
        let of = PyramidBudget { cap: TokenBudget::Ratio(0.9), ..of };
        assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, 256)), [26, 26, 26, 26]);
        // Halves of a token, which the last bit decides: what its formula gives in Python.
        for (tokens, ratio, window, kept) in [
            (100, 0.7, 1, [59, 40, 20, 1]),
            (25, 0.41, 2, [23, 18, 12, 6]),
            (115, 0.45, 1, [114, 80, 46, 12]),
        ] {
            let of = PyramidBudget { cap: TokenBudget::Ratio(ratio), window, ..of };
            assert_eq!([0, 1, 2, 3].map(|layer| of.count(layer, tokens)), kept);
        }
    }

    #[test]
    fn whole_numbers_as_the_authors_divide_them() {
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
