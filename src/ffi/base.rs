//! Statuses, errors, versions, logging, features and spec strings; and the rules of all functions.
//!
//! The rules, said once (docs/reference/c.md explains them):
//!
//! - Status: a function that can fail returns kvt_status_t: 0 is success, negative is an error. On
//!   failure no output is written, except counts and sizes with KVT_E_TOO_SMALL. Any function may
//!   return KVT_E_INVALID (an argument outside its range), KVT_E_HANDLE (stale, foreign or null),
//!   KVT_E_CLOSED, KVT_E_FORKED, KVT_E_NOMEM, KVT_E_TOO_NEW (a struct has a field that this library
//!   does not know), KVT_E_REENTRANT and KVT_E_PANIC. `@return` names only the other codes.
//! - err: receives an error object that explains a failure; free it with kvt_error_free. May be
//!   null.
//! - Pointers must not be null, unless the comment says so. Null options mean the defaults.
//! - Structs start with KVT_..._INIT, which sets struct_size. Zero is the default of every field;
//!   reserved fields are 0. A struct without struct_size is an element of arrays; pass its sizeof
//!   as stride_bytes.
//! - Arrays: an output array has `capacity` entries (or `out_capacity` bytes). The call writes the
//!   number of entries to its count, also with KVT_E_TOO_SMALL. A null array with capacity 0 asks
//!   for the number, where it is known before the call.
//! - Handles are never dereferenced: a stale one is an error. Objects that a call returns belong to
//!   the caller; the close or free takes a pointer to the handle, clears it, and accepts null.
//!   Structs and arrays are copied during the call, unless the comment says that they are borrowed.
//! - Threads: any thread may call any function, also inside a callback. A call that waits returns
//!   KVT_E_REENTRANT there. Comments name only what differs ("Threading: ...").
//! - Time: deadlines are CLOCK_MONOTONIC nanoseconds, 0 = none. Durations end in _ns, sizes in
//!   _bytes.
//! - Texts are UTF-8 with a length in bytes, or KVT_NUL_TERMINATED as the length. Output has no NUL
//!   at its end.
//! - Enumerations: a type such as kvt_level_t is an integer of fixed width, and the enum below it
//!   names its values. Values may be added. Types that end in _flags_t are sets of bits.
//!
//! A program checks that header and library fit before its first other call:
//!
//! ```c
//! kvt_error_t *err = NULL;
//! kvt_status_t status = kvt_abi_check(KVT_HEADER_VERSION, &err);
//! if (status != KVT_OK) {
//!     fprintf(stderr, "%s: %s\n", kvt_status_name(status), kvt_error_message(err));
//!     kvt_error_free(&err);
//!     return 1;
//! }
//! ```

use std::ffi::{CString, c_char, c_void};

use log::{Level, LevelFilter};

use crate::base::callback::Foreign;
use crate::base::spec::{Spec, nearest};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::base::{fork, logging};
use crate::fail;
use crate::ffi::abi::{
    Noun, Plain, capi, check_out, encode, foreign, free, guard, inspect, noun, put, require, text,
    write,
};
use crate::io::probe::{FEATURES, feature};

// Statuses.

/// Status of a call: 0 is success, negative is an error. Later libraries add codes and change none:
/// treat a negative code that your header does not list as an error.
pub type kvt_status_t = i32;

/// The call succeeded.
pub const KVT_OK: kvt_status_t = 0;
/// An argument is null, out of range or has unknown flags.
pub const KVT_E_INVALID: kvt_status_t = -1;
/// A handle is null, stale, of another type or not from this library.
pub const KVT_E_HANDLE: kvt_status_t = -2;
/// A struct sets a field that this library does not know.
pub const KVT_E_TOO_NEW: kvt_status_t = -3;
/// An output buffer is too small; the call has written the size that is needed.
pub const KVT_E_TOO_SMALL: kvt_status_t = -4;
/// The system has no memory for the call.
pub const KVT_E_NOMEM: kvt_status_t = -5;
/// The budget of a tier has too few free bytes.
pub const KVT_E_BUDGET: kvt_status_t = -6;
/// A bounded queue or table is full: drain completions, free ops, then retry.
pub const KVT_E_AGAIN: kvt_status_t = -7;
/// The object is in use by work in flight: wait for its release, then retry.
pub const KVT_E_BUSY: kvt_status_t = -8;
/// The object is closed or closing.
pub const KVT_E_CLOSED: kvt_status_t = -9;
/// The operation was cancelled before it completed.
pub const KVT_E_CANCELLED: kvt_status_t = -10;
/// The deadline passed before the operation completed.
pub const KVT_E_TIMEOUT: kvt_status_t = -11;
/// The call is not allowed inside a callback.
pub const KVT_E_REENTRANT: kvt_status_t = -12;
/// This process is a fork of the one that opened the library.
pub const KVT_E_FORKED: kvt_status_t = -13;
/// A defect inside the library was caught. The object is poisoned: close it.
pub const KVT_E_PANIC: kvt_status_t = -14;
/// The program was built against a header that does not fit this library.
pub const KVT_E_ABI: kvt_status_t = -15;
/// The object does not support the operation, or the library was built without it.
pub const KVT_E_UNSUPPORTED: kvt_status_t = -16;
/// A device, tier or feature that the call needs does not exist here, or is lost.
pub const KVT_E_UNAVAILABLE: kvt_status_t = -17;
/// The requested object or data does not exist.
pub const KVT_E_NOT_FOUND: kvt_status_t = -18;
/// Bytes do not match their checksum: treat them as absent.
pub const KVT_E_CORRUPT: kvt_status_t = -19;
/// The operating system reported an error.
pub const KVT_E_IO: kvt_status_t = -20;
/// A spec string is malformed; the error object has the offset.
pub const KVT_E_SPEC: kvt_status_t = -21;
/// A documented limit was exceeded.
pub const KVT_E_LIMIT: kvt_status_t = -22;
/// The quota of locked memory (RLIMIT_MEMLOCK) is too small.
pub const KVT_E_PIN_QUOTA: kvt_status_t = -23;
/// The object is not in a state that allows the call.
pub const KVT_E_STATE: kvt_status_t = -24;
/// The process that serves a shared store is gone.
pub const KVT_E_LOST: kvt_status_t = -25;

/// Length of a text that ends with a NUL, after at most 1 MiB.
pub const KVT_NUL_TERMINATED: u64 = u64::MAX;

/// Returns the name of a status, such as "KVT_E_BUSY"; "KVT_E_UNKNOWN" if the library does not know
/// it. The string is static, NUL-terminated and never null. Threading: also in a forked child.
#[capi]
pub extern "C" fn kvt_status_name(status: kvt_status_t) -> *const c_char {
    Status::from_code(status).map_or(c"KVT_E_UNKNOWN".as_ptr(), Status::name_c)
}

/// Returns a sentence on what a status means and what the caller can do. The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
#[capi]
pub extern "C" fn kvt_status_str(status: kvt_status_t) -> *const c_char {
    Status::from_code(status)
        .map_or(c"a status of a newer library: treat it as an error".as_ptr(), Status::describe_c)
}

// Errors.

/// The explanation of a failure. Calls with a `kvt_error_t **err` write an error there only if they
/// fail. The variable must be null or hold an error, which is freed and replaced. In a forked child
/// (KVT_E_FORKED) no error is written.
pub struct kvt_error_t(());

/// Details of an error.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_error_info_t {
    pub struct_size: u64,
    /// UTF-8 and NUL-terminated; valid until the error is freed or replaced.
    pub message: *const c_char,
    /// Without the NUL.
    pub message_bytes: u64,
    /// Byte offset in the input text; UINT64_MAX = the error is not about a text.
    pub offset: u64,
    /// Status that the failed call returned.
    pub status: kvt_status_t,
    /// errno of the failed system call; 0 = none failed.
    pub os_errno: i32,
}

pub(crate) struct ErrorNoun {
    error: Error,
    text: CString,
}

noun!(ErrorNoun, kvt_error_t, 1, "error");

/// Writes an error to the caller's variable, or null if there is no memory for it.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
pub(crate) unsafe fn report(err: *mut *mut kvt_error_t, error: Error) {
    // In a forked child, a thread that does not exist there may hold a lock forever.
    if fork::check().is_err() {
        return;
    }
    if err.is_null() {
        return;
    }
    // SAFETY: not null, and the caller's promise, here and below.
    unsafe {
        // Frees the error of an earlier call. An invalid handle is not followed.
        let mut previous = err.read();
        let _ = free(&raw mut previous, |_| Ok(()));
        err.write(handle_of(error).unwrap_or(std::ptr::null_mut()));
    }
}

/// Inserts an error, and returns its handle.
pub(crate) fn handle_of(error: Error) -> Result<*mut kvt_error_t> {
    let message = error.message().replace('\0', "?");
    let text = CString::new(message).unwrap_or_default();
    ErrorNoun::table().insert(ErrorNoun { error, text }).map(encode::<ErrorNoun>)
}

/// Reads the details of an error. `out->message` is borrowed until the error is freed or replaced.
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

/// Returns the message of an error, UTF-8 and NUL-terminated; empty if the handle is null or stale.
/// It is borrowed until the error is freed or replaced.
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

/// Frees an error.
#[capi]
pub unsafe extern "C" fn kvt_error_free(error: *mut *mut kvt_error_t) -> kvt_status_t {
    free(error, |_| Ok(()))
}

// Versions.

/// Version of this header.
pub const KVT_VERSION_MAJOR: u32 = 0;
pub const KVT_VERSION_MINOR: u32 = 1;
pub const KVT_VERSION_PATCH: u32 = 0;
/// Version of this header as one number: (major << 32) | (minor << 16) | patch.
pub const KVT_HEADER_VERSION: u64 = 65536;

const VERSION_TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// Returns the version of the library as text, such as "0.1.0". The string is static,
/// NUL-terminated and never null. Threading: also in a forked child.
#[capi]
pub extern "C" fn kvt_version_str() -> *const c_char {
    VERSION_TEXT.as_ptr().cast()
}

/// Reads the version of the library as one number, in the format of KVT_HEADER_VERSION. Threading:
/// also in a forked child.
#[capi]
pub unsafe extern "C" fn kvt_version(out: *mut u64) -> kvt_status_t {
    require(out)?;
    out.write(KVT_HEADER_VERSION);
    Ok(())
}

/// Checks that a program can use this library. Call it once, before any other function:
/// kvt_abi_check(KVT_HEADER_VERSION, &err).
///
/// Before 1.0 the library must have the same minor version as the program's header, and at least
/// its patch version; from 1.0 on the same major version, and at least its minor version.
///
/// @return KVT_E_ABI.
#[capi]
pub unsafe extern "C" fn kvt_abi_check(
    header_version: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if fits(header_version, KVT_HEADER_VERSION) {
        return Ok(());
    }
    let text = format!(
        "header version {} does not fit library version {}: rebuild the program, or install the \
         library of its version",
        dotted(header_version),
        dotted(KVT_HEADER_VERSION)
    );
    Err(Error::new(Status::Abi, text))
}

fn parts(version: u64) -> (u64, u64, u64) {
    (version >> 32, version >> 16 & 0xffff, version & 0xffff)
}

fn dotted(version: u64) -> String {
    let (major, minor, patch) = parts(version);
    format!("{major}.{minor}.{patch}")
}

fn fits(header: u64, library: u64) -> bool {
    let (header, library) = (parts(header), parts(library));
    match header.0 {
        0 => (header.0, header.1) == (library.0, library.1) && header.2 <= library.2,
        major => major == library.0 && (header.1, header.2) <= (library.1, library.2),
    }
}

// Logging.

/// Log levels; each includes those before it. OFF: no messages. ERROR: unexpected failures. WARN:
/// degraded operation. INFO: rare events. DEBUG: for debugging. TRACE: everything.
pub type kvt_log_level_t = u32;

pub const KVT_LOG_OFF: kvt_log_level_t = 0;
pub const KVT_LOG_ERROR: kvt_log_level_t = 1;
pub const KVT_LOG_WARN: kvt_log_level_t = 2;
pub const KVT_LOG_INFO: kvt_log_level_t = 3;
pub const KVT_LOG_DEBUG: kvt_log_level_t = 4;
pub const KVT_LOG_TRACE: kvt_log_level_t = 5;

/// Releases `user_data`. Called once, after the last call of the callback that it was registered
/// with. It must not unwind.
pub type kvt_destroy_fn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// Receives a log message of at most 2048 bytes. Texts are UTF-8, not NUL-terminated, and borrowed
/// for the call. Any thread calls it, also several at once, and never under a lock of the library:
/// a message that is logged under one arrives after its release. It must not unwind.
pub type kvt_log_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        level: kvt_log_level_t,
        target: *const c_char,
        target_bytes: u64,
        message: *const c_char,
        message_bytes: u64,
    ),
>;

/// Sets or removes the log callback of the process. Without one the library logs nothing; it never
/// writes to standard output or error. The previous callback may still run in another thread when
/// this returns; its destroy is called after that.
///
/// @param level      KVT_LOG_*: the most detailed level that is passed on.
/// @param callback   Null removes the present one.
/// @param user_data  Passed to the callback; taken over on success only.
/// @param destroy    May be null.
/// @return KVT_E_STATE (a Rust program has installed a logger of its own).
#[capi]
pub unsafe extern "C" fn kvt_log_set(
    level: kvt_log_level_t,
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
        _ => fail!(
            Invalid,
            "log level {level} is unknown: pass one of KVT_LOG_*, 0 to {KVT_LOG_TRACE}"
        ),
    };
    let Some(foreign) = foreign(callback, user_data, destroy)? else {
        return logging::set(None, LevelFilter::Off);
    };
    let callback = foreign.clone();
    logging::set(Some(Arc::new(move |l, t, m| call_sink(&callback, l, t, m))), filter)?;
    foreign.keep();
    Ok(())
}

type LogFn = unsafe extern "C" fn(*mut c_void, u32, *const c_char, u64, *const c_char, u64);

fn call_sink(foreign: &Foreign<LogFn>, level: Level, target: &str, message: &str) {
    foreign.call(|function, user_data| {
        // SAFETY: the function and its data came together from the caller; texts are valid for the
        // call.
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

// Features.

/// An optional feature. Texts are static UTF-8, not NUL-terminated.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_feature_t {
    pub struct_size: u64,
    pub name: *const c_char,
    pub name_bytes: u64,
    /// The purpose of the feature.
    pub note: *const c_char,
    pub note_bytes: u64,
    /// 1 = this library contains the feature.
    pub built: u32,
    /// 1 = this machine supports it, as probed during the call.
    pub present: u32,
}

/// Writes the feature at an index of the list.
///
/// # Safety
/// `out` passed [`check_out`] and is valid for writes of the size it states.
unsafe fn write_feature(index: usize, out: *mut kvt_feature_t) -> Result<()> {
    let Some(found) = feature(index) else {
        let count = FEATURES.len();
        fail!(NotFound, "feature {index} does not exist: pass an index below {count}");
    };
    let row = kvt_feature_t {
        struct_size: 0,
        name: found.name.as_ptr().cast(),
        name_bytes: found.name.len() as u64,
        note: found.note.as_ptr().cast(),
        note_bytes: found.note.len() as u64,
        built: u32::from(found.built),
        present: u32::from(found.present),
    };
    // SAFETY: the caller has checked `out`.
    unsafe { write(out, &row) };
    Ok(())
}

/// Reads the number of optional features.
#[capi]
pub unsafe extern "C" fn kvt_feature_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(FEATURES.len() as u64);
    Ok(())
}

/// Reads a feature by its index, below kvt_feature_count. Probes the machine: not for a hot path.
///
/// @return KVT_E_NOT_FOUND.
#[capi]
pub unsafe extern "C" fn kvt_feature_at(index: u64, out: *mut kvt_feature_t) -> kvt_status_t {
    check_out(out)?;
    write_feature(usize::try_from(index).unwrap_or(usize::MAX), out)
}

/// Reads a feature by its name, such as "cuda", "io_uring" or "redis". Probes the machine: not for
/// a hot path.
///
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_feature_find(
    name: *const c_char,
    name_bytes: u64,
    out: *mut kvt_feature_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let name = text("name", name, name_bytes)?;
    let Some(index) = FEATURES.iter().position(|(known, _)| *known == name) else {
        let known: Vec<&str> = FEATURES.iter().map(|(known, _)| *known).collect();
        let suggestion = match nearest(name, &known) {
            Some(suggestion) => format!("did you mean '{suggestion}'?"),
            None => format!("pass one of '{}'", known.join("', '")),
        };
        fail!(NotFound, "feature '{name}' does not exist: {suggestion}");
    };
    write_feature(index, out)
}

// Specs.

/// Checks the grammar of a spec string, and writes its canonical form. A spec is a name with
/// optional arguments, such as "qos(inner=s3fifo(small=10%))". The call that uses the spec checks
/// that the name and its parameters exist.
///
/// @param out        Receives the canonical form, not NUL-terminated; may be null.
/// @param out_bytes  Receives its length; may be null.
/// @return KVT_E_SPEC, KVT_E_LIMIT (more than 4096 bytes, 8 levels or 64 arguments),
///         KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_spec_check(
    spec: *const c_char,
    spec_bytes: u64,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if out.is_null() && out_capacity > 0 {
        fail!(Invalid, "out is null and out_capacity is {out_capacity}: pass a buffer, or 0");
    }
    let canonical = Spec::parse(text("spec", spec, spec_bytes)?)?.to_string();
    let needed = canonical.len() as u64;
    put(out_bytes, needed);
    if out.is_null() {
        return Ok(());
    }
    if out_capacity < needed {
        fail!(
            TooSmall,
            "the canonical form has {needed} bytes, out_capacity is {out_capacity}: pass more"
        );
    }
    // SAFETY: the caller has room for `out_capacity` >= `needed` bytes.
    std::ptr::copy_nonoverlapping(canonical.as_ptr(), out.cast(), canonical.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_and_codes_agree() {
        let constants = [
            KVT_OK,
            KVT_E_INVALID,
            KVT_E_HANDLE,
            KVT_E_TOO_NEW,
            KVT_E_TOO_SMALL,
            KVT_E_NOMEM,
            KVT_E_BUDGET,
            KVT_E_AGAIN,
            KVT_E_BUSY,
            KVT_E_CLOSED,
            KVT_E_CANCELLED,
            KVT_E_TIMEOUT,
            KVT_E_REENTRANT,
            KVT_E_FORKED,
            KVT_E_PANIC,
            KVT_E_ABI,
            KVT_E_UNSUPPORTED,
            KVT_E_UNAVAILABLE,
            KVT_E_NOT_FOUND,
            KVT_E_CORRUPT,
            KVT_E_IO,
            KVT_E_SPEC,
            KVT_E_LIMIT,
            KVT_E_PIN_QUOTA,
            KVT_E_STATE,
            KVT_E_LOST,
        ];
        let codes: Vec<i32> = Status::ALL.iter().map(|s| s.code()).collect();
        assert_eq!(codes, constants);
    }
}

#[cfg(test)]
mod version_tests {
    use super::*;

    #[test]
    fn constants_match_the_package() {
        assert_eq!(dotted(KVT_HEADER_VERSION), env!("CARGO_PKG_VERSION"));
        let (major, minor, patch) = parts(KVT_HEADER_VERSION);
        assert_eq!(
            (major as u32, minor as u32, patch as u32),
            (KVT_VERSION_MAJOR, KVT_VERSION_MINOR, KVT_VERSION_PATCH)
        );
    }

    #[test]
    fn a_header_fits_compatible_later_libraries() {
        let v = |a: u64, b: u64, c: u64| a << 32 | b << 16 | c;
        assert!(fits(v(0, 1, 0), v(0, 1, 3)));
        assert!(!fits(v(0, 1, 4), v(0, 1, 3)));
        assert!(!fits(v(0, 1, 0), v(0, 2, 0)));
        assert!(fits(v(1, 2, 0), v(1, 3, 0)));
        assert!(!fits(v(1, 3, 1), v(1, 3, 0)));
        assert!(!fits(v(1, 0, 0), v(2, 0, 0)));
    }
}
