//! Messages beside the calls: transfers that a client submits, copies that it must make, and outcomes.

use crate::base::status::{Error, Result, Status};
use crate::meta::key::Key;
use crate::store::pool::calls::Lane;
use crate::store::pool::wire::{Bytes, SessionId, Wire, wire_enum, wire_struct};
use crate::store::state::{Level, TransferKind, Wanted};

/// First byte of a client's message: a submission; numbers up to [`LAST_CALL`] are calls.
pub const SUBMIT: u8 = 0;
/// Largest number of a call.
pub const LAST_CALL: u8 = 199;
/// Copies were made. No answer.
pub const DONE: u8 = 200;
/// Copies were made; the answer has the outcomes of transfers that have ended by that.
pub const DONE_NOW: u8 = 201;
/// Cancels a transfer. No answer.
pub const CANCEL: u8 = 202;

/// First byte of a server's notice: copies to make.
pub const COPIES: u8 = 1;
/// A transfer, or a part of it, has ended.
pub const ENDED: u8 = 2;

/// A transfer that a client submits.
pub struct Submission {
    /// The client's number of it.
    pub transfer: u64,
    /// On behalf of this session.
    pub session: SessionId,
    /// Direction.
    pub kind: TransferKind,
    /// When a put completes.
    pub level: Level,
    /// Urgency.
    pub lane: Lane,
    /// What is moved.
    pub what: What,
}

/// What a submission moves.
pub enum What {
    /// Cells of the session.
    Cells {
        /// First token, and number of tokens.
        tokens: (u64, u64),
        /// First layer, and number of layers.
        layers: (usize, usize),
        /// Each layer completes by itself.
        by_layer: bool,
        /// Which of them.
        wanted: Wanted,
    },
    /// Blocks.
    Blocks {
        /// Their keys.
        keys: Vec<Key>,
        /// First layer, and number of layers.
        layers: (usize, usize),
    },
    /// Nothing: a remote lookup of the session.
    Locate,
    /// Nothing: a remote lookup of blocks.
    LocateBlocks(Vec<Key>),
}

/// Copies that the client must make.
pub struct Copies {
    /// Number that its report names.
    pub batch: u64,
    /// Each copy.
    pub items: Vec<CopyOrder>,
}

/// One copy of one plane of a cell.
pub struct CopyOrder {
    /// The client's number of the transfer.
    pub transfer: u64,
    /// Index of the layer in the transfer's views.
    pub layer: u32,
    /// The V plane.
    pub is_v: bool,
    /// From the store to the client.
    pub to_client: bool,
    /// The target is not read soon.
    pub past_caches: bool,
    /// First token in the views.
    pub first: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// Place in the shared memory.
    pub offset: u64,
}

/// A transfer, or a part of it, has ended.
pub struct Ended {
    /// The client's number of it.
    pub transfer: u64,
    /// The part.
    pub part: u32,
    /// All parts have ended.
    pub last: bool,
    /// Why it failed.
    pub error: Option<Error>,
    /// Its value.
    pub tokens: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Status of each chunk, where they were wanted.
    pub outcomes: Vec<Status>,
}

wire_struct!(Submission {
    transfer: u64,
    session: SessionId,
    kind: TransferKind,
    level: Level,
    lane: Lane,
    what: What,
});
wire_struct!(Copies { batch: u64, items: Vec<CopyOrder> });
wire_struct!(CopyOrder {
    transfer: u64,
    layer: u32,
    is_v: bool,
    to_client: bool,
    past_caches: bool,
    first: u32,
    tokens: u32,
    offset: u64,
});
wire_struct!(Ended {
    transfer: u64, part: u32, last: bool, error: Option<Error>, tokens: u64, bytes: u64,
    outcomes: Vec<Status>,
});
wire_enum!(TransferKind: TransferKind::Put, TransferKind::Get, TransferKind::Prefetch);
wire_enum!(Level: Level::Ram, Level::Disk, Level::Durable, Level::Remote);

impl Wire for Status {
    const LEAST_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        self.code().put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<Status> {
        Ok(Status::from_code(i32::take(from)?).unwrap_or(Status::Io))
    }
}

impl Wire for Wanted {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Wanted::All => 0u8.put(out),
            Wanted::Needed => 1u8.put(out),
            Wanted::Chunks(chunks) => {
                2u8.put(out);
                chunks.put(out);
            }
        }
    }
    fn take(from: &mut Bytes<'_>) -> Result<Wanted> {
        match u8::take(from)? {
            0 => Ok(Wanted::All),
            1 => Ok(Wanted::Needed),
            2 => Ok(Wanted::Chunks(Wire::take(from)?)),
            other => crate::fail!(Corrupt, "{other} is no choice of cells"),
        }
    }
}

impl Wire for What {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            What::Cells { tokens, layers, by_layer, wanted } => {
                0u8.put(out);
                (*tokens, *layers, *by_layer).put(out);
                wanted.put(out);
            }
            What::Blocks { keys, layers } => {
                1u8.put(out);
                keys.put(out);
                layers.put(out);
            }
            What::Locate => 2u8.put(out),
            What::LocateBlocks(keys) => {
                3u8.put(out);
                keys.put(out);
            }
        }
    }
    fn take(from: &mut Bytes<'_>) -> Result<What> {
        match u8::take(from)? {
            0 => {
                let (tokens, layers, by_layer, wanted) = Wire::take(from)?;
                Ok(What::Cells { tokens, layers, by_layer, wanted })
            }
            1 => Ok(What::Blocks { keys: Wire::take(from)?, layers: Wire::take(from)? }),
            2 => Ok(What::Locate),
            3 => Ok(What::LocateBlocks(Wire::take(from)?)),
            other => crate::fail!(Corrupt, "{other} is no kind of transfer"),
        }
    }
}
