//! Attention on the processor: rows of queries, keys and values, and jobs that compute with them.
//!
//! The kernels compute exact attention over the keys that a selection lists: prefill, decode, and
//! sums of attention weights by key. A job is divided into steps and items, so that an engine runs
//! it on its own threads. Rows are views with an element type, and scales where they are quantized.
//!
//! Life cycle: kvt_prefill_open or kvt_decode_open, kvt_attention_job_run for each step,
//! kvt_attention_job_close. Outputs and inputs stay in place until the job is closed.
//!
//! ```c
//! /* Decode: one query of 8 heads over 4096 keys of 2 heads, 128 elements each. */
//! kvt_rows_t q = KVT_ROWS_INIT, k = KVT_ROWS_INIT, v = KVT_ROWS_INIT;
//! q.dtype = KVT_DTYPE_F32, q.view.address = query, q.view.tokens = 1, q.view.heads = 8;
//! q.view.run_bytes = 128 * sizeof(float);
//! k.dtype = KVT_DTYPE_F16, k.view.address = keys, k.view.tokens = 4096, k.view.heads = 2;
//! k.view.run_bytes = 128 * 2;
//! v = k, v.view.address = values;
//! kvt_attention_args_t args = KVT_ATTENTION_ARGS_INIT;
//! args.queries = &q, args.keys = &k, args.values = &v, args.first_query = 4095;
//! uint64_t floats = 0;
//! if (kvt_decode_memory(&args, 0, &floats, &err) != KVT_OK) return fail(err);
//! use(&floats); /* allocate that many floats, then kvt_decode_open and kvt_attention_job_run */
//! ```

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
use crate::ffi::memory::{kvt_dtype_t, kvt_view_t, plane_alone};
use crate::ffi::sparse::{keys_of, kvt_index_t};
use crate::meta::dtype::Dtype;
use crate::sparse::{Context, Kind, Shape};
use crate::store::state::session::PlaneView;

// Rows and shapes of attention.

/// Shapes of attention.
pub type kvt_attention_kind_t = u32;

/// Separate keys and values, by head.
pub const KVT_ATTENTION_SPLIT: kvt_attention_kind_t = 0;
/// One latent row a token for all heads (MLA); values are its first elements.
pub const KVT_ATTENTION_LATENT: kvt_attention_kind_t = 1;

/// Attention shape of a model.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_t {
    pub struct_size: u64,
    /// 1 to 2048.
    pub layers: u32,
    /// 1 to 1024, a multiple of key_heads.
    pub query_heads: u32,
    /// At least 1; 1 with KVT_ATTENTION_LATENT.
    pub key_heads: u32,
    /// Elements of a query and key head, 1 to 2048.
    pub key_dim: u32,
    /// Elements of a value head, 1 to 2048; at most key_dim with KVT_ATTENTION_LATENT.
    pub value_dim: u32,
    pub kind: kvt_attention_kind_t,
    /// Tokens of a block, the unit of loading: 1 to 2^20. With a session: its chunk_tokens.
    pub block_tokens: u32,
    /// Longest sequence, 1 to 2^30 tokens.
    pub max_tokens: u32,
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    pub scale: f32,
    pub reserved: u32,
}

/// Place of a call in its sequence.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_sparse_context_t {
    pub struct_size: u64,
    /// 1 = prefill, 0 = decode.
    pub is_prefill: u32,
    /// Index of this part of the prompt, below `parts`.
    pub part: u32,
    /// Parts in which the prompt is computed; 0 = 1.
    pub parts: u32,
    /// Position of the first query, at most `tokens`.
    pub first_query: u32,
    /// Tokens of the sequence, those of the queries included.
    pub tokens: u32,
    pub reserved: u32,
}

/// Scales of int8 rows: none, one per token and head ([tokens, heads]), or one per head and element
/// ([heads, dim]).
pub type kvt_scales_t = u32;

pub const KVT_SCALES_NONE: kvt_scales_t = 0;
pub const KVT_SCALES_TOKEN: kvt_scales_t = 1;
pub const KVT_SCALES_CHANNEL: kvt_scales_t = 2;

/// Queries, keys or values that the library reads: one row of `dim` elements per token and head.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_rows_t {
    pub struct_size: u64,
    /// Host memory, aligned for the dtype. run_bytes gives dim: 1 to 2048 whole elements.
    pub view: kvt_view_t,
    /// KVT_DTYPE_F32, _F16, _BF16 or _I8.
    pub dtype: kvt_dtype_t,
    /// Only _I8 has scales.
    pub scaling: kvt_scales_t,
    /// Null with KVT_SCALES_NONE.
    pub scales: *const f32,
    /// Exactly as many as `scaling` says.
    pub scale_count: u64,
}

/// Reads the attention shape of a model.
///
/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn shape_of(given: *const kvt_attention_t) -> Result<Shape> {
    if given.is_null() {
        fail!(Invalid, "attention is null: pass the shape of the model");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    let kind = match given.kind {
        KVT_ATTENTION_SPLIT => Kind::Split,
        KVT_ATTENTION_LATENT => Kind::Latent,
        other => fail!(Invalid, "kind {other} is unknown: use one of KVT_ATTENTION_*"),
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

/// Reads a place in a sequence.
///
/// # Safety
/// `given` is null or valid for the size it states.
pub(crate) unsafe fn context_of(given: *const kvt_sparse_context_t) -> Result<Context> {
    if given.is_null() {
        fail!(Invalid, "context is null: pass the place in the sequence");
    }
    // SAFETY: the caller's promise.
    let given = unsafe { read(given)? };
    no_reserved(given.reserved)?;
    if given.is_prefill > 1 {
        fail!(Invalid, "is_prefill is {}, it must be 0 or 1", given.is_prefill);
    }
    let parts = given.parts.max(1);
    if given.part >= parts {
        fail!(Invalid, "part is {}, it must be below parts ({parts})", given.part);
    }
    if given.first_query > given.tokens {
        let (first, tokens) = (given.first_query, given.tokens);
        fail!(Invalid, "first_query is {first}, it must be at most tokens ({tokens})");
    }
    let is_prefill = given.is_prefill == 1;
    let (part, first_query, tokens) = (given.part, given.first_query, given.tokens);
    Ok(Context { is_prefill, part, parts, first_query, tokens })
}

/// Rows of the caller, with a copy of their page table.
pub(crate) struct GivenRows<'a> {
    plane: PlaneView,
    dtype: Dtype,
    scales: Scales<'a>,
}

impl<'a> GivenRows<'a> {
    /// Reads the caller's struct.
    ///
    /// # Safety
    /// Arrays that it points to can be read, and no thread writes them, as long as this lives.
    pub(crate) unsafe fn new(what: &str, given: &kvt_rows_t) -> Result<GivenRows<'a>> {
        let Some(dtype) = Dtype::from_code(given.dtype) else {
            fail!(Invalid, "{what}: dtype {} is unknown: use one of KVT_DTYPE_*", given.dtype);
        };
        // SAFETY: the caller's promise.
        let plane = unsafe { plane_alone(&given.view).map_err(|error| error.within(what))? };
        if plane.memory != Memory::Host {
            fail!(Unavailable, "{what} are in device memory: the CPU reads host memory only");
        }
        // SAFETY: the caller's promise.
        let scales = unsafe { numbers(given.scales, given.scale_count, 1 << 28)? };
        let scales = match given.scaling {
            KVT_SCALES_NONE if scales.is_empty() => Scales::None,
            KVT_SCALES_TOKEN => Scales::Token(scales),
            KVT_SCALES_CHANNEL => Scales::Channel(scales),
            other => fail!(
                Invalid,
                "{what}: scaling {other} with {} scales: use one of KVT_SCALES_*, and no scales \
                 with KVT_SCALES_NONE",
                scales.len()
            ),
        };
        Ok(GivenRows { plane, dtype, scales })
    }

    /// The checked rows.
    ///
    /// # Safety
    /// Memory of the view can be read, and no thread writes it, as long as the rows live.
    pub(crate) unsafe fn rows(&self, what: &str) -> Result<Rows<'_>> {
        // SAFETY: the caller's promise.
        let rows = unsafe { Rows::new(self.plane.view(), self.dtype, self.scales) };
        rows.map_err(|error| error.within(what))
    }
}

/// Calls `body` with rows; with `None` if the pointer is null.
///
/// # Safety
/// `given` is null or valid for the size it states; memory that it points to can be read, and
/// no thread writes it, during the call.
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

/// An attention computation, cut into items. Threads of the engine run each item once, in any order
/// (kvt_attention_job_run), and those of step 1 after all of step 0. The bits of the results do not
/// depend on threads. Tensors, scales, outputs, memory and the arrays of `select` are borrowed
/// until kvt_attention_job_close.
pub struct kvt_attention_job_t(());

/// Size of a job.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_job_info_t {
    pub struct_size: u64,
    /// 1, or 2 for a decode.
    pub steps: u32,
    /// Items of step 0.
    pub items: u32,
    /// Items of step 1; 0 = the job has one step.
    pub last_items: u32,
    pub reserved: u32,
    /// f32 elements of scratch that each thread needs.
    pub scratch_count: u64,
    /// Keys per head in kvt_decode_sums; 0 without KVT_DECODE_SCORES.
    pub sum_keys: u64,
}

/// The kernel of a job. It borrows from [`Planes`] and from the caller.
pub(crate) enum Kernel {
    Prefill(Prefill<'static>),
    Decode(Decode<'static>),
    Sums(ColumnSums<'static>),
}

impl Kernel {
    /// Items of step 0, and of step 1 if there is one.
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

/// The views and page tables that a kernel borrows. They keep their address until this is dropped.
pub(crate) struct Planes(*mut [GivenRows<'static>; 3]);

// SAFETY: it owns what it points to, which any thread may own and read.
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
    /// The result is not used after this has been dropped.
    pub(crate) unsafe fn all(&self) -> &'static [GivenRows<'static>; 3] {
        // SAFETY: it came from a box, and no code writes it.
        unsafe { &*self.0 }
    }
}

impl Drop for Planes {
    fn drop(&mut self) {
        // SAFETY: it came from a box, once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Calls in progress on a job.
#[derive(Default)]
struct Activity {
    running: u32,
    is_closed: bool,
}

pub(crate) struct JobNoun {
    pub(crate) kernel: Kernel,
    activity: Mutex<Activity>,
    /// Signals that the last call of a closed job has ended.
    idle: Condvar,
    /// Declared after the kernel, so that it is dropped after it.
    _planes: Planes,
}

noun!(JobNoun, kvt_attention_job_t, 16, "job");

/// A call in progress on a job; ends when it is dropped.
struct ActiveCall<'a>(&'a JobNoun);

impl JobNoun {
    /// Begins a call. Fails if the job is being closed, since its borrowed memory may be freed.
    fn begin_call(&self) -> Result<ActiveCall<'_>> {
        let mut activity = self.activity.lock();
        if activity.is_closed {
            return Err(Status::Closed.into());
        }
        activity.running += 1;
        Ok(ActiveCall(self))
    }

    /// Refuses new calls, and waits until those in progress have ended.
    fn close(&self) {
        let mut activity = self.activity.lock();
        activity.is_closed = true;
        while activity.running > 0 {
            self.idle.wait(&mut activity);
        }
    }
}

impl Drop for ActiveCall<'_> {
    fn drop(&mut self) {
        let mut activity = self.0.activity.lock();
        activity.running -= 1;
        if activity.is_closed && activity.running == 0 {
            self.0.idle.notify_all();
        }
    }
}

/// Calls `body` with the kernel of a job, which cannot be closed meanwhile.
pub(crate) fn with_kernel<R>(
    job: *const kvt_attention_job_t,
    body: impl FnOnce(&Kernel) -> Result<R>,
) -> Result<R> {
    let job = enter(job)?;
    let _call = job.begin_call()?;
    body(&job.kernel)
}

/// Inserts a job into the table of jobs and writes its handle.
///
/// # Safety
/// `out_job` is valid for a write; `planes` are those that the kernel borrows.
pub(crate) unsafe fn open(
    kernel: Kernel,
    planes: Planes,
    out_job: *mut *mut kvt_attention_job_t,
) -> Result<()> {
    crate::base::fork::check()?;
    crate::base::fork::arm()?;
    let (activity, idle) = (Mutex::new(Activity::default()), Condvar::new());
    let handle = insert(JobNoun { kernel, activity, idle, _planes: planes })?;
    // SAFETY: the caller's promise.
    unsafe { out_job.write(handle) };
    Ok(())
}

/// Reads the size of a job.
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

/// Runs items of a job on the calling thread.
///
/// @param step           Below kvt_attention_job_info_t.steps.
/// @param items          Number of items; those after the step's last one are ignored.
/// @param scratch        Memory that no other thread uses during the call.
/// @param scratch_count  At least kvt_attention_job_info_t.scratch_count.
/// @return KVT_E_TOO_SMALL (scratch).
///
/// Threading: several threads at once, each with other items.
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
        let count = match (step, kernel.steps()) {
            (0, (count, _)) | (1, (_, Some(count))) => count,
            (_, (_, last)) => {
                fail!(
                    Invalid,
                    "step is {step}, the job has {} steps",
                    1 + u32::from(last.is_some())
                )
            }
        };
        if first > count {
            fail!(Invalid, "first is {first}, step {step} has {count} items");
        }
        (first..first.saturating_add(items).min(count)).try_for_each(|item| match kernel {
            Kernel::Prefill(job) => job.run(item, memory),
            Kernel::Sums(job) => job.run(item, memory),
            Kernel::Decode(job) if step == 0 => job.run(item, memory),
            Kernel::Decode(job) => job.end(item),
        })
    })
}

/// Waits for running items and closes a job. Everything that it borrowed is the caller's again.
#[capi]
pub unsafe extern "C" fn kvt_attention_job_close(
    job: *mut *mut kvt_attention_job_t,
) -> kvt_status_t {
    free(job, |job| {
        job.close();
        Ok(())
    })
}

// Kernels.

/// Flags of decode kernels.
pub type kvt_decode_flags_t = u64;

/// Keep scores, for kvt_decode_sums.
pub const KVT_DECODE_SCORES: kvt_decode_flags_t = 1;
/// Flags of column sums.
pub type kvt_sums_flags_t = u64;

/// Sums for each query head; without this flag one row for all heads.
pub const KVT_SUMS_BY_HEAD: kvt_sums_flags_t = 1;

/// Most elements of an array.
const MAX_ELEMENTS: usize = 1 << 40;

/// Input of an attention kernel. Queries see the keys up to their own position.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_attention_args_t {
    pub struct_size: u64,
    /// [queries, query_heads, key_dim].
    pub queries: *const kvt_rows_t,
    /// [keys, key_heads, key_dim].
    pub keys: *const kvt_rows_t,
    /// [keys, key_heads, value_dim]. Latent rows: the first elements of the keys, at the same
    /// address.
    pub values: *const kvt_rows_t,
    /// Positions of the keys to use, from kvt_sparse_index or the engine; null = all.
    pub select: *const kvt_index_t,
    /// Position of the first query.
    pub first_query: u32,
    /// Position of the first key. If keys come in pieces, kvt_attention_merge merges their results.
    pub first_key: u32,
    /// Factor of query-key products, finite; 0 = 1 / sqrt(key_dim).
    pub scale: f32,
    pub reserved: u32,
}

/// Reads a problem. The kernel that takes it checks it.
///
/// # Safety
/// `given` is null or valid for the size it states. Memory that it points to can be read, and
/// no thread writes it, as long as the problem lives. The problem does not outlive the planes.
unsafe fn problem_of(given: *const kvt_attention_args_t) -> Result<(Problem<'static>, Planes)> {
    if given.is_null() {
        fail!(Invalid, "args is null: pass queries, keys and values");
    }
    // SAFETY: the caller's promise.
    unsafe {
        let given = read(given)?;
        no_reserved(given.reserved)?;
        let plane = |what: &str, rows: *const kvt_rows_t| {
            if rows.is_null() {
                fail!(Invalid, "{what} is null: pass rows");
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

/// An array of the caller's that is written.
///
/// # Safety
/// `data` is null or valid for reads and writes of `count` elements, and no other code uses them,
/// as long as the result lives.
pub(crate) unsafe fn numbers_mut<'a>(data: *mut f32, count: u64) -> Result<&'a mut [f32]> {
    if count == 0 {
        return Ok(&mut []);
    }
    if count > MAX_ELEMENTS as u64 || data.is_null() || !data.is_aligned() {
        fail!(
            Invalid,
            "the array of {count} f32 elements is null, misaligned, or longer than {MAX_ELEMENTS}"
        );
    }
    // SAFETY: not null, aligned, and the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count as usize) })
}

/// Opens a job that computes the attention of a prompt or of a part of one.
///
/// @param out        Receives [queries, query_heads, value_dim]; zeros where a query sees no key.
/// @param out_count  Capacity in elements.
/// @param lse        Receives log-sum-exps [queries, query_heads], -inf where a query sees no key;
///                   may be null.
/// @param lse_count  Capacity in elements.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device
///         memory).
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

/// Computes the memory that kvt_decode_open needs for the same input.
///
/// @param flags      KVT_DECODE_*.
/// @param out_count  Receives the number of f32 elements.
/// @return The codes of kvt_decode_open, except KVT_E_TOO_SMALL.
#[capi]
pub unsafe extern "C" fn kvt_decode_memory(
    args: *const kvt_attention_args_t,
    flags: kvt_decode_flags_t,
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

/// Opens a job of two steps that computes the attention of the next token or of a few. See
/// kvt_prefill_open for out and lse; lse is required.
///
/// @param args          `select` may have blocks only, one row of lists per head for all queries.
/// @param flags         KVT_DECODE_*.
/// @param memory        Memory of the job until it is closed.
/// @param memory_count  At least the result of kvt_decode_memory.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype, or other lists),
///         KVT_E_UNAVAILABLE (device memory).
#[capi]
pub unsafe extern "C" fn kvt_decode_open(
    args: *const kvt_attention_args_t,
    flags: kvt_decode_flags_t,
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
    let keeps_scores = flags & KVT_DECODE_SCORES != 0;
    let kernel = Kernel::Decode(Decode::new(args, out, lse, memory, keeps_scores)?);
    open(kernel, planes, out_job)
}

/// Opens a job that sums, for each key, the attention that a prompt's queries pay to it. Open it
/// after a kvt_prefill_open job of the same input has ended.
///
/// @param lse        Log-sum-exps of that job, over all keys: [queries, query_heads].
/// @param first      First query that counts, an index into the queries.
/// @param flags      KVT_SUMS_*.
/// @param sums       Receives [query_heads, keys] with KVT_SUMS_BY_HEAD, else [keys].
/// @param sum_count  Exactly that many elements.
/// @return KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device memory).
#[capi]
pub unsafe extern "C" fn kvt_column_sums_open(
    args: *const kvt_attention_args_t,
    lse: *const f32,
    lse_count: u64,
    first: u32,
    flags: kvt_sums_flags_t,
    sums: *mut f32,
    sum_count: u64,
    out_job: *mut *mut kvt_attention_job_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SUMS_BY_HEAD)?;
    require(out_job)?;
    let (args, planes) = problem_of(args)?;
    let (lse, sums) = (numbers(lse, lse_count, MAX_ELEMENTS)?, numbers_mut(sums, sum_count)?);
    let by_head = flags & KVT_SUMS_BY_HEAD != 0;
    open(Kernel::Sums(ColumnSums::new(args, lse, first, by_head, sums)?), planes, out_job)
}

/// Adds, for each key, the attention that a decode's queries pay to it. Requires KVT_DECODE_SCORES,
/// and that all items of both steps have ended.
///
/// @param flags      KVT_SUMS_*; KVT_SUMS_BY_HEAD is required if heads select different keys.
/// @param sums       In and out: [query_heads, sum_keys] or [sum_keys] (kvt_attention_job_info_t),
///                   in the order of the selected keys.
/// @param sum_count  Exactly that many elements.
///
/// Threading: not while a thread runs items of the job.
#[capi]
pub unsafe extern "C" fn kvt_decode_sums(
    job: *const kvt_attention_job_t,
    flags: kvt_sums_flags_t,
    sums: *mut f32,
    sum_count: u64,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    known_flags(flags, KVT_SUMS_BY_HEAD)?;
    let sums = numbers_mut(sums, sum_count)?;
    with_kernel(job, |kernel| match kernel {
        Kernel::Decode(job) => job.add_sums(flags & KVT_SUMS_BY_HEAD != 0, sums),
        _ => fail!(Invalid, "the job is not a decode: pass one from kvt_decode_open"),
    })
}

// Pages, partial results, checks.

/// Rows that are required.
pub(crate) fn given<'a, 'b>(what: &str, rows: Option<&'a Rows<'b>>) -> Result<&'a Rows<'b>> {
    match rows {
        Some(rows) => Ok(rows),
        None => fail!(Invalid, "{what} is null: pass rows"),
    }
}

/// Adds keys to the bounding boxes of pages. A box has, for each page and head, the least and then
/// the greatest value of each element of the page's keys.
///
/// @param boxes        In and out: [pages, key_heads, 2 * key_dim].
/// @param box_count    Capacity in elements.
/// @param page_tokens  At least 1.
/// @param first        Position of the first key. A box is reset if its page's first key is among
///                     the keys, else widened.
/// @param keys         [keys, key_heads, key_dim]; key_dim at most 1024.
/// @return KVT_E_TOO_SMALL, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device memory).
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

/// Computes the largest product that a query can have with a key of each page, by the page's box.
///
/// @param boxes          [pages, key_heads, 2 * key_dim], f32 or bf16 (kvt_pages_extend).
/// @param queries        [queries, query_heads, key_dim].
/// @param first          First page.
/// @param count          Number of pages.
/// @param scores         Receives [queries, query_heads, count].
/// @param score_count    Exactly that many elements.
/// @param scratch_count  queries * query_heads * (2 * key_dim + 96) + 4096 elements suffice.
/// @return KVT_E_TOO_SMALL, KVT_E_LIMIT, KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE (device
///         memory).
///
/// Threading: several threads at once, each with other pages and scratch.
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

/// Merges the attention of the same queries to other keys into a result, by the log-sum-exps of
/// both.
///
/// @param out        In and out: [rows, dim].
/// @param lse        In and out: [rows].
/// @param other      Result for the other keys, [rows, dim].
/// @param other_lse  Its log-sum-exps, [rows].
/// @param rows       Queries * query_heads.
/// @param dim        value_dim.
/// @return KVT_E_LIMIT.
///
/// Threading: several threads at once, each with other rows.
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
        fail!(Limit, "rows is {rows} and dim {dim}: their product must fit 64 bits");
    };
    let (out, lse) = (numbers_mut(out, all)?, numbers_mut(lse, rows)?);
    merge(out, lse, numbers(other, all, MAX_ELEMENTS)?, numbers(other_lse, rows, MAX_ELEMENTS)?)
}

/// Checks that all elements and scales of rows are finite. Kernels do not check: other values give
/// arbitrary results. Policies reject them.
///
/// @return KVT_E_INVALID (an element is not finite), KVT_E_UNSUPPORTED (dtype), KVT_E_UNAVAILABLE
///         (device memory).
#[capi]
pub unsafe extern "C" fn kvt_rows_check(
    rows: *const kvt_rows_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    let check = |rows: Option<&Rows<'_>>| check_finite("elements", given("rows", rows)?);
    with_rows("rows", rows, check)
}
