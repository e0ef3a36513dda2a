//! Checksums of units: computed once, kept in a file beside the model ([`sidecar`]), and
//! compared on demand.
//!
//! Each extent of a unit is cut at multiples of [`BLOCK_BYTES`], counted from the grain in
//! which it starts, so that whoever reads whole blocks has whole sums. A block's sum is the
//! XXH3-64 of those of its bytes that are the extent's. A unit's sum is the XXH3-64 of its
//! blocks' sums, little endian.

use crate::base::checksum::{Xxh3, xxh3};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Mutex;
use crate::fail;
use crate::stream::units::{Extent, GRAIN_BYTES, MAX_UNITS, Units};

pub mod sidecar;

/// Bytes summed together.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Most blocks of a model: 64 TiB of them.
pub const MAX_BLOCKS: usize = 1 << 26;

/// The checksums of a model's units, as far as they are known. Any number of threads may
/// note and verify at once.
pub struct Sums {
    units: Vec<Place>,
    extents: Vec<Cut>,
    /// What the cuts depend on.
    table: [u8; 32],
    known: Mutex<Known>,
}

/// Where a unit's extents are among all, and how many blocks they have.
#[derive(Clone, Copy)]
struct Place {
    extents: (usize, usize),
    blocks: (usize, usize),
}

/// How an extent is cut.
#[derive(Clone, Copy)]
struct Cut {
    offset: u64,
    bytes: u64,
    first_block: usize,
}

struct Known {
    sums: Vec<u64>,
    /// A bit for each block.
    bits: Vec<u64>,
    /// Blocks that are not known, for each unit.
    missing: Vec<u64>,
    /// Changes since it was new or was saved.
    changes: u64,
}

impl Cut {
    fn base(&self) -> u64 {
        self.offset / GRAIN_BYTES * GRAIN_BYTES
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// Which block begins at an offset.
    fn block_at(&self, offset: u64) -> Option<usize> {
        let from = offset.checked_sub(self.base())?;
        let starts = offset == self.offset || from % BLOCK_BYTES == 0;
        (starts && offset >= self.offset && offset < self.end())
            .then(|| self.first_block + (from / BLOCK_BYTES) as usize)
    }

    /// Whether a block ends at an offset.
    fn ends_at(&self, offset: u64) -> bool {
        offset == self.end() || (offset - self.base()) % BLOCK_BYTES == 0
    }
}

/// How many blocks an extent has.
fn blocks_of(extent: &Extent) -> Option<u64> {
    let end = extent.offset.checked_add(extent.bytes)?;
    let base = extent.offset / GRAIN_BYTES * GRAIN_BYTES;
    Some(if extent.bytes == 0 { 0 } else { (end - base).div_ceil(BLOCK_BYTES) })
}

/// What the sums depend on: which bytes are whose, in which order. Not what units are called.
fn table_of(units: &Units) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(b"kvtier units 1");
    hash.update(&(units.units.len() as u64).to_le_bytes());
    for unit in &units.units {
        hash.update(&(unit.extents.len() as u64).to_le_bytes());
        for extent in &unit.extents {
            hash.update(&extent.file.to_le_bytes());
            hash.update(&extent.offset.to_le_bytes());
            hash.update(&extent.bytes.to_le_bytes());
        }
    }
    *hash.finalize().as_bytes()
}

fn filled<T: Clone>(count: usize, with: T) -> Result<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
    out.resize(count, with);
    Ok(out)
}

impl Sums {
    /// No sum of the units of a model is known yet.
    pub fn new(units: &Units) -> Result<Sums> {
        if units.units.len() > MAX_UNITS {
            fail!(Limit, "{} units, {MAX_UNITS} can be", units.units.len());
        }
        let (mut places, mut extents, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        let count = units.units.iter().map(|unit| unit.extents.len()).sum();
        extents.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        let mut blocks = 0usize;
        for unit in &units.units {
            let (first_extent, first_block) = (extents.len(), blocks);
            for extent in &unit.extents {
                let more = blocks_of(extent).filter(|more| *more <= MAX_BLOCKS as u64);
                let cut = Cut { offset: extent.offset, bytes: extent.bytes, first_block: blocks };
                extents.push(cut);
                blocks = blocks.saturating_add(more.map_or(usize::MAX, |more| more as usize));
                if blocks > MAX_BLOCKS {
                    fail!(Limit, "{}: more than {MAX_BLOCKS} blocks to sum", unit.name);
                }
            }
            places.push(Place {
                extents: (first_extent, extents.len()),
                blocks: (first_block, blocks),
            });
            missing.push((blocks - first_block) as u64);
        }
        let (sums, bits) = (filled(blocks, 0)?, filled(blocks.div_ceil(64), 0)?);
        let known = Mutex::new(Known { sums, bits, missing, changes: 0 });
        Ok(Sums { units: places, extents, table: table_of(units), known })
    }

    fn place(&self, unit: u32) -> Result<&Place> {
        match self.units.get(unit as usize) {
            Some(place) => Ok(place),
            None => fail!(Invalid, "unit {unit} of {}", self.units.len()),
        }
    }

    /// The first block of a piece, and the sums of all of its blocks.
    fn sum(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<(usize, Vec<u64>)> {
        let (first, end) = self.place(unit)?.extents;
        let index = first.saturating_add(extent as usize);
        let Some(cut) = self.extents.get(index).filter(|_| index < end) else {
            fail!(Invalid, "extent {extent} of unit {unit}, which has {}", end - first);
        };
        let to = offset.checked_add(bytes.len() as u64).filter(|to| *to <= cut.end());
        let block = cut.block_at(offset);
        let (Some(block), Some(to), false) = (block, to, bytes.is_empty()) else {
            fail!(
                Invalid,
                "{} bytes at {offset} are no whole blocks of extent {extent} of unit {unit}",
                bytes.len()
            );
        };
        if !cut.ends_at(to) {
            fail!(Invalid, "a piece of unit {unit} ends at {to}, inside of a block");
        }
        // The first block is short where the extent does not begin with a grain.
        let skew = (offset - cut.base()) % BLOCK_BYTES;
        let (head, rest) = bytes.split_at(bytes.len().min((BLOCK_BYTES - skew) as usize));
        let mut sums = Vec::new();
        sums.try_reserve_exact(bytes.len() / BLOCK_BYTES as usize + 2)
            .map_err(|_| Status::NoMem)?;
        sums.push(xxh3(head));
        sums.extend(rest.chunks(BLOCK_BYTES as usize).map(xxh3));
        Ok((block, sums))
    }

    /// Takes note of a piece of a unit: sums that are known already are compared, others
    /// are known from now on. The piece has whole blocks, at most from the start to the end
    /// of the extent, and none of the bytes around it.
    pub fn note(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let (first, sums) = self.sum(unit, extent, offset, bytes)?;
        let mut known = self.known.lock();
        for (block, sum) in (first..).zip(sums) {
            match known.get(block) {
                Some(there) if there != sum => return Err(wrong(unit, block - first, offset)),
                Some(_) => {}
                None => known.set(unit, block, sum),
            }
        }
        Ok(())
    }

    /// Compares a piece, as [`Sums::note`] takes it, with what is known.
    /// [`Status::Corrupt`]: it is not what it was; [`Status::State`]: not all of it is known.
    pub fn verify(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let (first, sums) = self.sum(unit, extent, offset, bytes)?;
        let known = self.known.lock();
        for (block, sum) in (first..).zip(sums) {
            match known.get(block) {
                Some(there) if there != sum => return Err(wrong(unit, block - first, offset)),
                Some(_) => {}
                None => fail!(State, "the checksums of unit {unit} are not known yet"),
            }
        }
        Ok(())
    }

    /// Whether all of a unit is known.
    pub fn is_complete(&self, unit: u32) -> bool {
        self.known.lock().missing.get(unit as usize) == Some(&0)
    }

    /// How many units are known.
    pub fn complete_units(&self) -> usize {
        self.known.lock().missing.iter().filter(|missing| **missing == 0).count()
    }

    /// How many sums became known since it was new, loaded or saved.
    pub fn unsaved(&self) -> u64 {
        self.known.lock().changes
    }

    /// The sum of a unit, if all of it is known.
    pub fn sum_of_unit(&self, unit: u32) -> Option<u64> {
        let (first, end) = self.units.get(unit as usize)?.blocks;
        let known = self.known.lock();
        (known.missing.get(unit as usize) == Some(&0)).then(|| {
            let mut sum = Xxh3::default();
            let all = known.sums.get(first..end).unwrap_or_default();
            all.iter().for_each(|block| sum.update(&block.to_le_bytes()));
            sum.finish()
        })
    }
}

impl Known {
    fn get(&self, block: usize) -> Option<u64> {
        let word = self.bits.get(block / 64)?;
        (word >> (block % 64) & 1 == 1).then(|| self.sums.get(block).copied())?
    }

    fn set(&mut self, unit: u32, block: usize, sum: u64) {
        let place = (self.bits.get_mut(block / 64), self.sums.get_mut(block));
        let (Some(word), Some(there)) = place else { return };
        let bit = 1 << (block % 64);
        if *word & bit == 0
            && let Some(missing) = self.missing.get_mut(unit as usize)
        {
            *missing = missing.saturating_sub(1);
            self.changes += 1;
        }
        *word |= bit;
        *there = sum;
    }
}

fn wrong(unit: u32, block: usize, offset: u64) -> Error {
    let text = format!(
        "unit {unit}: block {block} of the piece at {offset} does not match its checksum: the \
         file changed, or the disk or memory is faulty; fetch the model again"
    );
    Error::new(Status::Corrupt, text)
}
