//! A streamer on a shared budget: memory of residents and slots is reclaimed by others, down to the
//! floor, and restored later.

use std::sync::Arc;

use kvtier::base::account::Account;
use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::runtime::Runtime;
use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::device::{Copy, Device, Direction, Stream};
use kvtier::stream::plan::{ComputeLocation, Plan, PlanOptions, Residency};
use kvtier::stream::streamer::Opts;
use kvtier::stream::units::Role;
use kvtier_testkit::model_files::simulated::SimModelFilesOpts;

use kvtier_lab::reference::numbers::Random;
use kvtier_testkit::fixtures::stream_rig::{
    Files, MIB, Rig, dense, device, experts, large, patiently, runtime, soon, with_device,
    with_host,
};

const PLENTY: u64 = 1 << 30;

/// Another owner whose memory grows, as a store's does.
struct Other {
    budget: Arc<Budget>,
    account: Arc<Account>,
    tier: Tier,
    bytes: u64,
}

impl Other {
    fn new(runtime: &Runtime, tier: Tier, limit: u64) -> Other {
        let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
        opts.limits = opts.limits.map(|_| Some(PLENTY));
        opts.limits[tier as usize] = Some(limit);
        let budget = Budget::open(runtime.core(), &opts).expect("a budget");
        let account = budget.account("store", 1, None).expect("an account");
        Other { budget, account, tier, bytes: 0 }
    }

    fn ask(&mut self, bytes: u64, deadline_ns: u64) -> OpRef {
        let opts = OpOpts { deadline_ns, ..OpOpts::default() };
        self.account.reserve_later(self.tier, bytes, &opts).expect("asked")
    }

    /// Grows until the streamer has so many bytes, while passes go on; one unit is in use
    /// when it begins.
    fn leave(&mut self, rig: &Rig, bytes: u64, in_use: u32) {
        let more = self.budget.usage(self.tier).limit_bytes - bytes - self.bytes;
        let held = rig.streamer.acquire(in_use, patiently()).expect("a unit");
        let op = self.ask(more, soon());
        rig.pass(patiently()).expect("a pass");
        assert!(rig.is_right(&held).expect("no event"));
        rig.streamer.release(&held, None).expect("given back");
        assert_eq!(end(&op), Some(Status::Ok));
        self.bytes += more;
        rig.pass(patiently()).expect("a pass");
        let lane = self.budget.usage(self.tier);
        assert!(lane.reserved_bytes + lane.committed_bytes <= lane.limit_bytes);
    }

    fn give_back(&mut self) {
        self.account.commit(self.tier, self.bytes, 0).expect("reserved");
        self.bytes = 0;
    }

    /// Bytes of the streamer.
    fn streams(&self) -> u64 {
        let lane = self.budget.usage(self.tier);
        lane.reserved_bytes + lane.committed_bytes - self.bytes
    }
}

/// How an op ends.
fn end(op: &OpRef) -> Option<Status> {
    op.wait(RELEASED, soon()).expect("it ends");
    let status = op.info().status.and_then(Status::from_code);
    op.remove();
    status
}

fn takes(plan: &Plan) -> u64 {
    if plan.compute == ComputeLocation::Device { plan.device_bytes } else { plan.host_bytes }
}

fn floor(rig: &Rig) -> u64 {
    let floor = rig.streamer.plan().floor(&rig.files.units);
    if rig.device.is_some() { floor.device_bytes } else { floor.host_bytes }
}

/// Every unit, also the experts.
fn use_all(rig: &Rig) {
    (0..rig.files.units.units.len() as u32)
        .for_each(|unit| rig.use_unit(unit, patiently()).expect("a unit"));
}

/// From everything to the floor in steps, and to everything again.
fn there_and_back(rig: &Rig, other: &mut Other) {
    let all = rig.streamer.plan();
    let here = if rig.device.is_some() { Residency::Device } else { Residency::Host };
    let beside = |unit: usize| all.on_processor[unit];
    let stay =
        (0..all.residencies.len()).filter(|&unit| all.residencies[unit] == here || beside(unit));
    assert_eq!(stay.count(), all.residencies.len());
    rig.streamer.load(soon()).expect("residents");
    let (most, least) = (takes(&all), floor(rig));
    let largest = rig.files.units.units.iter().map(|unit| unit.image_bytes).max().expect("one");
    assert!(least + largest < most, "{least} of {most}");
    let count = all.residencies.len() as u32;
    for step in 1..=4 {
        other.leave(rig, most - (most - least) * step / 4, (step as u32 * 7) % count);
        use_all(rig);
        rig.streamer.load(soon()).expect("those who stay");
        assert_eq!(other.streams(), takes(&rig.streamer.plan()));
    }
    let small = rig.streamer.plan();
    assert_eq!((takes(&small), floor(rig)), (least, least));
    // No byte more, and who asks for it hears so.
    let late = other.ask(1, rig.runtime.core().clock().now_ns() + 20_000_000);
    assert_eq!(end(&late), Some(Status::Timeout));
    rig.pass(patiently()).expect("a pass");
    other.give_back();
    let (host, on_it) =
        (rig.device.is_none().then_some(PLENTY), rig.device.as_ref().map(|_| PLENTY));
    let back = rig.streamer.rebalance(host, on_it, None).expect("all");
    assert_eq!(back.residencies, all.residencies);
    rig.pass(patiently()).expect("a pass");
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(other.streams(), most);
    let read = rig.streamer.stats().read_bytes;
    use_all(rig);
    assert_eq!(rig.streamer.stats().read_bytes, read, "all is at home again");
}

#[test]
fn growing_store_reclaims_streamer_memory() {
    for in_place in [false, true] {
        for sizes in [dense(24), large(6), experts(5, 6)] {
            let name = format!("grows-{in_place}-{}-{}", sizes.layers, sizes.experts);
            let files = Files::new(&name, &sizes);
            let runtime = runtime("");
            let mut other = Other::new(&runtime, Tier::Host, files.all_bytes() * 3);
            let real = files.real();
            let budget = Some(other.budget.clone());
            let opts = Opts { in_place, budget, ..with_host(PLENTY) };
            let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
            for _ in 0..2 {
                there_and_back(&rig, &mut other);
            }
            rig.closed();
            assert_eq!(other.streams(), 0);
        }
    }
}

#[test]
fn growing_device_tier_reclaims_streamer_memory() {
    for (sizes, residencies) in [(dense(16), 0), (experts(4, 6), 0), (experts(4, 6), PLENTY)] {
        let files = Files::new(&format!("dgrows-{}-{residencies}", sizes.experts), &sizes);
        let runtime = runtime("");
        let mut other = Other::new(&runtime, Tier::Device, files.all_bytes() * 3);
        let device = device(SimulatedOpts::default());
        let real = files.real();
        let budget = Some(other.budget.clone());
        let opts = Opts { budget, ..with_device(device.clone(), PLENTY, residencies) };
        let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
        there_and_back(&rig, &mut other);
        rig.closed();
        assert_eq!((other.streams(), device.allocated_bytes()), (0, 0));
    }
}

/// Expert slots are reclaimed with the residents, down to those that a layer needs, and restored
/// later, wherever units are.
#[test]
fn expert_slots_are_reclaimed_and_restored() {
    const SLOTS: u32 = 17;
    for (on_device, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
        let files = Files::new(&format!("slots-{on_device}-{in_place}"), &experts(5, 6));
        let runtime = runtime("");
        let tier = if on_device { Tier::Device } else { Tier::Host };
        let mut other = Other::new(&runtime, tier, files.all_bytes() * 4);
        let simulated =
            device(SimulatedOpts { granularity_bytes: 4096, ..SimulatedOpts::default() });
        let opts = match on_device {
            true => with_device(simulated.clone(), PLENTY, 0),
            false => with_host(PLENTY),
        };
        let budget = Some(other.budget.clone());
        let mut opts = Opts { in_place, budget, ..opts };
        opts.plan_options.expert_slots = Some(SLOTS);
        let real = files.real();
        let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
        assert_eq!(rig.streamer.plan().expert_slots, SLOTS);
        for _ in 0..2 {
            there_and_back(&rig, &mut other);
            assert_eq!(rig.streamer.plan().expert_slots, SLOTS);
        }
        let most = takes(&rig.streamer.plan());
        other.leave(&rig, floor(&rig), 1);
        let least = rig.streamer.plan();
        assert!(least.expert_slots < 5 && least.expert_slots == least.expert_slots_least);
        // Some come back: layers first, which every pass reads.
        let some = takes(&least) + (most - takes(&least)) / 2;
        other.give_back();
        let (host, there) = if on_device { (None, Some(some)) } else { (Some(some), None) };
        let plan = rig.streamer.rebalance(host, there, None).expect("a plan");
        rig.streamer.load(soon()).expect("residents");
        use_all(&rig);
        let here = if on_device { Residency::Device } else { Residency::Host };
        let units = rig.files.units.units.iter().zip(&plan.residencies);
        assert!(units.filter(|(unit, _)| unit.role == Role::Layer).all(|(_, home)| *home == here));
        assert_eq!(other.streams(), takes(&plan));
        rig.closed();
        assert_eq!((other.streams(), simulated.allocated_bytes()), (0, 0));
    }
}

#[test]
fn slot_in_use_is_freed_after_its_lease() {
    for in_place in [false, true] {
        let files = Files::new(&format!("slot-{in_place}"), &experts(4, 8));
        let all = files.all_bytes();
        let runtime = runtime("");
        let other = Other::new(&runtime, Tier::Host, all * 4);
        let real = files.real();
        let experts = files.experts_of(1);
        let mut opts = Opts { in_place, budget: Some(other.budget.clone()), ..with_host(all / 2) };
        opts.plan_options.expert_slots = Some(8);
        let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
        let away = experts
            .iter()
            .filter(|&&unit| rig.streamer.plan().residencies[unit as usize] == Residency::File);
        let held: Vec<_> =
            away.map(|&unit| rig.streamer.acquire(unit, patiently()).expect("a slot")).collect();
        assert!(held.len() > 4, "{}", held.len());
        let least = floor(&rig);
        let plan = rig.streamer.rebalance(Some(least), None, None).expect("the floor");
        assert!(plan.expert_slots < 5 && takes(&plan) == least);
        let soonest = rig.runtime.core().clock().now_ns() + 20_000_000;
        let early = rig.streamer.load(soonest).expect_err("slots are in use");
        assert_eq!(early.status(), Status::Timeout);
        assert!(other.streams() > least);
        for one in &held {
            assert!(rig.is_right(one).expect("no event"));
            rig.streamer.release(one, None).expect("given back");
        }
        rig.streamer.load(soon()).expect("they have left");
        assert_eq!(other.streams(), least);
        if in_place {
            // Released memory reads as zeros.
            let is_gone = |one: &&kvtier::stream::streamer::UnitLease| {
                let (address, bytes) = rig.streamer.fixed(one.lease.unit).expect("in place");
                // SAFETY: addresses in place stay mapped; no thread writes while no call is made.
                let image =
                    unsafe { std::slice::from_raw_parts(address as *const u8, bytes as usize) };
                image.iter().all(|&byte| byte == 0)
            };
            let gone = held.iter().filter(is_gone).count();
            assert!(gone >= held.len() - plan.expert_slots as usize, "{gone} of {}", held.len());
        }
        use_all(&rig);
        rig.closed();
    }
}

#[test]
fn memory_that_is_not_returned_is_not_counted() {
    let files = Files::even("refused", 16, 16 * 4096);
    let all = files.all_bytes();
    let runtime = runtime("");
    let mut other = Other::new(&runtime, Tier::Host, all * 3 / 2);
    let real = files.real();
    let opts = Opts { budget: Some(other.budget.clone()), ..with_host(PLENTY) };
    let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
    let least = floor(&rig);
    other.leave(&rig, all / 2, 3);
    // Allowed, but another owner has that memory.
    rig.streamer.rebalance(Some(PLENTY), None, None).expect("a plan");
    rig.streamer.load(soon()).expect("those that have room");
    assert_eq!(takes(&rig.streamer.plan()), other.streams());
    rig.pass(patiently()).expect("a pass");
    // And what it has can be given back as before.
    other.leave(&rig, least, 5);
    assert_eq!(other.streams(), least);
    other.give_back();
    rig.streamer.rebalance(None, None, None).expect("a plan");
    rig.streamer.load(soon()).expect("residents");
    rig.closed();
}

#[test]
fn resident_set_shrinks_to_the_floor_and_back_under_use() {
    for in_place in [false, true] {
        for sizes in [dense(20), experts(5, 5)] {
            let mut files = Files::new(&format!("sway-{in_place}-{}", sizes.experts), &sizes);
            let slow =
                SimModelFilesOpts { latency_ns: 100_000, jitter_percent: 50, ..Default::default() };
            let simulated = files.simulate(slow);
            let plan_options = PlanOptions { shrinks: true, ..with_host(PLENTY).plan_options };
            let opts = Opts { in_place, plan_options, ..with_host(PLENTY) };
            let rig = Rig::open_on(runtime(""), simulated, files, opts).expect("a streamer");
            let (most, least) = (takes(&rig.streamer.plan()), floor(&rig));
            let slots = rig.streamer.plan().slots;
            assert!(slots == 2 && least < most);
            let mut random = Random::new(11);
            let count = rig.files.units.units.len() as u32;
            let mut held = Vec::new();
            for step in 0..50 {
                let wished = least + (most - least) * u64::from(random.below(5)) / 4;
                let plan = rig.streamer.rebalance(Some(wished), None, None).expect("a plan");
                assert!(plan.host_bytes <= wished && plan.slots == slots);
                match rig.streamer.acquire(random.below(count), patiently()) {
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
                    use_all(&rig);
                }
            }
            for one in held.drain(..) {
                rig.streamer.release(&one, None).expect("given back");
            }
            rig.streamer.rebalance(Some(PLENTY), None, None).expect("all");
            rig.streamer.load(soon()).expect("residents");
            let residencies = rig.streamer.plan().residencies;
            assert!(residencies.iter().all(|home| *home == Residency::Host));
            let read = rig.streamer.stats().read_bytes;
            use_all(&rig);
            assert_eq!(rig.streamer.stats().read_bytes, read);
            rig.closed();
        }
    }
}

#[test]
fn evicted_residents_are_not_leased() {
    for in_place in [false, true] {
        let mut files = Files::even(&format!("raced-{in_place}"), 9, 4096);
        let simulated = files.simulate(SimModelFilesOpts::default());
        let plan_options =
            PlanOptions { shrinks: true, slots: 4, ..with_host(PLENTY).plan_options };
        let opts = Opts { in_place, plan_options, ..with_host(PLENTY) };
        let rig = Rig::open_on(runtime(""), simulated, files, opts).expect("a streamer");
        let (least, rig) = (floor(&rig), &rig);
        std::thread::scope(|scope| {
            // One thread acquires a unit that another releases, while the unit is to be evicted.
            for _ in 0..3 {
                scope.spawn(move || {
                    for _ in 0..2_000 {
                        rig.use_unit(0, patiently()).expect("a unit");
                    }
                });
            }
            scope.spawn(move || {
                for step in 0..400 {
                    let bytes = if step % 2 == 0 { least } else { PLENTY };
                    rig.streamer.rebalance(Some(bytes), None, None).expect("a plan");
                    std::thread::yield_now();
                }
            });
        });
        rig.streamer.load(soon()).expect("residents");
        use_all(rig);
        rig.closed();
    }
}

#[test]
fn fitting_model_has_no_slots_unless_it_may_shrink() {
    let files = Files::even("plain", 8, MIB);
    let all = files.all_bytes();
    let rig = Rig::open(files, with_host(PLENTY)).expect("a streamer");
    let plan = rig.streamer.plan();
    assert_eq!((plan.slots, plan.host_bytes), (0, all));
    let error = rig.streamer.rebalance(Some(all / 2), None, None).expect_err("no slots");
    assert!(error.status() == Status::Budget && error.message().contains("`shrinks`"), "{error}");
    rig.pass(patiently()).expect("a pass");
    rig.closed();
}

/// A resident that is being evicted is released with an event. It is freed at the event without
/// another call.
#[test]
fn resident_is_freed_when_its_event_completes() {
    let files = Files::new("late-event", &dense(4));
    let device = device(SimulatedOpts::default());
    let mut opts = with_device(device.clone(), PLENTY, 0);
    opts.plan_options.shrinks = true;
    let rig = Rig::open(files, opts).expect("a streamer");
    rig.streamer.load(soon()).expect("residents");
    let (least, before) = (floor(&rig), device.allocated_bytes());
    let plan = rig.streamer.plan();
    let home =
        plan.residencies.iter().position(|&home| home == Residency::Device).expect("one") as u32;
    let held = rig.streamer.acquire(home, patiently()).expect("a unit");
    let event = device.create_user_event().expect("one");
    rig.streamer.release(&held, Some(event)).expect("given back");
    rig.streamer.rebalance(None, Some(least), None).expect("a plan");
    let soonest = rig.runtime.core().clock().now_ns() + 50_000_000;
    let early = rig.streamer.load(soonest).expect_err("the device reads it still");
    assert_eq!(early.status(), Status::Timeout);
    device.signal_event(event).expect("a promise");
    rig.streamer.load(soon()).expect("it has left");
    assert!(device.allocated_bytes() < before);
    rig.closed();
}

/// The device computes with a slot after its release.
#[test]
fn slot_is_freed_when_its_event_completes() {
    for in_place in [false, true] {
        let files = Files::new(&format!("slot-event-{in_place}"), &experts(4, 8));
        let device = device(SimulatedOpts { granularity_bytes: 4096, ..SimulatedOpts::default() });
        let mut opts = with_device(device.clone(), files.all_bytes() / 2, 0);
        (opts.in_place, opts.plan_options.shrinks) = (in_place, true);
        opts.plan_options.expert_slots = Some(8);
        let rig = Rig::open(files, opts).expect("a streamer");
        rig.streamer.load(soon()).expect("residents");
        let (least, residencies) = (floor(&rig), rig.streamer.plan().residencies);
        let (away, mut events) =
            (|unit: &u32| residencies[*unit as usize] == Residency::File, Vec::new());
        let of_layer = rig.files.experts_of(2).into_iter().filter(away);
        let held: Vec<_> =
            of_layer.map(|unit| rig.streamer.acquire(unit, patiently()).expect("a slot")).collect();
        assert!(held.len() > 4, "{}", held.len());
        for one in &held {
            let event = device.create_user_event().expect("one");
            rig.streamer.release(one, Some(event)).expect("given back");
            events.push(event);
        }
        rig.streamer.rebalance(None, Some(least), None).expect("a plan");
        let soonest = rig.runtime.core().clock().now_ns() + 20_000_000;
        let early = rig.streamer.load(soonest).expect_err("the device reads them still");
        assert_eq!(early.status(), Status::Timeout);
        assert!(device.allocated_bytes() > least);
        events.into_iter().for_each(|event| device.signal_event(event).expect("a promise"));
        rig.streamer.load(soon()).expect("they have left");
        assert_eq!(device.allocated_bytes(), least);
        use_all(&rig);
        rig.closed();
    }
}

/// Memory that the device reports as in use is not free, and stays charged.
#[test]
fn memory_kept_by_the_device_stays_charged() {
    let files = Files::new("busy", &dense(4));
    let runtime = runtime("");
    let other = Other::new(&runtime, Tier::Device, files.all_bytes() * 3);
    let device = device(SimulatedOpts::default());
    let real = files.real();
    let budget = Some(other.budget.clone());
    let opts = Opts { budget, ..with_device(device.clone(), PLENTY, 0) };
    let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
    rig.streamer.load(soon()).expect("residents");
    assert_eq!(other.streams(), device.allocated_bytes());
    let least = floor(&rig);
    let residencies = rig.streamer.plan().residencies;
    let home = residencies.iter().position(|&home| home == Residency::Device).expect("one");
    // An engine that releases a unit too early.
    let held = rig.streamer.acquire(home as u32, patiently()).expect("a unit");
    let promise = device.create_user_event().expect("one");
    let mut out = vec![0u8; held.bytes as usize];
    let (to, bytes) = (out.as_mut_ptr(), held.bytes);
    let copied =
        Copy::bytes(to, held.address, bytes, Direction::Gather, held.memory).expect("sound");
    // SAFETY: the device refuses to free what a batch uses, and this waits for the batch.
    let event = unsafe { device.submit(Stream(1), Some(promise), &mut [copied]) }.expect("taken");
    rig.streamer.release(&held, None).expect("given back");
    rig.streamer.rebalance(None, Some(least), None).expect("a plan");
    rig.streamer.load(soon()).expect("those who stay");
    assert_eq!(rig.streamer.plan().residencies[home], Residency::File);
    assert_eq!(other.streams(), device.allocated_bytes());
    assert_eq!(other.streams(), takes(&rig.streamer.plan()) + bytes);
    device.signal_event(promise).expect("a promise");
    device.wait(event, soon()).expect("copied");
    rig.closed();
}
