//! What hands are given to copy.

use std::sync::Arc;

use kvtier::base::budget::Tier;
use kvtier::device::simulated::Simulated;
use kvtier::device::{Device, Memory, Stream};
use kvtier::meta::chunks::{Cell, Location};
use kvtier::meta::key::Key;
use kvtier::store::executor::Tools;
use kvtier::store::state::disk_gc::{CheckpointWriter, Page};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::store::state::{SessionOpts, SpaceOpts, StoreState};
use kvtier::tier::disk::{CellAt, CellIndex, DiskTier, Options, Spot};
use kvtier_testkit::disk::{SimFiles, SimOpts as DiskOpts};

use crate::device_tier::rig::{CELLS, MODEL, TOKENS, in_memory, quick};
use kvtier_testkit::fixtures::store::{Engine, Shape, document, marks_of, spec_of};

/// The batches themselves: what crosses the link, and how often.
#[test]
fn what_is_on_the_device_crosses_no_link() {
    let (mut core, tools, session, mut engine) = by_hand(&quick(), Memory::Host, Level::Ram);
    core.drop_range(session, 0, TOKENS as u64).expect("nobody else has it");
    let tokens = document(1, TOKENS);
    // Planes between the engine and host memory, between it and the device, cells that are
    // filled there.
    let mut count = |kind, memory: Memory, what: &str, right: [u64; 3]| {
        if kind == TransferKind::Put {
            engine.compute(&marks_of(0, &tokens));
        }
        let cell_range = in_memory(engine.whole(), memory);
        core.submit_cell_range(session, kind, Level::Ram, 0, cell_range).expect("submitted");
        let mut seen = [0; 3];
        while let Some(work) = core.take(WorkerKind::Copy) {
            if let Work::Copies(batch) = &work {
                let near = batch.items.iter().filter(|item| item.memory == Memory::Device);
                let near = near.count() as u64;
                seen[0] += batch.items.len() as u64 - near;
                seen[1] += near;
                seen[2] += batch.fills.len() as u64;
            }
            carry_out(&mut core, &tools, work);
        }
        assert_eq!(seen, right, "{what}");
        let mut finished = Vec::new();
        core.finished(&mut finished);
        assert!(finished.iter().all(|one| one.error.is_none()) && !finished.is_empty());
        engine.check(&marks_of(0, &tokens), 0..TOKENS, 0..MODEL.layers);
        if what == "a copy" {
            // Nothing is left there, and there is room again.
            core.set_device_bytes(0).expect("there is a tier");
            core.set_device_bytes(1 << 20).expect("there is a tier");
        }
        core.check().expect("the tables agree");
    };
    count(TransferKind::Put, Memory::Device, "a put", [2 * CELLS, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Device, "a copy", [0, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Device, "a way up", [0, 2 * CELLS, CELLS]);
    count(TransferKind::Get, Memory::Device, "a copy again", [0, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Host, "a get elsewhere", [2 * CELLS, 0, 0]);
}

/// A core by hand, with one session that has stored a document.
pub fn by_hand(
    device: &Arc<Simulated>,
    from: Memory,
    level: Level,
) -> (StoreState, Tools, u32, Engine) {
    let config = spec_of("store(host=8MiB, device=device(capacity=1MiB))").config;
    let disk = (level > Level::Ram).then(|| {
        let files = SimFiles::new(1, DiskOpts { capacity_bytes: 16 << 20, ..Default::default() });
        let options = Options { segment_bytes: 1 << 20, ..Options::new(8 << 20, [7; 16]) };
        Arc::new(DiskTier::open(std::sync::Arc::new(files), options).expect("sound").0)
    });
    let mut core = StoreState::new(config, None, disk.clone()).expect("sound");
    core.tick(1);
    let device: Arc<dyn Device> = device.clone();
    core.begin_device(&device).expect("memory");
    let opts = SpaceOpts { key: Key([1; 32]), layout: MODEL.layout(), holes: false };
    let space = core.open_space(&opts).expect("opened");
    let session = core.open_session(space, &SessionOpts::default()).expect("opened");
    core.append(session, &document(1, TOKENS)).expect("room");
    let tools = Tools { device, disk, remote: None };
    let mut engine = Engine::new(MODEL, Shape::Tokens, TOKENS);
    engine.compute(&marks_of(0, &document(1, TOKENS)));
    let what = in_memory(engine.whole(), from);
    core.submit_cell_range(session, TransferKind::Put, level, 0, what).expect("submitted");
    while let Some(work) = WorkerKind::ALL.into_iter().find_map(|hands| core.take(hands)) {
        carry_out(&mut core, &tools, work);
    }
    engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
    (core, tools, session, engine)
}

pub fn carry_out(core: &mut StoreState, tools: &Tools, mut work: Work) {
    // SAFETY: engines of the tests here outlive their moves.
    let outcome = unsafe { tools.work(&mut work, Stream(0), &mut NoCheckpoint) };
    core.done(work, outcome, 1);
}

/// A limit that changes while copies into and out of the device are under way: memory goes
/// when they have ended, not before, and not never.
#[test]
fn slabs_go_when_the_copies_have_ended() {
    for from in [Memory::Host, Memory::Device] {
        let device = quick();
        let (mut core, tools, session, mut engine) = by_hand(&device, from, Level::Ram);
        assert_eq!(core.device_cells(), if from == Memory::Device { CELLS } else { 0 });
        let what = in_memory(engine.whole(), Memory::Device);
        core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("submitted");
        let batch = core.take(WorkerKind::Copy).expect("a get");
        core.set_device_bytes(0).expect("there is a tier");
        assert_eq!(core.device_cells(), 0);
        while let Some(work) = core.take(WorkerKind::Copy) {
            assert!(matches!(work, Work::Slabs(_)), "one batch has all of it");
            carry_out(&mut core, &tools, work);
        }
        assert!(device.allocated_bytes() > 0, "what is copied is there still");
        carry_out(&mut core, &tools, batch);
        while let Some(work) = core.take(WorkerKind::Copy) {
            carry_out(&mut core, &tools, work);
        }
        assert_eq!((core.device_cells(), device.allocated_bytes()), (0, 0), "{from:?}");
        engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
        core.check().expect("the tables agree");
    }
}

/// A cell that is nowhere else any more when it has come to the device is not there either.
#[test]
fn what_is_lost_on_the_way_to_the_device_does_not_arrive() {
    let (mut core, tools, session, mut engine) = by_hand(&quick(), Memory::Host, Level::Disk);
    let what = in_memory(engine.whole(), Memory::Device);
    core.submit_cell_range(session, TransferKind::Get, Level::Ram, 0, what).expect("submitted");
    let batch = core.take(WorkerKind::Copy).expect("a get");
    assert_eq!(core.demote_range(session, 0, TOKENS as u64).expect("open").freed, 4);
    let (space, slots) = {
        let session = core.session(session).expect("open");
        (session.space(), session.path().slots().to_vec())
    };
    for (slot, layer) in slots.iter().flat_map(|&slot| (0..MODEL.layers).map(move |l| (slot, l))) {
        let table = core.table_of(space).expect("open");
        let cell = Cell { chunk: slot, layer };
        let place = table.chunks.place(cell, Tier::Disk).expect("there is a chunk");
        let Some(Location::Disk { spot, seal, coded }) = place else {
            panic!("not on disk: {cell:?}")
        };
        let chunk = table.record_of(slot, Key([1; 32]));
        let (spot, stored_bytes) = (Spot(spot), table.disk_bytes(cell, coded));
        if core.lost(&CellAt { chunk, layer: layer as u32, spot, seal, stored_bytes }) {
            tools.disk.as_ref().expect("there is one").drop_cells([(spot, stored_bytes)]);
        }
    }
    carry_out(&mut core, &tools, batch);
    engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
    core.check().expect("nothing is on the device alone");
    assert_eq!((core.device_cells(), core.counters.promoted), (0, 0));
}

/// Nothing here has the disk cleaned, and nobody asks these.
struct NoCheckpoint;

impl CellIndex for NoCheckpoint {
    fn wants(&mut self, _cell: &CellAt) -> bool {
        unreachable!("nothing is cleaned")
    }

    fn moved(&mut self, _cell: &CellAt, _to: Spot) -> bool {
        unreachable!("nothing is cleaned")
    }

    fn lost(&mut self, _cell: &CellAt) -> bool {
        unreachable!("nothing is cleaned")
    }
}

impl CheckpointWriter for NoCheckpoint {
    fn page(&mut self, _from: (u32, u32), _page: &mut Page) -> Option<(u32, u32)> {
        unreachable!("nothing is cleaned")
    }
}
