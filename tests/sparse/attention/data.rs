//! Rows of all dtypes and layouts, with their numbers.

use kvtier::attention::keys::NO_QUERY;
use kvtier::attention::{Head, Keys, Kind, Rows, Scales};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.bits() >> 11) % n
    }

    /// From -1 to 1.
    pub fn number(&mut self) -> f64 {
        self.below(1 << 24) as f64 / f64::from(1 << 23) - 1.0
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Type {
    F32,
    F16,
    Bf16,
    I8Token,
    I8Channel,
}

pub const TYPES: [Type; 5] = [Type::F32, Type::F16, Type::Bf16, Type::I8Token, Type::I8Channel];

/// Rows in memory of their own, and what they are as f64.
pub struct Data {
    pub tokens: usize,
    pub heads: usize,
    pub dim: usize,
    pub numbers: Vec<f64>,
    kind: Type,
    memory: Vec<u64>,
    pages: Vec<u64>,
    page_tokens: u32,
    strides: (u64, u64),
    scales: Vec<f32>,
}

fn f16_of(half: u16) -> f64 {
    let (exponent, fraction) = (i32::from(half >> 10 & 31), f64::from(half & 1023));
    let size = match exponent {
        0 => fraction / 1024.0 * 2f64.powi(-14),
        e => (1.0 + fraction / 1024.0) * 2f64.powi(e - 15),
    };
    if half & 0x8000 == 0 { size } else { -size }
}

impl Data {
    /// `page_tokens` 0 = all in one place. `pad` numbers follow each row.
    pub fn new(
        random: &mut Random,
        (tokens, heads, dim): (usize, usize, usize),
        kind: Type,
        page_tokens: usize,
        pad: usize,
    ) -> Data {
        let width = match kind {
            Type::F32 => 4,
            Type::F16 | Type::Bf16 => 2,
            _ => 1,
        };
        let row = (dim + pad) * width;
        let (head_stride, token_stride) = (row, row * heads);
        let per_page = if page_tokens == 0 { tokens.max(1) } else { page_tokens };
        let count = tokens.div_ceil(per_page).max(1);
        let page_bytes = (token_stride * per_page).next_multiple_of(8);
        let mut memory = vec![0x7FC0_7FC0_7FC0_7FC0_u64; count * page_bytes / 8 + 1];
        let base = memory.as_mut_ptr().cast::<u8>();
        let mut order: Vec<usize> = (0..count).collect();
        (1..count).for_each(|i| order.swap(i, random.below(i as u64 + 1) as usize));
        let scales: Vec<f32> = match kind {
            Type::I8Token => (0..tokens * heads).map(|_| random.number() as f32 * 0.01).collect(),
            Type::I8Channel => (0..dim * heads).map(|_| random.number() as f32 * 0.01).collect(),
            _ => Vec::new(),
        };
        let mut numbers = Vec::new();
        for token in 0..tokens {
            for head in 0..heads {
                for d in 0..dim {
                    let page = order[token / per_page] * page_bytes;
                    let at =
                        page + token % per_page * token_stride + head * head_stride + d * width;
                    // SAFETY: inside of `memory`.
                    let to = unsafe { base.add(at) };
                    // SAFETY: as above, aligned to the width.
                    numbers.push(unsafe {
                        match kind {
                            Type::F32 => {
                                let x = random.number() as f32;
                                to.cast::<f32>().write(x);
                                f64::from(x)
                            }
                            Type::F16 => {
                                // Subnormal ones too.
                                let half = (random.bits() >> 20) as u16 & 0xBBFF;
                                to.cast::<u16>().write(half);
                                f16_of(half)
                            }
                            Type::Bf16 => {
                                let half = ((random.number() as f32).to_bits() >> 16) as u16;
                                to.cast::<u16>().write(half);
                                f64::from(f32::from_bits(u32::from(half) << 16))
                            }
                            Type::I8Token | Type::I8Channel => {
                                let byte = (random.bits() >> 20) as i8;
                                to.cast::<i8>().write(byte);
                                let scale = if kind == Type::I8Token {
                                    scales[token * heads + head]
                                } else {
                                    scales[head * dim + d]
                                };
                                f64::from(byte) * f64::from(scale)
                            }
                        }
                    });
                }
            }
        }
        let pages = order.iter().map(|p| base as u64 + (p * page_bytes) as u64).collect();
        let strides = (token_stride as u64, head_stride as u64);
        let page_tokens = page_tokens as u32;
        Data { tokens, heads, dim, numbers, kind, memory, pages, page_tokens, strides, scales }
    }

    pub fn rows(&self) -> Rows<'_> {
        self.part(0, self.tokens, self.dim)
    }

    /// Some of the tokens (from 0 on, if they are in pages), and of each row the first `dim`.
    pub fn part(&self, first: usize, tokens: usize, dim: usize) -> Rows<'_> {
        let _ = &self.memory;
        let (dtype, width) = match self.kind {
            Type::F32 => (Dtype::F32, 4),
            Type::F16 => (Dtype::F16, 2),
            Type::Bf16 => (Dtype::Bf16, 2),
            _ => (Dtype::I8, 1),
        };
        let scales = match self.kind {
            Type::I8Token => {
                Scales::Token(&self.scales[first * self.heads..(first + tokens) * self.heads])
            }
            Type::I8Channel => Scales::Channel(&self.scales),
            _ => Scales::None,
        };
        let place = if self.page_tokens == 0 {
            Place::At(self.pages[0] + first as u64 * self.strides.0)
        } else {
            assert_eq!(first, 0);
            Place::Pages { addresses: &self.pages, page_tokens: self.page_tokens, shift_bytes: 0 }
        };
        let view = View {
            place,
            tokens: tokens as u32,
            heads: self.heads as u32,
            run_bytes: (dim * width) as u64,
            token_stride_bytes: self.strides.0,
            head_stride_bytes: self.strides.1,
        };
        // SAFETY: it leads to `memory`, which lives as long as `self`.
        unsafe { Rows::new(view, dtype, scales) }.expect("sound rows")
    }

    /// Some of the tokens, as f32.
    pub fn picked(&self, tokens: &[u32]) -> Data {
        let rows = tokens.iter().flat_map(|&t| {
            &self.numbers[t as usize * self.heads * self.dim..][..self.heads * self.dim]
        });
        let numbers: Vec<f64> = rows.copied().collect();
        let mut memory = vec![0_u64; numbers.len() / 2 + 1];
        let base = memory.as_mut_ptr().cast::<f32>();
        for (i, &x) in numbers.iter().enumerate() {
            // SAFETY: two to a word.
            unsafe { base.add(i).write(x as f32) };
        }
        let row = self.dim as u64 * 4;
        Data {
            tokens: tokens.len(),
            heads: self.heads,
            dim: self.dim,
            numbers,
            kind: Type::F32,
            pages: vec![base as u64],
            memory,
            page_tokens: 0,
            strides: (row * self.heads as u64, row),
            scales: Vec::new(),
        }
    }

    pub fn at(&self, token: usize, head: usize) -> &[f64] {
        let at = (token * self.heads + head) * self.dim;
        &self.numbers[at..at + self.dim]
    }
}

/// Attention by its definition.
pub struct Model {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    /// The documented bound: error of `out` as a fraction of the largest value.
    pub bound: Vec<f64>,
    /// Probabilities, `[query, head, key]`.
    pub shares: Vec<f64>,
    pub most_value: f64,
}

pub fn model(
    q: &Data,
    k: &Data,
    v: (&Data, usize),
    first_query: usize,
    scale: f64,
    sees: impl Fn(usize, usize, usize) -> bool,
) -> Model {
    let (v, value_dim) = v;
    let group = q.heads / k.heads;
    let mut all = Model {
        out: Vec::new(),
        lse: Vec::new(),
        bound: Vec::new(),
        shares: Vec::new(),
        most_value: 0.0,
    };
    for query in 0..q.tokens {
        for head in 0..q.heads {
            let row = q.at(query, head);
            let mut scores = vec![f64::NEG_INFINITY; k.tokens];
            let (mut size, mut seen) = (0.0_f64, 0.0);
            for (key, score) in scores.iter_mut().enumerate() {
                if key > first_query + query || !sees(query, head, key) {
                    continue;
                }
                let parts = row.iter().zip(k.at(key, head / group)).map(|(a, b)| a * b * scale);
                *score = parts.clone().sum();
                size = size.max(parts.map(f64::abs).sum());
                seen += 1.0;
            }
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().filter(|s| s.is_finite()).map(|s| (s - most).exp()).sum();
            let mut out = vec![0.0; value_dim];
            for (key, score) in scores.iter().enumerate() {
                let share = if score.is_finite() { (score - most).exp() / sum } else { 0.0 };
                all.shares.push(share);
                let value = v.at(key, head / group);
                if share > 0.0 {
                    all.most_value = value.iter().fold(all.most_value, |m, x| m.max(x.abs()));
                }
                out.iter_mut().zip(value).for_each(|(o, x)| *o += share * x);
            }
            all.out.extend(out);
            all.lse.push(if seen > 0.0 { most + sum.ln() } else { f64::NEG_INFINITY });
            let unit = 2f64.powi(-24);
            all.bound.push(unit * (4.0 * (q.dim as f64 + 8.0) * size + 3.0 * seen + 16.0));
        }
    }
    all
}

impl Model {
    /// Panics where results are further away than the documentation says.
    pub fn check(&self, out: &[f32], lse: &[f32], what: &str) {
        let dim = self.out.len() / self.lse.len().max(1);
        for (row, &want) in self.lse.iter().enumerate() {
            let (got, bound) = (f64::from(lse[row]), self.bound[row]);
            if want == f64::NEG_INFINITY {
                assert_eq!(got, want, "{what}: row {row}");
                assert!(out[row * dim..(row + 1) * dim].iter().all(|&x| x == 0.0), "{what}");
                continue;
            }
            let is_close = (got - want).abs() <= bound + 2f64.powi(-22) * want.abs();
            assert!(is_close, "{what}: log-sum-exp {got} of row {row}, not {want} ({bound})");
            for d in 0..dim {
                let (got, want) = (f64::from(out[row * dim + d]), self.out[row * dim + d]);
                let is_close = (got - want).abs() <= bound * self.most_value;
                assert!(is_close, "{what}: {got} at {row}, {d}, not {want} ({bound})");
            }
        }
    }
}

/// An index that owns its lists.
#[derive(Clone, Debug, Default)]
pub struct Chosen {
    pub heads: Vec<Head>,
    pub starts: Vec<u32>,
    pub items: Vec<u32>,
}

impl Chosen {
    /// Adds a head with its lists.
    pub fn head(mut self, head: Head, lists: &[Vec<u32>]) -> Chosen {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        let first = self.starts.len() as u32 - 1;
        for list in lists {
            self.items.extend(list);
            self.starts.push(self.items.len() as u32);
        }
        self.heads.push(Head { first, lists: lists.len() as u32, ..head });
        self
    }

    /// Keys for each of some heads, the same for all queries.
    pub fn tokens(lists: &[Vec<u32>]) -> Chosen {
        let head = Head { kind: Kind::Blocks, key_block: 1, ..Head::DENSE };
        lists.iter().fold(Chosen::default(), |all, list| all.head(head, std::slice::from_ref(list)))
    }

    /// Blocks, for each of some heads so many rows.
    pub fn blocks(query_block: usize, key_block: usize, rows: usize, lists: &[Vec<u32>]) -> Chosen {
        let (query_block, key_block) = (query_block as u32, key_block as u32);
        let head = Head { kind: Kind::Blocks, query_block, key_block, ..Head::DENSE };
        lists.chunks(rows).fold(Chosen::default(), |all, lists| all.head(head, lists))
    }

    /// Columns and diagonals for each of some heads.
    pub fn lines(lines: &[[Vec<u32>; 2]]) -> Chosen {
        let head = Head { kind: Kind::Lines, ..Head::DENSE };
        lines.iter().fold(Chosen::default(), |all, lines| all.head(head, lines))
    }

    pub fn keys(&self) -> Keys<'_> {
        Keys { heads: &self.heads, starts: &self.starts, items: &self.items }
    }

    /// Whether a query sees a key that lies before it, by what is said for a place of `heads`.
    pub fn sees(&self, at: usize, first: usize, query: usize, key: usize) -> bool {
        let head = self.heads[at];
        let list = |n: u32| {
            let at = (head.first + n) as usize;
            &self.items[self.starts[at] as usize..self.starts[at + 1] as usize]
        };
        let has = |n: u32, item: usize| n < head.lists && list(n).contains(&(item as u32));
        let row = (query as u32).checked_div(head.query_block).unwrap_or(0);
        if head.dense_from != NO_QUERY && first + query >= head.dense_from as usize {
            return true;
        }
        match head.kind {
            Kind::Dense => true,
            Kind::Lines => has(0, key) || has(1, first + query - key),
            Kind::Blocks => has(row, key / head.key_block as usize),
            Kind::Ranges => {
                let mut ranges = list(row + 1).chunks(2);
                has(0, key) || ranges.any(|r| (r[0] as usize..r[1] as usize).contains(&key))
            }
        }
    }
}
