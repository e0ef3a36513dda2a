//! A step of a long session costs what a step of a short one costs: counted, not timed.

use std::collections::BTreeMap;

use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{Level, TransferKind};
use kvtier_testkit::fixtures::stepped_store::SteppedStore;
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

use crate::turns::{copy_all, in_memory, session, submit};

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };

/// All metrics of the store except those that depend on time, and except bytes of memory, which
/// grow by whole slabs.
fn counted(store: &SteppedStore) -> BTreeMap<String, i64> {
    let text = store.lock().metrics_text();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parts = lines.filter_map(|line| line.rsplit_once(' '));
    let other = ["seconds", "_ns", "per_second", "_rate", "slabs", "used_bytes", "cost_bytes"];
    let kept = parts.filter(|(name, _)| !other.iter().any(|word| name.contains(word)));
    kept.map(|(name, number)| (name.to_string(), number.parse::<f64>().expect("a number") as i64))
        .collect()
}

/// The metrics that grew, and their growth.
fn more(before: &BTreeMap<String, i64>, after: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let all = after
        .iter()
        .map(|(name, number)| (name.clone(), number - before.get(name).copied().unwrap_or(0)));
    all.filter(|(_, more)| *more != 0).collect()
}

/// Growth of the metrics for a put and a get of each of two chunks, after `chunks` chunks.
fn steps(chunks: usize) -> Vec<BTreeMap<String, i64>> {
    let store = in_memory(64 << 20);
    let tokens = document(1, (chunks + 2) * 16);
    let session = session(&store, 1, &MODEL, &tokens[..chunks * 16]);
    let whole = Engine::computed(MODEL, Shape::Tokens, &marks_of(1, &tokens[..chunks * 16]));
    submit(&store, session, TransferKind::Put, &whole);
    copy_all(&store);
    let mut steps = Vec::new();
    let engine = Engine::new(MODEL, Shape::Tokens, 16);
    for chunk in [chunks, chunks + 1] {
        store.lock().append(session, &tokens[chunk * 16..][..16]).expect("room");
        for kind in [TransferKind::Put, TransferKind::Get] {
            let before = counted(&store);
            let mut what = engine.whole();
            what.first_token = chunk as u64 * 16;
            store.submit(session, kind, Level::Ram, what);
            store.run_all(WorkerKind::Copy);
            steps.push(more(&before, &counted(&store)));
        }
    }
    steps
}

#[test]
fn step_cost_does_not_depend_on_session_length() {
    let short = steps(8);
    assert!(short.iter().all(|step| !step.is_empty()));
    for chunks in [64, 512, 4096] {
        assert_eq!(steps(chunks), short, "{chunks} chunks");
    }
}
