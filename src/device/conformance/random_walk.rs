//! Checks of random call sequences, from one and several threads, with the required waits only.

use crate::base::sync::{Arc, spawn};
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::{NotPassed, Outcome, need};
use crate::device::{Direction, Event};

/// A buffer with its expected content after all work, its last writer and the readers since.
struct TrackedBuffer<'a> {
    buffer: TestBuffer<'a>,
    content: Vec<u8>,
    writer: Option<Event>,
    readers: Vec<Event>,
}

const ROOMS: u64 = 6;

/// Copies between random buffers in all address spaces, with the fewest allowed waits.
pub fn anything(bench: &Bench<'_>) -> Outcome {
    for _ in 0..bench.rounds.div_ceil(4) {
        walk(bench, 3_000, 120)?;
    }
    Ok(())
}

fn walk(bench: &Bench<'_>, len: usize, steps: u64) -> Outcome {
    let places = bench.places();
    let know = |_| {
        let buffer = bench.buffer(bench.chance.of(&places), len)?;
        Ok(TrackedBuffer { content: buffer.bytes()?, buffer, writer: None, readers: Vec::new() })
    };
    let mut buffers = (0..ROOMS).map(know).collect::<Outcome<Vec<TrackedBuffer<'_>>>>()?;
    let streams = u64::from(bench.device.facts().streams);
    let mut all = Vec::new();
    for _ in 0..steps {
        let from = bench.chance.below(ROOMS) as usize;
        if bench.chance.below(5) == 0 {
            // The host uses a buffer: compares it, then fills it.
            let known = &mut buffers[from];
            known.writer.take().map_or(Ok(()), |event| bench.wait(event))?;
            let right = known.buffer.bytes()? == known.content;
            need(right, || "bytes are wrong after a wait".into())?;
            known.readers.drain(..).try_for_each(|event| bench.wait(event))?;
            known.content = bench.chance.noise(len);
            known.buffer.set(&known.content)?;
            continue;
        }
        let to = (from + 1 + bench.chance.below(ROOMS - 1) as usize) % ROOMS as usize;
        let mut before: Vec<Event> = buffers[from].writer.into_iter().collect();
        before.extend(buffers[to].writer);
        before.append(&mut buffers[to].readers);
        // The device waits for one event, this thread for the others.
        let after = before.pop();
        before.into_iter().try_for_each(|event| bench.wait(event))?;
        let copy = match bench.chance.below(2) {
            0 => buffers[from].buffer.copy(&buffers[to].buffer, Direction::Gather)?,
            _ => buffers[to].buffer.copy(&buffers[from].buffer, Direction::Scatter)?,
        };
        let event = bench.begin(bench.chance.below(streams) as u32, after, &mut [copy])?;
        all.push(event);
        buffers[from].readers.push(event);
        buffers[to].content = buffers[from].content.clone();
        buffers[to].writer = Some(event);
    }
    all.into_iter().try_for_each(|event| bench.finish(event))?;
    for known in &buffers {
        need(known.buffer.bytes()? == known.content, || "bytes are wrong at the end".into())?;
    }
    Ok(())
}

/// Several threads do the same concurrently.
pub fn threads(bench: &Bench<'_>) -> Outcome {
    let run = || {
        let (device, opts, quarantined) = bench.share();
        move || {
            let bench = Bench::new(&device, &opts).beside(quarantined);
            let result = (0..4).try_for_each(|_| {
                let result = walk(&bench, 9_000, 80);
                bench.settle();
                result
            });
            match result {
                Ok(()) => None,
                Err(NotPassed::Skipped(why)) => Some((why.to_string(), bench.is_stuck())),
                Err(NotPassed::Failed(why)) => Some((why, bench.is_stuck())),
            }
        }
    };
    let mut handles = Vec::new();
    let result = Arc::new(crate::base::sync::Mutex::new(Vec::new()));
    for _ in 0..4 {
        let (run, result) = (run(), result.clone());
        let body = move || {
            if let Some(failure) = run() {
                result.lock().push(failure);
            }
        };
        handles.push(bench.require_ok("a thread", spawn("kvt-conformance".into(), body))?);
    }
    let failed = handles.into_iter().filter_map(|handle| handle.join().err()).count();
    need(failed == 0, || "a thread panicked".into())?;
    let result = result.lock();
    if result.iter().any(|(_, is_stuck)| *is_stuck) {
        bench.get_stuck();
    }
    match result.first() {
        None => Ok(()),
        Some((why, _)) => Err(format!("with several threads: {why}").into()),
    }
}
