//! `kvtier metrics` over HTTP and for several stores: formats, hostile clients, stores that are down.

use kvtier_testkit::fixtures::store as support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::{Scratch, TestStore, spec_of};

/// A longer wait is a hang, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(300);
/// Connections at once (`docs/reference/limits.md`).
const MAX_CONNECTIONS: usize = 16;

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server of metrics.
struct Server {
    process: Process,
    at: SocketAddr,
    messages: BufReader<std::process::ChildStderr>,
}

impl Server {
    fn start(args: &[&str], sockets: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
        command.args(["metrics", "--serve", "0"]).args(args).stderr(Stdio::piped());
        for socket in sockets {
            command.args(["--socket", socket]);
        }
        let mut process = Process(command.spawn().expect("started"));
        let mut messages = BufReader::new(process.0.stderr.take().expect("a pipe"));
        let mut line = String::new();
        messages.read_line(&mut line).expect("a line");
        let at = line.trim().strip_prefix("kvtier: serving metrics at http://");
        let at = at.and_then(|at| at.strip_suffix("/metrics")).unwrap_or_else(|| panic!("{line}"));
        Server { at: at.parse().expect("an address"), process, messages }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.at).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream
    }

    /// Sends bytes, and returns everything that is answered.
    fn send(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // It may answer before it has read everything.
        let _ = stream.write_all(bytes);
        answer(&mut stream)
    }

    fn get(&self, path: &str, headers: &str) -> String {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\n{headers}\r\n").as_bytes())
    }

    /// The metrics, without the headers of HTTP.
    fn metrics(&self) -> String {
        let text = self.get("/metrics", "");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        body(&text).to_string()
    }

    fn message(&mut self) -> String {
        let mut line = String::new();
        self.messages.read_line(&mut line).expect("a line");
        line
    }
}

fn answer(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8(text).expect("text")
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").expect("a body").1
}

fn place(name: &str) -> (Scratch, PathBuf) {
    let scratch = Scratch::new(name);
    std::fs::create_dir_all(&scratch.0).expect("a directory");
    let path = scratch.0.join("kv.sock");
    (scratch, path)
}

fn opened(path: &Path) -> TestStore {
    TestStore::open(&spec_of(&format!(
        "store(control=\"{}\",host=1MiB,chunks=256)",
        path.display()
    )))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "{what}: never");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An independent parser of the text, with its input format; None = it is not installed.
fn parse_with(program: &str, args: &[&str], input: &str) -> Option<(bool, String)> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().ok()?;
    child.stdin.take()?.write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("ended");
    let said = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned());
    Some((output.status.success(), said.concat()))
}

#[test]
fn pages_are_valid_for_independent_parsers() {
    let (scratch, path) = place("exporter-format");
    let store = opened(&path);
    let gone = scratch.0.join("gone");
    let gone = format!("a \"quoted\\\" name={}", gone.display());
    let server = Server::start(&[], &[text(&path), &gone]);
    let plain = server.metrics();
    assert!(plain.contains("\nkvtier_puts_total{store=\"kv\"} 0\n"), "{plain}");
    assert!(plain.contains("\nkvtier_up{store=\"a \\\"quoted\\\\\\\" name\"} 0\n"), "{plain}");
    assert!(
        plain.contains("\nkvtier_get_seconds_bucket{store=\"kv\",tier=\"host\",le=\"+Inf\"} 0\n")
    );
    let open =
        server.get("/metrics", "Accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1\r\n");
    assert!(open.contains("Content-Type: application/openmetrics-text; version=1.0.0;"), "{open}");
    let open = body(&open);
    assert!(open.contains("# TYPE kvtier_puts counter\n") && open.ends_with("\n# EOF\n"), "{open}");
    store.close();

    let python = std::env::var("KVTIER_OBSERVE_PYTHON").unwrap_or("python3".into());
    for (module, page) in [("parser", plain.as_str()), ("openmetrics.parser", open)] {
        let script = format!(
            "import sys\ntry: from prometheus_client.{module} import text_string_to_metric_families as parse\n\
             except ImportError: sys.exit(print('absent'))\n\
             all = {{f.name: f for f in parse(sys.stdin.read())}}\n\
             assert len(all) > 90 and all['kvtier_puts'].type == 'counter', len(all)\n\
             assert [s.labels['store'] for s in all['kvtier_up'].samples] == ['kv', 'a \"quoted\\\\\" name']\n"
        );
        match parse_with(&python, &["-c", &script], page) {
            Some((true, said)) if said.trim() == "absent" => {
                eprintln!("SKIP: {python} has no package prometheus_client");
            }
            Some((well, said)) => assert!(well, "{module}: {said}"),
            None => eprintln!("SKIP: no {python}"),
        }
    }
    match parse_with("promtool", &["check", "metrics"], &plain) {
        // Its advice about names is no error of the format.
        Some((well, said)) => assert!(well || !said.contains("error"), "{said}"),
        None => eprintln!("SKIP: promtool is not installed (Debian's package prometheus)"),
    }
}

#[test]
fn other_requests_get_a_status_and_a_reason() {
    let (_scratch, path) = place("exporter-requests");
    let server = Server::start(&["--timeout", "1"], &[text(&path)]);
    let long = format!("GET /metrics HTTP/1.1\r\nA: {}\r\n\r\n", "a".repeat(1 << 20));
    for (request, status, word) in [
        ("GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", "200 OK", "ok"),
        ("GET /metrics?a=b HTTP/1.0\r\n\r\n", "200 OK", "kvtier_up{store=\"kv\"} 0"),
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", "404 Not Found", "/metrics"),
        ("GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", "404 Not Found", "/metrics"),
        (
            "POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
            "405 Method",
            "Allow: GET, HEAD",
        ),
        ("\u{1}\u{2}\u{3} rubbish \u{0}\r\n\r\n", "400 Bad Request", "malformed HTTP/1.1 request"),
        ("GET / HTTP/3.0\r\n\r\n", "505 HTTP", "HTTP/1.1"),
        (&long, "431 Request", "8192 bytes"),
    ] {
        let text = server.send(request.as_bytes());
        let is_well = text.starts_with(&format!("HTTP/1.1 {status}")) && text.contains(word);
        assert!(is_well, "{request:.60}: {text}");
        assert!(text.contains("\r\nConnection: close\r\n"), "{text}");
    }
    let head = server.send(b"HEAD /healthz HTTP/1.1\r\n\r\n");
    assert!(head.contains("Content-Length: 3\r\n") && head.ends_with("\r\n\r\n"), "{head}");
    // Random bytes, and clients that leave at once.
    for round in 0..100u64 {
        let mut stream = server.connect();
        let bytes: Vec<u8> = (0..round * 7).map(|n| support::mix(round * 1000 + n) as u8).collect();
        let _ = stream.write_all(&bytes);
    }
    until("it answers still", || server.get("/healthz", "").ends_with("ok\n"));
}

#[test]
fn slow_clients_are_disconnected_and_delay_no_other() {
    let (_scratch, path) = place("exporter-slow");
    let server = Server::start(&["--timeout", "1"], &[text(&path)]);
    let mut slow = server.connect();
    slow.write_all(b"GET /metrics HT").expect("sent");
    for _ in 0..3 {
        assert!(server.get("/healthz", "").ends_with("ok\n"));
    }
    let mut trickling = server.connect();
    let mut rest = b"GET / HTTP/1.1\r\nA: ".iter().chain(std::iter::repeat(&b'a'));
    until("a client that sends byte after byte is disconnected", || {
        std::thread::sleep(Duration::from_millis(50));
        trickling.write_all(&[*rest.next().expect("endless")]).is_err()
    });
    let text = answer(&mut slow);
    assert!(text.starts_with("HTTP/1.1 408 ") && text.contains("within 10 s"), "{text}");
}

#[test]
fn connections_above_the_limit_are_refused_until_one_ends() {
    let (_scratch, path) = place("exporter-many");
    let server = Server::start(&["--timeout", "1"], &[text(&path)]);
    let mut open: Vec<TcpStream> = (0..MAX_CONNECTIONS).map(|_| server.connect()).collect();
    let refused = server.get("/healthz", "");
    // A client that sends at the same time may see a reset instead.
    assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 503 "), "{refused}");
    open.clear();
    until("places are free", || server.get("/healthz", "").ends_with("ok\n"));
}

/// A process with a store at `path`.
fn engine(path: &Path) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    command.args(["demo", "--sessions", "2", "--linger", "600", "--json", "--control"]).arg(path);
    Process(command.stdout(Stdio::null()).spawn().expect("started"))
}

#[test]
fn a_killed_store_is_down_and_is_up_again_once_restarted() {
    let (scratch, path) = place("exporter-restart");
    // The directory is given: the name comes from the socket.
    let mut server = Server::start(&["--timeout", "60"], &[text(&scratch.0)]);
    assert!(!server.metrics().contains("kvtier_up"), "there is no socket yet");
    let up = |server: &Server, value| {
        server.metrics().contains(&format!("\nkvtier_up{{store=\"kv\"}} {value}\n"))
    };
    let mut first = engine(&path);
    until("the store is up", || up(&server, 1));
    first.0.kill().expect("killed");
    first.0.wait().expect("ended");
    let page = server.metrics();
    assert!(
        page.contains("kvtier_up{store=\"kv\"} 0\n") && !page.contains("kvtier_puts"),
        "{page}"
    );
    let message = server.message();
    assert!(message.starts_with("kvtier: store kv is down: no store answers at "), "{message}");
    let _second = engine(&path);
    until("the store is up again", || up(&server, 1));
    assert_eq!(server.message(), "kvtier: store kv is up again\n");
}

#[test]
fn a_stuck_store_is_down_and_hides_no_other() {
    let (scratch, path) = place("exporter-stuck");
    let store = opened(&path);
    // One accepts nothing and its queue is full; one answers what no store would answer.
    let silent = scratch.0.join("silent.sock");
    let _silent = UnixListener::bind(&silent).expect("bound");
    let full = scratch.0.join("full.sock");
    let listener = UnixListener::bind(&full).expect("bound");
    let _queue = fill(&listener, &full);
    let liar = scratch.0.join("liar.sock");
    let listener = UnixListener::bind(&liar).expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.and_then(|mut stream| stream.write_all(b"ok 9\n{\"a\": 1}\n"));
        }
    });
    let sockets = [&path, &silent, &full, &liar].map(|path| text(path));
    let mut server = Server::start(&["--timeout", "5"], &sockets);
    let mut page = String::new();
    until("the healthy store answers", || {
        page = server.metrics();
        page.contains("\nkvtier_up{store=\"kv\"} 1\n")
    });
    for (name, value) in [("kv", 1), ("silent", 0), ("full", 0), ("liar", 0)] {
        assert!(page.contains(&format!("\nkvtier_up{{store=\"{name}\"}} {value}\n")), "{page}");
    }
    assert!(page.contains("\nkvtier_puts_total{store=\"kv\"} 0\n"), "{page}");
    let mut words =
        vec!["has not answered within 5s", "accepts no connection within 5s", "a malformed line"];
    while !words.is_empty() {
        let message = server.message();
        assert!(!message.is_empty(), "it ended before: {words:?}");
        words.retain(|word| !message.contains(word));
    }
    store.close();
}

/// Connections that fill the queue of a listener which accepts none.
fn fill(listener: &UnixListener, path: &Path) -> Vec<UnixStream> {
    use std::os::fd::AsRawFd;
    // SAFETY: listen on a descriptor of ours; again, with the shortest queue.
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    vec![UnixStream::connect(path).expect("the queue has one place")]
}

#[test]
fn several_stores_are_printed_with_labels() {
    let (scratch, path) = place("exporter-print");
    let store = opened(&path);
    let print = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier"));
        let output = command.arg("metrics").args(args).output().expect("started");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let named = format!("a={}", path.display());
    let gone = scratch.0.join("gone.sock");
    let (well, out, _) = print(&["--socket", &named, "--socket", text(&gone)]);
    assert!(well && out.contains("kvtier_puts_total{store=\"a\"} 0\n"), "{out}");
    assert!(out.contains("kvtier_up{store=\"a\"} 1\nkvtier_up{store=\"gone\"} 0\n"), "{out}");
    let (well, out, _) = print(&["--socket", text(&path)]);
    assert!(well && out.contains("kvtier_puts_total 0\n") && !out.contains("kvtier_up"), "{out}");
    for (args, word) in [
        (&["--socket", &named, "--json"][..], "without a NAME"),
        (&["--socket", "a="], "a control socket, or a directory"),
        (&["--socket", "a", "--timeout", "0"], "0.1 to 60 seconds"),
        (&["--socket", "a", "--timeout", "x"], "0.1 to 60 seconds"),
        (&["--socket", "a", "--serve", "nowhere"], "use PORT or ADDRESS:PORT"),
        (&["--socket", "a", "--serve", "192.0.2.1:1"], "cannot listen at 192.0.2.1:1"),
        (&["--socket", "a", "--serve", "--json"], "cannot be used with"),
        (&[], "required"),
    ] {
        let (well, _, error) = print(args);
        assert!(!well && error.contains(word), "{args:?}: {error}");
    }
    store.close();
}

#[test]
fn a_termination_signal_ends_the_server() {
    let (_scratch, path) = place("exporter-signal");
    let mut server = Server::start(&[], &[text(&path)]);
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(server.process.0.id() as i32, libc::SIGTERM) }, 0);
    let status = server.process.0.wait().expect("ended");
    assert!(status.success(), "{status}");
}
