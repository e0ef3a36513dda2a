//! The limit of the disk: a smaller limit at opening is reached although nothing is written, and
//! drops no more than it must.

use kvtier_testkit::fixtures::stepped_store;
use kvtier_testkit::fixtures::store as support;

use kvtier::base::budget::Tier;
use kvtier::base::status::Status;
use kvtier::store::handle::Store;
use kvtier::store::state::{Config, Level};
use kvtier::tier::disk::Options;
use kvtier_testkit::disk::SimFiles;
use stepped_store::{MODEL, Parts, SteppedStore, empty_disk};
use support::{
    Done, Engine, Model, Scratch, Shape, TestStore, budget, document, marks_of, runtime, with_disk,
};

const ALL: std::ops::Range<usize> = 0..MODEL.layers;
const SEGMENT: u64 = 16 * 4096;
const LARGE: u64 = 64 * SEGMENT + 8192;
const SMALL: u64 = 24 * SEGMENT + 8192;

fn open(files: SimFiles, disk_bytes: u64) -> SteppedStore {
    let config = Config { host_bytes: 4 << 20, max_chunks: 4096, ..Config::default() };
    let options = Options { segment_bytes: SEGMENT, ..Options::new(disk_bytes, [7; 16]) };
    SteppedStore::new(Parts { config, disk: Some((files, options)), ..Parts::default() })
}

#[test]
fn smaller_disk_limit_is_obeyed_after_opening() {
    let store = open(empty_disk(), LARGE);
    let documents = 60;
    for number in 0..documents {
        assert_eq!(store.put(&document(number, 64), ALL, Level::Disk), Status::Ok);
    }
    store.settle();
    let files = store.files.clone();
    let used = store.tools.disk.as_ref().expect("a disk").stats().used_bytes;
    assert!(used > SMALL * 9 / 8, "{used} bytes are used");
    drop(store);
    let store = open(files.reopen(), SMALL);
    store.settle();
    let disk = store.tools.disk.clone().expect("a disk");
    let (used, live) = (disk.stats().used_bytes, disk.segments());
    let live: u64 = live.iter().map(|s| u64::from(s.live_blocks) * 4096).sum();
    assert!(used <= SMALL, "{used} bytes of {SMALL} are used, and nothing was written");
    // Here the record of a chunk is a header and two cells. Three segments are reserved or being
    // written, and one more may be evicted beyond need.
    let least = (SMALL - 5 * SEGMENT) * 2 / 3;
    assert!(live >= least, "{live} live bytes, of at least {least} that fit");
    assert!(store.is_stored(&document(documents - 1, 64)), "the newest document is stored");
    assert!(!store.is_stored(&document(0, 64)), "the oldest document was evicted");
}

#[test]
fn table_smaller_than_the_disk_index_is_rejected() {
    let scratch = Scratch::new("fewer");
    let spec = |rest: &str| with_disk(&scratch.0, "bytes=64MiB,segment=1MiB", rest);
    let count = |store: &TestStore| store.handle.opened.adopted.chunks;
    let store = TestStore::open(&spec("host=4MiB,chunks=1024"));
    let namespace = store.namespace(1, &MODEL);
    for number in 0..50 {
        let tokens = document(number, 64);
        let done = store.put_tokens((namespace, 0), &MODEL, &tokens, Level::Disk);
        assert_eq!(done, Done::ok(64));
    }
    store.close();
    let runtime = runtime();
    let refused = Store::open(runtime.core(), None, &spec("host=4MiB,chunks=100"));
    let error = refused.err().expect("a table that is too small");
    assert_eq!(error.status(), Status::Limit);
    for words in ["200 chunks", "chunks=1024", "forget 100", "chunks=200", "forget=true"] {
        assert!(error.message().contains(words), "{words}: {error}");
    }
    // The failed open loses nothing, and a table of exactly this size suffices.
    let store = TestStore::open(&spec("host=4MiB,chunks=200"));
    assert_eq!(count(&store), 200);
    store.close();
    let store = TestStore::open(&spec("host=4MiB,chunks=100,forget=true"));
    assert_eq!(count(&store), 100);
    store.close();
}

/// A chunk as long as two segments.
#[test]
fn chunk_larger_than_a_segment_is_written() {
    const LONG: Model = Model { layers: 8, heads: 2, run: 64, chunk: 1024 };
    let scratch = Scratch::new("long");
    let store = TestStore::open(&with_disk(&scratch.0, "bytes=16MiB,segment=1MiB", "host=8MiB"));
    let tokens = document(1, 1024);
    let session = store.session(store.namespace(1, &LONG), &tokens);
    let engine = Engine::computed(LONG, Shape::Tokens, &marks_of(1, &tokens));
    let done = store.put(session, Level::Durable, &engine);
    assert_eq!(done, Done::ok(1024));
    store.close_session(session);
    store.close();
    let store = TestStore::open(&with_disk(&scratch.0, "bytes=16MiB,segment=1MiB", "host=8MiB"));
    let session = store.session(store.namespace(1, &LONG), &tokens);
    let mut engine = Engine::new(LONG, Shape::Heads, tokens.len());
    assert_eq!(store.get(session, &engine).status, Status::Ok);
    engine.check(&marks_of(1, &tokens), 0..1024, 0..LONG.layers);
    store.close_session(session);
    store.close();
}

/// Segments are charged until they are deleted.
#[test]
fn shrinking_disk_is_charged_until_it_is_small() {
    const MIB: u64 = 1 << 20;
    let scratch = Scratch::new("paid");
    let runtime = runtime();
    let budget = budget(&runtime, &[(Tier::Host, 256 * MIB), (Tier::Disk, 64 * MIB)]);
    let spec = with_disk(&scratch.0, "bytes=48MiB,segment=1MiB", "host=4MiB,write=through");
    let store = TestStore::on_budget(runtime, &budget, &spec);

    let namespace = store.namespace(1, &MODEL);
    for number in 0..400 {
        let tokens = document(number, 128);
        let done = store.put_tokens((namespace, 0), &MODEL, &tokens, Level::Disk);
        assert_eq!(done.status, Status::Ok);
    }
    store.settle();
    let used = || store.handle.disk().expect("a disk").stats().used_bytes;
    assert!(used() > 16 * MIB, "{} bytes are used", used());
    let paid = || budget.usage(Tier::Disk).committed_bytes;
    store
        .handle
        .with(|core| {
            let before = core.report().stats.disk_used_bytes;
            core.set_disk_bytes(8 * MIB)?;
            assert!(paid() >= before.min(48 * MIB), "{} of {before} are charged", paid());
            Ok(())
        })
        .expect("open");
    store.settle();
    assert!(used() <= 8 * MIB, "{} bytes are used", used());
    assert_eq!(paid(), 8 * MIB);
    store.close();
}
