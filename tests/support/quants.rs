//! Numbers as model files keep them, there and back, by the layouts that ggml publishes. Slow
//! and plain: this is what the engine of a test computes with, and no part of the library.
#![allow(dead_code)]

/// Numbers of a block, and how it is written and read.
struct Kind {
    name: &'static str,
    numbers: usize,
    bytes: usize,
    write: fn(&[f32], &mut Vec<u8>),
    read: fn(&[u8], &mut Vec<f32>),
}

const KINDS: [Kind; 7] = [
    Kind { name: "F32", numbers: 1, bytes: 4, write: write_f32, read: read_f32 },
    Kind { name: "F16", numbers: 1, bytes: 2, write: write_f16, read: read_f16 },
    Kind { name: "BF16", numbers: 1, bytes: 2, write: write_bf16, read: read_bf16 },
    Kind { name: "Q8_0", numbers: 32, bytes: 34, write: write_q8_0, read: read_q8_0 },
    Kind { name: "Q4_0", numbers: 32, bytes: 18, write: write_q4_0, read: read_q4_0 },
    Kind { name: "Q4_K", numbers: 256, bytes: 144, write: write_q4_k, read: read_q4_k },
    Kind { name: "Q6_K", numbers: 256, bytes: 210, write: write_q6_k, read: read_q6_k },
];

fn kind(name: &str) -> &'static Kind {
    KINDS.iter().find(|kind| kind.name == name).unwrap_or_else(|| panic!("no numbers of {name}"))
}

/// The bytes of numbers, as a type has them.
pub fn bytes_of(dtype: &str, numbers: &[f32]) -> Vec<u8> {
    let kind = kind(dtype);
    assert_eq!(numbers.len() % kind.numbers, 0, "{} numbers as {dtype}", numbers.len());
    let mut out = Vec::with_capacity(numbers.len() / kind.numbers * kind.bytes);
    numbers.chunks_exact(kind.numbers).for_each(|block| (kind.write)(block, &mut out));
    out
}

/// The numbers that are in bytes of a type.
pub fn numbers_of(dtype: &str, bytes: &[u8]) -> Vec<f32> {
    let kind = kind(dtype);
    assert_eq!(bytes.len() % kind.bytes, 0, "{} bytes of {dtype}", bytes.len());
    let mut out = Vec::with_capacity(bytes.len() / kind.bytes * kind.numbers);
    bytes.chunks_exact(kind.bytes).for_each(|block| (kind.read)(block, &mut out));
    out
}

/// The nearest binary16; of two equally near ones the even.
fn to_f16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 16 & 0x8000) as u16;
    let size = x.abs();
    if size.is_nan() {
        return sign | 0x7E00;
    }
    if size >= 65_520.0 {
        return sign | 0x7C00;
    }
    // In units of the last place: a carry goes on into the exponent, as it should.
    let exponent = ((size.to_bits() >> 23) as i32 - 127).max(-14);
    let units = (size / 2f32.powi(exponent - 10)).round_ties_even() as u16;
    sign | (units + ((exponent + 14) as u16) * 1024)
}

fn of_f16(half: u16) -> f32 {
    let (exponent, fraction) = (i32::from(half >> 10 & 31), half & 1023);
    let size = match exponent {
        0 => f32::from(fraction) * 2f32.powi(-24),
        31 if fraction == 0 => f32::INFINITY,
        31 => f32::NAN,
        e => f32::from(1024 + fraction) * 2f32.powi(e - 25),
    };
    if half & 0x8000 == 0 { size } else { -size }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    of_f16(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// A scale as it will be read again.
fn put_half(out: &mut Vec<u8>, scale: f32) -> f32 {
    let half = to_f16(scale);
    out.extend(half.to_le_bytes());
    of_f16(half)
}

fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most: f32, n| most.max(n.abs()))
}

/// How many steps make a number; none where steps have no size.
fn steps(number: f32, step: f32) -> f32 {
    if step == 0.0 { 0.0 } else { (number / step).round() }
}

fn write_f32(block: &[f32], out: &mut Vec<u8>) {
    out.extend(block[0].to_le_bytes());
}

fn read_f32(block: &[u8], out: &mut Vec<f32>) {
    out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]]));
}

fn write_f16(block: &[f32], out: &mut Vec<u8>) {
    put_half(out, block[0]);
}

fn read_f16(block: &[u8], out: &mut Vec<f32>) {
    out.push(half_at(block, 0));
}

/// The upper half of a binary32, rounded to even.
fn write_bf16(block: &[f32], out: &mut Vec<u8>) {
    let bits = block[0].to_bits();
    let upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    out.extend((upper as u16).to_le_bytes());
}

fn read_bf16(block: &[u8], out: &mut Vec<f32>) {
    out.push(f32::from_bits(u32::from(u16::from_le_bytes([block[0], block[1]])) << 16));
}

/// A scale, then 32 signed bytes. What is written is told by the scale before it is rounded,
/// as ggml does it.
fn write_q8_0(block: &[f32], out: &mut Vec<u8>) {
    let scale = largest(block) / 127.0;
    put_half(out, scale);
    let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    out.extend(block.iter().map(|n| (n * by).round() as i8 as u8));
}

fn read_q8_0(block: &[u8], out: &mut Vec<f32>) {
    let scale = half_at(block, 0);
    out.extend(block[2..].iter().map(|&n| f32::from(n as i8) * scale));
}

/// A scale, then nibbles from -8 on: those of the first 16 numbers are the lower ones. The
/// number that is farthest from 0 becomes -8.
fn write_q4_0(block: &[f32], out: &mut Vec<u8>) {
    let most = block.iter().fold(0.0, |most: f32, &n| if n.abs() > most.abs() { n } else { most });
    let scale = most / -8.0;
    put_half(out, scale);
    let by = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let nibble = |n: f32| ((n * by + 8.5) as u8).min(15);
    out.extend((0..16).map(|at| nibble(block[at]) | nibble(block[at + 16]) << 4));
}

fn read_q4_0(block: &[u8], out: &mut Vec<f32>) {
    let scale = half_at(block, 0);
    let number = |nibble: u8| (f32::from(nibble) - 8.0) * scale;
    out.extend(block[2..].iter().map(|byte| number(byte & 15)));
    out.extend(block[2..].iter().map(|byte| number(byte >> 4)));
}

/// Steps and least numbers of eight times 32 numbers, six bits each, in twelve bytes: the
/// first four of each whole, the other four in halves.
fn pack_sixes(step: [u8; 8], least: [u8; 8]) -> [u8; 12] {
    let mut out = [0; 12];
    for at in 0..4 {
        out[at] = step[at] | step[at + 4] >> 4 << 6;
        out[at + 4] = least[at] | least[at + 4] >> 4 << 6;
        out[at + 8] = step[at + 4] & 15 | (least[at + 4] & 15) << 4;
    }
    out
}

fn unpack_sixes(from: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|at| match at {
        0..4 => (from[at] & 63, from[at + 4] & 63),
        _ => {
            let (low, step, least) = (from[at + 4], from[at - 4] >> 6, from[at] >> 6);
            (low & 15 | step << 4, low >> 4 | least << 4)
        }
    })
}

/// Two scales, eight steps and least numbers, then nibbles: of each 64 numbers the first 32
/// are the lower ones.
fn write_q4_k(block: &[f32], out: &mut Vec<u8>) {
    let least = |of: &[f32]| of.iter().fold(0.0, |a: f32, &b| a.min(b));
    let most = |of: &[f32]| of.iter().fold(0.0, |a: f32, &b| a.max(b));
    let mins: Vec<f32> = block.chunks_exact(32).map(|of| -least(of)).collect();
    let wide: Vec<f32> = block.chunks_exact(32).map(|of| (most(of) - least(of)) / 15.0).collect();
    let scale = put_half(out, largest(&wide) / 63.0);
    let scale_of_mins = put_half(out, largest(&mins) / 63.0);
    let six = |number: f32, scale: f32| steps(number, scale).clamp(0.0, 63.0) as u8;
    let step: [u8; 8] = std::array::from_fn(|at| six(wide[at], scale));
    let min: [u8; 8] = std::array::from_fn(|at| six(mins[at], scale_of_mins));
    out.extend(pack_sixes(step, min));
    let nibble = |at: usize| {
        let (step, min) = (f32::from(step[at / 32]) * scale, f32::from(min[at / 32]));
        steps(block[at] + min * scale_of_mins, step).clamp(0.0, 15.0) as u8
    };
    for from in (0..256).step_by(64) {
        out.extend((from..from + 32).map(|at| nibble(at) | nibble(at + 32) << 4));
    }
}

fn read_q4_k(block: &[u8], out: &mut Vec<f32>) {
    let (scale, scale_of_mins) = (half_at(block, 0), half_at(block, 2));
    let sixes = unpack_sixes(&block[4..16]);
    for (pair, bytes) in block[16..].chunks_exact(32).enumerate() {
        for (upper, (step, min)) in sixes[2 * pair..2 * pair + 2].iter().enumerate() {
            let (step, min) = (scale * f32::from(*step), scale_of_mins * f32::from(*min));
            let nibble = |byte: &u8| f32::from(byte >> (4 * upper) & 15);
            out.extend(bytes.iter().map(|byte| step * nibble(byte) - min));
        }
    }
}

/// Lower four bits, upper two bits, sixteen steps, a scale. Each half of 128 numbers has 64
/// bytes of lower bits and 32 of upper ones.
fn write_q6_k(block: &[f32], out: &mut Vec<u8>) {
    let wide: Vec<f32> = block.chunks_exact(16).map(|of| largest(of) / 31.0).collect();
    let scale = of_f16(to_f16(largest(&wide) / 127.0));
    let step: Vec<i8> = wide.iter().map(|&w| steps(w, scale).min(127.0) as i8).collect();
    let six = |at: usize| {
        let step = scale * f32::from(step[at / 16]);
        (steps(block[at], step).clamp(-32.0, 31.0) + 32.0) as u8
    };
    for half in [0, 128] {
        let low = |at: usize| six(half + at) & 15 | (six(half + at + 64) & 15) << 4;
        out.extend((0..64).map(low));
    }
    for half in [0, 128] {
        let high = |at: usize| {
            (0..4).fold(0, |byte, four| byte | six(half + at + 32 * four) >> 4 << (2 * four))
        };
        out.extend((0..32).map(high));
    }
    out.extend(step.iter().map(|&n| n as u8));
    put_half(out, scale);
}

fn read_q6_k(block: &[u8], out: &mut Vec<f32>) {
    let (low, high, steps) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for at in 0..256 {
        let (half, at_half) = (at / 128, at % 128);
        let nibble = low[half * 64 + at_half % 64] >> (4 * (at_half / 64)) & 15;
        let two = high[half * 32 + at_half % 32] >> (2 * (at_half / 32)) & 3;
        let number = f32::from(nibble | two << 4) - 32.0;
        out.push(scale * f32::from(steps[at / 16] as i8) * number);
    }
}
