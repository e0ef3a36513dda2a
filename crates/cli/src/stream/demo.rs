//! `kvtier stream demo`: a transformer generates text, with all its weights in memory and then with
//! less and less memory for them. The logits must be equal to the bit.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result as KvtierResult;
use kvtier::stream::model::Model as Files;
use kvtier::stream::plan::{PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer};
use kvtier::stream::units::Units;
use serde_json::{Map, json};

use super::{Outcome, print};
use crate::human;
use kvtier_lab::reference::cache::InMemory;
use kvtier_lab::reference::engine::{Engine, LayerWeights};
use kvtier_lab::reference::model::{Form, Layer, Model, Sizes};
use kvtier_lab::reference::numbers::{Random, greatest};
use kvtier_lab::reference::policies::Policies;

/// Tokens of the prompt.
const PROMPT: u8 = 16;
/// Tokens generated after the prompt.
const WRITTEN: u32 = 8;
/// Token before which memory shrinks, in the run where it does.
const LESS_AFTER: u32 = 4;

/// The model.
#[derive(clap::Args)]
pub struct Args {
    /// Directory for the model's temporary file
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Layers of the model, 13 MiB each
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(4..=512))]
    layers: u32,
}

/// The names of a layer's tensors in safetensors files.
const TENSOR_NAMES: [&str; 9] = [
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

fn tensors_of(layer: &Layer) -> [&Vec<f32>; 9] {
    let Layer { first, q, k, v, o, second, gate, up, down, .. } = layer;
    [first, q, k, v, o, second, gate, up, down]
}

fn in_layer(layer: u32, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

fn sizes(layers: u32) -> Sizes {
    Sizes {
        vocab: 96,
        layers: layers as usize,
        width: 512,
        hidden: 1536,
        heads: 8,
        key_heads: 8,
        nope: 0,
        rope: 64,
        value: 64,
        latent: 0,
        theta: 10_000.0,
    }
}

/// A model with random weights. Its text has no meaning, but any wrong byte changes the logits.
fn make(layers: u32) -> Model {
    let mut random = Random::new(6);
    Model::with(sizes(layers), |count, inputs| {
        let size = if inputs == 0 { 0.0 } else { 1.0 / (inputs as f32).sqrt() };
        let number = |n: u32| if inputs == 0 { 1.0 } else { (n as f32 / 500.0 - 1.0) * size };
        (0..count).map(|_| number(random.below(1001))).collect()
    })
}

/// The file of the model, removed by the drop.
struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.0) {
            eprintln!("kvtier: cannot remove {}: {error}", self.0.display());
        }
    }
}

fn write(model: &Model, dir: &Path) -> Outcome<Written> {
    let mut all = vec![("model.embed_tokens.weight".to_string(), &model.symbols)];
    for (n, layer) in (0..).zip(&model.layers) {
        let tensors = TENSOR_NAMES.iter().zip(tensors_of(layer));
        all.extend(tensors.map(|(part, numbers)| (in_layer(n, part), numbers)));
    }
    all.push(("model.norm.weight".to_string(), &model.last));
    all.push(("lm_head.weight".to_string(), &model.out));
    let (mut head, mut at) = (Map::new(), 0);
    for (name, numbers) in &all {
        let end = at + 4 * numbers.len();
        let shape = json!({"dtype": "F32", "shape": [numbers.len()], "data_offsets": [at, end]});
        head.insert(name.clone(), shape);
        at = end;
    }
    let mut head = serde_json::to_string(&head)?;
    // Tensors begin at a multiple of eight bytes.
    head.extend(std::iter::repeat_n(' ', head.len().next_multiple_of(8) - head.len()));
    let path = dir.join(format!("kvtier-demo-{}.safetensors", std::process::id()));
    let file = File::create_new(&path)?;
    let written = Written(path);
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&(head.len() as u64).to_le_bytes())?;
    out.write_all(head.as_bytes())?;
    for (_, numbers) in &all {
        for number in *numbers {
            out.write_all(&number.to_le_bytes())?;
        }
    }
    out.into_inner().map_err(|error| error.into_error())?.sync_all()?;
    Ok(written)
}

/// The logits of all generated tokens, and seconds for each of them.
struct Text {
    logits: Vec<f32>,
    seconds: f64,
}

fn text(
    mut engine: Engine<'_, InMemory>,
    between: &dyn Fn(u32) -> KvtierResult<()>,
) -> KvtierResult<Text> {
    let prompt: Vec<u8> = (0..PROMPT).map(|n| n * 7 % 96).collect();
    let mut last = engine.prompt(&prompt, 1)?;
    let (mut logits, begun) = (last.clone(), Instant::now());
    for token in 0..WRITTEN {
        between(token)?;
        last = engine.next(greatest(&last) as u8)?;
        logits.extend_from_slice(&last);
    }
    Ok(Text { logits, seconds: begun.elapsed().as_secs_f64() / f64::from(WRITTEN) })
}

/// The numbers of tensors in a unit.
fn numbers(streamer: &Streamer, unit: u32, names: &[String]) -> KvtierResult<Vec<Vec<f32>>> {
    let held = streamer.acquire(unit, AcquireOpts::default())?;
    let tensors = &streamer.model().tensors;
    let of = |name: &String| {
        let tensor = tensors.iter().position(|tensor| tensor.name == *name)? as u32;
        let part = streamer.units().part(tensor).find(|part| part.unit == unit)?;
        let at = std::ptr::with_exposed_provenance::<f32>((held.address + part.at) as usize);
        // SAFETY: a part of a leased unit in host memory. Tensors begin at multiples of four
        // bytes in the file, and images begin at pages.
        Some(unsafe { std::slice::from_raw_parts(at, part.bytes as usize / 4) }.to_vec())
    };
    let found = names.iter().map(of).collect::<Option<Vec<_>>>();
    streamer.release(&held, None)?;
    found.ok_or_else(|| kvtier::base::status::Status::NotFound.into())
}

/// The result of a run.
struct Run {
    text: Text,
    residencies: usize,
    read_bytes: u64,
    weights: u64,
}

/// Runs with `bytes` of memory for weights, and with `later` bytes after some tokens.
fn stream(path: &Path, layers: u32, bytes: u64, later: Option<u64>) -> Outcome<Run> {
    let files = Files::open(&[path.to_path_buf()])?;
    let units = Units::of(&files)?;
    let runtime = Runtime::open(RuntimeOpts::default())?;
    let plan_options = PlanOptions {
        host_ceiling_bytes: Some(bytes),
        host_reserve_bytes: Some(0),
        kv_bytes: Some(0),
        ..PlanOptions::default()
    };
    let opts = Opts { plan_options, ..Opts::default() };
    let streamer = Streamer::open(runtime.core(), files, units, opts)?;
    streamer.load(0)?;
    let outside = |unit: &str, name: &str| -> Outcome<Vec<f32>> {
        let unit = streamer.units().find(unit).ok_or("a unit is missing")?;
        Ok(numbers(&streamer, unit, &[name.to_string()])?.remove(0))
    };
    let mut model = Model::with(sizes(layers), |_, _| Vec::new());
    model.symbols = outside("embedding", "model.embed_tokens.weight")?;
    model.last = outside("norm", "model.norm.weight")?;
    model.out = outside("head", "lm_head.weight")?;
    let lend = |at: u32| -> KvtierResult<LayerWeights> {
        let names = TENSOR_NAMES.map(|part| in_layer(at, part));
        let unit = streamer.units().layer(at);
        let unit = unit.ok_or(kvtier::base::status::Status::NotFound)?;
        let mut all = numbers(&streamer, unit, &names)?.into_iter();
        let mut next = || all.next().unwrap_or_default();
        let layer = Layer {
            first: next(),
            q: next(),
            k: next(),
            v: next(),
            latent: None,
            o: next(),
            second: next(),
            gate: next(),
            up: next(),
            down: next(),
        };
        Ok(LayerWeights { layer, until: Box::new(()) })
    };
    let mut engine = Engine::in_memory(&model, Form::Split, 16, Policies::default())?;
    engine.lender = Some(&lend);
    let before = std::cell::Cell::new(0);
    let between = |token: u32| {
        if token == 0 {
            before.set(streamer.stats().read_bytes);
        }
        if let (LESS_AFTER, Some(bytes)) = (token, later) {
            streamer.rebalance(Some(bytes), None, None)?;
        }
        streamer.pass_begin()
    };
    let text = text(engine, &between)?;
    let plan = streamer.plan();
    let residencies =
        plan.residencies.iter().filter(|residency| **residency != Residency::File).count();
    let read_bytes = (streamer.stats().read_bytes - before.get()) / u64::from(WRITTEN);
    streamer.close(0)?;
    Ok(Run { text, residencies, read_bytes, weights: plan.host_bytes })
}

/// Runs it.
pub fn run(args: &Args) -> Outcome<()> {
    let model = make(args.layers);
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let written = write(&model, &dir)?;
    let bytes = std::fs::metadata(&written.0)?.len();
    print(&format!(
        "a transformer of {} layers, {} of weights in {}; {WRITTEN} tokens after a prompt of {PROMPT}\n\n",
        args.layers,
        human(bytes),
        written.0.display()
    ))?;
    print(&format!(
        "{:>22}  {:>10}  {:>12}  {:>10}  {:>9}  logits\n",
        "memory for weights", "used", "resident", "read/token", "ms/token"
    ))?;
    let resident = Engine::in_memory(&model, Form::Split, 16, Policies::default())?;
    let expected = text(resident, &|_| Ok(()))?;
    let ms = expected.seconds * 1e3;
    print(&format!(
        "{:>22}  {:>10}  {:>12}  {:>10}  {ms:>9.1}\n",
        "no streamer",
        human(bytes),
        "all",
        "0"
    ))?;
    drop(model);
    let mut wrong = 0;
    for (percent, later) in [(110, None), (60, None), (30, None), (15, None), (60, Some(30))] {
        // The ring needs memory for two layers at least.
        let part =
            |percent: u64| (bytes / 100 * percent).max(bytes / u64::from(args.layers) * 5 / 2);
        let run = stream(&written.0, args.layers, part(percent), later.map(part))?;
        let name = match later {
            None => format!("{percent} %"),
            Some(later) => format!("{percent} %, then {later} %"),
        };
        let same = run.text.logits == expected.logits;
        wrong += u32::from(!same);
        print(&format!(
            "{name:>22}  {:>10}  {:>12}  {:>10}  {:>9.1}  {}\n",
            human(run.weights),
            run.residencies,
            human(run.read_bytes),
            run.text.seconds * 1e3,
            if same { "identical" } else { "WRONG" }
        ))?;
    }
    if wrong > 0 {
        return Err(format!("{wrong} runs computed other logits than the run in memory").into());
    }
    Ok(())
}
