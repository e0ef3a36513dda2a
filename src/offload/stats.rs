//! What an offload has done, what it has saved, and who waited for what.

/// Waits for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// How many took any time.
    pub count: u64,
    /// How long, in nanoseconds.
    pub ns: u64,
}

impl Waits {
    pub(super) fn add(&mut self, ns: u64) {
        self.count += u64::from(ns > 0);
        self.ns = self.ns.saturating_add(ns);
    }
}

/// Counters since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Loads of a layer.
    pub loads: u64,
    /// Of them, those that a policy has cut.
    pub selections: u64,
    /// Blocks that could have been loaded.
    pub candidates: u64,
    /// Blocks that were.
    pub loaded_blocks: u64,
    /// Bytes of them.
    pub loaded_bytes: u64,
    /// Bytes that were not loaded, since a policy did not want them.
    pub saved_bytes: u64,
    /// Loads that failed: something was not there any more, or could not be read.
    pub failed_loads: u64,
    /// Blocks that were put into the store.
    pub put_blocks: u64,
    /// Bytes of them.
    pub put_bytes: u64,
    /// Bytes that were copied to or from tails.
    pub tail_bytes: u64,
    /// Bytes of keys that came from device memory to the host's, for policies to see.
    pub key_bytes: u64,
    /// Tokens that policies evicted: heads times tokens, where heads have lists of their own.
    pub evicted_tokens: u64,
    /// What policies know of the sequence, in bytes.
    pub policy_bytes: u64,
    /// Waits for blocks to come.
    pub load_waits: Waits,
    /// Waits for a full tail to leave.
    pub tail_waits: Waits,
    /// Waits for the blocks that cuts divide.
    pub cut_waits: Waits,
    /// Time that policies took to select.
    pub select_waits: Waits,
    /// Selections that were audited ([`crate::offload::audit`]).
    pub audited: u64,
    /// Blocks that their layers' own queries looked at most, as many as were chosen.
    pub wanted: u64,
    /// Of those, blocks that were chosen.
    pub found: u64,
    /// Which part of the attention to blocks went to those chosen, in millionths: the sum over
    /// what was audited.
    pub found_ppm: u64,
}

impl Stats {
    /// The part of the blocks that were wanted that was chosen, if anything was audited.
    pub fn recall(&self) -> Option<f64> {
        (self.wanted > 0).then(|| self.found as f64 / self.wanted as f64)
    }
}
