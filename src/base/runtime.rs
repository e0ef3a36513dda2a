//! The runtime: the root everything is opened on. It alone starts threads;
//! there are none before it is opened and none after it is closed.

use crate::base::callback::refuse_reentry;
use crate::base::clock::Clock;
use crate::base::core::Core;
use crate::base::fault::{Faults, Site};
use crate::base::fork;
use crate::base::notifier::Notifier;
use crate::base::spare::Spare;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, cores, spawn};
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
    /// One of a store's: copies, reads, writes.
    Store = 2,
    /// One of a streamer's.
    Streamer = 3,
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
            alive: [const { AtomicU32::new(0) }; 2],
            on_thread: Mutex::new(opts.on_thread),
            quiet: Mutex::new(()),
            quieter: Condvar::new(),
            owners: Mutex::new(Vec::new()),
            items: Spare::default(),
            refs: Spare::default(),
        });
        let name = if opts.name.is_empty() { "kvt".to_string() } else { opts.name };
        let runtime = Runtime { core, threads: Mutex::new(Vec::new()) };
        for i in 0..workers {
            runtime.start(Role::Worker, i, format!("{name}-w{i}"))?;
        }
        runtime.start(Role::Notifier, 0, format!("{name}-notify"))?;
        Ok(runtime)
    }

    /// A thread that cannot start fails the open; the drop then ends the others.
    fn start(&self, role: Role, i: u32, name: String) -> Result<()> {
        self.core.pass(Site::Thread)?;
        let core = self.core.clone();
        core.alive[role as usize].fetch_add(1, Ordering::SeqCst);
        let started = spawn(name, move || {
            let alive = Alive(core, role);
            let core = &alive.0;
            core.greet(role, i);
            match role {
                Role::Notifier => core.notifier.serve(&core.clock, &|text| core.poison(text)),
                _ => core.work(),
            }
        });
        match started {
            Ok(handle) => {
                self.threads.lock().push(handle);
                Ok(())
            }
            Err(error) => {
                self.core.alive[role as usize].fetch_sub(1, Ordering::SeqCst);
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
        self.end(deadline_ns)
    }

    fn end(&self, deadline_ns: u64) -> Result<()> {
        let core = &self.core;
        core.closing.store(true, Ordering::SeqCst);
        core.shut_owners(Status::Cancelled);
        core.cancel_all();
        if !core.settle(deadline_ns, || core.open.load(Ordering::SeqCst) == 0) {
            let text = format!("{} ops still hold memory", core.stats().ops_open);
            return Err(Error::new(Status::Busy, text));
        }
        // Workers first: the last of them may still post what the notifier calls back.
        let gone = |role: Role| core.alive[role as usize].load(Ordering::SeqCst) == 0;
        core.pool.stop();
        if !core.settle(deadline_ns, || gone(Role::Worker)) {
            return Err(Error::new(Status::Busy, "a worker has not ended yet"));
        }
        core.notifier.stop();
        if !core.settle(deadline_ns, || gone(Role::Notifier)) {
            let text = "a callback is still running on the notifier thread";
            return Err(Error::new(Status::Busy, text));
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let hook = core.on_thread.lock().take();
        drop(hook); // the host is called back, with no lock held
        Ok(())
    }
}

/// Tells the runtime when a thread ends.
struct Alive(Arc<Core>, Role);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive[self.1 as usize].fetch_sub(1, Ordering::SeqCst);
        self.0.stir();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Also where a callback opens a runtime and fails half-way: the threads that
        // end here are the new ones, not the one the callback runs on.
        if let Err(error) = self.end(0) {
            log::error!("a runtime was dropped and could not be closed: {error}");
        }
    }
}
