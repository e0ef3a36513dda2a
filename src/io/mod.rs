//! What this machine's kernel can do for files.

pub mod probe;
