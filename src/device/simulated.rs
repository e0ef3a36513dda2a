//! A simulated device for tests and dry runs: it has bandwidth and latency on a clock that tests
//! can move, and no threads.
//!
//! It exposes callers that do not wait. From the moment a batch may begin, its targets hold
//! *poison*; they hold the result from its event on. The seed chooses when a source is read.
//! Batches on different streams overtake each other. One seed and one order of calls always give
//! the same run.

mod copy;
mod opts;
mod streams;
mod user_events;
mod window;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::base::clock::Clock;
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Guard, Mutex, Weak};
use crate::device::pool::Pool;
use crate::device::simulated::copy::LoweredCopy;
use crate::device::slots::Slots;
use crate::device::window::Window;
use crate::device::{
    Copy, Device, DeviceMemory, Event, Facts, MAX_LEASED_STREAMS, MAX_STREAMS, Memory, State,
    Stream, check,
};
use crate::fail;
pub use opts::SimulatedOpts;

/// Content of targets until their event is done.
pub const POISON: u8 = 0xDB;
/// Limit: unreleased events.
pub const MAX_EVENTS: usize = 65_536;
/// Unknown time.
const NEVER: u64 = u64::MAX;
/// Longest sleep on a real clock before the state is checked again.
const LONGEST_SLEEP_NS: u64 = 1_000_000_000;

struct Batch {
    number: u64,
    after: Option<Event>,
    stream: usize,
    /// Duration.
    length_ns: u64,
    /// [`NEVER`] while the start is unknown.
    finish_ns: u64,
    /// Failure that the batch will end with.
    doom: Option<Status>,
    /// The batch writes its targets although it fails; a batch that fails because of `after` does
    /// not.
    spoils: bool,
    loses: bool,
    copies: Vec<LoweredCopy>,
}

enum Phase {
    Pending(Batch),
    /// Outcome, and the requested checksums.
    Ended(std::result::Result<(), Status>, Vec<u64>),
}

#[derive(Clone, Copy)]
enum Step {
    Start,
    Read(usize),
    Finish,
}

struct Inner {
    random: u64,
    batches: u64,
    /// Copies over the bus so far.
    crossed: u64,
    lost: bool,
    closed: bool,
    /// When each stream becomes idle.
    free_ns: Vec<u64>,
    /// Leased streams among those after the device's own.
    leased: [bool; MAX_LEASED_STREAMS],
    /// Batches of each stream whose start is unknown: they, or earlier ones, wait for a user event.
    parked: Vec<VecDeque<Event>>,
    /// User events, signalled or not.
    user_events: BTreeSet<u64>,
    /// Next steps, by time, then by the order of planning.
    agenda: BTreeMap<(u64, u64), (Event, Step)>,
    planned: u64,
    known: Slots<Phase>,
    pending: usize,
    ended: VecDeque<Event>,
}

/// A simulated device.
pub struct Simulated {
    opts: SimulatedOpts,
    clock: Clock,
    inner: Mutex<Inner>,
    changed: Condvar,
    pool: Pool,
    windows: Mutex<Vec<Weak<window::Addresses>>>,
}

impl Simulated {
    /// A device on a clock.
    pub fn new(clock: Clock, opts: SimulatedOpts) -> Result<Simulated> {
        if opts.streams == 0 || opts.streams > MAX_STREAMS {
            fail!(Invalid, "{} streams: 1 to {MAX_STREAMS} are accepted", opts.streams);
        }
        let inner = Inner {
            random: opts.seed,
            batches: 0,
            crossed: 0,
            lost: false,
            closed: false,
            free_ns: vec![0; opts.streams as usize + MAX_LEASED_STREAMS],
            leased: [false; MAX_LEASED_STREAMS],
            parked: (0..opts.streams as usize + MAX_LEASED_STREAMS)
                .map(|_| VecDeque::new())
                .collect(),
            user_events: BTreeSet::new(),
            agenda: BTreeMap::new(),
            planned: 0,
            known: Slots::new(MAX_EVENTS),
            pending: 0,
            ended: VecDeque::new(),
        };
        let pool = Pool::new(Memory::Device, opts.memory_bytes, Some(POISON));
        let (inner, windows) = (Mutex::new(inner), Mutex::new(Vec::new()));
        Ok(Simulated { opts, clock, inner, changed: Condvar::new(), pool, windows })
    }

    /// Time of the next step; none while nothing is in flight.
    pub fn next_ns(&self) -> Option<u64> {
        let inner = self.now();
        inner.agenda.first_key_value().map(|((time, _), _)| *time)
    }

    /// Simulates loss of the device: work in flight fails, and so do later calls.
    pub fn lose(&self) {
        self.now().lose();
        self.changed.notify_all();
    }

    /// Whether the device is lost.
    pub fn is_lost(&self) -> bool {
        self.now().lost
    }

    /// Allocated bytes.
    pub fn allocated_bytes(&self) -> u64 {
        self.pool.allocated_bytes()
    }

    /// The state, after all steps that are due.
    fn now(&self) -> Guard<'_, Inner> {
        let mut inner = self.inner.lock();
        inner.run_until(self.clock.now_ns());
        inner
    }

    /// Sleeps until `until_ns` or the deadline; false if the deadline has passed.
    fn sleep(&self, inner: &mut Guard<'_, Inner>, until_ns: u64, deadline_ns: u64) -> bool {
        let now = self.clock.now_ns();
        if deadline_ns != 0 && now >= deadline_ns {
            return false;
        }
        let until = if deadline_ns == 0 { until_ns } else { until_ns.min(deadline_ns) };
        let left = until.saturating_sub(now);
        if self.clock.is_manual() {
            // No other thread advances the clock while this thread waits.
            self.clock.advance(left);
        } else {
            self.changed.wait_for(inner, left.clamp(1, LONGEST_SLEEP_NS));
        }
        inner.run_until(self.clock.now_ns());
        true
    }

    fn duration_ns(&self, inner: &mut Inner, bytes: u64) -> u64 {
        let moving = match self.opts.bytes_per_second {
            0 => 0,
            rate => u128::from(bytes) * 1_000_000_000 / u128::from(rate),
        };
        let least = self.opts.latency_ns.saturating_add(moving.min(u128::from(u64::MAX)) as u64);
        let most_more = (least / 100).saturating_mul(self.opts.jitter_percent.min(10_000));
        least.saturating_add(inner.up_to(most_more))
    }
}

impl Inner {
    /// Next number of the seed's sequence (splitmix64).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn up_to(&mut self, most: u64) -> u64 {
        ((u128::from(self.random()) * (u128::from(most) + 1)) >> 64) as u64
    }

    fn plan(&mut self, time: u64, event: Event, step: Step) {
        self.planned += 1;
        self.agenda.insert((time, self.planned), (event, step));
    }

    /// Chooses the copies that will be damaged.
    fn spoil(&mut self, opts: &SimulatedOpts, copies: &mut [LoweredCopy]) {
        for copy in copies.iter_mut().filter(|copy| copy.crosses) {
            self.crossed += 1;
            let by_chance = opts.damage_permille > 0 && self.up_to(999) < opts.damage_permille;
            copy.spoils = by_chance || opts.damage_at.contains(&self.crossed);
        }
    }

    fn run_until(&mut self, now: u64) {
        while let Some(next) = self.agenda.first_entry().filter(|entry| entry.key().0 <= now) {
            let (event, step) = next.remove();
            let Ok(Phase::Pending(batch)) = self.known.get_mut(event) else { continue };
            match step {
                Step::Start if batch.touches() => batch.copies.iter().for_each(LoweredCopy::write),
                Step::Read(copy) if batch.touches() => batch.copies[copy].read(),
                Step::Finish => self.finish(event),
                _ => {}
            }
        }
    }

    fn finish(&mut self, event: Event) {
        let Ok(Phase::Pending(batch)) = self.known.get(event) else { return };
        if batch.loses {
            return self.lose();
        }
        if batch.doom.is_none() {
            batch.copies.iter().for_each(LoweredCopy::write);
        }
        let outcome = batch.doom.map_or(Ok(()), Err);
        self.end(event, outcome);
        // Batches that wait for it have no input.
        let Err(status) = outcome else { return };
        for (_, phase) in self.known.iter_mut() {
            if let Phase::Pending(batch) = phase
                && batch.after == Some(event)
            {
                (batch.doom, batch.spoils) = (Some(status), false);
            }
        }
    }

    /// Fails while a batch in flight uses a range of device memory.
    fn check_unused(&mut self, address: u64, bytes: u64) -> Result<()> {
        for (_, phase) in self.known.iter_mut() {
            if let Phase::Pending(batch) = phase
                && batch.uses(address, bytes)
            {
                fail!(Busy, "batch {} uses the memory at {address:#x}", batch.number);
            }
        }
        Ok(())
    }

    fn end(&mut self, event: Event, outcome: std::result::Result<(), Status>) {
        if let Ok(phase) = self.known.get_mut(event) {
            let sums = match phase {
                Phase::Pending(batch) if outcome.is_ok() => {
                    batch.copies.iter().filter_map(LoweredCopy::sum).collect()
                }
                _ => Vec::new(),
            };
            *phase = Phase::Ended(outcome, sums);
            self.pending -= 1;
            self.ended.push_back(event);
        }
    }

    fn lose(&mut self) {
        self.lost = true;
        self.agenda.clear();
        self.parked.iter_mut().for_each(VecDeque::clear);
        let number = |(event, phase): (Event, &mut Phase)| match phase {
            Phase::Pending(batch) => Some((batch.number, event)),
            Phase::Ended(..) => None,
        };
        let mut pending: Vec<_> = self.known.iter_mut().filter_map(number).collect();
        pending.sort_unstable_by_key(|(number, _)| *number);
        pending.into_iter().for_each(|(_, event)| self.end(event, Err(Status::Unavailable)));
    }
}

impl Batch {
    /// Whether one of its copies accesses a range of device memory.
    fn uses(&self, address: u64, bytes: u64) -> bool {
        self.copies.iter().any(|copy| copy.uses(address, bytes))
    }

    fn touches(&self) -> bool {
        self.doom.is_none() || self.spoils
    }
}

impl Device for Simulated {
    fn facts(&self) -> Facts {
        Facts {
            name: "simulated",
            asynchronous: true,
            sums: self.opts.sums,
            reaches_device: true,
            wants_pinned: false,
            streams: self.opts.streams,
            kernels: 0,
        }
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        let mut facts = self.facts();
        if self.inner.lock().is_leased(stream.0.wrapping_sub(self.opts.streams)) {
            facts.streams = stream.0 + 1;
        }
        check(&facts, stream, copies)?;
        let mut lowered: Vec<LoweredCopy> =
            copies.iter().map(|copy| LoweredCopy::lower(copy, POISON)).collect::<Result<_>>()?;
        self.check_windows(&lowered)?;
        let mut inner = self.now();
        let now = self.clock.now_ns();
        if inner.lost || inner.closed {
            let status = if inner.lost { Status::Unavailable } else { Status::Closed };
            return Err(status.into());
        }
        if let Some(event) = after
            && let Phase::Ended(Err(status), _) = inner.known.get(event)?
        {
            return Err(Error::from(*status));
        }
        inner.batches += 1;
        inner.spoil(&self.opts, &mut lowered);
        let bytes = lowered.iter().map(|copy| copy.bytes.len() as u64).sum();
        let length_ns = if lowered.is_empty() { 0 } else { self.duration_ns(&mut inner, bytes) };
        let number = inner.batches;
        let fails = self.opts.fail_at.contains(&number);
        let event = inner.known.insert(Phase::Pending(Batch {
            number,
            after,
            stream: stream.0 as usize,
            length_ns,
            finish_ns: NEVER,
            doom: fails.then_some(Status::Io),
            spoils: fails,
            loses: self.opts.lost_at == number,
            copies: lowered,
        }))?;
        inner.pending += 1;
        if !inner.parked[stream.0 as usize].is_empty() || !inner.begin(event, now) {
            inner.parked[stream.0 as usize].push_back(event);
        }
        inner.run_until(now);
        Ok(event)
    }

    fn state(&self, event: Event) -> Result<State> {
        match self.now().known.get(event)? {
            Phase::Pending(_) => Ok(State::Pending),
            Phase::Ended(Err(status), _) => Err(Error::from(*status)),
            Phase::Ended(Ok(()), _) => Ok(State::Done),
        }
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        let mut inner = self.now();
        loop {
            let until = match inner.known.get(event)? {
                // Work behind a pending user event has no known time; signalling wakes this wait.
                Phase::Pending(batch) if batch.finish_ns == NEVER => {
                    inner.next_or(LONGEST_SLEEP_NS, self.clock.now_ns())
                }
                Phase::Pending(batch) => batch.finish_ns,
                Phase::Ended(Err(status), _) => return Err(Error::from(*status)),
                Phase::Ended(Ok(()), _) => return Ok(()),
            };
            if !self.sleep(&mut inner, until, deadline_ns) {
                return Err(Status::Timeout.into());
            }
        }
    }

    fn sums(&self, event: Event, sums: &mut [u64]) -> Result<usize> {
        if !self.opts.sums {
            fail!(Unsupported, "the device computes no checksums (sums=false)");
        }
        match self.now().known.get(event)? {
            Phase::Pending(_) => Err(Status::Busy.into()),
            Phase::Ended(Err(status), _) => Err(Error::from(*status)),
            Phase::Ended(Ok(()), all) => {
                sums.iter_mut().zip(all).for_each(|(to, sum)| *to = *sum);
                Ok(sums.len().min(all.len()))
            }
        }
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        let mut inner = self.now();
        let count = ended.len().min(inner.ended.len());
        for (slot, event) in ended.iter_mut().zip(inner.ended.drain(..count)) {
            *slot = event;
        }
        count
    }

    fn release(&self, event: Event) -> Result<()> {
        let mut inner = self.now();
        if let Phase::Pending(_) = inner.known.get(event)? {
            return Err(Status::Busy.into());
        }
        inner.ended.retain(|ended| *ended != event);
        inner.user_events.remove(&event.0);
        inner.known.remove(event).map(|_| ())
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        if self.is_lost() {
            return Err(Status::Unavailable.into());
        }
        self.pool.allocate(bytes)
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        self.now().check_unused(memory.address, memory.bytes)?;
        self.pool.free(memory)
    }

    fn create_user_event(&self) -> Result<Event> {
        self.new_user_event()
    }

    fn signal_event(&self, event: Event) -> Result<()> {
        self.signal_user_event(event)
    }

    fn signal_all_events(&self) {
        self.signal_open_events(&mut self.now());
    }

    fn lease_stream(&self) -> Result<Stream> {
        self.inner.lock().lease_stream(self.opts.streams)
    }

    fn return_stream(&self, stream: Stream) {
        self.inner.lock().return_stream(stream.0.wrapping_sub(self.opts.streams));
    }

    fn window_granularity(&self) -> Result<u64> {
        self.granularity()
    }

    fn window(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        Simulated::reserve(self, bytes)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.pool.free_bytes()
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        let mut inner = self.now();
        inner.closed = true;
        self.signal_open_events(&mut inner);
        while inner.pending > 0 {
            let until = inner.agenda.first_key_value().map_or(0, |((time, _), _)| *time);
            if !self.sleep(&mut inner, until, deadline_ns) {
                fail!(Busy, "{} batches are still in flight", inner.pending);
            }
        }
        Ok(())
    }
}
