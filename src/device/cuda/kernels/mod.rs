//! Kernels: CUDA sources that stand here beside what they were compiled to, and how each call is
//! laid out on a device. All take one argument, the [`Call`] itself; `call.h` says what of it.
//! `ffi-tests/cuda/kernels/build.py` compiles them.

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

/// One source, compiled, and packed by zstd: most programs never need it.
pub struct Module {
    /// Its file, without an ending.
    pub name: &'static str,
    /// What cannot be had without it.
    pub kinds: &'static [Kind],
    ptx: &'static [u8],
    cubin_90: &'static [u8],
}

impl Module {
    /// What cannot be had without it, as a set.
    pub fn kind_bits(&self) -> u64 {
        self.kinds.iter().fold(0, |set, kind| set | kind.bit())
    }

    /// What it is for, in words.
    pub fn words(&self) -> String {
        match self.kinds {
            [] => format!("kernels of {}", self.name),
            kinds => format!("kernels of {} ({kinds:?})", self.name),
        }
    }

    /// For compute capability 8.0 and, compiled by the driver, all later ones. Ends with a zero.
    pub fn ptx(&self) -> Result<Vec<u8>> {
        let mut code = unpack(self.name, self.ptx)?;
        code.push(0);
        Ok(code)
    }

    /// For 9.0, ready to run.
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
        Err(why) => fail!(Corrupt, "the kernels of {name} do not unpack: {why}"),
    }
}

/// What a source was compiled to.
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

/// All sources.
pub const MODULES: [Module; 11] = [
    compiled!("move", Move),
    compiled!("convert", Convert),
    compiled!("sum", Sum),
    compiled!("pages", PageBoxes PageScores),
    compiled!("top", Top),
    compiled!("attend_prefill", Prefill),
    // Latent rows alone, as `latent_decode`: other attention goes on without.
    compiled!("attend_latent",),
    compiled!("attend_decode", Decode),
    compiled!("estimate", Estimate),
    compiled!("heavy", Add Keep Compact),
    compiled!("latent_decode",),
];

/// Places of [`MODULES`].
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

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The place of its module in [`MODULES`].
    pub module: usize,
    /// The function's name.
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Shared memory that is asked for when it is launched.
    pub shared_bytes: u32,
}

/// Most launches of a call.
pub const MAX_STEPS: usize = 4;
/// Shared memory that a block of threads can have on compute capability 9.0: the most there is.
pub const MOST_SHARED: u32 = 227 << 10;

/// Launches as they are told.
struct Steps<'a> {
    all: &'a mut Vec<Step>,
    /// Shared memory that a block of threads can have.
    shared_bytes: u32,
}

impl Steps<'_> {
    /// One more, of blocks of so many threads.
    fn add(&mut self, module: usize, name: &'static str, grid: [u32; 3], block: u32) -> Result<()> {
        self.add_with(module, name, grid, block, 0)
    }

    /// The same with shared memory.
    fn add_with(
        &mut self,
        module: usize,
        name: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
    ) -> Result<()> {
        if shared_bytes > self.shared_bytes {
            let there = self.shared_bytes;
            fail!(Unsupported, "{name} takes {shared_bytes} bytes of shared memory, {there} are");
        }
        if self.all.try_reserve(1).is_err() {
            return Err(Status::NoMem.into());
        }
        self.all.push(Step { module, name, grid, block: [block, 1, 1], shared_bytes });
        Ok(())
    }
}

/// The launches of a call, in this order on one stream, where a block of threads can have so much
/// shared memory; they replace those in `steps`. What is wrong with a call is said here: a kernel
/// checks nothing.
pub fn steps(call: &Call, shared_bytes: u32, steps: &mut Vec<Step>) -> Result<()> {
    steps.clear();
    let Some(kind) = Kind::of(call.kind) else {
        fail!(Unsupported, "kernel {} is none of this device", call.kind)
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
