//! Fixture of the conformance checks: the device under test, random numbers, and test buffers in
//! every address space of the device.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use crate::base::clock::Clock;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Condvar, Mutex};
use crate::device::conformance::{ConformanceOpts, NotPassed, Outcome, need};
use crate::device::{Copy, Device, DeviceMemory, Direction, Event, Memory, Stream};
use crate::meta::view::View;

/// Default time limit of an event.
const DEFAULT_TIMEOUT_NS: u64 = 30_000_000_000;
/// Default number of random trials.
const DEFAULT_ROUNDS: u32 = 40;
/// Skip reason of devices that cannot allocate memory.
pub const NO_MEMORY: NotPassed = NotPassed::Skipped("the device cannot allocate memory");

/// Random numbers from a seed (splitmix64).
pub struct Chance(Cell<u64>);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(Cell::new(seed))
    }

    pub fn next(&self) -> u64 {
        let state = self.0.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.0.set(state);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub fn below(&self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// A random element.
    pub fn of<T: std::marker::Copy>(&self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// Random bytes.
    pub fn noise(&self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.next().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}

/// The device under test, with the events and the memory of the running check.
pub struct Bench<'a> {
    pub device: &'a Arc<dyn Device>,
    pub chance: Chance,
    pub rounds: u64,
    clock: Clock,
    patience_ns: u64,
    /// Whether the device can allocate memory.
    can_allocate: bool,
    /// Work did not complete in time. Memory that it may still access is leaked, not freed.
    stuck: Cell<bool>,
    /// Unreleased events. A check that fails does not release its events.
    open: RefCell<Vec<Event>>,
    /// Memory of dropped test buffers, to be freed by [`Bench::settle`].
    dropped: RefCell<Vec<Backing>>,
    /// Freed host memory that stays mapped, so that a device that writes to it too late fails a
    /// later check instead of crashing the process.
    quarantine: Arc<Mutex<VecDeque<Buffer>>>,
}

/// Guard bytes before and after host memory.
const GUARD_BYTES: usize = 4096;
/// Most buffers in quarantine.
const MAX_QUARANTINED: usize = 512;

impl<'a> Bench<'a> {
    pub fn new(device: &'a Arc<dyn Device>, opts: &ConformanceOpts) -> Bench<'a> {
        let or = |value: u64, default| if value == 0 { default } else { value };
        Bench {
            device,
            chance: Chance::new(opts.seed),
            rounds: or(opts.rounds.into(), DEFAULT_ROUNDS.into()),
            clock: opts.clock.clone(),
            patience_ns: or(opts.patience_ns, DEFAULT_TIMEOUT_NS),
            can_allocate: can_allocate(device),
            stuck: Cell::new(false),
            open: RefCell::new(Vec::new()),
            dropped: RefCell::new(Vec::new()),
            quarantine: Arc::new(Mutex::new(VecDeque::new())),
        }
    }

    /// The device, options and quarantine for a bench of another thread that tests the same device.
    pub fn share(&self) -> (Arc<dyn Device>, ConformanceOpts, Arc<Mutex<VecDeque<Buffer>>>) {
        let opts = ConformanceOpts {
            seed: self.chance.next(),
            rounds: self.rounds as u32,
            clock: self.clock.clone(),
            patience_ns: self.patience_ns,
            closes: false,
        };
        (self.device.clone(), opts, self.quarantine.clone())
    }

    /// Shares the quarantine of another thread's bench.
    pub fn with_quarantine(self, quarantine: Arc<Mutex<VecDeque<Buffer>>>) -> Bench<'a> {
        Bench { quarantine, ..self }
    }

    /// Waits for the events that a failed check did not release, releases them, and frees the
    /// memory of the check.
    pub fn settle(&self) {
        let until_ns = self.until_ns();
        for event in self.open.take() {
            let waited = self.device.wait(event, until_ns);
            let is_late = waited.is_err_and(|error| error.status() == Status::Timeout);
            self.stuck.set(self.stuck.get() || is_late);
            if let Err(error) = self.device.release(event) {
                log::debug!("releasing an event of a failed check: {error}");
            }
        }
        for backing in self.dropped.take() {
            match backing {
                _ if self.stuck.get() => std::mem::forget(backing),
                Backing::Host(buffer) => {
                    let mut buffers = self.quarantine.lock();
                    buffers.push_back(buffer);
                    let is_full = buffers.len() > MAX_QUARANTINED;
                    let oldest = if is_full { buffers.pop_front() } else { None };
                    drop(buffers);
                    drop(oldest);
                }
                Backing::Device(memory) => {
                    // SAFETY: a correct device has no work in flight any more.
                    if let Err(error) = unsafe { self.device.free(&memory) } {
                        log::warn!("memory of a check was not freed: {error}");
                    }
                }
            }
        }
    }

    pub fn is_stuck(&self) -> bool {
        self.stuck.get()
    }

    /// Records that work of another thread did not complete in time.
    pub fn set_stuck(&self) {
        self.stuck.set(true);
    }

    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Waits a short time between two polls, or advances a manual clock.
    pub fn pause(&self) {
        if self.clock.is_manual() {
            self.clock.advance((self.patience_ns >> 12).max(1));
        } else {
            Condvar::new().wait_for(&mut Mutex::new(()).lock(), 50_000);
        }
    }

    /// Deadline of work that is submitted now.
    pub fn until_ns(&self) -> u64 {
        self.now_ns().saturating_add(self.patience_ns)
    }

    /// Submits copies.
    pub fn submit(
        &self,
        stream: u32,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        // SAFETY: test buffers are freed after the work of the check has completed, or never.
        unsafe { self.device.submit(Stream(stream), after, copies) }
    }

    /// Submits copies. The check fails if the device rejects them.
    pub fn begin(
        &self,
        stream: u32,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Outcome<Event> {
        self.accepted("a batch was rejected", self.submit(stream, after, copies))
    }

    /// Records the event of submitted work. The check fails with the text `what` on an error.
    pub fn accepted(&self, what: &str, submitted: Result<Event>) -> Outcome<Event> {
        let event = self.require(what, submitted)?;
        self.open.borrow_mut().push(event);
        Ok(event)
    }

    /// Waits for an event. The check fails if the event fails.
    pub fn wait(&self, event: Event) -> Outcome {
        match self.device.wait(event, self.until_ns()) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.failure("an event failed", &error)),
        }
    }

    /// Waits for an event and releases it.
    pub fn finish(&self, event: Event) -> Outcome {
        self.wait(event)?;
        self.open.borrow_mut().retain(|open| *open != event);
        self.require("release of a completed event failed", self.device.release(event))
    }

    /// Executes one copy and waits for it.
    pub fn do_copy(&self, copy: Copy<'_>) -> Outcome {
        let event = self.begin(0, None, &mut [copy])?;
        self.finish(event)
    }

    /// Requires a call to succeed. The check fails with the text `what` on an error.
    pub fn require<T>(&self, what: &str, result: Result<T>) -> Outcome<T> {
        result.map_err(|error| self.failure(what, &error))
    }

    fn failure(&self, what: &str, error: &Error) -> NotPassed {
        // After a timeout, work may still be in flight.
        self.stuck.set(self.stuck.get() || error.status() == Status::Timeout);
        NotPassed::Failed(format!("{what}: {error}"))
    }

    /// Address spaces to test.
    pub fn places(&self) -> Vec<Memory> {
        match self.device.facts().reaches_device && self.can_allocate {
            true => vec![Memory::Host, Memory::Device],
            false => vec![Memory::Host],
        }
    }

    /// A buffer with random content.
    pub fn buffer(&self, memory: Memory, len: usize) -> Outcome<TestBuffer<'_>> {
        let buffer = TestBuffer::empty(self, memory, len)?;
        buffer.set(&self.chance.noise(len))?;
        Ok(buffer)
    }
}

fn can_allocate(device: &Arc<dyn Device>) -> bool {
    match device.allocate(1) {
        Ok(memory) => {
            // SAFETY: no work has used the memory.
            if let Err(error) = unsafe { device.free(&memory) } {
                log::warn!("memory of a check was not freed: {error}");
            }
            true
        }
        Err(error) => error.status() != Status::Unsupported,
    }
}

/// Memory of a test buffer.
enum Backing {
    Host(Buffer),
    Device(DeviceMemory),
}

/// A test buffer, read and written through the device if nothing else can access it.
pub struct TestBuffer<'a> {
    bench: &'a Bench<'a>,
    pub memory: Memory,
    pub address: u64,
    pub len: usize,
    backing: Option<Backing>,
}

impl<'a> TestBuffer<'a> {
    /// A buffer with undefined content.
    pub fn empty(bench: &'a Bench<'_>, memory: Memory, len: usize) -> Outcome<TestBuffer<'a>> {
        let bytes = (len as u64).max(1);
        let (address, backing) = match memory {
            Memory::Host => {
                let request = AllocationRequest {
                    bytes: bytes + 2 * GUARD_BYTES as u64,
                    ..AllocationRequest::default()
                };
                let buffer = bench.require("host memory", Buffer::map(&request, None))?;
                let start = buffer.address().expose_provenance();
                (start as u64 + GUARD_BYTES as u64, Backing::Host(buffer))
            }
            Memory::Device if !bench.can_allocate => return Err(NO_MEMORY),
            Memory::Device => {
                let memory = bench.require("device memory", bench.device.allocate(bytes))?;
                (memory.address, Backing::Device(memory))
            }
        };
        Ok(TestBuffer { bench, memory, address, len, backing: Some(backing) })
    }

    /// The device under test.
    pub fn device(&self) -> &Arc<dyn Device> {
        self.bench.device
    }

    pub fn pointer(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// The content; no work in flight may write it.
    pub fn bytes(&self) -> Outcome<Vec<u8>> {
        match self.memory {
            Memory::Host => {
                // SAFETY: the buffer's own memory, with its guards.
                let all = unsafe {
                    let start = self.pointer().wrapping_sub(GUARD_BYTES);
                    std::slice::from_raw_parts(start, self.len + 2 * GUARD_BYTES)
                };
                let (content, after) = all[GUARD_BYTES..].split_at(self.len);
                let clean = all[..GUARD_BYTES].iter().chain(after).all(|byte| *byte == 0);
                need(clean, || format!("bytes outside the {} copied ones were written", self.len))?;
                Ok(content.to_vec())
            }
            Memory::Device => {
                let there = TestBuffer::empty(self.bench, Memory::Host, self.len)?;
                self.bench.do_copy(self.copy(&there, Direction::Gather)?)?;
                there.bytes()
            }
        }
    }

    /// Sets the content; no work in flight may use it.
    pub fn set(&self, content: &[u8]) -> Outcome {
        assert_eq!(content.len(), self.len);
        match self.memory {
            Memory::Host => {
                // SAFETY: the buffer's own memory.
                unsafe {
                    std::ptr::copy_nonoverlapping(content.as_ptr(), self.pointer(), self.len);
                }
                Ok(())
            }
            Memory::Device => {
                let there = TestBuffer::empty(self.bench, Memory::Host, self.len)?;
                there.set(content)?;
                self.bench.do_copy(self.copy(&there, Direction::Scatter)?)
            }
        }
    }

    /// A copy between this buffer, as a tensor, and a plane of the same length.
    pub fn copy(&self, plane: &TestBuffer<'_>, direction: Direction) -> Outcome<Copy<'static>> {
        let view = View::canonical(self.address, 1, self.len as u64);
        let copy =
            self.bench.require("a copy", Copy::new(&view, 0, 1, plane.pointer(), direction))?;
        Ok(Copy { memory: self.memory, plane_memory: plane.memory, ..copy })
    }
}

impl Drop for TestBuffer<'_> {
    fn drop(&mut self) {
        self.bench.dropped.borrow_mut().extend(self.backing.take());
    }
}
