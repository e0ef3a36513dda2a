//! The Rust interface: what an engine sees of a store, and that memory of transfers cannot be
//! misused.

use std::os::unix::fs::DirBuilderExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use kvtier::api::{
    Dtype, Group, Identity, Layer, Layout, Level, Namespace, Session, SessionOpts, Source, Status,
    Store, Strides, Target,
};
use proptest::prelude::*;

use kvtier_testkit::fixtures::scratch::Scratch;

const CHUNK: u64 = 16;
/// Bytes of K of a token: 2 heads of 4 numbers.
const TOKEN_BYTES: usize = 2 * 4 * 4;

fn layout(layers: u16) -> Layout {
    let group = Group::gqa(0..layers, 2, 4, Dtype::F32).expect("whole bytes");
    Layout::new(CHUNK as u32, vec![group]).expect("a sound layout")
}

fn model(weights: &[u8]) -> Identity<'_> {
    Identity { model: Some(b"test"), weights: Some(weights), ..Identity::default() }
}

fn on_disk(folder: &Scratch) -> String {
    let path = folder.0.join("kv");
    format!("store(host=32MiB, disk=disk(path={:?}, bytes=256MiB))", path.display().to_string())
}

fn in_memory() -> Namespace {
    let store = Store::open("store(host=32MiB)").expect("a store");
    store.namespace(&model(b"a"), &layout(2)).expect("a namespace")
}

fn session(ns: &Namespace, tokens: u32) -> Session {
    let mut session = ns.session().expect("a session");
    session.append(&(0..tokens).collect::<Vec<_>>()).expect("tokens");
    session
}

/// KV of a layer that differs in every byte's neighbours.
fn computed(layer: usize, tokens: usize) -> [Vec<u8>; 2] {
    [0, 1].map(|plane| {
        let seed = layer * 7 + plane * 3 + 1;
        (0..tokens * TOKEN_BYTES).map(|i| (i * 31 + i / 251 * 17 + seed) as u8).collect()
    })
}

fn put(session: &Session, tokens: usize, layers: usize, level: Level) {
    let kv: Vec<_> = (0..layers).map(|layer| computed(layer, tokens)).collect();
    let planes = kv.iter().map(|[k, v]| Layer::kv(&k[..], &v[..]));
    let moved = session.put(0..tokens as u64, 0, planes, level).expect("a put");
    assert_eq!(moved.tokens, tokens as u64);
}

fn assert_stored(session: &Session, tokens: usize, layers: usize) {
    let mut kv = vec![[vec![0; tokens * TOKEN_BYTES], vec![0; tokens * TOKEN_BYTES]]; layers];
    let planes = kv.iter_mut().map(|[k, v]| Layer::kv(&mut k[..], &mut v[..]));
    let moved = session.get(0..tokens as u64, 0, planes).expect("a get");
    assert_eq!(
        (moved.tokens, moved.bytes),
        (tokens as u64, (kv.len() * 2 * kv[0][0].len()) as u64)
    );
    for (layer, kv) in kv.iter().enumerate() {
        assert_eq!(*kv, computed(layer, tokens), "layer {layer}");
    }
}

#[test]
fn a_dropped_store_continues_after_a_restart() {
    let folder = Scratch::created("api");
    for closes in [true, false] {
        let store = Store::open(&on_disk(&folder)).expect("a store");
        let weights: &[u8] = if closes { b"closed" } else { b"dropped" };
        let first = session(&store.namespace(&model(weights), &layout(3)).expect("open"), 40);
        put(&first, 40, 3, Level::Ram);
        assert_eq!(first.reusable_tokens().expect("a lookup"), 40, "its own tail counts");
        if closes {
            store.clone().close().expect("written");
            assert_eq!(first.reusable_tokens().map_err(|e| e.status()), Err(Status::Closed));
            assert_eq!(store.stats().map_err(|e| e.status()), Err(Status::Closed));
        }
        drop((first, store));
    }
    let store = Store::open(&on_disk(&folder)).expect("a store");
    for weights in [&b"closed"[..], b"dropped"] {
        let ns = store.namespace(&model(weights), &layout(3)).expect("open");
        assert_eq!(ns.reusable_tokens(&(0..40).collect::<Vec<_>>()).expect("a lookup"), 32);
        let again = session(&ns, 40);
        assert_eq!(again.reusable_tokens().expect("a lookup"), 32);
        assert_stored(&again, 32, 3);
    }
    let stats = store.stats().expect("counters");
    assert_eq!((stats.gets, stats.missed_cells), (2, 0));
    assert!(store.metrics().expect("text").contains("kvtier_gets_total 2"));
    let other = session(&store.namespace(&model(b"other"), &layout(3)).expect("open"), 40);
    assert_eq!(other.reusable_tokens().expect("a lookup"), 0, "weights differ");
    let busy = Store::open(&on_disk(&folder)).err().expect("the folder is in use");
    assert_eq!(busy.status(), Status::Busy, "{busy}");
}

#[test]
fn durable_puts_survive_a_store_that_never_closes() {
    let folder = Scratch::created("api");
    let store = Store::open(&on_disk(&folder)).expect("a store");
    let ns = store.namespace(&model(b"a"), &layout(1)).expect("open");
    let first = session(&ns, 32);
    put(&first, 32, 1, Level::Durable);
    let copy = Scratch::created("api");
    let (from, to) = (folder.0.join("kv"), copy.0.join("kv"));
    std::fs::DirBuilder::new().mode(0o700).create(&to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("files") {
        let path = entry.expect("a file").path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
        }
    }
    let store = Store::open(&on_disk(&copy)).expect("a store as after a crash");
    let ns = store.namespace(&model(b"a"), &layout(1)).expect("open");
    assert_stored(&session(&ns, 32), 32, 1);
}

#[test]
fn missing_kv_is_no_error() {
    let ns = in_memory();
    let first = session(&ns, 64);
    let (k, v) = (vec![1; 32 * TOKEN_BYTES], vec![2; 32 * TOKEN_BYTES]);
    for layer in 0..2 {
        let plane = [Layer::kv(&k[..], &v[..])];
        first.put(0..32, layer, plane, Level::Ram).expect("a put of one layer");
    }
    let mut kv = vec![[vec![9; 64 * TOKEN_BYTES], vec![9; 64 * TOKEN_BYTES]]; 2];
    let planes = kv.iter_mut().map(|[k, v]| Layer::kv(&mut k[..], &mut v[..]));
    assert_eq!(first.get(0..64, 0, planes).expect("a get").tokens, 32);
    assert!(kv.iter().flatten().all(|plane| plane[32 * TOKEN_BYTES..].iter().all(|&b| b == 9)));
    assert_eq!(session(&ns, 16).reusable_tokens().expect("a lookup"), 16);
}

#[test]
fn branches_of_a_conversation_share_their_prefix() {
    let ns = in_memory();
    let mut first = session(&ns, 48);
    put(&first, 48, 2, Level::Ram);
    let mut branch = first.fork().expect("a fork");
    branch.truncate(20).expect("20 of 48 tokens");
    branch.append(&[7; 30]).expect("tokens");
    assert_eq!((first.tokens().ok(), branch.tokens().ok()), (Some(48), Some(50)));
    assert_eq!(branch.reusable_tokens().expect("a lookup"), 16);
    assert_stored(&branch, 16, 2);
    assert_eq!(first.truncate(49).map_err(|e| e.status()), Err(Status::Invalid));
}

#[test]
fn planes_that_do_not_fit_are_refused() {
    let ns = in_memory();
    let session = session(&ns, 32);
    let (short, whole) = (vec![0; 32 * TOKEN_BYTES - 1], vec![0; 32 * TOKEN_BYTES]);
    let check = |planes: Vec<Layer<Source<'_>>>, first_layer, words: &str| {
        let error = session.put(0..32, first_layer, planes, Level::Ram).expect_err(words);
        assert_eq!(error.status(), Status::Invalid, "{error}");
        assert!(error.message().contains(words), "{error}");
    };
    let fits = || Source::from(&whole[..]);
    check(vec![Layer::kv(fits(), &short[..])], 1, "V of layer 1");
    check(vec![Layer::kv(&short[..TOKEN_BYTES - 1], fits())], 0, "K of layer 0");
    check(vec![Layer::single(fits())], 0, "V is missing");
    check(vec![], 0, "no layers");
    check(vec![Layer::kv(fits(), fits()); 3], 0, "no layer 2");
    check(vec![Layer::kv(fits(), fits())], usize::MAX, "no layer");
    let wide =
        Strides { heads: 2, head_bytes: 16, token_stride_bytes: 32, head_stride_bytes: u64::MAX };
    check(vec![Layer::kv(Source::strided(&whole, wide), fits())], 0, "no token");
    for (token_stride_bytes, head_bytes) in [(0, 16), (32, 0)] {
        let strides = Strides { token_stride_bytes, head_bytes, ..wide };
        let strides = Strides { head_stride_bytes: 16, ..strides };
        check(vec![Layer::kv(Source::strided(&whole, strides), fits())], 0, "must not be 0");
    }
    // Tokens that would overlap in memory.
    let (mut k, mut v) = (whole.clone(), whole.clone());
    let overlapping = Strides { head_stride_bytes: 16, token_stride_bytes: 16, ..wide };
    let planes = [Layer::kv(Target::strided(&mut k, overlapping), &mut v[..])];
    assert_eq!(session.get(0..16, 0, planes).map_err(|e| e.status()), Err(Status::Invalid));
    for tokens in [0..0, 8..16, 0..7, 0..64] {
        let planes = vec![Layer::kv(fits(), fits()); 2];
        let refused = session.put(tokens.clone(), 0, planes, Level::Ram);
        assert_eq!(refused.map_err(|e| e.status()), Err(Status::Invalid), "{tokens:?}");
    }
    assert_eq!(session.reusable_tokens().expect("a lookup"), 0);
}

#[test]
fn a_scope_waits_for_transfers_that_are_dropped_or_forgotten() {
    let ns = in_memory();
    let tokens = 8192;
    let first = session(&ns, tokens as u32);
    put(&first, tokens, 2, Level::Ram);
    for how in 0..4 {
        let mut kv = vec![[vec![0; tokens * TOKEN_BYTES], vec![0; tokens * TOKEN_BYTES]]; 2];
        let body = || {
            first.scope(|scope| {
                for (layer, [k, v]) in kv.iter_mut().enumerate() {
                    let planes = [Layer::kv(&mut k[..], &mut v[..])];
                    let load = scope.get(0..tokens as u64, layer, planes).expect("a get");
                    match how {
                        0 => drop(load),
                        1 => std::mem::forget(load),
                        2 => assert_eq!(load.wait().expect("loaded").0.tokens, tokens as u64),
                        _ => {}
                    }
                }
                assert!(how != 3, "the engine panics");
            });
        };
        assert_eq!(catch_unwind(AssertUnwindSafe(body)).is_err(), how == 3);
        for (layer, kv) in kv.iter().enumerate() {
            assert_eq!(*kv, computed(layer, tokens), "layer {layer}, way {how}");
        }
    }
}

#[test]
fn transfers_return_their_planes() {
    let ns = in_memory();
    let first = session(&ns, 32);
    put(&first, 32, 2, Level::Ram);
    let mut memory = computed(5, 32);
    let [k, v] = &mut memory;
    let sum: usize = first.scope(|scope| {
        let ahead = scope.prefetch(0..32).expect("a prefetch");
        assert_eq!(ahead.wait().expect("resident").0.tokens, 32);
        let load = scope.get(0..32, 1, [Layer::kv(&mut k[..], &mut v[..])]).expect("a get");
        let (_, planes) = load.wait().expect("loaded");
        let layer = planes.into_iter().next().expect("one layer");
        assert_eq!(layer.k[..], computed(1, 32)[0]);
        let k = layer.k.into_inner();
        k.fill(1); // the engine's again, within the scope
        k.iter().map(|&byte| usize::from(byte)).sum()
    });
    assert_eq!(sum, 32 * TOKEN_BYTES);
    assert_eq!(memory[1], computed(1, 32)[1]);
}

#[test]
fn threads_share_a_store() {
    fn is_shared<T: Send + Sync>(_: &T) {}
    let ns = in_memory();
    let first = session(&ns, 256);
    is_shared(&ns);
    is_shared(&first);
    put(&first, 256, 2, Level::Ram);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_stored(&first, 256, 2));
            scope.spawn(|| assert_stored(&session(&ns, 256), 256, 2));
        }
    });
}

#[test]
fn custom_remotes_and_unknown_specs_are_refused_in_words() {
    for (spec, status) in [
        ("store(remote=custom())", Status::Invalid),
        ("stor()", Status::Spec),
        ("store(host=1)", Status::Invalid),
        ("store(host=16MiB, disk=disk(path=\"/nowhere/at/all\", bytes=64MiB))", Status::NotFound),
    ] {
        let error = Store::open(spec).err().expect(spec);
        assert_eq!(error.status(), status, "{spec}: {error}");
        assert!(!error.message().is_empty());
    }
}

/// A plane in memory with gaps, and the place of a byte in it.
fn place(strides: &Strides, token: usize, head: usize, byte: usize) -> usize {
    token * strides.token_stride_bytes as usize + head * strides.head_stride_bytes as usize + byte
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn strided_planes_hold_what_contiguous_planes_hold(
        heads_first in any::<bool>(),
        gaps in (0u64..40, 0u64..40),
        room in 0u64..5,
    ) {
        let (tokens, heads, head_bytes) = (32u64, 2u64, 16u64);
        let inner = head_bytes + gaps.0;
        let strides = match heads_first {
            true => Strides {
                heads: 2,
                head_bytes,
                token_stride_bytes: inner,
                head_stride_bytes: inner * (tokens + room) + gaps.1,
            },
            false => Strides {
                heads: 2,
                head_bytes,
                token_stride_bytes: inner * heads + gaps.1,
                head_stride_bytes: inner,
            },
        };
        let all = || (0..tokens as usize).flat_map(|t| (0..2).flat_map(move |h| (0..16).map(move |b| (t, h, b))));
        let bytes = all().map(|(t, h, b)| place(&strides, t, h, b)).max().expect("some") + 1;
        let ns = in_memory();
        let first = session(&ns, tokens as u32);
        let [k, v] = computed(0, tokens as usize);
        let mut spread = vec![0xEE; bytes];
        for (i, (t, h, b)) in all().enumerate() {
            spread[place(&strides, t, h, b)] = k[i];
        }
        for layer in 0..2 {
            let planes = [Layer::kv(Source::strided(&spread, strides), &v[..])];
            prop_assert_eq!(first.put(0..tokens, layer, planes, Level::Ram).expect("a put").tokens, tokens);
        }
        let (mut in_order, mut back) = (vec![0; k.len()], vec![0xEE; bytes]);
        let planes = [Layer::kv(&mut in_order[..], Target::strided(&mut back[..], strides))];
        prop_assert_eq!(first.get(0..tokens, 1, planes).expect("a get").tokens, tokens);
        prop_assert_eq!(&in_order, &k);
        let mut expected = vec![0xEE; bytes];
        for (i, (t, h, b)) in all().enumerate() {
            expected[place(&strides, t, h, b)] = v[i];
        }
        prop_assert_eq!(back, expected, "gaps are unchanged");
        // One byte less holds one token less.
        let planes = [Layer::kv(Source::strided(&spread[..bytes - 1], strides), &v[..])];
        prop_assert!(first.put(0..tokens, 0, planes, Level::Ram).is_err());
    }
}

/// Waits until chunks were removed at their end. Counters are read without a tick of the store's clock.
fn wait_for_expired(store: &Store, chunks: u64) {
    let until = Instant::now() + Duration::from_secs(120);
    while store.stats().expect("counters").expired_chunks < chunks {
        assert!(Instant::now() < until, "the chunks were not removed");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn chunks_are_removed_at_their_end_without_a_call() {
    let store = Store::open("store(host=32MiB)").expect("a store");
    let ns = store.namespace(&model(b"a"), &layout(2)).expect("a namespace");
    let opts = SessionOpts { ttl_ns: 50_000_000, ..SessionOpts::default() };
    let mut first = ns.session_with(&opts).expect("a session");
    first.append(&(0..32).collect::<Vec<_>>()).expect("tokens");
    put(&first, 32, 2, Level::Ram);
    drop(first);
    wait_for_expired(&store, 2);
}

#[test]
fn a_fork_inherits_tenant_and_ttl() {
    let store = Store::open("store(host=32MiB, quota=quota(host=1MiB))").expect("a store");
    let ns = store.namespace(&model(b"a"), &layout(2)).expect("a namespace");
    let opts = SessionOpts { ttl_ns: 50_000_000, tenant: 5, name: b"first", ..Default::default() };
    let mut first = ns.session_with(&opts).expect("a session");
    first.append(&(0..32).collect::<Vec<_>>()).expect("tokens");
    put(&first, 32, 2, Level::Ram);
    let mut fork = first.fork().expect("a fork");
    fork.append(&(0..16).collect::<Vec<_>>()).expect("tokens");
    put(&fork, 48, 2, Level::Ram);
    let bytes = 48 * 2 * 2 * TOKEN_BYTES;
    let metrics = store.metrics().expect("metrics");
    let line = metrics.lines().find(|line| line.starts_with("kvtier_tenant_put_bytes_total"));
    let line = line.unwrap_or_default();
    assert!(line.contains("\"5\"") && line.ends_with(&format!(" {bytes}")), "{line}");
    drop((first, fork));
    wait_for_expired(&store, 3);
}

#[test]
fn a_long_scope_keeps_no_ops_of_ended_transfers() {
    let spec = "kvtier(max_ops=64, store=store(host=32MiB))";
    let store = Store::open(spec).expect("a store");
    let ns = store.namespace(&model(b"a"), &layout(2)).expect("a namespace");
    let first = session(&ns, 32);
    put(&first, 32, 2, Level::Ram);
    first.scope(|scope| {
        for turn in 0..1000 {
            let transfer = scope.prefetch(0..32).unwrap_or_else(|error| panic!("{turn}: {error}"));
            transfer.wait().expect("resident");
        }
    });
}

#[test]
fn a_forked_child_drops_everything_without_a_wait() {
    let ns = in_memory();
    let first = session(&ns, 32);
    put(&first, 32, 2, Level::Ram);
    let mut kv = vec![[vec![0; 32 * TOKEN_BYTES], vec![0; 32 * TOKEN_BYTES]]; 2];
    let planes = kv.iter_mut().map(|[k, v]| Layer::kv(&mut k[..], &mut v[..]));
    let (child, waited) = first.scope(|scope| {
        let transfer = scope.get(0..32, 0, planes).expect("a transfer");
        // SAFETY: the child drops its objects and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a watchdog: the default action of the signal ends the child.
            unsafe { libc::alarm(120) };
        }
        (child, transfer.wait().map(|_| ()).map_err(|error| error.status()))
    });
    if child == 0 {
        let is_refused = waited == Err(Status::Forked)
            && first.tokens().is_err_and(|error| error.status() == Status::Forked);
        drop((first, ns));
        // SAFETY: ends the child without handlers of the parent.
        unsafe { libc::_exit(i32::from(!is_refused)) };
    }
    assert_eq!(waited, Ok(()));
    let mut status = 0;
    // SAFETY: waits for the child from above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "the child hung: {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "the child was not refused");
    assert_stored(&first, 32, 2);
}
