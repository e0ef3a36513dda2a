//! A range of the device's addresses of which only some have memory: weights keep their addresses
//! while the memory behind them moves along with the model.

use std::collections::BTreeMap;

use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::device::cuda::Cuda;
use crate::device::cuda::inside::Inside;
use crate::device::cuda::words::{
    ACCESS_READ_WRITE, AccessOf, Allocation, GRAIN_LEAST, LOCATION_DEVICE, MEMORY_STAYS, Pointer,
};
use crate::fail;

/// Addresses that stay reserved until this is dropped, with whatever is mapped into them.
pub struct Window {
    cuda: Arc<Cuda>,
    start: Pointer,
    bytes: u64,
    grain_bytes: u64,
    /// What is mapped, by where it begins: the driver's handle, and how much.
    pieces: Mutex<BTreeMap<u64, (u64, u64)>>,
}

impl Window {
    /// Reserves at least so many bytes of addresses. [`Status::Unsupported`] where the driver
    /// cannot.
    pub fn new(cuda: Arc<Cuda>, bytes: u64) -> Result<Window> {
        let of = of_device(&cuda);
        let inside = cuda.enter()?;
        let (call, reserve) = (&cuda.driver, there(cuda.driver.reserve)?);
        let (mut grain, mut start) = (0, 0);
        // SAFETY: a description and a place for a number.
        let code = unsafe { there(call.granularity)?(&mut grain, &of, GRAIN_LEAST) };
        call.check("cuMemGetAllocationGranularity", code)?;
        let Some(whole) = bytes.checked_next_multiple_of(grain.max(1) as u64) else {
            return Err(Status::Limit.into());
        };
        if whole == 0 {
            fail!(Invalid, "a window of no addresses");
        }
        // SAFETY: a place for an address; any will do.
        let code = unsafe { reserve(&mut start, whole as usize, 0, 0, 0) };
        call.check("cuMemAddressReserve", code)?;
        drop(inside);
        let (grain_bytes, pieces) = (grain as u64, Mutex::new(BTreeMap::new()));
        Ok(Window { cuda, start, bytes: whole, grain_bytes, pieces })
    }

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.start
    }

    /// How long it is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What places and lengths are multiples of.
    pub fn grain_bytes(&self) -> u64 {
        self.grain_bytes
    }

    /// How much memory is mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.pieces.lock().values().map(|piece| piece.1).sum()
    }

    /// Puts new memory of the device behind a part of the addresses.
    pub fn map(&self, at: u64, bytes: u64) -> Result<()> {
        let mut pieces = self.pieces.lock();
        self.check(&pieces, at, bytes)?;
        let of = of_device(&self.cuda);
        let inside = self.cuda.enter()?;
        let mut handle = 0;
        // SAFETY: a place for a handle, and a description.
        let code =
            unsafe { there(self.cuda.driver.create_memory)?(&mut handle, bytes as usize, &of, 0) };
        self.cuda.driver.check("cuMemCreate", code)?;
        match self.attach(&inside, at, bytes, handle) {
            Ok(()) => {
                pieces.insert(at, (handle, bytes));
                Ok(())
            }
            Err(error) => {
                self.release(&inside, handle);
                Err(error)
            }
        }
    }

    /// Takes the memory from a part of the addresses that was mapped as a whole, and puts it
    /// behind another. What is in it stays.
    ///
    /// # Safety
    /// No work that is under way uses either part.
    pub unsafe fn shift(&self, from: u64, to: u64) -> Result<()> {
        let mut pieces = self.pieces.lock();
        let Some(&(handle, bytes)) = pieces.get(&from) else {
            fail!(Invalid, "nothing is mapped at {from} of a window");
        };
        let inside = self.cuda.enter()?;
        pieces.remove(&from);
        let checked = self.check(&pieces, to, bytes);
        if checked.is_err() {
            pieces.insert(from, (handle, bytes));
            return checked;
        }
        if let Err(error) = self.detach(&inside, from, bytes) {
            pieces.insert(from, (handle, bytes));
            return Err(error);
        }
        let attached = self.attach(&inside, to, bytes, handle);
        match attached {
            Ok(()) => drop(pieces.insert(to, (handle, bytes))),
            Err(_) => self.release(&inside, handle),
        }
        attached
    }

    /// Takes the memory back from a part of the addresses that was mapped as a whole.
    ///
    /// # Safety
    /// No work that is under way uses it.
    pub unsafe fn unmap(&self, at: u64) -> Result<()> {
        let mut pieces = self.pieces.lock();
        let Some(&(handle, bytes)) = pieces.get(&at) else {
            fail!(Invalid, "nothing is mapped at {at} of a window");
        };
        let inside = self.cuda.enter()?;
        self.detach(&inside, at, bytes)?;
        pieces.remove(&at);
        self.release(&inside, handle);
        Ok(())
    }

    fn check(&self, pieces: &BTreeMap<u64, (u64, u64)>, at: u64, bytes: u64) -> Result<()> {
        let end = at.checked_add(bytes).filter(|end| *end <= self.bytes);
        let grain = self.grain_bytes;
        let (Some(end), true) = (end, bytes > 0 && at % grain == 0 && bytes % grain == 0) else {
            fail!(Invalid, "{bytes} bytes at {at} of a window of {}, by {grain}", self.bytes);
        };
        let before = pieces.range(..end).next_back();
        if before.is_some_and(|(start, piece)| start + piece.1 > at) {
            fail!(Invalid, "{bytes} bytes at {at} of a window are mapped already");
        }
        Ok(())
    }

    /// Gives memory its address, and the device leave to use it.
    fn attach(&self, _inside: &Inside<'_>, at: u64, bytes: u64, handle: u64) -> Result<()> {
        let (call, address, bytes) = (&self.cuda.driver, self.start + at, bytes as usize);
        // SAFETY: a part of what is reserved, to which nothing is mapped, and memory that long.
        call.check("cuMemMap", unsafe { there(call.map)?(address, bytes, 0, handle, 0) })?;
        let who =
            AccessOf { location: [LOCATION_DEVICE, self.cuda.ordinal], flags: ACCESS_READ_WRITE };
        let set = there(call.set_access).and_then(|set_access| {
            // SAFETY: what was mapped just now, and one description.
            call.check("cuMemSetAccess", unsafe { set_access(address, bytes, &who, 1) })
        });
        set.inspect_err(|_| {
            if let Some(unmap) = call.unmap {
                // SAFETY: nobody could use it yet.
                call.note("cuMemUnmap", unsafe { unmap(address, bytes) });
            }
        })
    }

    fn detach(&self, _inside: &Inside<'_>, at: u64, bytes: u64) -> Result<()> {
        let call = &self.cuda.driver;
        // SAFETY: a piece as it was mapped; nobody uses it, as the caller promised.
        let code = unsafe { there(call.unmap)?(self.start + at, bytes as usize) };
        call.check("cuMemUnmap", code)
    }

    fn release(&self, _inside: &Inside<'_>, handle: u64) {
        let call = &self.cuda.driver;
        if let Some(release) = call.release_memory {
            // SAFETY: memory that this window made, and gives back once.
            call.note("cuMemRelease", unsafe { release(handle) });
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        let call = &self.cuda.driver;
        let inside = match self.cuda.enter() {
            Ok(inside) => inside,
            Err(error) => return log::warn!("a window stays: {}", error.message()),
        };
        for (at, (handle, bytes)) in std::mem::take(&mut *self.pieces.lock()) {
            if let Err(error) = self.detach(&inside, at, bytes) {
                log::warn!("a part of a window stays: {}", error.message());
            }
            self.release(&inside, handle);
        }
        if let Some(unreserve) = call.unreserve {
            // SAFETY: what was reserved, with nothing mapped to it.
            call.note("cuMemAddressFree", unsafe { unreserve(self.start, self.bytes as usize) });
        }
    }
}

/// Memory of the device.
fn of_device(cuda: &Cuda) -> Allocation {
    Allocation {
        kind: MEMORY_STAYS,
        handles: 0,
        location: [LOCATION_DEVICE, cuda.ordinal],
        unused: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

/// A function that the driver may lack.
fn there<F>(function: Option<F>) -> Result<F> {
    function.ok_or_else(|| Error::new(Status::Unsupported, "the driver maps no memory"))
}
