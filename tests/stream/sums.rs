use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::base::sync::{Arc, spawn};
use kvtier::io::directory::Directory;
use kvtier::io::model_files::identity::{Identity, identities};
use kvtier::io::sidecar;
use kvtier::stream::checksums::*;
use kvtier::stream::checksums::{default_sidecar, load, load_or_new};
use kvtier::stream::units::{ALIGN_BYTES, Extent, NONE, Role, Unit, Units};
use kvtier_testkit::fixtures::scratch::Scratch;
use kvtier_testkit::model_files::simulated::{SimFile, SimModelFiles, SimModelFilesOpts, content};

/// Units of extents given as file, offset and length.
fn units(all: &[&[(u32, u64, u64)]]) -> Units {
    let unit = |(i, extents): (usize, &&[(u32, u64, u64)])| Unit {
        name: format!("layer {i}"),
        role: Role::Layer,
        layer: i as u32,
        expert: NONE,
        extents: extents
            .iter()
            .map(|&(file, offset, bytes)| Extent { file, offset, bytes, at: offset % ALIGN_BYTES })
            .collect(),
        bytes: extents.iter().map(|extent| extent.2).sum(),
        image_bytes: 0,
    };
    Units { units: all.iter().enumerate().map(unit).collect(), parts: Vec::new() }
}

fn bytes(file: u32, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    content(u64::from(file), offset, &mut out);
    out
}

/// Where the blocks of an extent begin and end, by the definition.
fn cuts(offset: u64, len: u64) -> Vec<u64> {
    let mut cuts = vec![offset];
    let mut at = offset / 4096 * 4096 + BLOCK_BYTES;
    while at < offset + len {
        cuts.push(at);
        at += BLOCK_BYTES;
    }
    cuts.push(offset + len);
    cuts
}

/// Notes all of some units, each extent at once.
fn note_all(sums: &Checksums, units: &Units, which: impl Fn(u32) -> bool) {
    for (u, unit) in (0u32..).zip(&units.units).filter(|(u, _)| which(*u)) {
        for (e, extent) in (0..).zip(&unit.extents).filter(|(_, extent)| extent.bytes > 0) {
            let all = bytes(extent.file, extent.offset, extent.bytes);
            sums.note(u, e, extent.offset, &all).expect("noted");
        }
    }
}

fn status<T>(result: Result<T>) -> Status {
    result.map_or_else(|error| error.status(), |_| Status::Ok)
}

fn files(n: u32) -> Vec<Identity> {
    let identity = |i: u32| Identity { bytes: 9 << 20, modified_ns: -5 - i128::from(i), ends: 7 };
    (0..n).map(identity).collect()
}

const MIB: u64 = 1 << 20;

#[test]
fn checksum_matches_its_definition() {
    let (offset, len) = (4096 * 3 + 100, 2 * MIB + 5000);
    let units = units(&[&[(0, offset, len), (1, 77, 10)], &[]]);
    let sums = Checksums::new(&units).expect("small");
    assert_eq!(
        (sums.sum_of_unit(0), sums.is_complete(0), sums.is_complete(1)),
        (None, false, true)
    );
    assert_eq!((sums.sum_of_unit(1), sums.sum_of_unit(2)), (Some(xxh3_64(b"")), None));
    note_all(&sums, &units, |_| true);
    let pairs = cuts(offset, len);
    let mut all: Vec<u8> = pairs
        .windows(2)
        .flat_map(|cut| xxh3_64(&bytes(0, cut[0], cut[1] - cut[0])).to_le_bytes())
        .collect();
    all.extend(xxh3_64(&bytes(1, 77, 10)).to_le_bytes());
    assert_eq!(all.len(), 4 * 8);
    assert_eq!(sums.sum_of_unit(0), Some(xxh3_64(&all)));
    assert_eq!((sums.complete_units(), sums.unsaved()), (2, 4));
}

#[test]
fn only_whole_blocks_are_summed() {
    let (offset, len) = (4096 + 100, 3 * MIB);
    let units = units(&[&[(0, 0, 5)], &[(0, offset, len), (0, 1 << 40, 0)]]);
    let sums = Checksums::new(&units).expect("small");
    let cuts = cuts(offset, len);
    let at = |unit, extent, from: u64, to: u64| {
        status(sums.note(unit, extent, from, &bytes(0, from, to.saturating_sub(from))))
    };
    for (unit, extent, from, to) in [
        (1, 0, offset + 1, cuts[1]),
        (1, 0, offset, cuts[1] - 1),
        (1, 0, cuts[1], cuts[1]),
        (1, 0, cuts[1] + 4096, cuts[2]),
        (1, 0, offset - 100, cuts[1]),
        (1, 0, cuts[3], offset + len + 1),
        (1, 0, offset + len, offset + len),
        (1, 1, 1 << 40, 1 << 40),
        (1, 2, offset, cuts[1]),
        (0, 1, offset, cuts[1]),
        (2, 0, offset, cuts[1]),
        (u32::MAX, u32::MAX, 0, 5),
    ] {
        assert_eq!(at(unit, extent, from, to), Status::Invalid, "{unit} {extent} {from}..{to}");
    }
    assert_eq!(sums.unsaved(), 0);
    assert_eq!(status(sums.verify(1, 0, offset, &bytes(0, offset, len))), Status::State);
    assert_eq!(at(1, 0, cuts[1], cuts[3]), Status::Ok);
    assert_eq!(status(sums.verify(1, 0, offset, &bytes(0, offset, len))), Status::State);
    assert_eq!(at(1, 0, offset, offset + len), Status::Ok);
    assert_eq!(status(sums.verify(1, 0, offset, &bytes(0, offset, len))), Status::Ok);
    let beyond = self::units(&[&[(0, u64::MAX - 5, 10)]]);
    assert_eq!(status(Checksums::new(&beyond)), Status::Limit);
    assert_eq!(status(Checksums::new(&self::units(&[&[(0, 0, 1 << 62)]]))), Status::Limit);
}

/// The extents of units: file, offset, length.
type Shape = Vec<Vec<(u32, u64, u64)>>;

fn shape() -> impl Strategy<Value = Shape> {
    let long = prop_oneof![0u64..9000, MIB - 5000..MIB + 5000, 0u64..3 * MIB];
    let extent = (0..3u32, 0u64..3 * MIB, long);
    proptest::collection::vec(proptest::collection::vec(extent, 0..4), 1..12)
}

fn of(shape: &[Vec<(u32, u64, u64)>]) -> Units {
    units(&shape.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn checksums_do_not_depend_on_piece_order(
        offset in 0..9000u64, len in 1..4 * MIB, swaps in any::<[usize; 6]>(), damage in any::<u64>(),
    ) {
        let units = units(&[&[(0, offset, len)]]);
        let (whole, pieces) = (Checksums::new(&units)?, Checksums::new(&units)?);
        note_all(&whole, &units, |_| true);
        let cuts = cuts(offset, len);
        let mut order: Vec<(u64, u64)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
        let n = order.len();
        swaps.iter().for_each(|swap| order.swap(swap % n, swap / n % n));
        for (from, to) in order {
            prop_assert!(!pieces.is_complete(0));
            pieces.note(0, 0, from, &bytes(0, from, to - from))?;
        }
        prop_assert_eq!(pieces.sum_of_unit(0), whole.sum_of_unit(0));
        // Only a caller that reads the block of a wrong bit detects it.
        let place = damage % (len * 8);
        let mut all = bytes(0, offset, len);
        all[(place / 8) as usize] ^= 1 << (place % 8);
        for cut in cuts.windows(2) {
            let part = &all[(cut[0] - offset) as usize..(cut[1] - offset) as usize];
            let hit = (cut[0]..cut[1]).contains(&(offset + place / 8));
            let expected = if hit { Status::Corrupt } else { Status::Ok };
            prop_assert_eq!(status(pieces.verify(0, 0, cut[0], part)), expected);
            prop_assert_eq!(status(pieces.note(0, 0, cut[0], part)), expected);
        }
        prop_assert_eq!(status(whole.verify(0, 0, offset, &all)), Status::Corrupt);
        prop_assert_eq!(pieces.sum_of_unit(0), whole.sum_of_unit(0));
    }

    #[test]
    fn sidecar_round_trips_and_rejects_changes(
        shape in shape(), done in any::<u16>(), at in any::<usize>(), bit in 0..8u8,
        cut in any::<usize>(), more in 1..40usize,
    ) {
        let units = of(&shape);
        let sums = Checksums::new(&units)?;
        note_all(&sums, &units, |unit| done >> unit & 1 == 1);
        let files = files(3);
        let (written, changes) = sums.encode(&files)?;
        prop_assert_eq!(changes, sums.unsaved());
        let back = Checksums::new(&units)?;
        prop_assert_eq!(back.decode(&files, &written), Ok(()));
        prop_assert_eq!(back.unsaved(), 0);
        for unit in 0..shape.len() as u32 {
            prop_assert_eq!(back.sum_of_unit(unit), sums.sum_of_unit(unit));
        }
        let refused = |bytes: &[u8]| {
            let empty = Checksums::new(&units).expect("small");
            let refused = empty.decode(&files, bytes).is_err();
            let none = (0..shape.len()).all(|unit| {
                !empty.is_complete(unit as u32) || shape[unit].iter().all(|extent| extent.2 == 0)
            });
            refused && none
        };
        let mut damaged = written.clone();
        damaged[at % written.len()] ^= 1 << bit;
        prop_assert!(refused(&damaged));
        prop_assert!(refused(&written[..cut % written.len()]));
        let mut longer = written.clone();
        longer.resize(written.len() + more, 0);
        prop_assert!(refused(&longer));
    }

    #[test]
    fn random_sidecars_are_rejected(noise in proptest::collection::vec(any::<u8>(), 0..600), magic: bool) {
        let sums = Checksums::new(&units(&[&[(0, 0, 9)]]))?;
        let mut noise = noise;
        if magic {
            noise.splice(0..noise.len().min(12), *b"KVTSUMS\0\x01\0\0\0");
        }
        prop_assert!(sums.decode(&files(1), &noise).is_err());
    }
}

/// Every byte of a small sidecar, and every kind of other model.
#[test]
fn damaged_and_foreign_sidecars_are_rejected() {
    let shape = vec![vec![(0, 5, 100)], vec![(1, 4096, 2 * MIB), (0, 200, 7)], vec![(1, 0, 50)]];
    let (units, files) = (of(&shape), files(2));
    let sums = Checksums::new(&units).expect("small");
    note_all(&sums, &units, |_| true);
    let (written, _) = sums.encode(&files).expect("small");
    for at in 0..written.len() {
        for bit in 0..8 {
            let mut damaged = written.clone();
            damaged[at] ^= 1 << bit;
            assert!(sums.decode(&files, &damaged).is_err(), "byte {at}, bit {bit}");
        }
    }
    let with = |shape: &[Vec<(u32, u64, u64)>], files: &[Identity]| {
        let sums = Checksums::new(&of(shape)).expect("small");
        let result = sums.decode(files, &written);
        assert_eq!(sums.complete_units() > 0, result.is_ok());
        status(result)
    };
    assert_eq!(with(&shape, &files), Status::Ok);
    let changes: [fn(&mut Shape); 6] = [
        |shape| shape.truncate(2),
        |shape| shape.push(vec![(0, 0, 1)]),
        |shape| shape[0][0].1 += 1,
        |shape| shape[0][0].2 += 1,
        |shape| shape[0][0].0 = 1,
        |shape| shape.swap(0, 2),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut other = shape.clone();
        change(&mut other);
        assert_eq!(with(&other, &files), Status::State, "change {i}");
    }
    let changes: [fn(&mut Vec<Identity>); 5] = [
        |files| files[1].bytes += 1,
        |files| files[0].modified_ns += 1,
        |files| files[1].ends ^= 1,
        |files| files.truncate(1),
        |files| files.swap(0, 1),
    ];
    for (i, change) in changes.iter().enumerate() {
        let mut other = files.clone();
        change(&mut other);
        assert_eq!(with(&shape, &other), Status::State, "change {i}");
    }
}

#[test]
fn mismatched_sidecar_is_ignored() {
    let scratch = Scratch::created("sums");
    drop(Directory::open(&scratch.0).expect("made"));
    let path = default_sidecar(&scratch.0.join("m.gguf"));
    assert_eq!(path, scratch.0.join("m.gguf.kvtsum"));
    let (units, files) = (units(&[&[(0, 5, 100)], &[(0, 4096, 2 * MIB)]]), files(1));
    let (sums, reason) = load_or_new(&path, &units, &files).expect("memory");
    assert!(sums.complete_units() == 0 && reason.is_some());
    note_all(&sums, &units, |unit| unit == 1);
    sums.save(&path, &files).expect("saved");
    assert_eq!(sums.unsaved(), 0);
    let (back, reason) = load_or_new(&path, &units, &files).expect("memory");
    assert_eq!((back.sum_of_unit(1), reason), (sums.sum_of_unit(1), None));
    assert_eq!((back.is_complete(0), back.complete_units()), (false, 1));
    let other = Identity { ends: 8, ..files[0] };
    let (none, reason) = load_or_new(&path, &units, &[other]).expect("memory");
    assert_eq!(none.complete_units(), 0);
    assert!(reason.expect("one").contains("another length, time or content"));
    sidecar::write(&path, &vec![0; 1 << 20]).expect("written");
    assert_eq!(status(load(&path, &units, &files)), Status::Limit);
}

#[test]
fn checksums_are_recorded_and_verified_concurrently() {
    let units = units(&[&[(0, 100, 8 * MIB)], &[(1, 0, 8 * MIB)]]);
    let sums = Arc::new(Checksums::new(&units).expect("small"));
    let alone = Checksums::new(&units).expect("small");
    note_all(&alone, &units, |_| true);
    let walk = |first: u32| {
        let sums = sums.clone();
        move || {
            for unit in [first, 1 - first] {
                let offset = [100, 0][unit as usize];
                for cut in cuts(offset, 8 * MIB).windows(2) {
                    let part = bytes(unit, cut[0], cut[1] - cut[0]);
                    sums.note(unit, 0, cut[0], &part).expect("noted");
                    sums.verify(unit, 0, cut[0], &part).expect("known");
                }
            }
        }
    };
    let threads = [0, 1, 0, 1].map(|first| spawn("noting".into(), walk(first)).expect("started"));
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert_eq!(sums.complete_units(), 2);
    assert!((0..2).all(|unit| sums.sum_of_unit(unit) == alone.sum_of_unit(unit)));
}

#[test]
fn file_identity_depends_on_bytes_not_on_paths() {
    let look = |lengths: &[(u64, u64)]| {
        let file = |(bytes, seed): &(u64, u64)| SimFile { bytes: *bytes, seed: *seed };
        let files = lengths.iter().map(file).collect();
        let files =
            SimModelFiles::new(Clock::manual(1), SimModelFilesOpts { files, ..Default::default() });
        let files = files.expect("sound");
        (identities(&files).expect("read"), files)
    };
    for len in [0, 1, 5000, 65_536, 100_000, 131_072, 131_073, 10 << 20] {
        let (found, files) = look(&[(len, 3), (len, 4), (len + 1, 3)]);
        assert_eq!(found[0].bytes, len);
        assert!(len == 0 || found[0].ends != found[1].ends);
        assert_eq!(look(&[(len, 3)]).0[0], found[0], "wherever it is");
        if len > 0 {
            for flipped in [0, len - 1] {
                files.flip(0, flipped);
                assert!(identities(&files).expect("read")[0].ends != found[0].ends);
                files.flip(0, flipped);
            }
        }
    }
}
