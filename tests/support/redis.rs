//! Redis servers of tests: started here on ports of this machine that nobody else sees, and ended
//! with the test.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// A server.
pub struct Server {
    child: Option<Child>,
    pub port: u16,
    dir: PathBuf,
    args: Vec<String>,
}

/// Whether there are servers to be started; says so if not.
pub fn is_there() -> bool {
    let has = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let there = has("redis-server") && has("redis-cli");
    if !there {
        println!("SKIP: redis-server and redis-cli are not installed");
    }
    there
}

/// A port that is free, as is the one of a cluster's bus above it.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20000 + ((std::process::id() as u16).wrapping_mul(37).wrapping_add(step)) % 9000;
        if free(port) && free(port + 10000) {
            return port;
        }
    }
}

impl Server {
    pub fn start(args: &[&str]) -> Server {
        let port = port();
        let dir = std::env::temp_dir().join(format!("kvt-redis-{}-{port}", std::process::id()));
        drop(std::fs::remove_dir_all(&dir));
        std::fs::create_dir_all(&dir).expect("a directory");
        let args = args.iter().map(|arg| arg.to_string()).collect();
        let mut server = Server { child: None, port, dir, args };
        server.restart();
        server
    }

    /// Starts it again where it was.
    pub fn restart(&mut self) {
        self.kill();
        let child = Command::new("redis-server")
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no", "--enable-debug-command", "yes", "--dir"])
            .arg(&self.dir)
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("a server"));
        let since = Instant::now();
        while !self.answers() {
            assert!(since.elapsed() < Duration::from_secs(30), "no server at {}", self.port);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn answers(&self) -> bool {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.port)) else { return false };
        let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
        let _ = stream.write_all(b"*1\r\n$4\r\nPING\r\n");
        let mut byte = [0];
        stream.read_exact(&mut byte).is_ok()
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, signal: i32) {
        let child = self.child.as_ref().expect("it runs");
        // SAFETY: a process of ours that has not been waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
    }

    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    pub fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// What redis-cli prints.
    pub fn cli(&self, args: &[&str]) -> String {
        let port = self.port.to_string();
        let out = Command::new("redis-cli").args(["-p", &port]).args(args).output();
        String::from_utf8_lossy(&out.expect("redis-cli").stdout).trim().to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// A connection of our own, for more commands than programs can be started for.
pub struct Wire(BufReader<TcpStream>);

impl Wire {
    pub fn open(port: u16) -> Wire {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("a server");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        stream.set_nodelay(true).expect("set");
        Wire(BufReader::new(stream))
    }

    /// The words of what is answered to each line; all are sent before the first answer is read.
    pub fn ask(&mut self, lines: &[String]) -> Vec<Vec<String>> {
        let text: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        self.0.get_mut().write_all(text.as_bytes()).expect("said");
        lines.iter().map(|_| self.hear()).collect()
    }

    /// Lines that are done and say no more.
    pub fn done(&mut self, lines: &[String]) {
        let said = self.ask(lines);
        said.iter().zip(lines).for_each(|(said, line)| assert_eq!(*said, ["OK"], "{line}"));
    }

    fn hear(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        let mut left = 1;
        while left > 0 {
            left -= 1;
            let head = self.line();
            match head.split_at(1) {
                ("*", count) => left += count.parse::<usize>().expect("a length"),
                ("$", bytes) => {
                    let mut text = vec![0; bytes.parse::<usize>().expect("a length") + 2];
                    self.0.read_exact(&mut text).expect("all of it");
                    words.push(String::from_utf8_lossy(&text).trim_end().to_string());
                }
                ("+" | ":", word) => words.push(word.to_string()),
                _ => words.push(head),
            }
        }
        words
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        line.trim_end().to_string()
    }
}

/// Three masters and three replicas.
pub fn cluster() -> Vec<Server> {
    cluster_with(Vec::new)
}

/// The same, each with more arguments.
pub fn cluster_with(more: impl Fn() -> Vec<String>) -> Vec<Server> {
    let start = || {
        let more = more();
        let args = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "1000",
            "--cluster-require-full-coverage",
            "no",
            "--repl-diskless-sync-delay",
            "0",
            "--maxmemory",
            "256mb",
        ];
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        Server::start(&[&args[..], &more[..]].concat())
    };
    let nodes: Vec<Server> = (0..6).map(|_| start()).collect();
    let places = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port));
    let made = Command::new("redis-cli")
        .args(["--cluster", "create"])
        .args(places)
        .args(["--cluster-replicas", "1", "--cluster-yes"])
        .output()
        .expect("redis-cli");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stdout));
    let is_whole = || {
        let is_ok = |node: &Server| {
            let known = node.cli(&["cluster", "nodes"]);
            node.cli(&["cluster", "info"]).contains("cluster_state:ok")
                && known.lines().filter(|line| line.contains("slave")).count() == 3
        };
        let follows =
            |node: &&Server| node.cli(&["info", "replication"]).contains("master_link_status:up");
        nodes.iter().all(is_ok) && nodes.iter().filter(follows).count() == 3
    };
    wait_until("the cluster is whole", is_whole);
    nodes
}

pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
