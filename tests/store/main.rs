//! The store: its tables, its tiers, restarts, crashes, faults and offload.
#![cfg(not(feature = "shuttle"))]
#![allow(missing_docs)]

mod account;
mod api;
mod audit;
mod blocks;
mod cancel;
mod chunks;
mod codecs;
mod crash;
mod degraded;
mod device_tier;
mod disk_limit;
mod disk_tier;
mod end_to_end;
mod fsck;
mod keys;
mod linear;
mod look;
mod many_segments;
mod name;
mod namespaces;
mod offload;
mod regressions;
mod reserve;
mod resident;
mod review;
mod scenarios;
mod shared;
mod shrink;
mod sim;
mod slot_reclamation;
mod syncs;
mod table;
mod turns;
mod write_behind;
