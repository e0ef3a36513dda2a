//! The way down: from memory to disk.

use crate::base::budget::Tier;
use crate::base::status::{Error, Status};
use crate::format::codec::Codec;
use crate::format::codec::int8::Quality;
use crate::format::record::blocks_of;
use crate::meta::chunks::{Arrival, Begin, Cell, Coded, Place};
use crate::meta::index::NONE;
use crate::store::state::chunk_table::note;
use crate::store::state::granularity::{Leave, Part};
use crate::store::state::group_commit::Fresh;
use crate::store::state::transfer::Level;
use crate::store::state::work::{Coding, WriteBatch};
use crate::store::state::{At, StoreState, Write};
use crate::tier::disk::{PutPlane, usual_record_bytes};
use crate::tier::host::Piece;

const HOST: u8 = 1 << Tier::Host as u8;
const DISK: u8 = 1 << Tier::Disk as u8;
/// Cells of a record.
pub const RECORD_CELLS: usize = 512;

/// What a batch did for one chunk.
struct Written {
    at: At,
    marks: Vec<Fresh>,
    error: Option<Error>,
}

impl StoreState {
    /// A put is in memory: sends down what has to be on disk.
    pub(super) fn write_down(&mut self, number: u32) {
        let one = &self.moves[number].spec;
        let (table, level) = (one.table, one.level);
        if self.disk.is_none() {
            return;
        }
        let on_disk = level.is_on_disk();
        let one = &self.moves[number];
        let layers = self.tables[table as usize].layout.layers();
        let all_read = on_disk && one.spec.layers == layers && one.is_sound();
        for i in 0..self.moves[number].spec.slots.len() {
            let at = At { table, slot: self.moves[number].spec.slots[i] };
            if all_read {
                self.tables[table as usize].clear(at.slot, note::UNREAD);
            }
            let must = on_disk || self.is_wanted_below(at);
            if !must && self.config.write == Write::Behind {
                self.write_later(at);
            }
            if !must && self.config.write != Write::Through {
                continue;
            }
            let bytes = self.only_in_host(at, Part::All);
            let is_up = bytes > 0 || self.is_writing(at);
            if !is_up || !must && !self.may_go_down(at, bytes, false) {
                continue;
            }
            if must {
                self.tables[table as usize].set(at.slot, note::FORCED);
            }
            if on_disk {
                self.chunk_waits.entry(at).or_default().push((number, i as u32));
                self.moves[number].waits += 1;
            }
            self.queue_down(at);
        }
        if on_disk {
            self.wait_for_those_before(number);
        }
    }

    /// A chunk of a put has more in memory. Batches of whole ones that have to be on disk
    /// go there while the rest is copied.
    pub(super) fn write_ahead(&mut self, number: u32, chunk: u32, at: At) {
        let rows = &self.tables[at.table as usize];
        let row = rows.chunks.chunk(at.slot);
        let cells = row.map_or(0, |row| usize::from(row.cells()[Tier::Host as usize]));
        let level = self.moves[number].spec.level;
        if level == Level::Ram || cells < rows.layout.layers() {
            return;
        }
        if level == Level::Remote {
            return self.send_put(number, chunk, at);
        }
        let rows = &self.tables[at.table as usize];
        let one = &mut self.moves[number];
        one.whole.push(at.slot);
        if one.whole.len() as u64 * rows.chunk_bytes(at.slot) < self.config.batch_bytes {
            return;
        }
        for slot in std::mem::take(&mut self.moves[number].whole) {
            let at = At { slot, ..at };
            self.tables[at.table as usize].set(slot, note::FORCED);
            self.queue_down(at);
        }
    }

    /// Sends down all that is in memory only and may go: before a store is closed. A
    /// session's partial chunk is of use to nobody after that.
    pub fn write_all_down(&mut self) {
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
                if bytes > 0 && self.may_go_down(at, bytes, false) {
                    self.tables[table as usize].set(slot, note::FORCED);
                    self.queue_down(at);
                }
            }
        }
        self.settle();
    }

    /// The next chunks to be written, up to a batch.
    pub(super) fn take_writes(&mut self) -> Option<WriteBatch> {
        if self.upkeep.holds_writes {
            return None;
        }
        let (mut batch, mut bytes) = (WriteBatch::default(), 0);
        while bytes < self.config.batch_bytes && batch.chunks.len() < self.config.batch_cells {
            if self.writebacks.is_empty() {
                self.queue_due();
            }
            let Some(at) = self.writebacks.pop_front() else { break };
            let rows = &mut self.tables[at.table as usize];
            rows.clear(at.slot, note::QUEUED);
            let wanted =
                rows.has(at.slot, note::FORCED | note::LEAVES) || self.config.write.is_eager();
            let added = if wanted { self.add_records(at, &mut batch) } else { 0 };
            if added == 0 {
                // All of it is on disk, or on its way there with another batch.
                self.let_go_after(at, |core| core.is_down(at));
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

    /// Adds what a chunk has in memory only to a batch; how much that is. The chunk
    /// is held until the batch is done.
    fn add_records(&mut self, at: At, batch: &mut WriteBatch) -> u64 {
        let (record, codec, lost) = (self.record_of(at), self.codec_of(at), Quality::default());
        let most_bytes = self.disk.as_ref().map_or(0, |d| usual_record_bytes(d.segment_bytes()));
        let rows = &mut self.tables[at.table as usize];
        let (mut all, mut bytes, mut cells, mut records) = (0, u64::MAX, usize::MAX, 0);
        for layer in 0..rows.layout.layers() {
            let cell = Cell { chunk: at.slot, layer };
            let Some(marks) = rows.chunks.marks(at.slot).map(|marks| marks[layer]) else { break };
            if marks.there() & HOST == 0 || (marks.there() | marks.arriving()) & DISK != 0 {
                continue;
            }
            let place = rows.chunks.place(cell, Tier::Host);
            let Ok(Some(Place::Host(piece))) = place else { continue };
            let Ok(address) = self.host.address(Piece(piece)) else { continue };
            if !matches!(rows.chunks.begin_copy(cell, Tier::Host, Tier::Disk), Ok(Begin::Begun)) {
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
        self.upkeep.records += batch.puts.len() as u64;
        for (at, (put, cells)) in batch.chunks.iter().zip(batch.puts.iter()) {
            if written.last().is_none_or(|last| last.at != *at) {
                written.push(Written { at: *at, marks: Vec::new(), error: None });
            }
            for (cell, coding) in cells.iter().zip(codings.by_ref()) {
                let coded = Coded::new(cell.codec, blocks_of(cell.stored_bytes()));
                let coded = coded.unwrap_or(Coded::PLAIN);
                let place = Place::Disk { spot: cell.spot.0, seal: cell.seal, coded };
                if put.result.is_ok() && coded != Coded::PLAIN {
                    self.counters.coded += 1;
                    self.counters.coded_raw_bytes += cell.raw_bytes;
                    self.counters.coded_bytes += cell.stored_bytes();
                    self.counters.lost.join(&coding.lost);
                }
                let which = Cell { chunk: at.slot, layer: cell.layer as usize };
                self.end_writing(*at, which, put.result.is_ok().then_some(place));
            }
            let Some(last) = written.last_mut() else { continue };
            match &put.result {
                Ok(mark) => {
                    let record = cells.first().and_then(|cell| cell.spot.record());
                    last.marks.push(Fresh { mark: *mark, record });
                }
                Err(error) => last.error = Some(batch.refused.as_ref().unwrap_or(error).clone()),
            }
        }
        self.noted_with(batch);
        for one in written {
            self.end_chunk(one);
        }
        self.look_at_disk();
    }

    fn end_writing(&mut self, at: At, cell: Cell, place: Option<Place>) {
        let rows = &mut self.tables[at.table as usize];
        let bytes = rows.planes(cell).bytes();
        let arrival = place.map_or(Arrival::Failed, Arrival::Here);
        match rows.chunks.end_copy(cell, Tier::Disk, arrival) {
            Ok(Some(source)) => self.free_place(at.table, cell, source),
            Ok(None) => {}
            Err(error) => log::error!("a way down could not be ended: {error}"),
        }
        if place.is_some() {
            self.counters.written += 1;
            self.counters.written_bytes += bytes;
            self.arrived(at.table, cell, Tier::Disk);
        }
        self.wake(at.table, cell);
    }

    /// The records of a chunk are written, or not.
    fn end_chunk(&mut self, one: Written) {
        let at = one.at;
        if !one.marks.is_empty() {
            self.forget_stale(at);
            self.fresh.entry(at).or_default().extend(one.marks);
        }
        match one.error {
            None => {
                self.upkeep.succeeded(at);
                self.let_go_after(at, |core| core.is_down(at));
            }
            Some(error) if error.status() == Status::Budget => self.park(at, error),
            Some(error) => {
                self.counters.failed_writes += 1;
                match self.upkeep.may_try_again(at) {
                    true => self.let_go_after(at, |core| core.queue_one(at)),
                    false => self.let_go_after(at, |core| core.stays_up(at, &error)),
                }
            }
        }
    }

    /// Does something with a chunk that was held for its way down, then lets it go.
    pub(super) fn let_go_after(&mut self, at: At, act: impl FnOnce(&mut StoreState)) {
        act(self);
        self.let_go(at.table, at.slot);
    }

    /// What cells of a chunk are to be coded with: as the recipe of its namespace says,
    /// or the store.
    pub(super) fn codec_of(&self, at: At) -> Codec {
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        let space = row.and_then(|row| self.spaces.get(row.namespace() as usize));
        space.and_then(|space| space.codec).unwrap_or(self.config.codec)
    }

    /// Whether a batch that has cells of a chunk is under way.
    fn is_writing(&self, at: At) -> bool {
        let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
        marks.iter().any(|marks| marks.arriving() & DISK != 0)
    }

    /// All that a chunk has in memory is on disk: who waited for that goes on, and if
    /// it was to leave it does. Where more of it is queued or being written, whoever
    /// ends that says so again.
    pub(super) fn is_down(&mut self, at: At) {
        let is_queued = self.tables[at.table as usize].has(at.slot, note::QUEUED);
        if is_queued || self.is_writing(at) || self.upkeep.is_parked(at) {
            return;
        }
        let rows = &mut self.tables[at.table as usize];
        rows.clear(at.slot, note::FORCED);
        if let Some(leave) = self.stop_leaving(at) {
            let freed = self.drop_copies(at, |layer| leave.has(layer));
            let is_up = self.is_in_host(at, Part::All);
            self.counters.demoted += u64::from(freed > 0 && !is_up);
            if is_up {
                self.enter_cache(at, Tier::Host, Part::All);
            }
        }
        for (number, _) in self.chunk_waits.remove(&at).unwrap_or_default() {
            self.moves[number].waits -= 1;
            if self.moves[number].waits == 0 {
                self.end_move(number);
            }
        }
    }

    /// A chunk could not be written: it stays in memory, or is gone if its memory is
    /// needed and nobody holds it.
    pub(super) fn stays_up(&mut self, at: At, error: &Error) {
        let rows = &mut self.tables[at.table as usize];
        rows.clear(at.slot, note::FORCED);
        self.upkeep.given_up += 1;
        if let Some(leave) = self.stop_leaving(at) {
            self.counters.refused += 1;
            self.gone_if_free(at, &leave);
        }
        for (number, chunk) in self.chunk_waits.remove(&at).unwrap_or_default() {
            // What was only taken along is none of its promise.
            if chunk != NONE {
                self.moves[number].blame(chunk, error);
            }
            self.moves[number].waits -= 1;
            if self.moves[number].waits == 0 {
                self.end_move(number);
            }
        }
    }

    /// Drops what cannot go down. The hold that kept it for its way down is not one
    /// of a user's.
    fn gone_if_free(&mut self, at: At, leave: &Leave) {
        let rows = &mut self.tables[at.table as usize];
        let was_held = rows.chunks.release(at.slot).is_ok();
        let is_all = !self.config.drop_cells;
        let goes = |layer, there| there == HOST && (is_all || leave.has(layer));
        let freed = self.drop_where(at, Tier::Host as usize, goes);
        self.refusals = if freed > 0 { 0 } else { self.refusals + 1 };
        self.refused_ns = self.now_ns;
        let rows = &mut self.tables[at.table as usize];
        if was_held && rows.chunks.retain(at.slot).is_err() {
            log::error!("a chunk could not be held again");
        }
        let is_up = self.is_in_host(at, Part::All);
        self.counters.dropped += u64::from(freed > 0 && !is_up);
        if is_up {
            self.enter_cache(at, Tier::Host, Part::All);
        }
    }
}
