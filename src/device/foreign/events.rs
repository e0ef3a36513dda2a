//! The events of an engine's device: how they ended, which are open on each stream, and which
//! nobody was told of yet.

use std::collections::VecDeque;

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::Event;
use crate::device::foreign::table::Engine;
use crate::device::slots::Slots;

/// Most events that are known at once.
const MAX_EVENTS: usize = 65_536;

/// How a batch ended.
pub type Outcome = std::result::Result<(), Status>;

/// The engine's own event. It is given back when the last who asks for it has gone, which must
/// not be under a lock.
pub struct Raw {
    engine: Arc<dyn Engine>,
    number: u64,
}

impl Raw {
    /// An event that the engine has made.
    pub fn new(engine: &Arc<dyn Engine>, number: u64) -> Arc<Raw> {
        Arc::new(Raw { engine: engine.clone(), number })
    }

    /// What the engine calls it.
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
    /// `None`: the engine is being asked for it.
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
    /// For each stream, and last for what was adopted: events that may be open, oldest first.
    queues: Vec<VecDeque<Event>>,
    /// Those that ended and were not reported.
    ended: VecDeque<Event>,
}

impl Events {
    /// For so many streams.
    pub fn new(streams: u32) -> Events {
        let queues = (0..=streams).map(|_| VecDeque::new()).collect();
        Events { known: Slots::new(MAX_EVENTS), count: 0, queues, ended: VecDeque::new() }
    }

    /// A place for an event that the engine is asked for now: where there is none, nothing has
    /// been begun.
    pub fn reserve(&mut self) -> Result<Event> {
        let event = self.known.insert(EventRecord { raw: None, outcome: None })?;
        self.count += 1;
        Ok(event)
    }

    /// The engine has given none.
    pub fn forget(&mut self, event: Event) {
        if self.known.remove(event).is_ok() {
            self.count -= 1;
        }
    }

    /// The engine has given it.
    pub fn fill(&mut self, event: Event, queue: usize, raw: Arc<Raw>) {
        self.tidy(queue);
        if let Ok(known) = self.known.get_mut(event) {
            known.raw = Some(raw);
            self.queues[queue].push_back(event);
        }
    }

    /// An event of the engine's, and how it ended if it has.
    pub fn get(&self, event: Event) -> Result<(Arc<Raw>, Option<Outcome>)> {
        let known = self.known.get(event)?;
        let raw = known.raw.clone().ok_or(Status::Handle)?;
        Ok((raw, known.outcome))
    }

    /// It has ended; only the first who says so counts.
    pub fn settle(&mut self, event: Event, outcome: Outcome) {
        if let Ok(known) = self.known.get_mut(event)
            && known.outcome.is_none()
        {
            known.outcome = Some(outcome);
            self.ended.push_back(event);
        }
    }

    /// All that are open have failed.
    pub fn lose(&mut self) {
        for (event, known) in self.known.iter_mut() {
            if known.is_open() {
                known.outcome = Some(Err(Status::Unavailable));
                self.ended.push_back(event);
            }
        }
    }

    /// The event of a line that is open, after so many others that are.
    pub fn open(&mut self, queue: usize, after: usize) -> Option<Event> {
        self.tidy(queue);
        let is_open = |event: &&Event| self.known.get(**event).is_ok_and(EventRecord::is_open);
        self.queues[queue].iter().filter(is_open).nth(after).copied()
    }

    /// Forgets the oldest of a line that have ended.
    fn tidy(&mut self, queue: usize) {
        while let Some(&event) = self.queues[queue].front()
            && !self.known.get(event).is_ok_and(EventRecord::is_open)
        {
            self.queues[queue].pop_front();
        }
        // What was adopted ends in any order, and who never polls leaves all that ended here.
        for list in [&mut self.queues[queue], &mut self.ended] {
            if list.len() > 2 * self.count + 64 {
                list.retain(|event| self.known.get(*event).is_ok());
            }
        }
    }

    /// Writes those that ended and were not reported; how many.
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

    /// Forgets an event; the engine's goes when what is returned does.
    pub fn remove(&mut self, event: Event) -> Result<Option<Arc<Raw>>> {
        let known = self.known.remove(event)?;
        self.count -= 1;
        Ok(known.raw)
    }
}
