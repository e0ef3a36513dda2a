//! Audits, compared with attention in binary64.

use kvtier::offload::BlockSelection;
use kvtier::sparse::{Context, Kind};

use super::{BLOCK, PlaneShape, World, decode_context, rows, shape};

/// Share of the attention that each of `blocks` gets from queries of a layer to these blocks, and
/// to the tail if `has_tail`. Computed by the rule of the manual.
fn shares(
    world: &World,
    layer: usize,
    (query, first): (&[f32], u32),
    blocks: &[u32],
    has_tail: bool,
) -> Vec<f64> {
    let shape = &world.shape;
    let (dim, heads) = (shape.key_dim as usize, shape.query_heads as usize);
    let row = shape.key_heads as usize * dim;
    let (stored, _) = world.offload.tokens(layer as u32).expect("a layer");
    let of = |&id: &u32| id * BLOCK..(id + 1) * BLOCK;
    let tail = stored..if has_tail { world.tokens(layer) } else { stored };
    let all: Vec<u32> = blocks.iter().flat_map(of).chain(tail).collect();
    let left = world.offload.retained(layer as u32).expect("a layer");
    let mut got = vec![0.0; blocks.len() + 1];
    for (at, numbers) in query.chunks(dim).enumerate() {
        let (token, head) = (first + (at / heads) as u32, at % heads);
        let key_head = head / (heads / shape.key_heads as usize);
        let sees = |position: u32| {
            let list = |lists| if lists == 1 { 0 } else { key_head };
            let is_left = left
                .as_ref()
                .is_none_or(|left| left.positions(list(left.lists())).any(|one| one == position));
            position <= token && is_left
        };
        let weight = |position: u32| {
            let from = position as usize * row + key_head * dim;
            let key = &world.layers[layer].k[from..from + dim];
            let sum: f64 =
                key.iter().zip(numbers).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            (sum / (dim as f64).sqrt()).exp()
        };
        let seen = all.iter().enumerate().filter(|(_, position)| sees(**position));
        let weights: Vec<(usize, f64)> = seen.map(|(i, &p)| (i, weight(p))).collect();
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        for (i, weight) in weights {
            got[(i / BLOCK as usize).min(blocks.len())] += weight / total;
        }
    }
    got.pop();
    got
}

/// Wanted blocks, found blocks, and the found attention in millionths.
fn model(shares: &[f64], blocks: &[u32], chosen: &[u32]) -> (u64, u64, f64) {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
    let is_chosen = |at: &&usize| chosen.contains(&blocks[**at]);
    let found = order[..chosen.len()].iter().filter(is_chosen).count() as u64;
    let got: f64 = order.iter().filter(is_chosen).map(|&at| shares[at]).sum();
    (chosen.len() as u64, found, 1e6 * got / shares.iter().sum::<f64>())
}

struct Sum {
    audited: u64,
    wanted: u64,
    found: u64,
    ppm: f64,
}

impl Sum {
    fn add(&mut self, (wanted, found, ppm): (u64, u64, f64)) {
        self.audited += 1;
        self.wanted += wanted;
        self.found += found;
        self.ppm += ppm;
    }

    fn check(&self, world: &World) {
        let stats = world.offload.stats();
        let got = (stats.audited, stats.wanted, stats.found);
        assert_eq!(got, (self.audited, self.wanted, self.found));
        let error = (stats.found_ppm as f64 - self.ppm).abs();
        assert!(error < 3.0 * self.audited as f64 + 1.0, "{} and {}", stats.found_ppm, self.ppm);
        let recall = stats.recall().expect("it was audited");
        assert_eq!(recall, self.found as f64 / self.wanted as f64);
    }
}

const NOTHING: Sum = Sum { audited: 0, wanted: 0, found: 0, ppm: 0.0 };

/// Selections by a policy and by the engine, of whole layers and of parts, with and without
/// evicted tokens, with a buffer of a few blocks.
#[test]
pub fn audit_counts_match_attention() {
    for seed in 0..12u64 {
        let kind = if seed % 3 == 2 { Kind::Latent } else { Kind::Split };
        let ring = (2, if seed % 2 == 0 { 5 * BLOCK } else { 256 });
        let policies = ["knorm(budget=90)", "quest(budget=24,page=8,dense=1)"];
        let mut world = World::with(seed + 61, shape(kind), "store(host=4MiB)", policies, ring);
        world.offload.audit(1).expect("memory");
        assert_eq!(world.offload.audit_interval(), 1);
        world.put(175);
        if seed % 4 == 3 {
            let context = Context { is_prefill: true, tokens: 175, ..Context::default() };
            assert!(world.offload.evict(1, &context).expect("sound"));
        }
        let mut sum = NOTHING;
        let tokens = world.tokens(0);
        for turn in 0..8u32 {
            let count = 1 + turn % 2;
            let numbers = world.query(count);
            let query = rows(&numbers, count, world.shape.query_heads, world.shape.key_dim);
            let context = Context { first_query: tokens - count, ..decode_context(tokens) };
            let all: Vec<u32> = (0..10).collect();
            let some: Vec<u32> = (0..10).filter(|id| (id + turn) % 3 != 0).collect();
            let (which, layer) = match turn % 4 {
                0 | 1 => (BlockSelection::All, 1),
                2 => (BlockSelection::Blocks(&some), 2),
                _ => (BlockSelection::Chosen(&some[..3]), 2),
            };
            let load = world.offload.load(0, layer, which, Some(&query), &context);
            match load.map_err(|error| error.status()) {
                Ok(_) => {}
                // The buffer may be too short: two queries of four heads can want many blocks.
                Err(kvtier::base::status::Status::Limit) => continue,
                Err(other) => panic!("{other:?}"),
            }
            let chosen = world.offload.blocks(0).expect("a buffer").to_vec();
            world.offload.done(0).expect("a buffer");
            let candidates = if let BlockSelection::Blocks(some) = which { some } else { &all };
            if chosen.len() == candidates.len() {
                continue;
            }
            let has_tail = !matches!(which, BlockSelection::Blocks(_));
            let asked = (numbers.as_slice(), tokens - count);
            let shares = shares(&world, layer as usize, asked, candidates, has_tail);
            sum.add(model(&shares, candidates, &chosen));
        }
        assert!(sum.audited > 1, "seed {seed}");
        sum.check(&world);
        world.offload.audit(0).expect("it is off");
        assert_eq!(world.offload.audit_interval(), 0);
    }
}

/// Every third load that leaves out blocks is audited; loads of all blocks do not count.
#[test]
pub fn audit_interval_is_obeyed() {
    let spec = "quest(budget=24,page=8,dense=1)";
    let mut world = World::open(71, Kind::Split, "store(host=4MiB)", spec);
    world.offload.audit(3).expect("memory");
    world.put(160);
    let shape = world.shape;
    let mut cuts = 0;
    for turn in 0..30 {
        let numbers = world.query(1);
        let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
        let query = (turn % 5 != 0).then_some(&query);
        let layer = turn % 3;
        let count = world.offload.load(0, layer, BlockSelection::All, query, &decode_context(160));
        cuts += u64::from(count.expect("room") < 10);
        world.offload.done(0).expect("a buffer");
    }
    assert!(cuts > 10);
    assert_eq!(world.offload.stats().audited, cuts.div_ceil(3));
    // A missing block: the load continues, and nothing is counted.
    let before = world.offload.stats();
    world.offload.audit(1).expect("memory");
    let session = world.session;
    world.store.with(|core| core.truncate(session, 0)).expect("cut");
    world.store.with(|core| core.append(session, &[1 << 30; 160])).expect("room");
    let numbers = world.query(1);
    let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
    let count = world.offload.load(0, 1, BlockSelection::All, Some(&query), &decode_context(160));
    assert!(count.expect("begun") < 10);
    assert_eq!(world.offload.stats().audited, before.audited);
}

/// A layer that was selected by the query of the layer before is audited by its own query.
#[test]
pub fn prefetched_layer_is_audited_by_its_own_query() {
    let spec = "predict(of=quest(budget=24,page=8,dense=0))";
    let mut world = World::with(73, shape(Kind::Split), "store(host=4MiB)", ["", spec], (3, 256));
    world.offload.audit(1).expect("memory");
    world.put(150);
    let mut sum = NOTHING;
    for _ in 0..20 {
        let tokens = world.tokens(0) + 1;
        world.append(1);
        world.offload.begin(&decode_context(tokens)).expect("room");
        for layer in 0..3u32 {
            world.put_as(layer as usize, 1, PlaneShape::Plain).expect("room");
            let numbers = world.query(1);
            let query = rows(&numbers, 1, world.shape.query_heads, world.shape.key_dim);
            let (buffer, loaded) = world.offload.take(layer, Some(&query)).expect("loaded");
            let chosen = world.offload.blocks(buffer).expect("a buffer").to_vec();
            let stored = tokens - loaded.tail_tokens;
            world.check(buffer, layer as usize, stored..tokens);
            let all: Vec<u32> = (0..stored / BLOCK).collect();
            if chosen.len() < all.len() {
                let asked = (numbers.as_slice(), tokens - 1);
                let shares = shares(&world, layer as usize, asked, &all, true);
                sum.add(model(&shares, &all, &chosen));
            }
            world.offload.give_back(layer).expect("it was taken");
        }
    }
    assert!(sum.audited >= 20, "{}", sum.audited);
    sum.check(&world);
}
