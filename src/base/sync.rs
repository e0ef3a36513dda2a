//! Locks, atomics and threads. No other module names those of std or parking_lot.
//!
//! With the cargo feature `shuttle` the same code runs under a model checker that explores
//! interleavings. The locks that a thread holds are counted: log messages reach the host's callback
//! after the last one is released, and in debug builds a callback under a lock is an assertion
//! failure instead of a deadlock in an engine.

use crate::base::logging;
use crate::base::status::{Error, Result};

#[cfg(not(feature = "shuttle"))]
mod imp {
    pub use parking_lot::{Condvar as RawCondvar, Mutex as RawMutex, MutexGuard as RawGuard};
    pub use std::sync::Arc;
    pub use std::sync::Weak;
    pub use std::sync::atomic;
    pub use std::thread::JoinHandle;

    pub fn lock<T: ?Sized>(m: &RawMutex<T>) -> RawGuard<'_, T> {
        m.lock()
    }

    pub fn spawn(
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        std::thread::Builder::new().name(name).spawn(body)
    }
}

#[cfg(feature = "shuttle")]
mod imp {
    pub use shuttle::sync::atomic;
    pub use shuttle::sync::{Condvar as RawCondvar, Mutex as RawMutex, MutexGuard as RawGuard};
    pub use shuttle::thread::JoinHandle;
    // Reference counts come from std: the models do not check them.
    pub use std::sync::{Arc, Weak};

    pub fn lock<T: ?Sized>(m: &RawMutex<T>) -> RawGuard<'_, T> {
        m.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn spawn(
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        shuttle::thread::Builder::new().name(name).spawn(body)
    }
}

pub use imp::{Arc, JoinHandle, Weak, atomic};

thread_local! {
    static LOCKS_HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// Counts a lock that is taken or released. After the last release, delivers the messages that were
/// logged under it: a callback of the host must not run under a lock.
fn note_lock(delta: i32) {
    // try_with: the destructor of another thread-local may drop a guard.
    let held = LOCKS_HELD.try_with(|n| {
        n.set(n.get().wrapping_add_signed(delta));
        n.get()
    });
    if delta < 0 && held == Ok(0) {
        logging::deliver_deferred();
    }
}

/// Whether this thread holds a lock of the library.
pub fn is_lock_held() -> bool {
    // Shuttle runs all modelled threads on one thread, where the count has no meaning.
    cfg!(not(feature = "shuttle")) && LOCKS_HELD.try_with(std::cell::Cell::get).unwrap_or(0) > 0
}

/// Asserts (debug builds) that this thread holds no lock of the library.
pub fn assert_no_lock_held(_why: &str) {
    #[cfg(debug_assertions)]
    assert!(!is_lock_held(), "{_why} under a lock of the library");
}

/// A mutex without poisoning: the C boundary poisons the object after a panic.
pub struct Mutex<T: ?Sized>(imp::RawMutex<T>);

/// A held [`Mutex`].
pub struct Guard<'a, T: ?Sized>(Option<imp::RawGuard<'a, T>>);

impl<T> Mutex<T> {
    /// A lock around `value`.
    #[cfg(not(feature = "shuttle"))]
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(imp::RawMutex::new(value))
    }

    /// A lock around `value`.
    #[cfg(feature = "shuttle")]
    pub fn new(value: T) -> Mutex<T> {
        Mutex(imp::RawMutex::new(value))
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        let raw = imp::lock(&self.0);
        note_lock(1);
        Guard(Some(raw))
    }
}

const TAKEN: &str = "a guard is empty only inside Condvar::wait";

impl<T: ?Sized> std::ops::Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect(TAKEN)
    }
}

impl<T: ?Sized> std::ops::DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect(TAKEN)
    }
}

impl<T: ?Sized> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.0.take().is_some() {
            note_lock(-1);
        }
    }
}

/// Delivers deferred log messages before a thread waits, with the lock released meanwhile. Returns
/// whether there were any: then the thread must check its condition again before it waits.
#[cfg(not(feature = "shuttle"))]
fn delivered<T>(guard: &mut Guard<'_, T>) -> bool {
    /// Counts the lock again, also if a log callback panics.
    struct Recount;
    impl Drop for Recount {
        fn drop(&mut self) {
            LOCKS_HELD.set(1);
        }
    }
    if !logging::has_deferred() || LOCKS_HELD.get() != 1 {
        return false;
    }
    LOCKS_HELD.set(0);
    let _recount = Recount;
    imp::RawGuard::unlocked(guard.0.as_mut().expect(TAKEN), logging::deliver_deferred);
    true
}

/// A condition variable for [`Mutex`].
pub struct Condvar(imp::RawCondvar);

impl Default for Condvar {
    fn default() -> Self {
        Condvar::new()
    }
}

impl Condvar {
    /// A condition variable without waiters.
    #[cfg(not(feature = "shuttle"))]
    pub const fn new() -> Condvar {
        Condvar(imp::RawCondvar::new())
    }

    /// A condition variable without waiters.
    #[cfg(feature = "shuttle")]
    pub fn new() -> Condvar {
        Condvar(imp::RawCondvar::new())
    }

    /// Wakes one waiter.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes every waiter.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits for a wake-up; may return early.
    pub fn wait<T>(&self, guard: &mut Guard<'_, T>) {
        #[cfg(not(feature = "shuttle"))]
        if !delivered(guard) {
            self.0.wait(guard.0.as_mut().expect(TAKEN));
        }
        #[cfg(feature = "shuttle")]
        {
            let raw = guard.0.take().expect(TAKEN);
            guard.0 = Some(self.0.wait(raw).unwrap_or_else(|poisoned| poisoned.into_inner()));
        }
    }

    /// Waits for a wake-up, at most `timeout_ns`; may return early.
    pub fn wait_for<T>(&self, guard: &mut Guard<'_, T>, timeout_ns: u64) {
        #[cfg(not(feature = "shuttle"))]
        if !delivered(guard) {
            let timeout = std::time::Duration::from_nanos(timeout_ns);
            self.0.wait_for(guard.0.as_mut().expect(TAKEN), timeout);
        }
        // Time does not pass in a model.
        #[cfg(feature = "shuttle")]
        {
            let _ = timeout_ns;
            let raw = guard.0.take().expect(TAKEN);
            drop(raw);
            shuttle::thread::yield_now();
            unreachable!("bounded waits are not modelled");
        }
    }
}

/// Starts a named thread.
pub fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    imp::spawn(name, body).map_err(|_| Error::os("cannot start a thread"))
}

/// Cores this process may run on.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_callback_under_a_lock_fails_the_assertion() {
        let m = Mutex::new(1);
        assert_no_lock_held("probe");
        let guard = m.lock();
        let caught = std::panic::catch_unwind(|| assert_no_lock_held("probe"));
        assert_eq!(caught.is_err(), cfg!(debug_assertions));
        drop(guard);
        assert_no_lock_held("probe");
    }

    #[test]
    fn wait_for_returns_after_its_timeout() {
        let (m, c) = (Mutex::new(()), Condvar::new());
        let mut guard = m.lock();
        let before = std::time::Instant::now();
        c.wait_for(&mut guard, 2_000_000);
        assert!(before.elapsed().as_micros() >= 1_000);
    }
}
