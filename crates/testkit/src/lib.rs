//! Test tools of kvtier, which are no part of the library:
//!
//! - [`disk`]: a simulated disk with torn writes, errors, bit rot and power failures.
//! - [`model_files`]: simulated model files.
//! - [`remote`]: a simulated remote, and the conformance suite of remotes.
//! - [`sim`]: the simulation of the store; `kvtier-sim` runs many seeds of it.
//! - [`fixtures`]: tools that tests of several packages share.
//!
//! The simulated device and the conformance suite of devices are in the library (`kvtier::device`),
//! since C exports both.

pub mod disk;
pub mod fixtures;
pub mod model_files;
pub mod remote;
pub mod sim;
