//! Homes in memory: units are brought there, and leave when memory is needed elsewhere.

use crate::base::status::Result;
use crate::fail;
use crate::stream::core::load::{Goal, Path, Rank};
use crate::stream::core::{Core, is_seated};
use crate::stream::plan::{Home, Seat};
use crate::stream::units::NONE;

/// How many units are brought home at once, where nobody waits for them.
const HOMECOMING: usize = 2;

impl Core {
    /// Begins to bring units home, as far as none is waited for.
    pub(super) fn bring_home(&mut self) -> Result<()> {
        let background = |load: &&super::load::Load| {
            load.goal == Some(Goal::Home) && load.rank == Rank::Background && !load.is_over()
        };
        while self.loads().filter(background).count() < HOMECOMING {
            let Some(unit) = self.homecoming.pop_front() else { return Ok(()) };
            let cell = &self.cells[unit as usize];
            if cell.home != Home::File && !cell.is_home && cell.home_load == NONE {
                self.begin_home(unit, Rank::Background);
            }
        }
        Ok(())
    }

    pub(super) fn begin_home(&mut self, unit: u32, rank: Rank) {
        let staged = self.seat == Seat::Device && self.cells[unit as usize].home == Home::Device;
        let path = if staged { Path::Staged } else { Path::Direct };
        let id = self.add_load(unit, path, rank);
        self.load(id).goal = Some(Goal::Home);
        self.load(id).unbacked = staged && self.in_place;
        self.cells[unit as usize].home_load = id;
    }

    /// Somebody waits for a unit to come home.
    pub(super) fn want_home(&mut self, unit: u32) -> Result<()> {
        let load = self.cells[unit as usize].home_load;
        if load == NONE {
            self.begin_home(unit, Rank::Wanted);
        } else {
            self.load(load).rank = Rank::Wanted;
        }
        Ok(())
    }

    /// Takes a unit out of its slot, if it is in one. False: somebody uses it there or is to,
    /// or it is on its way there, and this has to be asked again when that has ended.
    pub fn quit_slot(&mut self, unit: u32) -> Result<bool> {
        let Some(cell) = self.cells.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", self.cells.len());
        };
        let load = cell.slot_load;
        if load != NONE && self.load(load).goal.is_none() && self.load(load).rank != Rank::Wanted {
            // Read ahead: it may wait for a slot until a pass goes on.
            self.drop_load(load)?;
        }
        let cell = &mut self.cells[unit as usize];
        // Who waits for it at home is none of these: it may have to move for them.
        if cell.users > 0 || cell.promised || cell.slot_load != NONE {
            return Ok(false);
        }
        let slot = std::mem::replace(&mut cell.slot, NONE);
        if slot == NONE {
            return Ok(true);
        }
        (cell.ready, cell.kept) = (false, false);
        if std::mem::take(&mut cell.in_window) {
            self.window.retain(|&other| other != unit);
        }
        self.pool_of(unit).empty(slot)?;
        Ok(true)
    }

    /// A unit gets another home. Into memory: it is brought there. To the file: its memory
    /// may be used for something else when this has returned true; else it is on its way
    /// there, and this has to be asked again when something has arrived. That nobody uses
    /// it there is the caller's to know.
    pub fn set_home(&mut self, unit: u32, home: Home, now_ns: u64) -> Result<bool> {
        let Some(cell) = self.cells.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", self.cells.len());
        };
        let load = cell.home_load;
        if load != NONE {
            self.drop_load(load)?;
            if self.cells[unit as usize].home_load != NONE {
                return Ok(false);
            }
        }
        let load = self.cells[unit as usize].slot_load;
        if load != NONE && self.load(load).path == Path::Copied {
            // It is copied from there.
            self.drop_load(load)?;
            if self.cells[unit as usize].slot_load != NONE {
                return Ok(false);
            }
        }
        let seat = self.seat;
        let cell = &mut self.cells[unit as usize];
        (cell.home, cell.is_home) = (home, false);
        cell.seated = is_seated(seat, home, cell.on_processor);
        if home != Home::File {
            self.homecoming.push_back(unit);
        }
        self.advance(now_ns)?;
        Ok(true)
    }

    /// Whether slots are as large as a unit.
    pub fn fits(&self, unit: u32) -> bool {
        self.cells.get(unit as usize).is_some_and(|cell| cell.fits)
    }

    /// Whether the processor would use a unit where host memory is its home, although the
    /// engine computes on a device.
    pub fn is_on_processor(&self, unit: u32) -> bool {
        self.cells.get(unit as usize).is_some_and(|cell| cell.on_processor)
    }

    /// The same, said before it gets that home.
    pub fn set_processor(&mut self, unit: u32, on_processor: bool) {
        if let Some(cell) = self.cells.get_mut(unit as usize) {
            cell.on_processor = on_processor;
        }
    }
}
