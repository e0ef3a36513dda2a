//! Model files whose bytes follow from a formula, so tests need neither space nor a disk. Reads
//! take time and fail as planned.

use crate::model_files::faults::Fault;
use kvtier::base::clock::Clock;
use kvtier::base::random::Random;
use kvtier::base::status::{Error, Result, Status};
use kvtier::base::sync::Mutex;
use kvtier::fail;
use kvtier::io::files::{FileId, Piece};
use kvtier::io::model_files::file::compare;
use kvtier::io::model_files::{
    MAX_MODEL_FILES, ModelFiles, READ_UNIT_BYTES, Stamp, check_piece, inside, zero_past,
};

/// A simulated file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimFile {
    /// Length.
    pub bytes: u64,
    /// Seed of its bytes.
    pub seed: u64,
}

/// Options of simulated files.
#[derive(Clone, Debug)]
pub struct SimModelFilesOpts {
    /// The files.
    pub files: Vec<SimFile>,
    /// Alignment of reads.
    pub align_bytes: u64,
    /// Bandwidth of the disk that all share; 0 = unlimited.
    pub bytes_per_second: u64,
    /// Minimum duration of a batch.
    pub latency_ns: u64,
    /// Batches take up to this much longer, chosen by the seed.
    pub jitter_percent: u64,
    /// Seed of the jitter.
    pub seed: u64,
    /// Reads advance a manual clock. Otherwise the owner of the clock calls
    /// [`SimModelFiles::cost_ns`].
    pub moves_clock: bool,
}

impl Default for SimModelFilesOpts {
    fn default() -> SimModelFilesOpts {
        SimModelFilesOpts {
            files: Vec::new(),
            align_bytes: READ_UNIT_BYTES,
            bytes_per_second: 0,
            latency_ns: 0,
            jitter_percent: 0,
            seed: 0,
            moves_clock: false,
        }
    }
}

/// State of a file.
#[derive(Clone, Default)]
struct FileState {
    now: Stamp,
    /// Attributes of the file that has its name now.
    named: Stamp,
    flipped: Vec<u64>,
}

struct Inner {
    random: Random,
    states: Vec<FileState>,
    faults: Vec<Fault>,
    /// Pieces so far.
    pieces: u64,
    /// When the disk becomes idle.
    free_ns: u64,
    /// Advances with every change.
    time_ns: i128,
}

/// Simulated model files.
pub struct SimModelFiles {
    clock: Clock,
    opts: SimModelFilesOpts,
    stamps: Vec<Stamp>,
    inner: Mutex<Inner>,
}

/// Bytes of a file with a seed, from an offset on.
pub fn content(seed: u64, offset: u64, out: &mut [u8]) {
    let word = |at: u64| {
        let mixed = at.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ seed.rotate_left(23);
        Random::new(mixed).draw().to_le_bytes()
    };
    let skip = (offset % 8) as usize;
    let (head, rest) = out.split_at_mut(out.len().min((8 - skip) % 8));
    for (byte, value) in head.iter_mut().zip(word(offset / 8).into_iter().skip(skip)) {
        *byte = value;
    }
    for (at, chunk) in (offset.div_ceil(8)..).zip(rest.chunks_mut(8)) {
        chunk.iter_mut().zip(word(at)).for_each(|(byte, value)| *byte = value);
    }
}

impl SimModelFiles {
    /// Files on a clock.
    pub fn new(clock: Clock, opts: SimModelFilesOpts) -> Result<SimModelFiles> {
        let (count, align) = (opts.files.len(), opts.align_bytes);
        if count == 0 || count > MAX_MODEL_FILES {
            fail!(Invalid, "{count} files of a model: 1 to {MAX_MODEL_FILES} are accepted");
        }
        if !align.is_power_of_two() || align > READ_UNIT_BYTES {
            fail!(Invalid, "alignment {align}: must be a power of two up to {READ_UNIT_BYTES}");
        }
        if let Some(file) = opts.files.iter().find(|file| file.bytes > 1 << 60) {
            fail!(Invalid, "a file of {} bytes: at most 2^60 are accepted", file.bytes);
        }
        let stamp = |(i, file): (usize, &SimFile)| Stamp {
            bytes: file.bytes,
            device: 1,
            inode: i as u64 + 1,
            modified_ns: i128::from(file.seed),
            changed_ns: i128::from(file.seed),
        };
        let stamps: Vec<Stamp> = opts.files.iter().enumerate().map(stamp).collect();
        let state = |stamp: &Stamp| FileState { now: *stamp, named: *stamp, flipped: Vec::new() };
        let inner = Mutex::new(Inner {
            random: Random::new(opts.seed),
            states: stamps.iter().map(state).collect(),
            faults: Vec::new(),
            pieces: 0,
            free_ns: 0,
            time_ns: i128::from(u64::MAX) + 1,
        });
        Ok(SimModelFiles { clock, opts, stamps, inner })
    }

    /// Adds a fault.
    pub fn plant(&self, fault: Fault) {
        self.inner.lock().faults.push(fault);
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.inner.lock().faults.clear();
    }

    /// Another file replaces the name of a file; the open one stays readable.
    pub fn replace(&self, file: u32) {
        self.change(file, |state, time| {
            state.named.inode += 1 << 32;
            state.now.changed_ns = time;
        });
    }

    /// Truncates or extends a file.
    pub fn truncate(&self, file: u32, bytes: u64) {
        self.change(file, |state, time| {
            (state.now.bytes, state.now.modified_ns, state.now.changed_ns) = (bytes, time, time);
            state.named = state.now;
        });
    }

    /// Flips a byte without any trace: silent corruption.
    pub fn flip(&self, file: u32, offset: u64) {
        self.change(file, |state, _| state.flipped.push(offset));
    }

    /// Writes a byte, as another process does.
    pub fn write(&self, file: u32, offset: u64) {
        self.change(file, |state, time| {
            state.flipped.push(offset);
            (state.now.modified_ns, state.now.changed_ns) = (time, time);
            state.named = state.now;
        });
    }

    fn change(&self, file: u32, change: impl FnOnce(&mut FileState, i128)) {
        let mut inner = self.inner.lock();
        inner.time_ns += 1;
        let time = inner.time_ns;
        if let Some(state) = inner.states.get_mut(file as usize) {
            change(state, time);
        }
    }

    /// Requested pieces so far.
    pub fn pieces(&self) -> u64 {
        self.inner.lock().pieces
    }

    /// Duration of a batch on an idle disk. Each call draws its own jitter, so simulations call it
    /// once for a batch.
    pub fn cost_ns(&self, pieces: &[Piece]) -> u64 {
        let mut inner = self.inner.lock();
        inner.moving_ns(&self.opts, pieces).saturating_add(self.opts.latency_ns)
    }

    /// # Safety
    /// As for [`ModelFiles::transfer`].
    unsafe fn fill(&self, piece: &Piece, state: &FileState) -> Result<()> {
        let FileId(file) = piece.file;
        let whole = self.bytes(file);
        let end = piece.offset.saturating_add(piece.bytes()).min(whole);
        if end > state.now.bytes {
            fail!(Io, "a read ended at {}, {} bytes too early", state.now.bytes, end);
        }
        let seed = self.opts.files.get(file as usize).map_or(0, |file| file.seed);
        for (at, part) in inside(piece, whole).into_iter().filter(|(_, part)| part.bytes > 0) {
            // SAFETY: the caller guarantees memory for as many bytes. They are initialized before
            // they are read.
            let out = unsafe {
                part.address.write_bytes(0, part.bytes as usize);
                std::slice::from_raw_parts_mut(part.address, part.bytes as usize)
            };
            content(seed, at, out);
            for flipped in &state.flipped {
                let byte = flipped.checked_sub(at).and_then(|i| out.get_mut(i as usize));
                byte.into_iter().for_each(|byte| *byte ^= 1);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { zero_past(piece, whole) };
        Ok(())
    }

    /// Lets the duration of a batch pass. Concurrent batches share the disk.
    fn take_time(&self, pieces: &[Piece]) {
        if self.clock.is_manual() {
            if self.opts.moves_clock {
                self.clock.advance(self.cost_ns(pieces));
            }
            return;
        }
        let mut inner = self.inner.lock();
        let moving = inner.moving_ns(&self.opts, pieces);
        inner.free_ns = inner.free_ns.max(self.clock.now_ns()).saturating_add(moving);
        let until = inner.free_ns.saturating_add(self.opts.latency_ns);
        drop(inner);
        let left = until.saturating_sub(self.clock.now_ns());
        if left > 0 {
            std::thread::sleep(std::time::Duration::from_nanos(left));
        }
    }
}

impl Inner {
    /// Time for which a batch occupies the disk.
    fn moving_ns(&mut self, opts: &SimModelFilesOpts, pieces: &[Piece]) -> u64 {
        let worth = |piece: &Piece| {
            let more = self.faults.iter().map(|fault| fault.more_bytes(piece));
            more.fold(piece.bytes(), u64::saturating_add)
        };
        let bytes = pieces.iter().map(worth).fold(0, u64::saturating_add);
        let least = match opts.bytes_per_second {
            0 => 0,
            rate => u128::from(bytes) * 1_000_000_000 / u128::from(rate),
        };
        let least = u64::try_from(least).unwrap_or(u64::MAX);
        let total_ns = least.saturating_add(opts.latency_ns);
        let most_more = total_ns / 100 * opts.jitter_percent.min(10_000);
        least.saturating_add(self.random.below(most_more.saturating_add(1)))
    }

    fn strike(&mut self, piece: &Piece) -> Result<()> {
        self.pieces += 1;
        match self.faults.iter().find_map(|fault| fault.strikes(self.pieces, piece)) {
            Some((status, text)) => Err(Error::new(status, text)),
            None => Ok(()),
        }
    }
}

impl ModelFiles for SimModelFiles {
    fn align_bytes(&self) -> u64 {
        self.opts.align_bytes
    }

    fn engine(&self) -> &str {
        "simulated"
    }

    fn fallback(&self) -> Option<&str> {
        None
    }

    fn count(&self) -> u32 {
        self.stamps.len() as u32 // at most MAX_FIXED_FILES
    }

    fn stamp(&self, file: u32) -> Stamp {
        self.stamps.get(file as usize).copied().unwrap_or_default()
    }

    fn check(&self, file: u32) -> Result<()> {
        let inner = self.inner.lock();
        let Some(state) = inner.states.get(file as usize) else {
            fail!(Invalid, "file {file}: the model has {} files", self.stamps.len());
        };
        compare(&self.stamp(file), &state.now, Ok(state.named))
            .map_err(|error| error.within(&format!("file {file}")))
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        for piece in pieces.iter_mut() {
            piece.result = check_piece(self, piece).and_then(|()| {
                let mut inner = self.inner.lock();
                let struck = inner.strike(piece);
                let state = inner.states.get(piece.file.0 as usize).cloned().ok_or(Status::Invalid);
                drop(inner);
                // SAFETY: the caller's promise.
                unsafe { self.fill(piece, &state?) }.and(struck)
            });
        }
        self.take_time(pieces);
    }
}
