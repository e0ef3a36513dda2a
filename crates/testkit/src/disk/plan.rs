//! Planned faults of a simulated disk.

use kvtier::base::random::Random;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A read fails, with undefined memory.
    ReadError = 0,
    /// A write fails; any of its sectors are written.
    WriteError = 1,
    /// A sync of a file fails; unsynced writes survive or are lost.
    SyncError = 2,
    /// A call about names fails: list, create, open, rename, remove, sync of names.
    NameError = 3,
    /// A create or a write finds the disk full.
    Full = 4,
    /// A short read.
    ShortRead = 5,
    /// A short write.
    ShortWrite = 6,
    /// A sync, of a file or of names, succeeds without effect.
    LostSync = 7,
    /// A bit of the range that is read flips permanently.
    BitRot = 8,
    /// A write succeeds at a wrong offset of the file.
    Misdirected = 9,
    /// A call takes [`Costs::slow_ns`] longer.
    Slow = 10,
    /// A call takes [`STUCK_NS`] longer.
    Stuck = 11,
}

/// Number of kinds.
pub const FAULTS: usize = 12;
/// Duration of a stuck call.
pub const STUCK_NS: u64 = 1 << 50;

/// When faults happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Probability of each [`Fault`], in millionths.
    pub per_million: [u32; FAULTS],
    /// Call, counted from 1 among those that the fault can hit, at which it happens; 0 = none.
    pub at: [u64; FAULTS],
    /// Call, counted from 1 with each piece of a batch, at which the power fails; 0 = none.
    pub crash_at: u64,
}

impl Plan {
    /// Sets the probability of a fault.
    #[must_use]
    pub fn often(mut self, fault: Fault, per_million: u32) -> Plan {
        self.per_million[fault as usize] = per_million;
        self
    }

    /// Lets a fault happen at the nth call that it can hit.
    #[must_use]
    pub fn once(mut self, fault: Fault, nth: u64) -> Plan {
        self.at[fault as usize] = nth;
        self
    }

    /// Lets the power fail at the nth call.
    #[must_use]
    pub fn crash(mut self, nth: u64) -> Plan {
        self.crash_at = nth;
        self
    }
}

/// Duration of calls in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Every call and every piece.
    pub call_ns: u64,
    /// Every KiB of a transfer, rounded up.
    pub kib_ns: u64,
    /// Every sync.
    pub sync_ns: u64,
    /// A slow call.
    pub slow_ns: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { call_ns: 20_000, kib_ns: 300, sync_ns: 500_000, slow_ns: 50_000_000 }
    }
}

/// A plan with its counters.
pub struct Planned {
    plan: Plan,
    calls: [u64; FAULTS],
    /// Calls of any kind.
    all_calls: u64,
}

impl Planned {
    /// A plan at its start.
    pub fn new(plan: Plan) -> Planned {
        Planned { plan, calls: [0; FAULTS], all_calls: 0 }
    }

    /// Whether a fault happens at this call.
    pub fn strikes(&mut self, fault: Fault, random: &mut Random) -> bool {
        let kind = fault as usize;
        self.calls[kind] += 1;
        let often = self.plan.per_million[kind];
        self.calls[kind] == self.plan.at[kind] || (often > 0 && random.chance(often))
    }

    /// Counts a call; whether the power fails at it.
    pub fn count(&mut self) -> bool {
        self.all_calls += 1;
        self.all_calls == self.plan.crash_at
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.all_calls
    }
}
