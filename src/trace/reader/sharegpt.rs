//! Conversations as text: `[{"id", "conversations": [{"from", "value"}]}]`, or one such object a
//! line. Every answered turn becomes a request with all text so far.
//!
//! There is no tokenizer: four bytes of text count as a token, and a block's id is the hash of the
//! text up to its end. Conversations start at random times from a seed. A turn follows the last
//! answer after the time to generate it and a pause.

use crate::base::checksum::checksum;
use crate::base::json::Json;
use crate::base::status::{Error, Result};
use crate::fail;
use crate::io::source::Source;
use crate::meta::index;
use crate::meta::sessions::Stop;
use crate::trace::generate::rng::Rng;
use crate::trace::reader::ReadOpts;
use crate::trace::requests::{Builder, Request, Trace};

/// Largest file with a single array.
pub const MAX_FILE_BYTES: usize = 4 << 30;
/// Longest conversation.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// Most blocks of all requests of one conversation.
pub const MAX_BLOCKS: usize = 1 << 22;
/// Default mean time between starts.
pub const GAP_NS: i64 = 2_000_000_000;

const BYTES_PER_TOKEN: usize = 4;
const OUTPUT_TOKEN_NS: i64 = 20_000_000;
const PAUSE_NS: i64 = 30_000_000_000;

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source, opts: &ReadOpts) -> Result<Trace> {
    let mut maker = Maker {
        builder: Builder::new(opts.block_tokens)?,
        rng: Rng::new(opts.seed),
        opts: *opts,
        start_ns: 0,
        number: 0,
    };
    let first = source.peek()?.iter().find(|b| !b.is_ascii_whitespace()).copied();
    if first == Some(b'[') {
        let text = source.rest(MAX_FILE_BYTES)?;
        let mut json = Json::new(&text);
        json.array(|json| {
            let number = maker.number + 1;
            maker.conversation(json).map_err(|e| e.within(&format!("conversation {number}")))
        })?;
        json.end()?;
        return maker.builder.finish();
    }
    let (mut line, mut number) = (Vec::new(), 0u64);
    while source.line(&mut line)? {
        number += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let place = |e: Error| e.within(&format!("line {number}"));
        let mut json = Json::new(&line);
        maker.conversation(&mut json).and_then(|()| json.end()).map_err(place)?;
    }
    maker.builder.finish()
}

struct Maker {
    builder: Builder,
    rng: Rng,
    opts: ReadOpts,
    start_ns: i64,
    number: u64,
}

/// The blocks of a growing text.
struct Text {
    bytes: Vec<u8>,
    each: usize,
    /// Ids of its full blocks.
    full: Vec<u64>,
}

impl Text {
    fn add(&mut self, from: &str, value: &str) -> Result<()> {
        let more = from.len() + value.len() + 2;
        if self.bytes.len() + more > MAX_TEXT_BYTES {
            fail!(Limit, "a conversation of more than {MAX_TEXT_BYTES} bytes");
        }
        if self.bytes.try_reserve(more).is_err() {
            fail!(NoMem, "no memory for {} bytes of text", self.bytes.len() + more);
        }
        for part in [from.as_bytes(), b"\0", value.as_bytes(), b"\0"] {
            self.bytes.extend_from_slice(part);
        }
        while (self.full.len() + 1) * self.each <= self.bytes.len() {
            let start = self.full.len() * self.each;
            let id = self.id(&self.bytes[start..start + self.each]);
            self.full.push(id);
        }
        Ok(())
    }

    /// The id of a block after the full ones.
    fn id(&self, block: &[u8]) -> u64 {
        let before = self.full.last().copied().unwrap_or(0);
        index::hash(before.rotate_left(11) ^ checksum(block) ^ block.len() as u64)
    }

    fn path(&self) -> Vec<u64> {
        let rest = &self.bytes[self.full.len() * self.each..];
        let mut path = self.full.clone();
        if !rest.is_empty() {
            path.push(self.id(rest));
        }
        path
    }
}

fn tokens(bytes: usize) -> u32 {
    bytes.div_ceil(BYTES_PER_TOKEN) as u32
}

impl Maker {
    fn conversation(&mut self, json: &mut Json) -> Result<()> {
        let gap_ns = if self.opts.gap_ns > 0 { self.opts.gap_ns } else { GAP_NS };
        self.number += 1;
        self.start_ns = self.start_ns.saturating_add(self.rng.wait_ns(gap_ns));
        let mut rng = self.rng.part(self.number);
        let mut text = Text {
            bytes: Vec::new(),
            each: self.opts.block_tokens as usize * BYTES_PER_TOKEN,
            full: Vec::new(),
        };
        let mut at_ns = self.start_ns;
        let mut made: Vec<(Request, Vec<u64>)> = Vec::new();
        let mut blocks = 0;
        json.object(|json, key| match key {
            "conversations" | "conversation" | "messages" => json.array(|json| {
                let (from, value) = turn(json)?;
                if matches!(from.as_str(), "gpt" | "assistant" | "chatgpt" | "bing" | "bard") {
                    let output_tokens = tokens(value.len());
                    let pause = rng.wait_ns(PAUSE_NS);
                    let think_ns = i64::from(output_tokens) * OUTPUT_TOKEN_NS + pause;
                    let request = Request {
                        at_ns,
                        session: Some(self.number),
                        priority: 1,
                        input_tokens: tokens(text.bytes.len()),
                        output_tokens,
                        stop: Stop::EndTurn,
                        think_ns,
                        ..Request::default()
                    };
                    if !text.bytes.is_empty() {
                        let path = text.path();
                        blocks += path.len();
                        if blocks > MAX_BLOCKS {
                            fail!(Limit, "a conversation has more than {MAX_BLOCKS} blocks");
                        }
                        made.push((request, path));
                        at_ns = at_ns.saturating_add(think_ns);
                    }
                }
                text.add(&from, &value)
            }),
            _ => json.skip(),
        })?;
        if let Some((last, _)) = made.last_mut() {
            last.think_ns = 0;
        }
        for (request, path) in made {
            if request.at_ns <= self.opts.duration_ns {
                self.builder.push(request, &path)?;
            }
        }
        Ok(())
    }
}

/// The role and text of one turn, in both spellings in use.
fn turn(json: &mut Json) -> Result<(String, String)> {
    let (mut from, mut value) = (String::new(), String::new());
    json.object(|json, key| {
        match key {
            "from" | "role" if json.is_string() => from = json.string()?.into_owned(),
            "value" | "content" if json.is_string() => value = json.string()?.into_owned(),
            _ => json.skip()?,
        }
        Ok(())
    })?;
    Ok((from, value))
}
