//! The results of many engines on one remote, as tables and as JSON.

use kvtier_lab::scale::{Prices, ScaleReport};
use serde_json::{Value, json};

use super::scale::Run;
use super::table::time;

fn percent(share: f64) -> String {
    format!("{:.2}%", 100.0 * share)
}

fn rate(bytes: f64) -> String {
    format!("{}/s", crate::human(bytes as u64))
}

/// A number with an SI suffix.
fn short(n: f64) -> String {
    match n {
        n if n >= 1e9 => format!("{:.1}G", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.1}k", n / 1e3),
        n if n >= 100.0 => format!("{n:.0}"),
        n => format!("{n:.2}"),
    }
}

/// A column of a table: the heading, and the text for a run.
type Column<'a> = (&'a str, &'a dyn Fn(&ScaleReport) -> String);

fn rows(runs: &[Run], columns: &[Column]) {
    let texts: Vec<Vec<String>> =
        runs.iter().map(|run| columns.iter().map(|(_, of)| of(&run.report)).collect()).collect();
    let width = |at: usize| {
        let longest = texts.iter().map(|row| row[at].len()).max().unwrap_or(0);
        longest.max(columns[at].0.len())
    };
    let line = |row: &[String]| {
        let cells: Vec<String> =
            row.iter().enumerate().map(|(at, text)| format!("{text:>0$}", width(at))).collect();
        println!("{}", cells.join("  "));
    };
    line(&columns.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>());
    texts.iter().for_each(|row| line(row));
    println!();
}

/// Prints tables.
pub fn print(runs: &[Run], prices: &Prices) {
    let router: Column = ("router", &|r| r.router.to_string());
    let engines: Column = ("engines", &|r| r.engines.to_string());
    println!("Sources of tokens, as shares of all tokens; time to first token.");
    rows(
        runs,
        &[
            router,
            engines,
            ("host", &|r| percent(r.share(r.counts.host_tokens))),
            ("disk", &|r| percent(r.share(r.counts.disk_tokens))),
            ("remote own", &|r| percent(r.share(r.counts.own_tokens))),
            ("others'", &|r| percent(r.share(r.counts.other_tokens))),
            ("computed", &|r| percent(r.share(r.counts.computed_tokens()))),
            ("at least", &|r| percent(1.0 - r.share(r.floor_tokens))),
            ("declined", &|r| percent(r.share(r.counts.declined_tokens))),
            ("capped", &|r| percent(r.share(r.counts.capped_tokens))),
            ("ttft mean", &|r| time(r.ttft_ns[0])),
            ("p50", &|r| time(r.ttft_ns[1])),
            ("p99", &|r| time(r.ttft_ns[2])),
            ("mean without", &|r| time(r.local_ttft_ns[0])),
            ("busiest/mean", &|r| format!("{:.2}", r.imbalance())),
        ],
    );
    if runs.iter().all(|run| run.report.chunk_objects == 0) {
        return;
    }
    print_traffic(runs, router, engines);
    println!("Hot spots of traffic, and cost per million tokens loaded.");
    rows(
        runs,
        &[
            router,
            engines,
            ("peak gets/s", &|r| short(r.peak.gets_per_second)),
            ("of a shard", &|r| short(r.shard_peak.gets_per_second)),
            ("peak bytes", &|r| rate(r.peak.bytes_per_second)),
            ("of a shard", &|r| rate(r.shard_peak.bytes_per_second)),
            ("hottest chunk", &|r| percent(r.hottest_share)),
            ("most gets in 1 s", &|r| r.chunk_peak.to_string()),
            ("hottest 1%", &|r| percent(r.hot_share)),
            ("cost", &|r| format!("{:.4}", per_million(r, r.bill(prices).sum()))),
            ("requests", &|r| {
                format!("{:.4}", per_million(r, r.bill(prices).gets + r.bill(prices).puts))
            }),
            ("saves", &|r| format!("{:.4}", per_million(r, r.bill(prices).saved))),
        ],
    );
    for run in runs.iter().filter(|run| run.whole.is_some()) {
        println!("{}", lost(run));
    }
}

fn print_traffic(runs: &[Run], router: Column, engines: Column) {
    println!("Requests to the remote a second, of all engines.");
    rows(
        runs,
        &[
            router,
            engines,
            ("lookups", &|r| short(r.rate(r.counts.lookups))),
            ("batches", &|r| short(r.rate(r.counts.lookup_batches))),
            ("spared", &|r| short(r.rate(r.counts.hinted_present + r.counts.hinted_absent))),
            ("gets", &|r| short(r.rate(r.counts.gets))),
            ("bytes", &|r| rate(r.rate(r.counts.get_bytes))),
            ("stale", &|r| short(r.rate(r.counts.stale))),
            ("puts", &|r| short(r.rate(r.counts.puts))),
            ("bytes", &|r| rate(r.rate(r.counts.put_bytes))),
            ("refused", &|r| percent(r.counts.duplicates as f64 / r.counts.puts.max(1) as f64)),
            ("dropped", &|r| percent(r.counts.dropped_sends as f64 / r.counts.sends.max(1) as f64)),
            ("stored", &|r| crate::human(r.life.stored.1)),
            ("evicted", &|r| crate::human(r.life.evicted.1)),
            ("objects", &|r| short(r.life.resident.0 as f64)),
        ],
    );
}

/// A sum per million tokens loaded from the remote.
fn per_million(r: &ScaleReport, sum: f64) -> f64 {
    let tokens = r.counts.remote_tokens();
    if tokens > 0 { sum * 1e6 / tokens as f64 } else { 0.0 }
}

fn lost(run: &Run) -> String {
    let (r, Some(whole)) = (&run.report, &run.whole) else { return String::new() };
    let before = whole.counts.remote_tokens();
    let after = r.counts.remote_tokens();
    format!(
        "{} {}: since the failure the remote served {} instead of {} of all tokens: {} of its \
         hits were lost; mean time to first token {} instead of {}.",
        r.router,
        r.engines,
        percent(r.share(after)),
        percent(whole.share(before)),
        percent(before.saturating_sub(after) as f64 / before.max(1) as f64),
        time(r.ttft_ns[0]),
        time(whole.ttft_ns[0]),
    )
}

/// Prints one JSON object a line.
pub fn json(runs: &[Run], prices: &Prices, block_tokens: u32) {
    for run in runs {
        let mut line = object(&run.report, prices, block_tokens);
        if let (Some(whole), Value::Object(fields)) = (&run.whole, &mut line) {
            fields.insert("whole".into(), object(whole, prices, block_tokens));
        }
        println!("{line}");
    }
}

fn object(r: &ScaleReport, prices: &Prices, block_tokens: u32) -> Value {
    let (c, bill) = (&r.counts, r.bill(prices));
    let pair = |(objects, bytes): (u64, u64)| json!({"objects": objects, "bytes": bytes});
    let most =
        |of: fn(&kvtier_lab::scale::EngineShare) -> u64| r.shares.iter().map(of).max().unwrap_or(0);
    json!({
        "policy": r.policy,
        "router": r.router,
        "engines": r.engines,
        "seconds": r.seconds,
        "requests": c.requests,
        "tokens": {
            "all": c.tokens, "host": c.host_tokens, "disk": c.disk_tokens,
            "remote_own": c.own_tokens, "remote_others": c.other_tokens,
            "computed": c.computed_tokens(), "unbounded": r.floor_tokens,
            "declined": c.declined_tokens, "capped": c.capped_tokens,
        },
        "remote_requests": c.remote_requests,
        "asks": {
            "objects": c.lookups, "batches": c.lookup_batches, "absent": c.absent_lookups,
            "spared_there": c.hinted_present, "spared_absent": c.hinted_absent,
            "masked": c.masked, "before_puts": c.put_lookups,
        },
        "gets": {
            "objects": c.gets, "bytes": c.get_bytes, "stale": c.stale,
            "wasted_bytes": c.wasted_bytes,
        },
        "sends": {"chunks": c.sends, "spared": c.spared_sends, "dropped": c.dropped_sends},
        "puts": {
            "objects": c.puts, "bytes": c.put_bytes, "stored": c.stored,
            "duplicates": c.duplicates, "duplicate_bytes": c.duplicate_bytes,
            "away": c.away_puts,
        },
        "busiest_engine": {
            "of_mean": r.imbalance(),
            "requests": most(|share| share.requests),
            "asks": most(|share| share.lookups),
            "get_bytes": most(|share| share.get_bytes),
            "put_bytes": most(|share| share.put_bytes),
        },
        "chunk": {"objects": r.chunk_objects, "bytes": r.chunk_bytes, "tokens": block_tokens},
        "life": {
            "stored": pair(r.life.stored), "evicted": pair(r.life.evicted),
            "lost": pair(r.life.lost), "resident": pair(r.life.resident),
        },
        "peak": {
            "gets_per_second": r.peak.gets_per_second,
            "bytes_per_second": r.peak.bytes_per_second,
            "shard_gets_per_second": r.shard_peak.gets_per_second,
            "shard_bytes_per_second": r.shard_peak.bytes_per_second,
            "chunk_gets_in_a_second": r.chunk_peak,
            "hottest_chunk": r.hottest_share,
            "hottest_1_percent": r.hot_share,
        },
        "ttft_ns": {"mean": r.ttft_ns[0], "p50": r.ttft_ns[1], "p99": r.ttft_ns[2]},
        "ttft_without_ns": {
            "mean": r.local_ttft_ns[0], "p50": r.local_ttft_ns[1], "p99": r.local_ttft_ns[2],
        },
        "saved_ns": r.saved_ns,
        "slower": r.slower,
        "cost": {
            "gets": bill.gets, "puts": bill.puts, "bytes": bill.bytes, "kept": bill.storage,
            "sum": bill.sum(), "saved": bill.saved,
            "per_million_tokens": per_million(r, bill.sum()),
            "saved_per_million_tokens": per_million(r, bill.saved),
        },
    })
}
