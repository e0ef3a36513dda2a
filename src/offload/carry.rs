//! Who copies for an offload beside the store: rows to and from tails, and keys that policies
//! read to where the processor reaches them.

use crate::base::account::Account;
use crate::base::memory::{Buffer, MemoryWish};
use crate::base::status::{Result, Status};
use crate::base::sync::Arc;
use crate::device::host::Host;
use crate::device::{Copy, Device, Event, Memory, State, Stream, Way};
use crate::offload::opts::Geometry;
use crate::offload::source::canonical;
use crate::store::state::session::{PlaneView, Tokens};

/// Least memory for keys: it is told to the device, which takes its time.
const LEAST_BYTES: u64 = 64 << 10;

/// The store's device, and what it has to wait for.
pub(super) struct Carrier {
    pub device: Arc<dyn Device>,
    /// What is copied from now on waits for this.
    pub after: Option<Event>,
}

impl Carrier {
    /// Waits until what the engine has said to wait for has come: before the processor reads.
    pub fn settle(&self) -> Result<()> {
        match self.after {
            Some(event) => self.device.wait(event, 0),
            None => Ok(()),
        }
    }

    /// What the engine has said to wait for, if it has not come.
    pub fn open(&self) -> Option<Event> {
        self.after.filter(|event| !matches!(self.device.state(*event), Ok(State::Done)))
    }

    /// Copies from memory of the engine's, or to buffers that its kernels may have read: behind
    /// what it has said to wait for. All has ended when this returns.
    ///
    /// # Safety
    /// As [`Device::submit`].
    pub unsafe fn carry_behind(&self, copies: &mut [Copy<'_>]) -> Result<()> {
        let Some(after) = self.open() else {
            // SAFETY: the caller's promise.
            return unsafe { self.carry(copies) };
        };
        // On a stream of its own it holds nobody up.
        let lent = if are_host(copies) { None } else { self.device.lend().ok() };
        let Some(lent) = lent else {
            self.device.wait(after, 0)?;
            // SAFETY: the caller's promise.
            return unsafe { self.carry(copies) };
        };
        // SAFETY: the caller's promise.
        let ended = unsafe { self.carry_on(lent, Some(after), copies) };
        self.device.take_back(lent);
        ended
    }

    /// Copies within memory of the offload's own. All has ended when this returns.
    ///
    /// # Safety
    /// As [`Device::submit`].
    pub unsafe fn carry(&self, copies: &mut [Copy<'_>]) -> Result<()> {
        if are_host(copies) {
            // SAFETY: the caller's promise; it is done when `submit` returns.
            return unsafe { Host::default().submit(Stream(0), None, copies) }.map(|_| ());
        }
        // The store's hands begin with the first.
        let stream = Stream(self.device.common_streams().saturating_sub(1));
        // SAFETY: the caller's promise.
        unsafe { self.carry_on(stream, None, copies) }
    }

    /// # Safety
    /// As [`Device::submit`].
    unsafe fn carry_on(
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
    copies.iter().all(|copy| [copy.memory, copy.plane_memory] == [Memory::Host; 2])
}

/// Rows of a plane, to an address on.
pub(super) fn rows_to<'a>(
    plane: &'a PlaneView,
    (first, tokens): (u32, u32),
    to: u64,
    to_memory: Memory,
) -> Result<Copy<'a>> {
    let target = std::ptr::with_exposed_provenance_mut(to as usize);
    let copy = Copy::new(&plane.view(), first, tokens, target, Way::Gather)?;
    Ok(Copy { memory: plane.memory, plane_memory: to_memory, ..copy })
}

/// Bytes from one place to another.
pub(super) fn bytes_to(
    (from, from_memory): (u64, Memory),
    (to, to_memory): (u64, Memory),
    bytes: u64,
) -> Result<Copy<'static>> {
    let target = std::ptr::with_exposed_provenance_mut(to as usize);
    let copy = Copy::bytes(target, from, bytes, Way::Gather, from_memory)?;
    Ok(Copy { plane_memory: to_memory, ..copy })
}

/// Where a plane begins that is in one piece.
pub(super) fn address_of(plane: &PlaneView) -> Result<u64> {
    match plane.place {
        Tokens::At(address) => Ok(address),
        Tokens::Pages { .. } => Err(Status::Invalid.into()),
    }
}

/// Host memory that a device was told of.
struct Known {
    buffer: Buffer,
    device: Arc<dyn Device>,
}

impl Drop for Known {
    fn drop(&mut self) {
        // SAFETY: copies to it have ended when `carry` returns.
        if let Err(error) = unsafe { self.device.forget_host(self.buffer.address()) } {
            log::warn!("host memory that keys came to: {error}");
        }
    }
}

/// Keys in host memory, of one put or one seal. The memory stays for the next.
#[derive(Default)]
pub(super) struct Staging {
    memory: Option<Known>,
}

impl Staging {
    /// Brings rows of keys here, all in one batch; what each plane is then. The engine's own
    /// come behind what it has said to wait for.
    ///
    /// # Safety
    /// The planes lead to memory that can be read, and that nobody writes.
    pub unsafe fn bring(
        &mut self,
        by: &Carrier,
        account: Option<&Arc<Account>>,
        geometry: &Geometry,
        planes: &[PlaneView],
        are_engines: bool,
    ) -> Result<Vec<PlaneView>> {
        let bytes_of = |plane: &PlaneView| u64::from(plane.tokens) * geometry.k_bytes;
        let all = planes.iter().map(bytes_of).sum();
        let buffer = self.room(&by.device, account, all)?;
        let (mut here, mut copies) = (Vec::new(), Vec::new());
        here.try_reserve_exact(planes.len()).map_err(|_| Status::NoMem)?;
        copies.try_reserve_exact(planes.len()).map_err(|_| Status::NoMem)?;
        let mut at = 0;
        for plane in planes {
            let Some(to) = buffer.range(at, bytes_of(plane)) else {
                return Err(Status::Invalid.into());
            };
            let (to, heads) = (to.expose_provenance() as u64, geometry.shape.key_heads);
            copies.push(rows_to(plane, (0, plane.tokens), to, Memory::Host)?);
            here.push(canonical((to, Memory::Host), plane.tokens, heads, geometry.k_bytes));
            at += bytes_of(plane);
        }
        // SAFETY: the caller's promise; the buffer is this call's.
        let came = unsafe {
            if are_engines { by.carry_behind(&mut copies) } else { by.carry(&mut copies) }
        };
        came.map(|()| here)
    }

    fn room(
        &mut self,
        device: &Arc<dyn Device>,
        account: Option<&Arc<Account>>,
        bytes: u64,
    ) -> Result<&Buffer> {
        if self.memory.as_ref().is_none_or(|known| known.buffer.bytes() < bytes) {
            self.memory = None;
            let bytes = bytes.max(LEAST_BYTES).checked_next_power_of_two().ok_or(Status::Limit)?;
            let wish = MemoryWish { bytes, account: account.cloned(), ..Default::default() };
            let buffer = Buffer::map(&wish, None)?;
            // SAFETY: it stays until it is forgotten.
            unsafe { device.know_host(buffer.address(), buffer.bytes())? };
            self.memory = Some(Known { buffer, device: device.clone() });
        }
        match &self.memory {
            Some(known) => Ok(&known.buffer),
            None => Err(Status::NoMem.into()),
        }
    }
}
