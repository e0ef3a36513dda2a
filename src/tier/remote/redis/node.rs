//! A server as a lane sees it: its addresses, its connection, what waits for it.

use std::collections::VecDeque;

use crate::tier::remote::RemoteError;
use crate::tier::remote::fault::Fault;
use crate::tier::remote::reconnect::{Addresses, Backoff};
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::connection::{Connection, Task};
use crate::tier::remote::redis::url::Address;

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
    pub connection: Option<Connection>,
    /// Items that are to be sent.
    pub queue: VecDeque<Task>,
    /// It is to say who has which slot, or is saying it.
    pub wants_slots: bool,
    /// That was said to it.
    pub is_slots_sent: bool,
    /// It has been connected to before.
    pub was_connected: bool,
    /// Connections that were lost in this batch.
    pub faults: u32,
    /// How often in a row it was late.
    lates: u32,
    backoff: Backoff,
    addresses: Addresses,
    shunned_ns: u64,
    /// Why it does not let us in: that it cannot be reached for a while is not why then.
    denial: Option<Fault>,
}

impl Node {
    /// A server that nobody has connected to.
    pub fn new(address: Address) -> Node {
        Node {
            address,
            connection: None,
            queue: VecDeque::new(),
            wants_slots: false,
            is_slots_sent: false,
            was_connected: false,
            faults: 0,
            lates: 0,
            backoff: Backoff::default(),
            addresses: Addresses::default(),
            shunned_ns: 0,
            denial: None,
        }
    }

    /// Whether there is something for it to do.
    pub fn is_wanted(&self) -> bool {
        !self.queue.is_empty() || self.wants_slots
    }

    /// Whether it did well when it was needed last.
    pub fn is_well(&self) -> bool {
        self.backoff.is_well()
    }

    /// Whether it is worth a try where another one would do.
    pub fn is_preferred(&self, now_ns: u64) -> bool {
        self.is_well() || now_ns >= self.shunned_ns
    }

    /// It did well.
    pub fn did_well(&mut self) {
        self.backoff.succeeded();
        self.lates = 0;
        self.denial = None;
    }

    /// Keeps in mind why it failed, where that is something which lasts.
    pub fn keep(&mut self, fault: &Fault) {
        let lasts = matches!(fault.error, RemoteError::Denied | RemoteError::Untrusted);
        self.denial = lasts.then(|| fault.clone());
    }

    /// Why nobody connects to it now.
    pub fn refusal(&self) -> Fault {
        let gone = || Fault::unreachable("it could not be reached a moment ago");
        self.denial.clone().unwrap_or_else(gone)
    }

    /// It did not: nobody connects for a while.
    pub fn failed(&mut self, now_ns: u64) {
        self.backoff.failed(now_ns);
        self.shunned_ns = now_ns.saturating_add(SHUN_NS);
        self.addresses.restart();
    }

    /// One of several did not answer in time: it is left alone for a while.
    pub fn late(&mut self, now_ns: u64) {
        self.failed(now_ns);
        let pause = LATE_NS.saturating_mul(1 << self.lates.min(16)).min(MAX_LATE_NS);
        self.lates = self.lates.saturating_add(1);
        self.backoff.pause_until(now_ns.saturating_add(pause));
        self.begin_anew();
    }

    /// When it may be connected to; None = later than anybody waits.
    pub fn open_from(&self, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        self.backoff.open_from(now_ns, deadline_ns)
    }

    /// Lets go of a connection; the next one is to the first of its addresses.
    pub fn begin_anew(&mut self) {
        self.connection = None;
        self.addresses.restart();
        (self.wants_slots, self.is_slots_sent) = (false, false);
    }

    /// Begins a connection to the next of its addresses.
    pub fn connect(&mut self, now_ns: u64, settings: &Settings) -> Result<(), Fault> {
        let by_ns = now_ns.saturating_add(settings.connect_ns);
        let Address { host, port } = &self.address;
        let to = self.addresses.current(host, *port, now_ns)?;
        self.addresses.advance();
        self.connection = Some(Connection::begin(&to, host, by_ns, settings)?);
        Ok(())
    }

    /// Whether there is an address that has not been tried.
    pub fn has_other(&self) -> bool {
        self.addresses.has_other()
    }

    /// The connection can be used: the address it goes to is the first of the next attempt.
    pub fn connected(&mut self) {
        self.addresses.prefer_last();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::reconnect::{MAX_PAUSE_NS, PAUSE_NS};

    #[test]
    fn pauses_grow_and_end() {
        let mut node = Node::new(Address { host: "127.0.0.1".into(), port: 1 });
        assert!(node.is_well() && !node.is_wanted());
        assert_eq!(node.open_from(0, u64::MAX), Some(0));
        node.failed(0);
        assert_eq!(node.open_from(0, u64::MAX), Some(PAUSE_NS));
        assert_eq!(node.open_from(0, PAUSE_NS - 1), None);
        (0..40).for_each(|_| node.failed(0));
        assert!(!node.is_preferred(SHUN_NS - 1) && node.is_preferred(SHUN_NS));
        assert_eq!(node.open_from(0, u64::MAX), None);
        assert_eq!(node.open_from(MAX_PAUSE_NS, u64::MAX), Some(MAX_PAUSE_NS));
        node.did_well();
        assert_eq!(node.open_from(0, u64::MAX), Some(0));
        assert!(node.is_preferred(0));
        node.late(0);
        assert_eq!(node.open_from(0, u64::MAX), None, "nobody waits for that");
        assert_eq!(node.open_from(LATE_NS, u64::MAX), Some(LATE_NS));
        (0..9).for_each(|_| node.late(0));
        assert_eq!(node.open_from(MAX_LATE_NS, u64::MAX), Some(MAX_LATE_NS));
        node.did_well();
        // Only what lasts is said again.
        node.keep(&Fault::new(RemoteError::Timeout, ""));
        assert_eq!(node.refusal().error, RemoteError::Unreachable);
        node.keep(&Fault::new(RemoteError::Untrusted, "who is it?"));
        assert_eq!(node.refusal().message, "who is it?");
        node.did_well();
        assert_eq!(node.refusal().error, RemoteError::Unreachable);
    }
}
