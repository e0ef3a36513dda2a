//! The streamer: a scheduler, memory, and threads that read and copy.

mod acquire;
mod direct_reads;
mod inspect;
mod open;
mod rebalance;
mod threads;

use std::collections::VecDeque;
use std::path::PathBuf;

pub use acquire::{AcquireOpts, UnitLease};
pub use inspect::{LinkUse, Progress};
pub use open::{Opts, Verify, memory_of};

use crate::base::account::Account;
use crate::base::core::Core as Runtime;
use crate::base::op::Op;
use crate::base::op::Owner;
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, Guard, JoinHandle, Mutex};
use crate::device::Device;
use crate::fail;
use crate::io::model_files::ModelFiles;
use crate::stream::checksums::Checksums;
use crate::stream::memory::{MemorySource, WeightMemory};
use crate::stream::model::Model;
use crate::stream::plan::{Links, Memory, Plan, PlanOptions, Residency};
use crate::stream::scheduler::Scheduler;
use crate::stream::streamer::acquire::PendingEvent;
use crate::stream::streamer::direct_reads::DirectReader;
use crate::stream::units::Units;

/// Gate flag: the unit is resident where it is used.
const OPEN: u32 = 1 << 31;
/// Gate flag: the unit's residency is to change when its last user has released it.
const MOVING: u32 = 1 << 30;
/// Flag in a stored address: it is a device address. Addresses are multiples of more than this.
const ON_DEVICE: u64 = 1;
/// Mask of the number of users in a gate.
const USERS: u32 = MOVING - 1;

/// A streamer of the weights of one model.
pub struct Streamer {
    pub(super) shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// State that calls and threads share.
pub(super) struct Shared {
    pub runtime: Arc<Runtime>,
    pub model: Model,
    pub units: Units,
    pub files: Arc<dyn ModelFiles>,
    pub device: Option<Arc<dyn Device>>,
    pub account: Option<Arc<Account>>,
    pub sums: Checksums,
    pub verify: Verify,
    pub sidecar: Option<PathBuf>,
    pub links: Links,
    pub memory: Memory,
    /// Declared before the state: slots are unregistered before they are freed.
    pub direct_reader: Option<DirectReader>,
    pub state: Mutex<State>,
    /// Wake readers, the copier, and threads that wait for units.
    pub reads: Condvar,
    pub copies: Condvar,
    pub arrived: Condvar,
    /// For each unit: whether its resident copy may be used, and its number of users.
    pub gates: Vec<AtomicU32>,
    /// Addresses of resident copies; the lowest bit marks a device address.
    pub resident_addresses: Vec<AtomicU64>,
    /// Acquires that took the path without a lock.
    pub fast_acquires: AtomicU64,
    /// Marks are recorded, so no acquire takes the path without a lock.
    pub has_marks: bool,
}

/// State under the lock.
pub(super) struct State {
    pub scheduler: Scheduler,
    pub weight_memory: WeightMemory,
    pub plan: Plan,
    /// The options that the plan was made for.
    pub plan_options: PlanOptions,
    /// Units whose residency changes as soon as they are unused.
    pub moves: Vec<(u32, Residency)>,
    /// A message to log without the lock; a reader does that.
    pub note: Option<String>,
    /// Units whose checksums were compared.
    pub verified: Vec<bool>,
    pub stop: Option<Status>,
    pub broken: bool,
    pub leased: u64,
    pub threads: u32,
    /// Time that calls waited for reads, copies and slots; and the number of waits.
    pub waits: [u64; 3],
    pub wait_count: u64,
    /// Events that were passed on release, the oldest first.
    pub pending_events: VecDeque<PendingEvent>,
    /// For each unit: the number of those events from uses of the resident copy.
    pub resident_uses: Vec<u32>,
}

impl State {
    fn check(&self) -> Result<()> {
        match self.stop {
            _ if self.broken => Err(Status::Panic.into()),
            Some(status) => Err(status.into()),
            None => Ok(()),
        }
    }

    /// Whether residency or slots differ from the plan.
    fn is_moving(&self) -> bool {
        !self.moves.is_empty() || self.slots_change()
    }
}

impl Shared {
    pub fn now_ns(&self) -> u64 {
        self.runtime.clock().now_ns()
    }

    /// Waits for news until a deadline; 0 = no deadline. False: the deadline has passed.
    pub fn wait(&self, state: &mut Guard<'_, State>, deadline_ns: u64) -> bool {
        let now_ns = self.now_ns();
        match deadline_ns {
            0 => self.arrived.wait(state),
            _ if now_ns >= deadline_ns => return false,
            _ => {
                self.arrived.wait_for(state, deadline_ns - now_ns);
            }
        }
        true
    }

    pub fn source(&self) -> MemorySource<'_> {
        MemorySource {
            device: self.device.as_ref(),
            account: self.account.as_ref(),
            faults: self.runtime.faults(),
        }
    }

    /// To be called after each change of the scheduler: opens gates of units that became resident,
    /// moves unused units, and wakes waiting threads.
    pub fn settle(&self, state: &mut State) {
        self.settle_chunk(state, true);
    }

    /// The same after a read or a copy: threads that wait for a whole unit are woken only if
    /// `news`.
    pub fn settle_chunk(&self, state: &mut State, news: bool) {
        let is_running = state.check().is_ok();
        let opened = state.scheduler.take_new_residents();
        let news = news || !opened.is_empty() || state.is_moving();
        if is_running {
            opened.into_iter().for_each(|unit| self.open_gate(unit));
        }
        self.move_units(state);
        self.reads.notify_one(); // the woken thread wakes the next one
        self.copies.notify_one();
        if news {
            self.arrived.notify_all();
        }
    }

    /// Allows the use of a resident unit, unless it is to be moved.
    fn open_gate(&self, unit: u32) {
        let gate = &self.gates[unit as usize];
        // Under the lock of the state, as all changes of MOVING.
        if gate.load(Ordering::Acquire) & MOVING == 0 {
            gate.fetch_or(OPEN, Ordering::AcqRel);
        }
    }

    /// Closes all gates: further calls take the lock, and get the error there.
    fn shut_gates(&self) {
        for gate in &self.gates {
            gate.fetch_and(!OPEN, Ordering::AcqRel);
        }
    }

    fn close_account(&self) {
        let closed = self.account.as_ref().map(|account| account.close());
        if let Some(Err(error)) =
            closed.filter(|c| !matches!(c, Err(e) if e.status() == Status::Closed))
        {
            log::warn!("the account of closed weights could not be closed: {error}");
        }
    }

    fn end(&self, status: Status) {
        let mut state = self.state.lock();
        state.stop.get_or_insert(status);
        self.shut_gates();
        drop(state);
        self.reads.notify_all();
        self.copies.notify_all();
        self.arrived.notify_all();
    }
}

impl Owner for Shared {
    fn abandoned(&self, _: &Op) {}

    fn shut(&self, _: Status) {
        self.end(Status::Closed); // for later calls; this owner has no ops in flight
    }

    fn serve(&self) {}
}

impl Streamer {
    /// Refuses new calls, ends waits, and waits for reads and copies in flight until a deadline (0
    /// = no deadline). [`Status::Busy`] while units are leased.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let is_open = |gate: &AtomicU32| gate.load(Ordering::Acquire) & OPEN != 0;
        let open: Vec<bool> = shared.gates.iter().map(is_open).collect();
        // Gates are closed before users are counted: none may be added after the count.
        shared.shut_gates();
        let used = shared.used_residents();
        if state.leased > 0 || used > 0 {
            for (gate, _) in shared.gates.iter().zip(open).filter(|(_, open)| *open) {
                gate.fetch_or(OPEN, Ordering::AcqRel);
            }
            let count = state.leased + used;
            fail!(Busy, "{count} units are leased: release them first");
        }
        state.stop.get_or_insert(Status::Closed);
        shared.reads.notify_all();
        shared.copies.notify_all();
        shared.arrived.notify_all();
        while state.threads > 0 {
            if !shared.wait(&mut state, deadline_ns) {
                fail!(Busy, "a read or copy is still in flight: close again");
            }
        }
        drop(state);
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        shared.save_sums();
        shared.wait_for_events(deadline_ns)?;
        if let Some(direct_reader) = &shared.direct_reader {
            direct_reader.close();
        }
        // Drivers are slow: other threads may inspect the streamer meanwhile.
        let mut weight_memory = std::mem::take(&mut shared.state.lock().weight_memory);
        // SAFETY: no unit is leased, none can be leased any more, and the threads have ended.
        let freed = unsafe { weight_memory.free_all() };
        if let Err(error) = freed {
            log::warn!("{error}");
        }
        shared.close_account();
        Ok(())
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        // An engine that drops a streamer has promised to use no leased unit: the threads end.
        self.shared.end(Status::Closed);
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}
