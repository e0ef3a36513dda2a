//! Group `callers`: rates of several callers of one store beside that of one caller, and how long a
//! get takes at most while others evict.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use kvtier::base::status::{Result, Status};
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::transfer::{Level, TransferKind};
use kvtier::store::state::{CellRange, Wanted};

use super::fixtures::memory;
use super::fixtures::store::{StoreFixture, layout};
use super::{Bar, Better, median};

const CHUNK_TOKENS: u32 = 16;
/// Host memory: more than a document of each caller, less than all of them.
const HOST_BYTES: u64 = 256 << 20;
/// Chunks of a document, and of one call.
const CHUNKS: u32 = 64;
const EACH: u32 = 16;
/// Percentage of the documents that are put.
const PUTS: u64 = 30;

/// What all callers of a round have done.
struct Round {
    cells_per_second: f64,
    /// Seconds of each get.
    gets: Vec<f64>,
}

/// A pseudorandom number generator (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// One caller: puts and gets whole documents in calls of [`EACH`] chunks.
struct Caller {
    number: u32,
    token_bytes: u64,
    buffer: kvtier::base::memory::Buffer,
    random: Random,
    /// Documents that were put, of which some are resident.
    known: Vec<u32>,
    put: u32,
}

impl Caller {
    fn new(number: u32, callers: u32, token_bytes: u64) -> Result<Caller> {
        let bytes = 2 * token_bytes * u64::from(CHUNKS * CHUNK_TOKENS);
        // Together the callers know three quarters of what fits.
        let fits = (HOST_BYTES * 3 / 4 / bytes) as u32 / callers;
        let random = Random(0x9E37_79B9 + u64::from(number));
        let known = Vec::with_capacity(fits.max(1) as usize);
        Ok(Caller { number, token_bytes, buffer: memory(bytes)?, random, known, put: 0 })
    }

    fn views(&self) -> Arc<Views> {
        let rows = CHUNKS * CHUNK_TOKENS;
        let k = self.buffer.address().expose_provenance() as u64;
        let v = k + u64::from(rows) * self.token_bytes;
        let plane = |address| PlaneView::canonical(address, rows, self.token_bytes);
        Arc::new(Views::from(vec![LayerViews { k: plane(k), v: Some(plane(v)) }]))
    }

    /// Puts or gets a document. Returns the seconds of each call.
    fn document(
        &self,
        store: &StoreFixture,
        (document, kind): (u32, TransferKind),
        seconds: &mut Vec<f64>,
    ) -> Result<()> {
        let tokens: Vec<u32> = (0..CHUNKS * CHUNK_TOKENS).map(|i| document << 10 | i).collect();
        let session = store.session_of(&tokens)?;
        let views = self.views();
        for first in (0..CHUNKS).step_by(EACH as usize) {
            let range = CellRange {
                first_token: u64::from(first * CHUNK_TOKENS),
                tokens: u64::from(EACH * CHUNK_TOKENS),
                first_layer: 0,
                layers: 1,
                by_layer: false,
                wanted: Wanted::All,
                views: views.clone(),
                after: None,
            };
            match store.transfer(session, kind, Level::Ram, range) {
                Ok(took) => seconds.push(took[0]),
                // The document was evicted.
                Err(error) if error.status() == Status::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        store.end(session)
    }

    /// Puts a document that no caller has put.
    fn put(&mut self, store: &StoreFixture) -> Result<()> {
        let document = self.number << 18 | self.put;
        self.put += 1;
        self.document(store, (document, TransferKind::Put), &mut Vec::new())?;
        match self.known.len() < self.known.capacity() {
            true => self.known.push(document),
            false => {
                let at = self.random.below(self.known.len() as u64) as usize;
                self.known[at] = document;
            }
        }
        Ok(())
    }

    fn run(&mut self, store: &StoreFixture, time: Duration) -> Result<Round> {
        let (start, mut cells, mut gets) = (Instant::now(), 0u64, Vec::new());
        while start.elapsed() < time {
            if self.random.below(100) < PUTS {
                self.put(store)?;
            } else {
                let document = self.known[self.random.below(self.known.len() as u64) as usize];
                self.document(store, (document, TransferKind::Get), &mut gets)?;
            }
            cells += u64::from(CHUNKS);
        }
        Ok(Round { cells_per_second: cells as f64 / start.elapsed().as_secs_f64(), gets })
    }
}

/// A round of several callers, on a store of their own.
fn round(callers: u32, token_bytes: u64, time: Duration) -> Result<Round> {
    let spec = format!("store(host={HOST_BYTES}B,chunks=262144)");
    let store = StoreFixture::open(&spec, layout(1, CHUNK_TOKENS, token_bytes)?, None)?;
    let filled = Barrier::new(callers as usize);
    let run = |number| -> Result<Round> {
        let caller = Caller::new(number, callers, token_bytes).and_then(|mut caller| {
            while caller.known.len() < caller.known.capacity() {
                caller.put(&store)?;
            }
            Ok(caller)
        });
        filled.wait();
        caller?.run(&store, time)
    };
    let rounds = std::thread::scope(|scope| -> Result<Vec<Round>> {
        let threads: Vec<_> = (0..callers).map(|number| scope.spawn(move || run(number))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| Status::Panic)?).collect()
    });
    let mut all = Round { cells_per_second: 0.0, gets: Vec::new() };
    for mut one in rounds? {
        all.cells_per_second += one.cells_per_second;
        all.gets.append(&mut one.gets);
    }
    store.close()?;
    Ok(all)
}

/// The rate of some callers divided by that of one, in turn; and the longest of 1,000 gets divided
/// by the median.
fn measure(callers: u32, token_bytes: u64, quick: bool) -> Result<(f64, f64, f64)> {
    let (rounds, time) = if quick { (3, 300) } else { (7, 1500) };
    let time = Duration::from_millis(time);
    let (mut ratios, mut rates, mut tails) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let alone = round(1, token_bytes, time)?.cells_per_second;
        let mut all = round(callers, token_bytes, time)?;
        ratios.push(all.cells_per_second / alone);
        rates.push(all.cells_per_second);
        all.gets.sort_by(f64::total_cmp);
        let at = |share: f64| all.gets[((all.gets.len() - 1) as f64 * share) as usize];
        tails.push(at(0.999) / at(0.5));
    }
    Ok((median(&mut ratios), median(&mut rates), median(&mut tails)))
}

/// Measures every bar of the group.
pub fn run(quick: bool) -> Vec<Bar> {
    let all = [
        ("callers_2_of_4KiB", "p999_of_2_of_4KiB", 2, 128),
        ("callers_4_of_4KiB", "p999_of_4_of_4KiB", 4, 128),
        ("callers_8_of_4KiB", "p999_of_8_of_4KiB", 8, 128),
        ("callers_2_of_64KiB", "p999_of_2_of_64KiB", 2, 2048),
        ("callers_4_of_64KiB", "p999_of_4_of_64KiB", 4, 2048),
        ("callers_8_of_64KiB", "p999_of_8_of_64KiB", 8, 2048),
    ];
    let mut bars = Vec::new();
    for (rate, tail, callers, token_bytes) in all {
        let mut rate = Bar::higher(rate, "of one").baseline("one caller").goal(1.0);
        let mut tail = Bar::new(tail, "of the median", Better::Lower).goal(20.0);
        match measure(callers, token_bytes, quick) {
            Ok((ratio, per_second, spread)) => {
                rate = rate.value(ratio).note(format!("({:.0} k cells/s)", per_second / 1e3));
                tail = tail.value(spread);
            }
            Err(error) => {
                rate = rate.note(error.to_string());
                tail = tail.note(error.to_string());
            }
        }
        bars.extend([rate, tail]);
    }
    bars
}
