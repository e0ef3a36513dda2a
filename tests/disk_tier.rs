//! The disk tier against a model: random appends, reads, drops, cleanings,
//! checkpoints, faults and crashes on a simulated disk; damage of every bit and
//! every length; a store of this version of the format that is in the repository.

#![cfg(not(feature = "shuttle"))]

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvtier::base::memory::{Buffer, MemoryWish};
use kvtier::base::status::{Result, Status};
use kvtier::format::checkpoint::Place;
use kvtier::format::keys::{Fingerprint, Key};
use kvtier::format::record::Chunk;
use kvtier::format::seal::Identity;
use kvtier::io::files::{Files, Piece, Way};
use kvtier::io::simulated::plan::{Fault, Plan};
use kvtier::io::simulated::{SimFiles, SimOpts};
use kvtier::tier::disk::{
    CellAt, DiskTier, GetPlane, Gets, Keeper, Mark, OpenReport, Options, PutPlane, Puts, Recovered,
    Spot,
};
use proptest::prelude::*;

const SEGMENT: u64 = 16 * 4096;
const BUDGET: u64 = 10 * SEGMENT + 600_000;

fn key_of(n: u16) -> Key {
    let mut key = [0xC4; 32];
    key[..2].copy_from_slice(&n.to_le_bytes());
    Key(key)
}

fn number_of(key: &Key) -> u16 {
    u16::from_le_bytes([key.0[0], key.0[1]])
}

fn chunk_of(n: u16) -> Chunk {
    Chunk {
        namespace: Key([1; 32]),
        parent: key_of(n.wrapping_sub(1)),
        key: key_of(n),
        fingerprint: Fingerprint([7; 32]),
        position: u32::from(n),
        valid_tokens: 256,
    }
}

fn identity(n: u16, layer: u32) -> Identity {
    let chunk = chunk_of(n);
    Identity { key: chunk.key, fingerprint: chunk.fingerprint, layer, valid_tokens: 256, codec: 0 }
}

/// The lengths of a cell's planes: whole blocks, or not.
fn lengths(n: u16, layer: u32) -> [u64; 2] {
    match (u32::from(n) + layer) % 4 {
        0 => [4096, 4096],
        1 => [4096, 0],
        2 => [3000, 1096],
        _ => [5000, 700],
    }
}

fn stored(n: u16, layer: u32) -> u64 {
    lengths(n, layer).iter().sum()
}

/// What a cell's bytes are: nobody else's are like them.
fn content(n: u16, layer: u32) -> Vec<u8> {
    let mut state = u64::from(n) << 32 | u64::from(layer) | 1 << 60;
    (0..stored(n, layer))
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}

fn open(sim: &SimFiles) -> Result<(DiskTier, Recovered, OpenReport)> {
    let options = Options { segment_bytes: SEGMENT, max_open: 3, ..Options::new(BUDGET, [9; 16]) };
    DiskTier::open(Arc::new(sim.clone()), options)
}

/// Writes cells of one chunk; where each is, or why not.
fn put(
    tier: &DiskTier,
    n: u16,
    layers: &[u32],
    in_place: bool,
) -> Result<(Mark, Vec<(Spot, u64)>)> {
    let cells: Vec<Vec<u8>> = layers.iter().map(|&layer| content(n, layer)).collect();
    let buffer = Buffer::map(&MemoryWish { bytes: 1 << 20, ..MemoryWish::default() }, None)?;
    let mut puts = Puts::default();
    puts.record(chunk_of(n));
    let mut at = if in_place { 0 } else { 13 };
    for (cell, &layer) in cells.iter().zip(layers) {
        puts.cell(layer, 0, 0, in_place);
        let mut from = buffer.range(at, 16384).expect("room");
        // SAFETY: the test's own buffer, 16 KiB for each cell.
        unsafe { from.copy_from_nonoverlapping(cell.as_ptr(), cell.len()) };
        for (kind, bytes) in (1..).zip(lengths(n, layer)) {
            let address = from.cast_const();
            puts.plane(PutPlane { kind, id: 0, version: 1, bytes, address, sum: None });
            from = from.wrapping_add(bytes as usize);
        }
        at += 16384;
    }
    // SAFETY: the buffer outlives the call.
    unsafe { tier.append(&mut puts) };
    let (record, cells) = puts.iter().next().expect("one");
    let mark = record.result.clone()?;
    Ok((mark, cells.iter().map(|cell| (cell.spot, cell.seal)).collect()))
}

/// Reads cells; for each whether it was good, after its bytes were compared.
fn read(tier: &DiskTier, cells: &[(u16, u32, Spot, u64)], in_place: bool) -> Vec<Result<()>> {
    let bytes = (cells.len() as u64 + 1) * 16384;
    let buffer = Buffer::map(&MemoryWish { bytes, ..MemoryWish::default() }, None).expect("memory");
    let mut gets = Gets::default();
    let skew = if in_place { 0 } else { 7 };
    for (i, &(n, layer, spot, seal)) in cells.iter().enumerate() {
        gets.cell(spot, identity(n, layer), seal, in_place);
        let mut at = i as u64 * 16384 + skew;
        for (kind, bytes) in (1..).zip(lengths(n, layer)) {
            let address = buffer.range(at, bytes).expect("room");
            gets.plane(GetPlane { kind, id: 0, version: 1, bytes, address });
            at += bytes;
        }
    }
    // SAFETY: the buffer is this test's, 16 KiB for each cell.
    unsafe { tier.read(&mut gets) };
    let check = |(i, get): (usize, &kvtier::tier::disk::Get)| {
        let (n, layer, ..) = cells[i];
        let at = buffer.range(i as u64 * 16384 + skew, 16384 - skew).expect("room");
        // SAFETY: read above; nobody writes it any more.
        let found = unsafe { std::slice::from_raw_parts(at, stored(n, layer) as usize) };
        if get.result.is_ok() {
            assert!(found == content(n, layer), "wrong bytes of chunk {n} layer {layer}");
        }
        get.result.clone()
    };
    gets.iter().enumerate().map(check).collect()
}

/// A cell in the model's index.
#[derive(Clone, Copy, Debug)]
struct Known {
    spot: Spot,
    seal: u64,
    mark: Option<Mark>,
    durable: bool,
    /// A sync of its segment failed: its bytes may be gone.
    doubtful: bool,
}

type Index = BTreeMap<(u16, u32), Known>;

/// The index as cleaning asks for it.
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

impl Keeper for Owner<'_> {
    fn wants(&mut self, cell: &CellAt) -> bool {
        self.known(cell).is_some_and(|known| known.seal == cell.seal)
    }

    fn moved(&mut self, cell: &CellAt, to: Spot) -> bool {
        let known = self.known(cell).expect("it was wanted");
        known.spot = to;
        true
    }

    fn lost(&mut self, cell: &CellAt) -> bool {
        let id = (number_of(&cell.chunk.key), cell.layer);
        let known = self.index.remove(&id).expect("it was wanted");
        assert!(!known.durable, "a durable cell was lost: {id:?}");
        self.lost.push(id);
        true
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

/// What must not come back: chunk, layer, and whether that is durable.
#[derive(Default)]
struct Gone {
    pending: BTreeMap<(u16, u32), Mark>,
    durable: BTreeSet<(u16, u32)>,
}

/// The content of a session that is durable, and those noted since.
type Contents = (Vec<u8>, Vec<Vec<u8>>);

struct World {
    sim: SimFiles,
    tier: Option<DiskTier>,
    index: Index,
    gone: Gone,
    /// The last content of each session that is durable, and those noted since.
    sessions: BTreeMap<Vec<u8>, Contents>,
    session_marks: Vec<(Vec<u8>, Vec<u8>, Mark)>,
    /// A sync failed since the power last did: what is read may not be on the disk,
    /// and no later sync can tell.
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

    /// The files are never more than the budget, whatever happened.
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
        match put(tier, n, &new, in_place) {
            Ok((mark, cells)) => {
                for (&layer, (spot, seal)) in new.iter().zip(cells) {
                    let mark = Some(mark);
                    let known = Known { spot, seal, mark, durable: false, doubtful: false };
                    self.index.insert((n, layer), known);
                    self.gone.pending.remove(&(n, layer));
                    self.gone.durable.remove(&(n, layer));
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
        match tier.clean(segment.number, &mut owner) {
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
                let places: Vec<Place> = index
                    .range((n, 0)..=(n, u32::MAX))
                    .map(|(&(_, layer), known)| Place {
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

    /// Opens the store again; `all` says that nothing written may be missing.
    fn reopen(&mut self, all: bool) {
        let failed = self.tier.as_ref().is_some_and(|tier| tier.stats().failed_syncs > 0);
        self.sync_failed = all && (self.sync_failed || failed);
        self.tier = None;
        self.sim = self.sim.reopen();
        self.sim.set_plan(Plan::default());
        self.check_budget();
        let (tier, found, _) = open(&self.sim).expect("it opens again");
        let before = std::mem::take(&mut self.index);
        self.adopt(&tier, &found);
        for (id, known) in &before {
            let must = known.durable || (all && !known.doubtful);
            assert!(!must || self.index.contains_key(id), "{id:?} is missing: {known:?}");
        }
        for id in &self.gone.durable {
            assert!(!self.index.contains_key(id), "{id:?} was forgotten and is back");
        }
        self.audit(&tier, &before, all);
        // What was on disk only is durable from here on.
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

    /// Takes what was found into the index; of a cell that is there twice the first.
    fn adopt(&mut self, tier: &DiskTier, found: &Recovered) {
        for (chunk, places) in found.chunks() {
            let n = number_of(&chunk.key);
            assert_eq!(*chunk, chunk_of(n), "a chunk that nobody stored");
            for place in places {
                let id = (n, place.layer);
                assert_eq!(u64::from(place.stored_bytes), stored(id.0, id.1));
                let (spot, seal) = (Spot(place.spot), place.seal);
                let known = Known { spot, seal, mark: None, durable: false, doubtful: true };
                match self.index.entry(id) {
                    Entry::Vacant(entry) => drop(entry.insert(known)),
                    Entry::Occupied(_) => tier.drop_cells([(spot, stored(id.0, id.1))]),
                }
            }
        }
    }

    /// Reads everything that was found: what is good is durable enough from now on,
    /// what is not must not have been promised.
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
            assert!(now == *durable || later.contains(&now), "session {name:?} is another");
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

    /// A failed sync may have lost whatever was not durable, of whoever asked for it.
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

/// Fewer cases than usual unless somebody says how many: each is long.
fn config() -> ProptestConfig {
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    let usual = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if asked { usual } else { ProptestConfig { cases: 120, ..usual } }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn agrees_with_a_map(seed in any::<u64>(), steps in steps(false)) {
        run(seed, &steps);
    }

    #[test]
    fn agrees_with_a_map_when_things_fail(seed in any::<u64>(), steps in steps(true)) {
        run(seed, &steps);
    }
}

type Image = BTreeMap<String, Vec<u8>>;

/// A disk with these files on it.
fn restore(image: &Image) -> SimFiles {
    let sim = SimFiles::new(1, SimOpts::default());
    for (name, bytes) in image {
        let file = sim.create(name, bytes.len() as u64).expect("room");
        let wish = MemoryWish { bytes: bytes.len().max(1) as u64, ..MemoryWish::default() };
        let buffer = Buffer::map(&wish, None).expect("memory");
        let length = bytes.len() as u64;
        let mut pieces = [Piece::one(file, Way::Write, 0, buffer.address(), length)];
        // SAFETY: the test's own buffer, as long as the bytes.
        unsafe {
            buffer.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            sim.transfer(&mut pieces);
        }
        assert!(length == 0 || pieces[0].result.is_ok(), "{:?}", pieces[0].result);
        sim.sync(file).expect("a sync");
        sim.close(file);
    }
    sim.sync_names().expect("a sync");
    sim
}

/// A store with a bit of everything: the same bytes whenever it is made.
fn sample(checkpoint: bool) -> Image {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    put(&tier, 0, &[0, 1], false).expect("room");
    put(&tier, 1, &[0, 1], true).expect("room");
    let (_, gone) = put(&tier, 2, &[0], false).expect("room");
    tier.put_session(b"first", b"what the store notes").expect("room");
    if checkpoint {
        let cover = tier.cover();
        let places = |n: u16, cells: &[(Spot, u64)]| -> Vec<Place> {
            let place = |(layer, &(spot, seal)): (u32, &(Spot, u64))| Place {
                spot: spot.0,
                seal,
                stored_bytes: stored(n, layer) as u32,
                layer,
                codec: 0,
                planes: 2,
            };
            (0..).zip(cells).map(place).collect()
        };
        // Where they are follows from what was stored before.
        let (_, found, _) = open(&restore(&{
            tier.commit_all().expect("a sync");
            sim.durable().expect("memory")
        }))
        .expect("it opens");
        let all: Vec<(u16, Vec<(Spot, u64)>)> = found
            .chunks()
            .map(|(chunk, places)| {
                let cells = places.iter().map(|place| (Spot(place.spot), place.seal)).collect();
                (number_of(&chunk.key), cells)
            })
            .collect();
        let mut source = |sink: &mut kvtier::tier::disk::Sink<'_>| {
            all.iter().try_for_each(|(n, cells)| sink.chunk(&chunk_of(*n), &places(*n, cells)))
        };
        tier.checkpoint(&cover, 8, 8, &mut source).expect("room");
    }
    put(&tier, 3, &[0, 1, 2], false).expect("room");
    tier.forget(key_of(2), &[]).expect("room");
    tier.drop_cells(gone.iter().map(|&(spot, _)| (spot, stored(2, 0))));
    tier.put_session(b"second", b"").expect("room");
    tier.put_session(b"third", &[3; 5000]).expect("room");
    tier.close().expect("a sync");
    sim.durable().expect("memory")
}

const SAMPLE: [(u16, u32); 7] = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1), (3, 2)];

/// Cells that were good, how many were bad, what opening said and found.
type Survey = (Vec<(u16, u32)>, usize, OpenReport, Recovered);

/// Opens an image and reads everything in it.
fn survey(image: &Image) -> Result<Survey> {
    let sim = restore(image);
    let (tier, found, report) = open(&sim)?;
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
fn a_checkpoint_and_a_scan_give_the_same_index() {
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

/// One flipped bit anywhere: never wrong bytes, all else is still there, and the
/// damage is counted.
#[test]
fn a_flipped_bit_costs_at_most_what_it_hits() {
    // Every byte that means something takes minutes in a debug build.
    let stride = if std::env::var_os("KVTIER_EXHAUSTIVE").is_some() { 1 } else { 19 };
    for checkpoint in [false, true] {
        let image = sample(checkpoint);
        for (name, bytes) in &image {
            let interesting = |at: usize| {
                let place = at % 4096;
                let meant = !(420..4088).contains(&place) && at < 16 * 4096;
                (meant && at % stride == 0) || at % (67 * stride) == 0
            };
            let whole = |at: usize| bytes[at / 4096 * 4096..][..4096].iter().any(|&b| b != 0);
            for at in (0..bytes.len()).filter(|&at| interesting(at) && whole(at)) {
                let mut damaged = image.clone();
                let bit = 1u8 << (at % 8);
                if let Some(bytes) = damaged.get_mut(name) {
                    bytes[at] ^= bit;
                }
                let (good, bad, report, _) = survey(&damaged).expect("it opens");
                let missing = SAMPLE.iter().filter(|cell| !good.contains(cell)).count();
                let place = format!("{name} byte {at}: {report:?}, {bad} bad, {missing} missing");
                assert!(missing <= 3, "{place}");
                let counted = report.damaged_headers > 0
                    || report.unsound_checkpoints > 0
                    || report.torn_tails > 0
                    || bad > 0;
                assert!(missing == 0 || counted, "{place}");
            }
        }
    }
}

/// A segment that ends too early keeps what is before.
#[test]
fn a_segment_cut_anywhere_keeps_what_is_whole() {
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
fn a_foreign_segment_and_a_lost_name_are_not_mixed_up() {
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

/// Every version of the format stays readable, and what is written does not change
/// unless the version does. `KVTIER_BLESS=1` writes the file anew.
#[test]
fn the_store_of_version_1_is_read_and_written_as_ever() {
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
fn single_planes_are_read_and_checked() {
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
        // SAFETY: the vector's own memory, here and below.
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
fn who_asks_for_another_cell_gets_none() {
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
fn a_full_disk_is_refused_and_survived() {
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
fn the_budget_refuses_and_dropping_makes_room() {
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

/// Several threads append, commit, read, drop, clean and write checkpoints on real
/// files; what was durable is there afterwards.
#[test]
fn threads_share_a_tier() {
    let dir = std::env::temp_dir().join(format!("kvtier-disk-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    let real = || -> Arc<dyn Files> {
        let opts = kvtier::io::real::RealOpts::default();
        Arc::new(kvtier::io::real::RealFiles::open(&dir, &opts).expect("a directory"))
    };
    let options =
        Options { segment_bytes: SEGMENT, max_open: 4, ..Options::new(64 * SEGMENT, [9; 16]) };
    let (tier, ..) = DiskTier::open(real(), options.clone()).expect("a new store");
    struct Nobody;
    impl Keeper for Nobody {
        fn wants(&mut self, _: &CellAt) -> bool {
            false
        }
        fn moved(&mut self, _: &CellAt, _: Spot) -> bool {
            unreachable!("nothing is wanted")
        }
        fn lost(&mut self, _: &CellAt) -> bool {
            unreachable!("nothing is wanted")
        }
    }
    let kept: Vec<Vec<u16>> = std::thread::scope(|scope| {
        let work = |thread: u16| {
            let tier = &tier;
            move || {
                let mut kept = Vec::new();
                for i in 0..60u16 {
                    let n = thread * 100 + i;
                    let (mark, cells) = put(tier, n, &[0, 1], i % 2 == 0).expect("room");
                    tier.commit(mark).expect("a sync");
                    let all: Vec<_> = (0u32..)
                        .zip(&cells)
                        .map(|(layer, &(spot, seal))| (n, layer, spot, seal))
                        .collect();
                    assert!(read(tier, &all, i % 3 == 0).iter().all(|r| r.is_ok()));
                    if i % 4 == 0 {
                        kept.push(n);
                    } else {
                        tier.drop_cells(all.iter().map(|c| (c.2, stored(c.0, c.1))));
                        tier.sweep();
                    }
                }
                kept
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(work(thread))).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    for segment in tier.segments().iter().filter(|s| s.live_blocks == 0) {
        tier.clean(segment.number, &mut Nobody).expect("nothing to move");
    }
    assert!(tier.stats().most_used_bytes <= 64 * SEGMENT);
    drop(tier);
    let (tier, found, report) = DiskTier::open(real(), options).expect("it opens again");
    assert_eq!((report.damaged_headers, report.torn_tails), (0, 0), "{report:?}");
    let there: BTreeSet<u16> = found.chunks().map(|(c, _)| number_of(&c.key)).collect();
    assert!(kept.iter().flatten().all(|n| there.contains(n)));
    let cells: Vec<_> = found
        .chunks()
        .flat_map(|(chunk, places)| {
            let n = number_of(&chunk.key);
            places.iter().map(move |place| (n, place.layer, Spot(place.spot), place.seal))
        })
        .collect();
    assert!(read(&tier, &cells, true).iter().all(|result| result.is_ok()));
    drop(tier);
    std::fs::remove_dir_all(&dir).expect("it was made here");
}
