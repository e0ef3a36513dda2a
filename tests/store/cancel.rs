//! Transfers that are cancelled while others occupy all job slots or all memory.

use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{CellRange, Config, Finished, Level, TransferKind, Wanted};
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore};

const LAYERS: usize = 4;
const CHUNK: u32 = 4;

/// A store in host memory. Its copies report success without touching memory.
struct Store(SteppedStore);

impl Store {
    fn new(max_jobs: u32, cells: u64) -> Store {
        let config = Config {
            host_bytes: cells * 4096,
            host_policy: "lru".into(),
            max_chunks: 4096,
            max_jobs,
            ..Config::default()
        };
        let group = Group::gqa(0..LAYERS as u16, 1, 2, Dtype::Bf16).expect("a group");
        let layout = Layout::new(CHUNK, vec![group]).expect("a layout");
        Store(SteppedStore::new(Parts { config, layout, ..Parts::default() }))
    }

    /// A session of so many chunks. Sessions of different numbers share no chunk.
    fn session(&self, number: u32, chunks: u32) -> u32 {
        let tokens: Vec<u32> = (0..chunks * CHUNK).map(|i| number << 16 | i).collect();
        self.0.session(&tokens)
    }

    fn put(&self, session: u32, chunks: u32) -> u32 {
        self.0.submit(session, TransferKind::Put, Level::Ram, cell_range(chunks))
    }

    fn cancel(&self, number: u32) {
        self.0.lock().cancel(number, Status::Cancelled);
        self.ended_alone(number, Status::Cancelled);
    }

    fn ended(&self) -> Vec<Finished> {
        self.0.lock().check().expect("sound");
        self.0.finished()
    }

    /// Checks that this transfer is the only one that has ended, with this status.
    fn ended_alone(&self, number: u32, status: Status) {
        let all = self.ended();
        let [one] = &all[..] else { panic!("{all:?}") };
        let how = one.error.as_ref().map_or(Status::Ok, |error| error.status());
        assert_eq!((one.number, how, one.last), (number, status, true));
    }

    /// Completes all copies that can begin.
    fn copy(&self) {
        loop {
            let Some(work) = self.0.lock().take(WorkerKind::Copy) else { return };
            let mut state = self.0.lock();
            state.check().expect("sound");
            state.done(work, Ok(()), 0);
        }
    }

    fn is_quiet(&self) -> bool {
        self.0.lock().is_quiet()
    }
}

fn cell_range(chunks: u32) -> CellRange {
    let tokens = chunks * CHUNK;
    let plane = || PlaneView::canonical(4096, tokens, 4);
    let views: Vec<_> = (0..LAYERS).map(|_| LayerViews { k: plane(), v: Some(plane()) }).collect();
    CellRange {
        first_token: 0,
        tokens: tokens.into(),
        first_layer: 0,
        layers: LAYERS,
        by_layer: false,
        wanted: Wanted::All,
        views: Arc::new(Views::from(views)),
        after: None,
    }
}

#[test]
fn transfer_waiting_for_job_slots_can_be_cancelled() {
    let store = Store::new(8, 64);
    let sessions: Vec<u32> = (1..6).map(|number| store.session(number, 8)).collect();
    let moves: Vec<u32> = sessions.iter().map(|&session| store.put(session, 8)).collect();
    assert!(store.ended().is_empty());
    for &number in moves[1..].iter().rev() {
        store.cancel(number);
    }
    store.copy();
    store.ended_alone(moves[0], Status::Ok);
    assert!(store.is_quiet());
}

/// A transfer that waits for job slots is cancelled. The next transfer, which waits for its ready
/// signal, gets the same number and must not start in its place.
#[test]
fn waiting_transfer_does_not_start_for_a_cancelled_one() {
    for at in 1..6 {
        let store = Store::new(8, 256);
        let sessions: Vec<u32> = (1..8).map(|number| store.session(number, 8)).collect();
        let mut moves: Vec<u32> = sessions[..6].iter().map(|&one| store.put(one, 8)).collect();
        let given_up = moves.remove(at);
        store.cancel(given_up);
        let what = cell_range(8);
        let submitted =
            store.0.lock().submit_waiting(sessions[6], TransferKind::Put, Level::Ram, 0, what);
        let (waits, ticket) = submitted.expect("room");
        assert_eq!(waits, given_up, "numbers are reused");
        store.copy();
        let mut ended: Vec<u32> = store.ended().iter().map(|one| one.number).collect();
        ended.sort_unstable();
        assert_eq!(ended, moves, "{at}");
        let counts = store.0.with(|state| (state.waiting_transfers(), state.counters.stored_cells));
        assert_eq!(counts, (1, 5 * 32));
        store.0.lock().begin_waiting(ticket);
        store.copy();
        store.ended_alone(waits, Status::Ok);
        assert!(store.is_quiet());
    }
}

/// Jobs in the middle of the queue are cancelled; the others keep their order.
#[test]
fn jobs_waiting_for_memory_can_be_cancelled_in_any_order() {
    let store = Store::new(4096, 16);
    let sessions: Vec<u32> = (1..9).map(|number| store.session(number, 4)).collect();
    // The first transfer takes all the memory; all others wait for memory.
    let moves: Vec<u32> = sessions.iter().map(|&session| store.put(session, 4)).collect();
    for at in [3, 1, 7, 4] {
        store.cancel(moves[at]);
    }
    // Stored chunks become candidates for eviction when their session is closed.
    for session in sessions {
        store.0.close_session(session);
    }
    store.copy();
    let ended = store.ended();
    assert!(ended.iter().all(|one| one.error.is_none()), "{ended:?}");
    let order: Vec<u32> = ended.iter().map(|one| one.number).collect();
    assert_eq!(order, [moves[0], moves[2], moves[5], moves[6]]);
    assert!(store.is_quiet());
}

#[test]
fn jobs_waiting_for_a_cell_can_be_cancelled_in_any_order() {
    let store = Store::new(4096, 64);
    let sessions: Vec<u32> = (0..8).map(|_| store.session(1, 4)).collect();
    // The first transfer puts the cells; the others wait until the cells are resident.
    let moves: Vec<u32> = sessions.iter().map(|&session| store.put(session, 4)).collect();
    for at in [3, 1, 7, 4] {
        store.cancel(moves[at]);
    }
    // Without the first transfer, the next one puts the cells.
    store.cancel(moves[0]);
    store.copy();
    let mut numbers: Vec<u32> = store.ended().iter().map(|one| one.number).collect();
    numbers.sort_unstable();
    let mut right = [moves[2], moves[5], moves[6]];
    right.sort_unstable();
    assert_eq!(numbers, right);
    let counts = store.0.with(|state| (state.counters.stored_cells, state.counters.known_cells));
    assert_eq!(counts, (16, 32));
    assert!(store.is_quiet());
}
