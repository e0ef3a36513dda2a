//! Streamers: opened and closed, and what they are opened for: units.

use std::ffi::c_void;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::slab::Pin;
use crate::base::status::Result;
use crate::base::sync::Arc;
use crate::device::{Event, Memory};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, capi, check_out, free, insert, known_flags, noun, pin, read, require, write,
};
use crate::ffi::device::device_of;
use crate::ffi::error::kvt_error_t;
use crate::ffi::model::with_model;
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;
use crate::ffi::stream_opts::{kvt_stream_opts_t, options};
use crate::ffi::view::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, memory_of};
use crate::stream::scheduler::{Lease, Target};
use crate::stream::streamer::{AcquireOpts, Streamer, UnitLease};

/// Weights that come as the engine computes: units whose home is in memory are at hand, the
/// others pass through a few slots, fetched ahead in the order of a pass. Internally locked:
/// any thread may use it, and different threads may have different units.
pub struct kvt_stream_t(());

/// kvt_stream_acquire: does not wait; KVT_E_AGAIN when the unit is not there.
pub const KVT_ACQUIRE_POLL: u64 = 1;
/// kvt_stream_acquire, on a device: does not wait for copies that are on their way:
/// kvt_unit_lease_t.event says when the bytes are there. kvt_device_stream_wait has a stream wait for it.
pub const KVT_ACQUIRE_EARLY: u64 = 2;

/// A unit that the engine has until it gives it back. Nobody but the library writes
/// into it; copies of it are not given back on their own.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_unit_lease_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Its bytes, to be read alone: a part of a tensor is at address + kvt_part_t.at. A
    /// multiple of 4096.
    pub address: *const c_void,
    /// How many bytes there are: kvt_unit_t.image_bytes.
    pub bytes: u64,
    /// Which unit.
    pub unit: u32,
    /// KVT_MEMORY_*: where the address is valid.
    pub memory: u32,
    /// The library's own: where it is. 0 = it was given back.
    pub place: u64,
    /// The device's event from which on the bytes are complete; 0 = they are. It is the
    /// streamer's, and known until the unit is given back.
    pub event: u64,
    /// When it was had, where that is noted; else 0.
    pub since_ns: u64,
}

/// A streamer, and the runtime it belongs to.
pub(crate) struct StreamNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) streamer: Streamer,
}

noun!(StreamNoun, kvt_stream_t, 18, "streamer");

/// Calls `body` with a streamer.
#[inline]
pub(crate) fn with_stream<R>(
    handle: *const kvt_stream_t,
    access: Access,
    body: impl FnOnce(&Streamer) -> Result<R>,
) -> Result<R> {
    body(&crate::ffi::abi::access(handle, access)?.streamer)
}

/// A place as a number that is not 0.
fn place_code(place: Target) -> u64 {
    match place {
        Target::Resident => 1,
        Target::Slot(slot) => u64::from(slot) << 2 | 2,
        Target::ExpertSlot(slot) => u64::from(slot) << 2 | 3,
    }
}

fn place_of(code: u64) -> Result<Target> {
    match (code & 3, u32::try_from(code >> 2)) {
        (1, Ok(0)) => Ok(Target::Resident),
        (2, Ok(slot)) => Ok(Target::Slot(slot)),
        (3, Ok(slot)) => Ok(Target::ExpertSlot(slot)),
        _ if code == 0 => fail!(State, "the unit is not in use: it was given back"),
        _ => fail!(Invalid, "place {code:#x} was not made by kvt_stream_acquire"),
    }
}

/// Opens the files of a model, makes a plan and takes the memory that it says. Units are on
/// their way home when this returns. With a device the engine computes there, and units come to
/// its memory; without one it computes in host memory.
///
/// @param runtime  Where it belongs.
/// @param opts     What it streams, and how.
/// @param out      The streamer; close it with kvt_stream_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUDGET when the model cannot run in that memory (the message says what
///         it takes at least), KVT_E_CORRUPT when a file is not what it was when the model was
///         opened, KVT_E_IO, KVT_E_NOT_FOUND, KVT_E_SPEC, KVT_E_UNSUPPORTED (a device seat without
///         a device, a host seat with one, units in place on a device that has no addresses
///         which stay while memory moves: the host device and custom ones), KVT_E_INVALID,
///         KVT_E_LIMIT, KVT_E_NOMEM, KVT_E_TOO_NEW, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: the caller owns the streamer. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_stream_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_stream_opts_t,
    out: *mut *mut kvt_stream_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    let (given, mut opts) = (given, options(&given)?);
    if !given.budget.is_null() {
        opts.budget = Some(pin(given.budget, Access::Use)?.0.clone());
    }
    let parts = with_model(given.model, |parts| Ok(parts.clone()))?;
    let noun = on_runtime(runtime, |core| {
        if opts.budget.as_ref().is_some_and(|budget| !Arc::ptr_eq(budget.core(), core)) {
            fail!(Invalid, "the budget belongs to another runtime");
        }
        opts.device = device_of(core, given.device)?;
        let (model, units) = (parts.model.clone(), parts.units.clone());
        let streamer = Streamer::open(core, model, units, opts)?;
        Ok(StreamNoun { core: core.clone(), streamer })
    })?;
    out.write(insert(noun)?);
    Ok(())
}

/// Closes a streamer: ends calls that wait for units, and waits for reads that are under way.
/// Checksums that are new are written to the sidecar.
///
/// @param stream       Pointer to the handle, cleared on success; null, or a null handle, is
///                     fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while units are in use (it stays open: give them back first), or
///         when reads have not ended at the deadline (it stays closing and valid: call again);
///         KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_stream_close(
    stream: *mut *mut kvt_stream_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let close = |noun: &Pin<'static, StreamNoun>| {
        refuse_reentry()?;
        noun.streamer.close(deadline_ns)
    };
    free(stream, close)
}

/// Asks for a unit, and waits until it is there. It stays where it is until it was given back
/// as often as it was had. A unit at home where it is used costs one atomic operation.
///
/// @param stream       The streamer.
/// @param unit         The unit.
/// @param flags        KVT_ACQUIRE_POLL or 0.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param out          Receives where it is; start it with KVT_UNIT_LEASE_INIT.
/// @param err          Explains a failure; may be null, which costs less where KVT_E_AGAIN is
///                     expected.
/// @return KVT_OK; KVT_E_AGAIN (poll: it is on its way), KVT_E_TIMEOUT, KVT_E_BUSY when all
///         slots are in use by the engine, KVT_E_CORRUPT (bytes that are not what their
///         checksums say, a file that has changed), KVT_E_IO, KVT_E_INVALID (no such unit),
///         KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. A failed read is tried again
///         when the unit is asked for again.
///
/// Ownership: the bytes are borrowed until kvt_stream_release, and are to be read alone.
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_acquire(
    stream: *const kvt_stream_t,
    unit: u32,
    flags: u64,
    deadline_ns: u64,
    out: *mut kvt_unit_lease_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    known_flags(flags, KVT_ACQUIRE_POLL | KVT_ACQUIRE_EARLY)?;
    let has = |flag: u64| flags & flag != 0;
    let (poll, early) = (has(KVT_ACQUIRE_POLL), has(KVT_ACQUIRE_EARLY));
    let how = AcquireOpts { poll, when_issued: early, deadline_ns };
    let lease = with_stream(stream, Access::Use, |streamer| streamer.acquire(unit, how))?;
    let given = kvt_unit_lease_t {
        struct_size: 0,
        address: lease.address as *const c_void,
        bytes: lease.bytes,
        unit,
        memory: match lease.memory {
            Memory::Host => KVT_MEMORY_HOST,
            Memory::Device => KVT_MEMORY_DEVICE,
        },
        place: place_code(lease.lease.location),
        event: lease.lease.event.map_or(0, |event| event.0),
        since_ns: lease.since_ns,
    };
    write(out, &given);
    Ok(())
}

/// Gives a unit back, and clears what it was held by. Allowed while a streamer closes.
///
/// @param stream  The streamer.
/// @param lease    What kvt_stream_acquire wrote.
/// @param after   The device's event after which its memory may be used for another; 0 = now.
///                The streamer takes it over, and releases it. kvt_device_import_event makes one of an
///                event of the engine's.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_STATE when it was given back before, KVT_E_INVALID,
///         KVT_E_UNSUPPORTED (an event, without a device), KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC: it was not given back. What a copy failed with that was on its way when
///         the unit was had: it was given back, `held` is cleared, and what was computed with
///         it is wrong.
///
/// Threading: any thread, also another one than had it. Since 0.1.
///
/// # Safety
/// `held` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_stream_release(
    stream: *const kvt_stream_t,
    lease: *mut kvt_unit_lease_t,
    after: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(lease)?;
    let given = read(lease.cast_const())?;
    let after = (after != 0).then_some(Event(after));
    let location = place_of(given.place)?;
    let back = UnitLease {
        lease: Lease { unit: given.unit, location, event: None },
        address: given.address.addr() as u64,
        bytes: given.bytes,
        memory: memory_of(given.memory)?,
        since_ns: given.since_ns,
    };
    let right = with_stream(stream, Access::Salvage, |streamer| {
        if after.is_some() && !streamer.has_device() {
            fail!(Unsupported, "an event, and the engine computes in host memory");
        }
        streamer.give_back(&back, after)
    })?;
    write(lease, &kvt_unit_lease_t { unit: given.unit, ..kvt_unit_lease_t::zeroed() });
    right
}
