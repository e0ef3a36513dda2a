//! Plans that are adapted to other budgets.

use proptest::prelude::*;

use crate::plan::setup::{MIB, Setup, check, residencies};
use kvtier::stream::plan::{Plan, Residency};

fn changed(a: &Plan, b: &Plan) -> usize {
    a.residencies.iter().zip(&b.residencies).filter(|(a, b)| a != b).count()
}

#[test]
fn less_memory_demotes_only_what_it_must() {
    let layer = 32 * MIB;
    let mut setup = Setup::layers(&[layer; 40], 22 * layer, 12 * layer);
    setup.plan_options.staging_bytes = 2 * layer;
    let plan = setup.plan();
    assert_eq!(residencies(&plan), (20, 10, 10));
    setup.room(18 * layer, 12 * layer);
    let less = plan.rebalance(&setup.inputs()).unwrap();
    assert_eq!(residencies(&less), (16, 10, 14));
    assert_eq!(changed(&plan, &less), 4);
    assert_eq!((less.slots, less.slot_bytes), (plan.slots, plan.slot_bytes));
    // Those who left were not beside each other.
    let left: Vec<usize> =
        (0..40).filter(|&i| plan.residencies[i] != less.residencies[i]).collect();
    assert!(left.windows(2).all(|pair| pair[1] - pair[0] > 3), "{left:?}");
    setup.room(22 * layer, 14 * layer);
    let more = less.rebalance(&setup.inputs()).unwrap();
    assert_eq!(residencies(&more), (20, 12, 8));
    for (i, (was, is)) in less.residencies.iter().zip(&more.residencies).enumerate() {
        assert!(*was != Residency::Device || *is == Residency::Device, "{i} left for nothing");
        assert!(*was != Residency::Host || *is != Residency::File, "{i} left for nothing");
    }
    // The same budget is the same plan.
    let same = more.rebalance(&setup.inputs()).unwrap();
    assert_eq!(changed(&more, &same), 0);
}

#[test]
fn fully_resident_plan_drops_its_slots() {
    let layer = 32 * MIB;
    let mut setup = Setup::layers(&[layer; 8], 8 * layer, 12 * layer);
    let plan = setup.plan();
    assert_eq!((residencies(&plan), plan.slots), ((8, 0, 0), 0));
    setup.room(6 * layer, 12 * layer);
    let less = plan.rebalance(&setup.inputs()).unwrap();
    assert_eq!((residencies(&less), less.slots), ((4, 4, 0), 2));
    setup.room(layer, 12 * layer);
    assert!(less.rebalance(&setup.inputs()).unwrap_err().message().contains("at least"));
    setup.units.units.pop();
    assert!(less.rebalance(&setup.inputs()).is_err());
    assert!(less.what_if(&setup.inputs(), setup.links).is_err());
}

proptest! {
    #[test]
    fn rebalanced_plans_stay_within_changed_budgets(
        sizes in prop::collection::vec(1u64..30, 1..20),
        rooms in prop::collection::vec((1u64..200, 4u64..200), 2..6),
    ) {
        let sizes: Vec<u64> = sizes.iter().map(|n| n * MIB).collect();
        let mut setup = Setup::layers(&sizes, 0, 0);
        setup.plan_options.chunk_bytes = MIB;
        setup.plan_options.compute = Some(kvtier::stream::plan::ComputeLocation::Device);
        let mut plan: Option<Plan> = None;
        for (device, host) in rooms {
            setup.room(device * MIB, host * MIB);
            let fresh = setup.make();
            let next = match &plan {
                None => fresh.clone(),
                Some(plan) => plan.rebalance(&setup.inputs()),
            };
            prop_assert!(next.is_ok() == fresh.is_ok(), "{:?} {:?}", next, fresh);
            if let Ok(next) = next {
                check(&setup, &next, device * MIB, host * MIB);
                plan = Some(next);
            }
        }
    }
}
