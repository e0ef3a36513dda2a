//! Reads: cells that come from disk, and what becomes of those that cannot.

use crate::base::budget::Tier;
use crate::base::status::{Error, Result, Status};
use crate::format::codec::Codec;
use crate::meta::chunks::{Arrival, Cell, Place};
use crate::store::state::jobs::{Job, Step};
use crate::store::state::work::{Decoding, ReadBatch};
use crate::store::state::{ChunkTable, StoreState};
use crate::tier::disk::{GetPlane, Spot};

/// How often a cell is read again after the disk failed.
const RETRIES: u8 = 2;

impl StoreState {
    /// The next cells to be read, up to a batch.
    pub(super) fn take_reads(&mut self) -> Option<ReadBatch> {
        let (mut batch, mut bytes) = (ReadBatch::default(), 0);
        while batch.jobs.len() < self.config.batch_cells && bytes < self.config.batch_bytes {
            let Some((_, id)) = self.reads.pop() else { break };
            let job = &mut self.jobs[id];
            job.step = Step::Reading;
            let piece = job.piece;
            let (table, cell) = self.cell_of(&self.jobs[id]);
            let rows = &self.tables[table as usize];
            // What was begun stays where it is: it is being read.
            let place = rows.chunks.place(cell, Tier::Disk);
            let address = piece.and_then(|piece| self.host.address(piece).ok());
            let (Ok(Some(place)), Some(address)) = (place, address) else {
                // It left the disk while it waited for its turn.
                let job = self.jobs[id];
                self.end_reading(&job, table, cell, Err(Status::Again.into()));
                let job = &mut self.jobs[id];
                (job.piece, job.step) = (None, Step::Fresh);
                self.woken.push(id);
                continue;
            };
            add_read(rows, cell, place, address, &mut batch);
            bytes += rows.planes(cell).bytes();
            batch.jobs.push(id);
        }
        (!batch.jobs.is_empty()).then_some(batch)
    }

    pub(super) fn done_reads(&mut self, batch: &ReadBatch) {
        for (&id, get) in batch.jobs.iter().zip(batch.gets.iter()) {
            let job = self.jobs[id];
            let (table, cell) = self.cell_of(&job);
            let place = self.tables[table as usize].chunks.place(cell, Tier::Disk);
            let has_moved =
                !matches!(place, Ok(Some(Place::Disk { spot, .. })) if spot == get.spot.0);
            let result = match &get.result {
                // Cleaning was faster: it is elsewhere by now.
                Err(_) if has_moved => Err(Status::Again.into()),
                result => result.clone(),
            };
            let status = result.as_ref().err().map(|error| error.status());
            self.end_reading(&job, table, cell, result);
            let job = &mut self.jobs[id];
            (job.piece, job.step) = (None, Step::Fresh);
            match status {
                None | Some(Status::Corrupt | Status::NotFound | Status::Again) => {
                    self.woken.push(id);
                }
                Some(_) if job.retries < RETRIES => {
                    job.retries += 1;
                    self.woken.push(id);
                }
                Some(status) => {
                    let words = "the disk could not be read, again and again";
                    self.end_job(id, 0, Some(Error::new(status, words)));
                }
            }
        }
    }

    /// A way from disk has ended.
    pub(super) fn end_reading(&mut self, job: &Job, table: u32, cell: Cell, result: Result<()>) {
        let Some(piece) = job.piece else { return };
        let bytes = self.tables[table as usize].planes(cell).bytes();
        let arrival = match result.map_err(|error| error.status()) {
            Ok(()) => Arrival::Here(Place::Host(piece.0)),
            Err(Status::Corrupt | Status::NotFound) => {
                self.counters.corrupt += 1;
                Arrival::BadSource
            }
            Err(Status::Again) => Arrival::Failed,
            Err(_) => {
                self.counters.failed_reads += 1;
                Arrival::Failed
            }
        };
        let came = matches!(arrival, Arrival::Here(_));
        match self.tables[table as usize].chunks.end_copy(cell, Tier::Host, arrival) {
            Ok(Some(place)) => self.free_place(table, cell, place),
            Ok(None) => {}
            Err(error) => log::error!("a way could not be ended: {error}"),
        }
        if came {
            self.counters.loaded_bytes += bytes;
            self.arrived(table, cell, Tier::Host);
        } else {
            self.give_back(piece);
            if arrival == Arrival::BadSource {
                self.departed(table, cell, Tier::Disk);
                self.forget_if_alone(table, cell);
            }
        }
        self.wake(table, cell);
    }
}

/// Adds the read of a cell to a batch: into its memory, or, if it is coded, into
/// memory that the hands have for that.
fn add_read(rows: &ChunkTable, cell: Cell, place: Place, address: *mut u8, batch: &mut ReadBatch) {
    let Place::Disk { spot, seal, coded } = place else { return };
    let (spot, who) = (Spot(spot), rows.identity_of(cell, coded));
    let (id, version) = (0, 0);
    match coded.blocks() {
        None => batch.gets.cell(spot, who, seal, true),
        Some(blocks) => {
            batch.decodings.push(Decoding {
                get: batch.gets.len(),
                codec: Codec::from_code(coded.codec() as u8).unwrap_or_default(),
                shapes: rows.shapes(cell.layer),
                planes: rows.planes(cell),
                address,
            });
            batch.gets.coded(spot, who, seal, blocks as u32);
        }
    }
    let mut offset = 0;
    for (kind, plane_bytes) in rows.stored_planes(cell) {
        let (address, bytes) = match coded.blocks() {
            None => (address.wrapping_add(offset as usize), plane_bytes),
            Some(_) => (std::ptr::null_mut(), 0),
        };
        batch.gets.plane(GetPlane { kind, id, version, bytes, address });
        offset += plane_bytes;
    }
}
