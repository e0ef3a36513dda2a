//! Opens a device, and releases the driver's objects that it holds.

use std::ffi::c_int;

use crate::base::clock::Clock;
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::AtomicU64;
use crate::base::sync::{Condvar, Mutex};
use crate::device::MAX_STREAMS;
use crate::device::cuda::abi::{
    BLOCK_SHARED, DEFAULT_STREAMS, Handle, MAX_PITCH, PLAIN_SHARED_BYTES, Pointer,
    REACHES_PAGEABLE, SAME_ADDRESSES,
};
use crate::device::cuda::arena::Arena;
use crate::device::cuda::batches::ChosenMethods;
use crate::device::cuda::context::ContextGuard;
use crate::device::cuda::driver::Driver;
use crate::device::cuda::files::Files;
use crate::device::cuda::host_memory::Registration;
use crate::device::cuda::launch::{Loaded, kernels};
use crate::device::cuda::measure::Description;
use crate::device::cuda::pointers::CheckedRanges;
use crate::device::cuda::{Cuda, CudaOpts, Inner};
use crate::fail;

/// Default number of streams: two for each direction.
const STREAMS: u32 = 4;

impl Cuda {
    /// Opens a device. [`Status::Unavailable`] says why there is none.
    pub fn open(clock: Clock, opts: &CudaOpts) -> Result<Cuda> {
        if opts.streams.len() > MAX_STREAMS as usize {
            fail!(Invalid, "{} streams: at most {MAX_STREAMS} are accepted", opts.streams.len());
        }
        if let Some(stream) = opts.streams.iter().find(|one| DEFAULT_STREAMS.contains(one)) {
            fail!(
                Invalid,
                "stream {stream:#x} is a default stream, which all of the process shares: create one"
            );
        }
        let driver = Driver::load(opts.library.as_deref())?;
        let count = driver.devices()?;
        let place = c_int::try_from(opts.ordinal).ok().filter(|place| *place < count);
        let Some(place) = place else {
            fail!(Unavailable, "device {}: the driver has {count} devices", opts.ordinal);
        };
        let ordinal = driver.device_at(place)?;
        let batch_call = driver.batch_call();
        let mut cuda = Cuda {
            driver,
            clock,
            ordinal,
            context: opts.context as usize,
            owns_context: opts.context == 0,
            streams: opts.streams.iter().map(|stream| *stream as usize).collect(),
            owns_streams: opts.streams.is_empty(),
            max_pitch: 0,
            capability: 0,
            shared_bytes: PLAIN_SHARED_BYTES,
            reaches_pageable: false,
            batch_call,
            chosen: ChosenMethods::default(),
            description: Description::default(),
            kernels: kernels(),
            verifies: opts.verify,
            peers: Vec::new(),
            kernels_fail: AtomicU64::new(0),
            loaded: Mutex::new(Loaded::default()),
            files: Files::new(opts),
            inner: Mutex::new(Inner::default()),
            nap: Condvar::new(),
        };
        cuda.begin()?;
        cuda.take_arena(opts.arena)?;
        cuda.open_peers(&opts.peers, count)?;
        if opts.verify {
            cuda.load_sum_kernel()?;
        }
        cuda.choose(opts.choice);
        Ok(cuda)
    }

    /// Acquires contexts, streams and attributes; dropping the device releases them.
    fn begin(&mut self) -> Result<()> {
        if self.owns_context {
            self.context = self.driver.retain(self.ordinal)?;
        }
        let inside = ContextGuard::enter(&self.driver, self.context)?;
        self.ordinal = inside.ordinal()?;
        self.max_pitch = self.driver.attribute(MAX_PITCH, self.ordinal)?.max(0) as u64;
        self.reaches_pageable = self.driver.attribute(REACHES_PAGEABLE, self.ordinal)? != 0;
        // Otherwise a batched copy would use addresses that are invalid on the device, and lose it.
        if self.driver.attribute(SAME_ADDRESSES, self.ordinal)? == 0 {
            self.batch_call = None;
        }
        let shared = self.driver.attribute(BLOCK_SHARED, self.ordinal)?;
        self.shared_bytes = u32::try_from(shared).unwrap_or(0).max(PLAIN_SHARED_BYTES);
        let found = self.driver.found(self.ordinal)?;
        self.capability = found.capability;
        self.description.found(&found, self.driver.version()?);
        for &stream in &self.streams {
            self.check_stream(stream as u64)?;
        }
        let mut own = Vec::new();
        if self.owns_streams {
            for _ in 0..STREAMS {
                let made = self.driver.make_stream();
                let is_over = made.is_err();
                own.push(made);
                if is_over {
                    break;
                }
            }
        }
        drop(inside);
        for stream in own {
            self.streams.push(stream?);
        }
        let mut inner = self.inner.lock();
        for _ in &self.streams {
            inner.events.add_queue();
        }
        Ok(())
    }
}

impl Cuda {
    /// Takes over memory that the engine provides.
    fn take_arena(&self, (address, bytes): (u64, u64)) -> Result<()> {
        if (address, bytes) == (0, 0) {
            return Ok(());
        }
        let arena = Arena::new(address, bytes)?;
        let mut inner = self.inner.lock();
        let _guard = self.enter()?;
        self.check_range(&inner, &mut CheckedRanges::default(), address, bytes)?;
        inner.arena = Some(arena);
        Ok(())
    }

    /// Allocates device memory.
    pub(super) fn allocate_memory(&self, bytes: u64) -> Result<Pointer> {
        let _guard = self.enter()?;
        let mut address = 0;
        let needed = usize::try_from(bytes).map_err(|_| Status::Limit)?;
        // SAFETY: a place for an address.
        let code = unsafe { (self.driver.allocate)(&mut address, needed) };
        self.driver.check("cuMemAlloc", code).map_err(|error| match error.status() {
            Status::NoMem => error.within(&format!("{bytes} bytes of device memory")),
            _ => error,
        })?;
        Ok(address)
    }

    /// Releases everything that this device created, in its context.
    fn release_all(&self, inner: &mut Inner) {
        let driver = &self.driver;
        let listeners = inner.listeners.iter().copied();
        let own = self.streams.iter().copied().filter(|_| self.owns_streams).chain(listeners);
        // SAFETY: created by this device. Its own streams are synchronized before anything else is
        // destroyed; `close` has waited for those of others.
        unsafe {
            for stream in own {
                driver.note("cuStreamSynchronize", (driver.sync_stream)(stream as Handle));
                driver.note("cuStreamDestroy", (driver.destroy_stream)(stream as Handle));
            }
            for module in self.loaded.lock().modules() {
                driver.note("cuModuleUnload", (driver.unload_module)(module));
            }
            for &address in inner.allocations.keys().filter(|_| inner.arena.is_none()) {
                driver.note("cuMemFree", (driver.free)(address));
            }
            for (host, device) in inner.copy_lists.taken() {
                driver.note("cuMemFreeHost", (driver.free_host)(host as Handle));
                driver.note("cuMemFree", (driver.free)(device));
            }
            for host in inner.sums.host_allocations() {
                driver.note("cuMemFreeHost", (driver.free_host)(host as Handle));
            }
            for address in inner.sums.taken() {
                driver.note("cuMemFree", (driver.free)(address));
            }
            self.free_page(inner);
            for event in inner.user_events.pending_waits().chain(inner.events.all()) {
                driver.note("cuEventDestroy", (driver.destroy_event)(event));
            }
        }
        for (&address, range) in &inner.hosts {
            if range.registration == Registration::Ours {
                driver.note("cuMemHostUnregister", self.unregister_raw(address));
            }
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if self.context == 0 {
            return;
        }
        self.inner.lock().signal_all_events(Some(Status::Closed));
        match self.enter() {
            Ok(_guard) => {
                self.files.close(); // before registered memory is freed
                self.release_all(&mut self.inner.lock());
            }
            Err(error) => log::warn!("resources of a CUDA device leak: {}", error.message()),
        }
        self.release_peers();
        if self.owns_context {
            // SAFETY: retained once.
            let code = unsafe { (self.driver.release_primary)(self.ordinal) };
            self.driver.note("cuDevicePrimaryCtxRelease", code);
        }
    }
}
