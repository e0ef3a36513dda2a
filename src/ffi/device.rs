//! Devices: memory, copies, events, kernels and custom devices.
//!
//! A device copies between host memory and its own, in streams, and says when with events. The CPU
//! is one, a GPU through the CUDA driver is one, and an engine can bring its own by a table of
//! callbacks (kvt_device_custom_t). A store or a streamer that is given a device accepts views of
//! its memory.
//!
//! Life cycle: kvt_device_open, kvt_device_copy, kvt_device_wait or _poll, kvt_device_release of
//! the events, kvt_device_close after the stores that use it. Events are numbers, not handles.
//!
//! ```c
//! kvt_device_opts_t opts = KVT_DEVICE_OPTS_INIT;
//! opts.kind = KVT_DEVICE_KIND_CUDA; /* loads the driver: KVT_E_UNAVAILABLE where there is none */
//! if (kvt_device_open(runtime, &opts, &device, &err) != KVT_OK) return fail(err);
//! kvt_device_memory_t memory = KVT_DEVICE_MEMORY_INIT;
//! if (kvt_device_alloc(device, 1u << 20, &memory, &err) != KVT_OK) return fail(err);
//! kvt_store_opts_t stored = KVT_STORE_OPTS_INIT; /* its transfers take views of device memory */
//! stored.device = device;
//! stored.spec = "store(host=8GiB, device=device(capacity=2GiB))";
//! stored.spec_bytes = KVT_NUL_TERMINATED;
//! if (kvt_store_open(runtime, NULL, &stored, &store, &err) != KVT_OK) return fail(err);
//! ```

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
    KVT_MEMORY_DEVICE, KVT_MEMORY_HOST, kvt_memory_t, kvt_view_t, memory_of, plane_anywhere,
};
use crate::ffi::runtime::{kvt_op_t, kvt_runtime_t, on_runtime};
use crate::ffi::sparse::{keys_of, kvt_index_head_t, kvt_index_t};
use crate::store::state::session::PlaneView;

// Devices.

/// Copies between an engine's tensors and the library's memory: with the processor, a GPU or code
/// of the engine. Several stores and streamers of the runtime may share a device.
pub struct kvt_device_t(());

/// Kinds of devices.
pub type kvt_device_kind_t = u32;

/// The processor copies; copies are complete when the call returns.
pub const KVT_DEVICE_KIND_HOST: kvt_device_kind_t = 1;
/// A GPU, through the CUDA driver, which is loaded when the device is opened.
pub const KVT_DEVICE_KIND_CUDA: kvt_device_kind_t = 2;
/// The engine copies, through the callbacks of kvt_device_custom_t.
pub const KVT_DEVICE_KIND_CUSTOM: kvt_device_kind_t = 3;
/// A simulated device for tests: copies take time, and targets hold garbage until their event has
/// completed.
pub const KVT_DEVICE_KIND_SIMULATED: kvt_device_kind_t = 4;

/// Properties of a device.
pub type kvt_device_features_t = u64;

/// Work continues after a call has returned.
pub const KVT_DEVICE_ASYNCHRONOUS: kvt_device_features_t = 1;
/// The device computes checksums of the planes that it copies (KVT_COPY_CHECKSUM).
pub const KVT_DEVICE_CHECKSUMS: kvt_device_features_t = 2;
/// The device has memory that only it can access: KVT_MEMORY_DEVICE.
pub const KVT_DEVICE_HAS_MEMORY: kvt_device_features_t = 4;
/// Copies of host memory that is not pinned are slow and block; see kvt_device_register_host.
pub const KVT_DEVICE_WANTS_PINNED: kvt_device_features_t = 8;

/// Flags of kvt_device_open.
pub type kvt_device_flags_t = u64;

/// The device computes checksums of copied planes in its own memory, and stores compare them with
/// the bytes on the host. A copy that differs is repeated once, then fails with KVT_E_CORRUPT.
pub const KVT_DEVICE_VERIFY: kvt_device_flags_t = 1;

/// Limit: peers of a device.
const MAX_PEERS: usize = 63;
/// Interval at which a close polls for calls of other threads that still use the device.
const CLOSE_POLL_NS: u64 = 50_000;

/// Options of kvt_device_open. Fields for other kinds of devices must be 0.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_opts_t {
    pub struct_size: u64,
    /// KVT_DEVICE_VERIFY or 0.
    pub flags: kvt_device_flags_t,
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    pub kind: kvt_device_kind_t,
    /// CUDA: index of the device, unless `context` is given.
    pub ordinal: u32,
    /// CUDA: the engine's context (CUcontext), which must outlive the device; 0 = the primary
    /// context.
    pub context: u64,
    /// CUDA: at most 64 streams (CUstream) of the engine in `context`, no default streams; null =
    /// four of the device's own.
    pub streams: *const u64,
    pub stream_count: u64,
    /// CUDA: path of the driver's library; null = the system's.
    pub library: *const c_char,
    pub library_bytes: u64,
    /// Custom: the engine's callbacks.
    pub custom: *const kvt_device_custom_t,
    /// Simulated: bytes that can be allocated; 0 = no limit.
    pub memory_bytes: u64,
    /// Simulated: seed of all random choices.
    pub seed: u64,
    /// Simulated: least duration of a batch of copies; 0 = 10 us.
    pub latency_ns: u64,
    /// Simulated: bandwidth of a stream; 0 = 20 GB/s.
    pub bytes_per_s: u64,
    /// CUDA: device memory of the engine that stores, streamers and kvt_device_alloc allocate from;
    /// it must outlive the device. 0 = allocate from the driver.
    pub arena: u64,
    pub arena_bytes: u64,
    /// CUDA: ordinals of at most 63 other devices of the process. Copies may name memory of their
    /// primary contexts. Null = none.
    pub peers: *const u32,
    pub peer_count: u64,
    /// CUDA: path of cuFile's library, which KVT_STREAM_DIRECT loads; null = the system's.
    pub cufile: *const c_char,
    pub cufile_bytes: u64,
}

/// Properties of a device.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_info_t {
    pub struct_size: u64,
    /// KVT_DEVICE_ASYNCHRONOUS, _CHECKSUMS, _HAS_MEMORY, _WANTS_PINNED.
    pub flags: kvt_device_features_t,
    /// KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED.
    pub kind: kvt_device_kind_t,
    /// Number of streams. Work runs in order within a stream, in any order across streams.
    pub streams: u32,
    /// Available kernels: a set of 1 << KVT_DEVICE_KERNEL_*.
    pub kernels: u64,
    /// Device memory that can still be allocated; UINT64_MAX = unknown.
    pub free_bytes: u64,
}

/// A device with its runtime.
pub(crate) struct DeviceNoun {
    pub(crate) core: Arc<Core>,
    pub(crate) device: Arc<dyn Device>,
    kind: u32,
    /// Signals the device's user events when the runtime shuts down.
    _on_shutdown: Arc<SignalOnShutdown>,
    /// New stores and streamers are rejected.
    closing: Mutex<bool>,
}

noun!(DeviceNoun, kvt_device_t, 19, "device");

/// Calls `body` with a device whose runtime accepts new work.
pub(crate) fn with_open_device<R>(
    handle: *const kvt_device_t,
    body: impl FnOnce(&Arc<dyn Device>) -> Result<R>,
) -> Result<R> {
    let noun = enter(handle)?;
    noun.core.check_open()?;
    body(&noun.device)
}

/// The device that a store or streamer of a runtime will use; null = none.
pub(crate) fn device_of(
    core: &Arc<Core>,
    handle: *const kvt_device_t,
) -> Result<Option<Arc<dyn Device>>> {
    if handle.is_null() {
        return Ok(None);
    }
    let noun = pin(handle, Access::Use)?;
    if !Arc::ptr_eq(&noun.core, core) {
        fail!(Invalid, "the device belongs to another runtime: open one on this runtime");
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
        let peers = numbers(given.peers, given.peer_count, MAX_PEERS)?;
        let streams = numbers(given.streams, given.stream_count, MAX_STREAMS as usize)?;
        (library, cufile, streams, peers)
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
    let defaults = SimulatedOpts::default();
    let or = |value: u64, default: u64| if value == 0 { default } else { value };
    SimulatedOpts {
        seed: given.seed,
        latency_ns: or(given.latency_ns, defaults.latency_ns),
        bytes_per_second: or(given.bytes_per_s, defaults.bytes_per_second),
        memory_bytes: given.memory_bytes,
        sums: given.flags & KVT_DEVICE_VERIFY != 0,
        ..defaults
    }
}

/// Rejects fields that the kind of device does not use.
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
    if cuda && !is(KVT_DEVICE_KIND_CUDA) || simulated && !is(KVT_DEVICE_KIND_SIMULATED) {
        fail!(
            Invalid,
            "a device of kind {}: fields for another kind are set, clear them",
            given.kind
        );
    }
    if given.flags != 0 && !is(KVT_DEVICE_KIND_CUDA) && !is(KVT_DEVICE_KIND_SIMULATED) {
        fail!(
            Invalid,
            "a device of kind {}: KVT_DEVICE_VERIFY is for CUDA and simulated devices",
            given.kind
        );
    }
    match (is(KVT_DEVICE_KIND_CUSTOM), given.custom.is_null()) {
        (true, true) => {
            fail!(Invalid, "custom is null: KVT_DEVICE_KIND_CUSTOM needs its callbacks")
        }
        (false, false) => {
            fail!(
                Invalid,
                "custom is set for kind {}: it is for KVT_DEVICE_KIND_CUSTOM",
                given.kind
            )
        }
        _ => Ok(()),
    }
}

/// Opens a device.
///
/// @param out  Close it with kvt_device_close.
/// @return KVT_E_UNAVAILABLE (CUDA: no driver, one that is too old or broken, or no such device;
///         the message says which), KVT_E_UNSUPPORTED (KVT_DEVICE_VERIFY without the checksum
///         kernel), KVT_E_LIMIT.
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
        let register = |device: Arc<dyn Device>| {
            let on_shutdown = SignalOnShutdown::new(&device);
            let owner: Arc<dyn Owner> = on_shutdown.clone();
            core.add_owner(Arc::downgrade(&owner));
            let (core, kind, closing) = (core.clone(), given.kind, Mutex::new(false));
            insert(DeviceNoun { core, device, kind, _on_shutdown: on_shutdown, closing })
        };
        match given.kind {
            KVT_DEVICE_KIND_HOST => register(Arc::new(Host::default())),
            KVT_DEVICE_KIND_CUDA => {
                let opts = cuda_opts(&given)?;
                register(Arc::new(Cuda::open(clock, &opts)?))
            }
            KVT_DEVICE_KIND_CUSTOM => {
                with_custom(given.custom, clock, |device| register(Arc::new(device)))
            }
            KVT_DEVICE_KIND_SIMULATED => {
                register(Arc::new(Simulated::new(clock, simulated_opts(&given))?))
            }
            other => fail!(
                Invalid,
                "kind is {other}: KVT_DEVICE_KIND_HOST, _CUDA, _CUSTOM or _SIMULATED is accepted"
            ),
        }
    })?;
    out.write(handle);
    Ok(())
}

/// Waits for calls that were inside the device when it was closed, then drops it: its resources are
/// released before the close returns.
fn drop_last(device: Option<Arc<dyn Device>>) {
    let Some(device) = device else { return };
    let (condvar, lock) = (Condvar::new(), Mutex::new(()));
    while Arc::strong_count(&device) > 1 {
        condvar.wait_for(&mut lock.lock(), CLOSE_POLL_NS);
    }
}

/// Closes a device: rejects new work, signals the events of kvt_device_create_event, waits for work
/// in flight and for calls of other threads, and frees the device's memory.
///
/// @return KVT_E_BUSY (a store or streamer uses the device, which stays open; or work was in flight
///         at the deadline: the device stays closing, call again).
#[capi]
pub unsafe extern "C" fn kvt_device_close(
    device: *mut *mut kvt_device_t,
    deadline_ns: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let mut closed = None;
    let close = |noun: &Pin<'static, DeviceNoun>| {
        refuse_reentry()?;
        let mut closing = noun.closing.lock();
        let users = Arc::strong_count(&noun.device) - 1;
        if users > 0 {
            fail!(Busy, "the device is in use: close its stores and streamers first");
        }
        *closing = true;
        drop(closing);
        noun.device.close(deadline_ns)?;
        closed = Some(noun.device.clone());
        Ok(())
    };
    free(device, close)?;
    drop_last(closed);
    Ok(())
}

/// Reads the properties of a device.
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

/// Describes a device for logs: its name, and how it copies.
///
/// @param out        Text, not NUL-terminated; may be null.
/// @param out_bytes  Length of the text; may be null.
/// @return KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_device_describe(
    device: *const kvt_device_t,
    out: *mut c_char,
    out_capacity: u64,
    out_bytes: *mut u64,
) -> kvt_status_t {
    let description = enter(device)?.device.describe();
    give_text(&description, out, out_capacity, out_bytes)
}

// Copies.

/// An allocation of device memory.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_memory_t {
    pub struct_size: u64,
    /// A multiple of 256.
    pub address: u64,
    pub bytes: u64,
    /// Id of the allocation, set by the library.
    pub number: u64,
    /// Address space of `address`.
    pub memory: kvt_memory_t,
    pub reserved: u32,
}

/// Directions of a copy.
pub type kvt_copy_direction_t = u32;

/// From the view to the plane.
pub const KVT_COPY_GATHER: kvt_copy_direction_t = 0;
/// From the plane to the view.
pub const KVT_COPY_SCATTER: kvt_copy_direction_t = 1;
/// Flags of a copy.
pub type kvt_copy_flags_t = u64;

/// Compute a checksum; ignored without KVT_DEVICE_CHECKSUMS. An asynchronous device sums the side
/// in its own memory: the source as read, or the target as written. If both sides are there, it
/// sums the target.
pub const KVT_COPY_CHECKSUM: kvt_copy_flags_t = 1;

/// A copy between an engine's tensor and a plane, which holds the same tokens, heads and elements
/// without gaps.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_copy_t {
    /// KVT_COPY_CHECKSUM or 0.
    pub flags: kvt_copy_flags_t,
    /// The engine's tensor; it must state its number of tokens.
    pub view: kvt_view_t,
    /// tokens * heads * run_bytes bytes.
    pub plane: *mut c_void,
    /// Address space of `plane`.
    pub plane_memory: kvt_memory_t,
    /// KVT_COPY_GATHER or KVT_COPY_SCATTER.
    pub direction: kvt_copy_direction_t,
    /// First token of the view to copy.
    pub first_token: u32,
    /// 0 = all from `first_token` on.
    pub tokens: u32,
    /// Receives the checksum (see kvt_checksum) that KVT_COPY_CHECKSUM requests from a synchronous
    /// device; an asynchronous one returns it from kvt_device_checksums.
    pub sum: u64,
}

/// Allocates device memory with undefined content. Closing the device frees it.
///
/// @param bytes  At least 1.
/// @param out    Free it with kvt_device_free.
/// @return KVT_E_UNSUPPORTED (the device cannot allocate), KVT_E_UNAVAILABLE (the device is lost).
#[capi]
pub unsafe extern "C" fn kvt_device_alloc(
    device: *const kvt_device_t,
    bytes: u64,
    out: *mut kvt_device_memory_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let memory = enter(device)?.device.allocate(bytes)?;
    write(
        out,
        &kvt_device_memory_t {
            struct_size: 0,
            address: memory.address,
            bytes: memory.bytes,
            number: memory.number,
            memory: match memory.memory {
                Memory::Host => KVT_MEMORY_HOST,
                Memory::Device => KVT_MEMORY_DEVICE,
            },
            reserved: 0,
        },
    );
    Ok(())
}

/// Frees device memory.
///
/// @param memory  As kvt_device_alloc wrote it.
/// @return KVT_E_BUSY (work in flight uses the memory, as far as the device can tell), KVT_E_HANDLE
///         (also: memory of another device, or freed before).
#[capi]
pub unsafe extern "C" fn kvt_device_free(
    device: *const kvt_device_t,
    memory: *const kvt_device_memory_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    if memory.is_null() {
        fail!(Invalid, "memory is null: pass the struct that kvt_device_alloc wrote");
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

/// Registers host memory that many copies will use, so that they run at full speed: CUDA pins it;
/// host and simulated devices do nothing. Memory that cannot be pinned is registered all the same:
/// its copies are slower and block in the call, and kvt_device_describe states how much that is.
/// The memory must stay mapped until it is unregistered.
///
/// @param address  Start of a page.
/// @return KVT_E_INVALID (also: overlaps registered memory), KVT_E_UNAVAILABLE, or the status of a
///         custom device's `register_host`.
#[capi]
pub unsafe extern "C" fn kvt_device_register_host(
    device: *const kvt_device_t,
    address: *mut c_void,
    bytes: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let end = (address.addr() as u64).checked_add(bytes);
    if address.is_null() || bytes == 0 || end.is_none() {
        fail!(
            Invalid,
            "{bytes} bytes of host memory at {address:p}: pass a range that is not empty"
        );
    }
    enter(device)?.device.register_host(address.cast(), bytes)
}

/// Unregisters host memory, before it is unmapped and when no work in flight uses it.
///
/// @param address  As it was registered.
/// @return KVT_E_HANDLE (also: CUDA, not registered), KVT_E_UNAVAILABLE, or the status of a custom
///         device's `register_host`.
#[capi]
pub unsafe extern "C" fn kvt_device_unregister_host(
    device: *const kvt_device_t,
    address: *mut c_void,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(device)?.device.unregister_host(address.cast())
}

/// Converts a copy.
fn copy_of<'a>(given: &kvt_copy_t, plane: &'a PlaneView) -> Result<Copy<'a>> {
    if given.flags & !KVT_COPY_CHECKSUM != 0 {
        fail!(
            Invalid,
            "flags of a copy are {:#x}: KVT_COPY_CHECKSUM or 0 is accepted",
            given.flags
        );
    }
    let direction = match given.direction {
        KVT_COPY_GATHER => Direction::Gather,
        KVT_COPY_SCATTER => Direction::Scatter,
        other => {
            fail!(Invalid, "direction is {other}: KVT_COPY_GATHER or KVT_COPY_SCATTER is accepted")
        }
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

/// Submits copies to a stream, after its earlier work and after an event. Until the event of the
/// batch has completed or failed, do not change sources, and do not access targets. CUDA blocks in
/// the call until earlier work has completed, if a copy is within host memory or uses host memory
/// that is not registered (kvt_device_register_host) or not pinned.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 65,536; 0 = only record an event.
/// @param out_event  Completes with the copies; release it with kvt_device_release.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (memory that the device cannot access, or a checksum that
///         it cannot compute), KVT_E_AGAIN (65,536 events, or 256 batches with checksums, are not
///         released), KVT_E_STATE (the stream is being captured into a graph), KVT_E_UNAVAILABLE
///         (the device is lost), KVT_E_IO, or the status that `after` failed with.
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
    let mut batch = Vec::new();
    let reserved = given
        .try_reserve_exact(rows.len())
        .and_then(|()| planes.try_reserve_exact(rows.len()))
        .and_then(|()| batch.try_reserve_exact(rows.len()));
    reserved.map_err(|_| Status::NoMem)?;
    for at in 0..rows.len() {
        let row = rows.get(at)?;
        planes.push(plane_anywhere(&row.view)?);
        given.push(row);
    }
    for (given, plane) in given.iter().zip(&planes) {
        batch.push(copy_of(given, plane)?);
    }
    let after = (after != 0).then_some(Event(after));
    let event = enter(device)?.device.submit(Stream(stream), after, &mut batch)?;
    for (at, (given, copy)) in given.iter_mut().zip(&batch).enumerate() {
        if copy.wants_sum {
            given.sum = copy.sum;
            rows.put(at, given);
        }
    }
    out_event.write(event.0);
    Ok(())
}

// Events of devices.

/// Limit: events of an array.
const MAX_EVENTS: usize = 65_536;

/// Queries an event. Never waits for it, but may wait for a submission of another thread. After a
/// failure the content of the targets is undefined.
///
/// @return KVT_OK (completed), KVT_E_AGAIN (pending), KVT_E_HANDLE (also: an event of another
///         device, or released), or the status that its batch failed with.
#[capi]
pub unsafe extern "C" fn kvt_device_query(device: *const kvt_device_t, event: u64) -> kvt_status_t {
    match enter(device)?.device.state(Event(event))? {
        State::Done => Ok(()),
        State::Pending => Err(Error::from(Status::Again)),
    }
}

/// Waits for an event.
///
/// @return KVT_E_TIMEOUT, or as kvt_device_query.
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

/// Reads the checksums that copies of a batch requested (KVT_COPY_CHECKSUM), in the order of the
/// copies. They are available from the completion of the event until its release. Compare them with
/// kvt_checksum of the bytes in host memory: a difference means that bytes changed on the bus.
///
/// @param device    Asynchronous, with KVT_DEVICE_CHECKSUMS.
/// @param sums      Receives at most `capacity` checksums; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_BUSY (the event is pending), KVT_E_UNSUPPORTED (the device computes no checksums),
///         KVT_E_LIMIT, or the status that the batch failed with.
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
    require(sums)?;
    if capacity > MAX_EVENTS as u64 {
        fail!(Limit, "capacity is {capacity}: at most {MAX_EVENTS} is accepted");
    }
    let mut found = Vec::new();
    found.try_reserve_exact(capacity as usize).map_err(|_| Status::NoMem)?;
    found.resize(capacity as usize, 0);
    let count = enter(device)?.device.sums(Event(event), &mut found)?;
    for (at, sum) in found.iter().take(count).enumerate() {
        // SAFETY: at most `capacity` are written.
        sums.add(at).write_unaligned(*sum);
    }
    out_count.write(count as u64);
    Ok(())
}

/// Returns events that have completed or failed. Never waits for one. An asynchronous device
/// reports each event once, unless it is released before; a synchronous one reports none. Events of
/// stores and streamers that share the device are reported as well, and internal ones of a
/// kvt_device_copy that blocks in another thread.
///
/// @param events    Receives at most `capacity` events; not null.
/// @param capacity  At most 65,536.
/// @return KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_device_poll(
    device: *const kvt_device_t,
    events: *mut u64,
    capacity: u64,
    out_count: *mut u64,
) -> kvt_status_t {
    require(out_count)?;
    require(events)?;
    if capacity > MAX_EVENTS as u64 {
        fail!(Limit, "capacity is {capacity}: at most {MAX_EVENTS} is accepted");
    }
    let mut ended = [Event(0); 64];
    let mut count = 0;
    while count < capacity {
        let limit = (capacity - count).min(ended.len() as u64) as usize;
        let slots = ended.get_mut(..limit).unwrap_or_default();
        let reported = enter(device)?.device.poll(slots);
        for event in ended.iter().take(reported) {
            // SAFETY: at most `capacity` are written.
            events.add(count as usize).write_unaligned(event.0);
            count += 1;
        }
        if reported < limit {
            break;
        }
    }
    out_count.write(count);
    Ok(())
}

/// Releases events that have completed or failed. Stops at the first error; the events before it
/// are released. A synchronous device keeps no events and accepts each of them repeatedly.
///
/// @param count  At most 65,536.
/// @return KVT_E_BUSY (an event is pending), KVT_E_HANDLE (also: an event of another device, or
///         released before), KVT_E_LIMIT.
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

/// Imports an event of the engine: creates a device event that completes with it. Work submitted
/// after the device event waits for the engine's kernels; no thread waits.
///
/// @param raw        CUDA: a CUevent that was recorded; it must stay valid until it has completed.
/// @param out_event  Release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (also: `raw` is no event, or of another context),
///         KVT_E_AGAIN (65,536 events are not released), KVT_E_STATE (`raw` was recorded on a
///         stream that is being captured into a graph), KVT_E_UNAVAILABLE.
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

/// Makes a stream of the engine wait for a device event. No thread waits.
///
/// @param raw_stream  CUDA: a CUstream of the device's context, not a default stream.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or event), KVT_E_STATE (the stream is
///         being captured into a graph), KVT_E_UNAVAILABLE, or the status that the event failed
///         with.
#[capi]
pub unsafe extern "C" fn kvt_device_stream_wait(
    device: *const kvt_device_t,
    raw_stream: u64,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(device)?.device.stream_wait_event(raw_stream, Event(event))
}

/// Creates an event that completes when kvt_device_signal_event signals it, or when the device or
/// its runtime is closed. Batches, transfers and streams may wait for it before that. A
/// kvt_device_copy that blocks in the call (see there) waits for the event: signal it from another
/// thread then.
///
/// @param out_event  Signal it, then release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (by the device or its driver), KVT_E_AGAIN (1,024 such events are not
///         released), KVT_E_UNAVAILABLE.
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

/// Signals an event of kvt_device_create_event: work that waits for it proceeds. Signalling it
/// again does nothing.
///
/// @return KVT_E_HANDLE (also: no such event of this device, or released), or the status of a
///         custom device's `signal_event`.
#[capi]
pub unsafe extern "C" fn kvt_device_signal_event(
    device: *const kvt_device_t,
    event: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    enter(device)?.device.signal_event(Event(event))
}

/// Makes a stream of the engine wait until an op, of any kind, is released, whether it succeeded or
/// not: query the op afterwards. The op need not have begun. No thread waits. Closing the device or
/// its runtime ends the wait.
///
/// CUDA waits for a number in memory (cuStreamWaitValue32), a dependency that the driver does not
/// know: the op's release must not depend on work that waits for this stream.
///
/// @param raw_stream  See kvt_device_stream_wait.
/// @return KVT_E_UNSUPPORTED, KVT_E_HANDLE (device, stream or op), KVT_E_STATE (the stream is being
///         captured into a graph), KVT_E_AGAIN (see kvt_device_create_event), KVT_E_UNAVAILABLE.
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

/// Kernels of a device.
pub type kvt_device_kernel_t = u32;

/// Copy runs of bytes, convert numbers to another type, compute checksums.
pub const KVT_DEVICE_KERNEL_MOVE: kvt_device_kernel_t = 1;
pub const KVT_DEVICE_KERNEL_CONVERT: kvt_device_kernel_t = 2;
pub const KVT_DEVICE_KERNEL_SUM: kvt_device_kernel_t = 3;
/// Page selection: extend bounding boxes of pages, bound a query's scores of pages, choose the
/// largest scores.
pub const KVT_DEVICE_KERNEL_PAGE_BOXES: kvt_device_kernel_t = 4;
pub const KVT_DEVICE_KERNEL_PAGE_SCORES: kvt_device_kernel_t = 5;
pub const KVT_DEVICE_KERNEL_TOP: kvt_device_kernel_t = 6;
/// Token eviction: add attention weights to scores of tokens, choose the tokens to keep, compact
/// their rows.
pub const KVT_DEVICE_KERNEL_ADD: kvt_device_kernel_t = 7;
pub const KVT_DEVICE_KERNEL_KEEP: kvt_device_kernel_t = 8;
pub const KVT_DEVICE_KERNEL_COMPACT: kvt_device_kernel_t = 9;
/// Attention: estimate weights of columns and diagonals from the last queries; attention of a
/// prompt over columns, diagonals or blocks; attention of few queries over chosen pages.
pub const KVT_DEVICE_KERNEL_ESTIMATE: kvt_device_kernel_t = 10;
pub const KVT_DEVICE_KERNEL_PREFILL: kvt_device_kernel_t = 11;
pub const KVT_DEVICE_KERNEL_DECODE: kvt_device_kernel_t = 12;

const _: () = assert!(KVT_DEVICE_KERNEL_DECODE == Kind::Decode as u32);
/// Limit: kernels of a batch.
const MAX_KERNELS: u64 = 4096;

pub use crate::device::call::Call as kvt_kernel_t;

// SAFETY: all its fields are numbers, for which any bytes are a value.
unsafe impl Plain for kvt_kernel_t {}

/// Submits kernels to a stream, after its earlier work and after an event. They run in order. The
/// memory that they name belongs to the device until the event of the batch has completed or
/// failed.
///
/// @param stream     0 to kvt_device_info_t.streams - 1.
/// @param after      An event of the device; 0 = none.
/// @param count      At most 4,096.
/// @param out_event  Completes with the kernels; release it with kvt_device_release.
/// @return KVT_E_UNSUPPORTED (see kvt_device_info_t.kernels), KVT_E_UNAVAILABLE (also: a kernel
///         does not load), and as kvt_device_copy.
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
    let calls = (0..rows.len()).map(|at| rows.get(at)).collect::<Result<Vec<Call>>>()?;
    let after = (after != 0).then_some(Event(after));
    let event = enter(device)?.device.launch(Stream(stream), after, &calls)?;
    out_event.write(event.0);
    Ok(())
}

/// Offsets of the arrays of a packed index, and its length.
struct IndexOffsets {
    starts: u64,
    items: u64,
    end: u64,
}

fn offsets_of(keys: &Keys<'_>) -> IndexOffsets {
    let starts = size_of_val(keys.heads) as u64;
    let items = starts + size_of_val(keys.starts) as u64;
    IndexOffsets { starts, items, end: items + size_of_val(keys.items) as u64 }
}

/// A prefill kernel with the fields of an index that will be at an address.
fn with_index(keys: &Keys<'_>, call: Call, address: u64) -> Result<Call> {
    let heads = Heads { queries: call.query_heads, keys: call.key_heads };
    if heads.keys == 0 || heads.queries % heads.keys != 0 {
        fail!(
            Invalid,
            "query_heads is {}: a multiple of key_heads ({}) is accepted",
            heads.queries,
            heads.keys
        );
    }
    keys.check(heads, call.first, call.query_count)?;
    if keys.heads.is_empty() {
        return Ok(Call { count: 0, numbers: 0, counts: 0, index: 0, scratch_bytes: 0, ..call });
    }
    let offsets = offsets_of(keys);
    if address == 0 || address % 4 != 0 || address.checked_add(offsets.end).is_none() {
        fail!(
            Invalid,
            "address is {address:#x} for {} bytes: a nonzero multiple of 4 is accepted",
            offsets.end
        );
    }
    let count = keys.heads.len() as u32;
    let (counts, index) = (address + offsets.starts, address + offsets.items);
    let call = Call { count, numbers: address, counts, index, ..call };
    Ok(Call { scratch_bytes: call.line_bytes(), ..call })
}

/// Packs an index for KVT_DEVICE_KERNEL_PREFILL (heads, `starts` and `items` of kvt_index_t,
/// contiguous) and enters it in a kernel. The call validates the index; the kernel trusts it.
/// Afterwards copy the bytes to `address`, and set the kernel's `scratch`.
///
/// @param index    Keys that are visible; null, or without heads = all keys, 0 bytes.
/// @param kernel   Its query_count, query_heads, key_heads, tokens and first must be set. The call
///                 writes count, numbers, counts, index and scratch_bytes (the bytes needed).
/// @param address  Where the device will read the bytes; a multiple of 4, not 0.
/// @param to       Receives the bytes, at most `out_capacity`; may be null.
/// @return KVT_E_TOO_SMALL (`kernel` is not written), KVT_E_INVALID (also: an index that is not
///         valid), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_kernel_pack_index(
    index: *const kvt_index_t,
    kernel: *mut kvt_kernel_t,
    address: u64,
    to: *mut c_void,
    out_capacity: u64,
    out_bytes: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(kernel)?;
    require(out_bytes)?;
    let (keys, call) = (keys_of(index)?, kernel.read());
    let call = with_index(&keys, call, address)?;
    let offsets = offsets_of(&keys);
    let bytes = if keys.heads.is_empty() { 0 } else { offsets.end };
    out_bytes.write(bytes);
    if bytes > out_capacity || (bytes > 0 && to.is_null()) {
        fail!(TooSmall, "out_capacity is {out_capacity}: the index needs {bytes} bytes");
    }
    let to = to.cast::<u8>();
    // SAFETY: at most `out_capacity` bytes, of the caller's arrays; a kernel that was read.
    if bytes > 0 {
        let write_at = |at: u64, from: *const u8, bytes: usize| {
            to.add(at as usize).copy_from_nonoverlapping(from, bytes);
        };
        const { assert!(size_of::<kvt_index_head_t>() == 24) };
        write_at(0, keys.heads.as_ptr().cast(), size_of_val(keys.heads));
        write_at(offsets.starts, keys.starts.as_ptr().cast(), size_of_val(keys.starts));
        write_at(offsets.items, keys.items.as_ptr().cast(), size_of_val(keys.items));
    }
    kernel.write(call);
    Ok(())
}

// Custom devices: callbacks of the engine.

/// Rows of bytes to copy: `runs` runs of `run_bytes` bytes at constant strides. One side has no
/// gaps.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_copy_rows_t {
    /// Source and target of the first run.
    pub from: u64,
    pub to: u64,
    /// From a run to the next, in the source and in the target.
    pub from_stride_bytes: u64,
    pub to_stride_bytes: u64,
    pub run_bytes: u64,
    pub runs: u64,
    /// Address space of the source.
    pub from_memory: kvt_memory_t,
    /// Address space of the target.
    pub to_memory: kvt_memory_t,
}

const _: () = assert!(size_of::<kvt_copy_rows_t>() == size_of::<Rows>());

/// Checks that both structs have each field at the same offset, because one is passed as the other.
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

/// Submits copies to a stream (0 to `streams` - 1, each in order), after the event `after` (0 =
/// none). Entries are `stride_bytes` apart. Writes the event that completes with them, a number of
/// the engine's choice, not 0. Without copies it only records an event. A batch whose `after` fails
/// must fail. A rejected batch must not have begun. KVT_E_UNAVAILABLE, from any callback, means
/// that the device is lost; afterwards the library only calls `release` and `free`.
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

/// Queries an event: KVT_OK (completed), KVT_E_AGAIN (pending), or the status that its batch failed
/// with; the batch must not access memory any more. If only the query failed, return KVT_E_AGAIN.
pub type kvt_device_query_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64) -> kvt_status_t>;

/// Waits for an event until a deadline. It may return early: the library queries the event
/// afterwards, and pauses before the next wait if this one was very short.
pub type kvt_device_wait_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, event: u64, deadline_ns: u64) -> kvt_status_t,
>;

/// Releases an event: the library uses it no more. Batches that have it as `after` may still wait
/// for it.
pub type kvt_device_release_fn = Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64)>;

/// Allocates memory at a multiple of 256, not 0. KVT_E_NOMEM: not enough is free.
pub type kvt_device_allocate_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, bytes: u64, out_address: *mut u64) -> kvt_status_t,
>;

/// Frees memory.
pub type kvt_device_free_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64)>;

/// Writes the number of bytes that can still be allocated.
pub type kvt_device_free_bytes_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, out_bytes: *mut u64) -> kvt_status_t>;

/// Registers host memory that many copies will use; with `bytes` 0, unregisters it.
pub type kvt_device_register_host_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64) -> kvt_status_t>;

/// Imports an event; see kvt_device_import_event. `raw` stays the caller's.
pub type kvt_device_import_event_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw: u64, out_event: *mut u64) -> kvt_status_t,
>;

/// Makes a stream wait for an event; see kvt_device_stream_wait. Not called for an event that is
/// known to have completed.
pub type kvt_device_stream_wait_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw_stream: u64, event: u64) -> kvt_status_t,
>;

/// Creates an event that completes when `signal_event` is called with it.
pub type kvt_device_create_event_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, out_event: *mut u64) -> kvt_status_t>;

/// Signals an event of `create_event`; signalling it again does nothing. Must not wait. Called from
/// any thread, also from the one that releases an op.
pub type kvt_device_signal_event_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, event: u64) -> kvt_status_t>;

/// Submits kernels to a stream, as kvt_device_submit_fn does copies.
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

/// A device that the engine implements; test it with kvt_device_conformance. `submit` and `query`
/// are required; the others may be null, and the device then lacks that feature. Set both or none
/// of `allocate` and `free`, `create_event` and `signal_event`, `kernels` and `launch`.
///
/// Threading: callbacks are called from any thread, several at once. They must not unwind, and must
/// not call this device. `release`, `allocate`, `free` and `free_bytes` may be called while the
/// library holds a lock: they must not call the library, nor wait for a thread that does.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_device_custom_t {
    pub struct_size: u64,
    /// KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED.
    pub flags: kvt_device_features_t,
    /// 1 to 64. The upper half is for batches that wait for late events, so that they delay nothing
    /// else.
    pub streams: u32,
    pub reserved: u32,
    /// Kernels of `launch`: a set of 1 << KVT_DEVICE_KERNEL_*.
    pub kernels: u64,
    pub submit: kvt_device_submit_fn,
    pub query: kvt_device_query_fn,
    /// Null = the library polls with `query`.
    pub wait: kvt_device_wait_fn,
    pub release: kvt_device_release_fn,
    pub allocate: kvt_device_allocate_fn,
    pub free: kvt_device_free_fn,
    pub free_bytes: kvt_device_free_bytes_fn,
    pub register_host: kvt_device_register_host_fn,
    pub import_event: kvt_device_import_event_fn,
    pub stream_wait: kvt_device_stream_wait_fn,
    pub launch: kvt_device_launch_fn,
    /// Passed to all callbacks; taken over only if the open succeeds.
    pub user_data: *mut c_void,
    /// Releases user_data; may be null.
    pub destroy: kvt_destroy_fn,
    /// Null = streams cannot wait for an op.
    pub create_event: kvt_device_create_event_fn,
    pub signal_event: kvt_device_signal_event_fn,
}

/// The callbacks of a custom device, without their user data.
#[derive(Clone, Copy)]
struct Callbacks {
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

/// The result of a callback.
fn result(name: &str, status: kvt_status_t) -> Result<()> {
    match Status::from_code(status) {
        Some(Status::Ok) => Ok(()),
        known => {
            let text = format!("the custom device's callback {name} returned status {status}");
            Err(Error::new(known.unwrap_or(Status::Invalid), text))
        }
    }
}

/// The address or event that a callback wrote.
fn nonzero(name: &str, status: kvt_status_t, value: u64) -> Result<u64> {
    result(name, status)?;
    if value == 0 {
        fail!(Invalid, "the custom device's callback {name} wrote 0: a nonzero number is required");
    }
    Ok(value)
}

fn no_callback<T>(name: &str) -> Result<T> {
    fail!(Unsupported, "the custom device has no callback {name}")
}

/// An engine behind the callbacks of a custom device.
struct CustomEngine {
    callback: Arc<Callback<Callbacks>>,
    facts: Facts,
}

impl CustomEngine {
    fn call<R>(&self, body: impl FnOnce(&Callbacks, *mut c_void) -> R) -> R {
        self.callback.call(|table, user_data| body(&table, user_data))
    }

    /// For callbacks that must not call the library: they may be called under its locks.
    fn call_leaf<R>(&self, body: impl FnOnce(&Callbacks, *mut c_void) -> R) -> R {
        self.callback.call_leaf(|table, user_data| body(&table, user_data))
    }
}

impl Engine for CustomEngine {
    fn facts(&self) -> Facts {
        self.facts
    }

    fn submit(&self, stream: u32, after: u64, copies: &[Rows]) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(submit) = table.submit else { return no_callback("submit") };
            let rows = copies.as_ptr().cast::<kvt_copy_rows_t>();
            let stride = size_of::<kvt_copy_rows_t>() as u64;
            let mut event = 0;
            // SAFETY: function and data came together; rows are borrowed for the call.
            let status = unsafe {
                let count = copies.len() as u64;
                submit(user_data, stream, after, rows, count, stride, &raw mut event)
            };
            nonzero("submit", status, event)
        })
    }

    fn query(&self, event: u64) -> Result<bool> {
        self.call(|table, user_data| {
            let Some(query) = table.query else { return no_callback("query") };
            // SAFETY: function and data came together.
            let status = unsafe { query(user_data, event) };
            if status == Status::Again.code() {
                return Ok(false);
            }
            result("query", status).map(|()| true)
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
            let Some(allocate) = table.allocate else { return no_callback("allocate") };
            let mut address = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { allocate(user_data, bytes, &raw mut address) };
            nonzero("allocate", status, address)
        })
    }

    fn free(&self, address: u64, bytes: u64) {
        self.call_leaf(|table, user_data| {
            if let Some(free) = table.free {
                // SAFETY: function and data came together; memory that it allocated.
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
            Some(register) => {
                // SAFETY: function and data came together.
                result("register_host", unsafe { register(user_data, address, bytes) })
            }
            None => Ok(()),
        })
    }

    fn unregister_host(&self, address: u64) -> Result<()> {
        self.register_host(address, 0)
    }

    fn import_event(&self, raw: u64) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(import) = table.import_event else { return no_callback("import_event") };
            let mut event = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { import(user_data, raw, &raw mut event) };
            nonzero("import_event", status, event)
        })
    }

    fn stream_wait_event(&self, raw_stream: u64, event: u64) -> Result<()> {
        self.call(|table, user_data| {
            let Some(wait) = table.stream_wait else { return no_callback("stream_wait") };
            // SAFETY: function and data came together.
            result("stream_wait", unsafe { wait(user_data, raw_stream, event) })
        })
    }

    fn create_user_event(&self) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(create) = table.create_event else { return no_callback("create_event") };
            let mut event = 0;
            // SAFETY: function and data came together; a place for a number.
            let status = unsafe { create(user_data, &raw mut event) };
            nonzero("create_event", status, event)
        })
    }

    fn signal_event(&self, event: u64) -> Result<()> {
        self.call(|table, user_data| {
            let Some(signal) = table.signal_event else { return no_callback("signal_event") };
            // SAFETY: function and data came together.
            result("signal_event", unsafe { signal(user_data, event) })
        })
    }

    fn launch(&self, stream: u32, after: u64, calls: &[Call]) -> Result<u64> {
        self.call(|table, user_data| {
            let Some(launch) = table.launch else { return no_callback("launch") };
            let kernels = calls.as_ptr().cast::<kvt_kernel_t>();
            let stride = size_of::<kvt_kernel_t>() as u64;
            let mut event = 0;
            // SAFETY: function and data came together; kernels are borrowed for the call.
            let status = unsafe {
                let count = calls.len() as u64;
                launch(user_data, stream, after, kernels, count, stride, &raw mut event)
            };
            nonzero("launch", status, event)
        })
    }
}

/// Passes a custom device to `body`, and takes over its user data if `body` succeeds.
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
    if given.submit.is_none() || given.query.is_none() {
        fail!(Invalid, "submit or query is null: a custom device needs both callbacks");
    }
    if given.allocate.is_some() != given.free.is_some() {
        fail!(Invalid, "one of allocate and free is null: set both callbacks or neither");
    }
    if (given.kernels != 0) != given.launch.is_some() {
        fail!(Invalid, "only one of kernels and launch is set: set both or neither");
    }
    if given.create_event.is_some() != given.signal_event.is_some() {
        fail!(Invalid, "one of create_event and signal_event is null: set both or neither");
    }
    let callbacks = Callbacks {
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
    let callback = Arc::new(Callback::new(callbacks, given.user_data, given.destroy));
    let engine = Arc::new(CustomEngine { callback: callback.clone(), facts });
    let output = body(Foreign::new(clock, engine)?)?;
    callback.keep();
    Ok(output)
}

// Conformance of devices.

/// Flags of kvt_device_conformance.
pub type kvt_conformance_flags_t = u64;

/// Close the device at the end, and check that.
pub const KVT_CONFORMANCE_CLOSES: kvt_conformance_flags_t = 1;

/// Results of a check. SKIPPED: it does not apply to the device, or an earlier failure prevents it.
pub type kvt_verdict_t = u32;

pub const KVT_VERDICT_PASSED: kvt_verdict_t = 0;
pub const KVT_VERDICT_SKIPPED: kvt_verdict_t = 1;
pub const KVT_VERDICT_FAILED: kvt_verdict_t = 2;

/// Limit: random trials.
const MAX_ROUNDS: u32 = 100_000;

/// Options of kvt_device_conformance.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_opts_t {
    pub struct_size: u64,
    /// KVT_CONFORMANCE_CLOSES or 0.
    pub flags: kvt_conformance_flags_t,
    /// Seed of all random choices.
    pub seed: u64,
    /// Time limit of an event; 0 = 30 s.
    pub patience_ns: u64,
    /// Random trials, at most 100,000; 0 = 40.
    pub rounds: u32,
    pub reserved: u32,
}

/// Number of checks with each result.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_report_t {
    pub struct_size: u64,
    pub passed: u32,
    pub skipped: u32,
    pub failed: u32,
    pub reserved: u32,
}

/// Receives the result of a check: its name, a KVT_VERDICT_*, and the reason (empty if it passed).
/// Texts are not NUL-terminated and valid during the call. Called on the calling thread. Must not
/// unwind.
pub type kvt_conformance_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        name: *const c_char,
        name_bytes: u64,
        verdict: kvt_verdict_t,
        why: *const c_char,
        why_bytes: u64,
    ),
>;

/// Runs the conformance suite on a device: memory, copies of all sizes, layouts and address spaces,
/// order, events, deadlines, rejections, threads, and its kernels. Run it first on a custom device.
/// It uses at most a few hundred MiB; nothing else should use the device meanwhile.
///
/// @param report  Receives each result; may be null.
/// @return KVT_OK, also if checks failed (see `out`); KVT_E_LIMIT.
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
        fail!(Limit, "rounds is {}: at most {MAX_ROUNDS} is accepted", given.rounds);
    }
    let report = report.map(|report| Callback::new(report, user_data, None));
    let mut forward = |name: &'static str, verdict: &Verdict| {
        let Some(report) = &report else { return };
        let (code, why) = match verdict {
            Verdict::Passed => (KVT_VERDICT_PASSED, ""),
            Verdict::Skipped(why) => (KVT_VERDICT_SKIPPED, why.as_str()),
            Verdict::Failed(why) => (KVT_VERDICT_FAILED, why.as_str()),
        };
        let (name_text, why_text) = (name.as_ptr().cast(), why.as_ptr().cast());
        let (name_bytes, why_bytes) = (name.len() as u64, why.len() as u64);
        report.call(|report, user_data| {
            report(user_data, name_text, name_bytes, code, why_text, why_bytes);
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
    let count = run(&device.device, &opts, &mut forward);
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
