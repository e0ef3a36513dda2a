//! `kvtier demo`: conversations that do not fit into memory come and go. What they
//! have computed is kept in a store, in memory and on disk, and brought back when
//! they go on; every byte is compared with what was put in, and planted damage must be
//! found.

mod model;
pub mod shared;
mod show;
mod talk;
mod tensors;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::meta::key::Key;
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::SpaceOpts;

use model::Model;
use show::Screen;
use talk::{Talk, Tally};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What to show.
pub struct Opts {
    /// Conversations.
    pub sessions: u32,
    /// Threads; 0 = as many as cores, at most 4.
    pub workers: u32,
    /// Policies of memory: a run for each.
    pub policies: Vec<String>,
    /// One JSON object at the end.
    pub json: bool,
    /// A file that describes the store; its policy is the only one then.
    pub config: Option<PathBuf>,
    /// Where the control socket is to be.
    pub control: Option<PathBuf>,
    /// How long conversations come back before the end.
    pub linger: Duration,
}

/// Runs the demo.
pub fn run(opts: &Opts) -> Outcome<()> {
    let model = Model::small()?;
    let screen = Screen::new(opts.json);
    let mut runs = Vec::new();
    for spec in specs(opts, &model)? {
        let policy = spec.config.host_policy.clone();
        let tally = run_one(opts, &model, &spec, &screen)?;
        runs.push((policy, tally));
    }
    show::close(&runs, &model, opts);
    let wrong: u64 = runs.iter().map(|(_, tally)| tally.wrong).sum();
    if wrong > 0 {
        return Err(format!("{wrong} chunks came back wrong").into());
    }
    Ok(())
}

/// The stores that are tried: one that a file describes, or one for each policy.
fn specs(opts: &Opts, model: &Model) -> Outcome<Vec<StoreSpec>> {
    let texts = match &opts.config {
        Some(path) => vec![crate::config::read(path)?.to_string()],
        None => opts.policies.iter().map(|policy| usual(opts, model, policy)).collect(),
    };
    if texts.is_empty() {
        return Err("no policy is named".into());
    }
    let mut specs = Vec::new();
    for text in texts {
        let mut spec = StoreSpec::parse(&text)?;
        if let Some(disk) = spec.disk.as_ref().filter(|disk| disk.path.exists()) {
            let place = disk.path.display();
            return Err(format!(
                "{place} is there already: the demo makes a directory of its own, damages some bytes in it \
                 on purpose, and removes it"
            )
            .into());
        }
        spec.control = opts.control.clone().or(spec.control);
        specs.push(spec);
    }
    Ok(specs)
}

/// A quarter of all conversations fits into memory, three quarters on disk; each worker
/// holds one.
fn usual(opts: &Opts, model: &Model, policy: &str) -> String {
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

/// A directory that goes when this does.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        match std::fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                eprintln!("kvtier: {} stays: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

fn run_one(opts: &Opts, model: &Model, spec: &StoreSpec, screen: &Screen) -> Outcome<Tally> {
    let runtime = Runtime::open(RuntimeOpts { workers: opts.workers, ..RuntimeOpts::default() })?;
    let scratch = spec.disk.as_ref().map(|disk| Scratch(disk.path.clone()));
    let store = Store::open(runtime.core(), None, spec)?;
    let layout = model.layout.clone();
    let space = store
        .with(|core| core.open_space(&SpaceOpts { key: Key([0xD3; 32]), layout, holes: false }))?;
    screen.begin(opts, model, spec, all_bytes(opts, model));

    let mut talk = Talk::new(&store, space, model, opts.sessions);
    let started = Instant::now();
    let turns = u64::from(opts.sessions) * model::TURNS;
    for turn in 0..turns {
        talk.turn(screen)?;
        if screen.is_due() || turn + 1 == turns {
            screen.draw(&store, space, &talk, turn + 1, turns)?;
        }
    }
    talk.tally.took = started.elapsed();
    store.settle(0)?;
    talk.tally.counters = store.with(|core| Ok(core.counters))?;
    talk.linger(opts.linger)?;
    let mut tally = std::mem::take(&mut talk.tally);
    drop(talk);
    match &scratch {
        Some(scratch) => {
            tally.damage = damage(&runtime, store, spec, scratch, model, opts.sessions)?;
        }
        None => store.close(0)?,
    }
    screen.end();
    runtime.close(0)?;
    Ok(tally)
}

/// What became of damage that was done on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Damage {
    /// Bytes that were changed on disk.
    pub done: u64,
    /// Cells that were found damaged.
    pub found: u64,
    /// Chunks that came back after a restart.
    pub back: u64,
    /// How long opening took.
    pub open: Duration,
}

/// Closes the store, changes some bytes on disk, opens it again and reads it all.
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
    let space = store
        .with(|core| core.open_space(&SpaceOpts { key: Key([0xD3; 32]), layout, holes: false }))?;
    let mut talk = Talk::new(&store, space, model, sessions);
    let back = talk.read_all()?;
    if talk.tally.wrong > 0 {
        return Err("damage was passed on as good".into());
    }
    let found = store.with(|core| Ok(core.counters.corrupt))?;
    drop(talk);
    store.close(0)?;
    Ok(Damage { done, found, back, open })
}

/// Turns a bit over in the middle of each of some segments.
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
