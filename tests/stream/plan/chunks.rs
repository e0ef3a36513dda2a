//! The forecast, compared with a model of each chunk: reads, copies and computing one by one.

use proptest::prelude::*;

use crate::plan::setup::{MIB, Setup, check};
use kvtier::stream::plan::{ComputeLocation, Plan, Residency};

const PASSES: usize = 24;

/// A pass in ns, and the first one.
fn by_chunks(setup: &Setup, plan: &Plan) -> (f64, f64) {
    let per_byte = |rate: u64| 1e9 / rate as f64;
    let (disk_ns, device_ns) = (per_byte(setup.links.disk), per_byte(setup.links.device));
    let buffers = (plan.staging_bytes / plan.chunk_bytes) as usize;
    let (mut copied, mut freed) = (Vec::new(), Vec::new());
    let (mut disk_free, mut link_free, mut now) = (0.0f64, 0.0f64, 0.0f64);
    let mut ends = vec![0.0];
    for _ in 0..PASSES {
        for (unit, home) in setup.units.units.iter().zip(&plan.residencies) {
            let stays = match plan.compute {
                ComputeLocation::Device => *home == Residency::Device,
                ComputeLocation::Host => *home == Residency::Host,
            };
            if !stays {
                let slot_free: f64 = match freed.len().checked_sub(plan.slots as usize) {
                    Some(before) => freed[before],
                    None => 0.0,
                };
                let (mut left, mut first) = (unit.image_bytes, true);
                while left > 0 {
                    let bytes = left.min(plan.chunk_bytes) as f64;
                    left -= bytes as u64;
                    let mut there: f64 = if first { slot_free } else { 0.0 };
                    first = false;
                    if plan.compute == ComputeLocation::Host {
                        link_free = link_free.max(there) + bytes * disk_ns;
                        continue;
                    }
                    if *home == Residency::File {
                        let room: f64 = match copied.len().checked_sub(buffers) {
                            Some(before) => copied[before],
                            None => 0.0,
                        };
                        disk_free = disk_free.max(room) + bytes * disk_ns;
                        there = there.max(disk_free);
                    }
                    link_free = link_free.max(there) + bytes * device_ns;
                    if *home == Residency::File {
                        copied.push(link_free);
                    }
                }
                now = now.max(link_free);
            }
            now += setup.plan_options.layer_compute_ns as f64;
            if !stays {
                freed.push(now);
            }
        }
        ends.push(now);
    }
    let half = PASSES / 2;
    ((ends[PASSES] - ends[half]) / (PASSES - half) as f64, ends[1])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pass_time_is_the_sum_of_its_chunks(
        sizes in prop::collection::vec(4u64..24, 3..24), shares in (10u64..90, 5u64..90),
        rates in (1u64..40, 1u64..40), compute in 0u64..12, slots in 1u32..5,
        staging in 2u64..40, on_device in any::<bool>(),
    ) {
        let sizes: Vec<u64> = sizes.iter().map(|n| n * 4 * MIB).collect();
        let total: u64 = sizes.iter().sum();
        let (device, host) = (total * shares.0 / 100, total * shares.1 / 100 + staging * 4 * MIB);
        let mut setup = Setup::layers(&sizes, device, host);
        setup.plan_options.compute = Some(if on_device { ComputeLocation::Device } else { ComputeLocation::Host });
        setup.plan_options.chunk_bytes = 4 * MIB;
        setup.plan_options.staging_bytes = staging * 4 * MIB;
        setup.plan_options.slots = slots;
        setup.plan_options.layer_compute_ns = compute * 10_000_000;
        setup.links.disk = rates.0 * 200_000_000;
        setup.links.device = rates.1 * 200_000_000;
        let Ok(plan) = setup.make() else { return Ok(()) };
        check(&setup, &plan, device, host);
        let forecast = plan.forecast.unwrap();
        let (steady, first) = by_chunks(&setup, &plan);
        if steady < 1.0 {
            prop_assert_eq!(forecast.pass_ns, 0);
            return Ok(());
        }
        let ratio = forecast.pass_ns as f64 / steady.max(1.0);
        let first_ratio = forecast.first_ns as f64 / first.max(1.0);
        // A copy at one rate where chunks come in bursts is a little too fast, at worst.
        prop_assert!((0.85..1.01).contains(&ratio), "{ratio}: {} for {steady}", forecast.pass_ns);
        prop_assert!((0.85..1.01).contains(&first_ratio), "{first_ratio}");
    }
}
