//! `tlru`: tail-optimised LRU. It keeps the part of a session's history that the next turn needs to
//! stay below a bound on computed tokens. The rest is evicted first, by LRU, then the needed part,
//! by LRU.
//!
//! With H tokens of history, the next turn computes H + Q minus the cached tokens. It is on time if
//! that is at most xi: if the first B = max(0, H + Q - xi) tokens are cached. Only a leading part
//! is usable, so the tokens beyond B are those at the *end* of the history. An object whose context
//! (tokens before it) is B or more can be evicted without making a turn late. An object that spans
//! B is kept with the needed part. A session with H + Q up to xi needs nothing cached.
//!
//! H is the session's length, or the end of the object if that is greater. An object that no
//! session used counts as needed. The side of an object is decided at its insert and at each use;
//! it does not change in between while its session grows.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::lists::Lists;
use crate::policy::{Policy, Rank};

/// Parameters of `tlru`.
pub const PARAMS: &[Param] = &[
    Param::new("threshold", "tokens that a turn may compute without being late (xi of the paper)"),
    Param::new("turn", "tokens that the next turn is expected to add (Q of the paper)"),
];

const BEYOND: usize = 0;
const REST: usize = 1;

/// LRU in two parts.
pub struct Tlru {
    lists: Lists<2>,
    threshold: u64,
    turn: u64,
}

impl Tlru {
    /// Reads `tlru` and its parameters.
    pub fn read(reader: &mut Reader) -> Result<Tlru> {
        Ok(Tlru {
            threshold: reader.u64("threshold", 4096, 0..=1 << 32)?,
            turn: reader.u64("turn", 200, 0..=1 << 32)?,
            lists: Lists::default(),
        })
    }

    fn part(&self, history: u64, context: u64) -> usize {
        let needed = history.saturating_add(self.turn).saturating_sub(self.threshold);
        if context >= needed { BEYOND } else { REST }
    }

    fn part_of(&self, objects: &Objects, slot: Slot) -> usize {
        let Some(session) = objects.sessions.of(objects.node(slot).session) else { return REST };
        let facts = objects.facts(slot);
        let end = u64::from(facts.context) + u64::from(facts.tokens);
        self.part(u64::from(session.length).max(end), facts.context.into())
    }
}

impl Policy for Tlru {
    fn name(&self) -> &'static str {
        "tlru"
    }

    forward!(lists: remove, victim, put_back, resize, check);

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let part = self.part_of(objects, slot);
        self.lists.push_hot(objects, part, slot);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let part = self.part_of(objects, slot);
        self.lists.move_hot(objects, part, slot);
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        Rank::count(node.tag.into(), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let part = match columns.length(row) {
                0 => REST,
                history => self.part(history, columns.context(row)),
            };
            *rank = Rank::count(part as u64, columns.last_access_ns(row));
        }
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, _old: &Facts, _now: i64) {
        let part = self.part_of(objects, slot);
        if part != usize::from(objects.node(slot).tag) {
            let held = objects.node(slot).is_held();
            self.lists.hold(objects, slot);
            objects.node_mut(slot).tag = part as u8;
            if !held {
                self.lists.put_back(objects, slot);
            }
        }
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("beyond_units", self.lists.lists[BEYOND].units as f64);
        out("rest_units", self.lists.lists[REST].units as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::meta::objects::Facts;
    use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};

    #[test]
    fn the_end_of_a_long_history_is_evicted_before_older_objects() {
        let options = Options { max_objects: 64, ..Options::default() };
        let spec = "tlru(threshold=200,turn=100)";
        let mut e = Evictor::open(spec, &options).expect("a known policy");
        let path = |ids: std::ops::Range<u64>| -> Vec<NewObject> {
            let block = |(i, id)| NewObject {
                id,
                parent: (i > 0).then(|| id - 1),
                units: 1,
                facts: Facts { context: i as u32 * 50, tokens: 50, ..Facts::default() },
            };
            ids.enumerate().map(block).collect()
        };
        let request = |session, length| RequestContext {
            session: Some(session),
            length,
            ..RequestContext::default()
        };
        // Without a session: by LRU, after the part beyond B.
        e.insert(1, &RequestContext::default(), &path(100..101)).expect("room");
        // 300 + 100 - 200: objects that start at 200 or later are not needed.
        e.lookup(2, &request(7, 300), &[1], &mut []).expect("a time");
        e.insert(3, &request(7, 300), &path(1..7)).expect("room");
        // 100 + 100 - 200: nothing is needed.
        e.lookup(4, &request(8, 100), &[11], &mut []).expect("a time");
        e.insert(5, &request(8, 100), &path(11..13)).expect("room");
        let mut out = Vec::new();
        e.evict(6, u64::MAX, &mut out).expect("a time");
        let order: Vec<u64> = out.iter().map(|v| v.id).collect();
        assert_eq!(order, [6, 5, 12, 11, 100, 4, 3, 2, 1]);
    }
}
