//! What is wrong with a call, and how many blocks one is: for all kernels.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::fail;
use crate::meta::dtype::Dtype;

/// Blocks that fill a large device a few times over: more go on where others end.
pub const FULL: u32 = 1056;

/// Fails unless the fields that `used` takes away are all that there are.
pub fn only(call: &Call, used: impl FnOnce(&mut Call)) -> Result<()> {
    let mut rest = Call { kind: 0, ..*call };
    used(&mut rest);
    if rest != Call::default() {
        fail!(Invalid, "kernel {} is told what it does not use: {rest:?}", call.kind);
    }
    Ok(())
}

/// Fails unless something is somewhere, at a multiple of `align`.
pub fn place(name: &str, address: u64, align: u64) -> Result<()> {
    if address == 0 {
        fail!(Invalid, "no address of {name}");
    }
    aligned(name, address, align)
}

/// Fails unless an address is a multiple of `align`.
pub fn aligned(name: &str, address: u64, align: u64) -> Result<()> {
    if address % align != 0 {
        fail!(Invalid, "{name} at {address:#x}, which is no multiple of {align}");
    }
    Ok(())
}

/// Fails unless there are some, and no more than `most`.
pub fn number(name: &str, value: u32, most: u32) -> Result<()> {
    if value == 0 {
        fail!(Invalid, "no {name}");
    }
    if value > most {
        fail!(Limit, "{value} {name}, at most {most}");
    }
    Ok(())
}

/// Fails unless memory for the kernel alone has so many bytes.
pub fn scratch(call: &Call, bytes: Option<u64>) -> Result<()> {
    let Some(bytes) = bytes else { fail!(Limit, "more scratch than there are addresses") };
    place("scratch", call.scratch, 8)?;
    if call.scratch_bytes < bytes {
        fail!(TooSmall, "{} bytes of scratch, {bytes} are needed", call.scratch_bytes);
    }
    Ok(())
}

/// The type of numbers, one of some.
pub fn dtype(name: &str, code: u32, known: &[Dtype]) -> Result<Dtype> {
    match Dtype::from_code(code).filter(|dtype| known.contains(dtype)) {
        Some(dtype) => Ok(dtype),
        None => fail!(Unsupported, "type {code} of {name}"),
    }
}

/// Rows of numbers: where the first is, what they are, and how many of how many.
pub struct Rows<'a> {
    /// For words.
    pub name: &'a str,
    /// Of the first.
    pub address: u64,
    /// Bytes of a number.
    pub size: u64,
    /// Numbers of a row.
    pub numbers: u64,
    /// How many times what lies how far apart.
    pub steps: [(u64, i64); 2],
}

impl Rows<'_> {
    /// Fails unless all numbers are aligned and have addresses.
    pub fn check(&self) -> Result<()> {
        let Rows { name, address, size, numbers, steps } = *self;
        place(name, address, size)?;
        let (mut low, mut high) = (i128::from(address), i128::from(address));
        high += i128::from(numbers) * i128::from(size);
        for (count, stride) in steps {
            if stride.unsigned_abs() % size != 0 {
                fail!(Invalid, "{name} lie {stride} bytes apart, numbers have {size}");
            }
            let reach = i128::from(count.max(1) - 1) * i128::from(stride);
            low += reach.min(0);
            high += reach.max(0);
        }
        if low < 0 || high > i128::from(u64::MAX) {
            fail!(Invalid, "{name} reach beyond all addresses");
        }
        Ok(())
    }

    /// The same of rows that are written: none may lie on another.
    pub fn check_written(&self) -> Result<()> {
        self.check()?;
        if let Some((count, _)) =
            self.steps.iter().find(|(count, stride)| *count > 1 && *stride == 0)
        {
            fail!(Invalid, "{count} of {} are written to one place", self.name);
        }
        Ok(())
    }
}

/// Whether all are multiples of 16.
pub fn is_even(all: &[u64]) -> bool {
    all.iter().all(|n| n % 16 == 0)
}

/// Blocks for some work, of which each does so much at a time.
pub fn blocks(work: u64, each: u64) -> u32 {
    work.div_ceil(each).clamp(1, FULL.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    #[test]
    fn rows_beyond_all_addresses_are_refused() {
        let rows = |address, steps| Rows { name: "keys", address, size: 4, numbers: 8, steps };
        let status = |rows: Rows<'_>| rows.check().map_err(|e| e.status());
        assert_eq!(status(rows(4096, [(3, 32), (2, -1024)])), Ok(()));
        assert_eq!(status(rows(4096, [(3, 32), (9, -1024)])), Err(Status::Invalid));
        assert_eq!(status(rows(u64::MAX - 127, [(3, 32), (1, 0)])), Ok(()));
        assert_eq!(status(rows(u64::MAX - 127, [(4, 32), (1, 0)])), Err(Status::Invalid));
        assert_eq!(status(rows(4096, [(u64::MAX, i64::MAX - 3), (1, 0)])), Err(Status::Invalid));
        assert_eq!(status(rows(4098, [(1, 0), (1, 0)])), Err(Status::Invalid), "not aligned");
        assert_eq!(status(rows(4096, [(2, 6), (1, 0)])), Err(Status::Invalid), "not aligned");
        assert!(rows(4096, [(2, 0), (1, 0)]).check_written().is_err(), "one on the other");
        assert!(rows(4096, [(1, 0), (1, 0)]).check_written().is_ok());
    }

    #[test]
    fn blocks_are_one_at_least_and_no_more_than_fill_a_device() {
        assert_eq!((blocks(0, 8), blocks(1, 8), blocks(9, 8)), (1, 1, 2));
        assert_eq!(blocks(u64::MAX, 1), FULL);
    }

    #[test]
    fn what_is_not_used_is_nothing() {
        let call = Call { kind: 1, table: 8, scale: 0.5, ..Call::default() };
        let error = only(&call, |rest| rest.table = 0).expect_err("a scale");
        assert_eq!(error.status(), Status::Invalid);
        only(&call, |rest| (rest.table, rest.scale) = (0, 0.0)).expect("all is used");
    }
}
