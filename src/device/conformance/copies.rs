//! Checks of copies: the right bytes arrive, no others change, and streams and events order them.

use crate::base::checksum::checksum;
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::{NotPassed, Outcome, need};
use crate::device::{Copy, Direction, Memory};

/// Copies between all address spaces, in both directions.
pub fn bytes(bench: &Bench<'_>) -> Outcome {
    for from in bench.places() {
        for to in bench.places() {
            for direction in [Direction::Gather, Direction::Scatter] {
                let (a, b) = (bench.buffer(from, 70_001)?, bench.buffer(to, 70_001)?);
                let (mut left, mut right) = (a.bytes()?, b.bytes()?);
                need(left != right, || "two buffers have the same random content".into())?;
                bench.do_copy(a.copy(&b, direction)?)?;
                match direction {
                    Direction::Gather => right.clone_from(&left),
                    Direction::Scatter => left.clone_from(&right),
                }
                need(a.bytes()? == left && b.bytes()? == right, || {
                    format!(
                        "{direction:?} of a tensor in {from:?} and a plane in {to:?}: wrong bytes"
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Copies of all lengths and alignments change exactly their bytes.
pub fn sizes(bench: &Bench<'_>) -> Outcome {
    let lens = [1, 2, 3, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 65_536, 1 << 20];
    for (len, direction) in
        lens.into_iter().flat_map(|len| [(len, Direction::Gather), (len, Direction::Scatter)])
    {
        for place in bench.places() {
            let (at, back) = (bench.chance.below(130), bench.chance.below(130));
            let (tensor, plane) =
                (bench.buffer(place, len + 260)?, bench.buffer(Memory::Host, len + 260)?);
            let (mut content, mut expected) = (tensor.bytes()?, plane.bytes()?);
            let pointer = plane.pointer().wrapping_add(back as usize);
            let copy = Copy::bytes(pointer, tensor.address + at, len as u64, direction, place);
            bench.do_copy(bench.require_ok("a copy", copy)?)?;
            let (at, back) = (at as usize, back as usize);
            let (tensor_part, plane_part) =
                (&mut content[at..at + len], &mut expected[back..back + len]);
            match direction {
                Direction::Gather => plane_part.copy_from_slice(tensor_part),
                Direction::Scatter => tensor_part.copy_from_slice(plane_part),
            }
            need(tensor.bytes()? == content && plane.bytes()? == expected, || {
                format!(
                    "{direction:?} of {len} bytes, {at} in {place:?}, {back}: wrong bytes, or others"
                )
            })?;
        }
    }
    Ok(())
}

/// Checksums are right, if the device computes them.
pub fn sums(bench: &Bench<'_>) -> Outcome {
    if !bench.device.facts().sums {
        return Err(NotPassed::Skipped("the device computes no checksums"));
    }
    let facts = bench.device.facts();
    // An asynchronous device sums what is in its own memory and returns the checksum after
    // completion.
    let place = if facts.asynchronous { Memory::Device } else { Memory::Host };
    for len in [1, 100, 4096, 65_537, 1 << 20] {
        for direction in [Direction::Gather, Direction::Scatter] {
            let (a, b) = (bench.buffer(place, len)?, bench.buffer(Memory::Host, len)?);
            let moved = if direction == Direction::Gather { a.bytes()? } else { b.bytes()? };
            let mut copies = [a.copy(&b, direction)?];
            copies[0].wants_sum = true;
            let event = bench.begin(0, None, &mut copies)?;
            bench.wait(event)?;
            if facts.asynchronous {
                let reported = bench.device.sums(event, std::slice::from_mut(&mut copies[0].sum));
                need(reported == Ok(1), || {
                    format!("{direction:?} of {len}: {reported:?} checksums")
                })?;
            }
            bench.finish(event)?;
            need(copies[0].sum == checksum(&moved), || {
                format!("{direction:?} of {len}: wrong sum")
            })?;
        }
    }
    Ok(())
}

/// Large batches of small cells, mixed in size, direction and address space.
pub fn large_batch(bench: &Bench<'_>) -> Outcome {
    for place in bench.places() {
        for cell in [64usize, 1000, 4096, 16_384] {
            let count = (2 << 20) / cell.max(1024);
            let (tensor_part, plane_part) =
                (bench.buffer(place, cell * count)?, bench.buffer(Memory::Host, cell * count)?);
            let (mut left, mut right) = (tensor_part.bytes()?, plane_part.bytes()?);
            let mut copies = Vec::with_capacity(count);
            for i in 0..count {
                let direction = bench.chance.of(&[Direction::Gather, Direction::Scatter]);
                let at = i * cell..(i + 1) * cell;
                let host = plane_part.pointer().wrapping_add(at.start);
                let address = tensor_part.address + at.start as u64;
                let copy = Copy::bytes(host, address, cell as u64, direction, place);
                copies.push(bench.require_ok("a copy", copy)?);
                match direction {
                    Direction::Gather => right[at.clone()].copy_from_slice(&left[at]),
                    Direction::Scatter => left[at.clone()].copy_from_slice(&right[at]),
                }
            }
            let event = bench.begin(0, None, &mut copies)?;
            bench.finish(event)?;
            need(tensor_part.bytes()? == left && plane_part.bytes()? == right, || {
                format!("{count} cells of {cell} bytes in {place:?}: wrong bytes")
            })?;
        }
    }
    Ok(())
}

/// The event of an empty batch completes after earlier work.
pub fn empty_batch(bench: &Bench<'_>) -> Outcome {
    let (a, b) = (bench.buffer(Memory::Host, 90_000)?, bench.buffer(Memory::Host, 90_000)?);
    let copied = bench.begin(0, None, &mut [a.copy(&b, Direction::Gather)?])?;
    let marked = bench.begin(0, None, &mut [])?;
    bench.finish(marked)?;
    let right = a.bytes()? == b.bytes()?;
    bench.finish(copied)?;
    need(right, || "the event of an empty batch completed before the copy".into())
}

/// Copies bytes through a chain of buffers; the last must equal the first.
fn chain(bench: &Bench<'_>, by_events: bool) -> Outcome {
    let streams = bench.device.facts().streams;
    for _ in 0..bench.rounds {
        let len = 1 + bench.chance.below(40_000) as usize;
        let places = bench.places();
        let buffers = (0..6)
            .map(|_| bench.buffer(bench.chance.of(&places), len))
            .collect::<Outcome<Vec<TestBuffer<'_>>>>()?;
        let content = buffers[0].bytes()?;
        let (mut events, mut last) = (Vec::new(), None);
        for pair in buffers.windows(2) {
            let stream = if by_events { bench.chance.below(streams.into()) as u32 } else { 0 };
            let after = last.filter(|_| by_events);
            let copy = match bench.chance.below(2) {
                0 => pair[0].copy(&pair[1], Direction::Gather)?,
                _ => pair[1].copy(&pair[0], Direction::Scatter)?,
            };
            let event = bench.begin(stream, after, &mut [copy])?;
            events.push(event);
            last = Some(event);
        }
        if let Some(last) = last {
            bench.wait(last)?;
        }
        let found = buffers[5].bytes()?;
        for event in events {
            bench.finish(event)?;
        }
        need(found == content, || {
            let what = if by_events { "events" } else { "their stream" };
            format!("{len} bytes through 6 rooms: not in the order of {what}")
        })?;
    }
    Ok(())
}

/// Work of one stream is in order.
pub fn stream_order(bench: &Bench<'_>) -> Outcome {
    chain(bench, false)
}

/// Work that waits for an event of any stream runs after it.
pub fn event_order(bench: &Bench<'_>) -> Outcome {
    if bench.device.facts().streams < 2 {
        return Err(NotPassed::Skipped("the device has one stream"));
    }
    chain(bench, true)
}
