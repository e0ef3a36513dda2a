//! How long it takes on this machine to bring bytes from a tier, learned while it happens.

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
}
