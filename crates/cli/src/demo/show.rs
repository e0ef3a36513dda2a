//! What the demo shows: the tiers while it runs, a table at the end.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::budget::Tier;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::SessionOpts;

use super::model::{Model, TOKENS_PER_SECOND};
use super::talk::{Talk, Tally};
use super::{Opts, Outcome};
use crate::human;

const EVERY: Duration = Duration::from_millis(200);
/// Columns of the checkerboard.
const BOARD_CHUNKS: usize = 32;

/// The live view.
pub struct Screen {
    bar: ProgressBar,
    quiet: bool,
    json: bool,
    drawn: Cell<Instant>,
}

impl Screen {
    /// Nothing is shown of it without a terminal, or with `json`.
    pub fn new(json: bool) -> Screen {
        let quiet = json || !std::io::stderr().is_terminal();
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
        Screen { bar, quiet, json, drawn: Cell::new(Instant::now()) }
    }

    /// A run begins.
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
            println!("look at it: kvtier top --socket {}", path.display());
        }
        let style = ProgressStyle::with_template("{bar:40} {pos}/{len} turns\n{msg}");
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    }

    /// Whether it is time to draw again.
    pub fn is_due(&self) -> bool {
        !self.quiet && self.drawn.get().elapsed() >= EVERY
    }

    /// Draws where everything is: sums, and the board of who spoke last.
    pub fn draw(
        &self,
        store: &Store,
        space: u32,
        talk: &Talk,
        turn: u64,
        turns: u64,
    ) -> Outcome<()> {
        if self.quiet {
            return Ok(());
        }
        self.drawn.set(Instant::now());
        self.bar.set_length(turns);
        self.bar.set_position(turn);
        self.bar.set_message(table(store, space, talk)?);
        Ok(())
    }

    /// A run has ended.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// One letter a cell: M in memory, D on disk, B in both, . nowhere.
fn table(store: &Store, space: u32, talk: &Talk) -> Outcome<String> {
    let tokens = talk.tokens(talk.last);
    Ok(store.with(|core| {
        let session = core.open_session(space, &SessionOpts::default())?;
        core.append(session, tokens)?;
        let slots: Vec<u32> = core.session(session)?.path().slots().to_vec();
        let mut text = String::new();
        let host = core.host().stats();
        text += &format!("memory {} in {} cells", human(host.live_bytes), host.live_pieces);
        if let Some(disk) = store.disk() {
            let stats = disk.stats();
            text += &format!(", disk {} of {}", human(stats.used_bytes), human(stats.budget_bytes));
        }
        text += "\nthe conversation that spoke last, layers down, chunks across:\n";
        let Some(rows) = core.table_of(space) else { return Ok(text) };
        for layer in 0..rows.layout.layers() {
            for &slot in slots.iter().take(BOARD_CHUNKS) {
                let marks = rows.chunks.marks(slot).and_then(|all| all.get(layer));
                let there = marks.map_or(0, |marks| marks.there());
                let (memory, disk) = (1 << Tier::Host as u8, 1 << Tier::Disk as u8);
                text.push(match (there & memory != 0, there & disk != 0) {
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

fn saved_seconds(tally: &Tally) -> (f64, f64) {
    (tally.loaded as f64 / TOKENS_PER_SECOND, tally.load_time.as_secs_f64())
}

/// The table, or the JSON line.
pub fn close(runs: &[(String, Tally)], model: &Model, opts: &Opts) {
    if opts.json {
        for (policy, tally) in runs {
            println!("{}", line(policy, tally));
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
    for (policy, tally) in runs {
        let counters = &tally.counters;
        let cells = (counters.host_hits + counters.disk_hits).max(1) as f64;
        let (without, with) = saved_seconds(tally);
        println!(
            "{policy:<10} {:>5.1}% {:>8.1}% {:>8.1}% {:>6} tok {:>8} {:>9.2} {:>8.2} s {:>8.2} s",
            100.0 * tally.loaded as f64 / tally.asked.max(1) as f64,
            100.0 * counters.host_hits as f64 / cells,
            100.0 * counters.disk_hits as f64 / cells,
            tally.recomputed,
            human(tally.bytes),
            tally.bytes as f64 / tally.load_time.as_secs_f64().max(1e-9) / 1e9,
            with,
            without - with,
        );
    }
    let _ = model;
    let damage = runs.iter().fold((0, 0), |(done, found), (_, tally)| {
        (done + tally.damage.done, found + tally.damage.found)
    });
    let back: u64 = runs.iter().map(|(_, tally)| tally.damage.back).sum();
    println!(
        "\nEvery byte that came back was compared: {} wrong. Saved: against computing the loaded \
         tokens\nagain at {TOKENS_PER_SECOND:.0} tokens a second. After a restart {back} chunks were \
         found again; {} bytes had\nbeen changed on disk, {} cells were found damaged, and none was \
         passed on as good.",
        runs.iter().map(|(_, tally)| tally.wrong).sum::<u64>(),
        damage.0,
        damage.1,
    );
}

fn line(policy: &str, tally: &Tally) -> serde_json::Value {
    let (without, with) = saved_seconds(tally);
    let counters = &tally.counters;
    serde_json::json!({
        "policy": policy,
        "turns": tally.turns,
        "asked_tokens": tally.asked,
        "loaded_tokens": tally.loaded,
        "recomputed_tokens": tally.recomputed,
        "host_hits": counters.host_hits,
        "disk_hits": counters.disk_hits,
        "misses": counters.misses,
        "demoted_chunks": counters.demoted,
        "dropped_chunks": counters.dropped,
        "bytes": tally.bytes,
        "load_s": with,
        "recompute_s": without,
        "took_s": tally.took.as_secs_f64(),
        "wrong": tally.wrong,
        "damaged": tally.damage.done,
        "found": tally.damage.found,
        "chunks_after_restart": tally.damage.back,
        "open_s": tally.damage.open.as_secs_f64(),
    })
}
