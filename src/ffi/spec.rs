//! Spec strings: one grammar for every policy, device and fault.

use std::ffi::c_char;

use crate::base::spec::Spec;
use crate::base::status::{Error, Status};
use crate::fail;
use crate::ffi::abi::{capi, put, text};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;

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
/// @param err           Explains a failure, with the offset; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_INVALID, KVT_E_TOO_SMALL.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
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
