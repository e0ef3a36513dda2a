//! A failed truncation changes nothing.

use std::sync::atomic::Ordering;

use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::host::Host;
use kvtier::offload::BlockSelection;
use kvtier::sparse::{Context, Kind};

use super::faulty::{ALL, faulty};
use super::on_device::current;
use super::{PlaneShape, World, decode_context, rows, shape};

/// The blocks that the policy selects in each layer.
fn chosen(world: &mut World, query: &[f32]) -> Vec<Vec<u32>> {
    let shape = world.shape;
    let query = rows(query, 1, shape.query_heads, shape.key_dim);
    let context = decode_context(world.tokens(0));
    (0..3)
        .map(|layer| {
            world
                .offload
                .load(0, layer, BlockSelection::All, Some(&query), &context)
                .expect("begun");
            world.offload.wait(0).expect("loaded");
            let blocks = world.offload.blocks(0).expect("a buffer").to_vec();
            world.offload.done(0).expect("a buffer");
            blocks
        })
        .collect()
}

fn kept(world: &World, layer: u32) -> Option<Vec<u32>> {
    let left = world.offload.retained(layer).expect("a layer")?;
    Some((0..left.lists()).flat_map(|at| left.positions(at)).collect())
}

/// Whichever copy fails: no layer is truncated, lists and policies are unchanged, and the same call
/// succeeds later.
#[test]
pub fn failed_truncate_changes_no_layer() {
    for kind in [Kind::Split, Kind::Latent] {
        let copies = if kind == Kind::Split { 6 } else { 3 };
        for fails in 1..=copies {
            let inner = current().unwrap_or_else(|| Arc::new(Host::default()));
            let device = faulty(inner);
            let policies = ["knorm(budget=60)", "quest(budget=24,page=8,dense=0)"];
            let spec = "store(host=4MiB,copiers=1)";
            let mut world =
                World::on(device.clone(), 31 + fails, shape(kind), spec, policies, (2, 256));
            world.put(101);
            let context = Context { is_prefill: true, tokens: 101, ..Context::default() };
            assert!(world.offload.evict(1, &context).expect("sound"));
            world.put(6);
            let numbers = world.query(1);
            let before = (chosen(&mut world, &numbers), [0, 1, 2].map(|l| kept(&world, l)));
            assert!(before.0.iter().all(|blocks| !blocks.is_empty()));
            device.scatter.store(fails, Ordering::SeqCst);
            let cut = world.offload.truncate(53).map_err(|error| error.status());
            assert_eq!(cut, Err(Status::Io), "copy {fails} of {kind:?}");
            assert_eq!(device.scatter.load(Ordering::SeqCst), 0);
            device.stuck.store(0, Ordering::SeqCst);
            for layer in 0..3 {
                assert_eq!(world.offload.tokens(layer).expect("a layer"), (96, 11));
            }
            let after = (chosen(&mut world, &numbers), [0, 1, 2].map(|l| kept(&world, l)));
            assert_eq!(after, before);
            // The sequence continues after the failed call, or is truncated by the next call.
            if fails % 2 == 0 {
                world.put(9);
                world.check_uncut();
            }
            let most = world.offload.stats().cut_waits.count;
            world.offload.truncate(53).expect("all blocks are stored");
            assert!(world.offload.stats().cut_waits.count > most);
            world.was_cut(53);
            for layer in 0..3 {
                assert_eq!(world.offload.tokens(layer).expect("a layer"), (48, 5));
                let cut = |list: Vec<u32>| -> Vec<u32> {
                    list.into_iter().filter(|&at| at < 53).collect()
                };
                assert_eq!(kept(&world, layer), before.1[layer as usize].clone().map(cut));
            }
            world.put(30);
            world.check_uncut();
        }
    }
}

impl World {
    /// Compares layers from which nothing was evicted.
    fn check_uncut(&mut self) {
        for layer in [0, 2] {
            let tokens = self.tokens(layer);
            let (stored, _) = self.offload.tokens(layer as u32).expect("a layer");
            let context = decode_context(tokens);
            self.offload.load(0, layer as u32, BlockSelection::All, None, &context).expect("room");
            self.check(0, layer, stored..tokens);
            self.offload.done(0).expect("a buffer");
        }
    }
}

/// A block that is missing in one layer, or a closed store, truncates no layer. A truncation that
/// needs no block from the store succeeds.
#[test]
pub fn truncate_without_the_store_fails_or_succeeds_whole() {
    let spec = "store(host=4MiB)";
    let mut world = World::open(37, Kind::Split, spec, "");
    world.put(101);
    world.store.close(0).expect("closed");
    for layer in 0..3 {
        assert_eq!(world.offload.tokens(layer).expect("a layer"), (96, 5));
    }
    let cut = world.offload.truncate(53).map_err(|error| error.status());
    assert_eq!(cut, Err(Status::Closed));
    for layer in 0..3 {
        assert_eq!(world.offload.tokens(layer).expect("a layer"), (96, 5));
    }
    world.offload.truncate(99).expect("of the tail");
    world.offload.truncate(64).expect("whole blocks");
    // Only the first of these calls had to wait.
    assert_eq!(world.offload.stats().cut_waits.count, 1);
    for layer in 0..3 {
        assert_eq!(world.offload.tokens(layer).expect("a layer"), (64, 0));
    }
}

/// A full tail that could not be stored is truncated in place, and is stored when it is full
/// again.
#[test]
fn unstored_full_tail_is_truncated_in_place() {
    let device = faulty(Arc::new(Host::default()));
    let (spec, none) = ("store(host=4MiB,copiers=1)", ["", ""]);
    let mut world = World::on(device.clone(), 41, shape(Kind::Split), spec, none, (2, 256));
    world.put(37);
    device.gather.store(ALL, Ordering::SeqCst);
    world.append(11);
    for layer in 0..3 {
        world.put_as(layer, 11, PlaneShape::Plain).expect("there is room in the tail");
        assert_eq!(world.offload.tokens(layer as u32).expect("a layer"), (32, 16));
    }
    world.append(1);
    assert_eq!(world.put_as(1, 1, PlaneShape::Plain), Err(Status::Io));
    world.offload.truncate(43).expect("in the tail");
    world.was_cut(43);
    for layer in 0..3 {
        assert_eq!(world.offload.tokens(layer).expect("a layer"), (32, 11));
    }
    world.check_all();
    device.gather.store(0, Ordering::SeqCst);
    world.put(25);
    world.check_all();
    assert_eq!(world.offload.tokens(2).expect("a layer"), (64, 4));
}
