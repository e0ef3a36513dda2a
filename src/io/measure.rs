//! How fast the ways to transfer are beside a plain loop of O_DIRECT calls. Run it
//! with `cargo test --release --lib io::measure -- --ignored --nocapture`; it fails
//! on no number.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use crate::base::clock::Clock;
use crate::base::memory::Buffer;
use crate::io::contract::{Scratch, bytes_of, memory};
use crate::io::files::{FileId, Files, Piece, Way};
use crate::io::real::{RealFiles, RealOpts};

const PIECE_BYTES: u64 = 1 << 20;
const BATCH: u64 = 16;
const FILE_BYTES: u64 = 1 << 30;
const ROUNDS: usize = 7;

/// Seconds and processor seconds of a pass over the file.
type Pass = (f64, f64);

fn timed(work: impl FnOnce()) -> Pass {
    let clock = Clock::real();
    let processor = || {
        // SAFETY: integers only, and a writable rusage.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    };
    let (start, used) = (clock.now_ns(), processor());
    work();
    ((clock.now_ns() - start) as f64 * 1e-9, processor() - used)
}

fn batches(files: &RealFiles, file: FileId, way: Way, stock: &Buffer) -> Pass {
    timed(|| {
        for first in (0..FILE_BYTES).step_by((BATCH * PIECE_BYTES) as usize) {
            let piece = |i: u64| {
                let address = stock.range(i * PIECE_BYTES, PIECE_BYTES).expect("inside");
                Piece::one(file, way, first + i * PIECE_BYTES, address, PIECE_BYTES)
            };
            let mut pieces: Vec<Piece> = (0..BATCH).map(piece).collect();
            // SAFETY: the memory is this test's own.
            unsafe { files.transfer(&mut pieces) };
            assert!(pieces.iter().all(|piece| piece.result.is_ok()));
        }
        if way == Way::Write {
            files.sync(file).expect("synced");
        }
    })
}

fn raw(file: &File, way: Way, stock: &Buffer) -> Pass {
    timed(|| {
        for (i, offset) in (0..FILE_BYTES).step_by(PIECE_BYTES as usize).enumerate() {
            let at = i as u64 % BATCH * PIECE_BYTES;
            let address = stock.range(at, PIECE_BYTES).expect("inside").cast();
            let (fd, bytes, offset) = (file.as_raw_fd(), PIECE_BYTES as usize, offset as i64);
            // SAFETY: the memory is this test's own.
            let got = unsafe {
                match way {
                    Way::Read => libc::pread(fd, address, bytes, offset),
                    Way::Write => libc::pwrite(fd, address, bytes, offset),
                }
            };
            assert_eq!(got, PIECE_BYTES as isize);
        }
        if way == Way::Write {
            file.sync_data().expect("synced");
        }
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(way: Way, name: &str, passes: &[Pass], baseline: &[Pass]) {
    let gib = FILE_BYTES as f64 / (1u64 << 30) as f64;
    let ratios = passes.iter().zip(baseline).map(|(pass, raw)| raw.0 / pass.0).collect();
    let speed = median(passes.iter().map(|pass| gib / pass.0).collect());
    let cost = median(passes.iter().map(|pass| pass.1 / FILE_BYTES as f64 * 1e11).collect());
    println!(
        "{way:?} {name:<20} {speed:6.2} GiB/s, {:5.2} of the raw loop, {cost:5.1} % of a core per GB/s",
        median(ratios)
    );
}

#[test]
#[ignore = "measures, and writes gigabytes"]
fn transfers_beside_a_plain_loop() {
    let scratch = Scratch::new();
    let stock = memory(BATCH * PIECE_BYTES);
    bytes_of(&stock).iter_mut().enumerate().for_each(|(i, b)| *b = ((i * 31) >> 3) as u8);
    let open = |no_uring| {
        let opts = RealOpts { no_uring, ..RealOpts::default() };
        RealFiles::open(&scratch.0, &opts).expect("opened")
    };
    let files = open(false);
    let fresh = files.create("x", FILE_BYTES).expect("room for it");
    println!("{}, {:?}", files.engine(), files.fallback());
    let first = batches(&files, fresh, Way::Write, &stock);
    println!("first pass over space just allocated: {:.2} GiB/s", 1.0 / first.0);
    drop(files);
    for way in [Way::Write, Way::Read] {
        let mut passes: [Vec<Pass>; 3] = Default::default();
        for _ in 0..ROUNDS {
            for (i, no_uring) in [false, true].into_iter().enumerate() {
                let files = open(no_uring);
                let file = files.open("x").expect("there");
                passes[i].push(batches(&files, file, way, &stock));
            }
            let mut options = File::options();
            let path = scratch.0.join("x");
            options.read(true).write(true).custom_flags(libc::O_DIRECT);
            passes[2].push(raw(&options.open(path).expect("opened"), way, &stock));
        }
        report(way, "io_uring", &passes[0], &passes[2]);
        report(way, "one by one", &passes[1], &passes[2]);
        report(way, "raw loop", &passes[2], &passes[2]);
    }
}
