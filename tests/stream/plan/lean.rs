//! Plans that can shrink: from everything in memory to the floor, and back.

use proptest::prelude::*;

use crate::plan::setup::{GIB, MIB, Setup, check, layer, residencies, unit};
use kvtier::stream::plan::{ComputeLocation, Mode, Plan, Residency};
use kvtier::stream::units::{NONE, Role};

const PLENTY: u64 = 1 << 40;

/// The fewest bytes that have to be in memory at once, by trying who stays: the others pass
/// through slots as large as the largest of them.
fn least(sizes: &[u64], slots: u64) -> u64 {
    let of_mask = |mask: u32| {
        let (mut stay, mut largest) = (0, 0);
        for (i, &bytes) in sizes.iter().enumerate() {
            if mask >> i & 1 == 1 { stay += bytes } else { largest = largest.max(bytes) }
        }
        stay + slots * largest
    };
    (0u32..1 << sizes.len()).map(of_mask).min().unwrap_or(0)
}

/// Memory for weights where the engine computes, and plenty beside a device.
fn room(setup: &mut Setup, compute: ComputeLocation, bytes: u64) {
    setup.plan_options.compute = Some(compute);
    match compute {
        ComputeLocation::Host => setup.room(0, bytes),
        ComputeLocation::Device => setup.room(bytes, GIB),
    }
}

fn lean(sizes: &[u64], compute: ComputeLocation) -> Setup {
    let mut setup = Setup::layers(sizes, 0, 0);
    setup.plan_options.shrinks = true;
    room(&mut setup, compute, PLENTY);
    setup
}

/// Experts behind each layer, of the sizes given, two of which a token uses.
fn with_experts(setup: &mut Setup, sizes: &[u64]) {
    setup.facts.experts_used = 2;
    let layers = std::mem::take(&mut setup.units.units);
    for one in layers {
        let number = one.layer;
        setup.units.units.push(one);
        for (expert, &bytes) in (0..).zip(sizes) {
            let name = format!("layer {number} expert {expert}");
            setup.units.units.push(unit(name, Role::Expert, number, expert, bytes));
        }
    }
}

fn here(compute: ComputeLocation) -> Residency {
    if compute == ComputeLocation::Device { Residency::Device } else { Residency::Host }
}

fn takes(plan: &Plan) -> u64 {
    if plan.compute == ComputeLocation::Device { plan.device_bytes } else { plan.host_bytes }
}

fn floor(setup: &Setup, plan: &Plan) -> u64 {
    let floor = plan.floor(&setup.units);
    if plan.compute == ComputeLocation::Device { floor.device_bytes } else { floor.host_bytes }
}

fn slots(plan: &Plan) -> [u64; 4] {
    [plan.slots.into(), plan.slot_bytes, plan.expert_slots.into(), plan.expert_slot_bytes]
}

fn why<'a>(plan: &'a Plan, name: &str) -> Option<(u64, &'a str)> {
    let found = plan.figures.iter().find(|figure| figure.name == name)?;
    Some((found.bytes, &found.why))
}

#[test]
fn fitting_model_keeps_slots_and_shrinks_to_its_floor() {
    for compute in [ComputeLocation::Host, ComputeLocation::Device] {
        // Slots for the head would take 20, for layers with the head at home 2 x 2 + 10.
        let mut sizes = [2 * MIB; 12];
        sizes[11] = 10 * MIB;
        let mut setup = lean(&sizes, compute);
        let plan = setup.plan();
        assert!(plan.residencies.iter().all(|home| *home == here(compute)));
        assert_eq!((plan.slots, plan.slot_bytes), (2, 2 * MIB));
        assert_eq!((takes(&plan), floor(&setup, &plan)), (36 * MIB, 14 * MIB));
        let kept = why(&plan, "slots").expect("slots");
        assert!(kept.0 == 4 * MIB && kept.1.contains("though all have room"), "{kept:?}");
        let name = if compute == ComputeLocation::Device { "device floor" } else { "host floor" };
        let least = why(&plan, name).expect("a floor");
        assert!(least.0 == 14 * MIB && least.1.contains("shrink"), "{least:?}");
        assert!(plan.text(&setup.inputs()).contains(name));

        room(&mut setup, compute, 14 * MIB);
        let small = plan.rebalance(&setup.inputs()).expect("the floor");
        let stay = small.residencies.iter().filter(|home| **home == here(compute)).count();
        assert_eq!((takes(&small), stay, slots(&small)), (14 * MIB, 1, slots(&plan)));
        assert!(why(&small, "slots").expect("slots").1.contains("the size that"));
        room(&mut setup, compute, 14 * MIB - 1);
        assert!(plan.rebalance(&setup.inputs()).is_err() && setup.make().is_err());
        room(&mut setup, compute, 36 * MIB);
        let back = small.rebalance(&setup.inputs()).expect("all");
        assert_eq!(back.residencies, plan.residencies);
    }
}

#[test]
fn no_slots_are_kept_unless_shrinking_is_requested() {
    let mut setup = lean(&[MIB; 8], ComputeLocation::Host);
    setup.plan_options.shrinks = false;
    let plan = setup.plan();
    assert_eq!((plan.slots, takes(&plan), why(&plan, "host floor")), (0, 8 * MIB, None));
    // Nor where slots would take as much as all there is.
    for sizes in [&[MIB; 2][..], &[MIB], &[4 * MIB, 5 * MIB]] {
        let setup = lean(sizes, ComputeLocation::Host);
        let plan = setup.plan();
        let all = sizes.iter().sum::<u64>();
        assert_eq!((plan.slots, takes(&plan), floor(&setup, &plan)), (0, all, all), "{sizes:?}");
        assert!(why(&plan, "host floor").expect("a floor").1.contains("all of it"));
    }
    let mut ring = lean(&[MIB, 2 * MIB, MIB], ComputeLocation::Host);
    ring.plan_options.mode = Mode::Ring;
    let wished = ring.plan();
    ring.plan_options.shrinks = false;
    assert_eq!(ring.plan(), wished);
}

#[test]
fn equal_plans_prefer_smaller_slots() {
    // 2 x 4, or 4 + 2 x 2: as little, and 4 MiB more for units that stay.
    let mut setup = lean(&[4 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB], ComputeLocation::Host);
    assert_eq!(setup.plan().slot_bytes, 2 * MIB);
    room(&mut setup, ComputeLocation::Host, 16 * MIB);
    assert_eq!(residencies(&setup.plan()), (0, 5, 0));
}

#[test]
fn embedding_is_evicted_last() {
    let mut setup = lean(&[4 * MIB; 6], ComputeLocation::Host);
    let whole = |name: &str, role| unit(name.into(), role, NONE, NONE, 3 * MIB);
    setup.units.units.insert(0, whole("embedding", Role::Embedding));
    setup.units.units.push(whole("head", Role::Head));
    let plan = setup.plan();
    assert_eq!((takes(&plan), floor(&setup, &plan)), (38 * MIB, 8 * MIB));
    room(&mut setup, ComputeLocation::Host, 11 * MIB);
    let less = plan.rebalance(&setup.inputs()).expect("less");
    let stay: Vec<usize> = (0..8).filter(|&i| less.residencies[i] == Residency::Host).collect();
    assert_eq!((stay, slots(&less)), (vec![0], slots(&plan)));
    room(&mut setup, ComputeLocation::Host, 8 * MIB);
    let least = less.rebalance(&setup.inputs()).expect("least");
    assert_eq!((residencies(&least), slots(&least)), ((0, 0, 8), slots(&plan)));
    // Beside a device it is no matter of the device.
    room(&mut setup, ComputeLocation::Device, 36 * MIB);
    let plan = setup.plan();
    assert_eq!((residencies(&plan), floor(&setup, &plan)), ((7, 1, 0), 8 * MIB));
    let beside = plan.floor(&setup.units).host_bytes;
    assert_eq!(beside, 3 * MIB + plan.staging_bytes);
    setup.room(8 * MIB, beside);
    let least = plan.rebalance(&setup.inputs()).expect("least");
    assert_eq!((residencies(&least), slots(&least)), ((0, 1, 7), slots(&plan)));
}

#[test]
fn experts_are_evicted_one_by_one() {
    for compute in [ComputeLocation::Host, ComputeLocation::Device] {
        let mut setup = lean(&[2 * MIB; 6], compute);
        with_experts(&mut setup, &[MIB; 4]);
        let plan = setup.plan();
        assert!(plan.residencies.iter().all(|home| *home == here(compute)));
        assert_eq!(slots(&plan), [2, 2 * MIB, 3, MIB]);
        assert_eq!((takes(&plan), floor(&setup, &plan)), (43 * MIB, 7 * MIB));
        assert!(why(&plan, "expert slots").expect("slots").1.contains("though all have room"));
        let mut last = plan.clone();
        for less in 0..=36 {
            room(&mut setup, compute, (43 - less) * MIB);
            let next = last.rebalance(&setup.inputs()).expect("less");
            let stay = |role: Role| {
                let units = setup.units.units.iter().zip(&next.residencies);
                units.filter(|(u, home)| u.role == role && **home == here(compute)).count() as u64
            };
            // Experts leave before layers do, which each pass needs.
            assert_eq!(stay(Role::Layer), ((36 - less) / 2).min(6), "{less}");
            let experts = (36 - less).saturating_sub(stay(Role::Layer) * 2);
            assert_eq!((stay(Role::Expert), slots(&next)), (experts, slots(&plan)), "{less}");
            last = next;
        }
        room(&mut setup, compute, 43 * MIB);
        assert_eq!(last.rebalance(&setup.inputs()).expect("all").residencies, plan.residencies);
    }
    // As many slots as are said, as before; and none where they would take as much.
    let mut setup = lean(&[2 * MIB; 6], ComputeLocation::Host);
    with_experts(&mut setup, &[MIB; 4]);
    setup.plan_options.expert_slots = Some(9);
    assert_eq!(slots(&setup.plan()), [2, 2 * MIB, 9, MIB]);
    let mut setup = lean(&[2 * MIB; 1], ComputeLocation::Host);
    with_experts(&mut setup, &[MIB; 3]);
    assert_eq!((slots(&setup.plan())[2], residencies(&setup.plan())), (0, (0, 4, 0)));
}

#[test]
fn expert_slot_count_minimises_pass_time() {
    for compute in [ComputeLocation::Host, ComputeLocation::Device] {
        let mut setup = lean(&[2 * MIB; 6], compute);
        with_experts(&mut setup, &[MIB; 10]);
        setup.plan_options.expert_slots = Some(20);
        let plan = setup.plan();
        assert_eq!(slots(&plan), [2, 2 * MIB, 20, MIB]);
        assert_eq!((plan.expert_slots_least, plan.expert_slots_step), (3, 1));
        assert_eq!((takes(&plan), floor(&setup, &plan)), ((12 + 60 + 4 + 20) * MIB, 7 * MIB));
        let layers_at_home = |plan: &Plan, setup: &Setup| {
            let units = setup.units.units.iter().zip(&plan.residencies);
            units.filter(|(u, home)| u.role == Role::Layer && **home == here(compute)).count()
        };
        let mut last = plan.clone();
        for room_mib in (7..=96).rev() {
            room(&mut setup, compute, room_mib * MIB);
            let next = last.rebalance(&setup.inputs()).expect("not under the floor");
            assert!(takes(&next) <= room_mib * MIB && next.expert_slots >= 3, "{room_mib}");
            // A pass reads all layers, and of the experts two of ten: layers stay longest.
            let layers = ((room_mib - 7) / 2).min(6) as usize;
            assert_eq!(layers_at_home(&next, &setup), layers, "{room_mib}");
            // Where there is room for all layers and some slots, there are some.
            assert!(room_mib < 25 || next.expert_slots > 3, "{room_mib}: {}", next.expert_slots);
            let same = next.rebalance(&setup.inputs()).expect("the same");
            assert_eq!(
                (same.expert_slots, &same.residencies),
                (next.expert_slots, &next.residencies)
            );
            last = next;
        }
        assert_eq!((last.expert_slots, takes(&last)), (3, 7 * MIB));
        room(&mut setup, compute, 96 * MIB);
        let back = last.rebalance(&setup.inputs()).expect("all");
        assert_eq!((back.expert_slots, back.residencies), (20, plan.residencies));
    }
}

#[test]
fn expert_slots_change_stepwise() {
    let mut setup = lean(&[2 * MIB; 6], ComputeLocation::Host);
    with_experts(&mut setup, &[8 * MIB; 40]);
    setup.plan_options.expert_slots = Some(200);
    let plan = setup.plan();
    // 64 MiB at once.
    assert_eq!((plan.expert_slots_step, plan.expert_slots_least), (8, 8));
    assert_eq!(floor(&setup, &plan), (4 + 64) * MIB);
    for room_mib in [2000, 1000, 777, 300, 100, 68] {
        room(&mut setup, ComputeLocation::Host, room_mib * MIB);
        let less = plan.rebalance(&setup.inputs()).expect("not under the floor");
        assert!(takes(&less) <= room_mib * MIB, "{room_mib}");
        let count = less.expert_slots;
        assert!(count == 200 || count % 8 == 0 && count >= 8, "{room_mib}: {count}");
    }
}

#[test]
fn expert_misses_count_non_resident_experts() {
    let mut setup = lean(&[2 * MIB; 6], ComputeLocation::Host);
    with_experts(&mut setup, &[MIB; 4]);
    setup.links.disk = 1_000_000_000;
    // All layers, 3 slots, 18 of 24 experts: two of four are used, half of those that are not
    // at home are in a slot.
    room(&mut setup, ComputeLocation::Host, (16 + 3 + 18) * MIB);
    let forecast = setup.plan().forecast.expect("a forecast");
    assert_eq!(forecast.disk_bytes, 6 * MIB / 2 / 2);
}

fn seats() -> impl Strategy<Value = ComputeLocation> {
    prop_oneof![Just(ComputeLocation::Host), Just(ComputeLocation::Device)]
}

fn some_sizes() -> impl Strategy<Value = Vec<u64>> {
    let grains = prop_oneof![Just(0u64), 1u64..40, Just(20u64), 100u64..130];
    prop::collection::vec(grains.prop_map(|n| n * 4096), 1..11)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn floor_is_minimal_over_all_resident_sets(
        sizes in some_sizes(), slots in 1u32..5, compute in seats(), embedding in any::<bool>(),
    ) {
        let mut setup = lean(&sizes, compute);
        setup.plan_options.slots = slots;
        let mut counted = sizes.clone();
        if embedding {
            let whole = |name: &str, role| unit(name.into(), role, NONE, NONE, 25 * 4096);
            setup.units.units.insert(0, whole("embedding", Role::Embedding));
            setup.units.units.push(whole("head", Role::Head));
            // Beside a device it is in host memory.
            counted.extend(vec![25 * 4096; if compute == ComputeLocation::Device { 1 } else { 2 }]);
        }
        let plan = setup.plan();
        let best = least(&counted, slots.into());
        prop_assert_eq!(floor(&setup, &plan), best);
        room(&mut setup, compute, best);
        for made in [setup.make(), plan.rebalance(&setup.inputs())] {
            let made = made.expect("the floor");
            prop_assert_eq!(takes(&made), best);
            prop_assert_eq!((made.slots, made.slot_bytes), (plan.slots, plan.slot_bytes));
        }
        if best > 0 {
            room(&mut setup, compute, best - 1);
            prop_assert_eq!(setup.error().status().name(), "KVT_E_BUDGET");
            prop_assert!(plan.rebalance(&setup.inputs()).is_err());
        }
    }

    #[test]
    fn shrinking_to_the_floor_is_reversible(
        sizes in some_sizes(), experts in prop::collection::vec(1u64..20, 0..6),
        compute in seats(), shares in prop::collection::vec(0u64..=100, 1..8),
    ) {
        let mut setup = lean(&sizes, compute);
        let experts: Vec<u64> = experts.iter().map(|n| n * 4096).collect();
        with_experts(&mut setup, &experts);
        let plan = setup.plan();
        let all: u64 = setup.units.units.iter().map(|unit| unit.image_bytes).sum();
        prop_assert!(plan.residencies.iter().all(|home| *home == here(compute)));
        let (most, least) = (takes(&plan), floor(&setup, &plan));
        prop_assert!(least <= all, "slots that take more than they give: {least} of {all}");
        let mut last = plan.clone();
        for share in shares.into_iter().chain([0, 100]) {
            let bytes = least + (most - least) * share / 100;
            room(&mut setup, compute, bytes);
            let next = last.rebalance(&setup.inputs()).expect("between floor and all");
            let device = if compute == ComputeLocation::Device { bytes } else { 0 };
            check(&setup, &next, device, if compute == ComputeLocation::Device { GIB } else { bytes });
            prop_assert_eq!(slots(&next), slots(&plan));
            prop_assert_eq!(floor(&setup, &next), least);
            // The same budget moves nothing.
            prop_assert_eq!(&next.rebalance(&setup.inputs()).expect("the same").residencies, &next.residencies);
            last = next;
        }
        prop_assert_eq!(last.residencies, plan.residencies);
    }
}

#[test]
fn shrink_request_adds_slots_to_a_plan() {
    let mut setup = Setup::layers(&[MIB; 6], 0, 20 * MIB);
    let before = setup.plan();
    setup.plan_options.shrinks = true;
    let after = before.rebalance(&setup.inputs()).expect("a plan");
    assert_eq!((before.slots, after.slots, residencies(&after)), (0, 2, (0, 6, 0)));
    setup.units.units.push(layer(6, 0));
    assert!(after.rebalance(&setup.inputs()).is_err());
}
