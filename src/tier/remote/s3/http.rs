//! Heads and bodies of replies: the part of HTTP/1.1 that a client with one request at a time
//! needs, with limits on all lengths.

use crate::tier::remote::fault::Malformed;
use crate::tier::remote::s3::date;
use crate::tier::remote::s3::xml::shown;

/// Longest head.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_LINES: usize = 100;
/// Longest chunk extension, and longest trailer.
const MAX_EXTENSION_BYTES: usize = 256;
const MAX_TRAILER_BYTES: usize = 4096;
const MAX_DIGITS: u32 = 12;

/// How the end of a body is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// By its length.
    Bytes(u64),
    /// By an empty chunk.
    Chunks,
    /// By the end of the connection.
    End,
}

/// `Content-Range`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first byte, and the number of bytes.
    pub part: Option<(u64, u64)>,
    /// Length of the object.
    pub whole: Option<u64>,
}

/// The status line and the headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Status code.
    pub status: u16,
    /// How the end of the body is marked.
    pub body: Body,
    /// `Content-Length`, of a reply to HEAD, too.
    pub length: Option<u64>,
    /// `Content-Range`.
    pub range: Option<Range>,
    /// The connection can be used again.
    pub keeps: bool,
    /// The body has a content encoding that was not requested.
    pub is_coded: bool,
    /// `Date`, in seconds since 1970.
    pub date_s: Option<u64>,
    /// `Server`.
    pub server: String,
    /// Region of the bucket.
    pub region: String,
}

impl Head {
    /// Reads a head; returns it with its length. None = it is incomplete.
    pub fn read(bytes: &[u8]) -> Result<Option<(Head, usize)>, Malformed> {
        let Some(end) = end_of(bytes) else {
            let is_long = bytes.len() >= MAX_HEAD_BYTES;
            return if is_long { Err(Malformed("a head without an end")) } else { Ok(None) };
        };
        if end > MAX_HEAD_BYTES {
            return Err(Malformed("a head that is too long"));
        }
        let mut lines = bytes[..end].split(|&byte| byte == b'\n').map(trimmed);
        let first = lines.next().unwrap_or_default();
        let (status, is_new) = status_of(first).ok_or(Malformed("no HTTP"))?;
        let mut head = Head {
            status,
            body: Body::End,
            length: None,
            range: None,
            keeps: is_new,
            is_coded: false,
            date_s: None,
            server: String::new(),
            region: String::new(),
        };
        let mut is_chunked = false;
        for (number, line) in lines.enumerate() {
            if line.is_empty() {
                break;
            }
            if number >= MAX_LINES {
                return Err(Malformed("too many headers"));
            }
            head.line(line, &mut is_chunked)?;
        }
        head.body = match (is_chunked, head.length) {
            // The end of such a body is ambiguous. A client that disagrees with the server takes a
            // part of it for the next reply.
            (true, Some(_)) => return Err(Malformed("a body with two lengths")),
            (true, None) => Body::Chunks,
            (false, Some(bytes)) => Body::Bytes(bytes),
            (false, None) => Body::End,
        };
        Ok(Some((head, end)))
    }

    fn line(&mut self, line: &[u8], is_chunked: &mut bool) -> Result<(), Malformed> {
        let colon = line.iter().position(|&byte| byte == b':').ok_or(Malformed("no header"))?;
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
        if name.is_empty() || !name.iter().all(is_plain) {
            return Err(Malformed("no header"));
        }
        let is = |wanted: &str| name.eq_ignore_ascii_case(wanted.as_bytes());
        let has = |wanted: &[u8]| {
            value
                .split(|&byte| byte == b',')
                .any(|word| word.trim_ascii().eq_ignore_ascii_case(wanted))
        };
        if is("content-length") {
            let length = number(value).ok_or(Malformed("a length that is none"))?;
            if self.length.is_some_and(|known| known != length) {
                return Err(Malformed("a body with two lengths"));
            }
            self.length = Some(length);
        } else if is("transfer-encoding") {
            if !value.eq_ignore_ascii_case(b"chunked") || *is_chunked {
                return Err(Malformed("a body with an unknown transfer encoding"));
            }
            *is_chunked = true;
        } else if is("content-range") {
            self.range = Some(range_of(value).ok_or(Malformed("a range that is none"))?);
        } else if is("connection") {
            self.keeps = (self.keeps || has(b"keep-alive")) && !has(b"close");
        } else if is("content-encoding") {
            // `aws-chunked` is the encoding of the upload, not of the reply.
            self.is_coded = !value.is_empty() && !has(b"identity") && !has(b"aws-chunked");
        } else if is("date") {
            self.date_s = std::str::from_utf8(value).ok().and_then(date::of_header);
        } else if is("server") {
            self.server = shown(&value[..value.len().min(100)]);
        } else if is("x-amz-bucket-region") {
            self.region = shown(&value[..value.len().min(64)]);
        }
        Ok(())
    }
}

/// The end of the empty line.
fn end_of(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|&byte| byte == b'\n') {
        let next = from + at + 1;
        match &bytes[next..] {
            [b'\n', ..] => return Some(next + 1),
            [b'\r', b'\n', ..] => return Some(next + 2),
            _ => from = next,
        }
    }
    None
}

fn trimmed(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// The status, and whether the protocol version keeps connections by default.
fn status_of(line: &[u8]) -> Option<(u16, bool)> {
    let rest = line.strip_prefix(b"HTTP/1.")?;
    let (minor, rest) = rest.split_first()?;
    let digits = rest.strip_prefix(b" ")?.get(..3)?;
    let status = number(digits).filter(|status| (100..600).contains(status))?;
    let is_end = matches!(rest.get(4), None | Some(b' '));
    (matches!(minor, b'0' | b'1') && is_end).then_some((status as u16, *minor == b'1'))
}

/// A decimal number without a sign.
fn number(text: &[u8]) -> Option<u64> {
    let is_number = !text.is_empty() && text.len() <= 18 && text.iter().all(u8::is_ascii_digit);
    is_number.then(|| text.iter().fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')))
}

/// Reads `bytes 0-9/100` or `bytes */100`; `*` after the slash = unknown length.
fn range_of(value: &[u8]) -> Option<Range> {
    let text = value.strip_prefix(b"bytes ")?;
    let slash = text.iter().position(|&byte| byte == b'/')?;
    let (part, whole) = (&text[..slash], &text[slash + 1..]);
    let whole = if whole == b"*" { None } else { Some(number(whole)?) };
    if part == b"*" {
        return Some(Range { part: None, whole });
    }
    let dash = part.iter().position(|&byte| byte == b'-')?;
    let (first, last) = (number(&part[..dash])?, number(&part[dash + 1..])?);
    let is_sound = first <= last && whole.is_none_or(|whole| last < whole);
    is_sound.then(|| Range { part: Some((first, last - first + 1)), whole })
}

/// Decodes a chunked body.
#[derive(Debug, Default)]
pub struct Chunks {
    state: State,
    left: u64,
    digits: u32,
    /// Bytes of the extension or of the trailer.
    extra: usize,
    /// The trailer line is empty so far.
    is_empty: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Size,
    Extension,
    SizeEnd,
    Data,
    DataEnd,
    DataFeed,
    Trailer,
    Done,
}

impl Chunks {
    /// Whether the body is complete.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Decodes bytes; passes those of the body to `to`. Returns how many bytes it took: all, unless
    /// the body ends before.
    pub fn take(
        &mut self,
        bytes: &[u8],
        mut to: impl FnMut(&[u8]) -> Result<(), Malformed>,
    ) -> Result<usize, Malformed> {
        let mut at = 0;
        while at < bytes.len() && self.state != State::Done {
            if self.state == State::Data {
                let count = self.left.min((bytes.len() - at) as u64) as usize;
                to(&bytes[at..at + count])?;
                at += count;
                self.left -= count as u64;
                if self.left == 0 {
                    self.state = State::DataEnd;
                }
            } else {
                self.step(bytes[at])?;
                at += 1;
            }
        }
        Ok(at)
    }

    fn step(&mut self, byte: u8) -> Result<(), Malformed> {
        const WRONG: Malformed = Malformed("chunks that are none");
        self.state = match (self.state, byte) {
            (State::Size, digit) if digit.is_ascii_hexdigit() => {
                self.digits += 1;
                if self.digits > MAX_DIGITS {
                    return Err(WRONG);
                }
                let value = char::from(digit).to_digit(16).unwrap_or(0);
                self.left = self.left * 16 + u64::from(value);
                State::Size
            }
            (State::Size, _) if self.digits == 0 => return Err(WRONG),
            (State::Size | State::Extension, b'\r') => State::SizeEnd,
            (State::Size, b';' | b' ' | b'\t') => State::Extension,
            (State::Extension, byte) if byte != b'\n' => {
                self.extra += 1;
                if self.extra > MAX_EXTENSION_BYTES {
                    return Err(WRONG);
                }
                State::Extension
            }
            (State::SizeEnd, b'\n') => {
                (self.digits, self.extra, self.is_empty) = (0, 0, true);
                if self.left > 0 { State::Data } else { State::Trailer }
            }
            (State::DataEnd, b'\r') => State::DataFeed,
            (State::DataFeed, b'\n') => State::Size,
            (State::Trailer, b'\n') if self.is_empty => State::Done,
            (State::Trailer, byte) => {
                self.extra += 1;
                if self.extra > MAX_TRAILER_BYTES {
                    return Err(WRONG);
                }
                self.is_empty = byte == b'\n' || (byte == b'\r' && self.is_empty);
                State::Trailer
            }
            _ => return Err(WRONG),
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<(Head, usize)>, Malformed> {
        Head::read(text.as_bytes())
    }

    fn head(text: &str) -> Head {
        let (head, end) = read(text).unwrap().unwrap();
        assert_eq!(end, text.len());
        head
    }

    #[test]
    fn heads_are_parsed() {
        let text = "HTTP/1.1 206 Partial Content\r\ncontent-LENGTH: 10\r\nContent-Range: bytes \
                    5-14/100\r\nDate: Fri, 24 May 2013 00:00:00 GMT\r\nServer: A\u{7}B\r\n\
                    x-amz-bucket-region: eu-west-1\r\nX-Other:\r\n\r\n";
        for end in 0..text.len() {
            assert_eq!(read(&text[..end]), Ok(None), "{end}");
        }
        let it = head(text);
        assert_eq!((it.status, it.body, it.keeps), (206, Body::Bytes(10), true));
        assert_eq!(it.range, Some(Range { part: Some((5, 10)), whole: Some(100) }));
        assert_eq!((it.date_s, it.server.as_str()), (Some(1_369_353_600), "A B"));
        assert_eq!(it.region, "eu-west-1");
        let it = head("HTTP/1.0 200 OK\n\n");
        assert_eq!((it.body, it.keeps), (Body::End, false));
        assert!(head("HTTP/1.0 200 OK\nConnection: Keep-Alive\n\n").keeps);
        assert!(!head("HTTP/1.1 200 OK\nConnection: x, close\n\n").keeps);
        assert_eq!(head("HTTP/1.1 200\nTransfer-Encoding: Chunked\n\n").body, Body::Chunks);
        assert!(head("HTTP/1.1 200 OK\nContent-Encoding: gzip\n\n").is_coded);
        assert!(!head("HTTP/1.1 200 OK\nContent-Encoding: identity\n\n").is_coded);
        let range = |text: &str| range_of(text.as_bytes());
        assert_eq!(range("bytes */7"), Some(Range { part: None, whole: Some(7) }));
        assert_eq!(range("bytes 0-0/*"), Some(Range { part: Some((0, 1)), whole: None }));
        for bad in ["", "bytes", "bytes 5-4/9", "bytes 0-9/9", "bytes -1/9", "0-1/9", "bytes 0-1"] {
            assert_eq!(range(bad), None, "{bad}");
        }
    }

    #[test]
    fn malformed_heads_are_rejected() {
        for text in [
            "\n\n",
            "hello\r\n\r\n",
            "HTTP/2 200 OK\r\n\r\n",
            "HTTP/1.2 200 OK\r\n\r\n",
            "HTTP/1.1 20 OK\r\n\r\n",
            "HTTP/1.1 2000 OK\r\n\r\n",
            "HTTP/1.1 600 OK\r\n\r\n",
            "HTTP/1.1 200 OK\r\nno header\r\n\r\n",
            "HTTP/1.1 200 OK\r\n: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Range: bytes 9-1/5\r\n\r\n",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "a: b\r\n".repeat(MAX_LINES + 1));
        assert_eq!(read(&many), Err(Malformed("too many headers")));
        let long = format!("HTTP/1.1 200 OK\r\na: {}", "b".repeat(MAX_HEAD_BYTES));
        assert!(read(&long).is_err() && read(&long[..MAX_HEAD_BYTES - 1]) == Ok(None));
    }

    fn unchunk(text: &[u8], step: usize) -> Result<(Vec<u8>, usize, bool), Malformed> {
        let (mut chunks, mut out, mut taken) = (Chunks::default(), Vec::new(), 0);
        for piece in text.chunks(step) {
            taken += chunks.take(piece, |bytes| {
                out.extend_from_slice(bytes);
                Ok(())
            })?;
        }
        Ok((out, taken, chunks.is_done()))
    }

    #[test]
    fn chunked_bodies_are_decoded() {
        let text = b"5;name=value\r\nhello\r\n00001 \r\n,\r\n6\r\n world\r\n0\r\nA: b\r\n\r\nHTTP";
        for step in 1..text.len() {
            let got = unchunk(text, step).unwrap();
            assert_eq!(got, (b"hello, world".to_vec(), text.len() - 4, true), "{step}");
        }
        for end in 0..text.len() - 4 {
            assert!(!unchunk(&text[..end], 7).unwrap().2, "{end}");
        }
        for bad in [
            &b"\r\n"[..],
            b"x\r\n",
            b"5\n",
            b"5\r\r",
            b"1\r\nab",
            b"1\r\na\n",
            b"-1\r\n",
            b";\r\n",
            b"0000000000001\r\n",
        ] {
            assert!(unchunk(bad, 1).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
        let long = [b"1;".to_vec(), vec![b'x'; 300]].concat();
        assert!(unchunk(&long, 64).is_err());
        let long = [b"0\r\n".to_vec(), b"a: b\r\n".repeat(1000)].concat();
        assert!(unchunk(&long, 64).is_err());
    }
}
