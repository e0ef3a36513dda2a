//! The table of slabs: slabs by number, and doubly linked lists of table entries.

use crate::base::status::{Result, Status};
use crate::meta::index::NONE;
use crate::tier::host::slab::Slab;

/// An entry of the table.
pub struct Entry {
    slab: Option<Slab>,
    /// Size class of the slab.
    pub class: usize,
    /// Whether the slab is being emptied: no more pieces are allocated in it.
    pub drains: bool,
    /// Whether the entry is in a list.
    listed: bool,
    /// Previous entry of the list.
    before: u32,
    /// Next entry of the list; for a free entry, the next free one.
    after: u32,
}

/// First and last entry of a list.
#[derive(Clone, Copy)]
pub struct List {
    /// The first entry; [`NONE`] if the list is empty.
    pub first: u32,
    /// The last entry; [`NONE`] if the list is empty.
    pub last: u32,
}

/// Slabs by number.
pub struct Table {
    entries: Vec<Entry>,
    limit: u32,
    /// First entry of the list of free entries.
    free: u32,
    /// Number of slabs.
    used: u32,
}

impl List {
    /// The empty list.
    pub const EMPTY: List = List { first: NONE, last: NONE };
}

impl Table {
    /// A table for up to `limit` slabs. Its memory is reserved now, but not touched.
    pub fn new(limit: u32) -> Result<Table> {
        let mut entries = Vec::new();
        if entries.try_reserve_exact(limit as usize).is_err() {
            return Err(Status::NoMem.into());
        }
        Ok(Table { entries, limit, free: NONE, used: 0 })
    }

    /// Number of entries, free ones included.
    pub fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Whether the table has as many slabs as allowed.
    pub fn is_full(&self) -> bool {
        self.used >= self.limit
    }

    /// A slab and its entry.
    pub fn get(&self, number: u32) -> Option<(&Entry, &Slab)> {
        let entry = self.entries.get(number as usize)?;
        entry.slab.as_ref().map(|slab| (entry, slab))
    }

    /// A slab.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut Slab> {
        self.entries.get_mut(number as usize)?.slab.as_mut()
    }

    /// The class of a slab, whether it drains, and the slab.
    pub fn find_mut(&mut self, number: u32) -> Option<(usize, bool, &mut Slab)> {
        let entry = self.entries.get_mut(number as usize)?;
        entry.slab.as_mut().map(|slab| (entry.class, entry.drains, slab))
    }

    /// The entry of a slab.
    pub fn entry_mut(&mut self, number: u32) -> &mut Entry {
        &mut self.entries[number as usize]
    }

    /// Adds a slab and returns its number. The table must not be full.
    pub fn enter(&mut self, slab: Slab) -> u32 {
        let entry = Entry {
            slab: Some(slab),
            class: 0,
            drains: false,
            listed: false,
            before: NONE,
            after: NONE,
        };
        debug_assert!(!self.is_full(), "the table is full: growing it would move its memory");
        self.used += 1;
        let number = self.free;
        if let Some(free) = self.entries.get_mut(number as usize) {
            self.free = std::mem::replace(free, entry).after;
            return number;
        }
        self.entries.push(entry);
        self.len() - 1
    }

    /// Removes a slab. It must be in no list.
    pub fn remove(&mut self, number: u32) -> Option<Slab> {
        let entry = &mut self.entries[number as usize];
        debug_assert!(!entry.listed, "the slab is in a list");
        let slab = entry.slab.take();
        // An entry without a slab is in the list of free entries already.
        if slab.is_some() {
            entry.after = std::mem::replace(&mut self.free, number);
            self.used -= 1;
        }
        slab
    }

    /// Adds a slab, which must be in no list, at the front of a list.
    pub fn list_first(&mut self, list: &mut List, number: u32) {
        self.link(list, number, NONE, list.first);
    }

    /// Adds a slab, which must be in no list, at the end of a list.
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
        debug_assert!(!entry.listed, "the slab is in a list already");
        (entry.before, entry.after, entry.listed) = (before, after, true);
    }

    /// Removes a slab from `list`, if it is in it.
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
