//! Bounding boxes of pages of keys, and their scores: the least and the greatest value of each
//! number of a page's keys.
//!
//! A page of a head is one row of `2 * dim` numbers, least values first. The largest product that
//! any key in the box can have with a query is then one product: of this row with the query's
//! negative numbers followed by its positive ones. Rows are f32, or bf16 rounded outward, so that
//! the box contains every key. Rounding errors are bounded in [`attention`](super).

use crate::attention::dot::dot_rows;
use crate::attention::element::{Bf16, F32, read};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::level::{Level, levels};
use crate::attention::narrow::permute;
use crate::attention::panel::TILE;
use crate::attention::rows::{MAX_DIM, Rows};
use crate::base::status::Result;
use crate::fail;
use crate::meta::dtype::Dtype;

/// Adds keys to rows of pages: `[pages, heads, 2 * dim]`. `first` is the position of the first key.
/// A page whose first key is among them begins anew; other pages are widened.
pub fn extend(rows: &mut [f32], page_tokens: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
    let dim = checked(rows.len(), page_tokens, first, keys)?;
    each_key(page_tokens, first, keys, |row, is_new, key| {
        let (least, most) = rows[row..row + 2 * dim].split_at_mut(dim);
        for ((least, most), &x) in least.iter_mut().zip(most).zip(key) {
            *least = if is_new || x < *least { x } else { *least };
            *most = if is_new || x > *most { x } else { *most };
        }
    });
    Ok(())
}

/// The same for rows of bf16, as bit patterns.
pub fn extend_bf16(rows: &mut [u16], page_tokens: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
    let dim = checked(rows.len(), page_tokens, first, keys)?;
    each_key(page_tokens, first, keys, |row, is_new, key| {
        let (least, most) = rows[row..row + 2 * dim].split_at_mut(dim);
        let wide = |half: u16| f32::from_bits(u32::from(half) << 16);
        for ((least, most), &x) in least.iter_mut().zip(most).zip(key) {
            *least = if is_new || x < wide(*least) { outward(x, true) } else { *least };
            *most = if is_new || x > wide(*most) { outward(x, false) } else { *most };
        }
    });
    Ok(())
}

/// The nearest bf16 that is not above a number, or not below it.
fn outward(x: f32, is_down: bool) -> u16 {
    let (bits, is_negative) = (x.to_bits(), x.is_sign_negative());
    if x.is_nan() {
        // NaN keeps a mantissa bit, so that truncation does not make infinity of it.
        return (bits >> 16) as u16 | 0x40;
    }
    let is_whole = bits & 0xFFFF == 0;
    // Truncation rounds towards zero.
    (bits >> 16) as u16 + u16::from(!is_whole && is_negative == is_down)
}

fn checked(numbers: usize, page_tokens: u32, first: u32, keys: &Rows<'_>) -> Result<usize> {
    if page_tokens == 0 || keys.dim() > MAX_DIM / 2 {
        fail!(
            Invalid,
            "page_tokens is {page_tokens} and keys have {} numbers: both must be at least 1, keys at most half of the limit",
            keys.dim()
        );
    }
    let pages = (u64::from(first) + u64::from(keys.tokens())).div_ceil(page_tokens.into());
    let page = u64::from(keys.heads()) * 2 * u64::from(keys.dim());
    if pages.checked_mul(page).is_none_or(|needed| needed > numbers as u64) {
        fail!(TooSmall, "rows have {numbers} numbers, {pages} pages of {page} are needed");
    }
    Ok(keys.dim() as usize)
}

/// Calls `add` for each key with the start of its row, and whether the page begins with it.
fn each_key(
    page_tokens: u32,
    first: u32,
    keys: &Rows<'_>,
    mut prefetch: impl FnMut(usize, bool, &[f32]),
) {
    let (dim, heads) = (keys.dim() as usize, keys.heads() as usize);
    let mut key = [0.0_f32; MAX_DIM as usize];
    for token in 0..keys.tokens() {
        // Positions may exceed 32 bits.
        let (place, each) = (u64::from(first) + u64::from(token), u64::from(page_tokens));
        let (page, at) = (place / each, place % each);
        for head in 0..heads {
            // SAFETY: the row exists and is no longer than MAX_DIM.
            unsafe { one_row(Level::best(), keys, head as u32, token, key.as_mut_ptr()) };
            prefetch((page as usize * heads + head) * 2 * dim, at == 0, &key[..dim]);
        }
    }
}

levels! {
    /// A row as f32.
    one_row = read_row(rows: &Rows<'_>, head: u32, token: u32, to: *mut f32)
}

/// # Safety
/// As of [`read`].
#[inline(always)]
unsafe fn read_row<L: Lanes, const R: usize>(rows: &Rows<'_>, head: u32, token: u32, to: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { read::<L>(rows, head, &[token], to) }
}

/// Numbers of scratch for [`scores`].
pub fn scratch(pages: &Rows<'_>, queries: &Rows<'_>) -> usize {
    let dim = (pages.dim() as usize).next_multiple_of(MAX_WIDTH);
    let rows = queries.tokens() as usize * queries.heads() as usize;
    rows * (dim + TILE) + 2 * MAX_DIM as usize
}

/// Scores of pages from `from` on, `[T, query heads, count]`: for each query and query head the sum
/// over numbers d of the larger of `q[d] * least[d]` and `q[d] * most[d]`. Pages are rows of f32 or
/// bf16: `[pages, key heads, 2 * dim]`.
///
/// Ranges of pages are independent: threads may share them.
pub fn scores(
    level: Level,
    pages: &Rows<'_>,
    queries: &Rows<'_>,
    (from, count): (u32, u32),
    out: &mut [f32],
    memory: &mut [f32],
) -> Result<()> {
    let (heads, group) = (queries.heads(), queries.heads() / pages.heads().max(1));
    if pages.dim() != 2 * queries.dim() || group * pages.heads() != heads || group == 0 {
        let (h, d) = (pages.heads(), pages.dim());
        fail!(
            Invalid,
            "pages of {h} heads and {d} numbers do not fit queries of {heads} heads and {} numbers",
            queries.dim()
        );
    }
    if !matches!(pages.dtype(), Dtype::F32 | Dtype::Bf16) {
        fail!(Unsupported, "pages must be f32 or bf16, not {:?}", pages.dtype());
    }
    if from.checked_add(count).is_none_or(|end| end > pages.tokens()) {
        fail!(Invalid, "{count} pages from page {from} on, but there are {}", pages.tokens());
    }
    if u64::from(queries.tokens()) * u64::from(heads) > u64::from(u32::MAX) {
        fail!(Limit, "{} queries of {heads} heads exceed the limit", queries.tokens());
    }
    let rows = queries.tokens() as usize * heads as usize;
    if out.len() != rows * count as usize || memory.len() < scratch(pages, queries) {
        fail!(TooSmall, "out has {} numbers and scratch {}: too few", out.len(), memory.len());
    }
    let level = if level.is_supported() { level } else { Level::best() };
    // SAFETY: sizes were checked above.
    unsafe { run(level, pages, queries, (from, count), out, memory) };
    Ok(())
}

levels! {
    /// Scores of a range of pages.
    run = score_pages(
        pages: &Rows<'_>,
        queries: &Rows<'_>,
        range: (u32, u32),
        out: &mut [f32],
        memory: &mut [f32],
    )
}

/// Pages whose scores are written at once. Lines of queries are far apart and evict each other from
/// the L1 cache.
const LINE: u32 = 16;

/// # Safety
/// Sizes are as [`scores`] checks them.
#[inline(always)]
unsafe fn score_pages<L: Lanes, const R: usize>(
    pages: &Rows<'_>,
    queries: &Rows<'_>,
    (from, count): (u32, u32),
    out: &mut [f32],
    memory: &mut [f32],
) {
    let dim = pages.dim() as usize;
    let (heads, group) = (queries.heads() as usize, queries.heads() / pages.heads());
    let rows = (queries.tokens() * group) as usize;
    let step = dim.next_multiple_of(MAX_WIDTH);
    // SAFETY: laid out as in `scratch`.
    unsafe {
        let row = memory.as_mut_ptr();
        let found = row.add(2 * MAX_DIM as usize);
        let packed = found.add(rows * pages.heads() as usize * TILE);
        for key_head in 0..pages.heads() {
            for r in 0..rows {
                let (query, head) = row_position(r as u32, group, key_head);
                sign_split::<L>(queries, head, query, row);
                let to = packed.add((key_head as usize * rows + r) * step);
                match pages.dtype() {
                    Dtype::Bf16 => permute::<L, Bf16>(row, dim, to),
                    _ => permute::<L, F32>(row, dim, to),
                }
            }
        }
        for first in (0..count).step_by(LINE as usize) {
            let width = (count - first).min(LINE);
            // Heads of a page are adjacent: a few pages of each head in turn.
            for quad in (first..first + width).step_by(4) {
                let page = |j: u32| from + (quad + j).min(count - 1);
                for key_head in 0..pages.heads() {
                    let at = [0, 1, 2, 3].map(|j| pages.row(page(j), key_head));
                    let upcoming = [8, 9, 10, 11].map(|j| pages.row(page(j), key_head));
                    let row = key_head as usize * rows;
                    let queries = (packed.add(row * step).cast_const(), rows, step);
                    let to = found.add(row * TILE + (quad - first) as usize);
                    match pages.dtype() {
                        Dtype::Bf16 => dot_rows::<L, Bf16, R>(at, upcoming, dim, queries, to),
                        _ => dot_rows::<L, F32, R>(at, upcoming, dim, queries, to),
                    }
                }
            }
            let mut from = found.cast_const();
            for key_head in 0..pages.heads() as usize {
                for query in 0..queries.tokens() as usize {
                    for head in key_head * group as usize..(key_head + 1) * group as usize {
                        let line = (query * heads + head) * count as usize;
                        let to = out.as_mut_ptr().add(line + first as usize);
                        std::ptr::copy_nonoverlapping(from, to, width as usize);
                        from = from.add(TILE);
                    }
                }
            }
        }
    }
}

/// The query and head of a row.
fn row_position(row: u32, group: u32, key_head: u32) -> (u32, u32) {
    (row / group, key_head * group + row % group)
}

/// Splits a query into its negative numbers, then its positive ones.
///
/// # Safety
/// As of [`read`]; `to` has room for both.
#[inline(always)]
unsafe fn sign_split<L: Lanes>(queries: &Rows<'_>, head: u32, query: u32, to: *mut f32) {
    let dim = queries.dim() as usize;
    // SAFETY: guaranteed by the caller; the row is read into the second half first.
    unsafe {
        read::<L>(queries, head, &[query], to.add(dim));
        for d in 0..dim {
            let x = *to.add(dim + d);
            to.add(d).write(if x < 0.0 { x } else { 0.0 });
            to.add(dim + d).write(if x > 0.0 { x } else { 0.0 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::rows::Scales;
    use crate::meta::view::{Place, View};

    #[test]
    fn positions_beyond_32_bits_are_in_their_page() {
        let numbers = [1.0_f32, -2.0];
        let view = View {
            place: Place::At(numbers.as_ptr() as u64),
            tokens: 2,
            heads: 1,
            run_bytes: 4,
            token_stride_bytes: 4,
            head_stride_bytes: 4,
        };
        // SAFETY: the view covers `numbers`, which the rows borrow.
        let keys = unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound");
        let mut boxes = [7.0; 4];
        // The first key begins the second page; the other one continues it.
        extend(&mut boxes, u32::MAX, u32::MAX, &keys).expect("room for two pages");
        assert_eq!(boxes, [7.0, 7.0, -2.0, 1.0]);
    }
}
