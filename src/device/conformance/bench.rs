//! Tools of the checks: a device, random numbers, and buffers in every address space of the device.

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
const PATIENCE_NS: u64 = 30_000_000_000;
/// Default number of random trials.
const ROUNDS: u32 = 40;
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

/// A device under test.
pub struct Bench<'a> {
    pub device: &'a Arc<dyn Device>,
    pub chance: Chance,
    pub rounds: u64,
    clock: Clock,
    patience_ns: u64,
    /// The device can allocate memory.
    can_allocate: bool,
    /// Work did not end: memory that it may use leaks.
    stuck: Cell<bool>,
    /// Unreleased events; a failed check leaves some.
    open: RefCell<Vec<Event>>,
    /// Memory of dropped buffers.
    left: RefCell<Vec<Holds>>,
    /// Quarantined host memory: a later check, not a crash, finds a device that keeps writing.
    quarantined: Arc<Mutex<VecDeque<Buffer>>>,
}

/// Guard bytes before and after host memory.
const EDGE: usize = 4096;
/// Limit: quarantined buffers.
const KEPT: usize = 512;

impl<'a> Bench<'a> {
    pub fn new(device: &'a Arc<dyn Device>, opts: &ConformanceOpts) -> Bench<'a> {
        let or = |given: u64, default| if given == 0 { default } else { given };
        Bench {
            device,
            chance: Chance::new(opts.seed),
            rounds: or(opts.rounds.into(), ROUNDS.into()),
            clock: opts.clock.clone(),
            patience_ns: or(opts.patience_ns, PATIENCE_NS),
            can_allocate: can_allocate(device),
            stuck: Cell::new(false),
            open: RefCell::new(Vec::new()),
            left: RefCell::new(Vec::new()),
            quarantined: Arc::new(Mutex::new(VecDeque::new())),
        }
    }

    /// State for another thread that tests the same device.
    pub fn share(&self) -> (Arc<dyn Device>, ConformanceOpts, Arc<Mutex<VecDeque<Buffer>>>) {
        let opts = ConformanceOpts {
            seed: self.chance.next(),
            rounds: self.rounds as u32,
            clock: self.clock.clone(),
            patience_ns: self.patience_ns,
            closes: false,
        };
        (self.device.clone(), opts, self.quarantined.clone())
    }

    /// A bench of another thread.
    pub fn beside(self, quarantined: Arc<Mutex<VecDeque<Buffer>>>) -> Bench<'a> {
        Bench { quarantined, ..self }
    }

    /// Waits for the events that a failed check left, and frees its memory.
    pub fn settle(&self) {
        let until_ns = self.until_ns();
        for event in self.open.take() {
            let outcome = self.device.wait(event, until_ns);
            let is_late = outcome.is_err_and(|error| error.status() == Status::Timeout);
            self.stuck.set(self.stuck.get() || is_late);
            if let Err(error) = self.device.release(event) {
                log::debug!("releasing an event of a failed check: {error}");
            }
        }
        for holds in self.left.take() {
            match holds {
                _ if self.stuck.get() => std::mem::forget(holds),
                Holds::Host(buffer) => {
                    let mut quarantined = self.quarantined.lock();
                    quarantined.push_back(buffer);
                    let oldest =
                        if quarantined.len() > KEPT { quarantined.pop_front() } else { None };
                    drop(quarantined);
                    drop(oldest);
                }
                Holds::Device(memory) => {
                    // SAFETY: a sound device has no work in flight any more.
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

    /// Records that work of another thread has not ended.
    pub fn get_stuck(&self) {
        self.stuck.set(true);
    }

    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Lets a little time pass.
    pub fn pass(&self) {
        if self.clock.is_manual() {
            self.clock.advance((self.patience_ns >> 12).max(1));
        } else {
            Condvar::new().wait_for(&mut Mutex::new(()).lock(), 50_000);
        }
    }

    /// Deadline of an event that begins now.
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
        // SAFETY: buffers live until the work of a check has ended, or forever.
        unsafe { self.device.submit(Stream(stream), after, copies) }
    }

    /// Submits copies, which must be accepted.
    pub fn begin(
        &self,
        stream: u32,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Outcome<Event> {
        self.begun("a batch was rejected", self.submit(stream, after, copies))
    }

    /// Records accepted work.
    pub fn begun(&self, what: &str, result: Result<Event>) -> Outcome<Event> {
        let event = self.require_ok(what, result)?;
        self.open.borrow_mut().push(event);
        Ok(event)
    }

    /// Waits for an event that must succeed.
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
        self.require_ok("release of a completed event failed", self.device.release(event))
    }

    /// Executes one copy.
    pub fn do_copy(&self, copy: Copy<'_>) -> Outcome {
        let event = self.begin(0, None, &mut [copy])?;
        self.finish(event)
    }

    /// Requires success.
    pub fn require_ok<T>(&self, what: &str, result: Result<T>) -> Outcome<T> {
        result.map_err(|error| self.failure(what, &error))
    }

    fn failure(&self, what: &str, error: &Error) -> NotPassed {
        // The state of work in flight is unknown after a timeout.
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
            // SAFETY: nothing uses it.
            if let Err(error) = unsafe { device.free(&memory) } {
                log::warn!("memory of a check was not freed: {error}");
            }
            true
        }
        Err(error) => error.status() != Status::Unsupported,
    }
}

enum Holds {
    Host(Buffer),
    Device(DeviceMemory),
}

/// A test buffer, read and written through the device if nothing else can access it.
pub struct TestBuffer<'a> {
    bench: &'a Bench<'a>,
    pub memory: Memory,
    pub address: u64,
    pub len: usize,
    holds: Option<Holds>,
}

impl<'a> TestBuffer<'a> {
    /// A buffer with undefined content.
    pub fn empty(bench: &'a Bench<'_>, memory: Memory, len: usize) -> Outcome<TestBuffer<'a>> {
        let bytes = (len as u64).max(1);
        let (address, holds) = match memory {
            Memory::Host => {
                let request = AllocationRequest {
                    bytes: bytes + 2 * EDGE as u64,
                    ..AllocationRequest::default()
                };
                let buffer = bench.require_ok("host memory", Buffer::map(&request, None))?;
                let start = buffer.address().expose_provenance();
                (start as u64 + EDGE as u64, Holds::Host(buffer))
            }
            Memory::Device if !bench.can_allocate => return Err(NO_MEMORY),
            Memory::Device => {
                let memory = bench.require_ok("device memory", bench.device.allocate(bytes))?;
                (memory.address, Holds::Device(memory))
            }
        };
        Ok(TestBuffer { bench, memory, address, len, holds: Some(holds) })
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
                    let start = self.pointer().wrapping_sub(EDGE);
                    std::slice::from_raw_parts(start, self.len + 2 * EDGE)
                };
                let (content, after) = all[EDGE..].split_at(self.len);
                let clean = all[..EDGE].iter().chain(after).all(|byte| *byte == 0);
                need(clean, || format!("bytes outside the {} copied ones were written", self.len))?;
                Ok(content.to_vec())
            }
            Memory::Device => {
                let host_copy = TestBuffer::empty(self.bench, Memory::Host, self.len)?;
                self.bench.do_copy(self.copy(&host_copy, Direction::Gather)?)?;
                host_copy.bytes()
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
                let host_copy = TestBuffer::empty(self.bench, Memory::Host, self.len)?;
                host_copy.set(content)?;
                self.bench.do_copy(self.copy(&host_copy, Direction::Scatter)?)
            }
        }
    }

    /// A copy between this buffer, as a tensor, and a plane of the same length.
    pub fn copy(&self, plane: &TestBuffer<'_>, direction: Direction) -> Outcome<Copy<'static>> {
        let view = View::canonical(self.address, 1, self.len as u64);
        let copy =
            self.bench.require_ok("a copy", Copy::new(&view, 0, 1, plane.pointer(), direction))?;
        Ok(Copy { memory: self.memory, plane_memory: plane.memory, ..copy })
    }
}

impl Drop for TestBuffer<'_> {
    fn drop(&mut self) {
        self.bench.left.borrow_mut().extend(self.holds.take());
    }
}
