//! Measures the read bandwidth of the disk that holds a model.

use crate::base::clock::Clock;
use crate::base::memory::{AllocationRequest, Buffer};
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::files::{Access, FileId, Piece};
use crate::io::model_files::{ModelFiles, READ_UNIT_BYTES};

/// Length of a read.
const PIECE_BYTES: u64 = 4 << 20;
/// Reads in flight.
const IN_FLIGHT: u64 = 8;

/// Bandwidth in bytes per second of reads that are spread over the largest file, about `bytes` in
/// total, none twice. Without direct reads, cached pages may inflate the result.
pub fn measure(files: &dyn ModelFiles, clock: &Clock, bytes: u64) -> Result<u64> {
    let Some(file) = (0..files.count()).max_by_key(|file| files.bytes(*file)) else {
        fail!(Invalid, "a model without files cannot be measured");
    };
    let whole = files.bytes(file);
    if whole == 0 {
        fail!(Invalid, "empty files cannot be measured");
    }
    let piece = PIECE_BYTES.min(whole.next_multiple_of(READ_UNIT_BYTES));
    let count = (bytes.min(whole) / piece).max(1);
    // Distance between starts, so that the last read ends in the file.
    let apart = match count {
        1 => 0,
        _ => (whole.saturating_sub(piece) / (count - 1)) / READ_UNIT_BYTES * READ_UNIT_BYTES,
    };
    let at_once = count.min(IN_FLIGHT);
    // Huge pages, as for weights: small ones reduce the bandwidth.
    let request = AllocationRequest {
        bytes: piece * at_once,
        prefer_huge: true,
        ..AllocationRequest::default()
    };
    let stock = Buffer::map(&request, None)?;
    // SAFETY: the buffer belongs to this call. Page faults must not be measured.
    unsafe { crate::base::memory::prefault(stock.address(), stock.bytes()) };
    let (mut moved, start) = (0u64, clock.now_ns());
    for first in (0..count).step_by(at_once as usize) {
        let mut pieces = Vec::new();
        for i in first..count.min(first + at_once) {
            let address = stock.range((i - first) * piece, piece).ok_or(Status::Invalid)?;
            pieces.push(Piece::one(FileId(file), Access::Read, i * apart, address, piece));
        }
        // SAFETY: the buffer belongs to this call, and no range of it occurs twice.
        unsafe { files.transfer(&mut pieces) };
        for piece in pieces {
            moved += piece.bytes().min(whole.saturating_sub(piece.offset));
            piece.result?;
        }
    }
    let took_ns = clock.now_ns().saturating_sub(start);
    if took_ns == 0 {
        return Err(Error::new(
            Status::State,
            "the clock did not advance while reads were measured",
        ));
    }
    let rate = u128::from(moved) * 1_000_000_000 / u128::from(took_ns);
    Ok(u64::try_from(rate).unwrap_or(u64::MAX).max(1))
}
