//! Operations in flight and done.

use crate::base::callback::refuse_reentry;
use crate::base::item::MAX_ITEMS;
use crate::base::op::{EVENTS, ISSUED, Op, OpOpts, OpRef, RELEASED, RESOLVED, ops};
use crate::base::status::{Error, Result, Status};
use crate::base::worker::PRIORITIES;
use crate::fail;
use crate::ffi::abi::{
    Plain, Strided, capi, check_out, encode, free, inspect, known_flags, noun, pin_optional, read,
    require, write,
};
use crate::ffi::error::{handle_of, kvt_error_t};
use crate::ffi::queue::kvt_queue_t;
use crate::ffi::status::kvt_status_t;

/// A submitted operation. It completes exactly once and has two moments:
/// *resolved*, the result is known, and *released*, the library does not touch
/// your memory any more. Usually both come together; a deadline or a defect may
/// resolve an op earlier. Internally locked: any thread may use it.
pub struct kvt_op_t(());

/// Execution has begun (or was ended before it could).
pub const KVT_OP_ISSUED: u32 = 1;
/// The result is known.
pub const KVT_OP_RESOLVED: u32 = 2;
/// Your memory is yours again.
pub const KVT_OP_RELEASED: u32 = 4;
/// A cancel was asked for.
pub const KVT_OP_CANCEL: u32 = 8;

/// Each item becomes an op of its own; ops_out then receives one per item.
pub const KVT_SUBMIT_EACH: u64 = 1;

/// Work somebody waits for.
pub const KVT_PRIORITY_DEMAND: u32 = 0;
/// Work that will be wanted soon.
pub const KVT_PRIORITY_PREFETCH: u32 = 1;
/// Work that can wait.
pub const KVT_PRIORITY_BACKGROUND: u32 = 2;

const _: () = assert!(KVT_OP_ISSUED == ISSUED && KVT_OP_RESOLVED == RESOLVED);
const _: () = assert!(KVT_OP_RELEASED == RELEASED && KVT_OP_CANCEL == crate::base::op::CANCEL);

/// How to submit. Zero is the default everywhere.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_submit_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_SUBMIT_*.
    pub flags: u64,
    /// Where completions go; null = nowhere, the op handle must be kept.
    pub queue: *const kvt_queue_t,
    /// Your own word, handed back in the completion.
    pub tag: u64,
    /// CLOCK_MONOTONIC; the op resolves with KVT_E_TIMEOUT then. 0 = never.
    pub deadline_ns: u64,
    /// Moments (KVT_OP_ISSUED, _RESOLVED, _RELEASED) that get a completion each;
    /// moments that come together share one. 0 = KVT_OP_RELEASED.
    pub notify: u32,
    /// KVT_PRIORITY_*.
    pub priority: u32,
}

/// How far an op is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// The word given at submission.
    pub tag: u64,
    /// Bytes of the items that are done and OK.
    pub bytes_done: u64,
    /// KVT_OP_* bits.
    pub state: u32,
    /// The result; meaningful once KVT_OP_RESOLVED is set.
    pub status: kvt_status_t,
    /// Items in all.
    pub items: u32,
    /// Items that are done or were skipped.
    pub items_done: u32,
    /// Of those, the ones that are not OK.
    pub items_failed: u32,
    /// Always 0.
    pub reserved: u32,
    /// What the first item computed; of a move of a session how many tokens from
    /// the first on came, or were stored, without a gap.
    pub value: u64,
}

/// How one item of an op went.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_op_item_t {
    /// What it computed, such as a checksum; 0 where nothing was.
    pub value: u64,
    /// Its result; meaningful once done.
    pub status: kvt_status_t,
    /// 1 when it is done or was skipped.
    pub done: u32,
}

noun!(Op, kvt_op_t, 3, "op", ops());

/// Reads submit options; the second result says whether every item is an op.
///
/// # Safety
/// `opts` is null or valid for the size it states.
pub(crate) unsafe fn submit_opts(
    opts: *const kvt_submit_opts_t,
    detached: bool,
) -> Result<(OpOpts, bool)> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(opts)? };
    known_flags(given.flags, KVT_SUBMIT_EACH)?;
    if given.notify & !EVENTS != 0 {
        fail!(Invalid, "notify {:#x} has bits that are no moments", given.notify);
    }
    if given.priority as usize >= PRIORITIES {
        fail!(Invalid, "priority {} is none of 0 to {}", given.priority, PRIORITIES - 1);
    }
    let queue = pin_optional(given.queue)?.map(|noun| noun.0.clone());
    let opts = OpOpts {
        queue,
        tag: given.tag,
        deadline_ns: given.deadline_ns,
        notify: given.notify,
        priority: given.priority as usize,
        detached,
    };
    Ok((opts, given.flags & KVT_SUBMIT_EACH != 0))
}

/// Begins what is one op, and gives its handle.
///
/// # Safety
/// `opts` is null or valid for the size it states, `op_out` null or valid.
pub(crate) unsafe fn begin_one(
    opts: *const kvt_submit_opts_t,
    op_out: *mut *mut kvt_op_t,
    begin: impl FnOnce(&OpOpts) -> Result<OpRef>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (opts, each) = unsafe { submit_opts(opts, op_out.is_null())? };
    if each {
        fail!(Invalid, "KVT_SUBMIT_EACH has no meaning here: there is one op");
    }
    if op_out.is_null() && opts.queue.is_none() {
        fail!(Invalid, "there is no queue, and op_out is null: nobody would hear of its end");
    }
    let op = begin(&opts)?;
    if !op_out.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { op_out.write(encode::<Op>(op.key())) };
    }
    Ok(())
}

/// How far an op is.
///
/// @param op   The op.
/// @param out  Filled in; start it with KVT_OP_INFO_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_op_info(op: *const kvt_op_t, out: *mut kvt_op_info_t) -> kvt_status_t {
    check_out(out)?;
    let op = inspect(op)?;
    let info = op.info();
    write(
        out,
        &kvt_op_info_t {
            struct_size: 0,
            tag: info.tag,
            bytes_done: info.bytes_done,
            state: info.state,
            status: info.status.unwrap_or(0),
            items: info.items,
            items_done: info.items_done,
            items_failed: info.items_failed,
            reserved: 0,
            value: op.value(),
        },
    );
    Ok(())
}

/// Waits until an op has reached moments.
///
/// @param op           The op.
/// @param moments      KVT_OP_ISSUED, _RESOLVED, _RELEASED or several; all are
///                     waited for.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @return KVT_OK when they are reached, whatever the op's own result (see
///         kvt_op_info); KVT_E_TIMEOUT; KVT_E_REENTRANT inside a callback;
///         KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
#[capi]
pub extern "C" fn kvt_op_wait(op: *const kvt_op_t, moments: u32, deadline_ns: u64) -> kvt_status_t {
    if moments == 0 || moments & !EVENTS != 0 {
        fail!(Invalid, "moments {moments:#x} are not moments of an op");
    }
    refuse_reentry()?;
    let op = inspect(op)?;
    op.wait(moments, deadline_ns)
}

/// Asks an op to end. One that has not been issued ends at once with
/// KVT_E_CANCELLED; one that runs skips the items it has not begun. An op that
/// is done stays as it is.
///
/// @param op  The op.
/// @return KVT_OK, also when it is too late; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
#[capi]
pub extern "C" fn kvt_op_cancel(op: *const kvt_op_t) -> kvt_status_t {
    let op = inspect(op)?;
    op.cancel();
    Ok(())
}

/// How the items of an op went; also while it runs.
///
/// @param op            The op.
/// @param first         The first item wanted.
/// @param out           Receives the entries.
/// @param capacity      Room at `out`, in entries, at most 65536.
/// @param stride_bytes  sizeof(kvt_op_item_t).
/// @param out_count     How many were written.
/// @return KVT_OK; KVT_E_INVALID when `first` is beyond the last item;
///         KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is valid for `capacity` * `stride_bytes`, `out_count` for a write.
#[capi]
pub unsafe extern "C" fn kvt_op_items(
    op: *const kvt_op_t,
    first: u64,
    out: *mut kvt_op_item_t,
    capacity: u64,
    stride_bytes: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    let entries = Strided::new(out, capacity, stride_bytes, MAX_ITEMS as u64)?;
    let op = inspect(op)?;
    let items = usize::try_from(first).ok().and_then(|first| op.items().get(first..));
    let Some(items) = items else {
        fail!(Invalid, "item {first} of an op with {}", op.items().len());
    };
    let n = items.len().min(entries.len());
    for (i, item) in items.iter().take(n).enumerate() {
        let (status, value) = item.outcome();
        let done = u32::from(status.is_some());
        entries.put(i, &kvt_op_item_t { value, status: status.unwrap_or(0), done });
    }
    out_count.write(n as u64);
    Ok(())
}

/// The words behind an op's failure.
///
/// @param op   The op.
/// @param out  The error; free it with kvt_error_free.
/// @return KVT_OK; KVT_E_NOT_FOUND when there is nothing to say beyond the
///         status; KVT_E_STATE before it is resolved; KVT_E_HANDLE,
///         KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_op_error(
    op: *const kvt_op_t,
    out: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let op = inspect(op)?;
    if op.state() & RESOLVED == 0 {
        return Err(Status::State.into());
    }
    let error = op.error().ok_or_else(|| Error::from(Status::NotFound))?;
    let handle = handle_of(error)?;
    out.write(handle);
    Ok(())
}

/// Frees an op handle. The op must have been released: cancel and wait first
/// to get there.
///
/// @param op  Pointer to the handle, cleared on success; null, or a null handle,
///            is fine.
/// @return KVT_OK; KVT_E_BUSY before the release; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `op` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_op_free(op: *mut *mut kvt_op_t) -> kvt_status_t {
    free_op(op)
}

/// Frees many op handles; stops at the first that cannot be freed.
///
/// @param ops    The handles, each cleared when freed; null handles are skipped.
/// @param count  How many.
/// @return KVT_OK; KVT_E_BUSY, KVT_E_HANDLE for the first handle that is not
///         null afterwards; KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `ops` is null with a count of 0, or valid for reads and writes of `count` handles.
#[capi]
pub unsafe extern "C" fn kvt_op_free_many(ops: *mut *mut kvt_op_t, count: u64) -> kvt_status_t {
    if count == 0 {
        return Ok(());
    }
    require(ops)?;
    for i in 0..count as usize {
        // SAFETY: inside the caller's array.
        free_op(ops.add(i))?;
    }
    Ok(())
}

/// # Safety
/// `op` is null or valid for reads and writes.
unsafe fn free_op(op: *mut *mut kvt_op_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        free(op, |op| match op.state() & RELEASED {
            0 => Err(Status::Busy.into()),
            _ => Ok(()),
        })
    }
}
