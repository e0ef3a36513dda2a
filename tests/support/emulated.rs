//! The CUDA kernels of `src/device/cuda/kernels`, compiled for this processor: `ffi-tests/cuda/
//! kernels/cpu.h` stands in for what only a device has.
#![allow(dead_code)] // not every test binary uses all of it

use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use kvtier::base::checksum::checksum;
use kvtier::base::status::Result;
use kvtier::device::call::Call;
use kvtier::device::cuda::kernels::{MOST_SHARED, Step, steps};

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Files of a folder that end with one of these, in the order of their names.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder of sources");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_source = |path: &PathBuf| {
        path.extension().is_some_and(|ending| endings.iter().any(|e| ending == *e))
    };
    let mut found: Vec<PathBuf> = paths.filter(is_source).collect();
    found.sort();
    found
}

/// Where all kernels are, built once for the same sources.
pub fn library() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(build).clone()
}

fn build() -> PathBuf {
    let (kernels, here) = (folder("src/device/cuda/kernels"), folder("ffi-tests/cuda/kernels"));
    let endings = ["cu", "cpp", "h"];
    let all: Vec<PathBuf> =
        [&kernels, &here].into_iter().flat_map(|folder| files(folder, &endings)).collect();
    let text: Vec<u8> =
        all.iter().flat_map(|path| std::fs::read(path).expect("a source")).collect();
    let place = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = place.join(format!("libkernels-{:016x}.so", checksum(&text)));
    if path.exists() {
        return path;
    }
    // Others may be building it, too: the last one wins, with the same.
    let ours = place.join(format!("libkernels-{}.so", std::process::id()));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-g1", "-shared", "-fPIC", "-pthread", "-DEMULATED"]);
    command.args(["-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"]);
    // What is not aligned is a fault on a device.
    command.args(["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]);
    command.arg("-I").arg(&kernels).arg("-I").arg(&here).arg("-o").arg(&ours);
    command.args(["-x", "c++"]);
    command.args(all.iter().filter(|path| path.extension().is_some_and(|e| e != "h")));
    let status = command.arg("-ldl").status();
    assert!(status.expect("a C++ compiler").success(), "kernels do not compile for a processor");
    std::fs::rename(&ours, &path).expect("a name for the library");
    path
}

type Launch = extern "C" fn(
    *const c_char,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *const c_void,
) -> c_int;

fn symbol(name: &CStr) -> *mut c_void {
    static HANDLE: OnceLock<usize> = OnceLock::new();
    let handle = *HANDLE.get_or_init(|| {
        let path = CString::new(library().to_str().expect("a name")).expect("a name");
        // SAFETY: a string that ends with a zero.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the kernels do not load");
        handle as usize
    });
    // SAFETY: a library that stays, and a string that ends with a zero.
    let symbol = unsafe { libc::dlsym(handle as *mut c_void, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?} is not in the library");
    symbol
}

/// Runs one launch to its end; what was wrong.
///
/// # Safety
/// All that the call names is there.
pub unsafe fn launch(step: &Step, call: &Call) -> std::result::Result<(), String> {
    let ([gx, gy, gz], [bx, by, bz]) = (step.grid, step.block);
    let name = CString::new(step.name).expect("a name");
    // SAFETY: the signatures in `cpu.cpp`.
    let (launch, words) = unsafe {
        let launch: Launch = std::mem::transmute(symbol(c"emu_launch"));
        let words: extern "C" fn() -> *const c_char = std::mem::transmute(symbol(c"emu_words"));
        (launch, words)
    };
    let call = std::ptr::from_ref(call).cast();
    match launch(name.as_ptr(), gx, gy, gz, bx, by, bz, step.shared_bytes, call) {
        0 => Ok(()),
        // SAFETY: a string that ends with a zero.
        _ => Err(unsafe { CStr::from_ptr(words()) }.to_string_lossy().into_owned()),
    }
}

/// Runs all launches of a call.
///
/// # Safety
/// As of [`launch`].
pub unsafe fn run(call: &Call) -> Result<()> {
    // SAFETY: the caller's promise.
    unsafe { run_within(call, MOST_SHARED) }
}

/// The same where a block of threads can have so much shared memory.
///
/// # Safety
/// As of [`launch`].
pub unsafe fn run_within(call: &Call, shared_bytes: u32) -> Result<()> {
    let mut all = Vec::new();
    steps(call, shared_bytes, &mut all)?;
    for step in &all {
        // SAFETY: the caller's promise.
        unsafe { launch(step, call) }.unwrap_or_else(|words| panic!("{step:?}: {words}"));
    }
    Ok(())
}

/// Where the kernels' own header has a field.
pub fn offset(field: &str) -> Option<usize> {
    let name = CString::new(field).expect("a name");
    // SAFETY: the signature in `cpu.cpp`.
    let offset: extern "C" fn(*const c_char) -> c_long =
        unsafe { std::mem::transmute(symbol(c"emu_offset")) };
    usize::try_from(offset(name.as_ptr())).ok()
}

/// Where `emu_launch` is: what the driver without a device runs kernels with.
pub fn launches() -> *mut c_void {
    symbol(c"emu_launch")
}
