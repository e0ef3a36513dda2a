//! How a device that exists only in time behaves.

/// How a simulated device behaves.
#[derive(Clone, Debug)]
pub struct SimulatedOpts {
    /// How many streams it has.
    pub streams: u32,
    /// What each batch with copies takes at least.
    pub latency_ns: u64,
    /// What a stream moves in a second; 0 = no limit.
    pub bytes_per_second: u64,
    /// Batches take up to this much longer, as the seed says.
    pub jitter_percent: u64,
    /// Chooses all that is left to chance.
    pub seed: u64,
    /// Batches, counted from 1, whose events fail.
    pub fail_at: Vec<u64>,
    /// The batch, counted from 1, with which the device is lost; 0 = none.
    pub lost_at: u64,
    /// What memory it has to give; 0 = no limit.
    pub memory_bytes: u64,
    /// What places and lengths in its windows are multiples of; 0 = it has none.
    pub granularity_bytes: u64,
    /// It sums what is in its memory.
    pub sums: bool,
    /// Copies between its memory and the host's, counted from 1, that come with a wrong bit.
    pub damage_at: Vec<u64>,
    /// So many of a thousand such copies do, as the seed says.
    pub damage_permille: u64,
}

impl Default for SimulatedOpts {
    fn default() -> SimulatedOpts {
        SimulatedOpts {
            streams: 4,
            latency_ns: 10_000,
            bytes_per_second: 20_000_000_000,
            jitter_percent: 200,
            seed: 0,
            fail_at: Vec::new(),
            lost_at: 0,
            memory_bytes: 0,
            granularity_bytes: 2 << 20,
            sums: false,
            damage_at: Vec::new(),
            damage_permille: 0,
        }
    }
}
