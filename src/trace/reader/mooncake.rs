//! The Mooncake traces: one request a line, with `timestamp` in ms, `input_length`,
//! `output_length`, and `hash_ids` of 512-token prefixes. They name no sessions.

use crate::base::json::Json;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::source::Source;
use crate::trace::requests::{Builder, MAX_REQUEST_BLOCKS, MAX_TIME_NS, Request, Trace};

/// Tokens of a block.
pub const BLOCK_TOKENS: u32 = 512;

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source) -> Result<Trace> {
    let mut builder = Builder::new(BLOCK_TOKENS)?;
    let (mut line, mut path, mut number) = (Vec::new(), Vec::new(), 0u64);
    while source.line(&mut line)? {
        number += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let place = |e: Error| e.within(&format!("line {number}"));
        let request = parse(&line, &mut path).map_err(place)?;
        builder.push(request, &path).map_err(place)?;
    }
    builder.finish()
}

fn parse(line: &[u8], path: &mut Vec<u64>) -> Result<Request> {
    let mut request = Request { priority: 1, ..Request::default() };
    let (mut has_time, mut has_path) = (false, false);
    path.clear();
    let mut json = Json::new(line);
    json.object(|json, key| {
        match key {
            "timestamp" => {
                request.at_ns = time_ns(json.f64()? * 1e6)?;
                has_time = true;
            }
            "input_length" => request.input_tokens = json.u32()?,
            "output_length" => request.output_tokens = json.u32()?,
            "hash_ids" => {
                path.clear();
                json.array(|json| push_id(path, json.u64()?))?;
                has_path = true;
            }
            _ => json.skip()?,
        }
        Ok(())
    })?;
    json.end()?;
    if !has_time || !has_path {
        fail!(Invalid, "a request needs timestamp and hash_ids");
    }
    Ok(request)
}

/// Checks a time in ns read from a file.
pub(super) fn time_ns(ns: f64) -> Result<i64> {
    if !(0.0..=MAX_TIME_NS as f64 / 2.0).contains(&ns) {
        fail!(Limit, "a time of {ns} ns, allowed is up to 146 years from 0");
    }
    Ok(ns.round() as i64)
}

/// Adds an id to a path, within limits.
pub(super) fn push_id(path: &mut Vec<u64>, id: u64) -> Result<()> {
    if path.len() == MAX_REQUEST_BLOCKS {
        fail!(Limit, "a request of more than {MAX_REQUEST_BLOCKS} blocks");
    }
    if path.try_reserve(1).is_err() {
        return Err(Error::from(Status::NoMem));
    }
    path.push(id);
    Ok(())
}
