//! Conversion of numbers between dtypes.

use kvtier::device::call::{Call, Kind};
use kvtier::format::codec::int8::{Scales, coded_bytes, decode, encode};
use kvtier::format::codec::{Shape, int8};
use kvtier::meta::dtype::Dtype;
use proptest::prelude::*;

use super::{Chance, at, run, to};
use crate::plain::numbers::{greatest, of_code, read, size, to_code, write};

const ALL: [Dtype; 6] =
    [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F8E4m3, Dtype::F8E5m2, Dtype::I8];

/// Numbers of some tokens, where each is on both sides.
#[derive(Clone, Debug)]
struct Plane {
    from: Dtype,
    to: Dtype,
    tokens: usize,
    heads: usize,
    dim: usize,
    /// Bytes more than needed from a head to the next, in numbers.
    gap: usize,
    /// The first number is so many numbers into its memory.
    shift: usize,
    /// Tokens of a block, where the source is in blocks.
    block: Option<usize>,
    first: usize,
}

impl Plane {
    fn row(&self, token: usize, head: usize) -> usize {
        (token * self.heads + head) * (self.dim + self.gap) + self.shift
    }

    fn numbers(&self, tokens: usize) -> usize {
        self.row(tokens, 0) + self.shift
    }

    /// Where the token is in the source: blocks lie there from the last to the first.
    fn place(&self, token: usize) -> usize {
        let Some(block) = self.block else { return token };
        let (at, blocks) = (self.first + token, (self.first + self.tokens).div_ceil(block));
        (blocks - 1 - at / block) * block + at % block
    }

    fn places(&self) -> usize {
        self.block.map_or(self.tokens, |block| (self.first + self.tokens).div_ceil(block) * block)
    }

    /// Runs it over a source; what is written, with 0xEE where nothing is.
    fn convert(&self, source: &[u8], scaling: u32, scales: &mut [f32], flags: u32) -> Vec<u8> {
        let (from, into) = (size(self.from), size(self.to));
        let mut words =
            vec![0xEEEE_EEEE_EEEE_EEEE_u64; (self.numbers(self.tokens) * into).div_ceil(8)];
        let stride = |size: usize| (size * (self.dim + self.gap)) as i64;
        let mut call = Call {
            kind: Kind::Convert as u32,
            dtype: self.from.code(),
            other_dtype: self.to.code(),
            scaling,
            flags,
            keys: at(source) + (self.shift * from) as u64,
            key_stride: stride(from) * self.heads as i64,
            key_head_stride: stride(from),
            out: to(&mut words) + (self.shift * into) as u64,
            out_stride: stride(into) * self.heads as i64,
            out_head_stride: stride(into),
            scales: if scaling == 0 { 0 } else { to(scales) },
            count: self.tokens as u32,
            key_heads: self.heads as u32,
            key_dim: self.dim as u32,
            ..Call::default()
        };
        let mut table = Vec::new();
        if let Some(block) = self.block {
            let blocks = self.places() / block;
            let bytes = self.heads * (self.dim + self.gap) * from * block;
            table.extend((0..blocks).map(|i| at(source) + ((blocks - 1 - i) * bytes) as u64));
            (call.table, call.page_tokens, call.first) =
                (at(&table), block as u32, self.first as u32);
            call.keys = (self.shift * from) as u64;
        }
        run(&call);
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Bytes that the conversion must write.
    fn expected(
        &self,
        source: &[u8],
        len: usize,
        by: impl Fn(usize, usize, usize) -> f32,
    ) -> Vec<u8> {
        let mut out = vec![0xEE; len];
        for (token, head) in (0..self.tokens).flat_map(|t| (0..self.heads).map(move |h| (t, h))) {
            for d in 0..self.dim {
                let from = (self.row(self.place(token), head) + d) * size(self.from);
                let x = read(self.from, &source[from..]) * by(token, head, d);
                write(self.to, x, &mut out[(self.row(token, head) + d) * size(self.to)..]);
            }
        }
        out
    }

    fn number(&self, source: &[u8], token: usize, head: usize, d: usize) -> f32 {
        read(self.from, &source[(self.row(self.place(token), head) + d) * size(self.from)..])
    }

    /// Scales to `self.to`, as `src/format/codec/int8.rs` has them.
    fn scales(&self, source: &[u8], scaling: u32) -> Vec<f32> {
        let mut most = vec![0_f32; if scaling == 1 { self.tokens } else { self.dim } * self.heads];
        for (token, head) in (0..self.tokens).flat_map(|t| (0..self.heads).map(move |h| (t, h))) {
            for d in 0..self.dim {
                let one = &mut most[self.scale(scaling, token, head, d)];
                *one = one.max(self.number(source, token, head, d).abs());
            }
        }
        most.into_iter().map(|size| size / greatest(self.to)).collect()
    }

    fn scale(&self, scaling: u32, token: usize, head: usize, d: usize) -> usize {
        if scaling == 1 { token * self.heads + head } else { head * self.dim + d }
    }
}

fn inverse(scale: f32) -> f32 {
    if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 }
}

/// Bytes of any finite numbers of a type.
fn source(plane: &Plane, seed: u64) -> Vec<u8> {
    let (mut chance, width) = (Chance::new(seed), size(plane.from));
    let mut bytes = chance.bytes(plane.numbers(plane.places()) * width + 16);
    let spread = chance.word() % 4;
    for number in bytes.chunks_exact_mut(width) {
        let x = chance.number() * [1.0, 1e-4, 3e4, 1e-36][spread as usize];
        if size(plane.from) > 1 {
            write(plane.from, x, number);
        } else if !read(plane.from, number).is_finite() {
            number[0] = 0;
        }
    }
    bytes
}

/// Bytes that lie at a multiple of 16.
fn aligned(bytes: &[u8]) -> (Vec<u128>, usize) {
    let mut words = vec![0_u128; bytes.len().div_ceil(16)];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks(16)) {
        let mut whole = [0; 16];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u128::from_le_bytes(whole);
    }
    (words, bytes.len())
}

fn bytes_of((words, len): &(Vec<u128>, usize)) -> &[u8] {
    // SAFETY: any byte of a number can be read.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), *len) }
}

fn plane() -> impl Strategy<Value = Plane> {
    let dtypes = (prop::sample::select(ALL.to_vec()), prop::sample::select(ALL.to_vec()));
    let dim = prop_oneof![1_usize..40, Just(64), Just(128), 120_usize..140, Just(576)];
    let block = prop::option::of((1_usize..5, 0_usize..7));
    let gap = prop_oneof![Just(0), Just(4), 0_usize..9];
    let shift = prop_oneof![Just(0), 0_usize..5];
    (dtypes, 1_usize..12, 1_usize..5, dim, gap, shift, block).prop_map(
        |((from, to), tokens, heads, dim, gap, shift, block)| {
            let first = block.map_or(0, |(_, first)| first);
            let block = block.map(|(tokens, _)| tokens);
            Plane { from, to, tokens, heads, dim, gap, shift, block, first }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]
    #[test]
    fn conversion_rounds_to_nearest_even(
        plane in plane(), scaling in 0_u32..3, is_given in any::<bool>(), seed in any::<u64>(),
    ) {
        let memory = aligned(&source(&plane, seed));
        let source = bytes_of(&memory);
        let (is_from, is_to) = (size(plane.from) == 1, size(plane.to) == 1);
        let scaling = if is_from == is_to { 0 } else { scaling };
        let mut scales = if scaling == 0 { Vec::new() } else { plane.scales(source, scaling) };
        let flags = u32::from(scaling != 0 && is_to && is_given);
        if is_given || is_from {
            scales.iter_mut().for_each(|scale| *scale *= 0.75);
        }
        let wanted = scales.clone();
        if flags == 0 && is_to {
            scales.fill(f32::NAN);
        }
        let got = plane.convert(source, scaling, &mut scales, flags);
        let by = |token, head, d| match scaling {
            0 => 1.0,
            _ => {
                let scale = wanted[plane.scale(scaling, token, head, d)];
                if is_to { inverse(scale) } else { scale }
            }
        };
        if scaling == 0 || flags == 1 || is_from || !is_given {
            prop_assert!(got == plane.expected(source, got.len(), by));
            prop_assert_eq!(scales, wanted);
        }
    }
}

/// Every 16-bit number, and midpoints of 8-bit numbers, which round to even.
#[test]
fn all_small_numbers_and_midpoints_convert_exactly() {
    for narrow in [Dtype::F8E4m3, Dtype::F8E5m2, Dtype::I8] {
        let codes: Vec<f32> = (0..=255).map(|code| of_code(narrow, code)).collect();
        let mut sorted: Vec<f32> = codes.iter().copied().filter(|x| x.is_finite()).collect();
        sorted.sort_by(f32::total_cmp);
        let between = sorted.windows(2).flat_map(|w| {
            let middle = (w[0] + w[1]) / 2.0;
            [middle, middle.next_up(), middle.next_down()]
        });
        let mut numbers: Vec<f32> = codes.iter().copied().chain(between).collect();
        numbers.extend([f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e-30, -0.0]);
        let plane = one_row(Dtype::F32, narrow, numbers.len());
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let memory = aligned(&bytes);
        let got = plane.convert(bytes_of(&memory), 0, &mut [], 0);
        for (x, code) in numbers.iter().zip(&got) {
            assert_eq!(*code, to_code(narrow, *x), "{x} as {narrow:?}");
        }
        let back = one_row(narrow, Dtype::F32, 256);
        let memory = aligned(&(0..=255).collect::<Vec<u8>>());
        let got = back.convert(bytes_of(&memory), 0, &mut [], 0);
        for (want, bytes) in codes.iter().zip(got.chunks_exact(4)) {
            let x = read(Dtype::F32, bytes);
            assert!(x.to_bits() == want.to_bits() || (x.is_nan() && want.is_nan()), "{x} {want}");
        }
    }
    for half in [Dtype::F16, Dtype::Bf16] {
        let memory = aligned(&(0..=u16::MAX).flat_map(u16::to_le_bytes).collect::<Vec<u8>>());
        let plane = one_row(half, Dtype::F32, 65_536);
        let got = plane.convert(bytes_of(&memory), 0, &mut [], 0);
        for (code, bytes) in (0..=u16::MAX).zip(got.chunks_exact(4)) {
            let (x, want) = (read(Dtype::F32, bytes), read(half, &code.to_le_bytes()));
            assert!(x.to_bits() == want.to_bits() || (x.is_nan() && want.is_nan()), "{code:#x}");
        }
    }
}

fn one_row(from: Dtype, to: Dtype, dim: usize) -> Plane {
    Plane { from, to, tokens: 1, heads: 1, dim, gap: 0, shift: 0, block: None, first: 0 }
}

/// The same scales and bytes as the store's codec, and the same numbers back.
#[test]
fn int8_conversion_matches_the_codec() {
    for (scales, from) in [Scales::Token, Scales::Channel]
        .into_iter()
        .flat_map(|scales| [(scales, Dtype::F32), (scales, Dtype::F16), (scales, Dtype::Bf16)])
    {
        let plane = Plane { tokens: 33, ..one_row(from, Dtype::I8, 192) };
        let raw = &source(&plane, 5)[..33 * 192 * size(from)];
        let shape = Shape { dtype: from, row_bytes: 192 * size(from), scales };
        let mut coded = vec![0; coded_bytes(&shape, raw.len())];
        encode(&shape, raw, &mut coded).expect("finite");
        let scaling = if scales == int8::Scales::Token { 1 } else { 2 };
        let mut found = vec![0_f32; if scaling == 1 { 33 } else { 192 }];
        let memory = aligned(raw);
        let codes = plane.convert(bytes_of(&memory), scaling, &mut found, 0);
        let head: Vec<u8> = found.iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(coded[..head.len()], head, "scales");
        assert_eq!(coded[head.len()..], codes[..33 * 192], "codes");
        let mut wanted = vec![0; raw.len()];
        decode(&shape, &coded, &mut wanted).expect("a code");
        let back = Plane { from: Dtype::I8, to: from, ..plane };
        let memory = aligned(&codes);
        assert_eq!(back.convert(bytes_of(&memory), scaling, &mut found, 0)[..raw.len()], wanted);
    }
}

#[test]
fn nan_does_not_affect_scales() {
    let numbers = [1.0, f32::NAN, -4.0, 0.5];
    let memory = aligned(&numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    for scaling in [1, 2] {
        let mut scales = vec![0.0; 4];
        let got =
            one_row(Dtype::F32, Dtype::I8, 4).convert(bytes_of(&memory), scaling, &mut scales, 0);
        assert_eq!(got[1], 0);
        assert_eq!(scales[0], if scaling == 1 { 4.0 / 127.0 } else { 1.0 / 127.0 });
    }
}
