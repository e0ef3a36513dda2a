//! What a store says of itself: lookups, plans, speeds, figures. The core is driven
//! in one thread, as in simulations, and compared with the rules read naively.

mod figures;
mod lookups;
mod measure;
mod naive;
mod pins;
mod plans;
mod speeds;
mod warnings;
mod world;
