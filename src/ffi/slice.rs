//! Pointers with a length: null with 0 is an empty one.

use crate::base::status::{Error, Result, Status};
use crate::fail;

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

/// # Safety
/// As [`bytes`].
pub(crate) unsafe fn text<'a>(data: *const std::ffi::c_char, len: u64) -> Result<&'a str> {
    if len > MAX_TEXT_BYTES {
        fail!(Limit, "a text of {len} bytes, at most {MAX_TEXT_BYTES} are allowed");
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { bytes(data.cast(), len)? };
    std::str::from_utf8(bytes).map_err(|e| {
        Error::at(Status::Invalid, e.valid_up_to(), format!("the text is not UTF-8: {e}"))
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
    out: *mut std::ffi::c_char,
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
