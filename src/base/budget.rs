//! The budget: the bytes that may be used, per tier, hard at every instant.
//!
//! Owners open an *account*; what it holds is *reserved* (promised to it) or
//! *committed* (in use). A reservation that does not fit fails at once, or
//! waits as an op while other owners are asked to give back.

use std::collections::VecDeque;

use crate::base::account::{Account, Held};
use crate::base::core::Core;
use crate::base::machine::MemoryFacts;
use crate::base::op::{ISSUED, Op, OpRef};
use crate::base::owner::Owner;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::fail;

/// Where bytes are counted. `Pinned` is the part of `Host` that is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Tier {
    /// Memory of the accelerator.
    Device = 0,
    /// RAM.
    Host = 1,
    /// Local files.
    Disk = 2,
    /// A store elsewhere.
    Remote = 3,
    /// RAM that is locked.
    Pinned = 4,
}

/// How many tiers there are.
pub const TIERS: usize = 5;

/// The tiers in the order of their numbers.
pub const ALL_TIERS: [Tier; TIERS] =
    [Tier::Device, Tier::Host, Tier::Disk, Tier::Remote, Tier::Pinned];

/// Most accounts of one budget.
pub const MAX_ACCOUNTS: usize = 1024;
/// Most reservations that wait at once.
pub const MAX_WAITERS: usize = 4096;
/// Share of the effective memory that is used when no number is given.
pub const DEFAULT_HOST_PERCENT: u64 = 50;
/// Most that is kept free for the rest of the process when no number is given.
pub const DEFAULT_RESERVE_BYTES: u64 = 512 << 20;

/// What is kept free for the rest of the process when no number is given: an eighth of what it may
/// still use, at most [`DEFAULT_RESERVE_BYTES`].
pub fn usual_reserve_bytes(facts: &MemoryFacts) -> u64 {
    (facts.effective_bytes() / 8).min(DEFAULT_RESERVE_BYTES)
}

impl Tier {
    /// The tier of a number from outside.
    pub fn from_code(code: u32) -> Result<Tier> {
        ALL_TIERS.get(code as usize).copied().ok_or_else(|| {
            Error::new(Status::Invalid, format!("tier {code} is none of 0 to {}", TIERS - 1))
        })
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        ["device", "host", "disk", "remote", "pinned"][self as usize]
    }
}

/// Asked to give bytes back; returns how many it promises to release soon.
pub type Reclaim = Box<dyn Fn(Tier, u64, u64) -> u64 + Send + Sync>;

/// How to open a budget.
#[derive(Clone, Debug, Default)]
pub struct BudgetOpts {
    /// Limits per tier; `None` = the default (host and pinned from the machine,
    /// the others nothing).
    pub limits: [Option<u64>; TIERS],
    /// Kept free of the effective host memory; `None` = [`usual_reserve_bytes`].
    pub reserve_bytes: Option<u64>,
    /// Refuse a host limit above what the machine has, instead of cutting it.
    pub strict: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
/// Counters of one tier.
pub struct Lane {
    /// What was asked for.
    pub asked_bytes: u64,
    /// What holds.
    pub limit_bytes: u64,
    /// Promised.
    pub reserved_bytes: u64,
    /// In use.
    pub committed_bytes: u64,
    /// Most ever promised and in use together.
    pub peak_bytes: u64,
    /// Reservations that failed.
    pub refused: u64,
    /// Reservations that wait.
    pub waiting: u64,
    /// Bytes owners were asked to give back.
    pub reclaim_asked_bytes: u64,
}

impl Lane {
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
    /// Whether its op was ended while it waited.
    fn is_gone(&self) -> bool {
        self.op.state() & ISSUED != 0
    }
}

pub(crate) struct Inner {
    pub(crate) lanes: [Lane; TIERS],
    pub(crate) held: Vec<(u64, [Held; TIERS])>,
    accounts: Vec<Weak<Account>>,
    /// Who waits, tier by tier, in the order they came.
    pub(crate) lines: [VecDeque<Waiter>; TIERS],
    next_account: u64,
    /// Bytes owners have promised to give back and have not yet.
    promised: [u64; TIERS],
    /// When the latest of those promises stops to matter; 0 = never.
    promised_until: [u64; TIERS],
    /// Bytes given back so far.
    returned: [u64; TIERS],
    asked: bool,
    pub(crate) closed: bool,
}

/// Byte limits of all tiers.
pub struct Budget {
    core: Arc<Core>,
    this: Weak<Budget>,
    reserve_bytes: u64,
    pub(crate) inner: Mutex<Inner>,
    /// A reclaimer has returned.
    pub(crate) returned_from: Condvar,
}

impl Budget {
    /// Opens a budget; host memory is measured now.
    pub fn open(core: &Arc<Core>, opts: &BudgetOpts) -> Result<Arc<Budget>> {
        Budget::open_on(core, opts, &MemoryFacts::probe())
    }

    /// Opens one for a caller that names none: it never takes more than the machine, or the
    /// cgroup, can give now, less the usual reserve. Other tiers have no limit.
    pub fn of_machine(core: &Arc<Core>, host_bytes: u64) -> Result<Arc<Budget>> {
        let facts = MemoryFacts::probe();
        let reserve = usual_reserve_bytes(&facts);
        let usable = facts.effective_bytes().saturating_sub(reserve);
        if usable < host_bytes {
            let limit = if facts.cgroup.is_some() { "the cgroup" } else { "the machine" };
            log::warn!(
                "host={host_bytes} bytes were asked for; {limit} can give {usable} now, {reserve} \
                 bytes left aside for the rest of the process"
            );
        }
        let mut limits = [Some(u64::MAX); TIERS];
        limits[Tier::Host as usize] = Some(usable);
        limits[Tier::Pinned as usize] = Some(facts.lockable_bytes());
        limits[Tier::Disk as usize] = None;
        Budget::open_on(core, &BudgetOpts { limits, ..BudgetOpts::default() }, &facts)
    }

    /// Opens a budget on given facts.
    pub fn open_on(
        core: &Arc<Core>,
        opts: &BudgetOpts,
        facts: &MemoryFacts,
    ) -> Result<Arc<Budget>> {
        core.check_open()?;
        let reserve_bytes = opts.reserve_bytes.unwrap_or_else(|| usual_reserve_bytes(facts));
        let mut lanes = [Lane::default(); TIERS];
        for tier in ALL_TIERS {
            let asked = opts.limits[tier as usize];
            lanes[tier as usize] = open_lane(tier, asked, reserve_bytes, facts, opts.strict)?;
        }
        let host = lanes[Tier::Host as usize].limit_bytes;
        let pinned = &mut lanes[Tier::Pinned as usize];
        pinned.limit_bytes = pinned.limit_bytes.min(host);
        let budget = Arc::new_cyclic(|this| Budget {
            core: core.clone(),
            this: this.clone(),
            reserve_bytes,
            returned_from: Condvar::new(),
            inner: Mutex::new(Inner {
                lanes,
                held: Vec::new(),
                accounts: Vec::new(),
                lines: [const { VecDeque::new() }; TIERS],
                next_account: 1,
                promised: [0; TIERS],
                promised_until: [0; TIERS],
                returned: [0; TIERS],
                asked: false,
                closed: false,
            }),
        });
        let owner: Weak<dyn Owner> = Arc::<Budget>::downgrade(&budget);
        core.add_owner(owner);
        Ok(budget)
    }

    /// The runtime it belongs to.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Kept free of the machine's memory.
    pub fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes
    }

    /// What is kept free beside a tier's limit, for messages.
    pub(crate) fn words_of_reserve(&self, tier: Tier) -> String {
        match (tier, self.reserve_bytes) {
            (Tier::Host, 1..) => {
                format!("; the budget keeps {} bytes aside (reserve_bytes)", self.reserve_bytes)
            }
            _ => String::new(),
        }
    }

    /// Counters of a tier.
    pub fn lane(&self, tier: Tier) -> Lane {
        let inner = self.inner.lock();
        let waiting = inner.lines[tier as usize].len() as u64;
        Lane { waiting, ..inner.lanes[tier as usize] }
    }

    /// Accounts that are open.
    pub fn accounts(&self) -> usize {
        self.inner.lock().held.len()
    }

    /// Sets a tier's limit. Below what is used: nothing more is granted until
    /// the owners, who are asked to, have given back.
    pub fn resize(self: &Arc<Budget>, tier: Tier, bytes: u64) -> Result<()> {
        let facts = MemoryFacts::probe();
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        let own = |tier: Tier, inner: &Inner| inner.lanes[tier as usize].committed_bytes;
        let usable = facts.effective_bytes().saturating_add(own(Tier::Host, &inner));
        let lockable = facts.lockable_bytes().saturating_add(own(Tier::Pinned, &inner));
        inner.lanes[tier as usize].asked_bytes = bytes;
        let cap = match tier {
            Tier::Host => usable.saturating_sub(self.reserve_bytes),
            _ => u64::MAX,
        };
        inner.lanes[tier as usize].limit_bytes = bytes.min(cap);
        // What is pinned is host memory: its limit follows.
        let host = inner.lanes[Tier::Host as usize].limit_bytes;
        let pinned = &mut inner.lanes[Tier::Pinned as usize];
        pinned.limit_bytes = pinned.asked_bytes.min(lockable).min(host);
        drop(inner);
        self.grant();
        self.ask();
        Ok(())
    }

    /// Opens an account. `reclaim` is called on the notifier thread, owners of
    /// low priority first.
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
            fail!(Limit, "a budget has at most {MAX_ACCOUNTS} accounts");
        }
        let id = inner.next_account;
        inner.next_account += 1;
        let budget = self.clone();
        let account = Arc::new(Account::new(budget, id, name, priority, reclaim));
        inner.held.push((id, [Held::default(); TIERS]));
        inner.accounts.retain(|a| a.strong_count() > 0);
        inner.accounts.push(Arc::downgrade(&account));
        Ok(account)
    }

    /// Refuses new accounts and reservations; what waits is cancelled.
    pub fn close(&self) {
        self.inner.lock().closed = true;
        self.end_waiters(Status::Closed);
    }

    fn end_waiters(&self, status: Status) {
        let lines = std::mem::take(&mut self.inner.lock().lines);
        for waiter in lines.into_iter().flatten().filter(|w| w.op.claim()) {
            waiter.op.finish(status, None, None);
        }
    }

    /// Grants waiting reservations, in each tier in the order they came.
    pub(crate) fn grant(&self) {
        let (mut granted, mut refused) = (Vec::new(), Vec::new());
        let mut inner = self.inner.lock();
        for tier in 0..TIERS {
            while let Some(waiter) = inner.lines[tier].front() {
                let (bytes, id) = (waiter.bytes, waiter.account.id());
                let lane = inner.lanes[tier];
                // A limit that shrank below it: it can never fit, and must not stop others.
                let never = bytes > lane.limit_bytes || inner.held_of(id).is_none();
                if !inner.lines[tier][0].is_gone() && !never && !lane.fits(bytes) {
                    break;
                }
                let Some(waiter) = inner.lines[tier].pop_front() else { break };
                if never {
                    refused.push(waiter);
                } else if waiter.op.claim() {
                    inner.lanes[tier].reserve(bytes);
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

    /// Asks the notifier to talk to the owners, if anything is short.
    pub(crate) fn ask(self: &Arc<Budget>) {
        let mut inner = self.inner.lock();
        if !inner.is_short() || std::mem::replace(&mut inner.asked, true) {
            return;
        }
        drop(inner);
        self.core.notifier().ask(self.clone());
    }

    /// Asks owners, the least important first, for what `tier` is short of.
    fn reclaim(&self, tier: Tier) {
        let mut inner = self.inner.lock();
        let lane = inner.lanes[tier as usize];
        let waiting = inner.lines[tier as usize].iter().filter(|w| !w.is_gone());
        let (wanted, deadline) = waiting.fold((0u64, u64::MAX), |(bytes, soonest), w| {
            let deadline = w.op.deadline_ns();
            let deadline = if deadline == 0 { u64::MAX } else { deadline };
            (bytes.saturating_add(w.bytes), soonest.min(deadline))
        });
        let over = lane.used().saturating_sub(lane.limit_bytes);
        let mut short = wanted.saturating_sub(lane.free()).saturating_add(over);
        let now = self.core.clock().now_ns();
        let until = inner.promised_until[tier as usize];
        if wanted == 0 || (until != 0 && until <= now) {
            inner.promised[tier as usize] = 0; // nobody waits for it, or it came too late
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
            let before = self.inner.lock().asking(tier, short);
            let promise = reclaim(tier, short, deadline).min(short);
            account.leave_reclaim();
            self.inner.lock().promise(tier, promise, before, deadline);
            short -= promise;
        }
    }
}

impl Inner {
    pub(crate) fn held_of(&mut self, id: u64) -> Option<&mut [Held; TIERS]> {
        self.held.iter_mut().find(|(held, _)| *held == id).map(|(_, held)| held)
    }

    /// An owner is about to be asked; what came back in all until now.
    fn asking(&mut self, tier: Tier, bytes: u64) -> u64 {
        let lane = &mut self.lanes[tier as usize];
        lane.reclaim_asked_bytes = lane.reclaim_asked_bytes.saturating_add(bytes);
        self.returned[tier as usize]
    }

    /// It has promised bytes; some may have come back while it was asked.
    fn promise(&mut self, tier: Tier, bytes: u64, returned_before: u64, deadline_ns: u64) {
        self.promised_until[tier as usize] = deadline_ns;
        let meanwhile = self.returned[tier as usize].wrapping_sub(returned_before);
        let promised = &mut self.promised[tier as usize];
        *promised = promised.saturating_add(bytes.saturating_sub(meanwhile));
    }

    /// Bytes came back: a promise is kept, or more is given than was promised.
    pub(crate) fn returned(&mut self, tier: Tier, bytes: u64) {
        let returned = &mut self.returned[tier as usize];
        *returned = returned.wrapping_add(bytes);
        let promised = &mut self.promised[tier as usize];
        *promised = promised.saturating_sub(bytes);
    }

    fn is_short(&self) -> bool {
        self.lines.iter().any(|line| !line.is_empty())
            || self.lanes.iter().any(|l| l.used() > l.limit_bytes)
    }
}

impl Owner for Budget {
    fn abandoned(&self, _op: &Op) {
        // The one that went may have stood in the way, and what was promised to it
        // is not what the next one needs.
        let mut gone = Vec::new();
        for line in &mut self.inner.lock().lines {
            let (left, stay) = std::mem::take(line).into_iter().partition(Waiter::is_gone);
            *line = stay;
            gone.push(left);
        }
        drop::<Vec<VecDeque<Waiter>>>(gone); // outside the lock: the last pins of ops
        self.grant();
        let short = self.inner.lock().is_short();
        if short && let Some(this) = self.this.upgrade() {
            this.ask();
        }
    }

    fn shut(&self, status: Status) {
        self.end_waiters(status);
    }

    fn serve(&self) {
        self.inner.lock().asked = false;
        ALL_TIERS.iter().for_each(|tier| self.reclaim(*tier));
    }
}

fn open_lane(
    tier: Tier,
    asked: Option<u64>,
    reserve: u64,
    facts: &MemoryFacts,
    strict: bool,
) -> Result<Lane> {
    let usable = facts.effective_bytes().saturating_sub(reserve);
    let (default, cap) = match tier {
        Tier::Host => (usable / 100 * DEFAULT_HOST_PERCENT, usable),
        Tier::Pinned => (facts.lockable_bytes(), facts.lockable_bytes()),
        _ => (0, u64::MAX),
    };
    let asked = asked.unwrap_or(default);
    if asked > cap {
        let text = format!(
            "{asked} bytes were asked for tier {}, {cap} can be had (cgroup headroom, available \
             memory, reserve of {reserve} bytes, lock quota)",
            tier.name()
        );
        if strict {
            return Err(Error::new(Status::Budget, text));
        }
        log::warn!("{text}");
    }
    Ok(Lane { asked_bytes: asked, limit_bytes: asked.min(cap), ..Lane::default() })
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "budget_tests.rs"]
mod tests;
