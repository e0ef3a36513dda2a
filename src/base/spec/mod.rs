//! The grammar of spec strings, and the typed reader of their parameters.
//!
//! ```text
//! spec  := name [ '(' [ arg { ',' arg } ] ')' ]
//! arg   := [ key '=' ] value
//! value := number [ unit ] | '"' text '"' | spec
//! ```
//!
//! Names and keys are `[A-Za-z0-9][A-Za-z0-9_-]*`, so that `2q` and `lru-k` are names. Spaces
//! are ignored. Numbers are decimal with an optional exponent, in any locale. Units: `%`,
//! `B KiB MiB GiB TiB KB MB GB TB`, `ns us ms s m h d`. `true`, `false` and words are specs
//! without arguments.

pub mod describe;
mod reader;

use std::fmt;

pub use crate::base::spec::reader::Reader;
use crate::base::status::{Error, Result, Status};

/// Longest accepted text.
pub const MAX_SPEC_BYTES: usize = 4096;
/// Deepest accepted nesting.
pub const MAX_SPEC_DEPTH: usize = 8;
/// Most arguments of one spec.
pub const MAX_SPEC_ARGS: usize = 64;

/// A parsed spec: a name and its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The name.
    pub name: String,
    /// The arguments, in the order of the text.
    pub args: Vec<Arg>,
    /// The byte offset in the text.
    pub offset: usize,
}

/// One argument of a spec.
#[derive(Clone, Debug, PartialEq)]
pub struct Arg {
    /// The key; empty for a positional argument.
    pub key: String,
    /// The value.
    pub value: Value,
    /// The byte offset in the text.
    pub offset: usize,
}

/// The value of an argument.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number and its unit; the unit may be empty.
    Number(f64, String),
    /// A quoted text.
    Text(String),
    /// A word or a nested spec.
    Spec(Spec),
}

impl Value {
    /// The nanoseconds of a number with a unit of time, or of a number without a unit; `None`
    /// for any other value.
    pub fn nanoseconds(&self) -> Option<f64> {
        match self {
            Value::Number(n, unit) if unit.is_empty() => Some(*n),
            Value::Number(n, unit) => match scale(unit)? {
                (Dimension::Time, factor) => Some(n * factor),
                _ => None,
            },
            _ => None,
        }
    }
}

impl Spec {
    /// Parses a whole text.
    pub fn parse(text: &str) -> Result<Spec> {
        if text.len() > MAX_SPEC_BYTES {
            return Err(Error::at(
                Status::Limit,
                MAX_SPEC_BYTES,
                format!("spec is {} bytes, the limit is {MAX_SPEC_BYTES}", text.len()),
            ));
        }
        let mut parser = Parser { text, at: 0 };
        let spec = parser.spec(0)?;
        parser.space();
        if parser.at < text.len() {
            return Err(parser.wrong("expected the end of the spec"));
        }
        Ok(spec)
    }

    /// The error for a name that is not among `known`; suggests the nearest.
    pub fn unknown_name(&self, known: &[&str]) -> Error {
        unknown("name", &self.name, self.offset, known)
    }
}

/// The canonical form: no spaces, keys as written, numbers in shortest form.
impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (i, arg) in self.args.iter().enumerate() {
            f.write_str(if i == 0 { "(" } else { "," })?;
            if !arg.key.is_empty() {
                write!(f, "{}=", arg.key)?;
            }
            match &arg.value {
                // Without an exponent where that is short. Both forms can be parsed again.
                Value::Number(n, unit) if *n == 0.0 || (1e-6..1e15).contains(&n.abs()) => {
                    write!(f, "{n}{unit}")?;
                }
                Value::Number(n, unit) => write!(f, "{n:e}{unit}")?,
                Value::Text(text) => {
                    f.write_str("\"")?;
                    for c in text.chars() {
                        match c {
                            '"' | '\\' => write!(f, "\\{c}")?,
                            c => write!(f, "{c}")?,
                        }
                    }
                    f.write_str("\"")?;
                }
                Value::Spec(spec) => write!(f, "{spec}")?,
            }
        }
        f.write_str(if self.args.is_empty() { "" } else { ")" })
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        self.space();
        let hit = self.peek() == Some(byte);
        self.at += usize::from(hit);
        hit
    }

    fn wrong(&self, what: &str) -> Error {
        let found = match self.text[self.at.min(self.text.len())..].chars().next() {
            Some(c) => format!("found {c:?}"),
            None => "found the end".to_string(),
        };
        Error::at(Status::Spec, self.at, format!("{what} at offset {}, {found}", self.at))
    }

    fn word_end(&self) -> usize {
        let rest = &self.text.as_bytes()[self.at..];
        let inner = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
        match rest.first() {
            Some(b) if b.is_ascii_alphanumeric() => {
                self.at + rest.iter().take_while(|b| inner(b)).count()
            }
            _ => self.at,
        }
    }

    fn word(&mut self, what: &str) -> Result<String> {
        self.space();
        let end = self.word_end();
        if end == self.at {
            return Err(self.wrong(what));
        }
        let word = self.text[self.at..end].to_string();
        self.at = end;
        Ok(word)
    }

    fn spec(&mut self, depth: usize) -> Result<Spec> {
        if depth >= MAX_SPEC_DEPTH {
            let text = format!("nested deeper than {MAX_SPEC_DEPTH} at offset {}", self.at);
            return Err(Error::at(Status::Limit, self.at, text));
        }
        self.space();
        let offset = self.at;
        let name = self.word("expected a name")?;
        let mut args = Vec::new();
        if self.eat(b'(') && !self.eat(b')') {
            loop {
                if args.len() >= MAX_SPEC_ARGS {
                    let text = format!("more than {MAX_SPEC_ARGS} arguments at offset {}", self.at);
                    return Err(Error::at(Status::Limit, self.at, text));
                }
                args.push(self.arg(depth)?);
                if self.eat(b')') {
                    break;
                }
                if !self.eat(b',') {
                    return Err(self.wrong("expected ',' or ')'"));
                }
            }
        }
        self.unique(&args)?;
        Ok(Spec { name, args, offset })
    }

    fn unique(&self, args: &[Arg]) -> Result<()> {
        for (i, arg) in args.iter().enumerate() {
            if !arg.key.is_empty() && args[..i].iter().any(|a| a.key == arg.key) {
                let text = format!("'{}' is given twice, again at offset {}", arg.key, arg.offset);
                return Err(Error::at(Status::Spec, arg.offset, text));
            }
        }
        Ok(())
    }

    fn arg(&mut self, depth: usize) -> Result<Arg> {
        self.space();
        let offset = self.at;
        let end = self.word_end();
        let mut key = String::new();
        if end > self.at {
            let mark = self.at;
            self.at = end;
            if self.eat(b'=') {
                key = self.text[mark..end].to_string();
            } else {
                self.at = mark;
            }
        }
        let value = self.value(depth)?;
        Ok(Arg { key, value, offset })
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        self.space();
        match self.peek() {
            Some(b'"') => self.quoted(),
            Some(b'-' | b'+' | b'.') => self.number()?.ok_or_else(|| self.wrong("not a number")),
            Some(b) if b.is_ascii_digit() => match self.number()? {
                Some(number) => Ok(number),
                None => Ok(Value::Spec(self.spec(depth + 1)?)), // a name such as 2q
            },
            Some(b) if b.is_ascii_alphabetic() => Ok(Value::Spec(self.spec(depth + 1)?)),
            _ => Err(self.wrong("expected a value")),
        }
    }

    fn quoted(&mut self) -> Result<Value> {
        let start = self.at;
        let mut text = String::new();
        let mut escaped = false;
        for (i, c) in self.text[start + 1..].char_indices() {
            match c {
                c if escaped => {
                    if !matches!(c, '"' | '\\') {
                        self.at = start + 1 + i;
                        return Err(self.wrong("only \\\" and \\\\ are escapes"));
                    }
                    text.push(c);
                    escaped = false;
                }
                '\\' => escaped = true,
                '"' => {
                    self.at = start + 1 + i + 1;
                    return Ok(Value::Text(text));
                }
                c => text.push(c),
            }
        }
        self.at = self.text.len();
        Err(self.wrong("a quoted text is not closed"))
    }

    /// A number with its unit; `None` if the word is a name like `2q`.
    fn number(&mut self) -> Result<Option<Value>> {
        let bytes = self.text.as_bytes();
        let start = self.at;
        let mut end = start;
        let digits = |mut i: usize| {
            while bytes.get(i).is_some_and(u8::is_ascii_digit) {
                i += 1;
            }
            i
        };
        if matches!(bytes.get(end), Some(b'-' | b'+')) {
            end += 1;
        }
        end = digits(end);
        if bytes.get(end) == Some(&b'.') {
            end = digits(end + 1);
        }
        if matches!(bytes.get(end), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(end + 1), Some(b'-' | b'+')));
            if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
                end = digits(end + 1 + sign);
            }
        }
        self.at = end;
        let unit_end = if self.peek() == Some(b'%') { end + 1 } else { self.letters(end) };
        let unit = &self.text[end..unit_end];
        if !unit.is_empty() && scale(unit).is_none() {
            self.at = start;
            return Ok(None);
        }
        self.at = unit_end;
        match self.text[start..end].parse::<f64>() {
            Ok(n) if n.is_finite() => Ok(Some(Value::Number(n, unit.to_string()))),
            _ => {
                self.at = start;
                Err(self.wrong("not a finite number"))
            }
        }
    }

    fn letters(&self, from: usize) -> usize {
        let rest = &self.text.as_bytes()[from..];
        let inner = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
        from + rest.iter().take_while(|b| inner(b)).count()
    }
}

/// Every unit that [`scale`] knows.
const UNITS: [&str; 17] = [
    "%", "B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB", "ns", "us", "ms", "s", "m", "h",
    "d",
];

#[derive(Clone, Copy, PartialEq)]
enum Dimension {
    Ratio,
    Bytes,
    Time,
}

fn scale(unit: &str) -> Option<(Dimension, f64)> {
    use Dimension::{Bytes, Ratio, Time};
    Some(match unit {
        "%" => (Ratio, 0.01),
        "B" => (Bytes, 1.0),
        "KiB" => (Bytes, 1024.0),
        "MiB" => (Bytes, 1024.0 * 1024.0),
        "GiB" => (Bytes, 1024.0 * 1024.0 * 1024.0),
        "TiB" => (Bytes, 1024.0 * 1024.0 * 1024.0 * 1024.0),
        "KB" => (Bytes, 1e3),
        "MB" => (Bytes, 1e6),
        "GB" => (Bytes, 1e9),
        "TB" => (Bytes, 1e12),
        "ns" => (Time, 1.0),
        "us" => (Time, 1e3),
        "ms" => (Time, 1e6),
        "s" => (Time, 1e9),
        "m" => (Time, 60e9),
        "h" => (Time, 3600e9),
        "d" => (Time, 86400e9),
        _ => return None,
    })
}

/// The error for a word that is not among `known`. It suggests the nearest one, or lists all.
pub fn unknown(what: &str, word: &str, offset: usize, known: &[&str]) -> Error {
    let text = match nearest(word, known) {
        Some(guess) => {
            format!("unknown {what} '{word}' at offset {offset}; did you mean '{guess}'?")
        }
        None if known.is_empty() => format!("unknown {what} '{word}' at offset {offset}"),
        None => {
            let all = known.join("', '");
            format!("unknown {what} '{word}' at offset {offset}; accepted are '{all}'")
        }
    };
    Error::at(Status::Spec, offset, text)
}

/// The entry of `known` with the smallest edit distance to `word`, if that is at most two thirds
/// of the longer word.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let guess = known.iter().copied().min_by_key(|k| edit_distance(word, k))?;
    let longer = word.chars().count().max(guess.chars().count());
    (edit_distance(word, guess) * 3 <= longer * 2).then_some(guess)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().take(64).collect(), b.chars().collect());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(!x.eq_ignore_ascii_case(y));
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests;
