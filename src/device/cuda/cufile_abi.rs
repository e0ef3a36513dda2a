//! What cuFile calls things: types, numbers and codes of its interface. A test compares them with
//! another's reading of its header.

use std::ffi::{c_int, c_uint, c_void};

/// What most of its functions return.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// 0 = well, else a code.
    pub code: c_int,
    /// The driver's code, where the other is [`code::CUDA`].
    pub cuda: c_int,
}

/// A file, as it is made known: `CUfileDescr_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    /// [`KIND_DESCRIPTOR`].
    pub kind: c_uint,
    pub file: DescriptorOf,
    pub calls: *const c_void,
}

/// Which file.
#[repr(C)]
#[derive(Clone, Copy)]
pub union DescriptorOf {
    pub descriptor: c_int,
    pub other: *mut c_void,
}

/// [`Descriptor::kind`]: a file descriptor of Linux.
pub const KIND_DESCRIPTOR: c_uint = 1;

/// What is known once it is open: `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Properties {
    /// Of the kernel's module; both 0 = there is none.
    pub major_version: c_uint,
    pub minor_version: c_uint,
    pub poll_size: usize,
    pub max_direct_size: usize,
    /// A bit for each kind of storage that it reaches.
    pub reaches: c_uint,
    /// A bit for each mode that is on.
    pub modes: c_uint,
    /// A bit for each thing that it can do.
    pub features: c_uint,
    pub max_cache_size: c_uint,
    pub buffer_cache_size: c_uint,
    pub max_pinned_size: c_uint,
    pub max_batch_size: c_uint,
    pub max_batch_timeout: c_uint,
}

/// The same with room behind it: who fills it may know of more.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RoomyProperties {
    pub known: Properties,
    pub rest: [u64; 128],
}

/// [`Properties::modes`], which bit: small reads ask again and again whether they have ended.
pub const MODE_POLL: u32 = 0;
/// Which bit: what cannot go directly may go by way of host memory, in silence.
pub const MODE_COMPATIBLE: u32 = 1;
/// [`Properties::features`], which bit: the kernel's own way from device to device.
pub const FEATURE_P2P: u32 = 4;
/// [`Properties::reaches`], which bit: disks by that way, of those that do not say the former.
pub const REACHES_P2P: u32 = 11;

/// Switches: what cannot go directly may go by way of host memory.
pub const ALLOW_COMPATIBLE: c_uint = 1;
/// All goes by way of host memory.
pub const FORCE_COMPATIBLE: c_uint = 2;
/// All goes by plain reads (newer ones).
pub const PLAIN_READS: c_uint = 12;
/// What fails goes by plain reads (newer ones).
pub const FALL_BACK: c_uint = 13;

/// Codes that mean something of their own here. All are above [`code::BASE`], so that the system's
/// error numbers can be told from them.
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

/// What a code means.
pub fn describe_code(code: c_int) -> &'static str {
    match code {
        code::NO_MODULE => "the kernel module nvidia-fs is not loaded",
        code::OTHER_MODULE => "the kernel module nvidia-fs is of another version",
        code::NOT_THIS_PLATFORM => "not on this platform",
        code::NOT_THIS_FILE => "not for this file: its file system or disk",
        code::NOT_THIS_DEVICE => "not with this GPU",
        code::CUDA => "CUDA failed",
        code::TOO_MUCH_PINNED => "too much memory is pinned",
        code::NOT_THIS_KIND => "not this kind of file",
        code::NOT_DIRECT => "the file is not open for direct reads",
        code::NOT_ALLOWED => "no leave to use it",
        code::FILE_IS_KNOWN => "the file is known already",
        code::NOT_STARTED => "the kernel module nvidia-fs does not start",
        code::SWITCHED_OFF => "switched off for this file, in cufile.json",
        _ => "see cufile.log",
    }
}
