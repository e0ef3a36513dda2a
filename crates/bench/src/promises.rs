//! Group `promises`: properties of a store besides speed. They are disk utilisation and write
//! amplification, the cost of write-behind for gets, closes by polls, puts in long sessions, and
//! small gets beside large puts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvtier::base::status::{Result, Status};
use kvtier::meta::key::Key;
use kvtier::store::state::NamespaceOpts;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::trace::generate::{GenOpts, kind_of, make};

use super::fixtures::store::{StoreFixture, TOKEN_BYTES, Tensors, layout};
use super::fixtures::{Scratch, say};
use super::{Bar, Better, median};

const MIB: u64 = 1 << 20;
const HOUR_NS: i64 = 3_600_000_000_000;
/// Tokens of a chunk with cells of 64 KiB.
const CHUNK: u32 = 16;

fn bar(name: &'static str, unit: &'static str, goal: Option<f64>, better: Better) -> Bar {
    let (value, baseline, baseline_value, note) = (None, "", None, String::new());
    Bar::new(name, unit, better)
        .baseline(baseline)
        .baseline_value(baseline_value)
        .goal(goal)
        .value(value)
        .note(note)
}

/// Stores conversations of a trace, `times` the size of the disk, in chunks of `layers` layers.
/// Returns the share of the disk with live cells, and the bytes written for each byte of cells and
/// for each byte put.
fn churn(disk_bytes: u64, times: u64, layers: usize, write: &str) -> Result<[f64; 3]> {
    /// Bytes of cells of the longest request.
    const LONGEST_BYTES: u64 = 128 * MIB;
    let scratch = Scratch::new("churn");
    let chunk_bytes = u64::from(CHUNK) * 2 * TOKEN_BYTES * layers as u64;
    let target_chunks = times * disk_bytes / chunk_bytes;
    let kind = kind_of("chat")?;
    let opts = GenOpts { kind, duration_ns: HOUR_NS, seed: 1, rate: 0.0, block_tokens: CHUNK };
    let spec = format!(
        "store(host=128MiB,write={write},disk_policy=lru,disk=disk(path=\"{}\",bytes={disk_bytes}B))",
        scratch.0.display()
    );
    let fixture = StoreFixture::open(&spec, layout(layers, CHUNK, TOKEN_BYTES)?, None)?;
    let tensors = Tensors::new(LONGEST_BYTES, layers)?;
    let (mut stored, mut round) = (0, 0u64);
    while stored < target_chunks {
        let trace = make(&GenOpts { seed: 1 + round, ..opts })?;
        for request in trace.requests() {
            let blocks = trace.blocks(request);
            let most = (blocks.len() as u64).min(LONGEST_BYTES / chunk_bytes);
            let tokens = blocks.iter().take(most as usize).flat_map(|&block| {
                (0..CHUNK).map(move |i| {
                    (block as u32).wrapping_mul(2_654_435_761) ^ (round as u32) << 20 ^ i
                })
            });
            let tokens: Vec<u32> = tokens.collect();
            if tokens.is_empty() {
                continue;
            }
            let session = fixture.session_of(&tokens)?;
            let mut range = tensors.whole(false);
            range.tokens = tokens.len() as u64;
            let level = if write == "through" { Level::Disk } else { Level::Ram };
            fixture.transfer(session, TransferKind::Put, level, range)?;
            fixture.end(session)?;
            let report = fixture.store.inspect(|core| core.report())?;
            stored = report.stats.stored_cells / layers as u64;
            if stored >= target_chunks {
                break;
            }
        }
        round += 1;
    }
    fixture.store.settle(0)?;
    let report = fixture.store.inspect(|core| core.report())?;
    let stats = report.stats;
    let all = stats.disk_appended_bytes + stats.disk_compacted_bytes + stats.disk_overhead_bytes;
    fixture.close()?;
    let share = stats.disk_live_bytes as f64 / stats.disk_limit_bytes as f64;
    let put = stats.stored_cells * chunk_bytes / layers as u64;
    let [appended, put] = [stats.disk_appended_bytes, put].map(|bytes| bytes.max(1) as f64);
    Ok([share, all as f64 / appended, all as f64 / put])
}

fn churn_bars(quick: bool) -> Vec<Bar> {
    let sizes: &[(u64, usize, &str, &str, f64)] = &[
        (1024 * MIB, 2, "disk_share_1GiB", "disk_writes_1GiB", 0.85),
        (10 * 1024 * MIB, 2, "disk_share_10GiB", "disk_writes_10GiB", 0.90),
        (10 * 1024 * MIB, 32, "disk_share_10GiB_32_layers", "disk_writes_10GiB_32_layers", 0.90),
    ];
    let mut bars = Vec::new();
    for &(bytes, layers, share, writes, goal) in
        sizes.iter().take(if quick { 1 } else { sizes.len() })
    {
        let mut pair = [
            bar(share, "of disk", Some(goal), Better::Higher),
            bar(writes, "of cells", Some(1.5), Better::Lower),
        ];
        match churn(bytes, 3, layers, "through") {
            Ok([has, wrote, _]) => (pair[0].value, pair[1].value) = (Some(has), Some(wrote)),
            Err(error) => pair.iter_mut().for_each(|bar| bar.note = say(error.clone())),
        }
        bars.extend(pair);
    }
    bars
}

/// The bytes written with write-behind, beside write-through.
fn less_bar() -> Bar {
    let mut bar = bar("writes_behind_1GiB", "of through", None, Better::Lower);
    bar.baseline = "write=through, the same puts";
    let pair = |_| -> Result<f64> {
        let [through, behind] = ["through", "behind"].map(|write| churn(1024 * MIB, 3, 2, write));
        Ok(behind?[2] / through?[2])
    };
    match (0..3).map(pair).collect::<Result<Vec<f64>>>() {
        Ok(mut parts) => (bar.value, bar.baseline_value) = (Some(median(&mut parts)), Some(1.0)),
        Err(error) => bar.note = say(error),
    }
    bar
}

/// Seconds of gets from memory, with and without concurrent writes of the last put.
fn behind_pairs(rounds: u32) -> Result<Vec<(f64, f64)>> {
    const LAYERS: usize = 8;
    const MOVE: u64 = 64 * MIB;
    /// Rounds until all memory was used.
    const WARM: u32 = 10;
    let tensors = Tensors::new(MOVE, LAYERS)?;
    let open = |write: &str, scratch: &Scratch| {
        let spec = format!(
            "store(host=512MiB,policy=lru,write={write},disk=disk(path=\"{}\",bytes=4GiB))",
            scratch.0.display()
        );
        StoreFixture::open(&spec, layout(LAYERS, CHUNK, TOKEN_BYTES)?, None)
    };
    let (behind, back) = (Scratch::new("behind"), Scratch::new("back"));
    let stores = [open("behind(age=1ms)", &behind)?, open("back", &back)?];
    let mut pairs = Vec::new();
    for round in 0..rounds + WARM {
        let mut took = [0.0; 2];
        for at in [round as usize % 2, (round as usize + 1) % 2] {
            let fixture = &stores[at];
            let session = fixture.session(round, tensors.tokens)?;
            fixture.transfer(session, TransferKind::Put, Level::Ram, tensors.whole(false))?;
            fixture.end(session)?;
            for _ in 0..3 {
                let session = fixture.session(round.saturating_sub(1), tensors.tokens)?;
                took[at] += fixture.transfer(
                    session,
                    TransferKind::Get,
                    Level::Ram,
                    tensors.whole(false),
                )?[0];
                fixture.end(session)?;
            }
            // Waits until no write is in progress, so that the other store runs alone.
            while fixture.store.inspect(|core| core.unwritten().0 > 0 || !core.is_idle())? {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
        if round >= WARM {
            pairs.push((took[0], took[1]));
        }
    }
    stores.into_iter().try_for_each(StoreFixture::close)?;
    Ok(pairs)
}

fn behind_bar(quick: bool) -> Bar {
    let mut bar = bar("get_beside_writes", "of rate", Some(0.97), Better::Higher);
    bar.baseline = "the same gets, nothing is written";
    match behind_pairs(if quick { 9 } else { 25 }) {
        Ok(pairs) => {
            let mut parts: Vec<f64> = pairs.iter().map(|(with, without)| without / with).collect();
            (bar.value, bar.baseline_value) = (Some(median(&mut parts)), Some(1.0));
        }
        Err(error) => bar.note = say(error),
    }
    bar
}

/// Seconds of closing a store with many short sessions, by polls or by waiting.
fn close(sessions: u32, by_polls: bool) -> Result<f64> {
    let scratch = Scratch::new("close");
    let spec = format!(
        "store(host=256MiB,write=back,sessions={},disk=disk(path=\"{}\",bytes=1GiB))",
        sessions + 1,
        scratch.0.display()
    );
    let fixture = StoreFixture::open(&spec, layout(1, 4, 512)?, None)?;
    let tensors = Tensors::with_token_bytes(4096, 1, 512)?;
    for number in 0..sessions {
        let session = fixture.session(number, 4)?;
        fixture.transfer(session, TransferKind::Put, Level::Ram, tensors.whole(false))?;
    }
    let start = Instant::now();
    match by_polls {
        false => fixture.store.close(0)?,
        true => loop {
            match fixture.store.close(fixture.now_ns() + 100_000) {
                Err(error) if error.status() == Status::Busy => {}
                ended => break ended?,
            }
        },
    }
    Ok(start.elapsed().as_secs_f64())
}

fn close_bar(quick: bool) -> Bar {
    let mut bar = bar("close_by_polls", "of waiting", Some(2.0), Better::Lower);
    bar.baseline = "one call that waits";
    let sessions = if quick { 2000 } else { 10_000 };
    let pair = |round: u32| -> Result<f64> {
        let first = close(sessions, round % 2 == 0)?;
        let second = close(sessions, round % 2 == 1)?;
        Ok(if round % 2 == 0 { first / second } else { second / first })
    };
    match (0..5).map(pair).collect::<Result<Vec<f64>>>() {
        Ok(mut parts) => (bar.value, bar.baseline_value) = (Some(median(&mut parts)), Some(1.0)),
        Err(error) => bar.note = say(error),
    }
    bar
}

/// Nanoseconds of a put of one chunk at the end of sessions of given lengths, as of an engine that
/// decodes. The first puts find caches filled by the prompt and do not count.
fn put_at<const N: usize>(lengths: [u32; N], rounds: u32) -> Result<[f64; N]> {
    const PUTS: u32 = 12;
    const WARM: u32 = 4;
    let fixture = StoreFixture::open("store(host=1GiB,policy=lru)", layout(1, CHUNK, 128)?, None)?;
    let tensors = Tensors::with_token_bytes(u64::from(CHUNK) * 256, 1, 128)?;
    let mut took = [const { Vec::new() }; N];
    for round in 0..rounds {
        for (at, &length) in lengths.iter().enumerate() {
            let document = (at as u32 + 1) << 9 | round;
            let tokens = u64::from(length * CHUNK);
            let session = fixture.session(document, tokens)?;
            let whole = Tensors::with_token_bytes(tokens * 256, 1, 128)?;
            fixture.transfer(session, TransferKind::Put, Level::Ram, whole.whole(false))?;
            for put in 0..PUTS {
                let one: Vec<u32> = (0..CHUNK).map(|i| 1 << 31 | document << 8 | i).collect();
                fixture.store.with(|core| core.append(session, &one))?;
                let mut range = tensors.whole(false);
                range.first_token = tokens + u64::from(put * CHUNK);
                let ns = fixture.transfer(session, TransferKind::Put, Level::Ram, range)?[0] * 1e9;
                took[at].extend((put >= WARM).then_some(ns));
            }
            fixture.end(session)?;
        }
    }
    fixture.close()?;
    Ok(took.map(|mut ns| median(&mut ns)))
}

fn length_bar(quick: bool) -> Bar {
    let mut bar = bar("put_at_4096_chunks", "of at 8", Some(1.2), Better::Lower);
    bar.baseline = "a put of one chunk in a session of 8";
    match put_at([8, 64, 512, 4096], if quick { 30 } else { 200 }) {
        Ok(all) => {
            (bar.value, bar.baseline_value) = (Some(all[3] / all[0]), Some(1.0));
            let words: Vec<String> = all.iter().map(|ns| format!("{:.1}", ns / 1e3)).collect();
            bar.note = format!("(8, 64, 512, 4096 chunks: {} µs)", words.join(", "));
        }
        Err(error) => bar.note = say(error),
    }
    bar
}

/// p99.9 in microseconds of gets of a 64 KiB cell with one copy worker, alone and beside puts of
/// 4 MiB cells. Memory is filled first: the first touch of a page can take a virtual machine
/// milliseconds.
fn slowest(gets: u32) -> Result<(f64, f64)> {
    const FILLS: u32 = 40;
    let fixture = StoreFixture::open(
        "store(host=512MiB,policy=lru,copiers=1)",
        layout(1, CHUNK, TOKEN_BYTES)?,
        None,
    )?;
    let long = layout(1, 1024, TOKEN_BYTES)?;
    let opts = NamespaceOpts { key: Key([7; 32]), layout: long, holes: false };
    let namespace = fixture.store.with(|core| core.open_namespace(&opts))?;
    let small = Tensors::new(64 << 10, 1)?;
    let large = Tensors::new(16 * MIB, 1)?;
    let session = fixture.session(1, small.tokens)?;
    fixture.transfer(session, TransferKind::Put, Level::Ram, small.whole(false))?;
    let put = |document: u32| -> Result<()> {
        let session = fixture.session_in(namespace, document, large.tokens)?;
        fixture.transfer(session, TransferKind::Put, Level::Ram, large.whole(false))?;
        fixture.end(session)
    };
    (0..FILLS).try_for_each(put)?;
    let time = || -> Result<f64> {
        let mut all = Vec::new();
        for _ in 0..gets {
            all.push(
                fixture.transfer(session, TransferKind::Get, Level::Ram, small.whole(false))?[0]
                    * 1e6,
            );
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() * 999 / 1000])
    };
    let alone = time()?;
    let is_over = AtomicBool::new(false);
    let beside = std::thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<()> {
            let go_on = |_: &u32| !is_over.load(Ordering::Relaxed);
            (FILLS..).take_while(go_on).try_for_each(put)
        });
        let beside = time();
        is_over.store(true, Ordering::Relaxed);
        writer.join().map_err(|_| Status::Panic)??;
        beside
    })?;
    fixture.end(session)?;
    fixture.close()?;
    Ok((alone, beside))
}

fn slowest_bar(quick: bool) -> Bar {
    let mut bar = bar("p999_get_beside_puts", "of alone", Some(5.0), Better::Lower);
    bar.baseline = "the same gets alone";
    let rounds = if quick { 3 } else { 7 };
    match (0..rounds).map(|_| slowest(5000)).collect::<Result<Vec<(f64, f64)>>>() {
        Ok(all) => {
            let mut parts: Vec<f64> = all.iter().map(|(alone, beside)| beside / alone).collect();
            (bar.value, bar.baseline_value) = (Some(median(&mut parts)), Some(1.0));
            let (mut alone, mut beside): (Vec<f64>, Vec<f64>) = all.into_iter().unzip();
            bar.note = format!("({:.0} against {:.0} µs)", median(&mut beside), median(&mut alone));
        }
        Err(error) => bar.note = say(error),
    }
    bar
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = churn_bars(quick);
    bars.extend((!quick).then(less_bar));
    bars.extend([behind_bar(quick), close_bar(quick), length_bar(quick), slowest_bar(quick)]);
    bars
}
