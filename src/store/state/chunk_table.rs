//! The chunk table of one layout: shapes of its cells, and the rows of its chunks. Namespaces of
//! equal layouts share one.

use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::format::codec;
use crate::format::codec::int8::Scales;
use crate::format::keys::{Fingerprint, Key};
use crate::format::record;
use crate::format::seal::{Identity, PLANE_K, PLANE_STATE, PLANE_V};
use crate::format::segment::BLOCK_BYTES;
use crate::meta::chunks::{Cell, Chunks, Coded, Shape};
use crate::meta::dtype::Dtype;
use crate::meta::index::Slot;
use crate::meta::layout::{Layout, Planes, Rule};
use crate::store::state::eviction::Part;
use crate::tier::device::Piece;

/// What is noted of a chunk beside its row.
pub mod note {
    /// The policy of the host tier knows it.
    pub const IN_HOST: u16 = 1;
    /// The policy of the disk tier knows it.
    pub const IN_DISK: u16 = 2;
    /// It waits for its turn to be written down.
    pub const QUEUED: u16 = 4;
    /// Someone waits for it to be on disk: no rule of admission keeps it from there.
    pub const FORCED: u16 = 8;
    /// Its memory is given back once it is on disk.
    pub const LEAVES: u16 = 16;
    /// The policy of the last tier was told that it is in use.
    pub const HELD: u16 = 32;
    /// It was found on disk, and not all of that was read yet: it may be damaged.
    pub const UNREAD: u16 = 64;
    /// What continues it is on disk or goes there, and needs it there.
    pub const BELOW: u16 = 128;
    /// The policy of the device tier knows it.
    pub const IN_DEVICE: u16 = 256;
    /// That policy was told that it is pinned.
    pub const PINNED: u16 = 512;
    /// A block that was located: its row stays for what the remote is said to have of it.
    pub const LOCATED: u16 = 1024;
    /// An object of it is not at the remote although the last one is, which is what the remote is
    /// asked for: what is heard of that does not keep a put from sending all of it.
    pub const GAPPED: u16 = 2048;
    /// It waits for its time to be written to the disk.
    pub const UNWRITTEN: u16 = 4096;
}

/// Chunks of one layout.
pub struct ChunkTable {
    /// What its cells are.
    pub layout: Layout,
    /// The layout's fingerprint.
    pub fingerprint: Fingerprint,
    /// The chunks.
    pub chunks: Chunks,
    /// Namespaces of this layout.
    pub(super) spaces: u32,
    /// [`note`] of each chunk.
    pub notes: Zeroed<u16>,
    /// Uses of each chunk since it came, up to 255.
    pub uses: Zeroed<u8>,
    /// The class of who stored it.
    pub classes: Zeroed<u8>,
    /// The session that used each chunk last, where policies choose sessions; 0 = nobody.
    pub users: Zeroed<u64>,
    /// The piece of device memory of each cell that is there; empty without such a tier.
    pieces: Zeroed<u32>,
}

impl ChunkTable {
    /// A board without chunks.
    pub fn new(layout: &Layout, max_chunks: usize) -> Result<ChunkTable> {
        let layout = layout.clone();
        let (layers, chunk_tokens) = (layout.layers(), layout.chunk_tokens());
        Ok(ChunkTable {
            fingerprint: Fingerprint::of(&layout.encode()),
            layout,
            spaces: 0,
            chunks: Chunks::new(Shape { layers, chunk_tokens, max_chunks })?,
            notes: Zeroed::new(max_chunks)?,
            uses: Zeroed::new(max_chunks)?,
            classes: Zeroed::new(max_chunks)?,
            users: Zeroed::new(max_chunks)?,
            pieces: Zeroed::new(0)?,
        })
    }

    /// Cells can be in device memory, too.
    pub(super) fn with_pieces(mut self) -> Result<ChunkTable> {
        let shape = self.chunks.shape();
        self.pieces = Zeroed::new(shape.layers * shape.max_chunks)?;
        Ok(self)
    }

    /// The piece of device memory that a cell has or had last.
    pub(super) fn piece(&self, cell: Cell) -> Piece {
        let at = cell.chunk as usize * self.chunks.shape().layers + cell.layer;
        Piece(self.pieces.get(at).copied().unwrap_or_default())
    }

    pub(super) fn set_piece(&mut self, cell: Cell, piece: Piece) {
        let at = cell.chunk as usize * self.chunks.shape().layers + cell.layer;
        if let Some(one) = self.pieces.get_mut(at) {
            *one = piece.0;
        }
    }

    /// Bytes of its tables that were used so far.
    pub(super) fn used_bytes(&self) -> u64 {
        let (most, layers) = (self.chunks.most(), self.chunks.shape().layers);
        let notes = self.notes.front_bytes(most) + self.uses.front_bytes(most);
        let users = self.classes.front_bytes(most) + self.users.front_bytes(most);
        self.chunks.used_bytes() + notes + users + self.pieces.front_bytes(most * layers)
    }

    /// What policies call a chunk.
    pub fn id(&self, slot: Slot) -> u64 {
        self.chunks.id(slot)
    }

    /// Whether a note is set.
    pub fn has(&self, slot: Slot, note: u16) -> bool {
        self.notes[slot as usize] & note != 0
    }

    /// Sets notes.
    pub fn set(&mut self, slot: Slot, notes: u16) {
        self.notes[slot as usize] |= notes;
    }

    /// Clears notes.
    pub fn clear(&mut self, slot: Slot, notes: u16) {
        self.notes[slot as usize] &= !notes;
    }

    /// The planes of a cell.
    pub fn planes(&self, cell: Cell) -> Planes {
        let tokens = self.chunks.chunk(cell.chunk).map_or(0, |row| row.valid_tokens());
        match self.layout.group(cell.layer) {
            Some(group) => group.planes(tokens),
            None => Planes { k_bytes: 0, v_bytes: 0 },
        }
    }

    /// Whether a layer's cells are states: one row, whatever the chunk's tokens.
    pub fn is_state(&self, layer: usize) -> bool {
        self.layout.group(layer).is_some_and(|group| group.rule == Rule::State)
    }

    /// Bytes of a layer's cell of a full chunk.
    pub fn full_bytes(&self, layer: usize) -> u64 {
        let group = self.layout.group(layer);
        group.map_or(0, |group| group.planes(self.layout.chunk_tokens()).bytes())
    }

    /// What the planes of a layer's cells are to a codec. States have no rows of tokens:
    /// no codec that knows numbers codes them.
    pub fn shapes(&self, layer: usize) -> [codec::Shape; 2] {
        let shape = |dtype, row_bytes: u64, scales| codec::Shape {
            dtype,
            row_bytes: row_bytes as usize,
            scales,
        };
        let bytes = shape(Dtype::Bytes, 1, Scales::Token);
        match self.layout.group(layer) {
            Some(group) if group.rule != Rule::State => [
                shape(group.dtype, group.k_bytes, Scales::Channel),
                shape(group.dtype, group.v_bytes, Scales::Token),
            ],
            _ => [bytes; 2],
        }
    }

    /// Bytes that a cell has on disk; of a coded one those of its blocks.
    pub fn disk_bytes(&self, cell: Cell, coded: Coded) -> u64 {
        match coded.blocks() {
            Some(blocks) => blocks * BLOCK_BYTES as u64,
            None => self.planes(cell).bytes(),
        }
    }

    /// The kinds and lengths of a cell's planes, in their order.
    pub fn stored_planes(&self, cell: Cell) -> impl Iterator<Item = (u16, u64)> {
        let planes = self.planes(cell);
        let first = if self.is_state(cell.layer) { PLANE_STATE } else { PLANE_K };
        [(first, planes.k_bytes), (PLANE_V, planes.v_bytes)]
            .into_iter()
            .filter(|&(_, bytes)| bytes > 0)
    }

    /// Bytes of a chunk, all layers.
    pub fn chunk_bytes(&self, slot: Slot) -> u64 {
        let tokens = self.chunks.chunk(slot).map_or(0, |row| row.valid_tokens());
        self.layout.chunk_bytes(tokens)
    }

    /// Bytes of a part of a chunk.
    pub fn part_bytes(&self, slot: Slot, part: Part) -> u64 {
        match part {
            Part::All => self.chunk_bytes(slot),
            Part::Layer(layer) => self.planes(Cell { chunk: slot, layer }).bytes(),
        }
    }

    /// What a chunk of a namespace is called in records.
    pub fn record_of(&self, slot: Slot, namespace: Key) -> record::Chunk {
        let row = self.chunks.chunk(slot);
        let key_of = |slot| self.chunks.key(slot).copied();
        record::Chunk {
            namespace,
            parent: self.chunks.parent_key(slot).copied().unwrap_or(namespace),
            key: key_of(slot).unwrap_or_default(),
            fingerprint: self.fingerprint,
            position: row.map_or(0, |row| row.position()),
            valid_tokens: row.map_or(0, |row| row.valid_tokens()),
        }
    }

    /// What a cell that is coded like this must be when it is read.
    pub fn identity_of(&self, cell: Cell, coded: Coded) -> Identity {
        Identity {
            key: self.chunks.key(cell.chunk).copied().unwrap_or_default(),
            fingerprint: self.fingerprint,
            layer: cell.layer as u32,
            valid_tokens: self.chunks.chunk(cell.chunk).map_or(0, |row| row.valid_tokens()),
            codec: coded.codec(),
        }
    }
}
