//! `kvtier-bench all`: the page and the JSON of a run, and regressions against earlier runs.

use std::path::Path;

use kvtier_testkit::fixtures::scratch::Scratch;
use serde_json::{Value, json};

use crate::{ToolOutput, json, tool};

/// Text that a page must escape.
const HOSTILE: &str = "<script>alert(\"a & b\")</script>'";

fn all(args: &[&str]) -> ToolOutput {
    ToolOutput::of(tool().arg("all").args(args).output().expect("the tool starts"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).expect("written")
}

/// A bar whose ratio, if it has a baseline, is `value` ÷ 2.
fn bar(name: &str, better: &str, value: f64, has_baseline: bool) -> Value {
    json!({
        "group": "abi", "bar": name, "value": value, "unit": "ns",
        "baseline": if has_baseline { "a plain call" } else { "" },
        "baseline_value": has_baseline.then_some(2.0), "ratio": has_baseline.then_some(value / 2.0),
        "goal": 100.0, "better": better, "ok": better == "lower", "profile": "dist",
    })
}

fn run(date: &str, cpu: &str, bars: &[Value]) -> Value {
    json!({
        "date": date, "commit": "abc1234", "version": "0.1.0", "profile": "dist", "quick": false,
        "machine": {
            "cpu": cpu, "cores": 2, "memory_gib": 23.5, "kernel": "6.18", "disk": "ext4 on /dev/vda",
        },
        "load": "0.10 0.20 0.30", "seconds": 900, "bars": bars,
    })
}

/// A directory with the run of today, and earlier runs.
struct Runs(Scratch);

impl Runs {
    fn new(name: &str, now: &[Value], earlier: &[(&str, &str, &[Value])]) -> Runs {
        let runs = Runs(Scratch::created(name));
        std::fs::create_dir(runs.0.0.join("history")).expect("created");
        for (date, cpu, bars) in earlier {
            let text = run(date, cpu, bars).to_string();
            std::fs::write(runs.0.0.join(format!("history/{date}.json")), text).expect("written");
        }
        let text = run("2026-11-28T10:00:00Z", "EPYC", now).to_string();
        std::fs::write(runs.0.0.join("now.json"), text).expect("written");
        runs
    }

    /// Shows the run of today; returns the output, the page and the JSON.
    fn show(&self, options: &[&str]) -> (ToolOutput, String, Value) {
        let at = |name: &str| self.0.0.join(name).display().to_string();
        let (dir, now) = (self.0.0.display().to_string(), at("now.json"));
        let (html, out) = (at("page.html"), at("out.json"));
        let mut args = vec!["--from", &now, "--history", &dir, "--html", &html, "--json", &out];
        args.extend(options);
        let output = all(&args);
        (output, read(Path::new(&html)), json(&read(Path::new(&out))))
    }
}

/// Checks that a page is well-formed, loads nothing and runs nothing.
fn check_html(html: &str) {
    assert!(html.starts_with("<!DOCTYPE html>\n<html lang=\"en\">"), "{html}");
    let mut open = Vec::new();
    for part in html.split('<').skip(2) {
        let (tag, text) = part.split_once('>').expect("a tag ends");
        assert!(!text.contains('>'), "a bare > in {part}");
        let name = tag.split([' ', '\n']).next().expect("a name");
        assert!(name != "script" && name != "link" && !tag.contains("src="), "{tag}");
        assert!(!tag.contains(" on") && !tag.contains("href"), "{tag}");
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "{html}"),
            None if name == "meta" => {}
            None => open.push(name),
        }
        let entities = text.split('&').skip(1);
        for entity in entities.filter(|_| !open.contains(&"style")) {
            let (name, _) = entity.split_once(';').expect("an entity ends");
            assert!(["amp", "lt", "gt", "quot", "#39"].contains(&name), "&{name};");
        }
    }
    assert!(open.is_empty(), "{open:?} are open");
    assert!(html.contains("prefers-color-scheme: dark") && html.contains("name=\"viewport\""));
    assert!(!html.contains("url(") && !html.contains("@import"), "a page loads nothing");
}

#[test]
fn regressions_over_ten_percent_are_listed_first() {
    let lower = |value| bar("slower", "lower", value, true);
    let higher = |value| bar("less", "higher", value, false);
    for (part, expected) in [(0.11, 2), (0.09, 0)] {
        let now = [lower(1.0 + part), higher(1.0 - part)];
        let before: &[Value] = &[lower(1.0), higher(1.0)];
        let earlier = [("2026-11-20T10:00:00Z", "EPYC", before)];
        let runs = Runs::new("bench-regressions", &now, &earlier);
        let (output, html, out) = runs.show(&["--fail-on-regression"]);
        check_html(&html);
        let found = out["regressions"].as_array().expect("a list");
        assert_eq!(found.len(), expected, "{found:?}");
        assert_eq!(output.code, Some(i32::from(expected > 0)), "{}", output.error);
        for one in found {
            let words = format!("abi {}:", one["bar"].as_str().expect("a name"));
            assert!(output.error.contains(&words) && output.error.contains("11 % worse"));
            let (listed, rest) = html.split_once("<h2>Run</h2>").expect("a heading");
            assert!(listed.contains(&words) && rest.contains("11 % worse"), "{html}");
        }
        // Without the option a regression is no failure.
        assert_eq!(runs.show(&[]).0.code, Some(0));
    }
}

#[test]
fn better_bars_are_no_regressions() {
    let now = [bar("faster", "lower", 0.5, true), bar("more", "higher", 2.0, false)];
    let before: &[Value] = &[bar("faster", "lower", 1.0, true), bar("more", "higher", 1.0, false)];
    let earlier = [("2026-11-20T10:00:00Z", "EPYC", before)];
    let (output, html, _) =
        Runs::new("bench-better", &now, &earlier).show(&["--fail-on-regression"]);
    assert!(html.contains("50 % better") && html.contains("100 % better"), "{html}");
    assert_eq!((output.code, output.error.as_str()), (Some(0), ""));
}

#[test]
fn only_the_last_run_on_the_same_kind_of_machine_counts() {
    let one = |value| [bar("a", "lower", value, false)];
    let (fast, slow, unit) = (
        one(1.0),
        one(2.0),
        [json!({
            "group": "abi", "bar": "a", "value": 1.0, "unit": "µs", "better": "lower",
        })],
    );
    let earlier: [(&str, &str, &[Value]); 4] = [
        ("2026-11-20T10:00:00Z", "EPYC", &fast),
        ("2026-11-21T10:00:00Z", "EPYC", &slow),
        ("2026-11-22T10:00:00Z", "Xeon", &fast),
        // Later than the run: not an earlier run.
        ("2026-11-29T10:00:00Z", "EPYC", &fast),
    ];
    let (_, _, out) = Runs::new("bench-kinds", &one(2.1), &earlier).show(&[]);
    assert_eq!(out["regressions"], json!([]));
    let history = out["bars"][0]["history"].as_array().expect("a list");
    assert_eq!(history.len(), 3, "{history:?}");
    // A bar whose unit has changed is not compared.
    let earlier: [(&str, &str, &[Value]); 1] = [("2026-11-20T10:00:00Z", "EPYC", &unit)];
    let (_, _, out) = Runs::new("bench-units", &one(2.1), &earlier).show(&[]);
    assert_eq!(out["regressions"], json!([]));
}

#[test]
fn pages_escape_all_text() {
    let mut hostile = bar(HOSTILE, "lower", 1.0, true);
    for name in ["group", "unit", "baseline", "note"] {
        hostile[name] = HOSTILE.into();
    }
    let mut skip = bar("skipped", "lower", 1.0, false);
    (skip["value"], skip["skip"]) = (Value::Null, format!("SKIP: {HOSTILE}").into());
    let before: &[Value] = &[hostile.clone()];
    let earlier = [("2026-11-20T10:00:00Z", HOSTILE, before)];
    let (_, html, _) = Runs::new("bench-escape", &[hostile, skip], &earlier).show(&[]);
    check_html(&html);
    assert!(html.contains("SKIP: &lt;script&gt;") && html.contains("1 were skipped"), "{html}");
}

#[test]
fn groups_are_measured_onto_one_page() {
    let dir = Scratch::created("bench-all");
    let at = |name: &str| dir.0.join(name).display().to_string();
    let (html, out, history) = (at("page.html"), at("out.json"), dir.0.display().to_string());
    let args = ["--quick", "--only", "abi,device", "--html", &html, "--json", &out];
    let mut command = tool();
    command.env("KVTIER_CUDA_LIBRARY", "/nowhere/libcuda.so").arg("all").args(args);
    let output = command.args(["--history", &history, "--record"]).output().expect("it starts");
    assert!(output.status.success(), "{output:?}");
    let (page, run) = (read(Path::new(&html)), json(&read(Path::new(&out))));
    check_html(&page);
    let bars = run["bars"].as_array().expect("bars");
    for bar in bars {
        let name = bar["bar"].as_str().expect("a name");
        assert!(page.contains(&format!("<code>{name}</code>")), "{name} is not on the page");
        let why = bar["skip"].as_str().unwrap_or("");
        assert_eq!(bar["value"].is_null(), why.starts_with("SKIP: "), "{bar}");
        assert_eq!(bar["group"] == "device", why.contains("needs an NVIDIA GPU"), "{bar}");
        assert!(bar["profile"].is_string(), "{bar}");
    }
    for field in ["cpu", "kernel", "disk"] {
        assert!(run["machine"][field].as_str().is_some_and(|text| text.len() > 2), "{run}");
    }
    assert!(run["machine"]["cores"].as_u64() > Some(0) && run["date"].is_string());
    // The saved run is history for the next one.
    let saved: Vec<_> = std::fs::read_dir(dir.0.join("history")).expect("made").collect();
    assert_eq!(saved.len(), 1);
    assert!(!read(&saved[0].as_ref().expect("a file").path()).contains("\"history\""));
}

#[test]
fn invalid_arguments_of_all_are_reported() {
    all(&["--only", "nonsense"]).fails(1, "unknown group 'nonsense'");
    all(&["--from", "/nowhere.json"]).fails(1, "/nowhere.json: No such file");
    all(&["--from", "a.json", "--quick"]).fails(2, "cannot be used with");
}

/// The committed history is read by `all`.
#[test]
fn committed_runs_are_sound() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/benchmarks/history");
    let Ok(files) = std::fs::read_dir(dir) else { return };
    for file in files {
        let run = json(&read(&file.expect("a file").path()));
        for field in ["date", "commit", "profile"] {
            assert!(run[field].is_string(), "{field} of {run}");
        }
        let bars = run["bars"].as_array().expect("bars");
        assert!(bars.iter().all(|bar| bar["group"].is_string() && bar["bar"].is_string()));
    }
}
