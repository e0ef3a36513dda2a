//! Damage that a check finds: where it is, and what it means.

use crate::format::keys::Key;

/// Kinds of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DamageKind {
    /// One of the two copies of the store's name.
    StoreName,
    /// The header of a segment.
    SegmentHeader,
    /// A segment is not as long as its header says.
    SegmentLength,
    /// Blocks between records that are no records.
    Header,
    /// Blocks after the last record of a segment that are no records.
    Tail,
    /// The bytes of a cell.
    Cell {
        /// The chunk.
        key: Key,
        /// The layer.
        layer: u32,
        /// An opening would find the cell: it was not dropped.
        live: bool,
    },
    /// The header of a checkpoint.
    CheckpointHeader,
    /// A frame of a checkpoint.
    Frame,
    /// A checkpoint lists a cell that no header at that place has.
    Unknown {
        /// The chunk.
        key: Key,
        /// The layer.
        layer: u32,
    },
    /// The file could not be read there.
    Unreadable,
}

/// One damaged place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Name of the file.
    pub file: String,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// Kind of the damage.
    pub what: DamageKind,
}

impl DamageKind {
    /// A stable word for the kind.
    pub fn name(&self) -> &'static str {
        match self {
            DamageKind::StoreName => "store-name",
            DamageKind::SegmentHeader => "segment-header",
            DamageKind::SegmentLength => "segment-length",
            DamageKind::Header => "header",
            DamageKind::Tail => "tail",
            DamageKind::Cell { .. } => "cell",
            DamageKind::CheckpointHeader => "checkpoint-header",
            DamageKind::Frame => "checkpoint-frame",
            DamageKind::Unknown { .. } => "checkpoint-entry",
            DamageKind::Unreadable => "unreadable",
        }
    }

    /// The consequence for users of the store.
    pub fn means(&self) -> &'static str {
        match self {
            DamageKind::StoreName => {
                "one of the two copies of the store's name: the other copy is used, and this one is \
                 rewritten when the store is opened"
            }
            DamageKind::SegmentHeader => "nothing is lost: the segment's records name their store",
            DamageKind::SegmentLength => "data beyond the end of the file is lost",
            DamageKind::Header => {
                "a record's header, or remains of a crash between records: its cells or session \
                 are misses unless a checkpoint has them"
            }
            DamageKind::Tail => {
                "the last record, or a record that a crash left incomplete: it is ignored, and cut \
                 off when the store is opened"
            }
            DamageKind::Cell { live: true, .. } => {
                "reading the cell is a miss: it is computed again"
            }
            DamageKind::Cell { live: false, .. } => {
                "the cell was dropped or replaced: nothing is lost"
            }
            DamageKind::CheckpointHeader | DamageKind::Frame => {
                "the checkpoint is not used: opening reads every header instead"
            }
            DamageKind::Unknown { .. } => {
                "the header of its record is damaged or missing: the cell cannot be checked here, \
                 and is checked when it is read"
            }
            DamageKind::Unreadable => "the contents are unknown: the segment is retained",
        }
    }
}
