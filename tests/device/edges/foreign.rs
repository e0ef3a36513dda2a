//! Devices that an engine implements, and simulated devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvtier::base::clock::Clock;
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::call::Call;
use kvtier::device::foreign::{Engine, Foreign, Rows};
use kvtier::device::host::Host;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, Direction, Event, Facts, State, Stream};
use kvtier::meta::view::View;

/// An engine whose events complete on demand, and whose device can be lost.
#[derive(Default)]
struct ScriptedEngine {
    last: AtomicU64,
    has_come: AtomicBool,
    is_gone: AtomicBool,
    /// Calls that are none of release and free.
    asked: AtomicU64,
}

impl ScriptedEngine {
    fn ask(&self) -> Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.is_gone.load(Ordering::SeqCst) {
            true => Err(Error::new(Status::Unavailable, "it has gone")),
            false => Ok(()),
        }
    }
}

impl Engine for ScriptedEngine {
    fn facts(&self) -> Facts {
        Facts {
            name: "told",
            asynchronous: true,
            sums: false,
            reaches_device: false,
            wants_pinned: false,
            streams: 1,
            kernels: 0,
        }
    }

    fn submit(&self, _: u32, _: u64, _: &[Rows]) -> Result<u64> {
        self.ask()?;
        Ok(self.last.fetch_add(1, Ordering::SeqCst) + 1)
    }

    /// It does not know of its end.
    fn query(&self, _: u64) -> Result<bool> {
        Ok(self.has_come.load(Ordering::SeqCst))
    }

    fn wait(&self, _: u64, _: u64) -> Option<Result<()>> {
        Some(self.ask())
    }

    fn release(&self, _: u64) {}

    fn allocate(&self, _: u64) -> Result<u64> {
        Err(Status::Unsupported.into())
    }

    fn free(&self, _: u64, _: u64) {}

    fn free_bytes(&self) -> Option<u64> {
        self.ask().ok().map(|()| 77)
    }

    fn register_host(&self, _: u64, _: u64) -> Result<()> {
        self.ask()
    }

    fn unregister_host(&self, _: u64) -> Result<()> {
        self.ask()
    }

    fn import_event(&self, _: u64) -> Result<u64> {
        Err(Status::Unsupported.into())
    }

    fn stream_wait_event(&self, _: u64, _: u64) -> Result<()> {
        self.ask()
    }

    fn create_user_event(&self) -> Result<u64> {
        Err(Status::Unsupported.into())
    }

    fn signal_event(&self, _: u64) -> Result<()> {
        Err(Status::Unsupported.into())
    }

    fn launch(&self, _: u32, _: u64, _: &[Call]) -> Result<u64> {
        Err(Status::Unsupported.into())
    }
}

fn open() -> (Foreign, Arc<ScriptedEngine>) {
    let engine = Arc::new(ScriptedEngine::default());
    (Foreign::new(Clock::real(), engine.clone()).expect("sound"), engine)
}

fn mark(device: &Foreign) -> Result<Event> {
    // SAFETY: a batch without memory.
    unsafe { device.submit(Stream(0), None, &mut []) }
}

#[test]
fn one_poll_returns_all_ended_events() {
    let (device, engine) = open();
    let all: Vec<Event> = (0..5).map(|_| mark(&device).expect("taken")).collect();
    engine.has_come.store(true, Ordering::SeqCst);
    let mut ended = [Event(0); 16];
    let count = device.poll(&mut ended);
    assert_eq!(ended[..count], all[..]);
}

/// The engine reports from one callback that its device is lost: all pending work fails,
/// and no further call reaches the engine.
fn gone(says: impl FnOnce(&Foreign, Event)) {
    let (device, engine) = open();
    let event = mark(&device).expect("taken");
    engine.is_gone.store(true, Ordering::SeqCst);
    says(&device, event);
    let asked = engine.asked.load(Ordering::SeqCst);
    assert_eq!(device.state(event).expect_err("lost").status(), Status::Unavailable);
    assert_eq!(mark(&device).expect_err("lost").status(), Status::Unavailable);
    let place = std::ptr::dangling_mut::<u8>();
    // SAFETY: the engine does not look at it, and is not asked.
    unsafe {
        assert_eq!(device.register_host(place, 1).expect_err("lost").status(), Status::Unavailable);
        assert_eq!(device.unregister_host(place).expect_err("lost").status(), Status::Unavailable);
    }
    assert_eq!(device.free_bytes(), None);
    assert_eq!(engine.asked.load(Ordering::SeqCst), asked, "it was asked again");
    device.close(0).expect("nothing is under way");
}

#[test]
fn any_callback_may_report_a_lost_device() {
    let unavailable =
        |said: Result<()>| assert_eq!(said.expect_err("lost").status(), Status::Unavailable);
    let place = std::ptr::dangling_mut::<u8>();
    // With a deadline, so that a missed report fails the test.
    gone(|device, event| unavailable(device.wait(event, Clock::real().now_ns() + 300_000_000_000)));
    // SAFETY: the engine does not look at it.
    gone(|device, _| unavailable(unsafe { device.register_host(place, 1) }));
    // SAFETY: as above.
    gone(|device, _| unavailable(unsafe { device.unregister_host(place) }));
    // SAFETY: as above.
    gone(|device, event| unavailable(unsafe { device.stream_wait_event(3, event) }));
}

#[test]
fn overflowing_allocation_is_rejected_and_not_counted() {
    let device = Host::default();
    let first = device.allocate(4096).expect("memory");
    assert_eq!(device.allocate(u64::MAX).expect_err("too much").status(), Status::NoMem);
    // SAFETY: nothing uses it.
    unsafe { device.free(&first) }.expect("its own");
}

#[test]
fn simulated_latency_may_be_infinite() {
    let opts = SimulatedOpts { latency_ns: u64::MAX, jitter_percent: 200, ..Default::default() };
    let device = Simulated::new(Clock::manual(5), opts).expect("sound");
    let (from, to) = (Box::leak(Box::new([1u8; 8])), Box::leak(Box::new([2u8; 8])));
    let view = View::canonical(from.as_mut_ptr().expose_provenance() as u64, 1, 8);
    let copy = Copy::new(&view, 0, 1, to.as_mut_ptr(), Direction::Gather).expect("sound");
    // SAFETY: memory that stays.
    let event = unsafe { device.submit(Stream(0), None, &mut [copy]) }.expect("taken");
    assert_eq!(device.state(event).expect("known"), State::Pending);
}
