//! A bucket in this process, over HTTP: as S3 has it, or with one fault.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A request.
#[derive(Clone, Debug)]
pub struct Req {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// All before the body, as it came.
    pub head: String,
    pub body: Vec<u8>,
}

impl Req {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

/// What a server does with a request; false = the connection ends.
pub type Handler = dyn Fn(&Req, &mut TcpStream) -> bool + Send + Sync;

/// A server on a port of its own.
pub struct Server {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    is_over: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    connections: AtomicU64,
    handler: Box<Handler>,
}

impl Server {
    pub fn start(handler: impl Fn(&Req, &mut TcpStream) -> bool + Send + Sync + 'static) -> Server {
        Server::start_at(0, handler)
    }

    pub fn start_at(
        port: u16,
        handler: impl Fn(&Req, &mut TcpStream) -> bool + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("a port");
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            is_over: AtomicBool::new(false),
            streams: Mutex::new(Vec::new()),
            connections: AtomicU64::new(0),
            handler: Box::new(handler),
        });
        let all = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if all.is_over.load(Ordering::SeqCst) {
                    return;
                }
                stream.set_nodelay(true).unwrap();
                all.connections.fetch_add(1, Ordering::SeqCst);
                all.streams.lock().unwrap().push(stream.try_clone().unwrap());
                let all = all.clone();
                std::thread::spawn(move || serve(stream, &all));
            }
        });
        Server { port, shared }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Connections that were made so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// Ends all connections; more can be made.
    pub fn hang_up(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        self.hang_up();
    }
}

fn serve(mut stream: TcpStream, shared: &Shared) {
    let mut bytes = Vec::new();
    loop {
        let Some(req) = next(&mut stream, &mut bytes) else { return };
        if !(shared.handler)(&req, &mut stream) {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

/// The next request; None = the connection has ended.
fn next(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Req> {
    let mut piece = vec![0; 65536];
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return None,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
        }
    };
    let head = String::from_utf8(bytes[..end].to_vec()).expect("plain text");
    let mut words = head.split(' ');
    let (method, target) = (words.next()?.to_string(), words.next()?.to_string());
    let mut req = Req { method, target, head, body: bytes[end..].to_vec() };
    bytes.clear();
    let length = req.header("content-length").map_or(0, |n| n.parse().expect("a number"));
    assert!(req.body.len() <= length, "bytes that nobody asked for");
    let have = req.body.len();
    if have < length {
        req.body.resize(length, 0);
        stream.read_exact(&mut req.body[have..]).ok()?;
    }
    Some(req)
}

/// A reply with a length.
pub fn reply(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> bool {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n");
    if body.len() < 4096 {
        return stream.write_all(&[head.as_bytes(), body].concat()).is_ok();
    }
    stream.write_all(head.as_bytes()).is_ok() && stream.write_all(body).is_ok()
}

/// An error as S3 has it.
pub fn error(stream: &mut TcpStream, status: &str, code: &str, more: &str) -> bool {
    let body = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
         <Message>of the test</Message>{more}<RequestId>1</RequestId></Error>"
    );
    reply(stream, status, "Content-Type: application/xml\r\n", body.as_bytes())
}

/// How a bucket differs from others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quirks {
    /// What it says to `If-None-Match`: 501 or 400.
    pub no_conditions: u16,
    /// Objects come in chunks of so many bytes.
    pub chunks: usize,
    /// Every connection ends after a reply.
    pub closes: bool,
    /// It gives all of an object that is asked for from its first byte on.
    pub no_ranges: bool,
}

/// A bucket.
#[derive(Default)]
pub struct Bucket {
    pub objects: Mutex<HashMap<String, Vec<u8>>>,
    /// Requests so far, without bodies.
    pub seen: Mutex<Vec<Req>>,
    pub quirks: Quirks,
}

impl Bucket {
    pub fn new(quirks: Quirks) -> Arc<Bucket> {
        Arc::new(Bucket { quirks, ..Bucket::default() })
    }

    /// A server for it.
    pub fn serve(self: &Arc<Bucket>) -> Server {
        let bucket = self.clone();
        Server::start(move |req, stream| bucket.answer(req, stream))
    }

    /// How many requests of a method there were.
    pub fn count(&self, method: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|req| req.method == method).count()
    }

    /// Does what it is asked.
    pub fn answer(&self, req: &Req, stream: &mut TcpStream) -> bool {
        let seen = Req { body: Vec::new(), ..req.clone() };
        self.seen.lock().unwrap().push(seen);
        let close = if self.quirks.closes { "Connection: close\r\n" } else { "" };
        let mut objects = self.objects.lock().unwrap();
        let is_bucket = req.target.split('?').next().unwrap().matches('/').count() == 1;
        let found = objects.get(&req.target);
        let done = match (req.method.as_str(), found) {
            ("HEAD", _) if is_bucket => {
                reply(stream, "200 OK", &format!("Server: model\r\n{close}"), b"")
            }
            ("PUT", found) => {
                if req.header("if-none-match").is_some() {
                    match self.quirks.no_conditions {
                        501 => return error(stream, "501 No", "NotImplemented", ""),
                        400 => return error(stream, "400 No", "InvalidArgument", ""),
                        _ if found.is_some() => {
                            return error(stream, "412 No", "PreconditionFailed", "");
                        }
                        _ => {}
                    }
                }
                objects.insert(req.target.clone(), req.body.clone());
                drop(objects);
                reply(stream, "200 OK", &format!("ETag: \"x\"\r\n{close}"), b"")
            }
            ("DELETE", _) => {
                objects.remove(&req.target);
                let head = format!("HTTP/1.1 204 No Content\r\n{close}\r\n");
                stream.write_all(head.as_bytes()).is_ok()
            }
            ("HEAD", None) => {
                let head = format!("HTTP/1.1 404 Not Found\r\nContent-Length: 99\r\n{close}\r\n");
                stream.write_all(head.as_bytes()).is_ok()
            }
            ("HEAD", Some(bytes)) => {
                let head =
                    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n{close}\r\n", bytes.len());
                stream.write_all(head.as_bytes()).is_ok()
            }
            (_, None) => error(stream, "404 Not Found", "NoSuchKey", ""),
            (_, Some(bytes)) => {
                let bytes = bytes.clone();
                drop(objects);
                self.object(req, stream, &bytes, close)
            }
        };
        done && !self.quirks.closes
    }

    fn object(&self, req: &Req, stream: &mut TcpStream, bytes: &[u8], close: &str) -> bool {
        let whole = bytes.len();
        let (mut status, mut range, mut part) = ("200 OK", String::new(), bytes);
        let asked = req.header("range").and_then(|range| range.strip_prefix("bytes="));
        let asked = asked.and_then(|range| range.split_once('-'));
        if let Some((first, last)) = asked.filter(|asked| !self.quirks.no_ranges || asked.0 != "0")
        {
            let first: usize = first.parse().unwrap();
            let end = last.parse::<usize>().unwrap().saturating_add(1).min(whole);
            if first >= whole {
                let range = format!("Content-Range: bytes */{whole}\r\n");
                return reply(
                    stream,
                    "416 No",
                    &range,
                    b"<Error><Code>InvalidRange</Code></Error>",
                );
            }
            (status, part) = ("206 Partial Content", &bytes[first..end]);
            range = format!("Content-Range: bytes {first}-{}/{whole}\r\n", end - 1);
        }
        if self.quirks.chunks == 0 {
            return reply(stream, status, &format!("{range}{close}"), part);
        }
        let mut out =
            format!("HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n{range}{close}\r\n")
                .into_bytes();
        for piece in part.chunks(self.quirks.chunks) {
            out.extend_from_slice(format!("{:x};a=b\r\n", piece.len()).as_bytes());
            out.extend_from_slice(piece);
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(b"0\r\nTrailer: x\r\n\r\n");
        stream.write_all(&out).is_ok()
    }
}
