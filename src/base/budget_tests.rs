//! Tests of the budget, some against a plain model.

use super::*;
use crate::base::op::{OpOpts, RELEASED, RESOLVED};
use crate::base::runtime::{Runtime, RuntimeOpts};
use crate::base::sync::atomic::{AtomicU32, Ordering};
use proptest::prelude::*;

fn facts(bytes: u64) -> MemoryFacts {
    MemoryFacts { available_bytes: bytes, total_bytes: bytes, ..MemoryFacts::default() }
}

fn open(runtime: &Runtime, host: u64) -> Arc<Budget> {
    let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
    opts.limits[Tier::Host as usize] = Some(host);
    Budget::open_on(runtime.core(), &opts, &facts(1 << 40)).unwrap()
}

fn runtime() -> Runtime {
    Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() }).unwrap()
}

fn status(op: &OpRef) -> Option<i32> {
    op.info().status
}

#[test]
fn default_limits_come_from_the_machine_and_larger_limits_are_lowered() {
    let runtime = runtime();
    let open = |opts: &BudgetOpts| Budget::open_on(runtime.core(), opts, &facts(10 << 30));
    let budget = open(&BudgetOpts::default()).unwrap();
    let usable = (10u64 << 30) - DEFAULT_RESERVE_BYTES;
    assert_eq!(budget.usage(Tier::Host).limit_bytes, usable / 100 * DEFAULT_HOST_PERCENT);
    assert_eq!(budget.usage(Tier::Device).limit_bytes, 0);
    let mut opts = BudgetOpts::default();
    opts.limits[Tier::Host as usize] = Some(20 << 30);
    let lane = open(&opts).unwrap().usage(Tier::Host);
    assert_eq!((lane.asked_bytes, lane.limit_bytes), (20 << 30, usable));
    opts.strict = true;
    assert_eq!(open(&opts).err().unwrap().status(), Status::Budget);
}

#[test]
fn the_default_reserve_leaves_most_of_a_small_machine() {
    let runtime = runtime();
    let budget = Budget::open_on(runtime.core(), &BudgetOpts::default(), &facts(512 << 20));
    let budget = budget.expect("a budget");
    assert_eq!(budget.reserve_bytes(), 64 << 20);
    let limit = budget.usage(Tier::Host).limit_bytes;
    assert!(limit > 200 << 20, "{limit} bytes of 512 MiB");
}

#[test]
fn reservations_are_granted_in_order_and_a_cancel_unblocks_the_next() {
    let runtime = runtime();
    let budget = open(&runtime, 100);
    let account = budget.account("a", 0, None).unwrap();
    account.take(Tier::Host, 60).unwrap();
    let later = |bytes| account.reserve_later(Tier::Host, bytes, &OpOpts::default()).unwrap();
    let (big, small) = (later(50), later(10));
    assert_eq!((status(&big), status(&small)), (None, None));
    assert_eq!(account.reserve(Tier::Host, 1).unwrap_err().status(), Status::Budget);
    big.cancel();
    assert_eq!(status(&big), Some(Status::Cancelled.code()));
    assert_eq!(status(&small), Some(0), "the next reservation is granted");
    account.release(Tier::Host, 60).unwrap();
    assert_eq!(account.held(Tier::Host), AccountUsage { reserved_bytes: 10, committed_bytes: 0 });
    assert_eq!(account.close().unwrap_err().status(), Status::Busy);
    account.commit(Tier::Host, 10, 0).unwrap();
    account.close().unwrap();
    for op in [big, small] {
        op.remove();
    }
}

#[test]
fn a_reservation_above_the_limit_is_refused_at_once() {
    let runtime = runtime();
    let account = open(&runtime, 100).account("a", 0, None).unwrap();
    let error = account.reserve_later(Tier::Host, 101, &OpOpts::default()).err().unwrap();
    assert_eq!(error.status(), Status::Budget);
}

#[test]
fn the_account_of_lowest_priority_is_reclaimed_from_first() {
    let runtime = runtime();
    let budget = open(&runtime, 100);
    let reclaim_queued = Arc::new(Mutex::new(Vec::new()));
    let owner = |name: &'static str, priority, gives: u64| {
        let reclaim_queued = reclaim_queued.clone();
        let reclaim = move |_, bytes, _| {
            reclaim_queued.lock().push((name, bytes));
            gives
        };
        let account = budget.account(name, priority, Some(Box::new(reclaim))).unwrap();
        account.take(Tier::Host, 30).unwrap();
        account
    };
    let (high, low, mid) = (owner("high", 9, 0), owner("low", 1, 10), owner("mid", 5, 30));
    let wanting = budget.account("wanting", 7, None).unwrap();
    let op = wanting.reserve_later(Tier::Host, 50, &OpOpts::default()).unwrap();
    // The notifier calls the reclaimers; this thread releases the promised bytes.
    while reclaim_queued.lock().len() < 2 {
        std::thread::yield_now();
    }
    low.release(Tier::Host, 10).unwrap();
    assert_eq!(status(&op), None);
    mid.release(Tier::Host, 30).unwrap();
    op.wait(RELEASED, 0).unwrap();
    assert_eq!(status(&op), Some(0));
    assert_eq!(*reclaim_queued.lock(), [("low", 40), ("mid", 30)]);
    assert_eq!(high.held(Tier::Host).committed_bytes, 30);
    op.remove();
}

#[test]
fn a_deadline_ends_a_waiting_reservation() {
    let runtime = runtime();
    let account = open(&runtime, 10).account("a", 0, None).unwrap();
    account.take(Tier::Host, 10).unwrap();
    let now = runtime.core().clock().now_ns();
    let opts = OpOpts { deadline_ns: now + 1_000_000, ..OpOpts::default() };
    let op = account.reserve_later(Tier::Host, 5, &opts).unwrap();
    op.wait(RESOLVED | RELEASED, 0).unwrap();
    assert_eq!(status(&op), Some(Status::Timeout.code()));
    assert_eq!(account.held(Tier::Host).reserved_bytes, 0);
    op.remove();
}

#[test]
fn closing_the_runtime_ends_waiting_reservations() {
    let runtime = runtime();
    let account = open(&runtime, 10).account("a", 0, None).unwrap();
    account.take(Tier::Host, 10).unwrap();
    let op = account.reserve_later(Tier::Host, 5, &OpOpts::default()).unwrap();
    runtime.close(0).unwrap();
    assert_eq!(status(&op), Some(Status::Cancelled.code()));
    assert_eq!(account.reserve(Tier::Device, 0).err(), None, "accounting continues");
    op.remove();
}

#[test]
fn a_shrunk_budget_grants_nothing_until_it_fits_again() {
    let runtime = runtime();
    let budget = open(&runtime, 1000);
    let account = budget.account("a", 0, None).unwrap();
    account.take(Tier::Host, 800).unwrap();
    budget.resize(Tier::Host, 500).unwrap();
    assert_eq!(account.reserve(Tier::Host, 1).unwrap_err().status(), Status::Budget);
    account.release(Tier::Host, 301).unwrap();
    account.reserve(Tier::Host, 1).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(u64),
    Later(u64),
    Commit(u64, u64),
    Release(u64),
    Resize(u64),
    Cancel(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        (0u64..60).prop_map(Step::Reserve),
        (0u64..60).prop_map(Step::Later),
        (0u64..60, 0u64..60).prop_map(|(r, u)| Step::Commit(r, u)),
        (0u64..60).prop_map(Step::Release),
        (0u64..120).prop_map(Step::Resize),
        (0usize..8).prop_map(Step::Cancel),
    ];
    proptest::collection::vec(step, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn counts_never_drift_and_nothing_is_overdrawn(steps in steps()) {
        let runtime = runtime();
        let budget = open(&runtime, 100);
        let account = budget.account("a", 0, None).unwrap();
        let mut limit = 100u64;
        let mut held = AccountUsage::default();
        let mut waiting: Vec<(OpRef, u64)> = Vec::new();
        for step in steps {
            let used = held.reserved_bytes + held.committed_bytes;
            match step {
                Step::Reserve(n) => {
                    let fits = used + n <= limit && waiting.is_empty();
                    prop_assert_eq!(account.reserve(Tier::Host, n).is_ok(), fits);
                    held.reserved_bytes += if fits { n } else { 0 };
                }
                Step::Later(n) => {
                    match account.reserve_later(Tier::Host, n, &OpOpts::default()) {
                        Ok(op) => waiting.push((op, n)),
                        Err(_) => prop_assert!(n > limit),
                    }
                }
                Step::Commit(r, u) => {
                    let good = u <= r && r <= held.reserved_bytes;
                    prop_assert_eq!(account.commit(Tier::Host, r, u).is_ok(), good);
                    if good {
                        held.reserved_bytes -= r;
                        held.committed_bytes += u;
                    }
                }
                Step::Release(n) => {
                    let good = n <= held.committed_bytes;
                    prop_assert_eq!(account.release(Tier::Host, n).is_ok(), good);
                    held.committed_bytes -= if good { n } else { 0 };
                }
                Step::Resize(n) => {
                    budget.resize(Tier::Host, n).unwrap();
                    limit = n;
                }
                Step::Cancel(i) if i < waiting.len() => waiting[i].0.cancel(),
                Step::Cancel(_) => {}
            }
            // The model grants in order, from the front, while it fits.
            waiting.retain(|(op, _)| status(op) != Some(Status::Cancelled.code()));
            while let Some((op, n)) = waiting.first() {
                if *n > limit {
                    // The limit shrank below it: it could never be granted.
                    prop_assert_eq!(status(op), Some(Status::Budget.code()));
                    waiting.remove(0);
                    continue;
                }
                let used = held.reserved_bytes + held.committed_bytes;
                if used + n > limit {
                    prop_assert_eq!(status(op), None);
                    break;
                }
                prop_assert_eq!(status(op), Some(0));
                held.reserved_bytes += n;
                waiting.remove(0);
            }
            prop_assert_eq!(account.held(Tier::Host), held);
            let lane = budget.usage(Tier::Host);
            prop_assert_eq!(lane.reserved_bytes, held.reserved_bytes);
            prop_assert_eq!(lane.committed_bytes, held.committed_bytes);
        }
    }
}

#[test]
fn a_refused_buffer_releases_no_bytes_of_others() {
    use crate::base::memory::{AllocationRequest, Buffer};
    let runtime = runtime();
    let budget = open(&runtime, 1 << 20);
    let account = budget.account("a", 0, None).unwrap();
    let request = |bytes| AllocationRequest {
        bytes,
        account: Some(account.clone()),
        ..AllocationRequest::default()
    };
    let kept = Buffer::map(&request(768 << 10), None).unwrap();
    assert_eq!(Buffer::map(&request(512 << 10), None).err().unwrap().status(), Status::Budget);
    assert_eq!(budget.usage(Tier::Host).committed_bytes, 768 << 10);
    drop(kept);
    assert_eq!(budget.usage(Tier::Host).committed_bytes, 0);
}

#[test]
fn close_waits_for_a_running_reclaimer() {
    let runtime = runtime();
    let budget = open(&runtime, 10);
    let inside = Arc::new(AtomicU32::new(0));
    let seen = inside.clone();
    let reclaim: Reclaim = Box::new(move |_, _, _| {
        seen.store(1, Ordering::SeqCst);
        while seen.load(Ordering::SeqCst) != 2 {
            std::thread::yield_now();
        }
        seen.store(3, Ordering::SeqCst);
        0
    });
    let cache = budget.account("cache", 0, Some(reclaim)).unwrap();
    cache.take(Tier::Host, 10).unwrap();
    let wanting = budget.account("wanting", 1, None).unwrap();
    let op = wanting.reserve_later(Tier::Host, 10, &OpOpts::default()).unwrap();
    while inside.load(Ordering::SeqCst) != 1 {
        std::thread::yield_now();
    }
    cache.release(Tier::Host, 10).unwrap();
    op.wait(RELEASED, 0).unwrap();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| {
            cache.close().unwrap();
            inside.load(Ordering::SeqCst)
        });
        inside.store(2, Ordering::SeqCst);
        assert_eq!(closing.join().unwrap(), 3);
    });
    op.remove();
}
