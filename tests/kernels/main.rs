//! Device kernels, run by the CPU or, if `KVTIER_GPU` is set, by a GPU.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod attention;
mod gpu;
mod plain;
