//! Opening a streamer.

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::base::account::Account;
use crate::base::budget::{Budget, Tier};
use crate::base::core::Core as Runtime;
use crate::base::machine::MemoryFacts;
use crate::base::op::Owner;
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicU32, AtomicU64};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::device::Device;
use crate::fail;
use crate::io::model_files::ModelFiles;
use crate::io::model_files::identity::identities;
use crate::io::model_files::measure::measure;
use crate::io::model_files::real::{ModelFilesOpts, RealModelFiles};
use crate::stream::checksums::{Checksums, default_sidecar, load_or_new};
use crate::stream::memory::WeightMemory;
use crate::stream::memory::device_window::MAX_GRANULARITY_BYTES;
use crate::stream::model::Model;
use crate::stream::plan::{ComputeLocation, Inputs, Links, Memory, Plan, PlanOptions, Residency};
use crate::stream::scheduler::{PINNED_PERCENT, Scheduler, Setup};
use crate::stream::streamer::direct_reads::DirectReader;
use crate::stream::streamer::threads::start_threads;
use crate::stream::streamer::{Shared, State, Streamer};
use crate::stream::units::{ALIGN_BYTES, Units};

/// Default number of reader threads. A disk may report many reads as complete at once: with four
/// threads it then waited for all of them to submit again.
const READERS: u32 = 8;
/// Most reader threads.
pub const MAX_READERS: u32 = 64;
/// Bytes that are read to measure the disk.
const MEASURED_BYTES: u64 = 256 << 20;

/// When bytes are compared with their checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Never.
    #[default]
    Never,
    /// When a unit is read for the first time; unknown checksums are stored.
    First,
    /// At each read.
    Always,
}

/// Options of a streamer.
#[derive(Clone)]
pub struct Opts {
    /// Memory limits and slots; see the plan.
    pub plan_options: PlanOptions,
    /// Rates of the links; 0 = not known.
    pub links: Links,
    /// Measure the disk first, if its rate is not known.
    pub measure: bool,
    /// The order of a pass; none = the order of the units.
    pub order: Option<Vec<u32>>,
    /// Passes do not follow each other: nothing is prefetched across the end of a pass.
    pub once: bool,
    /// Each unit has fixed addresses. On a device, it must support windows ([`Device::window`]).
    pub in_place: bool,
    /// Eviction policy for [`crate::stream::plan::Mode::Ring`]; empty = `fifo`.
    pub policy: String,
    /// Eviction policy of the expert slots; empty = `lru`.
    pub expert_policy: String,
    /// Share of the expert slots for the most used experts, in percent.
    pub pinned_percent: u32,
    /// Reader threads; 0 = 8, at most 64.
    pub readers: u32,
    /// How files are opened.
    pub files: ModelFilesOpts,
    /// The device reads chunks into its slots itself, as far as their alignment in the file
    /// allows. Opening fails with [`Status::Unavailable`] and the reason, if the device cannot.
    pub direct: bool,
    /// When checksums are compared.
    pub verify: Verify,
    /// The file of checksums; empty = beside the model; none = no file.
    pub sidecar: Option<PathBuf>,
    /// Most marks that are recorded; with any, each acquire takes the lock.
    pub marks: usize,
    /// The device that the engine computes on; none = the processor.
    pub device: Option<Arc<dyn Device>>,
    /// The budget to charge; none = no budget. With a budget, [`PlanOptions::shrinks`] is set.
    pub budget: Option<Arc<Budget>>,
    /// Priority in the budget: owners of low priority give memory back first.
    pub priority: i32,
}

impl Default for Opts {
    fn default() -> Opts {
        Opts {
            plan_options: PlanOptions::default(),
            links: Links::default(),
            measure: false,
            order: None,
            once: false,
            in_place: false,
            policy: String::new(),
            expert_policy: String::new(),
            pinned_percent: PINNED_PERCENT,
            readers: 0,
            files: ModelFilesOpts::default(),
            direct: false,
            verify: Verify::Never,
            sidecar: None,
            marks: 0,
            device: None,
            budget: None,
            priority: 0,
        }
    }
}

impl Streamer {
    /// Opens the files of a model and starts to stream them. The loads of resident units have
    /// begun when this returns.
    pub fn open(
        runtime: &Arc<Runtime>,
        model: Model,
        units: Units,
        opts: Opts,
    ) -> Result<Streamer> {
        let paths: Vec<PathBuf> = model.files.iter().map(|file| file.path.clone()).collect();
        let files = RealModelFiles::open(&paths, &opts.files)?;
        Streamer::open_on(runtime, Arc::new(files), model, units, opts)
    }

    /// The same with given files.
    pub fn open_on(
        runtime: &Arc<Runtime>,
        files: Arc<dyn ModelFiles>,
        model: Model,
        units: Units,
        mut opts: Opts,
    ) -> Result<Streamer> {
        runtime.check_open()?;
        check(&*files, &model, &opts)?;
        let compute =
            if opts.device.is_some() { ComputeLocation::Device } else { ComputeLocation::Host };
        if opts.plan_options.compute.is_some_and(|wished| wished != compute) {
            fail!(
                Invalid,
                "`compute` and `device` contradict each other: give a device exactly if the \
                 engine computes on one"
            );
        }
        opts.plan_options.compute = Some(compute);
        // An owner that shares a budget must be able to give memory back.
        opts.plan_options.shrinks |= opts.budget.is_some();
        if opts.measure && opts.links.disk == 0 {
            opts.links.disk = measure(&*files, runtime.clock(), MEASURED_BYTES)?;
        }
        if let (true, Some(device)) = (opts.in_place, &opts.device) {
            opts.plan_options.device_granularity_bytes = window_granularity(&**device)?;
        }
        let memory = memory_of(&opts);
        let mut plan = Plan::make(&Inputs {
            units: &units,
            facts: &model.facts,
            memory,
            links: opts.links,
            plan_options: &opts.plan_options,
        })?;
        if opts.direct {
            // All slots are registered with the device once, so their number is fixed.
            (plan.expert_slots_least, plan.expert_slots_step) =
                (plan.expert_slots, plan.expert_slots);
        }
        let owner_slot: Arc<Mutex<Weak<Shared>>> = Arc::new(Mutex::new(Weak::new()));
        let account = account_of(&opts, &owner_slot)?;
        let shared =
            Shared::new(runtime, files, (model, units), plan, memory, &opts, account.clone());
        let opened = shared.and_then(|shared| {
            *owner_slot.lock() = Arc::downgrade(&shared);
            Streamer::start(shared, opts.readers)
        });
        if let (Err(_), Some(account)) = (&opened, account)
            && let Err(error) = account.close()
        {
            log::warn!("the account of weights that could not be opened was not closed: {error}");
        }
        opened
    }

    fn start(shared: Arc<Shared>, readers: u32) -> Result<Streamer> {
        let owner: Weak<dyn Owner> = Arc::<Shared>::downgrade(&shared);
        shared.runtime.add_owner(owner);
        let readers = if readers == 0 { READERS } else { readers };
        let threads = start_threads(&shared, readers)?;
        Ok(Streamer { shared, threads: Mutex::new(threads) })
    }
}

impl Shared {
    /// All state except the threads.
    fn new(
        runtime: &Arc<Runtime>,
        files: Arc<dyn ModelFiles>,
        (model, units): (Model, Units),
        plan: Plan,
        memory: Memory,
        opts: &Opts,
        account: Option<Arc<Account>>,
    ) -> Result<Arc<Shared>> {
        let mut scheduler = core_of(&units, &plan, opts)?;
        scheduler.set_direct_reads(opts.direct);
        let (sums, sidecar) = sums_of(&*files, &model, &units, opts)?;
        let source = crate::stream::memory::MemorySource {
            device: opts.device.as_ref(),
            account: account.as_ref(),
            faults: runtime.faults(),
        };
        let weight_memory = WeightMemory::new(&units, &plan, opts.in_place, &source)?;
        let direct_reader =
            opts.direct.then(|| DirectReader::open(&*files, &weight_memory, opts)).transpose()?;
        let count = units.units.len();
        let residencies = plan.residencies.clone();
        let shared = Arc::new(Shared {
            runtime: runtime.clone(),
            model,
            files,
            device: opts.device.clone(),
            account,
            sums,
            verify: opts.verify,
            sidecar,
            links: opts.links,
            memory,
            direct_reader,
            reads: Condvar::new(),
            copies: Condvar::new(),
            arrived: Condvar::new(),
            gates: (0..count).map(|_| AtomicU32::new(0)).collect(),
            resident_addresses: (0..count).map(|_| AtomicU64::new(0)).collect(),
            fast_acquires: AtomicU64::new(0),
            has_marks: opts.marks > 0,
            state: Mutex::new(State {
                scheduler,
                weight_memory,
                plan,
                plan_options: opts.plan_options.clone(),
                moves: Vec::new(),
                note: None,
                verified: vec![false; count],
                stop: None,
                broken: false,
                leased: 0,
                threads: 0,
                waits: [0; 3],
                wait_count: 0,
                pending_events: VecDeque::new(),
                resident_uses: vec![0; count],
            }),
            units,
        });
        {
            let state = shared.state.lock();
            let resident_lease = (0..count).filter(|&unit| residencies[unit] != Residency::File);
            resident_lease
                .into_iter()
                .try_for_each(|unit| shared.publish_address(&state, unit as u32))?;
        }
        Ok(shared)
    }
}

fn core_of(units: &Units, plan: &Plan, opts: &Opts) -> Result<Scheduler> {
    let or = |name: &str, default: &str| -> String {
        if name.is_empty() { default.into() } else { name.into() }
    };
    let (policy, expert_policy) = (or(&opts.policy, "fifo"), or(&opts.expert_policy, "lru"));
    Scheduler::new(&Setup {
        units,
        plan,
        order: opts.order.as_deref(),
        wrap: !opts.once,
        in_place: opts.in_place,
        policy: &policy,
        expert_policy: &expert_policy,
        pinned_percent: opts.pinned_percent,
        marks: opts.marks,
    })
}

/// The known checksums, and the file to save them in.
fn sums_of(
    files: &dyn ModelFiles,
    model: &Model,
    units: &Units,
    opts: &Opts,
) -> Result<(Checksums, Option<PathBuf>)> {
    let sidecar = opts.sidecar.clone().filter(|_| opts.verify != Verify::Never);
    let Some(path) = sidecar else { return Ok((Checksums::new(units)?, None)) };
    let path =
        if path.as_os_str().is_empty() { default_sidecar(&model.files[0].path) } else { path };
    let (sums, why) = load_or_new(&path, units, &identities(files)?)?;
    if let Some(why) = why {
        log::info!("checksums are computed again: {why}");
    }
    Ok((sums, Some(path)))
}

fn check(files: &dyn ModelFiles, model: &Model, opts: &Opts) -> Result<()> {
    if opts.readers > MAX_READERS {
        fail!(Limit, "{} reader threads, the limit is {MAX_READERS}", opts.readers);
    }
    if files.count() as usize != model.files.len() || model.files.is_empty() {
        fail!(
            Invalid,
            "{} files are open for a model of {} files",
            files.count(),
            model.files.len()
        );
    }
    for (number, file) in model.files.iter().enumerate() {
        let bytes = files.bytes(number as u32);
        if bytes != file.bytes {
            let path = file.path.display();
            fail!(
                Corrupt,
                "{path} has {bytes} bytes, and had {} when the model was opened: the file changed",
                file.bytes
            );
        }
    }
    Ok(())
}

/// The granularity of mappings of units in place on a device.
fn window_granularity(device: &dyn Device) -> Result<u64> {
    let granularity =
        device.window_granularity().map_err(|error| error.within("units in place"))?;
    if !(ALIGN_BYTES..=MAX_GRANULARITY_BYTES).contains(&granularity)
        || granularity % ALIGN_BYTES != 0
    {
        fail!(
            Unsupported,
            "units in place: the device maps memory in multiples of {granularity} bytes, which is not \
             supported"
        );
    }
    Ok(granularity)
}

/// The memory of the machine, the cgroup, the device and the budget.
pub fn memory_of(opts: &Opts) -> Memory {
    let facts = MemoryFacts::probe();
    // A device that does not know its free memory is assumed to have what the ceiling says.
    let device_free_bytes = opts
        .device
        .as_ref()
        .and_then(|device| device.free_bytes().or(opts.plan_options.device_ceiling_bytes))
        .unwrap_or(0);
    let mut memory = Memory {
        device_free_bytes,
        host_free_bytes: facts.effective_bytes(),
        host_total_bytes: facts.usable_bytes(),
        host_is_limited: facts.is_limited(),
        lockable_bytes: facts.lockable_bytes(),
    };
    if let Some(budget) = &opts.budget {
        let free_blocks = |tier: Tier| {
            let tier_budget = budget.usage(tier);
            tier_budget
                .limit_bytes
                .saturating_sub(tier_budget.reserved_bytes + tier_budget.committed_bytes)
        };
        memory.host_free_bytes = memory.host_free_bytes.min(free_blocks(Tier::Host));
        memory.device_free_bytes = memory.device_free_bytes.min(free_blocks(Tier::Device));
        memory.lockable_bytes = memory.lockable_bytes.min(free_blocks(Tier::Pinned));
    }
    memory
}

fn account_of(opts: &Opts, shared: &Arc<Mutex<Weak<Shared>>>) -> Result<Option<Arc<Account>>> {
    let Some(budget) = &opts.budget else { return Ok(None) };
    let shared = shared.clone();
    let reclaim = move |tier: Tier, bytes: u64, _: u64| {
        let shared = shared.lock().upgrade();
        shared.map_or(0, |shared| shared.reclaim(tier, bytes))
    };
    let account = budget.account("weights", opts.priority, Some(Box::new(reclaim)));
    account.map(Some).map_err(|error| match error.status() {
        Status::Closed => error.within("the budget"),
        _ => error,
    })
}
