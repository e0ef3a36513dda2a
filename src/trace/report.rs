//! The result of a replay.

use crate::policy::metrics::{Histogram, jain};
use crate::trace::study::Floor;

/// A section of the timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Its end, from the first request on.
    pub at_ns: i64,
    /// Requests in the section.
    pub requests: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens found.
    pub hit_tokens: u64,
    /// Blocks resident at its end, with fractions in replays by layers.
    pub resident: f64,
}

/// The result of one run. Everything except `decision` and `run_ns` is equal in every run.
#[derive(Clone, Default)]
pub struct Report {
    /// The spec of the policy, in canonical form.
    pub spec: String,
    /// Capacity in blocks.
    pub capacity_blocks: u64,
    /// Requests.
    pub requests: u64,
    /// Totals requested and found.
    pub done: Floor,
    /// The same totals for an unbounded cache.
    pub floor: Floor,
    /// Blocks evicted; cells in replays by layers.
    pub evictions: u64,
    /// Blocks inserted; cells in replays by layers.
    pub inserts: u64,
    /// References to blocks seen before that were evicted or did not fit, per reference.
    pub re_prefill_rate: f64,
    /// Jain's index over sessions of found per available tokens.
    pub session_fairness: f64,
    /// Jain's index over tenants.
    pub tenant_fairness: f64,
    /// Mean share of the capacity in use since the first eviction.
    pub utilisation: f64,
    /// Objects that did not fit beside the rest of their request.
    pub refused: u64,
    /// Time of each eviction call.
    pub decision: Histogram,
    /// Victims of all eviction calls.
    pub victims: u64,
    /// Time of the run, by the machine's clock.
    pub run_ns: u64,
    /// The timeline.
    pub timeline: Vec<Point>,
}

fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

impl Report {
    /// Blocks missed per block requested.
    pub fn block_miss_ratio(&self) -> f64 {
        share((self.done.references - self.done.hits) as f64, self.done.references as f64)
    }

    /// Tokens missed, for whatever reason.
    pub fn recomputed_tokens(&self) -> u64 {
        self.done.tokens - self.done.hit_tokens
    }

    /// Tokens missed per token requested.
    pub fn token_miss_ratio(&self) -> f64 {
        share(self.recomputed_tokens() as f64, self.done.tokens as f64)
    }

    /// Recompute cost of the tokens missed.
    pub fn recompute_cost(&self) -> f64 {
        self.done.cost - self.done.hit_cost
    }

    /// Recompute cost of the tokens missed per cost of all tokens.
    pub fn cost_miss_ratio(&self) -> f64 {
        share(self.recompute_cost(), self.done.cost)
    }

    /// Lower bound of `token_miss_ratio`.
    pub fn token_floor(&self) -> f64 {
        share((self.floor.tokens - self.floor.hit_tokens) as f64, self.floor.tokens as f64)
    }

    /// Requests replayed per second.
    pub fn requests_per_second(&self) -> f64 {
        share(self.requests as f64 * 1e9, self.run_ns as f64)
    }

    /// Whether another run has the same result, except for times.
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

/// Found and available tokens of each session or tenant.
pub(super) struct Shares(Vec<(u64, u64)>);

impl Shares {
    pub(super) fn of(pairs: Vec<(u64, u64)>) -> Shares {
        Shares(pairs)
    }

    pub(super) fn add(&mut self, row_number: usize, hit: u64, reusable: u64) {
        if let Some(row) = self.0.get_mut(row_number) {
            row.0 += hit;
            row.1 += reusable;
        }
    }

    pub(super) fn fairness(&self) -> f64 {
        jain(self.0.iter().copied())
    }
}
