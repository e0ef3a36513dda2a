//! What policies are told: who is asked for, comes, is in use, has left; and what they
//! mean when they choose.

use std::collections::BTreeSet;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::kv::core::board::note;
use crate::kv::core::debt::{cell_of_owner, owner_of};
use crate::kv::core::grain::{Grain, Part, cell_id};
use crate::kv::core::moves::Deed;
use crate::kv::core::objects::{comes, member, new_cell, new_object};
use crate::kv::core::replicas::Replicas;
use crate::kv::core::shelf::{Chosen, Shelf};
use crate::kv::core::{At, Core};
use crate::kv::events::Kind;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::policy::Hint;
use crate::policy::evictor::{New, Who};

const DISK: usize = Tier::Disk as usize;

/// Cells that come.
#[derive(Default)]
struct News {
    /// Those that the policy does not know.
    new: Vec<New>,
    all: Vec<Comer>,
}

/// One of them: what policies call it, where it is, and whether it was known.
struct Comer {
    id: u64,
    home: u64,
    is_known: bool,
}

impl News {
    /// Notes a cell. One that had left, and that others continue, is known still.
    fn add(&mut self, shelf: &Shelf, new: New, home: u64) {
        let is_known = shelf.knows(new.id);
        self.all.push(Comer { id: new.id, home, is_known });
        if !is_known {
            self.new.push(new);
        }
    }
}

impl Core {
    /// Tells the policies of the chunks of a move: they are asked for, and come.
    pub(super) fn tell_policies(&mut self, number: u32) {
        let one = &mut self.moves[number].spec;
        let (who, deed, by_chunk) = (one.who, one.deed, one.by_chunk);
        let all = std::mem::take(&mut one.slots);
        let once = if by_chunk { each_once(&all) } else { None };
        let slots = once.as_deref().unwrap_or(&all);
        let rows = &mut self.boards[one.board as usize];
        for slot in slots.iter().filter(|&&slot| slot != NONE).map(|&slot| slot as usize) {
            match deed {
                Deed::Get => rows.uses[slot] = rows.uses[slot].saturating_add(1),
                Deed::Put => rows.classes[slot] = who.priority.unwrap_or(1),
                _ => {}
            }
        }
        if deed == Deed::Get {
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                self.tell_asked(number, slots, tier);
            }
        }
        match self.host_shelf.grain {
            Grain::Chunk => self.tell_chunks(number, slots),
            Grain::Cell => self.tell_cells(number, slots),
            // Blocks have nothing to do with each other: they go one by one.
            Grain::Session if by_chunk => self.tell_each(number, slots),
            Grain::Session => self.tell_session(number, slots),
        }
        self.moves[number].spec.slots = all;
    }

    /// A move asks a tier's policy for what it is to get.
    fn tell_asked(&mut self, number: u32, slots: &[Slot], tier: Tier) {
        let one = &self.moves[number].spec;
        let rows = &self.boards[one.board as usize];
        let Some(shelf) =
            shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier)
        else {
            return;
        };
        // Chunks that are all there are asked for by their rows.
        let there = slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let chunks = || there.clone().take(if one.asked.is_empty() { usize::MAX } else { 0 });
        let chunks = || chunks().chain(one.asked.iter().copied());
        let (mut who, mut ids) = (one.who, Vec::with_capacity(slots.len()));
        match shelf.grain {
            Grain::Session if one.by_chunk => {
                who.session = None;
                ids.extend(chunks());
            }
            Grain::Chunk => ids.extend(chunks()),
            Grain::Cell => {
                let layers = one.first_layer..one.first_layer + one.layers;
                let of = |layer| chunks().map(move |id| cell_id(id, layer));
                // Who is last in a path leaves first: late layers, and of those the end.
                ids.extend(layers.flat_map(of));
                who.tokens_each = (who.tokens_each / rows.layout.layers() as u32).max(1);
            }
            Grain::Session => {
                ids.extend(who.session);
                who.tokens_each = who.tokens_each.saturating_mul(slots.len() as u32);
            }
        }
        if one.by_chunk {
            // Behind one that is missing policies see nothing: those that they know go first.
            ids = each_once(&ids).unwrap_or(ids);
            ids.sort_by_key(|&id| !shelf.knows(id));
        }
        shelf.look(self.now_ns, &who, &ids);
    }

    /// Chunks of a move that come to memory.
    fn tell_chunks(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, deed, board) = (one.who, one.deed, one.board);
        let rows = &mut self.boards[board as usize];
        let mut new = Vec::new();
        for &slot in slots {
            if comes(rows, slot, deed) && !rows.has(slot, note::IN_HOST) {
                rows.set(slot, note::IN_HOST);
                new.push(new_object(&self.spaces, rows, slot));
            }
        }
        if new.is_empty() || self.host_shelf.insert(self.now_ns, &who, &new) {
            slots.iter().for_each(|&slot| self.note_held(board, slot));
            return;
        }
        // One by one, then, when cells have come.
        let rows = &mut self.boards[board as usize];
        for id in new {
            if let Some(slot) = rows.chunks.find_id(id.id) {
                rows.clear(slot, note::IN_HOST);
            }
        }
    }

    /// Cells of a move that come to memory.
    fn tell_cells(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, board) = (one.who, one.board);
        let mut news = News::default();
        for layer in one.first_layer..one.first_layer + one.layers {
            for &slot in slots {
                let rows = &self.boards[board as usize];
                let below = rows.chunks.marks(slot).and_then(|marks| marks.get(layer));
                let is_below = below.is_some_and(|marks| marks.there() & 1 << DISK != 0);
                if one.deed == Deed::Put || is_below {
                    let cell = Cell { chunk: slot, layer };
                    let new = new_cell(&self.spaces, rows, cell);
                    news.add(&self.host_shelf, new, owner_of(board, cell));
                }
            }
        }
        // Each that comes later, and was not told of now, must find room.
        let pieces = (self.config.host_bytes.saturating_sub(self.host.live_bytes())) / PIECE_BYTES;
        let spare = pieces + self.config.max_jobs as u64;
        if self.host_shelf.has_room(news.new.len(), spare) {
            self.enter_cells(board, Tier::Host, &who, &news);
        }
        slots.iter().for_each(|&slot| self.note_held(board, slot));
    }

    /// Chunks of a move are its session's from now on, in all tiers.
    fn tell_session(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, deed, board) = (one.who, one.deed, one.board);
        let Some(id) = who.session else { return self.tell_each(number, slots) };
        for tier in [Tier::Host, Tier::Disk] {
            let rows = &mut self.boards[board as usize];
            let is_last = self.disk_shelf.is_none() || tier == Tier::Disk;
            let shelf = shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier);
            let Some(shelf) = shelf.filter(|shelf| shelf.grain == Grain::Session) else { continue };
            let mut members = Vec::with_capacity(slots.len());
            for &slot in slots.iter().filter(|&&slot| slot != NONE) {
                rows.users[slot as usize] = id;
                let will_be = tier == Tier::Host && comes(rows, slot, deed);
                if !will_be && !rows.has(slot, flag_of(tier)) {
                    continue;
                }
                // Alone it was told to be in use; a session's object never is.
                if is_last && rows.has(slot, note::HELD) {
                    shelf.hold(rows.id(slot), false);
                    rows.clear(slot, note::HELD);
                }
                rows.set(slot, flag_of(tier));
                members.push(member(rows, At { board, slot }));
            }
            if !members.is_empty() && !shelf.join(self.now_ns, &who, id, &members) {
                members.iter().for_each(|member| rows.clear(member.at.slot, flag_of(tier)));
            }
        }
    }

    /// Each chunk of a move by itself.
    fn tell_each(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (board, deed) = (one.board, one.deed);
        for &slot in slots {
            let at = At { board, slot };
            if comes(&self.boards[board as usize], slot, deed) {
                self.enter_shelf(at, Tier::Host, Part::All);
            }
        }
    }

    /// Tells a tier's policy of cells.
    fn enter_cells(&mut self, board: u32, tier: Tier, who: &Who, news: &News) {
        let is_last = self.is_last(tier);
        let Some(shelf) =
            shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier)
        else {
            return;
        };
        if !news.new.is_empty() {
            shelf.insert(self.now_ns, who, &news.new);
        }
        let rows = &mut self.boards[board as usize];
        for comer in &news.all {
            if !shelf.set_home(comer.id, comer.home) {
                continue;
            }
            let slot = cell_of_owner(comer.home).1.chunk;
            rows.set(slot, flag_of(tier));
            if is_last && !comer.is_known && rows.has(slot, note::HELD) {
                shelf.hold(comer.id, true);
            }
        }
    }

    /// A cell has come to a tier.
    pub(super) fn arrived(&mut self, board: u32, cell: Cell, tier: Tier) {
        let at = At { board, slot: cell.chunk };
        self.enter_shelf(at, tier, Part::Layer(cell.layer));
        let rows = &self.boards[board as usize];
        let cells = rows.chunks.chunk(cell.chunk).map_or(0, |row| row.cells()[tier as usize]);
        if usize::from(cells) == rows.layout.layers() {
            self.say(Kind::Stored, tier, at);
        }
        if tier == Tier::Disk && cells == 1 {
            self.came_below(at);
        }
    }

    /// Sees to it that a tier's policy knows a part of a chunk that is there: a cell that has
    /// come, or what is left when the rest had to go. Such a rest is of no session.
    pub(super) fn enter_shelf(&mut self, at: At, tier: Tier, part: Part) {
        let rows = &self.boards[at.board as usize];
        let priority = Some(rows.classes[at.slot as usize].min(2));
        let who = Who { priority, ..Who::default() };
        let Some(shelf) =
            shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier)
        else {
            return;
        };
        let entered = match shelf.grain {
            Grain::Cell => return self.enter_part(at, tier, part, &who),
            _ if rows.has(at.slot, flag_of(tier)) => return,
            Grain::Chunk => {
                shelf.insert(self.now_ns, &who, &[new_object(&self.spaces, rows, at.slot)])
            }
            Grain::Session => {
                let (alone, user) = (rows.id(at.slot), rows.users[at.slot as usize]);
                let id = if part == Part::All || user == 0 { alone } else { user };
                shelf.join(self.now_ns, &who, id, &[member(rows, at)])
            }
        };
        if entered {
            self.boards[at.board as usize].set(at.slot, flag_of(tier));
            self.note_held(at.board, at.slot);
        }
    }

    fn enter_part(&mut self, at: At, tier: Tier, part: Part, who: &Who) {
        let rows = &self.boards[at.board as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return };
        let Some(shelf) =
            shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier)
        else {
            return;
        };
        let mut news = News::default();
        let layers = match part {
            Part::All => 0..marks.len(),
            Part::Layer(layer) => layer..layer + 1,
        };
        for layer in layers {
            let cell = Cell { chunk: at.slot, layer };
            let is_there = marks.get(layer).is_some_and(|m| m.there() & 1 << tier as u8 != 0);
            if is_there {
                news.add(shelf, new_cell(&self.spaces, rows, cell), owner_of(at.board, cell));
            }
        }
        if !news.all.is_empty() {
            self.enter_cells(at.board, tier, who, &news);
            self.note_held(at.board, at.slot);
        }
    }

    /// A cell has left a tier.
    pub(super) fn departed(&mut self, board: u32, cell: Cell, tier: Tier) {
        let at = At { board, slot: cell.chunk };
        let rows = &self.boards[board as usize];
        let layers = rows.layout.layers();
        let Some(row) = rows.chunks.chunk(cell.chunk) else { return };
        let left = usize::from(row.cells()[tier as usize]);
        if left + 1 == layers {
            self.say(Kind::Removed, tier, at);
        }
        if left == 0 {
            if tier == Tier::Disk {
                self.left_below(at);
            }
            return self.untell(at, tier);
        }
        let id = cell_id(self.boards[board as usize].id(cell.chunk), cell.layer);
        let shelf = shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier);
        if let Some(shelf) = shelf.filter(|shelf| shelf.grain == Grain::Cell && shelf.knows(id)) {
            shelf.remove(self.now_ns, id);
        }
    }

    /// Nothing of a chunk is in a tier any more: its policy need not know it.
    pub(super) fn untell(&mut self, at: At, tier: Tier) {
        let is_last = self.is_last(tier);
        let rows = &mut self.boards[at.board as usize];
        if !rows.has(at.slot, flag_of(tier)) {
            return;
        }
        let (id, layers) = (rows.id(at.slot), rows.layout.layers());
        let Some(shelf) =
            shelf_of(&mut self.host_shelf, &mut self.disk_shelf, &mut self.near, tier)
        else {
            return;
        };
        let is_out = match shelf.grain {
            // One that others continue stays, and frees nothing when it is chosen.
            Grain::Chunk => shelf.remove(self.now_ns, id),
            Grain::Cell => {
                for id in (0..layers).map(|layer| cell_id(id, layer)) {
                    if shelf.knows(id) {
                        shelf.remove(self.now_ns, id);
                    }
                }
                true
            }
            Grain::Session => {
                shelf.leave(self.now_ns, at);
                true
            }
        };
        if is_out {
            let held = match tier {
                Tier::Device => note::PINNED,
                _ if is_last => note::HELD,
                _ => 0,
            };
            rows.clear(at.slot, flag_of(tier) | held);
        }
    }

    /// Tells the policies what the engine says of the future of a session's chunks; of each
    /// by itself where `who` names no session.
    pub(super) fn tell_hint(
        &mut self,
        board: u32,
        slots: &[Slot],
        who: &Who,
        hint: &Hint,
    ) -> Result<()> {
        let rows = &self.boards[board as usize];
        let chunks = || slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let layers = rows.layout.layers();
        let near = self.near.as_mut().map(|near| &mut near.shelf);
        let shelves = [near, Some(&mut self.host_shelf), self.disk_shelf.as_mut()];
        let mut some = Vec::with_capacity(MOST_HINTS);
        for shelf in shelves.into_iter().flatten() {
            let of = |layer| chunks().map(move |id| cell_id(id, layer));
            let mut ids: Box<dyn Iterator<Item = u64>> = match (shelf.grain, who.session) {
                (Grain::Session, Some(session)) => Box::new(std::iter::once(session)),
                (Grain::Chunk | Grain::Session, _) => Box::new(chunks()),
                (Grain::Cell, _) => Box::new((0..layers).flat_map(of)),
            };
            // Also where there are none: it is said of the session as well.
            loop {
                some.clear();
                some.extend(ids.by_ref().take(MOST_HINTS));
                shelf.hint(self.now_ns, who, &some, hint)?;
                if some.len() < MOST_HINTS {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whom a policy means.
    pub(super) fn chosen(&self, chosen: Chosen) -> Option<(At, Part)> {
        match chosen {
            Chosen::Chunk(id) => Some((self.chunk_of_id(id)?, Part::All)),
            Chosen::Member(at) => Some((at, Part::All)),
            Chosen::Cell(id, home) => {
                let (board, cell) = cell_of_owner(home);
                let rows = self.boards.get(board as usize)?;
                // Its row may be another chunk's by now.
                let is_it = rows.chunks.chunk(cell.chunk).is_some()
                    && cell_id(rows.id(cell.chunk), cell.layer) == id;
                let at = At { board, slot: cell.chunk };
                is_it.then_some((at, Part::Layer(cell.layer)))
            }
        }
    }

    /// The chunk of an id that a policy gave.
    fn chunk_of_id(&self, id: u64) -> Option<At> {
        let mut boards = self.boards.iter().enumerate();
        boards.find_map(|(at, board)| {
            let slot = board.chunks.find_id(id)?;
            Some(At { board: at as u32, slot })
        })
    }
}

/// Objects that a policy is told of at once: a path, or blocks, may have millions of cells.
const MOST_HINTS: usize = 4096;
/// The smallest piece of memory that a cell can have.
pub(super) const PIECE_BYTES: u64 = 4096;

/// The shelf of a tier, where it has one.
fn shelf_of<'a>(
    host: &'a mut Shelf,
    disk: &'a mut Option<Shelf>,
    near: &'a mut Option<Box<Replicas>>,
    tier: Tier,
) -> Option<&'a mut Shelf> {
    match tier {
        Tier::Device => near.as_mut().map(|near| &mut near.shelf),
        Tier::Disk => disk.as_mut(),
        _ => Some(host),
    }
}

/// What is noted of a chunk that a tier's policy knows.
pub(super) fn flag_of(tier: Tier) -> u16 {
    match tier {
        Tier::Device => note::IN_DEVICE,
        Tier::Disk => note::IN_DISK,
        _ => note::IN_HOST,
    }
}

/// All of a list in their order, none twice; none where none is.
fn each_once<T: Ord + Copy>(all: &[T]) -> Option<Vec<T>> {
    let mut seen = BTreeSet::new();
    let once: Vec<T> = all.iter().copied().filter(|&one| seen.insert(one)).collect();
    (once.len() < all.len()).then_some(once)
}
