//! The row of a chunk in the chunk table.

use crate::base::zeroed::Zeroable;
use crate::meta::chunks::cells::TIERS;
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;

const LIVE: u8 = 1;
const PINNED: u8 = 2;
const HOLES: u8 = 4;
const REJOINED: u8 = 8;

/// A pin. The table knows no time: a pin holds until it is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// Pins with low priorities are dropped first.
    pub priority: u8,
    /// End of the pin, in ns of the caller's clock.
    pub until_ns: u64,
}

/// A chunk to add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewChunk {
    /// Its key.
    pub key: Key,
    /// Number of its namespace, which is part of the key, too.
    pub namespace: u32,
    /// The chunk before it, or NONE.
    pub parent: Slot,
    /// Number of chunks before it.
    pub position: u32,
    /// Valid tokens: those of a full chunk, unless it is private.
    pub valid_tokens: u32,
    /// The only session that may use it, or NONE.
    pub owner: u32,
    /// Whether chunks of its namespace may leave before their children.
    pub holes: bool,
}

/// A row of the chunk table: 64 bytes, a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Chunk {
    pub(super) parent: Slot,
    /// Generation of the parent when the link was made. The parent may have been removed if holes are
    /// allowed.
    pub(super) parent_generation: u32,
    pub(super) children: u32,
    pub(super) generation: u32,
    pub(super) refs: u32,
    pub(super) namespace: u32,
    pub(super) owner: u32,
    pub(super) position: u32,
    /// Readers and in-flight marks of its cells.
    pub(super) moving: u32,
    /// Cells in each tier, and in any tier.
    pub(super) cells: [u16; TIERS],
    pub(super) cells_somewhere: u16,
    pub(super) valid_tokens: u16,
    pub(super) until_ns: u64,
    pub(super) priority: u8,
    marks: u8,
}

const _: () = assert!(size_of::<Chunk>() == 64);

// SAFETY: integers only.
unsafe impl Zeroable for Chunk {}

impl Chunk {
    /// A chunk without cells and references.
    pub(super) fn new(new: &NewChunk, generation: u32, parent_generation: u32) -> Chunk {
        Chunk {
            parent: new.parent,
            parent_generation,
            children: 0,
            generation,
            refs: 0,
            namespace: new.namespace,
            owner: new.owner,
            position: new.position,
            moving: 0,
            cells: [0; TIERS],
            cells_somewhere: 0,
            valid_tokens: new.valid_tokens as u16,
            until_ns: 0,
            priority: 0,
            marks: LIVE | if new.holes { HOLES } else { 0 },
        }
    }

    #[inline]
    pub(super) fn is_live(&self) -> bool {
        self.marks & LIVE != 0
    }

    pub(super) fn set_dead(&mut self) {
        self.marks = 0;
        self.generation = self.generation.wrapping_add(1);
    }

    pub(super) fn set_pin(&mut self, pin: Option<Pin>) {
        let Pin { priority, until_ns } = pin.unwrap_or_default();
        (self.priority, self.until_ns) = (priority, until_ns);
        self.marks = if pin.is_some() { self.marks | PINNED } else { self.marks & !PINNED };
    }

    /// Number of chunks before it.
    #[inline]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Valid tokens.
    #[inline]
    pub fn valid_tokens(&self) -> u32 {
        u32::from(self.valid_tokens)
    }

    /// Number of its namespace.
    #[inline]
    pub fn namespace(&self) -> u32 {
        self.namespace
    }

    /// The only session that may use it.
    #[inline]
    pub fn owner(&self) -> Option<u32> {
        (self.owner != NONE).then_some(self.owner)
    }

    /// Chunks of the table that continue it.
    #[inline]
    pub fn children(&self) -> u32 {
        self.children
    }

    /// References.
    #[inline]
    pub fn refs(&self) -> u32 {
        self.refs
    }

    /// Its pin.
    #[inline]
    pub fn pin(&self) -> Option<Pin> {
        let pin = Pin { priority: self.priority, until_ns: self.until_ns };
        (self.marks & PINNED != 0).then_some(pin)
    }

    pub(super) fn set_rejoined(&mut self) {
        self.marks |= REJOINED;
    }

    /// Whether an older row was linked to it as a child, after it was added.
    #[inline]
    pub fn is_rejoined(&self) -> bool {
        self.marks & REJOINED != 0
    }

    /// Generation of its slot.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Resident cells in each tier.
    #[inline]
    pub fn cells(&self) -> [u16; TIERS] {
        self.cells
    }

    /// Cells that are resident in any tier.
    #[inline]
    pub fn cells_somewhere(&self) -> u16 {
        self.cells_somewhere
    }

    /// Whether a cell of it is in flight, read, or leaving.
    #[inline]
    pub fn is_moving(&self) -> bool {
        self.moving != 0
    }

    /// Whether it has no references, pins, readers or cells in flight. It may have children.
    pub fn is_free(&self) -> bool {
        self.refs == 0 && self.marks & PINNED == 0 && !self.is_moving()
    }

    /// Whether its KV must stay: it is referenced or pinned, or has children that are useless
    /// without it.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        self.refs != 0
            || self.marks & PINNED != 0
            || (self.children != 0 && self.marks & HOLES == 0)
    }
}
