//! A device whose driver is slow to allocate and to free memory: no other call waits for it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kvtier::device::simulated::SimulatedOpts;

use kvtier_testkit::fixtures::device_hooks::{Hooked, Hooks};
use kvtier_testkit::fixtures::stream_rig::{Files, Rig, dense, device, runtime, soon, with_device};

const PLENTY: u64 = 1 << 30;
/// Longer than any call here that does not wait for the driver, however slow the machine is. The
/// driver is held up for twice as long: a call that waits for it does not end before.
const LONG: Duration = Duration::from_secs(120);

/// Holds up calls of `allocate` and `free`.
struct Slow {
    /// Whether calls are held up, and how many are.
    held: Mutex<(bool, u32)>,
    changed: Condvar,
}

impl Slow {
    fn set_held(&self, holds: bool) {
        self.held.lock().expect("no panic").0 = holds;
        self.changed.notify_all();
    }

    /// Waits until a call is held up.
    fn has_one(&self) -> bool {
        let held = self.held.lock().expect("no panic");
        let waited = self.changed.wait_timeout_while(held, LONG, |held| held.1 == 0);
        !waited.expect("no panic").1.timed_out()
    }

    fn pass(&self) {
        let mut held = self.held.lock().expect("no panic");
        held.1 += 1;
        self.changed.notify_all();
        let waited = self.changed.wait_timeout_while(held, 2 * LONG, |held| held.0);
        waited.expect("no panic").0.1 -= 1;
    }
}

impl Hooks for Slow {
    fn before_memory(&self) {
        self.pass();
    }
}

/// Whether the streamer answers while the driver is held up.
fn answers(rig: &Rig, slow: &Slow) -> bool {
    assert!(slow.has_one(), "the driver was never asked");
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            rig.streamer.progress();
            sender.send(()).ok(); // the receiver may have timed out
        });
        let answered = receiver.recv_timeout(LONG).is_ok();
        slow.set_held(false);
        answered
    })
}

#[test]
fn calls_do_not_wait_for_slow_driver_allocation() {
    let inner = device(SimulatedOpts::default());
    let hooks = Slow { held: Mutex::new((false, 0)), changed: Condvar::new() };
    let slow = Arc::new(Hooked { inner: inner.clone(), hooks });
    let mut opts = with_device(inner.clone(), PLENTY, 0);
    opts.device = Some(slow.clone());
    opts.plan_options.shrinks = true;
    let files = Files::new("slow", &dense(4));
    let real = files.real();
    let rig = Rig::open_on(runtime(""), real, files, opts).expect("a streamer");
    rig.streamer.load(soon()).expect("residents");
    let before = inner.allocated_bytes();
    let least = rig.streamer.plan().floor(&rig.files.units).device_bytes;
    slow.set_held(true);
    std::thread::scope(|scope| {
        scope.spawn(|| rig.streamer.rebalance(None, Some(least), None).expect("a plan"));
        assert!(answers(&rig, &slow));
    });
    rig.streamer.load(soon()).expect("those who stay");
    assert_eq!(inner.allocated_bytes(), rig.streamer.plan().device_bytes);
    assert!(inner.allocated_bytes() < before);
    // Nor for the driver to give some.
    slow.set_held(true);
    std::thread::scope(|scope| {
        scope.spawn(|| rig.streamer.rebalance(None, Some(PLENTY), None).expect("a plan"));
        assert!(answers(&rig, &slow));
    });
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(inner.allocated_bytes(), before);
    // And when it closes.
    slow.set_held(true);
    std::thread::scope(|scope| {
        scope.spawn(|| rig.streamer.close(soon()).expect("it closes"));
        assert!(answers(&rig, &slow));
    });
    assert_eq!(inner.allocated_bytes(), 0);
}
