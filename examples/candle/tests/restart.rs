//! Conversations that continue in another process: of a random model that the tests make, and of a
//! real one that KVTIER_CANDLE_MODEL names. Answers are compared with those without a store.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use candle_core::{Device, Tensor};
use kvtier::api::Level;
use kvtier_candle::chat::{CHUNK, KvStore, run};
use kvtier_candle::llama::Llama;
use tempfile::TempDir;

/// Numbers that look random, the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn below(&mut self, end: usize) -> usize {
        self.next() as usize % end
    }
}

const VOCABULARY: usize = 256;

/// Writes a random model of three layers, with a tokenizer of numbered words.
fn write_model(folder: &Path, seed: u64) {
    let (hidden, inner, layers, heads, kv_heads, dim) = (64, 96, 3, 4, 2, 16);
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1 << 16,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("config.json");
    let mut random = Random(seed);
    let mut tensors = HashMap::new();
    let mut add = |name: String, rows: usize, columns: usize, scale: f32| {
        let mut one = || (random.next() as f32 / (1u64 << 31) as f32 - 0.5) * scale;
        let numbers: Vec<f32> = (0..rows * columns).map(|_| one()).collect();
        let shape = if rows == 1 { vec![columns] } else { vec![rows, columns] };
        tensors.insert(name, Tensor::from_vec(numbers, shape, &Device::Cpu).expect("a tensor"));
    };
    add("model.embed_tokens.weight".into(), VOCABULARY, hidden, 2.0);
    add("lm_head.weight".into(), VOCABULARY, hidden, 2.0);
    add("model.norm.weight".into(), 1, hidden, 2.0);
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        add(name("input_layernorm"), 1, hidden, 2.0);
        add(name("post_attention_layernorm"), 1, hidden, 2.0);
        add(name("self_attn.q_proj"), heads * dim, hidden, 2.0);
        add(name("self_attn.k_proj"), kv_heads * dim, hidden, 2.0);
        add(name("self_attn.v_proj"), kv_heads * dim, hidden, 1.0);
        add(name("self_attn.o_proj"), hidden, heads * dim, 1.0);
        add(name("mlp.gate_proj"), inner, hidden, 1.0);
        add(name("mlp.up_proj"), inner, hidden, 1.0);
        add(name("mlp.down_proj"), hidden, inner, 1.0);
    }
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).expect("weights");
    let vocabulary: HashMap<String, usize> =
        (0..VOCABULARY).map(|i| (format!("w{i}"), i)).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).expect("tokenizer.json");
}

fn random_prompt(seed: u64, count: usize) -> String {
    let mut random = Random(seed);
    let words: Vec<_> = (0..count).map(|_| format!("w{}", random.below(VOCABULARY))).collect();
    words.join(" ")
}

/// A folder with a model `m`, and room for stores and conversations.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(TempDir::new().expect("a folder"));
        place.model("m", 1);
        place
    }

    fn model(&self, name: &str, seed: u64) -> PathBuf {
        let folder = self.path(name);
        std::fs::create_dir(&folder).expect("a folder");
        write_model(&folder, seed);
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs the program with the model `m`.
    fn ask(&self, args: &[&str]) -> Answer {
        let model = self.path("m");
        let mut all = vec!["--model", model.to_str().expect("UTF-8"), "--json"];
        all.extend(args);
        Answer::of(command(&all).output().expect("the program"), args)
    }

    fn string(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_string()
    }
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvtier-candle"));
    command.args(args).stdin(Stdio::null());
    command
}

#[derive(Debug)]
struct Answer {
    text: String,
    prompt: usize,
    restored: usize,
}

impl Answer {
    fn of(output: Output, args: &[&str]) -> Answer {
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {}: {words}", output.status);
        let out = String::from_utf8(output.stdout).expect("UTF-8");
        let (text, line) = out.trim_end().rsplit_once('\n').expect("an answer and a line");
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let number = |name: &str| line[name].as_u64().expect(name) as usize;
        Answer {
            text: text.to_string(),
            prompt: number("prompt_tokens"),
            restored: number("restored_tokens"),
        }
    }
}

#[test]
fn a_second_process_restores_the_prompt_and_gives_the_same_answer() {
    let place = Place::new();
    let (disk, prompt) = (place.string("kv"), random_prompt(3, 3 * CHUNK));
    let without = place.ask(&["--prompt", &prompt]);
    let first = place.ask(&["--prompt", &prompt, "--disk", &disk]);
    let second = place.ask(&["--prompt", &prompt, "--disk", &disk]);
    assert_eq!((without.prompt, without.restored, first.restored), (3 * CHUNK, 0, 0));
    // The last token is computed for its logits, and with it its chunk.
    assert_eq!(second.restored, 2 * CHUNK);
    assert_eq!((&first.text, &second.text), (&without.text, &without.text));
    assert!(without.text.split(' ').count() >= 64, "{}", without.text);
}

#[test]
fn logits_after_a_restore_are_the_same_bits() {
    let place = Place::new();
    let (model, digest) = Llama::load(&place.path("m")).expect("a model");
    let mut random = Random(9);
    let prompt: Vec<u32> = (0..2 * CHUNK + 77).map(|_| random.below(VOCABULARY) as u32).collect();
    let bits = |store: Option<&KvStore>| {
        let done = run(&model, store, &prompt, 1, |_| {}, |_| {}).expect("a run");
        let logits: Vec<f32> = done.logits.to_vec1().expect("logits");
        (done.restored_tokens, logits.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    let without = bits(None).1;
    for restored in [0, 2 * CHUNK, 2 * CHUNK] {
        let disk = place.path("kv");
        let store =
            KvStore::open(&disk, &model.config, digest.as_bytes(), Level::Ram).expect("a store");
        assert!(bits(Some(&store)) == (restored, without.clone()), "{restored} tokens restored");
        store.close().expect("written");
    }
}

#[test]
fn a_conversation_continues_and_branches() {
    let place = Place::new();
    let disk = place.string("kv");
    let turns = [random_prompt(1, 200), random_prompt(2, 90), random_prompt(3, 150)];
    // The same conversation with and without a store, each turn in a process of its own.
    let turn = |chat: &str, prompt: &str| {
        let (kept, plain) = (place.string(&format!("{chat}.kept")), place.string(chat));
        let a = place.ask(&["--chat", &kept, "--prompt", prompt, "--disk", &disk]);
        let b = place.ask(&["--chat", &plain, "--prompt", prompt]);
        assert_eq!(a.text, b.text, "{chat}");
        let read = |path| std::fs::read_to_string(path).expect("a conversation");
        assert_eq!(read(kept), read(plain));
        a
    };
    assert_eq!(turn("chat", &turns[0]).restored, 0);
    for copy in ["chat", "chat.kept"] {
        std::fs::copy(place.path(copy), place.path(&copy.replace("chat", "other")))
            .expect("a copy");
    }
    // The conversation has 200 + 64 tokens; the KV of the last one was not computed.
    assert_eq!(turn("chat", &turns[1]).restored, 263 / CHUNK * CHUNK);
    assert_eq!(turn("chat", &turns[2]).restored, (264 + 90 + 63) / CHUNK * CHUNK);
    assert_eq!(turn("other", &turns[2]).restored, 263 / CHUNK * CHUNK, "a branch");
}

#[test]
fn durable_kv_survives_kill_9() {
    let place = Place::new();
    let (model, disk) = (place.string("m"), place.string("kv"));
    let prompt = random_prompt(5, 2 * CHUNK + 10);
    // More tokens than it can write before anyone reads them: it is killed while it computes.
    let mut args = vec!["--model", &model, "--disk", &disk, "--durable", "--prompt", &prompt];
    let mut child = command(&[&args[..], &["--tokens", "60000"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program");
    let mut line = String::new();
    let mut words = BufReader::new(child.stderr.take().expect("a pipe"));
    words.read_line(&mut line).expect("a line");
    if line != format!("stored: {} tokens\n", 2 * CHUNK) {
        words.read_to_string(&mut line).expect("words");
        panic!("{line}");
    }
    child.kill().expect("a signal");
    assert_eq!(child.wait().expect("its end").signal(), Some(9), "it was not killed");
    args.drain(..2);
    let after = place.ask(&args);
    assert_eq!(after.restored, 2 * CHUNK);
    assert_eq!(after.text, place.ask(&["--prompt", &prompt]).text);
}

/// Changes config.json of the model `m`, and returns the text before.
fn edit_config(place: &Place, change: impl FnOnce(&mut serde_json::Value)) -> String {
    let path = place.path("m").join("config.json");
    let before = std::fs::read_to_string(&path).expect("config.json");
    let mut config = serde_json::from_str(&before).expect("JSON");
    change(&mut config);
    std::fs::write(&path, config.to_string()).expect("config.json");
    before
}

/// The files that have KV.
fn segments(disk: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(disk).expect("the store's folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let big =
        |path: &PathBuf| path.metadata().is_ok_and(|data| data.is_file() && data.len() > 65536);
    paths.filter(big).collect()
}

#[test]
fn damaged_kv_is_computed_again() {
    let place = Place::new();
    let (disk, prompt) = (place.string("kv"), random_prompt(7, 3 * CHUNK));
    let without = place.ask(&["--prompt", &prompt]).text;
    let mut random = Random(11);
    let mut lost = 0;
    for round in 0..8 {
        let before = place.ask(&["--prompt", &prompt, "--disk", &disk]);
        assert_eq!(before.text, without, "round {round}");
        let files = segments(&disk);
        assert!(!files.is_empty());
        for path in files {
            let mut bytes = std::fs::read(&path).expect("a file");
            // One bit, then more of them; the first page says what the file is.
            for _ in 0..1 << round {
                let at = 4096 + random.below(bytes.len() - 4096);
                bytes[at] ^= 1 << random.below(8);
            }
            std::fs::write(&path, bytes).expect("a file");
        }
        let after = place.ask(&["--prompt", &prompt, "--disk", &disk]);
        assert_eq!(after.text, without, "round {round}: wrong bytes were used");
        assert!(after.restored <= 2 * CHUNK && after.restored % CHUNK == 0);
        lost += usize::from(after.restored < 2 * CHUNK);
    }
    assert!(lost > 0, "no flip met KV that was needed");
}

#[test]
fn models_with_other_weights_share_nothing() {
    let place = Place::new();
    let other = Place::new();
    std::fs::remove_dir_all(other.path("m")).expect("a folder");
    other.model("m", 2);
    let (disk, prompt) = (place.string("kv"), random_prompt(13, 2 * CHUNK + 1));
    let args = ["--prompt", &prompt, "--disk", &disk];
    let first = place.ask(&args);
    let second = other.ask(&args);
    assert_eq!(second.restored, 0);
    assert_eq!(second.text, other.ask(&args[..2]).text);
    assert_ne!(second.text, first.text);
    for place in [&place, &other] {
        assert_eq!(place.ask(&args).restored, 2 * CHUNK);
    }
}

#[test]
fn a_changed_configuration_shares_nothing() {
    let place = Place::new();
    let (disk, prompt) = (place.string("kv"), random_prompt(17, 2 * CHUNK + 1));
    let args = ["--prompt", &prompt, "--disk", &disk];
    let first = place.ask(&args);
    edit_config(&place, |config| config["rope_theta"] = serde_json::json!(500_000.0));
    let second = place.ask(&args);
    assert_eq!(second.restored, 0);
    assert_eq!(second.text, place.ask(&args[..2]).text);
    assert_ne!(second.text, first.text);
    assert_eq!(place.ask(&args).restored, 2 * CHUNK);
}

#[test]
fn a_list_of_end_tokens_ends_the_answer() {
    let place = Place::new();
    let prompt = random_prompt(19, 20);
    let without = place.ask(&["--prompt", &prompt]).text;
    let tokens: Vec<_> = without.split(' ').collect();
    let end: u32 = tokens[5].trim_start_matches('w').parse().expect("a token");
    edit_config(&place, |config| config["eos_token_id"] = serde_json::json!([9999, end]));
    let text = place.ask(&["--prompt", &prompt]).text;
    let count = tokens.iter().position(|token| *token == tokens[5]).expect("the token") + 1;
    assert_eq!(text, tokens[..count].join(" "));
}

#[test]
fn bad_input_is_refused_in_words() {
    let place = Place::new();
    let (model, disk) = (place.string("m"), place.string("kv"));
    let refused = |args: &[&str], expected: &str| {
        let output = command(args).output().expect("the program");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && words.contains(expected), "{args:?}: {words}");
        assert!(!words.contains("panicked"), "{words}");
    };
    refused(&["--model", "/nowhere"], "cannot read /nowhere/config.json");
    refused(&["--model", &model, "--prompt", ""], "the prompt is empty");
    refused(&["--model", &model, "--tokens", "0"], "0 is not in 1..");
    refused(&["--model", &model, "--tokens", "65536"], "at most 65536 positions");
    refused(&["--model", &model, "--disk", "/nowhere/kv"], "/nowhere");
    let chat = place.string("chat");
    std::fs::write(&chat, "once upon a time").expect("a file");
    refused(&["--model", &model, "--chat", &chat], "is no conversation");
    let (llama, digest) = Llama::load(&place.path("m")).expect("a model");
    let open = KvStore::open(&place.path("kv"), &llama.config, digest.as_bytes(), Level::Ram);
    refused(&["--model", &model, "--disk", &disk], "KVT_E_BUSY");
    open.expect("a store").close().expect("written");
    for (name, value, expected) in [
        ("attention_bias", serde_json::json!(true), "attention_bias or mlp_bias is set"),
        ("mlp_bias", serde_json::json!(true), "attention_bias or mlp_bias is set"),
        ("hidden_act", serde_json::json!("gelu"), "hidden_act is \"gelu\": only \"silu\""),
        ("num_attention_heads", serde_json::json!(0), "not a Llama"),
    ] {
        let before = edit_config(&place, |config| config[name] = value);
        refused(&["--model", &model], expected);
        std::fs::write(place.path("m").join("config.json"), before).expect("config.json");
    }
    std::fs::write(place.path("m").join("config.json"), "{}").expect("a file");
    refused(&["--model", &model], "config.json");
}

#[test]
fn a_real_model_continues_its_conversation() {
    let Some(model) = std::env::var_os("KVTIER_CANDLE_MODEL") else {
        eprintln!(
            "SKIP: KVTIER_CANDLE_MODEL is not set: the folder of a Llama, such as SmolLM2 135M"
        );
        return;
    };
    let place = Place(TempDir::new().expect("a folder"));
    std::os::unix::fs::symlink(model, place.path("m")).expect("a link");
    let disk = place.string("kv");
    let facts: Vec<_> =
        (1..=60).map(|i| format!("House {i} has {} windows.", i * 7 % 23)).collect();
    let prompts = [format!("Remember this. {}", facts.join(" ")), "How many has house 3?".into()];
    let mut restored = Vec::new();
    for prompt in &prompts {
        let (kept, plain) = (place.string("kept"), place.string("plain"));
        let a = place.ask(&["--chat", &kept, "--prompt", prompt, "--disk", &disk]);
        let b = place.ask(&["--chat", &plain, "--prompt", prompt]);
        assert_eq!(a.text, b.text);
        restored.push((a.restored, a.prompt));
        eprintln!("{restored:?}: {}", a.text);
    }
    assert_eq!(restored[0].0, 0);
    assert!(restored[1].0 >= restored[0].1 / CHUNK * CHUNK, "{restored:?}");
}
