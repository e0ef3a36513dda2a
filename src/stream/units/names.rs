//! Roles of tensors by their names, in GGUF files and in the model families that use safetensors
//! files.

/// Numbers from here on are not taken for layers.
pub const MAX_LAYERS: u32 = 1 << 16;
/// Numbers from here on are not taken for experts.
pub const MAX_EXPERTS: u32 = 1 << 16;

/// The unit that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Belongs<'a> {
    /// The table of token embeddings.
    Embedding,
    /// No known role: the first word of the name.
    Other(&'a str),
    /// A layer.
    Layer(u32),
    /// An expert of a layer.
    Expert(u32, u32),
    /// All experts of a layer, if the last dimension is the number of experts.
    Stacked(u32),
    /// The norm after the last layer.
    Norm,
    /// The output projection.
    Head,
}

/// Prefixes of the language model's tensors, the longest first. Other parts of a model, such as a
/// vision tower, have layers too, which are not streamed as layers.
const PREFIXES: [&str; 14] = [
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.transformer.",
    "language_model.",
    "model.text_model.",
    "transformer.encoder.",
    "model.decoder.",
    "model.model.",
    "transformer.",
    "gpt_neox.",
    "backbone.",
    "model.",
    "",
];
const LAYERS: [&str; 4] = ["layers", "blk", "h", "blocks"];
const EMBEDDINGS: [&str; 13] = [
    "embed_tokens",
    "token_embd",
    "token_embd_norm",
    "token_types",
    "position_embd",
    "wte",
    "wpe",
    "embed_in",
    "word_embeddings",
    "word_embeddings_layernorm",
    "tok_embeddings",
    "embed_positions",
    "embeddings",
];
const NORMS: [&str; 8] = [
    "norm",
    "output_norm",
    "ln_f",
    "final_layer_norm",
    "final_layernorm",
    "norm_f",
    "final_norm",
    "norm_out",
];
const HEADS: [&str; 5] = ["lm_head", "output", "embed_out", "output_layer", "head"];
const STACKED: [&str; 5] =
    ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps", "ffn_up_gate_exps"];
/// Experts with tensors of their own, from before experts were stacked.
const APART: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];

/// A decimal number without sign and leading zeros.
fn number(word: &str, below: u32) -> Option<u32> {
    let plain =
        word.bytes().all(|b| b.is_ascii_digit()) && (word.len() == 1 || !word.starts_with('0'));
    word.parse().ok().filter(|n| plain && *n < below)
}

/// The unit that a tensor with this name belongs to.
pub fn belongs(name: &str) -> Belongs<'_> {
    for rest in PREFIXES.iter().filter_map(|prefix| name.strip_prefix(prefix)) {
        let (first, after) = rest.split_once('.').unwrap_or((rest, ""));
        if LAYERS.contains(&first) {
            let (word, inner) = after.split_once('.').unwrap_or((after, ""));
            if let Some(layer) = number(word, MAX_LAYERS) {
                return in_layer(layer, inner);
            }
        }
        match first {
            _ if EMBEDDINGS.contains(&first) => return Belongs::Embedding,
            _ if NORMS.contains(&first) => return Belongs::Norm,
            _ if HEADS.contains(&first) => return Belongs::Head,
            _ => {}
        }
    }
    let rest = name.strip_prefix("model.").filter(|rest| !rest.is_empty()).unwrap_or(name);
    Belongs::Other(rest.split('.').next().unwrap_or(rest))
}

fn in_layer(layer: u32, inner: &str) -> Belongs<'static> {
    let mut words = inner.split('.').peekable();
    let mut first = true;
    while let Some(word) = words.next() {
        if first && STACKED.contains(&word) {
            return Belongs::Stacked(layer);
        }
        let next = words.peek().copied();
        if word == "experts" || (first && APART.contains(&word)) {
            match next.map(|next| number(next, MAX_EXPERTS)) {
                Some(Some(expert)) => return Belongs::Expert(layer, expert),
                Some(None) if word == "experts" => return Belongs::Stacked(layer),
                _ => {}
            }
        }
        first = false;
    }
    Belongs::Layer(layer)
}

#[cfg(test)]
mod tests {
    use super::Belongs::*;
    use super::*;

    #[test]
    fn tensor_names_of_model_families_have_roles() {
        for (name, expected) in [
            ("token_embd.weight", Embedding),
            ("blk.0.attn_q.weight", Layer(0)),
            ("blk.12.ffn_gate_exps.weight", Stacked(12)),
            ("blk.12.ffn_gate_up_exps.weight", Stacked(12)),
            ("blk.12.ffn_down_exps.bias", Stacked(12)),
            ("blk.12.ffn_gate_shexp.weight", Layer(12)),
            ("blk.12.ffn_gate_inp.weight", Layer(12)),
            ("blk.12.exp_probs_b.bias", Layer(12)),
            ("blk.3.ffn_up.7.weight", Expert(3, 7)),
            ("blk.3.ffn_up.weight", Layer(3)),
            ("output_norm.weight", Norm),
            ("output.weight", Head),
            ("rope_freqs.weight", Other("rope_freqs")),
            ("per_layer_token_embd.weight", Other("per_layer_token_embd")),
            ("model.embed_tokens.weight", Embedding),
            ("model.layers.7.self_attn.q_proj.weight", Layer(7)),
            ("model.layers.7.mlp.experts.31.down_proj.weight", Expert(7, 31)),
            ("model.layers.7.mlp.experts.31.down_proj.weight_scale_inv", Expert(7, 31)),
            ("model.layers.7.block_sparse_moe.experts.0.w1.weight", Expert(7, 0)),
            ("model.layers.7.mlp.experts.gate_up_proj", Stacked(7)),
            ("model.layers.7.mlp.experts.gate_up_proj_blocks", Stacked(7)),
            ("model.layers.7.feed_forward.experts.down_proj", Stacked(7)),
            ("model.layers.7.mlp.shared_experts.up_proj.weight", Layer(7)),
            ("model.layers.7.mlp.shared_expert.up_proj.weight", Layer(7)),
            ("model.layers.7.mlp.gate.weight", Layer(7)),
            ("model.language_model.layers.3.mlp.up_proj.weight", Layer(3)),
            ("language_model.model.layers.3.mlp.up_proj.weight", Layer(3)),
            ("language_model.lm_head.weight", Head),
            ("transformer.h.11.attn.c_attn.weight", Layer(11)),
            ("h.11.attn.c_attn.weight", Layer(11)),
            ("transformer.wte.weight", Embedding),
            ("transformer.ln_f.bias", Norm),
            ("gpt_neox.layers.5.attention.dense.bias", Layer(5)),
            ("gpt_neox.embed_in.weight", Embedding),
            ("gpt_neox.final_layer_norm.weight", Norm),
            ("embed_out.weight", Head),
            ("model.norm.weight", Norm),
            ("lm_head.weight", Head),
            ("model.visual.blocks.1.attn.qkv.weight", Other("visual")),
            ("vision_tower.vision_model.encoder.layers.1.q.weight", Other("vision_tower")),
            ("v.blk.3.attn_q.weight", Other("v")),
            ("mtp.layers.0.x", Other("mtp")),
        ] {
            assert_eq!(belongs(name), expected, "{name}");
        }
    }

    #[test]
    fn malformed_layer_numbers_are_not_layers() {
        for name in ["blk.007.x", "blk.+1.x", "blk.65536.x", "blk.99999999999.x", "blk.", "blk"] {
            assert_eq!(belongs(name), Other("blk"), "{name}");
        }
        assert_eq!(belongs("model.layers.1.mlp.experts"), Layer(1));
        assert_eq!(belongs("model.layers.1.mlp.experts.65536.x"), Stacked(1));
        assert_eq!(
            (belongs("model."), belongs(""), belongs(".")),
            (Other("model"), Other(""), Other(""))
        );
    }
}
