//! A cluster: slots, redirections, and nodes that go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use kvtier_testkit::fixtures::redis::{Server, cluster, is_there, wait_until};

fn of(nodes: &[Server], seed: usize) -> RedisOpts {
    RedisOpts { cluster: true, ..opts(&nodes[seed].url()) }
}

fn is_master(node: &Server) -> bool {
    node.cli(&["role"]).starts_with("master")
}

fn masters(nodes: &[Server]) -> Vec<&Server> {
    nodes.iter().filter(|node| is_master(node)).collect()
}

fn owner<'a>(nodes: &[&'a Server], number: u64) -> &'a Server {
    let said = nodes[0].cli(&["get", &key(number)]);
    let moved = said.strip_prefix("MOVED ").and_then(|rest| rest.rsplit_once(':'));
    let port = moved.map_or(nodes[0].port, |(_, port)| port.parse().unwrap());
    nodes.iter().copied().find(|node| node.port == port).expect("its owner")
}

#[test]
fn a_cluster_is_one_remote() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    let masters = masters(&nodes);
    for node in &nodes {
        node.cli(&["config", "set", "cluster-node-timeout", "60000"]);
    }
    let slave = nodes.iter().position(|node| !is_master(node)).unwrap();
    let remote = open(&RedisOpts { wait: 1, ..of(&nodes, slave) });
    let mut lane = remote.lane();
    let said = lane.greet(at(LONG)).unwrap();
    assert!(said.words.ends_with("cluster"), "{said:?}");
    let items: Vec<_> = (0..300).map(|n| (n, bytes_of(n, 1 + n as usize * 500))).collect();
    let wanted: Vec<_> = items.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    assert!(put_in(&mut *lane, &items, LONG).iter().all(|put| *put == Ok(false)));
    let check = |lane: &mut dyn Lane| {
        let got = get_at(lane, &wanted, LONG);
        assert!(
            got.iter().zip(&items).all(|(got, item)| got.as_ref() == Ok(&item.1)),
            "{:?}",
            got.iter().filter_map(|got| got.as_ref().err()).collect::<Vec<_>>()
        );
    };
    check(&mut *lane);
    check(&mut *remote.lane());
    assert!(masters.iter().all(|node| node.cli(&["dbsize"]).parse::<u64>().unwrap() > 50));
    // Without cluster=true a node has its own part only, and says so.
    let mut alone = crate::redis::lane(&masters[0].url());
    assert!(alone.greet(at(LONG)).unwrap().warnings.iter().any(|w| w.contains("cluster=true")));
    let asked = ask(&mut *alone, &(0..300).collect::<Vec<_>>(), LONG);
    assert!(asked.iter().all(|ask| matches!(ask, Ok(_) | Err(Trouble::Later))));
    // A slot moves: what is not there yet is asked for where it goes.
    let from = owner(&masters, 7);
    let to = masters.iter().copied().find(|node| node.port != from.port).unwrap();
    let slot = from.cli(&["cluster", "keyslot", &key(7)]);
    let id = |node: &Server| node.cli(&["cluster", "myid"]);
    assert_eq!(to.cli(&["cluster", "setslot", &slot, "importing", &id(from)]), "OK");
    assert_eq!(from.cli(&["cluster", "setslot", &slot, "migrating", &id(to)]), "OK");
    check(&mut *lane);
    let port = to.port.to_string();
    assert_eq!(from.cli(&["migrate", "127.0.0.1", &port, &key(7), "0", "5000"]), "OK");
    check(&mut *lane);
    assert_eq!(put_one(&mut *lane, 7, 10), Ok(true));
    let mut asks = Asks::default();
    asks.name(name(7));
    lane.remove(&mut asks, at(LONG));
    assert!(asks.items[0].result.is_ok());
    assert_eq!(get_one(&mut *lane, 7, 10), Err(Trouble::Absent));
    assert_eq!(put_one(&mut *lane, 7, 1 + 7 * 500), Ok(false));
    check(&mut *lane);
    for node in [to, from].into_iter().chain(masters.iter().copied()) {
        assert_eq!(node.cli(&["cluster", "setslot", &slot, "node", &id(to)]), "OK");
    }
    assert_eq!(owner(&masters, 7).port, to.port);
    check(&mut *lane);
    std::thread::sleep(Duration::from_millis(150));
    check(&mut *lane);
    check(&mut *remote.lane());
}

#[test]
fn a_node_that_stops_costs_its_own_alone() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    let masters = masters(&nodes);
    for node in &nodes {
        node.cli(&["config", "set", "cluster-node-timeout", "60000"]);
    }
    let items: Vec<_> = (0..120).map(|n| (n, bytes_of(n, 20_000))).collect();
    let wanted: Vec<_> = (0..120).map(|n| (n, 0, 20_000)).collect();
    let mut lane = open(&of(&nodes, 0)).lane();
    assert!(put_in(&mut *lane, &items, LONG).iter().all(Result::is_ok));
    let lost: Vec<bool> =
        items.iter().map(|item| owner(&masters, item.0).port == masters[1].port).collect();
    masters[1].pause();
    let mut in_time = 0;
    for _ in 0..4 {
        let before = own_ns();
        let got = get_at(&mut *lane, &wanted, 500 * MS);
        // The machine may have had something else to do for once.
        in_time += u32::from(own_ns().saturating_sub(before) < 600 * MS);
        for ((got, item), lost) in got.into_iter().zip(&items).zip(&lost) {
            match lost {
                true => assert!(matches!(got, Err(Trouble::Late | Trouble::Gone)), "{}", item.0),
                false => assert!(got.as_ref() == Ok(&item.1), "{} {:?}", item.0, got.err()),
            }
        }
    }
    assert!(in_time >= 3, "{in_time} of 4 in time");
    // A fresh lane that begins with the one that has stopped, and another.
    let url = format!("{},127.0.0.1:{}", masters[1].url(), masters[0].port);
    let mut fresh = open(&RedisOpts { cluster: true, ..opts(&url) }).lane();
    let got = get_at(&mut *fresh, &wanted, 1500 * MS);
    assert_eq!(got.iter().map(Result::is_err).collect::<Vec<_>>(), lost);
    masters[1].go_on();
    std::thread::sleep(Duration::from_millis(600));
    let got = get_at(&mut *lane, &wanted, LONG);
    let wrong = got.iter().zip(&items).filter(|(got, item)| got.as_ref() != Ok(&item.1));
    let wrong: Vec<_> = wrong.map(|(got, item)| (item.0, got.as_ref().err())).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// What a thread does while nodes go: what was acknowledged, and how much was not.
fn load(remote: &Redis, thread: u64, is_over: &AtomicBool) -> (Vec<u64>, u64) {
    const DEADLINE: u64 = 1000 * MS;
    let mut lane = remote.lane();
    let (mut stored, mut refused) = (Vec::new(), 0);
    let mut next = thread * 1_000_000;
    while !is_over.load(Ordering::Relaxed) {
        let items: Vec<_> = (next..next + 16).map(|n| (n, bytes_of(n, 8192))).collect();
        next += 16;
        let before = own_ns();
        let put = put_in(&mut *lane, &items, DEADLINE);
        let took = own_ns().saturating_sub(before);
        assert!(took < DEADLINE + LATE, "stalled {} ms", took / MS);
        refused += put.iter().filter(|put| put.is_err()).count() as u64;
        stored
            .extend(items.iter().zip(&put).filter(|(_, put)| put.is_ok()).map(|(item, _)| item.0));
        let some: Vec<_> = stored.iter().rev().step_by(7).take(16).map(|&n| (n, 0, 8192)).collect();
        let before = own_ns();
        for (got, &(n, _, _)) in get_at(&mut *lane, &some, DEADLINE).into_iter().zip(&some) {
            assert!(got.is_err() || got == Ok(bytes_of(n, 8192)), "wrong bytes of {n}");
        }
        let took = own_ns().saturating_sub(before);
        assert!(took < DEADLINE + LATE, "stalled {} ms", took / MS);
        std::thread::sleep(Duration::from_millis(5));
    }
    (stored, refused)
}

#[test]
fn masters_go_under_load() {
    if !is_there() {
        return;
    }
    let mut nodes = cluster();
    let url = format!("{},127.0.0.1:{}", nodes[0].url(), nodes[5].port);
    let remote = open(&RedisOpts { cluster: true, wait: 1, ..opts(&url) });
    let is_over = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                scope.spawn({
                    let (remote, is_over) = (&remote, &is_over);
                    move || load(remote, thread, is_over)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(500));
        // One hands over.
        let slave = nodes.iter().find(|node| !is_master(node)).unwrap();
        assert_eq!(slave.cli(&["cluster", "failover"]), "OK");
        wait_until("it is a master", || is_master(slave));
        std::thread::sleep(Duration::from_millis(700));
        // One is killed.
        let follows =
            |node: &Server| node.cli(&["info", "replication"]).contains("connected_slaves:1");
        wait_until("all are followed", || masters(&nodes).into_iter().all(follows));
        let at = nodes.iter().position(is_master).unwrap();
        nodes[at].kill();
        let is_well = || {
            let others = nodes.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, node)| node);
            others.filter(|node| is_master(node)).count() == 3
        };
        wait_until("another has taken over", is_well);
        std::thread::sleep(Duration::from_millis(1500));
        nodes[at].restart();
        std::thread::sleep(Duration::from_millis(1500));
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let mut lane = remote.lane();
    let refused: u64 = told.iter().map(|told| told.1).sum();
    let stored: Vec<u64> = told.into_iter().flat_map(|told| told.0).collect();
    println!("{} acknowledged, {refused} not", stored.len());
    assert!(stored.len() > 1000 && refused > 0);
    for some in stored.chunks(64) {
        let wanted: Vec<_> = some.iter().map(|&n| (n, 0, 8192)).collect();
        for (got, &n) in get_at(&mut *lane, &wanted, LONG).into_iter().zip(some) {
            assert!(got == Ok(bytes_of(n, 8192)), "{n} was acknowledged: {:?}", got.err());
        }
    }
    // It takes new ones, on all nodes.
    let items: Vec<_> = (9_000_000..9_000_100).map(|n| (n, bytes_of(n, 100))).collect();
    let mut plain = open(&of(&nodes, 2)).lane();
    assert!(put_in(&mut *plain, &items, LONG).iter().all(Result::is_ok));
}
