//! Shared libraries that are loaded at run time, mostly drivers, which not every machine has.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::base::status::{Result, Status};
use crate::fail;

/// File name of the CUDA driver.
pub const CUDA_DRIVER: &str = "libcuda.so.1";
/// Oldest CUDA version that copies and kernels work with: 12.0.
pub const LEAST_CUDA: i32 = 12_000;

/// A library that stays loaded: drivers are not safe to unload.
pub struct Library {
    handle: *mut c_void,
    name: String,
}

impl Library {
    /// Loads a library by its path, or by its name from the system's folders. Fails with
    /// [`Status::Unavailable`] and the loader's message.
    pub fn open(path: &Path) -> Result<Library> {
        let Ok(text) = CString::new(path.as_os_str().as_bytes()) else {
            fail!(Invalid, "the library path {path:?} contains a NUL byte");
        };
        // SAFETY: a NUL-terminated string. The initialisers of the library are trusted as those
        // of a driver, or on behalf of the caller that named it.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            fail!(Unavailable, "{}", last_error());
        }
        Ok(Library { handle, name: path.display().to_string() })
    }

    /// The path or name that it was loaded by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of a symbol, if the library has it.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let text = CString::new(name).ok()?;
        // SAFETY: a loaded library and a NUL-terminated string.
        let symbol = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

fn last_error() -> String {
    // SAFETY: the message of this thread's last failure, or null; copied at once.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "the library could not be loaded".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// The CUDA version of a driver library, as 12040 for 12.4. No device is initialised.
pub fn cuda_version(path: &Path) -> Result<i32> {
    let library = Library::open(path)?;
    let Some(symbol) = library.symbol("cuDriverGetVersion") else {
        fail!(Unavailable, "{} is not a CUDA driver", library.name());
    };
    let mut version: c_int = 0;
    // SAFETY: the symbol has this signature in every version of the driver, and may be called
    // before the driver is initialised.
    let code = unsafe {
        let get: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(symbol);
        get(&mut version)
    };
    if code == 0 { Ok(version) } else { Err(Status::Unavailable.into()) }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn present_symbols_are_found_and_absent_libraries_are_named() {
        let library = Library::open(Path::new("libc.so.6")).unwrap();
        assert!(library.symbol("getpid").is_some());
        assert!(library.symbol("no_such_function").is_none());
        assert!(library.symbol("a\0b").is_none());
        let error = Library::open(Path::new("/nowhere/libnone.so")).err().unwrap();
        assert_eq!(error.status(), Status::Unavailable);
        assert!(error.to_string().contains("libnone.so"), "{error}");
        let error = cuda_version(Path::new("libc.so.6")).unwrap_err();
        assert!(error.to_string().contains("not a CUDA driver"), "{error}");
    }
}
