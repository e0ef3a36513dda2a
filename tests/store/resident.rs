//! Memory of the process is at most what its budget has committed. The kernel measures it, in a
//! separate process for each configuration.

use kvtier_testkit::fixtures::store as support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::status::Status;
use kvtier::device::simulated::SimulatedOpts;
use kvtier::device::{Device, Memory};
use kvtier::store::state::transfer::{Level, TransferKind};
use support::{
    Done, Engine, Model, Scratch, Shape, TestStore, document, in_memory, marks_of, runtime,
    simulated, spec_of,
};

const CONFIG: &str = "KVTIER_RESIDENT_CONFIG";
/// Number of seconds to repeat the measurement, instead of once.
const SECONDS: &str = "KVTIER_RESIDENT_SECONDS";
/// The files of a memory cgroup that a child joins.
const CGROUP: &str = "KVTIER_RESIDENT_CGROUP";
const MIB: u64 = 1 << 20;
/// Tolerance: resident bytes beyond the committed ones, plus the committed bytes divided by `PART`.
const BESIDE: u64 = 16 * MIB;
const PART: u64 = 50;
/// Memory limit of the cgroup, in MiB.
const CGROUP_MIB: u64 = 512;

/// A configuration: MiB of host memory, of the budget (0 = none), of the disk and of stored data;
/// bytes of a cell; layers; rest of the spec.
struct Setup {
    name: &'static str,
    host: u64,
    budget: u64,
    disk: u64,
    stored: u64,
    cell: usize,
    layers: usize,
    more: &'static str,
}

const fn setup(
    name: &'static str,
    [host, budget, disk, stored]: [u64; 4],
    (cell, layers): (usize, usize),
    more: &'static str,
) -> Setup {
    Setup { name, host, budget, disk, stored, cell, layers, more }
}

const KIB: usize = 1 << 10;

const SETUPS: [Setup; 9] = [
    setup("small", [16, 64, 0, 200], (4 * KIB, 4), ""),
    setup("usual", [64, 128, 0, 500], (4 * KIB, 4), ""),
    setup("large_cells", [64, 128, 0, 500], (1024 * KIB, 2), ""),
    setup("by_cells", [32, 128, 96, 200], (4 * KIB, 8), ",granularity=cell"),
    setup("on_disk", [32, 128, 96, 300], (4 * KIB, 1), ""),
    setup("auto", [32, 160, 0, 300], (4 * KIB, 2), ",policy=auto"),
    setup("few_chunks", [64, 128, 96, 300], (16 * KIB, 2), ",chunks=2048"),
    setup("remote", [32, 128, 0, 200], (16 * KIB, 4), ",remote=dir(path=\"REMOTE\",write=through)"),
    setup("device", [32, 128, 0, 300], (4 * KIB, 4), ",device=device(capacity=24MiB)"),
];

/// Configurations that take gigabytes.
const LARGE: [Setup; 6] = [
    setup("half_a_gib", [512, 768, 0, 1200], (4 * KIB, 4), ""),
    setup("half_a_gib_on_disk", [512, 768, 1024, 3000], (64 * KIB, 4), ""),
    setup("two_gib", [2048, 2560, 4096, 6000], (16 * KIB, 8), ",granularity=cell"),
    setup(
        "two_gib_and_a_remote",
        [2048, 2560, 0, 2500],
        (256 * KIB, 4),
        ",remote=dir(path=\"REMOTE\",write=through)",
    ),
    setup("eight_gib", [8192, 10_240, 0, 10_000], (4 * KIB, 32), ""),
    setup("eight_gib_of_large_cells", [8192, 8500, 0, 10_000], (4096 * KIB, 2), ""),
];

/// Configurations for a memory cgroup: as large as the store accepts there.
const HELD: [Setup; 4] = [
    setup("no_budget", [1024, 0, 0, 5000], (64 * KIB, 4), ""),
    setup("no_budget_on_disk", [1024, 0, 2048, 5000], (64 * KIB, 4), ""),
    setup("large_budget_on_disk", [400, 10_000, 2048, 5000], (16 * KIB, 8), ""),
    setup("large_budget_buffered", [400, 10_000, 2048, 5000], (256 * KIB, 4), ",BUFFERED"),
];

/// Resident bytes of this process, as counted by the kernel.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("smaps_rollup");
    let line = text.lines().find(|line| line.starts_with("Rss:")).expect("a line with Rss");
    let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    kib.expect("a number") * 1024
}

/// Puts a document. `memory`: the declared memory of the tensors.
fn put(
    store: &TestStore,
    namespace: u32,
    (engine, back): (&mut Engine, &mut Engine),
    (number, memory): (u32, Memory),
) {
    let tokens = document(number, engine.tokens);
    let session = store.session(namespace, &tokens);
    engine.compute(&marks_of(0, &tokens));
    let cells = in_memory(engine.whole(), memory);
    let done = store.transfer(session, TransferKind::Put, Level::Ram, cells);
    assert_eq!(done, Done::ok(engine.tokens), "{number}");
    if number % 3 == 0 && store.get(session, back).status == Status::Ok {
        back.check(&marks_of(0, &tokens), 0..tokens.len(), 0..back.model.layers);
    }
    store.close_session(session);
}

fn spec(setup: &Setup, scratch: &Path) -> String {
    let (folder, remote) = (scratch.display(), scratch.join("remote"));
    let buffered = if setup.more == ",BUFFERED" { ",buffered=true" } else { "" };
    let more = setup.more.replace(",BUFFERED", "").replace("REMOTE", &remote.display().to_string());
    if more.contains("remote=") {
        std::fs::create_dir_all(&remote).expect("made");
    }
    let disk = match setup.disk {
        0 => String::new(),
        mib => format!("disk=disk(path=\"{folder}\",bytes={mib}MiB{buffered}),"),
    };
    format!("store({disk}host={}MiB{more})", setup.host)
}

/// The process that is measured. Does nothing in a usual run.
#[test]
fn child() {
    let Ok(name) = std::env::var(CONFIG) else { return };
    let mut all = SETUPS.iter().chain(&LARGE).chain(&HELD);
    let setup = all.find(|one| one.name == name).expect("one of them");
    if let Ok(group) = std::env::var(CGROUP) {
        let file = Path::new(&group).join("cgroup.procs");
        std::fs::write(file, std::process::id().to_string()).expect("joined");
    }
    let seconds = std::env::var(SECONDS).map_or(0, |text| text.parse().expect("a number"));
    let scratch = Scratch::new("resident");
    // Two planes of two heads of f16: a chunk of 16 tokens has cells of the configured length.
    let model = Model { layers: setup.layers, heads: 2, run: setup.cell / 64, chunk: 16 };
    let chunks = (8 * MIB / model.chunk_bytes()).clamp(1, 8);
    let tokens = 16 * chunks as usize;
    let mut engine = Engine::computed(model, Shape::Tokens, &marks_of(0, &document(0, tokens)));
    let mut back = Engine::new(model, Shape::Tokens, tokens);
    let runtime = runtime();
    let mut limits = [None; 5];
    limits[Tier::Host as usize] = Some(setup.budget * MIB);
    limits[Tier::Device as usize] = Some(setup.budget * MIB);
    // In a cgroup, the limit of the group and the default reserve bound the budget.
    let reserve_bytes = std::env::var(CGROUP).is_err().then_some(0);
    let opts = BudgetOpts { limits, reserve_bytes, strict: false };
    let budget = match setup.budget {
        0 => None,
        _ => Some(Budget::open(runtime.core(), &opts).expect("a budget")),
    };
    let spec = spec_of(&spec(setup, &scratch.0));
    let before = resident();
    let on_device = setup.more.contains("device=");
    let device = on_device.then(|| simulated(SimulatedOpts::default()));
    let on = device.clone().map(|device| device as std::sync::Arc<dyn Device>);
    let memory = if on_device { Memory::Device } else { Memory::Host };
    let store = TestStore::open_with(runtime, &spec, budget.as_ref(), on);
    let namespace = store.namespace(1, &model);
    let most = (setup.stored * MIB / (model.chunk_bytes() * chunks)) as u32;
    let mut worst = i64::MIN;
    let (mut said, mut looked, begun) = ((0, 0), Instant::now(), Instant::now());
    for number in 0.. {
        let is_over = match seconds {
            0 => number >= most,
            seconds => begun.elapsed().as_secs() >= seconds,
        };
        if is_over {
            break;
        }
        put(&store, namespace, (&mut engine, &mut back), (number, memory));
        let is_time = seconds == 0 || looked.elapsed().as_secs() >= 1;
        let Some(budget) = budget.as_ref().filter(|_| number % 64 == 0 && is_time) else {
            continue;
        };
        looked = Instant::now();
        let committed = budget.usage(Tier::Host).committed_bytes;
        // The memory of a simulated device is memory of this process.
        let device_bytes = device.as_ref().map_or(0, |device| device.allocated_bytes());
        assert_eq!(device_bytes > 0, on_device);
        let grown = resident().saturating_sub(before + device_bytes);
        if seconds > 0 {
            let lane = budget.usage(Tier::Host);
            let report = store.handle.with(|core| Ok(core.report())).expect("open");
            println!(
                "{} s: {number} documents, {grown} resident, {committed} committed, {} reserved, {} \
                 chunks, {:?}",
                begun.elapsed().as_secs(),
                lane.reserved_bytes,
                report.stats.chunks,
                report.stats
            );
        }
        let over = grown as i64 - (committed + committed / PART) as i64;
        if over > worst {
            (worst, said) = (over, (grown, committed));
        }
    }
    store.settle();
    println!("\nresident {worst} {} {}", said.0, said.1);
}

/// Measures a configuration in a separate process. Returns the excess over the committed bytes, the
/// resident growth and the committed bytes.
fn measure(name: &str, more: &[(&str, &str)]) -> [i64; 3] {
    let program = std::env::current_exe().expect("this program");
    let out = Command::new(&program)
        .args(["--exact", kvtier_testkit::test_name!("child"), "--nocapture"])
        .arg("--test-threads=1")
        .env(CONFIG, name)
        .envs(more.iter().copied())
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&out.stdout);
    let line = text.lines().find_map(|line| line.strip_prefix("resident "));
    let error = String::from_utf8_lossy(&out.stderr);
    let line = line.unwrap_or_else(|| panic!("{name}: {}, {text} {error}", out.status));
    let numbers: Vec<i64> = line.split(' ').map(|n| n.parse().expect("a number")).collect();
    numbers.try_into().expect("three")
}

fn check(setups: &[Setup], more: &[(&str, &str)]) {
    for Setup { name, .. } in setups {
        let [over, grown, committed] = measure(name, more);
        let [grown, committed] = [grown, committed].map(|bytes| bytes / MIB as i64);
        println!("{name}: {grown} MiB resident, {committed} MiB committed");
        assert!(over <= BESIDE as i64, "{name}: {grown} MiB for {committed} committed");
    }
}

#[test]
fn resident_memory_is_committed() {
    check(&SETUPS, &[]);
}

#[test]
#[ignore = "gigabytes of memory and disk: ffi-tests/run --soak"]
fn resident_memory_is_committed_in_large_stores() {
    check(&LARGE, &[]);
}

#[test]
#[ignore = "minutes: ffi-tests/run --soak"]
fn resident_memory_stays_committed_for_minutes() {
    let seconds = std::env::var(SECONDS).unwrap_or_else(|_| "540".into());
    check(&SETUPS[4..5], &[(SECONDS, &seconds)]);
}

/// A memory cgroup, which is removed on drop.
struct Cgroup(PathBuf);

impl Cgroup {
    /// None = no cgroup can be made here.
    fn new() -> Option<Cgroup> {
        let root = Path::new("/sys/fs/cgroup");
        let name = format!("kvtier-{}", std::process::id());
        let (dir, limit) = match root.join("memory").is_dir() {
            true => (root.join("memory").join(name), "memory.limit_in_bytes"),
            false => (root.join(name), "memory.max"),
        };
        std::fs::create_dir(&dir).ok()?;
        let made = Cgroup(dir);
        std::fs::write(made.0.join(limit), (CGROUP_MIB * MIB).to_string()).ok()?;
        Some(made)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Configurations that the store accepts in a small cgroup are not killed there.
fn check_in_cgroup(setups: &[Setup]) {
    let Some(group) = Cgroup::new() else {
        println!("SKIP: no memory cgroup can be made here");
        return;
    };
    for Setup { name, .. } in setups {
        measure(name, &[(CGROUP, &group.0.display().to_string())]);
    }
}

#[test]
fn store_without_a_budget_fits_a_small_cgroup() {
    check_in_cgroup(&HELD[..1]);
}

#[test]
#[ignore = "20 GB of writes: ffi-tests/run --soak"]
fn accepted_configurations_fit_a_small_cgroup() {
    check_in_cgroup(&HELD);
}
