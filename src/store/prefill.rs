//! What computing a token costs, learned from what the engine says of its prefills.
//!
//! The engine's word is not checked against anything: a clock that stood still, or a machine that
//! slept, gives figures that are off by orders of magnitude. So the fit goes by most of the last
//! observations, each of which counts for as much as any other, and not by those far off.

use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::store::token_path::MAX_TOKENS;

/// Nanoseconds a token before anything was observed: 10,000 tokens a second.
pub const GUESSED_TOKEN_NS: f64 = 100_000.0;
/// Observations that are remembered.
const KEPT: usize = 20;
/// Fewest nanoseconds a token that are believed: no machine computes 100 million tokens a second.
const LEAST_TOKEN_NS: u64 = 10;
/// Longest time that is believed: an hour.
const MAX_NS: u64 = 3_600_000_000_000;
/// What the guess counts for, in observations: it decides what those leave open that are all alike.
const PRIOR: f64 = 1e-6;
/// Relative errors from here on are no noise: such an observation says nothing of the machine.
const FAR_OFF: f64 = 0.3;

/// One observation: `ns` for `alpha * x + beta * y`.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    x: f64,
    y: f64,
    ns: f64,
}

/// The engine's prefill: `alpha * context + beta` nanoseconds a token.
#[derive(Clone, Copy, Debug)]
pub struct Prefill {
    /// The last ones, in a ring.
    seen: [Seen; KEPT],
    observed: u64,
    fitted: Cost,
    fixed: Option<Cost>,
}

fn guess() -> Cost {
    let shape = Cost::default();
    Cost { alpha: shape.alpha * GUESSED_TOKEN_NS, beta: shape.beta * GUESSED_TOKEN_NS }
}

impl Default for Prefill {
    fn default() -> Prefill {
        Prefill { seen: [Seen::default(); KEPT], observed: 0, fitted: guess(), fixed: None }
    }
}

impl Prefill {
    /// Goes by this cost, in ns, whatever is observed; `None`: by what is observed.
    pub fn fix(&mut self, cost: Option<Cost>) -> Result<()> {
        if let Some(Cost { alpha, beta }) = cost {
            let sound = |x: f64| x.is_finite() && (0.0..=1e15).contains(&x);
            if !sound(alpha) || !sound(beta) {
                fail!(Invalid, "a prefill cost of {alpha} and {beta} ns is not 0 to 1e15");
            }
        }
        self.fixed = cost;
        Ok(())
    }

    /// The engine computed `tokens` after `context` in `ns`.
    pub fn observe(&mut self, context: u64, tokens: u64, ns: u64) -> Result<()> {
        let most = MAX_TOKENS as u64;
        if tokens == 0 || tokens > most || context > most {
            fail!(
                Invalid,
                "{tokens} tokens behind {context}: 1 to {most}, behind 0 to {most}, can be"
            );
        }
        let least_ns = tokens * LEAST_TOKEN_NS;
        if ns < least_ns || ns > MAX_NS {
            fail!(
                Invalid,
                "{tokens} tokens in {ns} ns: {least_ns} ns (100 million tokens a second) to an hour \
                 are believed"
            );
        }
        let (l, n) = (context as f64, tokens as f64);
        let at = (self.observed % KEPT as u64) as usize;
        self.seen[at] = Seen { x: n * l + n * n / 2.0, y: n, ns: ns as f64 };
        self.observed += 1;
        let count = self.observed.min(KEPT as u64) as usize;
        self.fitted = fit(&self.seen[..count]);
        Ok(())
    }

    /// What a token costs, in ns.
    pub fn cost(&self) -> Cost {
        self.fixed.unwrap_or(self.fitted)
    }

    /// Whether it goes by a cost that was fixed.
    pub fn is_fixed(&self) -> bool {
        self.fixed.is_some()
    }

    /// How much was observed.
    pub fn observed(&self) -> u64 {
        self.observed
    }
}

impl Seen {
    /// How far a cost is off, in parts of the larger of what it says and what was seen.
    fn off(&self, of: Cost) -> f64 {
        let expected = of.alpha * self.x + of.beta * self.y;
        (expected - self.ns).abs() / expected.max(self.ns)
    }
}

/// The guess, as much slower or faster as half of the observations are at least.
fn scaled_guess(seen: &[Seen]) -> Cost {
    let of = guess();
    let mut ratios = [0.0; KEPT];
    for (ratio, one) in ratios.iter_mut().zip(seen) {
        *ratio = one.ns / (of.alpha * one.x + of.beta * one.y);
    }
    let ratios = &mut ratios[..seen.len()];
    ratios.sort_by(f64::total_cmp);
    let median = ratios[seen.len() / 2];
    Cost { alpha: of.alpha * median, beta: of.beta * median }
}

/// The cost that two observations have in common, where they tell its parts apart.
fn common(one: &Seen, other: &Seen) -> Option<Cost> {
    let det = one.x * other.y - other.x * one.y;
    if det.abs() < 0.05 * (one.x * other.y).max(other.x * one.y) {
        return None;
    }
    let alpha = (one.ns * other.y - other.ns * one.y) / det;
    let beta = (one.x * other.ns - other.x * one.ns) / det;
    Some(Cost { alpha: alpha.max(0.0), beta: beta.max(0.0) })
}

/// The cost of a pair of observations from which all together are off least, then the least squares
/// of those that it is not far off from.
fn fit(seen: &[Seen]) -> Cost {
    let start = scaled_guess(seen);
    let all_off = |cost: Cost| seen.iter().map(|one| one.off(cost)).sum::<f64>();
    let (mut best, mut least) = (start, all_off(start));
    for (at, one) in seen.iter().enumerate() {
        for cost in seen[..at].iter().filter_map(|other| common(one, other)) {
            let off = all_off(cost);
            if off < least {
                (best, least) = (cost, off);
            }
        }
    }
    least_squares(seen.iter().filter(|one| one.off(best) < FAR_OFF), start)
}

/// Of relative errors; neither part is below zero.
fn least_squares<'a>(seen: impl Iterator<Item = &'a Seen>, guess: Cost) -> Cost {
    // As if each part of the guess had been seen alone.
    let (mut xx, mut x_sum) = (PRIOR / guess.alpha.powi(2), PRIOR / guess.alpha);
    let (mut yy, mut y_sum, mut xy) = (PRIOR / guess.beta.powi(2), PRIOR / guess.beta, 0.0);
    for &Seen { x, y, ns } in seen {
        let (x, y) = (x / ns, y / ns);
        xx += x * x;
        xy += x * y;
        yy += y * y;
        x_sum += x;
        y_sum += y;
    }
    let det = xx * yy - xy * xy;
    // The guess keeps it above zero; observations that are equal for ever do not.
    if det <= 1e-9 * xx * yy {
        let times = x_sum / (guess.alpha * xx + guess.beta * xy);
        return Cost { alpha: guess.alpha * times, beta: guess.beta * times };
    }
    let (alpha, beta) = ((x_sum * yy - y_sum * xy) / det, (y_sum * xx - x_sum * xy) / det);
    if alpha < 0.0 {
        Cost { alpha: 0.0, beta: y_sum / yy }
    } else if beta < 0.0 {
        Cost { alpha: x_sum / xx, beta: 0.0 }
    } else {
        Cost { alpha, beta }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by * b.abs()
    }

    /// What an engine observes of a machine: any context and count, a tenth off.
    fn observed(truth: Cost, state: &mut u64) -> (u64, u64, u64) {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(99);
        let (l, n) = ((*state >> 40) % 100_000, 1 + (*state >> 20) % 4096);
        let l = if *state >> 63 == 0 { 0 } else { l };
        let off = 0.9 + 0.2 * ((*state >> 33) % 1000) as f64 / 1000.0;
        (l, n, (truth.of(l, n) * off).max(n as f64 * 10.0) as u64)
    }

    proptest! {
        #[test]
        fn a_prefill_is_found_out(
            alpha in 0.0f64..50.0, beta in 1e3f64..1e6, seed in 1u64..1 << 40,
        ) {
            let (mut prefill, truth, mut state) = (Prefill::default(), Cost { alpha, beta }, seed);
            for _ in 0..200 {
                let (l, n, ns) = observed(truth, &mut state);
                prefill.observe(l, n, ns).unwrap();
            }
            for (l, n) in [(0, 512), (5_000, 512), (50_000, 2048), (90_000, 16)] {
                let (got, want) = (prefill.cost().of(l, n), truth.of(l, n));
                prop_assert!(close(got, want, 0.2), "{l} {n}: {got} for {want}");
            }
        }

        /// Whenever it comes, and however far it is off.
        #[test]
        fn one_that_is_wrong_does_not_outweigh_ten_that_are_good(
            alpha in 0.0f64..50.0, beta in 1e3f64..1e6, seed in 1u64..1 << 40,
            when in 0usize..11, is_fast: bool, wrong in 1u64..1 << 20,
        ) {
            let (mut prefill, truth, mut state) = (Prefill::default(), Cost { alpha, beta }, seed);
            for i in 0..11 {
                if i == when {
                    let ns = if is_fast { 10 * wrong } else { MAX_NS };
                    prefill.observe(0, wrong, ns).unwrap();
                    continue;
                }
                // The shape is known: at the start, and behind a long context.
                let (_, n, _) = observed(truth, &mut state);
                let l = if i % 2 == 0 { 0 } else { 50_000 };
                prefill.observe(l, n + 64, truth.of(l, n + 64) as u64).unwrap();
            }
            for (l, n) in [(0, 512), (50_000, 512)] {
                let (got, want) = (prefill.cost().of(l, n), truth.of(l, n));
                prop_assert!(close(got, want, 0.3), "{l} {n}: {got} for {want}");
            }
        }
    }

    #[test]
    fn a_machine_that_has_changed_is_found_out() {
        let mut prefill = Prefill::default();
        (0..100).for_each(|_| prefill.observe(0, 512, 512 * 50_000).unwrap());
        (0..32).for_each(|_| prefill.observe(0, 512, 512 * 500_000).unwrap());
        assert!(close(prefill.cost().of(0, 512), 512.0 * 500_000.0, 0.01));
    }

    #[test]
    fn nonsense_is_refused_and_a_fixed_cost_holds() {
        let mut prefill = Prefill::default();
        let most = MAX_TOKENS as u64;
        for (context, tokens, ns) in [
            (0, 0, 1000),
            (0, 5, 0),
            (0, 5, 49),
            (0, 5, u64::MAX),
            (0, u64::MAX, 5),
            (0, most + 1, MAX_NS),
            (most + 1, 1, 1_000_000),
        ] {
            assert!(prefill.observe(context, tokens, ns).is_err(), "{context} {tokens} {ns}");
        }
        assert!(prefill.fix(Some(Cost { alpha: f64::NAN, beta: 1.0 })).is_err());
        prefill.fix(Some(Cost { alpha: 0.5, beta: 7.0 })).unwrap();
        prefill.observe(0, 512, 1_000_000).unwrap();
        assert_eq!((prefill.cost().beta, prefill.observed()), (7.0, 1));
        prefill.fix(None).unwrap();
        assert!(close(prefill.cost().of(0, 512), 1e6, 0.01));
    }
}
