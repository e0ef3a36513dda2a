//! The file that identifies the store has two copies of a block. One sound copy is enough; opening
//! repairs the other.

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kvtier::base::status::{Result, Status};
use kvtier::format::segment::{BLOCK_BYTES, STORE_BLOCKS, StoreHeader, sign};
use kvtier::io::files::{Access, Files, Piece};
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{
    DamageKind, DiskTier, FsckOptions, OpenReport, Options, Recovered, Spot, fsck,
};
use kvtier_testkit::disk::plan::{Fault, Plan};
use kvtier_testkit::disk::{SimFiles, SimOpts};

use kvtier_testkit::fixtures::disk;

use disk::*;

const STORE: &str = "store.kvt";
const CELLS: usize = 7;
static PLACES: AtomicU32 = AtomicU32::new(0);

/// File lengths inside the second copy, and around its ends.
const CUTS: [usize; 10] = [4096, 4097, 4608, 5000, 6144, 8184, 8185, 8190, 8191, 8192];
/// File lengths without a whole copy.
const SHORT: [usize; 6] = [0, 1, 511, 512, 4088, 4095];

/// A simulated disk with these files, of any length.
fn simulated(image: &Image) -> SimFiles {
    let sim = SimFiles::new(1, SimOpts { align_bytes: 1, ..SimOpts::default() });
    for (name, bytes) in image {
        let (mut bytes, length) = (bytes.clone(), bytes.len() as u64);
        let file = sim.create(name, length).expect("room");
        let mut pieces = [Piece::one(file, Access::Write, 0, bytes.as_mut_ptr(), length)];
        // SAFETY: the memory belongs to this test.
        unsafe { sim.transfer(&mut pieces) };
        assert!(length == 0 || pieces[0].result.is_ok(), "{:?}", pieces[0].result);
        sim.sync(file).expect("a sync");
        sim.close(file);
    }
    sim.sync_names().expect("a sync");
    sim
}

/// A directory with the files of an image, real or simulated.
enum Place {
    Simulated(SimFiles),
    Real { path: PathBuf, opts: RealOpts },
}

impl Place {
    /// One place of each kind.
    fn all(image: &Image) -> Vec<Place> {
        let ways = [
            ("plain", RealOpts { no_uring: true, ..RealOpts::default() }),
            ("ring", RealOpts::default()),
            ("cache", RealOpts { buffered: true, ..RealOpts::default() }),
        ];
        let real = ways.map(|(name, opts)| {
            let number = PLACES.fetch_add(1, Ordering::Relaxed);
            let name = format!("kvtier-name-{name}-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let place = Place::Real { path: path.clone(), opts };
            drop(std::fs::remove_dir_all(&path));
            std::fs::DirBuilder::new().mode(0o700).create(&path).expect("made");
            for (name, bytes) in image {
                std::fs::write(path.join(name), bytes).expect("written");
            }
            place
        });
        std::iter::once(Place::Simulated(simulated(image))).chain(real).collect()
    }

    fn files(&self) -> Arc<dyn Files> {
        match self {
            Place::Simulated(sim) => Arc::new(sim.clone()),
            Place::Real { path, opts } => Arc::new(RealFiles::open(path, opts).expect("opened")),
        }
    }

    /// Content of the store file: durable content for a simulated place, written content for a real
    /// one.
    fn store(&self) -> Vec<u8> {
        match self {
            Place::Simulated(sim) => sim.durable().expect("memory")[STORE].clone(),
            Place::Real { path, .. } => std::fs::read(path.join(STORE)).expect("a store file"),
        }
    }

    fn bytes(&self) -> u64 {
        self.files().list().expect("a list").iter().map(|entry| entry.bytes).sum()
    }

    fn open(&self) -> Result<(DiskTier, Recovered, OpenReport)> {
        let options = Options { segment_bytes: SEGMENT, ..Options::new(BUDGET, [8; 16]) };
        DiskTier::open(self.files(), options)
    }

    /// Opens the store and reads all cells. Returns the number of damaged copies that were
    /// repaired.
    fn survive(&self, what: &str) -> u32 {
        let (tier, found, report) = self.open().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!((tier.store(), report.is_new), (&[9; 16], false), "{what}");
        let cells: Vec<_> = found
            .chunks()
            .flat_map(|(chunk, places)| {
                let n = number_of(&chunk.key);
                places.iter().map(move |place| (n, place.layer, Spot(place.spot), place.seal))
            })
            .collect();
        let right = read(&tier, &cells, true).iter().filter(|result| result.is_ok()).count();
        assert_eq!(right, CELLS, "{what}");
        let used = tier.stats().used_bytes;
        drop(tier);
        // The lock file of a real directory is not counted.
        assert_eq!(used, self.bytes(), "{what}: what is used");
        report.damaged_names
    }

    /// Asserts that the open fails with an error that helps, and writes nothing.
    fn refuse(&self, what: &str) {
        let before = self.store();
        let by_fsck = fsck(&*self.files(), &FsckOptions::default()).map(|_| ());
        for refused in [self.open().map(|_| ()), by_fsck] {
            let error = refused.err().unwrap_or_else(|| panic!("{what}: it opens"));
            assert_eq!(error.status(), Status::Corrupt, "{what}: {error}");
            let words = error.message();
            assert!(words.contains(STORE) && words.contains("remove the directory"), "{words}");
        }
        assert!(self.store() == before, "{what}: something was written");
    }

    /// Positions that fsck reports as damaged.
    fn damage(&self) -> Vec<u64> {
        let report = fsck(&*self.files(), &FsckOptions::default()).expect("a store");
        let name = |damage: &kvtier::tier::disk::Damage| {
            assert_eq!(
                (damage.file.as_str(), damage.what, damage.bytes),
                (STORE, DamageKind::StoreName, 4096)
            );
            damage.offset
        };
        report.damage.iter().map(name).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Place::Real { path, .. } = self {
            drop(std::fs::remove_dir_all(path));
        }
    }
}

/// Asserts, for each kind of directory, that the damage is detected, and that an open succeeds and
/// repairs it.
fn mended(image: &Image, damaged: &Image, at: &[u64], what: &str) {
    for place in Place::all(damaged) {
        assert_eq!(place.damage(), at, "{what}");
        assert_eq!(place.survive(what), at.len() as u32, "{what}");
        assert!(place.store() == image[STORE], "{what}: the store file is not repaired");
        assert_eq!((place.damage(), place.survive(what)), (vec![], 0), "{what}");
    }
}

fn with(image: &Image, change: impl FnOnce(&mut Vec<u8>)) -> Image {
    let mut changed = image.clone();
    change(changed.get_mut(STORE).expect("a store file"));
    changed
}

#[test]
fn truncated_second_copy_is_repaired() {
    let image = sample(true);
    for length in CUTS {
        let at: &[u64] = if length < 8192 { &[4096] } else { &[] };
        let cut = with(&image, |bytes| bytes.truncate(length));
        mended(&image, &cut, at, &format!("{length} bytes"));
    }
}

#[test]
fn flipped_bit_in_either_copy_is_repaired() {
    let image = sample(true);
    for at in [0, 4, 8, 16, 31, 32, 39, 40, 2000, 4087, 4088, 4095] {
        for copy in [0, 4096] {
            let flipped = with(&image, |bytes| bytes[copy + at] ^= 1 << (at % 8));
            mended(&image, &flipped, &[copy as u64], &format!("bit of byte {}", copy + at));
        }
    }
    let none = with(&image, |bytes| bytes[..4096].fill(0));
    mended(&image, &none, &[0], "no first copy");
}

#[test]
fn open_without_a_sound_copy_fails_with_advice() {
    let image = sample(true);
    for length in SHORT {
        for place in Place::all(&with(&image, |bytes| bytes.truncate(length))) {
            place.refuse(&format!("{length} bytes"));
        }
    }
    let both = with(&image, |bytes| (bytes[40], bytes[4096 + 40]) = (1, 1));
    let cut = with(&image, |bytes| {
        bytes[17] ^= 1;
        bytes.truncate(6000);
    });
    for (damaged, what) in [(both, "both flipped"), (cut, "one flipped, one cut")] {
        Place::all(&damaged).iter().for_each(|place| place.refuse(what));
    }
}

/// Missing bytes may read as zeros: a checksum that ends in zero must not make a truncated copy
/// sound.
#[test]
fn copy_without_its_last_byte_is_not_sound() {
    let mut image = sample(true);
    let old = image[STORE].clone();
    let mut file = [0; STORE_BLOCKS * BLOCK_BYTES];
    let found = (0..100_000).find(|&segment_bytes| {
        StoreHeader { store: [9; 16], segment_bytes }.encode(&mut file);
        file[8191] == 0
    });
    assert!(found.is_some() && file[..] != old[..]);
    image.insert(STORE.into(), file.to_vec());
    let cut = with(&image, |bytes| bytes.truncate(8191));
    mended(&image, &cut, &[4096], "the last byte");
}

#[test]
fn copy_of_another_version_is_not_overwritten() {
    let image = sample(true);
    let other = with(&image, |bytes| {
        bytes[4096 + 4] = 9;
        sign(&mut bytes[4096..]);
    });
    for place in Place::all(&other) {
        assert_eq!((place.survive("another version"), place.store()), (0, other[STORE].clone()));
    }
    let alone = with(&other, |bytes| bytes[0] ^= 1);
    for place in Place::all(&alone) {
        let error = place.open().err().expect("refused");
        assert_eq!((error.status(), place.store()), (Status::Unsupported, alone[STORE].clone()));
    }
}

/// Whatever fails during the repair, the store opens at once or later.
#[test]
fn faults_during_repair_lose_nothing() {
    let image = sample(true);
    let cut = with(&image, |bytes| bytes.truncate(5000));
    let flipped = with(&image, |bytes| bytes[33] ^= 4);
    for (damaged, what) in [(&cut, "cut"), (&flipped, "flipped")] {
        for fault in [Fault::WriteError, Fault::ShortWrite, Fault::SyncError, Fault::Full] {
            let sim = simulated(damaged);
            sim.set_plan(Plan::default().once(fault, 1));
            let place = Place::Simulated(sim.clone());
            let words = format!("{what}, {fault:?}");
            assert_eq!(place.survive(&words), 1);
            sim.set_plan(Plan::default());
            sim.crash().expect("memory");
            let place = Place::Simulated(sim.reopen());
            place.survive(&words);
            assert!(place.store() == image[STORE], "{words}");
        }
        for nth in 1..40 {
            let sim = simulated(damaged);
            sim.set_plan(Plan::default().crash(nth));
            let opened = Place::Simulated(sim.clone()).open().is_ok();
            sim.set_plan(Plan::default());
            sim.crash().expect("memory");
            let place = Place::Simulated(sim.reopen());
            place.survive(&format!("{what}, the power fails at {nth} (opened: {opened})"));
            assert!(place.store() == image[STORE], "{what} {nth}");
        }
    }
}

/// An unreadable copy may be sound. Without another sound copy, the open fails with the error of
/// the disk.
#[test]
fn unreadable_copy_is_an_io_error_not_damage() {
    let image = sample(true);
    let sim = simulated(&image);
    sim.set_plan(Plan::default().once(Fault::ReadError, 1));
    let place = Place::Simulated(sim.clone());
    assert_eq!(place.survive("the first read"), 1);
    assert!(place.store() == image[STORE]);
    sim.set_plan(Plan::default().often(Fault::ReadError, 1_000_000));
    let error = place.open().err().expect("refused");
    assert!(error.status() == Status::Io && error.message().contains(STORE), "{error}");
    sim.set_plan(Plan::default());
    assert_eq!(place.survive("all is well again"), 0);
}

/// A new store beside foreign segments would count them and read none.
#[test]
fn segments_without_a_store_file_are_rejected() {
    let mut image = sample(true);
    let whole = image.clone();
    image.remove(STORE).expect("a store file");
    for place in Place::all(&image) {
        let error = place.open().map(|_| ()).expect_err("segments without a store file");
        assert_eq!(error.status(), Status::Corrupt);
        let text = error.to_string();
        assert!(text.contains(STORE) && text.contains("seg-"), "{text}");
    }
    // The rejected open wrote nothing: with the file restored, all cells are found.
    for place in Place::all(&whole) {
        assert_eq!(place.survive("with its name"), 0);
    }
    image.clear();
    for place in Place::all(&image) {
        let (_, found, report) = place.open().expect("a new store");
        assert!(report.is_new && found.cells() == 0);
    }
}
