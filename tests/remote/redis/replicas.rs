//! Reads from the replicas of a cluster.

use kvtier::tier::remote::Tally;

use super::*;
use kvtier_testkit::fixtures::redis::{Server, cluster, is_master, is_there, wait_until};

/// Writes to all masters, and waits until every node names all nodes: `CLUSTER SLOTS` omits a
/// replica that has received no data.
fn begin(nodes: &[Server]) {
    let items: Vec<_> = (100_000..100_040).map(|n| (n, bytes_of(n, 10))).collect();
    let mut client = open(&RedisOpts { cluster: true, ..opts(&nodes[0].url()) }).client();
    assert!(put_in(&mut *client, &items, LONG).iter().all(Result::is_ok));
    let names_all = |node: &Server| {
        let said = node.cli(&["cluster", "slots"]);
        nodes.iter().all(|node| said.lines().any(|line| line == node.port.to_string()))
    };
    wait_until("all nodes are named", || nodes.iter().all(names_all));
}

/// Number of reads of objects that a node has served.
pub fn reads(node: &Server) -> u64 {
    let said = node.cli(&["info", "commandstats"]);
    let calls = |what: &str| {
        let of = said.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(":calls="));
        of.and_then(|rest| rest.split(',').next()?.parse::<u64>().ok()).unwrap_or(0)
    };
    ["cmdstat_get", "cmdstat_getrange", "cmdstat_strlen"].into_iter().map(calls).sum()
}

#[test]
fn replica_miss_is_retried_at_the_master() {
    if !is_there() {
        return;
    }
    let nodes = cluster();
    begin(&nodes);
    let (masters, followers): (Vec<&Server>, Vec<&Server>) =
        nodes.iter().partition(|node| is_master(node));
    let with = |replicas: bool| {
        open(&RedisOpts { cluster: true, replicas, wait: 1, ..opts(&nodes[0].url()) })
    };
    let remote = with(true);
    assert_eq!(remote.tally(), Tally::default());
    let mut client = remote.client();
    let items: Vec<_> = (0..120).map(|n| (n, bytes_of(n, 1 + n as usize * 700))).collect();
    let wanted: Vec<_> = items.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    let numbers: Vec<u64> = (0..120).collect();
    assert!(put_in(&mut *client, &items, LONG).iter().all(|put| *put == Ok(false)));
    let check = |client: &mut dyn Client| {
        let got = get_at(client, &wanted, LONG);
        let is_right = got.iter().zip(&items).all(|(got, item)| got.as_ref() == Ok(&item.1));
        assert!(is_right);
        assert!(lookup(client, &numbers, LONG).iter().all(Result::is_ok));
    };
    let sum = |of: &[&Server]| of.iter().map(|node| reads(node)).sum::<u64>();
    let before = (sum(&masters), sum(&followers));
    check(&mut *client);
    // The replicas had every object: no master was read.
    assert_eq!((sum(&masters) - before.0, sum(&followers) - before.1), (0, 240));
    assert_eq!(remote.tally().retries, 0);
    // A miss at a replica is not final. From here on the replicas are cut off from their masters.
    for follower in &followers {
        assert_eq!(follower.cli(&["config", "set", "masterauth", "wrong"]), "OK");
        assert_eq!(follower.cli(&["config", "set", "masteruser", "nobody"]), "OK");
    }
    for master in &masters {
        master.cli(&["client", "kill", "type", "replica"]);
    }
    let is_cut =
        |node: &&Server| node.cli(&["info", "replication"]).contains("master_link_status:down");
    wait_until("all replicas are cut off", || followers.iter().all(is_cut));
    let more: Vec<_> = (500..540).map(|n| (n, bytes_of(n, 3000))).collect();
    let others = open(&RedisOpts { cluster: true, ..opts(&nodes[0].url()) });
    assert!(put_in(&mut *others.client(), &more, LONG).iter().all(|put| *put == Ok(false)));
    let late: Vec<_> = more.iter().map(|(n, bytes)| (*n, 0, bytes.len())).collect();
    let got = get_at(&mut *client, &late, LONG);
    assert!(got.iter().zip(&more).all(|(got, item)| got.as_ref() == Ok(&item.1)), "{got:.60?}");
    let late: Vec<u64> = more.iter().map(|item| item.0).collect();
    assert!(lookup(&mut *client, &late, LONG).iter().all(|ask| *ask == Ok(3000)));
    assert!(remote.tally().retries >= 40, "{:?}", remote.tally());
    // An object that no node has is absent: a master confirms it.
    let none: Vec<u64> = (900..930).collect();
    assert!(lookup(&mut *client, &none, LONG).iter().all(|ask| *ask == Err(RemoteError::Absent)));
    let tally = remote.tally();
    assert!((4..=12).contains(&tally.connections) && tally.refreshes > 0, "{tally:?}");
    // Without reads from replicas, only masters are read.
    let before = (sum(&masters), sum(&followers));
    check(&mut *with(false).client());
    assert_eq!((sum(&masters) - before.0, sum(&followers) - before.1), (240, 0));
}

#[test]
fn reads_fall_back_to_masters_when_replicas_die() {
    if !is_there() {
        return;
    }
    let mut nodes = cluster();
    begin(&nodes);
    let seed = nodes.iter().position(is_master).unwrap();
    let all = RedisOpts { cluster: true, replicas: true, wait: 1, ..opts(&nodes[seed].url()) };
    let remote = open(&all);
    let mut client = remote.client();
    let items: Vec<_> = (0..60).map(|n| (n, bytes_of(n, 20_000))).collect();
    let wanted: Vec<_> = (0..60).map(|n| (n, 0, 20_000)).collect();
    assert!(put_in(&mut *client, &items, LONG).iter().all(Result::is_ok));
    let is_right = |client: &mut dyn Client| {
        let got = get_at(client, &wanted, LONG);
        got.iter().zip(&items).all(|(got, item)| got.as_ref() == Ok(&item.1))
    };
    assert!(is_right(&mut *client));
    // The replicas die: connections end, and new ones are refused.
    let followers: Vec<usize> = (0..6).filter(|&n| !is_master(&nodes[n])).collect();
    followers.iter().for_each(|&n| nodes[n].kill());
    for _ in 0..3 {
        assert!(is_right(&mut *client) && is_right(&mut *remote.client()));
    }
    assert!(remote.tally().retries >= 60, "{:?}", remote.tally());
    let before = remote.tally().reconnects;
    followers.iter().for_each(|&n| nodes[n].restart());
    wait_until("the replicas follow again", || {
        let follows =
            |n: &usize| nodes[*n].cli(&["info", "replication"]).contains("link_status:up");
        followers.iter().all(follows)
    });
    // After a pause the client tries the replicas again.
    wait_until("the replicas are tried again", || {
        assert!(is_right(&mut *client));
        remote.tally().reconnects != before
    });
    assert!(is_right(&mut *client));
}
