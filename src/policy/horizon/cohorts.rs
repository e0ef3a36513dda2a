//! The eviction order. Objects of one class and weight that were used at about the same time form a
//! cohort, a list with one score. Cohorts merge as they age, so their number grows with the
//! logarithm of time. A search visits cohorts, never objects.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::fail;
use crate::meta::index::{NONE, Slot};
use crate::meta::objects::Objects;
use crate::policy::horizon::classes::CLASSES;
use crate::policy::horizon::hazard::Hazards;
use crate::policy::horizon::tournament::Tournament;

/// Number of weights, in steps of a tenth: a score is within a twentieth of the exact one.
pub const WEIGHTS: usize = 64;
const MIDDLE: f64 = 40.0;
const STEP: f64 = 1.1;

/// The bin of a weight relative to the usual one.
pub fn weight_bin(relative: f64) -> u8 {
    // Most objects are full.
    if relative == 1.0 {
        return MIDDLE as u8;
    }
    let steps = relative.max(1e-9).ln() / STEP.ln();
    (steps.round() + MIDDLE).clamp(0.0, (WEIGHTS - 1) as f64) as u8
}

/// The logarithm to base 2 of the weight that a bin stands for.
pub fn weight_log2(bin: u8) -> f64 {
    (f64::from(bin) - MIDDLE) * STEP.log2()
}

/// With more cohorts than this, objects join the newest cohort of their queue if there is one.
pub const MAX_COHORTS: usize = 8192;
/// Uses within this time form one cohort.
const QUANTUM_NS: i64 = 50_000_000;
/// Cohorts merge when together they span at most this share of their age.
const SPAN: f64 = 0.05;
/// A score is recomputed when the age has grown by this share.
const STALE: f64 = 0.02;
const SHORTEST_NS: i64 = 40_000_000;
/// Most scores recomputed in one call.
const REFRESHES: usize = 48;

/// Marks a link to the end of a cohort instead of an object.
const END: u32 = 1 << 31;
const NO_COHORT: u32 = 0;

#[derive(Clone, Copy, Default)]
struct Cohort {
    /// First and last use of the cohort's objects.
    oldest_ns: i64,
    newest_ns: i64,
    /// Links of the ring: its hottest and its coldest object.
    next: u32,
    prev: u32,
    /// Neighbours of the same class and weight; NO_COHORT = none.
    older: u32,
    newer: u32,
    class: u16,
    weight: u8,
    live: bool,
}

#[derive(Clone, Copy)]
struct Queue {
    oldest: u32,
    newest: u32,
}

// SAFETY: integers only; 0 is NO_COHORT.
unsafe impl Zeroable for Queue {}

/// All cohorts.
pub struct Cohorts {
    cohorts: Vec<Cohort>,
    /// Infinite for free entries.
    scores: Tournament<f32>,
    /// When each score must be recomputed; never for free entries.
    due: Tournament<i64>,
    free: Vec<u32>,
    queues: Zeroed<Queue>,
    weights: [f32; WEIGHTS],
    refreshed: Refreshed,
    victim: Victim,
}

/// The cohort whose score was computed last, from this time of its first use. Computed again at the
/// same time, the score would be the same.
#[derive(Clone, Copy)]
struct Refreshed {
    at: u32,
    oldest_ns: i64,
    now: i64,
}

/// The last victim, and its score when it was chosen.
struct Victim {
    slot: Slot,
    score: f32,
    now: i64,
}

const NOT_REFRESHED: Refreshed = Refreshed { at: NO_COHORT, oldest_ns: 0, now: 0 };

impl Cohorts {
    /// No cohorts yet.
    pub fn new() -> Result<Cohorts> {
        let weights = std::array::from_fn(|i| STEP.powf(i as f64 - MIDDLE) as f32);
        Ok(Cohorts {
            cohorts: vec![Cohort::default()],
            scores: Tournament::new(f32::INFINITY),
            due: Tournament::new(i64::MAX),
            free: Vec::new(),
            queues: Zeroed::new(CLASSES * WEIGHTS)?,
            weights,
            refreshed: NOT_REFRESHED,
            victim: Victim { slot: NONE, score: 0.0, now: 0 },
        })
    }

    /// Number of cohorts.
    pub fn len(&self) -> usize {
        self.cohorts.len() - 1 - self.free.len()
    }

    #[inline]
    fn queue(class: u16, weight: u8) -> usize {
        usize::from(class) * WEIGHTS + usize::from(weight)
    }

    #[inline]
    fn set_next(&mut self, objects: &mut Objects, link: u32, next: u32) {
        match link & END {
            0 => objects.node_mut(link).next = next,
            _ => self.cohorts[(link & !END) as usize].next = next,
        }
    }

    #[inline]
    fn set_prev(&mut self, objects: &mut Objects, link: u32, prev: u32) {
        match link & END {
            0 => objects.node_mut(link).prev = prev,
            _ => self.cohorts[(link & !END) as usize].prev = prev,
        }
    }

    /// Links an object between two neighbours, hotter and colder.
    #[inline]
    fn link(&mut self, objects: &mut Objects, slot: Slot, hotter: u32, colder: u32) {
        let node = objects.node_mut(slot);
        (node.prev, node.next) = (hotter, colder);
        self.set_next(objects, hotter, slot);
        self.set_prev(objects, colder, slot);
    }

    /// Removes an object; its cohort need not be known.
    #[inline]
    pub fn unlink(&mut self, objects: &mut Objects, slot: Slot) {
        let node = objects.node(slot);
        let (hotter, colder) = (node.prev, node.next);
        self.set_next(objects, hotter, colder);
        self.set_prev(objects, colder, hotter);
    }

    /// Adds an object that is used now.
    pub fn add(&mut self, objects: &mut Objects, slot: Slot, class: u16, weight: u8, now: i64) {
        let newest = self.queues[Self::queue(class, weight)].newest;
        let fits =
            newest != NO_COHORT && now - self.cohorts[newest as usize].oldest_ns <= QUANTUM_NS;
        let at = if fits { newest } else { self.create(class, weight, newest, now) };
        let cohort = &mut self.cohorts[at as usize];
        cohort.newest_ns = now;
        let hottest = cohort.next;
        self.link(objects, slot, END | at, hottest);
    }

    /// A new cohort on the newer side of `older`, or `older` itself at the limit.
    fn create(&mut self, class: u16, weight: u8, older: u32, stamp: i64) -> u32 {
        let at = match self.free.pop() {
            Some(at) => at,
            None if older != NO_COHORT && self.cohorts.len() > MAX_COHORTS => return older,
            None => {
                self.cohorts.push(Cohort::default());
                self.scores.grow();
                self.due.grow();
                (self.cohorts.len() - 1) as u32
            }
        };
        self.refreshed = NOT_REFRESHED;
        let queue = &mut self.queues[Self::queue(class, weight)];
        let newer = match older {
            NO_COHORT => std::mem::replace(&mut queue.oldest, at),
            older => std::mem::replace(&mut self.cohorts[older as usize].newer, at),
        };
        match newer {
            NO_COHORT => queue.newest = at,
            newer => self.cohorts[newer as usize].older = at,
        }
        self.cohorts[at as usize] = Cohort {
            oldest_ns: stamp,
            newest_ns: stamp,
            next: END | at,
            prev: END | at,
            older,
            newer,
            class,
            weight,
            live: true,
        };
        self.scores.set(at, f32::MAX);
        self.due.set(at, i64::MIN);
        at
    }

    /// Merges the newer neighbour of a cohort into it.
    fn absorb(&mut self, objects: &mut Objects, at: u32) {
        let newer = self.cohorts[at as usize].newer;
        let n = self.cohorts[newer as usize];
        if n.next != END | newer {
            let hottest = self.cohorts[at as usize].next;
            self.set_next(objects, END | at, n.next);
            self.set_prev(objects, n.next, END | at);
            self.set_next(objects, n.prev, hottest);
            self.set_prev(objects, hottest, n.prev);
        }
        self.cohorts[at as usize].newest_ns = n.newest_ns;
        self.cohorts[newer as usize].next = END | newer;
        self.discard(newer);
    }

    /// Removes a cohort without objects.
    fn discard(&mut self, at: u32) {
        let Cohort { older, newer, class, weight, .. } = self.cohorts[at as usize];
        let queue = &mut self.queues[Self::queue(class, weight)];
        match older {
            NO_COHORT => queue.oldest = newer,
            older => self.cohorts[older as usize].newer = newer,
        }
        match newer {
            NO_COHORT => queue.newest = older,
            newer => self.cohorts[newer as usize].older = older,
        }
        self.refreshed = NOT_REFRESHED;
        self.cohorts[at as usize].live = false;
        self.scores.set(at, f32::INFINITY);
        self.due.set(at, i64::MAX);
        self.free.push(at);
    }

    /// Updates a cohort. Only with `exact` its coldest object is read. Otherwise that object may
    /// have been touched since, and the cohort looks too old until it is about to be chosen.
    fn refresh(
        &mut self,
        objects: &mut Objects,
        hazards: &Hazards,
        at: u32,
        now: i64,
        exact: bool,
    ) {
        let coldest = self.cohorts[at as usize].prev;
        if coldest & END != 0 {
            return self.discard(at);
        }
        if exact {
            self.cohorts[at as usize].oldest_ns = objects.node(coldest).stamp;
        }
        let oldest_ns = self.cohorts[at as usize].oldest_ns;
        loop {
            let newer = self.cohorts[at as usize].newer;
            if newer == NO_COHORT {
                break;
            }
            let newest_ns = self.cohorts[newer as usize].newest_ns;
            if (newest_ns - oldest_ns) as f64 > SPAN * (now - newest_ns) as f64 {
                break;
            }
            self.absorb(objects, at);
        }
        let cohort = &self.cohorts[at as usize];
        let age = now - oldest_ns;
        let score = hazards.score(cohort.class, age) * self.weights[usize::from(cohort.weight)];
        let soon = ((age as f64 * STALE) as i64).max(SHORTEST_NS);
        self.scores.set(at, score);
        self.due.set(at, now + soon);
        self.refreshed = Refreshed { at, oldest_ns, now };
    }

    /// Whether a refresh of a cohort from the time of its coldest object would change nothing.
    #[inline]
    fn is_exact(&self, objects: &Objects, at: u32, now: i64) -> bool {
        let Refreshed { at: last, oldest_ns, now: then } = self.refreshed;
        let coldest = self.cohorts[at as usize].prev;
        last == at && then == now && coldest & END == 0 && objects.node(coldest).stamp == oldest_ns
    }

    /// A score of a class, multiplied by a weight.
    pub fn weighted(&self, score: f32, weight: u8) -> f64 {
        f64::from(score * self.weights[usize::from(weight)])
    }

    /// The score of the last victim, if it is this object, chosen now.
    #[inline]
    pub fn score_of_victim(&self, slot: Slot, now: i64) -> Option<f64> {
        let last = &self.victim;
        (last.slot == slot && last.now == now).then(|| f64::from(last.score))
    }

    /// Recomputes the scores of a class whose hazards changed. That happens each time an eighth of
    /// the class's data is new, so ever more rarely, and never during a search.
    pub fn class_changed(
        &mut self,
        objects: &mut Objects,
        hazards: &Hazards,
        class: u16,
        now: i64,
    ) {
        for weight in 0..WEIGHTS as u8 {
            let mut at = self.queues[Self::queue(class, weight)].oldest;
            while at != NO_COHORT {
                let newer = self.cohorts[at as usize].newer;
                self.refresh(objects, hazards, at, now, false);
                at = if self.cohorts[at as usize].live {
                    self.cohorts[at as usize].newer
                } else {
                    newer
                };
            }
        }
    }

    /// Recomputes up to `most` scores that are due.
    pub fn refresh_due(&mut self, objects: &mut Objects, hazards: &Hazards, now: i64, most: usize) {
        for _ in 0..most {
            let at = self.due.least();
            if self.due.get(at) > now {
                break;
            }
            self.refresh(objects, hazards, at, now, false);
        }
    }

    /// Takes the coldest candidate of the cohort with the lowest score. Blocked objects before it
    /// are held.
    pub fn victim(&mut self, objects: &mut Objects, hazards: &Hazards, now: i64) -> Option<Slot> {
        self.refresh_due(objects, hazards, now, REFRESHES);
        let mut checked = NO_COHORT;
        loop {
            let at = self.scores.least();
            if self.scores.get(at) == f32::INFINITY {
                return None;
            }
            if checked != at && !self.is_exact(objects, at, now) {
                checked = at;
                self.refresh(objects, hazards, at, now, true);
                continue;
            }
            let slot = self.cohorts[at as usize].prev;
            if slot & END != 0 {
                self.discard(at);
                continue;
            }
            let blocked = objects.is_blocked(slot);
            self.unlink(objects, slot);
            objects.node_mut(slot).set_held(true);
            if !blocked {
                self.victim = Victim { slot, score: self.scores.get(at), now };
                return Some(slot);
            }
            checked = NO_COHORT;
        }
    }

    /// The oldest cohort of a queue that reaches `stamp`, and the one before it. Searched from both
    /// ends: returned objects are old, hinted ones young.
    fn around(&self, queue: usize, stamp: i64) -> (u32, u32) {
        let Queue { oldest, newest } = self.queues[queue];
        let reaches = |at: u32| self.cohorts[at as usize].newest_ns >= stamp;
        let (mut low, mut high) = (oldest, newest);
        loop {
            if low == NO_COHORT {
                return (newest, NO_COHORT);
            }
            if reaches(low) {
                return (self.cohorts[low as usize].older, low);
            }
            if high == NO_COHORT || !reaches(high) {
                let newer =
                    if high == NO_COHORT { oldest } else { self.cohorts[high as usize].newer };
                return (high, newer);
            }
            low = self.cohorts[low as usize].newer;
            high = self.cohorts[high as usize].older;
        }
    }

    /// The coldest object of a cohort that is not older than `stamp`, or the cohort's end.
    fn hotter(&self, objects: &Objects, at: u32, stamp: i64) -> u32 {
        let Cohort { prev, next, .. } = self.cohorts[at as usize];
        let (mut cold, mut hot) = (prev, next);
        loop {
            if cold & END != 0 || objects.node(cold).stamp >= stamp {
                return cold;
            }
            if objects.node(hot).stamp < stamp {
                return objects.node(hot).prev;
            }
            cold = objects.node(cold).prev;
            hot = objects.node(hot).next;
        }
    }

    /// Returns an object to the position of its stamp.
    pub fn put_back(&mut self, objects: &mut Objects, slot: Slot, class: u16, weight: u8) {
        let stamp = objects.node(slot).stamp;
        let (older, mut at) = self.around(Self::queue(class, weight), stamp);
        let close = |c: u32| stamp - self.cohorts[c as usize].newest_ns <= QUANTUM_NS;
        if at == NO_COHORT || self.cohorts[at as usize].oldest_ns > stamp + QUANTUM_NS {
            at = match older != NO_COHORT && close(older) {
                true => older,
                false => self.create(class, weight, older, stamp),
            };
        }
        let cohort = &mut self.cohorts[at as usize];
        cohort.newest_ns = cohort.newest_ns.max(stamp);
        cohort.oldest_ns = cohort.oldest_ns.min(stamp);
        let hotter = self.hotter(objects, at, stamp);
        let colder = match hotter & END {
            0 => objects.node(hotter).next,
            _ => self.cohorts[at as usize].next,
        };
        self.link(objects, slot, hotter, colder);
        self.due.set(at, i64::MIN);
        self.refreshed = NOT_REFRESHED;
    }

    /// Checks that the rings are consistent and contain every object that is not held.
    pub fn check(&self, objects: &Objects) -> Result<()> {
        let mut linked = 0;
        for (at, cohort) in self.cohorts.iter().enumerate().filter(|(_, c)| c.live) {
            let (mut slot, mut colder) = (cohort.prev, END | at as u32);
            let mut stamp = i64::MIN;
            while slot & END == 0 {
                let node = objects.node(slot);
                if node.next != colder || node.is_held() || node.stamp < stamp {
                    fail!(State, "cohort {at} has object {} out of order", node.id);
                }
                (linked, stamp, colder, slot) = (linked + 1, node.stamp, slot, node.prev);
            }
            if slot != END | at as u32 || cohort.next != colder {
                fail!(State, "the ring of cohort {at} does not return to it");
            }
        }
        let held = objects.slots().filter(|&s| objects.node(s).is_held()).count();
        if linked + held != objects.len() {
            fail!(State, "{linked} in cohorts and {held} held of {}", objects.len());
        }
        Ok(())
    }
}
