//! Decode with few rows of queries: a tile of keys at a time, read where it is.

use crate::attention::dot::{Tile, dot_rows, prefetch, weighted_sum};
use crate::attention::element::{Bf16, Element, F16, F32, I8, read};
use crate::attention::kv_split::{KvSplit, PART_KEYS};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::panel::{Columns, OutputRows, TILE, log_sum, normalizer};
use crate::attention::problem::Problem;
use crate::attention::rows::{MAX_DIM, Rows, Scales};
use crate::meta::dtype::Dtype;

/// Most rows; more stand in panels.
pub const MAX_ROWS: usize = 24;

/// Numbers of a row with zeros at the end.
fn padded(dim: u32) -> usize {
    (dim as usize).next_multiple_of(MAX_WIDTH)
}

/// Numbers of scratch for rows of all groups.
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

/// Scales by number, of a head.
fn channels<'a>(rows: &Rows<'a>, head: u32) -> Option<&'a [f32]> {
    let dim = rows.dim() as usize;
    match rows.scales() {
        Scales::Channel(all) => all.get(head as usize * dim..(head as usize + 1) * dim),
        _ => None,
    }
}

/// Multiplies what belongs to each of some tokens with its scale, where tokens have them.
///
/// # Safety
/// `numbers` has rows of [`TILE`], tokens are there.
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
            // SAFETY: the caller's promise.
            unsafe { *numbers.add(r * TILE + i) *= scale };
        }
    }
}

/// Puts a query where [`dot_rows`] reads it.
///
/// # Safety
/// `row` has `dim` numbers, `to` room for them with zeros at the end.
#[inline(always)]
pub unsafe fn permute<L: Lanes, E: Element>(row: *const f32, dim: usize, to: *mut f32) {
    // SAFETY: the caller's promise; places are below the next multiple of two vectors.
    unsafe {
        (0..dim.next_multiple_of(MAX_WIDTH)).for_each(|d| to.add(d).write(0.0));
        (0..dim).for_each(|d| to.add(E::place::<L>(d)).write(*row.add(d)));
    }
}

/// Takes what [`weighted_sum`] wrote back into order.
///
/// # Safety
/// As of [`permute`].
#[inline(always)]
unsafe fn unpermute<L: Lanes, E: Element>(from: *const f32, dim: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { (0..dim).for_each(|d| to.add(d).write(*from.add(E::place::<L>(d)))) }
}

/// Memory of a group.
struct GroupScratch {
    queries: *mut f32,
    out: *mut f32,
    scores: *mut f32,
    max: *mut f32,
    sum: *mut f32,
    alpha: *mut f32,
    /// Keys of a tile and of the one after it, in turn.
    tokens: *mut [u32; TILE],
    /// How many.
    counts: *mut u32,
    /// One row, of all groups.
    row: *mut f32,
}

impl GroupScratch {
    /// # Safety
    /// `memory` is of [`scratch`] for all rows.
    #[inline(always)]
    unsafe fn of(
        problem: &Problem<'_>,
        split: &KvSplit,
        group: u32,
        memory: *mut f32,
    ) -> GroupScratch {
        let (step, value_step) = (padded(problem.keys.dim()), padded(problem.values.dim()));
        let rows = split.rows;
        // SAFETY: in the order of `scratch`, a group after the other behind the row.
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
    /// The keys of a tile that was laid out.
    ///
    /// # Safety
    /// It was, and is the last or the one before it.
    #[inline(always)]
    unsafe fn keys(&self, tile: usize) -> &[u32] {
        // SAFETY: counts are up to TILE.
        unsafe {
            let count = *self.counts.add(tile % 2) as usize;
            std::slice::from_raw_parts(self.tokens.add(tile % 2).cast(), count)
        }
    }
}

/// Where rows of tokens are; behind the last, where the last is.
#[inline(always)]
fn at(rows: &Rows<'_>, head: u32, tokens: &[u32]) -> Tile {
    let last = tokens.last().map_or(std::ptr::null(), |&token| rows.row(token, head));
    let mut tile = Tile { rows: [last; TILE], count: tokens.len(), dim: rows.dim() as usize };
    tile.rows.iter_mut().zip(tokens).for_each(|(row, &t)| *row = rows.row(t, head));
    tile
}

/// Computes a part of all groups, each of up to [`MAX_ROWS`] rows: tile after tile, so that
/// heads that lie side by side are read together.
///
/// # Safety
/// As of [`Lanes`]; `memory` is of [`scratch`] for all rows, `results` of [`KvSplit::sizes`].
#[inline(always)]
pub unsafe fn attend<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    split: &KvSplit,
    part: usize,
    memory: *mut f32,
    results: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for group in 0..split.groups {
            let group_rows = GroupScratch::of(problem, split, group, memory);
            begin::<L>(problem, &split.columns(group, 0, split.rows), &group_rows);
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
            let group_rows = GroupScratch::of(problem, split, group, memory);
            let place = split.place(problem, (group, part), results);
            finish::<L>(problem, &split.columns(group, 0, split.rows), &group_rows, &place);
        }
    }
}

/// Lays out the keys of a tile of all groups; how many the group has that has the most. Past
/// its own tiles a part has none.
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
        // SAFETY: the caller's promise.
        unsafe {
            let group_rows = GroupScratch::of(problem, split, group, memory);
            let tokens = &mut *group_rows.tokens.add(tile % 2);
            let is_ours = tile < PART_KEYS / TILE;
            let count = if is_ours { split.tile(problem, (group, part, tile), tokens) } else { 0 };
            group_rows.counts.add(tile % 2).write(count as u32);
            most = most.max(count);
        }
    }
    most
}

/// Bytes of a row.
fn row_bytes(rows: &Rows<'_>) -> usize {
    rows.dim() as usize * rows.dtype().bits() as usize / 8
}

/// Products of a tile of all groups: a few keys of each, then the next. Values are called for.
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
            // SAFETY: the caller's promise; rows beyond the last are the last.
            unsafe {
                let group_rows = GroupScratch::of(problem, split, group, memory);
                let tokens = group_rows.keys(tile);
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
                let queries = (group_rows.queries.cast_const(), split.rows, step);
                by_type!(keys, dot_rows, L, R; rows, upcoming, dim, queries, group_rows.scores.add(i));
            }
        }
    }
}

/// Takes a tile of keys of a group in, by its products. Keys of the next tile are called for.
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
    // SAFETY: the caller's promise.
    unsafe {
        let group_rows = &GroupScratch::of(problem, split, group, memory);
        let tokens = group_rows.keys(tile);
        scale_tokens(keys, head, tokens, group_rows.scores, rows);
        mask_hidden(problem, columns, tokens, group_rows);
        if !scores.is_null() {
            for r in 0..rows {
                let (from, to) = (group_rows.scores.add(r * TILE), scores.add(r * scores_step));
                std::ptr::copy_nonoverlapping(from, to.add(tile * TILE), tokens.len());
            }
        }
        exponentials::<L>(rows, group_rows);
        scale_tokens(values, head, tokens, group_rows.scores, rows);
        let of_values = at(values, head, tokens);
        let out = (group_rows.out, rows, padded(values.dim()));
        let weights = (group_rows.scores.cast_const(), group_rows.alpha.cast_const());
        let upcoming = match group_rows.keys(tile + 1) {
            [] => at(values, head, tokens),
            next => at(keys, head, next),
        };
        by_type!(values, weighted_sum, L, R; &of_values, weights.0, weights.1, out, &upcoming);
    }
}

/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn begin<L: Lanes>(problem: &Problem<'_>, columns: &Columns, group_rows: &GroupScratch) {
    let (dim, step) = (problem.keys.dim() as usize, padded(problem.keys.dim()));
    let (keys, scale) = (&problem.keys, problem.binary_scale());
    let channels = channels(keys, problem.key_head(columns.first_head));
    // SAFETY: the caller's promise.
    unsafe {
        for r in 0..columns.count {
            let (query, head) = columns.at(r);
            read::<L>(&problem.queries, head, &[query], group_rows.row);
            (0..dim).for_each(|d| *group_rows.row.add(d) *= scale);
            if let Some(scales) = channels {
                scales.iter().enumerate().for_each(|(d, scale)| *group_rows.row.add(d) *= scale);
            }
            by_type!(keys, permute, L; group_rows.row, dim, group_rows.queries.add(r * step));
            group_rows.max.add(r).write(f32::MIN);
            group_rows.sum.add(r).write(0.0);
        }
        let numbers = columns.count * padded(problem.values.dim());
        (0..numbers).for_each(|i| group_rows.out.add(i).write(0.0));
    }
}

/// Makes -inf what a row does not see, and what fills the tile up.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn mask_hidden(
    problem: &Problem<'_>,
    columns: &Columns,
    tokens: &[u32],
    group_rows: &GroupScratch,
) {
    for r in 0..columns.count {
        let visible_keys = problem.visible_keys(columns.at(r).0);
        let is_full =
            tokens.len() == TILE && tokens.last().is_some_and(|&last| last < visible_keys);
        let from = if is_full { TILE } else { tokens.partition_point(|&t| t < visible_keys) };
        for i in from..TILE {
            // SAFETY: the caller's promise.
            unsafe { group_rows.scores.add(r * TILE + i).write(f32::NEG_INFINITY) };
        }
    }
}

/// Weights from scores, and what earlier sums have to be multiplied with.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn exponentials<L: Lanes>(count: usize, group_rows: &GroupScratch) {
    for r in 0..count {
        // SAFETY: the caller's promise.
        unsafe {
            let scores = group_rows.scores.add(r * TILE);
            let mut most = L::load(scores);
            (1..TILE / L::N).for_each(|i| most = most.max(L::load(scores.add(i * L::N))));
            let before = *group_rows.max.add(r);
            let max = most.largest();
            let max = if max > before { max } else { before };
            let (top, mut total) = (L::splat(max), L::splat(0.0));
            for i in 0..TILE / L::N {
                let weight = L::load(scores.add(i * L::N)).sub(top).exp2();
                weight.store(scores.add(i * L::N));
                total = total.add(weight);
            }
            let alpha = if max > before { L::splat(before - max).exp2().first() } else { 1.0 };
            group_rows.alpha.add(r).write(alpha);
            group_rows.max.add(r).write(max);
            group_rows.sum.add(r).write(*group_rows.sum.add(r) * alpha + total.sum());
        }
    }
}

/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn finish<L: Lanes>(
    problem: &Problem<'_>,
    columns: &Columns,
    group_rows: &GroupScratch,
    place: &OutputRows,
) {
    let (values, step) = (&problem.values, padded(problem.values.dim()));
    let dim = values.dim() as usize;
    let channels = channels(values, problem.key_head(columns.first_head));
    for r in 0..columns.count {
        let to = (columns.skip as usize + r) * place.step;
        // SAFETY: the caller's promise.
        unsafe {
            let (sum, out) = (*group_rows.sum.add(r), place.out.add(to * dim));
            by_type!(values, unpermute, L; group_rows.out.add(r * step), dim, out);
            let normalizer = normalizer(sum);
            (0..dim).for_each(|d| *out.add(d) *= normalizer);
            if let Some(scales) = channels {
                scales.iter().enumerate().for_each(|(d, scale)| *out.add(d) *= scale);
            }
            place.lse.add(to).write(log_sum(*group_rows.max.add(r), sum));
        }
    }
}
