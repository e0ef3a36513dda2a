//! Write-back from host memory to disk: which chunks, in which order, with which ancestors, and the
//! group commit that makes them durable.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::format::codec::Codec;
use crate::format::codec::int8::Quality;
use crate::format::record::blocks_of;
use crate::meta::chunks::{Arrival, Begin, Cell, Dropped, Location, StoredForm};
use crate::meta::index::{NONE, Slot};
use crate::store::job_queues::LANES;
use crate::store::state::batches::{Coding, SyncBatch, WorkerKind, WriteBatch};
use crate::store::state::chunk_table::Part;
use crate::store::state::chunk_table::note;
use crate::store::state::tier_cache::Demotion;
use crate::store::state::transfer::Level;
use crate::store::state::{At, DEVICE_MASK, DISK_MASK, HOST_MASK, StoreState, Write};
use crate::tier::disk::{Mark, PutPlane, Spot, usual_record_bytes};
use crate::tier::host::Piece;

/// Most cells of a record.
pub const RECORD_CELLS: usize = 512;

/// Outcome of a batch for one chunk.
struct Written {
    at: At,
    marks: Vec<Unsynced>,
    error: Option<Error>,
}

/// Chunks in transfer from memory to disk, and transfers that wait for them.
pub(super) struct Writeback {
    /// Chunks to be written.
    pub(super) queue: VecDeque<At>,
    /// Chunks whose memory is freed once they are on disk, and how much of them.
    pub(super) demoting: BTreeMap<At, Demotion>,
    pub(super) demoting_bytes: u64,
    /// Puts that wait until a chunk is on disk, each with the index of the chunk in its transfer;
    /// NONE = the chunk is only written because a later one needs it.
    pub(super) chunk_waiters: BTreeMap<At, Vec<(u32, u32)>>,
    /// Writes that are not durable yet.
    pub(super) unsynced: BTreeMap<At, Vec<Unsynced>>,
    /// Number of unsynced writes at which a sync is made even if no put waits for it.
    pub(super) sync_at: usize,
    /// Puts that wait for a sync.
    pub(super) sync_waiters: Vec<u32>,
    pub(super) write_behind: WriteBehind,
}

impl Default for Writeback {
    fn default() -> Writeback {
        Writeback {
            queue: VecDeque::new(),
            demoting: BTreeMap::new(),
            demoting_bytes: 0,
            chunk_waiters: BTreeMap::new(),
            unsynced: BTreeMap::new(),
            sync_at: MOST_UNSYNCED,
            sync_waiters: Vec::new(),
            write_behind: WriteBehind::default(),
        }
    }
}

impl StoreState {
    /// The cells of a put are in memory: writes what its level requires on disk.
    pub(super) fn write_back_put(&mut self, number: u32) {
        let one = &self.transfers.table[number].spec;
        let (table, level) = (one.table, one.level);
        if self.disk.is_none() {
            return;
        }
        let on_disk = level.is_on_disk();
        let one = &self.transfers.table[number];
        let layers = self.tables[table as usize].layout.layers();
        let all_read = on_disk && one.spec.layers == layers && one.is_sound();
        for i in 0..self.transfers.table[number].spec.slots.len() {
            let at = At { table, slot: self.transfers.table[number].spec.slots[i] };
            if all_read {
                self.tables[table as usize].clear(at.slot, note::UNREAD);
            }
            let must = on_disk || self.is_needed_on_disk(at);
            if !must && self.config.write == Write::Behind {
                self.write_later(at);
            }
            if !must && self.config.write != Write::Through {
                continue;
            }
            let bytes = self.only_in_host(at, Part::All);
            let is_up = bytes > 0 || self.is_writing(at);
            if !is_up || !must && !self.may_write_back(at, bytes, false) {
                continue;
            }
            if must {
                self.tables[table as usize].set(at.slot, note::FORCED);
            }
            if on_disk {
                self.writeback.chunk_waiters.entry(at).or_default().push((number, i as u32));
                self.transfers.table[number].pending_writes += 1;
            }
            self.queue_writeback(at);
        }
        if on_disk {
            self.wait_for_ancestors(number);
        }
    }

    /// A chunk of a put has one more cell in memory. Whole chunks that must be written are queued
    /// in batches while the rest is copied.
    pub(super) fn write_whole_chunks(&mut self, number: u32, chunk: u32, at: At) {
        let rows = &self.tables[at.table as usize];
        let row = rows.chunks.chunk(at.slot);
        let cells = row.map_or(0, |row| usize::from(row.cells()[Tier::Host as usize]));
        let level = self.transfers.table[number].spec.level;
        if level == Level::Ram || cells < rows.layout.layers() {
            return;
        }
        if level == Level::Remote {
            return self.upload_put(number, chunk, at);
        }
        let rows = &self.tables[at.table as usize];
        let transfer = &mut self.transfers.table[number];
        transfer.whole.push(at.slot);
        if transfer.whole.len() as u64 * rows.chunk_bytes(at.slot) < self.config.batch_bytes {
            return;
        }
        for slot in std::mem::take(&mut self.transfers.table[number].whole) {
            let at = At { slot, ..at };
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_writeback(at);
        }
    }

    /// Writes all cells that are in memory only, before a store closes. A session's partial chunk
    /// is not written, since it is of no use after that.
    pub fn write_back_all(&mut self) {
        if self.disk.is_none() || self.config.write == Write::Never {
            return;
        }
        for table in 0..self.tables.len() as u32 {
            let rows = &self.tables[table as usize];
            let full = rows.layout.chunk_tokens();
            let is_full =
                |&slot: &u32| rows.chunks.chunk(slot).is_some_and(|row| row.valid_tokens() == full);
            let slots: Vec<u32> = rows.chunks.slots().filter(is_full).collect();
            for slot in slots {
                let at = At { table, slot };
                let bytes = self.only_in_host(at, Part::All);
                if bytes > 0 && self.may_write_back(at, bytes, false) {
                    self.tables[table as usize].set(slot, note::FORCED);
                    self.queue_writeback(at);
                }
            }
        }
        self.settle();
    }

    /// Takes the next chunks to be written, up to a batch.
    pub(super) fn take_writes(&mut self) -> Option<WriteBatch> {
        if self.disk_gc.holds_writes {
            return None;
        }
        let (mut batch, mut bytes) = (WriteBatch::default(), 0);
        while bytes < self.config.batch_bytes && batch.chunks.len() < self.config.batch_cells {
            if self.writeback.queue.is_empty() {
                self.queue_due();
            }
            let Some(at) = self.writeback.queue.pop_front() else { break };
            let rows = &mut self.tables[at.table as usize];
            rows.clear(at.slot, note::QUEUED);
            let is_required =
                rows.has(at.slot, note::FORCED | note::LEAVES) || self.config.write.is_eager();
            let added = if is_required { self.add_records(at, &mut batch) } else { 0 };
            if added == 0 {
                // All of it is on disk, or in another batch.
                self.release_after(at, |core| core.is_down(at));
                continue;
            }
            bytes += added;
        }
        if batch.chunks.is_empty() {
            return None;
        }
        self.note_limits(&mut batch);
        Some(batch)
    }

    /// Adds the unwritten cells of a chunk to a batch, and returns their bytes. The chunk is
    /// referenced until the batch is done.
    fn add_records(&mut self, at: At, batch: &mut WriteBatch) -> u64 {
        let (record, codec, lost) = (self.record_of(at), self.codec_of(at), Quality::default());
        let most_bytes = self.disk.as_ref().map_or(0, |d| usual_record_bytes(d.segment_bytes()));
        let rows = &mut self.tables[at.table as usize];
        let (mut all, mut bytes, mut cells, mut records) = (0, u64::MAX, usize::MAX, 0);
        for layer in 0..rows.layout.layers() {
            let cell = Cell { chunk: at.slot, layer };
            let Some(marks) = rows.chunks.marks(at.slot).map(|marks| marks[layer]) else { break };
            if marks.resident_tiers() & HOST_MASK == 0
                || (marks.resident_tiers() | marks.arriving()) & DISK_MASK != 0
            {
                continue;
            }
            let place = rows.chunks.place(cell, Tier::Host);
            let Ok(Some(Location::Host(piece))) = place else { continue };
            let Ok(address) = self.host.address(Piece(piece)) else { continue };
            if !matches!(rows.chunks.begin_copy(cell, Tier::Host, Tier::Disk), Ok(Begin::Started)) {
                continue;
            }
            let cell_bytes = rows.planes(cell).bytes();
            if cells >= RECORD_CELLS || bytes.saturating_add(cell_bytes) > most_bytes {
                batch.puts.record(record);
                batch.chunks.push(at);
                records += 1;
                (bytes, cells) = (0, 0);
            }
            batch.puts.cell(layer as u32, 0, 0, true);
            batch.codings.push(Coding { codec, shapes: rows.shapes(layer), lost });
            let mut offset = 0;
            for (kind, plane_bytes) in rows.stored_planes(cell) {
                let address = address.wrapping_add(offset as usize).cast_const();
                let (id, version, sum) = (0, 0, None);
                batch.puts.plane(PutPlane { kind, id, version, bytes: plane_bytes, address, sum });
                offset += plane_bytes;
            }
            all += cell_bytes;
            bytes += cell_bytes;
            cells += 1;
        }
        (0..records).for_each(|_| self.note_with(at, batch));
        all
    }

    pub(super) fn done_writes(&mut self, batch: &WriteBatch) {
        let mut written: Vec<Written> = Vec::new();
        let mut codings = batch.codings.iter();
        self.disk_gc.records += batch.puts.len() as u64;
        for (at, (put, cells)) in batch.chunks.iter().zip(batch.puts.iter()) {
            if written.last().is_none_or(|last| last.at != *at) {
                written.push(Written { at: *at, marks: Vec::new(), error: None });
            }
            for (cell, coding) in cells.iter().zip(codings.by_ref()) {
                let coded = StoredForm::new(cell.codec, blocks_of(cell.stored_bytes()));
                let coded = coded.unwrap_or(StoredForm::PLAIN);
                let place = Location::Disk { spot: cell.spot.0, seal: cell.seal, coded };
                if put.result.is_ok() && coded != StoredForm::PLAIN {
                    self.counters.coded_cells += 1;
                    self.counters.coded_raw_bytes += cell.raw_bytes;
                    self.counters.coded_bytes += cell.stored_bytes();
                    self.stats.lossy.join(&coding.lost);
                }
                let which = Cell { chunk: at.slot, layer: cell.layer as usize };
                self.end_writing(*at, which, put.result.is_ok().then_some(place));
            }
            let Some(last) = written.last_mut() else { continue };
            match &put.result {
                Ok(mark) => {
                    let record = cells.first().and_then(|cell| cell.spot.record());
                    last.marks.push(Unsynced { mark: *mark, record });
                }
                Err(error) => last.error = Some(batch.refused.as_ref().unwrap_or(error).clone()),
            }
        }
        self.noted_with(batch);
        for one in written {
            self.end_chunk(one);
        }
        self.balance_disk();
    }

    fn end_writing(&mut self, at: At, cell: Cell, place: Option<Location>) {
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.planes(cell).bytes();
        let arrival = place.map_or(Arrival::Failed, Arrival::Arrived);
        match rows.chunks.end_copy(cell, Tier::Disk, arrival) {
            Ok(Some(source)) => self.free_place(at.table, cell, source),
            Ok(None) => {}
            Err(error) => log::error!("internal: the write of a cell could not be ended: {error}"),
        }
        if place.is_some() {
            self.counters.written_cells += 1;
            self.counters.written_bytes += bytes;
            self.arrived(at.table, cell, Tier::Disk);
        }
        self.wake(at.table, cell);
    }

    /// Ends the write of a chunk's records.
    fn end_chunk(&mut self, one: Written) {
        let at = one.at;
        if !one.marks.is_empty() {
            self.forget_stale_marks(at);
            self.writeback.unsynced.entry(at).or_default().extend(one.marks);
        }
        match one.error {
            None => {
                self.disk_gc.succeeded(at);
                self.release_after(at, |core| core.is_down(at));
            }
            Some(error) if error.status() == Status::Budget => self.disk_gc.park(at, error),
            Some(error) => {
                self.counters.failed_writes += 1;
                match self.disk_gc.may_try_again(at) {
                    true => self.release_after(at, |core| core.queue_chunk(at)),
                    false => self.release_after(at, |core| core.fail_writeback(at, &error)),
                }
            }
        }
    }

    /// Runs `act` for a chunk that was referenced for its write-back, then releases the reference.
    pub(super) fn release_after(&mut self, at: At, act: impl FnOnce(&mut StoreState)) {
        act(self);
        self.release_chunk(at.table, at.slot);
    }

    /// Codec of the cells of a chunk: of its namespace's recipe, or else the store's.
    pub(super) fn codec_of(&self, at: At) -> Codec {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        let namespace = row.and_then(|row| self.namespaces.get(row.namespace() as usize));
        namespace.and_then(|namespace| namespace.codec).unwrap_or(self.config.codec)
    }

    /// Whether a batch with cells of a chunk is in flight.
    fn is_writing(&self, at: At) -> bool {
        let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
        marks.iter().any(|marks| marks.arriving() & DISK_MASK != 0)
    }

    /// All cells that a chunk has in memory are on disk: puts that wait for it continue, and a demoted
    /// chunk leaves memory. If more of it is queued or being written, this is called again after
    /// that.
    pub(super) fn is_down(&mut self, at: At) {
        let is_queued = self.tables[at.table as usize].has(at.slot, note::QUEUED);
        if is_queued || self.is_writing(at) || self.disk_gc.is_parked(at) {
            return;
        }
        let rows = &mut self.tables[at.table as usize];
        rows.clear(at.slot, note::FORCED);
        if let Some(demotion) = self.cancel_demotion(at) {
            let freed = self.drop_copies(at, |layer| demotion.has(layer));
            let is_up = self.is_in_host(at, Part::All);
            self.counters.demoted_chunks += u64::from(freed > 0 && !is_up);
            if is_up {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
        for (number, _) in self.writeback.chunk_waiters.remove(&at).unwrap_or_default() {
            self.transfers.table[number].pending_writes -= 1;
            if self.transfers.table[number].pending_writes == 0 {
                self.end_transfer(number);
            }
        }
    }

    /// A chunk could not be written: it stays in memory. If its memory is needed and nothing
    /// references it, it is dropped.
    pub(super) fn fail_writeback(&mut self, at: At, error: &Error) {
        let rows = &mut self.tables[at.table as usize];
        rows.clear(at.slot, note::FORCED);
        self.disk_gc.given_up += 1;
        if let Some(demotion) = self.cancel_demotion(at) {
            self.counters.disk_full_chunks += 1;
            self.drop_if_unreferenced(at, &demotion);
        }
        for (number, chunk) in self.writeback.chunk_waiters.remove(&at).unwrap_or_default() {
            // A chunk that was only written for a later chunk is not part of the put's result.
            if chunk != NONE {
                self.transfers.table[number].note_failure(chunk, error);
            }
            self.transfers.table[number].pending_writes -= 1;
            if self.transfers.table[number].pending_writes == 0 {
                self.end_transfer(number);
            }
        }
    }

    /// Drops a chunk that cannot be written. The reference held for its write-back does not count.
    fn drop_if_unreferenced(&mut self, at: At, demotion: &Demotion) {
        let rows = &mut self.tables[at.table as usize];
        let was_held = rows.chunks.release(at.slot).is_ok();
        let is_all = !self.config.drop_cells;
        let is_selected = |layer, tiers| tiers == HOST_MASK && (is_all || demotion.has(layer));
        let freed = self.drop_where(at, Tier::Host as usize, is_selected);
        self.eviction.refusals = if freed > 0 { 0 } else { self.eviction.refusals + 1 };
        self.eviction.refused_ns = self.now_ns;
        let rows = &mut self.tables[at.table as usize];
        if was_held && rows.chunks.retain(at.slot).is_err() {
            log::error!("internal: a chunk could not be referenced again");
        }
        let is_up = self.is_in_host(at, Part::All);
        self.counters.dropped_chunks += u64::from(freed > 0 && !is_up);
        if is_up {
            self.enter_cache(at, Tier::Host, Part::All);
        }
    }
}

// ---------- writeback prefix
//
// Writing a chunk also writes its ancestors. Without them it could not be used after a restart, unless
// the namespace allows holes.

impl StoreState {
    /// Queues the write-back of a chunk, after its ancestors that are in memory only. The ancestors
    /// stay in memory.
    pub(super) fn queue_writeback(&mut self, at: At) {
        let rows = &self.tables[at.table as usize];
        if rows.has(at.slot, note::QUEUED) {
            return;
        }
        // With write=never all writes were requested, except those that make room.
        if self.config.write != Write::Never || rows.has(at.slot, note::FORCED) {
            self.queue_ancestors(at);
        }
        self.queue_chunk(at);
    }

    fn queue_ancestors(&mut self, at: At) {
        for slot in self.unwritten_ancestors(at).into_iter().rev() {
            // Admission does not apply to a chunk that another one needs.
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_chunk(At { slot, ..at });
        }
    }

    /// Queues one chunk. Its ancestors are queued when it is taken from the queue.
    pub(super) fn queue_chunk(&mut self, at: At) {
        let rows = &mut self.tables[at.table as usize];
        if !rows.has(at.slot, note::QUEUED) {
            rows.set(at.slot, note::QUEUED);
            // Queued chunks are referenced until their turn.
            if rows.chunks.retain(at.slot).is_ok() {
                self.writeback.queue.push_back(at);
            } else {
                rows.clear(at.slot, note::QUEUED);
            }
        }
    }

    /// Whether a chunk needs its ancestors after a restart. A session's partial chunk is of no use
    /// then.
    fn needs_ancestors(&self, at: At) -> bool {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        row.is_some_and(|row| {
            let namespace = self.namespaces.get(row.namespace() as usize);
            row.owner().is_none() && namespace.is_some_and(|namespace| !namespace.holes)
        })
    }

    /// Ancestors of a chunk with unwritten cells that are not queued, the nearest first. The flag
    /// BELOW ends the search next time, so each ancestor is found once, and cells that it gets
    /// later are written as well.
    fn unwritten_ancestors(&mut self, at: At) -> Vec<Slot> {
        let mut found = Vec::new();
        if !self.needs_ancestors(at) {
            return found;
        }
        let mut next = self.tables[at.table as usize].chunks.parent(at.slot);
        while let Some(slot) = next {
            let rows = &self.tables[at.table as usize];
            let (one, is_known) = (At { slot, ..at }, rows.has(slot, note::BELOW));
            let is_up = !rows.has(slot, note::QUEUED) && self.is_unwritten(one);
            if is_known && !is_up {
                break;
            }
            if is_up {
                found.push(slot);
            }
            let rows = &mut self.tables[at.table as usize];
            rows.set(slot, note::BELOW);
            next = rows.chunks.parent(slot);
        }
        found
    }

    /// Whether a chunk has a cell that is in memory only and in no batch.
    fn is_unwritten(&self, at: At) -> bool {
        let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
        marks.iter().any(|marks| {
            marks.resident_tiers() & !DEVICE_MASK == HOST_MASK && marks.arriving() & DISK_MASK == 0
        })
    }

    fn is_in_memory_only(&self, at: At) -> bool {
        self.only_in_host(at, Part::All) > 0
    }

    /// Whether a later chunk of the path is on disk or will be, so that each cell of this one must
    /// be written.
    pub(super) fn is_needed_on_disk(&self, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let is_rejoined = rows.chunks.chunk(at.slot).is_some_and(|row| row.is_rejoined());
        let is_required = rows.has(at.slot, note::BELOW)
            // A chunk recovered from disk: nothing was requested since the store was opened.
            || is_rejoined && self.config.write != Write::Never;
        is_required && self.needs_ancestors(at)
    }

    /// A chunk was recovered from disk: its parent is needed on disk.
    pub(super) fn note_needed_on_disk(&mut self, at: At) {
        if let Some(parent) = self.tables[at.table as usize].chunks.parent(at.slot) {
            self.tables[at.table as usize].set(parent, note::BELOW);
        }
    }

    /// Makes a put that must be on disk wait for the ancestors of its chunks, too.
    pub(super) fn wait_for_ancestors(&mut self, number: u32) {
        let one = &self.transfers.table[number].spec;
        let Some(&first) = one.slots.first() else { return };
        let at = At { table: one.table, slot: first };
        if !self.needs_ancestors(at) {
            return;
        }
        // The chunk itself may be on disk already.
        self.queue_ancestors(at);
        let mut next = self.tables[at.table as usize].chunks.parent(first);
        while let Some(slot) = next {
            let one = At { slot, ..at };
            if !self.is_in_memory_only(one) {
                break;
            }
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_chunk(one);
            self.writeback.chunk_waiters.entry(one).or_default().push((number, NONE));
            let waiting = &mut self.transfers.table[number];
            waiting.pending_writes += 1;
            waiting.ahead.push(slot);
            next = self.tables[at.table as usize].chunks.parent(slot);
        }
    }

    /// Checks that the ancestors of chunks on disk are on disk, unless they are resident nowhere or
    /// could not be written. For tests and simulations without evictions from disk.
    pub fn check_prefixes(&self) -> Result<()> {
        if self.disk_gc.given_up > 0 {
            return Ok(());
        }
        for (number, rows) in self.tables.iter().enumerate() {
            for slot in rows.chunks.slots() {
                let at = At { table: number as u32, slot };
                let row = rows.chunks.chunk(slot);
                let is_below = row.is_some_and(|row| row.cells()[Tier::Disk as usize] > 0);
                let Some(parent) = rows.chunks.parent(slot).filter(|_| is_below) else { continue };
                if self.needs_ancestors(at) && self.is_in_memory_only(At { slot: parent, ..at }) {
                    fail!(State, "chunk {slot} is on disk, its parent {parent} is not");
                }
            }
        }
        Ok(())
    }
}

// ---------- demote
//
// Demotions that the engine requests.

/// Outcome of a demotion, in chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demoted {
    /// They were on disk already: their memory is free.
    pub freed: u64,
    /// Their memory will be freed once they are written.
    pub pending: u64,
    /// They stay in memory: there is no disk.
    pub staying: u64,
}

impl StoreState {
    /// Demotes the chunks of a range of a session's tokens. Sessions that reference them, and pins,
    /// find them on disk. A chunk that cannot be written stays in memory.
    pub fn demote_range(&mut self, at: u32, first: u64, tokens: u64) -> Result<Demoted> {
        let mut demoted = Demoted::default();
        // From the end, so that policies see a chunk's child before the chunk.
        for at in self.known_chunks(at, first, tokens)?.into_iter().rev() {
            self.demote_chunk(at, &mut demoted);
        }
        self.settle();
        Ok(demoted)
    }

    /// Demotes one chunk. The policy keeps it until its cells have left memory.
    fn demote_chunk(&mut self, at: At, demoted: &mut Demoted) {
        if !self.is_in_host(at, Part::All) {
            self.drop_where(at, Tier::Device as usize, |_, _| true);
            return;
        }
        // Its session references it, so admission does not apply.
        let remaining_bytes = self.only_in_host(at, Part::All);
        if remaining_bytes > 0 && !self.may_write_back(at, remaining_bytes, true) {
            demoted.staying += 1;
            return;
        }
        self.drop_where(at, Tier::Device as usize, |_, _| true);
        let freed = self.drop_copies(at, |_| true);
        if remaining_bytes == 0 {
            demoted.freed += 1;
            self.counters.demoted_chunks += u64::from(freed > 0 && !self.is_in_host(at, Part::All));
            return;
        }
        demoted.pending += 1;
        let demotion = self.writeback.demoting.entry(at).or_default();
        if !demotion.is_whole() {
            demotion.add(Part::All, remaining_bytes);
            self.writeback.demoting_bytes += remaining_bytes;
        }
        self.tables[at.table as usize].set(at.slot, note::LEAVES);
        self.queue_writeback(at);
    }
}

// ---------- write behind
//
// Write-behind: chunks of puts are written to disk within a bounded time, so that a killed process
// loses little.
//
// A chunk is written after a quarter of the configured age while the disk has no reads in flight, and
// after half of it in any case; the other half is the disk's time. When more bytes are queued than
// configured, the oldest are written at once. Chunks that are truncated, cleared or evicted before
// that are never written.

/// Without a limit of its own, write-behind may hold this part of host memory: 1 / 8.
const HOST_SHARE: u64 = 8;
/// Least length at which the queue is swept of evicted chunks.
const LEAST_SWEEP: usize = 1024;

/// A chunk that waits for its age.
struct Unwritten {
    at: At,
    generation: u32,
    since_ns: u64,
    bytes: u64,
}

/// Chunks that write-behind will write, the oldest first.
#[derive(Default)]
pub(super) struct WriteBehind {
    queue: VecDeque<Unwritten>,
    bytes: u64,
    sweep_at: usize,
}

impl WriteBehind {
    fn pop(&mut self) -> Option<Unwritten> {
        let first = self.queue.pop_front()?;
        self.bytes -= first.bytes;
        Some(first)
    }
}

impl StoreState {
    /// A chunk of a put is in memory: it will be written at its age, if it can be found after a
    /// restart.
    pub(super) fn write_later(&mut self, at: At) {
        if !self.is_full(at) {
            return;
        }
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.chunk_bytes(at.slot);
        let Some(row) = rows.chunks.chunk(at.slot) else { return };
        if row.owner().is_some() || rows.has(at.slot, note::UNWRITTEN) {
            return;
        }
        let (generation, since_ns) = (row.generation(), self.now_ns);
        rows.set(at.slot, note::UNWRITTEN);
        self.sweep_unwritten();
        self.writeback.write_behind.queue.push_back(Unwritten { at, generation, since_ns, bytes });
        self.writeback.write_behind.bytes += bytes;
    }

    /// Queues the oldest chunk that is due. Returns false if none is.
    pub(super) fn queue_due(&mut self) -> bool {
        while self.has_due() {
            let Some(one) = self.writeback.write_behind.pop() else { break };
            if !self.is_still_unwritten(&one) {
                continue;
            }
            self.tables[one.at.table as usize].clear(one.at.slot, note::UNWRITTEN);
            let bytes = self.only_in_host(one.at, Part::All);
            if bytes > 0 && self.may_write_back(one.at, bytes, false) {
                self.queue_writeback(one.at);
                return true;
            }
        }
        false
    }

    /// Whether the oldest chunk is due.
    pub(super) fn has_due(&self) -> bool {
        let limit = match self.config.unwritten_bytes {
            0 => self.config.host_bytes / HOST_SHARE,
            bytes => bytes,
        };
        self.writeback.write_behind.bytes > limit
            || self.due_ns().is_some_and(|due| due <= self.now_ns)
    }

    /// When a write worker must look again although nothing has happened.
    pub fn due_ns(&self) -> Option<u64> {
        let first = self.writeback.write_behind.queue.front()?;
        let is_reading = self.stages.in_flight[WorkerKind::Read as usize] > 0
            || (0..LANES).any(|lane| self.stages.read.queue.waiting(lane).0 > 0);
        let wait_ns = self.config.write_age_ns / if is_reading { 2 } else { 4 };
        Some(first.since_ns.saturating_add(wait_ns))
    }

    /// Bytes that write-behind has not begun to write, and the age of the oldest.
    pub fn unwritten(&self) -> (u64, u64) {
        let first = self.writeback.write_behind.queue.front();
        let age_ns = first.map_or(0, |one| self.now_ns.saturating_sub(one.since_ns));
        (self.writeback.write_behind.bytes, age_ns)
    }

    /// Whether the chunk of an entry is still in its row, and unwritten.
    fn is_still_unwritten(&self, one: &Unwritten) -> bool {
        self.tables.get(one.at.table as usize).is_some_and(|rows| {
            rows.has(one.at.slot, note::UNWRITTEN)
                && rows.chunks.chunk_of(one.at.slot, one.generation).is_some()
        })
    }

    /// Removes entries of evicted chunks once they may be half of the queue.
    fn sweep_unwritten(&mut self) {
        let length = self.writeback.write_behind.queue.len();
        if length < self.writeback.write_behind.sweep_at.max(LEAST_SWEEP) {
            return;
        }
        let mut queue = std::mem::take(&mut self.writeback.write_behind.queue);
        queue.retain(|one| self.is_still_unwritten(one));
        self.writeback.write_behind.bytes = queue.iter().map(|one| one.bytes).sum();
        self.writeback.write_behind.sweep_at = 2 * queue.len();
        self.writeback.write_behind.queue = queue;
    }
}

impl Write {
    /// Whether puts are written to disk although their memory is not needed.
    pub(super) fn is_eager(self) -> bool {
        matches!(self, Write::Through | Write::Behind)
    }
}

// ---------- group commit
//
// Group commit: one sync makes all earlier writes of a segment durable, and completes all puts that
// wait for them.

/// Unsynced writes at which a sync is made without a waiter.
pub(super) const MOST_UNSYNCED: usize = 1 << 16;
/// No transfer.
const NO_TRANSFER: u32 = u32::MAX;

/// A written record that may not be durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unsynced {
    pub mark: Mark,
    /// Block of the segment at which the record starts.
    pub record: Option<u32>,
}

/// For each transfer, which of its marks are durable now (true) and which never will be (false).
type Synced = BTreeMap<(u32, Mark), bool>;

impl StoreState {
    /// Whether a transfer that is otherwise over must wait for a sync.
    pub(super) fn must_wait_for_sync(&mut self, number: u32) -> bool {
        let transfer = &self.transfers.table[number];
        if transfer.spec.level != Level::Durable {
            return false;
        }
        if let Some(status) = transfer.stopped() {
            // Without a sync that it can wait for, the put promises nothing.
            self.note_failure(number, &status.into());
            return false;
        }
        self.writeback.sync_waiters.push(number);
        true
    }

    /// Takes the next sync: of the segments that waiting puts need.
    pub(super) fn take_syncs(&mut self) -> Option<SyncBatch> {
        if self.writeback.sync_waiters.is_empty()
            && self.writeback.unsynced.len() < self.writeback.sync_at
            || self.disk.is_none()
        {
            return None;
        }
        let mut batch = SyncBatch {
            transfers: std::mem::take(&mut self.writeback.sync_waiters),
            ..SyncBatch::default()
        };
        for &number in &batch.transfers {
            for at in self.transfers.chunks_to_sync(number) {
                self.forget_stale_marks(at);
                let marks = self.writeback.unsynced.get(&at).into_iter().flatten();
                batch.marks.extend(marks.map(|write| (number, write.mark, Ok(()))));
            }
            let found = self.recovered_marks(number).into_iter().chain(self.mark_of_note(number));
            batch.marks.extend(found.map(|mark| (number, mark, Ok(()))));
        }
        if self.writeback.unsynced.len() >= self.writeback.sync_at {
            self.writeback.sync_at = usize::MAX; // until this one is done
            let unowned = |write: &Unsynced| (NO_TRANSFER, write.mark, Ok(()));
            batch.marks.extend(self.writeback.unsynced.values().flatten().map(unowned));
        }
        if self.disk_gc.takes_recovered() {
            batch.everything = Some(Ok(()));
        }
        Some(batch)
    }

    /// Marks of recovered records that a put relies on, until all recovered records are known to be
    /// durable.
    fn recovered_marks(&self, number: u32) -> BTreeSet<Mark> {
        let spec = &self.transfers.table[number].spec;
        let rows = &self.tables[spec.table as usize];
        let layers = spec.first_layer..spec.first_layer + spec.layers;
        let cells = spec
            .slots
            .iter()
            .flat_map(|&chunk| layers.clone().map(move |layer| Cell { chunk, layer }));
        let segments = cells.filter_map(|cell| match rows.chunks.place(cell, Tier::Disk) {
            Ok(Some(Location::Disk { spot, .. })) => Some(Spot(spot).segment()),
            _ => None,
        });
        match self.disk_gc.found_until {
            0 => BTreeSet::new(),
            until => segments.filter(|&s| s <= until).map(Mark::found).collect(),
        }
    }

    pub(super) fn done_syncs(&mut self, batch: &SyncBatch) {
        match &batch.everything {
            Some(Err(error)) => {
                log::warn!("recovered records could not all be synced: {error}");
            }
            Some(Ok(())) => self.disk_gc.found_until = 0,
            None => {}
        }
        let failed =
            batch.marks.iter().filter_map(|(n, _, result)| Some((*n, result.as_ref().err()?)));
        let failed: BTreeMap<u32, &Error> = failed.collect();
        for (&number, error) in failed.iter().filter(|(n, _)| **n != NO_TRANSFER) {
            self.note_failure(number, error);
        }
        if self.writeback.sync_at == usize::MAX {
            self.writeback.sync_at = MOST_UNSYNCED.max(2 * self.writeback.unsynced.len());
        }
        let unowned = batch.marks.iter().filter(|(number, ..)| *number == NO_TRANSFER);
        let lasting: BTreeSet<Mark> =
            unowned.filter(|(.., result)| result.is_ok()).map(|&(_, mark, _)| mark).collect();
        if !lasting.is_empty() {
            self.writeback.unsynced.retain(|_, marks| {
                marks.retain(|write| !lasting.contains(&write.mark));
                !marks.is_empty()
            });
        }
        let synced = batch.marks.iter().map(|(n, mark, result)| ((*n, *mark), result.is_ok()));
        let synced: Synced = synced.collect();
        for &number in &batch.transfers {
            self.forget_marks(number, &synced);
            self.note_synced(number, batch);
            self.conclude(number);
        }
    }

    /// Forgets marks that are durable. A mark that can never become durable stays, so that no put
    /// that relies on it succeeds. Cells that are still in memory move out of that record and are
    /// written again.
    fn forget_marks(&mut self, number: u32, synced: &Synced) {
        for at in self.transfers.chunks_to_sync(number) {
            let Some(mut marks) = self.writeback.unsynced.remove(&at) else { continue };
            let is_durable = |write: &Unsynced| synced.get(&(number, write.mark)).copied();
            for write in marks.iter().filter(|write| is_durable(write) == Some(false)) {
                self.move_out_of_record(at, write);
            }
            marks.retain(|write| is_durable(write) != Some(true));
            if !marks.is_empty() {
                self.writeback.unsynced.insert(at, marks);
            }
        }
    }

    /// Forgets marks of records that no longer hold a cell of a chunk. Compaction syncs the cells
    /// that it moves. While a part of the chunk is in memory only, the mark may be that of its
    /// record, and stays.
    pub(super) fn forget_stale_marks(&mut self, at: At) {
        if !self.writeback.unsynced.contains_key(&at) || self.only_in_host(at, Part::All) > 0 {
            return;
        }
        let mut marks = self.writeback.unsynced.remove(&at).unwrap_or_default();
        marks.retain(|write| {
            let layers = self.tables[at.table as usize].layout.layers();
            (0..layers).any(|layer| self.is_in_record(at, layer, write))
        });
        if !marks.is_empty() {
            self.writeback.unsynced.insert(at, marks);
        }
    }

    /// Whether a layer of a chunk is on disk in a given record.
    fn is_in_record(&self, at: At, layer: usize, write: &Unsynced) -> bool {
        let cell = Cell { chunk: at.slot, layer };
        match self.tables[at.table as usize].chunks.place(cell, Tier::Disk) {
            Ok(Some(Location::Disk { spot, .. })) => {
                let spot = Spot(spot);
                (spot.segment(), spot.record()) == (write.mark.segment(), write.record)
            }
            _ => false,
        }
    }

    /// Marks cells for another write that are in memory and in a record that cannot be synced:
    /// chunks that continue them need them. Cells on disk only stay, also in the same segment,
    /// since they may have been durable before.
    fn move_out_of_record(&mut self, at: At, write: &Unsynced) {
        for layer in 0..self.tables[at.table as usize].layout.layers() {
            let cell = Cell { chunk: at.slot, layer };
            let is_its = self.is_in_record(at, layer, write);
            let chunks = &mut self.tables[at.table as usize].chunks;
            if !is_its || !matches!(chunks.place(cell, Tier::Host), Ok(Some(_))) {
                continue;
            }
            if let Ok(Dropped::Freed(place)) = chunks.begin_drop(cell, Tier::Disk) {
                self.free_place(at.table, cell, place);
                self.note_removed(at.table, cell, Tier::Disk);
                self.tables[at.table as usize].set(at.slot, note::FORCED);
                self.queue_chunk(at);
            }
        }
    }
}
