//! State of events: of each one, and the pending ones of each stream. Events of one stream complete
//! in order, so only the first pending one is queried.

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::device::cuda::abi::{EVENT_FLAGS, Handle};
use crate::device::cuda::driver::Driver;
use crate::device::slots::Slots;
use crate::device::{Copy, DeviceMemory, Event, Memory};

/// Limit: unreleased events.
const MAX_EVENTS: usize = 65_536;

/// Outcome of a batch.
pub type Outcome = std::result::Result<(), Status>;

/// A driver's event and its use.
pub struct EventRecord {
    /// Driver's handle.
    pub event: usize,
    /// Queue of its stream.
    queue: usize,
    /// Outcome of the batch, once it has ended.
    pub outcome: Option<Outcome>,
    /// Failure that the event ends with, because only a part of the batch was begun.
    fails: Option<Status>,
    /// Consecutive failed queries, and the time of the first.
    refusals: (u32, u64),
    /// Index of a user event, which the driver does not know.
    pub user_event: Option<usize>,
    /// The event was reported by `poll`.
    is_reported: bool,
    /// Ranges of device memory that the batch uses.
    uses: Vec<(u64, u64)>,
}

impl EventRecord {
    /// Creates an event in the current context.
    pub fn new(driver: &Driver) -> Result<EventRecord> {
        let mut event: Handle = std::ptr::null_mut();
        // SAFETY: a place for a handle.
        let code = unsafe { (driver.create_event)(&mut event, EVENT_FLAGS) };
        driver.check("cuEventCreate", code)?;
        Ok(EventRecord {
            event: event as usize,
            queue: 0,
            outcome: None,
            fails: None,
            refusals: (0, 0),
            user_event: None,
            is_reported: false,
            uses: Vec::new(),
        })
    }

    /// Resets a reused event for a batch of a queue.
    fn reset(&mut self, queue: usize) {
        (self.queue, self.outcome, self.fails) = (queue, None, None);
        (self.refusals, self.user_event, self.is_reported) = ((0, 0), None, false);
        self.uses.clear();
    }

    fn note(&mut self, from: u64, bytes: u64) -> Result<()> {
        let to = from.saturating_add(bytes);
        match self.uses.last_mut() {
            Some((_, end)) if *end == from => *end = to,
            _ => {
                self.uses.try_reserve(1).map_err(|_| Status::NoMem)?;
                self.uses.push((from, to));
            }
        }
        Ok(())
    }

    /// Records the device memory that copies use.
    pub fn note_copies(&mut self, copies: &[Copy<'_>]) -> Result<()> {
        for copy in copies {
            if copy.plane_memory == Memory::Device {
                self.note(copy.plane as u64, copy.tensor.bytes())?;
            }
            if copy.memory == Memory::Device {
                for strip in copy.tensor.strips() {
                    let runs = strip.count.max(1) - 1;
                    let reach = runs.saturating_mul(strip.stride_bytes);
                    self.note(strip.address, reach.saturating_add(strip.run_bytes))?;
                }
            }
        }
        Ok(())
    }

    /// Records where kernels begin to read and write; only the kernels know the lengths.
    pub fn note_calls(&mut self, calls: &[Call]) -> Result<()> {
        for address in calls.iter().flat_map(|call| addresses(call).map(|(_, address)| address)) {
            if address != 0 {
                self.note(address, 1)?;
            }
        }
        Ok(())
    }

    fn uses(&self, memory: &DeviceMemory) -> bool {
        let end = memory.address.saturating_add(memory.bytes);
        self.uses.iter().any(|&(from, to)| from < end && memory.address < to)
    }
}

/// The named addresses of a call; 0 = none. With a page table, keys and values are offsets into
/// pages. Attention over no keys reads none.
pub fn addresses(call: &Call) -> [(&'static str, u64); 11] {
    let attends = [Kind::Decode, Kind::Prefill].iter().any(|&kind| call.kind == kind as u32);
    let is_alone = call.table == 0 && !(attends && call.tokens == 0);
    let alone = |address| if is_alone { address } else { 0 };
    [
        ("queries", call.queries),
        ("keys", alone(call.keys)),
        ("values", alone(call.values)),
        ("out", call.out),
        ("index", call.index),
        ("counts", call.counts),
        ("table", call.table),
        ("numbers", call.numbers),
        ("more", call.more),
        ("scales", call.scales),
        ("scratch", call.scratch),
    ]
}

/// All unreleased events.
pub struct Events {
    known: Slots<EventRecord>,
    /// Pending events of each stream, oldest first.
    queues: Vec<VecDeque<Event>>,
    open: usize,
    count: usize,
    /// Ended events that were not reported.
    ended: VecDeque<Event>,
    /// Driver's events for reuse.
    spare: Vec<EventRecord>,
}

impl Default for Events {
    fn default() -> Events {
        let known = Slots::new(MAX_EVENTS);
        let (queues, ended, spare) = (Vec::new(), VecDeque::new(), Vec::new());
        Events { known, queues, open: 0, count: 0, ended, spare }
    }
}

impl Events {
    /// Adds a queue; returns its index.
    pub fn add_queue(&mut self) -> usize {
        self.queues.push(VecDeque::new());
        self.queues.len() - 1
    }

    /// Number of pending events of a queue.
    pub fn open_in(&self, queue: usize) -> usize {
        self.queues[queue].len()
    }

    /// Adds an event at the end of a queue. All memory that its completion needs is reserved now,
    /// so that completion never fails.
    pub fn begin(
        &mut self,
        driver: &Driver,
        queue: usize,
        note: impl FnOnce(&mut EventRecord) -> Result<()>,
    ) -> Result<Event> {
        self.known.reserve()?;
        self.queues[queue].try_reserve(1).map_err(|_| Status::NoMem)?;
        self.ended.try_reserve(self.open + 1).map_err(|_| Status::NoMem)?;
        self.spare.try_reserve(self.count + 1).map_err(|_| Status::NoMem)?;
        let mut known = match self.spare.pop() {
            Some(known) => known,
            None => EventRecord::new(driver)?,
        };
        known.reset(queue);
        if let Err(error) = note(&mut known) {
            self.spare.push(known);
            return Err(error);
        }
        let event = self.known.insert(known)?;
        self.queues[queue].push_back(event);
        (self.open, self.count) = (self.open + 1, self.count + 1);
        Ok(event)
    }

    /// Adds a user event, which is on no stream.
    pub fn user_event(&mut self, driver: &Driver, number: usize) -> Result<Event> {
        self.known.reserve()?;
        self.ended.try_reserve(self.open + 1).map_err(|_| Status::NoMem)?;
        self.spare.try_reserve(self.count + 1).map_err(|_| Status::NoMem)?;
        let mut known = match self.spare.pop() {
            Some(known) => known,
            None => EventRecord::new(driver)?,
        };
        known.reset(0);
        known.user_event = Some(number);
        let event = self.known.insert(known)?;
        (self.open, self.count) = (self.open + 1, self.count + 1);
        Ok(event)
    }

    /// Ends a user event, if it is pending.
    pub fn end_user_event(&mut self, event: Event, failed: Option<Status>) {
        if self.known.get(event).is_ok_and(|known| known.outcome.is_none()) {
            self.end(event, failed);
        }
    }

    /// Takes a driver's event for a stream of the engine.
    pub fn take_spare(&mut self, driver: &Driver) -> Result<EventRecord> {
        self.spare.pop().map_or_else(|| EventRecord::new(driver), Ok)
    }

    /// Returns it after it has completed.
    pub fn give_spare(&mut self, known: EventRecord) {
        self.spare.push(known);
    }

    /// State of an event.
    pub fn get(&self, event: Event) -> Result<&EventRecord> {
        self.known.get(event)
    }

    /// Driver's handle of an event.
    pub fn raw(&self, event: Event) -> Result<Handle> {
        self.known.get(event).map(|known| known.event as Handle)
    }

    /// Sets the failure that an event will end with.
    pub fn set_failure(&mut self, event: Event, status: Status) {
        if let Ok(known) = self.known.get_mut(event) {
            known.fails = Some(status);
        }
    }

    /// Fails if a pending event is known to fail: work after it would have no input.
    pub fn pending_failure(&self, event: Event) -> Result<()> {
        self.known.get(event)?.fails.map_or(Ok(()), |status| Err(status.into()))
    }

    /// Completes an event and all earlier ones of its stream.
    pub fn complete(&mut self, event: Event) {
        let queue = match self.known.get(event) {
            Ok(known) if known.outcome.is_none() && known.user_event.is_none() => known.queue,
            _ => return,
        };
        while let Some(first) = self.queues[queue].pop_front() {
            self.end(first, None);
            if first == event {
                break;
            }
        }
    }

    fn end(&mut self, event: Event, failed: Option<Status>) {
        self.open -= 1;
        if let Ok(known) = self.known.get_mut(event) {
            known.outcome = Some(failed.or(known.fails).map_or(Ok(()), Err));
            self.ended.push_back(event);
        }
    }

    /// Fails all pending events.
    pub fn fail_all(&mut self, status: Status) {
        for queue in 0..self.queues.len() {
            while let Some(event) = self.queues[queue].pop_front() {
                self.end(event, Some(status));
            }
        }
    }

    /// Records that a query of an event succeeded.
    pub fn answered(&mut self, event: Event) {
        if let Ok(known) = self.known.get_mut(event) {
            known.refusals = (0, 0);
        }
    }

    /// Records a failed query; returns the number of consecutive failures and their duration.
    pub fn refused(&mut self, event: Event, now_ns: u64) -> (u32, u64) {
        let Ok(known) = self.known.get_mut(event) else { return (0, 0) };
        let (count, first_ns) = known.refusals;
        let since_ns = if count == 0 { now_ns } else { first_ns };
        known.refusals = (count.saturating_add(1), since_ns);
        (known.refusals.0, now_ns.saturating_sub(since_ns))
    }

    /// The oldest pending event of a queue.
    pub fn first_open(&self, queue: usize) -> Option<Event> {
        self.queues[queue].front().copied()
    }

    /// The newest pending event of the first queue that has any.
    pub fn last_open(&self) -> Option<Event> {
        self.queues.iter().find_map(|queue| queue.back().copied())
    }

    /// Number of queues.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// A pending event whose batch uses that memory.
    pub fn user(&self, memory: &DeviceMemory) -> Option<Event> {
        let uses = |event: &&Event| self.known.get(**event).is_ok_and(|known| known.uses(memory));
        self.queues.iter().flatten().find(uses).copied()
    }

    /// Writes ended events that were not reported; returns their number.
    pub fn report(&mut self, ended: &mut [Event]) -> usize {
        let count = ended.len().min(self.ended.len());
        for (slot, event) in ended.iter_mut().zip(self.ended.drain(..count)) {
            *slot = event;
            if let Ok(known) = self.known.get_mut(event) {
                known.is_reported = true;
            }
        }
        count
    }

    /// Removes an event that has ended or was never begun.
    pub fn forget(&mut self, event: Event) -> Result<()> {
        let known = self.known.remove(event)?;
        self.count -= 1;
        if known.outcome.is_none() {
            // The newest of its queue: it is removed before others follow.
            self.queues[known.queue].retain(|other| *other != event);
            self.open -= 1;
        } else if !known.is_reported {
            // Usually the first: events are released in the order in which they end.
            if let Some(at) = self.ended.iter().position(|other| *other == event) {
                self.ended.remove(at);
            }
        }
        self.spare.push(known);
        Ok(())
    }

    /// All driver's events.
    pub fn all(&mut self) -> impl Iterator<Item = Handle> {
        let known = self.known.iter_mut().map(|(_, known)| known.event as Handle);
        known.chain(self.spare.iter().map(|known| known.event as Handle))
    }
}
