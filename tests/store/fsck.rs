//! The offline check of a disk tier: its counts for a sound store, its reports of damage in every
//! region of every file, and that it changes nothing.

use kvtier::base::status::Status;
use kvtier::format::keys::Key;
use kvtier::io::read_only::ReadOnlyFiles;
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{DamageKind, FsckOptions, Report, fsck};

use kvtier_testkit::fixtures::disk;

use disk::*;

const INDEX_1: &str = "index-0000000000000001.kvt";

fn check(image: &Image) -> Report {
    let sim = restore(image);
    let report = fsck(&sim, &FsckOptions::default()).expect("a store");
    assert!(sim.durable().expect("memory") == *image, "something was written");
    report
}

/// The sample with one bit flipped.
fn flipped(image: &Image, file: &str, byte: usize) -> Image {
    let mut image = image.clone();
    image.get_mut(file).expect("a file of the image")[byte] ^= 0x10;
    image
}

/// The one damaged place of a sample with one bit flipped.
fn damage(image: &Image, file: &str, byte: usize) -> (&'static str, u64, Report) {
    let report = check(&flipped(image, file, byte));
    assert_eq!(report.damages as usize, report.damage.len());
    let damage = report.damage.first().unwrap_or_else(|| panic!("{file} {byte} is not detected"));
    assert_eq!(damage.file, file);
    let (what, offset) = (damage.what.name(), damage.offset);
    assert!(offset <= byte as u64 && (byte as u64) < offset + damage.bytes.max(1), "{damage:?}");
    (what, offset, report)
}

#[test]
fn fsck_of_a_sound_store_is_clean() {
    for checkpoint in [false, true] {
        let report = check(&sample(checkpoint));
        assert!(report.is_clean(), "{:?}", report.damage);
        assert_eq!(report.store, [9; 16]);
        assert_eq!(report.live.cells, 7, "{report:?}");
        let bytes: u64 = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
            .iter()
            .map(|&(n, layer)| stored(n, layer))
            .sum();
        assert_eq!((report.live.bytes, report.dead.cells), (bytes, 1));
        assert_eq!((report.damaged.cells, report.unchecked.cells), (0, 0));
        assert_eq!((report.sessions, report.session_bytes), (2, 20 + 5000));
        assert_eq!((report.forgets, report.duplicates, report.unknown), (1, 0, 0));
        let [found] = report.namespaces[..] else { panic!("{:?}", report.namespaces) };
        assert_eq!((found.key, found.chunks, found.live), (Key([1; 32]), 3, report.live));
        let states: Vec<_> =
            report.checkpoints.iter().map(|c| (c.number, c.sound, c.used)).collect();
        assert_eq!(states, if checkpoint { vec![(1, true, true)] } else { vec![] });
    }
}

#[test]
fn fsck_names_the_damaged_region() {
    let image = sample(true);
    let what = |file, byte| damage(&image, file, byte).0;
    assert_eq!(what(STORE, 33), "store-name");
    assert_eq!(what(STORE, 4096 + 33), "store-name");
    assert_eq!(what(SEGMENT_1, 12), "segment-header");
    assert_eq!(what(INDEX_1, 40), "checkpoint-header");
    assert_eq!(what(INDEX_1, 4096 + 100), "checkpoint-frame");

    // The first record: its header at block 1, its first cell at block 2.
    let (what_is, at, report) = damage(&image, SEGMENT_1, 4096 + 130);
    assert_eq!((what_is, at), ("header", 4096));
    // The checkpoint lists the cells of this record, but they cannot be checked.
    assert_eq!((report.live.cells, report.unchecked.cells), (5, 2), "{report:?}");
    let (what_is, at, report) = damage(&image, SEGMENT_1, 8192 + 77);
    assert_eq!((what_is, at), ("cell", 8192));
    assert_eq!((report.live.cells, report.damaged.cells, report.damages), (6, 1, 1));
    let DamageKind::Cell { key, layer, live } = report.damage[0].what else { panic!("a cell") };
    assert_eq!((number_of(&key), layer, live), (0, 0, true));

    // Without the checkpoint, the same damage loses the two cells.
    let scanned = sample(false);
    let (_, _, report) = damage(&scanned, SEGMENT_1, 4096 + 130);
    assert_eq!((report.live.cells, report.unchecked.cells, report.damages), (5, 0, 1));
}

/// One flipped bit anywhere in the written bytes is reported with its file and position.
#[test]
fn fsck_detects_every_flipped_bit() {
    for checkpoint in [false, true] {
        let image = sample(checkpoint);
        for (name, bytes) in &image {
            let block = |at: usize| &bytes[at / 4096 * 4096..][..4096];
            for at in (0..bytes.len()).step_by(241).filter(|&at| block(at).iter().any(|&b| b != 0))
            {
                let report = check(&flipped(&image, name, at));
                // Padding of a cell to a whole block is not checked.
                let padding = bytes[at] == 0 && name.starts_with("seg-") && report.is_clean();
                assert!(padding || report.damage.iter().any(|d| d.file == *name), "{name} {at}");
                if let Some(damage) = report.damage.iter().find(|d| d.file == *name) {
                    let end = damage.offset + damage.bytes.max(1);
                    assert!((damage.offset..end).contains(&(at as u64)), "{at}: {damage:?}");
                }
            }
        }
    }
}

#[test]
fn fsck_names_truncated_and_torn_records() {
    let image = sample(false);
    let mut cut = image.clone();
    cut.get_mut(SEGMENT_1).expect("a segment").truncate(9 * 4096);
    let names: Vec<_> = check(&cut).damage.iter().map(|d| (d.what.name(), d.offset)).collect();
    assert!(names.contains(&("segment-length", 9 * 4096)), "{names:?}");
    let mut empty = image.clone();
    empty.get_mut(SEGMENT_1).expect("a segment").clear();
    assert!(!check(&empty).is_clean());

    // A record in a segment without an end, as after a crash.
    let sim = kvtier_testkit::disk::SimFiles::new(1, Default::default());
    let (tier, ..) = open(&sim).expect("a new store");
    put(&tier, 0, &[0, 1], false).expect("room");
    tier.commit_all().expect("a sync");
    let torn = sim.durable().expect("memory");
    assert!(check(&torn).is_clean(), "what was never written is no damage");
    let report = check(&flipped(&torn, SEGMENT_1, 4096 + 9));
    assert_eq!(report.damage[0].what, DamageKind::Tail, "{:?}", report.damage);
}

#[test]
fn fsck_rejects_a_directory_without_a_store() {
    let refused = |image: &Image| {
        let sim = restore(image);
        fsck(&sim, &FsckOptions::default()).expect_err("refused").status()
    };
    assert_eq!(refused(&Image::new()), Status::NotFound);
    let both = flipped(&flipped(&sample(false), STORE, 40), STORE, 4096 + 40);
    assert_eq!(refused(&both), Status::Corrupt);
    let mut other = sample(false);
    for copy in other.get_mut(STORE).expect("a store file").chunks_mut(4096) {
        copy[4] = 9;
        kvtier::format::segment::sign(copy);
    }
    assert_eq!(refused(&other), Status::Unsupported);
}

#[test]
fn fsck_ignores_foreign_files_and_bounds_its_list() {
    let mut image = sample(true);
    let mut segment = image[SEGMENT_1].clone();
    segment[16] ^= 1;
    kvtier::format::segment::sign(&mut segment[..4096]);
    image.insert("seg-00000000000000aa.kvt".into(), segment);
    image.insert("new-index-0000000000000009.kvt".into(), vec![1; 4096]);
    image.insert("notes.txt".into(), vec![1; 4096]);
    let report = check(&image);
    assert!(report.is_clean(), "{:?}", report.damage);
    assert_eq!((report.foreign_segments, report.unfinished), (1, 1));

    let mut bad = sample(false);
    for block in [2usize, 3, 5, 7] {
        bad = flipped(&bad, SEGMENT_1, block * 4096 + 3);
    }
    let sim = restore(&bad);
    let report = fsck(&sim, &FsckOptions { most_damage: 1 }).expect("a store");
    assert!(report.damage.len() == 1 && report.damages > 1);
}

#[test]
fn fsck_reads_an_open_store_only_without_its_lock() {
    let (scratch, tier) = store("lock");
    let busy = RealFiles::open(&scratch.0, &RealOpts::default()).err().expect("held");
    assert_eq!(busy.status(), Status::Busy);
    let looking = ReadOnlyFiles::open(&scratch.0).expect("a directory");
    let report = fsck(&looking, &FsckOptions::default()).expect("a store");
    assert!(report.is_clean() && report.live.cells == 2, "{report:?}");
    drop(tier);
    let report = fsck(&*real(&scratch.0), &FsckOptions::default()).expect("a store");
    assert!(report.is_clean() && report.live.cells == 2, "{report:?}");
}
