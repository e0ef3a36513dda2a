//! Batches of work for each kind of worker, and how their cells are copied, read, encoded and
//! decoded.

use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::device::{Direction, Memory};
use crate::fail;
use crate::format::codec::int8::Quality;
use crate::format::codec::{Codec, Shape};
use crate::meta::layout::{Layout, Planes, Rule};
use crate::meta::view::{Place, Side, View};
use crate::store::job_queues::{LANES, Queues};
use crate::store::plan::Speed;
use crate::store::state::{At, Config};
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
#[derive(Clone, Copy)]
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
    /// The target is not read soon.
    pub past_caches: bool,
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

    /// The process that must make the copies; None = this one. All copies of a batch have the same.
    pub fn client(&self) -> Option<u64> {
        self.views.first()?.origin.map(|origin| origin.client)
    }

    /// Whether copies of a transfer with these views may be in the batch.
    pub(super) fn fits(&self, views: &Views) -> bool {
        self.jobs.is_empty() || self.client() == views.origin.map(|origin| origin.client)
    }

    /// Index of a transfer's views. Jobs of one transfer mostly follow each other, so a look at the
    /// last views is enough.
    pub fn view_index(&mut self, views: &Arc<Views>) -> usize {
        if self.views.last().is_none_or(|last| !Arc::ptr_eq(last, views)) {
            self.views.push(views.clone());
        }
        self.views.len() - 1
    }

    /// Removes the content and keeps the memory.
    fn clear(&mut self) {
        (self.uses_device, self.is_spent, self.rescued) = (false, false, None);
        (self.load, self.damage.seen) = (Load::default(), 0);
        self.jobs.clear();
        self.fills.clear();
        self.alone.clear();
        self.refused.clear();
        self.damage.jobs.clear();
        self.sums.clear();
        self.views.clear();
        self.items.clear();
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

// ---------- stages
//
// A stage: the queue of jobs of one kind, what its batches carry now, and its measured bandwidth.
// Copies, disk reads, remote fetches and copies from the device tier each have one.

/// Assumed performance of a stage before its first batch: the delay of a batch in ns, and bytes a
/// second.
#[derive(Clone, Copy)]
pub(super) struct Guess(f64, f64);

pub(super) const COPIES: Guess = Guess(20_000.0, 8e9);
pub(super) const READS: Guess = Guess(150_000.0, 2e9);
/// A remote may be far away.
pub(super) const FETCHES: Guess = Guess(2_000_000.0, 2e8);
/// Copies from device memory.
pub(super) const REPLICAS: Guess = Guess(10_000.0, 2e11);

/// Load of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Bytes of its cells.
    pub bytes: u64,
    /// Batches of its kind in flight when it was taken, itself among them.
    pub beside: u32,
}

/// Jobs of one kind in transfer through the workers.
pub(super) struct Stage {
    /// Jobs that wait for a worker, by urgency and session.
    pub queue: Queues,
    /// Bytes of the batches in flight.
    pub in_flight_bytes: u64,
    pub bandwidth: Speed,
}

impl Stage {
    pub fn new(config: &Config, Guess(delay_ns, bytes_per_second): Guess) -> Result<Stage> {
        Ok(Stage {
            queue: Queues::new(config.max_jobs, config.max_sessions + 1)?,
            in_flight_bytes: 0,
            bandwidth: Speed::guess(delay_ns, bytes_per_second),
        })
    }

    /// Whether jobs wait for a worker.
    pub fn has_queued(&self) -> bool {
        (0..LANES).any(|lane| self.queue.waiting(lane).0 > 0)
    }

    pub fn begins(&mut self, load: Load) {
        self.in_flight_bytes += load.bytes;
    }

    /// A batch has ended. Its time counts for the bandwidth where `is_sound` says that all bytes
    /// were moved. `in_flight` batches of its kind are in flight now, this one among them: those
    /// beside it had their part of the bandwidth.
    pub fn ends(&mut self, load: Load, in_flight: u32, is_sound: bool, elapsed_ns: u64) {
        self.in_flight_bytes -= load.bytes;
        if is_sound {
            let beside = (u64::from(load.beside) + u64::from(in_flight)).max(2);
            self.bandwidth.observe(load.bytes, 1, elapsed_ns.saturating_mul(2) / beside);
        }
    }
}

/// Work in flight, and the stages that every store has. Those of the remote and of the device tier
/// stand with them.
pub(super) struct Stages {
    pub copy: Stage,
    pub read: Stage,
    /// Batches in flight, by [`WorkerKind`].
    pub in_flight: [u32; KINDS],
    /// Ended batches of copies, without content: the next ones need not allocate.
    #[allow(clippy::vec_box)] // they move as boxes
    pub empty_batches: Vec<Box<CopyBatch>>,
}

/// Most empty batches that are kept: more are seldom in flight at once.
const MOST_EMPTY: usize = 8;

impl Stages {
    /// Stages whose copies of long cells are made in parts of `part_bytes`.
    pub fn new(config: &Config, part_bytes: u64) -> Result<Stages> {
        let mut copy = Stage::new(config, COPIES)?;
        copy.queue.in_parts_of(part_bytes);
        let read = Stage::new(config, READS)?;
        Ok(Stages { copy, read, in_flight: [0; KINDS], empty_batches: Vec::new() })
    }

    /// Keeps the memory of an ended batch.
    pub fn recycle(&mut self, mut batch: Box<CopyBatch>) {
        if self.empty_batches.len() < MOST_EMPTY {
            batch.clear();
            self.empty_batches.push(batch);
        }
    }

    /// Batches of one kind in flight.
    pub fn in_flight(&self, workers: WorkerKind) -> u32 {
        self.in_flight[workers as usize]
    }

    pub fn is_idle(&self) -> bool {
        self.in_flight.iter().all(|&batches| batches == 0)
    }
}

// ---------- views
//
// The engine's tensors of a transfer: planes of host or device memory.

/// Addresses of a plane's tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Contiguous from this address on.
    At(u64),
    /// In pages.
    Pages {
        /// Address of each page. One table serves K, V and all layers.
        addresses: Arc<Vec<u64>>,
        /// Tokens of a page.
        page_tokens: u32,
        /// Offset added to each address.
        shift_bytes: i64,
    },
}

/// One plane of one layer in the engine's memory; see [`View`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneView {
    /// Addresses.
    pub place: Tokens,
    /// Tokens; for a state, the number of states.
    pub tokens: u32,
    /// Heads of a token.
    pub heads: u32,
    /// Bytes of one head of a token.
    pub run_bytes: u64,
    /// Bytes from a token to the next.
    pub token_stride_bytes: u64,
    /// Bytes from a head to the next.
    pub head_stride_bytes: u64,
    /// Kind of memory.
    pub memory: Memory,
}

impl PlaneView {
    /// A plane of host memory in canonical order.
    pub fn canonical(address: u64, tokens: u32, token_bytes: u64) -> PlaneView {
        PlaneView {
            place: Tokens::At(address),
            tokens,
            heads: 1,
            run_bytes: token_bytes,
            token_stride_bytes: token_bytes,
            head_stride_bytes: token_bytes,
            memory: Memory::Host,
        }
    }

    /// The view that copies use.
    pub fn view(&self) -> View<'_> {
        View {
            place: match &self.place {
                Tokens::At(address) => Place::At(*address),
                Tokens::Pages { addresses, page_tokens, shift_bytes } => {
                    Place::Pages { addresses, page_tokens: *page_tokens, shift_bytes: *shift_bytes }
                }
            },
            tokens: self.tokens,
            heads: self.heads,
            run_bytes: self.run_bytes,
            token_stride_bytes: self.token_stride_bytes,
            head_stride_bytes: self.head_stride_bytes,
        }
    }
}

/// The planes of one layer: K (or the latent, or the states), and V.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerViews {
    /// K.
    pub k: PlaneView,
    /// V, if the layout has it.
    pub v: Option<PlaneView>,
}

/// The planes of all layers of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Views {
    /// The planes of each layer.
    pub layers: Vec<LayerViews>,
    /// The process whose memory they are in; None = this one. No thread of this process copies to or
    /// from memory of another one.
    pub origin: Option<Origin>,
}

/// A transfer of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Number of the process's connection.
    pub client: u64,
    /// That process's number of the transfer.
    pub transfer: u64,
}

impl From<Vec<LayerViews>> for Views {
    fn from(layers: Vec<LayerViews>) -> Views {
        Views { layers, origin: None }
    }
}

impl Views {
    /// Name and layer of the first plane that only a device can reach.
    pub fn on_device(&self) -> Option<(&'static str, usize)> {
        let is_in_device = |plane: &PlaneView| plane.memory == Memory::Device;
        self.layers.iter().enumerate().find_map(|(at, layer)| match &layer.v {
            _ if is_in_device(&layer.k) => Some(("K", at)),
            Some(v) if is_in_device(v) => Some(("V", at)),
            _ => None,
        })
    }

    /// Checks them against the layout, for a transfer of `tokens` tokens in `chunks` chunks.
    pub fn check(
        &self,
        layout: &Layout,
        first_layer: usize,
        tokens: u32,
        chunks: u32,
        direction: Direction,
    ) -> Result<()> {
        let side = if direction == Direction::Gather { Side::Source } else { Side::Target };
        for (i, layer) in self.layers.iter().enumerate() {
            let at = first_layer + i;
            let Some(group) = layout.group(at) else {
                fail!(Invalid, "there is no layer {at}: the layout has {}", layout.layers());
            };
            let is_state = group.rule == Rule::State;
            let (count, k_bytes) =
                if is_state { (chunks, group.state_bytes) } else { (tokens, group.k_bytes) };
            check_plane(&layer.k, "K", at, count, k_bytes, side)?;
            let has_v = !is_state && group.v_bytes > 0;
            match &layer.v {
                Some(v) if has_v => check_plane(v, "V", at, count, group.v_bytes, side)?,
                None if !has_v => {}
                Some(_) => fail!(Invalid, "layer {at} has no V in its layout, and a view of it"),
                None => fail!(Invalid, "layer {at}: the view of V is missing"),
            }
        }
        Ok(())
    }
}

fn check_plane(
    plane: &PlaneView,
    name: &str,
    layer: usize,
    tokens: u32,
    token_bytes: u64,
    side: Side,
) -> Result<()> {
    let view = plane.view();
    if view.token_bytes() != token_bytes {
        fail!(
            Invalid,
            "{name} of layer {layer}: heads x bytes of a head are {}, the layout says {token_bytes}",
            view.token_bytes()
        );
    }
    view.span(0, tokens, side)
        .map(|_| ())
        .map_err(|e| e.within(&format!("{name} of layer {layer}")))
}
