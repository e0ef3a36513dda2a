//! Parsers of bytes, rates and times on the command line.

/// Largest accepted number, so that sums do not overflow.
const MOST: f64 = (1u64 << 60) as f64;

/// Splits a text into a number and its unit.
fn split(text: &str) -> Result<(f64, &str), String> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    match number.parse::<f64>() {
        Ok(number) => Ok((number, unit.trim())),
        Err(_) => Err(format!("'{text}' does not begin with a number")),
    }
}

fn power(unit: &str, plain: f64) -> Option<f64> {
    let (letter, base) = match unit.strip_suffix("iB") {
        Some(letter) => (letter, 1024.0),
        None => match unit.strip_suffix('B') {
            Some(letter) => (letter, 1000.0),
            None => (unit, plain),
        },
    };
    let power = match letter {
        "" => 0,
        "K" | "k" => 1,
        "M" => 2,
        "G" => 3,
        "T" => 4,
        _ => return None,
    };
    Some(f64::powi(base, power))
}

fn read(text: &str, unit: &str, number: f64, plain: f64) -> Result<u64, String> {
    let known = "units are B, K, M, G, T, with iB for powers of 1024 and with B for powers of 1000";
    let factor =
        power(unit, plain).ok_or_else(|| format!("unknown unit '{unit}' in '{text}': {known}"))?;
    let value = number * factor;
    if value > MOST {
        return Err(format!("'{text}' is above 2^60"));
    }
    Ok(value as u64)
}

/// Bytes: `8G` equals `8GiB`; `8GB` is less.
pub fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    read(text, unit, number, 1024.0)
}

/// Bytes a second, in decimal units as usual for links: `3.3G`, `3.3GB` and `3.3GB/s` are equal.
pub fn rate(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let rate = read(text, unit.strip_suffix("/s").unwrap_or(unit), number, 1000.0)?;
    if rate == 0 { Err(format!("the rate '{text}' is below 1 byte a second")) } else { Ok(rate) }
}

/// A time up to an hour, in nanoseconds.
pub fn time(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let factor = match unit {
        "ns" => 1.0,
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return Err(format!("'{text}' is not a time, such as 5ms, 700us or 1s")),
    };
    match number * factor {
        ns if ns <= 3.6e12 => Ok(ns as u64),
        _ => Err(format!("'{text}' is more than an hour")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_rates_and_times_are_parsed() {
        for (text, expected) in [
            ("8G", 8 << 30),
            ("8GiB", 8 << 30),
            ("1.5M", 3 << 19),
            ("8GB", 8_000_000_000),
            ("7", 7),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        assert_eq!(rate("3.3G"), Ok(3_300_000_000));
        assert_eq!(rate("13GB/s"), Ok(13_000_000_000));
        assert_eq!(rate("1GiB/s"), Ok(1 << 30));
        assert_eq!(time("5ms"), Ok(5_000_000));
        for wrong in ["", "G", "-1G", "8X", "1e3", "8 G B", "9999999T"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        assert!(rate("0").is_err() && time("5").is_err() && time("2000000s").is_err());
    }
}
