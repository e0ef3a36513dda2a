//! What a streamer is, has done, and how fast its links were.

use crate::base::status::{Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::fail;
use crate::io::fixed::identity::identities;
use crate::stream::core::{LayerCount, Mark, Stats};
use crate::stream::model::Model;
use crate::stream::plan::{Forecast, Links, Plan, Wishes};
use crate::stream::streamer::{Shared, Streamer};
use crate::stream::units::Units;

/// How far the residents are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Units that have to come home and have not.
    pub missing: u64,
    /// Units whose home is in memory.
    pub homes: u64,
    /// Bytes read so far, for whatever.
    pub read_bytes: u64,
}

/// What a link did, in the time that it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// Bytes that crossed it.
    pub bytes: u64,
    /// How long transfers took, added up: more than the time that passed where several
    /// were under way.
    pub ns: u64,
    /// What it was measured to do alone, in bytes a second; 0 = not measured.
    pub ceiling: u64,
}

impl Streamer {
    /// Whether the engine computes on a device.
    pub fn has_device(&self) -> bool {
        self.shared.device.is_some()
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.shared.model
    }

    /// Its units.
    pub fn units(&self) -> &Units {
        &self.shared.units
    }

    /// Who lives where now.
    pub fn plan(&self) -> Plan {
        self.shared.state.lock().plan.clone()
    }

    fn planned(&self) -> (Plan, Wishes) {
        let state = self.shared.state.lock();
        (state.plan.clone(), state.wishes.clone())
    }

    /// The plan for humans.
    pub fn plan_text(&self) -> String {
        let (plan, wishes) = self.planned();
        plan.text(&self.shared.inputs(&wishes))
    }

    /// The plan for programs.
    pub fn plan_json(&self) -> String {
        let (plan, wishes) = self.planned();
        plan.json(&self.shared.inputs(&wishes))
    }

    /// What a pass would take on other links; 0 = as they are.
    pub fn what_if(&self, links: Links) -> Result<Forecast> {
        let (plan, wishes) = self.planned();
        let links = links.or(self.shared.links);
        plan.what_if(&self.shared.inputs(&wishes), links)
    }

    /// How files are read, for humans, and why not better.
    pub fn engine(&self) -> (String, Option<String>) {
        let files = &self.shared.files;
        (files.engine().into(), files.fallback().map(Into::into))
    }

    /// The addresses of units in place: the first, and how many bytes.
    pub fn range(&self) -> Option<(u64, u64)> {
        self.shared.state.lock().places.range()
    }

    /// The address of a unit in place, and how many bytes it has.
    pub fn fixed(&self, unit: u32) -> Result<(u64, u64)> {
        let units = &self.shared.units.units;
        let Some(found) = units.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", units.len());
        };
        let state = self.shared.state.lock();
        if state.places.range().is_none() {
            fail!(State, "units are not in place: they have the addresses that they are had at");
        }
        let on_processor = state.core.is_on_processor(unit);
        Ok((state.places.fixed(unit, on_processor)?, found.image_bytes))
    }

    /// What it has done.
    pub fn stats(&self) -> Stats {
        let state = self.shared.state.lock();
        let mut stats = *state.core.stats();
        stats.acquires += self.shared.quick.load(Ordering::Relaxed);
        stats.waited = state.waited;
        if let Some(straight) = &self.shared.straight {
            (stats.direct_bytes, stats.direct_failed) = straight.counts();
        }
        [stats.wait_read_ns, stats.wait_copy_ns, stats.wait_slot_ns] = state.waits;
        stats
    }

    /// Disk and device link.
    pub fn links(&self) -> [LinkUse; 2] {
        let (stats, links) = (self.stats(), self.shared.links);
        let of = |bytes, ns, ceiling| LinkUse { bytes, ns, ceiling };
        [
            of(stats.read_bytes, stats.read_ns, links.disk),
            of(stats.copied_bytes, stats.copy_ns, links.device),
        ]
    }

    /// Experts by layer.
    pub fn layers(&self) -> Vec<LayerCount> {
        self.shared.state.lock().core.layers().to_vec()
    }

    /// The last marks.
    pub fn marks(&self) -> Vec<Mark> {
        self.shared.state.lock().core.marks()
    }

    /// How far the residents are.
    pub fn progress(&self) -> Progress {
        let state = self.shared.state.lock();
        let file = crate::stream::plan::Home::File;
        Progress {
            missing: (state.core.missing_homes() + state.moves.len()) as u64,
            homes: state.plan.homes.iter().filter(|&&home| home != file).count() as u64,
            read_bytes: state.core.stats().read_bytes,
        }
    }

    /// Waits until all residents are at home, until a deadline (0 = for ever).
    pub fn load(&self, deadline_ns: u64) -> Result<()> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        loop {
            state.check()?;
            if let Some(error) = state.core.home_error() {
                return Err(error);
            }
            let is_leaving = state.places.is_leaving();
            if state.core.missing_homes() == 0 && !state.is_moving() && !is_leaving {
                return Ok(());
            }
            let now = shared.now_ns();
            if deadline_ns == 0 {
                shared.arrived.wait(&mut state);
            } else if now >= deadline_ns {
                fail!(Timeout, "{} units are not at home yet", state.core.missing_homes());
            } else {
                shared.arrived.wait_for(&mut state, deadline_ns - now);
            }
        }
    }

    /// The checksum of a unit, if all of it has been looked at.
    pub fn sum_of(&self, unit: u32) -> Result<u64> {
        let units = self.shared.units.units.len();
        if unit as usize >= units {
            fail!(Invalid, "unit {unit} of {units}");
        }
        self.shared.sums.sum_of_unit(unit).ok_or_else(|| Status::NotFound.into())
    }
}

impl Shared {
    /// Keeps the checksums for the next time. Without them nothing is lost but time.
    pub(super) fn save_sums(&self) {
        let Some(path) = &self.sidecar else { return };
        if self.sums.unsaved() == 0 {
            return;
        }
        let saved = identities(&*self.files).and_then(|files| self.sums.save(path, &files));
        if let Err(error) = saved {
            log::warn!("checksums were not kept: {error}");
        }
    }
}
