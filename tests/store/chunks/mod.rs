//! The chunk table against a naive model, over random valid and invalid calls; lookups against
//! their definition, token by token.

use kvtier::base::budget::Tier;
use kvtier::base::status::Status;
use kvtier::meta::chunks::{
    Arrival, Begin, CELL_BYTES, CHUNK_BYTES, Cell, Chunks, Dropped, Location, NewChunk, Shape,
    StoredForm,
};
use kvtier::meta::index::NONE;
use kvtier::meta::key::Key;
use proptest::prelude::*;

mod both;
mod measure;
mod naive;
mod reuse;
mod runs;

use both::{Call, Pair};
use naive::TOKENS;

fn call() -> impl Strategy<Value = Call> {
    (0u8..48, any::<u16>(), any::<u16>(), 0u16..1024)
}

#[test]
fn chunk_table_matches_a_naive_model() {
    let config = ProptestConfig { cases: 300, ..ProptestConfig::default() };
    proptest!(config, |(calls in prop::collection::vec(call(), 1..400))| {
        let mut pair = Pair::new(false);
        for (what, a, b, c) in calls {
            match what {
                0..=7 => pair.call_chunk((what, a, b, c)),
                // Adds are more frequent than removals.
                8..=16 => pair.call_chunk((what % 3, a, b, c)),
                40..=45 => pair.add_with_parent_key((a, b, c)),
                46..=47 => pair.join(u32::from(a % 7), u32::from(b % 7)),
                _ => pair.call_cell((what - 17, a, b, c)),
            }
            pair.compare();
        }
        pair.tear_down();
    });
}

#[test]
fn cell_states_match_a_naive_model() {
    let config = ProptestConfig { cases: 300, ..ProptestConfig::default() };
    proptest!(config, |(calls in prop::collection::vec(call(), 1..400))| {
        let mut pair = Pair::new(true);
        let first = root(1);
        let slot = pair.table.add(&first).expect("room").slot();
        pair.model.add(slot, &first);
        for (what, a, b, c) in calls {
            pair.call_cell((what % 17, a, b, c));
            pair.compare();
        }
        pair.tear_down();
    });
}

fn table(layers: usize, max_chunks: usize) -> Chunks {
    Chunks::new(Shape { layers, chunk_tokens: TOKENS, max_chunks }).expect("small")
}

fn root(n: u64) -> NewChunk {
    let mut key = Key::default();
    // Keys differ in every byte, as hashes do.
    for (i, bytes) in key.0.chunks_exact_mut(8).enumerate() {
        let mixed = (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17 * i as u32 + 31);
        bytes.copy_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
    let (position, valid_tokens, owner) = (0, TOKENS, NONE);
    NewChunk { key, namespace: 0, parent: NONE, position, valid_tokens, owner, holes: true }
}

#[test]
fn cell_keeps_its_place_while_it_is_read() {
    let mut table = table(1, 1);
    let chunk = table.add(&root(1)).expect("room").slot();
    let cell = Cell { chunk, layer: 0 };
    assert_eq!(table.begin_store(cell, Tier::Host).expect("sound"), Begin::Started);
    assert_eq!(table.begin_store(cell, Tier::Host).expect("sound"), Begin::InFlight);
    assert_eq!(table.begin_store(cell, Tier::Disk).expect("sound"), Begin::InFlight);
    table.end_store(cell, Tier::Host, Some(Location::Host(3))).expect("a store under way");
    assert_eq!(table.begin_store(cell, Tier::Disk).expect("sound"), Begin::Resident);
    table.begin_copy(cell, Tier::Host, Tier::Disk).expect("a resident cell");
    assert_eq!(table.begin_drop(cell, Tier::Host).expect("no references"), Dropped::Deferred);
    assert_eq!(table.begin_store(cell, Tier::Host).expect("sound"), Begin::InFlight);
    assert!(table.end_read(cell, Tier::Host).is_err(), "the read belongs to the copy");
    assert!(table.remove(chunk, |_, _| ()).is_err());
    let place = Location::Disk { spot: 1, seal: 2, coded: StoredForm::PLAIN };
    let freed = table.end_copy(cell, Tier::Disk, Arrival::Arrived(place)).expect("a copy");
    assert_eq!(freed, Some(Location::Host(3)));
    table.retain(chunk).expect("a live chunk");
    assert_eq!(table.begin_drop(cell, Tier::Disk).expect_err("held").status(), Status::Busy);
    table.begin_copy(cell, Tier::Disk, Tier::Host).expect("a resident cell");
    let freed = table.end_copy(cell, Tier::Host, Arrival::BadSource).expect("a copy under way");
    assert_eq!((freed, table.counts().lost), (Some(place), [0, 0, 1, 0]));
    assert!(table.release(chunk).expect("it was held"));
}

#[test]
fn reused_slot_is_a_new_chunk() {
    let mut table = table(2, 3);
    let above = table.add(&root(1)).expect("room").slot();
    let below = NewChunk { parent: above, position: 1, ..root(2) };
    let below = table.add(&below).expect("room").slot();
    let generation = table.chunk(above).expect("live").generation();
    table.remove(above, |_, _| ()).expect("holes are allowed");
    assert_eq!(table.add(&root(3)).expect("room").slot(), above);
    assert_eq!(table.parent(below), None);
    assert!(table.chunk_of(above, generation).is_none());
    table.remove(below, |_, _| ()).expect("a leaf");
    assert_eq!(table.chunk(above).map(|row| row.children()), Some(0));
}

#[test]
fn orphan_chunk_is_linked_when_its_parent_arrives() {
    let mut table = table(1, 5);
    let at = |n: u64, position| NewChunk { position, holes: false, ..root(n) };
    // Two chunks continue the second chunk, which is missing.
    let orphans =
        [4, 5].map(|n| table.add_with_parent_key(&at(n, 2), &root(2).key).expect("room").slot());
    let plain = table.add(&at(6, 1)).map_err(|error| error.status());
    assert_eq!(plain, Err(Status::Invalid), "without a key there is no parent");
    assert!(orphans.iter().all(|&one| table.parent(one).is_none() && table.is_removable(one)));
    assert_eq!(table.parent_key(orphans[0]), Some(&root(2).key));
    let first = table.add(&at(1, 0)).expect("room").slot();
    let second = NewChunk { parent: first, ..at(2, 1) };
    let second = table.add(&second).expect("room").slot();
    assert_eq!(orphans.map(|one| table.parent(one)), [Some(second); 2]);
    let row = table.chunk(second).expect("live");
    assert_eq!((row.children(), row.is_rejoined(), row.is_blocked()), (2, true, true));
    assert_eq!(table.chunk(first).map(|row| row.children()), Some(1));
    // Removable one after the other, from the end of the path.
    assert_eq!(table.remove(orphans[0], |_, _| ()).expect("a leaf"), None);
    assert_eq!(table.remove(orphans[1], |_, _| ()).expect("a leaf"), Some(second));
    assert_eq!(table.remove(second, |_, _| ()).expect("a leaf"), Some(first));
    table.remove(first, |_, _| ()).expect("a leaf");
    // A removed orphan no longer waits for its parent.
    let gone = table.add_with_parent_key(&at(4, 1), &root(1).key).expect("room").slot();
    table.remove(gone, |_, _| ()).expect("a leaf");
    let first = table.add(&at(1, 0)).expect("room").slot();
    assert_eq!(table.chunk(first).map(|row| (row.children(), row.is_rejoined())), Some((0, false)));
}

#[test]
fn reader_count_is_limited() {
    let mut table = table(1, 1);
    let cell = Cell { chunk: table.add(&root(1)).expect("room").slot(), layer: 0 };
    table.begin_store(cell, Tier::Host).expect("sound");
    table.end_store(cell, Tier::Host, Some(Location::Host(0))).expect("a store under way");
    for _ in 0..u16::MAX {
        table.begin_read(cell, Tier::Host).expect("below the limit");
    }
    assert_eq!(table.begin_read(cell, Tier::Host).expect_err("one more").status(), Status::Again);
    assert!(table.begin_copy(cell, Tier::Host, Tier::Device).is_err());
    assert_eq!(table.marks(cell.chunk).expect("live")[0].arriving(), 0);
    for _ in 0..u16::MAX {
        assert_eq!(table.end_read(cell, Tier::Host).expect("as many"), None);
    }
    assert!(table.is_removable(cell.chunk));
}

#[test]
fn row_sizes_and_limits_are_as_documented() {
    assert_eq!((CELL_BYTES, CHUNK_BYTES), (33, 96));
    let shape = Shape { layers: 32, chunk_tokens: 256, max_chunks: 312_500 };
    assert_eq!(Chunks::bytes_of(shape), 312_500 * (32 * 33 + 96 + 16) + 64);
    assert!(Chunks::bytes_of(shape) < 1 << 30, "10,000,000 cells in 1 GiB");
    for (layers, chunk_tokens, max_chunks) in [
        (0, 1, 1),
        (4097, 1, 1),
        (1, 0, 1),
        (1, 1 << 16, 1),
        (1, 1, usize::MAX),
        (4096, 1, 1 << 21),
    ] {
        assert!(Chunks::new(Shape { layers, chunk_tokens, max_chunks }).is_err());
    }
    let mut none = table(1, 0);
    assert_eq!(none.add(&root(0)).expect_err("no room").status(), Status::Limit);
    assert_eq!(none.find(&root(0).key), None);
}
