//! The notifier: one thread that watches deadlines and calls callbacks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::base::clock::Clock;
use crate::base::op::{Owner, RELEASED, ops};
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
    /// The thread has ended: no task is executed any more.
    ended: bool,
}

/// The inbox of the notifier thread.
pub struct Notifier {
    inner: Mutex<Inner>,
    filled: Condvar,
}

impl Default for Notifier {
    fn default() -> Self {
        Notifier { inner: Mutex::new(Inner::default()), filled: Condvar::new() }
    }
}

/// Timers of ended ops are removed once there are this many timers.
const SWEEP_TIMERS: usize = 4096;

impl Notifier {
    /// Schedules the delivery of a callback queue that has entries.
    pub fn queue_filled(&self, queue: &Arc<Queue>) {
        self.add(Task::Queue(queue.clone()));
    }

    /// Schedules [`Owner::serve`] on the notifier thread.
    pub fn schedule(&self, owner: Arc<dyn Owner>) {
        self.add(Task::Owner(owner));
    }

    fn add(&self, task: Task) {
        let mut inner = self.inner.lock();
        if inner.ended {
            drop(inner);
            return drop(task); // a task kept here would keep its runtime alive for ever
        }
        inner.tasks.push_back(task);
        drop(inner);
        self.filled.notify_one();
    }

    /// Watches the deadline of an op.
    pub fn watch(&self, deadline_ns: u64, key: Key) {
        let mut removed = Vec::new();
        let mut inner = self.inner.lock();
        let timers = &mut inner.timers;
        if timers.len() >= SWEEP_TIMERS && timers.len() == timers.capacity() {
            // Remove the timers of ended ops before the heap grows.
            timers.retain(|Reverse((_, key))| {
                let Some(op) = ops().pin_inside(*key) else { return false };
                let lives = op.state() & RELEASED == 0;
                // This pin may be the last one: it is dropped outside the lock.
                removed.push(op);
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

    /// Lets the thread end when no task is left.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.filled.notify_all();
    }

    /// Expires the ops whose deadline has passed.
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

    /// Runs the notifier thread; `on_panic` is called when a task panics.
    pub fn serve(&self, clock: &Clock, on_panic: &dyn Fn(&str)) {
        loop {
            if let Err(text) = panic::catch(|| self.tick(clock.now_ns())) {
                on_panic(&text);
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
                on_panic(&text);
                matches!(task, Task::Queue(_)) // the other entries must still be delivered
            });
            if more {
                self.add(task); // behind the other tasks
            }
        }
    }

    fn sleep(&self, inner: &mut Guard<'_, Inner>, clock: &Clock) {
        // Read under the lock: a timer added since the last tick is seen here.
        match inner.timers.peek().map(|Reverse((deadline, _))| *deadline) {
            // A manual clock stands still: the code that advances it calls `tick`.
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
