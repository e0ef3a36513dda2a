//! Batches of objects, in flat tables that can be used again.

use std::ops::Range;

use crate::tier::remote::{Name, Trouble};

/// A piece of memory that an object's bytes come from or go to.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Where it is.
    pub address: *mut u8,
    /// How long.
    pub bytes: u64,
}

/// An object to be fetched.
#[derive(Clone, Debug)]
pub struct Get {
    /// Its name.
    pub name: Name,
    /// The first of its bytes that is wanted.
    pub offset: u64,
    parts: Range<usize>,
    /// How many bytes came; fewer than there is room for where the object ends. One that is
    /// longer than the room fills that, and no more.
    pub result: Result<u64, Trouble>,
}

/// Objects to be fetched.
#[derive(Default)]
pub struct Gets {
    /// Each of them.
    pub items: Vec<Get>,
    parts: Vec<Part>,
}

/// An object to be stored.
#[derive(Clone, Debug)]
pub struct Put {
    /// Its name.
    pub name: Name,
    parts: Range<usize>,
    /// Whether it was there already: then nothing was written.
    pub result: Result<bool, Trouble>,
}

/// Objects to be stored.
#[derive(Default)]
pub struct Puts {
    /// Each of them.
    pub items: Vec<Put>,
    parts: Vec<Part>,
}

/// A name that is asked for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The name.
    pub name: Name,
    /// How long the object is.
    pub result: Result<u64, Trouble>,
}

/// Names that are asked for.
#[derive(Default)]
pub struct Asks {
    /// Each of them.
    pub items: Vec<Ask>,
}

// SAFETY: the memory of parts is named, not owned; whoever has a lane move it promises that it
// is valid then.
unsafe impl Send for Gets {}
// SAFETY: as above.
unsafe impl Send for Puts {}

impl Gets {
    /// Adds an object; where its bytes go follows.
    pub fn object(&mut self, name: Name, offset: u64) {
        let parts = self.parts.len()..self.parts.len();
        self.items.push(Get { name, offset, parts, result: Err(Trouble::Later) });
    }

    /// Adds a piece of memory to the last object.
    pub fn part(&mut self, address: *mut u8, bytes: u64) {
        self.parts.push(Part { address, bytes });
        if let Some(last) = self.items.last_mut() {
            last.parts.end = self.parts.len();
        }
    }

    /// Where the bytes of an object go, by its number in the batch.
    pub fn parts_of(&self, item: usize) -> &[Part] {
        self.items.get(item).map_or(&[], |get| &self.parts[get.parts.clone()])
    }

    /// How many bytes of an object there is room for.
    pub fn room_of(&self, item: usize) -> u64 {
        self.parts_of(item).iter().map(|part| part.bytes).sum()
    }

    /// Forgets all; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
    }
}

impl Puts {
    /// Adds an object; where its bytes are follows.
    pub fn object(&mut self, name: Name) {
        let parts = self.parts.len()..self.parts.len();
        self.items.push(Put { name, parts, result: Err(Trouble::Later) });
    }

    /// Adds a piece of memory to the last object.
    pub fn part(&mut self, address: *const u8, bytes: u64) {
        self.parts.push(Part { address: address.cast_mut(), bytes });
        if let Some(last) = self.items.last_mut() {
            last.parts.end = self.parts.len();
        }
    }

    /// Where the bytes of an object are, by its number in the batch.
    pub fn parts_of(&self, item: usize) -> &[Part] {
        self.items.get(item).map_or(&[], |put| &self.parts[put.parts.clone()])
    }

    /// How long an object is.
    pub fn bytes_of(&self, item: usize) -> u64 {
        self.parts_of(item).iter().map(|part| part.bytes).sum()
    }

    /// Forgets all; keeps the memory of the tables.
    pub fn clear(&mut self) {
        self.items.clear();
        self.parts.clear();
    }
}

impl Asks {
    /// Adds a name.
    pub fn name(&mut self, name: Name) {
        self.items.push(Ask { name, result: Err(Trouble::Later) });
    }
}
