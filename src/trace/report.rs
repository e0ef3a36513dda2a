//! How a policy did on a trace.

use crate::policy::metrics::{Histogram, jain};
use crate::trace::study::Floor;

/// A stretch of the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// When it ended, from the first request on.
    pub at_ns: i64,
    /// Requests in it.
    pub requests: u64,
    /// Tokens they asked for.
    pub tokens: u64,
    /// Tokens they found.
    pub hit_tokens: u64,
    /// Blocks resident at its end, whole or in part.
    pub resident: f64,
}

/// The outcome of one run. Everything but `decision` and `run_ns` is the same in
/// every run.
#[derive(Clone, Default)]
pub struct Report {
    /// The spec of the policy, in canonical form.
    pub spec: String,
    /// What fitted.
    pub capacity_blocks: u64,
    /// Requests.
    pub requests: u64,
    /// What was asked for and found.
    pub done: Floor,
    /// The same of an unbounded cache.
    pub floor: Floor,
    /// Blocks (cells, when replayed by layers) evicted.
    pub evictions: u64,
    /// Blocks (cells) inserted.
    pub inserts: u64,
    /// References to what was there before, was evicted or did not fit, and is
    /// wanted again, per reference.
    pub re_prefill_rate: f64,
    /// Jain's index over sessions of what they found in parts of what they
    /// could have found.
    pub session_fairness: f64,
    /// The same over tenants.
    pub tenant_fairness: f64,
    /// Mean share of the capacity in use since the first eviction.
    pub utilisation: f64,
    /// Blocks that did not fit beside the rest of their request.
    pub refused: u64,
    /// Time of each eviction call.
    pub decision: Histogram,
    /// Victims of all calls that were timed.
    pub victims: u64,
    /// Time of the whole run, by the machine's clock.
    pub run_ns: u64,
    /// The course of it.
    pub timeline: Vec<Point>,
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl Report {
    /// Blocks not found per block asked for.
    pub fn block_miss_ratio(&self) -> f64 {
        share((self.done.references - self.done.hits) as f64, self.done.references as f64)
    }

    /// Tokens to compute again, or for the first time.
    pub fn recomputed_tokens(&self) -> u64 {
        self.done.tokens - self.done.hit_tokens
    }

    /// Those per token asked for.
    pub fn token_miss_ratio(&self) -> f64 {
        share(self.recomputed_tokens() as f64, self.done.tokens as f64)
    }

    /// What computing them costs.
    pub fn recompute_cost(&self) -> f64 {
        self.done.cost - self.done.hit_cost
    }

    /// That per cost of everything asked for.
    pub fn cost_miss_ratio(&self) -> f64 {
        share(self.recompute_cost(), self.done.cost)
    }

    /// The least that `token_miss_ratio` can be.
    pub fn token_floor(&self) -> f64 {
        share((self.floor.tokens - self.floor.hit_tokens) as f64, self.floor.tokens as f64)
    }

    /// Requests replayed in a second.
    pub fn requests_per_second(&self) -> f64 {
        share(self.requests as f64 * 1e9, self.run_ns as f64)
    }

    /// Whether another run came to the same, times aside.
    pub fn same_as(&self, other: &Report) -> bool {
        let numbers = |r: &Report| (r.requests, r.evictions, r.inserts, r.refused, r.victims);
        let shares =
            |r: &Report| [r.re_prefill_rate, r.session_fairness, r.tenant_fairness, r.utilisation];
        self.spec == other.spec
            && self.capacity_blocks == other.capacity_blocks
            && self.done == other.done
            && self.floor == other.floor
            && numbers(self) == numbers(other)
            && shares(self) == shares(other)
            && self.timeline == other.timeline
    }
}

/// What each of many found, and could have found.
pub(super) struct Shares(Vec<(u64, u64)>);

impl Shares {
    pub(super) fn of(pairs: Vec<(u64, u64)>) -> Shares {
        Shares(pairs)
    }

    pub(super) fn add(&mut self, who: usize, hit: u64, wanted: u64) {
        if let Some(row) = self.0.get_mut(who) {
            row.0 += hit;
            row.1 += wanted;
        }
    }

    pub(super) fn fairness(&self) -> f64 {
        jain(self.0.iter().copied())
    }
}
