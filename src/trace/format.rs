//! kvtier's trace file. It is compact because most of a path was seen before: its deepest known
//! block stands for the rest.
//!
//! ```text
//! magic "KVTTRACE", version (u8)
//! block_tokens, requests, references, blocks       (varints)
//! for each request:
//!     time since the one before, ns                (varint)
//!     flags: 1 session, 2 tenant, 4 priority not 1, 8 stop, 16 think  (u8)
//!     those that the flags name                    (varints)
//!     input tokens, output tokens                  (varints)
//!     deepest block known + 1, or 0                (varint, in order of appearance)
//!     new blocks, and the id of each as the difference from the last new one + 1
//!                                                  (varint, zigzag varints)
//! checksum of everything before                    (u64, little-endian)
//! ```
//!
//! The time of the first request counts from `MIN_TIME`. Files are untrusted: every size is
//! bounded, and the file must match its header.

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::source::Source;
use crate::meta::sessions::Stop;
use crate::trace::requests::{Builder, MAX_REFERENCES, MAX_REQUESTS, MAX_TIME_NS, Request, Trace};

/// The first bytes of a file.
pub const MAGIC: [u8; 8] = *b"KVTTRACE";
/// The version that is written, and the highest that is read.
pub const VERSION: u8 = 1;
/// Largest file.
pub const MAX_FILE_BYTES: usize = 4 << 30;

const SUM_BYTES: usize = 8;
const MIN_TIME: i64 = -MAX_TIME_NS;

const SESSION: u8 = 1;
const TENANT: u8 = 2;
const PRIORITY: u8 = 4;
const STOP: u8 = 8;
const THINK: u8 = 16;

/// Encodes a trace.
pub fn write(trace: &Trace) -> Result<Vec<u8>> {
    let mut out = Writer(Vec::new());
    out.0.extend_from_slice(&MAGIC);
    out.0.push(VERSION);
    out.varint(u64::from(trace.block_tokens()));
    out.varint(trace.requests().len() as u64);
    out.varint(trace.references() as u64);
    out.varint(trace.uniques() as u64);
    let (mut known, mut last_ns, mut last_id) = (0u32, MIN_TIME, 0u64);
    for request in trace.requests() {
        if out.0.try_reserve(256 + 10 * request.len()).is_err() {
            fail!(NoMem, "no memory for a file of {} bytes", out.0.len());
        }
        out.varint(request.at_ns.abs_diff(last_ns));
        last_ns = request.at_ns;
        out.fields(request);
        // Blocks are numbered by first appearance: those from `known` on are new.
        let dense = trace.dense(request);
        let old = dense.iter().take_while(|&&b| b < known).count();
        out.varint(dense[..old].last().map_or(0, |&b| u64::from(b) + 1));
        out.varint((dense.len() - old) as u64);
        for &id in &trace.blocks(request)[old..] {
            out.varint(zigzag(id.wrapping_sub(last_id).wrapping_sub(1) as i64));
            last_id = id;
        }
        known += (dense.len() - old) as u32;
    }
    let sum = checksum(&out.0);
    out.0.extend_from_slice(&sum.to_le_bytes());
    Ok(out.0)
}

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source) -> Result<Trace> {
    let bytes = source.rest(MAX_FILE_BYTES)?;
    let Some((body, sum)) = bytes.split_last_chunk::<SUM_BYTES>() else {
        fail!(Corrupt, "a file of {} bytes is too short for a trace", bytes.len());
    };
    if !body.starts_with(&MAGIC) {
        fail!(Invalid, "the file does not begin as a kvtier trace");
    }
    match body.get(MAGIC.len()) {
        Some(&VERSION) => {}
        Some(&newer) if newer > VERSION => {
            fail!(TooNew, "a trace of version {newer}; this build reads up to {VERSION}")
        }
        _ => fail!(Invalid, "the file does not begin as a kvtier trace"),
    }
    if checksum(body) != u64::from_le_bytes(*sum) {
        fail!(Corrupt, "the checksum differs: the file is damaged or cut off");
    }
    let mut reader = Reader { bytes: body, at: MAGIC.len() + 1 };
    let trace = reader.trace()?;
    match reader.at == body.len() {
        true => Ok(trace),
        false => fail!(Corrupt, "{} bytes follow the last request", body.len() - reader.at),
    }
}

fn zigzag(x: i64) -> u64 {
    ((x << 1) ^ (x >> 63)) as u64
}

fn unzigzag(x: u64) -> i64 {
    (x >> 1) as i64 ^ -((x & 1) as i64)
}

struct Writer(Vec<u8>);

impl Writer {
    fn varint(&mut self, mut x: u64) {
        while x >= 0x80 {
            self.0.push(x as u8 | 0x80);
            x >>= 7;
        }
        self.0.push(x as u8);
    }

    fn fields(&mut self, r: &Request) {
        let flag = |on: bool, bit: u8| if on { bit } else { 0 };
        let flags = flag(r.session.is_some(), SESSION)
            | flag(r.tenant != 0, TENANT)
            | flag(r.priority != 1, PRIORITY)
            | flag(r.stop != Stop::Unknown, STOP)
            | flag(r.think_ns != 0, THINK);
        self.0.push(flags);
        let think = zigzag(r.think_ns);
        let fields =
            [r.session.unwrap_or(0), r.tenant.into(), r.priority.into(), r.stop as u64, think];
        for (bit, value) in fields.into_iter().enumerate() {
            if flags & (1 << bit) != 0 {
                self.varint(value);
            }
        }
        self.varint(r.input_tokens.into());
        self.varint(r.output_tokens.into());
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn wrong(&self, what: &str) -> Error {
        Error::at(Status::Corrupt, self.at, format!("{what} at byte {}", self.at))
    }

    fn byte(&mut self) -> Result<u8> {
        let Some(&byte) = self.bytes.get(self.at) else { return Err(self.wrong("the end")) };
        self.at += 1;
        Ok(byte)
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.wrong("a number of more than 64 bits"))
    }

    fn u32(&mut self) -> Result<u32> {
        let value = self.varint()?;
        u32::try_from(value).map_err(|_| self.wrong("a number of more than 32 bits"))
    }

    fn trace(&mut self) -> Result<Trace> {
        let mut builder = Builder::new(self.u32()?)?;
        let (requests, references, blocks) = (self.varint()?, self.varint()?, self.varint()?);
        if requests > MAX_REQUESTS as u64 || references > MAX_REFERENCES as u64 {
            fail!(
                Limit,
                "{requests} requests and {references} references, allowed are {MAX_REQUESTS} and \
                 {MAX_REFERENCES}"
            );
        }
        let mut tree = Tree::default();
        let (mut last_ns, mut last_id, mut seen) = (MIN_TIME, 0u64, 0u64);
        let mut path = Vec::new();
        for _ in 0..requests {
            let gap = self.varint()?;
            let at_ns = last_ns.checked_add_unsigned(gap).filter(|&ns| ns <= MAX_TIME_NS);
            let Some(at_ns) = at_ns else { return Err(self.wrong("a time out of range")) };
            last_ns = at_ns;
            let request = Request { at_ns, ..self.fields()? };
            let deepest = self.varint()?;
            let new = self.varint()?;
            let old = tree.depth(deepest).ok_or_else(|| self.wrong("an unknown block"))?;
            seen = seen.saturating_add(u64::from(old)).saturating_add(new);
            // An id takes at least one byte: the announced number cannot exceed the remaining
            // bytes.
            if seen > references || new > (self.bytes.len() - self.at) as u64 {
                return Err(self.wrong("more blocks than there are"));
            }
            tree.path(deepest, old, &mut path)?;
            for _ in 0..new {
                let id = last_id.wrapping_add(1).wrapping_add(unzigzag(self.varint()?) as u64);
                tree.add(id, path.is_empty())?;
                path.push(id);
                last_id = id;
            }
            builder.push(request, &path)?;
        }
        if seen != references || tree.rows.len() as u64 != blocks {
            return Err(self.wrong("other totals than the header's"));
        }
        builder.finish()
    }

    fn fields(&mut self) -> Result<Request> {
        let flags = self.byte()?;
        if flags >= THINK * 2 {
            return Err(self.wrong("unknown flags"));
        }
        let mut r = Request { priority: 1, ..Request::default() };
        if flags & SESSION != 0 {
            r.session = Some(self.varint()?);
        }
        if flags & TENANT != 0 {
            r.tenant = self.u32()?;
        }
        if flags & PRIORITY != 0 {
            let priority = u8::try_from(self.varint()?);
            r.priority = priority.map_err(|_| self.wrong("a priority beyond 255"))?;
        }
        if flags & STOP != 0 {
            let stop = Stop::from_code(self.varint()?);
            r.stop = stop.ok_or_else(|| self.wrong("an unknown stop reason"))?;
        }
        if flags & THINK != 0 {
            r.think_ns = unzigzag(self.varint()?);
        }
        r.input_tokens = self.u32()?;
        r.output_tokens = self.u32()?;
        Ok(r)
    }
}

/// The blocks so far: id, parent + 1 (0 = none), depth.
#[derive(Default)]
struct Tree {
    rows: Vec<(u64, u32, u32)>,
    /// The parent of the next new block, + 1.
    at: u32,
}

impl Tree {
    /// Length of the path to a block; 0 = no block, length 0.
    fn depth(&self, block: u64) -> Option<u32> {
        match block.checked_sub(1) {
            None => Some(0),
            Some(row) => self.rows.get(usize::try_from(row).ok()?).map(|r| r.2),
        }
    }

    fn path(&mut self, block: u64, depth: u32, path: &mut Vec<u64>) -> Result<()> {
        path.clear();
        if path.try_reserve(depth as usize).is_err() {
            fail!(NoMem, "no memory for a path of {depth} blocks");
        }
        path.resize(depth as usize, 0);
        self.at = block as u32;
        let mut row = block as u32;
        for place in path.iter_mut().rev() {
            let (id, parent, _) = self.rows[row as usize - 1];
            *place = id;
            row = parent;
        }
        Ok(())
    }

    fn add(&mut self, id: u64, root: bool) -> Result<()> {
        let parent = if root { 0 } else { self.at };
        let depth = self.depth(u64::from(parent)).unwrap_or(0) + 1;
        if self.rows.len() >= MAX_REFERENCES || self.rows.try_reserve(1).is_err() {
            fail!(NoMem, "no memory for another block after {}", self.rows.len());
        }
        self.rows.push((id, parent, depth));
        self.at = self.rows.len() as u32;
        Ok(())
    }
}
