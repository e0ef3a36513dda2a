//! A store's configuration as a TOML file: its parameters by name, as in specs. What
//! is wrong is told as for specs, with the line.

use std::path::Path;

use kvtier::base::spec::{Arg, Spec, Value};
use kvtier::store::spec::StoreSpec;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Longest file.
const MOST_BYTES: u64 = 64 << 10;
/// Parameters that are texts: what they hold is no spec.
const TEXTS: [&str; 2] = ["path", "control"];

/// Something wrong, and where.
#[derive(Debug)]
struct Wrong {
    offset: usize,
    words: String,
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

/// Reads a file; a store can be opened by what it says.
pub fn read(path: &Path) -> Outcome<Spec> {
    let place = path.display();
    let text = match std::fs::metadata(path) {
        Ok(facts) if facts.len() > MOST_BYTES => {
            return Err(format!("{place} has more than {MOST_BYTES} bytes").into());
        }
        _ => std::fs::read_to_string(path).map_err(|error| format!("{place}: {error}"))?,
    };
    let wrong = |wrong: Wrong| {
        let before = text.get(..wrong.offset).unwrap_or(&text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("{place}:{line}:{column}: {}", wrong.words)
    };
    let spec = parse(&text).map_err(wrong)?;
    Ok(spec)
}

fn parse(text: &str) -> Result<Spec, Wrong> {
    let table = DeTable::parse(text).map_err(|error| Wrong {
        offset: error.span().map_or(0, |span| span.start),
        words: error.message().to_string(),
    })?;
    let spec = spec_of("store", 0, table.get_ref())?;
    let told = |error: kvtier::base::status::Error| Wrong {
        offset: error.detail().and_then(|detail| detail.offset).unwrap_or(0) as usize,
        words: error.message().to_string(),
    };
    StoreSpec::read(&spec).map_err(told)?;
    // What is printed must be one that can be read.
    Spec::parse(&spec.to_string()).map_err(|error| Wrong { offset: 0, ..told(error) })?;
    Ok(spec)
}

/// A table is a spec of its name, its keys are the parameters.
fn spec_of(name: &str, offset: usize, table: &DeTable) -> Result<Spec, Wrong> {
    let mut args = Vec::new();
    for (key, value) in table.iter() {
        let offset = key.span().start;
        let key = key.get_ref().to_string();
        args.push(Arg { value: value_of(&key, value)?, key, offset });
    }
    // As they stand in the file.
    args.sort_by_key(|arg| arg.offset);
    Ok(Spec { name: name.to_string(), args, offset })
}

fn value_of(key: &str, value: &Spanned<DeValue>) -> Result<Value, Wrong> {
    let offset = value.span().start;
    let wrong = |words: String| Wrong { offset, words };
    Ok(match value.get_ref() {
        DeValue::String(text) if TEXTS.contains(&key) => Value::Text(text.to_string()),
        DeValue::String(text) => inner(key, text, offset)?,
        DeValue::Boolean(is) => {
            Value::Spec(Spec { name: is.to_string(), args: Vec::new(), offset })
        }
        DeValue::Integer(number) => {
            let whole = i64::from_str_radix(number.as_str(), number.radix());
            let whole = whole.map_err(|_| wrong(format!("'{key}' is too large a number")))?;
            Value::Number(whole as f64, String::new())
        }
        DeValue::Float(number) => {
            let real = number.as_str().parse().ok().filter(|real: &f64| real.is_finite());
            let real = real.ok_or_else(|| wrong(format!("'{key}' is no finite number")))?;
            Value::Number(real, String::new())
        }
        DeValue::Table(table) => Value::Spec(spec_of(key, offset, table)?),
        DeValue::Array(_) | DeValue::Datetime(_) => {
            return Err(wrong(format!("'{key}' takes a number, a text, true, false or a table")));
        }
    })
}

/// A text that holds a value as specs have it, such as "8GiB" or "qos(inner=lru)".
fn inner(key: &str, text: &str, offset: usize) -> Result<Value, Wrong> {
    const BEFORE: &str = "x(x=";
    // Behind the quote that opens it; what stands before it there is not in the file.
    let place = |at: usize| (offset + 1 + at).saturating_sub(BEFORE.len());
    let told = |error: kvtier::base::status::Error| Wrong {
        offset: place(error.detail().and_then(|detail| detail.offset).unwrap_or(0) as usize),
        words: format!("'{key}' = \"{text}\" is no value: {}", error.message()),
    };
    let mut spec = Spec::parse(&format!("{BEFORE}{text})")).map_err(told)?;
    let one = spec.args.pop().filter(|arg| spec.args.is_empty() && arg.key == "x");
    match one {
        Some(mut arg) => {
            shift(&mut arg.value, &place);
            Ok(arg.value)
        }
        None => Err(Wrong { offset, words: format!("'{key}' = \"{text}\" is no single value") }),
    }
}

/// Says of all parts where they stand in the file.
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
    fn a_file_is_the_spec_it_says() {
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
    fn what_is_wrong_is_said_where_it_stands() {
        for (text, at, words) in [
            ("\nhots = \"1GiB\"", "hots", "did you mean 'host'"),
            ("host = \"1Gib\"", "Gib", "GiB"),
            ("host = \"1GiB", "", ""),
            ("policy = \"qos(inner=\"", "", "no value"),
            ("policy = \"lru, host=3\"", "\"lru", "no single value"),
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
            let wrong = parse(text).expect_err(text);
            assert!(wrong.words.contains(words), "{text}: {wrong:?}");
            assert!(text[wrong.offset.min(text.len())..].starts_with(at), "{text}: {wrong:?}");
        }
    }
}
