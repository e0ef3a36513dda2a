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
use crate::store::state::chunk_table::{ChunkTable, note};
use crate::store::state::disk_gc::NOTE;
use crate::store::state::work::{SpaceNote, SyncBatch, WriteBatch};
use crate::store::state::{At, StoreState};
use crate::tier::disk::{Mark, Recovered};

/// Most namespaces.
pub const MAX_SPACES: usize = 1 << 16;
/// Most layouts.
pub const MAX_CHUNK_TABLES: usize = 64;
/// How a namespace is opened.
#[derive(Clone, Debug)]
pub struct SpaceOpts {
    /// Its key.
    pub key: Key,
    /// What its cells are.
    pub layout: Layout,
    /// Its engine can compute holes: chunks leave in any order.
    pub holes: bool,
}

/// A namespace: who may share.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Its key.
    pub key: Key,
    /// Its engine can compute holes.
    pub holes: bool,
    /// The board of its layout.
    pub table: u32,
    /// Whose its objects are at the remote; 0 = everybody's.
    pub tenant: u64,
    /// What its cells are coded with on disk, if its recipe says so.
    pub codec: Option<Codec>,
    /// Handles that are open.
    pub handles: u32,
    /// Sessions that are open.
    pub(super) sessions: u32,
    /// Chunks in the table.
    pub(super) rows: u32,
    /// Which it is: its number may have been another's before.
    pub(super) serial: u64,
    pub(super) below: Below,
    /// When it was opened or left last, as serials count.
    pub(super) used: u64,
    is_known: bool,
    /// It stands among those of which nothing may be left.
    pub(super) is_listed: bool,
    /// What was cleared, and is not sure to stay away yet.
    pub(super) unsure: Unsure,
}

/// What was cleared by a call whose deadline passed before it was sure to stay away. The next
/// call waits on, and tells of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unsure {
    /// The turn that is waited for; 0 = nothing is.
    pub(super) turn: u64,
    pub(super) gone: u64,
}

impl Space {
    /// Whether somebody has it open.
    pub(super) fn is_open(&self) -> bool {
        self.handles > 0 || self.sessions > 0
    }

    /// Whether nothing is left of it.
    pub(super) fn is_bare(&self) -> bool {
        !self.is_open() && self.rows == 0 && self.below.is_bare()
    }
}

/// All namespaces, by number.
#[derive(Default)]
pub(super) struct Namespaces {
    rows: Vec<Space>,
    by_key: BTreeMap<Key, u32>,
    /// Numbers that no namespace has.
    free: Vec<u32>,
    /// Namespaces of which nothing may be left, the first one first.
    idle: VecDeque<u32>,
    /// Counts openings and closings.
    serial: u64,
    /// The limit of chunks that the disk has on record; 0 = none.
    noted_chunks: u64,
}

impl Namespaces {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// A namespace.
    pub(super) fn get(&self, at: usize) -> Option<&Space> {
        self.rows.get(at).filter(|space| space.is_known)
    }

    /// The same, to change it.
    pub(super) fn get_mut(&mut self, at: usize) -> Option<&mut Space> {
        self.rows.get_mut(at).filter(|space| space.is_known)
    }

    /// The number of a key.
    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// All of them, with their numbers.
    pub(super) fn known(&self) -> impl Iterator<Item = (u32, &Space)> {
        (0..).zip(&self.rows).filter(|(_, space)| space.is_known)
    }

    fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Adds one that nobody has open.
    fn add(&mut self, key: Key, holes: bool, table: u32) -> Result<u32> {
        let serial = self.next_serial();
        let space = Space {
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
            unsure: Unsure::default(),
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.rows[at as usize] = space;
                at
            }
            None => {
                if self.rows.len() == self.rows.capacity() {
                    self.rows.try_reserve(self.rows.len().max(64)).map_err(|_| Status::NoMem)?;
                    // Forgetting one must not have to allocate.
                    let more = self.rows.capacity() - self.free.len();
                    self.free.try_reserve(more).map_err(|_| Status::NoMem)?;
                }
                self.rows.push(space);
                self.rows.len() as u32 - 1
            }
        };
        self.by_key.insert(key, at);
        Ok(at)
    }

    pub(super) fn remove(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        space.is_known = false;
        self.by_key.remove(&space.key);
        self.free.push(at);
    }

    /// Something of a namespace has ended: nothing may be left of it.
    pub(super) fn look_at(&mut self, at: u32) {
        let space = &mut self.rows[at as usize];
        if space.is_bare() && !std::mem::replace(&mut space.is_listed, true) {
            self.idle.push_back(at);
        }
    }

    /// How many there are of which nothing may be left.
    pub(super) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// The first of those.
    pub(super) fn next_idle(&mut self) -> Option<u32> {
        let at = self.idle.pop_front()?;
        self.rows[at as usize].is_listed = false;
        Some(at)
    }

    /// Somebody has opened it, or left it.
    fn touch(&mut self, at: u32) {
        self.rows[at as usize].used = self.next_serial();
    }

    /// A row of a namespace is gone.
    pub(super) fn row_removed(&mut self, space: u32) {
        self[space as usize].rows -= 1;
        self.look_at(space);
    }

    /// A chunk of a namespace has a row, and may not have had one.
    pub(super) fn row_added(&mut self, space: u32, added: Added) {
        self[space as usize].rows += u32::from(matches!(added, Added::New(_)));
    }

    /// One was closed.
    pub(super) fn session_closed(&mut self, space: u32) {
        self[space as usize].sessions -= 1;
        self.touch(space);
        self.look_at(space);
    }

    /// A session of a namespace was opened.
    pub(super) fn session_opened(&mut self, space: u32) {
        self[space as usize].sessions += 1;
        self.touch(space);
    }
}

impl Index<usize> for Namespaces {
    type Output = Space;

    fn index(&self, at: usize) -> &Space {
        &self.rows[at]
    }
}

impl IndexMut<usize> for Namespaces {
    fn index_mut(&mut self, at: usize) -> &mut Space {
        &mut self.rows[at]
    }
}

impl StoreState {
    /// Opens a namespace, or finds it; its number, which is its own as long as a handle or a
    /// session of it is open.
    pub fn open_space(&mut self, opts: &SpaceOpts) -> Result<u32> {
        let at = match self.find_space(&opts.key) {
            Some(at) => at,
            None => {
                self.make_room_for(&opts.layout)?;
                self.add_namespace(opts)?
            }
        };
        let space = &mut self.namespaces[at as usize];
        if self.tables[space.table as usize].layout != opts.layout {
            fail!(Invalid, "that namespace has another layout: layouts are part of identities");
        }
        if space.holes != opts.holes && space.handles > 0 {
            let how = if space.holes { "with" } else { "without" };
            fail!(Invalid, "that namespace is open {how} holes");
        }
        space.holes = opts.holes;
        space.handles += 1;
        self.namespaces.touch(at);
        Ok(at)
    }

    /// Adds a namespace that nobody has open.
    pub(super) fn add_namespace(&mut self, opts: &SpaceOpts) -> Result<u32> {
        let most = self.config.max_spaces;
        if self.namespaces.len() >= most {
            fail!(
                Limit,
                "{most} namespaces are as many as can be, and each is open or has chunks that stay: \
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
        self.tables[table].spaces += 1;
        self.follow_breaker();
        Ok(at)
    }

    /// Says what the recipe of a namespace says of how its cells are kept on disk. None:
    /// as the store keeps them. A lossy codec changes KV: who has another recipe has
    /// another namespace.
    pub fn set_codec(&mut self, space: u32, codec: Option<Codec>) {
        if let Some(space) = self.namespaces.get_mut(space as usize) {
            space.codec = codec;
        }
    }

    /// The number of a namespace.
    pub fn find_space(&self, key: &Key) -> Option<u32> {
        self.namespaces.find(key)
    }

    /// A handle of a namespace was closed. Its chunks stay.
    pub fn close_space(&mut self, at: u32) {
        let Some(space) = self.namespaces.get_mut(at as usize) else { return };
        space.handles = space.handles.saturating_sub(1);
        self.namespaces.touch(at);
        self.namespaces.look_at(at);
    }

    /// A namespace.
    pub fn space(&self, at: u32) -> Option<&Space> {
        self.namespaces.get(at as usize)
    }

    /// The board of a namespace.
    pub fn table_of(&self, space: u32) -> Option<&ChunkTable> {
        self.tables.get(self.namespaces.get(space as usize)?.table as usize)
    }

    /// Namespaces were found, those first that were written to last: these are given up last.
    /// One that has nothing after all need not be known.
    pub(super) fn look_at_spaces(&mut self, found: &[u32]) {
        for &at in found.iter().rev() {
            self.namespaces.touch(at);
            self.drop_note(at);
            self.namespaces.look_at(at);
        }
    }

    /// The board of a layout.
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

/// The name of the note.
const NAME: &[u8] = b"limits";
const VERSION: u8 = 1;
/// What stands in a note that is of no namespace.
pub(super) const NO_SPACE: u32 = u32::MAX;

impl StoreState {
    /// Whether the chunks that were found fit, or may be forgotten. What has left may be found
    /// again after a crash, so it is only asked where the limit was larger.
    pub(super) fn check_limits(&mut self, recovered: &Recovered) -> Result<()> {
        let note = recovered.sessions.iter().find(|session| *session.name == *NAME);
        let before = note.map_or(0, |note| read(&note.payload));
        self.namespaces.noted_chunks = before;
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
        if self.namespaces.noted_chunks != chunks {
            let content = [&[VERSION][..], &chunks.to_le_bytes()].concat();
            let (space, name) = (NO_SPACE, NAME.to_vec());
            batch.notes.push(SpaceNote { space, name, content, mark: None });
        }
    }

    /// The note is written.
    pub(super) fn limits_noted(&mut self) {
        self.namespaces.noted_chunks = self.config.max_chunks as u64;
    }
}

/// The chunks of a note; 0 where it is none that can be read.
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

/// What is on disk of a namespace.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Below {
    /// Chunks of which something is there.
    chunks: u32,
    /// Records under way.
    writing: u32,
    pub(super) noted: Noted,
}

impl Below {
    /// Whether nothing is there, or on its way.
    pub(super) fn is_bare(&self) -> bool {
        self.chunks + self.writing == 0
    }
}

/// Whether what a namespace is can be found on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Noted {
    #[default]
    No,
    /// It is written, and may not be durable.
    Written(Mark),
    /// It never will be durable: it has to be written anew.
    Lost(Mark),
    Lasts,
}

impl StoreState {
    /// A record of a chunk is in a batch: with what its namespace is, unless that is known.
    pub(super) fn note_with(&mut self, at: At, batch: &mut WriteBatch) {
        let Some(number) = self.namespace_of(at) else { return };
        let below = &mut self.namespaces[number as usize].below;
        below.writing += 1;
        let is_known = matches!(below.noted, Noted::Written(_) | Noted::Lasts);
        if !is_known && batch.notes.iter().all(|note| note.space != number) {
            let (name, content) = self.namespace_note(number);
            batch.notes.push(SpaceNote { space: number, name, content, mark: None });
        }
    }

    /// A batch has ended: notes are written, or not; namespaces may have nothing on disk
    /// after all.
    pub(super) fn noted_with(&mut self, batch: &WriteBatch) {
        for note in &batch.notes {
            // Also where another of the batch was not, and so no chunk.
            let Some(mark) = note.mark else { continue };
            if note.space == NO_SPACE {
                self.limits_noted();
            } else {
                self.namespaces[note.space as usize].below.noted = Noted::Written(mark);
            }
        }
        let mut spaces = BTreeSet::new();
        for &at in &batch.chunks {
            let Some(number) = self.namespace_of(at) else { continue };
            self.namespaces[number as usize].below.writing -= 1;
            spaces.insert(number);
        }
        spaces.into_iter().for_each(|number| self.drop_note(number));
    }

    /// Something of a chunk is on disk, and nothing was before.
    pub(super) fn arrived_on_disk(&mut self, at: At) {
        if let Some(number) = self.namespace_of(at) {
            self.namespaces[number as usize].below.chunks += 1;
        }
    }

    /// Nothing of a chunk is on disk any more.
    pub(super) fn left_below(&mut self, at: At) {
        if let Some(number) = self.namespace_of(at) {
            self.namespaces[number as usize].below.chunks -= 1;
            self.drop_note(number);
        }
    }

    /// What a namespace is need not be known of one that has nothing on disk.
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

    /// What has to be durable beside the chunks of a put.
    pub(super) fn mark_of_note(&self, number: u32) -> Option<Mark> {
        let one = &self.transfers.table[number].spec;
        let slot = *one.slots.first()?;
        let space = self.namespace_of(At { table: one.table, slot })?;
        match self.namespaces[space as usize].below.noted {
            Noted::Written(mark) => Some(mark),
            Noted::Lost(mark) => Some(self.mark_of_moved(space, mark)),
            Noted::No | Noted::Lasts => None,
        }
    }

    /// A note that could not be made durable where it was: cleaning may have taken it
    /// elsewhere.
    fn mark_of_moved(&self, space: u32, lost: Mark) -> Mark {
        let name = [NOTE, &self.namespaces[space as usize].key.0].concat();
        let segment = self.disk.as_ref().and_then(|disk| disk.segment_of_session(&name));
        segment.filter(|&segment| segment != lost.segment()).map_or(lost, Mark::so_far)
    }

    /// Notes were synced for a put, or not.
    pub(super) fn note_synced(&mut self, number: u32, batch: &SyncBatch) {
        let Some(mark) = self.mark_of_note(number) else { return };
        let how = batch.marks.iter().find(|(n, m, _)| (*n, *m) == (number, mark));
        let Some((.., how)) = how else { return };
        let one = &self.transfers.table[number].spec;
        let first = one.slots.first().map(|&slot| At { table: one.table, slot });
        if let Some(space) = first.and_then(|at| self.namespace_of(at)) {
            let noted = if how.is_ok() { Noted::Lasts } else { Noted::Lost(mark) };
            self.namespaces[space as usize].below.noted = noted;
        }
    }

    fn namespace_of(&self, at: At) -> Option<u32> {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot)?;
        Some(row.namespace()).filter(|&number| self.namespaces.get(number as usize).is_some())
    }
}

impl WriteBatch {
    /// Says what became of its notes: before anything else of it is written. Where one could
    /// not be written nothing is.
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

/// Namespaces of which nothing is left are known so long, for what was learned of them.
const MOST_IDLE: usize = 1024;
/// Where all that there may be have chunks, this part of them is given up at once: looking for
/// them takes time.
const GIVEN_UP: usize = 16;

impl StoreState {
    /// A board that is nobody's. Moves may outlive their sessions, and have no chunks at all:
    /// what they count in are the layers of theirs.
    fn vacant_table(&self) -> Option<usize> {
        let is_moved =
            |at: usize| self.transfers.table.iter().any(|(_, one)| one.spec.table == at as u32);
        let is_vacant = |table: &ChunkTable| table.spaces == 0 && table.chunks.is_empty();
        (0..self.tables.len()).find(|&at| is_vacant(&self.tables[at]) && !is_moved(at))
    }

    /// Gives a board a number, which may have been that of another.
    pub(super) fn seat(&mut self, table: ChunkTable) -> Result<usize> {
        if let Some(at) = self.vacant_table() {
            let number = at as u32;
            // Rows are what all else goes by; this is remembered without.
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
                "{most} layouts are as many as can be, and namespaces of each are open or have \
                 chunks that stay: close some, or end their pins"
            );
        }
        self.tables.push(table);
        Ok(self.tables.len() - 1)
    }

    /// Sees to it that there can be a namespace more. Where all that there may be have chunks,
    /// those leave that nobody has used for longest.
    pub(super) fn make_room_for(&mut self, layout: &Layout) -> Result<()> {
        let is_new = self.table_for(layout).is_none();
        let is_full = self.namespaces.len() >= self.config.max_spaces;
        self.forget_idle(if is_new || is_full { 0 } else { MOST_IDLE });
        let lacks_space = self.namespaces.len() >= self.config.max_spaces;
        if is_new && (lacks_space || self.lacks_table()) {
            // One that can have no table sends nobody away.
            drop(self.new_table(layout)?);
        }
        if lacks_space {
            self.give_up_spaces();
        }
        let lacks_table = is_new && self.lacks_table();
        if lacks_table {
            self.give_up_table();
        }
        if lacks_space || lacks_table {
            self.settle(); // what came free may be waited for
        }
        Ok(())
    }

    fn lacks_table(&self) -> bool {
        self.tables.len() >= self.config.max_layouts && self.vacant_table().is_none()
    }

    /// Forgets namespaces of which nothing is left, but for the last ones.
    fn forget_idle(&mut self, most: usize) {
        for _ in most..self.namespaces.idle() {
            let Some(at) = self.namespaces.next_idle() else { break };
            if !self.namespaces[at as usize].is_bare() {
                continue; // it is listed again when that is over
            }
            match self.is_looked_up(at) {
                true => self.namespaces.look_at(at),
                false => self.forget_unused_namespace(at),
            }
        }
    }

    /// Nothing is left of a namespace: its number may be another's from now on.
    fn forget_unused_namespace(&mut self, at: u32) {
        self.drop_note(at);
        self.plans.forget_namespace(at);
        self.forget_remote_names(at);
        let table = self.namespaces[at as usize].table;
        self.tables[table as usize].spaces -= 1;
        self.namespaces.remove(at);
    }

    /// All chunks of namespaces that nobody has open leave, of as many as are worth it.
    fn give_up_spaces(&mut self) {
        let most = self.config.max_spaces;
        let closed = self.namespaces.known().filter(|(_, space)| !space.is_open());
        let mut closed: Vec<(u64, u32)> = closed.map(|(at, space)| (space.used, at)).collect();
        closed.sort_unstable();
        for part in closed.chunks((most / GIVEN_UP).max(1)) {
            let goes: BTreeSet<u32> = part.iter().map(|&(_, at)| at).collect();
            let tables = goes.iter().map(|&at| self.namespaces[at as usize].table);
            for table in tables.collect::<BTreeSet<u32>>() {
                self.send_away(table, |space| goes.contains(&space));
            }
            self.forget_idle(0);
            if self.namespaces.len() < most {
                break;
            }
        }
    }

    /// All chunks of a layout leave of which nobody has a namespace open, if all of them may.
    fn give_up_table(&mut self) {
        let mut last = vec![Some(0); self.tables.len()];
        for (_, space) in self.namespaces.known() {
            let used = &mut last[space.table as usize];
            *used = used.filter(|_| !space.is_open()).map(|used: u64| used.max(space.used));
        }
        let closed = (0u32..).zip(last).filter_map(|(at, used)| Some((used?, at)));
        let mut closed: Vec<(u64, u32)> = closed.collect();
        closed.sort_unstable();
        for (_, table) in closed {
            if self.tables[table as usize].chunks.slots().all(|slot| self.may_go(table, slot)) {
                self.send_away(table, |_| true);
                self.forget_idle(0);
            }
            if self.vacant_table().is_some() {
                break;
            }
        }
    }

    /// Whether a chunk is held by the store alone, for its turn to be written, and at rest.
    fn may_go(&self, table: u32, slot: Slot) -> bool {
        let rows = &self.tables[table as usize];
        let Some(row) = rows.chunks.chunk(slot) else { return true };
        !row.is_moving()
            && row.pin().is_none()
            && row.refs() == u32::from(rows.has(slot, note::QUEUED))
            && !self.writeback.chunk_waiters.contains_key(&At { table, slot })
    }

    /// Chunks of some namespaces of a board leave all tiers, as far as they may. The remote
    /// keeps what it has.
    fn send_away(&mut self, table: u32, goes: impl Fn(u32) -> bool) {
        let rows = &self.tables[table as usize].chunks;
        let of = |slot: Slot| rows.chunk(slot).filter(|row| goes(row.namespace()));
        let slots = rows.slots().filter_map(|slot| Some((Reverse(of(slot)?.position()), slot)));
        // Those first that continue others.
        let mut slots: Vec<(Reverse<u32>, Slot)> = slots.collect();
        slots.sort_unstable();
        let slots: Vec<Slot> = slots.into_iter().map(|(_, slot)| slot).collect();
        let left = self.drop_chunks_locally(table, &slots);
        log::info!("{} chunks of namespaces that nobody has open left for others", left.gone);
    }
}
