//! A process that stores is killed again and again. Cells that were acknowledged on disk are found
//! afterwards, and every byte is exact. `KVTIER_CRASH_ROUNDS` sets the number of kills.

use kvtier_testkit::fixtures::store as support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvtier::base::status::Status;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, Model, Scratch, Shape, TestStore, document, marks_of, mix, wait, with_disk,
};

const MODEL: Model = Model { layers: 3, heads: 2, run: 64, chunk: 16 };
/// Documents that a process stores before it waits to be killed.
const MOST: u32 = 40;
/// Puts that are under way at once.
const BESIDE: usize = 3;
const DIR: &str = "KVTIER_CRASH_DIR";
const FIRST: &str = "KVTIER_CRASH_FIRST";
const PREFIX: &str = "KVTIER_CRASH_PREFIX";
const BEHIND: &str = "KVTIER_CRASH_BEHIND";
/// Number of documents that continue one prefix.
const FAMILY: u32 = 59;

fn open(dir: &Path) -> TestStore {
    let rest = "host=2MiB,chunks=262144,events=16";
    TestStore::open(&with_disk(dir, "bytes=6GiB,segment=2MiB", rest))
}

/// Every third document continues an earlier one.
fn tokens_of(number: u32) -> Vec<u32> {
    let chunks = 1 + (mix(u64::from(number)) % 5) as usize;
    let mut tokens = match number % 3 {
        2 => document(number - 1, 16 * (1 + (mix(u64::from(number - 1)) % 5) as usize)),
        _ => Vec::new(),
    };
    tokens.extend(document(number, 16 * chunks));
    tokens
}

/// The process that is killed. Does nothing in a usual run.
#[test]
fn child() {
    let (Some(dir), Ok(first)) = (std::env::var_os(DIR), std::env::var(FIRST)) else { return };
    let first: u32 = first.parse().expect("a number");
    let store = open(Path::new(&dir));
    let namespace = store.namespace(1, &MODEL);
    let mut under_way = Vec::new();
    let mut report = |(number, session, op, engine): (u32, u32, _, Engine)| {
        let done = wait(&op);
        assert_eq!(done, Done::ok(engine.tokens));
        store.close_session(session);
        let mut out = std::io::stdout().lock();
        writeln!(out, "\nstored {number}").and_then(|()| out.flush()).expect("a reader");
    };
    for number in first..first + MOST {
        let tokens = tokens_of(number);
        let session = store.session(namespace, &tokens);
        let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, &tokens));
        let level = if number % 2 == 0 { Level::Durable } else { Level::Disk };
        let mut ops =
            store.submit(session, TransferKind::Put, level, engine.whole()).expect("submitted");
        under_way.push((number, session, ops.remove(0), engine));
        if under_way.len() > BESIDE {
            report(under_way.remove(0));
        }
    }
    under_way.drain(..).for_each(&mut report);
    // From here on the process only waits to be killed.
    drop(std::io::stdin().read(&mut [0]));
}

fn start(dir: &Path, first: u32) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .args(["--exact", kvtier_testkit::test_name!("child"), "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(FIRST, first.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started")
}

/// Kills a child after it has stored some documents, or earlier. Returns the stored ones.
fn kill(mut child: Child, chance: u64) -> Vec<u32> {
    let out = child.stdout.take().expect("piped");
    let enough = chance % u64::from(MOST + 6);
    // Some children are killed while they open the store.
    let early = enough >= u64::from(MOST);
    if early {
        (0..chance % 200_000 * 20).for_each(|_| std::hint::spin_loop());
        child.kill().expect("killed");
    }
    let mut stored: Vec<u32> = Vec::new();
    for line in BufReader::new(out).lines() {
        let Ok(line) = line else { break };
        stored.extend(line.strip_prefix("stored ").and_then(|n| n.parse::<u32>().ok()));
        if !early && stored.len() as u64 > enough {
            (0..chance % 100_000).for_each(|_| std::hint::spin_loop());
            // The child may be dead already. Numbers received through the pipe count all the same.
            child.kill().expect("killed");
        }
    }
    let status = child.wait().expect("it ended");
    assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
    stored
}

fn check(store: &TestStore, namespace: u32, number: u32) {
    let tokens = tokens_of(number);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
    let done = store.get(session, &engine);
    let right = Done::ok(tokens.len());
    assert_eq!(done, right, "document {number} was stored");
    engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
    store.close_session(session);
}

#[test]
fn stored_cells_survive_a_killed_process() {
    let rounds = std::env::var("KVTIER_CRASH_ROUNDS").ok().and_then(|n| n.parse().ok());
    let rounds: u32 = rounds.unwrap_or(40);
    let seed = u64::from(std::process::id());
    let scratch = Scratch::new("crash");
    let mut all: Vec<u32> = Vec::new();
    for round in 0..rounds {
        let chance = mix(seed << 20 | u64::from(round));
        let stored = kill(start(&scratch.0, round * MOST), chance);
        let store = open(&scratch.0);
        let namespace = store.namespace(1, &MODEL);
        stored.iter().for_each(|&number| check(&store, namespace, number));
        // Some of the earlier documents in each round, and all of them in the last.
        let step = if round + 1 == rounds { 1 } else { 17 };
        all.iter()
            .skip(round as usize % step)
            .step_by(step)
            .for_each(|&n| check(&store, namespace, n));
        all.extend(stored);
        store.settle();
        let counters = store.counters();
        let lost = (counters.corrupt_cells, counters.evicted_chunks, counters.missed_cells);
        assert_eq!(lost, (0, 0, 0), "seed {seed}, round {round}: {counters:?}");
        // Half of the stores are not closed, as if this process had died as well.
        match round % 2 {
            0 => store.close(),
            _ => drop(store),
        }
    }
    assert!(all.len() as u32 >= rounds * 5, "{} documents in {rounds} rounds", all.len());
}

/// Documents that a process stores between two checks of the unwritten bytes.
const WAVE: u32 = 4;

fn open_behind(dir: &Path) -> TestStore {
    let rest = "host=8MiB,chunks=8192,write=behind(age=40ms)";
    TestStore::open(&with_disk(dir, "bytes=1GiB,segment=2MiB", rest))
}

/// The process that requests no write to disk. Does nothing in a usual run.
#[test]
fn behind_child() {
    let (Some(dir), Some(_)) = (std::env::var_os(DIR), std::env::var_os(BEHIND)) else { return };
    let store = open_behind(Path::new(&dir));
    let namespace = store.namespace(1, &MODEL);
    for number in 0..MOST {
        let tokens = tokens_of(number);
        let session = store.session(namespace, &tokens);
        put_from(&store, session, &tokens, 0, Level::Ram);
        store.close_session(session);
        if (number + 1) % WAVE != 0 {
            continue;
        }
        let is_written = || store.handle.inspect(|core| core.unwritten().0 == 0 && core.is_idle());
        while !is_written().expect("open") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "\nstored {number}").and_then(|()| out.flush()).expect("a reader");
    }
    drop(std::io::stdin().read(&mut [0]));
}

#[test]
fn write_behind_cells_survive_a_killed_process() {
    let seed = u64::from(std::process::id());
    for round in 0..4 {
        let scratch = Scratch::new("behind");
        let enough = (mix(seed << 20 | round) % u64::from(MOST / WAVE)) as usize;
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .args(["--exact", kvtier_testkit::test_name!("behind_child"), "--nocapture"])
            .arg("--test-threads=1")
            .env(DIR, &scratch.0)
            .env(BEHIND, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let lines = out.lines().map_while(Result::ok);
        let said = lines.filter_map(|line| line.strip_prefix("stored ")?.parse::<u32>().ok());
        let last = said.take(enough + 1).last().expect("it has stored some");
        child.kill().expect("killed");
        child.wait().expect("it ended");
        let store = open_behind(&scratch.0);
        let namespace = store.namespace(1, &MODEL);
        (0..=last).for_each(|number| check(&store, namespace, number));
        store.settle();
        store.close();
    }
}

/// Puts all tokens from `first` on.
fn put_from(store: &TestStore, session: u32, tokens: &[u32], first: usize, level: Level) {
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(0, tokens));
    let what = engine.cell_range(first, tokens.len() - first, 0..MODEL.layers, false);
    let done = store.transfer(session, TransferKind::Put, level, what);
    assert_eq!(done, Done::ok(tokens.len() - first));
}

/// One of the documents that share a prefix.
fn relative(number: u32) -> Vec<u32> {
    [document(0, 64), document(1 + number, 96)].concat()
}

/// The process whose prefix was never requested to be on disk. Does nothing in a usual run.
#[test]
fn prefix_child() {
    let (Some(dir), Ok(way)) = (std::env::var_os(DIR), std::env::var(PREFIX)) else { return };
    let store = open_small(Path::new(&dir));
    let namespace = store.namespace(1, &MODEL);
    let prefix = store.session(namespace, &relative(0)[..64]);
    put_from(&store, prefix, &relative(0)[..64], 0, Level::Ram);
    let count = if way == "durable" { 1 } else { FAMILY };
    let level = if way == "durable" { Level::Durable } else { Level::Ram };
    for number in 0..count {
        let tokens = relative(number);
        let session = store.session(namespace, &tokens);
        put_from(&store, session, &tokens, 64, level);
        store.close_session(session);
    }
    if way != "durable" {
        store.settle(); // evicted chunks are on disk
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nstored 0").and_then(|()| out.flush()).expect("a reader");
    drop(std::io::stdin().read(&mut [0]));
}

fn open_small(dir: &Path) -> TestStore {
    TestStore::open(&with_disk(dir, "bytes=1GiB,segment=2MiB", "host=2MiB,policy=lru,chunks=8192"))
}

/// Starts that process, and kills it when it has finished.
fn kill_relatives(dir: &Path, way: &str) {
    let program = std::env::current_exe().expect("this program");
    let mut child = Command::new(program)
        .args(["--exact", kvtier_testkit::test_name!("prefix_child"), "--nocapture"])
        .arg("--test-threads=1")
        .env(DIR, dir)
        .env(PREFIX, way)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let out = BufReader::new(child.stdout.take().expect("piped"));
    let is_done = out.lines().map_while(Result::ok).any(|line| line.starts_with("stored"));
    child.kill().expect("killed");
    child.wait().expect("it ended");
    assert!(is_done, "the child did not store anything");
}

/// Number of tokens from which each document can be continued, compared byte for byte.
fn reach(store: &TestStore, namespace: u32, count: u32) -> Vec<usize> {
    let read = |number| {
        let tokens = relative(number);
        let session = store.session(namespace, &tokens);
        let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
        let done = store.get(session, &engine);
        assert!(matches!(done.status, Status::Ok | Status::NotFound), "{done:?}");
        engine.check(&marks_of(0, &tokens), 0..done.tokens, 0..MODEL.layers);
        store.close_session(session);
        done.tokens
    };
    (0..count).map(read).collect()
}

#[test]
fn durable_put_writes_back_its_prefix() {
    let scratch = Scratch::new("prefix");
    kill_relatives(&scratch.0, "durable");
    let store = open_small(&scratch.0);
    let adopted = store.handle.opened.adopted;
    assert_eq!((adopted.chunks, adopted.dropped), (10, 0), "{adopted:?}");
    let namespace = store.namespace(1, &MODEL);
    assert_eq!(reach(&store, namespace, 1), [160]);
    store.settle();
    store.close();
}

#[test]
fn evicted_chunks_are_usable_without_an_evicted_prefix() {
    let scratch = Scratch::new("family");
    kill_relatives(&scratch.0, "everyday");
    let store = open_small(&scratch.0);
    let adopted = store.handle.opened.adopted;
    // 358 chunks, of which 170 fit in memory.
    assert!(adopted.chunks > 150 && adopted.dropped == 0, "{adopted:?}");
    let namespace = store.namespace(1, &MODEL);
    let all = reach(&store, namespace, FAMILY);
    assert!(all.iter().all(|&tokens| tokens >= 64), "the prefix is missing: {all:?}");
    // Every chunk that was found is usable by a document.
    let chunks: usize = all.iter().map(|tokens| tokens / 16 - 4).sum();
    assert_eq!(chunks as u64 + 4, adopted.chunks, "{all:?}");
    assert!(all.iter().filter(|&&tokens| tokens == 160).count() > 20, "{all:?}");
    store.settle();
    store.close();
}
