//! Stores with a device tier: simulations, and real threads over a simulated device.

pub mod batches;
mod behind;
pub mod device_store;
mod faults;
mod moves;
mod refusals;
mod sim;
mod tight;
