//! Counters, ratios, fairness, decision times.

use crate::meta::fairness::Fairness;
use crate::meta::sessions::Sessions;

/// Buckets of a histogram: four per doubling, from 1 ns to over a minute.
pub const BUCKETS: usize = 144;
/// Most tenants counted separately; the others share one row.
pub const MAX_TENANTS: usize = 1024;

/// A histogram of times, with four buckets per doubling.
#[derive(Clone)]
pub struct Histogram {
    /// On the heap: a store has many histograms and is moved by value when it opens and closes, on
    /// stacks that an engine may have made small.
    counts: Box<[u64; BUCKETS]>,
    total: u64,
    sum_ns: u64,
    max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: Box::new([0; BUCKETS]), total: 0, sum_ns: 0, max_ns: 0 }
    }
}

fn bucket(ns: u64) -> usize {
    let ns = ns.max(1);
    let octave = ns.ilog2() as usize;
    let quarter = if octave >= 2 { (ns >> (octave - 2)) & 3 } else { (ns << (2 - octave)) & 3 };
    (octave * 4 + quarter as usize).min(BUCKETS - 1)
}

impl Histogram {
    /// Adds a time.
    pub fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.sum_ns += ns;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Number of times.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The mean; 0 if there are none.
    pub fn mean_ns(&self) -> u64 {
        self.sum_ns.checked_div(self.total).unwrap_or(0)
    }

    /// Sum of all times.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Number of times below 2 to the power of `octave` ns.
    pub fn below(&self, octave: usize) -> u64 {
        self.counts.iter().take(octave.saturating_mul(4)).sum()
    }

    /// The largest time.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The time that a `share` (0 to 1) of all times does not exceed: the upper end of its bucket,
    /// at most the largest time.
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let target = ((self.total as f64 * share).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (i, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= target {
                let end = ((1u64 << (i / 4)) as f64 * (1.0 + (i % 4 + 1) as f64 / 4.0)) as u64;
                return end.min(self.max_ns);
            }
        }
        self.max_ns
    }
}

/// Totals of lookups, inserts and evictions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Lookups.
    pub requests: u64,
    /// Objects requested.
    pub references: u64,
    /// Objects found and usable.
    pub hits: u64,
    /// Objects missing because they were evicted: they are computed again.
    pub evicted_references: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Recompute cost of the tokens requested.
    pub cost: f64,
    /// Recompute cost of the tokens found.
    pub hit_cost: f64,
    /// Objects inserted.
    pub inserts: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// Units of the evicted objects.
    pub evicted_units: u64,
    /// Eviction calls.
    pub decisions: u64,
    /// Eviction calls that freed less than requested.
    pub shortfalls: u64,
}

impl Counts {
    /// `part / whole`; 0 for an empty whole.
    pub fn share(part: f64, whole: f64) -> f64 {
        if whole > 0.0 { part / whole } else { 0.0 }
    }

    /// Objects found per object requested.
    pub fn hit_ratio(&self) -> f64 {
        Counts::share(self.hits as f64, self.references as f64)
    }

    /// The hit ratio by tokens.
    pub fn token_hit_ratio(&self) -> f64 {
        Counts::share(self.hit_tokens as f64, self.tokens as f64)
    }

    /// The hit ratio by recompute cost.
    pub fn cost_hit_ratio(&self) -> f64 {
        Counts::share(self.hit_cost, self.cost)
    }

    /// References to evicted objects, per reference.
    pub fn re_prefill_rate(&self) -> f64 {
        Counts::share(self.evicted_references as f64, self.references as f64)
    }
}

/// All counters of an evictor.
#[derive(Default)]
pub struct Metrics {
    /// Totals.
    pub counts: Counts,
    /// Decision times; one in [`SAMPLE`] is measured.
    pub decision: Histogram,
    tenants: Vec<Tenant>,
    /// All tenants beyond `MAX_TENANTS`, as one.
    others: Share,
}

/// One decision in this many is timed.
pub const SAMPLE: u64 = 16;

#[derive(Clone, Copy, Default)]
struct Share {
    hit_tokens: u64,
    wanted_tokens: u64,
}

#[derive(Clone, Copy)]
struct Tenant {
    id: u32,
    share: Share,
}

impl Metrics {
    /// Counts the tokens a tenant found, and would have found in an unbounded cache.
    pub fn tenant(&mut self, id: u32, hit_tokens: u64, wanted_tokens: u64) {
        let share = match self.tenants.binary_search_by_key(&id, |t| t.id) {
            Ok(at) => &mut self.tenants[at].share,
            Err(_) if self.tenants.len() == MAX_TENANTS => &mut self.others,
            Err(at) => {
                self.tenants.insert(at, Tenant { id, share: Share::default() });
                &mut self.tenants[at].share
            }
        };
        share.hit_tokens += hit_tokens;
        share.wanted_tokens += wanted_tokens;
    }

    /// Number of tenants counted separately.
    pub fn tenants(&self) -> usize {
        self.tenants.len()
    }

    /// Fairness over tenants; those beyond `MAX_TENANTS` count as one.
    pub fn tenant_fairness(&self) -> f64 {
        let shares = self.tenants.iter().map(|t| t.share).chain([self.others]);
        jain(shares.map(|s| (s.hit_tokens, s.wanted_tokens)))
    }
}

/// Fairness over all sessions that ever had a row.
pub fn session_fairness(sessions: &Sessions) -> f64 {
    sessions.fairness().index()
}

/// Jain's index of the ratios of found to available tokens: 1 if all are equal, 1/n if one has
/// everything. Entries without available tokens do not count.
pub fn jain(pairs: impl Iterator<Item = (u64, u64)>) -> f64 {
    let mut all = Fairness::default();
    pairs.for_each(|(hit, looked_up)| all.add(hit, looked_up));
    all.index()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_is_one_when_equal_and_one_nth_when_one_has_all() {
        assert_eq!(jain([(5, 10), (50, 100), (0, 0)].into_iter()), 1.0);
        assert_eq!(jain([(10, 10), (0, 10), (0, 7), (0, 1)].into_iter()), 0.25);
        assert_eq!(jain(std::iter::empty()), 1.0);
    }

    #[test]
    fn tenants_beyond_the_limit_count_as_one() {
        let mut metrics = Metrics::default();
        let most = MAX_TENANTS as u32;
        (0..most).for_each(|id| metrics.tenant(id * 2, 10, 10));
        assert_eq!((metrics.tenants(), metrics.tenant_fairness()), (MAX_TENANTS, 1.0));
        // The tenants beyond the limit find nothing: one of 1025. The last separate tenant is
        // unaffected.
        (0..5000).for_each(|n| metrics.tenant(n * 2 + 1, 0, 10));
        assert_eq!(metrics.tenants(), MAX_TENANTS);
        let (n, all) = (f64::from(most), f64::from(most) + 1.0);
        assert!((metrics.tenant_fairness() - n / all).abs() < 1e-9);
        // Ids between the separate tenants are not mixed into their neighbours.
        (0..5000).for_each(|n| metrics.tenant(n * 2 + 1, 10, 0));
        assert!(metrics.tenants.iter().all(|t| t.share.wanted_tokens == 10));
    }

    #[test]
    fn quantiles_are_within_a_quarter() {
        let mut h = Histogram::default();
        (1..=1000u64).for_each(|n| h.add(n * 7));
        for share in [0.01, 0.5, 0.9, 0.99, 1.0] {
            let exact = (1000.0 * share) * 7.0;
            let measured = h.quantile_ns(share) as f64;
            assert!(
                measured >= exact && measured <= exact * 1.26,
                "{share}: {measured} for {exact}"
            );
        }
        assert_eq!((h.total(), h.max_ns(), h.mean_ns()), (1000, 7000, 3503));
        for octave in [0, 3, 10, 12, 40, usize::MAX] {
            let less = |&n: &u64| octave >= 40 || n * 7 < 1 << octave;
            assert_eq!(h.below(octave), (1..=1000).filter(less).count() as u64, "{octave}");
        }
        assert_eq!(h.sum_ns(), 3_503_500);
        assert_eq!(Histogram::default().quantile_ns(0.5), 0);
        h.add(u64::MAX / 2000);
    }
}
