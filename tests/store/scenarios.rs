//! Three scenarios of eviction by the cost of recomputing: sessions under pressure, turns of one
//! session, and the order of layers.

use kvtier::base::budget::Tier;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::index::NONE;
use kvtier::meta::key::Key;
use kvtier::store::state::tier_cache::Granularity;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, Config};
use kvtier::tier::disk::Options;
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore, empty_disk};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

/// Cells of 16 KiB: a chunk takes one slab of a small host tier.
const MODEL: Model = Model { layers: 4, heads: 4, run: 128, chunk: 16 };
const SECOND_NS: u64 = 1_000_000_000;

/// A stepped store and its virtual time.
struct Store {
    store: SteppedStore,
    now_ns: u64,
}

/// A conversation; `number` is its session while it is open.
struct Talk {
    document: u32,
    tokens: usize,
    number: u32,
}

impl Store {
    /// Host memory for so many chunks; the watermarks are 100 %.
    fn open(chunks: u64, policy: &str, with_disk: bool) -> Store {
        Store::with(chunks, policy, with_disk, Granularity::Chunk, false)
    }

    /// The same with another granularity of eviction. `drop_cells`: single cells may be dropped.
    fn with(
        chunks: u64,
        policy: &str,
        with_disk: bool,
        granularity: Granularity,
        drop_cells: bool,
    ) -> Store {
        let config = Config {
            granularity,
            drop_cells,
            host_bytes: chunks * MODEL.chunk_bytes(),
            host_policy: policy.into(),
            max_chunks: 64,
            max_sessions: 64,
            high: 1.0,
            low: 1.0,
            ..Config::default()
        };
        let options = Options { segment_bytes: 1 << 20, ..Options::new(32 << 20, [7; 16]) };
        let disk = with_disk.then(|| (empty_disk(), options));
        // The engine can compute holes. Without `holes` the end of a conversation would be evicted
        // first.
        let (layout, holes) = (MODEL.layout(), true);
        let store = SteppedStore::new(Parts { config, disk, layout, holes, ..Parts::default() });
        Store { store, now_ns: SECOND_NS }
    }

    /// A second passes.
    fn tick(&mut self) {
        self.now_ns += SECOND_NS;
        self.store.lock().tick(self.now_ns);
    }

    fn talk(&self, document: u32) -> Talk {
        Talk { document, tokens: 0, number: self.store.session(&[]) }
    }

    /// Another turn of a conversation, a second later: one more chunk.
    fn turn(&mut self, talk: &mut Talk) {
        self.turn_of(talk, MODEL.layers);
    }

    /// Same as `turn`, with the first layers only.
    fn turn_of(&mut self, talk: &mut Talk, layers: usize) {
        self.tick();
        let all = document(talk.document, talk.tokens + MODEL.chunk);
        self.store.lock().append(talk.number, &all[talk.tokens..]).expect("appended");
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &all));
        let cells = engine.cell_range(talk.tokens, MODEL.chunk, 0..layers, false);
        self.transfer(talk, TransferKind::Put, cells);
        talk.tokens = all.len();
    }

    fn transfer(&self, talk: &Talk, kind: TransferKind, cells: CellRange) {
        let status = self.store.transfer(talk.number, kind, Level::Ram, cells);
        assert_eq!(status, kvtier::base::status::Status::Ok);
    }

    /// Loads all of a conversation, a second later, and compares it.
    fn reads(&mut self, talk: &Talk) {
        self.tick();
        let all = document(talk.document, talk.tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, all.len());
        self.transfer(talk, TransferKind::Get, engine.whole());
        engine.check(&marks_of(0, &all), 0..all.len(), 0..MODEL.layers);
    }

    /// Closes the session: its chunks become candidates for eviction.
    fn sleeps(&self, talk: &Talk) {
        self.store.close_session(talk.number);
    }

    /// Opens a session of the same conversation again.
    fn wakes(&self, talk: &mut Talk) {
        talk.number = self.store.session(&document(talk.document, talk.tokens));
    }

    /// For each chunk of a conversation the layers that are resident in HOST.
    fn in_memory(&self, talk: &Talk) -> Vec<Vec<usize>> {
        let mut keys = Vec::new();
        let chain = Chain::new(Key([1; 32]), MODEL.chunk as u32);
        let tokens = document(talk.document, talk.tokens);
        chain.expect("chunks").extend(&tokens, &[], &mut keys).expect("hashed");
        let state = self.store.lock();
        let chunks = &state.table_of(self.store.namespace).expect("open").chunks;
        let of = |key: &Key| {
            let slot = chunks.find(key).unwrap_or(NONE);
            let marks = chunks.marks(slot).unwrap_or_default();
            let is_there =
                |layer: &usize| marks[*layer].resident_tiers() & 1 << Tier::Host as u8 != 0;
            (0..marks.len()).filter(is_there).collect()
        };
        keys.iter().map(of).collect()
    }

    /// The chunks that are resident in HOST with all layers.
    fn whole(&self, talk: &Talk) -> Vec<usize> {
        let all = self.in_memory(talk);
        (0..all.len()).filter(|&chunk| all[chunk].len() == MODEL.layers).collect()
    }
}

const ALL: [usize; 4] = [0, 1, 2, 3];

/// Scenario 1: three sessions, memory for two chunks. The oldest session's first chunk is evicted
/// first, then its second, then the next session's.
fn of_three_sessions(with_disk: bool) {
    let mut store = Store::open(2, "pensieve", with_disk);
    let mut first = store.talk(1);
    store.turn(&mut first);
    store.turn(&mut first);
    store.sleeps(&first);
    assert_eq!(store.in_memory(&first), [ALL, ALL]);
    let mut second = store.talk(2);
    store.turn(&mut second);
    store.sleeps(&second);
    assert_eq!((store.whole(&first), store.whole(&second)), (vec![1], vec![0]));
    let mut third = store.talk(3);
    store.turn(&mut third);
    store.sleeps(&third);
    assert_eq!((store.whole(&first), store.whole(&second)), (vec![], vec![0]));
    let mut fourth = store.talk(4);
    store.turn(&mut fourth);
    assert_eq!((store.whole(&second), store.whole(&third)), (vec![], vec![0]));
    assert_eq!(store.whole(&fourth), [0]);
    store.sleeps(&fourth);
}

#[test]
fn oldest_session_is_demoted_first_from_its_front() {
    of_three_sessions(true);
}

#[test]
fn oldest_session_is_dropped_first_from_its_front() {
    of_three_sessions(false);
}

/// Scenario 2: five turns of one session, memory for three chunks: the latest three stay, the
/// front is evicted.
#[test]
fn latest_turns_stay_resident() {
    let mut store = Store::open(3, "pensieve", true);
    let mut talk = store.talk(1);
    let mut kept = Vec::new();
    for _ in 0..5 {
        store.turn(&mut talk);
        store.sleeps(&talk);
        kept.push(store.whole(&talk));
        store.wakes(&mut talk);
    }
    let right: [&[usize]; 5] = [&[0], &[0, 1], &[0, 1, 2], &[1, 2, 3], &[2, 3, 4]];
    assert_eq!(kept, right);
    store.sleeps(&talk);
}

/// Scenarios 1 and 3, by layers: the last layers of the oldest chunk are evicted first. Its first
/// layer, which all others need, stays longest.
#[test]
fn late_layers_are_evicted_before_early_ones() {
    let mut store = Store::with(2, "lru", true, Granularity::Cell, false);
    let mut first = store.talk(1);
    store.turn(&mut first);
    store.turn(&mut first);
    store.sleeps(&first);
    let mut second = store.talk(2);
    for (layers, right) in [(1, vec![0, 1, 2]), (1, vec![0, 1]), (2, vec![])] {
        store.turn_of(&mut second, layers);
        assert_eq!(store.in_memory(&first), [right, ALL.to_vec()]);
    }
    store.turn_of(&mut second, 1);
    assert_eq!(store.in_memory(&first), [vec![], vec![0, 1, 2]]);
    store.sleeps(&second);
}

/// After one get of all chunks: the last layer of every chunk is evicted before any earlier
/// layer, from the end of the conversation.
#[test]
fn last_layer_of_all_chunks_is_evicted_first() {
    let mut store = Store::with(2, "lru", true, Granularity::Cell, false);
    let mut first = store.talk(1);
    store.turn(&mut first);
    store.turn(&mut first);
    store.reads(&first);
    store.sleeps(&first);
    let mut second = store.talk(2);
    let right = [[&ALL[..], &[0, 1, 2]], [&[0, 1, 2], &[0, 1, 2]], [&[0, 1, 2], &[0, 1]]];
    for right in right {
        store.turn_of(&mut second, 1);
        assert_eq!(store.in_memory(&first), right);
    }
    store.sleeps(&second);
    // Evicted cells are loaded again, with exact bytes.
    store.wakes(&mut first);
    store.reads(&first);
    assert_eq!(store.whole(&first), [0, 1]);
    store.sleeps(&first);
}

/// The cost is lower for late layers and grows with the context. The test computes `cost / idle`
/// of each cell; the lowest value is evicted.
#[test]
fn cells_are_evicted_by_recompute_cost() {
    let mut store = Store::with(2, "pensieve(mode=cell)", true, Granularity::Cell, false);
    let mut first = store.talk(1);
    store.turn(&mut first);
    store.turn(&mut first);
    store.sleeps(&first);
    let mut second = store.talk(2);
    for _ in 0..5 {
        let before = store.in_memory(&first);
        store.turn_of(&mut second, 1);
        let idle = |chunk: usize| (store.now_ns - (2 + chunk as u64) * SECOND_NS) as f64;
        let value = |chunk: usize, layer: usize| {
            let cost = 0.001 * (chunk * MODEL.chunk) as f64 + 0.01 + 0.005;
            cost * (MODEL.layers - layer) as f64 / MODEL.layers as f64 / idle(chunk)
        };
        let cells = (0..2).flat_map(|chunk| before[chunk].iter().map(move |&l| (chunk, l)));
        let right = cells.min_by(|a, b| value(a.0, a.1).total_cmp(&value(b.0, b.1)));
        let mut left = before.clone();
        let (chunk, layer) = right.expect("a resident cell");
        left[chunk].retain(|&l| l != layer);
        assert_eq!(store.in_memory(&first), left);
    }
    store.sleeps(&second);
}

/// Drops remove all layers, also with cell granularity, unless `drop_cells` is set.
#[test]
fn chunks_are_dropped_whole_unless_drop_cells_is_set() {
    for (cells, right) in [(false, [vec![], ALL.to_vec()]), (true, [vec![0, 1, 2], ALL.to_vec()])] {
        let mut store = Store::with(2, "lru", false, Granularity::Cell, cells);
        let mut first = store.talk(1);
        store.turn(&mut first);
        store.turn(&mut first);
        store.sleeps(&first);
        let mut second = store.talk(2);
        store.turn_of(&mut second, 1);
        assert_eq!(store.in_memory(&first), right);
        store.sleeps(&second);
    }
}

/// All chunks that a session was the last to use are evicted together. Chunks that another
/// session used since stay with that one.
#[test]
fn session_granularity_evicts_whole_sessions() {
    for with_disk in [true, false] {
        let mut store = Store::with(5, "lru", with_disk, Granularity::Session, false);
        let mut first = store.talk(1);
        store.turn(&mut first);
        store.turn(&mut first);
        store.sleeps(&first);
        let mut second = store.talk(2);
        store.turn(&mut second);
        store.turn(&mut second);
        store.sleeps(&second);
        let mut third = store.talk(3);
        store.turn(&mut third);
        assert_eq!((store.whole(&first), store.whole(&second)), (vec![0, 1], vec![0, 1]));
        store.turn(&mut third);
        assert_eq!((store.whole(&first), store.whole(&second)), (vec![], vec![0, 1]));
        assert_eq!(store.whole(&third), [0, 1]);
        store.sleeps(&third);
        // The second conversation is opened again, so it is the most recently used.
        store.wakes(&mut second);
        store.reads(&second);
        store.sleeps(&second);
        let mut fourth = store.talk(4);
        store.turn(&mut fourth);
        store.turn(&mut fourth);
        assert_eq!((store.whole(&second), store.whole(&third)), (vec![0, 1], vec![]));
        store.sleeps(&fourth);
    }
}
