//! Where a server is: its addresses, and when it may be connected to.

use std::net::SocketAddr;

use crate::io::link;
use crate::tier::remote::Trouble;
use crate::tier::remote::s3::conn::Conn;
use crate::tier::remote::s3::fault::Fault;
use crate::tier::remote::s3::request::Settings;

/// How long what the resolver said is used.
const RESOLVED_NS: u64 = 30_000_000_000;
/// After the first failure nobody connects for so long, then for twice as long each time.
const PAUSE_NS: u64 = 5_000_000;
const MAX_PAUSE_NS: u64 = 500_000_000;
/// A pause up to here is waited for; in a longer one all is lost at once.
const PATIENCE_NS: u64 = 50_000_000;

/// A server's addresses.
#[derive(Default)]
pub struct Place {
    found: Vec<SocketAddr>,
    found_ns: u64,
    /// Which of them is next.
    next: usize,
    failures: u32,
    not_before_ns: u64,
}

impl Place {
    /// Whether it could be connected to when that was tried last.
    pub fn is_well(&self) -> bool {
        self.failures == 0
    }

    /// It could be connected to.
    pub fn did_well(&mut self) {
        (self.failures, self.not_before_ns) = (0, 0);
    }

    /// It could not: the next of its addresses has its turn, after all of them a pause.
    pub fn failed(&mut self, now_ns: u64) {
        self.next += 1;
        if self.next < self.found.len() {
            return;
        }
        self.next = 0;
        // Several connections that were begun together fail together.
        if now_ns >= self.not_before_ns {
            let pause = PAUSE_NS.saturating_mul(1 << self.failures.min(16)).min(MAX_PAUSE_NS);
            self.failures = self.failures.saturating_add(1);
            self.not_before_ns = now_ns.saturating_add(pause);
        }
    }

    /// When it may be connected to; None = later than anybody waits.
    pub fn open_from(&self, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        let most = now_ns.saturating_add(PATIENCE_NS).min(deadline_ns);
        (self.not_before_ns <= most).then_some(self.not_before_ns)
    }

    /// Begins a connection.
    pub fn connect(&mut self, settings: &Settings, now_ns: u64, by_ns: u64) -> Result<Conn, Fault> {
        let to = &settings.endpoint;
        let gone = |words| Fault { trouble: Trouble::Gone, words, is_stale: false, can_pass: true };
        let is_known = !self.found.is_empty() && now_ns - self.found_ns.min(now_ns) < RESOLVED_NS;
        if self.next == 0 && !is_known {
            self.found = link::resolve(&to.host, to.port).map_err(gone)?;
            self.found_ns = now_ns;
        }
        let none = || gone("it has no address".to_string());
        let tls = settings.trust.as_ref().map(|trust| (trust, to.host.as_str()));
        Conn::begin(self.found.get(self.next).ok_or_else(none)?, tls, by_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        let mut place = Place::default();
        assert!(place.is_well());
        assert_eq!(place.open_from(0, u64::MAX), Some(0));
        place.failed(0);
        place.failed(0);
        assert_eq!(place.open_from(0, u64::MAX), Some(PAUSE_NS));
        assert_eq!(place.open_from(0, PAUSE_NS - 1), None);
        (0..40).for_each(|second| place.failed(second * 1_000_000_000));
        let last = 39_000_000_000;
        assert_eq!(place.open_from(last, u64::MAX), None);
        assert_eq!(place.open_from(last + MAX_PAUSE_NS, u64::MAX), Some(last + MAX_PAUSE_NS));
        place.did_well();
        assert!(place.is_well() && place.open_from(0, u64::MAX) == Some(0));
    }

    #[test]
    fn addresses_have_their_turn() {
        let found: Vec<SocketAddr> =
            ["127.0.0.1:1", "127.0.0.1:2"].map(|at| at.parse().unwrap()).into();
        let mut place = Place { found, ..Place::default() };
        place.failed(0);
        assert!(place.is_well() && place.next == 1);
        place.failed(0);
        assert!(!place.is_well() && place.next == 0);
    }
}
