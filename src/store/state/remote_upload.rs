//! Remote uploads. The cells of an object are referenced until the upload completes, so their
//! memory is not freed before, even when they are evicted meanwhile.

use crate::base::budget::Tier;
use crate::base::status::{Error, Status};
use crate::base::sync::Arc;
use crate::format::codec::Codec;
use crate::format::record;
use crate::meta::chunks::{Arrival, Begin, Cell, Location, Residency};
use crate::meta::index::NONE;
use crate::store::admission::Candidate;
use crate::store::state::chunk_table::note;
use crate::store::state::remote::time_of;
use crate::store::state::remote::{RequestKind, Ticket};
use crate::store::state::transfer::Level;
use crate::store::state::{At, StoreState, Write};
use crate::tier::host::Piece;
use crate::tier::remote::breaker::{Direction, Permit};
use crate::tier::remote::object::PlaneSource;
use crate::tier::remote::shape::Shape;
use crate::tier::remote::{Name, RemoteError};

/// Names removed in one batch; about as many as a slow remote removes within a timeout.
const REMOVALS: usize = 32;
/// Share of host memory that uploads without waiters may occupy: 1 / 8.
const UPLOAD_SHARE: u64 = 8;

/// Batches that waiting uploads are divided into, and least bytes of a batch.
const UPLOAD_BATCHES: u64 = 8;
const LEAST_BATCH_BYTES: u64 = 2 << 20;

/// An object to be uploaded.
pub struct Upload {
    at: At,
    object: u32,
    /// Name of the object.
    pub name: Name,
    /// How the chunk is cut into objects.
    pub shape: Arc<Shape>,
    /// Header of the chunk.
    pub chunk: record::Chunk,
    /// The planes of its cells, one cell after the other.
    pub planes: Vec<PlaneSource>,
    /// Whether the remote had it before.
    pub result: Result<bool, RemoteError>,
}

// SAFETY: memory of planes is named, not owned; the executor of an upload guarantees that it is
// valid then.
unsafe impl Send for Upload {}

impl Upload {
    /// Index of the object in its chunk.
    pub fn object(&self) -> usize {
        self.object as usize
    }

    /// Codec of its cells.
    pub fn codec(&self) -> Codec {
        Codec::None
    }

    fn bytes(&self) -> u64 {
        bytes_of(&self.shape, self.object)
    }
}

/// A batch of uploads.
#[derive(Default)]
pub struct UploadBatch {
    /// The uploads.
    pub uploads: Vec<Upload>,
    /// Names to remove before anything is uploaded; none of them is uploaded in this batch.
    pub removals: Vec<Name>,
    /// Number of names removed.
    pub removed: u64,
    /// Names that the time did not suffice for.
    pub late: Vec<Name>,
    /// Why names may not be removed.
    pub removal_error: Option<RemoteError>,
    /// Timeout of the batch.
    pub timeout_ns: u64,
    /// It probes an open circuit.
    probes: bool,
    ticket: Ticket,
}

fn bytes_of(shape: &Shape, object: u32) -> u64 {
    shape.cells(object as usize).iter().map(|cell| cell.bytes()).sum()
}

impl StoreState {
    /// All cells of a put's chunk are in memory: uploads it if the put's level or the store's mode
    /// says so.
    pub(super) fn upload_put(&mut self, number: u32, chunk: u32, at: At) {
        let level = self.transfers.table[number].spec.level;
        let Some(remote) = &self.remote else { return };
        if level != Level::Remote && remote.config.write != Write::Through {
            return;
        }
        let is_full = self.is_full(at);
        if level != Level::Remote {
            if is_full && self.may_upload(at) {
                self.begin_upload(at, false);
            }
            return;
        }
        if self.lacks_layers(number, at) {
            return; // the put that brings the rest of its layers sends it
        }
        let begun = self.transfers.table[number].upload_begun.get_mut(chunk as usize);
        // A partial chunk is of no use to other stores.
        if !is_full || begun.is_none_or(|begun| std::mem::replace(begun, true)) {
            return;
        }
        if self.begin_upload(at, true) {
            self.transfers.table[number].pending_writes += 1;
            if let Some(remote) = &mut self.remote {
                remote.upload_waiters.entry(at).or_default().push((number, chunk));
            }
        } else {
            let (status, words) = match self.remote_shape(at.table) {
                Some(_) => {
                    (Status::Again, "not all layers of a chunk are in memory for the upload")
                }
                None => (Status::Limit, "the remote accepts no objects as long as these layers"),
            };
            self.transfers.table[number].note_failure(chunk, &Error::new(status, words));
        }
    }

    /// All cells of a put are in memory: uploads its chunks.
    pub(super) fn queue_upload(&mut self, number: u32) {
        if self.remote.is_none() || self.transfers.table[number].stopped().is_some() {
            return;
        }
        let (table, chunks) = (
            self.transfers.table[number].spec.table,
            self.transfers.table[number].spec.slots.len(),
        );
        for chunk in 0..chunks as u32 {
            let slot = self.transfers.table[number].spec.slots[chunk as usize];
            if slot != NONE {
                self.upload_put(number, chunk, At { table, slot });
            }
        }
    }

    /// A chunk is about to be evicted from memory: uploads it first, if the store's mode says so.
    pub(super) fn upload_victim(&mut self, at: At) {
        let is_enabled =
            self.remote.as_ref().is_some_and(|remote| remote.config.write == Write::Back);
        let row = self.tables[at.table as usize].chunks.chunk(at.slot);
        // A chunk that must stay in memory, since there is no disk, is not evicted.
        let must_stay = self.disk.is_none() && row.is_some_and(|row| row.is_blocked());
        if is_enabled && !must_stay && self.is_full(at) && self.may_upload(at) {
            self.begin_upload(at, false);
        }
    }

    /// Whether layers of a put's chunk are still to arrive. Layers that were evicted do not arrive
    /// any more.
    fn lacks_layers(&self, number: u32, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let marks = rows.chunks.marks(at.slot).unwrap_or_default();
        let host = 1 << Tier::Host as u8;
        let arrives_in_host =
            |marks: &Residency| marks.resident_tiers() == 0 || marks.arriving() & host != 0;
        self.transfers.table[number].spec.layers < rows.layout.layers()
            && marks.iter().any(arrives_in_host)
    }

    /// Whether all layers of a chunk are in memory.
    fn is_whole_in_host(&self, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let row = rows.chunks.chunk(at.slot);
        let in_host = row.map_or(0, |row| usize::from(row.cells()[Tier::Host as usize]));
        in_host == rows.layout.layers()
    }

    pub(super) fn is_full(&self, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let each = rows.layout.chunk_tokens();
        rows.chunks.chunk(at.slot).is_some_and(|row| row.valid_tokens() == each)
    }

    /// Whether a chunk without a waiter may be uploaded.
    fn may_upload(&mut self, at: At) -> bool {
        let rows = &self.tables[at.table as usize];
        let layers = rows.layout.layers();
        let Some(row) = rows.chunks.chunk(at.slot) else { return false };
        let [in_host, remote] = [Tier::Host, Tier::Remote].map(|tier| row.cells()[tier as usize]);
        let is_present = usize::from(remote) == layers && !rows.has(at.slot, note::GAPPED);
        if usize::from(in_host) < layers || is_present {
            return false;
        }
        let candidate = Candidate {
            bytes: rows.chunk_bytes(at.slot),
            hits: u32::from(rows.uses[at.slot as usize]),
            priority: rows.classes[at.slot as usize],
        };
        let (now_ns, most) = (self.now_ns, self.config.host_bytes / UPLOAD_SHARE);
        let Some(remote) = &mut self.remote else { return false };
        let is_admitted = remote.breaker.allows(Direction::Write, now_ns);
        let is_admitted = is_admitted
            && remote.upload_bytes + candidate.bytes <= most
            && remote.admission.admit(&candidate, 0.0, now_ns).is_ok();
        remote.counters.rejected_chunks += u64::from(!is_admitted);
        is_admitted
    }

    /// Queues the upload of all objects of a chunk that the remote lacks by its hints; with `must`
    /// also others, since only the remote's answer counts then. Returns whether anything is in
    /// flight.
    fn begin_upload(&mut self, at: At, must: bool) -> bool {
        let Some(shape) = self.remote_shape(at.table) else { return false };
        if !self.is_whole_in_host(at) {
            return false;
        }
        let before = self.remote_cells(at);
        let is_gapped = self.tables[at.table as usize].has(at.slot, note::GAPPED);
        self.tables[at.table as usize].clear(at.slot, note::GAPPED);
        let (mut is_in_flight, mut all_begun) = (false, true);
        for object in 0..shape.objects() as u32 {
            let of = shape.layers(object as usize);
            let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
            let of_it = marks.get(of.start as usize..of.end as usize).unwrap_or_default();
            let is_uploading = of_it.iter().any(|marks| marks.is_uploading());
            is_in_flight |= is_uploading;
            let is_looked_up = must || is_gapped;
            if is_uploading || !is_looked_up && of_it.iter().all(|marks| marks.is_remote()) {
                continue;
            }
            self.forget_hint(at, of.clone());
            let chunks = &mut self.tables[at.table as usize].chunks;
            let begins = |layer: u32| {
                let cell = Cell { chunk: at.slot, layer: layer as usize };
                matches!(chunks.begin_copy(cell, Tier::Host, Tier::Remote), Ok(Begin::Started))
            };
            let begun = of.clone().map(begins).take_while(|&begun| begun).count() as u32;
            if begun < of.len() as u32 {
                // With a hint only, the copy here is read on: another store may be fetching the
                // object.
                self.end_cells(at, of.start..of.start + begun, Arrival::Failed);
                all_begun = false;
                continue;
            }
            let Some(remote) = &mut self.remote else { return false };
            remote.upload_bytes += bytes_of(&shape, object);
            remote.upload_queue.push_back((at, object));
            is_in_flight = true;
        }
        self.note_remote_index(at, before);
        is_in_flight && (all_begun || !must)
    }

    /// Takes the next uploads, up to a batch. None while the circuit is open.
    pub(super) fn take_uploads(&mut self) -> Option<UploadBatch> {
        let remote = self.remote.as_mut()?;
        if !remote.has_to_send() {
            return None;
        }
        let permit = remote.breaker.admit(Direction::Write, self.now_ns);
        let most = if permit == Permit::Allow { remote.config.batch } else { 1 };
        let (timeout_ns, probes) = (remote.config.timeout_ns, permit == Permit::Probe);
        let mut batch = UploadBatch { timeout_ns, probes, ..UploadBatch::default() };
        if permit == Permit::Deny {
            remote.removals.clear();
        }
        // Removals are sent first, in a batch of their own: a dropped chunk may be put again.
        if !remote.removals.is_empty() {
            let count = remote.removals.len().min(most.min(REMOVALS));
            batch.removals.extend(remote.removals.drain(..count));
            remote.removing += 1;
            let kind = RequestKind::Upload(Vec::new());
            batch.ticket = remote.watch.begin(self.now_ns, batch.timeout_ns, kind, probes);
            return Some(batch);
        }
        // Short batches while few objects wait: all workers have a part, and puts end early.
        let fair_bytes = remote.upload_bytes / UPLOAD_BATCHES;
        let most_bytes = fair_bytes.max(LEAST_BATCH_BYTES).min(self.config.batch_bytes);
        let mut bytes = 0;
        while batch.uploads.len() < most && (bytes < most_bytes || bytes == 0) {
            let Some((at, object)) =
                self.remote.as_mut().and_then(|remote| remote.upload_queue.pop_front())
            else {
                break;
            };
            let Some(upload) = self.make_upload(at, object) else {
                self.give_up_upload(at, object);
                continue;
            };
            if permit == Permit::Deny {
                self.end_upload(&Upload { result: Err(RemoteError::Unreachable), ..upload });
                continue;
            }
            bytes += upload.bytes();
            batch.uploads.push(upload);
        }
        batch.timeout_ns += time_of(bytes);
        if batch.uploads.is_empty() {
            return None;
        }
        let kind = RequestKind::Upload(batch.uploads.iter().map(|upload| upload.at).collect());
        let watch = &mut self.remote.as_mut()?.watch;
        batch.ticket = watch.begin(self.now_ns, batch.timeout_ns, kind, probes);
        Some(batch)
    }

    /// Gives up an object that cannot be built, after a defect.
    fn give_up_upload(&mut self, at: At, object: u32) {
        log::error!("internal: no object could be built from cells that are referenced for it");
        let Some(shape) = self.remote_shape(at.table) else { return };
        if let Some(remote) = &mut self.remote {
            remote.upload_bytes -= bytes_of(&shape, object);
        }
        self.end_cells(at, shape.layers(object as usize), Arrival::Failed);
        self.fail_uploads(at, RemoteError::TooLong);
        self.end_if_uploaded(at);
    }

    fn make_upload(&mut self, at: At, object: u32) -> Option<Upload> {
        let shape = self.remote_shape(at.table)?;
        let name = self.remote_name(at, &shape, object)?;
        let chunk = self.remote_record(at);
        let rows = &self.tables[at.table as usize];
        let mut planes = Vec::new();
        for layer in shape.layers(object as usize) {
            let cell = Cell { chunk: at.slot, layer: layer as usize };
            // The cell may have left the table. It is read until the upload ends.
            let Location::Host(piece) = rows.chunks.place_read(cell, Tier::Host).ok()? else {
                return None;
            };
            let address = self.host.address(Piece(piece)).ok()?;
            let mut offset = 0;
            for (_, bytes) in rows.stored_planes(cell) {
                let address = address.wrapping_add(offset as usize).cast_const();
                planes.push(PlaneSource { address, bytes, sum: None });
                offset += bytes;
            }
        }
        let result = Err(RemoteError::Busy);
        Some(Upload { at, object, name, shape, chunk, planes, result })
    }

    pub(super) fn done_uploads(&mut self, batch: &UploadBatch) {
        let in_time = self.remote.as_mut().is_some_and(|remote| remote.watch.end(batch.ticket));
        for upload in &batch.uploads {
            if let Some(remote) = self.remote.as_mut().filter(|_| in_time) {
                remote.record_outcome(Direction::Write, &upload.result, batch.probes, self.now_ns);
            }
            self.end_upload(upload);
        }
        let Some(remote) = &mut self.remote else { return };
        if !batch.removals.is_empty() {
            remote.removing -= 1;
            remote.counters.removed_objects += batch.removed;
            // A remote that refuses removals is healthy otherwise. A slow remote executes
            // the rest later.
            let outcome = match batch.removal_error {
                Some(RemoteError::Timeout) if batch.removed > 0 => {
                    batch.late.iter().rev().for_each(|&name| remote.removals.push_front(name));
                    Ok(())
                }
                Some(
                    error @ (RemoteError::Timeout | RemoteError::Unreachable | RemoteError::Busy),
                ) => Err(error),
                _ => Ok(()),
            };
            if in_time {
                remote.record_outcome(Direction::Write, &outcome, batch.probes, self.now_ns);
            }
        }
    }

    /// Ends the upload of an object.
    fn end_upload(&mut self, upload: &Upload) {
        let (at, now_ns) = (upload.at, self.now_ns);
        if let Some(remote) = &mut self.remote {
            remote.upload_bytes -= upload.bytes();
            match upload.result {
                Ok(was_there) => {
                    remote.counters.known_objects += u64::from(was_there);
                    remote.counters.uploaded_objects += u64::from(!was_there);
                    remote.counters.uploaded_bytes += u64::from(!was_there) * upload.bytes();
                    remote.known.put(&upload.name, true, now_ns);
                }
                Err(_) => remote.counters.failed_uploads += 1,
            }
        }
        let before = self.remote_cells(at);
        let arrival = match upload.result {
            Ok(_) => Arrival::Arrived(Location::Remote),
            Err(_) => Arrival::Failed,
        };
        self.end_cells(at, upload.shape.layers(upload.object()), arrival);
        self.note_remote_index(at, before);
        if let Err(error) = upload.result {
            if upload.shape.objects() > 1 {
                self.tables[at.table as usize].set(at.slot, note::GAPPED);
            }
            self.fail_uploads(at, error);
        }
        self.end_if_uploaded(at);
        self.tidy(at.table, at.slot);
    }

    /// Ends the read of cells for an upload.
    fn end_cells(&mut self, at: At, layers: std::ops::Range<u32>, arrival: Arrival) {
        for layer in layers {
            let cell = Cell { chunk: at.slot, layer: layer as usize };
            match self.tables[at.table as usize].chunks.end_copy(cell, Tier::Remote, arrival) {
                Ok(Some(place)) => self.free_place(at.table, cell, place),
                Ok(None) => {}
                Err(error) => {
                    log::error!("internal: the upload of a cell could not be ended: {error}")
                }
            }
            self.wake(at.table, cell);
        }
    }

    /// Fails puts that wait for the upload of a chunk.
    fn fail_uploads(&mut self, at: At, error: RemoteError) {
        let Some(remote) = &self.remote else { return };
        let upload_waiters = remote.upload_waiters.get(&at).cloned().unwrap_or_default();
        for (number, chunk) in upload_waiters {
            self.transfers.table[number].note_failure(chunk, &Error::from(error));
        }
    }

    /// Lets puts continue if nothing of a chunk is being uploaded any more.
    fn end_if_uploaded(&mut self, at: At) {
        let marks = self.tables[at.table as usize].chunks.marks(at.slot).unwrap_or_default();
        if !marks.iter().any(|marks| marks.is_uploading()) {
            self.end_upload_waits(at);
        }
    }

    /// Ends puts that wait for a hung upload. The memory is read until the upload returns.
    pub(super) fn abandon_upload(&mut self, at: At) {
        self.fail_uploads(at, RemoteError::Timeout);
        self.end_upload_waits(at);
    }

    fn end_upload_waits(&mut self, at: At) {
        let Some(remote) = &mut self.remote else { return };
        for (number, _) in remote.upload_waiters.remove(&at).unwrap_or_default() {
            self.transfers.table[number].pending_writes -= 1;
            if self.transfers.table[number].pending_writes == 0
                && self.transfers.table[number].is_over()
            {
                self.end_transfer(number);
            }
        }
    }
}
