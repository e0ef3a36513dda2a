//! Parsers of command line values.

use kvtier::base::spec::{Reader, Spec};
use kvtier::trace::generate::MAX_DURATION_NS;
use kvtier::trace::requests::Trace;
use kvtier_lab::tiers::Tier;

use super::Outcome;

/// Reads one value by the rules of specs, with their units.
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
    // Parsed as a number of any size, so that the error names the limit in days.
    let wrong = || format!("'{text}' is not a duration, such as 90s, 10m, 2h or 1d");
    let spec = Spec::parse(&format!("x(v={text})")).map_err(|_| wrong())?;
    let ns = match spec.args.as_slice() {
        [only] => only.value.nanoseconds().ok_or_else(wrong)?,
        _ => return Err(wrong().into()),
    };
    match ns {
        ns if ns < 1.0 => Err(format!("'{text}' is below 1 ns").into()),
        ns if ns > MAX_DURATION_NS as f64 => {
            let days = MAX_DURATION_NS / 86_400_000_000_000;
            Err(format!("'{text}' is too long, the limit is {days} days").into())
        }
        ns => Ok(ns as i64),
    }
}

/// A size such as `200GiB`.
pub fn bytes(text: &str) -> Outcome<u64> {
    value(text, |reader| reader.bytes("v", 0))
}

/// Specs separated by commas outside of brackets and quotes.
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

/// Sizes in blocks: numbers, or percent of the distinct blocks.
pub fn sizes(text: &str, trace: &Trace) -> Outcome<Vec<u64>> {
    let one = |text: &str| -> Outcome<u64> {
        let wrong = || format!("'{text}' is neither a number of blocks nor a percentage");
        let blocks = match text.strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.trim().parse().map_err(|_| wrong())?;
                if !(percent > 0.0 && percent <= 10_000.0) {
                    return Err(format!("'{text}' is not above 0 and up to 10000%").into());
                }
                ((trace.uniques() as f64 * percent / 100.0).round() as u64).max(1)
            }
            None => text.parse().map_err(|_| wrong())?,
        };
        if blocks == 0 { Err(wrong().into()) } else { Ok(blocks) }
    };
    text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(one).collect()
}

/// A tier such as `200GiB` or `1TiB@5GB`: its size and its bandwidth in bytes a second.
pub fn tier(name: &str, text: &str, token_bytes: u64, trace: &Trace) -> Outcome<Tier> {
    let (size, speed) = match text.split_once('@') {
        Some((size, speed)) => (size, bytes(speed.trim_end_matches("/s"))?),
        None => (text, 0),
    };
    let block_bytes = token_bytes.saturating_mul(u64::from(trace.block_tokens())).max(1);
    let blocks = bytes(size)? / block_bytes;
    if blocks == 0 {
        return Err(format!("--{name} {text} is too small: a block has {block_bytes} bytes").into());
    }
    Ok(Tier { name: name.to_string(), blocks, bytes_per_second: speed as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier::trace::requests::{Builder, Request};

    #[test]
    fn sizes_are_blocks_or_percentages() {
        let mut builder = Builder::new(1).expect("tokens");
        let ids: Vec<u64> = (0..200).collect();
        builder.push(Request::default(), &ids).expect("room");
        let trace = builder.finish().expect("a trace");
        assert_eq!(sizes("7, 10%,0.001%", &trace).expect("sizes"), [7, 20, 1]);
        for wrong in ["0", "0%", "-1%", "nan%", "inf%", "10001%", "x", "%", "-3", "1.5"] {
            let error = sizes(wrong, &trace).expect_err(wrong).to_string();
            assert!(error.contains(&format!("'{wrong}'")), "{error}");
        }
    }

    #[test]
    fn lists_of_specs_split_at_commas_outside_of_brackets() {
        assert_eq!(
            specs("lru, qos(inner=arc(a=1,b=2),x=3),,fifo"),
            ["lru", "qos(inner=arc(a=1,b=2),x=3)", "fifo"]
        );
        assert_eq!(duration_ns("90s").expect("a time"), 90_000_000_000);
        for wrong in ["soon", "0s", "-1s", "", "5KiB", "1s,x=2", "1e-3ns", "1s)", "91d", "1e300d"] {
            assert!(duration_ns(wrong).is_err(), "{wrong}");
        }
        let error = duration_ns("100000d").expect_err("too long").to_string();
        assert!(error.contains("90 days"), "{error}");
        assert_eq!(duration_ns("90d").expect("the limit"), MAX_DURATION_NS);
        assert_eq!(bytes("2KiB").expect("a size"), 2048);
    }
}
