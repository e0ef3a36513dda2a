//! The disk tier against a model: random appends, reads, drops, compactions, checkpoints, faults
//! and crashes on a simulated disk; damage of every bit and every length; a committed store of this
//! version of the format.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvtier::base::status::{Result, Status};
use kvtier::format::checkpoint::CellEntry;
use kvtier::io::files::Files;
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{
    CellAt, CellIndex, DiskTier, FsckOptions, GetPlane, Mark, OpenReport, Options, Recovered,
    Report, Spot, fsck,
};
use kvtier_testkit::disk::plan::{Fault, Plan};
use kvtier_testkit::disk::{SimFiles, SimOpts};
use proptest::prelude::*;

use kvtier_testkit::fixtures::disk;
use kvtier_testkit::fixtures::disk_index;
use kvtier_testkit::fixtures::scratch::Scratch;

use disk::*;
use disk_index::SharedIndex;

/// A cell in the model's index.
#[derive(Clone, Copy, Debug)]
struct Known {
    spot: Spot,
    seal: u64,
    mark: Option<Mark>,
    durable: bool,
    /// A sync of the segment failed: the cell's bytes may be lost.
    doubtful: bool,
}

type Index = BTreeMap<(u16, u32), Known>;

/// The index as compaction sees it.
struct Owner<'a> {
    index: &'a mut Index,
    lost: Vec<(u16, u32)>,
}

impl Owner<'_> {
    fn known(&mut self, cell: &CellAt) -> Option<&mut Known> {
        let id = (number_of(&cell.chunk.key), cell.layer);
        self.index.get_mut(&id).filter(|known| known.spot == cell.spot)
    }
}

impl CellIndex for Owner<'_> {
    fn is_live(&mut self, cell: &CellAt) -> bool {
        self.known(cell).is_some_and(|known| known.seal == cell.seal)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        let known = self.known(cell).expect("a live cell");
        known.spot = to;
        true
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        let id = (number_of(&cell.chunk.key), cell.layer);
        let known = self.index.remove(&id).expect("a live cell");
        assert!(!known.durable, "a durable cell was lost: {id:?}");
        self.lost.push(id);
        true
    }
}

/// Each batch of reads is returned once, and each of its cells has its own result.
#[test]
fn batches_of_reads_are_returned_once_with_all_results() {
    let scratch = Scratch::new("batches");
    let real = RealFiles::open(&scratch.0, &RealOpts::default()).expect("a directory");
    let sim = SimFiles::new(1, SimOpts::default());
    let all: [Arc<dyn Files>; 2] = [Arc::new(real), Arc::new(sim)];
    for files in all {
        let options =
            Options { segment_bytes: SEGMENT, max_open: 3, ..Options::new(BUDGET, [9; 16]) };
        let (tier, ..) = DiskTier::open(files, options).expect("a new store");
        let mut cells = Vec::new();
        for n in 0..24 {
            let (_, places) = put(&tier, n, &[0, 1], n % 2 == 0).expect("room");
            cells.extend((0..).zip(places).map(|(layer, (spot, seal))| (n, layer, spot, seal)));
        }
        let wrong: Vec<usize> = vec![0, 7, 15, 16, 40];
        wrong.iter().for_each(|&at| cells[at].3 ^= 1);
        for in_place in [true, false] {
            let batches: Vec<Cells<'_>> = [0..8, 8..8, 8..15, 15..16, 16..40, 40..48]
                .into_iter()
                .map(|range: std::ops::Range<usize>| &cells[range])
                .collect();
            let results = read_batches(&tier, &batches, in_place);
            let lengths = results.iter().map(Vec::len);
            assert!(lengths.eq(batches.iter().map(|cells| cells.len())));
            for (at, result) in results.concat().into_iter().enumerate() {
                let expected = if wrong.contains(&at) { Some(Status::Corrupt) } else { None };
                assert_eq!(result.err().map(|error| error.status()), expected, "cell {at}");
            }
        }
        tier.close().expect("closed");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Append { n: u16, first: u32, layers: u32, in_place: bool },
    Read { from: u16, in_place: bool },
    Drop { n: u16, forget: bool },
    Commit { n: u16 },
    CommitAll,
    Clean { pick: usize },
    Checkpoint,
    Prepare,
    Sweep,
    Session { name: u8, bytes: u16 },
    Crash,
    Kill,
    Close,
    Faults { kind: usize, at: u64 },
    CrashAt { calls: u64 },
}

fn steps(faults: bool) -> impl Strategy<Value = Vec<Step>> {
    let append = (0u16..12, 0u32..6, 1u32..5, any::<bool>())
        .prop_map(|(n, first, layers, in_place)| Step::Append { n, first, layers, in_place });
    let step = prop_oneof![
        12 => append,
        4 => (0u16..12, any::<bool>()).prop_map(|(from, in_place)| Step::Read { from, in_place }),
        6 => (0u16..12, any::<bool>()).prop_map(|(n, forget)| Step::Drop { n, forget }),
        2 => (0u16..12).prop_map(|n| Step::Commit { n }),
        3 => Just(Step::CommitAll),
        6 => (0usize..10).prop_map(|pick| Step::Clean { pick }),
        2 => Just(Step::Checkpoint),
        4 => Just(Step::Prepare),
        2 => Just(Step::Sweep),
        2 => (0u8..3, 0u16..5000).prop_map(|(name, bytes)| Step::Session { name, bytes }),
        1 => Just(Step::Crash),
        1 => Just(Step::Kill),
        1 => Just(Step::Close),
        2 => (0usize..5, 1u64..12).prop_map(|(kind, at)| Step::Faults { kind, at }),
        2 => (1u64..60).prop_map(|calls| Step::CrashAt { calls }),
    ];
    let step = step.prop_filter("faults", move |step| {
        faults || !matches!(step, Step::Faults { .. } | Step::CrashAt { .. })
    });
    proptest::collection::vec(step, 1..90)
}

/// Dropped cells that must not be recovered, by chunk and layer. A drop is pending until it is
/// durable.
#[derive(Default)]
struct Gone {
    pending: BTreeMap<(u16, u32), Mark>,
    durable: BTreeSet<(u16, u32)>,
}

/// The durable content of a session, and the contents written since.
type Contents = (Vec<u8>, Vec<Vec<u8>>);

struct World {
    sim: SimFiles,
    tier: Option<DiskTier>,
    index: Index,
    gone: Gone,
    /// The durable content of each session, and the contents written since.
    sessions: BTreeMap<Vec<u8>, Contents>,
    session_marks: Vec<(Vec<u8>, Vec<u8>, Mark)>,
    /// A sync failed since the last power failure: bytes that are read may not be on the disk, and
    /// no later sync can tell.
    sync_failed: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let sim = SimFiles::new(seed, SimOpts::default());
        let (tier, found, report) = open(&sim).expect("a new store");
        assert!(report.is_new && found.cells() == 0);
        World {
            sim,
            tier: Some(tier),
            index: Index::new(),
            gone: Gone::default(),
            sessions: BTreeMap::new(),
            session_marks: Vec::new(),
            sync_failed: false,
        }
    }

    /// Report of fsck on the directory.
    fn fsck(&self) -> Report {
        let sim = if self.sim.is_closed() { self.sim.reopen() } else { self.sim.clone() };
        fsck(&sim, &FsckOptions::default()).expect("a store")
    }

    /// The files never exceed the budget.
    fn check_budget(&self) {
        if let Ok(all) = self.sim.list() {
            let bytes: u64 = all.iter().map(|entry| entry.bytes).sum();
            assert!(bytes <= BUDGET, "{bytes} of {BUDGET}: {all:?}");
        }
        if let Some(tier) = &self.tier {
            assert!(tier.stats().most_used_bytes <= BUDGET);
        }
    }

    fn append(&mut self, n: u16, first: u32, layers: u32, in_place: bool) {
        let Some(tier) = &self.tier else { return };
        let new: Vec<u32> =
            (first..first + layers).filter(|&l| !self.index.contains_key(&(n, l))).collect();
        if new.is_empty() {
            return;
        }
        // Also if the append fails: an unknown part of it may be on the disk.
        for &layer in &new {
            self.gone.pending.remove(&(n, layer));
            self.gone.durable.remove(&(n, layer));
        }
        match put(tier, n, &new, in_place) {
            Ok((mark, cells)) => {
                for (&layer, (spot, seal)) in new.iter().zip(cells) {
                    let mark = Some(mark);
                    let known = Known { spot, seal, mark, durable: false, doubtful: false };
                    self.index.insert((n, layer), known);
                }
            }
            Err(error) => assert!(
                matches!(error.status(), Status::Budget | Status::Io | Status::Closed),
                "{error}"
            ),
        }
    }

    fn read(&self, from: u16, in_place: bool) {
        let Some(tier) = &self.tier else { return };
        let cells: Vec<_> = self
            .index
            .range((from, 0)..)
            .take(20)
            .map(|(&(n, layer), known)| (n, layer, known.spot, known.seal))
            .collect();
        for (cell, result) in cells.iter().zip(read(tier, &cells, in_place)) {
            let known = self.index[&(cell.0, cell.1)];
            match result {
                Ok(()) => {}
                Err(e) if matches!(e.status(), Status::Io | Status::Closed) => {}
                Err(e) => assert!(known.doubtful, "{e} for {cell:?} {known:?}"),
            }
        }
    }

    fn drop_chunk(&mut self, n: u16, forget: bool) {
        let Some(tier) = &self.tier else { return };
        let gone: Vec<(u16, u32)> =
            self.index.range((n, 0)..=(n, u32::MAX)).map(|(&id, _)| id).collect();
        let cells = gone.iter().filter_map(|id| self.index.remove(id).map(|k| (id, k)));
        tier.drop_cells(cells.map(|(id, known)| (known.spot, stored(id.0, id.1))));
        if forget {
            let layers: Vec<u32> =
                if n % 2 == 0 { gone.iter().map(|id| id.1).collect() } else { vec![] };
            if gone.is_empty() {
                return;
            }
            if let Ok(mark) = tier.forget(key_of(n), &layers) {
                self.gone.pending.extend(gone.into_iter().map(|id| (id, mark)));
            }
        }
    }

    fn commit(&mut self, which: impl Fn(u16) -> bool) {
        let Some(tier) = &self.tier else { return };
        for (&(n, _), known) in self.index.iter_mut() {
            let (true, Some(mark), false) = (which(n), known.mark, known.durable) else { continue };
            match tier.commit(mark) {
                Ok(()) => known.durable = true,
                Err(_) => known.doubtful = true,
            }
        }
        let Gone { pending, durable } = &mut self.gone;
        pending.retain(|&id, mark| {
            let done = which(id.0) && tier.commit(*mark).is_ok();
            if done {
                durable.insert(id);
            }
            !done
        });
        if which(0) && which(1) {
            self.session_marks.retain(|(name, payload, mark)| {
                if tier.commit(*mark).is_err() {
                    return true;
                }
                let entry = self.sessions.entry(name.clone()).or_default();
                if let Some(at) = entry.1.iter().rposition(|p| p == payload) {
                    entry.0 = payload.clone();
                    entry.1.drain(..=at);
                }
                false
            });
        }
    }

    fn clean(&mut self, pick: usize) {
        let Some(tier) = &self.tier else { return };
        let segments = tier.segments();
        let Some(segment) = segments.get(pick % segments.len().max(1)) else { return };
        let mut owner = Owner { index: &mut self.index, lost: Vec::new() };
        match tier.compact(segment.number, &mut owner) {
            Ok(cleaned) => assert_eq!(cleaned.lost, owner.lost.len() as u64),
            Err(error) => assert!(
                matches!(error.status(), Status::Budget | Status::Io | Status::Closed),
                "{error}"
            ),
        }
    }

    fn checkpoint(&mut self) {
        let Some(tier) = &self.tier else { return };
        let cover = tier.cover();
        let index = &self.index;
        let result = tier.checkpoint(&cover, 12, index.len(), &mut |sink| {
            for n in 0..12 {
                let places: Vec<CellEntry> = index
                    .range((n, 0)..=(n, u32::MAX))
                    .map(|(&(_, layer), known)| CellEntry {
                        spot: known.spot.0,
                        seal: known.seal,
                        stored_bytes: stored(n, layer) as u32,
                        layer,
                        codec: 0,
                        planes: 2,
                    })
                    .collect();
                if !places.is_empty() {
                    sink.chunk(&chunk_of(n), &places)?;
                }
            }
            Ok(())
        });
        if let Err(error) = result {
            assert!(
                matches!(error.status(), Status::Budget | Status::Io | Status::Closed),
                "{error}"
            );
        }
    }

    fn session(&mut self, name: u8, bytes: u16) {
        let Some(tier) = &self.tier else { return };
        let (name, payload) = (vec![name + 1], vec![bytes as u8; bytes as usize]);
        self.sessions.entry(name.clone()).or_default().1.push(payload.clone());
        if let Ok(mark) = tier.put_session(&name, &payload) {
            self.session_marks.push((name, payload, mark));
        }
    }

    /// Reopens the store. If `all`, nothing written may be missing.
    fn reopen(&mut self, all: bool) {
        let failed = self.tier.as_ref().is_some_and(|tier| tier.stats().failed_syncs > 0);
        self.sync_failed = all && (self.sync_failed || failed);
        self.tier = None;
        self.sim = self.sim.reopen();
        self.sim.set_plan(Plan::default());
        self.check_budget();
        let (tier, found, _) = open(&self.sim).expect("it opens again");
        let before = std::mem::take(&mut self.index);
        self.adopt(&found);
        for (id, known) in &before {
            let must = known.durable || (all && !known.doubtful);
            assert!(!must || self.index.contains_key(id), "{id:?} is missing: {known:?}");
        }
        for id in &self.gone.durable {
            assert!(!self.index.contains_key(id), "{id:?} was dropped and is found again");
        }
        self.audit(&tier, &before, all);
        // Cells that were on disk only are durable from here on.
        tier.commit_all().expect("no fault is planned");
        for known in self.index.values_mut() {
            known.doubtful = self.sync_failed && !known.durable;
            known.durable = !known.doubtful;
        }
        self.check_sessions(&found);
        self.gone.pending.clear();
        self.session_marks.clear();
        self.tier = Some(tier);
        self.check_budget();
    }

    /// Adds the recovered cells to the index. Each cell must be recovered once.
    fn adopt(&mut self, found: &Recovered) {
        for (chunk, places) in found.chunks() {
            let n = number_of(&chunk.key);
            assert_eq!(*chunk, chunk_of(n), "a chunk that was never stored");
            for place in places {
                let id = (n, place.layer);
                assert_eq!(u64::from(place.stored_bytes), stored(id.0, id.1));
                let (spot, seal) = (Spot(place.spot), place.seal);
                let known = Known { spot, seal, mark: None, durable: false, doubtful: true };
                let twice = self.index.insert(id, known);
                assert!(twice.is_none(), "{id:?} was found twice");
            }
        }
    }

    /// Reads all recovered cells. Good cells keep their durability; bad cells must not have been
    /// durable.
    fn audit(&mut self, tier: &DiskTier, before: &Index, all: bool) {
        let cells: Vec<_> =
            self.index.iter().map(|(&(n, l), known)| (n, l, known.spot, known.seal)).collect();
        for (cell, result) in cells.iter().zip(read(tier, &cells, true)) {
            let id = (cell.0, cell.1);
            let promised = before.get(&id).is_some_and(|k| k.durable || (all && !k.doubtful));
            if let Err(error) = result {
                assert!(!promised, "{error} for {id:?}: {:?}", before.get(&id));
                self.index.remove(&id);
                tier.drop_cells([(cell.2, stored(id.0, id.1))]);
            } else if let Some(known) = self.index.get_mut(&id) {
                known.doubtful = false;
                known.durable = before.get(&id).is_some_and(|k| k.durable);
            }
        }
    }

    fn check_sessions(&mut self, found: &Recovered) {
        for (name, (durable, later)) in &mut self.sessions {
            let now = found.sessions.iter().find(|s| *s.name == **name).map(|s| s.payload.to_vec());
            let now = now.unwrap_or_default();
            assert!(now == *durable || later.contains(&now), "session {name:?} has other content");
            match self.sync_failed {
                true => later.push(now),
                false => (*durable, *later) = (now, Vec::new()),
            }
        }
    }

    fn step(&mut self, step: &Step) {
        if self.sim.is_closed() {
            self.reopen(false);
        }
        match *step {
            Step::Append { n, first, layers, in_place } => self.append(n, first, layers, in_place),
            Step::Read { from, in_place } => self.read(from, in_place),
            Step::Drop { n, forget } => self.drop_chunk(n, forget),
            Step::Commit { n } => self.commit(|other| other == n),
            Step::CommitAll => self.commit(|_| true),
            Step::Clean { pick } => self.clean(pick),
            Step::Checkpoint => self.checkpoint(),
            Step::Prepare => self.tier.iter().for_each(DiskTier::prepare),
            Step::Sweep => self.tier.iter().for_each(|tier| {
                tier.sweep();
            }),
            Step::Session { name, bytes } => self.session(name, bytes),
            Step::Crash => {
                self.sim.crash().expect("memory");
                self.reopen(false);
            }
            Step::Kill => self.reopen(true),
            Step::Close => {
                let closed = self.tier.as_ref().is_some_and(|tier| tier.close().is_ok());
                self.sim.crash().expect("memory");
                if closed {
                    self.index.values_mut().filter(|k| !k.doubtful).for_each(|k| k.durable = true);
                }
                self.reopen(false);
            }
            Step::Faults { kind, at } => {
                let kinds = [
                    Fault::ReadError,
                    Fault::WriteError,
                    Fault::SyncError,
                    Fault::NameError,
                    Fault::Full,
                ];
                self.sim.set_plan(Plan::default().once(kinds[kind], at));
            }
            Step::CrashAt { calls } => self.sim.set_plan(Plan::default().crash(calls)),
        }
        self.doubt();
        self.check_budget();
    }

    /// A failed sync may have lost every cell that was not durable, whichever commit requested the
    /// sync.
    fn doubt(&mut self) {
        if self.tier.as_ref().is_some_and(|tier| tier.stats().failed_syncs > 0) {
            let open = self.index.values_mut().filter(|known| !known.durable);
            open.for_each(|known| known.doubtful = true);
        }
    }
}

fn run(seed: u64, steps: &[Step]) {
    let mut world = World::new(seed);
    steps.iter().for_each(|step| world.step(step));
    if world.sim.is_closed() {
        world.reopen(false);
    }
    world.reopen(true);
}

/// Fewer cases than the default unless PROPTEST_CASES is set: each case is long.
fn config() -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    let usual = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if asked { usual } else { ProptestConfig { cases: 120, ..usual } }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn disk_tier_matches_a_map(seed in any::<u64>(), steps in steps(false)) {
        run(seed, &steps);
    }

    #[test]
    fn disk_tier_matches_a_map_under_faults(seed in any::<u64>(), steps in steps(true)) {
        run(seed, &steps);
    }
}

/// Fills three segments with chunks 0 to 8, drops them, and stores the same layers of chunks 20 to 22
/// in one of their files. Returns the number of calls of the second part, and which of its chunks
/// were made durable before a power failure after `crash_at` of these calls.
fn reuse_a_segment(sim: &SimFiles, crash_at: u64) -> (u64, Vec<u16>) {
    let (tier, ..) = open(sim).expect("a new store");
    let mut cells = Vec::new();
    for n in 0..9 {
        let (_, new) = put(&tier, n, &[0, 1, 2], true).expect("room");
        cells.extend(new.iter().zip(0..).map(|(&(spot, _), layer)| (spot, stored(n, layer))));
    }
    tier.commit_all().expect("a sync");
    tier.drop_cells(cells);
    if crash_at > 0 {
        sim.set_plan(Plan::default().crash(crash_at));
    }
    let before = sim.calls();
    let reused = tier.stats().segments_reused;
    let mut durable = Vec::new();
    tier.sweep();
    tier.prepare();
    for n in 20..23 {
        let written = put(&tier, n, &[0, 1, 2], true);
        if written.and_then(|(mark, _)| tier.commit(mark)).is_ok() {
            durable.push(n);
        }
        tier.prepare();
    }
    assert!(crash_at > 0 || tier.stats().segments_reused > reused, "{:?}", tier.stats());
    (sim.calls() - before, durable)
}

/// At every call of reusing a segment's file the power fails: chunks that were made durable in it are
/// found, and no record of the former segment is.
#[test]
fn records_of_a_former_segment_are_never_found() {
    let seeds = if std::env::var_os("KVTIER_EXHAUSTIVE").is_some() { 0..64 } else { 0..6 };
    for seed in seeds {
        let (calls, durable) = reuse_a_segment(&SimFiles::new(seed, SimOpts::default()), 0);
        assert_eq!(durable, [20, 21, 22]);
        for crash_at in 1..=calls {
            let sim = SimFiles::new(seed, SimOpts::default());
            let (_, durable) = reuse_a_segment(&sim, crash_at);
            if !sim.is_closed() {
                sim.crash().expect("memory");
            }
            let sim = sim.reopen();
            sim.set_plan(Plan::default());
            let all: u64 = sim.list().expect("names").iter().map(|entry| entry.bytes).sum();
            assert!(all <= BUDGET, "{all} bytes");
            let (tier, found, report) = open(&sim).expect("it opens again");
            assert_eq!(report.foreign_segments, 0, "{report:?}");
            let mut cells = Vec::new();
            for (chunk, places) in found.chunks() {
                let n = number_of(&chunk.key);
                // Until the sweep was durable the dropped chunks may come back, at their old places.
                assert!(n < 9 || (20..23).contains(&n), "chunk {n}");
                cells.extend(places.iter().map(|p| (n, p.layer, Spot(p.spot), p.seal)));
            }
            let results = read(&tier, &cells, true);
            for &n in &durable {
                let sound = cells.iter().zip(&results).filter(|(cell, r)| cell.0 == n && r.is_ok());
                assert_eq!(sound.count(), 3, "chunk {n}, crash at {crash_at}: {results:?}");
            }
            // The dropped chunks were durable: what is found of them is whole, and `read` compares.
            let bad = cells.iter().zip(&results).filter(|(cell, r)| cell.0 < 9 && r.is_err());
            assert_eq!(bad.count(), 0, "crash at {crash_at}");
            // What was made ahead counts for nothing, and its space can be used.
            let live = tier.segments().iter().filter(|segment| segment.live_blocks > 0).count();
            assert_eq!(tier.segments().len(), live, "{:?}", tier.segments());
        }
    }
}

#[test]
fn segments_made_ahead_give_way_to_what_needs_their_space() {
    let sim = SimFiles::new(7, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    let mut n = 0;
    let refused = loop {
        tier.prepare();
        assert!(tier.stats().used_bytes + tier.stats().spare_bytes <= BUDGET);
        match put(&tier, n, &[0, 1, 2], true) {
            Ok(_) => n += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused.status(), Status::Budget, "{refused}");
    let (again, ..) = open(&SimFiles::new(7, SimOpts::default())).expect("a new store");
    for other in 0..n {
        put(&again, other, &[0, 1, 2], true).expect("as much fits without");
    }
    assert!(put(&again, n, &[0, 1, 2], true).is_err(), "and not more");
    assert!(tier.stats().spare_bytes > 0 || tier.stats().segments_made > 0);
    // A smaller budget removes them.
    tier.set_budget(BUDGET / 2).expect("enough for three segments");
    assert!(tier.wants_prepare());
    tier.prepare();
    assert_eq!((tier.stats().spare_bytes, tier.wants_prepare()), (0, false));
    tier.close().expect("a sync");
    let names = sim.list().expect("names");
    assert!(names.iter().all(|entry| !entry.name.starts_with("new-")), "{names:?}");
}

const SAMPLE: [(u16, u32); 7] = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1), (3, 2)];

const SESSIONS: [(&[u8], &[u8]); 2] = [(b"first", b"what the store notes"), (b"third", &[3; 5000])];

/// Good cells, the number of bad ones, and the report and result of the open.
type Survey = (Vec<(u16, u32)>, usize, OpenReport, Recovered);

/// Opens an image and reads everything in it.
fn survey(image: &Image) -> Result<Survey> {
    let sim = restore(image);
    let (tier, found, report) = open(&sim)?;
    for session in &found.sessions {
        let right = SESSIONS
            .iter()
            .any(|(name, content)| *name == &*session.name && *content == &*session.payload);
        assert!(right, "a session that was never written: {session:?}");
    }
    let cells: Vec<_> = found
        .chunks()
        .flat_map(|(chunk, places)| {
            let n = number_of(&chunk.key);
            places.iter().map(move |place| (n, place.layer, Spot(place.spot), place.seal))
        })
        .collect();
    let results = read(&tier, &cells, true);
    let good: Vec<_> = cells
        .iter()
        .zip(&results)
        .filter(|(_, result)| result.is_ok())
        .map(|(cell, _)| (cell.0, cell.1))
        .collect();
    let bad = results.len() - good.len();
    assert_eq!(tier.stats().corrupt as usize, bad);
    Ok((good, bad, report, found))
}

#[test]
fn checkpoint_and_scan_recover_the_same_index() {
    let with = sample(true);
    let mut without = with.clone();
    without.retain(|name, _| !name.starts_with("index-"));
    assert_eq!(without.len() + 1, with.len());
    let (good, bad, report, found) = survey(&with).expect("it opens");
    let (scanned_good, scanned_bad, scan, scanned) = survey(&without).expect("it opens");
    assert_eq!((good.as_slice(), bad), (&SAMPLE[..], 0));
    assert_eq!((scanned_good.as_slice(), scanned_bad), (&SAMPLE[..], 0));
    let all = |found: &Recovered| -> Vec<_> {
        found.chunks().map(|(chunk, places)| (*chunk, places.to_vec())).collect()
    };
    assert_eq!(all(&found), all(&scanned));
    assert_eq!(found.sessions, scanned.sessions);
    let names: Vec<&[u8]> = found.sessions.iter().map(|session| &*session.name).collect();
    assert_eq!(names, [&b"first"[..], &b"third"[..]]);
    assert!((report.checkpoint, scan.checkpoint) == (1, 0));
    assert!(report.scanned_records < scan.scanned_records);
    assert_eq!((report.torn_tails, report.damaged_headers), (0, 0));
}

/// One flipped bit anywhere: no wrong bytes, all other cells are found, and the damage is
/// counted.
#[test]
fn flipped_bit_loses_only_the_cell_it_hits() {
    // Testing every significant byte takes minutes in a debug build.
    let stride = if std::env::var_os("KVTIER_EXHAUSTIVE").is_some() { 1 } else { 19 };
    let (mut hit, mut lost_sessions) = (0, 0);
    for checkpoint in [false, true] {
        let image = sample(checkpoint);
        for (name, bytes) in &image {
            // The heads of all headers and frames, most bytes that a checkpoint lists, and a sample
            // of everything else.
            let listed = if name.starts_with("index-") { 4096 + 1200 } else { 0 };
            let interesting = |at: usize| {
                let place = at % 4096;
                let meant = !(420..4088).contains(&place) && at < 16 * 4096;
                ((meant || at < listed) && at % stride == 0) || at % (67 * stride) == 0
            };
            let whole = |at: usize| bytes[at / 4096 * 4096..][..4096].iter().any(|&b| b != 0);
            for at in (0..bytes.len()).filter(|&at| interesting(at) && whole(at)) {
                let mut damaged = image.clone();
                let bit = 1u8 << (at % 8);
                if let Some(bytes) = damaged.get_mut(name) {
                    bytes[at] ^= bit;
                }
                let (good, bad, report, found) = survey(&damaged).expect("it opens");
                let cells = SAMPLE.iter().filter(|cell| !good.contains(cell)).count();
                let sessions = SESSIONS.len() - found.sessions.len();
                let missing = cells + sessions;
                let place = format!("{name} byte {at}: {report:?}, {bad} bad, {missing} missing");
                assert!(cells <= 3 && sessions <= 1, "{place}");
                hit += u32::from(missing > 0);
                lost_sessions += sessions;
                let counted = report.damaged_headers > 0
                    || report.unsound_checkpoints > 0
                    || report.torn_tails > 0
                    || bad > 0;
                assert!(missing == 0 || counted, "{place}");
            }
        }
    }
    assert!(hit > 0 && lost_sessions > 0, "{hit} hits, {lost_sessions} sessions");
}

#[test]
fn truncated_segment_keeps_whole_records() {
    let image = sample(false);
    let name = image.keys().find(|name| name.starts_with("seg-")).expect("one").clone();
    let mut last = 0;
    for blocks in 0..=16 {
        let mut cut = image.clone();
        if let Some(bytes) = cut.get_mut(&name) {
            bytes.truncate(blocks * 4096);
        }
        let (good, bad, ..) = survey(&cut).expect("it opens");
        assert_eq!(bad, 0);
        assert!(good.len() >= last, "{blocks} blocks: {good:?}");
        last = good.len();
    }
}

#[test]
fn foreign_segments_are_not_adopted() {
    let mut image = sample(false);
    let other = SimFiles::new(2, SimOpts::default());
    let options = Options { segment_bytes: SEGMENT, ..Options::new(BUDGET, [8; 16]) };
    let (tier, ..) = DiskTier::open(Arc::new(other.clone()), options).expect("a new store");
    put(&tier, 9, &[0], false).expect("room");
    tier.close().expect("a sync");
    let theirs = other.durable().expect("memory");
    let segment = theirs.get("seg-0000000000000001.kvt").expect("one").clone();
    image.insert("seg-00000000000000aa.kvt".into(), segment);
    let (good, bad, report, _) = survey(&image).expect("it opens");
    assert_eq!((good.as_slice(), bad, report.foreign_segments), (&SAMPLE[..], 0, 1));

    let store = image.get_mut("store.kvt").expect("one");
    store[40] ^= 1;
    assert_eq!(survey(&image).expect("the second copy").0.len(), SAMPLE.len());
    image.get_mut("store.kvt").expect("one")[4096 + 40] ^= 1;
    assert_eq!(survey(&image).err().expect("damaged").status(), Status::Corrupt);
}

/// Every version of the format stays readable. Written bytes change only with the version;
/// `KVTIER_BLESS=1` rewrites the file.
#[test]
fn format_version_1_is_stable() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/disk-v1.bin");
    let now = sample(true);
    if std::env::var_os("KVTIER_BLESS").is_some() {
        std::fs::write(path, pack(&now)).expect("written");
    }
    let then = unpack(&std::fs::read(path).expect("the file is in the repository"));
    let (good, bad, report, found) = survey(&then).expect("it opens");
    assert_eq!((good.as_slice(), bad, report.checkpoint), (&SAMPLE[..], 0, 1));
    assert_eq!(found.sessions.len(), 2);
    for (name, bytes) in &then {
        let same = now.get(name).expect("the same files");
        let at = bytes.iter().zip(same).position(|(a, b)| a != b);
        assert_eq!((at, bytes.len()), (None, same.len()), "{name}");
    }
    assert_eq!(then.len(), now.len());
}

/// Files without their blocks of zeros.
fn pack(image: &Image) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, bytes) in image {
        let blocks: Vec<_> =
            bytes.chunks(4096).enumerate().filter(|(_, b)| b.iter().any(|&x| x != 0)).collect();
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend((blocks.len() as u32).to_le_bytes());
        for (at, block) in blocks {
            out.extend((at as u32).to_le_bytes());
            out.extend(block);
        }
    }
    out
}

fn unpack(mut bytes: &[u8]) -> Image {
    let mut image = Image::new();
    let number = |bytes: &mut &[u8]| {
        let (n, rest) = bytes.split_at(4);
        *bytes = rest;
        u32::from_le_bytes(n.try_into().expect("4 bytes")) as usize
    };
    while let Some((&length, rest)) = bytes.split_first() {
        let (name, rest) = rest.split_at(length as usize);
        bytes = rest;
        let mut file = vec![0; number(&mut bytes)];
        for _ in 0..number(&mut bytes) {
            let at = number(&mut bytes) * 4096;
            let (block, rest) = bytes.split_at(4096);
            bytes = rest;
            file[at..at + 4096].copy_from_slice(block);
        }
        image.insert(String::from_utf8(name.to_vec()).expect("a name"), file);
    }
    image
}

#[test]
fn single_planes_are_read_and_verified() {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    let (_, cells) = put(&tier, 0, &[2, 3], false).expect("room");
    for (layer, &(spot, seal)) in [2, 3].into_iter().zip(&cells) {
        let who = identity(0, layer);
        let planes = tier.planes(spot, &who, seal).expect("there");
        let [k, v] = lengths(0, layer);
        assert_eq!(planes.iter().map(|p| p.bytes).collect::<Vec<_>>(), [k, v]);
        let mut bytes = vec![0; v as usize];
        let mut plane =
            GetPlane { kind: 2, id: 0, version: 1, bytes: v, address: bytes.as_mut_ptr() };
        // SAFETY: the memory belongs to the vector, here and below.
        unsafe { tier.read_plane(spot, &who, seal, &plane) }.expect("good");
        assert!(bytes == content(0, layer)[k as usize..]);
        // SAFETY: as above.
        assert!(unsafe { tier.read_plane(spot, &who, seal ^ 1, &plane) }.is_err());
        plane.kind = 9;
        // SAFETY: as above.
        let missing = unsafe { tier.read_plane(spot, &who, seal, &plane) };
        assert_eq!(missing.expect_err("none").status(), Status::NotFound);
        plane.kind = 2;
        let name = format!("seg-{:016x}.kvt", spot.segment());
        sim.rot(&name, (u64::from(spot.block()) * 4096 + k + 1) * 8).expect("a bit");
        // SAFETY: as above.
        let rotten = unsafe { tier.read_plane(spot, &who, seal, &plane) };
        assert_eq!(rotten.expect_err("damaged").status(), Status::Corrupt);
    }
    assert_eq!(tier.stats().corrupt, 4);
}

#[test]
fn read_with_a_wrong_identity_is_corrupt() {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    let (_, cells) = put(&tier, 0, &[0, 4], false).expect("room");
    let [(first, seal), (_, other_seal)] = cells[..] else { panic!("two cells") };
    let nowhere = Spot(first.0 + (100 << 36));
    let asked = [
        (0, 0, first, seal),
        (0, 0, first, other_seal),
        (0, 4, first, seal),
        (1, 3, first, seal),
        (0, 0, nowhere, seal),
        (0, 0, Spot(first.0 + (60_000 << 16)), seal),
        (0, 0, Spot::NONE, seal),
    ];
    let found: Vec<_> =
        read(&tier, &asked, false).into_iter().map(|r| r.err().map(|e| e.status())).collect();
    let (corrupt, gone) = (Some(Status::Corrupt), Some(Status::NotFound));
    assert_eq!(found, [None, corrupt, corrupt, corrupt, gone, gone, gone]);
}

#[test]
fn full_disk_fails_appends_and_recovers() {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    put(&tier, 0, &[0], true).expect("room");
    sim.set_capacity(3 * SEGMENT / 2);
    let mut refused = 0;
    for n in 1..40 {
        if let Err(error) = put(&tier, n, &[0, 1], true) {
            assert_eq!(error.status(), Status::Budget, "{error}");
            refused += 1;
        }
    }
    assert!(refused > 20 && tier.stats().refused > 0);
    sim.set_capacity(1 << 30);
    let (mark, cells) = put(&tier, 50, &[1], true).expect("room again");
    tier.commit(mark).expect("a sync");
    assert!(read(&tier, &[(50, 1, cells[0].0, cells[0].1)], true)[0].is_ok());
}

#[test]
fn dropping_cells_frees_disk_budget() {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    let mut all = Vec::new();
    let refused = loop {
        let n = all.len() as u16;
        match put(&tier, n, &[0, 1, 2], true) {
            Ok((_, cells)) => all.push((n, cells)),
            Err(error) => break error,
        }
        assert!(all.len() < 1000, "never full");
    };
    assert_eq!(refused.status(), Status::Budget);
    for (n, cells) in &all {
        tier.drop_cells((0..).zip(cells).map(|(layer, &(spot, _))| (spot, stored(*n, layer))));
    }
    assert!(tier.sweep() > 0);
    put(&tier, 0, &[0, 1, 2], true).expect("room again");
    assert!(tier.stats().most_used_bytes <= BUDGET);
}

/// Retries while the disk is full. Compacting threads free space sooner or later.
fn once_there_is_room<T>(mut call: impl FnMut() -> Result<T>) -> T {
    loop {
        match call() {
            Ok(done) => return done,
            Err(error) => assert_eq!(error.status(), Status::Budget, "{error}"),
        }
        std::thread::yield_now();
    }
}

/// Decrements the number of writers when a writer ends, also by a panic. Other threads wait for all
/// writers.
struct Writing<'a>(&'a AtomicUsize);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Several threads append, commit, read, drop, forget, compact and write checkpoints on real
/// files. Afterwards durable cells are found, and forgotten ones are not.
#[test]
fn threads_share_a_tier() {
    let dir = std::env::temp_dir().join(format!("kvtier-disk-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let real = || -> Arc<dyn Files> {
        let opts = kvtier::io::real::RealOpts::default();
        Arc::new(kvtier::io::real::RealFiles::open(&dir, &opts).expect("a directory"))
    };
    let budget = 64 * SEGMENT + 1_000_000;
    let options = Options { segment_bytes: SEGMENT, max_open: 4, ..Options::new(budget, [9; 16]) };
    let (tier, ..) = DiskTier::open(real(), options.clone()).expect("a new store");
    let shared = SharedIndex::new();
    let writers = 4;
    let left = AtomicUsize::new(writers);
    let forgotten: Vec<u16> = std::thread::scope(|scope| {
        let write = |thread: u16| {
            let (tier, shared, left) = (&tier, &shared, &left);
            move || {
                let _writing = Writing(left);
                let mut forgotten = Vec::new();
                for i in 0..80u16 {
                    let n = thread * 100 + i;
                    let mark = once_there_is_room(|| shared.append(tier, n, &[0, 1]));
                    tier.commit(mark).expect("a sync");
                    shared.read(tier, n);
                    if i % 4 != 0 {
                        let mark = once_there_is_room(|| shared.drop_chunk(tier, n, i % 2 == 0));
                        forgotten.extend(mark.map(|_| n));
                        let session = [thread as u8 + 1];
                        once_there_is_room(|| tier.put_session(&session, &i.to_le_bytes()));
                    }
                    shared.read(tier, n / 2);
                }
                forgotten
            }
        };
        let threads: Vec<_> = (0..writers as u16).map(|t| scope.spawn(write(t))).collect();
        // Two compacting threads, so that both reach the same segment at times.
        for turn in 0..2 {
            let (tier, shared, left) = (&tier, &shared, &left);
            scope.spawn(move || {
                while left.load(Ordering::SeqCst) > 0 {
                    let mut segments = tier.segments();
                    segments.sort_by_key(|s| (std::cmp::Reverse(s.dead_blocks), s.number));
                    segments.iter().skip(turn).take(2).for_each(|s| {
                        shared.clean(tier, s.number);
                    });
                    std::thread::yield_now();
                }
            });
        }
        let (tier, shared, left) = (&tier, &shared, &left);
        scope.spawn(move || {
            while left.load(Ordering::SeqCst) > 0 {
                if let Err(error) = shared.checkpoint(tier) {
                    assert_eq!(error.status(), Status::Budget, "{error}");
                }
                std::thread::yield_now();
            }
        });
        threads.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
    });
    let stats = tier.stats();
    assert!(stats.most_used_bytes <= budget);
    assert!(stats.compacted_bytes > 0 && stats.checkpoints > 0, "{stats:?}");
    assert_eq!((stats.corrupt, stats.failed_records), (0, 0), "{stats:?}");
    tier.commit_all().expect("a sync");
    drop(tier);
    let (tier, found, report) = DiskTier::open(real(), options).expect("it opens again");
    assert_eq!((report.damaged_headers, report.torn_tails), (0, 0), "{report:?}");
    shared.check(&tier, &found, &forgotten);
    let last = 79u16.to_le_bytes();
    assert_eq!(found.sessions.len(), writers);
    assert!(found.sessions.iter().all(|session| *session.payload == last));
    drop(tier);
    let real = real();
    let report = fsck(&*real, &FsckOptions::default()).expect("a store");
    assert!(report.is_clean(), "{:?}", report.damage);
    drop(real);
    std::fs::remove_dir_all(&dir).expect("it was made here");
}

/// A compaction fails at a write or a sync, a second one succeeds, and the source is deleted.
/// Then the process dies, or the power fails, or both. The failed copy may be found, and must not
/// replace the good one.
#[test]
fn failed_compaction_copy_is_ignored() {
    let mut found_twice = 0;
    for seed in 0..600 {
        let mut world = World::new(seed);
        // A live record in the segment that compaction writes to keeps that segment.
        world.append(0, 0, 2, seed % 2 == 0);
        world.commit(|_| true);
        world.clean(0);
        world.append(3, 0, 2, seed % 2 == 0);
        world.session(0, 5);
        world.commit(|_| true);
        let fault = [Fault::WriteError, Fault::SyncError, Fault::ShortWrite][seed as usize % 3];
        world.sim.set_plan(Plan::default().once(fault, 1 + seed / 3 % 2));
        world.clean(1);
        world.sim.set_plan(Plan::default());
        world.clean(1);
        found_twice += u64::from(world.fsck().duplicates > 0);
        if seed % 5 < 3 {
            world.reopen(true);
        }
        if seed % 7 < 5 {
            world.sim.crash().expect("memory");
            found_twice += u64::from(world.fsck().duplicates > 0);
            world.reopen(false);
        }
        world.clean(0);
        world.reopen(true);
    }
    assert!(found_twice > 50, "{found_twice}: too few failed copies were found");
}

/// Sequences that once lost a durable cell or session.
#[test]
fn regression_seeds_lose_nothing_durable() {
    use Step::*;
    let put = |n, first, layers| Append { n, first, layers, in_place: false };
    let session = |bytes| Session { name: 0, bytes };
    // A sync fails during compaction, another compaction succeeds, and the process dies.
    run(
        8253716897381649235,
        &[
            put(10, 0, 2),
            put(7, 0, 2),
            Clean { pick: 0 },
            Clean { pick: 0 },
            put(6, 0, 1),
            put(0, 0, 4),
            Clean { pick: 0 },
            Close,
            Drop { n: 10, forget: true },
            Read { from: 0, in_place: false },
            put(0, 2, 3),
            Kill,
            put(1, 5, 2),
            put(7, 4, 1),
            session(3864),
            Checkpoint,
            Drop { n: 6, forget: false },
            Checkpoint,
            Faults { kind: 0, at: 2 },
            put(2, 0, 2),
            put(2, 2, 4),
            Clean { pick: 8 },
            Faults { kind: 2, at: 3 },
            put(3, 0, 3),
            Drop { n: 4, forget: false },
            Clean { pick: 2 },
            Clean { pick: 0 },
            put(4, 3, 1),
            Clean { pick: 6 },
        ],
    );
    // The record of a drop is lost with the failed sync of its segment. The segment is compacted,
    // and the drop is not reported durable.
    run(
        228122372733310263,
        &[
            put(10, 0, 1),
            put(9, 1, 3),
            Clean { pick: 0 },
            put(4, 2, 2),
            Clean { pick: 1 },
            put(3, 0, 2),
            put(4, 5, 3),
            Read { from: 0, in_place: false },
            Clean { pick: 0 },
            Read { from: 0, in_place: false },
            put(4, 0, 1),
            Read { from: 0, in_place: false },
            Kill,
            Session { name: 1, bytes: 0 },
            Clean { pick: 3 },
            put(3, 4, 2),
            Drop { n: 4, forget: true },
            session(0),
            put(0, 0, 3),
            put(3, 1, 3),
            put(0, 3, 1),
            put(11, 0, 1),
            Faults { kind: 2, at: 3 },
            Clean { pick: 3 },
            Read { from: 0, in_place: false },
            CommitAll,
            Clean { pick: 1 },
            CommitAll,
            session(0),
        ],
    );
    // The newest record of a session is read after its sync failed and the process died, but it is
    // not on the disk when the power fails.
    run(
        7320073348223712821,
        &[
            put(2, 0, 1),
            Close,
            Session { name: 2, bytes: 1 },
            Close,
            Crash,
            put(9, 0, 3),
            Faults { kind: 2, at: 3 },
            Read { from: 0, in_place: false },
            put(0, 2, 1),
            put(2, 1, 2),
            Clean { pick: 1 },
            put(3, 1, 3),
            Session { name: 2, bytes: 3864 },
            put(5, 0, 1),
            Commit { n: 9 },
            put(0, 0, 1),
            Read { from: 0, in_place: false },
            Commit { n: 5 },
            put(0, 0, 1),
            Kill,
            put(0, 0, 1),
            put(3, 0, 1),
            put(0, 1, 3),
            put(0, 4, 3),
            Drop { n: 9, forget: true },
            session(0),
            put(1, 0, 1),
            put(0, 0, 1),
            Close,
        ],
    );
    // The newest record of a session is lost with the failed sync of its segment, and a checkpoint
    // covers the record before it.
    run(
        1112109436295218617,
        &[
            put(2, 0, 1),
            Clean { pick: 0 },
            CrashAt { calls: 22 },
            put(0, 0, 1),
            put(3, 0, 1),
            Append { n: 0, first: 1, layers: 4, in_place: true },
            put(0, 0, 1),
            Clean { pick: 0 },
            Drop { n: 1, forget: false },
            Read { from: 3, in_place: false },
            Read { from: 0, in_place: false },
            Session { name: 1, bytes: 0 },
            Kill,
            Clean { pick: 0 },
            Faults { kind: 0, at: 2 },
            put(0, 0, 2),
            Append { n: 0, first: 2, layers: 4, in_place: true },
            put(10, 1, 1),
            Read { from: 11, in_place: false },
            Crash,
            Crash,
            session(1),
            Kill,
            Faults { kind: 2, at: 2 },
            Clean { pick: 2 },
            session(1),
            put(0, 1, 4),
            put(0, 0, 1),
            Append { n: 1, first: 0, layers: 4, in_place: true },
            Checkpoint,
        ],
    );
}

/// A budget without space for a checkpoint: it is rejected before anything changes, and space
/// that is freed later is reserved for it.
#[test]
fn oversized_checkpoint_is_rejected_and_gets_freed_space() {
    let (budget, seed) = (24 * SEGMENT, 3);
    let sim = SimFiles::new(seed, SimOpts::default());
    let open = || {
        let options = Options { segment_bytes: SEGMENT, ..Options::new(budget, [9; 16]) };
        DiskTier::open(Arc::new(sim.reopen()), options).expect("it opens")
    };
    let checkpoint = |tier: &DiskTier, shared: &SharedIndex| shared.checkpoint(tier);
    let shared = SharedIndex::new();
    let (tier, ..) = open();
    let mut n = 0;
    let mut fill = |tier: &DiskTier, shared: &SharedIndex| {
        let first = n;
        let refused = loop {
            match shared.append(tier, n, &[0, 1, 2]) {
                Ok(_) => n += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.status(), Status::Budget, "{refused}");
        first..n
    };
    let all = fill(&tier, &shared);
    let names = |sim: &SimFiles| -> Vec<_> { sim.reopen().list().expect("names") };
    let refused = checkpoint(&tier, &shared).expect_err("no room");
    assert_eq!(refused.status(), Status::Budget, "{refused}");
    let (before, used) = (tier.segments(), tier.stats().used_bytes);
    for _ in 0..3 {
        assert_eq!(checkpoint(&tier, &shared).map_err(|e| e.status()), Err(Status::Budget));
    }
    assert_eq!((tier.segments(), tier.stats().used_bytes), (before, used));
    assert!(all.len() > 8, "{all:?}");
    // Frees space for a checkpoint; appends must not take that space.
    for n in all.clone().take(all.len() / 2 + 2) {
        shared.drop_chunk(&tier, n, false).expect("a drop without a record");
    }
    tier.sweep();
    fill(&tier, &shared);
    checkpoint(&tier, &shared).expect("room was left");
    fill(&tier, &shared);
    // Repeatedly: there is always space for the next checkpoint beside the last one.
    for _ in 0..3 {
        checkpoint(&tier, &shared).expect("room is left");
        fill(&tier, &shared);
    }
    tier.commit_all().expect("a sync");
    assert!(tier.stats().most_used_bytes <= budget);
    drop(tier);
    let bytes: u64 = names(&sim).iter().map(|entry| entry.bytes).sum();
    assert!(bytes <= budget);
    // After a reopen, too.
    let (tier, found, report) = open();
    assert!(report.checkpoint > 0);
    shared.check(&tier, &found, &[]);
    fill(&tier, &shared);
    checkpoint(&tier, &shared).expect("room is left");
}
