//! Structs that grow: the first field says how large the caller's is.
//!
//! Smaller than ours: the rest is zero, the default. Larger: accepted while
//! what we do not know is zero, else the caller wants something newer.

use crate::base::status::{Error, Result, Status};
use crate::fail;

/// No struct of this interface is larger, nor will be.
const MAX_STRUCT_BYTES: u64 = 4096;

/// A plain C struct: any bytes are a valid value, all zero is the default.
///
/// # Safety
/// `repr(C)`, integers and raw pointers and nullable functions alone.
pub(crate) unsafe trait Plain: Copy {
    /// All fields zero.
    fn zeroed() -> Self {
        // SAFETY: all zero is a valid value of a Plain type.
        unsafe { std::mem::zeroed() }
    }
}

/// A plain struct whose first field is `uint64_t struct_size`.
///
/// # Safety
/// As [`Plain`], and the first field is as said.
pub(crate) unsafe trait Sized_: Plain {}

/// # Safety
/// `from` must be valid for reads of `given` bytes.
unsafe fn take<T: Plain>(from: *const u8, given: usize) -> Result<T> {
    let ours = size_of::<T>();
    let mut value = T::zeroed();
    // SAFETY: at most `given` bytes are read and at most `ours` written.
    unsafe {
        std::ptr::copy_nonoverlapping(from, (&raw mut value).cast::<u8>(), ours.min(given));
        for i in ours..given {
            if from.add(i).read() != 0 {
                fail!(TooNew, "byte {i} is set, this library knows {ours} bytes of the struct");
            }
        }
    }
    Ok(value)
}

/// Reads an input struct; null is all defaults.
///
/// # Safety
/// `from` is null or points to a struct that starts with its size.
pub(crate) unsafe fn read<T: Sized_>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Ok(T::zeroed());
    }
    // SAFETY: the caller's promise; unaligned, since C may pack.
    let given = unsafe { from.cast::<u64>().read_unaligned() };
    check_size(given)?;
    // SAFETY: the caller says the struct has `given` bytes.
    unsafe { take(from.cast(), given as usize) }
}

fn check_size(given: u64) -> Result<()> {
    // Structs grow by whole words: anything else would cut a pointer in two.
    if (8..=MAX_STRUCT_BYTES).contains(&given) && given.is_multiple_of(8) {
        return Ok(());
    }
    let text = format!("struct_size is {given}: initialise the struct with its KVT_..._INIT");
    Err(Error::new(Status::Invalid, text))
}

/// Checks an output struct before any work is done.
///
/// # Safety
/// `to` is null or points to a struct that starts with its size.
pub(crate) unsafe fn check_out<T: Sized_>(to: *mut T) -> Result<()> {
    if to.is_null() {
        fail!(Invalid, "the output pointer is null");
    }
    // SAFETY: the caller's promise.
    check_size(unsafe { to.cast::<u64>().read_unaligned() })
}

/// Writes as much of `value` as the caller's struct holds, and our size.
///
/// # Safety
/// `to` passed [`check_out`] and is valid for writes of the size it states.
pub(crate) unsafe fn write<T: Sized_>(to: *mut T, value: &T) {
    // SAFETY: the caller's promise; at most the size it states is written.
    unsafe {
        let given = to.cast::<u64>().read_unaligned() as usize;
        let n = given.min(size_of::<T>());
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to.cast::<u8>(), n);
        to.cast::<u64>().write_unaligned(size_of::<T>() as u64);
    }
}

/// An array of structs without sizes of their own; one stride for all.
pub(crate) struct Strided<T> {
    base: *mut u8,
    count: usize,
    stride: usize,
    _of: std::marker::PhantomData<T>,
}

impl<T: Plain> Strided<T> {
    /// # Safety
    /// `base` is null (with a count of 0) or valid for `count` * `stride` bytes.
    pub(crate) unsafe fn new(base: *mut T, count: u64, stride: u64, max: u64) -> Result<Self> {
        if count > max {
            fail!(Limit, "an array of {count} entries, at most {max} are allowed");
        }
        if count > 0 && base.is_null() {
            fail!(Invalid, "the array is null and has {count} entries");
        }
        let whole = (8..=MAX_STRUCT_BYTES).contains(&stride) && stride.is_multiple_of(8);
        if count > 0 && !whole {
            fail!(Invalid, "stride_bytes is {stride}: pass the sizeof of one entry");
        }
        let (count, stride) = (count as usize, stride as usize);
        Ok(Strided { base: base.cast(), count, stride, _of: std::marker::PhantomData })
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Reads an entry by the same rule as [`read`].
    pub(crate) fn get(&self, index: usize) -> Result<T> {
        assert!(index < self.count);
        // SAFETY: inside the array, by the promise made to `new`.
        unsafe { take(self.base.add(index * self.stride), self.stride) }
    }

    /// Writes as much of an entry as the stride holds.
    pub(crate) fn put(&self, index: usize, value: &T) {
        assert!(index < self.count);
        let n = self.stride.min(size_of::<T>());
        // SAFETY: inside the array, by the promise made to `new`.
        unsafe {
            let to = self.base.add(index * self.stride);
            std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to, n);
        }
    }
}

/// Writes rows to a caller's array if all of them fit, and how many there are in any
/// case; where the array is null nobody wants more than that.
///
/// # Safety
/// `out_count` is null or valid for a write.
pub(crate) unsafe fn give<T: Plain>(
    rows: &Strided<T>,
    counts_only: bool,
    values: impl ExactSizeIterator<Item = T>,
    out_count: *mut u64,
) -> Result<()> {
    let count = values.len();
    if !out_count.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out_count.write(count as u64) };
    }
    if counts_only {
        return Ok(());
    }
    if count > rows.len() {
        let text = format!("{count} entries, and room for {}", rows.len());
        return Err(Error::new(Status::TooSmall, text));
    }
    values.enumerate().for_each(|(i, value)| rows.put(i, &value));
    Ok(())
}

/// Refuses flags this library does not know.
pub(crate) fn known_flags(flags: u64, known: u64) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::new(Status::Invalid, format!("unknown flags {unknown:#x}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Small {
        size: u64,
        a: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Large {
        size: u64,
        a: u64,
        b: u64,
    }

    // SAFETY: integers alone, the first one is the size.
    unsafe impl Plain for Small {}
    // SAFETY: as above.
    unsafe impl Sized_ for Small {}
    // SAFETY: as above.
    unsafe impl Plain for Large {}
    // SAFETY: as above.
    unsafe impl Sized_ for Large {}

    #[test]
    fn older_callers_get_defaults_and_newer_ones_are_checked() {
        let small = Small { size: 16, a: 7 };
        // SAFETY: the size field says how much is there, in every case below.
        unsafe {
            let read = read::<Large>((&raw const small).cast());
            assert_eq!(read.map(|l| (l.a, l.b)), Ok((7, 0)));
            let mut large = Large { size: 24, a: 7, b: 0 };
            assert!(super::read::<Small>((&raw const large).cast()).is_ok());
            large.b = 1;
            let error = super::read::<Small>((&raw const large).cast()).err();
            assert_eq!(error.map(|e| e.status()), Some(Status::TooNew));
            for size in [0, 7, 12, 4097, 4104, u64::MAX] {
                large.size = size;
                assert!(super::read::<Large>(&raw const large).is_err());
            }
        }
    }

    #[test]
    fn outputs_fit_the_callers_size() {
        let mut large = Large { size: 16, a: 0, b: 99 };
        // SAFETY: `large` is at least as large as it says.
        unsafe {
            assert!(check_out(&raw mut large).is_ok());
            write(&raw mut large, &Large { size: 24, a: 5, b: 6 });
        }
        assert_eq!((large.size, large.a, large.b), (24, 5, 99));
    }
}
