//! Events of devices, and of engines beside them.

use crate::base::callback::refuse_reentry;
use crate::base::status::{Error, Status};
use crate::device::op_wait::stream_wait_op;
use crate::device::{Event, State};
use crate::fail;
use crate::ffi::abi::{Access, capi, pin, require};
use crate::ffi::device::{kvt_device_t, with_device, with_open_device};
use crate::ffi::error::kvt_error_t;
use crate::ffi::op::kvt_op_t;
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;

/// Most events of an array.
const MAX_EVENTS: usize = 65_536;

/// How far an event is. Never waits for one; at most until another thread's call has put its work
/// on a stream.
///
/// @param device  The device.
/// @param event   One of its events.
/// @return KVT_OK: it has come. KVT_E_AGAIN: not yet. What its batch failed with; of targets it
///         is not known then what they have. KVT_E_HANDLE: it is none of this device, or was
///         released. KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// None: handles are checked.
#[capi]
pub unsafe extern "C" fn kvt_device_query(device: *const kvt_device_t, event: u64) -> kvt_status_t {
    match with_device(device, |device| device.state(Event(event)))? {
        State::Done => Ok(()),
        State::Pending => Err(Error::from(Status::Again)),
    }
}

/// Waits for an event.
///
/// @param device       The device.
/// @param event        One of its events.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK: it has come; KVT_E_TIMEOUT; what its batch failed with; KVT_E_HANDLE,
///         KVT_E_REENTRANT inside a callback, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_device_wait(
    device: *const kvt_device_t,
    event: u64,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    with_device(device, |device| device.wait(Event(event), deadline_ns))
}

/// The checksums of the copies of a batch that wanted one (KVT_COPY_SUM), in their order, from
/// when its event has come until that is released. Who copies by itself holds them against
/// kvt_checksum of what is in host memory: bytes that changed on the bus have another. Never
/// waits.
///
/// @param device     An asynchronous device that sums (KVT_DEVICE_SUMS): others have put sums
///                   into the copies.
/// @param event      One of its events.
/// @param sums       Receives checksums.
/// @param capacity   How many there is room for, at most 65,536.
/// @param out_count  How many were written.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY (the event has not come), what its batch failed with,
///         KVT_E_UNSUPPORTED (the device has no such sums), KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `sums` has room for `capacity` numbers; `out_count` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_device_sums(
    device: *const kvt_device_t,
    event: u64,
    sums: *mut u64,
    capacity: u64,
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_count)?;
    if capacity > MAX_EVENTS as u64 || sums.is_null() {
        fail!(Limit, "room for {capacity} sums at {sums:p}, {MAX_EVENTS} can be");
    }
    let mut found = Vec::new();
    found.try_reserve_exact(capacity as usize).map_err(|_| Status::NoMem)?;
    found.resize(capacity as usize, 0);
    let count = with_device(device, |device| device.sums(Event(event), &mut found))?;
    for (at, sum) in found.iter().take(count).enumerate() {
        // SAFETY: fewer than the caller has room for.
        sums.add(at).write_unaligned(*sum);
    }
    out_count.write(count as u64);
    Ok(())
}

/// Which events have ended, well or not: of an asynchronous device each is told once, unless it
/// was released before. Never waits for one. Who shares a device with a store or a streamer is
/// told of their events, too, and so is who polls while another thread's kvt_device_copy waits.
///
/// @param device     The device.
/// @param events     Receives events.
/// @param capacity   How many there is room for, at most 65,536.
/// @param out_count  How many were written.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `events` has room for `capacity` numbers; `out_count` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_device_poll(
    device: *const kvt_device_t,
    events: *mut u64,
    capacity: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    if capacity > MAX_EVENTS as u64 || events.is_null() {
        fail!(Limit, "room for {capacity} events at {events:p}, {MAX_EVENTS} can be");
    }
    let mut ended = [Event(0); 64];
    let mut count = 0;
    while count < capacity {
        let most = (capacity - count).min(ended.len() as u64) as usize;
        let room = ended.get_mut(..most).unwrap_or_default();
        let some = with_device(device, |device| Ok(device.poll(room)))?;
        for event in ended.iter().take(some) {
            // SAFETY: fewer than the caller has room for.
            events.add(count as usize).write_unaligned(event.0);
            count += 1;
        }
        if some < most {
            break;
        }
    }
    out_count.write(count);
    Ok(())
}

/// Forgets events that have ended.
///
/// @param device  The device.
/// @param events  The events.
/// @param count   How many, at most 65,536.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY (one has not ended) and KVT_E_HANDLE (one is none of this device,
///         or was released; a device that is not asynchronous knows its events for ever): those
///         before it are released. KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `events` is null or valid for reads of `count` numbers.
#[capi]
pub unsafe extern "C" fn kvt_device_release(
    device: *const kvt_device_t,
    events: *const u64,
    count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let events = numbers(events, count, MAX_EVENTS)?;
    with_device(device, |device| events.iter().try_for_each(|event| device.release(Event(*event))))
}

/// Makes an event of the device's that comes when an event of the engine's own has come: what is
/// behind it waits for the engine's kernels, and no thread does.
///
/// @param device     The device.
/// @param raw        The engine's event: for CUDA a CUevent that was recorded, as a number.
/// @param out_event  Receives the event; release it with kvt_device_release.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED, KVT_E_HANDLE (it is none, or of another context; or the
///         device's handle), KVT_E_AGAIN, KVT_E_STATE, KVT_E_UNAVAILABLE, KVT_E_CLOSED,
///         KVT_E_INVALID, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// It is such an event, and stays so until the one made of it has ended.
#[capi]
pub unsafe extern "C" fn kvt_device_import_event(
    device: *const kvt_device_t,
    raw: u64,
    out_event: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_event)?;
    let event = with_device(device, |device| device.import_event(raw))?;
    out_event.write(event.0);
    Ok(())
}

/// Has a stream of the engine's own go on only when an event has come. No thread waits.
///
/// @param device      The device.
/// @param raw_stream  The engine's stream: for CUDA a CUstream, as a number.
/// @param event       One of the device's events.
/// @param err         Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED, KVT_E_HANDLE (of the event, the stream or the device),
///         KVT_E_STATE (a graph is made of the stream), KVT_E_UNAVAILABLE, KVT_E_INVALID,
///         KVT_E_FORKED, KVT_E_PANIC. What the event's batch failed with.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// It is such a stream.
#[capi]
pub unsafe extern "C" fn kvt_device_stream_wait(
    device: *const kvt_device_t,
    raw_stream: u64,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_device(device, |device| device.stream_wait_event(raw_stream, Event(event)))
}

/// Makes an event that comes when kvt_device_signal_event says so: batches, moves and streams can be put
/// behind it before. Closing the device or its runtime keeps it, too. A copy that the device can
/// only make in its call (CUDA: within host memory, or of host memory that is not registered)
/// waits there for what it is behind: then another thread has to keep it.
///
/// @param device     The device.
/// @param out_event  Receives the event; release it with kvt_device_release once it was kept.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNSUPPORTED (the device, or its driver, has no such thing), KVT_E_AGAIN
///         (1,024 are known), KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_NOMEM, KVT_E_INVALID,
///         KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out_event` is null or valid for a write, `err` is null or points to a handle that is null or
/// an error's.
#[capi]
pub unsafe extern "C" fn kvt_device_create_event(
    device: *const kvt_device_t,
    out_event: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_event)?;
    let event = with_open_device(device, |device| device.create_user_event())?;
    out_event.write(event.0);
    Ok(())
}

/// Has an event of kvt_device_create_event come: what is behind it goes on. One that has come already
/// stays as it is.
///
/// @param device  The device.
/// @param event   The event.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_HANDLE (it is no promise of this device's, or was released; or the
///         device's handle); of a custom device what its `keep` says; KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
#[capi]
pub unsafe extern "C" fn kvt_device_signal_event(
    device: *const kvt_device_t,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_device(device, |device| device.signal_event(Event(event)))
}

/// Has a stream of the engine's own go on only when an op was released, well or not: ask the op
/// afterwards. The op need not have begun. No thread waits. A device or a runtime that is closed
/// before lets the stream go on.
///
/// With CUDA the stream waits for a number in memory (cuStreamWaitValue32), of which the driver
/// knows no more: what releases the op must not itself be behind that stream.
///
/// @param device      The device.
/// @param raw_stream  The engine's stream: for CUDA a CUstream, as a number.
/// @param op          The op, of any kind. It may be freed, once it was released.
/// @param err         Explains a failure; may be null.
/// @return KVT_OK (also: the op was released before); KVT_E_UNSUPPORTED, KVT_E_HANDLE (of the op,
///         the stream or the device), KVT_E_STATE (a graph is made of the stream), KVT_E_AGAIN
///         (as many promises are open as can be), KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_NOMEM,
///         KVT_E_INVALID, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, also in callbacks. Since 0.1.
///
/// # Safety
/// It is such a stream.
#[capi]
pub unsafe extern "C" fn kvt_device_stream_wait_op(
    device: *const kvt_device_t,
    raw_stream: u64,
    op: *const kvt_op_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let op = pin(op, Access::Use)?;
    with_device(device, |device| stream_wait_op(device, raw_stream, &op))
}
