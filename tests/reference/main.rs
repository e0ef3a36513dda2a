//! A small engine over the attention kernels and sparse policies, with small trained models:
//! what they are, docs/reference.md says. `kvtier lab sparse` runs the same engine, which is kept
//! with the tool.

#[path = "../../src/bin/kvtier/reference/mod.rs"]
mod reference;

mod every;
mod long;
mod offloaded;
mod own;
mod perplexity;
mod recall;
mod same;
#[cfg(feature = "tool")]
mod tool;
mod torch;

use reference::{attend, cache, engine, model, numbers, policies, rows, text};
