//! The remote as the store sees it: hints, the index of named blocks, request timeouts, counters.
//!
//! A hint says that the remote had an object when it was last queried. It may be stale; a stale hint
//! costs one miss.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;
use crate::format::codec::Codec;
use crate::format::keys::Key;
use crate::format::keys::object::ObjectKeys;
use crate::format::record;
use crate::meta::chunks::Cell;
use crate::meta::index::{NONE, Slot};
use crate::store::admission::Admission;
use crate::store::counters::RemoteStats;
use crate::store::events::Kind;
use crate::store::state::batches::WorkerKind;
use crate::store::state::batches::{FETCHES, Stage};
use crate::store::state::blocks::MAX_BLOCKS;
use crate::store::state::chunk_table::note;
use crate::store::state::config::RemoteConfig;
use crate::store::state::remote_fetch::{RemotePrefetch, RequestedObject};
use crate::store::state::remote_lookup::{
    LookupItem, Lookups, PendingLookup, Requester, Window, noted_chunks,
};
use crate::store::state::transfer::{Of, TransferKind};
use crate::store::state::{At, Config, StoreState};
use crate::tier::remote::breaker::{Breaker, Direction, Outcome};
use crate::tier::remote::name::Names;
use crate::tier::remote::secret::Secret;
use crate::tier::remote::shape::Shape;
use crate::tier::remote::{Name, RemoteError};

/// Most names waiting to be removed at the remote. More are forgotten.
const MOST_REMOVALS: usize = 1024;

/// Bytes for which a batch gets 1 ms more: the rate of a share of a 1 Gbit/s link.
const BYTES_PER_MS: u64 = 16 << 10;

/// Extra time of a batch of `bytes` bytes, in ns.
pub(super) fn time_of(bytes: u64) -> u64 {
    bytes.saturating_mul(1_000_000) / BYTES_PER_MS
}

/// The remote of a store.
pub(super) struct RemoteTier {
    pub config: RemoteConfig,
    pub breaker: Breaker,
    /// Fetches, each by the first job of its object.
    pub fetch: Stage,
    /// Objects that jobs wait for.
    pub requested: BTreeMap<(At, u32), RequestedObject>,
    /// Number of jobs that wait for a cell of a fetch in flight.
    pub awaited: BTreeMap<(At, u32), u32>,
    /// Objects to be uploaded, whose cells are referenced.
    pub upload_queue: VecDeque<(At, u32)>,
    /// Bytes of these and of uploads in flight.
    pub upload_bytes: u64,
    /// Puts that wait for the upload of a chunk.
    pub upload_waiters: BTreeMap<At, Vec<(u32, u32)>>,
    pub lookups: Lookups,
    pub remote_prefetch: RemotePrefetch,
    pub located: Located,
    pub known: Known,
    pub watch: Watch,
    pub removals: VecDeque<Name>,
    /// Batches of removals in flight. Nothing is uploaded meanwhile.
    pub removing: u32,
    pub admission: Admission,
    pub counters: RemoteStats,
    shapes: Vec<Option<Arc<Shape>>>,
    names: BTreeMap<u32, Arc<Names>>,
}

impl RemoteTier {
    /// Opens the remote of a store, if it has one.
    pub fn open(config: &Config) -> Result<Option<Box<RemoteTier>>> {
        let Some(remote) = &config.remote else { return Ok(None) };
        Ok(Some(Box::new(RemoteTier {
            breaker: Breaker::new(remote.seed),
            fetch: Stage::new(config, FETCHES)?,
            requested: BTreeMap::new(),
            awaited: BTreeMap::new(),
            upload_queue: VecDeque::new(),
            upload_bytes: 0,
            upload_waiters: BTreeMap::new(),
            lookups: Lookups::default(),
            remote_prefetch: RemotePrefetch::default(),
            located: Located::default(),
            known: Known::new(remote.known)?,
            watch: Watch::default(),
            removals: VecDeque::new(),
            removing: 0,
            admission: Admission::open(&remote.admission, 0)?,
            counters: RemoteStats::default(),
            shapes: Vec::new(),
            names: BTreeMap::new(),
            config: remote.clone(),
        })))
    }

    /// Whether no job, put or lookup waits for the remote.
    pub fn is_quiet(&self) -> bool {
        self.is_quiet_to_fetch()
            && self.upload_queue.is_empty()
            && !self.lookups.has_queued()
            && self.removals.is_empty()
    }

    /// Whether no fetch is queued.
    pub fn is_quiet_to_fetch(&self) -> bool {
        !self.fetch.has_queued()
    }

    /// Whether an upload or a removal may begin now.
    pub fn has_to_send(&self) -> bool {
        self.removing == 0 && (!self.upload_queue.is_empty() || !self.removals.is_empty())
    }

    /// Whether all waiters and references have ended, as must be when nothing is in flight.
    pub fn is_bare(&self) -> bool {
        self.is_quiet()
            && self.requested.is_empty()
            && self.awaited.is_empty()
            && self.upload_waiters.is_empty()
            && self.upload_bytes == 0
            && self.removing == 0
            && !self.lookups.has_blocks()
    }

    /// Describes the requests and uploads in flight or queued.
    pub fn describe(&self) -> String {
        format!(
            "{} objects requested, {} uploads queued, {} bytes uploading, {} chunks awaited",
            self.requested.len(),
            self.upload_queue.len(),
            self.upload_bytes,
            self.upload_waiters.len(),
        )
    }

    /// Whether the circuit for reads is closed.
    pub fn is_well(&self) -> bool {
        self.breaker.is_closed(Direction::Read)
    }

    /// Takes over the outcome of a request. `probes` says that the request was the probe of an open
    /// circuit.
    pub fn record_outcome<T>(
        &mut self,
        direction: Direction,
        result: &std::result::Result<T, RemoteError>,
        probes: bool,
        now_ns: u64,
    ) {
        self.breaker.record(direction, Outcome::of(direction, result), probes, now_ns);
        match result.as_ref().err() {
            Some(RemoteError::Timeout | RemoteError::Unreachable | RemoteError::Busy) => {
                self.counters.late_requests += 1
            }
            Some(RemoteError::Malformed | RemoteError::Damaged) => {
                self.counters.corrupt_objects += 1
            }
            _ => {}
        }
    }

    /// Queues the removal of an object.
    pub fn queue_removal(&mut self, name: Name) {
        if self.removals.len() < MOST_REMOVALS {
            self.removals.push_back(name);
        }
    }
}

impl StoreState {
    /// The breaker of the remote, if there is one.
    pub fn remote_breaker(&self) -> Option<&Breaker> {
        self.remote.as_ref().map(|remote| &remote.breaker)
    }

    /// Statistics of the remote, if there is one.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        self.remote.as_ref().map(|remote| RemoteStats {
            read_circuit: remote.breaker.state(Direction::Read) as u32,
            write_circuit: remote.breaker.state(Direction::Write) as u32,
            circuit_opens: remote.breaker.opened(),
            ..remote.counters
        })
    }

    /// How chunks of a table are cut into objects; `None` if the remote accepts none of that size.
    pub(super) fn remote_shape(&mut self, table: u32) -> Option<Arc<Shape>> {
        let remote = self.remote.as_mut()?;
        let at = table as usize;
        if remote.shapes.len() <= at {
            remote.shapes.resize(at + 1, None);
        }
        if remote.shapes[at].is_none() {
            let shape = Shape::new(&self.tables[at].layout, remote.config.object_bytes).ok()?;
            let (bytes, most) = (shape.most_bytes(), remote.config.max_bytes);
            if bytes > most {
                log::warn!(
                    "the remote accepts objects of at most {most} bytes: layers of {bytes} bytes are not uploaded"
                );
            }
            remote.shapes[at] = Some(Arc::new(shape));
        }
        remote.shapes[at].clone().filter(|shape| shape.most_bytes() <= remote.config.max_bytes)
    }

    /// Names of the objects of a namespace.
    pub(super) fn remote_names(&mut self, namespace: u32) -> Option<Arc<Names>> {
        let entry = *self.namespaces.get(namespace as usize)?;
        let fingerprint = self.tables[entry.table as usize].fingerprint;
        let remote = self.remote.as_mut()?;
        if let Some(names) = remote.names.get(&namespace) {
            return Some(names.clone());
        }
        let secret = remote.config.secret.as_ref();
        let keys = ObjectKeys::new(&entry.key, &fingerprint, secret.map(Secret::bytes));
        let names = Arc::new(Names::new(keys, entry.tenant, Codec::None, secret.is_some()));
        remote.names.insert(namespace, names.clone());
        Some(names)
    }

    /// Sets the owner of a namespace's objects at the remote; 0 = shared by all. Fails with INVALID
    /// if the namespace is open with another owner.
    pub fn set_tenant(&mut self, namespace: u32, tenant: u64) -> Result<()> {
        let Some(entry) = self.namespaces.get_mut(namespace as usize) else { return Ok(()) };
        if entry.tenant == tenant {
            return Ok(());
        }
        if entry.handles > 1 {
            fail!(
                Invalid,
                "the namespace is open with remote tenant {}: close it, or use that tenant",
                entry.tenant
            );
        }
        entry.tenant = tenant;
        if let Some(remote) = &mut self.remote {
            remote.names.remove(&namespace);
        }
        Ok(())
    }

    /// Forgets a namespace: its number will be used again.
    pub(super) fn forget_remote_names(&mut self, namespace: u32) {
        if let Some(remote) = &mut self.remote {
            remote.names.remove(&namespace);
        }
    }

    /// Forgets a chunk table: its number will be used again.
    pub(super) fn forget_remote_shape(&mut self, table: u32) {
        let shapes = self.remote.as_mut().map(|remote| &mut remote.shapes);
        if let Some(shape) = shapes.and_then(|all| all.get_mut(table as usize)) {
            *shape = None;
        }
    }

    /// Header of a chunk in an object. It does not name the parent: the key commits to it, and
    /// where chunks are evicted in any order the parent may be unknown.
    pub(super) fn remote_record(&self, at: At) -> record::Chunk {
        let chunk = self.record_of(at);
        record::Chunk { parent: chunk.namespace, ..chunk }
    }

    /// Name of an object of a chunk.
    pub(super) fn remote_name(&mut self, at: At, shape: &Shape, object: u32) -> Option<Name> {
        let rows = &self.tables[at.table as usize].chunks;
        let (namespace, key) = (rows.chunk(at.slot)?.namespace(), *rows.key(at.slot)?);
        let names = self.remote_names(namespace)?;
        Some(names.name(&key, &shape.cut(object as usize)))
    }

    /// Sets whether hints count in lookups: only while the circuit is closed.
    pub(super) fn follow_breaker(&mut self) {
        let Some(remote) = &self.remote else { return };
        let is_well = remote.is_well();
        self.tables.iter_mut().for_each(|table| table.chunks.count_remote(is_well));
    }

    /// Removes the hint of an object that the remote lacks, or has damaged. The caller publishes
    /// that with [`StoreState::note_remote_index`].
    pub(super) fn forget_hint(&mut self, at: At, layers: std::ops::Range<u32>) {
        for layer in layers {
            let cell = Cell { chunk: at.slot, layer: layer as usize };
            if let Err(error) = self.tables[at.table as usize].chunks.begin_drop(cell, Tier::Remote)
            {
                log::error!("internal: a hint could not be removed: {error}");
            }
        }
    }

    /// Removes the remote objects of a dropped chunk, as far as they are known.
    pub(super) fn drop_remote(&mut self, at: At) {
        let before = self.remote_cells(at);
        let Some(shape) = self.remote_shape(at.table).filter(|_| before > 0) else { return };
        for object in 0..shape.objects() as u32 {
            let layers = shape.layers(object as usize);
            let name = self.remote_name(at, &shape, object);
            if let (Some(name), Some(remote)) = (name, &mut self.remote) {
                remote.known.put(&name, false, self.now_ns);
                remote.queue_removal(name);
            }
            self.forget_hint(at, layers);
        }
        self.note_remote_index(at, before);
    }

    /// Cells of a chunk that the remote has, by hints.
    pub(super) fn remote_cells(&self, at: At) -> usize {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        row.map_or(0, |row| usize::from(row.cells()[Tier::Remote as usize]))
    }

    /// Publishes that all of a chunk is at the remote now, or no longer.
    pub(super) fn note_remote_index(&mut self, at: At, before: usize) {
        let layers = self.tables[at.table as usize].layout.layers();
        let after = self.remote_cells(at);
        if before < layers && after == layers {
            self.publish(Kind::Stored, Tier::Remote, at);
        } else if before == layers && after < layers {
            self.publish(Kind::Removed, Tier::Remote, at);
        }
    }
}

// ---------- remote index
//
// Recent answers about names. An answer may be stale, and few names may be confused with others: that
// costs a request, or a miss.

/// Entries of a set.
const WAYS: usize = 4;
/// Unit of ages in the table: 2^26 ns.
const TICK_NS: u64 = 1 << 26;

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Entry {
    tag: u64,
    /// Time of the answer in ticks, plus one; 0 = empty.
    tick: u32,
    is_present: u32,
}

// SAFETY: integers only.
unsafe impl Zeroable for Entry {}

/// A set-associative table of answers.
pub(super) struct Known {
    entries: Zeroed<Entry>,
    sets: usize,
}

impl Known {
    /// For about so many names.
    pub fn new(names: usize) -> Result<Known> {
        let sets = (names / WAYS).max(1).next_power_of_two();
        Ok(Known { entries: Zeroed::new(sets * WAYS)?, sets })
    }

    /// Bytes of the table.
    pub fn bytes(&self) -> u64 {
        (self.entries.len() * size_of::<Entry>()) as u64
    }

    /// The answer for a name, if it is young enough.
    pub fn get(&self, name: &Name, now_ns: u64, fresh_ns: u64, absent_ns: u64) -> Option<bool> {
        let (first, tag) = self.set_of(name);
        let entry = self.entries[first..first + WAYS].iter().find(|entry| entry.tag == tag)?;
        let answered = u64::from(entry.tick.checked_sub(1)?);
        let age_ns = (now_ns / TICK_NS).saturating_sub(answered) * TICK_NS;
        let is_present = entry.is_present != 0;
        (age_ns <= if is_present { fresh_ns } else { absent_ns }).then_some(is_present)
    }

    /// Whether a name was present at a time or later.
    pub fn was_present_since(&self, name: &Name, since_ns: u64) -> bool {
        let (first, tag) = self.set_of(name);
        let entry = self.entries[first..first + WAYS].iter().find(|entry| entry.tag == tag);
        entry.is_some_and(|entry| {
            entry.is_present != 0 && u64::from(entry.tick) > since_ns / TICK_NS
        })
    }

    /// Records an answer; the oldest of its set is forgotten.
    pub fn put(&mut self, name: &Name, is_present: bool, now_ns: u64) {
        let (first, tag) = self.set_of(name);
        let set = &mut self.entries[first..first + WAYS];
        let at = match set.iter().position(|entry| entry.tag == tag) {
            Some(at) => at,
            None => (0..WAYS).min_by_key(|&at| set[at].tick).unwrap_or(0),
        };
        let tick = u32::try_from(now_ns / TICK_NS).unwrap_or(u32::MAX - 1).saturating_add(1);
        set[at] = Entry { tag, tick, is_present: u32::from(is_present) };
    }

    /// First entry of a name's set, and the tag of the name.
    fn set_of(&self, name: &Name) -> (usize, u64) {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&name.hash[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let tag = word(8) ^ name.tenant.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((word(0) as usize & (self.sets - 1)) * WAYS, tag)
    }
}

// ---------- remote blocks
//
// Named blocks at the remote. A block that the remote has gets a row without a reference; the hint
// keeps it until rows are needed.

/// Most blocks of one remote lookup.
const MAX_PENDING_BLOCKS: usize = 1 << 20;

/// Blocks that a transfer looks up.
#[derive(Default)]
pub(super) struct Named {
    namespace: u32,
    keys: Vec<Key>,
}

/// Rows of blocks that lookups have found, the earliest first, with the generation of the row.
#[derive(Default)]
pub(super) struct Located(VecDeque<(At, u32)>);

impl StoreState {
    /// Begins a transfer that completes when it is known which blocks are in the store or at the remote.
    /// Each block has an outcome; NOT_FOUND = in neither. It continues when the session is closed.
    pub fn locate_blocks(&mut self, at: u32, keys: Vec<Key>) -> Result<u32> {
        let namespace = self.session(at)?.namespace;
        if keys.is_empty() || keys.len() > MAX_BLOCKS {
            fail!(Limit, "{} blocks: a transfer has 1 to {MAX_BLOCKS}", keys.len());
        }
        let table = self.namespaces[namespace as usize].table;
        let mut slots = self.find_blocks(namespace, &keys)?;
        let may_query = slots.iter().any(|&slot| !self.is_found(table, slot));
        let lookups = self.remote.as_ref().filter(|_| may_query).map(|remote| &remote.lookups);
        let waiting: usize = lookups
            .iter()
            .flat_map(|all| all.pending.values())
            .map(|entry| entry.named.keys.len())
            .sum();
        if waiting + keys.len() > MAX_PENDING_BLOCKS {
            fail!(
                Again,
                "{waiting} blocks are being looked up, and {} more are requested: the limit is {MAX_PENDING_BLOCKS}",
                keys.len()
            );
        }
        slots.fill(NONE);
        let number = self.begin_locating(at, slots)?;
        match self.remote.as_mut().filter(|_| may_query) {
            Some(remote) => {
                remote.lookups.serial += 1;
                let (serial, named) = (remote.lookups.serial, Named { namespace, keys });
                let lookup =
                    PendingLookup { serial, is_busy: true, named, ..PendingLookup::default() };
                remote.lookups.pending.insert(Requester::Blocks(number), lookup);
                remote.lookups.queue.push_back(Requester::Blocks(number));
                remote.lookups.is_urgent = true;
            }
            None => self.end_locating(number, &Named { namespace, keys }, Status::NotFound),
        }
        self.settle();
        Ok(number)
    }

    /// Whether all of a chunk is in the store, or at the remote by its hints.
    pub(super) fn is_found(&self, table: u32, slot: Slot) -> bool {
        let rows = &self.tables[table as usize];
        let marks = rows.chunks.marks(slot).unwrap_or_default();
        marks.len() == rows.layout.layers()
            && marks.iter().all(|entry| {
                entry.resident_tiers() != 0 || entry.is_remote() && rows.chunks.counts_remote()
            })
    }

    /// Row of a block, or NONE.
    fn find_block(&self, namespace: u32, key: &Key) -> Slot {
        let chunks = &self.tables[self.namespaces[namespace as usize].table as usize].chunks;
        let is_it =
            |slot: &Slot| chunks.chunk(*slot).is_some_and(|row| row.namespace() == namespace);
        chunks.find(key).filter(is_it).unwrap_or(NONE)
    }

    fn named_by(&self, number: u32) -> Option<&PendingLookup> {
        self.remote.as_ref()?.lookups.pending.get(&Requester::Blocks(number))
    }

    /// Whether a transfer looks up blocks of a namespace. Its session may be closed.
    pub(super) fn is_looked_up(&self, namespace: u32) -> bool {
        let first = Requester::Blocks(0);
        self.remote.as_ref().is_some_and(|remote| {
            remote
                .lookups
                .pending
                .range(first..)
                .any(|(_, entry)| entry.named.namespace == namespace)
        })
    }

    /// Forgets the remote hints of a chunk that is removed from the table. They must be looked up
    /// again.
    pub(super) fn forget_remote(&mut self, at: At) {
        let before = self.remote_cells(at);
        if before > 0 {
            self.forget_hint(at, 0..self.tables[at.table as usize].layout.layers() as u32);
            self.note_remote_index(at, before);
        }
    }

    /// Forgets found blocks of a table whose number will be used again.
    pub(super) fn forget_located_of(&mut self, table: u32) {
        if let Some(remote) = &mut self.remote {
            remote.located.0.retain(|(at, _)| at.table != table);
        }
    }

    /// The next blocks of a transfer to look up.
    pub(super) fn window_of_blocks(&mut self, number: u32) -> Option<Window> {
        let namespace = self.named_by(number)?.named.namespace;
        let table = self.namespaces[namespace as usize].table;
        let (shape, names) = (self.remote_shape(table)?, self.remote_names(namespace)?);
        let (remote, lookup) = (self.remote.as_ref()?, self.named_by(number)?);
        let (config, cut) = (&remote.config, shape.cut(shape.objects() - 1));
        let mut window = Window { end: lookup.next, ..Window::default() };
        let max_present = noted_chunks(self.tables[table as usize].layout.layers());
        let most = lookup.next_names(config.names.min(max_present));
        // A block that is named twice is looked up once.
        let mut keys = BTreeSet::new();
        for (chunk, key) in lookup.named.keys.iter().enumerate().skip(lookup.next) {
            if window.items.len() >= most || window.present.len() >= max_present {
                window.is_cut = true;
                break;
            }
            window.end = chunk + 1;
            let is_known = self.is_found(table, self.find_block(namespace, key));
            if is_known || keys.contains(key) {
                continue;
            }
            let name = names.name(key, &cut);
            match remote.known.get(&name, self.now_ns, config.fresh_ns, config.absent_ns) {
                Some(true) if remote.is_well() => window.present.push(chunk),
                Some(false) => {}
                _ => {
                    keys.insert(*key);
                    let result = Err(RemoteError::Busy);
                    window.items.push(LookupItem { chunk, key: *key, name, result });
                }
            }
        }
        Some(window)
    }

    /// Records the answers for blocks of a transfer. Returns whether more are to be looked up.
    pub(super) fn note_block_answers(&mut self, number: u32, items: &[LookupItem]) -> bool {
        let present =
            items.iter().filter(|entry| entry.result == Ok(true)).map(|entry| entry.chunk);
        let present: Vec<usize> = present.collect();
        self.note_blocks(number, &present);
        let remote = self.remote.as_mut();
        let lookup =
            remote.and_then(|remote| remote.lookups.pending.get_mut(&Requester::Blocks(number)));
        let (Some(lookup), Some(last)) = (lookup, items.last()) else { return false };
        lookup.next = last.chunk + 1;
        lookup.next < lookup.named.keys.len()
    }

    /// Adds rows for blocks that the remote has, if that evicts nothing but rows of other such
    /// blocks.
    pub(super) fn note_blocks(&mut self, number: u32, chunks: &[usize]) {
        for &chunk in chunks {
            let Some(Named { namespace, keys }) = self.named_by(number).map(|entry| &entry.named)
            else {
                return;
            };
            let (namespace, Some(key)) = (*namespace, keys.get(chunk).copied()) else { return };
            let table = self.namespaces[namespace as usize].table;
            let slot = match self.find_block(namespace, &key) {
                NONE if !self.rows_for_hints(1) => return,
                NONE => self.add_block(namespace, &key),
                slot => Ok(slot),
            };
            match slot {
                Ok(slot) => self.hold_by_hint(At { table, slot }),
                Err(error) => log::error!(
                    "internal: no row could be added for a block at the remote: {error}"
                ),
            }
        }
    }

    /// Frees so many rows by forgetting found blocks alone. Returns whether that was enough.
    pub(super) fn rows_for_hints(&mut self, rows: usize) -> bool {
        self.forget_located(rows);
        rows <= self.free_rows() && self.reserve_rows(rows).is_ok()
    }

    /// Keeps the row of a block that the remote has.
    fn hold_by_hint(&mut self, at: At) {
        self.hint_remote(at);
        let rows = &mut self.tables[at.table as usize];
        let (Some(row), Some(remote)) = (rows.chunks.chunk(at.slot), &mut self.remote) else {
            return;
        };
        if rows.has(at.slot, note::LOCATED) {
            return;
        }
        remote.located.0.push_back((at, row.generation()));
        rows.set(at.slot, note::LOCATED);
        if remote.located.0.len() > remote.config.known.max(1) {
            self.forget_first_located();
        }
    }

    /// Whether a row stays for a hint, without references and cells.
    pub(super) fn is_held_by_hint(&self, at: At) -> bool {
        self.tables[at.table as usize].has(at.slot, note::LOCATED) && self.remote_cells(at) > 0
    }

    /// Forgets found blocks until so many rows are free, or none is left.
    pub(super) fn forget_located(&mut self, rows: usize) {
        while self.free_rows() < rows && self.forget_first_located() {}
    }

    /// Forgets the earliest found block. Returns whether there was one.
    fn forget_first_located(&mut self) -> bool {
        let first = self.remote.as_mut().and_then(|remote| remote.located.0.pop_front());
        let Some((at, generation)) = first else { return false };
        let rows = &mut self.tables[at.table as usize];
        if rows.chunks.chunk_of(at.slot, generation).is_some() {
            rows.clear(at.slot, note::LOCATED);
            self.tidy(at.table, at.slot);
        }
        true
    }

    /// Ends the lookup of a transfer. Blocks that were not found get this status.
    pub(super) fn located_blocks(&mut self, number: u32, status: Status) {
        let Some(remote) = &mut self.remote else { return };
        let requester = Requester::Blocks(number);
        remote.lookups.queue.retain(|&other| other != requester);
        if let Some(lookup) = remote.lookups.pending.remove(&requester) {
            self.end_locating(number, &lookup.named, status);
        }
    }

    fn end_locating(&mut self, number: u32, named: &Named, status: Status) {
        let table = self.namespaces[named.namespace as usize].table;
        let error = Error::from(status);
        for (chunk, key) in named.keys.iter().enumerate() {
            let slot = self.find_block(named.namespace, key);
            if !self.is_found(table, slot) {
                self.transfers.table[number].note_failure(chunk as u32, &error);
            }
        }
        self.end_transfer(number);
    }
}

// ---------- remote timeouts
//
// Watches remote requests that do not return: a directory on a dead mount, a callback of the engine, a
// name resolver. Connections have deadlines, so most requests never get here. After twice its timeout
// the store stops waiting for a request: gets miss, lookups end without an answer, puts of level
// *remote* fail. The request keeps its memory until it returns.

/// When the store stops waiting for a request, and the number of the request.
pub(super) type Ticket = (u64, u64);

/// Kind of a request, with its objects.
pub(super) enum RequestKind {
    /// Fetches these cells.
    Fetch(Vec<(At, u32)>),
    /// Looks up names for a requester with this serial.
    Lookup(Requester, u64),
    /// Uploads objects of these chunks.
    Upload(Vec<At>),
}

impl RequestKind {
    fn workers(&self) -> WorkerKind {
        match self {
            RequestKind::Fetch(_) => WorkerKind::Fetch,
            RequestKind::Lookup(..) => WorkerKind::Lookup,
            RequestKind::Upload(_) => WorkerKind::Upload,
        }
    }
}

struct Request {
    kind: RequestKind,
    /// It probes an open circuit.
    probes: bool,
}

/// Requests in flight.
#[derive(Default)]
pub(super) struct Watch {
    begun: u64,
    open: BTreeMap<Ticket, Request>,
    /// Requests that the store no longer waits for.
    hung: BTreeMap<Ticket, RequestKind>,
    /// Cells that hung fetches would load.
    cells: BTreeSet<(At, u32)>,
}

impl Watch {
    /// Begins to watch a request with this timeout.
    pub fn begin(
        &mut self,
        now_ns: u64,
        timeout_ns: u64,
        kind: RequestKind,
        probes: bool,
    ) -> Ticket {
        self.begun += 1;
        let ticket = (now_ns.saturating_add(timeout_ns.saturating_mul(2)), self.begun);
        self.open.insert(ticket, Request { kind, probes });
        ticket
    }

    /// Ends the watch of a request that has returned. Returns false if the store had stopped
    /// waiting; then the breaker has counted the request already.
    pub fn end(&mut self, ticket: Ticket) -> bool {
        let in_time = self.open.remove(&ticket).is_some();
        if let Some(RequestKind::Fetch(cells)) = self.hung.remove(&ticket) {
            self.cells.retain(|cell| !cells.contains(cell));
        }
        in_time
    }

    fn hung_of(&self, workers: WorkerKind) -> u32 {
        self.hung.values().filter(|kind| kind.workers() == workers).count() as u32
    }
}

impl StoreState {
    /// When the next request becomes overdue.
    pub fn watch_ns(&self) -> Option<u64> {
        let (ticket, _) = self.remote.as_ref()?.watch.open.first_key_value()?;
        Some(ticket.0)
    }

    /// Number of requests of a worker kind that hang.
    pub(super) fn hung(&self, workers: WorkerKind) -> u32 {
        self.remote.as_ref().map_or(0, |remote| remote.watch.hung_of(workers))
    }

    /// Whether all workers of a kind hang.
    pub(super) fn all_hang(&self, workers: WorkerKind) -> bool {
        let count = self.remote.as_ref().map_or(0, |remote| match workers {
            WorkerKind::Fetch => remote.config.fetchers,
            _ => 1,
        });
        count > 0 && self.hung(workers) >= count
    }

    /// Stops waiting for each request that is overdue.
    pub(super) fn abandon_overdue(&mut self) {
        while let Some(remote) = &mut self.remote {
            let Some(first) = remote.watch.open.first_entry() else { break };
            let ticket = *first.key();
            if ticket.0 > self.now_ns {
                break;
            }
            let Request { kind, probes } = first.remove();
            remote.counters.hung_requests += 1;
            let direction = if kind.workers() == WorkerKind::Upload {
                Direction::Write
            } else {
                Direction::Read
            };
            log::warn!(
                "a remote request ({:?}) has not returned after twice its timeout: the store no \
                 longer waits for it. Check the remote's mount, server or callback",
                kind.workers()
            );
            remote.record_outcome(
                direction,
                &Err::<(), _>(RemoteError::Timeout),
                probes,
                self.now_ns,
            );
            if let RequestKind::Fetch(cells) = &kind {
                remote.watch.cells.extend(cells.iter().copied());
            }
            self.follow_breaker();
            match &kind {
                RequestKind::Fetch(cells) => {
                    cells.iter().for_each(|&(at, layer)| self.miss(at, layer))
                }
                RequestKind::Lookup(requester, serial) => self.abandon_lookup(*requester, *serial),
                RequestKind::Upload(chunks) => {
                    chunks.iter().for_each(|&at| self.abandon_upload(at))
                }
            }
            if let Some(remote) = &mut self.remote {
                remote.watch.hung.insert(ticket, kind);
            }
        }
        self.abandon_queues();
    }

    /// Ends queued requests of a kind whose workers all hang.
    pub(super) fn abandon_queues(&mut self) {
        if self.remote.as_ref().is_none_or(|remote| remote.watch.hung.is_empty()) {
            return;
        }
        if self.all_hang(WorkerKind::Fetch) {
            self.skip_fetches();
        }
        if self.all_hang(WorkerKind::Lookup) {
            self.skip_lookups();
        }
    }

    /// Ends a lookup without an answer.
    fn abandon_lookup(&mut self, requester: Requester, serial: u64) {
        let Some(remote) = &mut self.remote else { return };
        if remote.lookups.pending.get(&requester).is_some_and(|entry| entry.serial == serial) {
            self.end_lookup(requester);
        }
    }

    /// Ends all queued lookups without an answer.
    fn skip_lookups(&mut self) {
        while let Some(requester) =
            self.remote.as_mut().and_then(|remote| remote.lookups.queue.pop_front())
        {
            self.end_lookup(requester);
        }
    }

    /// Whether a hung fetch would load a cell.
    pub(super) fn is_hung(&self, at: At, layer: usize) -> bool {
        let remote = self.remote.as_ref();
        remote.is_some_and(|remote| remote.watch.cells.contains(&(at, layer as u32)))
    }

    /// Ends a job that waits for a cell of a hung fetch.
    pub(super) fn end_hung(&mut self, id: u32) {
        let number = self.transfers.jobs[id].number;
        let error = match self.transfers.table[number].spec.kind {
            TransferKind::Put => Error::new(
                Status::Unavailable,
                "the remote is fetching that cell, and does not answer: put it again later",
            ),
            TransferKind::Get | TransferKind::Prefetch => {
                self.counters.missed_cells += u64::from(!self.is_prefetch(number));
                Status::NotFound.into()
            }
        };
        self.end_job(id, 0, Some(error));
    }

    /// Ends every job that waits for a cell of a hung fetch.
    fn miss(&mut self, at: At, layer: u32) {
        let own = self.remote.as_mut().and_then(|remote| remote.awaited.remove(&(at, layer)));
        if let Some(id) = own {
            self.transfers.jobs[id].piece = None;
            self.end_hung(id);
        }
        let cell = Cell { chunk: at.slot, layer: layer as usize };
        let Some(mut queue) = self.transfers.cell_waiters.remove(&(at, cell.layer)) else { return };
        while let Some(id) = queue.pop_back(&mut self.transfers.jobs, Of::Wait) {
            self.end_hung(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u64) -> Name {
        let mut hash = [0; 20];
        hash[..8].copy_from_slice(&n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        hash[8..16].copy_from_slice(&n.to_le_bytes());
        Name { tenant: 0, hash }
    }

    #[test]
    fn an_answer_is_valid_until_its_age_limit() {
        let mut known = Known::new(64).expect("small");
        let (second, fresh, absent) = (1_000_000_000, 60_000_000_000, 5_000_000_000);
        known.put(&name(1), true, second);
        known.put(&name(2), false, second);
        let get = |known: &Known, n, now| known.get(&name(n), now, fresh, absent);
        assert_eq!((get(&known, 1, second), get(&known, 2, second)), (Some(true), Some(false)));
        assert_eq!(get(&known, 3, second), None);
        assert_eq!((get(&known, 1, 10 * second), get(&known, 2, 10 * second)), (Some(true), None));
        assert_eq!(get(&known, 1, 70 * second), None);
        let since = |n, at| known.was_present_since(&name(n), at);
        assert!(since(1, second) && !since(1, 2 * second) && !since(2, 0) && !since(3, 0));
        known.put(&name(1), false, 70 * second);
        assert_eq!(get(&known, 1, 70 * second), Some(false));
        let of_another = Name { tenant: 5, ..name(1) };
        assert_eq!(known.get(&of_another, 70 * second, fresh, absent), None);
    }

    #[test]
    fn the_oldest_answer_of_a_set_is_replaced() {
        let mut known = Known::new(4).expect("small");
        (0..5).for_each(|n| known.put(&name(n), true, (n + 1) << 30));
        let get = |n| known.get(&name(n), 5 << 30, u64::MAX, 0);
        assert_eq!((get(0), get(1), get(4)), (None, Some(true), Some(true)));
    }
}
