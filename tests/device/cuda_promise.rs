//! User events of the CUDA device, over the fake driver: streams and batches wait for them, numbers
//! are reused safely, and no stream is blocked after the device is lost.

use kvtier_testkit::fixtures::fake_cuda;
use kvtier_testkit::fixtures::store as support;

use std::sync::Arc;

use fake_cuda::{Fake, alone};
use kvtier::base::clock::Clock;
use kvtier::base::op::RELEASED;
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::{Cuda, CudaOpts};
use kvtier::device::op_wait::stream_wait_op;
use kvtier::device::{Copy, Device, Direction, Event, MAX_LEASED_STREAMS, Memory, State, Stream};
use kvtier::store::handle::Store;
use kvtier::store::state::CellRange;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{Engine, Shape};

/// Longer than anything takes.
const LONG_NS: u64 = 300_000_000_000;

fn opts() -> CudaOpts {
    CudaOpts { library: Some(fake_cuda::library()), ..CudaOpts::default() }
}

fn open() -> Cuda {
    Cuda::open(Clock::real(), &opts()).expect("a device")
}

fn soon() -> u64 {
    Clock::real().now_ns() + LONG_NS
}

fn refused<T>(result: Result<T>, status: Status) {
    assert_eq!(result.err().expect("it is refused").status(), status);
}

/// Bytes that stay where they are, for as long as the process does.
fn bytes(seed: u8) -> &'static mut [u8] {
    Box::leak((0..3000).map(|n| (n % 251) as u8 ^ seed).collect::<Box<[u8]>>())
}

/// Puts a copy between them on a stream, behind an event: by way of the device's memory, since a
/// copy within the host's keeps its caller.
fn copy(cuda: &Cuda, stream: u32, after: Event, from: &mut [u8], to: &mut [u8]) -> Result<Event> {
    let bytes = from.len() as u64;
    let there = cuda.allocate(bytes)?;
    let piece = |host: *mut u8, direction| {
        Copy::bytes(host, there.address, bytes, direction, Memory::Device)
    };
    // SAFETY: memory that stays.
    unsafe {
        cuda.register_host(to.as_mut_ptr(), bytes)?;
        let up = cuda.submit(
            Stream(stream),
            None,
            &mut [piece(from.as_mut_ptr(), Direction::Scatter)?],
        )?;
        cuda.wait(up, soon())?;
        cuda.release(up)?;
        cuda.submit(Stream(stream), Some(after), &mut [piece(to.as_mut_ptr(), Direction::Gather)?])
    }
}

#[test]
fn batches_and_streams_wait_for_user_events() {
    let (_turn, fake) = alone(1);
    let cuda = open();
    let context = fake.context();
    let (stream, after) = (fake.stream_in(context), fake.event(context));
    // Numbers are used again and again: more promises than there are of them.
    for turn in 0..1500u32 {
        let promise = cuda.create_user_event().expect("one");
        refused(cuda.release(promise), Status::Busy);
        if turn % 250 == 7 {
            let (from, to) = (bytes(1), bytes(2));
            let copied = copy(&cuda, turn % 4, promise, from, to).expect("taken");
            // SAFETY: a stream of the device's context.
            unsafe { cuda.stream_wait_event(stream, promise) }.expect("it waits");
            fake.record(context, after, stream);
            fake.run();
            assert_eq!(cuda.state(copied).expect("known"), State::Pending);
            assert_eq!(cuda.state(promise).expect("known"), State::Pending);
            let late = cuda.wait(promise, Clock::real().now_ns() + 1_000_000);
            refused(late, Status::Timeout);
            assert!(!fake.has_come(context, after) && from != to);
            cuda.signal_event(promise).expect("a promise");
            cuda.wait(copied, soon()).expect("completes");
            fake.run();
            assert!(fake.has_come(context, after) && from == to);
            refused(cuda.signal_event(copied), Status::Handle);
            cuda.release(copied).expect("it has ended");
        }
        cuda.signal_event(promise).expect("once more does no harm");
        cuda.wait(promise, 0).expect("it has come");
        // SAFETY: as above.
        unsafe { cuda.stream_wait_event(stream, promise) }.expect("there is nothing to wait for");
        cuda.release(promise).expect("kept");
        refused(cuda.signal_event(promise), Status::Handle);
    }
    drop(cuda);
    fake.end_event(context, after);
    fake.end_stream_in(context, stream);
    fake.give_context_back();
    assert_eq!(fake.live(), 0);
    fake.check();
}

/// A stream reaches its wait when the number belongs to another user event: it continues.
#[test]
fn late_wait_on_a_reused_event_number_returns() {
    let (_turn, fake) = alone(2);
    let cuda = open();
    let context = fake.context();
    let (stream, gate, after) = (fake.stream_in(context), fake.event(context), fake.event(context));
    fake.hold_back(gate, true);
    fake.stand(context, stream, gate);
    let first = cuda.create_user_event().expect("one");
    // SAFETY: a stream of the device's context.
    unsafe { cuda.stream_wait_event(stream, first) }.expect("it waits");
    fake.record(context, after, stream);
    cuda.signal_event(first).expect("a promise");
    cuda.release(first).expect("kept");
    let second = cuda.create_user_event().expect("the same number");
    fake.run();
    assert!(!fake.has_come(context, after), "the gate is shut");
    fake.hold_back(gate, false);
    fake.run();
    assert!(fake.has_come(context, after), "it does not wait for the second");
    assert_eq!(cuda.state(second).expect("known"), State::Pending);
    drop(cuda);
    fake.end_event(context, after);
    fake.end_event(context, gate);
    fake.end_stream_in(context, stream);
    fake.give_context_back();
    assert_eq!(fake.live(), 0);
    fake.check();
}

#[test]
fn closing_a_device_releases_waiting_streams() {
    for is_slow in [false, true] {
        let (_turn, fake) = alone(3);
        let cuda = open();
        let context = fake.context();
        let (stream, gate, after) =
            (fake.stream_in(context), fake.event(context), fake.event(context));
        fake.hold_back(gate, true);
        fake.stand(context, stream, gate);
        let promise = cuda.create_user_event().expect("one");
        let copied = copy(&cuda, 0, promise, bytes(1), bytes(2)).expect("taken");
        // SAFETY: a stream of the device's context.
        unsafe { cuda.stream_wait_event(stream, promise) }.expect("it waits");
        fake.record(context, after, stream);
        if !is_slow {
            cuda.close(soon()).expect("all ends");
            assert_eq!(cuda.state(copied).expect("known"), State::Done);
            refused(cuda.create_user_event(), Status::Closed);
            fake.hold_back(gate, false);
            fake.run();
            assert!(fake.has_come(context, after));
        }
        drop(cuda);
        // A stream that did not come to its wait yet reads the number later: it stays.
        fake.hold_back(gate, false);
        fake.run();
        assert!(fake.has_come(context, after));
        fake.end_event(context, after);
        fake.end_event(context, gate);
        fake.end_stream_in(context, stream);
        fake.give_context_back();
        assert_eq!(fake.live(), i64::from(is_slow));
        fake.check();
        let _ = Fake::begin(0);
    }
}

#[test]
fn invalid_waits_on_user_events_are_rejected() {
    let (_turn, fake) = alone(4);
    let cuda = open();
    let context = fake.context();
    let stream = fake.stream_in(context);
    let promise = cuda.create_user_event().expect("one");
    fake.capture(stream, true);
    // SAFETY: a stream of the device's context, or what is refused.
    unsafe {
        refused(cuda.stream_wait_event(stream, promise), Status::State);
        fake.capture(stream, false);
        refused(cuda.stream_wait_event(0, promise), Status::Invalid);
        fake.fail("cuStreamWaitValue32", 1, 801);
        refused(cuda.stream_wait_event(stream, promise), Status::Unsupported);
    }
    let others: Vec<Event> =
        (1..1024).map(|_| cuda.create_user_event().expect("a number")).collect();
    refused(cuda.create_user_event(), Status::Again);
    for event in others.iter().chain([&promise]) {
        cuda.signal_event(*event).expect("a promise");
        cuda.release(*event).expect("kept");
    }
    cuda.release(
        cuda.create_user_event()
            .map(|one| cuda.signal_event(one).map(|()| one))
            .expect("one")
            .expect("kept"),
    )
    .expect("there is room again");
    drop(cuda);
    fake.end_stream_in(context, stream);
    fake.give_context_back();
    assert_eq!(fake.live(), 0);
    fake.check();
}

/// User events fail, and streams continue.
#[test]
fn lost_device_fails_user_events() {
    let (_turn, fake) = alone(5);
    let cuda = open();
    let promise = cuda.create_user_event().expect("one");
    let copied = copy(&cuda, 0, promise, bytes(1), bytes(2)).expect("taken");
    fake.fail("cuEventQuery", 1, 700);
    refused(cuda.state(copied), Status::Unavailable);
    refused(cuda.wait(promise, soon()), Status::Unavailable);
    cuda.signal_event(promise).expect("known still");
    refused(cuda.create_user_event(), Status::Unavailable);
    drop(cuda);
    let _ = Fake::begin(0);
}

const MODEL: support::Model = support::Model { layers: 3, heads: 2, run: 64, chunk: 16 };
const TOKENS: usize = 4 * MODEL.chunk;

/// Transfers begin after an event of the engine. A stream of the engine continues after transfers
/// that had not begun when it was made to wait.
#[test]
fn store_transfers_run_between_engine_kernels() {
    for by_layer in [false, true] {
        let (_turn, fake) = alone(6);
        let context = fake.context();
        let cuda = Arc::new(open());
        let store = {
            let (runtime, spec) = (support::runtime(), support::spec_of("store(host=8MiB)"));
            let device: Arc<dyn Device> = cuda.clone();
            let store = Store::open_with(runtime.core(), None, &spec, device).expect("opened");
            support::TestStore { handle: store, runtime }
        };
        let namespace = store.namespace(1, &MODEL);
        let (before, behind) = (fake.stream_in(context), fake.stream_in(context));
        let events = [(); 3].map(|()| fake.event(context));
        let [gate, ready, after] = events;
        for number in 0..6 {
            let tokens = support::document(number, TOKENS);
            let marks = support::marks_of(0, &tokens);
            let session = store.session(namespace, &tokens);
            let mut engine = Engine::new(MODEL, Shape::Heads, TOKENS);
            for kind in [TransferKind::Put, TransferKind::Get] {
                // The engine's kernels before: they end when the gate opens.
                fake.hold_back(gate, true);
                fake.stand(context, before, gate);
                fake.record(context, ready, before);
                // SAFETY: an event that was recorded.
                let event = unsafe { cuda.import_event(ready) }.expect("an event");
                let what = engine.cell_range(0, TOKENS, 0..MODEL.layers, by_layer);
                let what = CellRange { after: Some(event), ..what };
                let ops = store.submit(session, kind, Level::Ram, what).expect("taken");
                let device: Arc<dyn Device> = cuda.clone();
                for op in &ops {
                    // SAFETY: a stream of the device's context.
                    unsafe { stream_wait_op(&device, behind, op) }.expect("it waits");
                }
                fake.record(context, after, behind);
                fake.run();
                assert!(!fake.has_come(context, after) && !fake.has_come(context, ready));
                assert!(ops.iter().all(|op| op.state() & RELEASED == 0));
                if kind == TransferKind::Put {
                    engine.compute(&marks);
                } else {
                    assert!(engine.is_untouched());
                }
                fake.hold_back(gate, false);
                let end_ns = soon();
                while !fake.has_come(context, after) {
                    assert!(Clock::real().now_ns() < end_ns, "the engine's stream stands still");
                }
                // The engine's stream passed its wait, so every op was released.
                assert!(ops.iter().all(|op| op.state() & RELEASED != 0));
                for op in &ops {
                    let done = support::wait(op);
                    assert_eq!((done.status, done.tokens), (Status::Ok, TOKENS));
                    // SAFETY: as above.
                    unsafe { stream_wait_op(&device, behind, op) }.expect("nothing to do");
                }
                engine.check(&marks, 0..TOKENS, 0..MODEL.layers);
                cuda.release(event).expect("it has come");
            }
            store.close_session(session);
        }
        store.close();
        cuda.close(soon()).expect("all ends");
        drop(cuda);
        events.into_iter().for_each(|event| fake.end_event(context, event));
        for stream in [before, behind] {
            fake.end_stream_in(context, stream);
        }
        fake.give_context_back();
        assert_eq!(fake.live(), 0);
        fake.check();
    }
}

/// A lent stream has one user. Work behind a late event on it delays no other stream.
#[test]
fn streams_are_lent_to_one_user() {
    let (_turn, fake) = alone(7);
    let cuda = open();
    let own = cuda.facts().streams;
    refused(copy_on(&cuda, own, None), Status::Invalid);
    let lent: Vec<Stream> =
        (0..MAX_LEASED_STREAMS).map(|_| cuda.lease_stream().expect("a stream")).collect();
    refused(cuda.lease_stream(), Status::Again);
    let mut numbers: Vec<u32> = lent.iter().map(|stream| stream.0).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert!(numbers.len() == MAX_LEASED_STREAMS && numbers[0] >= own);
    let promises: Vec<Event> =
        lent.iter().map(|_| cuda.create_user_event().expect("one")).collect();
    let behind: Vec<Event> = lent
        .iter()
        .zip(&promises)
        .map(|(stream, promise)| copy_on(&cuda, stream.0, Some(*promise)).expect("taken"))
        .collect();
    for at in (0..lent.len()).rev() {
        fake.run();
        assert!(behind[..=at].iter().all(|event| cuda.state(*event) == Ok(State::Pending)));
        cuda.signal_event(promises[at]).expect("a promise");
        cuda.wait(behind[at], soon()).expect("it is behind no other");
        cuda.return_stream(lent[at]);
        refused(copy_on(&cuda, lent[at].0, None), Status::Invalid);
    }
    assert!(cuda.lease_stream().is_ok());
    for event in promises.into_iter().chain(behind) {
        cuda.release(event).expect("it has come");
    }
    drop(cuda);
    assert_eq!(fake.live(), 0);
    fake.check();
}

fn copy_on(cuda: &Cuda, stream: u32, after: Option<Event>) -> Result<Event> {
    let (from, to) = (cuda.allocate(3000)?, cuda.allocate(3000)?);
    let plane = std::ptr::with_exposed_provenance_mut(to.address as usize);
    let copy = Copy::bytes(plane, from.address, 3000, Direction::Gather, Memory::Device)?;
    let copy = Copy { plane_memory: Memory::Device, ..copy };
    // SAFETY: memory that stays for as long as the device does.
    unsafe { cuda.submit(Stream(stream), after, &mut [copy]) }
}

/// A batch and an engine's stream behind a promise; whether both came in time, and not before.
fn beside(fake: &Fake, cuda: &Cuda, context: u64, stream: u64, after: u64) -> Result<bool> {
    let (from, to) = (bytes(1), bytes(2));
    let promise = cuda.create_user_event()?;
    // SAFETY: the engine's stream.
    let held = unsafe { cuda.stream_wait_event(stream, promise) };
    let copied = copy(cuda, 1, promise, from, to);
    fake.run();
    let is_premature = from == to;
    cuda.signal_event(promise)?;
    let ended = copied.and_then(|event| cuda.wait(event, soon()));
    cuda.wait(promise, soon())?;
    cuda.release(promise)?;
    held.and(ended)?;
    fake.no_more_failures();
    fake.record(context, after, stream);
    fake.run();
    Ok(!is_premature && fake.has_come(context, after) && from == to)
}

/// Every call for user events fails once, early and late.
#[test]
fn every_user_event_call_may_fail_once() {
    let calls = [
        "cuMemHostAlloc",
        "cuMemHostGetDevicePointer",
        "cuStreamWaitValue32",
        "cuStreamIsCapturing",
        "cuStreamGetCtx",
        "cuEventRecord",
        "cuEventCreate",
        "cuEventQuery",
        "cuCtxPushCurrent",
        "cuMemFreeHost",
    ];
    for call in calls {
        let mut failed = 0;
        for (nth, code) in (1..7).flat_map(|nth| [1, 2, 400].map(|code| (nth, code))) {
            let (_turn, fake) = alone(nth as u64);
            let context = fake.context();
            let (stream, after) = (fake.stream_in(context), fake.event(context));
            let taken = fake.live();
            let cuda = open();
            fake.fail(call, nth, code);
            let went = beside(&fake, &cuda, context, stream, after);
            failed += u32::from(went.is_err());
            assert!(went.unwrap_or(true), "{call}, {nth}, {code}: not in time");
            let is_planted = fake.has_failed();
            if call != "cuMemFreeHost" {
                fake.no_more_failures();
            }
            cuda.close(soon()).expect("all ends");
            fake.run();
            drop(cuda);
            fake.no_more_failures();
            // The page of numbers stays where it is not known who waits, or is not taken back.
            let may_stay = ["cuEventRecord", "cuMemFreeHost", "cuEventQuery"].contains(&call);
            let left = fake.live() - taken;
            assert!(left == 0 || may_stay && left == 1, "{call}, {nth}, {code}: {left} left");
            assert!(left == 0 || is_planted || call == "cuMemFreeHost");
            fake.run();
            fake.check();
            let _ = Fake::begin(0);
        }
        let hides = ["cuEventQuery", "cuEventRecord", "cuCtxPushCurrent", "cuMemFreeHost"];
        assert!(failed > 0 || hides.contains(&call), "{call}: no failure was reported");
    }
}

/// Host memory is registered when it is allocated, and unregistered before it is freed.
#[test]
fn cell_memory_is_registered_and_unregistered() {
    let (_turn, fake) = alone(9);
    let (register, unregister) = ("cuMemHostRegister", "cuMemHostUnregister");
    let before = (fake.calls(register), fake.calls(unregister));
    for refuses in [false, true] {
        let (runtime, spec) = (support::runtime(), support::spec_of("store(host=4MiB)"));
        let device = Arc::new(open());
        let store = Store::open_with(runtime.core(), None, &spec, device.clone()).expect("opened");
        let store = support::TestStore { handle: store, runtime };
        if refuses {
            fake.lockable(0);
        }
        let namespace = store.namespace(1, &MODEL);
        let tokens = support::document(1, TOKENS);
        let session = store.session(namespace, &tokens);
        let engine = Engine::computed(MODEL, Shape::Heads, &support::marks_of(0, &tokens));
        for kind in [TransferKind::Put, TransferKind::Get] {
            let done = store.transfer(session, kind, Level::Ram, engine.whole());
            assert_eq!(done.status, Status::Ok);
        }
        store.settle();
        let pageable = device.describe().pageable_bytes;
        assert_eq!(pageable > 0, refuses, "{pageable} bytes are not registered");
        store.close_session(session);
        store.close();
        assert_eq!(device.describe().pageable_bytes, 0, "freed memory is still counted");
    }
    let after = (fake.calls(register), fake.calls(unregister));
    assert!(after.0 > before.0 + 1 && after.1 - before.1 == after.0 - before.0 - 1, "{after:?}");
    fake.check();
}
