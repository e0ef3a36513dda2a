//! Kernels: CUDA sources with their compiled code, and the grid of each call. All take one
//! argument, the [`Call`]; `call.h` describes its fields. `ffi-tests/cuda/kernels/build.py`
//! compiles the sources.

pub mod attend;
mod attend_decode;
mod attend_prefill;
mod check;
mod convert;
mod estimate;
mod heavy;
mod moves;
mod pages;
mod sum;
mod top;

use std::io::Read;

use ruzstd::decoding::StreamingDecoder;

use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::fail;

/// A compiled source, packed with zstd because most programs do not need it.
pub struct Module {
    /// File name without extension.
    pub name: &'static str,
    /// Kernels in it.
    pub kinds: &'static [Kind],
    ptx: &'static [u8],
    cubin_90: &'static [u8],
}

impl Module {
    /// Kernels in it, as a set.
    pub fn kind_bits(&self) -> u64 {
        self.kinds.iter().fold(0, |set, kind| set | kind.bit())
    }

    /// Description for messages.
    pub fn words(&self) -> String {
        match self.kinds {
            [] => format!("kernels of {}", self.name),
            kinds => format!("kernels of {} ({kinds:?})", self.name),
        }
    }

    /// NUL-terminated PTX for compute capability 8.0, which the driver compiles for later ones.
    pub fn ptx(&self) -> Result<Vec<u8>> {
        let mut code = unpack(self.name, self.ptx)?;
        code.push(0);
        Ok(code)
    }

    /// Machine code for 9.0.
    pub fn cubin_90(&self) -> Result<Vec<u8>> {
        unpack(self.name, self.cubin_90)
    }
}

fn unpack(name: &str, packed: &[u8]) -> Result<Vec<u8>> {
    let mut code = Vec::new();
    let unpacked = StreamingDecoder::new(packed)
        .map_err(|error| error.to_string())
        .and_then(|mut all| all.read_to_end(&mut code).map_err(|error| error.to_string()));
    match unpacked {
        Ok(_) => Ok(code),
        Err(why) => fail!(Corrupt, "the kernels of {name} cannot be decompressed: {why}"),
    }
}

/// The compiled code of a source.
macro_rules! compiled {
    ($name:literal, $($kind:ident)*) => {
        Module {
            name: $name,
            kinds: &[$(Kind::$kind),*],
            ptx: include_bytes!(concat!("built/", $name, ".ptx.zst")),
            cubin_90: include_bytes!(concat!("built/", $name, ".cubin.zst")),
        }
    };
}

/// All modules.
pub const MODULES: [Module; 11] = [
    compiled!("move", Move),
    compiled!("convert", Convert),
    compiled!("sum", Sum),
    compiled!("pages", PageBoxes PageScores),
    compiled!("top", Top),
    compiled!("attend_prefill", Prefill),
    // Latent attention only, as `latent_decode`: other attention works without it.
    compiled!("attend_latent",),
    compiled!("attend_decode", Decode),
    compiled!("estimate", Estimate),
    compiled!("heavy", Add Keep Compact),
    compiled!("latent_decode",),
];

/// Indices in [`MODULES`].
mod module {
    pub const MOVE: usize = 0;
    pub const CONVERT: usize = 1;
    pub const SUM: usize = 2;
    pub const PAGES: usize = 3;
    pub const TOP: usize = 4;
    pub const ATTEND_PREFILL: usize = 5;
    pub const ATTEND_LATENT: usize = 6;
    pub const ATTEND_DECODE: usize = 7;
    pub const ESTIMATE: usize = 8;
    pub const HEAVY: usize = 9;
    pub const LATENT_DECODE: usize = 10;
}

/// A launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index of its module in [`MODULES`].
    pub module: usize,
    /// Function name.
    pub name: &'static str,
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
}

/// Limit: launches of a call.
pub const MAX_STEPS: usize = 4;
/// Limit: shared memory of a thread block, on compute capability 9.0.
pub const MOST_SHARED: u32 = 227 << 10;

/// Collects launches.
struct Steps<'a> {
    all: &'a mut Vec<Step>,
    /// Shared memory that a thread block can have.
    shared_bytes: u32,
}

impl Steps<'_> {
    /// Adds a launch with blocks of `block` threads.
    fn add(&mut self, module: usize, name: &'static str, grid: [u32; 3], block: u32) -> Result<()> {
        self.add_with(module, name, grid, block, 0)
    }

    /// Adds a launch with dynamic shared memory.
    fn add_with(
        &mut self,
        module: usize,
        name: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
    ) -> Result<()> {
        if shared_bytes > self.shared_bytes {
            let available = self.shared_bytes;
            fail!(
                Unsupported,
                "{name} needs {shared_bytes} bytes of shared memory, the device has {available}"
            );
        }
        if self.all.try_reserve(1).is_err() {
            return Err(Status::NoMem.into());
        }
        self.all.push(Step { module, name, grid, block: [block, 1, 1], shared_bytes });
        Ok(())
    }
}

/// Validates a call and writes its launches to `steps`, to be issued in order on one stream.
/// `shared_bytes` is the shared memory of a thread block. Kernels validate nothing themselves.
pub fn steps(call: &Call, shared_bytes: u32, steps: &mut Vec<Step>) -> Result<()> {
    steps.clear();
    let Some(kind) = Kind::of(call.kind) else {
        fail!(Unsupported, "kernel {} does not exist", call.kind)
    };
    let steps = &mut Steps { all: steps, shared_bytes };
    match kind {
        Kind::Move => moves::steps(call, steps),
        Kind::Convert => convert::steps(call, steps),
        Kind::Sum => sum::steps(call, steps),
        Kind::PageBoxes => pages::boxes(call, steps),
        Kind::PageScores => pages::scores(call, steps),
        Kind::Top => top::steps(call, steps),
        Kind::Add => heavy::add(call, steps),
        Kind::Keep => heavy::keep(call, steps),
        Kind::Compact => heavy::compact(call, steps),
        Kind::Estimate => estimate::steps(call, steps),
        Kind::Prefill => attend_prefill::steps(call, steps),
        Kind::Decode => attend_decode::steps(call, steps),
    }
}
