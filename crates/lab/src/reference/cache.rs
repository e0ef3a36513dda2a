//! The engine's interface to a KV cache, and a cache in memory.

use kvtier::attention::{Rows, Scales};
use kvtier::base::status::Result;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::{Kind, RetainedTokens, Shape};

/// Selection of keys.
#[derive(Clone, Copy, Debug)]
pub struct KeySelection<'a> {
    /// These blocks: `block_tokens` tokens from `id * block_tokens` on.
    pub blocks: &'a [u32],
    /// Also all tokens from this position on, a multiple of the block size (or beyond the end).
    pub from: u32,
}

/// Borrowed keys and values.
pub struct KvRows<'a> {
    /// Keys.
    pub keys: Rows<'a>,
    /// Values.
    pub values: Rows<'a>,
    /// Positions of the rows, ascending, for each key head, or one list for all heads. Rows behind
    /// the end of a list are undefined.
    pub positions: Vec<&'a [u32]>,
}

impl KvRows<'_> {
    /// Positions of a key head.
    pub fn of(&self, head: usize) -> &[u32] {
        self.positions[if self.positions.len() == 1 { 0 } else { head }]
    }
}

/// A KV cache for one sequence.
pub trait Cache {
    /// Stores keys and values of new tokens of a layer, `[tokens, heads, dim]` each; latent rows
    /// have no separate values. `first` is the position of the first token.
    fn put(&mut self, layer: u32, first: u32, keys: &[f32], values: &[f32]) -> Result<()>;

    /// Passes the wanted rows of a layer to `f`, or more (None = all), in one or several pieces
    /// with ascending tokens.
    fn with_keys(
        &mut self,
        layer: u32,
        selection: Option<KeySelection<'_>>,
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()>;

    /// Evicts all tokens of a layer except these.
    fn evict(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()>;
}

#[derive(Clone, Default)]
struct Layer {
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Positions of the rows, for each key head.
    positions: Vec<Vec<u32>>,
    is_evicted: bool,
}

/// A cache in memory, one array per layer: `[rows, heads, dim]`.
#[derive(Clone)]
pub struct InMemory {
    shape: Shape,
    layers: Vec<Layer>,
    /// Rows passed at once; 0 = all.
    pub piece: usize,
}

/// Compacts the kept rows of a head.
fn compact(rows: &mut [f32], (heads, dim): (usize, usize), head: usize, stays: &[usize]) {
    for (to, from) in stays.iter().enumerate() {
        let (from, to) = ((from * heads + head) * dim, (to * heads + head) * dim);
        rows.copy_within(from..from + dim, to);
    }
}

/// Copies one head of a token into a row.
fn put_row(
    rows: &mut [f32],
    (row, source, token): (usize, &[f32], usize),
    (head, heads): (usize, usize),
    numbers: usize,
) {
    let (dim, to) = (numbers / heads, row * numbers + numbers / heads * head);
    let from = token * numbers + dim * head;
    rows[to..to + dim].copy_from_slice(&source[from..from + dim]);
}

impl InMemory {
    /// An empty cache.
    pub fn new(shape: &Shape) -> InMemory {
        let positions = vec![Vec::new(); shape.key_heads as usize];
        let layer = Layer { positions, ..Layer::default() };
        InMemory { shape: *shape, layers: vec![layer; shape.layers as usize], piece: 0 }
    }

    /// Floats per row of keys and of values, over all heads; latent rows are only keys.
    fn sizes(&self) -> (usize, usize) {
        let (heads, key) = (self.shape.key_heads as usize, self.shape.key_dim as usize);
        match self.shape.kind {
            Kind::Split => (heads * key, heads * self.shape.value_dim as usize),
            Kind::Latent => (key, 0),
        }
    }

    /// Positions of each key head of a layer.
    pub fn positions(&self, layer: u32) -> &[Vec<u32>] {
        &self.layers[layer as usize].positions
    }

    /// Mean number of keys per head of a layer.
    pub fn retained_share(&self, layer: u32) -> f64 {
        let lists = self.positions(layer);
        lists.iter().map(Vec::len).sum::<usize>() as f64 / lists.len() as f64
    }

    fn rows<'a>(&self, place: Place<'a>, tokens: u32, dim: u32, row: usize) -> Result<Rows<'a>> {
        let view = View {
            place,
            tokens,
            heads: self.shape.key_heads,
            run_bytes: u64::from(dim) * 4,
            token_stride_bytes: row as u64 * 4,
            head_stride_bytes: (row as u64 * 4) / u64::from(self.shape.key_heads),
        };
        // SAFETY: the addresses are in the memory of a layer, which stays borrowed while the rows
        // are in use.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }
    }

    /// Passes consecutive rows.
    fn lend(
        &self,
        layer: &Layer,
        (from, to): (usize, usize),
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()> {
        let (key, value) = self.sizes();
        let at = |numbers: &[f32], row: usize| {
            Place::At(numbers[(from * row).min(numbers.len())..].as_ptr() as u64)
        };
        let tokens = (to - from) as u32;
        let keys = self.rows(at(&layer.keys, key), tokens, self.shape.key_dim, key)?;
        let values = match self.shape.kind {
            Kind::Split => {
                self.rows(at(&layer.values, value), tokens, self.shape.value_dim, value)?
            }
            Kind::Latent => self.rows(at(&layer.keys, key), tokens, self.shape.value_dim, key)?,
        };
        let part = |list: &'_ Vec<u32>| (from.min(list.len()), to.min(list.len()));
        let positions = layer.positions.iter().map(|list| &list[part(list).0..part(list).1]);
        f(&KvRows { keys, values, positions: positions.collect() })
    }

    /// Passes blocks as pages; the last one may be partial.
    fn lend_blocks(
        &self,
        layer: &Layer,
        blocks: &[u32],
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()> {
        let ((key, value), each) = (self.sizes(), self.shape.block_tokens);
        let pages = |numbers: &[f32], row: usize| -> Vec<u64> {
            let page = |&id: &u32| numbers[id as usize * each as usize * row..].as_ptr() as u64;
            blocks.iter().map(page).collect()
        };
        let place = |addresses| Place::Pages { addresses, page_tokens: each, shift_bytes: 0 };
        let positions = blocks.iter().flat_map(|id| id * each..(id + 1) * each);
        let rows = layer.positions[0].len() as u32;
        let positions: Vec<u32> = positions.filter(|&at| at < rows).collect();
        let tokens = positions.len() as u32;
        let (of_keys, of_values) = match self.shape.kind {
            Kind::Split => (pages(&layer.keys, key), pages(&layer.values, value)),
            Kind::Latent => (pages(&layer.keys, key), pages(&layer.keys, key)),
        };
        let row = if self.shape.kind == Kind::Latent { key } else { value };
        f(&KvRows {
            keys: self.rows(place(&of_keys), tokens, self.shape.key_dim, key)?,
            values: self.rows(place(&of_values), tokens, self.shape.value_dim, row)?,
            positions: vec![&positions],
        })
    }
}

impl Cache for InMemory {
    fn put(&mut self, layer: u32, first: u32, keys: &[f32], values: &[f32]) -> Result<()> {
        let ((key, value), heads) = (self.sizes(), self.shape.key_heads as usize);
        let layer = &mut self.layers[layer as usize];
        let tokens = keys.len() / key;
        let most = layer.positions.iter().map(Vec::len).max().unwrap_or(0) + tokens;
        layer.keys.resize(most * key, 0.0);
        layer.values.resize(most * value, 0.0);
        // Heads may have evicted different numbers of tokens: each appends at its end.
        for (head, positions) in layer.positions.iter_mut().enumerate() {
            for token in 0..tokens {
                put_row(&mut layer.keys, (positions.len(), keys, token), (head, heads), key);
                put_row(&mut layer.values, (positions.len(), values, token), (head, heads), value);
                positions.push(first + token as u32);
            }
        }
        Ok(())
    }

    fn with_keys(
        &mut self,
        layer: u32,
        selection: Option<KeySelection<'_>>,
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()> {
        let layer = &self.layers[layer as usize];
        let rows = layer.positions.iter().map(Vec::len).max().unwrap_or(0);
        if let Some(selection) = selection.filter(|_| !layer.is_evicted) {
            // The blocks, and the rows from `from` on, which start at a block.
            let each = self.shape.block_tokens;
            let since = selection.from / each..(rows as u32).div_ceil(each);
            let since = since.filter(|_| selection.from < rows as u32);
            let blocks: Vec<u32> = selection.blocks.iter().copied().chain(since).collect();
            let many = if self.piece == 0 { blocks.len() } else { self.piece / each as usize };
            return blocks
                .chunks(many.max(1))
                .try_for_each(|some| self.lend_blocks(layer, some, f));
        }
        let piece = if self.piece == 0 { rows.max(1) } else { self.piece };
        let mut from = 0;
        while from < rows {
            let to = (from + piece).min(rows);
            self.lend(layer, (from, to), f)?;
            from = to;
        }
        Ok(())
    }

    fn evict(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        let ((key, value), heads) = (self.sizes(), self.shape.key_heads as usize);
        let layer = &mut self.layers[layer as usize];
        layer.is_evicted = true;
        for (head, positions) in layer.positions.iter_mut().enumerate() {
            let place = |at: &u32| positions.binary_search(at).expect("is retained");
            let stays: Vec<usize> = retained.of(head as u32).iter().map(place).collect();
            compact(&mut layer.keys, (heads, key / heads), head, &stays);
            compact(&mut layer.values, (heads, value / heads), head, &stays);
            *positions = retained.of(head as u32).to_vec();
        }
        Ok(())
    }
}
