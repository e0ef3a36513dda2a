//! What the tier writes itself and points to only once it is written: sessions, and
//! what cleaning moves. Its room may be taken before a checkpoint's cover while what is
//! listed is still what was before; so a checkpoint waits for it.

use crate::tier::disk::DiskTier;

/// Records whose room was or will be taken, from that number on, and to which nobody
/// points yet.
pub(super) struct Underway<'a> {
    tier: &'a DiskTier,
    from: u64,
}

impl DiskTier {
    /// Begins such records; they end when what is given back is dropped.
    pub(super) fn set_out(&self) -> Underway<'_> {
        let mut state = self.state.lock();
        let from = state.next_record;
        state.underway.push(from);
        Underway { tier: self, from }
    }

    /// Waits until everything points to where it is whose room was taken before this
    /// record. What begins meanwhile is behind it, so this ends.
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
