//! Attention of a prompt, or of a part of one: dense or over selected keys.

use std::marker::PhantomData;

use crate::attention::keys::Kind;
use crate::attention::lanes::Lanes;
use crate::attention::level::{Level, levels};
use crate::attention::limits::{Limits, Workspace};
use crate::attention::panel::{Columns, OutputRows, PanelScratch, attend, bit_words, scratch};
use crate::attention::problem::{Problem, check_item};
use crate::attention::visibility::mark_diagonals;
use crate::base::status::Result;
use crate::fail;

/// Queries of a work item.
pub const QUERIES: u32 = 64;

/// A prefill, cut into work items that any thread may run in any order. The bits do not depend on
/// that.
///
/// An item is 64 queries of a head. Items of a head follow each other, since they read the same
/// keys, and those with the most keys come first.
#[derive(Debug)]
pub struct Prefill<'a> {
    problem: Problem<'a>,
    level: Level,
    out: *mut f32,
    lse: *mut f32,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: items write to disjoint memory, and `run` requires that each is run by one thread.
unsafe impl Send for Prefill<'_> {}
// SAFETY: as above.
unsafe impl Sync for Prefill<'_> {}

impl<'a> Prefill<'a> {
    /// Memory that suffices for all prefills within the limits.
    pub fn workspace(limits: &Limits) -> Result<Workspace> {
        // SAFETY: only sizes are read.
        let problem = unsafe { limits.problem()? };
        Ok(Workspace { memory: 0, scratch: scratch(&problem, QUERIES as usize) })
    }

    /// A prefill that writes `[S, query heads, Dv]` to `out`, and `[S, query heads]` to `lse`. A
    /// query that sees no key gets zeros and -inf.
    pub fn new(
        problem: Problem<'a>,
        out: &'a mut [f32],
        lse: Option<&'a mut [f32]>,
    ) -> Result<Prefill<'a>> {
        problem.check()?;
        let rows = problem.queries.tokens() as usize * problem.queries.heads() as usize;
        let numbers = rows.saturating_mul(problem.values.dim() as usize);
        if out.len() < numbers {
            fail!(TooSmall, "out has {} numbers, {numbers} are needed", out.len());
        }
        if let Some(lse) = lse.as_ref().filter(|lse| lse.len() < rows) {
            fail!(TooSmall, "lse has {} numbers, {rows} are needed", lse.len());
        }
        let lse = lse.map_or(std::ptr::null_mut(), |lse| lse.as_mut_ptr());
        let (level, out) = (Level::best(), out.as_mut_ptr());
        Ok(Prefill { problem, level, out, lse, lent: PhantomData })
    }

    /// Selects instructions; the best supported level if the processor lacks them.
    pub fn with_level(mut self, level: Level) -> Prefill<'a> {
        self.level = if level.is_supported() { level } else { Level::best() };
        self
    }

    /// Number of work items.
    pub fn items(&self) -> u32 {
        self.problem.queries.tokens().div_ceil(QUERIES) * self.problem.queries.heads()
    }

    /// Numbers of scratch that each thread needs.
    pub fn scratch(&self) -> usize {
        scratch(&self.problem, QUERIES as usize)
    }

    /// Runs a work item.
    ///
    /// # Safety
    /// No two threads run the same item at a time.
    pub unsafe fn run(&self, item: u32, memory: &mut [f32]) -> Result<()> {
        check_item("item", item, self.items(), memory, self.scratch())?;
        // SAFETY: the level is supported, and the job was checked when it was made.
        unsafe { run_item(self.level, self, item, memory.as_mut_ptr()) };
        Ok(())
    }

    /// Runs all work items on this thread.
    pub fn all(&mut self, memory: &mut [f32]) -> Result<()> {
        // SAFETY: there is one thread.
        (0..self.items()).try_for_each(|item| unsafe { self.run(item, memory) })
    }
}

levels! {
    /// One work item of a prefill.
    run_item = prefill_item(job: &Prefill<'_>, item: u32, memory: *mut f32)
}

/// # Safety
/// The item is one of the job's, and no other thread runs it; memory has the job's scratch size.
#[inline(always)]
unsafe fn prefill_item<L: Lanes, const R: usize>(job: &Prefill<'_>, item: u32, memory: *mut f32) {
    let problem = &job.problem;
    let (queries, heads) = (problem.queries.tokens(), problem.queries.heads());
    // The last queries see the most keys, so they start first.
    let tiles = queries.div_ceil(QUERIES);
    let (mut query, head) = ((tiles - 1 - item % tiles) * QUERIES, item / tiles);
    let end = (query + QUERIES).min(queries);
    let keys = problem.select.of(problem.heads(), head);
    // SAFETY: guaranteed by the caller; rows of `out` and `lse` are those of query and head.
    unsafe {
        let scratch = PanelScratch::new(problem, QUERIES as usize, L::WIDTH, memory);
        if let Some(lines) = keys.lines(problem.first_query + query) {
            mark_diagonals(
                &lines,
                std::slice::from_raw_parts_mut(scratch.bits, bit_words(problem)),
            );
        }
        while query < end {
            let (position, until) =
                (problem.first_query + query, keys.until(query, problem.first_query));
            let until = match keys.kind(position) {
                // Queries see different keys: short runs of them share most.
                Kind::Lines => until.min(query + L::WIDTH as u32),
                _ => until,
            };
            let until = until.min(end);
            let count = (until - query) as usize;
            let columns =
                Columns { first_query: query, first_head: head, heads: 1, skip: 0, count };
            let visible_keys = problem.visible_keys(until - 1);
            let cursor =
                keys.cursor(query, (position, count as u32), (problem.first_key, visible_keys));
            let row = query as usize * heads as usize + head as usize;
            let place = OutputRows {
                out: job.out.add(row * problem.values.dim() as usize),
                lse: if job.lse.is_null() { job.lse } else { job.lse.add(row) },
                step: heads as usize,
                scores: std::ptr::null_mut(),
                scores_step: 0,
            };
            let lines = keys.lines(position);
            attend::<L, R>(problem, &columns, lines, (cursor, usize::MAX), &scratch, &place);
            query = until;
        }
    }
}
