//! Notes of namespaces on disk: what is found of one is of no use to an opening that
//! does not know its layout. One is written with the first chunk that goes down, and
//! is dropped with the last that has left: who opens namespaces and stores nothing takes
//! no room.

use std::collections::BTreeSet;

use crate::base::status::Result;
use crate::store::state::limits::NO_SPACE;
use crate::store::state::recovery::NOTE;
use crate::store::state::work::{SpaceNote, SyncBatch, WriteBatch};
use crate::store::state::{At, StoreState};
use crate::tier::disk::Mark;

/// What is on disk of a namespace.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Below {
    /// Chunks of which something is there.
    chunks: u32,
    /// Records under way.
    writing: u32,
    pub(super) noted: Noted,
}

impl Below {
    /// Whether nothing is there, or on its way.
    pub(super) fn is_bare(&self) -> bool {
        self.chunks + self.writing == 0
    }
}

/// Whether what a namespace is can be found on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Noted {
    #[default]
    No,
    /// It is written, and may not be durable.
    Written(Mark),
    /// It never will be durable: it has to be written anew.
    Lost(Mark),
    Lasts,
}

impl StoreState {
    /// A record of a chunk is in a batch: with what its namespace is, unless that is known.
    pub(super) fn note_with(&mut self, at: At, batch: &mut WriteBatch) {
        let Some(number) = self.space_of(at) else { return };
        let below = &mut self.spaces[number as usize].below;
        below.writing += 1;
        let is_known = matches!(below.noted, Noted::Written(_) | Noted::Lasts);
        if !is_known && batch.notes.iter().all(|note| note.space != number) {
            let (name, content) = self.space_note(number);
            batch.notes.push(SpaceNote { space: number, name, content, mark: None });
        }
    }

    /// A batch has ended: notes are written, or not; namespaces may have nothing on disk
    /// after all.
    pub(super) fn noted_with(&mut self, batch: &WriteBatch) {
        for note in &batch.notes {
            // Also where another of the batch was not, and so no chunk.
            let Some(mark) = note.mark else { continue };
            if note.space == NO_SPACE {
                self.limits_noted();
            } else {
                self.spaces[note.space as usize].below.noted = Noted::Written(mark);
            }
        }
        let mut spaces = BTreeSet::new();
        for &at in &batch.chunks {
            let Some(number) = self.space_of(at) else { continue };
            self.spaces[number as usize].below.writing -= 1;
            spaces.insert(number);
        }
        spaces.into_iter().for_each(|number| self.drop_note(number));
    }

    /// Something of a chunk is on disk, and nothing was before.
    pub(super) fn came_below(&mut self, at: At) {
        if let Some(number) = self.space_of(at) {
            self.spaces[number as usize].below.chunks += 1;
        }
    }

    /// Nothing of a chunk is on disk any more.
    pub(super) fn left_below(&mut self, at: At) {
        if let Some(number) = self.space_of(at) {
            self.spaces[number as usize].below.chunks -= 1;
            self.drop_note(number);
        }
    }

    /// What a namespace is need not be known of one that has nothing on disk.
    pub(super) fn drop_note(&mut self, number: u32) {
        let below = &mut self.spaces[number as usize].below;
        if !below.is_bare() || below.noted == Noted::No {
            return;
        }
        below.noted = Noted::No;
        let name = [NOTE, &self.spaces[number as usize].key.0].concat();
        if let Some(disk) = &self.disk {
            disk.drop_session(&name);
            self.upkeep.sweep_soon();
        }
    }

    /// What has to be durable beside the chunks of a put.
    pub(super) fn mark_of_note(&self, number: u32) -> Option<Mark> {
        let one = &self.moves[number].spec;
        let slot = *one.slots.first()?;
        let space = self.space_of(At { table: one.table, slot })?;
        match self.spaces[space as usize].below.noted {
            Noted::Written(mark) => Some(mark),
            Noted::Lost(mark) => Some(self.mark_of_moved(space, mark)),
            Noted::No | Noted::Lasts => None,
        }
    }

    /// A note that could not be made durable where it was: cleaning may have taken it
    /// elsewhere.
    fn mark_of_moved(&self, space: u32, lost: Mark) -> Mark {
        let name = [NOTE, &self.spaces[space as usize].key.0].concat();
        let segment = self.disk.as_ref().and_then(|disk| disk.segment_of_session(&name));
        segment.filter(|&segment| segment != lost.segment()).map_or(lost, Mark::so_far)
    }

    /// Notes were synced for a put, or not.
    pub(super) fn note_synced(&mut self, number: u32, batch: &SyncBatch) {
        let Some(mark) = self.mark_of_note(number) else { return };
        let how = batch.marks.iter().find(|(n, m, _)| (*n, *m) == (number, mark));
        let Some((.., how)) = how else { return };
        let one = &self.moves[number].spec;
        let first = one.slots.first().map(|&slot| At { table: one.table, slot });
        if let Some(space) = first.and_then(|at| self.space_of(at)) {
            let noted = if how.is_ok() { Noted::Lasts } else { Noted::Lost(mark) };
            self.spaces[space as usize].below.noted = noted;
        }
    }

    fn space_of(&self, at: At) -> Option<u32> {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot)?;
        Some(row.namespace()).filter(|&number| self.spaces.get(number as usize).is_some())
    }
}

impl WriteBatch {
    /// Says what became of its notes: before anything else of it is written. Where one could
    /// not be written nothing is.
    pub(in crate::store) fn write_notes(
        &mut self,
        mut write: impl FnMut(&[u8], &[u8]) -> Result<Mark>,
    ) -> bool {
        for note in &mut self.notes {
            match write(&note.name, &note.content) {
                Ok(mark) => note.mark = Some(mark),
                Err(error) => {
                    self.refused = Some(error);
                    return false;
                }
            }
        }
        true
    }
}
