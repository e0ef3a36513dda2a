//! The reference engine compared with torch: logits of the same weights and text.

use kvtier::sparse::RetainedTokens;

use crate::reference::engine::Engine;
use crate::reference::model::{Form, Model};
use crate::reference::policies::Policies;

/// A text, the logits behind its last symbols, and those where these see few symbols only.
struct Fixture {
    symbols: Vec<u8>,
    rows: usize,
    /// First symbols, and nearest ones before the last, that are seen.
    seen: (u32, u32),
    logits: Vec<f32>,
    blind: Vec<f32>,
}

fn fixture(name: &str) -> Fixture {
    let path = format!("{}/tests/data/models/{name}.logits", env!("CARGO_MANIFEST_DIR"));
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let count = |at: usize| u32::from_le_bytes(bytes[4 * at..4 * at + 4].try_into().expect("four"));
    let (tokens, rows) = (count(0) as usize, count(1) as usize);
    let numbers = bytes[16 + tokens..].chunks_exact(4);
    let numbers = numbers.map(|four| f32::from_le_bytes(four.try_into().expect("four")));
    let mut logits: Vec<f32> = numbers.collect();
    let blind = logits.split_off(logits.len() / 2);
    let symbols = bytes[16..16 + tokens].to_vec();
    Fixture { symbols, rows, seen: (count(2), count(3)), logits, blind }
}

/// Logits are sums of some hundred products of numbers around one, three layers deep: what is
/// seen is 3e-5. Torch computed in f64.
const BOUND: f32 = 2e-4;

fn compare(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len());
    let most = got.iter().zip(wanted).fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    let size = wanted.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    println!("{what}: off by {most:e}, logits up to {size}");
    assert!(most < BOUND, "{what}: off by {most}");
}

fn check(name: &str, form: Form) {
    let Fixture { symbols, rows, seen, logits, blind } = fixture(name);
    let model = Model::trained(name).expect("a model");
    let mut engine = Engine::in_memory(&model, form, 32, Policies::default()).expect("a model");
    // Some in the prompt, some one by one.
    let (prompt, written) = symbols.split_at(symbols.len() - rows / 2);
    let mut got = engine.prompt(prompt, rows - rows / 2).expect("a prompt");
    for &symbol in written {
        got.extend(engine.next(symbol).expect("a token"));
    }
    compare(&format!("{name} {form:?}"), &got, &logits);
    // With most tokens evicted.
    let (prompt, written) = symbols.split_at(symbols.len() - rows);
    let mut engine = Engine::in_memory(&model, form, 32, Policies::default()).expect("a model");
    engine.prompt(prompt, 1).expect("a prompt");
    let first = prompt.len() as u32;
    let mut keep = RetainedTokens::default();
    keep.heads.push((0..seen.0).chain(first - seen.1..first));
    for layer in 0..engine.shape.layers {
        engine.retain(layer, &keep).expect("known tokens");
    }
    let next = written.iter().map(|&symbol| engine.next(symbol).expect("a token"));
    let got: Vec<f32> = next.flatten().collect();
    compare(&format!("{name} {form:?}, most evicted"), &got, &blind);
    assert!(logits != blind, "evicted tokens do not matter");
}

#[test]
fn llama_logits_match_torch() {
    check("gqa", Form::Split);
}

#[test]
fn latent_attention_logits_match_torch() {
    check("mla", Form::Latent);
}

#[test]
fn expanded_latent_attention_logits_match_torch() {
    check("mla", Form::Expanded);
}
