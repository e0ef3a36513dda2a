//! `auto(of=any(lru,arc,s3fifo,horizon), window=4096, margin=2%, patience=2, sample=0)`: shadow
//! evaluation of several policies; the best one is live.
//!
//! Beside the live policy, a copy of each candidate decides on metadata alone, over its own table
//! of the same capacity. Copies see what the live policy sees: request contexts, facts, sizes,
//! hints. They do not see references and pins. After each `window` of references the hit ratios by
//! units are compared. A candidate that was ahead of the live policy's copy by `margin` for
//! `patience` windows in a row takes over. It adopts every object with its last use and its uses,
//! and the state that its copy learned. A switch costs O(n log n).
//!
//! A lookup that misses everywhere counts when the object is inserted: its size is not known
//! before. It is not counted if the object is never inserted.
//!
//! `custom` and `belady` are no candidates: their order is the caller's.
//!
//! A sample of 0 means all ids up to a capacity of 131,071 units, then as few as leave a capacity
//! of 65,536 to 131,071. While the capacity is unknown, the resident units count instead. When the
//! sample changes, the copies restart from the resident objects, with what they learned. A sample
//! has no prefixes: its objects are evicted in any order.

mod copy;

use crate::base::spec::describe::Param;
use crate::base::spec::{Reader, Spec, Value};
use crate::base::status::Result;
use crate::fail;
use crate::meta::index::{Slot, hash};
use crate::meta::objects::{Facts, Objects};
use crate::policy::columns::Columns;
use crate::policy::evictor::NewObject;
use crate::policy::ghosts::Ghosts;
use crate::policy::handover::{by_last_use, hand_over};
use crate::policy::registry::{self, Setting};
use crate::policy::shadow::copy::{PolicyCopy, Reference};
use crate::policy::{Hint, Lessons, Policy, Rank};

/// Parameters of `auto`.
pub const PARAMS: &[Param] = &[
    Param::new(
        "of",
        "`any(...)` of two to eight policies; the first is live at the start. Not `custom` and \
         `belady`, also not inside of another",
    )
    .default_is("`any(lru,arc,s3fifo,horizon)`"),
    Param::new("window", "references after which hit ratios are compared"),
    Param::new("margin", "lead in hit ratio that a candidate needs"),
    Param::new("patience", "windows in a row for which it needs that lead"),
    Param::new(
        "sample",
        "copies see one in this many ids, with a capacity reduced alike; 0 = by the capacity",
    ),
];

const MOST: usize = 8;
const SAMPLED_UNITS: u64 = 65_536;
/// Ids that missed and are remembered until they are inserted.
const MISSED: usize = 65_536;
const DEFAULT: &str = "any(lru,arc,s3fifo,horizon)";

struct Candidate {
    spec: Spec,
    copy: PolicyCopy,
}

/// The live policy and its candidates.
pub struct Auto {
    candidates: Vec<Candidate>,
    live: usize,
    policy: Box<dyn Policy>,
    setting: Setting,
    window: u64,
    margin: f64,
    patience: u64,
    /// As configured; 0 = by capacity.
    sample: u64,
    /// Copies see ids with this many low bits of 0 in their hash.
    shift: u32,
    /// The capacity given to the copies, before the reduction for the sample.
    fitted: u64,
    /// References in this window, and units looked up in the copies.
    references: u64,
    looked_up: u64,
    /// Sampled ids that missed, with the units counted for each.
    missed: Ghosts,
    ahead: (usize, u64),
    switches: u64,
    wants_facts: bool,
    /// Objects were adopted that the copies do not know.
    stale: bool,
}

fn copy_of(spec: &Spec, setting: &Setting, shift: u32) -> Result<PolicyCopy> {
    let small = Setting { capacity_units: setting.capacity_units >> shift, ..*setting };
    let policy = registry::make(spec, &small)?;
    PolicyCopy::new(policy, setting.max_objects, !setting.holes && shift == 0)
}

/// The sample for a capacity, as a number of hash bits.
fn shift_for(sample: u64, units: u64) -> u32 {
    match sample {
        0 => (units / SAMPLED_UNITS).max(1).ilog2(),
        n => n.ilog2(),
    }
}

fn is_sampled(id: u64, shift: u32) -> bool {
    hash(id) & ((1 << shift) - 1) == 0
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
        let shift = shift_for(sample, setting.capacity_units);
        let mut candidates = Vec::new();
        let mut wants_facts = false;
        for spec in specs(of)? {
            let mut copy = copy_of(&spec, setting, shift)?;
            wants_facts |= copy.policy().wants_facts();
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
            sample,
            shift,
            fitted: 0,
            references: 0,
            looked_up: 0,
            missed: Ghosts::new(setting.max_objects.min(MISSED))?,
            ahead: (0, 0),
            switches: 0,
            wants_facts,
            stale: false,
        })
    }

    /// The capacity, or the resident units while that is unknown.
    fn units(&self, objects: &Objects) -> u64 {
        match self.setting.capacity_units {
            0 => objects.units(),
            units => units,
        }
    }

    fn fit_copies(&mut self, units: u64) {
        self.fitted = units;
        let small = (units >> self.shift).max(1);
        self.candidates.iter_mut().for_each(|c| c.copy.set_capacity(small));
    }

    fn close_window(&mut self, objects: &mut Objects, now: i64) {
        self.references = 0;
        let looked_up = std::mem::take(&mut self.looked_up);
        let mut rates = [0.0; MOST];
        for (rate, candidate) in rates.iter_mut().zip(&mut self.candidates) {
            *rate = candidate.copy.close_window(looked_up);
        }
        self.compare(&rates, objects, now);
        let units = self.units(objects);
        let known = self.setting.capacity_units > 0;
        // The resident units fluctuate; a smaller sample is good enough then.
        let least = if known { 0 } else { self.shift };
        let target_shift = shift_for(self.sample, units).max(least);
        if self.stale || target_shift != self.shift {
            // Without memory for that, the copies continue unchanged.
            self.stale = self.restock(objects, target_shift, now).is_err();
        } else if !known {
            self.fit_copies(units);
        }
    }

    fn compare(&mut self, rates: &[f64; MOST], objects: &mut Objects, now: i64) {
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

    /// Makes another candidate live. Nothing changes if memory is short.
    fn switch(&mut self, objects: &mut Objects, to: usize, now: i64) {
        let Candidate { spec, copy } = &mut self.candidates[to];
        let Ok(mut next) = registry::make(spec, &self.setting) else { return };
        if hand_over(objects, copy.policy(), false, &mut *next, now).is_ok() {
            self.policy = next;
            self.live = to;
            self.switches += 1;
        }
        self.ahead = (to, 0);
    }

    /// Restarts the copies with another sample, from the resident objects.
    fn restock(&mut self, objects: &Objects, shift: u32, now: i64) -> Result<()> {
        let order = by_last_use(objects, now, |id| is_sampled(id, shift))?;
        let mut copies = Vec::new();
        for candidate in &self.candidates {
            copies.push(copy_of(&candidate.spec, &self.setting, shift)?);
        }
        for (candidate, copy) in self.candidates.iter_mut().zip(copies) {
            let before = std::mem::replace(&mut candidate.copy, copy);
            candidate.copy.succeed(before);
        }
        self.shift = shift;
        self.missed.clear();
        self.fit_copies(self.units(objects));
        for Candidate { copy, .. } in &mut self.candidates {
            for &(stamp, slot) in &order {
                let node = objects.node(slot);
                copy.adopt(&reference_of(objects, slot, node.session), node.hits, stamp);
            }
            // In the order of last use, children precede their parents.
            for &(_, slot) in &order {
                let NewObject { id, parent, .. } = NewObject::of(objects, slot);
                parent.into_iter().for_each(|parent| copy.set_parent(id, parent));
            }
        }
        Ok(())
    }

    /// Notifies the copies of an object, if it is in the sample.
    fn notify(
        &mut self,
        objects: &Objects,
        slot: Slot,
        mut change: impl FnMut(&mut PolicyCopy, u64),
    ) {
        let id = objects.node(slot).id;
        if is_sampled(id, self.shift) {
            self.candidates.iter_mut().for_each(|c| change(&mut c.copy, id));
        }
    }

    fn reference(&mut self, seen: &Reference, now: i64) {
        self.looked_up += seen.object.units;
        for Candidate { copy, .. } in &mut self.candidates {
            copy.reference(seen, now);
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
    for spec in &specs {
        if let Some(inner) = not_copied(spec) {
            fail!(Spec, "'{spec}' cannot be a candidate of auto: '{inner}' cannot run as a copy");
        }
    }
    Ok(specs)
}

/// A policy in a spec, or inside of it, that cannot be copied: its order is the caller's, or
/// it would copy itself.
fn not_copied(spec: &Spec) -> Option<&str> {
    if matches!(&*spec.name, "auto" | "custom" | "belady") {
        return Some(&spec.name);
    }
    spec.args.iter().find_map(|arg| match &arg.value {
        Value::Spec(inner) => not_copied(inner),
        _ => None,
    })
}

/// An object as used by a session of the live table.
fn reference_of(objects: &Objects, slot: Slot, session: Slot) -> Reference {
    let session = objects.sessions.of(session).copied();
    Reference { object: NewObject::of(objects, slot), session }
}

fn reference_now(objects: &Objects, slot: Slot) -> Reference {
    reference_of(objects, slot, objects.sessions.current)
}

impl Policy for Auto {
    fn name(&self) -> &'static str {
        "auto"
    }

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let copies = self.candidates.iter().map(|candidate| candidate.copy.used_bytes());
        self.policy.used_bytes(objects) + copies.sum::<u64>() + self.missed.used_bytes()
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.insert(objects, slot, now);
        if self.setting.capacity_units == 0 && objects.units() > self.fitted {
            self.fit_copies(objects.units());
        }
        if !is_sampled(objects.node(slot).id, self.shift) {
            return;
        }
        let seen = reference_now(objects, slot);
        match self.missed.remove(seen.object.id) {
            Some((counted, _)) => {
                // Its lookup was the use; its size is known now.
                self.looked_up += if counted == 0 { seen.object.units } else { 0 };
                self.candidates.iter_mut().for_each(|c| c.copy.admit(&seen, now));
            }
            None => self.reference(&seen, now),
        }
    }

    fn adopt(&mut self, objects: &mut Objects, slot: Slot, uses: u16, now: i64) {
        self.policy.adopt(objects, slot, uses, now);
        // The copies are notified of all of them at the next opportunity.
        (self.stale, self.references) = (true, self.window);
    }

    fn lessons(&mut self, leaving: bool) -> Option<Lessons> {
        self.policy.lessons(leaving)
    }

    fn learn(&mut self, lessons: Lessons) {
        self.policy.learn(lessons);
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.touch(objects, slot, now);
        if is_sampled(objects.node(slot).id, self.shift) {
            self.reference(&reference_now(objects, slot), now);
        }
        self.references += 1;
        if self.references >= self.window {
            self.close_window(objects, now);
        }
    }

    fn prefetch(&self, ids: &[u64]) {
        self.policy.prefetch(ids);
    }

    fn miss(&mut self, objects: &Objects, id: u64, now: i64) {
        self.policy.miss(objects, id, now);
        self.references += 1;
        if !is_sampled(id, self.shift) {
            return;
        }
        let session = objects.sessions.of(objects.sessions.current);
        let mut known = None;
        for Candidate { copy, .. } in &mut self.candidates {
            let units = copy.lookup(id, session, now);
            known = known.or(units);
        }
        let counted = known.unwrap_or(0);
        self.looked_up += u64::from(counted);
        self.missed.add(id, counted, 0);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, evicted: bool, now: i64) {
        self.policy.remove(objects, slot, evicted, now);
        if !evicted {
            self.notify(objects, slot, |copy, id| copy.remove(id, now));
        }
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        if self.references >= self.window {
            self.close_window(objects, now);
        }
        self.policy.victim(objects, now)
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.policy.put_back(objects, slot, now);
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        self.policy.resize(objects, slot, units);
        self.notify(objects, slot, |copy, id| copy.resize(id, units));
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, now: i64) {
        self.policy.hint(objects, slot, hint, now);
        let session = objects.sessions.of(objects.sessions.current);
        self.notify(objects, slot, |copy, id| copy.hint(id, session, hint, now));
    }

    fn set_capacity(&mut self, units: u64) {
        self.setting.capacity_units = units;
        self.policy.set_capacity(units);
        match units {
            // The resident units count from now on.
            0 => self.fitted = 0,
            units => self.fit_copies(units),
        }
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
        let facts = objects.facts(slot);
        self.notify(objects, slot, |copy, id| copy.facts_changed(id, &facts, now));
    }

    fn gauges(&self, objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("live", self.live as f64);
        out("switches", self.switches as f64);
        const RATES: [&str; MOST] =
            ["rate_0", "rate_1", "rate_2", "rate_3", "rate_4", "rate_5", "rate_6", "rate_7"];
        const FOUND: [&str; MOST] = [
            "found_units_0",
            "found_units_1",
            "found_units_2",
            "found_units_3",
            "found_units_4",
            "found_units_5",
            "found_units_6",
            "found_units_7",
        ];
        for (names, candidate) in RATES.into_iter().zip(FOUND).zip(&self.candidates) {
            out(names.0, candidate.copy.rate());
            out(names.1, candidate.copy.total() as f64);
        }
        out("sample", (1u64 << self.shift) as f64);
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
    use crate::meta::objects::Facts;
    use crate::meta::sessions::Stop;
    use crate::policy::Hint;
    use crate::policy::columns::Columns;
    use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
    use crate::policy::testing::gauge;

    /// Looks an id up, and inserts it after a miss.
    fn ask_as(
        e: &mut Evictor,
        now: i64,
        request: &RequestContext,
        new: &NewObject,
        capacity: u64,
    ) -> bool {
        if e.lookup(now, request, &[new.id], &mut []).expect("a time") == 1 {
            return true;
        }
        let mut out = Vec::new();
        let over = (e.objects().units() + new.units).saturating_sub(capacity);
        e.evict(now, over, &mut out).expect("a time");
        e.insert(now, request, &[*new]).expect("room");
        false
    }

    fn lookup_or_insert(e: &mut Evictor, now: i64, id: u64, capacity: u64) -> bool {
        ask_as(
            e,
            now,
            &RequestContext::default(),
            &NewObject { id, units: 1, ..NewObject::default() },
            capacity,
        )
    }

    fn live(e: &Evictor) -> f64 {
        gauge(e, "live")
    }

    fn open(spec: &str, max_objects: usize, capacity_units: u64) -> Evictor {
        let options = Options { max_objects, capacity_units, holes: true, ..Options::default() };
        Evictor::open(spec, &options).expect("known policies")
    }

    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) % sides
        }
    }

    const SESSIONS: u64 = 12;

    /// Sessions of three classes and four tenants, each with its own history and pace; the ends of
    /// histories are requested less. Every evictor is notified alike. Returns the hits of each.
    fn replay(evictors: &mut [Evictor], capacity: u64) -> Vec<u64> {
        let (mut dice, mut hits) = (Dice(7), vec![0; evictors.len()]);
        let mut now = 1_000_000_000;
        for _ in 0..6_000 {
            now += 40_000_000 + dice.roll(900_000_000) as i64;
            let session = dice.roll(SESSIONS);
            let at = dice.roll(40) * dice.roll(40) / 40;
            let request = RequestContext {
                session: Some(session),
                tenant: session as u32 % 4,
                priority: Some((session % 3) as u8),
                length: 640 + 64 * session as u32,
                max_length: 4096,
                tokens_each: 16,
            };
            let (context, tokens) = (at as u32 * 16, 16 - at as u32 % 3);
            let facts = Facts { context, tokens, ..Facts::default() };
            let new =
                NewObject { id: session * 1000 + at, units: 1, facts, ..NewObject::default() };
            let stop = Stop::from_code(dice.roll(5));
            let ahead = now + 1_000_000 * dice.roll(20_000) as i64;
            let next_use = (dice.roll(3) == 0).then_some((ahead, 0.95));
            let hint = Hint { stop, next_use, done: dice.roll(50) == 0 };
            for (e, hits) in evictors.iter_mut().zip(&mut hits) {
                *hits += u64::from(ask_as(e, now, &request, &new, capacity));
                e.hint(now, &request, &[new.id], &hint).expect("a time");
            }
        }
        evictors.iter().for_each(|e| e.check().expect("sound"));
        hits
    }

    #[test]
    fn a_copy_has_the_hits_of_the_policy_alone() {
        let specs = [
            "tlru(threshold=300,turn=50)",
            "predictive(confidence=0.5)",
            "predictive(mode=preempt,confidence=0.2)",
            "qos",
            "qos(strict=true)",
            "qos(inner=gdsf,ageing=4s,floor=0.2)",
            "pensieve",
            "gdsf",
            "s3fifo",
            "horizon",
        ];
        for spec in specs {
            let auto = format!("auto(of=any(lru,{spec}),window=1000000000)");
            let mut evictors = [&auto, "lru", spec].map(|spec| open(spec, 512, 100));
            let hits = replay(&mut evictors, 100);
            let [copied_lru, copied] =
                ["found_units_0", "found_units_1"].map(|name| gauge(&evictors[0], name) as u64);
            assert_eq!((copied_lru, copied), (hits[1], hits[2]), "{spec}");
            assert_ne!(copied, copied_lru, "{spec} does as lru does: this shows nothing");
        }
    }

    /// For paths, the live table reports hits before misses, so the order of a copy differs
    /// slightly from that of the policy alone.
    #[test]
    fn for_paths_a_copy_has_about_the_hits_of_the_policy_alone() {
        for (spec, off) in [
            ("tlru(threshold=300,turn=50)", 0.02),
            ("horizon", 0.02),
            ("predictive(confidence=0.5)", 0.02),
            // Making room for one object at a time evicts objects that the same request of a low
            // class just inserted.
            ("qos", 0.1),
        ] {
            let auto = format!("auto(of=any(fifo,{spec}),window=1000000000)");
            let options = Options { max_objects: 1024, capacity_units: 200, ..Options::default() };
            let mut evictors =
                [&auto, spec].map(|spec| Evictor::open(spec, &options).expect("known policies"));
            let (mut dice, mut found, mut now) = (Dice(3), [0; 2], 1_000_000_000);
            for _ in 0..3_000 {
                now += 40_000_000 + dice.roll(900_000_000) as i64;
                let (session, len) = (dice.roll(SESSIONS), 1 + dice.roll(40) * dice.roll(40) / 40);
                let request = RequestContext {
                    session: Some(session),
                    tenant: session as u32 % 4,
                    priority: Some((session % 3) as u8),
                    length: 16 * len as u32,
                    ..RequestContext::default()
                };
                let path: Vec<u64> = (0..len).map(|at| session * 1000 + at + 1).collect();
                for (e, found) in evictors.iter_mut().zip(&mut found) {
                    let leading = e.lookup(now, &request, &path, &mut []).expect("a time");
                    *found += leading;
                    let missing = path.len() - leading;
                    e.acquire(&path[..leading]).expect("found");
                    let over = (e.objects().units() + missing as u64).saturating_sub(200);
                    e.evict(now, over, &mut Vec::new()).expect("a time");
                    e.release(&path[..leading]).expect("held");
                    let new = |(at, &id): (usize, &u64)| NewObject {
                        id,
                        parent: (at > 0).then(|| id - 1),
                        units: 1,
                        facts: Facts { context: at as u32 * 16, tokens: 16, ..Facts::default() },
                    };
                    let news: Vec<NewObject> =
                        path.iter().enumerate().map(new).skip(leading).collect();
                    e.insert(now, &request, &news).expect("room");
                }
            }
            evictors.iter().for_each(|e| e.check().expect("sound"));
            let (copied, alone) = (gauge(&evictors[0], "found_units_1"), found[1] as f64);
            assert!((copied / alone - 1.0).abs() < off, "{spec}: {copied}, alone {alone}");
        }
    }

    #[test]
    fn a_policy_by_sessions_wins_where_it_has_more_hits() {
        // Class 0 requests each object once. The other class requests 60 in turn, which are too
        // many with those between them.
        let spec = "auto(of=any(lru,qos(ageing=0)),window=500)";
        let mut evictors = [open(spec, 512, 80), open("lru", 512, 80)];
        let mut hits = [0, 0];
        for round in 0..8_000u64 {
            let (session, id) =
                if round % 2 == 0 { (1, round / 2 % 60) } else { (2, 1000 + round) };
            let priority = Some(if session == 1 { 2 } else { 0 });
            let request =
                RequestContext { session: Some(session), priority, ..RequestContext::default() };
            let new = NewObject { id, units: 1, ..NewObject::default() };
            for (e, hits) in evictors.iter_mut().zip(&mut hits) {
                *hits += u64::from(ask_as(e, 1 + round as i64, &request, &new, 80));
            }
        }
        assert_eq!((live(&evictors[0]), evictors[0].policy().decided_by()), (1.0, "qos"));
        assert!(hits[0] > 2_500 && hits[1] == 0, "{hits:?} of 4000");
    }

    #[test]
    fn misses_count_by_size_and_resizes_reach_the_copies() {
        let mut e = open("auto(of=any(lru,fifo),window=16)", 64, 1000);
        let request = RequestContext::default();
        (0..8).for_each(|id| assert!(!lookup_or_insert(&mut e, 1, id, 1000)));
        e.resize(&[0, 1], &[5, 7]).expect("found");
        (0..7).for_each(|id| assert!(lookup_or_insert(&mut e, 2, id, 1000)));
        // 15 references so far: 8 units missed, 5 + 7 + 5 found.
        assert_eq!(gauge(&e, "found_units_0"), 17.0);
        let large = NewObject { id: 99, units: 15, ..NewObject::default() };
        assert!(!ask_as(&mut e, 3, &request, &large, 1000));
        assert_eq!(e.touch(4, &request, &[7]).expect("a time"), 1);
        // The window is closed: 18 of 8 + 18 + 15.
        for rate in ["rate_0", "rate_1"] {
            assert!((gauge(&e, rate) - 18.0 / 41.0).abs() < 1e-9, "{}", gauge(&e, rate));
        }
    }

    #[test]
    fn an_insert_counts_as_one_use_with_or_without_a_lookup() {
        let mut e = open("auto(of=any(lru,fifo))", 64, 4);
        let request = RequestContext::default();
        e.record(1, &request, &[1, 2, 3, 4], &[]).expect("room");
        assert_eq!(gauge(&e, "found_units_0"), 0.0);
        // Evicted from the table, not from the copies.
        let mut out = Vec::new();
        e.evict(2, 4, &mut out).expect("a time");
        e.record(3, &request, &[1, 2], &[]).expect("room");
        assert_eq!(gauge(&e, "found_units_0"), 2.0);
        assert!(!lookup_or_insert(&mut e, 4, 3, 4));
        assert_eq!(gauge(&e, "found_units_0"), 3.0);
    }

    #[test]
    fn changed_facts_reach_the_copies() {
        let mut e = open("auto(of=any(lru,gdsf))", 64, 2);
        let request = RequestContext::default();
        for id in [1, 2] {
            e.insert(id as i64, &request, &[NewObject { id, units: 1, ..NewObject::default() }])
                .expect("room");
        }
        let columns = Columns { ids: &[1, 2], cost: &[1000.0, 1.0], ..Columns::default() };
        e.select(3, &columns, 1, &Default::default(), &mut Default::default()).expect("sound");
        e.insert(4, &request, &[NewObject { id: 3, units: 1, ..NewObject::default() }])
            .expect("room");
        assert_eq!(e.lookup(5, &request, &[1], &mut []).expect("a time"), 1);
        assert_eq!(["found_units_0", "found_units_1"].map(|g| gauge(&e, g)), [0.0, 1.0]);
    }

    #[test]
    fn the_sample_follows_the_capacity() {
        let mut e = open("auto(of=any(lru,fifo),window=16)", 4096, 0);
        let request = RequestContext::default();
        let mut now = 0;
        let mut uses = |e: &mut Evictor, ids: std::ops::Range<u64>| {
            for id in ids {
                now += 1;
                if e.touch(now, &request, &[id]).expect("a time") == 0 {
                    let new = NewObject { id, units: 1000, ..NewObject::default() };
                    e.insert(now, &request, &[new]).expect("room");
                }
            }
            e.check().expect("sound");
            (gauge(e, "sample"), gauge(e, "copied_objects"))
        };
        assert_eq!(uses(&mut e, 0..120), (1.0, 240.0), "no capacity: what is resident");
        uses(&mut e, 120..1000);
        let (sample, copied) = uses(&mut e, 0..32);
        assert_eq!(sample, 8.0);
        assert!((150.0..350.0).contains(&copied), "{copied} of 1000 in eight, twice");
        e.set_capacity(1 << 30);
        assert_eq!(uses(&mut e, 0..32).0, 16_384.0);
        e.set_capacity(2_000_000);
        assert_eq!(uses(&mut e, 0..32).0, 16.0);
        // All fit into the copies; the youngest stay.
        e.set_capacity(100_000);
        assert_eq!(uses(&mut e, 0..32), (1.0, 200.0));
        let found = gauge(&e, "found_units_0");
        uses(&mut e, 940..972);
        assert_eq!(gauge(&e, "found_units_0"), found + 32_000.0);
    }

    #[test]
    fn a_switch_to_auto_fills_the_copies_with_the_residents() {
        for holes in [true, false] {
            let options =
                Options { max_objects: 64, capacity_units: 64, holes, ..Options::default() };
            let mut e = Evictor::open("lru", &options).expect("a known policy");
            let path: Vec<u64> = (1..=40).collect();
            let new = |&id: &u64| NewObject {
                id,
                parent: Some(id - 1),
                units: 1,
                ..NewObject::default()
            };
            let news: Vec<NewObject> = path.iter().map(new).collect();
            e.insert(1, &RequestContext::default(), &news).expect("room");
            e.switch("auto(of=any(fifo,lru),window=64)").expect("known policies");
            assert_eq!(e.touch(2, &RequestContext::default(), &[40]).expect("a time"), 1);
            e.check().expect("sound");
            assert_eq!(gauge(&e, "copied_objects"), 80.0);
            assert_eq!(
                e.lookup(3, &RequestContext::default(), &path, &mut []).expect("a time"),
                40
            );
            assert_eq!(gauge(&e, "found_units_0"), 40.0);
        }
    }

    /// Two kinds of objects: some certainly return after a minute, most never.
    #[test]
    fn the_winner_continues_from_its_copys_learned_state() {
        let mut e = open("auto(of=any(fifo,horizon),window=1024)", 512, 150);
        let (mut now, mut taken) = (1_000_000_000, None);
        for round in 0..40_000u64 {
            now += 500_000_000;
            let id = if round % 2 == 0 { round / 2 % 70 } else { 1_000 + round };
            lookup_or_insert(&mut e, now, id, 150);
            if live(&e) == 1.0 {
                taken = Some(gauge(&e, "waits_seen"));
                break;
            }
        }
        assert!(taken.is_some_and(|waits| waits > 500.0), "{taken:?} waits seen at once");
    }

    /// First a loop of ids, each used twice at a time, between ids that are used once: frequency
    /// keeps the loop, recency does not. Then a shifting set, where frequency without ageing is
    /// worst.
    #[test]
    fn the_live_policy_changes_with_the_workload() {
        let options = Options { max_objects: 512, capacity_units: 100, ..Options::default() };
        let spec = "auto(of=any(lru,lfu(aged=false)),window=500)";
        let mut e = Evictor::open(spec, &options).expect("known policies");
        let (mut now, mut late) = (1_000i64, 0);
        for round in 0..20_000u64 {
            now += 1_000_000;
            let id = if round % 4 < 2 { round / 4 % 60 } else { 1_000_000 + round };
            late += u64::from(lookup_or_insert(&mut e, now, id, 100) && round > 10_000);
            if round % 97 == 0 {
                e.check().expect("sound");
            }
        }
        assert_eq!((live(&e), e.policy().decided_by()), (1.0, "lfu"));
        assert!(late > 4_500, "{late} of 10000 found: lru finds 2500");
        for round in 0..60_000u64 {
            now += 1_000_000;
            lookup_or_insert(&mut e, now, 1_000 + round / 50 + round % 40, 100);
        }
        assert_eq!((live(&e), e.policy().decided_by()), (0.0, "lru"));
    }

    #[test]
    fn candidates_must_be_a_list_of_policies() {
        for spec in ["auto(of=lru)", "auto(of=any(lru))", "auto(of=any(lru,auto))", "auto(of=3)"] {
            assert!(Evictor::open(spec, &Options::default()).is_err(), "{spec}");
        }
        for name in ["custom", "belady", "qos(inner=custom)", "qos(inner=belady)"] {
            let spec = format!("auto(of=any(lru,{name}))");
            let error = Evictor::open(&spec, &Options::default()).err().expect("refused");
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(Evictor::open("auto", &Options::default()).is_ok());
    }
}
