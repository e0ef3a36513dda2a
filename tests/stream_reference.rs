//! A transformer whose weights come through the streamer, layer by layer and expert by
//! expert, computes the bits of one that has them all in memory.

#[path = "support/model_files.rs"]
mod model_files;
#[path = "../src/bin/kvtier/reference/mod.rs"]
mod reference;

use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::stream::model::Model as Files;
use kvtier::stream::plan::Wishes;
use kvtier::stream::streamer::{Held, How, Opts, Streamer};
use kvtier::stream::units::Units;
use model_files::{Made, Meta, Scratch, gguf_head, safetensors_head};
use reference::engine::{Engine, Lent};
use reference::model::{Form, Layer, Model};
use reference::numbers::{Random, add, gated, greatest, norm, product};
use reference::policies::Policies;

/// A tensor and its numbers.
type Weights = Vec<(Made, Vec<f32>)>;

fn tensor(name: &str, inputs: usize, numbers: &[f32]) -> (Made, Vec<f32>) {
    let dims = match inputs {
        0 => vec![numbers.len() as u64],
        _ => vec![inputs as u64, (numbers.len() / inputs) as u64],
    };
    (Made::new(name, "F32", &dims, 0), numbers.to_vec())
}

/// Writes a file of weights; GGUF pads tensors, safetensors do not.
fn write(dir: &Scratch, weights: &Weights, gguf: bool) -> std::path::PathBuf {
    let made: Vec<Made> = weights.iter().map(|(made, _)| made.clone()).collect();
    let meta = [("general.architecture".to_string(), Meta::Text("llama".into()))];
    let mut bytes = if gguf { gguf_head(&made, &meta) } else { safetensors_head(&made) };
    for (_, numbers) in weights {
        numbers.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
        if gguf {
            bytes.resize(bytes.len().next_multiple_of(32), 0);
        }
    }
    let path = dir.0.join(if gguf { "model.gguf" } else { "model.safetensors" });
    std::fs::write(&path, bytes).expect("written");
    path
}

/// Weights behind a streamer.
struct Streamed {
    streamer: Streamer,
    files: Files,
    units: Units,
    _runtime: Runtime,
    _dir: Scratch,
}

/// A unit, until it is dropped.
struct Lease(Arc<Streamed>, Held);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.streamer.release(&self.1, None).expect("given back");
    }
}

impl Lease {
    /// The numbers of a tensor, or of an expert's part of it.
    fn numbers(&self, name: &str) -> &[f32] {
        let files = &self.0.files;
        let tensor = files.tensors.iter().position(|t| t.name == name).expect("a tensor") as u32;
        let mut parts = self.0.units.part(tensor);
        let part = parts.find(|part| part.unit == self.1.lease.unit).expect("a part");
        let at = std::ptr::with_exposed_provenance::<f32>((self.1.address + part.at) as usize);
        // SAFETY: a part of an image that is ours, in files where tensors begin at multiples
        // of four bytes; a simulated device has its memory in this process.
        unsafe { std::slice::from_raw_parts(at, part.bytes as usize / 4) }
    }
}

/// How much of the model stays, and where.
#[derive(Clone, Copy, Debug)]
struct Mix {
    /// Of the device; none = the processor computes.
    on_it: Option<u64>,
    on_host: u64,
    in_place: bool,
    gguf: bool,
}

fn mixes() -> Vec<Mix> {
    let mix = |on_it, on_host, in_place, gguf| Mix { on_it, on_host, in_place, gguf };
    let mut all = vec![
        mix(Some(5), 0, false, true),
        mix(Some(5), 150, false, true),
        mix(Some(40), 30, false, false),
        mix(Some(150), 0, false, true),
    ];
    for percent in [5, 20, 50, 80, 100, 150] {
        all.push(mix(None, percent, false, percent % 20 == 0));
        all.push(mix(None, percent, true, percent % 20 != 0));
    }
    all
}

/// Opens weights in a mix; the least that can be where that is more than it says.
fn open(weights: &Weights, mix: Mix, name: &str) -> Arc<Streamed> {
    let dir = Scratch::new(&format!("reference-{name}"));
    let path = write(&dir, weights, mix.gguf);
    let files = Files::open(&[path]).expect("a model");
    let units = Units::of(&files).expect("units");
    let all: u64 = units.units.iter().map(|unit| unit.image_bytes).sum();
    let runtime = Runtime::open(RuntimeOpts::default()).expect("a runtime");
    for more in 0.. {
        let room = |percent: u64| Some(all * (percent + more) / 100);
        let wishes = Wishes {
            host_reserve_bytes: Some(0),
            device_safety_bytes: Some(0),
            kv_bytes: Some(0),
            chunk_bytes: 1 << 20,
            device_ceiling_bytes: mix.on_it.and_then(room),
            host_ceiling_bytes: match mix.on_it {
                Some(_) => Some((2 << 20) + all * mix.on_host / 100),
                None => room(mix.on_host),
            },
            ..Wishes::default()
        };
        let device = mix.on_it.map(|_| {
            let opts = SimulatedOpts { memory_bytes: 1 << 30, ..SimulatedOpts::default() };
            Arc::new(Simulated::new(Clock::real(), opts).expect("a device")) as _
        });
        let opts = Opts { wishes, device, in_place: mix.in_place, ..Opts::default() };
        match Streamer::open(runtime.core(), files.clone(), units.clone(), opts) {
            Err(error) if more < 60 => {
                assert!(error.to_string().contains("needs at least"), "{error}");
            }
            opened => {
                let streamer = opened.expect("a streamer");
                return Arc::new(Streamed { streamer, files, units, _runtime: runtime, _dir: dir });
            }
        }
    }
    unreachable!("a model of which everything fits")
}

fn lease(of: &Arc<Streamed>, unit: Option<u32>) -> Result<Lease> {
    let deadline_ns = Clock::real().now_ns() + 60_000_000_000;
    let how = How { deadline_ns, ..How::default() };
    Ok(Lease(of.clone(), of.streamer.acquire(unit.expect("a unit"), how)?))
}

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

fn parts(layer: &Layer) -> [&Vec<f32>; 9] {
    let Layer { first, q, k, v, o, second, gate, up, down, .. } = layer;
    [first, q, k, v, o, second, gate, up, down]
}

fn weights_of(model: &Model) -> Weights {
    let sizes = model.sizes;
    let (width, back) = (sizes.width, sizes.heads * sizes.value);
    let inputs = [0, width, width, width, back, 0, width, width, sizes.hidden];
    let mut all = vec![tensor("token_embd.weight", width, &model.symbols)];
    for (n, layer) in model.layers.iter().enumerate() {
        for ((name, numbers), inputs) in PARTS.iter().zip(parts(layer)).zip(inputs) {
            all.push(tensor(&format!("blk.{n}.{name}.weight"), inputs, numbers));
        }
    }
    all.push(tensor("output_norm.weight", 0, &model.last));
    all.push(tensor("output.weight", width, &model.out));
    all
}

/// A prompt and what is written behind it: all logits.
fn run(mut engine: Engine<'_, reference::cache::InMemory>, between: &dyn Fn()) -> Vec<f32> {
    let prompt: Vec<u8> = (0..24u8).map(|n| n * 7 % 96).collect();
    let mut all = engine.prompt(&prompt, 1).expect("a prompt");
    let mut last = all.clone();
    for _ in 0..4 {
        between();
        last = engine.next(greatest(&last) as u8).expect("a token");
        all.extend_from_slice(&last);
    }
    all
}

#[test]
fn a_trained_model_has_the_bits_of_one_in_memory() {
    let model = Model::trained("gqa").expect("a model");
    let resident = Engine::in_memory(&model, Form::Split, 16, Policies::default()).expect("one");
    let expected = run(resident, &|| {});
    assert!(expected.iter().any(|logit| logit.abs() > 0.5), "there is something to be seen");
    for mix in mixes() {
        let streamed = open(&weights_of(&model), mix, "trained");
        // What is not in a layer comes through the streamer too, once.
        let outside = |unit: &str, name: &str| {
            let lease = lease(&streamed, streamed.units.find(unit)).expect("a unit");
            lease.numbers(name).to_vec()
        };
        let mut empty = Model::with(model.sizes, |_, _| Vec::new());
        empty.symbols = outside("embedding", "token_embd.weight");
        empty.last = outside("norm", "output_norm.weight");
        empty.out = outside("head", "output.weight");
        let lend = |at: u32| {
            let lease = lease(&streamed, streamed.units.layer(at))?;
            let of = |name: &str| lease.numbers(&format!("blk.{at}.{name}.weight")).to_vec();
            let [first, q, k, v, o, second, gate, up, down] = PARTS.map(of);
            let layer = Layer { first, q, k, v, latent: None, o, second, gate, up, down };
            Ok(Lent { layer, until: Box::new(lease) })
        };
        let mut engine =
            Engine::in_memory(&empty, Form::Split, 16, Policies::default()).expect("one");
        engine.lender = Some(&lend);
        let pass = || {
            streamed.streamer.pass_end().expect("a pass");
            streamed.streamer.pass_begin().expect("a pass");
        };
        assert!(run(engine, &pass) == expected, "{mix:?}");
    }
}

const WIDTH: usize = 32;
const INNER: usize = 48;
const EXPERTS: usize = 8;
const LAYERS: usize = 6;

/// A made-up model of experts: stacked, as files have them.
fn made_up() -> Weights {
    let mut random = Random::new(11);
    let mut numbers = |count: usize| -> Vec<f32> {
        (0..count).map(|_| random.below(2001) as f32 / 5000.0 - 0.2).collect()
    };
    let mut all = vec![tensor("token_embd.weight", WIDTH, &numbers(WIDTH * 64))];
    for n in 0..LAYERS {
        let mut stacked = |name: &str, inputs: usize, outputs: usize| {
            let dims = [inputs as u64, outputs as u64, EXPERTS as u64];
            let made = Made::new(format!("blk.{n}.{name}.weight"), "F32", &dims, 0);
            (made, numbers(inputs * outputs * EXPERTS))
        };
        let experts = [
            stacked("ffn_gate_exps", WIDTH, INNER),
            stacked("ffn_up_exps", WIDTH, INNER),
            stacked("ffn_down_exps", INNER, WIDTH),
        ];
        all.push(tensor(&format!("blk.{n}.ffn_norm.weight"), 0, &[1.5; WIDTH]));
        let router = numbers(WIDTH * EXPERTS);
        all.push(tensor(&format!("blk.{n}.ffn_gate_inp.weight"), WIDTH, &router));
        all.extend(experts);
    }
    all.push(tensor("output_norm.weight", 0, &[0.7; WIDTH]));
    all.push(tensor("output.weight", WIDTH, &numbers(WIDTH * 64)));
    all
}

/// The two experts that a router chooses, the better first.
fn best_two(scores: &[f32]) -> [usize; 2] {
    let first = greatest(scores);
    let mut others = scores.to_vec();
    others[first] = f32::NEG_INFINITY;
    [first, greatest(&others)]
}

/// Computes with tensors that it asks for by name.
type Use<'a> = dyn Fn(&dyn Fn(&str) -> Vec<f32>) -> Vec<f32> + 'a;

/// Tokens through all layers. `with`: has somebody compute with a unit's tensors.
fn through(
    with: &dyn Fn(&str, &Use<'_>) -> Vec<f32>,
    hint: &dyn Fn(usize, [usize; 2]),
) -> Vec<f32> {
    let (mut symbol, mut all) = (3, Vec::new());
    for _ in 0..12 {
        let mut x =
            with("embedding", &|of| of("token_embd.weight")[symbol * WIDTH..][..WIDTH].to_vec());
        for n in 0..LAYERS {
            let name = |part: &str| format!("blk.{n}.{part}.weight");
            let y = with(&format!("layer {n}"), &|of| norm(&x, &of(&name("ffn_norm"))));
            let scores =
                with(&format!("layer {n}"), &|of| product(&y, &of(&name("ffn_gate_inp")), WIDTH));
            let chosen = best_two(&scores);
            hint(n, chosen);
            for expert in chosen {
                let out = with(&format!("layer {n} expert {expert}"), &|of| {
                    let gate = product(&y, &of(&name("ffn_gate_exps")), WIDTH);
                    let up = product(&y, &of(&name("ffn_up_exps")), WIDTH);
                    product(&gated(&gate, &up), &of(&name("ffn_down_exps")), INNER)
                });
                add(&mut x, &out);
            }
        }
        let y = with("norm", &|of| norm(&x, &of("output_norm.weight")));
        let logits = with("head", &|of| product(&y, &of("output.weight"), WIDTH));
        symbol = greatest(&logits);
        all.extend(logits);
    }
    all
}

#[test]
fn a_model_of_experts_has_the_bits_of_one_in_memory() {
    let weights = made_up();
    let resident = |unit: &str, use_it: &Use<'_>| {
        use_it(&|name: &str| {
            let (made, numbers) = weights.iter().find(|(m, _)| m.name == name).expect("a tensor");
            let expert = unit.split(" expert ").nth(1).map(|n| n.parse::<usize>().expect("one"));
            let each = numbers.len() / if made.dims.len() == 3 { EXPERTS } else { 1 };
            numbers[expert.unwrap_or(0) * each..][..each].to_vec()
        })
    };
    let expected = through(&resident, &|_, _| {});
    for mix in mixes().into_iter().filter(|mix| mix.gguf) {
        for hints in [false, true] {
            let of = open(&weights, mix, "experts");
            let with = |unit: &str, use_it: &Use<'_>| {
                let lease = lease(&of, of.units.find(unit)).expect("a unit");
                use_it(&|name: &str| lease.numbers(name).to_vec())
            };
            let hint = |layer: usize, chosen: [usize; 2]| {
                let unit = |expert: usize| of.units.expert(layer as u32, expert as u32);
                let units = chosen.map(|expert| unit(expert).expect("an expert"));
                if hints {
                    of.streamer.hint(&units).expect("a hint");
                }
            };
            assert!(through(&with, &hint) == expected, "{mix:?}, hints: {hints}");
        }
    }
}
