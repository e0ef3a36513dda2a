//! Completion queues: bounded, without loss, polled or delivered by callback.
//!
//! Submitting an op reserves an entry, so that its completion always has space. A full queue
//! fails the submission with `KVT_E_AGAIN`; no completion is lost.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::fault::Site;
use crate::base::op::Op;
use crate::base::op::Owner;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::fail;

/// Largest capacity.
pub const MAX_CAPACITY: u32 = 1 << 20;
/// Default capacity.
pub const DEFAULT_CAPACITY: u32 = 4096;
/// Most completions that a callback receives at once, and that a worker posts at once.
pub const BATCH: usize = 64;

/// One entry of a queue: moments of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// The op's key bits; 0 for a detached op.
    pub op: u64,
    /// The caller's value.
    pub tag: u64,
    /// The result.
    pub status: i32,
    /// The moments that this entry notifies of.
    pub events: u32,
    /// Items whose status is not OK.
    pub items_failed: u32,
    /// Bytes of the items that completed with OK.
    pub bytes_done: u64,
    /// The value of the first item.
    pub value: u64,
    /// Reserved entries that this one frees.
    pub spare: u32,
}

/// Called on the notifier thread with a batch.
pub type Sink = Box<dyn Fn(&[Completion]) + Send + Sync>;

struct Inner {
    ring: VecDeque<Completion>,
    reserved: u32,
    closing: bool,
    closed: bool,
    eventfd: Option<RawFd>,
    /// The notifier was signalled and has not yet delivered.
    signalled: bool,
    posted: u64,
    refused: u64,
    peak: u32,
}

/// Counters of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Entries that the queue can hold.
    pub capacity: u32,
    /// Entries waiting to be drained.
    pub pending: u32,
    /// Entries reserved by ops that have not completed.
    pub reserved: u32,
    /// Most entries ever pending and reserved together.
    pub peak: u32,
    /// Entries posted so far.
    pub posted: u64,
    /// Submissions refused because the queue was full.
    pub refused: u64,
}

/// A completion queue.
pub struct Queue {
    core: Arc<Core>,
    capacity: u32,
    calls_back: bool,
    sink: Mutex<Option<Arc<Sink>>>,
    inner: Mutex<Inner>,
    filled: Condvar,
}

impl Queue {
    /// Opens a queue of `capacity` entries; 0 = [`DEFAULT_CAPACITY`]. With a sink, completions
    /// are delivered by callback.
    pub fn open(core: &Arc<Core>, capacity: u32, sink: Option<Sink>) -> Result<Arc<Queue>> {
        core.check_open()?;
        let capacity = if capacity == 0 { DEFAULT_CAPACITY } else { capacity };
        if capacity > MAX_CAPACITY {
            fail!(Limit, "a queue holds at most {MAX_CAPACITY} entries, not {capacity}");
        }
        let mut ring = VecDeque::new();
        ring.try_reserve_exact(capacity as usize).map_err(|_| Status::NoMem)?;
        let queue = Arc::new(Queue {
            core: core.clone(),
            capacity,
            calls_back: sink.is_some(),
            sink: Mutex::new(sink.map(Arc::new)),
            inner: Mutex::new(Inner {
                ring,
                reserved: 0,
                closing: false,
                closed: false,
                eventfd: None,
                signalled: false,
                posted: 0,
                refused: 0,
                peak: 0,
            }),
            filled: Condvar::new(),
        });
        let owner: Weak<dyn Owner> = Arc::<Queue>::downgrade(&queue);
        core.add_owner(owner);
        Ok(queue)
    }

    /// The runtime of the queue.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Whether the queue refuses new work.
    pub fn is_closing(&self) -> bool {
        self.inner.lock().closing
    }

    /// Whether completions are delivered by callback.
    pub fn is_callback(&self) -> bool {
        self.calls_back
    }

    /// Reserves `n` entries for ops about to be submitted.
    pub(crate) fn reserve(&self, n: u32) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.closing {
            return Err(Status::Closed.into());
        }
        let taken = inner.reserved + inner.ring.len() as u32;
        if n > self.capacity - taken {
            inner.refused += 1;
            return Err(Status::Again.into());
        }
        inner.reserved += n;
        inner.peak = inner.peak.max(taken + n);
        Ok(())
    }

    /// Frees reserved entries that no op will use.
    pub(crate) fn unreserve(&self, n: u32) {
        let mut inner = self.inner.lock();
        debug_assert!(inner.reserved >= n);
        inner.reserved -= n;
        drop(inner);
        self.filled.notify_all(); // a close may wait for the last entry
    }

    /// Posts completions whose entries were reserved.
    pub(crate) fn post(self: &Arc<Queue>, batch: &[Completion]) {
        let mut inner = self.inner.lock();
        let was_empty = inner.ring.is_empty();
        for entry in batch {
            let entries = 1 + entry.spare;
            assert!(inner.reserved >= entries, "a completion without a reserved entry");
            inner.reserved -= entries;
            inner.ring.push_back(*entry);
        }
        inner.posted += batch.len() as u64;
        if let (Some(fd), true) = (inner.eventfd, was_empty) {
            signal_eventfd(fd);
        }
        let signal = self.calls_back && !std::mem::replace(&mut inner.signalled, true);
        let closing = inner.closing;
        drop(inner);
        if signal {
            self.core.notifier().queue_filled(self);
        } else if closing {
            self.filled.notify_all(); // consumers and the close itself
        } else {
            self.filled.notify_one();
        }
    }

    fn pop(&self, inner: &mut Inner, out: &mut dyn FnMut(Completion), max: usize) -> usize {
        let n = inner.ring.len().min(max);
        inner.ring.drain(..n).for_each(out);
        if let (Some(fd), true) = (inner.eventfd, n > 0 && inner.ring.is_empty()) {
            drain_eventfd(fd);
        }
        n
    }

    fn check_polled(&self) -> Result<()> {
        if !self.calls_back {
            return Ok(());
        }
        Err(Error::new(
            Status::State,
            "the queue delivers completions by callback and cannot be polled",
        ))
    }

    /// Drains up to `max` entries without waiting.
    pub fn poll(&self, max: usize, out: &mut dyn FnMut(Completion)) -> Result<usize> {
        self.check_polled()?;
        Ok(self.pop(&mut self.inner.lock(), out, max))
    }

    /// Drains up to `max` entries. Waits for the first one until `deadline_ns`; 0 = no deadline.
    pub fn wait(
        &self,
        max: usize,
        deadline_ns: u64,
        out: &mut dyn FnMut(Completion),
    ) -> Result<usize> {
        self.check_polled()?;
        refuse_reentry()?;
        let mut inner = self.inner.lock();
        loop {
            if !inner.ring.is_empty() {
                let n = self.pop(&mut inner, out, max);
                let more = !inner.ring.is_empty();
                drop(inner);
                if more {
                    self.filled.notify_one(); // for another consumer
                }
                return Ok(n);
            }
            if inner.closing && inner.reserved == 0 {
                return Err(Status::Closed.into());
            }
            if deadline_ns == 0 {
                self.filled.wait(&mut inner);
                continue;
            }
            let now = self.core.clock().now_ns();
            if now >= deadline_ns {
                return Err(Status::Timeout.into());
            }
            self.filled.wait_for(&mut inner, deadline_ns - now);
        }
    }

    /// An eventfd that is readable exactly while entries are pending.
    pub fn eventfd(&self) -> Result<RawFd> {
        self.check_polled()?;
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Status::Closed.into());
        }
        if let Some(fd) = inner.eventfd {
            return Ok(fd);
        }
        // SAFETY: no preconditions; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::os("cannot create an eventfd"));
        }
        if !inner.ring.is_empty() {
            signal_eventfd(fd);
        }
        inner.eventfd = Some(fd);
        Ok(fd)
    }

    /// Calls the callback with one batch; returns true when more entries may be pending. Runs
    /// on the notifier thread, which also serves deadlines and other queues.
    pub(crate) fn deliver(&self) -> bool {
        let Some(sink) = self.sink.lock().clone() else { return false };
        // Before any entry is taken: an injected fault loses none.
        if let Err(error) = self.core.pass(Site::Notifier) {
            log::warn!("{error}");
        }
        let mut batch = [Completion::default(); BATCH];
        let mut inner = self.inner.lock();
        let mut n = 0;
        let mut take = |entry| {
            batch[n] = entry;
            n += 1;
        };
        self.pop(&mut inner, &mut take, BATCH);
        if n == 0 {
            // A close continues once nothing is signalled, and dropping the last sink destroys
            // the user's data. This clone must not be the last, nor be dropped under the lock.
            drop(inner);
            drop(sink);
            let mut inner = self.inner.lock();
            if !inner.ring.is_empty() {
                return true;
            }
            inner.signalled = false;
            drop(inner);
            self.filled.notify_all();
            return false;
        }
        // A close waits until the callback has seen the last entry.
        inner.reserved += n as u32;
        drop(inner);
        let _delivering = Delivering { queue: self, entries: n as u32 };
        sink(&batch[..n]);
        true
    }

    /// Counters.
    pub fn stats(&self) -> QueueStats {
        let inner = self.inner.lock();
        QueueStats {
            capacity: self.capacity,
            pending: inner.ring.len() as u32,
            reserved: inner.reserved,
            peak: inner.peak,
            posted: inner.posted,
            refused: inner.refused,
        }
    }

    /// Refuses new work, cancels open ops and waits for them until `deadline_ns`; 0 = no
    /// deadline. Entries that were not drained are dropped.
    pub fn close(self: &Arc<Queue>, deadline_ns: u64) -> Result<()> {
        refuse_reentry()?;
        self.inner.lock().closing = true;
        self.filled.notify_all();
        self.core.cancel_ops_of(self);
        let mut inner = self.inner.lock();
        while inner.reserved > 0 || (self.calls_back && inner.signalled) {
            if deadline_ns == 0 {
                self.filled.wait(&mut inner);
                continue;
            }
            let now = self.core.clock().now_ns();
            if now >= deadline_ns {
                let text = format!("{} entries of the queue are still in use", inner.reserved);
                return Err(Error::new(Status::Busy, text));
            }
            self.filled.wait_for(&mut inner, deadline_ns - now);
        }
        // Ops that are not freed yet keep the queue alive, so its contents are freed now.
        inner.closed = true;
        let ring = std::mem::take(&mut inner.ring);
        let eventfd = inner.eventfd.take();
        drop(inner);
        close_fd(eventfd);
        let sink = self.sink.lock().take();
        drop((ring, sink)); // without a lock: the sink may call the caller's destroy function
        Ok(())
    }
}

impl Owner for Queue {
    fn abandoned(&self, _op: &Op) {}

    fn shut(&self, status: Status) {
        if status == Status::Cancelled {
            self.inner.lock().closing = true; // no more entries will arrive for a waiter
            self.filled.notify_all();
        }
    }

    fn serve(&self) {}
}

fn close_fd(fd: Option<RawFd>) {
    if let Some(fd) = fd {
        // SAFETY: created by `eventfd` and taken out of the queue, so closed once.
        unsafe { libc::close(fd) };
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        close_fd(self.inner.lock().eventfd.take());
    }
}

/// Entries that a callback is using.
struct Delivering<'a> {
    queue: &'a Queue,
    entries: u32,
}

impl Drop for Delivering<'_> {
    fn drop(&mut self) {
        self.queue.unreserve(self.entries);
    }
}

fn signal_eventfd(fd: RawFd) {
    let one = 1u64;
    // SAFETY: an eventfd takes eight bytes; it is non-blocking and its counter is
    // at most 1, so the write cannot overflow it.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

fn drain_eventfd(fd: RawFd) {
    let mut count = 0u64;
    // SAFETY: an eventfd gives eight bytes; non-blocking.
    unsafe { libc::read(fd, (&raw mut count).cast(), 8) };
}

/// Collects a worker's completions, so that a batch costs one lock and one wake-up.
#[derive(Default)]
pub struct Outbox {
    queue: Option<Arc<Queue>>,
    entries: Vec<Completion>,
}

impl Outbox {
    /// An empty outbox with capacity for one batch.
    pub fn new() -> Outbox {
        Outbox { queue: None, entries: Vec::with_capacity(BATCH) }
    }

    /// Adds an entry. Posts the collected entries first if the batch is full or belongs to
    /// another queue.
    pub fn add(&mut self, queue: &Arc<Queue>, entry: Completion) {
        let same = self.queue.as_ref().is_some_and(|q| Arc::ptr_eq(q, queue));
        if !same || self.entries.len() == BATCH {
            self.flush();
            self.queue = Some(queue.clone());
        }
        self.entries.push(entry);
    }

    /// Posts the collected entries.
    pub fn flush(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.post(&self.entries);
            self.entries.clear();
        }
    }
}
