//! Random streamers: threads acquire, release, hint, rebalance, inspect and close in any order,
//! over models, memory and faulty files by seed. Leased units have their bytes, errors are those
//! that were planted, no call waits forever, and all memory is freed in the end.

use crate::cases;
use crate::drivers;
use kvtier_testkit::fixtures::stream_rig as rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use kvtier::base::budget::{Tier, TierUsage};
use kvtier::base::status::Status;
use kvtier::stream::streamer::AcquireOpts;

use cases::{Case, Ending, Payer, Trouble};
use drivers::Run;
use rig::{patiently, soon, status, within};

/// No case takes so long that nothing waits for ever.
const LONG: Duration = Duration::from_secs(480);

impl Case {
    pub fn usage(&self, tier: Tier) -> Option<TierUsage> {
        self.budget.as_ref().map(|budget| budget.usage(tier))
    }

    fn used(&self, tier: Tier) -> u64 {
        self.usage(tier).map_or(0, |usage| usage.reserved_bytes + usage.committed_bytes)
    }
}

/// Joins all threads. After a timeout it panics with the seed and the current steps.
fn watched(seed: u64, run: &Arc<Run>) {
    let (send, ended) = channel::<()>();
    let threads: Vec<_> = (0..run.doing.len())
        .map(|number| {
            let (run, send) = (run.clone(), send.clone());
            std::thread::spawn(move || {
                run.work(number);
                drop(send);
            })
        })
        .collect();
    drop(send);
    // Nothing is ever sent: this ends when the last of them has dropped its end.
    if ended.recv_timeout(LONG) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
        panic!("seed {seed}: a thread waits for ever: {:?}", run.doing);
    }
    for thread in threads {
        if thread.join().is_err() {
            panic!("seed {seed}: {:?}", run.doing);
        }
    }
}

/// Checks that the streamer works after the fault as if it had not occurred.
fn recovers(run: &Run) {
    let case = &run.case;
    let (rig, streamer) = (&case.rig, &case.rig.streamer);
    let all = 0..rig.files.units.units.len() as u32;
    let stats = streamer.stats();
    assert_eq!(stats.acquires, run.had.load(Ordering::Acquire), "units that were had");
    if run.is_changed() {
        assert_eq!(status(streamer.pass_begin()), Status::Corrupt);
    }
    case.sim.heal();
    if !matches!(
        case.trouble,
        Trouble::Cut(..) | Trouble::Written(..) | Trouble::Lie(..) | Trouble::Lost
    ) {
        let deadline = soon();
        loop {
            for unit in all.clone() {
                rig.insist(unit, AcquireOpts { when_issued: true, ..patiently() }, &[Status::Io]);
            }
            // In place, who gets a home while it is in a slot moves when it leaves that.
            match streamer.load(within(10_000_000)) {
                Ok(()) => break,
                Err(error) => {
                    let fine = [Status::Io, Status::Timeout].contains(&error.status());
                    assert!(fine && within(0) < deadline, "{error}");
                }
            }
        }
        let plan = streamer.plan();
        if case.budget.is_some() && case.payer != Payer::Cut {
            assert_eq!(case.used(Tier::Host), plan.host_bytes);
            assert_eq!(case.used(Tier::Device), plan.device_bytes);
        }
        if let (Some(device), true) = (&case.device, case.payer != Payer::Cut) {
            assert_eq!(device.allocated_bytes(), plan.device_bytes);
        }
    }
}

fn ends(run: &Run) {
    let case = &run.case;
    let streamer = &case.rig.streamer;
    case.rig.closed();
    for tier in [Tier::Host, Tier::Device, Tier::Pinned] {
        assert_eq!(case.used(tier), 0, "{tier:?}");
    }
    assert_eq!(case.budget.as_ref().map_or(0, |budget| budget.accounts()), 0);
    assert_eq!(case.device.as_ref().map_or(0, |device| device.allocated_bytes()), 0);
    assert_eq!(status(streamer.acquire(0, patiently())), Status::Closed);
    assert_eq!(status(streamer.pass_end()), Status::Closed);
    assert!(!case.rig.runtime.core().is_poisoned());
}

fn case_of(seed: u64) -> Arc<Run> {
    let case = Case::new(seed);
    println!("seed {seed}: {}", case.text);
    if matches!(case.trouble, Trouble::Written(..) | Trouble::Lie(..)) {
        // A unit that was never compared has no recorded sum.
        for unit in 0..case.rig.files.units.units.len() as u32 {
            case.rig.streamer.verify(unit).expect("a sum");
        }
    }
    Arc::new(Run::new(case))
}

/// KVTIER_STREAM_SEEDS more seeds than usual; KVTIER_STREAM_SEED one alone, or the first of so
/// many. Threads run another way each time: KVTIER_STREAM_TIMES each seed as often.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn random_threads_read_exact_bytes_and_end() {
    let first = number("KVTIER_STREAM_SEED");
    let usual = if first.is_some() { 1 } else { 120 };
    let (first, count) = (first.unwrap_or(0), number("KVTIER_STREAM_SEEDS").unwrap_or(usual));
    let mut had = 0;
    for seed in first..first + count {
        for _ in 0..number("KVTIER_STREAM_TIMES").unwrap_or(1) {
            let result = std::panic::catch_unwind(|| {
                let run = case_of(seed);
                watched(seed, &run);
                if run.case.ending == Ending::Quiet {
                    recovers(&run);
                }
                ends(&run);
                run.had.load(Ordering::Acquire)
            });
            match result {
                Ok(units) => had += units,
                Err(_) => panic!("KVTIER_STREAM_SEED={seed} runs it again"),
            }
        }
    }
    assert!(count < 100 || had > 30 * count, "{had} units in {count} cases");
}
