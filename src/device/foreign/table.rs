//! The interface that an engine implements to be a device.

use crate::base::status::{Result, Status};
use crate::device::call::Call;
use crate::device::{Copy, Direction, Facts, Memory};
use crate::fail;
use crate::meta::view::Strip;

/// Rows of bytes to copy: `runs` runs of `run_bytes` at constant strides.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Source of the first run.
    pub from: u64,
    /// Target of the first run.
    pub to: u64,
    /// Distance between runs of the source.
    pub from_stride_bytes: u64,
    /// Distance between runs of the target.
    pub to_stride_bytes: u64,
    /// Bytes of a run.
    pub run_bytes: u64,
    /// Number of runs.
    pub runs: u64,
    /// The source is in device memory (1) or in host memory (0).
    pub from_device: u32,
    /// The target is in device memory (1) or in host memory (0).
    pub to_device: u32,
}

/// An engine that copies. It numbers its events, not with 0. After [`Status::Unavailable`] from any
/// function, only functions that take something back are called.
pub trait Engine: Send + Sync {
    /// Properties of the device.
    fn facts(&self) -> Facts;

    /// Submits copies to a stream after an event (0 = none); returns the event of their end.
    /// Without copies it only records an event. A rejected call has begun nothing.
    fn submit(&self, stream: u32, after: u64, copies: &[Rows]) -> Result<u64>;

    /// Whether an event has completed.
    fn query(&self, event: u64) -> Result<bool>;

    /// Waits for an event until a deadline (0 = none). The caller queries the event afterwards.
    /// `None`: the engine cannot wait.
    fn wait(&self, event: u64, deadline_ns: u64) -> Option<Result<()>>;

    /// Releases an event.
    fn release(&self, event: u64);

    /// Allocates memory, at a multiple of 256.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Frees memory.
    fn free(&self, address: u64, bytes: u64);

    /// Free memory, if known.
    fn free_bytes(&self) -> Option<u64>;

    /// Registers host memory that many copies will use.
    fn register_host(&self, address: u64, bytes: u64) -> Result<()>;

    /// Unregisters host memory.
    fn unregister_host(&self, address: u64) -> Result<()>;

    /// Imports an event of the engine.
    fn import_event(&self, raw: u64) -> Result<u64>;

    /// Makes a stream of the engine wait for an event.
    fn stream_wait_event(&self, raw_stream: u64, event: u64) -> Result<()>;

    /// Creates an event that completes when `signal_event` is called.
    fn create_user_event(&self) -> Result<u64>;

    /// Signals a user event; signalling it again does nothing. The call must not wait.
    fn signal_event(&self, event: u64) -> Result<()>;

    /// Submits kernels to a stream, as copies.
    fn launch(&self, stream: u32, after: u64, calls: &[Call]) -> Result<u64>;
}

/// Limit: rows of a batch.
const MAX_ROWS: usize = 1 << 22;

/// Lowers copies to rows.
pub fn lower(copies: &[Copy<'_>], rows: &mut Vec<Rows>) -> Result<()> {
    for copy in copies {
        for strip in copy.tensor.strips() {
            if rows.len() == MAX_ROWS {
                fail!(Limit, "a batch of more than {MAX_ROWS} rows: split it");
            }
            rows.try_reserve(1).map_err(|_| Status::NoMem)?;
            rows.push(row_of(copy, &strip));
        }
    }
    Ok(())
}

fn row_of(copy: &Copy<'_>, strip: &Strip) -> Rows {
    let plane = (copy.plane.expose_provenance() as u64).wrapping_add(strip.at);
    let is_device = |memory| u32::from(memory == Memory::Device);
    let is_one = strip.count == 1 || strip.stride_bytes == strip.run_bytes;
    let (runs, run_bytes) =
        if is_one { (1, strip.bytes()) } else { (strip.count, strip.run_bytes) };
    let stride = if is_one { run_bytes } else { strip.stride_bytes };
    let tensor = (strip.address, stride, is_device(copy.memory));
    let plane = (plane, run_bytes, is_device(copy.plane_memory));
    let (from, to) = match copy.direction {
        Direction::Gather => (tensor, plane),
        Direction::Scatter => (plane, tensor),
    };
    Rows {
        from: from.0,
        to: to.0,
        from_stride_bytes: from.1,
        to_stride_bytes: to.1,
        run_bytes,
        runs,
        from_device: from.2,
        to_device: to.2,
    }
}
