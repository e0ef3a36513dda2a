//! `kvtier lab sparse` reports the results of the reference engine: each policy alone, from
//! the first token on, with no prompt shared.

use std::process::{Command, Output};

use kvtier::sparse::{Sparse, caps};

use kvtier_lab::reference::chance::RandomEviction;
use kvtier_lab::reference::engine::Engine;
use kvtier_lab::reference::model::{Form, Model};
use kvtier_lab::reference::numbers::{Random, greatest, loss};
use kvtier_lab::reference::policies::{Policies, make};
use kvtier_lab::reference::text::{Text, is_plain, questions};

const BLOCK: u32 = 16;
const LENGTH: usize = 400;
/// Seed of the run; a text's seed adds its number.
const SEED: u64 = 3_000_000;

fn lab(args: &[&str]) -> Output {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_kvtier"));
    tool.args(["lab", "sparse"]).args(args).output().expect("the tool starts")
}

/// The fields of a line; those in quotes may have commas and quotes in them.
fn fields(line: &str) -> Vec<String> {
    let (mut out, mut is_quoted) = (vec![String::new()], false);
    for c in line.chars() {
        match c {
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => out.push(String::new()),
            c => out.last_mut().expect("one").push(c),
        }
    }
    out
}

/// The written table, without durations.
struct Table {
    names: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn of(text: &str) -> Table {
        let mut lines = text.lines().map(fields);
        let names = lines.next().expect("names");
        let rows: Vec<Vec<String>> = lines.collect();
        assert!(rows.iter().all(|row| row.len() == names.len()), "{text}");
        Table { names, rows }
    }

    fn text<'a>(&self, row: &'a [String], name: &str) -> &'a str {
        let at = self.names.iter().position(|known| known == name);
        &row[at.unwrap_or_else(|| panic!("no {name}"))]
    }

    fn number(&self, row: &[String], name: &str) -> f64 {
        self.text(row, name).parse().unwrap_or_else(|_| panic!("{name} is no number: {row:?}"))
    }
}

/// A policy alone, from the first token on.
fn plain<'m>(
    model: &'m Model,
    form: Form,
    spec: &str,
    prompt: &[u8],
) -> (Engine<'m, kvtier_lab::reference::cache::InMemory>, Vec<f32>) {
    let shape = model.shape(form, BLOCK);
    let policy: Box<dyn Sparse> = match spec {
        "random(budget=64)" => Box::new(RandomEviction::new(&shape, 64, 32, 5)),
        spec => make(spec, &shape).expect("a policy"),
    };
    let mut engine =
        Engine::in_memory(model, form, BLOCK, Policies::single(policy)).expect("it can");
    let logits = engine.prompt(prompt, 96).expect("a prompt");
    (engine, logits)
}

/// Right answers, and the share of all bytes.
fn answered(model: &Model, form: Form, spec: &str) -> (usize, f64) {
    let mut random = Random::new(SEED + 1000);
    let text = Text::new(&mut random, LENGTH, 24);
    let before = text.some(&mut random, 24);
    let again = text.some(&mut random, 24);
    let prompt = [text.symbols.as_slice(), &questions(&before)].concat();
    let (mut engine, _) = plain(model, form, spec, &prompt);
    let mut right = 0;
    for (key, value) in again {
        let [mark, key] = questions(&[(key, value)]).try_into().expect("two symbols");
        engine.next(mark).expect("a token");
        let logits = engine.next(key).expect("a token");
        right += usize::from(greatest(&logits) == usize::from(value));
    }
    let layers = engine.shape.layers;
    let is_loaded = engine.policies.all[0].traits.requires_block_selection
        && engine.policies.all[0].traits.caps & caps::LOAD_DECODE != 0;
    let all = LENGTH as u32 + 96;
    let bytes = match is_loaded {
        true => engine.read as f64 / f64::from((all - 47..=all).sum::<u32>() * layers),
        false => {
            let retained: f64 = (0..layers).map(|layer| engine.cache.retained_share(layer)).sum();
            retained / f64::from(layers) / f64::from(all)
        }
    };
    (right, bytes)
}

/// Perplexity of the last symbols of the prompt, and after the prompt.
fn foreseen(model: &Model, form: Form, spec: &str) -> (f64, f64) {
    let symbols = Text::new(&mut Random::new(SEED + 70), LENGTH, 12).symbols;
    let (prompt, rest) = symbols.split_at(LENGTH - 200);
    let (mut engine, logits) = plain(model, form, spec, prompt);
    let rows: Vec<&[f32]> = logits.chunks_exact(model.sizes.vocab).collect();
    let within = rows.iter().zip(&symbols[prompt.len() - 95..prompt.len()]);
    let mut behind = vec![rows[95].to_vec()];
    for &symbol in &rest[..rest.len() - 1] {
        behind.push(engine.next(symbol).expect("a token"));
    }
    let of = |pairs: Vec<(&[f32], &u8)>| {
        let plain: Vec<f64> = pairs
            .into_iter()
            .filter(|(_, symbol)| is_plain(**symbol))
            .map(|(logits, &symbol)| loss(logits, symbol))
            .collect();
        (plain.iter().sum::<f64>() / plain.len() as f64).exp()
    };
    let behind = behind.iter().map(Vec::as_slice).zip(rest).collect();
    (of(within.map(|(row, symbol)| (*row, symbol)).collect()), of(behind))
}

#[test]
fn results_match_the_reference_engine() {
    let dir = std::env::temp_dir().join(format!("kvtier-lab-sparse-{}", std::process::id()));
    let out = dir.join("deep");
    let policies = "quest,snapkv,minference(budget={share}, sinks=4, recent=16)";
    let output = lab(&[
        "--policies",
        policies,
        "--budgets",
        "64",
        "--questions",
        "24",
        "--texts",
        "1",
        "--length",
        &LENGTH.to_string(),
        "--seed",
        "3",
        "--threads",
        "2",
        "--out",
        &out.to_string_lossy(),
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).expect("text");
    assert!(printed.contains("quest") && printed.contains("24 questions"));
    let read = |name: &str| std::fs::read_to_string(out.join(name)).expect("written");
    page(&read("sparse.html"));
    let table = Table::of(&read("sparse.csv"));
    let specs = [
        ("full", "full"),
        ("quest", "quest(budget=64, dense=0, last=always)"),
        ("snapkv", "snapkv(budget=64, window=32)"),
        (
            "minference(budget={share}, sinks=4, recent=16)",
            "minference(budget=0.16, sinks=4, recent=16)",
        ),
        ("random", "random(budget=64)"),
    ];
    let of_models = [("gqa", Form::Split), ("mla", Form::Latent)];
    let expected: Vec<_> =
        of_models.iter().flat_map(|model| specs.iter().map(move |spec| (model, spec))).collect();
    assert_eq!(table.rows.len(), expected.len());
    for (row, ((name, form), (policy, spec))) in table.rows.iter().zip(expected) {
        let model = Model::trained(name).expect("a model");
        assert_eq!((table.text(row, "model"), table.text(row, "policy")), (*name, *policy));
        assert_eq!(table.text(row, "spec"), *spec);
        assert_eq!(table.text(row, "budget"), if *policy == "full" { "" } else { "64" });
        let number = |column| table.number(row, column);
        let (right, bytes) = answered(&model, *form, spec);
        assert_eq!(number("recall"), right as f64 / 24.0, "{name} {spec}");
        assert_eq!((number("questions"), number("bytes")), (24.0, bytes), "{name} {spec}");
        assert!(
            number("recall_low") <= number("recall") && number("recall") <= number("recall_high")
        );
        // Sums are added in another order.
        let (prompt, behind) = foreseen(&model, *form, spec);
        let is_close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(is_close(number("prompt_perplexity"), prompt), "{name} {spec}: {prompt}");
        assert!(is_close(number("perplexity"), behind), "{name} {spec}: {behind}");
        let is_for_prompts = policy.starts_with("minference");
        assert_eq!(number("prompt_keys_seen") < 1.0, is_for_prompts, "{spec}");
        assert!((0.0..=1.0).contains(&number("keys_seen")) && number("seconds") > 0.0);
        let is_full = matches!(*policy, "full") || is_for_prompts;
        assert_eq!(number("keys_seen") == 1.0, is_full, "{spec}");
        assert_eq!(number("bytes") == 1.0, is_full, "{spec}");
    }
    std::fs::remove_dir_all(&dir).expect("ours");
}

/// A self-contained page, with a line for each policy with a budget.
fn page(html: &str) {
    assert!(html.matches("<svg viewBox=\"0 0 720").count() == 6, "three plots a model");
    assert!(html.contains("polyline") && html.ends_with("</html>\n"));
    assert!(html.contains("minference(budget={share}"));
    assert!(!html.contains("NaN"));
    for outside in ["http", "src=", "href=", "@import", "url("] {
        assert!(!html.contains(outside), "{outside}");
    }
}

#[test]
fn invalid_arguments_are_reported_before_measuring() {
    let out = std::env::temp_dir().join(format!("kvtier-lab-none-{}", std::process::id()));
    let path = out.to_string_lossy().into_owned();
    for (args, words) in [
        (&["--policies", "qest"][..], "did you mean 'quest'"),
        (&["--policies", "tova(budget={budget},x=1)"], "gqa: 'tova(budget={budget},x=1)'"),
        (&["--policies", "h2o(heads=each)"], "mla: 'h2o(heads=each)'"),
        (&["--policies", "snapkv(form=original)"], "cannot evict by query head"),
        (&["--budgets", "64,many"], "'many' is not a budget"),
        (&["--budgets", "0"], "'0' is not a budget"),
        (&["--models", "gpt"], "unknown model 'gpt': one of gqa, mla, mla_expanded"),
        (&["--models", "gqa,gqa"], "named twice"),
        (&["--models", ","], "no models"),
        (&["--questions", "0"], "1..=100000"),
        (&["--length", "100"], "400..=4000"),
    ] {
        let output = lab(&[args, &["--quick", "--out", &path]].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(words), "{args:?}: {error}");
    }
    assert!(!out.exists(), "nothing was made");
    let nowhere = lab(&["--quick", "--out", "/dev/null/x"]);
    assert!(!nowhere.status.success());
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("/dev/null/x"));
}
