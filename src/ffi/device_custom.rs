//! Devices of the engine's own: a table of callbacks, for accelerators that this library does not
//! know and for engines that have copies and memory of their own.

use std::ffi::c_void;
use std::mem::offset_of;

use crate::base::callback::Foreign as Callback;
use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::device::Facts;
use crate::device::call::Call;
use crate::device::foreign::{Engine, Foreign, Rows};
use crate::fail;
use crate::ffi::abi::{Plain, known_flags, read};
use crate::ffi::device::{KVT_DEVICE_HAS_MEMORY, KVT_DEVICE_WANTS_PINNED};
use crate::ffi::device_kernel::kvt_kernel_t;
use crate::ffi::logging::kvt_destroy_fn;
use crate::ffi::status::kvt_status_t;
use crate::ffi::view::{KVT_MEMORY_DEVICE, KVT_MEMORY_HOST};

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
macro_rules! same_places {
    ($($ours:ident $theirs:ident,)*) => {
        $(const _: () = assert!(offset_of!(kvt_copy_rows_t, $ours) == offset_of!(Rows, $theirs));)*
    };
}

same_places!(
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
        event_out: *mut u64,
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
    unsafe extern "C" fn(user_data: *mut c_void, bytes: u64, address_out: *mut u64) -> kvt_status_t,
>;

/// Takes it back.
pub type kvt_device_free_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64)>;

/// What it has left to give.
pub type kvt_device_free_bytes_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, bytes_out: *mut u64) -> kvt_status_t>;

/// Learns of host memory that copies use again and again; with 0 bytes: that it goes.
pub type kvt_device_register_host_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, address: u64, bytes: u64) -> kvt_status_t>;

/// Makes an event of its own that comes with one that the engine names: see kvt_device_import_event.
/// The one that is named stays the engine's.
pub type kvt_device_import_event_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw: u64, event_out: *mut u64) -> kvt_status_t,
>;

/// Has a stream that the engine names go on only after an event: see kvt_device_stream_wait. It is not
/// called for an event that has come already.
pub type kvt_device_stream_wait_fn = Option<
    unsafe extern "C" fn(user_data: *mut c_void, raw_stream: u64, event: u64) -> kvt_status_t,
>;

/// Makes an event that comes when `keep` says so: what is put behind it waits until then.
pub type kvt_device_create_event_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, event_out: *mut u64) -> kvt_status_t>;

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
        event_out: *mut u64,
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
    /// The kernels that `launch` knows: 1 << KVT_LAUNCH_* for each.
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
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
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
