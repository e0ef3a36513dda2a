//! What is known of one chunk.

use crate::base::zeroed::Zeroable;
use crate::meta::chunks::cells::TIERS;
use crate::meta::index::{NONE, Slot};
use crate::meta::key::Key;

const LIVE: u8 = 1;
const PINNED: u8 = 2;
const HOLES: u8 = 4;
const REJOINED: u8 = 8;

/// How long a chunk is wanted. The table does not know the time: a pin holds
/// until it is taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// What is given up first has a low one.
    pub priority: u8,
    /// Until when, in ns of the caller's clock.
    pub until_ns: u64,
}

/// A chunk to be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewChunk {
    /// Its name.
    pub key: Key,
    /// The number of its namespace, which is part of the key too.
    pub namespace: u32,
    /// The chunk that it continues, or NONE.
    pub parent: Slot,
    /// How many chunks are before it.
    pub position: u32,
    /// How many tokens it has; all, unless it is private.
    pub valid_tokens: u32,
    /// The session that alone may use it, or NONE.
    pub owner: u32,
    /// In its namespace, chunks may leave before those that continue them.
    pub holes: bool,
}

/// A chunk in the table. 64 bytes: a line of the cache.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Chunk {
    pub(super) parent: Slot,
    /// The parent's when the link was made: it may be gone, where holes are allowed.
    pub(super) parent_generation: u32,
    pub(super) children: u32,
    pub(super) generation: u32,
    pub(super) refs: u32,
    pub(super) namespace: u32,
    pub(super) owner: u32,
    pub(super) position: u32,
    /// Marks and readers of its cells that stand for something under way.
    pub(super) moving: u32,
    /// Cells in each tier, and in any.
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
    /// A chunk without cells; nothing refers to it.
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

    /// How many chunks are before it.
    #[inline]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// How many tokens it has.
    #[inline]
    pub fn valid_tokens(&self) -> u32 {
        u32::from(self.valid_tokens)
    }

    /// The number of its namespace.
    #[inline]
    pub fn namespace(&self) -> u32 {
        self.namespace
    }

    /// The session that alone may use it.
    #[inline]
    pub fn owner(&self) -> Option<u32> {
        (self.owner != NONE).then_some(self.owner)
    }

    /// How many chunks of the table continue it.
    #[inline]
    pub fn children(&self) -> u32 {
        self.children
    }

    /// How many hold it.
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

    /// Whether a chunk that was there without it continues it now.
    #[inline]
    pub fn is_rejoined(&self) -> bool {
        self.marks & REJOINED != 0
    }

    /// Which use of its slot this is.
    #[inline]
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// How many of its cells are in each tier.
    #[inline]
    pub fn cells(&self) -> [u16; TIERS] {
        self.cells
    }

    /// How many of its cells are in any tier.
    #[inline]
    pub fn cells_somewhere(&self) -> u16 {
        self.cells_somewhere
    }

    /// Whether a cell of it is on its way, read, or leaving.
    #[inline]
    pub fn is_moving(&self) -> bool {
        self.moving != 0
    }

    /// Whether nobody holds it or is at it; others may continue it.
    pub fn is_free(&self) -> bool {
        self.refs == 0 && self.marks & PINNED == 0 && !self.is_moving()
    }

    /// Whether its KV must stay: it is held or pinned, or others continue it that
    /// are of no use without it.
    #[inline]
    pub fn is_blocked(&self) -> bool {
        self.refs != 0
            || self.marks & PINNED != 0
            || (self.children != 0 && self.marks & HOLES == 0)
    }
}
