//! Accounts: the bytes of a budget that one owner uses.

use crate::base::budget::{
    ALL_TIERS, Budget, Inner, MAX_WAITERS, Reclaim, Tier, TierUsage, Waiter,
};
use crate::base::callback::refuse_reentry;
use crate::base::op::{OpOpts, OpRef};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::fail;

/// The bytes of one tier that an account holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountUsage {
    /// Bytes reserved and not yet in use.
    pub reserved_bytes: u64,
    /// Bytes in use.
    pub committed_bytes: u64,
}

/// One owner's part of a budget.
pub struct Account {
    budget: Arc<Budget>,
    id: u64,
    name: String,
    priority: i32,
    reclaim: Option<Reclaim>,
    /// Running calls of the reclaimer; [`CLOSED`] once no more will begin.
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

    /// Counts a call of the reclaimer that is about to begin; false when the account is closed.
    pub(crate) fn enter_reclaim(&self) -> bool {
        let entered = self.calls.fetch_add(1, Ordering::AcqRel) & CLOSED == 0;
        if !entered {
            self.leave_reclaim();
        }
        entered
    }

    /// Counts the return of that call.
    pub(crate) fn leave_reclaim(&self) {
        self.calls.fetch_sub(1, Ordering::AcqRel);
        drop(self.budget.inner.lock()); // a close that read the old count waits by now
        self.budget.reclaim_returned.notify_all();
    }

    pub(crate) fn reclaimer(&self) -> Option<&Reclaim> {
        self.reclaim.as_ref()
    }

    /// The budget of the account.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// The name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The priority: accounts with a low one are reclaimed from first.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// The bytes of a tier that the account holds.
    pub fn held(&self, tier: Tier) -> AccountUsage {
        let mut inner = self.budget.inner.lock();
        inner.held_of(self.id).map_or(AccountUsage::default(), |held| held[tier as usize])
    }

    /// Reserves bytes at once, or fails.
    pub fn reserve(&self, tier: Tier, bytes: u64) -> Result<()> {
        let mut guard = self.budget.inner.lock();
        let inner = &mut *guard;
        let Some(held) = inner.held.iter_mut().find(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        if inner.closed {
            return Err(Status::Closed.into());
        }
        let usage = &mut inner.tiers[tier as usize];
        // Waiting reservations are older: one that fits may still not pass them.
        if usage.fits(bytes) && inner.waiters[tier as usize].is_empty() {
            usage.reserve(bytes);
            held.1[tier as usize].reserved_bytes += bytes;
            return Ok(());
        }
        usage.refused += 1;
        let (free, limit) = (usage.free(), usage.limit_bytes);
        drop(guard); // the message is formatted outside the lock
        let name = tier.name();
        let note = self.budget.reserve_note(tier);
        fail!(Budget, "{bytes} bytes of tier {name} do not fit: {free} of {limit} are free{note}");
    }

    /// Reserves bytes once they are free: the op then completes with OK.
    pub fn reserve_later(
        self: &Arc<Account>,
        tier: Tier,
        bytes: u64,
        opts: &OpOpts,
    ) -> Result<OpRef> {
        let budget = &self.budget;
        let limit = budget.usage(tier).limit_bytes;
        if bytes > limit {
            let (name, note) = (tier.name(), budget.reserve_note(tier));
            fail!(
                Budget,
                "{bytes} bytes can never fit in tier {name}: its limit is {limit} bytes{note}"
            );
        }
        let inner = budget.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        if inner.waiters.iter().map(|waiters| waiters.len()).sum::<usize>() >= MAX_WAITERS {
            return Err(Status::Again.into());
        }
        drop(inner);
        let op: OpRef = budget.core().promise(opts, budget.clone())?;
        let mut inner = budget.inner.lock();
        // Waiters are ended under this lock. A later reservation must end itself.
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
        inner.waiters[tier as usize].push_back(waiter);
        drop(inner);
        budget.grant();
        budget.schedule_reclaim();
        Ok(op)
    }

    /// Commits `used` of `reserved` bytes; the difference becomes free.
    pub fn commit(&self, tier: Tier, reserved: u64, used: u64) -> Result<()> {
        if used > reserved {
            fail!(Invalid, "cannot commit {used} bytes of a reservation of {reserved}");
        }
        self.change(tier, |usage, held| {
            if held.reserved_bytes < reserved {
                fail!(
                    Invalid,
                    "cannot commit {reserved} bytes: the account has {} reserved",
                    held.reserved_bytes
                );
            }
            held.reserved_bytes -= reserved;
            held.committed_bytes += used;
            usage.reserved_bytes -= reserved;
            usage.committed_bytes += used;
            Ok(())
        })
    }

    /// Releases committed bytes.
    pub fn release(&self, tier: Tier, bytes: u64) -> Result<()> {
        self.change(tier, |usage, held| {
            if held.committed_bytes < bytes {
                fail!(
                    Invalid,
                    "cannot release {bytes} bytes: the account has {} committed",
                    held.committed_bytes
                );
            }
            held.committed_bytes -= bytes;
            usage.committed_bytes -= bytes;
            Ok(())
        })
    }

    fn change(
        &self,
        tier: Tier,
        change: impl FnOnce(&mut TierUsage, &mut AccountUsage) -> Result<()>,
    ) -> Result<()> {
        let mut guard = self.budget.inner.lock();
        let inner = &mut *guard;
        let Some((_, held)) = inner.held.iter_mut().find(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        let usage = &mut inner.tiers[tier as usize];
        let before = usage.used();
        change(usage, &mut held[tier as usize])?;
        let returned = before - usage.used();
        inner.note_returned(tier, returned);
        let has_waiters = inner.waiters.iter().any(|waiters| !waiters.is_empty());
        drop(guard);
        if has_waiters {
            self.budget.grant();
            self.budget.schedule_reclaim(); // an owner may have returned less than it promised
        }
        Ok(())
    }

    /// Reserves and commits in one step.
    pub fn take(&self, tier: Tier, bytes: u64) -> Result<()> {
        self.reserve(tier, bytes)?;
        self.commit(tier, bytes, bytes)
    }

    /// Releases bytes of [`Account::take`]; logs a failure.
    pub fn give_back(&self, tier: Tier, bytes: u64) {
        if let Err(error) = self.release(tier, bytes) {
            log::error!("account '{}': {error}", self.name);
        }
    }

    /// Closes the account. Fails while the account holds bytes or has a waiting reservation.
    /// Waits for a running call of its reclaimer.
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
                fail!(
                    Busy,
                    "the reclaimer of account '{}' is running: close the account outside of it",
                    self.name
                );
            }
            self.budget.reclaim_returned.wait(&mut inner);
        }
    }

    /// The index of the account in `held`, if the account can be closed.
    fn closable(&self, inner: &Inner) -> Result<usize> {
        let Some(position) = inner.held.iter().position(|(id, _)| *id == self.id) else {
            return Err(Status::Closed.into());
        };
        let held = inner.held[position].1;
        let waits = inner.waiters.iter().flatten().any(|w| w.account.id == self.id);
        let used = ALL_TIERS.iter().find(|t| held[**t as usize] != AccountUsage::default());
        match used {
            _ if waits => fail!(Busy, "a reservation of account '{}' is waiting", self.name),
            _ if self.budget.core().is_poisoned() => {} // leaked memory is never released
            Some(tier) => {
                let AccountUsage { reserved_bytes, committed_bytes } = held[*tier as usize];
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
