//! What the driver calls things: types, numbers, codes and descriptions of its interface. A test
//! compares them with another's reading of its headers.

use std::ffi::{c_int, c_uint, c_void};

use crate::base::status::Status;

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
/// Host memory that is pinned for all contexts, and that devices reach by its address.
pub const HOST_PORTABLE: c_uint = 1;
/// A number is waited for until it is as large, or larger, counted in a circle.
pub const WAIT_AS_LARGE: c_uint = 0;
/// Host memory that kernels reach.
pub const HOST_MAPPED: c_uint = 2;
/// Attribute: the longest distance between rows of a copy.
pub const MAX_PITCH: c_int = 11;
/// Attribute: the first number of the compute capability.
pub const CAPABILITY_MAJOR: c_int = 75;
/// Attribute: the second.
pub const CAPABILITY_MINOR: c_int = 76;

/// Attribute: kernels reach all host memory, registered or not.
pub const REACHES_PAGEABLE: c_int = 88;
/// Attribute: the device finds registered host memory where the processor does.
pub const SAME_ADDRESSES: c_int = 91;
/// Of an address: [`KIND_HOST`] or [`KIND_DEVICE`]; 0 = the driver does not know it.
pub const POINTER_KIND: c_int = 2;
/// Of an address: where kernels find what is there.
pub const POINTER_ON_DEVICE: c_int = 3;
/// Of an address: the processor and all devices share what is there.
pub const POINTER_MANAGED: c_int = 8;
/// Of an address: whose device it is.
pub const POINTER_ORDINAL: c_int = 9;
/// Of an address: where the memory begins that it is in.
pub const POINTER_START: c_int = 11;
/// Of an address: how long that is.
pub const POINTER_BYTES: c_int = 12;
/// Of an address: what the device of the current context may do there.
pub const POINTER_ACCESS: c_int = 16;
/// [`POINTER_ACCESS`]: read and write.
pub const POINTER_READ_WRITE: c_uint = 3;
/// Of kernels: where a compiler's words of errors go.
pub const JIT_ERRORS: c_int = 5;
/// Of kernels: how many bytes of them.
pub const JIT_ERROR_BYTES: c_int = 6;
/// Of a kernel: the most shared memory that a launch may ask for.
pub const MAX_SHARED: c_int = 8;
/// Of a device: how much that can be.
pub const BLOCK_SHARED: c_int = 97;
/// Shared memory that every kernel may ask for without that.
pub const PLAIN_SHARED_BYTES: u32 = 48 << 10;
/// Memory that stays where it is.
pub const MEMORY_STAYS: c_uint = 1;
/// A place: a device, by its number.
pub const LOCATION_DEVICE: c_int = 1;
/// The smallest pieces that are possible.
pub const GRANULARITY_MINIMUM: c_int = 0;
/// Memory may be read and written.
pub const ACCESS_READ_WRITE: c_uint = 3;
/// Streams that are everybody's: the default one as 0 and as its old and its new name.
pub const DEFAULT_STREAMS: [u64; 3] = [0, 1, 2];

/// How a batch reads its sources: `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct BatchOrder {
    /// 1 = as the stream's turn comes.
    pub order: c_uint,
    /// Where memory is that is everywhere: kind and number, 0 = not said.
    pub from: [c_int; 2],
    pub to: [c_int; 2],
    pub flags: c_uint,
}

/// Memory of a device that has no address yet: `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Allocation {
    /// [`MEMORY_STAYS`].
    pub kind: c_uint,
    pub handles: c_uint,
    /// [`LOCATION_DEVICE`], and which.
    pub location: [c_int; 2],
    pub unused: *mut c_void,
    pub flags: [u8; 8],
}

/// Who may use memory: `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessOf {
    /// [`LOCATION_DEVICE`], and which.
    pub location: [c_int; 2],
    /// [`ACCESS_READ_WRITE`].
    pub flags: c_uint,
}

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
    pub const ALREADY_REACHED: Code = 704;
    pub const ALREADY_REGISTERED: Code = 712;
    pub const NOT_SUPPORTED: Code = 801;
    pub const CAPTURED_EVENT: Code = 907;
    /// After these the context is of no use any more: the process would have to make another.
    pub const STICKY: [Code; 18] =
        [4, 46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 999];
}

/// Whether nothing works any more after a code.
pub fn is_sticky(code: Code) -> bool {
    code::STICKY.contains(&code)
}

/// The status of a code.
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
