//! A server as a client sees it: its addresses, its connection, its queue.

use std::collections::VecDeque;

use crate::tier::remote::RemoteError;
use crate::tier::remote::fault::Fault;
use crate::tier::remote::reconnect::{Addresses, Backoff};
use crate::tier::remote::redis::Settings;
use crate::tier::remote::redis::connection::{Connection, Task};
use crate::tier::remote::redis::url::Address;

/// First pause of a cluster node that did not answer in time; it doubles each time. A batch that
/// waits for such a node costs its whole timeout, and replicas take over meanwhile.
const LATE_NS: u64 = 1_000_000_000;
const MAX_LATE_NS: u64 = 8_000_000_000;
/// After a failure, reads prefer other nodes for this long.
const SHUN_NS: u64 = 5_000_000_000;

/// A server.
pub struct Node {
    /// Host and port.
    pub address: Address,
    pub connection: Option<Connection>,
    /// Items to send.
    pub queue: VecDeque<Task>,
    /// It must report the slots.
    pub wants_slots: bool,
    /// CLUSTER SLOTS was sent to it.
    pub is_slots_sent: bool,
    /// A connection was ready before.
    pub was_connected: bool,
    /// Connections lost in this batch.
    pub faults: u32,
    /// Timeouts in a row.
    timeouts: u32,
    backoff: Backoff,
    addresses: Addresses,
    shunned_ns: u64,
    /// Why it rejects this client. While it pauses, this reason is reported instead of the pause.
    denial: Option<Fault>,
}

impl Node {
    /// A server without a connection.
    pub fn new(address: Address) -> Node {
        Node {
            address,
            connection: None,
            queue: VecDeque::new(),
            wants_slots: false,
            is_slots_sent: false,
            was_connected: false,
            faults: 0,
            timeouts: 0,
            backoff: Backoff::default(),
            addresses: Addresses::default(),
            shunned_ns: 0,
            denial: None,
        }
    }

    /// Whether something is to be sent to it.
    pub fn is_wanted(&self) -> bool {
        !self.queue.is_empty() || self.wants_slots
    }

    /// Whether its last use succeeded.
    pub fn is_well(&self) -> bool {
        self.backoff.is_well()
    }

    /// Whether a read should try it although another node could serve the read.
    pub fn is_preferred(&self, now_ns: u64) -> bool {
        self.is_well() || now_ns >= self.shunned_ns
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.backoff.succeeded();
        self.timeouts = 0;
        self.denial = None;
    }

    /// Keeps the reason of a failure that will last.
    pub fn record(&mut self, fault: &Fault) {
        let lasts = matches!(fault.error, RemoteError::Denied | RemoteError::Untrusted);
        self.denial = lasts.then(|| fault.clone());
    }

    /// The fault of items while no connection is allowed.
    pub fn refusal(&self) -> Fault {
        let unreachable = || Fault::unreachable("it could not be reached a moment ago");
        self.denial.clone().unwrap_or_else(unreachable)
    }

    /// Records a failure: no connection for a while.
    pub fn failed(&mut self, now_ns: u64) {
        self.backoff.failed(now_ns);
        self.shunned_ns = now_ns.saturating_add(SHUN_NS);
        self.addresses.restart();
    }

    /// Records that a cluster node did not answer in time: no connection for a while.
    pub fn timed_out(&mut self, now_ns: u64) {
        self.failed(now_ns);
        let pause = LATE_NS.saturating_mul(1 << self.timeouts.min(16)).min(MAX_LATE_NS);
        self.timeouts = self.timeouts.saturating_add(1);
        self.backoff.pause_until(now_ns.saturating_add(pause));
        self.reset();
    }

    /// When a connection is allowed; None = later than a batch waits.
    pub fn open_from(&self, now_ns: u64, deadline_ns: u64) -> Option<u64> {
        self.backoff.open_from(now_ns, deadline_ns)
    }

    /// Drops the connection; the next one is opened to the first address.
    pub fn reset(&mut self) {
        self.connection = None;
        self.addresses.restart();
        (self.wants_slots, self.is_slots_sent) = (false, false);
    }

    /// Begins a connection to the next address.
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

    /// Records that the connection is ready: the next attempt begins with its address.
    pub fn connected(&mut self) {
        self.addresses.prefer_last();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::remote::reconnect::{MAX_PAUSE_NS, PAUSE_NS};

    #[test]
    fn pauses_grow_and_end_with_a_success() {
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
        node.succeeded();
        assert_eq!(node.open_from(0, u64::MAX), Some(0));
        assert!(node.is_preferred(0));
        node.timed_out(0);
        assert_eq!(node.open_from(0, u64::MAX), None, "no connection is opened for that");
        assert_eq!(node.open_from(LATE_NS, u64::MAX), Some(LATE_NS));
        (0..9).for_each(|_| node.timed_out(0));
        assert_eq!(node.open_from(MAX_LATE_NS, u64::MAX), Some(MAX_LATE_NS));
        node.succeeded();
        // Only lasting reasons are repeated.
        node.record(&Fault::new(RemoteError::Timeout, ""));
        assert_eq!(node.refusal().error, RemoteError::Unreachable);
        node.record(&Fault::new(RemoteError::Untrusted, "who is it?"));
        assert_eq!(node.refusal().message, "who is it?");
        node.succeeded();
        assert_eq!(node.refusal().error, RemoteError::Unreachable);
    }
}
