//! Devices put to the test: for those who bring their own.

use std::ffi::{c_char, c_void};

use crate::base::callback::{Foreign, refuse_reentry};
use crate::device::conformance::{ConformanceOpts, Verdict, run};
use crate::fail;
use crate::ffi::abi::{Plain, capi, check_out, enter, known_flags, read, write};
use crate::ffi::device::kvt_device_t;
use crate::ffi::error::kvt_error_t;
use crate::ffi::status::kvt_status_t;

/// The device is closed at the end, which is a check as well.
pub const KVT_CONFORMANCE_CLOSES: u64 = 1;

/// The device does what it should.
pub const KVT_VERDICT_PASSED: u32 = 0;
/// It has nothing that could be tested.
pub const KVT_VERDICT_SKIPPED: u32 = 1;
/// It does not do what it should.
pub const KVT_VERDICT_FAILED: u32 = 2;

/// Most rounds.
const MAX_ROUNDS: u32 = 100_000;

/// How a device is put to the test.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_opts_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// KVT_CONFORMANCE_CLOSES or 0.
    pub flags: u64,
    /// Chooses all that is left to chance.
    pub seed: u64,
    /// How long an event may take; 0 = 30 s.
    pub patience_ns: u64,
    /// How often what is left to chance is tried; 0 = 40, at most 100,000.
    pub rounds: u32,
    /// Always 0.
    pub reserved: u32,
}

/// How many checks ended how.
#[repr(C)]
#[derive(Clone, Copy, Plain)]
pub struct kvt_conformance_t {
    /// sizeof of this struct.
    pub struct_size: u64,
    /// As they should.
    pub passed: u32,
    /// There was nothing to test.
    pub skipped: u32,
    /// Something is wrong.
    pub failed: u32,
    /// Always 0.
    pub reserved: u32,
}

/// Hears of a check: its name, a KVT_VERDICT_*, and why. Texts are UTF-8, not NUL-terminated,
/// borrowed for the call. Called by the thread that called. It must not unwind.
pub type kvt_conformance_fn = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        name: *const c_char,
        name_bytes: u64,
        verdict: u32,
        why: *const c_char,
        why_bytes: u64,
    ),
>;

/// Puts a device to the test: memory, copies of all sizes and layouts in all places, order,
/// events, deadlines, refusals, threads. Whoever brings a device of their own
/// (kvt_device_custom_t) runs this first. It uses a few hundred MiB of memory at most, and
/// nothing else should use the device meanwhile.
///
/// @param device     The device.
/// @param opts       How; null for defaults.
/// @param report     Hears of each check; may be null.
/// @param user_data  Handed to it.
/// @param out        How many checks ended how; start it with KVT_CONFORMANCE_INIT.
/// @param err        Explains a failure of the call; may be null.
/// @return KVT_OK, also where checks failed: look at `out`. KVT_E_INVALID, KVT_E_LIMIT,
///         KVT_E_TOO_NEW, KVT_E_REENTRANT inside a callback, KVT_E_HANDLE, KVT_E_FORKED,
///         KVT_E_PANIC.
///
/// Threading: any thread. Since 0.1.
///
/// # Safety
/// Pointers are null or valid; structs for the size they state.
#[capi]
pub unsafe extern "C" fn kvt_device_conformance(
    device: *const kvt_device_t,
    opts: *const kvt_conformance_opts_t,
    report: kvt_conformance_fn,
    user_data: *mut c_void,
    out: *mut kvt_conformance_t,
    err: *mut *mut kvt_error_t,
) -> kvt_status_t {
    refuse_reentry()?;
    check_out(out)?;
    let given = read(opts)?;
    known_flags(given.flags, KVT_CONFORMANCE_CLOSES)?;
    if given.reserved != 0 {
        fail!(Invalid, "reserved is {}", given.reserved);
    }
    if given.rounds > MAX_ROUNDS {
        fail!(Limit, "{} rounds, {MAX_ROUNDS} can be", given.rounds);
    }
    let report = report.map(|report| Foreign::new(report, user_data, None));
    let mut tell = |name: &'static str, verdict: &Verdict| {
        let Some(report) = &report else { return };
        let (code, why) = match verdict {
            Verdict::Passed => (KVT_VERDICT_PASSED, ""),
            Verdict::Skipped(why) => (KVT_VERDICT_SKIPPED, why.as_str()),
            Verdict::Failed(why) => (KVT_VERDICT_FAILED, why.as_str()),
        };
        let (text, words) = (name.as_ptr().cast(), why.as_ptr().cast());
        let (text_bytes, why_bytes) = (name.len() as u64, why.len() as u64);
        report.call(|report, user_data| {
            report(user_data, text, text_bytes, code, words, why_bytes);
        });
    };
    let device = enter(device)?;
    let opts = ConformanceOpts {
        seed: given.seed,
        rounds: given.rounds,
        clock: device.core.clock().clone(),
        patience_ns: given.patience_ns,
        closes: given.flags & KVT_CONFORMANCE_CLOSES != 0,
    };
    let count = run(&device.device, &opts, &mut tell);
    write(
        out,
        &kvt_conformance_t {
            struct_size: 0,
            passed: count.passed,
            skipped: count.skipped,
            failed: count.failed,
            reserved: 0,
        },
    );
    Ok(())
}
