//! Devices: memory, copies, events, kernels, and devices of the engine.

use std::ffi::{c_char, c_void};
use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;

use crate::attention::keys::{Heads, Keys};
use crate::base::callback::{Foreign as Callback, refuse_reentry};
use crate::base::clock::Clock;
use crate::base::core::Core;
use crate::base::op::Owner;
use crate::base::slab::Pin;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::call::{Call, Kind};
use crate::device::conformance::{ConformanceOpts, Verdict, run};
use crate::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use crate::device::foreign::{Engine, Foreign, Rows};
use crate::device::host::Host;
use crate::device::op_wait::{SignalOnShutdown, stream_wait_op};
use crate::device::simulated::{Simulated, SimulatedOpts};
use crate::device::{
    Copy, Device, DeviceMemory, Direction, Event, Facts, MAX_COPIES, MAX_STREAMS, Memory, State,
    Stream,
};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, Strided, capi, check_out, enter, free, give_text, insert, inspect, known_flags,
    no_reserved, noun, numbers, pin, read, require, text_bytes, write,
};
use crate::ffi::base::{kvt_destroy_fn, kvt_error_t, kvt_status_t};
use crate::ffi::memory::{
    KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_view_t, memory_of, plane_anywhere,
};
use crate::ffi::runtime::{kvt_op_t, kvt_runtime_t, on_runtime};
use crate::ffi::sparse::{keys_of, kvt_index_head_t, kvt_index_t, too_small};
use crate::store::state::session::PlaneView;

// Devices.

/// Who copies between an engine's memory and the library's: the processor, a GPU, or the engine
/// itself. Stores and streamers are opened with one. Internally locked: any thread may use it.
pub struct kvt_device_t(());

/// The processor copies, done when the call returns.
pub const KVT_DEVICE_KIND_HOST: u32 = 1;
/// A GPU by way of the CUDA driver, which is loaded when the device is opened.
pub const KVT_DEVICE_KIND_CUDA: u32 = 2;
/// The engine copies: kvt_device_custom_t.
pub const KVT_DEVICE_KIND_CUSTOM: u32 = 3;
/// None at all: it takes its time and spoils what is not waited for. For tests.
pub const KVT_DEVICE_KIND_SIMULATED: u32 = 4;

/// Work goes on after a call has returned.
pub const KVT_DEVICE_ASYNCHRONOUS: u64 = 1;
/// It sums what it copies.
pub const KVT_DEVICE_CHECKSUMS: u64 = 2;
/// It has memory that only it reaches: KVT_MEMORY_DEVICE.
pub const KVT_DEVICE_HAS_MEMORY: u64 = 4;
/// Copies are slow, and not asynchronous, unless host memory is pinned: see
/// kvt_device_register_host.
pub const KVT_DEVICE_WANTS_PINNED: u64 = 8;

/// CUDA and simulated: the device sums what it copies, where it lies in its memory, and stores
/// hold what has come over the bus against that: a copy that came damaged is made again, and if
/// that does not help, fails with KVT_E_CORRUPT.
pub const KVT_DEVICE_VERIFY: u64 = 1;

/// Most peers of a device.
const MAX_PEERS: usize = 63;
/// How long who closes a device sleeps until it looks whether others have left it.
const NAP_NS: u64 = 50_000;

/// How to open a device.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_DEVICE_VERIFY, or 0.
    pub flags: u64,
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    pub kind: u32,
    /// CUDA: which device, where no context is given.
    pub ordinal: u32,
    /// CUDA: the engine's context (CUcontext), which outlives the device; 0 = the one that the
    /// process shares.
    pub context: u64,
    /// CUDA: the engine's streams (CUstream) of that context, none of them a default stream;
    /// null = some of its own.
    pub streams: *const u64,
    /// How many, at most 64.
    pub stream_count: u64,
    /// CUDA: the path of the driver's library; null = the system's.
    pub library: *const c_char,
    /// Length of that.
    pub library_bytes: u64,
    /// Custom: what the engine can do.
    pub custom: *const kvt_device_custom_t,
    /// Simulated: its memory; 0 = no limit.
    pub memory_bytes: u64,
    /// Simulated: chooses all that is left to chance.
    pub seed: u64,
    /// Simulated: what a batch takes at least; 0 = 10 us.
    pub latency_ns: u64,
    /// Simulated: what a stream moves; 0 = 20 GB/s.
    pub bytes_per_s: u64,
    /// CUDA: memory of that device, which outlives it: what it gives out (to stores, streamers,
    /// and by kvt_device_alloc) comes from there. 0 = the driver is asked.
    pub arena: u64,
    /// How much; 0 with 0.
    pub arena_bytes: u64,
    /// CUDA: other devices of the process (ordinals) whose memory copies may name, too, as what
    /// their primary contexts gave out; null = none.
    pub peers: *const u32,
    /// How many, at most 63.
    pub peer_count: u64,
    /// CUDA: the path of cuFile's library, which is loaded when files are to be read straight
    /// into device memory (KVT_STREAM_DIRECT); null = the system's.
    pub cufile: *const c_char,
    /// Length of that.
    pub cufile_bytes: u64,
}

/// What a device is and can do.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_DEVICE_ASYNCHRONOUS and so on.
    pub flags: u64,
    /// The kind that it was opened as.
    pub kind: u32,
    /// How many streams it has: work on one is in order.
    pub streams: u32,
    /// The kernels it has: 1 << KVT_DEVICE_KERNEL_* for each.
    pub kernels: u64,
    /// What it has left to give; UINT64_MAX where it does not know.
    pub free_bytes: u64,
}

/// A device, and the runtime it belongs to.
pub(crate) struct DeviceNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<dyn Device>,
    kind: u32,
    /// Hears of the runtime's end.
    _keeper: Arc<SignalOnShutdown>,
    /// Nothing is opened with it any more.
    closing: Mutex<bool>,
}

noun!(DeviceNoun, kvt_device_t, 19, "device");

/// Calls `body` with a device whose runtime takes new work.
pub(crate) fn with_open_device<R>(
    handle: *const kvt_device_t,
    body: impl FnOnce(&Arc<dyn Device>) -> Result<R>,
) -> Result<R> {
    let noun = enter(handle)?;
    noun.core.check_open()?;
    body(&noun.device)
}

/// The device that something of a runtime is to use; null = none.
pub(crate) fn device_of(
    core: &Arc<Core>,
    handle: *const kvt_device_t,
) -> Result<Option<Arc<dyn Device>>> {
    if handle.is_null() {
        return Ok(None);
    }
    let noun = pin(handle, Access::Use)?;
    if !Arc::ptr_eq(&noun.core, core) {
        fail!(Invalid, "the device belongs to another runtime");
    }
    let closing = noun.closing.lock();
    if *closing {
        return Err(Status::Closed.into());
    }
    Ok(Some(noun.device.clone()))
}

/// # Safety
/// Pointers of `given` are null or valid for their lengths.
unsafe fn cuda_opts(given: &kvt_device_opts_t) -> Result<CudaOpts> {
    // SAFETY: the caller's promise.
    let (library, cufile, streams, peers) = unsafe {
        let library = text_bytes("library", given.library, given.library_bytes)?;
        let cufile = text_bytes("cufile", given.cufile, given.cufile_bytes)?;
        let most = MAX_STREAMS as usize;
        let peers = numbers(given.peers, given.peer_count, MAX_PEERS)?;
        (library, cufile, numbers(given.streams, given.stream_count, most)?, peers)
    };
    let path = |name: &[u8]| (!name.is_empty()).then(|| std::ffi::OsStr::from_bytes(name).into());
    Ok(CudaOpts {
        library: path(library),
        cufile: path(cufile),
        ordinal: given.ordinal,
        context: given.context,
        streams: streams.to_vec(),
        choice: CopyMethodChoice::Measured,
        arena: (given.arena, given.arena_bytes),
        peers: peers.to_vec(),
        verify: given.flags & KVT_DEVICE_VERIFY != 0,
        ..CudaOpts::default()
    })
}

fn simulated_opts(given: &kvt_device_opts_t) -> SimulatedOpts {
    let usual = SimulatedOpts::default();
    let or = |said: u64, usual: u64| if said == 0 { usual } else { said };
    SimulatedOpts {
        seed: given.seed,
        latency_ns: or(given.latency_ns, usual.latency_ns),
        bytes_per_second: or(given.bytes_per_s, usual.bytes_per_second),
        memory_bytes: given.memory_bytes,
        sums: given.flags & KVT_DEVICE_VERIFY != 0,
        ..usual
    }
}

/// Fields that a kind of device has no use for are not set.
fn check_fields(given: &kvt_device_opts_t) -> Result<()> {
    known_flags(given.flags, KVT_DEVICE_VERIFY)?;
    let cuda = given.ordinal != 0
        || given.context != 0
        || given.stream_count != 0
        || given.library_bytes != 0
        || given.arena | given.arena_bytes != 0
        || given.peer_count != 0
        || given.cufile_bytes != 0;
    let simulated = given.memory_bytes | given.seed | given.latency_ns | given.bytes_per_s != 0;
    let is = |kind| given.kind == kind;
    if cuda && !is(KVT_DEVICE_KIND_CUDA)
        || simulated && !is(KVT_DEVICE_KIND_SIMULATED)
        || given.flags != 0 && !is(KVT_DEVICE_KIND_CUDA) && !is(KVT_DEVICE_KIND_SIMULATED)
        || given.custom.is_null() == is(KVT_DEVICE_KIND_CUSTOM)
    {
        fail!(Invalid, "fields are set that are for another kind of device, or custom is null");
    }
    Ok(())
}

/// Opens a device.
///
/// @param runtime  Where it belongs.
/// @param opts     Which one.
/// @param out      The device; close it with kvt_device_close.
/// @param err      Explains a failure; may be null.
/// @return KVT_OK; KVT_E_UNAVAILABLE (CUDA: no driver, one that is too old or broken, or no such
///         device; the message says which), KVT_E_INVALID, KVT_E_LIMIT, KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the device. Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs are valid for the size they state; the context and the
/// streams are what they are said to be.
#[capi]
pub unsafe extern "C" fn kvt_device_open(
    runtime: *const kvt_runtime_t,
    opts: *const kvt_device_opts_t,
    out: *mut *mut kvt_device_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = read(opts)?;
    check_fields(&given)?;
    let handle = on_runtime(runtime, |core| {
        core.check_open()?;
        let clock = core.clock().clone();
        let put = |device: Arc<dyn Device>| {
            let keeper = SignalOnShutdown::new(&device);
            let owner: Arc<dyn Owner> = keeper.clone();
            core.add_owner(Arc::downgrade(&owner));
            let (core, kind, closing) = (core.clone(), given.kind, Mutex::new(false));
            insert(DeviceNoun { core, device, kind, _keeper: keeper, closing })
        };
        match given.kind {
            KVT_DEVICE_KIND_HOST => put(Arc::new(Host::default())),
            KVT_DEVICE_KIND_CUDA => {
                let opts = cuda_opts(&given)?;
                put(Arc::new(Cuda::open(clock, &opts)?))
            }
            KVT_DEVICE_KIND_CUSTOM => with_custom(given.custom, clock, |device| put(Arc::new(device))),
            KVT_DEVICE_KIND_SIMULATED => put(Arc::new(Simulated::new(clock, simulated_opts(&given))?)),
            other => fail!(Invalid, "kind {other} is none of KVT_DEVICE_*"),
        }
    })?;
    out.write(handle);
    Ok(())
}

/// Waits until those have left a device who were in a call when it was closed: what it has taken
/// is given back before whoever closes it goes on.
fn leave_last(device: Option<Arc<dyn Device>>) {
    let Some(device) = device else { return };
    let (nap, lock) = (Condvar::new(), Mutex::new(()));
    while Arc::strong_count(&device) > 1 {
        nap.wait_for(&mut lock.lock(), NAP_NS);
    }
}

/// Closes a device: refuses new work and waits for what is under way, and for calls of other
/// threads. Its memory that was not given back goes with it.
///
/// @param device       Pointer to the handle, cleared on success; null, or a null handle, is
///                     fine.
/// @param deadline_ns  CLOCK_MONOTONIC; 0 = wait for ever.
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_BUSY while a store or a streamer has it (it stays open), or when work
///         has not ended at the deadline (it stays closing and valid: call again);
///         KVT_E_REENTRANT inside a callback; KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_device_close(
    device: *mut *mut kvt_device_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let mut last = None;
    let close = |noun: &Pin<'static, DeviceNoun>| {
        refuse_reentry()?;
        let mut closing = noun.closing.lock();
        let users = Arc::strong_count(&noun.device) - 1;
        if users > 0 {
            fail!(Busy, "the device is in use: close what was opened with it first");
        }
        *closing = true;
        drop(closing);
        noun.device.close(deadline_ns)?;
        last = Some(noun.device.clone());
        Ok(())
    };
    free(device, close)?;
    leave_last(last);
    Ok(())
}

/// What a device is and can do.
///
/// @param device  The device.
/// @param out     Filled in; start it with KVT_DEVICE_INFO_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_device_info(
    device: *const kvt_device_t,
    out: *mut kvt_device_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let device = inspect(device)?;
    let facts = device.device.facts();
    let flag = |has: bool, flag: u64| if has { flag } else { 0 };
    write(
        out,
        &kvt_device_info_t {
            struct_size: 0,
            flags: flag(facts.asynchronous, KVT_DEVICE_ASYNCHRONOUS)
                | flag(facts.sums, KVT_DEVICE_CHECKSUMS)
                | flag(facts.reaches_device, KVT_DEVICE_HAS_MEMORY)
                | flag(facts.wants_pinned, KVT_DEVICE_WANTS_PINNED),
            kind: device.kind,
            streams: facts.streams,
            kernels: facts.kernels,
            free_bytes: device.device.free_bytes().unwrap_or(u64::MAX),
        },
    );
    Ok(())
}

/// A device in words, for logs: its name, and how it copies.
///
/// @param device        The device.
/// @param out           Receives the words, not NUL-terminated; may be null.
/// @param out_capacity  How many bytes there is room for.
/// @param out_bytes     Length of the words; also written with KVT_E_TOO_SMALL. May be null.
/// @return KVT_OK; KVT_E_TOO_SMALL, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or has room for `out_capacity` bytes; `out_bytes` is null or valid for a write.
#[capi]
pub unsafe extern "C" fn kvt_device_describe(
    device: *const kvt_device_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let words = enter(device)?.device.describe();
    give_text(&words, out, out_capacity, out_bytes)
}

// Copies.

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
/// Its checksum is wanted, of devices that sum (KVT_DEVICE_CHECKSUMS): of an asynchronous one that of
/// the side in its memory, what was read there or what is there now (both sides: the target).
pub const KVT_COPY_CHECKSUM: u64 = 1;

/// A copy between tokens as an engine has them and a plane: the same tokens, heads and numbers
/// one after the other, without gaps. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_copy_t {
    /// KVT_COPY_CHECKSUM or 0.
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
    /// asynchronous device is asked for it later: kvt_device_checksums.
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
    let given = enter(device)?.device.allocate(bytes)?;
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
    enter(device)?.device.free(&memory)
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
    enter(device)?.device.register_host(address.cast(), bytes)
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
    enter(device)?.device.unregister_host(address.cast())
}

/// A copy as devices take it, of a plane as the engine has it.
fn copy_of<'a>(given: &kvt_copy_t, plane: &'a PlaneView) -> Result<Copy<'a>> {
    if given.flags & !KVT_COPY_CHECKSUM != 0 {
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
        wants_sum: given.flags & KVT_COPY_CHECKSUM != 0,
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
    let event = enter(device)?.device.submit(Stream(stream), after, &mut moved)?;
    for (at, (given, moved)) in given.iter_mut().zip(&moved).enumerate() {
        if moved.wants_sum {
            given.sum = moved.sum;
            rows.put(at, given);
        }
    }
    out_event.write(event.0);
    Ok(())
}

// Events of devices.

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
    match enter(device)?.device.state(Event(event))? {
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
    enter(device)?.device.wait(Event(event), deadline_ns)
}

/// The checksums of the copies of a batch that wanted one (KVT_COPY_CHECKSUM), in their order, from
/// when its event has come until that is released. Who copies by itself holds them against
/// kvt_checksum of what is in host memory: bytes that changed on the bus have another. Never
/// waits.
///
/// @param device     An asynchronous device that sums (KVT_DEVICE_CHECKSUMS): others have put sums
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
pub unsafe extern "C" fn kvt_device_checksums(
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
    let count = enter(device)?.device.sums(Event(event), &mut found)?;
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
        let some = enter(device)?.device.poll(room);
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
    let device = enter(device)?;
    events.iter().try_for_each(|event| device.device.release(Event(*event)))
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
    let event = enter(device)?.device.import_event(raw)?;
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
    enter(device)?.device.stream_wait_event(raw_stream, Event(event))
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
    enter(device)?.device.signal_event(Event(event))
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
    stream_wait_op(&enter(device)?.device, raw_stream, &op)
}

// Kernels on devices.

/// Moves runs of bytes.
pub const KVT_DEVICE_KERNEL_MOVE: u32 = 1;
/// Changes what numbers are, with scales or without.
pub const KVT_DEVICE_KERNEL_CONVERT: u32 = 2;
/// Sums bytes as the store does.
pub const KVT_DEVICE_KERNEL_SUM: u32 = 3;
/// Makes the boxes of pages wider.
pub const KVT_DEVICE_KERNEL_PAGE_BOXES: u32 = 4;
/// The most that a query can have of each page.
pub const KVT_DEVICE_KERNEL_PAGE_SCORES: u32 = 5;
/// The largest of each row.
pub const KVT_DEVICE_KERNEL_TOP: u32 = 6;
/// Adds weights to what tokens had.
pub const KVT_DEVICE_KERNEL_ADD: u32 = 7;
/// Which tokens stay.
pub const KVT_DEVICE_KERNEL_KEEP: u32 = 8;
/// Moves what stays together.
pub const KVT_DEVICE_KERNEL_COMPACT: u32 = 9;
/// Columns and diagonals of the last queries.
pub const KVT_DEVICE_KERNEL_ESTIMATE: u32 = 10;
/// Attention of a prompt over lines or blocks.
pub const KVT_DEVICE_KERNEL_PREFILL: u32 = 11;
/// Attention of few queries over chosen pages.
pub const KVT_DEVICE_KERNEL_DECODE: u32 = 12;

const _: () = assert!(KVT_DEVICE_KERNEL_DECODE == Kind::Decode as u32);
/// Most kernels of a batch.
const MAX_KERNELS: u64 = 4096;

/// One kernel: 256 bytes, the same for all. Addresses are the device's, strides are bytes, 0 =
/// none; each kernel uses some of the fields, and the others are 0. docs/kernels.md says which.
/// Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_kernel_t {
    /// KVT_DEVICE_KERNEL_*.
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
macro_rules! same_call_fields {
    ($($field:ident)*) => {
        $(const _: () = assert!(offset_of!(kvt_kernel_t, $field) == offset_of!(Call, $field));)*
    };
}

same_call_fields!(kind dtype other_dtype scaling queries keys values out index counts table numbers more
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
    let event = enter(device)?.device.launch(Stream(stream), after, &calls)?;
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

/// Lays an index out for KVT_DEVICE_KERNEL_PREFILL, and tells the kernel of it: heads, then `starts`, then
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
pub unsafe extern "C" fn kvt_kernel_pack_index(
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

// Devices of the engine: a table of callbacks.

/// Rows of bytes to copy: `runs` runs of `run_bytes` bytes, read and written at equal distances.
/// One side has them without gaps. Stands in arrays only.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_copy_rows_t {
    /// Where the first run is read.
    pub from: u64,
    /// Where it is written.
    pub to: u64,
    /// From a run to the next, where they are read.
    pub from_stride_bytes: u64,
    /// The same, where they are written.
    pub to_stride_bytes: u64,
    /// Bytes of a run.
    pub run_bytes: u64,
    /// How many runs.
    pub runs: u64,
    /// KVT_MEMORY_*: where they are read.
    pub from_memory: u32,
    /// KVT_MEMORY_*: where they are written.
    pub to_memory: u32,
}

const _: () = assert!(size_of::<kvt_copy_rows_t>() == size_of::<Rows>());

/// Both have each field in one place: one is handed over as the other.
macro_rules! same_row_fields {
    ($($ours:ident $theirs:ident,)*) => {
        $(const _: () = assert!(offset_of!(kvt_copy_rows_t, $ours) == offset_of!(Rows, $theirs));)*
    };
}

same_row_fields!(
    from from, to to, from_stride_bytes from_stride_bytes, to_stride_bytes to_stride_bytes,
    run_bytes run_bytes, runs runs, from_memory from_device, to_memory to_device,
);
const _: () = assert!(KVT_MEMORY_HOST == 0 && KVT_MEMORY_DEVICE == 1);

/// Puts copies on a stream (0 to `streams` - 1, each in order), behind the event `after` if that
/// is not 0, and writes the event of their end, a number of the engine's own that is not 0. No
/// copies: the event marks the place. A batch whose `after` fails must fail. What is refused must
/// not have begun. KVT_E_UNAVAILABLE, from any callback: the device is gone; nothing is asked
/// of it any more but to release and free.
pub type kvt_device_submit_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        stream: u32,
        after: u64,
        copies: *const kvt_copy_rows_t,
        count: u64,
        stride_bytes: u64,
        out_event: *mut u64,
    ) -> kvt_status_t,
>;

/// Whether an event has come: KVT_OK, or KVT_E_AGAIN while it has not. Anything else is what its
/// batch failed with, and the library takes it that the batch touches no memory any more: where
/// only the question failed, KVT_E_AGAIN is the answer.
pub type kvt_device_query_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64) -> kvt_status_t>;

/// Waits for an event until a deadline (CLOCK_MONOTONIC, 0 = none). It may return early: the
/// event is asked for afterwards, and after a pause if it was very early.
pub type kvt_device_wait_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, event: u64, deadline_ns: u64) -> kvt_status_t,
>;

/// Takes an event back that nobody asks for any more. Batches that were given it as `after` may
/// still wait for it.
pub type kvt_device_release_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64)>;

/// Gives memory at a multiple of 256; KVT_E_NOMEM where there is not so much.
pub type kvt_device_allocate_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, bytes: u64, out_address: *mut u64) -> kvt_status_t,
>;

/// Takes it back.
pub type kvt_device_free_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64)>;

/// What it has left to give.
pub type kvt_device_free_bytes_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, out_bytes: *mut u64) -> kvt_status_t>;

/// Learns of host memory that copies use again and again; with 0 bytes: that it goes.
pub type kvt_device_register_host_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64) -> kvt_status_t>;

/// Makes an event of its own that comes with one that the engine names: see kvt_device_import_event.
/// The one that is named stays the engine's.
pub type kvt_device_import_event_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw: u64, out_event: *mut u64) -> kvt_status_t,
>;

/// Has a stream that the engine names go on only after an event: see kvt_device_stream_wait. It is not
/// called for an event that has come already.
pub type kvt_device_stream_wait_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw_stream: u64, event: u64) -> kvt_status_t,
>;

/// Makes an event that comes when `keep` says so: what is put behind it waits until then.
pub type kvt_device_create_event_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, out_event: *mut u64) -> kvt_status_t>;

/// Has such an event come, if it has not. It must not wait. Any thread may say so: that which ends
/// an op, too.
pub type kvt_device_signal_event_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64) -> kvt_status_t>;

/// Puts kernels on a stream, as copies.
pub type kvt_device_launch_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        stream: u32,
        after: u64,
        kernels: *const kvt_kernel_t,
        count: u64,
        stride_bytes: u64,
        out_event: *mut u64,
    ) -> kvt_status_t,
>;

/// A device of the engine's own. `submit` and `query` must be there; each of the others may be
/// null, and then there is none of that. They are called from any thread, from several at once;
/// they must not unwind, and must not call the device they are of. `release`, `allocate`, `free`
/// and `free_bytes` may be called while the library holds a lock: they must call nothing of it,
/// and wait for no thread that does. The others are called with no lock held.
/// kvt_device_conformance says whether all is as it should be.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_custom_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED.
    pub flags: u64,
    /// How many streams it has, 1 to 64. The upper half is for batches behind events that may
    /// come late, so that they hold up nothing else.
    pub streams: u32,
    /// Always 0.
    pub reserved: u32,
    /// The kernels that `launch` knows: 1 << KVT_DEVICE_KERNEL_* for each.
    pub kernels: u64,
    /// Copies.
    pub submit: kvt_device_submit_fn,
    /// How far an event is.
    pub query: kvt_device_query_fn,
    /// Waits; null = events are asked for every so often.
    pub wait: kvt_device_wait_fn,
    /// Takes events back.
    pub release: kvt_device_release_fn,
    /// Gives memory.
    pub allocate: kvt_device_allocate_fn,
    /// Takes it back.
    pub free: kvt_device_free_fn,
    /// What is left.
    pub free_bytes: kvt_device_free_bytes_fn,
    /// Host memory that is used again and again.
    pub register_host: kvt_device_register_host_fn,
    /// Events of the engine's.
    pub import_event: kvt_device_import_event_fn,
    /// Streams of the engine's.
    pub stream_wait: kvt_device_stream_wait_fn,
    /// Kernels.
    pub launch: kvt_device_launch_fn,
    /// Handed to all of them; taken over on success only.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
    /// Events that come when they are told to; null = there are none, and no stream can wait for
    /// an op.
    pub create_event: kvt_device_create_event_fn,
    /// Tells them: there with `promise` alone.
    pub signal_event: kvt_device_signal_event_fn,
}

/// The functions of a device of the engine's own, without its data.
#[derive(Clone, Copy)]
struct Table {
    submit: kvt_device_submit_fn,
    query: kvt_device_query_fn,
    wait: kvt_device_wait_fn,
    release: kvt_device_release_fn,
    allocate: kvt_device_allocate_fn,
    free: kvt_device_free_fn,
    free_bytes: kvt_device_free_bytes_fn,
    register_host: kvt_device_register_host_fn,
    import_event: kvt_device_import_event_fn,
    stream_wait: kvt_device_stream_wait_fn,
    launch: kvt_device_launch_fn,
    create_event: kvt_device_create_event_fn,
    signal_event: kvt_device_signal_event_fn,
}

/// What a callback came to.
fn result(what: &str, status: kvt_status_t) -> Result<()> {
    match Status::from_code(status) {
        Some(Status::Ok) => Ok(()),
        known => {
            let text = format!("{what} of the engine's device returned {status}");
            Err(Error::new(known.unwrap_or(Status::Invalid), text))
        }
    }
}

/// A number that a callback had to write.
fn number(what: &str, status: kvt_status_t, value: u64) -> Result<u64> {
    result(what, status)?;
    if value == 0 {
        fail!(Invalid, "{what} of the engine's device gave 0");
    }
    Ok(value)
}

fn none<T>(what: &str) -> Result<T> {
    fail!(Unsupported, "the engine's device has no {what}")
}

struct Called {
    callback: Arc<Callback<Table>>,
    facts: Facts,
}

impl Called {
    fn call<R>(&self, body: impl FnOnce(&Table, *mut c_void) -> R) -> R {
        self.callback.call(|table, user_data| body(&table, user_data))
    }

    /// For those functions that are told to call nothing: memory comes and goes under locks.
    fn call_leaf<R>(&self, body: impl FnOnce(&Table, *mut c_void) -> R) -> R {
        self.callback.call_leaf(|table, user_data| body(&table, user_data))
    }
}

impl Engine for Called {
    fn facts(&self) -> Facts {
        self.facts
    }

    fn submit(&self, stream: u32, after: u64, copies: &[Rows]) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(submit) = table.submit else { return none("submit") };
            let rows = copies.as_ptr().cast::<kvt_copy_rows_t>();
            let stride = size_of::<kvt_copy_rows_t>() as u64;
            let mut event = 0;
            // SAFETY: function and data came together; rows are borrowed for the call.
            let status = unsafe {
                let count = copies.len() as u64;
                submit(user_data, stream, after, rows, count, stride, &raw mut event)
            };
            number("submit", status, event)
        })
    }

    fn query(&self, event: u64) -> Result<bool> {
        self.call(|table, user_data| {
            let Some(query) = table.query else { return none("query") };
            // SAFETY: function and data came together.
            let status = unsafe { query(user_data, event) };
            if status == Status::Again.code() {
                return Ok(false);
            }
            result("the event", status).map(|()| true)
        })
    }

    fn wait(&self, event: u64, deadline_ns: u64) -> Option<Result<()>> {
        self.call(|table, user_data| {
            // SAFETY: function and data came together.
            table.wait.map(|wait| result("wait", unsafe { wait(user_data, event, deadline_ns) }))
        })
    }

    fn release(&self, event: u64) {
        self.call_leaf(|table, user_data| {
            if let Some(release) = table.release {
                // SAFETY: function and data came together.
                unsafe { release(user_data, event) };
            }
        });
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        self.call_leaf(|table, user_data| {
            let Some(allocate) = table.allocate else { return none("memory") };
            let mut address = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { allocate(user_data, bytes, &raw mut address) };
            number("allocate", status, address)
        })
    }

    fn free(&self, address: u64, bytes: u64) {
        self.call_leaf(|table, user_data| {
            if let Some(free) = table.free {
                // SAFETY: function and data came together; memory that it gave.
                unsafe { free(user_data, address, bytes) };
            }
        });
    }

    fn free_bytes(&self) -> Option<u64> {
        self.call_leaf(|table, user_data| {
            let mut bytes = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { table.free_bytes?(user_data, &raw mut bytes) };
            (status == Status::Ok.code()).then_some(bytes)
        })
    }

    fn register_host(&self, address: u64, bytes: u64) -> Result<()> {
        self.call(|table, user_data| match table.register_host {
            // SAFETY: function and data came together.
            Some(know) => result("know_host", unsafe { know(user_data, address, bytes) }),
            None => Ok(()),
        })
    }

    fn unregister_host(&self, address: u64) -> Result<()> {
        self.register_host(address, 0)
    }

    fn import_event(&self, raw: u64) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(adopt) = table.import_event else { return none("adopt") };
            let mut event = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { adopt(user_data, raw, &raw mut event) };
            number("adopt", status, event)
        })
    }

    fn stream_wait_event(&self, raw_stream: u64, event: u64) -> Result<()> {
        self.call(|table, user_data| {
            let Some(hold) = table.stream_wait else { return none("hold") };
            // SAFETY: function and data came together.
            result("hold", unsafe { hold(user_data, raw_stream, event) })
        })
    }

    fn create_user_event(&self) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(promise) = table.create_event else { return none("promise") };
            let mut event = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { promise(user_data, &raw mut event) };
            number("promise", status, event)
        })
    }

    fn signal_event(&self, event: u64) -> Result<()> {
        self.call(|table, user_data| {
            let Some(keep) = table.signal_event else { return none("keep") };
            // SAFETY: function and data came together.
            result("keep", unsafe { keep(user_data, event) })
        })
    }

    fn launch(&self, stream: u32, after: u64, calls: &[Call]) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(launch) = table.launch else { return none("kernels") };
            let kernels = calls.as_ptr().cast::<kvt_kernel_t>();
            let stride = size_of::<kvt_kernel_t>() as u64;
            let mut event = 0;
            // SAFETY: function and data came together; kernels are borrowed for the call.
            let status = unsafe {
                let count = calls.len() as u64;
                launch(user_data, stream, after, kernels, count, stride, &raw mut event)
            };
            number("launch", status, event)
        })
    }
}

/// Makes a device of a table, and takes over what it brings if `body` does.
///
/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn with_custom<R>(
    given: *const kvt_device_custom_t,
    clock: Clock,
    body: impl FnOnce(Foreign) -> Result<R>,
) -> Result<R> {
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    known_flags(given.flags, KVT_DEVICE_HAS_MEMORY | KVT_DEVICE_WANTS_PINNED)?;
    no_reserved(given.reserved)?;
    let has = (given.submit.is_some(), given.query.is_some());
    if has != (true, true) || given.allocate.is_some() != given.free.is_some() {
        fail!(Invalid, "submit or query is null, or one of allocate and free without the other");
    }
    if (given.kernels != 0) != given.launch.is_some() {
        fail!(Invalid, "kernels without launch, or launch without kernels");
    }
    if given.create_event.is_some() != given.signal_event.is_some() {
        fail!(Invalid, "one of promise and keep without the other");
    }
    let table = Table {
        submit: given.submit,
        query: given.query,
        wait: given.wait,
        release: given.release,
        allocate: given.allocate,
        free: given.free,
        free_bytes: given.free_bytes,
        register_host: given.register_host,
        import_event: given.import_event,
        stream_wait: given.stream_wait,
        launch: given.launch,
        create_event: given.create_event,
        signal_event: given.signal_event,
    };
    let facts = Facts {
        name: "custom",
        asynchronous: true,
        sums: false,
        reaches_device: given.flags & KVT_DEVICE_HAS_MEMORY != 0,
        wants_pinned: given.flags & KVT_DEVICE_WANTS_PINNED != 0,
        streams: given.streams,
        kernels: given.kernels,
    };
    let callback = Arc::new(Callback::new(table, given.user_data, given.destroy));
    let engine = Arc::new(Called { callback: callback.clone(), facts });
    let made = body(Foreign::new(clock, engine)?)?;
    callback.keep();
    Ok(made)
}

// Conformance of devices.

/// The device is closed at the end, which is a check as well.
pub const KVT_CONFORMANCE_CLOSES: u64 = 1;

/// The device does what it should.
pub const KVT_VERDICT_PASSED: u32 = 0;
/// It has nothing that could be tested.
pub const KVT_VERDICT_SKIPPED: u32 = 1;
/// It does not do what it should.
pub const KVT_VERDICT_FAILED: u32 = 2;

/// Most rounds.
const MAX_ROUNDS: u32 = 100_000;

/// How a device is put to the test.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_CONFORMANCE_CLOSES or 0.
    pub flags: u64,
    /// Chooses all that is left to chance.
    pub seed: u64,
    /// How long an event may take; 0 = 30 s.
    pub patience_ns: u64,
    /// How often what is left to chance is tried; 0 = 40, at most 100,000.
    pub rounds: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How many checks ended how.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// As they should.
    pub passed: u32,
    /// There was nothing to test.
    pub skipped: u32,
    /// Something is wrong.
    pub failed: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Hears of a check: its name, a KVT_VERDICT_*, and why. Texts are UTF-8, not NUL-terminated,
/// borrowed for the call. Called by the thread that called. It must not unwind.
pub type kvt_conformance_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        name: *const c_char,
        name_bytes: u64,
        verdict: u32,
        why: *const c_char,
        why_bytes: u64,
    ),
>;

/// Puts a device to the test: memory, copies of all sizes and layouts in all places, order,
/// events, deadlines, refusals, threads. Whoever brings a device of their own
/// (kvt_device_custom_t) runs this first. It uses a few hundred MiB of memory at most, and
/// nothing else should use the device meanwhile.
///
/// @param device     The device.
/// @param opts       How; null for defaults.
/// @param report     Hears of each check; may be null.
/// @param user_data  Handed to it.
/// @param out        How many checks ended how; start it with KVT_CONFORMANCE_REPORT_INIT.
/// @param err        Explains a failure of the call; may be null.
/// @return KVT_OK, also where checks failed: look at `out`. KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_REENTRANT inside a callback, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_device_conformance(
    device: *const kvt_device_t,
    opts: *const kvt_conformance_opts_t,
    report: kvt_conformance_fn,
    user_data: *mut c_void,
    out: *mut kvt_conformance_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    check_out(out)?;
    let given = read(opts)?;
    known_flags(given.flags, KVT_CONFORMANCE_CLOSES)?;
    no_reserved(given.reserved)?;
    if given.rounds > MAX_ROUNDS {
        fail!(Limit, "{} rounds, {MAX_ROUNDS} can be", given.rounds);
    }
    let report = report.map(|report| Callback::new(report, user_data, None));
    let mut tell = |name: &'static str, verdict: &Verdict| {
        let Some(report) = &report else { return };
        let (code, why) = match verdict {
            Verdict::Passed => (KVT_VERDICT_PASSED, ""),
            Verdict::Skipped(why) => (KVT_VERDICT_SKIPPED, why.as_str()),
            Verdict::Failed(why) => (KVT_VERDICT_FAILED, why.as_str()),
        };
        let (text, words) = (name.as_ptr().cast(), why.as_ptr().cast());
        let (text_bytes, why_bytes) = (name.len() as u64, why.len() as u64);
        report.call(|report, user_data| {
            report(user_data, text, text_bytes, code, words, why_bytes);
        });
    };
    let device = enter(device)?;
    let opts = ConformanceOpts {
        seed: given.seed,
        rounds: given.rounds,
        clock: device.core.clock().clone(),
        patience_ns: given.patience_ns,
        closes: given.flags & KVT_CONFORMANCE_CLOSES != 0,
    };
    let count = run(&device.device, &opts, &mut tell);
    write(
        out,
        &kvt_conformance_report_t {
            struct_size: 0,
            passed: count.passed,
            skipped: count.skipped,
            failed: count.failed,
            reserved: 0,
        },
    );
    Ok(())
}
