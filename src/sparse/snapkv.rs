//! `snapkv`: retains the tokens with the most attention of the last queries of the prompt (Li et
//! al., NeurIPS'24). `pyramidkv` and `adakv` share this code.
//!
//! The policy needs the attention of the last `window` queries of the prompt to each key (of all
//! queries, if there are fewer). The last sums before the eviction count. It evicts once, after the
//! prompt; if the prompt comes in parts, after the last part.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::eviction::{TokenBudget, conflict};
use crate::sparse::numbers::{grow, reserve};
use crate::sparse::ranks::Ranks;
use crate::sparse::token_scores::{TokenScores, sum_rows};
use crate::sparse::{Context, Kind, RetainedTokens, Scope, Shape, Sparse, Traits, caps, needs};

/// Parameters of `snapkv`.
pub const PARAMS: &[Param] = &[
    Param::new("budget", "tokens that stay, for each list, the window included"),
    Param::new("ratio", "instead of `budget`: the share of the tokens that is evicted")
        .default_is("none"),
    Param::new("window", "number of last queries that count; their tokens stay"),
    Param::new(
        "kernel",
        "attention is pooled over this odd number of tokens; beyond the ends it is zero",
    ),
    Param::new("pool", "`avg`: pooled by the mean. `max`: by the maximum"),
    Param::new(
        "form",
        "`kvpress`: one list for each head of keys, by its whole group. `original`: one list for \
         each query head, for engines that store repeated keys",
    ),
];

/// The published forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As in kvpress: for each head of keys.
    Kvpress,
    /// As the authors': for each query head.
    Original,
}

/// Number of tokens to retain in a layer.
#[derive(Clone, Copy, Debug)]
pub enum Budget {
    /// The same in each layer.
    Flat,
    /// Fewer in deeper layers; the parameter is the steepness.
    Pyramid(u32),
    /// The same in each layer, shared by its heads; the parameter is the guaranteed share of a
    /// head.
    Ada(f64),
}

/// Attention of the last queries.
#[derive(Clone, Debug)]
pub struct Snapkv {
    shape: Shape,
    retained: TokenScores,
    cap: TokenBudget,
    budget: Budget,
    form: Form,
    window: usize,
    kernel: usize,
    is_max: bool,
    /// For each layer: whether it received sums of attention since its last eviction.
    observed: Vec<bool>,
    ranks: Ranks,
}

/// Pools sums of attention over `kernel` neighbours: their mean or their maximum.
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
            return Err(conflict(format!("a kernel of {kernel} tokens has no middle")));
        }
        if matches!(cap, TokenBudget::Tokens(tokens) if tokens as usize <= window) {
            return Err(conflict(format!("the budget is no more than the window of {window}")));
        }
        let mut observed = Vec::new();
        grow(&mut observed, shape.layers as usize, false)?;
        Ok(Snapkv {
            shape: *shape,
            retained: TokenScores::new(shape.layers, lists, shape.max_tokens)?,
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

    /// Number of `tokens` tokens to retain in each list of a layer, or on average.
    pub fn count(&self, layer: u32, tokens: usize) -> usize {
        let count = match self.budget {
            Budget::Pyramid(beta) => {
                let of = crate::sparse::pyramidkv::PyramidBudget {
                    form: self.form,
                    cap: self.cap,
                    window: self.window,
                    beta,
                    layers: self.shape.layers,
                };
                of.count(layer, tokens)
            }
            _ => self.cap.of(tokens),
        };
        count.clamp(self.window.min(tokens), tokens)
    }

    /// Chooses the tokens that stay if heads share their budget: each keeps its best `safe` share;
    /// of the others, the lowest of all heads are evicted.
    fn share(&mut self, layer: u32, safe: f64, out: &mut RetainedTokens) -> Result<bool> {
        let lists = &self.retained.layer(layer)?.lists;
        let tokens = lists.first().map_or(0, |list| list.positions.len());
        let stay = self.count(layer, tokens);
        if stay >= tokens || lists.iter().any(|list| list.positions.len() != tokens) {
            return Ok(false);
        }
        let sure = (stay as f64 * safe) as usize;
        let (mut scores, mut best) = (Vec::new(), Vec::new());
        reserve(&mut scores, tokens * lists.len())?;
        for list in lists {
            let from = scores.len();
            scores.extend_from_slice(&list.scores);
            best.clear();
            self.ranks.top(&list.scores, sure, &mut best)?;
            for &at in &best {
                if let Some(score) = scores.get_mut(from + at as usize) {
                    *score = f32::INFINITY;
                }
            }
        }
        let mut leaving = Vec::new();
        self.ranks.bottom(&scores, lists.len() * (tokens - stay), &mut leaving)?;
        out.begin(lists.len(), lists.len() * tokens)?;
        let mut from = 0;
        for (head, list) in lists.iter().enumerate() {
            let to = leaving.partition_point(|&at| (at as usize) < (head + 1) * tokens);
            let own = leaving.get_mut(from..to).unwrap_or_default();
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
        self.retained.bytes() + self.observed.capacity() as u64
    }

    fn observe(&mut self, layer: u32, queries: u32, sums: &[f32], tokens: u32) -> Result<()> {
        if queries == 0 || queries as usize > self.window {
            let most = self.window;
            fail!(Invalid, "sums of {queries} queries, snapkv takes those of the last 1 to {most}");
        }
        let rows = sum_rows(&self.shape, sums, tokens, self.shape.key_heads == 1)?;
        let end = (tokens as usize).saturating_sub(self.window);
        let mut pooled = Vec::new();
        grow(&mut pooled, end, 0.0)?;
        self.retained.add_sums(layer, (rows, tokens), sums, true)?;
        let (kernel, is_max) = (self.kernel, self.is_max);
        for list in self.retained.lists(layer) {
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
        let of = self.retained.layer(layer)?;
        let retained_count = of.lists.first().map_or(0, |list| list.positions.len());
        let next = of.next;
        let has_evicted = of.lists.iter().any(|list| list.positions.len() < next as usize);
        let observed = self.observed.get(layer as usize).is_some_and(|observed| *observed);
        if next < context.tokens || !observed {
            let more = context.tokens.saturating_sub(next) as usize;
            let all = retained_count + more;
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
        let stay = self.count(layer, retained_count);
        self.retained.plan(layer, (0, self.window), |count, _| count.saturating_sub(stay), out)
    }

    fn evicted(&mut self, layer: u32, retained: &RetainedTokens) -> Result<()> {
        self.retained.evicted(layer, retained)?;
        if let Some(observed) = self.observed.get_mut(layer as usize) {
            *observed = false;
        }
        Ok(())
    }

    fn truncate(&mut self, tokens: u32) -> Result<()> {
        for (layer, observed) in (0..).zip(self.observed.iter_mut()) {
            *observed &= self.retained.layer(layer)?.next <= tokens;
        }
        self.retained.truncate(tokens);
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
