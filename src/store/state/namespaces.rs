//! Namespaces and their chunk tables: opening, finding, and reuse of their numbers.
//!
//! The number of a namespace without handles, sessions, rows and requested blocks may be given to
//! another one, so nothing else may remember it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};

use crate::base::status::{Result, Status};
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Key;
use crate::meta::chunks::Added;
use crate::meta::index::Slot;
use crate::meta::layout::Layout;
use crate::store::state::batches::{SpaceNote, SyncBatch, WriteBatch};
use crate::store::state::chunk_table::{ChunkTable, note};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Mark, Recovered};

/// Prefix of the names of namespace records.
pub(super) const NOTE: &[u8] = b"namespace ";
/// How to open a namespace.
#[derive(Clone, Debug)]
pub struct NamespaceOpts {
    /// Its key.
    pub key: Key,
    /// Layout of its cells.
    pub layout: Layout,
    /// The engine can compute holes, so chunks may be evicted in any order.
    pub holes: bool,
}

/// A namespace.
#[derive(Clone, Copy, Debug)]
pub struct Namespace {
    /// Its key.
    pub key: Key,
    /// The engine can compute holes.
    pub holes: bool,
    /// Chunk table of its layout.
    pub table: u32,
    /// Owner of its objects at the remote; 0 = shared by all.
    pub tenant: u64,
    /// Codec of its cells on disk, if its recipe names one.
    pub codec: Option<Codec>,
    /// Open handles.
    pub handles: u32,
    /// Open sessions.
    pub(super) sessions: u32,
    /// Its chunks in the table.
    pub(super) rows: u32,
    /// Identifies it, since its number is reused.
    pub(super) serial: u64,
    pub(super) below: Below,
    /// Serial at which it was last opened or closed.
    pub(super) used: u64,
    is_known: bool,
    /// It is in the list of namespaces that may be unused.
    pub(super) is_listed: bool,
    /// A removal that may not survive a restart yet.
    pub(super) pending_clear: PendingClear,
}

/// Outcome of a clear whose deadline passed before it was durable. The next call waits on and
/// reports it.
#[derive(Clone, Copy, Debug, Default)]
pub struct PendingClear {
    /// Number to wait for with [`StoreState::durability`](super::StoreState::durability); 0 = none.
    pub(super) turn: u64,
    pub(super) removed: u64,
}

impl Namespace {
    /// Whether it has an open handle or session.
    pub(super) fn is_open(&self) -> bool {
        self.handles > 0 || self.sessions > 0
    }

    /// Whether nothing of it is left: no chunk, handle, session or record in flight.
    pub(super) fn is_bare(&self) -> bool {
        !self.is_open() && self.rows == 0 && self.below.is_bare()
    }
}

/// All namespaces, by number.
#[derive(Default)]
pub(super) struct Namespaces {
    rows: Vec<Namespace>,
    by_key: BTreeMap<Key, u32>,
    /// Unused numbers.
    free: Vec<u32>,
    /// Namespaces that may be unused, in the order in which they became so.
    idle: VecDeque<u32>,
    /// Counts openings and closings.
    serial: u64,
    /// The limit of chunks that the disk has on record; 0 = none.
    noted_chunks: u64,
}

impl Namespaces {
    /// Number of namespaces.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// A namespace.
    pub(super) fn get(&self, at: usize) -> Option<&Namespace> {
        self.rows.get(at).filter(|namespace| namespace.is_known)
    }

    /// A namespace, mutable.
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Namespace> {
        self.rows.get_mut(at).filter(|namespace| namespace.is_known)
    }

    /// Number of the namespace with a key.
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// All namespaces with their numbers.
    pub(super) fn known(&self) -> impl Iterator<Item = (u32, &Namespace)> {
        (0..).zip(&self.rows).filter(|(_, namespace)| namespace.is_known)
    }

    fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Adds a namespace without handles.
    fn add(&mut self, key: Key, holes: bool, table: u32) -> Result<u32> {
        let serial = self.next_serial();
        let namespace = Namespace {
            key,
            holes,
            table,
            tenant: 0,
            codec: None,
            handles: 0,
            sessions: 0,
            rows: 0,
            serial,
            below: Below::default(),
            used: serial,
            is_known: true,
            is_listed: false,
            pending_clear: PendingClear::default(),
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.rows[at as usize] = namespace;
                at
            }
            None => {
                if self.rows.len() == self.rows.capacity() {
                    self.rows.try_reserve(self.rows.len().max(64)).map_err(|_| Status::NoMem)?;
                    // Reserved now, since forgetting a namespace must not allocate.
                    let more = self.rows.capacity() - self.free.len();
                    self.free.try_reserve(more).map_err(|_| Status::NoMem)?;
                }
                self.rows.push(namespace);
                self.rows.len() as u32 - 1
            }
        };
        self.by_key.insert(key, at);
        Ok(at)
    }

    pub(super) fn remove(&mut self, at: u32) {
        let namespace = &mut self.rows[at as usize];
        namespace.is_known = false;
        self.by_key.remove(&namespace.key);
        self.free.push(at);
    }

    /// Lists a namespace that may be unused now.
    pub(super) fn list_if_unused(&mut self, at: u32) {
        let namespace = &mut self.rows[at as usize];
        if namespace.is_bare() && !std::mem::replace(&mut namespace.is_listed, true) {
            self.idle.push_back(at);
        }
    }

    /// Length of the list of namespaces that may be unused.
    pub(super) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Takes the first of that list.
    pub(super) fn next_idle(&mut self) -> Option<u32> {
        let at = self.idle.pop_front()?;
        self.rows[at as usize].is_listed = false;
        Some(at)
    }

    /// Records that a namespace was opened or closed.
    fn touch(&mut self, at: u32) {
        self.rows[at as usize].used = self.next_serial();
    }

    /// A chunk of a namespace was removed from the table.
    pub(super) fn row_removed(&mut self, namespace: u32) {
        self[namespace as usize].rows -= 1;
        self.list_if_unused(namespace);
    }

    /// Counts a chunk of a namespace, if it was added to the table.
    pub(super) fn row_added(&mut self, namespace: u32, added: Added) {
        self[namespace as usize].rows += u32::from(matches!(added, Added::New(_)));
    }

    /// A session of a namespace was closed.
    pub(super) fn session_closed(&mut self, namespace: u32) {
        self[namespace as usize].sessions -= 1;
        self.touch(namespace);
        self.list_if_unused(namespace);
    }

    /// A session of a namespace was opened.
    pub(super) fn session_opened(&mut self, namespace: u32) {
        self[namespace as usize].sessions += 1;
        self.touch(namespace);
    }
}

impl Index<usize> for Namespaces {
    type Output = Namespace;

    fn index(&self, at: usize) -> &Namespace {
        &self.rows[at]
    }
}

impl IndexMut<usize> for Namespaces {
    fn index_mut(&mut self, at: usize) -> &mut Namespace {
        &mut self.rows[at]
    }
}

impl StoreState {
    /// Opens or finds a namespace and returns its number, which stays valid while a handle or a
    /// session is open.
    pub fn open_namespace(&mut self, opts: &NamespaceOpts) -> Result<u32> {
        let at = match self.find_namespace(&opts.key) {
            Some(at) => at,
            None => {
                self.make_room_for(&opts.layout)?;
                self.add_namespace(opts)?
            }
        };
        let namespace = &mut self.namespaces[at as usize];
        if self.tables[namespace.table as usize].layout != opts.layout {
            fail!(
                Invalid,
                "the namespace is open with another layout: the layout is part of its identity"
            );
        }
        if namespace.holes != opts.holes && namespace.handles > 0 {
            let how = if namespace.holes { "with" } else { "without" };
            fail!(Invalid, "the namespace is open {how} holes: use the same flags");
        }
        namespace.holes = opts.holes;
        namespace.handles += 1;
        self.namespaces.touch(at);
        Ok(at)
    }

    /// Adds a namespace without handles.
    pub(super) fn add_namespace(&mut self, opts: &NamespaceOpts) -> Result<u32> {
        let most = self.config.max_namespaces;
        if self.namespaces.len() >= most {
            fail!(
                Limit,
                "{most} namespaces, the limit, are open or have chunks that cannot be evicted: \
                 close some, or end their pins"
            );
        }
        let table = match self.table_for(&opts.layout) {
            Some(at) => at,
            None => {
                let table = self.new_table(&opts.layout)?;
                let at = self.seat(table)?;
                self.keep_reserve(at);
                at
            }
        };
        let at = self.namespaces.add(opts.key, opts.holes, table as u32)?;
        self.tables[table].namespaces += 1;
        self.follow_breaker();
        Ok(at)
    }

    /// Sets the codec that the recipe of a namespace names; `None` = the store's. A lossy codec
    /// changes KV, so another recipe is another namespace.
    pub fn set_codec(&mut self, namespace: u32, codec: Option<Codec>) {
        if let Some(namespace) = self.namespaces.get_mut(namespace as usize) {
            namespace.codec = codec;
        }
    }

    /// Number of the namespace with a key.
    pub fn find_namespace(&self, key: &Key) -> Option<u32> {
        self.namespaces.find(key)
    }

    /// Closes a handle of a namespace. Its chunks stay.
    pub fn close_namespace(&mut self, at: u32) {
        let Some(namespace) = self.namespaces.get_mut(at as usize) else { return };
        namespace.handles = namespace.handles.saturating_sub(1);
        self.namespaces.touch(at);
        self.namespaces.list_if_unused(at);
    }

    /// A namespace.
    pub fn namespace(&self, at: u32) -> Option<&Namespace> {
        self.namespaces.get(at as usize)
    }

    /// Chunk table of a namespace.
    pub fn table_of(&self, namespace: u32) -> Option<&ChunkTable> {
        self.tables.get(self.namespaces.get(namespace as usize)?.table as usize)
    }

    /// Lists recovered namespaces as unused, those with the latest writes first, so that they are
    /// given up last. One that turns out to be empty may be forgotten.
    pub(super) fn list_unused_namespaces(&mut self, found: &[u32]) {
        for &at in found.iter().rev() {
            self.namespaces.touch(at);
            self.drop_note(at);
            self.namespaces.list_if_unused(at);
        }
    }

    /// Index of the chunk table of a layout.
    pub(super) fn table_for(&self, layout: &Layout) -> Option<usize> {
        self.tables.iter().position(|table| table.layout == *layout)
    }

    pub(super) fn new_table(&self, layout: &Layout) -> Result<ChunkTable> {
        let table = ChunkTable::new(layout, self.config.max_chunks)?;
        if self.replicas.is_some() { table.with_pieces() } else { Ok(table) }
    }
}

// ---------- limits
//
// Limits on transfers and chunks. The limit of chunks is recorded on disk: opening with a smaller one
// would drop chunks for good, and must be confirmed (`forget=true`).

/// Name of the record.
const NAME: &[u8] = b"limits";
const VERSION: u8 = 1;
/// Namespace number of a record that belongs to none.
pub(super) const NO_SPACE: u32 = u32::MAX;

impl StoreState {
    /// Checks that recovered chunks fit, or may be forgotten. After a crash evicted chunks may be
    /// recovered again, so this is checked only if the limit was larger.
    pub(super) fn check_limits(&mut self, recovered: &Recovered) -> Result<()> {
        let note = recovered.sessions.iter().find(|session| *session.name == *NAME);
        let before = note.map_or(0, |note| read(&note.payload));
        self.namespaces.noted_chunks = before;
        let most = self.config.max_chunks as u64;
        if before <= most || self.config.forgets {
            return Ok(());
        }
        // A chunk that was written in several records is found several times.
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

    /// Adds the record of the limits to a batch of writes, if the one on disk is outdated.
    pub(super) fn note_limits(&self, batch: &mut WriteBatch) {
        let chunks = self.config.max_chunks as u64;
        if self.namespaces.noted_chunks != chunks {
            let content = [&[VERSION][..], &chunks.to_le_bytes()].concat();
            let (namespace, name) = (NO_SPACE, NAME.to_vec());
            batch.notes.push(SpaceNote { namespace, name, content, mark: None });
        }
    }

    /// The record of the limits was written.
    pub(super) fn limits_noted(&mut self) {
        self.namespaces.noted_chunks = self.config.max_chunks as u64;
    }
}

/// Limit of chunks in a record; 0 if it cannot be read.
fn read(content: &[u8]) -> u64 {
    match content {
        [VERSION, chunks @ ..] => chunks.try_into().map_or(0, u64::from_le_bytes),
        _ => 0,
    }
}

// ---------- namespace notes
//
// Namespace records on disk: without its layout, recovered cells of a namespace are useless. A record is
// written with the first chunk of a namespace and dropped with the last one.

/// State of a namespace on disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Below {
    /// Chunks with a cell on disk.
    chunks: u32,
    /// Records in flight.
    writing: u32,
    pub(super) noted: Noted,
}

impl Below {
    /// Whether nothing is on disk or in flight.
    pub(super) fn is_bare(&self) -> bool {
        self.chunks + self.writing == 0
    }
}

/// Whether the record of a namespace is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Noted {
    #[default]
    No,
    /// Written; it may not be durable.
    Written(Mark),
    /// It can never become durable, and must be written again.
    Lost(Mark),
    Lasts,
}

impl StoreState {
    /// Adds the record of a chunk's namespace to a batch that has a record of the chunk, unless it
    /// is on disk.
    pub(super) fn note_with(&mut self, at: At, batch: &mut WriteBatch) {
        let Some(number) = self.namespace_of(at) else { return };
        let below = &mut self.namespaces[number as usize].below;
        below.writing += 1;
        let is_known = matches!(below.noted, Noted::Written(_) | Noted::Lasts);
        if !is_known && batch.notes.iter().all(|note| note.namespace != number) {
            let (name, content) = self.namespace_note(number);
            batch.notes.push(SpaceNote { namespace: number, name, content, mark: None });
        }
    }

    /// Ends a batch: records of namespaces are written or not, and namespaces may have nothing on
    /// disk after all.
    pub(super) fn noted_with(&mut self, batch: &WriteBatch) {
        for note in &batch.notes {
            // A record counts although another one of the batch failed, and with that all chunks.
            let Some(mark) = note.mark else { continue };
            if note.namespace == NO_SPACE {
                self.limits_noted();
            } else {
                self.namespaces[note.namespace as usize].below.noted = Noted::Written(mark);
            }
        }
        let mut namespaces = BTreeSet::new();
        for &at in &batch.chunks {
            let Some(number) = self.namespace_of(at) else { continue };
            self.namespaces[number as usize].below.writing -= 1;
            namespaces.insert(number);
        }
        namespaces.into_iter().for_each(|number| self.drop_note(number));
    }

    /// A chunk has its first cell on disk.
    pub(super) fn arrived_on_disk(&mut self, at: At) {
        if let Some(number) = self.namespace_of(at) {
            self.namespaces[number as usize].below.chunks += 1;
        }
    }

    /// A chunk has no cell on disk any more.
    pub(super) fn removed_from_disk(&mut self, at: At) {
        if let Some(number) = self.namespace_of(at) {
            self.namespaces[number as usize].below.chunks -= 1;
            self.drop_note(number);
        }
    }

    /// Drops the record of a namespace that has no chunk on disk.
    pub(super) fn drop_note(&mut self, number: u32) {
        let below = &mut self.namespaces[number as usize].below;
        if !below.is_bare() || below.noted == Noted::No {
            return;
        }
        below.noted = Noted::No;
        let name = [NOTE, &self.namespaces[number as usize].key.0].concat();
        if let Some(disk) = &self.disk {
            disk.drop_session(&name);
            self.disk_gc.sweep_soon();
        }
    }

    /// Mark of the namespace record that a put needs durable.
    pub(super) fn mark_of_note(&self, number: u32) -> Option<Mark> {
        let spec = &self.transfers.table[number].spec;
        let slot = *spec.slots.first()?;
        let namespace = self.namespace_of(At { table: spec.table, slot })?;
        match self.namespaces[namespace as usize].below.noted {
            Noted::Written(mark) => Some(mark),
            Noted::Lost(mark) => Some(self.mark_of_moved(namespace, mark)),
            Noted::No | Noted::Lasts => None,
        }
    }

    /// Mark of a record that could not be made durable at its place: compaction may have moved it.
    fn mark_of_moved(&self, namespace: u32, lost: Mark) -> Mark {
        let name = [NOTE, &self.namespaces[namespace as usize].key.0].concat();
        let segment = self.disk.as_ref().and_then(|disk| disk.segment_of_session(&name));
        segment.filter(|&segment| segment != lost.segment()).map_or(lost, Mark::so_far)
    }

    /// Takes over which namespace records a put's sync made durable.
    pub(super) fn note_synced(&mut self, number: u32, batch: &SyncBatch) {
        let Some(mark) = self.mark_of_note(number) else { return };
        let outcome = batch.marks.iter().find(|(n, m, _)| (*n, *m) == (number, mark));
        let Some((.., outcome)) = outcome else { return };
        let one = &self.transfers.table[number].spec;
        let first = one.slots.first().map(|&slot| At { table: one.table, slot });
        if let Some(namespace) = first.and_then(|at| self.namespace_of(at)) {
            let noted = if outcome.is_ok() { Noted::Lasts } else { Noted::Lost(mark) };
            self.namespaces[namespace as usize].below.noted = noted;
        }
    }

    fn namespace_of(&self, at: At) -> Option<u32> {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot)?;
        Some(row.namespace()).filter(|&number| self.namespaces.get(number as usize).is_some())
    }
}

impl WriteBatch {
    /// Writes the records of namespaces before the chunks of the batch, and stores their marks. If
    /// one fails, the batch is not written.
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

// ---------- slot reclamation
//
// Reuse of the numbers of namespaces and chunk tables: which one is forgotten when all are taken.

/// Most unused namespaces whose learned state is kept.
const MOST_IDLE: usize = 1024;
/// If all namespaces have chunks, 1 / 16 of them are given up at once, since the search takes time.
const GIVEN_UP: usize = 16;

impl StoreState {
    /// A chunk table without namespaces and transfers. A transfer may outlive its session, and
    /// without chunks it references only the layers of its table.
    fn vacant_table(&self) -> Option<usize> {
        let is_moved =
            |at: usize| self.transfers.table.iter().any(|(_, one)| one.spec.table == at as u32);
        let is_vacant = |table: &ChunkTable| table.namespaces == 0 && table.chunks.is_empty();
        (0..self.tables.len()).find(|&at| is_vacant(&self.tables[at]) && !is_moved(at))
    }

    /// Puts a table at a free number, which may have been another table's.
    pub(super) fn seat(&mut self, table: ChunkTable) -> Result<usize> {
        if let Some(at) = self.vacant_table() {
            let number = at as u32;
            // The rows decide everything else. This cache has no rows.
            self.forget_remote_shape(number);
            self.forget_located_of(number);
            self.disk_gc.forget_table(number);
            self.tables[at] = table;
            return Ok(at);
        }
        let most = self.config.max_layouts;
        if self.tables.len() >= most {
            fail!(
                Limit,
                "{most} layouts, the limit, have namespaces that are open or have chunks that cannot \
                 be evicted: close some, or end their pins"
            );
        }
        self.tables.push(table);
        Ok(self.tables.len() - 1)
    }

    /// Makes sure that one more namespace can be added. If all have chunks, those without handles
    /// that were unused for the longest time are dropped.
    pub(super) fn make_room_for(&mut self, layout: &Layout) -> Result<()> {
        let is_new = self.table_for(layout).is_none();
        let is_full = self.namespaces.len() >= self.config.max_namespaces;
        self.forget_idle(if is_new || is_full { 0 } else { MOST_IDLE });
        let lacks_space = self.namespaces.len() >= self.config.max_namespaces;
        if is_new && (lacks_space || self.lacks_table()) {
            // A layout that can have no table must not evict anything.
            drop(self.new_table(layout)?);
        }
        if lacks_space {
            self.evict_unused_namespaces();
        }
        let lacks_table = is_new && self.lacks_table();
        if lacks_table {
            self.give_up_table();
        }
        if lacks_space || lacks_table {
            self.settle(); // transfers may wait for what was freed
        }
        Ok(())
    }

    fn lacks_table(&self) -> bool {
        self.tables.len() >= self.config.max_layouts && self.vacant_table().is_none()
    }

    /// Forgets unused namespaces except the latest `most`.
    fn forget_idle(&mut self, most: usize) {
        for _ in most..self.namespaces.idle() {
            let Some(at) = self.namespaces.next_idle() else { break };
            if !self.namespaces[at as usize].is_bare() {
                continue; // it is listed again when that is over
            }
            match self.is_looked_up(at) {
                true => self.namespaces.list_if_unused(at),
                false => self.forget_unused_namespace(at),
            }
        }
    }

    /// Forgets a namespace of which nothing is left. Its number will be used again.
    fn forget_unused_namespace(&mut self, at: u32) {
        self.drop_note(at);
        self.plans.forget_namespace(at);
        self.forget_remote_names(at);
        let table = self.namespaces[at as usize].table;
        self.tables[table as usize].namespaces -= 1;
        self.namespaces.remove(at);
    }

    /// Drops the chunks of namespaces without handles, of as many as are worth it.
    fn evict_unused_namespaces(&mut self) {
        let most = self.config.max_namespaces;
        let closed = self.namespaces.known().filter(|(_, namespace)| !namespace.is_open());
        let mut closed: Vec<(u64, u32)> =
            closed.map(|(at, namespace)| (namespace.used, at)).collect();
        closed.sort_unstable();
        for part in closed.chunks((most / GIVEN_UP).max(1)) {
            let selected: BTreeSet<u32> = part.iter().map(|&(_, at)| at).collect();
            let tables = selected.iter().map(|&at| self.namespaces[at as usize].table);
            for table in tables.collect::<BTreeSet<u32>>() {
                self.drop_namespaces(table, |namespace| selected.contains(&namespace));
            }
            self.forget_idle(0);
            if self.namespaces.len() < most {
                break;
            }
        }
    }

    /// Drops the chunks of a layout without open namespaces, if all of them may leave.
    fn give_up_table(&mut self) {
        let mut last = vec![Some(0); self.tables.len()];
        for (_, namespace) in self.namespaces.known() {
            let used = &mut last[namespace.table as usize];
            *used = used.filter(|_| !namespace.is_open()).map(|used: u64| used.max(namespace.used));
        }
        let closed = (0u32..).zip(last).filter_map(|(at, used)| Some((used?, at)));
        let mut closed: Vec<(u64, u32)> = closed.collect();
        closed.sort_unstable();
        for (_, table) in closed {
            if self.tables[table as usize].chunks.slots().all(|slot| self.is_droppable(table, slot))
            {
                self.drop_namespaces(table, |_| true);
                self.forget_idle(0);
            }
            if self.vacant_table().is_some() {
                break;
            }
        }
    }

    /// Whether a chunk is at rest and only the write queue references it.
    fn is_droppable(&self, table: u32, slot: Slot) -> bool {
        let rows = &self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return true };
        !row.is_moving()
            && row.pin().is_none()
            && row.refs() == u32::from(rows.has(slot, note::QUEUED))
            && !self.writeback.chunk_waiters.contains_key(&At { table, slot })
    }

    /// Drops the chunks of selected namespaces of a table from all tiers, if they may leave. The
    /// remote keeps its objects.
    fn drop_namespaces(&mut self, table: u32, is_selected: impl Fn(u32) -> bool) {
        let rows = &self.tables[table as usize].chunks;
        let of = |slot: Slot| rows.chunk(slot).filter(|row| is_selected(row.namespace()));
        let slots = rows.slots().filter_map(|slot| Some((Reverse(of(slot)?.position()), slot)));
        // Children before parents.
        let mut slots: Vec<(Reverse<u32>, Slot)> = slots.collect();
        slots.sort_unstable();
        let slots: Vec<Slot> = slots.into_iter().map(|(_, slot)| slot).collect();
        let cleared = self.drop_chunks_locally(table, &slots);
        log::info!(
            "dropped {} chunks of namespaces without handles to make room for another namespace",
            cleared.removed
        );
    }
}
