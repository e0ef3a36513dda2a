//! The CUDA device over a driver without a device.

use std::sync::atomic::{AtomicBool, Ordering};

use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts};
use kvtier::device::{Copy, Device, Direction, Event, Memory, State, Stream};

use kvtier_testkit::fixtures::fake_cuda::{Fake, alone, library};

const PAGE: usize = 4096;
/// Longest wait of these tests.
const LONG_NS: u64 = 300_000_000_000;

fn opts() -> CudaOpts {
    CudaOpts { library: Some(library()), ..CudaOpts::default() }
}

fn open(clock: Clock, choice: CopyMethodChoice) -> Cuda {
    Cuda::open(clock, &CudaOpts { choice, ..opts() }).expect("a device")
}

/// Whole pages that stay for ever: work under way may use them.
fn pages(count: usize, content: u8) -> *mut u8 {
    let all = Box::leak(vec![content; (count + 1) * PAGE].into_boxed_slice());
    let skip = all.as_ptr().align_offset(PAGE);
    all[skip..].as_mut_ptr()
}

fn host(at: *mut u8) -> u64 {
    at.expose_provenance() as u64
}

fn pointer(at: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}

fn content(at: *mut u8, bytes: usize) -> Vec<u8> {
    // SAFETY: memory of `pages`, which nothing uses any more.
    unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec()
}

fn submit(cuda: &Cuda, after: Option<Event>, copies: &mut [Copy<'_>]) -> Result<Event> {
    // SAFETY: memory that stays.
    unsafe { cuda.submit(Stream(0), after, copies) }
}

/// An engine has registered parts of a range. With a gap nothing counts as registered. Without a
/// gap all does, but not for kernels, which may not reach each part.
#[test]
fn memory_registered_in_parts_by_the_engine() {
    let call = |means| match means {
        CopyMethod::Kernel => "cuLaunchKernel",
        _ => "cuMemcpyBatchAsync",
    };
    for (means, has_hole) in [CopyMethod::Kernel, CopyMethod::Batch]
        .into_iter()
        .flat_map(|means| [(means, true), (means, false)])
    {
        let (_turn, fake) = alone(1);
        fake.set(12_080, 1, 1 << 30, false);
        let context = fake.own_context(0);
        let cuda = open(Clock::real(), CopyMethodChoice::Fixed(means));
        let at = pages(4, 5);
        let page = |n: usize| at.wrapping_add(n * PAGE);
        let parts: &[usize] = if has_hole { &[0, 3] } else { &[0, 1, 2, 3] };
        parts.iter().for_each(|n| fake.register(context, page(*n), PAGE));
        // SAFETY: memory that stays.
        unsafe { cuda.register_host(at, 4 * PAGE as u64) }.expect("it is no failure");
        let slow = if has_hole { 4 * PAGE as u64 } else { 0 };
        assert_eq!(cuda.describe().pageable_bytes, slow, "{means}");
        let memory = cuda.allocate(PAGE as u64).expect("memory");
        let to = |n: usize| {
            let from = page(2).wrapping_add(n * 1024);
            let there = memory.address + ((n + 2) % 4 * 1024) as u64;
            Copy::bytes(from, there, 1024, Direction::Scatter, Memory::Device).expect("sound")
        };
        let mut copies: Vec<_> = (0..4).map(to).collect();
        let before = fake.calls(call(means));
        let event = submit(&cuda, None, &mut copies).expect("taken");
        cuda.wait(event, 0).expect("completes");
        let goes = i64::from(means == CopyMethod::Batch && !has_hole);
        assert_eq!(fake.calls(call(means)) - before, goes, "{means}, a hole: {has_hole}");
        drop(cuda);
        parts.iter().for_each(|n| fake.unregister(context, page(*n)));
        fake.check();
    }
}

/// The driver blocks in some copies until their dependencies have completed. The device submits
/// them only then, so other calls proceed.
#[test]
fn queries_do_not_wait_for_a_blocked_copy() {
    let kinds = ["cuMemcpyAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"];
    for (kind, pinned) in kinds.into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let (_turn, fake) = alone(2);
        let cuda = open(Clock::real(), CopyMethodChoice::default());
        let context = fake.own_context(0);
        let (gate, barrier, ready) =
            (fake.stream_in(context), fake.event(context), fake.event(context));
        fake.hold_back(barrier, true);
        fake.stand(context, gate, barrier);
        fake.record(context, ready, gate);
        // SAFETY: an event that was recorded.
        let before = unsafe { cuda.import_event(ready) }.expect("an event");
        let memory = cuda.allocate(PAGE as u64).expect("memory");
        let (from, to) = (pages(1, 7), pages(1, 9));
        if pinned {
            for at in [from, to] {
                // SAFETY: memory that stays.
                unsafe { cuda.register_host(at, PAGE as u64) }.expect("registered");
            }
        }
        let (bytes, from, to) = (PAGE as u64, host(from), host(to));
        let copy = || match kind {
            "cuMemcpyAsync" => {
                Copy::bytes(pointer(from), to, bytes, Direction::Scatter, Memory::Host)
            }
            "cuMemcpyHtoDAsync" => Copy::bytes(
                pointer(from),
                memory.address,
                bytes,
                Direction::Scatter,
                Memory::Device,
            ),
            _ => Copy::bytes(pointer(to), memory.address, bytes, Direction::Gather, Memory::Device),
        };
        let stands = !pinned || kind == "cuMemcpyAsync";
        let (waits, copies) = (fake.calls("cuStreamWaitEvent"), fake.calls(kind));
        let has_begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let begun = submit(&cuda, Some(before), &mut [copy().expect("sound")]);
                has_begun.store(true, Ordering::SeqCst);
                begun
            });
            let end_ns = Clock::real().now_ns() + LONG_NS;
            while fake.calls("cuStreamWaitEvent") == waits {
                assert!(Clock::real().now_ns() < end_ns, "{kind}: it is not put behind the event");
            }
            // A thread that was enqueueing work has finished when this call returns.
            let state = cuda.state(before).expect("known");
            assert_eq!((state, cuda.poll(&mut [Event(0); 4])), (State::Pending, 0));
            assert_eq!(fake.calls(kind) - copies, i64::from(!stands), "{kind}, {pinned}");
            assert!(!stands || !has_begun.load(Ordering::SeqCst), "{kind}, {pinned}");
            fake.hold_back(barrier, false);
            let event = other.join().expect("no panic").expect("taken");
            cuda.wait(event, 0).expect("completes");
        });
        assert_eq!(fake.calls(kind) - copies, 1, "{kind}, {pinned}");
        if kind == "cuMemcpyAsync" {
            assert_eq!(content(pointer(to), PAGE), [7; PAGE]);
        }
        drop(cuda);
        fake.check();
        let _ = Fake::begin(0);
    }
}

/// The dependencies include work of the engine on its streams.
#[test]
fn blocked_copy_waits_for_engine_streams() {
    let (_turn, fake) = alone(3);
    let context = fake.context();
    let (stream, barrier) = (fake.stream(), fake.event(context));
    let cuda = Cuda::open(Clock::real(), &CudaOpts { context, streams: vec![stream], ..opts() })
        .expect("a device");
    fake.hold_back(barrier, true);
    fake.stand(context, stream, barrier);
    let (from, to) = (pages(1, 7), pages(1, 9));
    let (here, there) = (host(from), host(to));
    let (marks, copies) = (fake.calls("cuEventRecord"), fake.calls("cuMemcpyAsync"));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let copy =
                Copy::bytes(pointer(here), there, PAGE as u64, Direction::Scatter, Memory::Host);
            submit(&cuda, None, &mut [copy.expect("sound")])
        });
        let end_ns = Clock::real().now_ns() + LONG_NS;
        while fake.calls("cuEventRecord") == marks {
            assert!(Clock::real().now_ns() < end_ns, "nothing is put on the stream");
        }
        assert_eq!(cuda.poll(&mut [Event(0); 4]), 0);
        assert_eq!(fake.calls("cuMemcpyAsync"), copies, "the engine's work is not done");
        fake.hold_back(barrier, false);
        let event = other.join().expect("no panic").expect("taken");
        cuda.wait(event, 0).expect("completes");
    });
    assert_eq!(content(to, PAGE), [7; PAGE]);
    drop(cuda);
    fake.check();
    let _ = Fake::begin(0);
}

#[test]
fn zero_bytes_cannot_be_allocated() {
    let (_turn, fake) = alone(4);
    let engine = open(Clock::real(), CopyMethodChoice::default());
    let mine = engine.allocate(1 << 20).expect("memory");
    let arena = (mine.address, mine.bytes);
    let within = Cuda::open(Clock::real(), &CudaOpts { arena, ..opts() }).expect("a device");
    for cuda in [&engine, &within] {
        let asked = (fake.calls("cuMemAlloc"), cuda.allocate(0));
        assert_eq!(asked.1.expect_err("nothing").status(), Status::Invalid);
        assert_eq!(fake.calls("cuMemAlloc"), asked.0);
    }
    drop((within, engine));
    fake.check();
}

/// A free on a lost device, or one that the driver rejects, ends the ownership: the caller need
/// not repeat it.
#[test]
fn memory_is_freed_once_even_if_the_driver_fails() {
    for is_lost in [true, false] {
        let (_turn, fake) = alone(5);
        let cuda = open(Clock::real(), CopyMethodChoice::default());
        let memory = cuda.allocate(PAGE as u64).expect("memory");
        let event = submit(&cuda, None, &mut []).expect("an event");
        if is_lost {
            fake.fail("cuEventQuery", 1, 700);
            assert_eq!(cuda.state(event).expect_err("lost").status(), Status::Unavailable);
        } else {
            fake.fail("cuMemFree", 1, 1);
        }
        // SAFETY: nothing uses it; the second time it is refused.
        unsafe {
            cuda.free(&memory).expect("it is not the caller's to keep");
            assert_eq!(cuda.free(&memory).expect_err("it was freed").status(), Status::Handle);
        }
        drop(cuda);
        let _ = Fake::begin(0);
    }
}

/// Any number of queries without an answer for a moment is not a device loss.
#[test]
fn temporary_driver_silence_is_no_device_loss() {
    let (_turn, fake) = alone(6);
    let clock = Clock::manual(1);
    let cuda = open(clock.clone(), CopyMethodChoice::default());
    let event = submit(&cuda, None, &mut []).expect("an event");
    fake.fail("cuEventQuery", -1, 1);
    for _ in 0..1000 {
        assert_eq!(cuda.state(event).expect("not known"), State::Pending);
    }
    clock.advance(99_000_000);
    assert_eq!(cuda.state(event).expect("not known"), State::Pending);
    clock.advance(1_000_000);
    assert_eq!(cuda.state(event).expect_err("for so long").status(), Status::Unavailable);
    fake.no_more_failures();
    drop(cuda);
    let _ = Fake::begin(0);
}
