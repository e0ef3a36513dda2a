//! Callbacks of the caller: function, user data, destroy function, and re-entry detection.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::status::{Result, Status};
use crate::base::sync::assert_no_lock_held;

/// Called once, after the last call of the callback.
pub type DestroyFn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A caller's function with its user data. Dropping it calls `destroy`.
///
/// The caller guarantees that the function and the data may be used from any thread. The
/// library never calls one from two threads at once unless its documentation says so.
pub struct Foreign<F: Copy> {
    function: F,
    user_data: *mut c_void,
    destroy: DestroyFn,
    kept: AtomicBool,
}

// SAFETY: the header requires callbacks that may be called from any thread; the data pointer
// is only passed back to them.
unsafe impl<F: Copy + Send> Send for Foreign<F> {}
// SAFETY: as above.
unsafe impl<F: Copy + Sync> Sync for Foreign<F> {}

impl<F: Copy> Foreign<F> {
    /// Wraps a callback. Until [`Foreign::keep`] the user data belongs to the caller.
    pub fn new(function: F, user_data: *mut c_void, destroy: DestroyFn) -> Foreign<F> {
        Foreign { function, user_data, destroy, kept: AtomicBool::new(false) }
    }

    /// Takes ownership of the user data: `destroy` will be called once.
    pub fn keep(&self) {
        self.kept.store(true, Ordering::Release);
    }

    /// Calls through `body`, with no lock held and re-entry marked.
    pub fn call<R>(&self, body: impl FnOnce(F, *mut c_void) -> R) -> R {
        let _inside = Inside::enter();
        body(self.function, self.user_data)
    }

    /// Calls through `body` while a lock may be held. The documentation of such a function
    /// says that it neither calls the library nor waits for a thread that does.
    pub fn call_leaf<R>(&self, body: impl FnOnce(F, *mut c_void) -> R) -> R {
        let _inside = Inside::enter_leaf();
        body(self.function, self.user_data)
    }
}

impl<F: Copy> Drop for Foreign<F> {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Acquire) {
            return; // the registration failed: the data belongs to the caller
        }
        if let Some(destroy) = self.destroy {
            let _inside = Inside::enter();
            // SAFETY: the caller passed `destroy` for exactly this pointer; it is called
            // once, here, after the last use.
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

/// Fails when this thread runs a callback. Calls that wait for the thread they would run on
/// use it.
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
    fn destroy_runs_once_and_reentry_is_refused() {
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
