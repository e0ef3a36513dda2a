//! Stores with a device tier: simulations, and real threads over a simulated device.

pub mod batches;
mod behind;
mod faults;
mod moves;
mod refusals;
pub mod rig;
mod sim;
mod tight;
