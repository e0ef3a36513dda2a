//! What a check found.

use crate::format::keys::Key;
use crate::format::segment::StoreId;
use crate::tier::disk::fsck::damage::{Damage, What};

/// Cells and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many.
    pub cells: u64,
    /// Their stored bytes.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.cells += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// What lives of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceFound {
    /// Its key.
    pub key: Key,
    /// Chunks of which something lives.
    pub chunks: u64,
    /// Cells that live and are sound.
    pub live: Tally,
}

/// A checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointFound {
    /// Its number.
    pub number: u64,
    /// Its length.
    pub bytes: u64,
    /// All of it is as it was written.
    pub sound: bool,
    /// An opening would use it: it is the newest sound one.
    pub used: bool,
    /// Cells that it lists.
    pub cells: u64,
    /// Records from this number on may be missing in it.
    pub next_record: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The random name of the store.
    pub store: StoreId,
    /// Bytes of all files.
    pub bytes: u64,
    /// Segments.
    pub segments: u64,
    /// Segments of other stores and versions: left alone.
    pub foreign_segments: u64,
    /// Files that were being made: the next opening removes them.
    pub unfinished: u64,
    /// Records of all kinds.
    pub records: u64,
    /// Records that say what was forgotten.
    pub forgets: u64,
    /// Records that hold nothing.
    pub voids: u64,
    /// Records of kinds that this version does not know.
    pub unknown: u64,
    /// Cells that are sound and that an opening would find.
    pub live: Tally,
    /// Cells that are sound and that were dropped, forgotten or replaced.
    pub dead: Tally,
    /// Cells whose bytes are not what they were.
    pub damaged: Tally,
    /// Cells that a checkpoint lists and that could not be checked.
    pub unchecked: Tally,
    /// Copies of cells beside the one that counts.
    pub duplicates: u64,
    /// Sessions that are noted, and the bytes of their content.
    pub sessions: u64,
    /// Those bytes.
    pub session_bytes: u64,
    /// Namespaces that something lives of, by key.
    pub namespaces: Vec<NamespaceFound>,
    /// Checkpoints, newest first.
    pub checkpoints: Vec<CheckpointFound>,
    /// Damaged places, as many as were asked for.
    pub damage: Vec<Damage>,
    /// All damaged places.
    pub damages: u64,
}

impl Report {
    /// Whether everything is as it was written.
    pub fn is_clean(&self) -> bool {
        self.damages == 0
    }

    /// Notes a damaged place, if there is room for one more.
    pub(super) fn note(&mut self, most: usize, file: &str, at: [u64; 2], what: What) {
        self.damages += 1;
        if self.damage.len() < most && self.damage.try_reserve(1).is_ok() {
            let [offset, bytes] = at;
            self.damage.push(Damage { file: file.into(), offset, bytes, what });
        }
    }
}
