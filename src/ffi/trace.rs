//! Traces and their replay.

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
use crate::trace::requests::Trace;
use crate::trace::study::Study;

// Traces.

/// Requests to a KV cache over time. Never changes: any thread may use it.
pub struct kvt_trace_t(());

/// kvt_trace_opts_t.flags: every block becomes a request of its own, without prefixes.
pub const KVT_TRACE_FLAT: u64 = 1;

/// kvt_replay_opts_t.flags: the engine can use what lies behind a hole.
pub const KVT_REPLAY_HOLES: u64 = 1;
/// kvt_replay_opts_t.flags: decisions are not timed, which makes the replay faster.
pub const KVT_REPLAY_UNTIMED: u64 = 2;

/// kvt_replay_opts_t.hints: the policy is told why requests stopped.
pub const KVT_HINTS_STOP: u32 = 0;
/// kvt_replay_opts_t.hints: the policy is told nothing of the future.
pub const KVT_HINTS_NONE: u32 = 1;
/// kvt_replay_opts_t.hints: also when a session's next request comes.
pub const KVT_HINTS_THINK: u32 = 2;

/// Hears of the progress of a replay; returns 0 to stop it. Called on the calling
/// thread, under no lock. It must not unwind.
pub type kvt_progress_fn =
    Option<unsafe extern "C" fn(user_data: *mut c_void, requests_done: u64, requests: u64) -> i32>;

/// What to read or make.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_trace_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_TRACE_*.
    pub flags: u64,
    /// To read: a regular file, plain or zstd.
    pub path: *const c_char,
    /// Length of the path.
    pub path_bytes: u64,
    /// To read: kvtier, mooncake, weka, sharegpt, azure, oracle or csv; empty = by
    /// the content. To make: chat, agent, batch, multitenant or burst.
    pub kind: *const c_char,
    /// Length of the kind.
    pub kind_bytes: u64,
    /// Tokens of a block, where the file leaves it open; 0 = 512.
    pub block_tokens: u64,
    /// For whatever the file leaves to chance, and for everything made; 0 = 7.
    pub seed: u64,
    /// Mean time between starts of sessions that the file does not tell; 0 = usual.
    pub gap_ns: u64,
    /// How long it goes on, where that is chosen here; 0 = a day.
    pub duration_ns: u64,
    /// To make: sessions that start in a second; 0 = usual.
    pub rate: f64,
}

/// What is in a trace.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_trace_info_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Requests.
    pub requests: u64,
    /// Blocks they ask for.
    pub references: u64,
    /// Different ones of those.
    pub blocks: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Sessions, named or told from the paths.
    pub sessions: u64,
    /// From the first request to the last.
    pub duration_ns: u64,
    /// Tokens asked for.
    pub tokens: u64,
    /// Of those, what an unbounded cache finds.
    pub known_tokens: u64,
}

/// How to replay.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_replay_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_REPLAY_*.
    pub flags: u64,
    /// The policy, such as "lru".
    pub spec: *const c_char,
    /// Length of the spec.
    pub spec_bytes: u64,
    /// Blocks that fit; at least 1.
    pub capacity_blocks: u64,
    /// Requests that are replayed before counting starts.
    pub warm_up: u64,
    /// Objects are cells of so many layers; 0 = whole blocks.
    pub layers: u32,
    /// KVT_HINTS_*.
    pub hints: u32,
    /// Attention cost of a token per token of context, where computing a token costs
    /// 1; 0 = as a model of the 70B class.
    pub alpha: f64,
    /// Hears of the progress; may be null.
    pub progress: kvt_progress_fn,
    /// Handed to progress.
    pub user_data: *mut c_void,
}

/// How a policy did.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_replay_report_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// Requests counted.
    pub requests: u64,
    /// Blocks asked for.
    pub references: u64,
    /// Of those, found and usable.
    pub hits: u64,
    /// Tokens asked for.
    pub tokens: u64,
    /// Of those, found.
    pub hit_tokens: u64,
    /// Recompute cost of everything asked for.
    pub cost: f64,
    /// Of that, found.
    pub hit_cost: f64,
    /// Objects inserted.
    pub inserts: u64,
    /// Objects evicted.
    pub evictions: u64,
    /// References to what was evicted and wanted again, per reference.
    pub re_prefill_rate: f64,
    /// Jain's index over sessions.
    pub jain_sessions: f64,
    /// Jain's index over tenants.
    pub jain_tenants: f64,
    /// Mean share of the capacity in use since the first eviction.
    pub utilisation: f64,
    /// Half of the eviction calls took at most this.
    pub decision_p50_ns: u64,
    /// 99 of 100 took at most this.
    pub decision_p99_ns: u64,
    /// The longest.
    pub decision_max_ns: u64,
    /// The whole replay, by the machine's clock.
    pub run_ns: u64,
}

pub(crate) struct TraceNoun(Trace);

noun!(TraceNoun, kvt_trace_t, 9, "trace");

const DEFAULT_BLOCK_TOKENS: u32 = 512;
const DEFAULT_SEED: u64 = 7;
const DAY_NS: i64 = 86_400_000_000_000;

/// What both ways to a trace have in common.
struct Given {
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
unsafe fn given(opts: *const kvt_trace_opts_t) -> Result<Given> {
    crate::base::fork::check()?;
    // SAFETY: the caller's promise.
    let o = unsafe { read(opts)? };
    known_flags(o.flags, KVT_TRACE_FLAT)?;
    // SAFETY: the caller's promise.
    let (path, kind) =
        unsafe { (text("path", o.path, o.path_bytes)?, text("kind", o.kind, o.kind_bytes)?) };
    let whole = |name: &str, value: u64| match i64::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => fail!(Invalid, "{name} is {value}"),
    };
    let Ok(block_tokens) = u32::try_from(o.block_tokens) else {
        fail!(Invalid, "block_tokens is {}", o.block_tokens);
    };
    if !(o.rate >= 0.0 && o.rate.is_finite()) {
        fail!(Invalid, "rate is {}", o.rate);
    }
    let duration_ns = whole("duration_ns", o.duration_ns)?;
    Ok(Given {
        flat: o.flags & KVT_TRACE_FLAT != 0,
        path: path.to_string(),
        kind: kind.to_string(),
        block_tokens: if block_tokens == 0 { DEFAULT_BLOCK_TOKENS } else { block_tokens },
        seed: if o.seed == 0 { DEFAULT_SEED } else { o.seed },
        gap_ns: whole("gap_ns", o.gap_ns)?,
        duration_ns: if duration_ns == 0 { DAY_NS } else { duration_ns },
        rate: o.rate,
    })
}

fn keep(trace: Trace, flat: bool) -> Result<*mut kvt_trace_t> {
    crate::base::fork::arm()?;
    insert(TraceNoun(if flat { trace.flat()? } else { trace }))
}

/// Reads a trace from a file of one of the known kinds, whole.
///
/// @param opts  What to read.
/// @param out   The trace; free it with kvt_trace_free.
/// @return KVT_E_IO, KVT_E_NOT_FOUND, KVT_E_CORRUPT, KVT_E_SPEC, KVT_E_LIMIT.
///
/// Takes as long as the file is long.
#[capi]
pub unsafe extern "C" fn kvt_trace_open(
    opts: *const kvt_trace_opts_t,
    out: *mut *mut kvt_trace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = given(opts)?;
    if given.path.is_empty() {
        fail!(Invalid, "no path was given");
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
    let handle = keep(reader::open(given.path.as_ref(), &opts)?, given.flat)?;
    out.write(handle);
    Ok(())
}

/// Makes a workload up: the same for the same options on every machine.
///
/// @param opts  What to make; its path is not used.
/// @param out   The trace; free it with kvt_trace_free.
/// @return KVT_E_SPEC, KVT_E_LIMIT.
#[capi]
pub unsafe extern "C" fn kvt_trace_generate(
    opts: *const kvt_trace_opts_t,
    out: *mut *mut kvt_trace_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    require(out)?;
    let given = given(opts)?;
    let made = generate::make(&GenOpts {
        kind: generate::kind_of(&given.kind)?,
        duration_ns: given.duration_ns,
        seed: given.seed,
        rate: given.rate,
        block_tokens: given.block_tokens,
    })?;
    let handle = keep(made, given.flat)?;
    out.write(handle);
    Ok(())
}

/// Frees a trace. Replays that are going on go on to their end.
///
/// @param trace  Pointer to the handle, which is cleared; null is fine.
#[capi]
pub unsafe extern "C" fn kvt_trace_free(trace: *mut *mut kvt_trace_t) -> kvt_status_t {
    free(trace, |_| Ok(()))
}

/// What is in a trace.
///
/// @param trace  The trace.
/// @param out    Filled in; start it with KVT_TRACE_INFO_INIT.
///
/// Goes through the whole trace.
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
        other => fail!(Invalid, "hints is {other}, not one of KVT_HINTS_*"),
    };
    if !(o.alpha >= 0.0 && o.alpha <= 1e12) {
        fail!(Invalid, "alpha is {}", o.alpha);
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

/// Replays a trace under a policy: the code that decides in production, driven as an
/// engine would.
///
/// @param trace  The trace.
/// @param opts   Policy, capacity and the rest.
/// @param out    Filled in; start it with KVT_REPLAY_REPORT_INIT.
/// @return KVT_E_SPEC, KVT_E_LIMIT, KVT_E_CANCELLED (progress said so), KVT_E_REENTRANT (in a
///         callback).
///
/// Takes as long as the trace.
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
        fail!(Invalid, "'custom' needs a score function, and a replay has none");
    }
    let trace = enter(trace)?;
    let study = Study::of(&trace.0, &opts.cost)?;
    let total = trace.0.requests().len() as u64;
    let progress = given.progress.map(|hear| Foreign::new(hear, given.user_data, None));
    let mut watch = |done: usize| match &progress {
        // SAFETY: function and data came together from the caller.
        Some(foreign) => foreign.call(|hear, user_data| hear(user_data, done as u64, total) != 0),
        None => true,
    };
    let blocks = given.capacity_blocks;
    write(out, &report(&replay::run(&trace.0, &study, spec, blocks, &opts, &mut watch)?));
    Ok(())
}
