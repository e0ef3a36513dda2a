//! The one guard around every exported function.

use std::ffi::c_void;

use crate::base::callback::Foreign;
use crate::base::panic::catch;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::error::{kvt_error_t, report};
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::status::kvt_status_t;

/// A caller's callback, not yet taken over. Data to destroy without a function
/// to call is a mistake: nobody would ever destroy it.
pub(crate) fn foreign<F: Copy>(
    function: Option<F>,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
) -> Result<Option<Arc<Foreign<F>>>> {
    match function {
        Some(function) => Ok(Some(Arc::new(Foreign::new(function, user_data, destroy)))),
        None if destroy.is_some() => fail!(Invalid, "a destroy without the callback it belongs to"),
        None => Ok(None),
    }
}

/// Runs the body of an exported function; nothing unwinds past it.
#[inline]
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> kvt_status_t {
    match catch(body) {
        Ok(Ok(())) => Status::Ok.code(),
        Ok(Err(error)) => error.status().code(),
        Err(text) => {
            log::error!("caught a defect: {text}");
            Status::Panic.code()
        }
    }
}

/// Like [`guard`], for calls that explain their failures through `err`.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
pub(crate) unsafe fn guard_err(
    err: *mut *mut kvt_error_t,
    body: impl FnOnce() -> Result<()>,
) -> kvt_status_t {
    let error = match catch(body) {
        Ok(Ok(())) => return Status::Ok.code(),
        Ok(Err(error)) => error,
        Err(text) => {
            log::error!("caught a defect: {text}");
            Error::new(Status::Panic, text)
        }
    };
    let status = error.status().code();
    // SAFETY: the caller's promise. A panic in here must not unwind into C either.
    if catch(|| unsafe { report(err, error) }).is_err() {
        return Status::Panic.code();
    }
    status
}
