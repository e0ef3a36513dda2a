//! One connection: reads a request and writes its answer, each within a deadline.

use crate::base::status::{Error, Result, Status};
use crate::io::socket::{Stream, Watched};
use crate::store::control::MAX_LINE_BYTES;

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

    /// What it waits for.
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
