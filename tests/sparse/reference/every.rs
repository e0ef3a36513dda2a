//! Every registered policy drives the reference engine, with every form of keys. Unsupported
//! combinations are rejected with a reason.

use kvtier::base::status::Status;
use kvtier::sparse::{Index, RetainedTokens, Shape, caps, registry};

use crate::reference::attend::context;
use crate::reference::engine::Engine;
use crate::reference::model::{Form, Model, Sizes};
use crate::reference::policies::{Policies, make};
use crate::reference::rows::contiguous;
use kvtier_lab::reference::numbers::{Random, greatest};

const PROMPT: usize = 200;
const WRITTEN: usize = 64;
const BLOCK: u32 = 16;

/// A spec of each policy that leaves something out of `PROMPT` tokens; none for a name that is
/// not known here.
pub fn small(name: &str, shape: &Shape) -> Option<String> {
    let spec = match name {
        "adakv" => "adakv(budget=64, window=16)".into(),
        "arkvale" => "arkvale(budget=96, page=16, dense=0)".into(),
        "dsa" => {
            let (heads, dim) = (shape.query_heads, shape.key_heads * shape.key_dim);
            format!("dsa(topk=48, heads={heads}, dim={dim}, state=f32, load=true)")
        }
        "duo" => {
            let alpha = (0..shape.layers * shape.key_heads).map(|at| format!("0.{}", at % 10));
            let alpha: Vec<String> = alpha.collect();
            format!("duo(alpha=\"{}\", sink=4, recent=40)", alpha.join(" "))
        }
        "external" => "external(topk=3)".into(),
        "flexprefill" => "flexprefill(block=32, gamma=0.5)".into(),
        "full" => "full".into(),
        "h2o" => "h2o(sink=4, recent=16, budget=40)".into(),
        "keydiff" => "keydiff(budget=64)".into(),
        "knorm" => "knorm(budget=64)".into(),
        "minference" => "minference(budget=0.3, sinks=4, recent=8)".into(),
        "predict" => "predict(of=quest(budget=64, dense=0), audit=true)".into(),
        "pyramidkv" => "pyramidkv(budget=64, window=16)".into(),
        "quest" => "quest(budget=64, dense=0)".into(),
        "snapkv" => "snapkv(budget=64, window=16)".into(),
        "streaming" => "streaming(sinks=4, recent=48)".into(),
        "tova" => "tova(budget=64)".into(),
        "xattention" => "xattention(block=32, tau=0.5)".into(),
        _ => return None,
    };
    Some(spec)
}

/// Result of a run.
struct Run {
    logits: Vec<f32>,
    /// The most keys that a head has in the end, in the mean of heads.
    kept: f64,
    read: u64,
}

fn models() -> Vec<(Model, Form)> {
    vec![
        (Model::random(Sizes::llama(2, 4, 2, 16), 21), Form::Split),
        (Model::random(Sizes::mla(2, 4, 24), 22), Form::Latent),
        (Model::random(Sizes::mla(2, 4, 24), 22), Form::Expanded),
    ]
}

/// A prompt in two parts, and tokens that the model writes behind it.
fn run(model: &Model, form: Form, policies: Policies) -> kvtier::base::status::Result<Run> {
    let mut random = Random::new(31);
    let symbols: Vec<u8> = (0..PROMPT).map(|_| random.below(96) as u8).collect();
    let mut engine = Engine::in_memory(model, form, BLOCK, policies)?;
    let mut logits = engine.compute(&symbols, PROMPT - 72, 1)?;
    engine.settle(72)?;
    for _ in 0..WRITTEN {
        let last = &logits[logits.len() - 96..];
        let next = engine.next(greatest(last) as u8)?;
        logits.extend(next);
    }
    let kept = (0..model.layers.len() as u32).map(|layer| engine.cache.retained_share(layer));
    Ok(Run { logits, kept: kept.fold(0.0, f64::max), read: engine.read })
}

#[test]
fn every_registered_policy_runs_on_the_reference_model() {
    for (model, form) in &models() {
        let shape = model.shape(*form, BLOCK);
        let full = run(model, *form, Policies::default()).expect("no policy");
        for name in registry::ENTRIES.iter().map(|entry| entry.name) {
            let spec = small(name, &shape).unwrap_or_else(|| panic!("{name} is not known here"));
            let policy = make(&spec, &shape);
            let policy = policy.unwrap_or_else(|error| panic!("{spec}: {}", error.message()));
            let traits = policy.traits();
            let run = run(model, *form, Policies::single(policy));
            let run = run.unwrap_or_else(|error| panic!("{form:?} {spec}: {}", error.message()));
            assert!(run.logits.iter().all(|x| x.is_finite()), "{form:?} {spec}");
            if name == "full" {
                assert_eq!(run.logits, full.logits);
                continue;
            }
            assert!(run.logits != full.logits, "{form:?} {spec} leaves nothing out");
            let evicts = caps::EVICT_PREFILL | caps::EVICT_DECODE;
            if traits.caps & evicts != 0 && !traits.is_ragged {
                // The tokens that one eviction keeps, and the tokens since.
                assert!(run.kept <= 120.0 + WRITTEN as f64, "{spec} keeps {}", run.kept);
            }
            if traits.requires_block_selection && traits.caps & caps::LOAD_DECODE != 0 {
                // Tokens that are chosen one by one lie in nearly all blocks.
                let most = if traits.rows.is_some() { full.read } else { full.read * 7 / 8 };
                assert!(run.read < most, "{spec} reads {} of {}", run.read, full.read);
            }
        }
    }
}

#[test]
fn prefill_and_decode_policies_combine() {
    let (model, form) = (Model::random(Sizes::llama(2, 4, 2, 16), 21), Form::Split);
    let shape = model.shape(form, BLOCK);
    let of = |name| make(&small(name, &shape).expect("known"), &shape).expect("a policy");
    for (prompt, behind) in [
        ("minference", "quest"),
        ("xattention", "streaming"),
        ("flexprefill", "duo"),
        ("minference", "keydiff"),
        // Tokens that prompt policies leave out get no attention.
        ("minference", "h2o"),
        ("xattention", "tova"),
        ("snapkv", "quest"),
        ("snapkv", "h2o"),
        ("external", "quest"),
    ] {
        let two = run(&model, form, Policies::prompt_and_decode(of(prompt), of(behind)));
        let two = two.unwrap_or_else(|error| panic!("{prompt} {behind}: {}", error.message()));
        assert!(two.logits.iter().all(|x| x.is_finite()), "{prompt} {behind}");
        // Each of them leaves its mark.
        for name in [prompt, behind] {
            let one = run(&model, form, Policies::single(of(name))).expect("it runs alone");
            assert!(one.logits != two.logits, "{name} alone is {prompt} and {behind}");
        }
    }
}

#[test]
fn invalid_combinations_are_rejected_with_a_reason() {
    let (model, form) = (Model::random(Sizes::llama(2, 4, 2, 16), 21), Form::Split);
    let shape = model.shape(form, BLOCK);
    let of = |spec: &str| make(spec, &shape).expect("a policy");
    let fails = |policies: Policies| match run(&model, form, policies) {
        Ok(_) => None,
        Err(error) => Some((error.status(), error.message().to_owned())),
    };
    // Query heads that keep tokens of their own need keys of their own.
    let original = fails(Policies::single(of("snapkv(budget=64, window=16, form=original)")));
    assert_eq!(original.expect("refused").0, Status::Unsupported);
    // Sums are of attention to all keys, or to those of an index.
    let blind = fails(Policies::prompt_and_decode(of("external(topk=2)"), of("h2o(budget=40)")));
    assert_eq!(blind.expect("refused").0, Status::Unsupported);
    // Attention over heads that keep different numbers of tokens yields no sums for others.
    let ragged = of("adakv(budget=64, window=16)");
    assert!(fails(Policies::prompt_and_decode(ragged, of("h2o(budget=40)"))).is_some());
}

#[test]
fn unsupported_policy_calls_are_rejected_or_ignored() {
    let shape = Model::random(Sizes::llama(2, 4, 2, 16), 21).shape(Form::Split, BLOCK);
    let numbers = vec![0.5; 4 * 16 * 32];
    let keys = contiguous(&numbers[..2 * 16 * 32], 2, 16).expect("rows");
    for name in registry::ENTRIES.iter().map(|entry| entry.name) {
        for is_prefill in [true, false] {
            let mut policy = make(&small(name, &shape).expect("known"), &shape).expect("made");
            let own = policy.traits().caps;
            if policy.traits().rows.is_some() {
                // It has no answer before it has keys.
                continue;
            }
            let count = if is_prefill { 32 } else { 1 };
            let queries = contiguous(&numbers[..4 * 16 * count], 4, 16).expect("rows");
            let context = context(is_prefill, (0, 1), 32 - count as u32, 32);
            let by = |prefill, decode| if is_prefill { prefill } else { decode };
            if own & by(caps::INDEX_PREFILL, caps::INDEX_DECODE) == 0 {
                let mut index = Index::default();
                match policy.index(0, &queries, Some(&keys), &context, &mut index) {
                    Ok(()) => assert!(index.is_dense(), "{name}: an index"),
                    Err(error) => assert_eq!(error.status(), Status::Unsupported, "{name}"),
                }
            }
            if own & by(caps::EVICT_PREFILL, caps::EVICT_DECODE) == 0 {
                let mut keep = RetainedTokens::default();
                match policy.evict(0, &context, &mut keep) {
                    Ok(has) => assert!(!has, "{name} evicts"),
                    Err(error) => assert_eq!(error.status(), Status::Unsupported, "{name}"),
                }
            }
            if own & by(caps::LOAD_PREFILL, caps::LOAD_DECODE) == 0 {
                let mut out = Vec::new();
                match policy.select(0, Some(&queries), &[1, 0], &context, &mut out) {
                    Ok(()) => assert_eq!(out, [0, 1], "{name}: a selection"),
                    Err(error) => assert_eq!(error.status(), Status::Unsupported, "{name}"),
                }
            }
        }
    }
}
