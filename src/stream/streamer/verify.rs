//! Units compared with their checksums when the engine asks for it.

use crate::base::memory::{Buffer, MemoryWish};
use crate::base::status::{Result, Status};
use crate::fail;
use crate::stream::core::CHUNK_GRAIN_BYTES;
use crate::stream::streamer::Streamer;

impl Streamer {
    /// Reads a unit from its files, past whatever is in memory, and compares it with what is
    /// known of it; what is not known is noted. The caller's thread reads, and waits.
    /// [`Status::Corrupt`] when it is not what it was. Its checksum.
    pub fn verify(&self, unit: u32) -> Result<u64> {
        let shared = &self.shared;
        shared.state.lock().check()?;
        let Some(of) = shared.units.units.get(unit as usize) else {
            fail!(Invalid, "unit {unit} of {}", shared.units.units.len());
        };
        let account = shared.account.clone();
        let wish = MemoryWish { bytes: CHUNK_GRAIN_BYTES, account, ..MemoryWish::default() };
        let buffer = Buffer::map(&wish, shared.runtime.faults())?;
        let mut pieces = Vec::new();
        for chunk in of.chunks(CHUNK_GRAIN_BYTES) {
            let address = buffer.address() as u64 + (chunk.offset - chunk.read_offset);
            // SAFETY: a chunk's grains are no more than the buffer has, which is this call's.
            unsafe { shared.read(unit, &chunk, address, true, &mut pieces)? };
        }
        shared.sums.sum_of_unit(unit).ok_or_else(|| Status::State.into())
    }
}
