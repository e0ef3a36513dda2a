//! Stores that share a remote: KV that one store has put is a hit for the other, and remote
//! failures cost misses only.

use kvtier_testkit::fixtures::redis::wait_until;
use kvtier_testkit::fixtures::store as support;

use std::fs;
use std::path::{Path, PathBuf};

use kvtier::base::op::OpOpts;
use kvtier::base::status::Status;
use kvtier::meta::cost::Cost;
use kvtier::store::plan::StepKind;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::plans::PlanTerms;
use kvtier::store::state::{self, Level, RemoteStats};
use support::{Engine, Model, Scratch, Shape, TestStore, document, marks_of, spec_of, wait};

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 4, heads: 2, run: 64, chunk: 16 };

fn spec(folder: &Path, rest: &str) -> StoreSpec {
    fs::create_dir_all(folder).expect("made");
    let remote = format!(
        "remote=dir(path=\"{}\", object=16KiB, timeout=300000, fresh=3600000{rest})",
        folder.display()
    );
    StoreSpec::parse(&format!("store(host=8MiB, {remote})")).expect("a sound spec")
}

fn remote_counters(store: &TestStore) -> RemoteStats {
    store.handle.with(|core| Ok(core.remote_stats())).expect("open").expect("a remote")
}

/// Puts a document at a level. Returns the status of a failure.
fn put(store: &TestStore, tokens: &[u32], level: Level) -> Option<Status> {
    let namespace = store.namespace(1, &MODEL);
    let done = store.put_tokens((namespace, 1), &MODEL, tokens, level);

    (done.status != Status::Ok).then_some(done.status)
}

/// Opens a session of these tokens. Returns it with the number of reusable tokens.
fn located(store: &TestStore, tokens: &[u32]) -> (u32, usize) {
    let namespace = store.namespace(1, &MODEL);
    let session = store.session(namespace, tokens);
    let op = store.handle.locate(session, &OpOpts::default()).expect("located");
    let done = wait(&op);
    assert_eq!(done.status, Status::Ok);
    (session, done.tokens)
}

/// All files of objects.
fn objects(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("there").flatten() {
            let path = entry.path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found
}

#[test]
fn stores_share_kv_through_the_remote() {
    let scratch = Scratch::new("remote-shared");
    let (one, other) =
        (TestStore::open(&spec(&scratch.0, "")), TestStore::open(&spec(&scratch.0, "")));
    let tokens = document(1, 100);
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    // Six whole chunks, each an object of its four layers.
    assert_eq!((remote_counters(&one).uploaded_objects, objects(&scratch.0).len()), (6, 6));
    let (session, found) = located(&other, &tokens);
    assert_eq!(found, 96, "{:?}", remote_counters(&other));
    let mut engine = Engine::new(MODEL, Shape::Heads, 96);
    assert_eq!(other.get(session, &engine).status, Status::Ok);
    engine.check(&marks_of(1, &tokens), 0..96, 0..MODEL.layers);
    let counted = remote_counters(&other);
    assert_eq!(
        (counted.fetched_objects, counted.fetched_cells, counted.corrupt_objects),
        (6, 24, 0),
        "{counted:?}"
    );
    // They are here now.
    let again = other.get(session, &engine);
    assert!(again.status == Status::Ok && remote_counters(&other).fetched_objects == 6);
    other.close_session(session);
    // The store does not upload chunks that it fetched from the remote.
    assert_eq!(put(&other, &tokens, Level::Ram), None);
    assert_eq!((remote_counters(&other).uploaded_objects, objects(&scratch.0).len()), (0, 6));
    [one, other].into_iter().for_each(TestStore::close);
}

#[test]
fn located_kv_is_fetched_by_other_sessions() {
    for ask in ["append", "explicit"] {
        let scratch = Scratch::new(&format!("remote-again-{ask}"));
        let one = TestStore::open(&spec(&scratch.0, ""));
        let tokens = document(1, 100);
        assert_eq!(put(&one, &tokens, Level::Remote), None);
        let other = TestStore::open(&spec(&scratch.0, &format!(", lookup={ask}")));
        let (session, found) = located(&other, &tokens);
        assert_eq!(found, 96);
        other.close_session(session);
        // No chunk is resident here, and no session waits for a lookup. One session begins with
        // these chunks and continues otherwise, the other one uses all of them.
        let asked = remote_counters(&other).looked_up_names;
        let begins = [&tokens[..64], &document(2, 40)[..]].concat();
        for (tokens, length) in [(&begins, 64), (&tokens, 96)] {
            let session = other.session(other.namespace(1, &MODEL), tokens);
            let mut engine = Engine::new(MODEL, Shape::Heads, length);
            assert_eq!(
                other.get(session, &engine).status,
                Status::Ok,
                "{:?}",
                remote_counters(&other)
            );
            engine.check(&marks_of(1, tokens), 0..length, 0..MODEL.layers);
            other.close_session(session);
        }
        assert!(
            ask == "append" || remote_counters(&other).looked_up_names == asked,
            "{:?}",
            remote_counters(&other)
        );
        [one, other].into_iter().for_each(TestStore::close);
    }
}

#[test]
fn cheap_remote_kv_is_prefetched() {
    let scratch = Scratch::new("remote-early");
    let one = TestStore::open(&spec(&scratch.0, ""));
    let tokens = document(1, 100);
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    let other = TestStore::open(&spec(&scratch.0, ", lookup=fetch"));
    let namespace = other.namespace(1, &MODEL);
    let fix = |beta| {
        let cost = Some(Cost { alpha: 0.0, beta });
        other.handle.with(|core| core.fix_prefill(namespace, cost)).expect("fixed");
    };
    // If computing costs nothing, nothing is prefetched.
    fix(0.0);
    other.close_session(other.session(namespace, &tokens));
    let (session, found) = located(&other, &tokens);
    other.close_session(session);
    other.settle();
    assert_eq!(
        (found, remote_counters(&other).fetched_objects),
        (96, 0),
        "{:?}",
        remote_counters(&other)
    );
    fix(1e9);
    let session = other.session(namespace, &tokens);
    wait_until("it is prefetched", || remote_counters(&other).fetched_objects >= 6);
    other.settle();
    // The KV is resident here: the remote is not read again.
    fs::remove_dir_all(&scratch.0).expect("removed");
    let mut engine = Engine::new(MODEL, Shape::Heads, 96);
    assert_eq!(other.get(session, &engine).status, Status::Ok);
    engine.check(&marks_of(1, &tokens), 0..96, 0..MODEL.layers);
    assert_eq!(remote_counters(&other).fetched_cells, 24);
    // A session that is closed at once leaves no request behind.
    let namespace = other.namespace(2, &MODEL);
    for number in 0..50 {
        other.close_session(other.session(namespace, &document(number, 64)));
    }
    other.close_session(session);
    [one, other].into_iter().for_each(TestStore::close);
}

#[test]
fn first_writer_wins_and_remote_level_needs_an_acknowledgement() {
    let scratch = Scratch::new("remote-first");
    let (one, other) =
        (TestStore::open(&spec(&scratch.0, "")), TestStore::open(&spec(&scratch.0, "")));
    let tokens = document(2, 64);
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    assert_eq!(put(&other, &tokens, Level::Remote), None);
    assert_eq!(
        (
            remote_counters(&one).uploaded_objects,
            remote_counters(&other).uploaded_objects,
            remote_counters(&other).known_objects
        ),
        (4, 0, 4)
    );
    // The hints are stale because the objects were deleted: a put uploads them again.
    objects(&scratch.0).iter().for_each(|path| fs::remove_file(path).expect("there"));
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    assert_eq!((remote_counters(&one).uploaded_objects, objects(&scratch.0).len()), (8, 4));
    [one, other].into_iter().for_each(TestStore::close);
}

#[test]
fn damaged_or_absent_remote_object_is_a_miss() {
    let scratch = Scratch::new("remote-damaged");
    let (one, other) =
        (TestStore::open(&spec(&scratch.0, "")), TestStore::open(&spec(&scratch.0, "")));
    let tokens = document(3, 64);
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    for (i, path) in objects(&scratch.0).iter().enumerate() {
        let mut bytes = fs::read(path).expect("there");
        let end = bytes.len() - 1;
        match i % 4 {
            // A byte of the last cell's planes; of the header; less; more.
            0 => bytes[end] ^= 1,
            1 => bytes[40] ^= 1,
            2 => bytes.truncate(end),
            _ => bytes.push(0),
        }
        fs::write(path, bytes).expect("written");
    }
    let (session, found) = located(&other, &tokens);
    assert_eq!(found, 64, "their hints exist");
    let engine = Engine::new(MODEL, Shape::Tokens, 64);
    assert_eq!(other.get(session, &engine).status, Status::NotFound);
    let counted = remote_counters(&other);
    assert!(counted.corrupt_objects >= 4, "{counted:?}");
    other.close_session(session);
    other.settle();
    assert_eq!(objects(&scratch.0), Vec::<PathBuf>::new(), "corrupt objects are removed");
    assert_eq!(put(&other, &tokens, Level::Remote), None);
    assert_eq!(objects(&scratch.0).len(), 4);
    [one, other].into_iter().for_each(TestStore::close);
}

/// Gets documents of 128 tokens and checks them. Returns the number of complete ones.
fn get_all(store: &TestStore, documents: &[Vec<u32>]) -> u64 {
    let mut whole = 0;
    for tokens in documents {
        // A chunk that is being uploaded is found in no tier.
        store.settle();
        let (session, found) = located(store, tokens);
        let mut engine = Engine::new(MODEL, Shape::Tokens, tokens.len());
        let done = store.get(session, &engine);
        assert_eq!(done.status == Status::Ok, found == 128, "{found} found, {:?}", done.status);
        if done.status == Status::Ok {
            engine.check(&marks_of(1, tokens), 0..tokens.len(), 0..MODEL.layers);
            whole += 1;
        }
        store.close_session(session);
    }
    whole
}

/// The number of dropped chunks depends on the speed of uploads.
/// `twins::evicted_chunks_return_from_the_remote` checks, with uploads run by the test, that
/// enough return.
#[test]
fn evicted_chunks_are_uploaded_or_counted_as_rejected() {
    let scratch = Scratch::new("remote-evicts");
    let store = TestStore::open(&spec(&scratch.0, ", write=back"));
    // Four times as much as memory holds. If uploads are slow, some chunks are dropped.
    let documents: Vec<Vec<u32>> = (0..256).map(|n| document(n, 128)).collect();
    for tokens in &documents {
        assert_eq!(put(&store, tokens, Level::Ram), None);
        store.settle();
    }
    // Three quarters of all chunks were evicted at any speed of uploads. A document has 8 chunks.
    let counted = remote_counters(&store);
    assert!(
        counted.uploaded_objects > 0
            && counted.uploaded_objects + counted.rejected_chunks >= 192 * 8,
        "{counted:?}"
    );
    let whole = get_all(&store, &documents);
    // A chunk that was not uploaded costs one document at most.
    let counted = remote_counters(&store);
    assert!(
        whole + counted.rejected_chunks + counted.failed_uploads >= 256,
        "{whole}, {counted:?}"
    );
    store.close();
}

/// Layers that were evicted from host memory are not uploaded from disk: the put fails.
#[test]
fn evicted_layers_fail_a_remote_put() {
    let (scratch, disk) = (Scratch::new("remote-layers"), Scratch::new("remote-layers-disk"));
    let text = format!(
        "disk=disk(path=\"{}\", bytes=64MiB, segment=1MiB), remote=dir(path=\"{}\", timeout=300000)",
        disk.0.display(),
        scratch.0.display()
    );
    fs::create_dir_all(&scratch.0).expect("made");
    let store = TestStore::open(&spec_of(&format!("store(host=8MiB, write=back, {text})")));
    let namespace = store.namespace(1, &MODEL);
    let tokens = document(1, 64);
    let session = store.session(namespace, &tokens);
    let engine = Engine::computed(MODEL, Shape::Tokens, &marks_of(1, &tokens));
    let put = |layers: std::ops::Range<usize>| {
        let what = engine.cell_range(0, 64, layers, false);
        let ops = store
            .submit(session, state::TransferKind::Put, Level::Remote, what)
            .expect("submitted");
        wait(&ops[0]).status
    };
    assert_eq!(put(0..2), Status::Ok);
    store.handle.with(|core| core.demote_range(session, 0, 64)).expect("open");
    store.settle();
    assert_eq!((put(2..4), objects(&scratch.0).len()), (Status::Again, 0));
    // All layers, once more.
    assert_eq!((put(0..4), objects(&scratch.0).len()), (Status::Ok, 4));
    store.close_session(session);
    store.close();
}

#[test]
fn plan_recomputes_if_the_remote_is_slow() {
    let scratch = Scratch::new("remote-plan");
    let (one, other) =
        (TestStore::open(&spec(&scratch.0, "")), TestStore::open(&spec(&scratch.0, "")));
    let tokens = document(4, 64);
    assert_eq!(put(&one, &tokens, Level::Remote), None);
    let (session, _) = located(&other, &tokens);
    let plan = |alpha: f64, beta: f64| {
        let terms = PlanTerms { cost: Some(Cost { alpha, beta }), ..PlanTerms::default() };
        let plan = other.handle.with(|core| core.plan(session, &terms).cloned()).expect("planned");
        plan.steps
            .iter()
            .filter(|step| step.kind == StepKind::Load)
            .map(|step| step.tokens)
            .sum::<u64>()
    };
    assert_eq!(plan(0.0, 1e9), 64, "a second a token: load");
    assert_eq!(plan(0.0, 1.0), 0, "a nanosecond a token: compute");
    other.close_session(session);
    [one, other].into_iter().for_each(TestStore::close);
}

#[test]
fn remote_level_without_a_remote_is_unavailable() {
    let store = TestStore::open(&support::spec_of("store(host=1MiB)"));
    let namespace = store.namespace(1, &MODEL);
    let session = store.session(namespace, &document(5, 32));
    let (session, found) = {
        let op = store.handle.locate(session, &OpOpts::default()).expect("located");
        (session, wait(&op).tokens)
    };
    assert_eq!(found, 0);
    let engine = Engine::new(MODEL, Shape::Tokens, 32);
    let what = engine.cell_range(0, 32, 0..MODEL.layers, false);
    let refused = store.handle.submit(
        session,
        kvtier::store::state::TransferKind::Put,
        Level::Remote,
        what,
        &OpOpts::default(),
    );
    assert_eq!(refused.err().map(|error| error.status()), Some(Status::Unavailable));
    store.close_session(session);
    store.close();
}
