//! The cuFile without storage of `ffi-tests/cuda/fake_cufile.c`: built once for each way that it can
//! be, and told what to do.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use crate::fake_cuda::Fake;

/// Where it is. `define`: what it lacks, none = nothing.
pub fn library_without(define: &str) -> PathBuf {
    static BUILT: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/ffi-tests/cuda/fake_cufile.c");
    let name = format!("libfakecufile{define}-{}.so", std::process::id());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let mut built = BUILT.lock().unwrap_or_else(|broken| broken.into_inner());
    if !built.iter().any(|other| other == define) {
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let mut command = Command::new(compiler);
        command.arg(source).args(["-std=c11", "-O1", "-g", "-shared", "-fPIC", "-lpthread"]);
        if !define.is_empty() {
            command.arg(format!("-D{define}"));
        }
        let status = command.arg("-o").arg(&path).status();
        assert!(status.expect("a C compiler").success(), "the fake cuFile does not compile");
        built.push(define.to_string());
    }
    path
}

/// Where the whole one is.
pub fn library() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| library_without("")).clone()
}

/// Its functions for tests. There is one in a process, beside the one driver.
#[allow(dead_code)] // not every test binary uses all of it
pub struct FakeFile(*mut c_void);

#[allow(dead_code)]
impl FakeFile {
    /// As if new, over a driver; `path` is one of those above.
    pub fn begin(fake: &Fake, path: &std::path::Path) -> FakeFile {
        let path = CString::new(path.to_str().expect("a name")).expect("a name");
        // SAFETY: a string that ends with a zero.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake cuFile does not load");
        let file = FakeFile(handle);
        let begin: extern "C" fn(*mut c_void, *mut c_void) = file.call("fakefile_begin");
        begin(fake.function("fake_is_idle"), fake.function("cuCtxGetDevice"));
        file
    }

    fn call<F: Copy>(&self, name: &str) -> F {
        let name = CString::new(name).expect("a name");
        // SAFETY: a library that is loaded, and a string that ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null());
        assert_eq!(size_of::<F>(), size_of_val(&symbol));
        // SAFETY: whoever asks names the signature of the function in `fake_cufile.c`.
        unsafe { std::mem::transmute_copy(&symbol) }
    }

    /// The `nth` call of a function from now on fails; -1: all do.
    pub fn fail(&self, call: &str, nth: i64, code: i32) {
        let call = CString::new(call).expect("a name");
        let fail: extern "C" fn(*const c_char, c_long, c_int) = self.call("fakefile_fail");
        fail(call.as_ptr(), nth, code);
    }

    /// The kernel's module, what it can do, its modes, and how many bytes of that it fills.
    pub fn set(&self, (major, minor): (u32, u32), features: u32, modes: u32, bytes: usize) {
        let set: extern "C" fn(u32, u32, u32, u32, usize) = self.call("fakefile_set");
        set(major, minor, features, modes, bytes);
    }

    /// A switch as its file of settings has it.
    pub fn switch(&self, which: i32, is_on: bool) {
        let switch: extern "C" fn(c_int, c_int) = self.call("fakefile_switch");
        switch(which, is_on.into());
    }

    /// How many switches there are, and whether they do nothing.
    pub fn switches(&self, count: i32, does_nothing: bool) {
        let switches: extern "C" fn(c_int, c_int) = self.call("fakefile_switches");
        switches(count, does_nothing.into());
    }

    /// What a switch will be at for who opens it next.
    pub fn staged(&self, which: i32) -> bool {
        let staged: extern "C" fn(c_int) -> c_int = self.call("fakefile_staged");
        staged(which) != 0
    }

    /// How many reads there were that ended.
    pub fn reads(&self) -> i64 {
        let reads: extern "C" fn() -> c_long = self.call("fakefile_reads");
        reads()
    }

    /// What was opened or made known and not given back.
    pub fn live(&self) -> i64 {
        let live: extern "C" fn() -> c_long = self.call("fakefile_live");
        live()
    }

    /// Opens it as an engine does for itself, in the context of a device.
    pub fn open_as_engine(&self, fake: &Fake, context: u64) -> i32 {
        let open: extern "C" fn() -> u64 = self.call("cuFileDriverOpen");
        // The code comes first of two numbers.
        fake.inside(context, || open() as u32 as i32)
    }

    /// Closes it as an engine does.
    pub fn close_as_engine(&self) {
        let close: extern "C" fn() -> u64 = self.call("cuFileDriverClose_v2");
        assert_eq!(close() as u32, 0);
    }

    /// Fails if anything was called that should not have been.
    pub fn check(&self) {
        let wrong: extern "C" fn() -> *const c_char = self.call("fakefile_wrong");
        let words = wrong();
        if !words.is_null() {
            // SAFETY: words that end with a zero.
            panic!("{}", unsafe { CStr::from_ptr(words) }.to_string_lossy());
        }
    }
}
