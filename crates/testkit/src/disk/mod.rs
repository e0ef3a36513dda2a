//! Files that exist in memory only, on a disk that fails as told: with torn and
//! reordered writes, lost syncs, errors, rot and power failures. Everything that
//! happens follows from a seed and the calls.
//!
//! A power failure may leave, of each sector, any state since the last sync; of a
//! file's length, any since then; of the names, any of the changes, those about
//! one name in their order.

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
use kvtier::io::files::{Access, Entry, FileId, Files, Piece, check_name};

/// How a simulated disk is.
#[derive(Clone, Copy, Debug)]
pub struct SimOpts {
    /// What transfers have to be aligned to.
    pub align_bytes: u64,
    /// What fits on it. Up to three times that is used in memory.
    pub capacity_bytes: u64,
    /// What goes wrong.
    pub plan: Plan,
    /// What calls take.
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

/// A directory on a simulated disk. Clones have the same files open.
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

    /// The power fails. Whoever has files open is told [`Status::Closed`] from now
    /// on, until somebody opens the directory again.
    pub fn crash(&self) -> Result<()> {
        self.disk.lock().crash()
    }

    /// Opens the directory again. After a crash; or without one, as after the death
    /// of a process: what it had open is gone, what it wrote is there.
    #[must_use]
    pub fn reopen(&self) -> SimFiles {
        let mut disk = self.disk.lock();
        disk.forget_open();
        SimFiles { disk: self.disk.clone(), incarnation: disk.incarnation, align: self.align }
    }

    /// Whether the power has failed, or somebody else has opened the directory.
    pub fn is_closed(&self) -> bool {
        self.disk.lock().incarnation != self.incarnation
    }

    /// Replaces the plan of faults; it starts counting again.
    pub fn set_plan(&self, plan: Plan) {
        self.disk.lock().set_plan(plan);
    }

    /// Sets what fits on the disk.
    pub fn set_capacity(&self, bytes: u64) {
        self.disk.lock().set_capacity(bytes);
    }

    /// Calls since the plan was made, each piece of a batch for itself: what
    /// [`Plan::crash_at`] counts.
    pub fn calls(&self) -> u64 {
        self.disk.lock().calls()
    }

    /// What the calls since this was last asked took.
    pub fn take_cost_ns(&self) -> u64 {
        std::mem::take(&mut self.disk.lock().cost_ns)
    }

    /// Turns a bit of a file over, for good.
    pub fn rot(&self, name: &str, bit: u64) -> Result<()> {
        self.disk.lock().rot(name, bit)
    }

    /// What is durable: names and contents.
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
        // It reaches no disk: neither counted nor failing.
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
        // In an order that nobody may rely on.
        let n = pieces.len();
        let start = self.disk.lock().any_place(n);
        let (later, first) = pieces.split_at_mut(start);
        for piece in first.iter_mut().chain(later) {
            // SAFETY: the caller's promise.
            piece.result = unsafe { self.transfer_one(piece) };
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
