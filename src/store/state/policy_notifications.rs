//! What policies are told: who is asked for, comes, is in use, has left; and what they
//! mean when they choose.

use std::collections::BTreeSet;

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::policy::Hint;
use crate::policy::evictor::{New, Who};
use crate::store::events::Kind;
use crate::store::state::chunk_table::note;
use crate::store::state::device_replicas::Replicas;
use crate::store::state::granularity::{Granularity, Part, cell_id};
use crate::store::state::policy_objects::{comes, member, new_cell, new_object};
use crate::store::state::reclaim::{cell_of_owner, owner_of};
use crate::store::state::tier_cache::{Chosen, TierCache};
use crate::store::state::transfer::TransferKind;
use crate::store::state::{At, StoreState};

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
    fn add(&mut self, cache: &TierCache, new: New, home: u64) {
        let is_known = cache.knows(new.id);
        self.all.push(Comer { id: new.id, home, is_known });
        if !is_known {
            self.new.push(new);
        }
    }
}

impl StoreState {
    /// Tells the policies of the chunks of a move: they are asked for, and come.
    pub(super) fn notify_policies(&mut self, number: u32) {
        let one = &mut self.moves[number].spec;
        let (who, kind, by_chunk) = (one.who, one.kind, one.by_chunk);
        let all = std::mem::take(&mut one.slots);
        let once = if by_chunk { each_once(&all) } else { None };
        let slots = once.as_deref().unwrap_or(&all);
        let rows = &mut self.tables[one.table as usize];
        for slot in slots.iter().filter(|&&slot| slot != NONE).map(|&slot| slot as usize) {
            match kind {
                TransferKind::Get => rows.uses[slot] = rows.uses[slot].saturating_add(1),
                TransferKind::Put => rows.classes[slot] = who.priority.unwrap_or(1),
                _ => {}
            }
        }
        if kind == TransferKind::Get {
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                self.notify_access(number, slots, tier);
            }
        }
        match self.host_cache.granularity {
            Granularity::Chunk => self.notify_chunks(number, slots),
            Granularity::Cell => self.notify_cells(number, slots),
            // Blocks have nothing to do with each other: they go one by one.
            Granularity::Session if by_chunk => self.notify_each(number, slots),
            Granularity::Session => self.notify_session(number, slots),
        }
        self.moves[number].spec.slots = all;
    }

    /// A move asks a tier's policy for what it is to get.
    fn notify_access(&mut self, number: u32, slots: &[Slot], tier: Tier) {
        let one = &self.moves[number].spec;
        let rows = &self.tables[one.table as usize];
        let Some(cache) =
            cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier)
        else {
            return;
        };
        // Chunks that are all there are asked for by their rows.
        let there = slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let chunks = || there.clone().take(if one.asked.is_empty() { usize::MAX } else { 0 });
        let chunks = || chunks().chain(one.asked.iter().copied());
        let (mut who, mut ids) = (one.who, Vec::with_capacity(slots.len()));
        match cache.granularity {
            Granularity::Session if one.by_chunk => {
                who.session = None;
                ids.extend(chunks());
            }
            Granularity::Chunk => ids.extend(chunks()),
            Granularity::Cell => {
                let layers = one.first_layer..one.first_layer + one.layers;
                let of = |layer| chunks().map(move |id| cell_id(id, layer));
                // Who is last in a path leaves first: late layers, and of those the end.
                ids.extend(layers.flat_map(of));
                who.tokens_each = (who.tokens_each / rows.layout.layers() as u32).max(1);
            }
            Granularity::Session => {
                ids.extend(who.session);
                who.tokens_each = who.tokens_each.saturating_mul(slots.len() as u32);
            }
        }
        if one.by_chunk {
            // Behind one that is missing policies see nothing: those that they know go first.
            ids = each_once(&ids).unwrap_or(ids);
            ids.sort_by_key(|&id| !cache.knows(id));
        }
        cache.look(self.now_ns, &who, &ids);
    }

    /// Chunks of a move that come to memory.
    fn notify_chunks(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, kind, table) = (one.who, one.kind, one.table);
        let rows = &mut self.tables[table as usize];
        let mut new = Vec::new();
        for &slot in slots {
            if comes(rows, slot, kind) && !rows.has(slot, note::IN_HOST) {
                rows.set(slot, note::IN_HOST);
                new.push(new_object(&self.spaces, rows, slot));
            }
        }
        if new.is_empty() || self.host_cache.insert(self.now_ns, &who, &new) {
            slots.iter().for_each(|&slot| self.note_held(table, slot));
            return;
        }
        // One by one, then, when cells have come.
        let rows = &mut self.tables[table as usize];
        for id in new {
            if let Some(slot) = rows.chunks.find_id(id.id) {
                rows.clear(slot, note::IN_HOST);
            }
        }
    }

    /// Cells of a move that come to memory.
    fn notify_cells(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, table) = (one.who, one.table);
        let mut news = News::default();
        for layer in one.first_layer..one.first_layer + one.layers {
            for &slot in slots {
                let rows = &self.tables[table as usize];
                let below = rows.chunks.marks(slot).and_then(|marks| marks.get(layer));
                let is_below = below.is_some_and(|marks| marks.there() & 1 << DISK != 0);
                if one.kind == TransferKind::Put || is_below {
                    let cell = Cell { chunk: slot, layer };
                    let new = new_cell(&self.spaces, rows, cell);
                    news.add(&self.host_cache, new, owner_of(table, cell));
                }
            }
        }
        // Each that comes later, and was not told of now, must find room.
        let pieces = (self.config.host_bytes.saturating_sub(self.host.live_bytes())) / PIECE_BYTES;
        let spare = pieces + self.config.max_jobs as u64;
        if self.host_cache.has_room(news.new.len(), spare) {
            self.enter_cells(table, Tier::Host, &who, &news);
        }
        slots.iter().for_each(|&slot| self.note_held(table, slot));
    }

    /// Chunks of a move are its session's from now on, in all tiers.
    fn notify_session(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (who, kind, table) = (one.who, one.kind, one.table);
        let Some(id) = who.session else { return self.notify_each(number, slots) };
        for tier in [Tier::Host, Tier::Disk] {
            let rows = &mut self.tables[table as usize];
            let is_last = self.disk_cache.is_none() || tier == Tier::Disk;
            let cache =
                cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier);
            let Some(cache) = cache.filter(|cache| cache.granularity == Granularity::Session)
            else {
                continue;
            };
            let mut members = Vec::with_capacity(slots.len());
            for &slot in slots.iter().filter(|&&slot| slot != NONE) {
                rows.users[slot as usize] = id;
                let will_be = tier == Tier::Host && comes(rows, slot, kind);
                if !will_be && !rows.has(slot, flag_of(tier)) {
                    continue;
                }
                // Alone it was told to be in use; a session's object never is.
                if is_last && rows.has(slot, note::HELD) {
                    cache.hold(rows.id(slot), false);
                    rows.clear(slot, note::HELD);
                }
                rows.set(slot, flag_of(tier));
                members.push(member(rows, At { table, slot }));
            }
            if !members.is_empty() && !cache.join(self.now_ns, &who, id, &members) {
                members.iter().for_each(|member| rows.clear(member.at.slot, flag_of(tier)));
            }
        }
    }

    /// Each chunk of a move by itself.
    fn notify_each(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.moves[number].spec;
        let (table, kind) = (one.table, one.kind);
        for &slot in slots {
            let at = At { table, slot };
            if comes(&self.tables[table as usize], slot, kind) {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
    }

    /// Tells a tier's policy of cells.
    fn enter_cells(&mut self, table: u32, tier: Tier, who: &Who, news: &News) {
        let is_last = self.is_last(tier);
        let Some(cache) =
            cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier)
        else {
            return;
        };
        if !news.new.is_empty() {
            cache.insert(self.now_ns, who, &news.new);
        }
        let rows = &mut self.tables[table as usize];
        for comer in &news.all {
            if !cache.set_home(comer.id, comer.home) {
                continue;
            }
            let slot = cell_of_owner(comer.home).1.chunk;
            rows.set(slot, flag_of(tier));
            if is_last && !comer.is_known && rows.has(slot, note::HELD) {
                cache.hold(comer.id, true);
            }
        }
    }

    /// A cell has come to a tier.
    pub(super) fn arrived(&mut self, table: u32, cell: Cell, tier: Tier) {
        let at = At { table, slot: cell.chunk };
        self.enter_cache(at, tier, Part::Layer(cell.layer));
        let rows = &self.tables[table as usize];
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
    pub(super) fn enter_cache(&mut self, at: At, tier: Tier, part: Part) {
        let rows = &self.tables[at.table as usize];
        let priority = Some(rows.classes[at.slot as usize].min(2));
        let who = Who { priority, ..Who::default() };
        let Some(cache) =
            cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier)
        else {
            return;
        };
        let entered = match cache.granularity {
            Granularity::Cell => return self.enter_part(at, tier, part, &who),
            _ if rows.has(at.slot, flag_of(tier)) => return,
            Granularity::Chunk => {
                cache.insert(self.now_ns, &who, &[new_object(&self.spaces, rows, at.slot)])
            }
            Granularity::Session => {
                let (alone, user) = (rows.id(at.slot), rows.users[at.slot as usize]);
                let id = if part == Part::All || user == 0 { alone } else { user };
                cache.join(self.now_ns, &who, id, &[member(rows, at)])
            }
        };
        if entered {
            self.tables[at.table as usize].set(at.slot, flag_of(tier));
            self.note_held(at.table, at.slot);
        }
    }

    fn enter_part(&mut self, at: At, tier: Tier, part: Part, who: &Who) {
        let rows = &self.tables[at.table as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return };
        let Some(cache) =
            cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier)
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
                news.add(cache, new_cell(&self.spaces, rows, cell), owner_of(at.table, cell));
            }
        }
        if !news.all.is_empty() {
            self.enter_cells(at.table, tier, who, &news);
            self.note_held(at.table, at.slot);
        }
    }

    /// A cell has left a tier.
    pub(super) fn departed(&mut self, table: u32, cell: Cell, tier: Tier) {
        let at = At { table, slot: cell.chunk };
        let rows = &self.tables[table as usize];
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
        let id = cell_id(self.tables[table as usize].id(cell.chunk), cell.layer);
        let cache = cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier);
        if let Some(cache) =
            cache.filter(|cache| cache.granularity == Granularity::Cell && cache.knows(id))
        {
            cache.remove(self.now_ns, id);
        }
    }

    /// Nothing of a chunk is in a tier any more: its policy need not know it.
    pub(super) fn untell(&mut self, at: At, tier: Tier) {
        let is_last = self.is_last(tier);
        let rows = &mut self.tables[at.table as usize];
        if !rows.has(at.slot, flag_of(tier)) {
            return;
        }
        let (id, layers) = (rows.id(at.slot), rows.layout.layers());
        let Some(cache) =
            cache_of(&mut self.host_cache, &mut self.disk_cache, &mut self.replicas, tier)
        else {
            return;
        };
        let is_out = match cache.granularity {
            // One that others continue stays, and frees nothing when it is chosen.
            Granularity::Chunk => cache.remove(self.now_ns, id),
            Granularity::Cell => {
                for id in (0..layers).map(|layer| cell_id(id, layer)) {
                    if cache.knows(id) {
                        cache.remove(self.now_ns, id);
                    }
                }
                true
            }
            Granularity::Session => {
                cache.leave(self.now_ns, at);
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
    pub(super) fn notify_hint(
        &mut self,
        table: u32,
        slots: &[Slot],
        who: &Who,
        hint: &Hint,
    ) -> Result<()> {
        let rows = &self.tables[table as usize];
        let chunks = || slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let layers = rows.layout.layers();
        let replicas = self.replicas.as_mut().map(|replicas| &mut replicas.cache);
        let caches = [replicas, Some(&mut self.host_cache), self.disk_cache.as_mut()];
        let mut some = Vec::with_capacity(MOST_HINTS);
        for cache in caches.into_iter().flatten() {
            let of = |layer| chunks().map(move |id| cell_id(id, layer));
            let mut ids: Box<dyn Iterator<Item = u64>> = match (cache.granularity, who.session) {
                (Granularity::Session, Some(session)) => Box::new(std::iter::once(session)),
                (Granularity::Chunk | Granularity::Session, _) => Box::new(chunks()),
                (Granularity::Cell, _) => Box::new((0..layers).flat_map(of)),
            };
            // Also where there are none: it is said of the session as well.
            loop {
                some.clear();
                some.extend(ids.by_ref().take(MOST_HINTS));
                cache.hint(self.now_ns, who, &some, hint)?;
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
                let (table, cell) = cell_of_owner(home);
                let rows = self.tables.get(table as usize)?;
                // Its row may be another chunk's by now.
                let is_it = rows.chunks.chunk(cell.chunk).is_some()
                    && cell_id(rows.id(cell.chunk), cell.layer) == id;
                let at = At { table, slot: cell.chunk };
                is_it.then_some((at, Part::Layer(cell.layer)))
            }
        }
    }

    /// The chunk of an id that a policy gave.
    fn chunk_of_id(&self, id: u64) -> Option<At> {
        let mut tables = self.tables.iter().enumerate();
        tables.find_map(|(at, table)| {
            let slot = table.chunks.find_id(id)?;
            Some(At { table: at as u32, slot })
        })
    }
}

/// Objects that a policy is told of at once: a path, or blocks, may have millions of cells.
const MOST_HINTS: usize = 4096;
/// The smallest piece of memory that a cell can have.
pub(super) const PIECE_BYTES: u64 = 4096;

/// The shelf of a tier, where it has one.
fn cache_of<'a>(
    host: &'a mut TierCache,
    disk: &'a mut Option<TierCache>,
    replicas: &'a mut Option<Box<Replicas>>,
    tier: Tier,
) -> Option<&'a mut TierCache> {
    match tier {
        Tier::Device => replicas.as_mut().map(|replicas| &mut replicas.cache),
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
