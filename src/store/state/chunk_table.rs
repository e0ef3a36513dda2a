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
use crate::meta::chunks::{Cell, Chunks, Shape, StoredForm};
use crate::meta::dtype::Dtype;
use crate::meta::index::Slot;
use crate::meta::layout::{Layout, Planes, Rule};
use crate::tier::device::Piece;

/// Flags of a chunk.
pub mod note {
    /// The host policy has the chunk.
    pub const IN_HOST: u16 = 1;
    /// The disk policy has the chunk.
    pub const IN_DISK: u16 = 2;
    /// Queued for write-back.
    pub const QUEUED: u16 = 4;
    /// A caller waits until it is on disk: admission does not apply.
    pub const FORCED: u16 = 8;
    /// Its memory is freed once it is on disk.
    pub const LEAVES: u16 = 16;
    /// The policy of the last tier was notified that the chunk is referenced.
    pub const HELD: u16 = 32;
    /// Recovered from disk, and not all of it was read yet: it may be damaged.
    pub const UNREAD: u16 = 64;
    /// A later chunk of its path is on disk, or will be, and needs it there.
    pub const BELOW: u16 = 128;
    /// The device policy has the chunk.
    pub const IN_DEVICE: u16 = 256;
    /// The policy was notified that the chunk is pinned.
    pub const PINNED: u16 = 512;
    /// A block found by a remote lookup: its row keeps the remote hint.
    pub const LOCATED: u16 = 1024;
    /// The remote lacks an object of the chunk although it has the last one, which lookups query.
    /// A hint does not keep a put from uploading all objects.
    pub const GAPPED: u16 = 2048;
    /// Queued for write-behind.
    pub const UNWRITTEN: u16 = 4096;
    /// A put of the chunk has begun since its row was added.
    pub const STORED: u16 = 8192;
    /// Counts against its tenant's quota of host memory.
    pub const CHARGED_HOST: u16 = 16384;
    /// Counts against its tenant's quota of the disk.
    pub const CHARGED_DISK: u16 = 32768;
}

/// Cells of a chunk: all, or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All layers.
    All,
    /// The cell of one layer.
    Layer(usize),
}

impl Part {
    /// Whether `layer` is among them.
    pub fn has(self, layer: usize) -> bool {
        self == Part::All || self == Part::Layer(layer)
    }
}

/// Chunks of one layout.
pub struct ChunkTable {
    /// Shapes of its cells.
    pub layout: Layout,
    /// Fingerprint of the layout.
    pub fingerprint: Fingerprint,
    /// Rows of the chunks.
    pub chunks: Chunks,
    /// Namespaces of this layout.
    pub(super) namespaces: u32,
    /// Flags of each chunk; see [`note`].
    pub notes: Zeroed<u16>,
    /// Uses of each chunk since it was added, at most 255.
    pub uses: Zeroed<u8>,
    /// Priority class of the session that stored each chunk.
    pub classes: Zeroed<u8>,
    /// Session that used each chunk last, if policies choose sessions; 0 = none.
    pub users: Zeroed<u64>,
    /// End of each chunk, when it is removed from all tiers; 0 = none.
    pub(super) ends: Zeroed<u64>,
    /// Tenant that stored each chunk first; 0 = none.
    pub(super) owners: Zeroed<u32>,
    /// Number of the last use of each chunk whose tenant has a quota.
    pub(super) turns: Zeroed<u64>,
    /// Piece of device memory of each cell; empty without a device tier.
    pieces: Zeroed<u32>,
}

impl ChunkTable {
    /// A table without chunks.
    pub fn new(layout: &Layout, max_chunks: usize) -> Result<ChunkTable> {
        let layout = layout.clone();
        let (layers, chunk_tokens) = (layout.layers(), layout.chunk_tokens());
        Ok(ChunkTable {
            fingerprint: Fingerprint::of(&layout.encode()),
            layout,
            namespaces: 0,
            chunks: Chunks::new(Shape { layers, chunk_tokens, max_chunks })?,
            notes: Zeroed::new(max_chunks)?,
            uses: Zeroed::new(max_chunks)?,
            classes: Zeroed::new(max_chunks)?,
            users: Zeroed::new(max_chunks)?,
            ends: Zeroed::new(max_chunks)?,
            owners: Zeroed::new(max_chunks)?,
            turns: Zeroed::new(max_chunks)?,
            pieces: Zeroed::new(0)?,
        })
    }

    /// Adds the column of device memory.
    pub(super) fn with_pieces(mut self) -> Result<ChunkTable> {
        let shape = self.chunks.shape();
        self.pieces = Zeroed::new(shape.layers * shape.max_chunks)?;
        Ok(self)
    }

    /// Piece of device memory that the cell has, or had last.
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

    /// Bytes of its tables in use.
    pub(super) fn used_bytes(&self) -> u64 {
        let (most, layers) = (self.chunks.most(), self.chunks.shape().layers);
        let notes = self.notes.front_bytes(most) + self.uses.front_bytes(most);
        let users = self.classes.front_bytes(most) + self.users.front_bytes(most);
        let ends = self.ends.front_bytes(most) + self.turns.front_bytes(most);
        let users = users + ends + self.owners.front_bytes(most);
        self.chunks.used_bytes() + notes + users + self.pieces.front_bytes(most * layers)
    }

    /// Policy id of a chunk.
    pub fn id(&self, slot: Slot) -> u64 {
        self.chunks.id(slot)
    }

    /// Whether a flag is set.
    pub fn has(&self, slot: Slot, note: u16) -> bool {
        self.notes[slot as usize] & note != 0
    }

    /// Sets flags.
    pub fn set(&mut self, slot: Slot, notes: u16) {
        self.notes[slot as usize] |= notes;
    }

    /// Clears flags.
    pub fn clear(&mut self, slot: Slot, notes: u16) {
        self.notes[slot as usize] &= !notes;
    }

    /// Forgets what is noted of a chunk whose row is removed.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.notes[slot as usize] = 0;
        self.uses[slot as usize] = 0;
        // Does not touch pages of a store whose policies do not choose sessions.
        if self.users[slot as usize] != 0 {
            self.users[slot as usize] = 0;
        }
    }

    /// Planes of a cell.
    pub fn planes(&self, cell: Cell) -> Planes {
        self.planes_of(cell.layer, self.valid_tokens(cell.chunk))
    }

    /// Planes of a layer's cell of so many tokens.
    pub(super) fn planes_of(&self, layer: usize, tokens: u32) -> Planes {
        match self.layout.group(layer) {
            Some(group) => group.planes(tokens),
            None => Planes { k_bytes: 0, v_bytes: 0 },
        }
    }

    /// Tokens of a chunk.
    pub(super) fn valid_tokens(&self, slot: Slot) -> u32 {
        self.chunks.chunk(slot).map_or(0, |row| row.valid_tokens())
    }

    /// Whether the cells of a layer are states: one row, whatever the number of tokens.
    pub fn is_state(&self, layer: usize) -> bool {
        self.layout.group(layer).is_some_and(|group| group.rule == Rule::State)
    }

    /// Rows of each plane of a cell: its tokens, or 1 for a state.
    pub fn row_count(&self, cell: Cell) -> u32 {
        if self.is_state(cell.layer) {
            return 1;
        }
        self.valid_tokens(cell.chunk)
    }

    /// Bytes of a layer's cell of a full chunk.
    pub fn full_bytes(&self, layer: usize) -> u64 {
        let group = self.layout.group(layer);
        group.map_or(0, |group| group.planes(self.layout.chunk_tokens()).bytes())
    }

    /// Shapes of a layer's planes for codecs. A state has no rows of tokens and is never coded.
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

    /// Bytes of a cell on disk; for a coded cell, those of its blocks.
    pub fn disk_bytes(&self, cell: Cell, coded: StoredForm) -> u64 {
        match coded.blocks() {
            Some(blocks) => blocks * BLOCK_BYTES as u64,
            None => self.planes(cell).bytes(),
        }
    }

    /// Kinds and lengths of a cell's planes, in their order.
    pub fn stored_planes(&self, cell: Cell) -> impl Iterator<Item = (u16, u64)> {
        let planes = self.planes(cell);
        let first = if self.is_state(cell.layer) { PLANE_STATE } else { PLANE_K };
        [(first, planes.k_bytes), (PLANE_V, planes.v_bytes)]
            .into_iter()
            .filter(|&(_, bytes)| bytes > 0)
    }

    /// Bytes of a chunk in all layers.
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

    /// The header of a chunk's records.
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

    /// Identity that a cell with this coding must have when it is read.
    pub fn identity_of(&self, cell: Cell, coded: StoredForm) -> Identity {
        Identity {
            key: self.chunks.key(cell.chunk).copied().unwrap_or_default(),
            fingerprint: self.fingerprint,
            layer: cell.layer as u32,
            valid_tokens: self.chunks.chunk(cell.chunk).map_or(0, |row| row.valid_tokens()),
            codec: coded.codec(),
        }
    }
}
