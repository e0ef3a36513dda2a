//! What is written down for others to read: keys, and records as bytes.

pub mod checkpoint;
pub mod codec;
pub mod fields;
pub mod keys;
pub mod record;
pub mod seal;
pub mod segment;
