//! The slots of a cluster: a hash of the key selects one of 16,384 slots, and a node has each slot.

use crate::base::sync::{Arc, Mutex};
use crate::tier::remote::redis::resp::Value;
use crate::tier::remote::redis::url::Address;

/// Slots of a cluster.
pub const SLOTS: usize = 16384;
/// Most nodes of a cluster.
pub const MAX_NODES: usize = 1024;
/// Longest reply to CLUSTER SLOTS.
pub const MAX_REPLY_BYTES: usize = 16 << 20;
/// Least time between two requests for the slots.
const REFRESH_NS: u64 = 100_000_000;
const NOBODY: u16 = u16::MAX;

const CRC: [u16; 256] = table();

/// The node of each slot.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotMap {
    /// All nodes, replicas included.
    pub nodes: Vec<Address>,
    of: Vec<u16>,
    /// The replicas of each master, by their indices.
    followers: Vec<Vec<u16>>,
}

/// The slot map that all clients of a remote share.
pub struct SlotCache(Mutex<Known>);

struct Known {
    slots: Option<Arc<SlotMap>>,
    is_stale: bool,
    asked_ns: u64,
}

impl SlotMap {
    /// Reads the reply of the node `peer` to CLUSTER SLOTS; None = it is malformed.
    pub fn read(reply: &Value, peer: &Address) -> Option<SlotMap> {
        let mut slots =
            SlotMap { nodes: Vec::new(), of: vec![NOBODY; SLOTS], followers: Vec::new() };
        for run in reply.list()? {
            let [Value::Number(first), Value::Number(last), nodes @ ..] = run.list()? else {
                return None;
            };
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            let mut master = None;
            for (rank, node) in nodes.iter().enumerate() {
                let Some(node) = address(node, peer) else {
                    // Slots of a node without an address have no node.
                    continue;
                };
                let number = slots.node(node)?;
                if rank == 0 {
                    slots.of.get_mut(first..=last)?.fill(number);
                    master = Some(usize::from(number));
                } else if let Some(master) = master {
                    slots.follow(number, master);
                }
            }
        }
        (!slots.nodes.is_empty()).then_some(slots)
    }

    /// The index of the node that has a slot.
    pub fn node_of(&self, slot: usize) -> Option<usize> {
        self.of.get(slot).filter(|&&node| node != NOBODY).map(|&node| usize::from(node))
    }

    /// The indices of a node's replicas.
    pub fn followers_of(&self, node: usize) -> &[u16] {
        self.followers.get(node).map_or(&[], Vec::as_slice)
    }

    /// Whether a replica is known.
    pub fn has_followers(&self) -> bool {
        self.followers.iter().any(|followers| !followers.is_empty())
    }

    fn follow(&mut self, node: u16, master: usize) {
        if self.followers.len() <= master {
            self.followers.resize(master + 1, Vec::new());
        }
        if !self.followers[master].contains(&node) {
            self.followers[master].push(node);
        }
    }

    fn node(&mut self, node: Address) -> Option<u16> {
        // Consecutive ranges mostly name the same nodes.
        if let Some(at) = self.nodes.iter().rposition(|known| *known == node) {
            return u16::try_from(at).ok();
        }
        if self.nodes.len() >= MAX_NODES {
            return None;
        }
        self.nodes.push(node);
        u16::try_from(self.nodes.len() - 1).ok()
    }
}

impl Default for SlotCache {
    fn default() -> SlotCache {
        SlotCache(Mutex::new(Known { slots: None, is_stale: false, asked_ns: 0 }))
    }
}

impl SlotCache {
    /// The latest slot map.
    pub fn get(&self) -> Option<Arc<SlotMap>> {
        self.0.lock().slots.clone()
    }

    /// Records that a reply contradicted the map.
    pub fn doubt(&self) {
        self.0.lock().is_stale = true;
    }

    /// Whether the caller must request the slots: the map is doubted or older than `most_ns`, and
    /// no client has sent a request just now.
    pub fn claim(&self, now_ns: u64, most_ns: u64) -> bool {
        let mut known = self.0.lock();
        let age_ns = now_ns.saturating_sub(known.asked_ns);
        let is_due = age_ns >= if known.is_stale { REFRESH_NS } else { most_ns };
        if is_due {
            known.asked_ns = now_ns;
        }
        is_due
    }

    /// Replaces the slot map.
    pub fn put(&self, slots: Arc<SlotMap>) {
        let mut known = self.0.lock();
        known.slots = Some(slots);
        known.is_stale = false;
    }
}

/// The slot of a key: the hash of the text between its first `{` and the next `}` unless that is
/// empty, else of the whole key.
pub fn slot_of(key: &[u8]) -> usize {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|&byte| byte == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    usize::from(crc(tag.unwrap_or(key))) % SLOTS
}

fn address(node: &Value, peer: &Address) -> Option<Address> {
    let [host, Value::Number(port), ..] = node.list()? else { return None };
    let host = match host {
        Value::Nil => &peer.host,
        host => std::str::from_utf8(host.text()?).ok()?,
    };
    Address::of_node(format!("{host}:{port}").as_bytes(), peer)
}

/// CRC16, polynomial 0x1021, initial value 0.
fn crc(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, &byte| crc << 8 ^ CRC[usize::from((crc >> 8) as u8 ^ byte)])
}

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut at = 0;
    while at < 256 {
        let (mut crc, mut bit) = ((at as u16) << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[at] = crc;
        at += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: &str, port: i64) -> Value {
        Value::List(vec![Value::Text(host.into()), Value::Number(port), Value::Text("id".into())])
    }

    fn run(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        Value::List([vec![Value::Number(first), Value::Number(last)], nodes].concat())
    }

    #[test]
    fn key_slots_match_the_server() {
        assert_eq!(crc(b"123456789"), 0x31c3);
        // As `CLUSTER KEYSLOT` reports.
        for (key, slot) in [("foo", 12182), ("", 0), ("{foo}bar", 12182), ("a{foo}{b}", 12182)] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        assert_eq!(slot_of(b"{}foo"), usize::from(crc(b"{}foo")) % SLOTS);
        assert_eq!(slot_of(b"{foo"), usize::from(crc(b"{foo")) % SLOTS);
    }

    #[test]
    fn slot_maps_are_parsed_and_malformed_ones_rejected() {
        let peer = Address { host: "me".into(), port: 1 };
        let reply = Value::List(vec![
            run(0, 99, vec![node("a", 1), node("b", 2)]),
            run(100, 16383, vec![node("", 3)]),
        ]);
        let slots = SlotMap::read(&reply, &peer).unwrap();
        assert_eq!(slots.nodes.len(), 3);
        assert_eq!(slots.nodes[slots.node_of(99).unwrap()].port, 1);
        assert_eq!((slots.followers_of(0), slots.followers_of(1)), (&[1][..], &[][..]));
        assert_eq!((slots.followers_of(2), slots.followers_of(9)), (&[][..], &[][..]));
        assert_eq!(
            slots.nodes[slots.node_of(100).unwrap()],
            Address { host: "me".into(), port: 3 }
        );
        assert_eq!(slots.node_of(SLOTS), None);
        for bad in [
            Value::Nil,
            Value::List(Vec::new()),
            Value::List(vec![Value::Nil]),
            Value::List(vec![run(0, 16384, vec![node("a", 1)])]),
            Value::List(vec![run(-1, 5, vec![node("a", 1)])]),
            Value::List(vec![run(9, 5, vec![node("a", 1)])]),
            Value::List(vec![run(0, 5, vec![node("a", 99999)])]),
            Value::List((0..2000).map(|n| run(0, 5, vec![node("a", n + 1)])).collect()),
        ] {
            assert_eq!(SlotMap::read(&bad, &peer), None);
        }
    }

    #[cfg(not(feature = "shuttle"))]
    #[test]
    fn one_client_requests_the_slots_for_all() {
        let map = SlotCache::default();
        let claim = |now_ns| map.claim(now_ns, u64::MAX);
        assert!(!claim(REFRESH_NS));
        map.doubt();
        assert!(claim(REFRESH_NS) && !claim(REFRESH_NS * 2 - 1));
        assert!(claim(REFRESH_NS * 2));
        let slots = SlotMap { nodes: Vec::new(), of: Vec::new(), followers: Vec::new() };
        map.put(Arc::new(slots));
        assert!(map.get().is_some() && !claim(REFRESH_NS * 9));
        // A map that ages.
        let claim = |now_ns| map.claim(now_ns, REFRESH_NS * 5);
        assert!(!claim(REFRESH_NS * 7 - 1) && claim(REFRESH_NS * 7) && !claim(REFRESH_NS * 7));
    }
}
