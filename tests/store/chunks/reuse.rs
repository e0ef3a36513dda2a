//! Lookups against the reuse rules, read token by token over every set of chunks that could be
//! computed.

use crate::chunks::{root, table};
use kvtier::base::budget::{ALL_TIERS, Tier};
use kvtier::meta::chunks::{Arrival, Cell, Chunks, Location, NewChunk, Shape, StoredForm, TIERS};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::index::{NONE, Slot};
use kvtier::meta::layout::{Group, Layout, Rule};
use kvtier::meta::reuse::{ChunkReuse, ReusablePrefix, State, find_reusable, plan_reuse, ranges};
use proptest::prelude::*;

/// State of a path that determines where it can be continued, token by token.
#[derive(Debug)]
struct TableCase {
    layout: Layout,
    /// By chunk and layer: tiers in which the cell is resident; whether it is arriving.
    cells: Vec<Vec<(u8, bool)>>,
    tokens: Vec<u32>,
    given_up: Vec<bool>,
}

impl TableCase {
    /// The first token of a chunk.
    fn start(&self, chunk: usize) -> u64 {
        self.tokens[..chunk].iter().map(|&t| u64::from(t)).sum()
    }

    /// The chunks that a layer needs to continue from token `point`.
    fn needed(&self, layer: usize, point: u64) -> impl Iterator<Item = usize> {
        let rule = self.layout.group(layer).expect("a layer").rule;
        let needs = move |token: u64| match rule {
            Rule::Full => true,
            Rule::Window(w) => token + u64::from(w) >= point,
            Rule::State => token + 1 == point,
        };
        let holds = |chunk: &usize| {
            (self.start(*chunk)..self.start(chunk + 1)).any(|t| t < point && needs(t))
        };
        (0..self.tokens.len()).filter(holds).collect::<Vec<_>>().into_iter()
    }

    fn has(&self, chunk: usize, layer: usize, wait: bool) -> bool {
        let (there, coming) = self.cells[chunk][layer];
        there != 0 || (wait && coming)
    }

    fn goes_on(&self, point: u64, has: impl Fn(usize, usize) -> bool) -> bool {
        let fine = |layer| self.needed(layer, point).all(|chunk| has(chunk, layer));
        (0..self.layout.layers()).all(fine)
    }

    /// Number of chunks after which the sequence can continue.
    fn reach(&self, wait: bool) -> usize {
        let fine =
            |&n: &usize| self.goes_on(self.start(n), |chunk, layer| self.has(chunk, layer, wait));
        (0..=self.tokens.len()).rev().find(fine).expect("0 always")
    }

    /// Whether computing these chunks suffices to continue after the first `until` chunks.
    fn is_enough(&self, computed: u32, until: usize, wait: bool) -> bool {
        let new = |chunk: usize| computed >> chunk & 1 != 0;
        let has = |c: usize, l: usize| new(c) || (!self.given_up[c] && self.has(c, l, wait));
        let points = (0..until).filter(|&chunk| new(chunk)).chain([until]);
        points.into_iter().all(|at| self.goes_on(self.start(at), has))
    }

    fn table(&self) -> (Chunks, Vec<Slot>) {
        let layers = self.layout.layers();
        let shape = Shape { layers, chunk_tokens: self.layout.chunk_tokens(), max_chunks: 16 };
        let mut table = Chunks::new(shape).expect("small");
        table.count_remote(true);
        let path = (0..self.tokens.len()).map(|at| {
            if self.cells[at].iter().all(|&cell| cell == (0, false)) && at % 2 == 0 {
                return NONE;
            }
            let (position, valid_tokens) = (at as u32, self.tokens[at]);
            let chunk = table
                .add(&NewChunk { position, valid_tokens, owner: 1, ..root(at as u64) })
                .expect("room")
                .slot();
            for (layer, &(there, coming)) in self.cells[at].iter().enumerate() {
                let cell = Cell { chunk, layer };
                let place = |tier| match tier {
                    Tier::Device => Location::Device,
                    Tier::Host => Location::Host(at as u32),
                    Tier::Disk => Location::Disk { spot: 1, seal: 1, coded: StoredForm::PLAIN },
                    _ => Location::Remote,
                };
                let mut tiers = (0..TIERS).filter(|t| there >> t & 1 != 0).map(|t| ALL_TIERS[t]);
                let first = tiers.next();
                if first == Some(Tier::Remote) {
                    table.hint(cell).expect("sound");
                    continue;
                }
                if coming || first.is_some() {
                    table.begin_store(cell, first.unwrap_or(Tier::Host)).expect("sound");
                }
                let Some(first) = first else { continue };
                table.end_store(cell, first, Some(place(first))).expect("a store under way");
                for tier in tiers {
                    table.begin_copy(cell, first, tier).expect("a resident cell");
                    table
                        .end_copy(cell, tier, Arrival::Arrived(place(tier)))
                        .expect("a copy under way");
                }
            }
            chunk
        });
        let path = path.collect();
        (table, path)
    }

    fn check(&self, until: usize, wait: bool) {
        let (table, path) = self.table();
        let mut found = vec![ChunkReuse::default(); path.len()];
        let reach = find_reusable(&table, &self.layout, &path, &mut found).expect("sound");
        let (now, soon) = (self.reach(false), self.reach(true));
        let (tokens, reusable_soon_tokens) = (self.start(now), self.start(soon));
        let want = ReusablePrefix { chunks: now, tokens, soon_chunks: soon, reusable_soon_tokens };
        assert_eq!(reach, want);
        for (found, &given_up) in found.iter_mut().zip(&self.given_up) {
            found.given_up = given_up;
        }
        for at in [until, reach.chunks] {
            let moves =
                plan_reuse(&table, &self.layout, &path, at, wait, &mut found).expect("sound");
            self.check_chosen(at, wait, &found);
            let total = |is: &dyn Fn(&ChunkReuse) -> bool| {
                found[..at].iter().filter(|f| is(f)).map(|f| u64::from(f.tokens)).sum::<u64>()
            };
            assert_eq!(moves.computed_tokens, total(&|f| f.state == State::Miss));
            assert_eq!(moves.reused_tokens, total(&|f| f.state != State::Miss));
            for tier in 0..TIERS {
                assert_eq!(moves.bytes[tier], found.iter().map(|f| f.bytes[tier]).sum::<u64>());
            }
            let all: Vec<_> = ranges(&found).collect();
            assert_eq!(all.iter().map(|r| r.chunks).sum::<usize>(), path.len());
            assert!(all.windows(2).all(|w| w[0].first + w[0].chunks == w[1].first
                && (w[0].state, w[0].farthest) != (w[1].state, w[1].farthest)));
        }
        found.iter().for_each(|f| assert!(f.ready & !f.soon == 0));
        if self.given_up.iter().all(|g| !g) {
            assert!(
                found[..reach.chunks].iter().all(|f| f.state != State::Miss),
                "all can be loaded"
            );
        }
    }

    fn check_chosen(&self, until: usize, wait: bool, found: &[ChunkReuse]) {
        let missed = |chunk: &usize| found[*chunk].state == State::Miss;
        let computed = (0..until).filter(missed).fold(0u32, |all, chunk| all | 1 << chunk);
        assert!(self.is_enough(computed, until, wait));
        for other in (0..1u32 << until).filter(|&other| self.is_enough(other, until, wait)) {
            assert_eq!(computed & !other, 0, "{other:b} suffices, {computed:b} is more");
        }
        let points: Vec<u64> =
            (0..until).filter(missed).chain([until]).map(|at| self.start(at)).collect();
        for (chunk, found) in found.iter().enumerate() {
            if chunk >= until {
                assert_eq!((found.state, found.needed, found.bytes), (State::Miss, 0, [0; TIERS]));
                continue;
            }
            let needs = |layer: usize| {
                let reached = |&&point: &&u64| point >= self.start(chunk + 1);
                points
                    .iter()
                    .filter(reached)
                    .any(|&point| self.needed(layer, point).any(|c| c == chunk))
            };
            let mut bytes = [0; TIERS];
            let (mut groups, mut waits) = (0, false);
            for layer in (0..self.layout.layers()).filter(|&layer| needs(layer)) {
                groups |= 1u64 << self.layout.group_of()[layer];
                let (there, _) = self.cells[chunk][layer];
                waits |= there == 0;
                if there != 0 && found.state != State::Miss {
                    let group = self.layout.group(layer).expect("a layer");
                    bytes[there.trailing_zeros() as usize] +=
                        group.planes(self.tokens[chunk]).bytes();
                }
            }
            assert_eq!((found.needed, found.bytes), (groups, bytes));
            let state = match found.state {
                State::Miss => State::Miss,
                _ if groups == 0 => State::Unneeded,
                _ if waits => State::Pending,
                _ => State::Hit,
            };
            assert_eq!(found.state, state);
        }
    }
}

fn table_case() -> impl Strategy<Value = TableCase> {
    let groups = prop::collection::vec((0u8..4, 1u32..20), 1..4);
    // Whole chunks in one tier, whole chunks in any tier, and single cells in any tiers.
    let cell = prop_oneof![3 => 1u8..16, 1 => Just(0u8)];
    let chunk = (0u8..4, 1u8..16, prop::collection::vec((cell, any::<bool>()), 6));
    let chunks = prop::collection::vec(chunk, 0..8);
    let more = (1u32..6, prop::collection::vec(0usize..3, 6), prop::collection::vec(0u8..8, 8));
    (groups, chunks, more, 1u32..6).prop_map(|(kinds, chunks, (size, group_of, given_up), last)| {
        let of = |layer: usize| group_of[layer] % kinds.len();
        let groups = kinds.iter().enumerate().filter_map(|(g, &(kind, tokens))| {
            let layers: Vec<u16> = (0..6u16).filter(|&l| of(usize::from(l)) == g).collect();
            let group = match kind {
                0 => Group::gqa(layers, 2, 3, Dtype::F16).expect("whole"),
                1 | 2 => Group::mla_latent(layers, 5, Dtype::I8).expect("whole").window(tokens),
                _ => Group::state(layers, 100, Dtype::F32),
            };
            (!group.layers.is_empty()).then_some(group)
        });
        let layout = Layout::new(size, groups.collect()).expect("sound");
        let mut tokens = vec![size; chunks.len()];
        if let Some(end) = tokens.last_mut() {
            *end = size.min(last);
        }
        let cells: Vec<Vec<(u8, bool)>> = chunks
            .into_iter()
            .map(|(kind, tiers, cells)| match kind {
                0 => vec![(tiers, false); 6],
                1 => cells.iter().map(|&(t, _)| (t.max(1), false)).collect(),
                _ => cells.iter().map(|&(t, c)| (t, c && t == 0)).collect(),
            })
            .collect();
        // A partial chunk that is in no tier is not known to be partial.
        if let (Some(end), Some(last)) = (tokens.last_mut(), cells.last())
            && last.iter().all(|&cell| cell == (0, false))
        {
            *end = size;
        }
        let given_up = given_up.iter().map(|&n| n == 7).collect();
        TableCase { layout, cells, tokens, given_up }
    })
}

#[test]
fn lookup_follows_the_reuse_rules() {
    let config = ProptestConfig { cases: 1500, ..ProptestConfig::default() };
    proptest!(config, |(case in table_case(), until in 0usize..8, wait in any::<bool>())| {
        case.check(until.min(case.tokens.len()), wait);
    });
}

#[test]
fn window_needs_its_last_tokens_and_state_its_position() {
    let window = Group::gqa([0], 1, 1, Dtype::I8).expect("whole").window(5);
    let layout = Layout::new(4, vec![window, Group::state([1], 8, Dtype::I8)]).expect("sound");
    let here = (2, false);
    let cells = vec![vec![(0, false); 2], vec![here; 2], vec![here, (0, false)], vec![here; 2]];
    let case = TableCase { layout, cells, tokens: vec![4; 4], given_up: vec![false; 8] };
    case.check(4, false);
    let (table, path) = case.table();
    let mut found = [ChunkReuse::default(); 4];
    let reach = find_reusable(&table, &case.layout, &path, &mut found).expect("sound");
    assert_eq!((reach.chunks, reach.tokens), (4, 16));
    plan_reuse(&table, &case.layout, &path, 4, false, &mut found).expect("sound");
    let states = found.map(|found| found.state);
    assert_eq!(states, [State::Unneeded, State::Unneeded, State::Hit, State::Hit]);
    assert_eq!(found[3].bytes, [0, 8 + 8, 0, 0]);
    // To compute the last chunk, the state before it is computed too, and that needs the window
    // before.
    found[3].given_up = true;
    let moves = plan_reuse(&table, &case.layout, &path, 4, false, &mut found).expect("sound");
    assert_eq!(found.map(|found| found.state == State::Miss), [true, false, true, true]);
    assert_eq!(moves.computed_tokens, 12);
}

#[test]
fn lookup_in_a_table_of_another_layout_is_rejected() {
    let layout = Layout::new(4, vec![Group::state([0], 1, Dtype::I8)]).expect("sound");
    let mut found = [ChunkReuse::default(); 2];
    assert!(find_reusable(&table(2, 1), &layout, &[NONE; 2], &mut found).is_err());
    assert!(find_reusable(&table(1, 1), &layout, &[NONE; 1], &mut found).is_err());
    assert!(plan_reuse(&table(1, 1), &layout, &[NONE; 2], 3, false, &mut found).is_err());
    let mut other = table(1, 1);
    let chunk = other.add(&root(0)).expect("room").slot();
    assert!(
        find_reusable(&other, &layout, &[NONE, chunk], &mut found).is_err(),
        "a chunk at the wrong position"
    );
    let reach = find_reusable(&table(1, 1), &layout, &[NONE; 2], &mut found).expect("misses");
    assert_eq!(reach, ReusablePrefix::default());
}
