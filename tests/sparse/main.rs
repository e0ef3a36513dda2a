//! Sparse policies and the attention kernels they serve.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod attention;
mod decode;
mod oracle;
mod prefill;
mod reference;
mod serve;
