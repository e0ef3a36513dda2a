//! The clock: CLOCK_MONOTONIC in nanoseconds, or a manual clock for tests and simulation.

use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU64, Ordering};

/// A monotonic clock, cheap to clone.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<AtomicU64>>);

impl Clock {
    /// The machine's clock.
    pub fn real() -> Clock {
        Clock(None)
    }

    /// A clock that stands still until [`Clock::advance`].
    pub fn manual(start_ns: u64) -> Clock {
        Clock(Some(Arc::new(AtomicU64::new(start_ns))))
    }

    /// Nanoseconds since the start of CLOCK_MONOTONIC, or of the manual clock.
    pub fn now_ns(&self) -> u64 {
        match &self.0 {
            Some(manual) => manual.load(Ordering::Acquire),
            None => monotonic_ns(),
        }
    }

    /// Whether this is a manual clock; waits cannot sleep by one.
    pub fn is_manual(&self) -> bool {
        self.0.is_some()
    }

    /// Advances a manual clock; does nothing to the real one.
    pub fn advance(&self, by_ns: u64) {
        if let Some(manual) = &self.0 {
            manual.fetch_add(by_ns, Ordering::AcqRel);
        }
    }
}

fn monotonic_ns() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid, writable timespec; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    (ts.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(ts.tv_nsec as u64)
}

/// Seconds since 1970 by the wall clock, which may be wrong and may jump. Only for time stamps
/// that other programs read, never for durations.
pub fn wall_s() -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `ts` is a valid, writable timespec; CLOCK_REALTIME always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut ts) };
    u64::try_from(ts.tv_sec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wall_clock_is_plausible() {
        assert!((1_700_000_000..10_000_000_000).contains(&wall_s()));
    }

    #[test]
    fn the_real_clock_advances() {
        let clock = Clock::real();
        let a = clock.now_ns();
        assert!(a > 0 && clock.now_ns() >= a);
    }

    #[cfg(not(feature = "shuttle"))]
    #[test]
    fn clones_of_a_manual_clock_advance_together() {
        let clock = Clock::manual(5);
        let same = clock.clone();
        clock.advance(7);
        assert_eq!((clock.now_ns(), same.now_ns()), (12, 12));
    }
}
