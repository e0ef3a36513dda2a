//! Facts without payload: objects by id, their tree and counts, lists over
//! them, and what it costs to compute them again.

pub mod cost;
pub mod index;
pub mod list;
pub mod objects;
pub mod sessions;
