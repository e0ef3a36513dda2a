//! What kvtier is tested with, and no part of the library:
//!
//! - [`disk`]: a simulated disk with torn writes, errors, rot and power failures.
//! - [`fixed`]: simulated model files.
//! - [`remote`]: a simulated remote, and the conformance suite of remotes.
//! - [`sim`]: the store in a simulation; `kvtier-sim` runs many seeds of it.
//! - [`fixtures`]: what tests of several packages have in common.
//!
//! The simulated device and the conformance suite of devices are in the library
//! (`kvtier::device`), since C exports both.

pub mod disk;
pub mod fixtures;
pub mod model_files;
pub mod remote;
pub mod sim;
