//! Traces: reading, generation, and replay, which measures a policy.
//!
//! A trace is a list of requests with the hashes of their blocks. Replaying it on a policy gives
//! the hit ratio, the cost of misses and the time of decisions, without an engine.
//!
//! Life cycle: kvt_trace_open or kvt_trace_generate, kvt_trace_replay as often as wanted,
//! kvt_trace_free.
//!
//! ```c
//! kvt_trace_opts_t opts = KVT_TRACE_OPTS_INIT;
//! opts.path = "requests.jsonl", opts.path_bytes = KVT_NUL_TERMINATED;
//! if (kvt_trace_open(&opts, &trace, &err) != KVT_OK) return fail(err);
//! kvt_replay_opts_t replay = KVT_REPLAY_OPTS_INIT;
//! replay.spec = "lru", replay.spec_bytes = KVT_NUL_TERMINATED;
//! replay.capacity_blocks = 5000;
//! kvt_replay_report_t report = KVT_REPLAY_REPORT_INIT;
//! if (kvt_trace_replay(trace, &replay, &report, &err) != KVT_OK) return fail(err);
//! printf("%.1f %% of the tokens found\n", 100.0 * (double)report.hit_tokens / (double)report.tokens);
//! ```

use std::ffi::{c_char, c_void};

use crate::base::callback::{Foreign, refuse_reentry};
use crate::base::spec::Spec;
use crate::base::status::Result;
use crate::fail;
use crate::ffi::abi::{
    Plain, capi, check_out, enter, free, insert, known_flags, noun, read, require, text, write,
};
use crate::ffi::base::{kvt_error_t, kvt_status_t};
use crate::meta::cost::Cost;
use crate::policy::custom;
use crate::trace::generate::{self, GenOpts};
use crate::trace::reader::{self, ReadOpts};
use crate::trace::replay::{self, Hints, ReplayOpts};
use crate::trace::report::Report;
use crate::trace::requests::{MAX_BLOCK_TOKENS, Trace};
use crate::trace::study::Study;

// Traces.

/// Requests to a KV cache over time. Immutable; needs no runtime.
pub struct kvt_trace_t(());

/// Flags of a trace.
pub type kvt_trace_flags_t = u64;

/// Each block becomes a request of its own, without a prefix.
pub const KVT_TRACE_FLAT: kvt_trace_flags_t = 1;

/// Flags of a replay.
pub type kvt_replay_flags_t = u64;

/// The engine can use blocks after a hole.
pub const KVT_REPLAY_HOLES: kvt_replay_flags_t = 1;
/// Does not measure decision times; faster.
pub const KVT_REPLAY_UNTIMED: kvt_replay_flags_t = 2;

/// Hints that the policy receives. STOP: the stop reason of each request, where the trace has it;
/// NONE: no hints; THINK: as STOP, and the time of the session's next request.
pub type kvt_hints_t = u32;

pub const KVT_HINTS_STOP: kvt_hints_t = 0;
pub const KVT_HINTS_NONE: kvt_hints_t = 1;
pub const KVT_HINTS_THINK: kvt_hints_t = 2;

/// Receives the progress of a replay, every 256 requests and at the end, on the calling thread.
/// Returns 0 to cancel the replay. Must not unwind.
pub type kvt_progress_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, requests_done: u64, requests: u64) -> i32>;

/// Options of kvt_trace_open and kvt_trace_generate.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_trace_opts_t {
    pub struct_size: u64,
    /// KVT_TRACE_FLAT or 0.
    pub flags: kvt_trace_flags_t,
    /// kvt_trace_open: a regular file, plain or zstd.
    pub path: *const c_char,
    pub path_bytes: u64,
    /// kvt_trace_open: kvtier, mooncake, weka, sharegpt, azure, oracle or csv; empty = detect from
    /// the content. kvt_trace_generate: chat, agent, batch, multitenant or burst.
    pub kind: *const c_char,
    pub kind_bytes: u64,
    /// Tokens of a block, at most 2^20, unless the file states it; 0 = 512.
    pub block_tokens: u64,
    /// Seed of generated workloads, and of times that a file lacks; 0 = 7.
    pub seed: u64,
    /// kvt_trace_open: mean time between session starts that a file (weka, sharegpt) lacks; 0 = the
    /// format's default.
    pub gap_ns: u64,
    /// Later requests are dropped, if generated or with random start times; 0 = one day.
    pub duration_ns: u64,
    /// kvt_trace_generate: sessions started per second; 0 = the default of the kind.
    pub rate: f64,
}

/// Totals of a trace.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_trace_info_t {
    pub struct_size: u64,
    pub requests: u64,
    /// Blocks requested, with repetitions.
    pub references: u64,
    /// Distinct blocks.
    pub blocks: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Sessions, named in the trace or inferred from the prefixes.
    pub sessions: u64,
    /// From the first request to the last.
    pub duration_ns: u64,
    /// Tokens requested.
    pub tokens: u64,
    /// Tokens that an unbounded cache would find.
    pub known_tokens: u64,
}

/// Options of kvt_trace_replay.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_replay_opts_t {
    pub struct_size: u64,
    pub flags: kvt_replay_flags_t,
    /// Policy, such as "lru"; not "custom".
    pub spec: *const c_char,
    pub spec_bytes: u64,
    /// Capacity in blocks, at least 1; times `layers` at most 2^28.
    pub capacity_blocks: u64,
    /// Requests replayed before counting starts.
    pub warm_up: u64,
    /// Objects are cells of this many layers, at most 1,024; 0 = whole blocks.
    pub layers: u32,
    pub hints: kvt_hints_t,
    /// Attention cost of a token per token of context, 0 to 1e12, where computing a token costs 1;
    /// 0 = 1 / 53,800, a model of the 70B class.
    pub alpha: f64,
    /// May be null.
    pub progress: kvt_progress_fn,
    /// Passed to `progress`.
    pub user_data: *mut c_void,
}

/// Result of a replay. All but the times are equal in every run.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_replay_report_t {
    pub struct_size: u64,
    /// Requests after the warm-up.
    pub requests: u64,
    /// Blocks requested, and the resident, usable ones among them.
    pub references: u64,
    pub hits: u64,
    /// Tokens requested, and the hits among them.
    pub tokens: u64,
    pub hit_tokens: u64,
    /// Recompute cost of the tokens requested, and of the hits among them.
    pub cost: f64,
    pub hit_cost: f64,
    /// Objects inserted and evicted, including the warm-up.
    pub inserts: u64,
    pub evictions: u64,
    /// References to blocks seen before that were evicted or did not fit, per reference.
    pub re_prefill_rate: f64,
    /// Jain's fairness index over sessions and over tenants.
    pub jain_sessions: f64,
    pub jain_tenants: f64,
    /// Mean share of the capacity in use since the first eviction.
    pub utilisation: f64,
    /// Durations of eviction calls: median, 99th percentile, maximum.
    pub decision_p50_ns: u64,
    pub decision_p99_ns: u64,
    pub decision_max_ns: u64,
    /// Duration of the replay.
    pub run_ns: u64,
}

pub(crate) struct TraceNoun(Trace);

noun!(TraceNoun, kvt_trace_t, 9, "trace");

const DEFAULT_BLOCK_TOKENS: u32 = 512;
const DEFAULT_SEED: u64 = 7;
const DAY_NS: i64 = 86_400_000_000_000;

/// Validated options of kvt_trace_open and kvt_trace_generate.
struct TraceOpts {
    flat: bool,
    path: String,
    kind: String,
    block_tokens: u32,
    seed: u64,
    gap_ns: i64,
    duration_ns: i64,
    rate: f64,
}

/// # Safety
/// `opts` is null or valid for the size it states, its strings for their lengths.
unsafe fn trace_opts(opts: *const kvt_trace_opts_t) -> Result<TraceOpts> {
    crate::base::fork::check()?;
    // SAFETY: the caller's promise.
    let o = unsafe { read(opts)? };
    known_flags(o.flags, KVT_TRACE_FLAT)?;
    // SAFETY: the caller's promise.
    let (path, kind) =
        unsafe { (text("path", o.path, o.path_bytes)?, text("kind", o.kind, o.kind_bytes)?) };
    let duration = |name: &str, value: u64| match i64::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => fail!(Invalid, "{name} is {value}: at most {} is accepted", i64::MAX),
    };
    let Ok(block_tokens) = u32::try_from(o.block_tokens) else {
        fail!(
            Invalid,
            "block_tokens is {}: at most {MAX_BLOCK_TOKENS} is accepted",
            o.block_tokens
        );
    };
    if !(o.rate >= 0.0 && o.rate.is_finite()) {
        fail!(Invalid, "rate is {}: a finite number that is not negative is accepted", o.rate);
    }
    let duration_ns = duration("duration_ns", o.duration_ns)?;
    Ok(TraceOpts {
        flat: o.flags & KVT_TRACE_FLAT != 0,
        path: path.to_string(),
        kind: kind.to_string(),
        block_tokens: if block_tokens == 0 { DEFAULT_BLOCK_TOKENS } else { block_tokens },
        seed: if o.seed == 0 { DEFAULT_SEED } else { o.seed },
        gap_ns: duration("gap_ns", o.gap_ns)?,
        duration_ns: if duration_ns == 0 { DAY_NS } else { duration_ns },
        rate: o.rate,
    })
}

/// Creates the handle of a trace.
fn open_handle(trace: Trace, flat: bool) -> Result<*mut kvt_trace_t> {
    crate::base::fork::arm()?;
    insert(TraceNoun(if flat { trace.flat()? } else { trace }))
}

/// Reads a trace from a file, to its end. The file is not trusted.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_INVALID (also malformed content; the message names the place), KVT_E_NOT_FOUND,
///         KVT_E_IO, KVT_E_CORRUPT (a damaged zstd or kvtier file), KVT_E_UNSUPPORTED (Parquet),
///         KVT_E_SPEC (unknown kind), KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_trace_open(
    opts: *const kvt_trace_opts_t,
    out: *mut *mut kvt_trace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = trace_opts(opts)?;
    if given.path.is_empty() {
        fail!(Invalid, "path is empty: name a trace file");
    }
    let kind = match &*given.kind {
        "" => None,
        name => Some(reader::kind_of(name)?),
    };
    let opts = ReadOpts {
        kind,
        block_tokens: given.block_tokens,
        seed: given.seed,
        gap_ns: given.gap_ns,
        duration_ns: given.duration_ns,
    };
    let handle = open_handle(reader::open(given.path.as_ref(), &opts)?, given.flat)?;
    out.write(handle);
    Ok(())
}

/// Generates a workload. Equal options give equal traces on every machine; `path` and `gap_ns` are
/// ignored.
///
/// @param out  Free it with kvt_trace_free.
/// @return KVT_E_SPEC (unknown kind), KVT_E_LIMIT (more than 90 days or 16 million sessions).
#[capi]
pub unsafe extern "C" fn kvt_trace_generate(
    opts: *const kvt_trace_opts_t,
    out: *mut *mut kvt_trace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = trace_opts(opts)?;
    let trace = generate::make(&GenOpts {
        kind: generate::kind_of(&given.kind)?,
        duration_ns: given.duration_ns,
        seed: given.seed,
        rate: given.rate,
        block_tokens: given.block_tokens,
    })?;
    let handle = open_handle(trace, given.flat)?;
    out.write(handle);
    Ok(())
}

/// Frees a trace. Replays in progress continue to their end.
#[capi]
pub unsafe extern "C" fn kvt_trace_free(trace: *mut *mut kvt_trace_t) -> kvt_status_t {
    free(trace, |_| Ok(()))
}

/// Computes the totals of a trace. Reads all of its requests.
#[capi]
pub unsafe extern "C" fn kvt_trace_info(
    trace: *const kvt_trace_t,
    out: *mut kvt_trace_info_t,
) -> kvt_status_t {
    check_out(out)?;
    let noun = enter(trace)?;
    let (trace, study) = (&noun.0, Study::of(&noun.0, &Cost::default())?);
    write(
        out,
        &kvt_trace_info_t {
            struct_size: 0,
            requests: trace.requests().len() as u64,
            references: trace.references() as u64,
            blocks: trace.uniques() as u64,
            block_tokens: u64::from(trace.block_tokens()),
            sessions: study.session_count as u64,
            duration_ns: trace.duration_ns() as u64,
            tokens: study.floor.tokens,
            known_tokens: study.floor.hit_tokens,
        },
    );
    Ok(())
}

fn replay_opts(o: &kvt_replay_opts_t) -> Result<ReplayOpts> {
    known_flags(o.flags, KVT_REPLAY_HOLES | KVT_REPLAY_UNTIMED)?;
    let hints = match o.hints {
        KVT_HINTS_STOP => Hints::Stop,
        KVT_HINTS_NONE => Hints::None,
        KVT_HINTS_THINK => Hints::Think,
        other => fail!(Invalid, "hints is {other}: KVT_HINTS_STOP, _NONE or _THINK is accepted"),
    };
    if !(o.alpha >= 0.0 && o.alpha <= 1e12) {
        fail!(Invalid, "alpha is {}: 0 to 1e12 is accepted", o.alpha);
    }
    let mut cost = Cost::default();
    if o.alpha > 0.0 {
        cost.alpha = o.alpha;
    }
    Ok(ReplayOpts {
        holes: o.flags & KVT_REPLAY_HOLES != 0,
        timed: o.flags & KVT_REPLAY_UNTIMED == 0,
        layers: o.layers.max(1),
        warm_up: usize::try_from(o.warm_up).unwrap_or(usize::MAX),
        points: 0,
        hints,
        cost,
    })
}

fn report(r: &Report) -> kvt_replay_report_t {
    kvt_replay_report_t {
        struct_size: 0,
        requests: r.requests,
        references: r.done.references,
        hits: r.done.hits,
        tokens: r.done.tokens,
        hit_tokens: r.done.hit_tokens,
        cost: r.done.cost,
        hit_cost: r.done.hit_cost,
        inserts: r.inserts,
        evictions: r.evictions,
        re_prefill_rate: r.re_prefill_rate,
        jain_sessions: r.session_fairness,
        jain_tenants: r.tenant_fairness,
        utilisation: r.utilisation,
        decision_p50_ns: r.decision.quantile_ns(0.5),
        decision_p99_ns: r.decision.quantile_ns(0.99),
        decision_max_ns: r.decision.max_ns(),
        run_ns: r.run_ns,
    }
}

/// Replays a trace on a policy: the code of production, driven as by an engine.
///
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_CANCELLED (`progress` returned 0).
///
/// Threading: inside any callback it returns KVT_E_REENTRANT.
#[capi]
pub unsafe extern "C" fn kvt_trace_replay(
    trace: *const kvt_trace_t,
    opts: *const kvt_replay_opts_t,
    out: *mut kvt_replay_report_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    check_out(out)?;
    let given = read(opts)?;
    let (given, spec) = (given, text("spec", given.spec, given.spec_bytes)?);
    refuse_reentry()?;
    let opts = replay_opts(&given)?;
    if Spec::parse(spec)?.name == custom::NAME {
        fail!(
            Invalid,
            "the policy 'custom' needs a score function, a replay has none: name a built-in one"
        );
    }
    let trace = enter(trace)?;
    let study = Study::of(&trace.0, &opts.cost)?;
    let total = trace.0.requests().len() as u64;
    let progress = given.progress.map(|function| Foreign::new(function, given.user_data, None));
    let mut watch = |done: usize| match &progress {
        // SAFETY: function and data came together from the caller.
        Some(foreign) => {
            foreign.call(|function, user_data| function(user_data, done as u64, total) != 0)
        }
        None => true,
    };
    let blocks = given.capacity_blocks;
    write(out, &report(&replay::run(&trace.0, &study, spec, blocks, &opts, &mut watch)?));
    Ok(())
}
