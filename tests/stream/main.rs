//! Weight streaming: model files, plans, the streamer and its threads.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod budgets;
mod cases;
mod drivers;
mod faults;
mod gate;
mod mixes;
mod models;
mod oracle;
mod plan;
mod quits;
mod random;
mod reference;
mod shrinks;
mod slow;
mod state_machine;
mod sums;
mod threads;
mod weights;
mod windows;
mod world;
