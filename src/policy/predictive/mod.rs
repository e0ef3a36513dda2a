//! `predictive`: evicts the object whose next use is expected farthest in the future.
//!
//! Every object is ranked by the time of its next use, which is
//!
//! 1. the engine's value, if it is in the future: from a hint, the session, or the object's facts
//!    (these count as certain);
//! 2. in cache mode, the built-in prediction: the last request of the object's session plus the
//!    exponentially weighted mean of the gaps between its requests. With fewer than four gaps, and
//!    for objects without a session, the gaps of all sessions. In preempt mode: the tokens that the
//!    session may still have, divided by the token rate;
//! 3. without a sufficiently confident value: as far in the future as the last use is in the past.
//!    These objects are in LRU order among themselves, so without any confident value the policy is
//!    LRU.
//!
//! For a row of columns it is the lifetime with its confidence, else the engine's predictor, else
//! the remaining length divided by the token rate, else the last use as in 3.
//!
//! The confidence of a learned value is one minus the relative error of its past predictions, or
//! the relative spread, whichever is greater. A given `rate` is certain. A prediction that is not
//! fulfilled after twice its time lapses: the object is ranked by 3 again.
//!
//! So in preempt mode the object with the most remaining time is evicted first. One close to its
//! end stays: its memory will soon be free without any loss.

mod gaps;

use crate::base::spec::Reader;
use crate::base::spec::describe::Param;
use crate::base::status::Result;
use crate::base::zeroed::Zeroed;
use crate::fail;
use crate::meta::index::Slot;
use crate::meta::objects::Objects;
use crate::policy::columns::Columns;
use crate::policy::heap::Heap;
use crate::policy::lists::Lists;
use crate::policy::predictive::gaps::Gaps;
use crate::policy::registry::Setting;
use crate::policy::{Hint, Lessons, Policy, Rank, order_of_i64};

/// Parameters of `predictive`.
pub const PARAMS: &[Param] = &[
    Param::new("confidence", "predictions below this confidence are not used"),
    Param::new(
        "mode",
        "`cache`: predictions are times of the next use. `preempt`: the objects belong to running \
         sequences, and predictions are times of their end",
    ),
    Param::new("rate", "tokens per second; 0 = learned from the growth of sessions"),
];

/// The engine's predictor: sequence, length and maximum length to seconds and confidence. None =
/// unknown.
pub type Predictor = Box<dyn Fn(u64, u64, u64) -> Option<(f64, f64)> + Send>;

/// In the list by last use.
const IDLE: u8 = 0;
/// In the heap by next use, and in the one by the time at which the prediction lapses.
const AHEAD: u8 = 1;
/// In the heap by last use, for lapsed predictions.
const LAPSED: u8 = 2;
/// Most predictions that lapse in one decision; the rest follow in later ones. Each use makes at
/// most one prediction and lets one lapse, so that none is left behind.
const LAPSES: usize = 4;
/// Largest error counted for a prediction.
const WORST_ERROR: f64 = 10.0;

/// Orders by expected next use.
pub struct Predictive {
    idle: Lists<1>,
    ahead: Heap,
    due: Heap<true>,
    lapsed: Heap,
    /// Expected next use of each object that is ahead or lapsed.
    next: Zeroed<u64>,
    gaps: Gaps,
    predictor: Option<Predictor>,
    confidence: f64,
    rate: f64,
    preempt: bool,
    error_sum: f64,
    realised: u64,
    decided_by: &'static str,
}

fn after(now: i64, seconds: f64) -> Option<i64> {
    // Beyond 2^63 ns the cast saturates, as the sum does.
    (seconds >= 0.0).then(|| now.saturating_add((seconds * 1e9) as i64))
}

/// Assumed next use of an object without a prediction.
fn mirrored(last: i64, now: i64) -> i64 {
    now.saturating_add(now.saturating_sub(last))
}

/// The time at which a prediction lapses.
fn deadline(next: i64, last: i64) -> i64 {
    next.saturating_add(next.saturating_sub(last))
}

fn rank(next: i64, last: i64) -> Rank {
    Rank { major: !order_of_i64(next), minor: order_of_i64(last) }
}

impl Predictive {
    /// Reads `predictive` and its parameters.
    pub fn read(reader: &mut Reader, setting: &Setting) -> Result<Predictive> {
        let max = setting.max_objects;
        Ok(Predictive {
            confidence: reader.f64("confidence", 0.9, 0.0..=1.0)?,
            rate: reader.f64("rate", 0.0, 0.0..=1e9)?,
            preempt: reader.choice("mode", &["cache", "preempt"])? == Some(1),
            idle: Lists::default(),
            ahead: Heap::new(max)?,
            due: Heap::new(max)?,
            lapsed: Heap::new(max)?,
            next: Zeroed::new(max)?,
            gaps: Gaps::new(max)?,
            predictor: None,
            error_sum: 0.0,
            realised: 0,
            decided_by: "predictive",
        })
    }

    /// Sets the engine's predictor, used for rows of columns without a value.
    pub fn set_predictor(&mut self, predictor: Option<Predictor>) {
        self.predictor = predictor;
    }

    /// Tokens per second, and the confidence.
    fn token_rate(&self) -> (f64, f64) {
        match self.rate > 0.0 {
            true => (self.rate, 1.0),
            false => (self.gaps.rate.mean, self.gaps.rate.confidence()),
        }
    }

    /// Expected end of a sequence by the tokens that it may still have.
    fn end(&self, length: u64, max_length: u64, now: i64) -> Option<i64> {
        let (rate, confidence) = self.token_rate();
        let known = rate > 0.0 && confidence >= self.confidence && max_length > length;
        known.then(|| after(now, (max_length - length) as f64 / rate)).flatten()
    }

    /// Expected next use of an object that was used just now, if known.
    fn expect(&self, objects: &Objects, slot: Slot, now: i64) -> Option<i64> {
        let session = objects.node(slot).session;
        let row = objects.sessions.of(session);
        let ahead = |ns: i64| ns != 0 && ns > now;
        if let Some(row) = row.filter(|row| ahead(row.next_use_ns)) {
            // Rounded as the session's value was.
            if row.confidence >= (self.confidence * 255.0) as u8 {
                return Some(row.next_use_ns);
            }
        }
        let figure = objects.facts(slot).next_use_ns;
        if ahead(figure) {
            return Some(figure);
        }
        if self.preempt {
            let row = row?;
            return self.end(row.length.into(), row.max_length.into(), now);
        }
        let (seconds, confidence) = self.gaps.expected(session)?;
        let from = row.map_or(now, |row| row.active_ns);
        let next = if confidence >= self.confidence { after(from, seconds) } else { None };
        next.filter(|&next| next > now)
    }

    /// Adds an object that is in no structure to that of its tag; `hot` if it was used just now.
    fn link(&mut self, objects: &mut Objects, slot: Slot, hot: bool) {
        let node = objects.node(slot);
        let (stamp, next) = (node.stamp, self.next[slot as usize] as i64);
        match node.tag {
            AHEAD => {
                self.ahead.push(objects, slot, rank(next, stamp));
                let lapses = Rank::count(order_of_i64(deadline(next, stamp)), stamp);
                self.due.push(objects, slot, lapses);
            }
            LAPSED => self.lapsed.push(objects, slot, Rank::time(stamp)),
            _ if hot => self.idle.push_hot(objects, usize::from(IDLE), slot),
            _ => {
                objects.node_mut(slot).set_held(true);
                self.idle.put_back(objects, slot);
            }
        }
    }

    /// Removes an object from its structure; a held object is in none.
    fn unlink(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        match node.tag {
            _ if node.is_held() => {}
            AHEAD => {
                self.ahead.remove(objects, slot);
                self.due.remove(objects, slot);
            }
            LAPSED => drop(self.lapsed.remove(objects, slot)),
            _ => self.idle.remove(objects, slot),
        }
    }

    fn hold(&mut self, objects: &mut Objects, slot: Slot) {
        self.unlink(objects, slot);
        objects.node_mut(slot).set_held(true);
    }

    fn used(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        objects.node_mut(slot).stamp = now;
        let next = self.expect(objects, slot, now);
        self.next[slot as usize] = next.unwrap_or(0) as u64;
        objects.node_mut(slot).tag = if next.is_some() { AHEAD } else { IDLE };
        self.link(objects, slot, true);
    }

    /// Measures the error of the prediction for a use now.
    fn realise(&mut self, objects: &Objects, slot: Slot, now: i64) {
        let node = objects.node(slot);
        let next = self.next[slot as usize] as i64;
        let actual = now.saturating_sub(node.stamp) as f64;
        if node.tag != IDLE && next != i64::MAX && actual > 0.0 {
            let predicted = next.saturating_sub(node.stamp) as f64;
            self.error_sum += ((predicted - actual).abs() / actual).min(WORST_ERROR);
            self.realised += 1;
        }
    }

    /// Moves objects whose predictions were not fulfilled.
    fn lapse(&mut self, objects: &mut Objects, now: i64, most: usize) {
        for _ in 0..most {
            let Some((rank, slot)) = self.due.peek() else { return };
            if rank.major >= order_of_i64(now) {
                return;
            }
            self.unlink(objects, slot);
            objects.node_mut(slot).tag = LAPSED;
            self.link(objects, slot, false);
        }
    }

    fn next_use(&self, objects: &Objects, slot: Slot, now: i64) -> i64 {
        let node = objects.node(slot);
        match node.tag {
            AHEAD => self.next[slot as usize] as i64,
            _ => mirrored(node.stamp, now),
        }
    }

    /// The first object of each structure.
    fn firsts(&self) -> [Option<Slot>; 3] {
        let idle = self.idle.lists[0];
        [
            (!idle.is_empty()).then_some(idle.tail),
            self.ahead.peek().map(|(_, slot)| slot),
            self.lapsed.peek().map(|(_, slot)| slot),
        ]
    }

    fn seed_row(&self, columns: &Columns, row: usize, now: i64) -> Option<i64> {
        let lifetime = columns.lifetime_ns(row);
        if lifetime >= 0 && f64::from(columns.confidence(row)) >= self.confidence {
            return Some(now.saturating_add(lifetime));
        }
        let (length, max_length) = (columns.length(row), columns.max_length(row));
        let predicted =
            self.predictor.as_ref().and_then(|p| p(columns.ids[row], length, max_length));
        let sure = predicted.filter(|(_, confidence)| *confidence >= self.confidence);
        let next_use = sure.and_then(|(seconds, _)| after(now, seconds));
        next_use.or_else(|| self.end(length, max_length, now))
    }
}

impl Policy for Predictive {
    fn name(&self) -> &'static str {
        "predictive"
    }

    fn used_bytes(&self, objects: &Objects) -> u64 {
        let most = objects.most();
        let heaps = [self.ahead.used_bytes(most), self.due.used_bytes(most)];
        let lapsed = self.lapsed.used_bytes(most) + self.next.front_bytes(most);
        heaps.iter().sum::<u64>() + lapsed + self.gaps.used_bytes(objects.sessions.most())
    }

    fn insert(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        self.gaps.see(objects, objects.node(slot).session);
        self.used(objects, slot, now);
    }

    /// The gaps. Those of a copy are of all its sessions together: its table has other rows for
    /// them.
    fn lessons(&mut self, leaving: bool) -> Option<Lessons> {
        let mut gaps = Gaps::new(0).ok()?;
        (gaps.all, gaps.rate) = (self.gaps.all, self.gaps.rate);
        if leaving {
            std::mem::swap(&mut gaps, &mut self.gaps);
        }
        Some(Box::new(gaps))
    }

    fn learn(&mut self, lessons: Lessons) {
        if let Ok(gaps) = lessons.downcast::<Gaps>() {
            self.gaps.learn(*gaps);
        }
    }

    fn touch(&mut self, objects: &mut Objects, slot: Slot, now: i64) {
        let node = objects.node(slot);
        match objects.sessions.of(node.session) {
            Some(_) => self.gaps.see(objects, node.session),
            None => self.gaps.see_lone(node.stamp, now),
        }
        self.realise(objects, slot, now);
        self.unlink(objects, slot);
        self.used(objects, slot, now);
        self.lapse(objects, now, 1);
    }

    fn remove(&mut self, objects: &mut Objects, slot: Slot, _evicted: bool, _now: i64) {
        self.unlink(objects, slot);
    }

    fn victim(&mut self, objects: &mut Objects, now: i64) -> Option<Slot> {
        self.lapse(objects, now, LAPSES);
        loop {
            let rank = |slot: &Slot| self.rank(objects, *slot, now);
            let slot = self.firsts().into_iter().flatten().min_by_key(rank)?;
            self.hold(objects, slot);
            if !objects.is_blocked(slot) {
                let own = objects.node(slot).tag == AHEAD;
                self.decided_by = if own { "predictive" } else { "lru" };
                return Some(slot);
            }
        }
    }

    fn put_back(&mut self, objects: &mut Objects, slot: Slot, _now: i64) {
        if objects.node(slot).is_held() {
            self.link(objects, slot, false);
        }
    }

    fn resize(&mut self, objects: &mut Objects, slot: Slot, units: u32) {
        if objects.node(slot).tag == IDLE {
            self.idle.resize(objects, slot, units);
        } else {
            objects.set_units(slot, units);
        }
    }

    fn hint(&mut self, objects: &mut Objects, slot: Slot, hint: &Hint, now: i64) {
        let sure = hint.next_use.filter(|(_, sure)| f64::from(*sure) >= self.confidence);
        if let (None, Some((ns, _))) = (sure, hint.next_use) {
            // The value is in the facts already, where values count as certain.
            if let Some(facts) = objects.facts_mut(slot).filter(|f| f.next_use_ns == ns) {
                facts.next_use_ns = 0;
            }
        }
        let next = match sure {
            _ if hint.done => i64::MAX,
            Some((ns, _)) if ns > now => ns,
            _ => return,
        };
        let held = objects.node(slot).is_held();
        self.unlink(objects, slot);
        self.next[slot as usize] = next as u64;
        objects.node_mut(slot).tag = AHEAD;
        if !held {
            self.link(objects, slot, false);
        }
    }

    fn rank(&self, objects: &Objects, slot: Slot, now: i64) -> Rank {
        rank(self.next_use(objects, slot, now), objects.node(slot).stamp)
    }

    fn seed(&self, columns: &Columns, now: i64, ranks: &mut [Rank]) {
        for (row, out) in ranks.iter_mut().enumerate() {
            let last = columns.last_access_ns(row);
            let next = self.seed_row(columns, row, now);
            *out = rank(next.unwrap_or_else(|| mirrored(last, now)), last);
        }
    }

    /// Seconds to the next use, negative: the lowest is the farthest.
    fn score(&self, objects: &Objects, slot: Slot, now: i64) -> f64 {
        now.saturating_sub(self.next_use(objects, slot, now)) as f64 * 1e-9
    }

    fn decided_by(&self) -> &'static str {
        self.decided_by
    }

    fn wants_facts(&self) -> bool {
        true
    }

    fn gauges(&self, _objects: &Objects, out: &mut dyn FnMut(&'static str, f64)) {
        out("calibration_error", self.error_sum / self.realised.max(1) as f64);
        out("predictions_realised", self.realised as f64);
        out("predicted", self.ahead.len() as f64);
        out("lapsed", self.lapsed.len() as f64);
        out("token_rate", self.token_rate().0);
        out("token_rate_confidence", self.token_rate().1);
        out("gap_s", self.gaps.all.mean);
        out("gap_confidence", self.gaps.all.confidence());
    }

    fn check(&self, objects: &Objects) -> Result<()> {
        self.ahead.check_order(objects)?;
        self.due.check_order(objects)?;
        self.lapsed.check_order(objects)?;
        let mut counts = [0; 3];
        for slot in objects.slots() {
            let node = objects.node(slot);
            if node.is_held() {
                continue;
            }
            counts[usize::from(node.tag)] += 1;
            let is_in_both = self.ahead.contains(objects, slot) && self.due.contains(objects, slot);
            if node.tag == AHEAD && !is_in_both {
                fail!(State, "object {} has a prediction and is not in both heaps", node.id);
            }
        }
        let ahead = [self.ahead.len(), self.due.len()];
        if (counts[0], counts[2]) != (self.idle.lists[0].len as usize, self.lapsed.len())
            || ahead != [counts[1]; 2]
        {
            fail!(State, "{counts:?} by tag, in the structures {ahead:?} and others");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::spec::Spec;
    use crate::meta::objects::Facts;
    use crate::policy::evictor::{Evictor, NewObject, RequestContext};
    use crate::policy::testing::{gauge, insert, open};

    const S: i64 = 1_000_000_000;

    fn of(session: u64) -> RequestContext {
        RequestContext { session: Some(session), ..RequestContext::default() }
    }

    fn evict(e: &mut Evictor, now: i64) -> (u64, &'static str) {
        let mut out = Vec::new();
        let outcome = e.evict(now, 1, &mut out).expect("a time");
        e.check().expect("sound");
        (out[0].id, outcome.decided_by)
    }

    #[test]
    fn learns_the_pace_of_sessions_and_evicts_the_farthest() {
        let mut e = open("predictive");
        for (session, id) in [(1, 10), (2, 20)] {
            insert(&mut e, S, &of(session), id);
        }
        // Session 1 returns every 10 s, session 2 every 100 s, most recently just now.
        for now in 1..=100 {
            if now % 10 == 0 {
                e.lookup(now * S, &of(1), &[10], &mut []).expect("a time");
            }
            if now % 20 == 0 {
                e.lookup(now * S + 1, &of(2), &[20], &mut []).expect("a time");
            }
        }
        assert_eq!(gauge(&e, "predicted"), 2.0);
        assert!(gauge(&e, "calibration_error") < 0.05);
        assert_eq!(evict(&mut e, 101 * S), (20, "predictive"));
    }

    #[test]
    fn without_a_confident_prediction_it_is_lru() {
        let mut e = open("predictive");
        (1..=3).for_each(|id| insert(&mut e, id as i64 * S, &RequestContext::default(), id));
        e.touch(10 * S, &RequestContext::default(), &[1]).expect("found");
        assert_eq!(evict(&mut e, 20 * S), (2, "lru"));
        let unsure = Hint { next_use: Some((500 * S, 0.5)), ..Hint::default() };
        e.hint(20 * S, &RequestContext::default(), &[1], &unsure).expect("a time");
        assert_eq!(evict(&mut e, 21 * S), (3, "lru"));
    }

    #[test]
    fn predictions_and_last_uses_share_one_order() {
        let mut e = open("predictive");
        insert(&mut e, S, &RequestContext::default(), 1);
        insert(&mut e, 90 * S, &RequestContext::default(), 2);
        insert(&mut e, 90 * S + 1, &RequestContext::default(), 3);
        let sure = |s| Hint { next_use: Some((s * S, 0.95)), ..Hint::default() };
        e.hint(91 * S, &RequestContext::default(), &[2], &sure(150)).expect("a time");
        e.hint(91 * S, &RequestContext::default(), &[3], &sure(400)).expect("a time");
        // 3 at 400 s; 1, idle for 99 s, at 199 s; 2 at 150 s.
        let order = [100, 101, 102].map(|s| evict(&mut e, s * S));
        assert_eq!(order, [(3, "predictive"), (1, "lru"), (2, "predictive")]);
    }

    #[test]
    fn done_objects_are_evicted_first_and_missed_predictions_lapse() {
        let mut e = open("predictive");
        (1..=3).for_each(|id| insert(&mut e, S, &RequestContext::default(), id));
        let hint = Hint { done: true, ..Hint::default() };
        e.hint(2 * S, &RequestContext::default(), &[3], &hint).expect("a time");
        assert_eq!(evict(&mut e, 3 * S).0, 3);
        let soon = Hint { next_use: Some((5 * S, 1.0)), ..Hint::default() };
        e.hint(3 * S, &RequestContext::default(), &[1], &soon).expect("a time");
        e.touch(100 * S, &RequestContext::default(), &[2]).expect("found");
        assert_eq!(evict(&mut e, 200 * S), (1, "lru"));
    }

    #[test]
    fn next_use_in_the_facts_counts_as_certain() {
        let mut e = open("predictive");
        for (id, next_use_ns) in [(1, 50 * S), (2, 70 * S), (3, 60 * S)] {
            let facts = Facts { next_use_ns, ..Facts::default() };
            e.insert(
                S,
                &RequestContext::default(),
                &[NewObject { id, units: 1, facts, ..NewObject::default() }],
            )
            .expect("room");
        }
        assert_eq!([2, 3, 4].map(|s| evict(&mut e, s * S).0), [2, 3, 1]);
    }

    #[test]
    fn preempt_mode_keeps_sequences_close_to_their_end() {
        let mut e = open("predictive(mode=preempt,rate=10)");
        for (session, length) in [(1, 900), (2, 100), (3, 500)] {
            let context = RequestContext { length, max_length: 1000, ..of(session) };
            e.lookup(S, &context, &[session], &mut []).expect("a time");
            insert(&mut e, S, &context, session);
        }
        assert_eq!([2, 3, 4].map(|s| evict(&mut e, s * S).0), [2, 3, 1]);
    }

    #[test]
    fn the_token_rate_is_learned() {
        let mut e = open("predictive(mode=preempt)");
        insert(&mut e, S, &of(1), 1);
        for s in 2..20 {
            let context = RequestContext { length: 30 * s as u32, max_length: 10_000, ..of(1) };
            e.touch(s * S, &context, &[1]).expect("found");
        }
        assert!((gauge(&e, "token_rate") - 30.0).abs() < 1.0);
        assert_eq!(gauge(&e, "predicted"), 1.0);
    }

    fn seeded(policy: &Predictive, columns: &Columns) -> Vec<usize> {
        let mut ranks = vec![Rank::default(); columns.rows()];
        policy.seed(columns, 100 * S, &mut ranks);
        let mut order: Vec<usize> = (0..columns.rows()).collect();
        order.sort_by_key(|&row| ranks[row]);
        order
    }

    #[test]
    fn rows_are_ranked_by_lifetime_predictor_rate_and_last_use() {
        let spec = Spec::parse("predictive(rate=100)").expect("a spec");
        let setting = Setting { max_objects: 8, capacity_units: 0, holes: true };
        let mut policy = Predictive::read(&mut Reader::new(&spec), &setting).expect("a policy");
        // 50 s; unsure, idle for 40 s; 20 s by length; idle for 60 s; unknown to the predictor; 30
        // s by the predictor.
        let columns = Columns {
            ids: &[0, 1, 2, 3, 4, 5],
            lifetime_ns: &[50 * S, 90 * S, -1, -1, -1, -1],
            confidence: &[0.95, 0.5, 1.0, 1.0, 1.0, 1.0],
            length: &[0, 0, 1000, 0, 0, 7],
            max_length: &[0, 0, 3000, 0, 0, 9],
            last_access_ns: &[99 * S, 60 * S, 99 * S, 40 * S, 90 * S, 99 * S],
            ..Columns::default()
        };
        assert_eq!(seeded(&policy, &columns), [3, 0, 1, 2, 4, 5]);
        policy.set_predictor(Some(Box::new(|id, length, max_length| match id {
            5 if (length, max_length) == (7, 9) => Some((30.0, 0.99)),
            4 => Some((500.0, 0.1)),
            3 => Some((f64::NAN, f64::NAN)),
            _ => None,
        })));
        assert_eq!(seeded(&policy, &columns), [3, 0, 1, 5, 2, 4]);
    }
}
