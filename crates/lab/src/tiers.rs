//! Cost model of a replay on tiers: time to the first token, bytes moved, work caused by evictions.
//!
//! The first `n` tiers together hold what the policy keeps in the sum of their sizes. A block is
//! served by the first tier whose sum contains it. Requests do not queue behind each other.

use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::trace::replay::{Replay, ReplayOpts, Step};
use kvtier::trace::report::Report;
use kvtier::trace::requests::{Request, Trace};
use kvtier::trace::study::Study;

/// Most tiers.
pub const MAX_TIERS: usize = 8;
const WATCH_EVERY: usize = 256;

/// A tier.
#[derive(Clone, Debug, PartialEq)]
pub struct Tier {
    /// Its name.
    pub name: String,
    /// Capacity in blocks.
    pub blocks: u64,
    /// Read bandwidth in bytes per second; 0 = infinite.
    pub bytes_per_second: f64,
}

/// Cost of computation and size of KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes of KV of a token.
    pub token_bytes: u64,
    /// Time to compute a unit of cost; with the default cost, a token without context.
    pub unit_ns: f64,
}

impl Default for Machine {
    /// A 70B model with grouped-query attention in 16 bits, and a prefill of 10,000 tokens per
    /// second.
    fn default() -> Machine {
        Machine { token_bytes: 327_680, unit_ns: 100_000.0 }
    }
}

/// Result of one tier.
#[derive(Clone, Debug, Default)]
pub struct TierShare {
    /// Its name.
    pub name: String,
    /// Its capacity in blocks.
    pub blocks: u64,
    /// Tokens that it served.
    pub hit_tokens: u64,
    /// Bytes read from it.
    pub read_bytes: u64,
    /// Bytes written to it: new blocks, or victims of the tier above.
    pub written_bytes: u64,
}

/// Result on all tiers.
#[derive(Clone, Default)]
pub struct Estimate {
    /// The replay on all tiers together.
    pub report: Report,
    /// Each tier.
    pub tiers: Vec<TierShare>,
    /// Mean time to the first token.
    pub ttft_mean_ns: u64,
    /// Median time to the first token.
    pub ttft_p50_ns: u64,
    /// 99th percentile of the time to the first token.
    pub ttft_p99_ns: u64,
    /// Mean time to the first token if everything had stayed on the first tier.
    pub ttft_floor_ns: u64,
}

impl Estimate {
    /// Share of the work caused by evictions: the loss of throughput.
    pub fn loss(&self) -> f64 {
        let (all, least) = (self.ttft_mean_ns as f64, self.ttft_floor_ns as f64);
        if all > 0.0 { 1.0 - least / all } else { 0.0 }
    }
}

/// Replays the whole trace on tiers.
pub fn run(
    trace: &Trace,
    study: &Study,
    spec: &str,
    tiers: &[Tier],
    machine: &Machine,
    opts: &ReplayOpts,
    watch: &mut dyn FnMut(usize) -> bool,
) -> Result<Estimate> {
    if tiers.is_empty() || tiers.len() > MAX_TIERS {
        fail!(Limit, "{} tiers, allowed is 1 to {MAX_TIERS}", tiers.len());
    }
    let mut runs = Vec::new();
    let mut sum = 0u64;
    for tier in tiers {
        sum = sum.saturating_add(tier.blocks);
        runs.push(Replay::open(trace, study, spec, sum, opts)?);
    }
    let mut waits: Vec<u64> = Vec::new();
    if waits.try_reserve_exact(trace.requests().len()).is_err() {
        fail!(NoMem, "no memory for {} waiting times", trace.requests().len());
    }
    let mut model = Model { tiers, machine, shares: shares(tiers), each: trace.block_tokens() };
    let mut least = 0.0;
    for (r, request) in trace.requests().iter().enumerate() {
        let mut steps = [Step::default(); MAX_TIERS];
        for (run, step) in runs.iter_mut().zip(&mut steps) {
            *step = run.step()?.unwrap_or_default();
        }
        waits.push(model.serve(request, &steps[..tiers.len()], opts));
        let found = request.tokens_of(study.reusable_blocks[r] as usize, trace.block_tokens());
        let cost = opts.cost.of(0, u64::from(request.input_tokens)) - opts.cost.of(0, found);
        least += cost * machine.unit_ns;
        if r % WATCH_EVERY == 0 && !watch(r) {
            fail!(Cancelled, "stopped after {r} requests");
        }
    }
    watch(waits.len());
    let count = waits.len().max(1);
    let total: f64 = waits.iter().map(|&ns| ns as f64).sum();
    waits.sort_unstable();
    let quantile = |share: f64| waits.get((share * count as f64) as usize).copied().unwrap_or(0);
    let (ttft_p50_ns, ttft_p99_ns) = (quantile(0.5), quantile(0.99));
    Ok(Estimate {
        report: runs.pop().map(Replay::finish).unwrap_or_default(),
        tiers: model.shares,
        ttft_mean_ns: (total / count as f64) as u64,
        ttft_p50_ns,
        ttft_p99_ns,
        ttft_floor_ns: (least / count as f64) as u64,
    })
}

fn shares(tiers: &[Tier]) -> Vec<TierShare> {
    let share =
        |t: &Tier| TierShare { name: t.name.clone(), blocks: t.blocks, ..Default::default() };
    tiers.iter().map(share).collect()
}

struct Model<'a> {
    tiers: &'a [Tier],
    machine: &'a Machine,
    shares: Vec<TierShare>,
    each: u32,
}

impl Model<'_> {
    /// Counts the bytes that a request moves; returns its time to the first token.
    fn serve(&mut self, request: &Request, steps: &[Step], opts: &ReplayOpts) -> u64 {
        let object_bytes = u64::from(self.each) * self.machine.token_bytes / u64::from(opts.layers);
        let mut wait_ns = 0.0;
        let (mut above_tokens, mut best_cost) = (0u64, 0.0f64);
        let mut incoming = steps.first().map_or(0, |s| s.inserted as u64);
        for (i, step) in steps.iter().enumerate() {
            // A policy may keep less in a larger cache. Hits of a smaller sum count for the larger
            // ones as well.
            let tokens = step.hit_tokens.max(above_tokens) - above_tokens;
            let bytes = if i == 0 { 0 } else { tokens * self.machine.token_bytes };
            let share = &mut self.shares[i];
            share.hit_tokens += tokens;
            share.read_bytes += bytes;
            share.written_bytes += incoming * object_bytes;
            if self.tiers[i].bytes_per_second > 0.0 {
                wait_ns += bytes as f64 * 1e9 / self.tiers[i].bytes_per_second;
            }
            above_tokens += tokens;
            best_cost = best_cost.max(step.hit_cost);
            incoming = step.evicted as u64;
        }
        let cost = opts.cost.of(0, u64::from(request.input_tokens)) - best_cost;
        (wait_ns + cost.max(0.0) * self.machine.unit_ns) as u64
    }
}
