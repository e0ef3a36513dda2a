//! Simulation seeds with a device tier.

use kvtier_testkit::sim::{SimOpts, run};

/// KVTIER_SIM_SEEDS adds seeds; KVTIER_SIM_SEED runs a single one.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn simulation_seeds_with_a_device_tier_keep_all_invariants() {
    let first = number("KVTIER_SIM_SEED");
    let count = if first.is_some() { 1 } else { number("KVTIER_SIM_SEEDS").unwrap_or(60) };
    // Seeds far from those of other tests. Every second seed has a device, and every second one of
    // those a device tier.
    let first = first.unwrap_or(50_000);
    let mut sums = [0; 7];
    for seed in (first..).step_by(2).take(count as usize) {
        let report = run(&SimOpts { seed, steps: 600 }).unwrap_or_else(|f| panic!("{f}"));
        let counters = report.counters;
        let more = [
            counters.device_hit_cells,
            counters.device_promoted_cells,
            counters.device_evicted_chunks,
            counters.device_lost_cells,
            counters.damaged_copies,
            report.audited,
            report.durable_found,
            report.engine_events,
        ];
        sums.iter_mut().zip(more).for_each(|(sum, n)| *sum += n);
    }
    assert!(count < 50 || sums.iter().all(|&n| n > 0), "a case was not reached: {sums:?}");
    println!("{sums:?}");
}
