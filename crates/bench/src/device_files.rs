//! Direct reads from a file into GPU memory, beside reads through host memory. `KVTIER_BENCH_DIR`
//! names the directory; by default that for temporary files.

use std::path::PathBuf;
use std::time::Instant;

use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::status::{Result, Status};
use kvtier::device::cuda::Cuda;
use kvtier::device::{Copy, Device, Direction, Memory, Stream};

use super::{Bar, median};
use kvtier_cli::direct::DirectReadTest;

/// Bytes of a read, as in a streamer.
const CHUNK_BYTES: usize = 4 << 20;
/// Reader threads, as in a streamer.
const THREADS: usize = 4;

/// The bar from the GB/s of both methods, or with the reason why it was not measured.
pub fn bar(measured: Result<(f64, f64)>) -> Bar {
    let (value, note) = match &measured {
        Ok((rate, _)) => (measured.as_ref().ok(), format!("{rate:.2} GB/s")),
        Err(error) => (None, error.to_string()),
    };
    Bar::higher("disk_to_device", "x")
        .baseline("the same through host memory")
        .baseline_value(value.map(|(_, baseline)| *baseline))
        .value(value.map(|(rate, baseline)| rate / baseline))
        .note(note)
}

/// Measures both methods in turn.
pub fn run(device: &Cuda, bytes: usize, rounds: usize) -> Result<(f64, f64)> {
    let dir = std::env::var_os("KVTIER_BENCH_DIR").map(PathBuf::from);
    let dir = dir.unwrap_or_else(std::env::temp_dir);
    let test = DirectReadTest::new(device, &dir, bytes as u64)?;
    test.check()?;
    let request = AllocationRequest { bytes: CHUNK_BYTES as u64, ..AllocationRequest::default() };
    let staging = (0..THREADS).map(|_| Buffer::map(&request, None)).collect::<Result<Vec<_>>>()?;
    let known = staging.iter().try_for_each(|buffer| {
        // SAFETY: the buffer stays until it is unregistered below.
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
                    // SAFETY: memory of this thread's, until the event has completed.
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
        // SAFETY: no copy is in progress. Unregistering an unknown buffer has no effect.
        drop(unsafe { device.unregister_host(buffer.address()) });
    }
    measured.map(|()| (median(&mut straight), median(&mut by_host)))
}

/// GB/s of threads that process a file in chunks; `each` gets thread, offset and bytes.
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
