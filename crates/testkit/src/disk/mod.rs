//! Simulated files on a disk with planned faults: torn and reordered writes, lost syncs, errors,
//! bit rot and power failures. A seed and the calls determine everything.
//!
//! After a power failure each sector may hold any state since the last sync, and a file any length
//! since then. Any changes of names may survive; changes of one name survive in order.

#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) mod contract;

pub mod content;
pub mod history;
pub mod inode;
pub mod medium;
pub mod names;
pub mod plan;

use std::collections::BTreeMap;

use crate::disk::history::Event;
use crate::disk::medium::{Call, Disk};
use crate::disk::plan::{Costs, Plan};
use kvtier::base::status::{Result, Status};
use kvtier::base::sync::{Arc, Mutex};
use kvtier::io::files::{Access, Entry, FileId, Files, Next, Piece, Source, check_name};

/// Limit: pieces of a stream in flight.
const MAX_IN_FLIGHT: usize = 8;

/// Options of a simulated disk.
#[derive(Clone, Copy, Debug)]
pub struct SimOpts {
    /// Alignment of transfers; default 4096.
    pub align_bytes: u64,
    /// Capacity; up to three times as much memory is used; default 256 MiB.
    pub capacity_bytes: u64,
    /// Planned faults.
    pub plan: Plan,
    /// Duration of calls.
    pub costs: Costs,
}

impl Default for SimOpts {
    fn default() -> Self {
        SimOpts {
            align_bytes: 4096,
            capacity_bytes: 256 << 20,
            plan: Plan::default(),
            costs: Costs::default(),
        }
    }
}

/// A directory on a simulated disk. Clones share the open files.
#[derive(Clone)]
pub struct SimFiles {
    disk: Arc<Mutex<Disk>>,
    incarnation: u64,
    align: u64,
}

impl SimFiles {
    /// A new disk.
    pub fn new(seed: u64, opts: SimOpts) -> SimFiles {
        let (disk, align) = (Disk::new(seed, opts), opts.align_bytes.max(1));
        let incarnation = disk.incarnation;
        SimFiles { disk: Arc::new(Mutex::new(disk)), incarnation, align }
    }

    /// A power failure. Handles return [`Status::Closed`] until the directory is reopened.
    pub fn crash(&self) -> Result<()> {
        self.disk.lock().crash()
    }

    /// Reopens the directory, after a power failure or after the death of a process: open files are
    /// lost, written bytes remain.
    #[must_use]
    pub fn reopen(&self) -> SimFiles {
        let mut disk = self.disk.lock();
        disk.forget_open();
        SimFiles { disk: self.disk.clone(), incarnation: disk.incarnation, align: self.align }
    }

    /// Whether the power has failed, or the directory was reopened.
    pub fn is_closed(&self) -> bool {
        self.disk.lock().incarnation != self.incarnation
    }

    /// Replaces the plan of faults and restarts its counters.
    pub fn set_plan(&self, plan: Plan) {
        self.disk.lock().set_plan(plan);
    }

    /// Sets the capacity.
    pub fn set_capacity(&self, bytes: u64) {
        self.disk.lock().set_capacity(bytes);
    }

    /// Calls since the plan was set, counting each piece of a batch, as [`Plan::crash_at`] does.
    pub fn calls(&self) -> u64 {
        self.disk.lock().calls()
    }

    /// Returns and resets the cost of calls.
    pub fn take_cost_ns(&self) -> u64 {
        std::mem::take(&mut self.disk.lock().cost_ns)
    }

    /// Flips a bit of a file permanently.
    pub fn rot(&self, name: &str, bit: u64) -> Result<()> {
        self.disk.lock().rot(name, bit)
    }

    /// Durable names and contents.
    pub fn durable(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        self.disk.lock().durable()
    }

    /// The last calls, oldest first.
    pub fn history(&self) -> Vec<Event> {
        self.disk.lock().history.events().cloned().collect()
    }

    fn call<T>(&self, call: Call, act: impl FnOnce(&mut Disk) -> Result<T>) -> Result<T> {
        let mut disk = self.disk.lock();
        if disk.incarnation != self.incarnation {
            return Err(Status::Closed.into());
        }
        disk.call(call, act)
    }

    fn about<T>(
        &self,
        name: &'static str,
        file: &str,
        bytes: u64,
        act: impl FnOnce(&mut Disk) -> Result<T>,
    ) -> Result<T> {
        self.call(Call { name, file, offset: 0, bytes }, act)
    }

    fn about_open<T>(
        &self,
        name: &'static str,
        file: FileId,
        act: impl FnOnce(&mut Disk) -> Result<T>,
    ) -> Result<T> {
        let known = self.disk.lock().name_of(file);
        self.about(name, &known, 0, act)
    }

    /// # Safety
    /// As for [`Files::transfer`].
    unsafe fn transfer_one(&self, piece: &mut Piece) -> Result<()> {
        piece.check(self.align)?;
        let file = self.disk.lock().name_of(piece.file);
        let name = match piece.access {
            Access::Read => "read",
            Access::Write => "write",
        };
        let call = Call { name, file: &file, offset: piece.offset, bytes: piece.bytes() };
        // SAFETY: the caller's promise.
        self.call(call, |disk| unsafe { disk.transfer(piece) })
    }
}

impl Files for SimFiles {
    fn align_bytes(&self) -> u64 {
        self.align
    }

    fn engine(&self) -> &str {
        "simulated"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn list(&self) -> Result<Vec<Entry>> {
        self.about("list", "", 0, Disk::list)
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        check_name(name)?;
        self.about("create", name, bytes, |disk| disk.create(name, bytes))
    }

    fn open(&self, name: &str) -> Result<FileId> {
        check_name(name)?;
        self.about("open", name, 0, |disk| disk.open(name))
    }

    fn len(&self, file: FileId) -> Result<u64> {
        self.about_open("len", file, |disk| disk.len(file))
    }

    fn close(&self, file: FileId) {
        // It does not reach the disk: neither counted nor failing.
        let mut disk = self.disk.lock();
        if disk.incarnation == self.incarnation {
            disk.close(file);
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_name(from)?;
        check_name(to)?;
        self.about("rename", from, 0, |disk| disk.rename(from, to))
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        self.about("remove", name, 0, |disk| disk.remove(name))
    }

    fn sync_names(&self) -> Result<()> {
        self.about("sync_names", "", 0, Disk::sync_names)
    }

    fn sync(&self, file: FileId) -> Result<()> {
        self.about_open("sync", file, |disk| disk.sync(file))
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        if pieces.is_empty() {
            return;
        }
        // In an order that callers must not rely on.
        let n = pieces.len();
        let start = self.disk.lock().any_place(n);
        let (later, first) = pieces.split_at_mut(start);
        for piece in first.iter_mut().chain(later) {
            // SAFETY: the caller's promise.
            piece.result = unsafe { self.transfer_one(piece) };
        }
    }

    /// Any number of pieces are in flight, and any of them ends next.
    unsafe fn stream(&self, source: &mut dyn Source) {
        let mut flight: Vec<(usize, Piece)> = Vec::new();
        loop {
            let most = self.disk.lock().any_place(MAX_IN_FLIGHT) + 1;
            while flight.len() < most
                && let Next::Piece(key, piece) = source.next()
            {
                flight.push((key, piece));
            }
            if flight.is_empty() {
                return;
            }
            let at = self.disk.lock().any_place(flight.len());
            let (key, mut piece) = flight.swap_remove(at);
            // SAFETY: the caller's promise.
            let result = unsafe { self.transfer_one(&mut piece) };
            source.ended(key, result);
        }
    }

    fn free_bytes(&self) -> Result<u64> {
        let disk = self.disk.lock();
        match disk.incarnation == self.incarnation {
            true => Ok(disk.free_bytes()),
            false => Err(Status::Closed.into()),
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
