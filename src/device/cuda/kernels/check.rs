//! Validation and grid sizes that all kernels share.

use crate::base::status::Result;
use crate::device::call::Call;
use crate::fail;
use crate::meta::dtype::Dtype;

/// Blocks that fill a large device several times; grid-stride loops do the rest.
pub const FULL: u32 = 1056;

/// Rejects a call that sets fields other than those that `used` clears.
pub fn only(call: &Call, used: impl FnOnce(&mut Call)) -> Result<()> {
    let mut rest = Call { kind: 0, ..*call };
    used(&mut rest);
    if rest != Call::default() {
        fail!(Invalid, "kernel {} does not use these fields, which must be 0: {rest:?}", call.kind);
    }
    Ok(())
}

/// Checks that an address is nonzero and a multiple of `align`.
pub fn place(name: &str, address: u64, align: u64) -> Result<()> {
    if address == 0 {
        fail!(Invalid, "the address of {name} is 0");
    }
    aligned(name, address, align)
}

/// Checks that an address is a multiple of `align`.
pub fn aligned(name: &str, address: u64, align: u64) -> Result<()> {
    if address % align != 0 {
        fail!(Invalid, "{name} at {address:#x}: must be a multiple of {align}");
    }
    Ok(())
}

/// Checks that a count is 1 to `most`.
pub fn number(name: &str, value: u32, most: u32) -> Result<()> {
    if value == 0 {
        fail!(Invalid, "0 {name}: at least 1 is needed");
    }
    if value > most {
        fail!(Limit, "{value} {name}: at most {most}");
    }
    Ok(())
}

/// Checks the size of the scratch memory.
pub fn scratch(call: &Call, bytes: Option<u64>) -> Result<()> {
    let Some(bytes) = bytes else {
        fail!(Limit, "the scratch memory would exceed the address space")
    };
    place("scratch", call.scratch, 8)?;
    if call.scratch_bytes < bytes {
        fail!(TooSmall, "{} bytes of scratch: {bytes} are needed", call.scratch_bytes);
    }
    Ok(())
}

/// Checks the element type.
pub fn dtype(name: &str, code: u32, known: &[Dtype]) -> Result<Dtype> {
    match Dtype::from_code(code).filter(|dtype| known.contains(dtype)) {
        Some(dtype) => Ok(dtype),
        None => fail!(Unsupported, "type {code} of {name} is not supported"),
    }
}

/// Rows of elements in memory.
pub struct Rows<'a> {
    /// Name in errors.
    pub name: &'a str,
    /// Address of the first row.
    pub address: u64,
    /// Bytes of an element.
    pub size: u64,
    /// Elements of a row.
    pub numbers: u64,
    /// Counts and strides of two dimensions.
    pub steps: [(u64, i64); 2],
}

impl Rows<'_> {
    /// Checks that all elements are aligned and inside the address space.
    pub fn check(&self) -> Result<()> {
        let Rows { name, address, size, numbers, steps } = *self;
        place(name, address, size)?;
        let (mut low, mut high) = (i128::from(address), i128::from(address));
        high += i128::from(numbers) * i128::from(size);
        for (count, stride) in steps {
            if stride.unsigned_abs() % size != 0 {
                fail!(
                    Invalid,
                    "{name} with a stride of {stride} bytes: must be a multiple of {size}"
                );
            }
            let reach = i128::from(count.max(1) - 1) * i128::from(stride);
            low += reach.min(0);
            high += reach.max(0);
        }
        if low < 0 || high > i128::from(u64::MAX) {
            fail!(Invalid, "{name} exceed the address space");
        }
        Ok(())
    }

    /// Also checks that output rows do not overlap completely.
    pub fn check_written(&self) -> Result<()> {
        self.check()?;
        if let Some((count, _)) =
            self.steps.iter().find(|(count, stride)| *count > 1 && *stride == 0)
        {
            fail!(Invalid, "{count} rows of {} with a stride of 0 overlap", self.name);
        }
        Ok(())
    }
}

/// Whether all are multiples of 16.
pub fn is_even(all: &[u64]) -> bool {
    all.iter().all(|n| n % 16 == 0)
}

/// Thread blocks for `work` items, `each` per block.
pub fn blocks(work: u64, each: u64) -> u32 {
    work.div_ceil(each).clamp(1, FULL.into()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    #[test]
    fn rows_outside_the_address_space_are_rejected() {
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
    fn grid_size_is_between_one_and_the_limit() {
        assert_eq!((blocks(0, 8), blocks(1, 8), blocks(9, 8)), (1, 1, 2));
        assert_eq!(blocks(u64::MAX, 1), FULL);
    }

    #[test]
    fn unused_fields_must_be_zero() {
        let call = Call { kind: 1, table: 8, scale: 0.5, ..Call::default() };
        let error = only(&call, |rest| rest.table = 0).expect_err("a scale");
        assert_eq!(error.status(), Status::Invalid);
        only(&call, |rest| (rest.table, rest.scale) = (0, 0.0)).expect("all is used");
    }
}
