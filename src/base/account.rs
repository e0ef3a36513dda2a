//! Accounts: what one owner holds of a budget.

use crate::base::budget::{ALL_TIERS, Budget, Inner, Lane, MAX_WAITERS, Reclaim, Tier, Waiter};
use crate::base::callback::refuse_reentry;
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::fail;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
/// What an account holds of one tier.
pub struct Held {
    /// Promised.
    pub reserved_bytes: u64,
    /// In use.
    pub committed_bytes: u64,
}

/// One owner's part in a budget.
pub struct Account {
    budget: Arc<Budget>,
    id: u64,
    name: String,
    priority: i32,
    reclaim: Option<Reclaim>,
    /// Calls of the reclaimer that run now; [`CLOSED`] once there will be none.
    calls: AtomicU32,
}

const CLOSED: u32 = 1 << 31;

impl Account {
    pub(crate) fn new(
        budget: Arc<Budget>,
        id: u64,
        name: &str,
        priority: i32,
        reclaim: Option<Reclaim>,
    ) -> Account {
        let name = name.to_string();
        Account { budget, id, name, priority, reclaim, calls: AtomicU32::new(0) }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The reclaimer is about to be called; false when the account has closed.
    pub(crate) fn enter_reclaim(&self) -> bool {
        let entered = self.calls.fetch_add(1, Ordering::AcqRel) & CLOSED == 0;
        if !entered {
            self.leave_reclaim();
        }
        entered
    }

    /// That call has returned.
    pub(crate) fn leave_reclaim(&self) {
        self.calls.fetch_sub(1, Ordering::AcqRel);
        drop(self.budget.inner.lock()); // a close that has just looked is waiting by now
        self.budget.returned_from.notify_all();
    }

    pub(crate) fn reclaimer(&self) -> Option<&Reclaim> {
        self.reclaim.as_ref()
    }

    /// Its budget.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its rank: low ones are asked to give back first.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// What it holds of a tier.
    pub fn held(&self, tier: Tier) -> Held {
        let mut inner = self.budget.inner.lock();
        inner.held_of(self.id).map_or(Held::default(), |held| held[tier as usize])
    }

    /// Reserves bytes now, or fails.
    pub fn reserve(&self, tier: Tier, bytes: u64) -> Result<()> {
        let mut guard = self.budget.inner.lock();
        let inner = &mut *guard;
        let Some(held) = inner.held.iter_mut().find(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        if inner.closed {
            return Err(Status::Closed.into());
        }
        let lane = &mut inner.lanes[tier as usize];
        // Whoever waits came first: a reservation that fits may still not pass them.
        if lane.fits(bytes) && inner.lines[tier as usize].is_empty() {
            lane.reserve(bytes);
            held.1[tier as usize].reserved_bytes += bytes;
            return Ok(());
        }
        lane.refused += 1;
        let (free, limit) = (lane.free(), lane.limit_bytes);
        drop(guard); // the words are made outside the lock
        let name = tier.name();
        let kept = self.budget.words_of_reserve(tier);
        fail!(Budget, "{bytes} bytes of tier {name} do not fit: {free} of {limit} are free{kept}");
    }

    /// Reserves bytes when they can be had: an op that ends with OK then.
    pub fn reserve_later(
        self: &Arc<Account>,
        tier: Tier,
        bytes: u64,
        opts: &OpOpts,
    ) -> Result<OpRef> {
        let budget = &self.budget;
        let limit = budget.lane(tier).limit_bytes;
        if bytes > limit {
            let (name, kept) = (tier.name(), budget.words_of_reserve(tier));
            fail!(Budget, "{bytes} bytes can never fit in tier {name} of {limit}{kept}");
        }
        let inner = budget.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        if inner.lines.iter().map(|line| line.len()).sum::<usize>() >= MAX_WAITERS {
            return Err(Status::Again.into());
        }
        drop(inner);
        let op: OpRef = budget.core().promise(opts, budget.clone())?;
        let mut inner = budget.inner.lock();
        // Whoever ends what waits does so under this lock: what comes later is too late.
        let late = match () {
            () if budget.core().is_poisoned() => Some(Status::Panic),
            () if inner.closed || inner.held_of(self.id).is_none() => Some(Status::Closed),
            () => None,
        };
        if let Some(status) = late {
            drop(inner);
            if op.claim() {
                op.finish(status, None, None);
            }
            return Ok(op);
        }
        let waiter = Waiter { account: self.clone(), bytes, op: op.clone() };
        inner.lines[tier as usize].push_back(waiter);
        drop(inner);
        budget.grant();
        budget.ask();
        Ok(op)
    }

    /// Turns `reserved` bytes into `used` ones; the difference is free again.
    pub fn commit(&self, tier: Tier, reserved: u64, used: u64) -> Result<()> {
        if used > reserved {
            fail!(Invalid, "{used} bytes are committed out of a reservation of {reserved}");
        }
        self.change(tier, |lane, held| {
            if held.reserved_bytes < reserved {
                fail!(Invalid, "{reserved} bytes committed, {} reserved", held.reserved_bytes);
            }
            held.reserved_bytes -= reserved;
            held.committed_bytes += used;
            lane.reserved_bytes -= reserved;
            lane.committed_bytes += used;
            Ok(())
        })
    }

    /// Gives committed bytes back.
    pub fn release(&self, tier: Tier, bytes: u64) -> Result<()> {
        self.change(tier, |lane, held| {
            if held.committed_bytes < bytes {
                fail!(Invalid, "{bytes} bytes released, {} committed", held.committed_bytes);
            }
            held.committed_bytes -= bytes;
            lane.committed_bytes -= bytes;
            Ok(())
        })
    }

    fn change(
        &self,
        tier: Tier,
        change: impl FnOnce(&mut Lane, &mut Held) -> Result<()>,
    ) -> Result<()> {
        let mut guard = self.budget.inner.lock();
        let inner = &mut *guard;
        let Some((_, held)) = inner.held.iter_mut().find(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        let lane = &mut inner.lanes[tier as usize];
        let before = lane.used();
        change(lane, &mut held[tier as usize])?;
        let returned = before - lane.used();
        inner.returned(tier, returned);
        let waited = inner.lines.iter().any(|line| !line.is_empty());
        drop(guard);
        if waited {
            self.budget.grant();
            self.budget.ask(); // for whoever still waits when a promise fell short
        }
        Ok(())
    }

    /// Reserves and commits in one step.
    pub fn take(&self, tier: Tier, bytes: u64) -> Result<()> {
        self.reserve(tier, bytes)?;
        self.commit(tier, bytes, bytes)
    }

    /// Gives back what [`Account::take`] took.
    pub fn give_back(&self, tier: Tier, bytes: u64) {
        if let Err(error) = self.release(tier, bytes) {
            log::error!("account '{}': {error}", self.name);
        }
    }

    /// Closes the account; refused while it holds or awaits anything. A call of its
    /// reclaimer that is under way is waited for.
    pub fn close(&self) -> Result<()> {
        let mut inner = self.budget.inner.lock();
        loop {
            let position = self.closable(&inner)?;
            let idle = self.calls.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
            if idle.is_ok() {
                inner.held.swap_remove(position);
                return Ok(());
            }
            if refuse_reentry().is_err() {
                fail!(Busy, "the reclaimer of account '{}' is being called", self.name);
            }
            self.budget.returned_from.wait(&mut inner);
        }
    }

    /// Its place among those that hold, when nothing stands in the way of closing.
    fn closable(&self, inner: &Inner) -> Result<usize> {
        let Some(position) = inner.held.iter().position(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        let held = inner.held[position].1;
        let waits = inner.lines.iter().flatten().any(|w| w.account.id == self.id);
        let used = ALL_TIERS.iter().find(|t| held[**t as usize] != Held::default());
        match used {
            _ if waits => fail!(Busy, "a reservation of account '{}' waits", self.name),
            _ if self.budget.core().is_poisoned() => {} // leaked memory is never given back
            Some(tier) => {
                let Held { reserved_bytes, committed_bytes } = held[*tier as usize];
                fail!(
                    Busy,
                    "account '{}' still has {reserved_bytes} bytes reserved and {committed_bytes} \
                     committed in tier {}",
                    self.name,
                    tier.name()
                );
            }
            None => {}
        }
        Ok(position)
    }
}
