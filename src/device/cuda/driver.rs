//! The CUDA driver: loaded when somebody asks for a device, and not needed by anybody else.
//! What it lacks is an error with words, never a panic.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;

use crate::base::library::{CUDA_DRIVER, LEAST_CUDA, Library};
use crate::base::status::{Error, Result, Status};
use crate::device::cuda::abi::{
    AccessOf, Allocation, BatchOrder, Code, Handle, Ordinal, Pointer, Rows, status_of,
};
use crate::fail;

macro_rules! driver {
    (all { $($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ty),*);)* }
     newer { $($(#[$may_doc:meta])* $may:ident = $may_symbol:literal ($($may_arg:ty),*);)* }) => {
        /// The functions of a driver that was loaded. Those that older ones lack may be absent.
        pub struct Driver {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) -> Code,)*
            $($(#[$may_doc])* pub $may: Option<unsafe extern "C" fn($($may_arg),*) -> Code>,)*
        }

        impl Driver {
            fn of(library: &Library) -> Result<Driver> {
                Ok(Driver {
                    $($name: {
                        let Some(symbol) = library.symbol($symbol) else {
                            let name = library.name();
                            fail!(Unavailable, "{name} has no {}: an old driver, or none", $symbol);
                        };
                        type Function = unsafe extern "C" fn($($arg),*) -> Code;
                        // SAFETY: the driver's functions of these names have had these
                        // signatures since they are there; names change when those do.
                        unsafe { std::mem::transmute::<Handle, Function>(symbol) }
                    },)*
                    $($may: library.symbol($may_symbol).map(|symbol| {
                        type Function = unsafe extern "C" fn($($may_arg),*) -> Code;
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<Handle, Function>(symbol) }
                    }),)*
                })
            }
        }
    };
}

driver! {
    all {
        /// Starts it.
        init = "cuInit" (c_uint);
        /// Which CUDA it knows: 12040 is 12.4.
        get_version = "cuDriverGetVersion" (*mut c_int);
        /// What a code is called.
        error_name = "cuGetErrorName" (Code, *mut *const c_char);
        /// What a code means.
        error_text = "cuGetErrorString" (Code, *mut *const c_char);
        /// How many devices there are.
        device_count = "cuDeviceGetCount" (*mut c_int);
        /// A device's handle, by its place.
        device = "cuDeviceGet" (*mut Ordinal, c_int);
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
        /// MemoryOwner device the thread's context is.
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
        /// Copies within it, or from one to another.
        within_device = "cuMemcpyDtoDAsync_v2" (Pointer, Pointer, usize, Handle);
        /// Copies from one context's memory to another's: target, its context, source, its context.
        between_devices =
            "cuMemcpyPeerAsync" (Pointer, Handle, Pointer, Handle, usize, Handle);
        /// Whether a device can have access to another's memory.
        can_reach = "cuDeviceCanAccessPeer" (*mut c_int, Ordinal, Ordinal);
        /// Gives the current context that access.
        reach = "cuCtxEnablePeerAccess" (Handle, c_uint);
        /// Copies from anywhere to anywhere: addresses say what they are.
        anywhere = "cuMemcpyAsync" (Pointer, Pointer, usize, Handle);
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
        /// Which context a stream is of.
        stream_context = "cuStreamGetCtx" (Handle, *mut Handle);
        /// Keeps host memory where it is, and tells the device.
        register_host = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        /// Takes that back.
        unregister_host = "cuMemHostUnregister" (*mut c_void);
        /// Where the device finds such memory.
        host_on_device = "cuMemHostGetDevicePointer_v2" (*mut Pointer, *mut c_void, c_uint);
        /// Host memory that is such from the start.
        allocate_host = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        /// Gives that back.
        free_host = "cuMemFreeHost" (*mut c_void);
        /// What the driver knows of an address: so many questions, their numbers, where each answer
        /// goes.
        pointer_attributes =
            "cuPointerGetAttributes" (c_uint, *const c_int, *const *mut c_void, Pointer);
        /// Loads kernels: an image, and so many options with their values.
        load_module =
            "cuModuleLoadDataEx" (*mut Handle, *const c_void, c_uint, *const c_int,
                                  *mut *mut c_void);
        /// Unloads them.
        unload_module = "cuModuleUnload" (Handle);
        /// A kernel by its name.
        find_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        /// What a kernel may have.
        set_function = "cuFuncSetAttribute" (Handle, c_int, c_int);
        /// Puts a kernel on a stream: blocks, threads, shared memory, where each argument is.
        launch = "cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
                                   Handle, *const *mut c_void, *const *mut c_void);
    }
    newer {
        /// A function of a name and a CUDA version, and whether it was found.
        find_symbol =
            "cuGetProcAddress_v2" (*const c_char, *mut Handle, c_int, c_ulonglong, *mut c_int);
        /// The smallest pieces that memory can be mapped in.
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const Allocation, c_int);
        /// Sets addresses aside.
        reserve = "cuMemAddressReserve" (*mut Pointer, usize, usize, Pointer, c_ulonglong);
        /// Gives them back.
        unreserve = "cuMemAddressFree" (Pointer, usize);
        /// Memory that has no address yet.
        create_memory = "cuMemCreate" (*mut u64, usize, *const Allocation, c_ulonglong);
        /// Gives it back, once it is nowhere mapped.
        release_memory = "cuMemRelease" (u64);
        /// Gives it an address.
        map = "cuMemMap" (Pointer, usize, usize, u64, c_ulonglong);
        /// Takes that from it.
        unmap = "cuMemUnmap" (Pointer, usize);
        /// Has a stream wait until a number in memory is as large as another, or larger.
        wait_value = "cuStreamWaitValue32_v2" (Handle, Pointer, u32, c_uint);
        /// Who may use what is mapped.
        set_access = "cuMemSetAccess" (Pointer, usize, *const AccessOf, usize);
    }
}

/// Many copies in one call: targets, sources, lengths and how many; descriptions, which copy each
/// is of first and how many; which copy failed; a stream.
pub type BatchCall = unsafe extern "C" fn(
    *const Pointer,
    *const Pointer,
    *const usize,
    usize,
    *const BatchOrder,
    *const usize,
    usize,
    *mut usize,
    Handle,
) -> Code;

/// The CUDA whose form of that call is asked for. Later drivers still have it beside a newer one,
/// and hand out the one that belongs to the version in the question.
const BATCH_VERSION: c_int = 12_080;

impl Driver {
    /// Loads a driver, the system's if none is named, and starts it.
    pub fn load(path: Option<&Path>) -> Result<Driver> {
        let library = Library::open(path.unwrap_or(Path::new(CUDA_DRIVER)))
            .map_err(|error| error.within("no CUDA driver"))?;
        let driver = Driver::of(&library)?;
        // SAFETY: the driver's own function.
        let code = unsafe { (driver.init)(0) };
        driver.check("cuInit", code).map_err(|error| {
            Error::new(Status::Unavailable, format!("CUDA does not start: {error}"))
        })?;
        let version = driver.version()?;
        if version < LEAST_CUDA {
            let named = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
            let (has, needs) = (named(version), named(LEAST_CUDA));
            fail!(Unavailable, "the driver knows CUDA {has}, at least {needs} is needed");
        }
        Ok(driver)
    }

    /// The call for many copies at once, where the driver has it.
    pub fn batch_call(&self) -> Option<BatchCall> {
        let find = self.find_symbol?;
        let (mut symbol, mut found): (Handle, c_int) = (std::ptr::null_mut(), -1);
        // SAFETY: a name that ends with a zero, and places for the answers.
        let code = unsafe {
            find(c"cuMemcpyBatchAsync".as_ptr(), &mut symbol, BATCH_VERSION, 0, &mut found)
        };
        if code != 0 || found != 0 || symbol.is_null() {
            return None;
        }
        // SAFETY: the function of this name and version has this signature.
        Some(unsafe { std::mem::transmute::<Handle, BatchCall>(symbol) })
    }

    /// Notes a call that failed where nothing more can be done about it.
    pub fn note(&self, call: &str, code: Code) {
        if code != 0 {
            log::warn!("giving back to CUDA: {}", self.error(call, code).message());
        }
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
