//! Answers of a store as text.

use serde_json::Value;

use crate::human;

/// A whole number; 0 if absent.
pub fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

/// A number; 0 if absent.
pub fn real(value: &Value, key: &str) -> f64 {
    value.get(key).and_then(Value::as_f64).unwrap_or(0.0)
}

/// A text; empty if absent.
pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or("")
}

/// The entries of an object.
pub fn entries(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value))
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// A time with a unit.
pub fn time(ns: f64) -> String {
    match ns.abs() {
        n if n < 1e3 => format!("{ns:.0} ns"),
        n if n < 1e6 => format!("{:.1} us", ns / 1e3),
        n if n < 1e9 => format!("{:.1} ms", ns / 1e6),
        n if n < 120e9 => format!("{:.1} s", ns / 1e9),
        n if n < 7200e9 => format!("{:.1} min", ns / 60e9),
        _ => format!("{:.1} h", ns / 3600e9),
    }
}

/// Prints the statistics of a store.
pub fn stats(all: &Value) {
    println!(
        "kvtier {} in process {}: {:.1} % of cells found, {:.1} % in memory",
        text(all, "version"),
        number(all, "pid"),
        100.0 * real(all, "hit_ratio"),
        100.0 * real(all, "host_hit_ratio"),
    );
    if let Some(tiers) = all.get("tiers") {
        budget(tiers);
    }
    let plain = |value: &Value| {
        for (key, value) in entries(value).filter(|(_, value)| value.is_u64()) {
            let name = key.replace('_', " ");
            match key.ends_with("_bytes") {
                true => println!("  {name:<18} {:>14}", human(value.as_u64().unwrap_or(0))),
                false => println!("  {name:<18} {value:>14}"),
            }
        }
    };
    println!("\nnow");
    plain(all);
    for key in ["counters", "remote"] {
        if let Some(part) = all.get(key) {
            println!("\n{key} since the store was opened");
            plain(part);
        }
    }
    latencies(all);
    for (name, policy) in all.get("policies").into_iter().flat_map(entries) {
        println!("\npolicy of tier {name}: {}", text(policy, "name"));
        plain(policy);
    }
    let tenants = list(all, "tenants");
    if !tenants.is_empty() {
        println!("\n{:>10} {:>10} {:>10} {:>12} {:>12}", "tenant", "put", "got", "hits", "misses");
        for row in tenants {
            println!(
                "{:>10} {:>10} {:>10} {:>12} {:>12}",
                number(row, "tenant"),
                human(number(row, "put_bytes")),
                human(number(row, "got_bytes")),
                number(row, "hits"),
                number(row, "misses"),
            );
        }
    }
}

/// Latencies with their names: those of transfers and batches, then those of policy decisions.
pub fn timed(all: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (name, times) in all.get("latencies").into_iter().flat_map(entries) {
        found.push((name.replace('_', " "), times));
    }
    for (tier, policy) in all.get("policies").into_iter().flat_map(entries) {
        found.extend(policy.get("decision").map(|times| (format!("{tier} decision"), times)));
    }
    found.retain(|(_, times)| number(times, "count") > 0);
    found
}

fn latencies(all: &Value) {
    let rows = timed(all);
    if rows.is_empty() {
        return;
    }
    println!(
        "\n{:<16} {:>12} {:>10} {:>10} {:>10} {:>10}",
        "latency of", "count", "mean", "p50", "p99", "max"
    );
    for (name, row) in rows {
        let [mean, half, most, longest] =
            ["mean_ns", "p50_ns", "p99_ns", "max_ns"].map(|key| time(real(row, key)));
        let count = number(row, "count");
        println!("{name:<16} {count:>12} {mean:>10} {half:>10} {most:>10} {longest:>10}");
    }
}

/// Prints limits and usage of the tiers.
pub fn budget(all: &Value) {
    println!(
        "{:<5} {:>10} {:>10} {:>10} {:>22}  policy",
        "tier", "limit", "used", "cells", "watermarks high, low"
    );
    for (name, tier) in entries(all) {
        let bytes = |key| human(number(tier, key));
        let marks = format!("{}, {}", bytes("high_bytes"), bytes("low_bytes"));
        println!(
            "{name:<5} {:>10} {:>10} {:>10} {marks:>22}  {}",
            bytes("limit_bytes"),
            bytes("used_bytes"),
            bytes("live_bytes"),
            text(tier, "policy"),
        );
    }
}

/// Prints a change of policy.
pub fn policy(all: &Value) {
    let (tier, before, now) = (text(all, "tier"), text(all, "before"), text(all, "policy"));
    println!("{tier}: {now} decides from now on, instead of {before}");
}

/// Prints evictions.
pub fn evictions(all: &Value) {
    println!(
        "{:<5} {:>8} {:>10} {:<16} {:>9} {:>10} {:>5} {:>10} {:>12}  by",
        "tier", "number", "ago", "chunk", "session", "unused for", "uses", "size", "score"
    );
    for (tier, entries) in entries(all) {
        for entry in entries.as_array().into_iter().flatten() {
            let session = match entry.get("session_serial").and_then(Value::as_u64) {
                Some(serial) => serial.to_string(),
                None => "-".to_string(),
            };
            println!(
                "{tier:<5} {:>8} {:>10} {:<16} {session:>9} {:>10} {:>5} {:>10} {:>12.5e}  {}",
                number(entry, "number"),
                time(real(entry, "ago_ns")),
                text(entry, "chunk"),
                time(real(entry, "unused_ns")),
                number(entry, "uses"),
                human(number(entry, "blocks").saturating_mul(4096)),
                real(entry, "score"),
                text(entry, "policy"),
            );
        }
    }
}

/// Prints the results of a shadow evaluation.
pub fn comparison(all: &Value) {
    println!(
        "{} on the requests to tier {} for {}\n",
        if all.get("running").and_then(Value::as_bool) == Some(true) {
            "policies so far"
        } else {
            "policies"
        },
        text(all, "tier"),
        time(real(all, "elapsed_ns")),
    );
    println!(
        "{:<24} {:>10} {:>7} {:>7} {:>10} {:>9} {:>9} {:>9} {:>10} {:>10}",
        "policy",
        "requests",
        "hits",
        "tokens",
        "re-prefill",
        "fair",
        "tenants",
        "evicted",
        "decision",
        "p99"
    );
    for policy in list(all, "policies") {
        let live = policy.get("live").and_then(Value::as_bool) == Some(true);
        let name = format!("{}{}", text(policy, "policy"), if live { " (live)" } else { "" });
        let part = |key| format!("{:.1}%", 100.0 * real(policy, key));
        println!(
            "{name:<24} {:>10} {:>7} {:>7} {:>10} {:>9.3} {:>9.3} {:>9} {:>10} {:>10}",
            number(policy, "references"),
            part("hit_ratio"),
            part("token_hit_ratio"),
            part("re_prefill_rate"),
            real(policy, "session_fairness"),
            real(policy, "tenant_fairness"),
            number(policy, "evictions"),
            time(real(policy, "decision_mean_ns")),
            time(real(policy, "decision_p99_ns")),
        );
    }
}
