//! Windows of CUDA devices: addresses of weights stay the same while memory behind them is
//! remapped.

use crate::base::status::{Error, Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::device::cuda::Cuda;
use crate::device::cuda::abi::{
    ACCESS_READ_WRITE, AccessOf, Allocation, GRANULARITY_MINIMUM, LOCATION_DEVICE, MEMORY_STAYS,
    Pointer,
};
use crate::device::cuda::context::ContextGuard;
use crate::device::window::{Piece, PieceState, Pieces, Window};
use crate::fail;

/// Driver's state of a piece.
#[derive(Clone, Copy)]
struct Memory {
    handle: u64,
    /// The device may access it. False if mapping succeeded, and setting access and unmapping
    /// failed.
    is_open: bool,
}

/// Addresses that stay reserved until this is dropped, and the memory mapped into them.
pub struct CudaWindow {
    cuda: Arc<Cuda>,
    start: Pointer,
    bytes: u64,
    granularity_bytes: u64,
    /// Locked during driver calls, so that the table matches the driver.
    pieces: Mutex<Pieces<Memory>>,
}

/// Granularity of positions and lengths. [`Status::Unsupported`]: the driver cannot map memory.
pub(super) fn granularity(cuda: &Cuda) -> Result<u64> {
    let of = of_device(cuda);
    let (call, mut granularity) = (&cuda.driver, 0);
    let query_granularity = required(call.granularity)?;
    let _guard = cuda.enter()?;
    // SAFETY: a description and a place for a number.
    call.check("cuMemGetAllocationGranularity", unsafe {
        query_granularity(&mut granularity, &of, GRANULARITY_MINIMUM)
    })?;
    Ok(granularity.max(1) as u64)
}

impl CudaWindow {
    /// Reserves at least `bytes` of addresses. [`Status::Unsupported`]: the driver cannot map
    /// memory.
    pub fn new(cuda: Arc<Cuda>, bytes: u64) -> Result<CudaWindow> {
        let granularity_bytes = granularity(&cuda)?;
        let Some(whole) = bytes.checked_next_multiple_of(granularity_bytes) else {
            return Err(Status::Limit.into());
        };
        if whole == 0 {
            fail!(Invalid, "a window of 0 bytes");
        }
        let (reserve, mut start) = (required(cuda.driver.reserve)?, 0);
        let inside = cuda.enter()?;
        // SAFETY: a place for an address; any will do.
        let code = unsafe { reserve(&mut start, whole as usize, 0, 0, 0) };
        cuda.driver.check("cuMemAddressReserve", code)?;
        drop(inside);
        let pieces = Mutex::new(Pieces::new(whole, granularity_bytes));
        Ok(CudaWindow { cuda, start, bytes: whole, granularity_bytes, pieces })
    }

    /// Mapped bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.pieces.lock().placed_bytes()
    }

    /// Maps memory and enables access of the device. Returns whether it is mapped, and the result.
    fn attach(
        &self,
        inside: &ContextGuard<'_>,
        at: u64,
        known: &PieceState<Memory>,
    ) -> (bool, Result<()>) {
        let (call, address, bytes) = (&self.cuda.driver, self.start + at, known.bytes as usize);
        let mapped = required(call.map).and_then(|map| {
            // SAFETY: an unmapped part of the reservation, and memory of that length.
            call.check("cuMemMap", unsafe { map(address, bytes, 0, known.own.handle, 0) })
        });
        if mapped.is_err() {
            return (false, mapped);
        }
        let access =
            AccessOf { location: [LOCATION_DEVICE, self.cuda.ordinal], flags: ACCESS_READ_WRITE };
        let set = required(call.set_access).and_then(|set_access| {
            // SAFETY: mapped just now, and one description.
            call.check("cuMemSetAccess", unsafe { set_access(address, bytes, &access, 1) })
        });
        // Nothing uses the memory yet.
        let stays = set.is_ok() || self.detach(inside, at, known.bytes).is_err();
        (stays, set)
    }

    fn detach(&self, _guard: &ContextGuard<'_>, at: u64, bytes: u64) -> Result<()> {
        let call = &self.cuda.driver;
        // SAFETY: a piece as it was mapped; nothing uses it, as the caller promised.
        let code = unsafe { required(call.unmap)?(self.start + at, bytes as usize) };
        call.check("cuMemUnmap", code)
    }

    fn release(&self, _guard: &ContextGuard<'_>, handle: u64) -> Result<()> {
        let call = &self.cuda.driver;
        let release = required(call.release_memory)?;
        // SAFETY: memory that this window allocated, and frees once.
        call.check("cuMemRelease", unsafe { release(handle) })
    }

    /// Unmaps a piece, if it is mapped.
    fn free_place(
        &self,
        inside: &ContextGuard<'_>,
        pieces: &mut Pieces<Memory>,
        piece: Piece,
    ) -> Result<PieceState<Memory>> {
        let mut known = pieces.get(piece)?;
        if let Some(at) = known.at {
            self.detach(inside, at, known.bytes)?;
            pieces.set(piece, known.own, None);
            known.at = None;
        }
        Ok(known)
    }
}

impl Window for CudaWindow {
    fn address(&self) -> u64 {
        self.start
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    fn create(&self, bytes: u64) -> Result<Piece> {
        self.pieces.lock().check_length(bytes)?;
        let (of, call, mut handle) = (of_device(&self.cuda), &self.cuda.driver, 0);
        let create = required(call.create_memory)?;
        let _guard = self.cuda.enter()?;
        // SAFETY: a place for a handle, and a description.
        let code = unsafe { create(&mut handle, bytes as usize, &of, 0) };
        call.check("cuMemCreate", code)?;
        Ok(self.pieces.lock().add(Memory { handle, is_open: false }, bytes))
    }

    unsafe fn put(&self, piece: Piece, at: u64) -> Result<()> {
        let mut pieces = self.pieces.lock();
        pieces.check_place(piece, at)?;
        let known = pieces.get(piece)?;
        if known.at == Some(at) && known.own.is_open {
            return Ok(());
        }
        let inside = self.cuda.enter()?;
        let known = self.free_place(&inside, &mut pieces, piece)?;
        let (is_there, attached) = self.attach(&inside, at, &known);
        let own = Memory { is_open: attached.is_ok(), ..known.own };
        pieces.set(piece, own, is_there.then_some(at));
        attached
    }

    unsafe fn take(&self, piece: Piece) -> Result<()> {
        let mut pieces = self.pieces.lock();
        if pieces.get(piece)?.at.is_none() {
            return Ok(());
        }
        let inside = self.cuda.enter()?;
        self.free_place(&inside, &mut pieces, piece).map(|_| ())
    }

    unsafe fn destroy(&self, piece: Piece) -> Result<()> {
        let mut pieces = self.pieces.lock();
        pieces.get(piece)?;
        let inside = self.cuda.enter()?;
        let known = self.free_place(&inside, &mut pieces, piece)?;
        self.release(&inside, known.own.handle)?;
        pieces.remove(piece);
        Ok(())
    }
}

impl Drop for CudaWindow {
    fn drop(&mut self) {
        let call = &self.cuda.driver;
        let inside = match self.cuda.enter() {
            Ok(inside) => inside,
            Err(error) => return log::warn!("a window leaks: {}", error.message()),
        };
        let mut pieces = self.pieces.lock();
        for piece in pieces.all() {
            let Ok(known) = pieces.get(piece) else { continue };
            if let Err(error) = self.free_place(&inside, &mut pieces, piece) {
                log::warn!("a part of a window leaks: {}", error.message());
            }
            if let Err(error) = self.release(&inside, known.own.handle) {
                log::warn!("memory of a window leaks: {}", error.message());
            }
        }
        if let Some(unreserve) = call.unreserve {
            // SAFETY: the reservation, with nothing mapped.
            call.note("cuMemAddressFree", unsafe { unreserve(self.start, self.bytes as usize) });
        }
    }
}

/// Description of the device's memory.
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
fn required<F>(function: Option<F>) -> Result<F> {
    function
        .ok_or_else(|| Error::new(Status::Unsupported, "the driver cannot map memory (cuMemMap)"))
}
