//! Machinery of the C boundary: panic guards, handles, structs that grow, and pointers with a
//! length. The exported functions use it, and the macros of `kvtier-macros`.

use std::ffi::{c_char, c_void};
use std::ops::Deref;

use crate::base::callback::Foreign;
use crate::base::fork;
use crate::base::panic::{catch, unwinding};
use crate::base::slab::{Key, Pin, Slab};
use crate::base::status::{Error, Result, Status};
use crate::base::sync::Arc;
use crate::fail;
use crate::ffi::base::kvt_destroy_fn;
use crate::ffi::base::{KVT_NUL_TERMINATED, kvt_status_t};
use crate::ffi::base::{kvt_error_t, report};

pub(crate) use kvtier_macros::{Plain, capi};

// Guards.

/// Runs the body of an exported function, and returns its status. A panic becomes KVT_E_PANIC.
#[inline]
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> kvt_status_t {
    match catch(body) {
        Ok(Ok(())) => Status::Ok.code(),
        Ok(Err(error)) => error.status().code(),
        Err(text) => {
            log::error!("caught a panic, a defect of this library: {text}");
            Status::Panic.code()
        }
    }
}

/// Like [`guard`], for functions that explain their failures through `err`.
///
/// # Safety
/// `err` is null or points to a handle that is null or of an error.
pub(crate) unsafe fn guard_err(
    err: *mut *mut kvt_error_t,
    body: impl FnOnce() -> Result<()>,
) -> kvt_status_t {
    let error = match catch(body) {
        Ok(Ok(())) => return Status::Ok.code(),
        Ok(Err(error)) => error,
        Err(text) => {
            log::error!("caught a panic, a defect of this library: {text}");
            Error::new(Status::Panic, text)
        }
    };
    let status = error.status().code();
    // SAFETY: the caller's promise. A panic in here must not unwind into C either.
    if catch(|| unsafe { report(err, error) }).is_err() {
        return Status::Panic.code();
    }
    status
}

/// A callback of the caller with its user data, which the caller owns until [`Foreign::keep`]. None
/// if the function is null. INVALID = a destroy function without a callback, which would never be
/// called.
pub(crate) fn foreign<F: Copy>(
    function: Option<F>,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
) -> Result<Option<Arc<Foreign<F>>>> {
    match function {
        Some(function) => Ok(Some(Arc::new(Foreign::new(function, user_data, destroy)))),
        None if destroy.is_some() => {
            fail!(Invalid, "destroy is set and its callback is null: pass both, or neither")
        }
        None => Ok(None),
    }
}

// Handles: pointers that are never followed. A handle encodes the type, the slot and the generation
// of an object. Its top bits make it differ from every valid address: a program that follows a
// handle by mistake faults at once.

/// Top byte of handles: no canonical x86-64 address has it, whatever the low bits are.
const MARK: u64 = 0x80;
const TYPE_SHIFT: u32 = 56;
const KEY_BITS: u64 = (1 << TYPE_SHIFT) - 1;

/// A type of objects that C knows by handles. [`noun!`] implements it.
pub(crate) trait Noun: Send + Sync + Sized + 'static {
    /// The opaque C type.
    type C: Opaque<Noun = Self>;
    /// Number of the type in handles; never reused.
    const TYPE: u8;
    /// Name of the type in messages.
    const NAME: &'static str;
    /// The table of the objects.
    fn table() -> &'static Slab<Self>;
}

/// An opaque C type: pointers to it are handles.
pub(crate) trait Opaque: Sized {
    /// The type of the objects behind the handles.
    type Noun: Noun<C = Self>;
}

/// `noun!(SessionNoun, kvt_session_t, 12, "session")`: the type of the objects, their opaque C
/// type, and the type's number in handles and name in messages. An optional fifth argument is the
/// table of the objects, if another module owns it.
macro_rules! noun {
    ($noun:ty, $c:ty, $number:literal, $name:literal) => {
        $crate::ffi::abi::noun!($noun, $c, $number, $name, {
            static TABLE: $crate::base::slab::Slab<$noun> = $crate::base::slab::Slab::new();
            &TABLE
        });
    };
    ($noun:ty, $c:ty, $number:literal, $name:literal, $table:expr) => {
        impl $crate::ffi::abi::Noun for $noun {
            type C = $c;
            const TYPE: u8 = $number;
            const NAME: &'static str = $name;
            fn table() -> &'static $crate::base::slab::Slab<Self> {
                $table
            }
        }
        impl $crate::ffi::abi::Opaque for $c {
            type Noun = $noun;
        }
    };
}
pub(crate) use noun;

/// Purpose of an access to an object. A panic in a call poisons the object.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To use it; PANIC if the object is poisoned.
    Use,
    /// To read, drain or close it; also if it is poisoned.
    Salvage,
}

/// The handle of a key.
pub(crate) fn encode<N: Noun>(key: Key) -> *mut N::C {
    let bits = (MARK | u64::from(N::TYPE)) << TYPE_SHIFT | key.bits();
    std::ptr::without_provenance_mut(bits as usize)
}

/// The handle of key bits; null for 0.
pub(crate) fn encode_bits<N: Noun>(bits: u64) -> *mut N::C {
    Key::from_bits(bits).map_or(std::ptr::null_mut(), encode::<N>)
}

fn decode<N: Noun>(handle: *const N::C) -> Option<Key> {
    let bits = handle.addr() as u64;
    if bits >> TYPE_SHIFT != MARK | u64::from(N::TYPE) {
        return None;
    }
    Key::from_bits(bits & KEY_BITS)
}

/// The error for a handle without an object.
#[cold]
fn invalid_handle<N: Noun>(handle: *const N::C) -> Error {
    let bits = handle.addr() as u64;
    let cause = match bits >> TYPE_SHIFT {
        _ if bits == 0 => "is null",
        kind if kind == MARK | u64::from(N::TYPE) => "is stale: its object was freed",
        kind if kind & MARK != 0 => "is of another type",
        _ => "was not made by this library",
    };
    Error::new(Status::Handle, format!("the {} handle {cause}", N::NAME))
}

/// Pins the object of a handle: it stays alive until the pin is dropped.
#[inline]
pub(crate) fn pin<C: Opaque>(handle: *const C, access: Access) -> Result<Pin<'static, C::Noun>> {
    fork::check()?;
    let pin = decode::<C::Noun>(handle).and_then(|key| C::Noun::table().pin(key));
    let Some(pin) = pin else { return Err(invalid_handle::<C::Noun>(handle)) };
    if pin.is_poisoned() && access == Access::Use {
        return Err(Status::Panic.into());
    }
    Ok(pin)
}

/// Pins the object of a handle that may be null, to use it.
pub(crate) fn pin_optional<C: Opaque>(handle: *const C) -> Result<Option<Pin<'static, C::Noun>>> {
    if handle.is_null() { Ok(None) } else { pin(handle, Access::Use).map(Some) }
}

/// An object during a call. A panic that begins in the call poisons the object.
pub(crate) struct Entered<N: Noun> {
    pin: Pin<'static, N>,
    /// A destructor makes the call while a panic unwinds, which did not begin in this call.
    in_unwinding: bool,
}

impl<N: Noun> Deref for Entered<N> {
    type Target = Pin<'static, N>;
    fn deref(&self) -> &Self::Target {
        &self.pin
    }
}

impl<N: Noun> Drop for Entered<N> {
    fn drop(&mut self) {
        if unwinding() && !self.in_unwinding {
            self.pin.poison();
        }
    }
}

/// Pins the object of a handle for a call.
#[inline]
pub(crate) fn access<C: Opaque>(handle: *const C, access: Access) -> Result<Entered<C::Noun>> {
    Ok(Entered { pin: pin(handle, access)?, in_unwinding: unwinding() })
}

/// As [`access`], to use the object.
#[inline]
pub(crate) fn enter<C: Opaque>(handle: *const C) -> Result<Entered<C::Noun>> {
    access(handle, Access::Use)
}

/// As [`access`], to read, drain or close the object; also if it is poisoned.
#[inline]
pub(crate) fn inspect<C: Opaque>(handle: *const C) -> Result<Entered<C::Noun>> {
    access(handle, Access::Salvage)
}

/// Inserts an object into its table, and returns its handle.
pub(crate) fn insert<N: Noun>(noun: N) -> Result<*mut N::C> {
    N::table().insert(noun).map(encode::<N>).map_err(|e| e.within(N::NAME))
}

/// Closes the object whose handle is in a variable, and clears the variable. Accepts a null pointer
/// and a null handle.
///
/// # Safety
/// `handle` is null or valid for reads and writes.
pub(crate) unsafe fn free<C: Opaque>(
    handle: *mut *mut C,
    close: impl FnOnce(&Pin<'static, C::Noun>) -> Result<()>,
) -> Result<()> {
    if handle.is_null() {
        return Ok(());
    }
    // Read and written as plain memory: while a close waits, a callback of the caller may read the
    // variable.
    // SAFETY: not null, and the caller's promise.
    let value = unsafe { handle.read() };
    if value.is_null() {
        return Ok(());
    }
    let object = inspect(value)?;
    close(&object)?;
    if !object.remove() {
        return Err(invalid_handle::<C::Noun>(value));
    }
    // The last pin drops the object; only then is the variable cleared.
    drop(object);
    // SAFETY: as above.
    unsafe { handle.write(std::ptr::null_mut()) };
    Ok(())
}

// Structs that grow: the first field is the size of the caller's struct. Fields that a smaller
// struct lacks are zero, the default. A larger struct is accepted if the bytes that this library
// does not know are zero; otherwise the caller sets a field of a later version.

/// Largest size of a struct, now and in later versions.
const MAX_STRUCT_BYTES: u64 = 4096;

/// A plain C type: any bytes are a valid value, all zero is the default. `#[derive(Plain)]`
/// implements it for structs and checks their fields.
///
/// # Safety
/// Any bytes are a valid value.
pub(crate) unsafe trait Plain: Copy {
    /// All fields zero.
    fn zeroed() -> Self {
        // SAFETY: all zero is a valid value of a Plain type.
        unsafe { std::mem::zeroed() }
    }
}

/// A plain struct whose first field is `uint64_t struct_size`. `#[derive(Plain)]` implements it.
///
/// # Safety
/// The struct is `repr(C)`, and its first field is `struct_size: u64`.
pub(crate) unsafe trait HasSize: Plain {}

/// Implements [`Plain`] for types of fields.
macro_rules! plain {
    ($($kind:ty)*) => {
        // SAFETY: any bits are a value of these types.
        $(unsafe impl Plain for $kind {})*
    };
}
plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64);

// SAFETY: any address is a value of a raw pointer.
unsafe impl<T> Plain for *const T {}
// SAFETY: as above.
unsafe impl<T> Plain for *mut T {}
// SAFETY: any bytes are values of the elements.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Implements [`Plain`] for nullable functions: null is `None`, any other address is a function.
/// The code that calls it relies on the caller's promise that the address is valid.
macro_rules! plain_functions {
    ($($argument:ident)*) => {
        // SAFETY: any address is a value of a nullable function.
        unsafe impl<R, $($argument),*> Plain for Option<unsafe extern "C" fn($($argument),*) -> R> {}
        plain_functions!(@next $($argument)*);
    };
    (@next $first:ident $($rest:ident)*) => { plain_functions!($($rest)*); };
    (@next) => {};
}
plain_functions!(A B C D E F G H I J);

/// Reads a struct of which the caller has `given` bytes.
///
/// # Safety
/// `from` must be valid for reads of `given` bytes.
unsafe fn copy_in<T: Plain>(from: *const u8, given: usize) -> Result<T> {
    let known = size_of::<T>();
    let mut value = T::zeroed();
    // SAFETY: at most `given` bytes are read and at most `known` written.
    unsafe {
        std::ptr::copy_nonoverlapping(from, (&raw mut value).cast::<u8>(), known.min(given));
        for i in known..given {
            if from.add(i).read() != 0 {
                fail!(
                    TooNew,
                    "byte {i} of a struct is set, this library knows {known} bytes: clear the \
                     later fields, or update the library"
                );
            }
        }
    }
    Ok(value)
}

/// Reads an input struct. Null means the defaults.
///
/// # Safety
/// `from` is null or points to a struct that begins with its size.
pub(crate) unsafe fn read<T: HasSize>(from: *const T) -> Result<T> {
    if from.is_null() {
        return Ok(T::zeroed());
    }
    // SAFETY: the caller's promise; unaligned, since C may pack.
    let given = unsafe { from.cast::<u64>().read_unaligned() };
    check_size(given)?;
    // SAFETY: the caller's promise: the struct has `given` bytes.
    unsafe { copy_in(from.cast(), given as usize) }
}

fn check_size(given: u64) -> Result<()> {
    // Structs grow by whole words: another size would split a pointer.
    if (8..=MAX_STRUCT_BYTES).contains(&given) && given.is_multiple_of(8) {
        return Ok(());
    }
    let text = format!("struct_size is {given}: initialise the struct with its KVT_..._INIT");
    Err(Error::new(Status::Invalid, text))
}

/// Checks an output struct before any work is done.
///
/// # Safety
/// `to` is null or points to a struct that begins with its size.
pub(crate) unsafe fn check_out<T: HasSize>(to: *mut T) -> Result<()> {
    if to.is_null() {
        fail!(Invalid, "an output pointer is null: the call needs it");
    }
    // SAFETY: the caller's promise.
    check_size(unsafe { to.cast::<u64>().read_unaligned() })
}

/// Checks an output struct that may be null.
///
/// # Safety
/// As [`check_out`].
pub(crate) unsafe fn check_optional_out<T: HasSize>(to: *mut T) -> Result<()> {
    // SAFETY: the caller's promise.
    if to.is_null() { Ok(()) } else { unsafe { check_out(to) } }
}

/// Writes the part of `value` that fits into the caller's struct, and this library's size of the
/// struct. Null: writes nothing.
///
/// # Safety
/// `to` passed [`check_out`] or [`check_optional_out`] and is valid for writes of the size it
/// states.
pub(crate) unsafe fn write<T: HasSize>(to: *mut T, value: &T) {
    if to.is_null() {
        return;
    }
    // SAFETY: the caller's promise; at most the size it states is written.
    unsafe {
        let given = to.cast::<u64>().read_unaligned() as usize;
        let n = given.min(size_of::<T>());
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to.cast::<u8>(), n);
        to.cast::<u64>().write_unaligned(size_of::<T>() as u64);
    }
}

/// The caller's array of structs without `struct_size`: the stride is the size of each.
pub(crate) struct Strided<T> {
    base: *mut u8,
    count: usize,
    stride: usize,
    _entry: std::marker::PhantomData<T>,
}

impl<T: Plain> Strided<T> {
    /// An array of at most `max` entries.
    ///
    /// # Safety
    /// `base` is null (with a count of 0) or valid for `count` * `stride` bytes.
    pub(crate) unsafe fn new(base: *mut T, count: u64, stride: u64, max: u64) -> Result<Self> {
        if count > max {
            fail!(Limit, "the array has {count} entries: at most {max} are accepted");
        }
        if count > 0 && base.is_null() {
            fail!(Invalid, "the array is null and has {count} entries: pass its address");
        }
        let is_valid = (8..=MAX_STRUCT_BYTES).contains(&stride) && stride.is_multiple_of(8);
        if count > 0 && !is_valid {
            fail!(Invalid, "stride_bytes is {stride}: pass the sizeof of one entry");
        }
        let (count, stride) = (count as usize, stride as usize);
        Ok(Strided { base: base.cast(), count, stride, _entry: std::marker::PhantomData })
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Reads an entry by the same rule as [`read`].
    pub(crate) fn get(&self, index: usize) -> Result<T> {
        assert!(index < self.count);
        // SAFETY: inside the array, by the promise made to `new`.
        unsafe { copy_in(self.base.add(index * self.stride), self.stride) }
    }

    /// Writes the part of an entry that fits into the stride.
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

/// Writes entries to the caller's array if all fit, and their number in any case. With
/// `counts_only` (a null array) only their number.
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
        fail!(
            TooSmall,
            "there are {count} entries, the array has room for {}: pass a larger one",
            rows.len()
        );
    }
    values.enumerate().for_each(|(i, value)| rows.put(i, &value));
    Ok(())
}

/// Fails if flags are set that are not `known`.
pub(crate) fn known_flags(flags: u64, known: u64) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => fail!(Invalid, "flags {unknown:#x} are unknown: accepted are {known:#x}"),
    }
}

// Pointers with a length: null with length 0 is an empty slice.

/// Longest accepted text.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// The caller's bytes.
///
/// # Safety
/// `data` is null with a length of 0, or valid for reads of `len` bytes that nothing writes while
/// the slice is in use.
pub(crate) unsafe fn bytes<'a>(data: *const u8, len: u64) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        fail!(Invalid, "the pointer is null and the length is {len}: pass an address, or length 0");
    }
    if len > isize::MAX as u64 || (data.addr() as u64).checked_add(len).is_none() {
        fail!(Invalid, "the length of {len} bytes reaches beyond the address space");
    }
    // SAFETY: not null, no overflow, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len as usize) })
}

/// The caller's array of at most `max` numbers; null with a count of 0 is empty.
///
/// # Safety
/// `data` is null or valid for reads of `count` numbers that nothing writes while the slice is in
/// use.
pub(crate) unsafe fn numbers<'a, T>(data: *const T, count: u64, max: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > max as u64 {
        fail!(Limit, "the array has {count} entries: at most {max} are accepted");
    }
    if data.is_null() || !data.is_aligned() {
        fail!(
            Invalid,
            "the array of {count} entries is null or misaligned: its alignment is {} bytes",
            align_of::<T>()
        );
    }
    // SAFETY: not null, aligned, at most 2^28 entries, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, count as usize) })
}

/// The length of a text; [`KVT_NUL_TERMINATED`] = up to its NUL.
///
/// # Safety
/// With a length of [`KVT_NUL_TERMINATED`] `data` is null, or valid for reads up to a NUL.
pub(crate) unsafe fn length_of(name: &str, data: *const c_char, len: u64) -> Result<u64> {
    if len != KVT_NUL_TERMINATED {
        return Ok(len);
    }
    if data.is_null() {
        return Ok(0);
    }
    // SAFETY: the caller's promise; no byte after the first NUL is read.
    let end = (0..=MAX_TEXT_BYTES).find(|&at| unsafe { data.add(at as usize).read() } == 0);
    match end {
        Some(end) => Ok(end),
        None => fail!(Limit, "{name} has no NUL after at most {MAX_TEXT_BYTES} bytes: shorten it"),
    }
}

/// The bytes of a text. INVALID = a pointer with length 0: the caller forgot the length.
///
/// # Safety
/// As [`bytes`] and [`length_of`].
pub(crate) unsafe fn text_bytes<'a>(name: &str, data: *const c_char, len: u64) -> Result<&'a [u8]> {
    if len == 0 && !data.is_null() {
        fail!(
            Invalid,
            "{name} is set and its length is 0: pass the length in bytes or KVT_NUL_TERMINATED, or \
             a null text for none"
        );
    }
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(name, data, len)? };
    if len > MAX_TEXT_BYTES {
        fail!(Limit, "{name} has {len} bytes: at most {MAX_TEXT_BYTES} are accepted");
    }
    // SAFETY: the caller's promise.
    unsafe { bytes(data.cast(), len) }.map_err(|error| error.within(name))
}

/// A UTF-8 text, by the rules of [`text_bytes`].
///
/// # Safety
/// As [`text_bytes`].
pub(crate) unsafe fn text<'a>(name: &str, data: *const c_char, len: u64) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { text_bytes(name, data, len)? };
    std::str::from_utf8(bytes).map_err(|e| {
        Error::at(Status::Invalid, e.valid_up_to(), format!("{name} is not UTF-8: {e}"))
    })
}

/// Checks an output pointer before any work is done.
pub(crate) fn require<T>(out: *mut T) -> Result<()> {
    if out.is_null() {
        fail!(Invalid, "an output pointer is null: the call needs it");
    }
    Ok(())
}

/// Writes a text to the caller's buffer if it fits, and its length in any case. A null buffer asks
/// for the length alone.
///
/// # Safety
/// `out` is null or has room for `capacity` bytes; `out_bytes` is null or valid for a write.
pub(crate) unsafe fn give_text(
    text: &str,
    out: *mut c_char,
    capacity: u64,
    out_bytes: *mut u64,
) -> Result<()> {
    let needed = text.len() as u64;
    if !out_bytes.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out_bytes.write(needed) };
    }
    if out.is_null() {
        return Ok(());
    }
    if capacity < needed {
        fail!(TooSmall, "the text has {needed} bytes, the buffer {capacity}: pass a larger one");
    }
    // SAFETY: the caller has room for `capacity` >= `needed` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    Ok(())
}

/// Writes an output that may be null.
///
/// # Safety
/// `out` is null or valid for a write.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(value) };
    }
}

/// Fails if a reserved field is set.
pub(crate) fn no_reserved(value: u32) -> Result<()> {
    match value {
        0 => Ok(()),
        value => fail!(Invalid, "reserved is {value}: it must be 0"),
    }
}

#[cfg(test)]
#[allow(clippy::panic)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Plain)]
    struct Small {
        struct_size: u64,
        a: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, Plain)]
    struct Large {
        struct_size: u64,
        a: u64,
        b: u64,
    }

    #[test]
    fn smaller_structs_get_defaults_and_larger_ones_are_checked() {
        let small = Small { struct_size: 16, a: 7 };
        // SAFETY: no struct is shorter than the size that is read of it, in every case below.
        unsafe {
            let read = read::<Large>((&raw const small).cast());
            assert_eq!(read.map(|l| (l.a, l.b)), Ok((7, 0)));
            let mut large = Large { struct_size: 24, a: 7, b: 0 };
            assert!(super::read::<Small>((&raw const large).cast()).is_ok());
            large.b = 1;
            let error = super::read::<Small>((&raw const large).cast()).err();
            assert_eq!(error.map(|e| e.status()), Some(Status::TooNew));
            for size in [0, 7, 12, 4097, 4104, u64::MAX] {
                large.struct_size = size;
                assert!(super::read::<Large>(&raw const large).is_err());
            }
        }
    }

    #[test]
    fn output_is_cut_to_the_callers_size() {
        let mut large = Large { struct_size: 16, a: 0, b: 99 };
        // SAFETY: `large` is at least as large as it says.
        unsafe {
            assert!(check_out(&raw mut large).is_ok());
            write(&raw mut large, &Large { struct_size: 24, a: 5, b: 6 });
        }
        assert_eq!((large.struct_size, large.a, large.b), (24, 5, 99));
    }

    struct Counter(u32);
    struct counter_t(());
    noun!(Counter, counter_t, 0x7f, "counter");

    #[test]
    fn a_panic_inside_a_call_poisons_the_object() {
        let Ok(mut handle) = insert(Counter(7)) else { panic!("no room") };
        let unwound = catch(|| {
            let _entered = enter(handle);
            panic!("planted");
        });
        assert!(unwound.is_err());
        assert_eq!(enter(handle).err().map(|e| e.status()), Some(Status::Panic));
        assert_eq!(inspect(handle).map(|counter| counter.0), Ok(7));
        // SAFETY: the variable is ours.
        assert!(unsafe { free(&raw mut handle, |_| Ok(())) }.is_ok() && handle.is_null());
    }

    #[test]
    fn a_call_from_a_destructor_during_a_panic_does_not_poison() {
        struct Calls(*mut counter_t);
        impl Drop for Calls {
            fn drop(&mut self) {
                assert!(inspect(self.0).is_ok());
            }
        }
        let Ok(handle) = insert(Counter(7)) else { panic!("no room") };
        let unwound = catch(|| {
            let _calls = Calls(handle);
            panic!("planted");
        });
        assert!(unwound.is_err() && enter(handle).is_ok());
    }
}
