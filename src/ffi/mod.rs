//! The C boundary: what `include/kvtier/kvtier.h` declares, and no logic.
//!
//! `abi` has the machinery: guards against panics, handles, structs that grow, pointers with a
//! length. The other modules are the nouns of the header, types before functions. Every function
//! and struct is written out, because cbindgen reads the sources before macros are expanded; the
//! attribute `capi` and the derive `Plain` (`crates/macros`) add what all of them have in common.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(non_camel_case_types)]
// `struct_size`, `reserved`, lengths, and the constants of a group have no comment of their own.
#![allow(missing_docs)]

pub(crate) mod abi;
pub mod attention;
pub mod base;
pub mod device;
pub mod memory;
pub mod offload;
pub mod policy;
pub mod runtime;
pub mod session;
pub mod sparse;
pub mod store;
pub mod stream;
pub mod trace;
