//! Upper limits of problems, for callers that allocate workspaces once.

use crate::attention::keys::{Head, Keys, Kind};
use crate::attention::problem::{MAX_TOKENS, Problem};
use crate::attention::rows::{MAX_DIM, Rows};
use crate::base::status::Result;
use crate::fail;

/// The largest sizes of problems, each on its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Queries of a problem.
    pub queries: u32,
    /// Keys of a problem.
    pub keys: u32,
    /// Positions: the largest end of a sequence.
    pub tokens: u32,
    /// Query heads; there may be as many heads of keys.
    pub query_heads: u32,
    /// Numbers of a query and a key.
    pub dim: u32,
    /// Numbers of a value.
    pub value_dim: u32,
    /// Whether decodes keep scores.
    pub keeps_scores: bool,
}

/// Memory that suffices for every job within some limits, in f32 numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Memory of a job, without its results.
    pub memory: usize,
    /// Scratch of each thread.
    pub scratch: usize,
}

/// The form of index for which kernels need the most scratch.
const LINES: [Head; 1] = [Head { kind: Kind::Lines, ..Head::DENSE }];

impl Limits {
    /// Checks that problems of these sizes are possible.
    pub fn check(&self) -> Result<()> {
        let counts = [
            ("queries", self.queries, self.tokens),
            ("keys", self.keys, MAX_TOKENS),
            ("tokens", self.tokens, MAX_TOKENS),
            ("query_heads", self.query_heads, u32::MAX / self.queries.max(1)),
            ("dim", self.dim, MAX_DIM),
            ("value_dim", self.value_dim, MAX_DIM),
        ];
        if let Some((name, n, most)) = counts.into_iter().find(|&(_, n, most)| n == 0 || n > most) {
            fail!(Invalid, "{name} is {n}, it must be 1 to {most}");
        }
        Ok(())
    }

    /// The largest problem, without memory: only its sizes may be read.
    ///
    /// # Safety
    /// None of its rows is read.
    pub(super) unsafe fn problem(&self) -> Result<Problem<'static>> {
        self.check()?;
        let rows = |tokens, dim| {
            // SAFETY: guaranteed by the caller.
            unsafe { Rows::unmapped(tokens, self.query_heads, dim) }
        };
        Ok(Problem {
            queries: rows(self.queries, self.dim),
            keys: rows(self.keys, self.dim),
            values: rows(self.keys, self.value_dim),
            first_key: 0,
            first_query: self.tokens - self.queries,
            scale: 0.0,
            select: Keys { heads: &LINES, ..Keys::DENSE },
        })
    }
}
