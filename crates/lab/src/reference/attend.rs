//! Attention over the keys and values of a cache, in pieces that are merged, restricted by a
//! policy.

use kvtier::attention::{ColumnSums, Decode, Keys, Prefill, Problem, merge};
use kvtier::base::status::Result;
use kvtier::sparse::{Context, Index, Shape};

use super::cache::{Cache, KeySelection, KvRows};
use super::policies::unsupported;
use super::rows::{contiguous, to_f32};

/// The queries of a layer, `[tokens, query heads, dim]`.
#[derive(Clone, Copy)]
pub struct LayerQueries<'a> {
    /// The model's shape, as policies see it.
    pub shape: &'a Shape,
    /// The layer.
    pub layer: u32,
    /// The numbers.
    pub queries: &'a [f32],
    /// Position of the first query.
    pub first: u32,
}

/// Attention output `[tokens, query heads, value dim]`, with a log-sum-exp per row.
pub struct Output {
    /// The output.
    pub out: Vec<f32>,
    /// Log-sum-exps.
    pub lse: Vec<f32>,
    /// Keys used for the next token, summed over query heads.
    pub looked: usize,
    pieces: usize,
}

impl LayerQueries<'_> {
    /// Number of queries.
    pub fn tokens(&self) -> usize {
        self.queries.len() / self.row()
    }

    fn row(&self) -> usize {
        (self.shape.query_heads * self.shape.key_dim) as usize
    }

    fn group(&self) -> usize {
        self.shape.group() as usize
    }

    fn problem<'a>(
        &'a self,
        lent: &KvRows<'a>,
        (skip, first_query): (usize, u32),
        select: Keys<'a>,
    ) -> Result<Problem<'a>> {
        let queries = &self.queries[skip * self.row()..];
        Ok(Problem {
            queries: contiguous(queries, self.shape.query_heads, self.shape.key_dim)?,
            keys: lent.keys,
            values: lent.values,
            first_key: 0,
            first_query,
            scale: self.shape.scale,
            select,
        })
    }

    /// The number of queries before a piece, and the row of the key of the first other one, in the
    /// piece or behind it. Causal order is the order of rows, since new tokens are the last rows of
    /// every head.
    fn start(&self, lent: &KvRows<'_>) -> Result<(usize, u32)> {
        let rows = lent.keys.tokens() as usize;
        let before = |list: &[u32]| list.partition_point(|&at| at < self.first);
        let row = before(lent.positions[0]);
        if lent.positions.iter().any(|list| list.len() != rows || before(list) != row) {
            let text =
                "a prompt is not supported after heads have evicted different numbers of tokens";
            return Err(unsupported(text));
        }
        let first = lent.positions[0].first().map_or(0, |&at| at.saturating_sub(self.first));
        Ok((first as usize, row as u32))
    }

    fn output(&self) -> Output {
        let rows = self.tokens() * self.shape.query_heads as usize;
        Output {
            out: vec![0.0; rows * self.shape.value_dim as usize],
            lse: vec![f32::NEG_INFINITY; rows],
            looked: 0,
            pieces: 0,
        }
    }

    /// Attention of a prompt or a part of one to all wanted keys.
    pub fn dense(
        &self,
        cache: &mut impl Cache,
        selection: Option<KeySelection<'_>>,
    ) -> Result<Output> {
        let (heads, mut output) = (self.shape.query_heads as usize, self.output());
        cache.with_keys(self.layer, selection, &mut |lent| {
            let start = self.start(lent)?;
            let problem = self.problem(lent, start, Keys::default())?;
            output.add(start.0 * heads, |out, lse| {
                let mut job = Prefill::new(problem, out, Some(lse))?;
                let mut memory = vec![0.0; job.scratch()];
                job.all(&mut memory)
            })
        })?;
        Ok(output)
    }

    /// Attention by an index, which names keys by position: all keys must be present.
    pub fn indexed(&self, cache: &mut impl Cache, index: &Index) -> Result<Output> {
        let mut output = self.output();
        whole(cache, self.layer, self.shape, &mut |lent| {
            let problem = self.problem(lent, (0, self.first), index.keys())?;
            output.add(0, |out, lse| {
                let mut job = Prefill::new(problem, out, Some(lse))?;
                let mut memory = vec![0.0; job.scratch()];
                job.all(&mut memory)
            })
        })?;
        Ok(output)
    }

    /// Sums of attention weights of the last queries for each key, by query head, in the order of
    /// rows. For a prompt computed with an index of all keys.
    pub fn sums(
        &self,
        cache: &mut impl Cache,
        output: &Output,
        queries: usize,
        index: &Index,
    ) -> Result<Vec<f32>> {
        let heads = self.shape.query_heads as usize;
        let mut lists = vec![Vec::new(); heads];
        let mut add = |lent: &KvRows<'_>, start: (usize, u32)| {
            let rows = lent.keys.tokens() as usize;
            let problem = self.problem(lent, start, index.keys())?;
            let mut sums = vec![0.0; heads * rows];
            let from = (self.tokens() - queries).saturating_sub(start.0) as u32;
            let lse = &output.lse[start.0 * heads..];
            let mut job = ColumnSums::new(problem, lse, from, true, &mut sums)?;
            let mut memory = vec![0.0; job.scratch()];
            job.all(&mut memory)?;
            lists.iter_mut().zip(sums.chunks_exact(rows)).for_each(|(l, s)| l.extend_from_slice(s));
            Ok(())
        };
        if index.is_dense() {
            cache.with_keys(self.layer, None, &mut |lent| add(lent, self.start(lent)?))?;
        } else {
            whole(cache, self.layer, self.shape, &mut |lent| add(lent, (0, self.first)))?;
        }
        Ok(lists.concat())
    }

    /// Attention of the next token to the keys that are wanted and in the index. `sums` receives
    /// the weight of each present key, by query head.
    pub fn next(
        &self,
        cache: &mut impl Cache,
        selection: Option<KeySelection<'_>>,
        index: &Index,
        sums: Option<&mut Vec<f32>>,
    ) -> Result<Output> {
        let heads = self.shape.query_heads as usize;
        let mut output = self.output();
        let mut got: Vec<Vec<(f32, f32)>> = vec![Vec::new(); heads];
        cache.with_keys(self.layer, selection, &mut |lent| {
            let picked: Vec<Vec<u32>> =
                (0..heads).map(|head| self.pick(lent, head, selection, index)).collect();
            let rows = lent.keys.tokens();
            output.looked += picked.iter().map(Vec::len).sum::<usize>();
            let is_all = picked.iter().all(|list| list.len() == rows as usize);
            let index = super::rows::tokens(&picked);
            let select = if is_all { Keys::default() } else { index.keys() };
            let problem = self.problem(lent, (0, rows), select)?;
            let mut lse = Vec::new();
            let mut shares = Vec::new();
            output.add(0, |out, of| {
                let mut memory = vec![0.0; Decode::memory(&problem, sums.is_some())?];
                let mut job = Decode::new(problem, out, of, &mut memory, sums.is_some())?;
                let mut scratch = vec![0.0; job.scratch()];
                job.all(&mut scratch)?;
                if sums.is_some() {
                    let most = picked.iter().map(Vec::len).max().unwrap_or(0);
                    shares = vec![0.0; heads * most];
                    job.sums(true, &mut shares)?;
                }
                lse = of.to_vec();
                Ok(())
            })?;
            // One weight for each present key: 0 for those that were not used.
            let most = shares.len() / heads;
            for (head, got) in got.iter_mut().enumerate() {
                let start = got.len();
                let resident = lent.of(head / self.group()).len();
                got.resize(start + resident, (0.0, lse[head]));
                for (at, &row) in picked[head].iter().enumerate().take(most) {
                    got[start + row as usize].0 = shares[head * most + at];
                }
            }
            Ok(())
        })?;
        if let Some(sums) = sums {
            for (got, lse) in got.iter().zip(&output.lse) {
                sums.extend(got.iter().map(|(share, of)| share * (of - lse).exp()));
            }
        }
        Ok(output)
    }

    /// The rows of a piece that a query head uses.
    fn pick(
        &self,
        lent: &KvRows<'_>,
        head: usize,
        selection: Option<KeySelection<'_>>,
        index: &Index,
    ) -> Vec<u32> {
        let is_selected = |at: u32| {
            selection.is_none_or(|selection| {
                let block = at / self.shape.block_tokens;
                at >= selection.from || selection.blocks.binary_search(&block).is_ok()
            })
        };
        let is_seen =
            |at: u32| index.is_dense() || index.sees(head as u32, self.first, self.first, at);
        let rows = (0..).zip(lent.of(head / self.group()));
        rows.filter(|&(_, &at)| is_selected(at) && is_seen(at)).map(|(row, _)| row).collect()
    }
}

impl Output {
    /// Adds a piece, which rows before `from` do not see.
    fn add(
        &mut self,
        from: usize,
        f: impl FnOnce(&mut [f32], &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let dim = self.out.len() / self.lse.len();
        let (out, lse) = (&mut self.out[from * dim..], &mut self.lse[from..]);
        self.pieces += 1;
        if self.pieces == 1 {
            return f(out, lse);
        }
        let (mut more, mut more_lse) = (vec![0.0; out.len()], vec![0.0; lse.len()]);
        f(&mut more, &mut more_lse)?;
        merge(out, lse, &more, &more_lse)
    }
}

/// All keys and values of a layer in one piece, for policies and kernels that need a whole prompt.
/// Pieces are concatenated.
pub fn whole(
    cache: &mut impl Cache,
    layer: u32,
    shape: &Shape,
    f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
) -> Result<()> {
    let (mut keys, mut values, mut positions) = (Vec::new(), Vec::new(), Vec::<u32>::new());
    cache.with_keys(layer, None, &mut |lent| {
        let is_one = lent.positions.iter().all(|list| list == &lent.positions[0]);
        let next = positions.last().map_or(0, |last| last + 1);
        if !is_one || lent.of(0).iter().enumerate().any(|(i, &at)| at != next + i as u32) {
            return Err(unsupported("an index of a prompt is not supported after an eviction"));
        }
        to_f32(&lent.keys, &mut keys);
        to_f32(&lent.values, &mut values);
        positions.extend_from_slice(lent.of(0));
        Ok(())
    })?;
    f(&KvRows {
        keys: contiguous(&keys, shape.key_heads, shape.key_dim)?,
        values: contiguous(&values, shape.key_heads, shape.value_dim)?,
        positions: vec![&positions],
    })
}

/// The context of a call to a policy.
pub fn context(is_prefill: bool, (part, parts): (u32, u32), first: u32, tokens: u32) -> Context {
    Context { is_prefill, part, parts, first_query: first, tokens }
}
