//! A process that stores is killed, again and again: what it was told to be on disk is
//! there afterwards, and every byte is right.
//!
//! `KVTIER_CRASH_ROUNDS` kills more often than usual.

#![cfg(not(feature = "shuttle"))]

#[path = "support/store.rs"]
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use kvtier::base::status::Status;
use kvtier::kv::core::moves::{Deed, Level};
use support::{
    Done, Engine, Home, Model, Scratch, Shape, document, marks_of, mix, wait, with_disk,
};

const MODEL: Model = Model { layers: 3, heads: 2, run: 64, chunk: 16 };
/// Documents that a process stores before it waits for its end.
const MOST: u32 = 40;
/// Puts that are under way at once.
const BESIDE: usize = 3;
const DIR: &str = "KVTIER_CRASH_DIR";
const FIRST: &str = "KVTIER_CRASH_FIRST";

fn open(dir: &Path) -> Home {
    let rest = "host=2MiB,chunks=262144,events=16";
    Home::open(&with_disk(dir, "bytes=6GiB,segment=2MiB", rest))
}

/// Every third document goes on where an earlier one ends.
fn tokens_of(number: u32) -> Vec<u32> {
    let chunks = 1 + (mix(u64::from(number)) % 5) as usize;
    let mut tokens = match number % 3 {
        2 => document(number - 1, 16 * (1 + (mix(u64::from(number - 1)) % 5) as usize)),
        _ => Vec::new(),
    };
    tokens.extend(document(number, 16 * chunks));
    tokens
}

/// The process that dies. Does nothing in a usual run.
#[test]
fn child() {
    let (Some(dir), Ok(first)) = (std::env::var_os(DIR), std::env::var(FIRST)) else { return };
    let first: u32 = first.parse().expect("a number");
    let home = open(Path::new(&dir));
    let space = home.space(1, &MODEL);
    let mut under_way = Vec::new();
    let mut tell = |(number, session, op, engine): (u32, u32, _, Engine)| {
        let done = wait(&op);
        assert_eq!(done, Done { status: Status::Ok, tokens: engine.tokens });
        home.end(session);
        let mut out = std::io::stdout().lock();
        writeln!(out, "\nstored {number}").and_then(|()| out.flush()).expect("a reader");
    };
    for number in first..first + MOST {
        let tokens = tokens_of(number);
        let session = home.session(space, &tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        engine.compute(&marks_of(0, &tokens));
        let level = if number % 2 == 0 { Level::Durable } else { Level::Disk };
        let mut ops = home.submit(session, Deed::Put, level, engine.whole()).expect("submitted");
        under_way.push((number, session, ops.remove(0), engine));
        if under_way.len() > BESIDE {
            tell(under_way.remove(0));
        }
    }
    under_way.drain(..).for_each(&mut tell);
    // From here on only the end is waited for.
    drop(std::io::stdin().read(&mut [0]));
}

fn start(dir: &Path, first: u32) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(FIRST, first.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started")
}

/// Kills a child when it has stored some, or before; which ones it had stored.
fn kill(mut child: Child, chance: u64) -> Vec<u32> {
    let out = child.stdout.take().expect("piped");
    let enough = chance % u64::from(MOST + 6);
    // Some die while they open the store.
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
            // It may be dead already: what came through the pipe counts all the same.
            child.kill().expect("killed");
        }
    }
    let status = child.wait().expect("it ended");
    assert_eq!(status.signal(), Some(9), "it ended by itself: {status}");
    stored
}

fn check(home: &Home, space: u32, number: u32) {
    let tokens = tokens_of(number);
    let session = home.session(space, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
    let done = home.get(session, &engine);
    let right = Done { status: Status::Ok, tokens: tokens.len() };
    assert_eq!(done, right, "document {number} was stored");
    engine.check(&marks_of(0, &tokens), 0..tokens.len(), 0..MODEL.layers);
    home.end(session);
}

#[test]
fn what_was_stored_outlives_the_process() {
    let rounds = std::env::var("KVTIER_CRASH_ROUNDS").ok().and_then(|n| n.parse().ok());
    let rounds: u32 = rounds.unwrap_or(40);
    let seed = u64::from(std::process::id());
    let scratch = Scratch::new("crash");
    let mut all: Vec<u32> = Vec::new();
    for round in 0..rounds {
        let chance = mix(seed << 20 | u64::from(round));
        let stored = kill(start(&scratch.0, round * MOST), chance);
        let home = open(&scratch.0);
        let space = home.space(1, &MODEL);
        stored.iter().for_each(|&number| check(&home, space, number));
        // Of those before some each time, and all at the end.
        let step = if round + 1 == rounds { 1 } else { 17 };
        all.iter().skip(round as usize % step).step_by(step).for_each(|&n| check(&home, space, n));
        all.extend(stored);
        home.rest();
        let counters = home.counters();
        let lost = (counters.corrupt, counters.disk_evicted, counters.misses);
        assert_eq!(lost, (0, 0, 0), "seed {seed}, round {round}: {counters:?}");
        // Half of the stores are left as they are, as if this process had died as well.
        match round % 2 {
            0 => home.close(),
            _ => drop(home),
        }
    }
    assert!(all.len() as u32 >= rounds * 5, "{} documents in {rounds} rounds", all.len());
}
