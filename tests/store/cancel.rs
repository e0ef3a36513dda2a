//! Moves that are given up while others have all the room there is.

use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{
    CellRange, Config, Finished, Level, SessionOpts, SpaceOpts, StoreState, TransferKind, Wanted,
};

const LAYERS: usize = 4;
const CHUNK: u32 = 4;

/// A store in memory, in which nothing is copied.
struct World {
    core: StoreState,
    space: u32,
}

impl World {
    fn new(max_jobs: u32, cells: u64) -> World {
        let config = Config {
            host_bytes: cells * 4096,
            host_policy: "lru".into(),
            max_chunks: 4096,
            max_jobs,
            ..Config::default()
        };
        let mut core = StoreState::new(config, None, None).expect("a core");
        core.tick(1);
        let group = Group::gqa(0..LAYERS as u16, 1, 2, Dtype::Bf16).expect("a group");
        let layout = Layout::new(CHUNK, vec![group]).expect("a layout");
        let opts = SpaceOpts { key: Key([1; 32]), layout, holes: false };
        let space = core.open_space(&opts).expect("a namespace");
        World { core, space }
    }

    /// A session of so many chunks that no other has.
    fn session(&mut self, number: u32, chunks: u32) -> u32 {
        let tokens: Vec<u32> = (0..chunks * CHUNK).map(|i| number << 16 | i).collect();
        let session = self.core.open_session(self.space, &SessionOpts::default()).expect("room");
        self.core.append(session, &tokens).expect("room");
        session
    }

    fn put(&mut self, session: u32, chunks: u32) -> u32 {
        let what = cell_range(chunks);
        self.core.submit_cell_range(session, TransferKind::Put, Level::Ram, 0, what).expect("room")
    }

    fn ended(&mut self) -> Vec<Finished> {
        self.core.check().expect("sound");
        let mut all = Vec::new();
        self.core.finished(&mut all);
        all
    }

    /// All copies that can be made.
    fn copy(&mut self) {
        while let Some(work) = self.core.take(WorkerKind::Copy) {
            self.core.check().expect("sound");
            self.core.done(work, Ok(()), 0);
        }
    }
}

fn cell_range(chunks: u32) -> CellRange {
    let tokens = chunks * CHUNK;
    let plane = || PlaneView::canonical(4096, tokens, 4);
    let views = (0..LAYERS).map(|_| LayerViews { k: plane(), v: Some(plane()) }).collect();
    CellRange {
        first_token: 0,
        tokens: tokens.into(),
        first_layer: 0,
        layers: LAYERS,
        by_layer: false,
        wanted: Wanted::All,
        views: Arc::new(Views(views)),
        after: None,
    }
}

/// The one move that has ended, with this status.
fn only(all: &[Finished], number: u32, status: Status) {
    let [one] = all else { panic!("{all:?}") };
    let how = one.error.as_ref().map_or(Status::Ok, |error| error.status());
    assert_eq!((one.number, how, one.last), (number, status, true));
}

#[test]
fn a_move_that_found_no_room_among_the_jobs_ends_when_it_is_given_up() {
    let mut world = World::new(8, 64);
    let sessions: Vec<u32> = (1..6).map(|number| world.session(number, 8)).collect();
    let moves: Vec<u32> = sessions.iter().map(|&session| world.put(session, 8)).collect();
    assert!(world.ended().is_empty());
    for &number in moves[1..].iter().rev() {
        world.core.cancel(number, Status::Cancelled);
        only(&world.ended(), number, Status::Cancelled);
    }
    world.copy();
    only(&world.ended(), moves[0], Status::Ok);
    assert!(world.core.is_quiet());
}

/// A move that was given up stood in line for room; the next one, which waits for the
/// engine's word, has its number, and does not begin in its place.
#[test]
fn a_move_does_not_begin_in_the_place_of_another() {
    for at in 1..6 {
        let mut world = World::new(8, 256);
        let sessions: Vec<u32> = (1..8).map(|number| world.session(number, 8)).collect();
        let mut moves: Vec<u32> = sessions[..6].iter().map(|&one| world.put(one, 8)).collect();
        let given_up = moves.remove(at);
        world.core.cancel(given_up, Status::Cancelled);
        only(&world.ended(), given_up, Status::Cancelled);
        let what = cell_range(8);
        let submitted =
            world.core.submit_waiting(sessions[6], TransferKind::Put, Level::Ram, 0, what);
        let (waits, ticket) = submitted.expect("room");
        assert_eq!(waits, given_up, "numbers are used again");
        world.copy();
        let mut ended: Vec<u32> = world.ended().iter().map(|one| one.number).collect();
        ended.sort_unstable();
        assert_eq!(ended, moves, "{at}");
        assert_eq!((world.core.waiting_moves(), world.core.counters.stored), (1, 5 * 32));
        world.core.begin_waiting(ticket);
        world.copy();
        only(&world.ended(), waits, Status::Ok);
        assert!(world.core.is_quiet());
    }
}

/// Of jobs that wait for memory, those in the middle go and the order of the others stays.
#[test]
fn those_that_wait_for_memory_are_given_up_anywhere_in_the_line() {
    let mut world = World::new(4096, 16);
    let sessions: Vec<u32> = (1..9).map(|number| world.session(number, 4)).collect();
    // The first has all the memory; all others wait for some.
    let moves: Vec<u32> = sessions.iter().map(|&session| world.put(session, 4)).collect();
    for at in [3, 1, 7, 4] {
        world.core.cancel(moves[at], Status::Cancelled);
        only(&world.ended(), moves[at], Status::Cancelled);
    }
    // What was stored may leave when its session has gone.
    for session in sessions {
        world.core.close_session(session).expect("it is open");
    }
    world.copy();
    let ended = world.ended();
    assert!(ended.iter().all(|one| one.error.is_none()), "{ended:?}");
    let order: Vec<u32> = ended.iter().map(|one| one.number).collect();
    assert_eq!(order, [moves[0], moves[2], moves[5], moves[6]]);
    assert!(world.core.is_quiet());
}

/// Of those that wait for one cell, too.
#[test]
fn those_that_wait_for_a_cell_are_given_up_anywhere_in_the_line() {
    let mut world = World::new(4096, 64);
    let sessions: Vec<u32> = (0..8).map(|_| world.session(1, 4)).collect();
    // The first puts the cells, the others wait until they are there.
    let moves: Vec<u32> = sessions.iter().map(|&session| world.put(session, 4)).collect();
    for at in [3, 1, 7, 4] {
        world.core.cancel(moves[at], Status::Cancelled);
        only(&world.ended(), moves[at], Status::Cancelled);
    }
    // Nobody puts them now: the next one does.
    world.core.cancel(moves[0], Status::Cancelled);
    only(&world.ended(), moves[0], Status::Cancelled);
    world.copy();
    let mut numbers: Vec<u32> = world.ended().iter().map(|one| one.number).collect();
    numbers.sort_unstable();
    let mut right = [moves[2], moves[5], moves[6]];
    right.sort_unstable();
    assert_eq!(numbers, right);
    assert_eq!((world.core.counters.stored, world.core.counters.known), (16, 32));
    assert!(world.core.is_quiet());
}
