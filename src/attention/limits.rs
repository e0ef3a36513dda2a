//! How large problems may become, for those who lend memory once.

use crate::attention::keys::{Head, Keys, Kind};
use crate::attention::problem::{MAX_TOKENS, Problem};
use crate::attention::rows::{MAX_DIM, Rows};
use crate::base::status::Result;
use crate::fail;

/// The largest that problems become, each of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Queries of a problem.
    pub queries: u32,
    /// Keys of a problem.
    pub keys: u32,
    /// Positions: where the last query of a text may end.
    pub tokens: u32,
    /// Heads of queries; there may be as many of keys.
    pub query_heads: u32,
    /// Numbers of a query and a key.
    pub dim: u32,
    /// Numbers of a value.
    pub value_dim: u32,
    /// A decode keeps scores.
    pub keeps_scores: bool,
}

/// Numbers of f32 that no job of some limits needs more of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Of a job, beside its results.
    pub memory: usize,
    /// Of each thread.
    pub scratch: usize,
}

/// The form of which kernels need the most.
const LINES: [Head; 1] = [Head { kind: Kind::Lines, ..Head::DENSE }];

impl Limits {
    /// Whether there can be problems of these sizes.
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
            fail!(Invalid, "{name} is {n}, it can be 1 to {most}");
        }
        Ok(())
    }

    /// The largest problem, of which nothing is there: to ask what is needed for it.
    ///
    /// # Safety
    /// None of its rows is read.
    pub(super) unsafe fn problem(&self) -> Result<Problem<'static>> {
        self.check()?;
        let rows = |tokens, dim| {
            // SAFETY: the caller's promise.
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
