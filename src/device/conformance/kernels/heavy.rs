//! Checks of kernels that evict tokens by accumulated weight.

use crate::device::call::{Call, Kind};
use crate::device::conformance::bench::Bench;
use crate::device::conformance::kernels::{Lab, check_all_close};
use crate::device::conformance::{Outcome, need};
use crate::meta::dtype::Dtype;

/// Number of score lists.
const LISTS: usize = 2;

/// Weights of rows are added to the scores of their list.
pub fn add(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Add)?;
    let group = 3;
    for _ in 0..lab.rounds() {
        let tokens = 1 + lab.below(900);
        let (score_stride, row_stride) = (tokens + lab.below(9), tokens + lab.below(9));
        let (before, more) = (
            lab.numbers(LISTS * score_stride, Dtype::F32),
            lab.numbers(LISTS * group * row_stride, Dtype::F32),
        );
        let scores = lab.change(&super::bytes_of(&before, Dtype::F32))?;
        let added = lab.put_numbers(&more, Dtype::F32)?;
        lab.run(Call {
            kind: Kind::Add as u32,
            numbers: scores.at(),
            out_head_stride: 4 * score_stride as i64,
            key_heads: LISTS as u32,
            tokens: tokens as u32,
            more: added.address,
            query_heads: (LISTS * group) as u32,
            query_head_stride: 4 * row_stride as i64,
            ..Call::default()
        })?;
        let mut expected: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
        for (row, more) in more.chunks(row_stride).enumerate() {
            let list = &mut expected[row / group * score_stride..];
            list.iter_mut().zip(&more[..tokens]).for_each(|(x, y)| *x += f64::from(*y));
        }
        check_all_close("score", &scores.numbers(Dtype::F32)?, &expected, 1e-6)?;
    }
    Ok(())
}

/// The tokens with the highest scores are kept, and the first and last ones.
pub fn keep(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Keep)?;
    for round in 0..2 * lab.rounds() {
        let tokens = 1 + lab.below(1500);
        let [sinks, recent] = [0, 1].map(|_| lab.below(10));
        let keep = 1 + lab.below(tokens as u64);
        let capacity = tokens.min(sinks + recent + keep);
        let few = |x: f32| if round % 2 == 0 { (x * 3.0).round() } else { x };
        let numbers = lab.numbers(LISTS * tokens, Dtype::F32);
        let numbers: Vec<f32> = numbers.into_iter().map(few).collect();
        let scores = lab.put_numbers(&numbers, Dtype::F32)?;
        let (index, counts) = (lab.out(LISTS * capacity * 4)?, lab.out(LISTS * 4)?);
        lab.run(Call {
            kind: Kind::Keep as u32,
            numbers: scores.address,
            out_head_stride: 4 * tokens as i64,
            key_heads: LISTS as u32,
            tokens: tokens as u32,
            sinks: sinks as u32,
            recent: recent as u32,
            keep: keep as u32,
            index: index.at(),
            out_stride: 4 * capacity as i64,
            counts: counts.at(),
            ..Call::default()
        })?;
        let (index, counts) = (index.u32s()?, counts.u32s()?);
        for (list, scores) in numbers.chunks(tokens).enumerate() {
            let expected = retained_tokens(scores, (sinks, recent, keep));
            let count = counts[list] as usize;
            need(count == expected.len(), || {
                format!("{count} of {tokens} tokens are kept, expected {}", expected.len())
            })?;
            let is_right = index[list * capacity..][..count] == expected;
            need(is_right, || format!("the kept tokens are not the best {keep} of {tokens}"))?;
        }
    }
    Ok(())
}

fn retained_tokens(scores: &[f32], (sinks, recent, keep): (usize, usize, usize)) -> Vec<u32> {
    let to = scores.len().saturating_sub(recent);
    let mut between: Vec<usize> = (to.min(sinks)..to).collect();
    // Lowest score first; of equal scores the lower index. -0 equals 0.
    between.sort_by(|&a, &b| (scores[a] + 0.0).total_cmp(&(scores[b] + 0.0)).then(a.cmp(&b)));
    let evicted = &between[..between.len().saturating_sub(keep)];
    (0..scores.len()).filter(|at| !evicted.contains(at)).map(|at| at as u32).collect()
}

/// Bytes of a row, and tokens of a block.
const ROW: usize = 32;
const BLOCK: usize = 16;

/// Kept rows and their scores move to the front; contiguous and in blocks.
pub fn compact(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Compact)?;
    for round in 0..2 * lab.rounds() {
        let tokens = BLOCK * (2 + lab.below(8));
        // One list for all heads, or one for each.
        let count = 1 + lab.below(LISTS as u64);
        let share = 1 + bench.chance.below(3);
        let some = |_| (0..tokens as u32).filter(|_| bench.chance.below(4) < share).collect();
        let lists: Vec<Vec<u32>> = (0..count).map(some).collect();
        compact_once(&lab, tokens, &lists, round % 2 == 1)?;
    }
    Ok(())
}

/// The rows after compaction.
fn moved(before: &[u8], lists: &[Vec<u32>]) -> Vec<u8> {
    let mut after = before.to_vec();
    for head in 0..LISTS {
        let at = |token: usize| (token * LISTS + head) * ROW;
        for (to, from) in lists[head % lists.len()].iter().enumerate() {
            let from = at(*from as usize);
            after[at(to)..at(to) + ROW].copy_from_slice(&before[from..from + ROW]);
        }
    }
    after
}

fn compact_once(lab: &Lab<'_>, tokens: usize, lists: &[Vec<u32>], is_paged: bool) -> Outcome {
    let (count, bytes) = (lists.len(), tokens * LISTS * ROW);
    // Keys, then values.
    let before = lab.bench.chance.noise(2 * bytes);
    let scores = lab.numbers(count * tokens, Dtype::F32);
    let (rows, numbers) =
        (lab.change(&before)?, lab.change(&super::bytes_of(&scores, Dtype::F32))?);
    let block = |at: usize| rows.at() + (at * BLOCK * LISTS * ROW) as u64;
    let table = lab.put_u64(&(0..tokens / BLOCK).map(block).collect::<Vec<u64>>())?;
    let whole = |list: &Vec<u32>| {
        (0..tokens).map(|at| list.get(at).copied().unwrap_or(0)).collect::<Vec<u32>>()
    };
    let index = lab.put_u32(&lists.iter().flat_map(whole).collect::<Vec<u32>>())?;
    let counts = lab.put_u32(&lists.iter().map(|list| list.len() as u32).collect::<Vec<u32>>())?;
    let base = if is_paged { 0 } else { rows.at() };
    lab.run(Call {
        kind: Kind::Compact as u32,
        dtype: Dtype::Bytes.code(),
        keys: base,
        values: base + bytes as u64,
        table: if is_paged { table.address } else { 0 },
        page_tokens: if is_paged { BLOCK as u32 } else { 0 },
        key_stride: (LISTS * ROW) as i64,
        key_head_stride: ROW as i64,
        value_stride: (LISTS * ROW) as i64,
        value_head_stride: ROW as i64,
        key_dim: ROW as u32,
        value_dim: ROW as u32,
        key_heads: LISTS as u32,
        tokens: tokens as u32,
        index: index.address,
        counts: counts.address,
        out_stride: 4 * tokens as i64,
        count: count as u32,
        numbers: numbers.at(),
        out_head_stride: 4 * tokens as i64,
        ..Call::default()
    })?;
    let (keys, values) = before.split_at(bytes);
    let is_right = rows.bytes()? == [moved(keys, lists), moved(values, lists)].concat();
    need(is_right, || "kept rows are not at the front, or other rows moved".into())?;
    let got = numbers.numbers(Dtype::F32)?;
    for (list, at) in lists.iter().zip((0..).step_by(tokens)) {
        let stay = |(to, from): (usize, &u32)| got[at + to] == scores[at + *from as usize];
        let is_right = list.iter().enumerate().all(stay);
        need(is_right, || "scores did not move with their rows".into())?;
    }
    Ok(())
}
