//! Methods to submit many small copies to the CUDA driver, and the choice of a method, by
//! measurement when the device is opened. A copy consists of runs; a run copies one contiguous
//! range of bytes.

use std::fmt;

use crate::base::status::{Error, Result, Status};
use crate::device::cuda::abi::{BatchOrder, Handle, Pointer, is_sticky};
use crate::device::cuda::copies::Run;
use crate::device::cuda::host_memory::Registration;
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Memory};

/// Most runs of one driver call: some drivers crash with very many.
const MAX_RUNS: usize = 1024;
/// Fewest runs of a batch call. Fewer runs are submitted one by one.
const MIN_BATCH_RUNS: usize = 4;
/// Runs of at least this length saturate the bus with any method.
const LONG_BYTES: u64 = 4 << 20;
/// Upper bounds of the length classes of shorter runs. Longer ones are in the last class.
const CLASS_BYTES: [u64; CLASSES - 1] = [32 << 10, 512 << 10];
/// Number of length classes.
pub const CLASSES: usize = 3;

/// How small copies are submitted to the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMethod {
    /// One driver call for each run.
    #[default]
    Plain,
    /// Many runs in one call, if the driver supports it (CUDA 12.8).
    Batch,
    /// One kernel for many runs, if kernels can access source and target. Other runs are submitted
    /// one by one.
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
    /// The given method. If the device does not support it, [`CopyMethod::Plain`].
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

/// Runs to submit together. The lists are reused.
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
        let has_memory = self.to.try_reserve(1).is_ok()
            && self.from.try_reserve(1).is_ok()
            && self.bytes.try_reserve(1).is_ok()
            && self.memory.try_reserve(1).is_ok();
        if !has_memory {
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

    /// Whether the driver may block the submission of this copy until the stream reaches it. It
    /// does for copies from host to host, and may for pageable host memory.
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
        let is_safe = |memory, address, bytes: usize| {
            memory == Memory::Device || self.is_registered(address, bytes as u64)
        };
        is_safe(run.from_memory, run.from, run.bytes) && is_safe(run.to_memory, run.to, run.bytes)
    }
}

impl Cuda {
    /// The method for a copy, by its direction and the length of its runs.
    pub(super) fn method_for(&self, copy: &Copy<'_>) -> CopyMethod {
        let is_host_only = copy.memory == Memory::Host && copy.plane_memory == Memory::Host;
        let Some(strip) = copy.tensor.strips().next() else { return CopyMethod::Plain };
        let is_contiguous = strip.stride_bytes == strip.run_bytes;
        let bytes = if is_contiguous { strip.bytes() } else { strip.run_bytes };
        if is_host_only || bytes >= LONG_BYTES {
            return CopyMethod::Plain;
        }
        let to_device = match copy.direction {
            crate::device::Direction::Gather => copy.plane_memory == Memory::Device,
            crate::device::Direction::Scatter => copy.memory == Memory::Device,
        };
        let chosen = if to_device { self.chosen.to_device } else { self.chosen.from_device };
        chosen[CLASS_BYTES.iter().filter(|&&most| bytes > most).count()]
    }

    /// Submits runs in batches. If the driver rejects a batch, submits its runs one by one; copying
    /// a run twice is harmless. Sets `begun` once the driver may have begun a copy.
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
            let use_batch = count >= MIN_BATCH_RUNS && !inner.batches_fail;
            // SAFETY: the caller's promise.
            if !use_batch || !unsafe { self.issue_batch(inner, runs, at, count, stream, begun)? } {
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

    /// Submits some runs in one call. False: the driver does not support that, or rejected the
    /// batch.
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
        // One set of attributes for all runs: sources are read in stream order.
        let (order, first, mut failed) =
            (BatchOrder { order: 1, ..BatchOrder::default() }, 0, usize::MAX);
        *begun = true;
        // SAFETY: three lists of `count` elements, one set of attributes that applies from the
        // first copy on, and a variable for an index. The caller guarantees the memory of the runs.
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
        log::warn!(
            "a batch of copies failed; copies are submitted one by one from now on: {}",
            error.message()
        );
        inner.batches_fail = true;
    }
}
