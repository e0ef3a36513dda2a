//! Decode with few rows of queries: reads one tile of keys at a time, in place.

use crate::attention::dot::{Quad, Tile, dot_rows, prefetch, weighted_sum};
use crate::attention::dot_bf16::{dot_rows_bf16, pack_bf16};
use crate::attention::element::{Bf16, Element, F16, F32, I8, read};
use crate::attention::kv_split::{KvSplit, PART_KEYS};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::panel::{Columns, TILE, log_sum, normalizer};
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
    (rows + groups) * padded(problem.keys.dim())
        + rows * row_numbers(problem)
        + groups * 2 * TILE_NUMBERS
        + MAX_DIM as usize
}

/// Numbers of scratch of a row beside its query: its sums, its scores, its maximum and a factor.
fn row_numbers(problem: &Problem<'_>) -> usize {
    padded(problem.values.dim()) + SUM_LANES + TILE + 2
}

/// Lanes of the sum of a row's weights.
const SUM_LANES: usize = MAX_WIDTH / 2;

/// Numbers of scratch of a selected tile: tokens, addresses of keys and of values, a count.
const TILE_NUMBERS: usize = TILE * (1 + 2 * size_of::<*const u8>() / 4) + 1;

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
    let all = dim.next_multiple_of(MAX_WIDTH);
    // SAFETY: guaranteed by the caller; places are below the next multiple of two vectors.
    unsafe {
        for d in 0..all {
            to.add(E::place::<L>(d)).write(if d < dim { *row.add(d) } else { 0.0 });
        }
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
    sums: *mut f32,
    max: *mut f32,
    alpha: *mut f32,
    /// A tile and the next one, alternating.
    tiles: *mut f32,
    /// One row, shared by all groups.
    row: *mut f32,
}

/// A selected tile of a group in its scratch.
struct Selected<'a> {
    tokens: &'a [u32],
    keys: *const *const u8,
    values: *const *const u8,
}

/// What threads compute one part of: all groups, each of up to [`MAX_ROWS`] rows.
pub struct Part<'a> {
    /// The problem.
    pub problem: &'a Problem<'a>,
    /// Its split.
    pub split: &'a KvSplit,
    /// The part.
    pub part: usize,
    /// Whether queries stay bf16 ([`applies`](crate::attention::dot_bf16::applies)).
    pub is_bf16: bool,
    /// Scratch, of the size of [`scratch`] for all rows.
    pub memory: *mut f32,
    /// Results, of the size of [`KvSplit::sizes`].
    pub results: *mut f32,
}

impl GroupScratch {
    /// The selected tile.
    ///
    /// # Safety
    /// The tile was selected, and is the last one or the one before it.
    #[inline(always)]
    unsafe fn tile(&self, tile: usize) -> Selected<'_> {
        // SAFETY: laid out by `Part::select`; counts are at most TILE.
        unsafe {
            let at = self.tiles.add(tile % 2 * TILE_NUMBERS);
            let count = at.cast::<u32>().read() as usize;
            let tokens = std::slice::from_raw_parts(at.add(1).cast(), count);
            let keys = at.add(1 + TILE).cast::<*const u8>();
            Selected { tokens, keys, values: keys.add(TILE) }
        }
    }
}

/// Bytes of a row.
fn row_bytes(rows: &Rows<'_>) -> usize {
    rows.dim() as usize * rows.dtype().bits() as usize / 8
}

/// Computes a part: tile after tile, so that adjacent heads are read together.
///
/// # Safety
/// As of [`Lanes`]; memory is as [`Part`] says.
#[inline(always)]
pub unsafe fn attend<L: Lanes, const R: usize>(part: &Part<'_>) {
    let groups = part.split.groups;
    // SAFETY: guaranteed by the caller.
    unsafe {
        // Loops instead of closures, which would be compiled without the features of this level.
        for group in 0..groups {
            part.begin::<L>(group);
        }
        let mut most = part.select(0);
        for tile in 0..PART_KEYS / TILE {
            if most == 0 {
                break;
            }
            part.products::<L, R>(tile, most);
            most = part.select(tile + 1);
            for group in 0..groups {
                part.accumulate::<L, R>(group, tile);
            }
        }
        for group in 0..groups {
            part.finish::<L>(group);
        }
    }
}

/// The safety of all methods is that of [`attend`].
impl Part<'_> {
    /// # Safety
    /// As of [`attend`].
    #[inline(always)]
    unsafe fn scratch(&self, group: u32) -> GroupScratch {
        let (key_step, value_step) =
            (padded(self.problem.keys.dim()), padded(self.problem.values.dim()));
        let (rows, all) = (self.split.rows, self.split.all_rows());
        let before = group as usize * rows;
        // SAFETY: laid out as in `scratch`. Each kind of number is contiguous for all groups, so
        // that those in use do not compete for a few sets of the L1 cache.
        unsafe {
            let queries = self.memory.add(MAX_DIM as usize);
            // Packed queries need the place of two at least.
            let out = queries.add((all + self.split.groups as usize) * key_step);
            let scores = out.add(all * value_step);
            let sums = scores.add(all * TILE);
            let max = sums.add(all * SUM_LANES);
            let alpha = max.add(all);
            GroupScratch {
                queries: queries.add((before + group as usize) * key_step),
                out: out.add(before * value_step),
                scores: scores.add(before * TILE),
                sums: sums.add(before * SUM_LANES),
                max: max.add(before),
                alpha: alpha.add(before),
                tiles: alpha.add(all + group as usize * 2 * TILE_NUMBERS),
                row: self.memory,
            }
        }
    }

    fn columns(&self, group: u32) -> Columns {
        self.split.columns(group, 0, self.split.rows)
    }

    fn key_head(&self, group: u32) -> u32 {
        self.problem.key_head(group * self.split.group)
    }

    /// Selects the keys of a tile of all groups; returns the number of keys of the largest group.
    /// Beyond its own tiles a part has no keys.
    ///
    /// # Safety
    /// As of [`attend`].
    #[inline(always)]
    unsafe fn select(&self, tile: usize) -> usize {
        let mut most = 0;
        for group in 0..self.split.groups {
            let (mut tokens, mut count) = ([0; TILE], 0);
            if tile < PART_KEYS / TILE {
                count = self.split.tile(self.problem, (group, self.part, tile), &mut tokens);
            }
            // Places behind the last key repeat it.
            let last = tokens[count.saturating_sub(1)];
            tokens[count..].fill(last);
            let head = self.key_head(group);
            // SAFETY: guaranteed by the caller; addresses may be unaligned.
            unsafe {
                let at = self.scratch(group).tiles.add(tile % 2 * TILE_NUMBERS);
                at.cast::<u32>().write(count as u32);
                at.add(1).cast::<[u32; TILE]>().write(tokens);
                if count > 0 {
                    let to = at.add(1 + TILE).cast::<[*const u8; TILE]>();
                    to.write_unaligned(self.problem.keys.addresses(&tokens, head));
                    to.add(1).write_unaligned(self.problem.values.addresses(&tokens, head));
                }
            }
            most = most.max(count);
        }
        most
    }

    /// Computes the products of a tile of all groups: a few keys of each in turn. Prefetches values.
    ///
    /// # Safety
    /// As of [`attend`].
    #[inline(always)]
    unsafe fn products<L: Lanes, const R: usize>(&self, tile: usize, most: usize) {
        let keys = &self.problem.keys;
        let (dim, rows, step) = (keys.dim() as usize, self.split.rows, padded(keys.dim()));
        for i in (0..most).step_by(4) {
            for group in 0..self.split.groups {
                // SAFETY: guaranteed by the caller.
                unsafe {
                    let scratch = self.scratch(group);
                    let selected = scratch.tile(tile);
                    if i >= selected.tokens.len() {
                        continue;
                    }
                    let four = |from: *const *const u8| {
                        from.add(i).cast::<[*const u8; 4]>().read_unaligned()
                    };
                    if tile == 0 && i + 4 < selected.tokens.len() {
                        for row in four(selected.keys.add(4)) {
                            prefetch::<L>(row, row_bytes(keys));
                        }
                    }
                    let (rows_of, upcoming) = (four(selected.keys), four(selected.values));
                    let (quad, to) = (Quad { rows: rows_of, upcoming, dim }, scratch.scores.add(i));
                    if self.is_bf16 {
                        let queries = (scratch.queries.cast_const().cast(), rows);
                        dot_rows_bf16::<false>(quad, queries, to);
                        continue;
                    }
                    let queries = (scratch.queries.cast_const(), rows, step);
                    by_type!(keys, dot_keys, L, R; quad, queries, to);
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
    unsafe fn accumulate<L: Lanes, const R: usize>(&self, group: u32, tile: usize) {
        let (keys, values, rows) = (&self.problem.keys, &self.problem.values, self.split.rows);
        let head = self.key_head(group);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scratch = &self.scratch(group);
            let selected = scratch.tile(tile);
            let tokens = selected.tokens;
            if self.is_bf16 {
                scale_all::<L>(scratch.scores, rows * TILE, self.problem.binary_scale());
            }
            scale_tokens(keys, head, tokens, scratch.scores, rows);
            mask_hidden(self.problem, &self.columns(group), tokens, scratch);
            let place = self.split.place(self.problem, (group, self.part), self.results);
            if !place.scores.is_null() {
                for r in 0..rows {
                    let from = scratch.scores.add(r * TILE);
                    let to = place.scores.add(r * place.scores_step + tile * TILE);
                    std::ptr::copy_nonoverlapping(from, to, tokens.len());
                }
            }
            exponentials::<L>(rows, scratch);
            scale_tokens(values, head, tokens, scratch.scores, rows);
            let upcoming = match scratch.tile(tile + 1) {
                Selected { tokens: [], .. } => selected.values,
                next => next.keys,
            };
            let dim = values.dim() as usize;
            let tile = Tile { rows: selected.values, upcoming, count: tokens.len(), dim };
            let out = (scratch.out, rows, padded(values.dim()));
            let weights = (scratch.scores.cast_const(), scratch.alpha.cast_const());
            by_type!(values, weighted_sum, L, R; tile, weights, out);
        }
    }

    /// # Safety
    /// As of [`attend`].
    #[inline(always)]
    unsafe fn begin<L: Lanes>(&self, group: u32) {
        let (keys, queries) = (&self.problem.keys, &self.problem.queries);
        let (dim, step) = (keys.dim() as usize, padded(keys.dim()));
        let (scale, channels) = (self.problem.binary_scale(), channels(keys, self.key_head(group)));
        let columns = self.columns(group);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scratch = self.scratch(group);
            if self.is_bf16 {
                let row = |r| {
                    let (query, head) = columns.at(r);
                    queries.row(query, head).cast()
                };
                pack_bf16(row, (columns.count, dim), scratch.queries.cast());
            }
            for r in 0..columns.count {
                let ((query, head), to) = (columns.at(r), scratch.queries.add(r * step));
                scratch.max.add(r).write(f32::MIN);
                if self.is_bf16 {
                    continue;
                }
                read::<L>(queries, head, &[query], scratch.row);
                (0..dim).for_each(|d| *scratch.row.add(d) *= scale);
                if let Some(scales) = channels {
                    scales.iter().enumerate().for_each(|(d, scale)| *scratch.row.add(d) *= scale);
                }
                by_type!(keys, permute, L; scratch.row, dim, to);
            }
            let numbers = columns.count * padded(self.problem.values.dim());
            (0..numbers).for_each(|i| scratch.out.add(i).write(0.0));
            (0..columns.count * SUM_LANES).for_each(|i| scratch.sums.add(i).write(0.0));
        }
    }

    /// # Safety
    /// As of [`attend`].
    #[inline(always)]
    unsafe fn finish<L: Lanes>(&self, group: u32) {
        let values = &self.problem.values;
        let (dim, step) = (values.dim() as usize, padded(values.dim()));
        let (columns, channels) = (self.columns(group), channels(values, self.key_head(group)));
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scratch = self.scratch(group);
            let place = self.split.place(self.problem, (group, self.part), self.results);
            for r in 0..columns.count {
                let to = (columns.skip as usize + r) * place.step;
                let sum = L::load(scratch.sums.add(r * SUM_LANES)).sum();
                let out = place.out.add(to * dim);
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
}

/// [`dot_rows`] of keys.
///
/// # Safety
/// As of `dot_rows`.
#[inline(always)]
unsafe fn dot_keys<L: Lanes, E: Element, const R: usize>(
    quad: Quad,
    queries: (*const f32, usize, usize),
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { dot_rows::<L, E, R, false>(quad, queries, out) }
}

/// Multiplies numbers, whose count is a multiple of [`TILE`].
///
/// # Safety
/// As of [`Lanes`].
#[inline(always)]
unsafe fn scale_all<L: Lanes>(numbers: *mut f32, count: usize, scale: f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for i in (0..count).step_by(L::N) {
            L::load(numbers.add(i)).mul(L::splat(scale)).store(numbers.add(i));
        }
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

/// Turns scores into weights, adds them to the sums of rows, and computes the factors of earlier
/// sums.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn exponentials<L: Lanes>(count: usize, scratch: &GroupScratch) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        for r in 0..count {
            let scores = scratch.scores.add(r * TILE);
            let mut most = L::load(scores);
            for i in 1..TILE / L::N {
                most = most.max(L::load(scores.add(i * L::N)));
            }
            let before = *scratch.max.add(r);
            let max = most.largest();
            let max = if max > before { max } else { before };
            let alpha = if max > before { L::splat(before - max).exp2().first() } else { 1.0 };
            scratch.alpha.add(r).write(alpha);
            scratch.max.add(r).write(max);
        }
        for r in 0..count {
            let (scores, sums) = (scratch.scores.add(r * TILE), scratch.sums.add(r * SUM_LANES));
            let top = L::splat(*scratch.max.add(r));
            let mut total = L::load(sums).mul(L::splat(*scratch.alpha.add(r)));
            for i in 0..TILE / L::N {
                let weight = L::load(scores.add(i * L::N)).sub(top).exp2();
                weight.store(scores.add(i * L::N));
                total = total.add(weight);
            }
            total.store(sums);
        }
    }
}
