//! Bounding boxes of pages of keys, and their scores: the least and the greatest value of each
//! number of a page's keys.
//!
//! A page of a head is one row of `2 * dim` numbers, least values first. The largest product that
//! any key in the box can have with a query is then one product: each negative number of the query
//! meets the least value, each other number the greatest. Rows are f32, or bf16 rounded outward, so
//! that the box contains every key. Rounding errors are bounded in [`attention`](super).

use crate::attention::dot::{Quad, dot_rows};
use crate::attention::dot_bf16::{applies, dot_rows_bf16, pack_bf16, packed};
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
pub fn scratch(queries: &Rows<'_>) -> usize {
    let rows = queries.tokens() as usize * queries.heads() as usize;
    rows * (room(1, queries) + TILE) + MAX_DIM as usize
}

/// Numbers of scratch for `rows` queries of a key head, in either order; most for each with one.
fn room(rows: usize, queries: &Rows<'_>) -> usize {
    (rows * padded(queries)).max(packed(rows, queries.dim() as usize) / 2)
}

/// Numbers of a query, padded with zeros.
fn padded(queries: &Rows<'_>) -> usize {
    (queries.dim() as usize).next_multiple_of(MAX_WIDTH)
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
    if out.len() != rows * count as usize || memory.len() < scratch(queries) {
        fail!(TooSmall, "out has {} numbers and scratch {}: too few", out.len(), memory.len());
    }
    let level = if level.is_supported() { level } else { Level::best() };
    // SAFETY: sizes were checked above.
    unsafe {
        let is_bf16 = applies(level, queries, pages);
        run(level, (pages, queries), (from, count), is_bf16, out, memory);
    };
    Ok(())
}

levels! {
    /// Scores of a range of pages.
    run = score_pages(
        inputs: (&Rows<'_>, &Rows<'_>),
        range: (u32, u32),
        is_bf16: bool,
        out: &mut [f32],
        memory: &mut [f32],
    )
}

/// Pages whose scores are written at once. Lines of queries are far apart and evict each other from
/// the L1 cache.
const LINE: u32 = 16;

/// # Safety
/// Sizes are as [`scores`] checks them; `is_bf16` only where [`applies`] says so.
#[inline(always)]
unsafe fn score_pages<L: Lanes, const R: usize>(
    (pages, queries): (&Rows<'_>, &Rows<'_>),
    (from, count): (u32, u32),
    is_bf16: bool,
    out: &mut [f32],
    memory: &mut [f32],
) {
    let (dim, step) = (queries.dim() as usize, padded(queries));
    let rows = (queries.tokens() * (queries.heads() / pages.heads())) as usize;
    // SAFETY: laid out as in `scratch`.
    unsafe {
        let row = memory.as_mut_ptr();
        let found = row.add(MAX_DIM as usize);
        let ordered = found.add(rows * pages.heads() as usize * TILE);
        pack::<L>((pages, queries), is_bf16, row, ordered);
        let each = room(rows, queries);
        for first in (0..count).step_by(LINE as usize) {
            let width = (count - first).min(LINE);
            // Heads of a page are adjacent: a few pages of each head in turn.
            for quad in (first..first + width).step_by(4) {
                let page = |j: u32| from + (quad + j).min(count - 1);
                for key_head in 0..pages.heads() {
                    let addresses = |j: [u32; 4]| j.map(|j| pages.row(page(j), key_head));
                    let row = key_head as usize * rows;
                    let to = found.add(row * TILE + (quad - first) as usize);
                    let quad = Quad {
                        rows: addresses([0, 1, 2, 3]),
                        upcoming: addresses([8, 9, 10, 11]),
                        dim,
                    };
                    let queries = (ordered.add(key_head as usize * each).cast_const(), rows, step);
                    match pages.dtype() {
                        Dtype::Bf16 if is_bf16 => {
                            let queries = (queries.0.cast(), rows);
                            dot_rows_bf16::<true>(quad, queries, to);
                        }
                        Dtype::Bf16 => dot_rows::<L, Bf16, R, true>(quad, queries, to),
                        _ => dot_rows::<L, F32, R, true>(quad, queries, to),
                    }
                }
            }
            let mut from = found.cast_const();
            let group = queries.heads() / pages.heads();
            for key_head in 0..pages.heads() {
                for r in 0..rows as u32 {
                    let (query, head) = row_position(r, group, key_head);
                    let line = query as usize * queries.heads() as usize + head as usize;
                    let to = out.as_mut_ptr().add(line * count as usize + first as usize);
                    std::ptr::copy_nonoverlapping(from, to, width as usize);
                    from = from.add(TILE);
                }
            }
        }
    }
}

/// Puts the queries of each key head into the order that products read.
///
/// # Safety
/// As of [`score_pages`]; `row` has room for a query, and `to` for all of them, padded.
#[inline(always)]
unsafe fn pack<L: Lanes>(
    (pages, queries): (&Rows<'_>, &Rows<'_>),
    is_bf16: bool,
    row: *mut f32,
    to: *mut f32,
) {
    let (dim, group) = (queries.dim() as usize, queries.heads() / pages.heads());
    let rows = queries.tokens() * group;
    for key_head in 0..pages.heads() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let to = to.add(key_head as usize * room(rows as usize, queries));
            if is_bf16 {
                let query = |r| {
                    let (query, head) = row_position(r as u32, group, key_head);
                    queries.row(query, head).cast()
                };
                pack_bf16(query, (rows as usize, dim), to.cast());
                continue;
            }
            for r in 0..rows {
                let (query, head) = row_position(r, group, key_head);
                let to = to.add(r as usize * padded(queries));
                read::<L>(queries, head, &[query], row);
                match pages.dtype() {
                    Dtype::Bf16 => permute::<L, Bf16>(row, dim, to),
                    _ => permute::<L, F32>(row, dim, to),
                }
            }
        }
    }
}

/// The query and head of a row.
fn row_position(row: u32, group: u32, key_head: u32) -> (u32, u32) {
    (row / group, key_head * group + row % group)
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
