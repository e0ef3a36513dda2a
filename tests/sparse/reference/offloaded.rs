//! The reference engine with its KV in a store, layer by layer: results must be bit-identical to
//! those in memory, whatever policies do.

use std::time::Instant;

use kvtier::attention::{Rows, Scales};
use kvtier::base::op::{OpOpts, RELEASED};
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::{Result, Status};
use kvtier::base::sync::Arc;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::offload::{BlockSelection, Offload};
use kvtier::sparse::{Context, Kind, RetainedTokens, Shape};
use kvtier::store::handle::Store;
use kvtier::store::spec::StoreSpec;
use kvtier::store::state::session::{LayerViews, PlaneView};

use crate::reference::cache::{Cache, InMemory, KeySelection, KvRows};
use crate::reference::engine::Engine;
use crate::reference::model::{Form, Model, Sizes};
use crate::reference::policies::{Policies, make};
use kvtier_lab::reference::numbers::{Random, greatest};
use kvtier_testkit::fixtures::offload;

/// Keys and values in a store, of which two layers at most are in a ring.
pub struct Offloaded {
    offload: Offload,
    shape: Shape,
    session: u32,
    known: u32,
    kept: Vec<Option<RetainedTokens>>,
    store: Arc<Store>,
    // The last to go.
    _runtime: Runtime,
}

impl Offloaded {
    pub fn new(shape: &Shape) -> Result<Offloaded> {
        Offloaded::with_room(shape, "store(host=64MiB)", 2048)
    }

    /// One with another store, and buffers of so many tokens.
    pub fn with_room(shape: &Shape, store: &str, buffer_tokens: u32) -> Result<Offloaded> {
        let runtime = Runtime::open(RuntimeOpts { workers: 1, ..RuntimeOpts::default() })?;
        let spec = StoreSpec::parse(store)?;
        let store = Arc::new(Store::open(runtime.core(), None, &spec)?);
        let session = offload::open_session(&store, shape, 3);
        let opts = offload::opts(session, shape, buffer_tokens);
        let offload = Offload::open(&store, opts)?;
        let kept = vec![None; shape.layers as usize];
        Ok(Offloaded { offload, shape: *shape, session, known: 0, kept, store, _runtime: runtime })
    }

    /// Lends a layer of which tokens were evicted: the retained rows of each head together, as
    /// a cache that compacts has them.
    fn lend_kept(
        &self,
        keep: &RetainedTokens,
        positions: &[u32],
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()> {
        let kv = self.offload.kv(0)?;
        let heads = self.shape.key_heads;
        let lists: Vec<&[u32]> = (0..heads).map(|head| keep.of(head)).collect();
        let rows = lists.iter().map(|list| list.len()).max().unwrap_or(0);
        let gather = |from: &Rows<'_>| {
            let dim = from.dim() as usize;
            let mut to = vec![0.0f32; rows.max(1) * heads as usize * dim];
            for (head, list) in lists.iter().enumerate() {
                for (row, at) in list.iter().enumerate() {
                    let there = positions.binary_search(at).expect("it was loaded") as u32;
                    let numbers = from.row(there, head as u32).cast::<f32>();
                    for i in 0..dim {
                        // SAFETY: a row of the buffer.
                        to[(row * heads as usize + head) * dim + i] = unsafe { *numbers.add(i) };
                    }
                }
            }
            to
        };
        let (keys, values) = (gather(&kv.keys), gather(&kv.values));
        let of = |numbers: &[f32], dim: u32| {
            let run_bytes = u64::from(dim) * 4;
            let view = View {
                place: Place::At(numbers.as_ptr() as u64),
                tokens: rows as u32,
                heads,
                run_bytes,
                token_stride_bytes: run_bytes * u64::from(heads),
                head_stride_bytes: run_bytes,
            };
            // SAFETY: `numbers`, which stay while they are lent.
            unsafe { Rows::new(view, Dtype::F32, Scales::None) }
        };
        let (keys, values) = (of(&keys, self.shape.key_dim)?, of(&values, self.shape.value_dim)?);
        f(&KvRows { keys, values, positions: lists })
    }
}

impl Cache for Offloaded {
    fn put(&mut self, layer: u32, first: u32, keys: &[f32], values: &[f32]) -> Result<()> {
        let heads = self.shape.key_heads;
        let row = (heads * self.shape.key_dim) as usize;
        let tokens = (keys.len() / row) as u32;
        if first + tokens > self.known {
            let new: Vec<u32> = (self.known..first + tokens).collect();
            self.store.with(|core| core.append(self.session, &new))?;
            self.known = first + tokens;
        }
        let plane = |numbers: &[f32], dim: u32| PlaneView {
            heads,
            run_bytes: u64::from(dim) * 4,
            head_stride_bytes: u64::from(dim) * 4,
            ..PlaneView::canonical(numbers.as_ptr() as u64, tokens, u64::from(heads * dim) * 4)
        };
        let v = (self.shape.kind == Kind::Split).then(|| plane(values, self.shape.value_dim));
        let views = LayerViews { k: plane(keys, self.shape.key_dim), v };
        // SAFETY: both stay until the op has ended.
        let op = unsafe { self.offload.put(layer, first, tokens, &views, &OpOpts::default())? };
        if let Some(op) = op {
            op.wait(RELEASED, 0)?;
            let status = op.info().status.and_then(Status::from_code);
            op.remove();
            assert_eq!(status, Some(Status::Ok));
        }
        if let Some(keep) = &mut self.kept[layer as usize] {
            let mut all = kvtier::sparse::lists::Lists::default();
            for at in 0..keep.heads.len() {
                all.push(keep.heads.get(at).iter().copied().chain(first..first + tokens));
            }
            keep.heads = all;
        }
        Ok(())
    }

    fn with_keys(
        &mut self,
        layer: u32,
        wanted: Option<KeySelection<'_>>,
        f: &mut dyn FnMut(&KvRows<'_>) -> Result<()>,
    ) -> Result<()> {
        let block = self.shape.block_tokens;
        let (stored, tail) = self.offload.tokens(layer)?;
        if stored + tail == 0 {
            return Ok(());
        }
        let wanted = wanted.filter(|_| self.kept[layer as usize].is_none());
        let ids: Vec<u32> = wanted.map_or_else(Vec::new, |wanted| {
            let chosen = wanted.blocks.iter().copied().filter(|id| id * block < stored);
            chosen.chain(wanted.from / block..stored / block).collect()
        });
        let which =
            if wanted.is_some() { BlockSelection::Chosen(&ids) } else { BlockSelection::All };
        self.offload.load(0, layer, which, None, &Context::default())?;
        self.offload.wait(0)?;
        let of = |&id: &u32| id * block..(id + 1) * block;
        let blocks = self.offload.blocks(0)?.iter().flat_map(of);
        let positions: Vec<u32> = blocks.chain(stored..stored + tail).collect();
        let lent = match &self.kept[layer as usize] {
            Some(keep) => self.lend_kept(keep, &positions, f),
            None => {
                let kv = self.offload.kv(0)?;
                f(&KvRows { keys: kv.keys, values: kv.values, positions: vec![&positions] })
            }
        };
        self.offload.done(0)?;
        lent
    }

    fn evict(&mut self, layer: u32, keep: &RetainedTokens) -> Result<()> {
        self.kept[layer as usize] = Some(keep.clone());
        Ok(())
    }
}

/// A prompt and some tokens behind it: all logits, and tokens a second.
fn run<C: Cache>(mut engine: Engine<'_, C>, symbols: &[u8], each: usize) -> (Vec<f32>, f64) {
    let begun = Instant::now();
    let mut last = engine.compute(symbols, each, 1).expect("a prompt");
    engine.settle(20).expect("it evicts");
    let mut all = last.clone();
    for _ in 0..12 {
        last = engine.next(greatest(&last) as u8).expect("a token");
        all.extend_from_slice(&last);
    }
    (all, (symbols.len() + 12) as f64 / begun.elapsed().as_secs_f64())
}

#[test]
fn offload_is_bit_identical_to_memory() {
    let llama = Model::random(Sizes::llama(3, 4, 2, 16), 1);
    let mla = Model::random(Sizes::mla(2, 4, 24), 4);
    let models = [(&llama, Form::Split), (&mla, Form::Latent), (&mla, Form::Expanded)];
    let specs = [
        "full",
        "minference(budget=0.3)",
        "quest(budget=48,dense=1)",
        "h2o(sink=2, recent=16, budget=40, heads=all)",
        "snapkv(budget=60, window=20)",
        "streaming(sinks=4, recent=60)",
        "keydiff(budget=70)",
    ];
    let mut random = Random::new(8);
    let symbols: Vec<u8> = (0..230).map(|_| random.below(96) as u8).collect();
    for (model, form) in models {
        let shape = model.shape(form, 16);
        for (spec, each) in specs.iter().flat_map(|spec| [(spec, 230), (spec, 64)]) {
            let policies = || make(spec, &shape).map(Policies::single);
            let Ok(in_memory) = policies() else { continue };
            let Ok(engine) = Engine::in_memory(model, form, 16, in_memory) else { continue };
            let (right, fast) = run::<InMemory>(engine, &symbols, each);
            let cache = Offloaded::new(&shape).expect("a store");
            let beside = policies().expect("as before");
            let engine = Engine::new(model, form, 16, cache, beside).expect("as before");
            let (got, slow) = run(engine, &symbols, each);
            assert!(got == right, "{spec} in parts of {each}, {form:?}: other bits");
            println!(
                "{spec} in parts of {each}, {form:?}: {fast:.0} tokens/s, offloaded {slow:.0}"
            );
        }
    }
}
