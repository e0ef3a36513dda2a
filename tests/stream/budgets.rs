//! Memory of streamers: never above the budget, reclaimed on request, and all freed at the end.

use std::sync::Arc;

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::status::Status;
use kvtier::device::Device;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::stream::plan::Residency;
use kvtier::stream::streamer::{AcquireOpts, Opts};
use kvtier::stream::units::{NONE, Role};

use kvtier_lab::reference::numbers::Random;
use kvtier_testkit::fixtures::stream_rig::{
    Files, MIB, Rig, dense, device, experts, patiently, runtime, soon, with_device, with_host,
};

const PLENTY: u64 = 1 << 30;

pub fn budget(rig_runtime: &kvtier::base::runtime::Runtime, host: u64) -> Arc<Budget> {
    let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
    opts.limits[Tier::Host as usize] = Some(host);
    opts.limits[Tier::Pinned as usize] = Some(host);
    opts.limits[Tier::Device as usize] = Some(PLENTY);
    Budget::open(rig_runtime.core(), &opts).expect("a budget")
}

pub fn used(budget: &Budget, tier: Tier) -> u64 {
    let lane = budget.usage(tier);
    lane.reserved_bytes + lane.committed_bytes
}

/// Resident bytes of a mapping that begins at `start`.
fn resident_bytes(start: u64) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("a list");
    let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
    let line = lines.find(|line| line.starts_with("Rss:")).expect("the mapping");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

#[test]
fn committed_bytes_match_the_plan() {
    for share in [1, 2, 5] {
        for in_place in [false, true] {
            for sizes in [dense(24), experts(5, 6)] {
                let files = Files::new(&format!("commit-{share}-{in_place}"), &sizes);
                let all = files.all_bytes();
                let runtime = runtime("");
                let budget = budget(&runtime, all / share * 11 / 10);
                let limit = budget.usage(Tier::Host).limit_bytes;
                let real = files.real();
                let opts = Opts { in_place, budget: Some(budget.clone()), ..with_host(PLENTY) };
                let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
                for _ in 0..2 {
                    rig.pass(patiently()).expect("a pass");
                    let experts = (0..6).flat_map(|layer| rig.files.experts_of(layer));
                    experts.for_each(|unit| rig.use_unit(unit, patiently()).expect("an expert"));
                    rig.streamer.load(soon()).expect("residents");
                    let plan = rig.streamer.plan();
                    assert_eq!(used(&budget, Tier::Host), plan.host_bytes);
                    assert!(plan.host_bytes <= limit);
                    if let Some((start, _)) = rig.streamer.range() {
                        let there = resident_bytes(start);
                        assert!(there <= plan.host_bytes, "{there} of {}", plan.host_bytes);
                    }
                }
                assert!(budget.usage(Tier::Host).peak_bytes <= limit);
                rig.closed();
                assert_eq!(used(&budget, Tier::Host), 0);
                assert_eq!(budget.accounts(), 0);
            }
        }
    }
}

#[test]
fn device_and_host_memory_are_charged() {
    for (on_it, on_host) in [(10, 0), (40, 30), (120, 0)] {
        let files = Files::new(&format!("paid-{on_it}"), &dense(24));
        let all = files.all_bytes();
        let runtime = runtime("");
        let budget = budget(&runtime, PLENTY);
        let device = device(SimulatedOpts::default());
        let opts = with_device(device.clone(), all * on_it / 100, all * on_host / 100);
        let opts = Opts { budget: Some(budget.clone()), ..opts };
        let real = files.real();
        let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
        rig.pass(patiently()).expect("a pass");
        let plan = rig.streamer.plan();
        assert_eq!(used(&budget, Tier::Device), plan.device_bytes);
        assert_eq!(used(&budget, Tier::Host), plan.host_bytes);
        assert_eq!(device.allocated_bytes(), plan.device_bytes);
        assert!(used(&budget, Tier::Pinned) <= plan.host_bytes);
        rig.closed();
        for tier in [Tier::Host, Tier::Device, Tier::Pinned] {
            assert_eq!(used(&budget, tier), 0, "{tier:?}");
        }
        assert_eq!(device.allocated_bytes(), 0);
    }
}

#[test]
fn failed_allocation_is_reported_and_leaves_nothing() {
    let mut opened = 0;
    for at in 1..30 {
        for (site, on_it) in [("map", false), ("pin", true), ("map", true)] {
            let files = Files::new("planted", &dense(12));
            let all = files.all_bytes();
            let runtime = runtime(&format!("faults({site}=at(fail={at}))"));
            let budget = budget(&runtime, PLENTY);
            let device =
                device(SimulatedOpts { memory_bytes: all / 2 + at * 4096, ..Default::default() });
            let opts = if on_it {
                with_device(device.clone(), all / 2 + 15 * 4096, all / 4)
            } else {
                with_host(all * 2 / 3)
            };
            let opts = Opts { budget: Some(budget.clone()), ..opts };
            let real = files.real();
            match Rig::open_on(runtime, real, files, opts) {
                Ok(rig) => {
                    opened += 1;
                    rig.pass(patiently()).expect("a pass");
                    rig.closed();
                }
                Err(error) => {
                    let fine = [Status::Io, Status::NoMem, Status::PinQuota];
                    assert!(fine.contains(&error.status()), "{site} {at}: {error}");
                }
            }
            for tier in [Tier::Host, Tier::Device, Tier::Pinned] {
                assert_eq!(used(&budget, tier), 0, "{site} {at} {tier:?}");
            }
            assert_eq!(budget.accounts(), 0, "{site} {at}");
            assert_eq!(device.allocated_bytes(), 0);
        }
    }
    assert!(opened > 10, "{opened} of 87 were opened");
}

/// Passes until a budget is kept.
fn until_kept(rig: &Rig, budget: &Budget, tier: Tier, limit: u64) {
    let deadline = soon();
    while used(budget, tier) > limit {
        rig.pass(patiently()).expect("a pass");
        assert!(rig.runtime.core().clock().now_ns() < deadline, "{} bytes", used(budget, tier));
    }
    assert!(rig.streamer.plan().host_bytes <= limit || tier != Tier::Host);
}

#[test]
fn reduced_budget_is_obeyed_while_units_are_used() {
    for in_place in [false, true] {
        for sizes in [dense(30), experts(6, 6)] {
            let files = Files::new(&format!("cut-{in_place}-{}", sizes.experts), &sizes);
            let all = files.all_bytes();
            let runtime = runtime("");
            let budget = budget(&runtime, all * 9 / 10);
            let real = files.real();
            let opts = Opts { in_place, budget: Some(budget.clone()), ..with_host(PLENTY) };
            let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
            rig.pass(patiently()).expect("a pass");
            let resident =
                rig.streamer.plan().residencies.iter().position(|h| *h == Residency::Host);
            let resident = resident.expect("one") as u32;
            let plan = rig.streamer.plan();
            let slots = u64::from(plan.slots) * plan.slot_bytes
                + u64::from(plan.expert_slots) * plan.expert_slot_bytes;
            let residencies = |unit: &kvtier::stream::units::Unit| {
                let slot =
                    if unit.expert == NONE { plan.slot_bytes } else { plan.expert_slot_bytes };
                unit.role == Role::Embedding || unit.image_bytes > slot
            };
            let units = rig.files.units.units.iter();
            let fixed: u64 =
                units.filter(|unit| residencies(unit)).map(|unit| unit.image_bytes).sum();
            for percent in [80, 50, 10] {
                let least = slots + fixed;
                let limit = least + (plan.host_bytes - least) * percent / 100;
                let held = rig.streamer.acquire(resident, patiently()).expect("a unit");
                budget.resize(Tier::Host, limit).expect("resized");
                rig.pass(patiently()).expect("a pass");
                assert!(rig.is_right(&held).expect("no event"));
                rig.streamer.release(&held, None).expect("given back");
                until_kept(&rig, &budget, Tier::Host, limit);
            }
            // Less than the slots take: all other memory is returned.
            budget.resize(Tier::Host, 1).expect("resized");
            let deadline = soon();
            while used(&budget, Tier::Host) > slots + fixed {
                rig.pass(patiently()).expect("a pass");
                assert!(rig.runtime.core().clock().now_ns() < deadline, "residents stay");
            }
            rig.closed();
            assert_eq!(used(&budget, Tier::Host), 0);
        }
    }
}

#[test]
fn resident_set_changes_while_units_are_used() {
    for in_place in [false, true] {
        for sizes in [dense(30), experts(6, 6)] {
            let files = Files::new(&format!("move-{in_place}-{}", sizes.experts), &sizes);
            let all = files.all_bytes();
            let runtime = runtime("");
            let budget = budget(&runtime, PLENTY);
            let real = files.real();
            let opts = Opts { in_place, budget: Some(budget.clone()), ..with_host(all / 2) };
            let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
            let mut random = Random::new(3);
            let count = rig.files.units.units.len() as u32;
            let mut held = Vec::new();
            for step in 0..60 {
                let wished = all * u64::from(30 + random.below(60)) / 100;
                match rig.streamer.rebalance(Some(wished), None, None) {
                    Ok(plan) => assert!(plan.host_bytes <= wished),
                    Err(error) => assert_eq!(error.status(), Status::Budget, "{error}"),
                }
                let unit = random.below(count);
                match rig.streamer.acquire(unit, patiently()) {
                    Ok(one) => held.push(one),
                    Err(error) => assert_eq!(error.status(), Status::Busy, "{error}"),
                }
                for one in &held {
                    assert!(rig.is_right(one).expect("no event"), "step {step}");
                }
                while held.len() > random.below(3) as usize {
                    let one = held.swap_remove(random.below(held.len() as u32) as usize);
                    rig.streamer.release(&one, None).expect("given back");
                }
                if held.is_empty() {
                    rig.pass(patiently()).expect("a pass");
                }
            }
            for one in held.drain(..) {
                rig.streamer.release(&one, None).expect("given back");
            }
            rig.pass(patiently()).expect("a pass");
            rig.streamer.load(soon()).expect("residents");
            assert_eq!(used(&budget, Tier::Host), rig.streamer.plan().host_bytes);
            for unit in 0..count {
                rig.use_unit(unit, patiently()).expect("a unit");
            }
            rig.closed();
            assert_eq!(used(&budget, Tier::Host), 0);
        }
    }
}

#[test]
fn device_resident_set_changes() {
    let files = Files::new("dmove", &dense(24));
    let all = files.all_bytes();
    let runtime = runtime("");
    let budget = budget(&runtime, PLENTY);
    let device = device(SimulatedOpts::default());
    let opts =
        Opts { budget: Some(budget.clone()), ..with_device(device.clone(), all / 2, all / 4) };
    let real = files.real();
    let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
    let mut random = Random::new(5);
    for _ in 0..25 {
        let on_it = all * u64::from(15 + random.below(70)) / 100;
        let on_host = 2 * MIB + all * u64::from(random.below(60)) / 100;
        match rig.streamer.rebalance(Some(on_host), Some(on_it), None) {
            Ok(plan) => assert!(plan.host_bytes <= on_host && plan.device_bytes <= on_it),
            Err(error) => assert_eq!(error.status(), Status::Budget, "{error}"),
        }
        let when_issued = AcquireOpts { when_issued: true, ..patiently() };
        let held = rig.streamer.acquire(random.below(20) + 1, when_issued).expect("a unit");
        drop(rig.streamer.rebalance(Some(on_host), Some(on_it / 2 + all / 10), None));
        assert!(rig.is_right(&held).expect("an event"));
        rig.streamer.release(&held, None).expect("given back");
        rig.pass(when_issued).expect("a pass");
    }
    budget.resize(Tier::Device, all / 3).expect("resized");
    until_kept(&rig, &budget, Tier::Device, all / 3);
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(used(&budget, Tier::Device), rig.streamer.plan().device_bytes);
    assert_eq!(used(&budget, Tier::Host), rig.streamer.plan().host_bytes);
    rig.closed();
    assert_eq!(used(&budget, Tier::Device) + used(&budget, Tier::Host), 0);
    assert_eq!(device.free_bytes(), Some(PLENTY));
}

#[test]
fn embedding_moved_to_host_memory_is_used_there() {
    let files = Files::new("embedding", &dense(8));
    let all = files.all_bytes();
    let device = device(SimulatedOpts::default());
    let rig = Rig::open(files, with_device(device, all * 2, all)).expect("a streamer");
    for on_host in [0, all] {
        rig.streamer.rebalance(Some(2 * MIB + on_host), Some(all * 2), None).expect("a plan");
        rig.streamer.load(soon()).expect("residents");
        let plan = rig.streamer.plan();
        assert_eq!(plan.residencies[0] == Residency::Host, on_host > 0);
        for unit in rig.files.order() {
            let held = rig.streamer.acquire(unit, patiently()).expect("a unit");
            assert!(rig.is_right(&held).expect("no event"));
            assert_eq!(
                kvtier_testkit::fixtures::stream_rig::on_device(&held),
                !plan.on_processor[unit as usize]
            );
            rig.streamer.release(&held, None).expect("given back");
        }
    }
    rig.closed();
}

#[test]
fn pending_rebalance_survives_the_next_one() {
    let files = Files::even("forgotten", 22, 16 * 4096);
    let all = files.all_bytes();
    let runtime = runtime("");
    let budget = budget(&runtime, PLENTY);
    let real = files.real();
    let opts = Opts { budget: Some(budget.clone()), ..with_host(all * 8 / 10) };
    let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
    rig.streamer.load(soon()).expect("residents");
    let before = rig.streamer.plan();
    let residents: Vec<u32> =
        (0..22).filter(|&unit| before.residencies[unit as usize] == Residency::Host).collect();
    let held: Vec<_> =
        residents.iter().map(|&u| rig.streamer.acquire(u, patiently()).expect("one")).collect();
    let (less, slightly) = (all / 3, all / 3 + 4096);
    let plan = rig.streamer.rebalance(Some(less), None, None).expect("less");
    assert!(plan.residencies != before.residencies);
    let kept = rig.streamer.rebalance(Some(slightly), None, None).expect("the same");
    assert!(plan.residencies == kept.residencies);
    // Limits of a plan persist unless they are given again.
    let same = rig.streamer.rebalance(None, None, Some(7)).expect("the same");
    assert!(plan.residencies == same.residencies);
    for held in &held {
        assert!(rig.is_right(held).expect("no event"));
        rig.streamer.release(held, None).expect("given back");
    }
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(used(&budget, Tier::Host), plan.host_bytes);
    // There and back while in use: it is at home again, without being read.
    let held: Vec<_> = (0..22)
        .filter(|&unit| plan.residencies[unit as usize] == Residency::Host)
        .map(|unit| rig.streamer.acquire(unit, patiently()).expect("one"))
        .collect();
    drop(rig.streamer.rebalance(Some(all / 5), None, None).expect("less"));
    let back = rig.streamer.rebalance(Some(slightly), None, None).expect("more");
    held.iter().for_each(|held| rig.streamer.release(held, None).expect("given back"));
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(used(&budget, Tier::Host), back.host_bytes);
    rig.pass(patiently()).expect("a pass");
    rig.closed();
    assert_eq!(used(&budget, Tier::Host), 0);
}
