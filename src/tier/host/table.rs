//! The table of segments, and lists over it.

use crate::base::status::{Result, Status};
use crate::meta::index::NONE;
use crate::tier::host::slab::Slab;

/// An entry of the table.
pub struct Entry {
    slab: Option<Slab>,
    /// Which class it is of.
    pub class: usize,
    /// It gives out no more pieces.
    pub drains: bool,
    listed: bool,
    /// Its neighbours in a list; of a free entry the next free one.
    before: u32,
    after: u32,
}

/// The ends of a list of segments.
#[derive(Clone, Copy)]
pub struct List {
    /// The first, or [`NONE`].
    pub first: u32,
    last: u32,
}

/// Segments by number.
pub struct Table {
    entries: Vec<Entry>,
    limit: u32,
    free: u32,
    /// Segments that are there.
    used: u32,
}

impl List {
    /// No segment.
    pub const EMPTY: List = List { first: NONE, last: NONE };
}

impl Table {
    /// Room for `limit` segments: reserved, not touched.
    pub fn new(limit: u32) -> Result<Table> {
        let mut entries = Vec::new();
        if entries.try_reserve_exact(limit as usize).is_err() {
            return Err(Status::NoMem.into());
        }
        Ok(Table { entries, limit, free: NONE, used: 0 })
    }

    /// Numbers that are or were in use.
    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Whether there is no room.
    pub fn is_full(&self) -> bool {
        self.used >= self.limit
    }

    /// A segment and what is noted of it.
    pub fn get(&self, number: u32) -> Option<(&Entry, &Slab)> {
        let entry = self.entries.get(number as usize)?;
        entry.slab.as_ref().map(|slab| (entry, slab))
    }

    /// A segment and what is noted of it, to change them.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Slab> {
        self.entries.get_mut(number as usize)?.slab.as_mut()
    }

    /// What is noted of a segment.
    pub fn entry_mut(&mut self, number: u32) -> &mut Entry {
        &mut self.entries[number as usize]
    }

    /// Gives a segment a number; the table is not full.
    pub fn enter(&mut self, slab: Slab) -> u32 {
        let entry = Entry {
            slab: Some(slab),
            class: 0,
            drains: false,
            listed: false,
            before: NONE,
            after: NONE,
        };
        debug_assert!(!self.is_full(), "the table would move");
        self.used += 1;
        let number = self.free;
        if let Some(free) = self.entries.get_mut(number as usize) {
            self.free = std::mem::replace(free, entry).after;
            return number;
        }
        self.entries.push(entry);
        self.len() - 1
    }

    /// Takes a segment out that is in no list.
    pub fn remove(&mut self, number: u32) -> Option<Slab> {
        let entry = &mut self.entries[number as usize];
        debug_assert!(!entry.listed, "it is in a list");
        let slab = entry.slab.take();
        // One that was taken out before is in the list of free ones already.
        if slab.is_some() {
            entry.after = std::mem::replace(&mut self.free, number);
            self.used -= 1;
        }
        slab
    }

    /// Puts a segment that is in no list first.
    pub fn list_first(&mut self, list: &mut List, number: u32) {
        self.link(list, number, NONE, list.first);
    }

    /// Puts a segment that is in no list last.
    pub fn list_last(&mut self, list: &mut List, number: u32) {
        self.link(list, number, list.last, NONE);
    }

    fn link(&mut self, list: &mut List, number: u32, before: u32, after: u32) {
        match self.entries.get_mut(before as usize) {
            Some(entry) => entry.after = number,
            None => list.first = number,
        }
        match self.entries.get_mut(after as usize) {
            Some(entry) => entry.before = number,
            None => list.last = number,
        }
        let entry = &mut self.entries[number as usize];
        debug_assert!(!entry.listed, "it is in a list already");
        (entry.before, entry.after, entry.listed) = (before, after, true);
    }

    /// Takes a segment out of its list, if it is in one.
    pub fn unlist(&mut self, list: &mut List, number: u32) {
        let entry = &mut self.entries[number as usize];
        if !std::mem::replace(&mut entry.listed, false) {
            return;
        }
        let (before, after) = (entry.before, entry.after);
        match self.entries.get_mut(before as usize) {
            Some(entry) => entry.after = after,
            None => list.first = after,
        }
        match self.entries.get_mut(after as usize) {
            Some(entry) => entry.before = before,
            None => list.last = before,
        }
    }
}
