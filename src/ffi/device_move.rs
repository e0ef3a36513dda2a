//! Memory of devices, and copies.

use std::ffi::c_void;

use crate::base::status::{Result, Status};
use crate::device::{Copy, DeviceMemory, Direction, Event, MAX_COPIES, Memory, Stream};
use crate::fail;
use crate::ffi::abi::{Plain, Strided, capi, check_out, read, require, write};
use crate::ffi::device::{kvt_device_t, with_device};
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_view_t, memory_of, plane_anywhere};
use crate::store::state::session::PlaneView;

/// Memory that a device has set aside.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_memory_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where it starts: a multiple of 256.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
    /// The library's own: which one it is.
    pub number: u64,
    /// KVT_MEMORY_*: where the address is valid.
    pub memory: u32,
    /// Always 0.
    pub reserved: u32,
}

/// From the view into the plane.
pub const KVT_COPY_GATHER: u32 = 0;
/// From the plane into the view.
pub const KVT_COPY_SCATTER: u32 = 1;
/// Its checksum is wanted, of devices that sum (KVT_DEVICE_SUMS): of an asynchronous one that of
/// the side in its memory, what was read there or what is there now (both sides: the target).
pub const KVT_COPY_SUM: u64 = 1;

/// A copy between tokens as an engine has them and a plane: the same tokens, heads and numbers
/// one after the other, without gaps. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_copy_t {
    /// KVT_COPY_SUM or 0.
    pub flags: u64,
    /// Where the engine has the tokens. It says how many it has.
    pub view: kvt_view_t,
    /// The plane: tokens * heads * run_bytes bytes.
    pub plane: *mut c_void,
    /// KVT_MEMORY_*: where that is.
    pub plane_memory: u32,
    /// KVT_COPY_GATHER or KVT_COPY_SCATTER.
    pub direction: u32,
    /// The first token that is copied.
    pub first_token: u32,
    /// How many; 0 = all from there on.
    pub tokens: u32,
    /// Receives the checksum (as kvt_checksum makes it), if one was wanted and the device sums. An
    /// asynchronous device is asked for it later: kvt_device_sums.
    pub sum: u64,
}

/// Sets memory of a device aside.
///
/// @param device  The device.
/// @param bytes   How much.
/// @param out     What it is; start it with KVT_DEVICE_MEMORY_INIT. What is in it is not said.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_NOMEM, KVT_E_UNSUPPORTED (it has none to give), KVT_E_UNAVAILABLE (the
///         device is lost), KVT_E_INVALID, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Ownership: give it back with kvt_device_free; else it goes with the device. Threading: any
/// thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `out` for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_device_alloc(
    device: *const kvt_device_t,
    bytes: u64,
    out: *mut kvt_device_memory_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let given = with_device(device, |device| device.allocate(bytes))?;
    write(
        out,
        &kvt_device_memory_t {
            struct_size: 0,
            address: given.address,
            bytes: given.bytes,
            number: given.number,
            memory: match given.memory {
                Memory::Host => KVT_MEMORY_HOST,
                Memory::Device => KVT_MEMORY_DEVICE,
            },
            reserved: 0,
        },
    );
    Ok(())
}

/// Gives memory back.
///
/// @param device  The device that gave it.
/// @param memory  As kvt_device_alloc wrote it.
/// @param err     Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while work under way is seen to use it; KVT_E_HANDLE (it is not
///         this device's, or was given back; or the device's handle), KVT_E_INVALID,
///         KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; `memory` for the size it states. Nobody uses the memory any
/// more.
#[capi]
pub unsafe extern "C" fn kvt_device_free(
    device: *const kvt_device_t,
    memory: *const kvt_device_memory_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if memory.is_null() {
        fail!(Invalid, "the memory is null");
    }
    let given = read(memory)?;
    let memory = DeviceMemory {
        address: given.address,
        bytes: given.bytes,
        memory: memory_of(given.memory)?,
        number: given.number,
    };
    with_device(device, |device| device.free(&memory))
}

/// Tells a device of host memory that copies will use again and again, so that they are as fast
/// as they can be: CUDA pins it. Where it cannot, copies work, are slower, and wait in the call;
/// kvt_device_describe says how much memory that is. A device to which all host memory is the same
/// does nothing.
///
/// @param device   The device.
/// @param address  Where it starts, of a page.
/// @param bytes    How much.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID (also where it overlaps what the device was told of),
///         KVT_E_UNAVAILABLE, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC. What a
///         device of the engine's own says.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// The memory stays until kvt_device_unregister_host.
#[capi]
pub unsafe extern "C" fn kvt_device_register_host(
    device: *const kvt_device_t,
    address: *mut c_void,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let end = (address.addr() as u64).checked_add(bytes);
    if address.is_null() || bytes == 0 || end.is_none() {
        fail!(Invalid, "{bytes} bytes of host memory at {address:p}");
    }
    with_device(device, |device| device.register_host(address.cast(), bytes))
}

/// Takes that back, before the memory goes.
///
/// @param device   The device.
/// @param address  As it was said.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_HANDLE (CUDA was not told of it; or the device's handle),
///         KVT_E_UNAVAILABLE, KVT_E_FORKED, KVT_E_PANIC. What a device of the engine's own says.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// No work under way uses the memory.
#[capi]
pub unsafe extern "C" fn kvt_device_unregister_host(
    device: *const kvt_device_t,
    address: *mut c_void,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    with_device(device, |device| device.unregister_host(address.cast()))
}

/// A copy as devices take it, of a plane as the engine has it.
fn copy_of<'a>(given: &kvt_copy_t, plane: &'a PlaneView) -> Result<Copy<'a>> {
    if given.flags & !KVT_COPY_SUM != 0 {
        fail!(Invalid, "flags {:#x} of a copy", given.flags);
    }
    let direction = match given.direction {
        KVT_COPY_GATHER => Direction::Gather,
        KVT_COPY_SCATTER => Direction::Scatter,
        other => fail!(Invalid, "way {other} is neither KVT_COPY_GATHER nor _SCATTER"),
    };
    let all = plane.tokens.saturating_sub(given.first_token);
    let tokens = if given.tokens == 0 { all } else { given.tokens };
    let copy = Copy::new(&plane.view(), given.first_token, tokens, given.plane.cast(), direction)?;
    Ok(Copy {
        memory: plane.memory,
        plane_memory: memory_of(given.plane_memory)?,
        wants_sum: given.flags & KVT_COPY_SUM != 0,
        ..copy
    })
}

/// Puts copies on a stream, behind an event if one is given, and behind what is there. Without
/// copies it marks the place. CUDA waits in the call for what they are behind where they go from
/// host to host memory, or use any that was not told of (kvt_device_register_host) or not pinned.
///
/// @param device        The device.
/// @param stream        0 to kvt_device_info_t.streams - 1.
/// @param after         An event of the device's; 0 = none.
/// @param copies        The copies; their sums are written.
/// @param count         How many, at most 65,536.
/// @param stride_bytes  sizeof(kvt_copy_t).
/// @param out_event     Receives the event of their end; release it with kvt_device_release.
/// @param err           Explains a failure; may be null.
/// @return KVT_OK: they are on their way, or done where the device is not asynchronous;
///         KVT_E_INVALID, KVT_E_LIMIT, KVT_E_UNSUPPORTED (memory that the device does not
///         reach), KVT_E_TOO_NEW, KVT_E_AGAIN (65,536 events are open), KVT_E_STATE (a graph is
///         made of the stream), KVT_E_UNAVAILABLE (the device is lost), KVT_E_CLOSED,
///         KVT_E_HANDLE, KVT_E_NOMEM, KVT_E_IO, KVT_E_FORKED, KVT_E_PANIC. What `after` failed
///         with.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Arrays are valid for their lengths. Sources stay as they are, and targets are used by nobody
/// else, until the event has come or failed.
#[capi]
pub unsafe extern "C" fn kvt_device_copy(
    device: *const kvt_device_t,
    stream: u32,
    after: u64,
    copies: *mut kvt_copy_t,
    count: u64,
    stride_bytes: u64,
    out_event: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_event)?;
    let rows = Strided::new(copies, count, stride_bytes, MAX_COPIES as u64)?;
    let mut given = Vec::new();
    let mut planes = Vec::new();
    let mut moved = Vec::new();
    let room = given
        .try_reserve_exact(rows.len())
        .and_then(|()| planes.try_reserve_exact(rows.len()))
        .and_then(|()| moved.try_reserve_exact(rows.len()));
    room.map_err(|_| Status::NoMem)?;
    for at in 0..rows.len() {
        let row = rows.get(at)?;
        planes.push(plane_anywhere(&row.view)?);
        given.push(row);
    }
    for (given, plane) in given.iter().zip(&planes) {
        moved.push(copy_of(given, plane)?);
    }
    let after = (after != 0).then_some(Event(after));
    let event = with_device(device, |device| device.submit(Stream(stream), after, &mut moved))?;
    for (at, (given, moved)) in given.iter_mut().zip(&moved).enumerate() {
        if moved.wants_sum {
            given.sum = moved.sum;
            rows.put(at, given);
        }
    }
    out_event.write(event.0);
    Ok(())
}
