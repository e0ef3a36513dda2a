//! `pensieve`: evicts the object with the lowest retention value. The value is the cost to
//! recompute the object, divided by the time since its last use.
//!
//! With l tokens of context and n tokens (1 where unknown), T in seconds:
//!
//! - chunk: `(n * beta + alpha * (n * l + n * n / 2) + const) / max(T, 1 ms)`;
//! - cell: `w * p * (alpha * l + beta + const) / max(T, 1 ms)` with `w = (layers - layer) / layers`
//!   and `p = (chunk + 1) / chunks`; a weight with unknown inputs is 1.
//!
//! The caller's cost ([`Facts::cost`]) replaces the part without weights. T is measured per object.
//! A conversation uses all of its objects in each turn, so T is the time since it was last active,
//! or since the last conversation that shares the object was. Of equal values the deeper object is
//! evicted first, or the one nearer to the front where holes are allowed.
//!
//! Values change continuously at different rates, so no fixed order exists. Objects are kept in
//! bins of nearly equal cost, at most 1/32 apart, each ordered by last use. The oldest objects of
//! all bins are compared, so a victim's value is within 1/32 of the lowest. 2048 bins span costs
//! from 2^-32 to 2^32; costs outside count as the lowest or the greatest for this bound.

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::cost::Cost;
use crate::meta::index::{NONE, Slot};
use crate::meta::list::List;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::{Columns, STRIDE};
use crate::policy::registry::Setting;
use crate::policy::{Policy, Rank};

/// Parameters of `pensieve`.
pub const PARAMS: &[Param] = &[
    Param::new("alpha", "cost per token of context (and token, for chunks)"),
    Param::new("beta", "cost per token of a chunk; once per cell"),
    Param::new("const", "cost of an object of any size"),
    Param::new(
        "mode",
        "`chunk`: an object has all layers of its tokens. `cell`: it has one layer of them. \
         `auto`: `cell` if the object names its layers, else `chunk`",
    ),
    Param::new("layer_weight", "cells: late layers are cheaper"),
    Param::new("position_weight", "cells: leading chunks are cheaper"),
    Param::new(
        "time_weight",
        "`false`: the cost alone, not divided by the time since the last use",
    ),
];

const BINS: usize = 2048;
/// Mantissa bits of a cost that select a bin: 32 bins per doubling.
const FINE: u32 = 5;
/// Exponent of the first bin.
const FIRST: i64 = -32;
/// In `bins`: the object is in the list of its bin.
const LINKED: u16 = 1 << 15;
/// Shorter times count as this, in seconds.
const SHORTEST_S: f64 = 0.001;

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Auto,
    Chunk,
    Cell,
}

/// Computes values from facts.
struct Value {
    cost: Cost,
    fixed: f64,
    mode: Mode,
    layer_weight: bool,
    position_weight: bool,
    time_weight: bool,
    holes: bool,
}

/// Facts of an object or row.
struct Shape {
    context: u64,
    tokens: u64,
    layer: u64,
    layers: u64,
    chunk: u64,
    chunks: u64,
    own: f64,
}

impl Shape {
    fn of(facts: &Facts) -> Shape {
        Shape {
            context: facts.context.into(),
            tokens: facts.tokens.into(),
            layer: facts.layer.into(),
            layers: facts.layers.into(),
            chunk: facts.chunk.into(),
            chunks: facts.chunks.into(),
            own: facts.cost.into(),
        }
    }

    fn of_row(columns: &Columns, row: usize) -> Shape {
        Shape {
            context: columns.context(row),
            tokens: columns.tokens(row),
            layer: columns.layer(row).into(),
            layers: columns.layers(row).into(),
            chunk: columns.chunk(row).into(),
            chunks: columns.chunks(row).into(),
            own: columns.cost(row).unwrap_or(0.0),
        }
    }
}

impl Value {
    /// The recompute cost with the weights. Finite and not negative.
    fn cost(&self, shape: &Shape) -> f64 {
        let own = Some(shape.own).filter(|c| *c > 0.0 && c.is_finite());
        let cell = self.mode == Mode::Cell || (self.mode == Mode::Auto && shape.layers > 0);
        if !cell {
            let chunk = || self.cost.of(shape.context, shape.tokens.max(1)) + self.fixed;
            return own.unwrap_or_else(chunk);
        }
        let base = || self.cost.alpha * shape.context as f64 + self.cost.beta + self.fixed;
        let mut cost = own.unwrap_or_else(base);
        if self.layer_weight && shape.layers > 0 {
            cost *= shape.layers.saturating_sub(shape.layer) as f64 / shape.layers as f64;
        }
        if self.position_weight && shape.chunks > 0 {
            cost *= ((shape.chunk + 1) as f64 / shape.chunks as f64).min(1.0);
        }
        cost
    }

    #[inline]
    fn of(&self, cost: f64, stamp: i64, now: i64) -> f64 {
        if !self.time_weight {
            return cost;
        }
        let age = now.saturating_sub(stamp) as f64 * 1e-9;
        cost / age.max(SHORTEST_S)
    }

    /// Breaks ties; the lowest is evicted first.
    #[inline]
    fn tie(&self, context: u64) -> u64 {
        if self.holes { context } else { !context }
    }
}

/// Lists of objects by cost, with the oldest object of each.
struct Bins {
    lists: Vec<List>,
    /// Bit set of the lists that are not empty.
    used: [u64; BINS / 64],
    /// Cost and stamp of each list's oldest object, side by side for the search.
    oldest: Vec<(f64, i64, Slot)>,
    /// The bin of each object, and whether the object is in it.
    bins: Zeroed<u16>,
}

/// The bin of a cost.
fn bin_of(cost: f64) -> usize {
    let least = (1023 + FIRST) << FINE;
    let at = (cost.to_bits() >> (52 - FINE)) as i64 - least;
    at.clamp(0, BINS as i64 - 1) as usize
}

impl Bins {
    fn new(max_objects: usize) -> Result<Bins> {
        Ok(Bins {
            lists: vec![List::default(); BINS],
            used: [0; BINS / 64],
            oldest: vec![(0.0, 0, NONE); BINS],
            bins: Zeroed::new(max_objects)?,
        })
    }

    /// Updates the oldest object of a bin.
    #[inline]
    fn refresh(&mut self, objects: &Objects, value: &Value, bin: usize) {
        let tail = self.lists[bin].tail;
        if tail == NONE {
            self.used[bin / 64] &= !(1 << (bin % 64));
            self.oldest[bin].2 = NONE;
        } else {
            self.used[bin / 64] |= 1 << (bin % 64);
            let cost = value.cost(&Shape::of(&objects.facts(tail)));
            self.oldest[bin] = (cost, objects.node(tail).stamp, tail);
        }
    }

    fn bin(&self, slot: Slot) -> usize {
        usize::from(self.bins[slot as usize] & !LINKED)
    }

    /// Adds an object that is in no bin at the hot end of one, or holds it if it is blocked. Its
    /// parent becomes blocked and is held, too: the search would find it first.
    fn push(&mut self, objects: &mut Objects, value: &Value, bin: usize, slot: Slot) {
        let blocked = objects.is_blocked(slot);
        objects.node_mut(slot).set_held(blocked);
        self.bins[slot as usize] = bin as u16;
        if blocked {
            return;
        }
        let parent = objects.node(slot).parent;
        if parent != NONE && self.bins[parent as usize] & LINKED != 0 {
            self.hold(objects, value, parent);
        }
        self.bins[slot as usize] |= LINKED;
        self.lists[bin].push_hot(objects, slot);
        if self.lists[bin].tail == slot {
            self.refresh(objects, value, bin);
        }
    }

    /// Removes an object from its bin; a held object is in none.
    fn unlink(&mut self, objects: &mut Objects, value: &Value, slot: Slot) {
        if !objects.node(slot).is_held() {
            let bin = self.bin(slot);
            self.bins[slot as usize] &= !LINKED;
            self.lists[bin].unlink(objects, slot);
            if self.oldest[bin].2 == slot {
                self.refresh(objects, value, bin);
            }
        }
    }

    fn hold(&mut self, objects: &mut Objects, value: &Value, slot: Slot) {
        self.unlink(objects, value, slot);
        objects.node_mut(slot).set_held(true);
    }

    fn put_back(&mut self, objects: &mut Objects, value: &Value, slot: Slot) {
        let node = objects.node_mut(slot);
        if node.is_held() {
            node.set_held(false);
            let bin = self.bin(slot);
            self.bins[slot as usize] |= LINKED;
            self.lists[bin].put_back(objects, slot);
            if self.lists[bin].tail == slot {
                self.refresh(objects, value, bin);
            }
        }
    }

    /// The oldest object of a bin with the lowest value.
    fn least(&self, objects: &Objects, value: &Value, now: i64) -> Option<Slot> {
        let (mut best, mut least) = (NONE, f64::INFINITY);
        for (i, &word) in self.used.iter().enumerate() {
            let mut left = word;
            while left != 0 {
                let (cost, stamp, slot) = self.oldest[i * 64 + left.trailing_zeros() as usize];
                left &= left - 1;
                let v = value.of(cost, stamp, now);
                let tie = |s| value.tie(objects.facts(s).context.into());
                if v < least || best == NONE || (v == least && tie(slot) < tie(best)) {
                    (best, least) = (slot, v);
                }
            }
        }
        (best != NONE).then_some(best)
    }

    fn check(&self, objects: &Objects, value: &Value) -> Result<()> {
        let mut linked = 0;
        for (bin, list) in self.lists.iter().enumerate() {
            let (mut len, mut units, mut stamp) = (0, 0, i64::MIN);
            for slot in list.from_cold(objects) {
                let node = objects.node(slot);
                let right = bin_of(value.cost(&Shape::of(&objects.facts(slot))));
                let noted = self.bins[slot as usize] == bin as u16 | LINKED;
                if right != bin || !noted || node.is_held() {
                    fail!(State, "bin {bin} has object {} of bin {right}", node.id);
                }
                if node.stamp < stamp {
                    fail!(State, "object {} of bin {bin} is behind a later one", node.id);
                }
                (len, units, stamp) = (len + 1, units + u64::from(node.units), node.stamp);
            }
            let marked = self.used[bin / 64] >> (bin % 64) & 1 == 1;
            if (len, units) != (list.len, list.units) || marked != (len > 0) {
                fail!(State, "bin {bin} counts {} objects, has {len}", list.len);
            }
            if self.oldest[bin].2 != list.tail {
                fail!(State, "the oldest object of bin {bin} is not the cached one");
            }
            linked += len as usize;
        }
        let held = objects.slots().filter(|&slot| objects.node(slot).is_held()).count();
        if linked + held != objects.len() {
            fail!(State, "{linked} in bins and {held} held of {} objects", objects.len());
        }
        Ok(())
    }
}

/// Recompute cost by idle time.
pub struct Pensieve {
    bins: Bins,
    value: Value,
}

impl Pensieve {
    /// Reads `pensieve` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Pensieve> {
        let mode = match reader.choice("mode", &["auto", "cell", "chunk"])? {
            Some(1) => Mode::Cell,
            Some(2) => Mode::Chunk,
            _ => Mode::Auto,
        };
        let value = Value {
            cost: Cost { alpha: 0.001, beta: 0.01 }.read(reader)?,
            fixed: reader.f64("const", 0.005, 0.0..=1e12)?,
            mode,
            layer_weight: reader.bool("layer_weight", true)?,
            position_weight: reader.bool("position_weight", true)?,
            time_weight: reader.bool("time_weight", true)?,
            holes: setting.holes,
        };
        Ok(Pensieve { bins: Bins::new(setting.max_objects)?, value })
    }

    fn cost(&self, objects: &Objects, slot: Slot) -> f64 {
        self.value.cost(&Shape::of(&objects.facts(slot)))
    }
}

impl Policy for Pensieve {
    fn name(&self) -> &'static str {
        "pensieve"
    }

    fn used_bytes(&self, objects: &Objects) -> u64 {
        self.bins.bins.front_bytes(objects.most())
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let bin = bin_of(self.cost(objects, slot));
        self.bins.push(objects, &self.value, bin, slot);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.bins.unlink(objects, &self.value, slot);
        objects.node_mut(slot).stamp = now;
        let bin = self.bins.bin(slot);
        self.bins.push(objects, &self.value, bin, slot);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, _evicted: bool, _now: i64) {
        self.bins.unlink(objects, &self.value, slot);
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        loop {
            let slot = self.bins.least(objects, &self.value, now)?;
            self.bins.hold(objects, &self.value, slot);
            if !objects.is_blocked(slot) {
                return Some(slot);
            }
        }
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        self.bins.put_back(objects, &self.value, slot);
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        let node = objects.node(slot);
        if !node.is_held() {
            let bin = self.bins.bin(slot);
            let sum = &mut self.bins.lists[bin].units;
            *sum = *sum - u64::from(node.units) + u64::from(units);
        }
        objects.set_units(slot, units);
    }

    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank {
        let minor = self.value.tie(objects.facts(slot).context.into());
        Rank { minor, ..Rank::score(self.score(objects, slot, now), 0) }
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        let Value { mode, cost, fixed, .. } = &self.value;
        let cells = *mode == Mode::Cell || (*mode == Mode::Auto && !columns.layers.is_empty());
        let mut costs = [0.0; STRIDE];
        for (part, ranks) in ranks.chunks_mut(STRIDE).enumerate() {
            let first = part * STRIDE;
            let costs = &mut costs[..ranks.len()];
            match cells {
                true => (first..).zip(costs.iter_mut()).for_each(|(row, cost)| {
                    *cost = self.value.cost(&Shape::of_row(columns, row));
                }),
                false => columns.costs(first, costs, |context, tokens| {
                    cost.of_floats(context, tokens.max(1.0)) + fixed
                }),
            }
            for (row, (rank, &cost)) in (first..).zip(ranks.iter_mut().zip(&*costs)) {
                let value = self.value.of(cost, columns.last_access_ns(row), now);
                let minor = self.value.tie(columns.context(row));
                *rank = Rank { minor, ..Rank::score(value, 0) };
            }
        }
    }

    fn score(&self, objects: &Objects, slot: Slot, now: i64) -> f64 {
        self.value.of(self.cost(objects, slot), objects.node(slot).stamp, now)
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, _old: &Facts, _now: i64) {
        let held = objects.node(slot).is_held();
        self.bins.hold(objects, &self.value, slot);
        self.bins.bins[slot as usize] = bin_of(self.cost(objects, slot)) as u16;
        if !held {
            self.bins.put_back(objects, &self.value, slot);
        }
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        let used: u32 = self.bins.used.iter().map(|word| word.count_ones()).sum();
        out("bins", f64::from(used));
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.bins.check(objects, &self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
    use crate::policy::testing::evict;

    fn cell(layer: u16, chunk: u32) -> Facts {
        let context = chunk * 32;
        Facts { context, tokens: 32, layer, layers: 2, chunk, chunks: 2, ..Facts::default() }
    }

    /// L0C0, L1C0, L0C1, L1C1.
    const CELLS: [(u16, u32); 4] = [(0, 0), (1, 0), (0, 1), (1, 1)];

    fn open(spec: &str, holes: bool) -> Evictor {
        let options = Options { max_objects: 64, holes, ..Options::default() };
        Evictor::open(spec, &options).expect("a known policy")
    }

    #[test]
    fn costs_of_four_cells_follow_the_formula() {
        for spec in ["pensieve", "pensieve(mode=cell)"] {
            let mut e = open(spec, true);
            for (id, (layer, chunk)) in CELLS.into_iter().enumerate() {
                let facts = cell(layer, chunk);
                let new = NewObject { id: id as u64, units: 1, facts, ..NewObject::default() };
                e.insert(1_000, &RequestContext::default(), &[new]).expect("room");
            }
            let costs = [0.0075, 0.00375, 0.047, 0.0235];
            for (slot, cost) in costs.into_iter().enumerate() {
                // After less than the shortest time, costs count a thousandfold.
                let score = e.policy().score(e.objects(), slot as Slot, 2_000);
                assert!((score - cost * 1000.0).abs() < 1e-9, "{slot}: {score}");
            }
            // L1C0, L0C0, L1C1, L0C1.
            assert_eq!(evict(&mut e, 60_000_000_000, u64::MAX), [1, 0, 3, 2]);
        }
    }

    #[test]
    fn a_batch_of_four_cells_is_ordered_alike() {
        let e = open("pensieve", true);
        let columns = Columns {
            ids: &[0, 1, 2, 3],
            last_access_ns: &[5; 4],
            context: &[0, 0, 32, 32],
            layer: &[0, 1, 0, 1],
            layers: &[2; 4],
            chunk: &[0, 0, 1, 1],
            chunks: &[2; 4],
            ..Columns::default()
        };
        let mut ranks = [Rank::default(); 4];
        e.policy().seed(&columns, 1_000_000_005, &mut ranks);
        for (rank, cost) in ranks.iter().zip([0.0075, 0.00375, 0.047, 0.0235f64]) {
            let score = f64::from_bits(rank.major & !(1 << 63));
            assert!((score - cost).abs() < 1e-12, "{score}");
        }
        let mut order = [0, 1, 2, 3];
        order.sort_by_key(|&row: &usize| ranks[row]);
        assert_eq!(order, [1, 0, 3, 2]);
    }

    #[test]
    fn weights_can_be_switched_off() {
        let cost = |spec: &str, layer, chunk| {
            let mut e = open(spec, true);
            let new =
                NewObject { id: 1, units: 1, facts: cell(layer, chunk), ..NewObject::default() };
            e.insert(1_000, &RequestContext::default(), &[new]).expect("room");
            e.policy().score(e.objects(), 0, 1_000)
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        close(cost("pensieve(layer_weight=false,time_weight=false)", 1, 0), 0.0075);
        close(cost("pensieve(position_weight=false,time_weight=false)", 1, 0), 0.0075);
        close(cost("pensieve(time_weight=false)", 1, 1), 0.0235);
        // 32 tokens after 32: .32 + .001 * (32 * 32 + 32 * 16) + .005.
        close(cost("pensieve(mode=chunk,time_weight=false)", 1, 1), 1.861);
    }

    #[test]
    fn the_value_of_a_chunk_falls_with_idle_time() {
        let mut e = open("pensieve(alpha=0,const=0)", true);
        for (id, tokens, at) in [(1, 100, 1_000_000_000), (2, 20, 9_500_000_000)] {
            let facts = Facts { tokens, ..Facts::default() };
            let new = NewObject { id, units: 1, facts, ..NewObject::default() };
            e.insert(at, &RequestContext::default(), &[new]).expect("room");
        }
        // 1.0 / 9 s against 0.2 / 0.5 s, then 1.0 / 19 s against 0.2 / 10.5 s.
        let mut out = Vec::new();
        e.preview(10_000_000_000, 1, &mut out).expect("a time");
        e.preview(20_000_000_000, 1, &mut out).expect("a time");
        assert_eq!(out.iter().map(|v| v.id).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn equal_values_are_evicted_from_the_end_or_from_the_front_with_holes() {
        for (holes, first) in [(false, 1), (true, 0)] {
            let e = open("pensieve(alpha=0)", holes);
            let columns = Columns { ids: &[1, 2], context: &[0, 64], ..Columns::default() };
            let mut ranks = [Rank::default(); 2];
            e.policy().seed(&columns, 1_000, &mut ranks);
            assert_eq!(usize::from(ranks[1] < ranks[0]), first);
        }
    }

    #[test]
    fn bins_are_narrow_and_bounded() {
        assert_eq!((bin_of(0.0), bin_of(1e-30), bin_of(1e30)), (0, 0, BINS - 1));
        let mut cost = 1e-9;
        while cost < 1e9 {
            let wide = cost * (1.0 + 1.0 / 32.0);
            assert!(bin_of(wide) > bin_of(cost) && bin_of(wide) <= bin_of(cost) + 2, "{cost}");
            cost *= 1.003;
        }
    }

    #[test]
    fn changed_facts_move_an_object_to_another_bin() {
        let mut e = open("pensieve(time_weight=false)", true);
        for id in 0..3 {
            let facts = Facts { tokens: 10 + 10 * id as u32, ..Facts::default() };
            let new = NewObject { id, units: 1, facts, ..NewObject::default() };
            e.insert(1, &RequestContext::default(), &[new]).expect("room");
        }
        let old = e.objects.facts(0);
        e.objects.facts_mut(0).expect("kept").tokens = 25;
        e.policy.facts_changed(&mut e.objects, 0, &old, 2);
        assert_eq!(evict(&mut e, 3, u64::MAX), [1, 0, 2]);
    }
}
