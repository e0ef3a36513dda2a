//! Group `disk`: bandwidth of I/O engines and of the disk tier, beside plain O_DIRECT calls of the
//! same size, depth and durability. `KVTIER_BENCH_DIR` names the directory; by default that for
//! temporary files.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvtier::base::memory::Buffer;
use kvtier::format::keys::{Fingerprint, Key};
use kvtier::format::record::Chunk;
use kvtier::format::seal::{Identity, PLANE_K, PLANE_V};
use kvtier::io::files::{Access, Files, Piece};
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{DiskTier, GetPlane, Gets, Options, PutPlane, Puts, ReadFeed, Spot};

use super::fixtures::{Outcome, Scratch, huge_memory, say};
use super::{Bar, median};

/// Bytes of a transfer and of a cell.
pub const PIECE: u64 = 1 << 20;
/// Concurrent transfers.
pub const DEPTH: u64 = 8;

/// Creates a file of `bytes` allocated and unwritten bytes.
pub fn allocated(path: &Path, bytes: u64) -> Outcome<()> {
    let file = File::options().write(true).create(true).truncate(true).open(path).map_err(say)?;
    // SAFETY: an open file and integers.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as i64) } {
        0 => file.sync_all().map_err(say),
        code => Err(say(std::io::Error::from_raw_os_error(code))),
    }
}

/// The segments of a disk tier, sorted by name.
pub fn segments(dir: &Path) -> Outcome<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).map_err(say)?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(say)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("seg-") {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// Seconds of plain calls over the first bytes of files, `depth` of them concurrently. Writes are
/// synced at the end.
pub fn raw(
    paths: &[PathBuf],
    access: Access,
    bytes: u64,
    stock: &Buffer,
    depth: usize,
) -> Outcome<f64> {
    let mut pieces = Vec::new();
    let mut files = Vec::new();
    for path in paths {
        let mut options = File::options();
        options.read(true).write(access == Access::Write).custom_flags(libc::O_DIRECT);
        let file = options.open(path).map_err(|e| format!("without O_DIRECT: {e}"))?;
        let pieces_of = file.metadata().map_err(say)?.len() / PIECE;
        pieces.extend((0..pieces_of).map(|at| (file.as_raw_fd(), at * PIECE)));
        files.push(file);
    }
    pieces.truncate((bytes / PIECE) as usize);
    let start = Instant::now();
    let places = (stock.bytes() / PIECE) as usize;
    let pass = |first: usize| {
        for (at, &(fd, offset)) in pieces.iter().enumerate().skip(first).step_by(depth) {
            let place = (at % places) as u64 * PIECE;
            let address = stock.range(place, PIECE).unwrap_or(stock.address()).cast();
            // SAFETY: inside the buffer. Where a thread is `places` pieces behind another, both
            // fill the same part; its content is not used.
            let got = unsafe {
                match access {
                    Access::Read => libc::pread(fd, address, PIECE as usize, offset as i64),
                    Access::Write => libc::pwrite(fd, address, PIECE as usize, offset as i64),
                }
            };
            if got != PIECE as isize {
                return Err(format!("a transfer moved {got} of {PIECE} bytes"));
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let pass = &pass;
        let threads: Vec<_> = (0..depth).map(|first| scope.spawn(move || pass(first))).collect();
        let ended =
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a panic".to_string())?);
        ended.collect::<Outcome<()>>()
    })?;
    if access == Access::Write {
        files.iter().try_for_each(File::sync_data).map_err(say)?;
    }
    let read = pieces.len() as u64 * PIECE;
    Ok(start.elapsed().as_secs_f64() * bytes as f64 / read.max(1) as f64)
}

/// Two measurements in alternating order, since the second may find warmer caches.
pub fn in_turn(
    turn: u32,
    ours: impl FnOnce() -> Outcome<f64>,
    raw: impl FnOnce() -> Outcome<f64>,
) -> Outcome<(f64, f64)> {
    if turn % 2 == 0 {
        let raw = raw()?;
        return Ok((ours()?, raw));
    }
    Ok((ours()?, raw()?))
}

fn transfers(
    files: &RealFiles,
    name: &str,
    access: Access,
    bytes: u64,
    stock: &Buffer,
) -> Outcome<f64> {
    let file = files.open(name).map_err(say)?;
    let start = Instant::now();
    for first in (0..bytes).step_by((DEPTH * PIECE) as usize) {
        let piece = |i: u64| {
            let address = stock.range(i * PIECE, PIECE).unwrap_or(stock.address());
            Piece::one(file, access, first + i * PIECE, address, PIECE)
        };
        let mut pieces: Vec<Piece> = (0..DEPTH).map(piece).collect();
        // SAFETY: only this benchmark uses the buffer.
        unsafe { files.transfer(&mut pieces) };
        pieces.into_iter().try_for_each(|piece| piece.result).map_err(say)?;
    }
    if access == Access::Write {
        files.sync(file).map_err(say)?;
    }
    let took = start.elapsed().as_secs_f64();
    files.close(file);
    Ok(took)
}

fn chunk_of(number: u64) -> Chunk {
    let mut key = Key([7; 32]);
    key.0[..8].copy_from_slice(&number.to_le_bytes());
    Chunk {
        namespace: Key([1; 32]),
        parent: Key([1; 32]),
        key,
        fingerprint: Fingerprint([3; 32]),
        position: 0,
        valid_tokens: 256,
    }
}

/// Appends cells in batches of `DEPTH` and makes them durable; returns seconds and their spots.
fn append(tier: &DiskTier, bytes: u64, stock: &Buffer) -> Outcome<(f64, Vec<(Spot, u64)>)> {
    let (mut places, start) = (Vec::new(), Instant::now());
    for first in (0..bytes / PIECE).step_by(DEPTH as usize) {
        let mut puts = Puts::default();
        for i in 0..DEPTH {
            puts.record(chunk_of(first + i));
            puts.cell(0, 0, 0, true);
            for (kind, half) in [(PLANE_K, 0), (PLANE_V, PIECE / 2)] {
                let address = stock.range(i * PIECE + half, PIECE / 2);
                let address = address.unwrap_or(stock.address()).cast_const();
                let (id, version, sum, bytes) = (0, 0, None, PIECE / 2);
                puts.plane(PutPlane { kind, id, version, bytes, address, sum });
            }
        }
        // SAFETY: the buffer outlives the call.
        unsafe { tier.append(&mut puts) };
        for (put, cells) in puts.iter() {
            put.result.clone().map_err(say)?;
            places.extend(cells.iter().map(|cell| (cell.spot, cell.seal)));
        }
    }
    tier.commit_all().map_err(say)?;
    Ok((start.elapsed().as_secs_f64(), places))
}

/// Runs `then` while a thread makes the next segments, as the upkeep worker of a store does.
fn with_upkeep<T>(tier: &DiskTier, then: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Acquire) {
                if tier.wants_prepare() {
                    tier.prepare();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let result = then();
        is_over.store(true, Ordering::Release);
        result
    })
}

/// Processor time of all threads, in seconds.
pub fn processor() -> f64 {
    // SAFETY: a struct of integers may be zero.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: a valid output.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut used) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(used.ru_utime) + seconds(used.ru_stime)
}

/// Batches of `DEPTH` cells for one caller, two of them in memory at once.
struct Batches<'a> {
    waiting: Vec<(usize, &'a [(Spot, u64)])>,
    stock: &'a Buffer,
    /// The batch in each half of the memory.
    halves: [Option<usize>; 2],
    failed: Option<String>,
}

impl ReadFeed for Batches<'_> {
    fn next(&mut self) -> Option<(usize, Gets, Range<usize>)> {
        let free = self.halves.iter().position(Option::is_none)?;
        let (number, batch) = self.waiting.pop()?;
        self.halves[free] = Some(number);
        let half = free as u64 * DEPTH * PIECE;
        let mut gets = Gets::default();
        for (i, &(spot, seal)) in batch.iter().enumerate() {
            let chunk = chunk_of(number as u64 * DEPTH + i as u64);
            let (key, fingerprint) = (chunk.key, chunk.fingerprint);
            let identity = Identity { key, fingerprint, layer: 0, valid_tokens: 256, codec: 0 };
            gets.cell(spot, identity, seal, true);
            for (kind, part) in [(PLANE_K, 0), (PLANE_V, PIECE / 2)] {
                let address = self.stock.range(half + i as u64 * PIECE + part, PIECE / 2);
                let address = address.unwrap_or(self.stock.address());
                gets.plane(GetPlane { kind, id: 0, version: 0, bytes: PIECE / 2, address });
            }
        }
        let all = 0..gets.len();
        Some((number, gets, all))
    }

    fn done(&mut self, number: usize, gets: Gets) {
        self.halves.iter_mut().filter(|half| **half == Some(number)).for_each(|half| *half = None);
        let failed = gets.iter().find_map(|get| get.result.as_ref().err());
        self.failed = self.failed.take().or(failed.map(|error| say(error.clone())));
    }
}

/// Reads cells on `callers` threads, as the read workers of a store do: the next batch begins while
/// the last one arrives. Returns seconds and processor seconds.
fn read(tier: &DiskTier, places: &[(Spot, u64)], callers: usize) -> Outcome<(f64, f64)> {
    let stocks: Vec<Buffer> = (0..callers)
        .map(|_| huge_memory(2 * DEPTH * PIECE).map_err(say))
        .collect::<Outcome<_>>()?;
    let (start, used) = (Instant::now(), processor());
    let pass = |caller: usize| {
        let batches = places.chunks(DEPTH as usize).enumerate().skip(caller).step_by(callers);
        let mut waiting: Vec<_> = batches.collect();
        waiting.reverse();
        let mut feed = Batches { waiting, stock: &stocks[caller], halves: [None; 2], failed: None };
        // SAFETY: each thread has its own memory, and two batches at most share it.
        unsafe { tier.read_all(&mut feed) };
        feed.failed.map_or(Ok(()), Err)
    };
    std::thread::scope(|scope| {
        let pass = &pass;
        let threads: Vec<_> = (0..callers).map(|i| scope.spawn(move || pass(i))).collect();
        let ended =
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a panic".to_string())?);
        ended.collect::<Outcome<()>>()
    })?;
    Ok((start.elapsed().as_secs_f64(), processor() - used))
}

/// A bar of a share of the raw bandwidth.
pub fn part_of_raw(bar: &'static str, baseline: &'static str, goal: Option<f64>) -> Bar {
    Bar::higher(bar, "of raw").baseline(baseline).goal(goal)
}

/// Fills a bar from pairs of seconds, of kvtier and of the baseline, for `bytes` bytes.
pub fn fill(bar: &mut Bar, pairs: &[(f64, f64)], bytes: u64) {
    let gib = bytes as f64 / f64::from(1 << 30);
    let mut parts: Vec<f64> = pairs.iter().map(|(ours, raw)| raw / ours).collect();
    let mut ours: Vec<f64> = pairs.iter().map(|(ours, _)| gib / ours).collect();
    let mut raws: Vec<f64> = pairs.iter().map(|(_, raw)| gib / raw).collect();
    bar.value = Some(median(&mut parts));
    bar.baseline_value = Some(1.0);
    bar.note = format!("({:.2} against {:.2} GiB/s)", median(&mut ours), median(&mut raws));
}

/// The measurements, one pair a round.
#[derive(Default)]
struct Pairs {
    seconds: [Vec<(f64, f64)>; 5],
    /// Processor time of writes, and of reads by one caller, verified and not.
    used: [Vec<(f64, f64)>; 3],
}

/// Reads cells and plain files in turn; returns the seconds and the processor seconds of both.
fn read_pair(
    turn: u32,
    tier: &DiskTier,
    (segments, places): (&[PathBuf], &[(Spot, u64)]),
    callers: usize,
    stock: &Buffer,
) -> Outcome<[(f64, f64); 2]> {
    let mut used = (0.0, 0.0);
    let depth = DEPTH as usize * callers;
    let plain = || {
        let before = processor();
        let took = raw(segments, Access::Read, places.len() as u64 * PIECE, stock, depth);
        used.1 = processor() - before;
        took
    };
    let ours = || {
        let (took, cost) = read(tier, places, callers)?;
        used.0 = cost;
        Ok(took)
    };
    let seconds = in_turn(turn, ours, plain)?;
    Ok([seconds, used])
}

fn round(pairs: &mut Pairs, turn: u32, bytes: u64, stock: &Buffer) -> Outcome<()> {
    let scratch = Scratch::new("disk");
    let files = RealFiles::open(&scratch.0, &RealOpts::default()).map_err(say)?;
    let (plain, own) = (scratch.0.join("plain"), scratch.0.join("own"));
    allocated(&plain, bytes)?;
    allocated(&own, bytes)?;
    let depth = DEPTH as usize;
    let write = || raw(std::slice::from_ref(&plain), Access::Write, bytes, stock, depth);
    let ours = || transfers(&files, "own", Access::Write, bytes, stock);
    pairs.seconds[0].push(in_turn(turn, ours, write)?);
    let ours = || transfers(&files, "own", Access::Read, bytes, stock);
    let read_own = || raw(std::slice::from_ref(&own), Access::Read, bytes, stock, depth);
    pairs.seconds[1].push(in_turn(turn, ours, read_own)?);
    allocated(&plain, bytes)?;
    let dir = scratch.0.join("tier");
    let open = |verify| {
        let files = RealFiles::open(&dir, &RealOpts::default()).map_err(say)?;
        let options = Options { verify, ..Options::new(bytes * 2 + (1 << 28), [5; 16]) };
        DiskTier::open(Arc::new(files), options).map(|(tier, ..)| tier).map_err(say)
    };
    let tier = open(true)?;
    let (mut places, mut used) = (Vec::new(), (0.0, 0.0));
    let write = || {
        let before = processor();
        let took = write();
        used.1 = processor() - before;
        took
    };
    let ours = || {
        let before = processor();
        let (took, written) = with_upkeep(&tier, || append(&tier, bytes, stock))?;
        (places, used.0) = (written, processor() - before);
        Ok(took)
    };
    pairs.seconds[2].push(in_turn(turn, ours, write)?);
    pairs.used[0].push(used);
    let segments = segments(&dir)?;
    let layout = (segments.as_slice(), places.as_slice());
    for (at, callers) in [(3, 1), (4, 2)] {
        let [seconds, used] = read_pair(turn, &tier, layout, callers, stock)?;
        pairs.seconds[at].push(seconds);
        if callers == 1 {
            pairs.used[1].push(used);
        }
    }
    tier.close().map_err(say)?;
    drop(tier);
    let left = self::segments(&dir)?;
    let layout = (left.as_slice(), places.as_slice());
    // The same reads without verification of the bytes.
    let [_, used] = read_pair(turn, &open(false)?, layout, 1, stock)?;
    pairs.used[2].push(used);
    Ok(())
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let calls = "plain O_DIRECT calls, 1 MiB, 8 at once";
    let more = "plain O_DIRECT calls, 1 MiB, 16 at once";
    let mut bars = [
        part_of_raw("transfer_write", calls, None),
        part_of_raw("transfer_read", calls, None),
        part_of_raw("append_durable", calls, Some(0.90)),
        part_of_raw("read_one_caller", calls, None),
        part_of_raw("read_two_callers", more, Some(0.95)),
    ];
    let (bytes, rounds) = if quick { (256 << 20, 6) } else { (1 << 30, 8) };
    let mut pairs = Pairs::default();
    let stock = huge_memory(2 * DEPTH * PIECE).map_err(say);
    let measured = stock
        .and_then(|stock| (0..rounds).try_for_each(|turn| round(&mut pairs, turn, bytes, &stock)));
    for (bar, pairs) in bars.iter_mut().zip(&pairs.seconds) {
        match &measured {
            Ok(()) => fill(bar, pairs, bytes),
            Err(why) => bar.note.clone_from(why),
        }
    }
    let mut all: Vec<Bar> = bars.into();
    let bars =
        [("write_processor", 10.0), ("read_processor", 10.0), ("read_processor_unverified", 8.0)];
    for ((bar, goal), used) in bars.into_iter().zip(&pairs.used) {
        all.push(used_bar(bar, Some(goal), used, bytes));
    }
    all
}

/// Percent of a core for each GB/s of transfers.
pub fn used_bar(bar: &'static str, goal: Option<f64>, pairs: &[(f64, f64)], bytes: u64) -> Bar {
    let percent = |seconds: f64| seconds / (bytes as f64 / 1e9) * 100.0;
    let mut ours: Vec<f64> = pairs.iter().map(|(ours, _)| percent(*ours)).collect();
    let mut raws: Vec<f64> = pairs.iter().map(|(_, raw)| percent(*raw)).collect();
    let is_there = !pairs.is_empty();
    Bar::lower(bar, "%/(GB/s)")
        .baseline("the same by plain calls")
        .baseline_value(is_there.then(|| median(&mut raws)))
        .goal(goal)
        .value(is_there.then(|| median(&mut ours)))
}
