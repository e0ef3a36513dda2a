//! The machinery of the boundary: guards against panics, handles, structs that grow, and pointers
//! with a length. The exported functions stand on it, and on the macros of `kvtier-macros`.

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

/// Runs the body of an exported function. A panic becomes KVT_E_PANIC.
#[inline]
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> kvt_status_t {
    match catch(body) {
        Ok(Ok(())) => Status::Ok.code(),
        Ok(Err(error)) => error.status().code(),
        Err(text) => {
            log::error!("caught a defect: {text}");
            Status::Panic.code()
        }
    }
}

/// Like [`guard`], for functions that explain their failures through `err`.
///
/// # Safety
/// `err` is null or points to a handle that is null or an error's.
pub(crate) unsafe fn guard_err(
    err: *mut *mut kvt_error_t,
    body: impl FnOnce() -> Result<()>,
) -> kvt_status_t {
    let error = match catch(body) {
        Ok(Ok(())) => return Status::Ok.code(),
        Ok(Err(error)) => error,
        Err(text) => {
            log::error!("caught a defect: {text}");
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

/// A caller's callback with its data, not yet taken over. A destroy function without a callback is
/// refused: nobody would ever call it.
pub(crate) fn foreign<F: Copy>(
    function: Option<F>,
    user_data: *mut c_void,
    destroy: kvt_destroy_fn,
) -> Result<Option<Arc<Foreign<F>>>> {
    match function {
        Some(function) => Ok(Some(Arc::new(Foreign::new(function, user_data, destroy)))),
        None if destroy.is_some() => fail!(Invalid, "a destroy without the callback it belongs to"),
        None => Ok(None),
    }
}

// Handles: pointers that are never followed. A handle encodes the type, the slot and the generation
// of an object. Its top bits keep it out of every address that a program can have: a program that
// follows one by mistake faults at once.

/// Not a canonical x86-64 address, whatever the low bits are.
const MARK: u64 = 0x80;
const TYPE_SHIFT: u32 = 56;
const KEY_BITS: u64 = (1 << TYPE_SHIFT) - 1;

/// A type that crosses the boundary as a handle. [`noun!`] implements it.
pub(crate) trait Noun: Send + Sync + Sized + 'static {
    /// The opaque C type.
    type C: Opaque<Noun = Self>;
    /// Its number in handles; never reused.
    const TYPE: u8;
    /// Its name in messages.
    const NAME: &'static str;
    /// The table of its objects.
    fn table() -> &'static Slab<Self>;
}

/// An opaque C type: pointers to it are handles.
pub(crate) trait Opaque: Sized {
    /// The type of the objects behind the handles.
    type Noun: Noun<C = Self>;
}

/// `noun!(SessionNoun, kvt_session_t, 12, "session")`: objects of the first type are known to C by
/// handles of the second; then the type's number in handles and its name in messages. A fifth
/// argument is the table, where another module owns it.
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

/// What a call does with an object. An object in which a panic was caught is poisoned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Uses it; refused for a poisoned object.
    Use,
    /// Reads, drains or closes it; allowed for a poisoned object.
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

#[cold]
fn no_such<N: Noun>(handle: *const N::C) -> Error {
    let bits = handle.addr() as u64;
    let what = match bits >> TYPE_SHIFT {
        _ if bits == 0 => "is null",
        kind if kind == MARK | u64::from(N::TYPE) => "is stale: its object was freed",
        kind if kind & MARK != 0 => "is of another type",
        _ => "was not made by this library",
    };
    Error::new(Status::Handle, format!("the {} handle {what}", N::NAME))
}

/// Pins the object of a handle: it stays until the pin is dropped.
#[inline]
pub(crate) fn pin<C: Opaque>(handle: *const C, access: Access) -> Result<Pin<'static, C::Noun>> {
    fork::check()?;
    let pin = decode::<C::Noun>(handle).and_then(|key| C::Noun::table().pin(key));
    let Some(pin) = pin else { return Err(no_such::<C::Noun>(handle)) };
    if pin.is_poisoned() && access == Access::Use {
        return Err(Status::Panic.into());
    }
    Ok(pin)
}

/// Pins the object of a handle that may be null.
pub(crate) fn pin_optional<C: Opaque>(handle: *const C) -> Result<Option<Pin<'static, C::Noun>>> {
    if handle.is_null() { Ok(None) } else { pin(handle, Access::Use).map(Some) }
}

/// An object that a call is inside of. A panic meanwhile poisons the object.
pub(crate) struct Entered<N: Noun> {
    pin: Pin<'static, N>,
    /// The call was made by a destructor during a panic elsewhere, which is not this object's.
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

/// Enters the object of a handle.
#[inline]
pub(crate) fn access<C: Opaque>(handle: *const C, access: Access) -> Result<Entered<C::Noun>> {
    Ok(Entered { pin: pin(handle, access)?, in_unwinding: unwinding() })
}

/// Enters an object to use it.
#[inline]
pub(crate) fn enter<C: Opaque>(handle: *const C) -> Result<Entered<C::Noun>> {
    access(handle, Access::Use)
}

/// Enters an object to read, drain or close it; also a poisoned one.
#[inline]
pub(crate) fn inspect<C: Opaque>(handle: *const C) -> Result<Entered<C::Noun>> {
    access(handle, Access::Salvage)
}

/// Puts an object into its table.
pub(crate) fn insert<N: Noun>(noun: N) -> Result<*mut N::C> {
    N::table().insert(noun).map(encode::<N>).map_err(|e| e.within(N::NAME))
}

/// Closes the object that a variable has the handle of, and clears the variable. A null pointer
/// and a null handle are fine.
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
    // Read and written as plain memory: while a close waits, a callback of the caller's may read
    // the variable.
    // SAFETY: not null, and the caller's promise.
    let value = unsafe { handle.read() };
    if value.is_null() {
        return Ok(());
    }
    let object = inspect(value)?;
    close(&object)?;
    if !object.remove() {
        return Err(no_such::<C::Noun>(value));
    }
    // The last pin drops the object: before the variable says that it is gone.
    drop(object);
    // SAFETY: as above.
    unsafe { handle.write(std::ptr::null_mut()) };
    Ok(())
}

// Structs that grow: the first field says how large the caller's is. Fields that a smaller one
// lacks are zero, the default. A larger one is accepted while the bytes that this library does not
// know are zero; otherwise the caller wants something newer.

/// No struct of this interface is larger, nor will be.
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
/// `repr(C)`, and the first field is as said.
pub(crate) unsafe trait HasSize: Plain {}

/// Types of fields.
macro_rules! plain {
    ($($kind:ty)*) => {
        // SAFETY: any bits are a value of these.
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

/// Nullable functions: null is `None`, any other address a function. The caller promises that it
/// is one where it is called.
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
pub(crate) unsafe fn read<T: HasSize>(from: *const T) -> Result<T> {
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
pub(crate) unsafe fn check_out<T: HasSize>(to: *mut T) -> Result<()> {
    if to.is_null() {
        fail!(Invalid, "the output pointer is null");
    }
    // SAFETY: the caller's promise.
    check_size(unsafe { to.cast::<u64>().read_unaligned() })
}

/// Checks an output struct that the caller may leave out.
///
/// # Safety
/// As [`check_out`].
pub(crate) unsafe fn check_optional_out<T: HasSize>(to: *mut T) -> Result<()> {
    // SAFETY: the caller's promise.
    if to.is_null() { Ok(()) } else { unsafe { check_out(to) } }
}

/// Writes as much of `value` as the caller's struct holds, and our size. Null is nothing.
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

// Pointers with a length: null with 0 is an empty slice.

/// Longest text that is looked at.
const MAX_TEXT_BYTES: u64 = 1 << 20;

/// # Safety
/// `data` is null with a length of 0, or valid for reads of `len` bytes that
/// nobody changes meanwhile.
pub(crate) unsafe fn bytes<'a>(data: *const u8, len: u64) -> Result<&'a [u8]> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        fail!(Invalid, "the pointer is null and the length {len}");
    }
    if len > isize::MAX as u64 || (data.addr() as u64).checked_add(len).is_none() {
        fail!(Invalid, "a length of {len} bytes wraps around the address space");
    }
    // SAFETY: not null, no overflow, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, len as usize) })
}

/// An array of numbers; null with 0 is an empty one.
///
/// # Safety
/// `data` is null or valid for reads of `count` numbers that nobody changes
/// meanwhile.
pub(crate) unsafe fn numbers<'a, T>(data: *const T, count: u64, max: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > max as u64 {
        fail!(Limit, "an array of {count} entries, at most {max} are allowed");
    }
    if data.is_null() || !data.is_aligned() {
        fail!(Invalid, "the array of {count} entries is null or not aligned");
    }
    // SAFETY: not null, aligned, at most 2^28 entries, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(data, count as usize) })
}

/// How long a text is that may end with a NUL.
///
/// # Safety
/// With a length of [`KVT_NUL_TERMINATED`] `data` is null, or valid for reads up to a NUL.
pub(crate) unsafe fn length_of(what: &str, data: *const c_char, len: u64) -> Result<u64> {
    if len != KVT_NUL_TERMINATED {
        return Ok(len);
    }
    if data.is_null() {
        return Ok(0);
    }
    // SAFETY: the caller's promise; nothing is read behind the first NUL.
    let end = (0..=MAX_TEXT_BYTES).find(|&at| unsafe { data.add(at as usize).read() } == 0);
    match end {
        Some(end) => Ok(end),
        None => fail!(Limit, "{what} has no NUL in its first {MAX_TEXT_BYTES} bytes"),
    }
}

/// The bytes of a text. A pointer without a length is refused: it was forgotten.
///
/// # Safety
/// As [`bytes`] and [`length_of`].
pub(crate) unsafe fn text_bytes<'a>(what: &str, data: *const c_char, len: u64) -> Result<&'a [u8]> {
    if len == 0 && !data.is_null() {
        fail!(
            Invalid,
            "{what} is given and its length is 0: say how many bytes it has, or KVT_NUL_TERMINATED; \
             null is none"
        );
    }
    // SAFETY: the caller's promise.
    let len = unsafe { length_of(what, data, len)? };
    if len > MAX_TEXT_BYTES {
        fail!(Limit, "{what} has {len} bytes, at most {MAX_TEXT_BYTES} are allowed");
    }
    // SAFETY: the caller's promise.
    unsafe { bytes(data.cast(), len) }.map_err(|error| error.within(what))
}

/// The same of one that is UTF-8.
///
/// # Safety
/// As [`text_bytes`].
pub(crate) unsafe fn text<'a>(what: &str, data: *const c_char, len: u64) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    let bytes = unsafe { text_bytes(what, data, len)? };
    std::str::from_utf8(bytes).map_err(|e| {
        Error::at(Status::Invalid, e.valid_up_to(), format!("{what} is not UTF-8: {e}"))
    })
}

/// Checks an output pointer before any work is done.
pub(crate) fn require<T>(out: *mut T) -> Result<()> {
    if out.is_null() {
        fail!(Invalid, "the output pointer is null");
    }
    Ok(())
}

/// Hands a text out; how long it is, in any case.
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
        let words = format!("the text has {needed} bytes, room is {capacity}");
        return Err(Error::new(Status::TooSmall, words));
    }
    // SAFETY: the caller has room for `capacity` >= `needed` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    Ok(())
}

/// Writes an output that the caller may have left out: null is nothing.
///
/// # Safety
/// `out` is null or valid for a write.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(value) };
    }
}

/// Refuses a reserved field that is set.
pub(crate) fn no_reserved(value: u32) -> Result<()> {
    match value {
        0 => Ok(()),
        value => Err(Error::new(Status::Invalid, format!("reserved is {value}"))),
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
    fn older_callers_get_defaults_and_newer_ones_are_checked() {
        let small = Small { struct_size: 16, a: 7 };
        // SAFETY: the size field says how much is there, in every case below.
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
    fn outputs_fit_the_callers_size() {
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
    fn a_call_from_a_destructor_during_a_panic_poisons_nothing() {
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
