//! Making writes durable: one sync serves all threads that wait.

use crate::base::status::Result;
use crate::fail;
use crate::tier::disk::DiskTier;
use crate::tier::disk::batch::Mark;

impl DiskTier {
    /// Waits until a write is durable. The first caller syncs the segment for all writes until
    /// then; others wait for that sync. After a failed sync the state of the disk is unknown: the
    /// segment takes no more records, and writes that were not durable before never will be (IO).
    pub fn commit(&self, mark: Mark) -> Result<()> {
        let mut state = self.state.lock();
        let upto = loop {
            // A segment is removed once its cells are dropped or durable elsewhere, but writes lost
            // by a failed sync may be in neither place.
            let lost = state.lost.get(&mark.segment).is_some_and(|&clean| mark.write > clean);
            let Some(segment) = state.segments.get_mut(&mark.segment) else {
                return if lost { not_durable(mark) } else { Ok(()) };
            };
            // If opening found no records after the checkpoint, all are durable.
            if segment.clean >= mark.write.min(segment.dirty) {
                return Ok(());
            }
            if segment.poisoned {
                return not_durable(mark);
            }
            if !segment.syncing {
                segment.syncing = true;
                break segment.dirty;
            }
            self.changed.wait(&mut state);
        };
        drop(state);
        let synced = self.pin(mark.segment).and_then(|pinned| self.files.sync(pinned.file));
        let mut state = self.state.lock();
        if let Some(segment) = state.segments.get_mut(&mark.segment) {
            segment.syncing = false;
            match synced {
                Ok(()) => segment.clean = segment.clean.max(upto),
                Err(_) => segment.poisoned = true,
            }
        }
        state.stats.syncs += 1;
        if synced.is_err() {
            state.stats.failed_syncs += 1;
            state.leave_front(mark.segment);
        }
        drop(state);
        self.changed.notify_all();
        synced.map_err(|error| error.within(&format!("a sync of segment {} failed", mark.segment)))
    }

    /// Waits until all writes are durable; returns the first failure.
    pub fn commit_all(&self) -> Result<()> {
        let marks: Vec<Mark> = {
            let state = self.state.lock();
            let dirty = state.segments.iter().filter(|(_, segment)| segment.dirty > segment.clean);
            dirty.map(|(&segment, s)| Mark { segment, write: s.dirty }).collect()
        };
        marks.into_iter().map(|mark| self.commit(mark)).fold(Ok(()), Result::and)
    }
}

fn not_durable(mark: Mark) -> Result<()> {
    fail!(
        Io,
        "a sync of segment {} failed: data written to it is not durable. Put the data again: it is \
         written to another segment",
        mark.segment
    )
}
