//! Slabs in memory that other processes map: ranges of one sealed file, so that a process gets all of
//! it with one descriptor, whatever is mapped later. Pages of free ranges are returned to the system.

use std::collections::BTreeMap;

use crate::base::memory::{Buffer, Requirement};
use crate::base::status::Result;
use crate::base::sync::{Arc, Mutex};
use crate::fail;
use crate::io::shared_memory::SharedMemory;
use crate::tier::host::{HostTier, Piece};

/// Slabs are aligned to this, which is a page on every machine.
const ALIGN_BYTES: u64 = 64 << 10;
/// Address space beyond the tier's limit, for the reserve and for limits that are raised. It takes no
/// memory.
const SLACK_BYTES: u64 = 4 << 30;

/// A file for slabs.
pub struct SharedSlabs {
    memory: SharedMemory,
    /// Free ranges: offset and length.
    free: Mutex<BTreeMap<u64, u64>>,
}

/// A range of the file that a slab uses.
struct Range {
    slabs: Arc<SharedSlabs>,
    offset: u64,
    bytes: u64,
}

impl SharedSlabs {
    /// A file for a tier of at most `max_bytes` bytes.
    pub fn create(max_bytes: u64) -> Result<SharedSlabs> {
        // Slabs of several lengths leave gaps.
        let bytes = max_bytes.saturating_mul(2).saturating_add(SLACK_BYTES);
        let memory = SharedMemory::create(bytes.next_multiple_of(ALIGN_BYTES))?;
        let free = Mutex::new(BTreeMap::from([(0, memory.bytes())]));
        Ok(SharedSlabs { memory, free })
    }

    /// The file.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The offset of an address in the file.
    pub fn offset_of(&self, address: usize) -> Option<u64> {
        let offset = (address as u64).checked_sub(self.memory.address() as u64)?;
        (offset < self.memory.bytes()).then_some(offset)
    }

    /// Memory of `bytes` bytes for a slab.
    pub(super) fn map(self: &Arc<SharedSlabs>, bytes: u64) -> Result<Buffer> {
        let Some(length) = bytes.checked_next_multiple_of(ALIGN_BYTES) else {
            fail!(Limit, "a slab of {bytes} bytes");
        };
        let mut free = self.free.lock();
        let found = free.iter().find(|(_, has)| **has >= length).map(|(&at, &has)| (at, has));
        let Some((offset, has)) = found else {
            let most = self.memory.bytes();
            fail!(
                Limit,
                "the store shares {most} bytes of address space, which are used up: open it with a \
                 larger `host`"
            );
        };
        free.remove(&offset);
        if has > length {
            free.insert(offset + length, has - length);
        }
        drop(free);
        let guard = Box::new(Range { slabs: self.clone(), offset, bytes: length });
        let Some(address) = self.memory.range(offset, length) else {
            fail!(Limit, "a range outside the shared memory");
        };
        // SAFETY: the range is this buffer's until the guard returns it, and stays mapped, since the
        // guard has the file.
        unsafe { Buffer::wrap(address, bytes, guard) }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let (mut offset, mut bytes) = (self.offset, self.bytes);
        // A range whose pages stay is returned later with the file.
        if let Err(error) = self.slabs.memory.discard(offset, bytes) {
            log::warn!("{bytes} bytes of shared memory stay in use: {error}");
        }
        let mut free = self.slabs.free.lock();
        if let Some((&before, &has)) = free.range(..offset).next_back()
            && before + has == offset
        {
            free.remove(&before);
            (offset, bytes) = (before, bytes + has);
        }
        if let Some(has) = free.remove(&(offset + bytes)) {
            bytes += has;
        }
        free.insert(offset, bytes);
    }
}

impl HostTier {
    /// Makes all slabs from now on ranges of a shared file.
    pub fn share(&mut self, slabs: Arc<SharedSlabs>) {
        self.huge = Requirement::No;
        self.shared = Some(slabs);
    }

    /// Keeps pieces from being used again, also when they are freed, until [`HostTier::let_go`]: a
    /// process that is not waited for any longer may still write to them.
    pub fn hold(&mut self, addresses: impl Iterator<Item = usize>) -> Vec<Piece> {
        let pieces: Vec<Piece> = addresses.filter_map(|address| self.piece_at(address)).collect();
        self.held.extend(pieces.iter().map(|&piece| (piece, false)));
        pieces
    }

    /// Ends [`HostTier::hold`]. Pieces that were freed meanwhile are free now.
    pub fn let_go(&mut self, pieces: &[Piece]) -> Result<()> {
        for piece in pieces {
            if self.held.remove(piece) == Some(true) {
                self.free(*piece)?;
            }
        }
        Ok(())
    }

    /// Pieces that were freed, but are still held.
    pub fn held_pieces(&self) -> u64 {
        self.held.values().filter(|&&is_freed| is_freed).count() as u64
    }

    /// The piece in use at an address, or around it.
    fn piece_at(&self, address: usize) -> Option<Piece> {
        (0..self.table.len()).find_map(|number| {
            let (_, slab) = self.table.get(number)?;
            let offset = (address as u64).checked_sub(slab.address(0)? as u64)?;
            let index = u32::try_from(offset / slab.piece_bytes().max(1)).ok()?;
            slab.is_live(index).then(|| Piece::new(number, index))
        })
    }

    /// The shared file, if there is one.
    pub fn shared(&self) -> Option<&Arc<SharedSlabs>> {
        self.shared.as_ref()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::tier::host::HostOpts;

    #[test]
    fn slabs_are_ranges_of_the_file_and_return() {
        let slabs = Arc::new(SharedSlabs::create(1 << 20).expect("memory"));
        let all = slabs.memory().bytes();
        let opts = HostOpts { slab_bytes: 64 << 10, max_bytes: 1 << 20, huge: Requirement::Try };
        let mut tier = HostTier::new(None, &opts).expect("small");
        tier.share(slabs.clone());
        tier.keep_reserve(8192).expect("room");
        let pieces: Vec<Piece> = std::iter::from_fn(|| tier.alloc(4096).ok()).collect();
        assert_eq!(pieces.len(), 256);
        let offset = |piece| slabs.offset_of(tier.address(piece).expect("live") as usize);
        let mut offsets: Vec<u64> = pieces.iter().filter_map(|&piece| offset(piece)).collect();
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), 256);
        assert!(offsets.iter().all(|offset| offset % 4096 == 0));
        assert_eq!(slabs.offset_of(slabs.memory().address() as usize - 1), None);
        let address = |piece| tier.address(piece).expect("live") as usize;
        let last = [address(pieces[255]) + 100];
        let held = tier.hold(last.into_iter());
        assert_eq!(held, [pieces[255]]);
        for piece in pieces {
            tier.free(piece).expect("live");
        }
        assert_eq!((tier.held_pieces(), tier.stats().live_pieces), (1, 1));
        tier.let_go(&held).expect("it was freed");
        assert_eq!((tier.held_pieces(), tier.stats().live_pieces), (0, 0));
        tier.trim();
        drop(tier);
        let free: Vec<_> = slabs.free.lock().clone().into_iter().collect();
        assert_eq!(free, [(0, all)], "all ranges are joined again");
    }
}
