//! Syncs: what is written becomes durable, and who waits for that is told.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::Tier;
use crate::base::status::Error;
use crate::meta::chunks::{Cell, Gone, Place};
use crate::meta::index::Slot;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::Part;
use crate::store::state::transfer::{Level, Move};
use crate::store::state::work::SyncBatch;
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Mark, Spot};

/// Writes that nobody waits for are synced when there are so many.
pub(super) const MOST_FRESH: usize = 1 << 16;
/// No move.
const NOBODY: u32 = u32::MAX;

/// A record of a chunk that was written, and may not be durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fresh {
    pub mark: Mark,
    /// The block of the mark's segment at which it starts.
    pub record: Option<u32>,
}

/// For each move, which of its marks are durable now, and which never will be.
type Synced = BTreeMap<(u32, Mark), bool>;

impl StoreState {
    /// Whether a move that has ended otherwise has to wait for a sync.
    pub(super) fn commits_before_end(&mut self, number: u32) -> bool {
        let one = &self.moves[number];
        if one.spec.level != Level::Durable {
            return false;
        }
        if let Some(status) = one.stopped() {
            // Nobody waits for the sync: then nothing is promised either.
            self.blame(number, &status.into());
            return false;
        }
        self.commits.push(number);
        true
    }

    /// What is to be synced.
    pub(super) fn take_syncs(&mut self) -> Option<SyncBatch> {
        if self.commits.is_empty() && self.fresh.len() < self.flush_at || self.disk.is_none() {
            return None;
        }
        let mut batch =
            SyncBatch { moves: std::mem::take(&mut self.commits), ..SyncBatch::default() };
        for &number in &batch.moves {
            for at in self.relied_on(number) {
                self.forget_stale(at);
                let marks = self.fresh.get(&at).into_iter().flatten();
                batch.marks.extend(marks.map(|fresh| (number, fresh.mark, Ok(()))));
            }
            let found = self.found_marks(number).into_iter().chain(self.mark_of_note(number));
            batch.marks.extend(found.map(|mark| (number, mark, Ok(()))));
        }
        if self.fresh.len() >= self.flush_at {
            self.flush_at = usize::MAX; // until this one is done
            let nobody = |fresh: &Fresh| (NOBODY, fresh.mark, Ok(()));
            batch.marks.extend(self.fresh.values().flatten().map(nobody));
        }
        if self.upkeep.takes_recovered() {
            batch.everything = Some(Ok(()));
        }
        Some(batch)
    }

    /// Syncs of what a put found on disk, in segments of earlier lives: until all of those
    /// are known to be durable.
    fn found_marks(&self, number: u32) -> BTreeSet<Mark> {
        let one = &self.moves[number].spec;
        let rows = &self.tables[one.table as usize];
        let layers = one.first_layer..one.first_layer + one.layers;
        let cells = one
            .slots
            .iter()
            .flat_map(|&chunk| layers.clone().map(move |layer| Cell { chunk, layer }));
        let segments = cells.filter_map(|cell| match rows.chunks.place(cell, Tier::Disk) {
            Ok(Some(Place::Disk { spot, .. })) => Some(Spot(spot).segment()),
            _ => None,
        });
        match self.upkeep.found_until {
            0 => BTreeSet::new(),
            until => segments.filter(|&s| s <= until).map(Mark::found).collect(),
        }
    }

    pub(super) fn done_syncs(&mut self, batch: &SyncBatch) {
        match &batch.everything {
            Some(Err(error)) => {
                log::warn!("not all that was found on disk could be made durable: {error}");
            }
            Some(Ok(())) => self.upkeep.found_until = 0,
            None => {}
        }
        let failed =
            batch.marks.iter().filter_map(|(n, _, result)| Some((*n, result.as_ref().err()?)));
        let failed: BTreeMap<u32, &Error> = failed.collect();
        for (&number, error) in failed.iter().filter(|(n, _)| **n != NOBODY) {
            self.blame(number, error);
        }
        if self.flush_at == usize::MAX {
            self.flush_at = MOST_FRESH.max(2 * self.fresh.len());
        }
        let nobodys = batch.marks.iter().filter(|(number, ..)| *number == NOBODY);
        let lasting: BTreeSet<Mark> =
            nobodys.filter(|(.., result)| result.is_ok()).map(|&(_, mark, _)| mark).collect();
        if !lasting.is_empty() {
            self.fresh.retain(|_, marks| {
                marks.retain(|fresh| !lasting.contains(&fresh.mark));
                !marks.is_empty()
            });
        }
        let synced = batch.marks.iter().map(|(n, mark, result)| ((*n, *mark), result.is_ok()));
        let synced: Synced = synced.collect();
        for &number in &batch.moves {
            self.forget_marks(number, &synced);
            self.note_synced(number, batch);
            self.conclude(number);
        }
    }

    /// The chunks that a durable put has to have on disk.
    fn relied_on(&self, number: u32) -> Vec<At> {
        let Move { spec: one, ahead, .. } = &self.moves[number];
        let at = |&slot: &Slot| At { table: one.table, slot };
        one.slots.iter().chain(ahead).map(at).collect()
    }

    /// What was synced need not be synced again. What never can be stays noted, so
    /// that nobody is told that it lasts, also who waits for the same now; where it is in
    /// memory, too, it leaves that record, and is written anew.
    fn forget_marks(&mut self, number: u32, synced: &Synced) {
        for at in self.relied_on(number) {
            let Some(mut marks) = self.fresh.remove(&at) else { continue };
            let how = |fresh: &Fresh| synced.get(&(number, fresh.mark)).copied();
            for fresh in marks.iter().filter(|fresh| how(fresh) == Some(false)) {
                self.leave_record(at, fresh);
            }
            marks.retain(|fresh| how(fresh) != Some(true));
            if !marks.is_empty() {
                self.fresh.insert(at, marks);
            }
        }
    }

    /// Records in which nothing of a chunk lies any more need not be synced: what cleaning
    /// moves is durable where it went. While a part of the chunk is in memory only they may
    /// be what that has left.
    pub(super) fn forget_stale(&mut self, at: At) {
        if !self.fresh.contains_key(&at) || self.only_in_host(at, Part::All) > 0 {
            return;
        }
        let mut marks = self.fresh.remove(&at).unwrap_or_default();
        marks.retain(|fresh| {
            let layers = self.tables[at.table as usize].layout.layers();
            (0..layers).any(|layer| self.is_of(at, layer, fresh))
        });
        if !marks.is_empty() {
            self.fresh.insert(at, marks);
        }
    }

    /// Whether a layer of a chunk is on disk where a record has it.
    fn is_of(&self, at: At, layer: usize, fresh: &Fresh) -> bool {
        let cell = Cell { chunk: at.slot, layer };
        match self.tables[at.table as usize].chunks.place(cell, Tier::Disk) {
            Ok(Some(Place::Disk { spot, .. })) => {
                let spot = Spot(spot);
                (spot.segment(), spot.record()) == (fresh.mark.segment(), fresh.record)
            }
            _ => false,
        }
    }

    /// Cells that are in memory leave a record that cannot be synced, and are written anew:
    /// what continues them is of no use without. Others stay where they are, also in the same
    /// segment: they may have been durable before.
    fn leave_record(&mut self, at: At, fresh: &Fresh) {
        for layer in 0..self.tables[at.table as usize].layout.layers() {
            let cell = Cell { chunk: at.slot, layer };
            let is_its = self.is_of(at, layer, fresh);
            let chunks = &mut self.tables[at.table as usize].chunks;
            if !is_its || !matches!(chunks.place(cell, Tier::Host), Ok(Some(_))) {
                continue;
            }
            if let Ok(Gone::Now(place)) = chunks.begin_drop(cell, Tier::Disk) {
                self.free_place(at.table, cell, place);
                self.departed(at.table, cell, Tier::Disk);
                self.tables[at.table as usize].set(at.slot, note::FORCED);
                self.queue_one(at);
            }
        }
    }
}
