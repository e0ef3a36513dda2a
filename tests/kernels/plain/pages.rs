//! Page boxes, and scores by them.

use kvtier::attention::pages::{extend, extend_bf16, scores, scratch};
use kvtier::attention::{Level, Rows, Scales};
use kvtier::base::half::{from_bf16, to_bf16};
use kvtier::device::call::{Call, Kind};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use proptest::prelude::*;

use super::{Chance, at, run, to};
use crate::plain::numbers::{read, size, write};

/// Rows that lie packed at an address.
fn rows<'a>(address: u64, shape: [usize; 3], dtype: Dtype) -> Rows<'a> {
    let [tokens, heads, dim] = shape;
    let run = (dim * size(dtype)) as u64;
    let view = View {
        place: Place::At(address),
        tokens: tokens as u32,
        heads: heads as u32,
        run_bytes: run,
        token_stride_bytes: run * heads as u64,
        head_stride_bytes: run,
    };
    // SAFETY: tests keep what they look at.
    unsafe { Rows::new(view, dtype, Scales::None) }.expect("sound")
}

/// Numbers as they lie in memory, at a multiple of 16 and `shift` bytes more.
struct Packed {
    words: Vec<u128>,
    shift: usize,
}

impl Packed {
    fn of(numbers: &[f32], dtype: Dtype, shift: usize) -> Packed {
        let bytes = numbers.len() * size(dtype) + shift;
        let mut packed = Packed { words: vec![0; bytes.div_ceil(16) + 1], shift };
        for (number, to) in numbers.iter().zip(packed.bytes().chunks_exact_mut(size(dtype))) {
            write(dtype, *number, to);
        }
        packed
    }

    fn bytes(&mut self) -> &mut [u8] {
        let bytes = 16 * self.words.len() - self.shift;
        // SAFETY: bytes of the words.
        unsafe {
            let start = self.words.as_mut_ptr().cast::<u8>().add(self.shift);
            std::slice::from_raw_parts_mut(start, bytes)
        }
    }

    fn address(&mut self) -> u64 {
        to(self.bytes())
    }
}

/// Keys that come in turns.
#[derive(Clone, Debug)]
struct Keys {
    dtype: Dtype,
    boxes: Dtype,
    heads: usize,
    dim: usize,
    page: usize,
    /// Where each turn begins, and how many tokens it has.
    turns: Vec<(usize, usize)>,
    /// Pages of a block, where keys are in blocks.
    block: Option<usize>,
    shift: usize,
    is_promised: bool,
}

impl Keys {
    fn call(&self) -> Call {
        let (key, number) = (size(self.dtype) as i64, size(self.boxes) as i64);
        let (heads, dim) = (self.heads as i64, self.dim as i64);
        Call {
            kind: Kind::PageBoxes as u32,
            dtype: self.dtype.code(),
            other_dtype: self.boxes.code(),
            key_stride: heads * dim * key,
            key_head_stride: dim * key,
            out_stride: 2 * heads * dim * number,
            out_head_stride: 2 * dim * number,
            page_tokens: self.page as u32,
            key_heads: self.heads as u32,
            key_dim: self.dim as u32,
            ..Call::default()
        }
    }

    /// Boxes by the kernel, of all turns.
    fn widen(&self, keys: &mut Packed, out: u64) {
        let token = self.heads * self.dim * size(self.dtype);
        let start = keys.address();
        let table: Vec<u64> = match self.block {
            Some(pages) => {
                (0..1000).map(|i| start + (i * pages * self.page * token) as u64).collect()
            }
            None => Vec::new(),
        };
        for &(first, count) in &self.turns {
            let mut call = Call { out, first: first as u32, count: count as u32, ..self.call() };
            match self.block {
                Some(pages) => {
                    (call.table, call.tokens) = (at(&table), (pages * self.page) as u32);
                    if pages == 1 {
                        call.tokens = 0;
                    }
                    // The tables' addresses are 16 bytes before the keys.
                    call.flags = u32::from(self.is_promised);
                }
                None => call.keys = start + (first * token) as u64,
            }
            if self.block.is_some() {
                let back: Vec<u64> = table.iter().map(|address| address - 16).collect();
                (call.table, call.keys) = (at(&back), 16);
                run(&call);
            } else {
                run(&call);
            }
        }
    }

    /// The same by the processor.
    fn expected(&self, keys: u64, boxes: &mut [f32]) {
        let token = (self.heads * self.dim * size(self.dtype)) as u64;
        let mut halves: Vec<u16> = boxes.iter().map(|&x| to_bf16(x)).collect();
        for &(first, count) in &self.turns {
            let shape = [count, self.heads, self.dim];
            let appended = rows(keys + first as u64 * token, shape, self.dtype);
            let (page, first) = (self.page as u32, first as u32);
            match self.boxes {
                Dtype::F32 => extend(boxes, page, first, &appended),
                _ => extend_bf16(&mut halves, page, first, &appended),
            }
            .expect("room");
        }
        if self.boxes != Dtype::F32 {
            boxes.iter_mut().zip(halves).for_each(|(x, half)| *x = from_bf16(half));
        }
    }
}

fn turns() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let steps = prop::collection::vec(prop_oneof![Just(1_usize), 1_usize..70], 1..4);
    (0_usize..20, steps, any::<bool>()).prop_map(|(first, steps, is_again)| {
        let mut at = first;
        let mut turns: Vec<(usize, usize)> = Vec::new();
        for step in steps {
            turns.push((at, step));
            at += step;
        }
        // Keys that come again.
        turns.extend(turns.first().copied().filter(|_| is_again));
        turns
    })
}

fn keys() -> impl Strategy<Value = Keys> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let boxes = prop::sample::select(vec![Dtype::F32, Dtype::Bf16]);
    let dim = prop_oneof![Just(64_usize), Just(16), 1_usize..30];
    let page = prop_oneof![Just(16_usize), 1_usize..20];
    let block = prop::option::of(1_usize..4);
    let shift = prop::sample::select(vec![0_usize, 0, 4, 8]);
    (dtype, boxes, 1_usize..4, dim, page, turns(), block, shift, any::<bool>()).prop_map(
        |(dtype, boxes, heads, dim, page, turns, block, shift, is_promised)| {
            let is_promised = is_promised && shift == 0 && block.is_some();
            // Blocks behind each other are aligned if a token is.
            let is_promised = is_promised && heads * dim * size(dtype) % 16 == 0;
            Keys { dtype, boxes, heads, dim, page, turns, block, shift, is_promised }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn page_boxes_are_bit_identical(keys in keys(), seed in any::<u64>()) {
        let mut chance = Chance::new(seed);
        // The last ones are so small that they are 0 as bf16.
        let [all, less] = [u32::MAX >> 1, u32::MAX].map(f32::from_bits);
        let (more, tiny) = (f32::INFINITY, 1e-42);
        let special = [f32::NAN, all, less, 0.0, -0.0, more, -more, tiny, -tiny];
        let tokens = keys.turns.iter().map(|(first, count)| first + count).max().unwrap_or(0);
        let numbers: Vec<f32> = (0..tokens * keys.heads * keys.dim)
            .map(|_| match chance.word() % 9 {
                0..3 => special[(chance.word() % 9) as usize],
                _ => chance.number(),
            })
            .collect();
        let mut memory = Packed::of(&numbers, keys.dtype, keys.shift);
        let boxes = tokens.div_ceil(keys.page) * keys.heads * 2 * keys.dim;
        // The boxes of pages that have begun are widened.
        let mut wanted = vec![0.25_f32; boxes];
        let mut out = Packed::of(&wanted, keys.boxes, keys.shift);
        keys.expected(memory.address(), &mut wanted);
        let address = out.address();
        keys.widen(&mut memory, address);
        for (at, want) in wanted.iter().enumerate() {
            let got = read(keys.boxes, &out.bytes()[at * size(keys.boxes)..]);
            // The bits of a NaN depend on the processor.
            let is_none = got.is_nan() && want.is_nan();
            prop_assert!(
                is_none || got.to_bits() == want.to_bits(),
                "number {}: {} {}", at, got, want
            );
        }
    }
}

#[derive(Clone, Debug)]
struct Asked {
    dtype: Dtype,
    boxes: Dtype,
    queries: usize,
    group: usize,
    heads: usize,
    dim: usize,
    pages: usize,
    first: usize,
    count: usize,
    shift: usize,
    is_listed: bool,
}

impl Asked {
    /// Scores by the kernel, of the pages in `list`.
    fn score(&self, queries: &mut Packed, boxes: &mut Packed, list: &[u32]) -> Vec<f32> {
        let (query, number) = (size(self.dtype) as i64, size(self.boxes) as i64);
        let (heads, dim) = ((self.heads * self.group) as i64, self.dim as i64);
        let mut out = vec![f32::NAN; self.queries * heads as usize * self.count];
        run(&Call {
            kind: Kind::PageScores as u32,
            dtype: self.boxes.code(),
            other_dtype: self.dtype.code(),
            queries: queries.address(),
            query_stride: heads * dim * query,
            query_head_stride: dim * query,
            numbers: boxes.address(),
            key_stride: 2 * self.heads as i64 * dim * number,
            key_head_stride: 2 * dim * number,
            index: if self.is_listed { at(list) } else { 0 },
            first: if self.is_listed { 0 } else { self.first as u32 },
            count: self.count as u32,
            query_count: self.queries as u32,
            query_heads: heads as u32,
            key_heads: self.heads as u32,
            key_dim: self.dim as u32,
            out: to(&mut out),
            ..Call::default()
        });
        out
    }

    /// The same by the processor.
    fn expected(&self, queries: &mut Packed, boxes: &mut Packed) -> Vec<f32> {
        let heads = self.heads * self.group;
        let asked = rows(queries.address(), [self.queries, heads, self.dim], self.dtype);
        let pages = rows(boxes.address(), [self.pages, self.heads, 2 * self.dim], self.boxes);
        let mut out = vec![0.0; self.queries * heads * self.count];
        let mut memory = vec![0.0; scratch(&asked)];
        let range = (self.first as u32, self.count as u32);
        scores(Level::best(), &pages, &asked, range, &mut out, &mut memory).expect("sound");
        out
    }
}

fn asked() -> impl Strategy<Value = Asked> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]);
    let boxes = prop::sample::select(vec![Dtype::F32, Dtype::Bf16]);
    let dim = prop_oneof![Just(128_usize), Just(64), Just(192), Just(1024), 1_usize..150];
    let queries = prop_oneof![Just(1_usize), 1_usize..4];
    let heads = (prop::sample::select(vec![1_usize, 2, 4, 7, 8, 12]), 1_usize..4);
    let range = (0_usize..5, prop_oneof![1_usize..20, 1_usize..200]);
    let shift = prop::sample::select(vec![0_usize, 0, 0, 4]);
    (dtype, boxes, queries, heads, dim, range, shift, any::<bool>()).prop_map(
        |(dtype, boxes, queries, (group, heads), dim, (first, count), shift, is_listed)| {
            let pages = first + count + 2;
            Asked {
                dtype,
                boxes,
                queries,
                group,
                heads,
                dim,
                pages,
                first,
                count,
                shift,
                is_listed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn page_scores_are_within_rounding(asked in asked(), seed in any::<u64>()) {
        let (heads, dim) = (asked.heads * asked.group, asked.dim);
        let mut chance = Chance::new(seed);
        let mut queries =
            Packed::of(&chance.numbers(asked.queries * heads * dim), asked.dtype, 0);
        let boxes: Vec<f32> = chance
            .numbers(asked.pages * asked.heads * dim)
            .chunks_exact(dim)
            .flat_map(|row| row.iter().copied().chain(row.iter().map(|x| x + 0.5)).collect::<Vec<_>>())
            .collect();
        let mut boxes = Packed::of(&boxes, asked.boxes, asked.shift);
        let wanted = asked.expected(&mut queries, &mut boxes);
        let mut list: Vec<u32> = (0..asked.count).map(|i| (asked.first + i) as u32).collect();
        list.reverse();
        let got = asked.score(&mut queries, &mut boxes, &list);
        // No product is more than 1.5, each of both sums is rounded once a number.
        let allowed = 2.0 * (2 * dim) as f32 * f32::EPSILON * 1.5 * dim as f32;
        for (row, wanted) in got.chunks_exact(asked.count).zip(wanted.chunks_exact(asked.count)) {
            for (i, want) in wanted.iter().enumerate() {
                let got = row[if asked.is_listed { asked.count - 1 - i } else { i }];
                prop_assert!((got - want).abs() <= allowed, "{} {}", got, want);
            }
        }
    }
}

/// More queries than blocks: each block handles several.
#[test]
fn page_scores_of_thousands_of_queries() {
    let (dtype, boxes) = (Dtype::F32, Dtype::F32);
    let asked = Asked {
        dtype,
        boxes,
        queries: 9000,
        group: 1,
        heads: 1,
        dim: 8,
        pages: 5,
        first: 0,
        count: 5,
        shift: 0,
        is_listed: false,
    };
    // Small whole numbers: sums are exact.
    let mut chance = Chance::new(2);
    let mut whole = |count| -> Vec<f32> {
        chance.numbers(count).into_iter().map(|x| (x * 8.0).round()).collect()
    };
    let mut queries = Packed::of(&whole(9000 * 8), dtype, 0);
    let mut memory = Packed::of(&whole(5 * 16), boxes, 0);
    let wanted = asked.expected(&mut queries, &mut memory);
    for _ in 0..4 {
        assert!(asked.score(&mut queries, &mut memory, &[]) == wanted);
    }
}
