//! Four processes with a store each on Redis servers that are killed, paused, failed over, filled,
//! and whose slots move; and hosts with a bad line between: no byte is wrong, no op outlives its
//! deadline, and once all is well what one has put the others find.

mod crew;
mod hosts;
mod line;
use kvtier_testkit::fixtures::redis;
mod reshard;
mod worker;

use std::thread::sleep;
use std::time::Duration;

use crew::{Crew, Told};
use redis::{Server, cluster, is_there, wait_until};
use reshard::reshard;

const PROCESSES: usize = 4;

fn remote(url: &str, more: &str) -> String {
    format!("redis(url=\"{url}\", timeout=200, connect=200, absent=50{more})")
}

fn pause() {
    sleep(Duration::from_millis(300));
}

/// From now on a server has no more memory than that.
fn limit(server: &Server, bytes: &str, policy: &str) {
    server.cli(&["config", "set", "maxmemory-policy", policy]);
    server.cli(&["config", "set", "maxmemory", bytes]);
}

/// After how many milliseconds nodes of a cluster believe that another is gone.
fn patience(nodes: &[Server], ms: &str) {
    for node in nodes {
        node.cli(&["config", "set", "cluster-node-timeout", ms]);
    }
}

fn is_master(node: &Server) -> bool {
    node.cli(&["role"]).starts_with("master")
}

#[test]
fn a_server_that_stops_dies_and_fills_up() {
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    let mut crew = Crew::start(PROCESSES, false);
    crew.open(24, |_| remote(&server.url(), ""));
    pause();
    // Who is refused does not write for a while: it is done with first.
    limit(&server, "3mb", "noeviction");
    pause();
    limit(&server, "5mb", "allkeys-lru");
    pause();
    server.pause();
    pause();
    server.go_on();
    pause();
    server.kill();
    pause();
    server.restart();
    pause();
    crew.end();
}

#[test]
fn a_cluster_whose_slots_move_and_whose_masters_go() {
    if !is_there() {
        return;
    }
    let mut crew = Crew::start(PROCESSES, false);
    let mut nodes = cluster();
    // Nobody takes over by himself while slots move, however slow the machine is.
    patience(&nodes, "60000");
    let (masters, replicas): (Vec<usize>, Vec<usize>) =
        (0..nodes.len()).partition(|&at| is_master(&nodes[at]));
    let url = nodes[0].url();
    let read = |at: usize| if at % 2 == 0 { "never" } else { "read" };
    crew.open(110, |at| remote(&url, &format!(", cluster=true, replicas={}", read(at))));
    let before = crew.counts();
    let (from, to) = (masters[0], masters[1]);
    reshard(&nodes, &masters, from, to);
    // It went on meanwhile, and everything is there.
    let went_on = |(after, before): (&Told, &Told)| after["fetched"] > before["fetched"];
    assert!(crew.counts().iter().zip(&before).all(went_on), "somebody stood still");
    crew.all("all");
    crew.all("work");
    // A third has no room, until it is told to hand over to one that has.
    limit(&nodes[masters[2]], "3mb", "noeviction");
    pause();
    let port = nodes[masters[2]].port.to_string();
    let heir = replicas.iter().find(|at| nodes[**at].cli(&["role"]).contains(&port));
    let heir = &nodes[*heir.expect("its replica")];
    assert_eq!(heir.cli(&["cluster", "failover"]), "OK");
    wait_until("it has taken over", || is_master(heir));
    limit(heir, "8mb", "allkeys-lru");
    // The one that has most stops, and dies.
    nodes[to].pause();
    pause();
    nodes[to].go_on();
    pause();
    patience(&nodes, "500");
    nodes[to].kill();
    wait_until("another has taken over", || {
        let others = (0..nodes.len()).filter(|at| *at != to);
        others.filter(|&at| is_master(&nodes[at])).count() == 3
    });
    nodes[to].restart();
    pause();
    wait_until("the cluster has all slots", || {
        nodes[0].cli(&["cluster", "info"]).contains("cluster_state:ok")
    });
    crew.end();
}
