//! Checks of attention kernels, against attention in binary64.

use crate::device::call::{Call, Kind};
use crate::device::conformance::Outcome;
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::kernels::{Lab, check_all_close, check_close, rounded, size};
use crate::meta::dtype::Dtype;

/// Flags: write results as f32; write weights for each query head.
const OUT_F32: u32 = 1;
const BY_QUERY_HEAD: u32 = 2;
/// Prefill: lines of `src/attention/keys.rs`, and no query that sees all keys.
const LINES: u32 = 1;
const NO_QUERY: u32 = u32::MAX;
/// Tokens of a page of keys, and padding before its first row.
const PAGE: usize = 16;
const BEFORE: usize = 32;

/// Shape of a problem.
#[derive(Clone, Copy)]
struct Shape {
    queries: usize,
    tokens: usize,
    heads: usize,
    key_heads: usize,
    dim: usize,
    dtype: Dtype,
    is_paged: bool,
}

impl Shape {
    /// Elements of a value; rows of latent attention are keys and values.
    fn value_dim(&self) -> usize {
        if self.is_latent() { 512 } else { self.dim }
    }

    fn is_latent(&self) -> bool {
        self.dim == 576
    }

    fn first(&self) -> usize {
        self.tokens - self.queries
    }

    /// Bytes of a token's keys.
    fn row(&self) -> usize {
        self.key_heads * self.dim * size(self.dtype)
    }
}

/// Input numbers, and the same in memory of the kernel.
struct Problem<'a> {
    shape: Shape,
    queries: Vec<f32>,
    keys: Vec<f32>,
    /// Rows as long as those of keys.
    values: Vec<f32>,
    buffers: [TestBuffer<'a>; 3],
    table: TestBuffer<'a>,
}

impl<'a> Problem<'a> {
    fn new(lab: &Lab<'a>, shape: Shape) -> Outcome<Problem<'a>> {
        let Shape { queries, tokens, heads, key_heads, dim, dtype, .. } = shape;
        // Products large enough for a non-uniform softmax.
        let query_numbers = lab.numbers(queries * heads * dim, dtype);
        let queries: Vec<f32> = query_numbers.iter().map(|x| rounded(4.0 * x, dtype)).collect();
        let [keys, own] = [0, 1].map(|_| lab.numbers(tokens * key_heads * dim, dtype));
        let values = if shape.is_latent() { keys.clone() } else { own };
        let lay = |numbers: &[f32]| {
            let bytes = super::bytes_of(numbers, dtype);
            lab.put(&if shape.is_paged { paged(&bytes, shape.row()) } else { bytes })
        };
        let buffers = [lab.put_numbers(&queries, dtype)?, lay(&keys)?, lay(&values)?];
        let table: Vec<u64> = places(tokens.div_ceil(PAGE), shape.row())
            .into_iter()
            .map(|at| buffers[1].address + at as u64)
            .collect();
        Ok(Problem { shape, queries, keys, values, buffers, table: lab.put_u64(&table)? })
    }

    /// A call without outputs.
    fn call(&self, kind: Kind) -> Call {
        let Shape { queries, tokens, heads, key_heads, dim, dtype, is_paged } = self.shape;
        let [queries_buffer, keys, values] = &self.buffers;
        let values = if self.shape.is_latent() { keys } else { values };
        let (row, head) = (self.shape.row() as i64, (dim * size(dtype)) as i64);
        let before = BEFORE as u64;
        let shift = values.address.wrapping_sub(keys.address).wrapping_add(before);
        Call {
            kind: kind as u32,
            dtype: dtype.code(),
            other_dtype: dtype.code(),
            queries: queries_buffer.address,
            query_stride: heads as i64 * head,
            query_head_stride: head,
            keys: if is_paged { before } else { keys.address },
            values: if is_paged { shift } else { values.address },
            table: if is_paged { self.table.address } else { 0 },
            page_tokens: if is_paged { PAGE as u32 } else { 0 },
            key_stride: row,
            key_head_stride: head,
            value_stride: row,
            value_head_stride: head,
            query_count: queries as u32,
            query_heads: heads as u32,
            key_heads: key_heads as u32,
            key_dim: dim as u32,
            value_dim: self.shape.value_dim() as u32,
            tokens: tokens as u32,
            first: self.shape.first() as u32,
            ..Call::default()
        }
    }

    /// Weights, result and log-sum-exp of a query over the keys for which `sees` is true.
    fn attend(
        &self,
        (query, head): (usize, usize),
        sees: &dyn Fn(usize) -> bool,
    ) -> (Vec<f64>, Vec<f64>, f64) {
        let Shape { heads, key_heads, dim, .. } = self.shape;
        let of = head / (heads / key_heads);
        let query_row = &self.queries[(query * heads + head) * dim..][..dim];
        let row = |all: &'_ [f32], token: usize, dim: usize| -> Vec<f64> {
            let start = (token * key_heads + of) * self.shape.dim;
            all[start..start + dim].iter().map(|x| f64::from(*x)).collect()
        };
        let product = |token: usize| {
            let key = row(&self.keys, token, dim);
            let sum: f64 = query_row.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
            if sees(token) { sum / (dim as f64).sqrt() } else { f64::NEG_INFINITY }
        };
        let mut weights: Vec<f64> = (0..=self.shape.first() + query).map(product).collect();
        let most = weights.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let mut out = vec![0.0; self.shape.value_dim()];
        if most == f64::NEG_INFINITY {
            return (vec![0.0; weights.len()], out, most);
        }
        weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        for (token, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            let value = row(&self.values, token, out.len());
            out.iter_mut().zip(value).for_each(|(x, y)| *x += weight * y);
        }
        (weights, out, most + sum.ln())
    }

    /// Compares results and log-sum-exps; `sees` takes head, position and key.
    fn check(
        &self,
        (out, lse): (&[f32], &[f32]),
        sees: &dyn Fn(usize, usize, usize) -> bool,
        (bound, lse_bound): (f64, f64),
    ) -> Outcome {
        let Shape { queries, heads, .. } = self.shape;
        for at in 0..queries * heads {
            let (query, head) = (at / heads, at % heads);
            let position = self.shape.first() + query;
            let (_, expected, log) = self.attend((query, head), &|key| sees(head, position, key));
            check_close("log-sum-exp", at, lse[at], log, lse_bound)?;
            check_all_close(
                "result",
                &out[at * expected.len()..][..expected.len()],
                &expected,
                bound,
            )?;
        }
        Ok(())
    }
}

/// Page positions: last page first, each with padding before it.
fn places(pages: usize, row: usize) -> Vec<usize> {
    (0..pages).rev().map(|page| page * (PAGE * row + BEFORE)).collect()
}

fn paged(bytes: &[u8], row: usize) -> Vec<u8> {
    let pages = bytes.len().div_ceil(PAGE * row);
    let mut all = vec![0; pages * (PAGE * row + BEFORE)];
    for (content, at) in bytes.chunks(PAGE * row).zip(places(pages, row)) {
        all[at + BEFORE..][..content.len()].copy_from_slice(content);
    }
    all
}

/// Error bound: weights are rounded to the type of the keys.
fn bound(dtype: Dtype) -> f64 {
    if dtype == Dtype::Bf16 { 5e-3 } else { 7e-4 }
}

/// Column and diagonal weights of the last queries.
pub fn estimate(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Estimate)?;
    for (queries, dim, dtype, is_paged) in
        [(64, 64, Dtype::F16, true), (9, 128, Dtype::Bf16, false)]
    {
        let tokens = queries + 1 + lab.below(80);
        let shape = Shape { queries, tokens, heads: 2, key_heads: 1, dim, dtype, is_paged };
        let problem = Problem::new(&lab, shape)?;
        let [columns, distances] = [lab.out(8 * tokens)?, lab.out(8 * tokens)?];
        let scratch = lab.put(&vec![7; 8 * (tokens.div_ceil(1024) * 1216 + 64)])?;
        lab.run(Call {
            values: 0,
            value_stride: 0,
            value_head_stride: 0,
            value_dim: 0,
            numbers: columns.at(),
            more: distances.at(),
            out_head_stride: 4 * tokens as i64,
            scratch: scratch.address,
            scratch_bytes: scratch.len as u64,
            ..problem.call(Kind::Estimate)
        })?;
        let mut expected = [vec![0.0; 2 * tokens], vec![0.0; 2 * tokens]];
        for at in 0..2 * queries {
            let (query, head) = (at / 2, at % 2);
            let (weights, ..) = problem.attend((query, head), &|_| true);
            for (key, weight) in weights.iter().enumerate() {
                expected[0][head * tokens + key] += weight;
                expected[1][head * tokens + shape.first() + query - key] += weight;
            }
        }
        check_all_close("sum of key", &columns.numbers(Dtype::F32)?, &expected[0], 4e-6)?;
        check_all_close("sum of distance", &distances.numbers(Dtype::F32)?, &expected[1], 4e-6)?;
    }
    Ok(())
}

/// Attention of a part of a prompt: over all keys, and over columns and diagonals.
pub fn prefill(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Prefill)?;
    let half = Dtype::Bf16;
    for (dim, dtype, is_paged) in [(64, Dtype::F16, true), (128, half, false), (576, half, true)] {
        let queries = if dim == 576 { 20 } else { 66 };
        let tokens = queries + lab.below(60);
        let shape = Shape { queries, tokens, heads: 2, key_heads: 1, dim, dtype, is_paged };
        let problem = Problem::new(&lab, shape)?;
        for lists in [None, Some(lines(&lab, shape))] {
            if !prefill_once(&lab, &problem, lists)? {
                // Latent attention needs more shared memory than some devices have.
                need_latent(shape)?;
            }
        }
    }
    Ok(())
}

fn need_latent(shape: Shape) -> Outcome {
    super::need(shape.is_latent(), || format!("prefill of heads of {} is rejected", shape.dim))
}

/// Random columns and diagonals for each query head.
fn lines(lab: &Lab<'_>, shape: Shape) -> Vec<[Vec<u32>; 2]> {
    let some = |_| (0..shape.tokens as u32).filter(|_| lab.below(6) == 0).collect();
    (0..shape.heads).map(|_| [0, 1].map(some)).collect()
}

/// False if the device does not support the call.
fn prefill_once(
    lab: &Lab<'_>,
    problem: &Problem<'_>,
    lists: Option<Vec<[Vec<u32>; 2]>>,
) -> Outcome<bool> {
    let Shape { queries, tokens, heads, dtype, .. } = problem.shape;
    let value_dim = problem.shape.value_dim();
    let lists = lists.unwrap_or_default();
    let (mut index_heads, mut starts, mut items) = (Vec::new(), vec![0], Vec::new());
    for list in lists.iter().flatten() {
        items.extend_from_slice(list);
        starts.push(items.len() as u32);
    }
    for head in 0..lists.len() as u32 {
        index_heads.extend([LINES, 2 * head, 2, 0, 0, NO_QUERY]);
    }
    let (index_heads, starts, items) =
        (lab.put_u32(&index_heads)?, lab.put_u32(&starts)?, lab.put_u32(&items)?);
    let out = lab.out(queries * heads * value_dim * 4)?;
    let more = lab.out(queries * heads * 4)?;
    let scratch = lab.put(&vec![7; 12 * heads * (tokens / 32 + 8)])?;
    let if_listed = |buffer: &TestBuffer<'_>| if lists.is_empty() { 0 } else { buffer.address };
    let ran = lab.try_run(Call {
        out: out.at(),
        out_stride: (heads * value_dim * 4) as i64,
        out_head_stride: (value_dim * 4) as i64,
        more: more.at(),
        count: lists.len() as u32,
        numbers: if_listed(&index_heads),
        counts: if_listed(&starts),
        index: if_listed(&items),
        scratch: if_listed(&scratch),
        scratch_bytes: if lists.is_empty() { 0 } else { scratch.len as u64 },
        flags: OUT_F32,
        ..problem.call(Kind::Prefill)
    })?;
    if !ran {
        return Ok(false);
    }
    let sees = |head: usize, position: usize, key: usize| {
        lists.get(head).is_none_or(|[columns, diagonals]| {
            columns.contains(&(key as u32)) || diagonals.contains(&((position - key) as u32))
        })
    };
    let (out, lse) = (out.numbers(Dtype::F32)?, more.numbers(Dtype::F32)?);
    problem.check((&out, &lse), &sees, (bound(dtype), 1e-5))?;
    Ok(true)
}

/// Attention of few queries: over all keys with the weight of each, and over some blocks.
pub fn decode(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Decode)?;
    // Latent rows are shared by many heads.
    for (dim, dtype, is_paged, heads) in
        [(64, Dtype::F32, false, 4), (128, Dtype::F16, true, 4), (576, Dtype::Bf16, true, 20)]
    {
        let (queries, tokens) = (1 + lab.below(3), 140 + lab.below(90));
        let shape = Shape { queries, tokens, heads, key_heads: 1, dim, dtype, is_paged };
        let problem = Problem::new(&lab, shape)?;
        decode_once(&lab, &problem, None)?;
        let blocks = tokens.div_ceil(PAGE) as u32;
        let mut list: Vec<u32> = (0..blocks).filter(|_| lab.below(2) == 0).collect();
        list.push(blocks - 1);
        list.dedup();
        decode_once(&lab, &problem, Some(list))?;
    }
    Ok(())
}

fn decode_once(lab: &Lab<'_>, problem: &Problem<'_>, list: Option<Vec<u32>>) -> Outcome {
    let Shape { queries, tokens, heads, .. } = problem.shape;
    let (rows, value_dim) = (queries * heads, problem.shape.value_dim());
    let has_list = list.is_some();
    let list = list.unwrap_or_default();
    let out = lab.out(rows * value_dim * 4)?;
    let (more, sums) = (lab.out(rows * 4)?, lab.out(heads * tokens * 4)?);
    let places = if has_list { list.len() * PAGE } else { tokens };
    let parts = places.div_ceil(128);
    let sum_bytes = if has_list { 0 } else { 4 * rows * places };
    let scratch = lab.put(&vec![7; 4 * rows * (parts * (value_dim + 2) + 1) + sum_bytes])?;
    let (index, counts) = (lab.put_u32(&list)?, lab.put_u32(&[list.len() as u32])?);
    let if_listed = |n: u64| if has_list { n } else { 0 };
    lab.run(Call {
        out: out.at(),
        out_stride: (heads * value_dim * 4) as i64,
        out_head_stride: (value_dim * 4) as i64,
        more: more.at(),
        count: if_listed(1) as u32,
        index: if_listed(index.address),
        counts: if_listed(counts.address),
        keep: if_listed(list.len() as u64) as u32,
        recent: if_listed(PAGE as u64) as u32,
        numbers: if has_list { 0 } else { sums.at() },
        scratch: scratch.address,
        scratch_bytes: scratch.len as u64,
        flags: OUT_F32 | if has_list { 0 } else { BY_QUERY_HEAD },
        ..problem.call(Kind::Decode)
    })?;
    let sees = |_, _, key: usize| !has_list || list.contains(&((key / PAGE) as u32));
    let (out, lse) = (out.numbers(Dtype::F32)?, more.numbers(Dtype::F32)?);
    // Tiles round sums of products slightly more.
    let bounds = if problem.shape.is_latent() { (5e-5, 2e-5) } else { (4e-6, 2e-6) };
    problem.check((&out, &lse), &sees, bounds)?;
    if has_list {
        return Ok(());
    }
    let mut expected = vec![0.0; heads * tokens];
    for at in 0..rows {
        let (weights, ..) = problem.attend((at / heads, at % heads), &|_| true);
        let line = &mut expected[at % heads * tokens..];
        line.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight);
    }
    check_all_close("sum of key", &sums.numbers(Dtype::F32)?, &expected, 4e-6)
}
