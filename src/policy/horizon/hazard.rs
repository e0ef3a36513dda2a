//! Probability of reuse by class and waiting time: counted, smoothed towards coarser classes, and
//! converted to what keeping a unit of memory earns.

use crate::policy::horizon::classes::{CLASSES, LEVELS, ROWS, rows};

/// Buckets of waiting time: up to an eighth of a second, then two per doubling, up to twelve days.
pub const AGES: usize = 48;
const FIRST_NS: i64 = 125_000_000;

/// The bucket of a waiting time.
pub fn age_bucket(age_ns: i64) -> usize {
    if age_ns < FIRST_NS {
        return 0;
    }
    let ratio = age_ns as f64 / FIRST_NS as f64;
    let octave = (ratio.to_bits() >> 52) as usize - 1023;
    let half = ratio >= (1u64 << octave) as f64 * std::f64::consts::SQRT_2;
    (1 + 2 * octave + usize::from(half)).min(AGES - 1)
}

/// The start of each bucket.
const STARTS_NS: [i64; AGES] = {
    let (mut starts, mut bucket) = ([0; AGES], 1);
    while bucket < AGES {
        let whole = FIRST_NS << ((bucket - 1) / 2);
        let is_half = (bucket - 1) % 2 == 1;
        let half = (whole as f64 * std::f64::consts::SQRT_2) as i64 + 1;
        starts[bucket] = if is_half { half } else { whole };
        bucket += 1;
    }
    starts
};

/// The start of a bucket.
#[inline]
pub fn age_start_ns(bucket: usize) -> i64 {
    STARTS_NS[bucket]
}

/// Position of a waiting time among the buckets as a real number, for the interpolation of scores.
fn position(age_ns: i64) -> f32 {
    if age_ns < FIRST_NS {
        return age_ns.max(0) as f32 / FIRST_NS as f32;
    }
    1.0 + 2.0 * (age_ns as f32 / FIRST_NS as f32).log2()
}

/// Waits that a class borrows from the coarser one. More than a handful: objects of a request are
/// used together, so their waits are correlated.
const PRIOR_WAITS: f32 = 64.0;
/// Prior probability of reuse in a bucket.
const PRIOR_HAZARD: f32 = 0.04;
/// Waits after which older counts weigh half.
const MEMORY_WAITS: f32 = 65_536.0;

#[derive(Clone, Copy)]
struct Row {
    /// Waits that reached the bucket.
    entered: [f32; AGES],
    /// Waits that a use ended in the bucket.
    ended: [f32; AGES],
}

impl Row {
    /// Makes older counts weigh half.
    #[cold]
    fn forget(&mut self) {
        self.entered.iter_mut().chain(&mut self.ended).for_each(|n| *n *= 0.5);
    }
}

/// The counts, and the scores computed from them.
#[derive(Clone)]
pub struct Hazards {
    rows: Vec<Row>,
    /// Uses per second that a unit of memory earns, at the start of each bucket: the logarithm to
    /// base 2, which interpolates evenly between buckets.
    scores: Vec<[f32; AGES]>,
    /// Counts since the class was last fitted.
    fresh: Vec<f32>,
    fitted: Vec<f32>,
    hand: usize,
    widths: [f32; AGES],
}

impl Default for Hazards {
    fn default() -> Hazards {
        Hazards::new()
    }
}

impl Hazards {
    /// No data yet: longer waits are worth less, all classes are equal.
    pub fn new() -> Hazards {
        let mut widths = [0.0; AGES];
        for (b, width) in widths.iter_mut().enumerate() {
            let end = if b + 1 < AGES { age_start_ns(b + 1) } else { age_start_ns(b) * 2 };
            *width = (end - age_start_ns(b)) as f32 / 1e9;
        }
        let nothing = Row { entered: [0.0; AGES], ended: [0.0; AGES] };
        let mut hazards = Hazards {
            rows: vec![nothing; ROWS],
            scores: vec![[0.0; AGES]; CLASSES],
            fresh: vec![0.0; CLASSES],
            fitted: vec![0.0; CLASSES],
            hand: 0,
            widths,
        };
        let score = hazards.score_row(&[PRIOR_HAZARD; AGES]);
        hazards.scores.fill(score);
        hazards
    }

    /// Waits of a class reached a bucket.
    #[inline]
    pub fn enter(&mut self, class: u16, bucket: usize, waits: usize) {
        if waits == 0 {
            return;
        }
        // Counts are fractions after a while, so that a sum depends on its steps.
        let add = |count: &mut f32| (0..waits).for_each(|_| *count += 1.0);
        for row in rows(class) {
            let row = &mut self.rows[row];
            add(&mut row.entered[bucket]);
            if bucket == 0 && row.entered[0] > 2.0 * MEMORY_WAITS {
                row.forget();
            }
        }
        add(&mut self.fresh[usize::from(class)]);
    }

    /// Takes back that a wait of a class reached a bucket: the wait belongs to another class, or
    /// its end will not be observed.
    pub fn leave(&mut self, class: u16, bucket: usize) {
        for row in rows(class) {
            let entered = &mut self.rows[row].entered[bucket];
            *entered = (*entered - 1.0).max(0.0);
        }
    }

    /// A use ended a wait of a class in a bucket.
    pub fn end(&mut self, class: u16, bucket: usize) {
        for row in rows(class) {
            self.rows[row].ended[bucket] += 1.0;
        }
        self.fresh[usize::from(class)] += 1.0;
    }

    /// Checks the next few classes and fits one with new data. Returns that class.
    pub fn fit_one(&mut self) -> Option<u16> {
        const LOOK: usize = 8;
        for _ in 0..LOOK {
            let class = self.hand;
            self.hand = (self.hand + 1) % CLASSES;
            // A class is fitted again when an eighth of its data is new.
            if self.fresh[class] > 0.0 && self.fresh[class] * 8.0 >= self.fitted[class] {
                self.fit(class as u16);
                return Some(class as u16);
            }
        }
        None
    }

    /// Fits a class for the first time, from its coarser ones.
    pub fn fit_new(&mut self, class: u16) {
        if self.fitted[usize::from(class)] == 0.0 {
            self.fit(class);
        }
    }

    /// Number of waits ended by a use; old ones count in part.
    pub fn ended(&self) -> f32 {
        self.rows[0].ended.iter().sum()
    }

    fn fit(&mut self, class: u16) {
        let mut hazard = [PRIOR_HAZARD; AGES];
        let chain: [usize; LEVELS] = rows(class);
        for row in chain.map(|r| &self.rows[r]) {
            for (h, (entered, ended)) in hazard.iter_mut().zip(row.entered.iter().zip(&row.ended)) {
                let waits = entered.max(*ended) + PRIOR_WAITS;
                *h = ((ended + PRIOR_WAITS * *h) / waits).min(0.99);
            }
        }
        self.scores[usize::from(class)] = self.score_row(&hazard);
        let known: f32 = self.rows[chain[LEVELS - 1]].entered.iter().sum();
        self.fitted[usize::from(class)] = known.max(f32::MIN_POSITIVE);
        self.fresh[usize::from(class)] = 0.0;
    }

    /// For each bucket: the greatest ratio over all horizons of the probability of a use before the
    /// horizon to the memory time spent until then. This is Gittins' index: the horizon at which
    /// keeping pays best decides.
    fn score_row(&self, hazard: &[f32; AGES]) -> [f32; AGES] {
        let mut scores = [0.0f32; AGES];
        for (start, score) in scores.iter_mut().enumerate() {
            let (mut alive, mut used, mut spent) = (1.0f32, 0.0f32, 0.0f32);
            let mut best = (0.0f32, 1.0f32);
            for (&h, width) in hazard.iter().zip(&self.widths).skip(start) {
                used += alive * h;
                spent += alive * width * (1.0 - 0.5 * h);
                alive *= 1.0 - h;
                if used * best.1 > best.0 * spent {
                    best = (used, spent);
                }
            }
            *score = (best.0 / best.1).max(f32::MIN_POSITIVE).log2();
        }
        scores
    }

    /// Uses per second that keeping a unit of a class earns after a wait.
    pub fn score(&self, class: u16, age_ns: i64) -> f32 {
        self.log_score(class, age_ns).exp2()
    }

    /// The logarithm to base 2 of `score`, sufficient for comparisons.
    pub fn log_score(&self, class: u16, age_ns: i64) -> f32 {
        let at = position(age_ns).min((AGES - 1) as f32);
        let b = (at as usize).min(AGES - 2);
        let part = at - b as f32;
        let scores = &self.scores[usize::from(class)];
        scores[b] + (scores[b + 1] - scores[b]) * part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_an_age_bucket_is_in_that_bucket() {
        for b in 0..AGES {
            let start = age_start_ns(b);
            assert_eq!(age_bucket(start), b, "{start}");
            assert!(b == 0 || age_bucket(start - 2) == b - 1);
            assert!(b == 0 || (position(start) - b as f32).abs() < 1e-3);
        }
        assert_eq!((age_bucket(-5), age_bucket(i64::MAX)), (0, AGES - 1));
    }

    #[test]
    fn without_data_longer_waits_score_lower() {
        let hazards = Hazards::new();
        let mut last = f32::INFINITY;
        for age in (0..60).map(|n| 100_000_000i64 << (n / 3)) {
            let score = hazards.score(3, age);
            assert!(score <= last && score > 0.0);
            last = score;
        }
    }

    #[test]
    fn a_class_reused_after_a_minute_scores_high_until_then() {
        let mut hazards = Hazards::new();
        let (returns, dies) = (0u16, (CLASSES - 1) as u16);
        let minute = age_bucket(60_000_000_000);
        for _ in 0..2000 {
            (0..=minute).for_each(|b| hazards.enter(returns, b, 1));
            hazards.end(returns, minute);
            (0..AGES).for_each(|b| hazards.enter(dies, b, 1));
        }
        hazards.fit(returns);
        hazards.fit(dies);
        for seconds in [1, 10, 30, 44] {
            let age = seconds * 1_000_000_000;
            assert!(hazards.score(returns, age) > 20.0 * hazards.score(dies, age), "{seconds}");
        }
        let soon = hazards.score(returns, 45_000_000_000);
        assert!(soon > 1.5 * hazards.score(returns, 10_000_000_000), "worth more as it nears");
        assert!(soon > 20.0 * hazards.score(returns, 600_000_000_000), "late: not coming");
    }
}
