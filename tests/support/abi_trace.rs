//! The machine's instructions for traces: small ones, or many programs would be
//! few replays.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;

use kvtier::ffi::error::kvt_error_t;
use kvtier::ffi::status::*;
use kvtier::ffi::trace::*;

use super::{Machine, Ordering, Padded, REPLAYED, Tape, check, out};

const KINDS: [&str; 8] = ["chat", "batch", "burst", "multitenant", "agent", "chta", "", "csv"];
const SPECS: [&str; 8] = ["lru", "horizon", "arc", "belady", "custom", "lru(", "lrv", "auto"];
const PATHS: [&str; 3] = ["tests/data/chat.kvtrace", "/nonexistent/trace", "tests"];

/// What a progress callback does: it may stop the replay, free its own trace, and
/// tries to replay again.
struct Plan {
    trace: *mut kvt_trace_t,
    stops: bool,
    frees: bool,
    freed: bool,
}

unsafe extern "C" fn hear(user_data: *mut c_void, done: u64, total: u64) -> i32 {
    assert!(done <= total);
    if user_data.is_null() {
        return 1; // a short options struct ended before it
    }
    // SAFETY: the plan is a local of the call that this is inside of.
    let plan = unsafe { &mut *user_data.cast::<Plan>() };
    let mut report = out::<kvt_replay_report_t>();
    // SAFETY: valid pointers, local handle variables.
    unsafe {
        let opts = std::ptr::null();
        let again = kvt_trace_replay(plan.trace, opts, report.ptr(), null_mut());
        assert_eq!(again, KVT_E_REENTRANT);
        if plan.frees && !plan.freed {
            plan.freed = kvt_trace_free(&mut plan.trace) == KVT_OK;
        }
    }
    i32::from(!plan.stops)
}

impl Machine {
    pub(super) fn make_trace(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        if self.traces.live.len() >= 3 {
            return;
        }
        let kind = KINDS[usize::from(tape.byte()) % KINDS.len()];
        let path = PATHS[usize::from(tape.byte()) % PATHS.len()];
        let reads = tape.byte() > 230;
        let mut opts = Padded::<kvt_trace_opts_t>::new(tape, |o, t| {
            o.flags = t.flags() & if t.byte() > 240 { u64::MAX } else { 1 };
            (o.kind, o.kind_bytes) = (kind.as_ptr().cast::<c_char>(), kind.len() as u64);
            if reads {
                (o.path, o.path_bytes) = (path.as_ptr().cast(), path.len() as u64);
                o.kind_bytes = if t.byte() > 128 { 0 } else { o.kind_bytes };
            }
            o.block_tokens = if t.byte() > 240 { t.number() } else { 1 << 14 };
            o.seed = t.number();
            o.gap_ns = if t.byte() > 250 { t.number() } else { 0 };
            o.duration_ns = if t.byte() > 250 { u64::MAX } else { 20_000_000_000 };
            o.rate = if t.byte() > 250 { f64::NAN } else { 0.2 };
        });
        // A short struct would mean a whole day.
        let size = u64::from_le_bytes(opts.0[..8].try_into().expect("eight bytes"));
        if !reads && size < size_of::<kvt_trace_opts_t>() as u64 {
            return;
        }
        let mut handle = null_mut();
        // SAFETY: valid pointers.
        let status = check(unsafe {
            match reads {
                true => kvt_trace_open(opts.ptr(), &mut handle, err),
                false => kvt_trace_generate(opts.ptr(), &mut handle, err),
            }
        });
        assert_eq!(status == KVT_OK, !handle.is_null());
        self.traces.live.extend((status == KVT_OK).then_some(handle));
    }

    pub(super) fn use_trace(&mut self, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let trace = self.traces.pick(tape);
        match tape.byte() % 4 {
            0 if tape.byte() > 100 => {
                let mut handle = trace;
                // SAFETY: a local handle variable.
                let status = check(unsafe { kvt_trace_free(&mut handle) });
                self.traces.freed(trace, handle, status);
            }
            0 | 1 => {
                let mut info = out::<kvt_trace_info_t>();
                // SAFETY: a valid pointer.
                if check(unsafe { kvt_trace_info(trace, info.ptr()) }) == KVT_OK {
                    // SAFETY: written by the call.
                    let info = unsafe { info.ptr().read_unaligned() };
                    assert!(info.blocks <= info.references && info.known_tokens <= info.tokens);
                }
            }
            _ => self.replay(trace, tape, err),
        }
    }

    fn replay(&mut self, trace: *mut kvt_trace_t, tape: &mut Tape, err: *mut *mut kvt_error_t) {
        let spec = SPECS[usize::from(tape.byte()) % SPECS.len()];
        let what = tape.byte();
        let mut plan = Plan { trace, stops: what & 3 == 3, frees: what & 12 == 12, freed: false };
        let user_data = (&raw mut plan).cast::<c_void>();
        let mut opts = Padded::<kvt_replay_opts_t>::new(tape, |o, t| {
            o.flags = t.flags() & if t.byte() > 240 { u64::MAX } else { 3 };
            (o.spec, o.spec_bytes) = (spec.as_ptr().cast(), spec.len() as u64);
            o.capacity_blocks = if t.byte() > 250 { u64::MAX } else { u64::from(t.byte()) };
            o.warm_up = t.number();
            o.layers = u32::from(t.byte() % 4);
            o.hints = u32::from(t.byte() % 4);
            o.alpha = if t.byte() > 250 { f64::NAN } else { 0.001 };
            o.progress = if t.byte() & 1 == 0 { Some(hear) } else { None };
            o.user_data = user_data;
        });
        let mut told = out::<kvt_replay_report_t>();
        // SAFETY: valid pointers; the plan outlives the call.
        let status = check(unsafe { kvt_trace_replay(trace, opts.ptr(), told.ptr(), err) });
        // SAFETY: zeros from the start on, or written by the call.
        let told = unsafe { told.ptr().read_unaligned() };
        if status == KVT_OK {
            assert!(self.traces.is_live(trace), "a dead trace was replayed");
            REPLAYED.fetch_add(1, Ordering::SeqCst);
            assert!(told.hits <= told.references && told.evictions <= told.inserts);
            assert!(told.hit_tokens <= told.tokens);
        } else {
            assert_eq!((told.requests, told.run_ns), (0, 0), "an output was written on failure");
        }
        if plan.freed {
            self.traces.freed(trace, plan.trace, KVT_OK);
        }
    }
}
