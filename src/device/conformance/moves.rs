//! Checks of copies: all bytes are there, no others were written, and in the order that streams
//! and events give.

use crate::base::checksum::checksum;
use crate::device::conformance::bench::{Bench, Room};
use crate::device::conformance::{Outcome, Trouble, need};
use crate::device::{Copy, Memory, Way};

/// From each place to each other and back.
pub fn bytes(bench: &Bench<'_>) -> Outcome {
    for from in bench.places() {
        for to in bench.places() {
            for way in [Way::Gather, Way::Scatter] {
                let (a, b) = (bench.room(from, 70_001)?, bench.room(to, 70_001)?);
                let (mut left, mut right) = (a.bytes()?, b.bytes()?);
                need(left != right, || "two rooms have the same noise".into())?;
                bench.do_copy(a.copy(&b, way)?)?;
                match way {
                    Way::Gather => right.clone_from(&left),
                    Way::Scatter => left.clone_from(&right),
                }
                need(a.bytes()? == left && b.bytes()? == right, || {
                    format!("{way:?} of a tensor in {from:?} and a plane in {to:?}: wrong bytes")
                })?;
            }
        }
    }
    Ok(())
}

/// Copies of all lengths, at all alignments, touch what they should and nothing beside it.
pub fn sizes(bench: &Bench<'_>) -> Outcome {
    let lens = [1, 2, 3, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 65_536, 1 << 20];
    for (len, way) in lens.into_iter().flat_map(|len| [(len, Way::Gather), (len, Way::Scatter)]) {
        for place in bench.places() {
            let (at, back) = (bench.chance.below(130), bench.chance.below(130));
            let (tensor, plane) =
                (bench.room(place, len + 260)?, bench.room(Memory::Host, len + 260)?);
            let (mut content, mut want) = (tensor.bytes()?, plane.bytes()?);
            let pointer = plane.pointer().wrapping_add(back as usize);
            let copy = Copy::bytes(pointer, tensor.address + at, len as u64, way, place);
            bench.do_copy(bench.said("a copy", copy)?)?;
            let (at, back) = (at as usize, back as usize);
            let (there, here) = (&mut content[at..at + len], &mut want[back..back + len]);
            match way {
                Way::Gather => here.copy_from_slice(there),
                Way::Scatter => there.copy_from_slice(here),
            }
            need(tensor.bytes()? == content && plane.bytes()? == want, || {
                format!("{way:?} of {len} bytes, {at} in {place:?}, {back}: wrong bytes, or others")
            })?;
        }
    }
    Ok(())
}

/// A device that says it sums does.
pub fn sums(bench: &Bench<'_>) -> Outcome {
    if !bench.device.facts().sums {
        return Err(Trouble::Nothing("the device makes no sums"));
    }
    let facts = bench.device.facts();
    // An asynchronous one sums what is in its own memory, and is asked when that is there.
    let place = if facts.asynchronous { Memory::Device } else { Memory::Host };
    for len in [1, 100, 4096, 65_537, 1 << 20] {
        for way in [Way::Gather, Way::Scatter] {
            let (a, b) = (bench.room(place, len)?, bench.room(Memory::Host, len)?);
            let moved = if way == Way::Gather { a.bytes()? } else { b.bytes()? };
            let mut copies = [a.copy(&b, way)?];
            copies[0].wants_sum = true;
            let event = bench.begin(0, None, &mut copies)?;
            bench.wait(event)?;
            if facts.asynchronous {
                let told = bench.device.sums(event, std::slice::from_mut(&mut copies[0].sum));
                need(told == Ok(1), || format!("{way:?} of {len}: {told:?} sums"))?;
            }
            bench.finish(event)?;
            need(copies[0].sum == checksum(&moved), || format!("{way:?} of {len}: wrong sum"))?;
        }
    }
    Ok(())
}

/// Many small cells at once, mixed in size, way and place.
pub fn large_batch(bench: &Bench<'_>) -> Outcome {
    for place in bench.places() {
        for cell in [64usize, 1000, 4096, 16_384] {
            let count = (2 << 20) / cell.max(1024);
            let (there, here) =
                (bench.room(place, cell * count)?, bench.room(Memory::Host, cell * count)?);
            let (mut left, mut right) = (there.bytes()?, here.bytes()?);
            let mut copies = Vec::with_capacity(count);
            for i in 0..count {
                let way = bench.chance.of(&[Way::Gather, Way::Scatter]);
                let at = i * cell..(i + 1) * cell;
                let host = here.pointer().wrapping_add(at.start);
                let address = there.address + at.start as u64;
                let copy = Copy::bytes(host, address, cell as u64, way, place);
                copies.push(bench.said("a copy", copy)?);
                match way {
                    Way::Gather => right[at.clone()].copy_from_slice(&left[at]),
                    Way::Scatter => left[at.clone()].copy_from_slice(&right[at]),
                }
            }
            let event = bench.begin(0, None, &mut copies)?;
            bench.finish(event)?;
            need(there.bytes()? == left && here.bytes()? == right, || {
                format!("{count} cells of {cell} bytes in {place:?}: wrong bytes")
            })?;
        }
    }
    Ok(())
}

/// A batch without copies has an event that comes after what is before it.
pub fn empty_batch(bench: &Bench<'_>) -> Outcome {
    let (a, b) = (bench.room(Memory::Host, 90_000)?, bench.room(Memory::Host, 90_000)?);
    let copied = bench.begin(0, None, &mut [a.copy(&b, Way::Gather)?])?;
    let marked = bench.begin(0, None, &mut [])?;
    bench.finish(marked)?;
    let right = a.bytes()? == b.bytes()?;
    bench.finish(copied)?;
    need(right, || "the mark came before the copy".into())
}

/// Passes bytes through a row of rooms; the last must have what the first has.
fn chain(bench: &Bench<'_>, by_events: bool) -> Outcome {
    let streams = bench.device.facts().streams;
    for _ in 0..bench.rounds {
        let len = 1 + bench.chance.below(40_000) as usize;
        let places = bench.places();
        let rooms = (0..6)
            .map(|_| bench.room(bench.chance.of(&places), len))
            .collect::<Outcome<Vec<Room<'_>>>>()?;
        let content = rooms[0].bytes()?;
        let (mut events, mut last) = (Vec::new(), None);
        for pair in rooms.windows(2) {
            let stream = if by_events { bench.chance.below(streams.into()) as u32 } else { 0 };
            let after = last.filter(|_| by_events);
            let copy = match bench.chance.below(2) {
                0 => pair[0].copy(&pair[1], Way::Gather)?,
                _ => pair[1].copy(&pair[0], Way::Scatter)?,
            };
            let event = bench.begin(stream, after, &mut [copy])?;
            events.push(event);
            last = Some(event);
        }
        if let Some(last) = last {
            bench.wait(last)?;
        }
        let found = rooms[5].bytes()?;
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

/// What is on one stream happens in order.
pub fn stream_order(bench: &Bench<'_>) -> Outcome {
    chain(bench, false)
}

/// What is behind an event of any stream happens after it.
pub fn event_order(bench: &Bench<'_>) -> Outcome {
    if bench.device.facts().streams < 2 {
        return Err(Trouble::Nothing("the device has one stream"));
    }
    chain(bench, true)
}
