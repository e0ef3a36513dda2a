//! How good selections are: compared with what the layer's own queries look at.
//!
//! An audit loads the keys of all blocks that could have come and computes the attention of the
//! layer's queries (of more than 16 the last 16) to them and to the tail, as far as each query
//! may see and as tokens are left. A block's share is what its tokens got, of all heads and
//! queries. *Wanted* are as many blocks as were chosen, those with the greatest shares (of equal
//! ones the lower); *found* those of them that were chosen. Beside that it counts which part of
//! what all these blocks got went to those chosen.
//!
//! That costs what the selection has saved and more; it changes nothing that is loaded.

use crate::attention::Rows;
use crate::base::status::{Result, Status};
use crate::device::Memory;
use crate::fail;
use crate::offload::carry::{address_of, rows_to};
use crate::offload::home::Own;
use crate::offload::kept::{Kept, Left};
use crate::offload::source::rows_of;
use crate::offload::{Offload, end};
use crate::sparse::Shape;
use crate::sparse::numbers::{grow, read};
use crate::sparse::pages::product;

/// Most queries of a selection that are looked at.
const MOST_QUERIES: u32 = 16;
/// The whole, in the counts.
const MILLION: f64 = 1e6;

/// What is looked at, and where keys come for it.
pub(super) struct Audit {
    every: u32,
    /// Selections so far that left blocks out.
    cuts: u64,
    memory: Own,
}

/// A selection.
pub(super) struct Selection<'a> {
    pub layer: u32,
    /// Blocks that could have been chosen, and those that were, ascending.
    pub candidates: &'a [u32],
    pub chosen: &'a [u32],
    /// The tail comes too.
    pub has_tail: bool,
    pub first_query: u32,
}

impl Offload {
    /// From now on every so many-th selection that leaves blocks out is audited; 0 = none.
    /// The store's account pays for the memory that this takes, as long as a buffer is.
    pub fn audit(&mut self, every: u32) -> Result<()> {
        self.audit = match every {
            0 => None,
            _ => {
                let bytes = self.geometry.planes_bytes(self.geometry.buffer_tokens);
                Some(Audit { every, cuts: 0, memory: Own::map(&self.store, bytes)? })
            }
        };
        Ok(())
    }

    /// Every so many-th selection is audited; 0 = none.
    pub fn audited_every(&self) -> u32 {
        self.audit.as_ref().map_or(0, |audit| audit.every)
    }

    /// Compares a selection with the attention of the layer's own queries, if it is its turn.
    /// What cannot be compared is not counted: nobody's load fails for that.
    pub(super) fn audit_selection(&mut self, what: &Selection<'_>, queries: &Rows<'_>) {
        if what.chosen.len() >= what.candidates.len() {
            return;
        }
        let Some(audit) = &mut self.audit else { return };
        audit.cuts += 1;
        if (audit.cuts - 1) % u64::from(audit.every) != 0 {
            return;
        }
        match self.shares(what, queries).and_then(|shares| compare(what, &shares)) {
            Ok((found, part)) => {
                self.stats.audited += 1;
                self.stats.wanted += what.chosen.len() as u64;
                self.stats.found += found;
                self.stats.found_ppm += (part * MILLION).round() as u64;
            }
            Err(error) => self.note = Some(error.within("an audit")),
        }
    }

    /// What each candidate got of the attention.
    fn shares(&self, what: &Selection<'_>, queries: &Rows<'_>) -> Result<Vec<f64>> {
        let (geometry, one) = (&self.geometry, self.layer(what.layer)?);
        let block = geometry.shape.block_tokens;
        geometry.shape.check_queries(what.layer, queries)?;
        let Some(audit) = &self.audit else { return Err(Status::State.into()) };
        let left = one.kept.as_ref().map(|kept: &Kept| Left::new(kept, one.tokens()));
        let mut look = Look::new(&geometry.shape, queries, what, left)?;
        let at_once = (geometry.buffer_tokens / block) as usize;
        for (part, ids) in what.candidates.chunks(at_once).enumerate() {
            let tokens = ids.len() as u32 * block;
            let views = || geometry.views(&audit.memory, 0, geometry.buffer_tokens, (0, tokens));
            end(&self.submit_get(what.layer, ids, views()?, None)?)?;
            let plane = views()?.k;
            // SAFETY: rows of the audit's memory, which no op writes any more.
            let keys = unsafe { rows_of(geometry, &plane)? };
            for (at, &id) in ids.iter().enumerate() {
                let from = at as u32 * block;
                look.block(part * at_once + at, id * block, &keys, from..from + block)?;
            }
        }
        if what.has_tail && one.tail.tokens > 0 {
            let mut plane = self.tail_views(what.layer, 0, one.tail.tokens)?.k;
            if plane.memory == Memory::Device {
                let rows = (0, one.tail.tokens);
                let here = geometry.views(&audit.memory, 0, geometry.buffer_tokens, rows)?.k;
                let mut copies = [rows_to(&plane, rows, address_of(&here)?, here.memory)?];
                // SAFETY: rows of the tail, and the audit's memory, which no op writes.
                unsafe { self.carrier.carry(&mut copies)? };
                plane = here;
            }
            // SAFETY: rows of the tail, which nobody writes during this call, or a copy.
            let keys = unsafe { rows_of(geometry, &plane)? };
            look.block(what.candidates.len(), one.stored, &keys, 0..one.tail.tokens)?;
        }
        look.shares(what.candidates.len())
    }
}

/// How many of the blocks that got most were chosen, and which part of all attention to
/// blocks those chosen got.
fn compare(what: &Selection<'_>, shares: &[f64]) -> Result<(u64, f64)> {
    let is_chosen = |at: u32| {
        let id = what.candidates.get(at as usize);
        id.is_some_and(|id| what.chosen.binary_search(id).is_ok())
    };
    let share = |at: u32| shares.get(at as usize).copied().unwrap_or(0.0);
    let mut order: Vec<u32> = Vec::new();
    order.try_reserve_exact(what.candidates.len()).map_err(|_| Status::NoMem)?;
    order.extend(0..what.candidates.len() as u32);
    let all: f64 = shares.iter().sum();
    let got: f64 = order.iter().filter(|&&at| is_chosen(at)).map(|&at| share(at)).sum();
    order.sort_unstable_by(|&a, &b| share(b).total_cmp(&share(a)).then(a.cmp(&b)));
    order.truncate(what.chosen.len());
    let found = order.iter().filter(|&&at| is_chosen(at)).count() as u64;
    Ok((found, if all > 0.0 { got / all } else { 1.0 }))
}

/// The greatest product of a query with keys of a block, and the sum of what all are, as
/// powers of e, beside it.
#[derive(Clone, Copy)]
struct Part {
    most: f32,
    sum: f64,
}

impl Part {
    const NONE: Part = Part { most: f32::NEG_INFINITY, sum: 0.0 };

    fn add(&mut self, product: f32) {
        if product > self.most {
            let shrink = f64::from(self.most - product).exp();
            (self.most, self.sum) = (product, self.sum * shrink + 1.0);
        } else {
            self.sum += f64::from(product - self.most).exp();
        }
    }

    /// Its weight beside a product that is greater, or the same.
    fn weight(&self, most: f32) -> f64 {
        if self.sum > 0.0 { self.sum * f64::from(self.most - most).exp() } else { 0.0 }
    }
}

/// Attention of some queries, block by block.
struct Look<'a> {
    shape: Shape,
    left: Option<Left<'a>>,
    /// Numbers of the queries, and the position of the first.
    queries: Vec<f32>,
    count: u32,
    first: u32,
    key: Vec<f32>,
    /// For each query and head a part a block, and one for the tail.
    parts: Vec<Part>,
    columns: usize,
}

impl<'a> Look<'a> {
    fn new(
        shape: &Shape,
        queries: &Rows<'_>,
        what: &Selection<'_>,
        left: Option<Left<'a>>,
    ) -> Result<Look<'a>> {
        let count = queries.tokens().min(MOST_QUERIES);
        let skipped = queries.tokens() - count;
        let (dim, columns) = (shape.key_dim as usize, what.candidates.len() + 1);
        let lanes = count as usize * shape.query_heads as usize;
        let (mut numbers, mut key, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        grow(&mut numbers, lanes * dim, 0.0)?;
        grow(&mut key, dim, 0.0)?;
        grow(&mut parts, lanes * columns, Part::NONE)?;
        for (lane, to) in (0u32..).zip(numbers.chunks_exact_mut(dim)) {
            let (token, head) = (skipped + lane / shape.query_heads, lane % shape.query_heads);
            if !read(queries, token, head, to) {
                fail!(Invalid, "queries that are not finite numbers");
            }
        }
        let first = what.first_query.saturating_add(skipped);
        Ok(Look { shape: *shape, left, queries: numbers, count, first, key, parts, columns })
    }

    /// Looks at the keys of a block, which begins at a position and is some rows of `keys`.
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

    /// Looks at a key.
    fn key(&mut self, column: usize, position: u32, key_head: u32) {
        let (heads, group) = (self.shape.query_heads, self.shape.group());
        let (dim, scale) = (self.shape.key_dim as usize, self.shape.softmax_scale());
        for head in key_head * group..(key_head + 1) * group {
            let list = |left: &Left<'_>| match left.lists() {
                1 => 0,
                lists if lists == heads as usize => head as usize,
                _ => key_head as usize,
            };
            if self.left.as_ref().is_some_and(|left| !left.has(list(left), position)) {
                continue;
            }
            // A query sees itself and what is before it.
            for query in position.saturating_sub(self.first)..self.count {
                let lane = (query * heads + head) as usize;
                let numbers = self.queries.get(lane * dim..(lane + 1) * dim).unwrap_or_default();
                if let Some(part) = self.parts.get_mut(lane * self.columns + column) {
                    part.add(product(numbers, &self.key) * scale);
                }
            }
        }
    }

    /// What each of so many blocks got, of all queries and heads.
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
