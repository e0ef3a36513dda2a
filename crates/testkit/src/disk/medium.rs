//! A simulated disk: its files, and the faults of calls.

use std::collections::BTreeMap;

use crate::disk::SimOpts;
use crate::disk::content::SECTOR_BYTES;
use crate::disk::history::{Event, History};
use crate::disk::inode::Inode;
use crate::disk::names::Names;
use crate::disk::plan::{Fault, Plan, Planned, STUCK_NS};
use kvtier::base::random::Random;
use kvtier::base::status::{Error, Result, Status};
use kvtier::fail;
use kvtier::io::files::{Access, Entry, FileId, Piece};
use kvtier::io::open_files::OpenFiles;

/// Fills memory after a failed read.
const JUNK: u8 = 0xA5;

/// An open file.
#[derive(Clone)]
struct Handle {
    inode: u64,
    name: String,
    poisoned: bool,
}

/// A disk.
pub struct Disk {
    opts: SimOpts,
    random: Random,
    planned: Planned,
    names: Names,
    names_poisoned: bool,
    inodes: BTreeMap<u64, Inode>,
    next_inode: u64,
    open: OpenFiles<Handle>,
    /// Grows whenever all open files are lost.
    pub incarnation: u64,
    /// Cost of calls that was not taken yet.
    pub cost_ns: u64,
    /// The last calls.
    pub history: History,
}

/// A call to record.
pub struct Call<'a> {
    /// Function.
    pub name: &'static str,
    /// File.
    pub file: &'a str,
    /// Offset.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

fn io(what: &str) -> Error {
    Error::new(Status::Io, format!("{what}: a planned fault"))
}

impl Disk {
    /// An empty disk.
    pub fn new(seed: u64, opts: SimOpts) -> Disk {
        Disk {
            planned: Planned::new(opts.plan),
            opts,
            random: Random::new(seed),
            names: Names::default(),
            names_poisoned: false,
            inodes: BTreeMap::new(),
            next_inode: 1,
            open: OpenFiles::default(),
            incarnation: 1,
            cost_ns: 0,
            history: History::default(),
        }
    }

    /// Replaces the plan and restarts its counters.
    pub fn set_plan(&mut self, plan: Plan) {
        self.planned = Planned::new(plan);
    }

    /// Calls since the plan was set.
    pub fn calls(&self) -> u64 {
        self.planned.calls()
    }

    /// Sets the capacity.
    pub fn set_capacity(&mut self, bytes: u64) {
        self.opts.capacity_bytes = bytes;
    }

    fn strikes(&mut self, fault: Fault) -> bool {
        self.planned.strikes(fault, &mut self.random)
    }

    /// A random index of a nonempty list.
    pub fn any_place(&mut self, len: usize) -> usize {
        self.random.below(len as u64) as usize
    }

    fn cost(&mut self, ns: u64) {
        self.cost_ns = self.cost_ns.saturating_add(ns);
    }

    /// Counts, charges and records a call.
    pub fn call<T>(&mut self, call: Call, act: impl FnOnce(&mut Disk) -> Result<T>) -> Result<T> {
        let crashes = self.planned.count();
        self.cost(self.opts.costs.call_ns);
        if self.strikes(Fault::Slow) {
            self.cost(self.opts.costs.slow_ns);
        }
        if self.strikes(Fault::Stuck) {
            self.cost(STUCK_NS);
        }
        // The power fails before the call, or after it and before it returns.
        let mut result = match crashes && self.random.coin() {
            true => Err(Status::Closed.into()),
            false => act(self),
        };
        let outcome = match &result {
            Ok(_) => "fine",
            Err(error) => error.status().name(),
        };
        let Call { name, file, offset, bytes } = call;
        let number = self.planned.calls();
        self.history.add(Event { number, call: name, file: file.into(), offset, bytes, outcome });
        if crashes {
            self.crash()?;
            result = Err(Status::Closed.into());
        }
        result
    }

    /// A power failure.
    pub fn crash(&mut self) -> Result<()> {
        let (number, file) = (self.planned.calls(), String::new());
        let outcome = "all open files are lost";
        self.history.add(Event { number, call: "crash", file, offset: 0, bytes: 0, outcome });
        self.names.crash(&mut self.random);
        for inode in self.inodes.values_mut() {
            inode.crash(&mut self.random)?;
        }
        self.forget_open();
        Ok(())
    }

    /// Closes all files, as the end of their process does.
    pub fn forget_open(&mut self) {
        self.incarnation += 1;
        self.open.clear();
        self.names_poisoned = false;
        self.collect();
    }

    /// Frees files without names and handles.
    fn collect(&mut self) {
        let (names, open) = (&self.names, &self.open);
        self.inodes
            .retain(|inode, _| names.may_lead_to(*inode) || open.iter().any(|h| h.inode == *inode));
    }

    /// Free bytes.
    pub fn free_bytes(&self) -> u64 {
        let seen = |inode: &u64| {
            self.names.now().values().any(|known| known == inode)
                || self.open.iter().any(|handle| handle.inode == *inode)
        };
        let lens = self.inodes.iter().filter(|(inode, _)| seen(inode)).map(|(_, i)| i.now().len());
        self.opts.capacity_bytes.saturating_sub(lens.fold(0, u64::saturating_add))
    }

    fn inode(&mut self, inode: u64) -> Result<&mut Inode> {
        self.inodes.get_mut(&inode).ok_or_else(|| Status::NotFound.into())
    }

    fn name_fault(&mut self, what: &str) -> Result<()> {
        if self.strikes(Fault::NameError) { Err(io(what)) } else { Ok(()) }
    }

    fn room_for(&mut self, bytes: u64) -> Result<()> {
        let free = if bytes > 0 { self.free_bytes() } else { 0 };
        if self.strikes(Fault::Full) || bytes > free {
            fail!(Budget, "the disk is full: {bytes} bytes requested, {free} are free");
        }
        Ok(())
    }

    /// Lists the directory.
    pub fn list(&mut self) -> Result<Vec<Entry>> {
        self.name_fault("list")?;
        let mut entries = Vec::new();
        entries.try_reserve_exact(self.names.now().len()).map_err(|_| Status::NoMem)?;
        let bytes = |inode| self.inodes.get(inode).map_or(0, |found| found.now().len());
        let names = self.names.now().iter();
        entries.extend(names.map(|(name, i)| Entry { name: name.clone(), bytes: bytes(i) }));
        Ok(entries)
    }

    /// Creates a file.
    pub fn create(&mut self, name: &str, bytes: u64) -> Result<FileId> {
        if self.names.find(name).is_ok() {
            fail!(State, "{name} exists already");
        }
        self.name_fault(name)?;
        self.room_for(bytes)?;
        let inode = self.next_inode;
        let handle = Handle { inode, name: name.to_string(), poisoned: false };
        let file = self.open.add(handle)?;
        self.next_inode += 1;
        self.inodes.insert(inode, Inode::new(bytes));
        if let Err(error) = self.names.create(name, inode) {
            self.close(file);
            return Err(error);
        }
        Ok(file)
    }

    /// Opens a file.
    pub fn open(&mut self, name: &str) -> Result<FileId> {
        let inode = self.names.find(name)?;
        self.name_fault(name)?;
        self.open.add(Handle { inode, name: name.to_string(), poisoned: false })
    }

    /// Length of a file.
    pub fn len(&mut self, file: FileId) -> Result<u64> {
        let inode = self.open.get(file)?.inode;
        Ok(self.inode(inode)?.now().len())
    }

    /// Closes a file.
    pub fn close(&mut self, file: FileId) {
        self.open.remove(file);
        self.collect();
    }

    /// Renames a file.
    pub fn rename(&mut self, from: &str, to: &str) -> Result<()> {
        self.names.find(from)?;
        self.name_fault(from)?;
        self.names.rename(from, to)
    }

    /// Removes a file.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        self.names.find(name)?;
        self.name_fault(name)?;
        self.names.remove(name)
    }

    /// Makes names durable.
    pub fn sync_names(&mut self) -> Result<()> {
        self.cost(self.opts.costs.sync_ns);
        if self.names_poisoned {
            return Err(kvtier::io::open_file::poison("the directory"));
        }
        if let Err(error) = self.name_fault("sync_names") {
            self.names_poisoned = true;
            return Err(error);
        }
        if !self.strikes(Fault::LostSync) {
            self.names.sync();
            self.collect();
        }
        Ok(())
    }

    /// Makes a file's bytes durable.
    pub fn sync(&mut self, file: FileId) -> Result<()> {
        self.cost(self.opts.costs.sync_ns);
        let Handle { inode, name, poisoned } = self.open.get(file)?.clone();
        if poisoned {
            return Err(kvtier::io::open_file::poison(&name));
        }
        if self.strikes(Fault::SyncError) {
            self.open.get(file)?.poisoned = true;
            let mut random = self.random.clone();
            let failed = self.inode(inode)?.fail_sync(&mut random);
            self.random = random;
            return failed.and(Err(io(&name)));
        }
        if self.strikes(Fault::LostSync) {
            return Ok(());
        }
        self.inode(inode)?.sync()
    }

    /// Name of an open file, for the history.
    pub fn name_of(&mut self, file: FileId) -> String {
        self.open.get(file).map_or(format!("{file:?}"), |handle| handle.name.clone())
    }

    /// Transfers a checked piece.
    ///
    /// # Safety
    /// As for [`kvtier::io::files::Files::transfer`].
    pub unsafe fn transfer(&mut self, piece: &Piece) -> Result<()> {
        let bytes = piece.bytes();
        self.cost(self.opts.costs.kib_ns.saturating_mul(bytes.div_ceil(1024)));
        let inode = self.open.get(piece.file)?.inode;
        // SAFETY: the caller's promise, for either direction.
        let done = unsafe {
            match piece.access {
                Access::Read => self.read(inode, piece),
                Access::Write => self.write(inode, piece),
            }
        };
        done.map_err(|error| error.within(&self.name_of(piece.file)))
    }

    /// # Safety
    /// The memory of the piece may be written.
    unsafe fn read(&mut self, inode: u64, piece: &Piece) -> Result<()> {
        let bytes = piece.bytes();
        if bytes > 0 && self.strikes(Fault::BitRot) {
            let bit = piece.offset.saturating_mul(8) + self.random.below(bytes * 8);
            self.inode(inode)?.rot(bit)?;
        }
        let failed = self.strikes(Fault::ReadError);
        let short = self.strikes(Fault::ShortRead).then(|| self.random.below(bytes));
        let content = self.inode(inode)?.now();
        let end = piece.offset.saturating_add(bytes);
        let available = content.len().saturating_sub(piece.offset).min(bytes);
        let good = if failed { 0 } else { short.unwrap_or(available).min(available) };
        let mut at = 0;
        for part in piece.parts.iter().filter(|part| part.bytes > 0) {
            // SAFETY: the caller's promise; nothing else accesses it.
            let out = unsafe { std::slice::from_raw_parts_mut(part.address, part.bytes as usize) };
            content.read(piece.offset + at, out);
            // Bytes that were not read are undefined.
            let known = good.saturating_sub(at).min(part.bytes) as usize;
            out.iter_mut().skip(known).for_each(|byte| *byte = JUNK);
            at += part.bytes;
        }
        if failed {
            return Err(io("a read"));
        }
        if good < bytes {
            fail!(Io, "a read of {bytes} bytes up to {end} ended after {good}");
        }
        Ok(())
    }

    /// # Safety
    /// The memory of the piece may be read.
    unsafe fn write(&mut self, inode: u64, piece: &Piece) -> Result<()> {
        let bytes = piece.bytes();
        let mut ranges = [&[][..]; kvtier::io::files::MAX_PARTS];
        for (range, part) in ranges.iter_mut().zip(&piece.parts) {
            if part.bytes > 0 {
                // SAFETY: the caller's promise; nothing writes it.
                *range = unsafe { std::slice::from_raw_parts(part.address, part.bytes as usize) };
            }
        }
        let len = self.inode(inode)?.now().len();
        let end = piece.offset.saturating_add(bytes);
        self.room_for(end.saturating_sub(len))?;
        if self.strikes(Fault::WriteError) {
            let sectors = bytes.div_ceil(SECTOR_BYTES);
            for at in (0..sectors).map(|sector| sector * SECTOR_BYTES) {
                if self.random.coin() {
                    let piece_of = cut(&ranges, at, SECTOR_BYTES);
                    self.inode(inode)?.write(piece.offset + at, &piece_of)?;
                }
            }
            return Err(io("a write"));
        }
        if self.strikes(Fault::ShortWrite) {
            let most = self.random.below(bytes);
            self.inode(inode)?.write(piece.offset, &cut(&ranges, 0, most))?;
            fail!(Io, "a write of {bytes} bytes at {} ended after {most}", piece.offset);
        }
        let mut offset = piece.offset;
        if self.strikes(Fault::Misdirected) && bytes < len {
            let align = self.opts.align_bytes.max(1);
            offset = self.random.below((len - bytes) / align + 1) * align;
        }
        let most = self.opts.capacity_bytes.max(1);
        let inode = self.inode(inode)?;
        if bytes > 0 {
            inode.write(offset, &ranges)?;
        }
        if inode.pending_bytes() > most {
            inode.write_back(most / 2)?;
        }
        Ok(())
    }

    /// Flips a bit of a file.
    pub fn rot(&mut self, name: &str, bit: u64) -> Result<()> {
        let inode = self.names.find(name)?;
        if bit / 8 >= self.inode(inode)?.now().len() {
            fail!(Invalid, "{name} has no bit {bit}");
        }
        self.inode(inode)?.rot(bit)
    }

    /// Content after a power failure that loses all unsynced writes.
    pub fn durable(&self) -> Result<BTreeMap<String, Vec<u8>>> {
        let names = self.names.durable().iter();
        let file = |(name, inode): (&String, &u64)| {
            let content = self.inodes.get(inode).map(|found| found.durable().to_vec());
            Ok((name.clone(), content.transpose()?.unwrap_or_default()))
        };
        names.map(file).collect()
    }
}

/// A part of consecutive ranges.
fn cut<'a, const N: usize>(ranges: &[&'a [u8]; N], from: u64, bytes: u64) -> [&'a [u8]; N] {
    let (mut skip, mut left) = (from as usize, bytes as usize);
    ranges.map(|range| {
        let start = skip.min(range.len());
        let stop = start + left.min(range.len() - start);
        skip -= start;
        left -= stop - start;
        range.get(start..stop).unwrap_or_default()
    })
}
