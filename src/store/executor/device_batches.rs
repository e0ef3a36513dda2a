//! Device copies that wait for device events. Batches are submitted behind the event on streams
//! that nothing else uses; one thread polls all of them.

use std::collections::VecDeque;

use crate::base::status::{Error, Result, Status};
use crate::device::{Copy, Event, MAX_COPIES, State, Stream};
use crate::store::executor::Tools;
use crate::store::executor::verify::{self, Held, Made, Summed};
use crate::store::state::StoreState;
use crate::store::state::work::CopyBatch;

/// Access to the state behind its lock.
pub trait StateAccess {
    /// Runs `act` on the state.
    fn with(&mut self, act: &mut dyn FnMut(&mut StoreState));
}

/// A submitted batch.
struct Begun {
    batch: CopyBatch,
    after: Event,
    /// Events of its parts that are pending, each with the number of checksums that the device
    /// computes.
    parts: VecDeque<(Event, usize)>,
    /// Planes of these checksums, in order.
    summed: VecDeque<Summed>,
    /// Results of their comparison.
    held: Vec<Held>,
    outcome: Result<()>,
    /// It is submitted when its event has completed; the device would block this thread until then.
    is_parked: bool,
}

/// Copies that depend on device events, of one store.
pub struct EventCopies {
    tools: Tools,
    /// Borrowed streams, each with the event that everything on it waits for.
    streams: Vec<(Event, Stream)>,
    begun: Vec<Begun>,
}

impl EventCopies {
    /// Without batches.
    pub fn new(tools: Tools) -> EventCopies {
        EventCopies { tools, streams: Vec::new(), begun: Vec::new() }
    }

    /// Whether no batch is in flight.
    pub fn is_idle(&self) -> bool {
        self.begun.is_empty()
    }

    /// Reports ended batches to the state and begins new ones. Returns whether there were any.
    /// Never waits.
    ///
    /// # Safety
    /// The engine's memory is what the views of the transfers say until they have ended,
    /// and the store's memory is valid until their end is reported here.
    pub unsafe fn advance(&mut self, state: &mut dyn StateAccess) -> bool {
        // SAFETY: the caller's promise.
        let mut ended = unsafe { self.ended() };
        let mut ahead = Vec::new();
        let mut did = !ended.is_empty();
        state.with(&mut |core| {
            for (batch, outcome, is_spent) in ended.drain(..) {
                core.done_after_event(batch, &outcome, is_spent);
            }
            core.events_ahead(&mut ahead);
        });
        let mut outcomes = Vec::new();
        let mut ready = Vec::new();
        for &(event, has_copies) in &ahead {
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
        state.with(&mut |core| {
            outcomes.iter().for_each(|&(event, outcome)| core.event_ended(event, outcome));
            for &(event, stream) in &ready {
                while let Some(batch) = core.take_after_event(event) {
                    taken.push((batch, event, stream));
                }
            }
        });
        did |= !outcomes.is_empty() || !taken.is_empty();
        for (batch, event, stream) in taken {
            // SAFETY: the caller's promise.
            unsafe { self.begin(batch, event, stream) };
        }
        self.return_streams(&ahead);
        did
    }

    /// Waits until the first batch has ended, or for a deadline.
    pub fn rest(&self, deadline_ns: u64) {
        let next = |one: &Begun| match one.is_parked {
            true => Some(one.after),
            false => one.parts.front().map(|(event, _)| *event),
        };
        if let Some(event) = self.begun.iter().find_map(next) {
            let _ = self.tools.device.wait(event, deadline_ns); // the outcome is queried again
        }
    }

    /// Waits until no batch touches memory any more, without reporting.
    pub fn finish(&mut self) {
        for one in self.begun.drain(..) {
            for (event, _) in one.parts {
                let _ = self.tools.end(event, &mut []); // no caller is left to notify
            }
        }
    }

    /// Ended batches with their outcome, and whether their event failed.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn ended(&mut self) -> Vec<(CopyBatch, Result<()>, bool)> {
        let mut ended = Vec::new();
        let mut at = 0;
        while at < self.begun.len() {
            if self.begun[at].is_parked {
                let after = self.begun[at].after;
                if matches!(self.tools.device.state(after), Ok(State::Pending)) {
                    at += 1;
                    continue;
                }
                let Begun { batch, .. } = self.begun.remove(at);
                let stream = self.stream_for(after).unwrap_or(Stream(0));
                // SAFETY: the caller's promise.
                unsafe { self.begin(batch, after, stream) };
                continue;
            }
            // SAFETY: the caller's promise.
            if !unsafe { self.begun[at].has_ended(&self.tools) } {
                at += 1;
                continue;
            }
            let Begun { mut batch, after, mut outcome, held, .. } = self.begun.remove(at);
            let bad = verify::note(&mut batch, &held);
            let failure = self.failed(after);
            if failure.is_none() && fails_together(&batch, &outcome) {
                // SAFETY: the caller's promise.
                unsafe { self.begin_alone(batch, after) };
                continue;
            }
            if failure.is_none() && outcome.is_ok() && !bad.is_empty() {
                // Its event has completed, so a repeated copy waits for nothing.
                let stream = self.streams.iter().find(|(of, _)| *of == after);
                let stream = stream.map_or(Stream(0), |(_, stream)| *stream);
                // SAFETY: the caller's promise.
                outcome = unsafe { verify::again(&self.tools, &mut batch, stream, bad) };
            }
            let (outcome, is_spent) = match failure {
                Some(error) => (Err(error), true),
                None => (outcome, false),
            };
            ended.push((batch, outcome, is_spent));
        }
        ended
    }

    /// The error of an event. An event that its owner has released has completed if a copy behind
    /// it has.
    fn failed(&self, event: Event) -> Option<Error> {
        self.tools.device.state(event).err().filter(|error| error.status() != Status::Handle)
    }

    /// The stream of an event, which nothing else uses.
    fn stream_for(&mut self, event: Event) -> Option<Stream> {
        if let Some((_, stream)) = self.streams.iter().find(|(of, _)| *of == event) {
            return Some(*stream);
        }
        // Without a stream its copies begin when it has completed.
        let stream = self.tools.device.lease_stream().ok()?;
        self.streams.push((event, stream));
        Some(stream)
    }

    /// Returns idle streams of events that no copy will wait for any more.
    fn return_streams(&mut self, ahead: &[(Event, bool)]) {
        let (begun, device) = (&self.begun, &self.tools.device);
        self.streams.retain(|(event, stream)| {
            let is_used = begun.iter().any(|one| one.after == *event)
                || ahead.iter().any(|(other, has)| other == event && *has);
            if !is_used {
                device.return_stream(*stream);
            }
            is_used
        });
    }

    /// Begins the jobs of a batch one by one, since one that is refused or fails may belong to
    /// another caller.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn begin_alone(&mut self, batch: CopyBatch, after: Event) {
        let stream = self.stream_for(after).unwrap_or(Stream(0));
        for one in batch.split() {
            // SAFETY: the caller's promise.
            unsafe { self.begin(one, after, stream) };
        }
    }

    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn begin(&mut self, mut batch: CopyBatch, after: Event, stream: Stream) {
        let (mut parts, mut summed) = (VecDeque::new(), VecDeque::new());
        // A completed event may have been released.
        let state = self.tools.device.state(after);
        let is_known = !state.as_ref().is_err_and(|error| error.status() == Status::Handle);
        let is_ahead = matches!(state, Ok(State::Pending));
        let mut is_parked = false;
        let behind = Some(after).filter(|_| is_known);
        let outcome = Made::of(&self.tools, &batch, None).and_then(|mut made| {
            is_parked = is_ahead && self.tools.device.may_block_submit(&made.copies);
            if is_parked {
                return Ok(());
            }
            summed.extend(made.summed());
            // They may be copied into the device tier at once: the engine has no part in that. What
            // reads them there is behind them on the stream.
            // SAFETY: the caller's promise; planes are pieces that are kept for this.
            unsafe {
                self.submit(stream, None, &mut made.fills, &mut parts)?;
                self.submit(stream, behind, &mut made.copies, &mut parts)
            }
        });
        if outcome.is_err() {
            batch.refused.extend(0..batch.jobs().count());
        }
        self.begun.push(Begun {
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

/// Whether jobs of a failed batch may succeed alone.
fn fails_together(batch: &CopyBatch, outcome: &Result<()>) -> bool {
    let is_notified = |error: &Error| error.status() != Status::Unavailable;
    batch.jobs().nth(1).is_some() && outcome.as_ref().is_err_and(is_notified)
}

impl Drop for EventCopies {
    fn drop(&mut self) {
        self.finish();
        self.streams.drain(..).for_each(|(_, stream)| self.tools.device.return_stream(stream));
    }
}

impl Begun {
    /// Whether all parts have ended; their outcome is noted.
    ///
    /// # Safety
    /// As [`EventCopies::advance`].
    unsafe fn has_ended(&mut self, tools: &Tools) -> bool {
        while let Some(&(part, sums)) = self.parts.front() {
            if matches!(tools.device.state(part), Ok(State::Pending)) {
                return false;
            }
            self.parts.pop_front();
            let reported = match tools.device.state(part) {
                Ok(_) => verify::sums_of(&*tools.device, part, sums),
                Err(error) => Err(error),
            };
            let ended = tools.end(part, &mut []);
            let summed = self.summed.drain(..sums.min(self.summed.len()));
            match reported.and_then(|sums| ended.map(|()| sums)) {
                // SAFETY: the caller's promise: the batch has ended, its core was not notified yet.
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
