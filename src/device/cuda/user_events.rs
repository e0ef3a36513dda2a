//! Events that come when the host says so. Each is a number in host memory that the device reads:
//! a stream that is behind one waits until the number is as large as it has to be
//! (`cuStreamWaitValue32`), and the host writes that. Numbers only grow, so whoever waits for a
//! number that was used again since goes on all the same.

use std::ffi::c_void;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::device::cuda::abi::{HOST_MAPPED, HOST_PORTABLE, Handle, Pointer, WAIT_AS_LARGE, code};
use crate::device::cuda::events::EventRecord;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Event, MAX_USER_EVENTS};
use crate::fail;

/// The memory of all of them.
const PAGE_BYTES: usize = MAX_USER_EVENTS * size_of::<u32>();

/// The promises of a device.
#[derive(Default)]
pub struct UserEvents {
    /// Where the numbers are, for the host and for the device; 0 = nowhere yet.
    host: usize,
    device: Pointer,
    /// For each number the value that it gets next, and the event that is open for it.
    all: Vec<(u32, Option<Event>)>,
    /// Those that no event has.
    free: Vec<usize>,
    /// Events behind waits that were put on streams of the engine's.
    pending_waits: Vec<EventRecord>,
    /// Whether a stream has passed its wait cannot be known: the memory stays.
    stays: bool,
}

impl UserEvents {
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
    pub fn pending_waits(&self) -> impl Iterator<Item = Handle> {
        self.pending_waits.iter().map(|known| known.event as Handle)
    }
}

impl Cuda {
    /// What [`crate::device::Device::user_event`] says.
    pub(super) fn new_user_event(&self) -> Result<Event> {
        if self.driver.wait_value.is_none() {
            fail!(Unsupported, "the driver has no stream wait for a number (cuStreamWaitValue32)");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let _guard = self.enter()?;
        let inner = &mut *inner;
        if inner.user_events.host == 0 {
            self.allocate_page(inner)?;
        }
        let Some(&number) = inner.user_events.free.last() else {
            fail!(Again, "{MAX_USER_EVENTS} promises are known, as many as can be");
        };
        let event = inner.events.user_event(&self.driver, number)?;
        inner.user_events.free.pop();
        let row = &mut inner.user_events.all[number];
        *row = (row.0.wrapping_add(1), Some(event));
        Ok(event)
    }

    /// Memory for the numbers. The context is entered.
    fn allocate_page(&self, inner: &mut Inner) -> Result<()> {
        let user_events = &mut inner.user_events;
        let rooms = [
            user_events.all.try_reserve_exact(MAX_USER_EVENTS),
            user_events.free.try_reserve_exact(MAX_USER_EVENTS),
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
        (user_events.host, user_events.device) = (host.expose_provenance(), device);
        user_events.all.resize(MAX_USER_EVENTS, (0, None));
        user_events.free.extend((0..MAX_USER_EVENTS).rev());
        Ok(())
    }

    /// What [`crate::device::Device::keep`] says. No context is needed: the device reads.
    pub(super) fn signal_user_event(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.events.get(event)?.user_event.is_none() {
            fail!(Handle, "event {:#x} is no promise", event.0);
        }
        inner.signal(event, None);
        self.nap.notify_all();
        Ok(())
    }

    /// Has a stream wait for a promise that is open. The context is entered.
    pub(super) fn wait_for_user_event(
        &self,
        inner: &mut Inner,
        stream: Handle,
        number: usize,
    ) -> Result<()> {
        let Some(call) = self.driver.wait_value else { return Err(Status::Unsupported.into()) };
        let (at, value) = inner.user_events.wanted(number);
        // SAFETY: a stream of this context, and a number that the device reaches.
        let code = unsafe { call(stream, at, value, WAIT_AS_LARGE) };
        if code == code::NOT_SUPPORTED {
            fail!(Unsupported, "the driver has no stream wait for a number here");
        }
        let waits = self.driver.check("cuStreamWaitValue32", code);
        waits.inspect_err(|error: &Error| self.lose_if_sticky(inner, code, error))
    }

    /// The same of a stream of the engine's: the numbers stay until it has passed.
    pub(super) fn engine_stream_wait_user_event(
        &self,
        inner: &mut Inner,
        stream: Handle,
        number: usize,
    ) -> Result<()> {
        self.reclaim_passed_waits(inner);
        inner.user_events.pending_waits.try_reserve(1).map_err(|_| Status::NoMem)?;
        let known = inner.events.take_spare(&self.driver)?;
        if let Err(error) = self.wait_for_user_event(inner, stream, number) {
            inner.events.give_spare(known);
            return Err(error);
        }
        // SAFETY: an event and a stream of this context.
        let code = unsafe { (self.driver.record)(known.event as Handle, stream) };
        if code != 0 {
            self.driver.note("cuEventRecord", code);
            inner.user_events.stays = true;
        }
        inner.user_events.pending_waits.push(known);
        Ok(())
    }

    /// Streams of the engine's that have passed need the numbers no more. The context is entered.
    fn reclaim_passed_waits(&self, inner: &mut Inner) {
        let mut at = 0;
        while at < inner.user_events.pending_waits.len() {
            let raw = inner.user_events.pending_waits[at].event as Handle;
            // SAFETY: an event of this context.
            if unsafe { (self.driver.query)(raw) } == 0 {
                let known = inner.user_events.pending_waits.swap_remove(at);
                inner.events.give_spare(known);
            } else {
                at += 1;
            }
        }
    }

    /// Gives the numbers back, if all who wait have passed. The context is entered, and streams of
    /// the device's own have ended what they had.
    pub(super) fn free_page(&self, inner: &mut Inner) {
        if inner.user_events.host == 0 {
            return;
        }
        self.reclaim_passed_waits(inner);
        if !inner.user_events.pending_waits.is_empty() || inner.user_events.stays {
            log::warn!("streams of the engine's may wait still: {PAGE_BYTES} bytes stay with them");
            return;
        }
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(inner.user_events.host);
        // SAFETY: taken once, and nobody waits for what is there any more.
        self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(place) });
        inner.user_events.host = 0;
    }
}

impl Inner {
    /// A promise ends, if it is open: whoever waits for its number goes on.
    fn signal(&mut self, event: Event, failed: Option<Status>) {
        let number = self.events.get(event).ok().and_then(|known| known.user_event);
        let Some(number) = number else { return };
        let (value, open) = self.user_events.all[number];
        if open == Some(event) {
            self.user_events.word(number).store(value, Ordering::Release);
            self.user_events.all[number].1 = None;
            self.events.end_user_event(event, failed);
        }
    }

    /// All that are open end, so that no stream stands still for ever.
    pub fn signal_all_events(&mut self, failed: Option<Status>) {
        for event in self.user_events.open() {
            self.signal(event, failed);
        }
    }

    /// A promise was forgotten: its number may be used again.
    pub fn free_user_event(&mut self, number: usize) {
        self.user_events.free.push(number);
    }
}
