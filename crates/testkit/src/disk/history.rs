//! The last calls to a simulated disk, for whoever has to find out what happened.

use std::collections::VecDeque;
use std::fmt;

/// How many calls are remembered.
pub const MAX_EVENTS: usize = 1024;

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which of all calls it was.
    pub number: u64,
    /// Which function.
    pub call: &'static str,
    /// The file's name, or its number where only that is known.
    pub file: String,
    /// From where.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
    /// How it ended.
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
    /// Adds a call, and forgets the oldest if there are too many.
    pub fn add(&mut self, event: Event) {
        if self.0.len() == MAX_EVENTS {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    /// What is remembered, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        self.0.iter()
    }
}
