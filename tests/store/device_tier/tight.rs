//! Cores by hand that have hardly any memory: who waits, who leaves, and what is counted.

use std::sync::Arc;

use kvtier::base::status::Status;
use kvtier::device::{Device, Event, Memory};
use kvtier::meta::chunks::Pin;
use kvtier::meta::key::Key;
use kvtier::store::executor::Tools;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{SessionOpts, SpaceOpts, StoreState};

use crate::device_tier::batches::{by_hand, carry_out};
use crate::device_tier::rig::{CELLS, MODEL, TOKENS, in_memory, quick};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, spec_of};

/// A core by hand, and documents that its engines compute.
struct Bench {
    core: StoreState,
    tools: Tools,
    engines: Vec<Engine>,
}

impl Bench {
    fn new(spec: &str) -> Bench {
        let device: Arc<dyn Device> = quick();
        let mut core = StoreState::new(spec_of(spec).config, None, None).expect("sound");
        core.tick(5_000_000_000);
        core.begin_device(&device).expect("memory");
        Bench { core, tools: Tools { device, disk: None, remote: None }, engines: Vec::new() }
    }

    fn space(&mut self, number: u8, model: &Model) -> u32 {
        let opts = SpaceOpts { key: Key([number; 32]), layout: model.layout(), holes: false };
        self.core.open_space(&opts).expect("opened")
    }

    fn session(&mut self, space: u32, number: u32) -> u32 {
        let session = self.core.open_session(space, &SessionOpts::default()).expect("opened");
        self.core.append(session, &document(number, TOKENS)).expect("room");
        session
    }

    /// Begins a move of a whole document in device memory.
    fn begin(
        &mut self,
        session: u32,
        kind: TransferKind,
        model: Model,
        after: Option<Event>,
    ) -> u32 {
        let engine = Engine::new(model, Shape::Tokens, TOKENS);
        let mut what = in_memory(engine.whole(), Memory::Device);
        what.after = after;
        self.engines.push(engine);
        self.core.submit_cell_range(session, kind, Level::Ram, 0, what).expect("submitted")
    }

    fn put(&mut self, session: u32, model: Model) {
        self.begin(session, TransferKind::Put, model, None);
        self.go();
        assert_eq!(self.ended(), [Status::Ok]);
    }

    fn go(&mut self) {
        while let Some(work) = self.core.take(WorkerKind::Copy) {
            carry_out(&mut self.core, &self.tools, work);
        }
    }

    /// How moves have ended since this was asked.
    fn ended(&mut self) -> Vec<Status> {
        let mut finished = Vec::new();
        self.core.finished(&mut finished);
        let status = |error: &Option<_>| error.as_ref().map_or(Status::Ok, status_of);
        finished.iter().filter(|one| one.last).map(|one| status(&one.error)).collect()
    }
}

fn status_of(error: &kvtier::base::status::Error) -> Status {
    error.status()
}

/// Copies out of device memory that nobody has begun are motion like any other.
#[test]
fn who_needs_memory_waits_for_copies_out_of_the_device() {
    let mut bench = Bench::new("store(host=256KiB, device=device(capacity=1MiB))");
    let space = bench.space(1, &MODEL);
    let sessions = [1, 2, 3].map(|number| bench.session(space, number));
    sessions[..2].iter().for_each(|&session| bench.put(session, MODEL));
    assert_eq!(bench.core.device_cells(), 2 * CELLS);
    for &session in &sessions[..2] {
        bench.begin(session, TransferKind::Get, MODEL, None);
        bench.core.close_session(session).expect("closed");
    }
    bench.begin(sessions[2], TransferKind::Put, MODEL, None);
    assert_eq!((bench.ended(), bench.core.counters.no_room), (vec![], 0));
    bench.go();
    assert_eq!(bench.ended(), [Status::Ok; 3]);
    bench.core.check().expect("the tables agree");
}

/// So are copies behind an event that has come.
#[test]
fn who_needs_memory_waits_for_copies_behind_an_event_that_has_come() {
    let mut bench = Bench::new("store(host=256KiB)");
    let space = bench.space(1, &MODEL);
    let sessions = [1, 2, 3].map(|number| bench.session(space, number));
    sessions[..2].iter().for_each(|&session| bench.put(session, MODEL));
    let event = Event(77);
    bench.begin(sessions[0], TransferKind::Get, MODEL, Some(event));
    bench.core.close_session(sessions[0]).expect("closed");
    let batch = bench.core.take_behind(event).expect("copies");
    assert!(bench.core.take_behind(event).is_none(), "one batch has all that may begin");
    bench.core.event_ended(event, Ok(()));
    bench.go();
    // Its memory comes free when the batch has ended; the second document is held.
    bench.begin(sessions[2], TransferKind::Put, MODEL, None);
    bench.go();
    assert_eq!((bench.ended(), bench.core.counters.no_room), (vec![], 0));
    bench.core.done_behind(batch, &Ok(()), false);
    bench.go();
    assert_eq!(bench.ended(), [Status::Ok; 2]);
    bench.core.check().expect("the tables agree");
}

/// A cell of another size gets a slab of its own now and then, and sends nobody away between.
#[test]
fn a_cell_of_another_size_sends_nobody_away_for_nothing() {
    for pins in [false, true] {
        let mut bench = Bench::new("store(host=8MiB, device=device(capacity=256KiB, policy=lru))");
        let small = Model { run: 32, ..MODEL };
        let spaces = [bench.space(1, &MODEL), bench.space(2, &small)];
        for number in [1, 2] {
            let session = bench.session(spaces[0], number);
            let pin = Pin { priority: 1, until_ns: u64::MAX };
            for chunk in [0, 2].into_iter().filter(|_| pins) {
                let each = MODEL.chunk as u64;
                bench.core.pin(session, chunk * each, each, pin).expect("pinned");
            }
            bench.put(session, MODEL);
        }
        let before = bench.core.device_cells();
        assert_eq!(before, 2 * CELLS, "all of it is taken");
        for number in 3..7 {
            let session = bench.session(spaces[1], number);
            bench.put(session, small);
        }
        let (cells, evicted) = (bench.core.device_cells(), bench.core.counters.device_evicted);
        println!("pins {pins}: {before} cells, then {cells}; {evicted} chunks sent away");
        if pins {
            assert_eq!((cells, evicted), (before, 0));
        } else {
            assert!(bench.core.counters.promoted > 2 * CELLS, "a slab has become theirs");
        }
        bench.core.check().expect("the tables agree");
    }
}

/// A cell that is copied a second time, since the first failed, was hit once.
#[test]
fn a_cell_is_hit_once() {
    let (mut core, tools, session, engine) = by_hand(&quick(), Memory::Host, Level::Ram);
    let what = in_memory(engine.whole(), Memory::Device);
    core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("submitted");
    let work = core.take(WorkerKind::Copy).expect("a get");
    core.done(work, Err(Status::Io.into()), 1);
    while let Some(work) = core.take(WorkerKind::Copy) {
        carry_out(&mut core, &tools, work);
    }
    let counters = &core.counters;
    let hits = [counters.host_hits, counters.device_hits, counters.disk_hits];
    assert_eq!(hits, [CELLS, 0, 0]);
}
