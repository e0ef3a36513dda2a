//! The ring of buffers that blocks are loaded into, and the tails beside it.

use crate::base::op::OpRef;
use crate::base::status::Result;
use crate::fail;

/// State of a buffer.
#[derive(Default)]
pub(super) enum State {
    /// Empty.
    #[default]
    Free,
    /// A load is in progress; no op if only a tail is loaded.
    Loading(Option<OpRef>),
    /// Loaded; the engine may be reading it.
    Ready,
}

/// A buffer.
#[derive(Default)]
pub(super) struct Slot {
    pub state: State,
    pub layer: u32,
    /// Blocks in the buffer, ascending.
    pub blocks: Vec<u32>,
    /// Tokens that the layer had in blocks: the position of the tail's first token.
    pub stored: u32,
    /// The tail follows the blocks.
    pub has_tail: bool,
    /// Tokens of the tail, once the buffer is loaded.
    pub tail_tokens: u32,
}

/// The buffers.
pub(super) struct Ring {
    slots: Vec<Slot>,
    slot_bytes: u64,
}

impl Ring {
    pub fn new(buffers: u32, slot_bytes: u64) -> Ring {
        Ring { slots: (0..buffers).map(|_| Slot::default()).collect(), slot_bytes }
    }

    /// Number of buffers.
    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Offset of a buffer in the offload's memory.
    pub fn at(&self, buffer: u32) -> u64 {
        u64::from(buffer) * self.slot_bytes
    }

    /// Offset of the tails: bytes of the ring.
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * self.slot_bytes
    }

    pub fn get(&self, buffer: u32) -> Result<&Slot> {
        match self.slots.get(buffer as usize) {
            Some(slot) => Ok(slot),
            None => {
                fail!(Invalid, "buffer {buffer} does not exist: the ring has {}", self.slots.len())
            }
        }
    }

    pub fn get_mut(&mut self, buffer: u32) -> Result<&mut Slot> {
        let count = self.slots.len();
        match self.slots.get_mut(buffer as usize) {
            Some(slot) => Ok(slot),
            None => fail!(Invalid, "buffer {buffer} does not exist: the ring has {count}"),
        }
    }

    /// Takes the ops of loads in progress.
    pub fn ops(&mut self) -> impl Iterator<Item = OpRef> {
        self.slots.iter_mut().filter_map(|slot| match std::mem::take(&mut slot.state) {
            State::Loading(op) => op,
            _ => None,
        })
    }
}

// Tails: the last tokens of a layer, which fill no block. They stay beside the ring, and follow
// the blocks of each load.

/// A layer's tail: rows of K, then of V. There is memory for two tails, so that a truncation can
/// load the new one beside the current one.
#[derive(Default)]
pub(super) struct Tail {
    /// The current tail is the second of the two.
    pub is_second: bool,
    /// Tokens in the tail; a full tail is being put.
    pub tokens: u32,
    /// The put of a full tail. Its rows are valid until it has ended.
    pub leaving: Option<OpRef>,
}
