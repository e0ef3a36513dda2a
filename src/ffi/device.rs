//! Devices: opened, looked at, closed.

use std::ffi::c_char;
use std::os::unix::ffi::OsStrExt;

use crate::base::callback::refuse_reentry;
use crate::base::core::Core;
use crate::base::op::Owner;
use crate::base::slab::Pin;
use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::cuda::{CopyMethodChoice, Cuda, CudaOpts};
use crate::device::host::Host;
use crate::device::op_wait::SignalOnShutdown;
use crate::device::simulated::{Simulated, SimulatedOpts};
use crate::device::{Device, MAX_STREAMS};
use crate::fail;
use crate::ffi::abi::{
    Access, Plain, capi, check_out, enter, free, give_text, insert, inspect, known_flags, noun,
    pin, read, require, text_bytes, write,
};
use crate::ffi::device_custom::{kvt_device_custom_t, with_custom};
use crate::ffi::error::kvt_error_t;
use crate::ffi::policy_use::numbers;
use crate::ffi::runtime::{kvt_runtime_t, on_runtime};
use crate::ffi::status::kvt_status_t;

/// Who copies between an engine's memory and the library's: the processor, a GPU, or the engine
/// itself. Stores and streamers are opened with one. Internally locked: any thread may use it.
pub struct kvt_device_t(());

/// The processor copies, done when the call returns.
pub const KVT_DEVICE_HOST: u32 = 1;
/// A GPU by way of the CUDA driver, which is loaded when the device is opened.
pub const KVT_DEVICE_CUDA: u32 = 2;
/// The engine copies: kvt_device_custom_t.
pub const KVT_DEVICE_CUSTOM: u32 = 3;
/// None at all: it takes its time and spoils what is not waited for. For tests.
pub const KVT_DEVICE_SIMULATED: u32 = 4;

/// Work goes on after a call has returned.
pub const KVT_DEVICE_ASYNCHRONOUS: u64 = 1;
/// It sums what it copies.
pub const KVT_DEVICE_SUMS: u64 = 2;
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
    /// KVT_DEVICE_HOST, _CUDA, _CUSTOM or _SIMULATED.
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
    /// The kernels it has: 1 << KVT_LAUNCH_* for each.
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

/// Calls `body` with a device.
pub(crate) fn with_device<R>(
    handle: *const kvt_device_t,
    body: impl FnOnce(&Arc<dyn Device>) -> Result<R>,
) -> Result<R> {
    body(&enter(handle)?.device)
}

/// The same, with one whose runtime takes new work.
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
    if cuda && !is(KVT_DEVICE_CUDA)
        || simulated && !is(KVT_DEVICE_SIMULATED)
        || given.flags != 0 && !is(KVT_DEVICE_CUDA) && !is(KVT_DEVICE_SIMULATED)
        || given.custom.is_null() == is(KVT_DEVICE_CUSTOM)
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
            KVT_DEVICE_HOST => put(Arc::new(Host::default())),
            KVT_DEVICE_CUDA => {
                let opts = cuda_opts(&given)?;
                put(Arc::new(Cuda::open(clock, &opts)?))
            }
            KVT_DEVICE_CUSTOM => with_custom(given.custom, clock, |device| put(Arc::new(device))),
            KVT_DEVICE_SIMULATED => put(Arc::new(Simulated::new(clock, simulated_opts(&given))?)),
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
                | flag(facts.sums, KVT_DEVICE_SUMS)
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
    let words = with_device(device, |device| Ok(device.describe()))?;
    give_text(&words, out, out_capacity, out_bytes)
}
