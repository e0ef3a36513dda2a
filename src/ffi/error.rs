//! Errors that explain themselves.

use std::ffi::{CString, c_char};

use crate::base::fork;
use crate::base::status::{Error, Result, Status};
use crate::ffi::abi::{Noun, Plain, capi, check_out, encode, free, guard, inspect, noun, write};
use crate::ffi::status::kvt_status_t;

/// A failure in words. Calls that take a `kvt_error_t **err` write one there
/// when they fail (only then) and `err` is not null. The variable must be null
/// or hold an error; that one is replaced. Free it with kvt_error_free. In a
/// forked child (KVT_E_FORKED) none is written.
pub struct kvt_error_t(());

/// The particulars of an error.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_error_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The message, UTF-8 and NUL-terminated. Lives until the error is freed
    /// or replaced.
    pub message: *const c_char,
    /// Length of the message without the NUL.
    pub message_bytes: u64,
    /// Offset in the input text, for errors about one; else UINT64_MAX.
    pub offset: u64,
    /// The status the failed call returned.
    pub status: kvt_status_t,
    /// errno, when the operating system was asked; else 0.
    pub os_errno: i32,
}

pub(crate) struct ErrorNoun {
    error: Error,
    text: CString,
}

noun!(ErrorNoun, kvt_error_t, 1, "error");

/// Hands an error out; without room for it the status alone must do.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
pub(crate) unsafe fn report(err: *mut *mut kvt_error_t, error: Error) {
    // In a forked child a lock may be held for ever by a thread that is not there.
    if fork::check().is_err() {
        return;
    }
    if err.is_null() {
        return;
    }
    // SAFETY: not null, and the caller's promise, here and below.
    unsafe {
        // The error of an earlier call goes; a handle that is none stays unread.
        let mut before = err.read();
        let _ = free(&raw mut before, |_| Ok(()));
        err.write(handle_of(error).unwrap_or(std::ptr::null_mut()));
    }
}

/// A new handle for an error.
pub(crate) fn handle_of(error: Error) -> Result<*mut kvt_error_t> {
    let clean = error.message().replace('\0', "?");
    let text = CString::new(clean).unwrap_or_default();
    ErrorNoun::table().insert(ErrorNoun { error, text }).map(encode::<ErrorNoun>)
}

/// Reads an error.
///
/// @param error  The error.
/// @param out    Filled in; start it with KVT_ERROR_INFO_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Ownership: `out->message` is borrowed until the error is freed or replaced.
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_error_info(
    error: *const kvt_error_t,
    out: *mut kvt_error_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let error = inspect(error)?;
    let detail = error.error.detail();
    write(
        out,
        &kvt_error_info_t {
            struct_size: 0,
            message: error.text.as_ptr(),
            message_bytes: error.text.as_bytes().len() as u64,
            offset: detail.and_then(|d| d.offset).unwrap_or(u64::MAX),
            status: error.error.status().code(),
            os_errno: detail.map_or(0, |d| d.os_errno),
        },
    );
    Ok(())
}

/// The message of an error, for printing.
///
/// @param error  The error, or null.
/// @return A NUL-terminated UTF-8 string, borrowed until the error is freed or
///         replaced. Never null: without an error it is an empty one.
///
/// Threading: any thread. Since 0.1.
#[capi]
pub extern "C" fn kvt_error_message(error: *const kvt_error_t) -> *const c_char {
    let mut text = c"".as_ptr();
    let status = guard(|| {
        text = inspect(error)?.text.as_ptr();
        Ok(())
    });
    debug_assert!(status <= Status::Ok.code());
    text
}

/// Frees an error and clears the variable.
///
/// @param error  Pointer to the handle; null, or a null handle, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `error` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_error_free(error: *mut *mut kvt_error_t) -> kvt_status_t {
    free(error, |_| Ok(()))
}
