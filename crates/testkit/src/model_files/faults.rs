//! Planned faults of simulated model files.

use std::ops::Range;

use kvtier::base::status::Status;
use kvtier::io::files::Piece;

/// A fault. Pieces are counted from 1 since creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This piece fails with an I/O error.
    Broken(u64),
    /// This piece is a short read.
    Short(u64),
    /// Reads of this range of a file fail.
    BrokenRange(u32, Range<u64>),
    /// Bytes in this range of a file take this many times as long.
    SlowRange(u32, Range<u64>, u64),
}

impl Fault {
    /// The fault's effect on a piece.
    pub fn strikes(&self, number: u64, piece: &Piece) -> Option<(Status, &'static str)> {
        match self {
            Fault::Broken(at) if *at == number => Some((Status::Io, "the disk is broken")),
            Fault::Short(at) if *at == number => Some((Status::Io, "a read ended too early")),
            Fault::BrokenRange(file, range)
                if *file == piece.file.0 && common(range, piece) > 0 =>
            {
                Some((Status::Io, "the disk is broken there"))
            }
            _ => None,
        }
    }

    /// Additional bytes that the fault charges for a piece.
    pub fn more_bytes(&self, piece: &Piece) -> u64 {
        match self {
            Fault::SlowRange(file, range, times) if *file == piece.file.0 => {
                common(range, piece).saturating_mul(times.saturating_sub(1))
            }
            _ => 0,
        }
    }
}

/// Bytes of a piece in a range.
fn common(range: &Range<u64>, piece: &Piece) -> u64 {
    let end = piece.offset.saturating_add(piece.bytes()).min(range.end);
    end.saturating_sub(piece.offset.max(range.start))
}
