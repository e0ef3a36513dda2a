//! The cost of a put does not grow with the sequence, also after tokens were evicted. An allocator
//! that sees every thread of this process counts bytes.

use std::sync::atomic::Ordering;

use kvtier::base::op::OpOpts;
use kvtier::base::runtime::Runtime;
use kvtier::base::spec::Spec;
use kvtier::base::sync::Arc;
use kvtier::offload::{Offload, Opts, Policies};
use kvtier::sparse::{Context, Kind, Shape, registry};
use kvtier::store::handle::Store;
use kvtier::store::state::session::{LayerViews, PlaneView};

use kvtier_testkit::fixtures::{offload, store as support};

use crate::{BYTES, alone};

const SHAPE: Shape = Shape {
    layers: 2,
    query_heads: 8,
    key_heads: 8,
    key_dim: 2,
    value_dim: 2,
    scale: 0.0,
    kind: Kind::Split,
    block_tokens: 16,
    max_tokens: 1 << 14,
};
const ROW: usize = 16;
const PROMPT: u32 = 512;
const TURNS: u32 = 4000;

struct World {
    offload: Offload,
    session: u32,
    store: Arc<Store>,
    // Dropped last.
    _runtime: Runtime,
}

fn open(decode: &str) -> World {
    let runtime = support::runtime();
    let spec = support::spec_of("store(host=16MiB)");
    let store = Arc::new(Store::open(runtime.core(), None, &spec).expect("opened"));
    let session = offload::open_session(&store, &SHAPE, 4);
    let policy = registry::make(&Spec::parse(decode).expect("sound"), &SHAPE).expect("sound");
    let policies = Policies { prefill: None, decode: Some(policy) };
    let opts = Opts { buffers: 1, policies, ..offload::opts(session, &SHAPE, 256) };
    let offload = Offload::open(&store, opts).expect("it fits");
    World { offload, session, store, _runtime: runtime }
}

impl World {
    fn put(&mut self, first: u32, tokens: u32) {
        let new: Vec<u32> = (first..first + tokens).collect();
        self.store.with(|core| core.append(self.session, &new)).expect("room");
        let rows: Vec<f32> = (0..tokens as usize * ROW)
            .map(|at| (first as usize * 31 + at * 7 % 97) as f32)
            .collect();
        for layer in 0..2 {
            let plane = || PlaneView {
                heads: 8,
                run_bytes: 8,
                head_stride_bytes: 8,
                ..PlaneView::canonical(rows.as_ptr() as u64, tokens, 64)
            };
            let views = LayerViews { k: plane(), v: Some(plane()) };
            // SAFETY: `rows` stay until the op has ended.
            let op = unsafe { self.offload.put(layer, first, tokens, &views, &OpOpts::default()) };
            if let Some(op) = op.expect("room") {
                op.wait(kvtier::base::op::RELEASED, 0).expect("it ends");
                op.remove();
            }
        }
    }
}

/// Bytes allocated in each quarter of many turns.
fn quarters(mut turn: impl FnMut(u32)) -> [u64; 4] {
    std::array::from_fn(|quarter| {
        let before = BYTES.load(Ordering::SeqCst);
        let from = quarter as u32 * TURNS / 4;
        (from..from + TURNS / 4).for_each(&mut turn);
        BYTES.load(Ordering::SeqCst) - before
    })
}

// One test only: allocations of a concurrent test would be counted.
#[test]
fn offload_put_allocates_independently_of_sequence_length() {
    let _alone = alone();
    // The lists grow with each token: 8 lists of up to 4,500 entries.
    let mut world = open("knorm(ratio=0.5)");
    world.put(0, PROMPT);
    let context = Context { is_prefill: true, tokens: PROMPT, ..Context::default() };
    for layer in 0..2 {
        assert!(world.offload.evict(layer, &context).expect("sound"));
    }
    let bytes = quarters(|turn| world.put(PROMPT + turn, 1));
    println!("a put: {:?} bytes", bytes.map(|bytes| bytes / u64::from(TURNS / 4)));
    // Tables that double cost a few bytes per token; a copy of the lists would cost 48 KiB per put.
    assert!(bytes.iter().all(|&bytes| bytes < u64::from(TURNS / 4) * 8192), "{bytes:?}");
    assert!(bytes[3] < 3 * bytes[0], "{bytes:?}");
    for layer in 0..2 {
        let left = world.offload.retained(layer).expect("a layer").expect("some were evicted");
        assert_eq!(left.lists(), 8);
        for at in 0..8 {
            assert_eq!(left.count(at), (PROMPT / 2 + TURNS) as usize);
            let new = left.positions(at).skip((PROMPT / 2) as usize);
            assert!(new.eq(PROMPT..PROMPT + TURNS));
        }
    }
    drop(world);

    // Tokens are evicted at each step.
    let mut world = open("h2o(sink=4,recent=100,budget=100)");
    world.put(0, PROMPT);
    let (mut there, mut peak) = (PROMPT, 0);
    let sums = vec![0.5; 8 * PROMPT as usize + 8];
    let mut step = |world: &mut World, tokens: u32, is_prefill: bool| {
        let context = Context { is_prefill, tokens, ..Context::default() };
        for layer in 0..2 {
            world.offload.observe(layer, 1, &sums[..8 * there as usize], there).expect("sound");
            assert!(world.offload.evict(layer, &context).expect("sound"));
            peak =
                peak.max(world.offload.retained(layer).expect("a layer").expect("some").count(7));
        }
        there = 205;
    };
    step(&mut world, PROMPT, true);
    let bytes = quarters(|turn| {
        world.put(PROMPT + turn, 1);
        step(&mut world, PROMPT + turn + 1, false);
    });
    println!("a step: {:?} bytes", bytes.map(|bytes| bytes / u64::from(TURNS / 4)));
    assert!(bytes[3] < 3 * bytes[0], "{bytes:?}");
    assert_eq!(peak, 204);
}
