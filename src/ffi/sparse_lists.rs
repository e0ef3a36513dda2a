//! Indexes and lists of what is kept, as they come in and go out.

use crate::attention::keys::{Head, Keys, Kind};
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::ffi::abi::{read, write};
use crate::ffi::policy_use::numbers;
use crate::ffi::sparse_ask::{MAX_ITEMS, kvt_index_head_t, kvt_index_t, kvt_token_lists_t};
use crate::sparse::RetainedTokens;
use crate::sparse::lists::Lists;
use crate::sparse::shape::MAX_HEADS;

/// Whether a list of ours has room somewhere.
fn fits<T, U>(from: &[T], to: *mut U, capacity: u64) -> bool {
    from.is_empty() || (!to.is_null() && to.is_aligned() && from.len() as u64 <= capacity)
}

/// Copies a list of ours.
///
/// # Safety
/// It [`fits`], and `to` is valid for writes of its room.
unsafe fn give<T: Copy, U: Copy>(from: &[T], to: *mut U) {
    const { assert!(size_of::<T>() == size_of::<U>() && align_of::<T>() == align_of::<U>()) };
    if !from.is_empty() {
        // SAFETY: long enough by the caller's promise, and of the same size; ours is not theirs.
        unsafe { to.cast::<T>().copy_from_nonoverlapping(from.as_ptr(), from.len()) };
    }
}

/// An error for arrays that are too short.
pub(crate) fn too_small(what: &str) -> Error {
    Error::new(Status::TooSmall, format!("{what} are too short: the struct says what is needed"))
}

/// Gives an index out. With too little room only counts are written.
///
/// # Safety
/// `out` passed `check_out`; its arrays are valid for their room.
pub(crate) unsafe fn give_index(index: &Keys<'_>, out: *mut kvt_index_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut given = read(out.cast_const())?;
        let (heads, starts, items) = (index.heads, index.starts, index.items);
        given.head_count = heads.len() as u64;
        given.start_count = starts.len() as u64;
        given.item_count = items.len() as u64;
        write(out, &given);
        if !(fits(heads, given.heads, given.head_capacity)
            && fits(starts, given.starts, given.start_capacity)
            && fits(items, given.items, given.item_capacity))
        {
            return Err(too_small("the arrays of the index"));
        }
        give(heads, given.heads);
        give(starts, given.starts);
        give(items, given.items);
        Ok(())
    }
}

/// Gives lists of what is kept out, in the same manner.
///
/// # Safety
/// As of [`give_index`].
pub(crate) unsafe fn give_keep(lists: &Lists, out: *mut kvt_token_lists_t) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        let mut given = read(out.cast_const())?;
        let Lists { starts, items } = lists;
        given.start_count = starts.len() as u64;
        given.item_count = items.len() as u64;
        write(out, &given);
        if !(fits(starts, given.starts, given.start_capacity)
            && fits(items, given.items, given.item_capacity))
        {
            return Err(too_small("the lists of what is kept"));
        }
        give(starts, given.starts);
        give(items, given.items);
        Ok(())
    }
}

/// The heads of an index from outside: kinds are checked before they are ours.
///
/// # Safety
/// As of [`numbers`].
unsafe fn heads_of<'a>(given: &kvt_index_t) -> Result<&'a [Head]> {
    // SAFETY: the caller's promise.
    let heads = unsafe { numbers(given.heads.cast_const(), given.head_count, MAX_HEADS as usize)? };
    if let Some(head) = heads.iter().find(|head| head.kind > Kind::Ranges as u32) {
        fail!(Invalid, "a head of kind {}, which is none of KVT_INDEX_*", head.kind);
    }
    const { assert!(size_of::<Head>() == size_of::<kvt_index_head_t>()) };
    // SAFETY: the same six numbers in the same order, and every kind is one.
    Ok(unsafe { std::slice::from_raw_parts(heads.as_ptr().cast(), heads.len()) })
}

/// An index from outside, as kernels take it; they check what is in it. Null = all keys.
///
/// # Safety
/// `given` is null or valid for the size it states; its arrays can be read for their counts,
/// and nobody writes them, as long as the answer lives.
pub(crate) unsafe fn keys_of<'a>(given: *const kvt_index_t) -> Result<Keys<'a>> {
    if given.is_null() {
        return Ok(Keys::DENSE);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = read(given)?;
        Ok(Keys {
            heads: heads_of(&given)?,
            starts: numbers(given.starts.cast_const(), given.start_count, MAX_ITEMS)?,
            items: numbers(given.items.cast_const(), given.item_count, MAX_ITEMS)?,
        })
    }
}

/// Lists of what is kept from outside, in memory of our own.
///
/// # Safety
/// `given` is valid for the size it states, its arrays for reads of their counts.
pub(crate) unsafe fn keep_of(given: *const kvt_token_lists_t) -> Result<RetainedTokens> {
    // SAFETY: the caller's promise.
    let (starts, items) = unsafe {
        let given = read(given)?;
        let starts = numbers(given.starts.cast_const(), given.start_count, MAX_ITEMS)?;
        (starts, numbers(given.items.cast_const(), given.item_count, MAX_ITEMS)?)
    };
    let is_end = starts.last().map_or(items.is_empty(), |&end| end as usize == items.len());
    if starts.first().is_some_and(|&first| first != 0) || !is_end || !starts.is_sorted() {
        fail!(Invalid, "starts of lists do not lead through all items");
    }
    let mut keep = RetainedTokens::default();
    let Lists { starts: ours, items: all } = &mut keep.heads;
    if ours.try_reserve_exact(starts.len()).and(all.try_reserve_exact(items.len())).is_err() {
        return Err(Status::NoMem.into());
    }
    ours.extend_from_slice(starts);
    all.extend_from_slice(items);
    Ok(keep)
}

/// Lists of what is kept as C has them; borrowed as they are.
pub(crate) fn keep_for_c(keep: &RetainedTokens) -> kvt_token_lists_t {
    let Lists { starts, items } = &keep.heads;
    kvt_token_lists_t {
        struct_size: size_of::<kvt_token_lists_t>() as u64,
        starts: starts.as_ptr().cast_mut(),
        start_capacity: 0,
        start_count: starts.len() as u64,
        items: items.as_ptr().cast_mut(),
        item_capacity: 0,
        item_count: items.len() as u64,
    }
}
