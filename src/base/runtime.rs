//! The runtime: the root everything is opened on. It alone starts threads;
//! there are none before it is opened and none after it is closed.

use crate::base::callback::refuse_reentry;
use crate::base::clock::Clock;
use crate::base::fault::{Faults, Site};
use crate::base::fork;
use crate::base::item::{Item, Items, MAX_ITEMS, RunFn};
use crate::base::notifier::Notifier;
use crate::base::op::{Op, OpOpts, OpRef, Owner, ops};
use crate::base::panic;
use crate::base::queue::Queue;
use crate::base::spare::Spare;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, Weak, cores, spawn};
use crate::base::worker::Pool;
use crate::fail;

/// Most worker threads.
pub const MAX_WORKERS: u32 = 256;
/// Workers when none are asked for, on a machine with cores to spare.
pub const DEFAULT_WORKERS: u32 = 4;
/// Most ops of one runtime.
pub const MAX_OPS: u32 = 1 << 19;
/// Ops when no number is asked for.
pub const DEFAULT_OPS: u32 = 65_536;
/// Longest thread name prefix; the kernel shows 15 bytes.
pub const MAX_NAME_BYTES: usize = 10;

/// What a thread of the runtime is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// Carries out ops.
    Worker = 0,
    /// Makes callbacks and keeps deadlines.
    Notifier = 1,
}

/// Called first in every thread, so that the host can place it.
pub type OnThread = Arc<dyn Fn(Role, u32) + Send + Sync>;

/// How to open a runtime.
#[derive(Default)]
pub struct RuntimeOpts {
    /// Worker threads; 0 = as many as cores, at most [`DEFAULT_WORKERS`].
    pub workers: u32,
    /// Ops that may live at once; 0 = [`DEFAULT_OPS`].
    pub max_ops: u32,
    /// Prefix of thread names; empty = `kvt`.
    pub name: String,
    /// Planted faults.
    pub faults: Option<Faults>,
    /// Runs first in every thread.
    pub on_thread: Option<OnThread>,
    /// The clock.
    pub clock: Clock,
}

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
    /// Submissions refused because too many ops lived.
    pub refused: u64,
    /// A panic was caught.
    pub poisoned: bool,
}

/// What threads, ops and nouns share of a runtime.
pub struct Core {
    clock: Clock,
    faults: Option<Faults>,
    pool: Pool,
    notifier: Notifier,
    workers: u32,
    max_ops: u32,
    live: AtomicU32,
    open: AtomicU64,
    submitted: AtomicU64,
    refused: AtomicU64,
    closing: AtomicBool,
    poisoned: AtomicBool,
    threads_alive: AtomicU32,
    quiet: Mutex<()>,
    quieter: Condvar,
    owners: Mutex<Vec<Weak<dyn Owner>>>,
    items: Spare<Item>,
    refs: Spare<OpRef>,
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

    /// Planted faults.
    pub fn faults(&self) -> Option<&Faults> {
        self.faults.as_ref()
    }

    /// Passes a site where a fault may be planted.
    pub fn pass(&self, site: Site) -> Result<()> {
        self.faults.as_ref().map_or(Ok(()), |faults| faults.pass(site))
    }

    /// Whether the runtime refuses new work.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Whether a panic was caught.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// A panic was caught: what is queued ends with `KVT_E_PANIC`.
    pub fn poison(&self, text: &str) {
        self.poisoned.store(true, Ordering::Release);
        log::error!("caught a defect, the runtime is poisoned: {text}");
    }

    /// Fails when the runtime takes no new work.
    pub fn check_open(&self) -> Result<()> {
        if self.is_poisoned() {
            return Err(Status::Panic.into());
        }
        if self.is_closing() {
            return Err(Status::Closed.into());
        }
        Ok(())
    }

    /// Registers someone who promises ops.
    pub fn add_owner(&self, owner: Weak<dyn Owner>) {
        let mut owners = self.owners.lock();
        owners.retain(|o| o.strong_count() > 0);
        owners.push(owner);
    }

    pub(crate) fn op_opened(&self) {
        self.open.fetch_add(1, Ordering::AcqRel);
        self.submitted.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn op_released(&self) {
        if self.open.fetch_sub(1, Ordering::AcqRel) == 1 && self.is_closing() {
            self.stir();
        }
    }

    pub(crate) fn op_freed(&self, items: Items) {
        self.live.fetch_sub(1, Ordering::AcqRel);
        if let Items::Many(items) = items {
            self.items.give(items);
        }
    }

    fn stir(&self) {
        drop(self.quiet.lock()); // whoever looked before the change now waits
        self.quieter.notify_all();
    }

    /// Waits until `quiet` holds; false when the deadline came first.
    fn settle(&self, deadline_ns: u64, quiet: impl Fn() -> bool) -> bool {
        let mut guard = self.quiet.lock();
        while !quiet() {
            if deadline_ns == 0 {
                self.quieter.wait(&mut guard);
                continue;
            }
            let now = self.clock.now_ns();
            if now >= deadline_ns {
                return false;
            }
            self.quieter.wait_for(&mut guard, deadline_ns - now);
        }
        true
    }

    /// Reserves room for `n` ops that tell `queue`.
    fn admit(&self, n: u32, opts: &OpOpts) -> Result<()> {
        self.check_open()?;
        if opts.detached && opts.queue.is_none() {
            fail!(Invalid, "an op without a handle needs a queue, or nobody hears of its end");
        }
        if opts.queue.as_ref().is_some_and(|q| !std::ptr::eq(Arc::as_ptr(q.core()), self)) {
            fail!(Invalid, "the queue belongs to another runtime");
        }
        let before = self.live.fetch_add(n, Ordering::AcqRel);
        if before.saturating_add(n) > self.max_ops {
            self.live.fetch_sub(n, Ordering::AcqRel);
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Status::Again.into());
        }
        if let Some(queue) = &opts.queue {
            if let Err(error) = queue.reserve(n * opts.entries()) {
                self.live.fetch_sub(n, Ordering::AcqRel);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes back what [`Core::admit`] reserved for `n` ops that were not made.
    fn dismiss(&self, n: u32, opts: &OpOpts) {
        self.live.fetch_sub(n, Ordering::AcqRel);
        if let Some(queue) = &opts.queue {
            queue.unreserve(n * opts.entries());
        }
    }

    fn start(&self, ops: &[OpRef], opts: &OpOpts) {
        if opts.deadline_ns != 0 {
            ops.iter().for_each(|op| self.notifier.watch(opts.deadline_ns, op.key()));
        }
    }

    /// Room for `n` items, recycled where possible.
    pub fn item_list(&self, n: usize) -> Result<Vec<Item>> {
        if n > MAX_ITEMS {
            fail!(Limit, "an op has at most {MAX_ITEMS} items, not {n}");
        }
        self.items.take(n)
    }

    /// Submits one op of many items for the workers.
    pub fn submit(self: &Arc<Core>, opts: &OpOpts, items: Vec<Item>, run: RunFn) -> Result<OpRef> {
        self.admit(1, opts)?;
        let op = Op::create(self, opts, Items::Many(items), Some(run), None)
            .inspect_err(|_| self.dismiss(1, opts))?;
        let ops = std::slice::from_ref(&op);
        self.start(ops, opts);
        self.pool.push(opts.lane, ops);
        Ok(op)
    }

    /// Submits an op for each item; `tag_of` gives each its tag,
    /// `see` is shown each before it can complete. All or none.
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
                    // Made ops give their places back one by one as they are dropped.
                    let missing = n - made.len() as u32;
                    self.dismiss(missing, opts);
                    for op in made.drain(..) {
                        op.discard();
                        if let Some(queue) = &opts.queue {
                            queue.unreserve(opts.entries());
                        }
                        op.remove();
                    }
                    return Err(error);
                }
            }
        }
        made.iter().enumerate().for_each(|(i, op)| see(i, op));
        self.start(&made, opts);
        self.pool.push(opts.lane, &made);
        self.items.give(items);
        self.refs.give(made);
        Ok(())
    }

    /// Makes an op that `owner` will finish.
    pub fn promise(self: &Arc<Core>, opts: &OpOpts, owner: Arc<dyn Owner>) -> Result<OpRef> {
        self.admit(1, opts)?;
        let op = Op::create(self, opts, Items::None, None, Some(owner))
            .inspect_err(|_| self.dismiss(1, opts))?;
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

    fn cancel_all(&self) {
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

/// An open runtime.
pub struct Runtime {
    core: Arc<Core>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Runtime {
    /// Opens a runtime and starts its threads.
    pub fn open(opts: RuntimeOpts) -> Result<Runtime> {
        fork::check()?;
        fork::arm()?;
        #[cfg(not(feature = "shuttle"))]
        panic::install_hook();
        if opts.workers > MAX_WORKERS {
            fail!(Limit, "at most {MAX_WORKERS} workers, not {}", opts.workers);
        }
        if opts.max_ops > MAX_OPS {
            fail!(Limit, "at most {MAX_OPS} ops, not {}", opts.max_ops);
        }
        if opts.name.len() > MAX_NAME_BYTES || opts.name.contains('\0') {
            fail!(Invalid, "a name has at most {MAX_NAME_BYTES} bytes and no NUL");
        }
        let or = |n: u32, default: u32| if n == 0 { default } else { n };
        let workers = or(opts.workers, (cores() as u32).clamp(1, DEFAULT_WORKERS));
        let max_ops = or(opts.max_ops, DEFAULT_OPS);
        let core = Arc::new(Core {
            clock: opts.clock,
            faults: opts.faults,
            pool: Pool::new(workers, max_ops)?,
            notifier: Notifier::default(),
            workers,
            max_ops,
            live: AtomicU32::new(0),
            open: AtomicU64::new(0),
            submitted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            threads_alive: AtomicU32::new(0),
            quiet: Mutex::new(()),
            quieter: Condvar::new(),
            owners: Mutex::new(Vec::new()),
            items: Spare::default(),
            refs: Spare::default(),
        });
        let name = if opts.name.is_empty() { "kvt".to_string() } else { opts.name };
        let runtime = Runtime { core, threads: Mutex::new(Vec::new()) };
        for i in 0..workers {
            runtime.start(Role::Worker, i, format!("{name}-w{i}"), opts.on_thread.clone())?;
        }
        runtime.start(Role::Notifier, 0, format!("{name}-notify"), opts.on_thread)?;
        Ok(runtime)
    }

    /// A thread that cannot start fails the open; the drop then ends the others.
    fn start(&self, role: Role, i: u32, name: String, hook: Option<OnThread>) -> Result<()> {
        self.core.pass(Site::Thread)?;
        let core = self.core.clone();
        core.threads_alive.fetch_add(1, Ordering::AcqRel);
        let started = spawn(name, move || {
            let alive = Alive(core);
            if let Some(hook) = hook {
                hook(role, i);
            }
            let core = &alive.0;
            match role {
                Role::Worker => core.work(),
                Role::Notifier => core.notifier.serve(&core.clock, &|text| core.poison(text)),
            }
        });
        match started {
            Ok(handle) => {
                self.threads.lock().push(handle);
                Ok(())
            }
            Err(error) => {
                self.core.threads_alive.fetch_sub(1, Ordering::AcqRel);
                Err(error)
            }
        }
    }

    /// What is shared with nouns opened on this runtime.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Refuses new work, cancels what is open, waits for it and for the threads
    /// until `deadline_ns` (0 = for ever). On `KVT_E_BUSY` it can be called again.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        refuse_reentry()?;
        let core = &self.core;
        core.closing.store(true, Ordering::SeqCst);
        let owners: Vec<_> = core.owners.lock().iter().filter_map(Weak::upgrade).collect();
        owners.iter().for_each(|owner| owner.shut());
        core.cancel_all();
        if !core.settle(deadline_ns, || core.open.load(Ordering::SeqCst) == 0) {
            let text = format!("{} ops still hold memory", core.stats().ops_open);
            return Err(Error::new(Status::Busy, text));
        }
        core.pool.stop();
        core.notifier.stop();
        if !core.settle(deadline_ns, || core.threads_alive.load(Ordering::SeqCst) == 0) {
            let text = "a callback is still running on the notifier thread";
            return Err(Error::new(Status::Busy, text));
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        Ok(())
    }
}

impl Core {
    fn work(&self) {
        // Items are guarded one by one; this catches a defect of ours around them.
        while let Err(text) = panic::catch(|| self.pool.serve()) {
            self.poison(&text);
        }
    }
}

/// Tells the runtime when a thread ends.
struct Alive(Arc<Core>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.threads_alive.fetch_sub(1, Ordering::SeqCst);
        self.0.stir();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Err(error) = self.close(0) {
            log::error!("a runtime was dropped and could not be closed: {error}");
        }
    }
}
