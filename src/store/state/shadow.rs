//! Shadow evaluation: several policies decide on metadata beside the live one, on the same requests
//! and with the same capacity, so that their hit rates can be compared.
//!
//! A shadow receives the notifications of the tier's policy, without references and pins. An object
//! that the live policy has is inserted at once; one that neither has is inserted when the live
//! policy inserts it.

use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::meta::objects::Facts;
use crate::policy::evict::Victim;
use crate::policy::evictor::{Evictor, NewObject, Options, RequestContext};
use crate::policy::handover::by_last_use;
use crate::policy::metrics::{Counts, Metrics, session_fairness};
use crate::policy::{Hint, custom};

/// Most policies compared with the live one.
pub const MAX_POLICIES: usize = 8;
/// Longest evaluation, in seconds: a day.
pub const MAX_SECONDS: u64 = 24 * 3600;
/// Most chunks that a shadow starts with: the most recently used. Closing the store waits until the
/// shadows are set up.
const MOST_SEEDED: usize = 1 << 18;
/// Objects that touch a shadow's memory before it starts; fewer than any table holds.
const WARM_UP: u64 = 60;

/// Initial state and options of the shadows.
pub struct Plan {
    /// Spec of the live policy.
    pub live: String,
    /// Options of the tier's evictor.
    pub options: Options,
    /// Capacity of a shadow, in units.
    pub units: u64,
    /// Objects of the live table, the most recently used first.
    pub seed: Vec<NewObject>,
}

/// Result of one shadow.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// Spec of its policy.
    pub spec: String,
    /// Its policy is the live one.
    pub is_live: bool,
    /// Counters of its lookups and evictions.
    pub counts: Counts,
    /// Jain's index over sessions, and over tenants.
    pub fairness: [f64; 2],
    /// Number of its chunks.
    pub objects: u64,
    /// Decisions that were timed: a sample.
    pub timed: u64,
    /// Mean decision time.
    pub mean_ns: u64,
    /// 99th percentile of the decision times.
    pub p99_ns: u64,
}

/// A shadow evaluation, running or ended.
pub struct Shadow {
    copies: Vec<Evictor>,
    units: u64,
    /// Start and end; before `begin`, 0 and the duration.
    pub span_ns: (u64, u64),
    /// The results, once it has ended.
    scores: Option<Vec<Score>>,
    new: Vec<NewObject>,
    victims: Vec<Victim>,
}

impl Plan {
    /// Copies the state of the live evictor; `high` is the share of the capacity that is used.
    pub fn of(live: &Evictor, high: f64) -> Result<Plan> {
        let options = Options { log_entries: 0, ..*live.options() };
        let units = (options.capacity_units as f64 * high) as u64;
        let objects = live.objects();
        let order = by_last_use(objects, live.now_ns(), |_| true)?;
        let mut seed = Vec::new();
        let count = order.len().min(MOST_SEEDED);
        if seed.try_reserve_exact(count).is_err() {
            fail!(NoMem, "no memory to copy {count} chunks for a shadow evaluation");
        }
        let mut room = units;
        for &(_, slot) in order.iter().rev().take(count) {
            let new = NewObject::of(objects, slot);
            if new.units > room {
                break;
            }
            room -= new.units;
            seed.push(new);
        }
        Ok(Plan { live: live.spec().to_string(), options, units, seed })
    }
}

impl Shadow {
    /// Sets up an evaluation of the live policy and others. The slow part is done here, so that the
    /// caller holds no lock meanwhile.
    pub fn open(plan: &Plan, policies: &[Spec], seconds: u64) -> Result<Shadow> {
        if policies.is_empty() || policies.len() > MAX_POLICIES {
            fail!(Limit, "{} policies, allowed is 1 to {MAX_POLICIES}", policies.len());
        }
        if seconds == 0 || seconds > MAX_SECONDS {
            fail!(Limit, "a shadow evaluation of {seconds} seconds, allowed is 1 to {MAX_SECONDS}");
        }
        policies.iter().try_for_each(|spec| custom::refuse(spec, "a store"))?;
        let specs = std::iter::once(plan.live.clone()).chain(policies.iter().map(Spec::to_string));
        let mut copies = Vec::new();
        for spec in specs {
            let mut copy = Evictor::open(&spec, &plan.options)?;
            // Inserted and evicted again, so that no timed decision touches fresh memory.
            let new = |id| NewObject { id, units: 1, ..NewObject::default() };
            let some: Vec<NewObject> = (0..WARM_UP).map(|n| new(u64::MAX - n)).collect();
            copy.insert(1, &RequestContext::default(), &some)?;
            copy.evict(1, WARM_UP, &mut Vec::new())?;
            copy.insert(1, &RequestContext::default(), &plan.seed)?;
            copy.metrics = Metrics::default();
            copies.push(copy);
        }
        let span_ns = (0, seconds.saturating_mul(1_000_000_000));
        let (units, scores, new, victims) = (plan.units, None, Vec::new(), Vec::new());
        Ok(Shadow { copies, units, span_ns, scores, new, victims })
    }

    /// Starts the clock of the evaluation.
    pub fn begin(&mut self, now_ns: u64) {
        self.span_ns = (now_ns, now_ns.saturating_add(self.span_ns.1));
    }

    /// Whether it is running.
    pub fn is_on(&self) -> bool {
        self.scores.is_none()
    }

    /// Ends it once its time is over.
    pub fn tick(&mut self, now_ns: u64) {
        if now_ns >= self.span_ns.1 {
            self.end(self.span_ns.1);
        }
    }

    /// Ends it: the results are kept, the shadows are dropped.
    pub fn end(&mut self, now_ns: u64) {
        if self.is_on() {
            self.scores = Some(self.scores());
            self.copies = Vec::new();
            self.span_ns.1 = self.span_ns.1.min(now_ns);
        }
    }

    /// A lookup of a path: chunks that the live policy has are inserted into shadows that miss them.
    pub fn notify_access(
        &mut self,
        now: i64,
        live: &Evictor,
        request: &RequestContext,
        ids: &[u64],
    ) {
        let mut known = std::mem::take(&mut self.new);
        known.clear();
        for (at, &id) in ids.iter().enumerate() {
            let Some(slot) = live.objects().find(id) else { continue };
            let mut new = NewObject::of(live.objects(), slot);
            if !live.objects().has_facts() {
                let tokens = request.tokens_each;
                let context = (at as u32).saturating_mul(tokens);
                new.facts = Facts { tokens, context, ..Facts::default() };
            }
            known.push(new);
        }
        for copy in &mut self.copies {
            // Chunks that a shadow rejects stay missing, which counts against it.
            let _ = copy.lookup(now, request, ids, &mut []);
        }
        self.take_in(now, request, &known);
        self.new = known;
    }

    /// Inserts chunks into the shadows that miss them, then evicts what exceeds the capacity.
    pub fn take_in(&mut self, now: i64, request: &RequestContext, new: &[NewObject]) {
        let mut missing = Vec::new();
        for copy in &mut self.copies {
            missing.clear();
            missing.extend(new.iter().filter(|one| copy.objects().find(one.id).is_none()));
            if missing.is_empty() {
                continue;
            }
            let _ = copy.insert(now, request, &missing);
            let over = copy.objects().units().saturating_sub(self.units);
            if over > 0 {
                self.victims.clear();
                let _ = copy.evict(now, over, &mut self.victims);
            }
        }
    }

    /// A chunk was removed without an eviction decision.
    pub fn forget(&mut self, now: i64, id: u64) {
        for copy in &mut self.copies {
            let _ = copy.remove(now, &[id]);
        }
    }

    /// The engine gave a hint.
    pub fn hint(&mut self, now: i64, request: &RequestContext, ids: &[u64], hint: &Hint) {
        for copy in &mut self.copies {
            let _ = copy.hint(now, request, ids, hint);
        }
    }

    /// Changes the capacity of the tier.
    pub fn set_capacity(&mut self, units: u64, high: f64) {
        self.units = (units as f64 * high) as u64;
        self.copies.iter_mut().for_each(|copy| copy.set_capacity(units));
    }

    /// The results so far; the live policy's first.
    pub fn scores(&self) -> Vec<Score> {
        if let Some(scores) = &self.scores {
            return scores.clone();
        }
        let score = |(at, copy): (usize, &Evictor)| {
            let metrics = &copy.metrics;
            Score {
                spec: copy.spec().to_string(),
                is_live: at == 0,
                counts: metrics.counts,
                fairness: [session_fairness(&copy.objects().sessions), metrics.tenant_fairness()],
                objects: copy.objects().len() as u64,
                timed: metrics.decision.total(),
                mean_ns: metrics.decision.mean_ns(),
                p99_ns: metrics.decision.quantile_ns(0.99),
            }
        };
        self.copies.iter().enumerate().map(score).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::state::tier_cache::Granularity;
    use crate::store::state::tier_cache::TierCache;

    const ROOM: u64 = 32;
    const HOT: u64 = 8;
    /// Lookups of a round.
    const REFERENCES: u64 = 2 * HOT + 40;

    /// Some chunks are looked up twice a round, and more than fit only once ever: lru evicts the
    /// former each time, lfu does not.
    fn work(cache: &mut TierCache, rounds: std::ops::Range<u64>) {
        let mut victims = Vec::new();
        for at in rounds.start * REFERENCES..rounds.end * REFERENCES {
            let id = if at % REFERENCES < 2 * HOT { 1 + at % HOT } else { 1000 + at };
            let request =
                RequestContext { session: Some(id), tokens_each: 16, ..RequestContext::default() };
            let now = (1 + at) * 1_000;
            cache.notify_access(now, &request, &[id]);
            if cache.evictor.objects().find(id).is_none() {
                let facts = Facts { tokens: 16, ..Facts::default() };
                assert!(cache.insert(
                    now,
                    &request,
                    &[NewObject { id, parent: None, units: 1, facts }]
                ));
            }
            let over = cache.evictor.objects().units().saturating_sub(ROOM);
            if over > 0 {
                cache.choose(now, over * 4096, usize::MAX, &mut victims);
            }
        }
    }

    fn specs(text: &[&str]) -> Vec<Spec> {
        text.iter().map(|text| Spec::parse(text).expect("a spec")).collect()
    }

    #[test]
    fn shadows_decide_like_their_policies_and_the_live_copy_agrees() {
        let mut cache =
            TierCache::open("lru", Granularity::Chunk, 256, ROOM * 4096, true).expect("known");
        work(&mut cache, 0..2);
        let plan = Plan::of(&cache.evictor, 1.0).expect("small");
        assert_eq!((plan.units, plan.seed.len()), (ROOM, ROOM as usize));
        let before = cache.evictor.metrics.counts;
        let shadow = Shadow::open(&plan, &specs(&["lfu", "lru"]), 100).expect("known");
        cache.begin_shadow(0, shadow).expect("none yet");
        work(&mut cache, 2..22);
        let scores = cache.shadow().expect("begun").scores();
        let found: Vec<(bool, &str)> =
            scores.iter().map(|score| (score.is_live, score.spec.as_str())).collect();
        assert_eq!(found, [(true, "lru"), (false, "lfu"), (false, "lru")]);
        assert_eq!(scores[0].counts, scores[2].counts, "two of one kind do alike");
        let after = cache.evictor.metrics.counts;
        assert_eq!(scores[0].counts.references, after.references - before.references);
        assert_eq!(scores[0].counts.hits, after.hits - before.hits);
        assert_eq!(scores[0].counts.hits, 20 * HOT, "the second time");
        assert!(scores[1].counts.hits >= 38 * HOT, "{:?}", scores[1]);
        assert_eq!(scores[0].counts.evicted_references, 20 * HOT - HOT, "the first time");
        assert!(scores[0].timed > 0 && scores[0].counts.decisions > 0);
        assert!(scores[1].fairness[0] >= scores[0].fairness[0], "{scores:?}");
    }

    #[test]
    fn an_evaluation_ends_on_time_and_keeps_its_results() {
        let mut cache =
            TierCache::open("lru", Granularity::Chunk, 256, ROOM * 4096, true).expect("known");
        work(&mut cache, 0..1);
        let plan = Plan::of(&cache.evictor, 1.0).expect("small");
        let shadow = || Shadow::open(&plan, &specs(&["fifo"]), 1).expect("known");
        cache.begin_shadow(0, shadow()).expect("none yet");
        assert!(cache.begin_shadow(0, shadow()).is_err(), "one at a time");
        work(&mut cache, 1..2);
        let scores = cache.shadow().expect("begun").scores();
        assert_eq!(scores[1].counts.references, REFERENCES);
        let request = RequestContext::default();
        cache.notify_access(2_000_000_000, &request, &[1, 2, 3]);
        let ended = cache.shadow().expect("still there");
        assert!(!ended.is_on());
        assert_eq!((ended.scores(), ended.span_ns), (scores, (0, 1_000_000_000)));
        cache.begin_shadow(0, shadow()).expect("the other has ended");
        assert!(cache.end_shadow(7).is_some_and(|ended| !ended.is_on()));
        assert!(cache.shadow().is_none());
    }

    #[test]
    fn invalid_evaluations_are_rejected() {
        let cache = TierCache::open("lru", Granularity::Chunk, 64, 16 * 4096, true).expect("known");
        let plan = Plan::of(&cache.evictor, 0.9).expect("small");
        let most: Vec<&str> = vec!["lru"; MAX_POLICIES + 1];
        for (policies, seconds) in
            [(&most[..], 1), (&[], 1), (&["lru"], 0), (&["lru"], MAX_SECONDS + 1), (&["lur"], 1)]
        {
            assert!(Shadow::open(&plan, &specs(policies), seconds).is_err());
        }
    }
}
