//! Pointers with a length: null with 0 is an empty one.

use std::ffi::c_char;

use crate::base::status::{Error, Result, Status};
use crate::fail;

/// As the length of a text: it ends with a NUL.
pub const KVT_NUL_TERMINATED: u64 = u64::MAX;

/// Longest text that is looked at.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// # Safety
/// `data` is null with a length of 0, or valid for reads of `len` bytes that
/// nobody changes meanwhile.
pub(crate) unsafe fn bytes<'a>(data: *const u8, len: u64) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        fail!(Invalid, "the pointer is null and the length {len}");
    }
    if len > isize::MAX as u64 || (data.addr() as u64).checked_add(len).is_none() {
        fail!(Invalid, "a length of {len} bytes wraps around the address space");
    }
    // SAFETY: not null, no overflow, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len as usize) })
}

/// How long a text is that may end with a NUL.
///
/// # Safety
/// With a length of [`KVT_NUL_TERMINATED`] `data` is null, or valid for reads up to a NUL.
pub(crate) unsafe fn length_of(what: &str, data: *const c_char, len: u64) -> Result<u64> {
    if len != KVT_NUL_TERMINATED {
        return Ok(len);
    }
    if data.is_null() {
        return Ok(0);
    }
    // SAFETY: the caller's promise; nothing is read behind the first NUL.
    let end = (0..=MAX_TEXT_BYTES).find(|&at| unsafe { data.add(at as usize).read() } == 0);
    match end {
        Some(end) => Ok(end),
        None => fail!(Limit, "{what} has no NUL in its first {MAX_TEXT_BYTES} bytes"),
    }
}

/// The bytes of a text. A pointer without a length is refused: it was forgotten.
///
/// # Safety
/// As [`bytes`] and [`length_of`].
pub(crate) unsafe fn text_bytes<'a>(what: &str, data: *const c_char, len: u64) -> Result<&'a [u8]> {
    if len == 0 && !data.is_null() {
        fail!(
            Invalid,
            "{what} is given and its length is 0: say how many bytes it has, or KVT_NUL_TERMINATED; \
             null is none"
        );
    }
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(what, data, len)? };
    if len > MAX_TEXT_BYTES {
        fail!(Limit, "{what} has {len} bytes, at most {MAX_TEXT_BYTES} are allowed");
    }
    // SAFETY: the caller's promise.
    unsafe { bytes(data.cast(), len) }.map_err(|error| error.within(what))
}

/// The same of one that is UTF-8.
///
/// # Safety
/// As [`text_bytes`].
pub(crate) unsafe fn text<'a>(what: &str, data: *const c_char, len: u64) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { text_bytes(what, data, len)? };
    std::str::from_utf8(bytes).map_err(|e| {
        Error::at(Status::Invalid, e.valid_up_to(), format!("{what} is not UTF-8: {e}"))
    })
}

/// Writes to an output pointer that was found not to be null.
///
/// # Safety
/// `out` is null or valid for writes.
pub(crate) unsafe fn require<T>(out: *mut T) -> Result<()> {
    if out.is_null() {
        fail!(Invalid, "the output pointer is null");
    }
    Ok(())
}

/// Hands a text out; how long it is, in any case.
///
/// # Safety
/// `out` is null or has room for `capacity` bytes; `out_bytes` is null or valid for a write.
pub(crate) unsafe fn give_text(
    text: &str,
    out: *mut c_char,
    capacity: u64,
    out_bytes: *mut u64,
) -> Result<()> {
    let needed = text.len() as u64;
    if !out_bytes.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out_bytes.write(needed) };
    }
    if out.is_null() {
        return Ok(());
    }
    if capacity < needed {
        let words = format!("the text has {needed} bytes, room is {capacity}");
        return Err(Error::new(Status::TooSmall, words));
    }
    // SAFETY: the caller has room for `capacity` >= `needed` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    Ok(())
}
