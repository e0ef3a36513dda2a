//! Libraries that are loaded when somebody asks for what they do: drivers, mostly, which not
//! every machine has. What is absent is an error with words.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::base::status::{Result, Status};
use crate::fail;

/// The CUDA driver of this machine, if it has one.
pub const CUDA_DRIVER: &str = "libcuda.so.1";
/// The oldest CUDA that copies and kernels need of it: 12.0.
pub const LEAST_CUDA: i32 = 12_000;

/// A library that stays loaded: drivers do not like to be unloaded.
pub struct Library {
    handle: *mut c_void,
    name: String,
}

impl Library {
    /// Loads a library by its path, or by its name where the system keeps them.
    /// [`Status::Unavailable`] and why, where there is none.
    pub fn open(path: &Path) -> Result<Library> {
        let Ok(text) = CString::new(path.as_os_str().as_bytes()) else {
            fail!(Invalid, "the name of a library has a zero in it");
        };
        // SAFETY: a string that ends with a zero. What the library does when it is loaded is the
        // trust that is put in a driver, or in whoever named another.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            fail!(Unavailable, "{}", last_error());
        }
        Ok(Library { handle, name: path.display().to_string() })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where one of its functions is, if it has it.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let text = CString::new(name).ok()?;
        // SAFETY: a library that is loaded, and a string that ends with a zero.
        let symbol = unsafe { libc::dlsym(self.handle, text.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    }
}

fn last_error() -> String {
    // SAFETY: the words of this thread's last failure, or null; copied before anything else.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            return "it could not be loaded".into();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}

/// Which CUDA the driver of a library knows, as 12040 for 12.4. No device is started for that.
pub fn cuda_version(path: &Path) -> Result<i32> {
    let library = Library::open(path)?;
    let Some(symbol) = library.symbol("cuDriverGetVersion") else {
        fail!(Unavailable, "{} is no CUDA driver", library.name());
    };
    let mut version: c_int = 0;
    // SAFETY: the symbol has this signature in every version of the driver, and may be called
    // before it is started.
    let code = unsafe {
        let of: unsafe extern "C" fn(*mut c_int) -> c_int = std::mem::transmute(symbol);
        of(&mut version)
    };
    if code == 0 { Ok(version) } else { Err(Status::Unavailable.into()) }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_found_and_what_is_not_says_so() {
        let library = Library::open(Path::new("libc.so.6")).unwrap();
        assert!(library.symbol("getpid").is_some());
        assert!(library.symbol("no_such_function").is_none());
        assert!(library.symbol("a\0b").is_none());
        let error = Library::open(Path::new("/nowhere/libnone.so")).err().unwrap();
        assert_eq!(error.status(), Status::Unavailable);
        assert!(error.to_string().contains("libnone.so"), "{error}");
        let error = cuda_version(Path::new("libc.so.6")).unwrap_err();
        assert!(error.to_string().contains("no CUDA driver"), "{error}");
    }
}
