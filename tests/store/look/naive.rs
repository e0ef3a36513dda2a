//! The reuse rules, read token by token.

use kvtier::format::keys::chain::Chain;
use kvtier::meta::chunks::TIERS;
use kvtier::meta::index::Slot;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Layout, Rule};
use kvtier::meta::reuse::State;
use kvtier::store::state::StoreState;

use crate::look::world::Namespace;

/// Facts of a cell: the nearest tier in which it is resident, and whether it is arriving.
pub type CellFacts = (Option<usize>, bool);

/// A sequence, chunk by chunk.
#[derive(Debug)]
pub struct Rows {
    pub layout: Layout,
    pub tokens: Vec<u64>,
    pub cells: Vec<Vec<CellFacts>>,
}

/// State of a chunk in a plan, and the bytes to load.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    pub state: State,
    pub bytes: [u64; TIERS],
    pub pending_bytes: u64,
}

impl Rows {
    /// Rows of a sequence as the chunk table has them, including its tail.
    pub fn of(
        core: &StoreState,
        namespace: &Namespace,
        tokens: &[u32],
        tail: Option<Slot>,
    ) -> Rows {
        let layout = namespace.layout.clone();
        let each = layout.chunk_tokens();
        let mut keys: Vec<Key> = Vec::new();
        Chain::new(namespace.key, each).unwrap().extend(tokens, &[], &mut keys).unwrap();
        let chunks = &core.table_of(namespace.number).unwrap().chunks;
        let facts = |slot: Option<Slot>| match slot.and_then(|slot| chunks.marks(slot)) {
            Some(marks) => marks.iter().map(|m| (m.nearest(), m.arriving() != 0)).collect(),
            None => vec![(None, false); layout.layers()],
        };
        let mut cells: Vec<Vec<CellFacts>> =
            keys.iter().map(|key| facts(chunks.find(key))).collect();
        let mut counts = vec![u64::from(each); keys.len()];
        let rest = tokens.len() as u64 % u64::from(each);
        if rest > 0 {
            counts.push(rest);
            cells.push(facts(tail));
        }
        Rows { layout, tokens: counts, cells }
    }

    pub fn start(&self, chunk: usize) -> u64 {
        self.tokens[..chunk].iter().sum()
    }

    /// Whether a layer of a chunk is needed to continue from token `point`.
    pub fn needs(&self, layer: usize, point: u64, chunk: usize) -> bool {
        let rule = self.layout.group(layer).unwrap().rule;
        (self.start(chunk)..self.start(chunk + 1)).any(|token| {
            token < point
                && match rule {
                    Rule::Full => true,
                    Rule::Window(w) => token + u64::from(w) >= point,
                    Rule::State => token + 1 == point,
                }
        })
    }

    pub fn has(&self, chunk: usize, layer: usize, wait: bool) -> bool {
        let (there, coming) = self.cells[chunk][layer];
        there.is_some() || wait && coming
    }

    /// The largest number of chunks after which the sequence can continue.
    pub fn reach(&self, wait: bool) -> usize {
        let layers = 0..self.layout.layers();
        let fine = |&n: &usize| {
            let point = self.start(n);
            layers.clone().all(|l| (0..n).all(|c| !self.needs(l, point, c) || self.has(c, l, wait)))
        };
        (0..=self.tokens.len()).rev().find(fine).unwrap()
    }

    fn bytes(&self, chunk: usize, layer: usize) -> u64 {
        self.layout.group(layer).unwrap().planes(self.tokens[chunk] as u32).bytes()
    }

    /// Bytes to load from each tier, and pending bytes, for the cells of a chunk that `points`
    /// need.
    pub fn load(&self, chunk: usize, points: &[u64]) -> ([u64; TIERS], u64) {
        let (mut bytes, mut pending) = ([0; TIERS], 0);
        for layer in 0..self.layout.layers() {
            if !points.iter().any(|&point| self.needs(layer, point, chunk)) {
                continue;
            }
            match self.cells[chunk][layer] {
                (Some(tier), _) => bytes[tier] += self.bytes(chunk, layer),
                (None, true) => pending += self.bytes(chunk, layer),
                (None, false) => {}
            }
        }
        (bytes, pending)
    }

    /// Steps to continue after `until` chunks. Holes are computed, as are needed chunks for which
    /// `given_up` returns true.
    pub fn choose(
        &self,
        until: usize,
        wait: bool,
        given_up: impl Fn(usize) -> bool,
    ) -> Vec<Chosen> {
        let mut points = vec![self.start(until)];
        let miss = Chosen { state: State::Miss, bytes: [0; TIERS], pending_bytes: 0 };
        let mut all = vec![miss; self.tokens.len()];
        for chunk in (0..until).rev() {
            let needed: Vec<usize> = (0..self.layout.layers())
                .filter(|&layer| points.iter().any(|&point| self.needs(layer, point, chunk)))
                .collect();
            let has = |wait| needed.iter().all(|&layer| self.has(chunk, layer, wait));
            let state = match () {
                () if needed.is_empty() => State::Unneeded,
                () if given_up(chunk) => State::Miss,
                () if has(false) => State::Hit,
                () if wait && has(true) => State::Pending,
                () => State::Miss,
            };
            let (bytes, pending_bytes) = match state {
                State::Hit | State::Pending => self.load(chunk, &points),
                _ => ([0; TIERS], 0),
            };
            if state == State::Miss {
                points.push(self.start(chunk));
            }
            all[chunk] = Chosen { state, bytes, pending_bytes };
        }
        all
    }
}
