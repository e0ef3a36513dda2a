//! The last calls of a simulated disk, for debugging.

use std::collections::VecDeque;
use std::fmt;

/// Limit: recorded calls.
pub const MAX_EVENTS: usize = 1024;

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Sequence number.
    pub number: u64,
    /// Function.
    pub call: &'static str,
    /// Name of the file, or its id if the name is unknown.
    pub file: String,
    /// Offset.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
    /// Outcome.
    pub outcome: &'static str,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Event { number, call, file, offset, bytes, outcome } = self;
        write!(f, "{number:>6} {call} {file} {offset}+{bytes}: {outcome}")
    }
}

/// The last calls.
#[derive(Default)]
pub struct History(VecDeque<Event>);

impl History {
    /// Adds a call, and drops the oldest beyond the limit.
    pub fn add(&mut self, event: Event) {
        if self.0.len() == MAX_EVENTS {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    /// The recorded calls, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.0.iter()
    }
}
