//! libCacheSim's oracleGeneral: 24 bytes a request, little-endian: time in seconds (u32), object
//! (u64), size (u32), next access (i64). Objects are blocks of one token without prefixes; sizes
//! are ignored.

use crate::base::status::Result;
use crate::fail;
use crate::io::source::Source;
use crate::trace::requests::{Builder, Request, Trace};

const RECORD_BYTES: usize = 24;
/// Records examined to recognise such a file.
const SAMPLE: usize = 256;
/// Next accesses at or above this are not positions in a trace.
const MAX_PLACE: i64 = 1 << 40;

/// One record of the file.
struct Record {
    seconds: u32,
    id: u64,
    size: u32,
    /// Number of the record that requests the object next; negative or the largest number if there
    /// is none.
    next: i64,
}

impl Record {
    fn of(bytes: &[u8; RECORD_BYTES]) -> Record {
        let [t0, t1, t2, t3, rest @ ..] = *bytes;
        let [i0, i1, i2, i3, i4, i5, i6, i7, rest @ ..] = rest;
        let [s0, s1, s2, s3, next @ ..] = rest;
        Record {
            seconds: u32::from_le_bytes([t0, t1, t2, t3]),
            id: u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
            size: u32::from_le_bytes([s0, s1, s2, s3]),
            next: i64::from_le_bytes(next),
        }
    }
}

/// Whether the first bytes of a file can be such records: times that do not decrease, sizes, and
/// next accesses that are later and request the same object.
pub fn is_plausible(start: &[u8]) -> bool {
    let records: Vec<Record> = start
        .chunks(RECORD_BYTES)
        .filter_map(|b| b.try_into().ok())
        .map(Record::of)
        .take(SAMPLE)
        .collect();
    let leads_on = |number: usize, record: &Record| {
        let later =
            |at: usize| at > number && records.get(at).is_none_or(|later| later.id == record.id);
        match record.next {
            // Never, or unknown.
            -2 | -1 | i64::MAX => true,
            // Records are numbered from 0, or from 1 by other converters.
            next @ 1..MAX_PLACE => later(next as usize) || later(next as usize - 1),
            _ => false,
        }
    };
    let sound = |(number, record): (usize, &Record)| record.size > 0 && leads_on(number, record);
    let in_order = records.windows(2).all(|two| two[0].seconds <= two[1].seconds);
    !records.is_empty() && in_order && records.iter().enumerate().all(sound)
}

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source) -> Result<Trace> {
    let mut builder = Builder::new(1)?;
    let mut bytes = [0u8; RECORD_BYTES];
    let mut number = 0u64;
    loop {
        match source.fill(&mut bytes)? {
            0 => return builder.finish(),
            RECORD_BYTES => {}
            part => fail!(Invalid, "record {number} has {part} bytes instead of {RECORD_BYTES}"),
        }
        let record = Record::of(&bytes);
        // The next access is later, or never.
        if record.next >= 0 && (record.next as u64) < number {
            let next = record.next;
            fail!(
                Invalid,
                "the next access of record {number} is {next}, which is not later: not an oracleGeneral file"
            );
        }
        let at_ns = i64::from(record.seconds) * 1_000_000_000;
        let request = Request { at_ns, priority: 1, input_tokens: 1, ..Request::default() };
        builder.push(request, &[record.id])?;
        number += 1;
    }
}
