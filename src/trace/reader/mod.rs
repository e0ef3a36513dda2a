//! Readers of foreign trace files. All input is untrusted: every size is limited, and errors name
//! the position.

pub mod azure;
pub mod csv;
pub mod detect;
pub mod mooncake;
pub mod oracle;
pub mod sharegpt;
pub mod weka;

use std::path::Path;

use crate::base::spec::unknown;
use crate::base::status::Result;
use crate::io::source::Source;
use crate::trace::format;
pub use crate::trace::reader::detect::detect;
use crate::trace::requests::Trace;

/// Supported formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// kvtier's own format.
    Kvtier,
    /// Mooncake jsonl.
    Mooncake,
    /// Sessions of coding agents, jsonl.
    Weka,
    /// Conversations as text.
    ShareGpt,
    /// Azure csv: arrivals and lengths.
    Azure,
    /// libCacheSim, 24 bytes a request.
    Oracle,
    /// libCacheSim csv.
    Csv,
}

/// Every format with its name.
pub const KINDS: [(&str, Kind); 7] = [
    ("kvtier", Kind::Kvtier),
    ("mooncake", Kind::Mooncake),
    ("weka", Kind::Weka),
    ("sharegpt", Kind::ShareGpt),
    ("azure", Kind::Azure),
    ("oracle", Kind::Oracle),
    ("csv", Kind::Csv),
];

/// Options for what a file leaves open.
#[derive(Clone, Copy, Debug)]
pub struct ReadOpts {
    /// Format; None = detected from the content.
    pub kind: Option<Kind>,
    /// Tokens of a block, for formats without block ids.
    pub block_tokens: u32,
    /// Seed of random start times, for formats without them.
    pub seed: u64,
    /// Mean time between random starts; 0 = the default of the format.
    pub gap_ns: i64,
    /// Later requests are dropped, for formats with random starts.
    pub duration_ns: i64,
}

impl Default for ReadOpts {
    fn default() -> ReadOpts {
        ReadOpts {
            kind: None,
            block_tokens: 512,
            seed: 7,
            gap_ns: 0,
            duration_ns: 24 * 3600 * 1_000_000_000,
        }
    }
}

/// The format with a name.
pub fn kind_of(name: &str) -> Result<Kind> {
    match KINDS.iter().find(|(known, _)| *known == name) {
        Some((_, kind)) => Ok(*kind),
        None => Err(unknown("trace format", name, 0, &KINDS.map(|(name, _)| name))),
    }
}

/// Opens and reads a file; directories, devices and pipes are rejected.
pub fn open(path: &Path, opts: &ReadOpts) -> Result<Trace> {
    let mut source = Source::open(path)?;
    read(&mut source, opts).map_err(|e| e.within(&path.display().to_string()))
}

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source, opts: &ReadOpts) -> Result<Trace> {
    let start = source.start()?;
    let kind = match opts.kind {
        Some(kind) => kind,
        None => detect(start)?,
    };
    // Binary records may begin with any bytes.
    if kind != Kind::Oracle {
        detect::refuse_packed(start)?;
        if start.starts_with(detect::BYTE_ORDER_MARK) {
            source.fill(&mut [0; detect::BYTE_ORDER_MARK.len()])?;
        }
    }
    match kind {
        Kind::Kvtier => format::read(source),
        Kind::Mooncake => mooncake::read(source),
        Kind::Weka => weka::read(source, opts),
        Kind::ShareGpt => sharegpt::read(source, opts),
        Kind::Azure => azure::read(source, opts),
        Kind::Oracle => oracle::read(source),
        Kind::Csv => csv::read(source),
    }
}
