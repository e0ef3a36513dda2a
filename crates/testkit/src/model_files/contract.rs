//! The contract of [`ModelFiles`], tested on every implementation.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use proptest::prelude::*;

use crate::disk::contract::{Scratch, bytes_of, memory};
use crate::model_files::faults::Fault;
use crate::model_files::simulated::{SimFile, SimModelFiles, SimModelFilesOpts, content};
use kvtier::base::clock::Clock;
use kvtier::base::status::{Result, Status};
use kvtier::io::files::{Access, FileId, MAX_PARTS, Part, Piece};
use kvtier::io::model_files::measure::measure;
use kvtier::io::model_files::real::{ModelFilesOpts, RealModelFiles};
use kvtier::io::model_files::{ModelFiles, Stamp};

/// Lengths inside and at the end of read units, and of sectors.
const LENGTHS: [u64; 7] = [0, 1, 4096, 4097, 300_000, 65_536 + 512, 3 << 20];

fn bytes(seed: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; len as usize];
    content(seed, offset, &mut out);
    out
}

/// A model on disk with the content of simulated files.
struct Model {
    _scratch: Scratch,
    paths: Vec<PathBuf>,
}

impl Model {
    fn new(lengths: &[u64]) -> Model {
        let scratch = Scratch::new();
        std::fs::create_dir(&scratch.0).expect("made");
        let paths: Vec<PathBuf> =
            (0..lengths.len()).map(|i| scratch.0.join(format!("part-{i}"))).collect();
        for (i, (path, len)) in paths.iter().zip(lengths).enumerate() {
            std::fs::write(path, bytes(i as u64, 0, *len)).expect("written");
        }
        Model { _scratch: scratch, paths }
    }

    fn open(&self, opts: &ModelFilesOpts) -> RealModelFiles {
        RealModelFiles::open(&self.paths, opts).expect("opened")
    }
}

fn all_opts() -> [ModelFilesOpts; 5] {
    let plain = ModelFilesOpts::default();
    [
        plain,
        ModelFilesOpts { no_uring: true, ..plain },
        ModelFilesOpts { buffered: true, depth: 2, ..plain },
        ModelFilesOpts { buffered: true, no_uring: true, ..plain },
        ModelFilesOpts { mapped: true, ..plain },
    ]
}

fn simulated(lengths: &[u64], opts: SimModelFilesOpts) -> SimModelFiles {
    let file = |(i, bytes): (usize, &u64)| SimFile { bytes: *bytes, seed: i as u64 };
    let files = lengths.iter().enumerate().map(file).collect();
    SimModelFiles::new(Clock::manual(5), SimModelFilesOpts { files, ..opts }).expect("sound")
}

fn everywhere(lengths: &[u64], test: impl Fn(&dyn ModelFiles)) {
    let model = Model::new(lengths);
    for opts in all_opts() {
        let files = model.open(&opts);
        println!("{}, {:?}", files.engine(), files.fallback());
        test(&files);
    }
    for align_bytes in [1, 512, 4096] {
        test(&simulated(
            lengths,
            SimModelFilesOpts { align_bytes, ..SimModelFilesOpts::default() },
        ));
    }
}

fn transfer(files: &dyn ModelFiles, pieces: &mut [Piece]) {
    // SAFETY: the memory is a test's own, and outlives the call.
    unsafe { files.transfer(pieces) };
}

fn read(files: &dyn ModelFiles, file: u32, offset: u64, len: u64) -> Result<Vec<u8>> {
    let buffer = memory(len.max(1));
    bytes_of(&buffer).fill(0xAB);
    let mut pieces = [Piece::one(FileId(file), Access::Read, offset, buffer.address(), len)];
    transfer(files, &mut pieces);
    let [piece] = pieces;
    piece.result.map(|()| bytes_of(&buffer)[..len as usize].to_vec())
}

fn status<T>(result: Result<T>) -> Status {
    result.map_or_else(|error| error.status(), |_| Status::Ok)
}

/// Expected result of a read: the file's bytes, then zeros.
fn expected(file: u32, offset: u64, len: u64) -> Vec<u8> {
    let readable = LENGTHS[file as usize].saturating_sub(offset).min(len);
    let mut out = bytes(u64::from(file), offset, readable);
    out.resize(len as usize, 0);
    out
}

#[test]
fn content_does_not_depend_on_the_read_offset() {
    let whole = bytes(9, 0, 5000);
    for offset in (0..40).chain([4090, 4999]) {
        for len in [0, 1, 3, 7, 8, 9, 16, 100].map(|len: usize| len.min(5000 - offset)) {
            assert!(bytes(9, offset as u64, len as u64) == whole[offset..offset + len]);
        }
    }
    assert!(bytes(8, 0, 64) != bytes(9, 0, 64) && bytes(9, 0, 64) != bytes(9, 64, 64));
}

#[test]
fn reads_past_the_end_are_zeroed() {
    everywhere(&LENGTHS, |files| {
        assert_eq!(files.count(), LENGTHS.len() as u32);
        assert!(files.align_bytes() <= 4096 && files.align_bytes().is_power_of_two());
        for (file, len) in (0..).zip(LENGTHS) {
            assert_eq!((files.bytes(file), files.check(file)), (len, Ok(())));
            let rounded_bytes = len.next_multiple_of(4096);
            let found = read(files, file, 0, rounded_bytes).expect("read");
            assert!(found == expected(file, 0, rounded_bytes), "file {file}");
        }
        assert_eq!((files.bytes(99), files.stamp(99)), (0, Stamp::default()));
        assert_eq!(status(files.check(99)), Status::Invalid);
    });
}

#[test]
fn invalid_pieces_fail_alone() {
    everywhere(&LENGTHS, |files| {
        let stock = memory(64 << 10);
        let at = |i: u64| stock.range(i * 8192, 8192).expect("inside");
        let piece =
            |file, i, offset, len| Piece::one(FileId(file), Access::Read, offset, at(i), len);
        let mut batch = [
            piece(4, 0, 8192, 8192),
            piece(99, 1, 0, 4096),
            piece(2, 2, 4096, 4096),
            piece(4, 3, u64::MAX - 4095, 4096),
            piece(3, 4, 4096, 4096),
            piece(2, 5, 1 << 40, 4096),
            Piece { access: Access::Write, ..piece(4, 6, 0, 4096) },
            piece(0, 7, 0, 0),
        ];
        transfer(files, &mut batch);
        let found = batch.each_ref().map(|piece| status(piece.result.clone()));
        use Status::{Invalid, Io, Ok};
        assert_eq!(found, [Ok, Invalid, Io, Invalid, Ok, Io, Invalid, Ok]);
        assert!(bytes_of(&stock)[..8192] == expected(4, 8192, 8192));
        assert!(bytes_of(&stock)[4 * 8192..][..4096] == expected(3, 4096, 4096));
        let align = files.align_bytes();
        if align > 1 {
            assert_eq!(status(read(files, 4, 1, align)), Invalid);
            assert_eq!(status(read(files, 4, 0, align - 1)), Invalid);
        }
        transfer(files, &mut []);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn any_batch_reads_the_right_bytes(
        batch in proptest::collection::vec(
            (0..LENGTHS.len() as u32, any::<u64>(), 1u64..40, [0u64..40, 0..40, 0..40]), 1..90),
    ) {
        everywhere(&LENGTHS, |files| {
            let mut total = 0;
            let mut places = Vec::new();
            for (file, at, units, cuts) in &batch {
                let align = files.align_bytes().max(512);
                let end = LENGTHS[*file as usize].next_multiple_of(4096) / align;
                if end == 0 {
                    continue;
                }
                let first = at % end;
                let units = (*units).min(end - first);
                let mut cuts = cuts.map(|cut| cut.min(units) * align);
                cuts.sort_unstable();
                places.push((*file, first * align, units * align, cuts, total));
                total += units * align;
            }
            let stock = memory(total.max(1));
            bytes_of(&stock).fill(0xAB);
            let mut batch: Vec<Piece> = places.iter().map(|(file, offset, len, cuts, base)| {
                let mut piece = Piece::one(FileId(*file), Access::Read, *offset, stock.address(), 0);
                let mut from = 0;
                for (part, to) in (0..MAX_PARTS).zip(cuts.iter().chain([len])) {
                    let address = stock.range(base + from, to - from).expect("inside");
                    piece.parts[part] = Part { address, bytes: to - from };
                    from = *to;
                }
                piece
            }).collect();
            transfer(files, &mut batch);
            for ((file, offset, len, _, base), piece) in places.iter().zip(&batch) {
                assert_eq!(piece.result, Ok(()));
                let found = &bytes_of(&stock)[*base as usize..][..*len as usize];
                assert!(*found == expected(*file, *offset, *len), "{file} at {offset}, {len}");
            }
        });
    }
}

/// An action on a file, and the expected results of `check`, and of reads at its start and end.
type Act = (&'static str, fn(&Target), Status, [Status; 2]);

enum Target<'a> {
    Real(&'a PathBuf),
    Simulated(&'a SimModelFiles),
}

impl Target<'_> {
    fn real(&self, act: impl FnOnce(std::fs::File, &PathBuf)) {
        if let Target::Real(path) = self {
            let file = std::fs::OpenOptions::new().write(true).open(path).expect("opened");
            act(file, path);
        }
    }

    fn simulated(&self, act: impl FnOnce(&SimModelFiles)) {
        if let Target::Simulated(files) = self {
            act(files);
        }
    }
}

/// Gives a file a different time, however coarse the file system's clock is.
fn later(file: &std::fs::File) {
    let time = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    file.set_modified(time).expect("set");
}

const ACTIONS: [Act; 6] = [
    ("nothing", |_| {}, Status::Ok, [Status::Ok, Status::Ok]),
    (
        "cut",
        |target| {
            target.real(|file, _| file.set_len(100_000).expect("cut"));
            target.simulated(|files| files.truncate(0, 100_000));
        },
        Status::Corrupt,
        [Status::Ok, Status::Io],
    ),
    (
        "made longer",
        |target| {
            target.real(|file, _| file.set_len(400_001).expect("longer"));
            target.simulated(|files| files.truncate(0, 400_001));
        },
        Status::Corrupt,
        [Status::Ok, Status::Ok],
    ),
    (
        "written to",
        |target| {
            target.real(|file, _| {
                file.write_all_at(&bytes(0, 5, 1), 5).expect("written");
                later(&file);
            });
            target.simulated(|files| files.write(0, 290_000));
        },
        Status::Corrupt,
        [Status::Ok, Status::Ok],
    ),
    (
        "replaced",
        |target| {
            target.real(|_, path| {
                std::fs::write(path.with_extension("new"), b"other").expect("written");
                std::fs::rename(path.with_extension("new"), path).expect("renamed");
            });
            target.simulated(|files| files.replace(0));
        },
        Status::State,
        [Status::Ok, Status::Ok],
    ),
    (
        "removed",
        |target| {
            target.real(|_, path| std::fs::remove_file(path).expect("removed"));
            target.simulated(|files| files.replace(0));
        },
        Status::State,
        [Status::Ok, Status::Ok],
    ),
];

#[test]
fn changes_of_a_file_are_detected() {
    let judge = |files: &dyn ModelFiles, target: &Target, act: &Act| {
        let (what, run, check, reads) = act;
        run(target);
        let found = files.check(0);
        assert_eq!(status(found.clone()), *check, "{what}, {}: {found:?}", files.engine());
        let start = read(files, 0, 0, 8192);
        let end = read(files, 0, 290_816, 12_288);
        let found = [status(start.clone()), status(end.clone())];
        // A truncated file is not read through a map.
        if files.engine() != "mapped" || *check != Status::Corrupt {
            assert_eq!(found, *reads, "{what}, {}", files.engine());
        }
        if let Ok(start) = start {
            assert!(start == bytes(0, 0, 8192));
        }
        if let (Ok(end), true) = (end, *what != "written to") {
            let mut expected = bytes(0, 290_816, 300_000 - 290_816);
            expected.resize(12_288, 0);
            assert!(end == expected, "{what}: bytes past the end are zeros");
        }
    };
    for act in &ACTIONS {
        for opts in all_opts() {
            let model = Model::new(&[300_000]);
            judge(&model.open(&opts), &Target::Real(&model.paths[0]), act);
        }
        let files = simulated(&[300_000], SimModelFilesOpts::default());
        judge(&files, &Target::Simulated(&files), act);
    }
}

#[test]
fn a_restored_modification_time_is_detected() {
    let model = Model::new(&[5000]);
    let files = model.open(&ModelFilesOpts::default());
    let time = std::fs::metadata(&model.paths[0]).expect("found").modified().expect("known");
    // Bytes changed and the modification time restored: only the change time shows it.
    let file = std::fs::OpenOptions::new().write(true).open(&model.paths[0]).expect("opened");
    while files.check(0).is_ok() {
        file.write_all_at(b"x", 17).expect("written");
        file.set_modified(time).expect("put back");
    }
    let error = files.check(0).expect_err("changed");
    assert_eq!(error.status(), Status::State, "{error}");
    assert!(error.message().contains("part-0") && error.message().contains("again"), "{error}");
}

#[test]
fn only_regular_files_are_opened() {
    let model = Model::new(&[5000]);
    let open = |paths: &[PathBuf]| status(RealModelFiles::open(paths, &ModelFilesOpts::default()));
    let aside = |name| model.paths[0].with_file_name(name);
    std::os::unix::fs::symlink(&model.paths[0], aside("link")).expect("linked");
    let pipe = std::ffi::CString::new(aside("pipe").to_str().expect("text")).expect("text");
    // SAFETY: a NUL-terminated path.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    assert_eq!(open(&[aside("link"), aside("link")]), Status::Ok);
    assert_eq!(open(&[aside("pipe")]), Status::Invalid);
    assert_eq!(open(&[aside("")]), Status::Invalid);
    assert_eq!(open(&["/dev/null".into()]), Status::Invalid);
    assert_eq!(open(&[model.paths[0].clone(), aside("none")]), Status::NotFound);
    assert_eq!(open(&[]), Status::Invalid);
    let refused = SimModelFiles::new(Clock::real(), SimModelFilesOpts::default());
    assert_eq!(status(refused), Status::Invalid);
}

#[test]
fn read_pages_are_dropped_from_the_page_cache() {
    let model = Model::new(&[8 << 20]);
    let file = std::fs::File::open(&model.paths[0]).expect("opened");
    file.sync_all().expect("clean");
    let cached = || {
        let (fd, len) = (std::os::fd::AsRawFd::as_raw_fd(&file), 8 << 20);
        let mut pages = vec![0u8; len / kvtier::base::fork::page_bytes()];
        // SAFETY: a mapping of this test, queried and unmapped.
        unsafe {
            let map =
                libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
            assert!(map != libc::MAP_FAILED);
            assert_eq!(libc::mincore(map, len, pages.as_mut_ptr()), 0);
            libc::munmap(map, len);
        }
        pages.iter().filter(|page| **page & 1 == 1).count()
    };
    for opts in &all_opts()[2..4] {
        let files = model.open(opts);
        let (whole, half) = (cached(), 4 << 20);
        assert!(read(&files, 0, 0, half).is_ok() && read(&files, 0, half, half).is_ok());
        println!("{whole} pages were cached, {} are", cached());
        // File systems in the page cache cannot drop it.
        let shm = cached() == pages_of(8 << 20);
        assert!(shm || cached() * 8 < pages_of(8 << 20), "{} pages", cached());
    }
}

fn pages_of(bytes: usize) -> usize {
    bytes / kvtier::base::fork::page_bytes()
}

#[test]
fn planned_faults_hit_their_pieces() {
    let files = simulated(&[1 << 20, 1 << 20], SimModelFilesOpts::default());
    let reads = |offsets: &[u64]| -> Vec<Status> {
        offsets.iter().map(|offset| status(read(&files, 1, *offset, 4096))).collect()
    };
    files.plant(Fault::Broken(2));
    files.plant(Fault::Short(4));
    use Status::{Io, Ok};
    assert_eq!(reads(&[0, 0, 0, 0, 0]), [Ok, Io, Ok, Io, Ok]);
    files.plant(Fault::BrokenRange(1, 8192..8193));
    assert_eq!(reads(&[4096, 8192, 12_288]), [Ok, Io, Ok]);
    assert_eq!(status(read(&files, 0, 8192, 4096)), Ok);
    files.heal();
    assert_eq!((reads(&[8192]), files.pieces()), (vec![Ok], 10));
    files.flip(1, 5000);
    let (found, mut expected) = (read(&files, 1, 4096, 4096).expect("read"), bytes(1, 4096, 4096));
    assert!(found != expected && files.check(1).is_ok());
    expected[5000 - 4096] ^= 1;
    assert!(found == expected);
}

#[test]
fn duration_depends_on_bytes_and_seed() {
    let opts =
        SimModelFilesOpts { bytes_per_second: 1 << 20, latency_ns: 1000, ..Default::default() };
    let piece =
        |offset, bytes| Piece::one(FileId(0), Access::Read, offset, std::ptr::null_mut(), bytes);
    let files = simulated(&[1 << 20], opts.clone());
    let second = 1_000_000_000;
    assert_eq!(files.cost_ns(&[piece(0, 1 << 19), piece(1 << 19, 1 << 19)]), second + 1000);
    files.plant(Fault::SlowRange(0, 0..(1 << 18), 5));
    assert_eq!(files.cost_ns(&[piece(0, 1 << 20)]), 2 * second + 1000);
    assert_eq!(files.cost_ns(&[piece(1 << 19, 1 << 19)]), second / 2 + 1000);
    let jittery = |seed| {
        let files =
            simulated(&[1 << 20], SimModelFilesOpts { jitter_percent: 50, seed, ..opts.clone() });
        [0; 20].map(|_| files.cost_ns(&[piece(0, 1 << 20)]))
    };
    let costs = jittery(4);
    assert!(costs == jittery(4) && costs != jittery(5));
    assert!(costs.iter().all(|cost| (second + 1000..=(second + 1000) * 3 / 2).contains(cost)));
}

#[test]
fn bandwidth_is_measured() {
    let opts =
        SimModelFilesOpts { bytes_per_second: 1 << 30, moves_clock: true, ..Default::default() };
    let clock = Clock::manual(0);
    let file = |bytes| SimFile { bytes, seed: 1 };
    for bytes in [1, 5000, 4 << 20, 100 << 20] {
        let files = vec![file(0), file(bytes), file(bytes / 2)];
        let files = SimModelFiles::new(clock.clone(), SimModelFilesOpts { files, ..opts.clone() });
        let rate = measure(&files.expect("sound"), &clock, 40 << 20).expect("measured");
        // Bytes read past the end take time, and do not count.
        let least = (1u64 << 30) / bytes.next_multiple_of(4096) * bytes;
        assert!(rate >= least / 100 * 99 && rate <= 1 << 30, "{rate} for {bytes}");
    }
    let still = simulated(&[1 << 20], SimModelFilesOpts::default());
    assert_eq!(status(measure(&still, &Clock::manual(1), 1 << 20)), Status::State);
    assert_eq!(status(measure(&simulated(&[0], opts), &clock, 1)), Status::Invalid);
    let model = Model::new(&[20 << 20]);
    for opts in all_opts() {
        assert!(measure(&model.open(&opts), &Clock::real(), 16 << 20).expect("measured") > 0);
    }
}
