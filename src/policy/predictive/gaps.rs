//! Observed times between uses, and how well they predicted the next one.

use crate::base::status::Result;
use crate::base::zeroed::{Zeroable, Zeroed};
use crate::meta::index::Slot;
use crate::meta::objects::Objects;

/// Observations required for a prediction.
const ENOUGH: u64 = 4;
/// Weight of the newest observation.
const NEWEST: f64 = 0.25;

/// A positive quantity observed repeatedly: its exponentially weighted mean and variance, and the
/// error of the mean as a prediction.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Pace {
    /// The mean.
    pub mean: f64,
    variance: f64,
    error: f64,
    seen: u64,
}

impl Pace {
    /// Adds an observation; values that are not above zero are ignored.
    pub fn observe(&mut self, value: f64) {
        if !(value > 0.0 && value.is_finite()) {
            return;
        }
        self.seen += 1;
        if self.seen == 1 {
            self.mean = value;
            return;
        }
        let off = value - self.mean;
        let error = (off.abs() / value).min(1.0);
        let weight = if self.seen == 2 { 1.0 } else { NEWEST };
        self.error += weight * (error - self.error);
        self.variance = (1.0 - NEWEST) * (self.variance + NEWEST * off * off);
        self.mean += NEWEST * off;
    }

    /// Whether there were enough observations.
    pub fn is_known(&self) -> bool {
        self.seen >= ENOUGH
    }

    /// Confidence of the mean, 0 to 1: one minus the relative error of past predictions or the
    /// relative spread, whichever is greater.
    pub fn confidence(&self) -> f64 {
        if !self.is_known() {
            return 0.0;
        }
        let spread = self.variance.sqrt() / self.mean;
        (1.0 - self.error.max(spread)).clamp(0.0, 1.0)
    }
}

/// A session at its last request.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct User {
    id: u64,
    active_ns: i64,
    turns: u32,
    length: u32,
    gap: Pace,
}

// SAFETY: numbers only.
unsafe impl Zeroable for User {}

/// Gaps between the requests of each session and of all, and the growth rate of sessions.
pub struct Gaps {
    users: Zeroed<User>,
    /// Gaps of all sessions, and of objects without a session.
    pub all: Pace,
    /// Tokens per second.
    pub rate: Pace,
    lone_ns: i64,
}

impl Gaps {
    /// Tables for the sessions of `max_objects`.
    pub fn new(max_objects: usize) -> Result<Gaps> {
        let users = Zeroed::new(max_objects.min(crate::meta::sessions::MAX_SESSIONS))?;
        Ok(Gaps { users, all: Pace::default(), rate: Pace::default(), lone_ns: i64::MIN })
    }

    /// Bytes used, for a table with this peak number of sessions.
    pub fn used_bytes(&self, sessions: usize) -> u64 {
        self.users.front_bytes(sessions)
    }

    /// Continues from other gaps; per session only if the tables have equal sizes.
    pub fn learn(&mut self, from: Gaps) {
        (self.all, self.rate) = (from.all, from.rate);
        if from.users.len() == self.users.len() {
            self.users = from.users;
        }
    }

    /// A session uses an object; a new request is an observation.
    pub fn see(&mut self, objects: &Objects, session: Slot) {
        let Some(row) = objects.sessions.of(session) else { return };
        let Some(user) = self.users.get_mut(session as usize) else { return };
        if user.id != row.id || user.turns == 0 {
            *user = User { id: row.id, turns: 0, ..User::default() };
        } else if user.turns != row.turns {
            let requests = row.turns.saturating_sub(user.turns).max(1);
            let seconds = row.active_ns.saturating_sub(user.active_ns) as f64 * 1e-9;
            user.gap.observe(seconds / f64::from(requests));
            self.all.observe(seconds / f64::from(requests));
            let grown = row.length.saturating_sub(user.length);
            if seconds > 0.0 {
                self.rate.observe(f64::from(grown) / seconds);
            }
        }
        (user.active_ns, user.turns, user.length) = (row.active_ns, row.turns, row.length);
    }

    /// An object without a session is used again. Only the first use of a call counts: the stamps
    /// of one call are consecutive, so a long path would confirm itself.
    pub fn see_lone(&mut self, last_ns: i64, now: i64) {
        if self.lone_ns.saturating_add(1) != now {
            self.all.observe(now.saturating_sub(last_ns) as f64 * 1e-9);
        }
        self.lone_ns = now;
    }

    /// Expected seconds from the last request of a session, or from the last use of an object
    /// without one, to the next; and the confidence.
    pub fn expected(&self, session: Slot) -> Option<(f64, f64)> {
        let own = self.users.get(session as usize).map(|user| user.gap);
        let pace = own.filter(Pace::is_known).unwrap_or(self.all);
        pace.is_known().then(|| (pace.mean, pace.confidence()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_is_high_for_an_even_pace_only() {
        let (mut even, mut uneven) = (Pace::default(), Pace::default());
        for i in 0..20 {
            even.observe(5.0);
            uneven.observe(if i % 2 == 0 { 1.0 } else { 9.0 });
        }
        assert_eq!((even.mean, even.confidence()), (5.0, 1.0));
        assert!(uneven.confidence() < 0.5, "{}", uneven.confidence());
    }

    #[test]
    fn no_prediction_before_enough_observations() {
        let mut pace = Pace::default();
        for _ in 0..ENOUGH - 1 {
            pace.observe(1.0);
            assert!(!pace.is_known() && pace.confidence() == 0.0);
        }
        [0.0, -1.0, f64::NAN, f64::INFINITY].into_iter().for_each(|x| pace.observe(x));
        assert!(!pace.is_known());
        pace.observe(1.0);
        assert_eq!(pace.confidence(), 1.0);
    }

    #[test]
    fn a_change_of_pace_lowers_the_confidence_for_a_while() {
        let mut pace = Pace::default();
        (0..10).for_each(|_| pace.observe(1.0));
        pace.observe(3.0);
        assert!(pace.confidence() < 0.9);
        (0..40).for_each(|_| pace.observe(3.0));
        assert!(pace.confidence() > 0.9 && (pace.mean - 3.0).abs() < 0.01);
    }

    #[test]
    fn a_long_path_is_one_observation() {
        let mut gaps = Gaps::new(4).expect("small");
        (0..100).for_each(|i| gaps.see_lone(i, 5_000_000_000 + i));
        assert!(!gaps.all.is_known());
        assert_eq!(gaps.all.mean, 5.0);
    }
}
