//! Formats that others read: keys, codecs, and the records and checkpoints of the disk tier.

pub mod checkpoint;
pub mod codec;
pub mod fields;
pub mod keys;
pub mod record;
pub mod seal;
pub mod segment;
