//! The page of the configuration file, with a file of all parameters.

use kvtier::base::spec::describe::{Description, Row};
use kvtier::base::status::Result;
use kvtier::store::spec::{Descriptions, describe};

use super::{Table, code, head};
use crate::config::{MAX_FILE_BYTES, TEXTS};

/// A file whose every line is used.
const EXAMPLE: &str = "\
host = \"8GiB\"
policy = \"qos(inner=lru)\"
write = \"behind(age=500ms)\"
remote = 'redis(url=\"redis://cache:6379\")'
control = \"/run/kvtier.sock\"

[disk]
path = \"/var/cache/kv\"
bytes = \"200GiB\"
";

/// Examples of values that have no default.
const REQUIRED: [(&str, &str); 3] =
    [("path", "/var/cache/kv"), ("bytes", "200GiB"), ("capacity", "8GiB")];
/// Values of defaults that depend on those examples.
const COMPUTED: [(&str, &str); 1] = [("segment", "64MiB")];

/// The page.
pub fn page() -> Result<String> {
    let all = describe()?;
    let mut out = head("Configuration file");
    out += "The configuration of a store as a TOML file, for operators: the parameters of \
            [`store(...)`](specs.md#store) by the same names.\n\n";
    out += &format!("```toml\n{EXAMPLE}```\n\n");
    out += "`kvtier config FILE` checks a file and prints the spec string, which the engine passes to the library. The \
            library itself reads no files. `kvtier demo --config FILE` runs a demonstration with it.\n\n";
    out += &rules();
    out += "## Keys\n\nDefaults and meanings are those of [Spec strings](specs.md).\n\n";
    let mut keys = Table::new(&["key", "TOML", "default"]);
    for row in all.store.rows.iter().filter(|row| !is_table(row)) {
        keys.row(&[code(row.key), toml(row), default(row)]);
    }
    for (name, table) in tables(&all) {
        for row in &table.rows {
            keys.row(&[code(&format!("{name}.{}", row.key)), toml(row), default(row)]);
        }
    }
    out += &keys.into_text();
    out += "## A file with every key\n\nEvery key with its meaning and its default. The tables are commented out: they have examples \
            where a value is required.\n\n";
    out += &format!("```toml\n{}```\n", complete(&all));
    Ok(out)
}

fn rules() -> String {
    let texts = TEXTS.map(code).join(", ");
    format!(
        "- A key of the file is a parameter of `store(...)`; a table is a nested spec of that name. `[disk]` and \
         `[device]` are such tables.\n- A string holds a value in the notation of specs: `\"8GiB\"`, \
         `\"slru(segments=2)\"`, `'redis(url=\"redis://cache:6379\")'`. Strings of {texts} are plain texts.\n- Numbers \
         are whole or real numbers without a unit; `true` and `false` are those of TOML. Arrays and dates are refused.\n\
         - A file has at most {} KiB. An empty file is a store with its defaults.\n- An error names the file, the \
         line and the column.\n- Secrets of remotes are not part of the file: see [Remotes](remote.md).\n\n",
        MAX_FILE_BYTES >> 10
    )
}

/// Whether the value is a table of the same name.
fn is_table(row: &Row) -> bool {
    ["disk", "device"].contains(&row.key)
}

fn tables(all: &Descriptions) -> [(&'static str, &Description); 2] {
    [("disk", &all.disk), ("device", &all.device)]
}

/// The type in TOML.
fn toml(row: &Row) -> String {
    match (row.kind, row.limits.as_str()) {
        ("word", "`true`, `false`") => "boolean".into(),
        ("word", words) => format!("string: {words}"),
        ("bytes", _) => "string with a unit, or a number of bytes".into(),
        ("spec", _) => "string with a spec".into(),
        ("text", _) => "string".into(),
        (kind, limits) => format!("{kind}, {limits}"),
    }
}

fn default(row: &Row) -> String {
    if row.default.is_empty() { "none".into() } else { row.default.clone() }
}

/// A file with every parameter, its meaning and its default. Tables that need a path or a size are
/// commented out: a line that begins with `#` and no space is a key.
pub fn complete(all: &Descriptions) -> String {
    let rows = all.store.rows.iter().filter(|row| !is_table(row));
    let mut out: String = rows.map(entry).collect();
    for (name, table) in tables(all) {
        out += &format!("\n# {}\n#[{name}]\n", sentence(table.about));
        for line in table.rows.iter().map(entry).collect::<String>().lines() {
            let mark = if line.starts_with('#') { "" } else { "#" };
            out += &format!("{mark}{line}\n");
        }
    }
    out
}

/// A key with its meaning as comments.
fn entry(row: &Row) -> String {
    let (mut out, mut line) = (String::new(), String::from("#"));
    let mut about = sentence(row.about);
    if value(row).is_none() && !REQUIRED.iter().any(|(key, _)| *key == row.key) {
        about += &format!(" Default: {}.", row.default.replace('`', ""));
    }
    for word in about.split(' ') {
        if line.len() + word.len() > 98 {
            out += &format!("{line}\n");
            line = "#".into();
        }
        line += &format!(" {word}");
    }
    let example = REQUIRED.iter().chain(&COMPUTED).find(|(key, _)| *key == row.key);
    let value = value(row).or(example.map(|(_, value)| format!("\"{value}\"")));
    let value = value.unwrap_or_else(|| "\"\"".into());
    out + &format!("{line}\n{} = {value}\n", row.key)
}

/// The default as a value of TOML, if it is one.
fn value(row: &Row) -> Option<String> {
    let word = row.default.trim_matches('`');
    match row.kind {
        _ if word.contains(' ') || word == "required" => None,
        "text" if word == "none" => None,
        "whole number" | "number" => Some(match word.strip_prefix("2^") {
            Some(exponent) => (1u64 << exponent.parse::<u32>().ok()?).to_string(),
            None => word.to_string(),
        }),
        "word" if ["true", "false"].contains(&word) => Some(word.to_string()),
        _ => Some(format!("\"{word}\"")),
    }
}

/// A meaning as a sentence. A word of code at its beginning keeps its case.
fn sentence(text: &str) -> String {
    let plain = text.replace('`', "");
    let mut chars = plain.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
    match text.starts_with('`') {
        true => format!("{plain}."),
        false => format!("{first}{}.", chars.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;
    use kvtier::store::spec::StoreSpec;

    #[test]
    fn the_file_of_all_keys_is_a_store_with_its_defaults() {
        let all = describe().expect("complete tables");
        let text = complete(&all);
        let spec = parse(&text).unwrap_or_else(|error| panic!("{error:?}\n{text}"));
        let (full, empty) = (StoreSpec::read(&spec), StoreSpec::parse(""));
        let debug =
            |spec: kvtier::base::status::Result<StoreSpec>| format!("{:?}", spec.expect("sound"));
        assert_eq!(debug(full), debug(empty));
        let lines = text.lines().map(|line| match line.strip_prefix('#') {
            Some(key) if !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{line}\n"),
        });
        let all_keys = parse(&lines.collect::<String>()).expect("sound");
        let all_keys = StoreSpec::read(&all_keys).expect("sound");
        assert_eq!(all_keys.disk.expect("one").bytes, 200 << 30);
        assert_eq!(all_keys.config.device.bytes, 8 << 30);
        for row in all.store.rows.iter().chain(&all.disk.rows).chain(&all.device.rows) {
            assert!(text.contains(&format!("{} = ", row.key)) || is_table(row), "{}", row.key);
        }
        parse(EXAMPLE).expect("sound");
    }
}
