//! What changed in a store, as entries of a stream that routers on other machines read
//! (docs/remote.md, "Events").

use crate::store::events::Event;

/// Most events of an entry.
pub const MOST: usize = 256;
/// The version of what entries mean.
const VERSION: &[u8] = b"1";

/// How far a store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It was opened: what was told of this engine before is of no account.
    Opened,
    /// It goes on.
    Open,
    /// It is closed: what was in its memory is gone.
    Closed,
}

impl Stage {
    fn word(self) -> &'static str {
        match self {
            Stage::Opened => "opened",
            Stage::Open => "open",
            Stage::Closed => "closed",
        }
    }
}

/// Makes entries.
pub struct Entries {
    node: String,
    run: String,
    numbers: [String; 2],
    packed: Vec<u8>,
}

impl Entries {
    /// Of an engine that is called so, and of this run of it.
    pub fn new(node: &str, run: u64) -> Entries {
        Entries {
            node: node.to_string(),
            run: format!("{run:016x}"),
            numbers: Default::default(),
            packed: Vec::new(),
        }
    }

    /// The next one: events from number `first` on, `missed` before them that nobody will hear of.
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
            ("stage", stage.word().as_bytes()),
            ("first", self.numbers[0].as_bytes()),
            ("missed", self.numbers[1].as_bytes()),
            ("events", &self.packed),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_what_is_documented() {
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
        let want: [(&str, &[u8]); 6] = [
            ("v", b"1"),
            ("node", b"http://a:1"),
            ("run", b"00000000000000ab"),
            ("stage", b"open"),
            ("first", b"7"),
            ("missed", b"1"),
        ];
        assert_eq!(head, want);
        let mut one = vec![2, 0, 0, 0, 3, 0, 0, 0, 16, 0, 0, 0, 2, 1, 0, 0];
        [4u8, 5, 6].iter().for_each(|&byte| one.extend([byte; 32]));
        assert_eq!(fields[6], ("events", &one.repeat(2)[..]));
    }
}
