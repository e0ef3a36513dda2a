//! Where bytes rest: memory of the device, memory of the host, files.

pub mod device;
pub mod disk;
pub mod host;
