//! Group `scale`: the index of ten million cells, an opening after a crash with a million cells, and
//! memory of a store under load.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvtier::base::status::{Error, Result, Status};
use kvtier::io::files::Access;
use kvtier::meta::index::hash;
use kvtier::store::state::transfer::{Level, TransferKind};

use super::disk;
use super::fixtures::store::{StoreFixture, TOKEN_BYTES, Tensors, layout};
use super::fixtures::{Outcome, Scratch, memory, say};
use super::index::{self, resident};
use super::{Bar, median};

/// Environment variable with the directory in which a process stores cells and then crashes.
const CRASH: &str = "KVTIER_BENCH_CRASH";
const CELLS: u64 = 1_000_000;
const LAYERS: usize = 32;
/// Chunks of a put: 64 MiB with cells of one block.
const CHUNKS: u64 = 512;
/// Tokens of a chunk, and bytes of K or V for a token.
const SMALL: (u32, u64) = (16, 128);
/// Bytes of a put or get under load.
const STORM_BYTES: u64 = 32 << 20;

fn open(dir: &Path) -> Result<StoreFixture> {
    let spec = format!(
        "store(host=256MiB,policy=lru,chunks=65536,disk=disk(path=\"{}\",bytes=8GiB))",
        dir.display()
    );
    StoreFixture::open(&spec, layout(LAYERS, SMALL.0, SMALL.1)?, None)
}

/// Stores a million cells, writes a checkpoint, stores some more cells, and crashes.
fn crash(dir: &Path) -> Outcome<()> {
    let bytes = CHUNKS * LAYERS as u64 * 4096;
    let tensors = Tensors::with_token_bytes(bytes, LAYERS, SMALL.1).map_err(say)?;
    let puts = CELLS.div_ceil(CHUNKS * LAYERS as u64) as u32;
    let run = || -> Result<()> {
        let fixture = open(dir)?;
        let put = |number| {
            let session = fixture.session(number, tensors.tokens)?;
            fixture.transfer(session, TransferKind::Put, Level::Disk, tensors.whole(false))?;
            fixture.end(session)
        };
        (0..puts).try_for_each(put)?;
        let disk = fixture.store.disk().ok_or(Status::State)?;
        let written = disk.stats().checkpoints;
        fixture.store.with(|core| {
            core.request_checkpoint();
            Ok(())
        })?;
        while disk.stats().checkpoints == written {
            std::thread::sleep(Duration::from_millis(1));
        }
        put(puts)?;
        // SAFETY: kills this process, as a crash would.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
        Ok(())
    };
    run().map_err(say)
}

/// Seconds until the store is open, and until its checkpoint is read by plain calls.
fn reopen(bar: &mut Bar, rounds: u32) -> Outcome<()> {
    let scratch = Scratch::new("scale");
    std::fs::create_dir_all(&scratch.0).map_err(|e| e.to_string())?;
    let dir = scratch.0.join("tier");
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg("scale").env(CRASH, &dir).stdout(Stdio::null());
    let ended = command.status().map_err(|e| e.to_string())?;
    if ended.signal() != Some(libc::SIGKILL) {
        return Err(format!("the storing process did not crash: {ended}"));
    }
    let (mut ours, mut plain, mut last) = (Vec::new(), Vec::new(), None);
    let stock = memory(2 * disk::DEPTH * disk::PIECE).map_err(say)?;
    for _ in 0..rounds {
        let names = std::fs::read_dir(&dir).map_err(|e| e.to_string())?;
        let paths = names.filter_map(|entry| Some(entry.ok()?.path()));
        let is_index = |path: &std::path::PathBuf| path.to_string_lossy().contains("/index-");
        let index: Vec<_> = paths.filter(is_index).collect();
        let bytes = index.iter().filter_map(|path| path.metadata().ok()).map(|m| m.len()).sum();
        plain.push(disk::raw(&index, Access::Read, bytes, &stock, disk::DEPTH as usize)?);
        let start = Instant::now();
        let fixture = open(&dir).map_err(say)?;
        ours.push(start.elapsed().as_secs_f64());
        let opened = fixture.store.opened;
        if opened.adopted.cells < CELLS {
            return Err(format!("cells are missing after the crash: {opened:?}"));
        }
        last = Some(opened);
        drop(fixture); // without another checkpoint
    }
    (bar.value, bar.baseline_value) = (Some(median(&mut ours)), Some(median(&mut plain)));
    if let Some((report, adopted)) = last.and_then(|one| Some((one.disk?, one.adopted))) {
        let tier = report.elapsed_ns as f64 / 1e9;
        let scanned = report.scanned_records;
        let cells = adopted.cells;
        bar.note = format!("({cells} cells, {scanned} records scanned; the tier {tier:.2} s)");
    }
    Ok(())
}

/// Puts documents and gets earlier ones until `end`; counts the bytes moved.
fn talk(
    fixture: &StoreFixture,
    caller: u32,
    tensors: &Tensors,
    end: Instant,
    moved: &AtomicU64,
) -> Result<()> {
    /// Documents of each caller, used cyclically.
    const DOCUMENTS: u32 = 30;
    for turn in 0u32.. {
        let before = hash(u64::from(turn)) as u32 % (turn + 1).min(DOCUMENTS);
        for (turn, kind) in [(turn, TransferKind::Put), (turn - before, TransferKind::Get)] {
            let number = turn % DOCUMENTS * 2 + caller;
            let session = fixture.session(number, tensors.tokens)?;
            fixture.transfer(session, kind, Level::Ram, tensors.whole(false))?;
            fixture.end(session)?;
            moved.fetch_add(STORM_BYTES, Ordering::Relaxed);
        }
        if Instant::now() >= end {
            break;
        }
    }
    Ok(())
}

/// Runs puts and gets for some time; measures the largest resident memory above the budget.
fn storm(bar: &mut Bar, seconds: u64) -> Outcome<()> {
    const BUDGET: u64 = 512 << 20;
    let scratch = Scratch::new("storm");
    std::fs::create_dir_all(&scratch.0).map_err(|e| e.to_string())?;
    let spec = format!(
        "store(host=2GiB,chunks=65536,disk=disk(path=\"{}\",bytes=4GiB))",
        scratch.0.join("tier").display()
    );
    let tensors = || Tensors::new(STORM_BYTES, LAYERS).map_err(say);
    let callers = [tensors()?, tensors()?];
    let run = || -> Result<(u64, u64, u64)> {
        let fixture = StoreFixture::open(&spec, layout(LAYERS, 16, TOKEN_BYTES)?, Some(BUDGET))?;
        let before = resident();
        let (most, moved, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let end = Instant::now() + Duration::from_secs(seconds);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    most.fetch_max(resident(), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            let (fixture, moved) = (&fixture, &moved);
            let threads: Vec<_> = (0..)
                .zip(&callers)
                .map(|(caller, tensors)| {
                    scope.spawn(move || talk(fixture, caller, tensors, end, moved))
                })
                .collect();
            let ended = threads.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(_) => Err(Error::new(Status::Panic, "a caller's thread panicked")),
            });
            let ended = ended.collect::<Vec<_>>().into_iter().collect::<Result<()>>();
            stop.store(true, Ordering::Relaxed);
            ended
        })?;
        fixture.close()?;
        Ok((before, most.into_inner(), moved.into_inner()))
    };
    let (before, most, moved) = run().map_err(say)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    bar.value = Some(mib(most) - mib(before) - mib(BUDGET));
    bar.baseline_value = Some(0.0);
    bar.goal = Some((mib(BUDGET) * 0.02).max(32.0));
    let grown = mib(most.saturating_sub(before));
    bar.note = format!("({grown:.0} MiB more at most, {:.1} GiB moved)", mib(moved) / 1024.0);
    Ok(())
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    if let Some(dir) = std::env::var_os(CRASH) {
        if let Err(why) = crash(Path::new(&dir)) {
            eprintln!("kvtier: {why}");
        }
        return Vec::new();
    }
    let bar = |bar, unit, baseline, goal| Bar::lower(bar, unit).baseline(baseline).goal(goal);
    let mut bars = index::bars(quick);
    let plain = "its checkpoint by plain O_DIRECT calls";
    let mut opened = bar("open_of_1M_cells", "s", plain, 2.0);
    if let Err(why) = reopen(&mut opened, if quick { 3 } else { 7 }) {
        opened.note = why;
    }
    let mut grown = bar("memory_over_budget", "MiB", "the budget", 32.0);
    if let Err(why) = storm(&mut grown, if quick { 8 } else { 40 }) {
        grown.note = why;
    }
    bars.extend([opened, grown]);
    bars
}
