//! Copy engines: devices copy bytes, compute checksums and compare them.
//!
//! A [`Device`] copies between an engine's tensors and the store's canonical planes. Work is
//! submitted to *streams*: in order within one stream, in any order across streams. Each batch ends
//! with an *event*. Rules for callers:
//!
//! - When the event `after` is done (without `after`: when the batch is submitted), a source must
//!   be complete and a target must not be in use.
//! - Until the batch's own event is done, no code changes a source, and no code reads or writes a
//!   target.
//!
//! An event may be passed as `after`, or waited for, as soon as `submit` has returned it.

use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::call::Call;
use crate::device::direct::Direct;
use crate::device::window::Window;
use crate::fail;
use crate::meta::view::{Side, Span, View};

pub mod call;
pub mod conformance;
pub mod cuda;
pub mod direct;
pub mod foreign;
pub mod host;
pub mod op_wait;
mod pool;
pub mod simulated;
mod slots;
mod strips;
pub mod window;

/// Limit: streams of a device.
pub const MAX_STREAMS: u32 = 64;
/// Limit: streams that a device leases at a time, if it creates them on demand.
pub const MAX_LEASED_STREAMS: usize = 16;
/// Limit: user events of a device that are not released.
pub const MAX_USER_EVENTS: usize = 1024;
/// Limit: copies of a batch.
pub const MAX_COPIES: usize = 65_536;

/// A queue of a device: 0 to [`Facts::streams`] - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u32);

/// A point on a stream of one device. Numbers are not reused soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// State of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Its work has not completed.
    Pending,
    /// Its work has completed.
    Done,
}

/// Address space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Accessible by the processor.
    Host,
    /// Accessible by the device only.
    Device,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the tensor to the plane.
    Gather,
    /// From the plane to the tensor.
    Scatter,
}

/// Device memory from [`Device::allocate`]. Dropping this value does not free it; closing the
/// device frees the rest.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Start, a multiple of 256.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Address space.
    pub memory: Memory,
    /// Id within its device.
    pub(crate) number: u64,
}

/// Properties of a device.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Kind of the device.
    pub name: &'static str,
    /// Work continues after `submit` has returned. Otherwise events are done by then.
    pub asynchronous: bool,
    /// The device computes checksums of planes as it copies. Otherwise the caller computes them
    /// afterwards. An asynchronous device sums the bytes in its own memory; the caller must compare
    /// that sum with the bytes on the other side of the bus.
    pub sums: bool,
    /// Copies may name [`Memory::Device`].
    pub reaches_device: bool,
    /// Planes should be in pinned memory; otherwise copies are slow and synchronous.
    pub wants_pinned: bool,
    /// Number of streams.
    pub streams: u32,
    /// Available kernels: a bit for each [`call::Kind`].
    pub kernels: u64,
}

/// One plane to copy between a tensor and canonical order.
pub struct Copy<'a> {
    /// Tokens of the tensor. For [`Direction::Scatter`] the view was checked as a target.
    pub tensor: Span<'a>,
    /// Address space of the tensor.
    pub memory: Memory,
    /// The plane, as long as the span.
    pub plane: *mut u8,
    /// Address space of the plane.
    pub plane_memory: Memory,
    /// Direction of the copy.
    pub direction: Direction,
    /// Write around the caches, where the processor copies: the target is not read soon.
    pub past_caches: bool,
    /// Request a checksum of the plane, in canonical order. An asynchronous device sums the side in
    /// its memory: the source as read, or the target as written. If both sides are in its memory,
    /// it sums the target.
    pub wants_sum: bool,
    /// Checksum of the plane, if requested and if the device computes checksums. Asynchronous
    /// devices return it from [`Device::sums`] instead.
    pub sum: u64,
}

impl<'a> Copy<'a> {
    /// A copy of tokens of a view in host memory, without a checksum.
    pub fn new(
        view: &View<'a>,
        first: u32,
        tokens: u32,
        plane: *mut u8,
        direction: Direction,
    ) -> Result<Self> {
        let side = if direction == Direction::Gather { Side::Source } else { Side::Target };
        let tensor = view.span(first, tokens, side)?;
        let (memory, plane_memory) = (Memory::Host, Memory::Host);
        let past_caches = direction == Direction::Gather;
        let (wants_sum, sum) = (false, 0);
        Ok(Copy { tensor, memory, plane, plane_memory, direction, past_caches, wants_sum, sum })
    }
}

impl Copy<'static> {
    /// A copy of plain bytes between host memory and an address in `memory`, without a checksum.
    /// [`Direction::Scatter`] copies to `address`.
    pub fn bytes(
        host: *mut u8,
        address: u64,
        bytes: u64,
        direction: Direction,
        memory: Memory,
    ) -> Result<Copy<'static>> {
        let view = View::canonical(address, 1, bytes);
        Ok(Copy { memory, ..Copy::new(&view, 0, 1, host, direction)? })
    }
}

/// A copy engine.
pub trait Device: Send + Sync {
    /// Properties of the device.
    fn facts(&self) -> Facts;

    /// Description for people: name, and how the device copies.
    fn describe(&self) -> String {
        self.facts().name.to_string()
    }

    /// Submits a batch to a stream, after earlier work of the stream and after the event `after`. A
    /// batch without copies only records an event. A rejected batch was not begun. If `after` has
    /// failed, the call fails with the status of `after`.
    ///
    /// # Safety
    /// The memory of every copy is valid for its direction. Tensor and plane of a copy do not
    /// overlap. Until the event is done or has failed, callers obey the rules of this module.
    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event>;

    /// State of an event, or the error that it failed with. After a failure the content of the
    /// targets is undefined, and the device no longer accesses them.
    fn state(&self, event: Event) -> Result<State>;

    /// Waits for an event until a deadline (0 = none), then returns [`Status::Timeout`].
    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()>;

    /// Writes the checksums that a batch requested, in the order of its copies; returns their
    /// number. They are available from completion of the event until its release. [`Status::Busy`]:
    /// the event is pending. Synchronous devices store checksums in the copies.
    fn sums(&self, event: Event, sums: &mut [u64]) -> Result<usize> {
        let _ = sums;
        fail!(
            Unsupported,
            "the {} device computes no checksums (event {:#x})",
            self.facts().name,
            event.0
        )
    }

    /// Writes events that have completed or failed; returns their number. An asynchronous device
    /// reports each event once, unless it is released before. Synchronous devices report none.
    fn poll(&self, ended: &mut [Event]) -> usize;

    /// Releases an event that has completed or failed. [`Status::Busy`]: it is pending. The number
    /// of unreleased events is limited; beyond the limit `submit` returns [`Status::Again`].
    fn release(&self, event: Event) -> Result<()>;

    /// Releases an event as soon as it completes; nothing uses it any more.
    fn forget(&self, event: Event) {
        if let Err(error) = self.release(event) {
            log::warn!("releasing an event failed; it leaks: {error}");
        }
    }

    /// Allocates memory with undefined content. [`Status::NoMem`]: not enough memory is free.
    /// [`Status::Unsupported`]: the device does not allocate memory.
    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        fail!(
            Unsupported,
            "the {} device cannot allocate {bytes} bytes: use the engine's memory",
            self.facts().name
        )
    }

    /// Frees memory, once. [`Status::Handle`]: the memory is not of this device or was freed.
    /// [`Status::Busy`]: work in flight uses it, as far as the device can tell.
    ///
    /// # Safety
    /// No thread and no work in flight uses the memory.
    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        fail!(Handle, "no allocation of this device at {:#x}", memory.address)
    }

    /// Registers host memory that many copies will use, so that they run at full speed. Devices
    /// without such a distinction do nothing.
    ///
    /// # Safety
    /// The memory stays mapped until [`Device::unregister_host`].
    unsafe fn register_host(&self, address: *mut u8, bytes: u64) -> Result<()> {
        let _ = (address, bytes);
        Ok(())
    }

    /// Unregisters host memory, before it is unmapped.
    ///
    /// # Safety
    /// No work in flight uses the memory.
    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        let _ = address;
        Ok(())
    }

    /// Imports an event of the engine (CUDA: a `CUevent` that was recorded). The result completes
    /// with it, may be waited for by batches, and is released like any other event.
    ///
    /// # Safety
    /// `raw` is such an event, and stays valid until the imported event has completed.
    unsafe fn import_event(&self, raw: u64) -> Result<Event> {
        fail!(Unsupported, "the {} device cannot import event {raw:#x}", self.facts().name)
    }

    /// Makes a stream of the engine (CUDA: a `CUstream`) wait for an event. The calling thread does
    /// not wait.
    ///
    /// # Safety
    /// `raw_stream` is such a stream.
    unsafe fn stream_wait_event(&self, raw_stream: u64, event: Event) -> Result<()> {
        let _ = event;
        fail!(
            Unsupported,
            "the {} device cannot make stream {raw_stream:#x} wait",
            self.facts().name
        )
    }

    /// Creates an event that completes when the host signals it with [`Device::signal_event`].
    /// Batches, streams and threads may wait for it before that; it is released like any other
    /// event. [`Status::Unsupported`]: the device has no user events. [`Status::Again`]:
    /// [`MAX_USER_EVENTS`] exist.
    fn create_user_event(&self) -> Result<Event> {
        fail!(Unsupported, "the {} device has no user events", self.facts().name)
    }

    /// Signals a user event; work that waits for it proceeds. Signalling it again does nothing.
    /// [`Status::Handle`]: it is not a user event of this device. Closing a device signals all
    /// pending user events.
    fn signal_event(&self, event: Event) -> Result<()> {
        fail!(
            Handle,
            "event {:#x} is not a user event of the {} device",
            event.0,
            self.facts().name
        )
    }

    /// Signals all pending user events.
    fn signal_all_events(&self) {}

    /// Submits kernels to a stream, as `submit` does with copies.
    ///
    /// # Safety
    /// As for `submit`: all memory that the calls name belongs to the device until the event is
    /// done.
    unsafe fn launch(&self, stream: Stream, after: Option<Event>, calls: &[Call]) -> Result<Event> {
        let _ = (stream, after);
        fail!(
            Unsupported,
            "the {} device has no kernels ({} requested)",
            self.facts().name,
            calls.len()
        )
    }

    /// Whether `submit` of these copies may block until earlier work has completed, because the
    /// driver accesses host memory inside the call.
    fn may_block_submit(&self, copies: &[Copy<'_>]) -> bool {
        let _ = copies;
        false
    }

    /// Number of streams that are never leased: streams 0 to this minus one. Work that must not
    /// wait long for others' work uses one of these.
    fn shared_streams(&self) -> u32 {
        self.facts().streams
    }

    /// Leases a stream for exclusive use until [`Device::return_stream`]. It serves batches that
    /// wait for late events, so that they delay nothing else. [`Status::Again`]: no stream is
    /// available now.
    fn lease_stream(&self) -> Result<Stream> {
        fail!(Again, "the {} device leases no streams", self.facts().name)
    }

    /// Returns a leased stream, after all work on it has completed.
    fn return_stream(&self, stream: Stream) {
        let _ = stream;
    }

    /// Granularity of positions and lengths in windows of the device. [`Status::Unsupported`]: it
    /// has no windows.
    fn window_granularity(&self) -> Result<u64> {
        let name = self.facts().name;
        fail!(Unsupported, "the {name} device has no windows (reserved addresses)")
    }

    /// Reserves at least `bytes` of address space, without memory.
    fn window(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        self.window_granularity()?;
        fail!(
            Unsupported,
            "the {} device cannot reserve {bytes} bytes of addresses",
            self.facts().name
        )
    }

    /// Direct reads from files into device memory. [`Status::Unavailable`] names what the machine
    /// lacks.
    fn direct(&self) -> Result<&dyn Direct> {
        fail!(Unsupported, "the {} device has no direct file reads", self.facts().name)
    }

    /// Free device memory, if the device has memory of its own and knows how much is free.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Rejects new batches, then waits for work in flight until a deadline (0 = none); after it
    /// returns [`Status::Busy`]. Callers may free memory after success. Events stay valid until the
    /// device is dropped.
    fn close(&self, deadline_ns: u64) -> Result<()>;
}

/// Checks that all devices share.
fn check(facts: &Facts, stream: Stream, copies: &[Copy<'_>]) -> Result<()> {
    if stream.0 >= facts.streams {
        fail!(Invalid, "stream {}: the device has {}", stream.0, facts.streams);
    }
    if copies.len() > MAX_COPIES {
        fail!(Limit, "{} copies in a batch, the limit is {MAX_COPIES}", copies.len());
    }
    for copy in copies {
        if copy.plane.is_null() {
            return Err(Status::Invalid.into());
        }
        let is_device = [copy.memory, copy.plane_memory].contains(&Memory::Device);
        if is_device && !facts.reaches_device {
            fail!(Unsupported, "the {} device cannot access device memory", facts.name);
        }
    }
    Ok(())
}
