//! The lowest layer of the library: runtime, ops, budgets, memory, spec strings. It imports no
//! higher layer.

pub mod account;
pub mod budget;
pub mod callback;
pub mod checksum;
pub mod clock;
pub mod core;
pub mod exposition;
pub mod fault;
pub mod fork;
pub mod half;
pub mod item;
pub mod json;
pub mod json_out;
pub mod library;
pub mod list_pool;
pub mod logging;
pub mod machine;
pub mod memory;
pub mod notifier;
pub mod op;

pub mod panic;

pub mod queue;
pub mod random;
pub mod runtime;
pub mod slab;

pub mod spec;
pub mod status;
pub mod sync;
pub mod window;
pub mod worker;
pub mod zeroed;
