//! Content of cells in a simulation. It follows from all tokens up to the chunk's end, so that
//! mixed-up KV is detected. The numbers are finite, and some tokens repeat one word, so that codecs
//! compress some cells and not others.

use kvtier::base::random::Random;
use kvtier::format::codec::{Codec, Shape, decode, encode, room};
use kvtier::meta::layout::{Group, Rule};

/// A hash of every prefix of a sequence, by its length less one.
pub fn prefixes(namespace: u32, tokens: &[u32]) -> Vec<u64> {
    let mut mark = u64::from(namespace) + 1;
    let next = |&token: &u32| {
        mark = Random::new(mark ^ u64::from(token) << 32).draw();
        mark
    };
    tokens.iter().map(next).collect()
}

/// Planes of one layer for some tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Planes {
    /// K, or the states.
    pub k: Vec<u8>,
    /// V.
    pub v: Vec<u8>,
}

impl Planes {
    /// Bytes of K and V of `tokens` tokens.
    pub fn lengths(group: &Group, tokens: usize, each: usize) -> (usize, usize) {
        match group.rule {
            Rule::State => (group.state_bytes as usize * tokens.div_ceil(each), 0),
            _ => (group.k_bytes as usize * tokens, group.v_bytes as usize * tokens),
        }
    }

    /// Planes of a layer for tokens with these hashes.
    pub fn of(group: &Group, layer: usize, marks: &[u64], each: usize) -> Planes {
        let fill = |out: &mut Vec<u8>, mark: u64, plane: u64, bytes: u64| {
            let mut random = Random::new(mark ^ (layer as u64) << 8 ^ plane);
            let (end, is_dull) = (out.len() + bytes as usize, mark % 3 > 0);
            let mut word = random.draw();
            while out.len() < end {
                word = if is_dull { word } else { random.draw() };
                // Clear the highest exponent bit of 2-byte and 4-byte numbers, to keep them finite.
                let word = (word & 0xBFFF_BFFF_BFFF_BFFF).to_le_bytes();
                out.extend_from_slice(&word[..(end - out.len()).min(8)]);
            }
        };
        let mut planes = Planes::default();
        if group.rule == Rule::State {
            for marks in marks.chunks(each) {
                fill(&mut planes.k, marks[marks.len() - 1], 3, group.state_bytes);
            }
            return planes;
        }
        for &mark in marks {
            fill(&mut planes.k, mark, 1, group.k_bytes);
            fill(&mut planes.v, mark, 2, group.v_bytes);
        }
        planes
    }
}

/// Limit: how often a cell may be demoted and promoted before it is read.
const MAX_ROUND_TRIPS: u32 = 4;

/// Whether the bytes of a plane are right: unchanged, or coded and decoded one or more times. Each
/// part of `part_bytes` was coded alone.
pub fn is_right(codec: Codec, shape: &Shape, part_bytes: usize, right: &[u8], got: &[u8]) -> bool {
    let parts = || right.chunks(part_bytes.max(1)).zip(got.chunks(part_bytes.max(1)));
    right.len() == got.len()
        && (right == got
            || codec.is_lossy()
                && parts().all(|(right, got)| is_requantized(codec, shape, right, got)))
}

fn is_requantized(codec: Codec, shape: &Shape, right: &[u8], got: &[u8]) -> bool {
    let mut now = right.to_vec();
    let mut coded = vec![0; room(codec, shape, right.len())];
    (0..=MAX_ROUND_TRIPS).any(|_| {
        let same = now == got;
        if let Some((bytes, _)) = encode(codec, shape, &now, &mut coded) {
            let back = decode(codec, shape, &coded[..bytes], &mut now);
            debug_assert!(back.is_ok(), "{back:?}");
        }
        same
    })
}
