//! The control socket: people and programs inspect and change a running store.
//!
//! A request is one line, a spec string such as `residency(session=3)`. An answer is `ok BYTES` or
//! `error STATUS BYTES` on a line, followed by so many bytes. Input is untrusted, and a slow client
//! delays no other client.

mod answer;
mod request;
mod views;

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::io::socket::{Listener, Stream, Waker, Watched, wait};
pub use answer::{Subject, answer};
pub use request::Request;

/// Longest request, the end of its line included.
pub const MAX_LINE_BYTES: usize = 4096;

// ---------- serving
//
// The thread that serves the control socket.

/// Most clients at once.
pub const MAX_CONNECTIONS: usize = 8;
/// Pause after a failed accept, which means that descriptors are scarce.
const PAUSE_NS: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// Serves clients until the bell rings. The listener removes its path when it is dropped.
pub fn serve(listener: &Listener, waker: &Waker, answer: &mut dyn FnMut(&str) -> Result<String>) {
    let clock = Clock::real();
    let mut clients: Vec<Connection> = Vec::new();
    let mut paused_until_ns = 0;
    loop {
        let now_ns = clock.now_ns();
        clients.retain(|client| client.until_ns > now_ns);
        let is_paused = paused_until_ns > now_ns;
        let mut watched: Vec<Watched> = vec![waker.watched()];
        watched.extend(clients.iter().map(Connection::watched));
        if !is_paused {
            watched.push(listener.watched());
        }
        let pause = is_paused.then_some(paused_until_ns);
        let next_ns = clients.iter().map(|client| client.until_ns).chain(pause).min();
        let timeout_ms = match next_ns {
            Some(_) if clients.iter().any(Connection::has_more) => 0,
            Some(until_ns) => ((until_ns - now_ns) / MS + 1).min(60_000) as i32,
            None => -1,
        };
        if let Err(error) = wait(&mut watched, timeout_ms) {
            log::error!("the control socket is closed after an error: {error}");
            return;
        }
        if watched[0].ready {
            return;
        }
        let mut ready = watched[1..].iter().map(|one| one.ready);
        let now_ns = clock.now_ns();
        clients.retain_mut(|client| {
            let is_ready = ready.next().unwrap_or(false) || client.has_more();
            !is_ready || client.proceed(now_ns, answer)
        });
        if !is_paused && watched.last().is_some_and(|one| one.ready) {
            match listener.accept() {
                Ok(Some(stream)) if clients.len() < MAX_CONNECTIONS => {
                    clients.push(Connection::new(stream, now_ns));
                }
                Ok(Some(stream)) => Connection::reject(&stream),
                Ok(None) => {}
                Err(error) => {
                    log::warn!("the control socket: {error}");
                    paused_until_ns = now_ns.saturating_add(PAUSE_NS);
                }
            }
        }
    }
}

// ---------- connections
//
// One connection: reads a request and writes its answer, each within a deadline.

/// Time a client has to send a request from its first byte on, and to read an answer.
pub const PATIENCE_NS: u64 = 10_000_000_000;
/// Time a client may be idle.
pub const IDLE_NS: u64 = 120_000_000_000;

/// A connection.
pub struct Connection {
    stream: Stream,
    got: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    /// When it is dropped, unless something happens before.
    pub until_ns: u64,
    /// It ends once the answer is sent.
    last: bool,
}

impl Connection {
    /// A new connection.
    pub fn new(stream: Stream, now_ns: u64) -> Connection {
        let until_ns = now_ns.saturating_add(IDLE_NS);
        Connection { stream, got: Vec::new(), out: Vec::new(), sent: 0, until_ns, last: false }
    }

    /// The events that the connection waits for.
    pub fn watched(&self) -> Watched {
        self.stream.watched(self.sent < self.out.len())
    }

    /// Reads, answers and writes as far as possible. Returns whether it is still open.
    pub fn proceed(&mut self, now_ns: u64, answer: &mut dyn FnMut(&str) -> Result<String>) -> bool {
        if self.sent < self.out.len() {
            return self.send(now_ns);
        }
        if !self.receive(now_ns) {
            return false;
        }
        let Some(line) = self.next_line() else { return true };
        let reply = match line {
            Ok(line) => answer(&line),
            Err(error) => {
                self.last = true;
                Err(error)
            }
        };
        self.out = framed(&reply);
        self.until_ns = now_ns.saturating_add(PATIENCE_NS);
        self.send(now_ns)
    }

    /// Refuses a client, with as much of the message as it reads at once.
    pub fn reject(stream: &Stream) {
        let text = Error::new(
            Status::Again,
            "all connections of the control socket are in use: try again",
        );
        // The connection is dropped in any case.
        let _ = stream.write(&framed(&Err(text)));
    }

    /// Reads what has arrived. Returns false at the end of input.
    fn receive(&mut self, now_ns: u64) -> bool {
        let mut bytes = [0; MAX_LINE_BYTES];
        let room = MAX_LINE_BYTES.saturating_sub(self.got.len());
        if room == 0 || self.got.contains(&b'\n') {
            return true;
        }
        match self.stream.read(&mut bytes[..room]) {
            Ok(Some(count)) if count > 0 => {
                if self.got.is_empty() {
                    self.until_ns = now_ns.saturating_add(PATIENCE_NS);
                }
                self.got.extend_from_slice(&bytes[..count]);
                true
            }
            Ok(None) => true,
            Ok(Some(_)) | Err(_) => false,
        }
    }

    /// The next complete request. An error is the last answer.
    fn next_line(&mut self) -> Option<Result<String>> {
        let Some(end) = self.got.iter().position(|&byte| byte == b'\n') else {
            let too_long = self.got.len() >= MAX_LINE_BYTES;
            let message = || format!("a request has at most {MAX_LINE_BYTES} bytes");
            return too_long.then(|| Err(Error::new(Status::Limit, message())));
        };
        let rest = self.got.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.got, rest);
        line.truncate(end);
        let message = "a request is text";
        Some(String::from_utf8(line).map_err(|_| Error::new(Status::Invalid, message)))
    }

    fn send(&mut self, now_ns: u64) -> bool {
        match self.stream.write(&self.out[self.sent..]) {
            Ok(Some(count)) => self.sent += count,
            Ok(None) => return true,
            Err(_) => return false,
        }
        if self.sent == self.out.len() {
            (self.out, self.sent) = (Vec::new(), 0);
            let patience = if self.got.is_empty() { IDLE_NS } else { PATIENCE_NS };
            self.until_ns = now_ns.saturating_add(patience);
            return !self.last;
        }
        true
    }

    /// Whether a complete request is buffered.
    pub fn has_more(&self) -> bool {
        self.out.is_empty() && self.got.contains(&b'\n')
    }
}

fn framed(reply: &Result<String>) -> Vec<u8> {
    let text = match reply {
        Ok(body) => format!("ok {}\n{body}", body.len()),
        Err(error) => {
            let message = error.message();
            format!("error {} {}\n{message}", error.status().name(), message.len())
        }
    };
    text.into_bytes()
}
