//! The report of passes: where their time went.

use std::fmt::Write;

use kvtier::stream::scheduler::Stats;
use kvtier::stream::streamer::Streamer;
use serde_json::json;

use super::Outcome;
use crate::human;

/// A pass: its time, and the counters before and after.
pub struct Pass {
    /// Seconds of the pass.
    pub seconds: f64,
    /// Seconds for which the engine leased units.
    pub compute_s: f64,
    /// Counters before the pass.
    pub before: Stats,
    /// Counters after the pass.
    pub after: Stats,
}

/// The report of all passes.
pub struct Report {
    /// Seconds of loading the resident units.
    pub load_s: f64,
    /// Bytes read for the resident units.
    pub load_bytes: u64,
    /// The passes.
    pub passes: Vec<Pass>,
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn rate(bytes: u64, seconds: f64) -> String {
    format!("{}/s", human((bytes as f64 / seconds.max(1e-9)) as u64))
}

impl Pass {
    fn of(&self, number: impl Fn(&Stats) -> u64) -> u64 {
        number(&self.after).saturating_sub(number(&self.before))
    }

    fn row(&self, number: usize) -> String {
        let (hits, misses) = (self.of(|s| s.expert_hits), self.of(|s| s.expert_misses));
        let experts = match hits + misses {
            0 => "-".to_string(),
            all => format!("{hits} of {all}"),
        };
        let [compute, read, copy, slot, other] = self.parts_ms();
        format!(
            "{number:>5} {:>10.1} {compute:>10.1} {read:>10.1} {copy:>9.1} {slot:>9.1} \
             {other:>9.1} {:>11} {:>11} {:>13}  {experts}",
            self.seconds * 1e3,
            human(self.of(|s| s.read_bytes)),
            human(self.of(|s| s.copied_bytes)),
            rate(self.of(|s| s.read_bytes), self.seconds),
        )
    }

    /// Milliseconds of computing, of waits for reads, copies and slots, and the rest.
    fn parts_ms(&self) -> [f64; 5] {
        let waits = [
            ms(self.of(|s| s.wait_read_ns)),
            ms(self.of(|s| s.wait_copy_ns)),
            ms(self.of(|s| s.wait_slot_ns)),
        ];
        let known = self.compute_s * 1e3 + waits.iter().sum::<f64>();
        let other = (self.seconds * 1e3 - known).max(0.0);
        [self.compute_s * 1e3, waits[0], waits[1], waits[2], other]
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "pass_ns": (self.seconds * 1e9) as u64,
            "compute_ns": (self.compute_s * 1e9) as u64,
            "read_bytes": self.of(|s| s.read_bytes),
            "read_ns": self.of(|s| s.read_ns),
            "copied_bytes": self.of(|s| s.copied_bytes),
            "copy_ns": self.of(|s| s.copy_ns),
            "wait_read_ns": self.of(|s| s.wait_read_ns),
            "wait_copy_ns": self.of(|s| s.wait_copy_ns),
            "wait_slot_ns": self.of(|s| s.wait_slot_ns),
            "waited": self.of(|s| s.waited),
            "acquires": self.of(|s| s.acquires),
            "wasted_bytes": self.of(|s| s.wasted_bytes),
            "expert_hits": self.of(|s| s.expert_hits),
            "expert_misses": self.of(|s| s.expert_misses),
        })
    }
}

impl Report {
    /// A report of the load, without passes.
    pub fn new(streamer: &Streamer, load_s: f64) -> Report {
        Report { load_s, load_bytes: streamer.stats().read_bytes, passes: Vec::new() }
    }

    /// The steady passes. The first pass is not: no prefetch was running before it.
    fn steady(&self) -> &[Pass] {
        if self.passes.len() > 1 { &self.passes[1..] } else { &self.passes }
    }

    /// Bytes moved over a link in the steady passes.
    fn crossed(&self, bytes: impl Fn(&Stats) -> u64) -> u64 {
        self.steady().iter().map(|pass| pass.of(&bytes)).sum()
    }

    /// The report as text.
    pub fn text(&self, streamer: &Streamer) -> String {
        let (engine, fallback) = streamer.engine();
        let mut out = String::new();
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            out,
            "loaded {} in {:.2} s, {}; I/O engine {engine}",
            human(self.load_bytes),
            self.load_s,
            rate(self.load_bytes, self.load_s)
        );
        if let Some(why) = fallback {
            let _ = writeln!(out, "  {why}");
        }
        let _ = writeln!(
            out,
            "\n pass         ms    compute wait: read      copy      slot     other        read \
             \x20    copied     disk rate  expert hits"
        );
        for (number, pass) in self.passes.iter().enumerate() {
            let _ = writeln!(out, "{}", pass.row(number + 1));
        }
        out.push('\n');
        self.sum_up(&mut out, streamer);
        out
    }

    /// Writes where the time of a steady pass went, and the use of the links.
    fn sum_up(&self, out: &mut String, streamer: &Streamer) {
        let passes = self.steady();
        let seconds: f64 = passes.iter().map(|pass| pass.seconds).sum();
        let all_ms = (seconds * 1e3).max(1e-9);
        let names = ["compute", "wait for reads", "wait for copies", "wait for slots", "other"];
        let mut parts = Vec::new();
        for (i, name) in names.into_iter().enumerate() {
            let part_ms: f64 = passes.iter().map(|pass| pass.parts_ms()[i]).sum();
            parts.push((name, part_ms / all_ms * 100.0));
        }
        let words: Vec<String> = parts
            .iter()
            .filter(|(_, percent)| *percent >= 0.5)
            .map(|(name, percent)| format!("{percent:.0} % {name}"))
            .collect();
        let pass_ms = all_ms / passes.len().max(1) as f64;
        let _ = writeln!(out, "steady pass: {pass_ms:.1} ms, of it {}", words.join(", "));
        let [disk, device] = streamer.links();
        let links = [
            ("disk", self.crossed(|s| s.read_bytes), disk.ceiling),
            ("device link", self.crossed(|s| s.copied_bytes), device.ceiling),
        ];
        for (name, bytes, ceiling) in links {
            if bytes == 0 {
                continue;
            }
            let _ = write!(out, "{name}: {}", rate(bytes, seconds));
            let percent = bytes as f64 / seconds.max(1e-9) / ceiling as f64 * 100.0;
            let known = rate(ceiling, 1.0);
            let _ = match ceiling {
                0 => Ok(()),
                _ if percent > 100.5 => write!(out, ", above the measured ceiling of {known}"),
                _ => write!(out, ", {percent:.0} % of the {known} ceiling"),
            };
            out.push('\n');
        }
    }

    /// The report as JSON.
    pub fn json(&self, streamer: &Streamer) -> Outcome<serde_json::Value> {
        let (engine, fallback) = streamer.engine();
        let [disk, device] = streamer.links();
        let layers = streamer.layers();
        let layers = layers.iter().map(|layer| {
            json!({
                "layer": layer.layer,
                "hits": layer.hits,
                "misses": layer.misses,
                "bytes": layer.bytes,
            })
        });
        Ok(json!({
            "plan": serde_json::from_str::<serde_json::Value>(&streamer.plan_json())?,
            "engine": engine,
            "fallback": fallback,
            "load_ns": (self.load_s * 1e9) as u64,
            "load_bytes": self.load_bytes,
            "disk_ceiling": disk.ceiling,
            "device_ceiling": device.ceiling,
            "passes": self.passes.iter().map(Pass::json).collect::<Vec<_>>(),
            "layers": layers.collect::<Vec<_>>(),
        }))
    }
}
