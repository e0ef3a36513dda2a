//! A server as a lane sees it: its addresses, its connection, what waits for it.

use std::collections::VecDeque;
use std::net::SocketAddr;

use crate::io::link;
use crate::tier::remote::Trouble;
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::url::Address;
use crate::tier::remote::redis::wire::{Fault, Task, Wire};

/// How long what the resolver said is used.
const RESOLVED_NS: u64 = 30_000_000_000;
/// After the first failure nobody connects for so long, then for twice as long each time.
const PAUSE_NS: u64 = 5_000_000;
const MAX_PAUSE_NS: u64 = 500_000_000;
/// A pause up to here is waited for; in a longer one all is lost at once.
const PATIENCE_NS: u64 = 50_000_000;

/// One of several that did not answer in time is left alone for so long, then for twice as long
/// each time: every batch that waits for it costs its whole timeout, and others take over for it
/// meanwhile.
const LATE_NS: u64 = 1_000_000_000;
const MAX_LATE_NS: u64 = 8_000_000_000;
/// For so long nobody goes to one that failed who can go elsewhere.
const SHUN_NS: u64 = 5_000_000_000;

/// A server.
pub struct Node {
    /// Its name.
    pub address: Address,
    /// The connection.
    pub wire: Option<Wire>,
    /// Items that are to be sent.
    pub queue: VecDeque<Task>,
    /// It is to say who has which slot, or is saying it.
    pub is_asked_for_slots: bool,
    /// That was said to it.
    pub has_heard: bool,
    /// It has been connected to before.
    pub was_connected: bool,
    /// Connections that were lost in this batch.
    pub faults: u32,
    /// Attempts that failed since something went well.
    failures: u32,
    /// How often in a row it was late.
    lates: u32,
    not_before_ns: u64,
    shunned_ns: u64,
    /// Why it does not let us in: that it cannot be reached for a while is not why then.
    refusal: Option<Fault>,
    found: Vec<SocketAddr>,
    found_ns: u64,
    /// Addresses of `found` that have been tried.
    tried: usize,
}

impl Node {
    /// A server that nobody has connected to.
    pub fn new(address: Address) -> Node {
        Node {
            address,
            wire: None,
            queue: VecDeque::new(),
            is_asked_for_slots: false,
            has_heard: false,
            was_connected: false,
            faults: 0,
            failures: 0,
            lates: 0,
            not_before_ns: 0,
            shunned_ns: 0,
            refusal: None,
            found: Vec::new(),
            found_ns: 0,
            tried: 0,
        }
    }

    /// Whether there is something for it to do.
    pub fn is_wanted(&self) -> bool {
        !self.queue.is_empty() || self.is_asked_for_slots
    }

    /// Whether it did well when it was needed last.
    pub fn is_well(&self) -> bool {
        self.failures == 0
    }

    /// Whether it is worth a try where another one would do.
    pub fn is_inviting(&self, now_ns: u64) -> bool {
        self.is_well() || now_ns >= self.shunned_ns
    }

    /// It did well.
    pub fn did_well(&mut self) {
        (self.failures, self.lates) = (0, 0);
        self.not_before_ns = 0;
        self.refusal = None;
    }

    /// Keeps in mind why it failed, where that is something which lasts.
    pub fn keep(&mut self, fault: &Fault) {
        let lasts = matches!(fault.trouble, Trouble::Denied | Trouble::Untrusted);
        self.refusal = lasts.then(|| fault.clone());
    }

    /// Why nobody connects to it now.
    pub fn why_closed(&self) -> Fault {
        let words = || "it could not be reached a moment ago".to_string();
        let gone = || Fault { trouble: Trouble::Gone, words: words() };
        self.refusal.clone().unwrap_or_else(gone)
    }

    /// It did not: nobody connects for a while.
    pub fn failed(&mut self, now_ns: u64) {
        let pause = PAUSE_NS.saturating_mul(1 << self.failures.min(16)).min(MAX_PAUSE_NS);
        self.failures = self.failures.saturating_add(1);
        self.not_before_ns = now_ns.saturating_add(pause);
        self.shunned_ns = now_ns.saturating_add(SHUN_NS);
        self.tried = 0;
    }

    /// One of several did not answer in time: it is left alone for a while.
    pub fn late(&mut self, now_ns: u64) {
        self.failed(now_ns);
        let pause = LATE_NS.saturating_mul(1 << self.lates.min(16)).min(MAX_LATE_NS);
        self.lates = self.lates.saturating_add(1);
        self.not_before_ns = now_ns.saturating_add(pause);
        self.begin_anew();
    }

    /// When it may be connected to; None = later than anybody waits.
    pub fn open_from(&self, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        let most = now_ns.saturating_add(PATIENCE_NS).min(deadline_ns);
        (self.not_before_ns <= most).then_some(self.not_before_ns)
    }

    /// Lets go of a connection; the next one is to the first of its addresses.
    pub fn begin_anew(&mut self) {
        self.wire = None;
        self.tried = 0;
        (self.is_asked_for_slots, self.has_heard) = (false, false);
    }

    /// Begins a connection to the next of its addresses.
    pub fn connect(&mut self, now_ns: u64, settings: &Settings) -> Result<(), Fault> {
        let by_ns = now_ns.saturating_add(settings.connect_ns);
        let is_known = self.found_ns != 0 && now_ns.saturating_sub(self.found_ns) < RESOLVED_NS;
        if self.tried == 0 && !is_known {
            self.found = link::resolve(&self.address.host, self.address.port)
                .map_err(|words| Fault { trouble: Trouble::Gone, words })?;
            self.found_ns = now_ns;
        }
        let none = || Fault { trouble: Trouble::Gone, words: "it has no address".to_string() };
        let to = self.found.get(self.tried).ok_or_else(none)?;
        self.tried += 1;
        self.wire = Some(Wire::begin(to, &self.address.host, by_ns, settings)?);
        Ok(())
    }

    /// Whether there is an address that has not been tried.
    pub fn has_other(&self) -> bool {
        self.tried < self.found.len()
    }

    /// The connection can be used: the address it goes to is the first of the next attempt.
    pub fn connected(&mut self) {
        if self.tried > 1 {
            self.found.swap(0, self.tried - 1);
        }
        self.tried = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        let mut node = Node::new(Address { host: "127.0.0.1".into(), port: 1 });
        assert!(node.is_well() && !node.is_wanted());
        assert_eq!(node.open_from(0, u64::MAX), Some(0));
        node.failed(0);
        assert_eq!(node.open_from(0, u64::MAX), Some(PAUSE_NS));
        assert_eq!(node.open_from(0, PAUSE_NS - 1), None);
        (0..40).for_each(|_| node.failed(0));
        assert!(!node.is_inviting(SHUN_NS - 1) && node.is_inviting(SHUN_NS));
        assert_eq!(node.open_from(0, u64::MAX), None);
        assert_eq!(node.open_from(MAX_PAUSE_NS, u64::MAX), Some(MAX_PAUSE_NS));
        node.did_well();
        assert_eq!(node.open_from(0, u64::MAX), Some(0));
        assert!(node.is_inviting(0));
        node.late(0);
        assert_eq!(node.open_from(0, u64::MAX), None, "nobody waits for that");
        assert_eq!(node.open_from(LATE_NS, u64::MAX), Some(LATE_NS));
        (0..9).for_each(|_| node.late(0));
        assert_eq!(node.open_from(MAX_LATE_NS, u64::MAX), Some(MAX_LATE_NS));
        node.did_well();
        // Only what lasts is said again.
        node.keep(&Fault { trouble: Trouble::Late, words: String::new() });
        assert_eq!(node.why_closed().trouble, Trouble::Gone);
        node.keep(&Fault { trouble: Trouble::Untrusted, words: "who is it?".to_string() });
        assert_eq!(node.why_closed().words, "who is it?");
        node.did_well();
        assert_eq!(node.why_closed().trouble, Trouble::Gone);
    }
}
