//! Copies of a GPU: beside the best that one large copy reaches, in the same run. Without a GPU
//! nothing is measured, and each bar says why.

use std::time::Instant;

use kvtier::base::clock::Clock;
use kvtier::base::memory::{AllocationRequest, Buffer};
use kvtier::base::status::{Error, Result, Status};
use kvtier::base::sync::Arc;
use kvtier::device::cuda::{CopyMethod, CopyMethodChoice, Cuda, CudaOpts, probe};
use kvtier::device::{Copy, Device, DeviceMemory, Direction, Event, Memory, Stream};
use kvtier::fail;

use super::{Bar, Better, device_files, device_kernels, device_offload, device_stream, median};
use kvtier_cli::direct;

const MIB: usize = 1 << 20;

/// A bar, and what is wanted of it.
struct Wish {
    bar: &'static str,
    goal: Option<f64>,
    baseline: &'static str,
}

const fn wish(bar: &'static str, goal: f64, baseline: &'static str) -> Wish {
    Wish { bar, goal: Some(goal), baseline }
}

const UP: &str = "one large copy to the device";
const DOWN: &str = "one large copy from it";
const WISHES: [Wish; 13] = [
    wish("h2d_pinned", 0.95, UP),
    wish("d2h_pinned", 0.95, DOWN),
    wish("h2d_1m_cells", 0.95, UP),
    wish("h2d_64k_cells", 0.85, UP),
    wish("h2d_16k_cells", 0.60, UP),
    Wish { bar: "h2d_4k_cells", goal: None, baseline: UP },
    wish("d2h_64k_cells", 0.85, DOWN),
    wish("d2h_16k_cells", 0.60, DOWN),
    wish("both_ways", 0.85, "each way alone, added"),
    Wish { bar: "h2d_pageable", goal: None, baseline: UP },
    Wish { bar: "d2h_pageable", goal: None, baseline: DOWN },
    Wish { bar: "d2d_copy", goal: None, baseline: UP },
    Wish { bar: "peer_copy", goal: None, baseline: UP },
];

/// A device with memory on both sides.
struct Rig {
    device: Arc<Cuda>,
    pinned: Buffer,
    pageable: Buffer,
    far: DeviceMemory,
    other: DeviceMemory,
    /// Another GPU, and memory of its, which goes with it.
    peer: Option<(Cuda, DeviceMemory)>,
    bytes: usize,
    rounds: usize,
}

/// Cells that each way of giving copies to the driver is timed with.
const CELLS: [usize; 3] = [16 << 10, 64 << 10, MIB];
/// What the bars of each way are called, to the device and from it.
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

impl Rig {
    fn open(quick: bool, choice: CopyMethodChoice) -> Result<Rig> {
        let opts = direct::opts(0, choice);
        // The fake driver of the tests is far from a GPU: it only shows that this runs.
        let is_fake = opts.library.is_some();
        let bytes = if is_fake { 4 * MIB } else { 256 * MIB };
        // The driver without a device has no speed: one round shows that each bar is measured.
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
            // SAFETY: the buffer's own memory.
            unsafe { buffer.address().write_bytes(7, bytes) };
            Ok::<Buffer, Error>(buffer)
        };
        let (pinned, pageable) = (map()?, map()?);
        // SAFETY: it stays until the device has gone, which forgets it.
        unsafe { device.register_host(pinned.address(), bytes as u64)? };
        let (far, other) = (device.allocate(bytes as u64)?, device.allocate(bytes as u64)?);
        let next_door = || {
            let next = Cuda::open(Clock::real(), &CudaOpts { ordinal: 1, ..plain.clone() })?;
            let memory = next.allocate(bytes as u64)?;
            Ok::<_, Error>((next, memory))
        };
        let peer = if has_peer { Some(next_door()?) } else { None };
        let device = Arc::new(device);
        Ok(Rig { device, pinned, pageable, far, other, peer, bytes, rounds })
    }

    /// Copies of cells: all of the memory, the cells of one side in another order.
    fn cells(
        &self,
        host: &Buffer,
        cell: usize,
        direction: Direction,
    ) -> Result<Vec<Copy<'static>>> {
        let count = self.bytes / cell;
        // An odd factor visits each cell of a power of two once.
        let place = |at: usize| at.wrapping_mul(2_654_435_761) % count;
        (0..count.min(kvtier::device::MAX_COPIES))
            .map(|at| {
                let host = host.address().wrapping_add(place(at) * cell);
                let address = self.far.address + (at * cell) as u64;
                Copy::bytes(host, address, cell as u64, direction, Memory::Device)
            })
            .collect()
    }

    fn begin(&self, stream: u32, copies: &mut [Copy<'_>]) -> Result<Event> {
        // SAFETY: memory of the rig, which nobody else uses until the events have come.
        unsafe { self.device.submit(Stream(stream), None, copies) }
    }

    fn end(&self, event: Event) -> Result<()> {
        self.device.wait(event, 0)?;
        self.device.release(event)
    }

    /// GB/s of batches that begin at once, one a stream.
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
        self.far_to(&self.other).and_then(|copies| self.rate(&mut [copies])).ok()
    }

    /// Between memory of devices.
    fn far_to(&self, other: &DeviceMemory) -> Result<Vec<Copy<'static>>> {
        let plane = std::ptr::with_exposed_provenance_mut(other.address as usize);
        let address = self.far.address;
        let copy =
            Copy::bytes(plane, address, self.bytes as u64, Direction::Gather, Memory::Device)?;
        Ok(vec![Copy { plane_memory: Memory::Device, ..copy }])
    }

    /// What a bar is of: its rate, and that of its baseline.
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
                let mut both = [
                    self.twice(0, self.far.address, Direction::Scatter)?,
                    self.twice(half, self.other.address, Direction::Gather)?,
                ];
                return Ok((self.rate(&mut both)?, up + down));
            }
            "h2d_pageable" | "d2h_pageable" => {
                self.rate(&mut [self.cells(&self.pageable, cell, direction)?])?
            }
            "d2d_copy" => self.rate(&mut [self.far_to(&self.other)?])?,
            "peer_copy" => match &self.peer {
                Some((_, memory)) => self.rate(&mut [self.far_to(memory)?])?,
                None => fail!(Unsupported, "one GPU has no peer"),
            },
            _ => self.rate(&mut [self.cells(&self.pinned, cell, direction)?])?,
        };
        Ok((rate, baseline))
    }

    /// Half of the pinned memory, from `at` on, two times: the other half is for the other way.
    fn twice(&self, at: usize, address: u64, direction: Direction) -> Result<Vec<Copy<'static>>> {
        let host = self.pinned.address().wrapping_add(at);
        let half = self.bytes as u64 / 2;
        (0..2).map(|_| Copy::bytes(host, address, half, direction, Memory::Device)).collect()
    }
}

fn bar(wish: &Wish, value: Option<(f64, f64)>, note: String) -> Bar {
    Bar {
        bar: wish.bar,
        value: value.map(|(rate, baseline)| rate / baseline),
        unit: "x",
        baseline: wish.baseline,
        baseline_value: value.map(|(_, baseline)| baseline),
        goal: wish.goal,
        better: Better::Higher,
        note,
    }
}

/// What each means comes to, of which the device has chosen some by trying.
fn by_means(quick: bool, ends: &Result<(f64, f64)>) -> Vec<Bar> {
    let mut bars = Vec::new();
    for (means, names) in MEANS {
        let rig = Rig::open(quick, CopyMethodChoice::Fixed(means));
        for (cell, names) in CELLS.into_iter().zip(names) {
            for (direction, bar_name) in
                [Direction::Scatter, Direction::Gather].into_iter().zip(names)
            {
                let baseline = if direction == Direction::Scatter { UP } else { DOWN };
                let wish = Wish { bar: bar_name, goal: None, baseline };
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
                    Ok((rate, base)) => bar(&wish, Some((rate, base)), format!("{rate:.2} GB/s")),
                    Err(error) => bar(&wish, None, error.to_string()),
                });
            }
        }
    }
    bars
}

pub fn run(quick: bool) -> Vec<Bar> {
    let rig = match Rig::open(quick, CopyMethodChoice::Measured) {
        Ok(rig) => rig,
        Err(error) => {
            let why = error.to_string();
            let none = WISHES.iter().map(|wish| bar(wish, None, why.clone()));
            let none = none.chain(device_stream::none(&why));
            let rest = device_offload::none(error.clone());
            return none.chain(rest).chain([device_files::bar(Err(error))]).collect();
        }
    };
    let large = |direction| rig.rate(&mut [rig.whole(&rig.pinned, direction)?]);
    let ends = large(Direction::Scatter).and_then(|up| Ok((up, large(Direction::Gather)?)));
    let measured = |wish: &Wish| {
        let value = match &ends {
            Ok((up, down)) => rig.measure(wish.bar, *up, *down),
            Err(error) => Err(Error::new(Status::Io, error.to_string())),
        };
        match value {
            Ok((rate, baseline)) => bar(wish, Some((rate, baseline)), format!("{rate:.2} GB/s")),
            Err(error) => bar(wish, None, error.to_string()),
        }
    };
    let mut bars: Vec<Bar> = WISHES.iter().map(measured).collect();
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
