//! Every mix of residency and every way to acquire: the bytes are those of the file.

use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::stream::plan::{Mode, PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts, Verify};
use kvtier_testkit::model_files::simulated::SimModelFilesOpts;

use kvtier_lab::reference::numbers;
use kvtier_testkit::fixtures::stream_rig::{
    Files, MIB, Rig, dense, device, experts, large, on_device, patiently, plan_options, runtime,
    soon, status, with_device, with_host,
};

const PERCENTS: [u64; 7] = [5, 12, 30, 55, 80, 100, 150];

#[test]
fn dense_model_on_the_cpu() {
    for percent in PERCENTS {
        for in_place in [false, true] {
            let files = Files::new(&format!("dense-{percent}-{in_place}"), &dense(48));
            let opts = Opts { in_place, ..with_host(files.all_bytes() * percent / 100) };
            let rig = Rig::open(files, opts).expect("a streamer");
            for _ in 0..3 {
                rig.pass(patiently()).expect("a pass");
            }
            let plan = rig.streamer.plan();
            let streamed = plan.residencies.iter().filter(|home| **home == Residency::File).count();
            assert_eq!(streamed == 0, percent >= 100, "{percent} %: {streamed} are streamed");
            assert!(plan.host_bytes <= rig.files.all_bytes() * percent / 100);
            rig.closed();
        }
    }
}

#[test]
fn units_larger_than_a_chunk_in_several_files() {
    for percent in [45, 70, 100] {
        for in_place in [false, true] {
            let files = Files::split(&format!("large-{percent}-{in_place}"), &large(6), 3);
            let opts = Opts { in_place, ..with_host(files.all_bytes() * percent / 100) };
            let rig = Rig::open(files, opts).expect("a streamer");
            rig.pass(patiently()).expect("a pass");
            rig.pass(AcquireOpts { poll: true, ..AcquireOpts::default() }).expect("a pass");
            rig.closed();
        }
    }
}

#[test]
fn every_mix_of_device_host_and_file_residency() {
    for (at, on_it) in (0..).zip([6, 30, 100, 150]) {
        for on_host in [0, 40, 100] {
            let files = Files::new(&format!("mix-{on_it}-{on_host}"), &dense(40));
            let all = files.all_bytes();
            let device = device(SimulatedOpts { seed: at + on_host, ..SimulatedOpts::default() });
            let opts = with_device(device.clone(), all * on_it / 100, all * on_host / 100);
            let rig = Rig::open(files, opts).expect("a streamer");
            rig.pass(patiently()).expect("a pass");
            rig.pass(AcquireOpts { when_issued: true, ..patiently() }).expect("a pass");
            rig.pass(AcquireOpts { when_issued: true, poll: true, deadline_ns: 0 })
                .expect("a pass");
            rig.streamer.load(soon()).expect("residents");
            let residencies = rig.streamer.plan().residencies;
            let count =
                |home: Residency| residencies.iter().filter(|there| **there == home).count();
            assert_eq!(count(Residency::File) == 0, on_it + on_host >= 100, "{on_it} {on_host}");
            assert_eq!(count(Residency::Device) > 1, on_it > 6);
            // Rows of the embedding are looked up by the processor.
            let held = rig.streamer.acquire(1, patiently()).expect("a layer");
            assert!(on_device(&held));
            rig.streamer.release(&held, None).expect("given back");
            rig.closed();
            drop(rig);
            assert_eq!(device.allocated_bytes(), 0);
        }
    }
}

#[test]
fn device_uses_units_after_their_release() {
    let names = [(20, 20, 0, "file"), (20, 100, 1, "host"), (60, 30, 2, "both"), (6, 10, 3, "few")];
    for (on_it, on_host, seed, name) in names {
        let files = Files::new(&format!("behind-{name}"), &large(14));
        let all = files.all_bytes();
        let device = device(SimulatedOpts {
            seed,
            latency_ns: 20_000,
            bytes_per_second: 1_000_000_000,
            ..SimulatedOpts::default()
        });
        let two = 2 * 1_204_224 + 32_768;
        let opts = with_device(device, (all * on_it / 100).max(two), all * on_host / 100);
        let rig = Rig::open(files, opts).expect("a streamer");
        let order = rig.files.order();
        for _ in 0..2 {
            let mut under_way = Vec::new();
            rig.streamer.pass_begin().expect("a pass");
            for &unit in &order {
                let held = rig.streamer.acquire(unit, patiently()).expect("a unit");
                let there = on_device(&held);
                rig.streamer.release(&held, None).expect("given back");
                if there {
                    under_way.push(rig.compute(unit, patiently()).expect("it computes"));
                }
            }
            rig.streamer.pass_end().expect("a pass");
            for one in &under_way {
                one.end().expect("it has computed");
            }
        }
        rig.closed();
    }
}

#[test]
fn experts_with_skew_and_hints() {
    for (percent, hints, in_place) in [
        (30, false, false),
        (30, true, true),
        (60, true, false),
        (60, false, true),
        (130, true, false),
    ] {
        let mut files =
            Files::new(&format!("experts-{percent}-{hints}-{in_place}"), &experts(6, 8));
        let all = files.all_bytes();
        let sim = files.simulate(SimModelFilesOpts::default());
        let opts = Opts { in_place, ..with_host(all * percent / 100) };
        let rig = Rig::open_on(runtime(""), sim, files, opts).expect("a streamer");
        let mut random = numbers::Random::new(percent);
        for _ in 0..4 {
            rig.streamer.pass_begin().expect("a pass");
            for unit in rig.files.order() {
                rig.use_unit(unit, patiently()).expect("a unit");
                let layer = rig.files.units.units[unit as usize].layer;
                let there = rig.files.experts_of(layer);
                if there.is_empty() {
                    continue;
                }
                let draw = |random: &mut numbers::Random| {
                    let n = random.below(8) * random.below(8) / 8;
                    there[n as usize]
                };
                let (first, second) = (draw(&mut random), draw(&mut random));
                if hints {
                    rig.streamer.hint(&[first, second]).expect("a hint");
                }
                let held = rig.streamer.acquire(first, patiently()).expect("an expert");
                rig.use_unit(second, patiently()).expect("another while one is held");
                assert!(rig.is_right(&held).expect("no event"));
                rig.streamer.release(&held, None).expect("given back");
            }
            rig.streamer.pass_end().expect("a pass");
        }
        if percent < 100 {
            let stats = rig.streamer.stats();
            let layers = rig.streamer.layers();
            assert_eq!(stats.expert_hits + stats.expert_misses, 4 * 6 * 2);
            assert_eq!(layers.iter().map(|l| l.hits).sum::<u64>(), stats.expert_hits);
            assert_eq!(layers.iter().map(|l| l.misses).sum::<u64>(), stats.expert_misses);
        }
        rig.closed();
    }
}

#[test]
fn experts_on_a_device() {
    for (on_it, on_host) in [(30, 0), (30, 60), (60, 100), (120, 0)] {
        let files = Files::new(&format!("dexperts-{on_it}-{on_host}"), &experts(5, 8));
        let all = files.all_bytes();
        let device = device(SimulatedOpts::default());
        let opts = with_device(device, all * on_it / 100, all * on_host / 100);
        let rig = Rig::open(files, opts).expect("a streamer");
        let mut random = numbers::Random::new(on_it + on_host);
        for pass in 0..4 {
            rig.streamer.pass_begin().expect("a pass");
            for unit in rig.files.order() {
                rig.use_unit(unit, patiently()).expect("a unit");
                let there = rig.files.experts_of(rig.files.units.units[unit as usize].layer);
                for _ in 0..there.len().min(2) {
                    let expert = there[random.below(8) as usize];
                    if pass % 2 == 1 {
                        rig.streamer.hint(&[expert]).expect("a hint");
                    }
                    rig.use_unit(expert, AcquireOpts { when_issued: true, ..patiently() })
                        .expect("an expert");
                }
            }
            rig.streamer.pass_end().expect("a pass");
        }
        rig.closed();
    }
}

#[test]
fn units_out_of_order_and_in_ring_mode() {
    for (percent, mode, once) in [
        (20, Mode::Tiered, false),
        (20, Mode::Tiered, true),
        (20, Mode::Ring, false),
        (70, Mode::Ring, true),
        (70, Mode::Tiered, false),
    ] {
        for in_place in [false, true] {
            let name = format!("order-{percent}-{mode:?}-{once}-{in_place}");
            let files = Files::new(&name, &dense(30));
            let mut opts = with_host(files.all_bytes() * percent / 100);
            opts.plan_options.mode = mode;
            (opts.once, opts.in_place) = (once, in_place);
            let rig = Rig::open(files, opts).expect("a streamer");
            let count = rig.files.units.units.len() as u32;
            let mut random = numbers::Random::new(percent);
            for _ in 0..300 {
                rig.use_unit(random.below(count), patiently()).expect("a unit");
            }
            rig.pass(patiently()).expect("a pass");
            rig.closed();
        }
    }
}

#[test]
fn custom_order_without_wrap() {
    let files = Files::new("order", &dense(20));
    let mut order = files.order();
    order.reverse();
    let opts = Opts { order: Some(order.clone()), once: true, ..with_host(files.all_bytes() / 4) };
    let rig = Rig::open(files, opts).expect("a streamer");
    for _ in 0..3 {
        rig.streamer.pass_begin().expect("a pass");
        for &unit in &order {
            rig.use_unit(unit, patiently()).expect("a unit");
        }
        rig.streamer.pass_end().expect("a pass");
    }
    let stats = rig.streamer.stats();
    assert_eq!(stats.passes, 3);
    rig.closed();
}

#[test]
fn trace_marks_and_progress() {
    let files = Files::new("marks", &dense(12));
    let all = files.all_bytes();
    let opts = Opts { marks: 1 << 14, ..with_host(all * 6 / 10) };
    let rig = Rig::open(files, opts).expect("a streamer");
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(rig.streamer.progress().missing, 0);
    rig.pass(patiently()).expect("a pass");
    let stats = rig.streamer.stats();
    assert_eq!(stats.acquires, rig.files.order().len() as u64);
    let marks = rig.streamer.marks();
    use kvtier::stream::scheduler::Stage;
    assert_eq!(marks.iter().filter(|m| m.stage == Stage::Use).count() as u64, stats.acquires);
    let [disk, _] = rig.streamer.links();
    assert_eq!(disk.bytes, stats.read_bytes);
    rig.closed();
}

#[test]
fn checksums_are_verified_and_saved() {
    for verify in [Verify::First, Verify::Always] {
        let files = Files::new(&format!("sums-{verify:?}"), &dense(10));
        let sidecar = files.scratch.0.join("sums");
        let all = files.all_bytes();
        let opts = Opts { verify, sidecar: Some(sidecar.clone()), ..with_host(all / 3) };
        let rig = Rig::open(files, opts.clone()).expect("a streamer");
        for _ in 0..2 {
            rig.pass(patiently()).expect("a pass");
        }
        let sums: Vec<_> = (0..12).map(|unit| rig.streamer.sum_of(unit).ok()).collect();
        assert!(sums.iter().all(Option::is_some), "{sums:?}");
        rig.closed();
        let Rig { streamer, files, .. } = rig;
        drop(streamer);
        let rig = Rig::open(files, opts).expect("a streamer");
        let again: Vec<_> = (0..12).map(|unit| rig.streamer.sum_of(unit).ok()).collect();
        assert_eq!(sums, again);
        rig.pass(patiently()).expect("a pass");
        rig.closed();
    }
}

#[test]
fn too_small_budget_error_names_the_required_bytes() {
    let files = Files::new("small", &large(4));
    let text = Rig::open(files, with_host(MIB)).err().expect("too small").to_string();
    assert!(text.contains("needs at least"), "{text}");
    let files = Files::new("small", &large(4));
    let opts = with_device(device(SimulatedOpts::default()), MIB, 0);
    assert_eq!(status(Rig::open(files, opts)), Status::Budget);
    let files = Files::new("small", &dense(4));
    let plan_options = PlanOptions { host_ceiling_bytes: Some(MIB), ..plan_options() };
    let device = Some(device(SimulatedOpts::default()) as _);
    let text =
        Rig::open(files, Opts { plan_options, device, ..Opts::default() }).err().expect("staging");
    assert_eq!(text.status(), Status::Budget, "{text}");
}
