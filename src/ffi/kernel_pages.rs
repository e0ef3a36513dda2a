//! What stands beside the kernels: boxes of pages and their scores, parts put together,
//! numbers looked at.

use crate::attention::{Level, Rows, check_finite, merge, pages};
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::capi;
use crate::ffi::attention::{kvt_rows_t, with_rows};
use crate::ffi::error::kvt_error_t;
use crate::ffi::kernel::numbers_mut;
use crate::ffi::policy_use::numbers;
use crate::ffi::status::kvt_status_t;

/// Most numbers of an array.
const MAX_NUMBERS: usize = 1 << 40;

/// Rows that must be there.
pub(crate) fn given<'a, 'b>(what: &str, rows: Option<&'a Rows<'b>>) -> Result<&'a Rows<'b>> {
    match rows {
        Some(rows) => Ok(rows),
        None => fail!(Invalid, "{what} is null"),
    }
}

/// Adds keys to the boxes of pages: of each page and head the least and the largest of each
/// number of its keys, [pages, key heads, 2 * key dim].
///
/// @param boxes        The boxes.
/// @param box_count    How many numbers.
/// @param page_tokens  Tokens of a page.
/// @param first        The place of the first key: one that begins a page begins its box anew,
///                     others make it wider.
/// @param keys         [tokens, key heads, key dim].
/// @param err          Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE,
///         KVT_E_TOO_NEW, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `boxes` is valid for reads and writes of `box_count` numbers; `keys` leads to memory that
/// can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_pages_extend(
    boxes: *mut f32,
    box_count: u64,
    page_tokens: u32,
    first: u32,
    keys: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let boxes = numbers_mut(boxes, box_count)?;
    with_rows("keys", keys, |keys| pages::extend(boxes, page_tokens, first, given("keys", keys)?))
}

/// The largest product that a query can have with a key of each page, by its box:
/// [queries, query heads, count].
///
/// @param boxes          [pages, key heads, 2 * key dim], f32 or bf16: rows of boxes.
/// @param queries        [queries, query heads, key dim].
/// @param first          The first page.
/// @param count          How many.
/// @param scores         Receives the scores.
/// @param score_count    How many numbers that are.
/// @param scratch        Memory of the call.
/// @param scratch_count  How many numbers; queries * query heads * (2 * key dim + 96) +
///                       4096 are enough.
/// @param err            Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED,
///         KVT_E_UNAVAILABLE, KVT_E_TOO_NEW, KVT_E_PANIC.
///
/// Threading: any threads at a time, with pages of their own. Since 0.1.
///
/// # Safety
/// Arrays are valid for their counts, and views lead to memory that can be read during the
/// call.
#[capi]
pub unsafe extern "C" fn kvt_pages_score(
    boxes: *const kvt_rows_t,
    queries: *const kvt_rows_t,
    first: u32,
    count: u32,
    scores: *mut f32,
    score_count: u64,
    scratch: *mut f32,
    scratch_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let scores = numbers_mut(scores, score_count)?;
    let scratch = numbers_mut(scratch, scratch_count)?;
    with_rows("boxes", boxes, |boxes| {
        with_rows("queries", queries, |queries| {
            let (boxes, queries) = (given("boxes", boxes)?, given("queries", queries)?);
            pages::scores(Level::best(), boxes, queries, (first, count), scores, scratch)
        })
    })
}

/// Puts attention to other keys together with what is there: results of pieces of the keys, by
/// their log-sum-exps.
///
/// @param out        [rows, numbers of a value]: what is there, and comes out.
/// @param lse        [rows]: likewise.
/// @param other      Attention of the same queries to the other keys.
/// @param other_lse  Its log-sum-exps.
/// @param rows       How many rows: queries times query heads.
/// @param dim        Numbers of a row.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_LIMIT, KVT_E_PANIC.
///
/// Threading: any threads at a time, with rows of their own. Since 0.1.
///
/// # Safety
/// Arrays are valid for so many rows, and overlap nowhere.
#[capi]
pub unsafe extern "C" fn kvt_attention_merge(
    out: *mut f32,
    lse: *mut f32,
    other: *const f32,
    other_lse: *const f32,
    rows: u64,
    dim: u32,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let Some(all) = rows.checked_mul(dim.into()) else {
        fail!(Limit, "{rows} rows of {dim} numbers");
    };
    let (out, lse) = (numbers_mut(out, all)?, numbers_mut(lse, rows)?);
    merge(out, lse, numbers(other, all, MAX_NUMBERS)?, numbers(other_lse, rows, MAX_NUMBERS)?)
}

/// Whether all numbers of rows are finite, scales included. Kernels do not look: with others
/// they give some result. Policies refuse them.
///
/// @param rows  The rows.
/// @param err   Says which number is not; may be null.
/// @return KVT_OK; KVT_E_INVALID when one is not, KVT_E_UNSUPPORTED, KVT_E_UNAVAILABLE,
///         KVT_E_TOO_NEW, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// The view leads to memory that can be read during the call.
#[capi]
pub unsafe extern "C" fn kvt_rows_check(
    rows: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let check = |rows: Option<&Rows<'_>>| check_finite("numbers", given("rows", rows)?);
    with_rows("rows", rows, check)
}
