//! One store in several processes: a store is served at a socket, and other stores open it there.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kvtier::api::{Dtype, Group, Identity, Layer, Layout, Level, Namespace, Status, Store};
use kvtier::base::status::Error;
use kvtier::io::shared_memory::SharedMemory;
use kvtier::io::socket::{Stream, wait};
use kvtier::meta::key::Key;
use kvtier::store::bundle::Bundle;
use kvtier::store::pool::calls::Lane;
use kvtier::store::pool::link::{CHANNEL_BYTES, ClientEnds};
use kvtier::store::pool::messages::{self, Submission, What};
use kvtier::store::pool::wire::{SessionId, Wire, version};
use kvtier::store::state::{TO_THE_END, TransferKind, Wanted};
use kvtier_testkit::fixtures::scratch::Scratch;
use kvtier_testkit::fixtures::store::mix;

const LAYERS: usize = 3;
const TOKEN_BYTES: usize = 64;

fn place() -> (Scratch, String) {
    let scratch = Scratch::created("pool");
    let socket = format!("unix:{}", scratch.0.join("pool").display());
    (scratch, socket)
}

fn served(scratch: &Path, socket: &str) -> Store {
    let disk = scratch.join("disk");
    let spec = format!(
        r#"store(host=16MiB, serve="{socket}", disk=disk(path="{}", bytes=64MiB))"#,
        disk.display()
    );
    Store::open(&spec).expect("served")
}

fn shared(socket: &str) -> Store {
    Store::open(&format!(r#"store(shared="{socket}")"#)).expect("opened")
}

fn namespace(store: &Store) -> Namespace {
    let group = Group::gqa(0..LAYERS as u16, 1, TOKEN_BYTES as u32 / 2, Dtype::F16).expect("valid");
    let layout = Layout::new(16, vec![group]);
    let model = Identity { weights: Some(b"weights"), ..Identity::default() };
    store.namespace(&model, &layout.expect("valid")).expect("opened")
}

fn tokens(document: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|at| document * 100_000 + at).collect()
}

fn plane(document: u32, layer: usize, is_v: bool, tokens: usize) -> Vec<u8> {
    let mark = document as usize * 31 + layer * 7 + usize::from(is_v);
    (0..tokens * TOKEN_BYTES).map(|at| (at * 13 + at / 251 + mark) as u8).collect()
}

fn put(namespace: &Namespace, document: u32, count: usize, level: Level) {
    let mut session = namespace.session().expect("a session");
    session.append(&tokens(document, count)).expect("appended");
    let all: Vec<_> = (0..LAYERS)
        .map(|layer| [false, true].map(|is_v| plane(document, layer, is_v, count)))
        .collect();
    let planes = all.iter().map(|[k, v]| Layer::kv(&k[..], &v[..]));
    session.put(0..count as u64, 0, planes, level).expect("stored");
}

/// Gets a document. Returns its tokens that were found; every byte of them is compared.
fn get(namespace: &Namespace, document: u32, count: usize) -> usize {
    let mut session = namespace.session().expect("a session");
    session.append(&tokens(document, count)).expect("appended");
    let mut all = vec![[vec![0u8; count * TOKEN_BYTES], vec![0u8; count * TOKEN_BYTES]]; LAYERS];
    let planes = all.iter_mut().map(|[k, v]| Layer::kv(&mut k[..], &mut v[..]));
    let got = session.get(0..count as u64, 0, planes).expect("read");
    let found = got.tokens as usize;
    for (layer, planes) in all.iter().enumerate() {
        for (is_v, bytes) in [false, true].into_iter().zip(planes) {
            let right = plane(document, layer, is_v, count);
            assert_eq!(bytes[..found * TOKEN_BYTES], right[..found * TOKEN_BYTES]);
        }
    }
    found
}

#[test]
fn what_one_process_stores_another_one_reads() {
    let (scratch, socket) = place();
    let server = served(&scratch.0, &socket);
    let (a, b) = (shared(&socket), shared(&socket));
    let (in_a, in_b, in_server) = (namespace(&a), namespace(&b), namespace(&server));
    for (document, count) in [(1, 32), (2, 160), (3, 1600)] {
        put(&in_a, document, count, Level::Ram);
        assert_eq!(get(&in_b, document, count), count);
        assert_eq!(get(&in_server, document, count), count);
    }
    put(&in_server, 4, 64, Level::Durable);
    put(&in_b, 5, 64, Level::Durable);
    assert_eq!((get(&in_a, 4, 64), get(&in_a, 5, 64)), (64, 64));
    let stats = a.stats().expect("stats");
    assert_eq!(stats.stored_cells, server.stats().expect("stats").stored_cells);
    drop((in_a, in_b, in_server));
    a.close().expect("closed");
    b.close().expect("closed");
    server.close().expect("closed");
    // Durable content is there after a restart.
    let server = served(&scratch.0, &socket);
    let a = shared(&socket);
    let in_a = namespace(&a);
    assert_eq!((get(&in_a, 4, 64), get(&in_a, 5, 64)), (64, 64));
    drop(in_a);
    a.close().expect("closed");
    server.close().expect("closed");
}

#[test]
fn a_store_needs_a_server() {
    let (scratch, socket) = place();
    let open = |spec: &str| Store::open(spec).err().expect("refused");
    let error = open(&format!(r#"store(shared="{socket}")"#));
    assert_eq!(error.status(), Status::NotFound, "{error}");
    let error = open(r#"store(shared="/tmp/x")"#);
    assert!(error.status() == Status::Spec && error.message().contains("unix:PATH"), "{error}");
    let server = served(&scratch.0, &socket);
    let error = open(&format!(r#"store(serve="{socket}")"#));
    assert_eq!(error.status(), Status::Busy, "{error}");
    let a = shared(&socket);
    let in_a = namespace(&a);
    put(&in_a, 1, 32, Level::Ram);
    server.close().expect("closed");
    let error = loop {
        match in_a.session() {
            Ok(session) => drop(session),
            Err(error) => break error,
        }
    };
    assert_eq!(error.status(), Status::Lost, "{error}");
    drop(in_a);
    a.close().expect("closed");
}

// Killed processes.

const SOCKET: &str = "KVTIER_SHARED_SOCKET";
const SEED: &str = "KVTIER_SHARED_SEED";
/// Documents that all processes put and get.
const DOCUMENTS: u64 = 40;

fn length_of(document: u32) -> usize {
    16 * (1 + document as usize * 7 % 23)
}

/// A process that is killed. Does nothing in a usual run.
#[test]
fn child() {
    let (Ok(socket), Ok(seed)) = (std::env::var(SOCKET), std::env::var(SEED)) else { return };
    let mut random: u64 = seed.parse().expect("a number");
    let store = shared(&socket);
    let namespace = namespace(&store);
    let mut out = std::io::stdout().lock();
    loop {
        random = mix(random);
        let document = (random % DOCUMENTS) as u32;
        match random >> 60 {
            0 => put(&namespace, document, length_of(document), Level::Durable),
            1..=7 => put(&namespace, document, length_of(document), Level::Ram),
            _ => drop(get(&namespace, document, length_of(document))),
        }
        let durable = random >> 60 == 0;
        writeln!(out, "\ndid {document} {durable}").and_then(|()| out.flush()).expect("a reader");
    }
}

fn start(socket: &str, seed: u64) -> Child {
    let program = std::env::current_exe().expect("this program");
    Command::new(program)
        .args(["--exact", kvtier_testkit::test_name!("child"), "--nocapture", "--test-threads=1"])
        .env(SOCKET, socket)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("started")
}

/// Waits until a child has done something `count` times. Returns what it has stored for good.
fn stored(child: &mut Child, count: usize) -> Vec<u32> {
    let mut lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
    let mut durable = Vec::new();
    for _ in 0..count {
        let line = loop {
            let line = lines.next().expect("the child goes on").expect("text");
            if line.starts_with("did ") {
                break line;
            }
        };
        let mut words = line.split(' ').skip(1);
        let document = words.next().and_then(|word| word.parse::<u32>().ok()).expect("a number");
        durable.extend((words.next() == Some("true")).then_some(document));
    }
    durable
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(300);
    while !holds() {
        assert!(Instant::now() < end, "not within five minutes: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Processes are killed at any instruction: no wrong byte, nothing of them stays, and what was
/// acknowledged is there. `KVTIER_SHARED_ROUNDS` sets the number of kills.
#[test]
fn killed_processes_cost_the_others_nothing() {
    let rounds =
        std::env::var("KVTIER_SHARED_ROUNDS").map_or(24, |text| text.parse().expect("a number"));
    let (scratch, socket) = place();
    let disk = scratch.0.join("disk");
    let spec = format!(
        r#"store(host=1MiB, serve="{socket}", disk=disk(path="{}", bytes=64MiB))"#,
        disk.display()
    );
    let (runtime, server) = Bundle::parse(&spec).and_then(|spec| spec.open()).expect("served");
    let stats = || server.inspect(|core| core.stats_now()).expect("open");
    let mut children: Vec<Child> = (1..=4).map(|seed| start(&socket, seed)).collect();
    let mut durable = BTreeSet::new();
    let mut random = 7;
    for round in 0..rounds {
        random = mix(random);
        let at = random as usize % children.len();
        durable.extend(stored(&mut children[at], (random >> 32) as usize % 20));
        (0..random % 50_000).for_each(|_| std::hint::spin_loop());
        children[at].kill().expect("killed");
        children[at].wait().expect("it ended");
        children[at] = start(&socket, 100 + round);
    }
    for mut child in children {
        child.kill().expect("killed");
        child.wait().expect("it ended");
    }
    until("everything of the killed processes is gone", || {
        let now = stats();
        now.sessions == 0 && now.transfers == 0 && now.namespaces == 1
    });
    server.settle(0).expect("idle");
    server.with(|core| core.check()).expect("consistent");
    let last = shared(&socket);
    let in_last = namespace(&last);
    for document in 0..DOCUMENTS as u32 {
        let found = get(&in_last, document, length_of(document));
        if durable.contains(&document) {
            assert_eq!(found, length_of(document), "document {document} was acknowledged");
        }
    }
    drop(in_last);
    last.close().expect("closed");
    server.close(0).expect("closed");
    drop((server, runtime));
}

/// The server is killed: its clients hear of it, and the next server finds what was durable.
#[test]
fn clients_hear_of_a_killed_server() {
    let (scratch, socket) = place();
    let mut child = serve(&scratch.0, &socket);
    let store = shared(&socket);
    let spaces = namespace(&store);
    put(&spaces, 1, 320, Level::Durable);
    let mut session = spaces.session().expect("a session");
    session.append(&tokens(1, 320)).expect("appended");
    child.kill().expect("killed");
    child.wait().expect("it ended");
    until("the client hears of it", || {
        spaces.session().is_err_and(|error| error.status() == Status::Lost)
    });
    let error = session.append(&[1]).expect_err("the server is gone");
    assert_eq!(error.status(), Status::Lost, "{error}");
    drop((session, spaces));
    store.close().expect("closed");
    let mut child = serve(&scratch.0, &socket);
    let store = shared(&socket);
    let spaces = namespace(&store);
    assert_eq!(get(&spaces, 1, 320), 320);
    drop(spaces);
    store.close().expect("closed");
    child.kill().expect("killed");
    child.wait().expect("it ended");
}

const SERVES: &str = "KVTIER_SHARED_SERVES";

/// A process that serves a store until it is killed. Does nothing in a usual run.
#[test]
fn serving_child() {
    let (Ok(socket), Some(dir)) = (std::env::var(SERVES), std::env::var_os("KVTIER_SHARED_DIR"))
    else {
        return;
    };
    let _store = served(Path::new(&dir), &socket);
    println!("\ndid 0 false");
    loop {
        std::thread::park();
    }
}

fn serve(dir: &Path, socket: &str) -> Child {
    let program = std::env::current_exe().expect("this program");
    let name = kvtier_testkit::test_name!("serving_child");
    let mut child = Command::new(program)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(SERVES, socket)
        .env("KVTIER_SHARED_DIR", dir)
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    stored(&mut child, 1);
    child
}

// Hostile clients.

/// The rings of a client that does what it wants.
struct Hostile {
    stream: Stream,
    ends: ClientEnds,
    memory: SharedMemory,
    /// Numbers that the server has answered: of namespaces and sessions, above all.
    numbers: Vec<u32>,
    is_given_up: bool,
}

impl Hostile {
    fn connect(socket: &str) -> Hostile {
        let path = Path::new(socket.strip_prefix("unix:").expect("a path"));
        let stream = Stream::connect(path).expect("it listens");
        stream.pass(version().as_bytes(), &[]).expect("sent");
        let mut answer = [0; 64];
        let (_, mut fds) = loop {
            wait(&mut [stream.watched(false)], -1).expect("polled");
            if let Some(answer) = stream.take_passed(&mut answer).expect("received") {
                break answer;
            }
        };
        let memory = SharedMemory::open(fds.remove(0), CHANNEL_BYTES).expect("sealed");
        // SAFETY: the memory is dropped after the ends.
        let ends = unsafe { ClientEnds::of(&memory).expect("its length") };
        Hostile { stream, ends, memory, numbers: vec![0], is_given_up: false }
    }

    /// Sends a message, and takes the answer if there is one.
    fn send(&mut self, message: &[u8]) {
        let end = Instant::now() + Duration::from_millis(100);
        let sent = self.ends.calls.write(message, &mut |writer| match Instant::now() < end {
            true => writer.sleep(1_000_000),
            false => Err(Status::Timeout.into()),
        });
        drop(sent);
        let mut answer = Vec::new();
        let is_answered = message.first().is_none_or(|&kind| kind <= messages::LAST_CALL);
        while is_answered && !self.is_given_up {
            if self.ends.answers.try_read(&mut answer).unwrap_or(true) {
                break;
            }
            // It may have broken the rings, so that no answer comes.
            self.is_given_up = Instant::now() > end;
            drop(self.ends.answers.wait(1_000_000));
        }
        if let [1, number @ ..] = &answer[..]
            && let Ok(number) = <[u8; 4]>::try_from(number)
        {
            self.numbers.push(u32::from_le_bytes(number));
        }
    }

    /// Writes into the rings' own words and data.
    fn scribble(&mut self, random: u64) {
        let at = random % self.memory.bytes();
        let to = self.memory.range(at, 1).expect("inside");
        // SAFETY: mapped; the server expects that anything is written here.
        unsafe { to.write_volatile((random >> 48) as u8) };
        let words =
            self.memory.range((random >> 20) % 3 * (CHANNEL_BYTES / 3), 512).expect("inside");
        if random % 7 == 0 {
            // SAFETY: as above.
            unsafe { words.cast::<u64>().add((random >> 40) as usize % 64).write_volatile(random) };
        }
    }
}

/// A message with a sound form and wild values.
fn wild(random: &mut u64, numbers: &[u32], kind: Option<u8>) -> Vec<u8> {
    *random = mix(*random);
    // A report of copies that were not ordered ends the connection, so it is rare.
    let usual = (*random >> 20) as u8 % if random.is_multiple_of(32) { 40 } else { 38 };
    let mut message = vec![kind.unwrap_or(usual)];
    let mut next = || {
        *random = mix(*random);
        let (kind, value) = (*random >> 60, *random >> 8);
        match kind {
            0..=5 => value % 4,
            6..=9 => value % 1000,
            10 => u64::MAX,
            11 => u64::from(u32::MAX),
            _ => value,
        }
    };
    let known = |next: &mut dyn FnMut() -> u64| match next() % 8 {
        7 => next() as u32,
        _ => numbers[next() as usize % numbers.len()],
    };
    let keys = |next: &mut dyn FnMut() -> u64| -> Vec<Key> {
        (0..next() % 40).map(|at| Key([at as u8; 32])).collect()
    };
    match message[0] {
        0 => {
            let what = match next() % 4 {
                0 => What::Cells {
                    tokens: (next(), next()),
                    layers: (next() as usize, next() as usize),
                    by_layer: next() % 2 == 0,
                    wanted: match next() % 3 {
                        0 => Wanted::All,
                        1 => Wanted::Needed,
                        _ => Wanted::Chunks((0..next() % 9).map(|_| next() as u32).collect()),
                    },
                },
                1 => {
                    let layers = (next() as usize, next() as usize);
                    What::Blocks { keys: keys(&mut next), layers }
                }
                2 => What::Locate,
                _ => What::LocateBlocks(keys(&mut next)),
            };
            let kinds = [TransferKind::Put, TransferKind::Get, TransferKind::Prefetch];
            let submission = Submission {
                transfer: next(),
                session: SessionId(known(&mut next)),
                kind: kinds[next() as usize % 3],
                level: [Level::Ram, Level::Disk, Level::Durable][next() as usize % 3],
                lane: Lane(next() as usize % 4),
                what,
            };
            submission.put(&mut message);
        }
        1 => {
            let group = Group::gqa(0..2, 1, 8, Dtype::F16).expect("valid");
            let layout = Layout::new(1 + next() as u32 % 64, vec![group]).expect("valid");
            (Key([next() as u8; 32]), layout.encode(), next() % 2 == 0, None::<u8>)
                .put(&mut message);
            next().put(&mut message);
        }
        3 | 30..=32 => {
            message[0] = 3;
            (known(&mut next), vec![next() as u8; next() as usize % 5], next() as u32)
                .put(&mut message);
            (None::<u8>, next() as u32, next()).put(&mut message);
        }
        7 | 33..=35 => {
            message[0] = 7;
            let tokens: Vec<u32> = (0..next() % 300).map(|at| at as u32).collect();
            (known(&mut next), tokens, Vec::<u8>::new()).put(&mut message);
        }
        36 | 37 => {
            // Most of a transfer is as it should be.
            message[0] = 0;
            let layers = (0, 1 + next() as usize % 2);
            let what = What::Cells {
                tokens: (0, if next() % 4 == 0 { next() % 70 } else { TO_THE_END }),
                layers,
                by_layer: next() % 2 == 0,
                wanted: Wanted::All,
            };
            let kind = [TransferKind::Put, TransferKind::Get][next() as usize % 2];
            let (session, level) = (SessionId(known(&mut next)), Level::Ram);
            let submission =
                Submission { transfer: next() % 5, session, kind, level, lane: Lane(0), what };
            submission.put(&mut message);
        }
        38 => {
            message[0] = messages::DONE;
            (next() % 5, Ok::<(), Error>(())).put(&mut message);
        }
        39 => {
            message[0] = messages::CANCEL;
            (next() % 5, Status::Cancelled).put(&mut message);
        }
        _ => {
            // A session or namespace, then numbers: most calls are like that.
            known(&mut next).put(&mut message);
            (0..next() % 12).for_each(|_| next().put(&mut message));
        }
    }
    message
}

/// Clients that send anything, and write anything into the memory that they share with the server:
/// it goes on, and serves the others. `KVTIER_SHARED_HOSTILE` sets their number.
#[test]
fn hostile_clients_harm_only_themselves() {
    let count =
        std::env::var("KVTIER_SHARED_HOSTILE").map_or(60, |text| text.parse().expect("a number"));
    let (scratch, socket) = place();
    let disk = scratch.0.join("disk");
    let spec = format!(
        r#"store(host=1MiB, serve="{socket}", disk=disk(path="{}", bytes=64MiB))"#,
        disk.display()
    );
    let (runtime, server) = Bundle::parse(&spec).and_then(|spec| spec.open()).expect("served");
    let good = shared(&socket);
    let in_good = namespace(&good);
    let mut random = 3;
    for number in 0..count {
        let mut hostile = Hostile::connect(&socket);
        for turn in 0..200 {
            let kind = [1, 3, 7].get(turn).copied();
            let mut message = wild(&mut random, &hostile.numbers, kind);
            match if turn < 3 { 9 } else { random % 200 } {
                0 => message.truncate(random as usize / 16 % (message.len() + 1)),
                1 => message.extend((0..random % 50).map(|at| (random >> (at % 50)) as u8)),
                2 => message.iter_mut().for_each(|byte| {
                    random = mix(random);
                    *byte ^= if random % 11 == 0 { (random >> 32) as u8 } else { 0 };
                }),
                _ => {}
            }
            hostile.send(&message);
            if number % 3 == 2 && random % 16 == 0 {
                random = mix(random);
                hostile.scribble(random);
            }
        }
        // It ends without a word, or closes the connection first.
        if number % 2 == 0 {
            hostile.stream.shut();
        }
        drop(hostile);
        put(&in_good, number as u32 % 9, 64, Level::Ram);
        assert_eq!(get(&in_good, number as u32 % 9, 64), 64);
    }
    drop(in_good);
    good.close().expect("closed");
    until("everything of the clients is gone", || {
        let now = server.inspect(|core| core.stats_now()).expect("open");
        now.sessions == 0 && now.transfers == 0
    });
    let now = server.inspect(|core| core.stats_now()).expect("open");
    let begun = now.puts + now.gets;
    assert!(begun > 2 * count && now.namespaces > 1, "they reach little: {now:?}");
    server.settle(0).expect("idle");
    server.with(|core| core.check()).expect("consistent");
    server.close(0).expect("closed");
    drop((server, runtime));
}
