//! Headers of the disk tier: the first block of a segment, and the file with the store's id.

use crate::base::checksum::xxh3;
use crate::format::fields::{array_at, put, put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};

/// Alignment of everything on disk, in bytes.
pub const BLOCK_BYTES: usize = 4096;
/// Version of the format.
pub const VERSION: u16 = 1;
/// Blocks of the store file: two copies, so that one flipped bit does not lose the store.
pub const STORE_BLOCKS: usize = 2;

/// The random id of a store.
pub type StoreId = [u8; 16];

const SEGMENT_MAGIC: &[u8; 4] = b"KVTS";
const STORE_MAGIC: &[u8; 4] = b"KVTD";
const SUM_AT: usize = BLOCK_BYTES - 8;

/// Why a header is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// Its checksum or a field is wrong.
    Damaged,
    /// It is intact but of another version of the format.
    Version(u16),
}

/// The first block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Id of the store.
    pub store: StoreId,
    /// Its number.
    pub number: u64,
    /// Blocks of the segment, the header included.
    pub blocks: u32,
    /// The file was another segment before: blocks that were not written have that one's bytes.
    pub is_reused: bool,
}

/// Contents of the store file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreHeader {
    /// Id of the store.
    pub store: StoreId,
    /// Bytes of its segments when it was made.
    pub segment_bytes: u64,
}

/// Writes the checksum to the end of a block.
pub fn sign(block: &mut [u8]) {
    let Some(at) = block.len().checked_sub(8) else { return };
    let sum = xxh3(&block[..at]);
    put_u64(block, at, sum);
}

/// Whether the checksum of a block is right.
pub fn is_signed(block: &[u8]) -> bool {
    match block.len().checked_sub(8) {
        Some(at) => xxh3(&block[..at]) == u64_at(block, at),
        None => false,
    }
}

fn check<'a>(bytes: &'a [u8], magic: &[u8; 4]) -> Result<&'a [u8], HeaderError> {
    let block = bytes.get(..BLOCK_BYTES).ok_or(HeaderError::Damaged)?;
    if &array_at::<4>(block, 0) != magic || !is_signed(block) {
        return Err(HeaderError::Damaged);
    }
    match u16_at(block, 4) {
        VERSION => Ok(block),
        other => Err(HeaderError::Version(other)),
    }
}

impl SegmentHeader {
    /// Encodes it into a block.
    pub fn encode(&self, block: &mut [u8; BLOCK_BYTES]) {
        block.fill(0);
        put(block, 0, SEGMENT_MAGIC);
        put_u16(block, 4, VERSION);
        put_u32(block, 8, BLOCK_BYTES as u32);
        put_u32(block, 12, self.blocks);
        put(block, 16, &self.store);
        put_u64(block, 32, self.number);
        put_u16(block, 40, self.is_reused.into());
        sign(block);
    }

    /// Decodes a block.
    pub fn decode(bytes: &[u8]) -> Result<SegmentHeader, HeaderError> {
        let block = check(bytes, SEGMENT_MAGIC)?;
        if u32_at(block, 8) != BLOCK_BYTES as u32 {
            return Err(HeaderError::Damaged);
        }
        Ok(SegmentHeader {
            store: array_at(block, 16),
            number: u64_at(block, 32),
            blocks: u32_at(block, 12),
            is_reused: u16_at(block, 40) != 0,
        })
    }
}

impl StoreHeader {
    /// Encodes the file.
    pub fn encode(&self, file: &mut [u8; STORE_BLOCKS * BLOCK_BYTES]) {
        file.fill(0);
        let (block, copy) = file.split_at_mut(BLOCK_BYTES);
        put(block, 0, STORE_MAGIC);
        put_u16(block, 4, VERSION);
        put_u32(block, 8, BLOCK_BYTES as u32);
        put(block, 16, &self.store);
        put_u64(block, 32, self.segment_bytes);
        sign(block);
        copy.copy_from_slice(block);
    }

    /// Decodes the file: its first intact copy.
    pub fn decode(bytes: &[u8]) -> Result<StoreHeader, HeaderError> {
        let mut error = HeaderError::Damaged;
        for copy in bytes.chunks(BLOCK_BYTES).take(STORE_BLOCKS) {
            match check(copy, STORE_MAGIC) {
                Ok(block) if u32_at(block, 8) == BLOCK_BYTES as u32 => {
                    let segment_bytes = u64_at(block, 32);
                    return Ok(StoreHeader { store: array_at(block, 16), segment_bytes });
                }
                Ok(_) => {}
                Err(HeaderError::Damaged) => {}
                Err(version) => error = version,
            }
        }
        Err(error)
    }
}

// `docs/internals/formats.md` defines this offset.
const _: () = assert!(SUM_AT == 4088);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_every_flipped_bit_is_detected() {
        let header = SegmentHeader { store: [3; 16], number: 77, blocks: 16384, is_reused: true };
        let mut block = [0; BLOCK_BYTES];
        header.encode(&mut block);
        assert_eq!(SegmentHeader::decode(&block), Ok(header));
        for bit in 0..BLOCK_BYTES * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&block), Err(HeaderError::Damaged), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(SegmentHeader::decode(&block[..4095]), Err(HeaderError::Damaged));
    }

    #[test]
    fn the_store_file_survives_damage_to_one_copy() {
        let header = StoreHeader { store: [9; 16], segment_bytes: 64 << 20 };
        let mut file = [0; STORE_BLOCKS * BLOCK_BYTES];
        header.encode(&mut file);
        for at in (0..file.len()).step_by(7) {
            file[at] ^= 0x10;
            assert_eq!(StoreHeader::decode(&file), Ok(header));
            file[at] ^= 0x10;
        }
        file[100] ^= 1;
        file[BLOCK_BYTES + 100] ^= 1;
        assert_eq!(StoreHeader::decode(&file), Err(HeaderError::Damaged));
        assert_eq!(StoreHeader::decode(&[]), Err(HeaderError::Damaged));
    }

    #[test]
    fn another_version_is_reported() {
        let mut block = [0; BLOCK_BYTES];
        let header = SegmentHeader { store: [3; 16], number: 1, blocks: 2, is_reused: false };
        header.encode(&mut block);
        block[4] = 2;
        sign(&mut block);
        assert_eq!(SegmentHeader::decode(&block), Err(HeaderError::Version(2)));
    }
}
