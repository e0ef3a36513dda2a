//! Four processes with a store each on Redis servers that are killed, paused, failed over, filled,
//! and whose slots move; and hosts with a lossy network between them. No byte is wrong, and no op
//! outlives its deadline. After recovery each process finds KV that another one put.

mod crew;
mod hosts;
mod line;
use kvtier_testkit::fixtures::redis;
mod reshard;
mod worker;

use crew::{Crew, Told};
use redis::{LONG_MS, Server, cluster, fail_over, is_master, is_there, patience, wait_until};
use reshard::reshard;

const PROCESSES: usize = 4;

fn remote(url: &str, more: &str) -> String {
    format!("redis(url=\"{url}\", timeout=500, connect=500, absent=50{more})")
}

/// Turns of each process in every state of the servers.
const TURNS: u64 = 8;

/// Limits the memory of a server.
fn limit(server: &Server, bytes: &str, policy: &str) {
    server.cli(&["config", "set", "maxmemory-policy", policy]);
    server.cli(&["config", "set", "maxmemory", bytes]);
}

#[test]
fn stores_survive_a_full_paused_or_killed_server() {
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    let mut crew = Crew::start(PROCESSES, false);
    crew.open(24, |_| remote(&server.url(), ""));
    crew.turns(TURNS);
    // The full server comes first: a store pauses its uploads after a refused one.
    limit(&server, "3mb", "noeviction");
    crew.turns(TURNS);
    limit(&server, "5mb", "allkeys-lru");
    crew.turns(TURNS);
    server.pause();
    crew.turns(TURNS);
    server.go_on();
    crew.turns(TURNS);
    server.kill();
    crew.turns(TURNS);
    server.restart();
    crew.turns(TURNS);
    crew.end();
}

#[test]
fn stores_survive_resharding_and_master_failover() {
    if !is_there() {
        return;
    }
    let mut crew = Crew::start(PROCESSES, false);
    let mut nodes = cluster();
    let (masters, replicas): (Vec<usize>, Vec<usize>) =
        (0..nodes.len()).partition(|&at| is_master(&nodes[at]));
    let url = nodes[0].url();
    let read = |at: usize| if at % 2 == 0 { "never" } else { "read" };
    crew.open(110, |at| remote(&url, &format!(", cluster=true, replicas={}", read(at))));
    let before = crew.counts();
    let (from, to) = (masters[0], masters[1]);
    // The processes continue during resharding, and find every document.
    let went_on = |(after, before): (&Told, &Told)| after["fetched"] > before["fetched"];
    reshard(&nodes, &masters, from, to, || {
        wait_until("all processes fetch", || crew.counts().iter().zip(&before).all(went_on));
    });
    crew.all("all");
    crew.all("work");
    // A third master is full until it hands over to a replica with room.
    limit(&nodes[masters[2]], "3mb", "noeviction");
    crew.turns(TURNS);
    let port = nodes[masters[2]].port.to_string();
    let heir = replicas.iter().find(|at| nodes[**at].cli(&["role"]).contains(&port));
    let heir = &nodes[*heir.expect("its replica")];
    fail_over(heir);
    limit(heir, "8mb", "allkeys-lru");
    // The master with the most objects pauses, and dies.
    nodes[to].pause();
    crew.turns(TURNS);
    nodes[to].go_on();
    crew.turns(TURNS);
    nodes[to].kill();
    crew.turns(TURNS);
    patience(&nodes, "500");
    wait_until("a replica has taken over", || {
        let others = (0..nodes.len()).filter(|at| *at != to);
        others.filter(|&at| is_master(&nodes[at])).count() == 3
    });
    patience(&nodes, LONG_MS);
    nodes[to].restart();
    crew.turns(TURNS);
    wait_until("the cluster has all slots", || {
        nodes[0].cli(&["cluster", "info"]).contains("cluster_state:ok")
    });
    crew.end();
}
