//! Three scenarios that a cost of recomputing was drawn up for: sessions under
//! pressure, turns of one session, and the order of layers.

use kvtier_testkit::fixtures::store as support;

use std::sync::Arc;

use kvtier::base::budget::Tier;
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::index::NONE;
use kvtier::meta::key::Key;
use kvtier::store::executor::Tools;
use kvtier::store::state::disk_gc::{CheckpointWriter, Page};
use kvtier::store::state::eviction::Granularity;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{CellRange, Config, SessionOpts, SpaceOpts, StoreState};
use kvtier::tier::disk::{CellAt, CellIndex, DiskTier, Options, Spot};
use kvtier_testkit::disk::{SimFiles, SimOpts};
use support::{Engine, Model, Shape, document, marks_of};

/// Cells of 16 KiB: a chunk is a segment of a small memory.
const MODEL: Model = Model { layers: 4, heads: 4, run: 128, chunk: 16 };
const SECOND_NS: u64 = 1_000_000_000;

/// Nothing is cleaned here, and no checkpoint is written.
struct Nobody;

impl CheckpointWriter for Nobody {
    fn page(&mut self, _from: (u32, u32), _page: &mut Page) -> Option<(u32, u32)> {
        None
    }
}

impl CellIndex for Nobody {
    fn wants(&mut self, _cell: &CellAt) -> bool {
        false
    }

    fn moved(&mut self, _cell: &CellAt, _to: Spot) -> bool {
        false
    }

    fn lost(&mut self, _cell: &CellAt) -> bool {
        false
    }
}

/// A store in one thread, and what time it is there.
struct World {
    core: StoreState,
    tools: Tools,
    space: u32,
    now_ns: u64,
}

/// A conversation; `number` is the store's while it is open.
struct Talk {
    document: u32,
    tokens: usize,
    number: u32,
}

impl World {
    /// Memory for so many chunks; room is made when it is needed and not before.
    fn open(chunks: u64, policy: &str, with_disk: bool) -> World {
        World::of_grain(chunks, policy, with_disk, Granularity::Chunk, false)
    }

    /// The same with policies that choose something else than chunks.
    fn of_grain(
        chunks: u64,
        policy: &str,
        with_disk: bool,
        grain: Granularity,
        cells: bool,
    ) -> World {
        let config = Config {
            granularity: grain,
            drop_cells: cells,
            host_bytes: chunks * MODEL.chunk_bytes(),
            host_policy: policy.into(),
            max_chunks: 64,
            max_sessions: 64,
            high: 1.0,
            low: 1.0,
            ..Config::default()
        };
        let disk = with_disk.then(|| {
            let opts = SimOpts { capacity_bytes: 64 << 20, ..SimOpts::default() };
            let options = Options { segment_bytes: 1 << 20, ..Options::new(32 << 20, [7; 16]) };
            let opened = DiskTier::open(Arc::new(SimFiles::new(1, opts)), options);
            Arc::new(opened.expect("a new store").0)
        });
        let mut core = StoreState::new(config, None, disk.clone()).expect("opened");
        // The engine can compute holes: else the end of a conversation goes first.
        let opts = SpaceOpts { key: Key([1; 32]), layout: MODEL.layout(), holes: true };
        let space = core.open_space(&opts).expect("opened");
        let tools = Tools { device: Arc::new(Host::default()), disk, remote: None };
        World { core, tools, space, now_ns: SECOND_NS }
    }

    /// Does all there is to do.
    fn rest(&mut self) {
        while let Some(mut work) =
            WorkerKind::ALL.into_iter().find_map(|hands| self.core.take(hands))
        {
            // SAFETY: whoever has submitted keeps its memory until this is over.
            let outcome = unsafe { self.tools.work(&mut work, Stream(0), &mut Nobody) };
            self.core.done(work, outcome, 0);
        }
        self.core.check().expect("the tables agree");
    }

    fn talk(&mut self, document: u32) -> Talk {
        let number = self.core.open_session(self.space, &SessionOpts::default()).expect("opened");
        Talk { document, tokens: 0, number }
    }

    /// Another turn of a conversation, a second later: a chunk more.
    fn turn(&mut self, talk: &mut Talk) {
        self.turn_of(talk, MODEL.layers);
    }

    /// The same, of its first layers only.
    fn turn_of(&mut self, talk: &mut Talk, layers: usize) {
        self.now_ns += SECOND_NS;
        self.core.tick(self.now_ns);
        let all = document(talk.document, talk.tokens + MODEL.chunk);
        self.core.append(talk.number, &all[talk.tokens..]).expect("appended");
        let mut engine = Engine::new(MODEL, Shape::Tokens, all.len());
        engine.compute(&marks_of(0, &all));
        let what = engine.cell_range(talk.tokens, MODEL.chunk, 0..layers, false);
        self.moves(talk, TransferKind::Put, what);
        talk.tokens = all.len();
    }

    fn moves(&mut self, talk: &Talk, kind: TransferKind, what: CellRange) {
        let begun = self.core.submit_cell_range(talk.number, kind, Level::Ram, 0, what);
        begun.expect("submitted");
        self.rest();
        let mut finished = Vec::new();
        self.core.finished(&mut finished);
        let error = finished.pop().expect("it has ended").error;
        assert!(error.is_none(), "{error:?}");
    }

    /// All of a conversation is asked for, a second later, and is right.
    fn reads(&mut self, talk: &Talk) {
        self.now_ns += SECOND_NS;
        self.core.tick(self.now_ns);
        let all = document(talk.document, talk.tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, all.len());
        let what = engine.cell_range(0, talk.tokens, 0..MODEL.layers, false);
        self.moves(talk, TransferKind::Get, what);
        engine.check(&marks_of(0, &all), 0..all.len(), 0..MODEL.layers);
    }

    /// Nobody needs it for now: it may leave.
    fn sleeps(&mut self, talk: &Talk) {
        self.core.close_session(talk.number).expect("open");
    }

    /// It goes on: the same conversation, opened once more.
    fn wakes(&mut self, talk: &mut Talk) {
        talk.number = self.core.open_session(self.space, &SessionOpts::default()).expect("opened");
        let tokens = document(talk.document, talk.tokens);
        self.core.append(talk.number, &tokens).expect("appended");
    }

    /// For each chunk of a conversation the layers that are in memory.
    fn in_memory(&self, talk: &Talk) -> Vec<Vec<usize>> {
        let mut keys = Vec::new();
        let chain = Chain::new(Key([1; 32]), MODEL.chunk as u32);
        let tokens = document(talk.document, talk.tokens);
        chain.expect("chunks").extend(&tokens, &[], &mut keys).expect("hashed");
        let chunks = &self.core.table_of(self.space).expect("open").chunks;
        let of = |key: &Key| {
            let slot = chunks.find(key).unwrap_or(NONE);
            let marks = chunks.marks(slot).unwrap_or_default();
            let is_there = |layer: &usize| marks[*layer].there() & 1 << Tier::Host as u8 != 0;
            (0..marks.len()).filter(is_there).collect()
        };
        keys.iter().map(of).collect()
    }

    /// Which chunks are in memory as a whole.
    fn whole(&self, talk: &Talk) -> Vec<usize> {
        let all = self.in_memory(talk);
        (0..all.len()).filter(|&chunk| all[chunk].len() == MODEL.layers).collect()
    }
}

const ALL: [usize; 4] = [0, 1, 2, 3];

/// Scenario 1: three sessions, memory for two chunks: the oldest session's first chunk
/// goes first, then its second, then the next session's.
fn of_three_sessions(with_disk: bool) {
    let mut world = World::open(2, "pensieve", with_disk);
    let mut first = world.talk(1);
    world.turn(&mut first);
    world.turn(&mut first);
    world.sleeps(&first);
    assert_eq!(world.in_memory(&first), [ALL, ALL]);
    let mut second = world.talk(2);
    world.turn(&mut second);
    world.sleeps(&second);
    assert_eq!((world.whole(&first), world.whole(&second)), (vec![1], vec![0]));
    let mut third = world.talk(3);
    world.turn(&mut third);
    world.sleeps(&third);
    assert_eq!((world.whole(&first), world.whole(&second)), (vec![], vec![0]));
    let mut fourth = world.talk(4);
    world.turn(&mut fourth);
    assert_eq!((world.whole(&second), world.whole(&third)), (vec![], vec![0]));
    assert_eq!(world.whole(&fourth), [0]);
    world.sleeps(&fourth);
}

#[test]
fn of_three_sessions_the_oldest_goes_down_first_from_its_front() {
    of_three_sessions(true);
}

#[test]
fn of_three_sessions_the_oldest_is_dropped_first_from_its_front() {
    of_three_sessions(false);
}

/// Scenario 2: five turns of one session, memory for three chunks: the latest three
/// stay, what is at its front goes.
#[test]
fn of_five_turns_the_latest_stay() {
    let mut world = World::open(3, "pensieve", true);
    let mut talk = world.talk(1);
    let mut kept = Vec::new();
    for _ in 0..5 {
        world.turn(&mut talk);
        world.sleeps(&talk);
        kept.push(world.whole(&talk));
        world.wakes(&mut talk);
    }
    let right: [&[usize]; 5] = [&[0], &[0, 1], &[0, 1, 2], &[1, 2, 3], &[2, 3, 4]];
    assert_eq!(kept, right);
    world.sleeps(&talk);
}

/// Scenarios 1 and 3, by layers: the last layers of the oldest chunk leave memory first,
/// its first layer, which nothing can be computed without, stays longest.
#[test]
fn late_layers_leave_before_early_ones() {
    let mut world = World::of_grain(2, "lru", true, Granularity::Cell, false);
    let mut first = world.talk(1);
    world.turn(&mut first);
    world.turn(&mut first);
    world.sleeps(&first);
    let mut second = world.talk(2);
    for (layers, right) in [(1, vec![0, 1, 2]), (1, vec![0, 1]), (2, vec![])] {
        world.turn_of(&mut second, layers);
        assert_eq!(world.in_memory(&first), [right, ALL.to_vec()]);
    }
    world.turn_of(&mut second, 1);
    assert_eq!(world.in_memory(&first), [vec![], vec![0, 1, 2]]);
    world.sleeps(&second);
}

/// The same of what was asked for together: the last layer of all chunks goes before any
/// of the layer before it, the end of the conversation first.
#[test]
fn the_last_layer_of_all_chunks_leaves_first() {
    let mut world = World::of_grain(2, "lru", true, Granularity::Cell, false);
    let mut first = world.talk(1);
    world.turn(&mut first);
    world.turn(&mut first);
    world.reads(&first);
    world.sleeps(&first);
    let mut second = world.talk(2);
    let right = [[&ALL[..], &[0, 1, 2]], [&[0, 1, 2], &[0, 1, 2]], [&[0, 1, 2], &[0, 1]]];
    for right in right {
        world.turn_of(&mut second, 1);
        assert_eq!(world.in_memory(&first), right);
    }
    world.sleeps(&second);
    // What has left comes back, and is right.
    world.wakes(&mut first);
    world.reads(&first);
    assert_eq!(world.whole(&first), [0, 1]);
    world.sleeps(&first);
}

/// By their cost, which is less for late layers and grows with the context: computed here
/// as `cost / idle` of each cell, and the cheapest leave.
#[test]
fn cells_leave_by_their_cost() {
    let mut world = World::of_grain(2, "pensieve(mode=cell)", true, Granularity::Cell, false);
    let mut first = world.talk(1);
    world.turn(&mut first);
    world.turn(&mut first);
    world.sleeps(&first);
    let mut second = world.talk(2);
    for _ in 0..5 {
        let before = world.in_memory(&first);
        world.turn_of(&mut second, 1);
        let idle = |chunk: usize| (world.now_ns - (2 + chunk as u64) * SECOND_NS) as f64;
        let value = |chunk: usize, layer: usize| {
            let cost = 0.001 * (chunk * MODEL.chunk) as f64 + 0.01 + 0.005;
            cost * (MODEL.layers - layer) as f64 / MODEL.layers as f64 / idle(chunk)
        };
        let cells = (0..2).flat_map(|chunk| before[chunk].iter().map(move |&l| (chunk, l)));
        let right = cells.min_by(|a, b| value(a.0, a.1).total_cmp(&value(b.0, b.1)));
        let mut left = before.clone();
        let (chunk, layer) = right.expect("some are in memory");
        left[chunk].retain(|&l| l != layer);
        assert_eq!(world.in_memory(&first), left);
    }
    world.sleeps(&second);
}

/// What is dropped goes with all its layers, also where cells are chosen; alone only where
/// that is asked for.
#[test]
fn chunks_are_dropped_as_a_whole_unless_cells_are_asked_for() {
    for (cells, right) in [(false, [vec![], ALL.to_vec()]), (true, [vec![0, 1, 2], ALL.to_vec()])] {
        let mut world = World::of_grain(2, "lru", false, Granularity::Cell, cells);
        let mut first = world.talk(1);
        world.turn(&mut first);
        world.turn(&mut first);
        world.sleeps(&first);
        let mut second = world.talk(2);
        world.turn_of(&mut second, 1);
        assert_eq!(world.in_memory(&first), right);
        world.sleeps(&second);
    }
}

/// Where sessions are chosen, all that one was the last to use leaves together; what another
/// has used since stays with that one.
#[test]
fn a_session_leaves_as_a_whole() {
    for with_disk in [true, false] {
        let mut world = World::of_grain(5, "lru", with_disk, Granularity::Session, false);
        let mut first = world.talk(1);
        world.turn(&mut first);
        world.turn(&mut first);
        world.sleeps(&first);
        let mut second = world.talk(2);
        world.turn(&mut second);
        world.turn(&mut second);
        world.sleeps(&second);
        let mut third = world.talk(3);
        world.turn(&mut third);
        assert_eq!((world.whole(&first), world.whole(&second)), (vec![0, 1], vec![0, 1]));
        world.turn(&mut third);
        assert_eq!((world.whole(&first), world.whole(&second)), (vec![], vec![0, 1]));
        assert_eq!(world.whole(&third), [0, 1]);
        world.sleeps(&third);
        // The second conversation, opened again: it was used last now.
        world.wakes(&mut second);
        world.reads(&second);
        world.sleeps(&second);
        let mut fourth = world.talk(4);
        world.turn(&mut fourth);
        world.turn(&mut fourth);
        assert_eq!((world.whole(&second), world.whole(&third)), (vec![0, 1], vec![]));
        world.sleeps(&fourth);
    }
}
