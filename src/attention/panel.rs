//! Building blocks of prefill kernels. Queries are columns, and a panel has two vectors of columns.
//! A tile of keys times a panel is a matrix product, and each lane computes the maximum and sum of
//! its own column.
//!
//! The result of a column does not depend on its neighbours, so its bits do not depend on the place
//! of a query.

use crate::attention::dot::prefetch_row;
use crate::attention::element::read;
use crate::attention::key_cursor::KeyCursor;
use crate::attention::keys::{Kind, Lines};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::problem::Problem;

/// Keys of a tile.
pub const TILE: usize = 64;
/// Most columns that use a tile while it is in the cache.
pub const MAX_COLUMNS: usize = 128;

/// Rows of queries in columns: through `heads` heads of a token, then those of the next token.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Query of the first row.
    pub first_query: u32,
    /// Head of the first row.
    pub first_head: u32,
    /// Heads of a token.
    pub heads: u32,
    /// Rows before the first column.
    pub skip: u32,
    /// Number of columns.
    pub count: usize,
}

impl Columns {
    /// The query and head of a column.
    pub fn at(&self, column: usize) -> (u32, u32) {
        let row = self.skip + column as u32;
        (self.first_query + row / self.heads, self.first_head + row % self.heads)
    }
}

/// Destination of results; rows are counted as in [`Columns`].
#[derive(Clone, Copy, Debug)]
pub struct OutputRows {
    /// Sums of values, `[row, Dv]`.
    pub out: *mut f32,
    /// Log-sum-exps, one a row; may be null.
    pub lse: *mut f32,
    /// Distance of rows.
    pub step: usize,
    /// Scores in powers of two, by row and place in the cursor; may be null.
    pub scores: *mut f32,
    /// Distance of rows of scores.
    pub scores_step: usize,
}

/// Scratch of one thread, laid out for the largest piece.
#[derive(Clone, Copy)]
pub struct PanelScratch {
    dim: usize,
    value_dim: usize,
    /// Whether values are read as the first numbers of keys.
    is_latent: bool,
    keys: *mut f32,
    values: *mut f32,
    scores: *mut f32,
    panels: *mut f32,
    panel: usize,
    /// One bit for each distance: whether it is a diagonal.
    pub bits: *mut u32,
}

/// Numbers of scratch for `columns` columns of a problem.
pub fn scratch(problem: &Problem<'_>, columns: usize) -> usize {
    let (dim, value_dim) = (problem.keys.dim() as usize, problem.values.dim() as usize);
    let columns = columns.next_multiple_of(MAX_WIDTH);
    let has_lines = problem.select.heads.iter().any(|head| head.kind == Kind::Lines);
    let bits = if has_lines { bit_words(problem) } else { 0 };
    TILE * (dim + value_dim + MAX_WIDTH) + columns * (dim + value_dim + 2) + bits
}

/// Words of the diagonal bits, with two that are read beyond the last.
pub fn bit_words(problem: &Problem<'_>) -> usize {
    (problem.first_query + problem.queries.tokens()) as usize / 32 + 3
}

impl PanelScratch {
    /// Lays out scratch of [`scratch`] numbers for `columns` columns.
    ///
    /// # Safety
    /// `at` points to that many numbers.
    pub unsafe fn new(
        problem: &Problem<'_>,
        columns: usize,
        width: usize,
        at: *mut f32,
    ) -> PanelScratch {
        let (dim, value_dim) = (problem.keys.dim() as usize, problem.values.dim() as usize);
        // SAFETY: laid out as in `scratch`.
        unsafe {
            let values = at.add(TILE * dim);
            let scores = values.add(TILE * value_dim);
            let panels = scores.add(TILE * MAX_WIDTH);
            let bits = panels.add(columns.next_multiple_of(MAX_WIDTH) * (dim + value_dim + 2));
            PanelScratch {
                dim,
                value_dim,
                is_latent: problem.is_latent(),
                keys: at,
                values,
                scores,
                panels,
                panel: width * (dim + value_dim + 2),
                bits: bits.cast(),
            }
        }
    }
}

/// `rows` rows of a product: `out[i][..] = alpha * out[i][..] + sum over k of a[i, k] * b[k][..]`.
/// Without alpha, `out` is overwritten. `a[i, k]` is at `i * by_row + k * by_step`; rows of b and
/// out are two vectors. `interleaved` is called every few rows.
///
/// # Safety
/// As of [`Lanes`]; all operands exist.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub unsafe fn product<L: Lanes, const R: usize>(
    a: *const f32,
    (by_row, by_step): (usize, usize),
    rows: usize,
    b: *const f32,
    steps: usize,
    out: *mut f32,
    alpha: Option<[L; 2]>,
    mut interleaved: impl FnMut(),
) {
    let mut i = 0;
    // SAFETY: rows i to i + the size of the block exist.
    unsafe {
        while i + R <= rows {
            let (a, out) = (a.add(i * by_row), out.add(i * L::WIDTH));
            interleaved();
            block::<L, R>(a, (by_row, by_step), b, steps, out, alpha);
            i += R;
        }
        while i + 2 <= rows {
            let (a, out) = (a.add(i * by_row), out.add(i * L::WIDTH));
            interleaved();
            block::<L, 2>(a, (by_row, by_step), b, steps, out, alpha);
            i += 2;
        }
        if i < rows {
            let (a, out) = (a.add(i * by_row), out.add(i * L::WIDTH));
            block::<L, 1>(a, (by_row, by_step), b, steps, out, alpha);
        }
    }
}

/// # Safety
/// As of [`product`], for R rows.
#[inline(always)]
unsafe fn block<L: Lanes, const R: usize>(
    a: *const f32,
    (by_row, by_step): (usize, usize),
    b: *const f32,
    steps: usize,
    out: *mut f32,
    alpha: Option<[L; 2]>,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; R];
        if let Some([x, y]) = alpha {
            for (i, sums) in sums.iter_mut().enumerate() {
                let out = out.add(i * L::WIDTH);
                *sums = [L::load(out).mul(x), L::load(out.add(L::N)).mul(y)];
            }
        }
        for k in 0..steps {
            let b = b.add(k * L::WIDTH);
            let [x, y] = [L::load(b), L::load(b.add(L::N))];
            let a = a.add(k * by_step);
            for (i, sums) in sums.iter_mut().enumerate() {
                let factor = L::splat(*a.add(i * by_row));
                *sums = [factor.fma(x, sums[0]), factor.fma(y, sums[1])];
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let out = out.add(i * L::WIDTH);
            sums[0].store(out);
            sums[1].store(out.add(L::N));
        }
    }
}

/// Packs queries, multiplied with `scale`, into the columns of panels; `row` is scratch for one.
///
/// # Safety
/// As of [`Lanes`]; the rows exist, and `to` has room for the panels, each of `panel` numbers.
#[inline(always)]
pub unsafe fn pack<L: Lanes>(
    problem: &Problem<'_>,
    columns: &Columns,
    scale: f32,
    row: *mut f32,
    (to, panel): (*mut f32, usize),
) {
    let dim = problem.keys.dim() as usize;
    let scratch = columns.count.next_multiple_of(L::WIDTH);
    for column in 0..scratch {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let to = to.add(column / L::WIDTH * panel + column % L::WIDTH);
            if column < columns.count {
                let (query, head) = columns.at(column);
                read::<L>(&problem.queries, head, &[query], row);
                (0..dim).for_each(|d| to.add(d * L::WIDTH).write(*row.add(d) * scale));
            } else {
                (0..dim).for_each(|d| to.add(d * L::WIDTH).write(0.0));
            }
        }
    }
}

/// Computes columns with the keys of a cursor.
///
/// # Safety
/// As of [`Lanes`]; `scratch` is for as many columns, results have their place.
#[inline(always)]
pub unsafe fn attend<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    columns: &Columns,
    lines: Option<Lines<'_>>,
    (mut cursor, most): (KeyCursor<'_>, usize),
    scratch: &PanelScratch,
    place: &OutputRows,
) {
    let key_head = problem.key_head(columns.first_head);
    let mut visible = [0_u32; MAX_COLUMNS + MAX_WIDTH];
    for (column, visible_keys) in visible.iter_mut().enumerate().take(columns.count) {
        *visible_keys = problem.visible_keys(columns.at(column).0);
    }
    let panels = columns.count.div_ceil(L::WIDTH);
    let mut next = [0_u32; TILE];
    let (mut seen, mut column) = (0, 0);
    // SAFETY: guaranteed by the caller; a panel is queries, sums of values, maxima and sums.
    unsafe {
        let (scale, to) = (problem.binary_scale(), (scratch.panels, scratch.panel));
        pack::<L>(problem, columns, scale, scratch.scores, to);
        for p in 0..panels {
            let state = scratch.panels.add(p * scratch.panel + scratch.dim * L::WIDTH);
            (0..(scratch.value_dim + 2) * L::WIDTH).for_each(|i| state.add(i).write(0.0));
            let max = state.add(scratch.value_dim * L::WIDTH);
            (0..L::WIDTH).for_each(|i| max.add(i).write(f32::MIN));
        }
        let mut upcoming = cursor.take(&mut next, most);
        while upcoming > 0 {
            let (n, tile) = (upcoming, next);
            upcoming = cursor.take(&mut next, most - seen - n);
            // Prefetches are spread between products: many at once would stall.
            let steps = panels * (n.div_ceil(R) + scratch.value_dim.div_ceil(R));
            let each = upcoming.div_ceil(steps.max(1));
            let mut called = next[..upcoming].chunks(each.max(1));
            let mut interleaved = || {
                for &token in called.next().unwrap_or_default() {
                    prefetch_row::<L>(&problem.keys, token, key_head);
                    prefetch_row::<L>(&problem.values, token, key_head);
                }
            };
            read::<L>(&problem.keys, key_head, &tile[..n], scratch.keys);
            if !scratch.is_latent {
                read::<L>(&problem.values, key_head, &tile[..n], scratch.values);
            }
            for p in 0..panels {
                let visible = &visible[p * L::WIDTH..(p + 1) * L::WIDTH];
                let used = L::WIDTH.min(columns.count - p * L::WIDTH);
                // Columns ascend: the last one sees every key that any of them sees.
                let all = n;
                let n = tile[..n].partition_point(|&key| key < visible[used - 1]);
                score::<L, R>(scratch, p, &tile[..n], &visible[..used], &mut interleaved);
                if let Some(lines) = lines {
                    let position = problem.first_query + columns.at(p * L::WIDTH).0;
                    let at = (problem.first_key, position);
                    mask_lines::<L>(scratch, &tile[..n], at, &lines, &mut column);
                }
                if !place.scores.is_null() {
                    let first = columns.skip as usize + p * L::WIDTH;
                    let to = place.scores.add(first * place.scores_step + seen);
                    copy_scores::<L>(scratch, (n, all), (to, used, place.scores_step));
                }
                accumulate::<L, R>(scratch, p, n, &mut interleaved);
            }
            seen += n;
        }
        finish::<L>(columns, scratch, place);
    }
}

/// Copies the scores of `n` keys with a panel; scores of the other keys, up to `all`, are -inf.
///
/// # Safety
/// As of [`attend`]; `to` has `used` rows of `all` numbers.
#[inline(always)]
unsafe fn copy_scores<L: Lanes>(
    scratch: &PanelScratch,
    (n, all): (usize, usize),
    (to, used, step): (*mut f32, usize, usize),
) {
    for c in 0..used {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let row = to.add(c * step);
            (0..n).for_each(|i| row.add(i).write(*scratch.scores.add(i * L::WIDTH + c)));
            (n..all).for_each(|i| row.add(i).write(f32::NEG_INFINITY));
        }
    }
}

/// Scores of a tile with a panel; -inf where a column does not see the key.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn score<L: Lanes, const R: usize>(
    scratch: &PanelScratch,
    p: usize,
    tile: &[u32],
    visible: &[u32],
    interleaved: impl FnMut(),
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (queries, n) = (scratch.panels.add(p * scratch.panel), tile.len());
        let strides = (scratch.dim, 1);
        product::<L, R>(
            scratch.keys,
            strides,
            n,
            queries,
            scratch.dim,
            scratch.scores,
            None,
            interleaved,
        );
        let see_all = tile.last().zip(visible.first()).is_none_or(|(last, first)| last < first);
        if see_all {
            return;
        }
        let mut counts = [0.0_f32; MAX_WIDTH];
        for (count, visible_keys) in counts.iter_mut().zip(visible) {
            *count = tile.partition_point(|key| key < visible_keys) as f32;
        }
        let none = L::splat(f32::NEG_INFINITY);
        for half in [0, L::N] {
            let counts = L::load(counts.as_ptr().add(half));
            for i in 0..n {
                let at = scratch.scores.add(i * L::WIDTH + half);
                let scores = L::load(at);
                counts.less(L::splat(i as f32 + 0.5), none, scores).store(at);
            }
        }
    }
}

/// Sets scores of keys that are on no column and no diagonal to -inf. `column` advances with the
/// tiles, so a segment must be one panel. `first_key` and `position` are the positions of the first
/// key and the first query.
///
/// # Safety
/// As of [`attend`]; `scratch.bits` are the diagonals.
#[inline(always)]
unsafe fn mask_lines<L: Lanes>(
    scratch: &PanelScratch,
    tile: &[u32],
    (first_key, position): (u32, u32),
    lines: &Lines<'_>,
    column: &mut usize,
) {
    for (i, key) in tile.iter().map(|&row| first_key + row).enumerate() {
        while lines.columns.get(*column).is_some_and(|&c| c < key) {
            *column += 1;
        }
        if lines.columns.get(*column) == Some(&key) {
            continue;
        }
        // Bit l: whether the distance position + l - key is a diagonal.
        let back = position.saturating_sub(key) as usize;
        // SAFETY: distances are below `bit_words` - 2 words; the scores of the tile exist.
        unsafe {
            let words = [*scratch.bits.add(back / 32), *scratch.bits.add(back / 32 + 1)];
            let pair = u64::from(words[0]) | u64::from(words[1]) << 32;
            let ahead = key.saturating_sub(position);
            let bits = (pair >> (back % 32) << ahead) as u32;
            for half in [0, L::N] {
                let at = scratch.scores.add(i * L::WIDTH + half);
                L::load(at).keep(bits >> half).store(at);
            }
        }
    }
}

/// Accumulates the values of a tile by the scores of a panel.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn accumulate<L: Lanes, const R: usize>(
    scratch: &PanelScratch,
    p: usize,
    n: usize,
    interleaved: impl FnMut(),
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let out = scratch.panels.add(p * scratch.panel + scratch.dim * L::WIDTH);
        let max = out.add(scratch.value_dim * L::WIDTH);
        let mut alpha = [L::splat(0.0); 2];
        for (half, alpha) in alpha.iter_mut().enumerate() {
            let scores = scratch.scores.add(half * L::N);
            let (max, sum) = (max.add(half * L::N), max.add(L::WIDTH + half * L::N));
            let before = L::load(max);
            let mut most = before;
            for i in 0..n {
                most = most.max(L::load(scores.add(i * L::WIDTH)));
            }
            *alpha = before.sub(most).exp2();
            let mut total = L::load(sum).mul(*alpha);
            for i in 0..n {
                let at = scores.add(i * L::WIDTH);
                let weight = L::load(at).sub(most).exp2();
                weight.store(at);
                total = total.add(weight);
            }
            most.store(max);
            total.store(sum);
        }
        let (values, step) = if scratch.is_latent {
            (scratch.keys, scratch.dim)
        } else {
            (scratch.values, scratch.value_dim)
        };
        let strides = (1, step);
        product::<L, R>(
            values,
            strides,
            scratch.value_dim,
            scratch.scores,
            n,
            out,
            Some(alpha),
            interleaved,
        );
    }
}

/// Writes the results of columns.
///
/// # Safety
/// As of [`attend`].
#[inline(always)]
unsafe fn finish<L: Lanes>(columns: &Columns, scratch: &PanelScratch, place: &OutputRows) {
    for column in 0..columns.count {
        let (panel, lane) = (column / L::WIDTH * scratch.panel, column % L::WIDTH);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let from = scratch.panels.add(panel + scratch.dim * L::WIDTH + lane);
            let max = *from.add(scratch.value_dim * L::WIDTH);
            let sum = *from.add((scratch.value_dim + 1) * L::WIDTH);
            let row = (columns.skip as usize + column) * place.step;
            let (out, normalizer) = (place.out.add(row * scratch.value_dim), normalizer(sum));
            (0..scratch.value_dim)
                .for_each(|d| out.add(d).write(*from.add(d * L::WIDTH) * normalizer));
            if !place.lse.is_null() {
                place.lse.add(row).write(log_sum(max, sum));
            }
        }
    }
}

/// Factor of sums of weighted values; 0 for an empty sum.
#[inline(always)]
pub fn normalizer(sum: f32) -> f32 {
    if sum > 0.0 { 1.0 / sum } else { 0.0 }
}

/// The log-sum-exp of a maximum (of powers of two) and its sum.
#[inline(always)]
pub fn log_sum(max: f32, sum: f32) -> f32 {
    if sum > 0.0 { (max + sum.log2()) * std::f32::consts::LN_2 } else { f32::NEG_INFINITY }
}
