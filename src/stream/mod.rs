//! Weight streaming: models larger than memory.
//!
//! [`model`] says what is in the files, [`units`] which bytes go together, [`plan`] where
//! each unit lives and what a pass will take. [`core`] decides what is read and copied
//! next; it has neither threads nor clock. [`streamer`] has both and carries that out.

pub mod core;
pub mod in_window;
pub mod model;
pub mod places;
pub mod plan;
pub mod streamer;
pub mod sums;
pub mod units;
