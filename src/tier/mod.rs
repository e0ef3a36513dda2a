//! Where bytes rest: memory of the host, files.

pub mod disk;
pub mod host;
