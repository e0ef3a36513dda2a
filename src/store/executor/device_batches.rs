//! Device copies that wait for an event of the engine's device (`kvt_transfer_t.after`). For each
//! such event, a stream is leased on which batches of copies are submitted after the event. One
//! thread submits and polls all of them.

use std::collections::VecDeque;

use crate::base::status::{Error, Result, Status};
use crate::device::{Copy, Event, MAX_COPIES, State, Stream};
use crate::store::executor::Tools;
use crate::store::executor::verify::{self, Held, Made, Summed};
use crate::store::state::StoreState;
use crate::store::state::work::CopyBatch;

/// Access to the state of the store under its lock.
pub trait Desk {
    /// Runs `act` on the state, with the lock held.
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState));
}

/// A batch that was taken from the state and has not completed.
struct InFlight {
    batch: CopyBatch,
    /// The engine's event that the copies wait for.
    after: Event,
    /// Pending events of the submissions of the batch, each with the number of checksums that the
    /// device computes.
    parts: VecDeque<(Event, usize)>,
    /// Planes of these checksums, in the same order.
    summed: VecDeque<Summed>,
    /// Results of comparing these checksums.
    held: Vec<Held>,
    outcome: Result<()>,
    /// Not submitted yet. It is submitted once `after` has completed, because the device would
    /// block this thread until then.
    is_parked: bool,
}

/// Executor of the copies of one store that wait for device events.
pub struct Crew {
    tools: Tools,
    /// Leased streams, each with the event that all copies on it wait for.
    streams: Vec<(Event, Stream)>,
    in_flight: Vec<InFlight>,
}

impl Crew {
    /// An executor without batches.
    pub fn new(tools: Tools) -> Crew {
        Crew { tools, streams: Vec::new(), in_flight: Vec::new() }
    }

    /// Whether no batch is in flight.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Reports completed batches to the state and submits new ones. Returns whether there were any.
    /// Never waits.
    ///
    /// # Safety
    /// The views of the transfers describe valid memory of the engine until the transfers have
    /// completed, and the store's memory is valid until their completion is reported here.
    pub unsafe fn turn(&mut self, desk: &mut dyn Desk) -> bool {
        // SAFETY: the caller's promise.
        let mut completed = unsafe { self.take_completed() };
        let mut pending_events = Vec::new();
        let mut has_worked = !completed.is_empty();
        desk.with(&mut |core| {
            for (batch, outcome, is_spent) in completed.drain(..) {
                core.done_behind(batch, &outcome, is_spent);
            }
            core.events_ahead(&mut pending_events);
        });
        let mut outcomes = Vec::new();
        let mut ready = Vec::new();
        for &(event, has_copies) in &pending_events {
            match self.tools.device.state(event) {
                Ok(State::Done) => outcomes.push((event, Ok(()))),
                Ok(State::Pending) if has_copies => {
                    ready.extend(self.stream_for(event).map(|stream| (event, stream)));
                }
                Ok(State::Pending) => {}
                Err(error) => outcomes.push((event, Err(error.status()))),
            }
        }
        let mut taken = Vec::new();
        desk.with(&mut |core| {
            outcomes.iter().for_each(|&(event, outcome)| core.event_ended(event, outcome));
            for &(event, stream) in &ready {
                while let Some(batch) = core.take_behind(event) {
                    taken.push((batch, event, stream));
                }
            }
        });
        has_worked |= !outcomes.is_empty() || !taken.is_empty();
        for (batch, event, stream) in taken {
            // SAFETY: the caller's promise.
            unsafe { self.begin(batch, event, stream) };
        }
        self.return_streams(&pending_events);
        has_worked
    }

    /// Waits until a batch may have completed, or for a deadline.
    pub fn rest(&self, deadline_ns: u64) {
        let next = |batch: &InFlight| match batch.is_parked {
            true => Some(batch.after),
            false => batch.parts.front().map(|(event, _)| *event),
        };
        if let Some(event) = self.in_flight.iter().find_map(next) {
            let _ = self.tools.device.wait(event, deadline_ns); // `turn` reads the outcome
        }
    }

    /// Waits until no batch accesses memory any more. Reports nothing.
    pub fn finish(&mut self) {
        for batch in self.in_flight.drain(..) {
            for (event, _) in batch.parts {
                let _ = self.tools.end(event, &mut []); // the outcome is not reported
            }
        }
    }

    /// Removes the completed batches. Returns each with its outcome, and whether its event failed.
    ///
    /// # Safety
    /// As [`Crew::turn`].
    unsafe fn take_completed(&mut self) -> Vec<(CopyBatch, Result<()>, bool)> {
        let mut completed = Vec::new();
        let mut at = 0;
        while at < self.in_flight.len() {
            if self.in_flight[at].is_parked {
                let after = self.in_flight[at].after;
                if matches!(self.tools.device.state(after), Ok(State::Pending)) {
                    at += 1;
                    continue;
                }
                let InFlight { batch, .. } = self.in_flight.remove(at);
                let stream = self.stream_for(after).unwrap_or(Stream(0));
                // SAFETY: the caller's promise.
                unsafe { self.begin(batch, after, stream) };
                continue;
            }
            // SAFETY: the caller's promise.
            if !unsafe { self.in_flight[at].has_completed(&self.tools) } {
                at += 1;
                continue;
            }
            let InFlight { mut batch, after, mut outcome, held, .. } = self.in_flight.remove(at);
            let damaged = verify::note(&mut batch, &held);
            let failure = self.event_error(after);
            if failure.is_none() && may_succeed_alone(&batch, &outcome) {
                // SAFETY: the caller's promise.
                unsafe { self.begin_alone(batch, after) };
                continue;
            }
            if failure.is_none() && outcome.is_ok() && !damaged.is_empty() {
                // The event has completed, so a repeated copy need not wait for it.
                let stream = self.streams.iter().find(|(of, _)| *of == after);
                let stream = stream.map_or(Stream(0), |(_, stream)| *stream);
                // SAFETY: the caller's promise.
                outcome = unsafe { verify::again(&self.tools, &mut batch, stream, damaged) };
            }
            let (outcome, is_spent) = match failure {
                Some(error) => (Err(error), true),
                None => (outcome, false),
            };
            completed.push((batch, outcome, is_spent));
        }
        completed
    }

    /// The error of an event, if it failed. An event that the engine has released counts as
    /// completed: a copy after it has completed.
    fn event_error(&self, event: Event) -> Option<Error> {
        self.tools.device.state(event).err().filter(|error| error.status() != Status::Handle)
    }

    /// The stream leased for the copies after an event.
    fn stream_for(&mut self, event: Event) -> Option<Stream> {
        if let Some((_, stream)) = self.streams.iter().find(|(of, _)| *of == event) {
            return Some(*stream);
        }
        // Without a free stream, the copies are submitted once the event has completed.
        let stream = self.tools.device.lease_stream().ok()?;
        self.streams.push((event, stream));
        Some(stream)
    }

    /// Returns the streams of events that no copy waits for any more.
    fn return_streams(&mut self, pending_events: &[(Event, bool)]) {
        let (in_flight, device) = (&self.in_flight, &self.tools.device);
        self.streams.retain(|(event, stream)| {
            let is_used = in_flight.iter().any(|batch| batch.after == *event)
                || pending_events.iter().any(|(other, has)| other == event && *has);
            if !is_used {
                device.return_stream(*stream);
            }
            is_used
        });
    }

    /// Submits the jobs of a batch one by one, because the job that was rejected or failed may
    /// belong to another caller than the others.
    ///
    /// # Safety
    /// As [`Crew::turn`].
    unsafe fn begin_alone(&mut self, batch: CopyBatch, after: Event) {
        let stream = self.stream_for(after).unwrap_or(Stream(0));
        for one in batch.split() {
            // SAFETY: the caller's promise.
            unsafe { self.begin(one, after, stream) };
        }
    }

    /// Submits a batch on the stream of its event, or parks it if that would block.
    ///
    /// # Safety
    /// As [`Crew::turn`].
    unsafe fn begin(&mut self, mut batch: CopyBatch, after: Event, stream: Stream) {
        let (mut parts, mut summed) = (VecDeque::new(), VecDeque::new());
        // A completed event may have been released already.
        let state = self.tools.device.state(after);
        let is_known = !state.as_ref().is_err_and(|error| error.status() == Status::Handle);
        let is_pending = matches!(state, Ok(State::Pending));
        let mut is_parked = false;
        let awaited = Some(after).filter(|_| is_known);
        let outcome = Made::of(&self.tools, &batch, None).and_then(|mut made| {
            is_parked = is_pending && self.tools.device.may_block_submit(&made.copies);
            if is_parked {
                return Ok(());
            }
            summed.extend(made.summed());
            // Copies into the device tier need not wait for the event, because the engine does not
            // use that memory. Copies that read their results follow on the same stream.
            // SAFETY: the caller's promise; the core keeps the memory of planes until the end is
            // reported.
            unsafe {
                self.submit(stream, None, &mut made.fills, &mut parts)?;
                self.submit(stream, awaited, &mut made.copies, &mut parts)
            }
        });
        if outcome.is_err() {
            batch.refused.extend(0..batch.jobs().count());
        }
        self.in_flight.push(InFlight {
            batch,
            after,
            parts,
            summed,
            held: Vec::new(),
            outcome,
            is_parked,
        });
    }

    /// # Safety
    /// As [`crate::device::Device::submit`].
    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
        parts: &mut VecDeque<(Event, usize)>,
    ) -> Result<()> {
        for part in copies.chunks_mut(MAX_COPIES) {
            // SAFETY: the caller's promise.
            let event = unsafe { self.tools.device.submit(stream, after, part)? };
            parts.push_back((event, part.iter().filter(|copy| copy.wants_sum).count()));
        }
        Ok(())
    }
}

/// Whether jobs of a failed batch may succeed if they are submitted one by one: not if the device
/// is lost, and not if there is only one job.
fn may_succeed_alone(batch: &CopyBatch, outcome: &Result<()>) -> bool {
    let is_device_usable = |error: &Error| error.status() != Status::Unavailable;
    batch.jobs().nth(1).is_some() && outcome.as_ref().is_err_and(is_device_usable)
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.finish();
        self.streams.drain(..).for_each(|(_, stream)| self.tools.device.return_stream(stream));
    }
}

impl InFlight {
    /// Whether all parts have completed. Records their outcome.
    ///
    /// # Safety
    /// As [`Crew::turn`].
    unsafe fn has_completed(&mut self, tools: &Tools) -> bool {
        while let Some(&(part, sums)) = self.parts.front() {
            if matches!(tools.device.state(part), Ok(State::Pending)) {
                return false;
            }
            self.parts.pop_front();
            let reported = match tools.device.state(part) {
                Ok(_) => verify::sums_of(&*tools.device, part, sums),
                Err(error) => Err(error),
            };
            let completed = tools.end(part, &mut []);
            let summed = self.summed.drain(..sums.min(self.summed.len()));
            match reported.and_then(|sums| completed.map(|()| sums)) {
                // SAFETY: the caller's promise: the batch has completed, which is not reported to
                // the core yet, so the planes are valid.
                Ok(sums) => unsafe {
                    self.held.extend(summed.zip(sums).map(|(one, sum)| one.hold(sum)));
                },
                Err(error) if self.outcome.is_ok() => self.outcome = Err(error),
                Err(_) => {}
            }
        }
        true
    }
}
