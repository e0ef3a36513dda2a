//! Methods to give many small copies to the driver, and the choice among them, measured when the
//! device is opened.

use std::fmt;

use crate::base::status::{Error, Result, Status};
use crate::device::cuda::abi::{BatchOrder, Handle, Pointer, is_sticky};
use crate::device::cuda::copies::Run;
use crate::device::cuda::host_memory::Registration;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Memory};

/// Limit: runs of one driver call; some drivers crash on very many.
const MAX_RUNS: usize = 1024;
/// Fewer runs are copied one by one.
const MIN_BATCH_RUNS: usize = 4;
/// Runs of this length keep the bus busy with any method.
const LONG_BYTES: u64 = 4 << 20;
/// Upper bounds of the classes of shorter runs; the last class has the rest.
const CLASS_BYTES: [u64; CLASSES - 1] = [32 << 10, 512 << 10];
/// Number of classes.
pub const CLASSES: usize = 3;

/// How small copies are given to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMethod {
    /// One call for each run.
    #[default]
    Plain,
    /// Many runs in one call, if the driver supports it (CUDA 12.8).
    Batch,
    /// One kernel for many runs, if kernels can access both sides; other runs one by one.
    Kernel,
}

impl fmt::Display for CopyMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CopyMethod::Plain => "one by one",
            CopyMethod::Batch => "in batches",
            CopyMethod::Kernel => "by a kernel",
        })
    }
}

/// How a device chooses its copy method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethodChoice {
    /// A given method. If the device lacks it, copies go one by one.
    Fixed(CopyMethod),
    /// Each method is measured when the device is opened, and the fastest is used.
    Measured,
}

impl Default for CopyMethodChoice {
    fn default() -> CopyMethodChoice {
        CopyMethodChoice::Fixed(CopyMethod::Plain)
    }
}

/// The chosen methods, for copies to the device and for copies from or within it, for runs up to 32
/// KiB, up to 512 KiB, and below 4 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChosenMethods {
    /// Copies to the device, shortest class first.
    pub to_device: [CopyMethod; CLASSES],
    /// Copies from the device or within it.
    pub from_device: [CopyMethod; CLASSES],
}

impl ChosenMethods {
    /// One method for all classes.
    pub fn all(method: CopyMethod) -> ChosenMethods {
        ChosenMethods { to_device: [method; CLASSES], from_device: [method; CLASSES] }
    }
}

/// Runs that will be given to the driver together; the lists are reused.
#[derive(Default)]
pub struct Runs {
    to: Vec<Pointer>,
    from: Vec<Pointer>,
    bytes: Vec<usize>,
    memory: Vec<(Memory, Memory)>,
}

impl Runs {
    pub fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
        self.memory.clear();
    }

    pub fn push(&mut self, run: Run) -> Result<()> {
        let room = self.to.try_reserve(1).is_ok()
            && self.from.try_reserve(1).is_ok()
            && self.bytes.try_reserve(1).is_ok()
            && self.memory.try_reserve(1).is_ok();
        if !room {
            return Err(Status::NoMem.into());
        }
        self.to.push(run.to);
        self.from.push(run.from);
        self.bytes.push(run.bytes);
        self.memory.push((run.from_memory, run.to_memory));
        Ok(())
    }

    fn len(&self) -> usize {
        self.to.len()
    }

    fn run(&self, at: usize) -> Run {
        let (from_memory, to_memory) = self.memory[at];
        Run { to: self.to[at], from: self.from[at], bytes: self.bytes[at], to_memory, from_memory }
    }
}

impl Inner {
    /// Whether a range is in registered host memory.
    fn is_registered(&self, address: u64, bytes: u64) -> bool {
        self.host_range(address).is_some_and(|(start, range)| {
            range.registration != Registration::Pageable && bytes <= range.bytes - (address - start)
        })
    }

    /// Whether the driver may block in this copy until the stream reaches it. It does from host to
    /// host, and may with pageable host memory.
    pub fn may_block(&self, copy: &Copy<'_>) -> bool {
        let plane = copy.plane.expose_provenance() as u64;
        match (copy.memory, copy.plane_memory) {
            (Memory::Host, Memory::Host) => true,
            (Memory::Device, Memory::Host) => !self.is_registered(plane, copy.tensor.bytes()),
            (Memory::Host, Memory::Device) => copy.tensor.strips().any(|strip| {
                let reach = (strip.count.max(1) - 1).saturating_mul(strip.stride_bytes);
                !self.is_registered(strip.address, reach.saturating_add(strip.run_bytes))
            }),
            (Memory::Device, Memory::Device) => false,
        }
    }

    /// Whether a run may be part of a batch call: drivers crash on pageable host memory.
    pub fn is_batched(&self, run: &Run) -> bool {
        let is_sound = |memory, address, bytes: usize| {
            memory == Memory::Device || self.is_registered(address, bytes as u64)
        };
        is_sound(run.from_memory, run.from, run.bytes) && is_sound(run.to_memory, run.to, run.bytes)
    }
}

impl Cuda {
    /// Method for a copy.
    pub(super) fn method_for(&self, copy: &Copy<'_>) -> CopyMethod {
        let is_host = copy.memory == Memory::Host && copy.plane_memory == Memory::Host;
        let Some(strip) = copy.tensor.strips().next() else { return CopyMethod::Plain };
        let is_one = strip.stride_bytes == strip.run_bytes;
        let bytes = if is_one { strip.bytes() } else { strip.run_bytes };
        if is_host || bytes >= LONG_BYTES {
            return CopyMethod::Plain;
        }
        let to_device = match copy.direction {
            crate::device::Direction::Gather => copy.plane_memory == Memory::Device,
            crate::device::Direction::Scatter => copy.memory == Memory::Device,
        };
        let chosen = if to_device { self.chosen.to_device } else { self.chosen.from_device };
        chosen[CLASS_BYTES.iter().filter(|&&most| bytes > most).count()]
    }

    /// Gives runs to the driver together. If it rejects a batch, its runs are copied one by one:
    /// repeating a run does no harm.
    ///
    /// # Safety
    /// As for [`Cuda::issue`].
    pub(super) unsafe fn issue_runs(
        &self,
        inner: &mut Inner,
        runs: &Runs,
        stream: Handle,
        begun: &mut bool,
    ) -> Result<()> {
        let mut at = 0;
        while at < runs.len() {
            let count = (runs.len() - at).min(MAX_RUNS);
            let is_many = count >= MIN_BATCH_RUNS && !inner.batches_fail;
            // SAFETY: the caller's promise.
            if !is_many || !unsafe { self.issue_batch(inner, runs, at, count, stream, begun)? } {
                for run in at..at + count {
                    // SAFETY: as above.
                    unsafe { self.issue_run(&runs.run(run), stream)? };
                    *begun = true;
                }
            }
            at += count;
        }
        Ok(())
    }

    /// Tries to issue some runs in one call; false if the driver cannot.
    ///
    /// # Safety
    /// As for [`Cuda::issue`].
    unsafe fn issue_batch(
        &self,
        inner: &mut Inner,
        runs: &Runs,
        at: usize,
        count: usize,
        stream: Handle,
        begun: &mut bool,
    ) -> Result<bool> {
        let Some(call) = self.batch_call else { return Ok(false) };
        let part = at..at + count;
        let (to, from) = (runs.to[part.clone()].as_ptr(), runs.from[part.clone()].as_ptr());
        let bytes = runs.bytes[part].as_ptr();
        // One description for all runs: sources are read in stream order.
        let (order, first, mut failed) =
            (BatchOrder { order: 1, ..BatchOrder::default() }, 0, usize::MAX);
        *begun = true;
        // SAFETY: lists of `count` each, one description that applies from the first copy on, and a
        // place for a number. The caller guarantees the memory.
        let code = unsafe { call(to, from, bytes, count, &order, &first, 1, &mut failed, stream) };
        if code == 0 {
            return Ok(true);
        }
        let error = self.driver.error("cuMemcpyBatchAsync", code);
        if is_sticky(code) {
            return Err(error);
        }
        self.disable_batches(inner, &error);
        Ok(false)
    }

    fn disable_batches(&self, inner: &mut Inner, error: &Error) {
        log::warn!("batched copies failed, copies go one by one from now on: {}", error.message());
        inner.batches_fail = true;
    }
}
