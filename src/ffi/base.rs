//! What every call shares: statuses, versions, errors, logging, optional features, specs.

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

/// Result of every call: 0 is success, negative is an error. Numbers are only
/// ever added; a code your header does not know is still an error.
pub type kvt_status_t = i32;

/// Success.
pub const KVT_OK: kvt_status_t = 0;
/// An argument is null, out of range or has unknown flags.
pub const KVT_E_INVALID: kvt_status_t = -1;
/// A handle is null, stale, of another type or not from this library.
pub const KVT_E_HANDLE: kvt_status_t = -2;
/// A struct sets fields this library does not know yet.
pub const KVT_E_TOO_NEW: kvt_status_t = -3;
/// An output buffer is too small; the size needed was reported.
pub const KVT_E_TOO_SMALL: kvt_status_t = -4;
/// The system has no memory for this.
pub const KVT_E_NOMEM: kvt_status_t = -5;
/// The budget of that tier has no room.
pub const KVT_E_BUDGET: kvt_status_t = -6;
/// A bounded queue or table is full: drain, free, retry.
pub const KVT_E_AGAIN: kvt_status_t = -7;
/// Still in use by work in flight.
pub const KVT_E_BUSY: kvt_status_t = -8;
/// The object is closed or closing.
pub const KVT_E_CLOSED: kvt_status_t = -9;
/// Cancelled before it was done.
pub const KVT_E_CANCELLED: kvt_status_t = -10;
/// The deadline passed first.
pub const KVT_E_TIMEOUT: kvt_status_t = -11;
/// Not allowed from inside a callback.
pub const KVT_E_REENTRANT: kvt_status_t = -12;
/// This process is a fork of the one that opened the library.
pub const KVT_E_FORKED: kvt_status_t = -13;
/// A defect inside the library was caught; the object is poisoned.
pub const KVT_E_PANIC: kvt_status_t = -14;
/// Header and library do not fit together.
pub const KVT_E_ABI: kvt_status_t = -15;
/// Not built into this library.
pub const KVT_E_UNSUPPORTED: kvt_status_t = -16;
/// This machine does not offer it.
pub const KVT_E_UNAVAILABLE: kvt_status_t = -17;
/// No such thing.
pub const KVT_E_NOT_FOUND: kvt_status_t = -18;
/// Bytes do not match their checksum: treat them as absent.
pub const KVT_E_CORRUPT: kvt_status_t = -19;
/// The operating system reported an error.
pub const KVT_E_IO: kvt_status_t = -20;
/// A spec string is malformed; the error carries the offset.
pub const KVT_E_SPEC: kvt_status_t = -21;
/// A documented limit was exceeded.
pub const KVT_E_LIMIT: kvt_status_t = -22;
/// The locked-memory quota is too small.
pub const KVT_E_PIN_QUOTA: kvt_status_t = -23;
/// The object is not in a state that allows this.
pub const KVT_E_STATE: kvt_status_t = -24;

/// As the length of a text: it ends with a NUL.
pub const KVT_NUL_TERMINATED: u64 = u64::MAX;

/// The constant's name of a status, such as "KVT_E_BUSY".
///
/// @param status  Any number; one this library does not know is "KVT_E_UNKNOWN".
/// @return A NUL-terminated string that lives as long as the library. Never null.
///
/// Threading: also after fork.
#[capi]
pub extern "C" fn kvt_status_name(status: kvt_status_t) -> *const c_char {
    Status::from_code(status).map_or(c"KVT_E_UNKNOWN".as_ptr(), Status::name_c)
}

/// What a status means and what the caller can do about it.
///
/// @param status  Any number.
/// @return A NUL-terminated sentence that lives as long as the library. Never null.
///
/// Threading: also after fork.
#[capi]
pub extern "C" fn kvt_status_str(status: kvt_status_t) -> *const c_char {
    Status::from_code(status)
        .map_or(c"a status of a newer library: treat it as an error".as_ptr(), Status::describe_c)
}

// Versions.

/// Major version of this header.
pub const KVT_VERSION_MAJOR: u32 = 0;
/// Minor version of this header.
pub const KVT_VERSION_MINOR: u32 = 1;
/// Patch version of this header.
pub const KVT_VERSION_PATCH: u32 = 0;
/// Version of this header as one number: (major << 32) | (minor << 16) | patch.
pub const KVT_HEADER_VERSION: u64 = 65536;

const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");

/// The library's version as text, such as "0.1.0".
///
/// @return A NUL-terminated string that lives as long as the library. Never null.
///
/// Threading: also after fork.
#[capi]
pub extern "C" fn kvt_version_str() -> *const c_char {
    TEXT.as_ptr().cast()
}

/// The library's version as a number: (major << 32) | (minor << 16) | patch.
///
/// @param out  The number.
/// @return KVT_E_INVALID when `out` is null.
///
/// Threading: also after fork.
#[capi]
pub unsafe extern "C" fn kvt_version(out: *mut u64) -> kvt_status_t {
    require(out)?;
    out.write(KVT_HEADER_VERSION);
    Ok(())
}

/// Whether a program compiled against a header can use this library. Call it
/// once, first: kvt_abi_check(KVT_HEADER_VERSION, &err).
///
/// Before 1.0 a program needs a library of the same minor version and at least
/// the same patch; from 1.0 on one of the same major and at least the same minor.
///
/// @param header_version  KVT_HEADER_VERSION as the program was compiled.
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
        "the program was built against header {}, this is library {}",
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

// Errors.

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
///
/// Ownership: `out->message` is borrowed until the error is freed or replaced.
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
/// @return A NUL-terminated UTF-8 string, borrowed until the error is freed or replaced. Never
///         null: without an error it is an empty one.
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
#[capi]
pub unsafe extern "C" fn kvt_error_free(error: *mut *mut kvt_error_t) -> kvt_status_t {
    free(error, |_| Ok(()))
}

// Logging.

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
/// @return KVT_E_STATE in a Rust program with a logger of its own.
///
/// The former sink may still be running in another thread when this returns; its destroy is called
/// after that.
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

// Features.

/// An optional feature. Texts are UTF-8, not NUL-terminated, and live as long
/// as the library.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_feature_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its name, such as "cuda".
    pub name: *const c_char,
    /// Length of the name.
    pub name_bytes: u64,
    /// What it is for.
    pub note: *const c_char,
    /// Length of the note.
    pub note_bytes: u64,
    /// 1 when the code for it is in this library.
    pub built: u32,
    /// 1 when this machine offers it, as probed now.
    pub present: u32,
}

unsafe fn fill(index: usize, out: *mut kvt_feature_t) -> Result<()> {
    let found = feature(index).ok_or_else(|| {
        Error::new(Status::NotFound, format!("there are {} features", FEATURES.len()))
    })?;
    let filled = kvt_feature_t {
        struct_size: 0,
        name: found.name.as_ptr().cast(),
        name_bytes: found.name.len() as u64,
        note: found.note.as_ptr().cast(),
        note_bytes: found.note.len() as u64,
        built: u32::from(found.built),
        present: u32::from(found.present),
    };
    // SAFETY: the caller has checked `out`.
    unsafe { write(out, &filled) };
    Ok(())
}

/// How many features there are to ask about.
///
/// @param out_count  The number.
#[capi]
pub unsafe extern "C" fn kvt_feature_count(out_count: *mut u64) -> kvt_status_t {
    require(out_count)?;
    out_count.write(FEATURES.len() as u64);
    Ok(())
}

/// A feature by its place in the list.
///
/// @param index  0 to kvt_feature_count - 1.
/// @param out    Filled in; start it with KVT_FEATURE_INIT.
/// @return KVT_E_NOT_FOUND.
///
/// Probes the machine, so not in a hot path.
#[capi]
pub unsafe extern "C" fn kvt_feature_at(index: u64, out: *mut kvt_feature_t) -> kvt_status_t {
    check_out(out)?;
    fill(usize::try_from(index).unwrap_or(usize::MAX), out)
}

/// A feature by its name.
///
/// @param name        Such as "cuda", "io_uring", "redis".
/// @param name_bytes  Length of the name.
/// @param out         Filled in; start it with KVT_FEATURE_INIT.
/// @return KVT_E_NOT_FOUND, KVT_E_LIMIT.
///
/// Probes the machine, so not in a hot path.
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
        let near = match nearest(name, &known) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("there are '{}'", known.join("', '")),
        };
        let text = format!("no feature is called '{name}'; {near}");
        return Err(Error::new(Status::NotFound, text));
    };
    fill(index, out)
}

// Specs.

/// Checks the grammar of a spec string and gives its canonical form.
///
/// A spec is a name with optional arguments, such as "qos(inner=s3fifo(small=10%))".
/// Whether the name and its parameters exist is checked where the spec is used.
///
/// @param spec          The text, UTF-8.
/// @param spec_bytes    Its length.
/// @param out           Receives the canonical form, not NUL-terminated; may be
///                      null with out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Length of the canonical form; also written with
///                      KVT_E_TOO_SMALL. May be null.
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_TOO_SMALL.
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
        fail!(Invalid, "the output pointer is null and its capacity {out_capacity}");
    }
    let canonical = Spec::parse(text("spec", spec, spec_bytes)?)?.to_string();
    let needed = canonical.len() as u64;
    put(out_bytes, needed);
    if out.is_null() {
        return Ok(());
    }
    if out_capacity < needed {
        let text = format!("the canonical form has {needed} bytes, room is {out_capacity}");
        return Err(Error::new(Status::TooSmall, text));
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
    fn which_versions_fit() {
        let v = |a: u64, b: u64, c: u64| a << 32 | b << 16 | c;
        assert!(fits(v(0, 1, 0), v(0, 1, 3)));
        assert!(!fits(v(0, 1, 4), v(0, 1, 3)));
        assert!(!fits(v(0, 1, 0), v(0, 2, 0)));
        assert!(fits(v(1, 2, 0), v(1, 3, 0)));
        assert!(!fits(v(1, 3, 1), v(1, 3, 0)));
        assert!(!fits(v(1, 0, 0), v(2, 0, 0)));
    }
}
