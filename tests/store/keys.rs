//! Keys, compared with vectors that an independent program made from `docs/internals/keys.md`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvtier::format::codec::Codec;
use kvtier::format::keys::block::BlockKeys;
use kvtier::format::keys::chain::{Chain, Media};
use kvtier::format::keys::identity::{Extra, Identity, Shard};
use kvtier::format::keys::media::{self, Medium};
use kvtier::format::keys::object::{LayerRange, ObjectKeys};
use kvtier::format::keys::private::private_key;
use kvtier::format::keys::{Digest, Fingerprint, Key};
use kvtier::meta::layout::{Layout, Rule};
use kvtier::tier::remote::name::{Names, Prefix};
use serde_json::Value;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn vectors() -> Value {
    let text = std::fs::read_to_string(at("tests/data/keys.json")).expect("vectors");
    serde_json::from_str(&text).expect("JSON")
}

fn cases<'a>(vectors: &'a Value, kind: &str) -> &'a [Value] {
    let cases = vectors[kind].as_array().expect("an array");
    assert!(!cases.is_empty(), "no {kind}");
    cases
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn small(value: &Value) -> u32 {
    u32::try_from(number(value)).expect("32 bits")
}

fn bytes(value: &Value) -> Vec<u8> {
    let digits = text(value).as_bytes();
    assert!(digits.len() % 2 == 0, "{value}");
    let digit = |d: u8| char::from(d).to_digit(16).expect("hexadecimal") as u8;
    digits.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn digest(value: &Value) -> Digest {
    bytes(value).try_into().unwrap_or_else(|_| panic!("{value} has not 32 bytes"))
}

fn tokens(case: &Value) -> Vec<u32> {
    let [first, step] = ["first", "step"].map(|name| small(&case["tokens"][name]));
    let count = small(&case["tokens"]["count"]);
    (0..count).map(|i| first.wrapping_add(i.wrapping_mul(step))).collect()
}

#[test]
fn layout_fingerprints_match_the_vectors() {
    for case in cases(&vectors(), "layouts") {
        let bytes = bytes(&case["bytes"]);
        let found = Fingerprint::of(&bytes);
        assert_eq!(found.to_string(), text(&case["fingerprint"]), "{}", case["name"]);
        if case["layout"].is_null() {
            continue;
        }
        let layout = Layout::decode(&bytes).expect("canonical bytes");
        assert_eq!(Fingerprint::of(&layout.encode()), found);
        assert_eq!(layout.chunk_tokens(), small(&case["layout"]["chunk_tokens"]));
        let wanted = case["layout"]["groups"].as_array().expect("an array");
        assert_eq!(layout.groups().len(), wanted.len(), "{}", case["name"]);
        for wanted in wanted {
            let number = |name: &str| wanted.get(name).map_or(0, number);
            let layers: Vec<u64> =
                wanted["layers"].as_array().expect("an array").iter().map(self::number).collect();
            let group = layout.group(layers[0] as usize).expect("a group");
            assert_eq!(group.layers.iter().map(|&l| u64::from(l)).collect::<Vec<_>>(), layers);
            assert_eq!(group.dtype.name(), text(&wanted["dtype"]));
            let rule = match text(&wanted["rule"]) {
                "full" => Rule::Full,
                "window" => Rule::Window(number("window") as u32),
                other => {
                    assert_eq!(other, "state");
                    Rule::State
                }
            };
            assert_eq!(group.rule, rule);
            assert_eq!(u64::from(group.kv_heads), number("kv_heads"));
            let sizes = [group.k_bytes, group.v_bytes, group.state_bytes];
            assert_eq!(sizes, ["k_bytes", "v_bytes", "state_bytes"].map(number));
        }
    }
}

#[test]
fn namespace_keys_match_the_vectors() {
    let vectors = vectors();
    let context = text(&vectors["contexts"]["namespace"]);
    let mut keys = BTreeSet::new();
    for case in cases(&vectors, "identities") {
        let field = |name: &str| case["fields"].get(name).map(bytes);
        let [model, weights, lora] = ["model", "weights", "lora"].map(field);
        let [media, salt, recipe] = ["media", "salt", "recipe"].map(field);
        let extra: Vec<(u32, Vec<u8>)> = case["extra"]
            .as_array()
            .expect("an array")
            .iter()
            .map(|extra| (small(&extra[0]), bytes(&extra[1])))
            .collect();
        let extra: Vec<Extra> =
            extra.iter().map(|(tag, value)| Extra { tag: *tag, value }).collect();
        let known = ["model", "weights", "layout", "lora", "media", "salt", "shard", "recipe"];
        let fields = case["fields"].as_object().expect("an object");
        assert!(fields.keys().all(|name| known.contains(&name.as_str())), "{}", case["name"]);
        let identity = Identity {
            model: model.as_deref(),
            weights: weights.as_deref(),
            layout: case["fields"].get("layout").map(|value| Fingerprint(digest(value))),
            lora: lora.as_deref(),
            media: media.as_deref(),
            salt: salt.as_deref(),
            shard: case["fields"]
                .get("shard")
                .map(|shard| Shard { index: small(&shard[0]), count: small(&shard[1]) }),
            recipe: recipe.as_deref(),
            extra: &extra,
        };
        let key = identity.key().expect("valid");
        assert_eq!(key.to_string(), text(&case["key"]), "{}", case["name"]);
        assert_eq!(key.0, blake3::derive_key(context, &bytes(&case["material"])));
        keys.insert(key);
    }
    // Two cases differ only in the order of extra fields.
    assert_eq!(keys.len(), cases(&vectors, "identities").len() - 1);
}

#[test]
fn chunk_keys_match_the_vectors() {
    let vectors = vectors();
    let mut sizes = BTreeSet::new();
    for case in cases(&vectors, "chains") {
        let each = small(&case["chunk_tokens"]);
        let tokens = tokens(case);
        let media: Vec<Media> = case["media"]
            .as_array()
            .expect("an array")
            .iter()
            .map(|media| Media { chunk: number(&media[0]), digest: digest(&media[1]) })
            .collect();
        let mut chain = Chain::new(Key(digest(&case["namespace"])), each).expect("a size");
        let mut keys = Vec::new();
        let used = chain.extend(&tokens, &media, &mut keys).expect("room");
        let wanted = case["keys"].as_array().expect("an array");
        let found: Vec<String> = keys.iter().map(Key::to_string).collect();
        assert_eq!(found, wanted.iter().map(text).collect::<Vec<_>>(), "{}", case["name"]);
        assert_eq!(used, wanted.len() * each as usize);
        if keys.len() > 8 || each == 65_536 {
            sizes.insert(each);
        }
    }
    let needed = [1, 16, 32, 64, 128, 255, 256, 257, 512, 768, 1024, 2048, 2304, 65_536];
    assert!(needed.iter().all(|size| sizes.contains(size)), "only {sizes:?}");
}

#[test]
fn media_digests_match_the_vectors() {
    let vectors = vectors();
    let pairs = |value: &Value| -> Vec<(u64, [u8; 32])> {
        let rows = value.as_array().expect("an array").iter();
        rows.map(|row| (number(&row[0]), digest(&row[1]))).collect()
    };
    for case in cases(&vectors, "media") {
        let media: Vec<Medium> = pairs(&case["media"])
            .into_iter()
            .map(|(token, digest)| Medium { token, digest })
            .collect();
        let found = media::extras(&media, small(&case["chunk_tokens"])).expect("few");
        let found: Vec<_> = found.into_iter().map(|m| (m.chunk, m.digest)).collect();
        assert_eq!(found, pairs(&case["extras"]), "{}", case["name"]);
    }
}

#[test]
fn private_chunk_keys_match_the_vectors() {
    let vectors = vectors();
    let context = text(&vectors["contexts"]["private"]);
    for case in cases(&vectors, "private") {
        let parent = Key(digest(&case["parent"]));
        let extra = (!case["extra"].is_null()).then(|| digest(&case["extra"]));
        let session = bytes(&case["session"]);
        let key = private_key(&parent, &session, &tokens(case), extra.as_ref()).expect("valid");
        assert_eq!(key.to_string(), text(&case["key"]), "{}", case["name"]);
        assert_eq!(key.0, blake3::derive_key(context, &bytes(&case["material"])));
    }
}

#[test]
fn block_keys_match_the_vectors() {
    let vectors = vectors();
    let context = text(&vectors["contexts"]["block"]);
    for case in cases(&vectors, "blocks") {
        let keys = BlockKeys::new(&Key(digest(&case["namespace"])));
        let key = keys.key(&bytes(&case["block"])).expect("a name");
        assert_eq!(key.to_string(), text(&case["key"]), "{}", case["name"]);
        assert_eq!(key.0, blake3::derive_key(context, &bytes(&case["material"])));
    }
}

#[test]
fn remote_object_names_match_the_vectors() {
    let vectors = vectors();
    let context = |name: &str| text(&vectors["contexts"][name]).to_string();
    for case in cases(&vectors, "objects") {
        let secret = (!case["secret"].is_null()).then(|| bytes(&case["secret"]));
        let keys = || {
            let layout = Fingerprint(digest(&case["layout"]));
            ObjectKeys::new(&Key(digest(&case["namespace"])), &layout, secret.as_deref())
        };
        let cut = LayerRange {
            object_bytes: number(&case["object_bytes"]),
            first: small(&case["first"]),
            layers: small(&case["layers"]),
        };
        let (chunk, sealed) = (Key(digest(&case["chunk"])), small(&case["sealed"]) == 1);
        let codec = small(&case["codec"]) as u8;
        let key = keys().key(&chunk, &cut, codec, sealed);
        assert_eq!(Key(key).to_string(), text(&case["key"]), "{}", case["title"]);
        let material = bytes(&case["material"]);
        let wanted = match &secret {
            None => blake3::derive_key(&context("object"), &material),
            Some(secret) => {
                let key = blake3::derive_key(&context("object secret"), secret);
                *blake3::keyed_hash(&key, &material).as_bytes()
            }
        };
        assert_eq!(key, wanted);
        let codec = Codec::from_code(codec).expect("a codec");
        let name = Names::new(keys(), 0, codec, sealed).name(&chunk, &cut);
        let mut written = Vec::new();
        Prefix::new("kvt").expect("a prefix").write(&name, &mut written);
        assert_eq!(written, format!("kvt/v1/{}", text(&case["name"])).into_bytes());
    }
}

fn strings(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::String(text) => drop(found.insert(text.clone())),
        Value::Array(values) => values.iter().for_each(|value| strings(value, found)),
        Value::Object(values) => values.values().for_each(|value| strings(value, found)),
        _ => {}
    }
}

#[test]
fn documented_examples_are_vectors() {
    let page = std::fs::read_to_string(at("docs/internals/keys.md")).expect("the page of keys");
    let mut known = BTreeSet::new();
    strings(&vectors(), &mut known);
    // Blocks of hexadecimal text. Each part between empty lines is a vector, or each of its lines
    // is.
    let mut count = 0;
    // The first line of a block names its language.
    let blocks = page.split("```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    for part in blocks.flat_map(|(_, block)| block.split("\n\n")) {
        let whole: String = part.split_whitespace().collect();
        if !whole.bytes().all(|b| b.is_ascii_hexdigit()) {
            continue;
        }
        if !known.contains(&whole) {
            let lines = part.trim().lines();
            lines.for_each(|line| assert!(known.contains(line), "{line} is no vector"));
        }
        count += 1;
    }
    assert!(count >= 8, "{count} examples");
    for context in vectors()["contexts"].as_object().expect("an object").values() {
        assert!(page.contains(text(context)), "{context}");
    }
}

/// Runs the oracle on a file. Returns whether all vectors agree, or None without the oracle or
/// Python.
fn oracle(file: &Path) -> Option<bool> {
    let script = at("ffi-tests/oracles/keys.py");
    let run = Command::new("python3").arg(&script).arg("--check").arg(file).output();
    match run {
        Ok(run) if script.exists() => Some(run.status.success()),
        _ => None,
    }
}

#[test]
fn python_oracle_matches_the_vectors() {
    let Some(agrees) = oracle(&at("tests/data/keys.json")) else {
        println!("SKIP: no python3, or no ffi-tests");
        return;
    };
    assert!(agrees);
    // The oracle detects a wrong vector.
    let mut wrong = vectors();
    let key = &mut wrong["chains"][0]["keys"][1];
    *key = Value::String(text(key).replace(['0', '1'], "2"));
    let file = std::env::temp_dir().join(format!("kvtier-keys-{}.json", std::process::id()));
    std::fs::write(&file, wrong.to_string()).expect("a file");
    let agrees = oracle(&file);
    std::fs::remove_file(&file).expect("the file");
    assert_eq!(agrees, Some(false));
}

/// `cargo test --release --test store keys:: -- --ignored --nocapture`
#[test]
#[ignore = "measures"]
fn measure_keys_of_a_long_prompt() {
    let tokens: Vec<u32> = (0..131_072u32).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect();
    let mut keys = Vec::with_capacity(tokens.len());
    let time = |run: &mut dyn FnMut()| {
        let mut times: Vec<u128> = (0..401)
            .map(|_| {
                let start = std::time::Instant::now();
                run();
                start.elapsed().as_nanos()
            })
            .collect();
        times.sort_unstable();
        (times[0] as f64 / 1e3, times[200] as f64 / 1e3)
    };
    for each in [16, 32, 64, 128, 255, 256, 257, 512, 1024, 2048, 4096] {
        let (best, median) = time(&mut || {
            keys.clear();
            let mut chain = Chain::new(Key([1; 32]), each).expect("a size");
            chain.extend(&tokens, &[], &mut keys).expect("room");
        });
        let raw: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let (_, plain) = time(&mut || {
            let mut key = [1; 32];
            for chunk in raw.chunks_exact(each as usize * 4) {
                let pair = [key, *blake3::hash(chunk).as_bytes()];
                key = *blake3::hash(pair.as_flattened()).as_bytes();
            }
            std::hint::black_box(key);
        });
        println!(
            "128k tokens, chunks of {each}: median {median:.0} us, best {best:.0} us; \
             with the public functions {plain:.0} us"
        );
    }
}
