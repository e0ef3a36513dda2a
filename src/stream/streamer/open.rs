//! Opening a streamer.

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::base::account::Account;
use crate::base::budget::{Budget, Tier};
use crate::base::core::Core as Runtime;
use crate::base::machine::MemoryFacts;
use crate::base::owner::Owner;
use crate::base::status::{Result, Status};
use crate::base::sync::atomic::{AtomicU32, AtomicU64};
use crate::base::sync::{Arc, Condvar, Mutex, Weak};
use crate::device::Device;
use crate::fail;
use crate::io::fixed::FixedFiles;
use crate::io::fixed::identity::identities;
use crate::io::fixed::measure::measure;
use crate::io::fixed::real::{FixedOpts, RealFixed};
use crate::stream::core::{Core, PINNED_PERCENT, Setup};
use crate::stream::in_window::MAX_GRAIN_BYTES;
use crate::stream::model::Model;
use crate::stream::places::Places;
use crate::stream::plan::{Home, Inputs, Links, Memory, Plan, Seat, Wishes};
use crate::stream::streamer::straight::Straight;
use crate::stream::streamer::{Shared, State, Streamer, serve};
use crate::stream::sums::Sums;
use crate::stream::sums::sidecar::{default_path, load_or_new};
use crate::stream::units::{GRAIN_BYTES, Units};

/// Threads that read, where nothing else is said.
const READERS: u32 = 4;
/// Most threads that read.
pub const MAX_READERS: u32 = 64;
/// How much is read to measure the disk.
const MEASURED_BYTES: u64 = 256 << 20;

/// When bytes are compared with their checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// Never.
    #[default]
    Never,
    /// When a unit is read for the first time; checksums that nobody knows are noted.
    First,
    /// Whenever it is read.
    Always,
}

/// How to open one.
#[derive(Clone)]
pub struct Opts {
    /// What the caller decides about memory.
    pub wishes: Wishes,
    /// How fast links are; 0 = not known.
    pub links: Links,
    /// The disk is measured first, if its speed is not known.
    pub measure: bool,
    /// The order of a pass; none = that of the units.
    pub order: Option<Vec<u32>>,
    /// No pass follows a pass: nothing is fetched ahead across its end.
    pub once: bool,
    /// Every unit has an address of its own. On a device: one that has windows
    /// ([`Device::window`]).
    pub in_place: bool,
    /// Who leaves, in [`crate::stream::plan::Mode::Ring`]; empty = `fifo`.
    pub policy: String,
    /// Who leaves the slots for experts; empty = `lru`.
    pub expert_policy: String,
    /// Of a hundred slots for experts, those that the most used have for themselves.
    pub pinned_percent: u32,
    /// Threads that read; 0 = 4.
    pub readers: u32,
    /// How files are opened.
    pub files: FixedOpts,
    /// The device reads units into its slots by itself, as far as they lie in the file as it
    /// needs that. [`Status::Unavailable`] and why, where it cannot.
    pub direct: bool,
    /// When checksums are looked at.
    pub verify: Verify,
    /// Where they are kept; empty = beside the model; none = nowhere.
    pub sidecar: Option<PathBuf>,
    /// Marks of what happened that are kept; with any, nothing takes the quick way.
    pub marks: usize,
    /// Where the engine computes, if not on the processor.
    pub device: Option<Arc<dyn Device>>,
    /// Who pays for memory; none = nobody. With one, [`Wishes::shrinks`] is wished.
    pub budget: Option<Arc<Budget>>,
    /// Its rank there: low ones are asked first to give back.
    pub priority: i32,
}

impl Default for Opts {
    fn default() -> Opts {
        Opts {
            wishes: Wishes::default(),
            links: Links::default(),
            measure: false,
            order: None,
            once: false,
            in_place: false,
            policy: String::new(),
            expert_policy: String::new(),
            pinned_percent: PINNED_PERCENT,
            readers: 0,
            files: FixedOpts::default(),
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
    /// Opens the files of a model and streams them. Units are on their way home when this
    /// returns.
    pub fn open(
        runtime: &Arc<Runtime>,
        model: Model,
        units: Units,
        opts: Opts,
    ) -> Result<Streamer> {
        let paths: Vec<PathBuf> = model.files.iter().map(|file| file.path.clone()).collect();
        let files = RealFixed::open(&paths, &opts.files)?;
        Streamer::open_on(runtime, Arc::new(files), model, units, opts)
    }

    /// The same with given files.
    pub fn open_on(
        runtime: &Arc<Runtime>,
        files: Arc<dyn FixedFiles>,
        model: Model,
        units: Units,
        mut opts: Opts,
    ) -> Result<Streamer> {
        runtime.check_open()?;
        check(&*files, &model, &opts)?;
        let seat = if opts.device.is_some() { Seat::Device } else { Seat::Host };
        if opts.wishes.seat.is_some_and(|wished| wished != seat) {
            fail!(Invalid, "the engine computes on a device exactly if one is given");
        }
        opts.wishes.seat = Some(seat);
        // Who shares a budget has to be able to give something back.
        opts.wishes.shrinks |= opts.budget.is_some();
        if opts.measure && opts.links.disk == 0 {
            opts.links.disk = measure(&*files, runtime.clock(), MEASURED_BYTES)?;
        }
        if let (true, Some(device)) = (opts.in_place, &opts.device) {
            opts.wishes.device_grain_bytes = grain_of(&**device)?;
        }
        let memory = memory_of(&opts);
        let mut plan = Plan::make(&Inputs {
            units: &units,
            facts: &model.facts,
            memory,
            links: opts.links,
            wishes: &opts.wishes,
        })?;
        if opts.direct {
            // The device is told of the slots that it reads into: all of them, and for good.
            (plan.expert_slots_least, plan.expert_slots_step) =
                (plan.expert_slots, plan.expert_slots);
        }
        let relative: Arc<Mutex<Weak<Shared>>> = Arc::new(Mutex::new(Weak::new()));
        let account = account_of(&opts, &relative)?;
        let shared =
            Shared::new(runtime, files, (model, units), plan, memory, &opts, account.clone());
        let opened = shared.and_then(|shared| {
            *relative.lock() = Arc::downgrade(&shared);
            Streamer::start(shared, opts.readers)
        });
        if let (Err(_), Some(account)) = (&opened, account)
            && let Err(error) = account.close()
        {
            log::warn!("the account of weights that were not opened stays open: {error}");
        }
        opened
    }

    fn start(shared: Arc<Shared>, readers: u32) -> Result<Streamer> {
        let owner: Weak<dyn Owner> = Arc::<Shared>::downgrade(&shared);
        shared.runtime.add_owner(owner);
        let readers = if readers == 0 { READERS } else { readers };
        let threads = serve::start(&shared, readers)?;
        Ok(Streamer { shared, threads: Mutex::new(threads) })
    }
}

impl Shared {
    /// Everything but the threads.
    fn new(
        runtime: &Arc<Runtime>,
        files: Arc<dyn FixedFiles>,
        (model, units): (Model, Units),
        plan: Plan,
        memory: Memory,
        opts: &Opts,
        account: Option<Arc<Account>>,
    ) -> Result<Arc<Shared>> {
        let mut core = core_of(&units, &plan, opts)?;
        core.set_lands(opts.direct);
        let (sums, sidecar) = sums_of(&*files, &model, &units, opts)?;
        let source = crate::stream::places::Source {
            device: opts.device.as_ref(),
            account: account.as_ref(),
            faults: runtime.faults(),
        };
        let places = Places::new(&units, &plan, opts.in_place, &source)?;
        let straight = opts.direct.then(|| Straight::open(&*files, &places, opts)).transpose()?;
        let count = units.units.len();
        let homes = plan.homes.clone();
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
            straight,
            reads: Condvar::new(),
            copies: Condvar::new(),
            arrived: Condvar::new(),
            gates: (0..count).map(|_| AtomicU32::new(0)).collect(),
            home_addresses: (0..count).map(|_| AtomicU64::new(0)).collect(),
            quick: AtomicU64::new(0),
            noted: opts.marks > 0,
            state: Mutex::new(State {
                core,
                places,
                plan,
                wishes: opts.wishes.clone(),
                moves: Vec::new(),
                note: None,
                verified: vec![false; count],
                stop: None,
                broken: false,
                leased: 0,
                threads: 0,
                waits: [0; 3],
                waited: 0,
                taken_over: VecDeque::new(),
                home_uses: vec![0; count],
            }),
            units,
        });
        {
            let state = shared.state.lock();
            let at_home = (0..count).filter(|&unit| homes[unit] != Home::File);
            at_home.into_iter().try_for_each(|unit| shared.note_home(&state, unit as u32))?;
        }
        Ok(shared)
    }
}

fn core_of(units: &Units, plan: &Plan, opts: &Opts) -> Result<Core> {
    let or = |given: &str, default: &str| -> String {
        if given.is_empty() { default.into() } else { given.into() }
    };
    let (policy, expert_policy) = (or(&opts.policy, "fifo"), or(&opts.expert_policy, "lru"));
    Core::new(&Setup {
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

/// The checksums that are known, and where they are kept.
fn sums_of(
    files: &dyn FixedFiles,
    model: &Model,
    units: &Units,
    opts: &Opts,
) -> Result<(Sums, Option<PathBuf>)> {
    let given = opts.sidecar.clone().filter(|_| opts.verify != Verify::Never);
    let Some(path) = given else { return Ok((Sums::new(units)?, None)) };
    let path = if path.as_os_str().is_empty() { default_path(&model.files[0].path) } else { path };
    let (sums, why) = load_or_new(&path, units, &identities(files)?)?;
    if let Some(why) = why {
        log::info!("checksums are computed anew: {why}");
    }
    Ok((sums, Some(path)))
}

fn check(files: &dyn FixedFiles, model: &Model, opts: &Opts) -> Result<()> {
    if opts.readers > MAX_READERS {
        fail!(Limit, "at most {MAX_READERS} readers, not {}", opts.readers);
    }
    if files.count() as usize != model.files.len() || model.files.is_empty() {
        fail!(Invalid, "{} files for a model in {}", files.count(), model.files.len());
    }
    for (number, file) in model.files.iter().enumerate() {
        let bytes = files.bytes(number as u32);
        if bytes != file.bytes {
            let path = file.path.display();
            fail!(Corrupt, "{path} has {bytes} bytes, and had {} a moment ago", file.bytes);
        }
    }
    Ok(())
}

/// What units in place on a device are put in whole multiples of.
fn grain_of(device: &dyn Device) -> Result<u64> {
    let grain = device.window_grain().map_err(|error| error.within("units in place"))?;
    if !(GRAIN_BYTES..=MAX_GRAIN_BYTES).contains(&grain) || grain % GRAIN_BYTES != 0 {
        fail!(Unsupported, "units in place: the device maps memory by {grain} bytes");
    }
    Ok(grain)
}

/// What memory there is: of the machine, of the cgroup, of the budget.
pub fn memory_of(opts: &Opts) -> Memory {
    let facts = MemoryFacts::probe();
    let limit = facts.cgroup.map_or(u64::MAX, |cgroup| cgroup.limit_bytes);
    // A device that does not know what it has is believed to have what the ceiling says.
    let device_free_bytes = opts
        .device
        .as_ref()
        .and_then(|device| device.free_bytes().or(opts.wishes.device_ceiling_bytes))
        .unwrap_or(0);
    let mut memory = Memory {
        device_free_bytes,
        host_free_bytes: facts.effective_bytes(),
        host_total_bytes: facts.total_bytes.min(limit),
        lockable_bytes: facts.lockable_bytes(),
    };
    if let Some(budget) = &opts.budget {
        let free = |tier: Tier| {
            let lane = budget.lane(tier);
            lane.limit_bytes.saturating_sub(lane.reserved_bytes + lane.committed_bytes)
        };
        memory.host_free_bytes = memory.host_free_bytes.min(free(Tier::Host));
        memory.device_free_bytes = memory.device_free_bytes.min(free(Tier::Device));
        memory.lockable_bytes = memory.lockable_bytes.min(free(Tier::Pinned));
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
