//! An open store: the state machine behind one lock, worker threads that execute its work, and ops
//! that notify callers of completion.

mod watch;
mod workers;

use crate::base::account::Account;
use crate::base::budget::{Budget, Reclaim, Tier};
use crate::base::core::Core as RuntimeCore;
use crate::base::op::{Op, OpOpts, OpRef, Owner, RELEASED};
use crate::base::panic;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex, Weak};
use crate::device::host::Host;
use crate::device::{Device, Event, State};
use crate::fail;
use crate::format::keys::Key;
use crate::io::real::RealFiles;
use crate::io::socket::{Listener, Waker};
use crate::store::executor::Tools;
use crate::store::executor::device_batches::{EventCopies, StateAccess};
use crate::store::executor::remote::RemoteExecutor;
use crate::store::handle::watch::Watches;
use crate::store::ready_event::{EventState, Listener as EventListener, Ready};
use crate::store::spec::{DiskSpec, StoreSpec};
use crate::store::state::blocks::BlockTransfer;
use crate::store::state::disk_gc::{CheckpointWriter, Cleared, Clearing, Page};
use crate::store::state::transfer::Level;
use crate::store::state::work::{KINDS, WorkerKind};
use crate::store::state::{Adopted, CellRange, Config, Finished, StoreState, TransferKind};
use crate::tier::disk::{CellAt, CellIndex, DiskTier, OpenReport, Options, Recovered, Spot};
use crate::tier::remote::Server;

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
        let account = Some(budget.account("store", 0, Some(reclaimer(&slot)))?);
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

// ---------- submission
//
// Submitting transfers: reserve the ops, then hand the transfer to the state machine. A transfer
// with a ready event or a device event waits for it without a thread.

/// Ops of a transfer.
enum Ops {
    /// One, or one for each layer.
    Each(usize),
    /// One with so many items.
    Items(usize),
}

impl Store {
    /// Begins a put, get or prefetch of a cell range: one op, or one for each layer with
    /// consecutive tags.
    pub fn submit(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        cell_range: CellRange,
        opts: &OpOpts,
    ) -> Result<Vec<OpRef>> {
        self.submit_after(session, kind, level, cell_range, opts, None)
    }

    /// The same; with a ready event nothing begins before that is signalled.
    pub fn submit_after(
        &self,
        session: u32,
        kind: TransferKind,
        level: Level,
        mut cell_range: CellRange,
        opts: &OpOpts,
        ready: Option<&Ready>,
    ) -> Result<Vec<OpRef>> {
        cell_range.after = self.check_after(kind, cell_range.after)?;
        let ops = Ops::Each(if cell_range.by_layer { cell_range.layers } else { 1 });
        let lane = opts.priority;
        self.begin(ops, opts, ready, |core| match ready {
            Some(_) => core.submit_waiting(session, kind, level, lane, cell_range),
            None => {
                let number = core.submit_cell_range(session, kind, level, lane, cell_range)?;
                Ok((number, 0))
            }
        })
    }

    /// Begins a remote lookup of a session: one op, whose result is the number of tokens the
    /// session can continue from, here or at the remote.
    pub fn locate(&self, session: u32, opts: &OpOpts) -> Result<OpRef> {
        let ops = self.begin(Ops::Each(1), opts, None, |core| Ok((core.locate(session)?, 0)))?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Begins a remote lookup of blocks: one op with an item for each block.
    pub fn locate_blocks(&self, session: u32, keys: Vec<Key>, opts: &OpOpts) -> Result<OpRef> {
        let ops = Ops::Items(keys.len());
        let submit = |core: &mut StoreState| Ok((core.locate_blocks(session, keys)?, 0));
        let ops = self.begin(ops, opts, None, submit)?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Begins a put, get or prefetch of blocks: one op with an item for each block.
    pub fn submit_blocks(
        &self,
        session: u32,
        (kind, level): (TransferKind, Level),
        mut blocks: BlockTransfer,
        opts: &OpOpts,
        ready: Option<&Ready>,
    ) -> Result<Vec<OpRef>> {
        blocks.after = self.check_after(kind, blocks.after)?;
        let (ops, how) = (Ops::Items(blocks.keys.len()), (kind, level, opts.priority));
        self.begin(ops, opts, ready, |core| match ready {
            Some(_) => core.submit_blocks_waiting(session, how, blocks),
            None => Ok((core.submit_blocks(session, how, blocks)?, 0)),
        })
    }

    /// Begins a transfer. `submit` returns its number, and the ticket if it waits.
    fn begin(
        &self,
        ops: Ops,
        opts: &OpOpts,
        ready: Option<&Ready>,
        submit: impl FnOnce(&mut StoreState) -> Result<(u32, u64)>,
    ) -> Result<Vec<OpRef>> {
        ready.map_or(Ok(()), Ready::check_room)?;
        let ops = self.promise_ops(ops, opts)?;
        // A passed deadline, or a concurrent close, may have ended some ops.
        let begun: Vec<bool> = ops.iter().map(|op| op.begin()).collect();
        if begun.contains(&false) {
            let rest = ops.iter().zip(&begun).filter(|(_, begun)| **begun);
            let late = opts.deadline_ns != 0 && !self.inner.runtime.is_closing();
            let status = if late { Status::Timeout } else { Status::Cancelled };
            rest.for_each(|(op, _)| op.finish(status, None, None));
            return Ok(ops);
        }
        let retained = ops.clone();
        let mut state = self.inner.state.lock();
        if let Err(error) = state.check_open() {
            drop(state);
            return Err(undo(ops, error));
        }
        state.core.tick(self.inner.runtime.clock().now_ns());
        // Completed transfers have freed their numbers. Their ops must be collected before a number
        // is reused.
        let mut completions = state.ended();
        if !completions.is_empty() {
            self.inner.ended.notify_all();
        }
        match submit(&mut state.core) {
            Ok((number, ticket)) => {
                // A cancel from here on finds the transfer once it has the lock.
                retained.iter().for_each(|op| op.set_owner_slot(number));
                let number = number as usize;
                if state.ops.len() <= number {
                    state.ops.resize_with(number + 1, Vec::new);
                }
                debug_assert!(state.ops[number].is_empty(), "a number that is in use");
                state.ops[number] = retained;
                // A cancel or deadline before this found no transfer.
                if let Some(status) = abandoned_status(&ops) {
                    state.core.cancel(number as u32, status);
                }
                completions.extend(self.inner.collect_completions(&mut state));
                drop(state);
                ops.iter().for_each(|op| op.notify_issued());
                finish(completions);
                if let Some(ready) = ready {
                    ready.join(self.inner.this.clone(), ticket);
                }
                Ok(ops)
            }
            Err(error) => {
                // The clock has advanced, which may have created work.
                completions.extend(self.inner.collect_completions(&mut state));
                drop(state);
                finish(completions);
                Err(undo(ops, error))
            }
        }
    }

    /// Ops of a transfer, with consecutive tags.
    fn promise_ops(&self, ops: Ops, opts: &OpOpts) -> Result<Vec<OpRef>> {
        let (runtime, owner) = (&self.inner.runtime, self.inner.clone());
        let count = match ops {
            Ops::Items(items) => return Ok(vec![runtime.promise_each(opts, items, owner)?]),
            Ops::Each(count) => count,
        };
        let mut ops: Vec<OpRef> = Vec::new();
        ops.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for layer in 0..count as u64 {
            let opts = OpOpts { tag: opts.tag.wrapping_add(layer), ..opts.clone() };
            match runtime.promise(&opts, owner.clone()) {
                Ok(op) => ops.push(op),
                Err(error) => {
                    for op in ops {
                        op.discard();
                        op.remove();
                    }
                    return Err(error);
                }
            }
        }
        Ok(ops)
    }
}

/// Abandons ops of a refused call. They are never reported.
pub(super) fn undo(ops: Vec<OpRef>, error: Error) -> Error {
    for op in ops {
        op.retract();
        op.remove();
    }
    error
}

// ---------- ready transfers
//
// Transfers that wait for a ready event of the engine.

impl EventListener for Inner {
    fn signalled(&self, ticket: u64, word: EventState) {
        let mut state = self.state.lock();
        if state.stop || state.broken {
            return;
        }
        state.core.tick(self.runtime.clock().now_ns());
        match word {
            EventState::Signalled => state.core.begin_waiting(ticket),
            EventState::Cancelled => state.core.give_up_waiting(ticket, Status::Cancelled),
        }
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }

    fn waits(&self, ticket: u64) -> bool {
        self.state.lock().core.is_waiting(ticket)
    }
}

// ---------- device events
//
// The thread that polls copies that depend on device events.

/// Interval at which device events are polled while nothing happens.
const EVENT_POLL_NS: u64 = 250_000;

impl StateAccess for &Inner {
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState)) {
        let mut state = self.state.lock();
        state.core.tick(self.runtime.clock().now_ns());
        act(&mut state.core);
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
    }
}

impl Inner {
    /// Main function of the thread for copies that depend on device events.
    pub(super) fn serve_event_copies(&self, tools: Tools) {
        let mut event_copies = EventCopies::new(tools);
        while self.wait_for_events(&event_copies) {
            // SAFETY: the core hears of the end of what is begun from here; views are of memory
            // that the caller promised to keep until the op is released, which follows that.
            let did = panic::catch(|| unsafe { event_copies.advance(&mut &*self) });
            match did {
                Ok(true) => {}
                Ok(false) => self.rest_event_copies(&event_copies),
                Err(text) => {
                    self.runtime.poison(&text);
                    self.state.lock().broken = true;
                    self.abort_all();
                }
            }
        }
    }

    /// Sleeps until there are events to poll. Returns false when there never will be.
    fn wait_for_events(&self, event_copies: &EventCopies) -> bool {
        let mut state = self.state.lock();
        while !state.broken && event_copies.is_idle() && !state.core.has_events_ahead() {
            if state.stop {
                return false;
            }
            state.event_thread_sleeps = true;
            self.events_pending.wait(&mut state);
            state.event_thread_sleeps = false;
        }
        !state.broken
    }

    fn rest_event_copies(&self, event_copies: &EventCopies) {
        let until_ns = self.runtime.clock().now_ns().saturating_add(EVENT_POLL_NS);
        match event_copies.is_idle() {
            false => event_copies.rest(until_ns),
            true => {
                let mut state = self.state.lock();
                if !state.stop {
                    self.events_pending.wait_for(&mut state, EVENT_POLL_NS);
                }
            }
        }
    }
}

impl Store {
    /// The device event of a transfer, or none if it has completed. Reports invalid events where
    /// they can be recognised.
    pub(super) fn check_after(
        &self,
        kind: TransferKind,
        after: Option<Event>,
    ) -> Result<Option<Event>> {
        let Some(event) = after else { return Ok(None) };
        if !self.has_device {
            fail!(
                Unavailable,
                "the store was opened without a device, and knows no event {:#x}: wait for it, or \
                 name a ready event",
                event.0
            );
        }
        if kind == TransferKind::Prefetch {
            fail!(Invalid, "a prefetch has no tensors, so it takes no device event");
        }
        let device = self.inner.tools.lock().device.clone();
        match device.state(event) {
            Ok(State::Done) => Ok(None),
            Err(error) if error.status() == Status::Handle => Err(error.within("after")),
            _ => Ok(Some(event)),
        }
    }
}

// ---------- closing
//
// Closing a store, clearing a namespace, and reclaiming memory for other owners of the budget.
// Each call remembers its progress, so that it may be repeated with any deadline.

impl Store {
    /// Reads the state; also while the store closes, not after.
    pub fn inspect<R>(&self, read: impl FnOnce(&StoreState) -> R) -> Result<R> {
        let state = self.inner.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        Ok(read(&state.core))
    }

    /// Ends what a handle stood for; also while the store or its runtime closes. Does nothing for a
    /// closed store.
    pub fn release_with(&self, end: impl FnOnce(&mut StoreState) -> Result<()>) -> Result<()> {
        let mut state = self.inner.state.lock();
        if state.stop || state.broken {
            return Ok(());
        }
        state.core.tick(self.inner.runtime.clock().now_ns());
        let result = end(&mut state.core);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }

    /// Waits until nothing is in flight, or for a deadline (0 = none).
    pub fn settle(&self, deadline_ns: u64) -> Result<()> {
        self.wait_until(deadline_ns, StoreState::is_idle)
    }

    fn wait_until(&self, deadline_ns: u64, holds: impl Fn(&StoreState) -> bool) -> Result<()> {
        let mut state = self.inner.state.lock();
        while !holds(&state.core) {
            if state.broken {
                return Err(Status::Panic.into());
            }
            let now = self.inner.runtime.clock().now_ns();
            match deadline_ns {
                0 => self.inner.ended.wait(&mut state),
                deadline if now >= deadline => {
                    fail!(
                        Busy,
                        "transfers of the store are in flight: call again, it continues from there"
                    )
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now),
            }
        }
        Ok(())
    }

    /// The disk tier, until the store is closed.
    pub fn disk(&self) -> Option<Arc<DiskTier>> {
        self.inner.tools.lock().disk.clone()
    }

    /// Cancels open transfers, waits until nothing is in flight or for a deadline (0 = none). Then
    /// BUSY: the store still exists and refuses new work.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.state.lock().closing = true;
        self.inner.cancel_all(Status::Cancelled);
        match self.settle(deadline_ns).and_then(|()| self.write_back_and_checkpoint(deadline_ns)) {
            // After a panic nothing becomes idle; the workers end below.
            Err(error) if error.status() != Status::Panic => return Err(error),
            _ => {}
        }
        self.inner.stop();
        // A concurrent close waits here until the threads have ended.
        for thread in self.threads.lock().drain(..) {
            if thread.join().is_err() {
                log::error!("a worker thread of the store panicked");
            }
        }
        let ended = self.disk().map_or(Ok(()), |disk| disk.close());
        self.release_resources()?;
        ended
    }

    /// Writes what is in memory only, where allowed, and a checkpoint, which makes the next opening
    /// fast.
    fn write_back_and_checkpoint(&self, deadline_ns: u64) -> Result<()> {
        for (step, begin) in
            [StoreState::write_back_all, StoreState::request_checkpoint].iter().enumerate()
        {
            let mut state = self.inner.state.lock();
            let is_next = state.close_step == step;
            state.close_step += usize::from(is_next);
            drop(state);
            if is_next {
                self.release_with(|core| {
                    begin(core);
                    Ok(())
                })?;
            }
            self.wait_until(deadline_ns, StoreState::is_quiet)?;
        }
        Ok(())
    }

    /// Frees memory and directory, although ops and handles may be kept for longer.
    fn release_resources(&self) -> Result<()> {
        let config = Config {
            max_chunks: 1,
            max_sessions: 1,
            max_transfers: 1,
            max_jobs: 1,
            events: 1,
            ..Config::default()
        };
        let empty = StoreState::new(config, None, None)?;
        let auditing = self.auditing.lock();
        let core = std::mem::replace(&mut self.inner.state.lock().core, empty);
        drop(core);
        drop(auditing);
        // The device may be closed while an op is kept.
        let none = Tools { device: Arc::new(Host::default()), disk: None, remote: None };
        let tools = std::mem::replace(&mut *self.inner.tools.lock(), none);
        drop(tools);
        if let Some(account) = &self.account {
            match account.close() {
                Err(error) if error.status() != Status::Closed => {
                    log::warn!("the account of a closed store stays open: {error}");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

// ---------- clear
//
// Clears a namespace, and waits until that is durable.

/// Chunks removed under one lock; other callers wait no longer than for these.
const AT_ONCE: usize = 512;
/// Interval of checks, since the end of a batch of writes wakes no thread.
const POLL_NS: u64 = 1_000_000;
/// Checks without progress after which chunks that stayed are taken as referenced by the engine.
const MOST_IN_VAIN: u32 = 3;

impl Store {
    /// Removes everything of a namespace that is not referenced, and waits until that survives a
    /// restart, or for a deadline (0 = none). May be called again with any deadline: it continues
    /// from there, and reports everything removed.
    pub fn clear(&self, namespace: u32, deadline_ns: u64) -> Result<Cleared> {
        let mut clearing = self.with(|core| core.begin_clear(namespace))?;
        let cleared = self.clear_all(&mut clearing, deadline_ns);
        let removal = self.with(|core| Ok(core.request_durable_clear(&mut clearing)))?;
        let waited = cleared.and_then(|()| self.wait_to_last(removal, deadline_ns));
        if !matches!(&waited, Err(error) if error.status() == Status::Timeout) {
            self.release_with(|core| {
                core.end_clear(&clearing);
                Ok(())
            })?;
        }
        waited.map(|()| clearing.cleared)
    }

    /// Removes what may leave. Chunks in a write are removed when that has ended; chunks in a
    /// transfer stay.
    fn clear_all(&self, clearing: &mut Clearing, deadline_ns: u64) -> Result<()> {
        let (mut before, mut in_vain) = (u64::MAX, 0);
        loop {
            while self.with(|core| Ok(core.clear_more(clearing, AT_ONCE)))? {}
            let written = self.with(|core| Ok(core.writes_so_far()))?;
            let moving = clearing.cleared.moving;
            in_vain = if moving < before { 0 } else { in_vain + 1 };
            if moving == 0 || in_vain >= MOST_IN_VAIN {
                return Ok(());
            }
            before = moving;
            if written.is_none() {
                // The last blocking write has ended, or there was none.
                clearing.again();
                continue;
            }
            let mut state = self.inner.state.lock();
            while state.core.writes_so_far() == written && !state.stop && !state.broken {
                let now_ns = self.inner.runtime.clock().now_ns();
                if deadline_ns != 0 && now_ns >= deadline_ns {
                    fail!(Timeout, "chunks to be removed are being written: call again");
                }
                self.inner.ended.wait_for(&mut state, POLL_NS);
            }
            drop(state);
            clearing.again();
        }
    }

    fn wait_to_last(&self, removal: u64, deadline_ns: u64) -> Result<()> {
        let mut state = self.inner.state.lock();
        loop {
            if let Some(result) = state.core.durability(removal) {
                return result.map_err(|e| e.within("cleared chunks may reappear after a restart"));
            }
            if state.broken {
                return Err(Status::Panic.into());
            }
            if state.stop {
                return Err(Status::Closed.into());
            }
            let now_ns = self.inner.runtime.clock().now_ns();
            match deadline_ns {
                0 => self.inner.ended.wait(&mut state),
                deadline if now_ns >= deadline => {
                    fail!(Timeout, "the removal is not durable yet: call again")
                }
                deadline => self.inner.ended.wait_for(&mut state, deadline - now_ns),
            }
        }
    }
}

// ---------- reclaimer
//
// Gives memory back when another owner of the budget needs it.

/// Returns memory when other owners of the budget need it.
fn reclaimer(slot: &Arc<Mutex<Weak<Inner>>>) -> Reclaim {
    let slot = slot.clone();
    Box::new(move |tier, bytes, _deadline| {
        let inner = slot.lock().upgrade();
        let has = matches!(tier, Tier::Host | Tier::Device);
        let Some(inner) = inner.filter(|_| has) else { return 0 };
        if tier == Tier::Device {
            let mut state = inner.state.lock();
            let promised = state.core.shrink_device(bytes);
            let completions = inner.collect_completions(&mut state);
            drop(state);
            finish(completions);
            return promised;
        }
        // Unused buffers are returned first.
        let trimmed = inner.tools.lock().disk.as_ref().map_or(0, |disk| disk.trim());
        if trimmed >= bytes {
            return trimmed;
        }
        let mut state = inner.state.lock();
        let promised = trimmed + state.core.shrink(bytes - trimmed);
        let completions = inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        promised
    })
}
