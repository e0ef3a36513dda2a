//! Codecs: shorter cells in slow tiers.
//!
//! | code | name | loses | for |
//! |---|---|---|---|
//! | 0 | `none` | nothing | everything |
//! | 1 | `lz4` | nothing | everything; a plane that does not shrink stays plain |
//! | 2 | `int8` | at most half a step of its scale | f32, f16 and bf16 planes of finite numbers |
//!
//! A plane that does not get shorter stays plain, whatever the codec. A lossy codec must be in the
//! recipe of the namespace: changed KV is different KV.

pub mod cell;
pub mod int8;

use crate::base::status::Result;
use crate::fail;
use crate::format::codec::int8::{Quality, Scales};
use crate::meta::dtype::Dtype;

/// An encoding of planes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// Plain.
    #[default]
    None = 0,
    /// LZ4 blocks.
    Lz4 = 1,
    /// One byte a number, and scales.
    Int8 = 2,
}

/// Most bytes of a plane to encode.
pub const MAX_PLANE_BYTES: usize = 1 << 30;

/// Layout of a plane's bytes: rows of numbers, one row a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Type of the numbers.
    pub dtype: Dtype,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Numbers that share a scale.
    pub scales: Scales,
}

impl Codec {
    /// Every codec, by code.
    pub const ALL: [Codec; 3] = [Codec::None, Codec::Lz4, Codec::Int8];

    /// The codec of a code in a file.
    pub fn from_code(code: u8) -> Option<Codec> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Name in specs.
    pub fn name(self) -> &'static str {
        ["none", "lz4", "int8"][self as usize]
    }

    /// Whether decoded bytes may differ.
    pub fn is_lossy(self) -> bool {
        self == Codec::Int8
    }
}

/// Upper bound of the bytes that [`encode`] needs.
pub fn room(codec: Codec, shape: &Shape, raw_bytes: usize) -> usize {
    match codec {
        Codec::None => raw_bytes,
        Codec::Lz4 => lz4_flex::block::get_maximum_output_size(raw_bytes),
        Codec::Int8 => int8::coded_bytes(shape, raw_bytes).max(raw_bytes),
    }
}

/// Encodes a plane into the start of `out`. Returns its length and loss. A plane that the codec
/// cannot encode, or that does not get shorter, is written plain: its length says whether it is
/// coded. None if `out` is too short.
pub fn encode(codec: Codec, shape: &Shape, raw: &[u8], out: &mut [u8]) -> Option<(usize, Quality)> {
    if raw.len() > MAX_PLANE_BYTES || out.len() < room(codec, shape, raw.len()) {
        return None;
    }
    let coded = match codec {
        Codec::None => None,
        Codec::Lz4 => {
            lz4_flex::block::compress_into(raw, out).ok().map(|n| (n, Quality::default()))
        }
        Codec::Int8 if int8::coded_bytes(shape, raw.len()) < raw.len() => {
            let coded = int8::coded_bytes(shape, raw.len());
            int8::encode(shape, raw, out).map(|lost| (coded, lost))
        }
        Codec::Int8 => None,
    };
    if let Some((bytes, lost)) = coded.filter(|&(bytes, _)| bytes < raw.len()) {
        return Some((bytes, lost));
    }
    out.get_mut(..raw.len())?.copy_from_slice(raw);
    Some((raw.len(), Quality::default()))
}

/// Decodes a plane; `out` has its original length. The bytes come from a file and are checked.
pub fn decode(codec: Codec, shape: &Shape, coded: &[u8], out: &mut [u8]) -> Result<()> {
    match codec {
        _ if coded.len() == out.len() => out.copy_from_slice(coded),
        Codec::Lz4 => match lz4_flex::block::decompress_into(coded, out) {
            Ok(bytes) if bytes == out.len() => {}
            _ => {
                fail!(Corrupt, "{} bytes of lz4 do not decode to {} bytes", coded.len(), out.len())
            }
        },
        Codec::Int8 if coded.len() == int8::coded_bytes(shape, out.len()) => {
            int8::decode(shape, coded, out)?;
        }
        _ => fail!(
            Corrupt,
            "{} bytes of {} do not decode to {} bytes",
            coded.len(),
            codec.name(),
            out.len()
        ),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(dtype: Dtype, row_bytes: usize) -> Shape {
        Shape { dtype, row_bytes, scales: Scales::Token }
    }

    proptest! {
        #[test]
        fn lossless_codecs_round_trip(
            bytes in proptest::collection::vec(0u8..4, 0..4000), lz4 in any::<bool>(),
        ) {
            let codec = if lz4 { Codec::Lz4 } else { Codec::None };
            let shape = shape(Dtype::Bytes, 1);
            let mut out = vec![7; room(codec, &shape, bytes.len())];
            let (used, lost) = encode(codec, &shape, &bytes, &mut out).unwrap();
            prop_assert!(used <= bytes.len());
            prop_assert_eq!(lost, Quality::default());
            let mut back = vec![0xAA; bytes.len()];
            decode(codec, &shape, &out[..used], &mut back).unwrap();
            prop_assert_eq!(back, bytes);
        }

        #[test]
        fn arbitrary_bytes_decode_to_the_length_or_fail(
            coded in proptest::collection::vec(any::<u8>(), 0..300), len in 0usize..600, code in 0u8..4,
        ) {
            let mut out = vec![0; len];
            if let Some(codec) = Codec::from_code(code) {
                decode(codec, &shape(Dtype::F16, 32), &coded, &mut out).ok();
            }
        }
    }

    #[test]
    fn planes_that_do_not_shrink_stay_plain() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let noise: Vec<u8> = (0..4096).map(|_| random()).collect();
        for (codec, shape) in
            [(Codec::Lz4, shape(Dtype::Bytes, 1)), (Codec::Int8, shape(Dtype::I8, 64))]
        {
            let mut out = vec![0; room(codec, &shape, noise.len())];
            let (used, lost) = encode(codec, &shape, &noise, &mut out).unwrap();
            assert!(out[..used] == noise && lost == Quality::default(), "{}", codec.name());
            let mut back = vec![0; noise.len()];
            decode(codec, &shape, &out[..used], &mut back).unwrap();
            assert!(back == noise);
            assert!(encode(codec, &shape, &noise, &mut out[..used - 1]).is_none(), "no room");
        }
    }

    #[test]
    fn names_and_codes_are_fixed() {
        for (code, codec) in Codec::ALL.into_iter().enumerate() {
            assert_eq!(Codec::from_code(code as u8), Some(codec));
        }
        assert_eq!(Codec::from_code(3), None);
        assert!(Codec::Int8.is_lossy() && !Codec::Lz4.is_lossy());
        assert_eq!(Codec::Lz4.name(), "lz4");
    }
}
