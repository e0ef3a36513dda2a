//! `wtinylfu`: a small window for new objects, and admission by frequency for the rest (Einziger,
//! Friedman and Manes, 2017).
//!
//! A new object enters a window in the order of last use. What exceeds the window moves to the main
//! part, a segmented LRU with a probation and a protected segment, while that has room. At an
//! eviction the coldest objects of the window and of the main part compete. The one with the lower
//! frequency is the victim, on a tie the one of the window; a winner of the window moves to the
//! main part. A sketch of 4-bit counters, halved periodically, counts lookups, hits and misses
//! alike.
//!
//! Shares are of the capacity, in units, rounded down. Gauges: `wtinylfu_window`,
//! `wtinylfu_probation`, `wtinylfu_protected`, in units, and `wtinylfu_halvings`.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::frequency::{Frequency, MAX_FREQUENCY};
use crate::policy::queues::Queues;
use crate::policy::registry::Setting;
use crate::policy::{Lessons, Policy, Rank, order_of_i64};

/// Parameters of `wtinylfu`.
pub const PARAMS: &[Param] = &[
    Param::new("window", "share of the window; at least one unit"),
    Param::new("protected", "share of the protected segment in the main part"),
    Param::new("sample", "lookups per object after which the counters are halved"),
];

const WINDOW: usize = 0;
const PROBATION: usize = 1;
const PROTECTED: usize = 2;

/// Fewest objects assumed for the period of the halvings.
const MIN_OBJECTS: u64 = 16;

/// Window and frequency sketch.
pub struct WTinyLfu {
    queues: Queues<3>,
    seen: Frequency,
    window: f64,
    protected: f64,
    sample: u64,
}

impl WTinyLfu {
    /// Reads `wtinylfu` with its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<WTinyLfu> {
        Ok(WTinyLfu {
            queues: Queues::new(setting.capacity_units),
            seen: Frequency::new(setting.max_objects)?,
            window: reader.f64("window", 0.01, 0.0..=1.0)?,
            protected: reader.f64("protected", 0.8, 0.0..=1.0)?,
            sample: reader.u64("sample", 10, 1..=1000)?,
        })
    }

    /// The shares of window and main part, in units.
    fn shares(&self, objects: &Objects) -> (u64, u64) {
        let fits = self.queues.fits(objects);
        let window = ((fits as f64 * self.window) as u64).max(1);
        (window, fits.saturating_sub(window))
    }

    fn main_units(&self) -> u64 {
        self.queues.units(PROBATION) + self.queues.units(PROTECTED)
    }

    fn count(&mut self, objects: &Objects, id: u64) {
        let period = self.sample * (objects.len() as u64).max(MIN_OBJECTS);
        self.seen.add(id, period);
    }

    /// Moves what exceeds the window to the main part, while that has room.
    fn overflow(&mut self, objects: &mut Objects, now: i64) {
        let (window, main) = self.shares(objects);
        while self.queues.units(WINDOW) > window {
            let Some(slot) = self.queues.tail(WINDOW) else { break };
            if self.main_units() + u64::from(objects.node(slot).units) > main {
                break;
            }
            self.queues.move_hot(objects, PROBATION, slot, now);
        }
    }

    /// Moves an object to the protected segment, and demotes what exceeds that segment.
    fn protect(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.queues.move_hot(objects, PROTECTED, slot, now);
        let most = (self.shares(objects).1 as f64 * self.protected) as u64;
        while self.queues.units(PROTECTED) > most {
            let Some(slot) = self.queues.tail(PROTECTED) else { break };
            self.queues.move_hot(objects, PROBATION, slot, now);
        }
    }
}

impl Policy for WTinyLfu {
    fn name(&self) -> &'static str {
        "wtinylfu"
    }

    forward!(queues: remove, put_back, resize, set_capacity, check);
    forward!(seen: used_bytes);

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let id = objects.node(slot).id;
        if self.seen.of(id) == 0 {
            // There was no lookup before, so the insert counts as one.
            self.count(objects, id);
        }
        self.queues.push(objects, WINDOW, slot, now);
        self.overflow(objects, now);
    }

    /// Replays the uses that the sketch can count and does not contain yet.
    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        let known = self.seen.of(objects.node(slot).id);
        self.insert(objects, slot, now);
        let missing = u16::from(known)..uses.min(MAX_FREQUENCY.into());
        missing.for_each(|_| self.touch(objects, slot, now));
    }

    /// The sketch, only from a policy that leaves. The sketch of a sampled copy would rank the
    /// sampled ids above all others.
    fn lessons(&mut self, leaving: bool) -> Option<Lessons> {
        let none = if leaving { Frequency::new(0).ok() } else { None };
        none.map(|none| Box::new(std::mem::replace(&mut self.seen, none)) as Lessons)
    }

    fn learn(&mut self, lessons: Lessons) {
        if let Ok(seen) = lessons.downcast::<Frequency>() {
            self.seen = *seen;
        }
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let node = *objects.node(slot);
        self.count(objects, node.id);
        match usize::from(node.tag) {
            WINDOW => self.queues.move_hot(objects, WINDOW, slot, now),
            _ => self.protect(objects, slot, now),
        }
    }

    fn prefetch(&self, ids: &[u64]) {
        ids.iter().for_each(|&id| self.seen.prefetch(id));
    }

    fn miss(&mut self, objects: &Objects, id: u64, _now: i64) {
        self.count(objects, id);
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        self.overflow(objects, now);
        let new = self.queues.coldest(objects, WINDOW);
        let old = self.queues.coldest(objects, PROBATION);
        let old = old.or_else(|| self.queues.coldest(objects, PROTECTED));
        let slot = match (new, old) {
            (Some(new), Some(old)) => {
                let seen = |slot| self.seen.of(objects.node(slot).id);
                let wins = seen(new) > seen(old);
                if wins {
                    self.queues.move_hot(objects, PROBATION, new, now);
                }
                if wins { old } else { new }
            }
            (new, old) => new.or(old)?,
        };
        self.queues.take(objects, slot);
        Some(slot)
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        Rank::count(u64::from(node.tag), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let list = if columns.count(row) > 1 { PROTECTED } else { PROBATION };
            let minor = order_of_i64(columns.last_access_ns(row));
            *rank = Rank { major: list as u64, minor };
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        f64::from(self.seen.of(objects.node(slot).id))
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("wtinylfu_window", self.queues.units(WINDOW) as f64);
        out("wtinylfu_probation", self.queues.units(PROBATION) as f64);
        out("wtinylfu_protected", self.queues.units(PROTECTED) as f64);
        out("wtinylfu_halvings", self.seen.halvings() as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn the_more_frequent_object_stays() {
        let mut cache = Cache::new("wtinylfu(window=10%)", 10);
        cache.get((0..10).chain(0..10));
        assert_eq!(cache.get(20..30), [9, 20, 21, 22, 23, 24, 25, 26, 27, 28]);
        assert_eq!((cache.gauge("wtinylfu_window"), cache.gauge("wtinylfu_protected")), (1.0, 7.0));
        assert_eq!(cache.get([29, 29, 29, 30]), [0], "29 was seen more often than 0");
    }
}
