//! Sums in a file. It is read with distrust: whatever is not as it should be, the sums are
//! computed anew; a wrong one is never an error of loading a model.
//!
//! All numbers little endian:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 8 | `KVTSUMS` and a zero |
//! | 8 | 4 | version: 1 |
//! | 12 | 4 | files |
//! | 16 | 8 | units |
//! | 24 | 8 | blocks |
//! | 32 | 32 | BLAKE3 of the table of units |
//! | 64 | 32 each | files: length, time of last write (16), checksum of the ends |
//! | | 1 each 8 units | which units are known |
//! | | 8 each | sums of the blocks; 0 in units that are not known |
//! | | 32 | BLAKE3 of all before |

use std::path::{Path, PathBuf};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::fixed::identity::Identity;
use crate::io::sidecar;
use crate::stream::sums::Sums;
use crate::stream::units::Units;

const MAGIC: [u8; 8] = *b"KVTSUMS\0";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 64;
const FILE_BYTES: usize = 32;
const SEAL_BYTES: usize = 32;

/// Where the sums of a model are unless told otherwise: beside its first file.
pub fn default_path(first_file: &Path) -> PathBuf {
    sidecar::beside(first_file, ".kvtsum")
}

/// The sums of a model: those that its sidecar has, if it fits, else none. With the reason
/// why there are none. Only a lack of memory is an error.
pub fn load_or_new(
    path: &Path,
    units: &Units,
    files: &[Identity],
) -> Result<(Sums, Option<String>)> {
    match load(path, units, files) {
        Ok(sums) => Ok((sums, None)),
        Err(error) if error.status() == Status::NoMem => Err(error),
        Err(error) => Ok((Sums::new(units)?, Some(error.message().to_string()))),
    }
}

/// The sums that a sidecar has; an error says why it is not to be used.
pub fn load(path: &Path, units: &Units, files: &[Identity]) -> Result<Sums> {
    let sums = Sums::new(units)?;
    let bytes = sidecar::read(path, sums.encoded_bytes(files.len()) as u64)?;
    sums.decode(files, &bytes).map_err(|error| error.within(&path.display().to_string()))?;
    Ok(sums)
}

impl Sums {
    /// Writes what is known, in place of what the sidecar had.
    pub fn save(&self, path: &Path, files: &[Identity]) -> Result<()> {
        let (bytes, changes) = self.encode(files)?;
        sidecar::write(path, &bytes)?;
        let mut known = self.known.lock();
        known.changes = known.changes.saturating_sub(changes);
        Ok(())
    }

    fn blocks(&self) -> usize {
        self.units.last().map_or(0, |place| place.blocks.1)
    }

    fn encoded_bytes(&self, files: usize) -> usize {
        let flags = self.units.len().div_ceil(8);
        HEAD_BYTES + files * FILE_BYTES + flags + self.blocks() * 8 + SEAL_BYTES
    }

    /// All before the flags of units: the same for the same model.
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

    /// What is known as bytes, and how many changes are in it.
    pub fn encode(&self, files: &[Identity]) -> Result<(Vec<u8>, u64)> {
        let mut out = Vec::new();
        out.try_reserve_exact(self.encoded_bytes(files.len())).map_err(|_| Status::NoMem)?;
        self.head(files, &mut out);
        let known = self.known.lock();
        for units in known.missing.chunks(8) {
            let bits = units.iter().enumerate().map(|(i, missing)| u8::from(*missing == 0) << i);
            out.push(bits.fold(0, |all, bit| all | bit));
        }
        for (place, missing) in self.units.iter().zip(&known.missing) {
            let sums = known.sums.get(place.blocks.0..place.blocks.1).unwrap_or_default();
            let complete = *missing == 0;
            out.extend(sums.iter().flat_map(|sum| if complete { *sum } else { 0 }.to_le_bytes()));
        }
        let changes = known.changes;
        drop(known);
        let seal = *blake3::hash(&out).as_bytes();
        out.extend(seal);
        Ok((out, changes))
    }

    /// Takes over what is in the bytes of a sidecar, if all of it is sound and for this
    /// model; else nothing.
    pub fn decode(&self, files: &[Identity], bytes: &[u8]) -> Result<()> {
        let mut head = Vec::new();
        let head_bytes = HEAD_BYTES + files.len() * FILE_BYTES;
        head.try_reserve_exact(head_bytes).map_err(|_| Status::NoMem)?;
        self.head(files, &mut head);
        if !bytes.starts_with(&MAGIC) {
            fail!(Corrupt, "these are no checksums of a model");
        }
        if bytes.get(8..12) != Some(&VERSION.to_le_bytes()) {
            fail!(Unsupported, "the checksums are in another version than {VERSION}");
        }
        let Some((body, seal)) = bytes.split_last_chunk::<SEAL_BYTES>() else {
            fail!(Corrupt, "the checksums are cut short");
        };
        if blake3::hash(body).as_bytes() != seal {
            fail!(Corrupt, "the checksums are damaged themselves");
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
        for (unit, place) in (0u32..).zip(&self.units) {
            let byte = flags.get(unit as usize / 8).copied().unwrap_or(0);
            if byte >> (unit % 8) & 1 == 1 {
                let all = sums.get(place.blocks.0..place.blocks.1).unwrap_or_default();
                for (block, sum) in (place.blocks.0..).zip(all) {
                    known.set(unit, block, u64::from_le_bytes(*sum));
                }
            }
        }
        known.changes = 0;
        Ok(())
    }
}

/// Why a sound sidecar is of another model.
fn differs(body: &[u8], head: &[u8]) -> Error {
    let same = |from: usize, to: usize| body.get(from..to) == head.get(from..to);
    let text = if same(0, HEAD_BYTES) {
        "the checksums are of files with another length, time or content"
    } else {
        "the checksums are of a model with other files or units"
    };
    Error::new(Status::State, text)
}
