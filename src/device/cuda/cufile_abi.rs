//! Types, constants and codes of cuFile's interface. A test compares them with its header.

use std::ffi::{c_int, c_uint, c_void};

/// Result of most functions: `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// 0 = success, else a code.
    pub code: c_int,
    /// The CUDA driver's code, if `code` is [`code::CUDA`].
    pub cuda: c_int,
}

/// A file to register: `CUfileDescr_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    /// [`KIND_DESCRIPTOR`].
    pub kind: c_uint,
    pub file: DescriptorOf,
    pub calls: *const c_void,
}

/// Handle of a file.
#[repr(C)]
#[derive(Clone, Copy)]
pub union DescriptorOf {
    pub descriptor: c_int,
    pub other: *mut c_void,
}

/// [`Descriptor::kind`]: a Linux file descriptor.
pub const KIND_DESCRIPTOR: c_uint = 1;

/// Properties of an open driver: `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Properties {
    /// Version of the kernel module; both 0 = none.
    pub major_version: c_uint,
    pub minor_version: c_uint,
    pub poll_size: usize,
    pub max_direct_size: usize,
    /// Bit set of supported storage.
    pub reaches: c_uint,
    /// Bit set of active modes.
    pub modes: c_uint,
    /// Bit set of features.
    pub features: c_uint,
    pub max_cache_size: c_uint,
    pub buffer_cache_size: c_uint,
    pub max_pinned_size: c_uint,
    pub max_batch_size: c_uint,
    pub max_batch_timeout: c_uint,
}

/// With room for fields of newer versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RoomyProperties {
    pub known: Properties,
    pub rest: [u64; 128],
}

/// Bit of [`Properties::modes`]: poll for completion of small reads.
pub const MODE_POLL: u32 = 0;
/// Bit of [`Properties::modes`]: compatibility mode, which may silently read through host memory.
pub const MODE_COMPATIBLE: u32 = 1;
/// Bit of [`Properties::features`]: the kernel's PCI P2PDMA.
pub const FEATURE_P2P: u32 = 4;
/// Bit of [`Properties::reaches`]: NVMe by P2PDMA, in versions without the former.
pub const REACHES_P2P: u32 = 11;

/// Parameter: allow compatibility mode.
pub const ALLOW_COMPATIBLE: c_uint = 1;
/// Parameter: force compatibility mode.
pub const FORCE_COMPATIBLE: c_uint = 2;
/// Parameter of newer versions: always use POSIX reads.
pub const PLAIN_READS: c_uint = 12;
/// Parameter of newer versions: fall back to POSIX reads.
pub const FALL_BACK: c_uint = 13;

/// Codes with a meaning here. All are above [`code::BASE`], which separates them from system error
/// numbers.
pub mod code {
    use std::ffi::c_int;

    pub const BASE: c_int = 5000;
    pub const NO_MODULE: c_int = 5001;
    pub const OTHER_MODULE: c_int = 5004;
    pub const NOT_THIS_PLATFORM: c_int = 5007;
    pub const NOT_THIS_FILE: c_int = 5008;
    pub const NOT_THIS_DEVICE: c_int = 5009;
    pub const CUDA: c_int = 5011;
    pub const TOO_MUCH_PINNED: c_int = 5016;
    pub const NOT_THIS_KIND: c_int = 5018;
    pub const NOT_DIRECT: c_int = 5020;
    pub const NOT_ALLOWED: c_int = 5025;
    pub const FILE_IS_KNOWN: c_int = 5028;
    pub const NOT_STARTED: c_int = 5033;
    pub const SWITCHED_OFF: c_int = 5034;
}

/// Describes a code.
pub fn describe_code(code: c_int) -> &'static str {
    match code {
        code::NO_MODULE => "the kernel module nvidia-fs is not loaded",
        code::OTHER_MODULE => "the kernel module nvidia-fs is of another version",
        code::NOT_THIS_PLATFORM => "this platform is not supported",
        code::NOT_THIS_FILE => "the file's file system or disk is not supported",
        code::NOT_THIS_DEVICE => "this GPU is not supported",
        code::CUDA => "CUDA failed",
        code::TOO_MUCH_PINNED => "too much memory is pinned",
        code::NOT_THIS_KIND => "this kind of file is not supported",
        code::NOT_DIRECT => "the file is not open for direct reads",
        code::NOT_ALLOWED => "permission denied",
        code::FILE_IS_KNOWN => "the file is registered already",
        code::NOT_STARTED => "the kernel module nvidia-fs does not start",
        code::SWITCHED_OFF => "switched off for this file, in cufile.json",
        _ => "see cufile.log",
    }
}
