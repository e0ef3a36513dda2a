//! Whose turn it is to be copied: a large cell goes in parts, and who came meanwhile goes between
//! them.

use std::sync::Arc;

use kvtier::base::status::Status;
use kvtier::device::host::Host;
use kvtier::meta::key::Key;
use kvtier::store::executor::Tools;
use kvtier::store::state::work::{CopyBatch, Work, WorkerKind};
use kvtier::store::state::{Config, Level, SessionOpts, SpaceOpts, StoreState, TransferKind};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

use crate::device_tier::batches::carry_out;

/// Cells of 4 KiB.
const SMALL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };
/// Cells of 256 KiB.
const LARGE: Model = Model { layers: 2, heads: 2, run: 64, chunk: 1024 };
/// A batch of copies.
const BATCH: u64 = 64 << 10;

/// A store in memory whose copies are made by hand.
pub struct World {
    pub core: StoreState,
    tools: Tools,
}

impl World {
    pub fn new() -> World {
        World::sized(64 << 20)
    }

    pub fn sized(host_bytes: u64) -> World {
        let host_policy = "lru".into();
        let config = Config { host_bytes, copy_bytes: BATCH, host_policy, ..Config::default() };
        let core = StoreState::new(config, None, None).expect("sound");
        World { core, tools: Tools { device: Arc::new(Host::default()), disk: None, remote: None } }
    }

    pub fn session(&mut self, number: u8, model: &Model, tokens: &[u32]) -> u32 {
        let key = Key([number; 32]);
        let opts = SpaceOpts { key, layout: model.layout(), holes: false };
        let space = self.core.open_space(&opts).expect("opened");
        let session = self.core.open_session(space, &SessionOpts::default()).expect("opened");
        self.core.append(session, tokens).expect("room");
        session
    }

    pub fn submit(&mut self, session: u32, kind: TransferKind, engine: &Engine) -> u32 {
        let what = engine.whole();
        self.core.submit_cell_range(session, kind, Level::Ram, 0, what).expect("submitted")
    }

    /// The next copies are made; their bytes by their number of tokens, and whose they are.
    pub fn copy(&mut self) -> Option<Vec<(u32, usize)>> {
        let work = self.core.take(WorkerKind::Copy)?;
        let made = match &work {
            Work::Copies(batch) => parts(batch),
            _ => Vec::new(),
        };
        carry_out(&mut self.core, &self.tools, work);
        Some(made)
    }

    pub fn copy_all(&mut self) {
        while self.copy().is_some() {}
        assert!(self.core.is_idle());
        self.core.check().expect("the tables agree");
    }
}

/// Tokens and layer of each K that a batch copies.
fn parts(batch: &CopyBatch) -> Vec<(u32, usize)> {
    let keys = batch.items.iter().filter(|item| !item.is_v);
    keys.map(|item| (item.tokens, item.layer)).collect()
}

fn engine(space: u32, model: Model, tokens: &[u32]) -> Engine {
    let mut engine = Engine::new(model, Shape::Tokens, tokens.len());
    engine.compute(&marks_of(space, tokens));
    engine
}

#[test]
fn a_small_get_goes_between_the_parts_of_a_large_put() {
    let mut world = World::new();
    let (few, many) = (document(1, 16), document(2, 1024));
    let small = world.session(1, &SMALL, &few);
    let large = world.session(2, &LARGE, &many);
    let (from_small, from_large) = (engine(1, SMALL, &few), engine(2, LARGE, &many));
    world.submit(small, TransferKind::Put, &from_small);
    world.copy_all();
    world.submit(large, TransferKind::Put, &from_large);
    // A quarter of a batch at a time: 64 of 1,024 tokens.
    assert_eq!(world.copy(), Some(vec![(64, 0)]));
    assert_eq!(world.copy(), Some(vec![(64, 0)]));
    let mut to_small = Engine::new(SMALL, Shape::Heads, few.len());
    world.submit(small, TransferKind::Get, &to_small);
    // At most one part goes before it.
    let mut before = 0;
    while !world.copy().expect("there is more").contains(&(16, 0)) {
        before += 1;
    }
    assert!(before <= 1, "{before} parts went first");
    to_small.check(&marks_of(1, &few), 0..16, 0..1);
    // The first cell goes on where it was: an engine that waits for its first layer has it first.
    let mut layers = Vec::new();
    while let Some(made) = world.copy() {
        layers.extend(made.iter().map(|one| one.1));
    }
    assert!(layers.is_sorted() && layers.len() >= 29, "{layers:?}");
    let mut to_large = Engine::new(LARGE, Shape::Heads, many.len());
    world.submit(large, TransferKind::Get, &to_large);
    world.copy_all();
    to_large.check(&marks_of(2, &many), 0..1024, 0..2);
}

#[test]
fn a_put_that_is_given_up_between_two_parts_leaves_nothing() {
    let mut world = World::new();
    let many = document(2, 1024);
    let session = world.session(2, &LARGE, &many);
    let from = engine(2, LARGE, &many);
    for parts in [1, 5, 17] {
        let number = world.submit(session, TransferKind::Put, &from);
        (0..parts).for_each(|_| assert!(world.copy().is_some()));
        world.core.cancel(number, Status::Cancelled);
        world.copy_all();
        let there = world.core.host().stats().live_bytes;
        assert_eq!(
            there,
            u64::from(parts > 16) * (256 << 10),
            "{parts} parts: a whole cell, or none"
        );
    }
    // And what was left is put as if nothing had been.
    world.submit(session, TransferKind::Put, &from);
    world.copy_all();
    let mut to = Engine::new(LARGE, Shape::Heads, many.len());
    world.submit(session, TransferKind::Get, &to);
    world.copy_all();
    to.check(&marks_of(2, &many), 0..1024, 0..2);
}
