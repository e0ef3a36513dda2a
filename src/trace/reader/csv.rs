//! libCacheSim's csv: one request a line. A header names the columns of the time (seconds) and the
//! object; without one they are the first and the second. Objects are blocks of one token without
//! prefixes.

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result};
use crate::fail;
use crate::io::source::Source;
use crate::trace::reader::mooncake::time_ns;
use crate::trace::requests::{Builder, Request, Trace};

/// Most columns.
const MAX_COLUMNS: usize = 64;

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source) -> Result<Trace> {
    let mut builder = Builder::new(1)?;
    let (mut line, mut number) = (Vec::new(), 0u64);
    let mut columns = (0, 1);
    while source.line(&mut line)? {
        number += 1;
        let place = |e: Error| e.within(&format!("line {number}"));
        let Ok(text) = std::str::from_utf8(&line) else {
            return Err(place(Error::new(crate::base::status::Status::Invalid, "not text")));
        };
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        if number == 1
            && let Some(found) = header(text)
        {
            columns = found;
            continue;
        }
        let (request, id) = parse(text, columns).map_err(place)?;
        builder.push(request, &[id]).map_err(place)?;
    }
    builder.finish()
}

/// The columns of time and object, if the line is a header.
fn header(text: &str) -> Option<(usize, usize)> {
    let names: Vec<String> = text
        .trim_start_matches('#')
        .split(',')
        .take(MAX_COLUMNS)
        .map(|name| name.trim().trim_matches('"').to_ascii_lowercase())
        .collect();
    if names.iter().any(|name| name.parse::<f64>().is_ok()) {
        return None;
    }
    let find = |words: &[&str]| words.iter().find_map(|w| names.iter().position(|n| n == w));
    let id = find(&["obj_id", "object_id", "obj-id", "object", "obj", "id", "key", "lbn", "lba"]);
    let time = find(&["time", "timestamp", "ts", "clock_time"]);
    Some((time.unwrap_or(0), id.unwrap_or(1)))
}

fn parse(text: &str, (time, id): (usize, usize)) -> Result<(Request, u64)> {
    let field = |at: usize| text.split(',').nth(at).map(|f| f.trim().trim_matches('"'));
    let (Some(time), Some(id)) = (field(time), field(id)) else {
        fail!(Invalid, "a line has less fields than the header has columns");
    };
    let Ok(seconds) = time.parse::<f64>() else {
        fail!(Invalid, "'{time:.40}' is not a time");
    };
    let at_ns = time_ns(seconds * 1e9)?;
    // Names that are not numbers are hashed.
    let id = id.parse().unwrap_or_else(|_| checksum(id.as_bytes()));
    Ok((Request { at_ns, priority: 1, input_tokens: 1, ..Request::default() }, id))
}
