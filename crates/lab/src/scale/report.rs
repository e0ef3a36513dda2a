//! Results of a simulation of many engines on one remote.

use crate::scale::remote::{Life, Peak};

const SECOND_NS: f64 = 1e9;
const MONTH_S: f64 = 30.0 * 86_400.0;
const GIB: f64 = (1u64 << 30) as f64;

/// Counters after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Requests that loaded chunks from the remote.
    pub remote_requests: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens found in the engine's own host tier.
    pub host_tokens: u64,
    /// Tokens found on the engine's own disk.
    pub disk_tokens: u64,
    /// Tokens loaded from the remote, uploaded by the same engine.
    pub own_tokens: u64,
    /// Tokens loaded from the remote, uploaded by another engine.
    pub other_tokens: u64,
    /// Tokens in the remote that were faster to compute.
    pub declined_tokens: u64,
    /// Tokens in the remote that were fetched too often in this second.
    pub capped_tokens: u64,
    /// Objects looked up.
    pub lookups: u64,
    /// Objects looked up and absent.
    pub absent_lookups: u64,
    /// Lookup batches.
    pub lookup_batches: u64,
    /// Lookups saved: known to be present.
    pub hinted_present: u64,
    /// Lookups saved: known to be absent.
    pub hinted_absent: u64,
    /// Lookups skipped on failed shards.
    pub masked: u64,
    /// Gets of objects.
    pub gets: u64,
    /// Bytes fetched.
    pub get_bytes: u64,
    /// Gets of objects that were not present any more.
    pub stale: u64,
    /// Bytes fetched behind a missing chunk, of no use.
    pub wasted_bytes: u64,
    /// Chunks to upload.
    pub sends: u64,
    /// Uploads saved: known to be present.
    pub spared_sends: u64,
    /// Uploads dropped because too many were queued.
    pub dropped_sends: u64,
    /// Objects looked up before an upload; included in the lookups.
    pub put_lookups: u64,
    /// Puts of objects.
    pub puts: u64,
    /// Bytes of the puts.
    pub put_bytes: u64,
    /// Objects stored.
    pub stored: u64,
    /// Puts of existing objects, rejected by name.
    pub duplicates: u64,
    /// Bytes of those puts.
    pub duplicate_bytes: u64,
    /// Puts skipped on failed shards.
    pub away_puts: u64,
}

impl Counts {
    /// Tokens loaded from the remote.
    pub fn remote_tokens(&self) -> u64 {
        self.own_tokens + self.other_tokens
    }

    /// Tokens computed.
    pub fn computed_tokens(&self) -> u64 {
        self.tokens - self.host_tokens - self.disk_tokens - self.remote_tokens()
    }
}

/// Totals of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineShare {
    /// Requests.
    pub requests: u64,
    /// Time of loading and computing.
    pub work_ns: u64,
    /// Objects looked up.
    pub lookups: u64,
    /// Bytes fetched.
    pub get_bytes: u64,
    /// Bytes uploaded.
    pub put_bytes: u64,
}

/// Prices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// Per million puts.
    pub puts: f64,
    /// Per million gets and lookups.
    pub gets: f64,
    /// Per GiB read.
    pub gib: f64,
    /// Per GiB stored for a month.
    pub gib_month: f64,
    /// Per hour of an engine's accelerators.
    pub engine_hour: f64,
}

impl Default for Prices {
    /// List prices of an object store within its region; an engine with one accelerator.
    fn default() -> Prices {
        Prices { puts: 5.0, gets: 0.4, gib: 0.0, gib_month: 0.023, engine_hour: 2.0 }
    }
}

/// Costs of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Bill {
    /// Gets and lookups.
    pub gets: f64,
    /// Puts.
    pub puts: f64,
    /// Bytes read.
    pub bytes: f64,
    /// Bytes stored.
    pub storage: f64,
    /// Value of the accelerator time saved.
    pub saved: f64,
}

impl Bill {
    /// Sum of the costs.
    pub fn sum(&self) -> f64 {
        self.gets + self.puts + self.bytes + self.storage
    }
}

/// Result of a run, equal in every run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScaleReport {
    /// The spec of the policy, in canonical form.
    pub policy: String,
    /// Number of engines.
    pub engines: usize,
    /// Name of the router.
    pub router: &'static str,
    /// Counted time by the trace's clock, in seconds.
    pub seconds: f64,
    /// The counters.
    pub counts: Counts,
    /// Tokens that an unbounded cache would have found for the same requests.
    pub floor_tokens: u64,
    /// Totals by engine.
    pub shares: Vec<EngineShare>,
    /// Objects per chunk.
    pub chunk_objects: usize,
    /// Stored bytes of a chunk.
    pub chunk_bytes: u64,
    /// Objects by fate, including the warm-up.
    pub life: Life,
    /// Bytes in the remote times seconds.
    pub byte_seconds: f64,
    /// Peak of all shards.
    pub peak: Peak,
    /// Peak of the busiest shard.
    pub shard_peak: Peak,
    /// Most gets of one chunk in a second.
    pub chunk_peak: u64,
    /// Share of the gets of the most fetched chunk.
    pub hottest_share: f64,
    /// Share of the gets of the 1 % most fetched chunks.
    pub hot_share: f64,
    /// Time to the first token: mean, median, 99th percentile.
    pub ttft_ns: [u64; 3],
    /// The same without a remote.
    pub local_ttft_ns: [u64; 3],
    /// Time saved by the remote.
    pub saved_ns: u64,
    /// Requests slower than without a remote.
    pub slower: u64,
}

impl ScaleReport {
    /// A share of all tokens.
    pub fn share(&self, tokens: u64) -> f64 {
        tokens as f64 / self.counts.tokens.max(1) as f64
    }

    /// A rate per second.
    pub fn rate(&self, count: u64) -> f64 {
        if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 }
    }

    /// Work of the busiest engine relative to the mean.
    pub fn imbalance(&self) -> f64 {
        let total: u64 = self.shares.iter().map(|share| share.work_ns).sum();
        let most = self.shares.iter().map(|share| share.work_ns).max().unwrap_or(0);
        most as f64 * self.shares.len() as f64 / total.max(1) as f64
    }

    /// The costs at these prices.
    pub fn bill(&self, prices: &Prices) -> Bill {
        let c = &self.counts;
        Bill {
            gets: (c.gets + c.lookups) as f64 / 1e6 * prices.gets,
            puts: c.puts as f64 / 1e6 * prices.puts,
            bytes: c.get_bytes as f64 / GIB * prices.gib,
            storage: self.byte_seconds / GIB / MONTH_S * prices.gib_month,
            saved: self.saved_ns as f64 / SECOND_NS / 3600.0 * prices.engine_hour,
        }
    }
}
