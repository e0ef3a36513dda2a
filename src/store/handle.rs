//! An open store: the state machine behind one lock, worker threads that execute its work, and ops
//! that notify callers of completion.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;

use smallvec::SmallVec;

use crate::base::account::Account;
use crate::base::budget::{Budget, Reclaim, Tier};
use crate::base::core::Core as RuntimeCore;
use crate::base::fork;
use crate::base::op::{Op, OpOpts, OpRef, Owner, RELEASED};
use crate::base::panic;
use crate::base::runtime::Role;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Guard, JoinHandle, Mutex, Weak, cores, spawn};
use crate::device::host::Host;
use crate::device::{Device, Event, State, Stream};
use crate::fail;
use crate::format::keys::Key;
use crate::format::keys::chain::Chain;
use crate::format::keys::media::{self, Medium};
use crate::io::real::RealFiles;
use crate::io::socket::{Listener, Waker};
use crate::store::control::{self, Subject};
use crate::store::events::{Entries, Event as StoreEvent, MOST, Stage};
use crate::store::executor::Tools;
use crate::store::executor::remote::RemoteExecutor;
use crate::store::executor::{EventCopies, StateAccess, copy_inline, read_and_decode};
use crate::store::pool::calls::{self, Call};
use crate::store::pool::client::{self, Client};
use crate::store::pool::link::Link;
use crate::store::pool::messages::{Ended, What};
use crate::store::pool::wire::{NamespaceId, Raw};
use crate::store::ready_event::{EventState, Listener as EventListener, Ready};
use crate::store::spec::{DiskSpec, StoreSpec};
use crate::store::state::blocks::BlockTransfer;
use crate::store::state::device_tier::Audited;
use crate::store::state::disk_gc::{CheckpointWriter, Cleared, Clearing, Page};
use crate::store::state::plans::LookupResult;
use crate::store::state::transfer::Level;
use crate::store::state::work::{KINDS, ReadBatch, Work, WorkerKind};
use crate::store::state::{Adopted, CellRange, Config, Finished, StoreState, TransferKind};
use crate::store::token_path::MAX_TOKENS;
use crate::tier::disk::{
    CellAt, CellIndex, DiskTier, Gets, OpenReport, Options, ReadFeed, Recovered, Spot,
};
use crate::tier::host::shared::SharedSlabs;
use crate::tier::remote::{Publish, RemoteError, Server};

/// State behind the lock.
pub(super) struct Guarded {
    pub(super) core: StoreState,
    /// Ops of each transfer, by its number.
    ops: Vec<Vec<OpRef>>,
    /// Transfers of other processes, by their number.
    pub(super) remote_ops: BTreeMap<u32, RemoteOp>,
    /// Buffer for completions.
    finished: Vec<Finished>,
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
    pub(super) stop: bool,
    /// A worker has panicked: new transfers are refused.
    pub(super) broken: bool,
}

/// A transfer of another process.
#[derive(Clone)]
pub(super) struct RemoteOp {
    pub(super) link: Arc<Link>,
    /// That process's number of it.
    pub(super) transfer: u64,
}

/// Shared by all threads.
pub(super) struct Inner {
    pub(super) runtime: Arc<RuntimeCore>,
    pub(super) state: Mutex<Guarded>,
    /// Memory for cells that other processes map, if this store is shared.
    pub(super) shared: Option<Arc<SharedSlabs>>,
    /// Other processes that have opened the store, by number.
    pub(super) links: Mutex<BTreeMap<u64, Arc<Link>>>,
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
    /// The store is another process's: this one has an empty state, and asks that process.
    client: Option<Arc<Client>>,
    /// Ends the thread that accepts other processes.
    serving: Option<Arc<Waker>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    account: Option<Arc<Account>>,
    /// Held during an audit of the device tier; closing waits for it.
    auditing: Mutex<()>,
    /// The store has a device, so transfers may name its events.
    has_device: bool,
    /// Transfers of at most so many bytes are copied by the thread that submits them.
    inline_bytes: u64,
    /// Reports of the opening.
    pub opened: Opened,
    /// The remote server at opening, if there is a remote that answered.
    pub server: Option<Server>,
}

/// Reports of the opening of the tiers.
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
        (store.has_device, store.inline_bytes) = (false, spec.inline_bytes);
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
        let store = match &spec.shared {
            Some(path) => Store::open_shared(runtime, account.clone(), &slot, spec, device, path),
            None => Store::open_on(runtime, account.clone(), &slot, spec, device),
        };
        if let (Err(_), Some(account)) = (&store, account)
            && let Err(error) = account.close()
        {
            log::warn!("the account of a store that failed to open stays open: {error}");
        }
        store
    }

    /// Opens a store of another process.
    fn open_shared(
        runtime: &Arc<RuntimeCore>,
        account: Option<Arc<Account>>,
        slot: &Mutex<Weak<Inner>>,
        spec: &StoreSpec,
        device: Arc<dyn Device>,
        path: &Path,
    ) -> Result<Store> {
        if device.facts().reaches_device {
            fail!(
                Unsupported,
                "a shared store cannot copy to or from device memory: pass no device"
            );
        }
        spec.check_shared()?;
        let none = StoreSpec { config: nothing(), ..StoreSpec::parse("")? };
        let mut store =
            Store::open_over(runtime, account, slot, &none, device, (None, None), None)?;
        store.client = Some(Client::open(runtime, path, spec.copiers, spec.inline_bytes)?);
        Ok(store)
    }

    /// The connection to the process whose store this is; None = this one's.
    pub fn client(&self) -> Option<&Arc<Client>> {
        self.client.as_ref()
    }

    /// Executes `own` on the state, or a call in the process that has the state.
    pub fn call<C: Call>(
        &self,
        own: impl FnOnce(&mut StoreState) -> Result<C::Out>,
        call: impl FnOnce() -> C,
    ) -> Result<C::Out> {
        match &self.client {
            None => self.with(own),
            Some(client) => client.call(&call()),
        }
    }

    /// The same for the end of an object; also while the store closes.
    pub fn release<C: Call<Out = ()>>(
        &self,
        own: impl FnOnce(&mut StoreState) -> Result<()>,
        call: impl FnOnce() -> C,
    ) -> Result<()> {
        match &self.client {
            None => self.release_with(own),
            Some(client) => client.release(&call()),
        }
    }

    /// Reads events from a number on: how many, how many were missed, and the number of the next one.
    pub fn read_events(&self, from: u64, out: &mut [StoreEvent]) -> Result<(usize, u64, u64)> {
        let Some(client) = &self.client else {
            return self.inspect(|core| {
                let (count, missed) = core.events.read(from, out);
                (count, missed, core.events.next_number())
            });
        };
        let most = out.len() as u32;
        let (events, missed, next) = client.call(&calls::ReadEvents { from, most })?;
        Ok((filled(out, events)?, missed, next))
    }

    /// Reads what is resident from a position on: how many entries, and the next position.
    pub fn residents(&self, from: u64, out: &mut [StoreEvent]) -> Result<(usize, u64)> {
        let Some(client) = &self.client else {
            return self.inspect_now(|core| core.residents(from, out));
        };
        let most = out.len() as u32;
        let (entries, next) = client.call(&calls::Residents { from, most })?;
        Ok((filled(out, entries)?, next))
    }

    /// The same for what only reads; also while the store closes.
    pub fn ask<C: Call>(
        &self,
        own: impl FnOnce(&StoreState) -> C::Out,
        call: impl FnOnce() -> C,
    ) -> Result<C::Out> {
        match &self.client {
            None => self.inspect(own),
            Some(client) => client.call(&call()),
        }
    }

    /// Fails for a store of another process.
    fn check_own(&self) -> Result<()> {
        if self.client.is_some() {
            fail!(
                Unsupported,
                "the store is another process's, and this call is not possible from here: make it \
                 there"
            );
        }
        Ok(())
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
        let shared = spec.serve.as_ref().map(|_| core.share_host()).transpose()?;
        let adopted = match &recovered {
            Some(recovered) => core.adopt(recovered)?,
            None => Adopted::default(),
        };
        let inner = Arc::new_cyclic(|this| Inner {
            runtime: runtime.clone(),
            state: Mutex::new(Guarded::new(core)),
            shared,
            links: Mutex::new(BTreeMap::new()),
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
        let mut threads = start_workers(&inner, spec, listener).inspect_err(|_| inner.stop())?;
        let serving = match &spec.serve {
            Some(path) => Some(serve(&inner, path, &mut threads).inspect_err(|_| inner.stop())?),
            None => None,
        };
        let threads = Mutex::new(threads);
        let opened = Opened { disk: report, adopted };
        let auditing = Mutex::new(());
        Ok(Store {
            inner,
            client: None,
            serving,
            threads,
            account,
            auditing,
            has_device: true,
            inline_bytes: 0,
            opened,
            server,
        })
    }

    /// Whether its device has memory that the processor cannot reach.
    pub fn reaches_device(&self) -> bool {
        self.inner.tools.lock().device.facts().reaches_device
    }

    /// Runs `act` on the state. Whatever it makes possible without a worker is done when this
    /// returns.
    pub fn with<R>(&self, act: impl FnOnce(&mut StoreState) -> Result<R>) -> Result<R> {
        self.check_own()?;
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
        // Its threads did not survive the fork, and may have held locks.
        if fork::check().is_err() {
            return;
        }
        self.end_sharing();
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
    fn new(core: StoreState) -> Guarded {
        Guarded {
            core,
            ops: Vec::new(),
            remote_ops: BTreeMap::new(),
            finished: Vec::new(),
            watches: Watches::default(),
            published_until: u64::MAX,
            sleeping: [0; KINDS],
            has_alarm: [false; KINDS],
            event_thread_sleeps: false,
            closing: false,
            close_step: 0,
            stop: false,
            broken: false,
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        match (self.broken, self.closing || self.stop) {
            (true, _) => Err(Status::Panic.into()),
            (_, true) => Err(Status::Closed.into()),
            _ => Ok(()),
        }
    }

    /// Ops of the completions since the last call.
    pub(super) fn ended(&mut self) -> Completions {
        self.core.finished(&mut self.finished);
        let mut completions = Completions::new();
        for one in self.finished.drain(..) {
            if let Some(op) = self.remote_ops.get(&one.number) {
                let target = Target::Client(op.clone());
                if one.last {
                    self.remote_ops.remove(&one.number);
                }
                completions.push((target, one));
                continue;
            }
            let Some(ops) = self.ops.get_mut(one.number as usize) else { continue };
            let part = one.part as usize;
            // An op that ends alone need not be counted twice.
            let op = match one.last && part + 1 == ops.len() {
                true => ops.pop(),
                false => ops.get(part).cloned(),
            };
            if one.last {
                ops.clear();
            }
            completions.extend(op.map(|op| (Target::Op(op), one)));
        }
        completions
    }
}

/// Who waits for a transfer.
pub(super) enum Target {
    Op(OpRef),
    Client(RemoteOp),
}

/// Transfers with their outcome.
pub(super) type Completions = SmallVec<[(Target, Finished); 1]>;

impl Inner {
    /// After any change of the state: wakes workers that have work, and collects completions, which
    /// are reported after the lock is released.
    pub(super) fn collect_completions(&self, state: &mut Guarded) -> Completions {
        for workers in WorkerKind::ALL {
            let at = workers as usize;
            let is_urgent = workers == WorkerKind::Lookup && state.core.is_lookup_urgent();
            // A worker that sleeps without a timer must learn that there is a deadline now.
            let is_timed = !state.has_alarm[at] && due_ns(&state.core, workers).is_some();
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
pub(super) fn finish(completions: Completions) {
    for (target, one) in completions {
        let op = match target {
            Target::Op(op) => op,
            Target::Client(RemoteOp { link, transfer }) => {
                let Finished { part, error, tokens, bytes, outcomes, last, .. } = one;
                link.report(Ended { transfer, part, last, error, tokens, bytes, outcomes });
                continue;
            }
        };
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
        if let Some(client) = &self.client {
            refuse_events(cell_range.after, ready)?;
            let CellRange {
                first_token, tokens, first_layer, layers, by_layer, wanted, views, ..
            } = cell_range;
            let ops = client::Ops::Each(if by_layer { layers } else { 1 });
            let (tokens, layers) = ((first_token, tokens), (first_layer, layers));
            let what = What::Cells { tokens, layers, by_layer, wanted };
            return client.submit((session, kind, level), (ops, opts), what, views);
        }
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
        if let Some(client) = &self.client {
            return client.locate(session, client::Ops::Each(1), opts, What::Locate);
        }
        let ops = self.begin(Ops::Each(1), opts, None, |core| Ok((core.locate(session)?, 0)))?;
        ops.into_iter().next().ok_or_else(|| Status::Invalid.into())
    }

    /// Begins a remote lookup of blocks: one op with an item for each block.
    pub fn locate_blocks(&self, session: u32, keys: Vec<Key>, opts: &OpOpts) -> Result<OpRef> {
        if let Some(client) = &self.client {
            let ops = client::Ops::Items(keys.len());
            return client.locate(session, ops, opts, What::LocateBlocks(keys));
        }
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
        if let Some(client) = &self.client {
            refuse_events(blocks.after, ready)?;
            let BlockTransfer { keys, first_layer, layers, views, .. } = blocks;
            let ops = client::Ops::Items(keys.len());
            let what = What::Blocks { keys, layers: (first_layer, layers) };
            return client.submit((session, kind, level), (ops, opts), what, views);
        }
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
        let begun: SmallVec<[bool; 64]> = ops.iter().map(|op| op.begin()).collect();
        if begun.contains(&false) {
            let rest = ops.iter().zip(&begun).filter(|(_, begun)| **begun);
            let late = opts.deadline_ns != 0 && !self.inner.runtime.is_closing();
            let status = if late { Status::Timeout } else { Status::Cancelled };
            rest.for_each(|(op, _)| op.finish(status, None, None));
            return Ok(ops);
        }
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
                ops.iter().for_each(|op| op.set_owner_slot(number));
                let number = number as usize;
                if state.ops.len() <= number {
                    state.ops.resize_with(number + 1, Vec::new);
                }
                debug_assert!(state.ops[number].is_empty(), "a number that is in use");
                state.ops[number].extend(ops.iter().cloned());
                // A cancel or deadline before this found no transfer.
                if let Some(status) = abandoned_status(&ops) {
                    state.core.cancel(number as u32, status);
                }
                let own = state.core.take_own(number as u32, self.inline_bytes);
                completions.extend(self.inner.collect_completions(&mut state));
                drop(state);
                ops.iter().for_each(|op| op.notify_issued());
                finish(completions);
                own.into_iter().for_each(|work| self.inner.copy_own(work));
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
        if count == 1 {
            ops.push(runtime.promise(opts, owner)?);
            return Ok(ops);
        }
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

/// Refuses events, which a store of another process does not know.
fn refuse_events(after: Option<Event>, ready: Option<&Ready>) -> Result<()> {
    if after.is_some() || ready.is_some() {
        fail!(
            Unsupported,
            "transfers of a shared store wait for no event: submit them when it has happened"
        );
    }
    Ok(())
}

/// Abandons ops of a refused call. They are never reported.
fn undo(ops: Vec<OpRef>, error: Error) -> Error {
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
        self.check_own()?;
        let state = self.inner.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        Ok(read(&state.core))
    }

    /// The same, after chunks whose end has come were removed, at most as many as a tick removes.
    pub fn inspect_now<R>(&self, read: impl FnOnce(&StoreState) -> R) -> Result<R> {
        self.check_own()?;
        let mut state = self.inner.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        let mut completions = Completions::default();
        if let Some(end_ns) = state.core.next_end_ns() {
            let now_ns = self.inner.runtime.clock().now_ns();
            if end_ns <= now_ns && !state.broken {
                state.core.tick(now_ns);
                completions = self.inner.collect_completions(&mut state);
            }
        }
        let result = read(&state.core);
        drop(state);
        finish(completions);
        Ok(result)
    }

    /// Ends the object of a handle; also while the store or its runtime closes. Does nothing for a
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
        self.end_sharing();
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

    /// Ends the connections to other processes. Their copies have ended when this returns, or those
    /// processes are asked to end them; see `store::server`.
    fn end_sharing(&self) {
        self.serving.iter().for_each(|waker| waker.wake());
        self.client.iter().for_each(|client| client.close());
    }

    /// Closes a store after a defect. A panic ends ops while other workers may still copy: when this
    /// returns, no thread of the store touches memory of callers any more.
    pub fn halt(&self) {
        self.inner.state.lock().broken = true;
        self.inner.abort_all();
        if let Err(error) = self.close(0) {
            log::warn!("a store was closed after a defect: {error}");
        }
    }

    /// Writes chunks that are in memory only, where allowed, and a checkpoint, which makes the next
    /// opening fast.
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
        let empty = StoreState::new(nothing(), None, None)?;
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

    /// Removes all chunks that may be dropped. Chunks in a write are removed when the write has
    /// ended; chunks in a transfer stay.
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
// Returns memory when another owner of the budget needs it.

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

// ---------- watches
//
// Ops that complete when an event is published, and read-only calls: lookup and audit.

/// Most waiting ops.
const MAX_WATCHES: usize = 1024;
/// Numbers of watches begin here, above those of transfers.
const FIRST: u32 = 1 << 31;

/// Ops that wait for events.
pub(super) struct Watches {
    all: Vec<Option<(u64, OpRef)>>,
    /// Least event number that an op waits for.
    least: u64,
}

impl Default for Watches {
    fn default() -> Watches {
        Watches { all: Vec::new(), least: u64::MAX }
    }
}

impl Watches {
    /// Makes an op wait for the event `from` or a later one. Returns its number.
    fn add(&mut self, from: u64, op: OpRef) -> Result<u32> {
        let at = self.all.iter().position(Option::is_none).unwrap_or(self.all.len());
        if at == MAX_WATCHES {
            fail!(Again, "{MAX_WATCHES} watches are open, the limit: cancel one");
        }
        if at == self.all.len() {
            self.all.push(None);
        }
        self.all[at] = Some((from, op));
        self.least = self.least.min(from);
        Ok(FIRST + at as u32)
    }

    /// Completes ops whose event exists, now that the next one has number `next`.
    pub fn notify(&mut self, next: u64, completions: &mut Completions) {
        if self.least >= next {
            return;
        }
        for one in &mut self.all {
            if let Some((from, op)) = one.take_if(|(from, _)| *from < next) {
                completions.push((Target::Op(op), ended(next - from, None)));
            }
        }
        self.least = self.all.iter().flatten().map(|(from, _)| *from).min().unwrap_or(u64::MAX);
    }

    /// Whether an op's number is one of a watch.
    pub fn has(place: u32) -> bool {
        place >= FIRST
    }

    /// Completes a cancelled op. The number may be another op's by now; then that op is checked.
    pub fn cancel_if_abandoned(&mut self, place: u32, completions: &mut Completions) {
        let Some(one) = self.all.get_mut((place - FIRST) as usize) else { return };
        let status = one.as_ref().and_then(|(_, op)| abandoned_status(std::slice::from_ref(op)));
        if let (Some(status), Some((_, op))) = (status, one.take_if(|_| status.is_some())) {
            completions.push((Target::Op(op), ended(0, Some(status))));
        }
    }

    /// Completes all ops.
    pub fn end_all(&mut self, status: Status, completions: &mut Completions) {
        completions.extend(self.take().map(|op| (Target::Op(op), ended(0, Some(status)))));
    }

    /// Takes all ops.
    pub fn take(&mut self) -> impl Iterator<Item = OpRef> + use<> {
        let all = std::mem::take(self).all;
        all.into_iter().flatten().map(|(_, op)| op)
    }
}

/// Outcome of an op, with the number of events it found.
fn ended(events: u64, status: Option<Status>) -> Finished {
    Finished {
        number: 0,
        part: 0,
        error: status.map(Into::into),
        tokens: events,
        bytes: 0,
        outcomes: Vec::new(),
        last: true,
    }
}

impl Store {
    /// Begins an op that completes when the event `from` or a later one exists; its value is the
    /// number of available events. `u64::MAX` = the next event.
    pub fn watch(&self, from: u64, opts: &OpOpts) -> Result<OpRef> {
        self.check_own()?;
        let op = self.inner.runtime.promise(opts, self.inner.clone())?;
        // A passed deadline, or a concurrent close, may have ended the op.
        if !op.begin() {
            return Ok(op);
        }
        let mut state = self.inner.state.lock();
        let added = state.check_open().and_then(|()| {
            let Guarded { core, watches, .. } = &mut *state;
            let from = if from == u64::MAX { core.events.next_number() } else { from };
            watches.add(from, op.clone())
        });
        let place = match added {
            Ok(place) => place,
            Err(error) => {
                drop(state);
                return Err(undo(vec![op], error));
            }
        };
        // A cancel from here on finds the op once it has the lock.
        op.set_owner_slot(place);
        let mut completions = Completions::new();
        state.watches.cancel_if_abandoned(place, &mut completions);
        completions.extend(self.inner.collect_completions(&mut state));
        drop(state);
        op.notify_issued();
        finish(completions);
        Ok(op)
    }
}

// ---------- publisher
//
// The thread that publishes events to a remote. It reads events like any other reader: it delays
// no other thread, and reports events that it was too slow for as missed.

/// Least and most time between two attempts after the remote refused events.
const PAUSE_NS: [u64; 2] = [100_000_000, 5_000_000_000];

/// State of the publisher.
pub(super) struct Feed {
    publish: Publish,
    entries: Entries,
    timeout_ns: u64,
}

/// The events to publish next.
struct Publication {
    stage: Stage,
    missed: u64,
    count: usize,
}

impl Feed {
    /// A publisher for an engine of this name. A request takes at most `timeout_ns`.
    pub fn new(node: &str, publish: Publish, timeout_ns: u64) -> Result<Feed> {
        let run = u64::from_le_bytes(crate::base::machine::random_bytes()?);
        Ok(Feed { publish, entries: Entries::new(node, run), timeout_ns })
    }
}

impl Inner {
    /// Main function of the publisher's thread.
    pub(super) fn serve_feed(&self, mut feed: Feed) {
        let mut events = vec![StoreEvent::default(); MOST];
        let (mut from, mut missed) = (0, 0);
        let (mut stage, mut pause_ns) = (Stage::Opened, 0);
        loop {
            if pause_ns > 0 && self.pause_feed(pause_ns) {
                return;
            }
            let publication = self.next_publication(from, stage, &mut events);
            (from, missed) = (from + publication.missed, missed + publication.missed);
            let published =
                self.publish(&mut feed, &publication, (from, missed), &events[..publication.count]);
            match published {
                Ok(()) => {
                    (from, missed, pause_ns) = (from + publication.count as u64, 0, 0);
                    stage = Stage::Open;
                }
                Err(failure) => {
                    if pause_ns == 0 {
                        let error = crate::base::status::Error::from(failure);
                        log::warn!("events could not be published; the store retries: {error}");
                    }
                    pause_ns = (pause_ns * 2).clamp(PAUSE_NS[0], PAUSE_NS[1]);
                }
            }
            if publication.stage == Stage::Closed {
                return;
            }
        }
    }

    fn publish(
        &self,
        feed: &mut Feed,
        publication: &Publication,
        (from, missed): (u64, u64),
        events: &[StoreEvent],
    ) -> std::result::Result<(), RemoteError> {
        let fields = feed.entries.make(publication.stage, from, missed, events);
        (feed.publish)(&fields, self.runtime.clock().now_ns().saturating_add(feed.timeout_ns))
    }

    /// Waits until there are events to publish.
    fn next_publication(&self, from: u64, stage: Stage, events: &mut [StoreEvent]) -> Publication {
        let mut state = self.state.lock();
        let is_over = |state: &Guarded| state.stop || state.broken;
        while stage != Stage::Opened && state.core.events.next_number() <= from && !is_over(&state)
        {
            state.published_until = from;
            self.feed.wait(&mut state);
        }
        state.published_until = u64::MAX;
        let (count, missed) = state.core.events.read(from, events);
        // Remaining events are published before the end.
        let rest = state.core.events.next_number() - from - missed - count as u64;
        let stage = if is_over(&state) && rest == 0 { Stage::Closed } else { stage };
        Publication { stage, missed, count }
    }

    /// Waits for a while. Returns whether the store has ended meanwhile.
    fn pause_feed(&self, pause_ns: u64) -> bool {
        let mut state = self.state.lock();
        if !state.stop && !state.broken {
            self.feed.wait_for(&mut state, pause_ns);
        }
        state.stop || state.broken
    }
}

// ---------- lookup
//
// Lookups. Keys are hashed before the store's lock is taken.

impl Store {
    /// Its device.
    pub fn device(&self) -> Arc<dyn Device> {
        self.inner.tools.lock().device.clone()
    }

    /// Looks up a sequence in a namespace.
    pub fn lookup(&self, namespace: u32, tokens: &[u32]) -> Result<LookupResult> {
        self.lookup_media(namespace, tokens, &[])
    }

    /// The same, with media that start in it.
    pub fn lookup_media(
        &self,
        namespace: u32,
        tokens: &[u32],
        media: &[Medium],
    ) -> Result<LookupResult> {
        let keys = self.chunk_keys(namespace, tokens, media)?;
        self.lookup_keys(namespace, &keys, tokens.len() as u64)
    }

    /// Keys of the full chunks of a sequence.
    pub fn chunk_keys(&self, namespace: u32, tokens: &[u32], media: &[Medium]) -> Result<Vec<Key>> {
        if tokens.len() > MAX_TOKENS {
            fail!(Limit, "a lookup of {} tokens, the limit is {MAX_TOKENS}", tokens.len());
        }
        media::check(media, 0..tokens.len() as u64)?;
        let entry = match &self.client {
            Some(client) => client.namespace(namespace),
            None => self.inspect(|core| {
                let key = core.namespace(namespace).map(|namespace| namespace.key);
                Some((key?, core.table_of(namespace)?.layout.chunk_tokens()))
            })?,
        };
        let Some((key, each)) = entry else { fail!(NotFound, "there is no namespace {namespace}") };
        let mut keys = Vec::new();
        Chain::new(key, each)?.extend(tokens, &media::extras(media, each)?, &mut keys)?;
        Ok(keys)
    }

    /// Looks up the keys of the full chunks of a sequence with so many tokens.
    pub fn lookup_keys(&self, namespace: u32, keys: &[Key], tokens: u64) -> Result<LookupResult> {
        let own = |core: &mut StoreState| core.lookup_keys(namespace, keys, tokens).cloned();
        self.call(own, || calls::LookupKeys {
            namespace: NamespaceId(namespace),
            keys: keys.to_vec(),
            tokens,
        })
    }
}

// ---------- audit
//
// Audits of device replicas.

/// Cells under audit at once, since they cannot be evicted meanwhile.
const AUDIT_BATCH: usize = 64;

impl Store {
    /// Reads all cells in device memory back and compares them with other tiers. Wrong replicas are
    /// forgotten.
    pub fn audit_device(&self) -> Result<Audited> {
        let list = self.with(|core| Ok(core.audit_list()))?;
        let mut audited = Audited::default();
        for some in list.chunks(AUDIT_BATCH) {
            self.audit_some(some, &mut audited)?;
        }
        Ok(audited)
    }

    fn audit_some(&self, list: &[u64], audited: &mut Audited) -> Result<()> {
        // Locked before the state: after a panic a close waits for nothing in flight but this.
        let _auditing = self.auditing.lock();
        let all = self.with(|core| Ok(core.begin_audit(list)))?;
        let tools = self.inner.tools.lock().clone();
        for one in all {
            // SAFETY: the audit is ended below.
            let found = unsafe { tools.audit(&one, Stream(0)) };
            let mut state = self.inner.state.lock();
            state.core.end_audit(one, found, audited);
            let completions = self.inner.collect_completions(&mut state);
            drop(state);
            finish(completions);
        }
        Ok(())
    }
}

// ---------- workers
//
// Worker threads of a store, and the thread that serves the control socket.

/// A lookup worker that was idle for less than this checks for work by itself, since waking it would
/// cost an engine's thread more than the rest of a call, and sessions arrive in bursts. It checks
/// again after a quarter of its idle time, at least and at most so long after: a lookup that no
/// caller waits for begins that much later.
const IDLE_POLL_NS: u64 = 30_000_000;
const LEAST_POLL_NS: u64 = 50_000;
const MOST_POLL_NS: u64 = 1_000_000;
/// Least time of a sleep with a timer, since a simulated clock may stand still.
const LEAST_SLEEP_NS: u64 = 1_000_000;

/// Write workers: while one ends a batch and takes the next one, the other one writes.
const WRITERS: u32 = 2;

/// Longest sleep with a timer: what is due earlier than the timer does not shorten a sleep.
const MOST_SLEEP_NS: u64 = 1_000_000_000;

/// When a worker must check for work without being woken: write workers for write-behind, copy
/// workers for overdue remote requests and for chunks with a TTL.
fn due_ns(core: &StoreState, workers: WorkerKind) -> Option<u64> {
    match workers {
        WorkerKind::Write => core.due_ns(),
        WorkerKind::Copy => [core.watch_ns(), core.next_end_ns()].into_iter().flatten().min(),
        _ => None,
    }
}

impl Inner {
    /// Main function of a worker.
    fn serve(&self, workers: WorkerKind, stream: Stream, tools: &Tools) {
        let mut idle_ns = IDLE_POLL_NS;
        let mut copies = VecDeque::new();
        let mut state = self.state.lock();
        while !state.stop && !state.broken {
            let next = copies.pop_front().or_else(|| state.core.take(workers));
            let Some(work) = next else {
                let completions = self.collect_completions(&mut state);
                if !completions.is_empty() {
                    drop(state);
                    finish(completions);
                    state = self.state.lock();
                    continue;
                }
                if idle_ns < IDLE_POLL_NS {
                    let pause_ns = (idle_ns / 4).clamp(LEAST_POLL_NS, MOST_POLL_NS);
                    idle_ns += pause_ns;
                    self.work[workers as usize].wait_for(&mut state, pause_ns);
                    continue;
                }
                self.sleep(workers, &mut state);
                continue;
            };
            let completions = self.collect_completions(&mut state);
            drop(state);
            finish(completions);
            let began_ns = self.runtime.clock().now_ns();
            let Some(work) = self.for_this_process(work, began_ns) else {
                state = self.state.lock();
                continue;
            };
            let ended = match (work, &tools.disk) {
                (Work::Reads(batch), Some(disk)) => {
                    self.read(batch, disk).map(|()| self.state.lock())
                }
                (mut work, _) => {
                    let outcome = self.carry_out(&mut work, stream, tools);
                    outcome
                        .map(|outcome| self.work_ends(work, outcome, began_ns, Some(&mut copies)))
                }
            };
            let Ok(guard) = ended else {
                self.state.lock().broken = true;
                return self.abort_all();
            };
            state = guard;
            idle_ns = if workers == WorkerKind::Lookup { 0 } else { IDLE_POLL_NS };
        }
        let broken = state.broken;
        drop(state);
        if broken {
            self.abort_all();
        }
    }

    /// Sleeps until there may be work, or until the timer of one worker of the kind.
    fn sleep(&self, workers: WorkerKind, state: &mut Guard<'_, Guarded>) {
        let at = workers as usize;
        let due_ns = due_ns(&state.core, workers).filter(|_| !state.has_alarm[at]);
        state.sleeping[at] += 1;
        match due_ns {
            None => self.work[at].wait(state),
            Some(due_ns) => {
                let wait_ns = due_ns.saturating_sub(self.runtime.clock().now_ns());
                state.has_alarm[at] = true;
                self.work[at].wait_for(state, wait_ns.clamp(LEAST_SLEEP_NS, MOST_SLEEP_NS));
                state.has_alarm[at] = false;
                state.core.tick(self.runtime.clock().now_ns());
            }
        }
        state.sleeping[at] -= 1;
    }

    /// Executes copies of a transfer in the thread that has submitted it.
    fn copy_own(&self, work: Work) {
        let began_ns = self.runtime.clock().now_ns();
        let copied = panic::catch(|| match &work {
            // SAFETY: as in `carry_out`.
            Work::Copies(batch) => unsafe { copy_inline(batch) },
            _ => Ok(()),
        });
        match copied {
            Ok(outcome) => drop(self.work_ends(work, outcome, began_ns, None)),
            Err(text) => {
                self.runtime.poison(&text);
                self.state.lock().broken = true;
                self.abort_all();
            }
        }
    }

    /// Hands the outcome of work to the core. The core seems idle until its next work is taken, so
    /// a worker that goes on keeps the lock where no caller waits for a completion. A fetch worker
    /// passes `copies`, and gets as many bytes of copies as it has fetched: its processor's caches
    /// have them, and no other thread need be woken.
    pub(super) fn work_ends(
        &self,
        work: Work,
        outcome: Result<()>,
        began_ns: u64,
        copies: Option<&mut VecDeque<Work>>,
    ) -> Guard<'_, Guarded> {
        let now_ns = self.runtime.clock().now_ns();
        let mut fetched_bytes = work.fetched_bytes();
        let mut state = self.state.lock();
        state.core.tick(now_ns);
        state.core.done(work, outcome, now_ns.saturating_sub(began_ns));
        if let Some(copies) = copies {
            while fetched_bytes > 0
                && let Some(copy) = state.core.take(WorkerKind::Copy)
            {
                fetched_bytes = fetched_bytes.saturating_sub(copy.copied_bytes().max(1));
                copies.push_back(copy);
            }
        }
        let completions = self.collect_completions(&mut state);
        if !completions.is_empty() {
            drop(state);
            finish(completions);
            state = self.state.lock();
        }
        state
    }

    /// Reads a batch of cells, and further ones as long as there are any. Err = a panic was caught,
    /// and the runtime is poisoned.
    fn read(&self, batch: ReadBatch, disk: &DiskTier) -> std::result::Result<(), ()> {
        let caught = panic::catch(|| {
            let (first, open, coded) = (Some(batch), Vec::new(), None);
            let mut reads = Reads { inner: self, first, open, next: 0, coded };
            // SAFETY: pieces of memory that the core keeps until it hears of the end of the reads.
            unsafe { disk.read_all(&mut reads) };
            if let Some((mut batch, began_ns)) = reads.coded {
                // SAFETY: as above.
                unsafe { read_and_decode(&mut batch, disk) };
                let work = Work::Reads(batch);
                drop(self.work_ends(work, Ok(()), began_ns, None));
            }
        });
        caught.map_err(|text| self.runtime.poison(&text))
    }

    /// Executes work. Err = a panic was caught, and the runtime is poisoned.
    fn carry_out(
        &self,
        work: &mut Work,
        stream: Stream,
        tools: &Tools,
    ) -> std::result::Result<Result<()>, ()> {
        let mut keeper = self;
        let caught = panic::catch(|| {
            // SAFETY: the core hears of the end of this work after it; views are of
            // memory that the caller promised to keep until the op is released, which
            // follows that.
            unsafe { tools.work(work, stream, &mut keeper) }
        });
        caught.map_err(|text| self.runtime.poison(&text))
    }

    /// After a panic: ends everything, so that no caller waits forever.
    pub(super) fn abort_all(&self) {
        let mut state = self.state.lock();
        let mut ops: Vec<OpRef> = state.ops.iter_mut().flat_map(std::mem::take).collect();
        ops.extend(state.watches.take());
        drop(state);
        for op in ops {
            op.abort(Status::Panic);
        }
        self.work.iter().for_each(|work| work.notify_all());
        self.events_pending.notify_all();
        self.feed.notify_all();
        self.ended.notify_all();
    }

    /// Serves the control socket until the store ends.
    fn answer_all(&self, listener: &Listener) {
        let Some(waker) = &self.waker else { return };
        let mut answer = |line: &str| {
            panic::catch(|| control::answer(self, line)).unwrap_or_else(|text| {
                self.runtime.poison(&text);
                self.state.lock().broken = true;
                self.abort_all();
                Err(Error::from(Status::Panic))
            })
        };
        control::serve(listener, waker, &mut answer);
    }
}

/// Batches of reads for a worker.
struct Reads<'a> {
    inner: &'a Inner,
    first: Option<ReadBatch>,
    /// Batches that are being read: number, batch, and when it began.
    open: Vec<(usize, ReadBatch, u64)>,
    /// Number of the next batch.
    next: usize,
    /// A batch with encoded cells, which is read alone after the others; and when it was taken.
    coded: Option<(ReadBatch, u64)>,
}

impl Reads<'_> {
    fn take(&mut self) -> Option<ReadBatch> {
        let mut state = self.inner.state.lock();
        if state.stop || state.broken {
            return None;
        }
        let work = state.core.take(WorkerKind::Read);
        let completions = self.inner.collect_completions(&mut state);
        drop(state);
        finish(completions);
        match work {
            Some(Work::Reads(batch)) => Some(batch),
            _ => None, // read workers have no other work
        }
    }
}

impl ReadFeed for Reads<'_> {
    fn next(&mut self) -> Option<(usize, Gets, Range<usize>)> {
        if self.coded.is_some() {
            return None;
        }
        let mut batch = self.first.take().or_else(|| self.take())?;
        let began_ns = self.inner.runtime.clock().now_ns();
        if !batch.decodings.is_empty() {
            self.coded = Some((batch, began_ns));
            return None;
        }
        let (number, gets) = (self.next, std::mem::take(&mut batch.gets));
        self.next += 1;
        self.open.push((number, batch, began_ns));
        let all = 0..gets.len();
        Some((number, gets, all))
    }

    fn done(&mut self, number: usize, gets: Gets) {
        let Some(at) = self.open.iter().position(|(open, ..)| *open == number) else { return };
        let (_, mut batch, began_ns) = self.open.remove(at);
        batch.gets = gets;
        let work = Work::Reads(batch);
        drop(self.inner.work_ends(work, Ok(()), began_ns, None));
    }
}

impl Subject for Inner {
    fn inspect(&self, read: &mut dyn FnMut(&StoreState)) -> Result<()> {
        let state = self.state.lock();
        if state.stop {
            return Err(Status::Closed.into());
        }
        read(&state.core);
        Ok(())
    }

    fn change(&self, act: &mut dyn FnMut(&mut StoreState) -> Result<()>) -> Result<()> {
        self.runtime.check_open()?;
        let mut state = self.state.lock();
        state.check_open()?;
        state.core.tick(self.runtime.clock().now_ns());
        let result = act(&mut state.core);
        let completions = self.collect_completions(&mut state);
        drop(state);
        finish(completions);
        result
    }
}

/// Writes events of another process. Returns how many.
fn filled(out: &mut [StoreEvent], events: Vec<Raw<StoreEvent>>) -> Result<usize> {
    let count = events.len();
    let Some(out) = out.get_mut(..count) else {
        fail!(Corrupt, "the server has sent {count} events instead of at most {}", out.len());
    };
    out.iter_mut().zip(events).for_each(|(to, one)| *to = one.0);
    Ok(count)
}

/// Configuration of a state that keeps nothing.
fn nothing() -> Config {
    Config {
        max_chunks: 1,
        max_sessions: 1,
        max_transfers: 1,
        max_jobs: 1,
        events: 1,
        ..Config::default()
    }
}

/// Starts the thread that accepts other processes.
fn serve(inner: &Arc<Inner>, path: &Path, threads: &mut Vec<JoinHandle<()>>) -> Result<Arc<Waker>> {
    let (listener, waker) = (Listener::bind(path)?, Arc::new(Waker::new()?));
    let (inner, ring) = (inner.clone(), waker.clone());
    threads.push(spawn("kvt-serve".into(), move || inner.serve_clients(listener, ring))?);
    Ok(waker)
}

/// Starts all threads of a store.
fn start_workers(
    inner: &Arc<Inner>,
    spec: &StoreSpec,
    listener: Option<Listener>,
) -> Result<Vec<JoinHandle<()>>> {
    // Steps that can fail run before the first thread starts.
    let publisher = match &spec.remote {
        Some(remote) => remote.publisher(&spec.secrets, inner.runtime.clock())?,
        None => None,
    };
    let copiers = if spec.copiers == 0 { cores().min(4) as u32 } else { spec.copiers };
    let tools = inner.tools.lock().clone();
    let disk_workers = u32::from(tools.disk.is_some());
    let (fetchers, uploaders) =
        spec.remote.as_ref().map_or((0, 0), |remote| remote.worker_counts(&spec.secrets));
    let lookup_workers = u32::from(spec.remote.is_some());
    let counts = [
        copiers,
        spec.readers * disk_workers,
        WRITERS * disk_workers,
        disk_workers,
        disk_workers,
        fetchers,
        uploaders,
        lookup_workers,
    ];
    let mut threads = Vec::new();
    for (workers, count) in WorkerKind::ALL.into_iter().zip(counts) {
        for at in 0..count {
            let (inner, tools) = (inner.clone(), tools.clone());
            let stream = Stream(at % tools.device.shared_streams().max(1));
            let name = format!("kvt-{}", format!("{workers:?}").to_lowercase());
            let number = threads.len() as u32;
            threads.push(spawn(name, move || {
                inner.runtime.thread_started(Role::Store, number);
                inner.serve(workers, stream, &tools);
            })?);
        }
    }
    if tools.device.facts().asynchronous {
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-behind".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            inner.serve_event_copies(tools);
        })?);
    }
    if let (Some((node, publish)), Some(remote)) = (publisher, &spec.remote) {
        let feed = Feed::new(&node, publish, remote.config.timeout_ns)?;
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-feed".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            if let Err(text) = panic::catch(|| inner.serve_feed(feed)) {
                inner.runtime.poison(&text);
                inner.state.lock().broken = true;
                inner.abort_all();
            }
        })?);
    }
    if let Some(listener) = listener {
        let inner = inner.clone();
        let number = threads.len() as u32;
        threads.push(spawn("kvt-control".into(), move || {
            inner.runtime.thread_started(Role::Store, number);
            inner.answer_all(&listener);
        })?);
    }
    Ok(threads)
}
