//! Attention on the processor: rows of numbers, and jobs that compute.

use crate::attention::{
    ColumnSums, Decode, Level, Prefill, Problem, Rows, Scales, check_finite, merge, pages,
};
use crate::base::status::{Result, Status};
use crate::base::sync::{Condvar, Mutex};
use crate::device::Memory;
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_out, enter, free, insert, known_flags, no_reserved, noun, numbers, read,
    require, write,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::ffi::memory::{kvt_view_t, plane_alone};
use crate::ffi::sparse::{keys_of, kvt_index_t};
use crate::meta::dtype::Dtype;
use crate::sparse::{Context, Kind, Shape};
use crate::store::state::session::PlaneView;

// Rows and shapes of attention.

/// Keys and values apart, by head.
pub const KVT_ATTENTION_SPLIT: u32 = 0;
/// One row a token for all heads, of which values are the first part (MLA's latent).
pub const KVT_ATTENTION_LATENT: u32 = 1;

/// What a model's attention is.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Layers, at most 2,048.
    pub layers: u32,
    /// Heads of queries, at most 1,024.
    pub query_heads: u32,
    /// Heads of keys; groups of query heads share one.
    pub key_heads: u32,
    /// Numbers of a query's and a key's head, at most 2,048.
    pub key_dim: u32,
    /// Numbers of a value's head.
    pub value_dim: u32,
    /// KVT_ATTENTION_*.
    pub kind: u32,
    /// Tokens of a block, which is loaded or moved as a whole: those of a chunk.
    pub block_tokens: u32,
    /// Most tokens of a sequence.
    pub max_tokens: u32,
    /// What products of queries and keys are multiplied with; 0 = 1 / sqrt(key_dim).
    pub scale: f32,
    /// Always 0.
    pub reserved: u32,
}

/// Where in a sequence a question is asked.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_context_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// 1 = the prompt is being computed; 0 = text is written.
    pub is_prefill: u32,
    /// Which part of the prompt it is, where it is computed in parts.
    pub part: u32,
    /// How many parts; 0 = 1.
    pub parts: u32,
    /// The position of the first query.
    pub first_query: u32,
    /// Tokens that the sequence has, with those of the queries.
    pub tokens: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Numbers are what they are.
pub const KVT_SCALES_NONE: u32 = 0;
/// One scale for each token and head, heads innermost.
pub const KVT_SCALES_TOKEN: u32 = 1;
/// One scale for each head and number, numbers innermost.
pub const KVT_SCALES_CHANNEL: u32 = 2;

/// Queries, keys or values that the library reads during a call: a view, and what its
/// numbers are.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_rows_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Where they are; heads and the bytes of one say what a row is. In host memory.
    pub view: kvt_view_t,
    /// KVT_DTYPE_*: f32, f16, bf16 or int8.
    pub dtype: u32,
    /// KVT_SCALES_*, for int8.
    pub scaling: u32,
    /// The scales; null without.
    pub scales: *const f32,
    /// How many.
    pub scale_count: u64,
}

/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn shape_of(given: *const kvt_attention_t) -> Result<Shape> {
    if given.is_null() {
        fail!(Invalid, "attention is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    let kind = match given.kind {
        KVT_ATTENTION_SPLIT => Kind::Split,
        KVT_ATTENTION_LATENT => Kind::Latent,
        other => fail!(Invalid, "kind {other} is none of KVT_ATTENTION_*"),
    };
    no_reserved(given.reserved)?;
    let shape = Shape {
        layers: given.layers,
        query_heads: given.query_heads,
        key_heads: given.key_heads,
        key_dim: given.key_dim,
        value_dim: given.value_dim,
        scale: given.scale,
        kind,
        block_tokens: given.block_tokens,
        max_tokens: given.max_tokens,
    };
    shape.check()?;
    Ok(shape)
}

/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn context_of(given: *const kvt_sparse_context_t) -> Result<Context> {
    if given.is_null() {
        fail!(Invalid, "context is null");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    if given.is_prefill > 1 || given.reserved != 0 {
        fail!(Invalid, "is_prefill is {}, reserved {}", given.is_prefill, given.reserved);
    }
    let parts = given.parts.max(1);
    if given.part >= parts || given.first_query > given.tokens {
        fail!(
            Invalid,
            "part {} of {parts}, queries from {} on of {} tokens",
            given.part,
            given.first_query,
            given.tokens
        );
    }
    let is_prefill = given.is_prefill == 1;
    let (part, first_query, tokens) = (given.part, given.first_query, given.tokens);
    Ok(Context { is_prefill, part, parts, first_query, tokens })
}

/// Rows as the caller gave them, with what was copied of a table of pages.
pub(crate) struct GivenRows<'a> {
    plane: PlaneView,
    dtype: Dtype,
    scales: Scales<'a>,
}

impl<'a> GivenRows<'a> {
    /// Reads what stands in a struct.
    ///
    /// # Safety
    /// Arrays that it leads to can be read, and nobody writes them, as long as this lives.
    pub(crate) unsafe fn new(what: &str, given: &kvt_rows_t) -> Result<GivenRows<'a>> {
        let Some(dtype) = Dtype::from_code(given.dtype) else {
            fail!(Invalid, "{what}: dtype {} is none of KVT_DTYPE_*", given.dtype);
        };
        // SAFETY: the caller's promise.
        let plane = unsafe { plane_alone(&given.view).map_err(|error| error.within(what))? };
        if plane.memory != Memory::Host {
            fail!(Unavailable, "{what} are not in host memory");
        }
        // SAFETY: the caller's promise.
        let scales = unsafe { numbers(given.scales, given.scale_count, 1 << 28)? };
        let scales = match given.scaling {
            KVT_SCALES_NONE if scales.is_empty() => Scales::None,
            KVT_SCALES_TOKEN => Scales::Token(scales),
            KVT_SCALES_CHANNEL => Scales::Channel(scales),
            other => fail!(Invalid, "{what}: scaling {other} with {} scales", scales.len()),
        };
        Ok(GivenRows { plane, dtype, scales })
    }

    /// The rows, checked.
    ///
    /// # Safety
    /// What the view leads to can be read, and nobody writes it, as long as they live.
    pub(crate) unsafe fn rows(&self, what: &str) -> Result<Rows<'_>> {
        // SAFETY: the caller's promise.
        let rows = unsafe { Rows::new(self.plane.view(), self.dtype, self.scales) };
        rows.map_err(|error| error.within(what))
    }
}

/// Calls `body` with rows; null = there are none.
///
/// # Safety
/// `given` is null or valid for the size it states; what it leads to can be read, and nobody
/// writes it, during the call.
pub(crate) unsafe fn with_rows<R>(
    what: &str,
    given: *const kvt_rows_t,
    body: impl FnOnce(Option<&Rows<'_>>) -> Result<R>,
) -> Result<R> {
    if given.is_null() {
        return body(None);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = GivenRows::new(what, &read(given)?)?;
        body(Some(&given.rows(what)?))
    }
}

// Jobs.

/// Attention that is to be computed. Pieces of it are *items*, which the engine's threads run,
/// each once and in any order; items of a step once all of the step before have ended. What
/// comes out has the same bits whoever runs what. All that a job was opened with stays as it
/// is until it is closed.
pub struct kvt_attention_job_t(());

/// How a job is cut.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_job_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// How many steps it has.
    pub steps: u32,
    /// Items of the first step.
    pub items: u32,
    /// Items of the second step, where there is one.
    pub last_items: u32,
    /// Always 0.
    pub reserved: u32,
    /// Numbers of scratch that each thread needs.
    pub scratch_count: u64,
    /// Of a decode that keeps scores: keys that kvt_decode_sums has sums of, for each head.
    pub sum_keys: u64,
}

/// What is computed; it borrows from [`Planes`], and from the caller.
pub(crate) enum Kernel {
    Prefill(Prefill<'static>),
    Decode(Decode<'static>),
    Sums(ColumnSums<'static>),
}

impl Kernel {
    /// Items of each step.
    fn steps(&self) -> (u32, Option<u32>) {
        match self {
            Kernel::Prefill(job) => (job.items(), None),
            Kernel::Sums(job) => (job.items(), None),
            Kernel::Decode(job) => (job.parts(), Some(job.ends())),
        }
    }

    fn sum_keys(&self) -> usize {
        match self {
            Kernel::Decode(job) => job.sum_keys(),
            _ => 0,
        }
    }

    fn scratch(&self) -> usize {
        match self {
            Kernel::Prefill(job) => job.scratch(),
            Kernel::Sums(job) => job.scratch(),
            Kernel::Decode(job) => job.scratch(),
        }
    }
}

/// What views of a kernel lead through: it stays in its place until it is dropped.
pub(crate) struct Planes(*mut [GivenRows<'static>; 3]);

// SAFETY: it owns what it points to, which any thread may have and read.
unsafe impl Send for Planes {}
// SAFETY: as above.
unsafe impl Sync for Planes {}

impl Planes {
    pub(crate) fn new(planes: [GivenRows<'static>; 3]) -> Planes {
        Planes(Box::into_raw(Box::new(planes)))
    }

    /// All of them.
    ///
    /// # Safety
    /// The answer is not used when this has been dropped.
    pub(crate) unsafe fn all(&self) -> &'static [GivenRows<'static>; 3] {
        // SAFETY: it came from a box, and nobody writes it.
        unsafe { &*self.0 }
    }
}

impl Drop for Planes {
    fn drop(&mut self) {
        // SAFETY: it came from a box, once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Who is inside of a job.
#[derive(Default)]
struct Inside {
    running: u32,
    is_closed: bool,
}

pub(crate) struct JobNoun {
    pub(crate) kernel: Kernel,
    inside: Mutex<Inside>,
    left: Condvar,
    /// Behind the kernel, so that it goes after it.
    _planes: Planes,
}

noun!(JobNoun, kvt_attention_job_t, 16, "job");

/// Leaves a job when it is dropped.
struct Entered<'a>(&'a JobNoun);

impl JobNoun {
    /// Enters it, unless it is being closed: then what it was opened with is no longer there.
    fn enter(&self) -> Result<Entered<'_>> {
        let mut inside = self.inside.lock();
        if inside.is_closed {
            return Err(Status::Closed.into());
        }
        inside.running += 1;
        Ok(Entered(self))
    }

    /// Waits until nobody is inside, and lets nobody in any more.
    fn close(&self) {
        let mut inside = self.inside.lock();
        inside.is_closed = true;
        while inside.running > 0 {
            self.left.wait(&mut inside);
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut inside = self.0.inside.lock();
        inside.running -= 1;
        if inside.is_closed && inside.running == 0 {
            self.0.left.notify_all();
        }
    }
}

/// Calls `body` with the kernel of a job, which nobody closes meanwhile.
pub(crate) fn with_kernel<R>(
    job: *const kvt_attention_job_t,
    body: impl FnOnce(&Kernel) -> Result<R>,
) -> Result<R> {
    let job = enter(job)?;
    let _entered = job.enter()?;
    body(&job.kernel)
}

/// Puts a job into its table.
///
/// # Safety
/// `out_job` is valid for a write; planes are those of the kernel.
pub(crate) unsafe fn open(
    kernel: Kernel,
    planes: Planes,
    out_job: *mut *mut kvt_attention_job_t,
) -> Result<()> {
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    let (inside, left) = (Mutex::new(Inside::default()), Condvar::new());
    let handle = insert(JobNoun { kernel, inside, left, _planes: planes })?;
    // SAFETY: the caller's promise.
    unsafe { out_job.write(handle) };
    Ok(())
}

/// How a job is cut.
///
/// @param job  The job.
/// @param out  Filled in; start it with KVT_ATTENTION_JOB_INFO_INIT.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_HANDLE, KVT_E_FORKED, KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// `out` is null or valid for the size it states.
#[capi]
pub unsafe extern "C" fn kvt_attention_job_info(
    job: *const kvt_attention_job_t,
    out: *mut kvt_attention_job_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let ((items, last), scratch, sum_keys) =
        with_kernel(job, |kernel| Ok((kernel.steps(), kernel.scratch(), kernel.sum_keys())))?;
    write(
        out,
        &kvt_attention_job_info_t {
            struct_size: 0,
            steps: 1 + u32::from(last.is_some()),
            items,
            last_items: last.unwrap_or(0),
            reserved: 0,
            scratch_count: scratch as u64,
            sum_keys: sum_keys as u64,
        },
    );
    Ok(())
}

/// Runs items of a job, on this thread.
///
/// @param job            The job.
/// @param step           Which step.
/// @param first          Its first item.
/// @param items          How many; all to the last of the step, if it has fewer.
/// @param scratch        Memory that no other thread uses meanwhile.
/// @param scratch_count  How many numbers: kvt_attention_job_info.
/// @param err            Explains a failure; may be null.
/// @return KVT_OK; KVT_E_INVALID, KVT_E_TOO_SMALL, KVT_E_CLOSED, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any threads at a time, with other items each. Since 0.1.
///
/// # Safety
/// `scratch` is valid for reads and writes of `scratch_count` numbers; no two threads run the
/// same item at a time, or an item of a step before all of the step before have ended.
#[capi]
pub unsafe extern "C" fn kvt_attention_job_run(
    job: *const kvt_attention_job_t,
    step: u32,
    first: u32,
    items: u32,
    scratch: *mut f32,
    scratch_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let memory = numbers_mut(scratch, scratch_count)?;
    with_kernel(job, |kernel| {
        let has = match (step, kernel.steps()) {
            (0, (items, _)) | (1, (_, Some(items))) => items,
            _ => fail!(Invalid, "there is no step {step}"),
        };
        if first > has {
            fail!(Invalid, "items from {first} on, step {step} has {has}");
        }
        (first..first.saturating_add(items).min(has)).try_for_each(|item| match kernel {
            Kernel::Prefill(job) => job.run(item, memory),
            Kernel::Sums(job) => job.run(item, memory),
            Kernel::Decode(job) if step == 0 => job.run(item, memory),
            Kernel::Decode(job) => job.end(item),
        })
    })
}

/// Closes a job and clears the handle. Waits for items that run; all that it was opened with
/// is the caller's again.
///
/// @param job  The handle; null, or a handle that is null, is fine.
/// @return KVT_OK; KVT_E_HANDLE, KVT_E_FORKED.
///
/// Threading: any thread; waits. Since 0.1.
///
/// # Safety
/// `job` is null or valid for reads and writes.
#[capi]
pub unsafe extern "C" fn kvt_attention_job_close(job: *mut *mut kvt_attention_job_t) -> kvt_status_t {
    free(job, |job| {
        job.close();
        Ok(())
    })
}

// Kernels.

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
/// @param out_job    The job; close it with kvt_attention_job_close.
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
    out_job: *mut *mut kvt_attention_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out_job)?;
    let (args, planes) = problem_of(args)?;
    let (out, logs) = (numbers_mut(out, out_count)?, numbers_mut(lse, lse_count)?);
    let lse = if lse.is_null() { None } else { Some(logs) };
    let kernel = Kernel::Prefill(Prefill::new(args, out, lse)?);
    open(kernel, planes, out_job)
}

/// How many numbers of memory a decode of this problem needs beside scratch.
///
/// @param args    What is to be computed.
/// @param flags      KVT_DECODE_*.
/// @param out_count  Receives the number.
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
    out_count: *mut u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_DECODE_SCORES)?;
    require(out_count)?;
    let (args, _planes) = problem_of(args)?;
    args.check()?;
    out_count.write(Decode::memory(&args, flags & KVT_DECODE_SCORES != 0)? as u64);
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
/// @param out_job       The job; close it with kvt_attention_job_close.
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
    out_job: *mut *mut kvt_attention_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_DECODE_SCORES)?;
    require(out_job)?;
    let (args, planes) = problem_of(args)?;
    let (out, lse) = (numbers_mut(out, out_count)?, numbers_mut(lse, lse_count)?);
    let memory = numbers_mut(memory, memory_count)?;
    let keeps = flags & KVT_DECODE_SCORES != 0;
    open(Kernel::Decode(Decode::new(args, out, lse, memory, keeps)?), planes, out_job)
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
/// @param out_job    The job; close it with kvt_attention_job_close.
/// @param err        Explains a failure; may be null.
/// @return As kvt_prefill_open.
///
/// Ownership: as kvt_prefill_open. Threading: any thread. Since 0.1.
///
/// # Safety
/// As of kvt_prefill_open.
#[capi]
pub unsafe extern "C" fn kvt_column_sums_open(
    args: *const kvt_attention_args_t,
    lse: *const f32,
    lse_count: u64,
    first: u32,
    flags: u64,
    sums: *mut f32,
    sum_count: u64,
    out_job: *mut *mut kvt_attention_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SUMS_BY_HEAD)?;
    require(out_job)?;
    let (args, planes) = problem_of(args)?;
    let (lse, sums) = (numbers(lse, lse_count, MAX_NUMBERS)?, numbers_mut(sums, sum_count)?);
    let by_head = flags & KVT_SUMS_BY_HEAD != 0;
    open(Kernel::Sums(ColumnSums::new(args, lse, first, by_head, sums)?), planes, out_job)
}

/// Adds what each key got of the attention of a decode's queries to sums, when all items of
/// both steps have ended and scores were kept.
///
/// @param job        The job.
/// @param flags      KVT_SUMS_*; sums of heads that see different keys are by head.
/// @param sums       [query heads, sum_keys] or [sum_keys] (kvt_attention_job_info), in the order in which
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
    job: *const kvt_attention_job_t,
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

// Pages, partial results, checks.

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
