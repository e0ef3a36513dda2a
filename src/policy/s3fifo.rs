//! `s3fifo`: three static FIFO queues; new objects start in the small one (Yang et al., SOSP'23).
//!
//! A new object enters the small queue; one that was evicted from there recently enters the main
//! queue. Both queues are in the order of insertion; uses are counted up to 3. When the main queue
//! exceeds its share, its oldest object is evicted; if it was used, it moves to the young end and
//! its count drops by one. Otherwise the oldest object of the small queue is evicted; if it was
//! used `promote` times, it moves to the main queue. Until the first eviction, new objects that
//! find the small queue full enter the main queue, as in libCacheSim. With the default parameters
//! the misses equal libCacheSim's.
//!
//! Shares are of the capacity, in units, rounded down. Gauges: `s3fifo_small`, `s3fifo_main`,
//! `s3fifo_ghost`, in units.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::queues::{Queues, count, set_count};
use crate::policy::recall::Recall;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank, order_of_i64};

/// Parameters of `s3fifo`.
pub const PARAMS: &[Param] = &[
    Param::new("small", "share of the small queue"),
    Param::new(
        "ghost",
        "share of the capacity that is remembered of evictions from the small queue",
    ),
    Param::new("promote", "uses that move an object from the small to the main queue"),
];

const SMALL: usize = 0;
const MAIN: usize = 1;

/// Uses are counted in two bits.
const MOST_USES: u8 = 3;

/// Simple, scalable caching with three static FIFO queues.
pub struct S3Fifo {
    queues: Queues<2>,
    recall: Recall,
    small: f64,
    ghost: f64,
    promote: u8,
    has_evicted: bool,
}

impl S3Fifo {
    /// Reads `s3fifo` with its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<S3Fifo> {
        Ok(S3Fifo {
            queues: Queues::new(setting.capacity_units),
            recall: Recall::new(setting.max_objects)?,
            small: reader.f64("small", 0.1, 0.0..=1.0)?,
            ghost: reader.f64("ghost", 0.9, 0.0..=10.0)?,
            promote: reader.u64("promote", 2, 1..=u64::from(MOST_USES))? as u8,
            has_evicted: false,
        })
    }

    fn share(share: f64, fits: u64) -> u64 {
        (fits as f64 * share) as u64
    }

    /// The queue that is searched first.
    fn first(&self, fits: u64) -> usize {
        let main_most = fits.saturating_sub(Self::share(self.small, fits));
        let main = self.queues.units(MAIN) > main_most || self.queues.units(SMALL) == 0;
        if main { MAIN } else { SMALL }
    }

    /// Whether an object with so many uses survives the search.
    fn survives(&self, list: usize, uses: u8) -> bool {
        uses >= if list == SMALL { self.promote } else { 1 }
    }

    /// The next victim of a queue. Each use lets an object survive once, so the search costs as
    /// much as the uses.
    fn search(&mut self, objects: &mut Objects, list: usize, now: i64) -> Option<Slot> {
        loop {
            let slot = self.queues.coldest(objects, list)?;
            self.queues.passed(list);
            let uses = count(objects.node(slot));
            if !self.survives(list, uses) {
                return Some(slot);
            }
            let left = if list == SMALL { 0 } else { uses - 1 };
            set_count(objects.node_mut(slot), left);
            self.queues.move_hot(objects, MAIN, slot, now);
        }
    }

    fn rank_in(&self, fits: u64, list: usize, uses: u8, stamp: i64) -> Rank {
        let later = u64::from(list != self.first(fits));
        let stays = u64::from(self.survives(list, uses));
        Rank { major: 2 * stays + later, minor: order_of_i64(stamp) }
    }
}

impl Policy for S3Fifo {
    fn name(&self) -> &'static str {
        "s3fifo"
    }

    forward!(queues: look_ahead, put_back, resize, set_capacity, check);
    forward!(recall: used_bytes, prefetch, miss);

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let id = objects.node(slot).id;
        let small_most = Self::share(self.small, self.queues.fits(objects));
        let filling = !self.has_evicted && self.queues.units(SMALL) >= small_most;
        let list = if self.recall.take(id) || filling { MAIN } else { SMALL };
        self.queues.push(objects, list, slot, now);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        let node = objects.node_mut(slot);
        let uses = count(node);
        set_count(node, (uses + 1).min(MOST_USES));
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, _now: i64) {
        let list = self.queues.remove(objects, slot);
        if evicted && list == SMALL {
            let most = Self::share(self.ghost, self.queues.fits(objects));
            let node = objects.node(slot);
            self.recall.add(node.id, node.units, most);
        }
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        self.has_evicted = true;
        let first = self.first(self.queues.fits(objects));
        let slot = self.search(objects, first, now);
        let slot = slot.or_else(|| self.search(objects, SMALL + MAIN - first, now));
        // The search of the small queue may have promoted all candidates.
        let slot = slot.or_else(|| self.search(objects, MAIN, now))?;
        self.queues.take(objects, slot);
        Some(slot)
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        self.rank_in(self.queues.fits(objects), usize::from(node.tag), count(node), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        let fits = self.queues.capacity().max(self.queues.total());
        for (row, rank) in ranks.iter_mut().enumerate() {
            let uses = (columns.count(row).max(1) - 1).min(u64::from(MOST_USES)) as u8;
            *rank = self.rank_in(fits, SMALL, uses, columns.created_ns(row));
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        f64::from(count(objects.node(slot)))
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("s3fifo_small", self.queues.units(SMALL) as f64);
        out("s3fifo_main", self.queues.units(MAIN) as f64);
        out("s3fifo_ghost", self.recall.units() as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn new_objects_are_promoted_from_the_small_queue_by_uses() {
        let mut cache = Cache::new("s3fifo", 20);
        assert_eq!(cache.get(0..20), [], "0 and 1 in the small queue, others in the main one");
        assert_eq!((cache.gauge("s3fifo_small"), cache.gauge("s3fifo_main")), (2.0, 18.0));
        assert_eq!(cache.get([20]), [0]);
        assert_eq!(cache.get([1, 1, 21]), [20], "1 was used twice and moved on");
        assert_eq!(cache.get([2, 22]), [3], "the main queue is over its share; 2 was used");
        assert_eq!(cache.get([0]), [21], "0 is remembered");
        assert_eq!(cache.gauge("s3fifo_main"), 19.0);
    }

    #[test]
    fn parameters_have_limits() {
        use crate::policy::evictor::{Evictor, Options};
        let options = Options { max_objects: 8, ..Options::default() };
        for spec in ["s3fifo(small=2)", "s3fifo(promote=0)", "s3fifo(promote=4)", "s3fifo(x=1)"] {
            assert!(Evictor::open(spec, &options).is_err(), "{spec}");
        }
        assert!(Evictor::open("s3fifo(small=20%, ghost=0, promote=1)", &options).is_ok());
    }
}
