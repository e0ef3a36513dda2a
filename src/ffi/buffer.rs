//! Buffers.

use std::ffi::c_void;

use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::core::Core;
use crate::base::item::{Item, MAX_ITEMS};
use crate::base::memory::{AllocationRequest, Buffer, Requirement};
use crate::base::op::{OpOpts, RELEASED};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::host;
use crate::ffi::abi::{
    Plain, capi, check_out, free, insert, inspect, known_flags, noun, pin_optional, read, require,
    write,
};
use crate::ffi::account::kvt_account_t;
use crate::ffi::error::kvt_error_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;

/// A range of host memory that ops may read and write. Internally locked; the
/// bytes themselves are yours, except between submitting an op on them and its
/// release: then the library's alone.
pub struct kvt_buffer_t(());

/// Lock the memory in RAM; fail when the quota does not allow it.
pub const KVT_BUFFER_PIN: u64 = 1;
/// Lock the memory in RAM if the quota allows it.
pub const KVT_BUFFER_TRY_PIN: u64 = 2;
/// Use huge pages of the reserved pool; fail when there are not enough.
pub const KVT_BUFFER_HUGETLB: u64 = 4;
/// Ask the kernel for transparent huge pages.
pub const KVT_BUFFER_TRY_HUGE: u64 = 8;
/// Make every page present before returning, on the workers in parallel.
pub const KVT_BUFFER_PREFAULT: u64 = 16;

/// Normal pages.
pub const KVT_PAGES_NORMAL: u32 = 0;
/// Pages the kernel was asked to merge into huge ones.
pub const KVT_PAGES_TRANSPARENT: u32 = 1;
/// Huge pages of the reserved pool.
pub const KVT_PAGES_HUGETLB: u32 = 2;
/// The caller's own memory.
pub const KVT_PAGES_FOREIGN: u32 = 3;

/// How to allocate a buffer.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_BUFFER_*.
    pub flags: u64,
    /// Size.
    pub bytes: u64,
    /// Alignment, a power of two up to 1 GiB; 0 = one page.
    pub align_bytes: u64,
    /// Who pays, in KVT_TIER_HOST and, when locked, KVT_TIER_PINNED; null = nobody.
    pub account: *const kvt_account_t,
}

/// What a buffer is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_buffer_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where it starts.
    pub address: *mut c_void,
    /// Its usable size.
    pub bytes: u64,
    /// What its account pays: the size in whole pages.
    pub charged_bytes: u64,
    /// Ops submitted on it and not yet released.
    pub in_flight: u64,
    /// 1 when it is locked in RAM.
    pub pinned: u32,
    /// KVT_PAGES_*.
    pub pages: u32,
}

pub(crate) struct BufferNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) buffer: Arc<Buffer>,
}

noun!(BufferNoun, kvt_buffer_t, 7, "buffer");

/// Bytes made present by one piece of work.
const PREFAULT_BYTES: u64 = 16 << 20;

/// Allocates a buffer.
///
/// @param runtime  Where it belongs.
/// @param opts     Size and kind; `bytes` must be set.
/// @param out      The buffer; free it with kvt_buffer_free.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOMEM, KVT_E_IO, KVT_E_LIMIT, KVT_E_BUDGET, KVT_E_PIN_QUOTA, KVT_E_UNAVAILABLE
///         (no reserved huge pages), KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC; with KVT_BUFFER_PREFAULT also
///         KVT_E_AGAIN, KVT_E_CANCELLED beside a close, and KVT_E_REENTRANT inside a
///         callback.
///
/// Ownership: the caller owns the buffer; it is not inherited by forked
/// children. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `opts` is valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_alloc(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_buffer_opts_t,
    out: *mut *mut kvt_buffer_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let wish = wish_of(&given)?;
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        let buffer = Arc::new(Buffer::map(&wish, core.faults())?);
        if given.flags & KVT_BUFFER_PREFAULT != 0 {
            prefault(core, &buffer)?;
        }
        Ok(BufferNoun { core: core.clone(), buffer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

fn wish_of(given: &kvt_buffer_opts_t) -> Result<AllocationRequest> {
    let all = KVT_BUFFER_PIN
        | KVT_BUFFER_TRY_PIN
        | KVT_BUFFER_HUGETLB
        | KVT_BUFFER_TRY_HUGE
        | KVT_BUFFER_PREFAULT;
    known_flags(given.flags, all)?;
    let wish = |must: u64, soft: u64| match (given.flags & must, given.flags & soft) {
        (0, 0) => Requirement::No,
        (0, _) => Requirement::Try,
        _ => Requirement::Must,
    };
    let account = pin_optional(given.account)?.map(|noun| noun.0.clone());
    Ok(AllocationRequest {
        bytes: given.bytes,
        align_bytes: given.align_bytes,
        pin: wish(KVT_BUFFER_PIN, KVT_BUFFER_TRY_PIN),
        huge: wish(KVT_BUFFER_HUGETLB, KVT_BUFFER_TRY_HUGE),
        prefer_huge: false,
        account,
    })
}

fn prefault(core: &Arc<Core>, buffer: &Arc<Buffer>) -> Result<()> {
    refuse_reentry()?;
    let pieces = buffer.bytes().div_ceil(PREFAULT_BYTES);
    let grain = PREFAULT_BYTES.max(buffer.bytes().div_ceil(MAX_ITEMS as u64));
    let mut items = core.item_list(pieces.min(MAX_ITEMS as u64) as usize)?;
    let mut at = 0;
    while at < buffer.bytes() {
        let n = grain.min(buffer.bytes() - at);
        items.push(Item::new(host::PREFAULT, Some((buffer.clone(), at)), None, n, 0));
        at += n;
    }
    let op = core.submit(&OpOpts::default(), items, host::run)?;
    op.wait(RELEASED, 0)?;
    op.remove();
    match op.info().status.and_then(Status::from_code) {
        Some(Status::Ok) => Ok(()),
        status => Err(op.error().unwrap_or_else(|| status.unwrap_or(Status::Panic).into())),
    }
}

/// Makes memory of yours usable for ops.
///
/// @param runtime    Where it belongs.
/// @param address    Where the memory starts.
/// @param size       Its size in bytes.
/// @param user_data  Handed to destroy; taken over on success only.
/// @param destroy    Called once, when the buffer is freed and no op uses it any
///                   more; may be null.
/// @param out        The buffer; free it with kvt_buffer_free.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the memory stays yours and must outlive the buffer. Threading:
/// any thread. Since 0.1.
///
/// # Safety
/// The memory must be readable and writable until the buffer is gone.
#[capi]
pub unsafe extern "C" fn kvt_buffer_wrap(
    runtime: *const kvt_runtime_t,
    address: *mut c_void,
    size: u64,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
    out: *mut *mut kvt_buffer_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let foreign = Arc::new(Foreign::new((), user_data, destroy));
    let noun = on_runtime(runtime, |core| {
        core.check_open()?;
        let buffer = Buffer::wrap(address.cast(), size, Box::new(foreign.clone()))?;
        Ok(BufferNoun { core: core.clone(), buffer: Arc::new(buffer) })
    })?;
    let handle = insert(noun)?;
    foreign.keep();
    out.write(handle);
    Ok(())
}

/// Frees a buffer.
///
/// @param buffer  Pointer to the handle, cleared on success; null, or a null
///                handle, is fine.
/// @return KVT_OK; KVT_E_BUSY while an op uses it; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `buffer` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_buffer_free(buffer: *mut *mut kvt_buffer_t) -> kvt_status_t {
    free(buffer, |noun| match noun.buffer.retire() {
        true => Ok(()),
        false if noun.buffer.is_retired() => Err(Status::Handle.into()),
        false => Err(Status::Busy.into()),
    })
}

/// Where a buffer's bytes are.
///
/// @param buffer       The buffer.
/// @param out_address  Where it starts; may be null.
/// @param out_bytes    Its usable size; may be null.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Ownership: the address is borrowed until the buffer is freed. Threading: any
/// thread, also in callbacks. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for writes.
#[capi]
pub unsafe extern "C" fn kvt_buffer_address(
    buffer: *const kvt_buffer_t,
    out_address: *mut *mut c_void,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let buffer = inspect(buffer)?;
    if let Some(out) = out_address.as_mut() {
        *out = buffer.buffer.address().cast();
    }
    if let Some(out) = out_bytes.as_mut() {
        *out = buffer.buffer.bytes();
    }
    Ok(())
}

/// What a buffer is.
///
/// @param buffer  The buffer.
/// @param out     Filled in; start it with KVT_BUFFER_INFO_INIT.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_INVALID, KVT_E_FORKED.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_buffer_info(
    buffer: *const kvt_buffer_t,
    out: *mut kvt_buffer_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let buffer = inspect(buffer)?;
    write(
        out,
        &kvt_buffer_info_t {
            struct_size: 0,
            address: buffer.buffer.address().cast(),
            bytes: buffer.buffer.bytes(),
            charged_bytes: buffer.buffer.charged_bytes(),
            in_flight: buffer.buffer.in_flight(),
            pinned: u32::from(buffer.buffer.is_pinned()),
            pages: buffer.buffer.pages() as u32,
        },
    );
    Ok(())
}
