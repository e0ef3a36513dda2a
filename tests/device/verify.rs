//! A device that computes checksums where the copied bytes lie: the checksums are independent of
//! layout, and stores detect each bit flip on the bus.

use kvtier_testkit::fixtures::emulated;
use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::mirror;
use kvtier_testkit::fixtures::store as support;

use std::sync::Arc;

use fake_cuda::Fake;
use kvtier::base::checksum::checksum;
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::conformance::{self, ConformanceOpts, Verdict};
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, Direction, Memory, Stream};
use kvtier::meta::view::{Place, View};
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};
use mirror::Mirror;
use support::{Done, Engine, Model, SHAPES, TestStore, document, marks_of, spec_of, wait};

const MODEL: Model = Model { layers: 2, heads: 4, run: 64, chunk: 16 };
const TOKENS: usize = 3 * MODEL.chunk + 7;
const MEANS: [CopyMethod; 3] = [CopyMethod::Plain, CopyMethod::Batch, CopyMethod::Kernel];

fn opts(means: CopyMethod, verify: bool) -> CudaOpts {
    let (library, choice) = (Some(fake_cuda::library()), CopyMethodChoice::Fixed(means));
    CudaOpts { library, choice, verify, ..CudaOpts::default() }
}

fn cuda(means: CopyMethod, verify: bool) -> Arc<dyn Device> {
    Arc::new(Cuda::open(Clock::real(), &opts(means, verify)).expect("a device"))
}

fn simulated(opts: SimulatedOpts) -> Arc<dyn Device> {
    let quick = SimulatedOpts { latency_ns: 1000, ..opts };
    Arc::new(Simulated::new(Clock::real(), quick).expect("sound"))
}

/// The driver without a device, alone, with kernels and a call for batches.
fn alone(seed: u64) -> (impl Drop, Fake) {
    let (turn, fake) = fake_cuda::alone(seed);
    fake.emulate(emulated::launches());
    fake.set(12080, 1, 1 << 30, false);
    (turn, fake)
}

/// Puts copies on a stream and waits; their sums.
fn sums_of(device: &dyn Device, copies: &mut [Copy<'_>]) -> Result<Vec<u64>> {
    // SAFETY: memory of the test, which no other code touches before the event.
    let event = unsafe { device.submit(Stream(0), None, copies)? };
    device.wait(event, 0)?;
    let mut sums = vec![0; copies.len()];
    let count = device.sums(event, &mut sums)?;
    device.release(event)?;
    assert!(device.sums(event, &mut sums).is_err(), "sums of an event that was released");
    sums.truncate(count);
    Ok(sums)
}

fn content(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 131 + seed * 29) >> 3) as u8 ^ at as u8).collect()
}

/// Planes of odd lengths, in pieces and whole, larger than the staging memory.
#[test]
fn checksums_do_not_depend_on_plane_layout() {
    let (_turn, _fake) = alone(3);
    for means in MEANS {
        let device = cuda(means, true);
        assert!(device.facts().sums);
        // (heads, run, tokens): up to 9 MB in one plane, which is more than a stage has.
        let long = if means == CopyMethod::Plain { 9_000 } else { 100 };
        for (heads, run, tokens) in [(1, 1, 1), (3, 20, 300), (4, 64, 500), (8, 128, long)] {
            let bytes = (heads * run * tokens) as usize;
            let there = device.allocate(2 * bytes as u64).expect("room");
            // Heads first, each token twice as far from the next as it is long: nothing is in one
            // piece.
            let spread = View {
                place: Place::At(there.address),
                tokens: tokens as u32,
                heads: heads as u32,
                run_bytes: run,
                token_stride_bytes: 2 * run,
                head_stride_bytes: 2 * run * tokens,
            };
            let one = View::canonical(there.address, 1, bytes as u64);
            for (view, count) in [(spread, tokens as u32), (one, 1)] {
                let mut plane = content(bytes, run as usize);
                let right = checksum(&plane);
                for direction in [Direction::Scatter, Direction::Gather] {
                    if direction == Direction::Gather {
                        plane.fill(0);
                    }
                    let copy =
                        Copy::new(&view, 0, count, plane.as_mut_ptr(), direction).expect("sound");
                    let copy = Copy { memory: Memory::Device, wants_sum: true, ..copy };
                    let sums = sums_of(&*device, &mut [copy]).expect("they come");
                    assert_eq!(sums, [right], "{means}, {heads} {run} {tokens}, {direction:?}");
                    assert_eq!(checksum(&plane), right);
                }
            }
            // SAFETY: nothing uses it any more.
            unsafe { device.free(&there) }.expect("its own");
        }
        device.close(0).expect("at rest");
    }
}

/// Many batches of many planes: stages and lists are reused in order.
#[test]
fn concurrent_batches_have_separate_checksums() {
    let (_turn, fake) = alone(5);
    let device = cuda(CopyMethod::Kernel, true);
    let (planes, bytes) = (40usize, 50_000usize);
    let there = device.allocate((2 * 3 * planes * bytes) as u64).expect("room");
    let mut batches = Vec::new();
    for batch in 0..3 {
        let mut hosts: Vec<Vec<u8>> =
            (0..planes).map(|plane| content(bytes, batch * 100 + plane)).collect();
        let view = |plane: usize| View {
            place: Place::At(there.address + (2 * (batch * planes + plane) * bytes) as u64),
            tokens: 500,
            heads: 1,
            run_bytes: 100,
            token_stride_bytes: 200,
            head_stride_bytes: 200,
        };
        let views: Vec<View<'_>> = (0..planes).map(view).collect();
        let mut copies: Vec<Copy<'_>> = views
            .iter()
            .zip(&mut hosts)
            .map(|(view, host)| {
                let copy = Copy::new(view, 0, 500, host.as_mut_ptr(), Direction::Scatter);
                let copy = copy.expect("sound");
                Copy { memory: Memory::Device, wants_sum: true, ..copy }
            })
            .collect();
        // Two of a stream, one beside them.
        let stream = Stream(batch as u32 / 2);
        // SAFETY: memory of the test, which no other code touches before the event.
        let event = unsafe { device.submit(stream, None, &mut copies) }.expect("taken");
        drop(copies);
        batches.push((event, hosts));
    }
    for (event, hosts) in batches {
        device.wait(event, 0).expect("it ends");
        let mut sums = vec![0; planes + 1];
        assert_eq!(device.sums(event, &mut sums), Ok(planes));
        let right: Vec<u64> = hosts.iter().map(|host| checksum(host)).collect();
        assert_eq!(&sums[..planes], right);
        device.release(event).expect("it has ended");
    }
    // SAFETY: nothing uses it any more.
    unsafe { device.free(&there) }.expect("its own");
    drop(device);
    assert_eq!(fake.live(), 0);
    fake.check();
}

/// Planes that cannot be summed are rejected, and so are checksums of devices without support.
#[test]
fn unsupported_checksums_are_rejected() {
    let (_turn, fake) = alone(7);
    let (mut a, mut b) = (vec![1u8; 64], vec![2u8; 64]);
    let device = cuda(CopyMethod::Plain, true);
    let (from, to) = (a.as_mut_ptr(), b.as_mut_ptr());
    let here =
        Copy::bytes(from, to.expose_provenance() as u64, 64, Direction::Gather, Memory::Host);
    let here = Copy { wants_sum: true, ..here.expect("sound") };
    let status = |said: Result<Vec<u64>>| said.expect_err("refused").status();
    assert_eq!(status(sums_of(&*device, &mut [here])), Status::Unsupported);
    let without = cuda(CopyMethod::Plain, false);
    assert!(!without.facts().sums);
    let there = without.allocate(64).expect("room");
    let copy = Copy::bytes(from, there.address, 64, Direction::Gather, Memory::Device);
    let copy = Copy { wants_sum: true, ..copy.expect("sound") };
    assert_eq!(status(sums_of(&*without, &mut [copy])), Status::Unsupported);
    // SAFETY: nothing uses it any more.
    unsafe { without.free(&there) }.expect("its own");
    fake.fail("cuModuleLoadDataEx", -1, 218);
    let error = Cuda::open(Clock::real(), &opts(CopyMethod::Plain, true)).err().expect("no kernel");
    assert_eq!(error.status(), Status::Unavailable);
    assert!(error.message().contains("cannot be verified"), "{error}");
    drop((device, without));
    assert_eq!(fake.live(), 0);
    fake.check();
}

/// Each call for checksums fails once: the batch is rejected or fails, and the next one is exact.
#[test]
fn failed_checksum_call_fails_one_batch() {
    let calls = ["cuMemHostAlloc", "cuMemAlloc", "cuLaunchKernel", "cuMemcpyHtoDAsync"];
    for (call, nth) in calls.into_iter().chain(["cuMemcpyDtoHAsync"]).flat_map(|c| [(c, 1), (c, 2)])
    {
        let (_turn, fake) = alone(nth as u64);
        let device = cuda(CopyMethod::Plain, true);
        let there = device.allocate(20_000).expect("room");
        let view = View {
            place: Place::At(there.address),
            tokens: 100,
            heads: 1,
            run_bytes: 100,
            token_stride_bytes: 200,
            head_stride_bytes: 200,
        };
        let mut plane = content(10_000, 1);
        let right = checksum(&plane);
        let mut go = || {
            let copy =
                Copy::new(&view, 0, 100, plane.as_mut_ptr(), Direction::Scatter).expect("sound");
            sums_of(&*device, &mut [Copy { memory: Memory::Device, wants_sum: true, ..copy }])
        };
        fake.fail(call, nth, 2);
        let first = go();
        assert_eq!(fake.has_failed(), first.is_err(), "{call} {nth}: {first:?}");
        fake.no_more_failures();
        assert_eq!(go().expect("it is as before"), [right], "{call} {nth}");
        // SAFETY: nothing uses it any more.
        unsafe { device.free(&there) }.expect("its own");
        drop(device);
        assert_eq!(fake.live(), 0, "{call} {nth}");
        fake.check();
    }
}

#[test]
fn verifying_devices_conform() {
    let (_turn, fake) = alone(11);
    // Waits poll often here: many small copies would take long.
    fake.pace(1024);
    let sums = SimulatedOpts { sums: true, ..SimulatedOpts::default() };
    for device in [cuda(CopyMethod::Plain, true), cuda(CopyMethod::Kernel, true), simulated(sums)] {
        let name = device.facts().name;
        let opts = ConformanceOpts {
            seed: 5,
            rounds: 4,
            clock: Clock::real(),
            patience_ns: 300_000_000_000,
            closes: true,
        };
        let mut passed = Vec::new();
        conformance::run(&device, &opts, &mut |check, verdict| match verdict {
            Verdict::Failed(why) => panic!("{name}, {check}: {why}"),
            Verdict::Passed => passed.push(check),
            Verdict::Skipped(_) => {}
        });
        assert!(passed.contains(&"sums"), "{name}: {passed:?}");
    }
}

/// A store over a device, and a document that it is given from that device's memory.
struct Rig {
    device: Arc<dyn Device>,
    store: TestStore,
    session: u32,
    tokens: Vec<u32>,
}

impl Rig {
    fn open(device: Arc<dyn Device>, spec: &str) -> Rig {
        let store = TestStore::on_device(&spec_of(spec), device.clone());
        let namespace = store.namespace(1, &MODEL);
        let tokens = document(3, TOKENS);
        let session = store.session(namespace, &tokens);
        Rig { device, store, session, tokens }
    }

    fn move_all(&self, kind: TransferKind, mirror: &Mirror<'_>) -> Done {
        let ops = self.store.submit(self.session, kind, Level::Ram, mirror.whole()).expect("taken");
        let done = wait(&ops[0]);
        self.store.settle();
        done
    }

    /// The same, behind an event that completes once the whole transfer was submitted.
    fn move_behind(&self, kind: TransferKind, mirror: &Mirror<'_>) -> Done {
        let event = self.device.create_user_event().expect("one");
        let cell_range = CellRange { after: Some(event), ..mirror.whole() };
        let ops = self.store.submit(self.session, kind, Level::Ram, cell_range).expect("taken");
        while self.store.handle.inspect(|core| core.cells_after_event() > 0).expect("open") {
            std::thread::yield_now();
        }
        self.device.signal_event(event).expect("a promise");
        let done = wait(&ops[0]);
        self.store.settle();
        self.device.release(event).expect("it has come");
        done
    }

    fn full(&self) -> Mirror<'_> {
        let engine = Engine::computed(MODEL, SHAPES[1], &marks_of(0, &self.tokens));
        Mirror::new(&*self.device, engine)
    }

    fn empty(&self) -> Mirror<'_> {
        Mirror::new(&*self.device, Engine::new(MODEL, SHAPES[0], TOKENS))
    }

    /// Gathers the cells. Returns whether they are right.
    fn is_right(&self, to: &mut Mirror<'_>) -> bool {
        to.copy(Direction::Gather);
        to.engine.matches(&marks_of(0, &self.tokens))
    }

    fn damaged(&self) -> u64 {
        self.store.counters().damaged_copies
    }
}

const RIGHT: Done = Done::ok(TOKENS);
const SPECS: [&str; 2] =
    ["store(host=8MiB)", "store(host=8MiB,copiers=1,device=device(capacity=2MiB))"];

/// One bit of each copy in turn, in both directions: it is detected, the copy is repeated, and
/// stored and loaded bytes are exact.
#[test]
fn bit_flip_on_the_bus_is_detected_and_repaired() {
    let (_turn, fake) = alone(13);
    for (spec, means) in SPECS.into_iter().flat_map(|spec| MEANS.map(|means| (spec, means))) {
        for nth in [1, 2, 3, 7] {
            let rig = Rig::open(cuda(means, true), spec);
            let (from, mut to) = (rig.full(), rig.empty());
            fake.flip(true, nth);
            assert_eq!(rig.move_all(TransferKind::Put, &from), RIGHT, "{spec}, {means}, {nth}");
            fake.flip(true, 0);
            assert_eq!(rig.damaged(), 1, "{spec}, {means}, {nth}: on its way here");
            if spec.contains("device=") {
                // Otherwise device replicas serve the get and no bytes cross the bus.
                let forgotten = rig.store.handle.with(|core| core.set_device_bytes(0));
                forgotten.expect("open");
                rig.store.settle();
                let again = rig.store.handle.with(|core| core.set_device_bytes(2 << 20));
                again.expect("open");
                rig.store.settle();
            }
            fake.flip(false, nth);
            assert_eq!(rig.move_all(TransferKind::Get, &to), RIGHT, "{spec}, {means}, {nth}");
            fake.flip(false, 0);
            assert_eq!(rig.damaged(), 2, "{spec}, {means}, {nth}: on its way there");
            assert!(rig.is_right(&mut to), "{spec}, {means}, {nth}");
            drop((from, to));
            rig.store.close();
        }
    }
    fake.check();
}

/// Device replicas are compared when they are read. A damaged one is replaced from host memory.
#[test]
fn damaged_device_replica_is_detected_on_read() {
    let (_turn, fake) = alone(23);
    for verify in [true, false] {
        let rig = Rig::open(cuda(CopyMethod::Plain, verify), SPECS[1]);
        let from = rig.full();
        assert_eq!(rig.move_all(TransferKind::Put, &from), RIGHT);
        let cells = rig.store.handle.with(|core| Ok(core.device_cells())).expect("open");
        assert!(cells > 0);
        fake.rot();
        let mut to = rig.empty();
        assert_eq!(rig.move_all(TransferKind::Get, &to), RIGHT);
        assert_eq!(rig.is_right(&mut to), verify, "only verification detects wrong bytes");
        // All planes that have as much as a KiB, twice each.
        assert_eq!(rig.damaged() > 0, verify);
        // Damaged replicas were evicted or refilled.
        let wrong = rig.store.handle.audit_device().expect("open").wrong;
        assert_eq!(wrong == 0, verify, "{wrong} cells");
        drop((from, to));
        rig.store.close();
    }
    fake.check();
}

/// Every copy is damaged: nothing is stored or reported as stored.
#[test]
fn permanent_bus_damage_fails_puts() {
    let (_turn, fake) = alone(17);
    for (spec, means) in SPECS.into_iter().flat_map(|spec| MEANS.map(|means| (spec, means))) {
        let rig = Rig::open(cuda(means, true), spec);
        let (from, mut to) = (rig.full(), rig.empty());
        fake.flip(true, -1);
        assert_eq!(
            rig.move_all(TransferKind::Put, &from).status,
            Status::Corrupt,
            "{spec}, {means}"
        );
        fake.flip(true, 0);
        let got = rig.move_all(TransferKind::Get, &to);
        assert_eq!((got.status, got.tokens), (Status::NotFound, 0), "{spec}, {means}");
        assert_eq!(rig.move_all(TransferKind::Put, &from), RIGHT);
        if !spec.contains("device=") {
            fake.flip(false, -1);
            assert_eq!(
                rig.move_all(TransferKind::Get, &to).status,
                Status::Corrupt,
                "{spec}, {means}"
            );
            fake.flip(false, 0);
        }
        assert_eq!(rig.move_all(TransferKind::Get, &to), RIGHT);
        assert!(rig.is_right(&mut to), "{spec}, {means}");
        drop((from, to));
        rig.store.close();
    }
    fake.check();
}

/// The same damage without checksums: wrong bytes are returned, and no counter changes.
#[test]
fn bus_damage_is_undetected_without_checksums() {
    let (_turn, fake) = alone(19);
    for from_device in [true, false] {
        let rig = Rig::open(cuda(CopyMethod::Plain, false), SPECS[0]);
        let (from, mut to) = (rig.full(), rig.empty());
        if from_device {
            fake.flip(true, 1);
        }
        assert_eq!(rig.move_all(TransferKind::Put, &from), RIGHT);
        if !from_device {
            fake.flip(false, 1);
        }
        assert_eq!(rig.move_all(TransferKind::Get, &to), RIGHT);
        assert_eq!(rig.damaged(), 0);
        assert!(!rig.is_right(&mut to), "a bit has changed on its way");
        drop((from, to));
        rig.store.close();
    }
}

/// A simulated device flips a bit of one copy: of each plane of a put, and of a get that crosses
/// the bus.
#[test]
fn simulated_bus_damage_is_detected() {
    let planes = 2 * (MODEL.layers * TOKENS.div_ceil(MODEL.chunk)) as u64;
    for (spec, crossings) in SPECS.into_iter().zip([2 * planes, planes]) {
        for nth in (1..=crossings).step_by(3) {
            let moved = if nth % 2 == 0 { Rig::move_behind } else { Rig::move_all };
            // Two are the mirrors' own.
            let damage_at = vec![2 + nth];
            let device = SimulatedOpts { sums: true, damage_at, ..SimulatedOpts::default() };
            let rig = Rig::open(simulated(device), spec);
            let (from, mut to) = (rig.full(), rig.empty());
            assert_eq!(moved(&rig, TransferKind::Put, &from), RIGHT, "{spec}, {nth}");
            assert_eq!(rig.damaged(), u64::from(nth <= planes), "{spec}, {nth}");
            assert_eq!(moved(&rig, TransferKind::Get, &to), RIGHT, "{spec}, {nth}");
            assert_eq!(rig.damaged(), 1, "{spec}, {nth}");
            assert!(rig.is_right(&mut to), "{spec}, {nth}");
            drop((from, to));
            rig.store.close();
        }
    }
}
