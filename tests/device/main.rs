//! Devices: the contract of all, and the CUDA device over the fake driver.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod contract;
mod cuda;
mod cuda_batches;
mod cuda_engine;
mod cuda_peers;
mod cuda_place;
mod cuda_promise;
mod cuda_wander;
mod cuda_window;
mod direct;
mod edges;
mod verify;
mod whole;
mod windows;
