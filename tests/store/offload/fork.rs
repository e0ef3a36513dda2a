//! Forks: two sequences that continue one.

use std::sync::atomic::Ordering;

use kvtier::base::op::{OpOpts, OpRef, RELEASED};
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::host::Host;
use kvtier::offload::BlockSelection;
use kvtier::sparse::{Context, Kind, Shape};
use kvtier::store::state::SessionOpts;
use kvtier::store::state::session::{LayerViews, PlaneView};

use super::faulty::{ALL, faulty};
use super::{BLOCK, LayerRows, PlaneShape, World, decode_context, policy, rows, shape};

impl World {
    /// Forks the sequence. Both continue with tokens of their own.
    fn fork(&mut self, seed: u64) -> World {
        let of = self.session;
        let session = self.store.with(|core| core.fork(of, &SessionOpts::default()));
        let session = session.expect("a session");
        let offload = self.offload.fork(&self.store, session).expect("the same tokens");
        let copy = |one: &LayerRows| LayerRows { k: one.k.clone(), v: one.v.clone() };
        World {
            random: Random::new(seed * 2 + 1),
            shape: self.shape,
            layers: self.layers.iter().map(copy).collect(),
            device: self.device.clone(),
            offload,
            session,
            next_token: self.next_token + seed as u32 * 100_000,
            store: self.store.clone(),
            runtime: self.runtime.clone(),
        }
    }

    /// Compares the blocks that the policy loads of a layer with those of a policy that saw the
    /// same keys. Returns their number.
    fn check_choice(&mut self, spec: &str, layer: u32) -> usize {
        let (shape, tokens) = (self.shape, self.tokens(layer as usize));
        let stored = self.offload.tokens(layer).expect("a layer").0;
        let row = (shape.key_heads * shape.key_dim) as usize;
        let mut beside = policy(spec, &shape).expect("a policy");
        let all = &self.layers[layer as usize].k;
        for id in 0..stored / BLOCK {
            let from = (id * BLOCK) as usize * row;
            let keys = rows(&all[from..], BLOCK, shape.key_heads, shape.key_dim);
            beside.seal(layer, id, id * BLOCK, &keys).expect("sound");
        }
        let numbers = self.query(1);
        let query = rows(&numbers, 1, shape.query_heads, shape.key_dim);
        let context = decode_context(tokens);
        let ids: Vec<u32> = (0..stored / BLOCK).collect();
        let mut right = Vec::new();
        beside.select(layer, Some(&query), &ids, &context, &mut right).expect("sound");
        self.offload.load(1, layer, BlockSelection::All, Some(&query), &context).expect("room");
        self.check(1, layer as usize, stored..tokens);
        assert_eq!(self.offload.blocks(1).expect("a buffer"), right);
        self.offload.done(1).expect("a buffer");
        right.len()
    }
}

/// Both sequences continue with tokens of their own, are truncated and forked again; each has the
/// rows that it put.
#[test]
pub fn forked_sequences_diverge() {
    let spec = "quest(budget=32,page=8,dense=1)";
    for seed in 1..9 {
        let kind = if seed % 2 == 0 { Kind::Split } else { Kind::Latent };
        let mut worlds = vec![World::open(seed, kind, "store(host=8MiB)", spec)];
        let mut random = Random::new(seed * 77 + 1);
        let tokens = 80 + random.below(60) as u32;
        worlds[0].put(tokens);
        for step in 0..24 {
            let which = random.below(worlds.len() as u64) as usize;
            let count = worlds.len();
            let world = &mut worlds[which];
            match random.below(6) {
                0 if count < 4 => {
                    let other = world.fork(10 * step + seed);
                    assert_eq!(other.offload.stats().loads, 0);
                    worlds.push(other);
                }
                1 => {
                    let tokens = random.below(u64::from(world.tokens(0)) + 1) as u32;
                    world.offload.truncate(tokens).expect("the tokens are stored");
                    world.was_cut(tokens);
                }
                2 | 3 if world.tokens(0) < 220 => world.put(1 + random.below(36) as u32),
                _ => world.put(1),
            }
            for world in &mut worlds {
                world.check_all();
                if world.tokens(0) > 0 {
                    world.check_choice(spec, 1);
                    world.check_choice(spec, 2);
                }
            }
        }
        assert!(worlds.len() > 1, "seed {seed}");
        // The first sequence is closed with its session; the others keep their rows.
        let first = worlds.remove(0);
        let (session, store) = (first.session, first.store.clone());
        drop(first);
        store.with(|core| core.close_session(session)).expect("closed");
        worlds.iter_mut().for_each(World::check_all);
        worlds.iter_mut().for_each(|world| world.put(20));
        worlds.iter_mut().for_each(World::check_all);
    }
}

/// Lists of kept tokens are shared until one sequence evicts; policies know the evicted tokens.
#[test]
pub fn fork_inherits_evictions() {
    let spec = "h2o(sink=4,recent=20,budget=8,heads=all)";
    let mut world = World::open(43, Kind::Split, "store(host=4MiB)", spec);
    world.put(150);
    let sums: Vec<f32> = (0..150).map(|at| if at / 8 == 5 { 9.0 } else { 0.01 }).collect();
    let context = Context { is_prefill: true, tokens: 150, ..Context::default() };
    world.offload.observe(0, 150, &sums, 150).expect("sound");
    assert!(world.offload.evict(0, &context).expect("sound"));
    let mut other = world.fork(3);
    let left = |world: &World| -> Vec<u32> {
        let left = world.offload.retained(0).expect("a layer").expect("some were evicted");
        left.positions(0).collect()
    };
    let right: Vec<u32> = (0..4).chain(40..48).chain(130..150).collect();
    assert_eq!((left(&world), left(&other)), (right.clone(), right.clone()));
    assert_eq!(other.offload.stats().evicted_tokens, 0);
    world.put(3);
    other.put(5);
    // The first new token is a heavy hitter in the one sequence, an old token in the other.
    for (world, tokens, heavy) in [(&mut world, 35, 4), (&mut other, 37, 32)] {
        let sums: Vec<f32> =
            (0..tokens).map(|at| f32::from(u8::from(at == heavy)) * 90.0).collect();
        world.offload.observe(0, 1, &sums, tokens).expect("sound");
        let context = decode_context(118 + tokens);
        assert!(world.offload.evict(0, &context).expect("sound"));
    }
    let of = |new: u32| (0..4).chain(40..48).chain(130 + new..150 + new).collect::<Vec<u32>>();
    assert_eq!((left(&world), left(&other)), (of(3), of(5)));
    for world in [&mut world, &mut other] {
        world.offload.load(0, 0, BlockSelection::All, None, &decode_context(150)).expect("room");
        let tokens = world.tokens(0);
        world.check(0, 0, 144..tokens);
        assert_eq!(world.offload.blocks(0).expect("a buffer"), [0, 2, 8]);
    }
}

/// The rejected call changes nothing.
#[test]
pub fn fork_of_another_sequence_is_rejected() {
    let mut world = World::open(47, Kind::Split, "store(host=4MiB)", "quest(budget=48)");
    world.put(70);
    let of = world.session;
    let fork = |world: &World, change: &dyn Fn(u32, &Arc<kvtier::store::handle::Store>)| {
        let session = world.store.with(|core| core.fork(of, &SessionOpts::default()));
        let session = session.expect("a session");
        change(session, &world.store);
        session
    };
    let cut = |to: u64, tokens: &'static [u32]| {
        move |session, store: &Arc<kvtier::store::handle::Store>| {
            store.with(|core| core.truncate(session, to)).expect("cut");
            store.with(|core| core.append(session, tokens)).expect("room");
        }
    };
    let shorter = fork(&world, &cut(69, &[]));
    let other_end = fork(&world, &cut(69, &[1 << 30]));
    let other_start = fork(&world, &cut(0, &[7; 70]));
    let longer = fork(&world, &cut(70, &[5, 6, 7]));
    let store = world.store.clone();
    for session in [shorter, other_end, other_start, of, 9999] {
        let status = world.offload.fork(&store, session).map(|_| ()).map_err(|e| e.status());
        let right = if session == 9999 { Status::NotFound } else { Status::Invalid };
        assert_eq!(status, Err(right), "session {session}");
    }
    let elsewhere = World::open(48, Kind::Split, "store(host=4MiB)", "");
    let status = world.offload.fork(&elsewhere.store, longer).map(|_| ());
    assert_eq!(status.map_err(|error| error.status()), Err(Status::Invalid));
    let other = world.offload.fork(&store, longer).expect("it has more");
    assert_eq!(other.tokens(2).expect("a layer"), (64, 6));
    drop(other);
    world.check_all();
    store.close(0).expect("closed");
    let status = world.offload.fork(&store, longer).map(|_| ()).map_err(|e| e.status());
    assert_eq!(status, Err(Status::Closed));
}

/// A full tail that could not be stored is copied, and is stored by the fork.
#[test]
fn unstored_full_tail_is_copied_by_fork() {
    let device = faulty(Arc::new(Host::default()));
    let shape = Shape { layers: 2, ..shape(Kind::Split) };
    let (spec, none) = ("store(host=4MiB,copiers=1)", ["", ""]);
    let mut world = World::on(device.clone(), 53, shape, spec, none, (2, 256));
    world.put(37);
    device.gather.store(ALL, Ordering::SeqCst);
    world.append(11);
    for layer in 0..2 {
        world.put_as(layer, 11, PlaneShape::Plain).expect("there is room in the tail");
    }
    let mut other = world.fork(5);
    for layer in 0..2 {
        assert_eq!(other.offload.tokens(layer).expect("a layer"), (32, 16));
    }
    device.gather.store(0, Ordering::SeqCst);
    other.put(3);
    other.check_all();
    assert_eq!(other.offload.tokens(1).expect("a layer"), (48, 3));
    world.put(20);
    world.check_all();
    other.check_all();
}

/// Puts under way at a fork: after their end both sequences find the blocks, whether the session
/// was forked before or after them.
#[test]
pub fn fork_shares_blocks_being_put() {
    for is_before in [false, true] {
        let mut world = World::open(59, Kind::Split, "store(host=4MiB)", "");
        // Dropped last.
        let _runtime = world.runtime.clone();
        world.append(64);
        let of = world.session;
        let store = world.store.clone();
        let fork = || store.with(|core| core.fork(of, &SessionOpts::default())).expect("room");
        let early = fork();
        let numbers: Vec<f32> = (0..64 * 16).map(|n| n as f32).collect();
        let plane = |dim: u32| PlaneView {
            heads: 2,
            run_bytes: u64::from(dim) * 4,
            head_stride_bytes: u64::from(dim) * 4,
            ..PlaneView::canonical(numbers.as_ptr() as u64, 64, u64::from(dim) * 8)
        };
        let views = LayerViews { k: plane(8), v: Some(plane(6)) };
        let ops: Vec<OpRef> = (0..3)
            .filter_map(|layer| {
                // SAFETY: `numbers` stay until the ops have ended.
                let put = unsafe { world.offload.put(layer, 0, 64, &views, &OpOpts::default()) };
                put.expect("room")
            })
            .collect();
        assert_eq!(ops.len(), 3);
        let session = if is_before { early } else { fork() };
        let mut other = world.offload.fork(&store, session).expect("the same tokens");
        for op in ops {
            op.wait(RELEASED, 0).expect("the op ends");
            op.remove();
        }
        drop(world);
        for layer in 0..3 {
            other.load(0, layer, BlockSelection::All, None, &decode_context(64)).expect("room");
            assert_eq!(other.wait(0).expect("the layer is loaded").tokens, 64);
            let views = other.views(0).expect("loaded");
            let [k, v] = super::on_device::numbers(super::on_device::current().as_ref(), &views);
            assert_eq!(k, numbers);
            assert_eq!(v, numbers[..64 * 12]);
            other.done(0).expect("a buffer");
        }
    }
}
