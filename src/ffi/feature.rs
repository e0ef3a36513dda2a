//! Optional features: built in, and there on this machine?

use std::ffi::c_char;

use crate::base::spec::nearest;
use crate::base::status::{Error, Result, Status};
use crate::ffi::abi::{Plain, capi, check_out, require, text, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::io::probe::{FEATURES, feature};

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
/// @return KVT_OK; KVT_E_INVALID.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_count` is null or valid for writes.
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
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID.
///
/// Threading: any thread; probes the machine, so not in a hot path. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
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
/// @param err         Names the nearest feature; may be null.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_LIMIT, KVT_E_INVALID.
///
/// Threading: any thread; probes the machine, so not in a hot path. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
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
