//! Events of a store: watches complete, and the stream at the remote has the same events as the
//! store's ring.

use kvtier_testkit::fixtures::redis;
use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;

use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::status::Status;
use kvtier::store::events::Event;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::Level;
use kvtier::tier::remote::redis::resp::{Reader, Reply, Value, Want};
use redis::{Server, cluster, is_there, wait_until};
use support::{Model, TestStore, document, wait};

const MODEL: Model = Model { layers: 2, heads: 2, run: 64, chunk: 16 };

fn put(store: &TestStore, number: u32, tokens: usize) {
    let tokens = document(number, tokens);
    let namespace = store.namespace(1, &MODEL);
    let done = store.put_tokens((namespace, 1), &MODEL, &tokens, Level::Ram);
    assert_eq!(done.status, Status::Ok);
}

/// All events of a store.
fn events_of(store: &TestStore) -> Vec<Event> {
    let mut all = vec![Event::default(); 4096];
    let (count, lost) = store.handle.inspect(|core| core.events.read(0, &mut all)).expect("open");
    assert_eq!(lost, 0);
    all.truncate(count);
    all
}

fn is_open(op: &kvtier::base::op::OpRef) -> bool {
    op.state() & RELEASED == 0
}

#[test]
fn watch_completes_once_for_its_events() {
    let store = TestStore::open(&StoreSpec::parse("store(host=8MiB)").expect("sound"));
    let watch = |from| store.handle.watch(from, &OpOpts::default()).expect("begun");
    let (first, third, next) = (watch(0), watch(2), watch(u64::MAX));
    assert!([&first, &third, &next].into_iter().all(is_open));
    put(&store, 1, 16);
    let done = [wait(&first), wait(&next)];
    assert!(done.iter().all(|done| (done.status, done.tokens) == (Status::Ok, 1)), "one event");
    assert!(is_open(&third), "the event with that number does not exist yet");
    put(&store, 2, 64);
    let done = wait(&third);
    assert_eq!(done.status, Status::Ok);
    assert!((1..=3).contains(&done.tokens) && events_of(&store).len() == 5);
    // A watch for existing events completes at once.
    assert_eq!(wait(&watch(1)).tokens, 4);
    store.close();
}

#[test]
fn cancelled_watch_completes() {
    let store = TestStore::open(&StoreSpec::parse("store(host=8MiB)").expect("sound"));
    let opts = OpOpts { deadline_ns: store.now_ns() + 20_000_000, ..OpOpts::default() };
    let late = store.handle.watch(0, &opts).expect("begun");
    assert_eq!(wait(&late).status, Status::Timeout);
    let dropped = store.handle.watch(0, &OpOpts::default()).expect("begun");
    dropped.cancel();
    assert_eq!(wait(&dropped).status, Status::Cancelled);
    // Both watches have freed their slots. At most 1024 watches may wait.
    let many: Vec<_> =
        (0..1024).map(|_| store.handle.watch(0, &OpOpts::default()).expect("begun")).collect();
    let refused = store.handle.watch(0, &OpOpts::default()).err().expect("too many");
    assert_eq!(refused.status(), Status::Again);
    many[7].cancel();
    assert_eq!(wait(&many[7]).status, Status::Cancelled);
    let again = store.handle.watch(0, &OpOpts::default()).expect("a slot is free");
    store.close();
    for op in many.iter().enumerate().filter(|(at, _)| *at != 7).map(|(_, op)| op).chain([&again]) {
        assert_eq!(wait(op).status, Status::Cancelled);
    }
}

/// An entry of the stream.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    node: String,
    run: String,
    stage: String,
    first: u64,
    missed: u64,
    /// Kind, tier, tokens, position; key, parent, namespace.
    events: Vec<([u32; 4], [[u8; 32]; 3])>,
}

fn text(value: &Value) -> Vec<u8> {
    match value {
        Value::Text(text) => text.clone(),
        other => panic!("no text: {other:?}"),
    }
}

/// All entries of the stream at a server.
fn entries(server: &Server, stream: &str) -> Vec<Entry> {
    let mut socket = TcpStream::connect(("127.0.0.1", server.port)).expect("a server");
    let command =
        format!("*4\r\n$6\r\nXRANGE\r\n${}\r\n{stream}\r\n$1\r\n-\r\n$1\r\n+\r\n", stream.len());
    socket.write_all(command.as_bytes()).expect("sent");
    let mut reader = Reader::default();
    let value = loop {
        if let Some(Reply::Value(value)) = reader.next(Want::Value(64 << 20)).expect("RESP") {
            break value;
        }
        let bytes = socket.read(reader.spare()).expect("read");
        assert!(bytes > 0, "an answer");
        reader.filled(bytes);
    };
    let Value::List(all) = value else { panic!("{value:?}") };
    all.iter().map(entry).collect()
}

fn entry(value: &Value) -> Entry {
    let fields = value.list().and_then(|both| both[1].list()).expect("an id and fields");
    let fields: BTreeMap<Vec<u8>, Vec<u8>> =
        fields.chunks(2).map(|two| (text(&two[0]), text(&two[1]))).collect();
    let word = |name: &str| String::from_utf8(fields[name.as_bytes()].clone()).expect("text");
    assert_eq!(word("v"), "1");
    let packed = &fields[&b"events"[..]];
    assert_eq!(packed.len() % 112, 0);
    let events = packed.chunks(112).map(|one| {
        let number = |at: usize| u32::from_le_bytes(one[at * 4..][..4].try_into().expect("four"));
        let key = |at: usize| one[16 + at * 32..][..32].try_into().expect("32");
        (std::array::from_fn(number), std::array::from_fn(key))
    });
    Entry {
        node: word("node"),
        run: word("run"),
        stage: word("stage"),
        first: word("first").parse().expect("a number"),
        missed: word("missed").parse().expect("a number"),
        events: events.collect(),
    }
}

/// Checks that the entries have the store's events from number `from` on, in order; an event may
/// occur twice. Returns the number after the last one.
fn check(published: &[Entry], events: &[Event], from: u64) -> u64 {
    let mut next = from;
    for entry in published {
        assert!(entry.first <= next && entry.missed == 0, "{next}: {entry:?}");
        for (number, (words, keys)) in (entry.first..).zip(&entry.events) {
            let event = &events[number as usize];
            assert_eq!(*words, [event.kind, event.tier, event.tokens, event.position]);
            assert_eq!(*keys, [event.key, event.parent, event.namespace]);
        }
        next = next.max(entry.first + entry.events.len() as u64);
    }
    next
}

fn publishing_spec(url: &str, more: &str) -> StoreSpec {
    let remote = format!(
        "redis(url=\"{url}\", timeout=500, write=never, events=\"http://a:1\", prefix=\"p\"{more})"
    );
    StoreSpec::parse(&format!("store(host=8MiB, remote={remote})")).expect("a sound spec")
}

#[test]
fn event_stream_recovers_after_server_outage() {
    if !is_there() {
        return;
    }
    let mut server = Server::start(&[]);
    let store = TestStore::open(&publishing_spec(&server.url(), ""));
    put(&store, 1, 64);
    wait_until("the first events are published", || check_len(&server) == 4);
    let published = entries(&server, "p/events");
    assert_eq!(
        (&*published[0].stage, &*published[0].node, published[0].first),
        ("opened", "http://a:1", 0)
    );
    assert!(
        published[1..].iter().all(|entry| entry.stage == "open" && entry.run == published[0].run)
    );
    assert_eq!(check(&published, &events_of(&store), 0), 4);
    // A server outage delays no put. The events are published later.
    server.kill();
    // The server restarts only after the put: a put that waited for the server would hang.
    put(&store, 2, 320);
    server.restart();
    let count = events_of(&store).len() as u64;
    wait_until("the rest is published", || {
        let published = entries(&server, "p/events");
        published.iter().any(|entry| entry.first + entry.events.len() as u64 == count)
    });
    let events = events_of(&store);
    store.close();
    let published = entries(&server, "p/events");
    assert_eq!(check(&published, &events, 4), count);
    assert_eq!(published.last().map(|entry| &*entry.stage), Some("closed"));
}

/// Number of events in the stream at a server.
fn check_len(server: &Server) -> u64 {
    entries(server, "p/events").iter().map(|entry| entry.events.len() as u64).sum()
}

#[test]
fn event_stream_is_in_the_slot_of_its_key() {
    if !is_there() {
        return;
    }
    let servers = cluster();
    let store = TestStore::open(&publishing_spec(&servers[0].url(), ", cluster=true"));
    put(&store, 1, 64);
    let slot = servers[0].cli(&["cluster", "keyslot", "p/events"]);
    let has_it = |server: &&Server| server.cli(&["cluster", "countkeysinslot", &slot]) == "1";
    wait_until("some node has the stream", || servers.iter().any(|server| has_it(&server)));
    let master =
        servers.iter().find(|server| has_it(server) && server.cli(&["role"]).starts_with("master"));
    let master = master.expect("a master has it");
    wait_until("all is published", || check_len(master) == 4);
    assert_eq!(check(&entries(master, "p/events"), &events_of(&store), 0), 4);
    store.close();
}

#[test]
fn overflowing_events_are_reported_as_missed() {
    if !is_there() {
        return;
    }
    let server = Server::start(&[]);
    let mut spec = publishing_spec(&server.url(), ", events_kept=1000");
    spec.config.events = 16;
    let store = TestStore::open(&spec);
    put(&store, 1, 16);
    wait_until("it is published", || check_len(&server) == 1);
    server.pause();
    (2..8).for_each(|number| put(&store, number, 160));
    server.go_on();
    let all = store.handle.inspect(|core| core.events.next_number()).expect("open");
    let ends = |entry: &Entry| entry.first + entry.events.len() as u64;
    wait_until("the last one is published", || {
        entries(&server, "p/events").last().is_some_and(|entry| ends(entry) == all)
    });
    let published = entries(&server, "p/events");
    let missed = published.iter().map(|entry| entry.missed).max().expect("some");
    assert!(missed > 0, "{published:?}");
    // The stream has gaps, and their lengths are reported.
    let mut next = 0;
    for entry in &published {
        assert!(entry.first <= next + entry.missed, "{next}: {entry:?}");
        next = next.max(ends(entry));
    }
    assert_eq!(next, all);
    store.close();
}

#[test]
fn sealed_store_rejects_an_event_stream() {
    let mut spec = publishing_spec("redis://127.0.0.1:1", ", connect=50");
    spec.secrets.add("seal", &[7; 32]).expect("taken");
    let runtime = support::runtime();
    let error = Store::open(runtime.core(), None, &spec).err().expect("refused");
    let want = if cfg!(feature = "seal") { Status::Spec } else { Status::Unsupported };
    assert_eq!(error.status(), want, "{error}");
}
