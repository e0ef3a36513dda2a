//! The reserve for reads: what is on disk can be read while all memory is taken by what has to
//! stay, and the disk takes nothing more.

use kvtier_testkit::fixtures::by_hand;
use kvtier_testkit::fixtures::store as support;

use by_hand::{MODEL, World};
use kvtier::base::status::Status;
use kvtier::store::state::{Config, Level, TransferKind};
use kvtier_testkit::disk::plan::{Fault, Plan};
use kvtier_testkit::disk::{SimFiles, SimOpts};
use support::{Engine, Shape, document, marks_of};

const ALL: std::ops::Range<usize> = 0..MODEL.layers;
/// Cells that fit in memory.
const CELLS: usize = 16;

fn config() -> Config {
    Config { host_bytes: CELLS as u64 * 4096, ..World::config() }
}

/// A store with a document on disk, and memory that is full of another one's chunks: a session
/// holds them, and the disk has failed. The session.
fn full() -> (World, Vec<u32>, u32) {
    let opts = SimOpts { capacity_bytes: 64 << 20, ..SimOpts::default() };
    let world = World::on(SimFiles::new(1, opts), config(), None);
    let old = document(1, 64);
    assert_eq!(world.put(&old, ALL, Level::Disk), Status::Ok);
    let files = world.files.clone();
    drop(world);
    let world = World::on(files.reopen(), config(), None);
    world.files.set_plan(Plan::default().often(Fault::WriteError, 1_000_000));
    let new = document(2, MODEL.chunk * CELLS / MODEL.layers);
    let session = world.session(&new);
    let mut engine = Engine::new(MODEL, Shape::Tokens, new.len());
    engine.compute(&marks_of(0, &new));
    assert_eq!(world.ends(session, TransferKind::Put, Level::Ram, engine.whole()), Status::Ok);
    (world, old, session)
}

#[test]
fn what_is_on_disk_is_read_while_memory_is_full() {
    let (world, old, session) = full();
    for _ in 0..3 {
        assert!(world.is_there(&old), "the reserve serves one cell after the other");
    }
    let report = world.with(|core| core.report());
    assert_eq!((report.counters.no_room, report.host_cells), (0, CELLS as u64));
    world.with(|core| core.close_session(session)).expect("open");
    assert!(world.is_there(&old));
}

#[test]
fn a_put_that_finds_no_memory_still_hears_of_it() {
    let (world, old, _) = full();
    assert_eq!(world.put(&document(3, 32), ALL, Level::Ram), Status::Budget);
    assert!(world.is_there(&old), "reads go on");
}

#[test]
fn a_read_that_is_given_up_frees_the_reserve() {
    let (world, old, _) = full();
    let session = world.session(&old);
    let engine = Engine::new(MODEL, Shape::Tokens, old.len());
    let what = engine.whole();
    let number = world.with(|core| {
        core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("room")
    });
    for hands in kvtier::store::state::work::WorkerKind::ALL {
        while world.work(hands) {
            let cells = world.with(|core| core.report()).host_cells;
            assert!(cells <= CELLS as u64 + 1, "{cells} cells");
            if cells > CELLS as u64 {
                break;
            }
        }
    }
    world.with(|core| core.cancel(number, Status::Cancelled));
    world.rest();
    assert!(world.is_there(&old));
}
