//! The contract of [`Files`], tested on every implementation.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;

use crate::disk::{SimFiles, SimOpts};
use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::status::{Result, Status};
use kvtier::io::files::{Access, Entry, FileId, Files, LOCK_NAME, MAX_PARTS, Part, Piece};
use kvtier::io::real::{RealFiles, RealOpts};

/// A directory that is removed after its test.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvtier-io-{}-{n}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An implementation of files.
pub enum Backend {
    Real(Scratch, RealOpts),
    Simulated(SimFiles),
}

impl Backend {
    fn real(buffered: bool, no_uring: bool, depth: u32) -> Backend {
        let opts = RealOpts { buffered, no_uring, depth, ..RealOpts::default() };
        Backend::Real(Scratch::new(), opts)
    }

    fn simulated(align_bytes: u64) -> Backend {
        Backend::Simulated(SimFiles::new(3, SimOpts { align_bytes, ..SimOpts::default() }))
    }

    fn all() -> [Backend; 7] {
        [
            Backend::real(false, false, 0),
            Backend::real(false, false, 2),
            Backend::real(false, true, 0),
            Backend::real(true, false, 0),
            Backend::real(true, true, 0),
            Backend::simulated(4096),
            Backend::simulated(1),
        ]
    }

    fn open(&self) -> Box<dyn Files> {
        match self {
            Backend::Real(scratch, opts) => {
                Box::new(RealFiles::open(&scratch.0, opts).expect("open"))
            }
            Backend::Simulated(files) => Box::new(files.reopen()),
        }
    }
}

fn everywhere(test: impl Fn(&dyn Files)) {
    for backend in Backend::all() {
        let files = backend.open();
        println!("{}, {:?}", files.engine(), files.fallback());
        test(&*files);
    }
}

/// Page-aligned memory.
pub fn memory(bytes: u64) -> Buffer {
    Buffer::map(&AllocationRequest { bytes, ..AllocationRequest::default() }, None).expect("memory")
}

#[allow(clippy::mut_from_ref)] // of memory that a buffer only names
pub fn bytes_of(buffer: &Buffer) -> &mut [u8] {
    // SAFETY: the buffer belongs to one test, and nothing is in flight.
    unsafe { std::slice::from_raw_parts_mut(buffer.address(), buffer.bytes() as usize) }
}

fn transfer(files: &dyn Files, piece: Piece) -> Result<()> {
    let mut pieces = [piece];
    // SAFETY: the memory is a test's own.
    unsafe { files.transfer(&mut pieces) };
    let [piece] = pieces;
    piece.result
}

pub fn whole(file: FileId, access: Access, offset: u64, buffer: &Buffer) -> Piece {
    Piece::one(file, access, offset, buffer.address(), buffer.bytes())
}

pub fn write(files: &dyn Files, file: FileId, offset: u64, fill: u8, bytes: u64) -> Result<()> {
    let buffer = memory(bytes);
    bytes_of(&buffer).fill(fill);
    transfer(files, whole(file, Access::Write, offset, &buffer))
}

pub fn read(files: &dyn Files, file: FileId, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let buffer = memory(bytes);
    transfer(files, whole(file, Access::Read, offset, &buffer))?;
    Ok(bytes_of(&buffer).to_vec())
}

fn status<T>(result: Result<T>) -> Status {
    result.map_or_else(|error| error.status(), |_| Status::Ok)
}

#[test]
fn written_bytes_are_read_in_any_parts() {
    everywhere(|files| {
        let unit = files.align_bytes();
        for (unit, lens) in [(unit, [1, 2, 3, 4]), (unit, [7, 0, 0, 1]), (unit * 513, [0, 5, 0, 2])]
        {
            let total = unit * lens.iter().sum::<u64>();
            let offset = unit * 3;
            let file = files.create("x", offset + total).expect("created");
            let (from, to) = (memory(total), memory(total + unit));
            bytes_of(&from).iter_mut().enumerate().for_each(|(i, b)| *b = (i * 7 / 3) as u8);
            let mut out = whole(file, Access::Write, offset, &from);
            let mut back = whole(file, Access::Read, offset, &to);
            let (mut a, mut b) = (0, unit);
            for i in 0..MAX_PARTS {
                let (bytes, other) = (unit * lens[i], unit * lens[MAX_PARTS - 1 - i]);
                out.parts[i] = Part { address: from.range(a, bytes).expect("inside"), bytes };
                let address = to.range(b, other).expect("inside");
                back.parts[i] = Part { address, bytes: other };
                (a, b) = (a + bytes, b + other);
            }
            assert_eq!(transfer(files, out), Ok(()));
            assert_eq!(transfer(files, back), Ok(()));
            assert!(bytes_of(&to)[unit as usize..] == *bytes_of(&from));
            assert!(bytes_of(&to)[..unit as usize].iter().all(|b| *b == 0), "before the memory");
            assert!(read(files, file, 0, offset).expect("zeros").iter().all(|b| *b == 0));
            files.close(file);
            assert_eq!(files.remove("x"), Ok(()));
        }
    });
}

#[test]
fn pieces_of_a_batch_succeed_or_fail_alone() {
    everywhere(|files| {
        let unit = files.align_bytes().max(512);
        let ids: Vec<FileId> =
            (0..5).map(|i| files.create(&format!("f{i}"), unit * 40).expect("created")).collect();
        let stock = memory(unit * 200);
        let at = |i: u64| stock.range(i * unit, unit).expect("inside");
        let pieces = |access| -> Vec<Piece> {
            (0..200)
                .map(|i| Piece::one(ids[i as usize % 5], access, i / 5 * unit, at(i), unit))
                .collect()
        };
        let pattern = |i: usize| (i / unit as usize * 31 + i) as u8;
        bytes_of(&stock).iter_mut().enumerate().for_each(|(i, b)| *b = pattern(i));
        let mut batch = pieces(Access::Write);
        // SAFETY: the memory is this test's own.
        unsafe { files.transfer(&mut batch) };
        assert!(batch.iter().all(|piece| piece.result.is_ok()));
        bytes_of(&stock).fill(0);
        let mut batch = pieces(Access::Read);
        // An invalid piece, one past the end, one of a closed file, and an empty one: each fails or
        // succeeds alone.
        batch[10].parts[0].address = std::ptr::null_mut();
        batch[100].offset = unit * 40;
        batch[101].file = FileId(u32::MAX);
        batch[102].parts[0].bytes = 0;
        batch[199].offset = unit * 39 + unit / 2 * (files.align_bytes() == 1) as u64;
        batch.push(Piece::one(ids[0], Access::Read, unit * 41, at(3), unit));
        batch.pop();
        // SAFETY: as above.
        unsafe { files.transfer(&mut batch) };
        for (i, piece) in batch.iter().enumerate() {
            let expected = match i {
                10 => Status::Invalid,
                100 => Status::Io,
                101 => Status::Closed,
                199 if files.align_bytes() == 1 => Status::Io,
                _ => Status::Ok,
            };
            assert_eq!(status(piece.result.clone()), expected, "{i}: {:?}", piece.result);
            let got = &bytes_of(&stock)[i * unit as usize..][..unit as usize];
            if expected == Status::Ok && i != 102 {
                let same =
                    got.iter().enumerate().all(|(j, b)| *b == pattern(i * unit as usize + j));
                assert!(same, "piece {i}");
            }
        }
        // SAFETY: there are no pieces.
        unsafe { files.transfer(&mut []) };
    });
}

#[test]
fn reads_past_the_end_fail_and_writes_extend() {
    everywhere(|files| {
        let unit = files.align_bytes();
        let file = files.create("x", unit * 3).expect("created");
        assert_eq!(status(read(files, file, unit * 3, unit)), Status::Io);
        assert_eq!(status(read(files, file, unit * 30, unit)), Status::Io);
        assert_eq!(status(read(files, file, unit * 2, unit * 2)), Status::Io);
        assert_eq!(status(read(files, file, unit * 2, unit)), Status::Ok);
        assert_eq!(files.len(file), Ok(unit * 3));
        assert_eq!(write(files, file, unit * 5, 9, unit * 2), Ok(()));
        assert_eq!(files.len(file), Ok(unit * 7));
        let bytes = read(files, file, unit * 3, unit * 4).expect("longer now");
        let (hole, new) = bytes.split_at(unit as usize * 2);
        assert!(hole.iter().all(|b| *b == 0) && new.iter().all(|b| *b == 9));
        let crooked = files.create("crooked", 1000).expect("created");
        assert_eq!(files.len(crooked), Ok(1000));
        assert_eq!(status(read(files, crooked, 0, 4096)), Status::Io);
        let (high, long) = ((1 << 63) - unit, (1 << 30) + unit);
        let buffer = memory(4096);
        for (offset, bytes) in [(high, unit), (u64::MAX - unit + 1, unit), (0, long)] {
            let piece = Piece::one(file, Access::Read, offset, buffer.address(), bytes);
            assert_eq!(status(transfer(files, piece)), Status::Invalid);
        }
        if unit > 1 {
            assert_eq!(status(read(files, file, 1, unit)), Status::Invalid);
            assert_eq!(status(read(files, file, 0, unit - 1)), Status::Invalid);
            let inside = buffer.range(1, unit.min(2048)).expect("inside");
            let piece = Piece::one(file, Access::Read, 0, inside, unit);
            assert_eq!(status(transfer(files, piece)), Status::Invalid);
        }
    });
}

#[test]
fn names_refer_to_files() {
    everywhere(|files| {
        let unit = files.align_bytes();
        assert_eq!(files.list(), Ok(vec![]));
        let b = files.create("b", unit).expect("created");
        let a = files.create("a", unit * 2).expect("created");
        assert_eq!(status(files.create("a", unit)), Status::State);
        let entry = |name: &str, units| Entry { name: name.into(), bytes: unit * units };
        assert_eq!(files.list(), Ok(vec![entry("a", 2), entry("b", 1)]));
        assert_eq!(write(files, a, 0, 1, unit).and(write(files, b, 0, 2, unit)), Ok(()));
        assert_eq!(files.rename("a", "b"), Ok(()));
        assert_eq!(files.list(), Ok(vec![entry("b", 2)]));
        let new = files.open("b").expect("found");
        assert_eq!(read(files, new, 0, 1.max(unit)).expect("read")[0], 1);
        assert_eq!(
            read(files, b, 0, unit).expect("a replaced file stays readable while it is open")[0],
            2
        );
        assert_eq!(status(files.open("a")), Status::NotFound);
        assert_eq!(status(files.rename("a", "c")), Status::NotFound);
        assert_eq!(status(files.remove("a")), Status::NotFound);
        assert_eq!(files.rename("b", "b"), Ok(()));
        assert_eq!(files.remove("b"), Ok(()));
        assert_eq!(files.list(), Ok(vec![]));
        assert_eq!(
            read(files, new, 0, unit).expect("a removed file stays readable while it is open")[0],
            1
        );
        files.close(new);
        assert_eq!(status(read(files, new, 0, unit)), Status::Closed);
        assert_eq!(status(files.len(new)), Status::Closed);
        assert_eq!(status(files.sync(new)), Status::Closed);
        assert_eq!((files.sync(a), files.sync_names()), (Ok(()), Ok(())));
        files.close(new);
        assert!(files.free_bytes().expect("known") > 1 << 20);
    });
}

#[test]
fn invalid_names_are_rejected() {
    everywhere(|files| {
        files.create("fine", 0).expect("created");
        for bad in ["", ".", "..", "../x", "a/b", ".hidden", "a b", "ä", LOCK_NAME, &"x".repeat(65)]
        {
            assert_eq!(status(files.create(bad, 0)), Status::Invalid, "{bad:?}");
            assert_eq!(status(files.open(bad)), Status::Invalid, "{bad:?}");
            assert_eq!(status(files.remove(bad)), Status::Invalid, "{bad:?}");
            assert_eq!(status(files.rename(bad, "fine")), Status::Invalid, "{bad:?}");
            assert_eq!(status(files.rename("fine", bad)), Status::Invalid, "{bad:?}");
        }
        assert_eq!(files.list().expect("listed").len(), 1);
    });
}

#[test]
fn a_failed_create_leaves_no_file() {
    everywhere(|files| {
        // Longer than the maximum of file systems: a test must not fill a real disk.
        for bytes in [u64::MAX, 1 << 62] {
            let error = files.create("huge", bytes).expect_err("too large");
            let expected = [Status::Budget, Status::Invalid, Status::Io];
            assert!(expected.contains(&error.status()), "{error}");
            assert_eq!(files.list(), Ok(vec![]));
        }
        assert!(files.create("huge", 4096).is_ok());
    });
}

#[derive(Clone, Debug)]
enum Step {
    Create(u8, u64),
    Open(u8),
    Close(usize),
    Write(usize, u64, u64, u8),
    Read(usize, u64, u64),
    Rename(u8, u8),
    Remove(u8),
    Sync(usize),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let (name, file) = (0..4u8, 0..6usize);
    prop_oneof![
        2 => (name.clone(), 0..6u64).prop_map(|(n, b)| Step::Create(n, b)),
        2 => name.clone().prop_map(Step::Open),
        1 => file.clone().prop_map(Step::Close),
        6 => (file.clone(), 0..8u64, 1..5u64, 1..255u8).prop_map(|(f, o, b, x)| Step::Write(f, o, b, x)),
        4 => (file.clone(), 0..8u64, 1..5u64).prop_map(|(f, o, b)| Step::Read(f, o, b)),
        1 => (name.clone(), name.clone()).prop_map(|(a, b)| Step::Rename(a, b)),
        1 => name.prop_map(Step::Remove),
        1 => file.prop_map(Step::Sync),
        1 => Just(Step::Reopen),
    ]
}

/// Compares steps with a map of vectors.
fn agree(backend: &Backend, steps: &[Step]) {
    let mut files = Some(backend.open());
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    let mut contents: Vec<Vec<u8>> = Vec::new();
    let mut open: Vec<(FileId, usize)> = Vec::new();
    for step in steps {
        let known = files.as_deref().expect("open");
        let unit = if known.align_bytes() == 1 { 77 } else { known.align_bytes() };
        let name = |n: &u8| format!("n{n}");
        let pick = |f: &usize| open.get(f % open.len().max(1)).copied();
        match step {
            Step::Create(n, units) => match known.create(&name(n), units * unit) {
                Ok(id) => {
                    assert!(names.insert(name(n), contents.len()).is_none());
                    open.push((id, contents.len()));
                    contents.push(vec![0; (units * unit) as usize]);
                }
                Err(error) => assert!(names.contains_key(&name(n)), "{error}"),
            },
            Step::Open(n) => match (known.open(&name(n)), names.get(&name(n))) {
                (Ok(id), Some(at)) => open.push((id, *at)),
                (got, want) => assert!(got.is_err() && want.is_none()),
            },
            Step::Close(f) if !open.is_empty() => known.close(open.remove(f % open.len()).0),
            Step::Write(f, offset, units, fill) => {
                let Some((id, at)) = pick(f) else { continue };
                assert_eq!(write(known, id, offset * unit, *fill, units * unit), Ok(()));
                let (start, end) = ((offset * unit) as usize, ((offset + units) * unit) as usize);
                let content = &mut contents[at];
                content.resize(content.len().max(end), 0);
                content[start..end].fill(*fill);
            }
            Step::Read(f, offset, units) => {
                let Some((id, at)) = pick(f) else { continue };
                let (start, end) = ((offset * unit) as usize, ((offset + units) * unit) as usize);
                let got = read(known, id, offset * unit, units * unit);
                assert_eq!(got.ok().as_deref(), contents[at].get(start..end));
                assert_eq!(known.len(id), Ok(contents[at].len() as u64));
            }
            Step::Rename(a, b) => {
                let done = known.rename(&name(a), &name(b));
                assert_eq!(done.is_ok(), names.contains_key(&name(a)));
                names.remove(&name(a)).map(|at| names.insert(name(b), at));
            }
            Step::Remove(n) => {
                assert_eq!(known.remove(&name(n)).is_ok(), names.remove(&name(n)).is_some());
            }
            Step::Sync(f) => {
                assert_eq!(pick(f).map_or(Ok(()), |(id, _)| known.sync(id)), Ok(()));
                assert_eq!(known.sync_names(), Ok(()));
            }
            Step::Close(_) => {}
            Step::Reopen => {
                open.clear();
                drop(files.take());
                files = Some(backend.open());
            }
        }
        let listed = files.as_deref().expect("open").list().expect("listed");
        let model = names
            .iter()
            .map(|(name, at)| Entry { name: name.clone(), bytes: contents[*at].len() as u64 });
        assert_eq!(listed, model.collect::<Vec<_>>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn all_implementations_agree_with_a_model(steps in proptest::collection::vec(step(), 1..60)) {
        Backend::all().iter().for_each(|backend| agree(backend, &steps));
    }
}
