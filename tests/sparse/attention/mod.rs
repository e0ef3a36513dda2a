//! Attention kernels, compared with their definition in f64.

mod data;
mod decode;
mod limits;
mod pages;
mod pieces;
mod placed;
mod prefill;
mod sums;
