//! Limits: that of moves, and that of chunks. The latter is noted on the disk: whoever opens a store
//! with a smaller one than it had would forget chunks for good, and has to say so.

use std::collections::BTreeSet;

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::Key;
use crate::store::state::StoreState;
use crate::store::state::work::{SpaceNote, WriteBatch};
use crate::tier::disk::Recovered;

/// The name of the note.
const NAME: &[u8] = b"limits";
const VERSION: u8 = 1;
/// What stands in a note that is of no namespace.
pub(super) const NO_SPACE: u32 = u32::MAX;

/// What the disk's note says.
#[derive(Default)]
pub(super) struct Limits {
    /// 0 = there is none.
    noted_chunks: u64,
}

impl StoreState {
    /// Whether another move can begin.
    pub(super) fn has_room_for_move(&self) -> Result<()> {
        if !self.moves.has_room() {
            let all = self.moves.len();
            fail!(Again, "{all} moves are under way, as many as may be: wait for one of them");
        }
        Ok(())
    }

    /// Whether the chunks that were found fit, or may be forgotten. What has left may be found
    /// again after a crash, so it is only asked where the limit was larger.
    pub(super) fn check_limits(&mut self, recovered: &Recovered) -> Result<()> {
        let note = recovered.sessions.iter().find(|session| *session.name == *NAME);
        let before = note.map_or(0, |note| read(&note.payload));
        self.limits.noted_chunks = before;
        let most = self.config.max_chunks as u64;
        if before <= most || self.config.forgets {
            return Ok(());
        }
        // A chunk that was written in parts is found in several places.
        let keys: BTreeSet<&Key> = recovered.chunks().map(|(chunk, _)| &chunk.key).collect();
        let found = keys.len() as u64;
        if found > most {
            let lost = found - most;
            fail!(
                Limit,
                "the disk has {found} chunks and was opened with chunks={before} before; \
                 chunks={most} would forget {lost} of them for good: open it with chunks={found} at \
                 least, or with forget=true"
            );
        }
        Ok(())
    }

    /// Adds the note to a batch of writes, if what the disk says is not so.
    pub(super) fn note_limits(&self, batch: &mut WriteBatch) {
        let chunks = self.config.max_chunks as u64;
        if self.limits.noted_chunks != chunks {
            let content = [&[VERSION][..], &chunks.to_le_bytes()].concat();
            let (space, name) = (NO_SPACE, NAME.to_vec());
            batch.notes.push(SpaceNote { space, name, content, mark: None });
        }
    }

    /// The note is written.
    pub(super) fn limits_noted(&mut self) {
        self.limits.noted_chunks = self.config.max_chunks as u64;
    }
}

/// The chunks of a note; 0 where it is none that can be read.
fn read(content: &[u8]) -> u64 {
    match content {
        [VERSION, chunks @ ..] => chunks.try_into().map_or(0, u64::from_le_bytes),
        _ => 0,
    }
}
