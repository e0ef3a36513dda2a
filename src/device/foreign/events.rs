//! Events of an engine's device: their outcomes, the pending ones of each stream, and those not
//! reported yet.

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::device::foreign::table::Engine;
use crate::device::slots::Slots;

/// Limit: unreleased events.
const MAX_EVENTS: usize = 65_536;

/// Outcome of a batch.
pub type Outcome = std::result::Result<(), Status>;

/// The engine's event. Dropping the last reference releases it, which must not happen under a lock.
pub struct Raw {
    engine: Arc<dyn Engine>,
    number: u64,
}

impl Raw {
    /// Wraps an event of the engine.
    pub fn new(engine: &Arc<dyn Engine>, number: u64) -> Arc<Raw> {
        Arc::new(Raw { engine: engine.clone(), number })
    }

    /// The engine's number.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.engine.release(self.number);
    }
}

struct EventRecord {
    /// `None`: the engine is creating the event.
    raw: Option<Arc<Raw>>,
    outcome: Option<Outcome>,
}

impl EventRecord {
    fn is_open(&self) -> bool {
        self.raw.is_some() && self.outcome.is_none()
    }
}

/// All events of a device.
pub struct Events {
    known: Slots<EventRecord>,
    count: usize,
    /// Events that may be pending, oldest first: a queue for each stream, and one for imported
    /// events.
    queues: Vec<VecDeque<Event>>,
    /// Ended events that were not reported.
    ended: VecDeque<Event>,
}

impl Events {
    /// For a number of streams.
    pub fn new(streams: u32) -> Events {
        let queues = (0..=streams).map(|_| VecDeque::new()).collect();
        Events { known: Slots::new(MAX_EVENTS), count: 0, queues, ended: VecDeque::new() }
    }

    /// Reserves a slot before the engine creates an event, so that a full table rejects work
    /// before it begins.
    pub fn reserve(&mut self) -> Result<Event> {
        let event = self.known.insert(EventRecord { raw: None, outcome: None })?;
        self.count += 1;
        Ok(event)
    }

    /// The engine has created no event.
    pub fn forget(&mut self, event: Event) {
        if self.known.remove(event).is_ok() {
            self.count -= 1;
        }
    }

    /// The engine has created the event.
    pub fn fill(&mut self, event: Event, queue: usize, raw: Arc<Raw>) {
        self.tidy(queue);
        if let Ok(known) = self.known.get_mut(event) {
            known.raw = Some(raw);
            self.queues[queue].push_back(event);
        }
    }

    /// The engine's event, and its outcome if it has ended.
    pub fn get(&self, event: Event) -> Result<(Arc<Raw>, Option<Outcome>)> {
        let known = self.known.get(event)?;
        let raw = known.raw.clone().ok_or(Status::Handle)?;
        Ok((raw, known.outcome))
    }

    /// Records the outcome of an event; only the first one counts.
    pub fn settle(&mut self, event: Event, outcome: Outcome) {
        if let Ok(known) = self.known.get_mut(event)
            && known.outcome.is_none()
        {
            known.outcome = Some(outcome);
            self.ended.push_back(event);
        }
    }

    /// Fails all pending events.
    pub fn lose(&mut self) {
        for (event, known) in self.known.iter_mut() {
            if known.is_open() {
                known.outcome = Some(Err(Status::Unavailable));
                self.ended.push_back(event);
            }
        }
    }

    /// The pending event of a queue after `after` others.
    pub fn open(&mut self, queue: usize, after: usize) -> Option<Event> {
        self.tidy(queue);
        let is_open = |event: &&Event| self.known.get(**event).is_ok_and(EventRecord::is_open);
        self.queues[queue].iter().filter(is_open).nth(after).copied()
    }

    /// Drops ended events from the front of a queue.
    fn tidy(&mut self, queue: usize) {
        while let Some(&event) = self.queues[queue].front()
            && !self.known.get(event).is_ok_and(EventRecord::is_open)
        {
            self.queues[queue].pop_front();
        }
        // Imported events end in any order, and callers that never poll leave ended events here.
        for list in [&mut self.queues[queue], &mut self.ended] {
            if list.len() > 2 * self.count + 64 {
                list.retain(|event| self.known.get(*event).is_ok());
            }
        }
    }

    /// Writes ended events that were not reported; returns their number.
    pub fn report(&mut self, ended: &mut [Event]) -> usize {
        let mut count = 0;
        while count < ended.len()
            && let Some(event) = self.ended.pop_front()
        {
            if self.known.get(event).is_ok() {
                ended[count] = event;
                count += 1;
            }
        }
        count
    }

    /// Removes an event. The engine's event is released when the result is dropped.
    pub fn remove(&mut self, event: Event) -> Result<Option<Arc<Raw>>> {
        let known = self.known.remove(event)?;
        self.count -= 1;
        Ok(known.raw)
    }
}
