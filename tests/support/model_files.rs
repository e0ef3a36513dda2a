//! Files of models: dense ones and ones with experts, of any size, whose bytes say where
//! they belong. Written by the formats' own rules and not with the library's code.
#![allow(dead_code)]

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A tensor that is in a file.
#[derive(Clone, Debug)]
pub struct Made {
    pub name: String,
    pub dtype: &'static str,
    /// The innermost first.
    pub dims: Vec<u64>,
    pub seed: u64,
}

/// A type: its name, its number in GGUF files, numbers of a block and bytes of one.
const DTYPES: [(&str, u32, u64, u64); 12] = [
    ("F32", 0, 1, 4),
    ("F16", 1, 1, 2),
    ("Q4_0", 2, 32, 18),
    ("Q8_0", 8, 32, 34),
    ("Q4_K", 12, 256, 144),
    ("Q6_K", 14, 256, 210),
    ("I8", 24, 1, 1),
    ("I64", 27, 1, 8),
    ("BF16", 30, 1, 2),
    ("MXFP4", 39, 32, 17),
    ("U8", u32::MAX, 1, 1),
    ("F8_E4M3", u32::MAX, 1, 1),
];

fn dtype(name: &str) -> (&'static str, u32, u64, u64) {
    *DTYPES.iter().find(|known| known.0 == name).unwrap_or_else(|| panic!("no type {name}"))
}

fn mix(n: u64) -> u64 {
    let z = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

impl Made {
    pub fn new(name: impl Into<String>, dtype: &'static str, dims: &[u64], seed: u64) -> Made {
        let name = name.into();
        let seed = name.bytes().fold(mix(seed), |n, byte| mix(n ^ u64::from(byte)));
        Made { name, dtype, dims: dims.to_vec(), seed }
    }

    pub fn bytes(&self) -> u64 {
        let (_, _, block, bytes) = dtype(self.dtype);
        let row = self.dims.first().copied().unwrap_or(1);
        assert_eq!(row % block, 0, "{self:?}");
        row / block * bytes * self.dims.iter().skip(1).product::<u64>()
    }

    /// Its bytes from a place on.
    pub fn fill(&self, from: u64, out: &mut [u8]) {
        let mut at = from;
        let mut out = out.iter_mut().peekable();
        while out.peek().is_some() {
            let word = mix(self.seed ^ (at / 8)).to_le_bytes();
            let skip = (at % 8) as usize;
            for (slot, byte) in out.by_ref().take(8 - skip).zip(&word[skip..]) {
                *slot = *byte;
                at += 1;
            }
        }
    }

    pub fn content(&self) -> Vec<u8> {
        let mut out = vec![0; self.bytes() as usize];
        self.fill(0, &mut out);
        out
    }
}

/// What a model is like.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub layers: u64,
    /// 0 = a dense model.
    pub experts: u64,
    pub hidden: u64,
    /// Of an expert, in a model that has such.
    pub ffn: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub vocabulary: u64,
    pub context: u64,
    /// Of matrices; vectors are F32.
    pub dtype: &'static str,
    pub seed: u64,
}

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes {
            layers: 3,
            experts: 0,
            hidden: 64,
            ffn: 96,
            heads: 4,
            kv_heads: 2,
            vocabulary: 100,
            context: 2048,
            dtype: "F16",
            seed: 1,
        }
    }
}

impl Sizes {
    fn kv(&self) -> u64 {
        self.hidden / self.heads * self.kv_heads
    }

    /// Tensors as GGUF files have them; experts are stacked.
    pub fn gguf(&self) -> Vec<Made> {
        let (h, f, e) = (self.hidden, self.ffn, self.experts);
        let mut all = Vec::new();
        let mut add = |name: String, dtype, dims: &[u64]| {
            all.push(Made::new(name, dtype, dims, self.seed));
        };
        add("token_embd.weight".into(), self.dtype, &[h, self.vocabulary]);
        for n in 0..self.layers {
            let mut add = |name: &str, dtype, dims: &[u64]| {
                add(format!("blk.{n}.{name}.weight"), dtype, dims);
            };
            add("attn_norm", "F32", &[h]);
            add("attn_q", self.dtype, &[h, h]);
            add("attn_k", self.dtype, &[h, self.kv()]);
            add("attn_v", self.dtype, &[h, self.kv()]);
            add("attn_output", self.dtype, &[h, h]);
            add("ffn_norm", "F32", &[h]);
            if e == 0 {
                add("ffn_gate", self.dtype, &[h, f]);
                add("ffn_up", self.dtype, &[h, f]);
                add("ffn_down", self.dtype, &[f, h]);
            } else {
                add("ffn_gate_inp", "F32", &[h, e]);
                add("ffn_gate_exps", self.dtype, &[h, f, e]);
                add("ffn_up_exps", self.dtype, &[h, f, e]);
                add("ffn_down_exps", self.dtype, &[f, h, e]);
                add("ffn_up_shexp", self.dtype, &[h, f]);
            }
        }
        add("output_norm.weight".into(), "F32", &[h]);
        add("output.weight".into(), self.dtype, &[h, self.vocabulary]);
        add("rope_freqs.weight".into(), "F32", &[h / self.heads / 2]);
        all
    }

    /// Tensors as safetensors files have them, experts stacked or each for itself.
    pub fn safetensors(&self, stacked: bool) -> Vec<Made> {
        let (h, f, e) = (self.hidden, self.ffn, self.experts);
        let mut all = Vec::new();
        let mut add = |name: String, dtype, dims: &[u64]| {
            all.push(Made::new(name, dtype, dims, self.seed));
        };
        add("model.embed_tokens.weight".into(), self.dtype, &[h, self.vocabulary]);
        for n in 0..self.layers {
            let mut add = |name: &str, dtype, dims: &[u64]| {
                add(format!("model.layers.{n}.{name}"), dtype, dims);
            };
            add("input_layernorm.weight", "F32", &[h]);
            add("self_attn.q_proj.weight", self.dtype, &[h, h]);
            add("self_attn.k_proj.weight", self.dtype, &[h, self.kv()]);
            add("self_attn.v_proj.weight", self.dtype, &[h, self.kv()]);
            add("self_attn.o_proj.weight", self.dtype, &[h, h]);
            add("post_attention_layernorm.weight", "F32", &[h]);
            if e == 0 {
                add("mlp.gate_proj.weight", self.dtype, &[h, f]);
                add("mlp.up_proj.weight", self.dtype, &[h, f]);
                add("mlp.down_proj.weight", self.dtype, &[f, h]);
                continue;
            }
            add("mlp.gate.weight", "F32", &[h, e]);
            add("mlp.shared_expert.up_proj.weight", self.dtype, &[h, f]);
            if stacked {
                add("mlp.experts.gate_up_proj", self.dtype, &[2 * f, h, e]);
                add("mlp.experts.down_proj", self.dtype, &[h, f, e]);
                continue;
            }
            for i in 0..e {
                add(&format!("mlp.experts.{i}.gate_proj.weight"), self.dtype, &[h, f]);
                add(&format!("mlp.experts.{i}.up_proj.weight"), self.dtype, &[h, f]);
                add(&format!("mlp.experts.{i}.down_proj.weight"), self.dtype, &[f, h]);
            }
        }
        add("model.norm.weight".into(), "F32", &[h]);
        add("lm_head.weight".into(), self.dtype, &[h, self.vocabulary]);
        all
    }

    /// What a GGUF file says of the model.
    pub fn metadata(&self) -> Vec<(String, Meta)> {
        let of = |key: &str, n: u64| (format!("llama.{key}"), Meta::U32(n as u32));
        let words = (0..self.vocabulary).map(|n| format!("word {n}")).collect();
        vec![
            ("general.architecture".into(), Meta::Text("llama".into())),
            of("block_count", self.layers),
            of("embedding_length", self.hidden),
            of("attention.head_count", self.heads),
            of("attention.head_count_kv", self.kv_heads),
            of("context_length", self.context),
            of("expert_count", self.experts),
            of("expert_used_count", self.experts.min(2)),
            ("tokenizer.ggml.tokens".into(), Meta::Texts(words)),
        ]
    }

    /// What `config.json` says of the model.
    pub fn config(&self) -> String {
        let Sizes { layers, hidden, heads, kv_heads, experts, .. } = self;
        format!(
            "{{\"model_type\": \"llama\", \"num_hidden_layers\": {layers}, \"hidden_size\": \
             {hidden}, \"num_attention_heads\": {heads}, \"num_key_value_heads\": {kv_heads}, \
             \"num_local_experts\": {experts}, \"num_experts_per_tok\": {}, \
             \"max_position_embeddings\": {}, \"vocab_size\": {}}}\n",
            experts.min(&2),
            self.context,
            self.vocabulary
        )
    }
}

/// A value of metadata.
#[derive(Clone, Debug)]
pub enum Meta {
    U16(u16),
    U32(u32),
    I32(i32),
    U64(u64),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<u32>),
    /// The number of a kind, and bytes that may not fit it.
    Raw(u32, Vec<u8>),
}

fn text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn value(out: &mut Vec<u8>, value: &Meta) {
    let array = |out: &mut Vec<u8>, kind: u32, count: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    let scalar = |out: &mut Vec<u8>, kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Meta::U16(n) => scalar(out, 2, &n.to_le_bytes()),
        Meta::U32(n) => scalar(out, 4, &n.to_le_bytes()),
        Meta::I32(n) => scalar(out, 5, &n.to_le_bytes()),
        Meta::U64(n) => scalar(out, 10, &n.to_le_bytes()),
        Meta::Raw(kind, bytes) => scalar(out, *kind, bytes),
        Meta::Text(word) => {
            out.extend(8u32.to_le_bytes());
            text(out, word.as_bytes());
        }
        Meta::Texts(words) => {
            array(out, 8, words.len());
            words.iter().for_each(|word| text(out, word.as_bytes()));
        }
        Meta::Numbers(numbers) => {
            array(out, 4, numbers.len());
            numbers.iter().for_each(|n| out.extend(n.to_le_bytes()));
        }
    }
}

fn pad(out: &mut Vec<u8>, alignment: u64) {
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
}

fn alignment_of(meta: &[(String, Meta)]) -> u64 {
    match meta.iter().find(|(key, _)| key == "general.alignment") {
        Some((_, Meta::U32(n))) => u64::from(*n),
        _ => 32,
    }
}

/// The header of a GGUF file, up to where data begins.
pub fn gguf_head(tensors: &[Made], meta: &[(String, Meta)]) -> Vec<u8> {
    let alignment = alignment_of(meta);
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((meta.len() as u64).to_le_bytes());
    for (key, of_key) in meta {
        text(&mut out, key.as_bytes());
        value(&mut out, of_key);
    }
    let mut at = 0u64;
    for tensor in tensors {
        text(&mut out, tensor.name.as_bytes());
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(dtype(tensor.dtype).1.to_le_bytes());
        out.extend(at.to_le_bytes());
        at = (at + tensor.bytes()).next_multiple_of(alignment);
    }
    pad(&mut out, alignment);
    out
}

/// The header of a safetensors file, its length before it.
pub fn safetensors_head(tensors: &[Made]) -> Vec<u8> {
    let (mut at, mut parts) = (0, Vec::new());
    parts.push("\"__metadata__\":{\"format\":\"pt\"}".to_string());
    for tensor in tensors {
        let shape: Vec<_> = tensor.dims.iter().rev().map(u64::to_string).collect();
        let end = at + tensor.bytes();
        parts.push(format!(
            "\"{}\":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            tensor.name,
            tensor.dtype,
            shape.join(",")
        ));
        at = end;
    }
    let mut json = format!("{{{}}}", parts.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json);
    out
}

/// Writes a header and then tensors, each padded.
fn write(path: &Path, head: &[u8], tensors: &[Made], alignment: u64) {
    let mut file = BufWriter::new(std::fs::File::create(path).expect("a file"));
    file.write_all(head).expect("written");
    let mut piece = vec![0; 1 << 20];
    for tensor in tensors {
        let (mut at, bytes) = (0, tensor.bytes());
        while at < bytes {
            let count = (bytes - at).min(piece.len() as u64) as usize;
            tensor.fill(at, &mut piece[..count]);
            file.write_all(&piece[..count]).expect("written");
            at += count as u64;
        }
        let rest = bytes.next_multiple_of(alignment) - bytes;
        file.write_all(&vec![0; rest as usize]).expect("written");
    }
    file.flush().expect("written");
}

/// Writes GGUF files of one model, as many as asked for; the first has what is said of it.
pub fn write_gguf(
    dir: &Path,
    name: &str,
    tensors: &[Made],
    meta: &[(String, Meta)],
    files: usize,
) -> Vec<PathBuf> {
    if files == 1 {
        let path = dir.join(format!("{name}.gguf"));
        write(&path, &gguf_head(tensors, meta), tensors, alignment_of(meta));
        return vec![path];
    }
    let each = tensors.len().div_ceil(files);
    let mut paths = Vec::new();
    for n in 0..files {
        let from = (n * each).min(tensors.len());
        let of_file = &tensors[from..(from + each).min(tensors.len())];
        let mut said = if n == 0 { meta.to_vec() } else { Vec::new() };
        said.push(("split.no".into(), Meta::U16(n as u16)));
        said.push(("split.count".into(), Meta::U16(files as u16)));
        said.push(("split.tensors.count".into(), Meta::I32(tensors.len() as i32)));
        let path = dir.join(format!("{name}-{:05}-of-{files:05}.gguf", n + 1));
        write(&path, &gguf_head(of_file, &said), of_file, alignment_of(&said));
        paths.push(path);
    }
    paths
}

/// Writes safetensors files of one model, an index if there are several, and what is said of
/// it; the path to be opened.
pub fn write_safetensors(dir: &Path, tensors: &[Made], config: &str, files: usize) -> PathBuf {
    std::fs::write(dir.join("config.json"), config).expect("written");
    if files == 1 {
        let path = dir.join("model.safetensors");
        write(&path, &safetensors_head(tensors), tensors, 1);
        return path;
    }
    let each = tensors.len().div_ceil(files);
    let (mut map, mut total) = (Vec::new(), 0);
    for (n, of_file) in tensors.chunks(each).enumerate() {
        let name = format!("model-{:05}-of-{files:05}.safetensors", n + 1);
        write(&dir.join(&name), &safetensors_head(of_file), of_file, 1);
        map.extend(of_file.iter().map(|made| format!("\"{}\": \"{name}\"", made.name)));
        total += of_file.iter().map(Made::bytes).sum::<u64>();
    }
    let path = dir.join("model.safetensors.index.json");
    let text = format!(
        "{{\"metadata\": {{\"total_size\": {total}}}, \"weight_map\": {{{}}}}}\n",
        map.join(", ")
    );
    std::fs::write(&path, text).expect("written");
    path
}

/// A directory of one test, removed when it ends.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        // Tests of one name may run beside each other.
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("kvtier-{name}-{process}-{number}"));
        drop(std::fs::remove_dir_all(&dir));
        std::fs::create_dir_all(&dir).expect("a directory");
        Scratch(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
