//! Kernels: CUDA sources that stand here beside what they were compiled to, and how each call is
//! laid out on a device. All take one argument, the [`Call`] itself.

use crate::base::status::Result;
use crate::device::call::Call;

/// One source, compiled.
pub struct Module {
    /// Its file, without an ending.
    pub name: &'static str,
    /// For compute capability 8.0 and, compiled by the driver, all later ones. Ends with a zero.
    pub ptx: &'static [u8],
    /// For 9.0, ready to run.
    pub cubin_90: &'static [u8],
}

/// All sources.
pub const MODULES: [Module; 0] = [];

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

/// The launches of a call, in this order on one stream. What is wrong with a call is said here:
/// a kernel checks nothing.
pub fn steps(call: &Call, steps: &mut Vec<Step>) -> Result<()> {
    let _ = steps;
    crate::fail!(Unsupported, "kernel {} is none of this device", call.kind)
}
