//! The streamer: a core that decides, memory, and threads that read and copy.

mod acquire;
mod after;
mod backing;
mod homes;
mod look;
mod open;
mod serve;
mod slots;
mod straight;
mod verify;

pub use acquire::{Held, How};
pub use look::{LinkUse, Progress};
pub use open::{Opts, Verify, memory_of};

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::base::account::Account;
use crate::base::core::Core as Runtime;
use crate::base::op::Op;
use crate::base::owner::Owner;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, JoinHandle, Mutex};
use crate::device::Device;
use crate::io::fixed::FixedFiles;
use crate::stream::core::Core;
use crate::stream::model::Model;
use crate::stream::places::{Places, Source};
use crate::stream::plan::{Home, Links, Memory, Plan, Wishes};
use crate::stream::streamer::after::After;
use crate::stream::streamer::straight::Straight;
use crate::stream::sums::Sums;
use crate::stream::units::Units;

/// The unit is at home, where it is used.
const OPEN: u32 = 1 << 31;
/// Its home is to be another: its last user looks after that.
const LEAVING: u32 = 1 << 30;
/// Of an address: it is the device's. Addresses are multiples of more than this.
const ON_DEVICE: u64 = 1;
/// How many use it there.
const USERS: u32 = LEAVING - 1;

/// Weights that are streamed.
pub struct Streamer {
    pub(super) shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What calls and threads share.
pub(super) struct Shared {
    pub runtime: Arc<Runtime>,
    pub model: Model,
    pub units: Units,
    pub files: Arc<dyn FixedFiles>,
    pub device: Option<Arc<dyn Device>>,
    pub account: Option<Arc<Account>>,
    pub sums: Sums,
    pub verify: Verify,
    pub sidecar: Option<PathBuf>,
    pub links: Links,
    pub memory: Memory,
    /// Before the state: what the device was told of slots is taken back before they go.
    pub straight: Option<Straight>,
    pub state: Mutex<State>,
    /// For readers, for the copier, for who waits for units.
    pub reads: Condvar,
    pub copies: Condvar,
    pub arrived: Condvar,
    /// Of each unit: whether it may be used at home, and how many do.
    pub gates: Vec<AtomicU32>,
    /// Where their homes are; the lowest bit says that it is on the device.
    pub home_addresses: Vec<AtomicU64>,
    /// Units that were had through their gates.
    pub quick: AtomicU64,
    /// Everything is noted, so nothing takes the quick way.
    pub noted: bool,
}

/// What the lock guards.
pub(super) struct State {
    pub core: Core,
    pub places: Places,
    pub plan: Plan,
    /// What it was made for.
    pub wishes: Wishes,
    /// Homes that are to be others, as soon as nobody uses the units there.
    pub moves: Vec<(u32, Home)>,
    /// What is to be logged, under no lock: a reader does.
    pub note: Option<String>,
    /// Units whose checksums were looked at.
    pub verified: Vec<bool>,
    pub stop: Option<Status>,
    pub broken: bool,
    pub leased: u64,
    pub threads: u32,
    /// How long calls waited: for reads, for copies, for slots; and how often.
    pub waits: [u64; 3],
    pub waited: u64,
    /// Events that came with units that were given back, oldest first.
    pub taken_over: VecDeque<After>,
    /// For each unit: how many of those were used at home.
    pub home_uses: Vec<u32>,
}

impl State {
    fn check(&self) -> Result<()> {
        match self.stop {
            _ if self.broken => Err(Status::Panic.into()),
            Some(status) => Err(status.into()),
            None => Ok(()),
        }
    }

    /// Whether homes or slots are not yet what the plan says.
    fn is_moving(&self) -> bool {
        !self.moves.is_empty() || self.slots_change()
    }
}

impl Shared {
    pub fn now_ns(&self) -> u64 {
        self.runtime.clock().now_ns()
    }

    pub fn source(&self) -> Source<'_> {
        Source {
            device: self.device.as_ref(),
            account: self.account.as_ref(),
            faults: self.runtime.faults(),
        }
    }

    /// After anything that the core was told: homes that are there may be used, homes that
    /// nobody uses may be others, and whoever waits looks again.
    pub fn settle(&self, state: &mut State) {
        self.settle_chunk(state, true);
    }

    /// The same after a read or a copy: who waits for a whole unit sleeps on unless there is
    /// news.
    pub fn settle_chunk(&self, state: &mut State, news: bool) {
        let going = state.check().is_ok();
        let opened = state.core.take_opened();
        let news = news || !opened.is_empty() || state.is_moving();
        if going {
            opened.into_iter().for_each(|unit| self.open_gate(unit));
        }
        self.move_homes(state);
        self.reads.notify_one(); // it wakes the next if there is more
        self.copies.notify_one();
        if news {
            self.arrived.notify_all();
        }
    }

    /// A unit may be used at home, unless it is about to leave.
    fn open_gate(&self, unit: u32) {
        let gate = &self.gates[unit as usize];
        // Under the lock of the state, like all that says who leaves.
        if gate.load(Ordering::Acquire) & LEAVING == 0 {
            gate.fetch_or(OPEN, Ordering::AcqRel);
        }
    }

    /// Nobody comes without the lock any more, and with it they are told why.
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
            log::warn!("the account of weights that were closed stays open: {error}");
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
        self.end(Status::Closed); // for all calls that come, not for ops that are under way
    }

    fn serve(&self) {}
}

impl Streamer {
    /// Refuses new calls, ends what waits, and waits until a deadline (0 = for ever) for
    /// reads and copies that are under way. [`Status::Busy`] while units are in use.
    pub fn close(&self, deadline_ns: u64) -> Result<()> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let is_open = |gate: &AtomicU32| gate.load(Ordering::Acquire) & OPEN != 0;
        let open: Vec<bool> = shared.gates.iter().map(is_open).collect();
        // Shut before users are counted: none may come behind the count.
        shared.shut_gates();
        let used = shared.used_homes();
        if state.leased > 0 || used > 0 {
            for (gate, _) in shared.gates.iter().zip(open).filter(|(_, open)| *open) {
                gate.fetch_or(OPEN, Ordering::AcqRel);
            }
            let count = state.leased + used;
            let text = format!("{count} units are in use: give them back first");
            return Err(Error::new(Status::Busy, text));
        }
        state.stop.get_or_insert(Status::Closed);
        shared.reads.notify_all();
        shared.copies.notify_all();
        shared.arrived.notify_all();
        while state.threads > 0 {
            if deadline_ns == 0 {
                shared.arrived.wait(&mut state);
                continue;
            }
            let now = shared.now_ns();
            if now >= deadline_ns {
                return Err(Error::new(Status::Busy, "a read or copy has not ended yet"));
            }
            shared.arrived.wait_for(&mut state, deadline_ns - now);
        }
        drop(state);
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
        shared.save_sums();
        shared.wait_for_uses(deadline_ns)?;
        if let Some(straight) = &shared.straight {
            straight.close();
        }
        // Drivers take their time: others look at the streamer meanwhile.
        let mut places = std::mem::take(&mut shared.state.lock().places);
        // SAFETY: no unit is in use, and none can be had any more; the threads have ended.
        let freed = unsafe { places.free_all() };
        if let Err(error) = freed {
            log::warn!("{error}");
        }
        shared.close_account();
        Ok(())
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        // Whoever still has a unit has promised not to: the threads end all the same.
        self.shared.end(Status::Closed);
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}
