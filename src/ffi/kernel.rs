//! Attention on the processor: what is computed, and the jobs that compute it.

use crate::attention::{ColumnSums, Decode, Prefill, Problem};
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{Plain, capi, known_flags, read, require};
use crate::ffi::attention::{GivenRows, kvt_rows_t};
use crate::ffi::error::kvt_error_t;
use crate::ffi::job::{Kernel, Planes, kvt_job_t, open, with_kernel};
use crate::ffi::policy_use::numbers;
use crate::ffi::sparse_ask::kvt_index_t;
use crate::ffi::sparse_lists::keys_of;
use crate::ffi::status::kvt_status_t;

/// Scores are kept, for kvt_decode_sums.
pub const KVT_DECODE_SCORES: u64 = 1;
/// Sums for each query head; else one row for all of them.
pub const KVT_SUMS_BY_HEAD: u64 = 1;

/// Most numbers of an output.
const MAX_NUMBERS: usize = 1 << 40;

/// What is to be computed: queries are at `first_query` and the positions after it, and see
/// keys up to their own position.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_args_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// [tokens, query heads, key dim]
    pub queries: *const kvt_rows_t,
    /// [tokens, key heads, key dim]
    pub keys: *const kvt_rows_t,
    /// [tokens, key heads, value dim]; of a latent the first numbers of the keys, at the same
    /// address.
    pub values: *const kvt_rows_t,
    /// Which keys queries are computed with, by their positions; null = all. Policies say it
    /// (kvt_sparse_index), or the engine.
    pub select: *const kvt_index_t,
    /// The position of the first query.
    pub first_query: u32,
    /// The position of the first key: where keys come in pieces, results of each are put
    /// together by kvt_attention_merge.
    pub first_key: u32,
    /// What products are multiplied with; 0 = 1 / sqrt(key dim).
    pub scale: f32,
    /// Always 0.
    pub reserved: u32,
}

/// Reads a problem. It is checked by whoever makes a kernel of it.
///
/// # Safety
/// `given` is null or valid for the size it states. What it leads to can be read, and nobody
/// writes it, as long as the problem lives; that is not longer than the planes.
unsafe fn problem_of(given: *const kvt_attention_args_t) -> Result<(Problem<'static>, Planes)> {
    if given.is_null() {
        fail!(Invalid, "the problem is null");
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = read(given)?;
        if given.reserved != 0 {
            fail!(Invalid, "reserved is {}", given.reserved);
        }
        let plane = |what: &str, rows: *const kvt_rows_t| {
            if rows.is_null() {
                fail!(Invalid, "{what} is null");
            }
            GivenRows::new(what, &read(rows)?)
        };
        let planes = Planes::new([
            plane("queries", given.queries)?,
            plane("keys", given.keys)?,
            plane("values", given.values)?,
        ]);
        let [queries, keys, values] = planes.all();
        let args = Problem {
            queries: queries.rows("queries")?,
            keys: keys.rows("keys")?,
            values: values.rows("values")?,
            first_query: given.first_query,
            first_key: given.first_key,
            scale: given.scale,
            select: keys_of(given.select)?,
        };
        Ok((args, planes))
    }
}

/// Numbers of the caller's that are written.
///
/// # Safety
/// `data` is null or valid for reads and writes of `count` numbers that nobody else uses, as
/// long as the answer lives.
pub(crate) unsafe fn numbers_mut<'a>(data: *mut f32, count: u64) -> Result<&'a mut [f32]> {
    if count == 0 {
        return Ok(&mut []);
    }
    if count > MAX_NUMBERS as u64 || data.is_null() || !data.is_aligned() {
        fail!(Invalid, "an array of {count} numbers is null, not aligned or too long");
    }
    // SAFETY: not null, aligned, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count as usize) })
}

/// Opens a job that computes the attention of a prompt, or of a part of one.
///
/// @param args    What is to be computed.
/// @param out        Receives [queries, query heads, value dim]; zeros where a query sees no
///                   key.
/// @param out_count  How many numbers it has room for.
/// @param lse        Receives [queries, query heads] log-sum-exps, -inf where a query sees no
///                   key; may be null.
/// @param lse_count  How many it has room for.
/// @param job_out    The job; close it with kvt_job_close.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (a type that
///         kernels do not read), KVT_E_UNAVAILABLE (not in host memory), KVT_E_TOO_NEW,
///         KVT_E_NOMEM, KVT_E_FORKED, KVT_E_PANIC.
///
/// Ownership: the caller owns the job, and all that it was opened with. Threading: any thread.
/// Since 0.1.
///
/// # Safety
/// Pointers are null or valid, structs for the size they state, arrays for their counts; all
/// but the structs until the job is closed. What is written overlaps nothing else.
#[capi]
pub unsafe extern "C" fn kvt_prefill_open(
    args: *const kvt_attention_args_t,
    out: *mut f32,
    out_count: u64,
    lse: *mut f32,
    lse_count: u64,
    job_out: *mut *mut kvt_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(job_out)?;
    let (args, planes) = problem_of(args)?;
    let (out, logs) = (numbers_mut(out, out_count)?, numbers_mut(lse, lse_count)?);
    let lse = if lse.is_null() { None } else { Some(logs) };
    let kernel = Kernel::Prefill(Prefill::new(args, out, lse)?);
    open(kernel, planes, job_out)
}

/// How many numbers of memory a decode of this problem needs beside scratch.
///
/// @param args    What is to be computed.
/// @param flags      KVT_DECODE_*.
/// @param count_out  Receives the number.
/// @param err        Explains a failure; may be null.
/// @return As kvt_decode_open.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_decode_open, during the call.
#[capi]
pub unsafe extern "C" fn kvt_decode_memory(
    args: *const kvt_attention_args_t,
    flags: u64,
    count_out: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_DECODE_SCORES)?;
    require(count_out)?;
    let (args, _planes) = problem_of(args)?;
    args.check()?;
    count_out.write(Decode::memory(&args, flags & KVT_DECODE_SCORES != 0)? as u64);
    Ok(())
}

/// Opens a job that computes the attention of the next token, or of a few. It has two steps.
///
/// @param args       What is to be computed; rows of an index are for all of its queries.
/// @param flags         KVT_DECODE_*.
/// @param out           Receives [queries, query heads, value dim].
/// @param out_count     How many numbers it has room for.
/// @param lse           Receives [queries, query heads] log-sum-exps.
/// @param lse_count     How many it has room for.
/// @param memory        Memory of the job's until it is closed.
/// @param memory_count  How many numbers: kvt_decode_memory.
/// @param job_out       The job; close it with kvt_job_close.
/// @param err           Explains a failure; may be null.
/// @return As kvt_prefill_open.
///
/// Ownership: as kvt_prefill_open. Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_prefill_open.
#[capi]
pub unsafe extern "C" fn kvt_decode_open(
    args: *const kvt_attention_args_t,
    flags: u64,
    out: *mut f32,
    out_count: u64,
    lse: *mut f32,
    lse_count: u64,
    memory: *mut f32,
    memory_count: u64,
    job_out: *mut *mut kvt_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_DECODE_SCORES)?;
    require(job_out)?;
    let (args, planes) = problem_of(args)?;
    let (out, lse) = (numbers_mut(out, out_count)?, numbers_mut(lse, lse_count)?);
    let memory = numbers_mut(memory, memory_count)?;
    let keeps = flags & KVT_DECODE_SCORES != 0;
    open(Kernel::Decode(Decode::new(args, out, lse, memory, keeps)?), planes, job_out)
}

/// Opens a job that says what each key got of the attention of a prompt's queries, after a
/// kvt_prefill_open job of the same problem has ended.
///
/// @param args    The problem.
/// @param lse        The log-sum-exps that came out, over all keys.
/// @param lse_count  How many.
/// @param first      Sums are of the queries from this one on, counted from the problem's first.
/// @param flags      KVT_SUMS_*.
/// @param sums       Receives [query heads, keys], or [keys].
/// @param sum_count  How many numbers that are.
/// @param job_out    The job; close it with kvt_job_close.
/// @param err        Explains a failure; may be null.
/// @return As kvt_prefill_open.
///
/// Ownership: as kvt_prefill_open. Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_prefill_open.
#[capi]
pub unsafe extern "C" fn kvt_sums_open(
    args: *const kvt_attention_args_t,
    lse: *const f32,
    lse_count: u64,
    first: u32,
    flags: u64,
    sums: *mut f32,
    sum_count: u64,
    job_out: *mut *mut kvt_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SUMS_BY_HEAD)?;
    require(job_out)?;
    let (args, planes) = problem_of(args)?;
    let (lse, sums) = (numbers(lse, lse_count, MAX_NUMBERS)?, numbers_mut(sums, sum_count)?);
    let by_head = flags & KVT_SUMS_BY_HEAD != 0;
    open(Kernel::Sums(ColumnSums::new(args, lse, first, by_head, sums)?), planes, job_out)
}

/// Adds what each key got of the attention of a decode's queries to sums, when all items of
/// both steps have ended and scores were kept.
///
/// @param job        The job.
/// @param flags      KVT_SUMS_*; sums of heads that see different keys are by head.
/// @param sums       [query heads, sum_keys] or [sum_keys] (kvt_job_info), in the order in which
///                   keys are selected.
/// @param sum_count  How many numbers that are.
/// @param err        Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread, while none runs items. Since 0.1.
///
/// # Safety
/// `sums` is valid for reads and writes of `sum_count` numbers; all items have ended.
#[capi]
pub unsafe extern "C" fn kvt_decode_sums(
    job: *const kvt_job_t,
    flags: u64,
    sums: *mut f32,
    sum_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SUMS_BY_HEAD)?;
    let sums = numbers_mut(sums, sum_count)?;
    with_kernel(job, |kernel| match kernel {
        Kernel::Decode(job) => job.add_sums(flags & KVT_SUMS_BY_HEAD != 0, sums),
        _ => fail!(Invalid, "the job is no decode"),
    })
}
