//! Memory for lists whose length comes from outside.

use crate::base::status::Result;
use crate::fail;

/// Lists that say so where there is no memory for them.
pub(super) trait Room: Sized {
    /// An empty list with room for so many.
    fn with_room(len: usize) -> Result<Self>;
}

impl<T> Room for Vec<T> {
    fn with_room(len: usize) -> Result<Vec<T>> {
        let mut list = Vec::new();
        if list.try_reserve_exact(len).is_err() {
            fail!(NoMem, "no memory for a plan of {len} units");
        }
        Ok(list)
    }
}

/// So many times the same.
pub(super) fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut list = Vec::with_room(len)?;
    list.resize(len, value);
    Ok(list)
}
