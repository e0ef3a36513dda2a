//! Loads: units on their way to where they are used.

use std::collections::VecDeque;

use crate::base::status::Error;
use crate::device::Event;
use crate::stream::units::NONE;

/// Where a load brings a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Its home.
    Home,
    /// A slot of the line, which units pass through in order.
    Line(u32),
    /// A slot for experts.
    Expert(u32),
}

/// Which way its bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// From the file to host memory, and that is it.
    Direct,
    /// From the file into staging, from there to the device.
    Staged,
    /// From its home in host memory to the device.
    Copied,
}

/// What comes first: a smaller rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// Somebody waits for it.
    Wanted,
    /// The pass comes to it.
    Next,
    /// It was said to be needed.
    Hinted,
    /// It belongs at home.
    Background,
}

/// A unit on its way.
pub(super) struct Load {
    pub unit: u32,
    /// None: it is read ahead, and gets a slot later.
    pub goal: Option<Goal>,
    pub path: Path,
    pub rank: Rank,
    /// Among equals the older goes first.
    pub age: u64,
    /// Chunks in all.
    pub chunks: u32,
    pub next_read: u32,
    pub next_copy: u32,
    /// Read, and not copied yet: chunk and staging slot.
    pub staged: VecDeque<(u32, u32)>,
    pub reading: u32,
    pub copying: u32,
    /// Copies that the device was given.
    pub issued: u32,
    /// Chunks that were read to where they belong, without a copy.
    pub landed: u32,
    pub done: u32,
    /// Whose memory has to be given back before this may fill its own; [`NONE`] = nobody's.
    pub clear: u32,
    pub clearing: bool,
    /// No memory is behind its addresses yet; and somebody puts it there.
    pub unbacked: bool,
    pub backing: bool,
    /// It is not wanted any more: what is under way ends, nothing else begins.
    pub dropped: bool,
    pub failed: Option<Error>,
    /// The device's event of its last copy.
    pub event: Option<Event>,
    /// The event after which its slot may be written; the first copy waits for it.
    pub after: Option<Event>,
}

impl Load {
    pub fn new(unit: u32, path: Path, rank: Rank, chunks: u32, age: u64) -> Load {
        Load {
            unit,
            goal: None,
            path,
            rank,
            age,
            chunks,
            next_read: 0,
            next_copy: 0,
            staged: VecDeque::new(),
            reading: 0,
            copying: 0,
            issued: 0,
            landed: 0,
            done: 0,
            clear: NONE,
            clearing: false,
            unbacked: false,
            backing: false,
            dropped: false,
            failed: None,
            event: None,
            after: None,
        }
    }

    /// Whether it begins nothing new.
    pub fn is_over(&self) -> bool {
        self.dropped || self.failed.is_some()
    }

    /// Whether nothing of it is under way.
    pub fn is_still(&self) -> bool {
        self.reading == 0 && self.copying == 0 && !self.clearing && !self.backing
    }

    /// Whether it has a place whose addresses want memory.
    pub fn wants_memory(&self) -> bool {
        self.unbacked && !self.backing && self.goal.is_some() && !self.is_over()
    }

    pub fn wants_read(&self) -> bool {
        let may = match self.path {
            Path::Direct => self.goal.is_some() && !self.clearing && self.clear == NONE,
            Path::Staged => true,
            Path::Copied => false,
        };
        may && !self.is_over() && self.next_read < self.chunks
    }

    pub fn wants_copy(&self, is_home: bool) -> bool {
        let ready = match self.path {
            Path::Direct => false,
            Path::Staged => !self.staged.is_empty(),
            Path::Copied => is_home && self.next_copy < self.chunks,
        };
        ready && self.goal.is_some() && !self.unbacked && !self.is_over()
    }

    /// All its copies are with the device, if not done.
    pub fn is_issued(&self) -> bool {
        self.path != Path::Direct && self.issued + self.landed == self.chunks && !self.is_over()
    }
}
