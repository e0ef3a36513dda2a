//! Weights in files of every format, and the same weights behind a streamer. An engine computes
//! with the leased bytes, read anew at each lease.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use kvtier::base::clock::Clock;
use kvtier::base::runtime::{Runtime, RuntimeOpts};
use kvtier::base::status::Result;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::stream::model::Model as Files;
use kvtier::stream::plan::{PlanOptions, Residency};
use kvtier::stream::streamer::{AcquireOpts, Opts, Streamer, UnitLease};
use kvtier::stream::units::{NONE, Units};

use kvtier_testkit::fixtures::model_files::{Made, Meta, gguf_head, safetensors_head};
use kvtier_testkit::fixtures::quants::{bytes_of, numbers_of};
use kvtier_testkit::fixtures::scratch::Scratch;

/// A tensor by the name that GGUF has for it, and its numbers. Experts are stacked.
pub struct Tensor {
    pub name: String,
    /// The innermost first.
    pub dims: Vec<u64>,
    pub numbers: Vec<f32>,
}

pub fn tensor(name: &str, inputs: usize, numbers: &[f32]) -> Tensor {
    let dims = match inputs {
        0 => vec![numbers.len() as u64],
        _ => vec![inputs as u64, (numbers.len() / inputs) as u64],
    };
    Tensor { name: name.into(), dims, numbers: numbers.to_vec() }
}

/// How weights are written.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// Type of matrices; `mixed` is another one in every layer.
    pub dtype: &'static str,
    pub gguf: bool,
    /// Number of files.
    pub files: usize,
}

impl Format {
    /// Type of a tensor. Vectors are not quantised.
    fn of(&self, tensor: &Tensor) -> &'static str {
        let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        match (tensor.dims.len(), self.dtype) {
            (1, _) => "F32",
            (_, "mixed") => match layer.map(|n| n.parse::<usize>().expect("a number") % 3) {
                Some(0) => "Q8_0",
                Some(1) => "Q4_0",
                _ => "F16",
            },
            (_, dtype) => dtype,
        }
    }
}

/// Name of a tensor, or of an expert's part of it, in the safetensors files of a family.
fn hugging(name: &str, expert: Option<u32>) -> String {
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'))
    else {
        let known = match name {
            "token_embd.weight" => "model.embed_tokens.weight",
            "output_norm.weight" => "model.norm.weight",
            "output.weight" => "lm_head.weight",
            other => panic!("what is {other}?"),
        };
        return known.into();
    };
    let of_expert = |part: &str| format!("mlp.experts.{}.{part}", expert.expect("an expert"));
    let known = match part.strip_suffix(".weight").expect("weights") {
        "attn_norm" => "input_layernorm".into(),
        "attn_q" => "self_attn.q_proj".into(),
        "attn_k" => "self_attn.k_proj".into(),
        "attn_v" => "self_attn.v_proj".into(),
        "attn_output" => "self_attn.o_proj".into(),
        "ffn_norm" => "post_attention_layernorm".into(),
        "ffn_gate" => "mlp.gate_proj".into(),
        "ffn_up" => "mlp.up_proj".into(),
        "ffn_down" => "mlp.down_proj".into(),
        "ffn_gate_inp" => "mlp.gate".into(),
        "ffn_gate_exps" => of_expert("gate_proj"),
        "ffn_up_exps" => of_expert("up_proj"),
        "ffn_down_exps" => of_expert("down_proj"),
        other => panic!("what is {other}?"),
    };
    format!("model.layers.{layer}.{known}.weight")
}

/// Where a tensor was written to.
struct Place {
    file: usize,
    offset: u64,
    bytes: usize,
    dtype: &'static str,
    experts: usize,
}

/// Files of weights.
pub struct Stored {
    pub format: Format,
    paths: Vec<PathBuf>,
    /// The path to open.
    path: PathBuf,
    places: BTreeMap<String, Place>,
    _dir: Scratch,
}

/// A tensor as it is written, and of how many experts it is.
type Bytes = (Made, Vec<u8>, usize);

/// Tensors as files of a format have them: safetensors have each expert for itself.
fn lowered(weights: &[Tensor], format: Format) -> Vec<Bytes> {
    let mut all = Vec::new();
    for tensor in weights {
        let dtype = format.of(tensor);
        let experts = if tensor.dims.len() == 3 { tensor.dims[2] as usize } else { 1 };
        let mut add = |name: String, dims: &[u64], numbers: &[f32], experts| {
            all.push((Made::new(name, dtype, dims, 0), bytes_of(dtype, numbers), experts));
        };
        match (format.gguf, experts) {
            (true, _) => add(tensor.name.clone(), &tensor.dims, &tensor.numbers, experts),
            (false, 1) => add(hugging(&tensor.name, None), &tensor.dims, &tensor.numbers, 1),
            (false, _) => {
                let each = tensor.numbers.chunks_exact(tensor.numbers.len() / experts);
                for (expert, numbers) in (0..).zip(each) {
                    add(hugging(&tensor.name, Some(expert)), &tensor.dims[..2], numbers, 1);
                }
            }
        }
    }
    all
}

impl Stored {
    pub fn write(weights: &[Tensor], format: Format, name: &str) -> Stored {
        let dir = Scratch::created(&format!("reference-{name}"));
        let all = lowered(weights, format);
        let (mut paths, mut places) = (Vec::new(), BTreeMap::new());
        let extension = if format.gguf { "gguf" } else { "safetensors" };
        for (file, of_file) in all.chunks(all.len().div_ceil(format.files)).enumerate() {
            let called = match format.files {
                1 => format!("model.{extension}"),
                n => format!("model-{:05}-of-{n:05}.{extension}", file + 1),
            };
            let mut bytes = head(of_file, format, file, all.len());
            for (made, content, experts) in of_file {
                let (offset, dtype) = (bytes.len() as u64, made.dtype);
                let (bytes_of_it, experts) = (content.len(), *experts);
                let place = Place { file, offset, bytes: bytes_of_it, dtype, experts };
                assert!(places.insert(made.name.clone(), place).is_none(), "{} twice", made.name);
                bytes.extend(content);
                if format.gguf {
                    bytes.resize(bytes.len().next_multiple_of(32), 0);
                }
            }
            paths.push(dir.0.join(called));
            std::fs::write(&paths[file], bytes).expect("written");
        }
        assert_eq!(paths.len(), format.files, "files that have no tensors");
        let mut path = paths[0].clone();
        if !format.gguf && format.files > 1 {
            path = dir.0.join("model.safetensors.index.json");
            let name_of = |file: usize| paths[file].file_name().expect("a name").to_string_lossy();
            let line = |(name, place): (&String, &Place)| {
                format!("\"{name}\": \"{}\"", name_of(place.file))
            };
            let map: Vec<String> = places.iter().map(line).collect();
            let index = format!("{{\"weight_map\": {{{}}}}}", map.join(", "));
            std::fs::write(&path, index).expect("written");
        }
        Stored { format, paths, path, places, _dir: dir }
    }

    /// Name of a tensor in the files.
    fn name(&self, name: &str, expert: Option<u32>) -> String {
        if self.format.gguf { name.into() } else { hugging(name, expert) }
    }

    /// The numbers of a tensor, or of an expert's part of it, without the library.
    pub fn numbers(&self, name: &str, expert: Option<u32>) -> Vec<f32> {
        let place = &self.places[&self.name(name, expert)];
        let mut bytes = vec![0; place.bytes / place.experts];
        let from = if place.experts == 1 { 0 } else { expert.expect("an expert") as usize };
        let file = std::fs::File::open(&self.paths[place.file]).expect("a file");
        let at = place.offset + (from * bytes.len()) as u64;
        file.read_exact_at(&mut bytes, at).expect("bytes");
        numbers_of(place.dtype, &bytes)
    }
}

fn head(tensors: &[Bytes], format: Format, file: usize, of: usize) -> Vec<u8> {
    let made: Vec<Made> = tensors.iter().map(|(made, ..)| made.clone()).collect();
    if !format.gguf {
        return safetensors_head(&made);
    }
    let mut meta = vec![("general.architecture".to_string(), Meta::Text("llama".into()))];
    if format.files > 1 {
        meta.push(("split.no".into(), Meta::U16(file as u16)));
        meta.push(("split.count".into(), Meta::U16(format.files as u16)));
        meta.push(("split.tensors.count".into(), Meta::I32(of as i32)));
    }
    gguf_head(&made, &meta)
}

/// Residency of the model: bytes in each memory.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// Bytes of the device; `None`: the CPU computes.
    pub on_it: Option<u64>,
    pub on_host: u64,
    pub in_place: bool,
}

/// From 5 % to 150 % of the model, wherever it is computed.
pub fn mixes() -> Vec<Mix> {
    let mix = |on_it, on_host, in_place| Mix { on_it, on_host, in_place };
    let device = [(5, 0), (5, 150), (40, 30), (80, 0), (150, 0)];
    let mut all = device.map(|(on_it, on_host)| mix(Some(on_it), on_host, false)).to_vec();
    for percent in [5, 20, 50, 80, 100, 150] {
        all.extend([false, true].map(|in_place| mix(None, percent, in_place)));
    }
    all
}

/// Weights behind a streamer.
pub struct Streamed {
    pub streamer: Streamer,
    pub units: Units,
    files: Files,
    stored: Arc<Stored>,
    _runtime: Runtime,
}

/// A unit, until it is dropped.
pub struct Lease(Arc<Streamed>, UnitLease);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.streamer.release(&self.1, None).expect("given back");
    }
}

impl Lease {
    /// The numbers of a tensor, or of the part of it that is in this unit.
    pub fn numbers(&self, name: &str) -> Vec<f32> {
        let (of, unit) = (&self.0, self.1.lease.unit);
        let expert = of.units.units[unit as usize].expert;
        let name = of.stored.name(name, (expert != NONE).then_some(expert));
        let number = of.files.tensors.iter().position(|t| t.name == name).expect("a tensor");
        let mut parts = of.units.part(number as u32);
        let part = parts.find(|part| part.unit == unit).expect("a part");
        let at = std::ptr::with_exposed_provenance::<u8>((self.1.address + part.at) as usize);
        // SAFETY: a part of an image that is ours until it is given back; a simulated device
        // has its memory in this process.
        let bytes = unsafe { std::slice::from_raw_parts(at, part.bytes as usize) };
        numbers_of(of.files.tensors[number].dtype, bytes)
    }
}

/// Opens weights in a mix; the least that can be where that is more than it says.
pub fn open(stored: &Arc<Stored>, mix: Mix) -> Arc<Streamed> {
    let files = Files::open(std::slice::from_ref(&stored.path)).expect("a model");
    let units = Units::of(&files).expect("units");
    let all: u64 = units.units.iter().map(|unit| unit.image_bytes).sum();
    let runtime = Runtime::open(RuntimeOpts::default()).expect("a runtime");
    for more in 0.. {
        let room = |percent: u64| Some(all * (percent + more) / 100);
        let plan_options = PlanOptions {
            host_reserve_bytes: Some(0),
            device_safety_bytes: Some(0),
            kv_bytes: Some(0),
            chunk_bytes: 1 << 20,
            device_ceiling_bytes: mix.on_it.and_then(room),
            host_ceiling_bytes: match mix.on_it {
                Some(_) => Some((2 << 20) + all * mix.on_host / 100),
                None => room(mix.on_host),
            },
            ..PlanOptions::default()
        };
        let device = mix.on_it.map(|_| {
            let opts = SimulatedOpts { memory_bytes: 1 << 30, ..SimulatedOpts::default() };
            Arc::new(Simulated::new(Clock::real(), opts).expect("a device")) as _
        });
        let opts = Opts { plan_options, device, in_place: mix.in_place, ..Opts::default() };
        match Streamer::open(runtime.core(), files.clone(), units.clone(), opts) {
            Err(error) if more < 90 => {
                assert!(error.to_string().contains("needs at least"), "{error}");
            }
            opened => {
                let streamer = opened.expect("a streamer");
                let away = streamer.plan().residencies.contains(&Residency::File);
                let whole = mix.on_it.unwrap_or(0) + mix.on_host >= 100;
                assert_eq!(away, !whole, "{mix:?} and {more} % more");
                let stored = stored.clone();
                return Arc::new(Streamed { streamer, units, files, stored, _runtime: runtime });
            }
        }
    }
    unreachable!("a model of which everything fits")
}

pub fn lease(of: &Arc<Streamed>, unit: Option<u32>) -> Result<Lease> {
    let deadline_ns = Clock::real().now_ns() + 300_000_000_000;
    let how = AcquireOpts { deadline_ns, ..AcquireOpts::default() };
    Ok(Lease(of.clone(), of.streamer.acquire(unit.expect("a unit"), how)?))
}
