//! The CUDA driver without a device of `ffi-tests/cuda/fake.c`: built once, and told what to do.

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock};

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
        let fake = Fake::loaded();
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let begin: extern "C" fn(u64) = std::mem::transmute(fake.symbol("fake_begin"));
            begin(seed);
        }
        fake
    }

    /// As it is.
    pub fn loaded() -> Fake {
        let path = CString::new(library().to_str().expect("a name")).expect("a name");
        // SAFETY: a string that ends with a zero.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the fake driver does not load");
        Fake(handle)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("a name");
        // SAFETY: a library that is loaded, and a string that ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null());
        symbol
    }

    /// The `nth` call of a function from now on fails; -1: all do.
    pub fn fail(&self, call: &str, nth: i64, code: i32) {
        let call = CString::new(call).expect("a name");
        // SAFETY: the signature of the function in `fake.c`.
        unsafe {
            let fail: extern "C" fn(*const c_char, c_long, c_int) =
                std::mem::transmute(self.symbol("fake_fail"));
            fail(call.as_ptr(), nth, code);
        }
    }

    /// Nothing fails any more that was to fail.
    pub fn no_more_failures(&self) {
        let none: extern "C" fn() = self.call("fake_no_more_failures");
        none();
    }

    /// Whether a device can have access to another's memory; at first none can.
    pub fn reach(&self, from: i32, to: i32, can: bool) {
        let reach: extern "C" fn(c_int, c_int, c_int) = self.call("fake_reach");
        reach(from, to, can.into());
    }

    /// A bit of each KiB of all devices' memory changes.
    pub fn rot(&self) {
        let rot: extern "C" fn() = self.call("fake_rot");
        rot();
    }

    /// How many steps a question about an event may bring.
    pub fn pace(&self, steps: u32) {
        let pace: extern "C" fn(u32) = self.call("fake_pace");
        pace(steps);
    }

    /// A bit changes on the bus, from the device or to it: of the `nth` copy from now on; of all
    /// that come (-1), or of none (0).
    pub fn flip(&self, from_device: bool, nth: i64) {
        let flip: extern "C" fn(c_int, c_long) = self.call("fake_flip");
        flip(from_device.into(), nth);
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

    fn call<F: Copy>(&self, name: &str) -> F {
        let symbol = self.symbol(name);
        assert_eq!(size_of::<F>(), size_of_val(&symbol));
        // SAFETY: whoever asks names the signature of the function in `fake.c`.
        unsafe { std::mem::transmute_copy(&symbol) }
    }

    /// Where one of its functions is, for who calls it from C.
    pub fn function(&self, name: &str) -> *mut c_void {
        self.symbol(name)
    }

    /// Does something in a context.
    pub fn inside<T>(&self, context: u64, what: impl FnOnce() -> T) -> T {
        let push: extern "C" fn(u64) -> c_int = self.call("cuCtxPushCurrent_v2");
        let pop: extern "C" fn(*mut u64) -> c_int = self.call("cuCtxPopCurrent_v2");
        assert_eq!(push(context), 0);
        let done = what();
        assert_eq!(pop(&mut 0), 0);
        done
    }

    /// A stream of an engine's, in the context that the fake has.
    pub fn stream(&self) -> u64 {
        self.stream_in(self.context())
    }

    /// A stream of an engine's, in a context.
    pub fn stream_in(&self, context: u64) -> u64 {
        let create: extern "C" fn(*mut u64, u32) -> c_int = self.call("cuStreamCreate");
        let mut stream = 0;
        self.inside(context, || assert_eq!(create(&mut stream, 1), 0));
        stream
    }

    /// Ends such a stream.
    pub fn end_stream(&self, stream: u64) {
        self.end_stream_in(self.context(), stream);
    }

    /// Ends a stream of a context.
    pub fn end_stream_in(&self, context: u64, stream: u64) {
        let destroy: extern "C" fn(u64) -> c_int = self.call("cuStreamDestroy_v2");
        self.inside(context, || assert_eq!(destroy(stream), 0));
    }

    /// An engine's context, which the fake keeps until [`Fake::give_context_back`].
    pub fn context(&self) -> u64 {
        self.context_of(0)
    }

    /// The same, of any device.
    pub fn context_of(&self, ordinal: i32) -> u64 {
        let retain: extern "C" fn(*mut u64, c_int) -> c_int = self.call("cuDevicePrimaryCtxRetain");
        let mut context = 0;
        assert_eq!(retain(&mut context, ordinal), 0);
        context
    }

    /// Gives it back as often as it was asked for.
    pub fn give_context_back(&self) {
        self.give_context_of_back(0);
    }

    /// The same, of any device.
    pub fn give_context_of_back(&self, ordinal: i32) {
        let release: extern "C" fn(c_int) -> c_int = self.call("cuDevicePrimaryCtxRelease_v2");
        assert_eq!(release(ordinal), 0);
    }

    /// A context of a device that an engine has for itself.
    pub fn own_context(&self, ordinal: i32) -> u64 {
        let own: extern "C" fn(c_int) -> u64 = self.call("fake_context");
        own(ordinal)
    }

    /// An event of an engine's.
    pub fn event(&self, context: u64) -> u64 {
        let create: extern "C" fn(*mut u64, u32) -> c_int = self.call("cuEventCreate");
        let mut event = 0;
        self.inside(context, || assert_eq!(create(&mut event, 3), 0));
        event
    }

    /// Puts an event of an engine's on a stream of its.
    pub fn record(&self, context: u64, event: u64, stream: u64) {
        let record: extern "C" fn(u64, u64) -> c_int = self.call("cuEventRecord");
        self.inside(context, || assert_eq!(record(event, stream), 0));
    }

    /// Whether an event of an engine's has come.
    pub fn has_come(&self, context: u64, event: u64) -> bool {
        let query: extern "C" fn(u64) -> c_int = self.call("cuEventQuery");
        self.inside(context, || match query(event) {
            0 => true,
            600 => false,
            code => panic!("the fake says {code}"),
        })
    }

    /// Ends an event of an engine's.
    pub fn end_event(&self, context: u64, event: u64) {
        let destroy: extern "C" fn(u64) -> c_int = self.call("cuEventDestroy_v2");
        self.inside(context, || assert_eq!(destroy(event), 0));
    }

    /// A graph is being made of what an event was put on, or no more.
    pub fn capture_event(&self, event: u64, is: bool) {
        let capture: extern "C" fn(u64, c_int) = self.call("fake_capture_event");
        capture(event, is.into());
    }

    /// Holds an event back as if it were on a stream that stands still, or lets it come.
    pub fn hold_back(&self, event: u64, is: bool) {
        let hold: extern "C" fn(u64, c_int) = self.call("fake_hold_back");
        hold(event, is.into());
    }

    /// Has a stream of an engine's wait for an event of its.
    pub fn stand(&self, context: u64, stream: u64, event: u64) {
        let wait: extern "C" fn(u64, u64, u32) -> c_int = self.call("cuStreamWaitEvent");
        self.inside(context, || assert_eq!(wait(stream, event, 0), 0));
    }

    /// Memory of a device, of an engine's own.
    pub fn memory(&self, context: u64, bytes: usize) -> u64 {
        let take: extern "C" fn(*mut u64, usize) -> c_int = self.call("cuMemAlloc_v2");
        let mut address = 0;
        self.inside(context, || assert_eq!(take(&mut address, bytes), 0));
        address
    }

    /// Gives it back.
    pub fn end_memory(&self, context: u64, address: u64) {
        let free: extern "C" fn(u64) -> c_int = self.call("cuMemFree_v2");
        self.inside(context, || assert_eq!(free(address), 0));
    }

    /// Registers host memory, as an engine does; or takes that back.
    pub fn register(&self, context: u64, address: *mut u8, bytes: usize) {
        let register: extern "C" fn(*mut u8, usize, u32) -> c_int =
            self.call("cuMemHostRegister_v2");
        self.inside(context, || assert_eq!(register(address, bytes, 1), 0));
    }

    /// Takes that back.
    pub fn unregister(&self, context: u64, address: *mut u8) {
        let unregister: extern "C" fn(*mut u8) -> c_int = self.call("cuMemHostUnregister");
        self.inside(context, || assert_eq!(unregister(address), 0));
    }

    /// How much host memory may be registered.
    pub fn lockable(&self, bytes: i64) {
        let lockable: extern "C" fn(c_long) = self.call("fake_lockable");
        lockable(bytes);
    }

    /// Has kernels run by a function that is called as `emu_launch` is: name, grid, block, shared
    /// memory, call. Without one only those that move bytes are carried out.
    pub fn emulate(&self, launches: *mut c_void) {
        let emulate: extern "C" fn(*mut c_void) = self.call("fake_emulator");
        emulate(launches);
    }

    /// The first number of what the devices' compute capability is.
    pub fn capability(&self, major: i32) {
        let set: extern "C" fn(c_int) = self.call("fake_capability");
        set(major);
    }

    /// How much shared memory a block of threads can have.
    pub fn block_shared(&self, bytes: i32) {
        let set: extern "C" fn(c_int) = self.call("fake_block_shared");
        set(bytes);
    }

    /// Whether devices find registered host memory where the processor does.
    pub fn same_addresses(&self, is: bool) {
        let set: extern "C" fn(c_int) = self.call("fake_same_addresses");
        set(is.into());
    }

    /// How often a call was made since the process began.
    pub fn calls(&self, call: &str) -> i64 {
        let call = CString::new(call).expect("a name");
        let calls: extern "C" fn(*const c_char) -> c_long = self.call("fake_calls");
        calls(call.as_ptr())
    }

    /// Whether a call that was to fail has been made.
    pub fn has_failed(&self) -> bool {
        let failed: extern "C" fn() -> c_int = self.call("fake_has_failed");
        failed() != 0
    }

    /// All work goes on as far as it can.
    pub fn run(&self) {
        let run: extern "C" fn() = self.call("fake_run");
        run();
    }

    /// What is wrong so far, if anything; then nothing is.
    pub fn take_words(&self) -> Option<String> {
        let take: extern "C" fn() -> *const c_char = self.call("fake_take_words");
        let words = take();
        // SAFETY: words that end with a zero, or none.
        (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned())
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

/// There is one fake in a process: tests have it in turn, and find it as if new.
#[allow(dead_code)]
pub fn alone(seed: u64) -> (MutexGuard<'static, ()>, Fake) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|broken| broken.into_inner());
    let fake = Fake::begin(seed);
    let forget: extern "C" fn() = fake.call("fake_forget");
    forget();
    (turn, fake)
}
