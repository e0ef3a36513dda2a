//! A strict streaming JSON reader. It builds no tree: traces are large, and most of a line is
//! one array of numbers. Its input, such as the header of a model file, is untrusted.

use std::borrow::Cow;

use crate::base::status::{Error, Result, Status};

/// Deepest accepted nesting.
pub const MAX_DEPTH: usize = 64;

/// A position in a JSON text.
pub struct Json<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Json<'a> {
    /// Starts at the first value of a text.
    pub fn new(text: &'a [u8]) -> Json<'a> {
        Json { text, at: 0, depth: 0 }
    }

    /// An error with the current position.
    pub fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::at(Status::Invalid, self.at, format!("{what} at byte {}", self.at))
    }

    fn peek(&mut self) -> Option<u8> {
        while let Some(&byte) = self.text.get(self.at) {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        match self.peek() {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            Some(found) => Err(self.error(format_args!(
                "'{}' instead of '{}'",
                found.escape_ascii(),
                byte.escape_ascii()
            ))),
            None => Err(self.error(format_args!("the end instead of '{}'", byte.escape_ascii()))),
        }
    }

    fn enter(&mut self, open: u8) -> Result<()> {
        self.expect(open)?;
        if self.depth == MAX_DEPTH {
            return Err(self.error(format_args!("nested deeper than {MAX_DEPTH}")));
        }
        self.depth += 1;
        Ok(())
    }

    /// Whether another element follows, before or after a comma.
    fn more(&mut self, first: bool, close: u8) -> Result<bool> {
        if self.peek() == Some(close) {
            self.at += 1;
            self.depth -= 1;
            return Ok(false);
        }
        if !first {
            self.expect(b',')?;
        }
        Ok(true)
    }

    /// Reads an object: `see` receives each key and must read its value.
    pub fn object(&mut self, mut see: impl FnMut(&mut Json<'a>, &str) -> Result<()>) -> Result<()> {
        self.enter(b'{')?;
        let mut first = true;
        while self.more(first, b'}')? {
            let key = self.string()?;
            self.expect(b':')?;
            see(self, &key)?;
            first = false;
        }
        Ok(())
    }

    /// Reads an array: `see` must read an element.
    pub fn array(&mut self, mut see: impl FnMut(&mut Json<'a>) -> Result<()>) -> Result<()> {
        self.enter(b'[')?;
        let mut first = true;
        while self.more(first, b']')? {
            see(self)?;
            first = false;
        }
        Ok(())
    }

    /// Reads a string.
    pub fn string(&mut self) -> Result<Cow<'a, str>> {
        self.expect(b'"')?;
        let start = self.at;
        loop {
            match self.text.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => return self.escaped(start),
                Some(0..=0x1F) | None => return Err(self.error("a string that does not end")),
                Some(_) => self.at += 1,
            }
        }
        let text = &self.text[start..self.at];
        self.at += 1;
        match std::str::from_utf8(text) {
            Ok(text) => Ok(Cow::Borrowed(text)),
            Err(_) => Err(self.error("a string that is not UTF-8")),
        }
    }

    fn escaped(&mut self, start: usize) -> Result<Cow<'a, str>> {
        let mut out = self.text[start..self.at].to_vec();
        loop {
            let Some(&byte) = self.text.get(self.at) else {
                return Err(self.error("a string that does not end"));
            };
            self.at += 1;
            match byte {
                b'"' => break,
                b'\\' => {
                    let c = self.escape()?;
                    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..=0x1F => return Err(self.error("a control character in a string")),
                byte => out.push(byte),
            }
        }
        match String::from_utf8(out) {
            Ok(text) => Ok(Cow::Owned(text)),
            Err(_) => Err(self.error("a string that is not UTF-8")),
        }
    }

    fn escape(&mut self) -> Result<char> {
        let byte = self.text.get(self.at).copied();
        self.at += 1;
        Ok(match byte {
            Some(c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let high = self.hex()?;
                let mut code = high;
                if (0xD800..0xDC00).contains(&high)
                    && self.text.get(self.at..self.at + 2) == Some(b"\\u")
                {
                    self.at += 2;
                    let low = self.hex()?;
                    // Any other value is an unpaired surrogate, replaced below.
                    if (0xDC00..0xE000).contains(&low) {
                        code = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
                    }
                }
                // Unpaired surrogates occur in real conversations.
                char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            _ => return Err(self.error("an unknown escape")),
        })
    }

    fn hex(&mut self) -> Result<u32> {
        let digits =
            self.text.get(self.at..self.at + 4).filter(|d| d.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|d| std::str::from_utf8(d).ok());
        match digits.and_then(|d| u32::from_str_radix(d, 16).ok()) {
            Some(code) => {
                self.at += 4;
                Ok(code)
            }
            None => Err(self.error("an escape without four digits")),
        }
    }

    /// Reads a whole number of 0 or more.
    pub fn u64(&mut self) -> Result<u64> {
        self.peek();
        let start = self.at;
        let mut value = 0u64;
        while let Some(&digit @ b'0'..=b'9') = self.text.get(self.at) {
            let next = value.checked_mul(10).and_then(|v| v.checked_add(u64::from(digit - b'0')));
            let Some(next) = next else { return Err(self.error("a number beyond 64 bits")) };
            value = next;
            self.at += 1;
        }
        if self.at == start || matches!(self.text.get(self.at), Some(b'.' | b'e' | b'E')) {
            self.at = start;
            return self.whole();
        }
        Ok(value)
    }

    /// Reads a whole number that is written with a fraction or an exponent.
    fn whole(&mut self) -> Result<u64> {
        let value = self.f64()?;
        if value < 0.0 || value.fract() != 0.0 || value > 9e15 {
            return Err(self.error(format_args!("{value} is not a whole number")));
        }
        Ok(value as u64)
    }

    /// Reads a number that fits 32 bits.
    pub fn u32(&mut self) -> Result<u32> {
        let value = self.u64()?;
        u32::try_from(value).map_err(|_| self.error(format_args!("{value} is beyond 32 bits")))
    }

    /// Reads a number.
    pub fn f64(&mut self) -> Result<f64> {
        self.peek();
        let rest = &self.text[self.at..];
        let part = |b: &u8| matches!(b, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let len = rest.iter().take(64).take_while(|b| part(b)).count();
        let starts = rest.first().is_some_and(|b| b.is_ascii_digit() || *b == b'-');
        let text = std::str::from_utf8(&rest[..len]).unwrap_or("");
        match text.parse::<f64>() {
            Ok(value) if starts && value.is_finite() => {
                self.at += len;
                Ok(value)
            }
            _ => Err(self.error("not a number")),
        }
    }

    /// Reads `null` if it is next.
    pub fn null(&mut self) -> bool {
        self.peek();
        let is = self.text[self.at..].starts_with(b"null");
        self.at += if is { 4 } else { 0 };
        is
    }

    /// Whether an array or object is next.
    pub fn is_nested(&mut self) -> bool {
        matches!(self.peek(), Some(b'[' | b'{'))
    }

    /// Whether an array is next.
    pub fn is_array(&mut self) -> bool {
        self.peek() == Some(b'[')
    }

    /// Reads `true` or `false` if one is next.
    pub fn flag(&mut self) -> Result<Option<bool>> {
        let flag = match self.peek() {
            Some(b't') => true,
            Some(b'f') => false,
            _ => return Ok(None),
        };
        self.skip()?;
        Ok(Some(flag))
    }

    /// Whether a string is next.
    pub fn is_string(&mut self) -> bool {
        self.peek() == Some(b'"')
    }

    /// Whether a number is next.
    pub fn is_number(&mut self) -> bool {
        matches!(self.peek(), Some(b'0'..=b'9' | b'-'))
    }

    /// Skips a value of any kind.
    pub fn skip(&mut self) -> Result<()> {
        match self.peek() {
            Some(b'{') => self.object(|json, _| json.skip()),
            Some(b'[') => self.array(Json::skip),
            Some(b'"') => self.string().map(drop),
            Some(b't' | b'f' | b'n') => {
                let rest = &self.text[self.at..];
                let word =
                    [&b"true"[..], b"false", b"null"].into_iter().find(|w| rest.starts_with(w));
                let Some(word) = word else { return Err(self.error("an unknown word")) };
                self.at += word.len();
                Ok(())
            }
            _ => self.f64().map(drop),
        }
    }

    /// Checks that nothing follows.
    pub fn end(&mut self) -> Result<()> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.error("something after the value")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_and_skipped() {
        let text =
            br#" {"a": [1, 2.0, 3e2], "b": "x\n\u00e9\ud83d\ude00", "c": {"d": [null, true]}} "#;
        let (mut numbers, mut word) = (Vec::new(), String::new());
        let mut json = Json::new(text);
        json.object(|json, key| match key {
            "a" => json.array(|json| {
                numbers.push(json.u64()?);
                Ok(())
            }),
            "b" => {
                word = json.string()?.into_owned();
                Ok(())
            }
            _ => json.skip(),
        })
        .expect("sound");
        json.end().expect("the end");
        assert_eq!((numbers, word.as_str()), (vec![1, 2, 300], "x\né😀"));
    }

    #[test]
    fn malformed_json_is_refused() {
        let deep = "[".repeat(MAX_DEPTH + 1);
        for text in [
            "",
            "{",
            "[1,]x",
            "{\"a\" 1}",
            "\"\\q\"",
            "\"\\u12\"",
            "\"open",
            "nul",
            "+1",
            "1e999",
            "[1 2]",
            "{1:2}",
            "\"\u{1}\"",
            "--1",
            &deep,
        ] {
            let mut json = Json::new(text.as_bytes());
            assert!(json.skip().and_then(|()| json.end()).is_err(), "{text}");
        }
        assert!(Json::new(b"18446744073709551616").u64().is_err());
        assert!(Json::new(b"-1").u64().is_err());
        assert!(Json::new(b"4294967296").u32().is_err());
    }
}
