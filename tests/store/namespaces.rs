//! Namespace records on disk: one is written with the first chunk of its namespace, and removed
//! with the last. Opening many namespaces without storing takes no space.

use kvtier_testkit::fixtures::store as support;

use std::path::Path;

use kvtier::base::status::Status;
use kvtier::meta::key::Key;
use kvtier::store::state::NamespaceOpts;
use kvtier::store::state::transfer::Level;
use support::{Done, Engine, Model, Scratch, Shape, TestStore, document, marks_of, with_disk};

const MODEL: Model = Model { layers: 2, heads: 2, run: 64, chunk: 16 };

fn open(dir: &Path) -> TestStore {
    TestStore::open(&with_disk(
        dir,
        "bytes=8MiB,segment=256KiB",
        "host=2MiB,chunks=4096,write=never",
    ))
}

/// The namespace of a salt.
fn salted(store: &TestStore, salt: u32) -> u32 {
    let mut key = [7; 32];
    key[..4].copy_from_slice(&salt.to_le_bytes());
    let opts = NamespaceOpts { key: Key(key), layout: MODEL.layout(), holes: false };
    store.handle.with(|core| core.open_namespace(&opts)).expect("opened")
}

fn put(store: &TestStore, namespace: u32, salt: u32, level: Level) -> Status {
    let tokens = document(salt, 16);
    let done = store.put_tokens((namespace, salt), &MODEL, &tokens, level);

    done.status
}

fn is_there(store: &TestStore, namespace: u32, salt: u32) -> bool {
    let tokens = document(salt, 16);
    let session = store.session(namespace, &tokens);
    let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
    let done = store.get(session, &engine);
    store.close_session(session);
    if done == Done::ok(16) {
        engine.check(&marks_of(salt, &tokens), 0..16, 0..MODEL.layers);
        return true;
    }
    false
}

fn used_bytes(store: &TestStore) -> u64 {
    store.handle.disk().expect("a disk").stats().used_bytes
}

#[test]
fn opened_namespaces_take_no_disk_space() {
    let scratch = Scratch::new("salts");
    let store = open(&scratch.0);
    let before = used_bytes(&store);
    // Records of all these namespaces would exceed the disk.
    let namespaces: Vec<u32> = (0..3000).map(|salt| salted(&store, salt)).collect();
    store.settle();
    assert_eq!(used_bytes(&store), before);
    assert_eq!(put(&store, namespaces[2999], 2999, Level::Durable), Status::Ok);
    store.close();
    let store = open(&scratch.0);
    assert_eq!(
        (store.handle.opened.adopted.namespaces, store.handle.opened.adopted.chunks),
        (1, 1)
    );
    let namespace = salted(&store, 2999);
    assert!(is_there(&store, namespace, 2999));
    store.settle();
    store.close();
}

#[test]
fn namespace_record_is_removed_with_its_last_chunk() {
    let scratch = Scratch::new("salts-go");
    let store = open(&scratch.0);
    // Each namespace has a chunk. Many more are stored than fit, so the first ones are evicted.
    let salts = 1200;
    for salt in 0..salts {
        let namespace = salted(&store, salt);
        assert_eq!(
            put(&store, namespace, salt, Level::Disk),
            Status::Ok,
            "salt {salt}: {:?}",
            used_bytes(&store)
        );
        store
            .handle
            .with(|core| {
                core.close_namespace(namespace);
                Ok(())
            })
            .expect("open");
    }
    store.settle();
    assert!(store.counters().evicted_chunks > 400);
    let there: Vec<u32> =
        (0..salts).filter(|&salt| is_there(&store, salted(&store, salt), salt)).collect();
    assert!(there.len() > 50 && there.contains(&(salts - 1)), "{}", there.len());
    // Some chunks were evicted from the disk and are still in memory, which a close frees.
    store.settle();
    let cells = store.handle.with(|core| Ok(core.report().stats.disk_cells)).expect("open");
    let below = cells as usize / MODEL.layers;
    store.close();
    // The namespaces that have a chunk are adopted, and no others.
    let store = open(&scratch.0);
    let adopted = store.handle.opened.adopted;
    assert_eq!(adopted.namespaces, adopted.chunks, "{adopted:?}");
    // One chunk may have been evicted to make space for the checkpoint that lists it.
    assert!(adopted.dropped <= MODEL.layers as u64, "{adopted:?}");
    let again = (0..salts).filter(|&salt| is_there(&store, salted(&store, salt), salt)).count();
    assert_eq!(again as u64, adopted.chunks);
    assert!(again + 60 > below, "{again} of {below}");
    store.settle();
    store.close();
}

/// Earlier versions recorded namespaces without chunks.
#[test]
fn stale_namespace_records_are_removed_at_open() {
    let scratch = Scratch::new("salts-old");
    let store = open(&scratch.0);
    let namespace = salted(&store, 1);
    assert_eq!(put(&store, namespace, 1, Level::Durable), Status::Ok);
    let layout = MODEL.layout().encode();
    let disk = store.handle.disk().expect("a disk");
    for salt in 10..800u32 {
        let mut key = [7; 32];
        key[..4].copy_from_slice(&salt.to_le_bytes());
        let content = [&[1, 0], layout.as_slice()].concat();
        disk.put_session(&[b"namespace ".as_slice(), &key].concat(), &content).expect("room");
    }
    drop(disk);
    let full = used_bytes(&store);
    store.close();
    let store = open(&scratch.0);
    assert_eq!(store.handle.opened.adopted.namespaces, 1);
    // All removals are done by the end of the close.
    store.close();
    let store = open(&scratch.0);
    assert!(used_bytes(&store) + (2 << 20) < full, "{} of {full}", used_bytes(&store));
    let namespace = salted(&store, 1);
    assert!(is_there(&store, namespace, 1));
    store.settle();
    store.close();
}
