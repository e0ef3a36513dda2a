//! `kvtier device-conformance`: runs the conformance suite on a device through the C interface,
//! as the author of a custom device does.

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::ValueEnum;
use kvtier::ffi::base::{kvt_error_free, kvt_error_message, kvt_error_t};
use kvtier::ffi::device::{
    KVT_CONFORMANCE_CLOSES, KVT_DEVICE_KIND_CUDA, KVT_DEVICE_KIND_CUSTOM, KVT_DEVICE_KIND_HOST,
    KVT_DEVICE_KIND_SIMULATED, KVT_VERDICT_FAILED, KVT_VERDICT_PASSED, kvt_conformance_opts_t,
    kvt_conformance_report_t, kvt_device_close, kvt_device_conformance, kvt_device_custom_t,
    kvt_device_describe, kvt_device_open, kvt_device_opts_t, kvt_device_t,
};
use kvtier::ffi::runtime::{kvt_runtime_close, kvt_runtime_open, kvt_runtime_t};

/// The function of a custom device's library that fills in the table.
const SYMBOL: &str = "kvtier_device";

/// The kind of device.
#[derive(Clone, Copy, ValueEnum)]
pub enum Kind {
    /// The processor
    Host,
    /// A GPU, through the CUDA driver
    Cuda,
    /// A simulated device, which only takes time
    Simulated,
    /// A custom device: --library exports `int32_t kvtier_device(kvt_device_custom_t *out)`
    Custom,
}

pub struct Opts {
    pub kind: Kind,
    pub library: Option<PathBuf>,
    pub ordinal: u32,
    pub seed: u64,
    pub rounds: u32,
    pub json: bool,
}

/// The message of an error of the C interface.
fn words(status: i32, error: *mut kvt_error_t) -> String {
    let mut error = error;
    // SAFETY: an error that a call wrote, or null; its text is NUL-terminated and is copied.
    unsafe {
        let text =
            std::ffi::CStr::from_ptr(kvt_error_message(error)).to_string_lossy().into_owned();
        kvt_error_free(&raw mut error);
        if text.is_empty() { format!("status {status}") } else { text }
    }
}

fn table_of(library: Option<&Path>) -> Result<kvt_device_custom_t, String> {
    let path = library.ok_or("a custom device needs --library")?;
    let name = CString::new(path.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: a NUL-terminated string. The user trusts the initialisers of the library.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
    if handle.is_null() {
        return Err(format!("{} cannot be loaded", path.display()));
    }
    let symbol = CString::new(SYMBOL).map_err(|error| error.to_string())?;
    // SAFETY: a loaded library.
    let symbol = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
    if symbol.is_null() {
        return Err(format!("{} has no {SYMBOL}", path.display()));
    }
    // SAFETY: the function has the documented signature; a zeroed table has no functions.
    unsafe {
        let fill: unsafe extern "C" fn(*mut kvt_device_custom_t) -> i32 =
            std::mem::transmute(symbol);
        let mut table: kvt_device_custom_t = std::mem::zeroed();
        table.struct_size = size_of::<kvt_device_custom_t>() as u64;
        match fill(&raw mut table) {
            0 => Ok(table),
            status => Err(format!("{SYMBOL} of {} returned {status}", path.display())),
        }
    }
}

unsafe extern "C" fn print_verdict(
    user_data: *mut c_void,
    name: *const c_char,
    name_bytes: u64,
    verdict: u32,
    why: *const c_char,
    why_bytes: u64,
) {
    // SAFETY: the texts are valid during the call, and `test` passed the data.
    let (name, why, json) = unsafe {
        let text = |data: *const c_char, bytes: u64| {
            String::from_utf8_lossy(std::slice::from_raw_parts(data.cast(), bytes as usize))
        };
        (text(name, name_bytes), text(why, why_bytes), *user_data.cast::<bool>())
    };
    let word = match verdict {
        KVT_VERDICT_PASSED => "passed",
        KVT_VERDICT_FAILED => "FAILED",
        _ => "skipped",
    };
    if json {
        let verdict = word.to_lowercase();
        println!("{}", serde_json::json!({ "check": name, "verdict": verdict, "why": why }));
    } else {
        println!("{name:20} {word:8} {why}");
    }
}

pub fn run(opts: &Opts) -> ExitCode {
    let mut runtime: *mut kvt_runtime_t = std::ptr::null_mut();
    // SAFETY: valid outputs; the runtime is closed below.
    let outcome = unsafe {
        let mut error: *mut kvt_error_t = std::ptr::null_mut();
        match kvt_runtime_open(std::ptr::null(), &raw mut runtime, &raw mut error) {
            0 => test(runtime, opts),
            status => Err(words(status, error)),
        }
    };
    // SAFETY: as above.
    unsafe {
        kvt_runtime_close(&raw mut runtime, 0, std::ptr::null_mut(), std::ptr::null_mut());
    }
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("kvtier: {why}");
            ExitCode::from(2)
        }
    }
}

/// # Safety
/// The runtime must be open.
unsafe fn test(runtime: *const kvt_runtime_t, opts: &Opts) -> Result<bool, String> {
    let table = match opts.kind {
        Kind::Custom => Some(table_of(opts.library.as_deref())?),
        _ => None,
    };
    let library = opts.library.as_ref().map_or(&[][..], |path| path.as_os_str().as_bytes());
    let mut error: *mut kvt_error_t = std::ptr::null_mut();
    let mut device: *mut kvt_device_t = std::ptr::null_mut();
    // SAFETY: zeroed structs with their sizes, and pointers that outlive the calls; the device is
    // closed below.
    unsafe {
        let mut device_opts: kvt_device_opts_t = std::mem::zeroed();
        device_opts.struct_size = size_of::<kvt_device_opts_t>() as u64;
        device_opts.kind = match opts.kind {
            Kind::Host => KVT_DEVICE_KIND_HOST,
            Kind::Cuda => KVT_DEVICE_KIND_CUDA,
            Kind::Simulated => KVT_DEVICE_KIND_SIMULATED,
            Kind::Custom => KVT_DEVICE_KIND_CUSTOM,
        };
        match opts.kind {
            Kind::Cuda => {
                device_opts.ordinal = opts.ordinal;
                (device_opts.library, device_opts.library_bytes) =
                    (library.as_ptr().cast(), library.len() as u64);
            }
            Kind::Simulated => device_opts.seed = opts.seed,
            _ => {}
        }
        device_opts.custom = table.as_ref().map_or(std::ptr::null(), |table| table);
        let status =
            kvt_device_open(runtime, &raw const device_opts, &raw mut device, &raw mut error);
        if status != 0 {
            return Err(words(status, error));
        }
        if !opts.json {
            let mut room = [0u8; 512];
            let mut bytes = 0;
            kvt_device_describe(device, room.as_mut_ptr().cast(), 512, &raw mut bytes);
            println!("{}", String::from_utf8_lossy(&room[..(bytes as usize).min(512)]));
        }
        let mut run_opts: kvt_conformance_opts_t = std::mem::zeroed();
        run_opts.struct_size = size_of::<kvt_conformance_opts_t>() as u64;
        (run_opts.flags, run_opts.seed, run_opts.rounds) =
            (KVT_CONFORMANCE_CLOSES, opts.seed, opts.rounds);
        let mut count: kvt_conformance_report_t = std::mem::zeroed();
        count.struct_size = size_of::<kvt_conformance_report_t>() as u64;
        let json = opts.json;
        let data = (&raw const json).cast_mut().cast();
        let status = kvt_device_conformance(
            device,
            &raw const run_opts,
            Some(print_verdict),
            data,
            &raw mut count,
            &raw mut error,
        );
        let result = if status == 0 { Ok(count) } else { Err(words(status, error)) };
        kvt_device_close(&raw mut device, 0, std::ptr::null_mut());
        let count = result?;
        if !opts.json {
            let (passed, skipped, failed) = (count.passed, count.skipped, count.failed);
            println!("{passed} passed, {skipped} skipped, {failed} failed");
        }
        Ok(count.failed == 0)
    }
}
