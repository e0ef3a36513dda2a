//! Passes of a streamer, what it is told, and memory that becomes more or less.

use crate::base::callback::refuse_reentry;
use crate::ffi::abi::{Access, Plain, capi, check_out, known_flags, read, write};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;
use crate::ffi::stream::{kvt_stream_t, with_stream};
use crate::ffi::stream_plan::{PlanOut, kvt_stream_plan_t};
use crate::stream::units::MAX_UNITS;

/// host_bytes is meant as it is, also when it is 0.
pub const KVT_LIMIT_HOST: u64 = 1;
/// device_bytes is meant as it is, also when it is 0.
pub const KVT_LIMIT_DEVICE: u64 = 2;

/// What weights may have from now on.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_limits_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_LIMIT_*.
    pub flags: u64,
    /// Most host memory; 0 = as it is.
    pub host_bytes: u64,
    /// Most device memory; 0 = as it is.
    pub device_bytes: u64,
    /// Tokens of context that KV is kept for; 0 = as it is.
    pub context: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How far the residents are.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_progress_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Units that have to come home and have not.
    pub missing: u64,
    /// Units whose home is in memory.
    pub resident_units: u64,
    /// Bytes read so far, for whatever.
    pub read_bytes: u64,
}

/// Waits until all residents are at home. Not needed: units that are asked for come first.
///
/// @param stream       The streamer.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_TIMEOUT, KVT_E_REENTRANT inside a callback; KVT_E_IO, KVT_E_CORRUPT,
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_load(
    stream: *const kvt_stream_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    with_stream(stream, Access::Use, |streamer| streamer.load(deadline_ns))
}

/// How far that is.
///
/// @param stream  The streamer.
/// @param out     Filled in; start it with KVT_STREAM_PROGRESS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_progress(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_progress_t,
) -> kvt_status_t {
    check_out(out)?;
    let progress = with_stream(stream, Access::Salvage, |stream| Ok(stream.progress()))?;
    write(
        out,
        &kvt_stream_progress_t {
            struct_size: 0,
            missing: progress.missing,
            resident_units: progress.residents,
            read_bytes: progress.read_bytes,
        },
    );
    Ok(())
}

/// A pass begins: units come in the order that was given. Files are looked at: a model that was
/// changed meanwhile is not used any more.
///
/// @param stream  The streamer.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT when a file is not what it was, KVT_E_IO, KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_begin(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_stream(stream, Access::Use, |stream| stream.pass_begin())
}

/// A pass has ended. Unless KVT_STREAM_ONCE was said, the first units of the next are on
/// their way already.
///
/// @param stream  The streamer.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_stream_pass_end(
    stream: *const kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_stream(stream, Access::Use, |stream| stream.pass_end())
}

/// The engine will use these units, such as the experts that a router has named: they are
/// fetched as far as there are slots that nobody needs. What was hinted before and has not
/// been used may leave.
///
/// @param stream  The streamer.
/// @param units   The units.
/// @param count   How many.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (no such unit), KVT_E_LIMIT, KVT_E_CLOSED, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `units` is null or valid for reads of `count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_stream_hint(
    stream: *const kvt_stream_t,
    units: *const u32,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let units = numbers(units, count, MAX_UNITS)?;
    with_stream(stream, Access::Use, |stream| stream.hint(units))
}

/// Gives weights more memory, or less, while passes go on: the context grows, KV needs room.
/// Returns at once: units in use move when they are given back, the others are brought
/// meanwhile (kvt_stream_progress says how far). Slots stay as they are, except those for
/// experts: with less memory there may be fewer, with more as many as at opening.
///
/// @param stream  The streamer.
/// @param limits    What there is from now on.
/// @param out     Receives the new plan; start it with KVT_STREAM_PLAN_INIT. May be null.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when the slots do not fit any more (nothing was changed),
///         KVT_E_INVALID, KVT_E_TOO_NEW, KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_rebalance(
    stream: *const kvt_stream_t,
    limits: *const kvt_stream_limits_t,
    out: *mut kvt_stream_plan_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let to = PlanOut { plan: out, ..PlanOut::nowhere() };
    to.check()?;
    let given = read(limits)?;
    known_flags(given.flags, KVT_LIMIT_HOST | KVT_LIMIT_DEVICE)?;
    if given.reserved != 0 {
        crate::fail!(Invalid, "reserved is {}", given.reserved);
    }
    let said = |bytes: u64, flag: u64| (bytes != 0 || given.flags & flag != 0).then_some(bytes);
    let host = said(given.host_bytes, KVT_LIMIT_HOST);
    let device = said(given.device_bytes, KVT_LIMIT_DEVICE);
    let context = (given.context != 0).then_some(given.context);
    let plan = with_stream(stream, Access::Use, |stream| stream.rebalance(host, device, context))?;
    to.give(&plan)
}
