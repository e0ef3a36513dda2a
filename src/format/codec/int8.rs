//! `int8`: rounds a number to the nearest multiple of its scale, -127 to 127 times.
//!
//! Keys share scales by channel, because a few channels are large in every token; values share them
//! by token. Encoded: the scales, one f32 each, little-endian; then one byte a number, in the order
//! of the plane. A scale is the largest magnitude that shares it, divided by 127.

use crate::base::half::{from_bf16, from_f16, to_bf16, to_f16};
use crate::base::status::Result;
use crate::fail;
use crate::format::codec::Shape;
use crate::meta::dtype::Dtype;

/// Numbers that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// One scale for each place in a row: for keys.
    Channel,
    /// One scale for each row: for values.
    Token,
}

/// Loss of an encoding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quality {
    /// Encoded numbers.
    pub count: u64,
    /// Largest difference.
    pub most: f64,
    /// Sum of the differences.
    pub sum: f64,
    /// Sum of their squares.
    pub square: f64,
    /// Sum of squares of the numbers.
    pub all: f64,
}

impl Quality {
    /// Root mean square of the differences, relative to that of the numbers.
    pub fn relative(&self) -> f64 {
        if self.all > 0.0 { (self.square / self.all).sqrt() } else { 0.0 }
    }

    /// The mean difference.
    pub fn mean(&self) -> f64 {
        if self.count > 0 { self.sum / self.count as f64 } else { 0.0 }
    }

    /// Adds the loss of another plane.
    pub fn join(&mut self, other: &Quality) {
        self.count += other.count;
        self.most = self.most.max(other.most);
        self.sum += other.sum;
        self.square += other.square;
        self.all += other.all;
    }
}

/// Rows are handled in parts of this many numbers, in place.
const STRIDE: usize = 256;

fn width(dtype: Dtype) -> usize {
    if dtype == Dtype::F32 { 4 } else { 2 }
}

/// Numbers of a row, and rows, if the plane can be encoded.
fn extent(shape: &Shape, raw_bytes: usize) -> Option<(usize, usize)> {
    let known = matches!(shape.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
    let width = width(shape.dtype);
    let whole = known && shape.row_bytes > 0 && shape.row_bytes.is_multiple_of(width);
    let whole = whole && raw_bytes.is_multiple_of(shape.row_bytes);
    whole.then(|| (shape.row_bytes / width, raw_bytes / shape.row_bytes))
}

/// Bytes of an encoded plane; 0 if it cannot be encoded.
pub fn coded_bytes(shape: &Shape, raw_bytes: usize) -> usize {
    let Some((row, rows)) = extent(shape, raw_bytes) else { return 0 };
    let scales = if shape.scales == Scales::Channel { row } else { rows };
    scales.saturating_mul(4).saturating_add(row.saturating_mul(rows))
}

/// Loads numbers of a row.
fn load(dtype: Dtype, raw: &[u8], out: &mut [f32; STRIDE]) -> usize {
    let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        Dtype::F32 => {
            let words = raw.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            out.iter_mut().zip(words).for_each(|(x, word)| *x = word);
        }
        Dtype::F16 => {
            let halves = raw.chunks_exact(2).map(|b| from_f16(pair(b)));
            out.iter_mut().zip(halves).for_each(|(x, half)| *x = half);
        }
        _ => {
            let halves = raw.chunks_exact(2).map(|b| from_bf16(pair(b)));
            out.iter_mut().zip(halves).for_each(|(x, half)| *x = half);
        }
    }
    raw.len() / width(dtype)
}

/// Largest magnitudes that share a scale; None if a number is not finite.
fn largest(shape: &Shape, raw: &[u8], row: usize, rows: usize) -> Option<Vec<f32>> {
    let by_channel = shape.scales == Scales::Channel;
    let mut most = Vec::new();
    most.try_reserve_exact(if by_channel { row } else { rows }).ok()?;
    most.resize(if by_channel { row } else { rows }, 0f32);
    let (mut numbers, mut sum) = ([0f32; STRIDE], 0f64);
    for (token, line) in raw.chunks_exact(shape.row_bytes).enumerate() {
        for (part, bytes) in line.chunks(STRIDE * width(shape.dtype)).enumerate() {
            let count = load(shape.dtype, bytes, &mut numbers);
            let numbers = &mut numbers[..count];
            // 0 times a number is 0, unless the number is infinite or NaN.
            sum += sum_of(numbers, |x| x * 0.0);
            let larger = |m: f32, x: f32| if x > m { x } else { m };
            if by_channel {
                let shared = &mut most[part * STRIDE..part * STRIDE + count];
                shared.iter_mut().zip(numbers).for_each(|(m, x)| *m = larger(*m, x.abs()));
            } else {
                numbers.iter_mut().for_each(|x| *x = x.abs());
                most[token] = larger(most[token], most_of(numbers));
            }
        }
    }
    (sum == 0.0).then_some(most)
}

/// Adding and subtracting it rounds a small number to the nearest integer, ties to even. In
/// between, the low bits are that integer.
const ROUND: f32 = 12_582_912.0;

/// The inverse of a scale; 0 for a scale too small to invert, so that all codes become 0.
fn inverse(scale: f32) -> f32 {
    if scale >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 }
}

/// Sums in eight accumulators: a single one would stall at every number.
fn sum_of(numbers: &[f32], each: impl Fn(f32) -> f32) -> f64 {
    let mut sums = [0f32; 8];
    let parts = numbers.chunks_exact(sums.len());
    let rest: f32 = parts.remainder().iter().map(|&x| each(x)).sum();
    for part in parts {
        sums.iter_mut().zip(part).for_each(|(sum, &x)| *sum += each(x));
    }
    f64::from(sums.iter().sum::<f32>() + rest)
}

/// The maximum, in the same way.
fn most_of(numbers: &[f32]) -> f32 {
    let mut most = [0f32; 8];
    let parts = numbers.chunks_exact(most.len());
    let rest = parts.remainder().iter().fold(0f32, |m, x| m.max(*x));
    for part in parts {
        most.iter_mut().zip(part).for_each(|(m, &x)| *m = if x > *m { x } else { *m });
    }
    most.iter().fold(rest, |m, x| m.max(*x))
}

/// Encodes a plane into the start of `out`. None if it cannot be encoded, or `out` is shorter than
/// [`coded_bytes`]. The loss is measured against the decoded numbers.
pub fn encode(shape: &Shape, raw: &[u8], out: &mut [u8]) -> Option<Quality> {
    let (row, rows) = extent(shape, raw.len())?;
    let out = out.get_mut(..coded_bytes(shape, raw.len()))?;
    let mut scales = largest(shape, raw, row, rows)?;
    let (head, mut rest) = out.split_at_mut(4 * scales.len());
    for (scale, bytes) in scales.iter_mut().zip(head.chunks_exact_mut(4)) {
        *scale /= 127.0;
        bytes.copy_from_slice(&scale.to_le_bytes());
    }
    let (mut numbers, mut back, mut codes) = ([0f32; STRIDE], [0f32; STRIDE], [0u8; STRIDE]);
    let (mut shared, mut inverses) = ([0f32; STRIDE], [0f32; STRIDE]);
    let mut lost = Quality::default();
    for (token, line) in raw.chunks_exact(shape.row_bytes).enumerate() {
        for (part, bytes) in line.chunks(STRIDE * width(shape.dtype)).enumerate() {
            let count = load(shape.dtype, bytes, &mut numbers);
            match shape.scales {
                Scales::Channel => {
                    shared[..count].copy_from_slice(&scales[part * STRIDE..part * STRIDE + count]);
                }
                Scales::Token => shared[..count].fill(scales[token]),
            }
            inverses.iter_mut().zip(&shared).for_each(|(i, &scale)| *i = inverse(scale));
            for i in 0..STRIDE {
                let steps = (numbers[i] * inverses[i]).clamp(-127.0, 127.0) + ROUND;
                codes[i] = steps.to_bits() as u8;
                back[i] = (steps - ROUND) * shared[i];
            }
            let (now, after) = std::mem::take(&mut rest).split_at_mut(count);
            now.copy_from_slice(&codes[..count]);
            rest = after;
            round(shape.dtype, &mut back);
            back.iter_mut().zip(&numbers).for_each(|(y, x)| *y = (x - *y).abs());
            let off = &back[..count];
            lost.join(&Quality {
                count: count as u64,
                most: f64::from(most_of(off)),
                sum: sum_of(off, |x| x),
                square: sum_of(off, |x| x * x),
                all: sum_of(&numbers[..count], |x| x * x),
            });
        }
    }
    Some(lost)
}

/// Rounds numbers to their stored type.
fn round(dtype: Dtype, numbers: &mut [f32; STRIDE]) {
    match dtype {
        Dtype::F16 => numbers.iter_mut().for_each(|x| *x = from_f16(to_f16(*x))),
        Dtype::Bf16 => numbers.iter_mut().for_each(|x| *x = from_bf16(to_bf16(*x))),
        _ => {}
    }
}

/// Stores numbers into a row.
fn store(dtype: Dtype, numbers: &[f32], out: &mut [u8]) {
    match dtype {
        Dtype::F32 => {
            let words = out.chunks_exact_mut(4).zip(numbers);
            words.for_each(|(word, x)| word.copy_from_slice(&x.to_le_bytes()));
        }
        Dtype::F16 => {
            let halves = out.chunks_exact_mut(2).zip(numbers);
            halves.for_each(|(half, &x)| half.copy_from_slice(&to_f16(x).to_le_bytes()));
        }
        _ => {
            let halves = out.chunks_exact_mut(2).zip(numbers);
            halves.for_each(|(half, &x)| half.copy_from_slice(&to_bf16(x).to_le_bytes()));
        }
    }
}

/// Decodes a plane.
pub fn decode(shape: &Shape, coded: &[u8], out: &mut [u8]) -> Result<()> {
    let Some((row, rows)) = extent(shape, out.len()) else {
        fail!(
            Corrupt,
            "int8 cannot encode a plane of {} bytes of {}",
            out.len(),
            shape.dtype.name()
        );
    };
    let scales = if shape.scales == Scales::Channel { row } else { rows };
    let Some((scales, codes)) = coded.split_at_checked(scales.saturating_mul(4)) else {
        fail!(Corrupt, "{} bytes do not hold {scales} scales", coded.len());
    };
    if codes.len() != row * rows {
        fail!(Corrupt, "{} bytes do not hold {} codes", codes.len(), row * rows);
    }
    let (mut numbers, mut shared) = ([0f32; STRIDE], [0f32; STRIDE]);
    let lines = out.chunks_exact_mut(shape.row_bytes).zip(codes.chunks_exact(row.max(1)));
    for (token, (line, codes)) in lines.enumerate() {
        let parts = line.chunks_mut(STRIDE * width(shape.dtype)).zip(codes.chunks(STRIDE));
        for (part, (bytes, codes)) in parts.enumerate() {
            let first = if shape.scales == Scales::Channel { part * STRIDE } else { token };
            load(
                Dtype::F32,
                &scales[4 * first..scales.len().min(4 * (first + STRIDE))],
                &mut shared,
            );
            if shape.scales == Scales::Token {
                shared = [shared[0]; STRIDE];
            }
            for ((x, &code), scale) in numbers.iter_mut().zip(codes).zip(&shared) {
                *x = f32::from(code.cast_signed()) * scale;
            }
            store(shape.dtype, &numbers[..codes.len()], bytes);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(dtype: Dtype, numbers: &[f32]) -> Vec<u8> {
        numbers
            .iter()
            .flat_map(|&x| match dtype {
                Dtype::F32 => x.to_le_bytes().to_vec(),
                Dtype::F16 => to_f16(x).to_le_bytes().to_vec(),
                _ => to_bf16(x).to_le_bytes().to_vec(),
            })
            .collect()
    }

    fn numbers(dtype: Dtype, raw: &[u8]) -> Vec<f64> {
        let mut all = Vec::new();
        for part in raw.chunks(STRIDE * width(dtype)) {
            let mut some = [0f32; STRIDE];
            let count = load(dtype, part, &mut some);
            all.extend(some[..count].iter().map(|&x| f64::from(x)));
        }
        all
    }

    proptest! {
        #[test]
        fn errors_are_at_most_half_a_step(
            row in 1usize..600, rows in 0usize..8, kind in 0usize..3, by_channel in any::<bool>(),
            size in -20i32..14, seed in any::<u64>(),
        ) {
            let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16][kind];
            let scales = if by_channel { Scales::Channel } else { Scales::Token };
            let mut state = seed | 1;
            let plain: Vec<f32> = (0..row * rows).map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ((state >> 40) as f32 / 8_388_608.0 - 1.0) * 2f32.powi(size)
            }).collect();
            let raw = bytes(dtype, &plain);
            let shape = Shape { dtype, row_bytes: row * width(dtype), scales };
            let mut coded = vec![0xAA; coded_bytes(&shape, raw.len())];
            let lost = encode(&shape, &raw, &mut coded).unwrap();
            prop_assert_eq!(coded.len(), coded_bytes(&shape, raw.len()));
            let mut back = vec![0; raw.len()];
            decode(&shape, &coded, &mut back).unwrap();
            let (before, after) = (numbers(dtype, &raw), numbers(dtype, &back));
            let share = |i: usize| if by_channel { i % row } else { i / row };
            // Storing a half rounds once more.
            let rounding = [0.0, 2f64.powi(-11), 2f64.powi(-8)][kind];
            let mut largest = vec![0f64; row.max(rows)];
            for (i, x) in before.iter().enumerate() {
                largest[share(i)] = largest[share(i)].max(x.abs());
            }
            for i in 0..before.len() {
                let most = largest[share(i)];
                let allowed = most / 254.0 * 1.0001 + most * rounding + 2f64.powi(-25);
                prop_assert!((before[i] - after[i]).abs() <= allowed, "{} {}", before[i], after[i]);
            }
            let off: Vec<f64> = before.iter().zip(&after).map(|(x, y)| (x - y).abs()).collect();
            let most = off.iter().fold(0f64, |m, x| m.max(*x));
            let sum: f64 = off.iter().sum();
            prop_assert_eq!(lost.count as usize, before.len());
            prop_assert!((lost.most - most).abs() <= most * 1e-5, "{} {most}", lost.most);
            prop_assert!((lost.sum - sum).abs() <= sum * 1e-3, "{} {sum}", lost.sum);
            prop_assert!(lost.mean() <= lost.most);
            prop_assert!(lost.relative() <= 0.05, "{}", lost.relative());
        }
    }

    #[test]
    fn channel_scales_confine_outlier_channels() {
        let row: Vec<f32> = (0..64).map(|c| if c == 3 { 500.0 } else { 0.5 }).collect();
        let plain: Vec<f32> =
            (0..16).flat_map(|t| row.iter().map(move |x| x + t as f32 / 64.0)).collect();
        let off = |scales| {
            let shape = Shape { dtype: Dtype::F32, row_bytes: 256, scales };
            let raw = bytes(Dtype::F32, &plain);
            let mut coded = vec![0; coded_bytes(&shape, raw.len())];
            encode(&shape, &raw, &mut coded).unwrap();
            let mut back = vec![0; raw.len()];
            decode(&shape, &coded, &mut back).unwrap();
            let (before, after) = (numbers(Dtype::F32, &raw), numbers(Dtype::F32, &back));
            before
                .iter()
                .zip(&after)
                .enumerate()
                .filter(|(i, _)| i % 64 != 3)
                .map(|(_, (a, b))| (a - b).abs())
                .fold(0.0, f64::max)
        };
        assert!(off(Scales::Channel) < 0.01 && off(Scales::Token) > 0.5);
    }

    #[test]
    fn numbers_that_are_not_finite_are_not_encoded() {
        let shape = Shape { dtype: Dtype::F16, row_bytes: 8, scales: Scales::Token };
        for bad in [f32::NAN, f32::INFINITY] {
            let raw = bytes(Dtype::F16, &[1.0, bad, 2.0, 3.0]);
            assert!(encode(&shape, &raw, &mut [0; 64]).is_none());
        }
        let zero = bytes(Dtype::F16, &[0.0; 4]);
        let nothing = Quality { count: 4, ..Quality::default() };
        assert_eq!(encode(&shape, &zero, &mut [0; 8]), Some(nothing));
        assert_eq!(encode(&shape, &zero, &mut [0; 7]), None, "too little room");
        assert_eq!(coded_bytes(&shape, 9), 0, "no whole row");
    }
}
