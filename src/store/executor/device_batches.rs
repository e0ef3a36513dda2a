//! Device copies that wait for device events. Batches are submitted behind the event on streams
//! that nothing else uses; one thread polls all of them.

use crate::base::checksum::checksum;
use crate::base::status::{Error, Result, Status};
use crate::device::{Copy, Device, Direction, Event, MAX_COPIES, Memory, State, Stream};
use crate::fail;
use crate::store::executor::{Failed, Tools, copy_of};
use crate::store::state::StoreState;
use crate::store::state::work::CopyBatch;
use std::collections::VecDeque;

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
            let bad = note(&mut batch, &held);
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
                outcome = unsafe { again(&self.tools, &mut batch, stream, bad) };
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
                Ok(_) => sums_of(&*tools.device, part, sums),
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

// ---------- verification
//
// Verification of device copies. A device may compute checksums of what it copies; they are
// compared with checksums of the same bytes in host memory, so that a byte that changes on the
// link is neither stored nor delivered.

/// Job and plane of a copy, and the expected checksum if it is known.
#[derive(Clone, Copy)]
struct Of {
    job: usize,
    is_v: bool,
    sum: Option<u64>,
}

/// Executes copies. If the device computes checksums, damaged copies are repeated once, and jobs
/// that are damaged again are noted. A batch that fails is executed job by job, since its jobs may
/// belong to different callers; each outcome is noted.
///
/// # Safety
/// As [`Tools::work`].
pub(super) unsafe fn copy(tools: &Tools, batch: &mut CopyBatch, stream: Stream) -> Result<()> {
    // SAFETY: the caller's promise.
    let Err(failed) = (unsafe { copy_jobs(tools, batch, stream, None) }) else { return Ok(()) };
    let jobs = batch.jobs().count();
    if failed.is_lost() {
        return Err(failed.error);
    }
    if jobs <= 1 {
        batch.refused.extend(failed.is_refused.then_some(0));
        return Err(failed.error);
    }
    log::warn!("a batch of {jobs} copies failed and is retried one by one: {}", failed.error);
    let mut alone = Vec::new();
    alone.try_reserve_exact(jobs).map_err(|_| Status::NoMem)?;
    for at in 0..jobs {
        // SAFETY: the caller's promise.
        let copied = unsafe { copy_jobs(tools, batch, stream, Some(&[at])) };
        alone.push(match copied {
            Err(failed) if failed.is_lost() => return Err(failed.error),
            Err(failed) => {
                batch.refused.extend(failed.is_refused.then_some(at));
                Err(failed.error)
            }
            Ok(()) => Ok(()),
        });
    }
    batch.alone = alone;
    Ok(())
}

/// Copies all jobs of a batch, or some, and repeats damaged copies once.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_jobs(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<(), Failed> {
    // SAFETY: the caller's promise.
    unsafe {
        let bad = copy_some(tools, batch, stream, only)?;
        again(tools, batch, stream, bad).map_err(Failed::from)
    }
}

/// Repeats the copies that arrived damaged, once.
///
/// # Safety
/// As [`Tools::work`].
pub(super) unsafe fn again(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    mut bad: Vec<usize>,
) -> Result<()> {
    if bad.is_empty() {
        return Ok(());
    }
    let mut seen = bad.len() as u64;
    log::warn!("{seen} copies over a device's bus arrived damaged and are repeated");
    sort(&mut bad);
    // SAFETY: the caller's promise.
    let worse = unsafe { copy_some(tools, batch, stream, Some(&bad)) };
    let mut worse = worse.map_err(|failed| failed.error)?;
    seen += worse.len() as u64;
    if !worse.is_empty() {
        log::error!(
            "{} copies over a device's bus arrived damaged twice; their transfers fail",
            worse.len()
        );
    }
    sort(&mut worse);
    batch.damage.seen += seen;
    batch.damage.jobs.append(&mut worse);
    Ok(())
}

fn sort(jobs: &mut Vec<usize>) {
    jobs.sort_unstable();
    jobs.dedup();
}

/// The copies of a batch.
#[derive(Default)]
pub(super) struct Made<'a> {
    /// Copies into the device tier.
    pub fills: Vec<Copy<'static>>,
    /// Copies that may read what those wrote.
    pub copies: Vec<Copy<'a>>,
    of_fills: Vec<Of>,
    of_copies: Vec<Of>,
}

/// A plane whose checksum the device computes.
pub(super) struct Summed {
    of: Of,
    plane: u64,
    bytes: u64,
}

/// Result for one plane.
pub(super) struct Held {
    of: Of,
    right: u64,
    is_damaged: bool,
}

impl<'a> Made<'a> {
    /// The copies of all jobs of a batch, or of some.
    pub fn of(tools: &Tools, batch: &'a CopyBatch, only: Option<&[usize]>) -> Result<Made<'a>> {
        let facts = tools.device.facts();
        let verifies = facts.sums && facts.asynchronous;
        let is_due = |job| only.is_none_or(|jobs| jobs.binary_search(&job).is_ok());
        let mut made = Made::default();
        made.copies.reserve(if only.is_none() { batch.items.len() } else { 0 });
        for item in batch.items.iter().filter(|item| is_due(item.job)) {
            let mut copy = copy_of(batch, item)?;
            copy.wants_sum = verifies && (crosses(&copy) || item.sum.is_some());
            made.copies.push(copy);
            made.of_copies.push(Of { job: item.job, is_v: item.is_v, sum: item.sum });
        }
        for fill in batch.fills.iter().filter(|fill| is_due(fill.job)) {
            // A checksum is of a plane. Without checksums a cell is one copy.
            let k_bytes = if verifies { fill.k_bytes } else { fill.bytes };
            let parts = [(false, 0, k_bytes), (true, k_bytes, fill.bytes - k_bytes)];
            for (is_v, at, bytes) in parts.into_iter().filter(|(.., bytes)| *bytes > 0) {
                let (host, to) = ((fill.host + at as usize) as *mut u8, fill.device + at);
                let copy = Copy::bytes(host, to, bytes, Direction::Scatter, Memory::Device)?;
                made.fills.push(Copy { wants_sum: verifies && crosses(&copy), ..copy });
                made.of_fills.push(Of { job: fill.job, is_v, sum: None });
            }
        }
        Ok(made)
    }

    /// Planes whose checksum the device computes, in the order of submission.
    pub fn summed(&self) -> Vec<Summed> {
        let fills = self.fills.iter().zip(&self.of_fills);
        let all = fills.chain(self.copies.iter().zip(&self.of_copies));
        let count = all.filter(|(copy, _)| copy.wants_sum);
        count.map(|(copy, of)| Summed::of(copy, *of)).collect()
    }

    fn sums(&self) -> impl Iterator<Item = u64> {
        self.fills.iter().chain(&self.copies).filter(|copy| copy.wants_sum).map(|copy| copy.sum)
    }
}

impl Summed {
    fn of(copy: &Copy<'_>, of: Of) -> Summed {
        let plane = copy.plane.expose_provenance() as u64;
        Summed { of, plane, bytes: copy.tensor.bytes() }
    }

    /// Compares a reported checksum with the known one, or with the plane in host memory.
    ///
    /// # Safety
    /// Unless its checksum is known, the plane is in host memory and does not change.
    pub unsafe fn hold(&self, reported: u64) -> Held {
        let right = self.of.sum.unwrap_or_else(|| {
            let plane = std::ptr::with_exposed_provenance(self.plane as usize);
            // SAFETY: the caller's promise: a plane is as long as its tensor's tokens.
            let plane: &[u8] = unsafe { std::slice::from_raw_parts(plane, self.bytes as usize) };
            checksum(plane)
        });
        Held { of: self.of, right, is_damaged: right != reported }
    }
}

/// Copies all jobs of a batch, or some. Returns the damaged ones, once for each damaged copy.
///
/// # Safety
/// As [`Tools::work`].
unsafe fn copy_some(
    tools: &Tools,
    batch: &mut CopyBatch,
    stream: Stream,
    only: Option<&[usize]>,
) -> std::result::Result<Vec<usize>, Failed> {
    let mut made = Made::of(tools, batch, only).map_err(Failed::refused)?;
    // SAFETY: the caller's promise; planes are pieces that are kept for this.
    unsafe { tools.submit_all(stream, &mut made.fills, &mut made.copies)? };
    let summed = made.summed();
    // SAFETY: as above; nothing is in flight any more.
    let hold = |(one, sum): (&Summed, u64)| unsafe { one.hold(sum) };
    let held: Vec<Held> = summed.iter().zip(made.sums()).map(hold).collect();
    drop(made);
    Ok(note(batch, &held))
}

/// Copies a tensor in device memory to a plane in host memory. Returns whether it arrived
/// undamaged, as far as the device reports.
///
/// # Safety
/// As [`Device::submit`].
pub(super) unsafe fn copy_one(
    tools: &Tools,
    copy: Copy<'_>,
    stream: Stream,
) -> std::result::Result<bool, Failed> {
    let facts = tools.device.facts();
    let mut copies = [Copy { wants_sum: facts.sums && facts.asynchronous, ..copy }];
    // SAFETY: the caller's promise; nothing is in flight any more then.
    unsafe {
        tools.submit_parts(stream, None, &mut copies)?;
        let [copy] = &copies;
        let of = Of { job: 0, is_v: false, sum: None };
        Ok(!copy.wants_sum || !Summed::of(copy, of).hold(copy.sum).is_damaged)
    }
}

/// Records the checksums of planes that get a replica. Returns the damaged jobs, once for each
/// damaged copy.
pub(super) fn note(batch: &mut CopyBatch, held: &[Held]) -> Vec<usize> {
    if !held.is_empty() && batch.rescued.is_some() {
        let jobs = batch.jobs().count();
        batch.sums.resize(jobs, [0; 2]);
        for one in held {
            batch.sums[one.of.job][usize::from(one.of.is_v)] = one.right;
        }
    }
    held.iter().filter(|one| one.is_damaged).map(|one| one.of.job).collect()
}

/// Whether a copy crosses the bus, between a plane in host memory and a tensor in device memory.
fn crosses(copy: &Copy<'_>) -> bool {
    copy.memory == Memory::Device && copy.plane_memory == Memory::Host
}

/// Takes the checksums of an ended batch into its copies.
pub(super) fn take_sums(device: &dyn Device, event: Event, copies: &mut [Copy<'_>]) -> Result<()> {
    let count = copies.iter().filter(|copy| copy.wants_sum).count();
    if count == 0 {
        return Ok(());
    }
    let sums = sums_of(device, event, count)?;
    let wants = copies.iter_mut().filter(|copy| copy.wants_sum);
    wants.zip(sums).for_each(|(copy, sum)| copy.sum = sum);
    Ok(())
}

/// `count` checksums of an ended batch.
pub(super) fn sums_of(device: &dyn Device, event: Event, count: usize) -> Result<Vec<u64>> {
    let mut sums = Vec::new();
    sums.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
    sums.resize(count, 0);
    let reported = if count == 0 { 0 } else { device.sums(event, &mut sums)? };
    if reported != count {
        fail!(Io, "the device reported {reported} of {count} checksums");
    }
    Ok(sums)
}
