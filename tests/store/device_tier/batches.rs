//! The batches of copies that a store with a device tier makes.

use std::sync::Arc;

use kvtier::base::budget::Tier;
use kvtier::device::Memory;
use kvtier::device::simulated::Simulated;
use kvtier::meta::chunks::{Cell, Location};
use kvtier::meta::key::Key;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::tier::disk::{CellAt, Options, Spot};
use kvtier_testkit::disk::{SimFiles, SimOpts as DiskOpts};
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore};

use crate::device_tier::device_store::{CELLS, MODEL, TOKENS, quick};
use kvtier_testkit::fixtures::store::{Engine, Shape, document, in_memory, marks_of, spec_of};

/// Number of planes that are copied between each pair of memories.
#[test]
fn device_replicas_are_copied_without_the_link() {
    let (store, session, mut engine) = with_document(&quick(), Memory::Host, Level::Ram);
    store.lock().drop_range(session, 0, TOKENS as u64).expect("no other references");
    let tokens = document(1, TOKENS);
    // Planes between the engine and host memory, between the engine and the device tier, and
    // cells that are filled in the device tier.
    let mut count = |kind, memory: Memory, what: &str, right: [u64; 3]| {
        if kind == TransferKind::Put {
            engine.compute(&marks_of(0, &tokens));
        }
        store.submit(session, kind, Level::Ram, in_memory(engine.whole(), memory));
        let mut seen = [0; 3];
        while let Some(work) = take(&store) {
            if let Work::Copies(batch) = &work {
                let on_device = batch.items.iter().filter(|item| item.memory == Memory::Device);
                let on_device = on_device.count() as u64;
                seen[0] += batch.items.len() as u64 - on_device;
                seen[1] += on_device;
                seen[2] += batch.fills.len() as u64;
            }
            store.run(work);
        }
        assert_eq!(seen, right, "{what}");
        let finished = store.finished();
        assert!(finished.iter().all(|one| one.error.is_none()) && !finished.is_empty());
        engine.check(&marks_of(0, &tokens), 0..TOKENS, 0..MODEL.layers);
        store.with(|state| {
            if what == "a copy" {
                // Drops all device replicas.
                state.set_device_bytes(0).expect("a device tier");
                state.set_device_bytes(1 << 20).expect("a device tier");
            }
            state.check().expect("consistent tables");
        });
    };
    count(TransferKind::Put, Memory::Device, "a put", [2 * CELLS, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Device, "a copy", [0, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Device, "a promotion", [0, 2 * CELLS, CELLS]);
    count(TransferKind::Get, Memory::Device, "a copy again", [0, 2 * CELLS, 0]);
    count(TransferKind::Get, Memory::Host, "a get into host memory", [2 * CELLS, 0, 0]);
}

/// A stepped store with a device tier, and one session that has stored a document.
pub fn with_document(
    device: &Arc<Simulated>,
    from: Memory,
    level: Level,
) -> (SteppedStore, u32, Engine) {
    let store = stepped(
        "store(host=8MiB, device=device(capacity=1MiB))",
        device.clone(),
        (level > Level::Ram).then(|| {
            let files =
                SimFiles::new(1, DiskOpts { capacity_bytes: 16 << 20, ..Default::default() });
            (files, Options { segment_bytes: 1 << 20, ..Options::new(8 << 20, [7; 16]) })
        }),
    );
    let session = store.session(&document(1, TOKENS));
    let marks = marks_of(0, &document(1, TOKENS));
    let mut engine = Engine::computed(MODEL, Shape::Tokens, &marks);
    store.submit(session, TransferKind::Put, level, in_memory(engine.whole(), from));
    store.settle();
    engine.check(&marks, 0..TOKENS, 0..MODEL.layers);
    store.finished();
    (store, session, engine)
}

/// A stepped store that copies with a device.
pub fn stepped(
    spec: &str,
    device: Arc<Simulated>,
    disk: Option<(SimFiles, Options)>,
) -> SteppedStore {
    SteppedStore::new(Parts {
        config: spec_of(spec).config,
        device,
        device_tier: true,
        disk,
        layout: MODEL.layout(),
        batch_ns: 1,
        ..Parts::default()
    })
}

/// Takes a batch of copies.
pub fn take(store: &SteppedStore) -> Option<Work> {
    store.with(|state| state.take(WorkerKind::Copy))
}

/// The limit shrinks while copies into and out of the device tier are under way. Slabs are freed
/// when these copies have ended.
#[test]
fn slabs_are_freed_after_their_copies_end() {
    for from in [Memory::Host, Memory::Device] {
        let device = quick();
        let (store, session, mut engine) = with_document(&device, from, Level::Ram);
        let device_cells = || store.lock().device_cells();
        assert_eq!(device_cells(), if from == Memory::Device { CELLS } else { 0 });
        let cells = in_memory(engine.whole(), Memory::Device);
        store.submit(session, TransferKind::Get, Level::Ram, cells);
        let batch = take(&store).expect("a get");
        store.lock().set_device_bytes(0).expect("a device tier");
        assert_eq!(device_cells(), 0);
        while let Some(work) = take(&store) {
            assert!(matches!(work, Work::Slabs(_)), "one batch has all copies");
            store.run(work);
        }
        assert!(device.allocated_bytes() > 0, "the source of a copy is still allocated");
        store.run(batch);
        store.run_all(WorkerKind::Copy);
        assert_eq!((device_cells(), device.allocated_bytes()), (0, 0), "{from:?}");
        engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
        store.lock().check().expect("consistent tables");
    }
}

/// A cell that is lost in all other tiers while it is copied to the device is not resident there.
#[test]
fn cell_lost_during_promotion_is_not_resident_on_the_device() {
    let (store, session, mut engine) = with_document(&quick(), Memory::Host, Level::Disk);
    let cells = in_memory(engine.whole(), Memory::Device);
    store.submit(session, TransferKind::Get, Level::Ram, cells);
    let batch = take(&store).expect("a get");
    store.with(|state| {
        assert_eq!(state.demote_range(session, 0, TOKENS as u64).expect("open").freed, 4);
        let (namespace, slots) = {
            let session = state.session(session).expect("open");
            (session.namespace(), session.path().slots().to_vec())
        };
        for (slot, layer) in
            slots.iter().flat_map(|&slot| (0..MODEL.layers).map(move |l| (slot, l)))
        {
            let table = state.table_of(namespace).expect("open");
            let cell = Cell { chunk: slot, layer };
            let place = table.chunks.place(cell, Tier::Disk).expect("a chunk");
            let Some(Location::Disk { spot, seal, coded }) = place else {
                panic!("not on disk: {cell:?}")
            };
            let chunk = table.record_of(slot, Key([1; 32]));
            let (spot, stored_bytes) = (Spot(spot), table.disk_bytes(cell, coded));
            if state.lost(&CellAt { chunk, layer: layer as u32, spot, seal, stored_bytes }) {
                store.tools.disk.as_ref().expect("a disk").drop_cells([(spot, stored_bytes)]);
            }
        }
    });
    store.run(batch);
    engine.check(&marks_of(0, &document(1, TOKENS)), 0..TOKENS, 0..MODEL.layers);
    store.with(|state| {
        state.check().expect("no cell is resident on the device alone");
        assert_eq!((state.device_cells(), state.counters.device_promoted_cells), (0, 0));
    });
}
