//! The store in simulations: thousands of seeds, and equal results of equal seeds.

use kvtier_testkit::sim::{SimOpts, run};

/// KVTIER_SIM_SEEDS adds seeds; KVTIER_SIM_SEED runs a single one.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn simulation_seeds_keep_all_invariants() {
    let first = number("KVTIER_SIM_SEED");
    let count = if first.is_some() { 1 } else { number("KVTIER_SIM_SEEDS").unwrap_or(300) };
    let first = first.unwrap_or(0);
    let (mut kept, mut cleared, mut blocks) = (0, 0, 0);
    for seed in first..first + count {
        match run(&SimOpts { seed, steps: 600 }) {
            Ok(report) => {
                kept += report.durable_found;
                cleared += report.cleared;
                blocks += report.kept_blocks;
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    assert!(count < 100 || kept > 0, "no cell was acknowledged as durable");
    assert!(count < 100 || blocks > 0, "no block was acknowledged as durable");
    assert!(count < 100 || cleared > 0, "no namespace was cleared");
}

#[test]
fn simulation_is_deterministic() {
    for seed in 1000..1010 {
        let opts = SimOpts { seed, steps: 400 };
        assert_eq!(run(&opts).unwrap(), run(&opts).unwrap());
    }
}
