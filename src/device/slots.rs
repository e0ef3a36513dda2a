//! Event numbers: a slot and its generation. The number of a released event becomes invalid.

use crate::base::status::{Result, Status};
use crate::device::Event;
use crate::fail;

struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

/// Table of unreleased events with a value for each.
pub struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    most: usize,
}

impl<T> Slots<T> {
    /// A table of at most `most` events.
    pub fn new(most: usize) -> Slots<T> {
        Slots { slots: Vec::new(), free: Vec::new(), most }
    }

    /// Makes room for one more event. [`Status::Again`]: the limit is reached.
    pub fn reserve(&mut self) -> Result<()> {
        if self.free.is_empty() && self.slots.len() == self.most {
            return Err(Status::Again.into());
        }
        // Reserves room in the free list, too, so that a release never fails.
        let more = usize::from(self.free.is_empty());
        let listed = (self.slots.len() + more).saturating_sub(self.free.len());
        let room = self.slots.try_reserve(more).and_then(|()| self.free.try_reserve(listed));
        room.map_err(|_| Status::NoMem.into())
    }

    /// Adds an event.
    pub fn insert(&mut self, value: T) -> Result<Event> {
        self.reserve()?;
        let at = self.free.pop().map_or(self.slots.len(), |at| at as usize);
        if at == self.slots.len() {
            self.slots.push(Slot { generation: 1, value: None });
        }
        let slot = &mut self.slots[at];
        slot.value = Some(value);
        Ok(Event(u64::from(slot.generation) << 32 | at as u64))
    }

    fn at(&self, event: Event) -> Result<usize> {
        let (at, generation) = (event.0 as u32 as usize, (event.0 >> 32) as u32);
        match self.slots.get(at) {
            Some(slot) if slot.generation == generation && slot.value.is_some() => Ok(at),
            _ => fail!(Handle, "event {:#x} is not of this device, or was released", event.0),
        }
    }

    /// The value of an event.
    pub fn get(&self, event: Event) -> Result<&T> {
        let at = self.at(event)?;
        self.slots[at].value.as_ref().ok_or_else(|| Status::Handle.into())
    }

    /// The value of an event, mutable.
    pub fn get_mut(&mut self, event: Event) -> Result<&mut T> {
        let at = self.at(event)?;
        self.slots[at].value.as_mut().ok_or_else(|| Status::Handle.into())
    }

    /// Removes an event; returns its value.
    pub fn remove(&mut self, event: Event) -> Result<T> {
        let at = self.at(event)?;
        let slot = &mut self.slots[at];
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.free.push(at as u32);
        slot.value.take().ok_or_else(|| Status::Handle.into())
    }

    /// All events.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Event, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(at, slot)| {
            let event = Event(u64::from(slot.generation) << 32 | at as u64);
            slot.value.as_mut().map(|value| (event, value))
        })
    }
}
