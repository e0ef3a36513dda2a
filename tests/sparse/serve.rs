//! An engine that serves every policy by its traits alone: it knows no policy names, supplies the
//! inputs that the traits ask for, and no call is rejected.

use kvtier::attention::keys::Heads;
use kvtier::attention::{Rows, Scales};
use kvtier::base::spec::Spec;
use kvtier::base::status::Status;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::{
    ALL_QUERIES, Context, Index, RetainedTokens, Shape, Sparse, Traits, caps, needs, registry,
};

const PROMPT: u32 = 200;
const STEPS: u32 = 20;
const SHAPE: Shape = Shape {
    layers: 3,
    query_heads: 4,
    key_heads: 2,
    key_dim: 8,
    value_dim: 8,
    scale: 0.0,
    kind: kvtier::sparse::Kind::Split,
    block_tokens: 16,
    max_tokens: 4096,
};

/// Numbers that look random.
fn number(seed: u32) -> f32 {
    let mixed = (seed ^ 0x9E37).wrapping_mul(0x85EB_CA6B) ^ seed >> 7;
    (mixed.wrapping_mul(0xC2B2_AE35) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// Rows of tokens of the sequence.
struct Numbers(Vec<f32>, (u32, u32));

impl Numbers {
    fn new((heads, dim): (u32, u32), first: u32, end: u32, seed: u32) -> Numbers {
        let each = heads * dim;
        let all = (first * each..end * each).map(|at| number(at.wrapping_add(seed << 20)));
        Numbers(all.collect(), (heads, dim))
    }

    fn rows(&self) -> Rows<'_> {
        let (heads, dim) = self.1;
        let run_bytes = u64::from(dim) * 4;
        let view = View {
            place: Place::At(self.0.as_ptr() as u64),
            tokens: self.0.len() as u32 / (heads * dim),
            heads,
            run_bytes,
            token_stride_bytes: run_bytes * u64::from(heads),
            head_stride_bytes: run_bytes,
        };
        // SAFETY: it is the numbers, borrowed as long.
        unsafe { Rows::new(view, Dtype::F32, Scales::None) }.expect("sound")
    }
}

/// State of the engine: how many tokens each list of a layer has.
struct Engine {
    policy: Box<dyn Sparse>,
    traits: Traits,
    there: Vec<usize>,
    what: &'static str,
}

impl Engine {
    fn has(&self, cap: u32) -> bool {
        self.traits.caps & cap != 0
    }

    fn queries(&self, layer: u32, context: &Context) -> Numbers {
        let rows = self.traits.query_rows(&SHAPE);
        Numbers::new(rows, context.first_query, context.tokens, 5 + layer)
    }

    /// Passes the scores that a call for some queries and candidates needs.
    fn score(&mut self, layer: u32, queries: u32, candidates: usize) {
        let count = self.traits.scores(&SHAPE, queries, candidates);
        if count > 0 {
            let scores: Vec<f32> = (0..count as u32).map(|at| number(at + 77).abs()).collect();
            self.policy.score(layer, &scores).expect(self.what);
        }
    }

    fn append_keys(&mut self, layer: u32, context: &Context) {
        let (first, end) = (context.first_query, context.tokens);
        if self.traits.needs & needs::KEYS == 0 {
            return;
        }
        let keys = Numbers::new(self.traits.key_rows(&SHAPE), first, end, layer);
        self.policy.append(layer, first, &keys.rows()).expect(self.what);
        for block in first / 16..end / 16 {
            let rows = (SHAPE.key_heads, SHAPE.key_dim);
            let keys = Numbers::new(rows, block * 16, block * 16 + 16, layer);
            self.policy.seal(layer, block, block * 16, &keys.rows()).expect(self.what);
        }
    }

    fn select(&mut self, layer: u32, context: &Context, out: &mut Vec<u32>) {
        let candidates: Vec<u32> = (0..(context.tokens - 1) / 16).collect();
        self.score(layer, 1, candidates.len());
        let of = layer.checked_sub(self.traits.ahead);
        let query = of.map(|layer| self.queries(layer, context));
        let rows = query.as_ref().map(Numbers::rows);
        let asked = self.policy.select(layer, rows.as_ref(), &candidates, context, out);
        asked.expect(self.what);
        assert!(out.iter().all(|id| candidates.contains(id)), "{}", self.what);
        let is_all = out.len() == candidates.len();
        assert!(is_all || layer >= self.traits.dense_layers, "{}", self.what);
    }

    /// A policy without block selection selects all candidates, and needs no scores for it.
    fn select_all(&mut self, layer: u32, context: &Context, out: &mut Vec<u32>) {
        let candidates: Vec<u32> = (0..(context.tokens - 1) / 16).rev().collect();
        let query = self.queries(layer, context);
        // A copy: it counts what it is asked.
        let mut copy = self.policy.fork().expect(self.what);
        let asked = copy.select(layer, Some(&query.rows()), &candidates, context, out);
        asked.expect(self.what);
        assert!(out.iter().rev().eq(&candidates), "{}", self.what);
    }

    fn index(&mut self, layer: u32, context: &Context, out: &mut Index) {
        let count = context.tokens - context.first_query;
        self.score(layer, count, 0);
        // Where not all keys are asked for there are none.
        let is_all = self.traits.needs & needs::ALL_KEYS != 0;
        let rows = (SHAPE.key_heads, SHAPE.key_dim);
        let keys = Numbers::new(rows, 0, context.tokens, layer);
        let (queries, keys) = (self.queries(layer, context), keys.rows());
        let keys = is_all.then_some(&keys);
        self.policy.index(layer, &queries.rows(), keys, context, out).expect(self.what);
        if is_all {
            let refused = self.policy.index(layer, &queries.rows(), None, context, out);
            assert_eq!(refused.expect_err(self.what).status(), Status::Invalid);
        }
        let heads = Heads { queries: SHAPE.query_heads, keys: SHAPE.key_heads };
        out.keys().check(heads, context.first_query, count).expect(self.what);
    }

    fn observe(&mut self, layer: u32, context: &Context) {
        let there = self.there[layer as usize] as u32;
        let queries = self.traits.sum_queries.min(context.tokens - context.first_query);
        if queries > 0 {
            let sums: Vec<f32> = (0..SHAPE.query_heads * there)
                .map(|at| number(at + context.tokens).abs())
                .collect();
            self.policy.observe(layer, queries, &sums, there).expect(self.what);
        }
    }

    fn evict(&mut self, layer: u32, context: &Context) -> bool {
        let mut keep = RetainedTokens::default();
        let any = self.policy.evict(layer, context, &mut keep).expect(self.what);
        if any {
            self.there[layer as usize] = keep.of(0).len();
            assert!(
                self.traits.is_ragged
                    || (0..keep.heads.len()).all(|at| keep.heads.get(at).len() == keep.of(0).len())
            );
            self.policy.evicted(layer, &keep).expect(self.what);
        }
        any
    }

    /// A prompt and some tokens behind it. How many keys were left out, and tokens evicted.
    fn serve(&mut self) -> (bool, bool) {
        let (mut out, mut index) = (Vec::new(), Index::default());
        let (mut left_out, mut evicted) = (false, false);
        for step in 0..=STEPS {
            let tokens = PROMPT + step;
            let first_query = if step == 0 { 0 } else { tokens - 1 };
            let context = Context { is_prefill: step == 0, part: 0, parts: 1, first_query, tokens };
            let [load, see, evict] = match context.is_prefill {
                true => [caps::LOAD_PREFILL, caps::INDEX_PREFILL, caps::EVICT_PREFILL],
                false => [caps::LOAD_DECODE, caps::INDEX_DECODE, caps::EVICT_DECODE],
            };
            for layer in 0..SHAPE.layers {
                self.append_keys(layer, &context);
                if !self.has(load) {
                    self.select_all(layer, &context, &mut out);
                }
                if self.has(load) && step > 0 {
                    self.select(layer, &context, &mut out);
                    left_out |= out.len() < (tokens - 1) as usize / 16;
                }
                self.there[layer as usize] += (tokens - first_query) as usize;
                if self.has(see) {
                    self.index(layer, &context, &mut index);
                    left_out |= !index.is_dense();
                }
                if self.has(evict) {
                    self.observe(layer, &context);
                    evicted |= self.evict(layer, &context);
                }
            }
        }
        (left_out, evicted)
    }
}

#[test]
fn every_policy_runs_by_its_traits() {
    let mut served = Vec::new();
    for what in [
        "adakv(budget=80,window=20)",
        "arkvale(page=16,budget=96,dense=1)",
        "dsa(topk=40,heads=3,dim=6)",
        "dsa(topk=10,heads=5,dim=4,load=true)",
        "duo(alpha=\"1 2 3 4 5 6\",sink=4,recent=30)",
        "external(topk=3)",
        "flexprefill(block=32)",
        "full",
        "h2o(sink=2,recent=20,budget=50)",
        "h2o(sink=2,recent=20,budget=50,form=block,heads=all)",
        "keydiff(budget=60)",
        "knorm(budget=60)",
        "minference(budget=0.4,recent=5)",
        "minference(type=tri_shape,vertical=5,slash=9)",
        "predict(of=quest(page=16,budget=48,dense=0),ahead=1,audit=true)",
        "pyramidkv(budget=80,window=20)",
        "quest(page=16,budget=48,dense=1)",
        "snapkv(budget=80,window=20)",
        "streaming(recent=50,rotate=true)",
        "tova(budget=60)",
        "tova(ratio=0.5)",
        "xattention(block=32,stride=8,tau=0.5)",
    ] {
        let spec = Spec::parse(what).expect(what);
        let policy = registry::make(&spec, &SHAPE).expect(what);
        let traits = policy.traits();
        let mut engine = Engine { policy, traits, there: vec![0; 3], what };
        let (left_out, evicted) = engine.serve();
        // It does something of what it says it can.
        let evicts = traits.caps & (caps::EVICT_PREFILL | caps::EVICT_DECODE) != 0;
        assert_eq!(
            (left_out || what == "full", evicted),
            (!evicts || what.starts_with("str"), evicts),
            "{what}"
        );
        let stats = engine.policy.stats();
        let loads = traits.caps & caps::LOAD_DECODE != 0;
        assert_eq!(
            stats.selections,
            if loads { u64::from(STEPS * SHAPE.layers) } else { 0 },
            "{what}"
        );
        assert_eq!(stats.candidates, stats.chosen + stats.spared, "{what}");
        assert_eq!(stats.spared > 0, loads && what != "full", "{what}");
        assert_eq!(stats.recall().is_some(), what.contains("audit"), "{what}");
        served.push(spec.name);
    }
    served.dedup();
    assert_eq!(served, registry::ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>());
}

#[test]
fn traits_name_the_required_inputs() {
    let of = |spec: &str| {
        let policy = registry::make(&Spec::parse(spec).expect(spec), &SHAPE).expect(spec);
        policy.traits()
    };
    assert_eq!(of("dsa(heads=3,dim=6)").query_rows(&SHAPE), (3, 6));
    assert_eq!(of("dsa(heads=3,dim=6)").key_rows(&SHAPE), (1, 6));
    assert_eq!(of("dsa(heads=3,dim=6)").scores(&SHAPE, 7, 100), 21);
    assert_eq!(of("quest(page=16)").query_rows(&SHAPE), (4, 8));
    assert_eq!(of("quest(page=16)").scores(&SHAPE, 7, 100), 0);
    assert_eq!(of("external").scores(&SHAPE, 7, 100), 100);
    assert!(of("streaming(rotate=true)").rotates && !of("streaming").rotates);
    let sums =
        ["h2o", "tova", "snapkv", "snapkv(window=9)", "full"].map(|spec| of(spec).sum_queries);
    assert_eq!(sums, [ALL_QUERIES, 1, 64, 9, 0]);
    assert_eq!(of("predict(of=quest(page=16),ahead=2)").ahead, 2);
}
