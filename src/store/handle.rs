//! An open store: the state machine behind one lock, worker threads that execute its work, and ops
//! that notify callers of completion.

use crate::base::account::Account;
use crate::base::budget::Budget;
use crate::base::core::Core as RuntimeCore;
use crate::base::op::Owner;
use crate::base::op::{Op, OpRef, RELEASED};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, Weak};
use crate::device::Device;
use crate::device::host::Host;
use crate::io::real::RealFiles;
use crate::io::socket::{Listener, Waker};
use crate::store::executor::Tools;
use crate::store::executor::remote::RemoteExecutor;
use crate::store::handle::watch::Watches;
use crate::store::spec::{DiskSpec, StoreSpec};
use crate::store::state::disk_gc::{CheckpointWriter, Page};
use crate::store::state::work::{KINDS, WorkerKind};
use crate::store::state::{Adopted, Config, Finished, StoreState};
use crate::tier::disk::{CellAt, CellIndex, DiskTier, OpenReport, Options, Recovered, Spot};
use crate::tier::remote::Server;

mod close;
mod submit;
mod watch;
mod workers;

/// State behind the lock.
struct Guarded {
    core: StoreState,
    /// Ops of each transfer, by its number.
    ops: Vec<Vec<OpRef>>,
    /// Ops that wait for events.
    watches: Watches,
    /// The publisher sleeps, and has published the events before this one.
    published_until: u64,
    /// Sleeping workers of each kind.
    sleeping: [u32; KINDS],
    /// A sleeping worker of this kind has a timer.
    has_alarm: [bool; KINDS],
    /// The thread for copies that depend on device events sleeps.
    event_thread_sleeps: bool,
    /// The store is closing: new transfers are refused.
    closing: bool,
    /// Steps of the final write-back that have begun. A repeated close continues from there.
    close_step: usize,
    stop: bool,
    /// A worker has panicked: new transfers are refused.
    broken: bool,
}

/// Shared by all threads.
struct Inner {
    runtime: Arc<RuntimeCore>,
    state: Mutex<Guarded>,
    /// Wakes workers of a kind.
    work: [Condvar; KINDS],
    /// Wakes the thread for copies that depend on device events.
    events_pending: Condvar,
    /// Wakes the publisher of events.
    feed: Condvar,
    /// Signals that something has ended.
    ended: Condvar,
    tools: Mutex<Tools>,
    /// Stops the thread of the control socket, if there is one.
    waker: Option<Waker>,
    this: Weak<Inner>,
}

/// An open store.
pub struct Store {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    account: Option<Arc<Account>>,
    /// Held during an audit of the device tier; closing waits for it.
    auditing: Mutex<()>,
    /// The store has a device, so transfers may name its events.
    has_device: bool,
    /// What was found at opening.
    pub opened: Opened,
    /// The remote server at opening, if there is a remote that answered.
    pub server: Option<Server>,
}

/// What was found at opening.
#[derive(Clone, Copy, Debug, Default)]
pub struct Opened {
    /// On disk.
    pub disk: Option<OpenReport>,
    /// The part of it that is usable.
    pub adopted: Adopted,
}

impl Store {
    /// Opens a store with its disk, if it has one, and starts its workers.
    pub fn open(
        runtime: &Arc<RuntimeCore>,
        budget: Option<&Arc<Budget>>,
        spec: &StoreSpec,
    ) -> Result<Store> {
        let mut store = Store::open_with(runtime, budget, spec, Arc::new(Host::default()))?;
        store.has_device = false;
        Ok(store)
    }

    /// The same, with a device for copies.
    pub fn open_with(
        runtime: &Arc<RuntimeCore>,
        budget: Option<&Arc<Budget>>,
        spec: &StoreSpec,
        device: Arc<dyn Device>,
    ) -> Result<Store> {
        let slot: Arc<Mutex<Weak<Inner>>> = Arc::new(Mutex::new(Weak::new()));
        // A store without a budget still takes no more than the machine or cgroup can give.
        let budget = match budget {
            Some(budget) => budget.clone(),
            None => Budget::of_machine(runtime, spec.config.host_bytes)?,
        };
        let account = Some(budget.account("store", 0, Some(close::reclaimer(&slot)))?);
        let store = Store::open_on(runtime, account.clone(), &slot, spec, device);
        if let (Err(_), Some(account)) = (&store, account)
            && let Err(error) = account.close()
        {
            log::warn!("the account of a store that failed to open stays open: {error}");
        }
        store
    }

    /// Opens a store on an account.
    fn open_on(
        runtime: &Arc<RuntimeCore>,
        account: Option<Arc<Account>>,
        slot: &Mutex<Weak<Inner>>,
        spec: &StoreSpec,
        device: Arc<dyn Device>,
    ) -> Result<Store> {
        // The socket is bound before the disk is opened: a path in use must fail before a long recovery.
        let listener = spec.control.as_deref().map(Listener::bind).transpose()?;
        let waker = listener.as_ref().map(|_| Waker::new()).transpose()?;
        let found = match &spec.disk {
            Some(disk) => Some(open_disk(runtime, account.clone(), disk)?),
            None => None,
        };
        let is_new = |(_, _, report): &&Found| report.is_new;
        let made = found.as_ref().filter(is_new).map(|(disk, ..)| disk.clone());
        let opened =
            Store::open_over(runtime, account, slot, spec, device, (listener, waker), found);
        if let (Err(_), Some(disk)) = (&opened, made) {
            disk.undo_open();
        }
        opened
    }

    /// Opens a store on an opened disk.
    fn open_over(
        runtime: &Arc<RuntimeCore>,
        account: Option<Arc<Account>>,
        slot: &Mutex<Weak<Inner>>,
        spec: &StoreSpec,
        device: Arc<dyn Device>,
        (listener, waker): (Option<Listener>, Option<Waker>),
        found: Option<Found>,
    ) -> Result<Store> {
        let (disk, recovered, report) = match found {
            Some((disk, recovered, report)) => (Some(disk), Some(recovered), Some(report)),
            None => (None, None, None),
        };
        let (config, remote, server) = open_remote(runtime, spec)?;
        let mut core = StoreState::new(config, account.clone(), disk.clone())?;
        core.tick(runtime.clock().now_ns());
        core.begin_device(&device)?;
        let adopted = match &recovered {
            Some(recovered) => core.adopt(recovered)?,
            None => Adopted::default(),
        };
        let state = Guarded {
            core,
            ops: Vec::new(),
            watches: Watches::default(),
            published_until: u64::MAX,
            sleeping: [0; KINDS],
            has_alarm: [false; KINDS],
            event_thread_sleeps: false,
            closing: false,
            close_step: 0,
            stop: false,
            broken: false,
        };
        let inner = Arc::new_cyclic(|this| Inner {
            runtime: runtime.clone(),
            state: Mutex::new(state),
            work: std::array::from_fn(|_| Condvar::new()),
            events_pending: Condvar::new(),
            feed: Condvar::new(),
            ended: Condvar::new(),
            tools: Mutex::new(Tools { device, disk, remote }),
            waker,
            this: this.clone(),
        });
        *slot.lock() = Arc::downgrade(&inner);
        runtime.add_owner(inner.this.clone());
        let threads = workers::start(&inner, spec, listener).inspect_err(|_| inner.stop())?;
        let threads = Mutex::new(threads);
        let opened = Opened { disk: report, adopted };
        let auditing = Mutex::new(());
        Ok(Store { inner, threads, account, auditing, has_device: true, opened, server })
    }

    /// Whether its device has memory that the processor cannot reach.
    pub fn reaches_device(&self) -> bool {
        self.inner.tools.lock().device.facts().reaches_device
    }

    /// Runs `act` on the state. Whatever it makes possible without a worker is done when this
    /// returns.
    pub fn with<R>(&self, act: impl FnOnce(&mut StoreState) -> Result<R>) -> Result<R> {
        self.inner.runtime.check_open()?;
        let mut state = self.inner.state.lock();
        state.check_open()?;
        state.core.tick(self.inner.runtime.clock().now_ns());
        let result = act(&mut state.core);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }

    /// The account that is charged for its memory.
    pub fn account(&self) -> Option<&Arc<Account>> {
        self.account.as_ref()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.inner.cancel_all(Status::Closed);
        if let Err(error) = self.settle(0) {
            log::error!("a store was dropped with work in flight: {error}");
        }
        self.inner.stop();
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a worker thread of the store panicked");
            }
        }
    }
}

impl Guarded {
    fn check_open(&self) -> Result<()> {
        match (self.broken, self.closing || self.stop) {
            (true, _) => Err(Status::Panic.into()),
            (_, true) => Err(Status::Closed.into()),
            _ => Ok(()),
        }
    }

    /// Ops of the completions since the last call.
    fn ended(&mut self) -> Completions {
        let mut finished = Vec::new();
        self.core.finished(&mut finished);
        let mut completions = Vec::with_capacity(finished.len());
        for one in finished {
            let Some(ops) = self.ops.get_mut(one.number as usize) else { continue };
            let (last, op) = (one.last, ops.get(one.part as usize));
            if let Some(op) = op.cloned() {
                completions.push((op, one));
            }
            if last {
                ops.clear();
            }
        }
        completions
    }
}

/// Ops with their outcome.
type Completions = Vec<(OpRef, Finished)>;

impl Inner {
    /// After any change of the state: wakes workers that have work, and collects completions, which
    /// are reported after the lock is released.
    fn collect_completions(&self, state: &mut Guarded) -> Completions {
        for workers in WorkerKind::ALL {
            let at = workers as usize;
            let is_urgent = workers == WorkerKind::Lookup && state.core.is_lookup_urgent();
            // A worker that sleeps without a timer must learn that there is a deadline now.
            let is_timed = !state.has_alarm[at] && workers::due_ns(&state.core, workers).is_some();
            let is_wanted = || is_timed || state.core.has_work(workers);
            if is_urgent || state.sleeping[at] > 0 && is_wanted() {
                self.work[at].notify_one();
            }
        }
        if state.event_thread_sleeps && state.core.has_events_ahead() {
            self.events_pending.notify_one();
        }
        if state.published_until < state.core.events.next_number() {
            self.feed.notify_one();
        }
        let mut completions = state.ended();
        state.watches.notify(state.core.events.next_number(), &mut completions);
        if !completions.is_empty() || state.core.is_idle() || state.core.has_durability_news() {
            self.ended.notify_all();
        }
        completions
    }

    /// Cancels a transfer whose ops were all cancelled. The number may be another transfer's by
    /// now; then that transfer's ops are checked.
    fn cancel_if_abandoned(&self, state: &mut Guarded, number: u32) {
        if let Some(status) = state.ops.get(number as usize).and_then(|ops| abandoned_status(ops)) {
            state.core.cancel(number, status);
        }
    }

    fn cancel_all(&self, status: Status) {
        let mut state = self.state.lock();
        let open: Vec<u32> = (0..state.ops.len() as u32)
            .filter(|&number| !state.ops[number as usize].is_empty())
            .collect();
        for number in open {
            state.core.cancel(number, status);
        }
        state.core.cancel_prefetch(None);
        let mut completions = self.collect_completions(&mut state);
        state.watches.end_all(status, &mut completions);
        drop(state);
        finish(completions);
    }

    fn stop(&self) {
        self.state.lock().stop = true;
        self.work.iter().for_each(|work| work.notify_all());
        self.events_pending.notify_all();
        self.feed.notify_all();
        self.waker.iter().for_each(Waker::wake);
    }
}

/// Status of a transfer whose open ops were all cancelled; `None` if one is still wanted.
fn abandoned_status(ops: &[OpRef]) -> Option<Status> {
    let open = ops.iter().filter(|op| op.state() & RELEASED == 0);
    open.map(|op| op.abandon_status()).reduce(|a, b| match (a?, b?) {
        (Status::Cancelled, _) | (_, Status::Cancelled) => Some(Status::Cancelled),
        (status, _) => Some(status),
    })?
}

impl Owner for Inner {
    fn abandoned(&self, op: &Op) {
        let mut state = self.state.lock();
        // An op without a number yet is checked when it gets one.
        let Some(number) = op.owner_slot() else { return };
        let mut completions = Completions::new();
        match Watches::has(number) {
            true => state.watches.cancel_if_abandoned(number, &mut completions),
            false => self.cancel_if_abandoned(&mut state, number),
        }
        completions.extend(self.collect_completions(&mut state));
        drop(state);
        finish(completions);
    }

    fn shut(&self, status: Status) {
        self.cancel_all(status);
    }

    fn serve(&self) {}
}

impl CheckpointWriter for &Inner {
    fn page(&mut self, from: (u32, u32), page: &mut Page) -> Option<(u32, u32)> {
        self.state.lock().core.page(from, page)
    }
}

impl CellIndex for &Inner {
    fn is_live(&mut self, cell: &CellAt) -> bool {
        self.state.lock().core.is_live(cell)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        self.state.lock().core.moved(cell, to)
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        self.state.lock().core.lost(cell)
    }
}

/// Reports completions to callers, without the lock.
fn finish(completions: Completions) {
    for (op, one) in completions {
        op.report(one.tokens, one.bytes);
        op.report_items(&one.outcomes);
        let status = one.error.as_ref().map_or(Status::Ok, Error::status);
        op.finish(status, one.error, None);
    }
}

/// Opens the remote of a store and completes its configuration.
fn open_remote(
    runtime: &Arc<RuntimeCore>,
    spec: &StoreSpec,
) -> Result<(Config, Option<RemoteExecutor>, Option<Server>)> {
    let mut config = spec.config.clone();
    let Some(remote) = &spec.remote else { return Ok((config, None, None)) };
    let custom = spec.custom_remote.as_ref();
    let (remote, remote_config, server) = remote.open(&spec.secrets, custom, runtime.clock())?;
    config.remote = Some(remote_config);
    Ok((config, Some(RemoteExecutor::new(remote, runtime.clock().clone())), server))
}

/// A disk tier with what was recovered from it.
type Found = (Arc<DiskTier>, Recovered, OpenReport);

fn open_disk(
    runtime: &Arc<RuntimeCore>,
    account: Option<Arc<Account>>,
    spec: &DiskSpec,
) -> Result<Found> {
    let files = RealFiles::open(&spec.path, &spec.files)
        .map_err(|e| e.within(&format!("disk tier {}", spec.path.display())))?;
    let options = Options {
        segment_bytes: spec.segment_bytes,
        account,
        clock: runtime.clock().clone(),
        ..Options::new(spec.bytes, crate::base::machine::random_bytes()?)
    };
    DiskTier::open(Arc::new(files), options)
        .map(|(disk, recovered, report)| (Arc::new(disk), recovered, report))
        .map_err(|e| e.within(&format!("disk tier {}", spec.path.display())))
}
