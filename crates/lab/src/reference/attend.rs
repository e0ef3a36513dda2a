//! Attention over what a cache lends: in pieces that are merged, by what a policy says.

use kvtier::attention::{Decode, Keys, Prefill, Problem, Sums, merge};
use kvtier::base::status::Result;
use kvtier::sparse::{Context, Index, Shape};

use super::cache::{Cache, Lent, Wanted};
use super::policies::unsupported;
use super::rows::{contiguous, to_f32};

/// The queries of a layer, `[tokens, query heads, numbers]`.
#[derive(Clone, Copy)]
pub struct Asking<'a> {
    /// What policies are told of the model.
    pub shape: &'a Shape,
    /// The layer.
    pub layer: u32,
    /// The numbers.
    pub queries: &'a [f32],
    /// The position of the first.
    pub first: u32,
}

/// What comes out: `[tokens, query heads, numbers of values]`, and a log-sum-exp each.
pub struct Output {
    /// What attention gave.
    pub out: Vec<f32>,
    /// Log-sum-exps.
    pub lse: Vec<f32>,
    /// Keys that the next token was computed with, of all query heads.
    pub looked: usize,
    pieces: usize,
}

impl Asking<'_> {
    /// How many queries there are.
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
        lent: &Lent<'a>,
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

    /// How many queries lie before a piece, and the row that the key of the first other one has,
    /// or would have behind the piece. Causal order is that of rows, as new tokens are the last
    /// of every head.
    fn start(&self, lent: &Lent<'_>) -> Result<(usize, u32)> {
        let rows = lent.keys.tokens() as usize;
        let before = |list: &[u32]| list.partition_point(|&at| at < self.first);
        let row = before(lent.positions[0]);
        if lent.positions.iter().any(|list| list.len() != rows || before(list) != row) {
            let text = "a prompt behind heads that keep different numbers of tokens";
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

    /// A prompt or a part of one, with all keys that are wanted.
    pub fn dense(&self, cache: &mut impl Cache, wanted: Option<Wanted<'_>>) -> Result<Output> {
        let (heads, mut output) = (self.shape.query_heads as usize, self.output());
        cache.with_keys(self.layer, wanted, &mut |lent| {
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

    /// The same by an index, which names keys by their positions: all must be there.
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

    /// What each key got of the last queries, by query head, keys in the order of their rows.
    /// For a prompt that was computed by an index of all keys.
    pub fn sums(
        &self,
        cache: &mut impl Cache,
        output: &Output,
        queries: usize,
        index: &Index,
    ) -> Result<Vec<f32>> {
        let heads = self.shape.query_heads as usize;
        let mut lists = vec![Vec::new(); heads];
        let mut add = |lent: &Lent<'_>, start: (usize, u32)| {
            let rows = lent.keys.tokens() as usize;
            let problem = self.problem(lent, start, index.keys())?;
            let mut sums = vec![0.0; heads * rows];
            let from = (self.tokens() - queries).saturating_sub(start.0) as u32;
            let lse = &output.lse[start.0 * heads..];
            let mut job = Sums::new(problem, lse, from, true, &mut sums)?;
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

    /// The next token, with those of the keys lent that are wanted and named by the index. With
    /// sums: what each key that is there got, by query head.
    pub fn next(
        &self,
        cache: &mut impl Cache,
        wanted: Option<Wanted<'_>>,
        index: &Index,
        sums: Option<&mut Vec<f32>>,
    ) -> Result<Output> {
        let heads = self.shape.query_heads as usize;
        let mut output = self.output();
        let mut got: Vec<Vec<(f32, f32)>> = vec![Vec::new(); heads];
        cache.with_keys(self.layer, wanted, &mut |lent| {
            let picked: Vec<Vec<u32>> =
                (0..heads).map(|head| self.pick(lent, head, wanted, index)).collect();
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
            // A number for each key that is there: those that were not looked at got nothing.
            let most = shares.len() / heads;
            for (head, got) in got.iter_mut().enumerate() {
                let start = got.len();
                let there = lent.of(head / self.group()).len();
                got.resize(start + there, (0.0, lse[head]));
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

    /// The rows of a piece that a query head looks at.
    fn pick(
        &self,
        lent: &Lent<'_>,
        head: usize,
        wanted: Option<Wanted<'_>>,
        index: &Index,
    ) -> Vec<u32> {
        let is_wanted = |at: u32| {
            wanted.is_none_or(|wanted| {
                let block = at / self.shape.block_tokens;
                at >= wanted.from || wanted.blocks.binary_search(&block).is_ok()
            })
        };
        let is_seen =
            |at: u32| index.is_dense() || index.sees(head as u32, self.first, self.first, at);
        let rows = (0..).zip(lent.of(head / self.group()));
        rows.filter(|&(_, &at)| is_wanted(at) && is_seen(at)).map(|(row, _)| row).collect()
    }
}

impl Output {
    /// Computes one more piece, which rows before `from` see nothing of.
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

/// All keys and values of a layer in one piece: policies and kernels that look across a prompt
/// take no less. Pieces are copied together.
pub fn whole(
    cache: &mut impl Cache,
    layer: u32,
    shape: &Shape,
    f: &mut dyn FnMut(&Lent<'_>) -> Result<()>,
) -> Result<()> {
    let (mut keys, mut values, mut positions) = (Vec::new(), Vec::new(), Vec::<u32>::new());
    cache.with_keys(layer, None, &mut |lent| {
        let is_one = lent.positions.iter().all(|list| list == &lent.positions[0]);
        let next = positions.last().map_or(0, |last| last + 1);
        if !is_one || lent.of(0).iter().enumerate().any(|(i, &at)| at != next + i as u32) {
            return Err(unsupported("an index of a prompt behind tokens that were evicted"));
        }
        to_f32(&lent.keys, &mut keys);
        to_f32(&lent.values, &mut values);
        positions.extend_from_slice(lent.of(0));
        Ok(())
    })?;
    f(&Lent {
        keys: contiguous(&keys, shape.key_heads, shape.key_dim)?,
        values: contiguous(&values, shape.key_heads, shape.value_dim)?,
        positions: vec![&positions],
    })
}

/// Where a policy is asked.
pub fn context(is_prefill: bool, (part, parts): (u32, u32), first: u32, tokens: u32) -> Context {
    Context { is_prefill, part, parts, first_query: first, tokens }
}
