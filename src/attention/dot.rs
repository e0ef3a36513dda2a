//! Products of a few queries with keys, and weighted sums of values, on rows in place. Decode uses
//! them, because it is bound by memory bandwidth.

use crate::attention::element::{Element, part};
use crate::attention::lanes::Lanes;
use crate::attention::panel::TILE;
use crate::attention::rows::Rows;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Rows of a tile in memory, and their length.
pub struct Tile {
    /// Address of each row.
    pub rows: [*const u8; TILE],
    /// Rows.
    pub count: usize,
    /// Numbers of a row.
    pub dim: usize,
}

/// Computes the products of four rows with each query: `out[r * TILE + j]` for query r and row j.
/// Queries are in the order of [`Element::place`], each `step` numbers with zeros at the end. Rows
/// of `upcoming` are prefetched, line by line as rows are read: processors drop some of many
/// prefetches at once.
///
/// # Safety
/// As of [`Lanes`]; all rows and queries exist and are of type E; `upcoming` need not exist.
#[inline(always)]
pub unsafe fn dot_rows<L: Lanes, E: Element, const R: usize>(
    rows: [*const u8; 4],
    mut upcoming: [*const u8; 4],
    dim: usize,
    (queries, count, step): (*const f32, usize, usize),
    out: *mut f32,
) {
    let mut r = 0;
    // SAFETY: guaranteed by the caller; out has TILE places a query.
    unsafe {
        while R >= 8 && r + 4 <= count {
            dot_block::<L, E, 4>(
                rows,
                upcoming,
                dim,
                queries.add(r * step),
                step,
                out.add(r * TILE),
            );
            upcoming = rows;
            r += 4;
        }
        while r + 2 <= count {
            dot_block::<L, E, 2>(
                rows,
                upcoming,
                dim,
                queries.add(r * step),
                step,
                out.add(r * TILE),
            );
            upcoming = rows;
            r += 2;
        }
        if r < count {
            dot_block::<L, E, 1>(
                rows,
                upcoming,
                dim,
                queries.add(r * step),
                step,
                out.add(r * TILE),
            );
        }
    }
}

/// Prefetches a row. Hardware does not predict jumps to another plane, page or head.
///
/// # Safety
/// As of [`Lanes`]; token and head exist.
#[inline(always)]
pub unsafe fn prefetch_row<L: Lanes>(rows: &Rows<'_>, token: u32, head: u32) {
    let bytes = rows.dim() as usize * rows.dtype().bits() as usize / 8;
    // SAFETY: nothing is read.
    unsafe { prefetch::<L>(rows.row(token, head), bytes) }
}

/// Prefetches a row by its address.
///
/// # Safety
/// As of [`Lanes`]; the row need not exist.
#[inline(always)]
pub unsafe fn prefetch<L: Lanes>(row: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(LINE_BYTES) {
        // SAFETY: nothing is read.
        unsafe { L::prefetch(row.wrapping_add(at)) };
    }
}

/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
unsafe fn dot_block<L: Lanes, E: Element, const Q: usize>(
    rows: [*const u8; 4],
    upcoming: [*const u8; 4],
    dim: usize,
    queries: *const f32,
    step: usize,
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller; nothing is read behind a row.
    unsafe {
        let mut sums = [[L::splat(0.0); 4]; Q];
        let whole = dim - dim % L::WIDTH;
        // The remainder comes first, so that the loop behind it has nothing but products.
        if whole < dim {
            for (j, (row, upcoming)) in rows.into_iter().zip(upcoming).enumerate() {
                prefetch::<L>(upcoming.wrapping_add(whole * E::BYTES), (dim - whole) * E::BYTES);
                let rest = part::<L, E>(row.add(whole * E::BYTES), dim - whole);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let query = queries.add(r * step + whole);
                    let sum = rest[0].fma(L::load(query), sums[j]);
                    sums[j] = rest[1].fma(L::load(query.add(L::N)), sum);
                }
            }
        }
        let mut at = 0;
        while at < whole {
            let mut query = [[L::splat(0.0); 2]; Q];
            for (r, query) in query.iter_mut().enumerate() {
                let from = queries.add(r * step + at);
                *query = [L::load(from), L::load(from.add(L::N))];
            }
            for (j, (row, upcoming)) in rows.into_iter().zip(upcoming).enumerate() {
                prefetch::<L>(upcoming.wrapping_add(at * E::BYTES), L::WIDTH * E::BYTES);
                let [x, y] = E::pair::<L>(row.add(at * E::BYTES));
                for (sums, query) in sums.iter_mut().zip(&query) {
                    sums[j] = y.fma(query[1], x.fma(query[0], sums[j]));
                }
            }
            at += L::WIDTH;
        }
        for (r, sums) in sums.into_iter().enumerate() {
            out.add(r * TILE).cast::<[f32; 4]>().write_unaligned(L::sums(sums));
        }
    }
}

/// `out[r][..] = alpha[r] * out[r][..] + sum over i of weights[r * TILE + i] * row i`. `out` is in
/// the order of [`Element::place`], each row `step` numbers. Rows of `upcoming` are prefetched as
/// in [`dot_rows`].
///
/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
pub unsafe fn weighted_sum<'a, L: Lanes, E: Element, const R: usize>(
    tile: &'a Tile,
    weights: *const f32,
    alpha: *const f32,
    (out, count, step): (*mut f32, usize, usize),
    mut upcoming: &'a Tile,
) {
    let mut r = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while R >= 8 && r + 4 <= count {
            let out = out.add(r * step);
            weighted_block::<L, E, 4>(
                tile,
                weights.add(r * TILE),
                alpha.add(r),
                out,
                step,
                upcoming,
            );
            upcoming = tile;
            r += 4;
        }
        while r + 2 <= count {
            let out = out.add(r * step);
            weighted_block::<L, E, 2>(
                tile,
                weights.add(r * TILE),
                alpha.add(r),
                out,
                step,
                upcoming,
            );
            upcoming = tile;
            r += 2;
        }
        if r < count {
            let out = out.add(r * step);
            weighted_block::<L, E, 1>(
                tile,
                weights.add(r * TILE),
                alpha.add(r),
                out,
                step,
                upcoming,
            );
        }
    }
}

/// # Safety
/// As of [`weighted_sum`].
#[inline(always)]
unsafe fn weighted_block<L: Lanes, E: Element, const Q: usize>(
    tile: &Tile,
    weights: *const f32,
    alpha: *const f32,
    out: *mut f32,
    step: usize,
    upcoming: &Tile,
) {
    let mut at = 0;
    // SAFETY: guaranteed by the caller; nothing is read behind a row.
    unsafe {
        while at + 2 * L::WIDTH <= tile.dim {
            let read = |row: *const u8| {
                let [a, b] = E::pair::<L>(row);
                let [c, d] = E::pair::<L>(row.add(L::WIDTH * E::BYTES));
                [a, b, c, d]
            };
            columns::<L, E, Q, 4>((tile, upcoming), at, weights, alpha, (out, step), read);
            at += 2 * L::WIDTH;
        }
        while at < tile.dim {
            let left = tile.dim - at;
            if left >= L::WIDTH {
                let read = |row: *const u8| E::pair::<L>(row);
                columns::<L, E, Q, 2>((tile, upcoming), at, weights, alpha, (out, step), read);
            } else {
                let read = |row: *const u8| part::<L, E>(row, left);
                columns::<L, E, Q, 2>((tile, upcoming), at, weights, alpha, (out, step), read);
            }
            at += L::WIDTH;
        }
    }
}

/// Handles the numbers from `at` on; `read` returns V vectors of a row.
///
/// # Safety
/// As of [`weighted_sum`].
#[inline(always)]
unsafe fn columns<L: Lanes, E: Element, const Q: usize, const V: usize>(
    (tile, upcoming): (&Tile, &Tile),
    at: usize,
    weights: *const f32,
    alpha: *const f32,
    (out, step): (*mut f32, usize),
    read: impl Fn(*const u8) -> [L; V],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let out = out.add(at);
        let mut sums = [[L::splat(0.0); V]; Q];
        for (r, sums) in sums.iter_mut().enumerate() {
            let alpha = L::splat(*alpha.add(r));
            for (v, sum) in sums.iter_mut().enumerate() {
                *sum = L::load(out.add(r * step + v * L::N)).mul(alpha);
            }
        }
        let (rows, upcoming) = (tile.rows.as_ptr(), upcoming.rows.as_ptr());
        let from = at * E::BYTES;
        for i in 0..tile.count {
            prefetch::<L>(upcoming.add(i).read().wrapping_add(from), V * L::N * E::BYTES);
            let values = read(rows.add(i).read().add(from));
            for (r, sums) in sums.iter_mut().enumerate() {
                let weight = L::splat(*weights.add(r * TILE + i));
                for (sum, value) in sums.iter_mut().zip(values) {
                    *sum = value.fma(weight, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                sum.store(out.add(r * step + v * L::N));
            }
        }
    }
}
