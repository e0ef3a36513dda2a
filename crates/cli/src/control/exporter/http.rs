//! A small HTTP server: one request for each connection, GET and HEAD only. Clients are untrusted:
//! every part of a connection has a limit of bytes and of time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::timed::Timed;

/// Most bytes of a request line with its headers.
pub const MAX_HEAD_BYTES: usize = 8192;
/// Most headers.
const MAX_HEADERS: usize = 64;
/// Most connections at once; more get the status 503.
pub const MAX_CONNECTIONS: usize = 16;
/// Time to send a request, and to read the answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the server reads, and discards, what a client still sends after its answer.
const LINGER: Duration = Duration::from_secs(1);
/// Most bytes that it discards.
const MAX_LINGER_BYTES: usize = 64 << 10;
/// Pause after a failed accept, which means that descriptors are scarce.
const PAUSE: Duration = Duration::from_secs(1);

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Path without a query.
    pub path: String,
    /// All values of the header `Accept`.
    pub accept: String,
    is_head: bool,
}

/// An answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Media type.
    pub media_type: &'static str,
    /// Body.
    pub body: String,
}

impl Answer {
    /// A line of text.
    pub fn text(status: u16, line: impl Into<String>) -> Answer {
        let body = line.into() + "\n";
        Answer { status, media_type: "text/plain; charset=utf-8", body }
    }

    fn head(&self) -> String {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            505 => "HTTP Version Not Supported",
            _ => "Error",
        };
        let more = match self.status {
            405 => "Allow: GET, HEAD\r\n",
            503 => "Retry-After: 1\r\n",
            _ => "",
        };
        format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{more}Cache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            self.status,
            self.media_type,
            self.body.len()
        )
    }
}

/// Serves until the process ends.
pub fn serve(listener: &TcpListener, answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) {
    let answer = Arc::new(answer);
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // The client has left before it was accepted.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
            Err(error) => {
                eprintln!("kvtier: no connection can be accepted: {error}");
                thread::sleep(PAUSE);
                continue;
            }
        };
        let Some(permit) = Permit::take(&open) else {
            refuse(stream);
            continue;
        };
        let answer = answer.clone();
        // Without a thread the connection is closed: the descriptor is dropped.
        let started = thread::Builder::new().name("http".into()).spawn(move || {
            let _permit = permit;
            // The client has closed the connection, or was too slow: no answer can reach it.
            let _ = handle(stream, &*answer);
        });
        if let Err(error) = started {
            eprintln!("kvtier: no thread can be started for a connection: {error}");
        }
    }
}

/// One of [`MAX_CONNECTIONS`].
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(open: &Arc<AtomicUsize>) -> Option<Permit> {
        // Only the accepting thread adds.
        (open.load(Ordering::Acquire) < MAX_CONNECTIONS).then(|| {
            open.fetch_add(1, Ordering::AcqRel);
            Permit(open.clone())
        })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Answers that all connections are in use, without waiting for the client.
fn refuse(mut stream: TcpStream) {
    let answer =
        Answer::text(503, format!("all {MAX_CONNECTIONS} connections are in use: try again"));
    let _ = stream.set_nonblocking(true);
    let _ = stream.write_all((answer.head() + &answer.body).as_bytes());
    let _ = stream.shutdown(Shutdown::Write);
}

fn handle(stream: TcpStream, answer: &dyn Fn(&Request) -> Answer) -> io::Result<()> {
    let mut timed = Timed { stream, until: Instant::now() + TIMEOUT };
    let (reply, is_head) = match receive(&mut timed)? {
        Ok(request) => (answer(&request), request.is_head),
        Err(refused) => (refused, false),
    };
    let mut bytes = reply.head().into_bytes();
    if !is_head {
        bytes.extend_from_slice(reply.body.as_bytes());
    }
    timed.until = Instant::now() + TIMEOUT;
    timed.write_all(&bytes)?;
    timed.stream.shutdown(Shutdown::Write)?;
    // Closing a connection with unread bytes would reset it before the client has read the answer.
    timed.until = Instant::now() + LINGER;
    let mut left = MAX_LINGER_BYTES;
    let mut rest = [0; 4096];
    while left > 0 {
        match timed.read(&mut rest)? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
    }
    Ok(())
}

/// Reads a request; the inner error is the answer to a request that is refused.
fn receive(from: &mut impl Read) -> io::Result<Result<Request, Answer>> {
    let mut got = Vec::new();
    let mut bytes = [0; 1024];
    loop {
        let count = match from.read(&mut bytes) {
            Ok(0) if got.is_empty() => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(0) => return Ok(Err(Answer::text(400, "the request ends before its headers do"))),
            Ok(count) => count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let words = format!("no complete request within {} s", TIMEOUT.as_secs());
                return Ok(Err(Answer::text(408, words)));
            }
            Err(error) => return Err(error),
        };
        got.extend_from_slice(&bytes[..count]);
        if let Some(result) = parse(&got[..got.len().min(MAX_HEAD_BYTES)]) {
            return Ok(result);
        }
        if got.len() >= MAX_HEAD_BYTES {
            let words =
                format!("the request line and the headers have at most {MAX_HEAD_BYTES} bytes");
            return Ok(Err(Answer::text(431, words)));
        }
    }
}

/// Parses a request; `None` = it is not complete.
fn parse(bytes: &[u8]) -> Option<Result<Request, Answer>> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Request::new(&mut headers);
    match head.parse(bytes) {
        Ok(httparse::Status::Partial) => return None,
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => {
            let words = format!("a request has at most {MAX_HEADERS} headers");
            return Some(Err(Answer::text(431, words)));
        }
        Err(httparse::Error::Version) => {
            return Some(Err(Answer::text(505, "use HTTP/1.0 or HTTP/1.1")));
        }
        Err(error) => {
            return Some(Err(Answer::text(
                400,
                format!("malformed HTTP/1.1 request ({error}): send GET /metrics"),
            )));
        }
    }
    let method = head.method.unwrap_or_default();
    if !matches!(method, "GET" | "HEAD") {
        return Some(Err(Answer::text(405, "only GET and HEAD are served")));
    }
    let target = head.path.unwrap_or_default();
    let path = target.split(['?', '#']).next().unwrap_or_default();
    let accept: Vec<&str> = head
        .headers
        .iter()
        .filter(|header| header.name.eq_ignore_ascii_case("accept"))
        .filter_map(|header| std::str::from_utf8(header.value).ok())
        .collect();
    Some(Ok(Request { path: path.into(), accept: accept.join(","), is_head: method == "HEAD" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(bytes: &[u8]) -> u16 {
        match receive(&mut { bytes }) {
            Ok(Ok(_)) => 200,
            Ok(Err(answer)) => answer.status,
            Err(error) => panic!("{error}: {}", bytes.escape_ascii()),
        }
    }

    #[test]
    fn requests_are_parsed() {
        let bytes =
            b"HEAD /metrics?x=1 HTTP/1.1\r\nHost: a\r\naccept: text/plain\r\nAccept: b\r\n\r\nrest";
        let request = receive(&mut &bytes[..]).expect("read").expect("valid");
        let expected =
            Request { path: "/metrics".into(), accept: "text/plain,b".into(), is_head: true };
        assert_eq!(request, expected);
        assert_eq!(status(b"GET / HTTP/1.0\n\n"), 200);
    }

    #[test]
    fn malformed_requests_get_the_fitting_status() {
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".as_slice(), &[b'a'; 9000]].concat();
        let many = [b"GET / HTTP/1.1\r\n".as_slice(), &b"A: b\r\n".repeat(65), b"\r\n"].concat();
        for (bytes, expected) in [
            (&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], 400),
            (b"\0\0\0\0", 400),
            (b"GET\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\nHost: a", 400),
            (b"GET / HTTP/2.0\r\n\r\n", 505),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
            (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 405),
            (&long, 431),
            (&many, 431),
        ] {
            assert_eq!(status(bytes), expected, "{:.60}", bytes.escape_ascii().to_string());
        }
        assert!(receive(&mut &b""[..]).is_err(), "a connection without a byte gets no answer");
    }
}
