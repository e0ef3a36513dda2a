//! A file that goes to a GPU straight from disk, beside the same by way of host memory.
//! `KVTIER_BENCH_DIR` names the directory, if not the one for temporary files.

use std::path::PathBuf;
use std::time::Instant;

use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::Cuda;
use kvtier::device::{Copy, Device, Direction, Memory, Stream};

use super::{Bar, Better, median};
use kvtier_cli::direct::DirectReadTest;

/// What one thread reads at once, as a streamer's do.
const CHUNK_BYTES: usize = 4 << 20;
/// Threads that read, likewise.
const THREADS: usize = 4;

/// The bar, or why it was not measured: GB/s of both ways.
pub fn bar(measured: Result<(f64, f64)>) -> Bar {
    let (value, note) = match &measured {
        Ok((rate, _)) => (measured.as_ref().ok(), format!("{rate:.2} GB/s")),
        Err(error) => (None, error.to_string()),
    };
    Bar {
        bar: "disk_to_device",
        value: value.map(|(rate, baseline)| rate / baseline),
        unit: "x",
        baseline: "the same by way of host memory",
        baseline_value: value.map(|(_, baseline)| *baseline),
        goal: None,
        better: Better::Higher,
        note,
    }
}

/// Measures both ways in turn.
pub fn run(device: &Cuda, bytes: usize, rounds: usize) -> Result<(f64, f64)> {
    let dir = std::env::var_os("KVTIER_BENCH_DIR").map(PathBuf::from);
    let dir = dir.unwrap_or_else(std::env::temp_dir);
    let test = DirectReadTest::new(device, &dir, bytes as u64)?;
    test.check()?;
    let wish = AllocationRequest { bytes: CHUNK_BYTES as u64, ..AllocationRequest::default() };
    let staging = (0..THREADS).map(|_| Buffer::map(&wish, None)).collect::<Result<Vec<_>>>()?;
    let known = staging.iter().try_for_each(|buffer| {
        // SAFETY: it stays until it is forgotten below.
        unsafe { device.register_host(buffer.address(), CHUNK_BYTES as u64) }
    });
    let (mut straight, mut by_host) = (Vec::new(), Vec::new());
    let measure = |_| {
        (0..=rounds).try_for_each(|round| {
            let ways = [
                timed(bytes, |_, offset, part| test.read(offset, part))?,
                timed(bytes, |thread, offset, part| {
                    let host = staging[thread].address();
                    test.read_to_host(offset, host, part)?;
                    let to = test.address() + offset;
                    let copy = Copy::bytes(host, to, part, Direction::Scatter, Memory::Device)?;
                    // SAFETY: memory of this thread's, until the event has come.
                    let event = unsafe { device.submit(Stream(0), None, &mut [copy]) }?;
                    device.wait(event, 0)?;
                    device.release(event)
                })?,
            ];
            if round > 0 {
                straight.push(ways[0]);
                by_host.push(ways[1]);
            }
            Ok(())
        })
    };
    let measured = known.and_then(measure);
    for buffer in &staging {
        // SAFETY: nothing is under way. What was not told of is not known, and no loss.
        drop(unsafe { device.unregister_host(buffer.address()) });
    }
    measured.map(|()| (median(&mut straight), median(&mut by_host)))
}

/// GB/s of threads that take a file in chunks: which thread, from where, how much.
fn timed(bytes: usize, each: impl Fn(usize, u64, u64) -> Result<()> + Sync) -> Result<f64> {
    let began = Instant::now();
    let each = &each;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let starts = (thread * CHUNK_BYTES..bytes).step_by(THREADS * CHUNK_BYTES);
                scope.spawn(move || {
                    starts.into_iter().try_for_each(|at| {
                        each(thread, at as u64, CHUNK_BYTES.min(bytes - at) as u64)
                    })
                })
            })
            .collect();
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(_) => Err(Status::Panic.into()),
        });
        ended.collect::<Result<Vec<()>>>()
    })?;
    Ok(bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
}
