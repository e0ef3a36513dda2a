//! Kernels of devices.

use std::mem::offset_of;

use crate::attention::keys::{Heads, Keys};
use crate::base::status::Result;
use crate::device::call::{Call, Kind};
use crate::device::{Event, Stream};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, require};
use crate::ffi::device::{kvt_device_t, with_device};
use crate::ffi::error::kvt_error_t;
use crate::ffi::sparse_ask::{kvt_index_head_t, kvt_index_t};
use crate::ffi::sparse_lists::{keys_of, too_small};
use crate::ffi::status::kvt_status_t;

/// Moves runs of bytes.
pub const KVT_LAUNCH_MOVE: u32 = 1;
/// Changes what numbers are, with scales or without.
pub const KVT_LAUNCH_CONVERT: u32 = 2;
/// Sums bytes as the store does.
pub const KVT_LAUNCH_SUM: u32 = 3;
/// Makes the boxes of pages wider.
pub const KVT_LAUNCH_PAGE_BOXES: u32 = 4;
/// The most that a query can have of each page.
pub const KVT_LAUNCH_PAGE_SCORES: u32 = 5;
/// The largest of each row.
pub const KVT_LAUNCH_TOP: u32 = 6;
/// Adds weights to what tokens had.
pub const KVT_LAUNCH_ADD: u32 = 7;
/// Which tokens stay.
pub const KVT_LAUNCH_KEEP: u32 = 8;
/// Moves what stays together.
pub const KVT_LAUNCH_COMPACT: u32 = 9;
/// Columns and diagonals of the last queries.
pub const KVT_LAUNCH_ESTIMATE: u32 = 10;
/// Attention of a prompt over lines or blocks.
pub const KVT_LAUNCH_PREFILL: u32 = 11;
/// Attention of few queries over chosen pages.
pub const KVT_LAUNCH_DECODE: u32 = 12;

const _: () = assert!(KVT_LAUNCH_DECODE == Kind::Decode as u32);
/// Most kernels of a batch.
const MAX_KERNELS: u64 = 4096;

/// One kernel: 256 bytes, the same for all. Addresses are the device's, strides are bytes, 0 =
/// none; each kernel uses some of the fields, and the others are 0. docs/kernels.md says which.
/// Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_kernel_t {
    /// KVT_LAUNCH_*.
    pub kind: u32,
    /// KVT_DTYPE_*: what keys and values, or what is read, are.
    pub dtype: u32,
    /// KVT_DTYPE_*: what queries and the output, or what is written, are.
    pub other_dtype: u32,
    /// KVT_SCALES_*.
    pub scaling: u32,
    /// Queries.
    pub queries: u64,
    /// Keys, or what is read.
    pub keys: u64,
    /// Values.
    pub values: u64,
    /// What is written.
    pub out: u64,
    /// Lists of places.
    pub index: u64,
    /// How long each list is.
    pub counts: u64,
    /// Where pages are.
    pub table: u64,
    /// Numbers that are read or changed.
    pub numbers: u64,
    /// More of them.
    pub more: u64,
    /// Scales of narrow numbers.
    pub scales: u64,
    /// Memory of the kernel's while it runs.
    pub scratch: u64,
    /// How much.
    pub scratch_bytes: u64,
    /// From a query to the next.
    pub query_stride: i64,
    /// From a head of a query to the next.
    pub query_head_stride: i64,
    /// From a key to the next.
    pub key_stride: i64,
    /// From a head of a key to the next.
    pub key_head_stride: i64,
    /// From a value to the next.
    pub value_stride: i64,
    /// From a head of a value to the next.
    pub value_head_stride: i64,
    /// From a row of what is written to the next.
    pub out_stride: i64,
    /// From a head of it to the next.
    pub out_head_stride: i64,
    /// How many queries.
    pub query_count: u32,
    /// Heads of a query.
    pub query_heads: u32,
    /// Heads of a key.
    pub key_heads: u32,
    /// Numbers of a key's head.
    pub key_dim: u32,
    /// Numbers of a value's head.
    pub value_dim: u32,
    /// Tokens of a page or block.
    pub page_tokens: u32,
    /// Tokens that the sequence has.
    pub tokens: u32,
    /// The first of what is worked on.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// How many stay, or are chosen.
    pub keep: u32,
    /// So many of the last stay.
    pub recent: u32,
    /// So many of the first stay.
    pub sinks: u32,
    /// What products are multiplied with.
    pub scale: f32,
    /// What else it is to do, as the kernel says.
    pub flags: u32,
    /// 0.
    pub reserved: [u64; 3],
}

const _: () = assert!(size_of::<kvt_kernel_t>() == size_of::<Call>());

/// Both have each field in one place: one is read as the other.
macro_rules! same_places {
    ($($field:ident)*) => {
        $(const _: () = assert!(offset_of!(kvt_kernel_t, $field) == offset_of!(Call, $field));)*
    };
}

same_places!(kind dtype other_dtype scaling queries keys values out index counts table numbers more
    scales scratch scratch_bytes query_stride query_head_stride key_stride key_head_stride
    value_stride value_head_stride out_stride out_head_stride query_count query_heads key_heads
    key_dim value_dim page_tokens tokens first count keep recent sinks scale flags reserved);

fn call_of(kernel: kvt_kernel_t) -> Call {
    // SAFETY: both are the same fields of integers and floats, in the same order.
    unsafe { std::mem::transmute::<kvt_kernel_t, Call>(kernel) }
}

fn kernel_of(call: Call) -> kvt_kernel_t {
    // SAFETY: as above.
    unsafe { std::mem::transmute::<Call, kvt_kernel_t>(call) }
}

/// Puts kernels on a stream, behind an event if one is given, and behind what is there.
///
/// @param device        The device; kvt_device_info says which kernels it has.
/// @param stream        0 to kvt_device_info_t.streams - 1.
/// @param after         An event of the device's; 0 = none.
/// @param kernels       The kernels, done in order.
/// @param count         How many, at most 4,096.
/// @param stride_bytes  sizeof(kvt_kernel_t).
/// @param out_event     Receives the event of their end; release it with kvt_device_release.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK: the kernels are on their way; KVT_E_UNSUPPORTED, KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_AGAIN (65,536 events are open), KVT_E_UNAVAILABLE (the device is
///         lost), KVT_E_STATE, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_NOMEM, KVT_E_FORKED,
///         KVT_E_PANIC. What `after` failed with.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Arrays are valid for their lengths. The memory that kernels name is the device's to use, as
/// each of them uses it, until the event.
#[capi]
pub unsafe extern "C" fn kvt_device_launch(
    device: *const kvt_device_t,
    stream: u32,
    after: u64,
    kernels: *const kvt_kernel_t,
    count: u64,
    stride_bytes: u64,
    out_event: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_event)?;
    let rows = Strided::new(kernels.cast_mut(), count, stride_bytes, MAX_KERNELS)?;
    let calls =
        (0..rows.len()).map(|at| rows.get(at).map(call_of)).collect::<Result<Vec<Call>>>()?;
    let after = (after != 0).then_some(Event(after));
    let event = with_device(device, |device| device.launch(Stream(stream), after, &calls))?;
    out_event.write(event.0);
    Ok(())
}

/// Where each part of an index is, from where it begins, and how long all is.
struct Parts {
    starts: u64,
    items: u64,
    end: u64,
}

fn parts_of(keys: &Keys<'_>) -> Parts {
    let starts = size_of_val(keys.heads) as u64;
    let items = starts + size_of_val(keys.starts) as u64;
    Parts { starts, items, end: items + size_of_val(keys.items) as u64 }
}

/// What a prefill kernel is told of an index that will be at an address.
fn told(keys: &Keys<'_>, call: Call, address: u64) -> Result<Call> {
    let heads = Heads { queries: call.query_heads, keys: call.key_heads };
    if heads.keys == 0 || heads.queries % heads.keys != 0 {
        fail!(Invalid, "{} query heads cannot share {} of keys", heads.queries, heads.keys);
    }
    keys.check(heads, call.first, call.query_count)?;
    if keys.heads.is_empty() {
        return Ok(Call { count: 0, numbers: 0, counts: 0, index: 0, scratch_bytes: 0, ..call });
    }
    let parts = parts_of(keys);
    if address == 0 || address % 4 != 0 || address.checked_add(parts.end).is_none() {
        fail!(Invalid, "{} bytes of an index at {address:#x}", parts.end);
    }
    let count = keys.heads.len() as u32;
    let (counts, index) = (address + parts.starts, address + parts.items);
    let call = Call { count, numbers: address, counts, index, ..call };
    Ok(Call { scratch_bytes: call.line_bytes(), ..call })
}

/// Lays an index out for KVT_LAUNCH_PREFILL, and tells the kernel of it: heads, then `starts`, then
/// `items`, as kvt_index_t has them, one behind the other. It is checked here: the kernel trusts
/// it. The caller copies the bytes to where the device reaches them, and sets `scratch`.
///
/// @param index       Which keys are seen; null or without heads = all, and there are no bytes.
/// @param kernel      A kernel whose query_count, query_heads, key_heads, tokens and first are
///                    set; its count, numbers, counts, index and scratch_bytes (what is needed)
///                    are written.
/// @param address     Where the bytes will be for the device: a multiple of 4, not 0.
/// @param to          Receives the bytes.
/// @param out_capacity  How many it has room for.
/// @param out_bytes   Receives how many there are, also with KVT_E_TOO_SMALL.
/// @param err         Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL (the kernel stays as it is), KVT_E_INVALID (an index that is not
///         sound, too), KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `index` for the size it states, its arrays for their counts, `to`
/// for writes of its room.
#[capi]
pub unsafe extern "C" fn kvt_launch_index(
    index: *const kvt_index_t,
    kernel: *mut kvt_kernel_t,
    address: u64,
    to: *mut std::ffi::c_void,
    out_capacity: u64,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(kernel)?;
    require(out_bytes)?;
    let (keys, call) = (keys_of(index)?, call_of(kernel.read()));
    let call = told(&keys, call, address)?;
    let parts = parts_of(&keys);
    let bytes = if keys.heads.is_empty() { 0 } else { parts.end };
    out_bytes.write(bytes);
    if bytes > out_capacity || (bytes > 0 && to.is_null()) {
        return Err(too_small("the bytes of the index"));
    }
    let to = to.cast::<u8>();
    // SAFETY: as many bytes as there is room for, of arrays that are the caller's; a kernel
    // that was read.
    if bytes > 0 {
        let put = |at: u64, from: *const u8, bytes: usize| {
            to.add(at as usize).copy_from_nonoverlapping(from, bytes);
        };
        const { assert!(size_of::<kvt_index_head_t>() == 24) };
        put(0, keys.heads.as_ptr().cast(), size_of_val(keys.heads));
        put(parts.starts, keys.starts.as_ptr().cast(), size_of_val(keys.starts));
        put(parts.items, keys.items.as_ptr().cast(), size_of_val(keys.items));
    }
    kernel.write(kernel_of(call));
    Ok(())
}
