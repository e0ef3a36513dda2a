//! `kvtier run`: starts a program of llama.cpp with a library between it and libllama.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::remote::number;
use crate::store_args::StoreArgs;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The library that is preloaded; built from `bindings/llama.cpp/run`.
const LIBRARY: &str = "libkvtier-run.so";
/// Where it is looked for, seen from the folder of this program.
const FOLDERS: [&str; 4] = ["", "../lib/kvtier", "../lib", "../lib64/kvtier"];
/// Transfers up to this size are copied by the thread that submits them.
const INLINE_BYTES: u64 = 32 << 20;
/// Program header of a file that the dynamic loader starts.
const PT_INTERP: u32 = 3;

/// The store, and the program.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// KV is shared only with runs that give the same text
    #[arg(long, value_name = "TEXT")]
    salt: Option<String>,
    /// Append a line of JSON to FILE for each context that the program closes
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Print only why something is not done
    #[arg(long)]
    quiet: bool,
    /// The library to preload; default: KVTIER_RUN_LIBRARY, then beside this program
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<std::ffi::OsString>,
}

/// Replaces this process by the program.
pub fn run(args: &Args) -> Outcome<()> {
    let library = library(args.library.as_deref())?;
    let remote = args.store.remote()?;
    // The engine waits for what it restores: its own thread copies it, which no other thread is woken for.
    let inline = ("inline", number(INLINE_BYTES as f64));
    let inline = (!args.store.is_whole()).then_some(inline);
    let store = args.store.spec(remote.as_ref(), inline)?;
    let program = found(Path::new(&args.program[0]))?;
    if is_static(&program) {
        return Err(format!(
            "{} is linked statically, so nothing can be put between it and libllama: build llama.cpp with \
             -DBUILD_SHARED_LIBS=ON, or put the proxy kvtier_front in front of the server",
            program.display()
        )
        .into());
    }
    let mut preload = library.into_os_string();
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        preload.push(":");
        preload.push(more);
    }
    let mut command = Command::new(&program);
    command.args(&args.program[1..]).env("LD_PRELOAD", preload).env("KVTIER_RUN_STORE", store);
    command.env("KVTIER_RUN_QUIET", if args.quiet { "1" } else { "0" });
    if let Some(remote) = &remote {
        command.envs(remote.variables());
    }
    if let Some(salt) = &args.salt {
        command.env("KVTIER_RUN_SALT", salt);
    }
    if let Some(stats) = &args.stats {
        command.env("KVTIER_RUN_STATS", std::path::absolute(stats)?);
    }
    Err(format!("{} cannot be started: {}", program.display(), command.exec()).into())
}

fn library(given: Option<&Path>) -> Outcome<PathBuf> {
    let given = given.map(Path::to_path_buf);
    if let Some(path) = given.or_else(|| std::env::var_os("KVTIER_RUN_LIBRARY").map(PathBuf::from))
    {
        return path.canonicalize().map_err(|error| format!("{}: {error}", path.display()).into());
    }
    let program = std::env::current_exe()?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places: Vec<PathBuf> = FOLDERS.iter().map(|part| folder.join(part).join(LIBRARY)).collect();
    places.iter().find_map(|path| path.canonicalize().ok()).ok_or_else(|| {
        format!(
            "{LIBRARY} is not beside {}: build it against the headers of your llama.cpp (cmake -S \
             bindings/llama.cpp), then give its path with --library or KVTIER_RUN_LIBRARY",
            program.display()
        )
        .into()
    })
}

/// The file of a program, looked for as a shell does.
fn found(program: &Path) -> Outcome<PathBuf> {
    let runs = |path: &Path| {
        path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if program.as_os_str().as_bytes().contains(&b'/') {
        return match runs(program) {
            true => Ok(program.to_path_buf()),
            false => Err(format!("{} is not a program", program.display()).into()),
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(program))
        .find(|path| runs(path))
        .ok_or_else(|| format!("no program {} in PATH", program.display()).into())
}

/// Whether a file is an ELF program without a dynamic loader. Scripts and unreadable files are not.
fn is_static(path: &Path) -> bool {
    elf_interpreter(path) == Some(false)
}

/// Whether a 64-bit little-endian ELF program names a dynamic loader; `None` = another kind of file.
fn elf_interpreter(path: &Path) -> Option<bool> {
    let mut file = File::open(path).ok()?;
    let mut head = [0u8; 64];
    file.read_exact(&mut head).ok()?;
    if &head[..6] != b"\x7fELF\x02\x01" {
        return None;
    }
    let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let table = u64::from_le_bytes(head[32..40].try_into().ok()?);
    let (size, count) = (u64::from(word(54)), u64::from(word(56)));
    for i in 0..count {
        let mut kind = [0u8; 4];
        file.read_exact_at(&mut kind, table.checked_add(i * size)?).ok()?;
        if u32::from_le_bytes(kind) == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}
