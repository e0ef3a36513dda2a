//! The tool's end of a control socket.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest answer, and first line of one.
const MOST_BYTES: u64 = 64 << 20;
const MOST_LINE_BYTES: u64 = 128;

/// What was refused, or went wrong.
#[derive(Debug)]
pub struct Refusal {
    /// The status that the store gave; empty when it said nothing.
    pub status: String,
    words: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
    }
}

impl std::error::Error for Refusal {}

fn broken(words: impl fmt::Display) -> Refusal {
    Refusal { status: String::new(), words: words.to_string() }
}

/// A connection.
pub struct Client {
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to a store.
    pub fn connect(path: &Path) -> Result<Client, Refusal> {
        let place = path.display();
        let stream = UnixStream::connect(path).map_err(|error| {
            broken(format!("nobody answers at {place} ({error}): is the store open, and has it control=\"{place}\"?"))
        })?;
        let set = stream.set_read_timeout(Some(PATIENCE));
        set.and_then(|()| stream.set_write_timeout(Some(PATIENCE))).map_err(broken)?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, request: &str) -> Result<String, Refusal> {
        // One line: whatever stands between words of a spec is free.
        let line = request.replace(['\n', '\r'], " ") + "\n";
        let sent = self.stream.get_mut().write_all(line.as_bytes());
        let mut head = String::new();
        let read = (&mut self.stream).take(MOST_LINE_BYTES).read_line(&mut head);
        // One that was turned away is told so, whether or not it could send.
        if !matches!(read, Ok(count) if count > 0) {
            let lost = |error| broken(format!("the store is gone: {error}"));
            sent.map_err(lost)?;
            read.map_err(lost)?;
            return Err(broken("the store is gone"));
        }
        let words: Vec<&str> = head.split_ascii_whitespace().collect();
        let (status, bytes) = match words[..] {
            ["ok", bytes] => ("", bytes),
            ["error", status, bytes] => (status, bytes),
            _ => return Err(broken("that is no control socket of a store")),
        };
        let bytes = bytes.parse().ok().filter(|&bytes: &u64| bytes <= MOST_BYTES);
        let Some(bytes) = bytes else { return Err(broken("an answer of no sound length")) };
        let mut body = String::new();
        let got = (&mut self.stream).take(bytes).read_to_string(&mut body).map_err(broken)?;
        if got as u64 != bytes {
            return Err(broken("the answer is cut short"));
        }
        match status {
            "" => Ok(body),
            status => Err(Refusal { status: status.to_string(), words: body }),
        }
    }
}
