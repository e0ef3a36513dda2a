//! Four stores at once on Redis servers that are killed, paused, failed over and filled: no byte
//! is wrong, no op outlives its deadline, and once all is well what one has put the others find.

#![cfg(not(feature = "shuttle"))]

#[path = "support/redis.rs"]
mod redis;
#[path = "support/store.rs"]
mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use kvtier::base::op::OpOpts;
use kvtier::base::status::Status;
use kvtier::kv::core::{Deed, FarCounters, Level};
use kvtier::kv::spec::StoreSpec;
use redis::{Server, cluster, is_there, wait_until};
use support::{Engine, Home, Model, Shape, document, marks_of, wait};

/// Cells of 16 KiB.
const MODEL: Model = Model { layers: 4, heads: 2, run: 256, chunk: 16 };
const ENGINES: u64 = 4;
const DOCUMENTS: u32 = 24;
const DEADLINE: Duration = Duration::from_secs(1);
/// How much later an op may end where the machine has other work.
const SLACK: Duration = Duration::from_millis(1500);

fn spec(url: &str, more: &str) -> StoreSpec {
    let remote = format!("redis(url=\"{url}\", timeout=200, connect=200, absent=50{more})");
    StoreSpec::parse(&format!("store(host=1MiB, remote={remote})")).expect("a sound spec")
}

fn opts(home: &Home) -> OpOpts {
    OpOpts { deadline_ns: home.now_ns() + DEADLINE.as_nanos() as u64, ..OpOpts::default() }
}

fn far(home: &Home) -> FarCounters {
    home.store.with(|core| Ok(core.far_counters())).expect("open").expect("a remote")
}

/// What engines did together.
#[derive(Default)]
struct Done {
    put: AtomicU64,
    found: AtomicU64,
    got: AtomicU64,
    slowest_ms: AtomicU64,
}

impl Done {
    fn timed<R>(&self, act: impl FnOnce() -> R) -> R {
        let began = Instant::now();
        let result = act();
        let took = began.elapsed();
        self.slowest_ms.fetch_max(took.as_millis() as u64, Ordering::Relaxed);
        assert!(took < DEADLINE + SLACK, "an op took {took:?}");
        result
    }
}

/// One document: put, or found and got. How that went.
fn turn(home: &Home, number: u32, is_put: bool, done: &Done) -> Status {
    let tokens = document(number, 16 * (2 + number as usize % 5));
    let space = home.space(3, &MODEL);
    let session = home.session(space, &tokens);
    let marks = marks_of(3, &tokens);
    let status = if is_put {
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        engine.compute(&marks);
        let what = engine.whole();
        done.timed(|| {
            let ops = home.store.submit(session, Deed::Put, Level::Remote, what, &opts(home));
            wait(&ops.expect("begun")[0]).status
        })
    } else {
        let found = done.timed(|| wait(&home.store.locate(session, &opts(home)).expect("begun")));
        let mut status = found.status;
        if found.status == Status::Ok && found.tokens > 0 {
            let mut engine = Engine::new(MODEL, Shape::Heads, found.tokens);
            let what = engine.whole();
            let came = done.timed(|| {
                let ops = home.store.submit(session, Deed::Get, Level::Ram, what, &opts(home));
                wait(&ops.expect("begun")[0])
            });
            engine.check(&marks, 0..came.tokens, 0..MODEL.layers);
            status = came.status;
            done.found.fetch_add(1, Ordering::Relaxed);
            done.got.fetch_add(u64::from(status == Status::Ok), Ordering::Relaxed);
        }
        status
    };
    done.put.fetch_add(u64::from(is_put && status == Status::Ok), Ordering::Relaxed);
    home.end(session);
    status
}

/// Four engines work while something is done to the servers.
fn under_load(spec: &StoreSpec, disturb: impl FnOnce()) -> Vec<Home> {
    let homes: Vec<Home> = (0..ENGINES).map(|_| Home::open(spec)).collect();
    let (done, stop) = (Done::default(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (at, home) in (0u32..).zip(&homes) {
            let (done, stop) = (&done, &stop);
            scope.spawn(move || {
                let mut step = at * 7;
                while !stop.load(Ordering::Relaxed) {
                    step = step.wrapping_mul(1_103_515_245).wrapping_add(12345);
                    turn(home, (step >> 16) % DOCUMENTS, (step >> 8) % 3 == 0, done);
                }
            });
        }
        disturb();
        stop.store(true, Ordering::Relaxed);
    });
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    println!(
        "{} put, {} found, {} got, the slowest op {} ms",
        of(&done.put),
        of(&done.found),
        of(&done.got),
        of(&done.slowest_ms)
    );
    assert!(of(&done.put) > 0 && of(&done.got) > 0, "nothing came through at all");
    homes
}

/// It is well again: what one puts the others find.
fn all_is_well(homes: Vec<Home>) {
    let done = Done::default();
    let (first, others) = homes.split_first().expect("engines");
    // Breakers see that by their next probe.
    wait_until("a put is acknowledged", || {
        turn(first, 900, false, &done);
        turn(first, 900, true, &done) == Status::Ok
    });
    for home in others {
        wait_until("what was put is found", || {
            let before = done.got.load(Ordering::Relaxed);
            turn(home, 900, false, &done) == Status::Ok && done.got.load(Ordering::Relaxed) > before
        });
    }
    let wrong: u64 = homes.iter().map(|home| far(home).corrupt).sum();
    assert_eq!(wrong, 0, "no server gave anything but what was put");
    homes.into_iter().for_each(Home::close);
}

fn pause() {
    sleep(Duration::from_millis(700));
}

#[test]
fn a_server_that_stops_dies_and_fills_up() {
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    let homes = under_load(&spec(&server.url(), ""), || {
        pause();
        server.pause();
        pause();
        server.go_on();
        pause();
        server.cli(&["config", "set", "maxmemory-policy", "noeviction"]);
        server.cli(&["config", "set", "maxmemory", "3mb"]);
        pause();
        server.cli(&["config", "set", "maxmemory-policy", "allkeys-lru"]);
        server.cli(&["config", "set", "maxmemory", "5mb"]);
        pause();
        server.kill();
        pause();
        server.restart();
        pause();
    });
    all_is_well(homes);
}

#[test]
fn a_cluster_whose_masters_go() {
    if !is_there() {
        return;
    }
    let mut nodes = cluster();
    let url = nodes[0].url();
    let homes = under_load(&spec(&url, ", cluster=true"), || {
        pause();
        let master = |node: &Server| node.cli(&["role"]).starts_with("master");
        let goes = (1..nodes.len()).find(|&at| master(&nodes[at])).expect("a master");
        nodes[goes].pause();
        pause();
        nodes[goes].go_on();
        pause();
        nodes[goes].kill();
        sleep(Duration::from_secs(3));
        nodes[goes].restart();
        // A replica takes over where it is told to.
        let slave = (1..nodes.len()).find(|&at| !master(&nodes[at])).expect("a replica");
        nodes[slave].cli(&["cluster", "failover"]);
        pause();
    });
    wait_until("the cluster has all slots", || {
        nodes[0].cli(&["cluster", "info"]).contains("cluster_state:ok")
    });
    all_is_well(homes);
}
