//! What a step of a long session costs is what it costs in a short one: counted, not timed.

use std::collections::BTreeMap;

use kvtier::store::state::{Level, TransferKind};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

use crate::turns::World;

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };

/// All that the store counts, and all that it has, but for what depends on time, and for memory, which
/// comes by the segment.
fn counted(world: &World) -> BTreeMap<String, i64> {
    let text = world.core.metrics_text();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parts = lines.filter_map(|line| line.rsplit_once(' '));
    let other = ["seconds", "_ns", "per_second", "_rate", "segments", "used_bytes", "table"];
    let kept = parts.filter(|(name, _)| !other.iter().any(|word| name.contains(word)));
    kept.map(|(name, number)| (name.to_string(), number.parse::<f64>().expect("a number") as i64))
        .collect()
}

/// How much more there is of each.
fn more(before: &BTreeMap<String, i64>, after: &BTreeMap<String, i64>) -> BTreeMap<String, i64> {
    let all = after
        .iter()
        .map(|(name, number)| (name.clone(), number - before.get(name).copied().unwrap_or(0)));
    all.filter(|(_, more)| *more != 0).collect()
}

/// What is counted of a put, a get, and a plan of the last of so many chunks.
fn steps(chunks: usize) -> Vec<BTreeMap<String, i64>> {
    let mut world = World::new();
    let tokens = document(1, (chunks + 2) * 16);
    let session = world.session(1, &MODEL, &tokens[..chunks * 16]);
    let mut whole = Engine::new(MODEL, Shape::Tokens, chunks * 16);
    whole.compute(&marks_of(1, &tokens[..chunks * 16]));
    world.submit(session, TransferKind::Put, &whole);
    world.copy_all();
    let mut steps = Vec::new();
    let engine = Engine::new(MODEL, Shape::Tokens, 16);
    for chunk in [chunks, chunks + 1] {
        world.core.append(session, &tokens[chunk * 16..][..16]).expect("room");
        for kind in [TransferKind::Put, TransferKind::Get] {
            let before = counted(&world);
            let mut what = engine.whole();
            what.first_token = chunk as u64 * 16;
            world.core.submit_cell_range(session, kind, Level::Ram, 0, what).expect("sound");
            while world.copy().is_some() {}
            steps.push(more(&before, &counted(&world)));
        }
    }
    steps
}

#[test]
fn a_step_at_the_end_of_a_long_session_counts_as_in_a_short_one() {
    let short = steps(8);
    assert!(short.iter().all(|step| !step.is_empty()));
    for chunks in [64, 512, 4096] {
        assert_eq!(steps(chunks), short, "{chunks} chunks");
    }
}
