//! Memory of peer devices: copies with and without peer access, and what is rejected.

use kvtier_testkit::fixtures::emulated;
use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::mirror;
use kvtier_testkit::fixtures::store as support;

use std::sync::Arc;

use fake_cuda::Fake;
use kvtier::base::checksum::checksum;
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts, CudaWindow};
use kvtier::device::window::Window;
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Memory, Stream};
use kvtier::meta::view::{Place, View};
use kvtier::store::state::transfer::{Level, TransferKind};
use mirror::Mirror;
use support::{Done, Engine, Model, SHAPES, TestStore, document, marks_of, spec_of, wait};

const MEANS: [CopyMethod; 3] = [CopyMethod::Plain, CopyMethod::Batch, CopyMethod::Kernel];
/// Tokens of a tensor here, and the bytes of each.
const SHAPE: (u32, u64) = (300, 100);
const BYTES: usize = 30_000;
const PEER: &str = "cuMemcpyPeerAsync";

fn opts(ordinal: u32, peers: &[u32]) -> CudaOpts {
    let (library, peers) = (Some(fake_cuda::library()), peers.to_vec());
    CudaOpts { library, ordinal, peers, ..CudaOpts::default() }
}

fn open(opts: CudaOpts) -> Cuda {
    Cuda::open(Clock::real(), &opts).expect("a device")
}

/// Three devices; the first reaches the others, or it does not.
fn alone(seed: u64, reaches: bool) -> (impl Drop, Fake) {
    let (turn, fake) = fake_cuda::alone(seed);
    fake.set(12080, 3, 1 << 30, false);
    fake.emulate(emulated::launches());
    (1..3).for_each(|other| fake.reach(0, other, reaches));
    (turn, fake)
}

fn content(seed: usize) -> Vec<u8> {
    (0..BYTES).map(|at| ((at * 131 + seed * 29) >> 3) as u8 ^ at as u8).collect()
}

/// Tokens apart from each other, or all in one piece.
fn view(address: u64, is_spread: bool) -> View<'static> {
    let (tokens, run_bytes) = SHAPE;
    let stride = if is_spread { 2 * run_bytes } else { run_bytes };
    View {
        place: Place::At(address),
        tokens,
        heads: 1,
        run_bytes,
        token_stride_bytes: stride,
        head_stride_bytes: stride,
    }
}

fn go(device: &Cuda, copy: Copy<'_>) -> Result<u64> {
    let mut copies = [copy];
    // SAFETY: memory of the test, which no other code touches before the event.
    let event = unsafe { device.submit(Stream(1), None, &mut copies)? };
    let ended = device.wait(event, 0);
    let mut sums = [0];
    if ended.is_ok() && copies[0].wants_sum {
        assert_eq!(device.sums(event, &mut sums), Ok(1));
    }
    device.release(event)?;
    ended.map(|()| sums[0])
}

/// Room of a device, which its owner fills and reads.
struct Room<'a> {
    owner: &'a Cuda,
    memory: DeviceMemory,
}

impl<'a> Room<'a> {
    fn new(owner: &'a Cuda) -> Room<'a> {
        Room { owner, memory: owner.allocate(2 * BYTES as u64).expect("room") }
    }

    fn moves(&self, bytes: &mut [u8], is_spread: bool, direction: Direction) {
        let view = view(self.memory.address, is_spread);
        let copy = Copy::new(&view, 0, SHAPE.0, bytes.as_mut_ptr(), direction).expect("sound");
        go(self.owner, Copy { memory: Memory::Device, ..copy }).expect("its own memory");
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more.
        unsafe { self.owner.free(&self.memory) }.expect("its own");
    }
}

/// Every pair of memories, in one piece and in many, with checksums of all device memory.
#[test]
fn copies_work_between_all_memories() {
    for (reaches, means) in [true, false].into_iter().flat_map(|r| MEANS.map(|means| (r, means))) {
        let (_turn, fake) = alone(3, reaches);
        let before = fake.calls(PEER);
        let choice = CopyMethodChoice::Fixed(means);
        let first = open(CudaOpts { choice, verify: true, ..opts(0, &[1, 2]) });
        let others = [open(opts(1, &[])), open(opts(2, &[]))];
        let (mut here, mut seed) = (content(0), 0);
        // SAFETY: memory that stays until it is forgotten.
        unsafe { first.register_host(here.as_mut_ptr(), BYTES as u64) }.expect("registered");
        let all = [None, Some(&first), Some(&others[0]), Some(&others[1])];
        for (tensor, plane) in all.iter().flat_map(|t| all.iter().map(move |p| (t, p))) {
            let Some(owner) = tensor else { continue };
            for (is_spread, direction) in [true, false]
                .into_iter()
                .flat_map(|s| [(s, Direction::Gather), (s, Direction::Scatter)])
            {
                let words = format!("{reaches}, {means}, {is_spread}, {direction:?}");
                let there = Room::new(owner);
                let beside = plane.map(Room::new);
                seed += 1;
                let mut right = content(seed);
                match (&direction, &beside) {
                    (Direction::Gather, _) => {
                        there.moves(&mut right, is_spread, Direction::Scatter)
                    }
                    (Direction::Scatter, None) => here.copy_from_slice(&right),
                    (Direction::Scatter, Some(room)) => {
                        room.moves(&mut right, false, Direction::Scatter)
                    }
                }
                let view = view(there.memory.address, is_spread);
                let (address, plane_memory) = match &beside {
                    None => (here.as_mut_ptr(), Memory::Host),
                    Some(room) => {
                        let address = room.memory.address as usize;
                        (std::ptr::with_exposed_provenance_mut(address), Memory::Device)
                    }
                };
                let copy = Copy::new(&view, 0, SHAPE.0, address, direction).expect("sound");
                let (memory, wants_sum) = (Memory::Device, true);
                let sum = go(&first, Copy { memory, plane_memory, wants_sum, ..copy });
                assert_eq!(sum, Ok(checksum(&right)), "{words}");
                let mut got = vec![0; BYTES];
                match (direction, &beside) {
                    (Direction::Gather, None) => got.copy_from_slice(&here),
                    (Direction::Gather, Some(room)) => {
                        room.moves(&mut got, false, Direction::Gather)
                    }
                    (Direction::Scatter, _) => there.moves(&mut got, is_spread, Direction::Gather),
                }
                assert!(got == right, "{words}");
                fake.check();
            }
        }
        first.forget_host_of(&mut here);
        assert_eq!(fake.calls(PEER) > before, !reaches, "{means}");
        drop((first, others));
        assert_eq!(fake.live(), 0);
        fake.check();
    }
}

trait Forget {
    fn forget_host_of(&self, memory: &mut [u8]);
}

impl Forget for Cuda {
    fn forget_host_of(&self, memory: &mut [u8]) {
        // SAFETY: nothing uses it any more.
        unsafe { self.unregister_host(memory.as_mut_ptr()) }.expect("known");
    }
}

/// Peer access does not cover memory that is mapped piece by piece. It is copied all the same.
#[test]
fn mapped_peer_memory_is_copied_without_peer_access() {
    let (_turn, fake) = alone(5, true);
    let (first, other) = (open(opts(0, &[1])), Arc::new(open(opts(1, &[]))));
    let window = CudaWindow::new(other.clone(), 1 << 20).expect("addresses");
    let piece = window.create(window.granularity_bytes()).expect("memory");
    // SAFETY: no copy uses the piece yet.
    unsafe { window.put(piece, 0).expect("a place") };
    let mut right = content(9);
    let piece = |bytes: &mut [u8], direction| {
        let copy = Copy::bytes(
            bytes.as_mut_ptr(),
            window.address(),
            BYTES as u64,
            direction,
            Memory::Device,
        );
        copy.expect("sound")
    };
    let before = fake.calls(PEER);
    go(&first, piece(&mut right, Direction::Scatter)).expect("staged in the device's memory");
    let mut got = vec![0; BYTES];
    go(&first, piece(&mut got, Direction::Gather)).expect("and back");
    assert!(got == right && fake.calls(PEER) > before);
    drop((window, first, other));
    fake.check();
}

#[test]
fn non_peer_devices_are_rejected() {
    let (_turn, fake) = alone(7, false);
    for (peers, words) in [
        (&[3][..], "peer 3: the driver has 3 devices"),
        (&[1, 0], "device 0 cannot be its own peer"),
        (&[2, 2], "peer 2 is named twice"),
    ] {
        let error = Cuda::open(Clock::real(), &opts(0, peers)).err().expect("refused");
        assert_eq!(error.status(), Status::Invalid);
        assert!(error.message().contains(words), "{error}");
    }
    let first = open(CudaOpts { verify: true, ..opts(0, &[1]) });
    let (peer, stranger) = (open(opts(1, &[])), open(opts(2, &[])));
    let (peer_room, stranger_room) = (Room::new(&peer), Room::new(&stranger));
    let mut here = content(1);
    let to = here.as_mut_ptr();
    let copy =
        |address| Copy::bytes(to, address, 64, Direction::Gather, Memory::Device).expect("sound");
    let error = go(&first, copy(stranger_room.memory.address)).expect_err("no peer");
    assert_eq!(error.status(), Status::Invalid);
    assert!(error.to_string().contains("is on device 2, this is device 0"), "{error}");
    // Tokens on two devices, one of which is not reached.
    let own = Room::new(&first);
    let addresses = [own.memory.address, peer_room.memory.address];
    let pages = View {
        place: Place::Pages { addresses: &addresses, page_tokens: 1, shift_bytes: 0 },
        tokens: 2,
        ..view(0, false)
    };
    let copy = Copy::new(&pages, 0, 2, to, Direction::Gather).expect("sound");
    let error = go(&first, Copy { memory: Memory::Device, ..copy }).expect_err("two devices");
    assert!(error.to_string().contains("several devices"), "{error}");
    // Kernels go there only where there is access.
    let call = Call {
        kind: Kind::Sum as u32,
        table: peer_room.memory.address,
        count: 1,
        out: own.memory.address,
        scratch: own.memory.address + 64,
        scratch_bytes: 4096,
        ..Call::default()
    };
    // SAFETY: refused, as this test wants to see.
    let error = unsafe { first.launch(Stream(0), None, &[call]) }.expect_err("no access");
    assert!(error.to_string().contains("no peer access"), "{error}");
    let words = first.describe().to_string();
    assert!(
        words.contains("device 1 by copies alone: the devices cannot access each other"),
        "{words}"
    );
    drop((own, peer_room, stranger_room));
    drop((first, peer, stranger));
    assert_eq!(fake.live(), 0);
    fake.check();
}

/// Each call of the peer setup fails: the device opens without access, or not at all.
#[test]
fn failed_peer_setup_disables_access() {
    let (_turn, fake) = alone(11, true);
    for (call, nth, code) in [
        ("cuDeviceCanAccessPeer", 1, 101),
        ("cuCtxEnablePeerAccess", 1, 217),
        ("cuCtxEnablePeerAccess", 1, 711),
    ] {
        fake.fail(call, nth, code);
        let first = open(opts(0, &[1]));
        let words = first.describe().to_string();
        assert!(words.contains(&format!("by copies alone: {call}")), "{words}");
        fake.no_more_failures();
        // Another device gains access later: then this device has access too.
        let second = open(opts(0, &[1])).describe().to_string();
        assert!(second.contains("reaches device 1"), "{second}");
        drop(first);
        assert_eq!(fake.live(), 0, "{call}");
    }
    // The engine has it already.
    fake.fail("cuCtxEnablePeerAccess", 1, 704);
    let words = open(opts(0, &[1])).describe().to_string();
    assert!(words.contains("reaches device 1"), "{words}");
    fake.no_more_failures();
    fake.fail("cuDevicePrimaryCtxRetain", 2, 2);
    assert!(Cuda::open(Clock::real(), &opts(0, &[1])).is_err());
    assert_eq!(fake.live(), 0);
    fake.check();
}

#[test]
fn failed_peer_copy_fails_one_batch() {
    let (_turn, fake) = alone(12, false);
    for (call, nth) in [(PEER, 1), (PEER, 40), ("cuPointerGetAttributes", 2), ("cuMemAlloc", 1)] {
        let (first, other) = (open(opts(0, &[1])), open(opts(1, &[])));
        let there = Room::new(&other);
        let mut right = content(4);
        there.moves(&mut right, true, Direction::Scatter);
        let mut got = vec![0; BYTES];
        let view = view(there.memory.address, true);
        let mut gather = || {
            let copy =
                Copy::new(&view, 0, SHAPE.0, got.as_mut_ptr(), Direction::Gather).expect("sound");
            go(&first, Copy { memory: Memory::Device, ..copy })
        };
        fake.fail(call, nth, 2);
        assert_eq!(gather().expect_err("planted").status(), Status::NoMem, "{call} {nth}");
        assert!(fake.has_failed());
        gather().expect("it is as before");
        assert!(got == right, "{call} {nth}");
        drop(there);
        drop((first, other));
        assert_eq!(fake.live(), 0, "{call} {nth}");
    }
    fake.check();
}

const MODEL: Model = Model { layers: 2, heads: 4, run: 64, chunk: 16 };
const TOKENS: usize = 3 * MODEL.chunk + 7;

/// A store on the first device puts tensors of the second and gets them into the third.
#[test]
fn store_transfers_tensors_of_peer_devices() {
    let specs = ["store(host=8MiB)", "store(host=8MiB,device=device(capacity=2MiB))"];
    for (reaches, spec) in [true, false].into_iter().flat_map(|r| specs.map(|spec| (r, spec))) {
        for means in MEANS {
            let (_turn, fake) = alone(13, reaches);
            let choice = CopyMethodChoice::Fixed(means);
            let first: Arc<dyn Device> =
                Arc::new(open(CudaOpts { choice, verify: true, ..opts(0, &[1, 2]) }));
            let others = [open(opts(1, &[])), open(opts(2, &[]))];
            let store = TestStore::on_device(&spec_of(spec), first);
            let namespace = store.namespace(1, &MODEL);
            let tokens = document(1, TOKENS);
            let session = store.session(namespace, &tokens);
            let engine = Engine::computed(MODEL, SHAPES[1], &marks_of(0, &tokens));
            let from = Mirror::new(&others[0], engine);
            let mut to = Mirror::new(&others[1], Engine::new(MODEL, SHAPES[0], TOKENS));
            for (kind, what) in [(TransferKind::Put, from.whole()), (TransferKind::Get, to.whole())]
            {
                let ops = store.submit(session, kind, Level::Ram, what).expect("taken");
                let right = Done::ok(TOKENS);
                assert_eq!(wait(&ops[0]), right, "{spec}, {reaches}, {means}");
            }
            to.copy(Direction::Gather);
            assert!(to.engine.matches(&marks_of(0, &tokens)), "{spec}, {reaches}, {means}");
            assert_eq!(store.counters().damaged_copies, 0);
            drop((from, to));
            store.close_session(session);
            store.close();
            fake.check();
        }
    }
}
