//! A transformer over a KV cache: prefill of a prompt, whole or in parts, then decoding.

use std::collections::VecDeque;

use kvtier::base::status::Result;
use kvtier::sparse::{Context, Index, RetainedTokens, Shape, Traits, caps, needs};

use super::attend::{LayerQueries, Output, context, whole};
use super::cache::{Cache, InMemory, KeySelection};
use super::model::{Form, Layer, Model};
use super::numbers::{add, gated, norm, product, turn};
use super::policies::{Policies, unsupported};
use super::rows::{contiguous, to_f32};

/// One in this many queries of a prompt is counted.
const COUNTED: usize = 16;

/// The engine's data about the blocks of a layer.
#[derive(Clone, Default)]
struct Blocks {
    /// Mean keys, `[blocks, heads, dim]`, from which policies get scores.
    means: Vec<f32>,
    /// Number of complete blocks, which is the next id. Constant after the first eviction.
    count: u32,
    is_evicted: bool,
}

/// Weights of a layer, with the owner of their memory.
pub struct LayerWeights {
    /// The weights.
    pub layer: Layer,
    /// Dropped when the layer has been computed.
    pub until: Box<dyn std::any::Any>,
}

/// Provides the weights of a layer when it is computed, for models that do not hold them.
pub type WeightSource<'m> = &'m dyn Fn(u32) -> Result<LayerWeights>;

/// An engine for one sequence.
pub struct Engine<'m, C: Cache> {
    /// The weights.
    pub model: &'m Model,
    /// Form of the cached keys and values.
    pub form: Form,
    /// The model's shape, as policies see it.
    pub shape: Shape,
    /// Source of weights; None = the model holds them.
    pub lender: Option<WeightSource<'m>>,
    /// The KV cache.
    pub cache: C,
    /// The sparse policies.
    pub policies: Policies,
    /// Number of tokens so far.
    pub tokens: u32,
    /// Keys loaded during decoding, of one head, summed over layers.
    pub read: u64,
    /// Keys used during decoding, summed over query heads and layers.
    pub looked: u64,
    /// Tokens present during decoding, summed over steps and layers.
    pub before: u64,
    /// For some queries of prompts: the keys used, and all keys before them.
    pub paired: (u64, u64),
    blocks: Vec<Blocks>,
    /// Queries of the earlier layers of this step, the last layer first.
    earlier: VecDeque<Vec<f32>>,
}

/// Projections of tokens before attention.
struct Projected {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl<'m> Engine<'m, InMemory> {
    /// An engine with a cache in memory.
    pub fn in_memory(model: &'m Model, form: Form, block: u32, policies: Policies) -> Result<Self> {
        let cache = InMemory::new(&model.shape(form, block));
        Engine::new(model, form, block, cache, policies)
    }

    /// A copy that continues from here with other policies.
    pub fn fork(&self, policies: Policies) -> Engine<'m, InMemory> {
        Engine {
            cache: self.cache.clone(),
            policies,
            blocks: self.blocks.clone(),
            earlier: VecDeque::new(),
            ..*self
        }
    }
}

impl<'m, C: Cache> Engine<'m, C> {
    /// An engine without tokens; fails if a policy needs something unsupported.
    pub fn new(
        model: &'m Model,
        form: Form,
        block: u32,
        cache: C,
        policies: Policies,
    ) -> Result<Self> {
        let shape = model.shape(form, block);
        shape.check()?;
        policies.check(&shape)?;
        let blocks = vec![Blocks::default(); model.layers.len()];
        let earlier = VecDeque::new();
        Ok(Engine {
            model,
            form,
            shape,
            lender: None,
            cache,
            policies,
            tokens: 0,
            read: 0,
            looked: 0,
            before: 0,
            paired: (0, 0),
            blocks,
            earlier,
        })
    }

    /// Computes a prompt in one part, and evicts. Returns the logits of its last `rows` tokens.
    pub fn prompt(&mut self, symbols: &[u8], rows: usize) -> Result<Vec<f32>> {
        let logits = self.compute(symbols, symbols.len(), rows)?;
        self.settle(symbols.len() as u32)?;
        Ok(logits)
    }

    /// Computes a prompt in parts of `each` tokens, without eviction. Returns the logits of the
    /// last part's last `rows` tokens.
    pub fn compute(&mut self, symbols: &[u8], each: usize, rows: usize) -> Result<Vec<f32>> {
        let parts = symbols.len().div_ceil(each) as u32;
        let mut last = Vec::new();
        for (part, symbols) in (0..).zip(symbols.chunks(each)) {
            last = self.run(symbols, Some((part, parts)))?;
        }
        let width = self.model.sizes.width;
        Ok(self.logits(&last[last.len() - rows * width..]))
    }

    /// Evicts, after a prompt of `last` tokens was computed.
    pub fn settle(&mut self, last: u32) -> Result<()> {
        let context = context(true, (0, 1), self.tokens - last, self.tokens);
        (0..self.shape.layers).try_for_each(|layer| self.evict(layer, &context))
    }

    /// Decodes one token; returns its logits.
    pub fn next(&mut self, symbol: u8) -> Result<Vec<f32>> {
        let last = self.run(&[symbol], None)?;
        Ok(self.logits(&last))
    }

    fn logits(&self, rows: &[f32]) -> Vec<f32> {
        let model = self.model;
        product(&norm(rows, &model.last), &model.out, model.sizes.width)
    }

    /// Computes tokens through all layers: a part of a prompt, or one decoded token.
    fn run(&mut self, symbols: &[u8], part: Option<(u32, u32)>) -> Result<Vec<f32>> {
        let (model, width) = (self.model, self.model.sizes.width);
        let row = |&symbol: &u8| &model.symbols[symbol as usize * width..][..width];
        let mut x: Vec<f32> = symbols.iter().flat_map(row).copied().collect();
        let first = self.tokens;
        self.tokens += symbols.len() as u32;
        let context = context(part.is_some(), part.unwrap_or((0, 1)), first, self.tokens);
        self.earlier.clear();
        for (at, own) in (0..).zip(&model.layers) {
            let lent = self.lender.map(|lend| lend(at)).transpose()?;
            let layer = lent.as_ref().map_or(own, |lent| &lent.layer);
            let own = self.project(layer, &norm(&x, &layer.first), first);
            self.put(at, &own, first)?;
            let layer_queries = LayerQueries {
                shape: &self.shape.clone(),
                layer: at,
                queries: &own.queries,
                first,
            };
            let output = match part {
                Some(_) => self.prefill(&layer_queries, &context)?,
                None => self.decode(&layer_queries, &context)?,
            };
            let out = self.values(layer, output.out);
            add(&mut x, &product(&out, &layer.o, model.sizes.heads * model.sizes.value));
            let y = norm(&x, &layer.second);
            let inner = gated(&product(&y, &layer.gate, width), &product(&y, &layer.up, width));
            add(&mut x, &product(&inner, &layer.down, model.sizes.hidden));
            if part.is_none() {
                self.evict(at, &context)?;
                self.earlier.push_front(own.queries);
            }
        }
        Ok(x)
    }

    /// Queries, keys and values of tokens, in the form of the cache.
    fn project(&self, layer: &Layer, x: &[f32], first: u32) -> Projected {
        let sizes = &self.model.sizes;
        let (width, rope, nope) = (sizes.width, sizes.rope, sizes.nope);
        let turn_all = |numbers: &mut [f32], heads: usize, skip: usize| {
            for (at, head) in numbers.chunks_exact_mut(skip + rope).enumerate() {
                turn(&mut head[skip..], self.model.turns(first + (at / heads) as u32));
            }
        };
        let mut queries = product(x, &layer.q, width);
        turn_all(&mut queries, sizes.heads, nope);
        let Some(latent) = &layer.latent else {
            let mut keys = product(x, &layer.k, width);
            turn_all(&mut keys, sizes.key_heads, 0);
            return Projected { queries, keys, values: product(x, &layer.v, width) };
        };
        let rows = norm(&product(x, &layer.k, width), &latent.norm);
        let mut pe = product(x, &latent.pe, width);
        turn_all(&mut pe, 1, 0);
        let concat_rows = |a: &[f32], b: &[f32]| [a, b].concat();
        if self.form == Form::Expanded {
            let of_heads = product(&rows, &latent.up_k, sizes.latent);
            let heads = of_heads.chunks_exact(nope).enumerate();
            let keys =
                heads.flat_map(|(at, k)| concat_rows(k, &pe[at / sizes.heads * rope..][..rope]));
            let values = product(&rows, &latent.up_v, sizes.latent);
            return Projected { queries, keys: keys.collect(), values };
        }
        let keys = rows.chunks_exact(sizes.latent).zip(pe.chunks_exact(rope));
        let keys = keys.flat_map(|(row, pe)| concat_rows(row, pe)).collect();
        let absorbed = queries.chunks_exact(nope + rope).enumerate().flat_map(|(at, q)| {
            let up = &latent.up_k[at % sizes.heads * nope * sizes.latent..][..nope * sizes.latent];
            let mut row = vec![0.0; sizes.latent];
            for (by, from) in q.iter().zip(up.chunks_exact(sizes.latent)) {
                row.iter_mut().zip(from).for_each(|(to, x)| *to += by * x);
            }
            concat_rows(&row, &q[nope..])
        });
        Projected { queries: absorbed.collect(), keys, values: Vec::new() }
    }

    /// Attention output in the model's value dimension: latent output is projected up by head.
    fn values(&self, layer: &Layer, out: Vec<f32>) -> Vec<f32> {
        let (sizes, Some(latent)) = (&self.model.sizes, &layer.latent) else { return out };
        if self.form != Form::Latent {
            return out;
        }
        let each = sizes.value * sizes.latent;
        let heads = out.chunks_exact(sizes.latent).enumerate();
        heads
            .flat_map(|(at, row)| {
                product(row, &latent.up_v[at % sizes.heads * each..][..each], sizes.latent)
            })
            .collect()
    }

    /// Stores new keys and values in the cache, and notifies the policies that need keys.
    fn put(&mut self, layer: u32, own: &Projected, first: u32) -> Result<()> {
        let shape = self.shape;
        self.cache.put(layer, first, &own.keys, &own.values)?;
        for active in self.policies.needing(needs::KEYS) {
            let (heads, dim) = active.traits.key_rows(&shape);
            active.policy.append(layer, first, &contiguous(&own.keys, heads, dim)?)?;
        }
        while !self.blocks[layer as usize].is_evicted
            && (self.blocks[layer as usize].count + 1) * shape.block_tokens <= self.tokens
        {
            self.seal(layer)?;
        }
        Ok(())
    }

    /// Seals the next block of a layer: policies see its keys before they may be moved.
    fn seal(&mut self, layer: u32) -> Result<()> {
        let (shape, blocks) = (self.shape, &mut self.blocks[layer as usize]);
        let row = (shape.key_heads * shape.key_dim) as usize;
        let (id, each) = (blocks.count, shape.block_tokens);
        let selection = KeySelection { blocks: &[id], from: self.tokens };
        let mut keys = Vec::new();
        self.cache.with_keys(layer, Some(selection), &mut |lent| {
            let mut all = Vec::new();
            to_f32(&lent.keys, &mut all);
            let at = |position| row * lent.of(0).partition_point(|&at| at < position);
            keys.extend_from_slice(&all[at(id * each)..at((id + 1) * each)]);
            Ok(())
        })?;
        for at in 0..row {
            let sum: f32 = keys.iter().skip(at).step_by(row).sum();
            blocks.means.push(sum / each as f32);
        }
        blocks.count += 1;
        let keys = contiguous(&keys, shape.key_heads, shape.key_dim)?;
        let mut all = self.policies.all.iter_mut();
        all.try_for_each(|active| active.policy.seal(layer, id, id * each, &keys))
    }

    /// The blocks loaded for queries, if a policy restricts them.
    fn select(
        &mut self,
        layer_queries: &LayerQueries<'_>,
        context: &Context,
    ) -> Result<Option<(Vec<u32>, u32)>> {
        let cap = if context.is_prefill { caps::LOAD_PREFILL } else { caps::LOAD_DECODE };
        let Some(at) = self.policies.all.iter().position(|active| {
            active.used_caps & cap != 0 && active.traits.requires_block_selection
        }) else {
            return Ok(None);
        };
        let each = self.shape.block_tokens;
        let blocks = &self.blocks[layer_queries.layer as usize];
        // Blocks of the part itself are present anyway.
        let count = blocks.count.min(context.first_query / each);
        let candidates: Vec<u32> = (0..count).collect();
        self.score(at, layer_queries, &candidates)?;
        let traits = self.policies.all[at].traits;
        let queries = self.queries(&traits, layer_queries, traits.ahead);
        let (heads, dim) = traits.query_rows(&self.shape);
        let rows = match &queries {
            Some(rows) => Some(contiguous(rows, heads, dim)?),
            None => None,
        };
        let policy = &mut self.policies.all[at].policy;
        let mut chosen = Vec::new();
        policy.select(layer_queries.layer, rows.as_ref(), &candidates, context, &mut chosen)?;
        assert!(chosen.is_sorted_by(|a, b| a < b), "not ascending, or twice");
        assert!(chosen.iter().all(|id| *id < count), "not among the candidates");
        Ok(Some((chosen, count * each)))
    }

    /// The queries passed to a policy: of this layer, or of an earlier one while decoding. The
    /// model has no indexer. Its keys side by side serve as keys of an indexer that scores tokens
    /// by the positive products of all heads.
    fn queries(
        &self,
        traits: &Traits,
        layer_queries: &LayerQueries<'_>,
        ahead: u32,
    ) -> Option<Vec<f32>> {
        let queries = match ahead {
            0 => layer_queries.queries,
            n => self.earlier.get(n as usize - 1)?,
        };
        if traits.rows.is_none() {
            return Some(queries.to_vec());
        }
        let (dim, group) = (self.shape.key_dim as usize, self.shape.group() as usize);
        let (heads, row) = (self.shape.query_heads as usize, traits.query_rows(&self.shape).1);
        let mut rows = vec![0.0; queries.len() / dim * row as usize];
        let to = rows.chunks_exact_mut(row as usize);
        for (at, (to, q)) in to.zip(queries.chunks_exact(dim)).enumerate() {
            to[at % heads / group * dim..][..dim].copy_from_slice(q);
        }
        Some(rows)
    }

    /// Passes the scores that a policy needs: indexer weights, or the products of blocks' mean keys
    /// with the last query.
    fn score(
        &mut self,
        at: usize,
        layer_queries: &LayerQueries<'_>,
        candidates: &[u32],
    ) -> Result<()> {
        let (shape, active) = (&self.shape, &mut self.policies.all[at]);
        let count = active.traits.scores(shape, layer_queries.tokens() as u32, candidates.len());
        if active.traits.needs & needs::WEIGHTS != 0 {
            return active.policy.score(layer_queries.layer, &vec![1.0; count]);
        }
        if active.traits.needs & needs::SCORES == 0 {
            return Ok(());
        }
        let (dim, group) = (shape.key_dim as usize, shape.group() as usize);
        let row = shape.key_heads as usize * dim;
        let means = &self.blocks[layer_queries.layer as usize].means;
        let heads =
            layer_queries.queries.chunks_exact(dim).rev().take(self.shape.query_heads as usize);
        let heads: Vec<&[f32]> = heads.collect();
        let score = |id: &u32| {
            let mean = &means[*id as usize * row..][..row];
            let of = |(head, q): (usize, &&[f32])| {
                let head = heads.len() - 1 - head;
                let key = &mean[head / group * dim..][..dim];
                q.iter().zip(key).map(|(a, b)| a * b).sum::<f32>()
            };
            heads.iter().enumerate().map(of).fold(f32::NEG_INFINITY, f32::max)
        };
        let scores: Vec<f32> = candidates.iter().map(score).collect();
        active.policy.score(layer_queries.layer, &scores)
    }

    /// The keys that a policy allows for queries.
    fn index(&mut self, layer_queries: &LayerQueries<'_>, context: &Context) -> Result<Index> {
        let cap = if context.is_prefill { caps::INDEX_PREFILL } else { caps::INDEX_DECODE };
        let Some(at) = self.policies.all.iter().position(|active| active.used_caps & cap != 0)
        else {
            return Ok(Index::default());
        };
        self.score(at, layer_queries, &[])?;
        let shape = self.shape;
        let traits = self.policies.all[at].traits;
        let queries = self.queries(&traits, layer_queries, 0).unwrap_or_default();
        let (heads, dim) = traits.query_rows(&shape);
        let queries = contiguous(&queries, heads, dim)?;
        let (active, mut index) = (&mut self.policies.all[at], Index::default());
        if traits.needs & needs::ALL_KEYS == 0 {
            return active.index(layer_queries.layer, &queries, None, context);
        }
        whole(&mut self.cache, layer_queries.layer, &shape, &mut |lent| {
            index = active.index(layer_queries.layer, &queries, Some(&lent.keys), context)?;
            Ok(())
        })?;
        Ok(index)
    }

    /// Counts the keys used by some of a prompt's queries.
    fn count(&mut self, index: &Index, context: &Context) {
        let queries = (context.first_query..context.tokens).step_by(COUNTED);
        for (query, head) in
            queries.flat_map(|at| (0..self.shape.query_heads).map(move |h| (at, h)))
        {
            let all = query + 1;
            let seen = match index.is_dense() {
                true => all as usize,
                false => {
                    let is_seen = |key: &u32| index.sees(head, context.first_query, query, *key);
                    (0..all).filter(is_seen).count()
                }
            };
            self.paired.0 += seen as u64;
            self.paired.1 += u64::from(all);
        }
    }

    fn prefill(&mut self, layer_queries: &LayerQueries<'_>, context: &Context) -> Result<Output> {
        let chosen = self.select(layer_queries, context)?;
        let selection = chosen.as_ref().map(|(blocks, from)| KeySelection { blocks, from: *from });
        let index = self.index(layer_queries, context)?;
        self.count(&index, context);
        let output = match index.is_dense() {
            true => layer_queries.dense(&mut self.cache, selection)?,
            false if selection.is_none() => layer_queries.indexed(&mut self.cache, &index)?,
            false => {
                return Err(unsupported(
                    "block selection and an index in one prompt are not supported",
                ));
            }
        };
        for queries in self.policies.sum_queries(true) {
            if selection.is_some() {
                return Err(unsupported("sums of attention weights need all blocks of the prompt"));
            }
            let last = queries.min(layer_queries.tokens() as u32);
            let sums = layer_queries.sums(&mut self.cache, &output, last as usize, &index)?;
            self.observe(layer_queries.layer, (true, queries), last, &sums)?;
        }
        Ok(output)
    }

    /// Passes sums of attention weights to the policies that need them for this number of queries.
    fn observe(
        &mut self,
        layer: u32,
        (is_prefill, of): (bool, u32),
        queries: u32,
        sums: &[f32],
    ) -> Result<()> {
        let tokens = sums.len() as u32 / self.shape.query_heads;
        let all = self.policies.all.iter_mut();
        for active in all.filter(|active| active.sum_queries(is_prefill) == of) {
            active.policy.observe(layer, queries, sums, tokens)?;
        }
        Ok(())
    }

    fn decode(&mut self, layer_queries: &LayerQueries<'_>, context: &Context) -> Result<Output> {
        let chosen = self.select(layer_queries, context)?;
        let selection = chosen.as_ref().map(|(blocks, from)| KeySelection { blocks, from: *from });
        let index = self.index(layer_queries, context)?;
        let mut sums = Vec::new();
        let sum_queries = self.policies.sum_queries(false);
        let output = layer_queries.next(
            &mut self.cache,
            selection,
            &index,
            (!sum_queries.is_empty()).then_some(&mut sums),
        )?;
        self.read += match &selection {
            Some(of) => {
                let tail = self.tokens - of.from;
                u64::from(of.blocks.len() as u32 * self.shape.block_tokens + tail)
            }
            None => self.tokens.into(),
        };
        self.looked += output.looked as u64;
        self.before += u64::from(self.tokens);
        for of in sum_queries {
            self.observe(layer_queries.layer, (false, of), 1, &sums)?;
        }
        Ok(output)
    }

    fn evict(&mut self, layer: u32, context: &Context) -> Result<()> {
        match self.policies.evict(layer, context)? {
            Some(retained) => self.retain(layer, &retained),
            None => Ok(()),
        }
    }

    /// Evicts all tokens of a layer except these.
    pub fn retain(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.blocks[layer as usize].is_evicted = true;
        self.cache.evict(layer, retained)
    }
}
