//! Queries, keys and values, and attention in binary64.

use kvtier::attention::{Rows, Scales};
use kvtier::base::half::{from_bf16, from_f16, to_bf16, to_f16};
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::kernels::MOST_SHARED;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};

/// A number between -1 and 1 that `n` says.
pub fn number(n: u64) -> f32 {
    let mut x = n.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// A number as it is after it was kept as a type.
pub fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => from_f16(to_f16(x)),
        Dtype::Bf16 => from_bf16(to_bf16(x)),
        Dtype::I8 => (x * 127.0).round(),
        _ => x,
    }
}

/// Memory that begins at a multiple of 16.
#[derive(Clone)]
pub struct Bytes(pub Vec<u128>);

impl Bytes {
    pub fn new(bytes: usize) -> Bytes {
        Bytes(vec![0; bytes.div_ceil(16)])
    }
    pub fn of(numbers: &[f32], dtype: Dtype) -> Bytes {
        let each = dtype.bits() as usize / 8;
        let mut all = Bytes::new(numbers.len() * each);
        for (to, &x) in all.bytes().chunks_mut(each).zip(numbers) {
            match dtype {
                Dtype::F16 => to.copy_from_slice(&to_f16(x).to_le_bytes()),
                Dtype::Bf16 => to.copy_from_slice(&to_bf16(x).to_le_bytes()),
                Dtype::I8 => to[0] = x as i8 as u8,
                _ => to.copy_from_slice(&x.to_le_bytes()),
            }
        }
        all
    }
    pub fn at(&self) -> u64 {
        self.0.as_ptr() as u64
    }
    pub fn bytes(&mut self) -> &mut [u8] {
        let bytes = self.0.len() * 16;
        // SAFETY: so many bytes of the vector.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), bytes) }
    }
    pub fn numbers(&mut self, count: usize, dtype: Dtype) -> Vec<f32> {
        let each = dtype.bits() as usize / 8;
        let read = |from: &[u8]| match dtype {
            Dtype::F16 => from_f16(u16::from_le_bytes([from[0], from[1]])),
            Dtype::Bf16 => from_bf16(u16::from_le_bytes([from[0], from[1]])),
            _ => f32::from_le_bytes([from[0], from[1], from[2], from[3]]),
        };
        self.bytes().chunks(each).take(count).map(read).collect()
    }
}

/// Sizes and options of an attention problem.
#[derive(Clone, Copy)]
pub struct Shape {
    pub queries: usize,
    pub tokens: usize,
    pub first: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub dims: (usize, usize),
    pub dtype: Dtype,
    pub query_dtype: Dtype,
    /// 0 = in one piece.
    pub page_tokens: usize,
    pub is_latent: bool,
    /// Scales of int8 are of each number, not of each token.
    pub is_by_number: bool,
    /// Shared memory that a block of threads can have.
    pub shared_bytes: u32,
}

impl Shape {
    pub fn new(queries: usize, tokens: usize, heads: usize, key_heads: usize) -> Shape {
        let first = tokens.saturating_sub(queries);
        let (dims, page_tokens) = ((64, 64), 0);
        let (dtype, query_dtype) = (Dtype::F16, Dtype::F16);
        let (is_latent, is_by_number) = (false, false);
        Shape {
            queries,
            tokens,
            first,
            heads,
            key_heads,
            dims,
            dtype,
            query_dtype,
            page_tokens,
            is_latent,
            is_by_number,
            shared_bytes: MOST_SHARED,
        }
    }
}

/// Numbers, and the same in memory as a call has them.
pub struct Problem {
    pub shape: Shape,
    pub queries: Vec<f32>,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub scales: Vec<f32>,
    query_memory: Bytes,
    key_memory: Bytes,
    value_memory: Bytes,
    /// Where pages are.
    table: Vec<u64>,
}

/// Rows of tokens put into pages that lie in another order, each with room before it.
fn paged(from: &mut Bytes, row: usize, page_tokens: usize, tokens: usize) -> (Bytes, Vec<usize>) {
    let pages = tokens.div_ceil(page_tokens);
    let page = row * page_tokens + 16;
    let mut to = Bytes::new(page * pages);
    let places: Vec<usize> = (0..pages).map(|i| (i * 7 + 3) % pages.max(1) * page).collect();
    let is_whole = (1..pages).all(|i| places[..i].iter().all(|&at| at != places[i]));
    let places = if is_whole { places } else { (0..pages).rev().map(|i| i * page).collect() };
    for (token, bytes) in from.bytes().chunks(row).take(tokens).enumerate() {
        let at = places[token / page_tokens] + 16 + token % page_tokens * row;
        to.bytes()[at..at + row].copy_from_slice(bytes);
    }
    (to, places)
}

impl Problem {
    pub fn new(shape: Shape, seed: u64) -> Problem {
        let Shape { dims, key_heads, tokens, .. } = shape;
        let make = |seed: u64, count: usize, dtype| -> Vec<f32> {
            (0..count as u64).map(|n| rounded(number(seed << 32 | n), dtype)).collect()
        };
        let queries = make(3 * seed, shape.queries * shape.heads * dims.0, shape.query_dtype);
        // Products that are large enough for softmax to prefer some.
        let queries: Vec<f32> = queries.iter().map(|x| x * 4.0).collect();
        let keys = make(3 * seed + 1, tokens * key_heads * dims.0, shape.dtype);
        let own = make(3 * seed + 2, tokens * key_heads * dims.1, shape.dtype);
        let latent = || keys.chunks(dims.0).flat_map(|row| &row[..dims.1]).copied().collect();
        let values: Vec<f32> = if shape.is_latent { latent() } else { own };
        let count = if shape.is_by_number { dims.0 + dims.1 } else { 2 * tokens };
        let scales = (0..count * key_heads).map(|n| (number(n as u64) + 2.0) / 300.0);
        let scales = if shape.dtype == Dtype::I8 { scales.collect() } else { Vec::new() };
        let mut key_memory = Bytes::of(&keys, shape.dtype);
        let mut value_memory = Bytes::of(&values, shape.dtype);
        let mut table = Vec::new();
        if shape.page_tokens > 0 {
            let each = shape.dtype.bits() as usize / 8;
            let row = |dim: usize| dim * key_heads * each;
            let (key_pages, places) =
                paged(&mut key_memory, row(dims.0), shape.page_tokens, tokens);
            let (value_pages, _) = paged(&mut value_memory, row(dims.1), shape.page_tokens, tokens);
            (key_memory, value_memory) = (key_pages, value_pages);
            assert!(dims.0 == dims.1 || shape.is_latent, "pages of both lie alike");
            table = places.iter().map(|&at| key_memory.at() + at as u64).collect();
        }
        let query_memory = Bytes::of(&queries, shape.query_dtype);
        Problem {
            shape,
            queries,
            keys,
            values,
            scales,
            query_memory,
            key_memory,
            value_memory,
            table,
        }
    }

    /// Leaves out the first queries.
    pub fn skip_queries(&mut self, count: usize) {
        let numbers = count * self.shape.heads * self.shape.dims.0;
        self.queries.drain(..numbers);
        self.query_memory = Bytes::of(&self.queries, self.shape.query_dtype);
    }

    /// Leaves out keys before a position, and those from another on.
    pub fn only_keys(&mut self, from: usize, to: usize) {
        let Shape { key_heads, dims, dtype, .. } = self.shape;
        let part =
            |all: &[f32], dim: usize| all[from * key_heads * dim..to * key_heads * dim].to_vec();
        (self.keys, self.values) = (part(&self.keys, dims.0), part(&self.values, dims.1));
        self.key_memory = Bytes::of(&self.keys, dtype);
        self.value_memory = Bytes::of(&self.values, dtype);
        (self.shape.tokens, self.shape.first) = (to - from, self.shape.first - from);
    }

    /// Factor of a key or value.
    fn scale(&self, is_value: bool, token: usize, head: usize, d: usize) -> f64 {
        let Shape { tokens, key_heads, dims, .. } = self.shape;
        let at = match (self.shape.is_by_number, is_value) {
            (false, _) => usize::from(is_value) * tokens * key_heads + token * key_heads + head,
            (true, false) => head * dims.0 + d,
            (true, true) => key_heads * dims.0 + head * dims.1 + d,
        };
        self.scales.get(at).map_or(1.0, |&scale| f64::from(scale))
    }

    /// A call without what is written.
    pub fn call(&self, kind: Kind) -> Call {
        let Shape { dims, heads, key_heads, .. } = self.shape;
        let each = i64::from(self.shape.dtype.bits() / 8);
        let of_query = i64::from(self.shape.query_dtype.bits() / 8);
        let is_paged = self.shape.page_tokens > 0;
        let values = if self.shape.is_latent { &self.key_memory } else { &self.value_memory };
        let value_dim = if self.shape.is_latent { dims.0 } else { dims.1 } as i64;
        let shift = values.at().wrapping_sub(self.key_memory.at());
        Call {
            kind: kind as u32,
            dtype: self.shape.dtype as u32,
            other_dtype: self.shape.query_dtype as u32,
            queries: self.query_memory.at(),
            keys: if is_paged { 16 } else { self.key_memory.at() },
            values: if is_paged { shift.wrapping_add(16) } else { values.at() },
            table: if is_paged { self.table.as_ptr() as u64 } else { 0 },
            page_tokens: self.shape.page_tokens as u32,
            query_stride: (heads * dims.0) as i64 * of_query,
            query_head_stride: dims.0 as i64 * of_query,
            key_stride: (key_heads * dims.0) as i64 * each,
            key_head_stride: dims.0 as i64 * each,
            value_stride: key_heads as i64 * value_dim * each,
            value_head_stride: value_dim * each,
            query_count: self.shape.queries as u32,
            query_heads: heads as u32,
            key_heads: key_heads as u32,
            key_dim: dims.0 as u32,
            value_dim: dims.1 as u32,
            tokens: self.shape.tokens as u32,
            first: self.shape.first as u32,
            ..Call::default()
        }
    }

    /// Scores of a query for each key that it sees, before softmax.
    pub fn products(&self, query: usize, head: usize) -> Vec<f64> {
        let Shape { dims: (dim, _), heads, key_heads, .. } = self.shape;
        let of = head / (heads / key_heads);
        let row = &self.queries[(query * heads + head) * dim..][..dim];
        let seen = (self.shape.first + query + 1).min(self.shape.tokens);
        let product = |token: usize| {
            let key = &self.keys[(token * key_heads + of) * dim..][..dim];
            let one =
                |d: usize| f64::from(row[d]) * f64::from(key[d]) * self.scale(false, token, of, d);
            (0..dim).map(one).sum::<f64>() / (dim as f64).sqrt()
        };
        (0..seen).map(product).collect()
    }

    /// Weights, results and log-sum-exp of a query over keys of which `sees` is true.
    pub fn attend(
        &self,
        (query, head): (usize, usize),
        sees: impl Fn(usize) -> bool,
    ) -> (Vec<f64>, Vec<f64>, f64) {
        let Shape { dims: (_, dim), heads, key_heads, .. } = self.shape;
        let mut weights = self.products(query, head);
        for (token, weight) in weights.iter_mut().enumerate() {
            *weight = if sees(token) { *weight } else { f64::NEG_INFINITY };
        }
        let most = weights.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let mut out = vec![0.0; dim];
        if most == f64::NEG_INFINITY {
            return (vec![0.0; weights.len()], out, most);
        }
        weights.iter_mut().for_each(|weight| *weight = (*weight - most).exp());
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        let of = head / (heads / key_heads);
        for (token, weight) in weights.iter().enumerate() {
            let value = &self.values[(token * key_heads + of) * dim..][..dim];
            for (d, (x, y)) in out.iter_mut().zip(value).enumerate() {
                *x += self.scale(true, token, of, d) * weight * f64::from(*y);
            }
        }
        (weights, out, most + sum.ln())
    }
}

/// Numbers as rows of the library's own kernels: `[tokens, heads, dim]`.
pub fn rows(numbers: &[f32], heads: usize, dim: usize) -> Rows<'_> {
    let run_bytes = 4 * dim as u64;
    let view = View {
        place: Place::At(numbers.as_ptr() as u64),
        tokens: (numbers.len() / (heads * dim)) as u32,
        heads: heads as u32,
        run_bytes,
        token_stride_bytes: run_bytes * heads as u64,
        head_stride_bytes: run_bytes,
    };
    // SAFETY: it is `numbers`, borrowed as long.
    unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
}
