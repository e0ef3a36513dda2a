//! Kernels for devices, run by the processor or, where `KVTIER_GPU` is set, by a GPU.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod attention;
mod gpu;
mod plain;
