//! The whole library on CUDA: stores with tensors and a device tier, and streamed weights, exact to
//! the bit. It runs on a GPU if `KVTIER_GPU` is set, else over the fake driver.

use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::mirror;
use kvtier_testkit::fixtures::model_files;
use kvtier_testkit::fixtures::store as support;
use kvtier_testkit::fixtures::stream_rig as rig;

use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::op::RELEASED;
use kvtier::base::status::Status;
use kvtier::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, Direction, Memory, State, Stream};
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::stream::plan::PlanOptions;
use kvtier::stream::streamer::AcquireOpts;
use mirror::Mirror;
use support::{Done, Engine, Model, SHAPES, TestStore, document, marks_of, spec_of, wait};

const MODEL: Model = Model { layers: 4, heads: 4, run: 64, chunk: 16 };
const TOKENS: usize = 5 * MODEL.chunk + 7;

fn cuda() -> Arc<Cuda> {
    let library = std::env::var_os("KVTIER_GPU").is_none().then(fake_cuda::library);
    let opts = CudaOpts { library, choice: CopyMethodChoice::Measured, ..CudaOpts::default() };
    Arc::new(Cuda::open(Clock::real(), &opts).expect("a device"))
}

/// Tensors in device memory, read from the device tier, from host memory, and after the tier was
/// emptied.
#[test]
fn device_tensors_round_trip_in_every_shape() {
    for spec in ["store(host=8MiB,device=device(capacity=2MiB))", "store(host=8MiB)"] {
        let device = cuda();
        let store = TestStore::on_device(&spec_of(spec), device.clone());
        let namespace = store.namespace(1, &MODEL);
        let right = Done::ok(TOKENS);
        for (number, shape) in SHAPES.into_iter().enumerate() {
            let tokens = document(number as u32, TOKENS);
            let marks = marks_of(0, &tokens);
            let session = store.session(namespace, &tokens);
            let engine = Engine::computed(MODEL, shape, &marks);
            let from = Mirror::new(&*device, engine);
            let put = store.submit(session, TransferKind::Put, Level::Ram, from.whole());
            assert_eq!(wait(&put.expect("taken")[0]), right, "{spec}, {shape:?}");
            for other in SHAPES {
                let mut to = Mirror::new(&*device, Engine::new(MODEL, other, tokens.len()));
                let get = store.submit(session, TransferKind::Get, Level::Ram, to.whole());
                assert_eq!(wait(&get.expect("taken")[0]), right, "{spec}, {shape:?}, {other:?}");
                to.copy(Direction::Gather);
                to.engine.check(&marks, 0..TOKENS, 0..MODEL.layers);
            }
            store.close_session(session);
        }
        let hits = store.counters().device_hit_cells;
        assert_eq!(hits > 0, spec.contains("device="), "{spec}: {hits} hits on the device");
        store.close();
        assert_eq!(device.close(0), Ok(()));
    }
}

/// Transfers are submitted before their ready events: a put stores what the copy before it wrote,
/// a get writes after the copy before it has read.
#[test]
fn transfers_wait_for_ready_events() {
    for spec in ["store(host=8MiB,device=device(capacity=2MiB))", "store(host=8MiB)"] {
        let device = cuda();
        let store = TestStore::on_device(&spec_of(spec), device.clone());
        let namespace = store.namespace(1, &MODEL);
        let right = Done::ok(TOKENS);
        for (number, shape) in (0u32..).zip(SHAPES) {
            let tokens = document(number, TOKENS);
            let marks = marks_of(0, &tokens);
            let session = store.session(namespace, &tokens);
            // All memory is still poison.
            let mut tensors = Mirror::new(&*device, Engine::new(MODEL, shape, tokens.len()));
            for kind in [TransferKind::Put, TransferKind::Get, TransferKind::Get] {
                let promise = device.create_user_event().expect("one");
                if kind == TransferKind::Put {
                    tensors.engine.compute(&marks);
                }
                let direction =
                    if kind == TransferKind::Put { Direction::Scatter } else { Direction::Gather };
                let before = tensors.begin(Stream(1), Some(promise), direction);
                let what = CellRange { after: Some(before), ..tensors.whole() };
                let ops = store.submit(session, kind, Level::Ram, what).expect("taken");
                assert_eq!(device.state(before).expect("known"), State::Pending);
                assert_eq!(ops[0].state() & RELEASED, 0);
                device.signal_event(promise).expect("a promise");
                assert_eq!(wait(&ops[0]), right, "{spec}, {shape:?}, {kind:?}");
                for event in [promise, before] {
                    device.release(event).expect("it has come");
                }
                if kind == TransferKind::Get {
                    // The copy had read what was there before the get.
                    assert!(tensors.engine.is_untouched(), "{spec}, {shape:?}");
                    tensors.copy(Direction::Gather);
                    tensors.engine.check(&marks, 0..TOKENS, 0..MODEL.layers);
                } else {
                    tensors.engine.check(&marks, 0..TOKENS, 0..MODEL.layers);
                }
                tensors.copy(Direction::Scatter);
            }
            store.close_session(session);
        }
        store.close();
        assert_eq!(device.close(0), Ok(()));
    }
}

/// Tensors in host memory that the device pins.
#[test]
fn host_tensors_round_trip_through_the_device() {
    let device = cuda();
    let store = TestStore::on_device(&spec_of("store(host=8MiB)"), device);
    let namespace = store.namespace(1, &MODEL);
    for (number, shape) in SHAPES.into_iter().enumerate() {
        let tokens = document(number as u32, TOKENS);
        let marks = marks_of(0, &tokens);
        let session = store.session(namespace, &tokens);
        let engine = Engine::computed(MODEL, shape, &marks);
        assert_eq!(store.put(session, Level::Ram, &engine).tokens, TOKENS);
        let mut back = Engine::new(MODEL, shape, tokens.len());
        assert_eq!(store.get(session, &back).tokens, TOKENS);
        back.check(&marks, 0..TOKENS, 0..MODEL.layers);
        store.close_session(session);
    }
    store.close();
}

/// Weights are streamed while the device computes with released units; also in place, where each
/// has a fixed address.
#[test]
fn streamed_weights_are_exact_on_the_device() {
    for (name, sizes) in
        [("whole", rig::dense(6)), ("large", rig::large(5)), ("experts", rig::experts(4, 6))]
    {
        for in_place in [false, true] {
            weights_pass(&format!("cuda-{name}-{in_place}"), &sizes, in_place);
        }
    }
}

fn weights_pass(name: &str, sizes: &model_files::Sizes, in_place: bool) {
    let device = cuda();
    let files = rig::Files::new(name, sizes);
    let bytes = files.all_bytes();
    // In place all takes whole pieces: of a few, some pass through slots.
    let granularity = if in_place { device.window_granularity().expect("windows") } else { 0 };
    let rounded = |unit: &kvtier::stream::units::Unit| unit.image_bytes + granularity;
    let taken: u64 = files.units.units.iter().map(rounded).sum();
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(2 * rig::MIB + bytes / 4),
        device_ceiling_bytes: Some(taken * 3 / 5),
        staging_bytes: 2 * rig::MIB,
        ..rig::plan_options()
    };
    let shared: Arc<dyn Device> = device.clone();
    let opts = kvtier::stream::streamer::Opts {
        plan_options,
        in_place,
        device: Some(shared),
        ..kvtier::stream::streamer::Opts::default()
    };
    let rig = rig::Rig::open(files, opts).expect("opened");
    let fixed = |unit| rig.streamer.fixed(unit).map(|(address, _)| address).ok();
    let at: Vec<_> = (0..rig.files.units.units.len() as u32).map(fixed).collect();
    let experts: Vec<u32> = (0..8).flat_map(|layer| rig.files.experts_of(layer)).collect();
    for pass in 0..3 {
        rig.streamer.pass_begin().expect("open");
        let mut under_way = Vec::new();
        for unit in rig.files.order().into_iter().chain(experts.iter().copied()) {
            let how = AcquireOpts { when_issued: pass != 1, ..rig::patiently() };
            let held = rig.streamer.acquire(unit, how).expect("a unit");
            assert_eq!(at[unit as usize], in_place.then_some(held.address), "unit {unit}");
            if held.memory == Memory::Host {
                // The embedding, of which rows are looked up.
                assert!(rig.is_right(&held).expect("no event"), "unit {unit}");
                rig.streamer.release(&held, None).expect("had");
                continue;
            }
            under_way.push(rig.compute_with(&held).expect("begun"));
            if under_way.len() > 1 {
                under_way.remove(0).end().expect("right bytes");
            }
        }
        under_way.iter().for_each(|computing| computing.end().expect("right bytes"));
        drop(under_way);
        rig.streamer.pass_end().expect("open");
    }
    rig.closed();
}

/// Direct reads are used if the machine supports them. If not, the open fails, not a read.
#[test]
fn direct_reads_work_or_fail_at_open_with_reason() {
    let device = cuda();
    let files = rig::Files::new("cuda-direct", &rig::large(5));
    let bytes = files.all_bytes();
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(2 * rig::MIB),
        device_ceiling_bytes: Some(bytes * 3 / 5),
        staging_bytes: 2 * rig::MIB,
        ..rig::plan_options()
    };
    let shared: Arc<dyn Device> = device;
    let opts = kvtier::stream::streamer::Opts {
        plan_options,
        device: Some(shared),
        direct: true,
        ..kvtier::stream::streamer::Opts::default()
    };
    let rig = match rig::Rig::open(files, opts) {
        Ok(rig) => rig,
        Err(error) => {
            assert_eq!(error.status(), Status::Unavailable, "{error}");
            eprintln!("SKIP: {error}");
            return;
        }
    };
    for _ in 0..3 {
        rig.streamer.pass_begin().expect("open");
        for unit in rig.files.order() {
            let held = rig.streamer.acquire(unit, rig::patiently()).expect("a unit");
            if held.memory == Memory::Host {
                rig.streamer.release(&held, None).expect("had");
                continue;
            }
            rig.compute_with(&held).expect("begun").end().expect("right bytes");
        }
        rig.streamer.pass_end().expect("open");
    }
    let stats = rig.streamer.stats();
    assert!(stats.direct_bytes > 0 && stats.direct_failed == 0, "{stats:?}");
    rig.closed();
}

#[test]
fn invalid_addresses_and_sizes_fail_one_call() {
    let device = cuda();
    let free = device.free_bytes().expect("known");
    let error = device.allocate(free.saturating_mul(4)).expect_err("too much");
    assert_eq!(error.status(), Status::NoMem, "{error}");
    let mut host = [7u8; 4096];
    let memory = device.allocate(4096).expect("room");
    let wrong = [
        memory.address + 4096 * 1024 * 1024 * 1024,
        host.as_ptr().expose_provenance() as u64,
        memory.address + 4000,
    ];
    for address in wrong {
        let copy =
            Copy::bytes(host.as_mut_ptr(), address, 4096, Direction::Scatter, Memory::Device);
        // SAFETY: refused, as this test wants to see.
        let said = unsafe { device.submit(Stream(0), None, &mut [copy.expect("arithmetic")]) };
        assert_eq!(said.expect_err("no memory of the device").status(), Status::Invalid);
    }
    let mut back = [0u8; 4096];
    for (there, direction) in [(&mut host, Direction::Scatter), (&mut back, Direction::Gather)] {
        let copy = Copy::bytes(there.as_mut_ptr(), memory.address, 4096, direction, Memory::Device);
        // SAFETY: both stay until the event.
        let event = unsafe { device.submit(Stream(0), None, &mut [copy.expect("sound")]) };
        device.wait(event.expect("taken"), 0).expect("the device works");
    }
    assert_eq!(back, [7; 4096]);
}
