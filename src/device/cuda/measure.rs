//! Description of a device, and the choice of its copy methods: each method is measured briefly
//! when the device is opened.

use std::fmt;

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::device::cuda::abi::{HOST_MAPPED, HOST_PORTABLE};
use crate::device::cuda::batches::{CLASSES, ChosenMethods, CopyMethod, CopyMethodChoice};
use crate::device::cuda::host_memory::{HostRange, Registration};
use crate::device::cuda::peers::Peer;
use crate::device::cuda::submit::Work;
use crate::device::cuda::{Cuda, DeviceInfo};
use crate::device::{Copy, Device, DeviceMemory, Direction, Memory};

/// Bytes of a measurement.
const PROBE_BYTES: u64 = 8 << 20;
/// Run length measured for each class.
const CELL_BYTES: [u64; CLASSES] = [16 << 10, 64 << 10, 1 << 20];
/// Repetitions; the best counts.
const PROBE_REPEATS: u32 = 3;
/// Time limit of all measurements; the results so far decide.
const PROBE_BUDGET_NS: u64 = 80_000_000;

/// Measured bandwidth of small copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// To the device, else from it.
    pub to_device: bool,
    /// Length of each copy.
    pub cell_bytes: u64,
    /// Copy method.
    pub method: CopyMethod,
    /// Bandwidth in bytes per second.
    pub bytes_per_s: u64,
}

/// Description of a device for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Name that the driver reports.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
    /// CUDA version of the driver: 12040 is 12.4.
    pub version: u32,
    /// Chosen copy methods.
    pub chosen: ChosenMethods,
    /// Measurements behind that choice.
    pub rates: Vec<Rate>,
    /// Why measurements are missing or incomplete.
    pub not_measured: Option<String>,
    /// Registered host memory that could not be pinned.
    pub pageable_bytes: u64,
    /// Requested kernels that are unavailable, and why.
    pub no_kernels: Vec<String>,
    /// Peers, and why their memory is not accessible, if it is not.
    pub peers: Vec<(u32, Option<String>)>,
    /// Copies are verified by checksums.
    pub verifies: bool,
}

impl Description {
    pub(super) fn found(&mut self, found: &DeviceInfo, version: i32) {
        (self.name, self.capability) = (found.name.clone(), found.capability);
        self.version = version.max(0) as u32;
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (self.capability / 10, self.capability % 10);
        let (cuda, point) = (self.version / 1000, self.version % 1000 / 10);
        write!(f, "{} ({major}.{minor}, CUDA {cuda}.{point})", self.name)?;
        for (words, method) in
            [("to it", self.chosen.to_device), ("from it", self.chosen.from_device)]
        {
            let [short, middle, long] = method;
            write!(f, "; copies {words} up to 32 KiB {short}, 512 KiB {middle}, 4 MiB {long}")?;
        }
        if let Some(why) = &self.not_measured {
            write!(f, "; not measured: {why}")?;
        }
        if self.pageable_bytes > 0 {
            write!(f, "; {} bytes of host memory are not registered", self.pageable_bytes)?;
        }
        for why in &self.no_kernels {
            write!(f, "; no {why}")?;
        }
        for (ordinal, no_access) in &self.peers {
            match no_access {
                None => write!(f, "; reaches device {ordinal}")?,
                Some(why) => write!(f, "; device {ordinal} by copies alone: {why}")?,
            }
        }
        if self.verifies {
            write!(f, "; what it copies is verified")?;
        }
        Ok(())
    }
}

/// Memory on both sides for measurements, freed on drop.
struct Probe<'a> {
    cuda: &'a Cuda,
    host: *mut u8,
    memory: Option<DeviceMemory>,
}

impl<'a> Probe<'a> {
    fn new(cuda: &'a Cuda) -> Result<Probe<'a>> {
        let mut probe = Probe { cuda, host: std::ptr::null_mut(), memory: None };
        let _guard = cuda.enter()?;
        let mut host = std::ptr::null_mut();
        let flags = HOST_PORTABLE | HOST_MAPPED;
        // SAFETY: a place for an address.
        let code = unsafe { (cuda.driver.allocate_host)(&mut host, PROBE_BYTES as usize, flags) };
        cuda.driver.check("cuMemHostAlloc", code)?;
        probe.host = host.cast();
        let mut device_address = 0;
        // SAFETY: a place for an address, and memory that was taken just now.
        let code = unsafe { (cuda.driver.host_on_device)(&mut device_address, host, 0) };
        let is_mapped = code == 0 && device_address == host as u64;
        let range = HostRange { bytes: PROBE_BYTES, registration: Registration::Theirs, is_mapped };
        cuda.inner.lock().hosts.insert(host as u64, range);
        probe.memory = Some(cuda.allocate(PROBE_BYTES)?);
        Ok(probe)
    }

    /// Time to copy everything in cells.
    fn run(&self, cell_bytes: u64, to_device: bool) -> Result<u64> {
        let Some(memory) = &self.memory else { return Ok(u64::MAX) };
        let direction = if to_device { Direction::Scatter } else { Direction::Gather };
        let mut copies = Vec::with_capacity((PROBE_BYTES / cell_bytes) as usize);
        // Cells that adjoin on one side do not on the other, as in a store.
        let count = PROBE_BYTES / cell_bytes;
        for cell in 0..count {
            let host = self.host.wrapping_add((cell * cell_bytes) as usize);
            let target = memory.address + (cell * 7 + 3) % count * cell_bytes;
            copies.push(Copy::bytes(host, target, cell_bytes, direction, Memory::Device)?);
        }
        let clock = Clock::real();
        let start_ns = clock.now_ns();
        let mut inner = self.cuda.inner.lock();
        let inside = self.cuda.enter()?;
        // Not on a stream of the engine, whose work must not wait for this.
        let queue = self.cuda.listener(&mut inner)?;
        drop(inside);
        // The memory lives until the batch has ended.
        let event = self.cuda.put(&mut inner, queue, None, &Work::Copies(&copies))?;
        drop(inner);
        self.cuda.wait(event, 0)?;
        let took_ns = clock.now_ns() - start_ns;
        self.cuda.release(event)?;
        Ok(took_ns.max(1))
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        let driver = &self.cuda.driver;
        if let Some(memory) = &self.memory {
            // SAFETY: memory of the measurement; work that used it has ended.
            if let Err(error) = unsafe { self.cuda.free(memory) } {
                log::warn!("memory of a measurement leaks: {}", error.message());
            }
        }
        self.cuda.inner.lock().hosts.remove(&(self.host as u64));
        if let (false, Ok(_guard)) = (self.host.is_null(), self.cuda.enter()) {
            // SAFETY: as above.
            driver.note("cuMemFreeHost", unsafe { (driver.free_host)(self.host.cast()) });
        }
    }
}

impl Cuda {
    /// Chooses the copy methods. If they cannot be measured, copies go one by one, and the
    /// description says why.
    pub(super) fn choose(&mut self, choice: CopyMethodChoice) {
        let wants_kernel =
            [CopyMethodChoice::Measured, CopyMethodChoice::Fixed(CopyMethod::Kernel)]
                .contains(&choice);
        let has_lists = wants_kernel && self.has_copy_kernel();
        self.chosen = match choice {
            CopyMethodChoice::Fixed(CopyMethod::Kernel) if !has_lists => ChosenMethods::default(),
            CopyMethodChoice::Fixed(method) => ChosenMethods::all(method),
            CopyMethodChoice::Measured => {
                let has = |method: &CopyMethod| match method {
                    CopyMethod::Plain => true,
                    CopyMethod::Batch => self.batch_call.is_some(),
                    CopyMethod::Kernel => has_lists,
                };
                let all = [CopyMethod::Plain, CopyMethod::Batch, CopyMethod::Kernel];
                let all: Vec<CopyMethod> = all.into_iter().filter(has).collect();
                self.measure(&all)
            }
        };
        self.description.chosen = self.chosen;
    }

    /// Loads the copy kernel and its lists; false if it is unavailable.
    fn has_copy_kernel(&self) -> bool {
        let taken = self.allocate_lists().and_then(|()| self.load_copy_kernel());
        if let Err(error) = &taken {
            log::info!("the copy kernel is unavailable: {}", error.message());
        }
        taken.is_ok()
    }

    fn measure(&mut self, all: &[CopyMethod]) -> ChosenMethods {
        let (mut rates, mut best) = (Vec::new(), ChosenMethods::default());
        let tried = self.measure_all(all, &mut rates);
        if let Err(error) = tried {
            self.description.not_measured = Some(error.message().to_string());
        }
        for to_device in [true, false] {
            for (class, cell_bytes) in CELL_BYTES.into_iter().enumerate() {
                let of =
                    |rate: &&Rate| rate.to_device == to_device && rate.cell_bytes == cell_bytes;
                // A measurement has few runs of the longest class. In long batches the gaps between
                // single copies matter more than it shows, so batches get a bonus.
                let is_last = class == CLASSES - 1;
                let worth = |rate: &&Rate| match is_last && rate.method == CopyMethod::Batch {
                    true => rate.bytes_per_s / 8 * 10,
                    false => rate.bytes_per_s,
                };
                let fastest = rates.iter().filter(of).max_by_key(worth);
                let Some(fastest) = fastest else { continue };
                let method = if to_device { &mut best.to_device } else { &mut best.from_device };
                method[class] = fastest.method;
            }
        }
        self.description.rates = rates;
        best
    }

    fn measure_all(&mut self, all: &[CopyMethod], rates: &mut Vec<Rate>) -> Result<()> {
        let clock = Clock::real();
        let end_ns = clock.now_ns() + PROBE_BUDGET_NS;
        for &method in all {
            self.chosen = ChosenMethods::all(method);
            let probe = Probe::new(self)?;
            for (to_device, cell_bytes) in
                [true, false].into_iter().flat_map(|to| CELL_BYTES.map(|bytes| (to, bytes)))
            {
                let mut best_ns = u64::MAX;
                for _ in 0..=PROBE_REPEATS {
                    if clock.now_ns() < end_ns {
                        best_ns = best_ns.min(probe.run(cell_bytes, to_device)?);
                    }
                }
                if best_ns == u64::MAX {
                    return Err(crate::base::status::Status::Timeout.into());
                }
                let bytes_per_s =
                    (u128::from(PROBE_BYTES) * 1_000_000_000 / u128::from(best_ns)) as u64;
                rates.push(Rate { to_device, cell_bytes, method, bytes_per_s });
            }
        }
        Ok(())
    }

    /// Describes the device and how it is used.
    pub fn describe(&self) -> Description {
        let mut description = self.description.clone();
        let inner = self.inner.lock();
        let pageable =
            inner.hosts.values().filter(|range| range.registration == Registration::Pageable);
        description.pageable_bytes = pageable.map(|range| range.bytes).sum();
        drop(inner);
        let words = |error: &crate::base::status::Error| error.message().to_string();
        let describe_peer = |peer: &Peer| (peer.ordinal as u32, peer.no_access.as_ref().map(words));
        description.peers = self.peers.iter().map(describe_peer).collect();
        description.verifies = self.verifies;
        description.no_kernels = self.loaded.lock().failures();
        description
    }
}
