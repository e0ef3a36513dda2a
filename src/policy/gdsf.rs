//! `gdsf`: greedy dual size with frequency. The value of an object is the clock at its last use
//! plus uses times recompute cost divided by size. The lowest value is evicted first; among equals,
//! the least recently used. The clock is the greatest value of all evicted objects.
//!
//! The cost is the caller's value ([`Facts::cost`]) if there is one, else the cost of the object's
//! tokens after its context, else 1. A size of 0 counts as 1.

use crate::base::spec::Reader;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::meta::cost::Cost;
use crate::meta::index::Slot;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::{Columns, STRIDE};
use crate::policy::heap::Heap;
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank};

/// Greedy dual size with frequency.
pub struct Gdsf {
    heap: Heap,
    uses: Zeroed<u32>,
    /// The clock at each object's last use, as bits of an f64.
    clocks: Zeroed<u64>,
    clock: f64,
    cost: Cost,
}

impl Gdsf {
    /// Reads `gdsf` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Gdsf> {
        Ok(Gdsf {
            cost: Cost::default().read(reader)?,
            heap: Heap::new(setting.max_objects)?,
            uses: Zeroed::new(setting.max_objects)?,
            clocks: Zeroed::new(setting.max_objects)?,
            clock: 0.0,
        })
    }

    fn cost(&self, own: f64, context: u64, tokens: u64) -> f64 {
        // Negative or infinite costs are ignored: they would break the order.
        if own > 0.0 && own.is_finite() {
            own
        } else if tokens > 0 {
            self.cost.of(context, tokens)
        } else {
            1.0
        }
    }

    fn value(&self, objects: &Objects, slot: Slot) -> f64 {
        let Facts { cost, context, tokens, .. } = objects.facts(slot);
        let cost = self.cost(f64::from(cost), context.into(), tokens.into());
        let clock = f64::from_bits(self.clocks[slot as usize]);
        let size = f64::from(objects.node(slot).units.max(1));
        clock + f64::from(self.uses[slot as usize]) * cost / size
    }

    fn used(&mut self, objects: &mut Objects, slot: Slot, uses: u32, now: i64) {
        self.uses[slot as usize] = uses;
        self.clocks[slot as usize] = self.clock.to_bits();
        objects.node_mut(slot).stamp = now;
        let rank = self.rank(objects, slot, now);
        self.heap.place(objects, slot, rank);
    }

    fn revalue(&mut self, objects: &mut Objects, slot: Slot) {
        if !objects.node(slot).is_held() {
            let rank = self.rank(objects, slot, 0);
            self.heap.update(objects, slot, rank);
        }
    }
}

impl Policy for Gdsf {
    fn name(&self) -> &'static str {
        "gdsf"
    }

    forward!(heap: victim, put_back_by_rank, check);

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let tables = self.uses.front_bytes(most) + self.clocks.front_bytes(most);
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
        if evicted {
            self.clock = self.clock.max(self.value(objects, slot));
        }
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        objects.set_units(slot, units);
        self.revalue(objects, slot);
    }

    fn rank(&self, objects: &Objects, slot: Slot, _now: i64) -> Rank {
        Rank::score(self.value(objects, slot), objects.node(slot).stamp)
    }

    fn seed(&self, columns: &Columns, _now: i64, ranks: &mut [Rank]) {
        let (mut costs, mut counts, mut sizes) = ([0.0; STRIDE], [0.0; STRIDE], [0.0; STRIDE]);
        for (part, ranks) in ranks.chunks_mut(STRIDE).enumerate() {
            let (first, len) = (part * STRIDE, ranks.len());
            columns.costs(first, &mut costs[..len], |context, tokens| {
                if tokens > 0.0 { self.cost.of_floats(context, tokens) } else { 1.0 }
            });
            Columns::floats(columns.count, 1.0, first, &mut counts[..len]);
            columns.sizes(first, &mut sizes[..len]);
            for ((cost, count), size) in costs.iter_mut().zip(&counts).zip(&sizes) {
                *cost = self.clock + count * *cost / size.max(1.0);
            }
            for (row, (rank, &value)) in (first..).zip(ranks.iter_mut().zip(&costs)) {
                *rank = Rank::score(value, columns.last_access_ns(row));
            }
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, _now: i64) -> f64 {
        self.value(objects, slot)
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, _old: &Facts, _now: i64) {
        self.revalue(objects, slot);
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("clock", self.clock);
    }
}

#[cfg(test)]
mod tests {
    use crate::meta::objects::Facts;
    use crate::policy::evictor::{NewObject, RequestContext};
    use crate::policy::testing::{evict, open};

    fn order(facts: &[(u64, Facts)]) -> Vec<u64> {
        let mut e = open("gdsf(alpha=0.01)");
        for (id, &(units, facts)) in facts.iter().enumerate() {
            let new = NewObject { id: id as u64, units, facts, ..NewObject::default() };
            e.insert(1, &RequestContext::default(), &[new]).expect("room");
        }
        evict(&mut e, 2, u64::MAX)
    }

    #[test]
    fn evicts_by_cost_divided_by_size() {
        let tokens = |context, tokens| Facts { context, tokens, ..Facts::default() };
        let own = |cost| Facts { cost, ..Facts::default() };
        // 100.5, 116.5 (later), 50.25 (twice the size), 70 (the caller's), 1 (unknown).
        let facts = [
            (1, tokens(0, 10)),
            (1, tokens(160, 10)),
            (2, tokens(0, 10)),
            (1, own(20.0)),
            (1, Facts::default()),
        ];
        assert_eq!(order(&facts), [4, 2, 0, 3, 1]);
    }

    #[test]
    fn invalid_costs_do_not_break_the_order() {
        let own = |cost| Facts { cost, ..Facts::default() };
        let facts = [(1, own(f32::NAN)), (1, own(-5.0)), (1, own(f32::INFINITY)), (0, own(0.5))];
        assert_eq!(order(&facts), [3, 0, 1, 2]);
    }
}
