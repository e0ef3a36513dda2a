//! Files of a model that exist only as a formula: any byte of any of them is known, so
//! tests need neither room nor a disk. They take their time, and go wrong when told to.

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
    /// Its length.
    pub bytes: u64,
    /// What its bytes follow from.
    pub seed: u64,
}

/// How simulated files behave.
#[derive(Clone, Debug)]
pub struct SimFixedOpts {
    /// They.
    pub files: Vec<SimFile>,
    /// What reads must be aligned to.
    pub align_bytes: u64,
    /// What the disk below all of them gives; 0 = no limit.
    pub bytes_per_second: u64,
    /// What a batch takes at least.
    pub latency_ns: u64,
    /// Batches take up to this much longer, as the seed says.
    pub jitter_percent: u64,
    /// Chooses the jitter.
    pub seed: u64,
    /// Reads move a manual clock by what they take. Where not, whoever moves it asks
    /// [`SimFixed::cost_ns`].
    pub moves_clock: bool,
}

impl Default for SimFixedOpts {
    fn default() -> SimFixedOpts {
        SimFixedOpts {
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

/// What has become of a file.
#[derive(Clone, Default)]
struct Fate {
    now: Stamp,
    /// What has its name now.
    named: Stamp,
    flipped: Vec<u64>,
}

struct Inner {
    random: Random,
    fates: Vec<Fate>,
    faults: Vec<Fault>,
    /// Pieces so far.
    pieces: u64,
    /// When the disk has done what it was given.
    free_ns: u64,
    /// Goes on with every change.
    time_ns: i128,
}

/// Simulated files of a model.
pub struct SimFixed {
    clock: Clock,
    opts: SimFixedOpts,
    stamps: Vec<Stamp>,
    inner: Mutex<Inner>,
}

/// The bytes of a file with a seed from an offset on.
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

impl SimFixed {
    /// Files on a clock.
    pub fn new(clock: Clock, opts: SimFixedOpts) -> Result<SimFixed> {
        let (count, align) = (opts.files.len(), opts.align_bytes);
        if count == 0 || count > MAX_MODEL_FILES {
            fail!(Invalid, "{count} files of a model, 1 to {MAX_MODEL_FILES} can be");
        }
        if !align.is_power_of_two() || align > READ_UNIT_BYTES {
            fail!(Invalid, "alignment {align} is no power of two up to {READ_UNIT_BYTES}");
        }
        if let Some(file) = opts.files.iter().find(|file| file.bytes > 1 << 60) {
            fail!(Invalid, "a file of {} bytes", file.bytes);
        }
        let stamp = |(i, file): (usize, &SimFile)| Stamp {
            bytes: file.bytes,
            device: 1,
            inode: i as u64 + 1,
            modified_ns: i128::from(file.seed),
            changed_ns: i128::from(file.seed),
        };
        let stamps: Vec<Stamp> = opts.files.iter().enumerate().map(stamp).collect();
        let fate = |stamp: &Stamp| Fate { now: *stamp, named: *stamp, flipped: Vec::new() };
        let inner = Mutex::new(Inner {
            random: Random::new(opts.seed),
            fates: stamps.iter().map(fate).collect(),
            faults: Vec::new(),
            pieces: 0,
            free_ns: 0,
            time_ns: i128::from(u64::MAX) + 1,
        });
        Ok(SimFixed { clock, opts, stamps, inner })
    }

    /// Has something go wrong from now on.
    pub fn plant(&self, fault: Fault) {
        self.inner.lock().faults.push(fault);
    }

    /// Nothing that was planted goes wrong any more.
    pub fn heal(&self) {
        self.inner.lock().faults.clear();
    }

    /// Another file takes the name of one; what was open is read on.
    pub fn replace(&self, file: u32) {
        self.change(file, |fate, time| {
            fate.named.inode += 1 << 32;
            fate.now.changed_ns = time;
        });
    }

    /// Cuts a file, or makes it longer.
    pub fn truncate(&self, file: u32, bytes: u64) {
        self.change(file, |fate, time| {
            (fate.now.bytes, fate.now.modified_ns, fate.now.changed_ns) = (bytes, time, time);
            fate.named = fate.now;
        });
    }

    /// One byte is wrong, and nothing else tells: a disk that lies.
    pub fn flip(&self, file: u32, offset: u64) {
        self.change(file, |fate, _| fate.flipped.push(offset));
    }

    /// One byte is written, as somebody does who has the file open to write.
    pub fn write(&self, file: u32, offset: u64) {
        self.change(file, |fate, time| {
            fate.flipped.push(offset);
            (fate.now.modified_ns, fate.now.changed_ns) = (time, time);
            fate.named = fate.now;
        });
    }

    fn change(&self, file: u32, change: impl FnOnce(&mut Fate, i128)) {
        let mut inner = self.inner.lock();
        inner.time_ns += 1;
        let time = inner.time_ns;
        if let Some(fate) = inner.fates.get_mut(file as usize) {
            change(fate, time);
        }
    }

    /// Pieces that were asked for so far.
    pub fn pieces(&self) -> u64 {
        self.inner.lock().pieces
    }

    /// What a batch takes on a disk that has nothing else to do. Each call draws its own
    /// jitter: whoever simulates calls it once a batch.
    pub fn cost_ns(&self, pieces: &[Piece]) -> u64 {
        let mut inner = self.inner.lock();
        inner.moving_ns(&self.opts, pieces).saturating_add(self.opts.latency_ns)
    }

    /// # Safety
    /// As for [`ModelFiles::transfer`].
    unsafe fn fill(&self, piece: &Piece, fate: &Fate) -> Result<()> {
        let FileId(file) = piece.file;
        let whole = self.bytes(file);
        let end = piece.offset.saturating_add(piece.bytes()).min(whole);
        if end > fate.now.bytes {
            fail!(Io, "a read ended at {}, {} bytes too early", fate.now.bytes, end);
        }
        let seed = self.opts.files.get(file as usize).map_or(0, |file| file.seed);
        for (at, part) in inside(piece, whole).into_iter().filter(|(_, part)| part.bytes > 0) {
            // SAFETY: the caller's promise: memory for as many bytes. They are given a value
            // before they are looked at.
            let out = unsafe {
                part.address.write_bytes(0, part.bytes as usize);
                std::slice::from_raw_parts_mut(part.address, part.bytes as usize)
            };
            content(seed, at, out);
            for flipped in &fate.flipped {
                let byte = flipped.checked_sub(at).and_then(|i| out.get_mut(i as usize));
                byte.into_iter().for_each(|byte| *byte ^= 1);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { zero_past(piece, whole) };
        Ok(())
    }

    /// Lets the time of a batch pass. Batches at once share the disk.
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
    /// How long the disk is busy with a batch.
    fn moving_ns(&mut self, opts: &SimFixedOpts, pieces: &[Piece]) -> u64 {
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
        let both = least.saturating_add(opts.latency_ns);
        let most_more = both / 100 * opts.jitter_percent.min(10_000);
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

impl ModelFiles for SimFixed {
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
        let Some(fate) = inner.fates.get(file as usize) else {
            fail!(Invalid, "file {file} of {}", self.stamps.len());
        };
        compare(&self.stamp(file), &fate.now, Ok(fate.named))
            .map_err(|error| error.within(&format!("file {file}")))
    }

    unsafe fn transfer(&self, pieces: &mut [Piece]) {
        for piece in pieces.iter_mut() {
            piece.result = check_piece(self, piece).and_then(|()| {
                let mut inner = self.inner.lock();
                let struck = inner.strike(piece);
                let fate = inner.fates.get(piece.file.0 as usize).cloned().ok_or(Status::Invalid);
                drop(inner);
                // SAFETY: the caller's promise.
                unsafe { self.fill(piece, &fate?) }.and(struck)
            });
        }
        self.take_time(pieces);
    }
}
