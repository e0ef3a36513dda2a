//! The store: what a put and a get cost beside copying the same buffers, what a cell
//! costs in the tables, and what comes back from disk beside plain reads.

use std::sync::Arc;
use std::time::Instant;

use kvtier::base::memory::Buffer;
use kvtier::base::status::{Result, Status};
use kvtier::io::files::Access;
use kvtier::meta::key::Key;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{CellRange, Config, SessionOpts, SpaceOpts, StoreState, Wanted};

use super::disk::{self, Outcome, Scratch, memory, part_of_raw};
use super::home::{Home, TOKEN_BYTES, Tensors, layout, say};
use super::overlap;
use super::peers::thread_ns;
use super::{Bar, Better, median};

const LAYERS: usize = 8;
/// What one put or get moves.
const MOVE_BYTES: u64 = 64 << 20;
/// Puts that memory has room for.
const MOVES: u32 = 6;

/// Seconds of copying planes of so many bytes between the tensors and a part of a pool.
fn copies(tensors: &Tensors, pool: &Buffer, part: u64, plane: u64, kind: TransferKind) -> f64 {
    let start = Instant::now();
    for at in (0..MOVE_BYTES).step_by(plane as usize) {
        let engine = tensors.memory.address().wrapping_add(at as usize);
        let ours = pool.address().wrapping_add((part * MOVE_BYTES + at) as usize);
        let (from, to) = if kind == TransferKind::Put { (engine, ours) } else { (ours, engine) };
        // SAFETY: inside buffers that are this benchmark's own.
        unsafe { to.copy_from_nonoverlapping(from, plane as usize) };
    }
    start.elapsed().as_secs_f64()
}

/// Puts and gets of cells of one size, beside memcpy; pairs of seconds.
fn host_pairs(chunk: u32, rounds: u32, copiers: u32) -> Result<[Vec<(f64, f64)>; 2]> {
    let failed = |text: String| kvtier::base::status::Error::new(Status::NoMem, text);
    let tensors = Tensors::new(MOVE_BYTES, LAYERS).map_err(failed)?;
    let pool = memory(u64::from(MOVES) * MOVE_BYTES).map_err(failed)?;
    let bytes = (u64::from(MOVES) + 2) * MOVE_BYTES;
    let spec = format!("store(host={bytes}B,policy=lru,copiers={copiers},chunks=65536)");
    let home = Home::open(&spec, layout(LAYERS, chunk, TOKEN_BYTES)?, None)?;
    let plane = u64::from(chunk) * TOKEN_BYTES;
    let mut pairs = [Vec::new(), Vec::new()];
    for round in 0..rounds + MOVES + 3 {
        let session = home.session(round, tensors.tokens)?;
        let part = u64::from(round % MOVES);
        let raw = copies(&tensors, &pool, part, plane, TransferKind::Put);
        let put = home.carry(session, TransferKind::Put, Level::Ram, tensors.whole(false))?[0];
        home.end(session)?;
        // The one that was put some time ago: nothing of it is in a near cache.
        let session = home.session(round.saturating_sub(2), tensors.tokens)?;
        let raw_get =
            copies(&tensors, &pool, u64::from((round + 2) % MOVES), plane, TransferKind::Get);
        let get = home.carry(session, TransferKind::Get, Level::Ram, tensors.whole(false))?[0];
        home.end(session)?;
        // Once memory is full and known to the machine.
        if round >= MOVES + 3 {
            pairs[0].push((put, raw));
            pairs[1].push((get, raw_get));
        }
    }
    home.close()?;
    Ok(pairs)
}

fn host_bars(quick: bool) -> Vec<Bar> {
    let memcpy = "memcpy of the same planes, one thread";
    let bar = |name, goal| Bar { unit: "of memcpy", ..part_of_raw(name, memcpy, goal) };
    let all = [
        ("host_put_1MiB", "host_get_1MiB", 256, 1, Some(0.90)),
        ("host_put_64KiB", "host_get_64KiB", 16, 1, Some(0.75)),
        ("host_put_1MiB_2_threads", "host_get_1MiB_2_threads", 256, 2, None),
    ];
    let mut bars = Vec::new();
    for (put, get, chunk, copiers, goal) in all {
        let mut two = [bar(put, goal), bar(get, goal)];
        match host_pairs(chunk, if quick { 15 } else { 60 }, copiers) {
            Ok(pairs) => {
                let filled = two.iter_mut().zip(&pairs);
                filled.for_each(|(bar, pairs)| disk::fill(bar, pairs, MOVE_BYTES));
            }
            Err(error) => two.iter_mut().for_each(|bar| bar.note = say(error.clone())),
        }
        bars.extend(two);
    }
    bars
}

/// A core without hands: what is decided costs, and nothing else.
struct Bare {
    core: StoreState,
    space: u32,
    views: Arc<Views>,
    layers: u32,
}

/// Tokens and bytes of a token of cells that nobody copies.
const BARE: (u32, u64) = (16, 128);
/// Such cells that memory has room for.
const BARE_CELLS: u32 = 1 << 14;

impl Bare {
    /// One whose chunks have so many layers.
    fn open(layers: u32) -> Result<Bare> {
        let config = Config {
            host_bytes: u64::from(BARE_CELLS) * 4096,
            host_policy: "lru".into(),
            max_chunks: (2 * BARE_CELLS / layers) as usize,
            ..Config::default()
        };
        let mut core = StoreState::new(config, None, None)?;
        let layout = layout(layers as usize, BARE.0, BARE.1)?;
        let space = core.open_space(&SpaceOpts { key: Key([3; 32]), layout, holes: false })?;
        // Never touched: nobody carries the work out.
        let plane = PlaneView::canonical(4096, 1 << 20, BARE.1);
        let layer = LayerViews { k: plane.clone(), v: Some(plane) };
        let views = Arc::new(Views(vec![layer; layers as usize]));
        let mut bare = Bare { core, space, views, layers };
        // Every table is full and was used: from here on what comes sends others away.
        let chunks = 512 / layers;
        for document in 0..BARE_CELLS / 256 {
            bare.cost(TransferKind::Put, 1000 + document, chunks, chunks)?;
        }
        Ok(bare)
    }

    fn session(&mut self, document: u32, chunks: u32) -> Result<u32> {
        let tokens: Vec<u32> = (0..chunks * BARE.0).map(|i| document << 20 | i).collect();
        let number = self.core.open_session(self.space, &SessionOpts::default())?;
        self.core.append(number, &tokens)?;
        Ok(number)
    }

    fn carry(&mut self, session: u32, kind: TransferKind, first: u32, chunks: u32) -> Result<()> {
        let what = CellRange {
            first_token: u64::from(first * BARE.0),
            tokens: u64::from(chunks * BARE.0),
            first_layer: 0,
            layers: self.layers as usize,
            by_layer: false,
            wanted: Wanted::All,
            views: self.views.clone(),
            after: None,
        };
        self.core.submit_cell_range(session, kind, Level::Ram, 0, what)?;
        while let Some(work) = self.core.take(WorkerKind::Copy) {
            self.core.done(work, Ok(()), 0);
        }
        let mut finished = Vec::new();
        self.core.finished(&mut finished);
        match finished.pop().and_then(|one| one.error) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Nanoseconds a cell of moves of so many chunks, for a session of so many.
    fn cost(&mut self, kind: TransferKind, document: u32, all: u32, each: u32) -> Result<f64> {
        let session = self.session(document, all)?;
        if kind == TransferKind::Get {
            self.carry(session, TransferKind::Put, 0, all)?;
        }
        let start = thread_ns();
        for first in (0..all).step_by(each as usize) {
            self.carry(session, kind, first, each)?;
        }
        let took = thread_ns() - start;
        self.core.close_session(session)?;
        Ok(took / f64::from(all * self.layers))
    }
}

fn bare_bars(quick: bool) -> Vec<Bar> {
    let all = [
        ("put_cell_single", TransferKind::Put, 1, 64, 1, Some(500.0)),
        ("get_cell_single", TransferKind::Get, 1, 64, 1, Some(500.0)),
        ("get_cell_single_of_4096", TransferKind::Get, 1, 4096, 1, None),
        ("put_cell_by_512", TransferKind::Put, 1, 512, 512, Some(150.0)),
        ("get_cell_by_512", TransferKind::Get, 1, 512, 512, Some(150.0)),
        ("put_cell_by_512_of_32_layers", TransferKind::Put, 32, 16, 16, Some(150.0)),
        ("get_cell_by_512_of_32_layers", TransferKind::Get, 32, 16, 16, Some(150.0)),
    ];
    let rounds = if quick { 40 } else { 200 };
    let measure = |kind, layers, chunks: u32, each| -> Result<f64> {
        let mut bare = Bare::open(layers)?;
        let costs = (0..rounds).map(|number| bare.cost(kind, number, chunks, each));
        Ok(median(&mut costs.collect::<Result<Vec<f64>>>()?))
    };
    let of = |(bar, kind, layers, chunks, each, goal)| {
        let mut bar = Bar {
            bar,
            value: None,
            unit: "ns/cell",
            baseline: "",
            baseline_value: None,
            goal,
            better: Better::Lower,
            note: String::new(),
        };
        match measure(kind, layers, chunks, each) {
            Ok(cost) => bar.value = Some(cost),
            Err(error) => bar.note = say(error),
        }
        bar
    };
    let mut bars: Vec<Bar> = all.into_iter().map(of).collect();
    bars.push(lookup_bar(rounds));
    bars
}

/// A lookup of 32,768 tokens that are all there, hashing and all, a chunk.
fn lookup_bar(rounds: u32) -> Bar {
    const CHUNKS: u32 = 2048;
    let mut bar = Bar {
        bar: "lookup_of_32k_tokens",
        value: None,
        unit: "ns/chunk",
        baseline: "a key derived",
        baseline_value: None,
        goal: None,
        better: Better::Lower,
        note: String::new(),
    };
    let measure = || -> Result<(f64, f64)> {
        let mut bare = Bare::open(1)?;
        bare.cost(TransferKind::Put, 1, CHUNKS, CHUNKS)?;
        let tokens: Vec<u32> = (0..CHUNKS * BARE.0).map(|i| 1 << 20 | i).collect();
        let (mut all, mut keys) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let start = thread_ns();
            let found = bare.core.lookup(bare.space, &tokens)?.now_tokens;
            all.push((thread_ns() - start) / f64::from(CHUNKS));
            if found != tokens.len() as u64 {
                return Err(Status::NotFound.into());
            }
            let start = thread_ns();
            let mut chain = Vec::new();
            let mut hashing = kvtier::format::keys::chain::Chain::new(Key([3; 32]), BARE.0)?;
            hashing.extend(&tokens, &[], &mut chain)?;
            keys.push((thread_ns() - start) / f64::from(CHUNKS));
        }
        Ok((median(&mut all), median(&mut keys)))
    };
    match measure() {
        Ok((all, keys)) => (bar.value, bar.baseline_value) = (Some(all), Some(keys)),
        Err(error) => bar.note = say(error),
    }
    bar
}

/// Seconds of a durable put, of a restore (all, and its first layer), each beside raw.
#[derive(Default)]
struct Restores {
    puts: Vec<(f64, f64)>,
    gets: Vec<(f64, f64)>,
    first: Vec<(f64, f64)>,
}

const RESTORED_LAYERS: usize = 32;

fn restore(out: &mut Restores, turn: u32, bytes: u64, stock: &Buffer) -> Outcome<()> {
    let scratch = Scratch::new("store");
    std::fs::create_dir_all(&scratch.0).map_err(|e| e.to_string())?;
    let (plain, dir) = (scratch.0.join("plain"), scratch.0.join("tier"));
    disk::allocated(&plain, bytes)?;
    let tensors = Tensors::new(bytes, RESTORED_LAYERS)?;
    let spec = format!(
        "store(host={}B,chunks=65536,disk=disk(path=\"{}\",bytes=8GiB))",
        bytes + (256 << 20),
        dir.display()
    );
    // Cells of 1 MiB; seconds of each part.
    let carry = |kind, level, by_layer| -> Result<Vec<f64>> {
        let home = Home::open(&spec, layout(RESTORED_LAYERS, 256, TOKEN_BYTES)?, None)?;
        let session = home.session(1, tensors.tokens)?;
        let took = home.carry(session, kind, level, tensors.whole(by_layer))?;
        home.close()?;
        Ok(took)
    };
    let depth = disk::DEPTH as usize;
    let put = || Ok(carry(TransferKind::Put, Level::Durable, false).map_err(say)?[0]);
    let write = || disk::raw(&[plain], Access::Write, bytes, stock, depth);
    out.puts.push(disk::in_turn(turn, put, write)?);
    let segments = disk::segments(&dir)?;
    let get = || Ok(carry(TransferKind::Get, Level::Ram, false).map_err(say)?[0]);
    let read = || disk::raw(&segments, Access::Read, bytes, stock, 2 * depth);
    out.gets.push(disk::in_turn(turn, get, read)?);
    let layers = carry(TransferKind::Get, Level::Ram, true).map_err(say)?;
    out.first.push((layers[0], layers.iter().copied().fold(0.0, f64::max)));
    Ok(())
}

fn disk_bars(quick: bool) -> Vec<Bar> {
    let calls = "plain O_DIRECT calls, 1 MiB, 8 at once";
    let more = "plain O_DIRECT calls, 1 MiB, 16 at once";
    let mut bars = [
        part_of_raw("durable_put", calls, Some(0.90)),
        part_of_raw("cold_get", more, Some(0.95)),
        Bar {
            unit: "of all",
            better: Better::Lower,
            ..part_of_raw("first_of_32_layers", "the whole restore", Some(1.0 / 32.0 + 0.1))
        },
    ];
    let (bytes, rounds) = if quick { (256 << 20, 6) } else { (512 << 20, 8) };
    let mut all = Restores::default();
    let measured = memory(2 * disk::DEPTH * disk::PIECE)
        .and_then(|stock| (0..rounds).try_for_each(|turn| restore(&mut all, turn, bytes, &stock)));
    if let Err(why) = measured {
        bars.iter_mut().for_each(|bar| bar.note.clone_from(&why));
        return bars.into();
    }
    disk::fill(&mut bars[0], &all.puts, bytes);
    disk::fill(&mut bars[1], &all.gets, bytes);
    let mut parts: Vec<f64> = all.first.iter().map(|(first, last)| first / last).collect();
    let mut firsts: Vec<f64> = all.first.iter().map(|(first, _)| first * 1e3).collect();
    let mut lasts: Vec<f64> = all.first.iter().map(|(_, last)| last * 1e3).collect();
    bars[2].value = Some(median(&mut parts));
    bars[2].baseline_value = Some(1.0);
    bars[2].note = format!("({:.1} of {:.1} ms)", median(&mut firsts), median(&mut lasts));
    bars.into()
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = host_bars(quick);
    bars.extend(bare_bars(quick));
    bars.extend(disk_bars(quick));
    bars.extend(overlap::bars(quick));
    bars
}
