//! Units in place on a simulated device: their addresses never change, only resident units have
//! memory, and access to others is detected.

use std::sync::Arc;

use kvtier::base::budget::Tier;
use kvtier::base::status::{Result, Status};
use kvtier::device::host::Host;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, Direction, Memory, Stream};
use kvtier::stream::plan::{Mode, PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts};

use crate::budgets::{budget, used};
use kvtier_testkit::fixtures::stream_rig::{
    Files, MIB, Rig, dense, device, experts, large, patiently, runtime, soon, status, with_device,
};

const GRANULARITY: u64 = 64 << 10;

fn with_granularity(opts: SimulatedOpts) -> Arc<Simulated> {
    device(SimulatedOpts { granularity_bytes: GRANULARITY, ..opts })
}

/// In place, with so many bytes of the device, and of host memory beside staging.
fn in_place(device: Arc<Simulated>, bytes: u64, residencies: u64) -> Opts {
    Opts { in_place: true, ..with_device(device, bytes, residencies) }
}

/// The addresses of all units.
fn addresses(rig: &Rig) -> Vec<u64> {
    let of = |unit| rig.streamer.fixed(unit).expect("in place").0;
    (0..rig.files.units.units.len() as u32).map(of).collect()
}

/// A pass in which the device computes with each unit after it was given back. All of them are
/// where they always are.
fn pass(rig: &Rig, how: AcquireOpts, at: &[u64]) -> Result<()> {
    rig.streamer.pass_begin()?;
    let experts = (0..8).flat_map(|layer| rig.files.experts_of(layer));
    let mut under_way = Vec::new();
    for unit in rig.files.order().into_iter().chain(experts) {
        let held = rig.streamer.acquire(unit, how)?;
        assert_eq!(held.address, at[unit as usize], "unit {unit} is not where it was");
        if held.memory == Memory::Host {
            assert!(rig.is_right(&held)?, "unit {unit}");
            rig.streamer.release(&held, None)?;
            continue;
        }
        under_way.push(rig.compute_with(&held)?);
        if under_way.len() > 1 {
            under_way.remove(0).end()?;
        }
    }
    under_way.iter().try_for_each(|computing| computing.end())?;
    rig.streamer.pass_end()
}

/// Status of a copy from an address in a device's memory.
fn touch(device: &Simulated, address: u64) -> Status {
    let out = Box::leak(Box::new([0u8; 64]));
    let copy = Copy::bytes(out.as_mut_ptr(), address, 64, Direction::Gather, Memory::Device);
    // SAFETY: what is copied to stays; addresses without memory are refused.
    let put = unsafe { device.submit(Stream(2), None, &mut [copy.expect("arithmetic")]) };
    status(put.and_then(|event| device.wait(event, soon())))
}

#[test]
fn in_place_units_have_fixed_addresses_and_exact_bytes() {
    for (name, sizes) in [("dense", dense(16)), ("large", large(6)), ("experts", experts(4, 6))] {
        for (percent, on_host, mode) in [
            (40, 0, Mode::Tiered),
            (40, 80, Mode::Tiered),
            (50, 0, Mode::Ring),
            (400, 0, Mode::Tiered),
        ] {
            let files = Files::new(&format!("windows-{name}-{percent}-{mode:?}"), &sizes);
            let all = files.all_bytes().max(24 * GRANULARITY);
            let device =
                with_granularity(SimulatedOpts { seed: percent, ..SimulatedOpts::default() });
            let mut opts = in_place(device.clone(), all * percent / 100, all * on_host / 100);
            opts.plan_options.mode = mode;
            let rig = Rig::open(files, opts).expect("a streamer");
            let at = addresses(&rig);
            let (start, bytes) = rig.streamer.range().expect("in place");
            let inside =
                |unit: &u64| (start..start + bytes).contains(unit) && unit % GRANULARITY == 0;
            assert!(at.iter().filter(|unit| inside(unit)).count() + 1 >= at.len());
            for how in [patiently(), AcquireOpts { when_issued: true, ..patiently() }, patiently()]
            {
                pass(&rig, how, &at).expect("a pass");
            }
            assert_eq!(addresses(&rig), at);
            assert_eq!(device.allocated_bytes(), rig.streamer.plan().device_bytes);
            rig.closed();
            assert_eq!(device.allocated_bytes(), 0, "{name}, {percent} %");
        }
    }
}

/// There are fewer slots than units, so most units of the file have no memory.
#[test]
fn only_resident_units_have_memory() {
    let files = Files::even("windows-there", 8, 3 * GRANULARITY / 2);
    let device = with_granularity(SimulatedOpts::default());
    let mut opts = in_place(device.clone(), 2 * 2 * GRANULARITY, 0);
    opts.once = true;
    let rig = Rig::open(files, opts).expect("a streamer");
    let at = addresses(&rig);
    pass(&rig, patiently(), &at).expect("a pass");
    let held = rig.streamer.acquire(3, patiently()).expect("a unit");
    assert_eq!(touch(&device, held.address + 5), Status::Ok);
    let backed = at.iter().filter(|unit| touch(&device, **unit) == Status::Ok).count();
    assert!(backed <= 2, "{backed} units have memory, of which there is enough for 2");
    rig.streamer.release(&held, None).expect("had");
    rig.closed();
    // The addresses are given back, too.
    assert_eq!((device.allocated_bytes(), device.windows()), (0, 0));
}

#[test]
fn plans_and_budgets_count_whole_mapping_units() {
    for (percent, paid) in [(60, false), (60, true), (300, false), (300, true)] {
        let files = Files::even(&format!("windows-paid-{percent}-{paid}"), 9, GRANULARITY + 4096);
        let all = files.all_bytes();
        let runtime = runtime("");
        let budget = budget(&runtime, 1 << 30);
        let device = with_granularity(SimulatedOpts::default());
        let mut opts = in_place(device.clone(), 2 * all * percent / 100, 0);
        opts.budget = paid.then(|| budget.clone());
        let real = files.real();
        let rig = Rig::open_on(runtime, real, files, opts).expect("a streamer");
        let at = addresses(&rig);
        pass(&rig, patiently(), &at).expect("a pass");
        rig.streamer.load(soon()).expect("residents");
        let plan = rig.streamer.plan();
        let residencies =
            plan.residencies.iter().filter(|home| **home == Residency::Device).count() as u64;
        let slots = u64::from(plan.slots);
        // Whatever a unit has beyond a grain takes another.
        assert_eq!(
            plan.device_bytes,
            (residencies + slots) * 2 * GRANULARITY,
            "{residencies} homes, {slots} slots"
        );
        // A streamer that shares a budget keeps slots, so that it can give memory back.
        assert_eq!(slots > 0, percent < 100 || paid);
        let figure = plan.figures.iter().find(|figure| figure.name == "device granules");
        assert_eq!(figure.expect("a figure").bytes, residencies * (GRANULARITY - 4096));
        let text = rig.streamer.plan_text();
        assert!(text.contains("whole pieces of 64.00 KiB"), "{text}");
        assert_eq!(used(&budget, Tier::Device), if paid { plan.device_bytes } else { 0 });
        assert_eq!(device.allocated_bytes(), plan.device_bytes);
        rig.closed();
        assert_eq!((used(&budget, Tier::Device), device.allocated_bytes()), (0, 0));
    }
}

/// Residents change while the device computes.
#[test]
fn residents_change_while_addresses_stay() {
    for (sizes, residencies) in [(dense(16), 0), (large(6), 0), (experts(4, 6), 0), (dense(16), 1)]
    {
        let files = Files::new(&format!("windows-homes-{}-{residencies}", sizes.experts), &sizes);
        let units = files.units.units.len() as u64;
        let most: u64 = files.units.units.iter().map(|u| u.image_bytes + GRANULARITY).sum();
        let device =
            with_granularity(SimulatedOpts { latency_ns: 50_000, ..SimulatedOpts::default() });
        let mut opts = in_place(device.clone(), 2 * most, files.all_bytes() * residencies);
        opts.plan_options.shrinks = true;
        let rig = Rig::open(files, opts).expect("a streamer");
        let at = addresses(&rig);
        pass(&rig, patiently(), &at).expect("a pass");
        rig.streamer.load(soon()).expect("residents");
        let full = rig.streamer.plan().device_bytes;
        let mut least = full;
        for step in [9, 6, 3, 1, 5, 2, 10] {
            let bytes = Some(full * step / 10);
            let outcome = rig.streamer.rebalance(None, bytes, None);
            assert!([Status::Ok, Status::Budget].contains(&status(outcome)), "{step}");
            for when_issued in [false, true] {
                pass(&rig, AcquireOpts { when_issued, ..patiently() }, &at).expect("a pass");
            }
            rig.streamer.load(soon()).expect("residents");
            let plan = rig.streamer.plan();
            assert_eq!(device.allocated_bytes(), plan.device_bytes, "{units} units, {step}");
            least = least.min(plan.device_bytes);
        }
        assert!(least < full * 7 / 10, "{least} of {full}: nothing left");
        assert_eq!(rig.streamer.plan().device_bytes, full, "all is back");
        assert_eq!(addresses(&rig), at);
        rig.closed();
        assert_eq!(device.allocated_bytes(), 0);
    }
}

#[test]
fn invalid_in_place_options_are_rejected_with_a_reason() {
    let refused = |device: Arc<dyn Device>, plan_options: PlanOptions| {
        let files = Files::new("windows-refused", &dense(4));
        let opts = Opts { device: Some(device), plan_options, in_place: true, ..Opts::default() };
        Rig::open(files, opts).err().expect("refused")
    };
    let plan_options = || with_device(device(SimulatedOpts::default()), 64 * MIB, 0).plan_options;
    let without = device(SimulatedOpts { granularity_bytes: 0, ..SimulatedOpts::default() });
    let odd = device(SimulatedOpts { granularity_bytes: 5 << 30, ..SimulatedOpts::default() });
    let vast = device(SimulatedOpts { granularity_bytes: 8 << 30, ..SimulatedOpts::default() });
    let host = Arc::new(Host::default());
    let all: [(Arc<dyn Device>, Status); 4] = [
        (without, Status::Unsupported),
        (odd, Status::Invalid),
        (vast, Status::Unsupported),
        (host, Status::Unsupported),
    ];
    for (device, expected) in all {
        let error = refused(device, plan_options());
        assert_eq!(error.status(), expected, "{error}");
        assert!(error.message().contains("units in place"), "{error}");
    }
    // Too little for two slots in whole grains, though not in bytes.
    let files = Files::even("windows-small", 8, 4096);
    let small = with_granularity(SimulatedOpts::default());
    let error = Rig::open(files, in_place(small, 2 * GRANULARITY - 1, 0)).err().expect("refused");
    assert_eq!(error.status(), Status::Budget);
}

/// Units that the CPU uses have a fixed address.
#[test]
fn cpu_units_keep_their_address() {
    let files = Files::new("windows-processor", &dense(8));
    let all = files.all_bytes();
    let device = with_granularity(SimulatedOpts::default());
    let mut opts = in_place(device.clone(), 60 * GRANULARITY, 2 * all);
    opts.plan_options.processor_layers = 2;
    let rig = Rig::open(files, opts).expect("a streamer");
    let at = addresses(&rig);
    for _ in 0..2 {
        pass(&rig, patiently(), &at).expect("a pass");
    }
    let plan = rig.streamer.plan();
    assert!(plan.on_processor.iter().filter(|there| **there).count() >= 2);
    let outcome = rig.streamer.rebalance(Some(2 * MIB + 1), None, None);
    assert!([Status::Unsupported, Status::Budget].contains(&status(outcome)));
    pass(&rig, patiently(), &at).expect("all is as it was");
    rig.closed();
}

#[test]
fn lost_or_failing_device_fails_only_its_calls() {
    for (lost_at, fail_at) in [(1, vec![]), (7, vec![]), (40, vec![]), (0, vec![2, 5, 9, 17, 30])] {
        let files = Files::new(&format!("windows-lost-{lost_at}"), &dense(12));
        let failing = SimulatedOpts { lost_at, fail_at, ..SimulatedOpts::default() };
        let device = with_granularity(failing);
        let rig =
            Rig::open(files, in_place(device.clone(), 8 * GRANULARITY, 0)).expect("a streamer");
        let mut outcomes = Vec::new();
        for _ in 0..4 {
            for unit in rig.files.order() {
                outcomes.push(status(rig.use_unit(unit, patiently())));
            }
        }
        let expected = if lost_at > 0 { Status::Unavailable } else { Status::Io };
        assert!(outcomes.iter().all(|t| [Status::Ok, expected].contains(t)), "{outcomes:?}");
        assert!(outcomes.contains(&expected));
        rig.closed();
        assert_eq!((device.allocated_bytes(), device.windows()), (0, 0));
    }
}
