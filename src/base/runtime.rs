//! The runtime: the root object. It starts threads when it is opened and joins all of them when
//! it is closed.

use crate::base::callback::refuse_reentry;
use crate::base::clock::Clock;
use crate::base::core::Core;
use crate::base::fault::{Faults, Site};
use crate::base::fork;
use crate::base::list_pool::ListPool;
use crate::base::notifier::Notifier;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, cores, spawn};
use crate::base::worker::Pool;
use crate::fail;

/// Most worker threads.
pub const MAX_WORKERS: u32 = 256;
/// Default number of workers; fewer on a machine with fewer cores.
pub const DEFAULT_WORKERS: u32 = 4;
/// Most live ops of one runtime.
pub const MAX_OPS: u32 = 1 << 19;
/// Default limit of live ops.
pub const DEFAULT_OPS: u32 = 65_536;
/// Longest thread name prefix; the kernel shows 15 bytes.
pub const MAX_NAME_BYTES: usize = 10;

/// The purpose of a thread of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// Executes ops.
    Worker = 0,
    /// Calls callbacks and watches deadlines.
    Notifier = 1,
    /// Copies, reads or writes for a store.
    Store = 2,
    /// Reads or copies for a streamer.
    Streamer = 3,
}

/// Called first in every thread, so that the host can set its affinity.
pub type OnThread = Arc<dyn Fn(Role, u32) + Send + Sync>;

/// Options of a runtime.
#[derive(Default)]
pub struct RuntimeOpts {
    /// Worker threads; 0 = the number of cores, at most [`DEFAULT_WORKERS`].
    pub workers: u32,
    /// Most live ops; 0 = [`DEFAULT_OPS`].
    pub max_ops: u32,
    /// Prefix of thread names; empty = `kvt`.
    pub name: String,
    /// Faults to inject.
    pub faults: Option<Faults>,
    /// Called first in every thread.
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
            fail!(Limit, "a runtime has at most {MAX_WORKERS} workers, not {}", opts.workers);
        }
        if opts.max_ops > MAX_OPS {
            fail!(Limit, "a runtime has at most {MAX_OPS} ops, not {}", opts.max_ops);
        }
        if opts.name.len() > MAX_NAME_BYTES || opts.name.contains('\0') {
            fail!(
                Invalid,
                "a runtime's name has at most {MAX_NAME_BYTES} bytes and no NUL, not {:?}",
                opts.name
            );
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
            close_wait: Mutex::new(()),
            close_progress: Condvar::new(),
            owners: Mutex::new(Vec::new()),
            items: ListPool::default(),
            refs: ListPool::default(),
        });
        let name = if opts.name.is_empty() { "kvt".to_string() } else { opts.name };
        let runtime = Runtime { core, threads: Mutex::new(Vec::new()) };
        for i in 0..workers {
            runtime.start(Role::Worker, i, format!("{name}-w{i}"))?;
        }
        runtime.start(Role::Notifier, 0, format!("{name}-notify"))?;
        Ok(runtime)
    }

    /// Starts a thread. If that fails, the open fails and the drop ends the other threads.
    fn start(&self, role: Role, i: u32, name: String) -> Result<()> {
        self.core.pass(Site::Thread)?;
        let core = self.core.clone();
        core.alive[role as usize].fetch_add(1, Ordering::SeqCst);
        let started = spawn(name, move || {
            let alive = Alive(core, role);
            let core = &alive.0;
            core.thread_started(role, i);
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

    /// The state shared with objects that are opened on this runtime.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Refuses new work, cancels open ops, and waits for them and for the threads until
    /// `deadline_ns`; 0 = no deadline. After `KVT_E_BUSY` it can be called again.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        refuse_reentry()?;
        self.end(deadline_ns)
    }

    fn end(&self, deadline_ns: u64) -> Result<()> {
        let core = &self.core;
        core.closing.store(true, Ordering::SeqCst);
        core.shut_owners(Status::Cancelled);
        core.cancel_all();
        if !core.wait_until(deadline_ns, || core.open.load(Ordering::SeqCst) == 0) {
            let text = format!("{} ops are not released yet", core.stats().ops_open);
            return Err(Error::new(Status::Busy, text));
        }
        // Workers first: they may still post completions that the notifier delivers.
        let has_ended = |role: Role| core.alive[role as usize].load(Ordering::SeqCst) == 0;
        core.pool.stop();
        if !core.wait_until(deadline_ns, || has_ended(Role::Worker)) {
            return Err(Error::new(Status::Busy, "a worker thread has not ended yet"));
        }
        core.notifier.stop();
        if !core.wait_until(deadline_ns, || has_ended(Role::Notifier)) {
            let text = "a callback is still running on the notifier thread";
            return Err(Error::new(Status::Busy, text));
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let hook = core.on_thread.lock().take();
        drop(hook); // with no lock held: the host's destroy function is called
        Ok(())
    }
}

/// Counts a running thread; its drop wakes a close.
struct Alive(Arc<Core>, Role);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive[self.1 as usize].fetch_sub(1, Ordering::SeqCst);
        self.0.wake_close();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Its threads did not survive the fork.
        if fork::check().is_err() {
            return;
        }
        // No re-entry check: a callback may open a runtime and fail half-way. The threads that
        // end here are then the new ones, not the one that runs the callback.
        if let Err(error) = self.end(0) {
            log::error!("cannot close a runtime that was dropped: {error}");
        }
    }
}
