//! A fault is reported once, to the caller that it concerns. No caller gets wrong bytes or waits
//! forever, and what recovers is used again.

use std::io::{Seek, SeekFrom, Write};
use std::sync::Arc;

use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::stream::streamer::{AcquireOpts, Opts, Verify};
use kvtier_testkit::model_files::faults::Fault;
use kvtier_testkit::model_files::simulated::SimModelFilesOpts;

use crate::gate::Gate;
use kvtier_testkit::fixtures::stream_rig::{
    Files, MIB, Rig, dense, device, experts, large, patiently, runtime, soon, status, with_device,
    with_host,
};

const EARLY: AcquireOpts = AcquireOpts { when_issued: true, poll: false, deadline_ns: 0 };

fn when_issued() -> AcquireOpts {
    AcquireOpts { deadline_ns: soon(), ..EARLY }
}

#[test]
fn failed_or_short_read_is_reported_and_retried() {
    for (in_place, share) in [(false, 3), (true, 3), (false, 1), (true, 1)] {
        let mut files = Files::new(&format!("broken-{in_place}-{share}"), &dense(12));
        let sim = files.simulate(SimModelFilesOpts::default());
        for at in 1..40 {
            sim.plant(if at % 2 == 0 { Fault::Broken(at * 3) } else { Fault::Short(at * 3) });
        }
        let opts = Opts { in_place, ..with_host(files.all_bytes() / share) };
        let rig = Rig::open_on(runtime(""), sim, files, opts).expect("a streamer");
        let mut failed = 0;
        for _ in 0..20 {
            for unit in rig.files.order() {
                failed += rig.insist(unit, patiently(), &[Status::Io]);
            }
        }
        assert_eq!(failed > 0, rig.streamer.stats().failed > 0);
        assert!(rig.streamer.stats().failed > 0);
        rig.closed();
    }
}

/// Units that are larger than a huge page, in place, come and go with their memory.
#[test]
fn units_in_huge_pages_survive_failed_reads() {
    const HUGE: u64 = 2 * MIB;
    let mut files = Files::even("huge", 7, 2 * HUGE + MIB + 4096);
    let sim = files.simulate(SimModelFilesOpts::default());
    (1..20).for_each(|at| {
        sim.plant(if at % 2 == 0 { Fault::Broken(at * 5) } else { Fault::Short(at * 5) })
    });
    let opts = Opts { in_place: true, ..with_host(files.all_bytes() / 2) };
    let rig = Rig::open_on(runtime(""), sim, files, opts).expect("a streamer");
    for unit in rig.files.order() {
        assert_eq!(rig.streamer.fixed(unit).expect("in place").0 % HUGE, 0);
    }
    let mut failed = 0;
    for _ in 0..6 {
        for unit in rig.files.order() {
            failed += rig.insist(unit, patiently(), &[Status::Io]);
        }
    }
    assert!(failed > 0 && rig.streamer.stats().failed > 0);
    rig.closed();
}

#[test]
fn failed_read_for_a_device_is_retried() {
    for (on_it, on_host) in [(15, 0), (15, 50), (40, 100)] {
        let mut files = Files::new(&format!("dbroken-{on_it}-{on_host}"), &dense(16));
        let sim = files.simulate(SimModelFilesOpts::default());
        (1..40).for_each(|at| sim.plant(Fault::Broken(at * 4)));
        let all = files.all_bytes();
        let device = device(SimulatedOpts::default());
        let opts = with_device(device, all * on_it / 100, all * on_host / 100);
        let rig = Rig::open_on(runtime(""), sim, files, opts).expect("a streamer");
        for _ in 0..15 {
            for unit in rig.files.order() {
                rig.insist(unit, when_issued(), &[Status::Io]);
            }
        }
        assert!(rig.streamer.stats().failed > 0);
        rig.closed();
    }
}

#[test]
fn unreadable_range_fails_one_unit() {
    let mut files = Files::new("stretch", &experts(5, 4));
    let sim = files.simulate(SimModelFilesOpts::default());
    let (layer, expert) = (files.order()[3], files.experts_of(1)[2]);
    for unit in [layer, expert] {
        let at = files.units.units[unit as usize].extents[0].offset;
        sim.plant(Fault::BrokenRange(0, at..at + 1));
    }
    let opts = with_host(files.all_bytes() / 2);
    let rig = Rig::open_on(runtime(""), sim.clone(), files, opts).expect("a streamer");
    for _ in 0..3 {
        for unit in 0..rig.files.units.units.len() as u32 {
            // A read covers whole granules, so a neighbour may fail with it.
            let outcome = status(rig.use_unit(unit, patiently()));
            let is_it = unit == layer || unit == expert;
            assert!(
                if is_it { outcome == Status::Io } else { outcome != Status::Timeout },
                "{unit}"
            );
        }
    }
    sim.heal();
    for unit in 0..rig.files.units.units.len() as u32 {
        rig.insist(unit, patiently(), &[Status::Io]);
        rig.use_unit(unit, patiently()).expect("nothing is broken");
    }
    rig.closed();
}

#[test]
fn acquire_waits_for_a_slow_disk_until_its_deadline() {
    let mut files = Files::new("slow", &dense(10));
    let opts =
        SimModelFilesOpts { latency_ns: 1_000_000, jitter_percent: 300, ..Default::default() };
    let sim = files.simulate(SimModelFilesOpts { bytes_per_second: 100_000_000, ..opts });
    let at = files.units.units[4].extents[0].offset;
    sim.plant(Fault::SlowRange(0, at..at + 4096, 20));
    let gate = Gate::new(sim);
    let opts = with_host(files.all_bytes() / 3);
    let rig = Rig::open_on(runtime(""), gate.clone(), files, opts).expect("a streamer");
    gate.shut(true);
    let plan = rig.streamer.plan();
    let streamed =
        plan.residencies.iter().rposition(|home| *home == kvtier::stream::plan::Residency::File);
    let streamed = streamed.expect("one") as u32;
    for how in [
        AcquireOpts { deadline_ns: 1, ..AcquireOpts::default() },
        AcquireOpts { poll: true, ..AcquireOpts::default() },
    ] {
        let outcome = status(rig.streamer.acquire(streamed, how));
        assert_eq!(outcome, if how.poll { Status::Again } else { Status::Timeout });
    }
    gate.shut(false);
    rig.pass(patiently()).expect("a pass");
    rig.closed();
}

#[test]
fn changed_simulated_file_is_reported() {
    for what in ["cut", "written", "replaced"] {
        let mut files = Files::new(&format!("sim-{what}"), &dense(12));
        let sim = files.simulate(SimModelFilesOpts::default());
        let opts =
            Opts { verify: Verify::Always, sidecar: None, ..with_host(files.all_bytes() / 4) };
        let rig = Rig::open_on(runtime(""), sim.clone(), files, opts).expect("a streamer");
        for _ in 0..2 {
            rig.pass(patiently()).expect("a pass");
        }
        let last = rig.files.order().len() as u32 - 3;
        let at = rig.files.units.units[last as usize].extents[0].offset;
        match what {
            "cut" => sim.truncate(0, at + 5),
            "written" => sim.write(0, at + 5),
            _ => sim.replace(0),
        }
        let outcome = status(rig.pass(patiently()));
        assert_eq!(
            outcome,
            if what == "replaced" { Status::Ok } else { Status::Corrupt },
            "{what}"
        );
        for unit in rig.files.order() {
            let outcome = status(rig.use_unit(unit, patiently()));
            assert!(outcome == Status::Ok || outcome == Status::Corrupt, "{what}: {outcome:?}");
        }
        rig.closed();
    }
}

#[test]
fn changed_real_file_is_reported() {
    for what in ["cut", "written", "replaced"] {
        let files = Files::new(&format!("real-{what}"), &dense(12));
        let opts =
            Opts { verify: Verify::Always, sidecar: None, ..with_host(files.all_bytes() / 4) };
        let rig = Rig::open(files, opts).expect("a streamer");
        for _ in 0..2 {
            rig.pass(patiently()).expect("a pass");
        }
        let path = &rig.files.paths[0];
        let unit = &rig.files.units.units[rig.files.order().len() - 3];
        match what {
            "replaced" => {
                let other = path.with_extension("other");
                std::fs::write(&other, b"something else").expect("written");
                std::fs::rename(&other, path).expect("replaced");
            }
            _ => {
                let mut file = std::fs::File::options().write(true).open(path).expect("a file");
                let at = unit.extents[0].offset;
                if what == "cut" {
                    file.set_len(at + 5).expect("cut");
                } else {
                    file.seek(SeekFrom::Start(at)).expect("a place");
                    let byte = rig.files.bytes[0][at as usize] ^ 1;
                    file.write_all(&[byte]).expect("written");
                }
            }
        }
        let outcome = status(rig.pass(patiently()));
        assert_eq!(
            outcome,
            if what == "replaced" { Status::Ok } else { Status::Corrupt },
            "{what}"
        );
        let outcomes: Vec<Status> =
            rig.files.order().iter().map(|&u| status(rig.use_unit(u, patiently()))).collect();
        assert!(outcomes.iter().all(|t| [Status::Ok, Status::Corrupt].contains(t)), "{outcomes:?}");
        rig.closed();
    }
}

#[test]
fn wrong_bytes_from_disk_are_detected() {
    for on_it in [0, 20] {
        let mut files = Files::new(&format!("lies-{on_it}"), &large(6));
        let sim = files.simulate(SimModelFilesOpts::default());
        let all = files.all_bytes();
        let memory = match on_it {
            0 => with_host(all / 2),
            _ => with_device(device(SimulatedOpts::default()), all / 2, 0),
        };
        let opts = Opts { verify: Verify::Always, sidecar: None, ..memory };
        let rig = Rig::open_on(runtime(""), sim.clone(), files, opts).expect("a streamer");
        rig.streamer.load(soon()).expect("residents");
        for _ in 0..2 {
            rig.pass(patiently()).expect("a pass");
        }
        let residencies = rig.streamer.plan().residencies;
        let streamed =
            residencies.iter().rposition(|h| *h == kvtier::stream::plan::Residency::File);
        let streamed = streamed.expect("one") as u32;
        let extents = &rig.files.units.units[streamed as usize].extents;
        let last = extents.last().expect("bytes");
        sim.flip(last.file, last.offset + last.bytes - 1);
        let mut outcomes = Vec::new();
        for _ in 0..3 {
            for unit in rig.files.order() {
                let how = if on_it > 0 { when_issued() } else { patiently() };
                let now = status(rig.use_unit(unit, how));
                assert!(now == Status::Ok || now == Status::Corrupt && unit == streamed);
                outcomes.push(now);
            }
        }
        assert!(outcomes.contains(&Status::Corrupt));
        rig.closed();
    }
}

#[test]
fn failed_copy_is_reported_and_retried() {
    for (seed, on_host) in [(1, 0), (2, 100)] {
        for how in [patiently(), when_issued()] {
            let files = Files::new(&format!("copies-{seed}-{}", how.when_issued), &large(8));
            let all = files.all_bytes();
            let device = device(SimulatedOpts {
                seed,
                latency_ns: 300_000,
                fail_at: (1..40).map(|n| n * (n + 3) / 2 + seed).collect(),
                ..SimulatedOpts::default()
            });
            let opts = with_device(device, all / 2, all * on_host / 100);
            let rig = Rig::open(files, opts).expect("a streamer");
            let mut failed = 0;
            for _ in 0..8 {
                for unit in rig.files.order() {
                    failed += rig.insist(unit, how, &[Status::Io]);
                }
            }
            assert!(failed > 0 && rig.streamer.stats().failed > 0);
            rig.closed();
        }
    }
}

/// Work of the engine with a unit fails: the streamer is not affected. The unit is released, and
/// its memory is reused.
#[test]
fn failed_engine_work_frees_its_unit_and_slot() {
    let mut failed = 0;
    for (at, on_it) in (1..=30).flat_map(|at| [(at, 30), (at, 150)]) {
        let files = Files::new(&format!("engine-{at}-{on_it}"), &dense(8));
        let all = files.all_bytes();
        let device = device(SimulatedOpts { fail_at: vec![at], ..SimulatedOpts::default() });
        let rig = Rig::open(files, with_device(device, all * on_it / 100, 0)).expect("a streamer");
        for unit in rig.files.order().into_iter().skip(1) {
            match rig.compute(unit, patiently()).map(|computing| computing.end()) {
                Ok(Ok(())) => {}
                Ok(Err(error)) | Err(error) => {
                    assert_eq!(error.status(), Status::Io, "{error}");
                    failed += 1;
                }
            }
        }
        for unit in rig.files.order() {
            let again = rig.insist(unit, patiently(), &[Status::Io]);
            assert!(again < 3, "unit {unit} of {on_it} %, {at}: {again} times");
        }
        rig.closed();
    }
    assert!(failed > 10, "{failed} batches failed");
}

#[test]
fn lost_device_is_reported() {
    for at in [1, 3, 20] {
        let files = Files::new(&format!("lost-{at}"), &dense(16));
        let all = files.all_bytes();
        let device = device(SimulatedOpts { lost_at: at, ..SimulatedOpts::default() });
        let rig = Rig::open(files, with_device(device, all / 3, 0)).expect("a streamer");
        let mut outcomes = Vec::new();
        for _ in 0..4 {
            for unit in rig.files.order() {
                outcomes.push(status(rig.use_unit(unit, when_issued())));
            }
        }
        assert!(
            outcomes.iter().all(|t| [Status::Ok, Status::Unavailable].contains(t)),
            "{outcomes:?}"
        );
        assert!(outcomes.contains(&Status::Unavailable));
        rig.closed();
    }
}

#[test]
fn reader_panic_fails_all_waiting_calls() {
    for share in [1, 4] {
        let files = Files::new(&format!("panic-{share}"), &dense(12));
        let gate = Gate::new(files.real());
        gate.shut(true);
        gate.panic_at(5);
        let opts = with_host(files.all_bytes() / share);
        let rig = Rig::open_on(runtime(""), gate.clone(), files, opts).expect("a streamer");
        let rig = Arc::new(rig);
        let waiting = [3, 7].map(|unit| {
            let rig = rig.clone();
            std::thread::spawn(move || {
                let until = |_: &u32| status(rig.use_unit(unit, patiently())) == Status::Ok;
                (0..100_000).find(|n| !until(n)).expect("an end");
                status(rig.use_unit(unit, patiently()))
            })
        });
        gate.shut(false);
        if share == 4 {
            while status(rig.pass(patiently())) == Status::Ok {}
        }
        for thread in waiting {
            assert_eq!(thread.join().expect("no panic here"), Status::Panic);
        }
        assert_eq!(status(rig.streamer.load(soon())), Status::Panic);
        assert_eq!(status(rig.streamer.hint(&[1])), Status::Panic);
        // Once the streamer's threads have ended, the runtime knows of the panic too.
        rig.closed();
        assert!(rig.runtime.core().is_poisoned());
    }
}

#[test]
fn closing_the_runtime_ends_waiting_acquires() {
    let files = Files::new("runtime", &dense(12));
    let gate = Gate::new(files.real());
    gate.shut(true);
    let opts = with_host(files.all_bytes() / 4);
    let rig = Arc::new(Rig::open_on(runtime(""), gate.clone(), files, opts).expect("a streamer"));
    let threads: Vec<_> = (0..4)
        .map(|unit| {
            let rig = rig.clone();
            std::thread::spawn(move || status(rig.streamer.acquire(unit + 2, patiently())))
        })
        .collect();
    gate.wait();
    while rig.streamer.stats().waited == 0 {
        std::thread::yield_now();
    }
    rig.runtime.close(soon()).expect("it closes");
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), Status::Closed);
    }
    gate.shut(false);
    rig.closed();
}

#[test]
fn close_waits_for_leases_and_rejects_new_acquires() {
    for in_place in [false, true] {
        let files = Files::new(&format!("close-{in_place}"), &dense(12));
        let gate = Gate::new(files.real());
        let opts = Opts { in_place, ..with_host(files.all_bytes() / 3) };
        let rig = Rig::open_on(runtime(""), gate.clone(), files, opts).expect("a streamer");
        rig.streamer.load(soon()).expect("residents");
        rig.pass(patiently()).expect("a pass");
        let count = rig.files.units.units.len() as u32;
        for unit in 0..count {
            let held = rig.streamer.acquire(unit, patiently()).expect("a unit");
            assert_eq!(status(rig.streamer.close(soon())), Status::Busy, "unit {unit}");
            assert!(rig.is_right(&held).expect("no event"));
            rig.streamer.release(&held, None).expect("given back");
            assert_eq!(status(rig.streamer.release(&held, None)), Status::State, "unit {unit}");
        }
        rig.pass(patiently()).expect("a close that was refused changes nothing");
        gate.shut(true);
        let residencies = rig.streamer.plan().residencies;
        let file =
            |home: &kvtier::stream::plan::Residency| *home == kvtier::stream::plan::Residency::File;
        for unit in (0..count).filter(|&unit| file(&residencies[unit as usize])) {
            drop(
                rig.streamer
                    .acquire(unit, AcquireOpts { poll: true, ..AcquireOpts::default() })
                    .map(|held| {
                        rig.streamer.release(&held, None).expect("given back");
                    }),
            );
        }
        gate.wait();
        assert_eq!(status(rig.streamer.close(1)), Status::Busy);
        gate.shut(false);
        rig.closed();
        for unit in 0..count {
            for how in [patiently(), AcquireOpts { poll: true, ..AcquireOpts::default() }] {
                let outcome = status(rig.streamer.acquire(unit, how));
                assert_eq!(outcome, Status::Closed, "unit {unit}");
            }
        }
        assert_eq!(status(rig.streamer.pass_begin()), Status::Closed);
        assert_eq!(status(rig.streamer.pass_end()), Status::Closed);
        assert_eq!(status(rig.streamer.hint(&[0])), Status::Closed);
        assert_eq!(status(rig.streamer.load(soon())), Status::Closed);
        assert_eq!(status(rig.streamer.rebalance(Some(MIB), None, None)), Status::Closed);
        rig.closed();
    }
}

#[test]
fn out_of_range_unit_numbers_are_rejected() {
    let files = Files::new("none", &dense(4));
    let rig = Rig::open(files, with_host(1 << 30)).expect("a streamer");
    for unit in [6, 7, 1 << 30, u32::MAX] {
        let unit = unit + u32::from(unit < 8) * 2;
        assert_eq!(status(rig.streamer.acquire(unit, patiently())), Status::Invalid);
        assert_eq!(status(rig.streamer.hint(&[0, unit])), Status::Invalid);
        assert_eq!(status(rig.streamer.sum_of(unit)), Status::Invalid);
    }
    let mut held = rig.streamer.acquire(0, patiently()).expect("a unit");
    held.lease.unit = u32::MAX;
    assert_eq!(status(rig.streamer.release(&held, None)), Status::Invalid);
    held.lease.unit = 0;
    rig.streamer.release(&held, None).expect("given back");
    rig.closed();
}
