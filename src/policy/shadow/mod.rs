//! `auto(of=any(lru,arc,s3fifo,horizon), window=4096, margin=2%, patience=2,
//! sample=0)`: the policy that does best leaves decide, whichever that is.
//!
//! Beside the live policy, copies of all candidates run on metadata alone, each
//! deciding over its own table of the same capacity. After each `window` of
//! references their shares of found units are compared; when another one was
//! ahead of the live one's copy by `margin` for `patience` windows in a row, it
//! takes over, told of every object with its last use and its uses. That takes
//! O(n log n) once.
//!
//! - `of`: two to eight specs; the first is live at the start.
//! - `sample`: copies see one in so many ids, with a capacity cut alike; 0 = all
//!   up to 65,536 units of capacity, then as many as that. A sample knows no
//!   prefixes: its objects leave in any order.

mod copy;

use crate::base::spec::{Reader, Spec, Value};
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{NONE, Slot, hash};
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::handover::hand_over;
use crate::policy::registry::{self, Setting};
use crate::policy::shadow::copy::{Copy, Seen};
use crate::policy::{Hint, Policy, Rank};

const MOST: usize = 8;
const SAMPLED_UNITS: u64 = 65_536;
const DEFAULT: &str = "any(lru,arc,s3fifo,horizon)";

struct Candidate {
    spec: Spec,
    copy: Copy,
}

/// The policy.
pub struct Auto {
    candidates: Vec<Candidate>,
    live: usize,
    policy: Box<dyn Policy>,
    setting: Setting,
    window: u64,
    margin: f64,
    patience: u64,
    /// Copies see ids whose hash is 0 in so many low bits.
    shift: u32,
    asked: u64,
    ahead: (usize, u64),
    switches: u64,
    wants_facts: bool,
}

impl Auto {
    /// Reads the parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Auto> {
        let default = Spec::parse(DEFAULT)?;
        let of = reader.spec("of")?.unwrap_or(&default);
        let window = reader.u64("window", 4096, 16..=1 << 40)?;
        let margin = reader.f64("margin", 0.02, 0.0..=1.0)?;
        let patience = reader.u64("patience", 2, 1..=1000)?;
        let sample = reader.u64("sample", 0, 0..=1 << 20)?;
        let shift = match sample {
            0 => (setting.capacity_units / SAMPLED_UNITS).max(1).ilog2(),
            n => n.ilog2(),
        };
        let specs = specs(of)?;
        let mut candidates = Vec::new();
        let mut wants_facts = false;
        for spec in specs {
            let mut small = *setting;
            small.capacity_units >>= shift;
            let policy = registry::make(&spec, &small)?;
            wants_facts |= policy.wants_facts();
            let leaf_first = !setting.holes && shift == 0;
            let copy = Copy::new(policy, setting.max_objects, leaf_first)?;
            candidates.push(Candidate { spec, copy });
        }
        Ok(Auto {
            policy: registry::make(&candidates[0].spec, setting)?,
            candidates,
            live: 0,
            setting: *setting,
            window,
            margin,
            patience,
            shift,
            asked: 0,
            ahead: (0, 0),
            switches: 0,
            wants_facts,
        })
    }

    fn is_sampled(&self, id: u64) -> bool {
        hash(id) & ((1 << self.shift) - 1) == 0
    }

    /// Copies go by the capacity, or by what is resident while that is unknown.
    fn fit_copies(&mut self, objects: &Objects) {
        if self.setting.capacity_units == 0 {
            let units = (objects.units() >> self.shift).max(1);
            self.candidates.iter_mut().for_each(|c| c.copy.set_capacity(units));
        }
    }

    fn close_window(&mut self, objects: &mut Objects, now: i64) {
        self.asked = 0;
        self.fit_copies(objects);
        let rates: Vec<f64> = self.candidates.iter_mut().map(|c| c.copy.close_window()).collect();
        let mut best = self.live;
        for (i, rate) in rates.iter().enumerate() {
            if *rate > rates[best] {
                best = i;
            }
        }
        if best == self.live || rates[best] < rates[self.live] * (1.0 + self.margin) {
            self.ahead.1 = 0;
            return;
        }
        let again = if self.ahead.0 == best { self.ahead.1 } else { 0 };
        self.ahead = (best, again + 1);
        if self.ahead.1 >= self.patience {
            self.switch(objects, best, now);
        }
    }

    /// Another one decides from now on. Without memory for that, nothing changes.
    fn switch(&mut self, objects: &mut Objects, to: usize, now: i64) {
        let made = registry::make(&self.candidates[to].spec, &self.setting);
        let Ok(mut next) = made else { return };
        if hand_over(objects, &mut *next, now).is_ok() {
            self.policy = next;
            self.live = to;
            self.switches += 1;
        }
        self.ahead = (to, 0);
    }

    fn ask(&mut self, seen: &Seen, admit: bool, now: i64) {
        if !self.is_sampled(seen.id) {
            return;
        }
        for candidate in &mut self.candidates {
            if !candidate.copy.ask(seen.id, seen.units, now) && admit {
                candidate.copy.admit(seen, now);
            }
        }
    }
}

/// The candidates' specs.
fn specs(of: &Spec) -> Result<Vec<Spec>> {
    let mut specs = Vec::new();
    for arg in &of.args {
        match &arg.value {
            Value::Spec(spec) if arg.key.is_empty() => specs.push(spec.clone()),
            _ => fail!(Spec, "'of' takes a list of policies, such as {DEFAULT}"),
        }
    }
    if of.name != "any" || !(2..=MOST).contains(&specs.len()) {
        fail!(Spec, "'of' takes two to {MOST} policies, such as {DEFAULT}");
    }
    if let Some(spec) = specs.iter().find(|s| matches!(&*s.name, "auto" | "custom" | "belady")) {
        fail!(Spec, "'{}' cannot be a candidate of auto", spec.name);
    }
    Ok(specs)
}

fn seen(objects: &Objects, slot: Slot) -> Seen {
    let node = objects.node(slot);
    let parent = (node.parent != NONE).then(|| objects.node(node.parent).id);
    Seen { id: node.id, parent, units: node.units, facts: objects.facts(slot) }
}

impl Policy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.insert(objects, slot, now);
        let seen = seen(objects, slot);
        if self.is_sampled(seen.id) {
            self.candidates.iter_mut().for_each(|c| c.copy.admit(&seen, now));
        }
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.touch(objects, slot, now);
        self.ask(&seen(objects, slot), true, now);
        self.asked += 1;
        if self.asked >= self.window {
            self.close_window(objects, now);
        }
    }

    fn prefetch(&self, ids: &[u64]) {
        self.policy.prefetch(ids);
    }

    fn miss(&mut self, objects: &Objects, id: u64, now: i64) {
        self.policy.miss(objects, id, now);
        let seen = Seen { id, parent: None, units: 1, facts: Facts::default() };
        self.ask(&seen, false, now);
        self.asked += 1;
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64) {
        self.policy.remove(objects, slot, evicted, now);
        let id = objects.node(slot).id;
        if !evicted && self.is_sampled(id) {
            self.candidates.iter_mut().for_each(|c| c.copy.forget(id, now));
        }
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        if self.asked >= self.window {
            self.close_window(objects, now);
        }
        self.policy.victim(objects, now)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.put_back(objects, slot, now);
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        self.policy.resize(objects, slot, units);
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, now: i64) {
        self.policy.hint(objects, slot, hint, now);
        let id = objects.node(slot).id;
        if self.is_sampled(id) {
            self.candidates.iter_mut().for_each(|c| c.copy.hint(id, hint, now));
        }
    }

    fn set_capacity(&mut self, units: u64) {
        self.setting.capacity_units = units;
        self.policy.set_capacity(units);
        let small = units >> self.shift;
        self.candidates.iter_mut().for_each(|c| c.copy.set_capacity(small.max(1)));
    }

    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank {
        self.policy.rank(objects, slot, now)
    }

    fn score(&self, objects: &Objects, slot: Slot, now: i64) -> f64 {
        self.policy.score(objects, slot, now)
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        self.policy.seed(columns, now, ranks);
    }

    fn decided_by(&self) -> &'static str {
        self.policy.decided_by()
    }

    fn wants_facts(&self) -> bool {
        self.wants_facts
    }

    fn facts_changed(&mut self, objects: &mut Objects, slot: Slot, old: &Facts, now: i64) {
        self.policy.facts_changed(objects, slot, old, now);
    }

    fn gauges(&self, objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("live", self.live as f64);
        out("switches", self.switches as f64);
        const RATES: [&str; MOST] =
            ["rate_0", "rate_1", "rate_2", "rate_3", "rate_4", "rate_5", "rate_6", "rate_7"];
        for (name, candidate) in RATES.into_iter().zip(&self.candidates) {
            out(name, candidate.copy.rate());
        }
        let held: usize = self.candidates.iter().map(|c| c.copy.len()).sum();
        out("copied_objects", held as f64);
        self.policy.gauges(objects, out);
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.candidates.iter().try_for_each(|c| c.copy.check())?;
        self.policy.check(objects)
    }
}

#[cfg(test)]
mod tests {
    use crate::policy::evictor::{Evictor, New, Options, Who};

    /// Asks for an id, and brings it in when it is not there.
    fn ask(e: &mut Evictor, now: i64, id: u64, capacity: u64) -> bool {
        if e.lookup(now, &Who::default(), &[id], &mut []).expect("a time") == 1 {
            return true;
        }
        let mut out = Vec::new();
        let over = (e.objects().units() + 1).saturating_sub(capacity);
        e.evict(now, over, &mut out).expect("a time");
        let new = New { id, units: 1, ..New::default() };
        e.insert(now, &Who::default(), &[new]).expect("room");
        false
    }

    fn live(e: &Evictor) -> f64 {
        let mut live = -1.0;
        e.policy().gauges(e.objects(), &mut |name, value| {
            live = if name == "live" { value } else { live };
        });
        live
    }

    /// First a loop of ids, each used twice at a time, between ids that are used
    /// once: counts keep the loop, recency does not. Then a shifting set, where
    /// counts that do not age are worst.
    #[test]
    fn the_winner_takes_over_and_gives_way_again() {
        let options = Options { max_objects: 512, capacity_units: 100, ..Options::default() };
        let spec = "auto(of=any(lru,lfu(aged=false)),window=500)";
        let mut e = Evictor::open(spec, &options).expect("known policies");
        let (mut now, mut late) = (1_000i64, 0);
        for round in 0..20_000u64 {
            now += 1_000_000;
            let id = if round % 4 < 2 { round / 4 % 60 } else { 1_000_000 + round };
            late += u64::from(ask(&mut e, now, id, 100) && round > 10_000);
            if round % 97 == 0 {
                e.check().expect("sound");
            }
        }
        assert_eq!((live(&e), e.policy().decided_by()), (1.0, "lfu"));
        assert!(late > 4_500, "{late} of 10000 found: lru finds 2500");
        for round in 0..60_000u64 {
            now += 1_000_000;
            ask(&mut e, now, 1_000 + round / 50 + round % 40, 100);
        }
        assert_eq!((live(&e), e.policy().decided_by()), (0.0, "lru"));
    }

    #[test]
    fn only_lists_of_policies_are_taken() {
        for spec in ["auto(of=lru)", "auto(of=any(lru))", "auto(of=any(lru,auto))", "auto(of=3)"] {
            assert!(Evictor::open(spec, &Options::default()).is_err(), "{spec}");
        }
        assert!(Evictor::open("auto", &Options::default()).is_ok());
    }
}
