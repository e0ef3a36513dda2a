//! User events. Each has a number in host memory. A stream that waits for one waits until the
//! number reaches a value (`cuStreamWaitValue32`), and the host writes it. Numbers only grow, so
//! waits for an earlier use of a reused number succeed.

use std::ffi::c_void;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::atomic::{AtomicU32, Ordering};
use crate::device::cuda::abi::{HOST_MAPPED, HOST_PORTABLE, Handle, Pointer, WAIT_AS_LARGE, code};
use crate::device::cuda::events::EventRecord;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Event, MAX_USER_EVENTS};
use crate::fail;

/// Size of all numbers.
const PAGE_BYTES: usize = MAX_USER_EVENTS * size_of::<u32>();

/// User events of a device.
#[derive(Default)]
pub struct UserEvents {
    /// Address of the numbers for the host and for the device; 0 = not allocated.
    host: usize,
    device: Pointer,
    /// Next value and pending event of each number.
    all: Vec<(u32, Option<Event>)>,
    /// Unused numbers.
    free: Vec<usize>,
    /// Events recorded after waits on streams of the engine.
    pending_waits: Vec<EventRecord>,
    /// The memory must leak: a wait of a stream cannot be tracked.
    stays: bool,
}

impl UserEvents {
    fn word(&self, number: usize) -> &AtomicU32 {
        let place = std::ptr::with_exposed_provenance::<AtomicU32>(self.host);
        // SAFETY: a number of the page, which stays allocated as long as user events exist. The
        // host accesses it atomically, and the device only reads.
        unsafe { &*place.add(number) }
    }

    /// Device address of a number, and the value to wait for.
    fn wait_target(&self, number: usize) -> (Pointer, u32) {
        let at = self.device + (number * size_of::<u32>()) as Pointer;
        (at, self.all[number].0)
    }

    fn open(&self) -> Vec<Event> {
        self.all.iter().filter_map(|(_, event)| *event).collect()
    }

    /// Driver's events that are still on streams of the engine.
    pub fn pending_waits(&self) -> impl Iterator<Item = Handle> {
        self.pending_waits.iter().map(|known| known.event as Handle)
    }
}

impl Cuda {
    /// Implements [`crate::device::Device::create_user_event`].
    pub(super) fn new_user_event(&self) -> Result<Event> {
        if self.driver.wait_value.is_none() {
            fail!(Unsupported, "user events need cuStreamWaitValue32, which the driver lacks");
        }
        let mut inner = self.inner.lock();
        Cuda::check_alive(&inner)?;
        let _guard = self.enter()?;
        let inner = &mut *inner;
        if inner.user_events.host == 0 {
            self.allocate_page(inner)?;
        }
        let Some(&number) = inner.user_events.free.last() else {
            fail!(Again, "{MAX_USER_EVENTS} user events are not released: release some first");
        };
        let event = inner.events.user_event(&self.driver, number)?;
        inner.user_events.free.pop();
        let row = &mut inner.user_events.all[number];
        *row = (row.0.wrapping_add(1), Some(event));
        Ok(event)
    }

    /// Allocates the numbers. The context is current.
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
            // SAFETY: nothing has it yet.
            self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(host) });
            return Err(error);
        }
        (user_events.host, user_events.device) = (host.expose_provenance(), device);
        user_events.all.resize(MAX_USER_EVENTS, (0, None));
        user_events.free.extend((0..MAX_USER_EVENTS).rev());
        Ok(())
    }

    /// Implements [`crate::device::Device::signal_event`]. It needs no context.
    pub(super) fn signal_user_event(&self, event: Event) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.events.get(event)?.user_event.is_none() {
            fail!(Handle, "event {:#x} is not a user event", event.0);
        }
        inner.signal(event, None);
        self.nap.notify_all();
        Ok(())
    }

    /// Makes a stream wait for a pending user event. The context is current.
    pub(super) fn wait_for_user_event(
        &self,
        inner: &mut Inner,
        stream: Handle,
        number: usize,
    ) -> Result<()> {
        let Some(call) = self.driver.wait_value else { return Err(Status::Unsupported.into()) };
        let (at, value) = inner.user_events.wait_target(number);
        // SAFETY: a stream of this context, and a number that the device reaches.
        let code = unsafe { call(stream, at, value, WAIT_AS_LARGE) };
        if code == code::NOT_SUPPORTED {
            fail!(
                Unsupported,
                "user events need cuStreamWaitValue32, which this device does not support"
            );
        }
        let waits = self.driver.check("cuStreamWaitValue32", code);
        waits.inspect_err(|error: &Error| self.lose_if_sticky(inner, code, error))
    }

    /// Makes a stream of the engine wait; the numbers stay allocated until it has passed.
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

    /// Drops waits that streams of the engine have passed. The context is current.
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

    /// Frees the numbers, if all waits have passed. The context is current, and the device's own
    /// streams are idle.
    pub(super) fn free_page(&self, inner: &mut Inner) {
        if inner.user_events.host == 0 {
            return;
        }
        self.reclaim_passed_waits(inner);
        if !inner.user_events.pending_waits.is_empty() || inner.user_events.stays {
            log::warn!(
                "streams of the engine may still wait for user events: {PAGE_BYTES} bytes leak"
            );
            return;
        }
        let place: *mut c_void = std::ptr::with_exposed_provenance_mut(inner.user_events.host);
        // SAFETY: allocated once, and no stream waits for it any more.
        self.driver.note("cuMemFreeHost", unsafe { (self.driver.free_host)(place) });
        inner.user_events.host = 0;
    }
}

impl Inner {
    /// Signals a user event, if it is pending.
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

    /// Signals all pending user events, so that no stream waits forever.
    pub fn signal_all_events(&mut self, failed: Option<Status>) {
        for event in self.user_events.open() {
            self.signal(event, failed);
        }
    }

    /// Reuses the number of a released user event.
    pub fn free_user_event(&mut self, number: usize) {
        self.user_events.free.push(number);
    }
}
