//! `dsa`: the tokens that a small indexer beside the attention finds for each query (DeepSeek-V3.2
//! and models that follow it).
//!
//! The score of token s for query t is the sum over indexer heads j of w(t, j) times the product of
//! query and key, where that product is positive. The `topk` highest scores among the tokens up to
//! t are chosen, or all tokens if there are fewer. Between equal scores the lower position wins.
//!
//! All rows that this policy gets are the indexer's, not the model's. [`Sparse::append`] takes its
//! keys: one head of `dim` numbers, with positions encoded as the model does it. [`Sparse::index`]
//! and [`Sparse::select`] take its queries (`heads` heads). Before each of them, [`Sparse::score`]
//! takes the weights w of these queries, heads innermost, with all factors multiplied in. The keys
//! of `index` and `seal` are not read; `seal` only names a block.
//!
//! With fp8, a token takes `dim + 4` bytes in a layer: 132 by default. A scale is the largest
//! magnitude of the key divided by 448. Queries are not quantized. Keys are saved with their block,
//! and loaded in the order of tokens.

mod fp8;
mod key_store;

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::sparse::dsa::key_store::KeyStore;
use crate::sparse::index::{Context, Index, NO_QUERY};
use crate::sparse::index_builder::IndexBuilder;
use crate::sparse::lanes::{LANES, add_positive, add_products, transpose};
use crate::sparse::numbers::{all_finite, read, reserve, zeros};
use crate::sparse::prefill_inputs::{check_context, not_finite};
use crate::sparse::ranks::{Ranks, ascending};
use crate::sparse::shape::{Shape, check_layer};
use crate::sparse::{OwnRows, Sparse, Stats, Traits, caps, needs};

/// Parameters of `dsa`.
pub const PARAMS: &[Param] = &[
    Param::new("topk", "tokens for each query, shared by all heads"),
    Param::new("heads", "heads of the indexer"),
    Param::new("dim", "numbers of an indexer head, and of an indexer key"),
    Param::new("state", "how keys are stored: `fp8` (8 bits a number, one scale a token) or `f32`"),
    Param::new(
        "load",
        "`true`: restrict loads for the next token to blocks that hold a chosen token",
    ),
];

/// Keys that are read at once.
const TILE: usize = 64;

/// Parameters of the spec.
#[derive(Clone, Copy)]
struct Settings {
    shape: Shape,
    topk: u32,
    heads: u32,
    dim: u32,
    restricts: bool,
}

/// Tokens of a block.
#[derive(Clone, Copy)]
struct Block {
    id: u32,
    first: u32,
    tokens: u32,
}

/// State of a layer.
struct Layer {
    keys: KeyStore,
    /// Sorted by id.
    blocks: Vec<Block>,
}

/// The indexer of a sequence.
pub struct Dsa {
    settings: Settings,
    layers: Vec<Layer>,
    /// Weights of the next queries, and the layer that they belong to.
    weights: Vec<f32>,
    weighted: Option<u32>,
    scratch: Scratch,
    stats: Stats,
}

/// Working memory of one answer.
#[derive(Default)]
struct Scratch {
    queries: Vec<f32>,
    transposed: Vec<f32>,
    keys: Vec<f32>,
    products: Vec<f32>,
    scores: Vec<f32>,
    chosen: Vec<u32>,
    ranks: Ranks,
}

impl Dsa {
    /// Reads the parameters of `dsa`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Dsa> {
        let most_dim = u64::from(crate::attention::rows::MAX_DIM);
        let settings = Settings {
            shape: *shape,
            topk: reader.u64("topk", 2048, 1..=1 << 30)? as u32,
            heads: reader.u64("heads", 64, 1..=1024)? as u32,
            dim: reader.u64("dim", 128, 1..=most_dim)? as u32,
            restricts: reader.bool("load", false)?,
        };
        let is_small = reader.choice("state", &["fp8", "f32"])?.unwrap_or(0) == 0;
        let mut dsa = Dsa::empty(settings)?;
        let layers = (0..shape.layers)
            .map(|_| Layer { keys: KeyStore::new(settings.dim, is_small), blocks: Vec::new() });
        dsa.layers.extend(layers);
        Ok(dsa)
    }

    fn empty(settings: Settings) -> Result<Dsa> {
        let mut layers = Vec::new();
        reserve(&mut layers, settings.shape.layers as usize)?;
        let scratch = Scratch::default();
        let stats = Stats::default();
        Ok(Dsa { settings, layers, weights: Vec::new(), weighted: None, scratch, stats })
    }

    fn layer(&mut self, layer: u32) -> Result<&mut Layer> {
        check_layer(layer, self.layers.len())?;
        Ok(self.layers.get_mut(layer as usize).ok_or(Status::Invalid)?)
    }

    /// Checks queries, and that their keys and weights were given before.
    fn check(&self, layer: u32, queries: &Rows<'_>, context: &Context) -> Result<()> {
        let Settings { shape, heads, dim, .. } = &self.settings;
        shape.check_rows("queries of the indexer", layer, queries, *heads, *dim)?;
        check_context(shape, queries.tokens(), context)?;
        let known = self.layers.get(layer as usize).map_or(0, |layer| layer.keys.tokens());
        if known < context.tokens {
            fail!(State, "{known} of {} tokens have keys: append the others first", context.tokens);
        }
        let needed = queries.tokens() as usize * *heads as usize;
        if self.weighted != Some(layer) || self.weights.len() != needed {
            fail!(State, "these queries have no weights: call score first");
        }
        Ok(())
    }

    /// Scores the first `tokens` tokens for a query.
    fn weigh(&mut self, layer: u32, queries: &Rows<'_>, query: u32, tokens: usize) -> Result<()> {
        let (heads, dim) = (self.settings.heads as usize, self.settings.dim as usize);
        let scratch = &mut self.scratch;
        zeros(&mut scratch.queries, heads * dim)?;
        for (head, row) in (0..).zip(scratch.queries.chunks_exact_mut(dim)) {
            if !read(queries, query, head, row) {
                return Err(not_finite("queries of the indexer"));
            }
        }
        zeros(&mut scratch.transposed, heads.next_multiple_of(LANES) * dim)?;
        let groups = scratch.queries.chunks(LANES * dim);
        for (group, transposed) in groups.zip(scratch.transposed.chunks_exact_mut(LANES * dim)) {
            transpose(group.chunks_exact(dim), 1.0, transposed);
        }
        zeros(&mut scratch.keys, TILE * dim)?;
        zeros(&mut scratch.scores, tokens)?;
        let weights = self.weights.chunks_exact(heads).nth(query as usize).unwrap_or_default();
        let Some(layer) = self.layers.get(layer as usize) else { return Ok(()) };
        for (tile, scores) in scratch.scores.chunks_mut(TILE).enumerate() {
            layer.keys.read(tile * TILE, &mut scratch.keys);
            let groups = weights.chunks(LANES).zip(scratch.transposed.chunks_exact(LANES * dim));
            for (weights, transposed) in groups {
                zeros(&mut scratch.products, scores.len() * LANES)?;
                add_products(transposed, &scratch.keys, dim, &mut scratch.products);
                let mut lanes = [0.0; LANES];
                lanes.iter_mut().zip(weights).for_each(|(lane, weight)| *lane = *weight);
                add_positive(&scratch.products, &lanes, scores);
            }
        }
        if !all_finite(&scratch.scores) {
            return Err(not_finite("scores of tokens"));
        }
        Ok(())
    }

    /// Finds the tokens of each query: rows of one query, blocks of one key.
    fn tokens(&mut self, layer: u32, queries: &Rows<'_>, context: &Context) -> Result<Index> {
        let mut builder = IndexBuilder::default();
        builder.blocks(u32::from(queries.tokens() > 1), 1, NO_QUERY)?;
        for query in 0..queries.tokens() {
            let visible = context.first_query + query + 1;
            if visible <= self.settings.topk {
                builder.list(0..visible)?;
                continue;
            }
            self.weigh(layer, queries, query, visible as usize)?;
            let Scratch { ranks, scores, chosen, .. } = &mut self.scratch;
            chosen.clear();
            ranks.top(scores, self.settings.topk as usize, chosen)?;
            builder.list(chosen.iter().copied())?;
        }
        Ok(builder.into_index())
    }
}

impl Layer {
    /// Records the tokens of a block.
    fn put(&mut self, block: Block) -> Result<()> {
        match self.blocks.binary_search_by_key(&block.id, |b| b.id) {
            Ok(at) => {
                if let Some(place) = self.blocks.get_mut(at) {
                    *place = block;
                }
            }
            Err(at) => {
                reserve(&mut self.blocks, 1)?;
                self.blocks.insert(at, block);
            }
        }
        Ok(())
    }

    fn find(&self, id: u32) -> Result<Block> {
        let at = self.blocks.binary_search_by_key(&id, |b| b.id).ok();
        match at.and_then(|at| self.blocks.get(at)) {
            Some(block) => Ok(*block),
            None => fail!(NotFound, "block {id} is unknown: seal it first"),
        }
    }
}

impl Sparse for Dsa {
    fn traits(&self) -> Traits {
        let Settings { heads, dim, .. } = self.settings;
        let loads = if self.settings.restricts { caps::LOAD_DECODE } else { 0 };
        Traits {
            caps: caps::INDEX_PREFILL | caps::INDEX_DECODE | loads,
            needs: needs::KEYS | needs::QUERIES | needs::WEIGHTS,
            requires_block_selection: self.settings.restricts,
            rows: Some(OwnRows { query_heads: heads, key_heads: 1, dim }),
            ..Traits::NONE
        }
    }

    fn stats(&self) -> Stats {
        self.stats
    }

    fn state_bytes(&self) -> u64 {
        let layers = self.layers.iter().map(|layer| {
            layer.keys.bytes() + (layer.blocks.capacity() * size_of::<Block>()) as u64
        });
        layers.sum()
    }

    fn append(&mut self, layer: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let Settings { shape, dim, .. } = self.settings;
        shape.check_rows("keys of the indexer", layer, keys, 1, dim)?;
        let known = self.layer(layer)?.keys.tokens();
        if first != known {
            fail!(State, "keys start at token {first}, the layer continues at {known}");
        }
        if keys.tokens() > shape.max_tokens - known {
            fail!(Limit, "more tokens than the limit of {}", shape.max_tokens);
        }
        self.layer(layer)?.keys.append(keys)
    }

    fn seal(&mut self, layer: u32, id: u32, first: u32, keys: &Rows<'_>) -> Result<()> {
        let layer = self.layer(layer)?;
        let (known, tokens) = (layer.keys.tokens(), keys.tokens());
        if first.checked_add(tokens).is_none_or(|end| end > known) {
            fail!(
                State,
                "a block of {tokens} tokens starts at {first}, but only {known} tokens have keys"
            );
        }
        layer.put(Block { id, first, tokens })
    }

    fn score(&mut self, layer: u32, scores: &[f32]) -> Result<()> {
        self.layer(layer)?;
        if !all_finite(scores) {
            return Err(not_finite("weights"));
        }
        if scores.is_empty() || scores.len() % self.settings.heads as usize != 0 {
            fail!(
                Invalid,
                "{} weights do not fit {} indexer heads",
                scores.len(),
                self.settings.heads
            );
        }
        let mut weights = Vec::new();
        zeros(&mut weights, scores.len())?;
        weights.copy_from_slice(scores);
        (self.weights, self.weighted) = (weights, Some(layer));
        Ok(())
    }

    fn select(
        &mut self,
        layer: u32,
        query: Option<&Rows<'_>>,
        candidates: &[u32],
        context: &Context,
        out: &mut Vec<u32>,
    ) -> Result<()> {
        let mut ids = Vec::new();
        ascending(candidates, &mut ids)?;
        // Not in a prompt, as the caps say: its queries together need nearly all blocks.
        let restricts = self.settings.restricts && !context.is_prefill;
        if let (Some(queries), true) = (query, restricts) {
            self.check(layer, queries, context)?;
            let lists = self.tokens(layer, queries, context)?.lists;
            let known = self.layer(layer)?;
            for &id in &ids {
                known.find(id)?;
            }
            // A block is loaded if any query chose one of its tokens.
            let holds = |id: u32| {
                known.find(id).is_ok_and(|block| {
                    (0..lists.len()).map(|at| lists.get(at)).any(|list| {
                        let at = list.partition_point(|&token| token < block.first);
                        list.get(at).is_some_and(|token| token - block.first < block.tokens)
                    })
                })
            };
            ids.retain(|&id| holds(id));
            self.weighted = None;
        }
        self.stats.count(candidates.len(), ids.len());
        *out = ids;
        Ok(())
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        self.check(layer, queries, context)?;
        *out = if context.tokens <= self.settings.topk {
            Index::default()
        } else {
            self.tokens(layer, queries, context)?
        };
        self.weighted = None;
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        for layer in &mut self.layers {
            layer.keys.truncate(tokens as usize);
            layer.blocks.retain(|block| block.first + block.tokens <= tokens);
        }
        self.weighted = None;
        Ok(())
    }

    fn reset(&mut self) {
        for layer in &mut self.layers {
            layer.keys.truncate(0);
            layer.blocks.clear();
        }
        self.weighted = None;
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        let mut fork = Dsa::empty(self.settings)?;
        for layer in &self.layers {
            let mut blocks = Vec::new();
            reserve(&mut blocks, layer.blocks.len())?;
            blocks.extend_from_slice(&layer.blocks);
            fork.layers.push(Layer { keys: layer.keys.copy()?, blocks });
        }
        Ok(Box::new(fork))
    }

    fn save(&self, layer: u32, id: u32, out: &mut Vec<u8>) -> Result<()> {
        check_layer(layer, self.layers.len())?;
        let Some(layer) = self.layers.get(layer as usize) else { return Ok(()) };
        let block = layer.find(id)?;
        layer.keys.save(block.first as usize, block.tokens as usize, out)
    }

    fn load(&mut self, layer: u32, id: u32, first: u32, bytes: &[u8]) -> Result<()> {
        let most = self.settings.shape.max_tokens;
        let layer = self.layer(layer)?;
        let (known, tokens) = (layer.keys.tokens(), layer.keys.check_saved(bytes)?);
        let Some(end) = first.checked_add(tokens).filter(|&end| end <= most) else {
            fail!(Limit, "{tokens} tokens from {first} on exceed the limit of {most}");
        };
        // For keys that are known, only the block's name is new.
        if end > known && first != known {
            fail!(State, "keys start at token {first}, the layer continues at {known}");
        }
        if end > known {
            layer.keys.load(bytes)?;
        }
        layer.put(Block { id, first, tokens })
    }
}
