//! Attention kernels for devices, run on the CPU by an emulation of a device
//! (`ffi-tests/cuda/kernels`). Results are compared with attention in binary64, and with the
//! kernels and policies of the library.

mod chosen;
mod data;
mod decode;
mod estimate;
mod heavy;
mod prefill;
