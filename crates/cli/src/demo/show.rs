//! The output of the demo: a live view of the tiers, and a table at the end.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::budget::Tier;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::SessionOpts;

use super::model::{Model, TOKENS_PER_SECOND};
use super::workload::{Totals, Workload};
use super::{Opts, Outcome};
use crate::human;

const EVERY: Duration = Duration::from_millis(200);
/// Columns of the residency map.
const MAP_CHUNKS: usize = 32;

/// The live view.
pub struct Screen {
    bar: ProgressBar,
    quiet: bool,
    json: bool,
    drawn: Cell<Instant>,
}

impl Screen {
    /// A view that is hidden without a terminal and with `json`.
    pub fn new(json: bool) -> Screen {
        let quiet = json || !std::io::stderr().is_terminal();
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        Screen { bar, quiet, json, drawn: Cell::new(Instant::now()) }
    }

    /// Prints the setting of a run.
    pub fn begin(&self, opts: &Opts, model: &Model, spec: &StoreSpec, all: u64) {
        if self.json {
            return;
        }
        println!(
            "{} conversations of {} ({} in all), {} layers; memory {}, disk {}, policy {}",
            opts.sessions,
            human(model.session_bytes()),
            human(all),
            model.layout.layers(),
            human(spec.config.host_bytes),
            human(spec.disk.as_ref().map_or(0, |disk| disk.bytes)),
            spec.config.host_policy,
        );
        if let Some(path) = &spec.control {
            println!("watch it with: kvtier top --socket {}", path.display());
        }
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} turns\n{msg}");
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    }

    /// Whether it is time to draw again.
    pub fn is_due(&self) -> bool {
        !self.quiet && self.drawn.get().elapsed() >= EVERY
    }

    /// Draws the usage of the tiers, and the residency of the conversation of the last turn.
    pub fn draw(
        &self,
        store: &Store,
        namespace: u32,
        workload: &Workload,
        turn: u64,
        turns: u64,
    ) -> Outcome<()> {
        if self.quiet {
            return Ok(());
        }
        self.drawn.set(Instant::now());
        self.bar.set_length(turns);
        self.bar.set_position(turn);
        self.bar.set_message(table(store, namespace, workload)?);
        Ok(())
    }

    /// Ends the view of a run.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// The residency map, one letter a cell: M memory, D disk, B both, . neither.
fn table(store: &Store, namespace: u32, workload: &Workload) -> Outcome<String> {
    let tokens = workload.tokens(workload.last);
    Ok(store.with(|core| {
        let session = core.open_session(namespace, &SessionOpts::default())?;
        core.append(session, tokens)?;
        let slots: Vec<u32> = core.session(session)?.path().slots().to_vec();
        let mut text = String::new();
        let host = core.host().stats();
        text += &format!("memory {} in {} cells", human(host.live_bytes), host.live_pieces);
        if let Some(disk) = store.disk() {
            let stats = disk.stats();
            text += &format!(", disk {} of {}", human(stats.used_bytes), human(stats.budget_bytes));
        }
        text += "\nresidency of the last conversation (rows: layers, columns: chunks):\n";
        let Some(rows) = core.table_of(namespace) else { return Ok(text) };
        for layer in 0..rows.layout.layers() {
            for &slot in slots.iter().take(MAP_CHUNKS) {
                let marks = rows.chunks.marks(slot).and_then(|all| all.get(layer));
                let resident = marks.map_or(0, |marks| marks.resident_tiers());
                let (memory, disk) = (1 << Tier::Host as u8, 1 << Tier::Disk as u8);
                text.push(match (resident & memory != 0, resident & disk != 0) {
                    (true, true) => 'B',
                    (true, false) => 'M',
                    (false, true) => 'D',
                    (false, false) => '.',
                });
            }
            text.push('\n');
        }
        core.close_session(session)?;
        Ok(text)
    })?)
}

fn saved_seconds(totals: &Totals) -> (f64, f64) {
    (totals.loaded as f64 / TOKENS_PER_SECOND, totals.load_time.as_secs_f64())
}

/// Prints the table, or the JSON lines.
pub fn close(runs: &[(String, Totals)], opts: &Opts) {
    if opts.json {
        for (policy, totals) in runs {
            println!("{}", line(policy, totals));
        }
        return;
    }
    println!(
        "\n{:<10} {:>6} {:>9} {:>9} {:>11} {:>8} {:>9} {:>10} {:>10}",
        "policy",
        "hits",
        "in memory",
        "from disk",
        "recomputed",
        "loaded",
        "GB/s",
        "load time",
        "saved"
    );
    for (policy, totals) in runs {
        let counters = &totals.counters;
        let cells = (counters.host_hit_cells + counters.disk_hit_cells).max(1) as f64;
        let (without, with) = saved_seconds(totals);
        println!(
            "{policy:<10} {:>5.1}% {:>8.1}% {:>8.1}% {:>6} tok {:>8} {:>9.2} {:>8.2} s {:>8.2} s",
            100.0 * totals.loaded as f64 / totals.requested.max(1) as f64,
            100.0 * counters.host_hit_cells as f64 / cells,
            100.0 * counters.disk_hit_cells as f64 / cells,
            totals.recomputed,
            human(totals.bytes),
            totals.bytes as f64 / totals.load_time.as_secs_f64().max(1e-9) / 1e9,
            with,
            without - with,
        );
    }
    let damage = runs.iter().fold((0, 0), |(done, found), (_, totals)| {
        (done + totals.damage.done, found + totals.damage.found)
    });
    let back: u64 = runs.iter().map(|(_, totals)| totals.damage.back).sum();
    println!(
        "\nEvery byte that was loaded was compared: {} wrong. Saved: less time than computing the \
         loaded tokens\nagain at {TOKENS_PER_SECOND:.0} tokens a second. After a restart {back} \
         chunks were found; {} bytes had been changed on disk;\n{} cells were detected as damaged, \
         and none of them was returned.",
        runs.iter().map(|(_, totals)| totals.wrong).sum::<u64>(),
        damage.0,
        damage.1,
    );
}

fn line(policy: &str, totals: &Totals) -> serde_json::Value {
    let (without, with) = saved_seconds(totals);
    let counters = &totals.counters;
    serde_json::json!({
        "policy": policy,
        "turns": totals.turns,
        "asked_tokens": totals.requested,
        "loaded_tokens": totals.loaded,
        "recomputed_tokens": totals.recomputed,
        "host_hits": counters.host_hit_cells,
        "disk_hits": counters.disk_hit_cells,
        "misses": counters.missed_cells,
        "demoted_chunks": counters.demoted_chunks,
        "dropped_chunks": counters.dropped_chunks,
        "bytes": totals.bytes,
        "load_s": with,
        "recompute_s": without,
        "took_s": totals.took.as_secs_f64(),
        "wrong": totals.wrong,
        "damaged": totals.damage.done,
        "found": totals.damage.found,
        "chunks_after_restart": totals.damage.back,
        "open_s": totals.damage.open.as_secs_f64(),
    })
}
