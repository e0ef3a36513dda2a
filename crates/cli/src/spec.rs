//! `kvtier spec`: checks spec strings with the parsers of the library.

use std::io::BufRead;

use kvtier::base::clock::Clock;
use kvtier::base::fault::Faults;
use kvtier::base::spec::{Arg, Spec, Value};
use kvtier::base::status::{Result, Status};
use kvtier::format::keys::recipe;
use kvtier::policy::registry as policies;
use kvtier::sparse::registry as sparse;
use kvtier::sparse::shape::MAX_LAYERS;
use kvtier::sparse::{Kind, Shape};
use kvtier::store::admission::Admission;
use kvtier::store::bundle::Bundle;
use kvtier::store::spec::StoreSpec;

/// Values of parameters of `store`, with the parameter.
const VALUES: [(&str, &[&str]); 4] = [
    ("disk", &["disk"]),
    ("device", &["device"]),
    ("remote", &["redis", "s3", "dir", "custom"]),
    ("write", &["behind", "through", "back", "never"]),
];

/// Checks every spec, or every line of the standard input, and prints canonical forms.
pub fn run(texts: Vec<String>, json: bool) -> std::result::Result<(), Box<dyn std::error::Error>> {
    let texts = match texts.is_empty() {
        true => std::io::stdin().lock().lines().collect::<std::io::Result<Vec<String>>>()?,
        false => texts,
    };
    let (mut count, mut wrong) = (0, 0);
    for text in texts.iter().filter(|text| !text.trim().is_empty()) {
        count += 1;
        let outcome = check(text);
        wrong += u32::from(outcome.is_err());
        match (outcome, json) {
            (Ok(canonical), true) => println!("{}", serde_json::json!({ "spec": canonical })),
            (Err(error), true) => {
                println!("{}", serde_json::json!({ "spec": text, "error": error.message() }));
            }
            (Ok(canonical), false) => println!("{canonical}"),
            (Err(error), false) => println!("{text}: {error}"),
        }
    }
    match wrong {
        0 => Ok(()),
        _ => Err(format!("{wrong} of {count} specs are wrong").into()),
    }
}

/// The canonical form of a spec that the library accepts.
pub fn check(text: &str) -> Result<String> {
    let spec = Spec::parse(text)?;
    match read(&spec, text) {
        // A file that a spec names may be on another machine.
        Err(error) if matches!(error.status(), Status::Io | Status::NotFound) => {}
        outcome => outcome?,
    }
    Ok(spec.to_string())
}

fn read(spec: &Spec, text: &str) -> Result<()> {
    let name = spec.name.as_str();
    if let Some((key, _)) = VALUES.iter().find(|(_, names)| names.contains(&name)) {
        return StoreSpec::read(&within("store", key, spec)).map(drop);
    }
    match name {
        "store" | "kvtier" => Bundle::parse(text).map(drop),
        "budget" => Bundle::read(&within("kvtier", "budget", spec)).map(drop),
        "faults" => Faults::parse(text).map(drop),
        "all" | "none" | "select" => Admission::open(text, Clock::real().now_ns()).map(drop),
        "recipe" => recipe::codec_of(text.as_bytes()).map(drop),
        "any" => policy(&within("auto", "of", spec)),
        _ if policies::find(name).is_some() => policy(spec),
        _ if sparse::find(name).is_some() => sparse_policy(spec),
        _ => Err(spec.unknown_name(&names())),
    }
}

/// A spec with one argument: another spec, whose errors keep their offsets.
fn within(name: &str, key: &str, spec: &Spec) -> Spec {
    let (value, offset) = (Value::Spec(spec.clone()), spec.offset);
    Spec { name: name.into(), args: vec![Arg { key: key.into(), value, offset }], offset }
}

/// Every name that begins a spec.
fn names() -> Vec<&'static str> {
    let mut names = vec!["store", "kvtier", "budget"];
    names.extend(policies::ENTRIES.iter().map(|entry| entry.name));
    names.extend(sparse::ENTRIES.iter().map(|entry| entry.name));
    names.extend(VALUES.iter().flat_map(|(_, values)| values.iter().copied()));
    names.extend(["all", "none", "select", "any", "recipe", "faults"]);
    names
}

fn policy(spec: &Spec) -> Result<()> {
    let setting = policies::Setting { max_objects: 1024, capacity_units: 1024, holes: false };
    policies::make(spec, &setting).map(drop)
}

/// Makes a sparse policy for a model of four heads in two layers, and if that does not suit the
/// spec, for one with a latent row for all heads.
fn sparse_policy(spec: &Spec) -> Result<()> {
    let (layers, key_heads) = alpha_heads(spec).unwrap_or((2, 2));
    let usual = Shape {
        layers,
        query_heads: 2 * key_heads,
        key_heads,
        key_dim: 128,
        value_dim: 128,
        scale: 0.0,
        kind: Kind::Split,
        // A multiple of all usual sizes of pages.
        block_tokens: (1 << 12) * 3 * 5 * 7,
        max_tokens: 1 << 20,
    };
    let latent = Shape { key_heads: 1, kind: Kind::Latent, ..usual };
    let one = |shape: &Shape| sparse::make(spec, shape).map(drop);
    match one(&usual) {
        Err(_) if one(&latent).is_ok() => Ok(()),
        outcome => outcome,
    }
}

/// Layers and heads of keys of a model that `duo(alpha=...)` suits: it has a number for each head.
fn alpha_heads(spec: &Spec) -> Option<(u32, u32)> {
    let alpha = spec.args.iter().find(|arg| arg.key == "alpha")?;
    let Value::Text(text) = &alpha.value else { return None };
    let is_gap = |c: char| c.is_ascii_whitespace() || matches!(c, ',' | ';');
    let count = text.split(is_gap).filter(|word| !word.is_empty()).count();
    let count = u32::try_from(count).ok().filter(|count| *count > 0)?;
    let heads = (1..=count).find(|heads| count % heads == 0 && count / heads <= MAX_LAYERS)?;
    Some((count / heads, heads))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_of_every_kind_are_checked() {
        for text in [
            "store(host=1GiB,disk=disk(path=\"d\",bytes=1GiB))",
            "kvtier(workers=4,budget=budget(host=8GiB),store=store(host=1GiB))",
            "budget(host=8GiB)",
            "redis(url=\"redis://h\")",
            "custom",
            "write(",
            "lru",
            "qos(inner=s3fifo)",
            "any(lru,arc)",
            "minference(budget=0.3)",
            "minference(pattern=\"missing.json\")",
            "quest(page=48)",
            "quest(compat=fork,topk=4)",
            "duo(alpha=\"0.9 0.1 0.3; 0.2 0.8 0.4; 0 1 0.5\")",
            "select(hits=2)",
            "faults(pin=at(fail=1))",
            "recipe(codec=int8)",
        ] {
            assert_eq!(check(text).is_ok(), text != "write(", "{text}: {:?}", check(text));
        }
        for (text, words) in [
            ("stor(host=1GiB)", "did you mean 'store'"),
            ("lru(k=2)", "no arguments"),
            ("quest(page=x)", "page"),
            ("redis()", "url="),
            ("select(hit=2)", "hits"),
            ("any(lru,lur)", "lur"),
            ("budget(hots=1)", "'hots' at offset 7"),
            ("duo(alpha=\"\")", "duo"),
        ] {
            let error = check(text).expect_err(text);
            assert!(error.message().contains(words), "{text}: {error}");
        }
    }
}
