//! Status codes as C sees them.

use std::ffi::c_char;

use crate::base::status::Status;
use crate::ffi::abi::capi;

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
/// Threading: any thread, also in callbacks and after fork. Since 0.1.
#[capi]
pub extern "C" fn kvt_status_name(status: kvt_status_t) -> *const c_char {
    Status::from_code(status).map_or(c"KVT_E_UNKNOWN".as_ptr(), Status::name_c)
}

/// What a status means and what the caller can do about it.
///
/// @param status  Any number.
/// @return A NUL-terminated sentence that lives as long as the library. Never null.
///
/// Threading: any thread, also in callbacks and after fork. Since 0.1.
#[capi]
pub extern "C" fn kvt_status_str(status: kvt_status_t) -> *const c_char {
    Status::from_code(status)
        .map_or(c"a status of a newer library: treat it as an error".as_ptr(), Status::describe_c)
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
