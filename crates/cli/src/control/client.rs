//! The client of a control socket.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Timeout of an answer.
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
            broken(format!(
                "no store answers at {place} ({error}): open a store with control=\"{place}\""
            ))
        })?;
        let set = stream.set_read_timeout(Some(TIMEOUT));
        set.and_then(|()| stream.set_write_timeout(Some(TIMEOUT))).map_err(broken)?;
        Ok(Client { stream: BufReader::new(stream) })
    }

    /// Sends a request and waits for the answer.
    pub fn request(&mut self, request: &str) -> Result<String, Refusal> {
        // A request is one line; line breaks between the words of a spec are equal to spaces.
        let line = request.replace(['\n', '\r'], " ") + "\n";
        let sent = self.stream.get_mut().write_all(line.as_bytes());
        let mut head = String::new();
        let read = (&mut self.stream).take(MAX_LINE_BYTES).read_line(&mut head);
        // A rejected connection receives an answer, whether or not the request could be sent.
        if !matches!(read, Ok(count) if count > 0) {
            let lost = |error| broken(format!("the store has closed the connection: {error}"));
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
        let got = (&mut self.stream).take(bytes).read_to_string(&mut body).map_err(broken)?;
        if got as u64 != bytes {
            return Err(broken(format!("the answer has {got} of {bytes} bytes")));
        }
        match status {
            "" => Ok(body),
            status => Err(Refusal { status: status.to_string(), words: body }),
        }
    }
}
