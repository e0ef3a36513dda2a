//! Checks of kernels for bytes and single numbers.

use crate::base::checksum::checksum;
use crate::device::call::{Call, Kind};
use crate::device::conformance::bench::Bench;
use crate::device::conformance::kernels::{Lab, bytes_of, check_all_close, check_close};
use crate::device::conformance::{Outcome, need};
use crate::meta::dtype::Dtype;

/// Runs are copied to their targets, and nothing else changes.
pub fn moves(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Move)?;
    for _ in 0..lab.rounds() {
        let len = 30_000;
        let content = bench.chance.noise(len);
        let (from, before) = (lab.put(&content)?, bench.chance.noise(len));
        let to = lab.change(&before)?;
        let (mut table, mut expected) = (Vec::new(), before);
        // Each piece has its own part of both buffers, larger than it needs.
        let part = 3_000_usize;
        for place in 0..10 {
            // Kernels copy multiples of 16 in wider units.
            let unit = bench.chance.of(&[1, 4, 16]);
            let (run, runs) =
                (unit * (1 + lab.below(40)), if place == 4 { 0 } else { 1 + lab.below(4) });
            let (gap, back) = (unit * lab.below(3), runs > 1 && lab.below(3) == 0);
            let start = (place * part).next_multiple_of(16);
            let stride = (run + gap) as i64;
            for at in 0..runs {
                let target = start + at * run;
                let source = match back {
                    true => start + (runs - 1 - at) * (run + gap),
                    false => start + at * (run + gap),
                };
                expected[target..target + run].copy_from_slice(&content[source..source + run]);
            }
            let first = if back { (runs as i64 - 1) * stride } else { 0 };
            let sizes = run as u64 | (runs as u64) << 32;
            let begin = from.address + start as u64 + first as u64;
            let stride = if back { -stride } else { stride };
            table.extend([begin, to.at() + start as u64, stride as u64, run as u64, sizes]);
        }
        let (count, table) = (table.len() / 5, lab.put_u64(&table)?);
        let scratch = lab.put(&vec![7; 8 * (count + 1)])?;
        lab.run(Call {
            kind: Kind::Move as u32,
            table: table.address,
            count: count as u32,
            scratch: scratch.address,
            scratch_bytes: scratch.len as u64,
            ..Call::default()
        })?;
        need(to.bytes()? == expected, || "runs of bytes are wrong or at a wrong place".into())?;
    }
    Ok(())
}

/// Checksums equal the store's.
pub fn sums(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Sum)?;
    for _ in 0..lab.rounds() {
        let content = bench.chance.noise(40_000);
        let source = lab.put(&content)?;
        let lens = [0, 1, 7, 31, 240, 241, 1024, 4095, 4096, 4097, 20_000];
        let ranges = lens.map(|len| (lab.below(9), len + lab.below(3)));
        let blocks: usize = ranges.iter().map(|(_, len)| len.div_ceil(4096)).sum();
        let words = |&(from, len): &(usize, usize)| [source.address + from as u64, len as u64];
        let table = lab.put_u64(&ranges.iter().flat_map(words).collect::<Vec<u64>>())?;
        let scratch = lab.put(&vec![7; 8 * (ranges.len() + 1 + blocks)])?;
        let out = lab.out(8 * ranges.len())?;
        lab.run(Call {
            kind: Kind::Sum as u32,
            table: table.address,
            count: ranges.len() as u32,
            out: out.at(),
            scratch: scratch.address,
            scratch_bytes: scratch.len as u64,
            ..Call::default()
        })?;
        for (sum, (from, len)) in out.u64s()?.into_iter().zip(ranges) {
            let is_right = sum == checksum(&content[from..from + len]);
            need(is_right, || format!("the sum of {len} bytes is {sum:#x}"))?;
        }
    }
    Ok(())
}

/// Tokens, heads and elements to convert.
const ROWS: [usize; 3] = [37, 3, 64];

/// Numbers are converted between types, without scales, and to 8 bits and back with a scale for
/// each row.
pub fn convert(bench: &Bench<'_>) -> Outcome {
    let lab = Lab::new(bench, Kind::Convert)?;
    for _ in 0..lab.rounds() {
        for (from, to) in [
            (Dtype::F32, Dtype::F16),
            (Dtype::F32, Dtype::Bf16),
            (Dtype::F16, Dtype::F32),
            (Dtype::Bf16, Dtype::F16),
        ] {
            let numbers = lab.numbers(ROWS.iter().product(), from);
            let out = lab.out(numbers.len() * to.bits() as usize / 8)?;
            let source = lab.put_numbers(&numbers, from)?;
            lab.run(call(from, to, (source.address, out.at()), 0))?;
            let right = out.bytes()? == bytes_of(&numbers, to);
            need(right, || format!("{from:?} does not become the nearest {to:?}"))?;
        }
        narrow(&lab, Dtype::F32)?;
        narrow(&lab, Dtype::Bf16)?;
    }
    Ok(())
}

/// Converts rows, with `scales` unless 0.
fn call(from: Dtype, to: Dtype, (keys, out): (u64, u64), scales: u64) -> Call {
    let [tokens, heads, dim] = ROWS;
    let row = |dtype: Dtype| (dim * dtype.bits() as usize / 8) as i64;
    Call {
        kind: Kind::Convert as u32,
        dtype: from.code(),
        other_dtype: to.code(),
        scaling: u32::from(scales != 0),
        keys,
        key_stride: heads as i64 * row(from),
        key_head_stride: row(from),
        out,
        out_stride: heads as i64 * row(to),
        out_head_stride: row(to),
        scales,
        count: tokens as u32,
        key_heads: heads as u32,
        key_dim: dim as u32,
        ..Call::default()
    }
}

/// To I8 and back: scales are the largest magnitudes divided by 127, codes are rounded to nearest.
fn narrow(lab: &Lab<'_>, dtype: Dtype) -> Outcome {
    let [tokens, heads, dim] = ROWS;
    let numbers = lab.numbers(ROWS.iter().product(), dtype);
    let source = lab.put_numbers(&numbers, dtype)?;
    let (scales, codes) = (lab.out(4 * tokens * heads)?, lab.out(numbers.len())?);
    lab.run(call(dtype, Dtype::I8, (source.address, codes.at()), scales.at()))?;
    let got: Vec<i8> = codes.bytes()?.iter().map(|byte| byte.cast_signed()).collect();
    let own = scales.numbers(Dtype::F32)?;
    for (row, numbers) in numbers.chunks(dim).enumerate() {
        let most = numbers.iter().fold(0.0_f64, |most, x| most.max(f64::from(*x).abs()));
        let scale = most / 127.0;
        check_close("scale", row, own[row] / scale as f32, 1.0, 1e-6)?;
        for (at, (&x, &code)) in numbers.iter().zip(&got[row * dim..]).enumerate() {
            let is_close = (f64::from(x) / scale - f64::from(code)).abs() < 0.501;
            need(is_close, || format!("number {at} of row {row}, {x}, becomes {code} of {scale}"))?;
        }
    }
    let wide = lab.out(4 * numbers.len())?;
    lab.run(call(Dtype::I8, Dtype::F32, (codes.at(), wide.at()), scales.at()))?;
    let product = |(at, code): (usize, &i8)| f64::from(*code) * f64::from(own[at / dim]);
    let expected: Vec<f64> = got.iter().enumerate().map(product).collect();
    check_all_close("number from I8", &wide.numbers(Dtype::F32)?, &expected, 1e-6)
}
