//! The CUDA driver, loaded when the first device is opened. Missing parts are errors with an
//! explanation.

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
        /// Functions of a loaded driver; those that older drivers lack are optional.
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
                            fail!(Unavailable, "{name} lacks {}: too old, or not a CUDA driver", $symbol);
                        };
                        type Function = unsafe extern "C" fn($($arg),*) -> Code;
                        // SAFETY: the driver's functions of these names keep their signatures; a
                        // changed signature gets a new name.
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
        /// Initializes the driver.
        init = "cuInit" (c_uint);
        /// CUDA version of the driver: 12040 is 12.4.
        get_version = "cuDriverGetVersion" (*mut c_int);
        /// Name of a code.
        error_name = "cuGetErrorName" (Code, *mut *const c_char);
        /// Description of a code.
        error_text = "cuGetErrorString" (Code, *mut *const c_char);
        /// Number of devices.
        device_count = "cuDeviceGetCount" (*mut c_int);
        /// Handle of the device at an index.
        device = "cuDeviceGet" (*mut Ordinal, c_int);
        /// Name of a device.
        device_name = "cuDeviceGetName" (*mut c_char, c_int, Ordinal);
        /// Attribute of a device.
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, Ordinal);
        /// Retains the context that the process shares.
        retain_primary = "cuDevicePrimaryCtxRetain" (*mut Handle, Ordinal);
        /// Releases it.
        release_primary = "cuDevicePrimaryCtxRelease_v2" (Ordinal);
        /// Makes a context current on the calling thread.
        push = "cuCtxPushCurrent_v2" (Handle);
        /// Restores the previous context.
        pop = "cuCtxPopCurrent_v2" (*mut Handle);
        /// Exchanges the thread's stream capture mode: a graph capture elsewhere may forbid calls.
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
        /// Device of the current context.
        context_device = "cuCtxGetDevice" (*mut Ordinal);
        /// Free and total memory.
        memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        /// Allocates device memory.
        allocate = "cuMemAlloc_v2" (*mut Pointer, usize);
        /// Frees device memory.
        free = "cuMemFree_v2" (Pointer);
        /// Copies host to device.
        to_device = "cuMemcpyHtoDAsync_v2" (Pointer, *const c_void, usize, Handle);
        /// Copies device to host.
        from_device = "cuMemcpyDtoHAsync_v2" (*mut c_void, Pointer, usize, Handle);
        /// Copies within a device, or between devices with peer access.
        within_device = "cuMemcpyDtoDAsync_v2" (Pointer, Pointer, usize, Handle);
        /// Copies between contexts: target, its context, source, its context.
        between_devices =
            "cuMemcpyPeerAsync" (Pointer, Handle, Pointer, Handle, usize, Handle);
        /// Whether a device can access a peer's memory.
        can_reach = "cuDeviceCanAccessPeer" (*mut c_int, Ordinal, Ordinal);
        /// Enables access of the current context to a peer.
        reach = "cuCtxEnablePeerAccess" (Handle, c_uint);
        /// Copies between any addresses; the driver finds out what they are.
        anywhere = "cuMemcpyAsync" (Pointer, Pointer, usize, Handle);
        /// Copies rows (2D).
        rows = "cuMemcpy2DAsync_v2" (*const Rows, Handle);
        /// Creates a stream.
        create_stream = "cuStreamCreate" (*mut Handle, c_uint);
        /// Destroys a stream.
        destroy_stream = "cuStreamDestroy_v2" (Handle);
        /// Waits until a stream is idle.
        sync_stream = "cuStreamSynchronize" (Handle);
        /// Makes a stream wait for an event.
        stream_wait = "cuStreamWaitEvent" (Handle, Handle, c_uint);
        /// Whether a stream is being captured into a graph.
        is_capturing = "cuStreamIsCapturing" (Handle, *mut c_int);
        /// Creates an event.
        create_event = "cuEventCreate" (*mut Handle, c_uint);
        /// Destroys an event.
        destroy_event = "cuEventDestroy_v2" (Handle);
        /// Records an event on a stream.
        record = "cuEventRecord" (Handle, Handle);
        /// Whether an event has completed.
        query = "cuEventQuery" (Handle);
        /// Blocks until an event has completed.
        sync_event = "cuEventSynchronize" (Handle);
        /// Context of a stream.
        stream_context = "cuStreamGetCtx" (Handle, *mut Handle);
        /// Pins host memory and maps it for the device.
        register_host = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
        /// Undoes that.
        unregister_host = "cuMemHostUnregister" (*mut c_void);
        /// Device address of pinned host memory.
        host_on_device = "cuMemHostGetDevicePointer_v2" (*mut Pointer, *mut c_void, c_uint);
        /// Allocates pinned host memory.
        allocate_host = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        /// Frees it.
        free_host = "cuMemFreeHost" (*mut c_void);
        /// Attributes of an address: count, attribute numbers, places for the values.
        pointer_attributes =
            "cuPointerGetAttributes" (c_uint, *const c_int, *const *mut c_void, Pointer);
        /// Loads a module: image, count of options, options, values.
        load_module =
            "cuModuleLoadDataEx" (*mut Handle, *const c_void, c_uint, *const c_int,
                                  *mut *mut c_void);
        /// Unloads a module.
        unload_module = "cuModuleUnload" (Handle);
        /// Finds a kernel by name.
        find_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
        /// Sets an attribute of a kernel.
        set_function = "cuFuncSetAttribute" (Handle, c_int, c_int);
        /// Launches a kernel: grid, block, shared memory, stream, arguments.
        launch = "cuLaunchKernel" (Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint,
                                   Handle, *const *mut c_void, *const *mut c_void);
    }
    newer {
        /// Finds a function by name and CUDA version.
        find_symbol =
            "cuGetProcAddress_v2" (*const c_char, *mut Handle, c_int, c_ulonglong, *mut c_int);
        /// Granularity of mapped memory.
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const Allocation, c_int);
        /// Reserves addresses.
        reserve = "cuMemAddressReserve" (*mut Pointer, usize, usize, Pointer, c_ulonglong);
        /// Frees reserved addresses.
        unreserve = "cuMemAddressFree" (Pointer, usize);
        /// Allocates physical memory.
        create_memory = "cuMemCreate" (*mut u64, usize, *const Allocation, c_ulonglong);
        /// Frees physical memory, after it is unmapped.
        release_memory = "cuMemRelease" (u64);
        /// Maps physical memory.
        map = "cuMemMap" (Pointer, usize, usize, u64, c_ulonglong);
        /// Unmaps it.
        unmap = "cuMemUnmap" (Pointer, usize);
        /// Makes a stream wait until a number in memory reaches a value.
        wait_value = "cuStreamWaitValue32_v2" (Handle, Pointer, u32, c_uint);
        /// Sets the access rights of mapped memory.
        set_access = "cuMemSetAccess" (Pointer, usize, *const AccessOf, usize);
    }
}

/// Batched copy: targets, sources, lengths, count; attributes, index of the first copy of each,
/// their count; index of the failed copy; stream.
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

/// CUDA version of that signature. Later drivers provide it beside a newer one; the requested
/// version selects.
const BATCH_VERSION: c_int = 12_080;

impl Driver {
    /// Loads a driver (default: the system's) and initializes it.
    pub fn load(path: Option<&Path>) -> Result<Driver> {
        let library = Library::open(path.unwrap_or(Path::new(CUDA_DRIVER)))
            .map_err(|error| error.within("no CUDA driver"))?;
        let driver = Driver::of(&library)?;
        // SAFETY: the driver's own function.
        let code = unsafe { (driver.init)(0) };
        driver.check("cuInit", code).map_err(|error| {
            Error::new(Status::Unavailable, format!("CUDA does not initialize: {error}"))
        })?;
        let version = driver.version()?;
        if version < LEAST_CUDA {
            let named = |v: c_int| format!("{}.{}", v / 1000, v % 1000 / 10);
            let (has, needs) = (named(version), named(LEAST_CUDA));
            fail!(
                Unavailable,
                "the driver supports CUDA {has}, at least {needs} is needed: update it"
            );
        }
        Ok(driver)
    }

    /// The batched copy, if the driver has it.
    pub fn batch_call(&self) -> Option<BatchCall> {
        let find = self.find_symbol?;
        let (mut symbol, mut found): (Handle, c_int) = (std::ptr::null_mut(), -1);
        // SAFETY: a NUL-terminated name, and places for the results.
        let code = unsafe {
            find(c"cuMemcpyBatchAsync".as_ptr(), &mut symbol, BATCH_VERSION, 0, &mut found)
        };
        if code != 0 || found != 0 || symbol.is_null() {
            return None;
        }
        // SAFETY: the function of this name and version has this signature.
        Some(unsafe { std::mem::transmute::<Handle, BatchCall>(symbol) })
    }

    /// Logs a failed cleanup call.
    pub fn note(&self, call: &str, code: Code) {
        if code != 0 {
            log::warn!("a CUDA cleanup call failed: {}", self.error(call, code).message());
        }
    }

    /// Converts a return code to a result.
    pub fn check(&self, call: &str, code: Code) -> Result<()> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// Describes a return code.
    pub fn error(&self, call: &str, code: Code) -> Error {
        let word = |of: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: a place for the address of a string that the driver never frees.
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
