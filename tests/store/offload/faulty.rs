//! A device that fails when it is told to.

use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::status::{Result, Status};
use kvtier::base::sync::Arc;
use kvtier::device::host::Host;
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Event, Facts, Memory, State, Stream};

/// Another one, with faults: which copy of a way is the next to fail, counted from 1; 0 = none,
/// the greatest number = all.
pub struct Faulty {
    inner: Arc<dyn Device>,
    pub scatter: AtomicU64,
    pub gather: AtomicU64,
    /// The plane that could not be scattered: it cannot be until this is 0 again, however often
    /// it is tried.
    pub stuck: AtomicU64,
}

impl Default for Faulty {
    fn default() -> Faulty {
        Faulty::of(Arc::new(Host::default()))
    }
}

/// Every copy fails.
pub const ALL: u64 = u64::MAX;

impl Faulty {
    pub fn of(inner: Arc<dyn Device>) -> Faulty {
        let none = || AtomicU64::new(0);
        Faulty { inner, scatter: none(), gather: none(), stuck: none() }
    }

    fn pass(count: &AtomicU64) -> Result<()> {
        let next = |left: u64| match left {
            0 => None,
            ALL => Some(ALL),
            left => Some(left - 1),
        };
        match count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(1 | ALL) => Err(Status::Io.into()),
            _ => Ok(()),
        }
    }
}

/// One by one, those count that touch memory of the device: what policies know of blocks is put
/// in the store from the host's, by a thread that nobody waits for.
fn counts(copy: &Copy<'_>, gather: u64) -> bool {
    let is_remote = copy.memory == Memory::Device || copy.plane_memory == Memory::Device;
    is_remote || gather == ALL
}

impl Device for Faulty {
    fn facts(&self) -> Facts {
        self.inner.facts()
    }

    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event> {
        for copy in copies.iter() {
            let plane = copy.plane.expose_provenance() as u64;
            if copy.direction == Direction::Gather {
                if counts(copy, self.gather.load(Ordering::SeqCst)) {
                    Faulty::pass(&self.gather)?;
                }
            } else if self.stuck.load(Ordering::SeqCst) == plane {
                return Err(Status::Io.into());
            } else {
                let passed = Faulty::pass(&self.scatter);
                passed.inspect_err(|_| self.stuck.store(plane, Ordering::SeqCst))?;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.submit(stream, after, copies) }
    }

    fn state(&self, event: Event) -> Result<State> {
        self.inner.state(event)
    }

    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()> {
        self.inner.wait(event, deadline_ns)
    }

    fn poll(&self, ended: &mut [Event]) -> usize {
        self.inner.poll(ended)
    }

    fn release(&self, event: Event) -> Result<()> {
        self.inner.release(event)
    }

    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        self.inner.allocate(bytes)
    }

    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.free(memory) }
    }

    fn close(&self, deadline_ns: u64) -> Result<()> {
        self.inner.close(deadline_ns)
    }
}
