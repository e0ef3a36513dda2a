//! Patterns of heads from a file: the result of MInference's search for a model.
//!
//! The file is JSON: a list with an entry for each layer. An entry is an object from the number of
//! a query head, as a string, to its pattern, or a list of patterns, one a head. A pattern is a
//! list: its name, two integers, and an optional third number, which rated it and is ignored. Heads
//! without an entry have the pattern of the spec.
//!
//! | name | first number | second |
//! |---|---|---|
//! | `vertical_and_slash`, `vertical_slash` | columns | diagonals |
//! | `stream_llm`, `a_shape` | first tokens | last tokens |
//! | `tri_shape` | first tokens | last tokens |
//! | `block_sparse` | blocks of keys | ignored |

use std::path::Path;

use crate::base::spec::nearest;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::source::Source;
use crate::sparse::numbers::reserve;
use crate::sparse::shape::Shape;

/// Largest accepted file, in bytes.
pub const MAX_BYTES: usize = 16 << 20;
/// Largest size of a pattern.
pub const MAX_SIZE: u32 = 1 << 30;

/// Kinds of patterns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Columns and diagonals with the most attention of the last queries.
    #[default]
    VerticalSlash,
    /// The first and the last tokens.
    AShape,
    /// The same, and all tokens for the last queries of a prompt.
    TriShape,
    /// The blocks whose means match best.
    BlockSparse,
}

/// Names in files.
const NAMES: [(&str, Kind); 6] = [
    ("vertical_and_slash", Kind::VerticalSlash),
    ("vertical_slash", Kind::VerticalSlash),
    ("stream_llm", Kind::AShape),
    ("a_shape", Kind::AShape),
    ("tri_shape", Kind::TriShape),
    ("block_sparse", Kind::BlockSparse),
];

/// The pattern of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pattern {
    /// Kind.
    pub kind: Kind,
    /// Columns, first tokens or blocks.
    pub vertical: u32,
    /// Diagonals or last tokens.
    pub slash: u32,
}

/// The patterns of all heads that have their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Patterns {
    heads: usize,
    /// By layer, then by head; empty without a file.
    all: Vec<Option<Pattern>>,
}

impl Patterns {
    /// Reads a file.
    pub fn open(path: &str, shape: &Shape) -> Result<Patterns> {
        let text = Source::open(Path::new(path))?.rest(MAX_BYTES)?;
        Patterns::parse(&text, shape).map_err(|e| e.within(path))
    }

    /// Parses the text of a file.
    pub fn parse(text: &[u8], shape: &Shape) -> Result<Patterns> {
        if text.len() > MAX_BYTES {
            fail!(Limit, "the pattern file has {} bytes, the limit is {MAX_BYTES}", text.len());
        }
        let heads = shape.query_heads as usize;
        let mut patterns = Patterns { heads, all: Vec::new() };
        let mut parser = Parser { text, at: 0 };
        let mut layers = 0;
        parser.list(|parser| {
            if layers == shape.layers {
                return Err(parser.wrong(&format!("more than {layers} layers")));
            }
            layers += 1;
            reserve(&mut patterns.all, heads)?;
            let first = patterns.all.len();
            patterns.all.resize(first + heads, None);
            parser.layer(patterns.all.get_mut(first..).unwrap_or_default())
        })?;
        parser.end()?;
        if layers != shape.layers {
            fail!(Invalid, "the pattern file has {layers} layers, the model has {}", shape.layers);
        }
        Ok(patterns)
    }

    /// The pattern of a head, if it has its own.
    pub fn get(&self, layer: u32, head: u32) -> Option<Pattern> {
        self.all.get(layer as usize * self.heads + head as usize).copied().flatten()
    }

    /// Whether no head has its own pattern.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

/// A parser of the JSON that patterns are written in, and of no more: strings have no escapes, and
/// nesting is bounded by the parser's own calls.
struct Parser<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Parser<'a> {
    fn wrong(&self, what: &str) -> Error {
        Error::at(Status::Invalid, self.at, format!("{what} at byte {}", self.at))
    }

    fn peek(&mut self) -> Option<u8> {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.text.get(self.at) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn eat(&mut self, byte: u8) -> bool {
        let hit = self.peek() == Some(byte);
        self.at += usize::from(hit);
        hit
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        match self.eat(byte) {
            true => Ok(()),
            false => Err(self.wrong(&format!("expected '{}'", byte.escape_ascii()))),
        }
    }

    fn end(&mut self) -> Result<()> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.wrong("text after the patterns")),
        }
    }

    /// Reads the elements of a list or object whose opening bracket has been read.
    fn rest(&mut self, close: u8, mut see: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        if self.eat(close) {
            return Ok(());
        }
        loop {
            see(self)?;
            if self.eat(close) {
                return Ok(());
            }
            self.expect(b',')?;
        }
    }

    fn list(&mut self, see: impl FnMut(&mut Self) -> Result<()>) -> Result<()> {
        self.expect(b'[')?;
        self.rest(b']', see)
    }

    /// Reads a layer into the patterns of its heads.
    fn layer(&mut self, heads: &mut [Option<Pattern>]) -> Result<()> {
        if self.eat(b'{') {
            return self.rest(b'}', |parser| {
                let head = parser.head()?;
                parser.expect(b':')?;
                parser.put(head, heads)
            });
        }
        let mut head = 0;
        self.list(|parser| {
            parser.put(head, heads)?;
            head += 1;
            Ok(())
        })
    }

    fn put(&mut self, head: usize, heads: &mut [Option<Pattern>]) -> Result<()> {
        match heads.get_mut(head) {
            Some(place @ None) => {
                *place = Some(self.pattern()?);
                Ok(())
            }
            Some(_) => Err(self.wrong(&format!("head {head} is named twice"))),
            None => {
                Err(self
                    .wrong(&format!("head {head} does not exist, the model has {}", heads.len())))
            }
        }
    }

    fn word(&mut self) -> Result<&'a str> {
        self.expect(b'"')?;
        let rest = self.text.get(self.at..).unwrap_or_default();
        let plain = |b: &u8| b.is_ascii_graphic() && !matches!(b, b'"' | b'\\');
        let len = rest.iter().take_while(|b| plain(b)).count();
        let word = rest.get(..len).and_then(|word| std::str::from_utf8(word).ok());
        self.at += len;
        match (word, self.text.get(self.at)) {
            (Some(word), Some(b'"')) => {
                self.at += 1;
                Ok(word)
            }
            _ => Err(self.wrong("expected a name")),
        }
    }

    fn head(&mut self) -> Result<usize> {
        let word = self.word()?;
        match word.parse() {
            Ok(head) if word.bytes().all(|b| b.is_ascii_digit()) => Ok(head),
            _ => Err(self.wrong(&format!("'{word}' is not the number of a head"))),
        }
    }

    fn pattern(&mut self) -> Result<Pattern> {
        self.expect(b'[')?;
        let name = self.word()?;
        let Some(&(_, kind)) = NAMES.iter().find(|(known, _)| *known == name) else {
            let all = NAMES.map(|(known, _)| known);
            let hint = match nearest(name, &all) {
                Some(name) => format!("the nearest is '{name}'"),
                None => format!("accepted are '{}'", all.join("', '")),
            };
            return Err(self.wrong(&format!("unknown pattern '{name}', {hint}")));
        };
        self.expect(b',')?;
        let vertical = self.size()?;
        self.expect(b',')?;
        let slash = self.size()?;
        if vertical == 0 || (slash == 0 && kind != Kind::BlockSparse) {
            return Err(self.wrong("a pattern has size 0, it must be at least 1"));
        }
        if self.eat(b',') {
            self.number()?;
        }
        self.expect(b']')?;
        Ok(Pattern { kind, vertical, slash })
    }

    fn number(&mut self) -> Result<&'a str> {
        self.peek();
        let rest = self.text.get(self.at..).unwrap_or_default();
        let part = |b: &u8| b.is_ascii_digit() || matches!(b, b'-' | b'+' | b'.' | b'e' | b'E');
        let len = rest.iter().take(64).take_while(|b| part(b)).count();
        let text = rest.get(..len).and_then(|text| std::str::from_utf8(text).ok()).unwrap_or("");
        let starts = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
        match text.parse::<f64>() {
            Ok(_) if starts => {
                self.at += len;
                Ok(text)
            }
            _ => Err(self.wrong("expected a number")),
        }
    }

    fn size(&mut self) -> Result<u32> {
        let text = self.number()?;
        match text.parse::<u32>() {
            Ok(size) if size <= MAX_SIZE => Ok(size),
            _ => Err(self.wrong(&format!("{text} is not an integer up to {MAX_SIZE}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape(layers: u32, query_heads: u32) -> Shape {
        Shape {
            layers,
            query_heads,
            key_heads: 1,
            key_dim: 4,
            value_dim: 4,
            scale: 0.0,
            kind: Default::default(),
            block_tokens: 16,
            max_tokens: 1000,
        }
    }

    #[test]
    fn objects_and_lists_of_heads_are_read() {
        let text = br#" [ {"0": ["vertical_and_slash", 1000, 6096, 336923.5e0], "2":["stream_llm",128,4096]},
            [["block_sparse", 100, 0, -1], ["tri_shape", 1, 2], ["a_shape", 3, 4], ["vertical_slash",5,6]] ] "#;
        let patterns = Patterns::parse(text, &shape(2, 4)).expect("sound");
        let all: Vec<_> = (0..8).map(|n| patterns.get(n / 4, n % 4)).collect();
        let is = |kind, vertical, slash| Some(Pattern { kind, vertical, slash });
        let expected = [
            is(Kind::VerticalSlash, 1000, 6096),
            None,
            is(Kind::AShape, 128, 4096),
            None,
            is(Kind::BlockSparse, 100, 0),
            is(Kind::TriShape, 1, 2),
            is(Kind::AShape, 3, 4),
            is(Kind::VerticalSlash, 5, 6),
        ];
        assert_eq!(all, expected);
        assert!(!patterns.is_empty() && Patterns::default().is_empty());
        assert_eq!(Patterns::default().get(0, 0), None);
    }

    #[test]
    fn invalid_patterns_are_rejected_with_their_offset() {
        for (text, at) in [
            ("", 0),
            ("[", 1),
            ("[{}]x", 4),
            ("[{},{}]", 4),
            ("[]", 99),
            (r#"[{"2":["a_shape",1,1]}]"#, 6),
            (r#"[{"0":["a_shape",1,1],"0":["a_shape",1,1]}]"#, 26),
            (r#"[{"+0":["a_shape",1,1]}]"#, 6),
            (r#"[{"0":["ashape",1,1]}]"#, 15),
            (r#"[{"0":["a_shape",0,1]}]"#, 20),
            (r#"[{"0":["a_shape",1,0]}]"#, 20),
            (r#"[{"0":["a_shape",1.5,1]}]"#, 20),
            (r#"[{"0":["a_shape",-1,1]}]"#, 19),
            (r#"[{"0":["a_shape",1073741825,1]}]"#, 27),
            (r#"[{"0":["a_shape",1]}]"#, 18),
            (r#"[{"0":["a_shape",1,1,1,1]}]"#, 22),
            (r#"[{"0":["a_shape",1,1,x]}]"#, 21),
            ("[{\"0\":[\"a\\u0020\",1,1]}]", 9),
            ("[{\"0\"", 5),
            ("[[[[[[", 3),
        ] {
            let error = Patterns::parse(text.as_bytes(), &shape(1, 2)).expect_err(text);
            let offset = error.detail().and_then(|d| d.offset).unwrap_or(99);
            assert_eq!(offset, at, "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in r#"[\[\]{}",:0-9a-z_.e -]{0,80}"#) {
            let _ = Patterns::parse(text.as_bytes(), &shape(2, 2));
        }
    }
}
