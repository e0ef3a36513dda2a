//! Units in place take whole mapping units of the device: the totals of plans are counted again.

use kvtier::stream::plan::{ComputeLocation, Residency};
use kvtier::stream::units::{NONE, Role, Unit};
use proptest::prelude::*;

use crate::plan::setup::{MIB, Setup, check, layer, unit};

const GRANULARITY: u64 = 2 * MIB;

/// Layers, an embedding and a head, and experts of each layer.
fn model(sizes: &[u64], experts: usize, expert_bytes: u64) -> Vec<Unit> {
    let mut all = vec![unit("embedding".into(), Role::Embedding, NONE, NONE, 3 * MIB + 4096)];
    for (i, &bytes) in sizes.iter().enumerate() {
        all.push(layer(i, bytes));
        let of = |e: usize| {
            unit(format!("expert {e} of {i}"), Role::Expert, i as u32, e as u32, expert_bytes)
        };
        all.extend((0..experts).map(of));
    }
    all.push(unit("head".into(), Role::Head, NONE, NONE, 5 * MIB));
    all
}

#[test]
fn rounding_loss_is_reported() {
    let mut setup = Setup::layers(&[GRANULARITY + 4096; 5], 100 * GRANULARITY, 64 * MIB);
    setup.plan_options.compute = Some(ComputeLocation::Device);
    let loose = setup.plan();
    assert!(!setup.text(&loose).contains("device granules"));
    setup.plan_options.device_granularity_bytes = GRANULARITY;
    let plan = setup.plan();
    assert_eq!(
        (loose.device_bytes, plan.device_bytes),
        (5 * (GRANULARITY + 4096), 10 * GRANULARITY)
    );
    let figure = plan.figures.iter().find(|figure| figure.name == "device granules");
    assert_eq!(figure.expect("named").bytes, 5 * (GRANULARITY - 4096));
    assert!(setup.text(&plan).contains("whole pieces of 2.00 MiB"));
    // Two slots and a home, of two grains each.
    setup.room(6 * GRANULARITY + 1, 64 * MIB);
    let plan = setup.plan();
    assert_eq!(
        (plan.slots, plan.slot_bytes, plan.device_bytes),
        (2, 2 * GRANULARITY, 6 * GRANULARITY)
    );
    setup.room(4 * GRANULARITY - 1, 64 * MIB);
    assert!(setup.error().message().contains(&(4 * GRANULARITY).to_string()));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn totals_count_whole_mapping_units(
        sizes in prop::collection::vec(1u64..900, 1..12),
        (experts, expert_size) in (0usize..5, 1u64..300),
        (share, next) in (10u64..400, 10u64..400),
        grain in prop_oneof![Just(4096u64), Just(65_536), Just(GRANULARITY)],
        (shrinks, on_host) in any::<(bool, bool)>(),
    ) {
        let sizes: Vec<u64> = sizes.iter().map(|size| size * 8192).collect();
        let units = model(&sizes, experts, expert_size * 4096);
        let total: u64 = units.iter().map(|unit| unit.image_bytes.next_multiple_of(grain)).sum();
        let mut setup = Setup::of(units);
        setup.facts.experts_used = 1;
        let compute = if on_host { ComputeLocation::Host } else { ComputeLocation::Device };
        (setup.plan_options.compute, setup.plan_options.shrinks) = (Some(compute), shrinks);
        setup.plan_options.chunk_bytes = MIB;
        let room = |share| match total * share / 100 {
            bytes if on_host => (0, bytes),
            bytes => (bytes, 30 * MIB),
        };
        setup.room(room(share).0, room(share).1);
        let loose = setup.make();
        setup.plan_options.device_granularity_bytes = grain;
        let Ok(plan) = setup.make() else { return Ok(()) };
        check(&setup, &plan, room(share).0, room(share).1);
        if on_host {
            // It is of no account there.
            let loose = loose.unwrap();
            prop_assert_eq!((loose.residencies, loose.host_bytes), (plan.residencies, plan.host_bytes));
            return Ok(());
        }
        for bytes in [plan.device_bytes, plan.slot_bytes, plan.expert_slot_bytes] {
            prop_assert_eq!(bytes % grain, 0);
        }
        prop_assert_eq!(plan.footprint_bytes(1, Residency::Device), grain);
        setup.room(room(next).0, room(next).1);
        if let Ok(moved) = plan.rebalance(&setup.inputs()) {
            check(&setup, &moved, room(next).0, room(next).1);
        }
    }
}
