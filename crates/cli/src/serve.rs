//! `kvtier serve`: one store for several processes of this machine.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use kvtier::base::spec::Value;
use kvtier::store::bundle::Bundle;

use crate::store_args::StoreArgs;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The store, and where it is served.
#[derive(clap::Args)]
pub struct Args {
    /// Socket at which processes of this user open the store with `store(shared="unix:PATH")`
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
    /// Control socket for `kvtier top`, `kvtier stats` and others
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
}

/// Serves until a signal ends the process; then what is in memory only is written to disk.
pub fn run(args: &Args) -> Outcome<()> {
    // Before the first thread: all of them inherit the mask.
    let signals = blocked_signals()?;
    let remote = args.store.remote()?;
    let socket = path_text(&args.socket)?;
    make_folder(&args.socket)?;
    let serve = ("serve", Value::Text(format!("unix:{socket}")));
    let spec = match &args.control {
        None => args.store.spec(None, [serve])?,
        Some(path) => {
            make_folder(path)?;
            let control = ("control", Value::Text(path_text(path)?));
            args.store.spec(None, [serve, control])?
        }
    };
    let mut bundle = Bundle::parse(&spec)?;
    if let Some(remote) = &remote {
        bundle.store = remote.store(&spec)?;
    }
    let (_runtime, store) = bundle.open()?;
    eprintln!("kvtier: serving at {socket}: open it with store(shared=\"unix:{socket}\")");
    wait_for(&signals)?;
    eprintln!("kvtier: closing");
    store.close(0)?;
    Ok(())
}

/// An absolute path as text.
fn path_text(path: &Path) -> Outcome<String> {
    let path = std::path::absolute(path)?;
    Ok(path.to_str().ok_or("the path of a socket is not UTF-8")?.to_string())
}

/// Makes the folder of a socket if it is missing: only this user can enter it.
fn make_folder(socket: &Path) -> Outcome<()> {
    let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return Ok(());
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| {
        format!("the directory {} cannot be made: {error}", folder.display()).into()
    })
}

/// Blocks the signals that end the process, for this thread and all that it starts.
fn blocked_signals() -> Outcome<libc::sigset_t> {
    // SAFETY: plain memory that sigemptyset fills in.
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a set of this thread, and signals that exist.
    let rc = unsafe {
        libc::sigemptyset(&mut signals);
        libc::sigaddset(&mut signals, libc::SIGINT);
        libc::sigaddset(&mut signals, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut())
    };
    match rc {
        0 => Ok(signals),
        number => Err(std::io::Error::from_raw_os_error(number).into()),
    }
}

fn wait_for(signals: &libc::sigset_t) -> Outcome<()> {
    let mut signal = 0;
    // SAFETY: a set that was filled in, and a number to write.
    match unsafe { libc::sigwait(signals, &mut signal) } {
        0 => Ok(()),
        number => Err(std::io::Error::from_raw_os_error(number).into()),
    }
}
