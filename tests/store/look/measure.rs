//! Measurements, run by hand: `cargo test --release --test store look:: -- --ignored
//! --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use kvtier::base::sync::Arc;
use kvtier::format::keys::chain::Chain;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::key::Key;
use kvtier::meta::layout::{Group, Layout};
use kvtier::store::state::plans::PlanTerms;
use kvtier::store::state::session::{LayerViews, PlaneView, Views};
use kvtier::store::state::work::WorkerKind;
use kvtier::store::state::{
    CellRange, Config, Level, NamespaceOpts, SessionOpts, StoreState, TransferKind, Wanted,
};

fn best_ns(mut body: impl FnMut()) -> f64 {
    let mut best = f64::MAX;
    for _ in 0..200 {
        let start = Instant::now();
        body();
        best = best.min(start.elapsed().as_nanos() as f64);
    }
    best
}

/// Stores the layers of a session without copying any bytes.
fn store(core: &mut StoreState, session: u32, tokens: u32, layers: std::ops::Range<usize>) {
    let plane = || PlaneView::canonical(4096, tokens, 4);
    let views: Vec<_> =
        layers.clone().map(|_| LayerViews { k: plane(), v: Some(plane()) }).collect();
    let cell_range = CellRange {
        first_token: 0,
        tokens: u64::from(tokens),
        first_layer: layers.start,
        layers: layers.len(),
        by_layer: false,
        wanted: Wanted::All,
        views: Arc::new(Views::from(views)),
        after: None,
    };
    core.submit_cell_range(session, TransferKind::Put, Level::Ram, 0, cell_range).unwrap();
    while let Some(work) = core.take(WorkerKind::Copy) {
        core.done(work, Ok(()), 0);
    }
    assert!(core.is_idle());
}

#[test]
#[ignore = "a measurement"]
fn measure_a_lookup_of_128k_tokens() {
    const TOKENS: u32 = 131_072;
    let config = Config { host_bytes: 1 << 28, host_policy: "lru".into(), ..Config::default() };
    let mut core = StoreState::new(config, None, None).unwrap();
    let layout = Layout::new(256, vec![Group::gqa(0..32, 1, 2, Dtype::Bf16).unwrap()]).unwrap();
    let key = Key([1; 32]);
    let namespace = core.open_namespace(&NamespaceOpts { key, layout, holes: false }).unwrap();
    let tokens: Vec<u32> = (0..TOKENS).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect();
    let session = core.open_session(namespace, &SessionOpts::default()).unwrap();
    core.append(session, &tokens).unwrap();
    let mut keys = Vec::new();
    let hash = best_ns(|| {
        keys.clear();
        Chain::new(key, 256).unwrap().extend(&tokens, &[], &mut keys).unwrap();
    });
    println!("hashing alone {:.1} us", hash / 1e3);
    for (what, layers) in [("nothing", 0..0), ("31 of 32 layers", 0..31), ("all", 31..32)] {
        if !layers.is_empty() {
            store(&mut core, session, TOKENS, layers);
        }
        let whole = best_ns(|| {
            black_box(core.lookup(namespace, &tokens).unwrap().tokens);
        });
        let by_keys = best_ns(|| {
            black_box(core.lookup_keys(namespace, &keys, TOKENS.into()).unwrap().tokens);
        });
        let terms = PlanTerms::default();
        let plan = best_ns(|| {
            black_box(core.plan(session, &terms).unwrap().total_ns);
        });
        let reach = core.lookup_session(session).unwrap().now_tokens;
        let us = [whole, by_keys, plan].map(|ns| format!("{:.1}", ns / 1e3));
        println!("{what} there: lookup, by keys, plan: {us:?} us; {reach} tokens go on");
    }
}
