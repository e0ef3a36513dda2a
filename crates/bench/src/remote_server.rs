//! The Redis server of the group `remote`, given or started; its own benchmark; and a bare socket
//! that speaks its protocol.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::fixtures::Outcome;

/// Bytes of an object.
pub const BYTES: usize = 256 << 10;
/// Environment variable with the password of a given server.
const PASSWORD: &str = "KVTIER_REMOTE_PASSWORD";
/// Timeout of starting the server and of a reply.
const PATIENCE: Duration = Duration::from_secs(30);
/// Keys that its benchmark writes on a given server.
pub const KEYS: u64 = 256;

/// A server.
pub struct Server {
    /// The URL.
    pub url: String,
    /// The password, if the server needs one.
    pub password: Option<Vec<u8>>,
    /// Host and port, if its benchmark can be run: without user, database and password.
    place: Option<(String, u16)>,
    /// The process and the folder of a server that was started here.
    own: Option<(Child, PathBuf)>,
    /// Whether the server was checked to have none of the keys that its benchmark writes.
    is_checked: Cell<bool>,
}

impl Server {
    /// A given server.
    pub fn at(url: &str) -> Server {
        let password = std::env::var_os(PASSWORD).filter(|password| !password.is_empty());
        let password = password.map(std::os::unix::ffi::OsStringExt::into_vec);
        let place = place_of(url).filter(|_| password.is_none());
        Server { url: url.to_string(), password, place, own: None, is_checked: Cell::new(false) }
    }

    /// Starts a server on a free local port.
    pub fn start() -> Outcome<Server> {
        let is_there = Command::new("redis-server").arg("--version").output().is_ok();
        if !is_there {
            return Err("SKIP: redis-server is not installed, and no --url is given".to_string());
        }
        let say = |error: std::io::Error| error.to_string();
        let free = TcpListener::bind(("127.0.0.1", 0)).and_then(|on| on.local_addr());
        let port = free.map_err(say)?.port();
        let dir = format!("kvtier-bench-redis-{}-{port}", std::process::id());
        let dir = std::env::temp_dir().join(dir);
        std::fs::create_dir_all(&dir).map_err(say)?;
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no", "--maxmemory", "1gb"])
            .args(["--maxmemory-policy", "allkeys-lru", "--dir"])
            .arg(&dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(say)?;
        let place = Some(("127.0.0.1".to_string(), port));
        let url = format!("redis://127.0.0.1:{port}");
        let (own, is_checked) = (Some((child, dir)), Cell::new(false));
        let server = Server { url, password: None, place, own, is_checked };
        let since = Instant::now();
        while server.raw().and_then(|mut raw| raw.execute(&[&["PING"]])).is_err() {
            if since.elapsed() > PATIENCE {
                return Err(format!("the redis-server started at port {port} does not answer"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    /// Whether the server was started here.
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// Fails with the reason if its benchmark cannot be run.
    pub fn is_measurable(&self) -> Outcome<()> {
        if self.place.is_none() {
            return Err("SKIP: a server with a user, a password, a database or several hosts: \
                 redis-benchmark would show the password to other users"
                .to_string());
        }
        match Command::new("redis-benchmark").arg("--version").output() {
            Ok(_) => Ok(()),
            Err(_) => Err("SKIP: redis-benchmark is not installed".to_string()),
        }
    }

    /// Opens a bare socket.
    pub fn raw(&self) -> Outcome<Raw> {
        let (host, port) = self.place.as_ref().ok_or("SKIP: its host alone is not known")?;
        Raw::open(host, *port)
    }

    /// Removes all keys of a server started here, or those of its benchmark from a given one.
    pub fn empty(&self) -> Outcome<()> {
        if self.own.is_some() {
            return self.raw()?.execute(&[&["FLUSHALL"]]).map(drop);
        }
        if !self.is_checked.get() {
            return Ok(());
        }
        let names: Vec<String> = (0..KEYS).map(key).collect();
        let lines: Vec<[&str; 2]> = names.iter().map(|name| ["UNLINK", name]).collect();
        self.raw()?.execute(&lines.iter().map(|line| &line[..]).collect::<Vec<_>>()).map(drop)
    }

    /// Fails if a given server has keys that its benchmark would write.
    pub fn check(&self) -> Outcome<()> {
        let names: Vec<String> = (0..KEYS).map(key).collect();
        let lines: Vec<[&str; 2]> = names.iter().map(|name| ["STRLEN", name]).collect();
        let lengths =
            self.raw()?.execute(&lines.iter().map(|line| &line[..]).collect::<Vec<_>>())?;
        match lengths.iter().all(|length| *length == 0) {
            true => {
                self.is_checked.set(true);
                Ok(())
            }
            false => {
                Err("SKIP: the server has keys such as key:000000000000, which redis-benchmark \
                          would write to"
                    .to_string())
            }
        }
    }

    /// Seconds of its own benchmark for `count` objects over one connection with `depth` concurrent
    /// requests.
    pub fn benchmark(&self, what: &str, count: u64, depth: u64) -> Outcome<f64> {
        let (host, port) = self.place.as_ref().ok_or("its host alone is not known")?;
        // On a server started here, sets use fresh keys as kvtier does, so that both allocate. Gets
        // need keys that exist.
        let is_new = self.own.is_some() && what == "set";
        let keys = if is_new { 1_000_000_000 } else { KEYS };
        let out = Command::new("redis-benchmark")
            .args(["-h", host, "-p", &port.to_string(), "-t", what, "-d", &BYTES.to_string()])
            .args(["-n", &count.to_string(), "-c", "1", "-P", &depth.to_string()])
            .args(["-r", &keys.to_string(), "--csv"])
            .output()
            .map_err(|error| format!("redis-benchmark: {error}"))?;
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let rate = text.lines().last().unwrap_or_default().split(',').nth(1);
        let rate: Option<f64> = rate.and_then(|rate| rate.trim_matches('"').parse().ok());
        match rate.filter(|rate| *rate > 0.0) {
            Some(rate) => Ok(count as f64 / rate),
            None => Err("the output of redis-benchmark is not understood".to_string()),
        }
    }

    /// Writes all keys for gets.
    pub fn stock(&self) -> Outcome<()> {
        let value = "x".repeat(BYTES);
        let mut raw = self.raw()?;
        for number in 0..KEYS {
            raw.execute(&[&["SET", &key(number), &value]])?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        match &mut self.own {
            Some((child, dir)) => {
                drop(child.kill());
                drop(child.wait());
                drop(std::fs::remove_dir_all(dir));
            }
            None => drop(self.empty()),
        }
    }
}

/// A key of its benchmark.
fn key(number: u64) -> String {
    format!("key:{number:012}")
}

/// The host and the port of a URL that has nothing else.
fn place_of(url: &str) -> Option<(String, u16)> {
    let rest = url.strip_prefix("redis://")?;
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    if rest.is_empty() || rest.contains(['@', ',', '/', '[']) {
        return None;
    }
    match rest.split_once(':') {
        Some((host, port)) => Some((host.to_string(), port.parse().ok()?)),
        None => Some((rest.to_string(), 6379)),
    }
}

/// A socket that writes commands and reads one-line answers.
pub struct Raw {
    stream: BufReader<TcpStream>,
    line: Vec<u8>,
}

impl Raw {
    fn open(host: &str, port: u16) -> Outcome<Raw> {
        let say = |error: std::io::Error| format!("{host}:{port}: {error}");
        let stream = TcpStream::connect((host, port)).map_err(say)?;
        stream.set_nodelay(true).map_err(say)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(say)?;
        Ok(Raw { stream: BufReader::with_capacity(64 << 10, stream), line: Vec::new() })
    }

    /// The bytes of commands.
    pub fn request(commands: &[&[&str]]) -> Vec<u8> {
        let mut out = Vec::new();
        for words in commands {
            out.extend_from_slice(format!("*{}\r\n", words.len()).as_bytes());
            for word in *words {
                out.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
            }
        }
        out
    }

    /// Sends commands; returns the numbers among the answers.
    pub fn execute(&mut self, commands: &[&[&str]]) -> Outcome<Vec<i64>> {
        self.round_trip(&Raw::request(commands), commands.len())
    }

    /// Sends the bytes of `count` commands; returns the numbers among the answers.
    pub fn round_trip(&mut self, request: &[u8], count: usize) -> Outcome<Vec<i64>> {
        let say = |error: std::io::Error| error.to_string();
        self.stream.get_mut().write_all(request).map_err(say)?;
        let mut numbers = Vec::with_capacity(count);
        for _ in 0..count {
            self.line.clear();
            self.stream.read_until(b'\n', &mut self.line).map_err(say)?;
            let text = std::str::from_utf8(self.line.trim_ascii()).unwrap_or_default();
            match text.split_at_checked(1) {
                Some((":", number)) => numbers.push(number.parse().unwrap_or(-1)),
                Some(("+", _)) => {}
                Some(("-", words)) => {
                    return Err(format!("the server: {}", words.split(' ').next().unwrap_or("")));
                }
                _ => return Err("the server has closed the connection".to_string()),
            }
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    #[allow(unused_imports, reason = "what `cargo bench` makes of this has no tests")]
    use super::*;

    #[test]
    fn redis_benchmark_runs_only_without_secrets_in_its_arguments() {
        assert_eq!(place_of("redis://a:7"), Some(("a".to_string(), 7)));
        assert_eq!(place_of("redis://a/"), Some(("a".to_string(), 6379)));
        for url in
            ["redis://u@a", "redis://a/3", "redis://a,b", "rediss://a", "redis://", "redis://[::1]"]
        {
            assert_eq!(place_of(url), None, "{url}");
        }
        assert_eq!(
            Raw::request(&[&["STRLEN", "k"], &["PING"]]),
            b"*2\r\n$6\r\nSTRLEN\r\n$1\r\nk\r\n*1\r\n$4\r\nPING\r\n"
        );
    }
}
