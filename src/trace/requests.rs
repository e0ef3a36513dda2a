//! Requests in the order of time, each with a path of blocks.
//!
//! A block's id stands for its whole prefix, so an id has exactly one parent. The builder checks
//! this. Hence a path never contains a block twice, and the blocks of all requests form a forest.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use crate::base::status::Result;
use crate::fail;
use crate::meta::index;
use crate::meta::sessions::Stop;

/// Most requests of one trace.
pub const MAX_REQUESTS: usize = 1 << 26;
/// Most blocks of all requests together.
pub const MAX_REFERENCES: usize = 1 << 28;
/// Most blocks of one request.
pub const MAX_REQUEST_BLOCKS: usize = 1 << 22;
/// Most tokens of one block.
pub const MAX_BLOCK_TOKENS: u32 = 1 << 20;
/// Times are between this and its negative: 146 years each way.
pub const MAX_TIME_NS: i64 = i64::MAX / 2;

const NO_PARENT: u32 = u32::MAX;

/// A request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Request {
    /// Time of arrival.
    pub at_ns: i64,
    /// The session that it continues, where known.
    pub session: Option<u64>,
    /// Tenant of the session.
    pub tenant: u32,
    /// Class; 0 is evicted first, 1 is normal.
    pub priority: u8,
    /// Stop reason.
    pub stop: Stop,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Tokens produced.
    pub output_tokens: u32,
    /// Time until the session's next request; 0 = unknown.
    pub think_ns: i64,
    /// Start of its path among all references; set by the builder.
    pub first: u32,
    /// Length of its path; set by the builder.
    pub blocks: u32,
}

impl Request {
    /// Number of blocks of its prompt.
    pub fn len(&self) -> usize {
        self.blocks as usize
    }

    /// Whether the prompt has no blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Range of its blocks among all references.
    pub fn range(&self) -> Range<usize> {
        self.first as usize..self.first as usize + self.blocks as usize
    }

    /// Tokens of its first `blocks` blocks, `each` tokens a block.
    pub fn tokens_of(&self, blocks: usize, each: u32) -> u64 {
        (blocks as u64 * u64::from(each)).min(u64::from(self.input_tokens))
    }
}

/// Requests in the order of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    block_tokens: u32,
    requests: Vec<Request>,
    ids: Vec<u64>,
    dense: Vec<u32>,
    uniques: usize,
}

impl Trace {
    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// The requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The path of a request.
    pub fn blocks(&self, request: &Request) -> &[u64] {
        &self.ids[request.range()]
    }

    /// The path as numbers below [`Trace::uniques`].
    pub fn dense(&self, request: &Request) -> &[u32] {
        &self.dense[request.range()]
    }

    /// All references as numbers below [`Trace::uniques`], request by request; [`Request::range`]
    /// gives the range of one.
    pub fn all_dense(&self) -> &[u32] {
        &self.dense
    }

    /// Blocks of all requests together.
    pub fn references(&self) -> usize {
        self.ids.len()
    }

    /// Number of distinct blocks: the footprint.
    pub fn uniques(&self) -> usize {
        self.uniques
    }

    /// Time from the first request to the last.
    pub fn duration_ns(&self) -> i64 {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => last.at_ns - first.at_ns,
            _ => 0,
        }
    }

    /// A trace with one request for each reference, as caches of equal objects without prefixes see
    /// it.
    pub fn flat(&self) -> Result<Trace> {
        let mut out = Builder::new(self.block_tokens)?;
        for request in &self.requests {
            let reference =
                Request { input_tokens: self.block_tokens, output_tokens: 0, ..*request };
            for &id in self.blocks(request) {
                out.push(reference, &[id])?;
            }
        }
        out.finish()
    }

    /// The first `requests` requests of the trace.
    pub fn head(&self, requests: usize) -> Result<Trace> {
        let mut out = Builder::new(self.block_tokens)?;
        for request in self.requests.iter().take(requests) {
            out.push(*request, self.blocks(request))?;
        }
        out.finish()
    }
}

/// Hashes ids without randomness, so that runs are repeatable.
#[derive(Clone, Copy, Default)]
pub struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = index::hash(self.0.rotate_left(23) ^ n);
    }
}

/// A map keyed by id with the same iteration order in every run.
pub type IdMap<T> = HashMap<u64, T, BuildHasherDefault<IdHasher>>;

/// Builds a trace of requests in any order.
pub struct Builder {
    block_tokens: u32,
    requests: Vec<Request>,
    ids: Vec<u64>,
}

impl Builder {
    /// A builder for blocks of this many tokens.
    pub fn new(block_tokens: u32) -> Result<Builder> {
        if block_tokens == 0 || block_tokens > MAX_BLOCK_TOKENS {
            fail!(Limit, "blocks of {block_tokens} tokens, allowed is 1 to {MAX_BLOCK_TOKENS}");
        }
        Ok(Builder { block_tokens, requests: Vec::new(), ids: Vec::new() })
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Number of requests so far.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no requests.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request with its path, root first.
    pub fn push(&mut self, request: Request, path: &[u64]) -> Result<()> {
        if self.requests.len() == MAX_REQUESTS {
            fail!(Limit, "more than {MAX_REQUESTS} requests");
        }
        if path.len() > MAX_REQUEST_BLOCKS || self.ids.len() + path.len() > MAX_REFERENCES {
            fail!(
                Limit,
                "a request of {} blocks after {} in all; the limits are {MAX_REQUEST_BLOCKS} and \
                 {MAX_REFERENCES}",
                path.len(),
                self.ids.len()
            );
        }
        if !(-MAX_TIME_NS..=MAX_TIME_NS).contains(&request.at_ns) {
            fail!(Limit, "a request at {} ns, allowed is up to 146 years from 0", request.at_ns);
        }
        let room = self.requests.try_reserve(1).and_then(|()| self.ids.try_reserve(path.len()));
        if room.is_err() {
            fail!(NoMem, "no memory for request {}", self.requests.len());
        }
        let (first, blocks) = (self.ids.len() as u32, path.len() as u32);
        self.ids.extend_from_slice(path);
        self.requests.push(Request { first, blocks, ..request });
        Ok(())
    }

    /// Sorts by time, stable for equal times, and checks that every id has one parent.
    pub fn finish(mut self) -> Result<Trace> {
        self.requests.sort_by_key(|r| r.at_ns);
        let (mut ids, mut dense) = (Vec::new(), Vec::new());
        let room = ids.try_reserve_exact(self.ids.len()).is_ok()
            && dense.try_reserve_exact(self.ids.len()).is_ok();
        if !room {
            fail!(NoMem, "no memory to number {} blocks", self.ids.len());
        }
        // Paths are stored in the order of their requests: a replay reads ahead.
        for request in &mut self.requests {
            let range = request.range();
            request.first = ids.len() as u32;
            ids.extend_from_slice(&self.ids[range]);
        }
        self.ids = ids;
        let mut numbers = Numbers::default();
        dense.resize(self.ids.len(), 0);
        for request in &self.requests {
            let mut parent = NO_PARENT;
            for at in request.range() {
                parent = numbers.number(self.ids[at], parent)?;
                dense[at] = parent;
            }
        }
        Ok(Trace {
            block_tokens: self.block_tokens,
            requests: self.requests,
            ids: self.ids,
            dense,
            uniques: numbers.parents.len(),
        })
    }
}

#[derive(Default)]
struct Numbers {
    numbers: IdMap<u32>,
    parents: Vec<u32>,
    ids: Vec<u64>,
}

impl Numbers {
    /// The number of an id, new or known; its parent must be as before.
    fn number(&mut self, id: u64, parent: u32) -> Result<u32> {
        if let Some(&number) = self.numbers.get(&id) {
            let before = self.parents[number as usize];
            if before != parent {
                let name = |n: u32| match self.ids.get(n as usize) {
                    Some(id) => format!("block {id}"),
                    None => "nothing".to_string(),
                };
                let (a, b) = (name(before), name(parent));
                fail!(
                    Invalid,
                    "block {id} follows {a} in one request and {b} in another: an id must stand \
                     for its whole prefix"
                );
            }
            return Ok(number);
        }
        let room = self.numbers.try_reserve(1).is_ok()
            && self.parents.try_reserve(1).is_ok()
            && self.ids.try_reserve(1).is_ok();
        if !room {
            fail!(NoMem, "no memory for another block after {}", self.parents.len());
        }
        let number = self.parents.len() as u32;
        self.numbers.insert(id, number);
        self.parents.push(parent);
        self.ids.push(id);
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(at_ns: i64) -> Request {
        Request { at_ns, input_tokens: 20, ..Request::default() }
    }

    #[test]
    fn requests_are_sorted_and_blocks_numbered() {
        let mut b = Builder::new(8).expect("tokens");
        b.push(request(5), &[7, 9]).expect("room");
        b.push(request(1), &[7, 8, 10]).expect("room");
        b.push(request(5), &[11]).expect("room");
        let t = b.finish().expect("a forest");
        let paths: Vec<&[u64]> = t.requests().iter().map(|r| t.blocks(r)).collect();
        assert_eq!(paths, [&[7, 8, 10][..], &[7, 9], &[11]]);
        assert_eq!((t.uniques(), t.references(), t.duration_ns()), (5, 6, 4));
        assert_eq!(t.dense(&t.requests()[1]), [0, 3]);
        assert_eq!(t.requests()[0].tokens_of(3, 8), 20);
        let flat = t.flat().expect("room");
        assert_eq!((flat.requests().len(), flat.uniques()), (6, 5));
    }

    #[test]
    fn an_id_with_two_parents_is_rejected() {
        for (a, b) in [(&[1, 2][..], &[3, 2][..]), (&[1, 2], &[2]), (&[1, 2, 1], &[1])] {
            let mut builder = Builder::new(1).expect("tokens");
            builder.push(request(0), a).expect("room");
            builder.push(request(1), b).expect("room");
            assert!(builder.finish().is_err());
        }
        assert!(Builder::new(0).is_err());
    }
}
