//! Events that come when the host says so. Each is a number in host memory that the device reads:
//! a stream that is behind one waits until the number is as large as it has to be
//! (`cuStreamWaitValue32`), and the host writes that. Numbers only grow, so whoever waits for a
//! number that was used again since goes on all the same.

use std::ffi::c_void;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::device::cuda::known::Known;
use crate::device::cuda::words::{
    HOST_MAPPED, HOST_PORTABLE, Handle, Pointer, WAIT_AS_LARGE, code,
};
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Event, MAX_PROMISES};
use crate::fail;

/// The memory of all of them.
const PAGE_BYTES: usize = MAX_PROMISES * size_of::<u32>();

/// The promises of a device.
#[derive(Default)]
pub struct Promises {
    /// Where the numbers are, for the host and for the device; 0 = nowhere yet.
    host: usize,
    device: Pointer,
    /// For each number the value that it gets next, and the event that is open for it.
    all: Vec<(u32, Option<Event>)>,
    /// Those that no event has.
    free: Vec<usize>,
    /// Events behind waits that were put on streams of the engine's.
    passing: Vec<Known>,
    /// Whether a stream has passed its wait cannot be known: the memory stays.
    stays: bool,
}

impl Promises {
    fn word(&self, number: usize) -> &AtomicU32 {
        let place = std::ptr::with_exposed_provenance::<AtomicU32>(self.host);
        // SAFETY: one of the numbers of the page, which stays for as long as there are promises;
        // the host uses it by atomic operations only, and the device only reads.
        unsafe { &*place.add(number) }
    }

    /// Where the device finds a number, and how large it has to be.
    fn wanted(&self, number: usize) -> (Pointer, u32) {
        let at = self.device + (number * size_of::<u32>()) as Pointer;
        (at, self.all[number].0)
    }

    fn open(&self) -> Vec<Event> {
        self.all.iter().filter_map(|(_, event)| *event).collect()
    }

    /// The events that are still on streams of the engine's.
    pub fn passing(&self) -> impl Iterator<Item = Handle> {
        self.passing.iter().map(|known| known.event as Handle)
    }
}

impl Cuda {
    /// What [`crate::device::Device::promise`] says.
    pub(super) fn make_promise(&self) -> Result<Event> {
        if self.driver.wait_value.is_none() {
            fail!(Unsupported, "the driver has no stream wait for a number (cuStreamWaitValue32)");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let _inside = self.enter()?;
        let inner = &mut *inner;
        if inner.promises.host == 0 {
            self.take_page(inner)?;
        }
        let Some(&number) = inner.promises.free.last() else {
            fail!(Again, "{MAX_PROMISES} promises are known, as many as can be");
        };
        let event = inner.events.promise(&self.driver, number)?;
        inner.promises.free.pop();
        let row = &mut inner.promises.all[number];
        *row = (row.0.wrapping_add(1), Some(event));
        Ok(event)
    }

    /// Memory for the numbers. The context is entered.
    fn take_page(&self, inner: &mut Inner) -> Result<()> {
        let promises = &mut inner.promises;
        let rooms = [
            promises.all.try_reserve_exact(MAX_PROMISES),
            promises.free.try_reserve_exact(MAX_PROMISES),
        ];
        if rooms.iter().any(|room| room.is_err()) {
            return Err(Status::NoMem.into());
        }
        let (mut host, mut device): (*mut c_void, Pointer) = (std::ptr::null_mut(), 0);
        // SAFETY: a place for an address.
        let code = unsafe {
            (self.driver.allocate_host)(&mut host, PAGE_BYTES, HOST_PORTABLE | HOST_MAPPED)
        };
        self.driver.check("cuMemHostAlloc", code)?;
        // SAFETY: that memory, whole.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, PAGE_BYTES) };
        // SAFETY: a place for an address, and memory that the device reaches.
        let code = unsafe { (self.driver.host_on_device)(&mut device, host, 0) };
        if let Err(error) = self.driver.check("cuMemHostGetDevicePointer", code) {
            // SAFETY: nobody has it yet.
            self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(host) });
            return Err(error);
        }
        (promises.host, promises.device) = (host.expose_provenance(), device);
        promises.all.resize(MAX_PROMISES, (0, None));
        promises.free.extend((0..MAX_PROMISES).rev());
        Ok(())
    }

    /// What [`crate::device::Device::keep`] says. No context is needed: the device reads.
    pub(super) fn keep_promise(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.events.get(event)?.promise.is_none() {
            fail!(Handle, "event {:#x} is no promise", event.0);
        }
        inner.keep(event, None);
        self.nap.notify_all();
        Ok(())
    }

    /// Has a stream wait for a promise that is open. The context is entered.
    pub(super) fn wait_for_promise(
        &self,
        inner: &mut Inner,
        stream: Handle,
        number: usize,
    ) -> Result<()> {
        let Some(call) = self.driver.wait_value else { return Err(Status::Unsupported.into()) };
        let (at, value) = inner.promises.wanted(number);
        // SAFETY: a stream of this context, and a number that the device reaches.
        let code = unsafe { call(stream, at, value, WAIT_AS_LARGE) };
        if code == code::NOT_SUPPORTED {
            fail!(Unsupported, "the driver has no stream wait for a number here");
        }
        let waits = self.driver.check("cuStreamWaitValue32", code);
        waits.inspect_err(|error: &Error| self.note_end(inner, code, error))
    }

    /// The same of a stream of the engine's: the numbers stay until it has passed.
    pub(super) fn hold_for_promise(
        &self,
        inner: &mut Inner,
        stream: Handle,
        number: usize,
    ) -> Result<()> {
        self.see_who_passed(inner);
        inner.promises.passing.try_reserve(1).map_err(|_| Status::NoMem)?;
        let known = inner.events.take_spare(&self.driver)?;
        if let Err(error) = self.wait_for_promise(inner, stream, number) {
            inner.events.give_spare(known);
            return Err(error);
        }
        // SAFETY: an event and a stream of this context.
        let code = unsafe { (self.driver.record)(known.event as Handle, stream) };
        if code != 0 {
            self.driver.note("cuEventRecord", code);
            inner.promises.stays = true;
        }
        inner.promises.passing.push(known);
        Ok(())
    }

    /// Streams of the engine's that have passed need the numbers no more. The context is entered.
    fn see_who_passed(&self, inner: &mut Inner) {
        let mut at = 0;
        while at < inner.promises.passing.len() {
            let raw = inner.promises.passing[at].event as Handle;
            // SAFETY: an event of this context.
            if unsafe { (self.driver.query)(raw) } == 0 {
                let known = inner.promises.passing.swap_remove(at);
                inner.events.give_spare(known);
            } else {
                at += 1;
            }
        }
    }

    /// Gives the numbers back, if all who wait have passed. The context is entered, and streams of
    /// the device's own have ended what they had.
    pub(super) fn give_page_back(&self, inner: &mut Inner) {
        if inner.promises.host == 0 {
            return;
        }
        self.see_who_passed(inner);
        if !inner.promises.passing.is_empty() || inner.promises.stays {
            log::warn!("streams of the engine's may wait still: {PAGE_BYTES} bytes stay with them");
            return;
        }
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(inner.promises.host);
        // SAFETY: taken once, and nobody waits for what is there any more.
        self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(place) });
        inner.promises.host = 0;
    }
}

impl Inner {
    /// A promise ends, if it is open: whoever waits for its number goes on.
    fn keep(&mut self, event: Event, failed: Option<Status>) {
        let number = self.events.get(event).ok().and_then(|known| known.promise);
        let Some(number) = number else { return };
        let (value, open) = self.promises.all[number];
        if open == Some(event) {
            self.promises.word(number).store(value, Ordering::Release);
            self.promises.all[number].1 = None;
            self.events.end_promise(event, failed);
        }
    }

    /// All that are open end, so that no stream stands still for ever.
    pub fn keep_all(&mut self, failed: Option<Status>) {
        for event in self.promises.open() {
            self.keep(event, failed);
        }
    }

    /// A promise was forgotten: its number may be used again.
    pub fn free_promise(&mut self, number: usize) {
        self.promises.free.push(number);
    }
}
