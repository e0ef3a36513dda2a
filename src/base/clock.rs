//! The one clock: CLOCK_MONOTONIC nanoseconds, or a number a test moves.

use crate::base::sync::Arc;
use crate::base::sync::atomic::{AtomicU64, Ordering};

/// A monotonic clock. Cheap to clone.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<AtomicU64>>);

impl Clock {
    /// The machine's clock.
    pub fn real() -> Clock {
        Clock(None)
    }

    /// A clock that stands still until it is moved. For simulation and tests.
    pub fn manual(start_ns: u64) -> Clock {
        Clock(Some(Arc::new(AtomicU64::new(start_ns))))
    }

    /// Nanoseconds since an arbitrary start; the zero of C's CLOCK_MONOTONIC.
    pub fn now_ns(&self) -> u64 {
        match &self.0 {
            Some(manual) => manual.load(Ordering::Acquire),
            None => monotonic_ns(),
        }
    }

    /// Whether this is a manual clock: waits then cannot sleep by it.
    pub fn is_manual(&self) -> bool {
        self.0.is_some()
    }

    /// Moves a manual clock forward; the real one is not moved by anybody.
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

/// Seconds since 1970 by the machine's calendar, which may be wrong, and may jump: for what
/// others read, never for how long something takes.
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
    fn the_calendar_is_past_this_line() {
        assert!((1_700_000_000..10_000_000_000).contains(&wall_s()));
    }

    #[test]
    fn real_clock_moves_forward() {
        let clock = Clock::real();
        let a = clock.now_ns();
        assert!(a > 0 && clock.now_ns() >= a);
    }

    #[cfg(not(feature = "shuttle"))]
    #[test]
    fn manual_clock_moves_when_told() {
        let clock = Clock::manual(5);
        let same = clock.clone();
        clock.advance(7);
        assert_eq!((clock.now_ns(), same.now_ns()), (12, 12));
    }
}
