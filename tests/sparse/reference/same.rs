//! Results that must not depend on how they are computed.

use kvtier::sparse::{Index, Kind};

use crate::reference::attend::LayerQueries;
use crate::reference::cache::{Cache, InMemory};
use crate::reference::engine::Engine;
use crate::reference::model::{Form, Model, Sizes};
use crate::reference::own::Fixed;
use crate::reference::policies::{Policies, make};
use crate::reference::text::{Text, questions};
use kvtier_lab::reference::numbers::{Random, greatest};

/// Merging adds the bound of each part (`kvtier::attention`): at most some hundred keys a piece
/// and numbers around one, thrice. What is seen is 1e-6 of the largest.
const BOUND: f32 = 1e-4;

/// Models of several geometries: groups of heads, one key head, latent rows.
fn models() -> Vec<(Model, Form)> {
    let llama = |layers, heads, keys, dim| Sizes::llama(layers, heads, keys, dim);
    vec![
        (Model::random(llama(2, 4, 2, 16), 1), Form::Split),
        (Model::random(llama(2, 8, 1, 8), 2), Form::Split),
        (Model::random(llama(1, 3, 3, 20), 3), Form::Split),
        (Model::random(Sizes::mla(2, 4, 24), 4), Form::Latent),
        (Model::random(Sizes::mla(2, 4, 24), 4), Form::Expanded),
    ]
}

fn symbols(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(96) as u8).collect()
}

/// Tokens that a model writes behind a prompt, and the logits behind each.
fn write(engine: &mut Engine<'_, InMemory>, logits: &[f32], count: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut written, mut all, mut last) = (Vec::new(), Vec::new(), logits.to_vec());
    for _ in 0..count {
        let symbol = greatest(&last) as u8;
        last = engine.next(symbol).expect("a token");
        written.push(symbol);
        all.extend_from_slice(&last);
    }
    (written, all)
}

fn off(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn prompt_in_parts_is_bit_identical() {
    for (model, form) in &models() {
        let symbols = symbols(5, 150);
        let whole = |each| {
            let mut engine = Engine::in_memory(model, *form, 16, Policies::default()).expect("one");
            engine.compute(&symbols, each, 1).expect("a prompt")
        };
        assert_eq!(whole(150), whole(64), "{:?}", model.sizes);
        assert_eq!(whole(150), whole(37), "{:?}", model.sizes);
    }
}

#[test]
fn key_pieces_agree_with_the_whole() {
    for (model, form) in &models() {
        let symbols = symbols(6, 150);
        let shape = model.shape(*form, 16);
        // With policies that receive sums of pieces: wrong sums would keep other tokens.
        for spec in ["full", "h2o(sink=2, recent=8, budget=40)", "snapkv(budget=60, window=20)"] {
            let run = |piece, each| {
                let policies = Policies::single(make(spec, &shape).expect("a policy"));
                let mut engine = Engine::in_memory(model, *form, 16, policies).expect("one");
                engine.cache.piece = piece;
                let mut logits = engine.compute(&symbols, each, 1).expect("a prompt");
                engine.settle(30).expect("it evicts");
                logits.extend(write(&mut engine, &logits.clone(), 4).1);
                logits
            };
            let whole = run(0, 150);
            assert!(whole.iter().any(|x| x.abs() > 0.5), "there is something to be seen");
            for (piece, each) in [(64, 150), (16, 40), (7, 60)] {
                let off = off(&whole, &run(piece, each));
                assert!(off < BOUND, "{spec}, {:?} by {piece}: off by {off}", model.sizes);
            }
        }
    }
}

#[test]
fn attention_sums_in_pieces_match_the_whole() {
    for (model, form) in &models() {
        let shape = model.shape(*form, 16);
        let numbers = |seed, tokens: usize, each: u32| -> Vec<f32> {
            let mut random = Random::new(seed);
            (0..tokens * each as usize).map(|_| random.normal()).collect()
        };
        let key = shape.key_heads * shape.key_dim;
        let is_split = shape.kind == Kind::Split;
        let value = if is_split { shape.key_heads * shape.value_dim } else { 0 };
        let query = shape.query_heads * shape.key_dim;
        let run = |piece| {
            let mut cache = InMemory::new(&shape);
            cache.piece = piece;
            cache.put(0, 0, &numbers(1, 101, key), &numbers(2, 101, value)).expect("room");
            let queries = numbers(3, 81, query);
            let asking = LayerQueries { shape: &shape, layer: 0, queries: &queries, first: 20 };
            let output = asking.dense(&mut cache, None).expect("attention");
            let index = Index::default();
            let mut sums = asking.sums(&mut cache, &output, 30, &index).expect("sums");
            let last = &queries[80 * query as usize..];
            let asking = LayerQueries { queries: last, first: 100, ..asking };
            let mut next = Vec::new();
            asking.next(&mut cache, None, &index, Some(&mut next)).expect("a token");
            for (sums, queries) in [(&sums, 30.0), (&next, 1.0)] {
                for head in sums.chunks_exact(101) {
                    let sum: f32 = head.iter().sum();
                    assert!((sum - queries).abs() < BOUND, "{sum} of {queries} queries");
                }
            }
            sums.extend(next);
            sums
        };
        let whole = run(0);
        for piece in [64, 16, 7] {
            let off = off(&whole, &run(piece));
            assert!(off < BOUND, "{:?} by {piece}: off by {off}", model.sizes);
        }
    }
}

#[test]
fn evicted_tokens_equal_masked_tokens() {
    for (model, form) in &models() {
        let (symbols, shape) = (symbols(8, 150), model.shape(*form, 16));
        for spec in
            ["snapkv(budget=60, window=20)", "adakv(budget=60, window=20)", "knorm(ratio=0.4)"]
        {
            let policies = Policies::single(make(spec, &shape).expect("a policy"));
            let mut engine = Engine::in_memory(model, *form, 16, policies).expect("one");
            let logits = engine.prompt(&symbols, 1).expect("a prompt");
            let lists = (0..shape.layers).map(|layer| engine.cache.positions(layer).to_vec());
            let fixed = Fixed { lists: lists.collect(), prompt: 150 };
            assert!(fixed.lists[0][0].len() < 150, "{spec} leaves nothing out");
            let gone = write(&mut engine, &logits, 8);
            let policies = Policies::single(Box::new(fixed));
            let mut engine = Engine::in_memory(model, *form, 16, policies).expect("one");
            engine.prompt(&symbols, 1).expect("a prompt");
            let masked = write(&mut engine, &logits, 8);
            assert_eq!(gone, masked, "{spec} {:?}", model.sizes);
        }
    }
}

#[test]
fn both_forms_of_latent_attention_agree() {
    let model = Model::random(Sizes::mla(2, 4, 24), 9);
    let symbols = symbols(7, 100);
    let run = |form| {
        let mut engine = Engine::in_memory(&model, form, 16, Policies::default()).expect("one");
        let mut logits = engine.prompt(&symbols, 8).expect("a prompt");
        let last = logits[7 * 96..].to_vec();
        logits.extend(write(&mut engine, &last, 4).1);
        logits
    };
    let off = off(&run(Form::Latent), &run(Form::Expanded));
    assert!(off < BOUND, "off by {off}");
}

/// Specs under which nothing is left out of 300 tokens.
const GENEROUS: &[&str] = &[
    "minference(budget=1)",
    "xattention(tau=1)",
    "flexprefill(gamma=1, tau=0)",
    "streaming(recent=4000)",
    "quest(budget=4096, dense=0)",
    "quest(budget=4096, dense=0, share=bound)",
    "arkvale(budget=4096, dense=0, page=16)",
    "predict(of=quest(budget=4096, dense=0))",
    "external(topk=1000)",
    "h2o(budget=4000)",
    "h2o(budget=4000, heads=all)",
    "tova(budget=4000)",
    "snapkv(budget=4000)",
    "pyramidkv(budget=4000)",
    "adakv(budget=4000)",
    "keydiff(budget=4000)",
    "knorm(budget=4000)",
];

#[test]
fn full_budget_is_bit_identical_to_dense() {
    for (name, form) in [("gqa", Form::Split), ("mla", Form::Latent), ("mla", Form::Expanded)] {
        let model = Model::trained(name).expect("a model");
        let text = Text::new(&mut Random::new(11), 280, 10);
        let prompt = [text.symbols.as_slice(), &questions(&text.pairs)].concat();
        let run = |policies| {
            let mut engine = Engine::in_memory(&model, form, 32, policies).expect("a model");
            let logits = engine.prompt(&prompt, 1).expect("a prompt");
            write(&mut engine, &logits, 6)
        };
        let full = run(Policies::single(make("full", &model.shape(form, 32)).expect("a spec")));
        assert_eq!(full, run(Policies::default()), "{name}: none and full");
        for spec in GENEROUS {
            let policy = make(spec, &model.shape(form, 32));
            let policy = policy.unwrap_or_else(|error| panic!("{spec}: {}", error.message()));
            let (symbols, logits) = run(Policies::single(policy));
            assert_eq!(symbols, full.0, "{name} {form:?}: {spec}");
            let same = logits.iter().zip(&full.1).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} {form:?}: {spec} changes bits, by {}", off(&logits, &full.1));
        }
    }
}
