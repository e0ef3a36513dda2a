//! Checksums of units: computed once, saved in a file beside the model (the sidecar), and compared
//! on demand.
//!
//! Each extent of a unit is divided at multiples of [`BLOCK_BYTES`], counted from its aligned
//! start, so that a read of whole blocks covers whole checksums. The checksum of a block is the
//! XXH3-64 of its bytes that belong to the extent. The checksum of a unit is the XXH3-64 of the
//! checksums of its blocks, little endian.

use std::path::{Path, PathBuf};

use crate::base::checksum::{Xxh3, xxh3};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Mutex;
use crate::fail;
use crate::io::model_files::identity::Identity;
use crate::io::sidecar;
use crate::stream::units::{ALIGN_BYTES, Extent, MAX_UNITS, Units, unknown_unit};

/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Most blocks of a model: 64 TiB.
pub const MAX_BLOCKS: usize = 1 << 26;

/// The known checksums of a model's units. Threads may store and verify concurrently.
pub struct Checksums {
    units: Vec<UnitBlocks>,
    extents: Vec<ExtentBlocks>,
    /// Hash of the extents of all units.
    table: [u8; 32],
    known: Mutex<KnownSums>,
}

/// Ranges of extents and of blocks of a unit.
#[derive(Clone, Copy)]
struct UnitBlocks {
    extents: (usize, usize),
    blocks: (usize, usize),
}

/// An extent, and its first block.
#[derive(Clone, Copy)]
struct ExtentBlocks {
    offset: u64,
    bytes: u64,
    first_block: usize,
}

struct KnownSums {
    sums: Vec<u64>,
    /// A bit for each known block.
    bits: Vec<u64>,
    /// Number of unknown blocks of each unit.
    missing: Vec<u64>,
    /// Checksums added since creation, loading or saving.
    changes: u64,
}

impl ExtentBlocks {
    fn base(&self) -> u64 {
        self.offset / ALIGN_BYTES * ALIGN_BYTES
    }

    fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// The block that begins at an offset.
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

/// Number of blocks of an extent.
fn blocks_of(extent: &Extent) -> Option<u64> {
    let end = extent.offset.checked_add(extent.bytes)?;
    let base = extent.offset / ALIGN_BYTES * ALIGN_BYTES;
    Some(if extent.bytes == 0 { 0 } else { (end - base).div_ceil(BLOCK_BYTES) })
}

/// Hash of the extents of all units, in order. Names of units do not matter.
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

impl Checksums {
    /// Checksums of a model, all unknown.
    pub fn new(units: &Units) -> Result<Checksums> {
        if units.units.len() > MAX_UNITS {
            fail!(Limit, "{} units, the limit is {MAX_UNITS}", units.units.len());
        }
        let (mut unit_blocks, mut extents, mut missing) = (Vec::new(), Vec::new(), Vec::new());
        let count = units.units.iter().map(|unit| unit.extents.len()).sum();
        extents.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        let mut blocks = 0usize;
        for unit in &units.units {
            let (first_extent, first_block) = (extents.len(), blocks);
            for extent in &unit.extents {
                let more = blocks_of(extent).filter(|more| *more <= MAX_BLOCKS as u64);
                let blocks_of_extent = ExtentBlocks {
                    offset: extent.offset,
                    bytes: extent.bytes,
                    first_block: blocks,
                };
                extents.push(blocks_of_extent);
                blocks = blocks.saturating_add(more.map_or(usize::MAX, |more| more as usize));
                if blocks > MAX_BLOCKS {
                    fail!(Limit, "{}: more than {MAX_BLOCKS} blocks to sum", unit.name);
                }
            }
            unit_blocks.push(UnitBlocks {
                extents: (first_extent, extents.len()),
                blocks: (first_block, blocks),
            });
            missing.push((blocks - first_block) as u64);
        }
        let (sums, bits) = (filled(blocks, 0)?, filled(blocks.div_ceil(64), 0)?);
        let known = Mutex::new(KnownSums { sums, bits, missing, changes: 0 });
        Ok(Checksums { units: unit_blocks, extents, table: table_of(units), known })
    }

    fn unit_blocks(&self, unit: u32) -> Result<&UnitBlocks> {
        self.units.get(unit as usize).ok_or_else(|| unknown_unit(unit, self.units.len()))
    }

    /// The first block of a piece, and the checksums of all its blocks.
    fn sum(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<(usize, Vec<u64>)> {
        let (first, end) = self.unit_blocks(unit)?.extents;
        let index = first.saturating_add(extent as usize);
        let Some(blocks_of_extent) = self.extents.get(index).filter(|_| index < end) else {
            fail!(
                Invalid,
                "extent {extent} does not exist: unit {unit} has {} extents",
                end - first
            );
        };
        let to = offset.checked_add(bytes.len() as u64).filter(|to| *to <= blocks_of_extent.end());
        let block = blocks_of_extent.block_at(offset);
        let (Some(block), Some(to), false) = (block, to, bytes.is_empty()) else {
            fail!(
                Invalid,
                "{} bytes at {offset} are no whole blocks of extent {extent} of unit {unit}",
                bytes.len()
            );
        };
        if !blocks_of_extent.ends_at(to) {
            fail!(Invalid, "a piece of unit {unit} ends at {to}, inside a block");
        }
        // The first block is short if the extent does not begin at the alignment.
        let skew = (offset - blocks_of_extent.base()) % BLOCK_BYTES;
        let (head, rest) = bytes.split_at(bytes.len().min((BLOCK_BYTES - skew) as usize));
        let mut sums = Vec::new();
        sums.try_reserve_exact(bytes.len() / BLOCK_BYTES as usize + 2)
            .map_err(|_| Status::NoMem)?;
        sums.push(xxh3(head));
        sums.extend(rest.chunks(BLOCK_BYTES as usize).map(xxh3));
        Ok((block, sums))
    }

    /// Stores the checksums of a piece of a unit, and compares those that are known. The piece
    /// must have whole blocks of the extent and no other bytes.
    pub fn note(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let (first, sums) = self.sum(unit, extent, offset, bytes)?;
        let mut known = self.known.lock();
        for (block, sum) in (first..).zip(sums) {
            match known.get(block) {
                Some(expected) if expected != sum => {
                    return Err(mismatch(unit, block - first, offset));
                }
                Some(_) => {}
                None => known.set(unit, block, sum),
            }
        }
        Ok(())
    }

    /// Compares a piece, as for [`Checksums::note`], with known checksums. [`Status::Corrupt`]:
    /// mismatch; [`Status::State`]: some checksums are unknown.
    pub fn verify(&self, unit: u32, extent: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let (first, sums) = self.sum(unit, extent, offset, bytes)?;
        let known = self.known.lock();
        for (block, sum) in (first..).zip(sums) {
            match known.get(block) {
                Some(expected) if expected != sum => {
                    return Err(mismatch(unit, block - first, offset));
                }
                Some(_) => {}
                None => fail!(State, "the checksums of unit {unit} are not known yet"),
            }
        }
        Ok(())
    }

    /// Whether all checksums of a unit are known.
    pub fn is_complete(&self, unit: u32) -> bool {
        self.known.lock().missing.get(unit as usize) == Some(&0)
    }

    /// Number of units whose checksums are all known.
    pub fn complete_units(&self) -> usize {
        self.known.lock().missing.iter().filter(|missing| **missing == 0).count()
    }

    /// Number of checksums that became known since creation, loading or saving.
    pub fn unsaved(&self) -> u64 {
        self.known.lock().changes
    }

    /// The checksum of a unit, if all its blocks are known.
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

impl KnownSums {
    fn get(&self, block: usize) -> Option<u64> {
        let word = self.bits.get(block / 64)?;
        (word >> (block % 64) & 1 == 1).then(|| self.sums.get(block).copied())?
    }

    fn set(&mut self, unit: u32, block: usize, sum: u64) {
        let unit_blocks = (self.bits.get_mut(block / 64), self.sums.get_mut(block));
        let (Some(word), Some(expected)) = unit_blocks else { return };
        let bit = 1 << (block % 64);
        if *word & bit == 0
            && let Some(missing) = self.missing.get_mut(unit as usize)
        {
            *missing = missing.saturating_sub(1);
            self.changes += 1;
        }
        *word |= bit;
        *expected = sum;
    }
}

fn mismatch(unit: u32, block: usize, offset: u64) -> Error {
    let text = format!(
        "unit {unit}: block {block} of the piece at {offset} does not match its checksum: the \
         file changed, or the disk or memory is faulty; fetch the model again"
    );
    Error::new(Status::Corrupt, text)
}

// The sidecar file. An invalid sidecar is ignored and its checksums are computed again; it is no
// error of loading a model.
//
// Layout, all numbers little endian:
//
// | at | bytes | |
// |---|---|---|
// | 0 | 8 | `KVTSUMS` and a zero |
// | 8 | 4 | version: 1 |
// | 12 | 4 | files |
// | 16 | 8 | units |
// | 24 | 8 | blocks |
// | 32 | 32 | BLAKE3 of the table of units |
// | 64 | 32 each | files: length, time of last write (16), checksum of the ends |
// | | 1 each 8 units | which units are known |
// | | 8 each | sums of the blocks; 0 in units that are not known |
// | | 32 | BLAKE3 of all before |

const MAGIC: [u8; 8] = *b"KVTSUMS\0";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 64;
const FILE_BYTES: usize = 32;
const SEAL_BYTES: usize = 32;

/// The default sidecar of a model: beside its first file.
pub fn default_sidecar(first_file: &Path) -> PathBuf {
    sidecar::beside(first_file, ".kvtsum")
}

/// The checksums in a sidecar. If it cannot be used: no checksums, and the reason. Only lack of
/// memory is an error.
pub fn load_or_new(
    path: &Path,
    units: &Units,
    files: &[Identity],
) -> Result<(Checksums, Option<String>)> {
    match load(path, units, files) {
        Ok(sums) => Ok((sums, None)),
        Err(error) if error.status() == Status::NoMem => Err(error),
        Err(error) => Ok((Checksums::new(units)?, Some(error.message().to_string()))),
    }
}

/// The checksums in a sidecar; an error says why it cannot be used.
pub fn load(path: &Path, units: &Units, files: &[Identity]) -> Result<Checksums> {
    let sums = Checksums::new(units)?;
    let bytes = sidecar::read(path, sums.encoded_bytes(files.len()) as u64)?;
    sums.decode(files, &bytes).map_err(|error| error.within(&path.display().to_string()))?;
    Ok(sums)
}

impl Checksums {
    /// Writes the known checksums, and replaces the sidecar.
    pub fn save(&self, path: &Path, files: &[Identity]) -> Result<()> {
        let (bytes, changes) = self.encode(files)?;
        sidecar::write(path, &bytes)?;
        let mut known = self.known.lock();
        known.changes = known.changes.saturating_sub(changes);
        Ok(())
    }

    fn blocks(&self) -> usize {
        self.units.last().map_or(0, |unit_blocks| unit_blocks.blocks.1)
    }

    fn encoded_bytes(&self, files: usize) -> usize {
        let flags = self.units.len().div_ceil(8);
        HEAD_BYTES + files * FILE_BYTES + flags + self.blocks() * 8 + SEAL_BYTES
    }

    /// The bytes before the flags of units: the same for the same model.
    fn head(&self, files: &[Identity], out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend((files.len() as u32).to_le_bytes());
        out.extend((self.units.len() as u64).to_le_bytes());
        out.extend((self.blocks() as u64).to_le_bytes());
        out.extend(self.table);
        for file in files {
            out.extend(file.bytes.to_le_bytes());
            out.extend(file.modified_ns.to_le_bytes());
            out.extend(file.ends.to_le_bytes());
        }
    }

    /// The known checksums as bytes, and the number of changes among them.
    pub fn encode(&self, files: &[Identity]) -> Result<(Vec<u8>, u64)> {
        let mut out = Vec::new();
        out.try_reserve_exact(self.encoded_bytes(files.len())).map_err(|_| Status::NoMem)?;
        self.head(files, &mut out);
        let known = self.known.lock();
        for units in known.missing.chunks(8) {
            let bits = units.iter().enumerate().map(|(i, missing)| u8::from(*missing == 0) << i);
            out.push(bits.fold(0, |all, bit| all | bit));
        }
        for (unit_blocks, missing) in self.units.iter().zip(&known.missing) {
            let sums =
                known.sums.get(unit_blocks.blocks.0..unit_blocks.blocks.1).unwrap_or_default();
            let complete = *missing == 0;
            out.extend(sums.iter().flat_map(|sum| if complete { *sum } else { 0 }.to_le_bytes()));
        }
        let changes = known.changes;
        drop(known);
        let seal = *blake3::hash(&out).as_bytes();
        out.extend(seal);
        Ok((out, changes))
    }

    /// Takes over the checksums of a sidecar, if all of it is valid and for this model.
    pub fn decode(&self, files: &[Identity], bytes: &[u8]) -> Result<()> {
        let mut head = Vec::new();
        let head_bytes = HEAD_BYTES + files.len() * FILE_BYTES;
        head.try_reserve_exact(head_bytes).map_err(|_| Status::NoMem)?;
        self.head(files, &mut head);
        if !bytes.starts_with(&MAGIC) {
            fail!(Corrupt, "the file has no checksums of a model");
        }
        if bytes.get(8..12) != Some(&VERSION.to_le_bytes()) {
            fail!(Unsupported, "the checksums have another version than {VERSION}");
        }
        let Some((body, seal)) = bytes.split_last_chunk::<SEAL_BYTES>() else {
            fail!(Corrupt, "the checksum file is truncated");
        };
        if blake3::hash(body).as_bytes() != seal {
            fail!(Corrupt, "the checksum file is damaged");
        }
        if bytes.len() != self.encoded_bytes(files.len()) || !body.starts_with(&head) {
            return Err(differs(body, &head));
        }
        let (flags, sums) = body
            .get(head_bytes..)
            .and_then(|rest| rest.split_at_checked(self.units.len().div_ceil(8)))
            .ok_or(Status::Corrupt)?;
        let (sums, _) = sums.as_chunks::<8>();
        let mut known = self.known.lock();
        for (unit, unit_blocks) in (0u32..).zip(&self.units) {
            let byte = flags.get(unit as usize / 8).copied().unwrap_or(0);
            if byte >> (unit % 8) & 1 == 1 {
                let all = sums.get(unit_blocks.blocks.0..unit_blocks.blocks.1).unwrap_or_default();
                for (block, sum) in (unit_blocks.blocks.0..).zip(all) {
                    known.set(unit, block, u64::from_le_bytes(*sum));
                }
            }
        }
        known.changes = 0;
        Ok(())
    }
}

/// Why a valid sidecar is not for this model.
fn differs(body: &[u8], head: &[u8]) -> Error {
    let same = |from: usize, to: usize| body.get(from..to) == head.get(from..to);
    let text = if same(0, HEAD_BYTES) {
        "the checksums are of files with another length, time or content"
    } else {
        "the checksums are of a model with other files or units"
    };
    Error::new(Status::State, text)
}
