//! Report of a check.

use crate::format::keys::Key;
use crate::format::segment::StoreId;
use crate::tier::disk::fsck::damage::{Damage, DamageKind};

/// A number of cells, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellTotals {
    /// Number of cells.
    pub cells: u64,
    /// Their stored bytes.
    pub bytes: u64,
}

impl CellTotals {
    pub(super) fn add(&mut self, bytes: u64) {
        self.cells += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Live content of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceFound {
    /// Its key.
    pub key: Key,
    /// Chunks with live cells.
    pub chunks: u64,
    /// Live and sound cells.
    pub live: CellTotals,
}

/// A checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointFound {
    /// Its number.
    pub number: u64,
    /// Its length.
    pub bytes: u64,
    /// Whether all frames are sound.
    pub sound: bool,
    /// Whether an opening would use it: it is the newest sound one.
    pub used: bool,
    /// Cells that it lists.
    pub cells: u64,
    /// It may lack records from this number on.
    pub next_record: u64,
}

/// Report of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The random name of the store.
    pub store: StoreId,
    /// Bytes of all files.
    pub bytes: u64,
    /// Number of segments.
    pub segments: u64,
    /// Segments of other stores and versions: left alone.
    pub foreign_segments: u64,
    /// Unfinished files: the next opening removes them.
    pub unfinished: u64,
    /// Records of all kinds.
    pub records: u64,
    /// Records of forgotten cells.
    pub forgets: u64,
    /// Void records.
    pub voids: u64,
    /// Records of kinds that this version does not know.
    pub unknown: u64,
    /// Sound cells that an opening would find.
    pub live: CellTotals,
    /// Sound cells that were dropped, forgotten or replaced.
    pub dead: CellTotals,
    /// Damaged cells.
    pub damaged: CellTotals,
    /// Cells that a checkpoint lists and that could not be checked.
    pub unchecked: CellTotals,
    /// Copies of cells beside the one that counts.
    pub duplicates: u64,
    /// Number of sessions.
    pub sessions: u64,
    /// Bytes of their states.
    pub session_bytes: u64,
    /// Namespaces with live cells, by key.
    pub namespaces: Vec<NamespaceFound>,
    /// Checkpoints, newest first.
    pub checkpoints: Vec<CheckpointFound>,
    /// Damaged places, up to the limit.
    pub damage: Vec<Damage>,
    /// Number of all damaged places.
    pub damages: u64,
}

impl Report {
    /// Whether nothing is damaged.
    pub fn is_clean(&self) -> bool {
        self.damages == 0
    }

    /// Records a damaged place, up to the limit.
    pub(super) fn note(&mut self, most: usize, file: &str, at: [u64; 2], what: DamageKind) {
        self.damages += 1;
        if self.damage.len() < most && self.damage.try_reserve(1).is_ok() {
            let [offset, bytes] = at;
            self.damage.push(Damage { file: file.into(), offset, bytes, what });
        }
    }
}
