//! Work on buffers: copies and checksums as ops.

use std::ffi::c_void;

use crate::base::checksum::checksum;
use crate::base::item::{Item, MAX_ITEMS};
use crate::base::memory::Buffer;
use crate::base::op::{Op, OpRef};
use crate::base::status::{Error, Result};
use crate::base::sync::Arc;
use crate::device::host;
use crate::fail;
use crate::ffi::abi::{Access, Plain, Strided, bytes, capi, encode, pin, require};
use crate::ffi::buffer::kvt_buffer_t;
use crate::ffi::error::kvt_error_t;
use crate::ffi::op::{kvt_op_t, kvt_submit_opts_t, submit_opts};
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;

/// Copy the source to the target; they may overlap.
pub const KVT_DO_COPY: u32 = 1;
/// Report the checksum of the source as it was read.
pub const KVT_DO_CHECKSUM: u32 = 2;
/// Compare that checksum with `expect`: KVT_E_CORRUPT if it differs (a copy
/// asked for along with it has been made all the same).
pub const KVT_DO_VERIFY: u32 = 4;
/// Make the target's pages present; contents stay. Alone only.
pub const KVT_DO_PREFAULT: u32 = 8;

const _: () = assert!(KVT_DO_COPY == host::COPY && KVT_DO_CHECKSUM == host::CHECKSUM);
const _: () = assert!(KVT_DO_VERIFY == host::VERIFY && KVT_DO_PREFAULT == host::PREFAULT);

/// One piece of work on up to two buffers.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_item_t {
    /// KVT_DO_* bits.
    pub kind: u32,
    /// None are defined yet: 0.
    pub flags: u32,
    /// The target; null for work that only reads.
    pub dst: *const kvt_buffer_t,
    /// Where in the target.
    pub dst_offset: u64,
    /// The source; null for KVT_DO_PREFAULT.
    pub src: *const kvt_buffer_t,
    /// Where in the source.
    pub src_offset: u64,
    /// How much.
    pub bytes: u64,
    /// The checksum to compare with, for KVT_DO_VERIFY.
    pub expect: u64,
    /// Your own word, with KVT_SUBMIT_EACH.
    pub tag: u64,
}

/// Submits work on buffers: one op for all items, or, with KVT_SUBMIT_EACH, one
/// per item. All or nothing; never waits. Items of one op run in any order and
/// on several workers, so they must not write what another reads.
///
/// @param runtime       Who does it.
/// @param opts          Queue, tag, deadline, priority; null for none.
/// @param items         The work; copied, so yours again when this returns.
/// @param count         How many items, 1 to 65536.
/// @param stride_bytes  sizeof(kvt_buffer_item_t).
/// @param ops_out       Receives the op (`count` ops with KVT_SUBMIT_EACH), to be
///                      freed by you; null when the queue alone tells of the end.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK when submitted; KVT_E_AGAIN when the queue or the runtime is
///         full; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the ops; the buffers' bytes are the library's
/// until the release. Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `items` is valid for `count` * `stride_bytes`, `ops_out` null or valid for the
/// handles it receives, `opts` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_submit(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_submit_opts_t,
    items: *const kvt_buffer_item_t,
    count: u64,
    stride_bytes: u64,
    ops_out: *mut *mut kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let max = MAX_ITEMS as u64;
    let given = Strided::new(items.cast_mut(), count, stride_bytes, max)?;
    let (opts, each) = submit_opts(opts, ops_out.is_null())?;
    let (given, opts, each) = (given, opts, each);
    if given.len() == 0 {
        fail!(Invalid, "there is nothing to do: count is 0");
    }
    on_runtime(runtime, |core| {
        let mut list = core.item_list(given.len())?;
        for i in 0..given.len() {
            let item = given.get(i).and_then(|item| item_of(&item));
            list.push(item.map_err(|e: Error| e.within(&format!("item {i}")))?);
        }
        let hand_out = |i: usize, op: &OpRef| {
            if !ops_out.is_null() {
                // SAFETY: the caller has room for `count` handles, or for one.
                ops_out.add(i).write(encode::<Op>(op.key()));
            }
        };
        if each {
            let tag_of = |i| given.get(i).map_or(0, |item: kvt_buffer_item_t| item.tag);
            return core.submit_each(&opts, list, tag_of, host::run, hand_out);
        }
        hand_out(0, &core.submit(&opts, list, host::run)?);
        Ok(())
    })
}

fn item_of(given: &kvt_buffer_item_t) -> Result<Item> {
    if given.flags != 0 {
        fail!(Invalid, "unknown flags {:#x}", given.flags);
    }
    let (wants_dst, wants_src) = host::needs(given.kind)?;
    let dst = side("target", wants_dst, given.dst, given.dst_offset, given.bytes)?;
    let src = side("source", wants_src, given.src, given.src_offset, given.bytes)?;
    let freed = |side: &Option<(Arc<Buffer>, u64)>| side.as_ref().is_some_and(|b| b.0.is_retired());
    let (target, source) = (dst.clone(), src.clone());
    let item = Item::new(given.kind, dst, src, given.bytes, given.expect);
    // Entered now: a free that came first is seen here, a later one finds it busy.
    if freed(&target) || freed(&source) {
        fail!(Handle, "a buffer was freed meanwhile");
    }
    Ok(item)
}

fn side(
    name: &str,
    wanted: bool,
    handle: *const kvt_buffer_t,
    offset: u64,
    bytes: u64,
) -> Result<Option<(Arc<Buffer>, u64)>> {
    if !wanted {
        if !handle.is_null() {
            fail!(Invalid, "this kind of work has no {name}");
        }
        return Ok(None);
    }
    let noun = pin(handle, Access::Use).map_err(|e| e.within(name))?;
    if noun.buffer.range(offset, bytes).is_none() {
        let has = noun.buffer.bytes();
        fail!(Invalid, "{bytes} bytes at {offset} leave the {name} of {has} bytes");
    }
    Ok(Some((noun.buffer.clone(), offset)))
}

/// The checksum of bytes, as ops compute it: XXH3-64 of every 4096 bytes, then
/// XXH3-64 of those sums as little-endian numbers.
///
/// @param data       The bytes.
/// @param size       How many.
/// @param out_value  The checksum.
/// @return KVT_OK; KVT_E_INVALID.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `data` is null with a size of 0, or valid for reads; `out_value` for a write.
#[capi]
pub unsafe extern "C" fn kvt_checksum(
    data: *const c_void,
    size: u64,
    out_value: *mut u64,
) -> kvt_status_t {
    require(out_value)?;
    out_value.write(checksum(bytes(data.cast(), size)?));
    Ok(())
}
