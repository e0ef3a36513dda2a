//! Batch size advice for a scheduler, computed from the last windows of lookups.

use crate::policy::metrics::Counts;

/// Thresholds of the advice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rules {
    /// Batches are halved above this share of references that were evicted before.
    pub shrink_above: f64,
    /// Batches are doubled below this many evictions in a window.
    pub grow_below: u64,
    /// Smallest batch.
    pub min_batch: u64,
    /// Largest batch.
    pub max_batch: u64,
    /// Lookups in a window.
    pub window: u64,
    /// Consecutive windows that must agree before the advice changes.
    pub patience: u32,
}

impl Default for Rules {
    fn default() -> Rules {
        Rules {
            shrink_above: 0.3,
            grow_below: 10,
            min_batch: 1,
            max_batch: 128,
            window: 100,
            patience: 2,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Change {
    #[default]
    Keep,
    Shrink,
    Grow,
}

/// Observes windows of lookups.
#[derive(Default)]
pub struct Advice {
    rules: Rules,
    start: Counts,
    change: Change,
    agreed: u32,
    rate: f64,
    evictions: u64,
}

/// The advice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Advised {
    /// The batch size to run next.
    pub batch: u64,
    /// Re-prefill rate of the last full window.
    pub re_prefill_rate: f64,
    /// Evictions in that window.
    pub evictions: u64,
}

impl Advice {
    /// Replaces the thresholds.
    pub fn set_rules(&mut self, rules: Rules) {
        *self = Advice { rules, start: self.start, ..Advice::default() };
    }

    /// Reads the totals after a lookup.
    #[inline]
    pub fn observe(&mut self, now: &Counts) {
        if now.requests - self.start.requests >= self.rules.window {
            self.close_window(now);
        }
    }

    #[cold]
    fn close_window(&mut self, now: &Counts) {
        let again = now.evicted_references - self.start.evicted_references;
        let references = now.references - self.start.references;
        self.rate = Counts::share(again as f64, references as f64);
        self.evictions = now.evictions - self.start.evictions;
        self.start = *now;
        let change = if self.rate > self.rules.shrink_above {
            Change::Shrink
        } else if self.evictions < self.rules.grow_below {
            Change::Grow
        } else {
            Change::Keep
        };
        self.agreed = if change == self.change { self.agreed.saturating_add(1) } else { 1 };
        self.change = change;
    }

    /// The batch size to run instead of `batch`. A change is advised once; then `patience` windows
    /// must agree again.
    pub fn advise(&mut self, batch: u64) -> Advised {
        let Rules { min_batch, max_batch, patience, .. } = self.rules;
        let ripe = self.agreed >= patience.max(1);
        let target = match self.change {
            Change::Shrink if ripe => batch / 2,
            Change::Grow if ripe => batch.saturating_mul(2),
            _ => batch,
        };
        if ripe && self.change != Change::Keep {
            self.agreed = 0;
        }
        let batch = target.clamp(min_batch, max_batch.max(min_batch));
        Advised { batch, re_prefill_rate: self.rate, evictions: self.evictions }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(advice: &mut Advice, total: &mut Counts, again: u64, evictions: u64) {
        total.requests += 100;
        total.references += 1000;
        total.evicted_references += again;
        total.evictions += evictions;
        advice.observe(total);
    }

    #[test]
    fn batch_advice_changes_after_two_agreeing_windows() {
        let (mut advice, mut total) = (Advice::default(), Counts::default());
        assert_eq!(advice.advise(32).batch, 32);
        window(&mut advice, &mut total, 301, 50);
        assert_eq!(advice.advise(32).batch, 32, "one window is no trend");
        window(&mut advice, &mut total, 301, 50);
        assert_eq!(advice.advise(32).batch, 16);
        assert_eq!(advice.advise(16).batch, 16, "advised once");
        window(&mut advice, &mut total, 300, 50);
        window(&mut advice, &mut total, 300, 50);
        assert_eq!(advice.advise(16).batch, 16, "0.3 is not above 0.3");
        window(&mut advice, &mut total, 0, 9);
        window(&mut advice, &mut total, 0, 9);
        let advised = advice.advise(100);
        assert_eq!((advised.batch, advised.evictions), (128, 9));
        for _ in 0..2 {
            window(&mut advice, &mut total, 900, 900);
        }
        assert_eq!(advice.advise(1).batch, 1);
    }
}
