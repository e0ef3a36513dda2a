//! Group `device`: copies of a GPU, beside one large copy in the same run. Without a GPU every bar
//! has the reason as its note.

use std::time::Instant;

use kvtier::base::clock::Clock;
use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::status::{Error, Result, Status};
use kvtier::base::sync::Arc;
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts, probe};
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Event, Memory, Stream};
use kvtier::fail;

use super::{Bar, device_files, device_kernels, device_offload, device_stream, median};
use kvtier_cli::direct;

const MIB: usize = 1 << 20;

/// A bar with its goal and baseline.
struct BarSpec {
    bar: &'static str,
    goal: Option<f64>,
    baseline: &'static str,
}

const fn goal(bar: &'static str, goal: f64, baseline: &'static str) -> BarSpec {
    BarSpec { bar, goal: Some(goal), baseline }
}

const UP: &str = "one large copy to the device";
const DOWN: &str = "one large copy from it";
const BARS: [BarSpec; 13] = [
    goal("h2d_pinned", 0.95, UP),
    goal("d2h_pinned", 0.95, DOWN),
    goal("h2d_1m_cells", 0.95, UP),
    goal("h2d_64k_cells", 0.85, UP),
    goal("h2d_16k_cells", 0.60, UP),
    BarSpec { bar: "h2d_4k_cells", goal: None, baseline: UP },
    goal("d2h_64k_cells", 0.85, DOWN),
    goal("d2h_16k_cells", 0.60, DOWN),
    goal("both_ways", 0.85, "each direction alone, added"),
    BarSpec { bar: "h2d_pageable", goal: None, baseline: UP },
    BarSpec { bar: "d2h_pageable", goal: None, baseline: DOWN },
    BarSpec { bar: "d2d_copy", goal: None, baseline: UP },
    BarSpec { bar: "peer_copy", goal: None, baseline: UP },
];

/// A device with memory on both sides.
struct CopyFixture {
    device: Arc<Cuda>,
    pinned: Buffer,
    pageable: Buffer,
    device_memory: DeviceMemory,
    other: DeviceMemory,
    /// Another GPU and its memory.
    peer: Option<(Cuda, DeviceMemory)>,
    bytes: usize,
    rounds: usize,
}

/// Cell sizes with which each method of copies is measured.
const CELLS: [usize; 3] = [16 << 10, 64 << 10, MIB];
/// Bars of each method, to the device and from it.
const MEANS: [(CopyMethod, [[&str; 2]; 3]); 3] = [
    (
        CopyMethod::Plain,
        [
            ["h2d_16k_plain", "d2h_16k_plain"],
            ["h2d_64k_plain", "d2h_64k_plain"],
            ["h2d_1m_plain", "d2h_1m_plain"],
        ],
    ),
    (
        CopyMethod::Batch,
        [
            ["h2d_16k_batch", "d2h_16k_batch"],
            ["h2d_64k_batch", "d2h_64k_batch"],
            ["h2d_1m_batch", "d2h_1m_batch"],
        ],
    ),
    (
        CopyMethod::Kernel,
        [
            ["h2d_16k_kernel", "d2h_16k_kernel"],
            ["h2d_64k_kernel", "d2h_64k_kernel"],
            ["h2d_1m_kernel", "d2h_1m_kernel"],
        ],
    ),
];

impl CopyFixture {
    fn open(quick: bool, choice: CopyMethodChoice) -> Result<CopyFixture> {
        let opts = direct::opts(0, choice);
        // The fake driver of the tests only shows that the bench runs.
        let is_fake = opts.library.is_some();
        let bytes = if is_fake { 4 * MIB } else { 256 * MIB };
        // The fake driver has no meaningful speed, so one round is enough.
        let rounds = match (is_fake, quick) {
            (true, _) => 1,
            (false, true) => 3,
            (false, false) => 9,
        };
        let has_peer = probe(opts.library.as_deref())?.len() > 1;
        let peers = if has_peer { vec![1] } else { Vec::new() };
        let plain = CudaOpts { library: opts.library.clone(), ..CudaOpts::default() };
        let opts = CudaOpts { peers, ..opts };
        let device = Cuda::open(Clock::real(), &opts)?;
        let map = || {
            let buffer = Buffer::map(
                &AllocationRequest { bytes: bytes as u64, ..AllocationRequest::default() },
                None,
            )?;
            // SAFETY: the memory of the buffer.
            unsafe { buffer.address().write_bytes(7, bytes) };
            Ok::<Buffer, Error>(buffer)
        };
        let (pinned, pageable) = (map()?, map()?);
        // SAFETY: the memory outlives the device, which unregisters it.
        unsafe { device.register_host(pinned.address(), bytes as u64)? };
        let (device_memory, other) =
            (device.allocate(bytes as u64)?, device.allocate(bytes as u64)?);
        let next_door = || {
            let next = Cuda::open(Clock::real(), &CudaOpts { ordinal: 1, ..plain.clone() })?;
            let memory = next.allocate(bytes as u64)?;
            Ok::<_, Error>((next, memory))
        };
        let peer = if has_peer { Some(next_door()?) } else { None };
        let device = Arc::new(device);
        Ok(CopyFixture { device, pinned, pageable, device_memory, other, peer, bytes, rounds })
    }

    /// Copies of the whole memory in cells; the cells of the host side are shuffled.
    fn cells(
        &self,
        host: &Buffer,
        cell: usize,
        direction: Direction,
    ) -> Result<Vec<Copy<'static>>> {
        let count = self.bytes / cell;
        // An odd factor permutes a power of two of cells.
        let place = |at: usize| at.wrapping_mul(2_654_435_761) % count;
        (0..count.min(kvtier::device::MAX_COPIES))
            .map(|at| {
                let host = host.address().wrapping_add(place(at) * cell);
                let address = self.device_memory.address + (at * cell) as u64;
                Copy::bytes(host, address, cell as u64, direction, Memory::Device)
            })
            .collect()
    }

    fn begin(&self, stream: u32, copies: &mut [Copy<'_>]) -> Result<Event> {
        // SAFETY: memory of this fixture, which no other work uses until the events complete.
        unsafe { self.device.submit(Stream(stream), None, copies) }
    }

    fn end(&self, event: Event) -> Result<()> {
        self.device.wait(event, 0)?;
        self.device.release(event)
    }

    /// GB/s of concurrent batches, one on each stream.
    fn rate(&self, batches: &mut [Vec<Copy<'static>>]) -> Result<f64> {
        let bytes: u64 = batches.iter().flatten().map(|copy| copy.tensor.bytes()).sum();
        let mut rates = Vec::new();
        for round in 0..=self.rounds {
            let began = Instant::now();
            let mut events = Vec::new();
            for (stream, batch) in batches.iter_mut().enumerate() {
                events.push(self.begin(stream as u32, batch)?);
            }
            events.into_iter().try_for_each(|event| self.end(event))?;
            if round > 0 {
                rates.push(bytes as f64 / began.elapsed().as_secs_f64() / 1e9);
            }
        }
        Ok(median(&mut rates))
    }

    fn whole(&self, host: &Buffer, direction: Direction) -> Result<Vec<Copy<'static>>> {
        self.cells(host, self.bytes, direction)
    }

    fn rate_on_device(&self) -> Option<f64> {
        self.device_copies(&self.other).and_then(|copies| self.rate(&mut [copies])).ok()
    }

    /// A copy between memories of devices.
    fn device_copies(&self, other: &DeviceMemory) -> Result<Vec<Copy<'static>>> {
        let plane = std::ptr::with_exposed_provenance_mut(other.address as usize);
        let address = self.device_memory.address;
        let copy =
            Copy::bytes(plane, address, self.bytes as u64, Direction::Gather, Memory::Device)?;
        Ok(vec![Copy { plane_memory: Memory::Device, ..copy }])
    }

    /// The rate of a bar, and that of its baseline.
    fn measure(&self, bar: &str, up: f64, down: f64) -> Result<(f64, f64)> {
        let (direction, baseline) = if bar.starts_with("d2h") {
            (Direction::Gather, down)
        } else {
            (Direction::Scatter, up)
        };
        let cell = match bar {
            "h2d_1m_cells" => MIB,
            "h2d_64k_cells" | "d2h_64k_cells" => 64 << 10,
            "h2d_16k_cells" | "d2h_16k_cells" => 16 << 10,
            "h2d_4k_cells" => 4 << 10,
            _ => self.bytes / 4,
        };
        let rate = match bar {
            "both_ways" => {
                let half = self.bytes / 2;
                let mut batches = [
                    self.twice(0, self.device_memory.address, Direction::Scatter)?,
                    self.twice(half, self.other.address, Direction::Gather)?,
                ];
                return Ok((self.rate(&mut batches)?, up + down));
            }
            "h2d_pageable" | "d2h_pageable" => {
                self.rate(&mut [self.cells(&self.pageable, cell, direction)?])?
            }
            "d2d_copy" => self.rate(&mut [self.device_copies(&self.other)?])?,
            "peer_copy" => match &self.peer {
                Some((_, memory)) => self.rate(&mut [self.device_copies(memory)?])?,
                None => fail!(Unsupported, "one GPU has no peer"),
            },
            _ => self.rate(&mut [self.cells(&self.pinned, cell, direction)?])?,
        };
        Ok((rate, baseline))
    }

    /// Two copies of one half of the pinned memory; the other half is used in the other direction.
    fn twice(&self, at: usize, address: u64, direction: Direction) -> Result<Vec<Copy<'static>>> {
        let host = self.pinned.address().wrapping_add(at);
        let half = self.bytes as u64 / 2;
        (0..2).map(|_| Copy::bytes(host, address, half, direction, Memory::Device)).collect()
    }
}

fn bar(spec: &BarSpec, value: Option<(f64, f64)>, note: String) -> Bar {
    Bar::higher(spec.bar, "x")
        .baseline(spec.baseline)
        .baseline_value(value.map(|(_, baseline)| baseline))
        .goal(spec.goal)
        .value(value.map(|(rate, baseline)| rate / baseline))
        .note(note)
}

/// The rates of each method; a device chooses among them by measuring.
fn by_means(quick: bool, ends: &Result<(f64, f64)>) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (means, names) in MEANS {
        let rig = CopyFixture::open(quick, CopyMethodChoice::Fixed(means));
        for (cell, names) in CELLS.into_iter().zip(names) {
            for (direction, bar_name) in
                [Direction::Scatter, Direction::Gather].into_iter().zip(names)
            {
                let baseline = if direction == Direction::Scatter { UP } else { DOWN };
                let spec = BarSpec { bar: bar_name, goal: None, baseline };
                let rate = match (&rig, ends) {
                    (Ok(rig), Ok((up, down))) => rig
                        .cells(&rig.pinned, cell, direction)
                        .and_then(|cells| rig.rate(&mut [cells]))
                        .map(|rate| {
                            (rate, if direction == Direction::Scatter { *up } else { *down })
                        }),
                    (Err(error), _) | (_, Err(error)) => {
                        Err(Error::new(error.status(), error.message().to_string()))
                    }
                };
                bars.push(match rate {
                    Ok((rate, base)) => bar(&spec, Some((rate, base)), format!("{rate:.2} GB/s")),
                    Err(error) => bar(&spec, None, error.to_string()),
                });
            }
        }
    }
    bars
}

pub fn run(quick: bool) -> Vec<Bar> {
    let rig = match CopyFixture::open(quick, CopyMethodChoice::Measured) {
        Ok(rig) => rig,
        Err(error) => {
            let why = error.to_string();
            let none = BARS.iter().map(|spec| bar(spec, None, why.clone()));
            let none = none.chain(device_stream::none(&why));
            let rest = device_offload::none(error.clone());
            return none.chain(rest).chain([device_files::bar(Err(error))]).collect();
        }
    };
    let large = |direction| rig.rate(&mut [rig.whole(&rig.pinned, direction)?]);
    let ends = large(Direction::Scatter).and_then(|up| Ok((up, large(Direction::Gather)?)));
    let measured = |spec: &BarSpec| {
        let value = match &ends {
            Ok((up, down)) => rig.measure(spec.bar, *up, *down),
            Err(error) => Err(Error::new(Status::Io, error.to_string())),
        };
        match value {
            Ok((rate, baseline)) => bar(spec, Some((rate, baseline)), format!("{rate:.2} GB/s")),
            Err(error) => bar(spec, None, error.to_string()),
        }
    };
    let mut bars: Vec<Bar> = BARS.iter().map(measured).collect();
    bars.extend(by_means(quick, &ends));
    let (up, is_small) = (ends.as_ref().ok().map(|(up, _)| *up), rig.bytes < 64 * MIB);
    bars.extend(device_stream::run(&rig.device, up, is_small, rig.rounds));
    let copied = rig.rate_on_device();
    bars.extend(device_kernels::run(&rig.device, copied, is_small, rig.rounds));
    bars.push(device_files::bar(device_files::run(&rig.device, rig.bytes, rig.rounds)));
    bars.extend(device_offload::run(
        direct::opts(0, CopyMethodChoice::Measured).library,
        rig.rounds,
    ));
    if let Some(first) = bars.first_mut() {
        first.note = format!("{}; {}", first.note, rig.device.describe());
    }
    bars
}
