//! A custom device: the engine copies, creates events and allocates memory through callbacks, and
//! this module implements [`Device`] with them. No lock is held while the engine is called.

mod events;
mod table;
mod user_events;

use std::collections::BTreeMap;

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::call::Call;
use crate::device::{
    Copy, Device, DeviceMemory, Event, Facts, MAX_STREAMS, Memory, State, Stream, check,
};
use crate::fail;
pub use table::{Engine, Rows, lower};

use events::{Events, Outcome, Raw};

/// Alignment of allocations.
const ALIGN_BYTES: u64 = 256;
/// Sleep between polls of a wait, at first and at most.
const NAP_NS: (u64, u64) = (5_000, 500_000);

struct Inner {
    events: Events,
    /// Allocations by number: address, bytes.
    allocations: BTreeMap<u64, (u64, u64)>,
    last: u64,
    /// Calls of the engine in flight that begin work.
    under_way: u32,
    /// User events, and whether the engine has signalled each.
    user_events: BTreeMap<u64, bool>,
    /// Forgotten user events that were signalled and have not completed.
    leaving: Vec<Event>,
    /// Leased streams.
    leased: Vec<u32>,
    /// Why no work can begin any more.
    lost: Option<Error>,
    closed: bool,
    /// Buffer of lowered copies, reused.
    spare: Vec<Rows>,
}

/// A custom device.
pub struct Foreign {
    engine: Arc<dyn Engine>,
    facts: Facts,
    clock: Clock,
    inner: Mutex<Inner>,
    /// Some call has ended.
    changed: Condvar,
}

impl Foreign {
    /// A device of an engine.
    pub fn new(clock: Clock, engine: Arc<dyn Engine>) -> Result<Foreign> {
        let facts = engine.facts();
        if facts.streams == 0 || facts.streams > MAX_STREAMS {
            fail!(Invalid, "{} streams: 1 to {MAX_STREAMS} are accepted", facts.streams);
        }
        let inner = Inner {
            events: Events::new(facts.streams),
            allocations: BTreeMap::new(),
            last: 0,
            under_way: 0,
            user_events: BTreeMap::new(),
            leaving: Vec::new(),
            leased: Vec::new(),
            lost: None,
            closed: false,
            spare: Vec::new(),
        };
        let changed = Condvar::new();
        Ok(Foreign { engine, facts, clock, inner: Mutex::new(inner), changed })
    }

    /// Passes on a result of the engine. If it reports a lost device, all pending work
    /// fails.
    fn checked<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.status() == Status::Unavailable
        {
            let mut inner = self.inner.lock();
            let text = format!("the device is lost: {}", error.message());
            inner.lost.get_or_insert(Error::new(Status::Unavailable, text));
            inner.events.lose();
            self.changed.notify_all();
        }
        result
    }

    /// Whether work can begin.
    fn check_alive(inner: &Inner) -> Result<()> {
        match &inner.lost {
            Some(why) => Err(why.clone()),
            None if inner.closed => Err(Status::Closed.into()),
            None => Ok(()),
        }
    }

    /// Whether the engine may be called at all.
    fn check_not_lost(&self) -> Result<()> {
        self.inner.lock().lost.clone().map_or(Ok(()), Err)
    }

    /// Calls the engine to begin work of a queue after `after`; returns its event.
    fn begin(
        &self,
        queue: usize,
        after: Option<Event>,
        start: impl FnOnce(u64) -> Result<u64>,
    ) -> Result<Event> {
        let mut inner = self.inner.lock();
        Foreign::check_alive(&inner)?;
        let before = match after.map(|event| inner.events.get(event)).transpose()? {
            Some((_, Some(Err(status)))) => return Err(status.into()),
            Some((raw, None)) => Some(raw),
            _ => None,
        };
        let event = inner.events.reserve()?;
        inner.under_way += 1;
        drop(inner);
        let result = self.checked(start(before.as_ref().map_or(0, |raw| raw.number())));
        let raw = result.map(|number| Raw::new(&self.engine, number));
        let mut inner = self.inner.lock();
        inner.under_way -= 1;
        self.changed.notify_all();
        match raw {
            Ok(raw) => inner.events.fill(event, queue, raw),
            Err(error) => {
                inner.events.forget(event);
                return Err(error);
            }
        }
        if inner.lost.is_some() {
            inner.events.lose();
        }
        Ok(event)
    }

    /// The outcome of an event: the recorded one, else the engine's answer.
    fn look(&self, event: Event) -> Result<Option<Outcome>> {
        let (raw, known) = self.inner.lock().events.get(event)?;
        if known.is_some() {
            return Ok(known);
        }
        let outcome = match self.checked(self.engine.query(raw.number())) {
            Ok(false) => return Ok(None),
            Ok(true) => Ok(()),
            Err(error) => Err(error.status()),
        };
        let (_, known) = {
            let mut inner = self.inner.lock();
            inner.events.settle(event, outcome);
            inner.events.get(event)?
        };
        Ok(known)
    }

    /// Waits in the engine, or sleeps.
    fn rest(&self, raw: &Raw, deadline_ns: u64, nap_ns: &mut u64) {
        let now_ns = self.clock.now_ns();
        match self.engine.wait(raw.number(), deadline_ns).map(|result| self.checked(result)) {
            // All work has failed: nothing to wait for.
            Some(Err(error)) if error.status() == Status::Unavailable => return,
            // An engine whose wait keeps returning early must not be polled in a busy loop.
            Some(_) if self.clock.now_ns() > now_ns + NAP_NS.0 => return,
            _ => {}
        }
        let mut nap = *nap_ns;
        if deadline_ns != 0 {
            nap = nap.min(deadline_ns.saturating_sub(self.clock.now_ns()));
        }
        self.changed.wait_for(&mut self.inner.lock(), nap.max(1));
        *nap_ns = (*nap_ns * 2).min(NAP_NS.1);
    }
}

impl Device for Foreign {
    fn facts(&self) -> Facts {
        self.facts
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        check(&self.facts, stream, copies)?;
        let mut rows = std::mem::take(&mut self.inner.lock().spare);
        let lowered = lower(copies, &mut rows);
        let event = lowered.and_then(|()| {
            let start = |before| self.engine.submit(stream.0, before, &rows);
            self.begin(stream.0 as usize, after, start)
        });
        rows.clear();
        self.inner.lock().spare = rows;
        event
    }

    fn state(&self, event: Event) -> Result<State> {
        match self.look(event)? {
            None => Ok(State::Pending),
            Some(Ok(())) => Ok(State::Done),
            Some(Err(status)) => Err(status.into()),
        }
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        let mut nap_ns = NAP_NS.0;
        loop {
            if let Some(outcome) = self.look(event)? {
                return outcome.map_err(Error::from);
            }
            if deadline_ns != 0 && self.clock.now_ns() >= deadline_ns {
                return Err(Status::Timeout.into());
            }
            let (raw, _) = self.inner.lock().events.get(event)?;
            self.rest(&raw, deadline_ns, &mut nap_ns);
        }
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        for queue in 0..=self.facts.streams as usize {
            let mut at = 0;
            loop {
                let next = self.inner.lock().events.open(queue, at);
                let Some(event) = next else { break };
                // Events of a stream end in order, imported ones in any order.
                match self.look(event) {
                    Ok(None) if queue < self.facts.streams as usize => break,
                    Ok(None) => at += 1,
                    _ => {} // it has ended, and the next took its index
                }
            }
        }
        self.inner.lock().events.report(ended)
    }

    fn release(&self, event: Event) -> Result<()> {
        if self.look(event)?.is_none() {
            return Err(Status::Busy.into());
        }
        let mut inner = self.inner.lock();
        let removed = inner.events.remove(event)?;
        inner.user_events.remove(&event.0);
        drop(inner);
        drop(removed); // with no lock held
        Ok(())
    }

    fn forget(&self, event: Event) {
        self.forget_later(event);
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        if bytes == 0 {
            fail!(Invalid, "0 bytes of device memory");
        }
        Foreign::check_alive(&self.inner.lock())?;
        let address = self.checked(self.engine.allocate(bytes))?;
        let mut inner = self.inner.lock();
        inner.last += 1;
        let number = inner.last;
        inner.allocations.insert(number, (address, bytes));
        drop(inner);
        let memory = if self.facts.reaches_device { Memory::Device } else { Memory::Host };
        let memory = DeviceMemory { address, bytes, memory, number };
        if address == 0 || address % ALIGN_BYTES != 0 {
            // SAFETY: nothing has it yet.
            unsafe { self.free(&memory)? };
            fail!(
                Invalid,
                "the engine allocated memory at {address:#x}: it must be a nonzero multiple of 256"
            );
        }
        Ok(memory)
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        let mut inner = self.inner.lock();
        if inner.allocations.get(&memory.number) != Some(&(memory.address, memory.bytes)) {
            fail!(
                Handle,
                "no allocation of this size at {:#x}: wrong device, or freed before",
                memory.address
            );
        }
        inner.allocations.remove(&memory.number);
        drop(inner);
        self.engine.free(memory.address, memory.bytes);
        Ok(())
    }

    unsafe fn register_host(&self, address: *mut u8, bytes: u64) -> Result<()> {
        self.check_not_lost()?;
        self.checked(self.engine.register_host(address.expose_provenance() as u64, bytes))
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.check_not_lost()?;
        self.checked(self.engine.unregister_host(address.addr() as u64))
    }

    unsafe fn import_event(&self, raw: u64) -> Result<Event> {
        self.begin(self.facts.streams as usize, None, |_| self.engine.import_event(raw))
    }

    unsafe fn stream_wait_event(&self, raw_stream: u64, event: Event) -> Result<()> {
        let (raw, known) = self.inner.lock().events.get(event)?;
        match known {
            Some(outcome) => outcome.map_err(Error::from),
            None => self.checked(self.engine.stream_wait_event(raw_stream, raw.number())),
        }
    }

    fn create_user_event(&self) -> Result<Event> {
        self.new_user_event()
    }

    fn signal_event(&self, event: Event) -> Result<()> {
        self.signal_user_event(event)
    }

    fn signal_all_events(&self) {
        self.signal_open_events();
    }

    unsafe fn launch(&self, stream: Stream, after: Option<Event>, calls: &[Call]) -> Result<Event> {
        check(&self.facts, stream, &[])?;
        for call in calls {
            if call.kind >= u64::BITS || self.facts.kernels & 1 << call.kind == 0 {
                fail!(Unsupported, "the custom device has no kernel {}", call.kind);
            }
        }
        let start = |before| self.engine.launch(stream.0, before, calls);
        self.begin(stream.0 as usize, after, start)
    }

    fn shared_streams(&self) -> u32 {
        self.facts.streams.div_ceil(2)
    }

    fn lease_stream(&self) -> Result<Stream> {
        let mut inner = self.inner.lock();
        let is_free = |stream: &u32| !inner.leased.contains(stream);
        let Some(stream) = (self.shared_streams()..self.facts.streams).rev().find(is_free) else {
            fail!(
                Again,
                "{} of {} streams are leased: return one first",
                inner.leased.len(),
                self.facts.streams
            );
        };
        inner.leased.try_reserve(1).map_err(|_| Status::NoMem)?;
        inner.leased.push(stream);
        Ok(Stream(stream))
    }

    fn return_stream(&self, stream: Stream) {
        self.inner.lock().leased.retain(|leased| *leased != stream.0);
    }

    fn free_bytes(&self) -> Option<u64> {
        self.check_not_lost().ok()?;
        self.engine.free_bytes()
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.lock().closed = true;
        self.signal_open_events();
        let is_over = || deadline_ns != 0 && self.clock.now_ns() >= deadline_ns;
        for queue in 0..=self.facts.streams as usize {
            loop {
                let mut inner = self.inner.lock();
                if inner.under_way > 0 {
                    if is_over() {
                        fail!(Busy, "{} calls are in flight", inner.under_way);
                    }
                    self.changed.wait_for(&mut inner, NAP_NS.1);
                    continue;
                }
                let Some(event) = inner.events.open(queue, 0) else { break };
                drop(inner);
                match self.wait(event, deadline_ns) {
                    Err(error) if error.status() == Status::Timeout => {
                        fail!(Busy, "batches are still in flight")
                    }
                    _ => {} // its owner learns the outcome
                }
            }
        }
        Ok(())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let allocations = std::mem::take(&mut self.inner.lock().allocations);
        for (address, bytes) in allocations.into_values() {
            self.engine.free(address, bytes);
        }
    }
}
