//! What is known of events: each one alone, and all that are open, stream by stream. Events of
//! one stream come in order, so only the first open one of each has to be asked for.

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::device::cuda::abi::{EVENT_FLAGS, Handle};
use crate::device::cuda::driver::Driver;
use crate::device::slots::Slots;
use crate::device::{Copy, DeviceMemory, Event, Memory};

/// Most events that are known at once.
const MAX_EVENTS: usize = 65_536;

/// How a batch ended.
pub type Outcome = std::result::Result<(), Status>;

/// An event of the driver's, and what it is for.
pub struct EventRecord {
    /// The driver's handle.
    pub event: usize,
    /// Which line it waits in.
    queue: usize,
    /// How the batch ended, if it has.
    pub outcome: Option<Outcome>,
    /// What it ends with although its event comes: only a part of it was begun.
    fails: Option<Status>,
    /// How often in a row the driver has refused to say how far it is, and since when.
    refusals: (u32, u64),
    /// It comes when its device is told so, and the driver knows nothing of it: its number
    /// among the promises.
    pub user_event: Option<usize>,
    /// Its end was reported.
    is_reported: bool,
    /// Device memory that the batch uses, as addresses from and to.
    uses: Vec<(u64, u64)>,
}

impl EventRecord {
    /// A new event of the current context.
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

    /// Makes it as if new, for a batch of a line.
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

    /// Notes which device memory copies use.
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

    /// Notes where kernels begin to read and write: how far they go only they know.
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

/// The addresses of a call, with their names; 0 = none. With a table of blocks keys and values
/// are distances from where each begins; attention over no keys reads none, wherever they would be.
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

/// All events that are known.
pub struct Events {
    known: Slots<EventRecord>,
    /// The open ones of each stream, the oldest first.
    queues: Vec<VecDeque<Event>>,
    open: usize,
    count: usize,
    /// Those that ended and were not reported.
    ended: VecDeque<Event>,
    /// Events of the driver that may be used again.
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
    /// One more line; its number.
    pub fn add_queue(&mut self) -> usize {
        self.queues.push(VecDeque::new());
        self.queues.len() - 1
    }

    /// How many events of a line are open.
    pub fn open_in(&self, queue: usize) -> usize {
        self.queues[queue].len()
    }

    /// One more event, at the end of a line. What it needs to end one day is taken now, so that
    /// ending it never fails.
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

    /// One more event that comes when it is said to. It is on no stream.
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

    /// Such an event ends, if it has not.
    pub fn end_user_event(&mut self, event: Event, failed: Option<Status>) {
        if self.known.get(event).is_ok_and(|known| known.outcome.is_none()) {
            self.end(event, failed);
        }
    }

    /// An event of the driver's to be put on a stream that nobody looks at.
    pub fn take_spare(&mut self, driver: &Driver) -> Result<EventRecord> {
        self.spare.pop().map_or_else(|| EventRecord::new(driver), Ok)
    }

    /// Takes it back when it has come.
    pub fn give_spare(&mut self, known: EventRecord) {
        self.spare.push(known);
    }

    /// What is known of an event.
    pub fn get(&self, event: Event) -> Result<&EventRecord> {
        self.known.get(event)
    }

    /// The driver's handle of an event.
    pub fn raw(&self, event: Event) -> Result<Handle> {
        self.known.get(event).map(|known| known.event as Handle)
    }

    /// It ends with a status when it comes.
    pub fn set_failure(&mut self, event: Event, status: Status) {
        if let Ok(known) = self.known.get_mut(event) {
            known.fails = Some(status);
        }
    }

    /// What an open event will come to, if that is known: whatever would run behind one that
    /// fails has no input.
    pub fn pending_failure(&self, event: Event) -> Result<()> {
        self.known.get(event)?.fails.map_or(Ok(()), |status| Err(status.into()))
    }

    /// The event has come, and so have all before it on its stream.
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

    /// All that is open has failed.
    pub fn fail_all(&mut self, status: Status) {
        for queue in 0..self.queues.len() {
            while let Some(event) = self.queues[queue].pop_front() {
                self.end(event, Some(status));
            }
        }
    }

    /// The driver said how far an event is.
    pub fn answered(&mut self, event: Event) {
        if let Ok(known) = self.known.get_mut(event) {
            known.refusals = (0, 0);
        }
    }

    /// It did not; how often in a row by now, and for how long.
    pub fn refused(&mut self, event: Event, now_ns: u64) -> (u32, u64) {
        let Ok(known) = self.known.get_mut(event) else { return (0, 0) };
        let (count, first_ns) = known.refusals;
        let since_ns = if count == 0 { now_ns } else { first_ns };
        known.refusals = (count.saturating_add(1), since_ns);
        (known.refusals.0, now_ns.saturating_sub(since_ns))
    }

    /// The oldest open event of a line.
    pub fn first_open(&self, queue: usize) -> Option<Event> {
        self.queues[queue].front().copied()
    }

    /// The newest open event of the first line that has any.
    pub fn last_open(&self) -> Option<Event> {
        self.queues.iter().find_map(|queue| queue.back().copied())
    }

    /// How many lines there are.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// An open event whose batch uses that memory.
    pub fn user(&self, memory: &DeviceMemory) -> Option<Event> {
        let uses = |event: &&Event| self.known.get(**event).is_ok_and(|known| known.uses(memory));
        self.queues.iter().flatten().find(uses).copied()
    }

    /// Reports what has ended, each once.
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

    /// Forgets an event, which has ended or was never begun.
    pub fn forget(&mut self, event: Event) -> Result<()> {
        let known = self.known.remove(event)?;
        self.count -= 1;
        if known.outcome.is_none() {
            // The newest of its line: it was taken back before others came.
            self.queues[known.queue].retain(|other| *other != event);
            self.open -= 1;
        } else if !known.is_reported {
            // Mostly the first: events are released in the order in which they end.
            if let Some(at) = self.ended.iter().position(|other| *other == event) {
                self.ended.remove(at);
            }
        }
        self.spare.push(known);
        Ok(())
    }

    /// All events of the driver that were made.
    pub fn all(&mut self) -> impl Iterator<Item = Handle> {
        let known = self.known.iter_mut().map(|(_, known)| known.event as Handle);
        known.chain(self.spare.iter().map(|known| known.event as Handle))
    }
}
