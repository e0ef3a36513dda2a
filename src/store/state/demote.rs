//! What goes down at the engine's wish.

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::Part;
use crate::store::state::{At, StoreState};

/// What becomes of chunks in memory that were to go down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demoted {
    /// They were on disk, too: their memory is given back.
    pub freed: u64,
    /// Their memory is given back once they are on disk.
    pub leaving: u64,
    /// They stay: there is no disk.
    pub staying: u64,
}

impl StoreState {
    /// Sends the chunks of a range of a session's tokens down. Who holds or has pinned them
    /// finds them on disk; what cannot be written stays where it is.
    pub fn demote_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<Demoted> {
        let mut demoted = Demoted::default();
        // From the end, so that policies hear of what continues a chunk before it.
        for at in self.known_chunks(at, first, tokens)?.into_iter().rev() {
            self.send_down(at, &mut demoted);
        }
        self.settle();
        Ok(demoted)
    }

    /// One chunk: as if the policy had chosen it, but that the policy knows it until its
    /// cells have left.
    fn send_down(&mut self, at: At, demoted: &mut Demoted) {
        if !self.is_in_host(at, Part::All) {
            self.drop_where(at, Tier::Device as usize, |_, _| true);
            return;
        }
        // Its session holds it: what admission says does not count.
        let left = self.only_in_host(at, Part::All);
        if left > 0 && !self.may_go_down(at, left, true) {
            demoted.staying += 1;
            return;
        }
        self.drop_where(at, Tier::Device as usize, |_, _| true);
        let freed = self.drop_copies(at, |_| true);
        if left == 0 {
            demoted.freed += 1;
            self.counters.demoted += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
            return;
        }
        demoted.leaving += 1;
        let leave = self.leaving.entry(at).or_default();
        if !leave.is_whole() {
            leave.add(Part::All, left);
            self.leaving_bytes += left;
        }
        self.tables[at.table as usize].set(at.slot, note::LEAVES);
        self.queue_down(at);
    }
}
