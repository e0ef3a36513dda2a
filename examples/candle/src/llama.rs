//! A Llama on candle: no more than the forward pass. Its KV is in a cache that the caller owns.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, IndexOp, Result, Tensor, bail};
use candle_nn::{Embedding, Linear, Module, RmsNorm, VarBuilder};
use serde::Deserialize;

use crate::cache::KvCache;

/// `config.json` of a model, as far as it matters here.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    pub model_type: String,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub vocab_size: usize,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    #[serde(default)]
    pub head_dim: Option<usize>,
    #[serde(default)]
    pub rope_theta: Option<f64>,
    #[serde(default)]
    pub rope_parameters: Option<Rope>,
    #[serde(default)]
    pub rope_scaling: Option<serde_json::Value>,
    #[serde(default)]
    pub tie_word_embeddings: bool,
    #[serde(default)]
    pub eos_token_id: Option<TokenIds>,
    #[serde(default)]
    pub attention_bias: bool,
    #[serde(default)]
    pub mlp_bias: bool,
    #[serde(default)]
    pub hidden_act: Option<String>,
}

/// A token, or a list of tokens.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

/// Rotary positions, as newer configurations have them.
#[derive(Clone, Debug, Deserialize)]
pub struct Rope {
    pub rope_theta: f64,
    #[serde(default)]
    pub rope_type: Option<String>,
}

impl Config {
    pub fn head_dim(&self) -> usize {
        let heads = self.num_attention_heads.max(1); // `check` refuses 0
        self.head_dim.unwrap_or(self.hidden_size / heads)
    }

    fn rope_theta(&self) -> f64 {
        self.rope_parameters.as_ref().map(|rope| rope.rope_theta).or(self.rope_theta).unwrap_or(1e4)
    }

    /// Whether a token ends the text.
    pub fn ends_with(&self, token: u32) -> bool {
        match &self.eos_token_id {
            None => false,
            Some(TokenIds::One(end)) => *end == token,
            Some(TokenIds::Several(ends)) => ends.contains(&token),
        }
    }

    fn check(&self) -> Result<()> {
        if self.model_type != "llama" {
            bail!("model_type is {:?}: only \"llama\" is implemented here", self.model_type);
        }
        let kind = self.rope_parameters.as_ref().and_then(|rope| rope.rope_type.as_deref());
        if kind.unwrap_or("default") != "default" || self.rope_scaling.is_some() {
            bail!("the model scales its rotary positions, which is not implemented here");
        }
        if self.attention_bias || self.mlp_bias {
            bail!("attention_bias or mlp_bias is set: biases are not implemented here");
        }
        if let Some(act) = &self.hidden_act
            && act != "silu"
        {
            bail!("hidden_act is {act:?}: only \"silu\" is implemented here");
        }
        let heads = (self.num_attention_heads, self.num_key_value_heads);
        if heads.0 == 0 || heads.1 == 0 || heads.0 % heads.1 != 0 || self.head_dim() % 2 != 0 {
            bail!(
                "{} heads with {} KV heads of {}: not a Llama",
                heads.0,
                heads.1,
                self.head_dim()
            );
        }
        Ok(())
    }
}

struct Layer {
    input_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

pub struct Llama {
    pub config: Config,
    embeddings: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    cos: Tensor,
    sin: Tensor,
}

impl Llama {
    /// Loads `config.json` and `model.safetensors` of a folder. KV depends on both, and so does the
    /// digest.
    pub fn load(folder: &Path) -> anyhow::Result<(Llama, blake3::Hash)> {
        use anyhow::Context;
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let text = read("config.json")?;
        let config: Config =
            serde_json::from_slice(&text).context("config.json is not a Llama's")?;
        let weights = read("model.safetensors")?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(blake3::hash(&text).as_bytes()).update(&weights);
        let digest = hasher.finalize();
        let tensors = candle_core::safetensors::load_buffer(&weights, &Device::Cpu)?;
        Ok((Llama::new(config, tensors)?, digest))
    }

    pub fn new(config: Config, tensors: HashMap<String, Tensor>) -> Result<Llama> {
        config.check()?;
        let (hidden, inner, dim) =
            (config.hidden_size, config.intermediate_size, config.head_dim());
        let heads = (config.num_attention_heads * dim, config.num_key_value_heads * dim);
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let (vb, eps) = (weights.pp("model"), config.rms_norm_eps);
        let linear = |from, to, vb: VarBuilder| candle_nn::linear_no_bias(from, to, vb);
        let norm = |vb: VarBuilder| candle_nn::rms_norm(hidden, eps, vb);
        let layer = |at: usize| -> Result<Layer> {
            let vb = vb.pp("layers").pp(at);
            let (attn, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
            Ok(Layer {
                input_norm: norm(vb.pp("input_layernorm"))?,
                q: linear(hidden, heads.0, attn.pp("q_proj"))?,
                k: linear(hidden, heads.1, attn.pp("k_proj"))?,
                v: linear(hidden, heads.1, attn.pp("v_proj"))?,
                o: linear(heads.0, hidden, attn.pp("o_proj"))?,
                mlp_norm: norm(vb.pp("post_attention_layernorm"))?,
                gate: linear(hidden, inner, mlp.pp("gate_proj"))?,
                up: linear(hidden, inner, mlp.pp("up_proj"))?,
                down: linear(inner, hidden, mlp.pp("down_proj"))?,
            })
        };
        let embeddings = candle_nn::embedding(config.vocab_size, hidden, vb.pp("embed_tokens"))?;
        let head = match config.tie_word_embeddings {
            true => Linear::new(embeddings.embeddings().clone(), None),
            false => linear(hidden, config.vocab_size, weights.pp("lm_head"))?,
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<_>>()?;
        let norm = norm(vb.pp("norm"))?;
        let (cos, sin) = rotations(&config)?;
        Ok(Llama { config, embeddings, layers, norm, head, cos, sin })
    }

    /// Computes tokens that follow those in the cache, appends their KV, and returns the logits
    /// after the last one.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache) -> Result<Tensor> {
        let (count, start) = (tokens.len(), cache.tokens());
        let mask = mask(count, start)?;
        let (cos, sin) = (self.cos.narrow(0, start, count)?, self.sin.narrow(0, start, count)?);
        let mut x = self.embeddings.forward(&Tensor::new(tokens, &Device::Cpu)?)?;
        for (at, layer) in self.layers.iter().enumerate() {
            let h = layer.input_norm.forward(&x)?;
            x = (x + self.attend(
                layer,
                &h,
                (&cos, &sin),
                &mask,
                cache.layer(at, start + count)?,
            )?)?;
            let h = layer.mlp_norm.forward(&x)?;
            let gate = candle_nn::ops::silu(&layer.gate.forward(&h)?)?;
            x = (x + layer.down.forward(&(gate * layer.up.forward(&h)?)?)?)?;
        }
        cache.set_tokens(start + count);
        let last = x.narrow(0, count - 1, 1)?;
        self.head.forward(&self.norm.forward(&last)?)?.squeeze(0)
    }

    /// Attention of one layer. `k_all` and `v_all` are the whole cache of the layer.
    fn attend(
        &self,
        layer: &Layer,
        h: &Tensor,
        (cos, sin): (&Tensor, &Tensor),
        mask: &Option<Tensor>,
        (k_all, v_all, end): (Tensor, Tensor, usize),
    ) -> Result<Tensor> {
        let (count, dim) = (h.dim(0)?, self.config.head_dim());
        let (heads, kv_heads) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        // [tokens, heads * dim] -> [heads, tokens, dim]
        let split =
            |x: Tensor, heads| x.reshape((count, heads, dim))?.transpose(0, 1)?.contiguous();
        let turn = |x: Tensor| candle_nn::rotary_emb::rope(&x.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let q = turn(split(layer.q.forward(h)?, heads)?)?;
        let k = turn(split(layer.k.forward(h)?, kv_heads)?)?;
        let v = split(layer.v.forward(h)?, kv_heads)?;
        k_all.slice_set(&k, 1, end - count)?;
        v_all.slice_set(&v, 1, end - count)?;
        let (k, v) = (k_all.narrow(1, 0, end)?, v_all.narrow(1, 0, end)?);
        // The queries of a group share their KV head.
        let q =
            (q * (dim as f64).powf(-0.5))?.reshape((kv_heads, heads / kv_heads * count, dim))?;
        let mut scores = q.matmul(&k.t()?)?;
        if let Some(mask) = mask {
            let by_head = scores.reshape((heads, count, end))?;
            scores = by_head.broadcast_add(mask)?.reshape(scores.shape())?;
        }
        let out = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)?;
        let out =
            out.reshape((heads, count, dim))?.transpose(0, 1)?.reshape((count, heads * dim))?;
        layer.o.forward(&out)
    }
}

/// Cosines and sines of all positions.
fn rotations(config: &Config) -> Result<(Tensor, Tensor)> {
    let (dim, theta) = (config.head_dim(), config.rope_theta());
    let frequencies: Vec<f32> =
        (0..dim).step_by(2).map(|i| theta.powf(-(i as f64) / dim as f64) as f32).collect();
    let frequencies = Tensor::new(frequencies, &Device::Cpu)?.unsqueeze(0)?;
    let positions = Tensor::arange(0u32, config.max_position_embeddings as u32, &Device::Cpu)?;
    let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&frequencies)?;
    Ok((angles.cos()?, angles.sin()?))
}

/// Adds minus infinity where a token would see a later one; none for a single token.
fn mask(count: usize, start: usize) -> Result<Option<Tensor>> {
    if count == 1 {
        return Ok(None);
    }
    let end = start + count;
    let row =
        |t: usize| (0..end).map(move |at| if at > start + t { f32::NEG_INFINITY } else { 0.0 });
    let all: Vec<f32> = (0..count).flat_map(row).collect();
    Tensor::from_vec(all, (1, count, end), &Device::Cpu).map(Some)
}

/// The token with the highest logit.
pub fn greedy(logits: &Tensor) -> Result<u32> {
    logits.i(..)?.argmax(0)?.to_scalar()
}
