//! Tiers: memory of the device, memory of the host, files, remotes.

pub mod device;
pub mod disk;
pub mod host;
pub mod remote;
