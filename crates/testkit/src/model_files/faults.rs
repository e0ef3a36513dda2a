//! What can go wrong with simulated files of a model.

use std::ops::Range;

use kvtier::base::status::Status;
use kvtier::io::files::Piece;

/// Something that goes wrong. Pieces are counted from 1, since the files were made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// That piece fails as a broken disk fails.
    Broken(u64),
    /// That piece ends too early.
    Short(u64),
    /// Reads that touch the range of a file fail.
    BrokenRange(u32, Range<u64>),
    /// Bytes in the range of a file take so many times as long.
    SlowRange(u32, Range<u64>, u64),
}

impl Fault {
    /// What it does to a piece with a number, if anything.
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

    /// What it adds to the bytes that a piece is worth in time.
    pub fn more_bytes(&self, piece: &Piece) -> u64 {
        match self {
            Fault::SlowRange(file, range, times) if *file == piece.file.0 => {
                common(range, piece).saturating_mul(times.saturating_sub(1))
            }
            _ => 0,
        }
    }
}

/// How many bytes of a piece are in a range.
fn common(range: &Range<u64>, piece: &Piece) -> u64 {
    let end = piece.offset.saturating_add(piece.bytes()).min(range.end);
    end.saturating_sub(piece.offset.max(range.start))
}
