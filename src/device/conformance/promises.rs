//! Checks of events that come when they are said to.

use crate::base::status::Status;
use crate::device::conformance::bench::Bench;
use crate::device::conformance::{Outcome, Trouble, need, refused};
use crate::device::{Event, Memory, State, Way};

/// What is behind a promise waits until it is kept, and nothing else does.
pub fn promises(bench: &Bench<'_>) -> Outcome {
    for _ in 0..3 {
        let promised = match bench.device.promise() {
            Err(error) if error.status() == Status::Unsupported => {
                return Err(Trouble::Nothing("the device makes no promises"));
            }
            said => bench.said("a promise", said)?,
        };
        let tried = wait_and_keep(bench, promised);
        // Whatever was wrong: nothing is to wait for ever.
        let kept = bench.device.keep(promised);
        tried?;
        bench.said("a promise is kept again", kept)?;
        bench.wait(promised)?;
        bench.said("a promise that was kept is not released", bench.device.release(promised))?;
        refused("a promise that was released", bench.device.keep(promised), Status::Handle)?;
    }
    Ok(())
}

fn wait_and_keep(bench: &Bench<'_>, promised: Event) -> Outcome {
    let device = bench.device;
    let streams = device.facts().streams;
    let rooms = (0..4).map(|_| bench.room(Memory::Host, 9_000)).collect::<Outcome<Vec<_>>>()?;
    let (from, beside, first, second) = (&rooms[0], &rooms[1], &rooms[2], &rooms[3]);
    let (content, before) = (from.bytes()?, (first.bytes()?, second.bytes()?));
    let copies = &mut [from.copy(first, Way::Gather)?];
    let behind = bench.begin(0, Some(promised), copies)?;
    let last = bench.begin(0, None, &mut [first.copy(second, Way::Gather)?])?;
    if streams > 1 {
        let passes = bench.begin(1, None, &mut [from.copy(beside, Way::Gather)?])?;
        bench.finish(passes)?;
        need(beside.bytes()? == content, || "wrong bytes beside a promise".into())?;
    }
    for event in [promised, behind, last] {
        let said = device.wait(event, bench.now_ns() + 100_000);
        refused("what is behind a promise that is open", said, Status::Timeout)?;
        let is_open = device.state(event).ok() == Some(State::Pending);
        need(is_open, || "an event behind a promise has come before it was kept".into())?;
        refused("an event that is open", device.release(event), Status::Busy)?;
    }
    let now = (first.bytes()?, second.bytes()?);
    need(now == before, || "a batch behind a promise has begun before it was kept".into())?;
    refused("an event that is no promise", device.keep(behind), Status::Handle)?;
    bench.said("a promise is kept", device.keep(promised))?;
    bench.finish(last)?;
    bench.finish(behind)?;
    need(second.bytes()? == content, || "wrong bytes behind a promise".into())
}
