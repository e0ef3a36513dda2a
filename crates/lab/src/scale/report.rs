//! What came of many engines on one remote.

use crate::scale::remote::{Life, Peak};

const SECOND_NS: f64 = 1e9;
const MONTH_S: f64 = 30.0 * 86_400.0;
const GIB: f64 = (1u64 << 30) as f64;

/// What is counted, behind the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Requests that loaded something from the remote.
    pub remote_requests: u64,
    /// Tokens asked for.
    pub tokens: u64,
    /// Of those, found in the engine's own host.
    pub host_tokens: u64,
    /// On its own disk.
    pub disk_tokens: u64,
    /// In the remote, sent by the engine itself.
    pub own_tokens: u64,
    /// In the remote, sent by another engine.
    pub other_tokens: u64,
    /// Found there, but sooner computed than loaded.
    pub declined_tokens: u64,
    /// Found there, but fetched too often in this second.
    pub capped_tokens: u64,
    /// Objects asked for.
    pub asks: u64,
    /// Of those, absent.
    pub asked_absent: u64,
    /// Batches of them.
    pub ask_batches: u64,
    /// Objects that needed no ask: known to be there.
    pub spared_there: u64,
    /// Known to be absent.
    pub spared_absent: u64,
    /// On shards that are away.
    pub masked: u64,
    /// Objects fetched, or tried.
    pub gets: u64,
    /// Bytes that came.
    pub get_bytes: u64,
    /// Gets of what was there no more.
    pub stale: u64,
    /// Bytes that came behind such a hole: of no use.
    pub wasted_bytes: u64,
    /// Chunks to be sent.
    pub sends: u64,
    /// Of those, known to be there: not sent.
    pub spared_sends: u64,
    /// Given up, for too many waited already.
    pub dropped_sends: u64,
    /// Objects asked for before they were sent; among `asks`, too.
    pub put_asks: u64,
    /// Objects sent.
    pub puts: u64,
    /// Their bytes.
    pub put_bytes: u64,
    /// Of those, stored.
    pub stored: u64,
    /// There already: refused by name.
    pub duplicates: u64,
    /// Bytes that were sent for nothing.
    pub duplicate_bytes: u64,
    /// Not sent, for the shard is away.
    pub away_puts: u64,
}

impl Counts {
    /// Tokens found in the remote and loaded.
    pub fn remote_tokens(&self) -> u64 {
        self.own_tokens + self.other_tokens
    }

    /// Tokens to be computed.
    pub fn computed_tokens(&self) -> u64 {
        self.tokens - self.host_tokens - self.disk_tokens - self.remote_tokens()
    }
}

/// What one engine did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineShare {
    /// Requests.
    pub requests: u64,
    /// Time of loading and computing for them.
    pub work_ns: u64,
    /// Objects asked for.
    pub asks: u64,
    /// Bytes that came.
    pub get_bytes: u64,
    /// Bytes sent.
    pub put_bytes: u64,
}

/// What things cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// A million puts.
    pub puts: f64,
    /// A million gets, or asks.
    pub gets: f64,
    /// A GiB that comes out.
    pub gib: f64,
    /// A GiB stored for a month.
    pub gib_month: f64,
    /// An hour of an engine's accelerators.
    pub engine_hour: f64,
}

impl Default for Prices {
    /// As an object store lists them, within its region; an engine of one accelerator.
    fn default() -> Prices {
        Prices { puts: 5.0, gets: 0.4, gib: 0.0, gib_month: 0.023, engine_hour: 2.0 }
    }
}

/// What a run cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bill {
    /// Gets and asks.
    pub gets: f64,
    /// Puts.
    pub puts: f64,
    /// Bytes that came out.
    pub bytes: f64,
    /// Bytes that were kept while it ran.
    pub kept: f64,
    /// Accelerator time that was not needed.
    pub saved: f64,
}

impl Bill {
    /// All of it.
    pub fn sum(&self) -> f64 {
        self.gets + self.puts + self.bytes + self.kept
    }
}

/// The outcome of a run; the same in every run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScaleReport {
    /// The spec of the policy, in canonical form.
    pub policy: String,
    /// How many engines.
    pub engines: usize,
    /// The router's name.
    pub router: &'static str,
    /// How long what was counted took, by the trace's clock.
    pub seconds: f64,
    /// What was counted.
    pub counts: Counts,
    /// Tokens that an unbounded cache would have found for the same requests.
    pub floor_tokens: u64,
    /// By engine.
    pub shares: Vec<EngineShare>,
    /// Objects of a chunk.
    pub chunk_objects: usize,
    /// Bytes of a chunk as it is stored.
    pub chunk_bytes: u64,
    /// Where objects went, with those of the warm-up.
    pub life: Life,
    /// Bytes in the remote, times the seconds that they were there.
    pub byte_seconds: f64,
    /// The peak of all shards.
    pub peak: Peak,
    /// Of the busiest one.
    pub shard_peak: Peak,
    /// Most gets of one chunk in a second.
    pub chunk_peak: u64,
    /// Share of the gets that the chunk fetched most has.
    pub hottest_share: f64,
    /// Of the 1 % of chunks fetched most.
    pub hot_share: f64,
    /// Wait for the first token: mean, median, 99 of 100.
    pub ttft_ns: [u64; 3],
    /// The same, had there been no remote.
    pub local_ttft_ns: [u64; 3],
    /// Time that the remote saved in all.
    pub saved_ns: u64,
    /// Requests that waited longer than without a remote.
    pub slower: u64,
}

impl ScaleReport {
    /// A part of all tokens.
    pub fn share(&self, tokens: u64) -> f64 {
        tokens as f64 / self.counts.tokens.max(1) as f64
    }

    /// So many, a second.
    pub fn rate(&self, count: u64) -> f64 {
        if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 }
    }

    /// What the busiest engine has in parts of the mean.
    pub fn imbalance(&self) -> f64 {
        let total: u64 = self.shares.iter().map(|share| share.work_ns).sum();
        let most = self.shares.iter().map(|share| share.work_ns).max().unwrap_or(0);
        most as f64 * self.shares.len() as f64 / total.max(1) as f64
    }

    /// What it cost.
    pub fn bill(&self, prices: &Prices) -> Bill {
        let c = &self.counts;
        Bill {
            gets: (c.gets + c.asks) as f64 / 1e6 * prices.gets,
            puts: c.puts as f64 / 1e6 * prices.puts,
            bytes: c.get_bytes as f64 / GIB * prices.gib,
            kept: self.byte_seconds / GIB / MONTH_S * prices.gib_month,
            saved: self.saved_ns as f64 / SECOND_NS / 3600.0 * prices.engine_hour,
        }
    }
}
