//! Metadata without payload: layouts, keys and views; objects of policies with their prefix tree
//! and lists; the chunk table; recompute costs.

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
