//! The offline check of a disk tier: what it counts in a sound store, what it says
//! of damage in every region of every file, and that it changes nothing.

#![cfg(not(feature = "shuttle"))]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvtier::base::status::Status;
use kvtier::format::keys::Key;
use kvtier::io::files::Files;
use kvtier::io::read_only::ReadOnlyFiles;
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{DiskTier, FsckOptions, Options, Report, What, fsck};

#[path = "support/disk.rs"]
mod disk;

use disk::*;

const STORE: &str = "store.kvt";
const SEGMENT_1: &str = "seg-0000000000000001.kvt";
const INDEX_1: &str = "index-0000000000000001.kvt";

fn check(image: &Image) -> Report {
    let sim = restore(image);
    let report = fsck(&sim, &FsckOptions::default()).expect("a store");
    assert!(sim.durable().expect("memory") == *image, "something was written");
    report
}

/// The sample with a bit turned over.
fn flipped(image: &Image, file: &str, byte: usize) -> Image {
    let mut image = image.clone();
    image.get_mut(file).expect("the file is there")[byte] ^= 0x10;
    image
}

/// The one damaged place of a sample with a bit turned over.
fn damage(image: &Image, file: &str, byte: usize) -> (&'static str, u64, Report) {
    let report = check(&flipped(image, file, byte));
    assert_eq!(report.damages as usize, report.damage.len());
    let damage = report.damage.first().unwrap_or_else(|| panic!("{file} {byte} is not seen"));
    assert_eq!(damage.file, file);
    let (what, offset) = (damage.what.name(), damage.offset);
    assert!(offset <= byte as u64 && (byte as u64) < offset + damage.bytes.max(1), "{damage:?}");
    (what, offset, report)
}

#[test]
fn a_sound_store_is_clean_and_counted() {
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
fn every_region_is_named() {
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
    // Its cells are listed by the checkpoint and cannot be checked.
    assert_eq!((report.live.cells, report.unchecked.cells), (5, 2), "{report:?}");
    let (what_is, at, report) = damage(&image, SEGMENT_1, 8192 + 77);
    assert_eq!((what_is, at), ("cell", 8192));
    assert_eq!((report.live.cells, report.damaged.cells, report.damages), (6, 1, 1));
    let What::Cell { key, layer, live } = report.damage[0].what else { panic!("a cell") };
    assert_eq!((number_of(&key), layer, live), (0, 0, true));

    // Without the checkpoint the same header costs its two cells.
    let scanned = sample(false);
    let (_, _, report) = damage(&scanned, SEGMENT_1, 4096 + 130);
    assert_eq!((report.live.cells, report.unchecked.cells, report.damages), (5, 0, 1));
}

/// One bit anywhere in what was written: it is seen, in its file and at its place.
#[test]
fn every_flipped_bit_is_seen() {
    for checkpoint in [false, true] {
        let image = sample(checkpoint);
        for (name, bytes) in &image {
            let block = |at: usize| &bytes[at / 4096 * 4096..][..4096];
            for at in (0..bytes.len()).step_by(241).filter(|&at| block(at).iter().any(|&b| b != 0))
            {
                let report = check(&flipped(&image, name, at));
                // What pads a cell to a whole block means nothing.
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
fn what_is_cut_off_or_torn_is_named() {
    let image = sample(false);
    let mut cut = image.clone();
    cut.get_mut(SEGMENT_1).expect("there").truncate(9 * 4096);
    let names: Vec<_> = check(&cut).damage.iter().map(|d| (d.what.name(), d.offset)).collect();
    assert!(names.contains(&("segment-length", 9 * 4096)), "{names:?}");
    let mut empty = image.clone();
    empty.get_mut(SEGMENT_1).expect("there").clear();
    assert!(!check(&empty).is_clean());

    // A record without an end to its segment: as a crash leaves it.
    let sim = kvtier::io::simulated::SimFiles::new(1, Default::default());
    let (tier, ..) = open(&sim).expect("a new store");
    put(&tier, 0, &[0, 1], false).expect("room");
    tier.commit_all().expect("a sync");
    let torn = sim.durable().expect("memory");
    assert!(check(&torn).is_clean(), "what was never written is no damage");
    let report = check(&flipped(&torn, SEGMENT_1, 4096 + 9));
    assert_eq!(report.damage[0].what, What::Tail, "{:?}", report.damage);
}

#[test]
fn what_is_no_store_is_refused() {
    let refused = |image: &Image| {
        let sim = restore(image);
        fsck(&sim, &FsckOptions::default()).expect_err("refused").status()
    };
    assert_eq!(refused(&Image::new()), Status::NotFound);
    let both = flipped(&flipped(&sample(false), STORE, 40), STORE, 4096 + 40);
    assert_eq!(refused(&both), Status::Corrupt);
    let mut other = sample(false);
    for copy in other.get_mut(STORE).expect("there").chunks_mut(4096) {
        copy[4] = 9;
        kvtier::format::segment::sign(copy);
    }
    assert_eq!(refused(&other), Status::Unsupported);
}

#[test]
fn foreign_and_unfinished_files_are_no_damage_and_the_list_has_an_end() {
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

/// A directory that goes when the test ends.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn real(path: &Path) -> Arc<dyn Files> {
    Arc::new(RealFiles::open(path, &RealOpts::default()).expect("a directory"))
}

/// A real store; the tier is still open.
fn store(name: &str) -> (Scratch, DiskTier) {
    let name = format!("kvtier-fsck-{name}-{}", std::process::id());
    let scratch = Scratch(std::env::temp_dir().join(name));
    let _ = std::fs::remove_dir_all(&scratch.0);
    let options = Options { segment_bytes: SEGMENT, ..Options::new(BUDGET, [9; 16]) };
    let (tier, ..) = DiskTier::open(real(&scratch.0), options).expect("a new store");
    put(&tier, 0, &[0, 1], false).expect("room");
    tier.put_session(b"first", b"what the store notes").expect("room");
    tier.close().expect("a sync");
    (scratch, tier)
}

#[test]
fn a_store_that_is_open_is_looked_at_without_its_lock_only() {
    let (scratch, tier) = store("lock");
    let busy = RealFiles::open(&scratch.0, &RealOpts::default()).err().expect("held");
    assert_eq!(busy.status(), Status::Busy);
    let looking = ReadOnlyFiles::open(&scratch.0).expect("there");
    let report = fsck(&looking, &FsckOptions::default()).expect("a store");
    assert!(report.is_clean() && report.live.cells == 2, "{report:?}");
    drop(tier);
    let report = fsck(&*real(&scratch.0), &FsckOptions::default()).expect("a store");
    assert!(report.is_clean() && report.live.cells == 2, "{report:?}");
}

#[cfg(feature = "tool")]
mod tool {
    use super::*;
    use std::process::{Command, Output};

    fn run(path: &Path, more: &[&str]) -> (i32, String, String) {
        let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_kvtier"))
            .arg("fsck")
            .arg(path)
            .args(more)
            .output()
            .expect("it starts");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (status.code().expect("it ends"), text(stdout), text(stderr))
    }

    fn lines(text: &str) -> Vec<serde_json::Value> {
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[test]
    fn its_exit_status_and_lines_say_how_the_directory_is() {
        let (scratch, tier) = store("tool");
        let (code, _, error) = run(&scratch.0, &[]);
        assert!(code == 2 && error.contains("is open already"), "{code} {error}");
        assert!(error.contains("--read-only"), "{error}");
        assert_eq!(run(&scratch.0, &["--read-only"]).0, 0);
        drop(tier);
        let (code, out, error) = run(&scratch.0, &[]);
        assert_eq!((code, error.as_str()), (0, ""));
        assert!(out.contains("clean") && out.contains("live        2 cells"), "{out}");

        let path = scratch.0.join(SEGMENT_1);
        let mut bytes = std::fs::read(&path).expect("there");
        bytes[2 * 4096 + 5] ^= 1;
        std::fs::write(&path, &bytes).expect("written");
        let (code, out, _) = run(&scratch.0, &[]);
        assert!(code == 1 && out.contains(&format!("{SEGMENT_1} at 8192, ")), "{out}");
        let (code, out, _) = run(&scratch.0, &["--json"]);
        let all = lines(&out);
        assert_eq!((code, all[0]["what"].as_str()), (1, Some("cell")));
        assert_eq!((all[0]["layer"].as_u64(), all[0]["live"].as_bool()), (Some(0), Some(true)));
        let summary = all.last().expect("a summary");
        assert_eq!(summary["kind"], "summary");
        assert_eq!(
            (summary["clean"].as_bool(), summary["live"]["cells"].as_u64()),
            (Some(false), Some(1))
        );
        assert!(std::fs::read(&path).expect("there") == bytes);

        std::fs::remove_file(scratch.0.join(STORE)).expect("removed");
        assert_eq!(run(&scratch.0, &[]).0, 2);
        let nowhere = scratch.0.join("nowhere");
        let (code, out, _) = run(&nowhere, &["--json"]);
        assert_eq!((code, lines(&out)[0]["kind"].as_str()), (2, Some("error")));
        assert!(!nowhere.exists(), "it makes nothing");
    }
}
