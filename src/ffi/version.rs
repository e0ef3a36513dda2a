//! Which library this is, and whether it fits a header.

use std::ffi::c_char;

use crate::base::status::{Error, Status};
use crate::ffi::abi::{capi, require};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;

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
/// Threading: any thread, also in callbacks and after fork. Since 0.1.
#[capi]
pub extern "C" fn kvt_version_str() -> *const c_char {
    TEXT.as_ptr().cast()
}

/// The library's version as a number: (major << 32) | (minor << 16) | patch.
///
/// @param out  The number.
/// @return KVT_OK; KVT_E_INVALID when `out` is null.
///
/// Threading: any thread, also in callbacks and after fork. Since 0.1.
///
/// # Safety
/// `out` is null or valid for writes.
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
/// @param err             Explains a mismatch; may be null.
/// @return KVT_OK; KVT_E_ABI.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
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

#[cfg(test)]
mod tests {
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
