//! Units in a row that have the same home.

use crate::stream::plan::{Home, Inputs, Plan};
use crate::stream::units::Role;

/// So many units in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first one.
    pub first: usize,
    /// The last one.
    pub last: usize,
    /// Their home.
    pub home: Home,
    /// They are used where they are.
    pub on_processor: bool,
}

/// Units and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub units: u64,
    pub bytes: u64,
}

pub(super) const HOMES: [(Home, &str); 3] =
    [(Home::Device, "device"), (Home::Host, "host"), (Home::File, "file")];

pub(super) fn name_of(home: Home) -> &'static str {
    HOMES.iter().find(|(one, _)| *one == home).map_or("", |(_, name)| name)
}

impl Plan {
    /// The runs, experts left out: they would be most of it, and say little.
    pub(super) fn runs(&self, inputs: &Inputs) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let units = inputs.units.units.iter().zip(&self.homes).zip(&self.on_processor);
        for (i, ((unit, &home), &on_processor)) in units.enumerate() {
            if unit.role == Role::Expert {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.home == home && run.on_processor == on_processor => run.last = i,
                _ => runs.push(Run { first: i, last: i, home, on_processor }),
            }
        }
        runs
    }

    /// How many units a home has, of experts or of all others.
    pub(super) fn count(&self, inputs: &Inputs, home: Home, experts: bool) -> Count {
        let units = inputs.units.units.iter().zip(&self.homes);
        let these =
            units.filter(|(unit, of)| **of == home && (unit.role == Role::Expert) == experts);
        these.fold(Count::default(), |count, (unit, _)| Count {
            units: count.units + 1,
            bytes: count.bytes + self.taken_by(unit.image_bytes, home),
        })
    }
}
