//! A GPU by way of the CUDA driver: copies on streams of its own or of the engine's, in the
//! engine's context or the one that a process shares. Nothing here ever waits for a whole
//! device or for its default stream.

mod copies;
mod driver;
mod inside;
pub mod kernels;
mod known;
mod open;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::path::PathBuf;

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Condvar, Guard, Mutex};
use crate::device::slots::Slots;
use crate::device::{Copy, Device, DeviceMemory, Event, Facts, Memory, State, Stream, check};
use crate::fail;
use driver::{Driver, Handle, is_sticky};
use inside::Inside;
use known::Known;

/// How long who waits with a deadline sleeps between looks, at first and at most.
const NAP_NS: (u64, u64) = (5_000, 500_000);

/// How to open a device.
#[derive(Clone, Debug, Default)]
pub struct CudaOpts {
    /// The driver's library; none = the system's.
    pub library: Option<PathBuf>,
    /// Which device, where no context is given.
    pub ordinal: u32,
    /// The engine's context (`CUcontext` as a number), which has to outlive the device; 0 = the
    /// one that the process shares.
    pub context: u64,
    /// The engine's streams (`CUstream` as numbers), of that context; none = some of its own.
    pub streams: Vec<u64>,
}

/// What a driver says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// Its compute capability, as 90 for 9.0.
    pub capability: u32,
}

struct Inner {
    known: Slots<Known>,
    ended: VecDeque<Event>,
    /// Events of the driver that may be used again.
    spare: Vec<Known>,
    given: BTreeMap<u64, u64>,
    last: u64,
    /// Why nothing can be begun any more.
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
    inner: Mutex<Inner>,
    /// For those who sleep until they ask again; nobody wakes them.
    nap: Condvar,
}

/// What the driver of a library finds.
pub fn probe(library: Option<&std::path::Path>) -> Result<Vec<Found>> {
    let driver = Driver::load(library)?;
    (0..driver.devices()?).map(|ordinal| driver.found(ordinal)).collect()
}

impl Cuda {
    fn enter(&self) -> Result<Inside<'_>> {
        Inside::enter(&self.driver, self.context)
    }

    fn stream(&self, stream: Stream) -> Handle {
        self.streams[stream.0 as usize] as Handle
    }

    /// The driver does not know any more what its device does: all that is under way has
    /// failed, and nothing more is begun.
    fn lose(inner: &mut Inner, why: &Error) {
        let text = format!("the device is lost: {}", why.message());
        inner.lost.get_or_insert(Error::new(Status::Unavailable, text));
        for (event, known) in inner.known.iter_mut() {
            if known.outcome.is_none() {
                known.outcome = Some(Err(Status::Unavailable));
                inner.ended.push_back(event);
            }
        }
    }

    /// Looks how far an event is, and notes it.
    fn look(
        &self,
        inner: &mut Inner,
        event: Event,
    ) -> Result<Option<std::result::Result<(), Status>>> {
        let known = inner.known.get(event)?;
        if known.outcome.is_some() {
            return Ok(known.outcome);
        }
        let raw = known.event as Handle;
        let inside = self.enter()?;
        // SAFETY: an event of this context, which is not given back while it is known.
        let mut code = unsafe { (self.driver.query)(raw) };
        if code != 0 && code != driver::code::NOT_READY && !is_sticky(code) {
            // The question failed, the work perhaps not.
            // SAFETY: as above.
            code = unsafe { (self.driver.sync_event)(raw) };
        }
        drop(inside);
        match code {
            driver::code::NOT_READY => return Ok(None),
            0 => {
                inner.known.get_mut(event)?.outcome = Some(Ok(()));
                inner.ended.push_back(event);
            }
            code => {
                Cuda::lose(inner, &self.driver.error("cuEventQuery", code));
            }
        }
        Ok(inner.known.get(event)?.outcome)
    }

    /// An event of the driver's that nobody uses.
    fn take_known(&self, inner: &mut Inner) -> Result<Known> {
        match inner.spare.pop() {
            Some(known) => Ok(known),
            None => Known::new(&self.driver),
        }
    }

    fn check_alive(inner: &Guard<'_, Inner>) -> Result<()> {
        match &inner.lost {
            Some(why) => Err(why.clone()),
            None if inner.closed => Err(Status::Closed.into()),
            None => Ok(()),
        }
    }
}

impl Device for Cuda {
    fn facts(&self) -> Facts {
        Facts {
            name: "cuda",
            asynchronous: true,
            sums: false,
            reaches_device: true,
            wants_pinned: true,
            streams: self.streams.len() as u32,
            kernels: 0,
        }
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        check(&self.facts(), stream, copies)?;
        let stream = self.stream(stream);
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let waits = match after.map(|event| self.look(&mut inner, event)).transpose()? {
            Some(Some(Err(status))) => return Err(status.into()),
            Some(None) => after,
            _ => None,
        };
        let _inside = self.enter()?;
        if !self.owns_streams {
            self.refuse_capturing(stream)?;
        }
        inner.known.reserve()?;
        let mut known = self.take_known(&mut inner)?;
        if let Err(error) = known.note(copies) {
            inner.spare.push(known);
            return Err(error);
        }
        let event = inner.known.insert(known)?;
        let raw = inner.known.get(event)?.event as Handle;
        let issued = (|| {
            if let Some(before) = waits {
                let before = inner.known.get(before)?.event as Handle;
                // SAFETY: an event and a stream of this context.
                let code = unsafe { (self.driver.stream_wait)(stream, before, 0) };
                self.driver.check("cuStreamWaitEvent", code)?;
            }
            for copy in copies.iter() {
                // SAFETY: the caller's promise.
                unsafe { self.issue(copy, stream)? };
            }
            // SAFETY: as above.
            self.driver.check("cuEventRecord", unsafe { (self.driver.record)(raw, stream) })
        })();
        let Err(error) = issued else { return Ok(event) };
        // What was put on the stream already must have ended before the caller hears of it.
        // SAFETY: a stream of this context.
        if unsafe { (self.driver.sync_stream)(stream) } != 0 {
            Cuda::lose(&mut inner, &error);
        }
        let known = inner.known.remove(event)?;
        inner.ended.retain(|other| *other != event);
        inner.spare.push(known);
        Err(error)
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
            let raw = inner.known.get(event)?.event as Handle;
            drop(inner);
            if deadline_ns == 0 {
                let _inside = self.enter()?;
                // SAFETY: events are used again and not given back before the device is dropped.
                let code = unsafe { (self.driver.sync_event)(raw) };
                if code == 0 || is_sticky(code) {
                    continue;
                }
            }
            let mut nap = nap_ns;
            if deadline_ns != 0 {
                let now_ns = self.clock.now_ns();
                if now_ns >= deadline_ns {
                    return Err(Status::Timeout.into());
                }
                nap = nap.min(deadline_ns - now_ns);
            }
            // The driver tells nobody when an event comes: it is asked again after a while.
            self.nap.wait_for(&mut self.inner.lock(), nap);
            nap_ns = (nap_ns * 2).min(NAP_NS.1);
        }
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        let mut inner = self.inner.lock();
        let is_open =
            |(event, known): (Event, &mut Known)| known.outcome.is_none().then_some(event);
        let open: Vec<Event> = inner.known.iter_mut().filter_map(is_open).collect();
        for event in open {
            if self.look(&mut inner, event).is_err() {
                break; // no context: it is looked at again
            }
        }
        let count = ended.len().min(inner.ended.len());
        for (slot, event) in ended.iter_mut().zip(inner.ended.drain(..count)) {
            *slot = event;
        }
        count
    }

    fn release(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        if self.look(&mut inner, event)?.is_none() {
            return Err(Status::Busy.into());
        }
        inner.ended.retain(|other| *other != event);
        let known = inner.known.remove(event)?;
        inner.spare.push(known);
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let _inside = self.enter()?;
        let mut address = 0;
        let wanted = usize::try_from(bytes).map_err(|_| Status::Limit)?;
        // SAFETY: a place for an address.
        let code = unsafe { (self.driver.allocate)(&mut address, wanted) };
        self.driver.check("cuMemAlloc", code).map_err(|error| match error.status() {
            Status::NoMem => error.within(&format!("{bytes} bytes of device memory")),
            _ => error,
        })?;
        inner.last += 1;
        let number = inner.last;
        inner.given.insert(number, address);
        Ok(DeviceMemory { address, bytes, memory: Memory::Device, number })
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.given.get(&memory.number) != Some(&memory.address) {
            fail!(Handle, "the memory at {:#x} is not the device's, or free", memory.address);
        }
        let uses = |(event, known): (Event, &mut Known)| known.uses(memory).then_some(event);
        let users: Vec<Event> = inner.known.iter_mut().filter_map(uses).collect();
        for event in users {
            if self.look(&mut inner, event)?.is_none() {
                fail!(Busy, "a batch uses the memory at {:#x}", memory.address);
            }
        }
        inner.given.remove(&memory.number);
        let _inside = self.enter()?;
        // SAFETY: memory that this device took and gives back once; nobody uses it, as the
        // caller promises.
        let code = unsafe { (self.driver.free)(memory.address) };
        self.driver.check("cuMemFree", code)
    }

    fn free_bytes(&self) -> Option<u64> {
        let _inside = self.enter().ok()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: places for two numbers.
        let code = unsafe { (self.driver.memory_info)(&mut free, &mut all) };
        (code == 0).then_some(free as u64)
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.lock().closed = true;
        loop {
            let mut inner = self.inner.lock();
            let is_open =
                |(event, known): (Event, &mut Known)| known.outcome.is_none().then_some(event);
            let Some(event) = inner.known.iter_mut().find_map(is_open) else { return Ok(()) };
            drop(inner);
            match self.wait(event, deadline_ns) {
                Err(error) if error.status() == Status::Timeout => {
                    fail!(Busy, "batches are under way")
                }
                _ => {} // how it ended is its owner's to know
            }
        }
    }
}

impl Cuda {
    /// Copies do not go into a graph that the engine is making: they would happen whenever it is
    /// launched, and never now.
    fn refuse_capturing(&self, stream: Handle) -> Result<()> {
        let mut state = 0;
        // SAFETY: a stream of the engine's, of this context, and a place for a number.
        let code = unsafe { (self.driver.is_capturing)(stream, &mut state) };
        self.driver.check("cuStreamIsCapturing", code)?;
        if state != 0 {
            fail!(State, "the stream is making a graph: give the device others, or none");
        }
        Ok(())
    }
}
