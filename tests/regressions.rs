//! Defects that were found once, each as small as it could be made.

use kvtier::base::item::{Item, Outcome};
use kvtier::base::op::{ISSUED, OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Status;
use std::sync::atomic::{AtomicBool, Ordering};

fn quick(_: &Item) -> Outcome {
    Outcome { value: 0, error: None }
}

static GATE: AtomicBool = AtomicBool::new(false);

/// Runs until the test opens the gate.
fn gated(_: &Item) -> Outcome {
    while !GATE.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    Outcome { value: 0, error: None }
}

fn items(n: usize) -> Vec<Item> {
    (0..n).map(|_| Item::new(1, None, None, 1, 0)).collect()
}

/// A worker that popped an op while a cancel was ending it took itself for a
/// helper, and the op was released twice.
#[test]
fn cancelling_what_a_worker_takes_ends_it_once() {
    let runtime = Runtime::open(RuntimeOpts { workers: 2, ..RuntimeOpts::default() }).unwrap();
    for _ in 0..20_000 {
        let op = runtime.core().submit(&OpOpts::default(), items(1), quick).unwrap();
        op.cancel();
        op.wait(RELEASED, 0).unwrap();
        let status = op.info().status.and_then(Status::from_code);
        assert!(matches!(status, Some(Status::Ok | Status::Cancelled)));
        assert!(op.remove());
    }
    assert!(!runtime.core().is_poisoned());
    runtime.close(0).unwrap();
}

/// Waiting for the issue slept until the op was resolved.
#[test]
fn a_wait_for_the_issue_ends_with_it() {
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let op = runtime.core().submit(&OpOpts::default(), items(1), gated).unwrap();
    op.wait(ISSUED, 0).unwrap(); // for ever, if nobody wakes it: the gate is shut
    assert_eq!(op.state() & RELEASED, 0);
    GATE.store(true, Ordering::SeqCst);
    op.wait(RELEASED, 0).unwrap();
    op.remove();
}

/// A reservation granted in the moment of its deadline ended as a timeout and
/// kept its bytes.
#[test]
fn a_reservation_is_granted_or_late_and_never_both() {
    use kvtier::base::budget::{Budget, BudgetOpts, Tier};
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let mut opts = BudgetOpts::default();
    opts.limits[Tier::Disk as usize] = Some(10);
    let budget = Budget::open(runtime.core(), &opts).unwrap();
    let account = budget.account("a", 0, None).unwrap();
    for i in 0..4000u64 {
        account.take(Tier::Disk, 10).unwrap();
        let deadline_ns = runtime.core().clock().now_ns() + 1 + i % 64 * 1000;
        let late = OpOpts { deadline_ns, ..OpOpts::default() };
        let op = account.reserve_later(Tier::Disk, 10, &late).unwrap();
        account.give_back(Tier::Disk, 10);
        op.wait(RELEASED, 0).unwrap();
        let held = account.held(Tier::Disk).reserved_bytes;
        assert_eq!(held, if op.info().status == Some(0) { 10 } else { 0 });
        account.commit(Tier::Disk, held, 0).unwrap();
        op.remove();
    }
}
