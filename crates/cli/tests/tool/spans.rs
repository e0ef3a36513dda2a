//! `kvtier spans`: the export to a collector, failures of the collector, and restarts of the store.

use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use kvtier::base::status::Status;
use kvtier::store::state::transfer::Level;
use kvtier::store::transfer_log::TRANSFERS_KEPT;
use serde_json::Value;
use support::{Engine, Model, Scratch, Shape, TestStore, document, marks_of, spec_of};

const SMALL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };
/// A longer wait is a hang, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process that ends with the test.
struct Exporter {
    process: Child,
    messages: BufReader<ChildStderr>,
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Exporter {
    fn start(args: &[&str]) -> Exporter {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
        command.args(["spans", "--every", "0.1"]).args(args);
        let mut process = command.stderr(Stdio::piped()).spawn().expect("started");
        let messages = BufReader::new(process.stderr.take().expect("a pipe"));
        Exporter { process, messages }
    }

    /// The next message that contains `word`.
    fn message(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.messages.read_line(&mut line).expect("a line") > 0,
                "it ended before: {word}"
            );
            if line.contains(word) {
                return line;
            }
        }
    }
}

/// A collector that answers as the test says.
struct Collector(TcpListener);

impl Collector {
    fn open() -> (Collector, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        (Collector(listener), url)
    }

    /// Takes an export, and gives an answer; returns the request's body.
    fn take(&self, answer: &str) -> String {
        self.take_open(answer).0
    }

    /// The same; returns the connection, which stays open, too.
    fn take_open(&self, answer: &str) -> (String, TcpStream) {
        let (mut stream, _) = self.0.accept().expect("a connection");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
        let (mut head, mut line) = (String::new(), String::new());
        while line != "\r\n" {
            line.clear();
            assert!(reader.read_line(&mut line).expect("a line") > 0, "{head}");
            head += &line;
        }
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        assert!(head.contains("\r\nContent-Type: application/json\r\n"), "{head}");
        let length = head.split("Content-Length: ").nth(1).and_then(|rest| rest.lines().next());
        let mut body = vec![0; length.and_then(|text| text.parse().ok()).expect("a length")];
        reader.read_exact(&mut body).expect("the body");
        stream.write_all(answer.as_bytes()).expect("sent");
        (String::from_utf8(body).expect("text"), stream)
    }
}

const TAKEN: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";

fn place(name: &str) -> (Scratch, PathBuf) {
    let scratch = Scratch::new(name);
    std::fs::create_dir_all(&scratch.0).expect("a directory");
    let path = scratch.0.join("kv.sock");
    (scratch, path)
}

fn opened(path: &Path) -> TestStore {
    TestStore::open(&spec_of(&format!(
        "store(control=\"{}\",host=8MiB,chunks=4096)",
        path.display()
    )))
}

/// One answer of the log of ended transfers.
fn log(path: &Path, request: &str) -> Value {
    let mut stream = std::os::unix::net::UnixStream::connect(path).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.write_all(format!("{request}\n").as_bytes()).expect("sent");
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    reader.read_line(&mut head).expect("a line");
    let bytes = head.trim().strip_prefix("ok ").and_then(|bytes| bytes.parse().ok());
    let mut body = vec![0; bytes.unwrap_or_else(|| panic!("{head}"))];
    reader.read_exact(&mut body).expect("the body");
    serde_json::from_slice(&body).expect("JSON")
}

/// Puts a document, gets it, and gets one that is not there.
fn work(store: &TestStore, namespace: u32, n: u32) {
    let own = document(n, 64);
    let engine = Engine::computed(SMALL, Shape::Tokens, &marks_of(0, &own));
    let session = store.session(namespace, &own);
    assert_eq!(store.put(session, Level::Ram, &engine).status, Status::Ok);
    assert_eq!(store.get(session, &engine).status, Status::Ok);
    store.close_session(session);
    let other = document(n + 100_000, 48);
    let engine = Engine::computed(SMALL, Shape::Tokens, &marks_of(0, &other));
    let absent = store.session(namespace, &other);
    assert_eq!(store.get(absent, &engine).status, Status::NotFound);
    store.close_session(absent);
}

/// The spans of an export.
fn spans(body: &str) -> Vec<Value> {
    let export: Value = serde_json::from_str(body).expect("JSON");
    export
        .pointer("/resourceSpans/0/scopeSpans/0/spans")
        .and_then(Value::as_array)
        .expect("spans")
        .clone()
}

#[test]
fn the_log_of_ended_transfers_begins_with_its_first_reader() {
    let (_scratch, path) = place("spans-log");
    let store = opened(&path);
    let namespace = store.namespace(1, &SMALL);
    work(&store, namespace, 0);
    let first = log(&path, "transfers");
    assert_eq!((&first["next"], &first["missed"]), (&0.into(), &0.into()), "{first}");
    work(&store, namespace, 1);
    let seen = log(&path, "transfers");
    assert_eq!(seen["run"], first["run"]);
    let all = seen["transfers"].as_array().expect("a list");
    let row = |at: usize, keys: [&str; 5]| keys.map(|key| all[at][key].to_string()).join(" ");
    let keys = ["kind", "level", "status", "tokens", "missed_cells"];
    assert_eq!(row(0, keys), "\"put\" \"ram\" \"KVT_OK\" 64 0");
    assert_eq!(row(1, keys), "\"get\" null \"KVT_OK\" 64 0");
    assert_eq!(row(2, keys), "\"get\" null \"KVT_E_NOT_FOUND\" 0 12");
    let keys = ["number", "chunks", "layers", "tenant", "read_disk"];
    assert_eq!(row(0, keys), "0 4 4 0 false");
    assert_eq!(all[0]["session_serial"], all[1]["session_serial"]);
    assert_ne!(all[0]["session_serial"], all[2]["session_serial"]);
    assert!(all[0]["bytes"].as_u64() > Some(0) && all[0]["bytes"] == all[1]["bytes"], "{seen}");
    for one in all {
        let at = |key: &str| one[key].as_u64().expect("a number");
        assert!(at("began_ns") <= at("ended_ns"), "{one}");
        assert!(at("ended_ns") <= seen["now_ns"].as_u64().expect("a number"), "{seen}");
    }
    let rest = log(&path, "transfers(from=2)");
    assert_eq!(rest["transfers"].as_array().map(Vec::len), Some(1), "{rest}");
    // A reader that is too slow learns how many it missed.
    let most = TRANSFERS_KEPT as u32 / 3 + 5;
    (2..most).for_each(|n| work(&store, namespace, n % 8));
    let late = log(&path, "transfers(from=1,most=2)");
    let next = late["next"].as_u64().expect("a number");
    assert_eq!(next, u64::from(most - 1) * 3);
    assert_eq!(late["missed"].as_u64(), Some(next - TRANSFERS_KEPT as u64 - 1), "{late}");
    assert_eq!(late["transfers"][0]["number"].as_u64(), Some(next - TRANSFERS_KEPT as u64));
    store.close();
}

#[test]
fn spans_reach_the_collector_once_it_takes_them() {
    let (scratch, path) = place("spans-export");
    let store = opened(&path);
    let namespace = store.namespace(1, &SMALL);
    let (collector, url) = Collector::open();
    let socket = scratch.0.to_str().expect("text");
    let mut exporter =
        Exporter::start(&["--socket", socket, "--otlp", &url, "--service", "engine"]);
    // Nothing has a reader before the exporter has asked once.
    while log_has_no_reader(&store) {
        std::thread::sleep(Duration::from_millis(5));
    }
    work(&store, namespace, 0);
    // All three transfers may not have ended by the time of the first export.
    let refused = collector.take("HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\nlater");
    exporter.message("status 503: later");
    let mut all = Vec::new();
    let mut again = collector.take(TAKEN);
    let ids = |body: &str| -> Vec<Value> {
        spans(body).into_iter().map(|span| span["spanId"].clone()).collect()
    };
    assert!(ids(&again).starts_with(&ids(&refused)), "what was refused is sent again");
    exporter.message("spans are exported again");
    loop {
        all.extend(spans(&again));
        if all.len() == 3 {
            break;
        }
        again = collector.take(TAKEN);
    }
    let names: Vec<&str> = all.iter().filter_map(|span| span["name"].as_str()).collect();
    assert_eq!(names, ["kvtier.put", "kvtier.get", "kvtier.get"]);
    let ids: BTreeSet<_> = all.iter().filter_map(|span| span["spanId"].as_str()).collect();
    assert_eq!(ids.len(), 3);
    assert_eq!(all[0]["traceId"], all[1]["traceId"], "a session is a trace");
    assert_ne!(all[0]["traceId"], all[2]["traceId"]);
    let export: Value = serde_json::from_str(&again).expect("JSON");
    let service = export.pointer("/resourceSpans/0/resource/attributes/0/value/stringValue");
    assert_eq!(service.and_then(Value::as_str), Some("engine"));
    // The collector rejects these for good: they are counted, and the next ones follow.
    work(&store, namespace, 1);
    let mut lost = spans(&collector.take("HTTP/1.1 400 Bad Request\r\n\r\nno")).len();
    exporter.message(&format!("{lost} spans are lost: "));
    while lost < 3 {
        lost += spans(&collector.take(TAKEN)).len();
    }
    check_with_protobuf(&again);
    store.close();
    // Another opening: its numbers begin again, and so do the ids.
    let store = opened(&path);
    let namespace = store.namespace(1, &SMALL);
    while log_has_no_reader(&store) {
        std::thread::sleep(Duration::from_millis(5));
    }
    work(&store, namespace, 0);
    let restarted = spans(&collector.take(TAKEN));
    assert_eq!(restarted[0]["name"], "kvtier.put");
    assert_ne!(restarted[0]["traceId"], all[0]["traceId"]);
    store.close();
}

#[test]
fn an_answer_on_an_open_connection_is_no_failure() {
    let (scratch, path) = place("spans-open");
    let store = opened(&path);
    let namespace = store.namespace(1, &SMALL);
    let (collector, url) = Collector::open();
    // One store of the directory answers nothing: the export of the other one goes on.
    let dead = std::os::unix::net::UnixListener::bind(scratch.0.join("dead.sock")).expect("bound");
    drop(dead);
    let socket = scratch.0.to_str().expect("text");
    let mut exporter = Exporter::start(&["--socket", socket, "--otlp", &url]);
    while log_has_no_reader(&store) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    let (mut open, mut ids) = (Vec::new(), BTreeSet::new());
    for (n, answer) in [TAKEN, chunked].into_iter().enumerate() {
        work(&store, namespace, n as u32);
        while ids.len() < 3 * (n + 1) {
            let (body, stream) = collector.take_open(answer);
            open.push(stream);
            for span in spans(&body) {
                assert!(ids.insert(span["spanId"].to_string()), "sent again: {span}");
            }
        }
    }
    exporter.message("store dead: ");
    store.close();
}

fn log_has_no_reader(store: &TestStore) -> bool {
    !store.handle.inspect(|core| core.logs_transfers()).expect("open")
}

/// Parses an export with the published definition of the protocol.
fn check_with_protobuf(body: &str) {
    let python = std::env::var("KVTIER_OBSERVE_PYTHON").unwrap_or("python3".into());
    // JSON of protobuf has bytes in base64; OTLP makes an exception for ids.
    let script = "import base64, json, sys\n\
        try:\n\
        \x20 from google.protobuf.json_format import ParseDict\n\
        \x20 from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service\n\
        except ImportError: sys.exit(print('absent'))\n\
        export = json.load(sys.stdin)\n\
        for span in export['resourceSpans'][0]['scopeSpans'][0]['spans']:\n\
        \x20 for key, size in ('traceId', 16), ('spanId', 8):\n\
        \x20   assert len(bytes.fromhex(span[key])) == size and int(span[key], 16), span\n\
        \x20   span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()\n\
        message = ParseDict(export, service.ExportTraceServiceRequest())\n\
        spans = message.resource_spans[0].scope_spans[0].spans\n\
        assert spans and all(s.start_time_unix_nano <= s.end_time_unix_nano for s in spans)\n\
        assert all(abs(s.end_time_unix_nano / 1e9 - __import__('time').time()) < 3600 for s in spans)\n";
    let mut command = Command::new(&python);
    let child = command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let Ok(mut child) = child else { return eprintln!("SKIP: no {python}") };
    child.stdin.take().expect("a pipe").write_all(body.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("ended");
    if String::from_utf8_lossy(&output.stdout).trim() == "absent" {
        return eprintln!("SKIP: {python} has no package opentelemetry-proto");
    }
    assert!(output.status.success(), "{body}");
}

#[test]
fn without_a_collector_spans_are_printed_and_wrong_options_are_refused() {
    for (args, word) in [
        (&["--socket", "a", "--otlp", "https://a"][..], "there is no TLS"),
        (&["--socket", "a", "--otlp", "a:4318"], "use http://HOST[:PORT]"),
        (&["--socket", "a", "--every", "0"], "0.1 to 60 seconds"),
        (&[], "required"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
        let output = command.arg("spans").args(args).output().expect("started");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(word), "{args:?}: {error}");
    }
    let (_scratch, path) = place("spans-print");
    let store = opened(&path);
    let namespace = store.namespace(1, &SMALL);
    log(&path, "transfers");
    work(&store, namespace, 0);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.args(["spans", "--every", "0.1", "--socket"]).arg(&path).stdout(Stdio::piped());
    let mut process = command.spawn().expect("started");
    let mut line = String::new();
    BufReader::new(process.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let _ = process.kill();
    let _ = process.wait();
    assert_eq!(spans(&line).len(), 3, "transfers of an earlier reader are exported too");
    store.close();
}
