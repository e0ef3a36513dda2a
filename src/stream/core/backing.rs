//! Memory behind addresses that never change, where a device computes: it follows the units, and
//! nothing is copied before it is there.

use crate::base::status::Result;
use crate::device::Event;
use crate::stream::core::Core;
use crate::stream::core::load::Goal;
use crate::stream::plan::Seat;

/// For the thread that copies: memory is to be put behind a unit's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// For which load; the core's own.
    pub load: u32,
    /// Whose addresses.
    pub unit: u32,
    /// Which memory: that of its home, or of a slot.
    pub to: Goal,
    /// The event after which that is nobody's.
    pub after: Option<Event>,
}

impl Core {
    /// Whether units have memory only while they are there, and of a device.
    pub(super) fn is_backed(&self) -> bool {
        self.in_place && self.seat == Seat::Device
    }

    /// What wants memory, what is needed first before the rest. Each is to be heard of again
    /// ([`Core::backed`]).
    pub fn take_backings(&mut self) -> Vec<Backing> {
        if !self.is_backed() {
            return Vec::new();
        }
        let mut found = Vec::new();
        for (id, load) in (0..).zip(&mut self.loads) {
            let Some(load) = load.as_mut().filter(|load| load.wants_memory()) else { continue };
            let Some(to) = load.goal else { continue };
            load.backing = true;
            let job = Backing { load: id, unit: load.unit, to, after: load.after };
            found.push((load.rank, load.age, job));
        }
        found.sort_unstable_by_key(|(rank, age, _)| (*rank, *age));
        found.into_iter().map(|(_, _, job)| job).collect()
    }

    /// What became of one: it has memory, it has to wait (false), or it gets none. True when
    /// somebody who waits should ask again.
    pub fn backed(&mut self, job: &Backing, result: Result<bool>, now_ns: u64) -> Result<bool> {
        let load = self.load(job.load);
        load.backing = false;
        match result {
            Ok(true) => (load.unbacked, load.after) = (false, None),
            Ok(false) => {}
            Err(error) => drop(load.failed.get_or_insert(error)),
        }
        if load.is_over() { self.settle(job.load, now_ns) } else { Ok(false) }
    }

    /// The event after which the memory of a slot is nobody's, also where the next has it
    /// already and has not begun.
    pub fn slot_event(&self, slot: Goal) -> Option<Event> {
        let of_load = self.loads().find(|load| load.goal == Some(slot) && load.unbacked);
        let of_slot = match slot {
            Goal::Home => None,
            Goal::Line(slot) => self.line.after(slot),
            Goal::Expert(slot) => self.experts.after(slot),
        };
        of_slot.or(of_load.and_then(|load| load.after))
    }
}
