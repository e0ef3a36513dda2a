//! A transformer whose weights are streamed, layer by layer and expert by expert, is bit-identical
//! to one with all weights in memory: in every format, in every mix of tiers.

use crate::weights;
use kvtier_lab::reference;
use kvtier_testkit::fixtures::quants;

use std::sync::Arc;

use reference::engine::{Engine, LayerWeights};
use reference::model::{Form, Layer, Model, Sizes};
use reference::numbers::{Random, add, gated, greatest, norm, product};
use reference::policies::Policies;
use weights::{Format, Stored, Tensor, lease, mixes, open, tensor};

const fn format(dtype: &'static str, gguf: bool, files: usize) -> Format {
    Format { dtype, gguf, files }
}

/// Formats whose rows may be of 32 numbers.
const NARROW: [Format; 9] = [
    format("F32", true, 1),
    format("F32", false, 3),
    format("F16", true, 3),
    format("F16", false, 1),
    format("BF16", true, 1),
    format("BF16", false, 2),
    format("Q8_0", true, 1),
    format("Q4_0", true, 2),
    format("mixed", true, 1),
];
/// Those whose rows are of 256.
const WIDE: [Format; 2] = [format("Q4_K", true, 1), format("Q6_K", true, 2)];

const PARTS: [&str; 9] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];

fn weights_of(model: &Model, tied: bool) -> Vec<Tensor> {
    let sizes = model.sizes;
    let (width, back) = (sizes.width, sizes.heads * sizes.value);
    let inputs = [0, width, width, width, back, 0, width, width, sizes.hidden];
    let mut all = vec![tensor("token_embd.weight", width, &model.symbols)];
    for (n, layer) in model.layers.iter().enumerate() {
        let Layer { first, q, k, v, o, second, gate, up, down, .. } = layer;
        let parts = [first, q, k, v, o, second, gate, up, down];
        for ((name, numbers), inputs) in PARTS.iter().zip(parts).zip(inputs) {
            all.push(tensor(&format!("blk.{n}.{name}.weight"), inputs, numbers));
        }
    }
    all.push(tensor("output_norm.weight", 0, &model.last));
    if !tied {
        all.push(tensor("output.weight", width, &model.out));
    }
    all
}

/// A layer of tensors that are asked for by name.
fn layer_of(at: usize, of: &dyn Fn(&str) -> Vec<f32>) -> Layer {
    let of = |name: &str| of(&format!("blk.{at}.{name}.weight"));
    let [first, q, k, v, o, second, gate, up, down] = PARTS.map(of);
    Layer { first, q, k, v, latent: None, o, second, gate, up, down }
}

/// A prompt and what is written behind it: all logits.
fn run(mut engine: Engine<'_, reference::cache::InMemory>, between: &dyn Fn()) -> Vec<f32> {
    let prompt: Vec<u8> = (0..12u8).map(|n| n * 7 % 96).collect();
    let mut all = engine.prompt(&prompt, 1).expect("a prompt");
    let mut last = all.clone();
    for _ in 0..3 {
        between();
        last = engine.next(greatest(&last) as u8).expect("a token");
        all.extend_from_slice(&last);
    }
    all
}

fn engine(model: &Model) -> Engine<'_, reference::cache::InMemory> {
    Engine::in_memory(model, Form::Split, 16, Policies::default()).expect("an engine")
}

/// A dense model in files, in all mixes, beside itself in memory.
fn dense(model: &mut Model, format: Format, tied: bool) {
    let name = format!("{}-{}-{}-{tied}", format.dtype, format.gguf, format.files);
    let stored = Arc::new(Stored::write(&weights_of(model, tied), format, &name));
    let layers = model.layers.len();
    let of = |name: &str| stored.numbers(name, None);
    let head = if tied { "token_embd.weight" } else { "output.weight" };
    (model.symbols, model.last, model.out) =
        (of("token_embd.weight"), of("output_norm.weight"), of(head));
    model.layers = (0..layers).map(|at| layer_of(at, &of)).collect();
    let expected = run(engine(model), &|| {});
    assert!(expected.iter().any(|logit| logit.abs() > 0.3), "there is something to be seen");
    model.layers = (0..layers).map(|at| layer_of(at, &|_| Vec::new())).collect();
    for mix in mixes() {
        let streamed = open(&stored, mix);
        // Tensors outside layers are read through the streamer too, once.
        let outside = |unit: &str, name: &str| {
            lease(&streamed, streamed.units.find(unit)).expect("a unit").numbers(name)
        };
        model.symbols = outside("embedding", "token_embd.weight");
        model.last = outside("norm", "output_norm.weight");
        model.out = outside(if tied { "embedding" } else { "head" }, head);
        let lend = |at: u32| {
            let lease = lease(&streamed, streamed.units.layer(at))?;
            let layer = layer_of(at as usize, &|name| lease.numbers(name));
            Ok(LayerWeights { layer, until: Box::new(lease) })
        };
        let mut engine = engine(model);
        engine.lender = Some(&lend);
        let pass = || {
            streamed.streamer.pass_end().expect("a pass");
            streamed.streamer.pass_begin().expect("a pass");
        };
        assert!(run(engine, &pass) == expected, "{format:?}, tied: {tied}, {mix:?}");
    }
}

#[test]
fn streamed_trained_model_is_bit_identical() {
    for (at, format) in NARROW.into_iter().enumerate() {
        let mut model = Model::trained("gqa").expect("a model");
        // Every other time without a head, which is the embedding then.
        dense(&mut model, format, at % 2 == 1);
    }
}

#[test]
fn streamed_k_quant_model_is_bit_identical() {
    let sizes = Sizes {
        vocab: 96,
        layers: 4,
        width: 256,
        hidden: 256,
        heads: 4,
        key_heads: 1,
        nope: 0,
        rope: 64,
        value: 64,
        latent: 0,
        theta: 10_000.0,
    };
    for (at, format) in WIDE.into_iter().enumerate() {
        let mut random = Random::new(5 + at as u64);
        let mut model = Model::with(sizes, |count, inputs| match inputs {
            0 => vec![1.25; count],
            _ => (0..count).map(|_| random.below(2001) as f32 / 8000.0 - 0.125).collect(),
        });
        dense(&mut model, format, at % 2 == 0);
    }
}

/// Sizes of a made-up model of experts.
#[derive(Clone, Copy)]
struct Experts {
    layers: usize,
    width: usize,
    inner: usize,
    count: usize,
    tied: bool,
}

const SYMBOLS: usize = 64;

/// Its weights: stacked, as GGUF files have them.
fn made_up(sizes: &Experts) -> Vec<Tensor> {
    let Experts { layers, width, inner, count, tied } = *sizes;
    let mut random = Random::new(11);
    let mut numbers = |count: usize| -> Vec<f32> {
        (0..count).map(|_| random.below(2001) as f32 / 5000.0 - 0.2).collect()
    };
    let mut all = vec![tensor("token_embd.weight", width, &numbers(width * SYMBOLS))];
    for n in 0..layers {
        let mut stacked = |name: &str, inputs: usize, outputs: usize| Tensor {
            name: format!("blk.{n}.{name}.weight"),
            dims: vec![inputs as u64, outputs as u64, count as u64],
            numbers: numbers(inputs * outputs * count),
        };
        let experts = [
            stacked("ffn_gate_exps", width, inner),
            stacked("ffn_up_exps", width, inner),
            stacked("ffn_down_exps", inner, width),
        ];
        all.push(tensor(&format!("blk.{n}.ffn_norm.weight"), 0, &vec![1.5; width]));
        let router = numbers(width * count);
        all.push(tensor(&format!("blk.{n}.ffn_gate_inp.weight"), width, &router));
        all.extend(experts);
    }
    all.push(tensor("output_norm.weight", 0, &vec![0.7; width]));
    if !tied {
        all.push(tensor("output.weight", width, &numbers(width * SYMBOLS)));
    }
    all
}

/// The two experts that a router chooses, the better first.
fn best_two(scores: &[f32]) -> [u32; 2] {
    let first = greatest(scores);
    let mut others = scores.to_vec();
    others[first] = f32::NEG_INFINITY;
    [first as u32, greatest(&others) as u32]
}

/// Computes with tensors that it asks for by name.
type Use<'a> = dyn Fn(&dyn Fn(&str) -> Vec<f32>) -> Vec<f32> + 'a;

/// Tokens through all layers. `with` computes with a unit's tensors.
fn through(
    sizes: &Experts,
    with: &dyn Fn(&str, &Use<'_>) -> Vec<f32>,
    hint: &dyn Fn(u32, [u32; 2]),
) -> Vec<f32> {
    let (mut symbol, mut all) = (3, Vec::new());
    let (width, inner) = (sizes.width, sizes.inner);
    for _ in 0..6 {
        let mut x =
            with("embedding", &|of| of("token_embd.weight")[symbol * width..][..width].to_vec());
        for n in 0..sizes.layers {
            let name = |part: &str| format!("blk.{n}.{part}.weight");
            let layer = format!("layer {n}");
            let y = with(&layer, &|of| norm(&x, &of(&name("ffn_norm"))));
            let scores = with(&layer, &|of| product(&y, &of(&name("ffn_gate_inp")), width));
            let chosen = best_two(&scores);
            hint(n as u32, chosen);
            for expert in chosen {
                let out = with(&format!("layer {n} expert {expert}"), &|of| {
                    let gate = product(&y, &of(&name("ffn_gate_exps")), width);
                    let up = product(&y, &of(&name("ffn_up_exps")), width);
                    product(&gated(&gate, &up), &of(&name("ffn_down_exps")), inner)
                });
                add(&mut x, &out);
            }
        }
        let y = with("norm", &|of| norm(&x, &of("output_norm.weight")));
        let (unit, head) = match sizes.tied {
            true => ("embedding", "token_embd.weight"),
            false => ("head", "output.weight"),
        };
        let logits = with(unit, &|of| product(&y, &of(head), width));
        symbol = greatest(&logits);
        all.extend(logits);
    }
    all
}

/// A model of experts in files, in all mixes, beside itself in memory.
fn experts(sizes: &Experts, format: Format) {
    let name = format!("experts-{}-{}-{}", format.dtype, format.gguf, format.files);
    let stored = Arc::new(Stored::write(&made_up(sizes), format, &name));
    let resident = |unit: &str, use_it: &Use<'_>| {
        let expert = unit.split(" expert ").nth(1).map(|n| n.parse().expect("a number"));
        use_it(&|name| stored.numbers(name, expert))
    };
    let expected = through(sizes, &resident, &|_, _| {});
    assert!(expected.iter().any(|logit| logit.abs() > 0.3), "there is something to be seen");
    for (at, mix) in mixes().into_iter().enumerate() {
        let of = open(&stored, mix);
        let with = |unit: &str, use_it: &Use<'_>| {
            let lease = lease(&of, of.units.find(unit)).expect("a unit");
            use_it(&|name: &str| lease.numbers(name))
        };
        let hints = at % 2 == 0;
        let hint = |layer: u32, chosen: [u32; 2]| {
            if hints {
                let unit = |expert: u32| of.units.expert(layer, expert).expect("an expert");
                of.streamer.hint(&chosen.map(unit)).expect("a hint");
            }
        };
        assert!(through(sizes, &with, &hint) == expected, "{format:?}, {mix:?}, hints: {hints}");
    }
}

#[test]
fn streamed_expert_model_is_bit_identical() {
    for (at, format) in NARROW.into_iter().enumerate() {
        let tied = at % 2 == 0;
        experts(&Experts { layers: 6, width: 32, inner: 64, count: 8, tied }, format);
    }
}

#[test]
fn streamed_k_quant_expert_model_is_bit_identical() {
    for (at, format) in WIDE.into_iter().enumerate() {
        let tied = at % 2 == 1;
        experts(&Experts { layers: 4, width: 256, inner: 256, count: 4, tied }, format);
    }
}

#[test]
fn dequantisation_error_is_within_one_step() {
    let mut random = Random::new(3);
    // For each type: the least number of steps between zero and the largest value of a block.
    for (dtype, steps) in [
        ("F32", f32::INFINITY),
        ("F16", 2048.0),
        ("BF16", 256.0),
        ("Q8_0", 127.0),
        ("Q6_K", 30.0),
        ("Q4_0", 7.5),
        ("Q4_K", 7.0),
    ] {
        for scale in [0.0, 0.05, 1.0, 300.0] {
            let mut number = || (random.below(20_001) as f32 / 10_000.0 - 1.0) * scale;
            let numbers: Vec<f32> = (0..512).map(|_| number()).collect();
            let again = quants::numbers_of(dtype, &quants::bytes_of(dtype, &numbers));
            assert_eq!(again.len(), numbers.len());
            for (a, b) in numbers.iter().zip(&again) {
                assert!((a - b).abs() <= 1.05 * scale / steps, "{dtype}: {a} became {b}");
            }
        }
    }
}
