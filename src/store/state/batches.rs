//! Batches of work for each kind of worker, and how their cells are copied, read, encoded and
//! decoded.

use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::device::{Direction, Memory};
use crate::format::codec::int8::Quality;
use crate::format::codec::{Codec, Shape};
use crate::meta::layout::Planes;
use crate::store::state::At;
use crate::store::state::stage::Load;
use crate::store::state::views::Views;
use crate::tier::disk::{Gets, Mark, Puts};

/// Kinds of workers. Each kind has threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerKind {
    /// Copies between the engine's tensors, host and device memory.
    Copy = 0,
    /// Disk reads.
    Read = 1,
    /// Disk writes.
    Write = 2,
    /// Syncs.
    Sync = 3,
    /// Compaction, removal of empty segments, checkpoints.
    Upkeep = 4,
    /// Remote reads.
    Fetch = 5,
    /// Remote writes.
    Upload = 6,
    /// Remote lookups.
    Lookup = 7,
}

/// Number of kinds.
pub const KINDS: usize = 8;

impl WorkerKind {
    /// All kinds.
    pub const ALL: [WorkerKind; KINDS] = [
        WorkerKind::Copy,
        WorkerKind::Read,
        WorkerKind::Write,
        WorkerKind::Sync,
        WorkerKind::Upkeep,
        WorkerKind::Fetch,
        WorkerKind::Upload,
        WorkerKind::Lookup,
    ];
}

/// A copy of one plane of a cell.
pub struct CopyItem {
    /// Index of the engine's views in the batch.
    pub views: usize,
    /// Index of the layer in these views.
    pub layer: usize,
    /// Copies the V plane; else the K plane.
    pub is_v: bool,
    /// First token.
    pub first: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Address in the store.
    pub address: usize,
    /// Kind of memory of that address.
    pub memory: Memory,
    /// Index of its job in the batch.
    pub job: usize,
    /// Direction.
    pub direction: Direction,
    /// Checksum of the plane, if the device tier has it.
    pub sum: Option<u64>,
}

/// A copy of a cell from host to device memory.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    /// Address in host memory.
    pub host: usize,
    /// Address in device memory.
    pub device: u64,
    /// Bytes of the cell.
    pub bytes: u64,
    /// Bytes of its first plane.
    pub k_bytes: u64,
    /// Index of its job in the batch.
    pub job: usize,
}

/// Damage on a device's bus, found by checksums.
#[derive(Debug, Default)]
pub struct Damage {
    /// Copies that arrived with wrong bytes.
    pub seen: u64,
    /// Jobs of the batch whose second copy was wrong, too.
    pub jobs: Vec<usize>,
}

/// A batch of copies.
#[derive(Default)]
pub struct CopyBatch {
    pub(super) jobs: Vec<u32>,
    /// They read the device tier.
    pub(super) uses_device: bool,
    /// The event that they wait for will never complete.
    pub(super) is_spent: bool,
    /// Copies into the device tier that are made first: `items` may read what they wrote.
    pub fills: Vec<Fill>,
    /// For each job, whether it was done without the device. `None` if a lost device fails the
    /// batch.
    pub rescued: Option<Vec<bool>>,
    /// Outcome of each job, if they were executed one by one after the batch had failed.
    pub alone: Vec<Result<()>>,
    /// Jobs that the device refused before it touched memory.
    pub refused: Vec<usize>,
    /// Damage found on the bus.
    pub damage: Damage,
    /// Checksums of each job's planes, if the device computes them.
    pub sums: Vec<[u64; 2]>,
    pub(super) load: Load,
    /// The engine's tensors of its transfers.
    pub views: Vec<Arc<Views>>,
    /// Copies to execute.
    pub items: Vec<CopyItem>,
}

impl CopyBatch {
    /// Jobs of the batch.
    pub fn jobs(&self) -> impl Iterator<Item = u32> + '_ {
        self.jobs.iter().copied()
    }

    /// Splits the batch into one batch for each job.
    pub fn split(self) -> Vec<CopyBatch> {
        let mut parts: Vec<CopyBatch> = Vec::with_capacity(self.jobs.len());
        parts.extend(self.jobs.iter().map(|&id| CopyBatch {
            jobs: vec![id],
            uses_device: self.uses_device,
            rescued: self.rescued.clone(),
            views: self.views.clone(),
            ..CopyBatch::default()
        }));
        for item in self.items {
            parts[item.job].items.push(CopyItem { job: 0, ..item });
        }
        for fill in self.fills {
            parts[fill.job].fills.push(Fill { job: 0, ..fill });
        }
        parts
    }
}

/// A batch of disk reads.
#[derive(Default)]
pub struct ReadBatch {
    pub(super) jobs: Vec<u32>,
    pub(super) load: Load,
    /// Reads to execute, and their outcomes.
    pub gets: Gets,
    /// How to decode coded cells, in the order of `gets`.
    pub decodings: Vec<Decoding>,
}

/// How to encode a cell.
#[derive(Clone, Copy)]
pub struct Coding {
    /// Codec.
    pub codec: Codec,
    /// Shapes of its planes.
    pub shapes: [Shape; 2],
    /// Loss of precision, filled in by the encoder.
    pub lost: Quality,
}

/// How to decode a cell.
#[derive(Clone, Copy)]
pub struct Decoding {
    /// Index among the reads of the batch.
    pub get: usize,
    /// Codec.
    pub codec: Codec,
    /// Shapes of its planes.
    pub shapes: [Shape; 2],
    /// Lengths of its planes.
    pub planes: Planes,
    /// Address of the first plane; the second follows it.
    pub address: *mut u8,
}

// SAFETY: the memory is named, not owned; the reader of the batch guarantees that it is
// valid then.
unsafe impl Send for Decoding {}

/// A batch of disk writes.
#[derive(Default)]
pub struct WriteBatch {
    pub(super) chunks: Vec<At>,
    /// Writes to execute, and their outcomes.
    pub puts: Puts,
    /// How to encode each cell of `puts`.
    pub codings: Vec<Coding>,
    /// Records of namespaces that must be written first.
    pub(super) notes: Vec<SpaceNote>,
    /// Why the batch was not written.
    pub(super) refused: Option<Error>,
}

/// The record of a namespace.
pub(super) struct SpaceNote {
    pub(super) namespace: u32,
    pub(super) name: Vec<u8>,
    pub(super) content: Vec<u8>,
    /// Position of the record, once it is written.
    pub(super) mark: Option<Mark>,
}

/// A sync of the disk.
#[derive(Default)]
pub struct SyncBatch {
    pub(super) transfers: Vec<u32>,
    /// Segments to sync for each transfer, with the outcome.
    pub marks: Vec<(u32, Mark, Result<()>)>,
    /// Syncs all segments first: recovered records may never have been synced.
    pub everything: Option<Result<()>>,
}
