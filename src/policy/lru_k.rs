//! `lru-k`: evicts the object whose k-th last use is the oldest. Objects with fewer than k uses are
//! evicted before all others, by their last use.
//!
//! An insert is a use. There is no correlated reference period: a caller that looks up, misses and
//! inserts makes one use, not two.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::evictor::MAX_OBJECTS;
use crate::policy::ghosts::Ghosts;
use crate::policy::heap::Heap;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank, order_of_i64};

/// Parameters of `lru-k`.
pub const PARAMS: &[Param] = &[
    Param::new("k", "which use counts; 1 is `lru`"),
    Param::new(
        "history",
        "number of evicted ids, the latest ones, whose last uses are remembered; an id that \
         returns continues from them. 0 = none. Objects that their owner removed are not \
         remembered",
    )
    .default_is("the most objects of the table"),
];

/// Greatest `k`.
const MAX_K: usize = 4;

/// Least recent k-th last use.
pub struct LruK {
    heap: Heap,
    /// Uses before the last one of each object, the latest first, k - 1 a row. The last use is the
    /// stamp. 0, the lowest time, where there was none.
    earlier: Zeroed<u64>,
    history: History,
    k: usize,
}

/// The last uses of the latest evicted ids.
struct History {
    /// The row of each id.
    ids: Ghosts,
    /// A ring of rows: the id, then k uses.
    rows: Zeroed<u64>,
    next: usize,
    limit: usize,
}

impl History {
    fn new(limit: usize, k: usize) -> Result<History> {
        let rows = Zeroed::new(limit.saturating_mul(k + 1))?;
        Ok(History { ids: Ghosts::new(limit)?, rows, next: 0, limit })
    }

    fn used_bytes(&self, k: usize) -> u64 {
        let rows = self.ids.len().max(self.next);
        self.rows.front_bytes(rows * (k + 1)) + self.ids.used_bytes()
    }

    fn add(&mut self, id: u64, last: u64, earlier: &[u64]) {
        if self.limit == 0 {
            return;
        }
        let width = earlier.len() + 2;
        let row = &mut self.rows[self.next * width..][..width];
        // The row of an id that is still remembered is reused.
        if self.ids.get(row[0]) == Some(self.next as u32) {
            self.ids.remove(row[0]);
        }
        (row[0], row[1]) = (id, last);
        row[2..].copy_from_slice(earlier);
        self.ids.add(id, 0, self.next as u32);
        self.next = if self.next + 1 == self.limit { 0 } else { self.next + 1 };
    }

    /// Removes an id; returns its uses, the last first, without the earliest.
    fn take(&mut self, id: u64, k: usize) -> Option<&[u64]> {
        let (_, row) = self.ids.remove(id)?;
        Some(&self.rows[row as usize * (k + 1) + 1..][..k - 1])
    }
}

impl LruK {
    /// Reads `lru-k` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<LruK> {
        let k = reader.u64("k", 2, 1..=MAX_K as u64)? as usize;
        let all = setting.max_objects as u64;
        let history = reader.u64("history", all, 0..=MAX_OBJECTS as u64)? as usize;
        Ok(LruK {
            heap: Heap::new(setting.max_objects)?,
            earlier: Zeroed::new(setting.max_objects.saturating_mul(k - 1))?,
            history: History::new(if k == 1 { 0 } else { history }, k)?,
            k,
        })
    }

    fn earlier(&mut self, slot: Slot) -> &mut [u64] {
        let width = self.k - 1;
        &mut self.earlier[slot as usize * width..][..width]
    }

    fn rank_of(&self, slot: Slot, stamp: i64) -> Rank {
        let width = self.k - 1;
        let last = order_of_i64(stamp);
        match width {
            0 => Rank { major: last, minor: 0 },
            _ => Rank { major: self.earlier[slot as usize * width + width - 1], minor: last },
        }
    }

    fn place(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let rank = self.rank_of(slot, now);
        self.heap.place(objects, slot, rank);
    }
}

impl Policy for LruK {
    fn name(&self) -> &'static str {
        "lru-k"
    }

    forward!(heap: victim, put_back_by_rank, check);

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let earlier = self.earlier.front_bytes(most * (self.k - 1));
        self.heap.used_bytes(most) + earlier + self.history.used_bytes(self.k)
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let (k, width) = (self.k, self.k - 1);
        let row = &mut self.earlier[slot as usize * width..][..width];
        match self.history.take(objects.node(slot).id, k) {
            Some(uses) => row.copy_from_slice(uses),
            None => row.fill(0),
        }
        self.place(objects, slot, now);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let last = order_of_i64(objects.node(slot).stamp);
        let earlier = self.earlier(slot);
        earlier.rotate_right(usize::from(!earlier.is_empty()));
        if let Some(first) = earlier.first_mut() {
            *first = last;
        }
        self.place(objects, slot, now);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, _now: i64) {
        self.heap.remove(objects, slot);
        let node = objects.node(slot);
        if evicted {
            let width = self.k - 1;
            let earlier = &self.earlier[slot as usize * width..][..width];
            self.history.add(node.id, order_of_i64(node.stamp), earlier);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        self.rank_of(slot, objects.node(slot).stamp)
    }

    /// Columns contain the first use, the last use and the number of uses. The uses between are
    /// taken as evenly spread.
    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        for (row, rank) in ranks.iter_mut().enumerate() {
            let (last, count) = (columns.last_access_ns(row), columns.count(row));
            let created = columns.created_ns(row);
            let minor = order_of_i64(last);
            *rank = if self.k == 1 {
                Rank { major: minor, minor: 0 }
            } else if count < self.k as u64 {
                Rank { major: 0, minor }
            } else {
                let steps = (self.k - 1) as u64;
                let whole = if created < last { last.abs_diff(created) } else { 0 };
                let mut back = whole / (count - 1) * steps;
                if steps > 1 {
                    back += (whole % (count - 1)).saturating_mul(steps) / (count - 1);
                }
                // Not before the creation, so it fits an i64.
                let at = last.wrapping_sub_unsigned(back);
                Rank { major: order_of_i64(at), minor }
            };
        }
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("history", self.history.ids.len() as f64);
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::columns::Columns;
    use crate::policy::evictor::{Evictor, RequestContext};
    use crate::policy::testing::{self, open};
    use crate::policy::{Policy, Rank};

    fn insert(e: &mut Evictor, now: i64, id: u64) {
        testing::insert(e, now, &RequestContext::default(), id);
    }

    fn evict(e: &mut Evictor, now: i64) -> u64 {
        testing::evict(e, now, 1)[0]
    }

    #[test]
    fn the_second_last_use_decides() {
        let mut e = open("lru-k");
        (1..=3).for_each(|id| insert(&mut e, id as i64, id));
        e.touch(10, &RequestContext::default(), &[2]).expect("found");
        e.touch(11, &RequestContext::default(), &[1]).expect("found");
        // 3 was used once; 1 was first used before 2, though last used after it.
        assert_eq!([12, 13, 14].map(|now| evict(&mut e, now)), [3, 1, 2]);
    }

    #[test]
    fn a_returning_id_continues_its_history_unless_that_is_off() {
        for (spec, first) in [("lru-k", 2), ("lru-k(history=0)", 1), ("lru-k(k=3)", 1)] {
            let mut e = open(spec);
            insert(&mut e, 1, 1);
            assert_eq!(evict(&mut e, 2), 1);
            insert(&mut e, 3, 1);
            insert(&mut e, 4, 2);
            assert_eq!(evict(&mut e, 5), first, "{spec}");
        }
    }

    #[test]
    fn the_history_is_bounded() {
        let mut e = open("lru-k(history=2)");
        for id in 1..=3 {
            insert(&mut e, id as i64 * 10, id);
            assert_eq!(evict(&mut e, id as i64 * 10 + 1), id);
        }
        (1..=3).for_each(|id| insert(&mut e, 100 + id as i64, id));
        assert_eq!([200, 201, 202].map(|now| evict(&mut e, now)), [1, 2, 3]);
    }

    #[test]
    fn columns_are_read_as_evenly_spread_uses() {
        let e = open("lru-k(k=3)");
        let columns = Columns {
            ids: &[1, 2, 3],
            created_ns: &[0, 0, 0],
            last_access_ns: &[90, 100, 100],
            count: &[2, 3, 11],
            ..Columns::default()
        };
        let mut ranks = [Rank::default(); 3];
        let policy: &dyn Policy = e.policy();
        policy.seed(&columns, 1000, &mut ranks);
        assert!(ranks[0] < ranks[1] && ranks[1] < ranks[2]);
        assert_eq!(ranks[1].major, crate::policy::order_of_i64(0));
        assert_eq!(ranks[2].major, crate::policy::order_of_i64(80));
    }
}
