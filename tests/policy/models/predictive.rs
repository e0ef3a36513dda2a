//! The farthest expected next use.

use std::collections::BTreeMap;

use kvtier::policy::Hint;

use crate::models::compare;
use crate::models::rich::{Anyone, Model, Object, State, compare_rich};

/// A quantity with its weighted mean and the error of predictions by that mean.
#[derive(Clone, Copy, Default)]
struct Pace {
    seen: u32,
    mean: f64,
    variance: f64,
    error: f64,
}

impl Pace {
    fn observe(&mut self, x: f64) {
        if x <= 0.0 {
            return;
        }
        self.seen += 1;
        if self.seen == 1 {
            self.mean = x;
            return;
        }
        let d = x - self.mean;
        let off = (d.abs() / x).min(1.0);
        self.error += if self.seen == 2 { off } else { 0.25 * (off - self.error) };
        self.variance = 0.75 * (self.variance + 0.25 * d * d);
        self.mean += 0.25 * d;
    }
    fn sure(&self) -> f64 {
        1.0 - self.error.max(self.variance.sqrt() / self.mean).min(1.0)
    }
}

#[derive(Clone, Copy, Default)]
struct Seen {
    turns: u32,
    active: i64,
    length: u32,
    gap: Pace,
}

/// Expected next use, and whether the prediction has lapsed.
#[derive(Clone, Copy)]
struct Expected {
    next: i64,
    lapsed: bool,
}

#[derive(Default)]
struct Predictive {
    confidence: f64,
    preempt: bool,
    expected: BTreeMap<u64, Expected>,
    /// Next use of each object as given by its facts. Certain hints replace it; other hints clear
    /// it.
    figures: BTreeMap<u64, i64>,
    users: BTreeMap<u64, Seen>,
    all: Pace,
    rate: Pace,
    lone: i64,
    /// Number of lapsed predictions that the policy may not have moved yet.
    behind: usize,
}

impl Predictive {
    fn see(&mut self, state: &State, id: u64, before: Option<&Object>) {
        let Some(session) = state.objects[&id].session else {
            if let Some(before) = before {
                if self.lone + 1 != state.now {
                    self.all.observe((state.now - before.used) as f64 / 1e9);
                }
                self.lone = state.now;
            }
            return;
        };
        let row = state.users[&session];
        let seen = self.users.entry(session).or_default();
        if seen.turns != 0 && seen.turns != row.turns {
            let seconds = (row.active_ns - seen.active) as f64 * 1e-9;
            let gap = seconds / f64::from(row.turns - seen.turns);
            seen.gap.observe(gap);
            self.all.observe(gap);
            self.rate.observe(f64::from(row.length - seen.length) / seconds);
        }
        *seen = Seen { turns: row.turns, active: row.active_ns, length: row.length, ..*seen };
    }

    fn expect(&self, state: &State, id: u64) -> Option<i64> {
        let object = state.objects[&id];
        let user = state.user(id);
        if let Some((next, sure)) = user.and_then(|u| u.next_use) {
            let rounded = |x: f64| (x * 255.0) as u8;
            if next > state.now && (sure * 255.0) as u8 >= rounded(self.confidence) {
                return Some(next);
            }
        }
        if self.figures[&id] > state.now {
            return Some(self.figures[&id]);
        }
        if self.preempt {
            let user = user.filter(|u| u.max_length > u.length)?;
            let known = self.rate.seen >= 4 && self.rate.sure() >= self.confidence;
            let left = f64::from(user.max_length - user.length) / self.rate.mean;
            return known.then(|| state.now + (left * 1e9) as i64);
        }
        let own = object.session.map(|s| self.users[&s].gap).filter(|gap| gap.seen >= 4);
        let pace = own.unwrap_or(self.all);
        let from = user.map_or(state.now, |user| user.active_ns);
        let next = from + (pace.mean * 1e9) as i64;
        let known = pace.seen >= 4 && pace.sure() >= self.confidence;
        (known && next > state.now).then_some(next)
    }

    fn used(&mut self, state: &State, id: u64) {
        self.expected.remove(&id);
        if let Some(next) = self.expect(state, id) {
            self.expected.insert(id, Expected { next, lapsed: false });
        }
    }

    /// Lapses predictions that did not come true. The policy moves four at a time, and held ones
    /// later. Returns whether the policy may have more to move.
    fn lapse(&mut self, state: &State) -> bool {
        let late = |id: &u64, e: &Expected| {
            let used = state.objects[id].used;
            !e.lapsed && e.next.saturating_add(e.next - used) < state.now
        };
        let all = self.expected.iter().filter(|(id, e)| late(id, e)).count();
        let behind = self.behind + all > 4;
        let mut moved = 0;
        for (id, e) in self.expected.iter_mut().filter(|(id, _)| state.objects[id].refs == 0) {
            moved += usize::from(late(id, e));
            e.lapsed |= late(id, e);
        }
        self.behind = (self.behind + moved).saturating_sub(4);
        behind
    }
}

impl Model for Predictive {
    fn inserted(&mut self, state: &State, id: u64) {
        self.figures.insert(id, state.objects[&id].facts.next_use_ns);
        self.see(state, id, None);
        self.used(state, id);
    }
    fn touched(&mut self, state: &State, id: u64, before: &Object) {
        self.see(state, id, Some(before));
        self.used(state, id);
    }
    fn removed(&mut self, _state: &State, id: u64, _evicted: bool) {
        self.expected.remove(&id);
    }
    fn hinted(&mut self, state: &State, id: u64, hint: &Hint) {
        let (next, sure) = hint.next_use.expect("always given here");
        let sure = f64::from(sure) >= self.confidence;
        self.figures.insert(id, if sure { next } else { 0 });
        let next = match hint.done {
            true => i64::MAX,
            false if !sure || next <= state.now => return,
            false => next,
        };
        self.expected.insert(id, Expected { next, lapsed: false });
    }
    fn judge(&mut self, state: &State, got: Option<u64>, by: &str) -> Result<(), String> {
        if self.lapse(state) {
            let free = got.is_none_or(|id| state.objects[&id].refs == 0);
            return if free { Ok(()) } else { Err(format!("{got:?} is blocked")) };
        }
        let next = |id: u64, o: &Object| match self.expected.get(&id) {
            Some(e) if !e.lapsed => (e.next, "predictive"),
            _ => (state.now + (state.now - o.used), "lru"),
        };
        let rank = |(id, o): &(u64, &Object)| (std::cmp::Reverse(next(*id, o).0), o.used);
        let want = state.free().min_by_key(rank);
        let decider = want.map_or("predictive", |(id, o)| next(id, o).1);
        if want.map(|(id, _)| id) == got && decider == by {
            return Ok(());
        }
        Err(format!("the model says {want:?} by {decider}, not {got:?} by {by}"))
    }
}

#[test]
fn predictive_matches_its_model() {
    for (spec, confidence, preempt) in [
        ("predictive", 0.9, false),
        ("predictive(confidence=0.3)", 0.3, false),
        ("predictive(confidence=0)", 0.0, false),
        ("predictive(confidence=0.1,mode=preempt)", 0.1, true),
    ] {
        compare_rich(spec, || Predictive {
            confidence,
            preempt,
            lone: i64::MIN / 2,
            ..Predictive::default()
        });
    }
}

#[test]
fn predictive_over_prefixes_matches_its_model() {
    compare("predictive(confidence=0.2)", 0, |_| Box::<Anyone>::default());
}
