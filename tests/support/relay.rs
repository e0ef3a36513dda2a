//! An engine's own device for tests: it does what it is asked by way of a simulated device, well
//! or with one fault.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use kvtier::base::clock::Clock;
use kvtier::base::status::{Error, Result, Status};
use kvtier::device::call::{Call, Kind};
use kvtier::device::foreign::{Engine, Rows};
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Copy, Device, DeviceMemory, Event, Facts, Memory, State, Stream, Way};
use kvtier::meta::view::{Place, View};

use crate::emulated;

/// What is wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Events that come before the copies.
    Early,
    /// What a batch is to wait for counts for nothing.
    NoAfter,
    /// Streams that are one another's: work goes where it likes.
    NoOrder,
    /// The last run of each copy is left out.
    Short,
    /// A byte too many, where a run is longer than 4,000.
    Long,
    /// Rows are taken to lie one after the other.
    NoStride,
    /// Device memory that overlaps.
    Twice,
    /// Device memory at odd addresses.
    Crooked,
    /// Every 50th copy has a wrong byte.
    Wrong,
    /// What comes from the device goes to it.
    Backwards,
    /// Promises that nobody has to keep.
    Loose,
    /// Events never come.
    Never,
    /// It gives out no memory, although it has some: the engine keeps that to itself. No fault.
    Keeps,
    /// A kernel is asked something a little different.
    Kernel(Kind),
}

impl Fault {
    /// All that is wrong with copies of some.
    #[allow(dead_code)] // not every test binary uses all of it
    pub const COPIES: [Fault; 12] = [
        Fault::Early,
        Fault::NoAfter,
        Fault::NoOrder,
        Fault::Short,
        Fault::Long,
        Fault::NoStride,
        Fault::Twice,
        Fault::Crooked,
        Fault::Wrong,
        Fault::Backwards,
        Fault::Loose,
        Fault::Never,
    ];
}

/// What kernels it has: those of CUDA, run by the processor, and where there is a GPU, and perhaps
/// no compiler, the one of its own.
pub fn kinds() -> impl Iterator<Item = Kind> {
    let has_compiler = std::env::var_os("KVTIER_GPU").is_none();
    Kind::ALL.into_iter().filter(move |kind| has_compiler || *kind == Kind::Move)
}

/// # Safety
/// Its table and all that is in it are memory.
unsafe fn move_pieces(call: &Call) {
    let at = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    for piece in 0..call.count as usize {
        // SAFETY: the caller's promise.
        unsafe {
            let [from, to, from_stride, to_stride, sizes] =
                at(call.table).cast::<[u64; 5]>().add(piece).read();
            for run in 0..sizes >> 32 {
                let source = at(from.wrapping_add(run.wrapping_mul(from_stride)));
                let target = at(to.wrapping_add(run.wrapping_mul(to_stride)));
                source.copy_to_nonoverlapping(target, sizes as u32 as usize);
            }
        }
    }
}

fn kind(call: &Call) -> Kind {
    Kind::of(call.kind).expect("one that it says it has")
}

/// Something a little different, of which memory is as much as of the other.
fn other(call: &Call) -> Call {
    match kind(call) {
        Kind::Move | Kind::Convert | Kind::Sum => Call { count: call.count - 1, ..*call },
        Kind::PageBoxes if call.count > 1 => Call { count: call.count - 1, ..*call },
        Kind::PageScores if call.index == 0 => Call { first: call.first - 1, ..*call },
        Kind::Top if call.sinks > 0 => Call { sinks: call.sinks - 1, ..*call },
        Kind::Add => Call { tokens: call.tokens - 1, ..*call },
        Kind::Keep if call.keep > 1 => Call { keep: call.keep - 1, ..*call },
        Kind::Compact => Call { value_dim: call.value_dim / 2, ..*call },
        Kind::Estimate | Kind::Decode => Call { scale: 0.13, ..*call },
        // Each query sees a key less.
        Kind::Prefill => Call { first: call.first - 1, ..*call },
        _ => *call,
    }
}

/// The engine.
pub struct Relay {
    device: Simulated,
    fault: Fault,
    given: Mutex<BTreeMap<u64, DeviceMemory>>,
    count: AtomicU64,
    /// Events that were made and not taken back.
    pub open: AtomicU64,
    clock: Clock,
}

impl Relay {
    /// On a clock, with a seed.
    pub fn new(clock: Clock, seed: u64, fault: Fault) -> Relay {
        let opts = SimulatedOpts { seed, memory_bytes: 1 << 33, ..SimulatedOpts::default() };
        Relay {
            device: Simulated::new(clock.clone(), opts).expect("sound"),
            fault,
            given: Mutex::new(BTreeMap::new()),
            count: AtomicU64::new(0),
            open: AtomicU64::new(0),
            clock,
        }
    }

    /// The device behind it is gone.
    #[allow(dead_code)] // not every test binary uses all of it
    pub fn lose(&self) {
        self.device.lose();
    }

    /// What it gave and was not given back.
    #[allow(dead_code)] // not every test binary uses all of it
    pub fn given(&self) -> usize {
        self.given.lock().expect("whole").len()
    }

    fn put(&self, stream: u32, after: u64, copies: &mut [Copy<'_>]) -> Result<u64> {
        let after = (after != 0 && self.fault != Fault::NoAfter).then_some(Event(after));
        let stream = match self.fault {
            Fault::NoOrder => self.count.fetch_add(1, Ordering::SeqCst) as u32 % 4,
            _ => stream,
        };
        // SAFETY: the promise made to the device that this is.
        let event = unsafe { self.device.submit(Stream(stream), after, copies)? };
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(event.0)
    }

    /// Rows as a copy between a tensor and a plane, here of either kind of memory.
    fn copy_of(&self, rows: &Rows) -> Result<Copy<'static>> {
        let place = |is_device| if is_device == 1 { Memory::Device } else { Memory::Host };
        let mut rows = *rows;
        match self.fault {
            Fault::Short if rows.runs > 1 => rows.runs -= 1,
            Fault::Long if rows.run_bytes > 4_000 && rows.runs == 1 => rows.run_bytes += 1,
            Fault::NoStride => {
                (rows.from_stride_bytes, rows.to_stride_bytes) = (rows.run_bytes, rows.run_bytes);
            }
            Fault::Wrong if self.count.fetch_add(1, Ordering::SeqCst) % 50 == 49 => {
                rows.from += 1;
                rows.run_bytes -= u64::from(rows.run_bytes > 1);
            }
            _ => {}
        }
        let canonical = |stride| rows.runs == 1 || stride == rows.run_bytes;
        let gathers = canonical(rows.to_stride_bytes);
        assert!(gathers || canonical(rows.from_stride_bytes), "one side lies together");
        let (tensor, plane, stride) = match gathers {
            true => {
                ((rows.from, rows.from_device), (rows.to, rows.to_device), rows.from_stride_bytes)
            }
            false => {
                ((rows.to, rows.to_device), (rows.from, rows.from_device), rows.to_stride_bytes)
            }
        };
        let view = View {
            place: Place::At(tensor.0),
            tokens: rows.runs as u32,
            heads: 1,
            run_bytes: rows.run_bytes,
            token_stride_bytes: stride,
            head_stride_bytes: rows.run_bytes,
        };
        let way = match gathers == (self.fault != Fault::Backwards) {
            true => Way::Gather,
            false => Way::Scatter,
        };
        let pointer = std::ptr::with_exposed_provenance_mut(plane.0 as usize);
        let copy = Copy::new(&view, 0, rows.runs as u32, pointer, way)?;
        Ok(Copy { memory: place(tensor.1), plane_memory: place(plane.1), ..copy })
    }
}

impl Engine for Relay {
    fn facts(&self) -> Facts {
        let kernels = match self.fault {
            Fault::Kernel(kind) => kind.bit(),
            _ => kinds().fold(0, |set, kind| set | kind.bit()),
        };
        Facts { kernels, name: "relay", ..self.device.facts() }
    }

    fn submit(&self, stream: u32, after: u64, copies: &[Rows]) -> Result<u64> {
        let mut copies =
            copies.iter().map(|rows| self.copy_of(rows)).collect::<Result<Vec<_>>>()?;
        if self.fault == Fault::Early {
            let event = self.put(stream, after, &mut [])?;
            self.put((stream + 1) % 4, after, &mut copies)?;
            self.open.fetch_sub(1, Ordering::SeqCst);
            return Ok(event);
        }
        self.put(stream, after, &mut copies)
    }

    fn query(&self, event: u64) -> Result<bool> {
        if self.fault == Fault::Never {
            return Ok(false);
        }
        Ok(self.device.state(Event(event))? == State::Done)
    }

    fn wait(&self, event: u64, deadline_ns: u64) -> Option<Result<()>> {
        if self.fault == Fault::Never {
            // Time passes, as it does on a device whose events never come.
            self.clock.advance(deadline_ns.saturating_sub(self.clock.now_ns()).min(1 << 32));
            return Some(Err(Status::Timeout.into()));
        }
        Some(self.device.wait(Event(event), deadline_ns))
    }

    fn release(&self, event: u64) {
        if self.fault != Fault::Never {
            self.device.release(Event(event)).expect("an event that has ended");
        }
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        if self.fault == Fault::Keeps {
            return Err(Status::Unsupported.into());
        }
        let mut given = self.given.lock().expect("whole");
        if self.fault == Fault::Twice
            && let Some((address, _)) = given.last_key_value()
            && bytes < 64 << 20
        {
            return Ok(*address);
        }
        // What a fault writes behind it is nobody's.
        let least = if self.fault == Fault::Twice { 64 << 20 } else { 0 };
        let memory = self.device.allocate(least.max(bytes + 4096))?;
        let address = memory.address;
        given.insert(address, memory);
        Ok(if self.fault == Fault::Crooked { address + 8 } else { address })
    }

    fn free(&self, address: u64, _bytes: u64) {
        if self.fault == Fault::Twice {
            return;
        }
        let address = if self.fault == Fault::Crooked { address - 8 } else { address };
        let mut given = self.given.lock().expect("whole");
        // What a fault still uses stays until the device goes.
        // SAFETY: the promise made to the device that this is.
        if given.get(&address).is_some_and(|it| unsafe { self.device.free(it) }.is_ok()) {
            given.remove(&address);
        }
    }

    fn free_bytes(&self) -> Option<u64> {
        self.device.free_bytes()
    }

    fn know_host(&self, _address: u64, _bytes: u64) -> Result<()> {
        Err(Error::new(Status::Unsupported, "all memory is the same"))
    }

    fn forget_host(&self, _address: u64) -> Result<()> {
        Err(Error::new(Status::Unsupported, "all memory is the same"))
    }

    fn adopt(&self, raw: u64) -> Result<u64> {
        // Its own kind of event is that of the device behind it.
        self.device.state(Event(raw))?;
        self.put(3, raw, &mut [])
    }

    fn hold(&self, raw_stream: u64, event: u64) -> Result<()> {
        let marked = self.put(raw_stream as u32, event, &mut [])?;
        self.open.fetch_sub(1, Ordering::SeqCst);
        let _ = marked;
        Ok(())
    }

    fn promise(&self) -> Result<u64> {
        if self.fault == Fault::Loose {
            return self.put(0, 0, &mut []);
        }
        let event = self.device.promise()?;
        self.open.fetch_add(1, Ordering::SeqCst);
        Ok(event.0)
    }

    fn keep(&self, event: u64) -> Result<()> {
        if self.fault == Fault::Loose { Ok(()) } else { self.device.keep(Event(event)) }
    }

    /// Kernels are carried out when all that they are to come behind has ended, before it returns.
    fn launch(&self, stream: u32, after: u64, calls: &[Call]) -> Result<u64> {
        let before = self.put(stream, after, &mut [])?;
        if self.fault != Fault::Never {
            self.device.wait(Event(before), 0)?;
        }
        for call in calls {
            let call = if self.fault == Fault::Kernel(kind(call)) { other(call) } else { *call };
            // SAFETY: the promise made to the device that this is.
            unsafe {
                match kind(&call) {
                    Kind::Move => move_pieces(&call),
                    _ => emulated::run(&call)?,
                }
            }
        }
        Ok(before)
    }
}
