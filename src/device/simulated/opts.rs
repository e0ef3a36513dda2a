//! Options of the simulated device.

/// Options of the simulated device.
#[derive(Clone, Debug)]
pub struct SimulatedOpts {
    /// Number of streams; default 4.
    pub streams: u32,
    /// Minimum duration of a batch with copies; default 10 µs.
    pub latency_ns: u64,
    /// Bandwidth of a stream; 0 = unlimited; default 20 GB/s.
    pub bytes_per_second: u64,
    /// Batches take up to this much longer, chosen by the seed; default 200.
    pub jitter_percent: u64,
    /// Seed of all random choices.
    pub seed: u64,
    /// Batches, counted from 1, whose events fail.
    pub fail_at: Vec<u64>,
    /// The batch, counted from 1, that loses the device; 0 = none.
    pub lost_at: u64,
    /// Memory that can be allocated; 0 = unlimited.
    pub memory_bytes: u64,
    /// Granularity of windows, a power of two; 0 = no windows; default 2 MiB.
    pub granularity_bytes: u64,
    /// Compute checksums of bytes in device memory.
    pub sums: bool,
    /// Copies over the bus, counted from 1, that flip a bit.
    pub damage_at: Vec<u64>,
    /// Share of copies over the bus that flip a bit, in thousandths, chosen by the seed.
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
