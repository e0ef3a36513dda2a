//! The way down: from memory to disk.

use std::collections::BTreeSet;

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::format::codec::Codec;
use crate::format::codec::int8::Quality;
use crate::format::record::blocks_of;
use crate::kv::core::board::note;
use crate::kv::core::moves::Level;
use crate::kv::core::work::{Coding, SyncBatch, WriteBatch};
use crate::kv::core::{At, Core, Write};
use crate::kv::events::Kind;
use crate::meta::chunks::{Arrival, Begin, Cell, Coded, Gone, Place};
use crate::tier::disk::{Mark, PutPlane, Spot};
use crate::tier::host::Piece;

const HOST: u8 = 1 << Tier::Host as u8;
const DISK: u8 = 1 << Tier::Disk as u8;
/// Bytes of a record, unless one cell is longer.
const RECORD_BYTES: u64 = 8 << 20;
/// Cells of a record.
const RECORD_CELLS: usize = 512;
/// Writes that nobody waits for are synced when there are so many.
pub(super) const MOST_FRESH: usize = 1 << 16;
/// No move.
const NOBODY: u32 = u32::MAX;

/// What a batch did for one chunk.
struct Written {
    at: At,
    marks: Vec<Mark>,
    error: Option<Error>,
}

impl Core {
    /// A put is in memory: sends down what has to be on disk.
    pub(super) fn write_down(&mut self, number: u32) {
        let one = &self.moves[number].spec;
        let (board, level) = (one.board, one.level);
        if level == Level::Ram && self.config.write != Write::Through || self.disk.is_none() {
            return;
        }
        let one = &self.moves[number];
        let layers = self.boards[board as usize].layout.layers();
        let all_read = level > Level::Ram && one.spec.layers == layers && one.is_sound();
        for i in 0..self.moves[number].spec.slots.len() {
            let at = At { board, slot: self.moves[number].spec.slots[i] };
            if all_read {
                self.boards[board as usize].clear(at.slot, note::UNREAD);
            }
            if self.only_in_host(at) == 0 && !self.is_writing(at) {
                continue;
            }
            let bytes = self.only_in_host(at);
            if level == Level::Ram && !self.may_go_down(at, bytes, false) {
                continue;
            }
            if level > Level::Ram {
                self.boards[board as usize].set(at.slot, note::FORCED);
                self.chunk_waits.entry(at).or_default().push(number);
                self.moves[number].waits += 1;
            }
            self.queue_down(at);
        }
    }

    /// A chunk of a put has more in memory. Batches of whole ones that have to be on disk
    /// go there while the rest is copied.
    pub(super) fn write_ahead(&mut self, number: u32, at: At) {
        let one = &mut self.moves[number];
        let rows = &self.boards[at.board as usize];
        let row = rows.chunks.chunk(at.slot);
        let cells = row.map_or(0, |row| usize::from(row.cells()[Tier::Host as usize]));
        if one.spec.level == Level::Ram || cells < rows.layout.layers() {
            return;
        }
        one.whole.push(at.slot);
        if one.whole.len() as u64 * rows.chunk_bytes(at.slot) < self.config.batch_bytes {
            return;
        }
        for slot in std::mem::take(&mut self.moves[number].whole) {
            let at = At { slot, ..at };
            self.boards[at.board as usize].set(slot, note::FORCED);
            self.queue_down(at);
        }
    }

    /// Sends down all that is in memory only and may go: before a store is closed. A
    /// session's partial chunk is of use to nobody after that.
    pub fn write_all_down(&mut self) {
        if self.disk.is_none() || self.config.write == Write::Never {
            return;
        }
        for board in 0..self.boards.len() as u32 {
            let rows = &self.boards[board as usize];
            let full = rows.layout.chunk_tokens();
            let is_full =
                |&slot: &u32| rows.chunks.chunk(slot).is_some_and(|row| row.valid_tokens() == full);
            let slots: Vec<u32> = rows.chunks.slots().filter(is_full).collect();
            for slot in slots {
                let at = At { board, slot };
                let bytes = self.only_in_host(at);
                if bytes > 0 && self.may_go_down(at, bytes, false) {
                    self.boards[board as usize].set(slot, note::FORCED);
                    self.queue_down(at);
                }
            }
        }
        self.settle();
    }

    /// Queues a chunk to be written down.
    pub(super) fn queue_down(&mut self, at: At) {
        let rows = &mut self.boards[at.board as usize];
        if !rows.has(at.slot, note::QUEUED) {
            rows.set(at.slot, note::QUEUED);
            // Queued chunks stay where they are until their turn.
            if rows.chunks.retain(at.slot).is_ok() {
                self.downs.push_back(at);
            } else {
                rows.clear(at.slot, note::QUEUED);
            }
        }
    }

    /// The next chunks to be written, up to a batch.
    pub(super) fn take_writes(&mut self) -> Option<WriteBatch> {
        if self.upkeep.holds_writes {
            return None;
        }
        let (mut batch, mut bytes) = (WriteBatch::default(), 0);
        while bytes < self.config.batch_bytes && batch.chunks.len() < self.config.batch_cells {
            let Some(at) = self.downs.pop_front() else { break };
            let rows = &mut self.boards[at.board as usize];
            rows.clear(at.slot, note::QUEUED);
            let wanted = rows.has(at.slot, note::FORCED | note::LEAVES)
                || self.config.write == Write::Through;
            let added = if wanted { self.add_records(at, &mut batch) } else { 0 };
            if added == 0 {
                // All of it is on disk, or on its way there with another batch.
                self.let_go_after(at, |core| core.is_down(at));
                continue;
            }
            bytes += added;
        }
        (!batch.chunks.is_empty()).then_some(batch)
    }

    /// Adds what a chunk has in memory only to a batch; how much that is. The chunk
    /// is held until the batch is done.
    fn add_records(&mut self, at: At, batch: &mut WriteBatch) -> u64 {
        let (record, codec, lost) = (self.record_of(at), self.codec_of(at), Quality::default());
        let rows = &mut self.boards[at.board as usize];
        let (mut all, mut bytes, mut cells) = (0, u64::MAX, usize::MAX);
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
            if cells >= RECORD_CELLS || bytes.saturating_add(cell_bytes) > RECORD_BYTES {
                batch.puts.record(record);
                batch.chunks.push(at);
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
                Ok(mark) => last.marks.push(*mark),
                Err(error) => last.error = Some(error.clone()),
            }
        }
        for one in written {
            self.end_chunk(one);
        }
        self.look_at_disk();
    }

    fn end_writing(&mut self, at: At, cell: Cell, place: Option<Place>) {
        let rows = &mut self.boards[at.board as usize];
        let bytes = rows.planes(cell).bytes();
        let arrival = place.map_or(Arrival::Failed, Arrival::Here);
        match rows.chunks.end_copy(cell, Tier::Disk, arrival) {
            Ok(Some(source)) => self.free_place(at.board, cell, source),
            Ok(None) => {}
            Err(error) => log::error!("a way down could not be ended: {error}"),
        }
        if place.is_some() {
            self.counters.written += 1;
            self.counters.written_bytes += bytes;
            self.arrived(at.board, cell, Tier::Disk);
        }
        self.wake(at.board, cell);
    }

    /// The records of a chunk are written, or not.
    fn end_chunk(&mut self, one: Written) {
        let at = one.at;
        if !one.marks.is_empty() {
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
                    true => self.let_go_after(at, |core| core.queue_down(at)),
                    false => self.let_go_after(at, |core| core.stays_up(at, &error)),
                }
            }
        }
    }

    /// Does something with a chunk that was held for its way down, then lets it go.
    pub(super) fn let_go_after(&mut self, at: At, act: impl FnOnce(&mut Core)) {
        act(self);
        self.let_go(at.board, at.slot);
    }

    /// What cells of a chunk are to be coded with: as the recipe of its namespace says,
    /// or the store.
    fn codec_of(&self, at: At) -> Codec {
        let row = self.boards[at.board as usize].chunks.chunk(at.slot);
        let space = row.and_then(|row| self.spaces.get(row.namespace() as usize));
        space.and_then(|space| space.codec).unwrap_or(self.config.codec)
    }

    /// Whether a batch that has cells of a chunk is under way.
    fn is_writing(&self, at: At) -> bool {
        let marks = self.boards[at.board as usize].chunks.marks(at.slot).unwrap_or_default();
        marks.iter().any(|marks| marks.arriving() & DISK != 0)
    }

    /// All that a chunk has in memory is on disk: who waited for that goes on, and if
    /// it was to leave it does. Where more of it is queued or being written, whoever
    /// ends that says so again.
    pub(super) fn is_down(&mut self, at: At) {
        if self.boards[at.board as usize].has(at.slot, note::QUEUED) || self.is_writing(at) {
            return;
        }
        let rows = &mut self.boards[at.board as usize];
        let leaves = rows.has(at.slot, note::LEAVES);
        rows.clear(at.slot, note::FORCED);
        if leaves {
            self.stop_leaving(at);
            if self.drop_copies(at) > 0 {
                self.counters.demoted += 1;
                self.say(Kind::Removed, Tier::Host, at);
            }
            self.stay_known(at);
        }
        for number in self.chunk_waits.remove(&at).unwrap_or_default() {
            self.moves[number].waits -= 1;
            if self.moves[number].waits == 0 {
                self.end_move(number);
            }
        }
    }

    /// What is still in memory of a chunk that was to leave is told to the policy again.
    fn stay_known(&mut self, at: At) {
        let rows = &self.boards[at.board as usize];
        if rows.chunks.chunk(at.slot).is_some_and(|row| row.cells()[Tier::Host as usize] > 0) {
            self.enter_shelf(at, Tier::Host);
        }
    }

    /// A chunk could not be written: it stays in memory, or is gone if its memory is
    /// needed and nobody holds it.
    pub(super) fn stays_up(&mut self, at: At, error: &Error) {
        let rows = &mut self.boards[at.board as usize];
        rows.clear(at.slot, note::FORCED);
        if rows.has(at.slot, note::LEAVES) {
            self.counters.refused += 1;
            self.stop_leaving(at);
            self.gone_if_free(at);
        }
        for number in self.chunk_waits.remove(&at).unwrap_or_default() {
            self.blame(number, error);
            self.moves[number].waits -= 1;
            if self.moves[number].waits == 0 {
                self.end_move(number);
            }
        }
    }

    /// Drops what cannot go down. The hold that kept it for its way down is not one
    /// of a user's.
    fn gone_if_free(&mut self, at: At) {
        let rows = &mut self.boards[at.board as usize];
        let was_held = rows.chunks.release(at.slot).is_ok();
        let freed = self.drop_where(at, Tier::Host as usize, |there| there == HOST);
        self.refusals = if freed > 0 { 0 } else { self.refusals + 1 };
        self.refused_ns = self.now_ns;
        let rows = &mut self.boards[at.board as usize];
        if was_held && rows.chunks.retain(at.slot).is_err() {
            log::error!("a chunk could not be held again");
        }
        self.counters.dropped += u64::from(freed > 0);
        self.stay_known(at);
    }

    /// Whether a move that has ended otherwise has to wait for a sync.
    pub(super) fn commits_before_end(&mut self, number: u32) -> bool {
        let one = &self.moves[number];
        if one.spec.level != Level::Durable {
            return false;
        }
        if let Some(status) = one.stopped() {
            // Nobody waits for the sync: then nothing is promised either.
            self.blame(number, &status.into());
            return false;
        }
        self.commits.push(number);
        true
    }

    /// What is to be synced.
    pub(super) fn take_syncs(&mut self) -> Option<SyncBatch> {
        if self.commits.is_empty() && self.fresh.len() < self.flush_at || self.disk.is_none() {
            return None;
        }
        let mut batch =
            SyncBatch { moves: std::mem::take(&mut self.commits), ..SyncBatch::default() };
        for &number in &batch.moves {
            let one = &self.moves[number].spec;
            let marks =
                one.slots.iter().filter_map(|&slot| self.fresh.get(&At { board: one.board, slot }));
            batch.marks.extend(marks.flatten().map(|&mark| (number, mark, Ok(()))));
        }
        if self.fresh.len() >= self.flush_at {
            self.flush_at = usize::MAX; // until this one is done
            let nobody = |&mark| (NOBODY, mark, Ok(()));
            batch.marks.extend(self.fresh.values().flatten().map(nobody));
        }
        if self.upkeep.takes_recovered() {
            batch.everything = Some(Ok(()));
        }
        Some(batch)
    }

    pub(super) fn done_syncs(&mut self, batch: &SyncBatch) {
        if let Some(Err(error)) = &batch.everything {
            log::warn!("what was found on disk could not be made durable: {error}");
        }
        for (number, _, result) in &batch.marks {
            if let (Err(error), Some(_)) = (result, self.moves.get(*number)) {
                self.blame(*number, error);
            }
        }
        if self.flush_at == usize::MAX {
            self.flush_at = MOST_FRESH.max(2 * self.fresh.len());
        }
        let nobodys = batch.marks.iter().filter(|(number, ..)| *number == NOBODY);
        let lasting: BTreeSet<Mark> =
            nobodys.filter(|(.., result)| result.is_ok()).map(|&(_, mark, _)| mark).collect();
        if !lasting.is_empty() {
            self.fresh.retain(|_, marks| {
                marks.retain(|mark| !lasting.contains(mark));
                !marks.is_empty()
            });
        }
        for &number in &batch.moves {
            self.forget_marks(number, &batch.marks);
            self.conclude(number);
        }
    }

    /// What was synced need not be synced again. What never can be stays noted, so
    /// that nobody is told that it lasts; where it is in memory, too, it leaves the
    /// disk, and another put writes it anew.
    fn forget_marks(&mut self, number: u32, synced: &[(u32, Mark, Result<()>)]) {
        let one = &self.moves[number].spec;
        let (board, slots) = (one.board, one.slots.clone());
        for slot in slots {
            let at = At { board, slot };
            let Some(mut marks) = self.fresh.remove(&at) else { continue };
            let how = |mark: &Mark| synced.iter().find(|(n, m, _)| *n == number && m == mark);
            let failed = |mark: &Mark| how(mark).is_some_and(|(_, _, result)| result.is_err());
            if marks.iter().any(failed) {
                let bad: Vec<u64> =
                    marks.iter().filter(|m| failed(m)).map(|m| m.segment()).collect();
                self.leave_segments(at, &bad);
            }
            marks.retain(|mark| !how(mark).is_some_and(|(_, _, result)| result.is_ok()));
            if self.boards[board as usize].has(slot, note::IN_DISK) && !marks.is_empty() {
                self.fresh.insert(at, marks);
            }
        }
    }

    /// Cells of a chunk that are in memory leave segments that cannot be synced.
    fn leave_segments(&mut self, at: At, bad: &[u64]) {
        for layer in 0..self.boards[at.board as usize].layout.layers() {
            let cell = Cell { chunk: at.slot, layer };
            let chunks = &mut self.boards[at.board as usize].chunks;
            let is_above = matches!(chunks.place(cell, Tier::Host), Ok(Some(_)));
            let Ok(Some(Place::Disk { spot, .. })) = chunks.place(cell, Tier::Disk) else {
                continue;
            };
            if !is_above || !bad.contains(&Spot(spot).segment()) {
                continue;
            }
            if let Ok(Gone::Now(place)) = chunks.begin_drop(cell, Tier::Disk) {
                self.free_place(at.board, cell, place);
                self.departed(at.board, at.slot, Tier::Disk);
            }
        }
    }
}
