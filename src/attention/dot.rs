//! Products of a few queries with keys or boxes of pages, and weighted sums of values, on rows in
//! place. Decode and page scores use them, because they are bound by memory bandwidth.
//!
//! Loops over sums of values count indices: builds without LTO keep what iterators go through in
//! memory instead of registers, which made decode three times slower.

#![allow(clippy::needless_range_loop)]

use crate::attention::element::{Element, part};
use crate::attention::lanes::Lanes;
use crate::attention::panel::TILE;
use crate::attention::rows::Rows;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Rows of a tile in memory, and their length.
#[derive(Clone, Copy)]
pub struct Tile {
    /// Addresses of rows; may be unaligned.
    pub rows: *const *const u8,
    /// Addresses of as many rows to prefetch as in [`Quad`]; may be unaligned.
    pub upcoming: *const *const u8,
    /// Rows.
    pub count: usize,
    /// Numbers of a row.
    pub dim: usize,
}

/// Four rows to multiply, and four to prefetch, which need not exist.
#[derive(Clone, Copy)]
pub struct Quad {
    /// Addresses of the rows.
    pub rows: [*const u8; 4],
    /// Addresses of the rows to prefetch, line by line as rows are read: processors drop some of
    /// many prefetches at once.
    pub upcoming: [*const u8; 4],
    /// Numbers of a query. A box has twice as many, least numbers first.
    pub dim: usize,
}

/// Computes the products of four rows with each query: `out[r * TILE + j]` for query r and row j.
/// Rows are keys, or boxes (`BOX`): then each number of a query meets the number of the box that
/// gives the larger product. Queries are in the order of [`Element::place`], each `step` numbers
/// with zeros at the end.
///
/// # Safety
/// As of [`Lanes`]; all rows and queries exist and are of type E.
#[inline(always)]
pub unsafe fn dot_rows<L: Lanes, E: Element, const R: usize, const BOX: bool>(
    mut quad: Quad,
    (queries, count, step): (*const f32, usize, usize),
    out: *mut f32,
) {
    let mut r = 0;
    // SAFETY: guaranteed by the caller; out has TILE places a query.
    unsafe {
        while r < count {
            let (queries, out) = (queries.add(r * step), out.add(r * TILE));
            r += match count - r {
                4.. if R >= 8 => dot_block::<L, E, 4, BOX>(quad, queries, step, out),
                2.. => dot_block::<L, E, 2, BOX>(quad, queries, step, out),
                _ => dot_block::<L, E, 1, BOX>(quad, queries, step, out),
            };
            quad.upcoming = quad.rows;
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

/// Multiplies Q queries; returns Q.
///
/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
unsafe fn dot_block<L: Lanes, E: Element, const Q: usize, const BOX: bool>(
    Quad { rows, upcoming, dim }: Quad,
    queries: *const f32,
    step: usize,
    out: *mut f32,
) -> usize {
    let beside = dim * E::BYTES;
    // SAFETY: guaranteed by the caller; nothing is read behind a row.
    unsafe {
        let mut sums = [[L::splat(0.0); 4]; Q];
        let whole = dim - dim % L::WIDTH;
        // The remainder comes first, so that the loop behind it has nothing but products.
        if whole < dim {
            let (from, left) = (whole * E::BYTES, dim - whole);
            let query = query_block::<L, Q>(queries.add(whole), step);
            for (j, (row, upcoming)) in rows.into_iter().zip(upcoming).enumerate() {
                prefetch::<L>(upcoming.wrapping_add(from), left * E::BYTES);
                let x = part::<L, E>(row.add(from), left);
                let y = if BOX { part::<L, E>(row.add(beside + from), left) } else { x };
                add_products::<L, Q, BOX>(&mut sums, j, &query, x, y);
            }
        }
        for at in (0..whole).step_by(L::WIDTH) {
            let from = at * E::BYTES;
            let query = query_block::<L, Q>(queries.add(at), step);
            for (j, (row, upcoming)) in rows.into_iter().zip(upcoming).enumerate() {
                prefetch::<L>(upcoming.wrapping_add(from), L::WIDTH * E::BYTES);
                let x = E::pair::<L>(row.add(from));
                let mut y = x;
                if BOX {
                    prefetch::<L>(upcoming.wrapping_add(beside + from), L::WIDTH * E::BYTES);
                    y = E::pair::<L>(row.add(beside + from));
                }
                add_products::<L, Q, BOX>(&mut sums, j, &query, x, y);
            }
        }
        L::store_sums(sums, out, TILE);
    }
    Q
}

/// Two vectors of each of Q queries.
///
/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
unsafe fn query_block<L: Lanes, const Q: usize>(from: *const f32, step: usize) -> [[L; 2]; Q] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut query = [[L::splat(0.0); 2]; Q];
        for r in 0..Q {
            let from = from.add(r * step);
            query[r] = [L::load(from), L::load(from.add(L::N))];
        }
        query
    }
}

/// Adds the products of Q queries with two vectors of row j: the numbers of a key, or the least and
/// greatest numbers of a box.
///
/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
unsafe fn add_products<L: Lanes, const Q: usize, const BOX: bool>(
    sums: &mut [[L; 4]; Q],
    j: usize,
    query: &[[L; 2]; Q],
    x: [L; 2],
    y: [L; 2],
) {
    for r in 0..Q {
        for half in 0..2 {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let query = query[r][half];
                let number = if BOX { query.by_sign(x[half], y[half]) } else { x[half] };
                sums[r][j] = number.fma(query, sums[r][j]);
            }
        }
    }
}

/// `out[r][..] = alpha[r] * out[r][..] + sum over i of weights[r * TILE + i] * row i`. `out` is in
/// the order of [`Element::place`], each row `step` numbers.
///
/// # Safety
/// As of [`dot_rows`].
#[inline(always)]
pub unsafe fn weighted_sum<L: Lanes, E: Element, const R: usize>(
    mut tile: Tile,
    (weights, alpha): (*const f32, *const f32),
    (out, count, step): (*mut f32, usize, usize),
) {
    let mut r = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while r < count {
            let out = (out.add(r * step), step);
            let weights = (weights.add(r * TILE), alpha.add(r));
            r += match count - r {
                4.. if R >= 8 => weighted_block::<L, E, 4>(&tile, weights, out),
                2.. => weighted_block::<L, E, 2>(&tile, weights, out),
                _ => weighted_block::<L, E, 1>(&tile, weights, out),
            };
            tile.upcoming = tile.rows;
        }
    }
}

/// Handles Q rows of weights; returns Q.
///
/// # Safety
/// As of [`weighted_sum`].
#[inline(always)]
unsafe fn weighted_block<L: Lanes, E: Element, const Q: usize>(
    tile: &Tile,
    weights: (*const f32, *const f32),
    out: (*mut f32, usize),
) -> usize {
    let mut at = 0;
    // SAFETY: guaranteed by the caller; nothing is read behind a row.
    unsafe {
        while at + 2 * L::WIDTH <= tile.dim {
            columns::<L, E, Q, 4>(tile, at, weights, out);
            at += 2 * L::WIDTH;
        }
        while at < tile.dim {
            columns::<L, E, Q, 2>(tile, at, weights, out);
            at += L::WIDTH;
        }
    }
    Q
}

/// V vectors of a row, of which `left` numbers exist.
///
/// # Safety
/// As of [`weighted_sum`].
#[inline(always)]
unsafe fn vectors<L: Lanes, E: Element, const V: usize>(row: *const u8, left: usize) -> [L; V] {
    // SAFETY: guaranteed by the caller; V is even.
    unsafe {
        let mut all = [L::splat(0.0); V];
        for pair in 0..V / 2 {
            let row = row.wrapping_add(pair * L::WIDTH * E::BYTES);
            let both = if left >= V * L::N { E::pair(row) } else { part::<L, E>(row, left) };
            [all[2 * pair], all[2 * pair + 1]] = both;
        }
        all
    }
}

/// Handles the numbers from `at` on, V vectors of each row. Only two vectors may be incomplete.
///
/// # Safety
/// As of [`weighted_sum`].
#[inline(always)]
unsafe fn columns<L: Lanes, E: Element, const Q: usize, const V: usize>(
    tile: &Tile,
    at: usize,
    (weights, alpha): (*const f32, *const f32),
    (out, step): (*mut f32, usize),
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let out = out.add(at);
        let mut sums = [[L::splat(0.0); V]; Q];
        for r in 0..Q {
            let alpha = L::splat(*alpha.add(r));
            for v in 0..V {
                sums[r][v] = L::load(out.add(r * step + v * L::N)).mul(alpha);
            }
        }
        let from = at * E::BYTES;
        for i in 0..tile.count {
            let upcoming = tile.upcoming.add(i).read_unaligned();
            prefetch::<L>(upcoming.wrapping_add(from), V * L::N * E::BYTES);
            let row = tile.rows.add(i).read_unaligned().add(from);
            let values = vectors::<L, E, V>(row, tile.dim - at);
            for r in 0..Q {
                let weight = L::splat(*weights.add(r * TILE + i));
                for v in 0..V {
                    sums[r][v] = values[v].fma(weight, sums[r][v]);
                }
            }
        }
        for r in 0..Q {
            for v in 0..V {
                sums[r][v].store(out.add(r * step + v * L::N));
            }
        }
    }
}
