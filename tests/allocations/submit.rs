//! Submitting does not allocate after warm-up. An allocator that sees every thread of this process,
//! workers included, counts calls.

use std::sync::atomic::Ordering;

use kvtier::base::item::Item;
use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::op::OpOpts;
use kvtier::base::queue::Queue;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::sync::Arc;
use kvtier::device::host;

use crate::{CALLS, alone};

const BATCH: usize = 64;

struct Load {
    runtime: Runtime,
    queue: Arc<Queue>,
    buffer: Arc<Buffer>,
}

impl Load {
    fn items(&self) -> Vec<Item> {
        let core = self.runtime.core();
        let mut items = core.item_list(BATCH).unwrap();
        for i in 0..BATCH as u64 {
            let (dst, src) = ((self.buffer.clone(), 64 * i), (self.buffer.clone(), 8192));
            items.push(Item::new(host::COPY | host::CHECKSUM, Some(dst), Some(src), 64, 0));
        }
        items
    }

    /// A batch of ops, one op of many items, an op with a deadline; all drained.
    fn turn(&self) {
        let core = self.runtime.core();
        let opts = OpOpts { queue: Some(self.queue.clone()), detached: true, ..OpOpts::default() };
        core.submit_each(&opts, self.items(), |i| i as u64, host::run, |_, _| ()).unwrap();
        core.submit(&opts, self.items(), host::run).unwrap();
        let late = OpOpts { deadline_ns: core.clock().now_ns() + 60_000_000_000, ..opts };
        core.submit(&late, self.items(), host::run).unwrap();
        let mut seen = 0;
        while seen < BATCH + 2 {
            seen += self.queue.wait(BATCH, 0, &mut |entry| assert_eq!(entry.status, 0)).unwrap();
        }
    }
}

#[test]
fn the_submit_path_does_not_allocate() {
    let _alone = alone();
    let runtime = Runtime::open(RuntimeOpts { workers: 2, ..RuntimeOpts::default() }).unwrap();
    let queue = Queue::open(runtime.core(), 1024, None).unwrap();
    let wish = AllocationRequest { bytes: 1 << 16, ..AllocationRequest::default() };
    let buffer = Arc::new(Buffer::map(&wish, None).unwrap());
    let load = Load { runtime, queue, buffer };
    // The timer heap is swept at a few thousand entries: warm up past that.
    (0..6000).for_each(|_| load.turn());
    let before = CALLS.load(Ordering::SeqCst);
    (0..2000).for_each(|_| load.turn());
    assert_eq!(CALLS.load(Ordering::SeqCst) - before, 0, "allocations in steady state");
    load.queue.close(0).unwrap();
}
