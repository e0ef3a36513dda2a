//! Events about chunks and sessions, for routers that track where a prefix is: a bounded ring that
//! any number of readers follow, each from its own position. A reader that is too slow learns how
//! many events it missed, and reads the state again.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;

/// Kind of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// No event.
    #[default]
    None = 0,
    /// All cells of a chunk are resident in a tier.
    Stored = 1,
    /// No longer all cells of a chunk are resident in a tier.
    Removed = 2,
    /// All chunks of a namespace were removed.
    Cleared = 3,
}

/// An event. Passed through the C interface as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Event {
    /// Number; consecutive.
    pub number: u64,
    /// Time by the runtime's clock.
    pub at_ns: u64,
    /// A [`Kind`].
    pub kind: u32,
    /// Tier, numbered as in budgets.
    pub tier: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// Index of the chunk in its sequence.
    pub position: u32,
    /// Key of the chunk.
    pub key: [u8; 32],
    /// Key of its parent; for the first chunk the key of the namespace.
    pub parent: [u8; 32],
    /// Key of the namespace.
    pub namespace: [u8; 32],
}

// SAFETY: integers only, none of which has a forbidden value.
unsafe impl Zeroable for Event {}

/// Most events kept.
pub const MAX_EVENTS: usize = 1 << 22;

/// The newest entries of a sequence that is numbered from 0.
pub struct Ring<T: Zeroable> {
    ring: Zeroed<T>,
    next: u64,
    /// Place of the next entry.
    at: usize,
}

/// Events of a store.
pub type Events = Ring<Event>;

impl Events {
    /// A ring of so many events; 0 = none.
    pub fn new(events: usize) -> Result<Events> {
        if events > MAX_EVENTS {
            fail!(Limit, "events={events}: at most {MAX_EVENTS} are kept");
        }
        Ring::of(events)
    }
}

impl<T: Zeroable> Ring<T> {
    /// A ring of so many entries; 0 = none.
    pub fn of(entries: usize) -> Result<Ring<T>> {
        Ok(Ring { ring: Zeroed::new(entries)?, next: 0, at: 0 })
    }

    /// Number of the next entry.
    pub fn next_number(&self) -> u64 {
        self.next
    }

    /// Adds an entry, which `make` builds with its number. A ring without entries only counts.
    #[inline]
    pub fn add(&mut self, make: impl FnOnce(u64) -> T) {
        if let Some(place) = self.ring.get_mut(self.at) {
            *place = make(self.next);
            self.at = if self.at + 1 == self.ring.len() { 0 } else { self.at + 1 };
        }
        self.next += 1;
    }

    /// Copies entries from number `from` on into `out`. Returns how many, and how many before them
    /// are lost.
    pub fn read(&self, from: u64, out: &mut [T]) -> (usize, u64) {
        let oldest = self.next.saturating_sub(self.ring.len() as u64);
        let start = from.max(oldest).min(self.next);
        let lost = start.saturating_sub(from);
        let count = ((self.next - start) as usize).min(out.len());
        for (i, out) in out.iter_mut().take(count).enumerate() {
            *out = self.ring[((start + i as u64) % self.ring.len() as u64) as usize];
        }
        (count, lost)
    }
}

// ---------- event feed
//
// Entries of a stream that routers on other machines read (docs/reference/events.md).

/// Most events of an entry.
pub const MOST: usize = 256;
/// Version of the entry format.
const VERSION: &[u8] = b"1";

/// Stage of a store's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Opened: what an earlier run of this engine published is void.
    Opened,
    /// Running.
    Open,
    /// Closed: the contents of its memory are lost.
    Closed,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Opened => "opened",
            Stage::Open => "open",
            Stage::Closed => "closed",
        }
    }
}

/// Builds entries of a remote event stream.
pub struct Entries {
    node: String,
    run: String,
    numbers: [String; 2],
    packed: Vec<u8>,
}

impl Entries {
    /// For an engine of this name, and this run of it.
    pub fn new(node: &str, run: u64) -> Entries {
        Entries {
            node: node.to_string(),
            run: format!("{run:016x}"),
            numbers: Default::default(),
            packed: Vec::new(),
        }
    }

    /// Builds the next entry: events from number `first` on, of which `missed` before them are
    /// lost.
    pub fn make(
        &mut self,
        stage: Stage,
        first: u64,
        missed: u64,
        events: &[Event],
    ) -> [(&'static str, &[u8]); 7] {
        self.numbers = [first.to_string(), missed.to_string()];
        self.packed.clear();
        for event in events {
            for number in [event.kind, event.tier, event.tokens, event.position] {
                self.packed.extend_from_slice(&number.to_le_bytes());
            }
            for key in [&event.key, &event.parent, &event.namespace] {
                self.packed.extend_from_slice(key);
            }
        }
        [
            ("v", VERSION),
            ("node", self.node.as_bytes()),
            ("run", self.run.as_bytes()),
            ("stage", stage.name().as_bytes()),
            ("first", self.numbers[0].as_bytes()),
            ("missed", self.numbers[1].as_bytes()),
            ("events", &self.packed),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(events: &Events, from: u64, room: usize) -> (Vec<u64>, u64) {
        let mut out = vec![Event::default(); room];
        let (count, lost) = events.read(from, &mut out);
        (out[..count].iter().map(|e| e.number).collect(), lost)
    }

    #[test]
    fn readers_resume_at_their_position_and_learn_the_number_of_lost_events() {
        let mut events = Events::new(4).unwrap();
        assert_eq!(numbers(&events, 0, 9), (vec![], 0));
        let numbered = |number| Event { number, kind: Kind::Stored as u32, ..Event::default() };
        (0..3).for_each(|_| events.add(numbered));
        assert_eq!(numbers(&events, 0, 2), (vec![0, 1], 0));
        assert_eq!(numbers(&events, 2, 2), (vec![2], 0));
        (0..5).for_each(|_| events.add(numbered));
        assert_eq!(numbers(&events, 3, 9), (vec![4, 5, 6, 7], 1));
        assert_eq!(numbers(&events, 8, 9), (vec![], 0));
        assert_eq!(numbers(&events, u64::MAX, 9), (vec![], 0), "from the future");
    }

    #[test]
    fn no_event_is_retained_with_capacity_zero() {
        let mut events = Events::new(0).unwrap();
        events.add(|number| Event { number, ..Event::default() });
        assert_eq!((numbers(&events, 0, 3), events.next_number()), ((vec![], 1), 1));
        assert!(Events::new(MAX_EVENTS + 1).is_err());
    }
}

#[cfg(test)]
mod event_feed_tests {
    use super::*;

    #[test]
    fn an_entry_has_the_documented_fields() {
        let event = Event {
            number: 7,
            at_ns: 1,
            kind: 2,
            tier: 3,
            tokens: 16,
            position: 258,
            key: [4; 32],
            parent: [5; 32],
            namespace: [6; 32],
        };
        let mut entries = Entries::new("http://a:1", 0xab);
        let fields = entries.make(Stage::Open, 7, 1, &[event, event]);
        let head: Vec<_> = fields[..6].iter().map(|(name, value)| (*name, *value)).collect();
        let expected: [(&str, &[u8]); 6] = [
            ("v", b"1"),
            ("node", b"http://a:1"),
            ("run", b"00000000000000ab"),
            ("stage", b"open"),
            ("first", b"7"),
            ("missed", b"1"),
        ];
        assert_eq!(head, expected);
        let mut one = vec![2, 0, 0, 0, 3, 0, 0, 0, 16, 0, 0, 0, 2, 1, 0, 0];
        [4u8, 5, 6].iter().for_each(|&byte| one.extend([byte; 32]));
        assert_eq!(fields[6], ("events", &one.repeat(2)[..]));
    }
}
