//! Reclaiming host memory: only whole slabs are returned, whatever cells are in them.

use kvtier::store::state::{Level, TransferKind};
use kvtier_testkit::fixtures::stepped_store::SteppedStore;
use kvtier_testkit::fixtures::store::{Engine, Model, Shape, document, marks_of};

use crate::turns::{copy_all, in_memory, session, submit};

/// Cells of 4 KiB.
const MODEL: Model = Model { layers: 1, heads: 2, run: 64, chunk: 16 };
/// Chunks of each document.
const CHUNKS: usize = 400;

/// Puts one chunk of each document in turn: each slab has cells of all documents.
fn by_turns(store: &SteppedStore, documents: &[Vec<u32>]) -> Vec<u32> {
    let sessions: Vec<u32> = documents.iter().map(|_| session(store, 1, &MODEL, &[])).collect();
    for chunk in 0..CHUNKS {
        for (session, tokens) in sessions.iter().zip(documents) {
            let new = &tokens[chunk * 16..][..16];
            store.lock().append(*session, new).expect("room");
            let mut engine = Engine::new(MODEL, Shape::Tokens, 16);
            engine.compute(&marks_of(1, &tokens[..(chunk + 1) * 16])[chunk * 16..]);
            let mut what = engine.whole();
            what.first_token = chunk as u64 * 16;
            store.submit(*session, TransferKind::Put, Level::Ram, what);
            copy_all(store);
        }
    }
    sessions
}

#[test]
fn shrink_returns_the_requested_bytes() {
    // Number of referenced documents; fraction of the memory that is requested; eighths of it that
    // must be returned; sixteenths of the live bytes that must stay.
    for (held, asked, least, keeps) in [(0, 2, 8, 3), (0, 8, 8, 8), (1, 4, 0, 7)] {
        let store = in_memory(8 << 20);
        let documents = [1, 2].map(|number| document(number, CHUNKS * 16));
        let sessions = by_turns(&store, &documents);
        for &session in &sessions[held..] {
            store.close_session(session);
        }
        let all = store.lock().host().stats().cost_bytes;
        assert!(all >= 2 * CHUNKS as u64 * 4096);
        let bytes = all / asked;
        let gave = store.lock().shrink(bytes);
        copy_all(&store);
        assert!(gave >= bytes * least / 8, "{gave} of {bytes}");
        let left = store.lock().host().stats();
        assert!(left.cost_bytes <= all - bytes * least / 8, "{left:?} of {all}");
        // The cost stays about the same, although each segment has both paths. In sixteenths of all
        // bytes.
        assert!(left.live_bytes >= all * keeps / 16, "{left:?} of {all}, {bytes} were requested");
        for tokens in &documents[..held] {
            let session = session(&store, 1, &MODEL, tokens);
            let mut engine = Engine::new(MODEL, Shape::Heads, tokens.len());
            submit(&store, session, TransferKind::Get, &engine);
            copy_all(&store);
            engine.check(&marks_of(1, tokens), 0..tokens.len(), 0..1);
        }
    }
}
