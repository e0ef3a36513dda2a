//! The budget of a tier. It can change while the tier is in use.

use crate::base::account::Account;
use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::sync::atomic::Ordering;
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::tier::disk::state::{Front, State};
use crate::tier::disk::{DiskTier, least_bytes};

impl DiskTier {
    /// Changes the budget. Bytes beyond a smaller budget stay until the caller drops cells, sweeps
    /// and compacts; appends are rejected until then. Compaction proceeds within the old budget.
    /// INVALID = less than any tier needs.
    pub fn set_budget(&self, bytes: u64) -> Result<()> {
        let least = least_bytes(&self.options);
        if bytes < least {
            let segment = self.options.segment_bytes;
            fail!(
                Invalid,
                "a disk of {bytes} bytes is too small for segments of {segment} bytes: {least} \
                 bytes are needed"
            );
        }
        // Bytes beyond it are charged until they are free.
        let used = self.state.lock().used_bytes;
        self.paid.set(bytes.max(used))?;
        let mut state = self.state.lock();
        state.set_budget(bytes, self.options.segment_bytes);
        // No space is kept for two checkpoints that would no longer fit.
        state.checkpoint_bytes = match self.next_checkpoint_bytes(state.checkpoint_bytes, bytes) {
            0 => 0,
            _ => state.checkpoint_bytes,
        };
        drop(state);
        // Files beyond a smaller budget that are only kept for the next segments are removed.
        self.wants_prepare.store(true, Ordering::Release);
        Ok(())
    }
}

impl DiskTier {
    /// Files were removed: bytes beyond the budget are no longer charged.
    pub(super) fn pay_less(&self) {
        let state = self.state.lock();
        let bytes = state.budget_bytes.max(state.used_bytes);
        drop(state);
        self.paid.lower(bytes);
    }
}

/// Charges an account for disk space, where its budget limits that.
pub(super) struct Paid {
    account: Option<Arc<Account>>,
    bytes: Mutex<u64>,
}

impl Paid {
    pub fn new(account: Option<Arc<Account>>) -> Paid {
        Paid { account, bytes: Mutex::new(0) }
    }

    /// Charges `bytes` bytes from now on.
    pub fn set(&self, bytes: u64) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        let mut paid = self.bytes.lock();
        let limit = account.budget().usage(Tier::Disk).limit_bytes;
        if limit == 0 && *paid == 0 {
            return Ok(()); // no limit
        }
        if bytes > *paid {
            account.take(Tier::Disk, bytes - *paid).map_err(|error| {
                error.within(&format!(
                    "{bytes} bytes of disk, of {limit} in the budget's disk_bytes"
                ))
            })?;
        } else {
            account.give_back(Tier::Disk, *paid - bytes);
        }
        *paid = bytes;
        Ok(())
    }

    /// Reduces the charge to `bytes` bytes.
    fn lower(&self, bytes: u64) {
        let Some(account) = &self.account else { return };
        let mut paid = self.bytes.lock();
        account.give_back(Tier::Disk, paid.saturating_sub(bytes));
        *paid = bytes.min(*paid);
    }
}

impl Drop for Paid {
    fn drop(&mut self) {
        let paid = std::mem::take(&mut *self.bytes.lock());
        if let Some(account) = self.account.as_ref().filter(|_| paid > 0) {
            account.give_back(Tier::Disk, paid);
        }
    }
}

impl State {
    /// Sets another budget; compaction creates segments of `room` bytes.
    fn set_budget(&mut self, bytes: u64, room: u64) {
        self.shrinks_from = self.limit(Front::Compaction);
        (self.budget_bytes, self.shrink_room) = (bytes, room);
        self.end_shrinking();
    }

    /// The tier is open; compaction creates segments of `room` bytes. If opening found more than
    /// the budget, compaction proceeds within that, as after a shrunk budget.
    pub fn begin_over(&mut self, room: u64) {
        if self.used_bytes > self.budget_bytes {
            (self.shrinks_from, self.shrink_room) = (self.used_bytes.saturating_add(room), room);
        }
    }

    /// Bytes that a write position may use. Compaction frees more than it writes, so it proceeds
    /// after a budget shrank.
    pub fn limit(&self, front: Front) -> u64 {
        match front {
            Front::Callers => self.budget_bytes,
            Front::Compaction => self.budget_bytes.max(self.shrinks_from),
        }
    }

    /// Compaction needs no more than the budget once a segment fits.
    pub fn end_shrinking(&mut self) {
        if self.used_bytes.saturating_add(self.shrink_room) <= self.budget_bytes {
            self.shrinks_from = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(state: &State) -> [u64; 2] {
        [state.limit(Front::Callers), state.limit(Front::Compaction)]
    }

    #[test]
    fn compaction_proceeds_after_opening_under_a_smaller_budget() {
        let mut state = State { used_bytes: 80, budget_bytes: 100, ..State::default() };
        state.begin_over(10);
        assert_eq!(limits(&state), [100, 100], "it fits");
        let mut state = State { used_bytes: 120, budget_bytes: 100, ..State::default() };
        state.begin_over(10);
        assert_eq!(limits(&state), [100, 130]);
        state.give_back(30);
        assert_eq!(limits(&state), [100, 100]);
    }

    #[test]
    fn compaction_proceeds_until_a_segment_fits_under_a_shrunk_budget() {
        let mut state = State { used_bytes: 80, budget_bytes: 100, ..State::default() };
        state.set_budget(95, 10);
        assert_eq!(limits(&state), [95, 95], "a segment fits: nothing is special");
        state.set_budget(60, 10);
        assert_eq!(limits(&state), [60, 95]);
        state.set_budget(50, 10);
        assert_eq!(limits(&state), [50, 95], "as before the first of them");
        assert!(state.take(10, 0, state.limit(Front::Callers)).is_err());
        state.take(10, 0, state.limit(Front::Compaction)).expect("it frees more than that");
        state.give_back(45);
        assert_eq!((state.used_bytes, limits(&state)), (45, [50, 95]));
        state.give_back(5);
        assert_eq!(limits(&state), [50, 50]);
        assert_eq!(state.take(10, 0, 50), Ok(true));
        assert_eq!(limits(&state), [50, 50], "it does not come back");
        state.set_budget(200, 10);
        assert_eq!(limits(&state), [200, 200]);
    }
}
