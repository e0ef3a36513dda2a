//! The ground floor: what every other room stands on. Imports nothing above.

pub mod account;
pub mod budget;
pub mod callback;
pub mod checksum;
pub mod clock;
pub mod core;
pub mod fault;
pub mod fork;
pub mod item;
pub mod logging;
pub mod machine;
pub mod memory;
pub mod notifier;
pub mod op;
pub mod op_table;
pub mod owner;
pub mod panic;
pub mod queue;
pub mod runtime;
pub mod slab;
pub mod spare;
pub mod spec;
pub mod status;
pub mod sync;
pub mod worker;
pub mod zeroed;
