//! Inspection of a streamer: plan, counters, links, loading progress; and verification of units on
//! demand.

use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::Ordering;
use crate::fail;
use crate::io::model_files::identity::identities;
use crate::stream::model::Model;
use crate::stream::plan::{Forecast, Links, Plan, PlanOptions};
use crate::stream::scheduler::{LayerCount, Mark, Stats};
use crate::stream::streamer::{Shared, Streamer};
use crate::stream::units::{CHUNK_ALIGN_BYTES, Units, unknown_unit};

/// Progress of loading the resident units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Units that are planned to be resident and are not yet.
    pub missing: u64,
    /// Units that are planned to be resident.
    pub residents: u64,
    /// Bytes that were read so far, for any purpose.
    pub read_bytes: u64,
}

/// Use of a link while it was busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// Bytes that crossed the link.
    pub bytes: u64,
    /// Sum of the durations of transfers: more than the elapsed time where transfers overlapped.
    pub ns: u64,
    /// Measured rate of the link alone, in bytes a second; 0 = not measured.
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

    /// The current plan.
    pub fn plan(&self) -> Plan {
        self.shared.state.lock().plan.clone()
    }

    fn planned(&self) -> (Plan, PlanOptions) {
        let state = self.shared.state.lock();
        (state.plan.clone(), state.plan_options.clone())
    }

    /// The plan as text.
    pub fn plan_text(&self) -> String {
        let (plan, plan_options) = self.planned();
        plan.text(&self.shared.inputs(&plan_options))
    }

    /// The plan as JSON.
    pub fn plan_json(&self) -> String {
        let (plan, plan_options) = self.planned();
        plan.json(&self.shared.inputs(&plan_options))
    }

    /// The forecast for other links; rates of 0 are replaced by the current ones.
    pub fn what_if(&self, links: Links) -> Result<Forecast> {
        let (plan, plan_options) = self.planned();
        let links = links.or(self.shared.links);
        plan.what_if(&self.shared.inputs(&plan_options), links)
    }

    /// The method by which files are read, and why no faster one is used.
    pub fn engine(&self) -> (String, Option<String>) {
        let files = &self.shared.files;
        (files.engine().into(), files.fallback().map(Into::into))
    }

    /// The address range of units in place: start and length.
    pub fn range(&self) -> Option<(u64, u64)> {
        self.shared.state.lock().weight_memory.range()
    }

    /// The fixed address of a unit in place, and its length.
    pub fn fixed(&self, unit: u32) -> Result<(u64, u64)> {
        let units = &self.shared.units.units;
        let Some(found) = units.get(unit as usize) else {
            return Err(unknown_unit(unit, units.len()));
        };
        let state = self.shared.state.lock();
        if state.weight_memory.range().is_none() {
            fail!(
                State,
                "units are not in place, so they have no fixed addresses: use the address of a \
                 lease, or open with `in_place`"
            );
        }
        let on_processor = state.scheduler.is_on_processor(unit);
        Ok((state.weight_memory.fixed_address(unit, on_processor)?, found.image_bytes))
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let state = self.shared.state.lock();
        let mut stats = *state.scheduler.stats();
        stats.acquires += self.shared.fast_acquires.load(Ordering::Relaxed);
        stats.waited = state.wait_count;
        if let Some(direct_reader) = &self.shared.direct_reader {
            (stats.direct_bytes, stats.direct_failed) = direct_reader.counts();
        }
        [stats.wait_read_ns, stats.wait_copy_ns, stats.wait_slot_ns] = state.waits;
        stats
    }

    /// Use of the disk and of the device link.
    pub fn links(&self) -> [LinkUse; 2] {
        let (stats, links) = (self.stats(), self.shared.links);
        let of = |bytes, ns, ceiling| LinkUse { bytes, ns, ceiling };
        [
            of(stats.read_bytes, stats.read_ns, links.disk),
            of(stats.copied_bytes, stats.copy_ns, links.device),
        ]
    }

    /// Counters of experts by layer.
    pub fn layers(&self) -> Vec<LayerCount> {
        self.shared.state.lock().scheduler.layers().to_vec()
    }

    /// The recorded marks.
    pub fn marks(&self) -> Vec<Mark> {
        self.shared.state.lock().scheduler.marks()
    }

    /// Progress of loading the resident units.
    pub fn progress(&self) -> Progress {
        let state = self.shared.state.lock();
        let file = crate::stream::plan::Residency::File;
        Progress {
            missing: (state.scheduler.missing_residents() + state.moves.len()) as u64,
            residents: state.plan.residencies.iter().filter(|&&residency| residency != file).count()
                as u64,
            read_bytes: state.scheduler.stats().read_bytes,
        }
    }

    /// Waits until all planned units are resident, until a deadline; 0 = no deadline.
    pub fn load(&self, deadline_ns: u64) -> Result<()> {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        loop {
            state.check()?;
            if let Some(error) = state.scheduler.resident_error() {
                return Err(error);
            }
            let is_freeing = state.weight_memory.is_freeing();
            if state.scheduler.missing_residents() == 0 && !state.is_moving() && !is_freeing {
                return Ok(());
            }
            if !shared.wait(&mut state, deadline_ns) {
                let missing = state.scheduler.missing_residents();
                fail!(Timeout, "{missing} units are not resident yet");
            }
        }
    }

    /// The checksum of a unit, if all of it is known.
    pub fn sum_of(&self, unit: u32) -> Result<u64> {
        let units = self.shared.units.units.len();
        if unit as usize >= units {
            return Err(unknown_unit(unit, units));
        }
        self.shared.sums.sum_of_unit(unit).ok_or_else(|| Status::NotFound.into())
    }
}

impl Shared {
    /// Saves the checksums. Without them, only time is lost.
    pub(super) fn save_sums(&self) {
        let Some(path) = &self.sidecar else { return };
        if self.sums.unsaved() == 0 {
            return;
        }
        let saved = identities(&*self.files).and_then(|files| self.sums.save(path, &files));
        if let Err(error) = saved {
            log::warn!("checksums were not saved: {error}");
        }
    }
}

// Verification of units on demand.

impl Streamer {
    /// Reads a unit from its files, not from memory, and compares it with the known checksums;
    /// unknown checksums are stored. The calling thread reads. [`Status::Corrupt`] on a mismatch.
    /// Returns the unit's checksum.
    pub fn verify(&self, unit: u32) -> Result<u64> {
        let shared = &self.shared;
        shared.state.lock().check()?;
        let Some(of) = shared.units.units.get(unit as usize) else {
            return Err(unknown_unit(unit, shared.units.units.len()));
        };
        let account = shared.account.clone();
        let request =
            AllocationRequest { bytes: CHUNK_ALIGN_BYTES, account, ..AllocationRequest::default() };
        let buffer = Buffer::map(&request, shared.runtime.faults())?;
        let mut pieces = Vec::new();
        for chunk in of.chunks(CHUNK_ALIGN_BYTES) {
            let address = buffer.address() as u64 + (chunk.offset - chunk.read_offset);
            // SAFETY: an aligned chunk is no larger than the buffer, which belongs to this call.
            unsafe { shared.read(unit, &chunk, address, true, &mut pieces)? };
        }
        shared.sums.sum_of_unit(unit).ok_or_else(|| Status::State.into())
    }
}
