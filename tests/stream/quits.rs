//! Units that leave their slots for good, as units in place do before they become resident.

use kvtier::base::status::Status;
use kvtier::stream::plan::{ComputeLocation, Residency};
use kvtier::stream::scheduler::{Acquired, Scheduler, Setup};
use kvtier::stream::units::Role;

use crate::world::{MIB, World, plan, setup, units};

const MS: u64 = 1_000_000;

#[test]
fn unused_slot_is_released_on_request() {
    let units = units(&[(Role::Layer, 9 * MIB); 6]);
    let plan = plan(&units, ComputeLocation::Host, vec![Residency::File; 6], 2, 0);
    let core = Scheduler::new(&Setup { in_place: true, ..setup(&units, &plan) }).expect("a core");
    let mut world = World::new(core, &units, 1e9, 1e9);
    let lease = world.acquire(0).expect("there");
    assert!(!world.core.evict_from_slot(0).expect("sound"), "it is in use");
    world.release(&lease);
    assert!(world.core.evict_from_slot(0).expect("sound") && !world.core.is_in_memory(0));
    // In transfer, then promised to a caller that sleeps until the unit is in memory.
    assert!(matches!(
        world.core.acquire(3, false, world.now_ns).expect("sound"),
        Acquired::Wait(_)
    ));
    world.core.wait_begin(3);
    assert!(!world.core.evict_from_slot(3).expect("sound"), "it is on its way");
    world.settle();
    assert!(!world.core.evict_from_slot(3).expect("sound"), "it is promised");
    world.core.wait_end(3).expect("sound");
    assert!(world.core.evict_from_slot(3).expect("sound"));
    // A waiter for another copy of the unit does not keep the slot.
    world.core.wait_begin(5);
    assert!(world.core.evict_from_slot(5).expect("sound"));
    world.core.wait_end(5).expect("sound");
    assert_eq!(world.core.evict_from_slot(6).expect_err("no such unit").status(), Status::Invalid);
    // Both slots can be had.
    let order: Vec<u32> = (0..6).collect();
    world.run(&order, MS);
    let (a, b) = (world.acquire(2).expect("there"), world.acquire(4).expect("there"));
    world.release(&a);
    world.release(&b);
}

#[test]
fn unit_larger_than_slots_gets_none() {
    for compute in [ComputeLocation::Host, ComputeLocation::Device] {
        let here =
            if compute == ComputeLocation::Host { Residency::Host } else { Residency::Device };
        let units = units(&[
            (Role::Layer, 9 * MIB),
            (Role::Layer, 9 * MIB),
            (Role::Layer, 20 * MIB),
            (Role::Layer, 9 * MIB),
        ]);
        let residencies = vec![Residency::File, Residency::File, here, Residency::File];
        let mut plan = plan(&units, compute, residencies, 1, 32 * MIB);
        plan.slot_bytes = units.units[0].image_bytes;
        let core = Scheduler::new(&setup(&units, &plan)).expect("a core");
        let mut world = World::new(core, &units, 1e9, 1e9);
        world.settle();
        let mut order: Vec<u32> = (0..4).collect();
        world.run(&order, MS);
        // The unit loses its residency, and no slot is large enough for it: passes run without it.
        while !world.core.set_residency(2, Residency::File, world.now_ns).expect("sound") {
            world.settle();
        }
        order.remove(2);
        world.run(&order, MS);
        world.run(&order, MS);
        let error = world.core.acquire(2, false, world.now_ns).expect_err("no slot is as large");
        assert_eq!(error.status(), Status::Budget);
        world.core.hint(&[2], world.now_ns).expect("nothing is done");
        assert!(!world.core.is_in_memory(2));
        assert!(world.core.set_residency(2, here, world.now_ns).expect("sound"));
        world.settle();
        order.insert(2, 2);
        world.run(&order, MS);
    }
}
