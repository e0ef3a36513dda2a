//! Stores on separate hosts with a lossy network between them and the server. No byte is wrong, and
//! no op outlives its deadline.

use crate::stores_redis::crew::Crew;
use crate::stores_redis::line::{Line, Relay};
use kvtier_testkit::fixtures::apart::apart;
use kvtier_testkit::fixtures::redis::{Server, is_there, wait_until};

const HOSTS: usize = 2;
const DOCUMENTS: u32 = 24;
/// Turns of each process in every state of the network.
const TURNS: u64 = 8;

/// Runs in a separate process, because one of its threads changes its network namespace.
#[test]
fn stores_survive_a_lossy_network() {
    if is_there() {
        apart(kvtier_testkit::test_name!("stores_survive_a_lossy_network"), |_| {
            std::thread::spawn(on_a_bad_line).join().expect("it went well");
            Ok(())
        });
    }
}

/// Spec of a remote. If the kernel cannot delay packets, `port` is that of a relay.
fn remote(host: &str, port: u16) -> String {
    format!("redis(url=\"redis://{host}:{port}\", timeout=1000, connect=1000, absent=50)")
}

fn on_a_bad_line() {
    let hosts = Line::begin();
    if let Err(why) = &hosts {
        println!("no hosts as namespaces here, a relay alone: {why}");
    }
    let server = match &hosts {
        Ok(_) => Server::start(&["--bind", "0.0.0.0", "--protected-mode", "no"]),
        Err(_) => Server::start(&[]),
    };
    let mut crew = Crew::start(HOSTS, hosts.is_ok());
    let ids = crew.ids().into_iter().enumerate().filter(|_| hosts.is_ok());
    let lines: Vec<Line> =
        ids.map(|(number, id)| Line::join(number, id).expect("as it was tried")).collect();
    let relay = (hosts != Ok(true)).then(|| Relay::start(server.port));
    let host = |at: usize| lines.get(at).map_or("127.0.0.1".to_string(), Line::host);
    let port = relay.as_ref().map_or(server.port, |relay| relay.port);
    crew.open(DOCUMENTS, |at| remote(&host(at), port));
    crew.turns(TURNS);
    if let Some(relay) = &relay {
        wait_until("a connection is cut", || relay.cut() > 0);
        crew.turns(TURNS);
    }
    // One host is cut off, and reconnected.
    if let Some(line) = lines.first() {
        line.set(false);
        crew.turns(TURNS);
        line.set(true);
        crew.turns(TURNS);
    }
    // The network lost packets, and traffic went through the relay.
    wait_until("packets are lost on every line", || lines.iter().all(|line| line.lost() > 0));
    let passed = || relay.as_ref().map(Relay::passed);
    wait_until("bytes pass the relay", || passed().is_none_or(|passed| passed > 1 << 20));
    let lost: Vec<u64> = lines.iter().map(Line::lost).collect();
    println!("packets lost: {lost:?}; bytes that a relay held up: {:?}", passed());
    crew.end();
}
