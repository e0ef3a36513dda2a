//! Group `store`: puts and gets beside memcpy, the cost of a cell in the tables, and restores from
//! disk beside plain reads.

use std::time::Instant;

use kvtier::base::memory::Buffer;
use kvtier::base::status::{Result, Status};
use kvtier::io::files::Access;
use kvtier::meta::key::Key;
use kvtier::store::state::Config;
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::WorkerKind;

use super::disk::{self, part_of_raw};
use super::fixtures::store::{StateFixture, StoreFixture, TOKEN_BYTES, Tensors, layout};
use super::fixtures::{Outcome, Scratch, huge_memory, memory, say, thread_ns};
use super::overlap;
use super::{Bar, Better, median};

const LAYERS: usize = 8;
/// Bytes of a put or get.
const MOVE_BYTES: u64 = 64 << 20;
/// Number of puts that fit into memory.
const MOVES: u32 = 6;

/// Seconds of copying planes of `plane` bytes between the tensors and a part of a pool.
fn copies(tensors: &Tensors, pool: &Buffer, part: u64, plane: u64, kind: TransferKind) -> f64 {
    let start = Instant::now();
    for at in (0..MOVE_BYTES).step_by(plane as usize) {
        let engine = tensors.memory.address().wrapping_add(at as usize);
        let ours = pool.address().wrapping_add((part * MOVE_BYTES + at) as usize);
        let (from, to) = if kind == TransferKind::Put { (engine, ours) } else { (ours, engine) };
        // SAFETY: inside buffers that only this benchmark uses.
        unsafe { to.copy_from_nonoverlapping(from, plane as usize) };
    }
    start.elapsed().as_secs_f64()
}

/// Puts and gets of cells of one size, beside memcpy; pairs of seconds.
fn host_pairs(chunk: u32, rounds: u32, copiers: u32) -> Result<[Vec<(f64, f64)>; 2]> {
    let tensors = Tensors::new(MOVE_BYTES, LAYERS)?;
    let pool = memory(u64::from(MOVES) * MOVE_BYTES)?;
    let bytes = (u64::from(MOVES) + 2) * MOVE_BYTES;
    let spec = format!("store(host={bytes}B,policy=lru,copiers={copiers},chunks=65536)");
    let store_fixture = StoreFixture::open(&spec, layout(LAYERS, chunk, TOKEN_BYTES)?, None)?;
    let plane = u64::from(chunk) * TOKEN_BYTES;
    let mut pairs = [Vec::new(), Vec::new()];
    for round in 0..rounds + MOVES + 3 {
        let session = store_fixture.session(round, tensors.tokens)?;
        let part = u64::from(round % MOVES);
        let raw = copies(&tensors, &pool, part, plane, TransferKind::Put);
        let put =
            store_fixture.transfer(session, TransferKind::Put, Level::Ram, tensors.whole(false))?
                [0];
        store_fixture.end(session)?;
        // A document that was put earlier, which is not in the processor's caches.
        let session = store_fixture.session(round.saturating_sub(2), tensors.tokens)?;
        let raw_get =
            copies(&tensors, &pool, u64::from((round + 2) % MOVES), plane, TransferKind::Get);
        let get =
            store_fixture.transfer(session, TransferKind::Get, Level::Ram, tensors.whole(false))?
                [0];
        store_fixture.end(session)?;
        // After the warm-up, in which all memory is touched.
        if round >= MOVES + 3 {
            pairs[0].push((put, raw));
            pairs[1].push((get, raw_get));
        }
    }
    store_fixture.close()?;
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
        let mut pair = [bar(put, goal), bar(get, goal)];
        match host_pairs(chunk, if quick { 15 } else { 60 }, copiers) {
            Ok(pairs) => {
                let filled = pair.iter_mut().zip(&pairs);
                filled.for_each(|(bar, pairs)| disk::fill(bar, pairs, MOVE_BYTES));
            }
            Err(error) => pair.iter_mut().for_each(|bar| bar.note = say(error.clone())),
        }
        bars.extend(pair);
    }
    bars
}

/// Tokens of a chunk, and bytes of K or V for a token, of cells that are not copied.
const SMALL: (u32, u64) = (16, 128);
/// Number of such cells that fit into memory.
const SMALL_CELLS: u32 = 1 << 14;

/// The state of a store whose memory is full, so that every put evicts.
pub fn full_state(policy: &str, layers: u32) -> Result<StateFixture> {
    let config = Config {
        host_bytes: u64::from(SMALL_CELLS) * 4096,
        host_policy: policy.into(),
        max_chunks: (2 * SMALL_CELLS / layers) as usize,
        ..Config::default()
    };
    let mut fixture =
        StateFixture::open(config, None, Key([3; 32]), layers as usize, SMALL.0, SMALL.1)?;
    let chunks = 512 / layers;
    for document in 0..SMALL_CELLS / 256 {
        cell_cost(&mut fixture, TransferKind::Put, 1000 + document, chunks, chunks)?;
    }
    Ok(fixture)
}

/// Runs a transfer whose copies take no time.
pub fn transfer(
    fixture: &mut StateFixture,
    session: u32,
    kind: TransferKind,
    first: u32,
    chunks: u32,
) -> Result<()> {
    let range = fixture.cell_range(first, chunks);
    fixture.state.submit_cell_range(session, kind, Level::Ram, 0, range)?;
    while let Some(work) = fixture.state.take(WorkerKind::Copy) {
        fixture.state.done(work, Ok(()), 0);
    }
    fixture.finished()
}

/// Nanoseconds for each cell of transfers of `each` chunks, in a session of `all` chunks.
fn cell_cost(
    fixture: &mut StateFixture,
    kind: TransferKind,
    document: u32,
    all: u32,
    each: u32,
) -> Result<f64> {
    let session = fixture.session(document, all)?;
    if kind == TransferKind::Get {
        transfer(fixture, session, TransferKind::Put, 0, all)?;
    }
    let start = thread_ns();
    for first in (0..all).step_by(each as usize) {
        transfer(fixture, session, kind, first, each)?;
    }
    let took = thread_ns() - start;
    fixture.state.close_session(session)?;
    Ok(took / f64::from(all * fixture.layers as u32))
}

/// A cost of a cell: name, kind, layers, chunks of the session, chunks of a transfer, goal.
pub type CellCase = (&'static str, TransferKind, u32, u32, u32, Option<f64>);

/// The costs of a cell.
pub const CELL_CASES: [CellCase; 7] = [
    ("put_cell_single", TransferKind::Put, 1, 64, 1, Some(500.0)),
    ("get_cell_single", TransferKind::Get, 1, 64, 1, Some(500.0)),
    ("get_cell_single_of_4096", TransferKind::Get, 1, 4096, 1, None),
    ("put_cell_by_512", TransferKind::Put, 1, 512, 512, Some(150.0)),
    ("get_cell_by_512", TransferKind::Get, 1, 512, 512, Some(150.0)),
    ("put_cell_by_512_of_32_layers", TransferKind::Put, 32, 16, 16, Some(150.0)),
    ("get_cell_by_512_of_32_layers", TransferKind::Get, 32, 16, 16, Some(150.0)),
];

/// Costs of a cell under the policy `lru`, and of puts under the default policy beside it.
fn state_bars(quick: bool) -> Vec<Bar> {
    let rounds = if quick { 40 } else { 200 };
    let default = Config::default().host_policy;
    // Under each of the policies, in turn.
    let measure = |case: CellCase, policies: &[&str]| -> Result<Vec<f64>> {
        let (_, kind, layers, chunks, each, _) = case;
        let open = |policy: &&str| full_state(policy, layers);
        let mut fixtures = policies.iter().map(open).collect::<Result<Vec<_>>>()?;
        let mut costs = vec![Vec::new(); policies.len()];
        for number in 0..rounds {
            for (fixture, costs) in fixtures.iter_mut().zip(&mut costs) {
                costs.push(cell_cost(fixture, kind, number, chunks, each)?);
            }
        }
        Ok(costs.iter_mut().map(|costs| median(costs)).collect())
    };
    let mut bars = Vec::new();
    for case in CELL_CASES {
        let (name, kind, .., goal) = case;
        let mut bar = Bar::lower(name, "ns/cell").goal(goal);
        match measure(case, &["lru"]) {
            Ok(costs) => bar.value = Some(costs[0]),
            Err(error) => bar.note = say(error),
        }
        bars.push(bar);
        if kind == TransferKind::Put {
            let name = Box::leak(format!("{name}_{default}").into_boxed_str());
            let bar = Bar::lower(name, "ns/cell").baseline("the same under lru");
            let costs = measure(case, &[&default, "lru"]);
            bars.push(bar.measured_pair(costs.map(|costs| (costs[0], costs[1]))));
        }
    }
    bars.push(lookup_bar(rounds));
    bars
}

/// Nanoseconds for each chunk of a lookup of 32,768 resident tokens, hashing included.
fn lookup_bar(rounds: u32) -> Bar {
    const CHUNKS: u32 = 2048;
    let mut bar = Bar::lower("lookup_of_32k_tokens", "ns/chunk").baseline("a key derived");
    let measure = || -> Result<(f64, f64)> {
        let mut fixture = full_state("lru", 1)?;
        cell_cost(&mut fixture, TransferKind::Put, 1, CHUNKS, CHUNKS)?;
        let tokens = fixture.document(1, CHUNKS);
        let (mut all, mut keys) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let start = thread_ns();
            let found = fixture.state.lookup(fixture.namespace, &tokens)?.now_tokens;
            all.push((thread_ns() - start) / f64::from(CHUNKS));
            if found != tokens.len() as u64 {
                return Err(Status::NotFound.into());
            }
            let start = thread_ns();
            let mut chain = Vec::new();
            let mut hashing = kvtier::format::keys::chain::Chain::new(Key([3; 32]), SMALL.0)?;
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

/// Seconds of durable puts, of restores and of their first layers, each beside raw I/O; and
/// processor seconds.
#[derive(Default)]
struct Restores {
    puts: Vec<(f64, f64)>,
    over: Vec<(f64, f64)>,
    gets: Vec<(f64, f64)>,
    first: Vec<(f64, f64)>,
    used: [Vec<(f64, f64)>; 2],
}

const RESTORED_LAYERS: usize = 32;
/// Rounds in which all memory is touched.
const WARM_UP: u32 = 2;

/// A store on disk in steady state, its tensors, and the memory of plain calls.
struct DiskRig {
    scratch: Scratch,
    fixture: StoreFixture,
    tensors: Tensors,
    stock: Buffer,
    bytes: u64,
}

impl DiskRig {
    /// Cells of 1 MiB; `disk` bytes of disk, and memory for two documents of `bytes` bytes.
    fn open(bytes: u64, disk: u64) -> Outcome<DiskRig> {
        let scratch = Scratch::new("store");
        std::fs::create_dir_all(&scratch.0).map_err(|e| e.to_string())?;
        let spec = format!(
            "store(host={}B,chunks=65536,disk=disk(path=\"{}\",bytes={disk}B))",
            2 * bytes + (64 << 20),
            scratch.0.join("tier").display()
        );
        let layout = layout(RESTORED_LAYERS, 256, TOKEN_BYTES).map_err(say)?;
        Ok(DiskRig {
            scratch,
            fixture: StoreFixture::open(&spec, layout, None).map_err(say)?,
            tensors: Tensors::new(bytes, RESTORED_LAYERS).map_err(say)?,
            stock: huge_memory(2 * disk::DEPTH * disk::PIECE).map_err(say)?,
            bytes,
        })
    }

    fn plain(&self, round: u32) -> std::path::PathBuf {
        self.scratch.0.join(format!("plain-{round}"))
    }

    /// Seconds until each op of a transfer of a document has ended.
    fn carry(&self, round: u32, kind: TransferKind, by_layer: bool) -> Outcome<Vec<f64>> {
        let session = self.fixture.session(round, self.tensors.tokens).map_err(say)?;
        let level = if kind == TransferKind::Put { Level::Durable } else { Level::Ram };
        let what = self.tensors.whole(by_layer);
        let took = self.fixture.transfer(session, kind, level, what).map_err(say)?;
        self.fixture.end(session).map_err(say)?;
        Ok(took)
    }

    fn raw(&self, round: u32, access: Access) -> Outcome<f64> {
        let depth = 2 * disk::DEPTH as usize;
        disk::raw(&[self.plain(round)], access, self.bytes, &self.stock, depth)
    }

    /// Seconds and processor seconds of a transfer, and of plain calls.
    fn pair(&self, round: u32, kind: TransferKind) -> Outcome<[(f64, f64); 2]> {
        let access = if kind == TransferKind::Put { Access::Write } else { Access::Read };
        let mut used = (0.0, 0.0);
        let ours = || {
            let before = disk::processor();
            let took = self.carry(round, kind, false)?[0];
            used.0 = disk::processor() - before;
            Ok(took)
        };
        let raw = || {
            let before = disk::processor();
            let took = self.raw(round, access);
            used.1 = disk::processor() - before;
            took
        };
        let seconds = disk::in_turn(round, ours, raw)?;
        Ok([seconds, used])
    }
}

/// Puts documents, then gets them in the same order. Memory holds two of them.
fn restores(out: &mut Restores, bytes: u64, rounds: u32) -> Outcome<()> {
    let rig = DiskRig::open(bytes, 16 << 30)?;
    for round in 0..WARM_UP + rounds {
        disk::allocated(&rig.plain(round), bytes)?;
        let [seconds, used] = rig.pair(round, TransferKind::Put)?;
        if round >= WARM_UP {
            out.puts.push(seconds);
            out.used[0].push(used);
        }
    }
    for round in 0..WARM_UP + rounds {
        let [seconds, used] = rig.pair(round, TransferKind::Get)?;
        if round >= WARM_UP {
            out.gets.push(seconds);
            out.used[1].push(used);
        }
    }
    for round in 0..rounds {
        let layers = rig.carry(round, TransferKind::Get, true)?;
        out.first.push((layers[0], layers.iter().copied().fold(0.0, f64::max)));
    }
    rig.fixture.close().map_err(say)
}

/// Puts documents to a disk that has no space for more than some: each evicts others. The plain
/// file is always fresh.
fn overwrites(out: &mut Restores, bytes: u64, rounds: u32) -> Outcome<()> {
    let documents = 4;
    let rig = DiskRig::open(bytes, u64::from(documents) * bytes)?;
    for round in 0..2 * documents + rounds {
        let path = rig.plain(round);
        disk::allocated(&path, bytes)?;
        let [seconds, _] = rig.pair(round, TransferKind::Put)?;
        std::fs::remove_file(&path).map_err(say)?;
        if round >= 2 * documents {
            out.over.push(seconds);
        }
    }
    rig.fixture.close().map_err(say)
}

fn disk_bars(quick: bool) -> Vec<Bar> {
    let calls = "plain O_DIRECT calls into a fresh file, 1 MiB, 16 at once";
    let more = "plain O_DIRECT calls, 1 MiB, 16 at once";
    let mut bars = [
        part_of_raw("durable_put", calls, Some(0.95)),
        part_of_raw("durable_put_full_disk", calls, Some(1.0)),
        part_of_raw("cold_get", more, Some(0.97)),
        Bar {
            unit: "of all",
            better: Better::Lower,
            ..part_of_raw("first_of_32_layers", "the whole restore", Some(1.0 / 32.0 + 0.1))
        },
    ];
    let (bytes, rounds) = if quick { (256 << 20, 7) } else { (512 << 20, 11) };
    let mut all = Restores::default();
    let measured =
        restores(&mut all, bytes, rounds).and_then(|()| overwrites(&mut all, bytes, rounds));
    if let Err(why) = measured {
        bars.iter_mut().for_each(|bar| bar.note.clone_from(&why));
        return bars.into();
    }
    disk::fill(&mut bars[0], &all.puts, bytes);
    disk::fill(&mut bars[1], &all.over, bytes);
    disk::fill(&mut bars[2], &all.gets, bytes);
    let mut parts: Vec<f64> = all.first.iter().map(|(first, last)| first / last).collect();
    let mut firsts: Vec<f64> = all.first.iter().map(|(first, _)| first * 1e3).collect();
    let mut lasts: Vec<f64> = all.first.iter().map(|(_, last)| last * 1e3).collect();
    bars[3].value = Some(median(&mut parts));
    bars[3].baseline_value = Some(1.0);
    bars[3].note = format!("({:.1} of {:.1} ms)", median(&mut firsts), median(&mut lasts));
    let mut bars: Vec<Bar> = bars.into();
    for (bar, used) in ["durable_put_processor", "cold_get_processor"].into_iter().zip(&all.used) {
        bars.push(disk::used_bar(bar, None, used, bytes));
    }
    bars
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let mut bars = host_bars(quick);
    bars.extend(state_bars(quick));
    bars.extend(disk_bars(quick));
    bars.extend(overlap::bars(quick));
    bars
}
