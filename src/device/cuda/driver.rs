//! The CUDA driver: loaded when somebody asks for a device, and not needed by anybody else.
//! What it lacks is an error with words, never a panic.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::base::status::{Error, Result, Status};
use crate::fail;

/// An address of the device.
pub type Pointer = u64;
/// A device's number.
pub type Ordinal = c_int;
/// What the driver hands out: contexts, streams, events.
pub type Handle = *mut c_void;
/// What its functions return; 0 = well.
pub type Code = c_int;

/// A copy of rows of bytes at distances: `CUDA_MEMCPY2D` of the driver.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Rows {
    pub from_x_bytes: usize,
    pub from_y: usize,
    pub from_kind: c_uint,
    pub from_host: *const c_void,
    pub from_device: Pointer,
    pub from_array: Handle,
    pub from_pitch: usize,
    pub to_x_bytes: usize,
    pub to_y: usize,
    pub to_kind: c_uint,
    pub to_host: *mut c_void,
    pub to_device: Pointer,
    pub to_array: Handle,
    pub to_pitch: usize,
    pub width_bytes: usize,
    pub height: usize,
}

/// [`Rows::from_kind`]: memory of the processor.
pub const KIND_HOST: c_uint = 1;
/// [`Rows::from_kind`]: memory of the device.
pub const KIND_DEVICE: c_uint = 2;
/// Streams that do not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// Events that only order: no times, and who waits sleeps.
pub const EVENT_FLAGS: c_uint = 1 | 2;
/// A graph that another thread makes forbids this one nothing.
pub const CAPTURE_RELAXED: c_uint = 2;
/// Attribute: the longest distance between rows of a copy.
pub const MAX_PITCH: c_int = 11;
/// Attribute: the first number of the compute capability.
pub const CAPABILITY_MAJOR: c_int = 75;
/// Attribute: the second.
pub const CAPABILITY_MINOR: c_int = 76;
/// The oldest driver that all functions and kernels here need: CUDA 12.0.
pub const LEAST_VERSION: c_int = 12_000;

/// Codes that mean something of their own here.
pub mod code {
    use super::Code;

    pub const INVALID_VALUE: Code = 1;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const NO_DEVICE: Code = 100;
    pub const INVALID_DEVICE: Code = 101;
    pub const INVALID_CONTEXT: Code = 201;
    pub const INVALID_HANDLE: Code = 400;
    pub const NOT_READY: Code = 600;
    pub const NOT_SUPPORTED: Code = 801;
    /// After these the context is of no use any more: the process would have to make another.
    pub const STICKY: [Code; 15] =
        [46, 214, 220, 221, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999];
}

macro_rules! driver {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// The functions of a driver that was loaded.
        pub struct Driver {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) -> Code,)*
        }

        impl Driver {
            fn of(library: Library) -> Result<Driver> {
                Ok(Driver {
                    $($name: {
                        let symbol = library.symbol($symbol)?;
                        // SAFETY: the driver's functions of these names have had these
                        // signatures since they are there; names change when those do.
                        unsafe {
                            std::mem::transmute::<Handle, unsafe extern "C" fn($($arg),*) -> Code>(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

driver! {
    /// Starts it.
    init = "cuInit" (c_uint);
    /// Which CUDA it knows: 12040 is 12.4.
    version = "cuDriverGetVersion" (*mut c_int);
    /// What a code is called.
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    /// What a code means.
    error_text = "cuGetErrorString" (Code, *mut *const c_char);
    /// How many devices there are.
    device_count = "cuDeviceGetCount" (*mut c_int);
    /// Its name.
    device_name = "cuDeviceGetName" (*mut c_char, c_int, Ordinal);
    /// A number that says what it can do.
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, Ordinal);
    /// The context that everybody in the process shares.
    retain_primary = "cuDevicePrimaryCtxRetain" (*mut Handle, Ordinal);
    /// Gives that back.
    release_primary = "cuDevicePrimaryCtxRelease_v2" (Ordinal);
    /// Makes a context the calling thread's.
    push = "cuCtxPushCurrent_v2" (Handle);
    /// The one before is it again.
    pop = "cuCtxPopCurrent_v2" (*mut Handle);
    /// Whether a graph that is being made elsewhere forbids this thread some calls.
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
    /// Whose device the thread's context is.
    context_device = "cuCtxGetDevice" (*mut Ordinal);
    /// What is free, and all there is.
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    /// Takes device memory.
    allocate = "cuMemAlloc_v2" (*mut Pointer, usize);
    /// Gives it back.
    free = "cuMemFree_v2" (Pointer);
    /// Copies to the device.
    to_device = "cuMemcpyHtoDAsync_v2" (Pointer, *const c_void, usize, Handle);
    /// Copies from it.
    from_device = "cuMemcpyDtoHAsync_v2" (*mut c_void, Pointer, usize, Handle);
    /// Copies rows.
    rows = "cuMemcpy2DAsync_v2" (*const Rows, Handle);
    /// A stream.
    create_stream = "cuStreamCreate" (*mut Handle, c_uint);
    /// Ends one.
    destroy_stream = "cuStreamDestroy_v2" (Handle);
    /// Waits until it has done what it was given.
    sync_stream = "cuStreamSynchronize" (Handle);
    /// Has a stream wait for an event.
    stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
    /// Whether a graph is being made of what is put on it.
    is_capturing = "cuStreamIsCapturing" (Handle, *mut c_int);
    /// An event.
    create_event = "cuEventCreate" (*mut Handle, c_uint);
    /// Ends one.
    destroy_event = "cuEventDestroy_v2" (Handle);
    /// Puts an event on a stream.
    record = "cuEventRecord" (Handle, Handle);
    /// Whether it has come to pass.
    query = "cuEventQuery" (Handle);
    /// Sleeps until it has.
    sync_event = "cuEventSynchronize" (Handle);
}

/// A library that stays loaded: drivers do not like to be unloaded.
struct Library(Handle, String);

impl Library {
    fn open(path: &Path) -> Result<Library> {
        let name = path.display().to_string();
        let Ok(text) = CString::new(path.as_os_str().as_bytes()) else {
            fail!(Invalid, "the name of a library has a zero in it");
        };
        // SAFETY: a string that ends with a zero. What the library does when it is loaded is the
        // trust that is put in a driver, or in whoever named another.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            fail!(Unavailable, "no CUDA driver: {}", last_error());
        }
        Ok(Library(handle, name))
    }

    fn symbol(&self, name: &str) -> Result<Handle> {
        let text = CString::new(name).map_err(|_| Status::Invalid)?;
        // SAFETY: a library that is loaded, and a string that ends with a zero.
        let symbol = unsafe { libc::dlsym(self.0, text.as_ptr()) };
        if symbol.is_null() {
            fail!(Unavailable, "{} has no {name}: the CUDA driver is too old, or none", self.1);
        }
        Ok(symbol)
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

impl Driver {
    /// Loads a driver, the system's if none is named, and starts it.
    pub fn load(path: Option<&Path>) -> Result<Driver> {
        let library = Library::open(path.unwrap_or(Path::new("libcuda.so.1")))?;
        let driver = Driver::of(library)?;
        let mut version = 0;
        // SAFETY: the driver's own functions, with a place for what they say.
        unsafe {
            driver.check("cuInit", (driver.init)(0)).map_err(|error| {
                Error::new(Status::Unavailable, format!("CUDA does not start: {error}"))
            })?;
            driver.check("cuDriverGetVersion", (driver.version)(&mut version))?;
        }
        if version < LEAST_VERSION {
            let named = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
            let (has, needs) = (named(version), named(LEAST_VERSION));
            fail!(Unavailable, "the driver knows CUDA {has}, at least {needs} is needed");
        }
        Ok(driver)
    }

    /// What a call returned, as a result.
    pub fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// A code with its words.
    pub fn error(&self, call: &str, code: Code) -> Error {
        let word = |of: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: a place for the address of words that the driver keeps for ever.
            unsafe {
                if of(code, &mut text) != 0 || text.is_null() {
                    return "?".to_string();
                }
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        };
        let text = format!("{call}: {} ({code}), {}", word(self.error_name), word(self.error_text));
        Error::new(status_of(code), text)
    }
}

/// Whether nothing works any more after a code.
pub fn is_sticky(code: Code) -> bool {
    code::STICKY.contains(&code)
}

fn status_of(code: Code) -> Status {
    match code {
        code::OUT_OF_MEMORY => Status::NoMem,
        code::INVALID_VALUE => Status::Invalid,
        code::INVALID_HANDLE | code::INVALID_CONTEXT => Status::Handle,
        code::NOT_SUPPORTED => Status::Unsupported,
        code::NO_DEVICE | code::INVALID_DEVICE => Status::Unavailable,
        code if is_sticky(code) => Status::Unavailable,
        _ => Status::Io,
    }
}
