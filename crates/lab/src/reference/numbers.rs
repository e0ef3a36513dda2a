//! Arithmetic of a transformer without attention. Loops are plain on purpose: tests are not
//! optimised, and an index costs less than an iterator there.

/// Pseudo-random numbers, equal on every machine.
pub struct Random(u64);

impl Random {
    /// A generator with a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 33) % u64::from(n)) as u32
    }

    /// Shuffles a list.
    pub fn shuffle(&mut self, list: &mut [u32]) {
        for at in (1..list.len()).rev() {
            list.swap(at, self.below(at as u32 + 1) as usize);
        }
    }
}

fn dot(row: &[f32], x: &[f32]) -> f32 {
    let n = row.len();
    let (mut a, mut b, mut c, mut d, mut i) = (0.0_f32, 0.0_f32, 0.0_f32, 0.0_f32, 0);
    while i + 4 <= n {
        a += row[i] * x[i];
        b += row[i + 1] * x[i + 1];
        c += row[i + 2] * x[i + 2];
        d += row[i + 3] * x[i + 3];
        i += 4;
    }
    while i < n {
        a += row[i] * x[i];
        i += 1;
    }
    (a + b) + (c + d)
}

/// `x` times the transposed matrix; `inputs` is the length of a row.
pub fn product(x: &[f32], matrix: &[f32], inputs: usize) -> Vec<f32> {
    let outputs = matrix.len() / inputs;
    let mut out = Vec::with_capacity(x.len() / inputs * outputs);
    for x in x.chunks_exact(inputs) {
        for row in matrix.chunks_exact(inputs) {
            out.push(dot(row, x));
        }
    }
    out
}

/// Adds `from` to `to`.
pub fn add(to: &mut [f32], from: &[f32]) {
    let mut i = 0;
    while i < to.len() {
        to[i] += from[i];
        i += 1;
    }
}

/// RMS norm of each row, times a gain.
pub fn norm(x: &[f32], gain: &[f32]) -> Vec<f32> {
    let width = gain.len();
    let mut out = x.to_vec();
    for row in out.chunks_exact_mut(width) {
        let by = 1.0 / (dot(row, row) / width as f32 + 1e-5).sqrt();
        let mut i = 0;
        while i < width {
            row[i] *= by * gain[i];
            i += 1;
        }
    }
    out
}

/// SiLU of the gate, times `up`.
pub fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut out = up.to_vec();
    let mut i = 0;
    while i < out.len() {
        out[i] *= gate[i] / (1.0 + (-gate[i]).exp());
        i += 1;
    }
    out
}

/// Rotates a head (RoPE), its first half with the second.
pub fn turn(head: &mut [f32], (cos, sin): (&[f32], &[f32])) {
    let half = head.len() / 2;
    let mut i = 0;
    while i < half {
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
        i += 1;
    }
}

/// Index of the greatest number; the first of equal ones.
pub fn greatest(numbers: &[f32]) -> usize {
    let mut best = 0;
    for (at, number) in numbers.iter().enumerate() {
        if *number > numbers[best] {
            best = at;
        }
    }
    best
}

/// Cross entropy of a symbol, in nats.
pub fn loss(logits: &[f32], symbol: u8) -> f64 {
    let most = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let sum: f64 = logits.iter().map(|&l| f64::from(l - most).exp()).sum();
    sum.ln() - f64::from(logits[symbol as usize] - most)
}
