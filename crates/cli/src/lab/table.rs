//! The results of a comparison as a table, as CSV and as JSON.

use kvtier::trace::report::Report;

use super::compare::Run;

/// A column: its name and its value.
type Column = (&'static str, fn(&Report) -> f64);

/// The columns of CSV and JSON besides the policy.
pub const COLUMNS: [Column; 21] = [
    ("capacity_blocks", |r| r.capacity_blocks as f64),
    ("requests", |r| r.requests as f64),
    ("references", |r| r.done.references as f64),
    ("block_miss_ratio", Report::block_miss_ratio),
    ("token_miss_ratio", Report::token_miss_ratio),
    ("cost_miss_ratio", Report::cost_miss_ratio),
    ("recomputed_tokens", |r| r.recomputed_tokens() as f64),
    ("recompute_cost", Report::recompute_cost),
    ("token_floor", Report::token_floor),
    ("re_prefill_rate", |r| r.re_prefill_rate),
    ("session_fairness", |r| r.session_fairness),
    ("tenant_fairness", |r| r.tenant_fairness),
    ("utilisation", |r| r.utilisation),
    ("inserts", |r| r.inserts as f64),
    ("evictions", |r| r.evictions as f64),
    ("refused", |r| r.refused as f64),
    ("decision_mean_ns", |r| r.decision.mean_ns() as f64),
    ("decision_p50_ns", |r| r.decision.quantile_ns(0.5) as f64),
    ("decision_p99_ns", |r| r.decision.quantile_ns(0.99) as f64),
    ("decision_max_ns", |r| r.decision.max_ns() as f64),
    ("requests_per_second", Report::requests_per_second),
];

/// A time with a unit.
pub fn time(ns: u64) -> String {
    match ns {
        0..=9_999 => format!("{ns} ns"),
        10_000..=9_999_999 => format!("{:.1} us", ns as f64 / 1e3),
        10_000_000..=9_999_999_999 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

/// Prints a table.
pub fn print(about: &str, runs: &[Run]) {
    println!("{about}\n");
    let width = runs.iter().map(|r| r.estimate.report.spec.len()).max().unwrap_or(0).max(6);
    println!(
        "{:<width$} {:>9}  {:>7} {:>7} {:>7}  {:>10} {:>8} {:>7} {:>6}  {:>9} {:>9} {:>9}",
        "", "", "tokens", "cost", "blocks", "", "fair to", "fair to", "in", "decision", "", ""
    );
    println!(
        "{:<width$} {:>9}  {:>7} {:>7} {:>7}  {:>10} {:>8} {:>7} {:>6}  {:>9} {:>9} {:>9}",
        "policy",
        "blocks",
        "missed",
        "missed",
        "missed",
        "re-prefill",
        "sessions",
        "tenants",
        "use",
        "p50",
        "p99",
        "max"
    );
    let mut last = 0;
    for run in runs {
        let r = &run.estimate.report;
        if last != 0 && last != r.capacity_blocks {
            println!();
        }
        last = r.capacity_blocks;
        println!(
            "{:<width$} {:>9}  {:>6.2}% {:>6.2}% {:>6.2}%  {:>9.2}% {:>8.3} {:>7.3} {:>5.1}%  \
             {:>9} {:>9} {:>9}",
            r.spec,
            r.capacity_blocks,
            100.0 * r.token_miss_ratio(),
            100.0 * r.cost_miss_ratio(),
            100.0 * r.block_miss_ratio(),
            100.0 * r.re_prefill_rate,
            r.session_fairness,
            r.tenant_fairness,
            100.0 * r.utilisation,
            time(r.decision.quantile_ns(0.5)),
            time(r.decision.quantile_ns(0.99)),
            time(r.decision.max_ns()),
        );
    }
    if let Some(run) = runs.first() {
        println!(
            "\nAn unbounded cache misses {:.2}% of tokens.",
            100.0 * run.estimate.report.token_floor()
        );
    }
    print_tiers(width, runs);
}

fn print_tiers(width: usize, runs: &[Run]) {
    if !runs.iter().any(|r| r.tiered) {
        return;
    }
    println!(
        "\n{:<width$} {:>10} {:>10} {:>10} {:>8}  tier: tokens served, bytes out, bytes in",
        "policy", "ttft mean", "p50", "p99", "lost"
    );
    for run in runs {
        let e = &run.estimate;
        let share = |tokens: u64| 100.0 * tokens as f64 / e.report.done.tokens.max(1) as f64;
        let tiers: Vec<String> = e
            .tiers
            .iter()
            .map(|t| {
                format!(
                    "{}: {:.1}%, {}, {}",
                    t.name,
                    share(t.hit_tokens),
                    crate::human(t.read_bytes),
                    crate::human(t.written_bytes)
                )
            })
            .collect();
        println!(
            "{:<width$} {:>10} {:>10} {:>10} {:>7.2}%  {}",
            e.report.spec,
            time(e.ttft_mean_ns),
            time(e.ttft_p50_ns),
            time(e.ttft_p99_ns),
            100.0 * e.loss(),
            tiers.join("; ")
        );
    }
    println!(
        "\nLost: additional work compared with a first tier of unbounded size, as a share of all work."
    );
}

/// Prints CSV.
pub fn csv(runs: &[Run]) {
    let names: Vec<&str> = COLUMNS.iter().map(|(name, _)| *name).collect();
    let tiered = runs.iter().any(|r| r.tiered);
    let more = if tiered {
        ",ttft_mean_ns,ttft_p50_ns,ttft_p99_ns,loss,read_bytes,written_bytes"
    } else {
        ""
    };
    println!("policy,{}{more}", names.join(","));
    for run in runs {
        let e = &run.estimate;
        let values: Vec<String> =
            COLUMNS.iter().map(|(_, of)| format!("{}", of(&e.report))).collect();
        print!("\"{}\",{}", e.report.spec.replace('"', "\"\""), values.join(","));
        if tiered {
            let sum =
                |of: fn(&kvtier_lab::tiers::TierShare) -> u64| e.tiers.iter().map(of).sum::<u64>();
            print!(
                ",{},{},{},{},{},{}",
                e.ttft_mean_ns,
                e.ttft_p50_ns,
                e.ttft_p99_ns,
                e.loss(),
                sum(|t| t.read_bytes),
                sum(|t| t.written_bytes)
            );
        }
        println!();
    }
}

/// Prints one JSON object a line.
pub fn json(runs: &[Run]) {
    for run in runs {
        let e = &run.estimate;
        let mut line = serde_json::Map::new();
        line.insert("policy".into(), e.report.spec.clone().into());
        for (name, of) in COLUMNS {
            let value = of(&e.report);
            let whole = value.fract() == 0.0 && value.abs() < 9e15;
            let ratio = name.ends_with("ratio") || name.ends_with("fairness");
            let number = if whole && !ratio { (value as i64).into() } else { value.into() };
            line.insert(name.into(), number);
        }
        if run.tiered {
            let tier = |t: &kvtier_lab::tiers::TierShare| {
                serde_json::json!({
                    "name": t.name,
                    "blocks": t.blocks,
                    "hit_tokens": t.hit_tokens,
                    "read_bytes": t.read_bytes,
                    "written_bytes": t.written_bytes,
                })
            };
            line.insert("ttft_mean_ns".into(), e.ttft_mean_ns.into());
            line.insert("ttft_p50_ns".into(), e.ttft_p50_ns.into());
            line.insert("ttft_p99_ns".into(), e.ttft_p99_ns.into());
            line.insert("ttft_floor_ns".into(), e.ttft_floor_ns.into());
            line.insert("loss".into(), e.loss().into());
            line.insert("tiers".into(), e.tiers.iter().map(tier).collect::<Vec<_>>().into());
        }
        println!("{}", serde_json::Value::Object(line));
    }
}
