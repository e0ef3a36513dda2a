//! The budget: hard limits on the bytes in use, for each tier, at every instant.
//!
//! An owner opens an *account*. The bytes of an account are *reserved* (not yet in use) or
//! *committed* (in use). A reservation that does not fit fails at once, or waits as an op while
//! the budget reclaims bytes from other owners.

use std::collections::VecDeque;

use crate::base::account::{Account, AccountUsage};
use crate::base::core::Core;
use crate::base::machine::MemoryFacts;
use crate::base::op::{ISSUED, Op, OpRef, Owner};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::fail;

/// A tier whose bytes are counted. `Pinned` is the locked part of `Host`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Tier {
    /// Memory of the accelerator.
    Device = 0,
    /// RAM.
    Host = 1,
    /// Local files.
    Disk = 2,
    /// A remote store.
    Remote = 3,
    /// Locked RAM.
    Pinned = 4,
}

/// The number of tiers.
pub const TIERS: usize = 5;

/// The tiers in the order of their numbers.
pub const ALL_TIERS: [Tier; TIERS] =
    [Tier::Device, Tier::Host, Tier::Disk, Tier::Remote, Tier::Pinned];

/// Most open accounts of one budget.
pub const MAX_ACCOUNTS: usize = 1024;
/// Most waiting reservations of one budget.
pub const MAX_WAITERS: usize = 4096;
/// Default host limit, in percent of the effective memory.
pub const DEFAULT_HOST_PERCENT: u64 = 50;
/// Largest default reserve for the rest of the process.
pub const DEFAULT_RESERVE_BYTES: u64 = 512 << 20;

/// The default reserve for the rest of the process: an eighth of the effective memory, at most
/// [`DEFAULT_RESERVE_BYTES`].
pub fn default_reserve_bytes(facts: &MemoryFacts) -> u64 {
    (facts.effective_bytes() / 8).min(DEFAULT_RESERVE_BYTES)
}

impl Tier {
    /// The tier of a number from outside.
    pub fn from_code(code: u32) -> Result<Tier> {
        ALL_TIERS.get(code as usize).copied().ok_or_else(|| {
            let text = format!("tier {code} is unknown: tiers are 0 to {}", TIERS - 1);
            Error::new(Status::Invalid, text)
        })
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        ["device", "host", "disk", "remote", "pinned"][self as usize]
    }
}

/// Called with tier, bytes and deadline to reclaim bytes from an owner. Returns the bytes that
/// the owner promises to release soon.
pub type Reclaim = Box<dyn Fn(Tier, u64, u64) -> u64 + Send + Sync>;

/// Options of a budget.
#[derive(Clone, Debug, Default)]
pub struct BudgetOpts {
    /// Limits in bytes for each tier; `None` = the default: host and pinned from the machine, 0
    /// for the others.
    pub limits: [Option<u64>; TIERS],
    /// Bytes of the effective host memory left to the rest of the process; `None` =
    /// [`default_reserve_bytes`].
    pub reserve_bytes: Option<u64>,
    /// Refuse a host limit above the memory of the machine, instead of lowering it.
    pub strict: bool,
}

/// Limit and counters of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUsage {
    /// The requested limit.
    pub asked_bytes: u64,
    /// The effective limit.
    pub limit_bytes: u64,
    /// Bytes reserved and not yet in use.
    pub reserved_bytes: u64,
    /// Bytes in use.
    pub committed_bytes: u64,
    /// Most bytes ever reserved and committed together.
    pub peak_bytes: u64,
    /// Reservations that failed.
    pub refused: u64,
    /// Reservations that wait.
    pub waiting: u64,
    /// Bytes that owners were requested to release.
    pub reclaim_requested_bytes: u64,
}

impl TierUsage {
    pub(crate) fn used(&self) -> u64 {
        self.reserved_bytes + self.committed_bytes
    }

    pub(crate) fn free(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used())
    }

    pub(crate) fn fits(&self, bytes: u64) -> bool {
        self.used() <= self.limit_bytes && bytes <= self.limit_bytes - self.used()
    }

    pub(crate) fn reserve(&mut self, bytes: u64) {
        self.reserved_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used());
        assert!(self.used() <= self.limit_bytes, "a budget was overdrawn");
    }
}

pub(crate) struct Waiter {
    pub(crate) account: Arc<Account>,
    pub(crate) bytes: u64,
    pub(crate) op: OpRef,
}

impl Waiter {
    /// Whether the op ended while it waited.
    fn has_ended(&self) -> bool {
        self.op.state() & ISSUED != 0
    }
}

pub(crate) struct Inner {
    pub(crate) tiers: [TierUsage; TIERS],
    pub(crate) held: Vec<(u64, [AccountUsage; TIERS])>,
    accounts: Vec<Weak<Account>>,
    /// Waiting reservations of each tier, oldest first.
    pub(crate) waiters: [VecDeque<Waiter>; TIERS],
    next_account: u64,
    /// Bytes that owners have promised to release and have not released yet.
    promised: [u64; TIERS],
    /// Deadline of the latest of those promises; 0 = none.
    promised_until: [u64; TIERS],
    /// Bytes released so far.
    returned: [u64; TIERS],
    reclaim_queued: bool,
    pub(crate) closed: bool,
}

/// The byte limits of all tiers.
pub struct Budget {
    core: Arc<Core>,
    this: Weak<Budget>,
    reserve_bytes: u64,
    pub(crate) inner: Mutex<Inner>,
    /// Signalled when a reclaimer has returned.
    pub(crate) reclaim_returned: Condvar,
}

impl Budget {
    /// Opens a budget on the memory that the machine has now.
    pub fn open(core: &Arc<Core>, opts: &BudgetOpts) -> Result<Arc<Budget>> {
        Budget::open_on(core, opts, &MemoryFacts::probe())
    }

    /// Opens the budget of a store whose caller passed none. Its host limit is the memory that
    /// the machine or the cgroup has free now, less the default reserve. Other tiers have no
    /// limit.
    pub fn of_machine(core: &Arc<Core>, host_bytes: u64) -> Result<Arc<Budget>> {
        let facts = MemoryFacts::probe();
        let reserve = default_reserve_bytes(&facts);
        let usable = facts.effective_bytes().saturating_sub(reserve);
        if usable < host_bytes {
            let limit = if facts.cgroup.is_some() { "the cgroup" } else { "the machine" };
            log::warn!(
                "host={host_bytes} bytes were requested; {limit} has {usable} free now, besides \
                 {reserve} bytes reserved for the rest of the process"
            );
        }
        let mut limits = [Some(u64::MAX); TIERS];
        limits[Tier::Host as usize] = Some(usable);
        limits[Tier::Pinned as usize] = Some(facts.lockable_bytes());
        limits[Tier::Disk as usize] = None;
        Budget::open_on(core, &BudgetOpts { limits, ..BudgetOpts::default() }, &facts)
    }

    /// Opens a budget on given facts about the machine.
    pub fn open_on(
        core: &Arc<Core>,
        opts: &BudgetOpts,
        facts: &MemoryFacts,
    ) -> Result<Arc<Budget>> {
        core.check_open()?;
        let reserve_bytes = opts.reserve_bytes.unwrap_or_else(|| default_reserve_bytes(facts));
        let mut tiers = [TierUsage::default(); TIERS];
        for tier in ALL_TIERS {
            let limit = opts.limits[tier as usize];
            tiers[tier as usize] = open_tier(tier, limit, reserve_bytes, facts, opts.strict)?;
        }
        let host = tiers[Tier::Host as usize].limit_bytes;
        let pinned = &mut tiers[Tier::Pinned as usize];
        pinned.limit_bytes = pinned.limit_bytes.min(host);
        let budget = Arc::new_cyclic(|this| Budget {
            core: core.clone(),
            this: this.clone(),
            reserve_bytes,
            reclaim_returned: Condvar::new(),
            inner: Mutex::new(Inner {
                tiers,
                held: Vec::new(),
                accounts: Vec::new(),
                waiters: [const { VecDeque::new() }; TIERS],
                next_account: 1,
                promised: [0; TIERS],
                promised_until: [0; TIERS],
                returned: [0; TIERS],
                reclaim_queued: false,
                closed: false,
            }),
        });
        let owner: Weak<dyn Owner> = Arc::<Budget>::downgrade(&budget);
        core.add_owner(owner);
        Ok(budget)
    }

    /// The runtime of the budget.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Bytes of host memory left to the rest of the process.
    pub fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes
    }

    /// The reserve beside a tier's limit, for messages.
    pub(crate) fn reserve_note(&self, tier: Tier) -> String {
        match (tier, self.reserve_bytes) {
            (Tier::Host, 1..) => {
                format!(
                    "; the budget reserves {} bytes for the rest of the process (reserve_bytes)",
                    self.reserve_bytes
                )
            }
            _ => String::new(),
        }
    }

    /// Counters of a tier.
    pub fn usage(&self, tier: Tier) -> TierUsage {
        let inner = self.inner.lock();
        let waiting = inner.waiters[tier as usize].len() as u64;
        TierUsage { waiting, ..inner.tiers[tier as usize] }
    }

    /// The number of open accounts.
    pub fn accounts(&self) -> usize {
        self.inner.lock().held.len()
    }

    /// Sets the limit of a tier. Under a limit below the bytes in use, nothing is granted until
    /// enough was reclaimed from the owners.
    pub fn resize(self: &Arc<Budget>, tier: Tier, bytes: u64) -> Result<()> {
        let facts = MemoryFacts::probe();
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        let own = |tier: Tier, inner: &Inner| inner.tiers[tier as usize].committed_bytes;
        let usable = facts.effective_bytes().saturating_add(own(Tier::Host, &inner));
        let lockable = facts.lockable_bytes().saturating_add(own(Tier::Pinned, &inner));
        inner.tiers[tier as usize].asked_bytes = bytes;
        let cap = match tier {
            Tier::Host => usable.saturating_sub(self.reserve_bytes),
            _ => u64::MAX,
        };
        inner.tiers[tier as usize].limit_bytes = bytes.min(cap);
        // Pinned memory is host memory, so its limit follows.
        let host = inner.tiers[Tier::Host as usize].limit_bytes;
        let pinned = &mut inner.tiers[Tier::Pinned as usize];
        pinned.limit_bytes = pinned.asked_bytes.min(lockable).min(host);
        drop(inner);
        self.grant();
        self.schedule_reclaim();
        Ok(())
    }

    /// Opens an account. `reclaim` is called on the notifier thread, for accounts of low
    /// priority first.
    pub fn account(
        self: &Arc<Budget>,
        name: &str,
        priority: i32,
        reclaim: Option<Reclaim>,
    ) -> Result<Arc<Account>> {
        self.core.check_open()?;
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        if inner.held.len() >= MAX_ACCOUNTS {
            fail!(Limit, "a budget has at most {MAX_ACCOUNTS} accounts: close one first");
        }
        let id = inner.next_account;
        inner.next_account += 1;
        let budget = self.clone();
        let account = Arc::new(Account::new(budget, id, name, priority, reclaim));
        inner.held.push((id, [AccountUsage::default(); TIERS]));
        inner.accounts.retain(|a| a.strong_count() > 0);
        inner.accounts.push(Arc::downgrade(&account));
        Ok(account)
    }

    /// Refuses new accounts and reservations; ends waiting ones with `KVT_E_CLOSED`.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.end_waiters(Status::Closed);
    }

    fn end_waiters(&self, status: Status) {
        let waiters = std::mem::take(&mut self.inner.lock().waiters);
        for waiter in waiters.into_iter().flatten().filter(|w| w.op.claim()) {
            waiter.op.finish(status, None, None);
        }
    }

    /// Grants waiting reservations that fit, oldest first in each tier.
    pub(crate) fn grant(&self) {
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        let mut inner = self.inner.lock();
        for tier in 0..TIERS {
            while let Some(waiter) = inner.waiters[tier].front() {
                let (bytes, id) = (waiter.bytes, waiter.account.id());
                let usage = inner.tiers[tier];
                // After a resize it may never fit; then it must not block the others.
                let never = bytes > usage.limit_bytes || inner.held_of(id).is_none();
                if !inner.waiters[tier][0].has_ended() && !never && !usage.fits(bytes) {
                    break;
                }
                let Some(waiter) = inner.waiters[tier].pop_front() else { break };
                if never {
                    refused.push(waiter);
                } else if waiter.op.claim() {
                    inner.tiers[tier].reserve(bytes);
                    if let Some(held) = inner.held_of(id) {
                        held[tier].reserved_bytes += bytes;
                    }
                    granted.push(waiter);
                }
            }
        }
        drop(inner);
        granted.iter().for_each(|w| w.op.finish(Status::Ok, None, None));
        for waiter in refused.iter().filter(|w| w.op.claim()) {
            waiter.op.finish(Status::Budget, None, None);
        }
    }

    /// Schedules a reclaim on the notifier thread, if any tier is short of bytes.
    pub(crate) fn schedule_reclaim(self: &Arc<Budget>) {
        let mut inner = self.inner.lock();
        if !inner.is_short() || std::mem::replace(&mut inner.reclaim_queued, true) {
            return;
        }
        drop(inner);
        self.core.notifier().schedule(self.clone());
    }

    /// Asks owners for the bytes that `tier` is short of, lowest priority first.
    fn reclaim(&self, tier: Tier) {
        let mut inner = self.inner.lock();
        let usage = inner.tiers[tier as usize];
        let waiting = inner.waiters[tier as usize].iter().filter(|w| !w.has_ended());
        let (wanted, deadline) = waiting.fold((0u64, u64::MAX), |(bytes, soonest), w| {
            let deadline = w.op.deadline_ns();
            let deadline = if deadline == 0 { u64::MAX } else { deadline };
            (bytes.saturating_add(w.bytes), soonest.min(deadline))
        });
        let over = usage.used().saturating_sub(usage.limit_bytes);
        let mut short = wanted.saturating_sub(usage.free()).saturating_add(over);
        let now = self.core.clock().now_ns();
        let until = inner.promised_until[tier as usize];
        if wanted == 0 || (until != 0 && until <= now) {
            inner.promised[tier as usize] = 0; // no reservation waits, or the promise is late
        }
        short = short.saturating_sub(inner.promised[tier as usize]);
        let mut owners: Vec<_> = inner.accounts.iter().filter_map(Weak::upgrade).collect();
        drop(inner);
        owners.sort_by_key(|account| (account.priority(), account.id()));
        let deadline = if deadline == u64::MAX { 0 } else { deadline };
        for account in owners {
            let (true, Some(reclaim)) = (short > 0, account.reclaimer()) else { continue };
            if !account.enter_reclaim() {
                continue; // closed since the list was made
            }
            let before = self.inner.lock().begin_reclaim(tier, short);
            let promised = reclaim(tier, short, deadline).min(short);
            account.leave_reclaim();
            self.inner.lock().end_reclaim(tier, promised, before, deadline);
            short -= promised;
        }
    }
}

impl Inner {
    pub(crate) fn held_of(&mut self, id: u64) -> Option<&mut [AccountUsage; TIERS]> {
        self.held.iter_mut().find(|(held, _)| *held == id).map(|(_, held)| held)
    }

    /// Counts a call of a reclaimer; returns all bytes released so far.
    fn begin_reclaim(&mut self, tier: Tier, bytes: u64) -> u64 {
        let usage = &mut self.tiers[tier as usize];
        usage.reclaim_requested_bytes = usage.reclaim_requested_bytes.saturating_add(bytes);
        self.returned[tier as usize]
    }

    /// Records the promise of a reclaimer. Some bytes may have been released during its call.
    fn end_reclaim(&mut self, tier: Tier, bytes: u64, returned_before: u64, deadline_ns: u64) {
        self.promised_until[tier as usize] = deadline_ns;
        let meanwhile = self.returned[tier as usize].wrapping_sub(returned_before);
        let promised = &mut self.promised[tier as usize];
        *promised = promised.saturating_add(bytes.saturating_sub(meanwhile));
    }

    /// Counts released bytes, against promises first.
    pub(crate) fn note_returned(&mut self, tier: Tier, bytes: u64) {
        let returned = &mut self.returned[tier as usize];
        *returned = returned.wrapping_add(bytes);
        let promised = &mut self.promised[tier as usize];
        *promised = promised.saturating_sub(bytes);
    }

    fn is_short(&self) -> bool {
        self.waiters.iter().any(|waiters| !waiters.is_empty())
            || self.tiers.iter().any(|usage| usage.used() > usage.limit_bytes)
    }
}

impl Owner for Budget {
    fn abandoned(&self, _op: &Op) {
        // The ended reservation may have blocked others, and the next one needs another number
        // of bytes than was promised for it.
        let mut ended = Vec::new();
        for waiters in &mut self.inner.lock().waiters {
            let (ended_waiters, waiting) =
                std::mem::take(waiters).into_iter().partition(Waiter::has_ended);
            *waiters = waiting;
            ended.push(ended_waiters);
        }
        drop::<Vec<VecDeque<Waiter>>>(ended); // outside the lock: these may be the last pins
        self.grant();
        let short = self.inner.lock().is_short();
        if short && let Some(this) = self.this.upgrade() {
            this.schedule_reclaim();
        }
    }

    fn shut(&self, status: Status) {
        self.end_waiters(status);
    }

    fn serve(&self) {
        self.inner.lock().reclaim_queued = false;
        ALL_TIERS.iter().for_each(|tier| self.reclaim(*tier));
    }
}

fn open_tier(
    tier: Tier,
    requested: Option<u64>,
    reserve: u64,
    facts: &MemoryFacts,
    strict: bool,
) -> Result<TierUsage> {
    let usable = facts.effective_bytes().saturating_sub(reserve);
    let (default, cap) = match tier {
        Tier::Host => (usable / 100 * DEFAULT_HOST_PERCENT, usable),
        Tier::Pinned => (facts.lockable_bytes(), facts.lockable_bytes()),
        _ => (0, u64::MAX),
    };
    let requested = requested.unwrap_or(default);
    if requested > cap {
        let text = format!(
            "{requested} bytes were requested for tier {}, {cap} are available (cgroup headroom, \
             available memory, reserve of {reserve} bytes, lock quota)",
            tier.name()
        );
        if strict {
            return Err(Error::new(Status::Budget, text));
        }
        log::warn!("{text}");
    }
    Ok(TierUsage {
        asked_bytes: requested,
        limit_bytes: requested.min(cap),
        ..TierUsage::default()
    })
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "budget_tests.rs"]
mod tests;
