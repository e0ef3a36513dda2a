//! `slru`: segments by use, each in the order of last use (Karedla et al., 1994).
//!
//! A new object enters the lowest segment. Each use moves an object one segment up, or to the hot
//! end of the highest. What exceeds a segment's share moves down to the hot end of the segment
//! below. The coldest object of the lowest segment is evicted.
//!
//! `segments=4` is the default of libCacheSim's SLRU, with the same misses. With equal segments a
//! new object enters the lowest one with room, so that all are full before the first eviction.
//! Shares are of the capacity, in units, rounded down. Gauges: `slru_low` and `slru_high`, the
//! units of the lowest and of the highest segment.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::queues::Queues;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank, order_of_i64};

/// Parameters of `slru`.
pub const PARAMS: &[Param] = &[
    Param::new("protected", "share of the upper one of two segments")
        .default_is("0.8, or equal segments with `segments`"),
    Param::new("segments", "instead of `protected`: number of segments of equal shares")
        .default_is("none"),
];

const MAX_SEGMENTS: usize = 16;

/// Segmented least recently used.
pub struct Slru {
    queues: Queues<MAX_SEGMENTS>,
    segments: usize,
    /// Share of the upper of two segments; None = all are equal.
    protected: Option<f64>,
}

impl Slru {
    /// Reads `slru` with its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Slru> {
        let protected = reader.f64("protected", f64::NAN, 0.0..=1.0)?;
        let segments = reader.u64("segments", 0, 2..=MAX_SEGMENTS as u64)? as usize;
        if segments > 0 && !protected.is_nan() {
            fail!(Spec, "slru takes either 'protected' or 'segments', not both");
        }
        let protected = if protected.is_nan() { 0.8 } else { protected };
        Ok(Slru {
            queues: Queues::new(setting.capacity_units),
            segments: segments.max(2),
            protected: (segments == 0).then_some(protected),
        })
    }

    /// The share of a segment above the lowest, or of each equal one.
    fn most(&self, fits: u64) -> u64 {
        match self.protected {
            Some(share) => (fits as f64 * share) as u64,
            None => fits / self.segments as u64,
        }
    }

    /// The segment that a new object enters.
    fn entry(&self, units: u64, most: u64) -> usize {
        let room = |&s: &usize| self.queues.units(s) + units <= most;
        match self.protected {
            Some(_) => 0,
            None => (0..self.segments).find(room).unwrap_or(0),
        }
    }

    /// Moves objects down that exceed the share of `segment` or of a lower segment.
    fn cool(&mut self, objects: &mut Objects, segment: usize, now: i64) {
        let most = self.most(self.queues.fits(objects));
        for segment in (1..=segment).rev() {
            while self.queues.units(segment) > most {
                let Some(slot) = self.queues.tail(segment) else { break };
                self.queues.move_hot(objects, segment - 1, slot, now);
            }
        }
    }
}

impl Policy for Slru {
    fn name(&self) -> &'static str {
        "slru"
    }

    forward!(queues: remove, put_back, resize, set_capacity, check);

    fn victim(&mut self, objects: &mut Objects, _now: i64) -> Option<Slot> {
        self.queues.victim(objects, 0..self.segments)
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let units = u64::from(objects.node(slot).units);
        let segment = self.entry(units, self.most(self.queues.fits(objects)));
        self.queues.push(objects, segment, slot, now);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let segment = usize::from(objects.node(slot).tag);
        let up = (segment + 1).min(self.segments - 1);
        self.queues.move_hot(objects, up, slot, now);
        if up > segment {
            self.cool(objects, up, now);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        let node = objects.node(slot);
        Rank::count(u64::from(node.tag), node.stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let segment = (columns.count(row).max(1) - 1).min(self.segments as u64 - 1);
            *rank = Rank { major: segment, minor: order_of_i64(columns.last_access_ns(row)) };
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        f64::from(objects.node(slot).tag)
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("slru_low", self.queues.units(0) as f64);
        out("slru_high", self.queues.units(self.segments - 1) as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::testing::Cache;

    #[test]
    fn uses_move_up_and_overflow_moves_down() {
        let mut cache = Cache::new("slru(protected=50%)", 4);
        cache.get([1, 2, 3, 4, 1, 2, 3]);
        assert_eq!((cache.gauge("slru_low"), cache.gauge("slru_high")), (2.0, 2.0));
        assert_eq!(cache.order(), [4, 1, 2, 3]);
    }

    #[test]
    fn equal_segments_fill_from_below() {
        let mut cache = Cache::new("slru(segments=4)", 8);
        cache.get(1..9);
        assert_eq!((cache.gauge("slru_low"), cache.gauge("slru_high")), (2.0, 2.0));
        assert_eq!(cache.get([9]), [1]);
    }

    #[test]
    fn protected_and_segments_exclude_each_other() {
        use crate::policy::evictor::{Evictor, Options};
        let options = Options { max_objects: 8, ..Options::default() };
        for spec in ["slru(segments=4, protected=50%)", "slru(segments=1)", "slru(segments=17)"] {
            assert!(Evictor::open(spec, &options).is_err(), "{spec}");
        }
    }
}
