//! What is to be done: reads of files, copies to the device, memory to be given back; and
//! what became of it.

use crate::base::status::{Result, Status};
use crate::device::Event;
use crate::stream::core::load::{Goal, Load, Path};
use crate::stream::core::record::Stage;
use crate::stream::core::{Core, STAGING_SPARE};
use crate::stream::plan::Home;
use crate::stream::units::{Chunk, NONE};

/// Where a read goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum To {
    /// To where the chunk belongs in the unit's image there.
    Place(Goal),
    /// Into a staging slot.
    Staging(u32),
}

/// Where a copy comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// A staging slot.
    Staging(u32),
    /// The unit's home in host memory.
    Home,
}

/// For a thread that reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Read {
    /// A chunk is to be read.
    Chunk {
        /// Of which load; the core's own.
        load: u32,
        /// Of which unit.
        unit: u32,
        /// Which of its chunks.
        at: u32,
        /// What that is.
        chunk: Chunk,
        /// Where to.
        to: To,
        /// When it was taken.
        since_ns: u64,
    },
    /// The memory of a unit that has left is to be given back, before another's is filled.
    Clear {
        /// For which load; the core's own.
        load: u32,
        /// Whose.
        unit: u32,
    },
}

/// For the thread that copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copy {
    /// Of which load; the core's own.
    pub load: u32,
    /// Of which unit.
    pub unit: u32,
    /// What.
    pub chunk: Chunk,
    /// From where.
    pub from: From,
    /// To where.
    pub to: Goal,
    /// The event that it has to wait for.
    pub after: Option<Event>,
    /// When it was taken.
    pub since_ns: u64,
}

/// How far a copy is.
#[derive(Clone, Debug, PartialEq)]
pub enum Copied {
    /// The device has it; this event says when it is done.
    Issued(Event),
    /// It is done, well or not.
    Done(Result<()>),
}

impl Core {
    /// What a reader does next.
    pub fn take_read(&mut self, now_ns: u64) -> Option<Read> {
        let staging = self.staging.len();
        let best = |may: &dyn Fn(&Load) -> bool, loads: &[Option<Load>]| {
            let all = loads.iter().enumerate().filter_map(|(i, l)| Some((i, l.as_ref()?)));
            let able = all.filter(|(_, load)| may(load));
            able.min_by_key(|(_, load)| (load.rank, load.age)).map(|(id, _)| id as u32)
        };
        let clear = |load: &Load| load.clear != NONE && !load.clearing;
        while let Some(id) = best(&clear, &self.loads) {
            let unit = self.load(id).clear;
            if self.has_memory(unit) {
                // It has come back meanwhile: what it had is what it has.
                self.load(id).clear = NONE;
                continue;
            }
            self.load(id).clearing = true;
            self.clearing.push(unit);
            return Some(Read::Clear { load: id, unit });
        }
        let clearing = &self.clearing;
        // What has no slot yet leaves some staging to what has: that is never stuck.
        let may = |load: &Load| {
            let room = match (load.path, load.goal) {
                // What can be read to its slot waits for one, not in staging.
                (Path::Staged, None) => staging > STAGING_SPARE && !self.lands,
                (Path::Staged, Some(_)) => staging > 0,
                _ => true,
            };
            room && load.wants_read() && !clearing.contains(&load.unit)
        };
        let id = best(&may, &self.loads)?;
        let (path, unit) = (self.load(id).path, self.load(id).unit);
        let to = match (path, self.load(id).goal) {
            (Path::Direct, Some(goal)) => To::Place(goal),
            _ => To::Staging(self.staging.pop()?),
        };
        let load = self.load(id);
        let at = load.next_read;
        load.next_read += 1;
        load.reading += 1;
        let chunk = self.chunks.of_unit(unit)[at as usize];
        Some(Read::Chunk { load: id, unit, at, chunk, to, since_ns: now_ns })
    }

    /// Whether a unit's own memory is in use, where each has its own.
    pub(super) fn has_memory(&self, unit: u32) -> bool {
        let cell = &self.cells[unit as usize];
        cell.slot != NONE || cell.home != Home::File
    }

    /// Where a chunk belongs that is to be read into staging, if its unit has memory there; and
    /// the event after which that may be written.
    pub fn landing(&self, read: &Read) -> Option<(Goal, Option<Event>)> {
        let Read::Chunk { load, to: To::Staging(_), .. } = *read else { return None };
        let load = self.loads.get(load as usize)?.as_ref()?;
        // Where memory has yet to be put behind the addresses it goes by way of staging.
        load.goal.filter(|_| !load.unbacked).map(|goal| (goal, load.after))
    }

    /// A chunk was read to where it belongs, not into staging. True when somebody who waits
    /// should ask again.
    pub fn read_landed(&mut self, read: &Read, now_ns: u64) -> Result<bool> {
        let Read::Chunk { load: id, unit, chunk, to: To::Staging(slot), since_ns, .. } = *read
        else {
            return Err(Status::Invalid.into());
        };
        self.staging.push(slot);
        let load = self.load(id);
        load.reading -= 1;
        load.landed += 1;
        load.done += 1;
        // Who takes units early may have waited for this one alone.
        let issued = load.is_issued();
        self.record.moved(Stage::Read, unit, chunk.bytes, since_ns, now_ns, true);
        self.settle(id, now_ns).map(|news| news || issued)
    }

    /// A read has ended. True when somebody who waits should ask again.
    pub fn read_done(&mut self, read: &Read, result: Result<()>, now_ns: u64) -> Result<bool> {
        let (id, at, bytes, to, since_ns) = match *read {
            Read::Chunk { load, at, chunk, to, since_ns, .. } => {
                (load, at, chunk.bytes, to, since_ns)
            }
            Read::Clear { load: id, unit } => {
                self.clearing.retain(|&other| other != unit);
                let load = self.load(id);
                (load.clearing, load.clear) = (false, NONE);
                return self.settle(id, now_ns);
            }
        };
        let load = self.load(id);
        load.reading -= 1;
        let (unit, over) = (load.unit, load.is_over());
        let fine = result.is_ok();
        if let Err(error) = result {
            load.failed.get_or_insert(error);
        } else if let (To::Staging(slot), false) = (to, over) {
            load.staged.push_back((at, slot));
        } else {
            load.done += 1;
        }
        if let (To::Staging(slot), true) = (to, over || !fine) {
            self.staging.push(slot);
        }
        self.record.moved(Stage::Read, unit, bytes, since_ns, now_ns, fine);
        self.settle(id, now_ns)
    }

    /// What is copied next.
    pub fn take_copy(&mut self, now_ns: u64) -> Option<Copy> {
        let able = self.loads.iter().enumerate().filter_map(|(id, load)| {
            let load = load.as_ref()?;
            let is_home = self.cells[load.unit as usize].is_home;
            load.wants_copy(is_home).then_some((load.rank, load.age, id as u32))
        });
        let (_, _, id) = able.min()?;
        let load = self.load(id);
        let unit = load.unit;
        let to = load.goal?;
        let (at, from) = match load.path {
            Path::Staged => {
                let (at, slot) = load.staged.pop_front()?;
                (at, From::Staging(slot))
            }
            _ => (load.next_copy, From::Home),
        };
        // Each waits for the one before it, so who waits for the last hears of any that fails.
        let after = match (load.copying, load.issued) {
            (0, 0) => load.after,
            (0, _) => None,
            _ => load.event,
        };
        load.next_copy += 1;
        load.copying += 1;
        let chunk = self.chunks.of_unit(unit)[at as usize];
        Some(Copy { load: id, unit, chunk, from, to, after, since_ns: now_ns })
    }

    /// The event that a copy was to wait for has ended, well or not: nobody waits for it again.
    pub fn has_waited(&mut self, copy: &Copy) {
        let load = self.load(copy.load);
        if load.after == copy.after {
            load.after = None;
        }
    }

    /// A copy has come further. True when somebody who waits should ask again.
    pub fn copied(&mut self, copy: &Copy, how: Copied, now_ns: u64) -> Result<bool> {
        let id = copy.load;
        let result = match how {
            Copied::Issued(event) => {
                let load = self.load(id);
                load.event = Some(event);
                load.issued += 1;
                return Ok(load.is_issued());
            }
            Copied::Done(result) => result,
        };
        let load = self.load(id);
        load.copying -= 1;
        let fine = result.is_ok();
        match result {
            Ok(()) => load.done += 1,
            Err(error) => drop(load.failed.get_or_insert(error)),
        }
        if let From::Staging(slot) = copy.from {
            self.staging.push(slot);
        }
        let bytes = copy.chunk.bytes;
        self.record.moved(Stage::Copy, copy.unit, bytes, copy.since_ns, now_ns, fine);
        self.settle(id, now_ns)
    }

    /// Something of a load has ended: perhaps it has, too.
    pub(super) fn settle(&mut self, id: u32, now_ns: u64) -> Result<bool> {
        let load = self.load(id);
        let news = if load.is_over() {
            while let Some((_, slot)) = self.load(id).staged.pop_front() {
                self.staging.push(slot);
            }
            if !self.load(id).is_still() {
                return Ok(false);
            }
            self.end_failed(id)?;
            true
        } else if load.done == load.chunks && load.is_still() {
            self.arrive(id)?;
            true
        } else {
            false
        };
        self.advance(now_ns)?;
        Ok(news)
    }

    fn arrive(&mut self, id: u32) -> Result<()> {
        let Some(load) = self.end_load(id) else { return Ok(()) };
        let cell = &mut self.cells[load.unit as usize];
        if load.goal == Some(Goal::Home) {
            (cell.home_load, cell.is_home) = (NONE, true);
            if cell.seated {
                self.opened.push(load.unit);
            }
            return Ok(());
        }
        (cell.slot_load, cell.ready) = (NONE, true);
        let (slot, used) = (cell.slot, cell.users > 0);
        if !used && cell.waiters > 0 {
            cell.promised = true;
            return Ok(());
        }
        if cell.is_expert && !used {
            // It stays until who asked for it has come back for it.
            cell.kept = true;
            self.kept.push(load.unit);
            return Ok(());
        }
        self.pool_of(load.unit).let_go(slot)
    }

    /// A load that failed, or is not wanted, has nothing under way any more.
    fn end_failed(&mut self, id: u32) -> Result<()> {
        let Some(load) = self.end_load(id) else { return Ok(()) };
        let cell = &mut self.cells[load.unit as usize];
        if load.goal == Some(Goal::Home) {
            cell.home_load = NONE;
            let waiting = cell.slot_load;
            if waiting != NONE && self.load(waiting).path == Path::Copied {
                // What it was to be copied from does not come.
                self.load(waiting).failed = load.failed.clone();
                self.drop_load(waiting)?;
            }
        } else {
            self.leave_slot(&load)?;
        }
        self.record.lost(&load);
        if let Some(error) = load.failed {
            self.cells[load.unit as usize].error = Some(error);
        }
        Ok(())
    }

    /// A load to a slot has ended before it was there.
    fn leave_slot(&mut self, load: &Load) -> Result<()> {
        let cell = &mut self.cells[load.unit as usize];
        cell.slot_load = NONE;
        let (slot, in_window) = (cell.slot, std::mem::take(&mut cell.in_window));
        let used = cell.users > 0;
        if !used {
            (cell.slot, cell.event) = (NONE, None);
        }
        if in_window {
            self.window.retain(|&unit| unit != load.unit);
        }
        if slot == NONE {
            return Ok(());
        }
        let pool = self.pool_of(load.unit);
        if load.clear != NONE {
            // Nothing was written yet, and what was to be given back is still there.
            pool.set_dirty(slot, load.clear);
        }
        if load.issued == 0 {
            // Whom this was to wait for, the next one has to.
            pool.set_after(slot, load.after);
        }
        if !used {
            return pool.empty(slot);
        }
        // Who was given it early has the slot until it is given back.
        if in_window {
            pool.let_go(slot)?;
        }
        pool.let_go(slot)
    }

    fn end_load(&mut self, id: u32) -> Option<Load> {
        let load = self.loads[id as usize].take();
        self.spare_loads.push(id);
        load
    }

    /// A load is not wanted any more.
    pub(super) fn drop_load(&mut self, id: u32) -> Result<()> {
        let load = self.load(id);
        if load.is_issued() {
            // It is all with the device, and somebody may have been given it: it ends itself.
            return Ok(());
        }
        load.dropped = true;
        while let Some((_, slot)) = self.load(id).staged.pop_front() {
            self.staging.push(slot);
        }
        if self.load(id).is_still() { self.end_failed(id) } else { Ok(()) }
    }
}
