//! Acknowledged keys are never lost, and a bit flip anywhere in the files is a counted miss, never
//! a wrong byte.

use kvtier_testkit::fixtures::store as support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvtier::base::status::{Result, Status};
use kvtier::store::handle::Store;
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, Model, POISON, SHAPES, Scratch, Shape, TestStore, document, marks_of, mix,
    runtime, wait, with_disk,
};

/// Cells of 8 KiB, chunks of 48 KiB.
const WIDE: Model = Model { layers: 6, heads: 4, run: 64, chunk: 16 };
/// Cells of half a block.
const SMALL: Model = Model { layers: 3, heads: 1, run: 64, chunk: 16 };

/// Reads a document of one chunk. Returns whether it was found; found bytes are compared.
fn is_there(store: &TestStore, namespace: u32, number: u32) -> bool {
    let tokens = document(number, WIDE.chunk);
    let marks = marks_of(0, &tokens);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(WIDE, SHAPES[number as usize % SHAPES.len()], tokens.len());
    let done = store.get(session, &engine);
    assert!(matches!(done.status, Status::Ok | Status::NotFound), "{number}: {done:?}");
    engine.check(&marks, 0..done.tokens, 0..WIDE.layers);
    engine.check_written(&marks);
    assert!(engine.bytes().iter().all(|&b| b == POISON));
    store.close_session(session);
    done.tokens > 0
}

/// Puts 1,000 keys from `callers` concurrent callers. Half of the keys fit in memory, and the disk
/// has space for all. Each put is acknowledged at level RAM only.
fn spill(callers: u32, rest: &str) {
    const KEYS: u32 = 1000;
    let scratch = Scratch::new("spill");
    let host = WIDE.chunk_bytes() * u64::from(KEYS) / 2;
    let rest = format!("host={host}B,chunks=4096,{rest}");
    let store = TestStore::open(&with_disk(&scratch.0, "bytes=256MiB,segment=4MiB", &rest));
    let namespace = store.namespace(1, &WIDE);
    std::thread::scope(|scope| {
        for caller in 0..callers {
            let store = &store;
            scope.spawn(move || {
                for number in (caller..KEYS).step_by(callers as usize) {
                    let tokens = document(number, WIDE.chunk);
                    let session = store.session(namespace, &tokens);
                    let engine = Engine::computed(WIDE, Shape::Tokens, &marks_of(0, &tokens));
                    let right = Done::ok(tokens.len());
                    assert_eq!(store.put(session, Level::Ram, &engine), right, "{number}");
                    store.close_session(session);
                }
            });
        }
    });
    // The newest first, then in the opposite order: reads evict other chunks, too.
    let numbers: Vec<u32> = (0..KEYS).rev().chain(0..KEYS).collect();
    let gone: Vec<u32> = numbers.into_iter().filter(|&n| !is_there(&store, namespace, n)).collect();
    let counters = store.counters();
    assert!(gone.is_empty(), "{} of {KEYS} keys are missing: {gone:?}, {counters:?}", gone.len());
    let lost = [
        counters.dropped_chunks,
        counters.corrupt_cells,
        counters.evicted_chunks,
        counters.disk_full_chunks,
        counters.missed_cells,
    ];
    assert_eq!(lost, [0; 5], "{counters:?}");
    assert!(counters.demoted_chunks > 400 && counters.disk_hit_cells > 0, "{counters:?}");
    store.settle();
    store.close();
}

#[test]
fn acknowledged_keys_survive_eviction_to_disk() {
    spill(1, "write=back");
}

#[test]
fn acknowledged_keys_of_concurrent_callers_survive_eviction() {
    spill(4, "write=back,policy=lru,copiers=3");
    spill(4, "write=through,policy=s3fifo");
}

/// The files of a store, by name.
type Image = BTreeMap<String, Vec<u8>>;

fn load(dir: &Path) -> Image {
    let entries = std::fs::read_dir(dir).expect("there");
    let file = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().expect("text");
        let bytes = std::fs::read(entry.path()).expect("readable");
        (name != "LOCK").then_some((name, bytes))
    };
    entries.filter_map(|entry| file(entry.expect("readable"))).collect()
}

fn save(dir: &Path, image: &Image) {
    for entry in std::fs::read_dir(dir).expect("there") {
        let entry = entry.expect("readable");
        let name = entry.file_name().into_string().expect("text");
        if name != "LOCK" && !image.contains_key(&name) {
            std::fs::remove_file(entry.path()).expect("removed");
        }
    }
    for (name, bytes) in image {
        std::fs::write(dir.join(name), bytes).expect("written");
    }
}

/// A directory in memory where there is one: these tests sync a lot.
fn quick(name: &str) -> Scratch {
    let shared = PathBuf::from("/dev/shm");
    if !shared.is_dir() {
        return Scratch::new(name);
    }
    let dir = shared.join(format!("kvt-{name}-{}", std::process::id()));
    drop(std::fs::remove_dir_all(&dir));
    Scratch(dir)
}

const DOCUMENTS: u32 = 14;

/// Documents of which three at a time share a prefix.
fn tokens_of(number: u32) -> Vec<u32> {
    let mut tokens = document(100 + number / 3, 16);
    tokens.extend(document(number, 16 * (1 + number as usize % 2)));
    tokens
}

fn open(dir: &Path) -> Result<(TestStore, u32)> {
    let disk = "bytes=16MiB,segment=128KiB,uring=false";
    let rest =
        "host=1MiB,chunks=512,sessions=64,transfers=64,cells=256,events=16,copiers=1,readers=1";
    let runtime = runtime();
    let store = Store::open(runtime.core(), None, &with_disk(dir, disk, rest))?;
    let store = TestStore { handle: store, runtime };
    let namespace = store.namespace(1, &SMALL);
    Ok((store, namespace))
}

fn put(store: &TestStore, namespace: u32, number: u32) {
    let tokens = tokens_of(number);
    let session = store.session(namespace, &tokens);
    let engine = Engine::computed(SMALL, Shape::Tokens, &marks_of(0, &tokens));
    let right = Done::ok(tokens.len());
    assert_eq!(store.put(session, Level::Durable, &engine), right, "{number}");
    store.close_session(session);
}

/// Number of missing layers of chunks of a document. The other layers are compared.
fn missing(store: &TestStore, namespace: u32, number: u32) -> usize {
    let tokens = tokens_of(number);
    let marks = marks_of(0, &tokens);
    let session = store.session(namespace, &tokens);
    let mut gone = 0;
    for first in (0..tokens.len()).step_by(16) {
        let mut engine = Engine::new(SMALL, Shape::Tokens, tokens.len());
        let what = engine.cell_range(first, 16, 0..SMALL.layers, true);
        let ops = store.submit(session, TransferKind::Get, Level::Ram, what).expect("submitted");
        for (layer, op) in ops.iter().enumerate() {
            let done = wait(op);
            match done.status {
                Status::Ok => engine.check(&marks, first..first + 16, layer..layer + 1),
                Status::NotFound => gone += 1,
                _ => panic!("document {number}, layer {layer}: {done:?}"),
            }
        }
        engine.check_written(&marks);
        assert!(engine.is_untouched());
    }
    store.close_session(session);
    gone
}

/// Files of a store that was opened twice. A checkpoint covers the first run, and only records
/// cover the second.
fn sample(dir: &Path) -> Image {
    let (store, namespace) = open(dir).expect("a new store");
    (0..DOCUMENTS / 2).for_each(|number| put(&store, namespace, number));
    store.close();
    let (store, namespace) = open(dir).expect("opened");
    (DOCUMENTS / 2..DOCUMENTS).for_each(|number| put(&store, namespace, number));
    drop(store); // without a close, as after a crash
    load(dir)
}

/// Opens a damaged store and reads all documents. Returns the number of missing cells, or the error
/// of the open.
fn survive(dir: &Path, what: &str) -> Result<usize> {
    let (store, namespace) = open(dir)?;
    let gone: usize = (0..DOCUMENTS).map(|number| missing(&store, namespace, number)).sum();
    let (counters, opened) = (store.counters(), store.handle.opened);
    let disk = opened.disk.expect("a disk");
    let said = counters.corrupt_cells
        + opened.adopted.dropped
        + u64::from(disk.unsound_checkpoints + disk.damaged_segments + disk.foreign_segments)
        + u64::from(disk.damaged_headers + disk.torn_tails + disk.failed_reads);
    assert!(gone == 0 || said > 0, "{what}: {gone} cells are missing: {counters:?} {opened:?}");
    // The store continues: a new document is stored and found.
    put(&store, namespace, DOCUMENTS);
    assert_eq!(missing(&store, namespace, DOCUMENTS), 0, "{what}");
    store.settle();
    store.close();
    Ok(gone)
}

#[test]
fn flipped_bit_is_a_counted_miss() {
    let scratch = quick("flips");
    let image = sample(&scratch.0);
    let kinds = ["store", "seg-", "index-"];
    let kind = |name: &str| kinds.iter().position(|kind| name.starts_with(kind));
    assert!(
        kinds.iter().all(|k| image.keys().any(|name| name.starts_with(k))),
        "{:?}",
        image.keys()
    );
    let mut most = [0; 3];
    for (name, bytes) in &image {
        let blocks = bytes.chunks(4096).enumerate();
        for (block, _) in blocks.filter(|(_, block)| block.iter().any(|&b| b != 0)) {
            for step in 0..7usize {
                let at = block * 4096 + (step * 587 + block * 97) % 4096;
                let mut damaged = image.clone();
                damaged.get_mut(name).expect("a file of the store")[at] ^= 1 << (at % 8);
                save(&scratch.0, &damaged);
                let what = format!("{name} byte {at}");
                // One flipped bit never prevents an open.
                let gone = survive(&scratch.0, &what).unwrap_or_else(|e| panic!("{what}: {e}"));
                let most = &mut most[kind(name).expect("one of the three")];
                *most = gone.max(*most);
            }
        }
    }
    // The worst case is the record of a chunk shared by three documents: each document misses it.
    // The chunks after it are still stored, for when that chunk is recomputed.
    assert_eq!((most[0], most[1]), (0, 3 * SMALL.layers), "{most:?}");
    assert_eq!(most[2], 0, "the contents of a checkpoint are in the records, too: {most:?}");
}

/// Many bits, swapped blocks, and truncated files.
#[test]
fn damage_is_a_counted_miss_or_an_open_error_with_reason() {
    let scratch = quick("damage");
    let image = sample(&scratch.0);
    let names: Vec<&String> = image.keys().collect();
    let (mut refused, mut lost) = (0, 0);
    for seed in 0..250u64 {
        let mut draws = 0;
        let mut below = |most: usize| {
            draws += 1;
            (mix(seed << 16 | draws) % most.max(1) as u64) as usize
        };
        let mut damaged = image.clone();
        for _ in 0..1 + below(12) {
            let name = names[below(names.len())];
            let other = image[names[below(names.len())]].clone();
            let bytes = damaged.get_mut(name).expect("a file of the store");
            let blocks = bytes.len() / 4096;
            match below(8) {
                0 => bytes.truncate(below(bytes.len())),
                1 | 2 if blocks > 0 && other.len() >= 4096 => {
                    let (to, from) = (below(blocks) * 4096, below(other.len() / 4096) * 4096);
                    bytes[to..to + 4096].copy_from_slice(&other[from..from + 4096]);
                }
                3 if blocks > 0 => {
                    let at = below(blocks) * 4096;
                    bytes[at..at + 4096].fill(0);
                }
                _ => {
                    for _ in 0..below(40) {
                        let at = below(bytes.len());
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte ^= 1 << below(8);
                        }
                    }
                }
            }
        }
        save(&scratch.0, &damaged);
        match survive(&scratch.0, &format!("seed {seed}")) {
            Ok(gone) => lost += usize::from(gone > 0),
            Err(error) => {
                let status = error.status();
                let known = [Status::Corrupt, Status::Unsupported, Status::NotFound];
                assert!(known.contains(&status), "{seed}: {error}");
                assert!(error.message().contains("store.kvt"), "{seed}: {error}");
                refused += 1;
            }
        }
    }
    assert!(lost > 50 && refused > 0 && refused < 125, "{lost} lost cells, {refused} not opened");
}
