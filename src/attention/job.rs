//! What is asked of whoever runs a piece of a job.

use crate::base::status::Result;
use crate::fail;

/// Refuses a piece that is not one of so many, and scratch of fewer numbers than it needs.
pub fn check(what: &str, at: u32, of: u32, memory: &[f32], scratch: usize) -> Result<()> {
    if at >= of {
        fail!(Invalid, "{what} {at} of {of}");
    }
    if memory.len() < scratch {
        fail!(TooSmall, "{} numbers of scratch, {scratch} are needed", memory.len());
    }
    Ok(())
}
