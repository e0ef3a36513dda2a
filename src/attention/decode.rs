//! Attention of the next token, or of a few tokens, over all or selected keys.

use std::marker::PhantomData;

use crate::attention::dot_bf16::applies;
use crate::attention::kv_split::{KvSplit, PART_KEYS};
use crate::attention::lanes::Lanes;
use crate::attention::level::{Level, levels};
use crate::attention::limits::{Limits, Workspace};
use crate::attention::narrow::Part;
use crate::attention::panel::{self, MAX_COLUMNS, PanelScratch};
use crate::attention::problem::{Problem, check_item};
use crate::attention::{lanes::portable::Portable, narrow};
use crate::base::status::Result;
use crate::fail;

/// A decode in two phases. First its parts run: some keys for the queries that share them. Then its
/// ends run, one for each query and head, and merge the parts in the order of keys. Any thread may
/// run any part or end, in any order; the bits do not depend on that.
#[derive(Debug)]
pub struct Decode<'a> {
    problem: Problem<'a>,
    level: Level,
    split: KvSplit,
    out: *mut f32,
    lse: *mut f32,
    /// Results of parts, their log-sum-exps, then scores.
    memory: *mut f32,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: parts and ends write to disjoint memory, and `run` and `end` require that each is run by
// one thread.
unsafe impl Send for Decode<'_> {}
// SAFETY: as above.
unsafe impl Sync for Decode<'_> {}

impl<'a> Decode<'a> {
    /// Numbers of memory that a decode needs beside scratch; more with scores, for
    /// [`Decode::sums`].
    pub fn memory(problem: &Problem<'_>, keeps_scores: bool) -> Result<usize> {
        Ok(KvSplit::new(problem, keeps_scores)?.sizes(problem)?.iter().sum())
    }

    /// Memory that suffices for all decodes within the limits.
    pub fn workspace(limits: &Limits) -> Result<Workspace> {
        // SAFETY: only sizes are read.
        let problem = unsafe { limits.problem()? };
        let split = KvSplit::largest(limits);
        let rows = split.rows.min(narrow::MAX_ROWS) * split.groups as usize;
        let run = narrow::scratch(&problem, rows, split.groups as usize);
        // Rows that share their keys may be those of all heads.
        let many = panel::scratch(&problem, split.all_rows().min(MAX_COLUMNS));
        Ok(Workspace { memory: split.sizes(&problem)?.iter().sum(), scratch: run.max(many) })
    }

    /// A decode that writes `[T, query heads, Dv]` to `out`, and `[T, query heads]` to `lse`. A
    /// query that sees no key gets zeros and -inf. `memory` has the size of [`Decode::memory`].
    pub fn new(
        problem: Problem<'a>,
        out: &'a mut [f32],
        lse: &'a mut [f32],
        memory: &'a mut [f32],
        keeps_scores: bool,
    ) -> Result<Decode<'a>> {
        let split = KvSplit::new(&problem, keeps_scores)?;
        let rows = split.all_rows();
        let numbers = rows.saturating_mul(problem.values.dim() as usize);
        if out.len() < numbers || lse.len() < rows {
            fail!(
                TooSmall,
                "out has {} numbers and lse {}, too few for {rows} rows",
                out.len(),
                lse.len()
            );
        }
        let sizes = split.sizes(&problem)?;
        if memory.len() < sizes.iter().sum() {
            fail!(TooSmall, "memory has {} numbers, {sizes:?} are needed", memory.len());
        }
        Ok(Decode {
            problem,
            level: Level::best(),
            split,
            out: out.as_mut_ptr(),
            lse: lse.as_mut_ptr(),
            memory: memory.as_mut_ptr(),
            lent: PhantomData,
        })
    }

    /// Selects instructions; the best supported level if the processor lacks them.
    pub fn with_level(mut self, level: Level) -> Decode<'a> {
        self.level = if level.is_supported() { level } else { Level::best() };
        self
    }

    /// Number of parts: some keys of all heads, or of one head that many queries share.
    pub fn parts(&self) -> u32 {
        // Adjacent heads are read together.
        let groups = if self.is_narrow() { 1 } else { self.split.groups };
        groups * self.split.parts as u32
    }

    /// Number of ends.
    pub fn ends(&self) -> u32 {
        self.split.all_rows() as u32
    }

    /// Numbers of scratch that each thread needs for parts.
    pub fn scratch(&self) -> usize {
        if self.is_narrow() {
            narrow::scratch(&self.problem, self.split.all_rows(), self.split.groups as usize)
        } else {
            panel::scratch(&self.problem, self.split.rows.min(MAX_COLUMNS))
        }
    }

    fn is_narrow(&self) -> bool {
        self.split.rows <= narrow::MAX_ROWS
    }

    /// Runs a part.
    ///
    /// # Safety
    /// No two threads run the same part at a time, and none an end before all parts are done.
    pub unsafe fn run(&self, part: u32, memory: &mut [f32]) -> Result<()> {
        check_item("part", part, self.parts(), memory, self.scratch())?;
        // SAFETY: the level is supported, and the job was checked when it was made.
        unsafe { run_part(self.level, self, part, memory.as_mut_ptr()) };
        Ok(())
    }

    /// The row of a query and head, counted through all groups.
    fn row(&self, query: usize, head: usize) -> usize {
        let group = self.split.group as usize;
        head / group * self.split.rows + query * group + head % group
    }

    /// Merges the parts of a query and head. With scores, turns them into the attention to each
    /// key.
    ///
    /// # Safety
    /// All parts are done; no two threads run the same end at a time.
    pub unsafe fn end(&self, end: u32) -> Result<()> {
        check_item("end", end, self.ends(), &[], 0)?;
        let heads = self.problem.queries.heads() as usize;
        let row = self.row(end as usize / heads, end as usize % heads);
        let (dim, parts) = (self.problem.values.dim() as usize, self.split.parts);
        let [results, logs, _] = self.split.sizes(&self.problem)?;
        // SAFETY: parts have written their rows, and no other end writes these results.
        unsafe {
            let (from, of) = (self.memory.add(row * parts * dim), self.memory.add(results));
            let of = std::slice::from_raw_parts(of.add(row * parts), parts);
            let out = std::slice::from_raw_parts_mut(self.out.add(end as usize * dim), dim);
            let from = std::slice::from_raw_parts(from, parts * dim);
            let lse = join(out, from, of);
            self.lse.add(end as usize).write(lse);
            if self.split.scores > 0 {
                let scores = self.memory.add(results + logs + row * self.split.scores);
                let cursor = self.split.cursor(&self.problem, (row / self.split.rows) as u32);
                let count = cursor.count().min(self.split.scores);
                shares(self.level, scores, count, self.split.scores, lse);
            }
        }
        Ok(())
    }

    /// Keys in the sums of a head: the most that any head selects, if scores are kept.
    pub fn sum_keys(&self) -> usize {
        self.split.scores
    }

    /// Adds the attention of all queries to each key to `sums`: `[query heads, keys]`, or `[keys]`
    /// for all heads together, in the order of the selected keys. Requires scores, and that all
    /// ends are done.
    pub fn sums(&mut self, is_by_head: bool, sums: &mut [f32]) -> Result<()> {
        // SAFETY: `&mut self`: no other thread uses the job.
        unsafe { self.add_sums(is_by_head, sums) }
    }

    /// The same for a job that threads share.
    ///
    /// # Safety
    /// No thread runs a part or an end at the same time.
    pub unsafe fn add_sums(&self, is_by_head: bool, sums: &mut [f32]) -> Result<()> {
        let (heads, keys) = (self.problem.queries.heads() as usize, self.split.scores);
        let expected = if is_by_head { heads * keys } else { keys };
        if sums.len() != expected {
            fail!(
                Invalid,
                "{} sums were passed, {expected} are kept: open the decode with scores",
                sums.len()
            );
        }
        let select = &self.problem.select;
        let is_one_list = select.heads.len() <= 1 || select.is_dense();
        if !is_by_head && !is_one_list {
            fail!(
                Invalid,
                "heads that select different keys have no common sum: request sums by head"
            );
        }
        if keys == 0 {
            return Ok(());
        }
        let [results, logs, _] = self.split.sizes(&self.problem)?;
        for query in 0..self.problem.queries.tokens() as usize {
            for head in 0..heads {
                let row = results + logs + self.row(query, head) * keys;
                // SAFETY: ends have written the shares, and nothing writes them now.
                let shares = unsafe { std::slice::from_raw_parts(self.memory.add(row), keys) };
                let at = if is_by_head { head * keys } else { 0 };
                sums[at..at + keys]
                    .iter_mut()
                    .zip(shares)
                    .for_each(|(sum, normalizer)| *sum += normalizer);
            }
        }
        Ok(())
    }

    /// Runs all parts and ends on this thread.
    pub fn all(&mut self, memory: &mut [f32]) -> Result<()> {
        // SAFETY: there is one thread.
        (0..self.parts()).try_for_each(|part| unsafe { self.run(part, memory) })?;
        // SAFETY: as above.
        (0..self.ends()).try_for_each(|end| unsafe { self.end(end) })
    }
}

/// Merges the results of parts; returns their log-sum-exp.
fn join(out: &mut [f32], from: &[f32], logs: &[f32]) -> f32 {
    out.fill(0.0);
    let most = logs.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    if most == f32::NEG_INFINITY {
        return most;
    }
    let sum: f32 = logs.iter().map(|log| (log - most).exp()).sum();
    for (part, log) in from.chunks_exact(out.len()).zip(logs) {
        let normalizer = (log - most).exp() / sum;
        out.iter_mut().zip(part).for_each(|(out, x)| *out += x * normalizer);
    }
    most + sum.ln()
}

levels! {
    /// One part of a decode.
    run_part = decode_part(job: &Decode<'_>, part: u32, memory: *mut f32)
}

/// # Safety
/// The part is one of the job's, and no other thread runs it; memory has the job's scratch size.
#[inline(always)]
unsafe fn decode_part<L: Lanes, const R: usize>(job: &Decode<'_>, part: u32, memory: *mut f32) {
    let (problem, split) = (&job.problem, &job.split);
    // SAFETY: guaranteed by the caller; sizes are those of `KvSplit::sizes`.
    unsafe {
        if job.is_narrow() {
            let is_bf16 = applies(job.level, &problem.queries, &problem.keys);
            let (part, results) = (part as usize, job.memory);
            narrow::attend::<L, R>(&Part { problem, split, part, is_bf16, memory, results });
            return;
        }
        let (group, part) = (part % split.groups, (part / split.groups) as usize);
        let mut cursor = split.cursor(problem, group);
        cursor.skip(part * PART_KEYS);
        let place = split.place(problem, (group, part), job.memory);
        let scratch = PanelScratch::new(problem, split.rows.min(MAX_COLUMNS), L::WIDTH, memory);
        for done in (0..split.rows).step_by(MAX_COLUMNS) {
            let columns = split.columns(group, done, (split.rows - done).min(MAX_COLUMNS));
            panel::attend::<L, R>(problem, &columns, None, (cursor, PART_KEYS), &scratch, &place);
        }
    }
}

levels! {
    /// Turns scores into shares of attention by the log-sum-exp of all of them; 0 from `count` on.
    shares = to_shares(scores: *mut f32, count: usize, all: usize, lse: f32)
}

/// # Safety
/// `scores` has `all` numbers.
#[inline(always)]
unsafe fn to_shares<L: Lanes, const R: usize>(
    scores: *mut f32,
    count: usize,
    all: usize,
    lse: f32,
) {
    let log = if lse > f32::NEG_INFINITY { lse * std::f32::consts::LOG2_E } else { f32::INFINITY };
    let mut i = 0;
    // SAFETY: guaranteed by the caller.
    unsafe {
        while i + L::N <= count {
            let at = scores.add(i);
            L::load(at).sub(L::splat(log)).exp2().store(at);
            i += L::N;
        }
        while i < count {
            *scores.add(i) = Portable::splat(*scores.add(i) - log).exp2().first();
            i += 1;
        }
        (count..all).for_each(|i| scores.add(i).write(0.0));
    }
}
