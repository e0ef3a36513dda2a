//! Copies that an offload makes itself: rows to and from tails, and keys to host memory for
//! policies.

use crate::base::account::Account;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::host::Host;
use crate::device::{Copy, Device, Direction, Event, Memory, State, Stream};
use crate::offload::opts::Geometry;
use crate::offload::views::canonical;
use crate::store::state::session::{PlaneView, Tokens};

/// Smallest buffer for keys: registering it with the device is slow.
const LEAST_BYTES: u64 = 64 << 10;

/// The store's device, and the event that copies wait for.
pub(super) struct Copier {
    pub device: Arc<dyn Device>,
    /// The ready event of later copies.
    pub after: Option<Event>,
}

impl Copier {
    /// Waits for the ready event, before the processor reads.
    pub fn wait_until_ready(&self) -> Result<()> {
        match self.after {
            Some(event) => self.device.wait(event, 0),
            None => Ok(()),
        }
    }

    /// The ready event, if it has not completed.
    pub fn pending_event(&self) -> Option<Event> {
        self.after.filter(|event| !matches!(self.device.state(*event), Ok(State::Done)))
    }

    /// Copies from the engine's memory, or to buffers that its kernels may have read, after the
    /// ready event. The copies have completed when this returns.
    ///
    /// # Safety
    /// As [`Device::submit`].
    pub unsafe fn copy_after_event(&self, copies: &mut [Copy<'_>]) -> Result<()> {
        let Some(after) = self.pending_event() else {
            // SAFETY: the caller's promise.
            return unsafe { self.copy(copies) };
        };
        // A stream of its own blocks no other copies.
        let lent = if are_host(copies) { None } else { self.device.lease_stream().ok() };
        let Some(lent) = lent else {
            self.device.wait(after, 0)?;
            // SAFETY: the caller's promise.
            return unsafe { self.copy(copies) };
        };
        // SAFETY: the caller's promise.
        let ended = unsafe { self.copy_on(lent, Some(after), copies) };
        self.device.return_stream(lent);
        ended
    }

    /// Copies within the offload's own memory. The copies have completed when this returns.
    ///
    /// # Safety
    /// As [`Device::submit`].
    pub unsafe fn copy(&self, copies: &mut [Copy<'_>]) -> Result<()> {
        if are_host(copies) {
            // SAFETY: the caller's promise; the host copies before `submit` returns.
            return unsafe { Host::default().submit(Stream(0), None, copies) }.map(|_| ());
        }
        // The streams of the store's workers begin after this one.
        let stream = Stream(self.device.shared_streams().saturating_sub(1));
        // SAFETY: the caller's promise.
        unsafe { self.copy_on(stream, None, copies) }
    }

    /// # Safety
    /// As [`Device::submit`].
    unsafe fn copy_on(
        &self,
        stream: Stream,
        after: Option<Event>,
        copies: &mut [Copy<'_>],
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let event = unsafe { self.device.submit(stream, after, copies)? };
        let ended = self.device.wait(event, 0);
        if self.device.facts().asynchronous {
            self.device.release(event)?;
        }
        ended
    }
}

fn are_host(copies: &[Copy<'_>]) -> bool {
    copies.iter().all(|job| [job.memory, job.plane_memory] == [Memory::Host; 2])
}

/// A copy of rows of a plane to consecutive memory.
pub(super) fn row_copy<'a>(
    plane: &'a PlaneView,
    (first, tokens): (u32, u32),
    to: u64,
    to_memory: Memory,
) -> Result<Copy<'a>> {
    let target = std::ptr::with_exposed_provenance_mut(to as usize);
    let job = Copy::new(&plane.view(), first, tokens, target, Direction::Gather)?;
    Ok(Copy { memory: plane.memory, plane_memory: to_memory, ..job })
}

/// A copy of bytes.
pub(super) fn byte_copy(
    (from, from_memory): (u64, Memory),
    (to, to_memory): (u64, Memory),
    bytes: u64,
) -> Result<Copy<'static>> {
    let target = std::ptr::with_exposed_provenance_mut(to as usize);
    let job = Copy::bytes(target, from, bytes, Direction::Gather, from_memory)?;
    Ok(Copy { plane_memory: to_memory, ..job })
}

/// The address of a contiguous plane.
pub(super) fn address_of(plane: &PlaneView) -> Result<u64> {
    match plane.place {
        Tokens::At(address) => Ok(address),
        Tokens::Pages { .. } => Err(Status::Invalid.into()),
    }
}

/// Host memory that is registered with a device.
struct RegisteredBuffer {
    buffer: Buffer,
    device: Arc<dyn Device>,
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // SAFETY: copies to the memory have completed when `copy` returns.
        if let Err(error) = unsafe { self.device.unregister_host(self.buffer.address()) } {
            log::warn!("host memory for keys stays registered with the device: {error}");
        }
    }
}

/// Keys in host memory, for one put or one seal. The memory is reused.
#[derive(Default)]
pub(super) struct KeyStaging {
    memory: Option<RegisteredBuffer>,
}

impl KeyStaging {
    /// Copies rows of keys to host memory in one batch. Returns a view of each plane. Copies from
    /// the engine's memory wait for the ready event.
    ///
    /// # Safety
    /// The planes are readable, and nothing writes them.
    pub unsafe fn copy_keys_to_host(
        &mut self,
        by: &Copier,
        account: Option<&Arc<Account>>,
        geometry: &Geometry,
        planes: &[PlaneView],
        are_engines: bool,
    ) -> Result<Vec<PlaneView>> {
        let bytes_of = |plane: &PlaneView| u64::from(plane.tokens) * geometry.k_bytes;
        let all = planes.iter().map(bytes_of).sum();
        let buffer = self.buffer_of(&by.device, account, all)?;
        let (mut host_planes, mut copies) = (Vec::new(), Vec::new());
        host_planes.try_reserve_exact(planes.len()).map_err(|_| Status::NoMem)?;
        copies.try_reserve_exact(planes.len()).map_err(|_| Status::NoMem)?;
        let mut at = 0;
        for plane in planes {
            let Some(to) = buffer.range(at, bytes_of(plane)) else {
                return Err(Status::Invalid.into());
            };
            let (to, heads) = (to.expose_provenance() as u64, geometry.shape.key_heads);
            copies.push(row_copy(plane, (0, plane.tokens), to, Memory::Host)?);
            host_planes.push(canonical((to, Memory::Host), plane.tokens, heads, geometry.k_bytes));
            at += bytes_of(plane);
        }
        // SAFETY: the caller's promise; the buffer belongs to this call.
        let copied = unsafe {
            if are_engines { by.copy_after_event(&mut copies) } else { by.copy(&mut copies) }
        };
        copied.map(|()| host_planes)
    }

    fn buffer_of(
        &mut self,
        device: &Arc<dyn Device>,
        account: Option<&Arc<Account>>,
        bytes: u64,
    ) -> Result<&Buffer> {
        if self.memory.as_ref().is_none_or(|known| known.buffer.bytes() < bytes) {
            self.memory = None;
            let bytes = bytes.max(LEAST_BYTES).checked_next_power_of_two().ok_or(Status::Limit)?;
            let request =
                AllocationRequest { bytes, account: account.cloned(), ..Default::default() };
            let buffer = Buffer::map(&request, None)?;
            // SAFETY: the memory stays until it is unregistered.
            unsafe { device.register_host(buffer.address(), buffer.bytes())? };
            self.memory = Some(RegisteredBuffer { buffer, device: device.clone() });
        }
        match &self.memory {
            Some(known) => Ok(&known.buffer),
            None => Err(Status::NoMem.into()),
        }
    }
}
