//! GPUs through the CUDA driver: copies and kernels on streams of the device or of the engine, in
//! the engine's context or in the one that the process shares. No call waits for a whole device or
//! uses its default stream. `docs/internals/device.md` lists requirements on drivers.

mod abi;
#[cfg(all(test, not(feature = "shuttle")))]
mod abi_tests;
mod arena;
mod batches;
mod context;
mod copies;
mod copy_lists;
mod cufile;
mod cufile_abi;
#[cfg(all(test, not(feature = "shuttle")))]
mod cufile_abi_tests;
mod driver;
mod events;
mod files;
mod host_memory;
mod interop;
pub mod kernels;
mod launch;
mod measure;
mod open;
mod peers;
mod pointers;
mod submit;
mod sums;
mod user_events;
mod window;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::PathBuf;

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU64, Ordering};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::call::Call;
use crate::device::cuda::arena::Arena;
use crate::device::cuda::events::{Events, Outcome};
use crate::device::direct::Direct;
use crate::device::window::Window;
use crate::device::{Copy, Device, DeviceMemory, Event, Facts, Memory, State, Stream, check};
use crate::fail;
use abi::{Handle, is_sticky};
pub use batches::{ChosenMethods, CopyMethod, CopyMethodChoice};
use context::ContextGuard;
use driver::Driver;
use host_memory::HostRange;
use launch::Loaded;
pub use measure::{Description, Rate};
pub use window::CudaWindow;

/// Sleep of a wait with a deadline between polls, at first and at most.
const NAP_NS: (u64, u64) = (5_000, 500_000);
/// The device is lost after this many consecutive failed queries of an event, over at least this
/// time.
const MAX_REFUSALS: (u32, u64) = (64, 100_000_000);

/// Options to open a device.
#[derive(Clone, Debug, Default)]
pub struct CudaOpts {
    /// Path of the driver's library; none = the system's.
    pub library: Option<PathBuf>,
    /// Index of the device, unless a context is given.
    pub ordinal: u32,
    /// The engine's context (`CUcontext` as a number), which must outlive the device; 0 = the one
    /// that the process shares.
    pub context: u64,
    /// The engine's streams (`CUstream` as numbers) of that context; none = the device creates its
    /// own. Default streams are rejected.
    pub streams: Vec<u64>,
    /// Method of small copies.
    pub choice: CopyMethodChoice,
    /// Device memory of the engine to allocate from: address and length; (0, 0) = allocate from the
    /// driver.
    pub arena: (u64, u64),
    /// Indices of peer devices whose memory copies may name, allocated in their shared contexts.
    pub peers: Vec<u32>,
    /// Compute checksums of copied bytes in device memory, for comparison by the caller.
    pub verify: bool,
    /// Path of cuFile's library, loaded for direct file reads; none = the system's.
    pub cufile: Option<PathBuf>,
    /// Kernel's numbers of further file systems that cuFile reads directly or not at all, beside
    /// ext4 and XFS.
    pub file_systems: Vec<u64>,
}

/// A device that the driver found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
}

#[derive(Default)]
struct Inner {
    events: Events,
    /// Allocated memory: length and number, by address.
    allocations: BTreeMap<u64, (u64, u64)>,
    /// The engine's memory to allocate from; none = the driver.
    arena: Option<Arena>,
    hosts: BTreeMap<u64, HostRange>,
    /// Streams that wait for imported events.
    listeners: Vec<usize>,
    /// Queues of those that are leased.
    leased: Vec<usize>,
    runs: batches::Runs,
    copy_lists: copy_lists::CopyLists,
    user_events: user_events::UserEvents,
    sums: sums::Sums,
    /// The driver failed to copy in batches.
    batches_fail: bool,
    last: u64,
    /// Why no work can begin any more.
    lost: Option<Error>,
    closed: bool,
}

/// A GPU.
pub struct Cuda {
    driver: Driver,
    clock: Clock,
    ordinal: c_int,
    context: usize,
    owns_context: bool,
    streams: Vec<usize>,
    owns_streams: bool,
    max_pitch: u64,
    capability: u32,
    /// Shared memory that a thread block can have.
    shared_bytes: u32,
    reaches_pageable: bool,
    batch_call: Option<driver::BatchCall>,
    chosen: ChosenMethods,
    description: Description,
    kernels: u64,
    verifies: bool,
    peers: Vec<peers::Peer>,
    /// Kernels that failed to load.
    kernels_fail: AtomicU64,
    loaded: Mutex<Loaded>,
    files: files::Files,
    inner: Mutex<Inner>,
    /// For sleeps between polls.
    nap: Condvar,
}

/// Devices that the driver of a library finds.
pub fn probe(library: Option<&std::path::Path>) -> Result<Vec<DeviceInfo>> {
    let driver = Driver::load(library)?;
    (0..driver.devices()?).map(|place| driver.found(driver.device_at(place)?)).collect()
}

impl Cuda {
    fn enter(&self) -> Result<ContextGuard<'_>> {
        ContextGuard::enter(&self.driver, self.context)
    }

    /// Marks the device as lost: all work in flight has failed, and nothing can begin.
    fn lose(&self, inner: &mut Inner, why: &Error) {
        if inner.lost.is_none() {
            let text = format!("the device is lost: {}", why.message());
            log::error!("{text}");
            inner.lost = Some(Error::new(Status::Unavailable, text));
        }
        inner.signal_all_events(Some(Status::Unavailable));
        inner.events.fail_all(Status::Unavailable);
    }

    /// Queries an event and returns its outcome, if it has ended.
    fn look(&self, inner: &mut Inner, event: Event) -> Result<Option<Outcome>> {
        let known = inner.events.get(event)?;
        if known.outcome.is_none() && known.user_event.is_none() {
            match self.enter() {
                Ok(_guard) => self.query_driver(inner, event)?,
                // The query failed, the work perhaps not.
                Err(error) => self.refuse(inner, event, &error),
            }
        }
        Ok(inner.events.get(event)?.outcome)
    }

    /// Queries an event. The context is current.
    fn query_driver(&self, inner: &mut Inner, event: Event) -> Result<()> {
        let raw = inner.events.raw(event)?;
        // SAFETY: an event of this context, which is not destroyed while it is in the table.
        match unsafe { (self.driver.query)(raw) } {
            0 => inner.events.complete(event),
            abi::code::NOT_READY => inner.events.answered(event),
            code => self.answered(inner, event, "cuEventQuery", code),
        }
        Ok(())
    }

    /// Queries the pending events of a queue in order, up to the first that has not completed. The
    /// context is current.
    fn query_in_order(&self, inner: &mut Inner, queue: usize) {
        while let Some(event) = inner.events.first_open(queue) {
            // A pending event is in the table.
            let queried = self.query_driver(inner, event);
            if queried.is_err() || inner.events.first_open(queue) == Some(event) {
                break;
            }
        }
    }

    /// Handles an error of a query.
    fn answered(&self, inner: &mut Inner, event: Event, call: &str, code: c_int) {
        let error = self.driver.error(call, code);
        if is_sticky(code) {
            self.lose(inner, &error);
        } else {
            self.refuse(inner, event, &error);
        }
    }

    /// The query failed, the work perhaps not: it is repeated, but not forever.
    fn refuse(&self, inner: &mut Inner, event: Event, error: &Error) {
        let (count, for_ns) = inner.events.refused(event, self.clock.now_ns());
        if count >= MAX_REFUSALS.0 && for_ns >= MAX_REFUSALS.1 {
            self.lose(inner, &error.clone().within("the driver keeps rejecting queries"));
        }
    }

    fn check_alive(inner: &Inner) -> Result<()> {
        match &inner.lost {
            Some(why) => Err(why.clone()),
            None if inner.closed => Err(Status::Closed.into()),
            None => Ok(()),
        }
    }

    /// Blocks until an event has completed; false if the driver cannot.
    fn sleep_on(&self, event: Event, raw: Handle) -> bool {
        let Ok(inside) = self.enter() else { return false };
        // SAFETY: events are reused, and not destroyed before the device is dropped.
        let code = unsafe { (self.driver.sync_event)(raw) };
        drop(inside);
        let mut inner = self.inner.lock();
        match code {
            0 => inner.events.complete(event),
            code => self.answered(&mut inner, event, "cuEventSynchronize", code),
        }
        code == 0 || is_sticky(code)
    }
}

impl Device for Cuda {
    fn facts(&self) -> Facts {
        // Called for every batch: must not wait for a module that is being loaded.
        let failed = self.kernels_fail.load(Ordering::Acquire);
        Facts {
            name: "cuda",
            asynchronous: true,
            sums: self.verifies,
            reaches_device: true,
            wants_pinned: true,
            streams: self.streams.len() as u32,
            kernels: self.kernels & !failed,
        }
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        let (mut facts, inner) = (self.facts(), self.inner.lock());
        if inner.leased.contains(&(stream.0 as usize)) {
            facts.streams = stream.0 + 1;
        }
        check(&facts, stream, copies)?;
        self.check_sums(copies)?;
        self.put_copies(inner, stream.0 as usize, after, copies)
    }

    fn state(&self, event: Event) -> Result<State> {
        match self.look(&mut self.inner.lock(), event)? {
            None => Ok(State::Pending),
            Some(Ok(())) => Ok(State::Done),
            Some(Err(status)) => Err(status.into()),
        }
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        let mut nap_ns = NAP_NS.0;
        loop {
            let mut inner = self.inner.lock();
            if let Some(outcome) = self.look(&mut inner, event)? {
                return outcome.map_err(Error::from);
            }
            let is_user_event = inner.events.get(event)?.user_event.is_some();
            let raw = inner.events.raw(event)?;
            drop(inner);
            if deadline_ns == 0 && !is_user_event && self.sleep_on(event, raw) {
                continue;
            }
            let mut nap = nap_ns;
            if deadline_ns != 0 {
                let now_ns = self.clock.now_ns();
                if now_ns >= deadline_ns {
                    return Err(Status::Timeout.into());
                }
                nap = nap.min(deadline_ns - now_ns);
            }
            // The driver has no completion callback without side effects: poll.
            self.nap.wait_for(&mut self.inner.lock(), nap);
            nap_ns = (nap_ns * 2).min(NAP_NS.1);
        }
    }

    fn sums(&self, event: Event, sums: &mut [u64]) -> Result<usize> {
        self.sums_of(event, sums)
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        let mut inner = self.inner.lock();
        if let Ok(_guard) = self.enter() {
            for queue in 0..inner.events.queues() {
                self.query_in_order(&mut inner, queue);
            }
        }
        inner.events.report(ended)
    }

    fn release(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        if self.look(&mut inner, event)?.is_none() {
            return Err(Status::Busy.into());
        }
        let user_event = inner.events.get(event)?.user_event;
        user_event.into_iter().for_each(|number| inner.free_user_event(number));
        inner.events.forget(event)
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        if bytes == 0 {
            fail!(Invalid, "0 bytes of device memory");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let address = match &mut inner.arena {
            Some(arena) => arena.take(bytes)?,
            None => {
                drop(inner);
                let address = self.allocate_memory(bytes)?;
                inner = self.inner.lock();
                address
            }
        };
        inner.last += 1;
        let number = inner.last;
        inner.allocations.insert(address, (bytes, number));
        Ok(DeviceMemory { address, bytes, memory: Memory::Device, number })
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.allocations.get(&memory.address) != Some(&(memory.bytes, memory.number)) {
            fail!(
                Handle,
                "no allocation of this size at {:#x}: wrong device, or freed before",
                memory.address
            );
        }
        while let Some(event) = inner.events.user(memory) {
            if self.look(&mut inner, event)?.is_none() {
                fail!(Busy, "a batch in flight uses the memory at {:#x}", memory.address);
            }
        }
        inner.allocations.remove(&memory.address);
        if let Some(arena) = &mut inner.arena {
            arena.free_range(memory.address, memory.bytes);
            return Ok(());
        }
        drop(inner); // the driver may wait for all work of the device
        // The memory is no longer the device's, whatever the driver says.
        match self.enter() {
            Ok(_guard) => {
                // SAFETY: memory that this device allocated and frees once; nothing uses it, as the
                // caller promises.
                self.driver.note("cuMemFree", unsafe { (self.driver.free)(memory.address) });
            }
            Err(error) => log::warn!("device memory leaks: {}", error.message()),
        }
        Ok(())
    }

    unsafe fn register_host(&self, address: *mut u8, bytes: u64) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.register_host_range(address, bytes) }
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.unregister_host_range(address)
    }

    unsafe fn import_event(&self, raw: u64) -> Result<Event> {
        // SAFETY: the caller's promise.
        unsafe { self.import_engine_event(raw) }
    }

    unsafe fn stream_wait_event(&self, raw_stream: u64, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.engine_stream_wait(raw_stream, event) }
    }

    fn create_user_event(&self) -> Result<Event> {
        self.new_user_event()
    }

    fn signal_event(&self, event: Event) -> Result<()> {
        self.signal_user_event(event)
    }

    fn signal_all_events(&self) {
        self.inner.lock().signal_all_events(None);
        self.nap.notify_all();
    }

    unsafe fn launch(&self, stream: Stream, after: Option<Event>, calls: &[Call]) -> Result<Event> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_all(stream, after, calls) }
    }

    fn may_block_submit(&self, copies: &[Copy<'_>]) -> bool {
        let inner = self.inner.lock();
        copies.iter().any(|copy| inner.may_block(copy))
    }

    fn lease_stream(&self) -> Result<Stream> {
        self.lease_listener()
    }

    fn return_stream(&self, stream: Stream) {
        self.inner.lock().leased.retain(|queue| *queue != stream.0 as usize);
    }

    fn window_granularity(&self) -> Result<u64> {
        window::granularity(self)
    }

    fn window(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        Ok(Arc::new(CudaWindow::new(self, bytes)?))
    }

    fn direct(&self) -> Result<&dyn Direct> {
        self.begin_files()?;
        Ok(self)
    }

    fn free_bytes(&self) -> Option<u64> {
        if let Some(arena) = &self.inner.lock().arena {
            return Some(arena.free_bytes());
        }
        let _guard = self.enter().ok()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: places for two numbers.
        let code = unsafe { (self.driver.memory_info)(&mut free, &mut all) };
        (code == 0).then_some(free as u64)
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.signal_all_events(None);
        drop(inner);
        self.nap.notify_all();
        loop {
            let Some(event) = self.inner.lock().events.last_open() else { return Ok(()) };
            match self.wait(event, deadline_ns) {
                Err(error) if error.status() == Status::Timeout => {
                    fail!(Busy, "batches are still in flight")
                }
                _ => {} // its owner learns the outcome
            }
        }
    }
}
