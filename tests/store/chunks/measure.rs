//! Measurements, run by hand: `cargo test --release --test store chunks:: -- --ignored
//! --nocapture`.

use crate::chunks::{root, table};
use kvtier::base::budget::Tier;
use kvtier::meta::chunks::{Arrival, Cell, Chunks, Location, NewChunk, Shape, StoredForm};
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::meta::reuse::{ChunkReuse, find_reusable, plan_reuse};

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = text.split(' ').nth(1).expect("resident").parse().expect("a number");
    pages * 4096
}

fn ns(count: usize, mut body: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = std::time::Instant::now();
        body();
        best = best.min(start.elapsed().as_nanos() as f64 / count as f64);
    }
    best
}

#[test]
#[ignore = "a measurement"]
fn measure_find_in_a_million() {
    const COUNT: u64 = 1_000_000;
    let mut table = table(1, COUNT as usize);
    for n in 0..COUNT {
        table.add(&root(n)).expect("room");
    }
    let scattered = |n: u64| n.wrapping_mul(0x5851_F42D_4C95_7F2D) % COUNT;
    for (what, from) in [("there", 0), ("not there", COUNT)] {
        let keys: Vec<Key> = (0..512 * 400).map(|n| root(from + scattered(n)).key).collect();
        let (mut slots, mut found) = (vec![0; 512], vec![0; 512]);
        let find = ns(keys.len(), || keys.chunks(512).for_each(|k| table.find_many(k, &mut slots)));
        let exists =
            ns(keys.len(), || keys.chunks(512).for_each(|k| table.exists_many(k, &mut found)));
        let one = ns(keys.len(), || {
            assert_eq!(keys.iter().filter(|k| table.find(k).is_some()).count() == 0, from > 0)
        });
        println!("{what}: find {find:.0}, exists {exists:.0}, one by one {one:.0} ns a key");
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_ten_million_cells() {
    let (layers, max_chunks) = (32, 312_500);
    let before = resident_bytes();
    let mut table = Chunks::new(Shape { layers, chunk_tokens: 256, max_chunks }).expect("memory");
    let empty = resident_bytes() - before;
    let start = std::time::Instant::now();
    let mut path = Vec::new();
    let coded = StoredForm::new(1, 77).expect("it fits");
    for n in 0..max_chunks {
        let chunk = table
            .add(&NewChunk { position: n as u32 % 512, valid_tokens: 256, ..root(n as u64) })
            .expect("room")
            .slot();
        path.push(chunk);
        for layer in 0..layers {
            let cell = Cell { chunk, layer };
            table.begin_store(cell, Tier::Host).expect("sound");
            table.end_store(cell, Tier::Host, Some(Location::Host(n as u32))).expect("stored");
            table.begin_copy(cell, Tier::Host, Tier::Disk).expect("there");
            let place = Location::Disk { spot: n as u64, seal: 1, coded };
            table.end_copy(cell, Tier::Disk, Arrival::Arrived(place)).expect("copied");
        }
    }
    let cells = (layers * max_chunks) as f64;
    let each = start.elapsed().as_nanos() as f64 / cells / 4.0;
    let full = resident_bytes() - before;
    println!(
        "empty {} KiB, full {} MiB, {:.1} bytes a cell",
        empty >> 10,
        full >> 20,
        full as f64 / cells
    );
    println!(
        "used_bytes says {} MiB; {each:.0} ns a change of a cell while filling",
        table.used_bytes() >> 20
    );
    let layout = Layout::new(256, vec![Group::gqa(0..32, 8, 128, Dtype::Bf16).expect("whole")]);
    let (layout, path) = (layout.expect("sound"), &path[102_400..102_912]);
    let mut found = vec![ChunkReuse::default(); 512];
    let look_ns = ns(1, || {
        let reach = find_reusable(&table, &layout, path, &mut found).expect("sound");
        assert_eq!(reach.chunks, 512);
        plan_reuse(&table, &layout, path, 512, false, &mut found).expect("sound");
    });
    println!("look and plan_reuse, 512 chunks whole: {:.1} us", look_ns / 1e3);
    for &chunk in path {
        table.begin_drop(Cell { chunk, layer: 7 }, Tier::Host).expect("not the last");
    }
    let look_ns = ns(1, || {
        find_reusable(&table, &layout, path, &mut found).expect("sound");
        plan_reuse(&table, &layout, path, 512, false, &mut found).expect("sound");
    });
    println!("the same in two tiers: {:.1} us", look_ns / 1e3);
    let cell = |n: usize| Cell { chunk: path[n / 32 % 512], layer: n % 32 };
    let reads = ns(16_384, || {
        for n in 0..16_384 {
            table.begin_read(cell(n), Tier::Disk).expect("there");
            table.end_read(cell(n), Tier::Disk).expect("read");
        }
    });
    println!("a read begun and ended: {reads:.1} ns");
}
