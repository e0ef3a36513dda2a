//! The worker pool: ops queued by priority, and threads that execute them.

use std::collections::VecDeque;

use crate::base::op::OpRef;
use crate::base::panic;
use crate::base::queue::Outbox;
use crate::base::status::{Result, Status};
use crate::base::sync::{Condvar, Mutex};

/// Priorities, the first served first: demand, prefetch, background.
pub const PRIORITIES: usize = 3;
/// Most ops that a worker takes at a time.
const TAKE_OPS: usize = 32;
/// A worker takes no more ops once those it took move this many bytes.
const TAKE_BYTES: u64 = 256 << 10;
/// Completions are posted at the latest after this many bytes were moved.
const FLUSH_BYTES: u64 = 64 << 10;
/// Smaller ops are not shared between workers.
const SHARE_BYTES: u64 = 1 << 20;
/// After this many turns in a row, a waiting lower priority gets one.
const PATIENCE: u32 = 16;

struct Inner {
    queues: [VecDeque<OpRef>; PRIORITIES],
    sleeping: u32,
    stop: bool,
    /// Turns since a lower priority with work was last served.
    passed_over: u32,
}

/// The queues that the workers take ops from.
pub struct Pool {
    workers: u32,
    inner: Mutex<Inner>,
    filled: Condvar,
}

/// Executes an op. A panic outside of its items ends the op, too.
fn guarded(op: &OpRef, outbox: &mut Outbox) -> u64 {
    panic::catch(|| op.work(outbox)).unwrap_or_else(|text| {
        op.core.poison(&text);
        let rest = || op.abort(Status::Panic);
        if panic::catch(rest).is_err() {
            log::error!("cannot end an op after a panic");
        }
        0
    })
}

impl Pool {
    /// A pool whose queues each hold `max_ops` without allocating.
    pub fn new(workers: u32, max_ops: u32) -> Result<Pool> {
        let mut queues = [const { VecDeque::new() }; PRIORITIES];
        for queue in &mut queues {
            queue.try_reserve_exact(max_ops as usize).map_err(|_| Status::NoMem)?;
        }
        Ok(Pool {
            workers,
            inner: Mutex::new(Inner { queues, sleeping: 0, stop: false, passed_over: 0 }),
            filled: Condvar::new(),
        })
    }

    /// Queues ops. A large op is queued once for each worker that may share it.
    pub fn push(&self, priority: usize, ops: &[OpRef]) {
        let priority = priority.min(PRIORITIES - 1);
        let mut inner = self.inner.lock();
        if inner.stop {
            return; // the runtime has closed meanwhile and has ended these ops
        }
        for op in ops {
            let queue = &mut inner.queues[priority];
            let helpers = if op.items().len() > 1 && op.bytes() >= SHARE_BYTES {
                self.workers.min(op.items().len() as u32)
            } else {
                1
            };
            // Helpers are optional: they never make the queue allocate.
            let free = (queue.capacity() - queue.len()).max(1) as u32;
            let shares = helpers.min(free);
            op.share(shares);
            (0..shares).for_each(|_| queue.push_back(op.clone()));
        }
        let wake = inner.sleeping > 0;
        drop(inner);
        if wake {
            self.filled.notify_one(); // that worker wakes the next if there is more
        }
    }

    /// Ops that wait for a worker.
    pub fn depth(&self) -> u64 {
        self.inner.lock().queues.iter().map(|queue| queue.len() as u64).sum()
    }

    fn choose(inner: &mut Inner) -> Option<usize> {
        let first = (0..PRIORITIES).find(|i| !inner.queues[*i].is_empty())?;
        let lower = (first + 1..PRIORITIES).rfind(|i| !inner.queues[*i].is_empty());
        match lower {
            Some(lower) if inner.passed_over >= PATIENCE => {
                inner.passed_over = 0;
                Some(lower)
            }
            Some(_) => {
                inner.passed_over += 1;
                Some(first)
            }
            None => Some(first),
        }
    }

    /// Fills `taken`; false when the pool has stopped.
    fn take(&self, taken: &mut Vec<OpRef>) -> bool {
        let mut inner = self.inner.lock();
        let priority = loop {
            if let Some(priority) = Self::choose(&mut inner) {
                break priority;
            }
            if inner.stop {
                return false;
            }
            inner.sleeping += 1;
            self.filled.wait(&mut inner);
            inner.sleeping -= 1;
        };
        let queue = &mut inner.queues[priority];
        let fair = (queue.len() / self.workers as usize).clamp(1, TAKE_OPS);
        let mut bytes = 0;
        while taken.len() < fair && bytes < TAKE_BYTES {
            let Some(op) = queue.pop_front() else { break };
            bytes += op.bytes();
            taken.push(op);
        }
        let more = inner.sleeping > 0 && inner.queues.iter().any(|queue| !queue.is_empty());
        drop(inner);
        if more {
            self.filled.notify_one();
        }
        true
    }

    /// Runs a worker until the pool stops.
    pub fn serve(&self) {
        let mut taken = Vec::with_capacity(TAKE_OPS);
        let mut outbox = Outbox::new();
        while self.take(&mut taken) {
            let mut moved: u64 = 0;
            for op in taken.drain(..) {
                // Completions do not wait for a large op.
                if moved.saturating_add(op.bytes()) >= FLUSH_BYTES {
                    outbox.flush();
                    moved = 0;
                }
                moved += guarded(&op, &mut outbox);
                if moved >= FLUSH_BYTES {
                    outbox.flush();
                    moved = 0;
                }
            }
            outbox.flush();
        }
    }

    /// Lets the workers end when no op is left.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.filled.notify_all();
    }
}
