//! The C boundary: what `include/kvtier/kvtier.h` declares, and no logic.
//!
//! The macros of `crates/macros` carry the boilerplate: `#[capi]` guards a function, and
//! `derive(Plain)` checks a struct. `guard` catches panics, `handle` resolves handles, `structs` and
//! `slice` read what the caller wrote. All other files hold one noun, or a part of one. Functions
//! and structs are written out, since cbindgen reads the sources before macros are expanded.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(non_camel_case_types)]

pub(crate) mod abi;
pub mod account;
pub mod attention;
pub mod blocks;
pub mod blocks_hold;
pub mod budget;
pub mod buffer;
pub mod clear;
pub mod device;
pub mod device_custom;
pub mod device_event;
pub mod device_kernel;
pub mod device_move;
pub mod device_test;
pub mod error;
pub mod event;
pub mod feature;
pub mod job;
pub mod kernel;
pub mod kernel_pages;
pub mod logging;
pub mod media;
pub mod model;
pub mod model_look;
pub mod model_table;
pub mod namespace;
pub mod namespace_look;
pub mod offload;
pub mod offload_device;
pub mod offload_fork;
pub mod offload_keep;
pub mod offload_move;
pub mod offload_stats;
pub mod op;
pub mod policy;
pub mod policy_advice;
pub mod policy_evict;
pub mod policy_keep;
pub mod policy_select;
pub mod policy_stats;
pub mod policy_use;
pub mod prefill;
pub mod queue;
pub mod remote;
pub mod remote_custom;
pub mod runtime;
pub mod session;
pub(crate) mod session_begin;
pub mod session_move;
pub mod session_plan;
pub mod sparse;
pub mod sparse_ask;
pub mod sparse_called;
pub mod sparse_custom;
pub mod sparse_lists;
pub mod sparse_rows;
pub mod sparse_seat;
pub mod sparse_tell;
pub mod spec;
pub mod status;
pub mod store;
pub mod store_change;
pub mod store_events;
pub mod store_rows;
pub mod store_stats;
pub mod stream;
pub mod stream_look;
pub mod stream_opts;
pub mod stream_plan;
pub mod stream_use;
pub mod trace;
pub mod version;
pub mod view;
pub mod work;
