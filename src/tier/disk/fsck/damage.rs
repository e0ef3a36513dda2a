//! What a check finds wrong, where, and what it means.

use crate::format::keys::Key;

/// What is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// One of the two blocks that name the store.
    StoreName,
    /// The first block of a segment.
    SegmentHeader,
    /// A segment is not as long as its first block says.
    SegmentLength,
    /// Blocks between records that are none.
    Header,
    /// Blocks behind the last record of a segment that are none.
    Tail,
    /// The bytes of a cell.
    Cell {
        /// The chunk.
        key: Key,
        /// The layer.
        layer: u32,
        /// An opening would find it: it was not dropped.
        live: bool,
    },
    /// The first block of a checkpoint.
    CheckpointHeader,
    /// A frame of a checkpoint.
    Frame,
    /// A checkpoint lists a cell, and there is no header for it at that place.
    Unknown {
        /// The chunk.
        key: Key,
        /// The layer.
        layer: u32,
    },
    /// It could not be read.
    Unreadable,
}

/// One damaged place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// Where in it.
    pub offset: u64,
    /// How long.
    pub bytes: u64,
    /// What it is.
    pub what: What,
}

impl What {
    /// A word for it, which stays as it is.
    pub fn name(&self) -> &'static str {
        match self {
            What::StoreName => "store-name",
            What::SegmentHeader => "segment-header",
            What::SegmentLength => "segment-length",
            What::Header => "header",
            What::Tail => "tail",
            What::Cell { .. } => "cell",
            What::CheckpointHeader => "checkpoint-header",
            What::Frame => "checkpoint-frame",
            What::Unknown { .. } => "checkpoint-entry",
            What::Unreadable => "unreadable",
        }
    }

    /// What it means for whoever uses the store.
    pub fn means(&self) -> &'static str {
        match self {
            What::StoreName => {
                "one of the two copies of the store's name: the other is used, and this one \
                 written anew when the store is opened"
            }
            What::SegmentHeader => "nothing is lost: the segment's records name their store",
            What::SegmentLength => "what was behind the end of the file is lost",
            What::Header => {
                "a record's header, or what a crash left between records: its cells or session \
                 are misses unless a checkpoint has them"
            }
            What::Tail => {
                "the last record, or what a crash left half written: it is passed by, and cut \
                 off when the store is opened"
            }
            What::Cell { live: true, .. } => "reading the cell is a miss: it is computed again",
            What::Cell { live: false, .. } => "the cell was dropped or replaced: nothing is lost",
            What::CheckpointHeader | What::Frame => {
                "the checkpoint is not used: opening reads every header instead"
            }
            What::Unknown { .. } => {
                "the header of its record is damaged or gone: the cell cannot be checked here, \
                 and is checked when it is read"
            }
            What::Unreadable => "what is there is not known: the segment is kept",
        }
    }
}
