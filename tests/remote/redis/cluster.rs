//! Redis Cluster: slots, redirections, and failed nodes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::replicas::reads;
use super::*;
use kvtier_testkit::fixtures::redis::{
    LONG_MS, Server, cluster, fail_over, is_master, is_there, patience, wait_until,
};

fn of(nodes: &[Server], seed: usize) -> RedisOpts {
    RedisOpts { cluster: true, ..opts(&nodes[seed].url()) }
}

fn masters(nodes: &[Server]) -> Vec<&Server> {
    nodes.iter().filter(|node| is_master(node)).collect()
}

fn owner<'a>(nodes: &[&'a Server], number: u64) -> &'a Server {
    let said = nodes[0].cli(&["get", &key(number)]);
    let moved = said.strip_prefix("MOVED ").and_then(|rest| rest.rsplit_once(':'));
    let port = moved.map_or(nodes[0].port, |(_, port)| port.parse().unwrap());
    nodes.iter().copied().find(|node| node.port == port).expect("the owner is a node")
}

#[test]
fn a_cluster_is_one_remote() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    let masters = masters(&nodes);
    let slave = nodes.iter().position(|node| !is_master(node)).unwrap();
    let remote = open(&RedisOpts { wait: 1, ..of(&nodes, slave) });
    let mut client = remote.client();
    let said = client.greet(at(LONG)).unwrap();
    assert!(said.words.ends_with("cluster"), "{said:?}");
    let items: Vec<_> = (0..300).map(|n| (n, bytes_of(n, 1 + n as usize * 500))).collect();
    let wanted: Vec<_> = items.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    assert!(put_in(&mut *client, &items, LONG).iter().all(|put| *put == Ok(false)));
    let check = |client: &mut dyn Client| {
        let got = get_at(client, &wanted, LONG);
        assert!(
            got.iter().zip(&items).all(|(got, item)| got.as_ref() == Ok(&item.1)),
            "{:?}",
            got.iter().filter_map(|got| got.as_ref().err()).collect::<Vec<_>>()
        );
    };
    check(&mut *client);
    check(&mut *remote.client());
    assert!(masters.iter().all(|node| node.cli(&["dbsize"]).parse::<u64>().unwrap() > 50));
    // Without cluster=true a client reads one node's slots only, and its greeting warns of it.
    let mut alone = crate::redis::client(&masters[0].url());
    assert!(alone.greet(at(LONG)).unwrap().warnings.iter().any(|w| w.contains("cluster=true")));
    let asked = lookup(&mut *alone, &(0..300).collect::<Vec<_>>(), LONG);
    assert!(asked.iter().all(|ask| matches!(ask, Ok(_) | Err(RemoteError::Busy))));
    // A slot migrates: its old node redirects requests for keys that it no longer has.
    let from = owner(&masters, 7);
    let to = masters.iter().copied().find(|node| node.port != from.port).unwrap();
    let slot = from.cli(&["cluster", "keyslot", &key(7)]);
    let id = |node: &Server| node.cli(&["cluster", "myid"]);
    assert_eq!(to.cli(&["cluster", "setslot", &slot, "importing", &id(from)]), "OK");
    assert_eq!(from.cli(&["cluster", "setslot", &slot, "migrating", &id(to)]), "OK");
    check(&mut *client);
    let port = to.port.to_string();
    assert_eq!(from.cli(&["migrate", "127.0.0.1", &port, &key(7), "0", "5000"]), "OK");
    check(&mut *client);
    assert_eq!(put_one(&mut *client, 7, 10), Ok(true));
    let mut queries = Queries::default();
    queries.name(name(7));
    client.remove(&mut queries, at(LONG));
    assert!(queries.items[0].result.is_ok());
    assert_eq!(get_one(&mut *client, 7, 10), Err(RemoteError::Absent));
    assert_eq!(put_one(&mut *client, 7, 1 + 7 * 500), Ok(false));
    check(&mut *client);
    for node in [to, from].into_iter().chain(masters.iter().copied()) {
        assert_eq!(node.cli(&["cluster", "setslot", &slot, "node", &id(to)]), "OK");
    }
    assert_eq!(owner(&masters, 7).port, to.port);
    check(&mut *client);
    std::thread::sleep(Duration::from_millis(150));
    check(&mut *client);
    check(&mut *remote.client());
}

/// Whether no bytes are pending on connections of these servers, in either direction.
fn is_quiet(servers: &[&Server]) -> bool {
    // "obl" and "oll": bytes and buffers of unsent replies. Connections to replicas are skipped:
    // they count buffers that they share.
    let is_sent = |server: &&Server| {
        let clients = server.cli(&["client", "list"]);
        let mut others = clients.lines().filter(|line| !line.contains(" flags=S "));
        others.all(|line| line.contains(" obl=0 ") && line.contains(" oll=0 "))
    };
    let is_received = || {
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let port = |address: &str| u16::from_str_radix(&address[address.len() - 4..], 16).unwrap();
        sockets.lines().skip(1).all(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let is_of = |server: &&Server| words[1..3].iter().any(|at| port(at) == server.port);
            // State 01 = established; then the numbers of unsent and of unread bytes.
            words[3] != "01" || !servers.iter().any(is_of) || words[4] == "00000000:00000000"
        })
    };
    servers.iter().all(is_sent) && is_received()
}

/// Whether a thread of this process sleeps in a system call.
fn is_asleep(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
}

/// Runs `body` on a manual clock. Its deadline passes once these servers have read `objects`
/// objects for it, and it waits for other servers only.
fn with_others_late<T: Send>(
    clock: &Clock,
    ns: u64,
    (servers, objects): (&[&Server], u64),
    body: impl FnOnce() -> T + Send,
) -> T {
    let count = || servers.iter().map(|server| reads(server)).sum::<u64>();
    let before = count();
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let thread = scope.spawn(move || {
            // SAFETY: the call takes no pointers and returns a number.
            tell.send(unsafe { libc::gettid() }).unwrap();
            body()
        });
        let number = told.recv().unwrap();
        // Checked in the order of events: the read is counted, its reply is sent and received,
        // and the thread sleeps again.
        wait_until("the others have answered", || {
            thread.is_finished()
                || count() >= before + objects && is_quiet(servers) && is_asleep(number)
        });
        assert!(!thread.is_finished(), "it ended before its deadline");
        clock.advance(ns);
        thread.join().unwrap()
    })
}

#[test]
fn paused_node_fails_only_its_own_objects() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    let masters = masters(&nodes);
    let items: Vec<_> = (0..120).map(|n| (n, bytes_of(n, 20_000))).collect();
    let wanted: Vec<_> = (0..120).map(|n| (n, 0, 20_000)).collect();
    // Only the test advances the clock: a slow machine misses no deadline.
    let clock = Clock::manual(1);
    let lane_of = |opts: &RedisOpts| Redis::open(opts, clock.clone()).expect("opened").client();
    let by = |ns: u64| clock.now_ns() + ns;
    let mut client = lane_of(&of(&nodes, 0));
    assert!(put_by(&mut *client, &items, || by(LONG)).iter().all(Result::is_ok));
    let lost: Vec<bool> =
        items.iter().map(|item| owner(&masters, item.0).port == masters[1].port).collect();
    let others = [masters[0], masters[2]];
    let others = (&others[..], lost.iter().filter(|lost| !**lost).count() as u64);
    masters[1].pause();
    for round in 0..4 {
        // The first round costs a timeout. After it the client skips the node for a while.
        let got = match round {
            0 => with_others_late(&clock, 500 * MS, others, || {
                get_by(&mut *client, &wanted, || by(500 * MS))
            }),
            _ => get_by(&mut *client, &wanted, || by(500 * MS)),
        };
        for ((got, item), lost) in got.into_iter().zip(&items).zip(&lost) {
            match lost {
                true => assert!(
                    matches!(got, Err(RemoteError::Timeout | RemoteError::Unreachable)),
                    "{}",
                    item.0
                ),
                false => assert!(got.as_ref() == Ok(&item.1), "{} {:?}", item.0, got.err()),
            }
        }
    }
    // A fresh client with two seeds: the paused node, then another one.
    let url = format!("{},127.0.0.1:{}", masters[1].url(), masters[0].port);
    let mut fresh = lane_of(&RedisOpts { cluster: true, ..opts(&url) });
    let got = with_others_late(&clock, 1500 * MS, others, || {
        get_by(&mut *fresh, &wanted, || by(1500 * MS))
    });
    assert_eq!(got.iter().map(Result::is_err).collect::<Vec<_>>(), lost);
    masters[1].go_on();
    // The longest pause before a failed node is tried again.
    clock.advance(8001 * MS);
    let got = get_by(&mut *client, &wanted, || by(LONG));
    let wrong = got.iter().zip(&items).filter(|(got, item)| got.as_ref() != Ok(&item.1));
    let wrong: Vec<_> = wrong.map(|(got, item)| (item.0, got.as_ref().err())).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Counters of a thread under load: objects that were acknowledged, and objects that were not.
#[derive(Default)]
struct Load {
    stored: AtomicU64,
    refused: AtomicU64,
}

impl Load {
    /// Stores and reads objects until `is_over`. Returns those that were acknowledged.
    fn run(&self, remote: &Redis, thread: u64, is_over: &AtomicBool) -> Vec<u64> {
        const DEADLINE: u64 = 1000 * MS;
        let mut client = remote.client();
        let mut stored: Vec<u64> = Vec::new();
        let mut next = thread * 1_000_000;
        while !is_over.load(Ordering::Relaxed) {
            let items: Vec<_> = (next..next + 16).map(|n| (n, bytes_of(n, 8192))).collect();
            next += 16;
            let put = ends(|| put_in(&mut *client, &items, DEADLINE));
            let well = items.iter().zip(&put).filter(|(_, put)| put.is_ok());
            stored.extend(well.map(|(item, _)| item.0));
            let refused = put.iter().filter(|put| put.is_err()).count() as u64;
            self.refused.fetch_add(refused, Ordering::Relaxed);
            self.stored.store(stored.len() as u64, Ordering::Relaxed);
            let some: Vec<_> =
                stored.iter().rev().step_by(7).take(16).map(|&n| (n, 0, 8192)).collect();
            let got = ends(|| get_at(&mut *client, &some, DEADLINE));
            for (got, &(n, _, _)) in got.into_iter().zip(&some) {
                assert!(got.is_err() || got == Ok(bytes_of(n, 8192)), "wrong bytes of {n}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        stored
    }
}

/// Waits until a counter of each thread has grown by `more`.
fn wait_for_more(what: &str, loads: &[Load], of: impl Fn(&Load) -> &AtomicU64, more: u64) {
    let now = |load: &Load| of(load).load(Ordering::Relaxed);
    let before: Vec<u64> = loads.iter().map(now).collect();
    wait_until(what, || {
        loads.iter().zip(&before).all(|(load, &before)| now(load) >= before + more)
    });
}

#[test]
fn acknowledged_objects_survive_master_failover() {
    if !is_there() {
        return;
    }
    let mut nodes = cluster();
    let url = format!("{},127.0.0.1:{}", nodes[0].url(), nodes[5].port);
    let remote = open(&RedisOpts { cluster: true, wait: 1, ..opts(&url) });
    let is_over = AtomicBool::new(false);
    let loads: [Load; 3] = Default::default();
    let stores = |what: &str, more| wait_for_more(what, &loads, |load| &load.stored, more);
    let stored: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = loads
            .iter()
            .zip(0..)
            .map(|(load, thread)| {
                let (remote, is_over) = (&remote, &is_over);
                scope.spawn(move || load.run(remote, thread, is_over))
            })
            .collect();
        stores("all store at the beginning", 200);
        // A master hands over to its replica.
        let slave = nodes.iter().find(|node| !is_master(node)).unwrap();
        fail_over(slave);
        stores("all store after the failover", 200);
        let follows =
            |node: &Server| node.cli(&["info", "replication"]).contains("connected_slaves:1");
        wait_until("all masters have a replica", || masters(&nodes).into_iter().all(follows));
        // A master is killed. No replica takes over before a put of every thread has failed.
        let at = nodes.iter().position(is_master).unwrap();
        nodes[at].kill();
        wait_for_more("a put of each fails", &loads, |load| &load.refused, 1);
        let alive = || nodes.iter().enumerate().filter(|(n, _)| *n != at).map(|(_, node)| node);
        alive().for_each(|node| patience(std::slice::from_ref(node), "1000"));
        let is_well = || alive().filter(|node| is_master(node)).count() == 3;
        wait_until("a replica has taken over", is_well);
        alive().for_each(|node| patience(std::slice::from_ref(node), LONG_MS));
        stores("all store without the killed node", 16);
        nodes[at].restart();
        stores("all store with the restarted node", 16);
        is_over.store(true, Ordering::Relaxed);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut client = remote.client();
    let refused: u64 = loads.iter().map(|load| load.refused.load(Ordering::Relaxed)).sum();
    println!("{} acknowledged, {refused} not", stored.len());
    assert!(stored.len() > 1000 && refused > 0);
    for some in stored.chunks(64) {
        let wanted: Vec<_> = some.iter().map(|&n| (n, 0, 8192)).collect();
        for (got, &n) in get_at(&mut *client, &wanted, LONG).into_iter().zip(some) {
            assert!(got == Ok(bytes_of(n, 8192)), "{n} was acknowledged: {:?}", got.err());
        }
    }
    // All nodes accept new objects.
    let items: Vec<_> = (9_000_000..9_000_100).map(|n| (n, bytes_of(n, 100))).collect();
    let mut plain = open(&of(&nodes, 2)).client();
    assert!(put_in(&mut *plain, &items, LONG).iter().all(Result::is_ok));
}
