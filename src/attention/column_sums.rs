//! Column sums: the attention of a prompt's queries to each key, from log-sum-exps, without the
//! probabilities in memory. Works for sparse attention, too: runs of queries skip keys that none of
//! them sees.

use std::marker::PhantomData;

use crate::attention::element::read;
use crate::attention::keys::{HeadKeys, Kind};
use crate::attention::lanes::{Lanes, MAX_WIDTH};
use crate::attention::level::{Level, levels};
use crate::attention::limits::{Limits, Workspace};
use crate::attention::panel::{Columns, TILE, bit_words, pack, product};
use crate::attention::problem::{Problem, check_item};
use crate::attention::visibility::{QueryRun, mark_diagonals, visible_masks};
use crate::base::status::Result;
use crate::fail;

/// Tiles of a work item.
const TILES: usize = 4;
/// Keys of a work item.
pub const KEYS: usize = TILES * TILE;

/// Column sums, cut into work items that any thread may run in any order. The bits do not depend on
/// that.
///
/// This is a second pass over keys and queries. A [`Prefill`](super::Prefill) by the same index has
/// computed the log-sum-exps; it costs twice as much as this pass.
#[derive(Debug)]
pub struct ColumnSums<'a> {
    problem: Problem<'a>,
    level: Level,
    lse: &'a [f32],
    first: u32,
    is_by_head: bool,
    out: *mut f32,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: items write to disjoint memory, and `run` requires that each is run by one thread.
unsafe impl Send for ColumnSums<'_> {}
// SAFETY: as above.
unsafe impl Sync for ColumnSums<'_> {}

/// Numbers of scratch.
fn scratch(problem: &Problem<'_>) -> usize {
    let dim = problem.keys.dim() as usize;
    KEYS * (dim + MAX_WIDTH / 2) + TILE * MAX_WIDTH + dim * MAX_WIDTH + words(problem)
}

/// Words of the diagonal bits; 0 without diagonals.
fn words(problem: &Problem<'_>) -> usize {
    let has_lines = problem.select.heads.iter().any(|head| head.kind == Kind::Lines);
    if has_lines { bit_words(problem) } else { 0 }
}

impl<'a> ColumnSums<'a> {
    /// Memory that suffices for all problems within the limits.
    pub fn workspace(limits: &Limits) -> Result<Workspace> {
        // SAFETY: only sizes are read.
        let problem = unsafe { limits.problem()? };
        Ok(Workspace { memory: 0, scratch: scratch(&problem) })
    }

    /// Sums over the queries from `first` on: `[query heads, N]`, or `[N]` for all heads together.
    /// `lse` holds the log-sum-exps of all queries over all keys that they see. If keys came in
    /// pieces, it is the merged one.
    pub fn new(
        problem: Problem<'a>,
        lse: &'a [f32],
        first: u32,
        is_by_head: bool,
        out: &'a mut [f32],
    ) -> Result<ColumnSums<'a>> {
        problem.check()?;
        let (queries, heads) = (problem.queries.tokens(), problem.queries.heads() as usize);
        if lse.len() != queries as usize * heads || first > queries {
            fail!(
                Invalid,
                "{} log-sum-exps for {queries} queries by {heads} heads, sums from query {first} on",
                lse.len()
            );
        }
        let keys = problem.keys.tokens() as usize;
        let expected = if is_by_head { keys * heads } else { keys };
        if out.len() != expected {
            fail!(Invalid, "{} sums were passed, {expected} are needed", out.len());
        }
        let items = keys.div_ceil(KEYS).saturating_mul(heads);
        if items > u32::MAX as usize {
            fail!(Limit, "sums of {keys} keys by {heads} heads exceed 2^32 - 1 work items");
        }
        let (level, out) = (Level::best(), out.as_mut_ptr());
        Ok(ColumnSums { problem, level, lse, first, is_by_head, out, lent: PhantomData })
    }

    /// Selects instructions; the best supported level if the processor lacks them.
    pub fn with_level(mut self, level: Level) -> ColumnSums<'a> {
        self.level = if level.is_supported() { level } else { Level::best() };
        self
    }

    /// Number of work items.
    pub fn items(&self) -> u32 {
        let heads = if self.is_by_head { self.problem.queries.heads() } else { 1 };
        self.problem.keys.tokens().div_ceil(KEYS as u32) * heads
    }

    /// Numbers of scratch that each thread needs.
    pub fn scratch(&self) -> usize {
        scratch(&self.problem)
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
    /// One work item of column sums.
    run_item = sum_item(job: &ColumnSums<'_>, item: u32, memory: *mut f32)
}

/// # Safety
/// The item is one of the job's, and no other thread runs it; memory has the job's scratch size.
#[inline(always)]
unsafe fn sum_item<L: Lanes, const R: usize>(job: &ColumnSums<'_>, item: u32, memory: *mut f32) {
    let problem = &job.problem;
    let (heads, keys) = (problem.queries.heads(), problem.keys.tokens());
    let dim = problem.keys.dim() as usize;
    let (of, first) = match job.is_by_head {
        true => (item % heads..item % heads + 1, item / heads * KEYS as u32),
        false => (0..heads, item * KEYS as u32),
    };
    let row = if job.is_by_head { of.start as usize * keys as usize } else { 0 };
    let count = (keys - first).min(KEYS as u32) as usize;
    let mut tokens = [0_u32; KEYS];
    tokens.iter_mut().zip(first..).for_each(|(token, key)| *token = key);
    // SAFETY: laid out as in `scratch`; the sums are those of these keys.
    unsafe {
        let scores = memory.add(KEYS * (dim + MAX_WIDTH / 2));
        let queries = scores.add(TILE * MAX_WIDTH);
        let bits = queries.add(dim * MAX_WIDTH).cast();
        let bits = std::slice::from_raw_parts_mut(bits, words(problem));
        let rows = Rows { keys: memory, sums: memory.add(KEYS * dim), scores, queries };
        (0..count * L::N).for_each(|i| rows.sums.add(i).write(0.0));
        let mut key_head = u32::MAX;
        for head in of {
            if problem.key_head(head) != key_head {
                key_head = problem.key_head(head);
                read::<L>(&problem.keys, key_head, &tokens[..count], rows.keys);
            }
            let head_keys = problem.select.of(problem.heads(), head);
            if let Some(lines) = head_keys.lines(problem.first_query) {
                mark_diagonals(&lines, bits);
            }
            add_head::<L, R>(job, (head, &head_keys, bits), (first, count), &rows);
        }
        for i in 0..count {
            let sum = L::load(rows.sums.add(i * L::N)).sum();
            job.out.add(row + first as usize + i).write(sum);
        }
    }
}

/// Scratch of one thread.
struct Rows {
    keys: *mut f32,
    sums: *mut f32,
    scores: *mut f32,
    queries: *mut f32,
}

/// Adds the attention of a head to the sums of keys.
///
/// # Safety
/// As of [`one`]; `bits` are the head's diagonals.
#[inline(always)]
unsafe fn add_head<L: Lanes, const R: usize>(
    job: &ColumnSums<'_>,
    (head, keys, bits): (u32, &HeadKeys<'_>, &[u32]),
    (first, count): (u32, usize),
    rows: &Rows,
) {
    let problem = &job.problem;
    let (queries, heads) = (problem.queries.tokens(), problem.queries.heads() as usize);
    let (first, first_query) = (problem.first_key + first, problem.first_query);
    let mut masks = [0; KEYS];
    // Queries before the first key see none of these keys.
    let mut query = job.first.max(first.saturating_sub(first_query));
    while query < queries {
        let used = (queries - query).min(L::WIDTH as u32);
        let columns = Columns {
            first_query: query,
            first_head: head,
            heads: 1,
            skip: 0,
            count: used as usize,
        };
        // Lanes without a query add nothing.
        let mut logs = [f32::INFINITY; MAX_WIDTH];
        for (log, q) in logs.iter_mut().zip(query as usize..).take(used as usize) {
            let lse = job.lse[q * heads + head as usize];
            *log = if lse > f32::NEG_INFINITY { lse * std::f32::consts::LOG2_E } else { *log };
        }
        let last = first_query + query + used - 1;
        let masks = &mut masks[..count.min((last + 1 - first) as usize)];
        let run = QueryRun { query, count: used, first_query };
        if visible_masks(keys, bits, &run, first, masks) {
            let scale = problem.binary_scale();
            // The first lane sees keys up to this one; each next lane sees one more.
            let first_visible = i64::from(first_query + query) - i64::from(first);
            // SAFETY: guaranteed by the caller; the keys exist.
            unsafe {
                pack::<L>(problem, &columns, scale, rows.scores, (rows.queries, 0));
                add_seen::<L, R>(problem, &logs, (first_visible, masks), rows);
            }
        }
        query += used;
    }
}

/// Adds to each key the attention of the packed queries in its mask.
///
/// # Safety
/// As of [`one`]; there are as many keys as masks.
#[inline(always)]
unsafe fn add_seen<L: Lanes, const R: usize>(
    problem: &Problem<'_>,
    logs: &[f32; MAX_WIDTH],
    (first_visible, masks): (i64, &[u32]),
    rows: &Rows,
) {
    let dim = problem.keys.dim() as usize;
    let mut from = 0;
    while let Some(masks) = masks.get(from..).filter(|masks| !masks.is_empty()) {
        if masks[0] == 0 {
            from += 1;
            continue;
        }
        // Visible keys, up to the end of a tile.
        let most = TILE - from % TILE;
        let n = masks.iter().take(most).take_while(|&&mask| mask != 0).count();
        // SAFETY: guaranteed by the caller.
        unsafe {
            let keys = rows.keys.add(from * dim);
            product::<L, R>(keys, (dim, 1), n, rows.queries, dim, rows.scores, None, || {});
            for half in [0, L::N] {
                let logs = L::load(logs.as_ptr().add(half));
                for (i, &mask) in masks.iter().enumerate().take(n) {
                    let ahead = ((from + i) as i64 - first_visible - half as i64).clamp(0, 32);
                    let bits = (u64::from(u32::MAX) << ahead) as u32 & mask >> half;
                    let normalizer = L::load(rows.scores.add(i * L::WIDTH + half)).sub(logs);
                    let normalizer = normalizer.keep(bits).exp2();
                    let sum = rows.sums.add((from + i) * L::N);
                    L::load(sum).add(normalizer).store(sum);
                }
            }
        }
        from += n;
    }
}
