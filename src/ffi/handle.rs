//! Handles: pointers that are never followed. They encode the type, the slot
//! and the generation of an object, and the top bits keep them out of every
//! address a program can have: who follows one by mistake faults at once.

use crate::base::fork;
use crate::base::slab::{Key, Pin, Slab};
use crate::base::status::{Error, Result, Status};

/// Not a canonical x86-64 address, whatever the low bits are.
const MARK: u64 = 0x80;
const TYPE_SHIFT: u32 = 56;
const KEY_BITS: u64 = (1 << TYPE_SHIFT) - 1;

/// A type that crosses the boundary as a handle.
pub(crate) trait Noun: Send + Sync + Sized + 'static {
    /// The opaque C type.
    type C;
    /// Its number in handles; never reused.
    const TYPE: u8;
    /// Its name in messages.
    const NAME: &'static str;
    /// Where its objects are.
    fn table() -> &'static Slab<Self>;
}

/// What a call does with an object; a poisoned one allows only to save what is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Uses it.
    Use,
    /// Looks at it, drains it or closes it.
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

/// Pins the object of a handle: it stays until the pin goes.
#[inline]
pub(crate) fn pin<N: Noun>(handle: *const N::C, access: Access) -> Result<Pin<'static, N>> {
    fork::check()?;
    let Some(pin) = decode::<N>(handle).and_then(|key| N::table().pin(key)) else {
        return Err(no_such::<N>(handle));
    };
    if pin.is_poisoned() && access == Access::Use {
        return Err(Status::Panic.into());
    }
    Ok(pin)
}

/// Calls `body` with the object of a handle; a panic inside poisons the object.
#[inline]
pub(crate) fn with<N: Noun, R>(
    handle: *const N::C,
    access: Access,
    body: impl FnOnce(&Pin<'static, N>) -> Result<R>,
) -> Result<R> {
    let pin = pin::<N>(handle, access)?;
    let sentry = Sentry(&pin);
    let result = body(&pin);
    std::mem::forget(sentry); // no panic: nothing to poison
    result
}

/// Poisons when it is dropped by unwinding.
struct Sentry<'a, N: Noun>(&'a Pin<'static, N>);

impl<N: Noun> Drop for Sentry<'_, N> {
    fn drop(&mut self) {
        self.0.poison();
    }
}

/// Puts an object into its table.
pub(crate) fn insert<N: Noun>(noun: N) -> Result<*mut N::C> {
    N::table().insert(noun).map(encode::<N>).map_err(|e| e.within(N::NAME))
}

/// Frees by pointer to handle: null is fine, and the handle is cleared.
///
/// # Safety
/// `handle` is null or valid for reads and writes.
pub(crate) unsafe fn free<N: Noun>(
    handle: *mut *mut N::C,
    close: impl FnOnce(&Pin<'static, N>) -> Result<()>,
) -> Result<()> {
    if handle.is_null() {
        return Ok(());
    }
    // Read and written as plain memory: while a close waits, a callback of the
    // caller's may look at the variable.
    // SAFETY: not null, and the caller's promise.
    let value = unsafe { handle.read() };
    if value.is_null() {
        return Ok(());
    }
    with::<N, ()>(value, Access::Salvage, |pin| {
        close(pin)?;
        if pin.remove() { Ok(()) } else { Err(no_such::<N>(value)) }
    })?;
    // SAFETY: as above.
    unsafe { handle.write(std::ptr::null_mut()) };
    Ok(())
}
