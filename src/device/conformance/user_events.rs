//! Checks of events that come when they are said to.

use crate::base::status::Status;
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::{NotPassed, Outcome, need, refused};
use crate::device::{Direction, Event, Memory, State};

/// Bytes of a copy.
const LEN: usize = 9_000;

/// What is behind a promise waits until it is kept, and nothing else does.
pub fn user_events(bench: &Bench<'_>) -> Outcome {
    for _ in 0..3 {
        let user_event = match bench.device.create_user_event() {
            Err(error) if error.status() == Status::Unsupported => {
                return Err(NotPassed::Skipped("the device makes no promises"));
            }
            said => bench.said("a promise", said)?,
        };
        let tried = wait_and_signal(bench, user_event);
        // Whatever was wrong: nothing is to wait for ever.
        let kept = bench.device.signal_event(user_event);
        tried?;
        bench.said("a promise is kept again", kept)?;
        bench.wait(user_event)?;
        bench.said("a promise that was kept is not released", bench.device.release(user_event))?;
        refused(
            "a promise that was released",
            bench.device.signal_event(user_event),
            Status::Handle,
        )?;
    }
    Ok(())
}

fn wait_and_signal(bench: &Bench<'_>, user_event: Event) -> Outcome {
    let device = bench.device;
    let streams = device.facts().streams;
    // Between other memory than this, submitting may wait for what is before.
    let memory = bench.places().pop().unwrap_or(Memory::Host);
    let from = &bench.buffer(memory, LEN)?;
    let buffers = (0..3).map(|_| RegisteredBuffer::new(bench)).collect::<Outcome<Vec<_>>>()?;
    let (beside, first, second) = (&buffers[0].0, &buffers[1].0, &buffers[2].0);
    let (content, before) = (from.bytes()?, (first.bytes()?, second.bytes()?));
    let copies = &mut [from.copy(first, Direction::Gather)?];
    if device.may_block_submit(copies) {
        return Err(NotPassed::Skipped("it can pin no memory, and would wait in the call"));
    }
    let behind = bench.begin(0, Some(user_event), copies)?;
    let last = bench.begin(0, None, &mut [from.copy(second, Direction::Gather)?])?;
    if streams > 1 {
        let passes = bench.begin(1, None, &mut [from.copy(beside, Direction::Gather)?])?;
        bench.finish(passes)?;
        need(beside.bytes()? == content, || "wrong bytes beside a promise".into())?;
    }
    for event in [user_event, behind, last] {
        let said = device.wait(event, bench.now_ns() + 100_000);
        refused("what is behind a promise that is open", said, Status::Timeout)?;
        let is_open = device.state(event).ok() == Some(State::Pending);
        need(is_open, || "an event behind a promise has come before it was kept".into())?;
        refused("an event that is open", device.release(event), Status::Busy)?;
    }
    let now = (first.bytes()?, second.bytes()?);
    need(now == before, || "a batch behind a promise has begun before it was kept".into())?;
    refused("an event that is no promise", device.signal_event(behind), Status::Handle)?;
    bench.said("a promise is kept", device.signal_event(user_event))?;
    bench.finish(last)?;
    bench.finish(behind)?;
    let all = first.bytes()? == content && second.bytes()? == content;
    need(all, || "wrong bytes behind a promise".into())
}

/// Host memory, and whether the device was told of it.
struct RegisteredBuffer<'a>(TestBuffer<'a>, bool);

impl<'a> RegisteredBuffer<'a> {
    fn new(bench: &'a Bench<'_>) -> Outcome<RegisteredBuffer<'a>> {
        let buffer = bench.buffer(Memory::Host, LEN)?;
        // SAFETY: the room stays until it is forgotten.
        let registered = unsafe { bench.device.register_host(buffer.pointer(), LEN as u64) };
        // To some all memory is the same.
        let is_registered =
            !registered.as_ref().is_err_and(|error| error.status() == Status::Unsupported);
        if is_registered {
            bench.said("host memory that the device is told of", registered)?;
        }
        Ok(RegisteredBuffer(buffer, is_registered))
    }
}

impl Drop for RegisteredBuffer<'_> {
    fn drop(&mut self) {
        if !self.1 {
            return;
        }
        // SAFETY: the check has waited for all copies, or nothing of the device is used any more.
        if let Err(error) = unsafe { self.0.device().unregister_host(self.0.pointer()) } {
            log::warn!("memory of a check is not forgotten: {error}");
        }
    }
}
