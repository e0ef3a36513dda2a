//! Operations: a promise that completes exactly once, in two moments.
//!
//! *Resolved*: the result is known. *Released*: the library no longer touches the caller's
//! memory. A deadline or a defect can resolve an op while a worker still uses its buffers; the
//! release then follows later.
//!
//! Exactly one party executes or ends an op: the one that sets [`ISSUED`] first. That is a
//! worker that runs the op, or a cancel or deadline that ends the op before it began.
//!
//! Two kinds of op exist. Workers of the pool execute the items of a *submitted* op. An
//! [`Owner`], such as a store, executes a *promised* op and finishes it.

use crate::base::core::Core;
use crate::base::fault::Site;
use crate::base::item::{Item, Items, Outcome, PENDING, RunFn};
use crate::base::panic;
use crate::base::queue::{Completion, Outbox, Queue};
use crate::base::slab::{Key, Pin, Slab};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, Mutex};

/// Execution has begun, or the op was ended before it could begin.
pub const ISSUED: u32 = 1;
/// The result is known.
pub const RESOLVED: u32 = 2;
/// The library no longer touches the caller's memory.
pub const RELEASED: u32 = 4;
/// A cancel was requested.
pub const CANCEL: u32 = 8;
const WAITED: u32 = 16;
/// Issued to the workers, not ended unexecuted.
const RUNNING: u32 = 32;
/// The moments that a queue can be notified of.
pub const EVENTS: u32 = ISSUED | RESOLVED | RELEASED;
/// The slot of a promised op whose owner has not set one.
const NO_SLOT: u32 = u32::MAX;

#[cfg(not(feature = "shuttle"))]
static OPS: Slab<Op> = Slab::new();

#[cfg(feature = "shuttle")]
shuttle::lazy_static! {
    static ref OPS: Slab<Op> = Slab::new();
}

/// The table of all ops of the process, or of one model run. One table serves all runtimes,
/// since the handle of an op contains only its slot.
pub fn ops() -> &'static Slab<Op> {
    &OPS
}

/// Executes promised ops. Every method is called with no lock held.
pub trait Owner: Send + Sync {
    /// A cancel or a deadline ended an op before it was issued, or no caller waits for a running
    /// op any more.
    fn abandoned(&self, op: &Op);
    /// The runtime closes or is poisoned: the owner must finish every promised op.
    fn shut(&self, status: Status);
    /// Runs on the notifier thread after the owner requested a turn there.
    fn serve(&self);
}

/// Options of a submission.
#[derive(Clone, Default)]
pub struct OpOpts {
    /// The queue that receives the completions.
    pub queue: Option<Arc<Queue>>,
    /// The caller's value, returned in the completion.
    pub tag: u64,
    /// Nanoseconds on the runtime's clock at which the op resolves with a timeout; 0 = never.
    pub deadline_ns: u64,
    /// Bits of the moments to notify of; 0 = the release only.
    pub notify: u32,
    /// Order among ops; 0 is executed first.
    pub priority: usize,
    /// The op has no handle and is freed when its completion is posted.
    pub detached: bool,
}

impl OpOpts {
    fn events(&self) -> u32 {
        if self.notify == 0 { RELEASED } else { self.notify & EVENTS }
    }

    /// Moments that reserve an entry in the queue. The release always does, notified or not:
    /// a queue thereby knows when no op that reports to it runs any more.
    fn moments(&self) -> u32 {
        self.events() | RELEASED
    }

    /// Entries that such an op reserves in its queue.
    pub fn entries(&self) -> u32 {
        self.moments().count_ones()
    }
}

/// Progress or result of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// [`ISSUED`], [`RESOLVED`], [`RELEASED`], [`CANCEL`].
    pub state: u32,
    /// The result; `None` until resolved.
    pub status: Option<i32>,
    /// Items of the op.
    pub items: u32,
    /// Items that were executed or skipped.
    pub items_done: u32,
    /// Items among those whose status is not OK.
    pub items_failed: u32,
    /// Bytes of the items that completed with OK.
    pub bytes_done: u64,
    /// The caller's value.
    pub tag: u64,
}

/// Called when an op is released.
pub type ReleaseHook = Box<dyn FnOnce() + Send>;

/// State under the op's lock.
struct Inner {
    /// Details of the failure.
    error: Option<Error>,
    /// Moments that the queue was not yet notified of.
    unsent: u32,
    release_hooks: Vec<ReleaseHook>,
}

/// An operation. It lives in the slab [`ops`] and is referenced by pins.
pub struct Op {
    pub(crate) core: Arc<Core>,
    key: Key,
    bits: AtomicU32,
    status: AtomicI32,
    next_item: AtomicU32,
    items_done: AtomicU32,
    items_failed: AtomicU32,
    shares: AtomicU32,
    bytes_done: AtomicU64,
    /// The value that the owner of a promised op reported.
    value: AtomicU64,
    /// Where the owner of a promised op keeps its state for the op, or [`NO_SLOT`].
    owner_slot: AtomicU32,
    inner: Mutex<Inner>,
    changed: Condvar,
    run: Option<RunFn>,
    items: Items,
    /// The sum over all items. Computed once, because the pool reads it under its lock.
    bytes: u64,
    owner: Option<Arc<dyn Owner>>,
    queue: Option<Arc<Queue>>,
    tag: u64,
    deadline_ns: u64,
    detached: bool,
    notify: u32,
    leak: AtomicBool,
}

/// A counted reference to an op.
pub type OpRef = Pin<'static, Op>;

impl Op {
    /// Creates an op. The caller has counted the op in the runtime's limit and has reserved its
    /// entries in the queue.
    pub(crate) fn create(
        core: &Arc<Core>,
        opts: &OpOpts,
        items: Items,
        run: Option<RunFn>,
        owner: Option<Arc<dyn Owner>>,
    ) -> Result<OpRef> {
        let bytes = items.as_slice().iter().fold(0u64, |sum, i| sum.saturating_add(i.bytes));
        let op = ops().insert_pinned(|key| Op {
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
            owner_slot: AtomicU32::new(NO_SLOT),
            inner: Mutex::new(Inner {
                error: None,
                unsent: opts.moments(),
                release_hooks: Vec::new(),
            }),
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
        if opts.detached {
            op.remove(); // from here on only pins keep the op alive
        }
        Ok(op)
    }

    /// The key of the op in [`ops`].
    pub fn key(&self) -> Key {
        self.key
    }

    /// Nanoseconds at which the op resolves with a timeout; 0 = never.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// The state bits.
    pub fn state(&self) -> u32 {
        self.bits.load(Ordering::Acquire) & (EVENTS | CANCEL)
    }

    /// The progress of the op.
    pub fn info(&self) -> OpInfo {
        let state = self.state();
        let status = (state & RESOLVED != 0).then(|| self.status.load(Ordering::Acquire));
        // Read in this order: writers count an item as done before they count it as failed.
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

    /// The result of a resolved op.
    pub fn result(&self) -> Result<()> {
        match self.info().status.and_then(Status::from_code) {
            Some(Status::Ok) | None => Ok(()),
            Some(status) => Err(self.error().unwrap_or_else(|| status.into())),
        }
    }

    /// The items. After the release their buffers are released and their outcomes remain.
    pub fn items(&self) -> &[Item] {
        self.items.as_slice()
    }

    /// Bytes that the items move.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the op reports to `queue`.
    pub fn reports_to(&self, queue: &Arc<Queue>) -> bool {
        self.queue.as_ref().is_some_and(|q| Arc::ptr_eq(q, queue))
    }

    /// Details of the failure, if any were recorded.
    pub fn error(&self) -> Option<Error> {
        self.inner.lock().error.clone()
    }

    /// Claims the right to end the op without executing it. Returns false if another party has
    /// issued or ended the op.
    pub fn claim(&self) -> bool {
        self.bits.fetch_or(ISSUED, Ordering::AcqRel) & ISSUED == 0
    }

    /// Claims the right to execute the op, for a worker and its helpers. Returns true for the
    /// first of them.
    fn claim_to_run(&self) -> bool {
        let mut bits = self.bits.load(Ordering::Acquire);
        while bits & ISSUED == 0 {
            let run = bits | ISSUED | RUNNING;
            match self.bits.compare_exchange(bits, run, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.wake(bits); // a thread may wait for the issue
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

    /// Sets the result unless one is set.
    fn set_status(&self, status: i32, error: Option<Error>, inner: &mut Inner) -> bool {
        // The lock of `inner` is held by every writer.
        let won = self.status.load(Ordering::Relaxed) == PENDING;
        if won {
            self.status.store(status, Ordering::Release);
            inner.error = error.or(inner.error.take());
        }
        won
    }

    /// Sets the result while memory may still be in use. The first result counts.
    pub fn resolve(&self, status: Status, error: Option<Error>) {
        let mut inner = self.inner.lock();
        if !self.set_status(status.code(), error, &mut inner) {
            return;
        }
        let before = self.bits.fetch_or(RESOLVED, Ordering::AcqRel);
        self.notify(&mut inner, RESOLVED);
        drop(inner);
        self.wake(before);
    }

    /// Ends the op: resolves it unless it is resolved, and releases its memory.
    pub fn finish(&self, status: Status, error: Option<Error>, outbox: Option<&mut Outbox>) {
        self.skip_rest(status); // items of a promised op whose outcome was not reported
        let leak = self.leak.load(Ordering::Relaxed);
        self.items().iter().for_each(|item| item.release_buffers(leak));
        let mut inner = self.inner.lock();
        let won = self.set_status(status.code(), error, &mut inner);
        debug_assert!(won || self.bits.load(Ordering::Acquire) & RESOLVED != 0);
        let before = self.bits.fetch_or(EVENTS, Ordering::AcqRel);
        assert!(before & RELEASED == 0, "an op was released twice");
        // All moments have happened by now, the issue included.
        let completion = self.completion(&mut inner, EVENTS);
        let hooks = std::mem::take(&mut inner.release_hooks);
        drop(inner);
        hooks.into_iter().for_each(|hook| hook());
        match (completion, outbox) {
            (Some((queue, entry)), Some(outbox)) => outbox.add(queue, entry),
            (Some((queue, entry)), None) => queue.post(&[entry]),
            (None, _) => {}
        }
        self.wake(before);
        self.core.op_released();
    }

    fn wake(&self, before: u32) {
        if before & WAITED != 0 {
            drop(self.inner.lock()); // a waiter that saw the old bits sleeps by now
            self.changed.notify_all();
        }
    }

    /// The completion for `events`, if the queue is to be notified; the caller posts it.
    fn completion(&self, inner: &mut Inner, events: u32) -> Option<(&Arc<Queue>, Completion)> {
        let due = events & inner.unsent;
        let queue = self.queue.as_ref().filter(|_| due != 0)?;
        inner.unsent &= !due;
        let wanted = due & self.notify;
        if wanted == 0 {
            queue.unreserve(due.count_ones()); // a release without a notification
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
            events: wanted,
            items_failed: self.items_failed.load(Ordering::Acquire),
            bytes_done: self.bytes_done.load(Ordering::Acquire),
            value: self.value(),
            // Moments notified together need one entry; the other reserved entries are freed.
            spare: due.count_ones() - 1,
        };
        Some((queue, entry))
    }

    /// Posts a completion under the op's lock, so that moments are notified in their order.
    fn notify(&self, inner: &mut Inner, events: u32) {
        if let Some((queue, entry)) = self.completion(inner, events) {
            queue.post(&[entry]);
        }
    }

    /// After a defect: ends the op if it has not ended.
    pub(crate) fn abort(&self, status: Status) {
        if self.bits.load(Ordering::Acquire) & RELEASED == 0 {
            self.leak.store(true, Ordering::Relaxed);
            self.skip_rest(status);
            self.finish(status, None, None);
        }
    }

    /// Requests the end of the op. An op that has not begun ends at once.
    pub fn cancel(&self) {
        let before = self.bits.fetch_or(CANCEL, Ordering::AcqRel);
        self.abandon(Status::Cancelled);
        if before & (RUNNING | CANCEL | RELEASED) == RUNNING {
            self.notify_owner();
        }
    }

    /// The deadline has passed.
    pub fn expire(&self) {
        self.abandon(Status::Timeout);
        // A running op is late now. An op that was claimed otherwise is being ended by the
        // party that claimed it, with that party's result.
        if self.bits.load(Ordering::Acquire) & (RUNNING | RELEASED) == RUNNING {
            self.resolve(Status::Timeout, None);
            self.notify_owner();
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

    /// Ends an item unless it has ended.
    fn end_item(&self, item: &Item, status: Status) {
        let ended = item
            .status
            .compare_exchange(PENDING, status.code(), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok();
        if ended {
            self.items_done.fetch_add(1, Ordering::AcqRel);
            self.items_failed.fetch_add(u32::from(status != Status::Ok), Ordering::AcqRel);
        }
    }

    /// Whether workers of the pool execute the items.
    fn is_for_workers(&self) -> bool {
        self.run.is_some()
    }

    /// Lets up to `n` workers share the items. Called before the op is queued.
    pub(crate) fn share(&self, n: u32) {
        self.shares.store(n, Ordering::Release);
    }

    /// Executes items on a worker until none is left. The last worker that shares the op ends
    /// it. Returns the bytes moved.
    pub(crate) fn work(&self, outbox: &mut Outbox) -> u64 {
        let first = self.claim_to_run();
        if self.bits.load(Ordering::Acquire) & RUNNING == 0 {
            return 0; // cancelled or expired while it waited
        }
        if first && self.notify & ISSUED != 0 {
            self.notify(&mut self.inner.lock(), ISSUED);
        }
        let mut moved = 0;
        while let Some(item) = self.take_item() {
            moved += self.execute(item);
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

    fn execute(&self, item: &Item) -> u64 {
        let run = self.run.expect("only ops with an executor are queued for workers");
        let done = panic::catch(|| match self.core.pass(Site::Worker) {
            Ok(()) => run(item),
            Err(error) => Outcome { value: 0, error: Some(error) },
        });
        let (status, value) = match done {
            Ok(Outcome { value, error: None }) => (Status::Ok, value),
            Ok(Outcome { value, error: Some(error) }) => {
                let status = error.status();
                self.inner.lock().error.get_or_insert(error);
                (status, value)
            }
            Err(text) => {
                self.leak.store(true, Ordering::Relaxed);
                self.core.poison(&text);
                self.inner.lock().error.get_or_insert(Error::new(Status::Panic, text));
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
        let skipped = if self.core.is_poisoned() { Status::Panic } else { Status::Cancelled };
        self.skip_rest(skipped);
        let failed = |i: &Item| i.status.load(Ordering::Acquire);
        let worst = self.items().iter().map(failed).find(|s| *s != 0).unwrap_or(0);
        let status = Status::from_code(worst).unwrap_or(Status::Panic);
        self.finish(status, None, Some(outbox));
    }

    /// Waits for all of `moments` until `deadline_ns`; 0 = no deadline.
    pub fn wait(&self, moments: u32, deadline_ns: u64) -> Result<()> {
        if self.bits.load(Ordering::Acquire) & moments == moments {
            return Ok(());
        }
        let mut inner = self.inner.lock();
        while self.bits.fetch_or(WAITED, Ordering::AcqRel) & moments != moments {
            if deadline_ns == 0 {
                self.changed.wait(&mut inner);
                continue;
            }
            let now = self.core.clock().now_ns();
            if now >= deadline_ns {
                return Err(Status::Timeout.into());
            }
            self.changed.wait_for(&mut inner, deadline_ns - now);
        }
        Ok(())
    }
}

/// Calls for the owner of a promised op.
impl Op {
    /// Begins the execution by the owner: from here on the op ends when the owner finishes it.
    /// Returns false if the op has ended. [`Owner::abandoned`] reports a later cancel or
    /// deadline, and [`Op::abandon_status`] then names it.
    pub fn begin(&self) -> bool {
        self.claim_to_run()
    }

    /// Records where the owner keeps its state for the op, so that the owner finds the state
    /// when the op is abandoned.
    pub fn set_owner_slot(&self, slot: u32) {
        self.owner_slot.store(slot, Ordering::Release);
    }

    /// The slot that [`Op::set_owner_slot`] recorded.
    pub fn owner_slot(&self) -> Option<u32> {
        Some(self.owner_slot.load(Ordering::Acquire)).filter(|&slot| slot != NO_SLOT)
    }

    /// Notifies the queue that the owner has begun the op.
    pub fn notify_issued(&self) {
        if self.notify & ISSUED != 0 {
            self.notify(&mut self.inner.lock(), ISSUED);
        }
    }

    /// Why no caller waits for the result any more; `None` while one may.
    pub fn abandon_status(&self) -> Option<Status> {
        let bits = self.bits.load(Ordering::Acquire);
        match (bits & CANCEL != 0, bits & RESOLVED != 0) {
            (true, _) => Some(Status::Cancelled),
            (_, true) => Some(Status::Timeout),
            _ => None,
        }
    }

    /// Sets the value and the bytes moved, before the op is finished.
    pub fn report(&self, value: u64, bytes: u64) {
        self.value.store(value, Ordering::Release);
        self.bytes_done.store(bytes, Ordering::Release);
    }

    /// Sets the status of each item, before the op is finished. Items without a status end with
    /// the status of the op.
    pub fn report_items(&self, outcomes: &[Status]) {
        for (item, &status) in self.items().iter().zip(outcomes) {
            self.end_item(item, status);
        }
    }

    /// The value of the first item that workers executed, or the value that the owner reported.
    pub fn value(&self) -> u64 {
        match self.items().first() {
            Some(first) if self.is_for_workers() => first.value.load(Ordering::Acquire),
            _ => self.value.load(Ordering::Acquire),
        }
    }

    /// Registers a hook that runs when the op is released, whatever the result. The hook of a
    /// released op runs at once. Hooks run with no lock held; they must be short and not wait.
    pub fn on_release(&self, hook: ReleaseHook) -> Result<()> {
        let mut inner = self.inner.lock();
        if self.bits.load(Ordering::Acquire) & RELEASED == 0 {
            inner.release_hooks.try_reserve(1).map_err(|_| Status::NoMem)?;
            inner.release_hooks.push(hook);
            return Ok(());
        }
        drop(inner);
        hook();
        Ok(())
    }

    /// Undoes a creation: the op was never queued and no completion is posted. A concurrent
    /// close may have ended the op first; then nothing is left to undo.
    pub(crate) fn discard(&self) {
        if self.claim() {
            self.retract();
        }
    }

    /// Undoes a promise that the owner had begun, before a completion was posted.
    pub fn retract(&self) {
        self.items().iter().for_each(|item| item.release_buffers(false));
        self.bits.fetch_or(EVENTS, Ordering::AcqRel);
        if let Some(queue) = &self.queue {
            queue.unreserve(self.inner.lock().unsent.count_ones());
        }
        let hooks = std::mem::take(&mut self.inner.lock().release_hooks);
        hooks.into_iter().for_each(|hook| hook());
        self.core.op_released();
    }

    /// Informs the owner of a running op that no caller waits for it.
    fn notify_owner(&self) {
        if let Some(owner) = &self.owner {
            owner.abandoned(self);
        }
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        let items = std::mem::replace(&mut self.items, Items::None);
        self.core.op_freed(items);
    }
}
