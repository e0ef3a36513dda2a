//! Properties of a trace that do not depend on a cache: the hits of an unbounded cache, the
//! sessions, and the next use of each block.

use crate::base::status::Result;
use crate::fail;
use crate::meta::cost::Cost;
use crate::trace::requests::{IdMap, Request, Trace};

/// No further use.
pub const NEVER: u32 = u32::MAX;

/// Properties of a trace, whatever the policy.
pub struct Study {
    /// For each request, its leading blocks that were seen before.
    pub reusable_blocks: Vec<u32>,
    /// For each request, the number of its session, from 0.
    pub sessions: Vec<u32>,
    /// Number of sessions.
    pub session_count: usize,
    /// Whether the trace names the sessions; otherwise they are inferred from the paths.
    pub sessions_named: bool,
    /// Totals of an unbounded cache.
    pub floor: Floor,
}

/// Totals of an unbounded cache, and of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Floor {
    /// Blocks requested.
    pub references: u64,
    /// Blocks seen before.
    pub hits: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens in blocks seen before.
    pub hit_tokens: u64,
    /// Recompute cost of everything requested.
    pub cost: f64,
    /// Recompute cost of blocks seen before.
    pub hit_cost: f64,
}

impl Study {
    /// Studies a trace.
    pub fn of(trace: &Trace, cost: &Cost) -> Result<Study> {
        let mut study = Study {
            reusable_blocks: zeros(trace.requests().len())?,
            sessions: zeros(trace.requests().len())?,
            session_count: 0,
            sessions_named: true,
            floor: Floor::default(),
        };
        study.number_sessions(trace)?;
        let mut seen: Vec<u8> = zeros(trace.uniques())?;
        for (r, request) in trace.requests().iter().enumerate() {
            let path = trace.dense(request);
            // Ids are prefixes: behind the first new one all are new.
            let leading = path.iter().take_while(|&&b| seen[b as usize] != 0).count();
            path[leading..].iter().for_each(|&b| seen[b as usize] = 1);
            study.reusable_blocks[r] = leading as u32;
            study.floor.add(request, leading, trace.block_tokens(), cost);
        }
        Ok(study)
    }

    /// Numbers the sessions. Without names in the trace, a request continues the session that ended
    /// at the deepest block that both share: the last block of the earlier request, or the one
    /// before it, which is the last full one. Blocks seen in other sessions before, and first
    /// blocks, do not end a session: they are common prompts.
    fn number_sessions(&mut self, trace: &Trace) -> Result<()> {
        self.sessions_named = trace.requests().iter().any(|r| r.session.is_some());
        let mut named: IdMap<u32> = IdMap::default();
        let mut ends: Vec<u32> = zeros(trace.uniques())?;
        let mut seen: Vec<u8> = zeros(trace.uniques())?;
        for (r, request) in trace.requests().iter().enumerate() {
            let new = self.session_count as u32;
            let path = trace.dense(request);
            let known = path.iter().take_while(|&&b| seen[b as usize] != 0).count();
            let number = match request.session {
                Some(id) => *named.entry(id).or_insert(new),
                None => {
                    let deepest = path[..known].last();
                    deepest.and_then(|&b| ends[b as usize].checked_sub(1)).unwrap_or(new)
                }
            };
            self.session_count += usize::from(number == new);
            self.sessions[r] = number;
            path.iter().for_each(|&b| seen[b as usize] = 1);
            for (i, &b) in path.iter().enumerate().skip(path.len().saturating_sub(2).max(1)) {
                if i >= known {
                    ends[b as usize] = number + 1;
                }
            }
        }
        Ok(())
    }
}

impl Floor {
    pub(super) fn add(&mut self, request: &Request, leading: usize, each: u32, cost: &Cost) {
        let (all, hit) = (u64::from(request.input_tokens), request.tokens_of(leading, each));
        self.references += request.len() as u64;
        self.hits += leading as u64;
        self.tokens += all;
        self.hit_tokens += hit;
        self.cost += cost.of(0, all);
        self.hit_cost += cost.of(0, hit);
    }
}

/// For every reference, the number of the request that uses its block next, or [`NEVER`]: the input
/// of the optimal policy.
pub fn next_uses(trace: &Trace) -> Result<Vec<u32>> {
    let mut next: Vec<u32> = zeros(trace.references())?;
    let mut later: Vec<u32> = zeros(trace.uniques())?;
    later.fill(NEVER);
    for (r, request) in trace.requests().iter().enumerate().rev() {
        for at in request.range() {
            let block = trace.all_dense()[at] as usize;
            next[at] = std::mem::replace(&mut later[block], r as u32);
        }
    }
    Ok(next)
}

/// A vector of zeros, or an error instead of an abort.
pub fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut out = Vec::new();
    if out.try_reserve_exact(len).is_err() {
        fail!(NoMem, "no memory for {len} numbers");
    }
    out.resize(len, T::default());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::requests::Builder;

    #[test]
    fn sessions_are_inferred_from_paths_and_next_uses_are_found() {
        let mut b = Builder::new(10).expect("tokens");
        for (at_ns, path) in
            [(0, &[1, 2, 3][..]), (1, &[1, 4, 5]), (2, &[1, 2, 6, 7]), (3, &[1, 4, 5, 8])]
        {
            let input_tokens = path.len() as u32 * 10;
            b.push(Request { at_ns, input_tokens, ..Request::default() }, path).expect("room");
        }
        let trace = b.finish().expect("a forest");
        let study = Study::of(&trace, &Cost { alpha: 0.0, beta: 1.0 }).expect("memory");
        assert_eq!((study.sessions, study.session_count), (vec![0, 1, 0, 1], 2));
        assert_eq!(study.reusable_blocks, [0, 1, 2, 3]);
        assert_eq!((study.floor.hit_tokens, study.floor.hit_cost), (60, 60.0));
        let next = next_uses(&trace).expect("memory");
        assert_eq!(next[..6], [1, 2, NEVER, 2, 3, 3]);
    }
}
