//! Copy engines: who moves bytes, sums them and compares them.
//!
//! A [`Device`] copies between the tensors of an engine and the canonical planes of
//! the store. Work is put on *streams*: in order within one, in any order across
//! them. Each batch ends with an *event*. What a caller must wait for:
//!
//! - a source must be complete, and a target no longer in use by others, when the
//!   event given as `after` is done (none: when the batch is submitted);
//! - a source must stay as it is, and a target is not to be read or written, until
//!   the batch's own event is done.
//!
//! An event may be given as `after`, or waited on, from when `submit` has returned it.

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

/// Most streams of a device.
pub const MAX_STREAMS: u32 = 64;
/// Most streams that a device lends at a time, where it makes them for that.
pub const MAX_LEASED_STREAMS: usize = 16;
/// Most promises of a device that are known at once.
pub const MAX_USER_EVENTS: usize = 1024;
/// Most copies of one batch.
pub const MAX_COPIES: usize = 65_536;

/// A queue of a device: 0 to [`Facts::streams`] - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u32);

/// A moment on a stream, of one device. Numbers are not used again soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(pub u64);

/// How far an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Not yet.
    Pending,
    /// It has come to pass.
    Done,
}

/// Where an address is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The processor reaches it.
    Host,
    /// Only the device does.
    Device,
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the tensor into the plane.
    Gather,
    /// From the plane into the tensor.
    Scatter,
}

/// Memory that a device has set aside: [`Device::allocate`]. It is not freed by being
/// forgotten: what was not given back goes with its device.
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Where it starts: a multiple of 256.
    pub address: u64,
    /// How long it is.
    pub bytes: u64,
    /// Where the address is valid.
    pub memory: Memory,
    /// Which one of its device's it is.
    pub(crate) number: u64,
}

/// What a device is and can do.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// Its kind.
    pub name: &'static str,
    /// Work goes on after `submit` has returned. Where not, events are done by then.
    pub asynchronous: bool,
    /// It sums planes on the way. Where not, whoever wants a sum makes it after. An asynchronous
    /// device that does sums what lies in its own memory, so that bytes can be held against that
    /// which have crossed a bus: whoever copies is to do so.
    pub sums: bool,
    /// It reaches [`Memory::Device`].
    pub reaches_device: bool,
    /// Planes must be in pinned memory, or copies are slow and not asynchronous.
    pub wants_pinned: bool,
    /// How many streams it has.
    pub streams: u32,
    /// The kernels it has: a bit for each [`call::Kind`].
    pub kernels: u64,
}

/// One plane to copy, between a tensor and canonical order.
pub struct Copy<'a> {
    /// The tokens of the tensor; for [`Direction::Scatter`] checked as a target.
    pub tensor: Span<'a>,
    /// Where the tensor is valid.
    pub memory: Memory,
    /// The plane: as many bytes as the span has.
    pub plane: *mut u8,
    /// Where the plane is valid.
    pub plane_memory: Memory,
    /// Which way.
    pub direction: Direction,
    /// Its checksum is wanted: of the plane, in canonical order. An asynchronous device sums the
    /// side that is in its memory, what was read there or what is there now; where both are, the
    /// target.
    pub wants_sum: bool,
    /// The checksum of the plane, if that was wanted and the device makes sums. Of asynchronous
    /// devices it is to be asked for: [`Device::sums`].
    pub sum: u64,
}

impl<'a> Copy<'a> {
    /// A copy of tokens of a view in host memory, without a sum.
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
        Ok(Copy { tensor, memory, plane, plane_memory, direction, wants_sum: false, sum: 0 })
    }
}

impl Copy<'static> {
    /// A copy of plain bytes between host memory and where `memory` says, without a sum:
    /// [`Direction::Scatter`] goes to the device.
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
    /// What it is.
    fn facts(&self) -> Facts;

    /// The same in words, for people: what it is called, and how it copies.
    fn describe(&self) -> String {
        self.facts().name.to_string()
    }

    /// Puts a batch on a stream, behind what is there and behind `after`. A batch
    /// without copies only marks the place. What is refused was not begun; when
    /// `after` has failed, that is its status.
    ///
    /// # Safety
    /// The memory of every copy is valid for its way, tensor and plane of a copy do
    /// not overlap, and nobody touches them but as this module says, until the event
    /// is done or has failed.
    unsafe fn submit(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<Event>;

    /// How far an event is. The error it failed with, if it did: what its targets
    /// have is then not known, and the device touches them no more.
    fn state(&self, event: Event) -> Result<State>;

    /// Waits for an event until a deadline (0 = none), then [`Status::Timeout`].
    fn wait(&self, event: Event, deadline_ns: u64) -> Result<()>;

    /// The sums that copies of a batch wanted, in their order, from when its event has come until
    /// that is released; how many were written. [`Status::Busy`]: it has not come. Devices that
    /// are not asynchronous have put them into the copies.
    fn sums(&self, event: Event, sums: &mut [u64]) -> Result<usize> {
        let _ = sums;
        fail!(Unsupported, "the {} device has no sums of event {:#x}", self.facts().name, event.0)
    }

    /// Reports events that have ended, well or not; how many were written. An
    /// asynchronous device reports each event once, unless it is released before;
    /// others report none.
    fn poll(&self, ended: &mut [Event]) -> usize;

    /// Forgets an event that has ended; [`Status::Busy`] for one that has not. An
    /// asynchronous device has room for so many, then it refuses with [`Status::Again`].
    fn release(&self, event: Event) -> Result<()>;

    /// Releases an event as soon as it has ended: nobody asks for it any more.
    fn forget(&self, event: Event) {
        if let Err(error) = self.release(event) {
            log::warn!("an event stays known: {error}");
        }
    }

    /// Sets memory aside. [`Status::NoMem`] when there is not so much;
    /// [`Status::Unsupported`] when the device has none to give. What is in it is not said.
    fn allocate(&self, bytes: u64) -> Result<DeviceMemory> {
        fail!(Unsupported, "the {} device gives out no memory: {bytes} bytes", self.facts().name)
    }

    /// Gives memory back, once. [`Status::Handle`]: it is not this device's, or was given
    /// back; [`Status::Busy`]: work under way has been seen to use it.
    ///
    /// # Safety
    /// Nobody uses the memory any more, and no work that does is under way.
    unsafe fn free(&self, memory: &DeviceMemory) -> Result<()> {
        fail!(Handle, "the memory at {:#x} is not of this device", memory.address)
    }

    /// Tells the device of host memory that copies will use again and again, so that they are
    /// as fast as they can be. Devices to which all host memory is the same do nothing.
    ///
    /// # Safety
    /// The memory stays what it is until [`Device::unregister_host`].
    unsafe fn register_host(&self, address: *mut u8, bytes: u64) -> Result<()> {
        let _ = (address, bytes);
        Ok(())
    }

    /// Takes that back, before the memory goes.
    ///
    /// # Safety
    /// No work that uses the memory is under way.
    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        let _ = address;
        Ok(())
    }

    /// An event that comes when an event of the engine's own (for CUDA a `CUevent` that was
    /// recorded) has come: to be waited for by batches, and released like any other.
    ///
    /// # Safety
    /// It is such an event, and stays so until the event made of it has ended.
    unsafe fn import_event(&self, raw: u64) -> Result<Event> {
        fail!(Unsupported, "the {} device knows no event {raw:#x}", self.facts().name)
    }

    /// Has a stream of the engine's own (for CUDA a `CUstream`) go on only when an event has
    /// come. The calling thread does not wait.
    ///
    /// # Safety
    /// It is such a stream.
    unsafe fn stream_wait_event(&self, raw_stream: u64, event: Event) -> Result<()> {
        let _ = event;
        fail!(Unsupported, "the {} device knows no stream {raw_stream:#x}", self.facts().name)
    }

    /// An event that comes when it is said to: [`Device::keep`]. It can be waited for before
    /// that, by batches, streams and threads, and is released like any other.
    /// [`Status::Unsupported`] where there is no such thing; a device has room for some.
    fn create_user_event(&self) -> Result<Event> {
        fail!(Unsupported, "the {} device makes no promises", self.facts().name)
    }

    /// Has such an event come, if it has not: what waits for it goes on. [`Status::Handle`]: it
    /// is no promise of this device's. The device keeps all that are open when it is closed.
    fn signal_event(&self, event: Event) -> Result<()> {
        fail!(Handle, "event {:#x} is no promise of the {} device's", event.0, self.facts().name)
    }

    /// Keeps all promises that are open: what they were to wait for ends now.
    fn signal_all_events(&self) {}

    /// Puts kernels on a stream, as `submit` does copies.
    ///
    /// # Safety
    /// As for `submit`: all memory that the calls name is the device's to use until the event.
    unsafe fn launch(&self, stream: Stream, after: Option<Event>, calls: &[Call]) -> Result<Event> {
        let _ = (stream, after);
        fail!(Unsupported, "the {} device has no kernels: {}", self.facts().name, calls.len())
    }

    /// Whether `submit` keeps its caller until what such copies are behind has ended: where the
    /// driver takes bytes only then, in the call.
    fn may_block_submit(&self, copies: &[Copy<'_>]) -> bool {
        let _ = copies;
        false
    }

    /// Streams that are never lent: 0 to one less than this. What must not wait for long behind
    /// anything of others' goes to one of these.
    fn shared_streams(&self) -> u32 {
        self.facts().streams
    }

    /// Lends a stream that the device gives to nobody else until [`Device::return_stream`]: for
    /// batches behind events that may come late, so that they hold up nothing else.
    /// [`Status::Again`]: there is none, or none now.
    fn lease_stream(&self) -> Result<Stream> {
        fail!(Again, "the {} device has no stream to lend", self.facts().name)
    }

    /// Takes such a stream back, when all that was put on it has ended.
    fn return_stream(&self, stream: Stream) {
        let _ = stream;
    }

    /// What places and lengths in windows of the device are multiples of.
    /// [`Status::Unsupported`] where it has none.
    fn window_granularity(&self) -> Result<u64> {
        let name = self.facts().name;
        fail!(Unsupported, "the {name} device has no addresses that stay while memory moves")
    }

    /// Reserves at least so many bytes of addresses, without memory.
    fn window(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        self.window_granularity()?;
        fail!(Unsupported, "the {} device reserves no {bytes} addresses", self.facts().name)
    }

    /// What reads files straight into the device's memory.
    /// [`Status::Unavailable`] and why not, where the machine has not all that it takes.
    fn direct(&self) -> Result<&dyn Direct> {
        fail!(Unsupported, "the {} device reads no files by itself", self.facts().name)
    }

    /// What the device has left to give, if it has memory of its own and knows.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Refuses new batches and waits for what is under way until a deadline (0 =
    /// none), then [`Status::Busy`]. Memory may be freed after it has succeeded;
    /// events are known until the device is dropped.
    fn close(&self, deadline_ns: u64) -> Result<()>;
}

/// Checks what all devices refuse.
fn check(facts: &Facts, stream: Stream, copies: &[Copy<'_>]) -> Result<()> {
    if stream.0 >= facts.streams {
        fail!(Invalid, "stream {} of {}", stream.0, facts.streams);
    }
    if copies.len() > MAX_COPIES {
        fail!(Limit, "{} copies in a batch, {MAX_COPIES} can be", copies.len());
    }
    for copy in copies {
        if copy.plane.is_null() {
            return Err(Status::Invalid.into());
        }
        let is_device = [copy.memory, copy.plane_memory].contains(&Memory::Device);
        if is_device && !facts.reaches_device {
            fail!(Unsupported, "the {} device does not reach device memory", facts.name);
        }
    }
    Ok(())
}
