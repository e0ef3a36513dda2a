//! Typed access to the parameters of a spec.

use std::ops::RangeInclusive;

use crate::base::spec::describe::{self, Recorded};
use crate::base::spec::{Arg, Dimension, Spec, UNITS, Value, scale, unknown};
use crate::base::status::{Error, Result, Status};

/// Reads the parameters of a spec by key; [`Reader::finish`] fails on unknown ones.
pub struct Reader<'a> {
    spec: &'a Spec,
    known: Vec<&'static str>,
    /// Parameters that the parser has read, if they are recorded.
    recorded: Option<Vec<Recorded>>,
}

impl<'a> Reader<'a> {
    /// A reader of `spec`.
    pub fn new(spec: &'a Spec) -> Reader<'a> {
        Reader { spec, known: Vec::new(), recorded: None }
    }

    /// A reader that records the parameters that a parser reads.
    pub fn recording(spec: &'a Spec) -> Reader<'a> {
        Reader { recorded: Some(Vec::new()), ..Reader::new(spec) }
    }

    /// The recorded parameters, in the order of reading.
    pub fn recorded(self) -> Vec<Recorded> {
        self.recorded.unwrap_or_default()
    }

    /// Records a parameter, unless it is recorded already.
    fn record(&mut self, key: &'static str, recorded: impl FnOnce() -> Recorded) {
        let Some(all) = &mut self.recorded else { return };
        if all.iter().all(|one| one.key != key) {
            all.push(recorded());
        }
    }

    fn find(&mut self, key: &'static str) -> Option<&'a Arg> {
        self.known.push(key);
        self.spec.args.iter().find(|a| a.key == key)
    }

    fn scaled(
        &mut self,
        key: &'static str,
        want: Option<Dimension>,
    ) -> Result<Option<(f64, usize)>> {
        let Some(arg) = self.find(key) else { return Ok(None) };
        let Value::Number(n, unit) = &arg.value else {
            return Err(not_a_number(arg, want));
        };
        match scale(unit) {
            None => Ok(Some((*n, arg.offset))),
            Some((dimension, factor)) if Some(dimension) == want => {
                Ok(Some((*n * factor, arg.offset)))
            }
            Some(_) => Err(mistyped(arg, &numbers(want))),
        }
    }

    /// A real number within `range`; the unit `%` divides by 100.
    pub fn f64(
        &mut self,
        key: &'static str,
        default: f64,
        range: RangeInclusive<f64>,
    ) -> Result<f64> {
        self.record(key, || Recorded::number(key, default, &range));
        let Some((n, offset)) = self.scaled(key, Some(Dimension::Ratio))? else {
            return Ok(default);
        };
        if range.contains(&n) {
            return Ok(n);
        }
        let (low, high) = (range.start(), range.end());
        let text = format!("'{key}' at offset {offset} is {n}, allowed is {low} to {high}");
        Err(Error::at(Status::Spec, offset, text))
    }

    fn whole(
        &mut self,
        key: &'static str,
        dimension: Option<Dimension>,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64> {
        self.record(key, || match dimension {
            Some(Dimension::Bytes) => Recorded::any(key, "bytes", describe::bytes(default)),
            Some(Dimension::Time) => Recorded::any(key, "duration", describe::duration(default)),
            _ => Recorded::whole(key, default, &range),
        });
        let Some((n, offset)) = self.scaled(key, dimension)? else { return Ok(default) };
        // The parser reads numbers as f64, which is exact for whole numbers up to 2^53.
        let exact = (0.0..=9_007_199_254_740_992.0).contains(&n) && n.fract() == 0.0;
        if exact && range.contains(&(n as u64)) {
            return Ok(n as u64);
        }
        let (low, high) = (range.start(), (*range.end()).min(1 << 53));
        let text = format!(
            "'{key}' at offset {offset} is {n}, allowed are whole numbers from {low} to {high}"
        );
        Err(Error::at(Status::Spec, offset, text))
    }

    /// A whole number within `range`.
    pub fn u64(
        &mut self,
        key: &'static str,
        default: u64,
        range: RangeInclusive<u64>,
    ) -> Result<u64> {
        self.whole(key, None, default, range)
    }

    /// A size in bytes, with or without a unit.
    pub fn bytes(&mut self, key: &'static str, default: u64) -> Result<u64> {
        self.whole(key, Some(Dimension::Bytes), default, 0..=u64::MAX)
    }

    /// A duration with a unit, or in nanoseconds without one.
    pub fn duration_ns(&mut self, key: &'static str, default: u64) -> Result<u64> {
        self.whole(key, Some(Dimension::Time), default, 0..=u64::MAX)
    }

    /// `true` or `false`.
    pub fn bool(&mut self, key: &'static str, default: bool) -> Result<bool> {
        self.record(key, || Recorded::word(key, &default.to_string(), &["true", "false"]));
        Ok(match self.choice(key, &["true", "false"])? {
            None => default,
            Some(index) => index == 0,
        })
    }

    /// One of several words, of which the first is the default; returns its index.
    pub fn choice(&mut self, key: &'static str, words: &[&str]) -> Result<Option<usize>> {
        self.record(key, || Recorded::word(key, words.first().unwrap_or(&""), words));
        let Some(arg) = self.find(key) else { return Ok(None) };
        let one_of = || format!("one of {}", words.join(", "));
        let Value::Spec(Spec { name, args, offset }) = &arg.value else {
            return Err(mistyped(arg, &one_of()));
        };
        match words.iter().position(|w| w == name) {
            Some(index) if args.is_empty() => Ok(Some(index)),
            Some(_) => Err(mistyped(arg, &one_of())),
            None => Err(unknown("value", name, *offset, words)),
        }
    }

    /// A nested spec.
    pub fn spec(&mut self, key: &'static str) -> Result<Option<&'a Spec>> {
        self.record(key, || Recorded::any(key, "spec", String::new()));
        match self.find(key) {
            None => Ok(None),
            Some(Arg { value: Value::Spec(spec), .. }) => Ok(Some(spec)),
            Some(arg) => Err(mistyped(arg, "a name")),
        }
    }

    /// A quoted text or a bare word.
    pub fn text(&mut self, key: &'static str) -> Result<Option<&'a str>> {
        self.record(key, || Recorded::any(key, "text", String::new()));
        match self.find(key) {
            None => Ok(None),
            Some(Arg { value: Value::Text(text), .. }) => Ok(Some(text)),
            Some(Arg { value: Value::Spec(s), .. }) if s.args.is_empty() => Ok(Some(&s.name)),
            Some(arg) => Err(mistyped(arg, "a text")),
        }
    }

    /// Fails on the first argument that was not read.
    pub fn finish(self) -> Result<()> {
        match self.spec.args.iter().find(|a| !self.known.contains(&a.key.as_str())) {
            None => Ok(()),
            Some(arg) if arg.key.is_empty() || self.known.is_empty() => {
                let what =
                    if self.known.is_empty() { "no arguments" } else { "key=value arguments" };
                let text = format!("'{}' takes {what}, at offset {}", self.spec.name, arg.offset);
                Err(Error::at(Status::Spec, arg.offset, text))
            }
            Some(arg) => Err(unknown("parameter", &arg.key, arg.offset, &self.known)),
        }
    }
}

fn mistyped(arg: &Arg, want: &str) -> Error {
    let text = format!("'{}' at offset {} takes {want}", arg.key, arg.offset);
    Error::at(Status::Spec, arg.offset, text)
}

fn units(dimension: Option<Dimension>) -> Vec<&'static str> {
    let same = |unit: &&str| dimension.is_some() && scale(unit).map(|s| s.0) == dimension;
    UNITS.into_iter().filter(same).collect()
}

/// The numbers that a parameter accepts, for messages.
fn numbers(dimension: Option<Dimension>) -> String {
    match units(dimension).join(", ") {
        none if none.is_empty() => "a number without a unit".to_string(),
        units => format!("a number, without a unit or in {units}"),
    }
}

/// The error for a value that is not a number; `5sec` is a number with an unknown unit.
fn not_a_number(arg: &Arg, want: Option<Dimension>) -> Error {
    if let (Value::Spec(Spec { name, offset, .. }), Some(_)) = (&arg.value, want) {
        let unit = name.trim_start_matches(|c: char| c.is_ascii_digit());
        let digits = name.len() - unit.len();
        if digits > 0 {
            return unknown("unit", unit, offset + digits, &units(want));
        }
    }
    mistyped(arg, &numbers(want))
}
