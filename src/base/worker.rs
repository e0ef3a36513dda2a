//! The worker pool: lanes of ops, and threads that carry them out.

use std::collections::VecDeque;

use crate::base::op::OpRef;
use crate::base::panic;
use crate::base::queue::Outbox;
use crate::base::status::{Result, Status};
use crate::base::sync::{Condvar, Mutex};

/// Lanes, the first served first: demand, prefetch, background.
pub const LANES: usize = 3;
/// Ops one worker takes at a time.
const TAKE_OPS: usize = 32;
/// A worker takes no more once its ops move this much: others may help.
const TAKE_BYTES: u64 = 256 << 10;
/// Completions are posted at the latest after this much was moved.
const FLUSH_BYTES: u64 = 64 << 10;
/// Below this an op is not worth sharing between workers.
const SHARE_BYTES: u64 = 1 << 20;
/// After this many turns in a row, a waiting lower lane gets one.
const PATIENCE: u32 = 16;

struct Inner {
    lanes: [VecDeque<OpRef>; LANES],
    sleeping: u32,
    stop: bool,
    /// Turns since a lower lane that had work was last served.
    passed_over: u32,
}

/// What the workers take from.
pub struct Pool {
    workers: u32,
    inner: Mutex<Inner>,
    filled: Condvar,
}

/// Works on an op; a defect around its items ends it all the same.
fn guarded(op: &OpRef, outbox: &mut Outbox) -> u64 {
    panic::catch(|| op.work(outbox)).unwrap_or_else(|text| {
        op.core.poison(&text);
        let rest = || op.give_up(Status::Panic);
        if panic::catch(rest).is_err() {
            log::error!("an op could not be ended after a defect");
        }
        0
    })
}

impl Pool {
    /// A pool whose lanes hold `max_ops` without allocating.
    pub fn new(workers: u32, max_ops: u32) -> Result<Pool> {
        let mut lanes = [const { VecDeque::new() }; LANES];
        for lane in &mut lanes {
            lane.try_reserve_exact(max_ops as usize).map_err(|_| Status::NoMem)?;
        }
        Ok(Pool {
            workers,
            inner: Mutex::new(Inner { lanes, sleeping: 0, stop: false, passed_over: 0 }),
            filled: Condvar::new(),
        })
    }

    /// Queues ops. An op with much to do is queued once for each worker that may help.
    pub fn push(&self, lane: usize, ops: &[OpRef]) {
        let lane = lane.min(LANES - 1);
        let mut inner = self.inner.lock();
        if inner.stop {
            return; // the runtime has closed meanwhile, and has ended these ops
        }
        for op in ops {
            let queue = &mut inner.lanes[lane];
            let helpers = if op.items().len() > 1 && op.bytes() >= SHARE_BYTES {
                self.workers.min(op.items().len() as u32)
            } else {
                1
            };
            // Helpers are a favour: they never make the lane allocate.
            let room = (queue.capacity() - queue.len()).max(1) as u32;
            let shares = helpers.min(room);
            op.share(shares);
            (0..shares).for_each(|_| queue.push_back(op.clone()));
        }
        let wake = inner.sleeping > 0;
        drop(inner);
        if wake {
            self.filled.notify_one(); // it wakes the next if there is more
        }
    }

    /// Ops that wait for a worker.
    pub fn depth(&self) -> u64 {
        self.inner.lock().lanes.iter().map(|lane| lane.len() as u64).sum()
    }

    fn choose(inner: &mut Inner) -> Option<usize> {
        let first = (0..LANES).find(|i| !inner.lanes[*i].is_empty())?;
        let lower = (first + 1..LANES).rfind(|i| !inner.lanes[*i].is_empty());
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

    /// Fills `taken`; false when the pool stops.
    fn take(&self, taken: &mut Vec<OpRef>) -> bool {
        let mut inner = self.inner.lock();
        let lane = loop {
            if let Some(lane) = Self::choose(&mut inner) {
                break lane;
            }
            if inner.stop {
                return false;
            }
            inner.sleeping += 1;
            self.filled.wait(&mut inner);
            inner.sleeping -= 1;
        };
        let queue = &mut inner.lanes[lane];
        let fair = (queue.len() / self.workers as usize).clamp(1, TAKE_OPS);
        let mut bytes = 0;
        while taken.len() < fair && bytes < TAKE_BYTES {
            let Some(op) = queue.pop_front() else { break };
            bytes += op.bytes();
            taken.push(op);
        }
        let more = inner.sleeping > 0 && inner.lanes.iter().any(|lane| !lane.is_empty());
        drop(inner);
        if more {
            self.filled.notify_one();
        }
        true
    }

    /// A worker's life.
    pub fn serve(&self) {
        let mut taken = Vec::with_capacity(TAKE_OPS);
        let mut outbox = Outbox::new();
        while self.take(&mut taken) {
            let mut moved: u64 = 0;
            for op in taken.drain(..) {
                // What is done is not kept waiting for something large.
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

    /// Lets the workers end when nothing is left.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.filled.notify_all();
    }
}
