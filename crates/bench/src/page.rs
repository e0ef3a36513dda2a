//! The page of `kvtier-bench all`: one file of HTML without scripts.

use serde_json::Value;

use super::history::{list, string};

/// Light and dark; below 640 pixels each row is a block.
const STYLE: &str = "
:root { color-scheme: light dark; --text: #1f2937; --page: #ffffff; --soft: #4b5563; --line: #d1d5db;
  --bad: #b91c1c; --good: #2e7d32 }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --page: #161a20; --soft: #b6bcc6;
  --line: #374151; --bad: #f87171; --good: #7ccf85 } }
body { margin: 0 auto; padding: 12px; max-width: 1100px; font: 15px/1.45 system-ui, sans-serif;
  color: var(--text); background: var(--page); overflow-wrap: anywhere }
h1 { font-size: 1.4em } h2 { font-size: 1.15em; margin-top: 1.6em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0;
  border-bottom: 1px solid var(--line) }
.soft, details { color: var(--soft); font-size: 0.9em }
.MISSED, .worse { color: var(--bad); font-weight: 600 } .met { color: var(--good) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px } dd { margin: 0 }
@media (max-width: 640px) {
  thead { display: none } tr { display: block; padding: 6px 0; border-bottom: 1px solid var(--line) }
  td { display: block; border: 0; padding: 1px 0 } td:empty { display: none }
  td[data-label]::before { content: attr(data-label) ': '; color: var(--soft) }
}
";

const HEADS: [&str; 6] = ["bar", "figure", "baseline", "ratio", "goal", "verdict"];

/// The text as HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for one in text.chars() {
        match one {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            one => out.push(one),
        }
    }
    out
}

/// A number with three significant digits, or all digits before the point.
fn number(value: f64) -> String {
    let digits = if value == 0.0 { 1 } else { value.abs().log10().floor() as i32 + 1 };
    format!("{value:.*}", (3 - digits).clamp(0, 9) as usize)
}

/// A number, or a list of numbers; empty if there is none.
fn numbers(value: &Value) -> String {
    match value {
        Value::Array(all) => all.iter().map(numbers).collect::<Vec<_>>().join(", "),
        value => value.as_f64().map_or(String::new(), number),
    }
}

/// A number or numbers with their unit; empty if there is none.
fn with_unit(value: &Value, unit: &str) -> String {
    let text = numbers(value);
    if text.is_empty() { text } else { format!("{text} {unit}") }
}

/// A regression in words.
pub fn regression(one: &Value) -> String {
    let of = if one["of"] == "baseline" { "× the baseline" } else { string(one, "of") };
    format!(
        "{} {}: {} {of}, {} on {} ({}): {:.0} % worse",
        string(one, "group"),
        string(one, "bar"),
        numbers(&one["now"]),
        numbers(&one["before"]),
        day(one),
        string(one, "commit"),
        one["worse"].as_f64().unwrap_or(0.0) * 100.0
    )
}

fn day(one: &Value) -> &str {
    string(one, "date").split('T').next().unwrap_or("")
}

/// `met`, `MISSED`, `SKIP`, or nothing for a bar without a goal.
fn verdict(bar: &Value) -> &'static str {
    match (&bar["skip"], &bar["ok"]) {
        (Value::String(_), _) => "SKIP",
        (_, Value::Bool(true)) => "met",
        (_, Value::Bool(false)) => "MISSED",
        _ => "",
    }
}

/// The earlier runs of a bar.
fn past(bar: &Value) -> String {
    let items = list(bar, "history").iter().rev().map(|one| {
        let ratio = with_unit(&one["ratio"], "×");
        let words = [
            day(one).to_string(),
            with_unit(&one["value"], string(one, "unit")),
            if ratio.is_empty() { ratio } else { format!("ratio {ratio}") },
            string(one, "commit").to_string(),
            string(one, "profile").to_string(),
            string(one, "machine").to_string(),
        ];
        let words: Vec<String> = words.into_iter().filter(|word| !word.is_empty()).collect();
        format!("<li>{}</li>", escape(&words.join(" · ")))
    });
    let items: String = items.collect();
    if items.is_empty() {
        return items;
    }
    format!("<details><summary>earlier</summary><ul>{items}</ul></details>")
}

/// A bar as a row.
fn row(bar: &Value) -> String {
    let unit = string(bar, "unit");
    let sign = if bar["better"] == "higher" { "≥" } else { "≤" };
    let goal = with_unit(&bar["goal"], unit);
    let verdict = verdict(bar);
    let mut change = bar["worse"].as_f64().map_or(String::new(), |worse| match worse > 0.0 {
        true => format!("{:.0} % worse", worse * 100.0),
        false => format!("{:.0} % better", -worse * 100.0),
    });
    if change.starts_with("0 %") {
        change = "as before".to_string();
    }
    let base = [string(bar, "baseline").to_string(), with_unit(&bar["baseline_value"], unit)];
    let base: Vec<String> = base.into_iter().filter(|word| !word.is_empty()).collect();
    let cells = [
        with_unit(&bar["value"], unit),
        base.join(": "),
        with_unit(&bar["ratio"], "×"),
        if goal.is_empty() { goal } else { format!("{sign} {goal}") },
        [verdict, &change]
            .into_iter()
            .filter(|word| !word.is_empty())
            .collect::<Vec<_>>()
            .join(", "),
    ];
    let cell = |(head, cell): (&&str, &String)| {
        let class = if matches!(*head, "figure" | "verdict") { verdict } else { "" };
        match cell.is_empty() {
            true => "<td></td>".to_string(),
            false => format!("<td data-label=\"{head}\" class=\"{class}\">{}</td>", escape(cell)),
        }
    };
    let cells: String = HEADS[1..].iter().zip(&cells).map(cell).collect();
    let note = bar["skip"].as_str().unwrap_or(string(bar, "note"));
    let note = match note.is_empty() {
        true => String::new(),
        false => format!("<div class=\"soft\">{}</div>", escape(note)),
    };
    let name = escape(string(bar, "bar"));
    format!("<tr><td><code>{name}</code>{note}{}</td>{cells}</tr>\n", past(bar))
}

/// Facts of a run: names and values.
fn facts(run: &Value) -> String {
    let machine = &run["machine"];
    let length = if run["quick"] == true { "quick" } else { "full" };
    let all = [
        ("date", string(run, "date").to_string()),
        ("commit", string(run, "commit").to_string()),
        ("version, profile", format!("{}, {}", string(run, "version"), string(run, "profile"))),
        ("run", format!("{length}, {} s", run["seconds"])),
        ("processor", format!("{} × {}", machine["cores"], string(machine, "cpu"))),
        ("memory", with_unit(&machine["memory_gib"], "GiB")),
        ("kernel", string(machine, "kernel").to_string()),
        ("disk", string(machine, "disk").to_string()),
        ("load at the start", string(run, "load").to_string()),
    ];
    let all = all.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>", escape(value)));
    format!("<dl>{}</dl>\n", all.collect::<String>())
}

/// The page of a run with history.
pub fn html(run: &Value) -> String {
    let bars = list(run, "bars");
    let count = |name| bars.iter().filter(|bar| verdict(bar) == name).count();
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>kvtier benchmarks, {}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>kvtier benchmarks</h1>\n<h2>Regressions over 10 %</h2>\n",
        escape(day(run))
    );
    let regressions = list(run, "regressions");
    out += &match regressions.is_empty() {
        true => {
            "<p>None, compared with the last run on the same kind of machine.</p>\n".to_string()
        }
        false => {
            let item = |one| format!("<li class=\"worse\">{}</li>", escape(&regression(one)));
            format!("<ul>{}</ul>\n", regressions.iter().map(item).collect::<String>())
        }
    };
    out += &format!(
        "<h2>Run</h2>\n{}<p>{} bars: {} meet their goal, {} miss it, {} have no goal, {} were skipped.</p>\n",
        facts(run),
        bars.len(),
        count("met"),
        count("MISSED"),
        count(""),
        count("SKIP")
    );
    for group in bars.chunk_by(|a, b| a["group"] == b["group"]) {
        let heads: String = HEADS.iter().map(|head| format!("<th>{head}</th>")).collect();
        out += &format!(
            "<h2>{}</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>\n{}</tbody></table>\n",
            escape(string(&group[0], "group")),
            group.iter().map(row).collect::<String>()
        );
    }
    out + "</body>\n</html>\n"
}
