//! Copy engines: who moves bytes, sums them and compares them.

pub mod host;
