//! Choice of victims: as many as required, without a superfluous one.

use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::policy::evictor::Evictor;
use crate::policy::log::Entry;
use crate::policy::lookup::AHEAD;
use crate::policy::metrics::SAMPLE;
use crate::policy::registry;

/// An evicted object.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Victim {
    /// Its id.
    pub id: u64,
    /// Units that it frees.
    pub units: u64,
}

/// The result of an eviction call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Units that the victims free.
    pub freed_units: u64,
    /// Units missing to the number requested.
    pub shortfall_units: u64,
    /// Time of the decision by the machine's clock; 0 = not measured.
    pub decision_ns: u64,
    /// Name of the policy that decided.
    pub decided_by: &'static str,
}

impl Evictor {
    /// Evicts until `required` units are free, or no candidate is left. The victims are appended to
    /// `out` and removed from the table.
    pub fn evict(&mut self, now: i64, required: u64, out: &mut Vec<Victim>) -> Result<Outcome> {
        self.evict_most(now, required, usize::MAX, out)
    }

    /// As `evict`, with a limit on the number of victims.
    pub fn evict_most(
        &mut self,
        now: i64,
        required: u64,
        most: usize,
        out: &mut Vec<Victim>,
    ) -> Result<Outcome> {
        let now = self.tick(now, 1)?;
        let count = self.metrics.counts.decisions;
        let start = if count.is_multiple_of(SAMPLE) { self.clock.now_ns() } else { 0 };
        let freed = self.choose(now, required, most, |this| this.next_victim(now))?;
        let by = self.decider();
        Ok(self.evict_chosen(now, required, freed, start, by, out))
    }

    /// Reports the victims without evicting them. A policy that moves objects while it searches, or
    /// that learns, may choose others the next time.
    pub fn preview(&mut self, now: i64, required: u64, out: &mut Vec<Victim>) -> Result<Outcome> {
        self.preview_most(now, required, usize::MAX, out)
    }

    /// As `preview`, with a limit on the number of victims.
    pub fn preview_most(
        &mut self,
        now: i64,
        required: u64,
        most: usize,
        out: &mut Vec<Victim>,
    ) -> Result<Outcome> {
        let now = self.tick(now, 1)?;
        let freed = self.choose(now, required, most, |this| this.next_victim(now))?;
        let by = self.decider();
        Ok(self.report_chosen(now, required, freed, by, out))
    }

    /// Slots of the last call's victims, in their order.
    pub fn victim_slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.chosen.iter().map(|chosen| chosen.slot)
    }

    fn next_victim(&mut self, now: i64) -> Option<Slot> {
        let slot = self.policy.victim(&mut self.objects, now)?;
        debug_assert!(self.objects.node(slot).is_held(), "a victim in the order");
        Some(slot)
    }

    fn decider(&self) -> &'static str {
        if self.chosen.is_empty() { self.policy.name() } else { self.policy.decided_by() }
    }

    /// Evicts the chosen. `start` is the time at which the decision began; 0 = not measured.
    pub(super) fn evict_chosen(
        &mut self,
        now: i64,
        required: u64,
        freed: u64,
        start: u64,
        by: &'static str,
        out: &mut Vec<Victim>,
    ) -> Outcome {
        let (mut ahead, policy) = (None, registry::number(by));
        for i in 0..self.chosen.len() {
            if i % AHEAD == 0 && self.chosen.len() > 1 {
                self.prefetch_chosen(i);
            }
            let slot = self.chosen[i].slot;
            let node = self.objects.node(slot);
            let (id, units) = (node.id, node.units);
            ahead = Some(node.prev);
            out.push(Victim { id, units: u64::from(units) });
            self.note_eviction(slot, policy, now);
            self.policy.remove(&mut self.objects, slot, true, now);
            self.objects.remove(slot);
        }
        if let (Some(ahead), true) = (ahead, self.policy.evicts_by_links())
            && let Some(id) = self.objects.prefetch_victim(ahead)
        {
            self.history.prefetch(&[id]);
            self.policy.prefetch(&[id]);
        }
        self.metrics.counts.decisions += 1;
        let decision_ns = if start > 0 { self.clock.now_ns().saturating_sub(start) } else { 0 };
        if start > 0 {
            self.metrics.decision.add(decision_ns);
        }
        self.outcome(required, freed, decision_ns, by)
    }

    /// Prefetches the memory that the next evictions from index `from` on will touch.
    fn prefetch_chosen(&self, from: usize) {
        let (mut ids, mut count) = ([0; AHEAD], 0);
        for (id, chosen) in ids.iter_mut().zip(&self.chosen[from..]) {
            *id = self.objects.node(chosen.slot).id;
            self.objects.prefetch_id(*id);
            count += 1;
        }
        self.history.prefetch(&ids[..count]);
        self.policy.prefetch(&ids[..count]);
    }

    /// Reports the chosen and returns them to the order.
    pub(super) fn report_chosen(
        &mut self,
        now: i64,
        required: u64,
        freed: u64,
        by: &'static str,
        out: &mut Vec<Victim>,
    ) -> Outcome {
        for chosen in &self.chosen {
            let node = self.objects.node(chosen.slot);
            out.push(Victim { id: node.id, units: u64::from(node.units) });
        }
        for i in (0..self.chosen.len()).rev() {
            self.unchoose(i, now);
        }
        let shortfall_units = required.saturating_sub(freed);
        Outcome { freed_units: freed, shortfall_units, decision_ns: 0, decided_by: by }
    }

    fn outcome(&mut self, required: u64, freed: u64, ns: u64, by: &'static str) -> Outcome {
        let shortfall = required.saturating_sub(freed);
        self.metrics.counts.shortfalls += u64::from(shortfall > 0);
        Outcome { freed_units: freed, shortfall_units: shortfall, decision_ns: ns, decided_by: by }
    }

    /// Fills `chosen` with victims from `next`, detached from their parents. Returns the units that
    /// they free.
    pub(super) fn choose(
        &mut self,
        now: i64,
        required: u64,
        most: usize,
        mut next: impl FnMut(&mut Evictor) -> Option<Slot>,
    ) -> Result<u64> {
        self.chosen.clear();
        let (mut freed, mut any_empty) = (0u64, false);
        while freed < required && self.chosen.len() < most {
            let Some(slot) = next(self) else { break };
            debug_assert!(!self.objects.is_blocked(slot), "a blocked victim");
            if self.chosen.try_reserve(1).is_err() {
                self.freed(slot, now);
                (0..self.chosen.len()).rev().for_each(|i| self.unchoose(i, now));
                fail!(NoMem, "no memory for the list of victims");
            }
            let parent = self.objects.node(slot).parent;
            self.objects.set_chosen(slot, true);
            self.chosen.push(Chosen { slot, parent });
            let units = self.objects.node(slot).units;
            freed += u64::from(units);
            any_empty |= units == 0;
            if let Some(free) = self.objects.detach(slot) {
                self.freed(free, now);
            }
        }
        // Equal sizes add up exactly, so no second pass is needed. If too little can be freed,
        // every candidate is wanted, whatever its size.
        if freed > required || (any_empty && freed == required) {
            freed = self.spare_superfluous(now, required, freed);
        }
        Ok(freed)
    }

    /// Returns superfluous victims to the order: sizes differ, and the last victim may make earlier
    /// ones superfluous. An object of size 0 frees nothing.
    fn spare_superfluous(&mut self, now: i64, required: u64, mut freed: u64) -> u64 {
        let mut remaining = self.chosen.len();
        for i in (0..self.chosen.len()).rev() {
            let Chosen { slot, parent } = self.chosen[i];
            let units = u64::from(self.objects.node(slot).units);
            let alone = parent == NONE || !self.objects.node(parent).is_chosen();
            if alone && freed - units >= required {
                freed -= units;
                self.unchoose(i, now);
                self.chosen[i].slot = NONE;
                remaining -= 1;
            }
        }
        if remaining < self.chosen.len() {
            self.chosen.retain(|c| c.slot != NONE);
        }
        freed
    }

    /// Returns a chosen victim to the order. Its parent, if it was chosen, must be back already.
    fn unchoose(&mut self, i: usize, now: i64) {
        let Chosen { slot, parent } = self.chosen[i];
        self.objects.set_chosen(slot, false);
        self.objects.attach(slot, parent);
        self.policy.put_back(&mut self.objects, slot, now);
    }

    /// Counts and logs an eviction by a policy of the registry, and remembers the id.
    pub(super) fn note_eviction(&mut self, slot: Slot, by: u32, now: i64) {
        let node = self.objects.node(slot);
        let (id, units) = (node.id, node.units);
        if self.log.is_on() {
            self.log_eviction(slot, by, now);
        }
        if self.options.remember > 0 {
            self.history.add(id, units, 0);
        }
        self.metrics.counts.evictions += 1;
        self.metrics.counts.evicted_units += u64::from(units);
    }

    fn log_eviction(&mut self, slot: Slot, by: u32, now: i64) {
        let node = *self.objects.node(slot);
        let session = self.objects.sessions.of(node.session);
        self.log.add(Entry {
            at_ns: now,
            id: node.id,
            session: session.map_or(0, |s| s.id),
            has_session: u32::from(session.is_some()),
            stamp_ns: node.stamp,
            score: self.policy.score(&self.objects, slot, now),
            units: node.units,
            hits: u32::from(node.hits),
            queue: u32::from(node.tag),
            policy: by,
            ..Entry::default()
        });
    }
}

/// A victim and its parent.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub(super) slot: Slot,
    pub(super) parent: Slot,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::evictor::{NewObject, Options, RequestContext};
    use proptest::prelude::*;

    fn opened(spec: &str, holes: bool, sizes: &[(u32, usize)]) -> Evictor {
        let options = Options { max_objects: 64, remember: 8, holes, ..Options::default() };
        let mut evictor = Evictor::open(spec, &options).expect("a known policy");
        for (at, &(units, back)) in sizes.iter().enumerate() {
            let (id, back) = (at as u64 + 1, back as u64);
            let parent = (back > 0 && id > back).then(|| id - back);
            let new = NewObject { id, parent, units: units.into(), ..NewObject::default() };
            evictor.insert(at as i64 + 1, &RequestContext::default(), &[new]).expect("room");
        }
        evictor
    }

    fn evicted(evictor: &mut Evictor, required: u64) -> Vec<(u64, u64)> {
        let mut out = Vec::new();
        evictor.evict(100, required, &mut out).expect("a time");
        evictor.check().expect("sound");
        out.iter().map(|v| (v.id, v.units)).collect()
    }

    #[test]
    fn objects_of_size_zero_stay_unless_they_block_a_victim() {
        let sizes = [(0, 0), (1, 0), (0, 0), (0, 2), (1, 0)];
        // An exact fit, a surplus, and too little.
        assert_eq!(evicted(&mut opened("lru", true, &sizes), 1), [(2, 1)]);
        assert_eq!(evicted(&mut opened("lru", true, &sizes), 2), [(2, 1), (5, 1)]);
        let all = [(1, 0), (2, 1), (3, 0), (4, 0), (5, 1)];
        assert_eq!(evicted(&mut opened("lru", true, &sizes), 9), all);
        assert_eq!(evicted(&mut opened("lru", false, &sizes), 1), [(4, 0), (2, 1)]);
        // If every candidate is wanted, objects of size 0 are evicted, too: their rows count.
        let nothing = [(0, 0), (0, 0)];
        assert_eq!(evicted(&mut opened("lru", true, &nothing), 1), [(1, 0), (2, 0)]);
    }

    proptest! {
        #[test]
        fn no_victim_is_superfluous(
            policy in 0..registry::ENTRIES.len(),
            holes: bool,
            sizes in proptest::collection::vec((0u32..4, 0usize..3), 1..24),
            required in 0u64..20,
        ) {
            let mut evictor = opened(registry::ENTRIES[policy].name, holes, &sizes);
            let mut out = Vec::new();
            let outcome = evictor.evict(100, required, &mut out).expect("a time");
            evictor.check().expect("sound");
            prop_assert_eq!(outcome.freed_units, out.iter().map(|v| v.units).sum::<u64>());
            let all: u64 = sizes.iter().map(|s| u64::from(s.0)).sum();
            prop_assert_eq!(outcome.shortfall_units, required.saturating_sub(all));
            for victim in &out {
                let (at, back) = (victim.id as usize - 1, sizes[victim.id as usize - 1].1);
                let parent = (back > 0 && at >= back).then(|| (at + 1 - back) as u64);
                let in_the_way = !holes && out.iter().any(|v| Some(v.id) == parent);
                let is_last = victim.units > 0 && outcome.freed_units - victim.units < required;
                let needed = is_last || outcome.shortfall_units > 0;
                prop_assert!(needed || in_the_way, "{victim:?} of {out:?}");
            }
        }
    }
}
