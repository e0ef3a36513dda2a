//! The CUDA device beside an engine with its own contexts, streams, events and memory, over the
//! fake driver: what is imported, what is rejected, and that nothing else is touched.

use kvtier_testkit::fixtures::fake_cuda;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, Direction, Event, MAX_COPIES, Memory, State, Stream};
use kvtier::meta::view::View;

fn opts() -> CudaOpts {
    CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() }
}

fn open(opts: &CudaOpts) -> Cuda {
    Cuda::open(Clock::real(), opts).expect("a device")
}

fn refused<T>(result: Result<T>, status: Status, word: &str) -> Error {
    let error = result.err().expect("it is refused");
    assert!(error.status() == status && error.to_string().contains(word), "{error}");
    error
}

/// Bytes that stay where they are, for as long as the process does: work under way may use them.
fn bytes(len: usize, seed: u8) -> &'static mut [u8] {
    Box::leak((0..len).map(|n| (n % 251) as u8 ^ seed).collect::<Box<[u8]>>())
}

fn submit(
    device: &Cuda,
    stream: u32,
    after: Option<Event>,
    copies: &mut [Copy<'_>],
) -> Result<Event> {
    // SAFETY: memory that stays, or addresses that are refused.
    unsafe { device.submit(Stream(stream), after, copies) }
}

/// A copy of `bytes` between addresses, each valid where it says.
fn copy(from: (u64, Memory), to: (u64, Memory), bytes: u64) -> Copy<'static> {
    let plane = std::ptr::with_exposed_provenance_mut(to.0 as usize);
    let view = View::canonical(from.0, 1, bytes);
    let copy = Copy::new(&view, 0, 1, plane, Direction::Gather).expect("sound");
    Copy { memory: from.1, plane_memory: to.1, ..copy }
}

fn host(bytes: &mut [u8]) -> (u64, Memory) {
    (bytes.as_mut_ptr().expose_provenance() as u64, Memory::Host)
}

#[test]
fn default_stream_and_foreign_contexts_are_rejected() {
    let (_turn, fake) = alone(1);
    let before = fake.live();
    let (context, other) = (fake.context(), fake.own_context(0));
    let (own, strange) = (fake.stream_in(context), fake.stream_in(other));
    let taken = fake.live();
    let with = |context, streams: &[u64]| {
        Cuda::open(Clock::real(), &CudaOpts { context, streams: streams.to_vec(), ..opts() })
    };
    for stream in [0, 1, 2] {
        refused(with(context, &[own, stream]), Status::Invalid, "default stream");
    }
    refused(with(context, &[own, strange]), Status::Invalid, "another context");
    refused(with(0, &[strange]), Status::Invalid, "another context");
    let cuda = with(context, &[own]).expect("its own stream");
    // The measurement at the start runs beside the engine's streams.
    fake.capture(own, true);
    let choice = CopyMethodChoice::Measured;
    let measured = open(&CudaOpts { context, streams: vec![own], choice, ..opts() }).describe();
    assert!(measured.not_measured.is_none_or(|why| why.contains("deadline")));
    fake.capture(own, false);
    let event = submit(&cuda, 0, None, &mut []).expect("an event");
    // SAFETY: a stream of the engine's, or what is refused.
    unsafe {
        for stream in [0, 1, 2] {
            refused(cuda.stream_wait_event(stream, event), Status::Invalid, "default stream");
        }
        refused(cuda.stream_wait_event(strange, event), Status::Invalid, "another context");
        fake.capture(own, true);
        refused(cuda.stream_wait_event(own, event), Status::State, "graph");
        fake.capture(own, false);
        refused(cuda.stream_wait_event(own, Event(77)), Status::Handle, "not of this device");
    }
    cuda.close(0).expect("it ends");
    drop(cuda);
    assert_eq!(fake.live(), taken, "what is the engine's stays, and nothing else");
    fake.end_stream_in(context, own);
    fake.end_stream_in(other, strange);
    while fake.live() > before {
        fake.give_context_back();
    }
    fake.check();
}

#[test]
fn planes_and_tensors_may_be_in_any_memory() {
    let (_turn, fake) = alone(2);
    for choice in
        [CopyMethodChoice::Fixed(CopyMethod::Plain), CopyMethodChoice::Fixed(CopyMethod::Batch)]
    {
        fake.set(12_080, 1, 1 << 30, false);
        let cuda = open(&CudaOpts { choice, ..opts() });
        let (rows, run, stride) = (24u64, 40u64, 104u64);
        let (first, second) = (bytes(4096, 1), bytes(4096, 2));
        let want: Vec<u8> = (0..rows)
            .flat_map(|row| first[(row * stride) as usize..][..run as usize].to_vec())
            .collect();
        let (first_room, second_room) =
            (cuda.allocate(4096).expect("memory"), cuda.allocate(4096).expect("memory"));
        let whole = |from, to| copy(from, to, 4096);
        let device = |address| (address, Memory::Device);
        let rowed = |from: (u64, Memory), to: (u64, Memory)| {
            let mut view = View::canonical(from.0, rows as u32, run);
            view.token_stride_bytes = stride;
            let plane = std::ptr::with_exposed_provenance_mut(to.0 as usize);
            let copy = Copy::new(&view, 0, rows as u32, plane, Direction::Gather).expect("sound");
            Copy { memory: from.1, plane_memory: to.1, ..copy }
        };
        // To the device, within it with rows gathered, back again, and from host to host.
        let up = submit(&cuda, 0, None, &mut [whole(host(first), device(first_room.address))]);
        let within = submit(
            &cuda,
            1,
            Some(up.expect("taken")),
            &mut [rowed(device(first_room.address), device(second_room.address))],
        );
        let back = submit(
            &cuda,
            2,
            Some(within.expect("taken")),
            &mut [copy(device(second_room.address), host(second), rows * run)],
        );
        cuda.wait(back.expect("taken"), 0).expect("completes");
        assert_eq!(&second[..want.len()], &want[..], "{choice:?}");
        let third = bytes(4096, 3);
        let across = submit(&cuda, 3, None, &mut [rowed(host(first), host(third))]).expect("taken");
        cuda.wait(across, 0).expect("completes");
        assert_eq!(&third[..want.len()], &want[..], "{choice:?}");
        let fourth = bytes(4096, 4);
        let plain = submit(&cuda, 3, None, &mut [whole(host(first), host(fourth))]).expect("taken");
        cuda.wait(plain, 0).expect("completes");
        assert_eq!(first, fourth, "{choice:?}");
    }
    fake.check();
}

#[test]
fn foreign_addresses_fail_only_their_batch() {
    let (_turn, fake) = alone(3);
    fake.set(12_040, 2, 1 << 30, false);
    let cuda = open(&opts());
    let other = fake.own_context(1);
    let strange = fake.memory(other, 4096);
    let own = fake.own_context(0);
    let engines = fake.memory(own, 4096);
    let plain = bytes(4096, 1);
    let pinned = bytes(4096, 2);
    fake.register(own, pinned.as_mut_ptr(), 4096);
    let at = host(plain);
    let device = |address| (address, Memory::Device);
    let refuse = |copies: &mut [Copy<'_>], word: &str| {
        refused(submit(&cuda, 0, None, copies), Status::Invalid, word);
    };
    refuse(&mut [copy(device(strange), at, 64)], "is on device 1");
    refuse(&mut [copy(at, device(strange), 64)], "is on device 1");
    refuse(&mut [copy(device(at.0), at, 64)], "knows no memory");
    refuse(&mut [copy(device(host(pinned).0), at, 64)], "is host memory");
    refuse(&mut [copy(device(engines + 4000), at, 97)], "knows no memory");
    refuse(&mut [copy(device(u64::MAX - 100), at, 64)], "knows no memory");
    let event = submit(&cuda, 0, None, &mut [copy(at, device(engines + 4000), 96)]);
    cuda.wait(event.expect("the engine's own"), 0).expect("the device works");
    for code in [2, 1] {
        fake.fail("cuPointerGetAttributes", 1, code);
        let asked = submit(&cuda, 0, None, &mut [copy(at, device(engines), 64)]);
        assert!(asked.is_err(), "{code}: what is not known is not tried");
    }
    let mut many: Vec<_> = (0..=MAX_COPIES).map(|_| copy(at, device(engines), 1)).collect();
    refused(submit(&cuda, 0, None, &mut many), Status::Limit, "");
    drop(cuda);
    fake.unregister(own, pinned.as_mut_ptr());
    fake.end_memory(other, strange);
    fake.end_memory(own, engines);
    fake.check();
}

#[test]
fn imported_events_block_streams_not_threads() {
    let (_turn, fake) = alone(4);
    let before = fake.live();
    let context = fake.own_context(0);
    let cuda = open(&opts());
    let (other, ready) = (fake.stream_in(context), fake.event(context));
    fake.record(context, ready, other);
    // SAFETY: an event that was recorded.
    let adopted = unsafe { cuda.import_event(ready) }.expect("an event");
    let (from, to) = (bytes(5000, 1), bytes(5000, 2));
    let copied = submit(&cuda, 0, Some(adopted), &mut [copy(host(from), host(to), 5000)]);
    cuda.wait(copied.expect("taken"), 0).expect("completes");
    assert!(fake.has_come(context, ready), "not before the engine's event");
    assert_eq!(from, to);
    cuda.wait(adopted, 0).expect("it has come");
    cuda.release(adopted).expect("it has ended");
    // Part of a graph: a stream that waits for it would be, too.
    fake.capture_event(ready, true);
    // SAFETY: as above, or what is refused.
    unsafe {
        refused(cuda.import_event(ready), Status::State, "engine's");
        refused(cuda.import_event(0), Status::Invalid, "CUevent of 0");
    }
    fake.capture_event(ready, false);
    drop(cuda);
    fake.end_event(context, ready);
    fake.end_stream_in(context, other);
    assert_eq!(fake.live(), before);
    fake.check();
}

/// Many events, of which the first is blocked: work behind the others is not delayed.
#[test]
fn late_event_delays_only_its_dependents() {
    let (_turn, fake) = alone(5);
    let cuda = open(&opts());
    let context = fake.own_context(0);
    let (gate, stream) = (fake.stream_in(context), fake.stream_in(context));
    let (opens, late) = (fake.event(context), fake.event(context));
    // `late` is behind `opens`, which is behind what is put on the gate only at the end.
    let barrier = fake.event(context);
    fake.hold_back(barrier, true);
    fake.stand(context, gate, barrier);
    fake.record(context, opens, gate);
    fake.stand(context, stream, opens);
    fake.record(context, late, stream);
    // SAFETY: events that were recorded.
    let waits = unsafe { cuda.import_event(late) }.expect("an event");
    let quick: Vec<Event> = (0..10)
        .map(|_| {
            let event = fake.event(context);
            let other = fake.stream_in(context);
            fake.record(context, event, other);
            // SAFETY: as above.
            unsafe { cuda.import_event(event) }.expect("an event")
        })
        .collect();
    for event in &quick {
        cuda.wait(*event, Clock::real().now_ns() + 300_000_000_000)
            .expect("it is not behind the late one");
    }
    assert_eq!(cuda.state(waits).expect("known"), State::Pending);
    fake.run();
    assert_eq!(cuda.state(waits).expect("known"), State::Pending);
    fake.hold_back(barrier, false);
    cuda.wait(waits, 0).expect("completes");
    fake.check();
    drop(cuda);
    let _ = Fake::begin(0);
}

#[test]
fn engine_stream_resumes_after_the_batch() {
    let (_turn, fake) = alone(6);
    let cuda = open(&opts());
    let context = fake.context();
    let (stream, after) = (fake.stream_in(context), fake.event(context));
    let (from, to) = (bytes(9000, 1), bytes(9000, 2));
    let memory = cuda.allocate(9000).expect("memory");
    let there = (memory.address, Memory::Device);
    let up = submit(&cuda, 0, None, &mut [copy(host(from), there, 9000)]).expect("taken");
    let down = submit(&cuda, 1, Some(up), &mut [copy(there, host(to), 9000)]).expect("taken");
    // SAFETY: a stream of the device's context.
    unsafe { cuda.stream_wait_event(stream, down) }.expect("it waits");
    fake.record(context, after, stream);
    let clock = Clock::real();
    let end_ns = clock.now_ns() + 300_000_000_000;
    while !fake.has_come(context, after) {
        assert!(clock.now_ns() < end_ns, "the engine's stream stands still");
    }
    assert_eq!(from, to, "the engine's stream waits for the copy");
    cuda.wait(down, 0).expect("the copy completes");
    // SAFETY: as above.
    unsafe { cuda.stream_wait_event(stream, down) }.expect("there is nothing to wait for");
    fake.end_event(context, after);
    fake.end_stream_in(context, stream);
    drop(cuda);
    fake.give_context_back();
    fake.check();
}

/// A copy between an event of the engine's and a stream of its that waits for it; whether it was
/// there in time. What the engine has stays its own.
fn beside(fake: &Fake, cuda: &Cuda, context: u64, stream: u64, events: [u64; 2]) -> Result<bool> {
    let [ready, after] = events;
    let (from, to) = (bytes(3000, 1), bytes(3000, 2));
    // SAFETY: the engine's own events and streams.
    unsafe {
        let adopted = cuda.import_event(ready)?;
        let copied = submit(cuda, 1, Some(adopted), &mut [copy(host(from), host(to), 3000)]);
        let held = copied.as_ref().map_or(Ok(()), |event| cuda.stream_wait_event(stream, *event));
        let ended = copied.and_then(|event| cuda.wait(event, 0));
        cuda.wait(adopted, 0).and(ended).and(held)?;
    }
    fake.no_more_failures();
    fake.record(context, after, stream);
    fake.run();
    Ok(fake.has_come(context, after) && from == to)
}

/// Every call for interop with an engine fails once, early and late: nothing hangs or leaks, and
/// what is reported as done is done.
#[test]
fn every_interop_call_may_fail_once() {
    let calls = [
        "cuStreamGetCtx",
        "cuStreamIsCapturing",
        "cuStreamWaitEvent",
        "cuStreamCreate",
        "cuEventQuery",
        "cuEventRecord",
        "cuEventCreate",
        "cuEventSynchronize",
        "cuCtxPushCurrent",
    ];
    for call in calls {
        let mut failed = 0;
        for (nth, code) in (1..9).flat_map(|nth| [1, 2, 400].map(|code| (nth, code))) {
            let (_turn, fake) = alone(nth as u64);
            let before = fake.live();
            let context = fake.context();
            let own = [fake.stream_in(context), fake.stream_in(context), fake.stream_in(context)];
            let events = [fake.event(context), fake.event(context)];
            let taken = fake.live();
            let streams = own[..2].to_vec();
            let opened = Cuda::open(Clock::real(), &CudaOpts { context, streams, ..opts() });
            let cuda = opened.expect("a device");
            fake.record(context, events[0], own[2]);
            fake.fail(call, nth, code);
            let went = beside(&fake, &cuda, context, own[2], events);
            failed += u32::from(went.is_err());
            assert!(went.unwrap_or(true), "{call}, {nth}, {code}: not in time");
            fake.no_more_failures();
            cuda.close(Clock::real().now_ns() + 300_000_000_000).expect("all ends");
            drop(cuda);
            assert_eq!(fake.live(), taken, "{call}, {nth}, {code}: something is left");
            fake.run();
            events.into_iter().for_each(|event| fake.end_event(context, event));
            own.into_iter().for_each(|stream| fake.end_stream_in(context, stream));
            while fake.live() > before {
                fake.give_context_back();
            }
            fake.check();
            let _ = Fake::begin(0);
        }
        let hides = ["cuEventQuery", "cuEventSynchronize", "cuCtxPushCurrent", "cuEventRecord"];
        assert!(failed > 0 || hides.contains(&call), "{call}: no failure was reported");
    }
}
