//! Where bytes rest: memory of the device, memory of the host, files, engines on other machines.

pub mod device;
pub mod disk;
pub mod host;
pub mod remote;
