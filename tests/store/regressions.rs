//! Fixed defects, each by the smallest program that showed it.

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

/// A worker that took an op during its cancellation acted as a helper, and the op was released
/// twice.
#[test]
fn cancel_during_take_releases_the_op_once() {
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
fn wait_for_issue_ends_at_issue() {
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let op = runtime.core().submit(&OpOpts::default(), items(1), gated).unwrap();
    op.wait(ISSUED, 0).unwrap(); // hangs without a wake-up: the gate is shut
    assert_eq!(op.state() & RELEASED, 0);
    GATE.store(true, Ordering::SeqCst);
    op.wait(RELEASED, 0).unwrap();
    op.remove();
}

/// A reservation granted at its deadline ended as a timeout and kept its bytes.
#[test]
fn reservation_is_granted_or_timed_out() {
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

/// An op submitted to a stopped pool stayed there, and kept the shared part of the runtime alive.
#[test]
fn submit_during_close_leaks_nothing() {
    for _ in 0..300 {
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
        let core = std::sync::Arc::downgrade(runtime.core());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                let core = runtime.core().clone();
                scope.spawn(move || {
                    while let Ok(op) = core.submit(&OpOpts::default(), items(1), quick) {
                        op.wait(RELEASED, 0).unwrap();
                        op.remove();
                    }
                });
            }
            runtime.close(0).unwrap();
        });
        drop(runtime);
        assert_eq!(core.strong_count(), 0);
    }
}

/// A budget registered with the notifier of a closed runtime, which kept it alive.
#[test]
fn budget_outliving_its_runtime_is_freed() {
    use kvtier::base::budget::{Budget, BudgetOpts, Tier};
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let mut opts = BudgetOpts::default();
    opts.limits[Tier::Disk as usize] = Some(10);
    let budget = Budget::open(runtime.core(), &opts).unwrap();
    let account = budget.account("a", 0, None).unwrap();
    account.take(Tier::Disk, 10).unwrap();
    runtime.close(0).unwrap();
    budget.resize(Tier::Disk, 5).unwrap();
    account.give_back(Tier::Disk, 10);
    let watched = std::sync::Arc::downgrade(&budget);
    drop((account, budget, runtime));
    assert_eq!(watched.strong_count(), 0);
}

/// An owner that did not return promised memory blocked requests to other owners.
#[test]
fn unfulfilled_reclaim_does_not_block_others() {
    use kvtier::base::budget::{Budget, BudgetOpts, Tier};
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let mut opts = BudgetOpts::default();
    opts.limits[Tier::Disk as usize] = Some(100);
    let budget = Budget::open(runtime.core(), &opts).unwrap();
    let asked = std::sync::Arc::new(AtomicBool::new(false));
    let lies = AtomicBool::new(true); // once
    let lied = std::sync::Arc::new(AtomicBool::new(false));
    let flag = lied.clone();
    let lie = move |_, bytes, _| {
        flag.store(true, Ordering::SeqCst);
        if lies.swap(false, Ordering::SeqCst) { bytes } else { 0 }
    };
    let liar = budget.account("liar", 0, Some(Box::new(lie))).unwrap();
    let seen = asked.clone();
    let honest = move |_, _, _| {
        seen.store(true, Ordering::SeqCst);
        0
    };
    let other = budget.account("other", 1, Some(Box::new(honest))).unwrap();
    liar.take(Tier::Disk, 50).unwrap();
    other.take(Tier::Disk, 50).unwrap();
    let wanting = budget.account("wanting", 2, None).unwrap();
    let mut patience_ns = 2_000_000;
    // On a busy machine the deadline may pass before the account was asked. Then retry with more
    // time.
    let first = loop {
        let soon = runtime.core().clock().now_ns() + patience_ns;
        let late = OpOpts { deadline_ns: soon, ..OpOpts::default() };
        let first = wanting.reserve_later(Tier::Disk, 50, &late).unwrap();
        first.wait(RELEASED, 0).unwrap();
        assert_eq!(first.info().status, Some(Status::Timeout.code()));
        if lied.load(Ordering::SeqCst) {
            break first;
        }
        assert!(first.remove());
        patience_ns *= 2;
    };
    let second = wanting.reserve_later(Tier::Disk, 50, &OpOpts::default()).unwrap();
    while !asked.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    other.give_back(Tier::Disk, 50);
    second.wait(RELEASED, 0).unwrap();
    assert_eq!(second.info().status, Some(0));
    [first, second].iter().for_each(|op| assert!(op.remove()));
}

/// The completion of a small op waited for a large op behind it.
#[test]
fn small_op_completes_before_a_large_one() {
    use kvtier::base::queue::Queue;
    static HOLD: AtomicBool = AtomicBool::new(true);
    fn held(item: &Item) -> Outcome {
        while item.kind == 2 && HOLD.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        Outcome { value: 0, error: None }
    }
    let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap();
    let queue = Queue::open(runtime.core(), 8, None).unwrap();
    let opts = OpOpts { queue: Some(queue.clone()), detached: true, ..OpOpts::default() };
    let pair = vec![Item::new(1, None, None, 1, 0), Item::new(2, None, None, 1 << 20, 0)];
    runtime.core().submit_each(&opts, pair, |i| i as u64, held, |_, _| ()).unwrap();
    let mut tags = Vec::new();
    queue.wait(8, 0, &mut |entry| tags.push(entry.tag)).unwrap(); // hangs if the entry is kept
    assert_eq!(tags, [0]);
    HOLD.store(false, Ordering::SeqCst);
    queue.close(0).unwrap();
}
