//! Room in memory: what policies are told, who leaves, and where to.

use crate::base::budget::Tier;
use crate::kv::admission::Candidate;
use crate::kv::core::board::note;
use crate::kv::core::moves::Deed;
use crate::kv::core::shelf::units_of;
use crate::kv::core::work::Hands;
use crate::kv::core::{At, Board, Core, Space, Write};
use crate::kv::events::Kind;
use crate::meta::chunks::{Cell, Gone};
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Facts;
use crate::policy::evictor::{New, Who};

/// Most chunks that leave at once: then it is looked again how much is free.
pub(super) const MOST_VICTIMS: usize = 64;
/// So many chunks in a row that could neither stay on disk nor be dropped: whoever
/// waits for memory is told that there is none.
const MOST_REFUSALS: u32 = 16;
/// After that, no room is made ahead of need for so long.
const PAUSE_NS: u64 = 1_000_000_000;
const HOST: usize = Tier::Host as usize;
const DISK: usize = Tier::Disk as usize;

impl Core {
    /// Tells the policies of the chunks of a move: they are asked for, and come.
    pub(super) fn tell_policies(&mut self, number: u32) {
        let one = &self.moves[number].spec;
        let (who, deed) = (one.who, one.deed);
        let rows = &mut self.boards[one.board as usize];
        let mut ids = Vec::with_capacity(one.slots.len());
        let mut new = Vec::new();
        for &slot in &one.slots {
            ids.push(rows.id(slot));
            if deed == Deed::Get {
                rows.uses[slot as usize] = rows.uses[slot as usize].saturating_add(1);
            } else if deed == Deed::Put {
                rows.classes[slot as usize] = who.priority.unwrap_or(1);
            }
            let comes = deed == Deed::Put
                || rows.chunks.chunk(slot).is_some_and(|row| row.cells()[DISK] > 0);
            if comes && !rows.has(slot, note::IN_HOST) {
                rows.set(slot, note::IN_HOST);
                new.push(new_object(&self.spaces, rows, slot));
            }
        }
        if deed == Deed::Get {
            self.host_shelf.look(self.now_ns, &who, &ids);
            if let Some(shelf) = &mut self.disk_shelf {
                shelf.look(self.now_ns, &who, &ids);
            }
        }
        if new.is_empty() || self.host_shelf.insert(self.now_ns, &who, &new) {
            for i in 0..self.moves[number].spec.slots.len() {
                let one = &self.moves[number].spec;
                self.note_held(one.board, one.slots[i]);
            }
            return;
        }
        // One by one, then, when cells have come.
        let one = &self.moves[number].spec;
        let rows = &mut self.boards[one.board as usize];
        for id in new {
            if let Some(slot) = rows.chunks.find_id(id.id) {
                rows.clear(slot, note::IN_HOST);
            }
        }
    }

    /// A cell has come to a tier.
    pub(super) fn arrived(&mut self, board: u32, cell: Cell, tier: Tier) {
        let at = At { board, slot: cell.chunk };
        self.enter_shelf(at, tier);
        let rows = &self.boards[board as usize];
        let cells = rows.chunks.chunk(cell.chunk).map_or(0, |row| row.cells()[tier as usize]);
        if usize::from(cells) == rows.layout.layers() {
            self.say(Kind::Stored, tier, at);
        }
    }

    /// Sees to it that a tier's policy knows a chunk.
    pub(super) fn enter_shelf(&mut self, at: At, tier: Tier) {
        let rows = &mut self.boards[at.board as usize];
        let flag = if tier == Tier::Host { note::IN_HOST } else { note::IN_DISK };
        if rows.has(at.slot, flag) {
            return;
        }
        let shelf = match (tier, &mut self.disk_shelf) {
            (Tier::Disk, Some(shelf)) => shelf,
            _ => &mut self.host_shelf,
        };
        let priority = Some(rows.classes[at.slot as usize].min(2));
        let who = Who { priority, ..Who::default() };
        if shelf.insert(self.now_ns, &who, &[new_object(&self.spaces, rows, at.slot)]) {
            rows.set(at.slot, flag);
            self.note_held(at.board, at.slot);
        }
    }

    /// A cell has left a tier, or all have.
    pub(super) fn departed(&mut self, board: u32, slot: Slot, tier: Tier) {
        let at = At { board, slot };
        let rows = &mut self.boards[board as usize];
        let layers = rows.layout.layers();
        let Some(row) = rows.chunks.chunk(slot) else { return };
        let left = usize::from(row.cells()[tier as usize]);
        if left + 1 == layers {
            self.say(Kind::Removed, tier, at);
        }
        if left > 0 {
            return;
        }
        let rows = &mut self.boards[board as usize];
        let flag = if tier == Tier::Host { note::IN_HOST } else { note::IN_DISK };
        if !rows.has(slot, flag) {
            return;
        }
        let id = rows.id(slot);
        let is_last = (tier == Tier::Disk) == self.disk_shelf.is_some();
        let shelf = match (tier, &mut self.disk_shelf) {
            (Tier::Disk, Some(shelf)) => shelf,
            _ => &mut self.host_shelf,
        };
        // One that others continue stays, and frees nothing when it is chosen.
        if shelf.remove(self.now_ns, id) {
            rows.clear(slot, flag);
            if is_last {
                rows.clear(slot, note::HELD);
            }
        }
    }

    /// Bytes that should come free now.
    fn wanted_bytes(&self) -> u64 {
        let share = |part: f64| (self.config.host_bytes as f64 * part) as u64;
        let used = self.host.live_bytes();
        let ahead = match used > share(self.config.high) && !self.is_vain() {
            true => used - share(self.config.low),
            false => 0,
        };
        ahead.max(self.hungry_bytes).saturating_sub(self.leaving_bytes)
    }

    /// What could not be written down a moment ago cannot now.
    pub(super) fn is_vain(&self) -> bool {
        self.refusals >= MOST_REFUSALS && self.now_ns < self.refused_ns + PAUSE_NS
    }

    /// Has chunks leave memory if that is needed; whether something came of it.
    pub(super) fn make_room(&mut self) -> bool {
        let wanted = self.wanted_bytes();
        if wanted == 0 {
            return false;
        }
        // What has to stay and cannot be written down would be chosen again for ever.
        if self.refusals >= MOST_REFUSALS && !self.hungry.is_empty() {
            self.refusals = 0;
            return self.starve_one();
        }
        let mut victims = Vec::new();
        self.host_shelf.choose(self.now_ns, wanted, MOST_VICTIMS, &mut victims);
        if victims.is_empty() {
            return self.is_stuck() && (self.drop_weakest_pin() || self.starve_one());
        }
        let mut came = false;
        for victim in &victims {
            if let Some(at) = self.chunk_of_id(victim.id) {
                // One whose cells are still to come has nothing to give: others have.
                came |= self.leave_host(at) || !self.is_in_host(at);
            }
        }
        // When all that was chosen had to stay, others are asked for, so many times.
        let tries = came || self.is_stuck();
        self.refusals += u32::from(tries && !came);
        tries
    }

    /// Whether nothing that is under way can free memory.
    fn is_stuck(&self) -> bool {
        let busy = [Hands::Copy, Hands::Read, Hands::Write];
        !self.hungry.is_empty()
            && self.leaving_bytes == 0
            && busy.iter().all(|&hands| self.under_way[hands as usize] == 0)
            && (0..3).all(|lane| self.copies.waiting(lane).0 + self.reads.waiting(lane).0 == 0)
    }

    fn starve_one(&mut self) -> bool {
        self.starve();
        true
    }

    /// A chunk leaves memory: at once where it is on disk too, else by way of it.
    /// Whether memory came or comes free.
    pub(super) fn leave_host(&mut self, at: At) -> bool {
        let rows = &mut self.boards[at.board as usize];
        rows.clear(at.slot, note::IN_HOST);
        if self.disk_shelf.is_none() {
            rows.clear(at.slot, note::HELD);
        }
        if self.leaving.contains_key(&at) {
            return true; // chosen before, and others have asked for it since
        }
        let freed = self.drop_copies(at);
        let rows = &self.boards[at.board as usize];
        let left = self.only_in_host(at);
        if left == 0 {
            self.counters.demoted += u64::from(freed > 0);
            return freed > 0;
        }
        let is_blocked = rows.chunks.chunk(at.slot).is_some_and(|row| row.is_blocked());
        if self.may_go_down(at, left, is_blocked) {
            self.boards[at.board as usize].set(at.slot, note::LEAVES);
            self.leaving_bytes += left;
            self.leaving.insert(at, left);
            self.queue_down(at);
            return true;
        }
        self.drop_for_good(at) || freed > 0
    }

    /// Whether anything of a chunk is in memory.
    fn is_in_host(&self, at: At) -> bool {
        let row = self.boards[at.board as usize].chunks.chunk(at.slot);
        row.is_some_and(|row| row.cells()[HOST] > 0)
    }

    /// Bytes of a chunk that are in memory and nowhere else.
    pub(super) fn only_in_host(&self, at: At) -> u64 {
        let rows = &self.boards[at.board as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return 0 };
        let only = |(layer, marks): (usize, &crate::meta::chunks::Marks)| match marks.there() {
            there if there == 1 << HOST => rows.planes(Cell { chunk: at.slot, layer }).bytes(),
            _ => 0,
        };
        marks.iter().enumerate().map(only).sum()
    }

    pub(super) fn may_go_down(&mut self, at: At, bytes: u64, is_blocked: bool) -> bool {
        let Some(disk) = &self.disk else { return false };
        if is_blocked {
            return true;
        }
        if self.config.write == Write::Never {
            return false;
        }
        let rows = &self.boards[at.board as usize];
        let stats = disk.stats();
        let free = 1.0 - stats.used_bytes as f64 / stats.budget_bytes.max(1) as f64;
        let one = Candidate {
            bytes,
            hits: u32::from(rows.uses[at.slot as usize]),
            priority: rows.classes[at.slot as usize],
        };
        self.admission.admit(&one, free, self.now_ns).is_ok()
    }

    /// Gives back the memory of cells that are on disk too; how much.
    pub(super) fn drop_copies(&mut self, at: At) -> u64 {
        self.drop_where(at, HOST, |there| there & 1 << DISK != 0)
    }

    /// Drops the cells of a chunk in a tier where `may` says so of the tiers they are
    /// in; the bytes that are free or will be.
    pub(super) fn drop_where(&mut self, at: At, tier: usize, may: impl Fn(u8) -> bool) -> u64 {
        let kind = if tier == HOST { Tier::Host } else { Tier::Disk };
        let layers = self.boards[at.board as usize].layout.layers();
        let mut freed = 0;
        for layer in 0..layers {
            let cell = Cell { chunk: at.slot, layer };
            let rows = &mut self.boards[at.board as usize];
            let Some(marks) = rows.chunks.marks(at.slot).and_then(|all| all.get(layer)) else {
                return freed;
            };
            if marks.there() & 1 << tier == 0 || !may(marks.there()) {
                continue;
            }
            let bytes = rows.planes(cell).bytes();
            match rows.chunks.begin_drop(cell, kind) {
                Ok(Gone::Now(place)) => {
                    self.free_place(at.board, cell, place);
                    freed += bytes;
                }
                Ok(Gone::Later) => freed += bytes,
                Ok(Gone::Not) | Err(_) => continue,
            }
            self.departed(at.board, at.slot, kind);
        }
        freed
    }

    /// What is in memory only is gone, unless it must stay: then the policy gets it
    /// back. Whether memory came free.
    pub(super) fn drop_for_good(&mut self, at: At) -> bool {
        let freed = self.drop_where(at, HOST, |there| there == 1 << HOST);
        let rows = &self.boards[at.board as usize];
        let stays = rows.chunks.chunk(at.slot).is_some_and(|row| row.cells()[HOST] > 0);
        if stays {
            self.enter_shelf(at, Tier::Host);
        }
        self.counters.dropped += u64::from(freed > 0);
        self.tidy(at.board, at.slot);
        freed > 0
    }

    /// A chunk is not on its way out any more.
    pub(super) fn stop_leaving(&mut self, at: At) {
        if let Some(bytes) = self.leaving.remove(&at) {
            self.leaving_bytes -= bytes;
            self.boards[at.board as usize].clear(at.slot, note::LEAVES);
        }
    }
}

/// A chunk as policies know it. Where holes can be computed it stands for itself: it may
/// leave before those that continue it.
fn new_object(spaces: &[Space], rows: &Board, slot: Slot) -> New {
    let row = rows.chunks.chunk(slot);
    let space = row.and_then(|row| spaces.get(row.namespace() as usize));
    let holes = space.is_some_and(|space| space.holes);
    let parent = rows.chunks.parent(slot).filter(|&parent| parent != NONE && !holes);
    let tokens = row.map_or(0, |row| row.valid_tokens());
    let context = row.map_or(0, |row| row.position()).saturating_mul(rows.layout.chunk_tokens());
    New {
        id: rows.id(slot),
        parent: parent.map(|parent| rows.id(parent)),
        units: units_of(rows.chunk_bytes(slot)),
        facts: Facts { tokens, context, ..Facts::default() },
    }
}
