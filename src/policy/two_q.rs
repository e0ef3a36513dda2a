//! `2q`: a FIFO queue for new objects, LRU for those that return (Johnson and Shasha, VLDB'94, the
//! full version).
//!
//! A new object enters A1in, where uses do not count: they belong to the burst that inserted it.
//! A1out remembers ids evicted from A1in for a while. An object that returns meanwhile enters Am,
//! which is in the order of last use. The victim is the oldest of A1in when A1in exceeds its share,
//! else the coldest of Am.
//!
//! Shares are of the capacity, in units, rounded down. When this policy takes over from another,
//! objects that had been used start in Am. Gauges: `2q_in`, `2q_out`, `2q_main`, in units.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::queues::Queues;
use crate::policy::recall::Recall;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank, order_of_i64};

/// Parameters of `2q`.
pub const PARAMS: &[Param] = &[
    Param::new("in", "share of the capacity for A1in, the queue of new objects (Kin)"),
    Param::new("out", "share of the capacity that A1out remembers of evicted objects (Kout)"),
];

const IN: usize = 0;
const MAIN: usize = 1;

/// Two queues.
pub struct TwoQ {
    queues: Queues<2>,
    recall: Recall,
    share_in: f64,
    share_out: f64,
    /// The last new object, and the time of its insert.
    newest: (Slot, i64),
}

impl TwoQ {
    /// Reads `2q` with its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<TwoQ> {
        Ok(TwoQ {
            queues: Queues::new(setting.capacity_units),
            recall: Recall::new(setting.max_objects)?,
            share_in: reader.f64("in", 0.25, 0.0..=1.0)?,
            share_out: reader.f64("out", 0.5, 0.0..=10.0)?,
            newest: (NONE, i64::MIN),
        })
    }

    /// The queue that provides the next victim.
    fn first(&self, fits: u64) -> usize {
        let most = (fits as f64 * self.share_in) as u64;
        if self.queues.units(IN) > most { IN } else { MAIN }
    }

    fn rank_in(&self, fits: u64, list: usize, stamp: i64) -> Rank {
        Rank { major: u64::from(list != self.first(fits)), minor: order_of_i64(stamp) }
    }
}

impl Policy for TwoQ {
    fn name(&self) -> &'static str {
        "2q"
    }

    forward!(queues: put_back, resize, set_capacity, check);
    forward!(recall: used_bytes, prefetch, miss);

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        let first = self.first(self.queues.fits(objects));
        self.queues.victim(objects, [first, IN + MAIN - first])
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let list = if self.recall.take(objects.node(slot).id) { MAIN } else { IN };
        self.queues.push(objects, list, slot, now);
        self.newest = (slot, now);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        // A use at the time of the insert happened before a switch of policies.
        if usize::from(objects.node(slot).tag) == MAIN || self.newest == (slot, now) {
            self.queues.move_hot(objects, MAIN, slot, now);
        }
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, _now: i64) {
        let list = self.queues.remove(objects, slot);
        if evicted && list == IN {
            let most = (self.queues.fits(objects) as f64 * self.share_out) as u64;
            let node = objects.node(slot);
            self.recall.add(node.id, node.units, most);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        self.rank_in(self.queues.fits(objects), usize::from(node.tag), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        let fits = self.queues.capacity().max(self.queues.total());
        for (row, rank) in ranks.iter_mut().enumerate() {
            *rank = self.rank_in(fits, IN, columns.created_ns(row));
        }
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("2q_in", self.queues.units(IN) as f64);
        out("2q_out", self.recall.units() as f64);
        out("2q_main", self.queues.units(MAIN) as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn a_returning_object_enters_the_main_queue() {
        let mut cache = Cache::new("2q", 8);
        assert_eq!(cache.get([1, 2, 3, 4, 5, 6, 7, 8, 1, 1]), []);
        assert_eq!(cache.get([9, 10]), [1, 2], "uses in A1in do not count");
        assert_eq!(cache.get([1]), [3]);
        assert_eq!((cache.gauge("2q_main"), cache.gauge("2q_out")), (1.0, 2.0));
        cache.get(11..30);
        assert_eq!(cache.gauge("2q_out"), 4.0);
        assert_eq!(cache.order().last(), Some(&29), "A1in is within its share at the end");
    }

    #[test]
    fn a_switch_puts_used_objects_into_the_main_queue() {
        let mut cache = Cache::new("lru", 8);
        cache.get([1, 2, 3, 4, 2]);
        cache.evictor.switch("2q").expect("known");
        assert_eq!(cache.gauge("2q_main"), 1.0);
        cache.get([3]);
        assert_eq!(cache.gauge("2q_main"), 1.0);
    }
}
