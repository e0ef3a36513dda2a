//! The notifier: one thread for deadlines and for everything that calls back.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::base::clock::Clock;
use crate::base::op::{RELEASED, ops};
use crate::base::owner::Owner;
use crate::base::panic;
use crate::base::queue::Queue;
use crate::base::slab::Key;
use crate::base::sync::{Arc, Condvar, Guard, Mutex};

enum Task {
    Queue(Arc<Queue>),
    Owner(Arc<dyn Owner>),
}

#[derive(Default)]
struct Inner {
    tasks: VecDeque<Task>,
    timers: BinaryHeap<Reverse<(u64, Key)>>,
    stop: bool,
    /// The thread has left: nobody will look in here again.
    ended: bool,
}

/// The notifier's inbox.
pub struct Notifier {
    inner: Mutex<Inner>,
    filled: Condvar,
}

impl Default for Notifier {
    fn default() -> Self {
        Notifier { inner: Mutex::new(Inner::default()), filled: Condvar::new() }
    }
}

/// Timers kept for ops that ended long before are swept beyond this many.
const SWEEP_TIMERS: usize = 4096;

impl Notifier {
    /// A callback queue has entries.
    pub fn queue_filled(&self, queue: &Arc<Queue>) {
        self.add(Task::Queue(queue.clone()));
    }

    /// Somebody wants a turn on the notifier's thread.
    pub fn ask(&self, owner: Arc<dyn Owner>) {
        self.add(Task::Owner(owner));
    }

    fn add(&self, task: Task) {
        let mut inner = self.inner.lock();
        if inner.ended {
            drop(inner);
            return drop(task); // kept in here it would keep its runtime for ever
        }
        inner.tasks.push_back(task);
        drop(inner);
        self.filled.notify_one();
    }

    /// Watches the deadline of an op.
    pub fn watch(&self, deadline_ns: u64, key: Key) {
        let mut swept = Vec::new();
        let mut inner = self.inner.lock();
        let timers = &mut inner.timers;
        if timers.len() >= SWEEP_TIMERS && timers.len() == timers.capacity() {
            // Before it grows: drop the timers of ops that are gone.
            timers.retain(|Reverse((_, key))| {
                let Some(op) = ops().pin_inside(*key) else { return false };
                let lives = op.state() & RELEASED == 0;
                // This pin may have become the last one: it goes outside the lock.
                swept.push(op);
                lives
            });
        }
        let sooner = timers.peek().is_none_or(|Reverse((first, _))| deadline_ns < *first);
        timers.push(Reverse((deadline_ns, key)));
        drop(inner);
        if sooner {
            self.filled.notify_one();
        }
    }

    /// Ends when nothing is left to call.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.filled.notify_all();
    }

    /// Expires what is due.
    pub fn tick(&self, now_ns: u64) {
        loop {
            let mut inner = self.inner.lock();
            let Some(&Reverse((deadline, key))) = inner.timers.peek() else { return };
            if deadline > now_ns {
                return;
            }
            inner.timers.pop();
            drop(inner);
            if let Some(op) = ops().pin_inside(key) {
                op.expire();
            }
        }
    }

    /// The notifier's life; `trouble` is called when a task panics.
    pub fn serve(&self, clock: &Clock, trouble: &dyn Fn(&str)) {
        loop {
            if let Err(text) = panic::catch(|| self.tick(clock.now_ns())) {
                trouble(&text);
            }
            let mut inner = self.inner.lock();
            let Some(task) = inner.tasks.pop_front() else {
                if inner.stop {
                    inner.ended = true;
                    return;
                }
                self.sleep(&mut inner, clock);
                continue;
            };
            drop(inner);
            let run = || match &task {
                Task::Queue(queue) => queue.deliver(),
                Task::Owner(owner) => {
                    owner.serve();
                    false
                }
            };
            let more = panic::catch(run).unwrap_or_else(|text| {
                trouble(&text);
                matches!(task, Task::Queue(_)) // its other entries are still owed
            });
            if more {
                self.add(task); // behind whatever else waits for a turn
            }
        }
    }

    fn sleep(&self, inner: &mut Guard<'_, Inner>, clock: &Clock) {
        // Read under the lock: a timer set since the last tick is seen here.
        match inner.timers.peek().map(|Reverse((deadline, _))| *deadline) {
            // A manual clock does not pass by itself: whoever moves it ticks.
            Some(deadline) if !clock.is_manual() => {
                let now = clock.now_ns();
                if deadline > now {
                    self.filled.wait_for(inner, deadline - now);
                }
            }
            _ => self.filled.wait(inner),
        }
    }
}
