//! A page of metrics of several stores: each family once, with a label for the store.

use std::collections::BTreeMap;
use std::fmt::Write;

/// Format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus text 0.0.4.
    Prometheus,
    /// OpenMetrics text 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The media type.
    pub fn media_type(self) -> &'static str {
        match self {
            Format::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

#[derive(Default)]
struct Family {
    kind: String,
    help: String,
    samples: String,
}

/// A page.
#[derive(Default)]
pub struct Page {
    families: Vec<(String, Family)>,
    places: BTreeMap<String, usize>,
}

impl Page {
    /// Adds a sample of the gauge `name`.
    pub fn gauge(&mut self, name: &str, help: &str, store: &str, value: f64) {
        let family = self.family(name);
        (family.kind, family.help) = ("gauge".into(), help.into());
        let _ = writeln!(family.samples, "{name}{{{}}} {value}", label(store));
    }

    /// Adds the metrics of a store: all, or none if the text is malformed.
    pub fn add(&mut self, store: &str, text: &str) -> Result<(), String> {
        let lines: Result<Vec<Line>, String> = text.lines().filter_map(line).collect();
        let label = label(store);
        let mut family = "";
        for line in lines? {
            match line {
                Line::Help(name, help) => self.family(name).help = help.into(),
                Line::Type(name, kind) => {
                    self.family(name).kind = kind.into();
                    family = name;
                }
                Line::Sample(name, rest) => {
                    let own = if is_sample_of(name, family) { family } else { name };
                    let samples = &mut self.family(own).samples;
                    let _ = match rest.strip_prefix('{') {
                        Some(rest) => writeln!(samples, "{name}{{{label},{rest}"),
                        None => writeln!(samples, "{name}{{{label}}}{rest}"),
                    };
                }
            }
        }
        Ok(())
    }

    fn family(&mut self, name: &str) -> &mut Family {
        let families = &mut self.families;
        let at = *self.places.entry(name.into()).or_insert_with(|| {
            families.push((name.into(), Family::default()));
            families.len() - 1
        });
        &mut self.families[at].1
    }

    /// The text.
    pub fn render(&self, format: Format) -> String {
        let mut out = String::new();
        for (name, Family { kind, help, samples }) in &self.families {
            let kind = if kind.is_empty() { "untyped" } else { kind };
            let (name, kind, help) = match format {
                Format::Prometheus => (name.as_str(), kind, help.clone()),
                Format::OpenMetrics => {
                    // A counter is named without the suffix of its samples.
                    let bare = name.strip_suffix("_total").filter(|_| kind == "counter");
                    let kind = if kind == "untyped" { "unknown" } else { kind };
                    (bare.unwrap_or(name), kind, help.replace('"', "\\\""))
                }
            };
            let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}");
        }
        if format == Format::OpenMetrics {
            out.push_str("# EOF\n");
        }
        out
    }
}

/// A line of a store's metrics.
enum Line<'a> {
    Help(&'a str, &'a str),
    Type(&'a str, &'a str),
    /// Name, and the rest from `{` or the space on.
    Sample(&'a str, &'a str),
}

/// Parses a line; `None` = it says nothing.
fn line(text: &str) -> Option<Result<Line<'_>, String>> {
    let malformed = || Err(format!("its metrics have a malformed line: {:.80}", text));
    if let Some(comment) = text.strip_prefix('#') {
        let mut words = comment.trim_start().splitn(3, ' ');
        let (Some(word), Some(name)) = (words.next(), words.next()) else { return None };
        let rest = words.next().unwrap_or("");
        return match word {
            "HELP" | "TYPE" if !is_name(name) => Some(malformed()),
            "HELP" => Some(Ok(Line::Help(name, rest))),
            "TYPE" if !KINDS.contains(&rest) => Some(malformed()),
            "TYPE" => Some(Ok(Line::Type(name, rest))),
            _ => None,
        };
    }
    if text.is_empty() {
        return None;
    }
    Some(sample(text).map_or_else(malformed, Ok))
}

/// Types of families.
const KINDS: [&str; 5] = ["counter", "gauge", "histogram", "summary", "untyped"];

/// Whether a sample belongs to a family.
fn is_sample_of(name: &str, family: &str) -> bool {
    let is_suffix = |rest| ["", "_bucket", "_sum", "_count"].contains(&rest);
    !family.is_empty() && name.strip_prefix(family).is_some_and(is_suffix)
}

/// Parses `NAME[{LABELS}] VALUE [TIME]`.
fn sample(text: &str) -> Option<Line<'_>> {
    let end = text.find(['{', ' ']).filter(|&end| is_name(&text[..end]))?;
    let (name, rest) = text.split_at(end);
    let value = match rest.strip_prefix('{') {
        Some(labels) => after_labels(labels)?,
        None => rest,
    };
    let mut words = value.strip_prefix(' ')?.split(' ');
    words.next()?.parse::<f64>().ok()?;
    if let Some(time) = words.next() {
        time.parse::<i64>().ok()?;
    }
    words.next().is_none().then_some(Line::Sample(name, rest))
}

/// The text after `NAME="VALUE",...}`. No label occurs twice, and none is named `store`, since that
/// label is added.
fn after_labels(mut text: &str) -> Option<&str> {
    let mut names = vec!["store"];
    loop {
        if let Some(rest) = text.strip_prefix('}') {
            return Some(rest);
        }
        let (name, value) = text.split_once("=\"")?;
        if !is_name(name) || name.contains(':') || names.contains(&name) {
            return None;
        }
        names.push(name);
        let mut is_escaped = false;
        let end = value.find(|c| {
            let is_end = c == '"' && !is_escaped;
            is_escaped = c == '\\' && !is_escaped;
            is_end
        })?;
        let rest = &value[end + 1..];
        text = match rest.strip_prefix(',') {
            Some(next) => next,
            None if rest.starts_with('}') => rest,
            None => return None,
        };
    }
}

fn is_name(text: &str) -> bool {
    let is_first = |c: char| c.is_ascii_alphabetic() || c == '_' || c == ':';
    text.starts_with(is_first) && text.chars().all(|c| is_first(c) || c.is_ascii_digit())
}

fn label(store: &str) -> String {
    let value = store.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("store=\"{value}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP kv_gets_total Gets \"begun\".\n# TYPE kv_gets_total counter\nkv_gets_total 3\n\
        # HELP kv_s Time.\n# TYPE kv_s histogram\nkv_s_bucket{tier=\"host\",le=\"+Inf\"} 1\nkv_s_sum 2\n";

    #[test]
    fn a_family_has_the_samples_of_all_stores() {
        let mut page = Page::default();
        page.add("a", TEXT).expect("valid");
        page.add("b\"\\", TEXT).expect("valid");
        assert_eq!(
            page.render(Format::Prometheus),
            "# HELP kv_gets_total Gets \"begun\".\n# TYPE kv_gets_total counter\n\
             kv_gets_total{store=\"a\"} 3\nkv_gets_total{store=\"b\\\"\\\\\"} 3\n\
             # HELP kv_s Time.\n# TYPE kv_s histogram\n\
             kv_s_bucket{store=\"a\",tier=\"host\",le=\"+Inf\"} 1\nkv_s_sum{store=\"a\"} 2\n\
             kv_s_bucket{store=\"b\\\"\\\\\",tier=\"host\",le=\"+Inf\"} 1\nkv_s_sum{store=\"b\\\"\\\\\"} 2\n"
        );
        let open = page.render(Format::OpenMetrics);
        assert!(open.starts_with(
            "# HELP kv_gets Gets \\\"begun\\\".\n# TYPE kv_gets counter\nkv_gets_total{"
        ));
        assert!(open.ends_with("\n# EOF\n"));
    }

    #[test]
    fn samples_outside_a_family_are_families_of_their_own() {
        let mut page = Page::default();
        let text = "a 1\n# TYPE b counter\nb{c=\"}\\\"\\\\\",} +Inf 7\nb_more NaN\n";
        page.add("s", text).expect("valid");
        assert_eq!(
            page.render(Format::Prometheus),
            "# HELP a \n# TYPE a untyped\na{store=\"s\"} 1\n# HELP b \n# TYPE b counter\n\
             b{store=\"s\",c=\"}\\\"\\\\\",} +Inf 7\n# HELP b_more \n# TYPE b_more untyped\n\
             b_more{store=\"s\"} NaN\n"
        );
    }

    #[test]
    fn a_malformed_text_adds_nothing() {
        for wrong in [
            "{\"a\":1}",
            "a",
            "1a 2",
            "# TYPE 1a counter",
            "# TYPE a number",
            "\u{e9} 1",
            "a ",
            "a x",
            "a 1 x",
            "a 1 2 3",
            "a{b=\"c\"}1",
            "a{b=\"c\"",
            "a{b=\"c} 1",
            "a{b=\"c\\\"} 1",
            "a{b=c} 1",
            "a{=\"c\"} 1",
            "a{b=\"c\"d=\"e\"} 1",
            "a{b=\"c\",b=\"d\"} 1",
            "a{store=\"c\"} 1",
        ] {
            let mut page = Page::default();
            let words = page.add("a", &format!("ok 1\n{wrong}\n")).expect_err(wrong);
            assert!(words.contains(wrong) && page.families.is_empty(), "{wrong}: {words}");
        }
    }
}
