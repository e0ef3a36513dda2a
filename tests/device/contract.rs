//! The contract of all devices: what callers may rely on that wait as documented. The simulated
//! device must detect callers that do not.

use kvtier_testkit::fixtures::emulated;
use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::relay;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fake_cuda::Fake;
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::call::{Call, Kind};
use kvtier::device::conformance::{self, ConformanceOpts, Verdict};
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::device::foreign::{Engine, Foreign};
use kvtier::device::host::Host;
use kvtier::device::simulated::{POISON, Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, Direction, Event, MAX_USER_EVENTS, Memory, State, Stream};
use kvtier::meta::view::{Side, View};
use relay::{Fault, Relay};

fn simulated(seed: u64) -> (Simulated, Clock) {
    let opts = SimulatedOpts { seed, ..SimulatedOpts::default() };
    simulated_as(opts)
}

fn simulated_as(opts: SimulatedOpts) -> (Simulated, Clock) {
    let clock = Clock::manual(1_000);
    (Simulated::new(clock.clone(), opts).expect("sound"), clock)
}

/// CUDA over a driver without a device; where there is a GPU, on that.
fn fake_cuda() -> Cuda {
    let has_gpu = std::env::var_os("KVTIER_GPU").is_some();
    let library = (!has_gpu).then(fake_cuda::library);
    if !has_gpu {
        Fake::loaded().emulate(emulated::launches());
    }
    Cuda::open(Clock::real(), &CudaOpts { library, ..CudaOpts::default() }).expect("a driver")
}

/// An engine's device, and the engine behind it.
fn foreign(clock: Clock, seed: u64, fault: Fault) -> (Foreign, Arc<Relay>) {
    let relay = Arc::new(Relay::new(clock.clone(), seed, fault));
    (Foreign::new(clock, relay.clone()).expect("sound"), relay)
}

/// Opens every device, each with its clock.
fn all(seed: u64) -> Vec<(Arc<dyn Device>, Clock)> {
    let (by_hand, hand) = simulated(seed);
    let real = SimulatedOpts { seed, latency_ns: 1_000, ..SimulatedOpts::default() };
    let other = Clock::manual(1);
    vec![
        (Arc::new(Host::default()), Clock::real()),
        (Arc::new(by_hand), hand),
        (Arc::new(Simulated::new(Clock::real(), real).expect("sound")), Clock::real()),
        (Arc::new(fake_cuda()), Clock::real()),
        (Arc::new(foreign(other.clone(), seed, Fault::None).0), other),
        (Arc::new(foreign(Clock::real(), seed, Fault::None).0), Clock::real()),
    ]
}

/// Runs a test on every device.
fn on_all(seed: u64, test: impl Fn(&dyn Device)) {
    for (device, _clock) in all(seed) {
        test(&*device);
    }
}

/// The checks that a device does not pass, and why.
fn troubles(device: &Arc<dyn Device>, opts: &ConformanceOpts) -> Vec<String> {
    let mut troubles = Vec::new();
    let mut names = Vec::new();
    let count = conformance::run(device, opts, &mut |name, verdict| {
        names.push(name);
        if let Verdict::Failed(why) = verdict {
            troubles.push(format!("{name}: {why}"));
        }
    });
    assert_eq!(count.failed as usize, troubles.len());
    assert_eq!((count.passed + count.skipped + count.failed) as usize, names.len());
    assert_eq!(names.last().copied(), Some("close"));
    troubles
}

/// As long as usual on a clock that the test moves; on the machine's, what takes longer hangs,
/// however slow it is.
fn patience_ns(clock: &Clock) -> u64 {
    if clock.is_manual() { 0 } else { 300_000_000_000 }
}

#[test]
fn every_device_conforms() {
    for seed in 0..3 {
        for (device, clock) in all(seed) {
            let rounds = if seed == 0 { 20 } else { 6 };
            let opts = ConformanceOpts {
                seed,
                rounds,
                clock: clock.clone(),
                patience_ns: patience_ns(&clock),
                closes: true,
            };
            let troubles = troubles(&device, &opts);
            assert!(troubles.is_empty(), "{}, seed {seed}: {troubles:?}", device.facts().name);
        }
    }
}

/// Engine memory serves as well as the driver's. A device whose memory is all given out passes
/// without that part.
#[test]
fn devices_with_engine_memory_conform() {
    let engine = fake_cuda();
    let mine = engine.allocate(384 << 20).expect("memory");
    let library = std::env::var_os("KVTIER_GPU").is_none().then(fake_cuda::library);
    let arena = (mine.address, mine.bytes);
    let opts = CudaOpts { library, arena, ..CudaOpts::default() };
    let within = Cuda::open(Clock::real(), &opts).expect("a driver");
    let by_hand = Clock::manual(1);
    let keeps = foreign(by_hand.clone(), 5, Fault::Keeps).0;
    let all: [(Arc<dyn Device>, Clock); 2] =
        [(Arc::new(within), Clock::real()), (Arc::new(keeps), by_hand)];
    for (device, clock) in all {
        let patience_ns = patience_ns(&clock);
        let opts = ConformanceOpts { seed: 1, rounds: 4, clock, patience_ns, closes: true };
        let troubles = troubles(&device, &opts);
        assert!(troubles.is_empty(), "{}: {troubles:?}", device.facts().name);
    }
    // SAFETY: the device that used the memory has been dropped.
    unsafe { engine.free(&mine) }.expect("its own");
}

#[test]
fn conformance_suite_detects_every_fault() {
    for fault in Fault::COPIES.into_iter().chain(relay::kinds().map(Fault::Kernel)) {
        // Rooms occupy whole pages, so bytes that such a device writes beside the target
        // hit no other object of the test.
        let clock = Clock::manual(1);
        let (device, _relay) = foreign(clock.clone(), 7, fault);
        let device: Arc<dyn Device> = Arc::new(device);
        let (rounds, patience_ns) = (12, 1 << 40);
        let opts = ConformanceOpts { seed: 3, rounds, clock, patience_ns, closes: true };
        let troubles = troubles(&device, &opts);
        assert!(!troubles.is_empty(), "{fault:?} is not seen");
        if let Fault::Kernel(kind) = fault {
            let name = format!("{kind:?}").to_lowercase();
            let found = |why: &String| why.replace('-', "").starts_with(&format!("kernel{name}:"));
            assert!(troubles.iter().any(found), "{fault:?} is not seen by its own check");
        }
        println!("{fault:?}: {}", troubles.join("; "));
    }
}

#[test]
fn custom_device_returns_all_resources_of_the_engine() {
    let (device, relay) = foreign(Clock::manual(1), 1, Fault::None);
    let memory = device.allocate(5_000).expect("room");
    let kept = device.allocate(5_000).expect("room");
    let (a, b) = (Room::filled(100, 1), Room::filled(100, 2));
    let first = submit(&device, 0, None, &mut [a.copy(&b, Direction::Gather)]).expect("taken");
    let second = submit(&device, 1, Some(first), &mut []).expect("taken");
    assert_eq!(device.release(first).expect_err("pending").status(), Status::Busy);
    done(&device, second);
    device.release(first).expect("ended");
    // SAFETY: nothing uses it.
    unsafe { device.free(&memory) }.expect("its own");
    assert_eq!((relay.open.load(Ordering::SeqCst), relay.allocations()), (1, 1));
    let _ = (second, kept);
    drop(device);
    assert_eq!((relay.open.load(Ordering::SeqCst), relay.allocations()), (0, 0));
}

#[test]
fn custom_device_lends_the_upper_half_of_its_streams() {
    let (device, _relay) = foreign(Clock::manual(1), 1, Fault::None);
    assert_eq!((device.facts().streams, device.shared_streams()), (4, 2));
    let lent = [3, 2].map(|number| {
        let stream = device.lease_stream().expect("one is left");
        assert_eq!(stream, Stream(number));
        stream
    });
    assert_eq!(device.lease_stream().expect_err("none is left").status(), Status::Again);
    device.return_stream(lent[1]);
    assert_eq!(device.lease_stream().expect("it is back"), lent[1]);
    // One with a single stream, or that copies at once, has none to lend.
    assert_eq!(Host::default().lease_stream().expect_err("none").status(), Status::Again);
}

#[test]
fn custom_device_signals_user_events_once() {
    let (device, relay) = foreign(Clock::manual(1), 1, Fault::None);
    for _ in 0..3 {
        let promises: Vec<Event> =
            (0..MAX_USER_EVENTS).map(|_| device.create_user_event().expect("room")).collect();
        assert_eq!(device.create_user_event().expect_err("no room").status(), Status::Again);
        for promise in promises {
            assert_eq!(device.release(promise).expect_err("open").status(), Status::Busy);
            device.signal_event(promise).expect("a promise");
            device.signal_event(promise).expect("once more does no harm");
            device.forget(promise);
            assert_eq!(device.signal_event(promise).expect_err("gone").status(), Status::Handle);
        }
    }
    let open = device.create_user_event().expect("room");
    device.close(0).expect("nothing is under way");
    assert_eq!(device.state(open).expect("known"), State::Done);
    assert_eq!(device.create_user_event().expect_err("closed").status(), Status::Closed);
    drop(device);
    assert_eq!(relay.open.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[test]
fn lost_custom_device_gets_no_more_calls() {
    let (device, relay) = foreign(Clock::manual(1), 1, Fault::None);
    let (a, b) = (Room::filled(100, 1), Room::filled(100, 2));
    let put = |stream| submit(&device, stream, None, &mut [a.copy(&b, Direction::Gather)]);
    let (early, first, second) = (put(0), put(1), put(2));
    let (early, first, second) =
        (early.expect("taken"), first.expect("taken"), second.expect("taken"));
    done(&device, early);
    relay.lose();
    assert_eq!(device.state(first).expect_err("lost").status(), Status::Unavailable);
    let why = device.wait(second, 0).expect_err("lost");
    assert_eq!(why.status(), Status::Unavailable);
    assert_eq!(device.state(early).expect("known before"), State::Done);
    for said in [put(0).err(), device.allocate(5).err()] {
        let said = said.expect("refused");
        assert_eq!(said.status(), Status::Unavailable);
        assert!(said.message().contains("the device is lost"), "{said}");
    }
    let mut ended = [Event(0); 9];
    assert_eq!(device.poll(&mut ended), 3);
    device.close(0).expect("nothing is under way");
}

#[test]
fn custom_device_imports_events_streams_and_kernels() {
    let (device, relay) = foreign(Clock::manual(1), 1, Fault::None);
    let (a, b, c) = (Room::filled(64, 1), Room::filled(64, 2), Room::filled(64, 3));
    let content = a.bytes();
    // The engine's own event: of work that it gave its device itself.
    let theirs = relay.submit(3, 0, &[]).expect("taken");
    // SAFETY: an event of the engine's.
    let adopted = unsafe { device.import_event(theirs) }.expect("known");
    let moved =
        submit(&device, 0, Some(adopted), &mut [a.copy(&b, Direction::Gather)]).expect("taken");
    // SAFETY: a stream of the engine's.
    unsafe { device.stream_wait_event(3, moved) }.expect("a stream");
    let (from, to) = (b.at(), c.at());
    let table: [u64; 5] = [from, to, 0, 0, 64 | 1 << 32];
    let mut scratch = [0u64; 2];
    let call = Call {
        kind: Kind::Move as u32,
        table: table.as_ptr().expose_provenance() as u64,
        count: 1,
        scratch: scratch.as_mut_ptr().expose_provenance() as u64,
        scratch_bytes: 16,
        ..Call::default()
    };
    // SAFETY: rooms that stay.
    let computed = unsafe { device.launch(Stream(1), Some(moved), &[call]) }.expect("taken");
    done(&device, computed);
    assert_eq!(c.bytes(), content);
    for call in [Call { kind: 13, ..call }, Call { kind: 200, ..call }] {
        // SAFETY: refused.
        let said = unsafe { device.launch(Stream(1), None, &[call]) };
        assert_eq!(said.expect_err("no such kernel").status(), Status::Unsupported);
    }
    // SAFETY: refused.
    let said = unsafe { device.import_event(0xdead) };
    assert_eq!(said.expect_err("none of the engine's").status(), Status::Handle);
    done(&device, submit(&device, 0, None, &mut []).expect("the device works"));
}

fn submit(
    device: &dyn Device,
    stream: u32,
    after: Option<Event>,
    copies: &mut [Copy<'_>],
) -> Result<Event> {
    // SAFETY: the tests' memory outlives their devices' work; those that break the
    // rules of waiting do so with memory that nothing else uses.
    unsafe { device.submit(Stream(stream), after, copies) }
}

fn done(device: &dyn Device, event: Event) {
    device.wait(event, 0).expect("it ends well");
    assert_eq!(device.state(event).expect("known"), State::Done);
}

/// Memory that devices reach by address: as bytes for the test, as numbers for them.
struct Room {
    address: *mut u8,
    len: usize,
}

impl Room {
    fn new(content: Vec<u8>) -> Room {
        let boxed = Box::leak(content.into_boxed_slice());
        Room { len: boxed.len(), address: boxed.as_mut_ptr() }
    }

    fn filled(len: usize, seed: u64) -> Room {
        Room::new(noise(len, seed))
    }

    fn at(&self) -> u64 {
        self.address.expose_provenance() as u64
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the room's own memory.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }.to_vec()
    }

    fn set(&self, content: &[u8]) {
        assert_eq!(content.len(), self.len);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.address, self.len) }
    }

    fn view(&self) -> View<'static> {
        View::canonical(self.at(), 1, self.len as u64)
    }

    /// Copies this room, as a tensor, to or from a plane of the same length.
    fn copy(&self, plane: &Room, direction: Direction) -> Copy<'static> {
        Copy::new(&self.view(), 0, 1, plane.address, direction).expect("sound")
    }
}

// SAFETY: a test that shares one says who writes when.
unsafe impl Sync for Room {}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: what `new` leaked.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.address, self.len)) });
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let step = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(step).collect()
}

#[test]
fn a_released_event_is_not_reported() {
    let (device, _clock) = simulated(1);
    let (a, b) = (Room::filled(100, 1), Room::filled(100, 2));
    let put = || submit(&device, 0, None, &mut [a.copy(&b, Direction::Gather)]).expect("taken");
    let (first, second) = (put(), put());
    done(&device, second);
    device.release(first).expect("ended");
    let mut ended = [Event(0); 3];
    assert_eq!((device.poll(&mut ended), ended[0]), (1, second));
    assert_eq!(device.poll(&mut ended), 0);
}

#[test]
fn closed_device_touches_no_memory() {
    for seed in 0..20 {
        on_all(seed, |device| {
            let (a, b) = (Room::filled(200_000, 1), Room::filled(200_000, 2));
            let room = &a;
            let plane = &b;
            let begun = AtomicU64::new(0);
            std::thread::scope(|scope| {
                let engine = scope.spawn(|| {
                    loop {
                        let mut copies = [room.copy(plane, Direction::Gather)];
                        if let Err(error) = submit(device, 0, None, &mut copies) {
                            return error.status();
                        }
                        begun.fetch_add(1, Ordering::SeqCst);
                    }
                });
                while begun.load(Ordering::SeqCst) < 3 {
                    std::thread::yield_now();
                }
                device.close(0).expect("all ends");
                plane.set(&[7; 200_000]);
                let refused = engine.join().expect("no panic");
                assert!(matches!(refused, Status::Closed | Status::Again));
                assert!(plane.bytes() == [7; 200_000], "the device wrote after close");
            });
        });
    }
}

/// State of a room that a caller expects: final content, last writer
/// and the readers since then.
struct Known {
    room: Room,
    content: Vec<u8>,
    writer: Option<Event>,
    readers: Vec<Event>,
}

/// A caller who moves bytes between rooms at random, and forgets every so many of
/// the waits it has to do, or none (0). Returns whether all bytes were right.
fn wander(device: &dyn Device, seed: u64, forgets: u64) -> bool {
    let mut state = seed;
    let mut pick = |n: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % n
    };
    let know = |i| {
        let room = Room::filled(3_000, seed ^ i);
        Known { content: room.bytes(), room, writer: None, readers: Vec::new() }
    };
    let mut rooms: Vec<Known> = (0..6).map(know).collect();
    let (mut right, mut waits) = (true, 0);
    for step in 0..200u64 {
        let mut must_wait = |events: &mut dyn Iterator<Item = Event>, all: bool| {
            let mut left: Vec<Event> = events.collect();
            // One may be left to the device, the others are waited for here.
            let after = if all { None } else { left.pop() };
            for event in left {
                waits += 1;
                if forgets == 0 || waits % forgets != 0 {
                    device.wait(event, 0).expect("it ends well");
                }
            }
            waits += u64::from(after.is_some());
            after.filter(|_| forgets == 0 || waits % forgets != 0)
        };
        let from = pick(6) as usize;
        if pick(4) == 0 {
            // The caller uses a room itself: looks at it, then fills it.
            let known = &mut rooms[from];
            must_wait(&mut known.writer.into_iter(), true);
            right &= known.room.bytes() == known.content;
            must_wait(&mut known.readers.drain(..), true);
            known.content = noise(3_000, seed ^ step);
            known.room.set(&known.content);
            known.writer = None;
            continue;
        }
        let to = (from + 1 + pick(5) as usize) % 6;
        let mut events: Vec<Event> = rooms[from].writer.into_iter().collect();
        events.extend(rooms[to].writer);
        events.append(&mut rooms[to].readers);
        let after = must_wait(&mut events.into_iter(), false);
        let mut copies = match pick(2) {
            0 => [rooms[from].room.copy(&rooms[to].room, Direction::Gather)],
            _ => [rooms[to].room.copy(&rooms[from].room, Direction::Scatter)],
        };
        let event = submit(device, pick(3) as u32, after, &mut copies).expect("taken");
        rooms[from].readers.push(event);
        rooms[to].content = rooms[from].content.clone();
        rooms[to].writer = Some(event);
    }
    device.close(0).expect("all ends");
    right && rooms.iter().all(|known| known.room.bytes() == known.content)
}

#[test]
fn documented_waits_order_all_copies() {
    for seed in 0..60 {
        assert!(wander(&Host::default(), seed, 0), "host, seed {seed}");
        assert!(wander(&simulated(seed).0, seed, 0), "simulated, seed {seed}");
        assert!(wander(&fake_cuda(), seed, 0), "CUDA without a device, seed {seed}");
        let (device, _relay) = foreign(Clock::manual(1), seed, Fault::None);
        assert!(wander(&device, seed, 0), "an engine's, seed {seed}");
    }
}

#[test]
fn missing_waits_cause_wrong_bytes() {
    // Another wait may cover a forgotten one.
    for (forgets, least) in [(40, 20), (10, 60), (3, 95)] {
        let caught = (0..100).filter(|&seed| !wander(&simulated(seed).0, seed, forgets)).count();
        assert!(caught >= least, "1 of {forgets} waits forgotten: {caught} of 100 were caught");
    }
}

/// An engine writes KV while it is stored (read after write), and uses what it has
/// while other KV is loaded (write after read).
fn race(seed: u64, orderly: bool) -> (bool, bool) {
    let (device, _clock) = simulated(seed);
    let (activations, kv, plane) =
        (Room::filled(20_000, 1), Room::filled(20_000, 2), Room::filled(20_000, 3));
    let computed = activations.bytes();
    let compute = submit(&device, 0, None, &mut [kv.copy(&activations, Direction::Scatter)]);
    let ready = compute.ok().filter(|_| orderly);
    let put = submit(&device, 1, ready, &mut [kv.copy(&plane, Direction::Gather)]).expect("taken");
    done(&device, put);
    let stored = plane.bytes() == computed;

    let (device, _clock) = simulated(seed);
    let (kv, used, plane) =
        (Room::filled(20_000, 2), Room::filled(20_000, 4), Room::filled(20_000, 3));
    let old = kv.bytes();
    let attend = submit(&device, 0, None, &mut [kv.copy(&used, Direction::Gather)]).expect("taken");
    let consumed = orderly.then_some(attend);
    let get =
        submit(&device, 1, consumed, &mut [kv.copy(&plane, Direction::Scatter)]).expect("taken");
    done(&device, get);
    done(&device, attend);
    (stored, used.bytes() == old && kv.bytes() == plane.bytes())
}

#[test]
fn events_prevent_races_that_are_otherwise_detected() {
    let mut caught = (0, 0);
    for seed in 0..100 {
        assert_eq!(race(seed, true), (true, true), "seed {seed}");
        let (stored, loaded) = race(seed, false);
        caught = (caught.0 + u32::from(!stored), caught.1 + u32::from(!loaded));
    }
    assert!(caught.0 > 30 && caught.1 > 30, "{caught:?} of 100 were caught");
}

#[test]
fn simulated_copies_read_late_and_poison_targets() {
    let mut late = 0;
    for seed in 0..50 {
        let (device, clock) = simulated(seed);
        let (a, b) = (Room::filled(20_000, 1), Room::filled(20_000, 2));
        let content = a.bytes();
        let event = submit(&device, 0, None, &mut [a.copy(&b, Direction::Gather)]).expect("taken");
        assert_eq!(b.bytes(), [POISON; 20_000]);
        clock.advance(5_000);
        assert_eq!(device.state(event).expect("known"), State::Pending);
        assert_eq!(b.bytes(), [POISON; 20_000]);
        a.set(&[1; 20_000]);
        done(&device, event);
        assert!(b.bytes() == content || b.bytes() == [1; 20_000]);
        late += u32::from(b.bytes() != content);
    }
    assert!((25..50).contains(&late), "{late} of 50 read what came too early");
}

/// When events end, and what was read, for some copies on three streams.
fn trace(seed: u64) -> (Vec<u64>, Vec<Event>, Vec<Vec<u8>>) {
    let (device, clock) = simulated(seed);
    let rooms: Vec<Room> = (0..12).map(|i| Room::filled(4_000 + 100 * i as usize, i)).collect();
    let source = Room::filled(8_000, 99);
    let mut times = Vec::new();
    let mut order = Vec::new();
    for (i, room) in rooms.iter().enumerate() {
        let view = View::canonical(source.at(), 1, room.len as u64);
        let mut copies = [Copy::new(&view, 0, 1, room.address, Direction::Gather).expect("sound")];
        submit(&device, i as u32 % 3, None, &mut copies).expect("taken");
    }
    while let Some(next) = device.next_ns() {
        clock.advance(next - clock.now_ns());
        let mut ended = [Event(0); 12];
        let count = device.poll(&mut ended);
        times.extend(ended[..count].iter().map(|_| next));
        order.extend_from_slice(&ended[..count]);
        source.set(&noise(8_000, next));
    }
    (times, order, rooms.iter().map(Room::bytes).collect())
}

#[test]
fn simulated_device_is_deterministic_and_reorders_streams() {
    let mut overtaken = 0;
    for seed in 0..20 {
        let run = trace(seed);
        assert!(run == trace(seed), "seed {seed} does not repeat");
        assert!(run.0 != trace(seed + 100).0);
        assert_eq!(run.1.len(), 12);
        for stream in 0..3 {
            let of_stream: Vec<u64> =
                run.1.iter().map(|event| event.0 & 0xFFFF).filter(|n| n % 3 == stream).collect();
            assert!(of_stream.is_sorted(), "a stream is in order");
        }
        overtaken += u32::from(!run.1.is_sorted_by_key(|event| event.0));
    }
    assert!(overtaken > 15, "{overtaken} of 20");
}

#[test]
fn failed_batch_fails_its_dependents_only() {
    let opts = SimulatedOpts { fail_at: vec![2], ..SimulatedOpts::default() };
    let (device, _clock) = simulated_as(opts);
    let rooms: Vec<Room> = (0..6).map(|i| Room::filled(1_000, i)).collect();
    let before: Vec<Vec<u8>> = rooms.iter().map(Room::bytes).collect();
    let copy = |from: usize, to: usize| [rooms[from].copy(&rooms[to], Direction::Gather)];
    let good = submit(&device, 0, None, &mut copy(0, 1)).expect("taken");
    let bad = submit(&device, 1, None, &mut copy(0, 2)).expect("taken");
    let heir = submit(&device, 2, Some(bad), &mut copy(2, 3)).expect("taken");
    let heir_of_heir = submit(&device, 0, Some(heir), &mut copy(3, 4)).expect("taken");
    let behind = submit(&device, 1, None, &mut copy(0, 5)).expect("taken");
    for event in [bad, heir, heir_of_heir] {
        assert_eq!(device.wait(event, 0).expect_err("failed").status(), Status::Io);
        assert_eq!(device.state(event).expect_err("failed").status(), Status::Io);
    }
    done(&device, good);
    done(&device, behind);
    let now: Vec<Vec<u8>> = rooms.iter().map(Room::bytes).collect();
    assert!(now[1] == before[0] && now[5] == before[0]);
    assert_eq!(now[2], [POISON; 1_000], "a failed target is not right by luck");
    assert!(now[3] == before[3] && now[4] == before[4], "what had no input began nothing");
    let late = submit(&device, 3, Some(bad), &mut copy(0, 1)).expect_err("refused");
    assert_eq!(late.status(), Status::Io);
    let mut ended = [Event(0); 9];
    assert_eq!(device.poll(&mut ended), 5, "those that failed are reported, too");
}

#[test]
fn lost_device_fails_every_call() {
    let opts = SimulatedOpts { lost_at: 3, ..SimulatedOpts::default() };
    let (device, clock) = simulated_as(opts);
    let rooms: Vec<Room> = (0..6).map(|i| Room::filled(1_000, i)).collect();
    let put = |stream, to: usize| {
        submit(&device, stream, None, &mut [rooms[0].copy(&rooms[to], Direction::Gather)])
    };
    let events = [put(0, 1), put(0, 2), put(0, 3), put(0, 4)].map(|event| event.expect("taken"));
    done(&device, events[0]);
    done(&device, events[1]);
    for event in &events[2..] {
        assert_eq!(device.wait(*event, 0).expect_err("lost").status(), Status::Unavailable);
    }
    assert!(device.is_lost());
    assert_eq!(put(1, 5).expect_err("lost").status(), Status::Unavailable);
    // It touches no memory any more.
    assert_eq!(device.next_ns(), None);
    let before: Vec<Vec<u8>> = rooms.iter().map(Room::bytes).collect();
    clock.advance(1 << 40);
    let mut ended = [Event(0); 9];
    assert_eq!(device.poll(&mut ended), 4);
    assert_eq!(ended[..4], events);
    assert_eq!(rooms.iter().map(Room::bytes).collect::<Vec<_>>(), before);
    device.close(0).expect("nothing is under way");

    let (device, _clock) = simulated(1);
    let event = submit(&device, 0, None, &mut [rooms[0].copy(&rooms[1], Direction::Gather)])
        .expect("taken");
    device.lose();
    assert_eq!(device.state(event).expect_err("lost").status(), Status::Unavailable);
}

#[test]
fn waits_time_out_at_their_deadline() {
    let real = Clock::real();
    let slow = SimulatedOpts { latency_ns: 60_000_000_000, ..SimulatedOpts::default() };
    let devices =
        [(Simulated::new(real.clone(), slow.clone()).expect("sound"), real), simulated_as(slow)];
    for (device, clock) in devices {
        let (a, b) = (Room::filled(100, 1), Room::filled(100, 2));
        let event = submit(&device, 0, None, &mut [a.copy(&b, Direction::Gather)]).expect("taken");
        let deadline = clock.now_ns() + 3_000_000;
        let status = device.wait(event, deadline).expect_err("too early").status();
        assert_eq!(status, Status::Timeout);
        assert!(clock.now_ns() >= deadline);
        assert_eq!(device.release(event).expect_err("pending").status(), Status::Busy);
        let status = device.close(clock.now_ns() + 1_000).expect_err("pending").status();
        assert_eq!(status, Status::Busy);
        if clock.is_manual() {
            device.close(0).expect("it ends");
            device.release(event).expect("ended");
            assert_eq!(a.bytes(), b.bytes());
        }
        device.lose();
    }
}

#[test]
fn copy_with_overlapping_target_is_invalid() {
    let room = Room::filled(100, 1);
    let view = View { token_stride_bytes: 3, tokens: 4, ..View::canonical(room.at(), 1, 8) };
    assert!(view.span(0, 4, Side::Source).is_ok());
    let refused = Copy::new(&view, 0, 4, room.address, Direction::Scatter).err().expect("refused");
    assert_eq!(refused.status(), Status::Invalid);
}

#[test]
fn copies_may_exceed_one_gibibyte() {
    let copy = |address, bytes| {
        let room = 8 as *mut u8;
        Copy::bytes(room, address, bytes, Direction::Scatter, Memory::Device)
    };
    let large = copy(4096, 1 << 30).expect("a chunk");
    assert_eq!((large.tensor.bytes(), large.tensor.strips().count()), (1 << 30, 1));
    assert!(copy(4096, 1 << 40).is_ok());
    for (address, bytes) in [(0, 5), (4096, 0), (u64::MAX, 5), (4096, u64::MAX)] {
        assert!(copy(address, bytes).is_err(), "{bytes} at {address}");
    }
}

#[test]
fn device_memory_is_limited_and_leaks_are_counted() {
    let (device, clock) =
        simulated_as(SimulatedOpts { memory_bytes: 10_000, ..SimulatedOpts::default() });
    assert_eq!((device.free_bytes(), device.allocated_bytes()), (Some(10_000), 0));
    let a = device.allocate(6_000).expect("room");
    let error = device.allocate(4_001).expect_err("too much");
    assert_eq!(error.status(), Status::NoMem);
    assert!(error.message().contains("4000 of 10000 are free"), "{error}");
    let b = device.allocate(4_000).expect("just enough");
    assert!(device.allocate(u64::MAX).is_err() && device.allocate(1).is_err());
    assert_eq!((device.free_bytes(), device.allocated_bytes()), (Some(0), 10_000));

    // Work under way keeps its memory; what is freed is poisoned.
    let room = Room::filled(6_000, 3);
    let to_a =
        || [Copy::bytes(room.address, a.address, 6_000, Direction::Scatter, a.memory).expect("it")];
    let event = submit(&device, 0, None, &mut to_a()).expect("taken");
    // SAFETY: refused, as this test wants to see.
    assert_eq!(unsafe { device.free(&a) }.expect_err("in use").status(), Status::Busy);
    // SAFETY: only the other one is in use.
    assert_eq!(unsafe { device.free(&b) }, Ok(()));
    done(&device, event);
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { device.free(&a) }, Ok(()));
    let late =
        [Copy::bytes(room.address, a.address, 6_000, Direction::Gather, a.memory).expect("it")];
    done(&device, submit(&device, 0, None, &mut { late }).expect("taken"));
    assert_eq!(room.bytes(), [POISON; 6_000], "freed memory is read as poison");
    assert_eq!((device.allocated_bytes(), clock.now_ns() > 1_000), (0, true));

    let (other, _clock) = simulated(1);
    let theirs = other.allocate(6_000).expect("no limit");
    assert_eq!((other.free_bytes(), other.allocated_bytes()), (None, 6_000));
    let ours = device.allocate(6_000).expect("room");
    // SAFETY: refused.
    let refused = unsafe { device.free(&theirs) };
    assert!(theirs.address == ours.address || refused.is_err());
    device.lose();
    assert_eq!(device.allocate(1).expect_err("lost").status(), Status::Unavailable);
}
