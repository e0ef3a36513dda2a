//! Windows of the simulated device: addresses without memory fault. Newly mapped memory is poison
//! until it is written, and unmapped memory loses its content.

use crate::base::status::{Result, Status};
use crate::base::sync::{Arc, Mutex};
use crate::base::window::Window as Range;
use crate::device::simulated::copy::LoweredCopy;
use crate::device::simulated::{POISON, Simulated};
use crate::device::window::{Piece, Pieces, Window};
use crate::fail;

/// Address range of a window.
pub struct Addresses {
    range: Range,
    /// Start of the window: the first address of the range that is a multiple of the granularity.
    start: u64,
    bytes: u64,
    granularity_bytes: u64,
    pieces: Mutex<Pieces<()>>,
}

struct SimulatedWindow {
    device: Arc<Simulated>,
    at: Arc<Addresses>,
}

impl Addresses {
    /// Offset in the underlying range.
    fn offset(&self, at: u64) -> u64 {
        self.start - self.range.address() as u64 + at
    }

    /// Whether the part of a range that lies in this window is mapped.
    fn backs(&self, (from, to): (u64, u64)) -> bool {
        let (from, to) = (from.max(self.start), to.min(self.start + self.bytes));
        from >= to || self.pieces.lock().covers(from - self.start, to - self.start)
    }
}

impl Simulated {
    pub(super) fn granularity(&self) -> Result<u64> {
        match self.opts.granularity_bytes {
            0 => fail!(Unsupported, "this simulated device has no windows"),
            granularity if granularity.is_power_of_two() => Ok(granularity),
            granularity => {
                fail!(Invalid, "a granularity of {granularity} bytes: it must be a power of two")
            }
        }
    }

    pub(super) fn reserve(self: Arc<Self>, bytes: u64) -> Result<Arc<dyn Window>> {
        let granularity_bytes = self.granularity()?;
        let Some(whole) = bytes.checked_next_multiple_of(granularity_bytes) else {
            return Err(Status::Limit.into());
        };
        if whole == 0 {
            fail!(Invalid, "a window of 0 bytes");
        }
        self.check_not_lost()?;
        let range = Range::strict(whole.checked_add(granularity_bytes).ok_or(Status::Limit)?)?;
        let start =
            (range.address().expose_provenance() as u64).next_multiple_of(granularity_bytes);
        let pieces = Mutex::new(Pieces::new(whole, granularity_bytes));
        let at = Arc::new(Addresses { range, start, bytes: whole, granularity_bytes, pieces });
        let mut windows = self.windows.lock();
        windows.retain(|window| window.strong_count() > 0);
        windows.push(Arc::downgrade(&at));
        drop(windows);
        Ok(Arc::new(SimulatedWindow { device: self, at }))
    }

    /// Number of open windows.
    pub fn windows(&self) -> usize {
        self.windows.lock().iter().filter(|window| window.strong_count() > 0).count()
    }

    fn check_not_lost(&self) -> Result<()> {
        if self.is_lost() { Err(Status::Unavailable.into()) } else { Ok(()) }
    }

    /// Rejects copies that access unmapped addresses of windows.
    pub(super) fn check_windows(&self, copies: &[LoweredCopy]) -> Result<()> {
        for window in self.windows.lock().iter().filter_map(|window| window.upgrade()) {
            for range in copies.iter().flat_map(|copy| copy.ranges()) {
                if !window.backs(range) {
                    fail!(
                        Invalid,
                        "the window has no memory mapped at some of {:#x} to {:#x}",
                        range.0,
                        range.1
                    );
                }
            }
        }
        Ok(())
    }
}

impl SimulatedWindow {
    /// Unmaps a piece, if it is mapped.
    fn free_place(&self, pieces: &mut Pieces<()>, piece: Piece) -> Result<()> {
        let known = pieces.get(piece)?;
        let Some(at) = known.at else { return Ok(()) };
        self.device.now().check_unused(self.at.start + at, known.bytes)?;
        // SAFETY: nothing uses it, as the caller promises, and no batch does.
        unsafe { self.at.range.give_back(self.at.offset(at), known.bytes)? };
        pieces.set(piece, (), None);
        Ok(())
    }
}

impl Window for SimulatedWindow {
    fn address(&self) -> u64 {
        self.at.start
    }

    fn bytes(&self) -> u64 {
        self.at.bytes
    }

    fn granularity_bytes(&self) -> u64 {
        self.at.granularity_bytes
    }

    fn create(&self, bytes: u64) -> Result<Piece> {
        self.device.check_not_lost()?;
        let mut pieces = self.at.pieces.lock();
        pieces.check_length(bytes)?;
        self.device.pool.count(bytes)?;
        Ok(pieces.add((), bytes))
    }

    unsafe fn put(&self, piece: Piece, at: u64) -> Result<()> {
        self.device.check_not_lost()?;
        let mut pieces = self.at.pieces.lock();
        pieces.check_place(piece, at)?;
        let known = pieces.get(piece)?;
        if known.at == Some(at) {
            return Ok(());
        }
        self.free_place(&mut pieces, piece)?;
        let offset = self.at.offset(at);
        self.at.range.take(offset, known.bytes)?;
        if let Some(address) = self.at.range.range(offset, known.bytes) {
            // SAFETY: a part of the range that was mapped just now, which nothing has yet.
            unsafe { address.write_bytes(POISON, known.bytes as usize) };
        }
        pieces.set(piece, (), Some(at));
        Ok(())
    }

    unsafe fn take(&self, piece: Piece) -> Result<()> {
        self.free_place(&mut self.at.pieces.lock(), piece)
    }

    unsafe fn destroy(&self, piece: Piece) -> Result<()> {
        let mut pieces = self.at.pieces.lock();
        self.free_place(&mut pieces, piece)?;
        let bytes = pieces.get(piece)?.bytes;
        pieces.remove(piece);
        self.device.pool.discount(bytes);
        Ok(())
    }
}

impl Drop for SimulatedWindow {
    fn drop(&mut self) {
        let pieces = self.at.pieces.lock();
        for known in pieces.all().into_iter().filter_map(|piece| pieces.get(piece).ok()) {
            self.device.pool.discount(known.bytes);
        }
    }
}
