//! The state that the threads, ops and objects of a runtime share: counters, worker pool, and
//! the submission of ops.

use crate::base::clock::Clock;
use crate::base::fault::{Faults, Site};
use crate::base::item::{Item, Items, MAX_ITEMS, RunFn};
use crate::base::list_pool::ListPool;
use crate::base::notifier::Notifier;
use crate::base::op::Owner;
use crate::base::op::{Op, OpOpts, OpRef, ops};
use crate::base::panic;
use crate::base::queue::Queue;
use crate::base::runtime::{OnThread, Role};

use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::base::worker::Pool;
use crate::fail;

/// Counters of a runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuntimeStats {
    /// Worker threads.
    pub workers: u32,
    /// Ops not yet freed.
    pub ops_live: u32,
    /// Ops not yet released.
    pub ops_open: u64,
    /// Ops submitted so far.
    pub ops_submitted: u64,
    /// Ops waiting for a worker.
    pub ops_queued: u64,
    /// Submissions refused because the limit of live ops was reached.
    pub refused: u64,
    /// Whether a panic was caught.
    pub poisoned: bool,
}

/// State shared by the threads, ops and objects of a runtime.
pub struct Core {
    pub(super) clock: Clock,
    pub(super) faults: Option<Faults>,
    pub(super) pool: Pool,
    pub(super) notifier: Notifier,
    pub(super) workers: u32,
    pub(super) max_ops: u32,
    pub(super) live: AtomicU32,
    pub(super) open: AtomicU64,
    pub(super) submitted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) closing: AtomicBool,
    pub(super) poisoned: AtomicBool,
    /// Running threads by role.
    pub(super) alive: [AtomicU32; 2],
    /// Called in every new thread until the runtime is closed.
    pub(super) on_thread: Mutex<Option<OnThread>>,
    /// Guards the wait of a close for the counters above.
    pub(super) close_wait: Mutex<()>,
    pub(super) close_progress: Condvar,
    pub(super) owners: Mutex<Vec<Weak<dyn Owner>>>,
    pub(super) items: ListPool<Item>,
    pub(super) refs: ListPool<OpRef>,
}

impl Core {
    /// The clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The notifier thread's inbox.
    pub fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Faults to inject.
    pub fn faults(&self) -> Option<&Faults> {
        self.faults.as_ref()
    }

    /// Passes a site at which a fault may be injected.
    pub fn pass(&self, site: Site) -> Result<()> {
        self.faults.as_ref().map_or(Ok(()), |faults| faults.pass(site))
    }

    /// Calls the host's thread hook; every thread does so first.
    pub fn thread_started(&self, role: Role, number: u32) {
        let hook = self.on_thread.lock().clone();
        if let Some(hook) = hook {
            hook(role, number);
        }
    }

    /// Whether the runtime refuses new work.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Whether a panic was caught.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// Records a caught panic: queued ops end with `KVT_E_PANIC`.
    pub fn poison(&self, text: &str) {
        // Before the log: a log callback may be slow, and may call the library.
        if !self.poisoned.swap(true, Ordering::AcqRel) {
            self.shut_owners(Status::Panic);
        }
        log::error!("caught a panic inside the library; the runtime is poisoned: {text}");
    }

    pub(super) fn shut_owners(&self, status: Status) {
        let owners: Vec<_> = self.owners.lock().iter().filter_map(Weak::upgrade).collect();
        owners.iter().for_each(|owner| owner.shut(status));
    }

    /// Fails when the runtime accepts no new work.
    pub fn check_open(&self) -> Result<()> {
        if self.is_poisoned() {
            return Err(Status::Panic.into());
        }
        if self.is_closing() {
            return Err(Status::Closed.into());
        }
        Ok(())
    }

    /// Registers an owner of promised ops.
    pub fn add_owner(&self, owner: Weak<dyn Owner>) {
        let mut owners = self.owners.lock();
        owners.retain(|o| o.strong_count() > 0);
        owners.push(owner);
    }

    pub(crate) fn op_released(&self) {
        self.open_less(1);
    }

    fn open_less(&self, n: u32) {
        let n = u64::from(n);
        if self.open.fetch_sub(n, Ordering::SeqCst) == n && self.is_closing() {
            self.wake_close();
        }
    }

    pub(crate) fn op_freed(&self, items: Items) {
        self.live.fetch_sub(1, Ordering::AcqRel);
        if let Items::Many(items) = items {
            self.items.put_back(items);
        }
    }

    pub(super) fn wake_close(&self) {
        drop(self.close_wait.lock()); // a close that read the old count waits by now
        self.close_progress.notify_all();
    }

    /// Waits until `done` returns true; false when the deadline passed first.
    pub(super) fn wait_until(&self, deadline_ns: u64, done: impl Fn() -> bool) -> bool {
        let mut guard = self.close_wait.lock();
        while !done() {
            if deadline_ns == 0 {
                self.close_progress.wait(&mut guard);
                continue;
            }
            let now = self.clock.now_ns();
            if now >= deadline_ns {
                return false;
            }
            self.close_progress.wait_for(&mut guard, deadline_ns - now);
        }
        true
    }

    /// Counts `n` ops in the limits and reserves their queue entries.
    fn admit(&self, n: u32, opts: &OpOpts) -> Result<()> {
        // The count is raised before `closing` is read, and a close sets `closing` before it
        // reads the count: one of the two sees the other.
        self.open.fetch_add(u64::from(n), Ordering::SeqCst);
        let admitted = self.check_open().and_then(|()| self.reserve_ops(n, opts));
        match admitted {
            Ok(()) => {
                self.submitted.fetch_add(u64::from(n), Ordering::Relaxed);
            }
            Err(_) => self.open_less(n),
        }
        admitted
    }

    fn reserve_ops(&self, n: u32, opts: &OpOpts) -> Result<()> {
        if opts.detached && opts.queue.is_none() {
            fail!(Invalid, "a detached op has neither a handle nor a queue: pass a queue");
        }
        if opts.queue.as_ref().is_some_and(|q| !std::ptr::eq(Arc::as_ptr(q.core()), self)) {
            fail!(Invalid, "the queue belongs to another runtime: pass one of this runtime");
        }
        let before = self.live.fetch_add(n, Ordering::AcqRel);
        if before.saturating_add(n) > self.max_ops {
            self.live.fetch_sub(n, Ordering::AcqRel);
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Status::Again.into());
        }
        if let Some(queue) = &opts.queue
            && let Err(error) = queue.reserve(n * opts.entries())
        {
            self.live.fetch_sub(n, Ordering::AcqRel);
            return Err(error);
        }
        Ok(())
    }

    /// Undoes [`Core::admit`] for `n` ops that were not created.
    fn unreserve_ops(&self, n: u32, opts: &OpOpts) {
        self.open_less(n);
        self.live.fetch_sub(n, Ordering::AcqRel);
        if let Some(queue) = &opts.queue {
            queue.unreserve(n * opts.entries());
        }
    }

    fn start(&self, ops: &[OpRef], opts: &OpOpts) {
        if opts.deadline_ns != 0 {
            ops.iter().for_each(|op| self.notifier.watch(opts.deadline_ns, op.key()));
        }
        // A close that began meanwhile may have cancelled ops before these existed.
        if self.is_closing() || opts.queue.as_ref().is_some_and(|queue| queue.is_closing()) {
            ops.iter().for_each(|op| op.cancel());
        }
    }

    /// A list for `n` items, recycled where possible.
    pub fn item_list(&self, n: usize) -> Result<Vec<Item>> {
        if n > MAX_ITEMS {
            fail!(Limit, "an op has at most {MAX_ITEMS} items, not {n}");
        }
        self.items.take(n)
    }

    /// Submits one op of several items to the workers.
    pub fn submit(self: &Arc<Core>, opts: &OpOpts, items: Vec<Item>, run: RunFn) -> Result<OpRef> {
        self.admit(1, opts)?;
        let op = Op::create(self, opts, Items::Many(items), Some(run), None)
            .inspect_err(|_| self.unreserve_ops(1, opts))?;
        let ops = std::slice::from_ref(&op);
        self.start(ops, opts);
        self.pool.push(opts.priority, ops);
        Ok(op)
    }

    /// Submits one op for each item, all or none. `tag_of` returns the tag of an op; `see` is
    /// called with each op before the op can complete.
    pub fn submit_each(
        self: &Arc<Core>,
        opts: &OpOpts,
        mut items: Vec<Item>,
        tag_of: impl Fn(usize) -> u64,
        run: RunFn,
        mut see: impl FnMut(usize, &OpRef),
    ) -> Result<()> {
        let n = items.len() as u32;
        let mut made = self.refs.take(items.len())?;
        self.admit(n, opts)?;
        let mut each = opts.clone();
        for (i, item) in items.drain(..).enumerate() {
            each.tag = tag_of(i);
            match Op::create(self, &each, Items::One([item]), Some(run), None) {
                Ok(op) => made.push(op),
                Err(error) => {
                    // The created ops free their reservations as they are dropped.
                    let missing = n - made.len() as u32;
                    self.unreserve_ops(missing, opts);
                    for op in made.drain(..) {
                        op.discard();
                        op.remove();
                    }
                    return Err(error);
                }
            }
        }
        made.iter().enumerate().for_each(|(i, op)| see(i, op));
        self.start(&made, opts);
        self.pool.push(opts.priority, &made);
        self.items.put_back(items);
        self.refs.put_back(made);
        Ok(())
    }

    /// Creates an op that `owner` will finish.
    pub fn promise(self: &Arc<Core>, opts: &OpOpts, owner: Arc<dyn Owner>) -> Result<OpRef> {
        self.promise_of(opts, |_| Ok(Items::None), owner)
    }

    /// Creates an op of several items that `owner` will finish, reporting a status for each.
    pub fn promise_each(
        self: &Arc<Core>,
        opts: &OpOpts,
        items: usize,
        owner: Arc<dyn Owner>,
    ) -> Result<OpRef> {
        self.promise_of(
            opts,
            |core| {
                let mut list = core.item_list(items)?;
                list.extend((0..items).map(|_| Item::new(0, None, None, 0, 0)));
                Ok(Items::Many(list))
            },
            owner,
        )
    }

    fn promise_of(
        self: &Arc<Core>,
        opts: &OpOpts,
        items: impl FnOnce(&Core) -> Result<Items>,
        owner: Arc<dyn Owner>,
    ) -> Result<OpRef> {
        self.admit(1, opts)?;
        let op = items(self)
            .and_then(|items| Op::create(self, opts, items, None, Some(owner)))
            .inspect_err(|_| self.unreserve_ops(1, opts))?;
        self.start(std::slice::from_ref(&op), opts);
        Ok(op)
    }

    /// Cancels every open op that reports to `queue`.
    pub fn cancel_ops_of(&self, queue: &Arc<Queue>) {
        ops().visit(|op| {
            if op.reports_to(queue) {
                op.cancel();
            }
        });
    }

    pub(super) fn cancel_all(&self) {
        ops().visit(|op| {
            if std::ptr::eq(Arc::as_ptr(&op.core), self) {
                op.cancel();
            }
        });
    }

    /// Counters.
    pub fn stats(&self) -> RuntimeStats {
        RuntimeStats {
            workers: self.workers,
            ops_live: self.live.load(Ordering::Acquire),
            ops_open: self.open.load(Ordering::Acquire),
            ops_submitted: self.submitted.load(Ordering::Relaxed),
            ops_queued: self.pool.depth(),
            refused: self.refused.load(Ordering::Relaxed),
            poisoned: self.is_poisoned(),
        }
    }
}

impl Core {
    pub(super) fn work(&self) {
        // Each item is guarded; this catches a defect of the library around items.
        while let Err(text) = panic::catch(|| self.pool.serve()) {
            self.poison(&text);
        }
    }
}
