//! `kvtier demo`: the KV chunks of many sessions are saved and brought back
//! through ops and queues under one budget, every byte checked, and planted
//! damage must be found.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::checksum::checksum;
use kvtier::base::item::Item;
use kvtier::base::memory::{Buffer, MemoryWish, Wish};
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::queue::Queue;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::host;

use crate::human;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A small model: 24 layers of 8 KV heads of 64 values in 16 bits, chunks of 64 tokens.
const LAYERS: u64 = 24;
const CELL_BYTES: u64 = 2 * 8 * 64 * 2 * 64;
const CHUNKS: u64 = 8;
const SESSION_BYTES: u64 = CHUNKS * LAYERS * CELL_BYTES;
/// One cell in this many is damaged before it is brought back.
const DAMAGE_EVERY: u64 = 997;

struct Stage {
    runtime: Runtime,
    queue: Arc<Queue>,
    device: Arc<Buffer>,
    host: Arc<Buffer>,
    quiet: bool,
}

#[derive(Default)]
struct Tally {
    bytes: u64,
    cells: u64,
    corrupt: u64,
    took: Duration,
}

impl Tally {
    fn rate(&self) -> f64 {
        self.bytes as f64 / self.took.as_secs_f64() / 1e9
    }
}

/// Runs the demo.
pub fn run(sessions: u32, workers: u32, json: bool) -> Outcome<()> {
    let sessions = u64::from(sessions);
    let runtime = Runtime::open(RuntimeOpts { workers, ..RuntimeOpts::default() })?;
    let budget = Budget::open(runtime.core(), &BudgetOpts::default())?;
    let account = budget.account("demo", 0, None)?;
    let map = |bytes| {
        let account = Some(account.clone());
        Buffer::map(&MemoryWish { bytes, huge: Wish::Try, account, ..MemoryWish::default() }, None)
    };
    let device = Arc::new(map(SESSION_BYTES)?);
    let host = Arc::new(map(sessions * SESSION_BYTES)?);
    let queue = Queue::open(runtime.core(), 4096, None)?;
    let quiet = json || !std::io::stderr().is_terminal();
    let stage = Stage { runtime, queue, device, host, quiet };
    prefault(&stage)?;

    if !json {
        let lane = budget.lane(Tier::Host);
        println!(
            "{sessions} sessions of {} ({CHUNKS} chunks x {LAYERS} layers, cells of {}), host \
             budget {}, in use {}",
            human(SESSION_BYTES),
            human(CELL_BYTES),
            human(lane.limit_bytes),
            human(lane.committed_bytes),
        );
    }
    let (saved, sums) = save(&stage, sessions)?;
    let damaged = damage(&stage, sums.len() as u64);
    let loaded = load(&stage, sessions, &sums)?;
    let plain = memcpy_rate(&stage);
    stage.queue.close(0)?;
    stage.runtime.close(0)?;
    let peak = budget.lane(Tier::Host).peak_bytes;
    report(json, &saved, &loaded, damaged, plain, peak);
    if loaded.corrupt != damaged {
        return Err(format!("{damaged} cells were damaged, {} were found", loaded.corrupt).into());
    }
    Ok(())
}

/// Makes the pages present first, so that saving measures copies alone.
fn prefault(stage: &Stage) -> Outcome<()> {
    const PIECE: u64 = 16 << 20;
    let core = stage.runtime.core();
    let pieces = stage.host.bytes().div_ceil(PIECE);
    let mut items = core.item_list(pieces as usize)?;
    for at in (0..pieces).map(|i| i * PIECE) {
        let bytes = PIECE.min(stage.host.bytes() - at);
        let to = Some((stage.host.clone(), at));
        items.push(Item::new(host::PREFAULT, to, None, bytes, 0));
    }
    let op = core.submit(&OpOpts::default(), items, host::run)?;
    op.wait(RELEASED, 0)?;
    op.remove();
    Ok(())
}

fn bar(stage: &Stage, what: &'static str, cells: u64) -> Outcome<ProgressBar> {
    if stage.quiet {
        return Ok(ProgressBar::hidden());
    }
    let style = "{msg:<10} [{bar:40}] {pos}/{len} cells  {elapsed_precise}";
    let style = ProgressStyle::with_template(style)?.progress_chars("=> ");
    Ok(ProgressBar::new(cells).with_style(style).with_message(what))
}

/// What an engine would have computed for a session: bytes only it has.
fn compute(stage: &Stage, session: u64) {
    let mut state = session.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    // SAFETY: nothing is in flight on the buffer between sessions.
    let bytes =
        unsafe { std::slice::from_raw_parts_mut(stage.device.address(), SESSION_BYTES as usize) };
    for word in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// Saves every session cell by cell; the checksums come from the copy itself.
fn save(stage: &Stage, sessions: u64) -> Outcome<(Tally, Vec<u64>)> {
    let cells = CHUNKS * LAYERS;
    let mut sums = vec![0u64; (sessions * cells) as usize];
    let mut tally = Tally::default();
    let progress = bar(stage, "saving", sessions * cells)?;
    for session in 0..sessions {
        compute(stage, session);
        let start = Instant::now();
        let first = session * cells;
        let to = |i: u64| Some((stage.host.clone(), (first + i) * CELL_BYTES));
        let from = |i: u64| Some((stage.device.clone(), i * CELL_BYTES));
        submit(stage, cells, |i| {
            Item::new(host::COPY | host::CHECKSUM, to(i), from(i), CELL_BYTES, 0)
        })?;
        drain(stage, cells, |cell, status, value| {
            sums[(first + cell) as usize] = value;
            tally.corrupt += u64::from(status != 0);
        })?;
        tally.took += start.elapsed();
        tally.cells += cells;
        tally.bytes += SESSION_BYTES;
        progress.inc(cells);
    }
    progress.finish();
    Ok((tally, sums))
}

/// Flips one bit in some cells, as a bad memory module would.
fn damage(stage: &Stage, cells: u64) -> u64 {
    let hit = (0..cells).step_by(DAMAGE_EVERY as usize);
    let count = hit.clone().count() as u64;
    for cell in hit {
        let at = cell * CELL_BYTES + cell % CELL_BYTES;
        // SAFETY: inside the buffer; nothing is in flight on it.
        unsafe { *stage.host.address().add(at as usize) ^= 1 << (cell % 8) };
    }
    count
}

/// Brings every session back, verified against the sums of the saving.
fn load(stage: &Stage, sessions: u64, sums: &[u64]) -> Outcome<Tally> {
    let cells = CHUNKS * LAYERS;
    let mut tally = Tally::default();
    let progress = bar(stage, "loading", sessions * cells)?;
    for session in 0..sessions {
        let start = Instant::now();
        let first = session * cells;
        let to = |i: u64| Some((stage.device.clone(), i * CELL_BYTES));
        let from = |i: u64| Some((stage.host.clone(), (first + i) * CELL_BYTES));
        submit(stage, cells, |i| {
            let sum = sums[(first + i) as usize];
            Item::new(host::COPY | host::VERIFY, to(i), from(i), CELL_BYTES, sum)
        })?;
        let mut bad = Vec::new();
        drain(stage, cells, |cell, status, _| {
            if status == Status::Corrupt.code() {
                bad.push(cell);
            }
        })?;
        tally.took += start.elapsed();
        // The engine recomputes what was damaged; here it is told apart only.
        tally.corrupt += bad.len() as u64;
        tally.cells += cells;
        tally.bytes += SESSION_BYTES;
        check_good(stage, first, sums, &bad);
        progress.inc(cells);
    }
    progress.finish();
    Ok(tally)
}

/// Looks at the bytes themselves: what was called good is good.
fn check_good(stage: &Stage, first: u64, sums: &[u64], bad: &[u64]) {
    for cell in (0..CHUNKS * LAYERS).filter(|cell| !bad.contains(cell)) {
        let at = (cell * CELL_BYTES) as usize;
        // SAFETY: inside the buffer; nothing is in flight on it.
        let bytes = unsafe {
            std::slice::from_raw_parts(stage.device.address().add(at), CELL_BYTES as usize)
        };
        assert_eq!(checksum(bytes), sums[(first + cell) as usize], "cell {cell} is wrong");
    }
}

fn submit(stage: &Stage, cells: u64, item: impl Fn(u64) -> Item) -> Outcome<()> {
    let core = stage.runtime.core();
    let opts = OpOpts { queue: Some(stage.queue.clone()), detached: true, ..OpOpts::default() };
    let mut items = core.item_list(cells as usize)?;
    items.extend((0..cells).map(item));
    core.submit_each(&opts, items, |i| i as u64, host::run, |_, _| ())?;
    Ok(())
}

fn drain(stage: &Stage, cells: u64, mut see: impl FnMut(u64, i32, u64)) -> Outcome<()> {
    let mut left = cells as usize;
    while left > 0 {
        left -= stage.queue.wait(64, 0, &mut |e| see(e.tag, e.status, e.value))?;
    }
    Ok(())
}

/// The same bytes by one plain copy, for comparison; GB/s.
fn memcpy_rate(stage: &Stage) -> f64 {
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            // SAFETY: both buffers hold a session; nothing is in flight on them.
            unsafe {
                let (from, to) = (stage.host.address(), stage.device.address());
                std::ptr::copy_nonoverlapping(from, to, SESSION_BYTES as usize);
            }
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    SESSION_BYTES as f64 / times[times.len() / 2] / 1e9
}

fn report(json: bool, saved: &Tally, loaded: &Tally, damaged: u64, plain: f64, peak: u64) {
    if json {
        let line = serde_json::json!({
            "cells": loaded.cells,
            "bytes": saved.bytes + loaded.bytes,
            "save_gb_s": saved.rate(),
            "load_gb_s": loaded.rate(),
            "memcpy_gb_s": plain,
            "damaged": damaged,
            "found": loaded.corrupt,
            "peak_host_bytes": peak,
        });
        println!("{line}");
        return;
    }
    println!(
        "\n{:<9} {:>8} {:>11} {:>10} {:>11} {:>9}",
        "", "cells", "bytes", "GB/s", "of memcpy", "damaged"
    );
    for (what, tally) in [("saved", saved), ("loaded", loaded)] {
        println!(
            "{what:<9} {:>8} {:>11} {:>10.2} {:>10.0}% {:>9}",
            tally.cells,
            human(tally.bytes),
            tally.rate(),
            100.0 * tally.rate() / plain,
            tally.corrupt
        );
    }
    println!(
        "\nEvery byte was checksummed on the way out and verified on the way back. {damaged} cells \
         were\ndamaged on purpose; {} were found, and none was passed on as good.",
        loaded.corrupt
    );
}
