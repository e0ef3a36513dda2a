//! Files: reading them, and what this machine's kernel can do for them.

pub mod files;
pub mod probe;
pub mod source;
