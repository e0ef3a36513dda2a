//! Checks of user events.

use crate::base::status::Status;
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::{NotPassed, Outcome, need, refused};
use crate::device::{Direction, Event, Memory, State};

/// Bytes of a copy.
const LEN: usize = 9_000;

/// Work behind a user event waits until it is signalled; other work does not.
pub fn user_events(bench: &Bench<'_>) -> Outcome {
    for _ in 0..3 {
        let user_event = match bench.device.create_user_event() {
            Err(error) if error.status() == Status::Unsupported => {
                return Err(NotPassed::Skipped("the device has no user events"));
            }
            result => bench.require_ok("creating a user event", result)?,
        };
        let tried = wait_and_signal(bench, user_event);
        // Even after a failure: nothing may wait forever.
        let signalled = bench.device.signal_event(user_event);
        tried?;
        bench.require_ok("signalling a user event again", signalled)?;
        bench.wait(user_event)?;
        bench.require_ok("releasing a signalled user event", bench.device.release(user_event))?;
        refused(
            "signalling a released user event",
            bench.device.signal_event(user_event),
            Status::Handle,
        )?;
    }
    Ok(())
}

fn wait_and_signal(bench: &Bench<'_>, user_event: Event) -> Outcome {
    let device = bench.device;
    let streams = device.facts().streams;
    // Copies in other address spaces may block `submit` until earlier work has completed.
    let memory = bench.places().pop().unwrap_or(Memory::Host);
    let from = &bench.buffer(memory, LEN)?;
    let buffers = (0..3).map(|_| RegisteredBuffer::new(bench)).collect::<Outcome<Vec<_>>>()?;
    let (beside, first, second) = (&buffers[0].0, &buffers[1].0, &buffers[2].0);
    let (content, before) = (from.bytes()?, (first.bytes()?, second.bytes()?));
    let copies = &mut [from.copy(first, Direction::Gather)?];
    if device.may_block_submit(copies) {
        return Err(NotPassed::Skipped("it cannot pin memory: submit would block"));
    }
    let behind = bench.begin(0, Some(user_event), copies)?;
    let last = bench.begin(0, None, &mut [from.copy(second, Direction::Gather)?])?;
    if streams > 1 {
        let passes = bench.begin(1, None, &mut [from.copy(beside, Direction::Gather)?])?;
        bench.finish(passes)?;
        need(beside.bytes()? == content, || {
            "wrong bytes on another stream than a pending user event".into()
        })?;
    }
    for event in [user_event, behind, last] {
        let result = device.wait(event, bench.now_ns() + 100_000);
        refused("waiting for work behind a pending user event", result, Status::Timeout)?;
        let is_open = device.state(event).ok() == Some(State::Pending);
        need(is_open, || "an event completed before the user event it waits for".into())?;
        refused("releasing a pending event", device.release(event), Status::Busy)?;
    }
    let now = (first.bytes()?, second.bytes()?);
    need(now == before, || "a batch began before the user event it waits for".into())?;
    refused("signalling an ordinary event", device.signal_event(behind), Status::Handle)?;
    bench.require_ok("signalling a user event", device.signal_event(user_event))?;
    bench.finish(last)?;
    bench.finish(behind)?;
    let all = first.bytes()? == content && second.bytes()? == content;
    need(all, || "wrong bytes behind a user event".into())
}

/// Host memory, and whether it is registered.
struct RegisteredBuffer<'a>(TestBuffer<'a>, bool);

impl<'a> RegisteredBuffer<'a> {
    fn new(bench: &'a Bench<'_>) -> Outcome<RegisteredBuffer<'a>> {
        let buffer = bench.buffer(Memory::Host, LEN)?;
        // SAFETY: the buffer lives until it is unregistered.
        let registered = unsafe { bench.device.register_host(buffer.pointer(), LEN as u64) };
        // Some devices do not distinguish registered memory.
        let is_registered =
            !registered.as_ref().is_err_and(|error| error.status() == Status::Unsupported);
        if is_registered {
            bench.require_ok("registering host memory", registered)?;
        }
        Ok(RegisteredBuffer(buffer, is_registered))
    }
}

impl Drop for RegisteredBuffer<'_> {
    fn drop(&mut self) {
        if !self.1 {
            return;
        }
        // SAFETY: the check has waited for all copies, or the device is not used any more.
        if let Err(error) = unsafe { self.0.device().unregister_host(self.0.pointer()) } {
            log::warn!("unregistering memory of a check failed: {error}");
        }
    }
}
