//! `kvtier top`: the tiers of a store, and the residency map of a session.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::{Client, Refusal};
use super::show::{entries, number, real, text, time, timed};
use super::{Outcome, Target};
use crate::human;

/// Columns of a usage bar.
const BAR_COLUMNS: usize = 40;
/// Columns of the residency map.
const MAP_CHUNKS: usize = 96;
/// Latencies in a line.
const TIMES: usize = 4;
/// Most rows of the residency map; with more layers, some are left out.
const MAP_ROWS: usize = 32;

/// Options of the view.
pub struct Opts {
    /// Print one frame.
    pub once: bool,
    /// Number of the session; `None` = the one opened last.
    pub session: Option<u32>,
    /// First chunk of the map.
    pub first: u64,
    /// Time between frames.
    pub every: Duration,
}

/// Prints frames until the process is stopped or the store closes.
pub fn run(at: &Target, opts: &Opts) -> Outcome<()> {
    let mut client = Client::connect(&at.socket)?;
    let colours = !opts.once && !at.json && std::io::stdout().is_terminal();
    let session = opts.session.map_or(String::new(), |number| format!("session={number},"));
    let request = format!("residency({session}first={},chunks={MAP_CHUNKS})", opts.first);
    let mut before: Option<(Instant, Value)> = None;
    loop {
        let stats: Value = serde_json::from_str(&client.request("stats")?)?;
        let table = match client.request(&request) {
            Ok(text) => Ok(serde_json::from_str(&text)?),
            // The session has closed, or no session is open.
            Err(refusal) if refusal.status == "KVT_E_NOT_FOUND" => Err(refusal),
            Err(refusal) => return Err(refusal.into()),
        };
        let now = Instant::now();
        let mut out = std::io::stdout().lock();
        if at.json {
            let table = table.unwrap_or(Value::Null);
            writeln!(out, "{}", json!({ "stats": stats, "residency": table }))?;
        } else {
            let since = before.as_ref().map(|(then, old)| (now - *then, old));
            let frame = frame(&stats, since, &table, colours);
            let clear = if opts.once { "" } else { "\x1b[H\x1b[J" };
            write!(out, "{clear}{frame}")?;
        }
        out.flush()?;
        drop(out);
        if opts.once {
            return Ok(());
        }
        before = Some((now, stats));
        std::thread::sleep(opts.every);
    }
}

fn frame(
    stats: &Value,
    since: Option<(Duration, &Value)>,
    table: &Result<Value, Refusal>,
    colours: bool,
) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "kvtier {}, process {}: {:.1} % of cells found, {:.1} % in memory\n",
        text(stats, "version"),
        number(stats, "pid"),
        100.0 * real(stats, "hit_ratio"),
        100.0 * real(stats, "host_hit_ratio"),
    );
    for (name, tier) in stats.get("tiers").into_iter().flat_map(entries) {
        let name = if name == "host" { "memory" } else { name };
        let (limit, used) = (number(tier, "limit_bytes"), number(tier, "used_bytes"));
        let live = number(tier, "live_bytes");
        let _ = writeln!(
            out,
            "{name:<7} [{}] {} of {}, cells {}; {}",
            bar(live, used, limit),
            human(used),
            human(limit),
            human(live),
            text(tier, "policy"),
        );
    }
    let n = |key| number(stats, key);
    let _ = writeln!(
        out,
        "cells   {} in memory, {} on disk; {} chunks, {} sessions, {} pins; {} transfers, {} wait for memory",
        n("host_cells"),
        n("disk_cells"),
        n("chunks"),
        n("sessions"),
        n("pins"),
        n("transfers"),
        n("memory_waiters"),
    );
    if let Some((time, old)) = since {
        let _ = writeln!(out, "rates   {}", rates(stats, old, time.as_secs_f64().max(1e-3)));
    }
    times(&mut out, stats);
    match table {
        Ok(table) => residency_map(&mut out, table, colours),
        Err(refusal) => {
            let _ = writeln!(out, "\n{refusal}");
        }
    }
    out
}

/// A usage bar: cells, then other used bytes, then free ones.
fn bar(live: u64, used: u64, limit: u64) -> String {
    let columns =
        |bytes: u64| (bytes as f64 / limit.max(1) as f64 * BAR_COLUMNS as f64).round() as usize;
    let live = columns(live).min(BAR_COLUMNS);
    let used = columns(used).clamp(live, BAR_COLUMNS);
    format!("{}{}{}", "#".repeat(live), "+".repeat(used - live), ".".repeat(BAR_COLUMNS - used))
}

fn rates(stats: &Value, old: &Value, seconds: f64) -> String {
    let count = |all: &Value, key| all.get("counters").map_or(0, |all| number(all, key));
    let rate = |key| count(stats, key).saturating_sub(count(old, key)) as f64 / seconds;
    let bytes = |key| human(rate(key) as u64);
    format!(
        "{:.0} cells/s stored, {:.0} found, {:.0} missed; {}/s written, {}/s loaded; {:.0} chunks/s \
         demoted, {:.0} evicted",
        rate("stored_cells"),
        rate("host_hit_cells") + rate("disk_hit_cells"),
        rate("missed_cells"),
        bytes("written_bytes"),
        bytes("loaded_bytes"),
        rate("demoted_chunks"),
        rate("dropped_chunks") + rate("evicted_chunks"),
    )
}

/// p50 and p99 of transfers, batches and policy decisions.
fn times(out: &mut String, stats: &Value) {
    let one = |(name, times): &(String, &Value)| {
        let [half, most] = ["p50_ns", "p99_ns"].map(|key| time(real(times, key)));
        format!("{name} {half}, {most}")
    };
    let rows: Vec<String> = timed(stats).iter().map(one).collect();
    for (at, row) in rows.chunks(TIMES).enumerate() {
        let head = if at == 0 { "p50,p99" } else { "" };
        let _ = writeln!(out, "{head:<7} {}", row.join("; "));
    }
}

fn residency_map(out: &mut String, table: &Value, colours: bool) {
    let session = table.get("session").unwrap_or(&Value::Null);
    let rows = table.get("rows").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let each = rows.len().div_ceil(MAP_ROWS).max(1);
    let shown = rows.first().and_then(Value::as_str).map_or(0, str::len);
    let _ = writeln!(
        out,
        "\nsession {} of tenant {}: {} tokens; columns: chunks {} to {} of {}, rows: {} layers{}\n\
         G device, M memory, D disk, B memory and disk, ~ in transfer, . none",
        number(session, "session"),
        number(session, "tenant"),
        number(session, "tokens"),
        number(table, "first_chunk"),
        number(table, "first_chunk") + shown as u64,
        number(session, "chunks"),
        number(session, "layers"),
        if each > 1 { format!(" (one in {each})") } else { String::new() },
    );
    for (layer, row) in rows.iter().enumerate().step_by(each) {
        let _ = write!(out, "{layer:>5} ");
        for cell in row.as_str().unwrap_or("").chars() {
            let colour = match cell {
                'M' => "32",
                'B' => "36",
                'D' => "33",
                '~' => "35",
                _ => "90",
            };
            let _ = match colours {
                true => write!(out, "\x1b[{colour}m{cell}\x1b[0m"),
                false => write!(out, "{cell}"),
            };
        }
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_shows_tiers_rates_and_the_residency_map() {
        let stats = |stored: u64| {
            json!({
                "version": "1", "pid": 7, "hit_ratio": 0.5, "host_hit_ratio": 0.25, "sessions": 3,
                "counters": { "stored_cells": stored, "written_bytes": stored * 1024 },
                "latencies": {
                    "get_host": { "count": 2, "p50_ns": 1500, "p99_ns": 2_500_000 },
                    "get_disk": { "count": 0, "p50_ns": 0, "p99_ns": 0 },
                },
                "policies": { "host": { "decision": { "count": 1, "p50_ns": 90, "p99_ns": 90 } } },
                "tiers": { "host": { "limit_bytes": 4096, "used_bytes": 2048, "live_bytes": 1024 } },
            })
        };
        let table = json!({
            "session": { "session": 5, "tenant": 2, "tokens": 70, "chunks": 3, "layers": 2 },
            "first_chunk": 0, "rows": ["MB.", "MD~"],
        });
        let (old, new) = (stats(10), stats(30));
        let text = frame(&new, Some((Duration::from_secs(2), &old)), &Ok(table), false);
        for part in [
            "50.0 % of cells found, 25.0 % in memory",
            &format!("memory  [{}{}{}]", "#".repeat(10), "+".repeat(10), ".".repeat(20)),
            "10 cells/s stored",
            "10.0 KiB/s written",
            "p50,p99 get host 1.5 us, 2.5 ms; host decision 90 ns, 90 ns\n",
            "session 5 of tenant 2: 70 tokens",
            "    0 MB.\n    1 MD~\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_usage_bar_has_a_fixed_length() {
        for (live, used, limit) in [(0, 0, 0), (9, 9, 3), (1, 2, 1 << 60), (u64::MAX, 1, u64::MAX)]
        {
            assert_eq!(bar(live, used, limit).len(), BAR_COLUMNS);
        }
    }
}
