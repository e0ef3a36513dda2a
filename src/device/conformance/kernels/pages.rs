//! Checks of kernels that choose pages.

use crate::device::call::{Call, Kind};
use crate::device::conformance::bench::Bench;
use crate::device::conformance::kernels::{Lab, check_all_close, size};
use crate::device::conformance::{Outcome, need};
use crate::meta::dtype::Dtype;

const HEADS: usize = 2;
const DIM: usize = 48;
const PAGE: usize = 8;
const PAGES: usize = 7;

/// Boxes hold the minimum and maximum of each element of their keys, whether keys come at once or
/// in turns, contiguous or in blocks.
pub fn boxes(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::PageBoxes)?;
    for round in 0..2 * lab.rounds() {
        let (dtype, is_paged) = (bench.chance.of(&[Dtype::F32, Dtype::F16]), round % 2 == 1);
        let tokens = PAGE * (PAGES - 1) + 1 + lab.below(PAGE as u64);
        let row = HEADS * DIM * size(dtype);
        let numbers = lab.numbers(PAGES * PAGE * HEADS * DIM, dtype);
        let keys = lab.put_numbers(&numbers, dtype)?;
        let block = |at: usize| keys.address + (at * PAGE * row) as u64;
        let table = lab.put_u64(&(0..PAGES).map(block).collect::<Vec<u64>>())?;
        let out = lab.out(PAGES * HEADS * 2 * DIM * 4)?;
        let turn = 1 + lab.below(tokens as u64 - 1);
        for (first, count) in [(0, turn), (turn, tokens - turn)] {
            lab.run(Call {
                kind: Kind::PageBoxes as u32,
                dtype: dtype.code(),
                other_dtype: Dtype::F32.code(),
                keys: if is_paged { 0 } else { keys.address + (first * row) as u64 },
                table: if is_paged { table.address } else { 0 },
                key_stride: row as i64,
                key_head_stride: (row / HEADS) as i64,
                out: out.at(),
                out_stride: (HEADS * 2 * DIM * 4) as i64,
                out_head_stride: (2 * DIM * 4) as i64,
                page_tokens: PAGE as u32,
                first: first as u32,
                count: count as u32,
                key_heads: HEADS as u32,
                key_dim: DIM as u32,
                ..Call::default()
            })?;
        }
        let got = out.numbers(Dtype::F32)?;
        for (at, sides) in got.chunks(DIM).enumerate() {
            let (page, head, is_most) = (at / 2 / HEADS, at / 2 % HEADS, at % 2 == 1);
            for (d, &x) in sides.iter().enumerate() {
                let own = (page * PAGE..tokens.min((page + 1) * PAGE))
                    .map(|token| numbers[(token * HEADS + head) * DIM + d]);
                let expected = if is_most { own.reduce(f32::max) } else { own.reduce(f32::min) };
                need(expected == Some(x), || {
                    format!("number {d} of page {page} is {x}: {expected:?}")
                })?;
            }
        }
    }
    Ok(())
}

/// Upper bounds of a query for each page, for all pages from a first one on, and for a list.
pub fn scores(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::PageScores)?;
    let (queries, heads) = (2, 2 * HEADS);
    for round in 0..2 * lab.rounds() {
        let dtype = bench.chance.of(&[Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let query_numbers = lab.numbers(queries * heads * DIM, dtype);
        let mut sides = lab.numbers(PAGES * HEADS * 2 * DIM, Dtype::F32);
        for page in sides.chunks_mut(2 * DIM) {
            let (least, most) = page.split_at_mut(DIM);
            least.iter_mut().zip(most).for_each(|(a, b)| (*a, *b) = (a.min(*b), a.max(*b)));
        }
        let first = 1 + lab.below(2);
        let list: Vec<u32> = match round % 2 {
            0 => (first as u32..PAGES as u32).collect(),
            _ => (0..5).map(|_| lab.below(PAGES as u64) as u32).collect(),
        };
        let has_list = round % 2 == 1;
        let index = lab.put_u32(&list)?;
        let (query_buffer, numbers) =
            (lab.put_numbers(&query_numbers, dtype)?, lab.put_numbers(&sides, Dtype::F32)?);
        let out = lab.out(queries * heads * list.len() * 4)?;
        lab.run(Call {
            kind: Kind::PageScores as u32,
            dtype: Dtype::F32.code(),
            other_dtype: dtype.code(),
            queries: query_buffer.address,
            query_stride: (heads * DIM * size(dtype)) as i64,
            query_head_stride: (DIM * size(dtype)) as i64,
            numbers: numbers.address,
            key_stride: (HEADS * 2 * DIM * 4) as i64,
            key_head_stride: (2 * DIM * 4) as i64,
            index: if has_list { index.address } else { 0 },
            first: if has_list { 0 } else { first as u32 },
            count: list.len() as u32,
            out: out.at(),
            query_count: queries as u32,
            query_heads: heads as u32,
            key_heads: HEADS as u32,
            key_dim: DIM as u32,
            ..Call::default()
        })?;
        let score = |at: usize| {
            let (row, page) = (at / list.len(), list[at % list.len()] as usize);
            let head = row % heads / (heads / HEADS);
            let (query, page) =
                (&query_numbers[row * DIM..], &sides[(page * HEADS + head) * 2 * DIM..]);
            let one = |d: usize| {
                let [q, low, high] = [query[d], page[d], page[DIM + d]].map(f64::from);
                (q * low).max(q * high)
            };
            (0..DIM).map(one).sum::<f64>()
        };
        let expected: Vec<f64> = (0..queries * heads * list.len()).map(score).collect();
        // 2 u (D + 1) times the sum of magnitudes, which is at most D.
        let bound = 2.0 * (DIM * (DIM + 1)) as f64 / f64::from(1 << 24);
        check_all_close("score", &out.numbers(Dtype::F32)?, &expected, bound)?;
    }
    Ok(())
}

/// The largest scores of rows: of equal ones the first, and always the first and last entries.
pub fn top(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Top)?;
    let (queries, heads) = (2, 3);
    for round in 0..2 * lab.rounds() {
        let (count, keep) = (20 + lab.below(300), 1 + lab.below(40));
        let (sinks, recent) = (lab.below(keep as u64 / 2 + 1), lab.below(keep as u64 / 2 + 1));
        // Few distinct values, so that many are equal.
        let few = |x: f32| if round % 3 == 0 { (x * 4.0).round() } else { x };
        let numbers = lab.numbers(queries * heads * count, Dtype::F32);
        let mut numbers: Vec<f32> = numbers.into_iter().map(few).collect();
        numbers[lab.below(count as u64)] = f32::NAN;
        // Heads share a list, by their maximum.
        let is_joined = round % 2 == 1;
        let lists = if is_joined { queries } else { queries * heads };
        let (index, counts) = (lab.out(lists * keep * 4)?, lab.out(lists * 4)?);
        let scores_buffer = lab.put_numbers(&numbers, Dtype::F32)?;
        let scratch = lab.put(&vec![7; 4 * lists * count])?;
        lab.run(Call {
            kind: Kind::Top as u32,
            numbers: scores_buffer.address,
            query_count: queries as u32,
            query_heads: heads as u32,
            count: count as u32,
            keep: keep as u32,
            sinks: sinks as u32,
            recent: recent as u32,
            flags: if is_joined { 2 } else { 0 },
            index: index.at(),
            out_stride: 4 * keep as i64,
            counts: counts.at(),
            scratch: if is_joined { scratch.address } else { 0 },
            scratch_bytes: if is_joined { scratch.len as u64 } else { 0 },
            ..Call::default()
        })?;
        let (index, counts) = (index.u32s()?, counts.u32s()?);
        let group = queries * heads / lists;
        for (list, rows) in numbers.chunks(count * group).enumerate() {
            // NaN is less than any number: `max` takes the other operand.
            let higher =
                |column| rows.chunks(count).map(|row| row[column]).fold(f32::NAN, f32::max);
            let row: Vec<f32> = (0..count).map(higher).collect();
            let expected = largest(&row, keep, (sinks, recent));
            let got = &index[list * keep..][..keep];
            need(got == expected, || {
                format!("the {keep} largest of {count} are {got:?}: {expected:?}")
            })?;
            let are = counts[list] as usize;
            need(are == keep.min(count), || format!("{are} of {keep} were found"))?;
        }
    }
    Ok(())
}

fn largest(row: &[f32], keep: usize, (sinks, recent): (usize, usize)) -> Vec<u32> {
    let score = |at: usize| match row[at] {
        _ if at < sinks || at + recent >= row.len() => f32::INFINITY,
        x if x.is_nan() => f32::NEG_INFINITY,
        // Zeros of both signs are equal.
        x => x + 0.0,
    };
    let mut all: Vec<usize> = (0..row.len()).collect();
    all.sort_by(|&a, &b| score(b).total_cmp(&score(a)).then(a.cmp(&b)));
    let mut all: Vec<u32> = all.into_iter().take(keep).map(|at| at as u32).collect();
    all.sort_unstable();
    all.resize(keep, u32::MAX);
    all
}
