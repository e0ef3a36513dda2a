//! Earlier runs of `kvtier-bench all`, and what is worse than in the last one.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::fixtures::{Outcome, say};

/// A bar is a regression if it is worse by more than this share.
const WORSE: f64 = 0.10;

/// The items of an array; empty if there is none.
pub fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

/// A string; empty if there is none.
pub fn string<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or("")
}

/// Reads a JSON file.
pub fn read(path: &Path) -> Outcome<Value> {
    let say = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|e| say(&e))?;
    serde_json::from_str(&text).map_err(|e| say(&e))
}

/// A run as JSON with one bar a line, so that differences are readable.
pub fn text(run: &Value) -> String {
    let Some(fields) = run.as_object() else { return run.to_string() };
    let fields = fields.iter().map(|(name, value)| match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| format!("\n    {item}")).collect();
            format!("  \"{name}\": [{}\n  ]", items.join(","))
        }
        value => format!("  \"{name}\": {value}"),
    });
    format!("{{\n{}\n}}\n", fields.collect::<Vec<_>>().join(",\n"))
}

/// Saves a run as DIR/history/DATE-COMMIT.json.
pub fn record(dir: &Path, run: &Value) -> Outcome<PathBuf> {
    let name = format!("{}-{}.json", string(run, "date").replace(':', ""), string(run, "commit"));
    let dir = dir.join("history");
    std::fs::create_dir_all(&dir).map_err(say)?;
    let path = dir.join(name);
    std::fs::write(&path, text(run)).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(path)
}

/// The JSON files of a directory; none if it does not exist.
fn files(dir: &Path) -> Outcome<Vec<Value>> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Ok(Vec::new()) };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

/// Only runs of one kind are compared: machine, profile and length.
fn kind(run: &Value) -> [&Value; 4] {
    [&run["machine"]["cpu"], &run["machine"]["cores"], &run["profile"], &run["quick"]]
}

/// What is compared: the ratio to the baseline if there is one, which the machine's state
/// changes least.
fn figure(bar: &Value) -> Option<f64> {
    bar["ratio"].as_f64().or(bar["value"].as_f64())
}

/// By which share a bar is worse than before; negative if it is better. Differences from a
/// baseline may be zero or less, and have no share.
fn worse(bar: &Value, before: &Value) -> Option<f64> {
    if bar["ratio"].is_null() != before["ratio"].is_null() || bar["unit"] != before["unit"] {
        return None;
    }
    let (now, before) = (figure(bar)?, figure(before)?);
    let change = (now - before) / before;
    let change = if bar["better"] == "higher" { -change } else { change };
    (now > 0.0 && before > 0.0).then_some(change)
}

fn is_same(one: &Value, other: &Value) -> bool {
    one["group"] == other["group"] && one["bar"] == other["bar"]
}

/// Adds to a run the history of each bar, and `regressions`: bars that are worse than in the last
/// earlier run of the same kind that has them.
pub fn compare(run: &mut Value, dir: &Path) -> Outcome<()> {
    let mut runs = files(&dir.join("history"))?;
    runs.retain(|one| string(one, "date") < string(run, "date"));
    runs.sort_by(|a, b| string(a, "date").cmp(string(b, "date")));
    let results = files(&dir.join("results"))?;
    let mut regressions = Vec::new();
    let mut bars = list(run, "bars").to_vec();
    for bar in &mut bars {
        let found = |one: &&Value| is_same(one, bar) && one["value"].is_number();
        let pairs =
            runs.iter().filter_map(|run| Some((run, list(run, "bars").iter().find(found)?)));
        let pairs: Vec<(&Value, &Value)> = pairs.collect();
        let last = pairs.iter().rev().find(|(one, _)| kind(one) == kind(run));
        if let Some((one, before)) = last
            && let Some(change) = worse(bar, before)
        {
            if change > WORSE {
                regressions.push(json!({
                    "group": bar["group"], "bar": bar["bar"], "worse": change,
                    "now": figure(bar), "before": figure(before),
                    "of": if bar["ratio"].is_null() { bar["unit"].clone() } else { "baseline".into() },
                    "date": one["date"], "commit": one["commit"],
                }));
            }
            bar["worse"] = change.into();
        }
        let mut past = published(bar, &results);
        past.extend(pairs.iter().map(|(one, before)| {
            json!({
                "date": one["date"], "commit": one["commit"], "machine": one["machine"]["cpu"],
                "profile": one["profile"], "value": before["value"], "ratio": before["ratio"],
                "unit": before["unit"],
            })
        }));
        bar["history"] = past.into();
    }
    let share = |one: &Value| one["worse"].as_f64().unwrap_or(0.0);
    regressions.sort_by(|a, b| share(b).total_cmp(&share(a)));
    run["bars"] = bars.into();
    run["regressions"] = regressions.into();
    Ok(())
}

/// Results of a bar on the pages of benchmarks, in the order of the files.
fn published(bar: &Value, subjects: &[Value]) -> Vec<Value> {
    let command = format!("kvtier-bench {}", string(bar, "group"));
    let mut past = Vec::new();
    for subject in subjects {
        for result in list(subject, "results").iter().filter(|one| one["name"] == bar["bar"]) {
            let run = &subject["runs"][string(result, "run")];
            if string(run, "command").contains(&command) {
                past.push(json!({
                    "date": run["date"], "machine": run["machine"], "profile": run["profile"],
                    "value": result["value"], "ratio": result["ratio"], "unit": result["unit"],
                }));
            }
        }
    }
    past.sort_by(|a, b| string(a, "date").cmp(string(b, "date")));
    past
}
