//! The log sink.

use std::ffi::{c_char, c_void};

use log::{Level, LevelFilter};

use crate::base::callback::Foreign;
use crate::base::sync::Arc;
use crate::base::{fork, logging};
use crate::fail;
use crate::ffi::abi::{capi, foreign};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;

/// Nothing is logged.
pub const KVT_LOG_OFF: u32 = 0;
/// Something failed that should not.
pub const KVT_LOG_ERROR: u32 = 1;
/// Something degraded.
pub const KVT_LOG_WARN: u32 = 2;
/// Something worth knowing, rarely.
pub const KVT_LOG_INFO: u32 = 3;
/// For debugging.
pub const KVT_LOG_DEBUG: u32 = 4;
/// Everything.
pub const KVT_LOG_TRACE: u32 = 5;

/// Releases `user_data`. Called once, after the last call of the callback it
/// was registered with. It must not unwind.
pub type kvt_destroy_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// Receives a log message; texts are UTF-8, not NUL-terminated, borrowed for
/// the call. May be called from any thread, and from several at once. It must
/// not unwind.
pub type kvt_log_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        level: u32,
        target: *const c_char,
        target_bytes: u64,
        message: *const c_char,
        message_bytes: u64,
    ),
>;

/// Sets the process-wide log sink, or removes it. Without one the library says
/// nothing; it never writes to standard output or error.
///
/// @param level      KVT_LOG_*: the most detailed level that is passed on.
/// @param callback   The sink; null removes the present one.
/// @param user_data  Handed to the callback; taken over on success only.
/// @param destroy    Releases user_data; may be null.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID; KVT_E_STATE in a Rust program with a logger of its own;
///         KVT_E_FORKED.
///
/// Threading: any thread. The former sink may still be running in another
/// thread when this returns; its destroy is called after that. Since 0.1.
///
/// # Safety
/// The callback and its data must be usable from any thread.
#[capi]
pub unsafe extern "C" fn kvt_log_set(
    level: u32,
    callback: kvt_log_fn,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    fork::check()?;
    let filter = match level {
        KVT_LOG_OFF => LevelFilter::Off,
        KVT_LOG_ERROR => LevelFilter::Error,
        KVT_LOG_WARN => LevelFilter::Warn,
        KVT_LOG_INFO => LevelFilter::Info,
        KVT_LOG_DEBUG => LevelFilter::Debug,
        KVT_LOG_TRACE => LevelFilter::Trace,
        _ => fail!(Invalid, "log level {level} is none of 0 to {KVT_LOG_TRACE}"),
    };
    let Some(foreign) = foreign(callback, user_data, destroy)? else {
        return logging::set(None, LevelFilter::Off);
    };
    let inside = foreign.clone();
    logging::set(Some(Arc::new(move |l, t, m| pass_on(&inside, l, t, m))), filter)?;
    foreign.keep();
    Ok(())
}

type LogCall = unsafe extern "C" fn(*mut c_void, u32, *const c_char, u64, *const c_char, u64);

fn pass_on(foreign: &Foreign<LogCall>, level: Level, target: &str, message: &str) {
    foreign.call(|function, user_data| {
        // SAFETY: the function and its data came together from the caller; texts
        // are valid for the call.
        unsafe {
            function(
                user_data,
                level as u32,
                target.as_ptr().cast(),
                target.len() as u64,
                message.as_ptr().cast(),
                message.len() as u64,
            );
        }
    });
}
