//! Memory that is given back: only whole segments go, whoever is in them.

use kvtier::store::state::{Level, TransferKind};
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

use crate::turns::World;

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };
/// Chunks of a path.
const CHUNKS: usize = 400;

/// Puts chunk by chunk of several documents by turns: each segment has some of all.
fn by_turns(world: &mut World, documents: &[Vec<u32>]) -> Vec<u32> {
    let sessions: Vec<u32> = documents.iter().map(|_| world.session(1, &MODEL, &[])).collect();
    for chunk in 0..CHUNKS {
        for (session, tokens) in sessions.iter().zip(documents) {
            let new = &tokens[chunk * 16..][..16];
            world.core.append(*session, new).expect("room");
            let mut engine = Engine::new(MODEL, Shape::Tokens, 16);
            engine.compute(&marks_of(1, &tokens[..(chunk + 1) * 16])[chunk * 16..]);
            let mut what = engine.whole();
            what.first_token = chunk as u64 * 16;
            world
                .core
                .submit_cell_range(*session, TransferKind::Put, Level::Ram, 0, what)
                .expect("sound");
            world.copy_all();
        }
    }
    sessions
}

#[test]
fn a_store_of_few_long_paths_gives_back_what_is_asked() {
    // What is held, one part in how many is asked for, and in eighths of that what has to come.
    for (held, asked, least, keeps) in [(0, 2, 8, 3), (0, 8, 8, 8), (1, 4, 0, 7)] {
        let mut world = World::sized(8 << 20);
        let documents = [1, 2].map(|number| document(number, CHUNKS * 16));
        let sessions = by_turns(&mut world, &documents);
        for &session in &sessions[held..] {
            world.core.close_session(session).expect("open");
        }
        let all = world.core.host().stats().cost_bytes;
        assert!(all >= 2 * CHUNKS as u64 * 4096);
        let bytes = all / asked;
        let gave = world.core.shrink(bytes);
        world.copy_all();
        assert!(gave >= bytes * least / 8, "{gave} of {bytes}");
        let left = world.core.host().stats();
        assert!(left.cost_bytes <= all - bytes * least / 8, "{left:?} of {all}");
        // It costs about as much, although each segment has both paths: in sixteenths of all.
        assert!(left.live_bytes >= all * keeps / 16, "{left:?} of {all}, {bytes} were asked for");
        for tokens in &documents[..held] {
            let session = world.session(1, &MODEL, tokens);
            let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
            world.submit(session, TransferKind::Get, &engine);
            world.copy_all();
            engine.check(&marks_of(1, tokens), 0..tokens.len(), 0..1);
        }
    }
}
