//! Products of many queries with many keys, and their softmax, in [`LANES`] lanes that compilers
//! vectorize. Products are summed with one rounding each, by hardware FMA or by the library's.
//! Every processor gives the same bits.

use crate::attention::lanes::Lanes;
use crate::attention::level::{Level, levels};

/// Queries that are computed at once.
pub const LANES: usize = 32;

/// Compiles a body for the baseline, AVX2 and AVX-512, and dispatches at run time.
macro_rules! for_each_width {
    ($(#[$about:meta])* $name:ident = $body:ident($($arg:ident: $kind:ty),*)) => {
        $(#[$about])*
        pub fn $name($($arg: $kind),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,fma")]
                fn wide($($arg: $kind),*) {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn middle($($arg: $kind),*) {
                    $body($($arg),*)
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("fma") {
                    // SAFETY: the processor has the features: they were just detected.
                    return unsafe { wide($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: as above.
                    return unsafe { middle($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

/// Adds to each row of `out` (one row of [`LANES`] for each key) the products of a key with the
/// queries of `transposed` (numbers outermost, [`LANES`] queries each). Keys have as many numbers
/// and begin `stride` numbers apart. Incomplete keys are ignored.
pub fn add_products(transposed: &[f32], keys: &[f32], stride: usize, out: &mut [f32]) {
    let dim = transposed.len() / LANES;
    let whole = keys.len().checked_sub(dim).map_or(0, |rest| rest / stride.max(1) + 1);
    let count = whole.min(out.len() / LANES);
    match Level::best() {
        // The portable vectors round twice.
        Level::Portable => add_products_plain(transposed, (keys, stride, count), out),
        // SAFETY: the level is supported, and all rows are inside the slices.
        level => unsafe { add_products_wide(level, transposed, (keys, stride, count), out) },
    }
}

fn add_products_plain(transposed: &[f32], keys: (&[f32], usize, usize), out: &mut [f32]) {
    let (keys, stride, count) = keys;
    let rows = (0..count).map(|at| keys.get(at * stride..).unwrap_or_default());
    for (row, out) in rows.zip(out.chunks_exact_mut(LANES)) {
        let mut sums = [0.0; LANES];
        for (query, &x) in transposed.chunks_exact(LANES).zip(row) {
            for lane in 0..LANES {
                sums[lane] = x.mul_add(query[lane], sums[lane]);
            }
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
    }
}

levels! {
    /// The same in vectors that stay in registers, whatever a compiler makes of loops.
    add_products_wide = add_rows(transposed: &[f32], keys: (&[f32], usize, usize), out: &mut [f32])
}

/// # Safety
/// As of [`Lanes`]; keys and rows of `out` exist.
#[inline(always)]
unsafe fn add_rows<L: Lanes, const R: usize>(
    transposed: &[f32],
    (keys, stride, count): (&[f32], usize, usize),
    out: &mut [f32],
) {
    let dim = transposed.len() / LANES;
    for lane in (0..LANES).step_by(L::WIDTH) {
        // SAFETY: guaranteed by the caller; LANES is a multiple of two vectors.
        unsafe {
            let (transposed, out) = (transposed.as_ptr().add(lane), out.as_mut_ptr().add(lane));
            let mut at = 0;
            while at + R <= count {
                let keys = keys.as_ptr().add(at * stride);
                add_block::<L, R>(transposed, (keys, stride), dim, out.add(at * LANES));
                at += R;
            }
            while at < count {
                let keys = keys.as_ptr().add(at * stride);
                add_block::<L, 1>(transposed, (keys, stride), dim, out.add(at * LANES));
                at += 1;
            }
        }
    }
}

/// # Safety
/// As of [`add_rows`], for R keys and two vectors of queries.
#[inline(always)]
unsafe fn add_block<L: Lanes, const R: usize>(
    transposed: *const f32,
    (keys, stride): (*const f32, usize),
    dim: usize,
    out: *mut f32,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [[L::splat(0.0); 2]; R];
        for d in 0..dim {
            let query = transposed.add(d * LANES);
            let [x, y] = [L::load(query), L::load(query.add(L::N))];
            for (r, sums) in sums.iter_mut().enumerate() {
                let key = L::splat(*keys.add(r * stride + d));
                *sums = [key.fma(x, sums[0]), key.fma(y, sums[1])];
            }
        }
        for (r, [x, y]) in sums.into_iter().enumerate() {
            let (left, right) = (out.add(r * LANES), out.add(r * LANES + L::N));
            L::load(left).add(x).store(left);
            L::load(right).add(y).store(right);
        }
    }
}

for_each_width! {
    /// Raises each lane of `most` to the maximum of the lane in `logits`.
    lane_max = lane_max_body(logits: &[f32], most: &mut [f32; LANES])
}

#[inline(always)]
fn lane_max_body(logits: &[f32], most: &mut [f32; LANES]) {
    let mut lanes = *most;
    for row in logits.chunks_exact(LANES) {
        for lane in 0..LANES {
            lanes[lane] = if row[lane] > lanes[lane] { row[lane] } else { lanes[lane] };
        }
    }
    *most = lanes;
}

for_each_width! {
    /// Replaces each number by e to the power of its difference from its lane's maximum, and adds
    /// the results to `sums` by lane. Numbers far below the maximum, and minus infinity, become
    /// zero.
    exponentiate = exponentiate_body(logits: &mut [f32], most: &[f32; LANES], sums: &mut [f64; LANES])
}

/// Rows that are summed in f32 before the sum goes to f64.
const SUM_ROWS: usize = 64;

#[inline(always)]
fn exponentiate_body(logits: &mut [f32], most: &[f32; LANES], sums: &mut [f64; LANES]) {
    for tile in logits.chunks_mut(SUM_ROWS * LANES) {
        let mut part = [0f32; LANES];
        for row in tile.chunks_exact_mut(LANES) {
            for lane in 0..LANES {
                row[lane] = exp(row[lane] - most[lane]);
                part[lane] += row[lane];
            }
        }
        for lane in 0..LANES {
            sums[lane] += f64::from(part[lane]);
        }
    }
}

/// e to the power of x, for x up to zero, to about 2 units in the last place.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // The addition puts the nearest integer into the low bits.
    const SHIFT: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + SHIFT;
    let whole = shifted - SHIFT;
    let r = (clamped - whole * LN2_HIGH) - whole * LN2_LOW;
    let high = r * (r * (1.0 / 720.0) + 1.0 / 120.0) + 1.0 / 24.0;
    let p = ((high * r + 1.0 / 6.0) * r + 0.5) * r * r + r + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(SHIFT.to_bits()).wrapping_add(127) << 23;
    let power = p * f32::from_bits(exponent);
    if x > -87.0 { power } else { 0.0 }
}

for_each_width! {
    /// Multiplies each lane with its factor, and adds the sum of each row to its number of
    /// `columns`.
    scale_and_sum = scale_and_sum_body(weights: &mut [f32], factors: &[f32; LANES], columns: &mut [f32])
}

#[inline(always)]
fn scale_and_sum_body(weights: &mut [f32], factors: &[f32; LANES], columns: &mut [f32]) {
    for (row, column) in weights.chunks_exact_mut(LANES).zip(columns) {
        let mut part = [0f32; 8];
        for lane in 0..LANES {
            row[lane] *= factors[lane];
            part[lane % 8] += row[lane];
        }
        let four = [part[0] + part[4], part[1] + part[5], part[2] + part[6], part[3] + part[7]];
        *column += (four[0] + four[2]) + (four[1] + four[3]);
    }
}

for_each_width! {
    /// Adds to each number of `sums` the positive lanes of its row, each times its weight.
    add_positive = add_positive_body(products: &[f32], weights: &[f32; LANES], sums: &mut [f32])
}

#[inline(always)]
fn add_positive_body(products: &[f32], weights: &[f32; LANES], sums: &mut [f32]) {
    for (row, sum) in products.chunks_exact(LANES).zip(sums) {
        let mut part = [0f32; 8];
        for lane in 0..LANES {
            // NaN stays NaN.
            let product = if row[lane] < 0.0 { 0.0 } else { row[lane] };
            part[lane % 8] += product * weights[lane];
        }
        let four = [part[0] + part[4], part[1] + part[5], part[2] + part[6], part[3] + part[7]];
        *sum += (four[0] + four[2]) + (four[1] + four[3]);
    }
}

/// Turns products into softmax weights, except for one factor for each lane, which it returns. Lane
/// n sees keys up to `nearest + n`.
pub fn softmax_lanes(weights: &mut [f32], nearest: usize) -> [f32; LANES] {
    for (n, row) in weights.chunks_exact_mut(LANES).skip(nearest).enumerate() {
        row.iter_mut().take(n).for_each(|weight| *weight = f32::NEG_INFINITY);
    }
    let (mut most, mut sums) = ([f32::NEG_INFINITY; LANES], [0f64; LANES]);
    lane_max(weights, &mut most);
    exponentiate(weights, &most, &mut sums);
    sums.map(|sum| (1.0 / sum) as f32)
}

/// Puts rows into lanes: number d of row l goes to `d * LANES + l`, times a factor. Lanes without a
/// row become zero.
pub fn transpose<'a>(rows: impl Iterator<Item = &'a [f32]>, factor: f32, transposed: &mut [f32]) {
    transposed.fill(0.0);
    for (lane, row) in rows.enumerate().take(LANES) {
        for (at, &x) in transposed.iter_mut().skip(lane).step_by(LANES).zip(row) {
            *at = x * factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_to_3e_7() {
        let mut worst = 0f64;
        for n in 0..870_000 {
            let x = -(n as f32) * 1e-4;
            let (got, expected) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max((got / expected - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst:e}");
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
    }

    #[test]
    fn products_give_the_same_bits_at_every_level() {
        for (dim, keys, gap) in [(1, 1, 0), (7, 5, 3), (33, 19, 2), (64, 64, 0), (128, 3, 5)] {
            let number = |n: usize| ((n * 37 + 11) % 101) as f32 / 50.0 - 1.0;
            let transposed: Vec<f32> = (0..dim * LANES).map(number).collect();
            let stride = dim + gap;
            // The last key lacks one number.
            let rows: Vec<f32> = (0..keys * stride + dim - 1).map(|n| number(n + 5)).collect();
            let mut out = vec![1f32; (keys + 1) * LANES];
            add_products(&transposed, &rows, stride, &mut out);
            assert_eq!(out.split_off(keys * LANES), [1f32; LANES]);
            let mut plain = vec![1f32; keys * LANES];
            add_products_plain(&transposed, (&rows, stride, keys), &mut plain);
            assert_eq!(out, plain, "wide and narrow give the same bits");
            let wide = |level: &Level| *level != Level::Portable && level.is_supported();
            for level in Level::ALL.into_iter().filter(wide) {
                let mut other = vec![1f32; keys * LANES];
                // SAFETY: the level is supported, and all rows are inside the slices.
                unsafe { add_products_wide(level, &transposed, (&rows, stride, keys), &mut other) };
                assert_eq!(other, plain, "{level:?} gives the same bits");
            }
            for key in 0..keys {
                for lane in 0..LANES {
                    let expected = (0..dim).fold(0f32, |sum, d| {
                        rows[key * stride + d].mul_add(transposed[d * LANES + lane], sum)
                    });
                    assert_eq!(out[key * LANES + lane], 1.0 + expected);
                }
            }
        }
    }
}
