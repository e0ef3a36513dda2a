//! Decode with few rows of queries: reads one tile of keys at a time, in place.

use crate::attention::dot::{Tile, dot_rows, prefetch, weighted_sum};
use crate::attention::element::{Bf16, Element, F16, F32, I8, read};
use crate::attention::kv_split::{KvSplit, PART_KEYS};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::panel::{Columns, OutputRows, TILE, log_sum, normalizer};
use crate::attention::problem::Problem;
use crate::attention::rows::{MAX_DIM, Rows, Scales};
use crate::meta::dtype::Dtype;

/// Most rows; problems with more rows use panels.
pub const MAX_ROWS: usize = 24;

/// Numbers of a row, padded with zeros.
fn padded(dim: u32) -> usize {
    (dim as usize).next_multiple_of(MAX_WIDTH)
}

/// Numbers of scratch for the rows of all groups.
pub fn scratch(problem: &Problem<'_>, rows: usize, groups: usize) -> usize {
    let row = padded(problem.keys.dim()) + padded(problem.values.dim()) + TILE + 3;
    rows * row + groups * 2 * (TILE + 1) + MAX_DIM as usize
}

/// Calls a generic function for the type of rows.
macro_rules! by_type {
    ($rows:expr, $f:ident, $l:ident $(, $r:ident)?; $($arg:expr),*) => {
        match $rows.dtype() {
            Dtype::F16 => $f::<$l, F16 $(, $r)?>($($arg),*),
            Dtype::Bf16 => $f::<$l, Bf16 $(, $r)?>($($arg),*),
            Dtype::I8 => $f::<$l, I8 $(, $r)?>($($arg),*),
            _ => $f::<$l, F32 $(, $r)?>($($arg),*),
        }
    };
}

/// The scales of a head by channel, if rows have them.
fn channels<'a>(rows: &Rows<'a>, head: u32) -> Option<&'a [f32]> {
    let dim = rows.dim() as usize;
    match rows.scales() {
        Scales::Channel(all) => all.get(head as usize * dim..(head as usize + 1) * dim),
        _ => None,
    }
}

/// Multiplies each token's numbers with its scale, if rows have scales by token.
///
/// # Safety
/// `numbers` has rows of [`TILE`]; tokens exist.
#[inline(always)]
unsafe fn scale_tokens(
    rows: &Rows<'_>,
    head: u32,
    tokens: &[u32],
    numbers: *mut f32,
    count: usize,
) {
    let Scales::Token(all) = rows.scales() else { return };
    for (i, &token) in tokens.iter().enumerate() {
        let scale = all[token as usize * rows.heads() as usize + head as usize];
        for r in 0..count {
            // SAFETY: guaranteed by the caller.
            unsafe { *numbers.add(r * TILE + i) *= scale };
        }
    }
}

/// Permutes a query into the order that [`dot_rows`] reads.
///
/// # Safety
/// `row` has `dim` numbers; `to` has room for them, padded with zeros.
#[inline(always)]
pub unsafe fn permute<L: Lanes, E: Element>(row: *const f32, dim: usize, to: *mut f32) {
    // SAFETY: guaranteed by the caller; places are below the next multiple of two vectors.
    unsafe {
        (0..dim.next_multiple_of(MAX_WIDTH)).for_each(|d| to.add(d).write(0.0));
        (0..dim).for_each(|d| to.add(E::place::<L>(d)).write(*row.add(d)));
    }
}

/// Reverts the order of [`weighted_sum`].
///
/// # Safety
/// As of [`permute`].
#[inline(always)]
unsafe fn unpermute<L: Lanes, E: Element>(from: *const f32, dim: usize, to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { (0..dim).for_each(|d| to.add(d).write(*from.add(E::place::<L>(d)))) }
}

/// Scratch of a group.
struct GroupScratch {
    queries: *mut f32,
    out: *mut f32,
    scores: *mut f32,
    max: *mut f32,
    sum: *mut f32,
    alpha: *mut f32,
    /// Keys of a tile and of the next one, alternating.
    tokens: *mut [u32; TILE],
    /// Number of keys in each.
    counts: *mut u32,
    /// One row, shared by all groups.
    row: *mut f32,
}

impl GroupScratch {
    /// # Safety
    /// `memory` has the size of [`scratch`] for all rows.
    #[inline(always)]
    unsafe fn of(
        problem: &Problem<'_>,
        split: &KvSplit,
        group: u32,
        memory: *mut f32,
    ) -> GroupScratch {
        let (step, value_step) = (padded(problem.keys.dim()), padded(problem.values.dim()));
        let rows = split.rows;
        // SAFETY: laid out as in `scratch`: the row, then group after group.
        unsafe {
            let size = rows * (step + value_step + TILE + 3) + 2 * (TILE + 1);
            let queries = memory.add(MAX_DIM as usize + group as usize * size);
            let out = queries.add(rows * step);
            let scores = out.add(rows * value_step);
            let max = scores.add(rows * TILE);
            let (sum, alpha, tokens) = (max.add(rows), max.add(2 * rows), max.add(3 * rows));
            let (tokens, counts) = (tokens.cast(), tokens.add(2 * TILE).cast());
            GroupScratch { queries, out, scores, max, sum, alpha, tokens, counts, row: memory }
        }
    }
}

impl GroupScratch {
    /// The keys of a selected tile.
    ///
    /// # Safety
    /// The tile was selected, and is the last one or the one before it.
    #[inline(always)]
    unsafe fn keys(&self, tile: usize) -> &[u32] {
        // SAFETY: counts are at most TILE.
        unsafe {
            let count = *self.counts.add(tile % 2) as usize;
            std::slice::from_raw_parts(self.tokens.add(tile % 2).cast(), count)
        }
    }
}

/// Addresses of the rows of tokens; places behind the last repeat it.
#[inline(always)]
fn at(rows: &Rows<'_>, head: u32, tokens: &[u32]) -> Tile {
    let last = tokens.last().map_or(std::ptr::null(), |&token| rows.row(token, head));
    let mut tile = Tile { rows: [last; TILE], count: tokens.len(), dim: rows.dim() as usize };
    tile.rows.iter_mut().zip(tokens).for_each(|(row, &t)| *row = rows.row(t, head));
    tile
}

/// Computes a part of all groups, each of up to [`MAX_ROWS`] rows: tile after tile, so that
/// adjacent heads are read together.
///
/// # Safety
/// As of [`Lanes`]; `memory` has the size of [`scratch`] for all rows, `results` that of
/// [`KvSplit::sizes`].
#[inline(always)]
pub unsafe fn attend<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    split: &KvSplit,
    part: usize,
    memory: *mut f32,
    results: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for group in 0..split.groups {
            let scratch = GroupScratch::of(problem, split, group, memory);
            begin::<L>(problem, &split.columns(group, 0, split.rows), &scratch);
        }
        let mut most = select_tile(problem, split, (part, 0), memory);
        for tile in 0..PART_KEYS / TILE {
            if most == 0 {
                break;
            }
            products::<L, R>(problem, split, tile, memory, most);
            most = select_tile(problem, split, (part, tile + 1), memory);
            for group in 0..split.groups {
                let place = split.place(problem, (group, part), results);
                let scores = (place.scores, place.scores_step);
                accumulate::<L, R>(problem, split, (group, tile), memory, scores);
            }
        }
        for group in 0..split.groups {
            let scratch = GroupScratch::of(problem, split, group, memory);
            let place = split.place(problem, (group, part), results);
            finish::<L>(problem, &split.columns(group, 0, split.rows), &scratch, &place);
        }
    }
}

/// Selects the keys of a tile of all groups; returns the number of keys of the largest group.
/// Beyond its own tiles a part has no keys.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn select_tile(
    problem: &Problem<'_>,
    split: &KvSplit,
    (part, tile): (usize, usize),
    memory: *mut f32,
) -> usize {
    let mut most = 0;
    for group in 0..split.groups {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scratch = GroupScratch::of(problem, split, group, memory);
            let tokens = &mut *scratch.tokens.add(tile % 2);
            let is_ours = tile < PART_KEYS / TILE;
            let count = if is_ours { split.tile(problem, (group, part, tile), tokens) } else { 0 };
            scratch.counts.add(tile % 2).write(count as u32);
            most = most.max(count);
        }
    }
    most
}

/// Bytes of a row.
fn row_bytes(rows: &Rows<'_>) -> usize {
    rows.dim() as usize * rows.dtype().bits() as usize / 8
}

/// Computes the products of a tile of all groups: a few keys of each in turn. Prefetches values.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn products<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    split: &KvSplit,
    tile: usize,
    memory: *mut f32,
    most: usize,
) {
    let (keys, values) = (&problem.keys, &problem.values);
    let (dim, step) = (keys.dim() as usize, padded(keys.dim()));
    for i in (0..most).step_by(4) {
        for group in 0..split.groups {
            // SAFETY: guaranteed by the caller; rows beyond the last repeat it.
            unsafe {
                let scratch = GroupScratch::of(problem, split, group, memory);
                let tokens = scratch.keys(tile);
                if i >= tokens.len() {
                    continue;
                }
                let head = problem.key_head(group * split.group);
                if tile == 0 {
                    for &token in tokens.iter().skip(i + 4).take(4) {
                        prefetch::<L>(keys.row(token, head), row_bytes(keys));
                    }
                }
                let dot_block = [0, 1, 2, 3].map(|j| tokens[(i + j).min(tokens.len() - 1)]);
                let rows = dot_block.map(|token| keys.row(token, head));
                let upcoming = dot_block.map(|token| values.row(token, head));
                let queries = (scratch.queries.cast_const(), split.rows, step);
                by_type!(keys, dot_rows, L, R; rows, upcoming, dim, queries, scratch.scores.add(i));
            }
        }
    }
}

/// Accumulates a tile of values of a group, by the products of its keys. Prefetches keys of the
/// next tile.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn accumulate<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    split: &KvSplit,
    (group, tile): (u32, usize),
    memory: *mut f32,
    (scores, scores_step): (*mut f32, usize),
) {
    let (keys, values) = (&problem.keys, &problem.values);
    let columns = &split.columns(group, 0, split.rows);
    let (rows, head) = (split.rows, problem.key_head(columns.first_head));
    // SAFETY: guaranteed by the caller.
    unsafe {
        let scratch = &GroupScratch::of(problem, split, group, memory);
        let tokens = scratch.keys(tile);
        scale_tokens(keys, head, tokens, scratch.scores, rows);
        mask_hidden(problem, columns, tokens, scratch);
        if !scores.is_null() {
            for r in 0..rows {
                let (from, to) = (scratch.scores.add(r * TILE), scores.add(r * scores_step));
                std::ptr::copy_nonoverlapping(from, to.add(tile * TILE), tokens.len());
            }
        }
        exponentials::<L>(rows, scratch);
        scale_tokens(values, head, tokens, scratch.scores, rows);
        let of_values = at(values, head, tokens);
        let out = (scratch.out, rows, padded(values.dim()));
        let weights = (scratch.scores.cast_const(), scratch.alpha.cast_const());
        let upcoming = match scratch.keys(tile + 1) {
            [] => at(values, head, tokens),
            next => at(keys, head, next),
        };
        by_type!(values, weighted_sum, L, R; &of_values, weights.0, weights.1, out, &upcoming);
    }
}

/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn begin<L: Lanes>(problem: &Problem<'_>, columns: &Columns, scratch: &GroupScratch) {
    let (dim, step) = (problem.keys.dim() as usize, padded(problem.keys.dim()));
    let (keys, scale) = (&problem.keys, problem.binary_scale());
    let channels = channels(keys, problem.key_head(columns.first_head));
    // SAFETY: guaranteed by the caller.
    unsafe {
        for r in 0..columns.count {
            let (query, head) = columns.at(r);
            read::<L>(&problem.queries, head, &[query], scratch.row);
            (0..dim).for_each(|d| *scratch.row.add(d) *= scale);
            if let Some(scales) = channels {
                scales.iter().enumerate().for_each(|(d, scale)| *scratch.row.add(d) *= scale);
            }
            by_type!(keys, permute, L; scratch.row, dim, scratch.queries.add(r * step));
            scratch.max.add(r).write(f32::MIN);
            scratch.sum.add(r).write(0.0);
        }
        let numbers = columns.count * padded(problem.values.dim());
        (0..numbers).for_each(|i| scratch.out.add(i).write(0.0));
    }
}

/// Sets the scores of keys that a row does not see, and of the tile's padding, to -inf.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn mask_hidden(
    problem: &Problem<'_>,
    columns: &Columns,
    tokens: &[u32],
    scratch: &GroupScratch,
) {
    for r in 0..columns.count {
        let visible_keys = problem.visible_keys(columns.at(r).0);
        let is_full =
            tokens.len() == TILE && tokens.last().is_some_and(|&last| last < visible_keys);
        let from = if is_full { TILE } else { tokens.partition_point(|&t| t < visible_keys) };
        for i in from..TILE {
            // SAFETY: guaranteed by the caller.
            unsafe { scratch.scores.add(r * TILE + i).write(f32::NEG_INFINITY) };
        }
    }
}

/// Turns scores into weights, and computes the factors of earlier sums.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn exponentials<L: Lanes>(count: usize, scratch: &GroupScratch) {
    for r in 0..count {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scores = scratch.scores.add(r * TILE);
            let mut most = L::load(scores);
            (1..TILE / L::N).for_each(|i| most = most.max(L::load(scores.add(i * L::N))));
            let before = *scratch.max.add(r);
            let max = most.largest();
            let max = if max > before { max } else { before };
            let (top, mut total) = (L::splat(max), L::splat(0.0));
            for i in 0..TILE / L::N {
                let weight = L::load(scores.add(i * L::N)).sub(top).exp2();
                weight.store(scores.add(i * L::N));
                total = total.add(weight);
            }
            let alpha = if max > before { L::splat(before - max).exp2().first() } else { 1.0 };
            scratch.alpha.add(r).write(alpha);
            scratch.max.add(r).write(max);
            scratch.sum.add(r).write(*scratch.sum.add(r) * alpha + total.sum());
        }
    }
}

/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn finish<L: Lanes>(
    problem: &Problem<'_>,
    columns: &Columns,
    scratch: &GroupScratch,
    place: &OutputRows,
) {
    let (values, step) = (&problem.values, padded(problem.values.dim()));
    let dim = values.dim() as usize;
    let channels = channels(values, problem.key_head(columns.first_head));
    for r in 0..columns.count {
        let to = (columns.skip as usize + r) * place.step;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (sum, out) = (*scratch.sum.add(r), place.out.add(to * dim));
            by_type!(values, unpermute, L; scratch.out.add(r * step), dim, out);
            let normalizer = normalizer(sum);
            (0..dim).for_each(|d| *out.add(d) *= normalizer);
            if let Some(scales) = channels {
                scales.iter().enumerate().for_each(|(d, scale)| *out.add(d) *= scale);
            }
            place.lse.add(to).write(log_sum(*scratch.max.add(r), sum));
        }
    }
}
