//! Operations: a promise that completes exactly once, in two moments.
//!
//! *Resolved*: the result is known. *Released*: the library does not touch the
//! caller's memory any more. A deadline or a defect may resolve an op while a
//! worker still holds its buffers; then the release follows later. Whoever
//! sets [`ISSUED`] first owns the op's execution: a worker to run it, a cancel
//! or a deadline to end it before it began.

use crate::base::core::Core;
use crate::base::fault::Site;
use crate::base::item::{Item, Items, Outcome, PENDING, RunFn};
pub use crate::base::op_table::ops;
use crate::base::owner::Owner;
use crate::base::panic;
use crate::base::queue::{Completion, Outbox, Queue};
use crate::base::slab::{Key, Pin};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, Mutex};

/// Execution has begun, or was ended before it could.
pub const ISSUED: u32 = 1;
/// The result is known.
pub const RESOLVED: u32 = 2;
/// The caller's memory is the caller's again.
pub const RELEASED: u32 = 4;
/// A cancel was asked for.
pub const CANCEL: u32 = 8;
const WAITED: u32 = 16;
/// Issued to the workers, not ended unexecuted.
pub(super) const RUNNING: u32 = 32;
/// The moments a queue can be told of.
pub const EVENTS: u32 = ISSUED | RESOLVED | RELEASED;

/// What a submitter says about an op.
#[derive(Clone, Default)]
pub struct OpOpts {
    /// Who is told.
    pub queue: Option<Arc<Queue>>,
    /// The caller's own word, handed back in the completion.
    pub tag: u64,
    /// Resolve with a timeout then; 0 = never.
    pub deadline_ns: u64,
    /// Moments to tell of; 0 = the release alone.
    pub notify: u32,
    /// Order among ops: 0 first.
    pub lane: usize,
    /// No handle is wanted: the op goes when its completion is posted.
    pub detached: bool,
}

impl OpOpts {
    fn events(&self) -> u32 {
        if self.notify == 0 { RELEASED } else { self.notify & EVENTS }
    }

    /// Moments that keep a place in the queue. The release always does, told or
    /// not: so a queue knows when nothing that reports to it runs any more.
    fn moments(&self) -> u32 {
        self.events() | RELEASED
    }

    /// Places in a queue such an op keeps.
    pub fn entries(&self) -> u32 {
        self.moments().count_ones()
    }
}

/// How an op ended, or how far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// [`ISSUED`], [`RESOLVED`], [`RELEASED`], [`CANCEL`].
    pub state: u32,
    /// The result; `None` until resolved.
    pub status: Option<i32>,
    /// Items in all.
    pub items: u32,
    /// Items done or skipped.
    pub items_done: u32,
    /// Of those, not OK.
    pub items_failed: u32,
    /// Bytes of the items that are done and OK.
    pub bytes_done: u64,
    /// The caller's word.
    pub tag: u64,
}

/// What is to be done when an op is released.
pub type Joined = Box<dyn FnOnce() + Send>;

/// What is guarded by the op's lock: its detail text and what was not yet told.
pub(super) struct Told {
    error: Option<Error>,
    pub(super) unsent: u32,
    /// Who is called when the op is released.
    pub(super) joined: Vec<Joined>,
}

/// An operation. Lives in the slab [`ops`]; held by pins.
pub struct Op {
    pub(crate) core: Arc<Core>,
    key: Key,
    pub(super) bits: AtomicU32,
    status: AtomicI32,
    next_item: AtomicU32,
    items_done: AtomicU32,
    items_failed: AtomicU32,
    shares: AtomicU32,
    pub(super) bytes_done: AtomicU64,
    /// What a promise came to, and where its owner has noted it.
    pub(super) value: AtomicU64,
    pub(super) place: AtomicU32,
    pub(super) told: Mutex<Told>,
    changed: Condvar,
    run: Option<RunFn>,
    items: Items,
    /// Summed once: the pool asks under its lock.
    bytes: u64,
    pub(super) owner: Option<Arc<dyn Owner>>,
    pub(super) queue: Option<Arc<Queue>>,
    tag: u64,
    deadline_ns: u64,
    detached: bool,
    pub(super) notify: u32,
    leak: AtomicBool,
}

/// A counted reference to an op.
pub type OpRef = Pin<'static, Op>;

impl Op {
    /// Makes an op. The caller has reserved its place among the runtime's ops
    /// and its entries in the queue.
    pub(crate) fn create(
        core: &Arc<Core>,
        opts: &OpOpts,
        items: Items,
        run: Option<RunFn>,
        owner: Option<Arc<dyn Owner>>,
    ) -> Result<OpRef> {
        let bytes = items.as_slice().iter().fold(0u64, |sum, i| sum.saturating_add(i.bytes));
        let key = ops().insert_with(|key| Op {
            core: core.clone(),
            key,
            bits: AtomicU32::new(0),
            status: AtomicI32::new(PENDING),
            next_item: AtomicU32::new(0),
            items_done: AtomicU32::new(0),
            items_failed: AtomicU32::new(0),
            shares: AtomicU32::new(1),
            bytes_done: AtomicU64::new(0),
            value: AtomicU64::new(0),
            place: AtomicU32::new(crate::base::promise::NOWHERE),
            told: Mutex::new(Told { error: None, unsent: opts.moments(), joined: Vec::new() }),
            changed: Condvar::new(),
            run,
            items,
            bytes,
            owner,
            queue: opts.queue.clone(),
            tag: opts.tag,
            deadline_ns: opts.deadline_ns,
            detached: opts.detached,
            notify: opts.events(),
            leak: AtomicBool::new(false),
        })?;
        let op = ops().pin(key).ok_or(Status::Limit)?;
        if opts.detached {
            op.remove(); // from here on only pins keep it
        }
        Ok(op)
    }

    /// Its key in [`ops`].
    pub fn key(&self) -> Key {
        self.key
    }

    /// When it resolves by itself; 0 = never.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// The state bits.
    pub fn state(&self) -> u32 {
        self.bits.load(Ordering::Acquire) & (EVENTS | CANCEL)
    }

    /// How far it is.
    pub fn info(&self) -> OpInfo {
        let state = self.state();
        let status = (state & RESOLVED != 0).then(|| self.status.load(Ordering::Acquire));
        // In this order: what is done is counted before what of it failed.
        let items_failed = self.items_failed.load(Ordering::Acquire);
        OpInfo {
            state,
            status,
            items: self.items().len() as u32,
            items_done: self.items_done.load(Ordering::Acquire),
            items_failed,
            bytes_done: self.bytes_done.load(Ordering::Acquire),
            tag: self.tag,
        }
    }

    /// The items; buffers of a released op are gone, outcomes stay.
    pub fn items(&self) -> &[Item] {
        self.items.as_slice()
    }

    /// Bytes its items move.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it reports to `queue`.
    pub fn reports_to(&self, queue: &Arc<Queue>) -> bool {
        self.queue.as_ref().is_some_and(|q| Arc::ptr_eq(q, queue))
    }

    /// The particulars of a failure.
    pub fn error(&self) -> Option<Error> {
        self.told.lock().error.clone()
    }

    /// Takes the right to end the op unexecuted.
    pub fn claim(&self) -> bool {
        self.bits.fetch_or(ISSUED, Ordering::AcqRel) & ISSUED == 0
    }

    /// A worker takes the right to execute it, for itself and for its helpers;
    /// true for the first.
    pub(super) fn claim_to_run(&self) -> bool {
        let mut bits = self.bits.load(Ordering::Acquire);
        while bits & ISSUED == 0 {
            let run = bits | ISSUED | RUNNING;
            match self.bits.compare_exchange(bits, run, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.wake(bits); // for who waits for the issue
                    return true;
                }
                Err(now) => bits = now,
            }
        }
        false
    }

    fn wants_stop(&self) -> bool {
        self.bits.load(Ordering::Relaxed) & (CANCEL | RESOLVED) != 0 || self.core.is_closing()
    }

    fn settle(&self, status: i32, error: Option<Error>, told: &mut Told) -> bool {
        let won = self
            .status
            .compare_exchange(PENDING, status, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if won && error.is_some() {
            told.error = error;
        }
        won
    }

    /// The result is known; memory may still be in use. The first word counts.
    pub fn resolve(&self, status: Status, error: Option<Error>) {
        let mut told = self.told.lock();
        if !self.settle(status.code(), error, &mut told) {
            return;
        }
        let before = self.bits.fetch_or(RESOLVED, Ordering::AcqRel);
        self.tell(&mut told, RESOLVED);
        drop(told);
        self.wake(before);
    }

    /// Ends the op: resolves it if nobody has, and releases its memory.
    pub fn finish(&self, status: Status, error: Option<Error>, outbox: Option<&mut Outbox>) {
        self.skip_rest(status); // those that were promised, and nobody spoke of
        let leak = self.leak.load(Ordering::Relaxed);
        self.items().iter().for_each(|item| item.let_go(leak));
        let mut told = self.told.lock();
        let won = self.settle(status.code(), error, &mut told);
        debug_assert!(won || self.bits.load(Ordering::Acquire) & RESOLVED != 0);
        let before = self.bits.fetch_or(EVENTS, Ordering::AcqRel);
        assert!(before & RELEASED == 0, "an op was released twice");
        // Whatever was not told yet has happened by now, an issue included.
        let news = self.news(&mut told, EVENTS);
        let joined = std::mem::take(&mut told.joined);
        drop(told);
        joined.into_iter().for_each(|released| released());
        match (news, outbox) {
            (Some((queue, entry)), Some(outbox)) => outbox.add(queue, entry),
            (Some((queue, entry)), None) => queue.post(&[entry]),
            (None, _) => {}
        }
        self.wake(before);
        self.core.op_released();
    }

    fn wake(&self, before: u32) {
        if before & WAITED != 0 {
            drop(self.told.lock()); // a waiter that saw the old bits now sleeps
            self.changed.notify_all();
        }
    }

    /// What the queue is to hear of `events`; the caller posts it.
    fn news(&self, told: &mut Told, events: u32) -> Option<(&Arc<Queue>, Completion)> {
        let due = events & told.unsent;
        let queue = self.queue.as_ref().filter(|_| due != 0)?;
        told.unsent &= !due;
        let news = due & self.notify;
        if news == 0 {
            queue.unreserve(due.count_ones()); // a release nobody wants to hear of
            return None;
        }
        let status = match self.status.load(Ordering::Acquire) {
            PENDING => Status::Ok.code(),
            status => status,
        };
        let entry = Completion {
            op: if self.detached { 0 } else { self.key.bits() },
            tag: self.tag,
            status,
            events: news,
            items_failed: self.items_failed.load(Ordering::Acquire),
            bytes_done: self.bytes_done.load(Ordering::Acquire),
            value: self.value(),
            // Moments told together need one entry: the others' places are free again.
            spare: due.count_ones() - 1,
        };
        Some((queue, entry))
    }

    /// Tells at once, under the op's lock: moments are told in their order.
    pub(super) fn tell(&self, told: &mut Told, events: u32) {
        if let Some((queue, entry)) = self.news(told, events) {
            queue.post(&[entry]);
        }
    }

    /// After a defect: ends the op if it has not ended.
    pub(crate) fn give_up(&self, status: Status) {
        if self.bits.load(Ordering::Acquire) & RELEASED == 0 {
            self.leak.store(true, Ordering::Relaxed);
            self.skip_rest(status);
            self.finish(status, None, None);
        }
    }

    /// Asks for the end. An op that has not begun ends at once.
    pub fn cancel(&self) {
        let before = self.bits.fetch_or(CANCEL, Ordering::AcqRel);
        self.abandon(Status::Cancelled);
        if before & (RUNNING | CANCEL | RELEASED) == RUNNING {
            self.tell_owner();
        }
    }

    /// The deadline has passed.
    pub fn expire(&self) {
        self.abandon(Status::Timeout);
        // What runs is late now. What was claimed otherwise is being ended this
        // moment by who claimed it, with the result that goes with their deed.
        if self.bits.load(Ordering::Acquire) & (RUNNING | RELEASED) == RUNNING {
            self.resolve(Status::Timeout, None);
            self.tell_owner();
        }
    }

    fn abandon(&self, status: Status) {
        if !self.claim() {
            return;
        }
        self.skip_rest(status);
        self.finish(status, None, None);
        if let Some(owner) = &self.owner {
            owner.abandoned(self);
        }
    }

    fn skip_rest(&self, status: Status) {
        self.items().iter().for_each(|item| self.end_item(item, status));
    }

    /// Ends an item that nobody has ended.
    pub(super) fn end_item(&self, item: &Item, status: Status) {
        let ended = item
            .status
            .compare_exchange(PENDING, status.code(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if ended {
            self.items_done.fetch_add(1, Ordering::AcqRel);
            self.items_failed.fetch_add(u32::from(status != Status::Ok), Ordering::AcqRel);
        }
    }

    /// Its items are carried out by workers of the pool.
    pub(super) fn is_for_workers(&self) -> bool {
        self.run.is_some()
    }

    /// Lets up to `n` workers share the items. Before the op is queued.
    pub(crate) fn share(&self, n: u32) {
        self.shares.store(n, Ordering::Release);
    }

    /// A worker's turn: executes items until none is left; the last one of the
    /// sharers ends the op. Returns bytes moved.
    pub(crate) fn work(&self, outbox: &mut Outbox) -> u64 {
        let first = self.claim_to_run();
        if self.bits.load(Ordering::Acquire) & RUNNING == 0 {
            return 0; // cancelled or expired while it waited
        }
        if first && self.notify & ISSUED != 0 {
            self.tell(&mut self.told.lock(), ISSUED);
        }
        let mut moved = 0;
        while let Some(item) = self.take_item() {
            moved += self.one(item);
        }
        if self.shares.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end_work(outbox);
        }
        moved
    }

    fn take_item(&self) -> Option<&Item> {
        let stop = self.wants_stop() || self.core.is_poisoned();
        if stop {
            return None;
        }
        let index = self.next_item.fetch_add(1, Ordering::AcqRel);
        self.items().get(index as usize)
    }

    fn one(&self, item: &Item) -> u64 {
        let run = self.run.expect("only ops with an executor are queued for workers");
        let done = panic::catch(|| match self.core.pass(Site::Worker) {
            Ok(()) => run(item),
            Err(error) => Outcome { value: 0, error: Some(error) },
        });
        let (status, value) = match done {
            Ok(Outcome { value, error: None }) => (Status::Ok, value),
            Ok(Outcome { value, error: Some(error) }) => {
                let status = error.status();
                self.told.lock().error.get_or_insert(error);
                (status, value)
            }
            Err(text) => {
                self.leak.store(true, Ordering::Relaxed);
                self.core.poison(&text);
                self.told.lock().error.get_or_insert(Error::new(Status::Panic, text));
                (Status::Panic, 0)
            }
        };
        item.value.store(value, Ordering::Release);
        item.status.store(status.code(), Ordering::Release);
        self.items_done.fetch_add(1, Ordering::AcqRel);
        if status == Status::Ok {
            self.bytes_done.fetch_add(item.bytes, Ordering::AcqRel);
            return item.bytes;
        }
        self.items_failed.fetch_add(1, Ordering::AcqRel);
        0
    }

    fn end_work(&self, outbox: &mut Outbox) {
        let early = if self.core.is_poisoned() { Status::Panic } else { Status::Cancelled };
        self.skip_rest(early);
        let failed = |i: &Item| i.status.load(Ordering::Acquire);
        let worst = self.items().iter().map(failed).find(|s| *s != 0).unwrap_or(0);
        let status = Status::from_code(worst).unwrap_or(Status::Panic);
        self.finish(status, None, Some(outbox));
    }

    /// Waits for all of `moments`, until `deadline_ns` (0 = for ever).
    pub fn wait(&self, moments: u32, deadline_ns: u64) -> Result<()> {
        let mut told = self.told.lock();
        while self.bits.fetch_or(WAITED, Ordering::AcqRel) & moments != moments {
            if deadline_ns == 0 {
                self.changed.wait(&mut told);
                continue;
            }
            let now = self.core.clock().now_ns();
            if now >= deadline_ns {
                return Err(Status::Timeout.into());
            }
            self.changed.wait_for(&mut told, deadline_ns - now);
        }
        Ok(())
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        let items = std::mem::replace(&mut self.items, Items::None);
        self.core.op_freed(items);
    }
}
