//! A failing device, memory pressure, and concurrent callers.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier::base::budget::{Budget, Tier, TierUsage};
use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::device::{Device, Memory};
use kvtier::store::handle::Store;
use kvtier::store::state::transfer::{Level, TransferKind};

use crate::device_tier::device_store::{CELLS, DeviceStore, KIB, RIGHT, device_budget, quick};
use kvtier_testkit::fixtures::store::{
    Done, SHAPES, Scratch, Shape, mix, runtime, simulated, spec_of, until, with_disk,
};

#[test]
fn lost_device_loses_the_tier_and_no_data() {
    let scratch = Scratch::new("device");
    let spec = with_disk(
        &scratch.0,
        "bytes=64MiB,segment=1MiB",
        "host=2MiB,copiers=4,device=device(capacity=1MiB)",
    );
    let slow = simulated(SimulatedOpts { latency_ns: 200_000, ..SimulatedOpts::default() });
    let store = DeviceStore::on(&spec, slow, None);
    for number in 0..24 {
        let there = (Shape::Tokens, Memory::Device);
        assert_eq!(
            store.transfer_document(TransferKind::Put, Level::Durable, number, there),
            RIGHT
        );
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for caller in 0..4u64 {
            let (store, is_over) = (&store, &is_over);
            scope.spawn(move || {
                let mut lost = 0;
                for turn in 0.. {
                    let chance = mix(caller << 32 | turn);
                    let number = chance as u32 % 24;
                    let memory = if chance >> 40 & 1 == 0 { Memory::Host } else { Memory::Device };
                    // Found tokens are compared, whatever happened to the other ones.
                    let done = store.transfer_document(
                        TransferKind::Get,
                        Level::Ram,
                        number,
                        (Shape::Heads, memory),
                    );
                    match (done.status, memory) {
                        (Status::Ok, _) => assert_eq!(done, RIGHT),
                        (Status::Unavailable, Memory::Device) => lost += 1,
                        _ => panic!("{done:?} into {memory:?}"),
                    }
                    if is_over.load(Ordering::Acquire) && lost > 2 {
                        return;
                    }
                }
            });
        }
        until("some hits", || store.report().stats.device_hit_cells > 50);
        store.device.lose();
        is_over.store(true, Ordering::Release);
    });
    store.settle();
    let all = store.report();
    assert!(all.stats.device_is_lost == 1 && all.stats.device_lost_cells > 0, "{all:?}");
    assert_eq!(
        (all.stats.device_cells, all.stats.device_slabs, store.device.allocated_bytes()),
        (0, 0, 0)
    );
    assert_eq!(all.stats.missed_cells, 0, "no stored cell is missing");
    // The store continues with host memory.
    store.put_document(77, Memory::Host);
    (0..24).chain([77]).for_each(|number| store.get_document(number, Memory::Host));
    store.close();
    let store = DeviceStore::open(&spec);
    (0..24).for_each(|number| store.get_document(number, Memory::Device));
    store.close();
}

#[test]
fn failed_tier_copies_fall_back_to_host_memory() {
    // Batches of the put, then of the gets. Some of them fail.
    for (first, from) in (2..20).flat_map(|n| [(n, Memory::Host), (n, Memory::Device)]) {
        let fail_at = vec![first, first + 3];
        let opts = SimulatedOpts { latency_ns: 1000, fail_at, ..SimulatedOpts::default() };
        let spec = spec_of("store(host=8MiB, copiers=1, device=device(capacity=4MiB))");
        let store = DeviceStore::on(&spec, simulated(opts), None);
        let there = (Shape::Tokens, Memory::Device);
        let put = (Shape::Tokens, from);
        let ends =
            |done: Done| assert!([Status::Ok, Status::Io].contains(&done.status), "{done:?}");
        ends(store.transfer_document(TransferKind::Put, Level::Ram, 1, put));
        for _ in 0..30 {
            let done = store.transfer_document(TransferKind::Get, Level::Ram, 1, there);
            assert!([Status::Ok, Status::Io, Status::NotFound].contains(&done.status), "{done:?}");
        }
        store.settle();
        assert_eq!(store.audit().wrong, 0);
        store.close();
    }
}

/// Many callers, more data than fits in all tiers, a slow device, and changing limits.
#[test]
fn concurrent_callers_read_exact_bytes() {
    let scratch = Scratch::new("device");
    let device = "device=device(capacity=640KiB)";
    let spec =
        with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", &format!("host=1MiB,copiers=4,{device}"));
    let opts = SimulatedOpts { latency_ns: 20_000, seed: 9, ..SimulatedOpts::default() };
    let store = DeviceStore::on(&spec, simulated(opts), None);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4u64)
            .map(|caller| {
                let store = &store;
                scope.spawn(move || {
                    for turn in 0..120u64 {
                        let chance = mix(caller << 32 | turn);
                        let (number, shape) = (chance as u32 % 30, SHAPES[chance as usize % 5]);
                        let memory =
                            if chance >> 40 & 3 == 0 { Memory::Host } else { Memory::Device };
                        let put = store.transfer_document(
                            TransferKind::Put,
                            Level::Ram,
                            number,
                            (shape, memory),
                        );
                        assert_eq!(put, RIGHT);
                        let other = (chance >> 44) as u32 % 30;
                        let got = store.transfer_document(
                            TransferKind::Get,
                            Level::Ram,
                            other,
                            (shape, memory),
                        );
                        assert!([Status::Ok, Status::NotFound].contains(&got.status), "{got:?}");
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            for turn in 0u64.. {
                let bytes = (1 + mix(turn) % 10) * 64 * KIB;
                store.handle.with(|core| core.set_device_bytes(bytes)).expect("a device tier");
                assert_eq!(store.audit().wrong, 0);
                if is_over.load(Ordering::Acquire) {
                    return;
                }
            }
        });
        let ended: Vec<_> = callers.into_iter().map(|caller| caller.join()).collect();
        is_over.store(true, Ordering::Release);
        ended.into_iter().for_each(|one| one.expect("no caller has failed"));
    });
    store.settle();
    let counters = store.report().stats;
    assert!(counters.device_hit_cells > 0 && counters.device_evicted_chunks > 0, "{counters:?}");
    store.close();
}

#[test]
fn smaller_budget_reclaims_slabs() {
    let runtime = runtime();
    let budget = device_budget(&runtime, 2 << 20);
    let spec = spec_of("store(host=16MiB, device=device(capacity=4MiB))");
    let store = DeviceStore::on(&spec, quick(), Some(&budget));
    let lane = || -> TierUsage { budget.usage(Tier::Device) };
    assert_eq!(lane().committed_bytes, 2 << 20, "the whole budget");
    (0..12).for_each(|number| store.put_document(number, Memory::Device));
    for kib in [1536, 600, 0] {
        budget.resize(Tier::Device, kib * KIB).expect("resized");
        until("slabs are returned", || lane().committed_bytes <= kib * KIB);
        assert_eq!(store.device.allocated_bytes(), lane().committed_bytes);
        (0..12).for_each(|number| store.get_document(number, Memory::Device));
        assert!(lane().committed_bytes <= kib * KIB && store.audit().wrong == 0);
    }
    assert_eq!(store.report().stats.device_cells, 0);
    // Limits set on the store itself, with a budget that has free memory again.
    budget.resize(Tier::Device, 4 << 20).expect("resized");
    store.handle.with(|core| core.set_device_bytes(1 << 20)).expect("a device tier");
    until("slabs are allocated", || lane().committed_bytes == 1 << 20);
    // Bytes are committed before their slabs can be used.
    until("cells are promoted", || {
        (0..2).for_each(|number| store.get_document(number, Memory::Device));
        store.report().stats.device_cells > 0
    });
    store.handle.with(|core| core.set_device_bytes(0)).expect("a device tier");
    until("all slabs are freed", || lane().committed_bytes == 0);
    assert!(lane().peak_bytes <= 2 << 20);
    store.close();
    let left = [Tier::Host, Tier::Device].map(|tier| budget.usage(tier).committed_bytes);
    assert_eq!(left, [0, 0], "all memory was returned");
    budget.close();
    drop(runtime);
}

#[test]
fn impossible_device_tier_is_rejected() {
    let runtime = runtime();
    let spec = spec_of("store(host=16MiB, device=device(capacity=4MiB))");
    let refused = |budget: Option<&Arc<Budget>>, device: Arc<dyn Device>| {
        let store = Store::open_with(runtime.core(), budget, &spec, device);
        store.map(|_| ()).unwrap_err().status()
    };
    let host = Arc::new(kvtier::device::host::Host::default());
    assert_eq!(refused(None, host), Status::Unsupported);
    let budget = device_budget(&runtime, 0);
    assert_eq!(refused(Some(&budget), quick()), Status::Budget);
    let small = SimulatedOpts { memory_bytes: 4096, ..SimulatedOpts::default() };
    assert_eq!(refused(None, simulated(small)), Status::NoMem);
    assert_eq!(budget.usage(Tier::Device).committed_bytes, 0);
    budget.close();
}

/// A cell that is damaged on disk is dropped, also from the device.
#[test]
fn cell_damaged_on_disk_is_dropped_from_the_device() {
    let scratch = Scratch::new("device");
    let spec = with_disk(
        &scratch.0,
        "bytes=64MiB,segment=1MiB,buffered=true",
        "host=512KiB,write=through,policy=lru,device=device(capacity=4MiB,policy=lru)",
    );
    let store = DeviceStore::open(&spec);
    for number in 0..16 {
        store.put_document(number, Memory::Device);
        store.settle();
    }
    assert_eq!(store.report().stats.device_cells, 16 * CELLS);
    for entry in std::fs::read_dir(&scratch.0).expect("the directory") {
        let path = entry.expect("a file").path();
        if path.extension().is_some() && path.to_string_lossy().contains("seg-") {
            let bytes = std::fs::metadata(&path).expect("a file").len() as usize;
            let mut noise = vec![0x5A; bytes - 4096];
            noise.iter_mut().enumerate().for_each(|(i, byte)| *byte = mix(i as u64) as u8);
            let file = std::fs::OpenOptions::new().write(true).open(&path).expect("ours");
            file.write_all_at(&noise, 4096).expect("written");
        }
    }
    let mut missed = 0;
    for number in 0..16 {
        let done = store.transfer_document(
            TransferKind::Get,
            Level::Ram,
            number,
            (Shape::Tokens, Memory::Host),
        );
        missed += u64::from(done.status == Status::NotFound);
        store.settle();
    }
    let all = store.report();
    assert!(missed > 0 && all.stats.corrupt_cells > 0, "{all:?}");
    assert_eq!(all.stats.device_cells, 16 * CELLS - all.stats.corrupt_cells);
    store.close();
}
