//! Concurrent threads: each gets the unit that it acquires, and none waits forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::stream::streamer::{AcquireOpts, Opts};

use kvtier_lab::reference::numbers::Random;
use kvtier_testkit::fixtures::stream_rig::{
    Files, Rig, dense, device, experts, on_device, patiently, soon, status, with_device, with_host,
};

/// Acquires a unit, checks it and releases it, `times` times. If all slots are
/// in use, acquire fails and the thread retries.
fn use_at_random(rig: &Rig, seed: u64, times: u32) {
    let mut random = Random::new(seed);
    let count = rig.files.units.units.len() as u32;
    let deadline = soon();
    for _ in 0..times {
        let unit = random.below(count);
        let how = AcquireOpts {
            poll: random.below(3) == 0,
            when_issued: random.below(2) == 0,
            deadline_ns: deadline,
        };
        if random.below(8) == 0 {
            rig.streamer.hint(&[unit, random.below(count)]).expect("a hint");
        }
        loop {
            match status(rig.use_unit(unit, how)) {
                Status::Ok => break,
                Status::Busy => std::thread::yield_now(),
                other => panic!("unit {unit}: {other:?}"),
            }
            assert!(rig.runtime.core().clock().now_ns() < deadline, "unit {unit} is never free");
        }
    }
}

fn together(rig: Rig, threads: u64, times: u32) -> Arc<Rig> {
    let rig = Arc::new(rig);
    let all: Vec<_> = (0..threads)
        .map(|seed| {
            let rig = rig.clone();
            std::thread::spawn(move || use_at_random(&rig, seed + 1, times))
        })
        .collect();
    all.into_iter().for_each(|thread| thread.join().expect("no panic"));
    rig
}

#[test]
fn many_threads_use_units_on_the_cpu() {
    for (percent, in_place, sizes) in [
        (30, false, dense(20)),
        (30, true, dense(20)),
        (90, false, dense(20)),
        (40, false, experts(4, 6)),
        (40, true, experts(4, 6)),
    ] {
        let name = format!("threads-{percent}-{in_place}-{}", sizes.experts);
        let files = Files::new(&name, &sizes);
        let opts = Opts { in_place, ..with_host(files.all_bytes() * percent / 100) };
        let rig = together(Rig::open(files, opts).expect("a streamer"), 4, 300);
        rig.pass(patiently()).expect("a pass");
        rig.closed();
    }
}

#[test]
fn many_threads_use_units_on_a_device() {
    for (on_it, on_host, sizes) in
        [(30, 0, dense(20)), (30, 100, dense(20)), (50, 30, experts(4, 6)), (150, 0, dense(8))]
    {
        let files = Files::new(&format!("dthreads-{on_it}-{on_host}-{}", sizes.experts), &sizes);
        let all = files.all_bytes();
        let device = device(SimulatedOpts { seed: on_it, ..SimulatedOpts::default() });
        let opts = with_device(device, all * on_it / 100, all * on_host / 100);
        let rig = together(Rig::open(files, opts).expect("a streamer"), 3, 200);
        rig.pass(patiently()).expect("a pass");
        rig.closed();
    }
}

#[test]
fn residents_move_while_threads_use_units() {
    for on_it in [false, true] {
        let files = Files::new(&format!("moving-{on_it}"), &dense(20));
        let all = files.all_bytes();
        let opts = match on_it {
            true => with_device(device(SimulatedOpts::default()), all / 2, all / 4),
            false => with_host(all / 2),
        };
        let rig = Arc::new(Rig::open(files, opts).expect("a streamer"));
        let done = Arc::new(AtomicBool::new(false));
        let mover = {
            let (rig, done) = (rig.clone(), done.clone());
            std::thread::spawn(move || {
                let mut random = Random::new(9);
                while !done.load(Ordering::Acquire) {
                    let bytes = all * u64::from(30 + random.below(60)) / 100;
                    let (host, device) = match on_it {
                        true => (None, Some(bytes)),
                        false => (Some(bytes), None),
                    };
                    let outcome = status(rig.streamer.rebalance(host, device, None));
                    assert!(outcome == Status::Ok || outcome == Status::Budget, "{outcome:?}");
                    std::thread::yield_now();
                }
            })
        };
        let users: Vec<_> = (0..3)
            .map(|seed| {
                let rig = rig.clone();
                std::thread::spawn(move || use_at_random(&rig, seed + 20, 250))
            })
            .collect();
        let ended: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        done.store(true, Ordering::Release);
        mover.join().expect("no panic");
        assert!(ended.iter().all(Result::is_ok));
        rig.streamer.load(soon()).expect("residents");
        rig.pass(patiently()).expect("a pass");
        rig.closed();
    }
}

#[test]
fn close_ends_concurrent_acquires() {
    for round in 0..10 {
        let files = Files::new("ended", &dense(16));
        let rig = Arc::new(Rig::open(files, with_host(1_000_000)).expect("a streamer"));
        let users: Vec<_> = (0..3)
            .map(|seed| {
                let rig = rig.clone();
                std::thread::spawn(move || {
                    let mut random = Random::new(seed + round * 3);
                    loop {
                        match status(rig.use_unit(random.below(18), patiently())) {
                            Status::Ok | Status::Busy => {}
                            ended => return ended,
                        }
                    }
                })
            })
            .collect();
        while rig.streamer.stats().acquires < 50 {
            std::thread::yield_now();
        }
        let deadline = soon();
        loop {
            match status(rig.streamer.close(deadline)) {
                Status::Ok => break,
                Status::Busy => std::thread::yield_now(),
                other => panic!("{other:?}"),
            }
            assert!(rig.runtime.core().clock().now_ns() < deadline, "it never closes");
        }
        for user in users {
            assert_eq!(user.join().expect("no panic"), Status::Closed);
        }
    }
}

#[test]
fn unit_can_be_leased_several_times() {
    let files = Files::new("shared", &dense(12));
    let all = files.all_bytes();
    let opts = with_device(device(SimulatedOpts::default()), all / 3, 0);
    let rig = Rig::open(files, opts).expect("a streamer");
    for unit in rig.files.order() {
        let when_issued = AcquireOpts { when_issued: true, ..patiently() };
        let held: Vec<_> =
            (0..3).map(|_| rig.streamer.acquire(unit, when_issued).expect("one")).collect();
        assert!(held.iter().all(|one| one.address == held[0].address));
        for one in &held {
            assert!(rig.is_right(one).expect("readable") && (unit == 0 || on_device(one)));
            rig.streamer.release(one, None).expect("given back");
        }
        assert_eq!(status(rig.streamer.release(&held[0], None)), Status::State);
    }
    rig.closed();
}
