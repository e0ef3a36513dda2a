//! What a streamer is, and has done.

use std::ffi::{c_char, c_void};

use crate::base::status::{Result, Status};
use crate::ffi::abi::{
    Access, Plain, Strided, capi, check_out, give, give_text, put, require, text, write,
};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::ffi::stream::{kvt_stream_t, with_stream};
use crate::ffi::stream_plan::{
    PlanOut, forecast_of, kvt_forecast_t, kvt_stream_plan_t, kvt_unit_residency_t, words_of,
};
use crate::stream::plan::Links;

/// kvt_stream_mark_t.stage: a chunk was read.
pub const KVT_STAGE_READ: u32 = 1;
/// kvt_stream_mark_t.stage: a chunk was copied to the device.
pub const KVT_STAGE_COPY: u32 = 2;
/// kvt_stream_mark_t.stage: the engine had a unit.
pub const KVT_STAGE_USE: u32 = 3;
/// kvt_stream_mark_t.stage: the engine waited for a unit.
pub const KVT_STAGE_WAIT: u32 = 4;

/// What a streamer has done.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_stats_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Passes that have ended.
    pub passes: u64,
    /// How long the last one took.
    pub pass_ns: u64,
    /// Units that were had.
    pub acquires: u64,
    /// Calls that had to wait.
    pub waited: u64,
    /// How long calls waited for reads.
    pub wait_read_ns: u64,
    /// For copies to the device.
    pub wait_copy_ns: u64,
    /// For slots.
    pub wait_slot_ns: u64,
    /// How long the engine had units; of those at home only where marks are kept.
    pub use_ns: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// How long reads took, added up: more than the time that passed where several were under
    /// way.
    pub read_ns: u64,
    /// What the disk was measured or said to do, in bytes a second; 0 = not known.
    pub read_ceiling: u64,
    /// Bytes that were copied to the device.
    pub copied_bytes: u64,
    /// How long copies took, added up.
    pub copy_ns: u64,
    /// What the link to the device was said to do; 0 = not known.
    pub copy_ceiling: u64,
    /// Bytes that were brought and never used.
    pub wasted_bytes: u64,
    /// Reads and copies that failed.
    pub failed: u64,
    /// Experts that were asked for and there.
    pub expert_hits: u64,
    /// Experts that had to be brought.
    pub expert_misses: u64,
    /// Of the bytes that were read, those that the device read by itself (KVT_STREAM_DIRECT).
    pub direct_bytes: u64,
    /// Reads of the device's that failed: those bytes came by way of host memory. After three in a
    /// row no more are tried.
    pub direct_failed: u64,
}

/// What became of the experts of a layer. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_layer_count_t {
    /// The layer.
    pub layer: u32,
    /// Always 0.
    pub reserved: u32,
    /// Experts that were asked for and there.
    pub hits: u64,
    /// Those that had to be brought.
    pub misses: u64,
    /// Bytes that were brought.
    pub bytes: u64,
}

/// Something that took time. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_stream_mark_t {
    /// KVT_STAGE_*.
    pub stage: u32,
    /// Which unit.
    pub unit: u32,
    /// From when, CLOCK_MONOTONIC.
    pub begin_ns: u64,
    /// Until when.
    pub end_ns: u64,
}

/// Who lives where now.
///
/// @param stream        The streamer.
/// @param out           Receives it in numbers; start it with KVT_STREAM_PLAN_INIT. May be null.
/// @param forecast      Receives what a pass takes; start it with KVT_FORECAST_INIT. May be
///                      null.
/// @param residency         Receives the home of each unit; may be null with room for 0.
/// @param capacity     How many it has room for.
/// @param stride_bytes  sizeof(kvt_unit_residency_t).
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_plan(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_plan_t,
    forecast: *mut kvt_forecast_t,
    residency: *mut kvt_unit_residency_t,
    capacity: u64,
    stride_bytes: u64,
) -> kvt_status_t {
    let to = PlanOut { plan: out, forecast, residency, capacity, stride_bytes };
    to.check()?;
    to.give(&with_stream(stream, Access::Salvage, |stream| Ok(stream.plan()))?)
}

/// The same in words, with every figure explained.
///
/// @param stream        The streamer.
/// @param kind          KVT_PLAN_TEXT or KVT_PLAN_JSON.
/// @param out           Receives the words, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_stream_plan_describe(
    stream: *const kvt_stream_t,
    kind: u32,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let words = with_stream(stream, Access::Salvage, |stream| {
        words_of(kind, || stream.plan_text(), || stream.plan_json())
    })?;
    give_text(&words, out, out_capacity, out_bytes)
}

/// What a pass would take over other links.
///
/// @param stream       The streamer.
/// @param links        The other links, such as "disk=3.3" in gigabytes (1e9) a second; those
///                     not named are as they are.
/// @param links_bytes  Its length.
/// @param out          Receives it; start it with KVT_FORECAST_INIT.
/// @param err          Explains a failure, with the offset in `links`; may be null.
/// @return KVT_OK; KVT_E_SPEC, KVT_E_LIMIT, KVT_E_INVALID when a link that is needed is not
///         known; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths; `out` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_what_if(
    stream: *const kvt_stream_t,
    links: *const c_char,
    links_bytes: u64,
    out: *mut kvt_forecast_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let links = Links::parse(text("links", links, links_bytes)?)?;
    let forecast = with_stream(stream, Access::Salvage, |stream| stream.what_if(links))?;
    write(out, &forecast_of(Some(&forecast)));
    Ok(())
}

/// What a streamer has done since it was opened; also of a poisoned one.
///
/// @param stream  The streamer.
/// @param out     Filled in; start it with KVT_STREAM_STATS_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_stats(
    stream: *const kvt_stream_t,
    out: *mut kvt_stream_stats_t,
) -> kvt_status_t {
    check_out(out)?;
    let (stats, [disk, device]) =
        with_stream(stream, Access::Salvage, |stream| Ok((stream.stats(), stream.links())))?;
    write(
        out,
        &kvt_stream_stats_t {
            struct_size: 0,
            passes: stats.passes,
            pass_ns: stats.pass_ns,
            acquires: stats.acquires,
            waited: stats.waited,
            wait_read_ns: stats.wait_read_ns,
            wait_copy_ns: stats.wait_copy_ns,
            wait_slot_ns: stats.wait_slot_ns,
            use_ns: stats.use_ns,
            read_bytes: stats.read_bytes,
            read_ns: stats.read_ns,
            read_ceiling: disk.ceiling,
            copied_bytes: stats.copied_bytes,
            copy_ns: stats.copy_ns,
            copy_ceiling: device.ceiling,
            wasted_bytes: stats.wasted_bytes,
            failed: stats.failed,
            expert_hits: stats.expert_hits,
            expert_misses: stats.expert_misses,
            direct_bytes: stats.direct_bytes,
            direct_failed: stats.direct_failed,
        },
    );
    Ok(())
}

/// Most rows that a caller has room for.
const MAX_ROWS: u64 = 1 << 24;

/// # Safety
/// `rows` is null or valid for writes of its entries, `count_out` for a write.
unsafe fn give_rows<T: Plain, F>(
    rows: *mut T,
    (capacity, stride_bytes): (u64, u64),
    count_out: *mut u64,
    all: Result<Vec<F>>,
    row_of: impl Fn(F) -> T,
) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let array = Strided::new(rows, capacity, stride_bytes, MAX_ROWS)?;
        give(&array, rows.is_null(), all?.into_iter().map(row_of), count_out)
    }
}

/// What became of experts, by layer.
///
/// @param stream        The streamer.
/// @param rows          Receives a row for each layer that has experts; null with room for 0
///                      asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_layer_count_t).
/// @param count_out     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `rows` is null or valid for writes of its entries, `count_out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_layers(
    stream: *const kvt_stream_t,
    rows: *mut kvt_layer_count_t,
    capacity: u64,
    stride_bytes: u64,
    count_out: *mut u64,
) -> kvt_status_t {
    let all = with_stream(stream, Access::Salvage, |stream| Ok(stream.layers()));
    give_rows(rows, (capacity, stride_bytes), count_out, all, |count| kvt_layer_count_t {
        layer: count.layer,
        reserved: 0,
        hits: count.hits,
        misses: count.misses,
        bytes: count.bytes,
    })
}

/// What happened last, for a picture of it: as many marks as kvt_stream_opts_t.marks says, the
/// oldest first.
///
/// @param stream        The streamer.
/// @param rows          Receives them; null with room for 0 asks for the count alone.
/// @param capacity          How many it has room for.
/// @param stride_bytes  sizeof(kvt_stream_mark_t).
/// @param count_out     Receives how many there are, also with KVT_E_TOO_SMALL; may be null.
/// @return As kvt_stream_layers.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `rows` is null or valid for writes of its entries, `count_out` for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_marks(
    stream: *const kvt_stream_t,
    rows: *mut kvt_stream_mark_t,
    capacity: u64,
    stride_bytes: u64,
    count_out: *mut u64,
) -> kvt_status_t {
    let all = with_stream(stream, Access::Salvage, |stream| Ok(stream.marks()));
    give_rows(rows, (capacity, stride_bytes), count_out, all, |mark| kvt_stream_mark_t {
        stage: mark.stage as u32,
        unit: mark.unit,
        begin_ns: mark.begin_ns,
        end_ns: mark.end_ns,
    })
}

/// How files are read, for people, and why not better.
///
/// @param stream        The streamer.
/// @param out           Receives a line of text, not NUL-terminated; may be null with
///                      out_capacity 0 to learn the size.
/// @param out_capacity  Room at `out`.
/// @param out_bytes     Length of the text; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for their lengths.
#[capi]
pub unsafe extern "C" fn kvt_stream_engine(
    stream: *const kvt_stream_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let (engine, why) = with_stream(stream, Access::Salvage, |stream| Ok(stream.engine()))?;
    let line = match why {
        Some(why) => format!("{engine}: {why}"),
        None => engine,
    };
    give_text(&line, out, out_capacity, out_bytes)
}

/// Reads a unit from its files, past whatever is in memory, and compares it with its
/// checksums; what nobody knows yet is noted. The calling thread reads, and waits.
///
/// @param stream   The streamer.
/// @param unit     The unit.
/// @param sum_out  Receives its checksum; may be null.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_CORRUPT when it is not what it was, KVT_E_IO, KVT_E_INVALID, KVT_E_BUDGET,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// Pointers are null or valid.
#[capi]
pub unsafe extern "C" fn kvt_stream_verify(
    stream: *const kvt_stream_t,
    unit: u32,
    sum_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let sum = with_stream(stream, Access::Use, |stream| stream.verify(unit))?;
    put(sum_out, sum);
    Ok(())
}

/// The checksum of a unit, if all of it has been looked at (KVT_VERIFY_*, or a sidecar).
///
/// @param stream  The streamer.
/// @param unit    The unit.
/// @param out     Receives it.
/// @return KVT_OK; KVT_E_NOT_FOUND, KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_stream_sum(
    stream: *const kvt_stream_t,
    unit: u32,
    out: *mut u64,
) -> kvt_status_t {
    require(out)?;
    let sum = with_stream(stream, Access::Salvage, |stream| stream.sum_of(unit))?;
    out.write(sum);
    Ok(())
}

/// The address that a unit has in place (KVT_STREAM_IN_PLACE), from the opening to the close:
/// an engine can set its pointers to weights once. There is memory only while the unit is had:
/// reading there at another time reads zeros, or what is being brought; on a device it may be an
/// error after which the device is lost. With a device the address is the device's, but for
/// units that the processor uses (kvt_unit_lease_t.memory says so): theirs are outside of the range.
///
/// @param stream       The streamer.
/// @param unit         The unit; KVT_NONE = the whole range of addresses.
/// @param address_out  Receives the address.
/// @param bytes_out    Receives how many bytes it has; may be null.
/// @return KVT_OK; KVT_E_STATE when units are not in place, KVT_E_INVALID, KVT_E_HANDLE,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the range is the streamer's, and goes with its close. Threading: any thread.
/// Since 0.1.
///
/// # Safety
/// `address_out` is null or valid for a write, and so is `bytes_out`.
#[capi]
pub unsafe extern "C" fn kvt_stream_fixed(
    stream: *const kvt_stream_t,
    unit: u32,
    address_out: *mut *const c_void,
    bytes_out: *mut u64,
) -> kvt_status_t {
    require(address_out)?;
    let (address, bytes) = with_stream(stream, Access::Salvage, |stream| match unit {
        crate::ffi::model::KVT_NONE => stream.range().ok_or(Status::State.into()),
        unit => stream.fixed(unit),
    })?;
    address_out.write(address as *const c_void);
    put(bytes_out, bytes);
    Ok(())
}
