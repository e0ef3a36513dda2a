//! `snapkv`: retains the tokens with the most attention of the last queries of the prompt (Li et
//! al., NeurIPS'24). `pyramidkv` and `adakv` share this code.
//!
//! | parameter | default | meaning |
//! |---|---|---|
//! | `budget` | 1024 | tokens retained in each list of a layer, the window included |
//! | `ratio` | none | replaces `budget`: the share of tokens to evict |
//! | `window` | 64 | number of last queries whose attention is used; their own tokens are always retained |
//! | `kernel` | 5 | odd number of tokens over which attention is pooled, padded with zeros at both ends |
//! | `pool` | avg | `avg`: the mean, `max`: the maximum |
//! | `form` | kvpress | `kvpress`: one list of retained tokens for each KV head, by the attention of its whole group. `original`: one list for each query head, for engines that store repeated keys |
//!
//! The policy needs, for each key, the sum of the attention of the last `window` queries of the
//! prompt (of all queries, if there are fewer). Sums passed again replace earlier ones. The policy
//! evicts once, after the prompt, or after the last part of a prompt that is processed in parts.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::eviction::{TokenBudget, conflict};
use crate::sparse::numbers::{grow, reserve};
use crate::sparse::ranks::Ranks;
use crate::sparse::token_scores::{TokenScores, sum_rows};
use crate::sparse::{Context, Kind, RetainedTokens, Scope, Shape, Sparse, Traits, caps, needs};

/// Published variants of the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As in kvpress: one list for each KV head.
    Kvpress,
    /// As in the authors' code: one list for each query head.
    Original,
}

/// How many tokens are retained in a layer.
#[derive(Clone, Copy, Debug)]
pub enum Budget {
    /// The same number in each layer.
    Flat,
    /// Fewer in deeper layers; the parameter is the steepness.
    Pyramid(u32),
    /// The same number in each layer, shared by its heads; the parameter is the fraction of the
    /// budget that each head is guaranteed.
    Ada(f64),
}

/// State of the policy.
#[derive(Clone, Debug)]
pub struct Snapkv {
    shape: Shape,
    kept: TokenScores,
    cap: TokenBudget,
    budget: Budget,
    form: Form,
    window: usize,
    kernel: usize,
    is_max: bool,
    /// For each layer: whether sums of attention were passed since its last eviction.
    observed: Vec<bool>,
    ranks: Ranks,
}

/// Pools sums of attention over `kernel` neighbouring tokens: the mean or the maximum.
fn pool(sums: &[f32], kernel: usize, is_max: bool, out: &mut [f32]) {
    let half = kernel / 2;
    for (at, score) in out.iter_mut().enumerate() {
        let neighbours = sums.iter().take(at + half + 1).skip(at.saturating_sub(half));
        *score = match is_max {
            true => neighbours.fold(0.0, |most, &sum| if sum > most { sum } else { most }),
            false => neighbours.sum::<f32>() / kernel as f32,
        };
    }
}

impl Snapkv {
    /// Reads the parameters of `snapkv`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<Snapkv> {
        Snapkv::with(reader, shape, Budget::Flat)
    }

    /// Reads the common parameters, with a rule for the budget.
    pub fn with(reader: &mut Reader, shape: &Shape, budget: Budget) -> Result<Snapkv> {
        shape.check()?;
        let form = match reader.choice("form", &["kvpress", "original"])? {
            Some(1) => Form::Original,
            _ => Form::Kvpress,
        };
        if form == Form::Original && shape.kind == Kind::Latent {
            return Err(conflict(
                "latent rows serve all heads: form=original is impossible, use kvpress",
            ));
        }
        let lists = if form == Form::Original { shape.query_heads } else { shape.key_heads };
        let cap = TokenBudget::read(reader, 1024)?;
        let window = reader.u64("window", 64, 1..=1 << 20)? as usize;
        let kernel = reader.u64("kernel", 5, 1..=1023)? as usize;
        if kernel % 2 == 0 {
            return Err(conflict(format!("kernel is {kernel}: it must be odd")));
        }
        if matches!(cap, TokenBudget::Tokens(tokens) if tokens as usize <= window) {
            return Err(conflict(format!("the budget must be larger than the window of {window}")));
        }
        let mut observed = Vec::new();
        grow(&mut observed, shape.layers as usize, false)?;
        Ok(Snapkv {
            shape: *shape,
            kept: TokenScores::new(shape.layers, lists, shape.max_tokens)?,
            cap,
            budget,
            form,
            window,
            kernel,
            is_max: reader.choice("pool", &["avg", "max"])? == Some(1),
            observed,
            ranks: Ranks::default(),
        })
    }

    /// How many of `tokens` tokens are retained in each list of a layer; with a shared budget, on
    /// average.
    pub fn count(&self, layer: u32, tokens: usize) -> usize {
        let count = match self.budget {
            Budget::Pyramid(beta) => {
                let pyramid = crate::sparse::pyramidkv::PyramidBudget {
                    form: self.form,
                    cap: self.cap,
                    window: self.window,
                    beta,
                    layers: self.shape.layers,
                };
                pyramid.count(layer, tokens)
            }
            _ => self.cap.of(tokens),
        };
        count.clamp(self.window.min(tokens), tokens)
    }

    /// Chooses the retained tokens if heads share their budget: each head retains its best tokens,
    /// up to the fraction `safe` of its budget; among the other tokens of all heads, those with the
    /// lowest scores are evicted.
    fn share(&mut self, layer: u32, safe: f64, out: &mut RetainedTokens) -> Result<bool> {
        let lists = &self.kept.layer(layer)?.lists;
        let tokens = lists.first().map_or(0, |list| list.positions.len());
        let retained = self.count(layer, tokens);
        if retained >= tokens || lists.iter().any(|list| list.positions.len() != tokens) {
            return Ok(false);
        }
        let guaranteed = (retained as f64 * safe) as usize;
        let (mut scores, mut best) = (Vec::new(), Vec::new());
        reserve(&mut scores, tokens * lists.len())?;
        for list in lists {
            let from = scores.len();
            scores.extend_from_slice(&list.scores);
            best.clear();
            self.ranks.top(&list.scores, guaranteed, &mut best)?;
            for &at in &best {
                if let Some(score) = scores.get_mut(from + at as usize) {
                    *score = f32::INFINITY;
                }
            }
        }
        let mut victims = Vec::new();
        self.ranks.bottom(&scores, lists.len() * (tokens - retained), &mut victims)?;
        out.begin(lists.len(), lists.len() * tokens)?;
        let mut from = 0;
        for (head, list) in lists.iter().enumerate() {
            let to = victims.partition_point(|&at| (at as usize) < (head + 1) * tokens);
            let own = victims.get_mut(from..to).unwrap_or_default();
            own.iter_mut().for_each(|at| *at -= (head * tokens) as u32);
            out.push_without(&list.positions, own)?;
            from = to;
        }
        Ok(true)
    }
}

impl Sparse for Snapkv {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::EVICT_PREFILL,
            needs: needs::COLUMN_SUMS,
            scope: if self.form == Form::Original { Scope::QueryHead } else { Scope::KeyHead },
            is_ragged: matches!(self.budget, Budget::Ada(_)),
            sum_queries: self.window as u32,
            ..Traits::NONE
        }
    }

    fn state_bytes(&self) -> u64 {
        self.kept.bytes() + self.observed.capacity() as u64
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        if queries == 0 || queries as usize > self.window {
            let most = self.window;
            fail!(Invalid, "sums of {queries} queries: snapkv needs those of the last 1 to {most}");
        }
        let rows = sum_rows(&self.shape, sums, tokens, self.shape.key_heads == 1)?;
        let end = (tokens as usize).saturating_sub(self.window);
        let mut pooled = Vec::new();
        grow(&mut pooled, end, 0.0)?;
        self.kept.add_sums(layer, (rows, tokens), sums, true)?;
        let (kernel, is_max) = (self.kernel, self.is_max);
        for list in self.kept.lists(layer) {
            let (old, window) = list.scores.split_at_mut(end);
            pool(old, kernel, is_max, &mut pooled);
            old.copy_from_slice(&pooled);
            window.fill(f32::INFINITY);
        }
        if let Some(observed) = self.observed.get_mut(layer as usize) {
            *observed = true;
        }
        Ok(())
    }

    fn evict(&mut self, layer: u32, context: &Context, out: &mut RetainedTokens) -> Result<bool> {
        if !context.is_prefill || context.part.saturating_add(1) < context.parts {
            return Ok(false);
        }
        let tokens = self.kept.layer(layer)?;
        let resident = tokens.lists.first().map_or(0, |list| list.positions.len());
        let next = tokens.next;
        let has_evicted = tokens.lists.iter().any(|list| list.positions.len() < next as usize);
        let observed = self.observed.get(layer as usize).is_some_and(|observed| *observed);
        if next < context.tokens || !observed {
            let more = context.tokens.saturating_sub(next) as usize;
            let all = resident + more;
            if (has_evicted && more == 0) || self.count(layer, all) >= all {
                return Ok(false);
            }
            fail!(
                State,
                "layer {layer} has no sums of the last queries: call observe before evict"
            );
        }
        if let Budget::Ada(safe) = self.budget {
            return self.share(layer, safe, out);
        }
        let retained = self.count(layer, resident);
        self.kept.plan(layer, (0, self.window), |count, _| count.saturating_sub(retained), out)
    }

    fn evicted(&mut self, layer: u32, kept: &RetainedTokens) -> Result<()> {
        self.kept.evicted(layer, kept)?;
        if let Some(observed) = self.observed.get_mut(layer as usize) {
            *observed = false;
        }
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        for (layer, observed) in (0..).zip(self.observed.iter_mut()) {
            *observed &= self.kept.layer(layer)?.next <= tokens;
        }
        self.kept.truncate(tokens);
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
