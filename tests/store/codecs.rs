//! Codecs of disk cells: decoded cells equal the original or are within the codec's error, through
//! restarts, compaction and damage, with several namespaces.

use kvtier_testkit::fixtures::store as support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier::base::account::Account;
use kvtier::base::budget::Tier;
use kvtier::base::half::{from_f16, to_f16};
use kvtier::base::op::OpOpts;
use kvtier::base::runtime::Runtime;
use kvtier::base::status::Status;
use kvtier::format::codec::int8::Scales;
use kvtier::format::codec::{self, Codec, cell};
use kvtier::io::read_only::ReadOnlyFiles;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, Config, Finished, NamespaceOpts, Wanted, Write};
use kvtier::tier::disk::{FsckOptions, Options, RESERVE_BYTES, Report, fsck};
use kvtier_testkit::fixtures::stepped_store::{Parts, SteppedStore, empty_disk};
use kvtier_testkit::sim::{SimOpts, run};
use support::{Done, Scratch, TestStore, budget, document, marks_of, mix, wait, with_disk};

const LAYERS: usize = 3;
const CHUNK: usize = 32;
/// Bytes of K, and of V, per token: 128 numbers.
const ROW: usize = 256;
/// Bytes of K and V of a cell: four blocks.
const CELL: usize = 2 * CHUNK * ROW;

/// Distribution of the numbers in a namespace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Like {
    /// Few distinct numbers.
    Dull,
    /// Random numbers, no two alike.
    Noise,
    /// Numbers of similar magnitude, except in a few channels.
    Real,
}

/// K and V of all layers, for some tokens, as an engine keeps them.
struct Tensors(Vec<[Vec<u8>; 2]>);

impl Tensors {
    fn new(tokens: usize) -> Tensors {
        Tensors((0..LAYERS).map(|_| [vec![0xA5; tokens * ROW], vec![0xA5; tokens * ROW]]).collect())
    }

    fn of(like: Like, marks: &[u64]) -> Tensors {
        let mut all = Tensors::new(marks.len());
        for (layer, planes) in all.0.iter_mut().enumerate() {
            for (plane, bytes) in planes.iter_mut().enumerate() {
                for (row, &mark) in bytes.chunks_mut(ROW).zip(marks) {
                    fill(like, mix(mark ^ (layer * 2 + plane) as u64), row);
                }
            }
        }
        all
    }

    fn whole(&mut self) -> CellRange {
        let tokens = self.0[0][0].len() / ROW;
        let view = |bytes: &mut Vec<u8>| {
            let address = bytes.as_mut_ptr().expose_provenance() as u64;
            PlaneView::canonical(address, tokens as u32, ROW as u64)
        };
        let layer = |[k, v]: &mut [Vec<u8>; 2]| LayerViews { k: view(k), v: Some(view(v)) };
        CellRange {
            first_token: 0,
            tokens: tokens as u64,
            first_layer: 0,
            layers: LAYERS,
            by_layer: false,
            wanted: Wanted::All,
            views: Arc::new(Views::from(self.0.iter_mut().map(layer).collect::<Vec<_>>())),
            after: None,
        }
    }

    /// Asserts that the first tokens differ by at most `steps` half steps of the quantization
    /// scale. 0 = they are equal.
    fn assert_near(&self, right: &Tensors, tokens: usize, steps: f32) {
        for (got, right) in self.0.iter().flatten().zip(right.0.iter().flatten()) {
            let (got, right) = (&got[..tokens * ROW], &right[..tokens * ROW]);
            if steps == 0.0 {
                assert!(got == right, "decoded bytes differ");
                continue;
            }
            let numbers = |bytes: &[u8]| -> Vec<f32> {
                let pairs = bytes.chunks_exact(2);
                pairs.map(|b| from_f16(u16::from_le_bytes([b[0], b[1]]))).collect()
            };
            let (got, right) = (numbers(got), numbers(right));
            let most = right.iter().fold(0f32, |m, x| m.max(x.abs()));
            for (x, y) in got.iter().zip(&right) {
                assert!((x - y).abs() <= most / 254.0 * steps, "{x} for {y} of {most}");
            }
        }
    }
}

fn fill(like: Like, mut state: u64, row: &mut [u8]) {
    for (channel, bytes) in row.chunks_exact_mut(2).enumerate() {
        let chance = mix(state.wrapping_add(channel as u64));
        let unit = (chance >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let number = match like {
            Like::Dull => (state % 5) as f32,
            Like::Real if channel % 61 == 7 => unit * 40.0,
            Like::Noise | Like::Real => unit,
        };
        bytes.copy_from_slice(&to_f16(number).to_le_bytes());
        if like == Like::Noise {
            // The exponent is random as well, so that nothing can be compressed.
            bytes.copy_from_slice(&((chance >> 13) as u16 & 0xBFFF).to_le_bytes());
        }
        state = state.rotate_left(if like == Like::Dull { 0 } else { 1 });
    }
}

fn namespace(store: &TestStore, number: u8, codec: Option<Codec>) -> u32 {
    let group = Group::gqa(0..LAYERS as u16, 4, 32, Dtype::F16).expect("sound");
    let layout = Layout::new(CHUNK as u32, vec![group]).expect("sound");
    let opts = NamespaceOpts { key: Key([number; 32]), layout, holes: false };
    let open = store.handle.with(|core| {
        let namespace = core.open_namespace(&opts)?;
        core.set_codec(namespace, codec);
        Ok(namespace)
    });
    open.expect("opened")
}

fn moved(
    store: &TestStore,
    session: u32,
    kind: TransferKind,
    level: Level,
    tensors: &mut Tensors,
) -> Done {
    let all = tensors.whole();
    let ops =
        store.handle.submit(session, kind, level, all, &OpOpts::default()).expect("submitted");
    wait(&ops[0])
}

/// Stores a document.
fn put(store: &TestStore, namespace: u32, like: Like, tokens: &[u32]) {
    let session = store.session(namespace, tokens);
    let mut tensors = Tensors::of(like, &marks_of(namespace, tokens));
    let done = moved(store, session, TransferKind::Put, Level::Disk, &mut tensors);
    assert_eq!(done, Done::ok(tokens.len()));
    store.close_session(session);
}

/// Loads a document, compares the found tokens, and returns their number.
fn check(store: &TestStore, namespace: u32, like: Like, tokens: &[u32], steps: f32) -> usize {
    let session = store.session(namespace, tokens);
    let mut got = Tensors::new(tokens.len());
    let done = moved(store, session, TransferKind::Get, Level::Ram, &mut got);
    assert!(matches!(done.status, Status::Ok | Status::NotFound), "{done:?}");
    got.assert_near(&Tensors::of(like, &marks_of(namespace, tokens)), done.tokens, steps);
    store.close_session(session);
    done.tokens
}

fn checked(dir: &Path) -> Report {
    let files = ReadOnlyFiles::open(dir).expect("a directory");
    fsck(&files, &FsckOptions::default()).expect("a store")
}

fn files_of(dir: &Path, start: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("one").path());
    let named = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
    };
    let mut all: Vec<PathBuf> = all.filter(named).collect();
    all.sort();
    all
}

const ROOMY: &str = "bytes=64MiB,segment=4MiB";

#[test]
fn compressible_cells_are_coded_and_survive_restarts() {
    let scratch = Scratch::new("codecs");
    let spec = with_disk(&scratch.0, ROOMY, "host=8MiB,chunks=1024,codec=lz4");
    let (tokens, cells) = (document(1, 10 * CHUNK), 10 * LAYERS as u64);
    let store = TestStore::open(&spec);
    let (dull, noise) = (namespace(&store, 1, None), namespace(&store, 2, None));
    put(&store, dull, Like::Dull, &tokens);
    let counters = store.counters();
    assert_eq!((counters.written_cells, counters.coded_cells), (cells, cells));
    assert_eq!(counters.coded_raw_bytes, cells * CELL as u64);
    assert!(counters.coded_bytes < counters.coded_raw_bytes / 4, "{counters:?}");
    assert_eq!((counters.lossy_numbers, counters.lossy_error_max), (0, 0.0));
    put(&store, noise, Like::Noise, &tokens);
    assert_eq!((store.counters().written_cells, store.counters().coded_cells), (2 * cells, cells));
    store.settle();
    let stored = counters.coded_bytes + cells * CELL as u64;
    store.close();
    // First with the checkpoint, then with the headers alone.
    for life in 0..3 {
        let report = checked(&scratch.0);
        assert!(report.is_clean(), "{:?}", report.damage);
        assert_eq!((report.live.cells, report.live.bytes), (2 * cells, stored), "life {life}");
        let store = TestStore::open(&spec);
        assert_eq!(store.handle.opened.adopted.cells, 2 * cells);
        assert_eq!(store.handle.opened.adopted.dropped, 0);
        let (dull, noise) = (namespace(&store, 1, None), namespace(&store, 2, None));
        assert_eq!(check(&store, dull, Like::Dull, &tokens, 0.0), tokens.len());
        assert_eq!(check(&store, noise, Like::Noise, &tokens, 0.0), tokens.len());
        assert_eq!(store.counters().disk_hit_cells, 2 * cells);
        store.settle();
        store.close();
        files_of(&scratch.0, "index-").iter().for_each(|path| {
            std::fs::remove_file(path).expect("removed");
        });
    }
}

#[test]
fn namespaces_keep_their_recipe_and_loss_is_measured() {
    let scratch = Scratch::new("recipes");
    let spec = with_disk(&scratch.0, ROOMY, "host=8MiB,chunks=1024,codec=lz4");
    let tokens: Vec<Vec<u32>> = (0..4).map(|n| document(n, (2 + n as usize) * CHUNK)).collect();
    let recipes =
        [(Some(Codec::None), Like::Dull), (None, Like::Dull), (Some(Codec::Int8), Like::Real)];
    for life in 0..3 {
        let store = TestStore::open(&spec);
        let namespaces: Vec<u32> =
            (0..).zip(recipes).map(|(n, (c, _))| namespace(&store, n, c)).collect();
        for (tokens, (&namespace, (codec, like))) in
            tokens.iter().flat_map(|t| namespaces.iter().zip(recipes).map(move |s| (t, s)))
        {
            if life == 0 {
                put(&store, namespace, like, tokens);
            }
            // Half a step, plus the error of rounding to half precision.
            let steps = if codec == Some(Codec::Int8) { 1.1 } else { 0.0 };
            assert_eq!(check(&store, namespace, like, tokens, steps), tokens.len());
        }
        let counters = store.counters();
        let each = (2 + 3 + 4 + 5) * LAYERS as u64;
        if life == 0 {
            assert_eq!((counters.written_cells, counters.coded_cells), (3 * each, 2 * each));
            // Both planes of the lossy cells.
            assert_eq!(counters.lossy_numbers, each * CELL as u64 / 2);
            let (most, mean) = (counters.lossy_error_max, counters.lossy_error_mean);
            assert!(most > 0.001 && most <= 40.0 / 254.0 * 1.1, "{most}");
            assert!(mean > 0.0 && mean < most / 3.0, "{mean} of {most}");
            let text = store.handle.with(|core| Ok(core.metrics_text())).expect("open");
            for name in ["coded_cells_total", "coded_bytes_total", "lossy_error_max"] {
                let start = format!("kvtier_{name} ");
                let line = text.lines().find(|line| line.starts_with(&start));
                let value: f64 = line.expect(name)[start.len()..].parse().expect("a number");
                assert!(value > 0.0, "{name}");
            }
        } else {
            assert_eq!(counters.disk_hit_cells, 3 * each, "read from disk in life {life}");
        }
        store.settle();
        store.close();
    }
}

#[test]
fn evicted_and_partial_chunks_are_written_coded() {
    let scratch = Scratch::new("small");
    let spec = with_disk(&scratch.0, ROOMY, "host=1MiB,chunks=1024");
    let store = TestStore::open(&spec);
    let namespaces = [
        (namespace(&store, 1, Some(Codec::Lz4)), Like::Dull, 0.0),
        (namespace(&store, 2, Some(Codec::Int8)), Like::Real, 1.1),
    ];
    let mut open = Vec::new();
    for n in 0..12u32 {
        for (namespace, like, _) in namespaces {
            let tokens = document(n, 3 * CHUNK + 1 + n as usize % (CHUNK - 1));
            let session = store.session(namespace, &tokens);
            let mut tensors = Tensors::of(like, &marks_of(namespace, &tokens));
            let done = moved(&store, session, TransferKind::Put, Level::Ram, &mut tensors);
            assert_eq!(done.tokens, tokens.len(), "{done:?}");
            open.push((session, namespace, tokens));
        }
    }
    store.settle();
    for (session, namespace, tokens) in &open {
        let (_, like, steps) =
            namespaces.into_iter().find(|s| s.0 == *namespace).expect("one of them");
        let mut got = Tensors::new(tokens.len());
        let done = moved(&store, *session, TransferKind::Get, Level::Ram, &mut got);
        assert_eq!(done.tokens, tokens.len(), "{done:?}");
        got.assert_near(&Tensors::of(like, &marks_of(*namespace, tokens)), tokens.len(), steps);
    }
    let counters = store.counters();
    assert!(counters.coded_cells > 100 && counters.disk_hit_cells > 100, "{counters:?}");
    open.into_iter().for_each(|(session, ..)| store.close_session(session));
    store.settle();
    store.close();
}

#[test]
fn compaction_copies_coded_cells() {
    let scratch = Scratch::new("cleaned");
    let spec = with_disk(&scratch.0, "bytes=6MiB,segment=512KiB", "host=1MiB,chunks=4096");
    let store = TestStore::open(&spec);
    let namespaces = [
        (namespace(&store, 1, Some(Codec::Lz4)), Like::Dull, 0.0),
        (namespace(&store, 2, Some(Codec::Int8)), Like::Real, 1.1),
        (namespace(&store, 3, None), Like::Noise, 0.0),
    ];
    let disk = store.handle.disk().expect("a disk");
    let (mut round, mut found) = (0, 0);
    while disk.stats().compacted_bytes < 1 << 20 {
        assert!(round < 400, "nothing is compacted: {:?}", disk.stats());
        for (namespace, like, steps) in namespaces {
            put(&store, namespace, like, &document(round, (1 + round as usize % 3) * CHUNK));
            // Reads keep some chunks from eviction.
            let old = document(round / 2, (1 + round as usize / 2 % 3) * CHUNK);
            found += check(&store, namespace, like, &old, steps);
        }
        round += 1;
    }
    assert!(found > 0 && store.counters().coded_cells > 0);
    store.settle();
    drop(disk);
    store.close();
    assert!(checked(&scratch.0).is_clean());
    let store = TestStore::open(&spec);
    let mut found = 0;
    for (n, (codec, like, steps)) in [
        (1, (Some(Codec::Lz4), Like::Dull, 0.0)),
        (2, (Some(Codec::Int8), Like::Real, 1.1)),
        (3, (None, Like::Noise, 0.0)),
    ] {
        let namespace = namespace(&store, n, codec);
        for round in 0..round {
            let tokens = document(round, (1 + round as usize % 3) * CHUNK);
            found += check(&store, namespace, like, &tokens, steps);
        }
    }
    assert!(found > 0);
    assert_eq!(store.counters().corrupt_cells, 0);
    store.settle();
    store.close();
}

#[test]
fn flipped_bit_of_a_coded_cell_is_a_miss() {
    let scratch = Scratch::new("flipped");
    let spec = with_disk(&scratch.0, "bytes=16MiB,segment=512KiB", "host=8MiB,chunks=1024");
    let tokens = document(1, 2 * CHUNK);
    let kinds = [(1, Codec::Lz4, Like::Dull, 0.0), (2, Codec::Int8, Like::Real, 1.1)];
    let store = TestStore::open(&spec);
    for (n, codec, like, _) in kinds {
        put(&store, namespace(&store, n, Some(codec)), like, &tokens);
    }
    store.close();
    let segment = files_of(&scratch.0, "seg-").remove(0);
    let all: Vec<(PathBuf, Vec<u8>)> = files_of(&scratch.0, "")
        .into_iter()
        .map(|path| (path.clone(), std::fs::read(path).expect("read")))
        .collect();
    let mut hurt = 0;
    // Every block but the first: at its start, where coded planes store their lengths, and inside.
    for block in 1..40 {
        for at in [0, 2, 777] {
            for path in files_of(&scratch.0, "") {
                std::fs::remove_file(path).expect("removed");
            }
            for (path, bytes) in &all {
                std::fs::write(path, bytes).expect("written");
            }
            let mut bytes = std::fs::read(&segment).expect("read");
            bytes[block * 4096 + at] ^= 0x04;
            std::fs::write(&segment, &bytes).expect("written");
            let store = TestStore::open(&spec);
            let mut found = 0;
            for (n, codec, like, steps) in kinds {
                let namespace = namespace(&store, n, Some(codec));
                found += check(&store, namespace, like, &tokens, steps);
            }
            hurt += u64::from(found < 2 * tokens.len());
            assert!(found >= tokens.len(), "one bit damages one chunk only: {found}");
            store.settle();
            store.close();
        }
    }
    assert!(hurt > 20, "{hurt}");
}

#[test]
fn simulation_seeds_code_and_decode_cells() {
    let (mut coded, mut lost) = (0, 0);
    for seed in 5000..5040 {
        match run(&SimOpts { seed, steps: 500 }) {
            Ok(report) => {
                coded += report.counters.coded_cells;
                lost += report.counters.lossy_numbers;
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    assert!(coded > 100 && lost > 1000, "{coded} {lost}");
}

/// A stepped store whose disk charges its staging memory to an account.
struct Paid {
    store: SteppedStore,
    /// Keeps the budget alive.
    _runtime: Runtime,
    account: Arc<Account>,
}

impl Paid {
    fn open(limit_bytes: u64) -> Paid {
        let runtime = support::runtime();
        let budget = budget(&runtime, &[(Tier::Host, limit_bytes)]);
        let account = budget.account("disk", 0, None).expect("an account");
        let options = Options {
            segment_bytes: 4 << 20,
            account: Some(account.clone()),
            ..Options::new(48 << 20, [5; 16])
        };
        let config = Config { host_bytes: 8 << 20, max_chunks: 256, ..Config::default() };
        let config = Config { codec: Codec::Lz4, write: Write::Through, ..config };
        let group = Group::gqa(0..LAYERS as u16, 4, 32, Dtype::F16).expect("sound");
        let layout = Layout::new(CHUNK as u32, vec![group]).expect("sound");
        let disk = Some((empty_disk(), options));
        let store = SteppedStore::new(Parts { config, disk, layout, ..Parts::default() });
        Paid { store, _runtime: runtime, account }
    }

    fn transfer(&self, kind: TransferKind, tokens: &[u32], tensors: &mut Tensors) -> Finished {
        let session = self.store.session(tokens);
        self.store.submit(session, kind, Level::Ram, tensors.whole());
        self.store.settle();
        let finished = self.store.finished().remove(0);
        self.store.close_session(session);
        finished
    }
}

#[test]
fn coding_memory_is_charged_and_reserved() {
    let tokens = document(1, 8 * CHUNK);
    let cells = 8 * LAYERS as u64;
    // The last budget is no larger than the reserve that the tier keeps.
    for limit_bytes in [64 << 20, RESERVE_BYTES + 65_536] {
        let paid = Paid::open(limit_bytes);
        let mut tensors = Tensors::of(Like::Dull, &marks_of(1, &tokens));
        assert!(paid.transfer(TransferKind::Put, &tokens, &mut tensors).error.is_none());
        let counters = paid.store.lock().counters;
        assert_eq!((counters.written_cells, counters.coded_cells), (cells, cells));
        let held = paid.account.held(Tier::Host).committed_bytes;
        let stats = paid.store.tools.disk.as_ref().expect("a disk").stats();
        assert_eq!(held, stats.staging_bytes);
        assert!(stats.scratch_bytes > 0 && held >= RESERVE_BYTES && held <= limit_bytes, "{held}");
        // Evicted from host memory, then read from disk.
        paid.store.lock().shrink(8 << 20);
        paid.store.settle();
        let mut got = Tensors::new(tokens.len());
        let done = paid.transfer(TransferKind::Get, &tokens, &mut got);
        assert_eq!((done.tokens as usize, done.error.is_none()), (tokens.len(), true));
        got.assert_near(&tensors, tokens.len(), 0.0);
        assert_eq!(paid.store.lock().counters.disk_hit_cells, cells);
    }
}

/// Run by hand: `cargo test --release --test store codecs:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn measure_codecs() {
    // 64 tokens of 8 heads of 128 numbers: cells of 256 KiB.
    const WIDE: usize = 2048;
    const TOKENS: usize = 64;
    let number = |kind: &str, token: u64, at: u64| -> u16 {
        let (a, b) = (mix(token << 20 | at), mix(token << 20 | at | 1 << 50));
        let unit = |n: u64| ((n >> 40) as f32 + 0.5) / (1u64 << 24) as f32;
        let gauss = (-2.0 * unit(a).ln()).sqrt() * (std::f32::consts::TAU * unit(b)).cos();
        match kind {
            "four rows again and again" => to_f16(unit(mix((token % 4) << 20 | at))),
            "sixteen different numbers" => to_f16((a % 16) as f32 / 8.0 - 1.0),
            "half of it zero" if (at / 64) % 2 == 0 => 0,
            "half of it zero" | "normal numbers" => to_f16(gauss),
            _ => a as u16,
        }
    };
    let kinds = [
        "four rows again and again",
        "half of it zero",
        "sixteen different numbers",
        "normal numbers",
        "random bytes",
    ];
    println!("kind | codec | bytes on disk, % | coding, MB/s | decoding, MB/s | relative error");
    for kind in kinds {
        let plane = |v: u64| -> Vec<u8> {
            let row = |token: u64| (0..WIDE as u64 / 2).map(move |at| number(kind, token, at));
            (0..TOKENS as u64).flat_map(|t| row(t + v * 1000)).flat_map(u16::to_le_bytes).collect()
        };
        let raw = [plane(0), plane(1)];
        let bytes = 2 * TOKENS * WIDE;
        for codec in [Codec::Lz4, Codec::Int8] {
            let shapes = [Scales::Channel, Scales::Token].map(|scales| codec::Shape {
                dtype: Dtype::F16,
                row_bytes: WIDE,
                scales,
            });
            let planes: Vec<cell::Plane<'_>> =
                raw.iter().zip(shapes).map(|(bytes, shape)| cell::Plane { shape, bytes }).collect();
            let room = shapes.iter().map(|shape| cell::room(codec, shape, bytes / 2)).sum();
            let (mut out, mut lengths) = (vec![0; room], [0; 2]);
            let best = |mut body: Box<dyn FnMut() + '_>| {
                let times = (0..15).map(|_| {
                    let start = std::time::Instant::now();
                    body();
                    start.elapsed().as_secs_f64()
                });
                bytes as f64 / 1e6 / times.fold(f64::MAX, f64::min)
            };
            let mut lost = None;
            let coding = best(Box::new(|| {
                lost = cell::encode(codec, &planes, &mut out, &mut lengths);
            }));
            let Some(lost) = lost else {
                println!("{kind} | {} | 100 (plain) | {coding:.0} | - | 0", codec.name());
                continue;
            };
            let mut back = vec![0; bytes / 2];
            let decoding = best(Box::new(|| {
                let mut from = 0;
                for (length, shape) in lengths.iter().zip(&shapes) {
                    let stored = &out[from..from + length];
                    cell::decode(codec, shape, stored, &mut back).expect("it was coded");
                    from += length;
                }
            }));
            let stored = lengths.iter().sum::<usize>().next_multiple_of(4096);
            println!(
                "{kind} | {} | {:.1} | {coding:.0} | {decoding:.0} | {:.4}",
                codec.name(),
                stored as f64 / bytes as f64 * 100.0,
                lost.relative(),
            );
        }
    }
}
