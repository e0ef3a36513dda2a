//! The disk tier under a model checker that picks the interleavings of append, commit, read,
//! forget, compaction and checkpoint: `cargo test --features shuttle --test shuttle disk_tier`.

use std::sync::Arc;

use kvtier::tier::disk::DiskTier;
use kvtier_testkit::disk::{SimFiles, SimOpts};
use shuttle::thread;

use kvtier_testkit::fixtures::disk;
use kvtier_testkit::fixtures::disk_index;

use disk_index::SharedIndex;

const ROUNDS: usize = 2000;

fn start(
    body: impl FnOnce(&DiskTier, &SharedIndex) + Send + 'static,
    at: &At,
) -> thread::JoinHandle<()> {
    let (tier, shared) = at.clone();
    thread::spawn(move || body(&tier, &shared))
}

type At = (Arc<DiskTier>, Arc<SharedIndex>);

/// In every schedule: after a power failure, durable and wanted cells are found once, and forgotten
/// cells are not found.
#[test]
fn append_read_compaction_and_checkpoint_agree() {
    let body = || {
        let sim = SimFiles::new(7, SimOpts::default());
        let (tier, ..) = disk::open(&sim).expect("a new store");
        let at: At = (Arc::new(tier), Arc::new(SharedIndex::new()));
        let (tier, shared) = &at;
        shared.append(tier, 1, &[0, 1]).expect("room");
        shared.append(tier, 2, &[0]).expect("room");
        tier.put_session(b"old", b"what it was").expect("room");
        let threads = [
            start(
                |tier, shared| {
                    let mark = shared.append(tier, 3, &[0]).expect("room");
                    tier.commit(mark).expect("a sync");
                },
                &at,
            ),
            start(
                |tier, shared| {
                    shared.clean(tier, 1);
                },
                &at,
            ),
            start(
                |tier, shared| {
                    shared.read(tier, 1);
                    tier.put_session(b"new", b"what it is").expect("room");
                },
                &at,
            ),
            start(
                |tier, shared| {
                    let mark = shared.drop_chunk(tier, 2, true).expect("room");
                    tier.commit(mark.expect("written")).expect("a sync");
                },
                &at,
            ),
            start(|tier, shared| shared.checkpoint(tier).expect("room"), &at),
        ];
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        tier.commit_all().expect("a sync");
        tier.sweep();
        let live: u32 = tier.segments().iter().map(|segment| segment.live_blocks).sum();
        assert_eq!(live, 4, "blocks of two cells of chunk 1 and of one of chunk 3");
        sim.crash().expect("memory");
        let (tier, found, _) = disk::open(&sim.reopen()).expect("it opens");
        shared.check(&tier, &found, &[2]);
        let names: Vec<&[u8]> = found.sessions.iter().map(|session| &*session.name).collect();
        assert_eq!(names, [&b"new"[..], &b"old"[..]]);
    };
    shuttle::check_random(body, ROUNDS);
}

/// A new segment whose only record has no cells is not mistaken for an empty segment before that
/// record is counted.
#[test]
fn new_segment_without_cells_is_not_removed() {
    let body = || {
        let sim = SimFiles::new(7, SimOpts::default());
        let (tier, ..) = disk::open(&sim).expect("a new store");
        let at: At = (Arc::new(tier), Arc::new(SharedIndex::new()));
        let (tier, shared) = &at;
        shared.append(tier, 1, &[0]).expect("room");
        shared.append(tier, 2, &[0]).expect("room");
        tier.close().expect("a sync");
        let threads = [
            start(
                |tier, shared| {
                    let mark = shared.drop_chunk(tier, 2, true).expect("room");
                    tier.commit(mark.expect("written")).expect("a sync");
                },
                &at,
            ),
            start(
                |tier, _| {
                    let mark = tier.put_session(b"new", b"what it is").expect("room");
                    tier.commit(mark).expect("a sync");
                },
                &at,
            ),
            start(
                |tier, _| {
                    for _ in 0..2 {
                        tier.close().expect("a sync");
                        tier.sweep();
                    }
                },
                &at,
            ),
        ];
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        sim.crash().expect("memory");
        let (tier, found, _) = disk::open(&sim.reopen()).expect("it opens");
        shared.check(&tier, &found, &[2]);
        assert_eq!(found.sessions.len(), 1);
    };
    shuttle::check_random(body, ROUNDS);
}

/// Writes during the start of a checkpoint that it covers are in it: a session record, and a cell
/// that compaction moves.
#[test]
fn checkpoint_includes_writes_during_its_start() {
    let body = || {
        let sim = SimFiles::new(7, SimOpts::default());
        let (tier, ..) = disk::open(&sim).expect("a new store");
        let at: At = (Arc::new(tier), Arc::new(SharedIndex::new()));
        let (tier, shared) = &at;
        shared.append(tier, 1, &[0]).expect("room");
        tier.close().expect("a sync");
        let threads = [
            start(|tier, _| _ = tier.put_session(b"new", b"what it is").expect("room"), &at),
            start(|tier, shared| _ = shared.clean(tier, 1), &at),
            start(|tier, shared| shared.checkpoint(tier).expect("room"), &at),
        ];
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        tier.commit_all().expect("a sync");
        tier.sweep();
        sim.crash().expect("memory");
        let (tier, found, _) = disk::open(&sim.reopen()).expect("it opens");
        shared.check(&tier, &found, &[]);
        assert_eq!(found.sessions.len(), 1, "the session");
    };
    // Few switches at arbitrary points. In random schedules the checkpoint always chooses its
    // covered position first.
    shuttle::check_pct(body, ROUNDS, 3);
}
