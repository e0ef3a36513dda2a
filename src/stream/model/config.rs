//! Properties of a model in the `config.json` beside its safetensors files.

use crate::base::json::Json;
use crate::base::status::Result;
use crate::fail;
use crate::io::header::Header;
use crate::stream::model::Facts;
use crate::stream::model::facts::WindowRule;
use crate::stream::model::safetensors::corrupt;

/// Longest accepted `config.json`: 16 MiB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Names of the numbers in different model families.
const NAMES: [(&[&str], usize); 16] = [
    (&["num_hidden_layers", "n_layer", "n_layers", "num_layers"], LAYERS),
    (&["hidden_size", "n_embd", "d_model"], HIDDEN),
    (&["num_attention_heads", "n_head", "n_heads"], HEADS),
    (&["num_key_value_heads", "num_kv_heads", "multi_query_group_num"], KV_HEADS),
    (&["head_dim", "kv_channels"], HEAD_DIM),
    (&["v_head_dim"], VALUE_DIM),
    (&["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"], CONTEXT),
    (&["vocab_size", "padded_vocab_size"], VOCABULARY),
    (&["num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"], EXPERTS),
    (&["num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"], EXPERTS_USED),
    (&["kv_lora_rank"], RANK),
    (&["qk_rope_head_dim"], ROPE),
    (&["qk_nope_head_dim"], NOPE),
    (&["sliding_window"], WINDOW),
    (&["sliding_window_pattern"], PERIOD),
    (&["max_window_layers"], BEHIND),
];
const LAYERS: usize = 0;
const HIDDEN: usize = 1;
const HEADS: usize = 2;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 4;
const VALUE_DIM: usize = 5;
const CONTEXT: usize = 6;
const VOCABULARY: usize = 7;
const EXPERTS: usize = 8;
const EXPERTS_USED: usize = 9;
const RANK: usize = 10;
const ROPE: usize = 11;
const NOPE: usize = 12;
const WINDOW: usize = 13;
const PERIOD: usize = 14;
const BEHIND: usize = 15;

/// Objects that describe the language model, where it is one of several models.
const INNER: [&str; 4] = ["text_config", "llm_config", "language_config", "ffn_config"];

#[derive(Default)]
struct Config {
    architecture: String,
    numbers: [u32; 16],
    /// `use_sliding_window`, if given.
    uses_window: Option<bool>,
    /// From `layer_types`, if given: number of layers with a window, and number of layers.
    layer_types: Option<(u64, u64)>,
}

/// Reads an open `config.json`.
pub fn read(file: &Header) -> Result<Facts> {
    if file.bytes() > MAX_CONFIG_BYTES {
        fail!(Limit, "{} bytes: more than {MAX_CONFIG_BYTES}", file.bytes());
    }
    parse(&file.read(0, file.bytes())?)
}

/// Parses the text of a `config.json`.
pub fn parse(text: &[u8]) -> Result<Facts> {
    let mut config = Config::default();
    let mut json = Json::new(text);
    let read = object(&mut json, &mut config);
    read.and_then(|()| json.end()).map_err(corrupt)?;
    Ok(config.facts())
}

fn object(json: &mut Json<'_>, config: &mut Config) -> Result<()> {
    json.object(|json, key| {
        if INNER.contains(&key) && json.is_nested() {
            return object(json, config);
        }
        if key == "model_type" && json.is_string() {
            let word = json.string()?;
            if config.architecture.is_empty() {
                config.architecture = word.into_owned();
            }
            return Ok(());
        }
        if key == "use_sliding_window" {
            return match json.flag()? {
                None => json.skip(),
                said => {
                    config.uses_window = config.uses_window.or(said);
                    Ok(())
                }
            };
        }
        if key == "layer_types" && json.is_array() {
            return layer_types(json, config);
        }
        let found = NAMES.iter().find(|(names, _)| names.contains(&key));
        match found {
            // A null, a list with a number for each layer, and numbers that are no counts (such as
            // -1 for an unlimited context) are ignored.
            Some((_, slot)) if json.is_number() => {
                let value = json.f64()?;
                let counts = value.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&value);
                let number = config.numbers.get_mut(*slot).filter(|n| counts && **n == 0);
                if let Some(number) = number {
                    *number = value as u32;
                }
                Ok(())
            }
            _ => json.skip(),
        }
    })
}

/// Parses a list of words, one for each layer.
fn layer_types(json: &mut Json<'_>, config: &mut Config) -> Result<()> {
    let (mut windowed, mut of) = (0, 0);
    json.array(|json| {
        of += 1;
        if !json.is_string() {
            return json.skip();
        }
        windowed += u64::from(json.string()? == "sliding_attention");
        Ok(())
    })?;
    config.layer_types.get_or_insert((windowed, of));
    Ok(())
}

impl Config {
    /// The rule for which layers have a window.
    fn window_rule(&self) -> WindowRule {
        let number = |slot: usize| self.numbers.get(slot).copied().unwrap_or(0).into();
        match (self.layer_types, self.uses_window) {
            (Some((windowed, of)), _) => WindowRule::Listed { windowed, of },
            (None, Some(true)) if number(BEHIND) > 0 => WindowRule::Behind(number(BEHIND)),
            _ if number(PERIOD) > 0 => WindowRule::AllBut(number(PERIOD)),
            _ => WindowRule::Unsaid,
        }
    }

    fn facts(self) -> Facts {
        let of = |slot: usize| self.numbers.get(slot).copied().unwrap_or(0);
        let or = |value: u32, other: u32| if value > 0 { value } else { other };
        let head_dim = or(of(HEAD_DIM), of(HIDDEN).checked_div(of(HEADS)).unwrap_or(0));
        // Compressed keys count as one head, and values are part of them.
        let compressed = of(RANK) > 0 && of(ROPE) > 0;
        let rank = of(RANK).saturating_add(of(ROPE));
        let window_rule = self.window_rule();
        // A window that is not used is ignored.
        let window = if self.uses_window == Some(false) { 0 } else { of(WINDOW) };
        let mut facts = Facts {
            layers: of(LAYERS),
            hidden: of(HIDDEN),
            heads: of(HEADS),
            kv_heads: if compressed { 1 } else { or(of(KV_HEADS), of(HEADS)) },
            key_dim: if compressed { rank } else { head_dim },
            value_dim: if compressed { 0 } else { or(of(VALUE_DIM), head_dim) },
            context: of(CONTEXT),
            vocabulary: of(VOCABULARY),
            experts: of(EXPERTS),
            experts_used: of(EXPERTS_USED),
            architecture: self.architecture,
            ..Facts::default()
        };
        facts.set_window(window, window_rule);
        facts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::status::Status;

    #[test]
    fn names_of_model_families_are_equivalent() {
        let llama = br#"{"model_type":"llama","num_hidden_layers":32,"hidden_size":4096,
            "num_attention_heads":32,"num_key_value_heads":8,"max_position_embeddings":8192,
            "vocab_size":128256,"head_dim":null,"rope_scaling":{"num_hidden_layers":1}}"#;
        let facts = parse(llama).expect("sound");
        let expected = Facts {
            architecture: "llama".into(),
            layers: 32,
            hidden: 4096,
            heads: 32,
            kv_heads: 8,
            key_dim: 128,
            value_dim: 128,
            context: 8192,
            vocabulary: 128_256,
            experts: 0,
            experts_used: 0,
            window: 0,
            windowed_layers: 0,
        };
        assert_eq!(facts, expected);
        let mla = br#"{"model_type":"deepseek_v3","num_hidden_layers":61,"kv_lora_rank":512,
            "qk_rope_head_dim":64,"v_head_dim":128,"num_attention_heads":128,"hidden_size":7168,
            "n_routed_experts":256,"num_experts_per_tok":8}"#;
        let facts = parse(mla).expect("sound");
        assert_eq!((facts.kv_heads, facts.key_dim, facts.value_dim), (1, 576, 0));
        assert_eq!((facts.experts, facts.experts_used), (256, 8));
        let inner = br#"{"model_type":"gemma3","text_config":{"model_type":"gemma3_text",
            "num_hidden_layers":26},"vision_config":{"hidden_size":7}}"#;
        let facts = parse(inner).expect("sound");
        assert_eq!((facts.architecture.as_str(), facts.layers, facts.hidden), ("gemma3", 26, 0));
        let gpt2 = br#"{"n_layer":12,"n_embd":768,"n_head":12,"n_positions":1024}"#;
        let facts = parse(gpt2).expect("sound");
        assert_eq!((facts.layers, facts.kv_heads, facts.value_dim), (12, 12, 64));
    }

    #[test]
    fn only_layers_with_a_window_are_counted() {
        let window = |text: &str| {
            let facts = parse(text.as_bytes()).expect("sound");
            (facts.window, facts.windowed_layers)
        };
        let gemma = r#"{"model_type":"gemma3","text_config":{"num_hidden_layers":26,
            "sliding_window":512,"sliding_window_pattern":6}}"#;
        assert_eq!(window(gemma), (512, 22));
        let listed = r#"{"model_type":"gpt_oss","num_hidden_layers":3,"sliding_window":128,
            "layer_types":["sliding_attention","full_attention","sliding_attention"]}"#;
        assert_eq!(window(listed), (128, 2));
        let short = listed.replace(r#","full_attention""#, "");
        assert_eq!(window(&short), (128, 0));
        assert_eq!(window(&listed.replace("128", "null")), (0, 0));
        assert_eq!(window(&listed.replace("128", "-1")), (0, 0));
        let odd = listed.replace(r#""full_attention""#, "[1,{}],null,7");
        assert_eq!(window(&odd), (128, 0));
        let qwen = r#"{"model_type":"qwen2","num_hidden_layers":28,"sliding_window":4096,
            "use_sliding_window":true,"max_window_layers":21}"#;
        assert_eq!(window(qwen), (4096, 7));
        assert_eq!(window(&qwen.replace("true", "false")), (0, 0));
        // Not said whether it is used, nor of which layers: all of the context is reserved.
        assert_eq!(window(&qwen.replace("true", "null")), (4096, 0));
        let mistral = r#"{"model_type":"mistral","num_hidden_layers":32,"sliding_window":4096}"#;
        assert_eq!(window(mistral), (4096, 32));
    }

    #[test]
    fn invalid_config_is_rejected() {
        for text in ["", "[]", "{\"a\":1", "{} {}", "{\"n_layer\":--1}"] {
            let error = parse(text.as_bytes()).expect_err(text);
            assert_eq!(error.status(), Status::Corrupt, "{text}: {error}");
        }
        let nothing = br#"{"n_layer":[1,2],"n_embd":"x","n_head":null,"n_positions":-1,
            "num_experts":4294967296,"vocab_size":0.5}"#;
        assert_eq!(parse(nothing), Ok(Facts::default()));
    }
}
