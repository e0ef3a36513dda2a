//! What the owner of a promised op does with it: ops that no worker of the pool
//! carries out.

use crate::base::op::{CANCEL, EVENTS, ISSUED, Joined, Op, RELEASED, RESOLVED};
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::Ordering;

/// Of an op that its owner has not noted yet.
pub(super) const NOWHERE: u32 = u32::MAX;

impl Op {
    /// The owner of a promise begins to carry it out: from here on it ends when the
    /// owner finishes it. False = it has ended already. A cancel or a deadline is told
    /// with [`Owner::abandoned`]; then [`Op::was_given_up`] says so.
    pub fn begin(&self) -> bool {
        self.claim_to_run()
    }

    /// Its owner notes where it has what is done for it, so that it finds that again when
    /// the op is given up.
    pub fn note_place(&self, place: u32) {
        self.place.store(place, Ordering::Release);
    }

    /// Where that is.
    pub fn place(&self) -> Option<u32> {
        Some(self.place.load(Ordering::Acquire)).filter(|&place| place != NOWHERE)
    }

    /// It was begun, and is under way.
    pub fn announce(&self) {
        if self.notify & ISSUED != 0 {
            self.tell(&mut self.told.lock(), ISSUED);
        }
    }

    /// Why nobody waits for the result any more.
    pub fn was_given_up(&self) -> Option<Status> {
        let bits = self.bits.load(Ordering::Acquire);
        match (bits & CANCEL != 0, bits & RESOLVED != 0) {
            (true, _) => Some(Status::Cancelled),
            (_, true) => Some(Status::Timeout),
            _ => None,
        }
    }

    /// What a promise came to, before it is finished.
    pub fn report(&self, value: u64, bytes: u64) {
        self.value.store(value, Ordering::Release);
        self.bytes_done.store(bytes, Ordering::Release);
    }

    /// How each of a promise's items went, before it is finished. Those of which nothing is
    /// said end as the op does.
    pub fn report_items(&self, outcomes: &[Status]) {
        for (item, &status) in self.items().iter().zip(outcomes) {
            self.end_item(item, status);
        }
    }

    /// What it came to: of an op that workers carry out that of the first item.
    pub fn value(&self) -> u64 {
        match self.items().first() {
            Some(first) if self.is_for_workers() => first.value.load(Ordering::Acquire),
            _ => self.value.load(Ordering::Acquire),
        }
    }

    /// Has something done when the op is released, well or not; at once, if it was. Whoever
    /// releases it does that with no lock held: it must be short, and not wait.
    pub fn when_released(&self, released: Joined) -> Result<()> {
        let mut told = self.told.lock();
        if self.bits.load(Ordering::Acquire) & RELEASED == 0 {
            told.joined.try_reserve(1).map_err(|_| Status::NoMem)?;
            told.joined.push(released);
            return Ok(());
        }
        drop(told);
        released();
        Ok(())
    }

    /// Undoes a creation: the op was never queued and nobody hears of it. A close
    /// beside it may have been first to end the op; then nothing is left to undo.
    pub(crate) fn discard(&self) {
        if self.claim() {
            self.unmake();
        }
    }

    fn unmake(&self) {
        self.items().iter().for_each(|item| item.let_go(false));
        self.bits.fetch_or(EVENTS, Ordering::AcqRel);
        if let Some(queue) = &self.queue {
            queue.unreserve(self.told.lock().unsent.count_ones());
        }
        let joined = std::mem::take(&mut self.told.lock().joined);
        joined.into_iter().for_each(|released| released());
        self.core.op_released();
    }

    /// Undoes a promise that its owner had begun, before anybody was told of it.
    pub fn take_back(&self) {
        self.unmake();
    }

    /// Its owner carries it out, and should hear that nobody waits for it.
    pub(super) fn tell_owner(&self) {
        if let Some(owner) = &self.owner {
            owner.abandoned(self);
        }
    }
}
