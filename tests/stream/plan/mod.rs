//! Plans: against numbers measured and simulated by others, against every possible
//! placement of small models, and against budgets counted again.

mod chunks;
mod golden;
mod grains;
mod hostile;
mod lean;
mod placement;
mod same;
mod setup;
mod shown;
mod table;
mod windows;
