//! Checks of events that come when they are said to.

use crate::base::status::Status;
use crate::device::conformance::bench::{Bench, Room};
use crate::device::conformance::{Outcome, Trouble, need, refused};
use crate::device::{Event, Memory, State, Way};

/// Bytes of a copy.
const LEN: usize = 9_000;

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
    // Between other memory than this, submitting may wait for what is before.
    let memory = bench.places().pop().unwrap_or(Memory::Host);
    let from = &bench.room(memory, LEN)?;
    let rooms = (0..3).map(|_| Told::new(bench)).collect::<Outcome<Vec<_>>>()?;
    let (beside, first, second) = (&rooms[0].0, &rooms[1].0, &rooms[2].0);
    let (content, before) = (from.bytes()?, (first.bytes()?, second.bytes()?));
    let copies = &mut [from.copy(first, Way::Gather)?];
    if device.keeps_caller(copies) {
        return Err(Trouble::Nothing("it can pin no memory, and would wait in the call"));
    }
    let behind = bench.begin(0, Some(promised), copies)?;
    let last = bench.begin(0, None, &mut [from.copy(second, Way::Gather)?])?;
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
    let all = first.bytes()? == content && second.bytes()? == content;
    need(all, || "wrong bytes behind a promise".into())
}

/// Host memory, and whether the device was told of it.
struct Told<'a>(Room<'a>, bool);

impl<'a> Told<'a> {
    fn new(bench: &'a Bench<'_>) -> Outcome<Told<'a>> {
        let room = bench.room(Memory::Host, LEN)?;
        // SAFETY: the room stays until it is forgotten.
        let told = unsafe { bench.device.know_host(room.pointer(), LEN as u64) };
        // To some all memory is the same.
        let is_told = !told.as_ref().is_err_and(|error| error.status() == Status::Unsupported);
        if is_told {
            bench.said("host memory that the device is told of", told)?;
        }
        Ok(Told(room, is_told))
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if !self.1 {
            return;
        }
        // SAFETY: the check has waited for all copies, or nothing of the device is used any more.
        if let Err(error) = unsafe { self.0.device().forget_host(self.0.pointer()) } {
            log::warn!("memory of a check is not forgotten: {error}");
        }
    }
}
