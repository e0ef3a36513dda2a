//! Azure's csv: `TIMESTAMP,ContextTokens,GeneratedTokens`. It has arrival times and lengths, but no
//! sharing: every block is new.

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::source::Source;
use crate::trace::reader::ReadOpts;
use crate::trace::requests::{Builder, Request, Trace};

/// Longest prompt.
pub const MAX_TOKENS: u32 = 1 << 24;
/// Blocks that may be created for any file ...
const FREE_BLOCKS: u64 = 1 << 20;
/// ... and further ones for each line: a few digits cannot request all memory.
const LINE_BLOCKS: u64 = 1 << 10;

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source, opts: &ReadOpts) -> Result<Trace> {
    let mut builder = Builder::new(opts.block_tokens)?;
    let (mut line, mut number) = (Vec::new(), 0u64);
    let mut blocks = Blocks { made: 0, path: Vec::new() };
    while source.line(&mut line)? {
        number += 1;
        let text = std::str::from_utf8(&line).unwrap_or("").trim();
        let heading = number == 1 && !text.starts_with(|c: char| c.is_ascii_digit());
        if heading || line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let place = |e: Error| e.within(&format!("line {number}"));
        let request = parse(text).map_err(place)?;
        let count = request.input_tokens.div_ceil(opts.block_tokens);
        blocks.next(count, number).map_err(place)?;
        builder.push(request, &blocks.path).map_err(place)?;
    }
    builder.finish()
}

/// Creates new blocks.
struct Blocks {
    made: u64,
    path: Vec<u64>,
}

impl Blocks {
    /// Creates the blocks of a request in a line.
    fn next(&mut self, count: u32, line: u64) -> Result<()> {
        let end = self.made + u64::from(count);
        let most = FREE_BLOCKS.saturating_add(line.saturating_mul(LINE_BLOCKS));
        if end > most {
            fail!(
                Limit,
                "{end} blocks up to line {line}, allowed are {FREE_BLOCKS} and {LINE_BLOCKS} per line: \
                 use larger blocks"
            );
        }
        self.path.clear();
        if self.path.try_reserve(count as usize).is_err() {
            fail!(NoMem, "no memory for a request of {count} blocks");
        }
        self.path.extend(self.made..end);
        self.made = end;
        Ok(())
    }
}

fn parse(text: &str) -> Result<Request> {
    let mut fields = text.split(',').map(str::trim);
    let (Some(time), Some(input), Some(output)) = (fields.next(), fields.next(), fields.next())
    else {
        fail!(Invalid, "a line has less than three fields");
    };
    let tokens = |field: &str| match field.parse::<u32>() {
        Ok(tokens) => Ok(tokens),
        Err(_) => fail!(Invalid, "'{field:.40}' is not a number of tokens"),
    };
    let input_tokens = tokens(input)?;
    if input_tokens > MAX_TOKENS {
        fail!(Limit, "a prompt of {input_tokens} tokens, the limit is {MAX_TOKENS}");
    }
    Ok(Request {
        at_ns: time_ns(time)?,
        priority: 1,
        input_tokens,
        output_tokens: tokens(output)?,
        ..Request::default()
    })
}

/// `2023-11-16 18:17:03.9799600` in ns since 1970; a time zone behind it is ignored.
fn time_ns(text: &str) -> Result<i64> {
    let wrong = || Error::new(Status::Invalid, format!("'{text:.40}' is not a time"));
    let part = |from: usize, to: usize| -> Result<i64> {
        let digits = text.get(from..to).filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
        digits.and_then(|d| d.parse().ok()).ok_or_else(wrong)
    };
    let (year, month, day) = (part(0, 4)?, part(5, 7)?, part(8, 10)?);
    let (hour, minute, second) = (part(11, 13)?, part(14, 16)?, part(17, 19)?);
    let marks = [4, 7, 13, 16].map(|at| text.as_bytes()[at]);
    let sound = marks == *b"--::"
        && (1970..=2200).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 61;
    if !sound {
        return Err(wrong());
    }
    let mut ns = 0;
    if let Some(fraction) = text[19..].strip_prefix('.') {
        let digits = fraction.bytes().take_while(u8::is_ascii_digit).take(9);
        let (value, count) =
            digits.fold((0i64, 0), |(v, n), b| (v * 10 + i64::from(b - b'0'), n + 1));
        ns = value * 10i64.pow(9 - count);
    }
    let seconds = (days(year, month, day) * 24 + hour) * 3600 + minute * 60 + second;
    Ok(seconds * 1_000_000_000 + ns)
}

/// Days since 1970, by counting years from March so that the leap day is last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let day_of_year = (153 * month + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_are_parsed() {
        assert_eq!(time_ns("1970-01-01 00:00:00"), Ok(0));
        assert_eq!(time_ns("2024-03-01 00:00:01.5"), Ok(1_709_251_201_500_000_000));
        assert_eq!(time_ns("2023-11-16 18:17:03.9799600+00:00"), Ok(1_700_158_623_979_960_000));
        for text in ["", "2023-11-16", "2023-13-16 18:17:03", "2023-11-16 18:17:0x", "été"] {
            assert!(time_ns(text).is_err(), "{text}");
        }
    }
}
