//! Types, constants, codes and structs of the CUDA driver's interface. A test compares them with
//! its headers.

use std::ffi::{c_int, c_uint, c_void};

use crate::base::status::Status;

/// Device address.
pub type Pointer = u64;
/// Number of a device.
pub type Ordinal = c_int;
/// Handle of the driver: context, stream, event.
pub type Handle = *mut c_void;
/// Return code; 0 = success.
pub type Code = c_int;

/// A 2D copy: `CUDA_MEMCPY2D` of the driver.
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

/// [`Rows::from_kind`]: host memory.
pub const KIND_HOST: c_uint = 1;
/// [`Rows::from_kind`]: device memory.
pub const KIND_DEVICE: c_uint = 2;
/// Streams that do not synchronize with the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// Events without timing, whose waits block instead of spinning.
pub const EVENT_FLAGS: c_uint = 1 | 2;
/// Capture mode: graph captures of other threads restrict this thread in nothing.
pub const CAPTURE_RELAXED: c_uint = 2;
/// Host memory that is pinned for all contexts.
pub const HOST_PORTABLE: c_uint = 1;
/// Wait until a number is equal or greater, in cyclic order.
pub const WAIT_AS_LARGE: c_uint = 0;
/// Host memory that kernels can access.
pub const HOST_MAPPED: c_uint = 2;
/// Device attribute: maximum pitch of a copy.
pub const MAX_PITCH: c_int = 11;
/// Device attribute: major number of the compute capability.
pub const CAPABILITY_MAJOR: c_int = 75;
/// Device attribute: minor number of the compute capability.
pub const CAPABILITY_MINOR: c_int = 76;

/// Device attribute: kernels can access pageable host memory.
pub const REACHES_PAGEABLE: c_int = 88;
/// Device attribute: registered host memory has the same address on the device.
pub const SAME_ADDRESSES: c_int = 91;
/// Pointer attribute: [`KIND_HOST`] or [`KIND_DEVICE`]; 0 = unknown address.
pub const POINTER_KIND: c_int = 2;
/// Pointer attribute: address for kernels.
pub const POINTER_ON_DEVICE: c_int = 3;
/// Pointer attribute: managed memory, shared by the processor and all devices.
pub const POINTER_MANAGED: c_int = 8;
/// Pointer attribute: device.
pub const POINTER_ORDINAL: c_int = 9;
/// Pointer attribute: start of the allocation.
pub const POINTER_START: c_int = 11;
/// Pointer attribute: length of the allocation.
pub const POINTER_BYTES: c_int = 12;
/// Pointer attribute: access rights of the current context's device.
pub const POINTER_ACCESS: c_int = 16;
/// [`POINTER_ACCESS`]: read and write.
pub const POINTER_READ_WRITE: c_uint = 3;
/// JIT option: buffer for the error log.
pub const JIT_ERRORS: c_int = 5;
/// JIT option: size of that buffer.
pub const JIT_ERROR_BYTES: c_int = 6;
/// Function attribute: maximum dynamic shared memory of a launch.
pub const MAX_SHARED: c_int = 8;
/// Device attribute: maximum shared memory of a block, opt-in.
pub const BLOCK_SHARED: c_int = 97;
/// Shared memory that every kernel can use without opt-in.
pub const PLAIN_SHARED_BYTES: u32 = 48 << 10;
/// Pinned device memory.
pub const MEMORY_STAYS: c_uint = 1;
/// Location kind: a device.
pub const LOCATION_DEVICE: c_int = 1;
/// Request for the minimum granularity.
pub const GRANULARITY_MINIMUM: c_int = 0;
/// Access rights: read and write.
pub const ACCESS_READ_WRITE: c_uint = 3;
/// The default streams: 0, legacy and per-thread.
pub const DEFAULT_STREAMS: [u64; 3] = [0, 1, 2];

/// How a batched copy reads its sources: `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct BatchOrder {
    /// 1 = in stream order.
    pub order: c_uint,
    /// Hint of the location of managed memory: kind and number, 0 = none.
    pub from: [c_int; 2],
    pub to: [c_int; 2],
    pub flags: c_uint,
}

/// Physical device memory to allocate: `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Allocation {
    /// [`MEMORY_STAYS`].
    pub kind: c_uint,
    pub handles: c_uint,
    /// [`LOCATION_DEVICE`] and its number.
    pub location: [c_int; 2],
    pub unused: *mut c_void,
    pub flags: [u8; 8],
}

/// Access rights to set: `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessOf {
    /// [`LOCATION_DEVICE`] and its number.
    pub location: [c_int; 2],
    /// [`ACCESS_READ_WRITE`].
    pub flags: c_uint,
}

/// Codes with a meaning here.
pub mod code {
    use super::Code;

    pub const INVALID_VALUE: Code = 1;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const NO_DEVICE: Code = 100;
    pub const INVALID_DEVICE: Code = 101;
    pub const INVALID_CONTEXT: Code = 201;
    pub const INVALID_HANDLE: Code = 400;
    pub const NOT_READY: Code = 600;
    pub const ALREADY_REACHED: Code = 704;
    pub const ALREADY_REGISTERED: Code = 712;
    pub const NOT_SUPPORTED: Code = 801;
    pub const CAPTURED_EVENT: Code = 907;
    /// Sticky errors: the context is unusable afterwards, and the process must create a new one.
    pub const STICKY: [Code; 18] =
        [4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999];
}

/// Whether a code makes the context unusable.
pub fn is_sticky(code: Code) -> bool {
    code::STICKY.contains(&code)
}

/// Status for a code.
pub fn status_of(code: Code) -> Status {
    match code {
        code::OUT_OF_MEMORY => Status::NoMem,
        code::INVALID_VALUE => Status::Invalid,
        code::INVALID_HANDLE | code::INVALID_CONTEXT => Status::Handle,
        code::NOT_SUPPORTED => Status::Unsupported,
        code::CAPTURED_EVENT => Status::State,
        code::NO_DEVICE | code::INVALID_DEVICE => Status::Unavailable,
        code if is_sticky(code) => Status::Unavailable,
        _ => Status::Io,
    }
}
