//! Records that the tier writes itself and references only once they are written: sessions, and
//! cells that compaction moves. Their space may be taken before a checkpoint's cover while the
//! index still has the old place. So a checkpoint waits for them.

use crate::tier::disk::DiskTier;

/// Such records, from this number on, that nothing references yet.
pub(super) struct Underway<'a> {
    tier: &'a DiskTier,
    from: u64,
}

impl DiskTier {
    /// Begins such records; they end when the result is dropped.
    pub(super) fn set_out(&self) -> Underway<'_> {
        let mut state = self.state.lock();
        let from = state.next_record;
        state.underway.push(from);
        Underway { tier: self, from }
    }

    /// Waits until all such records from before `record` are referenced. Later ones do not matter,
    /// so the wait ends.
    pub(super) fn wait_for_older(&self, record: u64) {
        let mut state = self.state.lock();
        while state.underway.iter().any(|&from| from < record) {
            self.changed.wait(&mut state);
        }
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let mut state = self.tier.state.lock();
        if let Some(at) = state.underway.iter().position(|&from| from == self.from) {
            state.underway.swap_remove(at);
        }
        drop(state);
        self.tier.changed.notify_all();
    }
}
