//! Codecs: smaller bytes on the way down to slow tiers.
//!
//! | code | name | loses | for |
//! |---|---|---|---|
//! | 0 | `none` | nothing | everything |
//! | 1 | `lz4` | nothing | everything; what does not get smaller is kept as it is |
//! | 2 | `int8` | at most half a step of its scale | f32, f16 and bf16 planes of finite numbers |
//!
//! Whoever uses a lossy one must have it in the recipe of the namespace: KV that
//! was changed is other KV.

pub mod float;
pub mod int8;

use crate::base::status::Result;
use crate::fail;
use crate::format::codec::int8::{Quality, Scales};
use crate::meta::dtype::Dtype;

/// A way of writing a plane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// As it is.
    #[default]
    None = 0,
    /// LZ4 blocks.
    Lz4 = 1,
    /// One byte a number, and scales.
    Int8 = 2,
}

/// Most bytes of a plane that is coded.
pub const MAX_PLANE_BYTES: usize = 1 << 30;

/// What a plane's bytes are: rows of numbers, a row a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Type of the numbers.
    pub dtype: Dtype,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// What shares a scale.
    pub scales: Scales,
}

impl Codec {
    /// Every codec, in the order of the codes.
    pub const ALL: [Codec; 3] = [Codec::None, Codec::Lz4, Codec::Int8];

    /// The codec of a code from a file.
    pub fn from_code(code: u8) -> Option<Codec> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Its name, as specs write it.
    pub fn name(self) -> &'static str {
        ["none", "lz4", "int8"][self as usize]
    }

    /// Whether what comes back may differ.
    pub fn is_lossy(self) -> bool {
        self == Codec::Int8
    }
}

/// Writes a plane to the end of `out`. The codec that was used: one that cannot
/// do it, or gains nothing, gives way to none. With what was lost.
pub fn encode(
    codec: Codec,
    shape: &Shape,
    raw: &[u8],
    out: &mut Vec<u8>,
) -> Result<(Codec, Quality)> {
    if raw.len() > MAX_PLANE_BYTES {
        fail!(Limit, "a plane of {} bytes, the limit is {MAX_PLANE_BYTES}", raw.len());
    }
    let start = out.len();
    let room = lz4_flex::block::get_maximum_output_size(raw.len())
        .max(int8::coded_bytes(shape, raw.len()));
    if out.try_reserve(room).is_err() {
        fail!(NoMem, "no memory for {room} bytes of a coded plane");
    }
    let lost = match codec {
        Codec::None => None,
        Codec::Lz4 => {
            out.resize(start + room, 0);
            let coded = lz4_flex::block::compress_into(raw, &mut out[start..]).ok();
            out.truncate(start + coded.unwrap_or(0));
            coded.map(|_| Quality::default())
        }
        Codec::Int8 => int8::encode(shape, raw, out),
    };
    match lost {
        Some(lost) if out.len() - start < raw.len() => Ok((codec, lost)),
        _ => {
            out.truncate(start);
            out.extend_from_slice(raw);
            Ok((Codec::None, Quality::default()))
        }
    }
}

/// Reads a plane back: `out` is as long as it was. The bytes come from a file:
/// what does not fit is an error.
pub fn decode(codec: Codec, shape: &Shape, coded: &[u8], out: &mut [u8]) -> Result<()> {
    match codec {
        Codec::None if coded.len() == out.len() => out.copy_from_slice(coded),
        Codec::Lz4 => match lz4_flex::block::decompress_into(coded, out) {
            Ok(bytes) if bytes == out.len() => {}
            _ => fail!(Corrupt, "{} bytes of lz4 do not give {}", coded.len(), out.len()),
        },
        Codec::Int8 if coded.len() == int8::coded_bytes(shape, out.len()) => {
            int8::decode(shape, coded, out)?;
        }
        _ => fail!(Corrupt, "{} bytes of {} do not give {}", coded.len(), codec.name(), out.len()),
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
        fn lossless_codecs_give_back_what_they_got(
            bytes in proptest::collection::vec(0u8..4, 0..4000), lz4 in any::<bool>(),
        ) {
            let wanted = if lz4 { Codec::Lz4 } else { Codec::None };
            let (mut coded, shape) = (vec![7], shape(Dtype::Bytes, 1));
            let (codec, lost) = encode(wanted, &shape, &bytes, &mut coded).unwrap();
            prop_assert!(coded.len() <= 1 + bytes.len());
            prop_assert_eq!(lost, Quality::default());
            let mut back = vec![0xAA; bytes.len()];
            decode(codec, &shape, &coded[1..], &mut back).unwrap();
            prop_assert_eq!(back, bytes);
        }

        #[test]
        fn rubbish_is_an_error_or_something_of_the_right_length(
            coded in proptest::collection::vec(any::<u8>(), 0..300), len in 0usize..600, code in 0u8..4,
        ) {
            let mut out = vec![0; len];
            if let Some(codec) = Codec::from_code(code) {
                decode(codec, &shape(Dtype::F16, 32), &coded, &mut out).ok();
            }
        }
    }

    #[test]
    fn what_cannot_be_coded_is_kept_as_it_is() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let noise: Vec<u8> = (0..4096).map(|_| random()).collect();
        let mut out = Vec::new();
        let (codec, _) = encode(Codec::Lz4, &shape(Dtype::Bytes, 1), &noise, &mut out).unwrap();
        assert_eq!((codec, out == noise), (Codec::None, true));
        out.clear();
        let (codec, _) = encode(Codec::Int8, &shape(Dtype::I8, 64), &noise, &mut out).unwrap();
        assert_eq!((codec, out == noise), (Codec::None, true));
    }

    #[test]
    fn names_and_codes() {
        for (code, codec) in Codec::ALL.into_iter().enumerate() {
            assert_eq!(Codec::from_code(code as u8), Some(codec));
        }
        assert_eq!(Codec::from_code(3), None);
        assert!(Codec::Int8.is_lossy() && !Codec::Lz4.is_lossy());
        assert_eq!(Codec::Lz4.name(), "lz4");
    }
}
