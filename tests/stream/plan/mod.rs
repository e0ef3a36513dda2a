//! Plans, compared with numbers that others measured and simulated, with every possible placement
//! of small models, and with budgets counted again.

mod chunks;
mod golden;
mod granularity;
mod hostile;
mod lean;
mod placement;
mod same;
mod setup;
mod shown;
mod table;
mod windows;
