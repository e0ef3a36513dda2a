//! Introspection of a store: lookups, plans, bandwidth, counters. The state runs in one thread, as
//! in simulations, and is compared with a naive reading of the rules.

mod figures;
mod lookups;
mod measure;
mod naive;
mod pins;
mod plans;
mod retention;
mod speeds;
mod warnings;
mod world;
