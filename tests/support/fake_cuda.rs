//! The CUDA driver without a device of `ffi-tests/cuda/fake.c`: built once, and told what to do.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Where it is.
pub fn library() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/ffi-tests/cuda/fake.c");
        let name = format!("libfakecuda-{}.so", std::process::id());
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let flags = ["-std=c11", "-O1", "-g", "-shared", "-fPIC", "-lpthread", "-o"];
        let status = Command::new(compiler).arg(source).args(flags).arg(&path).status();
        assert!(status.expect("a C compiler").success(), "the fake driver does not compile");
        path
    };
    PATH.get_or_init(build).clone()
}

/// Its functions for tests. There is one in a process: tests that use these do so in turn.
#[allow(dead_code)] // not every test binary uses all of it
pub struct Fake(*mut c_void);

#[allow(dead_code)]
impl Fake {
    /// Starts anew.
    pub fn begin(seed: u64) -> Fake {
        let path = CString::new(library().to_str().expect("a name")).expect("a name");
        // SAFETY: a string that ends with a zero.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake driver does not load");
        let fake = Fake(handle);
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let begin: extern "C" fn(u64) = std::mem::transmute(fake.symbol("fake_begin"));
            begin(seed);
        }
        fake
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("a name");
        // SAFETY: a library that is loaded, and a string that ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null());
        symbol
    }

    /// The `nth` call of a function from now on fails.
    pub fn fail(&self, call: &str, nth: i64, code: i32) {
        let call = CString::new(call).expect("a name");
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let fail: extern "C" fn(*const c_char, c_long, c_int) =
                std::mem::transmute(self.symbol("fake_fail"));
            fail(call.as_ptr(), nth, code);
        }
    }

    /// What it says of itself; `captures`: some thread is making a graph.
    pub fn set(&self, version: i32, devices: i32, bytes: i64, captures: bool) {
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let set: extern "C" fn(c_int, c_int, c_long, c_int) =
                std::mem::transmute(self.symbol("fake_set"));
            set(version, devices, bytes, captures.into());
        }
    }

    /// A graph is being made of a stream, or no more.
    pub fn capture(&self, stream: u64, is: bool) {
        // SAFETY: the signature of the function in `fake.c`; a stream of its.
        unsafe {
            let capture: extern "C" fn(*mut c_void, c_int) =
                std::mem::transmute(self.symbol("fake_capture"));
            capture(stream as *mut c_void, is.into());
        }
    }

    /// A stream of an engine's, in the context that the fake has.
    pub fn stream(&self) -> u64 {
        let mut stream: *mut c_void = std::ptr::null_mut();
        // SAFETY: the driver's own functions, with places for what they say.
        unsafe {
            let push: extern "C" fn(*mut c_void) -> c_int =
                std::mem::transmute(self.symbol("cuCtxPushCurrent_v2"));
            let pop: extern "C" fn(*mut *mut c_void) -> c_int =
                std::mem::transmute(self.symbol("cuCtxPopCurrent_v2"));
            let create: extern "C" fn(*mut *mut c_void, u32) -> c_int =
                std::mem::transmute(self.symbol("cuStreamCreate"));
            let mut context = self.context() as *mut c_void;
            assert_eq!(push(context), 0);
            assert_eq!(create(&mut stream, 1), 0);
            assert_eq!(pop(&mut context), 0);
        }
        stream as u64
    }

    /// Ends such a stream.
    pub fn end_stream(&self, stream: u64) {
        // SAFETY: as above.
        unsafe {
            let push: extern "C" fn(*mut c_void) -> c_int =
                std::mem::transmute(self.symbol("cuCtxPushCurrent_v2"));
            let pop: extern "C" fn(*mut *mut c_void) -> c_int =
                std::mem::transmute(self.symbol("cuCtxPopCurrent_v2"));
            let destroy: extern "C" fn(*mut c_void) -> c_int =
                std::mem::transmute(self.symbol("cuStreamDestroy_v2"));
            let mut context = self.context() as *mut c_void;
            assert_eq!(push(context), 0);
            assert_eq!(destroy(stream as *mut c_void), 0);
            assert_eq!(pop(&mut context), 0);
        }
    }

    /// An engine's context, which the fake keeps until [`Fake::give_context_back`].
    pub fn context(&self) -> u64 {
        let mut context: *mut c_void = std::ptr::null_mut();
        // SAFETY: as above.
        unsafe {
            let retain: extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                std::mem::transmute(self.symbol("cuDevicePrimaryCtxRetain"));
            assert_eq!(retain(&mut context, 0), 0);
        }
        context as u64
    }

    /// Gives it back as often as it was asked for.
    pub fn give_context_back(&self) {
        // SAFETY: as above.
        unsafe {
            let release: extern "C" fn(c_int) -> c_int =
                std::mem::transmute(self.symbol("cuDevicePrimaryCtxRelease_v2"));
            assert_eq!(release(0), 0);
        }
    }

    /// What was taken of it and not given back.
    pub fn live(&self) -> i64 {
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let live: extern "C" fn() -> c_long = std::mem::transmute(self.symbol("fake_live"));
            live()
        }
    }

    /// Fails if anything was called that should not have been.
    pub fn check(&self) {
        // SAFETY: the signatures of the functions in `fake.c`.
        unsafe {
            let wrong: extern "C" fn() -> c_long = std::mem::transmute(self.symbol("fake_wrong"));
            let words: extern "C" fn() -> *const c_char =
                std::mem::transmute(self.symbol("fake_words"));
            assert_eq!(wrong(), 0, "{}", CStr::from_ptr(words()).to_string_lossy());
        }
    }
}
