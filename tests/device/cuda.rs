//! The CUDA device over the fake driver: which calls it makes, what it frees, and what happens when
//! a call fails. (`devices` checks that copies are exact.)

use kvtier_testkit::fixtures::fake_cuda;

use std::path::PathBuf;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::Status;
use kvtier::device::cuda::{Cuda, CudaOpts, probe};
use kvtier::device::{Copy, Device, Direction, Event, Memory, State, Stream};

fn opts() -> CudaOpts {
    CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() }
}

fn open() -> Cuda {
    Cuda::open(Clock::real(), &opts()).expect("a device")
}

const BYTES: usize = 64 << 10;

/// To the device and back; whether what came back is what went, or what was said. Where a call
/// fails work may be under way: its memory in this process stays for ever.
fn round_trip(cuda: &Cuda) -> kvtier::base::status::Result<bool> {
    let there = Box::leak((0..BYTES).map(|n| (n % 251) as u8).collect::<Box<[u8]>>());
    let back = Box::leak(vec![0u8; BYTES].into_boxed_slice());
    let memory = cuda.allocate(BYTES as u64)?;
    let moved = (|| {
        let to = |host: *mut u8, direction| {
            Copy::bytes(host, memory.address, BYTES as u64, direction, Memory::Device)
        };
        // SAFETY: memory that stays.
        unsafe {
            let up =
                cuda.submit(Stream(0), None, &mut [to(there.as_mut_ptr(), Direction::Scatter)?])?;
            let down =
                cuda.submit(Stream(1), Some(up), &mut [to(back.as_mut_ptr(), Direction::Gather)?]);
            let ended = down.and_then(|down| cuda.wait(down, 0));
            cuda.wait(up, 0).and(ended)
        }
    })();
    // SAFETY: all that used it has ended, or it is refused.
    let freed = unsafe { cuda.free(&memory) };
    moved.and(freed).map(|()| there == back)
}

#[test]
fn closed_cuda_device_leaks_nothing() {
    let (_turn, fake) = alone(1);
    let before = fake.live();
    let cuda = open();
    assert!(round_trip(&cuda).expect("it works"));
    let kept = cuda.allocate(4096).expect("memory");
    assert!(kept.address % 256 == 0 && cuda.free_bytes().expect("known") > 0);
    drop(cuda);
    assert_eq!(fake.live(), before, "streams, events, memory or contexts are left");
    fake.check();
}

#[test]
fn missing_old_or_deviceless_driver_is_unavailable_with_reason() {
    let (_turn, fake) = alone(2);
    let fails = |opts: &CudaOpts, word: &str| {
        let error = Cuda::open(Clock::real(), opts).err().expect("no device");
        assert_eq!(error.status(), Status::Unavailable, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    };
    let library = |path: &str| CudaOpts { library: Some(PathBuf::from(path)), ..opts() };
    fails(&library("/nowhere/libcuda.so"), "no CUDA driver");
    fails(&library("libc.so.6"), "lacks cuInit");
    fails(&CudaOpts { ordinal: 1, ..opts() }, "device 1: the driver has 1");
    fake.set(11_080, 1, 1 << 30, false);
    fails(&opts(), "supports CUDA 11.8, at least 12.0");
    fake.set(12_040, 0, 1 << 30, false);
    fails(&opts(), "device 0: the driver has 0");
    fake.set(12_040, 1, 1 << 30, false);
    fake.fail("cuInit", 1, 999);
    fails(&opts(), "does not initialize");
    assert_eq!(probe(Some(&fake_cuda::library())).expect("one")[0].name, "fake 0");
    fake.check();
}

/// Every driver call fails once, early and late: nothing hangs or leaks, and what is reported as
/// done is done.
#[test]
fn every_driver_call_may_fail_once() {
    let calls = [
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuCtxGetDevice",
        "cuDeviceGetAttribute",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuStreamWaitEvent",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuStreamSynchronize",
    ];
    for call in calls {
        let mut failed = 0;
        for (nth, code) in (1..12).flat_map(|nth| [(nth, 2), (nth, 1), (nth, 400), (nth, 700)]) {
            let (_turn, fake) = alone(nth as u64);
            let before = fake.live();
            fake.fail(call, nth, code);
            let went = Cuda::open(Clock::real(), &opts()).and_then(|cuda| round_trip(&cuda));
            failed += u32::from(went.is_err());
            assert!(went.unwrap_or(true), "{call}, {nth}, {code}: wrong bytes");
            fake.check();
            // After a sticky error the driver takes nothing back; else all but what it refused.
            let takes_back = code < 700 && !["cuMemFree", "cuCtxPushCurrent"].contains(&call);
            assert!(
                !takes_back || fake.live() == before,
                "{call}, {nth}, {code}: something is left"
            );
            let _ = Fake::begin(0);
        }
        // Failures of these two calls are not reported: the memory counts as freed.
        let hides = ["cuStreamSynchronize", "cuMemFree"];
        assert!(failed > 0 || hides.contains(&call), "{call} was never made");
    }
}

#[test]
fn lost_device_fails_all_calls_without_waiting() {
    let (_turn, fake) = alone(3);
    let cuda = open();
    assert!(round_trip(&cuda).expect("it works"));
    // SAFETY: a batch without memory.
    let event = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect("an event");
    fake.fail("cuEventQuery", 1, 700);
    assert_eq!(cuda.state(event).expect_err("it is lost").status(), Status::Unavailable);
    assert_eq!(cuda.wait(event, 0).expect_err("it is lost").status(), Status::Unavailable);
    let mut ended = [Event(0); 4];
    let count = cuda.poll(&mut ended);
    assert!(ended[..count].contains(&event), "its end is reported");
    assert_eq!(cuda.allocate(1).expect_err("it is lost").status(), Status::Unavailable);
    // SAFETY: as above.
    let more = unsafe { cuda.submit(Stream(0), None, &mut []) };
    assert_eq!(more.expect_err("it is lost").status(), Status::Unavailable);
    cuda.close(0).expect("nothing is under way");
}

#[test]
fn allocation_beyond_device_memory_is_nomem() {
    let (_turn, fake) = alone(4);
    fake.set(12_040, 1, 1 << 20, false);
    let cuda = open();
    let error = cuda.allocate(2 << 20).expect_err("too much");
    assert_eq!(error.status(), Status::NoMem);
    assert!(error.to_string().contains("2097152 bytes of device memory"), "{error}");
    let memory = cuda.allocate(1 << 20).expect("all of it");
    assert_eq!(cuda.free_bytes(), Some(0));
    // SAFETY: nothing uses it; the second time it is refused.
    unsafe {
        cuda.free(&memory).expect("ours");
        assert_eq!(cuda.free(&memory).expect_err("it was freed").status(), Status::Handle);
    }
    fake.check();
}

#[test]
fn device_works_beside_engine_contexts_streams_and_graphs() {
    let (_turn, fake) = alone(5);
    let before = fake.live();
    let context = fake.context();
    let streams = [fake.stream(), fake.stream()];
    let taken = fake.live();
    let cuda =
        Cuda::open(Clock::real(), &CudaOpts { context, streams: streams.to_vec(), ..opts() })
            .expect("a device");
    assert_eq!(cuda.facts().streams, 2);
    // Some thread makes a graph: what this one does is no part of it.
    fake.set(12_040, 1, 1 << 30, true);
    assert!(round_trip(&cuda).expect("it works meanwhile"));
    // The stream is being captured into a graph: each launch of the graph would repeat the copies.
    fake.capture(streams[0], true);
    // SAFETY: a batch without memory.
    let refused = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect_err("a graph");
    assert_eq!(refused.status(), Status::State);
    fake.capture(streams[0], false);
    // SAFETY: as above.
    let event = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect("no graph any more");
    cuda.wait(event, 0).expect("completes");
    assert_eq!(cuda.state(event).expect("known"), State::Done);
    drop(cuda);
    assert_eq!(fake.live(), taken, "what is the engine's stays, and nothing else");
    streams.into_iter().for_each(|stream| fake.end_stream(stream));
    while fake.live() > before {
        fake.give_context_back();
    }
    fake.check();
}

#[test]
fn wait_times_out_while_the_event_is_pending() {
    let (_turn, fake) = alone(6);
    let context = fake.context();
    let stream = fake.stream();
    let cuda = Cuda::open(Clock::real(), &CudaOpts { context, streams: vec![stream], ..opts() })
        .expect("a device");
    // SAFETY: a batch without memory.
    let event = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect("an event");
    // Work of the fake proceeds only when it is queried, and its queries fail.
    for _ in 0..16 {
        fake.fail("cuEventQuery", 1, 600);
    }
    let clock = Clock::real();
    let error = cuda.wait(event, clock.now_ns() + 20_000).expect_err("too early");
    assert_eq!(error.status(), Status::Timeout);
    cuda.wait(event, 0).expect("completes");
    drop(cuda);
    fake.check();
    let _ = Fake::begin(0);
}

/// The driver never reports progress: the wait ends with an error that says so.
#[test]
fn wait_gives_up_a_driver_that_never_answers() {
    for (calls, with_deadline) in [
        (&["cuEventQuery", "cuEventSynchronize"][..], false),
        (&["cuEventQuery"][..], true),
        (&["cuCtxPushCurrent"][..], false),
    ] {
        let (_turn, fake) = alone(7);
        let cuda = open();
        // SAFETY: a batch without memory.
        let event = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect("an event");
        calls.iter().for_each(|call| fake.fail(call, -1, 1));
        let deadline_ns = Clock::real().now_ns() + 300_000_000_000;
        let error = cuda.wait(event, if with_deadline { deadline_ns } else { 0 });
        assert_eq!(error.expect_err("it cannot know").status(), Status::Unavailable);
        assert!(Clock::real().now_ns() < deadline_ns);
        let error = cuda.allocate(1).expect_err("it is lost");
        assert!(error.to_string().contains("keeps rejecting queries"), "{error}");
        cuda.close(0).expect("nothing is under way any more");
        let _ = Fake::begin(0);
        drop(cuda);
    }
}

/// One failed query is not a failure of the work.
#[test]
fn failed_event_query_is_repeated() {
    let (_turn, fake) = alone(8);
    let cuda = open();
    // SAFETY: a batch without memory.
    let event = unsafe { cuda.submit(Stream(0), None, &mut []) }.expect("an event");
    for call in ["cuEventQuery", "cuCtxPushCurrent"] {
        fake.fail(call, 1, 1);
        assert_eq!(cuda.state(event).expect("not known yet"), State::Pending);
    }
    assert_eq!(
        cuda.release(event).map_err(|error| error.status()).err().unwrap_or(Status::Busy),
        Status::Busy
    );
    cuda.wait(event, 0).expect("completes");
    fake.check();
}

/// A poll queries only the first open event of each stream.
#[test]
fn poll_queries_one_event_per_stream() {
    let (_turn, fake) = alone(9);
    let cuda = open();
    let mut open = Vec::new();
    for n in 0..4000 {
        // SAFETY: a batch without memory.
        open.push(unsafe { cuda.submit(Stream(n % 4), None, &mut []) }.expect("an event"));
    }
    // The driver says that nothing has come: one question for each stream.
    fake.fail("cuEventQuery", -1, 600);
    let mut ended = vec![Event(0); 4000];
    let before = fake.calls("cuEventQuery");
    assert_eq!(cuda.poll(&mut ended), 0);
    assert_eq!(fake.calls("cuEventQuery") - before, 4);
    let _ = Fake::begin(0);
    // The last of a stream has come, so have all before it.
    cuda.wait(open[3999], 0).expect("completes");
    let before = fake.calls("cuEventQuery");
    let of_stream = open.iter().skip(3).step_by(4);
    assert!(of_stream.clone().all(|event| cuda.state(*event).expect("known") == State::Done));
    assert_eq!(fake.calls("cuEventQuery"), before, "no query was needed");
    cuda.close(0).expect("all come");
    let mut seen: Vec<u64> = Vec::new();
    loop {
        let count = cuda.poll(&mut ended[..7]);
        seen.extend(ended[..count].iter().map(|event| event.0));
        if count == 0 {
            break;
        }
    }
    let mut all: Vec<u64> = open.iter().map(|event| event.0).collect();
    seen.sort_unstable();
    all.sort_unstable();
    assert_eq!(seen, all, "each once");
    open.iter().for_each(|event| cuda.release(*event).expect("it has ended"));
    drop(cuda);
    fake.check();
}

/// A batch fails after a part of it was submitted: its event completes when that part has ended,
/// with the error, and no thread waits for the stream meanwhile.
#[test]
fn partly_submitted_batch_ends_with_its_error() {
    let (_turn, fake) = alone(10);
    let cuda = open();
    let memory = cuda.allocate(4096).expect("memory");
    let host = Box::leak(vec![3u8; 4096].into_boxed_slice());
    let to = |at: usize| {
        let place = host.as_ptr().wrapping_add(at).cast_mut();
        Copy::bytes(place, memory.address + at as u64, 64, Direction::Scatter, Memory::Device)
    };
    let mut copies: Vec<_> = (0..4).map(|n| to(n * 64).expect("sound")).collect();
    let syncs = fake.calls("cuStreamSynchronize");
    fake.fail("cuMemcpyHtoDAsync", 3, 2);
    // SAFETY: memory that stays.
    let event = unsafe { cuda.submit(Stream(0), None, &mut copies) }.expect("it was begun");
    assert_eq!(cuda.wait(event, 0).expect_err("it failed").status(), Status::NoMem);
    assert_eq!(fake.calls("cuStreamSynchronize"), syncs);
    // Dependent batches fail too, others do not.
    // SAFETY: as above.
    unsafe {
        let after = cuda.submit(Stream(1), Some(event), &mut []);
        assert_eq!(after.expect_err("it failed").status(), Status::NoMem);
        let next = cuda.submit(Stream(0), None, &mut copies).expect("the device works");
        cuda.wait(next, 0).expect("completes");
        fake.fail("cuMemcpyHtoDAsync", 1, 2);
        let none = cuda.submit(Stream(0), None, &mut copies);
        assert_eq!(none.expect_err("nothing was begun").status(), Status::NoMem);
    }
    drop(cuda);
    fake.check();
}

#[test]
fn ordinals_open_separate_devices() {
    let (_turn, fake) = alone(11);
    fake.set(12_040, 3, 1 << 30, false);
    let before = fake.live();
    let found = probe(Some(&fake_cuda::library())).expect("some");
    let names: Vec<_> = found.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["fake 0", "fake 1", "fake 2"]);
    let open = |ordinal| Cuda::open(Clock::real(), &CudaOpts { ordinal, ..opts() });
    let (first, last) = (open(0).expect("a device"), open(2).expect("a device"));
    assert_eq!(last.describe().name, "fake 2");
    assert!(round_trip(&first).expect("it works") && round_trip(&last).expect("it works"));
    let memory = first.allocate(4096).expect("memory");
    let host = Box::leak(vec![0u8; 64].into_boxed_slice()).as_mut_ptr();
    let copy = || Copy::bytes(host, memory.address, 64, Direction::Gather, Memory::Device);
    // SAFETY: memory that stays; the other device's is refused.
    unsafe {
        let strange = last.submit(Stream(0), None, &mut [copy().expect("sound")]);
        let error = strange.expect_err("not its memory");
        assert!(error.to_string().contains("is on device 0, this is device 2"), "{error}");
        assert_eq!(last.free(&memory).expect_err("not its memory").status(), Status::Handle);
        first.free(&memory).expect("its own");
    }
    assert_eq!(open(3).err().expect("none").status(), Status::Unavailable);
    drop((first, last));
    assert_eq!(fake.live(), before);
    fake.check();
}

/// Allocations are parts of the engine's memory, which the device does not free.
#[test]
fn allocations_come_from_the_engines_memory() {
    let (_turn, fake) = alone(12);
    fake.set(12_040, 2, 1 << 30, false);
    let before = fake.live();
    let open = |ordinal| Cuda::open(Clock::real(), &CudaOpts { ordinal, ..opts() });
    let (engine, other) = (open(0).expect("a device"), open(1).expect("a device"));
    let (mine, strange) =
        (engine.allocate(1 << 20).expect("memory"), other.allocate(4096).expect("memory"));
    let within = |arena| Cuda::open(Clock::real(), &CudaOpts { arena, ..opts() });
    for arena in [
        (strange.address, 4096),
        (mine.address, (1 << 20) + 1),
        (mine.address, 0),
        (0, 4096),
        (&raw const fake as u64, 4096),
        (u64::MAX - 4096, 4096),
    ] {
        let error = within(arena).err().expect("not memory of device 0's");
        assert_eq!(error.status(), Status::Invalid, "{arena:?}: {error}");
    }
    let cuda = within((mine.address, mine.bytes)).expect("a device");
    assert!(round_trip(&cuda).expect("it works"));
    assert_eq!(cuda.free_bytes(), Some(1 << 20));
    let asked = fake.live();
    let half = cuda.allocate(1 << 19).expect("a half");
    assert_eq!(fake.live(), asked, "the driver was asked");
    let end = mine.address + mine.bytes;
    assert!((mine.address..end).contains(&half.address) && half.address + half.bytes <= end);
    assert_eq!(cuda.allocate((1 << 19) + 1).expect_err("no more").status(), Status::NoMem);
    // SAFETY: nothing uses it.
    unsafe {
        cuda.free(&half).expect("its own");
        assert_eq!(cuda.free(&half).expect_err("not twice").status(), Status::Handle);
    }
    let _kept = cuda.allocate(1 << 20).expect("all of it");
    drop(cuda);
    assert!(round_trip(&engine).expect("the engine works"));
    // SAFETY: nothing uses them.
    unsafe {
        engine.free(&mine).expect("still the engine's");
        other.free(&strange).expect("its own");
    }
    drop((engine, other));
    assert_eq!(fake.live(), before);
    fake.check();
}
