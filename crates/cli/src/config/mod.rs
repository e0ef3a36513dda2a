//! The configuration of a store as a TOML file, with the parameter names of specs. Errors are
//! those of specs, with file, line and column.

use std::path::Path;

use kvtier::base::spec::{Arg, Spec, Value};
use kvtier::store::spec::StoreSpec;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Longest configuration file.
pub const MAX_FILE_BYTES: u64 = 64 << 10;
/// Parameters whose text is not a spec.
pub const TEXTS: [&str; 4] = ["path", "control", "serve", "shared"];

/// An error at a byte offset of the file.
#[derive(Debug)]
pub struct ConfigError {
    offset: usize,
    message: String,
}

/// Prints the spec string of a file.
pub fn run(path: &Path, json: bool) -> Outcome<()> {
    let spec = read(path)?.to_string();
    match json {
        true => println!("{}", serde_json::json!({ "spec": spec })),
        false => println!("{spec}"),
    }
    Ok(())
}

/// Reads a file as the spec of a store.
pub fn read(path: &Path) -> Outcome<Spec> {
    let place = path.display();
    let text = match std::fs::metadata(path) {
        Ok(facts) if facts.len() > MAX_FILE_BYTES => {
            let bytes = facts.len();
            return Err(format!("{place} has {bytes} bytes, the limit is {MAX_FILE_BYTES}").into());
        }
        _ => std::fs::read_to_string(path).map_err(|error| format!("{place}: {error}"))?,
    };
    let error_at = |error_at: ConfigError| {
        let before = text.get(..error_at.offset).unwrap_or(&text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("{place}:{line}:{column}: {}", error_at.message)
    };
    let spec = parse(&text).map_err(error_at)?;
    Ok(spec)
}

/// Reads a text as the spec of a store.
pub fn parse(text: &str) -> Result<Spec, ConfigError> {
    let table = DeTable::parse(text).map_err(|error| ConfigError {
        offset: error.span().map_or(0, |span| span.start),
        message: error.message().to_string(),
    })?;
    let spec = spec_of("store", 0, table.get_ref())?;
    let spec_error = |error: kvtier::base::status::Error| ConfigError {
        offset: error.detail().and_then(|detail| detail.offset).unwrap_or(0) as usize,
        message: error.message().to_string(),
    };
    StoreSpec::read(&spec).map_err(spec_error)?;
    // The printed spec must be readable.
    Spec::parse(&spec.to_string())
        .map_err(|error| ConfigError { offset: 0, ..spec_error(error) })?;
    Ok(spec)
}

/// A table as a spec: its name, and its keys as parameters.
fn spec_of(name: &str, offset: usize, table: &DeTable) -> Result<Spec, ConfigError> {
    let mut args = Vec::new();
    for (key, value) in table.iter() {
        let offset = key.span().start;
        let key = key.get_ref().to_string();
        args.push(Arg { value: value_of(&key, value)?, key, offset });
    }
    // In the order of the file.
    args.sort_by_key(|arg| arg.offset);
    Ok(Spec { name: name.to_string(), args, offset })
}

fn value_of(key: &str, value: &Spanned<DeValue>) -> Result<Value, ConfigError> {
    let offset = value.span().start;
    let error_at = |message: String| ConfigError { offset, message };
    Ok(match value.get_ref() {
        DeValue::String(text) if TEXTS.contains(&key) => Value::Text(text.to_string()),
        DeValue::String(text) => inner(key, text, offset)?,
        DeValue::Boolean(is) => {
            Value::Spec(Spec { name: is.to_string(), args: Vec::new(), offset })
        }
        DeValue::Integer(number) => {
            let whole = i64::from_str_radix(number.as_str(), number.radix());
            let whole = whole.map_err(|_| error_at(format!("'{key}' = {number} is too large")))?;
            Value::Number(whole as f64, String::new())
        }
        DeValue::Float(number) => {
            let real = number.as_str().parse().ok().filter(|real: &f64| real.is_finite());
            let real = real.ok_or_else(|| error_at(format!("'{key}' is not a finite number")))?;
            Value::Number(real, String::new())
        }
        DeValue::Table(table) => Value::Spec(spec_of(key, offset, table)?),
        DeValue::Array(_) | DeValue::Datetime(_) => {
            return Err(error_at(format!(
                "'{key}' takes a number, a text, true, false or a table"
            )));
        }
    })
}

/// The value of a text in the notation of specs, such as "8GiB" or "qos(inner=lru)".
fn inner(key: &str, text: &str, offset: usize) -> Result<Value, ConfigError> {
    const BEFORE: &str = "x(x=";
    // Offsets in the file start behind the opening quote and do not count `BEFORE`.
    let place = |at: usize| (offset + 1 + at).saturating_sub(BEFORE.len());
    let spec_error = |error: kvtier::base::status::Error| ConfigError {
        offset: place(error.detail().and_then(|detail| detail.offset).unwrap_or(0) as usize),
        message: format!("'{key}' = \"{text}\" is not a value: {}", error.message()),
    };
    let mut spec = Spec::parse(&format!("{BEFORE}{text})")).map_err(spec_error)?;
    let one = spec.args.pop().filter(|arg| spec.args.is_empty() && arg.key == "x");
    match one {
        Some(mut arg) => {
            shift(&mut arg.value, &place);
            Ok(arg.value)
        }
        None => Err(ConfigError {
            offset,
            message: format!("'{key}' = \"{text}\" is not a single value"),
        }),
    }
}

/// Maps the offsets of a value and its parts to offsets in the file.
fn shift(value: &mut Value, place: &dyn Fn(usize) -> usize) {
    if let Value::Spec(spec) = value {
        spec.offset = place(spec.offset);
        for arg in &mut spec.args {
            arg.offset = place(arg.offset);
            shift(&mut arg.value, place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_converts_to_its_spec() {
        let text = "# a store\nhost = \"64MiB\"\npolicy = 'slru(segments=2)'\nhigh = 0.9\nlow = 0.8\n\
                    chunks = 1_000\ncontrol = \"run/k v.sock\"\n\n[disk]\npath = \"k\\\"v\"\n\
                    bytes = 0x80000000\nbuffered = true\nsegment = \"4MiB\"\n";
        let spec = parse(text).expect("sound").to_string();
        assert_eq!(
            spec,
            "store(host=64MiB,policy=slru(segments=2),high=0.9,low=0.8,chunks=1000,\
             control=\"run/k v.sock\",disk=disk(path=\"k\\\"v\",bytes=2147483648,buffered=true,\
             segment=4MiB))"
        );
        let store = StoreSpec::parse(&spec).expect("sound");
        assert_eq!(store.config.host_bytes, 64 << 20);
        let disk = store.disk.expect("one");
        assert_eq!((disk.path.as_os_str().to_str(), disk.bytes), (Some("k\"v"), 2 << 30));
        assert_eq!(parse("").expect("all defaults").to_string(), "store");
        let on_device = parse("[device]\ncapacity = \"2GiB\"\npolicy = \"lru\"\n").expect("sound");
        assert_eq!(on_device.to_string(), "store(device=device(capacity=2GiB,policy=lru))");
        let dotted = "disk.path = \"x\"\ndisk.bytes = \"1GiB\"\n";
        let inline = "disk = { path = \"x\", bytes = \"1GiB\" }\n";
        assert_eq!(parse(dotted).expect("ok").to_string(), parse(inline).expect("ok").to_string());
    }

    #[test]
    fn errors_name_the_mistake_and_its_offset() {
        for (text, at, message) in [
            ("\nhots = \"1GiB\"", "hots", "did you mean 'host'"),
            ("host = \"1Gib\"", "Gib", "GiB"),
            ("host = \"1GiB", "", ""),
            ("policy = \"qos(inner=\"", "", "not a value"),
            ("policy = \"lru, host=3\"", "\"lru", "not a single value"),
            ("policy = \"lru), y=(\"", "", "no"),
            ("[disk]\npath = \"x\"", "", "bytes="),
            ("[disk]\npath = \"x\"\nbytes = 3\nsegmnt = 1", "segmnt", "segment"),
            ("write = \"thru\"", "thru", "through"),
            ("high = 1.5", "high", "allowed is 0 to 1"),
            ("high = nan", "nan", "finite"),
            ("chunks = -1", "chunks", "whole numbers"),
            ("chunks = 99999999999999999999", "999", "too large"),
            ("chunks = [1]", "[1]", "a number"),
            ("chunks = 1979-05-27", "1979", "a number"),
            ("[disc]\npath = \"x\"", "disc", "did you mean 'disk'"),
        ] {
            let error_at = parse(text).expect_err(text);
            assert!(error_at.message.contains(message), "{text}: {error_at:?}");
            assert!(
                text[error_at.offset.min(text.len())..].starts_with(at),
                "{text}: {error_at:?}"
            );
        }
    }
}
