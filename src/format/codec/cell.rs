//! Coded cells. Each plane begins with the number of bytes that follow (4 bytes, little-endian), so
//! that planes are found without the record's header. A plane of its original length is plain. A
//! cell that saves no block is written plain.

use crate::base::status::Result;
use crate::format::codec::int8::Quality;
use crate::format::codec::{self, Codec, Shape};
use crate::format::record::blocks_of;

/// Bytes before each plane.
pub const HEAD_BYTES: usize = 4;

/// A plane to encode.
#[derive(Clone, Copy)]
pub struct Plane<'a> {
    /// Layout of its bytes.
    pub shape: Shape,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Upper bound of the bytes that [`encode`] needs for a plane.
pub fn room(codec: Codec, shape: &Shape, raw_bytes: usize) -> usize {
    codec::room(codec, shape, raw_bytes).saturating_add(HEAD_BYTES)
}

/// Encodes a cell into the start of `out`, and puts the stored length of each plane into `lengths`.
/// None if no block is saved, or `out` or `lengths` is too short.
pub fn encode(
    codec: Codec,
    planes: &[Plane<'_>],
    out: &mut [u8],
    lengths: &mut [usize],
) -> Option<Quality> {
    let (mut used, mut raw, mut lost) = (0usize, 0u64, Quality::default());
    for (at, plane) in planes.iter().enumerate() {
        let body = out.get_mut(used.checked_add(HEAD_BYTES)?..)?;
        let (bytes, quality) = codec::encode(codec, &plane.shape, plane.bytes, body)?;
        let head = u32::try_from(bytes).ok()?.to_le_bytes();
        out.get_mut(used..used + HEAD_BYTES)?.copy_from_slice(&head);
        *lengths.get_mut(at)? = HEAD_BYTES + bytes;
        used += HEAD_BYTES + bytes;
        raw += plane.bytes.len() as u64;
        lost.join(&quality);
    }
    (blocks_of(used as u64) < blocks_of(raw)).then_some(lost)
}

/// Finds the planes of a cell that was read in whole blocks, and passes the length of each. False
/// if the bytes are not a coded cell.
pub fn find(cell: &[u8], mut plane: impl FnMut(usize, u64), planes: usize) -> bool {
    let mut rest = cell;
    for at in 0..planes {
        let Some((head, after)) = rest.split_first_chunk::<HEAD_BYTES>() else { return false };
        let bytes = u32::from_le_bytes(*head) as usize;
        let Some((_, after)) = after.split_at_checked(bytes) else { return false };
        plane(at, (HEAD_BYTES + bytes) as u64);
        rest = after;
    }
    let stored = (cell.len() - rest.len()) as u64;
    stored > 0 && blocks_of(stored) == blocks_of(cell.len() as u64)
}

/// Decodes a stored plane; `out` has its original length.
pub fn decode(codec: Codec, shape: &Shape, stored: &[u8], out: &mut [u8]) -> Result<()> {
    codec::decode(codec, shape, stored.get(HEAD_BYTES..).unwrap_or(&[]), out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::codec::int8::Scales;
    use crate::format::segment::BLOCK_BYTES;
    use crate::meta::dtype::Dtype;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { dtype: Dtype::Bytes, row_bytes: 64, scales: Scales::Token };

    fn coded(codec: Codec, raw: &[Vec<u8>]) -> Option<(Vec<u8>, Vec<usize>)> {
        let planes: Vec<_> = raw.iter().map(|bytes| Plane { shape: SHAPE, bytes }).collect();
        let room = raw.iter().map(|bytes| room(codec, &SHAPE, bytes.len())).sum();
        let (mut out, mut lengths) = (vec![0xAA; room], vec![0; raw.len()]);
        encode(codec, &planes, &mut out, &mut lengths)?;
        out.truncate(lengths.iter().sum());
        out.resize(out.len().next_multiple_of(BLOCK_BYTES), 0);
        Some((out, lengths))
    }

    proptest! {
        #[test]
        fn cells_round_trip_or_stay_plain(
            raw in prop::collection::vec(
                (any::<bool>(), 1usize..20_000).prop_map(|(dull, bytes)| {
                    let mut state = bytes as u64;
                    let mut next = || {
                        state = state.wrapping_mul(6364136223846793005).wrapping_add(99);
                        (state >> 56) as u8
                    };
                    (0..bytes).map(|i| if dull { (i / 300) as u8 } else { next() }).collect()
                }),
                1..4,
            ),
        ) {
            let raw: Vec<Vec<u8>> = raw;
            let plain: usize = raw.iter().map(Vec::len).sum();
            let Some((cell, lengths)) = coded(Codec::Lz4, &raw) else { return Ok(()) };
            prop_assert!(cell.len() < plain.next_multiple_of(BLOCK_BYTES));
            let mut found = vec![0; raw.len()];
            prop_assert!(find(&cell, |at, bytes| found[at] = bytes as usize, raw.len()));
            prop_assert_eq!(&found, &lengths);
            let mut from = 0;
            for (plane, bytes) in raw.iter().zip(&found) {
                let mut back = vec![0; plane.len()];
                decode(Codec::Lz4, &SHAPE, &cell[from..from + bytes], &mut back).unwrap();
                prop_assert_eq!(&back, plane);
                from += bytes;
            }
        }

        #[test]
        fn arbitrary_cells_do_not_panic(
            cell in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..9000),
            planes in 0usize..5,
        ) {
            let mut sum = 0;
            let found = find(&cell, |_, bytes| sum += bytes, planes);
            prop_assert!(sum <= cell.len() as u64);
            prop_assert!(!found || blocks_of(sum) == blocks_of(cell.len() as u64));
        }
    }

    #[test]
    fn cells_that_save_no_block_are_not_coded() {
        assert!(coded(Codec::Lz4, &[vec![7; 4000]]).is_none(), "one block either way");
        assert!(coded(Codec::Lz4, &[vec![7; 4097]]).is_some());
        assert!(coded(Codec::Int8, &[vec![7; 40_000]]).is_none(), "bytes are no numbers");
        let mut cell = coded(Codec::Lz4, &[vec![7; 9000], vec![8; 5000]]).unwrap().0;
        assert_eq!(cell.len(), BLOCK_BYTES);
        assert!(!find(&cell, |_, _| (), 0), "no planes");
        cell.extend([0; BLOCK_BYTES]);
        assert!(!find(&cell, |_, _| (), 2), "a block too many");
    }
}
