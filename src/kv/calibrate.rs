//! How long things take on this machine, learned while they happen: computing
//! tokens, and bringing bytes from a tier.

use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;

/// What is kept of earlier observations at each new one.
const KEEP: f64 = 0.95;
/// What the first guess counts for, in observations: next to nothing once there is
/// one, but it decides what observations that are all alike leave open.
const PRIOR: f64 = 1e-6;
/// An observation that is off by more than this factor says something of the
/// moment, not of the machine: it counts as if it were off by so much.
const MOST_OFF: f64 = 4.0;
/// Observations before any is judged by the others.
const WARM: u64 = 4;
/// Longest time that is believed: an hour.
const MAX_NS: u64 = 3_600_000_000_000;

/// Fits `t = a * x + b * y` with `a` and `b` not below zero, by least squares of
/// relative errors; older observations count less.
#[derive(Clone, Copy, Debug)]
struct Fit {
    xx: f64,
    xy: f64,
    yy: f64,
    x: f64,
    y: f64,
    a: f64,
    b: f64,
    seen: u64,
}

impl Fit {
    /// Both guesses must be above zero.
    fn new(a: f64, b: f64) -> Fit {
        // As if each had been seen alone: the error of `a` in parts of its guess.
        let (xx, x, yy, y) = (PRIOR / (a * a), PRIOR / a, PRIOR / (b * b), PRIOR / b);
        Fit { xx, xy: 0.0, yy, x, y, a, b, seen: 0 }
    }

    fn at(&self, x: f64, y: f64) -> f64 {
        self.a * x + self.b * y
    }

    fn observe(&mut self, x: f64, y: f64, t: f64) {
        let expected = self.at(x, y);
        let t = match self.seen >= WARM && expected > 0.0 {
            true => t.clamp(expected / MOST_OFF, expected * MOST_OFF),
            false => t,
        };
        let (x, y) = (x / t, y / t);
        for sum in [&mut self.xx, &mut self.xy, &mut self.yy, &mut self.x, &mut self.y] {
            *sum *= KEEP;
        }
        self.xx += x * x;
        self.xy += x * y;
        self.yy += y * y;
        self.x += x;
        self.y += y;
        self.seen += 1;
        self.solve();
    }

    fn solve(&mut self) {
        let det = self.xx * self.yy - self.xy * self.xy;
        // The guesses keep it above zero; equal observations for ever do not.
        if det > 1e-9 * self.xx * self.yy {
            self.a = (self.x * self.yy - self.y * self.xy) / det;
            self.b = (self.y * self.xx - self.x * self.xy) / det;
        } else {
            let (before, now) = (self.a * self.xx + self.b * self.xy, self.x);
            let scale = if before > 0.0 { now / before } else { 1.0 };
            (self.a, self.b) = (self.a * scale, self.b * scale);
        }
        if self.a < 0.0 {
            (self.a, self.b) = (0.0, self.y / self.yy);
        } else if self.b < 0.0 {
            (self.a, self.b) = (self.x / self.xx, 0.0);
        }
    }
}

/// The engine's prefill: `alpha * context + beta` nanoseconds a token.
#[derive(Clone, Copy, Debug)]
pub struct Prefill {
    fit: Fit,
    fixed: Option<Cost>,
}

/// Nanoseconds a token before anything was observed: 10,000 tokens a second.
pub const GUESSED_TOKEN_NS: f64 = 100_000.0;

impl Default for Prefill {
    fn default() -> Prefill {
        let shape = Cost::default();
        let beta = shape.beta * GUESSED_TOKEN_NS;
        Prefill { fit: Fit::new(shape.alpha * GUESSED_TOKEN_NS, beta), fixed: None }
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
        if tokens == 0 || ns == 0 || ns > MAX_NS {
            fail!(Invalid, "{tokens} tokens in {ns} ns say nothing of the prefill");
        }
        let (l, n) = (context as f64, tokens as f64);
        self.fit.observe(n * l + n * n / 2.0, n, ns as f64);
        Ok(())
    }

    /// What a token costs, in ns.
    pub fn cost(&self) -> Cost {
        self.fixed.unwrap_or(Cost { alpha: self.fit.a, beta: self.fit.b })
    }

    /// Whether it goes by a cost that was fixed.
    pub fn is_fixed(&self) -> bool {
        self.fixed.is_some()
    }

    /// How much was observed.
    pub fn observed(&self) -> u64 {
        self.fit.seen
    }
}

/// A way bytes take: a delay for each transfer, then a rate.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    fit: Fit,
}

impl Speed {
    /// With guesses for the delay and the rate, both above zero.
    pub fn guess(delay_ns: f64, bytes_per_second: f64) -> Speed {
        Speed { fit: Fit::new(1e9 / bytes_per_second.max(1.0), delay_ns.max(1.0)) }
    }

    /// `bytes` in `transfers` one after the other took `ns`.
    pub fn observe(&mut self, bytes: u64, transfers: u64, ns: u64) {
        if bytes > 0 && transfers > 0 && ns > 0 && ns <= MAX_NS {
            self.fit.observe(bytes as f64, transfers as f64, ns as f64);
        }
    }

    /// How long `bytes` in `transfers` take.
    pub fn ns(&self, bytes: u64, transfers: u64) -> f64 {
        self.fit.at(bytes as f64, transfers as f64)
    }

    /// The rate alone.
    pub fn bytes_per_second(&self) -> f64 {
        if self.fit.a > 0.0 { 1e9 / self.fit.a } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, by: f64) -> bool {
        (a - b).abs() <= by * b.abs()
    }

    proptest! {
        #[test]
        fn a_prefill_is_found_out(
            alpha in 0.0f64..50.0, beta in 1e3f64..1e6, seed in 1u64..1 << 40,
        ) {
            let (mut prefill, truth, mut state) = (Prefill::default(), Cost { alpha, beta }, seed);
            for _ in 0..200 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(99);
                let (l, n) = ((state >> 40) % 100_000, 1 + (state >> 20) % 4096);
                let l = if state >> 63 == 0 { 0 } else { l };
                // A tenth off, up and down.
                let off = 0.9 + 0.2 * ((state >> 33) % 1000) as f64 / 1000.0;
                prefill.observe(l, n, (truth.of(l, n) * off).max(1.0) as u64).unwrap();
            }
            for (l, n) in [(0, 512), (5_000, 512), (50_000, 2048), (90_000, 16)] {
                let (got, want) = (prefill.cost().of(l, n), truth.of(l, n));
                prop_assert!(close(got, want, 0.2), "{l} {n}: {got} for {want}");
            }
        }

        #[test]
        fn a_speed_is_found_out(delay in 1e3f64..1e6, rate in 1e7f64..1e11) {
            let mut speed = Speed::guess(50_000.0, 1e9);
            let truth = |bytes: u64| delay + bytes as f64 * 1e9 / rate;
            for i in 0..100u64 {
                let bytes = 4096 << (i % 12);
                speed.observe(bytes, 1, truth(bytes).max(1.0) as u64);
            }
            for bytes in [4096, 65_536, 4 << 20] {
                prop_assert!(close(speed.ns(bytes, 1), truth(bytes), 0.1));
            }
        }
    }

    #[test]
    fn one_stall_does_not_count_much_and_a_change_does() {
        let mut speed = Speed::guess(10_000.0, 1e9);
        (0..50).for_each(|_| speed.observe(1 << 20, 1, 1 << 20));
        let before = speed.ns(1 << 20, 1);
        speed.observe(1 << 20, 1, 1 << 32);
        assert!(speed.ns(1 << 20, 1) < 1.2 * before);
        (0..200).for_each(|_| speed.observe(1 << 20, 1, 10 << 20));
        assert!(close(speed.ns(1 << 20, 1), 10.0 * (1 << 20) as f64, 0.05));
        assert!(speed.bytes_per_second() > 0.0);
    }

    #[test]
    fn nonsense_is_refused_and_a_fixed_cost_holds() {
        let mut prefill = Prefill::default();
        assert!(prefill.observe(0, 0, 5).is_err() && prefill.observe(0, 5, 0).is_err());
        assert!(prefill.observe(0, 5, u64::MAX).is_err());
        assert!(prefill.fix(Some(Cost { alpha: f64::NAN, beta: 1.0 })).is_err());
        prefill.fix(Some(Cost { alpha: 0.5, beta: 7.0 })).unwrap();
        prefill.observe(0, 512, 1_000_000).unwrap();
        assert_eq!((prefill.cost().beta, prefill.observed()), (7.0, 1));
        prefill.fix(None).unwrap();
        assert!(close(prefill.cost().of(0, 512), 1e6, 0.5));
    }
}
