//! Decoder of RESP2 and RESP3. It takes bytes as they arrive and limits every length. Bodies of
//! objects are not kept here: the caller takes them.

use crate::tier::remote::fault::Malformed;

/// Longest line.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Deepest nesting.
pub const MAX_DEPTH: usize = 8;
/// Most values of a list.
pub const MAX_LIST: usize = 65536;
/// Longest push message.
const MAX_PUSH_BYTES: usize = 64 << 10;
/// Bytes that a value counts beside its text.
const VALUE_BYTES: usize = size_of::<Value>();
const BUFFER_BYTES: usize = 16 << 10;

/// A decoded value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A simple or bulk string, a double, or a big number.
    Text(Vec<u8>),
    /// An error reply.
    Error(Vec<u8>),
    /// An integer or a boolean.
    Number(i64),
    /// Null.
    Nil,
    /// An array, set or push; of a map, keys and values in turn.
    List(Vec<Value>),
}

/// The kind of the next reply, and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// A simple string, number, error or null.
    Word,
    /// A value of at most so many bytes in total.
    Value(usize),
    /// A bulk string of at most so many bytes.
    Body(u64),
}

/// A decoded element.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// A complete value.
    Value(Value),
    /// A bulk string of so many bytes begins: see [`Reader::take`].
    Body(u64),
    /// The bulk string is complete.
    End,
}

/// Decodes replies.
pub struct Reader {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes after `start` that contain no line end.
    scanned: usize,
    stack: Vec<Level>,
    /// Bytes of the values on the stack.
    stack_bytes: usize,
    bulk: Option<Bulk>,
    /// Bytes of the bulk string that were not taken.
    body: Option<u64>,
}

/// An incomplete array.
struct Level {
    values: Vec<Value>,
    left: usize,
    /// It is a push or an attribute: it is dropped when it is complete.
    is_push: bool,
}

/// An incomplete string.
struct Bulk {
    text: Vec<u8>,
    bytes: usize,
    is_error: bool,
}

/// Meaning of a line: a complete value, or the start of one.
enum Begun {
    Value(Value),
    Body(u64),
    More,
}

impl Default for Reader {
    fn default() -> Reader {
        Reader {
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            scanned: 0,
            stack: Vec::new(),
            stack_bytes: 0,
            bulk: None,
            body: None,
        }
    }
}

impl Reader {
    /// Memory for received bytes; never empty after [`Reader::next`] returned None.
    pub fn spare(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.end == self.buffer.len() {
                self.buffer.resize((self.end * 2).min(MAX_LINE_BYTES + BUFFER_BYTES), 0);
            }
        }
        &mut self.buffer[self.end..]
    }

    /// `bytes` bytes were put into [`Reader::spare`].
    pub fn filled(&mut self, bytes: usize) {
        self.end = (self.end + bytes).min(self.buffer.len());
    }

    /// Whether nothing is buffered or incomplete.
    pub fn is_idle(&self) -> bool {
        self.start == self.end
            && self.stack.is_empty()
            && self.bulk.is_none()
            && self.body.is_none()
    }

    /// Bytes of the bulk string that were neither taken nor received past the reader.
    pub fn body_left(&self) -> u64 {
        self.body.unwrap_or(0)
    }

    /// Takes buffered bytes of the bulk string, at most `most`.
    pub fn take(&mut self, most: u64) -> &[u8] {
        let peer = (self.end - self.start) as u64;
        let bytes = peer.min(self.body_left()).min(most) as usize;
        self.passed(bytes as u64);
        self.start += bytes;
        &self.buffer[self.start - bytes..self.start]
    }

    /// `bytes` bytes of the bulk string were received past the reader.
    pub fn passed(&mut self, bytes: u64) {
        self.body = self.body.map(|left| left.saturating_sub(bytes));
    }

    /// The next element; None = more bytes are needed, or a bulk string must be taken.
    pub fn next(&mut self, want: Want) -> Result<Option<Reply>, Malformed> {
        loop {
            let value = if let Some(left) = self.body {
                if left > 0 || !self.tail()? {
                    return Ok(None);
                }
                self.body = None;
                return Ok(Some(Reply::End));
            } else if self.bulk.is_some() {
                match self.rest_of_bulk()? {
                    None => return Ok(None),
                    Some(value) => value,
                }
            } else {
                let Some((from, to)) = self.line()? else { return Ok(None) };
                match self.begin(from, to, want)? {
                    Begun::More => continue,
                    Begun::Body(bytes) => {
                        self.body = Some(bytes);
                        return Ok(Some(Reply::Body(bytes)));
                    }
                    Begun::Value(value) => value,
                }
            };
            if let Some(value) = self.fold(value) {
                self.stack_bytes = 0;
                return Ok(Some(Reply::Value(value)));
            }
        }
    }

    /// The range of the next line, without its end.
    fn line(&mut self) -> Result<Option<(usize, usize)>, Malformed> {
        let peer = &self.buffer[self.start..self.end];
        let Some(at) = peer[self.scanned..].iter().position(|&byte| byte == b'\n') else {
            self.scanned = peer.len();
            if peer.len() > MAX_LINE_BYTES {
                return Err(Malformed("a line that is none, or too long"));
            }
            return Ok(None);
        };
        let at = self.scanned + at;
        if at < 2 || peer[at - 1] != b'\r' || at > MAX_LINE_BYTES {
            return Err(Malformed("a line that is none, or too long"));
        }
        let from = self.start;
        self.start += at + 1;
        self.scanned = 0;
        Ok(Some((from, from + at - 1)))
    }

    /// Takes the end of a bulk string; false = it has not arrived.
    fn tail(&mut self) -> Result<bool, Malformed> {
        match &self.buffer[self.start..self.end] {
            [b'\r', b'\n', ..] => {
                self.start += 2;
                Ok(true)
            }
            [] | [b'\r'] => Ok(false),
            _ => Err(Malformed("a bulk of another length")),
        }
    }

    fn begin(&mut self, from: usize, to: usize, want: Want) -> Result<Begun, Malformed> {
        let (kind, text) = (self.buffer[from], &self.buffer[from + 1..to]);
        let is_push = matches!(kind, b'>' | b'|');
        // Pushes have a limit of their own.
        let most = match want {
            Want::Value(most) => most.max(MAX_PUSH_BYTES),
            Want::Word | Want::Body(_) => MAX_PUSH_BYTES,
        };
        self.stack_bytes += VALUE_BYTES + text.len();
        if self.stack_bytes > most {
            return Err(Malformed("a reply longer than requested"));
        }
        let is_word = !matches!(want, Want::Value(_)) && self.stack.is_empty();
        let value = match kind {
            b'+' | b',' | b'(' => Value::Text(text.to_vec()),
            b'-' => Value::Error(text.to_vec()),
            b':' => Value::Number(number(text)?),
            b'#' => Value::Number(i64::from(text == b"t")),
            b'_' => Value::Nil,
            b'$' | b'*' if text == b"-1" => Value::Nil,
            b'$' | b'=' | b'!' => {
                let bytes = length(text)?;
                match want {
                    Want::Body(most) if kind == b'$' && self.stack.is_empty() => {
                        self.stack_bytes = 0;
                        return if bytes > most {
                            Err(Malformed("an object longer than requested"))
                        } else {
                            Ok(Begun::Body(bytes))
                        };
                    }
                    _ if is_word && kind != b'!' => {
                        return Err(Malformed("a reply of an unexpected type"));
                    }
                    _ => {}
                }
                if bytes > (most - self.stack_bytes) as u64 {
                    return Err(Malformed("a reply longer than requested"));
                }
                let bytes = bytes as usize;
                self.stack_bytes += bytes;
                self.bulk = Some(Bulk { text: Vec::new(), bytes, is_error: kind == b'!' });
                return Ok(Begun::More);
            }
            b'>' if !self.stack.is_empty() => return Err(Malformed("a push inside an answer")),
            b'*' | b'%' | b'~' | b'>' | b'|' => {
                if is_word && !is_push {
                    return Err(Malformed("a reply of an unexpected type"));
                }
                let each = if matches!(kind, b'%' | b'|') { 2 } else { 1 };
                return self.open(length(text)?.saturating_mul(each), is_push);
            }
            _ => return Err(Malformed("a line of no kind that is known")),
        };
        Ok(Begun::Value(value))
    }

    fn open(&mut self, count: u64, is_push: bool) -> Result<Begun, Malformed> {
        if count > MAX_LIST as u64 || self.stack.len() >= MAX_DEPTH {
            return Err(Malformed("a list that is too long or too deep"));
        }
        if count > 0 {
            self.stack.push(Level { values: Vec::new(), left: count as usize, is_push });
            return Ok(Begun::More);
        }
        // An empty push or attribute leaves no state.
        Ok(if is_push { Begun::More } else { Begun::Value(Value::List(Vec::new())) })
    }

    /// Continues a string; returns it when it is complete.
    fn rest_of_bulk(&mut self) -> Result<Option<Value>, Malformed> {
        let Some(bulk) = &mut self.bulk else { return Ok(None) };
        let bytes = (self.end - self.start).min(bulk.bytes - bulk.text.len());
        bulk.text.extend_from_slice(&self.buffer[self.start..self.start + bytes]);
        self.start += bytes;
        if bulk.text.len() < bulk.bytes || !self.tail()? {
            return Ok(None);
        }
        let bulk = self.bulk.take();
        Ok(bulk.map(|b| if b.is_error { Value::Error(b.text) } else { Value::Text(b.text) }))
    }

    /// Adds a value to the innermost array; returns the reply that it completes.
    fn fold(&mut self, mut value: Value) -> Option<Value> {
        while let Some(level) = self.stack.last_mut() {
            level.values.push(value);
            level.left -= 1;
            if level.left > 0 {
                return None;
            }
            let level = self.stack.pop()?;
            if level.is_push {
                if self.stack.is_empty() {
                    self.stack_bytes = 0;
                }
                return None;
            }
            value = Value::List(level.values);
        }
        Some(value)
    }
}

impl Value {
    /// The value as a string.
    pub fn text(&self) -> Option<&[u8]> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value as an array.
    pub fn list(&self) -> Option<&[Value]> {
        match self {
            Value::List(values) => Some(values),
            _ => None,
        }
    }

    /// The value of a key of a map.
    pub fn under(&self, key: &[u8]) -> Option<&Value> {
        let pairs = self.list()?.chunks_exact(2);
        pairs.into_iter().find(|pair| pair[0].text() == Some(key)).map(|pair| &pair[1])
    }
}

fn number(text: &[u8]) -> Result<i64, Malformed> {
    let parsed = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    parsed.ok_or(Malformed("a number that is none"))
}

fn length(text: &[u8]) -> Result<u64, Malformed> {
    u64::try_from(number(text)?).map_err(|_| Malformed("a length that is none"))
}

#[cfg(test)]
#[path = "resp_tests.rs"]
mod tests;
