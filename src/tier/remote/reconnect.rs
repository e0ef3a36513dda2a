//! When and where a client connects again: the addresses of a host, and pauses after failures.

use std::net::SocketAddr;

use crate::io::link;
use crate::tier::remote::fault::Fault;

/// Lifetime of resolved addresses.
const RESOLVED_NS: u64 = 30_000_000_000;
/// Pause after the first failure; it doubles with each further failure.
pub(super) const PAUSE_NS: u64 = 5_000_000;
pub(super) const MAX_PAUSE_NS: u64 = 500_000_000;
/// A batch waits for the end of a pause up to this length; during a longer pause it fails at once.
const PATIENCE_NS: u64 = 50_000_000;

/// Pauses between attempts to connect to one server.
#[derive(Default)]
pub struct Backoff {
    failures: u32,
    not_before_ns: u64,
}

impl Backoff {
    /// Whether the last attempt succeeded.
    pub fn is_well(&self) -> bool {
        self.failures == 0
    }

    /// Records a success: the next attempt needs no pause.
    pub fn succeeded(&mut self) {
        *self = Backoff::default();
    }

    /// Records a failure, and begins a pause.
    pub fn failed(&mut self, now_ns: u64) {
        let pause = PAUSE_NS.saturating_mul(1 << self.failures.min(16)).min(MAX_PAUSE_NS);
        self.failures = self.failures.saturating_add(1);
        self.not_before_ns = now_ns.saturating_add(pause);
    }

    /// Replaces the end of the pause.
    pub fn pause_until(&mut self, not_before_ns: u64) {
        self.not_before_ns = not_before_ns;
    }

    /// Whether a pause is in flight.
    pub fn is_pausing(&self, now_ns: u64) -> bool {
        now_ns < self.not_before_ns
    }

    /// When an attempt is allowed; None = after the deadline, or later than a batch waits.
    pub fn open_from(&self, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        let most = now_ns.saturating_add(PATIENCE_NS).min(deadline_ns);
        (self.not_before_ns <= most).then_some(self.not_before_ns)
    }
}

/// The addresses of one host, tried in turn.
#[derive(Default)]
pub struct Addresses {
    found: Vec<SocketAddr>,
    found_ns: u64,
    /// The address of the next attempt.
    next: usize,
}

impl Addresses {
    /// The address of the next attempt; resolves the host before the first one.
    pub fn current(&mut self, host: &str, port: u16, now_ns: u64) -> Result<SocketAddr, Fault> {
        let is_known = !self.found.is_empty() && now_ns.saturating_sub(self.found_ns) < RESOLVED_NS;
        if self.next == 0 && !is_known {
            // Without this, a host that resolves no more would keep addresses to try.
            self.found = Vec::new();
            self.found = link::resolve(host, port).map_err(Fault::unreachable)?;
            self.found_ns = now_ns;
        }
        let address = self.found.get(self.next).copied();
        address.ok_or_else(|| Fault::unreachable("the host has no address"))
    }

    /// Moves to the next address; false = every address has been tried.
    pub fn advance(&mut self) -> bool {
        self.next += 1;
        self.next < self.found.len()
    }

    /// Whether there is an address that has not been tried.
    pub fn has_other(&self) -> bool {
        self.next < self.found.len()
    }

    /// Begins with the first address again.
    pub fn restart(&mut self) {
        self.next = 0;
    }

    /// Makes the address before the next one, which worked, the first one.
    pub fn prefer_last(&mut self) {
        if self.next > 1 {
            self.found.swap(0, self.next - 1);
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_end_with_a_success() {
        let mut backoff = Backoff::default();
        assert!(backoff.is_well() && backoff.open_from(0, u64::MAX) == Some(0));
        backoff.failed(0);
        assert!(backoff.is_pausing(PAUSE_NS - 1) && !backoff.is_pausing(PAUSE_NS));
        assert_eq!(backoff.open_from(0, u64::MAX), Some(PAUSE_NS));
        assert_eq!(backoff.open_from(0, PAUSE_NS - 1), None);
        (0..40).for_each(|second| backoff.failed(second * 1_000_000_000));
        let last = 39_000_000_000;
        assert_eq!(backoff.open_from(last, u64::MAX), None);
        assert_eq!(backoff.open_from(last + MAX_PAUSE_NS, u64::MAX), Some(last + MAX_PAUSE_NS));
        backoff.succeeded();
        assert!(backoff.is_well() && backoff.open_from(0, u64::MAX) == Some(0));
    }

    #[test]
    fn addresses_are_tried_in_turn() {
        let found: Vec<SocketAddr> =
            ["127.0.0.1:1", "127.0.0.1:2"].map(|at| at.parse().unwrap()).into();
        let mut addresses = Addresses { found: found.clone(), ..Addresses::default() };
        let current = |addresses: &mut Addresses| addresses.current("a", 1, 1).unwrap();
        assert_eq!(current(&mut addresses), found[0]);
        assert!(addresses.advance() && addresses.has_other());
        assert_eq!(current(&mut addresses), found[1]);
        assert!(!addresses.advance() && !addresses.has_other());
        addresses.prefer_last();
        assert_eq!(current(&mut addresses), found[1]);
        addresses.advance();
        addresses.restart();
        assert_eq!(current(&mut addresses), found[1]);
    }
}
