//! The client of a control socket.

use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::control::timed::Timed;

/// Time for a connection, and for each request, of commands that a person started.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest answer.
const MAX_ANSWER_BYTES: u64 = 64 << 20;
/// Longest first line of an answer.
const MAX_LINE_BYTES: u64 = 128;

/// A refused request, or a failure of the connection.
#[derive(Debug)]
pub struct Refusal {
    /// The status of the store's answer; empty for a failure of the connection.
    pub status: String,
    words: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

impl std::error::Error for Refusal {}

/// A failure that is no answer of the store.
pub fn broken(words: impl fmt::Display) -> Refusal {
    Refusal { status: String::new(), words: words.to_string() }
}

/// A connection.
pub struct Client {
    stream: BufReader<Timed<UnixStream>>,
    timeout: Duration,
}

impl Client {
    /// Connects to a store.
    pub fn connect(path: &Path) -> Result<Client, Refusal> {
        Client::connect_within(path, TIMEOUT)
    }

    /// Connects to a store. The connection, and each request, takes at most `timeout`.
    pub fn connect_within(path: &Path, timeout: Duration) -> Result<Client, Refusal> {
        let socket = connected(path, timeout).map_err(|error| {
            let place = path.display();
            // A full backlog: the process does not accept connections.
            let error = match error.kind() {
                ErrorKind::WouldBlock => format!("it accepts no connection within {timeout:?}"),
                _ => error.to_string(),
            };
            broken(format!(
                "no store answers at {place} ({error}): open a store with control=\"{place}\""
            ))
        })?;
        let stream = BufReader::new(Timed { stream: socket, until: Instant::now() + timeout });
        Ok(Client { stream, timeout })
    }

    /// Sends a request and waits for the answer.
    pub fn request(&mut self, request: &str) -> Result<String, Refusal> {
        let timeout = self.timeout;
        self.stream.get_mut().until = Instant::now() + timeout;
        let lost = move |error: io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                broken(format!("the store has not answered within {timeout:?}"))
            }
            _ => broken(format!("the store has closed the connection: {error}")),
        };
        // A request is one line; line breaks between the words of a spec are equal to spaces.
        let line = request.replace(['\n', '\r'], " ") + "\n";
        let sent = self.stream.get_mut().write_all(line.as_bytes());
        let mut head = String::new();
        let read = (&mut self.stream).take(MAX_LINE_BYTES).read_line(&mut head);
        // A rejected connection receives an answer, whether or not the request could be sent.
        if !matches!(read, Ok(count) if count > 0) {
            sent.map_err(lost)?;
            read.map_err(lost)?;
            return Err(broken("the store has closed the connection"));
        }
        let words: Vec<&str> = head.split_ascii_whitespace().collect();
        let (status, bytes) = match words[..] {
            ["ok", bytes] => ("", bytes),
            ["error", status, bytes] => (status, bytes),
            _ => return Err(broken("the socket is not the control socket of a store")),
        };
        let length = bytes.parse().ok().filter(|&bytes: &u64| bytes <= MAX_ANSWER_BYTES);
        let Some(bytes) = length else {
            return Err(broken(format!("the answer has an invalid length: {bytes}")));
        };
        let mut body = String::new();
        let got = (&mut self.stream).take(bytes).read_to_string(&mut body).map_err(lost)?;
        if got as u64 != bytes {
            return Err(broken(format!("the answer has {got} of {bytes} bytes")));
        }
        match status {
            "" => Ok(body),
            status => Err(Refusal { status: status.to_string(), words: body }),
        }
    }
}

fn connected(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Linux applies this limit to the connection as well.
    socket.set_write_timeout(Some(timeout))?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}
