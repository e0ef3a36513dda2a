//! The streamer as a whole, with real files, simulated files and a simulated device: whoever
//! is given a unit is given its bytes, whatever goes wrong and whoever else asks, and no call
//! waits for ever.

#[path = "support/model_files.rs"]
mod model_files;
#[path = "../src/bin/kvtier/reference/numbers.rs"]
#[allow(dead_code)]
mod numbers;

#[path = "stream/budgets.rs"]
mod budgets;
#[path = "stream/faults.rs"]
mod faults;
#[path = "stream/gate.rs"]
mod gate;
#[path = "stream/mixes.rs"]
mod mixes;
#[path = "stream/rig.rs"]
mod rig;
#[path = "stream/shrinks.rs"]
mod shrinks;
#[path = "stream/slow.rs"]
mod slow;
#[path = "stream/threads.rs"]
mod threads;
#[path = "stream/windows.rs"]
mod windows;
