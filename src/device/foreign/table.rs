//! What an engine has to be able to do, to be a device.

use crate::base::status::{Result, Status};
use crate::device::call::Call;
use crate::device::{Copy, Direction, Facts, Memory};
use crate::fail;
use crate::meta::view::Strip;

/// Rows of bytes to copy: `runs` runs of `run_bytes`, from and to addresses at equal distances.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    /// Where the first run is read.
    pub from: u64,
    /// Where it is written.
    pub to: u64,
    /// From a run to the next, where they are read.
    pub from_stride_bytes: u64,
    /// The same, where they are written.
    pub to_stride_bytes: u64,
    /// Bytes of a run.
    pub run_bytes: u64,
    /// How many.
    pub runs: u64,
    /// Whether they are read in device memory (1) or in host memory (0).
    pub from_device: u32,
    /// The same, where they are written.
    pub to_device: u32,
}

/// An engine that copies. Events are numbers of its own, not 0; after
/// [`Status::Unavailable`] from any of these nothing more is asked of it but to take back what
/// it gave.
pub trait Engine: Send + Sync {
    /// What it is and can do.
    fn facts(&self) -> Facts;

    /// Puts copies on a stream, behind an event if that is not 0; the event of their end. No
    /// copies: the event marks the place. What it refuses it has not begun.
    fn submit(&self, stream: u32, after: u64, copies: &[Rows]) -> Result<u64>;

    /// Whether an event has come.
    fn query(&self, event: u64) -> Result<bool>;

    /// Waits for an event until a deadline (0 = as long as it likes). It is asked afterwards
    /// whether it has come. `None`: it cannot wait.
    fn wait(&self, event: u64, deadline_ns: u64) -> Option<Result<()>>;

    /// Takes an event back.
    fn release(&self, event: u64);

    /// Gives memory, at a multiple of 256.
    fn allocate(&self, bytes: u64) -> Result<u64>;

    /// Takes it back.
    fn free(&self, address: u64, bytes: u64);

    /// What it has left to give, if it knows.
    fn free_bytes(&self) -> Option<u64>;

    /// Learns of host memory that is used again and again.
    fn register_host(&self, address: u64, bytes: u64) -> Result<()>;

    /// Is told that this memory goes.
    fn unregister_host(&self, address: u64) -> Result<()>;

    /// An event that comes with one of the engine's own.
    fn import_event(&self, raw: u64) -> Result<u64>;

    /// Has a stream of the engine's own wait for an event.
    fn stream_wait_event(&self, raw_stream: u64, event: u64) -> Result<()>;

    /// An event that comes when it is told to, by `keep`.
    fn create_user_event(&self) -> Result<u64>;

    /// Has such an event come, if it has not. It must not wait.
    fn signal_event(&self, event: u64) -> Result<()>;

    /// Puts kernels on a stream, as copies.
    fn launch(&self, stream: u32, after: u64, calls: &[Call]) -> Result<u64>;
}

/// Most rows of a batch: more are a batch that should be two.
const MAX_ROWS: usize = 1 << 22;

/// Copies as an engine wants them.
pub fn lower(copies: &[Copy<'_>], rows: &mut Vec<Rows>) -> Result<()> {
    for copy in copies {
        for strip in copy.tensor.strips() {
            if rows.len() == MAX_ROWS {
                fail!(Limit, "a batch of more than {MAX_ROWS} rows");
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
