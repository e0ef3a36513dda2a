//! The runtime under a model checker that picks the interleavings: `cargo test
//! --no-default-features --features shuttle --test shuttle`.

use std::sync::Arc as StdArc;

use kvtier::base::item::{Item, Outcome};
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::queue::Queue;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::slab::Slab;
use kvtier::base::sync::Arc;
use kvtier::base::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;

const ROUNDS: usize = 2000;

fn check(body: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(body, ROUNDS);
}

/// A value that counts its drops.
struct Counted(Arc<AtomicU64>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn slab_drops_each_value_once_and_never_while_pinned() {
    check(|| {
        let slab: StdArc<Slab<Counted>> = StdArc::new(Slab::new());
        let drops = Arc::new(AtomicU64::new(0));
        let key = slab.insert(Counted(drops.clone())).unwrap();
        let users: Vec<_> = (0..2)
            .map(|_| {
                let (slab, drops) = (slab.clone(), drops.clone());
                thread::spawn(move || {
                    if let Some(pin) = slab.pin(key) {
                        let second = pin.clone();
                        drop(pin);
                        assert_eq!(drops.load(Ordering::SeqCst), 0, "dropped under a pin");
                        drop(second);
                    }
                })
            })
            .collect();
        let removers: Vec<_> = (0..2)
            .map(|_| {
                let slab = slab.clone();
                thread::spawn(move || slab.remove(key))
            })
            .collect();
        users.into_iter().for_each(|t| t.join().unwrap());
        let removed: usize = removers.into_iter().map(|t| usize::from(t.join().unwrap())).sum();
        assert_eq!(removed, 1, "removed once");
        assert_eq!(drops.load(Ordering::SeqCst), 1, "dropped once");
        assert!(slab.pin(key).is_none());
    });
}

#[test]
fn reused_slot_rejects_its_old_key() {
    check(|| {
        let slab: StdArc<Slab<u64>> = StdArc::new(Slab::new());
        let old = slab.insert(1).unwrap();
        let looker = {
            let slab = slab.clone();
            thread::spawn(move || {
                if let Some(pin) = slab.pin(old) {
                    assert_eq!(*pin, 1);
                }
            })
        };
        slab.remove(old);
        let fresh = slab.insert(2).unwrap();
        assert_ne!(fresh, old);
        looker.join().unwrap();
        assert_eq!(*slab.pin(fresh).unwrap(), 2);
    });
}

fn nothing(_: &Item) -> Outcome {
    Outcome { value: 7, error: None }
}

fn items(n: usize) -> Vec<Item> {
    (0..n).map(|_| Item::new(1, None, None, 1 << 20, 0)).collect()
}

fn runtime(workers: u32) -> Runtime {
    Runtime::open(RuntimeOpts { workers, max_ops: 16, ..RuntimeOpts::default() }).unwrap()
}

#[test]
fn ops_complete_exactly_once() {
    check(|| {
        let runtime = runtime(2);
        let queue = Queue::open(runtime.core(), 8, None).unwrap();
        let opts = OpOpts { queue: Some(queue.clone()), ..OpOpts::default() };
        let op = runtime.core().submit(&opts, items(3), nothing).unwrap();
        let other = runtime.core().submit(&opts, items(1), nothing).unwrap();
        let canceller = {
            let op = op.clone();
            thread::spawn(move || op.cancel())
        };
        let consumer = {
            let queue = queue.clone();
            thread::spawn(move || queue.wait(1, 0, &mut |_| ()).unwrap())
        };
        let mine = queue.wait(1, 0, &mut |_| ()).unwrap();
        assert_eq!(mine + consumer.join().unwrap(), 2, "one completion an op");
        canceller.join().unwrap();
        assert_eq!(queue.stats().posted, 2);
        for op in [op, other] {
            assert!(op.state() & RELEASED != 0);
            assert!(op.remove());
        }
        queue.close(0).unwrap();
        runtime.close(0).unwrap();
    });
}

#[test]
fn close_waits_for_running_and_cancels_queued_ops() {
    check(|| {
        let runtime = runtime(1);
        let ops: Vec<_> = (0..3)
            .map(|_| runtime.core().submit(&OpOpts::default(), items(1), nothing).unwrap())
            .collect();
        let waiter = {
            let op = ops[0].clone();
            thread::spawn(move || op.wait(RELEASED, 0).unwrap())
        };
        runtime.close(0).unwrap();
        waiter.join().unwrap();
        for op in ops {
            assert!(op.state() & RELEASED != 0);
            op.remove();
        }
        assert_eq!(runtime.core().stats().ops_open, 0);
    });
}

#[test]
fn callback_queue_delivers_all_before_close() {
    check(|| {
        let runtime = runtime(1);
        let seen = Arc::new(AtomicU64::new(0));
        let sink = {
            let seen = seen.clone();
            move |batch: &[_]| {
                seen.fetch_add(batch.len() as u64, Ordering::SeqCst);
            }
        };
        let queue = Queue::open(runtime.core(), 8, Some(Box::new(sink))).unwrap();
        let opts = OpOpts { queue: Some(queue.clone()), detached: true, ..OpOpts::default() };
        for _ in 0..3 {
            runtime.core().submit(&opts, items(1), nothing).unwrap();
        }
        queue.close(0).unwrap();
        assert_eq!(seen.load(Ordering::SeqCst), 3);
        runtime.close(0).unwrap();
    });
}
