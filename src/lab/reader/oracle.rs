//! libCacheSim's oracleGeneral: 24 bytes a request, little-endian: time in
//! seconds (u32), object (u64), size (u32), next access (i64). Objects are
//! blocks of one token without prefixes; their sizes are not used.

use crate::base::status::Result;
use crate::fail;
use crate::io::source::Source;
use crate::lab::trace::{Builder, Request, Trace};

const RECORD_BYTES: usize = 24;

/// Reads a trace to its end.
pub fn read(source: &mut Source) -> Result<Trace> {
    let mut builder = Builder::new(1)?;
    let mut record = [0u8; RECORD_BYTES];
    let mut number = 0u64;
    loop {
        match source.fill(&mut record)? {
            0 => return builder.finish(),
            RECORD_BYTES => {}
            part => fail!(Invalid, "record {number} has {part} bytes instead of {RECORD_BYTES}"),
        }
        let [t0, t1, t2, t3, rest @ ..] = record;
        let [i0, i1, i2, i3, i4, i5, i6, i7, rest @ ..] = rest;
        let next = i64::from_le_bytes([
            rest[4], rest[5], rest[6], rest[7], rest[8], rest[9], rest[10], rest[11],
        ]);
        // The next access comes later, or never.
        if next >= 0 && (next as u64) < number {
            fail!(Invalid, "record {number} is used next at {next}: no oracleGeneral file");
        }
        let at_ns = i64::from(u32::from_le_bytes([t0, t1, t2, t3])) * 1_000_000_000;
        let id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        let request = Request { at_ns, priority: 1, input_tokens: 1, ..Request::default() };
        builder.push(request, &[id])?;
        number += 1;
    }
}
