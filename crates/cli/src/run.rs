//! `kvtier run`: starts a program of llama.cpp with a library between it and libllama.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvtier::base::spec::{Arg, MAX_SPEC_BYTES, Spec, Value};

use crate::remote::{RemoteTarget, number};
use crate::spec;
use crate::stream::sizes::bytes;

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
    /// Directory for KV, which is made if it is missing; without it KV ends with the program
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Limit of that directory
    #[arg(long, default_value = "8GiB", value_parser = bytes, value_name = "SIZE", requires = "disk")]
    disk_size: u64,
    /// Host memory for KV
    #[arg(long, default_value = "1GiB", value_parser = bytes, value_name = "SIZE")]
    host: u64,
    /// Eviction policy of host memory, such as `s3fifo`; default: the library's
    #[arg(long, value_name = "SPEC")]
    policy: Option<String>,
    /// KV on a server, shared by machines: redis://HOST[:PORT], dir:PATH, or a remote of a store's
    /// spec; secrets are read from KVTIER_REMOTE_PASSWORD and others
    #[arg(long)]
    remote: Option<String>,
    /// Spec of the whole store instead, such as `store(host=8GiB, disk=disk(path="kv"))`
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["disk", "disk_size", "host", "policy", "remote"])]
    store: Option<String>,
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
    let remote = args.remote.as_deref().map(RemoteTarget::read).transpose()?;
    let store = store(args, remote.as_ref())?;
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

/// The spec of the store, which the library opens in the program.
fn store(args: &Args, remote: Option<&RemoteTarget>) -> Outcome<String> {
    let spec = match &args.store {
        Some(text) => text.clone(),
        None => from_options(args, remote)?.to_string(),
    };
    spec::check(&spec).map_err(|error| format!("the store's spec {spec}: {error}"))?;
    if spec.len() > MAX_SPEC_BYTES {
        return Err("the store's spec is too long".into());
    }
    Ok(spec)
}

fn from_options(args: &Args, remote: Option<&RemoteTarget>) -> Outcome<Spec> {
    let arg = |key: &str, value| Arg { key: key.to_string(), value, offset: 0 };
    // The engine waits for what it restores: its own thread copies it, which no other thread is woken for.
    let inline = number(INLINE_BYTES as f64);
    let mut all = vec![arg("host", number(args.host as f64)), arg("inline", inline)];
    if let Some(disk) = &args.disk {
        // The name is that of `kvtier-llama --disk`, which shares the KV.
        let path = std::path::absolute(disk)?.join("kv");
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(disk)
            .map_err(|error| format!("the directory {} cannot be made: {error}", disk.display()))?;
        let path = path.to_str().ok_or("the path of --disk is not UTF-8")?.to_string();
        let args =
            vec![arg("path", Value::Text(path)), arg("bytes", number(args.disk_size as f64))];
        let disk = Spec { name: "disk".to_string(), args, offset: 0 };
        all.push(arg("disk", Value::Spec(disk)));
    }
    if let Some(policy) = &args.policy {
        all.push(arg("policy", Value::Spec(Spec::parse(policy)?)));
    }
    if let Some(remote) = remote {
        let remote = Spec::parse(&remote.words())?;
        all.push(arg("remote", Value::Spec(remote)));
    }
    Ok(Spec { name: "store".to_string(), args: all, offset: 0 })
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
