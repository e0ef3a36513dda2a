//! Slots that move from one master to another while stores read and write their keys.

use std::collections::BTreeSet;

use kvtier_testkit::fixtures::redis::{Server, Wire, wait_until};

/// Number of slots that migrate at a time.
const BATCH: usize = 60;

/// Numbers of redirections by all nodes: `MOVED` and `ASK`.
fn sent_away(wires: &mut [Wire]) -> (u64, u64) {
    let count = |said: &str, what: &str| {
        let of = said.lines().find_map(|line| line.strip_prefix(what));
        of.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let of = |wire: &mut Wire| {
        let said = wire.query(&["INFO errorstats".to_string()]).concat().concat();
        (count(&said, "errorstat_MOVED:count="), count(&said, "errorstat_ASK:count="))
    };
    wires.iter_mut().map(of).fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1))
}

fn keys(node: &Server) -> u64 {
    node.cli(&["dbsize"]).parse().expect("a number")
}

/// One line for each item.
fn lines(of: &[String], say: impl Fn(&str) -> String) -> Vec<String> {
    of.iter().map(|it| say(it)).collect()
}

/// Moves all slots that hold anything from one of the masters to another, as an administrator
/// does. Each batch causes at least one `ASK` and one `MOVED` redirection. Runs `meanwhile` once,
/// while the first slots migrate.
pub fn reshard(
    nodes: &[Server],
    masters: &[usize],
    from: usize,
    to: usize,
    meanwhile: impl FnOnce(),
) {
    let mut meanwhile = Some(meanwhile);
    let all = || masters.iter().map(|&at| keys(&nodes[at])).sum::<u64>();
    let before = all();
    let id = |at: usize| nodes[at].cli(&["cluster", "myid"]);
    let (old, new) = (id(from), id(to));
    let mut wires: Vec<Wire> = nodes.iter().map(|node| Wire::open(node.port)).collect();
    let names = wires[from].query(&["KEYS *".to_string()]).concat();
    let slots =
        wires[from].query(&lines(&names, |name| format!("CLUSTER KEYSLOT {name}"))).concat();
    let slots: Vec<String> = slots.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
    let mut last = sent_away(&mut wires);
    for batch in slots.chunks(BATCH) {
        let set = |what: &str| lines(batch, |slot| format!("CLUSTER SETSLOT {slot} {what}"));
        wires[to].done(&set(&format!("IMPORTING {old}")));
        wires[from].done(&set(&format!("MIGRATING {new}")));
        let list = lines(batch, |slot| format!("CLUSTER GETKEYSINSLOT {slot} 1000"));
        let names = wires[from].query(&list);
        let port = nodes[to].port;
        let go = |names: &Vec<String>| {
            format!("MIGRATE 127.0.0.1 {port} \"\" 0 5000 KEYS {}", names.join(" "))
        };
        wires[from].done(&names.iter().map(go).collect::<Vec<_>>());
        wait_until("a client is redirected by ASK", || sent_away(&mut wires).1 > last.1);
        if let Some(meanwhile) = meanwhile.take() {
            meanwhile();
        }
        // The new owner of a slot learns of it first: a slot must never be without an owner.
        let others = masters.iter().filter(|at| ![from, to].contains(at)).copied();
        for at in [to, from].into_iter().chain(others) {
            wires[at].done(&set(&format!("NODE {new}")));
        }
        wait_until("a client is redirected by MOVED", || sent_away(&mut wires).0 > last.0);
        last = sent_away(&mut wires);
    }
    println!("{} slots moved, {} keys; sent away: {last:?}", slots.len(), names.len());
    assert!(slots.len() > 100, "{}: too few slots", slots.len());
    assert_eq!(keys(&nodes[from]), 0, "all its keys have moved");
    assert_eq!(all(), before, "no key was lost or duplicated");
}
