//! Facts without payload: objects by id, their tree and counts, lists over
//! them, and what it costs to compute them again.

pub mod chunks;
pub mod cost;
pub mod dtype;
pub mod fairness;
pub mod index;
pub mod key;
pub mod layout;
pub mod list;
pub mod objects;
pub mod orphans;
pub mod reuse;
pub mod sessions;
pub mod timestamp_heap;
pub mod view;
