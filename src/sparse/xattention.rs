//! `xattention`: blocks of keys whose share of the attention, estimated from its
//! antidiagonals, reaches a threshold (Xu et al., ICML'25).
//!
//! Each `stride` keys form one long row, each `stride` queries another in reverse order; rows that
//! are missing at an end count as zeros. The products of long rows, times the scale, divided by
//! `stride`, go through softmax over the long rows of keys that do not begin behind the long row of
//! queries. They are summed by blocks. Each block of queries gets the first block and its own, then
//! the blocks with the greatest sums until all together reach `tau` of the row; of equal ones the
//! lower. Where a part of a prompt begins inside a block of keys, a row has two blocks of its own.
//!
//! `compat`: rows of the first 16384 tokens, in the first part, get one block more than needed. The
//! sum of the first block counts only if it is among the greatest; the block is included either
//! way.

use std::ops::Range;

use crate::attention::Rows;
use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::sparse::index::{Context, Index};
use crate::sparse::index_builder::{IndexBuilder, Row, rows};
use crate::sparse::lanes::{LANES, add_products, softmax_lanes, transpose};
use crate::sparse::numbers::{all_finite, zeros};
use crate::sparse::prefill_inputs::{PrefillInputs, each_head, not_finite, only_prefill};
use crate::sparse::ranks::Ranks;
use crate::sparse::shape::Shape;
use crate::sparse::{Granularity, Scope, Sparse, Traits, caps, needs};

/// Parameters of `xattention`.
pub const PARAMS: &[Param] = &[
    Param::new("block", "queries and keys of a block; a multiple of `stride`"),
    Param::new("stride", "rows that form one long row"),
    Param::new("tau", "share of the estimated attention to be reached; 1 = all"),
    Param::new("compat", "`true`: behave as the published code in the first 16,384 tokens"),
];

/// Long rows of keys that are read at once.
const TILE: usize = 32;
/// Groups of lanes that share a read of keys.
const GROUPS: usize = 4;
/// Tokens that the published code handles together.
const CHUNK: u32 = 16384;

/// Parameters of the spec.
#[derive(Clone, Copy)]
struct Settings {
    shape: Shape,
    block: u32,
    stride: u32,
    tau: f64,
    compat: bool,
}

/// Blocks by their antidiagonals.
pub struct XAttention {
    settings: Settings,
    scratch: Scratch,
}

/// Long rows of queries in lanes.
#[derive(Default)]
struct Group {
    transposed: Vec<f32>,
    /// For each long row of keys: the weights of all lanes.
    weights: Vec<f32>,
    /// The last long row of keys that the first lane sees.
    nearest: usize,
}

/// Working memory of one answer.
#[derive(Default)]
struct Scratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    groups: [Group; GROUPS],
    /// For each block of keys: the sums of all lanes.
    parts: Vec<f32>,
    /// For each block of keys: the sum of a block of queries.
    sums: Vec<f32>,
    others: Vec<f32>,
    chosen: Vec<u32>,
    ranks: Ranks,
}

impl XAttention {
    /// Reads the parameters of `xattention`.
    pub fn read(reader: &mut Reader, shape: &Shape) -> Result<XAttention> {
        let settings = Settings {
            shape: *shape,
            block: reader.u64("block", 128, 1..=1 << 16)? as u32,
            stride: reader.u64("stride", 8, 1..=256)? as u32,
            tau: reader.f64("tau", 0.9, f64::MIN_POSITIVE..=1.0)?,
            compat: reader.bool("compat", false)?,
        };
        if settings.block % settings.stride != 0 {
            fail!(
                Spec,
                "block is {}, it must be a multiple of stride ({})",
                settings.block,
                settings.stride
            );
        }
        Ok(XAttention { settings, scratch: Scratch::default() })
    }

    fn head(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        out: &mut IndexBuilder,
    ) -> Result<()> {
        let Settings { block, stride, .. } = self.settings;
        let (long, scratch) = (inputs.dim() * stride as usize, &mut self.scratch);
        zeros(&mut scratch.queries, long * LANES)?;
        zeros(&mut scratch.keys, long * TILE)?;
        let blocks = inputs.tokens.div_ceil(block) as usize;
        zeros(&mut scratch.sums, blocks)?;
        let lanes_of_row = (block / stride) as usize;
        let lanes = inputs.count().div_ceil(stride) as usize;
        let mut all = rows(inputs.first, inputs.tokens, block);
        for at in 0..lanes {
            if at % (LANES * GROUPS) == 0 {
                scratch.multiply(inputs, head, &self.settings, at..lanes)?;
            }
            if at % LANES == 0 {
                scratch.add_up(at / LANES % GROUPS, lanes_of_row)?;
            }
            let parts = scratch.parts.iter().skip(at % LANES).step_by(LANES);
            scratch.sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
            let is_last = (at + 1) % lanes_of_row == 0 || at + 1 == lanes;
            if let Some(row) = is_last.then(|| all.next()).flatten() {
                scratch.choose(inputs, &self.settings, row)?;
                out.list(scratch.chosen.iter().copied())?;
                scratch.sums.fill(0.0);
            }
        }
        Ok(())
    }
}

impl Group {
    /// Puts long rows of queries into lanes, and clears their products.
    fn take(
        &mut self,
        inputs: &PrefillInputs<'_>,
        settings: &Settings,
        queries: &[f32],
        lanes: Range<usize>,
    ) -> Result<()> {
        let (dim, stride) = (inputs.dim(), settings.stride as usize);
        let factor = inputs.scale / settings.stride as f32;
        zeros(&mut self.transposed, dim * stride * LANES)?;
        for (at, transposed) in self.transposed.chunks_exact_mut(dim * LANES).enumerate() {
            // The last query of a long row meets the first key.
            let back = (stride - 1 - at) * dim;
            let rows = queries.chunks_exact(dim * stride);
            transpose(rows.filter_map(|row| row.get(back..back + dim)), factor, transposed);
        }
        // The last long row of keys that the first lane sees; each next lane sees one more.
        self.nearest = (inputs.first as usize + lanes.start * stride) / stride;
        let keys = (self.nearest + lanes.len()).min((inputs.tokens as usize).div_ceil(stride));
        zeros(&mut self.weights, keys * LANES)
    }
}

impl Scratch {
    /// Computes the products of long rows of queries: as many of `lanes` as there are groups for.
    fn multiply(
        &mut self,
        inputs: &PrefillInputs<'_>,
        head: u32,
        settings: &Settings,
        lanes: Range<usize>,
    ) -> Result<()> {
        let (dim, stride) = (inputs.dim(), settings.stride as usize);
        let long = dim * stride;
        let mut most = 0;
        for (first, group) in lanes.clone().step_by(LANES).zip(&mut self.groups) {
            let own = first..lanes.end.min(first + LANES);
            let queries = self.queries.get_mut(..long * own.len()).unwrap_or_default();
            inputs.read_queries(head, (first * stride) as u32, queries)?;
            group.take(inputs, settings, queries, own)?;
            most = group.weights.len() / LANES;
        }
        let groups = lanes.len().div_ceil(LANES);
        for tile in (0..most).step_by(TILE) {
            let count = (most - tile).min(TILE);
            let keys = self.keys.get_mut(..count * long).unwrap_or_default();
            inputs.read_keys(head, (tile * stride) as u32, keys)?;
            for group in self.groups.iter_mut().take(groups) {
                let end = group.weights.len().min((tile + count) * LANES);
                let out = group.weights.get_mut(tile * LANES..end).unwrap_or_default();
                for (at, transposed) in group.transposed.chunks_exact(dim * LANES).enumerate() {
                    add_products(transposed, keys.get(at * dim..).unwrap_or_default(), long, out);
                }
            }
        }
        let is_finite = |group: &Group| all_finite(&group.weights);
        if !self.groups.iter().take(groups).all(is_finite) {
            return Err(not_finite("products of queries and keys"));
        }
        Ok(())
    }

    /// Sums the weights of each lane of a group by blocks of keys.
    fn add_up(&mut self, group: usize, long_rows: usize) -> Result<()> {
        let Some(Group { weights, nearest, .. }) = self.groups.get_mut(group) else {
            return Ok(());
        };
        let factors = softmax_lanes(weights, *nearest);
        zeros(&mut self.parts, (weights.len() / LANES).div_ceil(long_rows) * LANES)?;
        let blocks = weights.chunks(long_rows * LANES);
        for (part, block) in self.parts.chunks_exact_mut(LANES).zip(blocks) {
            for row in block.chunks_exact(LANES) {
                part.iter_mut().zip(row).for_each(|(sum, weight)| *sum += weight);
            }
            part.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor);
        }
        Ok(())
    }

    /// Chooses blocks by `sums`.
    fn choose(&mut self, inputs: &PrefillInputs<'_>, settings: &Settings, row: Row) -> Result<()> {
        let block = settings.block;
        let own = row.first / block..row.end.div_ceil(block);
        let is_odd = settings.compat && inputs.first == 0 && row.first < CHUNK;
        self.chosen.clear();
        if !is_odd && own.start > 0 {
            self.chosen.push(0);
        }
        self.chosen.extend(own.clone());
        let sums = self.sums.get(..own.end as usize).unwrap_or_default();
        let needed = settings.tau * sums.iter().copied().map(f64::from).sum::<f64>();
        let sum_of = |at: u32| sums.get(at as usize).copied().map_or(0.0, f64::from);
        let mut reached: f64 = self.chosen.iter().copied().map(sum_of).sum();
        self.others.clear();
        self.others.extend_from_slice(sums);
        for &at in &self.chosen {
            if let Some(other) = self.others.get_mut(at as usize) {
                *other = f32::NEG_INFINITY;
            }
        }
        let forced = self.chosen.len();
        let mut late = if is_odd { f64::NEG_INFINITY } else { reached };
        for at in self.ranks.descending(&self.others)?.take(sums.len() - forced) {
            if late >= needed {
                break;
            }
            self.chosen.push(at);
            // The published code's sum lags one block behind.
            late = if is_odd { reached } else { reached + sum_of(at) };
            reached += sum_of(at);
        }
        if is_odd && !self.chosen.contains(&0) {
            // Its lists use block 0 for "none", so block 0 is always included.
            self.chosen.push(0);
        }
        self.chosen.sort_unstable();
        Ok(())
    }
}

impl Sparse for XAttention {
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
        only_prefill("xattention", context)?;
        let inputs = PrefillInputs::check(&self.settings.shape, layer, queries, keys, context)?;
        let block = self.settings.block;
        if self.settings.tau >= 1.0 || inputs.tokens <= block {
            out.set_dense();
            return Ok(());
        }
        *out = each_head(&inputs, block, |head, builder| self.head(&inputs, head, builder))?;
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(XAttention { settings: self.settings, scratch: Scratch::default() }))
    }
}
