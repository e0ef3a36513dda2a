//! Kernels of attention for devices, on the processor: their sources are compiled with what stands
//! in for a device (`ffi-tests/cuda/kernels`), and what they come to is compared with attention in
//! binary64 and with the kernels and policies of the library.

mod chosen;
mod data;
mod decode;
mod estimate;
mod heavy;
mod prefill;
