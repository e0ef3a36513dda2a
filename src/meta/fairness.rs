//! Jain's fairness index.

/// Jain's index of hit rates: 1 if all are equal, 1/n if one of n has everything. Kept as sums, so
/// that dropped sessions still count.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fairness {
    count: f64,
    sum: f64,
    squares: f64,
}

impl Fairness {
    /// Adds one hit rate. Entries that wanted nothing do not count.
    pub fn add(&mut self, found: u64, wanted: u64) {
        if wanted > 0 {
            let x = found as f64 / wanted as f64;
            self.count += 1.0;
            self.sum += x;
            self.squares += x * x;
        }
    }

    /// The index; 1 without entries.
    pub fn index(&self) -> f64 {
        match self.squares > 0.0 {
            true => self.sum * self.sum / (self.count * self.squares),
            false => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_is_one_if_equal_and_one_nth_if_one_has_all() {
        let of = |pairs: &[(u64, u64)]| {
            let mut all = Fairness::default();
            pairs.iter().for_each(|&(found, wanted)| all.add(found, wanted));
            all.index()
        };
        assert_eq!(of(&[(5, 10), (50, 100), (0, 0)]), 1.0);
        assert_eq!(of(&[(10, 10), (0, 10), (0, 7), (0, 1)]), 0.25);
        assert_eq!(of(&[]), 1.0);
    }
}
