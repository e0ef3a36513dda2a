//! Extreme and invalid numbers.

use proptest::prelude::*;

use crate::plan::setup::{MIB, Setup, check, layer, unit};
use kvtier::base::status::Status;
use kvtier::stream::plan::{ComputeLocation, Links, Mode};
use kvtier::stream::units::{MAX_UNITS, NONE, Role};

#[test]
fn invalid_plan_requests_are_rejected_with_a_reason() {
    let good = Setup::layers(&[MIB; 4], 3 * MIB, 64 * MIB);
    let refused = |change: &dyn Fn(&mut Setup)| {
        let mut setup = good.clone();
        change(&mut setup);
        let error = setup.error();
        assert!(error.message().len() > 20, "{error}");
        error.status()
    };
    assert_eq!(refused(&|s| s.units.units.clear()), Status::Invalid);
    assert_eq!(refused(&|s| s.units.units[0].image_bytes = u64::MAX), Status::Limit);
    assert_eq!(refused(&|s| s.units.units = vec![layer(0, 1); MAX_UNITS + 1]), Status::Limit);
    assert_eq!(refused(&|s| s.plan_options.slots = u32::MAX), Status::Limit);
    assert_eq!(refused(&|s| s.plan_options.chunk_bytes = u64::MAX), Status::Limit);
    assert_eq!(refused(&|s| s.plan_options.staging_bytes = u64::MAX), Status::Budget);
    assert_eq!(refused(&|s| s.plan_options.processor_layers = 5), Status::Invalid);
    assert_eq!(refused(&|s| s.plan_options.kv_bytes = Some(u64::MAX)), Status::Budget);
    assert_eq!(refused(&|s| s.plan_options.device_ceiling_bytes = Some(0)), Status::Budget);
    assert_eq!(refused(&|s| s.plan_options.host_ceiling_bytes = Some(0)), Status::Budget);
    let host = |s: &mut Setup| {
        s.plan_options.compute = Some(ComputeLocation::Host);
        s.plan_options.processor_layers = 1;
    };
    assert_eq!(refused(&host), Status::Invalid);
    let huge = |s: &mut Setup| {
        s.facts.layers = u32::MAX;
        (s.facts.window, s.facts.windowed_layers) = (u32::MAX, u32::MAX);
        s.facts.kv_heads = u32::MAX;
        s.facts.key_dim = u32::MAX;
        s.plan_options.context = u32::MAX;
        s.plan_options.sequences = u32::MAX;
    };
    assert_eq!(refused(&huge), Status::Limit);
}

#[test]
fn empty_units_are_resident_at_no_cost() {
    let plan = Setup::layers(&[0; 5], 1, 64 * MIB).plan();
    assert_eq!((plan.slots, plan.device_bytes), (0, 0));
    let setup = Setup::layers(&[0, MIB, 0, MIB, MIB], 2 * MIB, 64 * MIB);
    check(&setup, &setup.plan(), 2 * MIB, 64 * MIB);
}

#[test]
fn reported_missing_bytes_are_sufficient() {
    for compute in [ComputeLocation::Device, ComputeLocation::Host] {
        for (free, kv, workspace) in [(0, 0, 0), (MIB, 0, 0), (MIB, 40 * MIB, 0), (9, 7 * MIB, MIB)]
        {
            let mut setup = Setup::layers(&[MIB; 6], free, 64 * MIB);
            setup.plan_options.compute = Some(compute);
            (setup.plan_options.kv_bytes, setup.plan_options.workspace_bytes) =
                (Some(kv), workspace);
            (setup.plan_options.device_ceiling_bytes, setup.plan_options.host_ceiling_bytes) =
                (None, None);
            setup.plan_options.host_reserve_bytes = Some(3 * MIB);
            if compute == ComputeLocation::Host {
                setup.memory.host_free_bytes = free;
            }
            let words = setup.error().message().to_string();
            let more = words.split("free ").nth(1).and_then(|rest| rest.split(' ').next());
            let more: u64 = more.and_then(|number| number.parse().ok()).expect(&words);
            let place = match compute {
                ComputeLocation::Device => &mut setup.memory.device_free_bytes,
                ComputeLocation::Host => &mut setup.memory.host_free_bytes,
            };
            *place += more - 1;
            assert!(setup.error().message().contains("free 1 more"), "{words}");
            match compute {
                ComputeLocation::Device => setup.memory.device_free_bytes += 1,
                ComputeLocation::Host => setup.memory.host_free_bytes += 1,
            }
            setup.plan();
        }
    }
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..5,
        1u64..(1 << 20),
        any::<u64>(),
        Just(u64::MAX),
        (0u32..63).prop_map(|n| 1 << n)
    ]
}

fn any_role() -> impl Strategy<Value = Role> {
    prop_oneof![
        Just(Role::Embedding),
        Just(Role::Layer),
        Just(Role::Expert),
        Just(Role::Norm),
        Just(Role::Head),
        Just(Role::Other),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_requests_never_panic_nor_exceed_budgets(
        units in prop::collection::vec((any_role(), any_number(), 0u32..4), 0..30),
        memory in prop::array::uniform4(any_number()),
        links in prop::array::uniform3(any_number()),
        some in prop::array::uniform8(any_number()),
        ring in any::<bool>(), shrinks in any::<bool>(), compute in 0usize..3, slots in 0u32..5, processor in 0u32..3, used in 0u32..4,
    ) {
        let mut setup = Setup::of(Vec::new());
        for (i, (role, bytes, layer)) in units.into_iter().enumerate() {
            let name = format!("u\u{1b} {i}");
            // Mostly of a size that is allowed.
            let bytes = if i % 7 == 6 { bytes } else { bytes % (1 << 40) };
            setup.units.units.push(unit(name, role, layer, NONE, bytes));
        }
        setup.memory.device_free_bytes = memory[0];
        setup.memory.host_free_bytes = memory[1];
        setup.memory.host_total_bytes = memory[2];
        setup.memory.lockable_bytes = memory[3];
        setup.links = Links { disk: links[0], device: links[1], processor: links[2] };
        let plan_options = &mut setup.plan_options;
        plan_options.shrinks = shrinks;
        plan_options.mode = if ring { Mode::Ring } else { Mode::Tiered };
        plan_options.compute = [None, Some(ComputeLocation::Host), Some(ComputeLocation::Device)][compute];
        plan_options.slots = slots;
        plan_options.processor_layers = processor;
        plan_options.host_reserve_bytes = Some(some[0]).filter(|n| n % 2 == 0);
        plan_options.device_safety_bytes = Some(some[1]).filter(|n| n % 2 == 0);
        plan_options.kv_bytes = Some(some[2]).filter(|n| n % 2 == 0);
        plan_options.context = some[3] as u32;
        plan_options.workspace_bytes = some[4] % 1024;
        plan_options.chunk_bytes = some[5] % (1 << 31);
        plan_options.expert_slots = Some(some[6] as u32).filter(|n| n % 2 == 0);
        plan_options.layer_compute_ns = some[7];
        setup.facts.layers = some[4] as u32;
        setup.facts.kv_heads = some[5] as u32 % 64;
        setup.facts.key_dim = some[6] as u32 % 512;
        setup.facts.experts_used = used;
        (setup.facts.window, setup.facts.windowed_layers) = (some[7] as u32, some[3] as u32 % 99);
        if let Ok(plan) = setup.make() {
            check(&setup, &plan, setup.memory.device_free_bytes, setup.memory.host_free_bytes);
            let (text, json) = (plan.text(&setup.inputs()), plan.json(&setup.inputs()));
            let raw = |text: &str| text.contains('\u{1b}');
            prop_assert!(!raw(&text) && !raw(&json));
            let again = plan.rebalance(&setup.inputs()).unwrap();
            check(&setup, &again, setup.memory.device_free_bytes, setup.memory.host_free_bytes);
            prop_assert_eq!(again.residencies == plan.residencies, true);
        }
    }
}
