//! What goes wrong on a simulated disk, and how often or when.

use kvtier::base::random::Random;

/// A thing that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A read fails, and leaves anything in the memory.
    ReadError = 0,
    /// A write fails; any of its sectors are written.
    WriteError = 1,
    /// A sync of a file fails: what was written since the last one is kept or lost.
    SyncError = 2,
    /// A call about names fails: list, create, open, rename, remove, sync of names.
    NameError = 3,
    /// A create or a write finds the disk full.
    Full = 4,
    /// A read ends too early.
    ShortRead = 5,
    /// A write ends too early.
    ShortWrite = 6,
    /// A sync, of a file or of names, says that all is well and does nothing.
    LostSync = 7,
    /// A bit of what is read has changed for good.
    BitRot = 8,
    /// A write goes to another place of the file, and says that all is well.
    Misdirected = 9,
    /// A call takes [`Costs::slow_ns`] longer.
    Slow = 10,
    /// A call takes [`STUCK_NS`] longer.
    Stuck = 11,
}

/// How many kinds of faults there are.
pub const FAULTS: usize = 12;
/// What a call costs that is stuck.
pub const STUCK_NS: u64 = 1 << 50;

/// When faults happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Times in a million, of each [`Fault`].
    pub per_million: [u32; FAULTS],
    /// At which call that it can befall, counted from 1 since the plan was made; 0 =
    /// at none.
    pub at: [u64; FAULTS],
    /// At which call the power fails, counted from 1 since the plan was made, each
    /// piece of a batch for itself; 0 = at none.
    pub crash_at: u64,
}

impl Plan {
    /// With a fault so many times in a million.
    #[must_use]
    pub fn often(mut self, fault: Fault, per_million: u32) -> Plan {
        self.per_million[fault as usize] = per_million;
        self
    }

    /// With a fault at the nth call that it can befall.
    #[must_use]
    pub fn once(mut self, fault: Fault, nth: u64) -> Plan {
        self.at[fault as usize] = nth;
        self
    }

    /// With a power failure at the nth call.
    #[must_use]
    pub fn crash(mut self, nth: u64) -> Plan {
        self.crash_at = nth;
        self
    }
}

/// What calls take, in virtual time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Every call, every piece.
    pub call_ns: u64,
    /// Every KiB moved, begun or whole.
    pub kib_ns: u64,
    /// Every sync.
    pub sync_ns: u64,
    /// A call that is slow.
    pub slow_ns: u64,
}

impl Default for Costs {
    fn default() -> Self {
        Costs { call_ns: 20_000, kib_ns: 300, sync_ns: 500_000, slow_ns: 50_000_000 }
    }
}

/// A plan that is carried out.
pub struct Planned {
    plan: Plan,
    calls: [u64; FAULTS],
    /// Calls of any kind.
    all_calls: u64,
}

impl Planned {
    /// A plan, from its start.
    pub fn new(plan: Plan) -> Planned {
        Planned { plan, calls: [0; FAULTS], all_calls: 0 }
    }

    /// Whether a fault strikes this call.
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
