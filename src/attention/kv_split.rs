//! Splits a decode into parts by keys alone, so that results do not depend on threads.

use crate::attention::key_cursor::KeyCursor;
use crate::attention::keys::Kind;
use crate::attention::limits::Limits;
use crate::attention::panel::{Columns, OutputRows, TILE};
use crate::attention::problem::Problem;
use crate::base::status::Result;
use crate::fail;

/// Keys of a part.
pub const PART_KEYS: usize = 1024;

/// The split of a decode.
#[derive(Clone, Copy, Debug)]
pub struct KvSplit {
    /// Query heads of a group: they share a head of keys and its selection.
    pub group: u32,
    /// Groups.
    pub groups: u32,
    /// Rows of a group.
    pub rows: usize,
    /// Parts of a group.
    pub parts: usize,
    /// Keys of the largest group; 0 if no scores are kept.
    pub scores: usize,
}

/// Fails with `Unsupported` unless all queries share one list of blocks.
fn can_follow(problem: &Problem<'_>) -> Result<()> {
    for at in 0..problem.select.heads.len() {
        let keys = problem.select.at(at);
        if !matches!(keys.kind(problem.first_query), Kind::Dense | Kind::Blocks) {
            fail!(Unsupported, "decode follows blocks only, not lines or ranges: use prefill");
        }
        if keys.until(0, problem.first_query) < problem.queries.tokens() {
            fail!(
                Unsupported,
                "decode needs one row of queries with one list: use prefill for several"
            );
        }
    }
    Ok(())
}

impl KvSplit {
    /// Splits a problem, if it can be decoded.
    pub fn new(problem: &Problem<'_>, keeps_scores: bool) -> Result<KvSplit> {
        problem.check()?;
        can_follow(problem)?;
        let heads = problem.heads();
        let group = if problem.select.is_shared(heads) { heads.queries / heads.keys } else { 1 };
        let groups = heads.queries / group;
        let mut split = KvSplit {
            group,
            groups,
            rows: problem.queries.tokens() as usize * group as usize,
            parts: 0,
            scores: 0,
        };
        let most = (0..groups).map(|g| split.cursor(problem, g).count()).max().unwrap_or(0);
        split.parts = most.div_ceil(PART_KEYS).max(1);
        split.scores = if keeps_scores { most } else { 0 };
        Ok(split)
    }

    /// The split of the largest problem within the limits: as many groups as heads.
    pub fn largest(limits: &Limits) -> KvSplit {
        let keys = limits.keys as usize;
        KvSplit {
            group: 1,
            groups: limits.query_heads,
            rows: limits.queries as usize,
            parts: keys.div_ceil(PART_KEYS).max(1),
            scores: if limits.keeps_scores { keys } else { 0 },
        }
    }

    /// All keys of a group.
    pub fn cursor<'a>(&self, problem: &Problem<'a>, group: u32) -> KeyCursor<'a> {
        let queries = problem.queries.tokens();
        let visible_keys = queries.checked_sub(1).map_or(0, |last| problem.visible_keys(last));
        let keys = problem.select.of(problem.heads(), group * self.group);
        keys.cursor(0, (problem.first_query, queries), (problem.first_key, visible_keys))
    }

    /// Rows of all groups.
    pub fn all_rows(&self) -> usize {
        self.rows * self.groups as usize
    }

    /// Numbers for results of parts, their log-sum-exps, and scores.
    pub fn sizes(&self, problem: &Problem<'_>) -> Result<[usize; 3]> {
        let rows = self.all_rows().checked_mul(self.parts);
        let results = rows.and_then(|rows| rows.checked_mul(problem.values.dim() as usize));
        let scores = self.all_rows().checked_mul(self.scores);
        match (results, rows, scores) {
            (Some(a), Some(b), Some(c)) if a.max(b).max(c) <= usize::MAX / 16 => Ok([a, b, c]),
            _ => fail!(
                Limit,
                "{} rows of {} parts exceed the address space",
                self.all_rows(),
                self.parts
            ),
        }
    }

    /// Puts the keys of a tile of a part of a group into `tokens`; returns their number.
    pub fn tile(
        &self,
        problem: &Problem<'_>,
        (group, part, tile): (u32, usize, usize),
        tokens: &mut [u32; TILE],
    ) -> usize {
        let mut cursor = self.cursor(problem, group);
        cursor.skip(part * PART_KEYS + tile * TILE);
        cursor.take(tokens, TILE)
    }

    /// The rows of a group, as columns of panels.
    pub fn columns(&self, group: u32, skip: usize, count: usize) -> Columns {
        let first_head = group * self.group;
        Columns { first_query: 0, first_head, heads: self.group, skip: skip as u32, count }
    }

    /// Where a part of a group writes its results.
    ///
    /// # Safety
    /// `memory` has [`KvSplit::sizes`] numbers.
    pub unsafe fn place(
        &self,
        problem: &Problem<'_>,
        (group, part): (u32, usize),
        memory: *mut f32,
    ) -> OutputRows {
        let (row, dim) = (group as usize * self.rows, problem.values.dim() as usize);
        let all = self.all_rows() * self.parts;
        // SAFETY: results come first, then log-sum-exps, then scores.
        unsafe {
            let logs = memory.add(all * dim);
            let scores = logs.add(all + row * self.scores + part * PART_KEYS);
            OutputRows {
                out: memory.add((row * self.parts + part) * dim),
                lse: logs.add(row * self.parts + part),
                step: self.parts,
                scores: if self.scores == 0 { std::ptr::null_mut() } else { scores },
                scores_step: self.scores,
            }
        }
    }
}
