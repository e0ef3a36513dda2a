//! Resolution of duplicates: which copy of a cell counts, and whether it is sound.
//!
//! A cell has several copies in three cases: compaction failed or was interrupted, a removed
//! segment reappears after a crash, or the cell was dropped and put again. The latest put counts.
//! Among copies of one put, the one written last counts, or its source if that still exists. A
//! segment is removed only once all its live cells are durable elsewhere. So the copy is good if
//! its source was removed. If the source exists, the copy may have failed. After a disk failure nothing
//! is certain: the copy that counts is read, and if it is damaged the next one.

use std::cmp::Reverse;

use crate::base::status::{Error, Result, Status};
use crate::format::checkpoint::CellEntry;
use crate::format::record::{Chunk, blocks_of};
use crate::format::seal::{Identity, Plane};
use crate::format::segment::BLOCK_BYTES;
use crate::tier::disk::batch::{GetPlane, Gets};
use crate::tier::disk::recovered::{Recovered, Row};
use crate::tier::disk::{DiskTier, Spot};

/// One of several copies of a cell: its record (0 = listed by a checkpoint), its segment, and the
/// segment it was copied from.
#[derive(Clone, Copy, Debug)]
pub(super) struct CellCopy {
    pub number: u64,
    pub segment: u64,
    pub from: u64,
}

/// Index of the copy that counts.
pub(super) fn counting_copy(copies: impl Iterator<Item = CellCopy> + Clone) -> Option<usize> {
    let last = copies.clone().enumerate().max_by_key(|(_, copy)| copy.number);
    let (mut counts, mut copy) = last?;
    // Record numbers only decrease, so the loop ends.
    while let Some(source) = copies.clone().enumerate().find(|(_, other)| {
        copy.from != 0 && other.segment == copy.from && other.number < copy.number
    }) {
        (counts, copy) = source;
    }
    Some(counts)
}

/// A cell with several copies: their indices among all places, the copy that counts first.
pub(super) struct Duplicate {
    pub chunk: Chunk,
    pub copies: Vec<usize>,
}

/// A copy of a cell, and its index.
#[derive(Clone, Copy)]
struct Found {
    layer: u32,
    spot: u64,
    /// Equal for copies of the same put.
    born: u64,
    place: usize,
    copy: CellCopy,
}

impl DiskTier {
    /// Keeps one place of every cell; the blocks of the others are dropped. `covered`: the
    /// checkpoint may lack records from this number on.
    pub(super) fn settle(&self, recovered: &mut Recovered, covered: u64) -> Result<()> {
        let (duplicates, mut dropped) = find(recovered, covered)?;
        for Duplicate { chunk, copies } in duplicates {
            let places: Vec<CellEntry> =
                copies.iter().filter_map(|&at| recovered.places.get(at).copied()).collect();
            let right = |place: &CellEntry| self.is_right(&chunk, place).is_ok();
            let counts = places.iter().position(right).unwrap_or(0);
            for (i, &at) in copies.iter().enumerate().filter(|&(i, _)| i != counts) {
                dropped.extend(places.get(i));
                if let Some(place) = recovered.places.get_mut(at) {
                    place.spot = Spot::NONE.0;
                }
            }
        }
        let mut state = self.state.lock();
        for place in dropped {
            let segment = Spot(place.spot).segment();
            state.drop_blocks(segment, blocks_of(place.stored_bytes.into()) as u32);
            // The copy that counts may not have been synced.
            state.supersede(segment);
        }
        Ok(())
    }

    /// Verifies a cell.
    fn is_right(&self, chunk: &Chunk, place: &CellEntry) -> Result<()> {
        let identity = Identity {
            key: chunk.key,
            fingerprint: chunk.fingerprint,
            layer: place.layer,
            valid_tokens: chunk.valid_tokens,
            codec: place.codec,
        };
        let spot = Spot(place.spot);
        let planes = self.planes(spot, &identity, place.seal)?;
        let bytes = blocks_of(place.stored_bytes.into()) * BLOCK_BYTES as u64;
        let buffer = self.staging.scratch(bytes, bytes)?;
        let mut gets = Gets::default();
        gets.cell(spot, identity, place.seal, true);
        let mut at = 0;
        for Plane { kind, id, version, bytes, .. } in planes {
            let Some(address) = buffer.range(at, bytes) else {
                return Err(Error::from(Status::Corrupt));
            };
            gets.plane(GetPlane { kind, id, version, bytes, address });
            at += bytes;
        }
        // SAFETY: the planes are consecutive in a local buffer, which extends to the end of the
        // last block.
        unsafe { self.read(&mut gets) };
        gets.iter().try_for_each(|get| get.result.clone())
    }
}

/// Cells with several copies. Removes places that cannot count.
pub(super) fn find(
    recovered: &mut Recovered,
    covered: u64,
) -> Result<(Vec<Duplicate>, Vec<CellEntry>)> {
    let no_memory = |error: std::collections::TryReserveError| {
        Error::new(Status::NoMem, format!("no memory to resolve duplicates on the disk: {error}"))
    };
    let Recovered { rows, places, .. } = recovered;
    let mut order: Vec<usize> = Vec::new();
    order.try_reserve_exact(rows.len()).map_err(no_memory)?;
    order.extend(0..rows.len());
    let identity = |&at: &usize| rows.get(at).map(|row| (row.chunk.key, row.chunk.fingerprint.0));
    order.sort_unstable_by_key(identity);
    let (mut duplicates, mut dropped, mut cells) = (Vec::new(), Vec::new(), Vec::new());
    for group in order.chunk_by(|a, b| identity(a) == identity(b)) {
        if let [row] = group {
            let cells = rows.get(*row).map_or(&[][..], |row| row.of(places));
            if cells.is_sorted_by(|a, b| a.layer < b.layer) {
                continue;
            }
        }
        cells.clear();
        for row in group.iter().filter_map(|&at| rows.get(at)) {
            cells.try_reserve(row.cells).map_err(no_memory)?;
            cells.extend(found_in(row, places, covered));
        }
        cells.sort_unstable_by_key(|f| (f.layer, Reverse(f.born), Reverse(f.copy.number)));
        let Some(chunk) = group.first().and_then(|&at| rows.get(at)).map(|row| row.chunk) else {
            continue;
        };
        for same in cells.chunk_by(|a, b| a.layer == b.layer).filter(|same| same.len() > 1) {
            let born = same.first().map_or(0, |found| found.born);
            let mut alike: Vec<Found> = Vec::new();
            for found in same {
                let known = alike.iter().any(|other| other.spot == found.spot);
                if found.born == born && !known {
                    alike.push(*found);
                } else if let Some(place) = places.get_mut(found.place) {
                    dropped.push(*place);
                    place.spot = Spot::NONE.0;
                }
            }
            let mut copies: Vec<usize> = alike.iter().map(|found| found.place).collect();
            if let Some(counts) = counting_copy(alike.iter().map(|found| found.copy)) {
                copies[..=counts].rotate_right(1);
            }
            if copies.len() > 1 {
                duplicates.push(Duplicate { chunk, copies });
            }
        }
    }
    Ok((duplicates, dropped))
}

fn found_in(row: &Row, places: &[CellEntry], covered: u64) -> impl Iterator<Item = Found> {
    // Records older than the checkpoint have lost their number: only the checkpoint lists them.
    let born = if row.born < covered { 0 } else { row.born };
    let (number, from) = (row.number, row.from);
    (row.first..).zip(row.of(places)).map(move |(place, &CellEntry { layer, spot, .. })| {
        let copy = CellCopy { number, segment: Spot(spot).segment(), from };
        Found { layer, spot, born, place, copy }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(copies: &[(u64, u64, u64)]) -> Option<usize> {
        let copy = |&(number, segment, from): &(u64, u64, u64)| CellCopy { number, segment, from };
        counting_copy(copies.iter().map(copy))
    }

    #[test]
    fn the_latest_copy_counts_unless_its_source_exists() {
        assert_eq!(counts(&[]), None);
        assert_eq!(counts(&[(5, 1, 0)]), Some(0));
        // The source was removed: the latest copy is good.
        assert_eq!(counts(&[(7, 2, 1), (9, 3, 1)]), Some(1));
        // The source exists: the copies may have failed, or the source is as good.
        assert_eq!(counts(&[(7, 2, 1), (9, 3, 1), (5, 1, 0)]), Some(2));
        // Copies of copies.
        assert_eq!(counts(&[(11, 4, 3), (7, 2, 1), (9, 3, 1)]), Some(2));
        assert_eq!(counts(&[(11, 4, 3), (5, 1, 0)]), Some(0));
        // Cells listed by a checkpoint are older than all records after it.
        assert_eq!(counts(&[(0, 1, 0), (9, 3, 1)]), Some(0));
        assert_eq!(counts(&[(0, 1, 0), (9, 3, 2)]), Some(1));
        // A record that names its own segment as its source.
        assert_eq!(counts(&[(9, 3, 3), (9, 3, 3)]), Some(1));
    }
}
