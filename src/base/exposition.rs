//! Metrics in the text format of Prometheus, version 0.0.4: a HELP and a TYPE line for each
//! family, then a line for each sample.

use std::fmt::Write;

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Grows and shrinks.
    Gauge,
    /// Counts in buckets.
    Histogram,
}

/// A value of a statistic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A count, a number of bytes, or a time in nanoseconds.
    Whole(u64),
    /// A ratio or an error.
    Real(f64),
}

impl From<u64> for Value {
    fn from(whole: u64) -> Value {
        Value::Whole(whole)
    }
}

impl From<u32> for Value {
    fn from(whole: u32) -> Value {
        Value::Whole(whole.into())
    }
}

impl From<f64> for Value {
    fn from(real: f64) -> Value {
        Value::Real(real)
    }
}

/// A statistic of `T`, which [`kvtier_macros::Rows`] makes of a field.
pub struct Row<T> {
    /// Name of the field; also that of the metric and of the JSON key.
    pub name: &'static str,
    /// Documentation of the field.
    pub help: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// Its value.
    pub get: fn(&T) -> Value,
}

/// A text under construction.
#[derive(Default)]
pub struct Exposition {
    text: String,
    family: String,
}

/// Labels of a sample: fixed names, arbitrary values.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

impl Exposition {
    /// The text so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The finished text.
    pub fn into_text(self) -> String {
        self.text
    }

    /// Begins a family; its samples follow.
    pub fn family(&mut self, name: &str, kind: Kind, help: &str) {
        debug_assert!(is_name(name), "{name} is not a valid metric name");
        self.family.clear();
        self.family.push_str(name);
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes a family for each row: `PREFIX_NAME`, for counters with `_total`.
    pub fn rows<T>(&mut self, prefix: &str, rows: &[Row<T>], all: &T) {
        for row in rows {
            let suffix = if row.kind == Kind::Counter { "_total" } else { "" };
            self.family(&format!("{prefix}_{}{suffix}", row.name), row.kind, row.help);
            let value = match (row.get)(all) {
                Value::Whole(whole) => whole as f64,
                Value::Real(real) => real,
            };
            self.sample(&[], value);
        }
    }

    /// Writes a sample of the family.
    pub fn sample(&mut self, labels: Labels, value: f64) {
        self.line("", labels, None, value);
    }

    /// Writes a histogram of the family: cumulative counts by ascending bound, the count of all
    /// values, and their sum.
    pub fn histogram(&mut self, labels: Labels, buckets: &[(f64, u64)], count: u64, sum: f64) {
        for &(bound, at_most) in buckets {
            self.line("_bucket", labels, Some(bound), at_most as f64);
        }
        self.line("_bucket", labels, Some(f64::INFINITY), count as f64);
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, count as f64);
    }

    fn line(&mut self, suffix: &str, labels: Labels, bound: Option<f64>, value: f64) {
        let text = &mut self.text;
        text.push_str(&self.family);
        text.push_str(suffix);
        let mut before = '{';
        for (name, value) in labels {
            debug_assert!(is_name(name), "{name} is not a valid label name");
            text.push(before);
            before = ',';
            let _ = write!(text, "{name}=\"");
            for c in value.chars() {
                match c {
                    '\\' => text.push_str("\\\\"),
                    '"' => text.push_str("\\\""),
                    '\n' => text.push_str("\\n"),
                    c => text.push(c),
                }
            }
            text.push('"');
        }
        if let Some(bound) = bound {
            text.push(before);
            before = ',';
            let _ = write!(text, "le=\"{}\"", Number(bound));
        }
        if before == ',' {
            text.push('}');
        }
        let _ = writeln!(text, " {}", Number(value));
    }
}

/// A number in the notation of the format.
struct Number(f64);

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            x if x == f64::INFINITY => f.write_str("+Inf"),
            x if x == f64::NEG_INFINITY => f.write_str("-Inf"),
            x if x.is_nan() => f.write_str("NaN"),
            x => write!(f, "{x}"),
        }
    }
}

fn is_name(name: &str) -> bool {
    let fine = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
    !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && name.bytes().all(fine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_follows_the_format() {
        let mut out = Exposition::default();
        out.family("kvtier_hits_total", Kind::Counter, "Found,\nby tier.");
        out.sample(&[("tier", "host")], 12.0);
        out.sample(&[("tier", "disk"), ("tenant", "a\"b\\c\nd")], 1e18);
        out.family("kvtier_free_bytes", Kind::Gauge, "Free.");
        out.sample(&[], 0.5);
        out.sample(&[], f64::NAN);
        out.family("kvtier_load_seconds", Kind::Histogram, "Time.");
        out.histogram(&[("tier", "disk")], &[(0.001, 3), (0.1, 5)], 6, 0.75);
        let want = "# HELP kvtier_hits_total Found,\\nby tier.\n\
            # TYPE kvtier_hits_total counter\n\
            kvtier_hits_total{tier=\"host\"} 12\n\
            kvtier_hits_total{tier=\"disk\",tenant=\"a\\\"b\\\\c\\nd\"} 1000000000000000000\n\
            # HELP kvtier_free_bytes Free.\n\
            # TYPE kvtier_free_bytes gauge\n\
            kvtier_free_bytes 0.5\n\
            kvtier_free_bytes NaN\n\
            # HELP kvtier_load_seconds Time.\n\
            # TYPE kvtier_load_seconds histogram\n\
            kvtier_load_seconds_bucket{tier=\"disk\",le=\"0.001\"} 3\n\
            kvtier_load_seconds_bucket{tier=\"disk\",le=\"0.1\"} 5\n\
            kvtier_load_seconds_bucket{tier=\"disk\",le=\"+Inf\"} 6\n\
            kvtier_load_seconds_sum{tier=\"disk\"} 0.75\n\
            kvtier_load_seconds_count{tier=\"disk\"} 6\n";
        assert_eq!(out.text(), want);
        assert_eq!(out.into_text().len(), want.len());
    }
}
