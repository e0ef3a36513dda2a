//! `kvtier demo`: conversations whose KV does not fit into memory. A store keeps the KV in memory
//! and on disk and loads it when a conversation continues. Every loaded byte is compared with the
//! byte that was put, and bytes damaged on purpose must be detected.

mod model;
pub mod remote;
mod show;
mod tensors;
mod workload;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::meta::key::Key;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::NamespaceOpts;

use model::Model;
use show::Screen;
use workload::{Totals, Workload};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Options of the demo.
pub struct Opts {
    /// Number of conversations.
    pub sessions: u32,
    /// Worker threads; 0 = the number of cores, at most 4.
    pub workers: u32,
    /// Eviction policies of host memory, one run each.
    pub policies: Vec<String>,
    /// Print one JSON object a policy.
    pub json: bool,
    /// Configuration file of the store; replaces `policies`.
    pub config: Option<PathBuf>,
    /// Path of a control socket.
    pub control: Option<PathBuf>,
    /// Time for which conversations are loaded again before the end.
    pub linger: Duration,
}

/// Runs the demo.
pub fn run(opts: &Opts) -> Outcome<()> {
    let model = Model::small()?;
    let screen = Screen::new(opts.json);
    let mut runs = Vec::new();
    for spec in specs(opts, &model)? {
        let policy = spec.config.host_policy.clone();
        let totals = run_one(opts, &model, &spec, &screen)?;
        runs.push((policy, totals));
    }
    show::close(&runs, opts);
    let wrong: u64 = runs.iter().map(|(_, totals)| totals.wrong).sum();
    if wrong > 0 {
        return Err(format!("{wrong} chunks were loaded with wrong bytes").into());
    }
    Ok(())
}

/// The specs of all runs: that of the configuration file, or one for each policy.
fn specs(opts: &Opts, model: &Model) -> Outcome<Vec<StoreSpec>> {
    let texts = match &opts.config {
        Some(path) => vec![crate::config::read(path)?.to_string()],
        None => opts.policies.iter().map(|policy| default_spec(opts, model, policy)).collect(),
    };
    if texts.is_empty() {
        return Err("--policies names no policy".into());
    }
    let mut specs = Vec::new();
    for text in texts {
        let mut spec = StoreSpec::parse(&text)?;
        if let Some(disk) = spec.disk.as_ref().filter(|disk| disk.path.exists()) {
            let place = disk.path.display();
            return Err(format!(
                "{place} exists: the demo creates this directory, damages some bytes in it on \
                 purpose, and removes it; choose another path"
            )
            .into());
        }
        spec.control = opts.control.clone().or(spec.control);
        specs.push(spec);
    }
    Ok(specs)
}

/// A store with memory for a quarter of all conversations and disk for three quarters.
fn default_spec(opts: &Opts, model: &Model, policy: &str) -> String {
    let all_bytes = all_bytes(opts, model);
    let host_bytes = (all_bytes / 4).max(16 << 20);
    let disk_bytes = (all_bytes * 3 / 4).max(96 << 20);
    let path = std::env::temp_dir().join(format!("kvtier-demo-{}", std::process::id()));
    format!(
        "store(host={host_bytes}, policy={policy}, copiers={}, write=back, \
         disk=disk(path=\"{}\", bytes={disk_bytes}, segment=4MiB))",
        opts.workers,
        path.display()
    )
}

fn all_bytes(opts: &Opts, model: &Model) -> u64 {
    u64::from(opts.sessions) * model.session_bytes()
}

/// A directory that the drop removes.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        match std::fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                eprintln!("kvtier: cannot remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

fn run_one(opts: &Opts, model: &Model, spec: &StoreSpec, screen: &Screen) -> Outcome<Totals> {
    let runtime = Runtime::open(RuntimeOpts { workers: opts.workers, ..RuntimeOpts::default() })?;
    let scratch = spec.disk.as_ref().map(|disk| Scratch(disk.path.clone()));
    let store = Store::open(runtime.core(), None, spec)?;
    let layout = model.layout.clone();
    let namespace = store.with(|core| {
        core.open_namespace(&NamespaceOpts { key: Key([0xD3; 32]), layout, holes: false })
    })?;
    screen.begin(opts, model, spec, all_bytes(opts, model));

    let mut workload = Workload::new(&store, namespace, model, opts.sessions);
    let started = Instant::now();
    let turns = u64::from(opts.sessions) * model::TURNS;
    for turn in 0..turns {
        workload.turn()?;
        if screen.is_due() || turn + 1 == turns {
            screen.draw(&store, namespace, &workload, turn + 1, turns)?;
        }
    }
    workload.totals.took = started.elapsed();
    store.settle(0)?;
    workload.totals.counters = store.with(|core| Ok(core.counters))?;
    workload.linger(opts.linger)?;
    let mut totals = std::mem::take(&mut workload.totals);
    drop(workload);
    match &scratch {
        Some(scratch) => {
            totals.damage = damage(&runtime, store, spec, scratch, model, opts.sessions)?;
        }
        None => store.close(0)?,
    }
    screen.end();
    runtime.close(0)?;
    Ok(totals)
}

/// The result of the restart with damaged bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Damage {
    /// Bytes changed on disk.
    pub done: u64,
    /// Cells detected as damaged.
    pub found: u64,
    /// Chunks loaded after the restart.
    pub back: u64,
    /// Time of opening the store.
    pub open: Duration,
}

/// Closes the store, changes some bytes on disk, opens the store again and loads everything.
fn damage(
    runtime: &Runtime,
    store: Store,
    spec: &StoreSpec,
    scratch: &Scratch,
    model: &Model,
    sessions: u32,
) -> Outcome<Damage> {
    store.close(0)?;
    drop(store);
    let done = change_bytes(&scratch.0)?;
    let start = Instant::now();
    let store = Store::open(runtime.core(), None, spec)?;
    let open = start.elapsed();
    let layout = model.layout.clone();
    let namespace = store.with(|core| {
        core.open_namespace(&NamespaceOpts { key: Key([0xD3; 32]), layout, holes: false })
    })?;
    let mut workload = Workload::new(&store, namespace, model, sessions);
    let back = workload.read_all()?;
    if workload.totals.wrong > 0 {
        return Err("a damaged cell was returned as good".into());
    }
    let found = store.with(|core| Ok(core.counters.corrupt_cells))?;
    drop(workload);
    store.close(0)?;
    Ok(Damage { done, found, back, open })
}

/// Flips one bit in the middle of up to four segments.
fn change_bytes(path: &std::path::Path) -> Outcome<u64> {
    use std::os::unix::fs::FileExt;
    let mut names: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("seg-") {
            names.push(path);
        }
    }
    names.sort();
    let mut done = 0;
    for name in names.iter().step_by(names.len().div_ceil(4).max(1)) {
        let file = std::fs::OpenOptions::new().read(true).write(true).open(name)?;
        let at = file.metadata()?.len() / 2 + 77;
        let mut byte = [0u8];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 0x10], at)?;
        file.sync_all()?;
        done += 1;
    }
    Ok(done)
}
