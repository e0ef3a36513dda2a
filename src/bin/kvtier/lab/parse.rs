//! What is written on the command line.

use kvtier::base::spec::{Reader, Spec};
use kvtier::lab::tiers::Tier;
use kvtier::lab::trace::Trace;

use super::Outcome;

/// Reads one value by the rules of specs, so that units are the same everywhere.
fn value<T>(
    text: &str,
    read: impl Fn(&mut Reader) -> kvtier::base::status::Result<T>,
) -> Outcome<T> {
    let wrong = |e: kvtier::base::status::Error| format!("'{text}': {}", e.message());
    let spec = Spec::parse(&format!("x(v={text})")).map_err(wrong)?;
    let mut reader = Reader::new(&spec);
    let value = read(&mut reader).map_err(wrong)?;
    reader.finish().map_err(wrong)?;
    Ok(value)
}

/// A time such as `90s`.
pub fn duration_ns(text: &str) -> Outcome<i64> {
    let ns = value(text, |reader| reader.duration_ns("v", 0))?;
    match i64::try_from(ns) {
        Ok(ns) if ns > 0 => Ok(ns),
        _ => Err(format!("'{text}' is no time to work with").into()),
    }
}

fn bytes(text: &str) -> Outcome<u64> {
    value(text, |reader| reader.bytes("v", 0))
}

/// Specs between commas that are in no brackets.
pub fn specs(text: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let (mut depth, mut quoted) = (0u32, false);
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth = depth.saturating_sub(1),
            ',' if depth == 0 && !quoted => {
                out.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(last) = out.last_mut() {
            last.push(c);
        }
    }
    out.iter().map(|s| s.trim().to_string()).filter(|s| !s.is_empty()).collect()
}

/// Sizes in blocks: numbers, or percent of the different blocks.
pub fn sizes(text: &str, trace: &Trace) -> Outcome<Vec<u64>> {
    let one = |text: &str| -> Outcome<u64> {
        let wrong = || format!("'{text}' is neither a number of blocks nor a percentage");
        let blocks = match text.strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.trim().parse().map_err(|_| wrong())?;
                if !(0.0..=10_000.0).contains(&percent) {
                    return Err(wrong().into());
                }
                ((trace.uniques() as f64 * percent / 100.0).round() as u64).max(1)
            }
            None => text.parse().map_err(|_| wrong())?,
        };
        if blocks == 0 { Err(wrong().into()) } else { Ok(blocks) }
    };
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(one).collect()
}

/// A tier such as `200GiB` or `1TiB@5GB`: its size, and the bytes that it gives in
/// a second.
pub fn tier(name: &str, text: &str, token_bytes: u64, trace: &Trace) -> Outcome<Tier> {
    let (size, speed) = match text.split_once('@') {
        Some((size, speed)) => (size, bytes(speed.trim_end_matches("/s"))?),
        None => (text, 0),
    };
    let block_bytes = token_bytes.saturating_mul(u64::from(trace.block_tokens())).max(1);
    let blocks = bytes(size)? / block_bytes;
    if blocks == 0 {
        return Err(format!("--{name} {text}: a block has {block_bytes} bytes").into());
    }
    Ok(Tier { name: name.to_string(), blocks, bytes_per_second: speed as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_specs_are_split_outside_of_brackets() {
        assert_eq!(
            specs("lru, qos(inner=arc(a=1,b=2),x=3),,fifo"),
            ["lru", "qos(inner=arc(a=1,b=2),x=3)", "fifo"]
        );
        assert_eq!(duration_ns("90s").expect("a time"), 90_000_000_000);
        assert!(duration_ns("soon").is_err() && duration_ns("0s").is_err());
        assert_eq!(bytes("2KiB").expect("a size"), 2048);
    }
}
