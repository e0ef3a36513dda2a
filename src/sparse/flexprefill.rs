//! `flexprefill`: each head chooses for each prompt how many columns and diagonals, or which
//! blocks, it needs (Lai et al., ICLR'25).
//!
//! Let A be the attention of the last `block` queries, by key and by distance, each normalized to a
//! sum of one. The mean of these queries and the mean of each block of keys, multiplied, scaled and
//! put through softmax, estimate A by blocks.
//!
//! - If the square root of the Jensen-Shannon divergence of the two (natural logarithm) is below
//!   `tau`, the head chooses blocks. The same estimate is made for all blocks of queries together.
//!   The greatest stay until they reach `gamma` times the number of rows; of equal ones the lower
//!   row, then the lower block. The fewest columns and diagonals are added.
//! - Otherwise the number of columns that cover more than `gamma` of A, divided by 128, plus one,
//!   is the number of blocks of columns. Diagonals are counted likewise (128 whatever the block is,
//!   as published). The blocks with the greatest sums stay; of equal ones the lower, or the nearer.
//!
//! The first block of columns and the nearest block of diagonals are always included.
//!
//! Diagonals form blocks from the nearest on. Prompts up to two blocks, or up to `min_budget`, are
//! computed in full. A prompt that comes in parts is estimated part by part. Where a part begins
//! inside a block of keys, a row has two diagonal blocks of its own.

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::estimate::Estimate;
use crate::sparse::index::{Context, Index};
use crate::sparse::index_builder::{IndexBuilder, Row, rows};
use crate::sparse::lanes::exp;
use crate::sparse::numbers::{all_finite, reserve, zeros};
use crate::sparse::pool::{Divisor, pool};
use crate::sparse::prefill_inputs::{PrefillInputs, each_head, not_finite, only_prefill};
use crate::sparse::ranks::Ranks;
use crate::sparse::shape::Shape;
use crate::sparse::{Granularity, Scope, Sparse, Traits, caps, needs};

/// Parameters of `flexprefill`.
pub const PARAMS: &[Param] = &[
    Param::new("block", "queries and keys of a block"),
    Param::new("gamma", "share of the attention to be covered; 1 = all"),
    Param::new("tau", "heads whose block estimate differs by less than this choose blocks"),
    Param::new("min_budget", "fewest columns and diagonals, in tokens; at least a block"),
    Param::new("max_budget", "most columns and diagonals, in tokens; 0 = no limit"),
];

/// Divisor that turns a count of columns or diagonals into a count of blocks.
const COUNT_BLOCK: usize = 128;

/// Parameters of the spec.
#[derive(Clone, Copy)]
struct Settings {
    shape: Shape,
    block: u32,
    gamma: f64,
    tau: f64,
    min_budget: u32,
    max_budget: u32,
}

/// Columns and diagonals, or blocks, as each head needs.
pub struct FlexPrefill {
    settings: Settings,
    scratch: Scratch,
}

/// Working memory of one answer.
#[derive(Default)]
struct Scratch {
    estimate: Estimate,
    queries: Vec<f32>,
    keys: Vec<f32>,
    /// Attention by blocks of columns, then by blocks of diagonals.
    columns: Vec<f32>,
    diagonals: Vec<f32>,
    /// Softmax of the means, row after row.
    map: Vec<f32>,
    marks: Vec<bool>,
    /// Chosen blocks of rows; below, those of columns and of diagonals.
    chosen: Vec<u32>,
    lines: [Vec<u32>; 2],
    ranks: Ranks,
}

impl FlexPrefill {
    /// Reads the parameters of `flexprefill`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<FlexPrefill> {
        let settings = Settings {
            shape: *shape,
            block: reader.u64("block", 128, 1..=1 << 16)? as u32,
            gamma: reader.f64("gamma", 0.9, f64::MIN_POSITIVE..=1.0)?,
            tau: reader.f64("tau", 0.1, 0.0..=1.0)?,
            min_budget: reader.u64("min_budget", 0, 0..=1 << 30)? as u32,
            max_budget: reader.u64("max_budget", 0, 0..=1 << 30)? as u32,
        };
        if settings.max_budget > 0 && settings.max_budget < settings.min_budget {
            fail!(Spec, "max_budget must be 0 or at least min_budget");
        }
        Ok(FlexPrefill { settings, scratch: Scratch::default() })
    }

    /// Whether a prompt is so short that it is computed in full.
    fn is_short(&self, tokens: u32) -> bool {
        let Settings { block, gamma, min_budget, .. } = self.settings;
        let least = min_budget.div_ceil(block).saturating_mul(block);
        gamma >= 1.0 || tokens <= least.max(2 * block)
    }

    fn head(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let Settings { block, tau, .. } = self.settings;
        let scratch = &mut self.scratch;
        scratch.estimate.run(inputs, head, block)?;
        let share = 1.0 / block.min(inputs.count()) as f32;
        let estimate = &mut scratch.estimate;
        for sums in [&mut estimate.columns, &mut estimate.diagonals] {
            sums.iter_mut().for_each(|sum| *sum *= share);
        }
        let blocks = inputs.tokens.div_ceil(block) as usize;
        zeros(&mut scratch.marks, blocks)?;
        add_up(&estimate.columns, block, &mut scratch.columns)?;
        add_up(&estimate.diagonals, block, &mut scratch.diagonals)?;
        pool(inputs.keys, inputs.key_head(head), block, Divisor::Present, &mut scratch.keys)?;
        let distance = scratch.distance(inputs, head, block)?;
        if distance < tau {
            scratch.blocks(inputs, head, &self.settings, out)
        } else {
            scratch.lines(inputs, &self.settings, out)
        }
    }
}

/// Sums of blocks.
fn add_up(numbers: &[f32], block: u32, out: &mut Vec<f32>) -> Result<()> {
    zeros(out, numbers.len().div_ceil(block as usize))?;
    for (sum, numbers) in out.iter_mut().zip(numbers.chunks(block as usize)) {
        *sum = numbers.iter().sum();
    }
    Ok(())
}

/// Puts the softmax of a query's products with the first keys into `out`, which says how many.
fn softmax(query: &[f32], keys: &[f32], scale: f32, out: &mut [f32]) -> Result<()> {
    for (weight, key) in out.iter_mut().zip(keys.chunks_exact(query.len())) {
        *weight = scale * query.iter().zip(key).map(|(a, b)| a * b).sum::<f32>();
    }
    if !all_finite(out) {
        return Err(not_finite("products of means"));
    }
    let most = out.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    out.iter_mut().for_each(|weight| *weight = exp(*weight - most));
    // The greatest weight is 1, so the sum is not zero.
    let sum: f32 = out.iter().sum();
    out.iter_mut().for_each(|weight| *weight /= sum);
    Ok(())
}

/// The square root of the Jensen-Shannon divergence.
fn distance(p: &[f32], q: &[f32]) -> f64 {
    let part = |a: f64, mean: f64| if a > 0.0 { a * (a / mean).ln() } else { 0.0 };
    let divergences = p.iter().zip(q).map(|(&p, &q)| {
        let (p, q) = (f64::from(p), f64::from(q));
        let mean = (p + q) / 2.0;
        part(p, mean) + part(q, mean)
    });
    (divergences.sum::<f64>() / 2.0).max(0.0).sqrt()
}

impl Scratch {
    /// The distance between the block estimate of the last queries and their attention.
    fn distance(&mut self, inputs: &PrefillInputs<'_>, head: u32, block: u32) -> Result<f64> {
        let dim = inputs.dim();
        let count = block.min(inputs.count());
        let mut mean = Vec::new();
        let mut row = Vec::new();
        zeros(&mut mean, dim)?;
        zeros(&mut row, dim)?;
        for query in inputs.count() - count..inputs.count() {
            inputs.read_queries(head, query, &mut row)?;
            mean.iter_mut().zip(&row).for_each(|(sum, x)| *sum += x);
        }
        mean.iter_mut().for_each(|sum| *sum /= count as f32);
        zeros(&mut self.map, self.columns.len())?;
        softmax(&mean, &self.keys, inputs.scale, &mut self.map)?;
        Ok(distance(&self.map, &self.columns))
    }

    /// Adds rows of columns and diagonals.
    fn lines(
        &mut self,
        inputs: &PrefillInputs<'_>,
        settings: &Settings,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let Settings { block, gamma, min_budget, max_budget, .. } = *settings;
        let most = if max_budget > 0 { max_budget.div_ceil(block).max(1) } else { u32::MAX };
        let least = min_budget.div_ceil(block).max(1) as usize;
        let bounded = |count: usize| (count / COUNT_BLOCK + 1).max(least).min(most as usize);
        let columns = bounded(self.ranks.cover(&self.estimate.columns, gamma)?);
        let diagonals = bounded(self.ranks.cover(&self.estimate.diagonals, gamma)?);
        self.best(columns, diagonals)?;
        for row in rows(inputs.first, inputs.tokens, block) {
            self.mark_lines(&row, block);
            self.emit(out)?;
        }
        Ok(())
    }

    /// Chooses this many blocks of columns and of diagonals; the first of each is included.
    fn best(&mut self, columns: usize, diagonals: usize) -> Result<()> {
        let all = [(&mut self.columns, columns), (&mut self.diagonals, diagonals)];
        for ((sums, count), chosen) in all.into_iter().zip(&mut self.lines) {
            sums.iter_mut().take(1).for_each(|sum| *sum = f32::INFINITY);
            chosen.clear();
            self.ranks.top(sums, count, chosen)?;
        }
        Ok(())
    }

    /// Marks the chosen columns and diagonals of a row, and clears all other marks.
    fn mark_lines(&mut self, row: &Row, block: u32) {
        let (from, to) = (row.first / block, row.end.div_ceil(block));
        let [columns, diagonals] = &self.lines;
        self.marks.fill(false);
        for &diagonal in diagonals {
            let marked = from.saturating_sub(diagonal)..to.saturating_sub(diagonal);
            let marked = marked.start as usize..marked.end as usize;
            self.marks.get_mut(marked).unwrap_or_default().fill(true);
        }
        for &column in columns.iter().take_while(|&&column| column < to) {
            mark(&mut self.marks, column);
        }
    }

    /// Adds rows of the blocks that cover most.
    fn blocks(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        settings: &Settings,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let (block, dim) = (settings.block, inputs.dim());
        pool(inputs.queries, head, block, Divisor::Present, &mut self.queries)?;
        let all = rows(inputs.first, inputs.tokens, block);
        // Row r has the blocks that begin at or before it.
        let open = |row: &Row| (row.first / block + 1) as usize;
        zeros(&mut self.map, all.clone().map(|row| open(&row)).sum())?;
        let mut rest = self.map.as_mut_slice();
        for (row, query) in all.clone().zip(self.queries.chunks_exact(dim)) {
            let (own, behind) = rest.split_at_mut(open(&row).min(rest.len()));
            softmax(query, &self.keys, inputs.scale, own)?;
            rest = behind;
        }
        let needed = settings.gamma * all.clone().count() as f64;
        self.chosen.clear();
        reserve(&mut self.chosen, self.map.len())?;
        self.chosen.extend(self.ranks.reach(&self.map, needed)?);
        self.chosen.sort_unstable();
        let least = settings.min_budget.div_ceil(block).max(1) as usize;
        self.best(least, least)?;
        let (mut next, mut begin) = (0, 0);
        for row in all {
            let end = begin + open(&row) as u32;
            self.mark_lines(&row, block);
            while let Some(&at) = self.chosen.get(next).filter(|&&at| at < end) {
                mark(&mut self.marks, at - begin);
                next += 1;
            }
            self.emit(out)?;
            begin = end;
        }
        Ok(())
    }

    /// Adds a row of the marked blocks.
    fn emit(&self, out: &mut IndexBuilder) -> Result<()> {
        let marked = (0..).zip(&self.marks).filter(|(_, mark)| **mark);
        out.list(marked.map(|(block, _)| block))
    }
}

fn mark(marks: &mut [bool], block: u32) {
    if let Some(mark) = marks.get_mut(block as usize) {
        *mark = true;
    }
}

impl Sparse for FlexPrefill {
    fn traits(&self) -> Traits {
        Traits {
            caps: caps::INDEX_PREFILL,
            needs: needs::QUERIES | needs::ALL_KEYS,
            scope: Scope::QueryHead,
            granularity: Granularity::Block,
            ..Traits::NONE
        }
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        only_prefill("flexprefill", context)?;
        let inputs = PrefillInputs::check(&self.settings.shape, layer, queries, keys, context)?;
        if self.is_short(inputs.tokens) {
            out.set_dense();
            return Ok(());
        }
        let block = self.settings.block;
        *out = each_head(&inputs, block, |head, builder| self.head(&inputs, head, builder))?;
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(FlexPrefill { settings: self.settings, scratch: Scratch::default() }))
    }
}
