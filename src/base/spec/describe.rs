//! Descriptions of specs, for the manual. A table of [`Param`] names the parameters of a parser. A
//! recording reader collects the types, defaults and limits from the parser itself. So the manual
//! cannot name a parameter that is not read, nor leave one out.

use std::ops::RangeInclusive;

use crate::base::status::Result;
use crate::fail;

/// A parameter of a spec: its key and its meaning.
#[derive(Clone, Copy, Debug)]
pub struct Param {
    /// The key.
    pub key: &'static str,
    /// The meaning, with the unit of the value.
    pub about: &'static str,
    /// The default in words, where it is computed; empty = the value that is read.
    pub default: &'static str,
    /// The limits in words, where they are computed; empty = the limits that the parser checks.
    pub limits: &'static str,
}

impl Param {
    /// A parameter whose default and limits the parser has.
    pub const fn new(key: &'static str, about: &'static str) -> Param {
        Param { key, about, default: "", limits: "" }
    }

    /// The same with a default in words.
    pub const fn default_is(self, default: &'static str) -> Param {
        Param { default, ..self }
    }

    /// The same with limits in words.
    pub const fn limits_are(self, limits: &'static str) -> Param {
        Param { limits, ..self }
    }
}

/// A parameter that a parser has read.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// The key.
    pub key: &'static str,
    /// The type of its value.
    pub kind: &'static str,
    /// The default; empty = none.
    pub default: String,
    /// The limits; empty = those of the type.
    pub limits: String,
    /// The default is not a value that the parser accepts: it stands for "not given".
    pub is_sentinel: bool,
}

impl Recorded {
    /// A value without limits.
    pub(super) fn any(key: &'static str, kind: &'static str, default: String) -> Recorded {
        Recorded { key, kind, default, limits: String::new(), is_sentinel: false }
    }

    /// A whole number.
    pub(super) fn whole(key: &'static str, default: u64, range: &RangeInclusive<u64>) -> Recorded {
        // Numbers are parsed as f64, which is exact up to there.
        let most = whole((*range.end()).min(1 << 53));
        Recorded {
            limits: format!("{} to {most}", whole(*range.start())),
            is_sentinel: !range.contains(&default),
            ..Recorded::any(key, "whole number", whole(default))
        }
    }

    /// A real number.
    pub(super) fn number(key: &'static str, default: f64, range: &RangeInclusive<f64>) -> Recorded {
        let least = match *range.start() {
            f64::MIN_POSITIVE => "above 0".into(),
            least => real(least),
        };
        Recorded {
            limits: format!("{least} to {}", real(*range.end())),
            is_sentinel: !range.contains(&default),
            ..Recorded::any(key, "number", real(default))
        }
    }

    /// One of several words.
    pub(super) fn word(key: &'static str, default: &str, words: &[&str]) -> Recorded {
        let limits = words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
        Recorded { limits, ..Recorded::any(key, "word", default.to_string()) }
    }
}

/// A row of the manual.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The key.
    pub key: &'static str,
    /// The type of the value.
    pub kind: &'static str,
    /// The default; empty = none.
    pub default: String,
    /// The limits; empty = those of the type.
    pub limits: String,
    /// The meaning.
    pub about: &'static str,
}

/// A spec with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The name.
    pub name: &'static str,
    /// Further names.
    pub aliases: &'static [&'static str],
    /// Its meaning in one line.
    pub about: &'static str,
    /// The parameters.
    pub rows: Vec<Row>,
}

impl Description {
    /// Describes a spec by its table of parameters and by a recording of its parser.
    pub fn new(
        name: &'static str,
        about: &'static str,
        params: &[Param],
        recorded: Vec<Recorded>,
    ) -> Result<Description> {
        let rows = rows(name, &[params], &[recorded])?;
        Ok(Description { name, aliases: &[], about, rows })
    }
}

/// The rows of a table of parameters, from recordings of its parser. Fails if the parser reads
/// another set of parameters. Fails also if recordings differ in a default or a limit and the table
/// has no words for it.
pub fn rows(name: &str, params: &[&[Param]], recordings: &[Vec<Recorded>]) -> Result<Vec<Row>> {
    let params = || params.iter().copied().flatten();
    for read in recordings.iter().flatten() {
        if !params().any(|param| param.key == read.key) {
            fail!(State, "'{name}' reads '{}', which its table lacks", read.key);
        }
    }
    let mut out: Vec<Row> = Vec::new();
    for param in params() {
        let mut reads = recordings.iter().flatten().filter(|read| read.key == param.key);
        let Some(first) = reads.next() else {
            fail!(State, "'{name}' does not read '{}' of its table", param.key);
        };
        if out.iter().any(|row| row.key == param.key) {
            fail!(State, "the table of '{name}' has '{}' twice", param.key);
        }
        for read in reads {
            if param.default.is_empty() && read.default != first.default {
                fail!(State, "the default of '{}' of '{name}' varies: say how", param.key);
            }
            if param.limits.is_empty() && read.limits != first.limits {
                fail!(State, "the limits of '{}' of '{name}' vary: say how", param.key);
            }
        }
        if param.default.is_empty() && first.is_sentinel {
            fail!(State, "the default of '{}' of '{name}' needs words", param.key);
        }
        let or = |words: &str, read: &str| if words.is_empty() { read } else { words }.to_string();
        out.push(Row {
            key: param.key,
            kind: first.kind,
            default: or(param.default, &first.default),
            limits: or(param.limits, &first.limits),
            about: param.about,
        });
    }
    Ok(out)
}

/// A whole number as the manual shows it: large powers of two as such.
pub fn whole(n: u64) -> String {
    match n {
        u64::MAX => "2^64 - 1".into(),
        n if n > 1 << 16 && n.is_power_of_two() => format!("2^{}", n.ilog2()),
        n if n > 1 << 16 && (n + 1).is_power_of_two() => format!("2^{} - 1", (n + 1).ilog2()),
        n => n.to_string(),
    }
}

/// A real number in its shortest form.
fn real(n: f64) -> String {
    if n == 0.0 || (1e-6..1e7).contains(&n.abs()) { n.to_string() } else { format!("{n:e}") }
}

/// A number of bytes in the largest binary unit that is exact.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (n.trailing_zeros() / 10).min(4) as usize;
    if n == 0 { "0".into() } else { format!("{}{}", n >> (10 * unit), units[unit]) }
}

/// A number of nanoseconds in the largest unit that is exact.
pub fn duration(ns: u64) -> String {
    let units = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1)];
    match units.into_iter().find(|(_, each)| ns % each == 0) {
        Some((unit, each)) if ns > 0 => format!("{}{unit}", ns / each),
        _ => "0".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::spec::{Reader, Spec};

    fn recording(text: &str) -> Vec<Recorded> {
        let spec = Spec::parse(text).expect("sound");
        let mut reader = Reader::recording(&spec);
        reader.u64("count", 70_000, 1..=1 << 20).expect("a number");
        reader.f64("share", -1.0, 0.0..=1.0).expect("a number");
        reader.bytes("size", 3 << 20).expect("a size");
        reader.duration_ns("age", 1_500_000_000).expect("a time");
        reader.bool("is", true).expect("a word");
        reader.choice("mode", &["one", "two"]).expect("a word");
        reader.text("path").expect("a text");
        reader.recorded()
    }

    const SHARE: Param = Param::new("share", "").default_is("half");

    fn table(share: Param) -> [Param; 7] {
        let all = ["count", "share", "size", "age", "is", "mode", "path"];
        all.map(|key| if key == "share" { share } else { Param::new(key, "") })
    }

    #[test]
    fn rows_have_what_the_parser_asked_for() {
        let rows = rows("x", &[&table(SHARE)], &[recording("x")]).expect("complete");
        let text: Vec<String> = rows
            .iter()
            .map(|row| format!("{} {} [{}] {}", row.key, row.kind, row.default, row.limits))
            .collect();
        assert_eq!(
            text,
            [
                "count whole number [70000] 1 to 2^20",
                "share number [half] 0 to 1",
                "size bytes [3MiB] ",
                "age duration [1500ms] ",
                "is word [true] `true`, `false`",
                "mode word [one] `one`, `two`",
                "path text [] ",
            ]
        );
    }

    #[test]
    fn tables_that_differ_from_the_parser_are_refused() {
        let complete = table(SHARE);
        let error = |params: &[Param]| {
            rows("x", &[params], &[recording("x")]).expect_err("incomplete").message().to_string()
        };
        assert!(error(&complete[1..]).contains("reads 'count'"));
        assert!(error(&table(Param::new("share", ""))).contains("'share' of 'x' needs words"));
        assert!(error(&[&complete[..], &[SHARE]].concat()).contains("twice"));
        let more = [&complete[..], &[Param::new("more", "")]].concat();
        assert!(error(&more).contains("does not read 'more'"));
        let mut other = recording("x");
        other[0].limits = "1 to 9".into();
        let error = rows("x", &[&complete], &[recording("x"), other]).expect_err("varies");
        assert!(error.message().contains("vary"), "{error}");
    }
}
