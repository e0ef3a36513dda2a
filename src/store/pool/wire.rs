//! How values pass between a store and the processes that share it: integers in little-endian order,
//! lists after their length. Both ends run the same version of the library ([`version`]), so there are
//! no optional fields.
//!
//! What a client sends is untrusted. A value is checked as it is read: lengths against the bytes that
//! are there, numbers of sessions and namespaces against those that the client has opened.

use std::collections::{BTreeMap, BTreeSet};

use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::meta::key::Key;

/// What a client has opened, and may name.
#[derive(Default)]
pub struct Opened {
    /// Sessions.
    pub sessions: BTreeSet<u32>,
    /// How often each one is open.
    pub namespaces: BTreeMap<u32, u32>,
}

/// Bytes that are read as values.
pub struct Bytes<'a> {
    left: &'a [u8],
    opened: Option<&'a Opened>,
}

impl<'a> Bytes<'a> {
    /// Bytes of the server, which a client trusts.
    pub fn trusted(left: &'a [u8]) -> Bytes<'a> {
        Bytes { left, opened: None }
    }

    /// Bytes of a client.
    pub fn of_client(left: &'a [u8], opened: &'a Opened) -> Bytes<'a> {
        Bytes { left, opened: Some(opened) }
    }

    /// The next bytes.
    pub fn next(&mut self, count: usize) -> Result<&'a [u8]> {
        let Some((now, left)) = self.left.split_at_checked(count) else {
            fail!(Corrupt, "a message ends {} bytes early", count - self.left.len());
        };
        self.left = left;
        Ok(now)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.next(N)?);
        Ok(out)
    }

    /// Fails if bytes are left.
    pub fn end(&self) -> Result<()> {
        match self.left.len() {
            0 => Ok(()),
            more => fail!(Corrupt, "a message has {more} bytes too many"),
        }
    }
}

/// A value that passes between processes.
pub trait Wire: Sized {
    /// Least bytes of a value.
    const LEAST_BYTES: usize;
    /// Appends the value.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads the value.
    fn take(from: &mut Bytes<'_>) -> Result<Self>;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Wire for $type {
            const LEAST_BYTES: usize = size_of::<$type>();
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(from: &mut Bytes<'_>) -> Result<$type> {
                Ok(<$type>::from_le_bytes(from.array()?))
            }
        }
    )*};
}

integers!(u8, u32, u64, i32, i64, f32, f64);

impl Wire for usize {
    const LEAST_BYTES: usize = 8;
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u64).put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<usize> {
        usize::try_from(u64::take(from)?).map_err(|_| Status::Limit.into())
    }
}

impl Wire for bool {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
    fn take(from: &mut Bytes<'_>) -> Result<bool> {
        match u8::take(from)? {
            0 => Ok(false),
            1 => Ok(true),
            other => fail!(Corrupt, "a truth value is {other}"),
        }
    }
}

impl Wire for () {
    const LEAST_BYTES: usize = 0;
    fn put(&self, _: &mut Vec<u8>) {}
    fn take(_: &mut Bytes<'_>) -> Result<()> {
        Ok(())
    }
}

impl<const N: usize> Wire for [u8; N] {
    const LEAST_BYTES: usize = N;
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn take(from: &mut Bytes<'_>) -> Result<[u8; N]> {
        from.array()
    }
}

impl<const N: usize> Wire for [u64; N] {
    const LEAST_BYTES: usize = 8 * N;
    fn put(&self, out: &mut Vec<u8>) {
        self.iter().for_each(|one| one.put(out));
    }
    fn take(from: &mut Bytes<'_>) -> Result<[u64; N]> {
        let mut all = [0; N];
        for one in &mut all {
            *one = u64::take(from)?;
        }
        Ok(all)
    }
}

impl Wire for Key {
    const LEAST_BYTES: usize = size_of::<Key>();
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<Key> {
        from.array().map(Key)
    }
}

impl Wire for String {
    const LEAST_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn take(from: &mut Bytes<'_>) -> Result<String> {
        String::from_utf8(Vec::take(from)?)
            .map_err(|_| Error::new(Status::Corrupt, "a text is not UTF-8"))
    }
}

impl<T: Wire> Wire for Vec<T> {
    const LEAST_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.reserve(self.len() * T::LEAST_BYTES);
        self.iter().for_each(|one| one.put(out));
    }
    fn take(from: &mut Bytes<'_>) -> Result<Vec<T>> {
        let count = u32::take(from)? as usize;
        // A length that the bytes cannot hold must not take memory.
        if count > from.left.len() / T::LEAST_BYTES.max(1) {
            fail!(Corrupt, "a list of {count} in {} bytes", from.left.len());
        }
        let mut all = Vec::new();
        all.try_reserve_exact(count).map_err(|_| Status::NoMem)?;
        for _ in 0..count {
            all.push(T::take(from)?);
        }
        Ok(all)
    }
}

impl<T: Wire> Wire for Option<T> {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        self.iter().for_each(|one| one.put(out));
    }
    fn take(from: &mut Bytes<'_>) -> Result<Option<T>> {
        bool::take(from)?.then(|| T::take(from)).transpose()
    }
}

macro_rules! tuples {
    ($(($($name:ident $at:tt),*))*) => {$(
        impl<$($name: Wire),*> Wire for ($($name,)*) {
            const LEAST_BYTES: usize = 0 $(+ $name::LEAST_BYTES)*;
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$at.put(out);)*
            }
            fn take(from: &mut Bytes<'_>) -> Result<Self> {
                Ok(($($name::take(from)?,)*))
            }
        }
    )*};
}

tuples!((A 0, B 1)(A 0, B 1, C 2)(A 0, B 1, C 2, D 3));

impl Wire for Error {
    const LEAST_BYTES: usize = 8;
    fn put(&self, out: &mut Vec<u8>) {
        self.status().code().put(out);
        self.message().to_string().put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<Error> {
        let (code, text) = (i32::take(from)?, String::take(from)?);
        let status = Status::from_code(code).filter(|status| *status != Status::Ok);
        Ok(Error::new(status.unwrap_or(Status::Io), text))
    }
}

impl<T: Wire> Wire for Result<T> {
    const LEAST_BYTES: usize = 1;
    fn put(&self, out: &mut Vec<u8>) {
        self.is_ok().put(out);
        match self {
            Ok(value) => value.put(out),
            Err(error) => error.put(out),
        }
    }
    fn take(from: &mut Bytes<'_>) -> Result<Result<T>> {
        Ok(match bool::take(from)? {
            true => Ok(T::take(from)?),
            false => Err(Error::take(from)?),
        })
    }
}

/// Makes a struct a [`Wire`], field by field.
macro_rules! wire_struct {
    ($name:ty { $($field:ident: $type:ty),* $(,)? }) => {
        impl $crate::store::pool::wire::Wire for $name {
            const LEAST_BYTES: usize =
                0 $(+ <$type as $crate::store::pool::wire::Wire>::LEAST_BYTES)*;
            #[allow(unused_variables)]
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::store::pool::wire::Wire::put(&self.$field, out);)*
            }
            #[allow(unused_variables)]
            fn take(
                from: &mut $crate::store::pool::wire::Bytes<'_>,
            ) -> $crate::base::status::Result<Self> {
                Ok(Self { $($field: $crate::store::pool::wire::Wire::take(from)?),* })
            }
        }
    };
}

/// Makes an enum without fields a [`Wire`], by its list of values.
macro_rules! wire_enum {
    ($name:ty: $($value:path),* $(,)?) => {
        impl $crate::store::pool::wire::Wire for $name {
            const LEAST_BYTES: usize = 1;
            fn put(&self, out: &mut Vec<u8>) {
                const ALL: &[$name] = &[$($value),*];
                let at = ALL.iter().position(|one| one == self).expect("all values are listed");
                out.push(at as u8);
            }
            fn take(
                from: &mut $crate::store::pool::wire::Bytes<'_>,
            ) -> $crate::base::status::Result<Self> {
                const ALL: &[$name] = &[$($value),*];
                let at = u8::take(from)?;
                match ALL.get(at as usize) {
                    Some(&value) => Ok(value),
                    None => $crate::fail!(
                        Corrupt, "{at} is no value of {}", std::any::type_name::<$name>()
                    ),
                }
            }
        }
    };
}

pub(super) use {wire_enum, wire_struct};

/// A session of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionId(pub u32);

/// A namespace of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceId(pub u32);

impl Wire for SessionId {
    const LEAST_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<SessionId> {
        let number = u32::take(from)?;
        if from.opened.is_some_and(|opened| !opened.sessions.contains(&number)) {
            fail!(NotFound, "session {number} is not one of this process");
        }
        Ok(SessionId(number))
    }
}

impl Wire for NamespaceId {
    const LEAST_BYTES: usize = 4;
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(from: &mut Bytes<'_>) -> Result<NamespaceId> {
        let number = u32::take(from)?;
        if from.opened.is_some_and(|opened| !opened.namespaces.contains_key(&number)) {
            fail!(NotFound, "namespace {number} is not one of this process");
        }
        Ok(NamespaceId(number))
    }
}

/// Plain data of the server, as its bytes in memory: only for answers.
#[derive(Clone, Copy)]
pub struct Raw<T: Copy>(pub T);

impl<T: Copy> Wire for Raw<T> {
    const LEAST_BYTES: usize = size_of::<T>();
    fn put(&self, out: &mut Vec<u8>) {
        let at = (&raw const self.0).cast::<u8>();
        // SAFETY: a whole value. Padding may be uninitialised in theory; types that are used here
        // are made of integers without padding, see `calls`.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(at, size_of::<T>()) });
    }
    fn take(from: &mut Bytes<'_>) -> Result<Raw<T>> {
        if from.opened.is_some() {
            fail!(Corrupt, "a client sends no plain data");
        }
        let bytes = from.next(size_of::<T>())?;
        // SAFETY: as many bytes, written from such a value by the same version of the library.
        Ok(Raw(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }))
    }
}

/// The version of the library, and of what passes between its processes.
pub fn version() -> String {
    let sizes = [
        size_of::<crate::store::state::StoreStats>(),
        size_of::<crate::store::events::Event>(),
        size_of::<crate::store::state::RemoteStats>(),
    ];
    format!("{} protocol 1 {sizes:?}", env!("CARGO_PKG_VERSION"))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    fn round<T: Wire + PartialEq + std::fmt::Debug>(value: T) {
        let mut out = Vec::new();
        value.put(&mut out);
        let mut bytes = Bytes::trusted(&out);
        assert_eq!(T::take(&mut bytes), Ok(value));
        assert_eq!(bytes.end(), Ok(()));
        for short in 0..out.len() {
            assert!(T::take(&mut Bytes::trusted(&out[..short])).is_err(), "{short}");
        }
    }

    #[test]
    fn values_pass_and_truncated_ones_do_not() {
        round((7u32, vec![1u64, 2], String::from("abc")));
        round(vec![Some(Key([9; 32])), None]);
        round(Err::<u32, Error>(Error::new(Status::Limit, "too many")));
        round(Ok::<Vec<u8>, Error>(vec![1, 2, 3]));
    }

    #[test]
    fn lengths_and_numbers_of_clients_are_checked() {
        let opened = Opened { sessions: [3].into(), namespaces: [(4, 1)].into() };
        let read = |bytes: &[u8]| SessionId::take(&mut Bytes::of_client(bytes, &opened));
        assert_eq!(read(&3u32.to_le_bytes()), Ok(SessionId(3)));
        assert_eq!(read(&4u32.to_le_bytes()).map_err(|e| e.status()), Err(Status::NotFound));
        let long = u32::MAX.to_le_bytes();
        let list = Vec::<u64>::take(&mut Bytes::of_client(&long, &opened));
        assert_eq!(list.map_err(|e| e.status()), Err(Status::Corrupt));
        assert!(Raw::<u64>::take(&mut Bytes::of_client(&[0; 8], &opened)).is_err());
        assert!(bool::take(&mut Bytes::trusted(&[2])).is_err());
    }
}
