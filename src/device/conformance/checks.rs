//! Checks of everything around copies: memory, events, deadlines, rejected calls, closing.

use crate::base::status::Status;
use crate::device::conformance::bench::{Bench, NO_MEMORY, TestBuffer};
use crate::device::conformance::{NotPassed, Outcome, need, refused};
use crate::device::{Copy, DeviceMemory, Direction, Event, MAX_COPIES, MAX_STREAMS, Memory, State};

/// The device's properties are valid.
pub fn facts(bench: &Bench<'_>) -> Outcome {
    let facts = bench.device.facts();
    need(!facts.name.is_empty(), || "the device has no name".into())?;
    need((1..=MAX_STREAMS).contains(&facts.streams), || {
        format!("{} streams: 1 to {MAX_STREAMS} are accepted", facts.streams)
    })
}

/// Allocations are disjoint, aligned, limited, and freed once.
pub fn memory(bench: &Bench<'_>) -> Outcome {
    let device = bench.device;
    let reaches = device.facts().reaches_device;
    let left = device.free_bytes();
    let first = match device.allocate(300_001) {
        Err(error) if error.status() == Status::Unsupported => return Err(NO_MEMORY),
        result => bench.require_ok("300,001 bytes", result)?,
    };
    need(left.is_none_or(|left| left >= 300_001), || {
        format!("300,001 bytes allocated with {left:?} free")
    })?;
    let second = bench.require_ok("1 byte", device.allocate(1))?;
    for memory in [&first, &second] {
        need(memory.address != 0 && memory.address % 256 == 0, || {
            format!("memory at {:#x} is not a multiple of 256", memory.address)
        })?;
        need((memory.memory == Memory::Device) == reaches, || {
            format!("memory in {:?} contradicts reaches_device", memory.memory)
        })?;
    }
    need((first.bytes, second.bytes) == (300_001, 1), || "allocations have the wrong size".into())?;
    let ends = |at: u64, bytes: u64| at + bytes;
    let apart = ends(first.address, first.bytes) <= second.address
        || ends(second.address, second.bytes) <= first.address;
    need(apart, || "two allocations overlap".into())?;
    refused("0 bytes", device.allocate(0), Status::Invalid)?;
    need(device.allocate(1 << 62).is_err(), || "an allocation of 2^62 bytes succeeded".into())?;
    let part = DeviceMemory { bytes: first.bytes - 1, ..first };
    // SAFETY: nothing uses it; it is refused.
    let result = unsafe { device.free(&part) };
    refused("freeing with a wrong length", result, Status::Handle)?;
    let DeviceMemory { address, memory, number, .. } = part;
    let first = DeviceMemory { address, bytes: 300_001, memory, number };
    for memory in [&second, &first] {
        // SAFETY: nothing uses it.
        let freed = unsafe { device.free(memory) };
        bench.require_ok("free failed", freed)?;
    }
    // SAFETY: nothing uses it; it is refused.
    let again = unsafe { device.free(&first) };
    refused("freeing twice", again, Status::Handle)
}

/// Invalid calls are rejected and have no effect.
pub fn refusals(bench: &Bench<'_>) -> Outcome {
    let device = bench.device;
    let (a, b) = (bench.buffer(Memory::Host, 64)?, bench.buffer(Memory::Host, 64)?);
    let before = (a.bytes()?, b.bytes()?);
    let copy = || a.copy(&b, Direction::Gather);
    let streams = device.facts().streams;
    let result = bench.submit(streams, None, &mut [copy()?]);
    refused("a stream that does not exist", result, Status::Invalid)?;
    let used = bench.begin(0, None, &mut [])?;
    bench.finish(used)?;
    let asynchronous = device.facts().asynchronous;
    for unknown in [0, u64::MAX, used.0].into_iter().take(if asynchronous { 3 } else { 2 }) {
        let event = Event(unknown);
        let after = bench.submit(0, Some(event), &mut [copy()?]);
        refused("a batch behind an unknown event", after, Status::Handle)?;
        refused("the state of an unknown event", device.state(event), Status::Handle)?;
        refused("waiting for an unknown event", device.wait(event, 0), Status::Handle)?;
        refused("releasing an unknown event", device.release(event), Status::Handle)?;
    }
    let nowhere = Copy { plane: std::ptr::null_mut(), ..copy()? };
    let result = bench.submit(0, None, &mut [copy()?, nowhere]);
    refused("a plane at address 0", result, Status::Invalid)?;
    if !device.facts().reaches_device {
        let on_device = Copy { memory: Memory::Device, ..copy()? };
        let result = bench.submit(0, None, &mut [copy()?, on_device]);
        refused("device memory", result, Status::Unsupported)?;
    }
    let mut many = (0..=MAX_COPIES).map(|_| copy()).collect::<Outcome<Vec<_>>>()?;
    refused("too many copies", bench.submit(0, None, &mut many), Status::Limit)?;
    need((a.bytes()?, b.bytes()?) == before, || "a rejected batch was begun".into())
}

/// Each event completes once, is reported once, and stays valid until it is released.
pub fn events(bench: &Bench<'_>) -> Outcome {
    let device = bench.device;
    let (asynchronous, streams) = (device.facts().asynchronous, device.facts().streams);
    let mut old = [Event(0); 64];
    while device.poll(&mut old) > 0 {}
    let buffers =
        (0..7).map(|_| bench.buffer(Memory::Host, 70_000)).collect::<Outcome<Vec<_>>>()?;
    let mut open = Vec::new();
    // Batches on different streams are unordered: each has a target of its own.
    for (stream, target) in [0, 1, 0, 2, 1, 0].into_iter().zip(&buffers[1..]) {
        let copies = &mut [buffers[0].copy(target, Direction::Gather)?];
        open.push(bench.begin(stream % streams, None, copies)?);
    }
    for event in &open {
        bench.wait(*event)?;
        let done = device.state(*event).ok() == Some(State::Done);
        need(done, || "an event is not done after a successful wait".into())?;
    }
    let mut seen = Vec::new();
    let mut some = [Event(0); 4];
    loop {
        let count = device.poll(&mut some);
        if count == 0 {
            break;
        }
        seen.extend(some[..count].iter().map(|event| event.0));
    }
    seen.sort_unstable();
    let mut expected: Vec<u64> =
        open.iter().filter(|_| asynchronous).map(|event| event.0).collect();
    expected.sort_unstable();
    need(seen == expected, || {
        format!("{} events completed, {} were reported", expected.len(), seen.len())
    })?;
    for event in open {
        bench.finish(event)?;
        if asynchronous {
            refused("the state of a released event", device.state(event), Status::Handle)?;
        }
    }
    Ok(())
}

/// A caller that only polls learns of all completed events.
pub fn polling(bench: &Bench<'_>) -> Outcome {
    let device = bench.device;
    if !device.facts().asynchronous {
        return Err(NotPassed::Skipped("the device is synchronous"));
    }
    let mut reported = [Event(0); 64];
    while device.poll(&mut reported) > 0 {}
    let buffers = (0..6).map(|_| bench.buffer(Memory::Host, 5_000)).collect::<Outcome<Vec<_>>>()?;
    let mut open = Vec::new();
    for target in &buffers[1..] {
        open.push(bench.begin(0, None, &mut [buffers[0].copy(target, Direction::Gather)?])?);
    }
    // Events of a stream complete in order: if the last one has, all have.
    let until_ns = bench.until_ns();
    while bench.require_ok("an event", device.state(open[4]))? == State::Pending {
        if bench.now_ns() >= until_ns {
            bench.get_stuck();
            return Err("events do not complete unless a thread waits for them".to_string().into());
        }
        bench.pass();
    }
    let count = device.poll(&mut reported);
    for event in &open {
        need(reported[..count].contains(event), || {
            format!("{} events of a stream have completed, a poll reported {count}", open.len())
        })?;
    }
    open.into_iter().try_for_each(|event| bench.finish(event))
}

/// Waits respect their deadlines.
pub fn deadlines(bench: &Bench<'_>) -> Outcome {
    let (a, b) = (bench.buffer(Memory::Host, 1 << 20)?, bench.buffer(Memory::Host, 1 << 20)?);
    for late_ns in [1, 20_000, 1_000_000] {
        let event = bench.begin(0, None, &mut [a.copy(&b, Direction::Gather)?])?;
        let deadline_ns = bench.now_ns() + late_ns;
        match bench.device.wait(event, deadline_ns) {
            Ok(()) => {}
            Err(error) if error.status() == Status::Timeout => {
                need(bench.now_ns() >= deadline_ns, || "a timeout before its deadline".into())?;
            }
            Err(error) => return Err(format!("waiting with a deadline: {error}").into()),
        }
        bench.finish(event)?;
    }
    Ok(())
}

/// Registered host memory is copied like any other, before, during and after registration.
pub fn registered_host(bench: &Bench<'_>) -> Outcome {
    let place = *bench.places().last().unwrap_or(&Memory::Host);
    let (target, host) = (bench.buffer(place, 1 << 20)?, bench.buffer(Memory::Host, 1 << 20)?);
    for is_known in [false, true, false, true, false] {
        if is_known {
            // SAFETY: the buffer lives until it is unregistered.
            let known = unsafe { bench.device.register_host(host.pointer(), host.len as u64) };
            match known {
                Err(error) if error.status() == Status::Unsupported => {
                    return Err(NotPassed::Skipped(
                        "the device does not distinguish registered host memory",
                    ));
                }
                result => bench.require_ok("registering host memory", result)?,
            }
        }
        let moved = round(bench, &target, &host);
        if is_known {
            // SAFETY: nothing is in flight, or the buffer lives forever.
            let forgotten = unsafe { bench.device.unregister_host(host.pointer()) };
            bench.require_ok("unregistering host memory", forgotten)?;
        }
        moved?;
    }
    Ok(())
}

fn round(bench: &Bench<'_>, target: &TestBuffer<'_>, host: &TestBuffer<'_>) -> Outcome {
    let content = bench.chance.noise(host.len);
    host.set(&content)?;
    bench.do_copy(target.copy(host, Direction::Scatter)?)?;
    host.set(&bench.chance.noise(host.len))?;
    bench.do_copy(target.copy(host, Direction::Gather)?)?;
    need(host.bytes()? == content, || "wrong bytes through registered memory".into())
}

/// After close no memory is accessed and no work is accepted.
pub fn close(bench: &Bench<'_>) -> Outcome {
    let device = bench.device;
    let a = bench.buffer(Memory::Host, 300_000)?;
    let targets =
        (0..12).map(|_| bench.buffer(Memory::Host, 300_000)).collect::<Outcome<Vec<_>>>()?;
    let streams = device.facts().streams;
    let mut open = Vec::new();
    for (stream, target) in (0..).zip(&targets) {
        let copies = &mut [a.copy(target, Direction::Gather)?];
        open.push(bench.begin(stream % streams, None, copies)?);
    }
    bench.require_ok("closing", device.close(bench.until_ns()))?;
    let fresh = bench.chance.noise(a.len);
    targets.iter().try_for_each(|target| target.set(&fresh))?;
    for event in open {
        let done = device.state(event).ok() == Some(State::Done);
        need(done, || "an event is pending after close".into())?;
        bench.finish(event)?;
    }
    let late = bench.submit(0, None, &mut [a.copy(&targets[0], Direction::Gather)?]);
    refused("a batch after close", late, Status::Closed)?;
    bench.require_ok("closing again", device.close(bench.until_ns()))?;
    targets.iter().try_for_each(|target| {
        need(target.bytes()? == fresh, || "memory was written after close".into())
    })
}
