//! Random numbers that are equal on every machine: integers, and floats computed with exact
//! operations only (no logarithm or power of the system's library).

/// A generator (xoshiro256**) seeded through splitmix64.
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// A generator with a seed.
    pub fn new(seed: u64) -> Rng {
        let mut state = seed;
        Rng(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }))
    }

    /// A separate generator for part `part` of the work, so that the parts do not shift each
    /// other's numbers.
    pub fn part(&self, part: u64) -> Rng {
        Rng::new(self.0[0] ^ part.wrapping_mul(0xD6E8_FEB8_6659_FD93).rotate_left(17))
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform from 0 to `n` - 1; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// Uniform from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with probability `share`.
    pub fn chance(&mut self, share: f64) -> bool {
        self.unit() < share
    }

    /// Exponential with mean 1, by von Neumann's comparisons.
    pub fn exponential(&mut self) -> f64 {
        let mut whole = 0.0;
        loop {
            let first = self.unit();
            let (mut last, mut run) = (first, 1);
            loop {
                let next = self.unit();
                if next >= last {
                    break;
                }
                last = next;
                run += 1;
            }
            if run % 2 == 1 {
                return whole + first;
            }
            whole += 1.0;
        }
    }

    /// Exponential with a mean, in ns.
    pub fn wait_ns(&mut self, mean_ns: i64) -> i64 {
        (self.exponential() * mean_ns as f64) as i64
    }

    /// Approximately normal, mean 0, deviation 1: the sum of twelve uniform numbers.
    pub fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.unit()).sum::<f64>() - 6.0
    }

    /// A size with a long tail: approximately log-normal around `median`, with the deviation
    /// `spread` of its logarithm; from 1 to `most`.
    pub fn size(&mut self, median: u64, spread: f64, most: u64) -> u64 {
        let x = median as f64 * exp(self.normal() * spread);
        (x as u64).clamp(1, most.max(1))
    }

    /// From 0 to `n` - 1, where rank r has weight 1/(r + 1).
    pub fn zipf(&mut self, n: u64) -> u64 {
        let total: f64 = (1..=n).map(|r| 1.0 / r as f64).sum();
        let mut left = self.unit() * total;
        for r in 0..n {
            left -= 1.0 / (r + 1) as f64;
            if left < 0.0 {
                return r;
            }
        }
        n.saturating_sub(1)
    }
}

/// The exponential function by exact operations, within some parts in 10^4.
fn exp(x: f64) -> f64 {
    let mut y = 1.0 + x.clamp(-60.0, 60.0) / 65_536.0;
    for _ in 0..16 {
        y *= y;
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_repeat_and_have_the_right_mean() {
        let mut rng = Rng::new(7);
        assert_eq!(
            [rng.next_u64(), rng.next_u64()],
            [Rng::new(7).next_u64(), {
                let mut other = Rng::new(7);
                other.next_u64();
                other.next_u64()
            }]
        );
        let n = 200_000;
        let mean = |rng: &mut Rng, f: &dyn Fn(&mut Rng) -> f64| {
            (0..n).map(|_| f(rng)).sum::<f64>() / f64::from(n)
        };
        assert!((mean(&mut rng, &|r| r.exponential()) - 1.0).abs() < 0.02);
        assert!((mean(&mut rng, &|r| r.unit()) - 0.5).abs() < 0.01);
        assert!(mean(&mut rng, &|r| r.normal()).abs() < 0.02);
        assert!((mean(&mut rng, &|r| r.below(10) as f64) - 4.5).abs() < 0.05);
        let first = mean(&mut rng, &|r| f64::from(u8::from(r.zipf(4) == 0)));
        assert!((first - 12.0 / 25.0).abs() < 0.01);
        assert!((exp(1.0) - std::f64::consts::E).abs() < 1e-3);
        assert_eq!((rng.below(0), rng.between(3, 3), rng.size(5, 0.0, 10)), (0, 3, 5));
        assert_ne!(rng.part(0).next_u64(), rng.part(1).next_u64());
    }
}
