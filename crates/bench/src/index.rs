//! The index of very many cells: the state of a store over a disk that stores nothing. The bars
//! measure the memory of the tables and the cost of lookups.

use std::sync::Arc;

use kvtier::base::status::{Error, Result, Status};
use kvtier::base::sync::Mutex;
use kvtier::device::Stream;
use kvtier::device::host::Host;
use kvtier::format::keys::chain::Chain;
use kvtier::io::files::{Entry, FileId, Files, Piece};
use kvtier::meta::index::hash;
use kvtier::meta::key::Key;
use kvtier::store::executor::Tools;
use kvtier::store::state::Config;
use kvtier::store::state::disk_gc::{CheckpointWriter, Page};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::work::{Work, WorkerKind};
use kvtier::tier::disk::{CellAt, CellIndex, DiskTier, Options, Spot};

use super::fixtures::store::StateFixture;
use super::fixtures::thread_ns;
use super::{Bar, median};

/// Bytes of K, and of V, in a cell: together one block of 4 KiB.
const PLANE_BYTES: u64 = 2048;
/// Chunks of a put.
const EACH: u32 = 512;

/// A disk that stores only names and lengths.
struct Nowhere {
    files: Mutex<Vec<Entry>>,
}

impl Nowhere {
    fn at(&self, name: &str) -> Result<FileId> {
        let files = self.files.lock();
        let found = files.iter().position(|entry| entry.name == name);
        found.map(|at| FileId(at as u32)).ok_or(Status::NotFound.into())
    }
}

impl Files for Nowhere {
    fn align_bytes(&self) -> u64 {
        4096
    }

    fn engine(&self) -> &str {
        "nowhere"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn list(&self) -> Result<Vec<Entry>> {
        Ok(self.files.lock().clone())
    }

    fn create(&self, name: &str, bytes: u64) -> Result<FileId> {
        self.files.lock().push(Entry { name: name.to_string(), bytes });
        self.at(name)
    }

    fn open(&self, name: &str) -> Result<FileId> {
        self.at(name)
    }

    fn len(&self, file: FileId) -> Result<u64> {
        let files = self.files.lock();
        files.get(file.0 as usize).map(|entry| entry.bytes).ok_or(Status::Closed.into())
    }

    fn close(&self, _file: FileId) {}

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let at = self.at(from)?;
        self.files.lock()[at.0 as usize].name = to.to_string();
        Ok(())
    }

    fn remove(&self, name: &str) -> Result<()> {
        let at = self.at(name)?;
        self.files.lock()[at.0 as usize].name.clear();
        Ok(())
    }

    fn sync_names(&self) -> Result<()> {
        Ok(())
    }

    fn sync(&self, _file: FileId) -> Result<()> {
        Ok(())
    }

    // SAFETY: touches no memory.
    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        pieces.iter_mut().for_each(|piece| piece.result = Ok(()));
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }
}

/// Without compaction and checkpoints.
struct NoUpkeep;

impl CheckpointWriter for NoUpkeep {
    fn page(&mut self, _from: (u32, u32), _page: &mut Page) -> Option<(u32, u32)> {
        None
    }
}

impl CellIndex for NoUpkeep {
    fn is_live(&mut self, _cell: &CellAt) -> bool {
        false
    }

    fn moved(&mut self, _cell: &CellAt, _to: Spot) -> bool {
        false
    }

    fn lost(&mut self, _cell: &CellAt) -> bool {
        false
    }
}

const NAMESPACE: Key = Key([5; 32]);

/// The state of a store whose cells are on that disk.
struct Index {
    fixture: StateFixture,
    tools: Tools,
}

impl Index {
    fn open(chunks: u32, layers: usize, tokens: u32) -> Result<Index> {
        let disk_bytes = u64::from(chunks) * layers as u64 * 4096;
        let options = Options::new(disk_bytes * 5 / 4 + (1 << 30), [5; 16]);
        let (disk, ..) =
            DiskTier::open(Arc::new(Nowhere { files: Mutex::new(Vec::new()) }), options)?;
        let disk = Arc::new(disk);
        let config = Config {
            host_bytes: 256 << 20,
            host_policy: "lru".into(),
            max_chunks: chunks as usize,
            ..Config::default()
        };
        let token_bytes = PLANE_BYTES / u64::from(tokens);
        let disk_of = Some(disk.clone());
        let fixture = StateFixture::open(config, disk_of, NAMESPACE, layers, tokens, token_bytes)?;
        let tools = Tools { device: Arc::new(Host::default()), disk: Some(disk), remote: None };
        Ok(Index { fixture, tools })
    }

    /// Puts a document to the disk; returns the keys of its chunks.
    fn put(&mut self, number: u32, chunks: u32) -> Result<Vec<Key>> {
        let state = &mut self.fixture;
        let session = state.session(number, chunks)?;
        let keys = state.state.session(session)?.path().keys().to_vec();
        let range = state.cell_range(0, chunks);
        state.state.submit_cell_range(session, TransferKind::Put, Level::Disk, 0, range)?;
        while let Some(mut work) =
            WorkerKind::ALL.into_iter().find_map(|kind| state.state.take(kind))
        {
            let outcome = match &work {
                Work::Copies(_) | Work::Slabs(_) | Work::Unregistered(_) | Work::Upkeep(_) => {
                    Ok(())
                }
                // SAFETY: the state keeps the memory of the cells until the work is done.
                _ => unsafe { self.tools.work(&mut work, Stream(0), &mut NoUpkeep) },
            };
            state.state.done(work, outcome, 0);
        }
        state.state.close_session(session)?;
        state.finished().map(|()| keys)
    }

    /// Nanoseconds for each key of existence checks in batches.
    fn exists(&mut self, keys: &[Key]) -> Result<f64> {
        let mut found = vec![0; keys.len()];
        let start = thread_ns();
        for (keys, found) in keys.chunks(EACH as usize).zip(found.chunks_mut(EACH as usize)) {
            self.fixture.state.exists(self.fixture.namespace, keys, found)?;
        }
        let took = thread_ns() - start;
        // Every other key exists.
        if found.iter().enumerate().any(|(at, &tiers)| (tiers != 0) != (at % 2 == 0)) {
            return Err(Error::new(Status::State, "an existence check is wrong"));
        }
        Ok(took / keys.len() as f64)
    }

    /// Microseconds of the lookup of a document, and of deriving its keys alone.
    fn lookup(&mut self, number: u32, chunks: u32) -> Result<(f64, f64)> {
        let tokens = self.fixture.document(number, chunks);
        let start = thread_ns();
        let found = self.fixture.state.lookup(self.fixture.namespace, &tokens)?.now_tokens;
        let took = thread_ns() - start;
        if found != tokens.len() as u64 {
            return Err(Error::new(Status::NotFound, format!("{found} tokens are found")));
        }
        let start = thread_ns();
        let mut keys = Vec::new();
        Chain::new(NAMESPACE, self.fixture.chunk_tokens)?.extend(&tokens, &[], &mut keys)?;
        Ok((took / 1e3, (thread_ns() - start) / 1e3))
    }
}

/// Resident anonymous memory of this process, in bytes.
pub fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn bar(bar: &'static str, unit: &'static str, goal: f64) -> Bar {
    Bar::lower(bar, unit).goal(goal)
}

/// Memory of 10,000,000 cells in GiB, and existence checks among them in ns for each key.
fn index(cells: u64, rounds: u32, sizes: &mut Bar, exists: &mut Bar) -> Result<()> {
    const LAYERS: usize = 32;
    let chunks = (cells / LAYERS as u64) as u32 / EACH * EACH;
    let before = resident();
    let mut index = Index::open(chunks, LAYERS, 16)?;
    let mut keys = Vec::new();
    let mut held = 0;
    for number in 0..chunks / EACH {
        let all = index.put(number, EACH)?;
        // A quarter of the keys, and as many unknown ones.
        for key in all.iter().step_by(4) {
            let mut other = *key;
            other.0[..8].copy_from_slice(&u64::from(number).to_le_bytes());
            keys.extend([*key, other]);
        }
        held = keys.capacity() as u64 * 32;
    }
    let counts =
        index.fixture.state.table_of(index.fixture.namespace).map(|table| table.chunks.counts());
    let known = counts.map_or(0, |counts| counts.cells[2]);
    if known != u64::from(chunks) * LAYERS as u64 {
        return Err(Error::new(Status::State, format!("{known} cells are known")));
    }
    let grown = resident().saturating_sub(before + held);
    sizes.value = Some(grown as f64 / known as f64 * 1e7 / f64::from(1 << 30));
    sizes.note =
        format!("({known} cells, {:.1} bytes each, all tables)", grown as f64 / known as f64);
    // The order of pairs is shuffled.
    let mut order: Vec<usize> = (0..keys.len() / 2).collect();
    order.sort_unstable_by_key(|&pair| hash(pair as u64));
    let mixed: Vec<Key> = order.iter().flat_map(|&i| [keys[2 * i], keys[2 * i + 1]]).collect();
    let mut each = Vec::new();
    for _ in 0..rounds {
        each.push(index.exists(&mixed)?);
    }
    exists.value = Some(median(&mut each));
    exists.note = format!("({} keys among {chunks} chunks, half of them exist)", mixed.len());
    Ok(())
}

/// A prompt of 131,072 tokens in chunks of 256, of 32 layers.
fn prompt(rounds: u32, bar: &mut Bar) -> Result<()> {
    const CHUNKS: u32 = 512;
    let mut index = Index::open(16 * CHUNKS, 32, 256)?;
    for number in 0..16 {
        index.put(number, CHUNKS)?;
    }
    let (mut all, mut hashes) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let (took, alone) = index.lookup(round % 16, CHUNKS)?;
        all.push(took);
        hashes.push(alone);
    }
    (bar.value, bar.baseline_value) = (Some(median(&mut all)), Some(median(&mut hashes)));
    Ok(())
}

/// Measures the bars.
pub fn bars(quick: bool) -> Vec<Bar> {
    let cells = if quick { 2_000_000 } else { 10_000_000 };
    let rounds = if quick { 50 } else { 200 };
    let mut sizes = bar("index_of_10M_cells", "GiB", 1.0);
    let mut exists = bar("exists", "ns/key", 200.0);
    let mut lookup =
        Bar { baseline: "its keys alone", ..bar("lookup_of_128k_tokens", "us", 300.0) };
    if let Err(error) = index(cells, rounds, &mut sizes, &mut exists) {
        sizes.note = error.to_string();
    }
    if let Err(error) = prompt(rounds, &mut lookup) {
        lookup.note = error.to_string();
    }
    vec![sizes, exists, lookup]
}
