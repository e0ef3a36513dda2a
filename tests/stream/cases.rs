//! Random streamers by seed: models, memory, I/O modes and faults.

use std::ops::Range as Span;
use std::sync::Arc;

use kvtier::base::budget::{Budget, BudgetOpts, Tier};
use kvtier::base::random::Random;
use kvtier::base::runtime::Runtime;
use kvtier::base::status::Status;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::stream::plan::{Mode, Placement, PlanOptions};
use kvtier::stream::streamer::{Opts, Streamer, Verify};
use kvtier::stream::units::{Entry, NONE, Range, Role};
use kvtier_testkit::model_files::faults::Fault;
use kvtier_testkit::model_files::simulated::{SimModelFiles, SimModelFilesOpts};

use kvtier_testkit::fixtures::stream_rig::{Files, MIB, Rig, device, plan_options, runtime};

/// Fault of the files or of the device.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    Nothing,
    /// Some reads fail, or end too early.
    Reads,
    /// A stretch of a file cannot be read.
    LookupRange(u32, Span<u64>),
    /// A stretch of a file is slow.
    Slow(u32, Span<u64>),
    /// A file is cut there, while units are used.
    Cut(u32, u64),
    /// A file is made longer, while units are used.
    Longer(u32),
    /// A byte is written, while units are used that were all compared before.
    Written(u32, u64),
    /// The same, but only the byte shows it.
    Lie(u32, u64),
    /// Another file takes the name of one, while units are used.
    Replaced(u32),
    /// Some copies fail.
    Copies,
    /// The device is lost during some copy.
    Lost,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Ending {
    /// When all have done what they wanted.
    Quiet,
    /// The streamer is closed while units are used.
    Closed,
    /// The runtime is.
    Shut,
}

/// Budget that is charged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Payer {
    Nobody,
    /// A budget that has plenty.
    Rich,
    /// A budget of exactly the bytes that weights may take.
    Exact,
    /// A budget that is reduced while units are used.
    Cut,
}

/// A streamer, and all there is to know of it.
pub struct Case {
    pub seed: u64,
    pub rig: Rig,
    pub sim: Arc<SimModelFiles>,
    pub device: Option<Arc<Simulated>>,
    pub budget: Option<Arc<Budget>>,
    pub payer: Payer,
    pub trouble: Trouble,
    pub ending: Ending,
    pub threads: u64,
    pub order: Vec<u32>,
    /// Description of the case for a reader.
    pub text: String,
}

/// One of some.
pub fn one<T: Clone>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize].clone()
}

/// Units of random sizes and places, in random order.
fn files(random: &mut Random, name: &str) -> Files {
    let count = 1 + random.below(3);
    let (most, layers) = one(random, &[(5_000, 14), (60_000, 14), (200_000, 6), (3 << 19, 3)]);
    let mut ends = vec![random.below(10_000); count as usize];
    let mut ranges = |random: &mut Random| -> Vec<Range> {
        (0..1 + random.below(3))
            .map(|_| {
                let file = random.below(count) as usize;
                // Side by side, with a gap, or from a grain on.
                let mut offset = ends[file] + one(random, &[0, 0, 1, 5000]);
                if random.below(4) == 0 {
                    offset = offset.next_multiple_of(4096);
                }
                let largest = one(random, &[most / 8, most, most]);
                let bytes = 1 + random.below(largest);
                ends[file] = offset + bytes;
                Range { file: file as u32, offset, bytes }
            })
            .collect()
    };
    let experts = one(random, if most > MIB { &[0, 0, 2] } else { &[0, 2, 5] });
    let mut entries = Vec::new();
    let mut add = |random: &mut Random, role, layer: u32, expert: u32| {
        let name = format!("{role:?} {} of {}", expert.wrapping_add(1), layer.wrapping_add(1));
        entries.push(Entry { name, role, layer, expert, ranges: ranges(random) });
    };
    for role in [Role::Embedding, Role::Norm, Role::Head] {
        if random.coin() {
            add(random, role, NONE, NONE);
        }
    }
    for layer in 0..2 + random.below(layers - 1) as u32 {
        add(random, Role::Layer, layer, NONE);
        (0..experts).for_each(|expert| add(random, Role::Expert, layer, expert));
    }
    if random.coin() {
        shuffle(random, &mut entries);
    }
    ends.iter_mut().for_each(|end| *end += 1 + random.below(5000));
    Files::table(name, &ends, entries)
}

fn shuffle<T>(random: &mut Random, list: &mut [T]) {
    for at in (1..list.len()).rev() {
        list.swap(at, random.below(at as u64 + 1) as usize);
    }
}

/// A byte that a unit has.
fn byte(random: &mut Random, files: &Files) -> (u32, u64) {
    let unit = &files.units.units[random.below(files.units.units.len() as u64) as usize];
    let extent = unit.extents[random.below(unit.extents.len() as u64) as usize];
    (extent.file, extent.offset + random.below(extent.bytes))
}

fn trouble(random: &mut Random, files: &Files, on_device: bool) -> Trouble {
    let (file, at) = byte(random, files);
    match random.below(if on_device { 18 } else { 14 }) {
        0..5 => Trouble::Nothing,
        5 | 6 => Trouble::Reads,
        7 => Trouble::LookupRange(file, at..at + 1),
        8 => Trouble::Slow(file, at..at + 4096),
        9 => Trouble::Cut(file, at),
        10 => Trouble::Longer(file),
        11 => Trouble::Written(file, at),
        12 => Trouble::Lie(file, at),
        13 => Trouble::Replaced(file),
        14..17 => Trouble::Copies,
        _ => Trouble::Lost,
    }
}

fn simulated(random: &mut Random, trouble: &Trouble) -> Arc<Simulated> {
    let some = |random: &mut Random| (0..12).map(|_| 1 + random.below(400)).collect();
    device(SimulatedOpts {
        latency_ns: one(random, &[0, 10_000, 200_000]),
        seed: random.draw(),
        granularity_bytes: one(random, &[4096, 16_384]),
        fail_at: if *trouble == Trouble::Copies { some(random) } else { Vec::new() },
        lost_at: if *trouble == Trouble::Lost { 1 + random.below(100) } else { 0 },
        ..SimulatedOpts::default()
    })
}

fn options(random: &mut Random, files: &Files, on_device: bool) -> Opts {
    let plan_options = PlanOptions {
        mode: one(random, &[Mode::Tiered, Mode::Tiered, Mode::Tiered, Mode::Ring]),
        placement: one(random, &[Placement::Interleaved, Placement::First, Placement::Last]),
        slots: one(random, &[0, 0, 1, 3, 5]),
        expert_slots: one(random, &[None, None, Some(2), Some(5), Some(20)]),
        chunk_bytes: if on_device { MIB } else { one(random, &[0, MIB, 2 * MIB]) },
        staging_bytes: one(random, &[0, 4 * MIB, 8 * MIB]),
        processor_layers: if on_device { one(random, &[0, 0, 1]) } else { 0 },
        ..plan_options()
    };
    let mut order = files.order();
    shuffle(random, &mut order);
    let policies = ["", "lru", "sieve", "arc"];
    Opts {
        plan_options,
        order: one(random, &[None, Some(order)]),
        once: random.below(4) == 0,
        in_place: random.coin(),
        policy: one(random, &policies).into(),
        expert_policy: one(random, &policies).into(),
        pinned_percent: one(random, &[0, 50, 100]),
        readers: 1 + random.below(4) as u32,
        verify: one(random, &[Verify::Never, Verify::First, Verify::Always]),
        sidecar: one(random, &[None, Some(files.scratch.0.join("sums"))]),
        marks: one(random, &[0, 0, 500]),
        ..Opts::default()
    }
}

fn sim_opts(random: &mut Random) -> SimModelFilesOpts {
    SimModelFilesOpts {
        align_bytes: one(random, &[1, 512, 4096]),
        bytes_per_second: one(random, &[0, 2_000_000_000]),
        latency_ns: one(random, &[0, 20_000, 200_000]),
        jitter_percent: one(random, &[0, 300]),
        seed: random.draw(),
        ..SimModelFilesOpts::default()
    }
}

/// Injects the faults that exist from the opening on.
fn plant(random: &mut Random, trouble: &Trouble, sim: &SimModelFiles) {
    match trouble {
        Trouble::Reads => {
            for _ in 0..30 {
                let at = 1 + random.below(600);
                sim.plant(if random.coin() { Fault::Broken(at) } else { Fault::Short(at) });
            }
        }
        Trouble::LookupRange(file, range) => sim.plant(Fault::BrokenRange(*file, range.clone())),
        Trouble::Slow(file, range) => sim.plant(Fault::SlowRange(*file, range.clone(), 1000)),
        _ => {}
    }
}

fn budget(runtime: &Runtime, payer: Payer, host: u64, on_device: u64) -> Option<Arc<Budget>> {
    let (host, on_device) = match payer {
        Payer::Nobody => return None,
        Payer::Rich => (1 << 30, 1 << 30),
        Payer::Exact | Payer::Cut => (host, on_device),
    };
    let mut opts = BudgetOpts { reserve_bytes: Some(0), ..BudgetOpts::default() };
    opts.limits[Tier::Host as usize] = Some(host);
    opts.limits[Tier::Pinned as usize] = Some(host);
    opts.limits[Tier::Device as usize] = Some(on_device);
    Some(Budget::open(runtime.core(), &opts).expect("a budget"))
}

impl Case {
    pub fn new(seed: u64) -> Case {
        let mut chance = Random::new(seed);
        let random = &mut chance;
        let mut files = files(random, &format!("random-{seed}"));
        let on_device = random.below(5) < 2;
        let trouble = trouble(random, &files, on_device);
        let sim = files.simulate(sim_opts(random));
        let device = on_device.then(|| simulated(random, &trouble));
        let mut opts = options(random, &files, on_device);
        let ending = one(random, &[Ending::Quiet, Ending::Quiet, Ending::Closed, Ending::Shut]);
        let payers = [Payer::Nobody, Payer::Nobody, Payer::Rich, Payer::Exact, Payer::Cut];
        let mut payer = one(random, &payers);
        if matches!(trouble, Trouble::Written(..) | Trouble::Lie(..)) {
            // All is compared first, which takes some memory too.
            (opts.verify, payer) = (Verify::Always, Payer::Nobody);
        }
        let order = opts.order.clone().unwrap_or_else(|| files.order());
        opts.device = device.clone().map(|device| device as _);
        let (wished, on_host) = (5 + random.below(146), random.below(120));
        let runtime = runtime("");
        let (percent, streamer, budget) =
            least(&files, &sim, &runtime, &opts, payer, (wished, on_host));
        plant(random, &trouble, &sim);
        let text = format!(
            "{} units of {} bytes, {} of {percent} %, {trouble:?}, {ending:?}, {payer:?}, \
             in place: {}, {:?}, {} readers, marks: {}, {:?}",
            files.units.units.len(),
            files.all_bytes(),
            if on_device { "a device" } else { "the processor" },
            opts.in_place,
            opts.verify,
            opts.readers,
            opts.marks,
            opts.plan_options,
        );
        let threads = 1 + random.below(4);
        let rig = Rig { streamer, device: opts.device, files, runtime };
        Case { seed, rig, sim, device, budget, payer, trouble, ending, threads, order, text }
    }
}

/// Opens with the least memory that can be, where that is more than is wished.
fn least(
    files: &Files,
    sim: &Arc<SimModelFiles>,
    runtime: &Runtime,
    opts: &Opts,
    payer: Payer,
    (wished, on_host): (u64, u64),
) -> (u64, Streamer, Option<Arc<Budget>>) {
    let all = files.all_bytes();
    for percent in (wished..).step_by(10) {
        let mut opts = opts.clone();
        let here = all * percent / 100;
        let (host, there) = match opts.device {
            Some(_) => (2 * MIB + opts.plan_options.staging_bytes + all * on_host / 100, here),
            None => (here, 0),
        };
        let host = host + all * (percent - wished) / 100;
        opts.plan_options.host_ceiling_bytes = Some(host);
        opts.plan_options.device_ceiling_bytes = opts.device.as_ref().map(|_| there);
        opts.budget = budget(runtime, payer, host, there);
        let budget = opts.budget.clone();
        let (model, units) = (files.model.clone(), files.units.clone());
        match Streamer::open_on(runtime.core(), sim.clone(), model, units, opts) {
            Ok(streamer) => {
                let plan = streamer.plan();
                assert!(plan.host_bytes <= host && plan.device_bytes <= there, "{plan:?}");
                return (percent, streamer, budget);
            }
            Err(error) => {
                assert!(error.status() == Status::Budget && percent < 2000, "{percent}: {error}");
            }
        }
    }
    unreachable!("percents end")
}
