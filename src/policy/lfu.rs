//! `lfu`: evicts the least frequently used object; among equals, the least recently used.
//!
//! Uses before an eviction are not remembered.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::heap::Heap;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank};

/// Parameters of `lfu`.
pub const PARAMS: &[Param] = &[Param::new(
    "aged",
    "`true`: the key of an object is the clock at its last use plus its uses (the insert is \
         the first). The clock is the greatest key of all evicted objects, so an object that was \
         used often but long ago falls behind. `false`: the number of uses alone",
)];

/// Least frequently used.
pub struct Lfu {
    heap: Heap,
    uses: Zeroed<u32>,
    keys: Zeroed<u64>,
    clock: u64,
    aged: bool,
}

impl Lfu {
    /// Reads `lfu` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Lfu> {
        Ok(Lfu {
            aged: reader.bool("aged", true)?,
            heap: Heap::new(setting.max_objects)?,
            uses: Zeroed::new(setting.max_objects)?,
            keys: Zeroed::new(setting.max_objects)?,
            clock: 0,
        })
    }

    fn used(&mut self, objects: &mut Objects, slot: Slot, uses: u32, now: i64) {
        let at = slot as usize;
        self.uses[at] = uses;
        self.keys[at] = self.clock + u64::from(uses);
        objects.node_mut(slot).stamp = now;
        self.heap.place(objects, slot, Rank::count(self.keys[at], now));
    }
}

impl Policy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }

    forward!(heap: victim, put_back_by_rank, check);

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let tables = self.uses.front_bytes(most) + self.keys.front_bytes(most);
        self.heap.used_bytes(most) + tables
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.used(objects, slot, 1, now);
    }

    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        self.used(objects, slot, u32::from(uses) + 1, now);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let uses = self.uses[slot as usize].saturating_add(1);
        self.used(objects, slot, uses, now);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, _now: i64) {
        self.heap.remove(objects, slot);
        if evicted && self.aged {
            self.clock = self.clock.max(self.keys[slot as usize]);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        Rank::count(self.keys[slot as usize], objects.node(slot).stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let key = self.clock.saturating_add(columns.count(row));
            *rank = Rank::count(key, columns.last_access_ns(row));
        }
    }

    fn score(&self, _objects: &Objects, slot: Slot, _now: i64) -> f64 {
        self.keys[slot as usize] as f64
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("clock", self.clock as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::evictor::RequestContext;
    use crate::policy::testing::{evict, gauge, insert, open};

    /// One object is used often, then never again; the others are used twice each.
    fn survivor(spec: &str) -> bool {
        let mut e = open(spec);
        insert(&mut e, 1, &RequestContext::default(), 999);
        for now in 2..12 {
            e.touch(now, &RequestContext::default(), &[999]).expect("found");
        }
        for id in 0..100u64 {
            let now = 100 + id as i64 * 10;
            insert(&mut e, now, &RequestContext::default(), id);
            e.touch(now + 1, &RequestContext::default(), &[id]).expect("found");
            if e.objects().len() > 4 {
                evict(&mut e, now + 2, 1);
            }
        }
        e.check().expect("sound");
        e.objects().find(999).is_some()
    }

    #[test]
    fn old_uses_fade_with_ageing_only() {
        assert!(!survivor("lfu"));
        assert!(survivor("lfu(aged=false)"));
    }

    #[test]
    fn a_preview_does_not_move_the_clock() {
        let mut e = open("lfu");
        (0..3).for_each(|id| insert(&mut e, 1, &RequestContext::default(), id));
        let mut out = Vec::new();
        e.preview(2, 2, &mut out).expect("a time");
        assert_eq!(gauge(&e, "clock"), 0.0);
        assert_eq!([evict(&mut e, 3, 1), evict(&mut e, 4, 1)], [[out[0].id], [out[1].id]]);
    }
}
