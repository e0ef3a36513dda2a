//! Audits of selections: a selection is compared with the attention of the layer's own queries.
//!
//! An audit loads the keys of all candidate blocks. It computes the attention of the layer's
//! queries (the last 16) to these keys and to the tail, with the causal mask and without evicted
//! tokens. The share of a block is the attention to its tokens, over all heads and queries.
//! *Wanted* blocks are as many as were chosen, those with the largest shares (among equal ones,
//! those with lower numbers). *Found* are the wanted blocks that were chosen. The audit also sums
//! the shares of the chosen blocks, relative to all blocks.
//!
//! An audit costs more than the selection saved. It does not change what is loaded.

use crate::attention::Rows;
use crate::base::status::{Result, Status};
use crate::device::Memory;
use crate::fail;
use crate::offload::copies::{address_of, row_copy};
use crate::offload::evict::{Retained, TokensLeft};
use crate::offload::memory::OwnedMemory;
use crate::offload::views::rows_of;
use crate::offload::{Offload, end};
use crate::sparse::Shape;
use crate::sparse::numbers::{grow, read};
use crate::sparse::pages::product;

/// Most queries of an audit.
const MOST_QUERIES: u32 = 16;
/// Scale of shares in the counters.
const MILLION: f64 = 1e6;

/// State of audits, and memory for keys.
pub(super) struct Audit {
    every: u32,
    /// Selections so far that left out blocks.
    cuts: u64,
    memory: OwnedMemory,
}

/// A selection to audit.
pub(super) struct Selection<'a> {
    pub layer: u32,
    /// Candidate blocks and chosen blocks, ascending.
    pub candidates: &'a [u32],
    pub chosen: &'a [u32],
    /// The tail is loaded, too.
    pub has_tail: bool,
    pub first_query: u32,
}

impl Offload {
    /// Audits one of `every` selections that leave out blocks; 0 = none. The store's account is
    /// charged for memory of the size of a buffer.
    pub fn audit(&mut self, every: u32) -> Result<()> {
        self.audit = match every {
            0 => None,
            _ => {
                let bytes = self.geometry.planes_bytes(self.geometry.buffer_tokens);
                Some(Audit { every, cuts: 0, memory: OwnedMemory::map(&self.store, bytes)? })
            }
        };
        Ok(())
    }

    /// The interval of audits; 0 = none.
    pub fn audit_interval(&self) -> u32 {
        self.audit.as_ref().map_or(0, |audit| audit.every)
    }

    /// Audits a selection if it is due. Errors are noted and do not fail the load.
    pub(super) fn audit_selection(&mut self, selection: &Selection<'_>, queries: &Rows<'_>) {
        if selection.chosen.len() >= selection.candidates.len() {
            return;
        }
        let Some(audit) = &mut self.audit else { return };
        audit.cuts += 1;
        if (audit.cuts - 1) % u64::from(audit.every) != 0 {
            return;
        }
        match self.shares(selection, queries).and_then(|shares| compare(selection, &shares)) {
            Ok((found, part)) => {
                self.stats.audited += 1;
                self.stats.wanted += selection.chosen.len() as u64;
                self.stats.found += found;
                self.stats.found_ppm += (part * MILLION).round() as u64;
            }
            Err(error) => self.last_error = Some(error.within("an audit")),
        }
    }

    /// The share of each candidate block.
    fn shares(&self, selection: &Selection<'_>, queries: &Rows<'_>) -> Result<Vec<f64>> {
        let (geometry, state) = (&self.geometry, self.layer(selection.layer)?);
        let block = geometry.shape.block_tokens;
        geometry.shape.check_queries(selection.layer, queries)?;
        let Some(audit) = &self.audit else { return Err(Status::State.into()) };
        let left = state
            .retained
            .as_ref()
            .map(|retained: &Retained| TokensLeft::new(retained, state.tokens()));
        let mut attention = AttentionShares::new(&geometry.shape, queries, selection, left)?;
        let at_once = (geometry.buffer_tokens / block) as usize;
        for (part, ids) in selection.candidates.chunks(at_once).enumerate() {
            let tokens = ids.len() as u32 * block;
            let views = || geometry.views(&audit.memory, 0, geometry.buffer_tokens, (0, tokens));
            end(&self.submit_get(selection.layer, ids, views()?, None)?)?;
            let plane = views()?.k;
            // SAFETY: rows of the audit's memory, which no op writes any more.
            let keys = unsafe { rows_of(geometry, &plane)? };
            for (at, &id) in ids.iter().enumerate() {
                let from = at as u32 * block;
                attention.block(part * at_once + at, id * block, &keys, from..from + block)?;
            }
        }
        if selection.has_tail && state.tail.tokens > 0 {
            let mut plane = self.tail_views(selection.layer, 0, state.tail.tokens)?.k;
            if plane.memory == Memory::Device {
                let rows = (0, state.tail.tokens);
                let copy = geometry.views(&audit.memory, 0, geometry.buffer_tokens, rows)?.k;
                let mut copies = [row_copy(&plane, rows, address_of(&copy)?, copy.memory)?];
                // SAFETY: rows of the tail, and the audit's memory, which no op writes.
                unsafe { self.copier.copy(&mut copies)? };
                plane = copy;
            }
            // SAFETY: rows of the tail, which nothing writes during this call, or a copy.
            let keys = unsafe { rows_of(geometry, &plane)? };
            attention.block(
                selection.candidates.len(),
                state.stored,
                &keys,
                0..state.tail.tokens,
            )?;
        }
        attention.shares(selection.candidates.len())
    }
}

/// The number of wanted blocks that were chosen, and the relative share of the chosen blocks.
fn compare(selection: &Selection<'_>, shares: &[f64]) -> Result<(u64, f64)> {
    let is_chosen = |at: u32| {
        let id = selection.candidates.get(at as usize);
        id.is_some_and(|id| selection.chosen.binary_search(id).is_ok())
    };
    let share = |at: u32| shares.get(at as usize).copied().unwrap_or(0.0);
    let mut order: Vec<u32> = Vec::new();
    order.try_reserve_exact(selection.candidates.len()).map_err(|_| Status::NoMem)?;
    order.extend(0..selection.candidates.len() as u32);
    let all: f64 = shares.iter().sum();
    let got: f64 = order.iter().filter(|&&at| is_chosen(at)).map(|&at| share(at)).sum();
    order.sort_unstable_by(|&a, &b| share(b).total_cmp(&share(a)).then(a.cmp(&b)));
    order.truncate(selection.chosen.len());
    let found = order.iter().filter(|&&at| is_chosen(at)).count() as u64;
    Ok((found, if all > 0.0 { got / all } else { 1.0 }))
}

/// An online softmax: the largest product of a query with the keys of a block, and the sum of
/// exponentials relative to it.
#[derive(Clone, Copy)]
struct SoftmaxSum {
    most: f32,
    sum: f64,
}

impl SoftmaxSum {
    const NONE: SoftmaxSum = SoftmaxSum { most: f32::NEG_INFINITY, sum: 0.0 };

    fn add(&mut self, product: f32) {
        if product > self.most {
            let shrink = f64::from(self.most - product).exp();
            (self.most, self.sum) = (product, self.sum * shrink + 1.0);
        } else {
            self.sum += f64::from(product - self.most).exp();
        }
    }

    /// The sum relative to a product that is at least as large.
    fn weight(&self, most: f32) -> f64 {
        if self.sum > 0.0 { self.sum * f64::from(self.most - most).exp() } else { 0.0 }
    }
}

/// Attention shares of some queries, computed block by block.
struct AttentionShares<'a> {
    shape: Shape,
    left: Option<TokensLeft<'a>>,
    /// Elements of the queries, and the position of the first query.
    queries: Vec<f32>,
    count: u32,
    first: u32,
    key: Vec<f32>,
    /// For each query and head, one sum for each block and one for the tail.
    parts: Vec<SoftmaxSum>,
    columns: usize,
}

impl<'a> AttentionShares<'a> {
    fn new(
        shape: &Shape,
        queries: &Rows<'_>,
        selection: &Selection<'_>,
        left: Option<TokensLeft<'a>>,
    ) -> Result<AttentionShares<'a>> {
        let count = queries.tokens().min(MOST_QUERIES);
        let skipped = queries.tokens() - count;
        let (dim, columns) = (shape.key_dim as usize, selection.candidates.len() + 1);
        let lanes = count as usize * shape.query_heads as usize;
        let (mut numbers, mut key, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        grow(&mut numbers, lanes * dim, 0.0)?;
        grow(&mut key, dim, 0.0)?;
        grow(&mut parts, lanes * columns, SoftmaxSum::NONE)?;
        for (lane, to) in (0u32..).zip(numbers.chunks_exact_mut(dim)) {
            let (token, head) = (skipped + lane / shape.query_heads, lane % shape.query_heads);
            if !read(queries, token, head, to) {
                fail!(Invalid, "queries that are not finite numbers");
            }
        }
        let first = selection.first_query.saturating_add(skipped);
        Ok(AttentionShares {
            shape: *shape,
            left,
            queries: numbers,
            count,
            first,
            key,
            parts,
            columns,
        })
    }

    /// Adds the keys of a block; `position` is that of its first row in `keys`.
    fn block(
        &mut self,
        column: usize,
        position: u32,
        keys: &Rows<'_>,
        rows: std::ops::Range<u32>,
    ) -> Result<()> {
        for (position, row) in (position..).zip(rows) {
            for key_head in 0..self.shape.key_heads {
                if !read(keys, row, key_head, &mut self.key) {
                    fail!(Invalid, "keys that are not finite numbers");
                }
                self.key(column, position, key_head);
            }
        }
        Ok(())
    }

    /// Adds a key.
    fn key(&mut self, column: usize, position: u32, key_head: u32) {
        let (heads, group) = (self.shape.query_heads, self.shape.group());
        let (dim, scale) = (self.shape.key_dim as usize, self.shape.softmax_scale());
        for head in key_head * group..(key_head + 1) * group {
            let list = |left: &TokensLeft<'_>| match left.lists() {
                1 => 0,
                lists if lists == heads as usize => head as usize,
                _ => key_head as usize,
            };
            if self.left.as_ref().is_some_and(|left| !left.has(list(left), position)) {
                continue;
            }
            // Causal mask: a query attends to its own position and to earlier ones.
            for query in position.saturating_sub(self.first)..self.count {
                let lane = (query * heads + head) as usize;
                let numbers = self.queries.get(lane * dim..(lane + 1) * dim).unwrap_or_default();
                if let Some(part) = self.parts.get_mut(lane * self.columns + column) {
                    part.add(product(numbers, &self.key) * scale);
                }
            }
        }
    }

    /// The shares of the first `blocks` columns, over all queries and heads.
    fn shares(&self, blocks: usize) -> Result<Vec<f64>> {
        let mut shares = Vec::new();
        grow(&mut shares, blocks, 0.0)?;
        for parts in self.parts.chunks_exact(self.columns) {
            let most = parts.iter().fold(f32::NEG_INFINITY, |most, part| most.max(part.most));
            let all: f64 = parts.iter().map(|part| part.weight(most)).sum();
            if all > 0.0 {
                let each = shares.iter_mut().zip(parts);
                each.for_each(|(share, part)| *share += part.weight(most) / all);
            }
        }
        Ok(shares)
    }
}
