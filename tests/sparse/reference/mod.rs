//! A small engine over the attention kernels and sparse policies, with small trained models
//! (docs/internals/reference-engine.md). `kvtier lab sparse` runs the same engine, which is part of
//! the tool.

use kvtier_lab::reference;

mod every;
mod long;
mod offloaded;
mod own;
mod perplexity;
mod recall;
mod same;
mod torch;

use reference::{attend, cache, engine, model, policies, rows, text};
