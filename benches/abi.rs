//! `cargo bench --bench abi`: the same bars as `kvtier bench abi`.

#[allow(dead_code)] // the tool also lists groups
#[path = "../src/bin/kvtier/bench/mod.rs"]
mod bench;

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let json = std::env::args().any(|arg| arg == "--json");
    bench::run("abi", quick, None, json).expect("it is there");
}
