//! Closing devices of the C ABI while other threads are inside them.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use kvtier::ffi::base::*;
use kvtier::ffi::device::*;
use kvtier::ffi::runtime::*;
use kvtier::ffi::store::*;

/// State of the custom device.
#[derive(Default)]
struct World {
    has_come: AtomicBool,
    is_waiting: AtomicBool,
    is_closed: AtomicBool,
    is_destroyed: AtomicBool,
}

impl World {
    fn of(user_data: *mut c_void) -> &'static World {
        // SAFETY: the tests hand over a world that stays for ever.
        unsafe { &*user_data.cast::<World>() }
    }
}

unsafe extern "C" fn submit(
    _: *mut c_void,
    _: u32,
    _: u64,
    _: *const kvt_copy_rows_t,
    _: u64,
    _: u64,
    event: *mut u64,
) -> kvt_status_t {
    // SAFETY: the library's promise.
    unsafe { event.write(1) };
    KVT_OK
}

unsafe extern "C" fn query(user_data: *mut c_void, _: u64) -> kvt_status_t {
    if World::of(user_data).has_come.load(SeqCst) { KVT_OK } else { KVT_E_AGAIN }
}

/// It is late: it returns only some time after its event has come, or when the device is closed.
unsafe extern "C" fn wait(user_data: *mut c_void, _: u64, _: u64) -> kvt_status_t {
    let world = World::of(user_data);
    world.is_waiting.store(true, SeqCst);
    let mut come = None;
    while !world.is_closed.load(SeqCst) {
        if world.has_come.load(SeqCst) {
            let since: &mut Instant = come.get_or_insert_with(Instant::now);
            if since.elapsed() > Duration::from_millis(200) {
                break;
            }
        }
        std::thread::yield_now();
    }
    KVT_OK
}

unsafe extern "C" fn destroy(user_data: *mut c_void) {
    World::of(user_data).is_destroyed.store(true, SeqCst);
}

/// All zeros but its size.
macro_rules! new {
    ($kind:ty) => {{
        // SAFETY: integers, pointers and nullable functions.
        let mut new: $kind = unsafe { std::mem::zeroed() };
        new.struct_size = size_of::<$kind>() as u64;
        new
    }};
}

fn runtime() -> *mut kvt_runtime_t {
    let (opts, mut runtime) = (new!(kvt_runtime_opts_t), null_mut());
    // SAFETY: structs and places.
    assert_eq!(unsafe { kvt_runtime_open(&opts, &mut runtime, null_mut()) }, KVT_OK);
    runtime
}

fn end(mut runtime: *mut kvt_runtime_t) {
    // SAFETY: a handle.
    let closed = unsafe { kvt_runtime_close(&mut runtime, 0, null_mut(), null_mut()) };
    assert_eq!(closed, KVT_OK);
}

/// A device of the engine's, with an event of which `world` says whether it has come.
fn open(runtime: *mut kvt_runtime_t, world: &'static World) -> (*mut kvt_device_t, u64) {
    let mut custom = new!(kvt_device_custom_t);
    custom.streams = 1;
    custom.submit = Some(submit);
    custom.query = Some(query);
    custom.wait = Some(wait);
    custom.destroy = Some(destroy);
    custom.user_data = std::ptr::from_ref(world).cast_mut().cast();
    let mut opts = new!(kvt_device_opts_t);
    (opts.kind, opts.custom) = (KVT_DEVICE_KIND_CUSTOM, &custom);
    let (mut device, mut event) = (null_mut(), 0);
    // SAFETY: structs and places.
    unsafe {
        assert_eq!(kvt_device_open(runtime, &opts, &mut device, null_mut()), KVT_OK);
        let stride = size_of::<kvt_copy_t>() as u64;
        let begun = kvt_device_copy(device, 0, 0, null_mut(), 0, stride, &mut event, null_mut());
        assert_eq!(begun, KVT_OK);
    }
    (device, event)
}

#[test]
fn close_waits_for_callers_inside_the_device() {
    let world: &World = Box::leak(Box::default());
    let runtime = runtime();
    let (mut device, event) = open(runtime, world);
    let handle = device.expose_provenance();
    let waits = std::thread::spawn(move || {
        let device = std::ptr::with_exposed_provenance_mut(handle);
        // SAFETY: a handle.
        unsafe { kvt_device_wait(device, event, 0, null_mut()) }
    });
    let start = Instant::now();
    while !world.is_waiting.load(SeqCst) {
        assert!(start.elapsed() < Duration::from_secs(300), "no thread waits");
        std::thread::yield_now();
    }
    world.has_come.store(true, SeqCst);
    // SAFETY: a handle.
    assert_eq!(unsafe { kvt_device_close(&mut device, 0, null_mut()) }, KVT_OK);
    let is_destroyed = world.is_destroyed.load(SeqCst);
    world.is_closed.store(true, SeqCst);
    assert_eq!(waits.join().expect("no panic"), KVT_OK);
    assert!(is_destroyed, "close returned before the custom device was destroyed");
    end(runtime);
}

#[test]
fn closing_device_rejects_new_users() {
    let world: &World = Box::leak(Box::default());
    let runtime = runtime();
    let (mut device, _) = open(runtime, world);
    world.is_closed.store(true, SeqCst);
    // SAFETY: a handle; the deadline has passed.
    assert_eq!(unsafe { kvt_device_close(&mut device, 1, null_mut()) }, KVT_E_BUSY);
    let (mut opts, mut store) = (new!(kvt_store_opts_t), null_mut());
    let spec = b"store(host=1MiB)";
    (opts.spec, opts.spec_bytes) = (spec.as_ptr().cast(), spec.len() as u64);
    opts.device = device;
    // SAFETY: structs and places.
    let opened = unsafe { kvt_store_open(runtime, null(), &opts, &mut store, null_mut()) };
    assert_eq!(opened, KVT_E_CLOSED);
    world.has_come.store(true, SeqCst);
    // SAFETY: a handle.
    assert_eq!(unsafe { kvt_device_close(&mut device, 0, null_mut()) }, KVT_OK);
    assert!(world.is_destroyed.load(SeqCst));
    end(runtime);
}

static SAID: AtomicI32 = AtomicI32::new(KVT_OK);

unsafe extern "C" fn closes(
    user_data: *mut c_void,
    _: *const c_char,
    _: u64,
    _: u32,
    _: *const c_char,
    _: u64,
) {
    let mut device: *mut kvt_device_t = user_data.cast();
    // SAFETY: a handle.
    SAID.store(unsafe { kvt_device_close(&mut device, 0, null_mut()) }, SeqCst);
}

#[test]
fn conformance_report_callback_may_not_reenter() {
    let runtime = runtime();
    let (mut opts, mut device) = (new!(kvt_device_opts_t), null_mut());
    opts.kind = KVT_DEVICE_KIND_HOST;
    let mut how = new!(kvt_conformance_opts_t);
    how.rounds = 1;
    let mut out = new!(kvt_conformance_report_t);
    // SAFETY: structs, places and handles.
    unsafe {
        assert_eq!(kvt_device_open(runtime, &opts, &mut device, null_mut()), KVT_OK);
        let user_data = device.cast();
        let status =
            kvt_device_conformance(device, &how, Some(closes), user_data, &mut out, null_mut());
        assert_eq!((status, out.failed), (KVT_OK, 0));
        assert_eq!(SAID.load(SeqCst), KVT_E_REENTRANT);
        assert_eq!(kvt_device_close(&mut device, 0, null_mut()), KVT_OK);
    }
    end(runtime);
}
