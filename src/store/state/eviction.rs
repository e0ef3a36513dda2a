//! Eviction from host memory and reclaim: victim choice, policy notifications, references, and what
//! other owners of the budget request.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::budget::{ALL_TIERS, Tier};
use crate::base::status::Result;
use crate::meta::chunks::{Cell, Chunk, Dropped, Location};
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Facts;
use crate::policy::Hint;
use crate::policy::evictor::{NewObject, RequestContext};
use crate::store::admission::Admission;
use crate::store::admission::Candidate;
use crate::store::events::Kind;
use crate::store::state::Config;
use crate::store::state::batches::WorkerKind;
use crate::store::state::chunk_table::{Part, note};
use crate::store::state::device_tier::Replicas;
use crate::store::state::tier_cache::{
    Chosen, Demotion, Granularity, Member, PIECE_BYTES, TierCache, cell_id, cell_of_owner, flag_of,
    owner_of, units_of,
};
use crate::store::state::transfer::TransferKind;
use crate::store::state::{
    At, ChunkTable, DEVICE, DEVICE_MASK, DISK, HOST, HOST_MASK, Namespaces, StoreState, Write,
};
use crate::tier::host::Piece;

// ---------- policy objects
//
// Descriptions of chunks and cells for policies.

/// Whether a transfer loads a chunk into memory.
pub(super) fn arrives_in_host(rows: &ChunkTable, slot: Slot, kind: TransferKind) -> bool {
    kind == TransferKind::Put || rows.chunks.chunk(slot).is_some_and(|row| row.cells()[DISK] > 0)
}

pub(super) fn member(rows: &ChunkTable, at: At) -> Member {
    let row = rows.chunks.chunk(at.slot);
    Member {
        at,
        position: row.map_or(0, |row| row.position()),
        units: units_of(rows.chunk_bytes(at.slot)),
        tokens: row.map_or(0, |row| row.valid_tokens()),
    }
}

/// A chunk as a policy object. If its namespace allows holes it has no parent, so it may be evicted
/// before the chunks that continue it.
pub(super) fn new_object(namespaces: &Namespaces, rows: &ChunkTable, slot: Slot) -> NewObject {
    let row = rows.chunks.chunk(slot);
    let namespace = row.and_then(|row| namespaces.get(row.namespace() as usize));
    let holes = namespace.is_some_and(|namespace| namespace.holes);
    let parent = rows.chunks.parent(slot).filter(|&parent| parent != NONE && !holes);
    let tokens = row.map_or(0, |row| row.valid_tokens());
    let context = row.map_or(0, |row| row.position()).saturating_mul(rows.layout.chunk_tokens());
    NewObject {
        id: rows.id(slot),
        parent: parent.map(|parent| rows.id(parent)),
        units: units_of(rows.chunk_bytes(slot)),
        facts: Facts { tokens, context, ..Facts::default() },
    }
}

/// A cell as a policy object. Its parent is the cell of the same layer in the chunk before.
pub(super) fn new_cell(namespaces: &Namespaces, rows: &ChunkTable, cell: Cell) -> NewObject {
    let chunk = new_object(namespaces, rows, cell.chunk);
    let small = |n: usize| u16::try_from(n).unwrap_or(u16::MAX);
    NewObject {
        id: cell_id(chunk.id, cell.layer),
        parent: chunk.parent.map(|parent| cell_id(parent, cell.layer)),
        units: units_of(rows.planes(cell).bytes()),
        facts: Facts {
            layer: small(cell.layer),
            layers: small(rows.layout.layers()),
            chunk: rows.chunks.chunk(cell.chunk).map_or(0, |row| row.position()),
            ..chunk.facts
        },
    }
}

// ---------- policy notifications
//
// Notifications to policies: access, insert, remove, reference; and the meaning of their victims.

/// Cells that a transfer brings into memory.
#[derive(Default)]
struct NewCells {
    /// Cells that the policy does not know.
    new: Vec<NewObject>,
    all: Vec<NewEntry>,
}

/// A cell being loaded into memory: policy id, place, and whether the policy knew it.
struct NewEntry {
    id: u64,
    owner: u64,
    is_known: bool,
}

impl NewCells {
    /// Adds a cell. One that was evicted while others continue it is still known.
    fn add(&mut self, cache: &TierCache, new: NewObject, owner: u64) {
        let is_known = cache.knows(new.id);
        self.all.push(NewEntry { id: new.id, owner, is_known });
        if !is_known {
            self.new.push(new);
        }
    }
}

impl StoreState {
    /// Notifies the policies of the chunks of a transfer: of the access, and of chunks that it
    /// brings.
    pub(super) fn notify_policies(&mut self, number: u32) {
        let spec = &mut self.transfers.table[number].spec;
        let (request, kind, by_chunk) = (spec.context, spec.kind, spec.by_chunk);
        let all = std::mem::take(&mut spec.slots);
        let once = if by_chunk { each_once(&all) } else { None };
        let slots = once.as_deref().unwrap_or(&all);
        let rows = &mut self.tables[spec.table as usize];
        for slot in slots.iter().filter(|&&slot| slot != NONE).map(|&slot| slot as usize) {
            match kind {
                TransferKind::Get => rows.uses[slot] = rows.uses[slot].saturating_add(1),
                TransferKind::Put => rows.classes[slot] = request.priority.unwrap_or(1),
                _ => {}
            }
        }
        if kind == TransferKind::Get {
            for tier in [Tier::Device, Tier::Host, Tier::Disk] {
                self.notify_access(number, slots, tier);
            }
        }
        match self.eviction.host.granularity {
            Granularity::Chunk => self.notify_chunks(number, slots),
            Granularity::Cell => self.notify_cells(number, slots),
            // Blocks are independent of each other, so each is an access of its own.
            Granularity::Session if by_chunk => self.notify_each(number, slots),
            Granularity::Session => self.notify_session(number, slots),
        }
        self.transfers.table[number].spec.slots = all;
    }

    /// Notifies a tier's policy of the access of a get.
    fn notify_access(&mut self, number: u32, slots: &[Slot], tier: Tier) {
        let one = &self.transfers.table[number].spec;
        let rows = &self.tables[one.table as usize];
        let Some(cache) =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier)
        else {
            return;
        };
        // Chunks that all have rows are named by their ids.
        let known = slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let chunks = || known.clone().take(if one.requested.is_empty() { usize::MAX } else { 0 });
        let chunks = || chunks().chain(one.requested.iter().copied());
        let (mut request, mut ids) = (one.context, std::mem::take(&mut self.eviction.ids));
        ids.clear();
        match cache.granularity {
            Granularity::Session if one.by_chunk => {
                request.session = None;
                ids.extend(chunks());
            }
            Granularity::Chunk => ids.extend(chunks()),
            Granularity::Cell => {
                let layers = one.first_layer..one.first_layer + one.layers;
                let of = |layer| chunks().map(move |id| cell_id(id, layer));
                // The last object of a path is evicted first: late layers, and within a layer the
                // end.
                ids.extend(layers.flat_map(of));
                request.tokens_each = (request.tokens_each / rows.layout.layers() as u32).max(1);
            }
            Granularity::Session => {
                ids.extend(request.session);
                request.tokens_each = request.tokens_each.saturating_mul(slots.len() as u32);
            }
        }
        if one.by_chunk {
            // A path ends for a policy at the first missing object, so known objects are listed first.
            ids = each_once(&ids).unwrap_or(ids);
            ids.sort_by_key(|&id| !cache.knows(id));
        }
        cache.notify_access(self.now_ns, &request, &ids);
        self.eviction.ids = reusable(ids);
    }

    /// Inserts the chunks that a transfer brings into memory. The transfer references them.
    fn notify_chunks(&mut self, number: u32, slots: &[Slot]) {
        let held = self.is_last(Tier::Host);
        let notes = note::IN_HOST | if held { note::HELD } else { 0 };
        let spec = &self.transfers.table[number].spec;
        let (request, kind, table) = (spec.context, spec.kind, spec.table);
        let rows = &mut self.tables[table as usize];
        let mut new = std::mem::take(&mut self.eviction.new);
        new.clear();
        for &slot in slots {
            if arrives_in_host(rows, slot, kind) && !rows.has(slot, note::IN_HOST) {
                rows.set(slot, notes);
                new.push(new_object(&self.namespaces, rows, slot));
            }
        }
        let now_ns = self.now_ns;
        if new.is_empty() || self.eviction.host.insert_as(now_ns, &request, &new, held) {
            self.eviction.new = reusable(new);
            return;
        }
        // The policy is full. Each chunk is inserted when its cells have arrived.
        let rows = &mut self.tables[table as usize];
        for one in &new {
            if let Some(slot) = rows.chunks.find_id(one.id) {
                rows.clear(slot, notes);
            }
        }
        self.eviction.new = reusable(new);
    }

    /// Inserts the cells that a transfer brings into memory.
    fn notify_cells(&mut self, number: u32, slots: &[Slot]) {
        let one = &self.transfers.table[number].spec;
        let (request, table) = (one.context, one.table);
        let mut new_cells = NewCells::default();
        for layer in one.first_layer..one.first_layer + one.layers {
            for &slot in slots {
                let rows = &self.tables[table as usize];
                let below = rows.chunks.marks(slot).and_then(|marks| marks.get(layer));
                let is_below = below.is_some_and(|marks| marks.resident_tiers() & 1 << DISK != 0);
                if one.kind == TransferKind::Put || is_below {
                    let cell = Cell { chunk: slot, layer };
                    let new = new_cell(&self.namespaces, rows, cell);
                    new_cells.add(&self.eviction.host, new, owner_of(table, cell));
                }
            }
        }
        // Cells that arrive later without being announced here must find room, too.
        let pieces = (self.config.host_bytes.saturating_sub(self.host.live_bytes())) / PIECE_BYTES;
        let spare = pieces + self.config.max_jobs as u64;
        if self.eviction.host.has_room(new_cells.new.len(), spare) {
            self.enter_cells(table, Tier::Host, &request, &new_cells);
        }
        slots.iter().for_each(|&slot| self.note_held(table, slot));
    }

    /// Moves the chunks of a transfer to its session's object, in all tiers.
    fn notify_session(&mut self, number: u32, slots: &[Slot]) {
        let spec = &self.transfers.table[number].spec;
        let (request, kind, table) = (spec.context, spec.kind, spec.table);
        let Some(id) = request.session else { return self.notify_each(number, slots) };
        for tier in [Tier::Host, Tier::Disk] {
            let rows = &mut self.tables[table as usize];
            let is_last = self.eviction.disk.is_none() || tier == Tier::Disk;
            let cache = cache_of(
                &mut self.eviction.host,
                &mut self.eviction.disk,
                &mut self.replicas,
                tier,
            );
            let Some(cache) = cache.filter(|cache| cache.granularity == Granularity::Session)
            else {
                continue;
            };
            let mut members = Vec::with_capacity(slots.len());
            for &slot in slots.iter().filter(|&&slot| slot != NONE) {
                rows.users[slot as usize] = id;
                let will_be = tier == Tier::Host && arrives_in_host(rows, slot, kind);
                if !will_be && !rows.has(slot, flag_of(tier)) {
                    continue;
                }
                // The policy was notified of the references of a chunk that is an object. It never
                // is for objects that are sessions.
                if is_last && rows.has(slot, note::HELD) {
                    cache.hold(rows.id(slot), false);
                    rows.clear(slot, note::HELD);
                }
                rows.set(slot, flag_of(tier));
                members.push(member(rows, At { table, slot }));
            }
            if !members.is_empty() && !cache.join(self.now_ns, &request, id, &members) {
                members.iter().for_each(|member| rows.clear(member.at.slot, flag_of(tier)));
            }
        }
    }

    /// Notifies the policies of each chunk of a transfer as a path of its own.
    fn notify_each(&mut self, number: u32, slots: &[Slot]) {
        let spec = &self.transfers.table[number].spec;
        let (table, kind) = (spec.table, spec.kind);
        for &slot in slots {
            let at = At { table, slot };
            if arrives_in_host(&self.tables[table as usize], slot, kind) {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
    }

    /// Inserts cells into a tier's policy.
    fn enter_cells(
        &mut self,
        table: u32,
        tier: Tier,
        request: &RequestContext,
        new_cells: &NewCells,
    ) {
        let is_last = self.is_last(tier);
        let Some(cache) =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier)
        else {
            return;
        };
        if !new_cells.new.is_empty() {
            cache.insert(self.now_ns, request, &new_cells.new);
        }
        let rows = &mut self.tables[table as usize];
        for entry in &new_cells.all {
            if !cache.set_cell_owner(entry.id, entry.owner) {
                continue;
            }
            let slot = cell_of_owner(entry.owner).1.chunk;
            rows.set(slot, flag_of(tier));
            if is_last && !entry.is_known && rows.has(slot, note::HELD) {
                cache.hold(entry.id, true);
            }
        }
    }

    /// A cell is resident in a tier now.
    pub(super) fn arrived(&mut self, table: u32, cell: Cell, tier: Tier) {
        let at = At { table, slot: cell.chunk };
        self.enter_cache(at, tier, Part::Layer(cell.layer));
        let rows = &self.tables[table as usize];
        let cells = rows.chunks.chunk(cell.chunk).map_or(0, |row| row.cells()[tier as usize]);
        if usize::from(cells) == rows.layout.layers() {
            self.publish(Kind::Stored, tier, at);
        }
        if tier == Tier::Disk && cells == 1 {
            self.arrived_on_disk(at);
        }
    }

    /// Makes sure that a tier's policy has a part of a chunk: a cell that has arrived, or what
    /// remains after an eviction. A remainder belongs to no session.
    pub(super) fn enter_cache(&mut self, at: At, tier: Tier, part: Part) {
        // Before the cells of a get arrive nothing counts: none may arrive.
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        if row.is_some_and(|row| row.cells()[tier as usize] > 0) {
            self.charge_quota(at, tier as usize);
        }
        let rows = &self.tables[at.table as usize];
        let Some(cache) =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier)
        else {
            return;
        };
        if cache.granularity != Granularity::Cell && rows.has(at.slot, flag_of(tier)) {
            return;
        }
        let priority = Some(rows.classes[at.slot as usize].min(2));
        let request = RequestContext { priority, ..RequestContext::default() };
        let entered = match cache.granularity {
            Granularity::Cell => return self.enter_part(at, tier, part, &request),
            Granularity::Chunk => {
                cache.insert(self.now_ns, &request, &[new_object(&self.namespaces, rows, at.slot)])
            }
            Granularity::Session => {
                let (alone, user) = (rows.id(at.slot), rows.users[at.slot as usize]);
                let id = if part == Part::All || user == 0 { alone } else { user };
                cache.join(self.now_ns, &request, id, &[member(rows, at)])
            }
        };
        if entered {
            self.tables[at.table as usize].set(at.slot, flag_of(tier));
            self.note_held(at.table, at.slot);
        }
    }

    fn enter_part(&mut self, at: At, tier: Tier, part: Part, request: &RequestContext) {
        let rows = &self.tables[at.table as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return };
        let Some(cache) =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier)
        else {
            return;
        };
        let mut new_cells = NewCells::default();
        let layers = match part {
            Part::All => 0..marks.len(),
            Part::Layer(layer) => layer..layer + 1,
        };
        for layer in layers {
            let cell = Cell { chunk: at.slot, layer };
            let is_resident =
                marks.get(layer).is_some_and(|m| m.resident_tiers() & 1 << tier as u8 != 0);
            if is_resident {
                new_cells.add(
                    cache,
                    new_cell(&self.namespaces, rows, cell),
                    owner_of(at.table, cell),
                );
            }
        }
        if !new_cells.all.is_empty() {
            self.enter_cells(at.table, tier, request, &new_cells);
            self.note_held(at.table, at.slot);
        }
    }

    /// A cell is no longer resident in a tier.
    pub(super) fn note_removed(&mut self, table: u32, cell: Cell, tier: Tier) {
        let at = At { table, slot: cell.chunk };
        self.note_removed_cells(at, tier, std::iter::once(cell.layer));
    }

    /// Cells of these layers of a chunk are no longer resident in a tier.
    fn note_removed_cells(
        &mut self,
        at: At,
        tier: Tier,
        gone: impl ExactSizeIterator<Item = usize>,
    ) {
        let rows = &self.tables[at.table as usize];
        let Some(row) = rows.chunks.chunk(at.slot) else { return };
        let remaining = usize::from(row.cells()[tier as usize]);
        let is_gone = row.cells_somewhere() == 0;
        if remaining + gone.len() == rows.layout.layers() {
            self.publish(Kind::Removed, tier, at);
        }
        if remaining == 0 {
            self.discharge_quota(at, tier as usize);
            if is_gone {
                // A later put stores the chunk anew.
                self.tables[at.table as usize].clear(at.slot, note::STORED);
            }
            if tier == Tier::Disk {
                self.removed_from_disk(at);
            }
            return self.remove_from_policy(at, tier);
        }
        let chunk = self.tables[at.table as usize].id(at.slot);
        let cache =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier);
        let Some(cache) = cache.filter(|cache| cache.granularity == Granularity::Cell) else {
            return;
        };
        for id in gone.map(|layer| cell_id(chunk, layer)) {
            if cache.knows(id) {
                cache.remove(self.now_ns, id);
            }
        }
    }

    /// Removes a chunk from a tier's policy, since none of its cells is resident in the tier.
    pub(super) fn remove_from_policy(&mut self, at: At, tier: Tier) {
        let is_last = self.is_last(tier);
        let rows = &mut self.tables[at.table as usize];
        if !rows.has(at.slot, flag_of(tier)) {
            return;
        }
        let (id, layers) = (rows.id(at.slot), rows.layout.layers());
        let Some(cache) =
            cache_of(&mut self.eviction.host, &mut self.eviction.disk, &mut self.replicas, tier)
        else {
            return;
        };
        let is_out = match cache.granularity {
            // An object that others continue stays, with size 0.
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
                cache.remove_member(self.now_ns, at);
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

    /// Notifies the policies of a hint for a session's chunks; for each chunk alone if `request` names
    /// no session.
    pub(super) fn notify_hint(
        &mut self,
        table: u32,
        slots: &[Slot],
        request: &RequestContext,
        hint: &Hint,
    ) -> Result<()> {
        let rows = &self.tables[table as usize];
        let chunks = || slots.iter().filter(|&&slot| slot != NONE).map(|&slot| rows.id(slot));
        let layers = rows.layout.layers();
        let replicas = self.replicas.as_mut().map(|replicas| &mut replicas.cache);
        let caches = [replicas, Some(&mut self.eviction.host), self.eviction.disk.as_mut()];
        let mut some = Vec::with_capacity(MOST_HINTS);
        for cache in caches.into_iter().flatten() {
            let of = |layer| chunks().map(move |id| cell_id(id, layer));
            let mut ids: Box<dyn Iterator<Item = u64>> = match (cache.granularity, request.session)
            {
                (Granularity::Session, Some(session)) => Box::new(std::iter::once(session)),
                (Granularity::Chunk | Granularity::Session, _) => Box::new(chunks()),
                (Granularity::Cell, _) => Box::new((0..layers).flat_map(of)),
            };
            // Runs once for no chunks, too: the hint concerns the session as well.
            loop {
                some.clear();
                some.extend(ids.by_ref().take(MOST_HINTS));
                cache.hint(self.now_ns, request, &some, hint)?;
                if some.len() < MOST_HINTS {
                    break;
                }
            }
        }
        Ok(())
    }

    /// The chunk and the cells of a victim.
    pub(super) fn chosen(&self, chosen: Chosen) -> Option<(At, Part)> {
        match chosen {
            Chosen::Chunk(id) => Some((self.chunk_of_id(id)?, Part::All)),
            Chosen::Member(at) => Some((at, Part::All)),
            Chosen::Cell(id, owner) => {
                let (table, cell) = cell_of_owner(owner);
                let rows = self.tables.get(table as usize)?;
                // Its row may be another chunk's by now.
                let is_it = rows.chunks.chunk(cell.chunk).is_some()
                    && cell_id(rows.id(cell.chunk), cell.layer) == id;
                let at = At { table, slot: cell.chunk };
                is_it.then_some((at, Part::Layer(cell.layer)))
            }
        }
    }

    /// The chunk of a policy id.
    fn chunk_of_id(&self, id: u64) -> Option<At> {
        let mut tables = self.tables.iter().enumerate();
        tables.find_map(|(at, table)| {
            let slot = table.chunks.find_id(id)?;
            Some(At { table: at as u32, slot })
        })
    }
}

/// Objects in one notification of a hint. A path or a list of blocks may have millions of cells.
const MOST_HINTS: usize = 4096;
/// The policy of a tier, if it has one.
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

/// Most entries of a buffer that is kept: a large transfer must not occupy memory for long.
const MOST_KEPT: usize = 4096;

/// A buffer to reuse.
fn reusable<T>(buffer: Vec<T>) -> Vec<T> {
    if buffer.capacity() > MOST_KEPT { Vec::new() } else { buffer }
}

/// Removes duplicates and keeps the order. `None` if there is none.
fn each_once<T: Ord + Copy>(all: &[T]) -> Option<Vec<T>> {
    let mut seen = BTreeSet::new();
    let once: Vec<T> = all.iter().copied().filter(|&one| seen.insert(one)).collect();
    (once.len() < all.len()).then_some(once)
}

/// Eviction from host memory and disk.
pub(super) struct Eviction {
    pub(super) host: TierCache,
    pub(super) disk: Option<TierCache>,
    /// Decides which evicted chunks are written to disk.
    pub(super) admission: Admission,
    /// Victims in a row that could not leave memory.
    pub(super) refusals: u32,
    /// When the last of them was refused.
    pub(super) refused_ns: u64,
    pub(super) reclaim_targets: ReclaimTargets,
    /// Buffer for objects that enter a policy.
    new: Vec<NewObject>,
    /// Buffer for policy ids.
    ids: Vec<u64>,
    /// Buffer for victims.
    victims: Vec<Chosen>,
    /// Buffer for cells that were dropped.
    dropped: Vec<(Cell, Dropped)>,
}

impl Eviction {
    pub(super) fn open(config: &Config, disk_bytes: Option<u64>) -> Result<Eviction> {
        let (host, disk) = config.open_caches(disk_bytes)?;
        Ok(Eviction {
            host,
            disk,
            admission: Admission::open(&config.admission, 0)?,
            refusals: 0,
            refused_ns: 0,
            reclaim_targets: ReclaimTargets::default(),
            new: Vec::new(),
            ids: Vec::new(),
            victims: Vec::new(),
            dropped: Vec::new(),
        })
    }
}

// ---------- references
//
// Notifications to policies about references.

impl StoreState {
    /// Whether a tier is the last one: cells evicted from it are lost.
    pub(super) fn is_last(&self, tier: Tier) -> bool {
        tier == if self.eviction.disk.is_some() { Tier::Disk } else { Tier::Host }
    }

    /// Notifies the policy of the last tier whether a chunk is referenced: a referenced chunk must
    /// not leave that tier.
    #[inline]
    pub(super) fn note_held(&mut self, table: u32, slot: Slot) {
        if self.replicas.is_some() {
            self.note_pinned(table, slot);
        }
        let rows = &self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return };
        let is_held = row.refs() > 0 || row.pin().is_some();
        let known = if self.eviction.disk.is_some() { note::IN_DISK } else { note::IN_HOST };
        if rows.has(slot, known) && is_held != rows.has(slot, note::HELD) {
            self.notify_held(table, slot, is_held);
        }
        if !is_held {
            self.released_at_end(At { table, slot });
        }
    }

    /// Notifies a policy that its victim must stay, because other chunks continue it whose KV is
    /// not in that tier: it is in memory and not written, or at a remote. Policies know only the
    /// chunks of their own tier. The chunk is no candidate until those have left. Returns whether
    /// this is so now.
    pub(super) fn note_continued(&mut self, at: At, tier: Tier) -> bool {
        let is_continued = |row: &Chunk| row.is_blocked() && row.refs() == 0 && row.pin().is_none();
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        if !row.is_some_and(is_continued) || !self.is_last(tier) {
            return false;
        }
        self.notify_held(at.table, at.slot, true);
        self.tables[at.table as usize].has(at.slot, note::HELD)
    }

    fn notify_held(&mut self, table: u32, slot: Slot, is_held: bool) {
        let rows = &mut self.tables[table as usize];
        let (cache, flag) = match &mut self.eviction.disk {
            Some(cache) => (cache, note::IN_DISK),
            None => (&mut self.eviction.host, note::IN_HOST),
        };
        if is_held == rows.has(slot, note::HELD) || !rows.has(slot, flag) {
            return;
        }
        let id = rows.id(slot);
        let is_notified = match cache.granularity {
            Granularity::Chunk => cache.hold(id, is_held),
            Granularity::Cell => {
                let all = (0..rows.layout.layers()).map(|layer| cell_id(id, layer));
                all.fold(false, |any, id| (cache.knows(id) && cache.hold(id, is_held)) | any)
            }
            Granularity::Session => {
                cache.groups.of(At { table, slot }) == Some(id) && cache.hold(id, is_held)
            }
        };
        if is_notified {
            let change = if is_held { ChunkTable::set } else { ChunkTable::clear };
            change(rows, slot, note::HELD);
        }
    }

    /// Notifies the device policy whether a chunk is pinned.
    fn note_pinned(&mut self, table: u32, slot: Slot) {
        let Some(replicas) = self.replicas.as_mut() else { return };
        let rows = &mut self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return };
        let is_pinned = row.pin().is_some();
        if !rows.has(slot, note::IN_DEVICE) || is_pinned == rows.has(slot, note::PINNED) {
            return;
        }
        if replicas.cache.hold(rows.id(slot), is_pinned) {
            match is_pinned {
                true => rows.set(slot, note::PINNED),
                false => rows.clear(slot, note::PINNED),
            }
        }
    }
}

/// Most victims of one call of a policy. Free memory is checked again after them.
pub(super) const MOST_VICTIMS: usize = 64;
/// Cells of a put for which memory is freed ahead.
const MOST_UPCOMING: u64 = 64;
/// Refused victims in a row after which waiters for memory fail: these could neither be written nor
/// dropped.
const MOST_REFUSALS: u32 = 16;
/// After that, no memory is freed ahead of need for so long.
const PAUSE_NS: u64 = 1_000_000_000;

impl StoreState {
    /// Bytes that should be freed now.
    fn wanted_bytes(&self) -> u64 {
        let share = |part: f64| (self.config.host_bytes as f64 * part) as u64;
        let used = self.host.live_bytes();
        let ahead = match used > share(self.config.high) && !self.is_backing_off() {
            true => used - share(self.config.low),
            false => 0,
        };
        let mut waiting = self.transfers.memory_waiter_bytes;
        if waiting > self.writeback.demoting_bytes {
            waiting += self.upcoming_bytes();
        }
        ahead.max(waiting).saturating_sub(self.writeback.demoting_bytes)
    }

    /// Bytes of the next cells of the put whose cell is the first to wait for memory: one call of the
    /// policy frees memory for many of them.
    fn upcoming_bytes(&self) -> u64 {
        let Some(id) = self.transfers.memory_waiters.first() else { return 0 };
        let transfer = &self.transfers.table[self.transfers.jobs[id].number];
        let spec = &transfer.spec;
        if spec.kind != TransferKind::Put {
            return 0;
        }
        let rows = &self.tables[spec.table as usize];
        let next = transfer.cursor..transfer.cells().min(transfer.cursor + MOST_UPCOMING);
        let bytes = next.map(|at| {
            let (chunk, layer) = transfer.place(at);
            let cell = Cell { chunk: spec.slots[chunk], layer: spec.first_layer + layer };
            let marks = rows.chunks.marks(cell.chunk).map(|marks| marks[cell.layer]);
            let is_new = marks.is_some_and(|marks| marks.is_nowhere());
            if is_new { rows.planes(cell).bytes() } else { 0 }
        });
        bytes.sum()
    }

    /// Whether writes were refused a moment ago, so that they are not tried again.
    pub(super) fn is_backing_off(&self) -> bool {
        self.eviction.refusals >= MOST_REFUSALS && self.now_ns < self.eviction.refused_ns + PAUSE_NS
    }

    /// Evicts chunks from memory if that is needed. Returns whether it freed anything.
    pub(super) fn make_room(&mut self) -> bool {
        let required = self.wanted_bytes();
        if required == 0 {
            return false;
        }
        // Chunks that must stay and cannot be written would be chosen again without end.
        if self.eviction.refusals >= MOST_REFUSALS && !self.transfers.memory_waiters.is_empty() {
            self.eviction.refusals = 0;
            return self.serve_from_reserve().unwrap_or_else(|| self.fail_memory_waiter());
        }
        let mut victims = std::mem::take(&mut self.eviction.victims);
        victims.clear();
        self.eviction.host.choose(self.now_ns, required, MOST_VICTIMS, &mut victims);
        if victims.is_empty() {
            self.eviction.victims = victims;
            return self.is_stuck() && self.serve_oldest_waiter();
        }
        let mut progressed = false;
        for victim in victims.drain(..) {
            if let Some((at, part)) = self.chosen(victim) {
                // A victim whose cells are still to arrive, or that others continue, frees nothing.
                // Others do.
                progressed |= self.evict_from_host(at, part)
                    || !self.is_in_host(at, part)
                    || self.note_continued(at, Tier::Host);
            }
        }
        self.eviction.victims = victims;
        // If all victims had to stay, the policy is called again, a limited number of times.
        let tries = progressed || self.is_stuck();
        self.eviction.refusals += u32::from(tries && !progressed);
        tries
    }

    /// Whether nothing in flight can free memory.
    fn is_stuck(&self) -> bool {
        let busy = [
            WorkerKind::Copy,
            WorkerKind::Read,
            WorkerKind::Write,
            WorkerKind::Fetch,
            WorkerKind::Upload,
        ];
        !self.transfers.memory_waiters.is_empty()
            && self.writeback.demoting_bytes == 0
            && busy
                .iter()
                .all(|&workers| self.stages.in_flight[workers as usize] == self.hung(workers))
            && (0..3).all(|lane| {
                self.stages.copy.queue.waiting(lane).0 + self.stages.read.queue.waiting(lane).0 == 0
            })
            && !self.replicas.as_ref().is_some_and(|replicas| replicas.waiting())
            && self
                .remote
                .as_ref()
                .is_none_or(|remote| remote.is_quiet_to_fetch() && remote.upload_queue.is_empty())
            && !self.dependencies.is_ending_after_event()
    }

    /// Gives the oldest waiter for memory the reserve, or the memory of the weakest pin, or ends it
    /// with an error.
    fn serve_oldest_waiter(&mut self) -> bool {
        let was_served = self.serve_from_reserve();
        was_served.unwrap_or_else(|| self.drop_weakest_pin() || self.fail_memory_waiter())
    }

    fn fail_memory_waiter(&mut self) -> bool {
        self.fail_memory_waiters();
        true
    }

    /// Evicts a part of a chunk from memory: cells on disk at once, others after they are written.
    /// Returns whether memory is or will be freed.
    pub(super) fn evict_from_host(&mut self, at: At, part: Part) -> bool {
        let rows = &mut self.tables[at.table as usize];
        if part == Part::All {
            rows.clear(at.slot, note::IN_HOST);
            if self.eviction.disk.is_none() {
                rows.clear(at.slot, note::HELD);
            }
        }
        if self.disk.is_none() {
            if part == Part::All && self.evict_row(at) {
                return true;
            }
            self.upload_victim(at);
            return self.drop_from_host(at, part);
        }
        let unwritten_bytes = self.only_in_host(at, part);
        if let Some(demotion) = self.writeback.demoting.get_mut(&at) {
            // It was a victim before. It is demoted as a whole now, since it was used
            // since.
            if !demotion.is_whole() {
                demotion.add(part, unwritten_bytes);
                self.writeback.demoting_bytes += unwritten_bytes;
            }
            return true;
        }
        self.upload_victim(at);
        let freed = self.drop_copies(at, |layer| part.has(layer));
        if unwritten_bytes == 0 {
            self.counters.demoted_chunks += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
            return freed > 0;
        }
        let rows = &self.tables[at.table as usize];
        let is_blocked = rows.chunks.chunk(at.slot).is_some_and(|row| row.is_blocked());
        if self.may_write_back(at, self.only_in_host(at, Part::All), is_blocked) {
            self.tables[at.table as usize].set(at.slot, note::LEAVES);
            let mut demotion = Demotion::default();
            demotion.add(part, unwritten_bytes);
            self.writeback.demoting_bytes += unwritten_bytes;
            self.writeback.demoting.insert(at, demotion);
            // All of it is written, so that the rest can be freed at once when it is chosen.
            self.queue_writeback(at);
            return true;
        }
        self.drop_from_host(at, part) || freed > 0
    }

    /// Evicts a chunk and its row, if host memory is the only tier and nothing uses the chunk. The
    /// policy has forgotten it. Returns whether memory was freed.
    fn evict_row(&mut self, at: At) -> bool {
        if self.replicas.is_some() || self.remote.is_some() {
            return false;
        }
        let rows = &self.tables[at.table as usize];
        let Some(row) = rows.chunks.chunk(at.slot) else { return false };
        let (cells, namespace) = (usize::from(row.cells()[HOST]), row.namespace());
        if cells == 0 || row.is_blocked() || row.is_moving() {
            return false;
        }
        if cells == rows.layout.layers() {
            self.publish(Kind::Removed, Tier::Host, at);
        }
        self.forget_retention(at);
        let (rows, host) = (&mut self.tables[at.table as usize], &mut self.host);
        rows.forget(at.slot);
        let removed = rows.chunks.remove(at.slot, |_, place| {
            if let Location::Host(piece) = place
                && let Err(error) = host.free(Piece(piece))
            {
                log::error!("internal: a piece of host memory was freed twice: {error}");
            }
        });
        if let Some(above) = self.row_removed(at.table, namespace, removed) {
            self.tidy(at.table, above);
        }
        self.counters.dropped_chunks += 1;
        true
    }

    /// Whether a cell of a part of a chunk is in memory.
    pub(super) fn is_in_host(&self, at: At, part: Part) -> bool {
        let rows = &self.tables[at.table as usize].chunks;
        match part {
            Part::All => rows.chunk(at.slot).is_some_and(|row| row.cells()[HOST] > 0),
            Part::Layer(layer) => {
                let marks = rows.marks(at.slot).and_then(|marks| marks.get(layer));
                marks.is_some_and(|marks| marks.resident_tiers() & 1 << HOST != 0)
            }
        }
    }

    /// Bytes of a part of a chunk that are in memory and in no other tier.
    pub(super) fn only_in_host(&self, at: At, part: Part) -> u64 {
        let rows = &self.tables[at.table as usize];
        let Some(marks) = rows.chunks.marks(at.slot) else { return 0 };
        let only = |(layer, marks): (usize, &crate::meta::chunks::Residency)| match marks
            .resident_tiers()
            & !DEVICE_MASK
        {
            tiers if tiers == 1 << HOST && part.has(layer) => {
                rows.planes(Cell { chunk: at.slot, layer }).bytes()
            }
            _ => 0,
        };
        marks.iter().enumerate().map(only).sum()
    }

    pub(super) fn may_write_back(&mut self, at: At, bytes: u64, is_blocked: bool) -> bool {
        let Some(disk) = &self.disk else { return false };
        if is_blocked {
            return true;
        }
        if self.config.write == Write::Never {
            return false;
        }
        let rows = &self.tables[at.table as usize];
        let stats = disk.stats();
        let free = 1.0 - stats.used_bytes as f64 / stats.budget_bytes.max(1) as f64;
        let candidate = Candidate {
            bytes,
            hits: u32::from(rows.uses[at.slot as usize]),
            priority: rows.classes[at.slot as usize],
        };
        self.eviction.admission.admit(&candidate, free, self.now_ns).is_ok()
    }

    /// Frees the memory of cells that are on disk, too, in the layers that `of` selects. Returns
    /// their bytes.
    pub(super) fn drop_copies(&mut self, at: At, of: impl Fn(usize) -> bool) -> u64 {
        self.drop_where(at, HOST, |layer, tiers| tiers & 1 << DISK != 0 && of(layer))
    }

    /// Drops the cells of a chunk from a tier where `may(layer, tiers)` allows it. The device tier
    /// does not count as another copy, and never keeps the only one. Returns bytes that are free,
    /// or will be.
    pub(super) fn drop_where(
        &mut self,
        at: At,
        tier: usize,
        may: impl Fn(usize, u8) -> bool,
    ) -> u64 {
        if self.replicas.is_some() {
            self.forget_last_replicas(at, tier, &may);
        }
        let mut dropped = std::mem::take(&mut self.eviction.dropped);
        dropped.clear();
        let rows = &mut self.tables[at.table as usize];
        let may = |layer, tiers: u8| may(layer, tiers & !DEVICE_MASK);
        rows.chunks.drop_cells(at.slot, ALL_TIERS[tier], may, &mut dropped);
        let mut freed = 0;
        for &(cell, how) in &dropped {
            freed += self.tables[at.table as usize].planes(cell).bytes();
            if let Dropped::Freed(place) = how {
                self.free_place(at.table, cell, place);
            }
        }
        if !dropped.is_empty() {
            self.note_removed_cells(
                at,
                ALL_TIERS[tier],
                dropped.iter().map(|(cell, _)| cell.layer),
            );
        }
        self.eviction.dropped = dropped;
        freed
    }

    /// Drops the device replicas of cells that would have no other copy than these.
    fn forget_last_replicas(&mut self, at: At, tier: usize, may: &impl Fn(usize, u8) -> bool) {
        let rows = &self.tables[at.table as usize];
        if tier == DEVICE || rows.chunks.chunk(at.slot).is_none_or(|row| row.is_blocked()) {
            return;
        }
        for layer in 0..rows.layout.layers() {
            let marks = self.tables[at.table as usize].chunks.marks(at.slot);
            let tiers = marks.and_then(|all| all.get(layer)).map_or(0, |m| m.resident_tiers());
            if tiers == DEVICE_MASK | 1 << tier && may(layer, 1 << tier) {
                self.forget_replica(at.table, Cell { chunk: at.slot, layer });
            }
        }
    }

    /// Drops cells that are in memory only, unless they must stay; then the policy gets them back.
    /// A chunk is dropped as a whole, since it is useless without one layer, unless the store drops
    /// cells alone. Returns whether memory was freed.
    pub(super) fn drop_from_host(&mut self, at: At, part: Part) -> bool {
        let part = if self.config.drop_cells { part } else { Part::All };
        let freed = self.drop_where(at, HOST, |layer, tiers| tiers == 1 << HOST && part.has(layer));
        if self.eviction.host.granularity == Granularity::Cell && part == Part::All {
            // The cells that remain are on disk, too.
            self.drop_copies(at, |_| true);
        }
        if self.is_in_host(at, part) {
            self.enter_cache(at, Tier::Host, part);
        }
        self.counters.dropped_chunks += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
        self.tidy(at.table, at.slot);
        freed > 0
    }

    /// Cancels the demotion of a chunk, and returns what of it was to leave memory.
    pub(super) fn cancel_demotion(&mut self, at: At) -> Option<Demotion> {
        let demotion = self.writeback.demoting.remove(&at)?;
        self.writeback.demoting_bytes -= demotion.bytes;
        self.tables[at.table as usize].clear(at.slot, note::LEAVES);
        Some(demotion)
    }
}

// ---------- reclaim
//
// Memory that another owner needs, or that a smaller limit takes away. Only whole slabs are given
// back, so all cells of a draining slab are evicted or written back.

/// Host memory that other owners of the budget have requested.
#[derive(Default)]
pub(super) struct ReclaimTargets {
    /// Slabs that are being emptied for this.
    draining: Vec<u32>,
    /// The total of returned bytes at which all requests are met.
    until_bytes: u64,
    /// Slabs are being emptied, or more should be.
    is_open: bool,
    /// Something has changed that may allow progress.
    may_progress: bool,
    /// A reference was released, so other slabs may be emptied now.
    seeks: bool,
    /// Buffer for the owners of the pieces of a slab.
    owners: Vec<u64>,
}

impl ReclaimTargets {
    /// Cells have moved or were freed.
    pub(super) fn changed(&mut self) {
        self.may_progress = self.is_open;
    }

    /// A chunk has no references any more.
    pub(super) fn released(&mut self) {
        (self.may_progress, self.seeks) = (self.is_open, self.is_open);
    }

    /// Slabs may be emptied.
    pub(super) fn begin(&mut self) {
        (self.is_open, self.may_progress, self.seeks) = (true, true, true);
    }
}

impl StoreState {
    /// Returns memory that other owners need; how much is or will be freed. The policy's victims are
    /// evicted first, then the cells in the emptiest slabs.
    pub fn shrink(&mut self, bytes: u64) -> u64 {
        let before = self.host.returned_bytes();
        let bytes = bytes.min(self.host.stats().cost_bytes);
        self.host.trim();
        let mut remaining = bytes.saturating_sub(self.host.returned_bytes() - before);
        let mut victims = Vec::new();
        while remaining > 0 {
            self.eviction.host.choose(self.now_ns, remaining, MOST_VICTIMS, &mut victims);
            if victims.is_empty() {
                break;
            }
            for victim in victims.drain(..) {
                let Some((at, part)) = self.chosen(victim) else { continue };
                // Evicting it may remove its row.
                let bytes = self.tables[at.table as usize].part_bytes(at.slot, part);
                if self.evict_from_host(at, part) {
                    remaining = remaining.saturating_sub(bytes);
                } else {
                    self.note_continued(at, Tier::Host);
                }
            }
        }
        self.host.trim();
        self.request_reclaim_since(before, bytes);
        self.settle();
        let returned = self.host.returned_bytes() - before;
        let draining = self.host.slabs().filter(|slab| slab.drains);
        bytes.min(returned + draining.map(|slab| slab.cost_bytes).sum::<u64>())
    }

    /// Requests so many bytes more.
    pub(super) fn request_reclaim(&mut self, bytes: u64) {
        self.request_reclaim_since(self.host.returned_bytes(), bytes);
    }

    fn request_reclaim_since(&mut self, before: u64, bytes: u64) {
        self.eviction.reclaim_targets.until_bytes =
            self.eviction.reclaim_targets.until_bytes.max(before).saturating_add(bytes);
        self.eviction.reclaim_targets.begin();
    }

    /// Bytes still to be returned.
    pub fn reclaim_target_bytes(&self) -> u64 {
        self.eviction.reclaim_targets.until_bytes.saturating_sub(self.host.returned_bytes())
    }

    /// Evicts cells from slabs that are being emptied. Returns whether anything was freed.
    pub(super) fn pay(&mut self) -> bool {
        // A write that was refused a moment ago would be refused again.
        if !self.eviction.reclaim_targets.may_progress || self.is_backing_off() {
            return false;
        }
        self.eviction.reclaim_targets.may_progress = false;
        if self.reclaim_target_bytes() > 0 {
            self.host.trim();
        }
        self.drain_to_target();
        let drains = self.host.slabs().filter(|slab| slab.drains);
        let numbers: Vec<u32> = drains.map(|slab| slab.number).collect();
        self.eviction.reclaim_targets.is_open =
            !numbers.is_empty() || self.reclaim_target_bytes() > 0;
        let mut progressed = false;
        let mut owners = std::mem::take(&mut self.eviction.reclaim_targets.owners);
        for number in numbers {
            owners.clear();
            owners.extend(self.host.live_pieces(number).map(|(_, owner)| owner));
            for &owner in &owners {
                progressed |= self.vacate(owner);
            }
        }
        self.eviction.reclaim_targets.owners = owners;
        progressed
    }

    /// Begins to empty as many slabs as the requests need, those with the least bytes in use first.
    fn drain_to_target(&mut self) {
        let reclaim_target = self.reclaim_target_bytes();
        let still = |number: &u32| self.host.slabs().any(|s| s.number == *number && s.drains);
        self.eviction.reclaim_targets.draining.retain(still);
        if reclaim_target == 0 {
            for number in std::mem::take(&mut self.eviction.reclaim_targets.draining) {
                if let Err(error) = self.host.drain(number, false) {
                    log::error!("internal: a slab could not be put back into use: {error}");
                }
            }
            return;
        }
        if !std::mem::take(&mut self.eviction.reclaim_targets.seeks) {
            return;
        }
        // If that is not enough, also slabs with chunks that others continue elsewhere.
        for clears in [false, true] {
            let drains = self.host.slabs().filter(|slab| slab.drains);
            let mut draining_bytes: u64 = drains.map(|slab| slab.cost_bytes).sum();
            let mut slabs: Vec<_> = self.host.slabs().filter(|s| !s.drains).collect();
            slabs.sort_by_key(|s| (u64::from(s.live_pieces) * s.piece_bytes, s.number));
            if clears {
                // Few chunks continue those near the end of a path.
                slabs.sort_by_key(|s| std::cmp::Reverse(self.first_position(s.number)));
            }
            for slab in slabs {
                if draining_bytes >= reclaim_target {
                    return;
                }
                if clears {
                    self.clear_paths(slab.number);
                }
                let mut all = self.host.live_pieces(slab.number);
                let may_empty = all.all(|(_, owner)| self.may_vacate(owner));
                drop(all);
                if may_empty && self.host.drain(slab.number, true).is_ok() {
                    self.eviction.reclaim_targets.draining.push(slab.number);
                    draining_bytes += slab.cost_bytes;
                }
            }
        }
    }

    /// Position of the earliest chunk of a slab in its path.
    fn first_position(&self, slab: u32) -> u32 {
        let owners = self.host.live_pieces(slab).map(|(_, owner)| cell_of_owner(owner));
        let rows = owners.map(|(table, cell)| self.tables[table as usize].chunks.chunk(cell.chunk));
        rows.map(|row| row.map_or(0, |row| row.position())).min().unwrap_or(u32::MAX)
    }

    /// Evicts the chunks of a slab and all that continue them, from the end on, if nothing uses
    /// them.
    fn clear_paths(&mut self, slab: u32) {
        let mut first: BTreeMap<u32, Vec<Slot>> = BTreeMap::new();
        for (_, owner) in self.host.live_pieces(slab) {
            let (table, cell) = cell_of_owner(owner);
            let row = self.tables[table as usize].chunks.chunk(cell.chunk);
            if row.is_none_or(|row| row.refs() > 0 || row.pin().is_some()) {
                return;
            }
            first.entry(table).or_default().push(cell.chunk);
        }
        for (table, slots) in first {
            let behind = self.tables[table as usize].chunks.with_descendants(&slots);
            let rows = &self.tables[table as usize].chunks;
            let is_free = |slot: &Slot| rows.chunk(*slot).is_some_and(|row| row.is_free());
            if !behind.iter().all(is_free) {
                return;
            }
            let layers = self.tables[table as usize].layout.layers();
            for (chunk, layer) in behind.iter().flat_map(|&s| (0..layers).map(move |l| (s, l))) {
                self.vacate(owner_of(table, Cell { chunk, layer }));
            }
        }
    }

    /// Whether a cell can leave memory, now or later.
    fn may_vacate(&self, owner: u64) -> bool {
        let (table, cell) = cell_of_owner(owner);
        let rows = &self.tables[table as usize].chunks;
        let is_blocked = rows.chunk(cell.chunk).is_some_and(|row| row.is_blocked());
        let residency = rows.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        let is_below =
            residency.is_some_and(|marks| marks.resident_tiers() & !(HOST_MASK | DEVICE_MASK) != 0);
        !is_blocked || is_below || self.disk.is_some() && self.config.write != Write::Never
    }

    /// Evicts a cell, with the rest of its chunk if policies choose chunks.
    fn vacate(&mut self, owner: u64) -> bool {
        let (table, cell) = cell_of_owner(owner);
        let at = At { table, slot: cell.chunk };
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(cell.chunk).and_then(|all| all.get(cell.layer));
        // A cell in motion is looked at again when it has arrived or left.
        let is_resident = marks.is_some_and(|marks| marks.resident_tiers() & HOST_MASK != 0);
        let is_demoting =
            self.writeback.demoting.get(&at).is_some_and(|demotion| demotion.has(cell.layer));
        if !is_resident || is_demoting || !self.may_vacate(owner) {
            return false;
        }
        let id = rows.id(at.slot);
        let part = match self.eviction.host.granularity {
            Granularity::Chunk => {
                if rows.has(at.slot, note::IN_HOST) {
                    self.eviction.host.remove(self.now_ns, id);
                }
                Part::All
            }
            Granularity::Cell => {
                self.eviction.host.remove(self.now_ns, cell_id(id, cell.layer));
                Part::Layer(cell.layer)
            }
            Granularity::Session => {
                self.eviction.host.remove_member(self.now_ns, at);
                Part::All
            }
        };
        self.evict_from_host(at, part)
    }
}
