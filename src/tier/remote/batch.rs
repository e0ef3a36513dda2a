//! Batches of objects, in flat tables that can be reused.

use std::ops::Range;

use crate::io::link::Pieces;
use crate::tier::remote::{Name, RemoteError};

/// Source or destination of bytes of an object.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// First byte of the memory.
    pub address: *mut u8,
    /// Length in bytes.
    pub bytes: u64,
}

/// An object to fetch.
#[derive(Clone, Debug)]
pub struct Get {
    /// Name of the object.
    pub name: Name,
    /// First byte to fetch.
    pub offset: u64,
    parts: Range<usize>,
    /// Bytes that arrived: fewer than the room if the object ends before. A longer object fills the
    /// room, and no more.
    pub result: Result<u64, RemoteError>,
}

/// Objects to fetch.
#[derive(Default)]
pub struct Gets {
    /// The items.
    pub items: Vec<Get>,
    parts: Vec<Part>,
}

/// An object to store.
#[derive(Clone, Debug)]
pub struct Put {
    /// Name of the object.
    pub name: Name,
    parts: Range<usize>,
    /// True = the object existed, and nothing was written.
    pub result: Result<bool, RemoteError>,
}

/// Objects to store.
#[derive(Default)]
pub struct Puts {
    /// The items.
    pub items: Vec<Put>,
    parts: Vec<Part>,
}

/// A name to look up or to remove.
#[derive(Clone, Debug)]
pub struct Query {
    /// Name of the object.
    pub name: Name,
    /// Length of the object.
    pub result: Result<u64, RemoteError>,
}

/// Names to look up or to remove.
#[derive(Default)]
pub struct Queries {
    /// The items.
    pub items: Vec<Query>,
}

// SAFETY: parts only name memory; the caller that passes them to a client guarantees that it is
// valid then.
unsafe impl Send for Gets {}
// SAFETY: as above.
unsafe impl Send for Puts {}

impl Gets {
    /// Adds an object; its parts follow.
    pub fn object(&mut self, name: Name, offset: u64) {
        let parts = self.parts.len()..self.parts.len();
        self.items.push(Get { name, offset, parts, result: Err(RemoteError::Busy) });
    }

    /// Adds memory to the last object.
    pub fn part(&mut self, address: *mut u8, bytes: u64) {
        self.parts.push(Part { address, bytes });
        if let Some(last) = self.items.last_mut() {
            last.parts.end = self.parts.len();
        }
    }

    /// The parts of an object, by its index.
    pub fn parts_of(&self, item: usize) -> &[Part] {
        self.items.get(item).map_or(&[], |get| &self.parts[get.parts.clone()])
    }

    /// Total length of an object's parts.
    pub fn room_of(&self, item: usize) -> u64 {
        self.parts_of(item).iter().map(|part| part.bytes).sum()
    }

    /// Removes all items; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
    }
}

impl Puts {
    /// Adds an object; its parts follow.
    pub fn object(&mut self, name: Name) {
        let parts = self.parts.len()..self.parts.len();
        self.items.push(Put { name, parts, result: Err(RemoteError::Busy) });
    }

    /// Adds memory to the last object.
    pub fn part(&mut self, address: *const u8, bytes: u64) {
        self.parts.push(Part { address: address.cast_mut(), bytes });
        if let Some(last) = self.items.last_mut() {
            last.parts.end = self.parts.len();
        }
    }

    /// The parts of an object, by its index.
    pub fn parts_of(&self, item: usize) -> &[Part] {
        self.items.get(item).map_or(&[], |put| &self.parts[put.parts.clone()])
    }

    /// Length of an object.
    pub fn bytes_of(&self, item: usize) -> u64 {
        self.parts_of(item).iter().map(|part| part.bytes).sum()
    }

    /// Removes all items; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
    }
}

impl Queries {
    /// Adds a name.
    pub fn name(&mut self, name: Name) {
        self.items.push(Query { name, result: Err(RemoteError::Busy) });
    }
}

/// One operation of a client: on a batch, or one of the backend's own.
pub enum Operation<'a, C> {
    /// Fetches objects.
    Get(&'a mut Gets),
    /// Stores objects.
    Put(&'a mut Puts),
    /// Looks names up.
    Lookup(&'a mut Queries),
    /// Removes objects.
    Remove(&'a mut Queries),
    /// An operation of the backend that concerns no object. It counts as one item.
    Control(C),
}

/// An operation of a backend that concerns no object.
pub trait Control {
    /// Records that it failed.
    fn fail(&mut self, error: RemoteError);
}

impl<C: Control> Operation<'_, C> {
    /// Number of items.
    pub fn item_count(&self) -> usize {
        match self {
            Operation::Get(gets) => gets.items.len(),
            Operation::Put(puts) => puts.items.len(),
            Operation::Lookup(queries) | Operation::Remove(queries) => queries.items.len(),
            Operation::Control(_) => 1,
        }
    }

    /// The object that an item concerns; None = a control operation, or no such item.
    pub fn name(&self, item: usize) -> Option<&Name> {
        match self {
            Operation::Get(gets) => gets.items.get(item).map(|get| &get.name),
            Operation::Put(puts) => puts.items.get(item).map(|put| &put.name),
            Operation::Lookup(queries) | Operation::Remove(queries) => {
                queries.items.get(item).map(|query| &query.name)
            }
            Operation::Control(_) => None,
        }
    }

    /// Whether an item stores more bytes than the backend accepts.
    pub fn is_too_long(&self, item: usize, max_bytes: u64) -> bool {
        matches!(self, Operation::Put(puts) if puts.bytes_of(item) > max_bytes)
    }

    /// Sets the result of an item to an error.
    pub fn fail(&mut self, item: usize, error: RemoteError) {
        match self {
            Operation::Get(gets) => gets.items[item].result = Err(error),
            Operation::Put(puts) => puts.items[item].result = Err(error),
            Operation::Lookup(queries) | Operation::Remove(queries) => {
                queries.items[item].result = Err(error);
            }
            Operation::Control(control) => control.fail(error),
        }
    }
}

/// Adds the memory of parts to `into`, from byte `skip` of the object on, at most `most` bytes;
/// returns the number of bytes that were added.
pub fn add_pieces(parts: &[Part], mut skip: u64, most: u64, into: &mut Pieces) -> u64 {
    let mut added = 0;
    for part in parts {
        let bytes = part.bytes.saturating_sub(skip).min(most - added);
        if bytes > 0 {
            if !into.push(part.address.wrapping_add(skip as usize), bytes as usize) {
                break;
            }
            added += bytes;
        }
        skip = skip.saturating_sub(part.bytes);
    }
    added
}

/// Copies bytes of an object to its parts, from byte `skip` of the object on. Bytes that do not
/// fit are dropped.
///
/// # Safety
/// The memory of the parts is valid, and no other thread uses it during the call.
pub unsafe fn copy_to_parts(parts: &[Part], mut skip: u64, mut bytes: &[u8]) {
    for part in parts {
        let count = (part.bytes.saturating_sub(skip) as usize).min(bytes.len());
        if count > 0 {
            let to = part.address.wrapping_add(skip as usize);
            // SAFETY: `count` bytes from `skip` on are within the part, which the caller
            // guarantees; `bytes` is other memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count) };
            bytes = &bytes[count..];
        }
        skip = skip.saturating_sub(part.bytes);
    }
}
