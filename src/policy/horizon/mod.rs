//! `horizon(objective=tokens, alpha, beta, history=4, watch=65536)`: evicts what earns least for
//! the memory it takes.
//!
//! Objects are classified by properties that predict their future: number of uses, last wait, stop
//! reason of the last request, the engine's expectation, and whether they are the unfilled end of a
//! prompt. For each class the policy counts after which wait objects are used again, evicted ones
//! included, so that its data do not depend on what it kept. The value of an object is, by its
//! current wait and over all horizons, the best ratio of the probability of a use before the
//! horizon to the memory time until then (Gittins' index). The policy learns online, starts as LRU,
//! and has no foresight.
//!
//! A policy hands its learned state over to another `horizon`. The waits of each class are handed
//! over whatever the parameters, also from a copy of `auto` to the live policy, because they hold
//! for any sample and any capacity. For the same objects the state includes each object's traits,
//! the past of evicted ids (if `history` is equal) and the waits in progress (if `watch` is equal).
//! A copy keeps those: it may know only a sample of the ids, and evicted others.

mod classes;
mod cohorts;
mod hazard;
mod tournament;
mod watch;

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::meta::cost::Cost;
use crate::meta::index::Slot;
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::ghosts::Ghosts;
use crate::policy::horizon::classes::{Traits, class};
use crate::policy::horizon::cohorts::{Cohorts, weight_bin, weight_log2};
use crate::policy::horizon::hazard::Hazards;
use crate::policy::horizon::watch::Watch;
use crate::policy::registry::Setting;
use crate::policy::{Hint, Lessons, Policy, Rank};

/// Parameters of `horizon`, beside those of the cost.
pub const PARAMS: &[Param] = &[
    Param::new(
        "objective",
        "`tokens`: an object weighs as much as its tokens. `cost`: as much as the cost to recompute \
         them, by `alpha` and `beta` or by the caller's value. `uses`: all objects weigh the same",
    ),
    Param::new(
        "history",
        "evicted ids whose past is remembered, in multiples of the peak number of resident objects",
    ),
    Param::new("watch", "waits for a next use that are observed at a time; of more, a sample"),
];

#[derive(Clone, Copy, PartialEq)]
enum Objective {
    Tokens,
    Cost,
    Uses,
}

/// The policy.
pub struct Horizon {
    objective: Objective,
    cost: Cost,
    hazards: Hazards,
    watch: Watch,
    cohorts: Cohorts,
    /// Traits and weight bin of each resident object.
    traits: Zeroed<Traits>,
    weights: Zeroed<u8>,
    /// Evicted ids, with their uses and their last use.
    past: Ghosts,
    history: usize,
    /// Evicted ids remembered per object of the peak number.
    history_each: usize,
    epoch_ns: Option<i64>,
    /// Tokens of a full object: the most seen.
    full_tokens: u32,
    /// The weight of a full object at the start of a sequence.
    usual_weight: f64,
    steps: u64,
    /// The state was handed over by another policy: `traits` belong to the objects to adopt.
    knows_objects: bool,
}

/// The learned state.
struct Learned {
    hazards: Hazards,
    full_tokens: u32,
    usual: (Objective, Cost, f64),
    own: Option<ObjectState>,
}

/// The part of the state that applies only to the same objects.
struct ObjectState {
    watch: Watch,
    past: Ghosts,
    history: usize,
    epoch_ns: Option<i64>,
    traits: Zeroed<Traits>,
}

/// Fewest objects assumed for the bound of the history.
const LEAST_BOUND: usize = 1024;
/// Unit of time in the history.
const TICK_NS: i64 = 10_000_000;

impl Horizon {
    /// Reads the parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Horizon> {
        let words = ["tokens", "cost", "uses"];
        let objective = match reader.choice("objective", &words)? {
            Some(1) => Objective::Cost,
            Some(2) => Objective::Uses,
            _ => Objective::Tokens,
        };
        let cost = Cost::default().read(reader)?;
        let history_each = reader.u64("history", 4, 0..=64)? as usize;
        let history = (setting.max_objects * history_each).min(1 << 28);
        let watch = reader.u64("watch", 65_536, 64..=1 << 22)? as usize;
        Ok(Horizon {
            objective,
            cost,
            hazards: Hazards::new(),
            watch: Watch::new(watch)?,
            cohorts: Cohorts::new()?,
            traits: Zeroed::new(setting.max_objects)?,
            weights: Zeroed::new(setting.max_objects)?,
            past: Ghosts::new(history)?,
            history,
            history_each,
            epoch_ns: None,
            full_tokens: 0,
            usual_weight: 0.0,
            steps: 0,
            knows_objects: false,
        })
    }

    fn tick(&mut self, now: i64) -> u32 {
        let epoch = *self.epoch_ns.get_or_insert(now);
        (now.saturating_sub(epoch) / TICK_NS) as u32
    }

    /// Does a small part of the maintenance at each call.
    fn step(&mut self, objects: &mut Objects, now: i64) {
        self.steps += 1;
        self.watch.age(&mut self.hazards, now);
        self.cohorts.refresh_due(objects, &self.hazards, now, 2);
        if self.steps % 16 == 0 {
            if let Some(class) = self.hazards.fit_one() {
                self.cohorts.class_changed(objects, &self.hazards, class, now);
            }
            self.watch.sample_for(objects.len());
            self.past.bound(self.history_each * objects.most().max(LEAST_BOUND));
        }
    }

    /// The bin of what a use of the object saves per unit of memory.
    fn weigh(&mut self, objects: &Objects, slot: Slot) -> u8 {
        let (facts, units) = (objects.facts(slot), objects.node(slot).units.max(1));
        let (context, tokens) = (u64::from(facts.context), u64::from(facts.tokens));
        let weight = self.worth(context, tokens, facts.cost.into()) / f64::from(units);
        if self.usual_weight <= 0.0 {
            self.usual_weight = weight;
        }
        weight_bin(weight / self.usual_weight)
    }

    /// The saving of one use. A cost of 0 is unknown.
    fn worth(&self, context: u64, tokens: u64, cost: f64) -> f64 {
        match self.objective {
            Objective::Uses => 1.0,
            Objective::Tokens => tokens.max(1) as f64,
            Objective::Cost if cost > 0.0 => cost,
            Objective::Cost => self.cost.of(context, tokens.max(1)),
        }
    }

    fn place(&mut self, objects: &mut Objects, slot: Slot, class: u16, now: i64) {
        let weight = self.weights[slot as usize];
        let node = objects.node_mut(slot);
        node.stamp = now;
        node.set_held(false);
        self.cohorts.add(objects, slot, class, weight, now);
    }

    /// The traits of a new object.
    fn fresh(&mut self, facts: &Facts) -> Traits {
        self.full_tokens = self.full_tokens.max(facts.tokens);
        let is_end = facts.tokens > 0 && facts.tokens < self.full_tokens;
        Traits::new(is_end, facts.context)
    }

    /// Gives up the state about its objects.
    fn take_object_state(&mut self) -> Result<ObjectState> {
        let (watch, past, traits) = (Watch::new(0)?, Ghosts::new(0)?, Zeroed::new(0)?);
        Ok(ObjectState {
            watch: std::mem::replace(&mut self.watch, watch),
            past: std::mem::replace(&mut self.past, past),
            history: self.history,
            epoch_ns: self.epoch_ns,
            traits: std::mem::replace(&mut self.traits, traits),
        })
    }

    fn learn_object_state(&mut self, own: ObjectState) {
        if own.watch.limit() == self.watch.limit() {
            self.watch = own.watch;
        } else {
            own.watch.withdraw(&mut self.hazards);
        }
        if own.history == self.history {
            (self.past, self.epoch_ns) = (own.past, own.epoch_ns);
        }
        if own.traits.len() == self.traits.len() {
            (self.traits, self.knows_objects) = (own.traits, true);
        }
    }

    fn take(&mut self, objects: &mut Objects, slot: Slot) {
        if !objects.node(slot).is_held() {
            self.cohorts.unlink(objects, slot);
        }
    }
}

impl Policy for Horizon {
    fn name(&self) -> &'static str {
        "horizon"
    }

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let tables = self.traits.front_bytes(most) + self.weights.front_bytes(most);
        tables + self.watch.used_bytes() + self.past.used_bytes()
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let (id, facts) = (objects.node(slot).id, objects.facts(slot));
        self.prefetch(&[id]);
        self.step(objects, now);
        let fresh = self.fresh(&facts);
        let tick = self.tick(now);
        self.traits[slot as usize] = match self.past.remove(id) {
            None => fresh,
            Some((uses, last)) => {
                let gap = i64::from(tick.wrapping_sub(last)) * TICK_NS;
                fresh.with_uses(u64::from(uses)).used(gap)
            }
        };
        self.weights[slot as usize] = self.weigh(objects, slot);
        let class = class(self.traits[slot as usize]);
        self.watch.begin(&mut self.hazards, id, class, now);
        self.place(objects, slot, class, now);
    }

    /// Does not replay the uses: they would end waits of zero length.
    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        self.step(objects, now);
        let (id, facts) = (objects.node(slot).id, objects.facts(slot));
        if !self.knows_objects {
            let before = self.past.remove(id).map_or(0, |(uses, _)| u64::from(uses) + 1);
            let fresh = self.fresh(&facts);
            self.traits[slot as usize] = fresh.with_uses(before + u64::from(uses));
        }
        self.weights[slot as usize] = self.weigh(objects, slot);
        let class = class(self.traits[slot as usize]);
        if !self.watch.has(id) {
            self.watch.begin(&mut self.hazards, id, class, now);
        }
        self.hazards.fit_new(class);
        self.place(objects, slot, class, now);
    }

    fn lessons(&mut self, leaving: bool) -> Option<Lessons> {
        let mut hazards = self.hazards.clone();
        let own = if leaving { self.take_object_state().ok() } else { None };
        if own.is_none() {
            self.watch.withdraw(&mut hazards);
        }
        let usual = (self.objective, self.cost, self.usual_weight);
        Some(Box::new(Learned { hazards, full_tokens: self.full_tokens, usual, own }))
    }

    fn learn(&mut self, lessons: Lessons) {
        let Ok(learned) = lessons.downcast::<Learned>() else { return };
        let Learned { hazards, full_tokens, usual, own } = *learned;
        (self.hazards, self.full_tokens) = (hazards, full_tokens);
        // The weights of another objective are not comparable.
        if (usual.0, usual.1) == (self.objective, self.cost) {
            self.usual_weight = usual.2;
        }
        if let Some(own) = own {
            self.learn_object_state(own);
        }
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.step(objects, now);
        let node = objects.node(slot);
        let (id, gap) = (node.id, now - node.stamp);
        self.take(objects, slot);
        let traits = self.traits[slot as usize].used(gap);
        self.traits[slot as usize] = traits;
        let class = class(traits);
        self.watch.begin(&mut self.hazards, id, class, now);
        self.place(objects, slot, class, now);
    }

    fn miss(&mut self, _objects: &Objects, id: u64, now: i64) {
        self.watch.end(&mut self.hazards, id, now);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64) {
        self.take(objects, slot);
        let (id, last) = (objects.node(slot).id, objects.node(slot).stamp);
        if evicted {
            let ago = ((now - last) / TICK_NS) as u32;
            let tick = self.tick(now).wrapping_sub(ago);
            self.past.add(id, u32::from(self.traits[slot as usize].uses()), tick);
        }
    }

    fn prefetch(&self, ids: &[u64]) {
        self.past.prefetch(ids);
        self.watch.prefetch(ids);
    }

    fn evicts_by_links(&self) -> bool {
        true
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        self.cohorts.victim(objects, &self.hazards, now)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        if objects.node(slot).is_held() {
            objects.node_mut(slot).set_held(false);
            let class = class(self.traits[slot as usize]);
            self.cohorts.put_back(objects, slot, class, self.weights[slot as usize]);
        }
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        objects.set_units(slot, units);
        let held = objects.node(slot).is_held();
        self.take(objects, slot);
        objects.node_mut(slot).set_held(true);
        self.weights[slot as usize] = self.weigh(objects, slot);
        if !held {
            self.put_back(objects, slot, 0);
        }
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, now: i64) {
        let before = self.traits[slot as usize];
        let mut traits = before;
        if let Some(stop) = hint.stop {
            traits = traits.stopped(stop);
        }
        if let Some((ns, _)) = hint.next_use {
            traits = traits.expected(ns.saturating_sub(now));
        }
        if hint.done {
            traits = traits.done();
        }
        if class(traits) == class(before) {
            return;
        }
        let (held, id) = (objects.node(slot).is_held(), objects.node(slot).id);
        self.take(objects, slot);
        self.traits[slot as usize] = traits;
        self.watch.reclass(&mut self.hazards, id, class(traits));
        objects.node_mut(slot).set_held(true);
        if !held {
            self.put_back(objects, slot, now);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank {
        let stamp = objects.node(slot).stamp;
        let class = class(self.traits[slot as usize]);
        let log = f64::from(self.hazards.log_score(class, now - stamp));
        Rank::score(log + weight_log2(self.weights[slot as usize]), stamp)
    }

    fn score(&self, objects: &Objects, slot: Slot, now: i64) -> f64 {
        if let Some(score) = self.cohorts.score_of_victim(slot, now) {
            return score;
        }
        let age = now - objects.node(slot).stamp;
        let class = class(self.traits[slot as usize]);
        self.cohorts.weighted(self.hazards.score(class, age), self.weights[slot as usize])
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        let usual = if self.usual_weight > 0.0 { self.usual_weight } else { 1.0 };
        let sized = !columns.tokens.is_empty() || !columns.length.is_empty();
        let weighs = self.objective != Objective::Uses && (sized || !columns.cost.is_empty());
        for (row, rank) in ranks.iter_mut().enumerate() {
            let last = columns.last_access_ns(row);
            let mut traits = Traits::default();
            if columns.count(row) > 1 {
                let span = last.saturating_sub(columns.created_ns(row));
                let waits = columns.count(row) - 1;
                let mean = span / i64::try_from(waits).unwrap_or(i64::MAX);
                traits = traits.with_uses(waits - 1).used(mean);
            }
            if columns.lifetime_ns(row) >= 0 {
                traits = traits.expected(columns.lifetime_ns(row));
            }
            let log = self.hazards.log_score(class(traits), now.saturating_sub(last));
            let mut log = f64::from(log);
            if weighs {
                let cost = columns.cost(row).unwrap_or(0.0);
                let worth = self.worth(columns.context(row), columns.tokens(row), cost);
                log += (worth / columns.blocks(row).max(1) as f64 / usual).log2();
            }
            *rank = Rank::score(log, last);
        }
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, _old: &Facts, _now: i64) {
        let units = objects.node(slot).units;
        self.resize(objects, slot, units);
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("cohorts", self.cohorts.len() as f64);
        out("watched", self.watch.len() as f64);
        out("remembered", self.past.len() as f64);
        out("waits_seen", self.hazards.ended().into());
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.cohorts.check(objects)
    }
}
