//! Foreign callbacks: function, user data, destroy; and who is inside one.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::status::{Result, Status};
use crate::base::sync::assert_no_lock_held;

/// Called once when the library will not call the callback again.
pub type DestroyFn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A caller's function with its data. Dropping it calls `destroy`.
///
/// The caller promises that the function and the data may be used from any
/// thread; the library never calls one from two threads at once unless the
/// function's documentation says so.
pub struct Foreign<F: Copy> {
    function: F,
    user_data: *mut c_void,
    destroy: DestroyFn,
    kept: AtomicBool,
}

// SAFETY: the header demands callbacks that may be called from any thread; the
// data pointer is only ever handed back to them.
unsafe impl<F: Copy + Send> Send for Foreign<F> {}
// SAFETY: as above.
unsafe impl<F: Copy + Sync> Sync for Foreign<F> {}

impl<F: Copy> Foreign<F> {
    /// A callback that is not yet taken over: until [`Foreign::keep`] its data
    /// stays the caller's.
    pub fn new(function: F, user_data: *mut c_void, destroy: DestroyFn) -> Foreign<F> {
        Foreign { function, user_data, destroy, kept: AtomicBool::new(false) }
    }

    /// Takes over `user_data`: from here on `destroy` will be called once.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// Calls through `body`, with no lock held and re-entry marked.
    pub fn call<R>(&self, body: impl FnOnce(F, *mut c_void) -> R) -> R {
        let _inside = Inside::enter();
        body(self.function, self.user_data)
    }

    /// The same of a function whose documentation says that it calls nothing of the library and
    /// waits for nobody who does: a lock may be held.
    pub fn call_leaf<R>(&self, body: impl FnOnce(F, *mut c_void) -> R) -> R {
        let _inside = Inside::enter_leaf();
        body(self.function, self.user_data)
    }
}

impl<F: Copy> Drop for Foreign<F> {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            return; // what it was meant for failed: the data stays the caller's
        }
        if let Some(destroy) = self.destroy {
            let _inside = Inside::enter();
            // SAFETY: the caller gave `destroy` for exactly this pointer and it is
            // called once, here, after the last use.
            unsafe { destroy(self.user_data) };
        }
    }
}

struct Inside;

impl Inside {
    fn enter() -> Inside {
        assert_no_lock_held("a foreign callback");
        Inside::enter_leaf()
    }

    fn enter_leaf() -> Inside {
        DEPTH.with(|d| d.set(d.get() + 1));
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        DEPTH.with(|d| d.set(d.get() - 1));
    }
}

/// Fails when this thread is inside a foreign callback: for calls that wait for
/// the very thread they would run on.
pub fn refuse_reentry() -> Result<()> {
    if DEPTH.with(Cell::get) == 0 { Ok(()) } else { Err(Status::Reentrant.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    unsafe extern "C" fn count(user_data: *mut c_void) {
        // SAFETY: the tests pass a live AtomicU32.
        unsafe { (*user_data.cast::<AtomicU32>()).fetch_add(1, Ordering::SeqCst) };
    }

    #[test]
    fn destroy_runs_once_and_reentry_is_seen() {
        let hits = AtomicU32::new(0);
        let data = (&raw const hits).cast_mut().cast::<c_void>();
        let foreign = Foreign::new(count as unsafe extern "C" fn(*mut c_void), data, Some(count));
        drop(Foreign::new(count as unsafe extern "C" fn(*mut c_void), data, Some(count)));
        foreign.keep();
        assert!(refuse_reentry().is_ok());
        foreign.call(|f, user_data| {
            assert_eq!(refuse_reentry().unwrap_err().status(), Status::Reentrant);
            // SAFETY: `count` with the data it was registered with.
            unsafe { f(user_data) };
        });
        assert!(refuse_reentry().is_ok());
        assert_eq!(hits.load(Ordering::SeqCst), 1);
        drop(foreign);
        assert_eq!(hits.load(Ordering::SeqCst), 2);
    }
}
