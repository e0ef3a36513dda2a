//! The command line tool.
mod bench;
fn main() {
    let g = std::env::args().nth(1).unwrap();
    bench::list();
    bench::run(&g, false, false);
}
