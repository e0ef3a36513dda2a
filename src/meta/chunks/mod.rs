//! The chunk table: metadata of all chunks of one layout, their prefix tree, and the cell table. It
//! decides nothing, and rejects invalid changes. A referenced, pinned or needed chunk stays; memory
//! is free only without readers; the second writer of a cell finds the first one's.
//!
//! Memory: [`CHUNK_BYTES`] a chunk, [`CELL_BYTES`] a cell, and the index with 16 bytes a chunk.

mod cells;
mod chunk;
mod lookup;
mod orphans;
mod runs;
mod transitions;

pub use cells::{CELL_BYTES, Location, Residency, StoredForm, TIERS, bit_of};
pub use chunk::{Chunk, NewChunk, Pin};
pub use lookup::WHOLE;
pub use transitions::{Arrival, Begin, Dropped};

use crate::base::budget::Tier;
use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;
use crate::meta::chunks::cells::Cells;
use crate::meta::index::{Index, MAX_ENTRIES, NONE, Slot};
use crate::meta::key::Key;
use crate::meta::layout::{MAX_CHUNK_TOKENS, MAX_LAYERS};
use crate::meta::orphans::Orphans;

/// Bytes for each chunk, without its cells and the index.
pub const CHUNK_BYTES: usize = size_of::<Chunk>() + size_of::<KeyRow>();
/// Most cells of a table.
pub const MAX_CELLS: usize = 1 << 32;
/// Most references to a chunk.
pub const MAX_REFS: u32 = u32::MAX - 1;

/// A key in a column of its own for searches: two fit in a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct KeyRow(Key);

// SAFETY: bytes only.
unsafe impl Zeroable for KeyRow {}

/// Dimensions of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Layers of the model.
    pub layers: usize,
    /// Tokens of a full chunk.
    pub chunk_tokens: u32,
    /// Most chunks.
    pub max_chunks: usize,
}

/// A cell: the part of a chunk that one layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Slot of the chunk.
    pub chunk: Slot,
    /// The layer.
    pub layer: usize,
}

/// Counters of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Chunks in the table.
    pub chunks: u64,
    /// Cells in each tier.
    pub cells: [u64; TIERS],
    /// Cells that are resident in any tier.
    pub cells_somewhere: u64,
    /// Chunks with references.
    pub held: u64,
    /// Reads and transitions in progress, and leaving cells.
    pub moving: u64,
    /// Cells found lost or damaged in each tier, since the start.
    pub lost: [u64; TIERS],
    /// Failed transitions to each tier, since the start.
    pub failed: [u64; TIERS],
}

/// Result of an addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// The chunk is new.
    New(Slot),
    /// The chunk was in the table.
    Existing(Slot),
}

impl Added {
    /// The slot of the chunk.
    pub fn slot(self) -> Slot {
        match self {
            Added::New(slot) | Added::Existing(slot) => slot,
        }
    }
}

/// The chunk table.
pub struct Chunks {
    shape: Shape,
    keys: Zeroed<KeyRow>,
    rows: Zeroed<Chunk>,
    cells: Cells,
    index: Index,
    /// First free slot, chained through `parent`. Slots from `fresh` on were never used.
    free: Slot,
    fresh: Slot,
    counts: Counts,
    orphans: Orphans<Key>,
    /// Whether lookups trust remote hints.
    counts_remote: bool,
}

impl Chunks {
    /// An empty table. All memory is mapped now, and is committed when it is used.
    pub fn new(shape: Shape) -> Result<Chunks> {
        let Shape { layers, chunk_tokens, max_chunks } = shape;
        if !(1..=MAX_LAYERS).contains(&layers) || !(1..=MAX_CHUNK_TOKENS).contains(&chunk_tokens) {
            fail!(
                Invalid,
                "a chunk table of {layers} layers and {chunk_tokens} tokens: 1 to {MAX_LAYERS} and 1 to {MAX_CHUNK_TOKENS} are accepted"
            );
        }
        let cells = layers.checked_mul(max_chunks).filter(|&cells| cells <= MAX_CELLS);
        let Some(cells) = cells.filter(|_| max_chunks <= MAX_ENTRIES) else {
            fail!(
                Limit,
                "{max_chunks} chunks of {layers} cells exceed the limit of {MAX_CELLS} cells"
            );
        };
        Ok(Chunks {
            shape,
            keys: Zeroed::new(max_chunks)?,
            rows: Zeroed::new(max_chunks)?,
            cells: Cells::new(cells)?,
            index: Index::new(max_chunks)?,
            free: NONE,
            fresh: 0,
            counts: Counts::default(),
            orphans: Orphans::default(),
            counts_remote: false,
        })
    }

    /// Its dimensions.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Sets whether lookups trust remote hints.
    pub fn count_remote(&mut self, counts: bool) {
        self.counts_remote = counts;
    }

    /// Whether lookups trust remote hints.
    pub fn counts_remote(&self) -> bool {
        self.counts_remote
    }

    /// The number of chunks.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there is no chunk.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Counters of the table.
    pub fn counts(&self) -> Counts {
        Counts { chunks: self.len() as u64, ..self.counts }
    }

    /// Bytes of a full table of this shape.
    pub fn bytes_of(shape: Shape) -> u64 {
        let chunk = (CHUNK_BYTES as u64).saturating_add(shape.layers as u64 * CELL_BYTES as u64);
        (shape.max_chunks as u64).saturating_mul(chunk.saturating_add(16)).saturating_add(64)
    }

    /// Bytes in use. Rows are used from the front, and reused.
    pub fn used_bytes(&self) -> u64 {
        let most = self.most();
        let rows = self.keys.front_bytes(most) + self.rows.front_bytes(most);
        rows + self.cells.used_bytes(most * self.shape.layers) + self.index.bytes()
    }

    /// The most chunks at any time.
    pub fn most(&self) -> usize {
        self.fresh as usize
    }

    /// The row of a chunk, if the slot is in use.
    #[inline]
    pub fn chunk(&self, slot: Slot) -> Option<&Chunk> {
        self.rows.get(slot as usize).filter(|row| row.is_live())
    }

    /// The key of a chunk.
    #[inline]
    pub fn key(&self, slot: Slot) -> Option<&Key> {
        self.chunk(slot)?;
        Some(&self.keys[slot as usize].0)
    }

    /// The row of a chunk, its key, and that of its parent if it is known.
    pub fn named(&self, slot: Slot) -> Option<(&Chunk, &Key, Option<&Key>)> {
        let row = self.chunk(slot)?;
        let above = match self.chunk_of(row.parent, row.parent_generation) {
            Some(_) => Some(&self.keys[row.parent as usize].0),
            None => self.orphans.above(slot),
        };
        Some((row, &self.keys[slot as usize].0, above))
    }

    /// The row of a chunk, if the slot still has this generation.
    #[inline]
    pub fn chunk_of(&self, slot: Slot, generation: u32) -> Option<&Chunk> {
        self.chunk(slot).filter(|row| row.generation == generation)
    }

    /// The parent of a chunk, if it is in the table.
    pub fn parent(&self, slot: Slot) -> Option<Slot> {
        let Chunk { parent, parent_generation, .. } = *self.chunk(slot)?;
        self.chunk_of(parent, parent_generation).map(|_| parent)
    }

    /// The residency of a chunk's cells, by layer.
    #[inline]
    pub fn marks(&self, slot: Slot) -> Option<&[Residency]> {
        self.chunk(slot)?;
        let from = slot as usize * self.shape.layers;
        self.cells.marks().get(from..from + self.shape.layers)
    }

    /// The location of a cell in a tier, if it is resident there.
    pub fn place(&self, cell: Cell, tier: Tier) -> Result<Option<Location>> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        let is_resident = self.cells.marks()[at].has(bit);
        Ok(is_resident.then(|| self.cells.place_in(at, bit)))
    }

    /// The location of a cell that is being read in a tier, also after it was dropped there.
    pub fn place_read(&self, cell: Cell, tier: Tier) -> Result<Location> {
        let (at, bit) = (self.at(cell)?, bit_of(tier)?);
        if self.cells.readers(at, bit) == 0 {
            fail!(State, "layer {} of chunk {} has no reader in the tier", cell.layer, cell.chunk);
        }
        Ok(self.cells.place_in(at, bit))
    }

    /// The readers of a cell in a tier.
    pub fn readers(&self, cell: Cell, tier: Tier) -> Result<u32> {
        Ok(u32::from(self.cells.readers(self.at(cell)?, bit_of(tier)?)))
    }

    /// The number of a cell. Fails if its chunk or layer does not exist.
    #[inline]
    fn at(&self, cell: Cell) -> Result<usize> {
        if self.chunk(cell.chunk).is_none() || cell.layer >= self.shape.layers {
            fail!(NotFound, "layer {} of chunk {} does not exist", cell.layer, cell.chunk);
        }
        Ok(cell.chunk as usize * self.shape.layers + cell.layer)
    }

    #[inline]
    fn row_mut(&mut self, slot: Slot) -> Result<&mut Chunk> {
        match self.rows.get_mut(slot as usize).filter(|row| row.is_live()) {
            Some(row) => Ok(row),
            None => fail!(NotFound, "chunk {slot} does not exist"),
        }
    }

    /// Adds a chunk without cells, or finds the chunk with its key. A found chunk without a parent
    /// is linked to the given one.
    pub fn add(&mut self, new: &NewChunk) -> Result<Added> {
        if let Some(slot) = self.known(new)? {
            self.join(slot, new.parent);
            return Ok(Added::Existing(slot));
        }
        self.check_new(new)?;
        self.insert(new).map(Added::New)
    }

    /// The slot of a new chunk's key. Fails if the key has other metadata.
    fn known(&self, new: &NewChunk) -> Result<Option<Slot>> {
        let Some(slot) = self.find(&new.key) else { return Ok(None) };
        let row = &self.rows[slot as usize];
        let known = (row.namespace, row.position, row.owner, row.valid_tokens());
        if known != (new.namespace, new.position, new.owner, new.valid_tokens) {
            fail!(Invalid, "key collision: chunk {slot} has this key with other metadata");
        }
        Ok(Some(slot))
    }

    fn insert(&mut self, new: &NewChunk) -> Result<Slot> {
        let recycled = self.free != NONE;
        let slot = if recycled { self.free } else { self.fresh };
        let Some(row) = self.rows.get(slot as usize) else {
            fail!(Limit, "the chunk table is full: it holds {} chunks", self.rows.len());
        };
        let (generation, next) = (row.generation, row.parent);
        let fits = self.index.insert(id_of(&new.key), slot);
        assert!(fits, "as many ids as rows");
        match recycled {
            true => self.free = next,
            false => self.fresh += 1,
        }
        let mut above = 0;
        if let Some(parent) = self.rows.get_mut(new.parent as usize) {
            parent.children += 1;
            above = parent.generation;
        }
        self.rows[slot as usize] = Chunk::new(new, generation, above);
        self.keys[slot as usize] = KeyRow(new.key);
        self.join_orphans(slot);
        Ok(slot)
    }

    fn check_tokens(&self, new: &NewChunk) -> Result<()> {
        let (valid, full) = (new.valid_tokens, self.shape.chunk_tokens);
        if valid == 0 || valid > full || (valid < full && new.owner == NONE) {
            fail!(
                Invalid,
                "a chunk of {valid} tokens: shared chunks have {full}, private ones 1 to {full}"
            );
        }
        Ok(())
    }

    fn check_new(&self, new: &NewChunk) -> Result<()> {
        self.check_tokens(new)?;
        let NewChunk { position, owner, .. } = *new;
        if new.parent == NONE {
            if position > 0 && !new.holes {
                fail!(
                    Invalid,
                    "the chunk at position {position} needs a parent, unless its namespace allows holes"
                );
            }
            return Ok(());
        }
        let Some(above) = self.chunk(new.parent) else {
            fail!(NotFound, "the parent chunk {} does not exist", new.parent);
        };
        if above.namespace != new.namespace || above.position.checked_add(1) != Some(position) {
            fail!(Invalid, "chunk {} is not the chunk before position {position}", new.parent);
        }
        if above.valid_tokens() < self.shape.chunk_tokens
            || (above.owner != NONE && above.owner != owner)
        {
            fail!(
                Invalid,
                "the parent chunk {} is partial, or private to another session",
                new.parent
            );
        }
        Ok(())
    }

    /// Whether a chunk may be removed now.
    pub fn is_removable(&self, slot: Slot) -> bool {
        self.chunk(slot).is_some_and(|row| !row.is_blocked() && !row.is_moving())
    }

    /// Removes a chunk without references, readers and cells in flight. `free` gets each location,
    /// which is free. Returns the parent, if that may be removed now.
    pub fn remove(
        &mut self,
        slot: Slot,
        mut free: impl FnMut(Cell, Location),
    ) -> Result<Option<Slot>> {
        let row = *self.row_mut(slot)?;
        if row.is_blocked() || row.is_moving() {
            fail!(Busy, "chunk {slot} is referenced, pinned, continued or in motion");
        }
        let from = slot as usize * self.shape.layers;
        if row.cells.iter().any(|&cells| cells > 0) {
            for layer in 0..self.shape.layers {
                let marks = self.cells.marks()[from + layer];
                for tier in (0..TIERS).filter(|&tier| marks.has(tier)) {
                    free(Cell { chunk: slot, layer }, self.cells.place_in(from + layer, tier));
                }
            }
            self.cells.clear(from, self.shape.layers);
        }
        for (sum, &cells) in self.counts.cells.iter_mut().zip(&row.cells) {
            *sum -= u64::from(cells);
        }
        self.counts.cells_somewhere -= u64::from(row.cells_somewhere);
        let above = self.parent(slot);
        let id = id_of(&self.keys[slot as usize].0);
        let removed = self.index.remove(id, |s| s == slot);
        assert_eq!(removed, Some(slot), "the index lost a chunk");
        self.orphans.remove(slot);
        let row = &mut self.rows[slot as usize];
        row.set_dead();
        row.parent = std::mem::replace(&mut self.free, slot);
        if let Some(above) = above {
            self.rows[above as usize].children -= 1;
        }
        Ok(above.filter(|&above| self.is_removable(above)))
    }

    /// Adds a reference. Returns how many there are now.
    pub fn retain(&mut self, slot: Slot) -> Result<u32> {
        let row = self.row_mut(slot)?;
        if row.refs == MAX_REFS {
            fail!(Limit, "chunk {slot} has {MAX_REFS} references, the limit");
        }
        row.refs += 1;
        let references = row.refs;
        self.counts.held += u64::from(references == 1);
        Ok(references)
    }

    /// Removes a reference; returns whether the chunk may be removed now.
    pub fn release(&mut self, slot: Slot) -> Result<bool> {
        let row = self.row_mut(slot)?;
        if row.refs == 0 {
            fail!(State, "chunk {slot} has no reference to release");
        }
        row.refs -= 1;
        let is_last = row.refs == 0;
        self.counts.held -= u64::from(is_last);
        Ok(self.is_removable(slot))
    }

    /// Pins a chunk, or raises priority and end of its pin.
    pub fn pin(&mut self, slot: Slot, pin: Pin) -> Result<()> {
        let row = self.row_mut(slot)?;
        let was = row.pin().unwrap_or_default();
        let until_ns = was.until_ns.max(pin.until_ns);
        row.set_pin(Some(Pin { priority: was.priority.max(pin.priority), until_ns }));
        Ok(())
    }

    /// Removes a pin; returns whether the chunk was pinned and may be removed now.
    pub fn unpin(&mut self, slot: Slot) -> Result<bool> {
        let row = self.row_mut(slot)?;
        let was = row.pin().is_some();
        row.set_pin(None);
        Ok(was && self.is_removable(slot))
    }

    /// These chunks and all their descendants, descendants first. Scans the whole table.
    pub fn with_descendants(&self, first: &[Slot]) -> Vec<Slot> {
        const KNOWN: u8 = 1;
        const DESCENDANT: u8 = 2;
        let mut notes = vec![0u8; self.most()];
        let (mut found, mut path) = (Vec::new(), Vec::new());
        for &slot in first {
            if std::mem::replace(&mut notes[slot as usize], KNOWN | DESCENDANT) == 0 {
                found.push(slot);
            }
        }
        for slot in self.slots() {
            let mut next = Some(slot);
            let is_descendant = loop {
                match next {
                    None => break false,
                    Some(at) if notes[at as usize] & KNOWN != 0 => {
                        break notes[at as usize] & DESCENDANT != 0;
                    }
                    Some(at) => {
                        path.push(at);
                        next = self.parent(at);
                    }
                }
            };
            for at in path.drain(..) {
                notes[at as usize] = KNOWN | if is_descendant { DESCENDANT } else { 0 };
                found.extend(is_descendant.then_some(at));
            }
        }
        found.sort_by_key(|&slot| std::cmp::Reverse(self.rows[slot as usize].position));
        found
    }

    /// All slots in use, ascending.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.slots_from(0)
    }

    /// All slots in use from `first` on.
    pub fn slots_from(&self, first: Slot) -> impl Iterator<Item = Slot> + '_ {
        (first..self.fresh).filter(|&slot| self.rows[slot as usize].is_live())
    }
}

/// The index id of a key; a match is compared in full.
#[inline]
pub fn id_of(key: &Key) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = key.0;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
