//! A small engine for Llama models on candle. Its conversations survive a restart: their KV is in a
//! store of kvtier, from which the next process continues.

#![forbid(unsafe_code)]

pub mod cache;
pub mod chat;
pub mod llama;
