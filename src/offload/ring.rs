//! The ring: buffers that a layer's blocks are loaded into, and what is in them.

use crate::base::op::OpRef;
use crate::base::status::Result;
use crate::fail;

/// What a buffer is doing.
#[derive(Default)]
pub(super) enum State {
    /// Nothing is in it.
    #[default]
    Free,
    /// Blocks are coming; none where only a tail was wanted.
    Loading(Option<OpRef>),
    /// All is there, and the engine may be reading it.
    Ready,
}

/// A buffer.
#[derive(Default)]
pub(super) struct Slot {
    pub state: State,
    pub layer: u32,
    /// Blocks in it, ascending.
    pub blocks: Vec<u32>,
    /// Tokens that the layer had in blocks: the position of the tail's first.
    pub stored: u32,
    /// The tail is wanted behind them.
    pub has_tail: bool,
    /// Its tokens, once all is there.
    pub tail_tokens: u32,
}

/// All of them.
pub(super) struct Ring {
    slots: Vec<Slot>,
    slot_bytes: u64,
}

impl Ring {
    pub fn new(buffers: u32, slot_bytes: u64) -> Ring {
        Ring { slots: (0..buffers).map(|_| Slot::default()).collect(), slot_bytes }
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Where a buffer begins, in the offload's memory.
    pub fn at(&self, buffer: u32) -> u64 {
        u64::from(buffer) * self.slot_bytes
    }

    /// Where the tails begin.
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * self.slot_bytes
    }

    pub fn get(&self, buffer: u32) -> Result<&Slot> {
        match self.slots.get(buffer as usize) {
            Some(slot) => Ok(slot),
            None => fail!(Invalid, "buffer {buffer} of {}", self.slots.len()),
        }
    }

    pub fn get_mut(&mut self, buffer: u32) -> Result<&mut Slot> {
        let count = self.slots.len();
        match self.slots.get_mut(buffer as usize) {
            Some(slot) => Ok(slot),
            None => fail!(Invalid, "buffer {buffer} of {count}"),
        }
    }

    /// Takes what loads into it is under way.
    pub fn ops(&mut self) -> impl Iterator<Item = OpRef> {
        self.slots.iter_mut().filter_map(|slot| match std::mem::take(&mut slot.state) {
            State::Loading(op) => op,
            _ => None,
        })
    }
}
